"""The `cost` policy: what a place is worth, in seconds expected to be saved for each that it is taken.

Runs are ranked (`runs`): stretches of chains that were last used together. Each use is of a kind: how many
turns its conversation had, the gap before this one, how many blocks of the prompt nobody asked for before.
What others share is of a kind by its own uses and gap, and the last block of a prompt, which may be filled
only in part, is of its own where it turns out to come back less. What a run is worth follows from how uses
of its kind came back (`return_times`), from its age, from advice, and from what losing a block costs.

Ghosts remember of blocks that are not here of which run their last use was: so a conversation that was
evicted is known when it returns, and that it did is learned. They are entries of a table by hash, and one
that another displaced is told by its neighbours in the chain. (Ghosts: "ARC", Megiddo and Modha, FAST
2003.)

A newcomer gets a place only if it is worth no less than what would go for it. A run goes from its end,
block by block, and no block before those that follow it, as far as these are known.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import ClassVar, Final, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from ..tiers.settings import expect_integer
from .chain_links import ChainLinks
from .ghosts import Ghosts
from .lineage import ShortHashes
from .policy import MOST_BLOCKS, BlockFacts, Ids, PolicyOptions, Retention
from .return_times import ReturnTimes
from .run_ranking import RunRanking
from .runs import Parts, Places, Runs, Use, stretches

__all__ = ["CostPolicy"]

_Floats = npt.NDArray[np.float64]

_TURNS: Final = [1, 2, 3, 5]
_NEW: Final = [2, 4, 16]
_GAPS: Final = [0.0, 16.0, 64.0, 256.0]
_OWN_GAPS: Final = [1.0, 4.0, 16.0, 64.0, 256.0]
_USES: Final = [3, 9, 33]
"""Where the next one begins of the classes of what is counted or measured, which kinds are made of."""
_SHAPE: Final = (len(_TURNS) + 1, len(_NEW) + 1, len(_GAPS) + 1)
_BODIES: Final = _SHAPE[0] * _SHAPE[1] * _SHAPE[2]
_ENDS: Final = 2
_SHARED_SHAPE: Final = (len(_OWN_GAPS) + 1, len(_USES) + 1)
_SHARED: Final = _SHARED_SHAPE[0] * _SHARED_SHAPE[1]
_FIRST_END: Final = _BODIES
_FIRST_SHARED: Final = _BODIES + _ENDS
_KINDS: Final = _BODIES + _ENDS + _SHARED
_UNKNOWN: Final = (len(_NEW)) * _SHAPE[2]
"""The kind of what nobody asked for before it came: as if a long new chain were of it."""

_TRIED: Final = 4
"""Of so many lookups one is looked at whether its last block does as the others do, where it seemed to."""
_GOLDEN: Final = (5**0.5 - 1) / 2
"""Whose multiples, modulo 1, are spread."""
_NONE: Final = np.zeros(0, dtype=np.intp)


def _groups() -> list[npt.NDArray[np.intp]]:
    """The groups of kinds, coarser ones first."""
    body = np.arange(_BODIES)
    turns, new, _ = np.unravel_index(body, _SHAPE)
    end, shared = np.arange(_ENDS), np.arange(_SHARED)
    families = np.repeat([0, 1, 2], [_BODIES, _ENDS, _SHARED])
    by_new = np.concatenate([(turns > 0) * 4 + new, 8 + end * 0, 9 + shared * 0])
    by_turns = np.concatenate([turns * 4 + new, 20 + end, 22 + shared // _SHARED_SHAPE[1]])
    return [np.asarray(one, dtype=np.intp) for one in (families, by_new, by_turns, np.arange(_KINDS))]


def _expected() -> _Floats:
    """How much sooner than another each kind is expected back while nothing was seen."""
    turns = np.unravel_index(np.arange(_BODIES), _SHAPE)[0]
    uses = np.arange(_SHARED) % _SHARED_SHAPE[1] + 1
    return np.concatenate([1.0 + turns, [1.0, 2.0], 1.0 + uses])


def _body(turns: int, new: int, gap: float) -> int:
    """The kind of what is used by a lookup.

    Args:
        turns: how often its conversation was gone on with.
        new: how many blocks nobody asked for before.
        gap: seconds since the conversation's last turn; below 0: it has none.
    """
    return (bisect_right(_TURNS, turns) * _SHAPE[1] + bisect_right(_NEW, new)) * _SHAPE[2] + (
        bisect_right(_GAPS, gap)
    )


def _shared(gap: float, uses: int) -> int:
    """The kind of what was used by others, too, so many times, and the last time so many seconds ago."""
    return _FIRST_SHARED + bisect_right(_OWN_GAPS, gap) * _SHARED_SHAPE[1] + bisect_right(_USES, uses)


class _Found(NamedTuple):
    """What a lookup found, of which is to be told yet whether it was all that it asked for."""

    ids: Ids
    at: Places
    before: Parts
    """The stretches of their standings."""


_NOTHING_FOUND: Final = _Found(np.empty(0, dtype=np.int32), _NONE, [])


class _Going(NamedTuple):
    """What goes."""

    at: Places
    before: Parts
    """The stretches of their standings."""
    parents: dict[int, int] | None = None
    """As of `ChainLinks.leave`."""
    blocked: Sequence[int] = ()
    """Runs that would have gone before, but that something follows."""


def _some_new(before: Parts) -> bool:
    """Whether slots of these stretches of standings are of no run."""
    return 0 in [standing for _, _, standing in before]


def _of_runs(before: Parts) -> Parts:
    """The same stretches of standings by their runs: those of a run that follow each other are one."""
    if len(before) == 1:
        begin, end, standing = before[0]
        return [(begin, end, standing >> 1)]
    merged: Parts = []
    for begin, end, standing in before:
        run = standing >> 1
        if merged and merged[-1][2] == run:
            begin, _, _ = merged.pop()
        merged.append((begin, end, run))
    return merged


class CostPolicy:
    """Expected seconds saved per second of a place.

    Args:
        capacity: ids are below it, until `resize`.
        options: see `PolicyOptions`.

    Raises:
        ConfigError: `capacity` is out of range.
    """

    known_weights: ClassVar[Mapping[str, float]] = {
        "prior": 4.0,
        "lindy": 0.1,
        "priority": 10.0,
        "hint_seconds": 600.0,
        "finish": 16.0,
        "late": 5.0,
        "return_trust": 0.8,
    }
    learns: ClassVar[bool] = True

    def __init__(self, capacity: int = 0, **options: Unpack[PolicyOptions]) -> None:
        capacity = expect_integer("capacity", capacity, 0, MOST_BLOCKS)
        self._clock = options.get("clock", time.monotonic)
        self._losses = options.get("losses")
        self._seed = options.get("seed", 0)
        self._weights = {**self.known_weights, **(options.get("weights") or {})}
        self._runs = Runs(capacity)
        self._times = ReturnTimes(_groups(), self._weights["prior"], self._weights["lindy"] * _expected())
        self._links = ChainLinks(capacity)
        self._ghosts = Ghosts(capacity)
        self._names = np.zeros(capacity, dtype=np.uint64)
        self._like = np.zeros(capacity, dtype=np.int64)
        """Of each slot that was not ranked yet the tag of the run whose use it is of; 0: not known."""
        self._found: _Found | None = None
        self._latest = 0
        """The slot that the last lookup found at the end of its chain."""
        self._demotions = 0
        self._lookups = 0
        self._changes = 0
        self._draws = 0
        self._ranking: RunRanking | None = None
        """What holds for a while, once blocks have gone by it."""
        self._looked: tuple[int, float, RunRanking] | None = None
        """The latest one that was made, after which change, and when."""

    def __len__(self) -> int:
        return self._runs.count

    def resize(self, capacity: int) -> None:
        more = capacity - len(self._names)
        if more <= 0:
            return
        self._runs.resize(capacity)
        self._links.resize(capacity)
        self._ghosts = self._ghosts.grown(capacity)
        for name in ("_names", "_like"):
            field = getattr(self, name)
            setattr(self, name, np.concatenate([field, np.zeros(more, dtype=field.dtype)]))

    def _slots(self, names: ShortHashes) -> Places:
        """The slots that hold these blocks, plus one; 0: none, or not known."""
        latest = self._latest
        if len(names) == 1 and names.item(0) == self._names.item(latest) and self._is_here(latest):
            return np.array([latest + 1])
        places = self._ghosts.places(names)
        return self._slots_of(names, self._ghosts.slots[places])

    def _slots_of(self, names: ShortHashes, slots: Places) -> Places:
        """Those of these slots, plus one, that hold the blocks of these names; 0 for the others."""
        return slots * ((self._names[slots - 1] == names) & self._links.here(slots - 1))

    def _is_here(self, slot: int) -> bool:
        return bool(self._links.here(np.array([slot]))[0])

    # Uses

    def found(self, ids: Ids) -> None:
        self._settle()
        if len(ids):
            at = ids.astype(np.intp)
            self._latest = at.item(-1)
            standing = self._runs.standing[at]
            before = stretches(standing)
            if _some_new(before):
                self._place(at[standing == 0], ranked=False)
                before = stretches(self._runs.standing[at])
            self._found = _Found(ids, at, before)

    def missed(self, facts: BlockFacts) -> None:
        if len(facts) == 0:
            return
        if self._found is not None and facts.parents.item(0) not in (0, self._names.item(self._latest)):
            self._settle()
        (_, at, before), self._found = self._found or _NOTHING_FOUND, None
        runs, ghosts, names = self._runs, self._ghosts, facts.names
        number, asked = len(at), len(names)
        pieces = _of_runs(before)
        places = ghosts.places(names)
        known = ghosts.known(names, places)
        behind, positions = 0, None
        if np.count_nonzero(known):
            like = runs.tagged(ghosts.tags[places] * known)
            beyond = self._slots_of(names, ghosts.slots[places] * known)
            stranded = beyond.nonzero()[0]
            if len(stranded):
                # They are here, but something before them in their chain was not.
                beyond = beyond[stranded] - 1
                standing = runs.standing[beyond]
                stranded, beyond, standing = (one[standing > 1] for one in (stranded, beyond, standing))
                like[stranded] = standing >> 1
                at = np.concatenate([at, beyond])
                before = before + [
                    (begin + number, end + number, one) for begin, end, one in stretches(standing)
                ]
                positions = np.concatenate([np.arange(number), stranded + number])
            there = like.nonzero()[0]
            if len(there):
                # A ghost that another one displaced is told by those behind it in the chain.
                behind = there.item(-1) + 1
                if len(there) < behind:
                    like[:behind] = like[there[np.searchsorted(there, np.arange(behind))]]
                pieces += [
                    (begin + number, end + number, run) for begin, end, run in stretches(like[:behind])
                ]
        parts = self._use(pieces, number + asked)
        for begin, end, run in parts:
            if end > number:
                ghosts.tags[places[max(begin - number, 0) : end - number]] = runs.tag[run]
        ghosts.names[places] = names
        self._restamp(at, before, positions, parts)

    def _settle(self, *, hold: bool = False) -> None:
        """What was found was all that was asked for.

        Args:
            hold: it is in use from now on.
        """
        if self._found is not None:
            (_, at, before), self._found = self._found, None
            self._restamp(at, before, None, self._use(_of_runs(before), len(at)), hold=hold)

    def _use(self, before: Parts, path: int) -> Parts:
        """A lookup asked for a chain.

        Args:
            before: of its leading blocks that were used before the runs of which that was.
            path: how many blocks it has.

        Returns:
            where in the chain each stretch of what is alike begins and ends, and a new run for it.
        """
        self._changes += 1
        runs, times = self._runs, self._times
        now = self._clock()
        pieces = [(begin, end, run, runs.use(run)) for begin, end, run in before]
        new = path - (before[-1][1] if before else 0)
        turns, gap = 0, -1.0
        if pieces:
            _, known, _, deepest = pieces[-1]
            if 4 * known >= 3 * deepest.path or known >= deepest.path - 1 > 1:
                turns, gap = deepest.turns + 1, now - deepest.last
        body = _body(turns, new, gap)
        alike: list[tuple[int, Use]] = []
        for begin, end, run, use in pieces:
            if times.noted(run):
                times.returned(now, use.last, use.kind, (end - begin) / use.path)
            own = now - use.last
            kind = body if turns and own >= gap / 4 else _shared(own, use.uses)
            held = use.until > now and use.favour > 0.0
            favour, until = (use.favour, use.until) if held else (1.0, 0.0)
            if not alike or alike[-1][1].kind != kind or alike[-1][1].until != until:
                alike.append((begin, Use(now, kind, turns, use.uses + 1, path, favour, until)))
        if new and (not alike or alike[-1][1].kind != body or alike[-1][1].until):
            alike.append((path - new, Use(now, body, turns, 1, path)))
        self._lookups += 1
        end_kind = _FIRST_END + (turns > 0)
        if path > 1 and (self._lookups % _TRIED == 0 or times.apart(end_kind, body)):
            # The last block by itself: it may be but a part of one, which is another one the next time.
            begin, use = alike[-1]
            if begin == path - 1:
                alike.pop()
            alike.append((path - 1, use._replace(kind=end_kind)))
        parts = []
        for (begin, use), end in zip(alike, [*(begin for begin, _ in alike[1:]), path], strict=True):
            run = runs.make(use)
            parts.append((begin, end, run))
            if times.noted(run):
                times.used(now, use.kind, (end - begin) / path)
        return parts

    def _restamp(
        self, at: Places, before: Parts, positions: Places | None, parts: Parts, *, hold: bool = False
    ) -> None:
        """These slots are of the runs of their latest use; those runs that get none are ghosts'.

        Args:
            before: the stretches of the slots' standings.
            positions: which of the chain's blocks the slots hold; None: the leading ones.
            parts: as of `_use`.
            hold: they are in use from now on.
        """
        runs = self._runs
        number = len(at)
        mine = parts
        if positions is not None:
            bounds = np.searchsorted(positions, [*(begin for begin, _, _ in parts), parts[-1][1]]).tolist()
            mine = [
                (begin, end, run)
                for begin, end, (_, _, run) in zip(bounds[:-1], bounds[1:], parts, strict=True)
                if begin < end
            ]
        elif number < parts[-1][1]:
            mine = [(begin, min(end, number), run) for begin, end, run in parts if begin < number]
        if number:
            old = before[-1][2] >> 1
            runs.put(at, before, mine, ranked=False if hold else None)
            # What follows some of these in their chain must not be worth more than they.
            if runs.held.item(old):
                for _, _, run in mine:
                    runs.rider[run] = runs.tag[old]
            else:
                for (_, _, run), (_, _, following) in pairwise(mine):
                    runs.rider[run] = runs.tag[following]
        if len(mine) < len(parts):
            taken = {run for _, _, run in mine}
            for _, _, run in parts:
                if run not in taken:
                    runs.release(run)

    def admit(self, ids: Ids, facts: BlockFacts) -> None:
        if len(ids) == 0:
            return
        self._settle()
        self._changes += 1
        at = ids.astype(np.intp)
        if self._links.any_here(at):
            self.forget(ids)
        ghosts, names = self._ghosts, facts.names
        places = ghosts.places(names)
        known = ghosts.known(names, places)
        like = ghosts.tags[places]
        if np.count_nonzero(known) < len(names):
            like *= known
            ghosts.names[places], ghosts.tags[places] = names, like
        ghosts.slots[places] = at + 1
        self._like[at] = like
        self._names[at] = names
        self._links.join(at, facts, self._slots)

    def _place(self, at: Places, *, ranked: bool) -> None:
        """Runs of slots in the order of their chains that have none yet; whether these may go."""
        runs, links = self._runs, self._links
        like = self._like[at]
        follow = links.follow(at)
        if len(stretches(like)) == 1 and np.count_nonzero(follow) == len(follow):
            cuts = [0, len(at)]
        else:
            breaks = ((like[1:] != like[:-1]) | ~follow).nonzero()[0] + 1
            cuts = [0, *breaks.tolist(), len(at)]
        parts = []
        for begin, end in pairwise(cuts):
            of = runs.with_tag(like.item(begin))
            made = runs.make(runs.use(of) if of else Use(self._clock(), _UNKNOWN))
            parts.append((begin, end, made))
        runs.put(at, [], parts, ranked=ranked)
        for begin, _, made in parts:
            before = links.before(at.item(begin))
            if before is not None:
                runs.rider[runs.standing.item(before) >> 1] = runs.tag[made]

    # Ranking

    def insert(self, ids: Ids) -> None:
        if len(ids) == 0:
            return
        self._settle()
        self._changes += 1
        at = ids.astype(np.intp)
        runs = self._runs
        standing = runs.standing[at]
        before = stretches(standing)
        if _some_new(before):
            self._place(at[standing == 0][::-1], ranked=True)
            at, standing = at[standing > 0], standing[standing > 0]
            before = stretches(standing)
            if not before:
                return
        if self._demotions:
            # What was demoted, and used since, is as good as others.
            for _, _, one in before:
                if runs.favour.item(one >> 1) == 0.0:
                    runs.favour[one >> 1], runs.until[one >> 1] = 1.0, 0.0
        runs.rank(at, standing, before)

    def remove(self, ids: Ids) -> None:
        if len(ids):
            self._changes += 1
            if self._found is not None and self._found.ids is ids:
                self._settle(hold=True)
                return
            self._settle()
            self._runs.hold(ids.astype(np.intp))

    def forget(self, ids: Ids) -> None:
        if len(ids) == 0:
            return
        self._settle()
        at = ids.astype(np.intp)
        self._let_go(_Going(at, stretches(self._runs.standing[at])))

    def _let_go(self, going: _Going) -> None:
        looked = self._looked
        if looked is not None and looked[0] == self._changes:
            self._ranking = looked[2]
        if self._ranking is not None and going.blocked:
            self._ranking.pass_over(going.blocked)
        self._changes += 1
        runs, ghosts = self._runs, self._ghosts
        names = self._names[going.at]
        places = ghosts.places(names)
        ghosts.names[places] = names
        for begin, end, standing in going.before:
            ghosts.tags[places[begin:end]] = runs.tag.item(standing >> 1)
        runs.take_out(going.at, going.before)
        self._links.leave(going.at, going.parents)

    def _worth(self, runs: Places) -> _Floats:
        table, now = self._runs, self._clock()
        worth = self._times.index(table.kind[runs], now - table.last[runs])
        on = np.flatnonzero(table.rider[runs])
        if len(on):
            riders = table.tagged(table.rider[runs[on]])
            there = table.held[riders] > 0
            on, riders = on[there], riders[there]
            theirs = self._times.index(table.kind[riders], now - table.last[riders])
            worth[on] = np.maximum(worth[on], theirs)
        until = table.until[runs]
        if until.any():
            due = table.due[runs]
            soon = np.flatnonzero((due > 0.0) & (until > now))
            if len(soon):
                wait = np.maximum(due[soon] - now, 0.0) + (until[soon] - np.maximum(due[soon], now)) / 2
                worth[soon] = self._weights["return_trust"] / np.maximum(wait, 1e-3)
            worth = np.where(until > now, worth * table.favour[runs], worth)
        if self._losses is not None:
            worth = worth * self._losses(table.ends(runs).astype(np.int32))
        return worth

    def _ranked(self, count: int) -> RunRanking:
        """Runs that go first, where so many slots are to go."""
        now = self._clock()
        most = count * 8 > self._runs.count
        if self._ranking is not None and self._ranking.holds(now) and (self._ranking.all or not most):
            return self._ranking
        if self._looked is not None:
            changes, looked_at, ranking = self._looked
            if changes == self._changes and looked_at == now and (ranking.all or not most):
                return ranking
        return self._compared(now, everything=most)

    def _compared(self, now: float, *, everything: bool) -> RunRanking:
        self._draws += 1
        draw = None if everything else (self._seed + self._draws) * _GOLDEN % 1.0
        ranking = RunRanking(self._runs, self._worth, now, draw)
        self._looked = self._changes, now, ranking
        return ranking

    def wanted(self, facts: BlockFacts, room: int) -> npt.NDArray[np.bool_]:
        self._settle()
        take = np.ones(len(facts), dtype=np.bool_)
        room = max(0, room)
        need = len(facts) - room
        if need <= 0:
            return take
        self._ranking = ranking = self._ranked(need)
        runs, ghosts, names = self._runs, self._ghosts, facts.names[room:]
        places = ghosts.places(names)
        like = ghosts.tags[places] * ghosts.known(names, places)
        first = self._times.worth
        # How many go, in their order, before one that is worth more than who comes in its place.
        at = gone = 0
        theirs = iter(ranking)
        worth = 0.0
        for _, end, tag in stretches(like):
            run = runs.with_tag(tag)
            mine = first.item(runs.kind.item(run) if run else _UNKNOWN, 0)
            while at < end:
                if gone <= at:
                    following = next(theirs, None)
                    if following is None:
                        return take
                    gone += runs.idle.item(following[0])
                    worth = following[1]
                if mine < worth:
                    take[room + at :] = False
                    return take
                at = min(end, gone)
        return take

    def _choose(self, count: int) -> _Going:
        """Slots that go first, in this order: of each run from its end, and none before its children."""
        runs, links = self._runs, self._links
        left = total = min(count, runs.count)
        slots: list[Places] = []
        parts: Parts = []
        taken: dict[int, int] = {}
        gone: dict[int, int] = {}
        blocked: list[int] = []
        ranking = self._ranked(left) if left else None
        while left > 0 and ranking is not None:
            before = left
            for run, _ in ranking:
                already = taken.get(run, 0)
                part = runs.last_ranked(run, already + left)[already:]
                part = links.free(part, gone) if len(part) else part
                if not len(part):
                    blocked.append(run)
                else:
                    slots.append(part)
                    parts.append((total - left, total - left + len(part), 2 * run + 1))
                    left -= len(part)
                    if left <= 0:
                        break
                    taken[run] = already + len(part)
            if left == before:
                if ranking.all:
                    # What is held has what may go before it in its chain, which then goes.
                    rest = runs.standing & 1 > 0
                    rest[np.concatenate([_NONE, *slots])] = False
                    at = np.concatenate([*slots, np.flatnonzero(rest)[:left]])
                    return _Going(at, stretches(runs.standing[at]))
                ranking = self._compared(self._clock(), everything=True)
        return _Going(slots[0] if len(slots) == 1 else np.concatenate([_NONE, *slots]), parts, gone, blocked)

    def coldest(self, count: int) -> Ids:
        self._settle()
        return self._choose(count).at.astype(np.int32)

    def evict(self, count: int) -> Ids:
        self._settle()
        going = self._choose(count)
        if len(going.at):
            self._let_go(going)
        return going.at.astype(np.int32)

    def demote(self, ids: Ids) -> int:
        self._settle()
        at = ids.astype(np.intp)
        runs = self._runs
        at = at[runs.standing[at] & 1 > 0]
        if len(at):
            self._changes += 1
            self._ranking = None
            at = at[::-1]
            before = stretches(runs.standing[at])
            made = runs.make(runs.use(before[0][2] >> 1)._replace(favour=0.0, until=np.inf))
            runs.put(at, before, [(0, len(at), made)])
            self._demotions += 1
            runs.order[made] = -self._demotions
        return len(at)

    def retain(self, ids: Ids, retention: Retention) -> None:
        self._settle()
        if len(ids) == 0:
            return
        self._changes += 1
        runs, now, weights = self._runs, self._clock(), self._weights
        at = ids.astype(np.intp)
        unplaced = at[runs.standing[at] == 0]
        if len(unplaced):
            self._place(unplaced, ranked=False)
        favour = 2.0 ** (retention.priority / weights["priority"])
        if retention.about_to_finish:
            favour *= weights["finish"]
        until = now + (weights["hint_seconds"] if retention.ttl is None else retention.ttl)
        due = 0.0
        if retention.will_return is not None:
            due = now + retention.will_return
            late = due + max(weights["late"], retention.will_return / 2)
            until = late if retention.ttl is None else min(until, late)
        at = runs.in_order(at)
        before = stretches(runs.standing[at])
        parts = []
        for begin, end, run in _of_runs(before):
            parts.append((begin, end, runs.make(runs.use(run)._replace(favour=favour, until=until, due=due))))
        orders = [
            (made, runs.order.item(run))
            for (_, _, made), (_, _, run) in zip(parts, _of_runs(before), strict=True)
        ]
        runs.put(at, before, parts)
        for made, order in orders:
            runs.order[made] = order

    def check_integrity(self) -> None:
        self._settle()
        self._runs.check_integrity()
        self._links.check_integrity()
