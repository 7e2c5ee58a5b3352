"""Purges: what is gone from host memory and both cold tiers, what is held, and that nothing comes back."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from kvpager.kvstore.handles import ReserveStatus
from kvpager.kvstore.hashing import ChainIdentity, notes_id
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.session import SessionRecord, session_key
from kvpager.kvstore.space import HostSpace
from kvpager.tests.raw_client import LAYOUT, await_true, names
from kvpager.tests.redis_servers import RedisServer, three_masters
from kvpager.tests.troubled_disk import TroubledDisk
from kvpager.tiers.arena_file import ArenaFile
from kvpager.tiers.cold import ColdStatus, ColdTier
from kvpager.tiers.cold_disk import DiskColdTier
from kvpager.tiers.cold_redis import RedisColdTier
from kvpager.tiers.errors import StaleHandleError
from kvpager.tiers.record_file import SectionKind

SIZE = LAYOUT.block_bytes
EXTENT = 4 * SIZE


def host_on(cold: ColdTier | None) -> HostStore:
    made = HostStore(8 * EXTENT, extent_bytes=EXTENT, cold=cold)
    assert made.arena.wait_ready(8, timeout=30.0)
    return made


@pytest.fixture
def store() -> Iterator[HostStore]:
    with host_on(None) as made:
        yield made
        made.check_integrity()


@pytest.fixture(params=["disk", "redis", "cluster"])
def cold(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ColdTier]:
    if request.param == "disk":
        yield DiskColdTier(tmp_path / "cold", capacity_bytes=16 << 20)
    elif request.param == "redis":
        with RedisServer(tmp_path) as server:
            # Two parts a block.
            yield RedisColdTier(server.url, deadline=5.0, value_bytes=SIZE // 2 + 4096)
    else:
        with three_masters(tmp_path) as servers:
            yield RedisColdTier(servers[0].url.replace("redis://", "redis+cluster://"), deadline=5.0)


def fill(space: HostSpace, first: int, count: int) -> None:
    blocks = np.random.default_rng(first).integers(0, 256, (count, SIZE), np.uint8)
    assert space.put(names(first, count), blocks) == count


def resident(space: HostSpace, first: int, count: int) -> int:
    with space.match(names(first, count)) as lease:
        return len(lease)


def loaded(space: HostSpace, first: int, count: int) -> int:
    with space.load(names(first, count), 10.0) as lease:
        return len(lease)


# Host memory


def test_what_nobody_holds_is_gone_at_once(store: HostStore) -> None:
    space = store.space(LAYOUT)
    fill(space, 0, 6)
    assert space.pin(names(0, 1)) == 1
    report = space.purge([*names(0, 3), *names(90, 2)])
    assert report.host_blocks == 3
    assert (len(report.leased), len(report.reserved), report.cold_left) == (0, 0, None)
    assert (resident(space, 0, 1), resident(space, 3, 3), space.resident) == (0, 3, 3)
    assert store.stats.purged == 3
    assert store.tenants()[""]["purged"] == 3


def test_what_is_leased_is_found_by_nobody_and_goes_with_its_last_lease(store: HostStore) -> None:
    space = store.space(LAYOUT)
    fill(space, 0, 4)
    lease, other = space.match(names(0, 2)), space.match(names(0, 1))
    before = np.array(lease.blocks[0])
    report = space.purge(names(0, 4))
    assert report.host_blocks == 2
    held = report.leased
    assert sorted(held.slots.tolist()) == sorted(lease.slots.tolist())
    assert resident(space, 0, 4) == 0
    assert not space.lease(lease.slots, lease.generations).any()
    # It may be written anew beside what is held.
    fill(space, 0, 1)
    assert resident(space, 0, 1) == 1
    store.check_integrity()
    assert np.array_equal(lease.blocks[0], before)
    assert store.tenants()[""]["blocks"] == 3
    # Asked again, it tells again who holds what of it.
    again = space.purge(names(1, 1)).leased
    assert again.slots.tolist() == lease.slots[1:].tolist()
    lease.release()
    assert len(space.still_purged(held)) == 1
    other.release()
    assert len(space.still_purged(held)) == 0
    assert store.tenants()[""]["blocks"] == 1


def test_what_is_being_written_is_never_found(store: HostStore) -> None:
    space = store.space(LAYOUT)
    with space.reserve(names(0, 3)) as reservation:
        report = space.purge(names(0, 2))
        assert len(report.reserved) == 2
        assert space.reserve(names(0, 1)).status.tolist() == [ReserveStatus.NEW]
        reservation.commit()
    assert (resident(space, 0, 1), resident(space, 2, 1)) == (0, 1)
    assert store.stats.committed == 1
    with pytest.raises(StaleHandleError):
        space.commit(reservation.slots, reservation.generations)


def test_all_of_a_space_goes_and_nothing_of_another(store: HostStore) -> None:
    anna, bert = store.space(LAYOUT, tenant="anna"), store.space(LAYOUT, tenant="bert")
    fill(anna, 0, 5)
    fill(bert, 0, 5)
    with anna.reserve(names(50, 1)):
        report = anna.purge(None)
    assert (report.host_blocks, len(report.reserved)) == (5, 1)
    assert (anna.resident, bert.resident) == (0, 5)


def test_a_purged_extent_that_is_held_is_not_given_to_others(store: HostStore) -> None:
    one, two = store.space(LAYOUT, shard="1"), store.space(LAYOUT, shard="2")
    fill(one, 0, 32)
    with one.match(names(0, 1)) as lease:
        one.purge(names(0, 32))
        fill(two, 0, 12)
        assert int(lease.slots[0]) // one.slots_per_extent in one.extents
        store.check_integrity()


# The cold tiers


def test_named_blocks_are_gone_from_the_cold_tier(cold: ColdTier) -> None:
    with host_on(cold) as store:
        space = store.space(LAYOUT)
        fill(space, 0, 8)
        assert store.flush() == 0
        space.evict(8)
        report = space.purge(names(0, 3))
        assert (report.host_blocks, report.cold_blocks, report.cold_left) == (0, 3, None)
        assert not cold.contains(space.id, names(0, 3)).any()
        assert (loaded(space, 0, 3), loaded(space, 3, 5)) == (0, 5)
        store.check_integrity()


def test_all_of_a_tenant_is_gone_from_the_cold_tier_whatever_its_name_was(cold: ColdTier) -> None:
    with host_on(cold) as store:
        anna, bert = store.space(LAYOUT, tenant="anna"), store.space(LAYOUT, tenant="bert")
        for space in (anna, bert):
            fill(space, 0, 8)
            assert space.put_note(b"session", b"value")
        assert store.flush() == 0
        anna.evict(6)
        report = anna.purge(None)
        assert (report.host_blocks, report.cold_blocks, report.notes, report.cold_left) == (2, 8, 1, None)
        assert loaded(anna, 0, 8) == 0
        assert anna.get_note(b"session") is None
        bert.evict(8)
        assert loaded(bert, 0, 8) == 8
        assert bert.get_note(b"session") == b"value"


def test_a_named_note_is_gone(cold: ColdTier) -> None:
    with host_on(cold) as store:
        for tenant in ("", "anna"):
            space = store.space(LAYOUT, tenant=tenant)
            assert space.put_note(b"one", b"1")
            assert space.put_note(b"two", b"2")
            report = space.purge([], notes=[b"one", b"none"])
            assert (report.notes, report.cold_left) == (1, None)
            assert (space.get_note(b"one"), space.get_note(b"two")) == (None, b"2")


def test_a_tenant_is_gone_for_the_next_process_too(tmp_path: Path) -> None:
    for purges in (True, False):
        with host_on(DiskColdTier(tmp_path / "cold", capacity_bytes=16 << 20)) as store:
            space = store.space(LAYOUT, tenant="anna")
            if purges:
                fill(space, 0, 4)
                assert store.flush() == 0
                assert space.purge(None).cold_blocks == 4
            assert loaded(space, 0, 4) == 0
    assert not [path for path in (tmp_path / "cold").rglob("*") if space.id.hex() in path.name]


class SlowDisk(TroubledDisk):
    """A disk whose writes stop where a test says, and go on when it does."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.writing, self.go_on = threading.Event(), threading.Event()

    def _put_blocks(self, *arguments: object) -> object:  # type: ignore[override]
        self.writing.set()
        assert self.go_on.wait(30)
        return super()._put_blocks(*arguments)  # type: ignore[arg-type]


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_copy_that_is_under_way_to_the_cold_tier_is_waited_for_and_removed(tmp_path: Path) -> None:
    cold = SlowDisk(tmp_path / "cold")
    with host_on(cold) as store:
        space = store.space(LAYOUT)
        fill(space, 0, 2)
        flush = in_thread(lambda: store.flush(20.0))
        assert cold.writing.wait(30)
        late = space.purge(names(0, 1), deadline=0.05)
        assert (late.host_blocks, late.cold_left) == (0, ColdStatus.LATE)
        reports = []
        purge = in_thread(lambda: reports.append(space.purge(names(0, 2), deadline=20.0)))
        await_true(lambda: space.resident == 0)
        cold.go_on.set()
        purge.join()
        flush.join()
        assert (reports[0].host_blocks, reports[0].cold_left) == (2, None)
        await_true(lambda: not cold.contains(space.id, names(0, 2)).any())
        assert loaded(space, 0, 2) == 0
        assert store.tenants()[""]["blocks"] == 0


