"""A sidecar killed at any moment: what was committed is there, what was not is not, who holds keeps."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kvpager.api.cli import main
from kvpager.api.client import connect
from kvpager.api.group_book import ClaimArrays, GroupBook, claims_in
from kvpager.api.messages import (
    Abort,
    Commit,
    Count,
    Done,
    Evict,
    GetStats,
    Leased,
    LeaseSlots,
    Marks,
    Match,
    Pin,
    Put,
    Reassert,
    Release,
    Reserve,
    Reserved,
    Stats,
    Unpin,
)
from kvpager.api.operator_messages import GetStatus, Status
from kvpager.kvstore.handles import ReserveStatus
from kvpager.kvstore.host import HostStore
from kvpager.tests.crash_workers import KEPT, NEVER, Holder, Killable, Worker, block_of, name_of, read, write
from kvpager.tests.raw_client import LAYOUT, RawClient, await_true, counts, names, store
from kvpager.tests.serve_process import ServeProcess, remove_arena
from kvpager.tiers.arena_file import ArenaFile, find_arenas
from kvpager.tiers.errors import ServiceUnavailableError, StaleHandleError
from kvpager.tiers.record_file import RecordFile, SectionKind

MIB = 1 << 20
HOST = 32 * MIB
QUOTA = 120
"""Blocks that a writer commits in a round at most."""
NEW, PRESENT, PENDING = (int(status) for status in list(ReserveStatus)[:3])


@pytest.fixture
def arena() -> Iterator[Path]:
    """A name in shared memory, of which nothing is left."""
    path = Path(f"/dev/shm/kvpager-test-{os.getpid()}-{random.randrange(1 << 30)}")
    yield path
    remove_arena(path)
    assert not list(path.parent.glob(f"{path.name}*"))


@pytest.fixture
def sidecar(tmp_path: Path, arena: Path) -> Iterator[Killable]:
    made = Killable(tmp_path / "socket", arena, HOST)
    yield made
    made.kill()


def check_arena(arena: Path) -> int:
    """Look at what a killed sidecar left: its books balance. Returns the committed blocks."""
    with HostStore(HOST, arena=ArenaFile(arena, keep=True)) as host:
        host.check_integrity()
        assert host.stats.damaged == 0
        return sum(space.resident for space in host.spaces)


def check_blocks(path: Path, acknowledged: list[bytes]) -> None:
    """Every acknowledged block is there with the right bytes."""
    with connect(path, timeout=20, strict=True) as client:
        space = client.space(LAYOUT)
        with space.match(acknowledged) as lease:
            assert len(lease) == len(acknowledged)
            for name, block in zip(acknowledged, lease.blocks, strict=True):
                assert (block == block_of(name)).all()


def check_absent(client: RawClient, space: int, hashes: list[bytes]) -> None:
    """None of these can be found: each would be granted, or somebody writes it still."""
    for start in range(0, len(hashes), 4096):
        asked = tuple(hashes[start : start + 4096])
        found = client.call(Reserve(space, asked, 0.0), Reserved)
        new = found.statuses == NEW
        client.call(Abort(space, found.slots[new], found.generations[new]))
        assert not (found.statuses == PRESENT).any()


def survive(sidecar: Killable, rounds: int, seed: int) -> tuple[int, int]:
    """Two writers and two readers, and a sidecar that is killed in their midst, again and again.

    Returns:
        blocks that were acknowledged to the writers, and reads of the readers that were right, all of them.
    """
    rng = random.Random(seed)
    sidecar.start()
    path = str(sidecar.path)
    writers = [Worker(write, path, number) for number in range(2)]
    readers = [Worker(read, path, number) for number in range(2)]
    acknowledged: list[bytes] = []
    serials, right, total = QUOTA, 0, 0
    try:
        for number in range(rounds):
            for one in writers:
                one.begin(QUOTA)
            for one in readers:
                one.begin(serials)
            # At whichever moment: a few are in the midst of the first connections, most in full work.
            time.sleep(rng.random() * 0.15)
            sidecar.kill()
            if goes_on := rng.random() < 0.5:
                sidecar.start()
                time.sleep(rng.random() * 0.05)
            told = [one.stop() for one in writers]
            right += sum(one.stop() for one in readers)
            if not goes_on:
                sidecar.start()
            for _, blocks in told:
                acknowledged += blocks
                total += len(blocks)
            serials = max(serial for serial, _ in told) + QUOTA
            check_blocks(sidecar.path, acknowledged)
            with RawClient(sidecar.path, b"v" * 16) as client:
                space = client.open()
                latest = range(max(0, serials - 8 * QUOTA), serials)
                never = [name_of(NEVER, writer, serial) for writer in range(2) for serial in latest]
                check_absent(client, space, never)
                if number % 5 == 4:
                    client.call(Evict(space, 1 << 20), Count)
                    acknowledged.clear()
        assert right > rounds
        for one in (*writers, *readers):
            one.end()
        with RawClient(sidecar.path, b"v" * 16) as client:
            space = client.open()
            await_true(lambda: counts(client)["leased"] == counts(client)["reserved"] == 0)
            stats = client.call(GetStats(), Stats).values["host"]
            assert (stats["damaged"], stats["stale"]) == (0, 0)
        sidecar.kill()
        assert check_arena(sidecar.arena) >= len(acknowledged)
        return total, right
    finally:
        for one in (*writers, *readers):
            one.kill()


def test_what_was_acknowledged_outlives_any_kill_and_nothing_else_is_ever_read(sidecar: Killable) -> None:
    survive(sidecar, 20, seed=1)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_what_was_acknowledged_outlives_five_hundred_kills(
    sidecar: Killable, capsys: pytest.CaptureFixture[str]
) -> None:
    acknowledged, right = survive(sidecar, 500, seed=2)
    with capsys.disabled():
        print(f"\n500 kills: {acknowledged:,} blocks acknowledged, none lost; {right:,} reads, all right")


def holders_die(sidecar: Killable, rounds: int, seed: int) -> None:
    """A writer between reserve and commit, and a reader with leases, are killed around the sidecar's end."""
    rng = random.Random(seed)
    sidecar.start()
    kept = tuple(name_of(KEPT, 0, serial) for serial in range(4))
    with RawClient(sidecar.path, b"v" * 16) as client:
        space = client.open()
        data = b"".join(block_of(name).tobytes() for name in kept)
        assert client.call(Put(space, kept, data, 20.0), Count).count == 4
    for number in range(rounds):
        never = tuple(name_of(NEVER, 0, 10 * number + at) for at in range(5))
        groups = [b"%015d" % number + end for end in (b"w", b"r")]
        with (
            Holder(sidecar.path, groups[0], (), never) as writer,
            Holder(sidecar.path, groups[1], kept, ()) as reader,
        ):
            assert len(reader.leased.slots) == 4
            assert writer.reserved.statuses.tolist() == [NEW] * 5
            dead = rng.sample([writer, reader], rng.randint(0, 2))
            before = rng.random() < 0.5
            for one in dead if before else ():
                one.kill()
            sidecar.kill()
            for one in () if before else dead:
                one.kill()
            sidecar.start()
            with RawClient(sidecar.path, b"v" * 16) as client:
                space = client.open()
                held = counts(client)
                assert held["reserved"] == (0 if writer in dead else 5)
                assert held["leased"] == (0 if reader in dead else 4)
                if reader not in dead:
                    # Whatever wants room, what it reads stays.
                    assert client.call(Evict(space, 1 << 20), Count).count == 0
                    assert reader.read() == data
                again = client.call(Reserve(space, never, 0.0), Reserved)
                assert set(again.statuses.tolist()) == {NEW if writer in dead else PENDING}
                new = again.statuses == NEW
                client.call(Abort(space, again.slots[new], again.generations[new]))
                writer.kill()
                reader.kill()
                await_true(lambda client=client: counts(client)["groups"] == 1)  # type: ignore[misc]
                await_granted(client, space, never)
                assert (
                    client.call(Match(space, kept, 0.0), Leased).slots.tolist()
                    == reader.leased.slots.tolist()
                )
                client.call(Release(space, reader.leased.slots, reader.leased.generations), Done)


