"""Which runs go first: a ranking that is made once in a while, and holds for some evictions.

To compare a thousand runs takes as long as to let go of a dozen. So those that are worth least are kept in
order, and are taken from the front until some share of what was compared has gone, or a second has passed.
Who was used meanwhile is passed over: his `order` in `Runs` is another one. Who came meanwhile waits for the
next ranking.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from .runs import Places, Runs

__all__ = ["RunRanking", "Worth"]

Worth = Callable[[Places], tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]]
"""What places are worth that blocks of these runs have, and what if all were alike to lose; float64 [n]."""

_LOOKED_AT: Final = 1024
"""Runs that are compared; of more, as many are drawn."""
_TAKEN: Final = 1 / 16
"""The share of them that may go before they are compared anew."""
_KEPT: Final = 3 * _TAKEN
"""The share that is kept in order: of those that may go some will have been used by then."""
_PASSED_BY: Final = 4
"""What came back once is as good as a newcomer when so many times what may go went since its last use."""
_FEWEST: Final = 64
_HOLDS: Final = 1.0
"""Seconds."""


def _least(worths: npt.NDArray[np.float64], proven: npt.NDArray[np.bool_] | None, kept: int) -> Places:
    """Which are so many that go first, at least: those that are not proven before the others."""
    if proven is None:
        least: Places = np.flatnonzero(worths <= np.partition(worths, kept)[kept])
        return least
    new: Places = np.flatnonzero(~proven)
    if len(new) > kept:
        chosen: Places = new[worths[new] <= np.partition(worths[new], kept)[kept]]
        return np.sort(chosen)
    old = np.flatnonzero(proven)
    kept -= len(new)
    return np.concatenate([new, old[worths[old] <= np.partition(worths[old], kept)[kept]]])


class RunRanking:
    """Runs that go first, the first one first.

    Args:
        table: the runs.
        worth: tells what they are worth.
        now: seconds.
        draw: which of the draws this is, from 0 to 1; None: all runs are compared, and all are kept.
        newcomers_first: what never came back goes before what did.
    """

    def __init__(
        self, table: Runs, worth: Worth, now: float, draw: float | None, *, newcomers_first: bool
    ) -> None:
        runs = table.candidates
        number = len(runs)
        if draw is not None and number > _LOOKED_AT:
            # One of each of so many strides, none twice.
            at = np.arange(
                int(draw * number), int(draw * number) + _LOOKED_AT * (step := number // _LOOKED_AT), step
            )
            runs = runs[at % number]
            if len(told := table.told_to_go()):
                runs = np.union1d(runs, told)
        worths, alike = worth(runs)
        proven = None
        if newcomers_first:
            # But for what is worth nothing, as it was told to go, and what all else passed by.
            proven = (table.newcomer[runs] == 0) & (worths > 0.0)
            proven &= table.gone - table.since[runs] < _PASSED_BY * table.count
            table.early[runs] = ~proven & (worths > worths[proven].min(initial=np.inf))
        else:
            table.early[runs] = 0
        if draw is not None and len(runs) > 4 * _FEWEST:
            kept = max(_FEWEST, int(len(runs) * _KEPT))
            least = _least(worths, proven, kept)
            runs, worths, alike = runs[least], worths[least], alike[least]
            proven = None if proven is None else proven[least]
        orders = table.order[runs]
        first = np.lexsort((orders, worths) if proven is None else (orders, worths, proven))
        self._table = table
        self._entries = list(
            zip(runs[first].tolist(), orders[first].tolist(), alike[first].tolist(), strict=True)
        )
        self._at = 0
        self.newcomers_first = newcomers_first
        self._made_at = now
        self._may_go = max(1, int(min(number, _LOOKED_AT) * _TAKEN))
        self.everything = draw is None
        self.all = self.everything or len(self._entries) == number

    def fresh(self, now: float) -> bool:
        """Whether it was made not long ago."""
        return now - self._made_at < _HOLDS

    def holds(self, now: float) -> bool:
        """Whether it need not be made anew. Passes over what has gone from its front."""
        idle, order = self._table.idle_of, self._table.order_of
        entries = self._entries
        while self._at < len(entries):
            run, known, _ = entries[self._at]
            if idle[run] and order[run] == known:
                return self._at < self._may_go and self.fresh(now)
            self._at += 1
        return False

    def pass_over(self, runs: Collection[int]) -> None:
        """These do not go by this ranking: others follow them that do not."""
        self._entries[self._at :] = [one for one in self._entries[self._at :] if one[0] not in runs]

    def __iter__(self) -> Iterator[tuple[int, float]]:
        """Each run that was not used since, and what it was worth if all blocks were alike to lose."""
        idle, order = self._table.idle_of, self._table.order_of
        for at in range(self._at, len(self._entries)):
            run, known, worth = self._entries[at]
            if idle[run] and order[run] == known:
                yield run, worth
