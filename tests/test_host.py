from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kvpager.kvstore import cold_writes
from kvpager.kvstore.events import BlockEvent, EventKind
from kvpager.kvstore.handles import ReserveStatus
from kvpager.kvstore.hashing import ChainIdentity, hash_blocks
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.policy import Retention
from kvpager.kvstore.space import HostSpace
from kvpager.kvstore.store import TieredStore
from kvpager.tests.troubled_disk import TroubledDisk
from kvpager.tiers.cold import ColdStatus, StatusArray
from kvpager.tiers.cold_disk import DiskColdTier
from kvpager.tiers.errors import (
    ClosedError,
    ConfigError,
    IntegrityError,
    LayoutError,
    MemoryUnavailableError,
    StaleHandleError,
)
from kvpager.tiers.layout import KVLayout
from kvpager.tiers.pinned import PinnedArena

SMALL = KVLayout(1, 1, 32, block_size=4, dtype="float32")  # 1 KiB, four to an extent
LARGE = KVLayout(1, 1, 32, block_size=8, dtype="float32")  # 2 KiB, two to an extent
EXTENT = 4096


@contextmanager
def store(
    extents: int, cold: DiskColdTier | None = None, clean_ahead: float = 0.25, cold_deadline: float = 5.0
) -> Iterator[HostStore]:
    with HostStore(
        extents * EXTENT,
        cold=cold,
        extent_bytes=EXTENT,
        clean_ahead=clean_ahead,
        cold_deadline=cold_deadline,
    ) as host:
        host.arena.wait_ready(extents)
        yield host
        host.check_integrity()


def names(first: int, count: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in range(first, first + count)]


def blocks(first: int, count: int, layout: KVLayout = SMALL) -> npt.NDArray[np.uint8]:
    """Block ``n`` is full of ``n`` + 1."""
    numbers = np.arange(first + 1, first + count + 1, dtype=np.uint8)
    return np.repeat(numbers[:, None], layout.block_bytes, axis=1)


def put(space: HostSpace, first: int, count: int, wait: float = 0.0) -> int:
    return space.put(names(first, count), blocks(first, count, space.layout), wait=wait)


def resident(space: HostSpace, first: int, count: int) -> list[int]:
    """Which of these blocks are there, each with its own bytes."""
    found = []
    out = np.empty((1, space.layout.block_bytes), dtype=np.uint8)
    for number in range(first, first + count):
        if space.get(names(number, 1), out):
            assert (out == number + 1).all()
            found.append(number)
    return found


# Writing and finding


def test_what_was_put_is_got_as_far_as_the_prefix_goes() -> None:
    with store(2) as host:
        space = host.space(SMALL)
        assert put(space, 0, 3) == 3
        assert put(space, 4, 1) == 1
        out = np.zeros((5, SMALL.block_bytes), dtype=np.uint8)
        assert space.get(names(0, 5), out) == 3
        assert (out[:3] == blocks(0, 3)).all()
        assert not out[3:].any()
        assert (host.stats.matched, host.stats.missed, host.stats.committed) == (3, 2, 4)
        assert host.stats.matched_tokens == 3 * SMALL.block_size


def test_rows_may_lie_apart_but_must_be_whole_blocks_of_bytes() -> None:
    with store(2) as host:
        space = host.space(SMALL)
        apart = np.zeros((3, 2 * SMALL.block_bytes), dtype=np.uint8)
        apart[:, : SMALL.block_bytes] = blocks(0, 3)
        assert space.put(names(0, 3), apart[:, : SMALL.block_bytes]) == 3
        assert resident(space, 0, 3) == [0, 1, 2]
        for wrong in (
            apart,
            apart[:, ::2],
            apart[0, : SMALL.block_bytes],
            apart[:2, : SMALL.block_bytes],
        ):
            with pytest.raises(LayoutError, match="blocks must be uint8"):
                space.put(names(3, 3), wrong)


@pytest.mark.parametrize(
    "wrong",
    [None, "x", b"x" * 1024, [[0] * 1024], np.zeros((1, 1024), np.int8), np.zeros((1, 1000), np.uint8), 5],
    ids=lambda wrong: type(wrong).__name__,
)
def test_blocks_that_are_no_array_of_whole_blocks_are_refused(wrong: Any) -> None:
    with store(1) as host:
        space = host.space(SMALL)
        for call in (space.put, space.get):
            with pytest.raises(LayoutError, match=r"(blocks|out) must be uint8 \[1, 1024\]"):
                call(names(0, 1), wrong)


def test_blocks_are_never_read_into_memory_that_cannot_be_written_or_that_overlaps() -> None:
    fixed = blocks(0, 1)
    fixed.flags.writeable = False
    overlapping = np.lib.stride_tricks.as_strided(blocks(0, 1), (2, SMALL.block_bytes), (0, 1))
    with store(1) as host:
        space = host.space(SMALL)
        put(space, 0, 2)
        for out in (fixed, overlapping):
            with pytest.raises(LayoutError, match="must be writable"):
                space.get(names(0, len(out)), out)