def await_granted(client: RawClient, space: int, hashes: tuple[bytes, ...]) -> None:
    """All of these can be reserved, as soon as what was held is given back."""

    def granted() -> bool:
        found = client.call(Reserve(space, hashes, 0.0), Reserved)
        new = found.statuses == NEW
        client.call(Abort(space, found.slots[new], found.generations[new]), Done)
        return bool(new.all())

    await_true(granted)


def test_slots_come_back_when_their_process_is_gone_and_only_then(sidecar: Killable) -> None:
    holders_die(sidecar, 20, seed=3)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_slots_come_back_five_hundred_times(sidecar: Killable) -> None:
    holders_die(sidecar, 500, seed=4)


def test_what_a_group_holds_stays_until_the_last_of_its_processes_is_gone(sidecar: Killable) -> None:
    sidecar.start()
    group = b"one engine's own"
    with RawClient(sidecar.path, b"v" * 16) as client:
        store(client, client.open(), 0, 4)
    with (
        Holder(sidecar.path, group, names(0, 4), names(100, 3)) as scheduler,
        Holder(sidecar.path, group, (), ()) as worker,
    ):
        assert len(scheduler.leased.slots) == 4
        sidecar.kill()
        scheduler.kill()
        for _ in range(2):
            sidecar.start()
            with RawClient(sidecar.path, b"v" * 16) as client:
                space = client.open()
                assert (counts(client)["leased"], counts(client)["reserved"]) == (4, 3)
                assert client.call(Evict(space, 99), Count).count == 0
                pending = client.call(Reserve(space, names(100, 3), 0.0), Reserved)
                assert pending.statuses.tolist() == [PENDING] * 3
            sidecar.kill()
        sidecar.start()
        with RawClient(sidecar.path, b"v" * 16) as client:
            space = client.open()
            worker.kill()
            await_true(lambda: counts(client)["groups"] == 1)
            await_granted(client, space, names(100, 3))
            await_true(lambda: bool(client.call(Evict(space, 99), Count).count == 4))


