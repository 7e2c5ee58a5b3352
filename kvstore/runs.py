"""Runs: stretches of chains whose blocks were used together the last time, as arrays.

A use of a chain is of all its blocks from the first one on, so what was last used by the same lookup is one
stretch of one chain, and who uses a part of it later takes a leading part. So the blocks of a run differ in
nothing that matters but their place, and a policy can rank runs, of which there are few, and let go of a run
block by block from its end. That leaves its beginning useful, and each step is a few array operations however
long the runs are.

The slots of a run stand in a log, in the order of the chain. `place` of a slot says which entry of the log is
its own; entries that were superseded stay until the log is compacted. A run's record outlives its blocks, as
long as its number is not given to another: its `tag` tells.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..tiers.errors import IntegrityError

__all__ = ["Places", "Runs", "Use", "stretches"]

Places = npt.NDArray[np.intp]
"""intp [n]: slots, or runs, as indices."""
_Tags = npt.NDArray[np.int64]

_FIELDS: Final = {
    "tag": np.int64,
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
}
_SPARE: Final = 1 << 16
"""Records without blocks that are kept at least: of what is not here any more, or was only asked for."""
_RUN_BITS: Final = 31
_RUN: Final = (1 << _RUN_BITS) - 1


def stretches(values: Places) -> list[tuple[int, int, int]]:
    """Where each stretch of equal values begins and ends, and the value."""
    number = len(values)
    if number == 0:
        return []
    ends = (np.flatnonzero(values[1:] != values[:-1]) + 1).tolist()
    begins = [0, *ends]
    ends.append(number)
    return list(zip(begins, ends, values[begins].tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Use:
    """What is known of the last use of a run's blocks.

    Args:
        last: when it was, seconds.
        kind: of `ReturnTimes`.
        turns: how often before the conversation that it was of was gone on with.
        uses: of these blocks, this one among them.
        path: how many blocks the lookup asked for.
        favour, until: by what their worth is multiplied, and till when.
        due: when they are expected to be used next; 0: nobody said.
    """

    last: float
    kind: int
    turns: int = 0
    uses: int = 1
    path: int = 1
    favour: float = 1.0
    until: float = 0.0
    due: float = 0.0


class Runs:
    """Which slots are of which run. Run 0 stands for none.

    Args:
        capacity: slots are below it.

    Per slot: `of` (its run), `place` (its entry of the log, plus one), `ranked`.
    Per run, beside what `Use` has: `tag`, of which no other run has the same; `start` and `stop`, its entries
    of the log, superseded ones among them; `held`, how many slots it has; `idle`, how many of these are
    ranked; `order`, when the last of them became so; `spot`, where it stands in `candidates`, plus one;
    `rider`, the tag of a run whose blocks follow some of these, or 0.
    """

    tag: _Tags
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
    rider: _Tags

    def __init__(self, capacity: int) -> None:
        self.of = np.zeros(capacity, dtype=np.intp)
        self.place = np.zeros(capacity, dtype=np.intp)
        self.ranked = np.zeros(capacity, dtype=np.bool_)
        self._log = np.empty(max(64, 2 * capacity), dtype=np.intp)
        self._tail = 0
        self.count = 0
        """Slots that are ranked."""
        for name, kind in _FIELDS.items():
            setattr(self, name, np.zeros(1, dtype=kind))
        self._pool = np.zeros(1, dtype=np.intp)
        self._pooled = 0
        self._free: deque[int] = deque()
        self._made = 0
        self._order = 0
        self._grow(_SPARE)

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

    def make(self, use: Use) -> int:
        """A new run without slots: `put` gives it some, or `release` lets its number go."""
        # Half of what is free at least is kept, and with it what it tells.
        if len(self._free) < _SPARE // 2:
            self._grow(max(_SPARE, len(self.tag) // 2))
        run = self._free.popleft()
        self._made += 1
        self.tag[run] = self._made << _RUN_BITS | run
        self.last[run], self.kind[run], self.turns[run] = use.last, use.kind, use.turns
        self.uses[run], self.path[run], self.due[run] = use.uses, use.path, use.due
        self.favour[run], self.until[run], self.rider[run] = use.favour, use.until, 0
        return run

    def use(self, run: int) -> Use:
        """What is known of its last use."""
        return Use(
            last=float(self.last[run]),
            kind=int(self.kind[run]),
            turns=int(self.turns[run]),
            uses=int(self.uses[run]),
            path=int(self.path[run]),
            favour=float(self.favour[run]),
            until=float(self.until[run]),
            due=float(self.due[run]),
        )

    def tagged(self, tags: _Tags) -> Places:
        """The runs that have these tags; 0 for a run that is not there any more, and for none."""
        runs = tags & _RUN
        runs *= self.tag[runs] == tags
        return runs

    def _grow(self, more: int) -> None:
        before = len(self.tag)
        for name, kind in _FIELDS.items():
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(more, dtype=kind)]))
        self._pool = np.concatenate([self._pool, np.zeros(more, dtype=np.intp)])
        self._free.extend(range(before, before + more))

    def release(self, run: int) -> None:
        """It has no slots: its number is given again, as late as may be."""
        self._free.append(run)

    # Slots

    def put(self, slots: Places, parts: list[tuple[int, int, int]]) -> None:
        """These slots, in the order of their chains, are of these runs from now on.

        Args:
            parts: where in `slots` each run begins and ends, and the run, which is new.
        """
        ranked = self.ranked[slots]
        self._leave(slots, ranked)
        number = len(slots)
        if self._tail + number > len(self._log):
            self._compact(number)
        first = self._tail
        self._tail += number
        self._log[first : self._tail] = slots
        self.place[slots] = np.arange(first + 1, self._tail + 1)
        for begin, end, run in parts:
            self.of[slots if end - begin == number else slots[begin:end]] = run
            self.start[run], self.stop[run] = first + begin, first + end
            self.held[run] = end - begin
            idle = int(np.count_nonzero(ranked[begin:end]))
            if idle:
                self._count_idle(run, idle)

    def take_out(self, slots: Places) -> None:
        """These slots are of no run, and not ranked."""
        ranked = self.ranked[slots]
        self._leave(slots, ranked)
        self.count -= int(np.count_nonzero(ranked))
        self.ranked[slots] = False
        self.of[slots] = 0
        self.place[slots] = 0

    def _leave(self, slots: Places, ranked: npt.NDArray[np.bool_]) -> None:
        """They are of their runs no more."""
        for begin, end, run in stretches(self.of[slots]):
            if run:
                idle = int(np.count_nonzero(ranked[begin:end]))
                if idle:
                    self._count_idle(run, -idle)
                held = self.held[run] - (end - begin)
                self.held[run] = held
                if held == 0:
                    self._free.append(run)

    def rank(self, slots: Places) -> None:
        """These may go; they are in runs."""
        there = self.ranked[slots]
        if there.any():
            slots = slots[~there]
        self.ranked[slots] = True
        self.count += len(slots)
        for begin, end, run in stretches(self.of[slots]):
            self._count_idle(run, end - begin)
            self._order += 1
            self.order[run] = self._order

    def hold(self, slots: Places) -> None:
        """These may not go."""
        there = self.ranked[slots]
        if not there.all():
            slots = slots[there]
        self.ranked[slots] = False
        self.count -= len(slots)
        for begin, end, run in stretches(self.of[slots]):
            self._count_idle(run, begin - end)

    def _count_idle(self, run: int, more: int) -> None:
        """So many more of its slots are ranked."""
        before = int(self.idle[run])
        self.idle[run] = before + more
        if before == 0:
            self._pool[self._pooled] = run
            self._pooled += 1
            self.spot[run] = self._pooled
        elif before + more == 0:
            # The last one fills the gap.
            spot = int(self.spot[run])
            self._pooled -= 1
            last = int(self._pool[self._pooled])
            self._pool[spot - 1] = last
            self.spot[last] = spot
            self.spot[run] = 0

    def ends(self, runs: Places) -> Places:
        """A slot of each, its last one as a rule."""
        return self._log[self.stop[runs] - 1]

    def last_ranked(self, run: int, most: int) -> Places:
        """The ranked slots at its end, the last one first, up to one that is not."""
        start, stop = int(self.start[run]), int(self.stop[run])
        own = self._own(max(start, stop - most), stop)
        if len(own) < most and len(own) < self.held[run]:
            own = self._own(start, stop)
            # What stands behind the last of its slots is passed once.
            self.stop[run] = self.place[own[-1]]
        own = own[::-1][:most]
        there = self.ranked[own]
        return own if there.all() else own[: int(there.argmin())]

    def _own(self, start: int, stop: int) -> Places:
        """The slots whose entries of the log are these."""
        entries: Places = self._log[start:stop]
        own: Places = entries[self.place[entries] == np.arange(start + 1, stop + 1)]
        return own

    def _compact(self, room: int) -> None:
        live = self._own(0, self._tail)
        # Twice what is live: the next time is as many uses away as it moves entries.
        if len(self._log) < 2 * (len(live) + room):
            self._log = np.empty(4 * (len(live) + room), dtype=np.intp)
        self._tail = len(live)
        self._log[: self._tail] = live
        self.place[live] = np.arange(1, self._tail + 1)
        of = self.of[live]
        ends = np.flatnonzero(np.diff(of, append=0))
        self.stop[of[ends]] = ends + 1
        self.start[of[ends]] = np.concatenate([[0], ends + 1])[: len(ends)]

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the bookkeeping does not agree with itself."""
        placed = np.flatnonzero(self.place)
        of = self.of[placed]
        if not np.array_equal(placed, np.flatnonzero(self.of)):
            raise IntegrityError("cost: a slot has a run and no place, or the other way round")
        if not np.array_equal(self._log[self.place[placed] - 1], placed):
            raise IntegrityError("cost: a slot's entry of the log is another's")
        number = len(self.tag)
        held = np.bincount(of, minlength=number)
        idle = np.bincount(self.of[self.ranked], minlength=number)
        if not np.array_equal(held, self.held) or not np.array_equal(idle, self.idle):
            raise IntegrityError("cost: a run does not have as many slots as it counts")
        if int(np.count_nonzero(self.ranked)) != self.count or self.idle[0]:
            raise IntegrityError(f"cost: {self.count} are counted as ranked, or some are in no run")
        pool = self.candidates
        if not np.array_equal(np.sort(pool), np.flatnonzero(self.idle)) or not np.array_equal(
            self.spot[pool], np.arange(1, len(pool) + 1)
        ):
            raise IntegrityError("cost: the candidates are not the runs that have ranked slots")
        if not ((self.place[placed] > self.start[of]) & (self.place[placed] <= self.stop[of])).all():
            raise IntegrityError("cost: a slot stands outside of its run")
        if len(set(self._free)) != len(self._free) or self.held[list(self._free)].any():
            raise IntegrityError("cost: the number of a run is free twice, or while it has slots")
