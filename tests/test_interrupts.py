"""A Ctrl-C in the middle of copies: nobody's memory is given to others while it is read or written."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from kvpager import HostStore, KVLayout
from kvpager.tiers.cold import ColdStatus
from kvpager.tiers.cold_disk import DiskColdTier
from kvpager.tiers.mover import HostMover, wait_through

LAYOUT = KVLayout(2, 8, 64)  # 64 KiB a block
BLOCKS = 32


class SlowDisk(DiskColdTier):
    """A disk that takes its time for every block."""

    def _put(self, space: bytes, prefix_hash: bytes, payload: memoryview, *, replace: bool) -> ColdStatus:
        time.sleep(0.01)
        return super()._put(space, prefix_hash, payload, replace=replace)


@contextmanager
def interrupted(after: float) -> Iterator[None]:
    """SIGINT to this process so many seconds from now, as by Ctrl-C."""
    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        # It comes before the block is left, so that it cannot hit another test.
        timer.join()
        with suppress(KeyboardInterrupt):
            time.sleep(0.01)


def names(first: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in range(first, first + BLOCKS)]


@pytest.mark.parametrize("after", [0.005, 0.02, 0.04])
def test_an_interrupted_flush_keeps_no_wrong_bytes(tmp_path: Path, after: float) -> None:
    cold = SlowDisk(tmp_path / "cold", capacity_bytes=1 << 30)
    blocks = np.random.default_rng(0).integers(0, 256, (BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)
    with HostStore(BLOCKS * LAYOUT.block_bytes, cold=cold, clean_ahead=0.0) as host:
        assert host.arena.wait_ready(host.arena.num_extents, timeout=30.0)
        space = host.space(LAYOUT)
        assert space.put(names(0), blocks, wait=5.0) == BLOCKS
        with suppress(KeyboardInterrupt), interrupted(after):
            host.flush()
        # What may be evicted is, and other blocks take its place.
        space.evict(BLOCKS)
        space.put(names(1000), np.full_like(blocks, 0xEE))
        host.flush()
        found = np.empty_like(blocks)
        status = cold.get(space.id, names(0), [memoryview(row) for row in found], 10.0)
        kept = status == ColdStatus.OK
        assert (found[kept] == blocks[kept]).all()
        host.check_integrity()


def test_a_copy_is_waited_for_through_an_interrupt() -> None:
    mover = HostMover(threads=2)
    source = np.random.default_rng(1).integers(0, 256, 64 << 20, dtype=np.uint8)
    target = np.zeros_like(source)
    transfer = mover.copy(np.array([source.ctypes.data]), np.array([target.ctypes.data]), source.nbytes)
    with suppress(KeyboardInterrupt), interrupted(0.001):
        wait_through(transfer)
    wait_through(transfer)
    assert (source == target).all()
    mover.close()