def test_a_stopped_readers_blocks_are_untouched_under_pressure_and_over_a_kill(sidecar: Killable) -> None:
    sidecar.start()
    kept = tuple(name_of(KEPT, 0, serial) for serial in range(4))
    data = b"".join(block_of(name).tobytes() for name in kept)
    slots = HOST // LAYOUT.block_bytes
    with RawClient(sidecar.path, b"v" * 16) as client:
        assert client.call(Put(client.open(), kept, data, 20.0), Count).count == 4
    with Holder(sidecar.path, b"r" * 16, kept, ()) as reader:
        reader.pause()
        for first in (0, 1):
            if first:
                sidecar.kill()
                sidecar.start()
            with RawClient(sidecar.path, b"v" * 16) as client:
                space = client.open()
                await_true(lambda client=client: bool(ready(client) == HOST))  # type: ignore[misc]
                for start in range(0, 2 * slots, 2048):
                    asked = names((first << 40) + (1 << 30) + start, 2048)
                    got = client.call(Reserve(space, asked, 0.0), Reserved)
                    new = got.statuses == NEW
                    client.call(Commit(space, got.slots[new], got.generations[new]), Done)
                    assert not np.isin(got.slots[new], reader.leased.slots).any()
                found = client.call(Match(space, kept, 0.0), Leased)
                assert found.slots.tolist() == reader.leased.slots.tolist()
                assert found.generations.tolist() == reader.leased.generations.tolist()
                client.call(Release(space, found.slots, found.generations), Done)
                stats = client.call(GetStats(), Stats).values["host"]
                assert stats["evicted"] > slots // 2
        reader.resume()
        assert reader.read() == data


def ready(client: RawClient) -> int:
    nbytes: int = client.call(GetStats(), Stats).values["arena"]["ready_bytes"]
    return nbytes