def test_nobody_finds_a_block_before_it_is_committed_or_after_it_was_aborted() -> None:
    with store(2) as host:
        space = host.space(SMALL)
        with space.reserve(names(0, 3)) as reservation:
            assert reservation.status.tolist() == [ReserveStatus.NEW] * 3
            assert len(space.match(names(0, 3))) == 0
            reservation.commit(np.array([0, 1]))
            host.check_integrity()
        assert len(space.match(names(0, 3))) == 2
        assert space.reserve(names(2, 1)).status.tolist() == [ReserveStatus.NEW]


def test_a_reservation_tells_what_is_new_present_pending_or_denied() -> None:
    with store(1) as host:
        space = host.space(SMALL)
        put(space, 0, 1)
        other = space.reserve(names(1, 1))
        space.pin(names(0, 1))
        asked = [*names(0, 4), names(2, 1)[0], *names(4, 1)]
        reservation = space.reserve(asked)
        assert reservation.status.tolist() == [
            ReserveStatus.PRESENT,
            ReserveStatus.PENDING,
            ReserveStatus.NEW,
            ReserveStatus.NEW,
            ReserveStatus.PENDING,
            ReserveStatus.DENIED,
        ]
        assert reservation.new.tolist() == [2, 3]
        assert host.stats.denied == 1
        with space.match(names(0, 1)) as lease:
            assert reservation.slots[0] == lease.slots[0]
            assert reservation.generations[0] == lease.generations[0]
        reservation.abort()
        other.abort()


def test_what_the_policy_does_not_find_worth_a_place_is_counted_by_itself_and_not_waited_for() -> None:
    with HostStore(EXTENT, extent_bytes=EXTENT, policy="cost") as host:
        assert host.arena.wait_ready(1, timeout=30.0)
        space = host.space(SMALL, tenant="anna")
        assert put(space, 0, 4) == 4
        space.hint(names(0, 4), wanted=True, retention=Retention(priority=100))
        began = time.monotonic()
        assert put(space, 10, 2, wait=30.0) == 0
        assert time.monotonic() - began < 15.0
        assert (host.stats.unwanted, host.stats.denied) == (2, 0)
        with space.match(names(0, 4)):
            put(space, 10, 3)
        assert (host.stats.unwanted, host.stats.denied) == (2, 3)
        told = host.tenants()["anna"]
        assert (told["unwanted"], told["denied"]) == (2, 3)


def test_making_room_never_evicts_what_the_same_reservation_found_present() -> None:
    with store(1) as host:
        space = host.space(SMALL)
        put(space, 0, 4)
        reservation = space.reserve([*names(0, 1), *names(10, 3)])
        assert reservation.status.tolist() == [ReserveStatus.PRESENT, *[ReserveStatus.NEW] * 3]
        assert resident(space, 0, 4) == [0]


def test_hashes_of_another_length_are_refused_before_anything_is_taken() -> None:
    with store(1) as host:
        space = host.space(SMALL)
        with pytest.raises(ConfigError, match="16 bytes"):
            space.reserve([b"x" * 15, b"y" * 17])
        host.check_integrity()
        assert put(space, 0, 4) == 4


def test_a_prefix_that_names_a_block_twice_is_refused() -> None:
    with store(1) as host:
        space = host.space(SMALL)
        put(space, 0, 2)
        with pytest.raises(ConfigError, match="named twice"):
            space.match(names(0, 1) * 2)
        host.check_integrity()


def test_match_hashes_tokens_itself_and_wants_one_or_the_other() -> None:
    with store(1) as host:
        space = host.space(SMALL)
        root = ChainIdentity(b"m").root
        hashes = hash_blocks(range(9), 4, root)
        space.put(hashes, blocks(0, 2))
        with space.match(tokens=range(9), chain=root) as lease:
            assert len(lease) == 2
        with pytest.raises(ConfigError, match="hashes"):
            space.match()


def test_equal_layouts_and_shards_open_one_space_and_others_never_see_each_other() -> None:
    with store(4) as host:
        space = host.space(SMALL)
        assert host.space(KVLayout(1, 1, 32, block_size=4, dtype="float32")) is space
        put(space, 0, 2)
        for other in (
            host.space(SMALL, shard="tp1/2"),
            host.space(KVLayout(1, 1, 64, block_size=4, dtype="float16")),
        ):
            assert len(other.match(names(0, 2))) == 0


# Leases and stale handles


def test_slots_that_are_none_of_the_space_have_no_address() -> None:
    with store(4) as host:
        space = host.space(SMALL)
        last = space.capacity - 1
        assert len(space.addresses(np.array([0, last], np.int32))) == 2
        for wrong in (-1, last + 1, 10**9):
            with pytest.raises(ConfigError, match=f"slots: must be from 0 to {last}"):
                space.addresses(np.array([0, wrong], np.int32))


