"""Which blocks go: those at the ends of runs that are worth least, and none before those that follow it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from .chain_links import ChainLinks
from .probation import Probation
from .run_ranking import RunRanking, Worth
from .runs import Parts, Places, Runs, stretches

__all__ = ["Going", "Victims"]

_NONE: Final = np.zeros(0, dtype=np.intp)
_GOLDEN: Final = (5**0.5 - 1) / 2
"""Whose multiples, modulo 1, are spread."""
_MANY: Final = 8
"""Where more than one of so many slots is to go all runs are compared."""


class Going(NamedTuple):
    """What goes, the first one first."""

    slots: Places
    before: Parts
    """The stretches of their standings."""
    parents: dict[int, int] | None = None
    """As of `ChainLinks.leave`; not None: the slots are ends of runs, as of `Runs.last_ranked`."""
    blocked: Sequence[int] = ()
    """Runs that would have gone before, but that something follows."""


class Victims:
    """Chooses what goes. What is found out is kept while nothing has changed, and for longer once it has led
    to something (`stay_with`, `gone`): so looking changes nothing.

    Args:
        runs: which slots are of which run.
        links: which block follows which.
        worth: tells what runs are worth.
        clock: seconds.
        probation: tells whether newcomers go first.
        seed: of the draws among many runs.
    """

    def __init__(
        self,
        runs: Runs,
        links: ChainLinks,
        worth: Worth,
        clock: Callable[[], float],
        probation: Probation,
        seed: int,
    ) -> None:
        self._runs = runs
        self._links = links
        self._worth = worth
        self._clock = clock
        self._probation = probation
        self._draw = seed * _GOLDEN
        self._ranking: RunRanking | None = None
        self._latest: RunRanking | None = None

    def changed(self) -> None:
        """Blocks were used, or came, or are told of."""
        self._latest = None

    def told(self) -> None:
        """What some blocks are worth is another thing now."""
        self._latest = self._ranking = None

    def ranking(self, count: int) -> RunRanking:
        """Runs that go first, where so many slots are to go."""
        now = self._clock()
        many = count * _MANY > self._runs.count
        held, latest = self._ranking, self._latest
        first = self._probation.crowds(
            self._runs.newcomers + count,
            self._runs.count,
            already=held is not None and held.newcomers_first,
        )
        if held is not None and held.newcomers_first == first and held.holds(now) and (held.all or not many):
            return held
        if (
            latest is not None
            and latest.newcomers_first == first
            and latest.fresh(now)
            and latest.everything == many
        ):
            return latest
        return self._compared(now, everything=many, newcomers_first=first)

    def stay_with(self, ranking: RunRanking) -> None:
        """What goes next goes by this one, while it holds."""
        if ranking is not self._ranking:
            self._ranking = ranking
            self._draw = (self._draw + _GOLDEN) % 1.0

    def choose(self, count: int) -> Going:
        """Up to so many slots: of each run from its end, and none before those that follow it."""
        runs, links = self._runs, self._links
        left = total = min(count, runs.count)
        slots: list[Places] = []
        parts: Parts = []
        taken: dict[int, int] = {}
        parents: dict[int, int] = {}
        blocked: list[int] = []
        ranking = self.ranking(left) if left else None
        while left > 0 and ranking is not None:
            before = left
            for run, _ in ranking:
                already = taken.get(run, 0)
                part = runs.last_ranked(run, already + left)[already:]
                part = links.free(part, parents) if len(part) else part
                if not len(part):
                    blocked.append(run)
                    continue
                slots.append(part)
                parts.append((total - left, total - left + len(part), 2 * run + 1))
                left -= len(part)
                if left <= 0:
                    break
                taken[run] = already + len(part)
            if left == before:
                if ranking.all:
                    return self._rest(slots, left)
                ranking = self._compared(
                    self._clock(), everything=True, newcomers_first=ranking.newcomers_first
                )
        at = slots[0] if len(slots) == 1 else np.concatenate(slots or [_NONE])
        return Going(at, parts, parents, blocked)

    def gone(self, going: Going) -> None:
        """These went."""
        if self._latest is not None:
            self.stay_with(self._latest)
        if self._ranking is not None and going.blocked:
            self._ranking.pass_over(going.blocked)
        self._latest = None

    def _rest(self, slots: list[Places], left: int) -> Going:
        """What is held has what may go before it in its chain, which then goes."""
        runs = self._runs
        chosen = np.concatenate([_NONE, *slots])
        more = [chosen]
        # Who uses what follows in a chain uses what is before it, too: so ends come before beginnings.
        for run in runs.candidates[np.argsort(runs.order[runs.candidates])].tolist():
            own = runs.ranked(run)[::-1]
            more.append(own[~np.isin(own, chosen)][:left])
            left -= len(more[-1])
            if left <= 0:
                break
        at = np.concatenate(more)
        return Going(at, stretches(runs.standing[at]))

    def _compared(self, now: float, *, everything: bool, newcomers_first: bool) -> RunRanking:
        draw = None if everything else self._draw
        self._latest = RunRanking(self._runs, self._worth, now, draw, newcomers_first=newcomers_first)
        return self._latest
