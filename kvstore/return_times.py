"""How soon blocks that were used in some way are used again, learned while serving; what a place is worth.

Each use of a stretch of blocks is of a *kind*: a small number for what could be seen of it (how many turns
its conversation had, how long these took, and so on). Of every kind the share that is used again within
some time is estimated as survival is in medicine (Kaplan and Meier, 1958): of those that were seen for so
long and were not used yet, how many were used in the next moment. So what was evicted counts as what stays:
it is only to be seen when it is asked for again.

From that comes the worth of a place that a block of some kind and age has: uses to be expected until some
later age, over the time that the place is taken until then, for the age at which this is most. That is the
index of Gittins (1979) for a job that may be dropped at any time; "LHD: improving cache hit rate by
maximizing hit density" (Beckmann, Chen and Cidon, NSDI 2018) ranks by the same ratio without the choice of
the age. It rises while people usually think, and falls when who was to come back should have been there.

What is seldom seen is told by what is like it: kinds are grouped, coarser and coarser, and of each it is
reckoned how many more returns there were, about some age, than its group would have led to expect. A few of
these are taken for granted, so that where little was expected a kind does as its group does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["ReturnTimes"]

_Floats = npt.NDArray[np.float64]
_Kinds = npt.NDArray[np.intp]

_BINS: Final = 60
"""Of ages; each begins at half as much again as the one before: from a millisecond to ten days."""
_FIRST: Final = 1e-3
_STEP: Final = 2**0.5
_EDGES: Final = np.concatenate([[0.0], _FIRST * _STEP ** np.arange(_BINS - 1)])
_WIDTHS: Final = np.diff(np.append(_EDGES, _EDGES[-1] * _STEP))
_NEAR: Final = 0.5 ** (np.abs(np.subtract.outer(np.arange(_BINS), np.arange(_BINS))) / 4.0)
"""What is seen in one bin counts for another one, too: half as much with each factor of four."""
_MOST: Final = 0.9
"""The share of returns that came by the age which is the scale of what is expected of the unseen."""
_LITTLE: Final = 1e-9
"""What is next to nothing: a worth, a chance, an exponent."""
_KEPT: Final = 1 << 15
"""Observations of each sort that are kept: what was before is forgotten."""
_SPAN: Final = 3600.0
"""Seconds that they are to reach back: where more come in, fewer of them are kept."""
_FIRST_FIT: Final = 16
_FIT_SHARE: Final = 4
_MOST_BETWEEN: Final = 1024
"""Observations after which all is reckoned anew: a quarter of what there are, within these bounds."""


def _bins(ages: _Floats) -> npt.NDArray[np.intp]:
    """The bin of each age."""
    return np.searchsorted(_EDGES, ages, side="right") - 1


def _quantile(values: _Floats, weights: _Floats, share: float) -> float:
    """The value up to which this share of the weights is."""
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order[min(np.searchsorted(total, total[-1] * share), len(order) - 1)]])


class _Ring:
    """The latest rows of a table of floats."""

    def __init__(self, columns: int) -> None:
        self._columns = np.empty((columns, _KEPT))
        self._new: list[tuple[float, ...]] = []
        """Rows that are not in `_columns` yet."""
        self.count = 0

    def add(self, *row: float) -> None:
        self._new.append(row)
        self.count += 1

    def columns(self) -> _Floats:
        new = self._new[-_KEPT:]
        if new:
            self._columns[:, np.arange(self.count - len(new), self.count) % _KEPT] = np.array(new).T
            self._new.clear()
        return self._columns[:, : min(self.count, _KEPT)]


class ReturnTimes:
    """What was seen of uses and returns, and what a place is worth by kind and age.

    Args:
        groups: of each level, the coarsest first, intp [kinds]: the group that each kind is of. The last
            level is the kinds themselves.
        prior: for how many returns of a kind what its group is expected to do stands.
        lindy: [kinds]: the exponent of Lomax's law by which those return of which nothing was seen:
            whatever was not used for long will not be for as long again.
    """

    def __init__(self, groups: Sequence[_Kinds], prior: float, lindy: _Floats) -> None:
        self._members = [np.equal.outer(np.arange(group.max() + 1), group) * 1.0 for group in groups]
        self._kinds = len(groups[-1])
        self._prior = prior
        self._lindy = np.maximum(lindy, _LITTLE)
        self._used = _Ring(3)
        self._returned = _Ring(4)
        self.thinned = 0
        """The share of uses that are noted is 2 to minus this; 0: all of them are."""
        self._late = np.inf
        """The age that nobody who returned had yet."""
        self._thin_next = _KEPT
        self._turned_at: float | None = None
        self._fit_next = _FIRST_FIT
        self._look_next = 1
        """The number of uses at which one of these is to be looked at."""
        self._horizon = 0
        """The bin of the age of the oldest observation."""
        self._fitted(self._unseen(1.0))

    def noted(self, number: int) -> bool:
        """Whether a use of this number is one that is noted: its return is to be told, too."""
        return (number * 0x9E3779B1 & 0xFFFFFFFF) >> (32 - self.thinned) == 0

    def used(self, now: float, kind: int, weight: float) -> None:
        """A use of this kind that is noted; the worth of places is reckoned anew when it is time."""
        self._used.add(now, kind, weight)
        if self._used.count >= self._look_next:
            self._look(now)

    def _look(self, now: float) -> None:
        """See whether fewer uses are to be noted, and whether worth is to be reckoned anew."""
        if self._turned_at is None:
            self._turned_at = now
        if self._used.count >= self._thin_next:
            if now - self._turned_at < _SPAN and self.thinned < 24:
                self.thinned += 1
            self._turned_at = now
            self._thin_next += _KEPT
        if self._used.count >= self._fit_next:
            self.fit(now)
            more = self._used.count // _FIT_SHARE
            self._fit_next = self._used.count + max(_FIRST_FIT, min(_MOST_BETWEEN, more))
        self._look_next = min(self._thin_next, self._fit_next)

    def returned(self, now: float, since: float, kind: int, weight: float) -> None:
        """What was used in this way then, and noted, is used again."""
        self._returned.add(since, now - since, kind, weight)

    def index(self, kinds: _Kinds, ages: _Floats) -> _Floats:
        """Uses per second of a place: what blocks of these kinds and ages are worth."""
        bins = _bins(ages)
        table = self.worth
        worth: _Floats = table[kinds, bins]
        part = np.minimum((ages - _EDGES[bins]) / _WIDTHS[bins], 1.0)
        worth += part * (table[kinds, np.minimum(bins + 1, _BINS - 1)] - worth)
        late = np.flatnonzero(ages > self._late)
        if len(late):
            # Nobody returned so late: these go before all others, the oldest first.
            worth[late] = np.minimum(worth[late], _LITTLE / ages[late])
        return worth

    def apart(self, one: int, other: int) -> bool:
        """Whether blocks of the first kind come back much less than those of the other."""
        return not self._horizon or self._return[one] < 0.5 * self._return[other]

    def fit(self, now: float) -> None:
        """Reckon the worth of places from what was seen."""
        kinds, width = self._kinds, _BINS + 1
        times, kind, weight = self._used.columns()
        # Each was followed through the bins before the one that it is in now.
        seen = np.bincount(kind.astype(np.intp) * width + _bins(now - times), weight, kinds * width)
        at_risk = np.cumsum(seen.reshape(kinds, width)[:, ::-1], axis=1)[:, ::-1][:, 1:]
        since, age, kind, weight = self._returned.columns()
        if len(times):
            still = since >= times.min()
            since, age, kind, weight = since[still], age[still], kind[still], weight[still]
        which, after, until = kind.astype(np.intp), _bins(age), _bins(now - since)
        # Who returned is at risk no more, in the bins from then on in which he would be followed.
        begin = np.minimum(after + 1, until)
        gone = np.bincount(which * width + begin, weight, kinds * width) - np.bincount(
            which * width + until, weight, kinds * width
        )
        at_risk = np.maximum(at_risk - np.cumsum(gone.reshape(kinds, width), axis=1)[:, :_BINS], 0.0)
        whole = after < until
        events = np.bincount((which * _BINS + after)[whole], weight[whole], kinds * _BINS)
        events = events.reshape(kinds, _BINS)
        scale = now - float(times.min())
        if len(age):
            scale = _quantile(age, weight, _MOST)
            self._late = max(_FIRST, float(age.max()))
        chance = self._unseen(max(_FIRST, scale))
        near = np.eye(_BINS)
        for members in self._members:
            expected = members @ (at_risk * chance) @ near
            more = (members @ events @ near + self._prior) / (expected + self._prior)
            chance = np.minimum(chance * (members.T @ more), 0.9)
            near = _NEAR
        self._horizon = int(_bins(now - times.min()))
        self._fitted(np.maximum(chance, 1e-9))

    def _unseen(self, scale: float) -> _Floats:
        """The chance of a return within each bin where nothing was seen, [kinds, bins].

        It is alike up to an age of `scale` seconds, and falls as one over the age from there on (Lomax). By
        then kinds differ no more, so that of what is older than that the least recently used goes first.
        """
        still = (_EDGES + scale) / (_EDGES + _WIDTHS + scale)
        least = self._lindy.min()
        power = least * (self._lindy[:, None] / least) ** (scale / (_EDGES + scale))
        unseen: _Floats = 1.0 - still**power
        return unseen

    def _fitted(self, chance: _Floats) -> None:
        """This is the chance of a return within each bin, [kinds, bins], of who got to it."""
        self._return: list[float] = (1.0 - np.prod(1.0 - chance[:, : self._horizon + 1], axis=1)).tolist()
        self._chance = chance
        self._worth: _Floats | None = None

    @property
    def worth(self) -> _Floats:
        """What a place is worth where each bin begins, [kinds, bins]; reckoned where it is asked for."""
        if self._worth is None:
            self._worth = self._reckoned(self._chance)
        return self._worth

    def _reckoned(self, chance: _Floats) -> _Floats:
        """What a place is worth, from the chance of a return within each bin."""
        # By bins, then kinds: so the most over bins is taken of all kinds at a time. From the last bin on,
        # since of who gets to a bin some are used in it, and the rest do as those who get to the next one.
        chance = chance.T.copy()
        held = _WIDTHS[:, None] * (1.0 - chance / 2)
        uses, taken = np.zeros_like(chance), np.zeros_like(chance)
        worth = np.empty_like(chance)
        for start in reversed(range(_BINS)):
            still = 1.0 - chance[start]
            for until, here in ((uses[start:], chance[start]), (taken[start:], held[start])):
                until *= still
                until += here
            (uses[start:] / taken[start:]).max(axis=0, out=worth[start])
        return worth.T.copy()