def test_what_a_cold_tier_that_is_down_keeps_is_not_loaded_and_goes_later(tmp_path: Path) -> None:
    cold = TroubledDisk(tmp_path / "cold")
    with host_on(cold) as store:
        space = store.space(LAYOUT)
        fill(space, 0, 6)
        assert store.flush() == 0
        space.evict(6)
        cold.fault = ColdStatus.UNAVAILABLE
        report = space.purge(names(0, 2))
        assert (report.cold_blocks, report.cold_left) == (0, ColdStatus.UNAVAILABLE)
        cold.fault = None
        assert loaded(space, 0, 2) == 0
        assert loaded(space, 2, 4) == 4
        await_true(lambda: not cold.contains(space.id, names(0, 2)).any())
        assert cold.contains(space.id, names(2, 4)).all()


def test_what_a_cold_tier_kept_is_not_loaded_by_the_next_process_either(tmp_path: Path) -> None:
    def opened() -> tuple[TroubledDisk, HostStore, HostSpace, HostSpace]:
        cold = TroubledDisk(tmp_path / "cold")
        cold.fault = ColdStatus.UNAVAILABLE
        arena = ArenaFile(str(tmp_path / "arena"), keep=True, cold="disk")
        store = HostStore(8 * EXTENT, extent_bytes=EXTENT, cold=cold, arena=arena)
        assert store.arena.wait_ready(8, timeout=30.0)
        return cold, store, store.space(LAYOUT), store.space(LAYOUT, tenant="anna")

    def barred(store: HostStore) -> int:
        assert store.records is not None
        return len(store.records.sections(SectionKind.BARRED))

    cold, store, named, whole = opened()
    with store:
        cold.fault = None
        for space in (named, whole):
            fill(space, 0, 4)
            assert store.flush() == 0
            space.evict(4)
        cold.fault = ColdStatus.UNAVAILABLE
        assert named.purge(names(0, 2)).cold_left is ColdStatus.UNAVAILABLE
        assert whole.purge(None).cold_left is ColdStatus.UNAVAILABLE
        assert barred(store) == 2
    cold, store, named, whole = opened()
    with store:
        assert barred(store) == 2
        assert cold._index
        cold.fault = None
        assert (loaded(named, 0, 2), loaded(whole, 0, 4)) == (0, 0)
        assert loaded(named, 2, 2) == 2
        await_true(lambda: barred(store) == 0)
        assert not cold.contains(named.id, names(0, 2)).any()
        assert not cold.contains(whole.id, names(0, 4)).any()
        store.check_integrity()


