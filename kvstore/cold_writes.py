"""Copies of one space's blocks to the cold tier, a batch at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from ..tiers.cold import ColdStatus, ColdTier
from .events import EventKind
from .policy import Ids
from .purging import SpacePurges
from .shared import HostShared
from .slots import SlotRecords

__all__ = ["COLD_BATCH_BYTES", "ColdWrites"]

COLD_BATCH_BYTES: Final = 32 << 20
"""What one background write or load carries: enough to keep several connections busy, little enough that a
batch is through in tens of milliseconds."""


class ColdWrites:
    """Copies blocks of a space to the cold tier.

    Args:
        shared: what the space shares with others.
        records: its slots.
        space: its id.
        block_bytes: bytes of a block.
        view: the bytes of a slot.
        purges: what of it is purged.
    """

    def __init__(
        self,
        shared: HostShared,
        records: SlotRecords,
        space: bytes,
        block_bytes: int,
        view: Callable[[int], memoryview],
        purges: SpacePurges,
    ) -> None:
        self._shared = shared
        self._records = records
        self._space = space
        self._view = view
        self._purges = purges
        self._block_bytes = block_bytes

    @property
    def most(self) -> int:
        """Blocks of a batch."""
        return max(1, COLD_BATCH_BYTES // self._block_bytes)

    def write(self, cold: ColdTier, choose: Callable[[int], Ids], until: float | None) -> int:
        """Copy a batch of blocks.

        Args:
            cold: the tier, in use (`ColdLink.use`).
            choose: slots of blocks, so many at most; called with the lock held.
            until: when to be done at the latest, by `time.monotonic`; None: by the store's own deadline.

        Returns:
            how many were written; 0 when there is nothing to do or the tier did not take any.
        """
        shared, records = self._shared, self._records
        with shared.lock():
            slots = choose(self.most)
            if not len(slots):
                return 0
            records.start_cleaning(slots)
            names = records.names(slots)
        deadline = shared.settings.cold_deadline
        if until is not None:
            deadline = min(deadline, max(0.001, until - time.monotonic()))
        views = [self._view(slot) for slot in slots.tolist()]
        status = np.full(len(slots), ColdStatus.UNAVAILABLE, dtype=np.uint8)
        try:
            status = cold.put(self._space, names, views, deadline)
        finally:
            for view in views:
                view.release()
            done = status == ColdStatus.OK
            written = int(np.count_nonzero(done))
            with shared.lock():
                purged = records.end_cleaning(slots, done)
                done &= ~purged
                shared.stats.cold_written += written
                shared.stats.cold_write_failed += len(slots) - written
                shared.cold.took(status)
                shared.post(
                    EventKind.STORED, "cold", self._space, [names[at] for at in np.flatnonzero(done).tolist()]
                )
                shared.changed.notify_all()
            if purged.any():
                self._purges.remove_copies([names[at] for at in np.flatnonzero(purged).tolist()])
        return written

    def write_named(self, cold: ColdTier, names: Sequence[bytes], until: float) -> bool:
        """Copy those of these blocks that nobody leases and that have no copy; whether that was done in time.

        Args:
            cold: the tier, in use (`ColdLink.use`).
            until: when to be done at the latest, by `time.monotonic`.
        """
        shared, records = self._shared, self._records

        def dirty(limit: int) -> Ids:
            slots = records.idle_named(names)
            found: Ids = slots[~records.in_cold[slots] & ~records.is_cleaning(slots)][:limit]
            return found

        while time.monotonic() < until and shared.cold.tier is cold:
            if self.write(cold, dirty, until):
                continue
            with shared.lock():
                shared.check_open()
                if not records.any_cleaning(records.idle_named(names)):
                    return not len(dirty(1))
                # The background thread is writing some of them.
                shared.changed.wait(max(0.0, until - time.monotonic()))
        return False
