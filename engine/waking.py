"""How sequences come back: what a step may read of host memory in place, and what is copied up first.

A step that reads host memory takes at least as long as the link does, and every sequence of the step waits
for it. So there is a budget: what all rows of a step read in place may add at most a small share to a
step that nothing disturbs. What fits is attended to at once, and installed as it is read: its first token
comes as soon as any way could bring it. What does not fit comes up by the copy engine beside the steps of
those that are awake, and joins them when what is left fits. Where nobody is awake there is nobody to disturb.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final

from ..kvstore.cost import CostModel
from .pace import Pace

__all__ = ["HostBudget", "Swap"]

_SHARE: Final = 0.1
"""Of an undisturbed step, that reading in place may add: with the copies beside it well within 15%."""


class Swap(enum.StrEnum):
    """What an engine does about sequences whose KV is not in the device tier."""

    ATTEND = "attend"
    """They are read where they lie or copied up first, as costs say."""
    COPY = "copy"
    """All of a sequence's blocks are copied up before it runs, as engines do that cannot read host memory."""
    RECOMPUTE = "recompute"
    """There is no host memory: what left the device tier is computed again."""


class HostBudget:
    """Blocks that the step which is being put together may still read in place.

    Args:
        swap: what the engine does.
        cost: tells the cost model as it is now; None where nothing is measured, and nothing is held back.
        pace: how long steps take.
    """

    def __init__(self, swap: Swap, cost: Callable[[], CostModel | None], pace: Pace) -> None:
        self._swap = swap
        self._cost = cost
        self._pace = pace
        self._left: int | None = None

    def blocks(self) -> int | None:
        """What a step may read in place beside others that are awake; None for any number."""
        if self._swap is Swap.COPY:
            return 0
        cost = self._cost()
        if cost is None or not cost.in_place.seconds_per_byte:
            return None
        if self._pace.step_seconds is None:
            return 0
        seconds = _SHARE * self._pace.step_seconds
        return int(seconds / (cost.in_place.seconds_per_byte * cost.block_bytes))

    def copies_at_once(self) -> int | None:
        """Blocks that may be on their way up at a time beside a step; None for any number.

        What the link brings in two steps: more would only wait there, and wait longer to be of use.
        """
        cost, step = self._cost(), self._pace.step_seconds
        if cost is None or step is None or not cost.copy.seconds_per_byte:
            return None
        return 1 + int(2 * step / (cost.copy.seconds_per_byte * cost.block_bytes))

    def begin_step(self, reads: int) -> None:
        """A step is put together; those that are awake read `reads` blocks in place in any case."""
        blocks = self.blocks()
        self._left = None if blocks is None else max(0, blocks - reads)

    def take(self, far: int, *, alone: bool) -> bool:
        """Whether the step may read `far` blocks more in place; if so they are taken off what is left.

        Args:
            alone: nobody is awake whom it would hold up.
        """
        if self._swap is Swap.COPY:
            return far == 0
        if not alone and self._left is not None and far > self._left:
            return False
        if self._left is not None:
            self._left = max(0, self._left - far)
        return True
