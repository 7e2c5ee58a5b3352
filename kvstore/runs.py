"""Runs: stretches of chains whose blocks were used together the last time, as arrays.

A use of a chain is of all its blocks from the first one on, so what was last used by the same lookup is one
stretch of one chain, and who uses a part of it later takes a leading part. So the blocks of a run differ in
nothing that matters but their place, and a policy can rank runs, of which there are few, and let go of a run
block by block from its end. That leaves its beginning useful, and each step is a few array operations however
long the runs are.

What a slot is of is one number, its *standing*: twice its run, plus one where it may go. So one look at the
standings of a batch tells all of it, and a batch along one chain has few stretches of equal ones
(`stretches`): what is told of these is plain numbers. The slots of a run stand in a log, in the order of the
chain; an entry whose slot is of another run by now stays until the log is compacted. A run's record outlives
its blocks, as long as its number is not given to another: its `tag` tells.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..tiers.errors import IntegrityError

__all__ = ["NO_USE", "Parts", "Places", "Runs", "Standings", "Use", "stretches"]

Places = npt.NDArray[np.intp]
"""intp [n]: slots, or runs, as indices."""
Standings = npt.NDArray[np.int64]
"""int64 [n]: of slots, twice their run, plus one where they may go."""
Parts = list[tuple[int, int, int]]
"""Where stretches begin and end in an array, in its order, and of each a number: its value, or its run."""
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
    "favour": np.float64,
    "until": np.float64,
    "due": np.float64,
    "rider": np.int64,
    "newcomer": np.int64,
    "early": np.int64,
    "went": np.int64,
    "since": np.int64,
}
_SPARE: Final = 1 << 16
"""Records without blocks that are kept at least: of what is not here any more, or was only asked for."""
_MOST_TOLD: Final = 1024
_RUN_BITS: Final = 31
_RUN: Final = (1 << _RUN_BITS) - 1
_MOST_MADE: Final = (1 << (63 - _RUN_BITS)) - 1
"""Then they are counted from 1 again: tags from so long ago are nowhere any more."""


def stretches(values: npt.NDArray[np.int64]) -> Parts:
    """Where each stretch of equal values begins and ends, and the value."""
    number = len(values)
    if number == 0:
        return []
    # As bytes they are compared in a fifth of the time. Nearly always all are alike, or one at an end is not.
    raw, size = values.tobytes(), values.itemsize
    first, last = values.item(0), values.item(-1)
    others = number - 1
    if raw[size:] == raw[-size:] * others:
        return [(0, number, last)] if first == last else [(0, 1, first), (1, number, last)]
    if raw[:-size] == raw[:size] * others:
        return [(0, others, first), (others, number, last)]
    found: Parts = []
    begin = 0
    for end in (values[1:] != values[:-1]).nonzero()[0].tolist():
        found.append((begin, end + 1, values.item(begin)))
        begin = end + 1
    found.append((begin, number, last))
    return found


class Use(NamedTuple):
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

    @property
    def newcomer(self) -> bool:
        """Whether it never came back, is of no conversation that did, and nobody spoke for it."""
        return self.uses == 1 and self.turns == 0 and self.favour <= 1.0 and self.due == 0.0


NO_USE: Final = Use(0.0, 0)
"""Stands for that of none."""


class Runs:
    """Which slots are of which run. Run 0 stands for none.

    Args:
        capacity: slots are below it.

    Per slot: `standing`.
    Per run, beside what `Use` has: `tag`, of which no other run has the same; `start` and `stop`, its entries
    of the log, others' among them; `held`, how many slots it has; `idle`, how many of these are ranked;
    `order`, when the last of them became so, of which no other has the same; `spot`, where it stands in
    `candidates`, plus one; `rider`, the tag of a run whose blocks follow some of these, or 0; `newcomer`, 1
    of what never came back; `early`, 1 if it was to go though others were worth less; `went`, what to tell
    `Probation` when it is asked for; `since`, how many slots had been taken out when it was made. What of
    `Use` is asked for of one run at a time only is in no array.

    Of most of these there is a view, named `tag_of` and so on: of a run by itself it is read and written in a
    third of the time.
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
    favour: npt.NDArray[np.float64]
    until: npt.NDArray[np.float64]
    due: npt.NDArray[np.float64]
    rider: _Tags
    newcomer: npt.NDArray[np.int64]
    early: npt.NDArray[np.int64]
    went: npt.NDArray[np.int64]
    since: npt.NDArray[np.int64]
    tag_of: memoryview[int]
    start_of: memoryview[int]
    stop_of: memoryview[int]
    held_of: memoryview[int]
    idle_of: memoryview[int]
    order_of: memoryview[int]
    spot_of: memoryview[int]
    last_of: memoryview[float]
    kind_of: memoryview[int]
    favour_of: memoryview[float]
    until_of: memoryview[float]
    due_of: memoryview[float]
    rider_of: memoryview[int]

    def __init__(self, capacity: int) -> None:
        self.standing: Standings = np.zeros(capacity, dtype=np.int64)
        self._log = np.empty(max(64, 2 * capacity), dtype=np.intp)
        self._tail = 0
        self.count = 0
        """Slots that are ranked."""
        self.gone = 0
        """Slots whose blocks went so far because others were worth more."""
        self.newcomers = 0
        """Those of them that never came back."""
        for name, kind in _FIELDS.items():
            setattr(self, name, np.zeros(1, dtype=kind))
        self._uses = [NO_USE]
        """Of each run what is known of its last use."""
        self._pool = np.zeros(1, dtype=np.intp)
        self._pooled = 0
        self._free: deque[int] = deque()
        self._made = 0
        self._order = 0
        self._told: dict[int, None] = {}
        self._grow(_SPARE)

    @property
    def candidates(self) -> Places:
        """Runs of which slots are ranked."""
        return self._pool[: self._pooled]

    def resize(self, capacity: int) -> None:
        """Slots are below this from now on. There are never fewer than before."""
        more = capacity - len(self.standing)
        if more > 0:
            self.standing = np.concatenate([self.standing, np.zeros(more, dtype=np.int64)])

    # Runs

    def make(self, use: Use) -> int:
        """A new run without slots: `put` gives it some, or `release` lets its number go."""
        # Half of what is free at least is kept, and with it what it tells.
        if len(self._free) < _SPARE // 2:
            self._grow(max(_SPARE, len(self.tag) // 2))
        run = self._free.popleft()
        self._made = self._made % _MOST_MADE + 1
        self.tag_of[run] = self._made << _RUN_BITS | run
        self._uses[run] = use
        self.last_of[run], self.kind_of[run], _, _, _, favour, until, due = use
        self.until_of[run], self.rider_of[run] = until, 0
        if until:
            self.favour_of[run], self.due_of[run] = favour, due
        self.newcomer[run], self.early[run], self.went[run] = use.newcomer, 0, 0
        self.since[run] = self.gone
        return run

    def use(self, run: int) -> Use:
        """What is known of its last use."""
        return self._uses[run]

    def tell_to_go(self, run: int, turn: int) -> None:
        """It goes before all others; of those that are told to, whose `turn` came later goes first."""
        self.order_of[run] = -turn
        self._told[run] = None

    def told_to_go(self) -> Places:
        """The runs that were told to go, and neither went nor were used since, at most `_MOST_TOLD`."""
        if self._told:
            for run in [run for run in self._told if not self.idle_of[run] or self.order_of[run] >= 0]:
                del self._told[run]
        return np.fromiter(islice(reversed(self._told), _MOST_TOLD), np.intp)

    def advise(self, run: int, favour: float, until: float) -> None:
        """By what its worth is multiplied from now on, and till when."""
        self._uses[run] = self._uses[run]._replace(favour=favour, until=until)
        self.due_of[run] = self._uses[run].due
        self.favour_of[run], self.until_of[run] = favour, until

    def tagged(self, tags: _Tags) -> Places:
        """The runs that have these tags; 0 for a run that is not there any more, and for none."""
        runs = tags & _RUN
        runs *= self.tag[runs] == tags
        return runs

    def with_tag(self, tag: int) -> int:
        """The run that has this tag; 0 likewise."""
        run = tag & _RUN
        return run if self.tag_of[run] == tag else 0

    def _grow(self, more: int) -> None:
        before = len(self.tag)
        for name, kind in _FIELDS.items():
            grown = np.concatenate([getattr(self, name), np.zeros(more, dtype=kind)])
            setattr(self, name, grown)
            setattr(self, f"{name}_of", grown.data)
        self._uses += [NO_USE] * more
        self._pool = np.concatenate([self._pool, np.zeros(more, dtype=np.intp)])
        self._free.extend(range(before, before + more))

    def release(self, run: int) -> None:
        """It has no slots: its number is given again, as late as may be."""
        self._free.append(run)

    # Slots

    def put(self, slots: Places, before: Parts, parts: Parts, *, ranked: bool | None = None) -> None:
        """These slots, in the order of their chains, are of these runs from now on.

        Args:
            before: the stretches of their standings.
            parts: of each run, which is new, where it begins and ends in `slots`.
            ranked: whether all of them may go; None: those that might before.
        """
        idle = self._leave(before)
        number = len(slots)
        if ranked is None and 0 < idle < number:
            self._put_mixed(slots, parts)
            return
        ranked = idle > 0 if ranked is None else ranked
        self.count += number * ranked - idle
        first = self._append(slots)
        # Nearly always they are of one run, or all but the last one are.
        whole = True
        for begin, end, run in parts:
            self.start_of[run], self.stop_of[run], self.held_of[run] = first + begin, first + end, end - begin
            if whole:
                self.standing[slots] = 2 * run + ranked
                whole = False
            elif end - begin == 1:
                self.standing[slots.item(begin)] = 2 * run + ranked
            else:
                self.standing[slots[begin:end]] = 2 * run + ranked
        if ranked:
            for begin, end, run in reversed(parts):
                self._come_to_rank(run, end - begin)

    def _put_mixed(self, slots: Places, parts: Parts) -> None:
        """`put` of slots some of which may go."""
        ranked = self.standing[slots] & 1
        first = self._append(slots)
        for begin, end, run in reversed(parts):
            self.start_of[run], self.stop_of[run], self.held_of[run] = first + begin, first + end, end - begin
            self.standing[slots[begin:end]] = ranked[begin:end] + 2 * run
            idle = int(np.count_nonzero(ranked[begin:end]))
            if idle:
                self._come_to_rank(run, idle)

    def add(self, slots: Places, cuts: Places, use: Use) -> None:
        """These slots, in the order of their chains and in no run yet, are of new runs, and may go.

        Args:
            cuts: intp [runs + 1]: where in `slots` each run begins, and the last one ends.
            use: the last one of all of them.
        """
        lengths = np.diff(cuts)
        number = len(lengths)
        if len(self._free) < number + _SPARE // 2:
            self._grow(number + _SPARE)
        runs = np.array([self._free.popleft() for _ in range(number)], dtype=np.intp)
        counted = np.arange(1, number + 1)
        self.tag[runs] = ((self._made + counted - 1) % _MOST_MADE + 1) << _RUN_BITS | runs
        for name, value in use._asdict().items():
            if name in _FIELDS:
                getattr(self, name)[runs] = value
        for run in runs.tolist():
            self._uses[run] = use
        self.rider[runs] = self.early[runs] = self.went[runs] = 0
        self.newcomer[runs] = use.newcomer
        self.since[runs] = self.gone
        self.stop[runs] = self._append(slots) + cuts[1:]
        self.start[runs] = self.stop[runs] - lengths
        self.held[runs] = self.idle[runs] = lengths
        self.standing[slots] = np.repeat(2 * runs + 1, lengths)
        # As if each had come to rank by itself, the last one first.
        self.order[runs] = self._order + counted[::-1]
        self.spot[runs] = self._pooled + counted[::-1]
        self._pool[self._pooled : self._pooled + number] = runs[::-1]
        self._pooled += number
        self._made = (self._made + number - 1) % _MOST_MADE + 1
        self._order += number
        self.count += len(slots)
        self.newcomers += len(slots) * use.newcomer

    def _append(self, slots: Places) -> int:
        """They stand at the end of the log; where the first one does."""
        number = len(slots)
        if self._tail + number > len(self._log):
            self._compact(number)
        first = self._tail
        self._tail += number
        self._log[first : self._tail] = slots
        return first

    def take_out(self, slots: Places, before: Parts, *, ends: bool = False) -> None:
        """These slots, of these stretches of standings, are of no run, and not ranked.

        Args:
            ends: they are what `last_ranked` gave of each run.
        """
        self.count -= self._leave(before)
        self.standing[slots] = 0
        if ends:
            for begin, end, standing in before:
                self.stop_of[standing >> 1] -= end - begin

    def _leave(self, before: Parts) -> int:
        """Slots of these stretches of standings are of their runs no more; how many of them were ranked."""
        ranked = 0
        for begin, end, standing in before:
            run = standing >> 1
            if run:
                number = end - begin
                if standing & 1:
                    ranked += number
                    self._leave_rank(run, number)
                held = self.held_of[run] - number
                self.held_of[run] = held
                if held == 0:
                    self._free.append(run)
        return ranked

    def rank(self, slots: Places, standing: Standings, before: Parts) -> None:
        """These may go; they are in runs.

        Args:
            standing, before: their standings, and the stretches of these.
        """
        for begin, end, value in before:
            if not value & 1:
                self.count += end - begin
                self._come_to_rank(value >> 1, end - begin)
        self.standing[slots] = standing | 1 if len(before) > 1 else before[0][2] | 1

    def hold(self, slots: Places) -> None:
        """These may not go."""
        standing = self.standing[slots]
        before = stretches(standing)
        for begin, end, value in before:
            if value & 1:
                self.count -= end - begin
                self._leave_rank(value >> 1, end - begin)
        self.standing[slots] = standing & -2 if len(before) > 1 else before[0][2] & -2

    def _come_to_rank(self, run: int, more: int) -> None:
        """So many more of its slots are ranked, just now."""
        before = self.idle_of[run]
        self.idle_of[run] = before + more
        self._order += 1
        self.order_of[run] = self._order
        if self.newcomer.item(run):
            self.newcomers += more
        if before == 0:
            self._pool[self._pooled] = run
            self._pooled += 1
            self.spot_of[run] = self._pooled

    def _leave_rank(self, run: int, fewer: int) -> None:
        """So many fewer of its slots are ranked."""
        idle = self.idle_of[run] - fewer
        self.idle_of[run] = idle
        if self.newcomer.item(run):
            self.newcomers -= fewer
        if idle == 0:
            # The last one fills the gap.
            spot = self.spot_of[run]
            self._pooled -= 1
            last = self._pool.item(self._pooled)
            self._pool[spot - 1] = last
            self.spot_of[last] = spot
            self.spot_of[run] = 0

    def ends(self, runs: Places) -> Places:
        """A slot of each, its last one as a rule."""
        return self._log[self.stop[runs] - 1]

    def last_ranked(self, run: int, most: int) -> Places:
        """The ranked slots at its end, up to so many, the last one first, up to one that is not."""
        start, stop = self.start_of[run], self.stop_of[run]
        entries = self._log[max(start, stop - most) : stop]
        if self.idle_of[run] == stop - start:
            return entries[::-1]
        standing = self.standing[entries]
        if np.count_nonzero(standing == 2 * run + 1) == len(entries):
            return entries[::-1]
        own, at = self._own(run)
        if len(own) < len(entries) or own[-1] != entries[-1]:
            # What stands behind the last of its slots is passed once.
            self.stop_of[run] = at.item(-1) + 1
        own = own[::-1][:most]
        there = self.standing[own] & 1
        return own if there.all() else own[: int(there.argmin())]

    def ranked(self, run: int) -> Places:
        """Its slots that may go, in the order of their chain."""
        own, _ = self._own(run)
        return own[self.standing[own] & 1 > 0]

    def in_order(self, slots: Places) -> Places:
        """The same slots, those of a run together and in the order of their chain."""
        parts = []
        for run in np.unique(self.standing[slots] >> 1).tolist():
            own, _ = self._own(run)
            parts.append(own[np.isin(own, slots)])
        return np.concatenate(parts)

    def _own(self, run: int) -> tuple[Places, Places]:
        """The slots of a run in their order, and which entries of the log these are."""
        start, stop = self.start_of[run], self.stop_of[run]
        entries = self._log[start:stop]
        at = (self.standing[entries] >> 1 == run).nonzero()[0]
        return entries[at], at + start

    def _entries(self) -> tuple[Places, Places]:
        """All slots that are in runs, those of a run together and in their order, and the run of each."""
        runs = np.flatnonzero(self.held)
        runs = runs[np.argsort(self.start[runs])]
        lengths = self.stop[runs] - self.start[runs]
        shift = self.start[runs] - np.cumsum(lengths) + lengths
        entries = self._log[np.repeat(shift, lengths) + np.arange(lengths.sum())]
        owners = np.repeat(runs, lengths)
        own = self.standing[entries] >> 1 == owners
        return entries[own], owners[own]

    def _compact(self, room: int) -> None:
        live, owners = self._entries()
        # Twice what is live: the next time is as many uses away as it moves entries.
        if len(self._log) < 2 * (len(live) + room):
            self._log = np.empty(4 * (len(live) + room), dtype=np.intp)
        self._tail = len(live)
        self._log[: self._tail] = live
        ends = np.flatnonzero(np.diff(owners, append=0))
        self.stop[owners[ends]] = ends + 1
        self.start[owners[ends]] = np.concatenate([[0], ends + 1])[: len(ends)]

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the bookkeeping does not agree with itself."""
        of, ranked = self.standing >> 1, self.standing & 1 > 0
        placed = np.flatnonzero(of)
        number = len(self.tag)
        held = np.bincount(of[placed], minlength=number)
        idle = np.bincount(of[ranked], minlength=number)
        if not np.array_equal(held, self.held) or not np.array_equal(idle, self.idle):
            raise IntegrityError("cost: a run does not have as many slots as it counts")
        if not np.array_equal(np.sort(self._entries()[0]), placed):
            raise IntegrityError("cost: a slot is not in the log of its run, or more than once")
        if int(np.count_nonzero(ranked)) != self.count or self.idle[0]:
            raise IntegrityError(f"cost: {self.count} are counted as ranked, or some are in no run")
        if int(idle[self.newcomer > 0].sum()) != self.newcomers:
            raise IntegrityError(f"cost: {self.newcomers} are counted as newcomers")
        pool = self.candidates
        if not np.array_equal(np.sort(pool), np.flatnonzero(self.idle)) or not np.array_equal(
            self.spot[pool], np.arange(1, len(pool) + 1)
        ):
            raise IntegrityError("cost: the candidates are not the runs that have ranked slots")
        if len(set(self._free)) != len(self._free) or self.held[list(self._free)].any():
            raise IntegrityError("cost: the number of a run is free twice, or while it has slots")
