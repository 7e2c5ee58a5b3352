"""How sequences come back: what a step may read of host memory in place, and what is copied up first.

A step that reads host memory takes at least as long as the link does, and every sequence of the step waits
for it. So there is a budget: what all rows of a step read in place may add at most a small share to a
step that nothing disturbs. What fits is attended to at once, and installed as it is read: its first token
comes as soon as any way could bring it. What does not fit comes up by the copy engine beside the steps of
those that are awake, and joins them when what is left fits. Where nobody is awake there is nobody to disturb:
there the way is taken that ends sooner, as far as both are known.
"""

from __future__ import annotations

import enum
import math
from typing import Final

from ..kvstore.store import TieredStore
from .pace import Pace
from .running import RunningSequences

__all__ = ["HostBudget", "Swap"]

_SHARE: Final = 0.1
"""Of an undisturbed step, that reading in place may add: with the copies beside it well within 15%."""
_NO_LATER: Final = 1.08
"""Times what copying takes, that reading in place may: nothing waits for it to be noticed that it ended."""


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
        store: where blocks are, and what links cost.
        running: who takes part in the step.
        pace: how long steps take.
    """

    def __init__(self, swap: Swap, store: TieredStore, running: RunningSequences, pace: Pace) -> None:
        self._swap = swap
        self._store = store
        self._running = running
        self._pace = pace
        self._left: float | None = None

    def blocks(self) -> float:
        """What a step may read in place beside others that are awake, in blocks.

        None where it is not known what that takes: what is copied up first says so. None either before a step
        was measured.
        """
        if self._swap is Swap.COPY:
            return 0.0
        cost = self._store.costs.model
        link = cost.in_place
        if not link.seconds_per_byte:
            return 0.0
        seconds = _SHARE * (self._pace.step_seconds or 0.0) - link.seconds_per_call
        return max(0.0, seconds / (link.seconds_per_byte * cost.block_bytes))

    def copies_at_once(self) -> float:
        """Blocks that may be on their way up at a time beside a step.

        What the link brings in two steps: more would only wait there, and wait longer to be of use.
        """
        cost, step = self._store.costs.model, self._pace.step_seconds
        seconds = cost.copy.seconds_per_byte * cost.block_bytes
        return 1 + 2 * step / seconds if step and seconds else math.inf

    def begin_step(self) -> None:
        """Another step is put together."""
        self._left = None

    def take(self, far: int) -> bool:
        """Whether the step may read `far` blocks more in place; if so they are taken off what is left."""
        if self._swap is Swap.COPY:
            return far == 0
        if far and self._running.awake:
            left = self._rest()
            if far > left:
                return False
            self._left = left - far
            return True
        return not far or self._ends_sooner(far)

    def _ends_sooner(self, far: int) -> bool:
        """Whether reading so many blocks in place ends as soon as copying them; each is tried to be known."""
        in_place, copy = self._store.costs.in_place.cost, self._store.costs.copy.cost
        if in_place is None or copy is None:
            return in_place is None
        nbytes = far * self._store.layout.block_bytes
        return in_place.seconds(nbytes) <= _NO_LATER * copy.seconds(nbytes)

    def _rest(self) -> float:
        """What is left. Those that are awake read what they have in host memory in any case."""
        if self._left is None:
            self._left = max(0.0, self.blocks() - self._store.read_in_place(self._running.decoding))
        return self._left
