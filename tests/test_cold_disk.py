"""The cold tier on disk: full, killed, damaged, shared, and bounded."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from kvpager.tiers.cold import ColdStatus
from kvpager.tiers.cold_disk import DiskColdTier
from kvpager.tiers.errors import ConfigError
from kvpager.tiers.record import HEADER_BYTES

OK, MISS, CORRUPT, LATE, UNAVAILABLE, FULL = ColdStatus
Blocks = npt.NDArray[np.uint8]
SPACE = b"space 0123456789"
SIZE = 20_000
ROOM = 20_480
"""What a record of SIZE takes: header and payload, rounded up to 4 KiB."""


def hashes_of(count: int, start: int = 0) -> list[bytes]:
    return [b"%016d" % index for index in range(start, start + count)]


def blocks_of(count: int, size: int = SIZE, seed: int = 0) -> Blocks:
    return np.random.default_rng(seed).integers(0, 256, (count, size), np.uint8)


def views(blocks: Blocks) -> list[memoryview]:
    return [memoryview(block) for block in blocks]


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("[0-9a-f][0-9a-f]/*") if path.is_file())


def file_of(folder: Path, prefix_hash: bytes) -> Path:
    (path,) = folder.glob(f"{prefix_hash[0]:02x}/*{prefix_hash.hex()}.*")
    return path


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskColdTier]:
    # A busy disk may take seconds for what is usually done in one; deadlines have tests of their own.
    opened = DiskColdTier(tmp_path, capacity_bytes=10 * ROOM, deadline=120.0)
    yield opened
    opened.check_integrity()
    opened.close()


def test_records_are_there_after_reopening(tmp_path: Path) -> None:
    blocks, hashes = blocks_of(5), hashes_of(5)
    for sync in (False, True):
        tier = DiskColdTier(tmp_path, capacity_bytes=1 << 20, fsync=sync)
        tier.put(SPACE, hashes, views(blocks))
        tier.put_note(b"note", b"value")
        tier.close()
        tier = DiskColdTier(tmp_path, capacity_bytes=1 << 20)
        into = np.zeros_like(blocks)
        assert not tier.get(SPACE, hashes, views(into)).any()
        assert np.array_equal(into, blocks)
        assert tier.get_note(b"note") == (OK, b"value")
        assert tier.used_bytes() == 5 * ROOM + 4096
        tier.delete(SPACE, hashes)
        tier.close()


def test_the_least_recently_used_records_make_room(tier: DiskColdTier, tmp_path: Path) -> None:
    blocks = blocks_of(15)
    for index in range(10):  # one by one: those of one call are written at once, in no order
        assert not tier.put(SPACE, hashes_of(1, index), views(blocks[index : index + 1])).any()
    assert tier.used_bytes() == 10 * ROOM
    # Read, and put again: both count as use.
    tier.get(SPACE, hashes_of(2), views(np.zeros_like(blocks[:2])))
    tier.put(SPACE, hashes_of(1, 2), views(blocks[2:3]))
    for index in range(10, 14):
        tier.put(SPACE, hashes_of(1, index), views(blocks[index : index + 1]))
        tier.check_integrity()
    assert np.flatnonzero(tier.contains(SPACE, hashes_of(14))).tolist() == [0, 1, 2, 7, 8, 9, 10, 11, 12, 13]
    assert tier.stats.evicted == 4
    assert sum(path.stat().st_size for path in files_of(tmp_path)) <= 10 * ROOM
    kept = [0, 1, 2, 7, 8, 9, 10, 11, 12, 13]
    into = np.zeros((10, SIZE), np.uint8)
    assert not tier.get(SPACE, [hashes_of(14)[index] for index in kept], views(into)).any()
    assert np.array_equal(into, blocks[kept])


def test_files_are_handed_on_between_records_of_different_sizes(tier: DiskColdTier) -> None:
    for turn, size in enumerate((150_000, 10, 60_000, 5_000, 150_000, 100)):
        blocks, hashes = blocks_of(3, size, turn), hashes_of(3, 100 * turn)
        for index in range(3):
            assert tier.put(SPACE, hashes[index : index + 1], views(blocks[index : index + 1])).tolist() == [
                OK
            ]
            into = np.zeros((1, size), np.uint8)
            assert tier.get(SPACE, hashes[index : index + 1], views(into)).tolist() == [OK]
            assert np.array_equal(into[0], blocks[index])
            tier.check_integrity()


def test_the_order_of_use_and_a_smaller_capacity_hold_after_reopening(tmp_path: Path) -> None:
    tier = DiskColdTier(tmp_path, capacity_bytes=10 * ROOM)
    tier.put(SPACE, hashes_of(6), views(blocks_of(6)))
    tier.close()
    for index, prefix_hash in enumerate(hashes_of(6)):
        os.utime(file_of(tmp_path, prefix_hash), (index, (index + 3) % 6))
    tier = DiskColdTier(tmp_path, capacity_bytes=3 * ROOM)
    assert tier.used_bytes() == 3 * ROOM
    assert np.flatnonzero(tier.contains(SPACE, hashes_of(6))).tolist() == [0, 1, 2]
    tier.close()


def test_a_record_larger_than_the_capacity_is_full_and_drops_nothing(tier: DiskColdTier) -> None:
    tier.put(SPACE, hashes_of(5), views(blocks_of(5)))
    assert tier.put(SPACE, hashes_of(1, 9), views(blocks_of(1, 11 * ROOM))).tolist() == [FULL]
    assert tier.contains(SPACE, hashes_of(5)).all()
    assert tier.stats.full == 1


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 1234] ^= 4
    path.write_bytes(data)


def flip_magic(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 4
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, 5000)


def truncate_to_nothing(path: Path) -> None:
    os.truncate(path, 0)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def swap_for_another(path: Path) -> None:
    other = next(each for each in path.parent.iterdir() if each != path and len(each.name) == len(path.name))
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize(
    "damage", [flip, flip_magic, truncate, truncate_to_nothing, lengthen, swap_for_another]
)
@pytest.mark.parametrize("reopened", [False, True])
def test_a_damaged_record_is_corrupt_counted_and_removed(
    tmp_path: Path, damage: Callable[[Path], None], reopened: bool
) -> None:
    tier = DiskColdTier(tmp_path, capacity_bytes=1 << 20)
    blocks, hashes = blocks_of(3), hashes_of(3)
    tier.put(SPACE, hashes, views(blocks))
    damage(file_of(tmp_path, hashes[1]))
    if reopened:
        tier.close()
        tier = DiskColdTier(tmp_path, capacity_bytes=1 << 20)
    into = np.zeros_like(blocks)
    assert tier.get(SPACE, hashes, views(into)).tolist() == [OK, CORRUPT, OK]
    assert np.array_equal(into[[0, 2]], blocks[[0, 2]])
    assert tier.stats.corrupt == 1
    assert len(files_of(tmp_path)) == 2
    assert tier.used_bytes() == 2 * ROOM
    tier.check_integrity()
    assert not tier.put(SPACE, hashes, views(blocks)).any()
    assert not tier.get(SPACE, hashes, views(into)).any()
    tier.close()


def make_unreadable(path: Path, how: str) -> None:
    """Have every read of a record fail, as a bad sector or wrong permissions would."""
    if how == "permissions":
        path.chmod(0)
        return
    path.unlink()
    if how == "folder":
        path.mkdir()
    else:
        # Reading this process's memory at address 0 is an I/O error; a link to itself is none of a file.
        path.symlink_to({"I/O error": "/proc/self/mem", "loop": path.name}[how])


@pytest.mark.parametrize("how", ["I/O error", "loop", "folder", "permissions"])
@pytest.mark.parametrize("note", [False, True])
def test_a_record_that_cannot_be_read_is_counted_and_the_next_put_writes_it_again(
    tmp_path: Path, how: str, note: bool
) -> None:
    if how == "permissions" and os.geteuid() == 0:
        pytest.skip("root reads files of any mode")
    tier = DiskColdTier(tmp_path, capacity_bytes=1 << 20)
    blocks, hashes = blocks_of(2), hashes_of(2)
    tier.put(SPACE, hashes, views(blocks))
    into = np.zeros_like(blocks)
    if note:
        assert tier.put_note(b"note", b"value") == OK
        (path,) = set(files_of(tmp_path)) - {file_of(tmp_path, name) for name in hashes}
        make_unreadable(path, how)
        assert tier.get_note(b"note") == (CORRUPT, b"")
        assert tier.get_note(b"note") == (MISS, b"")
    else:
        make_unreadable(file_of(tmp_path, hashes[1]), how)
        assert tier.get(SPACE, hashes, views(into)).tolist() == [OK, CORRUPT]
        assert tier.contains(SPACE, hashes).tolist() == [True, False]
        assert tier.get(SPACE, hashes, views(into)).tolist() == [OK, MISS]
    assert (tier.stats.corrupt, tier.stats.unavailable) == (1, 0)
    assert tier.used_bytes() == (2 if note else 1) * ROOM
    tier.check_integrity()
    assert not tier.put(SPACE, hashes, views(blocks)).any()
    assert not tier.get(SPACE, hashes, views(into)).any()
    assert np.array_equal(into, blocks)
    assert tier.put_note(b"note", b"again") == OK
    assert tier.get_note(b"note") == (OK, b"again")
    tier.close()
    # Nothing that is left keeps it from being opened again.
    DiskColdTier(tmp_path, capacity_bytes=1 << 20).close()


def test_what_was_found_damaged_or_not_is_written_again_until_it_was_read(tmp_path: Path) -> None:
    blocks, hashes = blocks_of(3), hashes_of(3)
    tier = DiskColdTier(tmp_path, capacity_bytes=1 << 20)
    assert not tier.put(SPACE, hashes, views(blocks)).any()
    tier.close()
    for prefix_hash in hashes[:2]:
        path = file_of(tmp_path, prefix_hash)
        data = bytearray(path.read_bytes())
        data[5000] ^= 1
        path.write_bytes(data)
    tier = DiskColdTier(tmp_path, capacity_bytes=1 << 20)
    into = np.zeros_like(blocks)
    assert tier.get(SPACE, hashes[2:], views(into[2:])).tolist() == [OK]
    before = [file_of(tmp_path, prefix_hash).stat().st_ino for prefix_hash in hashes]
    assert not tier.put(SPACE, hashes, views(blocks)).any()
    after = [file_of(tmp_path, prefix_hash).stat().st_ino for prefix_hash in hashes]
    assert [was != now for was, now in zip(before, after, strict=True)] == [True, True, False]
    assert not tier.get(SPACE, hashes, views(into)).any()
    assert np.array_equal(into, blocks)
    assert tier.used_bytes() == 3 * ROOM
    tier.check_integrity()
    tier.close()


def test_a_record_is_kept_where_it_is_this_process_that_cannot_read(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _NO_DESCRIPTORS, str(tmp_path)], check=False)
    assert done.returncode == 0


_NO_DESCRIPTORS = """
import resource, sys
from kvpager.tiers.cold_disk import DiskColdTier
tier = DiskColdTier(sys.argv[1], capacity_bytes=1 << 20)
space, hashes, into = b"s" * 16, [b"h" * 16], bytearray(8)
assert not tier.put(space, hashes, [memoryview(b"payload!")]).any()
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
assert tier.get(space, hashes, [memoryview(into)]).tolist() == [4]
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
assert tier.get(space, hashes, [memoryview(into)]).tolist() == [0]
assert into == b"payload!"
"""


def test_a_record_whose_file_was_taken_away_is_a_miss(tier: DiskColdTier, tmp_path: Path) -> None:
    tier.put(SPACE, hashes_of(2), views(blocks_of(2)))
    file_of(tmp_path, hashes_of(1)[0]).unlink()
    assert tier.get(SPACE, hashes_of(2), views(np.zeros((2, SIZE), np.uint8))).tolist() == [MISS, OK]
    assert tier.used_bytes() == ROOM


def test_a_second_opener_is_refused_until_the_first_has_closed(tmp_path: Path) -> None:
    tier = DiskColdTier(tmp_path, capacity_bytes=1 << 20)
    with pytest.raises(ConfigError, match=r"cold\.path: .* is in use by another cold tier"):
        DiskColdTier(tmp_path, capacity_bytes=1 << 20)
    other = subprocess.run(
        [sys.executable, "-c", _OPEN, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert "is in use by another cold tier" in other.stderr
    tier.close()
    subprocess.run([sys.executable, "-c", _OPEN, str(tmp_path)], check=True)


_OPEN = """
import sys
from kvpager.tiers.cold_disk import DiskColdTier
DiskColdTier(sys.argv[1], capacity_bytes=1 << 20).close()
"""


def test_a_folder_of_another_format_is_refused(tmp_path: Path) -> None:
    DiskColdTier(tmp_path, capacity_bytes=1 << 20).close()
    marker = tmp_path / "kvpager-cold"
    marker.write_text(marker.read_text().replace("format 1", "format 7"))
    with pytest.raises(ConfigError, match=r"holds another format .*format 7.*reads .*format 1"):
        DiskColdTier(tmp_path, capacity_bytes=1 << 20)
    marker.write_bytes(b"\xff\x00")
    with pytest.raises(ConfigError, match="holds another format"):
        DiskColdTier(tmp_path, capacity_bytes=1 << 20)


def test_files_that_others_put_into_a_tiers_folder_are_left_alone(tmp_path: Path) -> None:
    DiskColdTier(tmp_path, capacity_bytes=2 * ROOM).close()
    foreign = [tmp_path / "letter.txt", tmp_path / "00" / "notes", tmp_path / "00" / ("a" * 64 + ".txt")]
    for path in foreign:
        path.write_text("keep me")
    tier = DiskColdTier(tmp_path, capacity_bytes=2 * ROOM)
    tier.put(SPACE, hashes_of(5), views(blocks_of(5)))
    tier.close()
    assert all(path.read_text() == "keep me" for path in foreign)


def test_a_folder_of_somebody_else_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("keep me")
    with pytest.raises(ConfigError, match=r"cold\.path: .* is not empty .* holds 'letter\.txt'"):
        DiskColdTier(tmp_path, capacity_bytes=1 << 20)
    assert os.listdir(tmp_path) == ["letter.txt"]


@pytest.mark.parametrize(
    "left", [[], ["kvpager-cold.lock"], ["kvpager-cold.lock", "kvpager-cold.unfinished"]]
)
def test_what_an_opener_that_was_killed_left_and_a_file_systems_own_folder_are_no_hindrance(
    tmp_path: Path, left: tuple[str, ...]
) -> None:
    (tmp_path / "lost+found").mkdir()
    for name in left:
        (tmp_path / name).write_text("")
    DiskColdTier(tmp_path, capacity_bytes=1 << 20).close()


def test_a_tier_that_an_earlier_version_wrote_still_opens(tmp_path: Path) -> None:
    """Marker and record as the first release wrote them, beside files that it let others have there."""
    (tmp_path / "letter.txt").write_text("keep me")
    (tmp_path / "kvpager-cold").write_text("kvpager cold tier on disk, format 1\n")
    (tmp_path / "68").mkdir()
    (tmp_path / "68" / f"{'73' * 16}{'68' * 16}.2a50a125d5fb").write_bytes(
        bytes.fromhex(
            "4b565052010000000800000000000000080000000000010057767824de424505"
            f"{'73' * 16}{'68' * 16}{'00' * 16}41f50cfb57e4906ce98b7f4947162296"
        )
        + b"payload!"
    )
    tier = DiskColdTier(tmp_path, capacity_bytes=1 << 20)
    into = bytearray(8)
    assert tier.get(b"s" * 16, [b"h" * 16], [memoryview(into)]).tolist() == [OK]
    assert into == b"payload!"
    tier.close()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"capacity_bytes": 0}, "cold.capacity_bytes"),
        ({"capacity_bytes": 1 << 20, "secret": "short"}, "cold.secret"),
        ({"capacity_bytes": 1 << 20, "deadline": 0.0}, "cold.deadline"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(
    tmp_path: Path, settings: dict[str, int], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        DiskColdTier(tmp_path, **settings)  # type: ignore[arg-type]


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nothing")):
        with pytest.raises(ConfigError, match=r"cold\.path: .* cannot be used"):
            DiskColdTier(path, capacity_bytes=1 << 20)


_FULL = """
import resource, sys
import numpy as np
from kvpager.tiers.cold_disk import DiskColdTier
tier = DiskColdTier(sys.argv[1], capacity_bytes=1 << 30)
space, hashes = b"s" * 16, [b"%016d" % i for i in range(40)]
blocks = np.random.default_rng(0).integers(0, 256, (40, 100_000), np.uint8)
views = [memoryview(block) for block in blocks]
if sys.argv[2] == "limit":
    assert not tier.put(space, hashes[:10], views[:10]).any()
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
status = tier.put(space, hashes, views)
assert set(status) == {0, 5}, status
assert tier.put_note(b"small", b"x") in (0, 5)
into = np.zeros_like(blocks)
got = tier.get(space, hashes, [memoryview(block) for block in into])
assert ((got == 0) == (status == 0)).all(), (got, status)
assert (into[got == 0] == blocks[got == 0]).all()
tier.check_integrity()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
tier.delete(space, hashes)
assert not tier.put(space, hashes[:5], views[:5]).any()
tier.close()
"""


def test_a_file_size_limit_is_full_and_nothing_else(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", _FULL, str(tmp_path), "limit"], check=True)


def test_a_full_disk_is_full_and_nothing_else(tmp_path: Path) -> None:
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("a file system that can be filled needs the right to mount one")
    try:
        subprocess.run([sys.executable, "-W", "error", "-c", _FULL, str(tmp_path), "disk"], check=True)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


_WRITER = """
import os, sys
import numpy as np
from kvpager.tiers.cold_disk import DiskColdTier
tier = DiskColdTier(sys.argv[1], capacity_bytes=int(sys.argv[2]))
number = int(sys.argv[3])
while True:
    sizes = [1000 + 37 * (number + i) % 60_000 for i in range(4)]
    payloads = [np.random.default_rng(number + i).bytes(size) for i, size in enumerate(sizes)]
    hashes = [b"%016d" % (number + i) for i in range(4)]
    status = tier.put(b"s" * 16, hashes, [memoryview(p) for p in payloads])
    assert not status.any()
    os.write(1, b"%d\\n" % number)
    number += 4