def note_in(cold: ColdTier, space: HostSpace, name: bytes) -> ColdStatus:
    """What the cold tier itself says of a note."""
    if not space.tenant:
        return cold.get_note(space.id + name)[0]
    return cold.get_note(space.id + name, space=notes_id(space.id))[0]


@pytest.mark.parametrize(("tenant", "all_of_it"), [("", False), ("anna", False), ("anna", True)])
def test_notes_that_a_cold_tier_keeps_are_not_read_and_go_later(
    tmp_path: Path, tenant: str, all_of_it: bool
) -> None:
    cold = TroubledDisk(tmp_path / "cold")
    with host_on(cold) as store:
        space = store.space(LAYOUT, tenant=tenant)
        for name in (b"one", b"two"):
            assert space.put_note(name, name)
        cold.fault = ColdStatus.UNAVAILABLE
        # Nothing of it is in host memory, or among the cold tier's blocks.
        report = space.purge(None) if all_of_it else space.purge([], notes=[b"one"])
        assert (report.notes, report.cold_left) == (0, ColdStatus.UNAVAILABLE)
        assert not space.put_note(b"one", b"not kept")
        cold.fault = None
        assert note_in(cold, space, b"one") is ColdStatus.OK
        assert space.get_note(b"one") is None
        await_true(lambda: note_in(cold, space, b"one") is ColdStatus.MISS)
        assert space.get_note(b"two") == (None if all_of_it else b"two")
        assert space.put_note(b"one", b"again")
        assert space.get_note(b"one") == b"again"