def test_a_cold_tier_that_is_full_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cold = TroubledDisk(tmp_path)
    cold.fault = ColdStatus.FULL
    with store(4, cold=cold) as host:
        space = host.space(SMALL)
        assert put(space, 0, 4, wait=5.0) == 4
        assert host.flush(0.2) == 4
        assert host.flush(0.2) == 4
    assert sum("the cold tier is full, or too small" in text for text in caplog.messages) == 1


def test_a_cold_tier_that_does_not_hold_one_block_is_refused_by_name(tmp_path: Path) -> None:
    wide = KVLayout(1, 1, 32, block_size=16, dtype="float32")  # 4 KiB, and a header is beside it
    said = "cold.capacity_bytes: 4096 bytes do not hold a block of 4096 bytes: give at least 8192"
    with store(4, cold=DiskColdTier(tmp_path / "small", capacity_bytes=4096)) as host:
        assert host.space(SMALL).put(names(0, 1), blocks(0, 1), wait=5.0) == 1
        with pytest.raises(ConfigError) as caught:
            host.space(wide)
        assert str(caught.value) == said
        with pytest.raises(ConfigError) as caught:
            TieredStore(wide, 4, root=b"r" * 16, host=host)
        assert str(caught.value) == said
    # What the error asks for is enough.
    with store(4, cold=DiskColdTier(tmp_path / "enough", capacity_bytes=8192)) as host:
        space = host.space(wide)
        assert space.put(names(0, 1), blocks(0, 1, wide), wait=5.0) == 1
        assert host.flush() == 0
        assert host.stats.cold_written == 1


def test_a_hit_needs_every_shard() -> None:
    with store(6) as host:
        shards = [host.space(SMALL, shard=f"tp{rank}/3") for rank in range(3)]
        for shard, count in zip(shards, (3, 1, 2), strict=True):
            assert shard.put(names(0, count), blocks(0, count), wait=5.0) == count
        leases = host.match(shards, names(0, 4))
        assert [len(lease) for lease in leases] == [1, 1, 1]
        host.check_integrity()
        # What not all of them have is not leased.
        assert [shard.evict(9) for shard in shards] == [2, 0, 1]
        for lease in leases:
            lease.release()
        assert [shard.evict(9) for shard in shards] == [1, 1, 1]


def test_leased_blocks_stay_and_released_ones_go_leaves_first() -> None:
    with store(1) as host:
        space = host.space(SMALL)
        put(space, 0, 4)
        with space.match(names(0, 2)):
            assert put(space, 10, 3) == 2
            assert resident(space, 0, 4) == [0, 1]
        space.match(names(0, 2)).release()
        assert space.evict(3) == 3
        assert resident(space, 0, 20) == [0]


def test_a_lease_ends_once_however_often_it_is_released() -> None:
    with store(1) as host:
        space = host.space(SMALL)
        put(space, 0, 1)
        kept = space.match(names(0, 1))
        lease = space.match(names(0, 1))
        lease.release()
        lease.release()
        assert space.evict(1) == 0
        kept.release()
        assert space.evict(1) == 1


def test_handles_of_a_slot_that_was_granted_again_are_refused_and_the_others_served() -> None:
    with store(1) as host:
        space = host.space(SMALL)
        put(space, 0, 4)
        lease = space.match(names(0, 4))
        lease.release()
        space.evict(4)
        put(space, 10, 4)
        assert not space.lease(lease.slots, lease.generations).any()
        with pytest.raises(StaleHandleError, match="release refused"):
            space.release(lease.slots, lease.generations)
        now = space.match(names(10, 4))
        mixed = now.generations.copy()
        mixed[0] = lease.generations[0]
        with pytest.raises(StaleHandleError):
            space.release(now.slots, mixed)
        host.check_integrity()
        assert space.evict(4) == 3
        assert host.stats.stale == 5
        now = space.match(names(10, 1))
        space.release(now.slots, now.generations)


def test_late_commits_and_aborts_are_refused_and_the_others_done() -> None:
    with store(1) as host:
        space = host.space(SMALL)
        late = space.reserve(names(0, 2))
        slots, generations = late.slots.copy(), late.generations.copy()
        late.abort(np.array([0]))
        again = space.reserve(names(5, 1))
        assert again.slots[0] == slots[0]
        with pytest.raises(StaleHandleError, match="commit refused"):
            space.commit(slots, generations)
        assert len(space.match(names(1, 1))) == 1
        assert len(space.match(names(0, 1))) == 0
        with pytest.raises(StaleHandleError, match="abort refused"):
            space.abort(slots, generations)
        host.check_integrity()
        again.commit()


