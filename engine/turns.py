"""Turns: where more sequences want to run than the device tier holds, each runs for a stretch.

A stretch is long enough that bringing a sequence back costs little of it, and that the pause between two
stretches falls on fewer than one token in a hundred. Who comes next is copied up while the others run.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ..kvstore.cost_estimates import CostEstimates
from .pace import Pace
from .preemption import NEARLY_DONE, Candidates, wake_seconds

__all__ = ["LEAST_STRETCH", "Turns"]

LEAST_STRETCH: Final = 128
"""Steps."""
_SWAP_SHARE: Final = 0.02
"""Of the seconds of a stretch, that bringing the sequence back may take."""


class Turns:
    """Says whose stretch is over.

    Args:
        costs: what bringing a sequence back takes.
        pace: how long steps take.
    """

    def __init__(self, costs: CostEstimates, pace: Pace) -> None:
        self._costs = costs
        self._pace = pace

    def steps(self, candidates: Candidates) -> npt.NDArray[np.float64]:
        """How many steps the stretch of each is, float64 [n]."""
        step, cost = self._pace.step_seconds, self._costs.model
        least = np.full(len(candidates), float(LEAST_STRETCH))
        if not step or not cost.copy.seconds_per_byte:
            return least
        seconds = wake_seconds(candidates.blocks, candidates.lengths, cost, below=True)
        steps: npt.NDArray[np.float64] = np.maximum(least, seconds / (_SWAP_SHARE * step))
        return steps

    def over(self, candidates: Candidates, priority: int) -> npt.NDArray[np.bool_]:
        """Who may go for one of this priority that waits: bool [n], none that is about to finish."""
        over = candidates.steps >= LEAST_STRETCH
        if not over.any():
            return over
        over &= (candidates.priorities <= priority) & (candidates.remaining > NEARLY_DONE)
        over &= candidates.steps >= self.steps(candidates)
        return over