def test_handles_are_good_once_and_never_for_a_slot_that_was_granted_again(sidecar: Killable) -> None:
    sidecar.start()
    me = b"g" * 16, b"c" * 16
    with RawClient(sidecar.path, *me) as client:
        space = client.open()
        kept = store(client, space, 0, 4)
        held = client.call(Match(space, names(0, 2), 0.0), Leased)
        writing = client.call(Reserve(space, names(10, 3), 0.0), Reserved)
        sidecar.kill()
    sidecar.start()
    with RawClient(sidecar.path, *me) as client:
        space = client.open()
        said = Reassert(
            space,
            np.concatenate([held.slots, writing.slots]),
            np.concatenate([held.generations, writing.generations]),
            np.array([1, 1, 0, 0, 0], np.int32),
        )
        for _ in range(2):
            assert client.call(said, Marks).flags.tolist() == [True] * 5
            assert (counts(client)["leased"], counts(client)["reserved"]) == (2, 3)
        once = slice(0, 1)
        client.call(Commit(space, writing.slots[once], writing.generations[once]), Done)
        client.call(Release(space, held.slots[once], held.generations[once]), Done)
        client.call(Abort(space, writing.slots[1:2], writing.generations[1:2]), Done)
        sidecar.kill()
    sidecar.start()
    with RawClient(sidecar.path, *me) as client:
        space = client.open()
        for what, slots, generations in (
            (Commit, writing.slots[:2], writing.generations[:2]),
            (Abort, writing.slots[:2], writing.generations[:2]),
            (Release, held.slots[:1], held.generations[:1]),
        ):
            with pytest.raises(StaleHandleError):
                client.call(what(space, slots, generations))
        assert client.call(said, Marks).flags.tolist() == [True, True, False, False, True]
        assert (counts(client)["leased"], counts(client)["reserved"]) == (2, 1)
        client.call(Release(space, held.slots, held.generations), Done)
        client.call(Abort(space, writing.slots[2:], writing.generations[2:]), Done)
        # Every slot is granted again.
        assert client.call(Evict(space, 99), Count).count == 5
        again = client.call(Reserve(space, names(50, 64), 0.0), Reserved)
        client.call(Commit(space, again.slots, again.generations), Done)
        assert set(kept.slots.tolist()) <= set(again.slots.tolist())
        sidecar.kill()
    sidecar.start()
    with RawClient(sidecar.path, *me) as client:
        space = client.open()
        assert not client.call(LeaseSlots(space, kept.slots, kept.generations), Marks).flags.any()
        assert not client.call(said, Marks).flags.any()
        for what in (Commit, Abort, Release):
            with pytest.raises(StaleHandleError):
                client.call(what(space, kept.slots, kept.generations))
        assert client.call(LeaseSlots(space, again.slots, again.generations), Marks).flags.all()


def test_pinned_blocks_are_kept_until_they_are_let_go_by_whichever_sidecar(sidecar: Killable) -> None:
    sidecar.start()
    with RawClient(sidecar.path) as client:
        space = client.open()
        store(client, space, 0, 4)
        assert client.call(Pin(space, names(0, 2)), Count).count == 2
        sidecar.kill()
    for _ in range(2):
        sidecar.start()
        with RawClient(sidecar.path) as client:
            space = client.open()
            client.call(Evict(space, 99), Count)
            assert len(client.call(Match(space, names(0, 4), 0.0), Leased).slots) == 2
            sidecar.kill()
    sidecar.start()
    with RawClient(sidecar.path, b"v" * 16) as client:
        space = client.open()
        assert client.call(Unpin(space, names(0, 4)), Count).count == 2


