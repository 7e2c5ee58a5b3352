"""A disk tier that is as slow as it is told to be: it really takes that long."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from kvpager.tiers.cold import StatusArray
from kvpager.tiers.cold_disk import DiskColdTier

__all__ = ["ThrottledDisk"]


class ThrottledDisk(DiskColdTier):
    """`DiskColdTier` that reads no more than so many bytes a second.

    Attributes:
        bytes_per_second: how many; may be changed while it reads.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, capacity_bytes=1 << 30)
        self.bytes_per_second = float("inf")

    def _get_blocks(
        self, space: bytes, hashes: Sequence[bytes], views: Sequence[memoryview], until: float
    ) -> StatusArray:
        began, nbytes = time.monotonic(), sum(view.nbytes for view in views)
        status = super()._get_blocks(space, hashes, views, until)
        while time.monotonic() < min(began + nbytes / self.bytes_per_second, until):
            time.sleep(0.002)
        return status