def test_a_handle_that_is_named_twice_counts_once() -> None:
    with store(1) as host:
        space = host.space(SMALL)
        put(space, 0, 1)
        lease = space.match(names(0, 1))
        twice, generations = np.repeat(lease.slots, 2), np.repeat(lease.generations, 2)
        assert space.lease(twice, generations).tolist() == [True, False]
        with pytest.raises(StaleHandleError):
            space.release(twice, generations)
        lease.release()
        host.check_integrity()
        reservation = space.reserve(names(1, 1))
        with pytest.raises(StaleHandleError):
            space.commit(np.repeat(reservation.slots, 2), np.repeat(reservation.generations, 2))
        host.check_integrity()


def test_handles_of_one_store_name_nothing_in_another() -> None:
    with store(1) as first, store(1) as second:
        put(first.space(SMALL), 0, 1)
        put(second.space(SMALL), 0, 1)
        lease = first.space(SMALL).match(names(0, 1))
        assert not second.space(SMALL).lease(lease.slots, lease.generations).any()


def test_pinned_blocks_stay_until_they_are_unpinned_as_often() -> None:
    with store(1) as host:
        space = host.space(SMALL)
        put(space, 0, 4)
        assert space.pin(names(0, 2)) == 2
        assert space.pin(names(0, 6)) == 4
        assert space.unpin([*names(0, 4), names(0, 1)[0], *names(50, 1)]) == 4
        assert space.evict(9) == 2
        assert resident(space, 0, 4) == [0, 1]
        assert space.unpin(names(0, 4)) == 2
        assert space.unpin(names(0, 4)) == 0
        assert space.evict(9) == 2


def test_a_pin_is_not_ended_by_a_handle() -> None:
    with store(1) as host:
        space = host.space(SMALL)
        put(space, 0, 1)
        lease = space.match(names(0, 1))
        space.pin(names(0, 1))
        lease.release()
        with pytest.raises(StaleHandleError):
            space.release(lease.slots, lease.generations)
        assert space.evict(1) == 0


# Extents


def test_spaces_of_different_block_sizes_share_the_arena_and_recycle_extents() -> None:
    with store(4) as host:
        small, large = host.space(SMALL), host.space(LARGE)
        assert put(small, 0, 16) == 16
        assert len(small.extents) == 4
        assert put(large, 0, 4) == 4
        assert (len(small.extents), len(large.extents)) == (2, 2)
        host.check_integrity()
        assert resident(large, 0, 4) == [0, 1, 2, 3]
        assert len(resident(small, 0, 16)) == 8
        put(small, 20, 8)
        assert len(small.extents) + len(large.extents) == 4
        assert resident(large, 0, 4) == [0, 1, 2, 3]


def test_an_extent_with_a_leased_or_reserved_slot_is_never_taken() -> None:
    with store(2) as host:
        small, large = host.space(SMALL), host.space(LARGE)
        put(small, 0, 8)
        leases = [small.match(names(0, 1)), small.match(names(7, 1))]
        assert put(large, 0, 1) == 0
        leases[0].release()
        assert put(large, 0, 1) == 1
        assert resident(small, 7, 1) == [7]
        leases[1].release()


def test_an_extent_is_taken_from_whichever_space_can_give_one() -> None:
    with store(5) as host:
        first, second, third = host.space(SMALL), host.space(SMALL, shard="b"), host.space(LARGE)
        put(first, 0, 12)
        put(second, 0, 8)
        leases = [first.match(names(at, 1)) for at in range(12)]
        assert put(third, 0, 1) == 1
        for lease in leases:
            lease.release()


def test_a_space_that_came_late_takes_what_lies_idle_up_to_its_share() -> None:
    with store(8) as host:
        idle, busy = host.space(SMALL), host.space(LARGE)
        put(idle, 0, 32)
        for first in range(0, 40, 2):
            assert put(busy, first, 2) == 2
        assert (len(idle.extents), len(busy.extents)) == (4, 4)
        host.check_integrity()
        assert resident(busy, 32, 8) == list(range(32, 40))


def test_a_space_that_came_late_takes_nothing_that_is_used_more_than_its_own() -> None:
    with store(4) as host:
        first, second = host.space(SMALL), host.space(LARGE)
        put(first, 0, 16)
        put(second, 0, 2)
        for number in range(2, 12):
            for at in range(16):
                first.match(names(at, 1)).release()
            put(second, number, 1)
        assert (len(first.extents), len(second.extents)) == (3, 1)


def test_a_block_larger_than_an_extent_is_refused() -> None:
    with store(1) as host, pytest.raises(ConfigError, match="extent_bytes"):
        host.space(KVLayout(64, 1, 32, dtype="float32"))


# The cold tier