"""


def expected(number: int, index: int) -> bytes:
    return np.random.default_rng(number + index).bytes(1000 + 37 * (number + index) % 60_000)


@pytest.mark.parametrize("loops", [20, pytest.param(300, marks=pytest.mark.full)])
def test_what_was_acknowledged_survives_kill_9_at_any_moment(tmp_path: Path, loops: int) -> None:
    chance = random.Random(5)
    capacity = 4 << 20
    number, acknowledged = 0, []
    for _ in range(loops):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path), str(capacity), str(number)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        with writer.stdout as pipe:
            pipe.readline()
            acknowledged.append(number)
            time.sleep(chance.uniform(0, 0.03))
            writer.send_signal(signal.SIGKILL)
            acknowledged += [int(line) for line in pipe.read().splitlines() if line]
        writer.wait()
        number = acknowledged[-1] + 8
        tier = DiskColdTier(tmp_path, capacity_bytes=capacity)
        tier.check_integrity()
        assert not list(tmp_path.glob("*/*.unfinished"))
        # The last batches fit the capacity, so they must all be there; older ones may have made room.
        for each in acknowledged[-12:]:
            payloads = [expected(each, index) for index in range(4)]
            into = [bytearray(len(payload)) for payload in payloads]
            hashes = [b"%016d" % (each + index) for index in range(4)]
            status = tier.get(b"s" * 16, hashes, [memoryview(buffer) for buffer in into])
            assert not status.any(), f"{each} was acknowledged, and is {status}"
            assert into == payloads
        assert tier.stats.corrupt == 0
        tier.close()


def test_readers_and_writers_at_once_with_room_for_few(tmp_path: Path) -> None:
    tier = DiskColdTier(tmp_path, capacity_bytes=6 * ROOM)
    blocks, hashes = blocks_of(12), hashes_of(12)
    wrong: list[object] = []
    end = time.monotonic() + 1.0

    def work(seed: int) -> None:
        chance = random.Random(seed)
        while time.monotonic() < end:
            picked = chance.sample(range(12), 3)
            names = [hashes[index] for index in picked]
            into = np.zeros((3, SIZE), np.uint8)
            if chance.random() < 0.5:
                status = tier.put(SPACE, names, views(blocks[picked]))
                if set(status) - {OK, FULL}:
                    wrong.append(status)
            else:
                status = tier.get(SPACE, names, views(into))
                good = np.flatnonzero(status == OK)
                if set(status) - {OK, MISS} or not np.array_equal(into[good], blocks[picked][good]):
                    wrong.append(status)
            if chance.random() < 0.1:
                tier.delete(SPACE, names[:1])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    tier.check_integrity()
    tier.close()


class HeldDisk(DiskColdTier):
    """A disk tier over a file system that holds up the next rename, until it is told to go on."""

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        super().__init__(path, capacity_bytes=capacity_bytes, deadline=120.0)
        self.holds = threading.Event()
        self.held = threading.Event()
        self.go_on = threading.Event()

    def _rename(self, source: str, target: str) -> None:
        if self.holds.is_set():
            self.holds.clear()
            self.held.set()
            assert self.go_on.wait(60.0)
        super()._rename(source, target)


@pytest.mark.parametrize("moved", ["new", "dropped", "deleted"])
def test_a_rename_that_the_file_system_holds_up_keeps_no_other_record_waiting(
    tmp_path: Path, moved: str
) -> None:
    tier = HeldDisk(tmp_path, capacity_bytes=(4 if moved == "dropped" else 10) * ROOM)
    blocks, hashes, into = blocks_of(6), hashes_of(6), np.zeros((6, SIZE), np.uint8)
    for index in range(4):  # one by one: the first is the least recently used
        assert not tier.put(SPACE, hashes[index : index + 1], views(blocks[index : index + 1])).any()
    tier.holds.set()
    slow = threading.Thread(
        target=(lambda: tier.delete(SPACE, hashes[:1]))
        if moved == "deleted"
        else (lambda: tier.put(SPACE, hashes[4:5], views(blocks[4:5])))
    )
    slow.start()
    assert tier.held.wait(60.0)
    seen: list[object] = []

    def others() -> None:
        seen.append(tier.contains(SPACE, hashes).tolist())
        seen.append(tier.get(SPACE, hashes[2:4], views(into[2:4])).tolist())
        tier.check_integrity()
        if moved == "new":
            seen.append(tier.put(SPACE, hashes[5:], views(blocks[5:])).tolist())

    quick = threading.Thread(target=others)
    quick.start()
    quick.join(30.0)
    went_on = not quick.is_alive()
    # What is put under the name that is being moved waits for that, and is there in the end.
    again = 4 if moved == "new" else 0
    late = threading.Thread(
        target=lambda: tier.put(SPACE, hashes[again : again + 1], views(blocks[again : again + 1]))
    )
    late.start()
    tier.go_on.set()
    for thread in (slow, quick, late):
        thread.join(60.0)
    assert went_on
    first = moved == "new"
    assert seen[:2] == [[first, True, True, True, False, False], [OK, OK]]
    assert seen[2:] == ([[OK]] if moved == "new" else [])
    assert tier.get(SPACE, hashes[again : again + 1], views(into[again : again + 1])).tolist() == [OK]
    assert np.array_equal(into[[again, 2, 3]], blocks[[again, 2, 3]])
    tier.check_integrity()
    tier.close()


def test_no_descriptors_are_left_open(tmp_path: Path) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for _ in range(3):
        tier = DiskColdTier(tmp_path, capacity_bytes=1 << 20)
        tier.put(SPACE, hashes_of(3), views(blocks_of(3)))
        tier.get(SPACE, hashes_of(4), views(np.zeros((4, SIZE), np.uint8)))
        tier.close()
    assert count() == before
