"""A disk tier that waits, or refuses, when it is told to: no real one does so on demand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from kvpager.tiers.cold import ColdPurge, ColdStatus, StatusArray
from kvpager.tiers.cold_disk import DiskColdTier

__all__ = ["TroubledDisk"]


class TroubledDisk(DiskColdTier):
    """`DiskColdTier` with troubles.

    Attributes:
        pause: seconds that each batch of reads or writes takes longer.
        fault: what writes are answered; if it is UNAVAILABLE, reads are too. None lets them through.
        puts: batches of writes so far.
    """

    def __init__(self, path: Path, capacity_bytes: int = 16 << 20) -> None:
        super().__init__(path, capacity_bytes=capacity_bytes)
        self.pause = 0.0
        self.fault: ColdStatus | None = None
        self.puts = 0

    @property
    def _down(self) -> bool:
        return self.fault is ColdStatus.UNAVAILABLE

    def _put_blocks(
        self, space: bytes, hashes: Sequence[bytes], views: Sequence[memoryview], until: float
    ) -> StatusArray:
        self.puts += 1
        time.sleep(self.pause)
        if self.fault is not None:
            return np.full(len(hashes), self.fault, dtype=np.uint8)
        return super()._put_blocks(space, hashes, views, until)

    def _get_blocks(
        self, space: bytes, hashes: Sequence[bytes], views: Sequence[memoryview], until: float
    ) -> StatusArray:
        time.sleep(self.pause)
        if self._down:
            return np.full(len(hashes), ColdStatus.UNAVAILABLE, dtype=np.uint8)
        return super()._get_blocks(space, hashes, views, until)

    def _contains(self, space: bytes, hashes: Sequence[bytes], until: float) -> npt.NDArray[np.bool_]:
        if self._down:
            return np.zeros(len(hashes), dtype=np.bool_)
        return super()._contains(space, hashes, until)

    def _ping(self, until: float) -> ColdStatus:
        return ColdStatus.UNAVAILABLE if self._down else super()._ping(until)

    def _put_note(self, space: bytes, note: bytes, value: bytes, until: float) -> ColdStatus:
        return super()._put_note(space, note, value, until) if self.fault is None else self.fault

    def _get_note(self, space: bytes, note: bytes, until: float) -> tuple[ColdStatus, bytearray]:
        return (ColdStatus.UNAVAILABLE, bytearray()) if self._down else super()._get_note(space, note, until)

    def _purge_blocks(self, space: bytes, hashes: Sequence[bytes], nbytes: int, until: float) -> ColdPurge:
        if self._down:
            return ColdPurge(0, ColdStatus.UNAVAILABLE)
        return super()._purge_blocks(space, hashes, nbytes, until)

    def _purge_space(self, space: bytes, until: float) -> ColdPurge:
        return ColdPurge(0, ColdStatus.UNAVAILABLE) if self._down else super()._purge_space(space, until)