def test_copied_blocks_are_evicted_before_others_and_come_back_from_the_cold_tier(tmp_path: Path) -> None:
    cold = TroubledDisk(tmp_path)
    with store(2, cold) as host:
        space = host.space(SMALL)
        put(space, 0, 4)
        assert host.flush() == 0
        cold.fault = ColdStatus.UNAVAILABLE
        put(space, 4, 4)
        # The cold tier was last known to take blocks, so nothing is lost while there are copied ones.
        assert put(space, 8, 4) == 4
        assert resident(space, 0, 12) == list(range(4, 12))
        assert host.stats.dropped == 0
        cold.fault = None
        with space.load(names(0, 4), 5.0) as lease:
            assert len(lease) == 4
        assert resident(space, 0, 4) == [0, 1, 2, 3]
        assert host.stats.cold_loaded == 4


def test_the_coldest_blocks_are_copied_ahead_of_eviction(tmp_path: Path) -> None:
    with store(4, TroubledDisk(tmp_path), clean_ahead=0.5) as host:
        space = host.space(SMALL)
        put(space, 0, 16)
        end = time.monotonic() + 5.0
        while space.dirty > 8 and time.monotonic() < end:
            time.sleep(0.01)
        assert space.dirty == 8
        assert space._records.in_cold[space.match(names(0, 16)).slots].sum() == 8
        for lease in (space.match(names(0, 16)),):
            space.release(lease.slots, lease.generations)
            space.release(lease.slots, lease.generations)


@pytest.mark.parametrize(("extents", "ahead"), [(1, 0.25), (2, 0.0)])
def test_room_comes_also_where_the_clean_share_is_less_than_a_slot(
    tmp_path: Path, extents: int, ahead: float
) -> None:
    layout = KVLayout(1, 1, 32, block_size=16, dtype="float32")  # one block an extent
    with store(extents, TroubledDisk(tmp_path), clean_ahead=ahead) as host:
        space = host.space(layout)
        for number in range(6):
            assert put(space, number, 1, wait=5.0) == 1
        with space.load(names(0, 1), 5.0) as lease:
            assert len(lease) == 1


def test_who_waits_for_room_gets_it_when_the_background_writer_has_made_it(tmp_path: Path) -> None:
    cold = TroubledDisk(tmp_path)
    with store(1, cold) as host:
        space = host.space(SMALL)
        put(space, 0, 4)
        cold.pause = 0.05
        assert put(space, 4, 4, wait=5.0) == 4
        assert host.stats.dropped == 0


def test_what_cannot_be_reserved_at_once_is_not_reserved_in_part(tmp_path: Path) -> None:
    cold = TroubledDisk(tmp_path)
    with store(1, cold) as host:
        space = host.space(SMALL)
        cold.pause = 0.2
        count = space.capacity - 1
        first = space.reserve_at_once(names(0, count))
        assert first is not None
        first.commit()
        assert space.reserve_at_once(names(100, 2)) is None  # one is free, one comes when it is copied below
        assert host.stats.denied == 0
        with space.reserve(names(100, 2), wait=20.0) as reservation:
            assert len(reservation.new) == 2


def test_a_cold_tier_that_refuses_costs_hits_and_never_time(tmp_path: Path) -> None:
    cold = TroubledDisk(tmp_path)
    with store(1, cold) as host:
        space = host.space(SMALL)
        cold.fault = ColdStatus.UNAVAILABLE
        put(space, 0, 4)
        host.flush(1.0)
        cold.pause = 0.5
        for first in range(4, 40, 4):
            began = time.monotonic()
            assert put(space, first, 4, wait=5.0) == 4
            assert time.monotonic() - began < 0.4
        assert host.stats.dropped >= 32
        cold.fault, cold.pause = None, 0.0
        end = time.monotonic() + 10.0
        while host.flush(1.0) and time.monotonic() < end:
            time.sleep(0.05)
        assert host._shared.cold.takes


def test_a_load_ends_at_its_deadline_and_serves_the_next_request(tmp_path: Path) -> None:
    cold = TroubledDisk(tmp_path)
    with store(2, cold) as host:
        space = host.space(SMALL)
        put(space, 0, 4)
        host.flush()
        space.evict(4)
        cold.pause = 0.4
        began = time.monotonic()
        with space.load(names(0, 4), 0.1) as lease:
            assert len(lease) == 0
        assert time.monotonic() - began < 0.3
        host.check_integrity()
        with space.load(names(0, 4), 5.0) as lease:
            assert len(lease) == 4
        assert host.stats.cold_loaded == 4


def test_a_load_of_what_is_nowhere_evicts_nothing(tmp_path: Path) -> None:
    with store(2, TroubledDisk(tmp_path)) as host:
        space = host.space(SMALL)
        put(space, 0, 8)
        host.flush()
        with space.load(names(100, 50), 5.0) as lease:
            assert len(lease) == 0
        assert resident(space, 0, 8) == list(range(8))


