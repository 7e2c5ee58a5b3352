"""Runs: stretches of chains whose blocks were used together the last time, as arrays.

A use of a chain is of all its blocks from the first one on, so what was last used by the same lookup is one
stretch of one chain, and who uses a part of it later takes a leading part. So the blocks of a run differ in
nothing that matters but their place, and a policy can rank runs, of which there are few, and let go of a run
block by block from its end. That leaves its beginning useful, and each step is a few array operations however
long the runs are.

The slots of a run stand in a log, in the order of the chain. `place` of a slot says which entry of the log is
its own; entries that were superseded stay until the log is compacted. A run's record outlives its blocks, as
long as its number is not given to another: `serial` tells.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ..tiers.errors import IntegrityError

__all__ = ["Places", "Runs"]

Places = npt.NDArray[np.intp]
"""intp [n]: slots, or runs, as indices."""

_FIELDS: Final = {
    "serial": np.int64,
    "start": np.int64,
    "stop": np.int64,
    "held": np.int64,
    "idle": np.int64,
    "order": np.int64,
    "spot": np.int64,
    "last": np.float64,
    "kind": np.int64,
    "turns": np.int64,
    "uses": np.int64,
    "path": np.int64,
    "favour": np.float64,
    "until": np.float64,
    "due": np.float64,
    "rider": np.int64,
    "rider_serial": np.int64,
}
_SPARE: Final = 1 << 16
"""Records without blocks that are kept at least: of what is not here any more, or was only asked for."""


class Runs:
    """Which slots are of which run. Run 0 stands for none.

    Args:
        capacity: slots are below it.

    Per slot: `of` (its run), `place` (its entry of the log, plus one), `ranked`.
    Per run: `serial`; `start` and `stop`, its entries of the log, superseded ones among them; `held`, how many
    slots it has; `idle`, how many of these are ranked; `order`, when the last of them became so; `spot`, where
    it stands in `candidates`, plus one; and what is known of its use: `last`, seconds; `kind` of
    `ReturnTimes`; `turns` of its conversation; `uses` of its blocks; `path`, how many blocks that use was of;
    `favour` and `until`, by which its worth is multiplied and till when; `due`, when it is to return, 0: not
    known; `rider`, a run that hangs from this one's end or middle, and the serial that that has.
    """

    serial: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    stop: npt.NDArray[np.int64]
    held: npt.NDArray[np.int64]
    idle: npt.NDArray[np.int64]
    order: npt.NDArray[np.int64]
    spot: npt.NDArray[np.int64]
    last: npt.NDArray[np.float64]
    kind: npt.NDArray[np.int64]
    turns: npt.NDArray[np.int64]
    uses: npt.NDArray[np.int64]
    path: npt.NDArray[np.int64]
    favour: npt.NDArray[np.float64]
    until: npt.NDArray[np.float64]
    due: npt.NDArray[np.float64]
    rider: npt.NDArray[np.int64]
    rider_serial: npt.NDArray[np.int64]

    def __init__(self, capacity: int) -> None:
        self.of = np.zeros(capacity, dtype=np.intp)
        self.place = np.zeros(capacity, dtype=np.intp)
        self.ranked = np.zeros(capacity, dtype=np.bool_)
        self._log = np.empty(max(64, 2 * capacity), dtype=np.intp)
        self._tail = 0
        self._placed = 0
        self.count = 0
        """Slots that are ranked."""
        for name, kind in _FIELDS.items():
            setattr(self, name, np.zeros(0, dtype=kind))
        self._pool = np.zeros(0, dtype=np.intp)
        self._pooled = 0
        self._free = np.zeros(0, dtype=np.intp)
        self._free_head = self._free_count = 0
        self._serial = 0
        self._order = 0
        self._grow(_SPARE)
        self.serial[0] = -1

    @property
    def candidates(self) -> Places:
        """Runs of which slots are ranked."""
        return self._pool[: self._pooled]

    def resize(self, capacity: int) -> None:
        """Slots are below this from now on. There are never fewer than before."""
        more = capacity - len(self.of)
        if more > 0:
            self.of = np.concatenate([self.of, np.zeros(more, dtype=np.intp)])
            self.place = np.concatenate([self.place, np.zeros(more, dtype=np.intp)])
            self.ranked = np.concatenate([self.ranked, np.zeros(more, dtype=np.bool_)])

    # Runs

    def make(self, like: Places) -> Places:
        """New runs without slots, with what is known of these (0: nothing)."""
        number = len(like)
        # Half of what is free at least is kept, and with it what it tells.
        if self._free_count < number + _SPARE // 2:
            self._grow(max(number + _SPARE, len(self.serial) // 2))
        at = (self._free_head + np.arange(number)) % len(self._free)
        runs = self._free[at]
        self._free_head = (self._free_head + number) % len(self._free)
        self._free_count -= number
        for name in ("last", "kind", "turns", "uses", "path", "favour", "until", "due"):
            field = getattr(self, name)
            field[runs] = field[like]
        self.serial[runs] = np.arange(self._serial + 1, self._serial + 1 + number)
        self._serial += number
        self.held[runs] = self.idle[runs] = self.rider[runs] = self.spot[runs] = 0
        return runs

    def _grow(self, more: int) -> None:
        before = len(self.serial)
        for name, kind in _FIELDS.items():
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(more, dtype=kind)]))
        self._pool = np.concatenate([self._pool, np.zeros(more, dtype=np.intp)])
        at = (self._free_head + np.arange(self._free_count)) % max(1, len(self._free))
        new = np.arange(max(1, before), before + more)
        free = np.concatenate([self._free[at], new])
        self._free = np.zeros(before + more, dtype=np.intp)
        self._free[: len(free)] = free
        self._free_head, self._free_count = 0, len(free)
        if before == 0:
            self.favour[0] = 1.0

    def release(self, runs: Places) -> None:
        """These have no slots: their numbers are given again, the first one first, and late."""
        at = (self._free_head + self._free_count + np.arange(len(runs))) % len(self._free)
        self._free[at] = runs
        self._free_count += len(runs)

    # Slots

    def put(self, slots: Places, cuts: Places, runs: Places) -> None:
        """These slots, in the order of their chains, are of these runs from now on, which have none yet.

        Args:
            cuts: where in `slots` each run begins.
        """
        self._leave(slots)
        number = len(slots)
        if self._tail + number > len(self._log):
            self._compact(number)
        tail = self._tail + number
        self._log[self._tail : tail] = slots
        self.place[slots] = np.arange(self._tail + 1, tail + 1)
        ends = np.append(cuts[1:], number)
        self.of[slots] = np.repeat(runs, ends - cuts)
        self.start[runs], self.stop[runs] = self._tail + cuts, self._tail + ends
        self.held[runs] = ends - cuts
        self._tail = tail
        self._placed += number
        ranked = self.ranked[slots]
        if ranked.any():
            self._count_idle(runs, np.add.reduceat(ranked, cuts, dtype=np.int64))

    def take_out(self, slots: Places) -> None:
        """These slots are of no run, and not ranked."""
        self.hold(slots)
        self._leave(slots)
        self.of[slots] = 0
        self.place[slots] = 0

    def _leave(self, slots: Places) -> None:
        """They are of their runs no more."""
        of = self.of[slots]
        cuts = cuts_of(of)
        runs, lengths = of[cuts], np.diff(cuts, append=len(of))
        if not runs.any():
            return
        ranked = self.ranked[slots]
        if ranked.any():
            self._count_idle(runs, -np.add.reduceat(ranked, cuts, dtype=np.int64))
        some = runs > 0
        runs, lengths = runs[some], lengths[some]
        self._placed -= int(lengths.sum())
        if len(runs) == 1:
            self.held[runs] -= lengths
        else:
            np.subtract.at(self.held, runs, lengths)
            runs = np.unique(runs)
        self.release(runs[self.held[runs] == 0])

    def rank(self, slots: Places) -> None:
        """These may go."""
        slots = slots[~self.ranked[slots]]
        self.ranked[slots] = True
        self.count += len(slots)
        of = self.of[slots]
        cuts = cuts_of(of)
        runs = of[cuts]
        self._count_idle(runs, np.diff(cuts, append=len(of)))
        self.order[runs] = np.arange(self._order, self._order + len(runs))
        self._order += len(runs)

    def hold(self, slots: Places) -> None:
        """These may not go."""
        slots = slots[self.ranked[slots]]
        if len(slots):
            self.ranked[slots] = False
            self.count -= len(slots)
            of = self.of[slots]
            cuts = cuts_of(of)
            self._count_idle(of[cuts], -np.diff(cuts, append=len(of)))

    def _count_idle(self, runs: Places, more: npt.NDArray[np.int64]) -> None:
        if len(runs) > 1:
            np.add.at(self.idle, runs, more)
            runs = np.unique(runs)
        else:
            self.idle[runs] += more
        some, there = self.idle[runs] > 0, self.spot[runs] > 0
        new = runs[some & ~there]
        if len(new):
            stop = self._pooled + len(new)
            self._pool[self._pooled : stop] = new
            self.spot[new] = np.arange(self._pooled + 1, stop + 1)
            self._pooled = stop
        old = runs[there & ~some]
        if len(old):
            # Those at the end fill the gaps.
            stop = self._pooled - len(old)
            spots = self.spot[old] - 1
            self.spot[old] = 0
            last = self._pool[stop : self._pooled]
            last = last[self.spot[last] > 0]
            gaps = spots[spots < stop]
            self._pool[gaps] = last
            self.spot[last] = gaps + 1
            self._pooled = stop

    def slots_of(self, run: int) -> Places:
        """Its slots, in the order of the chain."""
        start, stop = int(self.start[run]), int(self.stop[run])
        entries = self._log[start:stop]
        return entries[self.place[entries] == np.arange(start + 1, stop + 1)]

    def ends(self, runs: Places) -> Places:
        """A slot of each, its last one as a rule."""
        return self._log[self.stop[runs] - 1]

    def last_ranked(self, run: int, most: int) -> Places:
        """The ranked slots at its end, the last one first, up to one that is not."""
        start, stop = int(self.start[run]), int(self.stop[run])
        entries = self._log[max(start, stop - most) : stop]
        own = entries[self.place[entries] == np.arange(stop - len(entries) + 1, stop + 1)]
        if len(own) < most and len(own) < self.held[run]:
            own = self.slots_of(run)
            # What stands behind the last of its slots is passed once.
            if len(own):
                self.stop[run] = self.place[own[-1]]
        own = own[::-1][:most]
        held = np.flatnonzero(~self.ranked[own])
        return own[: held[0]] if len(held) else own

    def _compact(self, room: int) -> None:
        entries = self._log[: self._tail]
        live = entries[self.place[entries] == np.arange(1, self._tail + 1)]
        # Twice what is live: the next time is as many uses away as it moves entries.
        if len(self._log) < 2 * (len(live) + room):
            self._log = np.empty(4 * (len(live) + room), dtype=np.intp)
        self._tail = len(live)
        self._log[: self._tail] = live
        self.place[live] = np.arange(1, self._tail + 1)
        of = self.of[live]
        cuts = cuts_of(of)
        self.start[of[cuts]] = cuts
        self.stop[of[cuts]] = np.append(cuts[1:], len(of))[: len(cuts)]

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the bookkeeping does not agree with itself."""
        placed = np.flatnonzero(self.place)
        if not np.array_equal(placed, np.flatnonzero(self.of)) or len(placed) != self._placed:
            raise IntegrityError("cost: a slot has a run and no place, or the other way round")
        if not np.array_equal(self._log[self.place[placed] - 1], placed):
            raise IntegrityError("cost: a slot's entry of the log is another's")
        number = len(self.serial)
        held = np.bincount(self.of[placed], minlength=number)
        idle = np.bincount(self.of[self.ranked], minlength=number)
        if not np.array_equal(held, self.held) or not np.array_equal(idle, self.idle):
            raise IntegrityError("cost: a run does not have as many slots as it counts")
        if int(np.count_nonzero(self.ranked)) != self.count or self.idle[0] or self.held[0]:
            raise IntegrityError(f"cost: {self.count} are counted as ranked, or some without a run")
        pool = self.candidates
        if not np.array_equal(np.sort(pool), np.flatnonzero(self.idle)) or not np.array_equal(
            self.spot[pool], np.arange(1, len(pool) + 1)
        ):
            raise IntegrityError("cost: the candidates are not the runs that have ranked slots")
        inside = (self.place[placed] > self.start[self.of[placed]]) & (
            self.place[placed] <= self.stop[self.of[placed]]
        )
        if not inside.all():
            raise IntegrityError("cost: a slot stands outside of its run")


def cuts_of(values: Places) -> Places:
    """Where a stretch of equal values begins."""
    if len(values) == 0:
        return np.zeros(0, dtype=np.intp)
    return np.concatenate([[0], np.flatnonzero(values[1:] != values[:-1]) + 1])
