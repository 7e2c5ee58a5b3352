"""What spaces of a host store give each other: extents, by shares, and none is withheld that nobody uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from kvpager.kvstore.handles import ReserveStatus
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.space import HostSpace
from kvpager.tests.raw_client import LAYOUT, await_true, names
from kvpager.tests.troubled_disk import TroubledDisk
from kvpager.tiers.cold import ColdStatus, ColdTier
from kvpager.tiers.layout import KVLayout

SIZE = LAYOUT.block_bytes
EXTENT = 4 * SIZE
WIDE = KVLayout(2, 1, 64)  # two to an extent
LONG = 20.0


@contextmanager
def eight_extents(
    cold: ColdTier | None = None, quotas: Mapping[str, int] | None = None
) -> Iterator[HostStore]:
    """Of four blocks each; nothing is copied to the cold tier that nobody wants copied."""
    with HostStore(8 * EXTENT, extent_bytes=EXTENT, cold=cold, quotas=quotas, clean_ahead=0.0) as store:
        assert store.arena.wait_ready(8, timeout=30.0)
        yield store
        store.check_integrity()


def fill(space: HostSpace, first: int, count: int, wait: float = 0.0) -> int:
    """Commit blocks, and let nobody lease them; how many there was room for."""
    with space.reserve(names(first, count), wait=wait) as reservation:
        count = len(reservation.new)
        reservation.commit()
    return count


def found(space: HostSpace, first: int, count: int) -> int:
    with space.match(names(first, count)) as lease:
        return len(lease)


def extents(*spaces: HostSpace) -> list[int]:
    return [len(space.extents) for space in spaces]


def test_a_tenant_that_has_nothing_takes_no_part_of_what_others_share() -> None:
    with eight_extents() as store:
        store.space(LAYOUT, tenant="nothing")
        early, late = store.space(LAYOUT), store.space(LAYOUT, shard="b")
        fill(early, 0, 32)
        for first in range(0, 64, 4):
            assert fill(late, first, 4) == 4
        assert extents(early, late) == [4, 4]
        assert found(late, 48, 16) == 16


def test_a_space_that_has_nothing_takes_no_part_of_its_tenants_share() -> None:
    with eight_extents() as store:
        early, late = store.space(LAYOUT), store.space(LAYOUT, shard="b")
        for shard in ("c", "d"):
            store.space(LAYOUT, shard=shard)
        fill(early, 0, 32)
        for first in range(0, 64, 4):
            assert fill(late, first, 4) == 4
        assert extents(early, late) == [4, 4]


def test_what_a_tenant_has_beyond_its_share_its_spaces_split_too() -> None:
    with eight_extents() as store:
        small = store.space(LAYOUT, tenant="small")
        fill(small, 0, 4)
        early, late = store.space(LAYOUT), store.space(LAYOUT, shard="b")
        fill(early, 0, 28)
        for first in range(0, 64, 4):
            assert fill(late, first, 4) == 4
        # Of seven; by shares it would be two.
        assert extents(small, early, late) == [1, 4, 3]


def test_a_request_is_not_denied_while_another_space_of_the_tenant_lies_idle() -> None:
    with eight_extents() as store:
        bert = store.space(LAYOUT, tenant="bert")
        fill(bert, 0, 1)
        idle, wide = store.space(LAYOUT, tenant="anna"), store.space(WIDE, tenant="anna")
        fill(idle, 0, 28)
        assert fill(wide, 0, 14) == 14
        assert extents(bert, idle, wide) == [1, 0, 7]
        assert found(bert, 0, 1) == 1


def test_a_request_beyond_the_share_is_met_by_whoever_has_more_than_his() -> None:
    with eight_extents() as store:
        anna, bert, carl = (store.space(LAYOUT, tenant=name) for name in ("anna", "bert", "carl"))
        fill(carl, 0, 4)
        fill(anna, 0, 8)
        fill(bert, 0, 20)
        assert fill(anna, 100, 16) == 16
        assert extents(anna, bert, carl) == [4, 3, 1]
        # Each share is two extents and two thirds: what lies within one no other tenant gets.
        assert fill(anna, 200, 24) == 20
        assert extents(anna, bert, carl) == [5, 2, 1]
        assert (bert.resident, found(carl, 0, 4)) == (8, 4)


def test_what_a_space_uses_within_its_share_is_not_given_to_one_that_leases_all_it_has() -> None:
    with eight_extents() as store:
        used, greedy = store.space(LAYOUT), store.space(WIDE)
        fill(used, 0, 16)
        fill(greedy, 0, 8)
        with greedy.match(names(0, 8)):
            assert found(used, 0, 16) == 16
            assert fill(greedy, 100, 2) == 0
            assert extents(used, greedy) == [4, 4]


def test_what_a_space_used_before_all_that_the_other_holds_is_given_even_within_its_share() -> None:
    with eight_extents() as store:
        idle, greedy = store.space(LAYOUT), store.space(WIDE)
        fill(idle, 0, 16)
        fill(greedy, 0, 8)
        with greedy.match(names(0, 8)):
            assert fill(greedy, 100, 2) == 2
            assert extents(idle, greedy) == [3, 5]


def test_extents_that_hold_nothing_are_anybodys() -> None:
    with eight_extents() as store:
        anna, bert = store.space(LAYOUT, tenant="anna"), store.space(LAYOUT, tenant="bert")
        fill(bert, 0, 16)
        bert.purge(names(1, 15))
        assert fill(anna, 0, 28) == 28
        assert extents(anna, bert) == [7, 1]
        assert found(bert, 0, 1) == 1


def test_who_waits_for_another_spaces_blocks_waits_for_their_copies(tmp_path: Path) -> None:
    cold = TroubledDisk(tmp_path)
    with eight_extents(cold) as store:
        full, late = store.space(LAYOUT), store.space(WIDE)
        fill(full, 0, 32)
        # Used crosswise: the coldest blocks lie in all extents.
        for first in range(4):
            for at in range(first, 32, 4):
                assert found(full, at, 1) == 1
        cold.pause = 0.02
        assert late.reserve_at_once(names(0, 1)) is None
        for first in range(0, 8, 2):
            assert fill(late, first, 2, wait=LONG) == 2
            assert late.pin(names(first, 2)) == 2
        assert extents(full, late) == [4, 4]
        assert store.stats.dropped == 0
        # No more was copied than had to be.
        assert full.dirty == 16
        with full.load(names(0, 1), LONG) as lease:
            assert len(lease) == 1


def test_a_batch_waits_for_copies_of_several_extents(tmp_path: Path) -> None:
    with eight_extents(TroubledDisk(tmp_path)) as store:
        full, late = store.space(LAYOUT), store.space(WIDE)
        fill(full, 0, 32)
        assert fill(late, 0, 16, wait=LONG) == 16
        assert store.stats.dropped == 0


def test_what_has_come_for_a_batch_is_not_given_away_while_it_waits_for_the_rest(tmp_path: Path) -> None:
    cold = TroubledDisk(tmp_path)
    with eight_extents(cold) as store, ThreadPoolExecutor(1) as threads:
        full, late, other = store.space(LAYOUT), store.space(WIDE), store.space(LAYOUT, shard="b")
        fill(full, 0, 32)
        cold.pause = 0.2
        batch = threads.submit(fill, late, 0, 8, LONG)
        await_true(lambda: len(late.extents) == 2)
        assert fill(other, 0, 1) == 0
        assert not batch.done()
        assert batch.result() == 8
        assert extents(full, late, other) == [4, 4, 0]


def test_nobody_waits_for_copies_that_the_cold_tier_does_not_take(tmp_path: Path) -> None:
    cold = TroubledDisk(tmp_path)
    cold.fault = ColdStatus.UNAVAILABLE
    with eight_extents(cold) as store:
        full, late = store.space(LAYOUT), store.space(WIDE)
        fill(full, 0, 32)
        assert fill(late, 0, 4, wait=LONG) == 4
        assert store.stats.dropped == 8


def test_who_waits_within_the_quota_waits_for_copies_of_the_tenants_other_space(tmp_path: Path) -> None:
    with eight_extents(TroubledDisk(tmp_path), {"anna": 8 * SIZE}) as store:
        full, late = store.space(LAYOUT, tenant="anna"), store.space(WIDE, tenant="anna")
        fill(full, 0, 8)
        assert fill(late, 0, 3, wait=LONG) == 3
        assert store.stats.dropped == 0
        assert full.resident == 2


@pytest.mark.parametrize("flushed", [False, True])
def test_what_is_evicted_by_hand_before_it_was_copied_counts_as_dropped(
    tmp_path: Path, flushed: bool
) -> None:
    with eight_extents(TroubledDisk(tmp_path)) as store:
        space = store.space(LAYOUT)
        assert space.put(names(0, 4), np.zeros((4, SIZE), np.uint8)) == 4
        if flushed:
            assert store.flush(LONG) == 0
        assert space.evict(4) == 4
        assert store.stats.dropped == (0 if flushed else 4)
        with space.load(names(0, 4), LONG) as lease:
            assert len(lease) == (4 if flushed else 0)


def test_a_reservation_is_denied_where_all_that_others_have_is_leased() -> None:
    with eight_extents() as store:
        full, late = store.space(LAYOUT), store.space(WIDE)
        fill(full, 0, 32)
        with full.match(names(0, 32)), late.reserve(names(0, 1), wait=LONG) as reservation:
            assert reservation.status.tolist() == [ReserveStatus.DENIED]
