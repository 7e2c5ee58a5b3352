"""The file of an arena: who has it, what is taken over, and what is made anew beside what was there."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kvpager.kvstore.host import HostStore
from kvpager.tests.raw_client import LAYOUT, names
from kvpager.tiers.arena_file import ArenaFile, default_arena_path, find_arenas
from kvpager.tiers.cold_url import open_cold_tier
from kvpager.tiers.errors import ConfigError, MemoryUnavailableError
from kvpager.tiers.layout import KVLayout
from kvpager.tiers.pinned import PinnedArena

MIB = 1 << 20
SIZE = LAYOUT.block_bytes
BLOCKS = np.arange(8 * SIZE, dtype=np.uint32).astype(np.uint8).reshape(8, SIZE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "arena"


def filled(path: Path, *, keep: bool = True, nbytes: int = 4 * MIB) -> None:
    """An arena with eight blocks, whose store was closed."""
    with HostStore(nbytes, extent_bytes=MIB, arena=ArenaFile(path, keep=keep)) as host:
        assert host.space(LAYOUT, shard="pp1").put(names(0, 8), BLOCKS, wait=30.0) == 8


def found(path: Path, *, fresh: bool = False, keep: bool = True, nbytes: int = 4 * MIB) -> int:
    """How many of them are there, all right."""
    with HostStore(nbytes, extent_bytes=MIB, arena=ArenaFile(path, fresh=fresh, keep=keep)) as host:
        out = np.zeros_like(BLOCKS)
        count = host.space(LAYOUT, shard="pp1").get(names(0, 8), out)
        assert (out[:count] == BLOCKS[:count]).all()
        assert host.stats.adopted == count
        host.check_integrity()
        return count


def test_what_is_kept_is_there_for_the_next_and_goes_when_it_is_not_to_stay(path: Path) -> None:
    filled(path)
    assert sorted(one.name for one in path.parent.iterdir()) == ["arena", "arena.records"]
    assert path.stat().st_mode & 0o777 == 0o600
    for _ in range(3):
        assert found(path) == 8
    assert found(path, keep=False) == 8
    assert list(path.parent.iterdir()) == []


def test_an_arena_has_one_owner(path: Path) -> None:
    filled(path)
    with (
        HostStore(4 * MIB, extent_bytes=MIB, arena=ArenaFile(path, keep=True)),
        pytest.raises(ConfigError, match=f"arena: {path} is the arena of another process"),
    ):
        ArenaFile(path, fresh=True)
    assert found(path) == 8


def test_a_client_that_has_the_memory_does_not_have_the_lock(path: Path) -> None:
    filled(path)
    with HostStore(4 * MIB, extent_bytes=MIB, arena=ArenaFile(path, keep=True)) as host:
        passed = os.dup(host.arena.fd)
        mapped = mmap.mmap(passed, 4 * MIB)
        with pytest.raises(BlockingIOError):
            fcntl.flock(passed, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(passed)
    assert found(path) == 8
    assert mapped[:SIZE] == BLOCKS[0].tobytes()
    mapped.close()


def test_an_owner_that_was_killed_has_it_no_more(path: Path) -> None:
    program = (
        "import os, signal, sys; from kvpager.tiers.arena_file import ArenaFile; "
        "file = ArenaFile(sys.argv[1]); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-P", "-c", program, str(path)], check=False)
    assert path.exists()
    assert found(path) == 0


def test_a_fresh_one_leaves_what_others_have_mapped(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(path)
    inode = path.stat().st_ino
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4 * MIB) as mapped:
        assert found(path, fresh=True) == 0
        assert path.stat().st_ino != inode
        assert mapped[:SIZE] == BLOCKS[0].tobytes()
    assert caplog.records == []
    assert sorted(one.name for one in path.parent.iterdir()) == ["arena", "arena.records"]


def cut(path: Path) -> None:
    os.truncate(path, 3 * MIB)


def punch(path: Path) -> None:
    os.truncate(path, 0)
    os.truncate(path, 4 * MIB)


def copy(path: Path) -> None:
    data = path.read_bytes()
    path.rename(path.with_name("first"))
    path.write_bytes(data)
    path.chmod(0o600)
    path.with_name("first").unlink()


def damage(path: Path) -> None:
    records = Path(f"{path}.records")
    data = bytearray(records.read_bytes())
    data[4096 + 8] ^= 1
    records.write_bytes(data)


def grow_old(path: Path) -> None:
    records = Path(f"{path}.records")
    data = bytearray(records.read_bytes())
    data[16:20] = struct.pack("<I", 1)
    records.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (cut, "it is 3145728 bytes long, and its records say 4194304"),
        (punch, "it holds fewer bytes than its records say"),
        (copy, "its records are of another file"),
        (damage, "an entry of the table of its records is damaged"),
        (grow_old, "its records are of version 1, this is version 2"),
    ],
)
def test_what_cannot_be_believed_is_replaced_and_the_log_says_why(
    change: object, said: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(path)
    assert callable(change)
    change(path)
    inode = path.stat().st_ino
    with caplog.at_level(logging.WARNING):
        assert found(path) == 0
    assert [record.message for record in caplog.records] == [
        f"the arena {path} is not taken over, a new one is made: {said}"
    ]
    assert path.stat().st_ino != inode
    filled(path)
    assert found(path) == 8


def test_a_file_that_is_no_arena_is_refused_and_left_as_it_is(path: Path) -> None:
    path.write_bytes(b"a thesis")
    path.chmod(0o600)
    for fresh in (False, True):
        with pytest.raises(ConfigError, match=r"arena: .* is no arena of kvpager's"):
            ArenaFile(path, fresh=fresh)
    assert path.read_bytes() == b"a thesis"
    Path(f"{path}.records").write_bytes(b"footnotes")
    with pytest.raises(ConfigError, match="is no arena"):
        ArenaFile(path, fresh=True)
    assert Path(f"{path}.records").read_bytes() == b"footnotes"


def lose(path: Path) -> None:
    Path(f"{path}.records").unlink()


def overwrite_head(path: Path) -> None:
    with Path(f"{path}.records").open("r+b") as records:
        records.write(bytes(4096))


def unmark(path: Path) -> None:
    """As on a file system that has no extended attributes."""
    os.removexattr(path, "user.kvpager.arena")


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lose, r"its records cannot be read \(No such file or directory\)"),
        (overwrite_head, "its records are none of kvpager's"),
    ],
)
def test_an_arena_that_lost_its_records_is_replaced(
    change: object, said: str, fresh: bool, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(path)
    unmark(path)
    assert found(path) == 8  # taken over, it is marked as one that was made
    assert callable(change)
    change(path)
    assert [Path(one.path) for one in find_arenas(path.parent)] == [path]
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4 * MIB) as mapped:
        assert found(path, fresh=fresh) == 0
        assert mapped[:SIZE] == BLOCKS[0].tobytes()
    said = f"the arena {path} is not taken over, a new one is made: {said}"
    assert len(caplog.messages) == (not fresh)
    assert fresh or re.fullmatch(said, caplog.messages[0])
    filled(path)
    assert found(path) == 8


@pytest.mark.parametrize("change", [lose, overwrite_head])
def test_where_it_cannot_be_known_it_is_said_which_file_to_remove(change: object, path: Path) -> None:
    filled(path)
    unmark(path)
    assert callable(change)
    change(path)
    data = path.read_bytes()
    for fresh in (False, True):
        with pytest.raises(ConfigError, match=rf"has lost its records, {path}.records: .*\(rm {path}\)"):
            ArenaFile(path, fresh=fresh)
    assert path.read_bytes() == data
    path.unlink()
    if change is overwrite_head:
        with pytest.raises(ConfigError, match=rf"take the place of {path}.records, .*\(rm {path}.records\)"):
            ArenaFile(path)
        assert not path.exists()
        Path(f"{path}.records").unlink()
    filled(path)
    assert found(path) == 8


def test_an_arena_of_the_usual_name_is_known_by_it(tmp_path: Path) -> None:
    path = Path(default_arena_path(str(tmp_path / "sidecar.sock")))
    try:
        filled(path)
        unmark(path)
        lose(path)
        assert found(path) == 0
    finally:
        for name in (path, Path(f"{path}.records")):
            name.unlink(missing_ok=True)


def test_a_file_that_others_may_open_is_refused(path: Path, tmp_path: Path) -> None:
    path.touch(0o600)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="nobody else may open"):
        ArenaFile(path)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(ConfigError, match="cannot be opened"):
        ArenaFile(link)
    with pytest.raises(ConfigError, match="arena: /no/such/folder cannot be opened"):
        ArenaFile("/no/such/folder")


def test_an_arena_of_another_size_is_refused_and_stays(path: Path) -> None:
    filled(path)
    for host_bytes, extent, said in (
        (8 * MIB, MIB, r"host_bytes: .* is an arena of 4.0 MiB, not of 8.0 MiB"),
        (4 * MIB, 2 * MIB, r"extent_bytes: .*an arena of 1.0 MiB, not of 2.0"),
    ):
        file = ArenaFile(path)
        assert file.nbytes == 4 * MIB
        with pytest.raises(ConfigError, match=said):
            HostStore(host_bytes, extent_bytes=extent, arena=file)
        file.close()
        file.close()
    assert found(path) == 8


def test_an_arena_that_there_is_no_memory_for_leaves_nothing(path: Path) -> None:
    file = ArenaFile(path, keep=True)
    with pytest.raises(MemoryUnavailableError, match="host_bytes"):
        HostStore(1 << 55, arena=file)
    file.close()
    assert list(path.parent.iterdir()) == []


def test_what_a_killed_one_was_making_is_made_again(path: Path) -> None:
    """An arena that has records and no length yet, and files under their first names."""
    filled(path)
    records = Path(f"{path}.records").read_bytes()
    path.unlink()
    path.touch(0o600)
    for name in ("arena.new", "arena.records.new"):
        path.with_name(name).write_bytes(b"half")
    assert found(path) == 0
    assert Path(f"{path}.records").read_bytes()[:16] == records[:16]
    filled(path)
    assert found(path) == 8


def test_arenas_are_listed_with_their_size_and_whether_they_have_an_owner(tmp_path: Path) -> None:
    for name in ("one", "two"):
        filled(tmp_path / name)
    lone = tmp_path / "kvpager-0-0.arena"
    lone.touch(0o600)
    (tmp_path / "other.records").write_bytes(b"not ours")
    (tmp_path / "other").write_bytes(b"not ours")
    with HostStore(4 * MIB, extent_bytes=MIB, arena=ArenaFile(tmp_path / "two", keep=True)):
        arenas = find_arenas(tmp_path)
    assert [(one.path, one.nbytes, one.owned) for one in arenas] == [
        (str(lone), 0, False),
        (str(tmp_path / "one"), 4 * MIB, False),
        (str(tmp_path / "two"), 4 * MIB, True),
    ]
    assert all(MIB < one.held_bytes < 6 * MIB for one in arenas[1:])
    with pytest.raises(ConfigError, match="folder: "):
        find_arenas(tmp_path / "absent")


def test_sockets_have_arenas_of_their_own() -> None:
    one, other = default_arena_path("/run/a.sock"), default_arena_path("/run/b.sock")
    assert one != other
    assert one == default_arena_path("/run/x/../a.sock")
    assert Path(one).parent == Path("/dev/shm")


def test_an_arena_without_an_arena_file_can_have_extents_taken(tmp_path: Path) -> None:
    with PinnedArena(4 * MIB, extent_bytes=MIB, taken=[1, 3]) as arena:
        arena.wait_ready()
        assert [arena.take_extent() for _ in range(3)] == [0, 2, None]
        arena.give_extent(3)
        assert arena.take_extent() == 3


def test_who_removes_its_files_late_leaves_those_of_the_next(path: Path) -> None:
    first = ArenaFile(path)
    with HostStore(4 * MIB, extent_bytes=MIB, arena=first):
        first.remove()
        second = ArenaFile(path, keep=True)
        with HostStore(4 * MIB, extent_bytes=MIB, arena=second) as host:
            assert host.space(LAYOUT, shard="pp1").put(names(0, 8), BLOCKS, wait=30.0) == 8
    assert found(path) == 8


def test_an_arena_that_was_being_removed_is_made_anew(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(path)
    Path(f"{path}.records").rename(f"{path}.records.old")
    assert found(path) == 0
    assert "is not taken over, a new one is made: its records cannot be read" in caplog.text
    assert sorted(one.name for one in path.parent.iterdir()) == ["arena", "arena.records"]


def test_one_that_cannot_be_replaced_stays_as_it_is(path: Path) -> None:
    filled(path)
    Path(f"{path}.records.new").mkdir()
    file = ArenaFile(path, fresh=True)
    with pytest.raises(MemoryUnavailableError, match="records"):
        HostStore(4 * MIB, extent_bytes=MIB, arena=file)
    file.close()
    Path(f"{path}.records.new").rmdir()
    assert found(path) == 8


def test_what_the_same_cold_tier_has_is_not_copied_again(path: Path, tmp_path: Path) -> None:
    def dirty(cold: str) -> int:
        with HostStore(4 * MIB, extent_bytes=MIB, arena=ArenaFile(path, keep=True, cold=cold)) as host:
            return sum(space.dirty for space in host.spaces)

    tier = open_cold_tier(f"disk://{tmp_path}/cold", capacity_bytes=64 * MIB)
    file = ArenaFile(path, keep=True, cold="disk:///a")
    with HostStore(4 * MIB, extent_bytes=MIB, cold=tier, arena=file) as host:
        assert host.space(LAYOUT).put(names(0, 8), BLOCKS, wait=30.0) == 8
        assert host.flush(30.0) == 0
        host.space(LAYOUT).reserve(names(8, 1)).commit()
        assert host.space(LAYOUT).dirty == 1
    assert dirty("disk:///a") == 1
    assert dirty("disk:///b") == 9
    assert dirty("disk:///b") == 9
    assert dirty("disk:///a") == 9
    assert dirty("") == 9


def test_spaces_of_different_blocks_keep_their_extents(path: Path) -> None:
    large = KVLayout(4, 2, 64)

    def opened(keep: bool) -> HostStore:
        return HostStore(4 * MIB, extent_bytes=MIB, arena=ArenaFile(path, keep=keep))

    with opened(True) as host:
        assert host.arena.wait_ready(timeout=30.0)
        small, other = host.space(LAYOUT), host.space(large)
        small.reserve(names(0, 300)).commit()
        other.reserve(names(0, 40)).commit()
        extents = small.extents | other.extents
        assert len(extents) == 4
        # One takes an extent that the other has not used for longest.
        other.reserve(names(40, 40)).commit()
        found_before = [len(space.match(names(0, 300))) for space in (small, other)]
        before = small.extents, other.extents
        host.check_integrity()
    with opened(False) as host:
        host.check_integrity()
        spaces = {space.layout: space for space in host.spaces}
        small, other = spaces[LAYOUT], spaces[large]
        assert host.space(large) is other
        assert (small.extents, other.extents) == before
        assert [len(space.match(names(0, 300))) for space in (small, other)] == found_before
        host.check_integrity()
