"""What is closed says so in every call, and its end is the end of what it had granted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.store import TieredStore
from kvpager.tiers.cold_disk import DiskColdTier
from kvpager.tiers.errors import ClosedError
from kvpager.tiers.layout import KVLayout

LAYOUT = KVLayout(1, 1, 32, block_size=4, dtype="float32")  # 1 KiB a block
ROOT = b"r" * 16
NAME = b"n" * 16
BLOCK = np.zeros((1, LAYOUT.block_bytes), dtype=np.uint8)
ADDRESSES = np.zeros(1, dtype=np.int64)


@pytest.mark.parametrize("with_cold", [False, True])
def test_every_call_of_a_closed_host_store_says_so(tmp_path: Path, with_cold: bool) -> None:
    host = HostStore(1 << 20, cold=DiskColdTier(tmp_path, capacity_bytes=1 << 20) if with_cold else None)
    host.arena.wait_ready()
    space = host.space(LAYOUT)
    space.put([NAME], BLOCK)
    lease = space.match([NAME])
    reservation = space.reserve([ROOT])
    host.close()
    host.close()
    slots, generations = lease.slots, lease.generations
    for call in (
        lambda: host.space(LAYOUT),
        lambda: host.match([], [NAME]),
        lambda: host.subscribe(print),
        host.flush,
        host.check_integrity,
        lambda: space.addresses(slots),
        lambda: space.slots_at(ADDRESSES),
        lambda: space.readable_in_place(slots),
        lambda: space.view(0),
        lambda: space.match([NAME]),
        lambda: space.match([NAME], cold_deadline=1.0),
        lambda: space.lease_resident([NAME]),
        lambda: space.lease(slots, generations),
        lambda: space.release(slots, generations),
        lambda: space.reserve([NAME]),
        lambda: space.commit(slots, generations),
        lambda: space.abort(slots, generations),
        lambda: space.abort(slots[:0], generations[:0]),
        lambda: space.put([NAME], BLOCK),
        lambda: space.put([], BLOCK),
        lambda: space.get([NAME], BLOCK.copy()),
        lambda: space.pin([NAME]),
        lambda: space.unpin([NAME]),
        lambda: space.evict(1),
        lambda: space.room_may_come(0),
        lambda: space.load([NAME], 1.0),
        lambda: space.start_load([NAME]),
        space.write_to_cold,
        lambda: space.put_note(b"a", b"b"),
        lambda: space.get_note(b"a"),
        reservation.commit,
    ):
        with pytest.raises(ClosedError):
            call()
    assert space.closed
    # What ends something has nothing left to end.
    lease.release()
    with reservation:
        pass


def test_every_call_of_a_closed_tiered_store_says_so() -> None:
    store = TieredStore(LAYOUT, 8, root=ROOT)
    row = store.open([1, 2, 3]).row
    prompt = store.name_prompt([1, 2, 3])
    sleeping = store.sleep(store.fork(row))
    store.close()
    store.close()
    rows, tokens = np.array([row]), np.array([1], dtype=np.int32)
    for call in (
        lambda: store.open([1]),
        lambda: store.open_named(prompt),
        lambda: store.resident_blocks(prompt),
        lambda: store.start_load(prompt),
        lambda: store.start_load_sleeping(sleeping),
        lambda: store.fork(row),
        lambda: store.close_row(row),
        lambda: store.sleep(row),
        lambda: store.wake(sleeping),
        lambda: store.reserve(rows, 1),
        lambda: store.advance(row, tokens),
        lambda: store.append(rows, tokens),
        store.poll,
        lambda: store.promote(row, 1),
        lambda: store.spill(row, 1),
        lambda: store.evict(1),
        lambda: store.may_spill(row),
        lambda: store.cached_blocks(sleeping),
        lambda: store.far_blocks(row),
        lambda: store.start_install(rows, 1, rows),
        store.finish_install,
        store.sharing,
        store.check_integrity,
        store.flush,
        lambda: store.save_session("anna", sleeping, [1]),
        lambda: store.find_session("anna"),
        lambda: store.subscribe(print),
        lambda: store.arena.addresses(np.zeros(1, np.int32)),
    ):
        with pytest.raises(ClosedError):
            call()


def test_a_host_store_is_not_made_on_a_cold_tier_that_is_closed(tmp_path: Path) -> None:
    cold = DiskColdTier(tmp_path, capacity_bytes=1 << 20)
    HostStore(1 << 20, cold=cold).close()
    with pytest.raises(ClosedError, match="cold: this tier is closed"):
        HostStore(1 << 20, cold=cold)


def test_a_tiered_store_closes_also_after_its_host_store() -> None:
    host = HostStore(1 << 20)
    store = TieredStore(LAYOUT, 8, root=ROOT, host=host)
    host.arena.wait_ready()
    row = store.open(range(9)).row
    store.reserve(np.array([row]), 8)
    store.advance(row, np.arange(8, dtype=np.int32))
    store.flush()
    assert store.spill(row, 1) == 1
    host.close()
    with pytest.raises(ClosedError):
        store.open([9] * 9)
    store.close()
    with pytest.raises(ClosedError):
        TieredStore(LAYOUT, 8, root=ROOT, host=host)