def test_a_load_of_more_than_fits_keeps_the_beginning(tmp_path: Path) -> None:
    with store(1, TroubledDisk(tmp_path)) as host:
        space = host.space(SMALL)
        for first in range(0, 12, 4):
            put(space, first, 4, wait=5.0)
            host.flush()
        with space.load(names(0, 12), 5.0) as lease:
            assert len(lease) == 4


def test_two_loads_of_the_same_blocks_read_them_once(tmp_path: Path) -> None:
    cold = TroubledDisk(tmp_path)
    with store(2, cold) as host:
        space = host.space(SMALL)
        put(space, 0, 4)
        host.flush()
        space.evict(4)
        cold.pause = 0.1
        loads = [space.start_load(names(0, 4)) for _ in range(2)]
        assert all(load.wait(5.0) for load in loads)
        for load in loads:
            load.release()
        assert sum(load.loaded for load in loads) == 4
        assert resident(space, 0, 4) == [0, 1, 2, 3]
        assert host.stats.cold_loaded == 4


def test_a_match_counts_what_the_cold_tier_seems_to_have_beyond_it(tmp_path: Path) -> None:
    with store(2, TroubledDisk(tmp_path)) as host:
        space = host.space(SMALL)
        put(space, 0, 6)
        host.flush()
        with space.match(names(0, 2)):
            space.evict(6)
        with space.match(names(0, 9), cold_deadline=5.0) as lease:
            assert (len(lease), lease.cold) == (2, 4)
        with space.match(names(0, 9)) as lease:
            assert (len(lease), lease.cold) == (2, 0)


def test_a_flush_writes_what_is_leased_after_the_rest_and_what_was_used_last_before(tmp_path: Path) -> None:
    written: list[bytes] = []

    class Written(DiskColdTier):
        def _put_blocks(
            self, space: bytes, hashes: Sequence[bytes], views: Sequence[memoryview], until: float
        ) -> StatusArray:
            written.extend(hashes)
            return super()._put_blocks(space, hashes, views, until)

    with store(2, Written(tmp_path, capacity_bytes=16 << 20), clean_ahead=0.0) as host:
        space = host.space(SMALL)
        # A root, what follows it, and others between them that nobody leases.
        for first in (20, 0, 4, 24):
            put(space, first, 2)
        root, leaves = space.match(names(0, 2)), space.match(names(4, 2))
        assert host.flush(5.0) == 0
        assert written == [
            *reversed(names(20, 2)),
            *reversed(names(24, 2)),
            *names(5, 1),
            *names(4, 1),
            *names(1, 1),
            *names(0, 1),
        ]
        root.release()
        leaves.release()


def test_a_flush_counts_what_the_background_thread_is_writing_as_written(tmp_path: Path) -> None:
    cold = TroubledDisk(tmp_path)
    with store(1, cold, clean_ahead=1.0) as host:
        space = host.space(SMALL)
        cold.pause = 0.3
        put(space, 0, 4)
        end = time.monotonic() + 5.0
        while not cold.puts and time.monotonic() < end:
            time.sleep(0.01)
        assert host.flush(5.0) == 0


def test_a_flush_of_a_tier_that_refuses_says_what_is_left(tmp_path: Path) -> None:
    cold = TroubledDisk(tmp_path)
    with store(1, cold) as host:
        cold.fault = ColdStatus.UNAVAILABLE
        put(host.space(SMALL), 0, 3)
        assert host.flush(5.0) == 3
        cold.fault = None
        assert host.flush(5.0) == 0


def test_a_close_that_drains_loses_nothing(tmp_path: Path) -> None:
    host = HostStore(4 * EXTENT, cold=TroubledDisk(tmp_path), extent_bytes=EXTENT)
    put(host.space(SMALL), 0, 16, wait=5.0)
    host.close(drain=5.0)
    with store(4, TroubledDisk(tmp_path)) as host, host.space(SMALL).load(names(0, 16), 5.0) as lease:
        assert len(lease) == 16
        assert resident(host.space(SMALL), 0, 16) == list(range(16))


def test_a_store_that_is_closed_while_it_loads_ends_the_loads(tmp_path: Path) -> None:
    cold = TroubledDisk(tmp_path)
    host = HostStore(4 * EXTENT, cold=cold, extent_bytes=EXTENT)
    space = host.space(SMALL)
    put(space, 0, 8, wait=5.0)
    host.flush()
    space.evict(8)
    cold.pause = 0.2
    loads = [space.start_load(names(first, 4)) for first in (0, 4, 2, 6)]
    began = time.monotonic()
    host.close()
    assert time.monotonic() - began < 2.0
    assert all(load.done() for load in loads)
    for late in (
        lambda: space.start_load(names(0, 4)),
        lambda: space.match(names(0, 4)),
        lambda: host.space(LARGE),
    ):
        with pytest.raises(ClosedError):
            late()
    host.close()