def test_two_sidecars_do_not_share_an_arena(
    sidecar: Killable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sidecar.start()
    with RawClient(sidecar.path) as client:
        store(client, client.open(), 0, 4)
        for more in ((), ("--fresh",)):
            second = ["serve", f"--socket={tmp_path}/second", f"--arena={sidecar.arena}", *more]
            assert main(second) == 1
            said = f"kvpager serve: --arena: {sidecar.arena} is the arena of another process\n"
            assert capsys.readouterr().err == said
        assert len(client.call(Match(0, names(0, 4), 0.0), Leased).slots) == 4
    assert not (tmp_path / "second").exists()


def test_damaged_records_are_not_believed_and_their_slots_wait_for_who_had_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = 0x5EED_FACE_5EED_FACE_00
    with ServeProcess(tmp_path / "socket", host_bytes=HOST) as sidecar:
        with RawClient(sidecar.path, b"v" * 16) as client:
            kept = store(client, client.open(), base, 8)
        with Holder(sidecar.path, b"r" * 16, names(base, 4), ()) as reader:
            sidecar.kill()
            records = Path(f"{sidecar.arena}.records")
            data = bytearray(records.read_bytes())
            for name in names(base + 1, 1) + names(base + 5, 1):
                at = data.index(name)
                assert data.count(name) == 1
                data[at] ^= 0x40
            with records.open("r+b") as file:
                file.write(data)
            sidecar.start()
            with RawClient(sidecar.path, b"v" * 16) as client:
                space = client.open()
                host = client.call(GetStats(), Stats).values["host"]
                assert (host["adopted"], host["damaged"]) == (6, 2)
                (part,) = client.call(GetStatus(), Status).values["degraded"]
                assert part["part"] == "records"
                assert part["reason"].startswith("the records of 2 slots were damaged")
                assert counts(client)["leased"] == 3
                assert len(client.call(Match(space, names(base, 8), 0.0), Leased).slots) == 1
                bad = kept.slots[[1, 5]]
                client.call(Release(space, kept.slots[:1], kept.generations[:1]), Done)
                assert client.call(Evict(space, 99), Count).count == 3

                def granted() -> set[int]:
                    """Slots that are granted where all are asked for, and what is not in use has gone."""
                    client.call(Evict(space, 99), Count)
                    got = client.call(Reserve(space, names(100, HOST // LAYOUT.block_bytes), 0.0), Reserved)
                    new = got.statuses == NEW
                    client.call(Abort(space, got.slots[new], got.generations[new]), Done)
                    return set(got.slots[new].tolist())

                await_true(lambda: ready(client) == HOST)
                held = {*bad.tolist(), *reader.leased.slots.tolist()}
                assert len(granted()) == HOST // LAYOUT.block_bytes - len(held)
                assert not granted() & held
                reader.kill()
                await_true(lambda: len(granted()) == HOST // LAYOUT.block_bytes)
                assert client.call(GetStatus(), Status).values["degraded"] == ()
        errors = capfd.readouterr().err
        assert "2 records of a space of KVLayout(" in errors
        assert "2 slots have damaged records; they are free when 1 processes are gone" in errors
        assert "2 slots that had damaged records are free" in errors


def test_who_claims_what_its_slots_do_not_say_keeps_others_from_it_until_it_is_gone(
    sidecar: Killable,
) -> None:
    sidecar.start()
    with RawClient(sidecar.path, b"v" * 16) as client:
        kept = store(client, client.open(), 0, 8)
        capacity = HOST // LAYOUT.block_bytes
    with Holder(sidecar.path, b"r" * 16, names(0, 2), names(20, 2)) as holder:
        sidecar.kill()
        records = RecordFile.read(f"{sidecar.arena}.records")
        sections = records.sections(SectionKind.CLAIMS)
        (section,) = [one for one in sections if claims_in(one).group == b"r" * 16]
        claims = ClaimArrays.recorded(section, capacity)
        free = int(holder.reserved.slots.max()) + 1
        # A lease of a free slot, and of one that is being written; a reservation of one that is committed.
        claims.leases[[free, holder.reserved.slots[0]]] = 1
        claims.reserved[kept.slots[5]] = True
        records.close()
        wrong = {free, int(holder.reserved.slots[0]), int(kept.slots[5])}
        sidecar.start()
        with RawClient(sidecar.path, b"v" * 16) as client:
            space = client.open()
            assert (counts(client)["leased"], counts(client)["reserved"]) == (2, 1)
            assert client.call(GetStats(), Stats).values["host"]["damaged"] == 3
            found = client.call(Match(space, names(0, 8), 0.0), Leased)
            assert found.slots.tolist() == kept.slots[:5].tolist()
            client.call(Release(space, found.slots, found.generations), Done)
            await_true(lambda: ready(client) == HOST)
            client.call(Evict(space, 99), Count)

            def granted() -> set[int]:
                client.call(Evict(space, 99), Count)
                got = client.call(Reserve(space, names(100, capacity), 0.0), Reserved)
                new = got.statuses == NEW
                client.call(Abort(space, got.slots[new], got.generations[new]), Done)
                return set(got.slots[new].tolist())

            held = {*holder.leased.slots.tolist(), int(holder.reserved.slots[1])}
            assert set(range(capacity)) - granted() == wrong | held
            holder.kill()
            await_true(lambda: len(granted()) == capacity)
    sidecar.kill()
    check_arena(sidecar.arena)


def test_another_process_of_the_same_number_is_not_waited_for(sidecar: Killable) -> None:
    sidecar.start()
    with RawClient(sidecar.path, b"v" * 16) as client:
        store(client, client.open(), 0, 4)
    with Holder(sidecar.path, b"r" * 16, names(0, 4), names(20, 2)) as holder:
        for started in (0, 1):
            sidecar.kill()
            records = RecordFile.read(f"{sidecar.arena}.records")
            (book,) = [
                book
                for section in records.sections(SectionKind.GROUP)
                if (book := GroupBook(records, section)).id == b"r" * 16
            ]
            ((pid, since),) = book.processes()
            assert pid == holder.process.pid
            book.remove_process(pid, since)
            book.add_process(pid, since - started)
            records.close()
            sidecar.start()
            with RawClient(sidecar.path, b"v" * 16) as client:
                client.open()
                held = counts(client)
                assert (held["leased"], held["reserved"]) == ((0, 0) if started else (4, 2))


def test_an_arena_that_does_not_say_who_is_to_be_waited_for_is_refused(
    sidecar: Killable, capsys: pytest.CaptureFixture[str]
) -> None:
    sidecar.start()
    with RawClient(sidecar.path) as client:
        store(client, client.open(), 0, 2)
        sidecar.kill()
    records = RecordFile.read(f"{sidecar.arena}.records")
    (section,) = records.sections(SectionKind.GROUP)
    GroupBook(records, section)._started[0] += 1
    records.close()
    assert main(["serve", f"--socket={sidecar.path}", f"--arena={sidecar.arena}", "--quiet"]) == 1
    said = (
        "kvpager serve: --arena: the arena's records of a client group's processes are damaged; --fresh gives"
    )
    assert capsys.readouterr().err.startswith(said)
    sidecar.start("--fresh")


def test_a_stopped_sidecar_leaves_its_arena_if_it_is_asked_to(sidecar: Killable) -> None:
    def blocks() -> int:
        with RawClient(sidecar.path) as client:
            space = client.open()
            found = len(client.call(Match(space, names(0, 4), 0.0), Leased).slots)
            if not found:
                store(client, space, 0, 4)
        return found

    folder = sidecar.arena.parent
    for more, there in (("--keep-arena", 0), ("--keep-arena", 4), ("--fresh", 0)):
        sidecar.start(more)
        assert blocks() == there
        assert [one.owned for one in find_arenas(folder) if one.path == str(sidecar.arena)] == [True]
        assert sidecar.terminate() == 0
        left = [one.owned for one in find_arenas(folder) if one.path == str(sidecar.arena)]
        assert left == ([False] if more == "--keep-arena" else [])
    assert not list(folder.glob(f"{sidecar.arena.name}*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_sidecar_that_is_asked_twice_leaves_nothing_either(sidecar: Killable, number: int) -> None:
    sidecar.start("--drain=600")
    with RawClient(sidecar.path) as client:
        space = client.open()
        client.call(Reserve(space, names(0, 3), 20.0), Reserved)
        os.kill(sidecar.pid, number)

        def stopping() -> bool:
            try:
                client.call(Reserve(space, names(9, 1), 0.0))
            except ServiceUnavailableError:
                return True
            return False

        await_true(stopping)
        os.kill(sidecar.pid, signal.SIGTERM)
        with pytest.raises((EOFError, ConnectionResetError)):
            client.receive()
    assert not list(sidecar.arena.parent.glob(f"{sidecar.arena.name}*"))
