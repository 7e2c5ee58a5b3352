"""Copy-on-write: a partly filled last block that several rows hold is copied before one of them writes it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..tiers.address import FAR
from .attach import Attacher
from .device import DeviceTier
from .stats import StoreStats
from .tables import BlockTable

__all__ = ["SharedTails"]


class SharedTails:
    """Which rows must make their last block their own before they write it, and how they do.

    Args:
        table: the rows.
        device: where copies are made.
        attacher: whose blocks the rows hold.
        stats: what is counted.

    Attributes:
        shared: bool [rows]: the last, partly filled block is not the row's own, or can be found by others.
    """

    def __init__(self, table: BlockTable, device: DeviceTier, attacher: Attacher, stats: StoreStats) -> None:
        self.shared = np.zeros(len(table.counts), dtype=np.bool_)
        self._table = table
        self._device = device
        self._attacher = attacher
        self._stats = stats

    def own(self, rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]) -> None:
        """Make the blocks at (row, column) the rows' own, copying where others hold them too.

        Raises:
            CapacityError: there is no room for the copies; nothing was changed.
        """
        device, pool = self._device, self._device.pool
        words = self._table.words[rows, columns]
        copied = np.ones(len(rows), dtype=np.bool_)
        left: dict[int, int] = {}
        near = np.flatnonzero((words & FAR) == 0)
        for at, block in zip(near.tolist(), device.blocks_at(words[near]).tolist(), strict=True):
            refs = left.get(block, int(pool.refs[block]))
            # The last one to hold it may have it as it is.
            copied[at] = refs > 1 or pool.moving[block]
            left[block] = refs - 1
        if copied.any():
            theirs = words[copied]
            mine = device.allocate(len(theirs))
            mine_at = device.arena.addresses(mine)
            try:
                device.copy(self._attacher.addresses(theirs), mine_at)
            except BaseException:
                pool.drop(mine)
                raise
            self._table.put(rows[copied], columns[copied], mine_at)
            # One at a time: several rows may have held the same block.
            for at, row in enumerate(rows[copied].tolist()):
                self._attacher.let_go(row, theirs[at : at + 1])
            self._stats.copied_on_write += len(theirs)
        for block in device.blocks_at(words[~copied]).tolist():
            pool.withdraw(block)
        self.shared[rows] = False