def test_a_note_that_is_put_anew_before_the_old_one_is_gone_is_kept(tmp_path: Path) -> None:
    cold = TroubledDisk(tmp_path / "cold")
    with host_on(cold) as store:
        space = store.space(LAYOUT, tenant="anna")
        chosen: list[list[bytes] | None] = [[], None]
        for hashes in chosen:
            assert space.put_note(b"one", b"old")
            cold.fault = ColdStatus.UNAVAILABLE
            assert space.purge(hashes, notes=[b"one"]).cold_left is ColdStatus.UNAVAILABLE
            cold.fault = None
            assert space.put_note(b"one", b"new")
            assert space.get_note(b"one") == b"new"
            time.sleep(1.3)  # longer than until it is tried again
            assert space.get_note(b"one") == b"new"


def test_notes_that_a_cold_tier_kept_are_not_read_by_the_next_process_either(tmp_path: Path) -> None:
    def opened(cold: TroubledDisk) -> HostStore:
        arena = ArenaFile(str(tmp_path / "arena"), keep=True, cold="disk")
        return HostStore(8 * EXTENT, extent_bytes=EXTENT, cold=cold, arena=arena)

    cold = TroubledDisk(tmp_path / "cold")
    with opened(cold) as store:
        for tenant in ("", "anna"):
            assert store.space(LAYOUT, tenant=tenant).put_note(b"one", b"value")
        cold.fault = ColdStatus.UNAVAILABLE
        assert store.space(LAYOUT).purge([], notes=[b"one"]).cold_left is ColdStatus.UNAVAILABLE
        assert store.space(LAYOUT, tenant="anna").purge(None).cold_left is ColdStatus.UNAVAILABLE
    cold = TroubledDisk(tmp_path / "cold")
    cold.fault = ColdStatus.UNAVAILABLE
    with opened(cold) as store:
        spaces = [store.space(LAYOUT, tenant=tenant) for tenant in ("", "anna")]
        cold.fault = None
        for space in spaces:
            assert space.get_note(b"one") is None
        await_true(lambda: {note_in(cold, space, b"one") for space in spaces} == {ColdStatus.MISS})
        records = store.records
        assert records is not None
        await_true(lambda: not records.sections(SectionKind.BARRED))


def test_a_name_that_is_written_anew_is_loaded_again(tmp_path: Path) -> None:
    cold = TroubledDisk(tmp_path / "cold")
    with host_on(cold) as store:
        space = store.space(LAYOUT)
        fill(space, 0, 2)
        space.purge(names(0, 2))
        fill(space, 0, 2)
        assert store.flush() == 0
        space.evict(2)
        assert loaded(space, 0, 2) == 2


def test_a_session_names_all_of_its_blocks() -> None:
    root = ChainIdentity(b"model").root
    record = SessionRecord(root, 40, np.arange(50, dtype=np.int32))
    blocks = record.blocks(16)
    assert len(blocks) == 3
    assert blocks[:2] == list(record.sleeping(16).hashes)
    assert session_key(root, "name") != session_key(root, "other")


def test_nothing_comes_back_beside_writers_loads_and_evictions(tmp_path: Path) -> None:
    """Every name is written once, so that what is found after its purge came back."""
    cold = DiskColdTier(tmp_path / "cold", capacity_bytes=64 << 20)
    with host_on(cold) as store:
        space = store.space(LAYOUT, tenant="anna")
        written: list[int] = []
        purged: list[int] = []
        back: list[int] = []
        stop = threading.Event()
        rng = random.Random(0)

        def write() -> None:
            first = 0
            while not stop.is_set():
                if space.put(names(first, 4), np.zeros((4, SIZE), np.uint8), wait=1.0):
                    written.extend(range(first, first + 4))
                first += 4

        def load() -> None:
            while not stop.is_set():
                number = rng.choice(written or [0])
                with space.load(names(number, 1), 0.05), space.match(names(number, 1)):
                    pass

        def purge() -> None:
            while not stop.is_set():
                chosen = rng.sample(written, min(len(written), 5))
                report = space.purge([name for number in chosen for name in names(number, 1)], deadline=20.0)
                assert report.cold_left is None
                purged.extend(chosen)
                for number in rng.sample(purged, min(len(purged), 10)):
                    with space.load(names(number, 1), 1.0) as lease:
                        back.extend([number] * len(lease))

        threads = [in_thread(work) for work in (write, load, load, purge)]
        await_true(lambda: len(purged) > 300 or bool(back), 60.0)
        stop.set()
        for thread in threads:
            thread.join()
        assert not back
        store.check_integrity()
        assert space.purge(None).cold_left is None
        assert store.tenants()["anna"]["blocks"] == 0
        assert not cold._index