def test_notes_outlive_the_store_and_are_kept_by_space(tmp_path: Path) -> None:
    with store(1, TroubledDisk(tmp_path)) as host:
        assert host.space(SMALL).put_note(b"session", b"value")
        assert host.space(LARGE).get_note(b"session") is None
    with store(1, TroubledDisk(tmp_path)) as host:
        assert host.space(SMALL).get_note(b"session") == b"value"
    with store(1) as host:
        assert not host.space(SMALL).put_note(b"session", b"value")
        assert host.space(SMALL).get_note(b"session") is None


def test_a_cold_tier_that_is_closed_under_its_store_costs_hits_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cold = TroubledDisk(tmp_path)
    with store(1, cold, clean_ahead=1.0) as host:
        space = host.space(SMALL)
        cold.close()
        put(space, 0, 4)
        assert host._cleaner is not None
        host._cleaner.join(5.0)
        assert not host._cleaner.is_alive()
        assert put(space, 4, 4, wait=5.0) == 4
        assert resident(space, 0, 8) == [4, 5, 6, 7]
    assert "closed under its host store" in caplog.text


# Events


def test_events_tell_what_came_and_went_in_each_tier(tmp_path: Path) -> None:
    heard: list[BlockEvent] = []
    with store(1, TroubledDisk(tmp_path)) as host:
        end = host.subscribe(heard.append)
        space = host.space(SMALL)
        put(space, 0, 2)
        host.flush()
        space.evict(1)
        end()
        put(space, 5, 1)
    told = [(event.kind, event.tier, set(event.hashes)) for event in heard]
    assert told == [
        (EventKind.STORED, "host", set(names(0, 2))),
        (EventKind.STORED, "cold", set(names(0, 2))),
        (EventKind.REMOVED, "host", set(names(1, 1))),
    ]


def test_a_listener_may_call_the_store_and_hears_what_that_does_afterwards() -> None:
    heard: list[tuple[EventKind, bytes]] = []
    with store(1) as host:
        space = host.space(SMALL)

        def listen(event: BlockEvent) -> None:
            heard.append((event.kind, event.hashes[0]))
            if event.kind is EventKind.STORED and event.hashes[0] == names(0, 1)[0]:
                space.evict(1)

        host.subscribe(listen)
        put(space, 0, 1)
    assert heard == [(EventKind.STORED, names(0, 1)[0]), (EventKind.REMOVED, names(0, 1)[0])]


def test_events_of_several_threads_come_in_the_order_in_which_things_happened() -> None:
    """Stored and removed of one block alternate, or a router would believe in blocks that are gone."""
    there: set[bytes] = set()
    wrong: list[BlockEvent] = []

    def listen(event: BlockEvent) -> None:
        time.sleep(0.0005 if event.kind is EventKind.STORED else 0.0)
        for name in event.hashes:
            if (name in there) == (event.kind is EventKind.STORED):
                wrong.append(event)
            there.symmetric_difference_update([name])

    with store(1) as host:
        space = host.space(SMALL)
        host.subscribe(listen)

        def work() -> None:
            for _ in range(100):
                put(space, 0, 2)
                space.evict(2)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_events_of_a_call_that_raises_are_told_all_the_same() -> None:
    heard: list[BlockEvent] = []
    with store(1) as host:
        space = host.space(SMALL)
        reservation = space.reserve(names(0, 2))
        host.subscribe(heard.append)
        with pytest.raises(StaleHandleError):
            space.commit(reservation.slots, reservation.generations + np.array([0, 1]))
        assert [event.hashes for event in heard] == [(names(0, 1)[0],)]


# Everything at once


def test_threads_that_do_everything_at_random_break_nothing(tmp_path: Path) -> None:
    with store(6, TroubledDisk(tmp_path)) as host:
        spaces = [host.space(SMALL), host.space(LARGE)]
        end = time.monotonic() + 2.0
        errors: list[BaseException] = []

        def work(seed: int) -> None:
            rng = random.Random(seed)
            try:
                while time.monotonic() < end:
                    space = rng.choice(spaces)
                    first, count = rng.randrange(40), rng.randint(1, 6)
                    match rng.randrange(8):
                        case 0 | 1:
                            put(space, first, count, wait=rng.choice((0.0, 0.01)))
                        case 2:
                            with space.match(names(first, count)) as lease:
                                for at, slot in enumerate(lease.slots.tolist()):
                                    with space.view(slot) as view:
                                        assert view[0] == view[-1] == first + at + 1
                        case 3:
                            with space.load(names(first, count), 0.05) as lease:
                                for at, slot in enumerate(lease.slots.tolist()):
                                    with space.view(slot) as view:
                                        assert view[0] == view[-1] == first + at + 1
                        case 4:
                            space.reserve(names(first, count)).abort()
                        case 5:
                            space.evict(count)
                        case 6:
                            pinned = names(first, count)[: space.pin(names(first, count))]
                            assert space.unpin(pinned) == len(pinned)
                        case _:
                            host.check_integrity()
            except BaseException as error:  # noqa: BLE001  the main thread is told
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        host.flush(5.0)
        host.check_integrity()
        for space in spaces:
            assert not space._records.leases.any()
            assert not space._records.pending


