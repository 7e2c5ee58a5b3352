"""Tenants of a host store: whose blocks are found by whom, quotas, and what tenants take from each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kvpager.kvstore.handles import ReserveStatus
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.space import HostSpace
from kvpager.tests.raw_client import LAYOUT, names
from kvpager.tiers.cold_disk import DiskColdTier
from kvpager.tiers.errors import CapacityError, ConfigError, QuotaError
from kvpager.tiers.layout import KVLayout

SIZE = LAYOUT.block_bytes
EXTENT = 4 * SIZE
QUOTA = 8


@pytest.fixture
def store() -> Iterator[HostStore]:
    """Eight extents of four blocks; eight blocks for each tenant."""
    with HostStore(8 * EXTENT, extent_bytes=EXTENT, quotas={"*": QUOTA * SIZE}) as made:
        assert made.arena.wait_ready(8, timeout=30.0)
        yield made
        made.check_integrity()


def fill(space: HostSpace, first: int, count: int) -> None:
    """Commit blocks, and let nobody lease them."""
    with space.reserve(names(first, count)) as reservation:
        assert (reservation.status == ReserveStatus.NEW).all()
        reservation.commit()


def found(space: HostSpace, first: int, count: int) -> int:
    with space.match(names(first, count)) as lease:
        return len(lease)


def test_no_tenant_finds_blocks_of_another(store: HostStore) -> None:
    anna, bert, nobody = (store.space(LAYOUT, tenant=name) for name in ("anna", "bert", ""))
    fill(anna, 0, 2)
    assert [found(space, 0, 2) for space in (anna, bert, nobody)] == [2, 0, 0]
    assert len({anna.id, bert.id, nobody.id}) == 3
    assert store.space(LAYOUT, tenant="anna") is anna


def test_a_tenant_at_its_quota_evicts_its_own_coldest_blocks(store: HostStore) -> None:
    anna, bert = store.space(LAYOUT, tenant="anna"), store.space(LAYOUT, tenant="bert")
    fill(bert, 0, QUOTA)
    fill(anna, 0, QUOTA)
    fill(anna, 100, 3)
    assert found(bert, 0, QUOTA) == QUOTA
    assert found(anna, 100, 3) == 3
    assert anna.resident == QUOTA
    # Of what was used together later blocks go first.
    assert found(anna, 0, QUOTA) == QUOTA - 3
    assert store.tenants()["anna"]["evicted"] == 3
    assert store.tenants()["bert"]["evicted"] == 0


def test_the_quota_is_of_all_spaces_of_a_tenant(store: HostStore) -> None:
    one, two = (store.space(LAYOUT, shard=shard, tenant="anna") for shard in ("1", "2"))
    fill(one, 0, QUOTA - 1)
    fill(two, 0, 2)
    assert (one.resident, two.resident) == (QUOTA - 2, 2)
    assert store.tenants()["anna"]["bytes"] == QUOTA * SIZE
    fill(two, 10, QUOTA - 2)
    assert (one.resident, two.resident) == (0, QUOTA)


def test_blocks_of_different_sizes_count_as_many_bytes_as_they_have(store: HostStore) -> None:
    wide = KVLayout(2, 1, 64)
    one, two = store.space(LAYOUT, tenant="anna"), store.space(wide, tenant="anna")
    fill(one, 0, QUOTA)
    fill(two, 0, 1)
    assert wide.block_bytes == 2 * SIZE
    assert (one.resident, two.resident) == (QUOTA - 2, 1)


def test_a_reserve_that_the_quota_has_no_room_for_is_an_error_that_says_so(store: HostStore) -> None:
    anna = store.space(LAYOUT, tenant="anna")
    fill(anna, 0, QUOTA - 1)
    with anna.match(names(0, QUOTA - 1)), anna.reserve(names(100, 2)) as reservation:
        assert reservation.status.tolist() == [ReserveStatus.NEW, ReserveStatus.DENIED]
        with pytest.raises(QuotaError, match=f"tenant 'anna' has a quota of {QUOTA * SIZE} bytes") as raised:
            anna.reserve(names(200, 1))
        assert isinstance(raised.value, CapacityError)
        with pytest.raises(QuotaError):
            anna.put(names(200, 1), np.zeros((1, SIZE), np.uint8))
        # An engine's step is denied, as it is for want of memory.
        assert anna.reserve_named(names(200, 1)).status.tolist() == [ReserveStatus.DENIED]
        # What is there already takes no room.
        assert anna.reserve(names(0, 2)).status.tolist() == [ReserveStatus.PRESENT] * 2
    counted = store.tenants()["anna"]
    assert (counted["denied"], counted["over_quota"]) == (4, 4)


def test_one_below_its_share_takes_what_nobody_leases_of_one_above_it() -> None:
    with HostStore(8 * EXTENT, extent_bytes=EXTENT) as store:
        assert store.arena.wait_ready(8, timeout=30.0)
        anna, bert = store.space(LAYOUT, tenant="anna"), store.space(LAYOUT, tenant="bert")
        fill(anna, 0, 32)
        with anna.match(names(0, 4)):
            fill(bert, 0, 16)
            assert (len(anna.extents), len(bert.extents)) == (4, 4)
            # Both have their share now: each goes round in its own.
            fill(bert, 100, 4)
            fill(anna, 100, 4)
            assert (len(anna.extents), len(bert.extents)) == (4, 4)
            assert found(anna, 0, 4) == 4
        store.check_integrity()


def test_shares_go_by_quotas() -> None:
    quotas = {"small": 2 * EXTENT, "large": 6 * EXTENT, "late": 8 * EXTENT}
    with HostStore(8 * EXTENT, extent_bytes=EXTENT, quotas=quotas) as store:
        assert store.arena.wait_ready(8, timeout=30.0)
        small, large, late = (store.space(LAYOUT, tenant=name) for name in quotas)
        fill(small, 0, 8)
        fill(large, 0, 24)
        fill(late, 0, 16)
        # Of eight extents sixteen are allowed: each may have half of its quota before it must yield.
        assert [len(space.extents) for space in (small, large, late)] == [1, 3, 4]
        store.check_integrity()


def test_blocks_that_must_be_copied_below_first_are_waited_for_within_the_quota(tmp_path: Path) -> None:
    cold = DiskColdTier(tmp_path / "cold", capacity_bytes=1 << 20)
    quotas = {"anna": 4 * SIZE}
    with HostStore(8 * EXTENT, extent_bytes=EXTENT, cold=cold, quotas=quotas) as store:
        assert store.arena.wait_ready(8, timeout=30.0)
        anna = store.space(LAYOUT, tenant="anna")
        fill(anna, 0, 4)
        with anna.reserve(names(10, 2), wait=20.0) as reservation:
            assert (reservation.status == ReserveStatus.NEW).all()
            reservation.commit()
        assert store.stats.dropped == 0
        assert found(anna, 0, 4) == 2
        with anna.load(names(0, 4), 20.0) as lease:
            assert len(lease) == 4
        assert anna.resident == 4


def test_a_load_that_the_quota_has_no_room_for_finds_what_there_is_room_for(tmp_path: Path) -> None:
    cold = DiskColdTier(tmp_path / "cold", capacity_bytes=1 << 20)
    with HostStore(8 * EXTENT, extent_bytes=EXTENT, cold=cold, quotas={"anna": 4 * SIZE}) as store:
        assert store.arena.wait_ready(8, timeout=30.0)
        anna = store.space(LAYOUT, tenant="anna")
        fill(anna, 0, 2)
        assert store.flush() == 0
        anna.evict(2)
        fill(anna, 10, 4)
        assert store.flush() == 0
        with anna.match(names(10, 4)), anna.load(names(0, 2), 0.2) as lease:
            assert len(lease) == 0
        store.check_integrity()


@pytest.mark.parametrize("quotas", [{"anna": 0}, {"anna": "1G"}, {"a" * 257: 1}, {1: 1}, [("anna", 1)]])
def test_quotas_are_names_and_bytes(quotas: object) -> None:
    with pytest.raises(ConfigError, match="quotas: "):
        HostStore(EXTENT, extent_bytes=EXTENT, quotas=quotas)  # type: ignore[arg-type]


def test_what_stands_for_others_is_no_tenant(store: HostStore) -> None:
    with pytest.raises(ConfigError, match="tenant: "):
        store.space(LAYOUT, tenant="*")