def test_integrity_is_checked_and_named() -> None:
    with store(1) as host:
        space = host.space(SMALL)
        put(space, 0, 2)
        lease = space.match(names(0, 1))
        space._records.leases[lease.slots] = 0
        with pytest.raises(IntegrityError, match="may be evicted"):
            host.check_integrity()
        space._records.leases[lease.slots] = 1


def test_a_setting_out_of_range_is_named() -> None:
    for value in (1.5, -0.1):
        with pytest.raises(ConfigError, match="clean_ahead"), store(1, clean_ahead=value):
            pass
    with pytest.raises(ConfigError, match="cold_deadline"), store(1, cold_deadline=0.0):
        pass


def test_a_cold_tier_that_is_only_named_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cold: must be a cold tier \(open_cold_tier"):
        HostStore(1 << 20, cold="folder")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="host_bytes"):
        HostStore("1G")  # type: ignore[arg-type]


def test_a_closed_store_does_not_flush() -> None:
    with store(1) as host:
        pass
    with pytest.raises(ClosedError):
        host.flush()


@pytest.mark.parametrize("leased", [False, True])
def test_a_small_cold_tier_keeps_what_is_hottest_and_the_beginnings_of_prefixes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leased: bool
) -> None:
    """Three prefixes of four blocks, flushed in batches of two, into a disk of six records."""
    monkeypatch.setattr(cold_writes, "COLD_BATCH_BYTES", 2 * SMALL.block_bytes)
    cold = TroubledDisk(tmp_path, capacity_bytes=6 * 4096)
    with store(3, cold, clean_ahead=0.0) as host:
        space = host.space(SMALL)
        for first in (0, 4, 8):
            assert put(space, first, 4) == 4
        if leased:
            lease = space.match(names(8, 4))
        assert host.flush() == 0
        assert cold.puts >= 6
        kept = np.flatnonzero(cold.contains(space.id, names(0, 12))).tolist()
        assert kept == [4, 5, 8, 9, 10, 11]
        if leased:
            lease.release()


def test_a_disk_that_is_a_little_too_small_keeps_the_beginning_of_a_prefix(tmp_path: Path) -> None:
    cold = DiskColdTier(tmp_path, capacity_bytes=8 * 4096)  # eight records of 4 KiB each
    with store(3, cold, clean_ahead=0.0) as host:
        space = host.space(SMALL)
        assert space.put(names(0, 10), blocks(0, 10), wait=5.0) == 10
        host.flush()
        assert space.evict(10) == 10
        with space.load(names(0, 10), deadline=5.0) as lease:
            assert len(lease) > 4


def test_blocks_are_written_and_read_where_they_lie() -> None:
    with store(1) as host:
        space = host.space(SMALL)
        assert put(space, 0, 1) == 1
        with space.reserve(names(0, 3)) as reservation:
            assert len(reservation.blocks) == 2  # the first is there already
            for number, block in enumerate(reservation.blocks, 1):
                block[:] = number + 1
            reservation.commit()
        assert resident(space, 0, 3) == [0, 1, 2]
        lease = space.match(names(0, 3))
        block = lease.blocks[2]
        assert np.shares_memory(block, np.frombuffer(space.view(int(lease.slots[2])), np.uint8))
        assert [len(one) for one in (lease.blocks, lease.blocks[1:])] == [3, 2]
        assert np.array_equal(lease.blocks[1:][1], block)
        with pytest.raises(ValueError, match="read-only"):
            block[0] = 0
        lease.release()
        with pytest.raises(ClosedError, match="released"):
            _ = lease.blocks


def test_an_extent_that_comes_while_room_is_looked_for_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arena grows to its end between the search for a slot and the question whether it will grow."""
    may_grow = threading.Event()
    allocate = PinnedArena._try_allocate

    def allocate_late(arena: PinnedArena, extent: int) -> MemoryUnavailableError | None:
        if extent > 0:
            assert may_grow.wait(30.0)
        return allocate(arena, extent)

    monkeypatch.setattr(PinnedArena, "_try_allocate", allocate_late)
    with HostStore(2 * EXTENT, extent_bytes=EXTENT) as host:
        host.arena.wait_ready(1)
        take = host.arena.take_extent

        def take_too_soon(timeout: float = 0.0) -> int | None:
            taken = take(timeout)
            if taken is None:
                may_grow.set()
                assert host.arena.wait_ready(2, timeout=30.0)
            return taken

        monkeypatch.setattr(host.arena, "take_extent", take_too_soon)
        try:
            assert put(host.space(SMALL), 0, 8, wait=30.0) == 8
        finally:
            may_grow.set()
