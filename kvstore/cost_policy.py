"""The `cost` policy: what a place is worth, in seconds expected to be saved for each that it is taken.

Runs are ranked (`runs`): stretches of chains that were last used together. Each use is of a kind, by what
could be seen of it (`use_kinds`). What a run is worth follows from how uses of its kind came back
(`return_times`), from its age, from advice, and from what losing a block costs.

Of blocks that are not here it is remembered of which run their last use was (`ghosts`): so a conversation
that was evicted is known when it returns, and that it did is learned. One that was forgotten is told by its
neighbours in the chain.

A newcomer gets a place only if it is worth no less than what would go for it. A run goes from its end,
block by block, and no block before those that follow it, as far as these are known (`victims`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import pairwise
from math import ceil
from typing import ClassVar, Final, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from ..tiers.settings import MOST_SECONDS, expect_integer
from . import use_kinds
from .chain_links import ChainLinks
from .ghosts import Ghosts
from .lineage import ShortHashes
from .policy import MOST_BLOCKS, BlockFacts, Ids, PolicyOptions, Retention, Weight, weights_of
from .probation import Probation
from .return_times import ReturnTimes
from .runs import NO_USE, Parts, Places, Runs, Use, stretches
from .victims import Going, Victims

__all__ = ["CostPolicy"]

_Floats = npt.NDArray[np.float64]

_TRIED: Final = 4
"""Of so many lookups one is looked at whether its last block does as the others do, where it seemed to."""
_MANY: Final = 64
"""New runs that are made together, if they are alike."""
_NONE: Final = np.zeros(0, dtype=np.intp)


class _Found(NamedTuple):
    """What a lookup found, of which is to be told yet whether it was all that it asked for."""

    ids: Ids
    at: Places
    before: Parts
    """The stretches of their standings."""


_NOTHING_FOUND: Final = _Found(np.empty(0, dtype=np.int32), _NONE, [])


def _some_new(before: Parts) -> bool:
    """Whether slots of these stretches of standings are of no run."""
    for _, _, standing in before:  # noqa: SIM110  half of the time of `any`
        if not standing:
            return True
    return False


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

    Its weights:

    - ``prior``: for how many returns of a kind what its group is expected to do stands;
    - ``lindy``: the exponent of Lomax's law, by which blocks come back of whose kind nothing was seen;
    - ``priority``: advice of so much more priority doubles what a block is worth;
    - ``hint_seconds``: how long advice holds that does not say it, where no tier does;
    - ``finish``: times as much is worth what whoever is about to finish uses;
    - ``late``: seconds at least that a block is waited for beyond the time at which advice has it return;
    - ``return_trust``: the share of blocks advised to return that are taken to do so.

    Args:
        capacity: ids are below it, until `resize`.
        options: see `PolicyOptions`.

    Raises:
        ConfigError: `capacity` or a weight is out of range.
    """

    known_weights: ClassVar[Mapping[str, Weight]] = {
        "prior": Weight(8.0, 0.01, 1e6),
        "lindy": Weight(0.1, 1e-3, 10.0),
        "priority": Weight(10.0, 1.0, 1e6),
        "hint_seconds": Weight(600.0, 0.0, MOST_SECONDS),
        "finish": Weight(16.0, 1.0, 1e6),
        "late": Weight(5.0, 0.0, MOST_SECONDS),
        "return_trust": Weight(0.8, 0.0, 1.0),
    }
    learns: ClassVar[bool] = True

    def __init__(self, capacity: int = 0, **options: Unpack[PolicyOptions]) -> None:
        capacity = expect_integer("capacity", capacity, 0, MOST_BLOCKS)
        self._clock = options.get("clock", time.monotonic)
        self._losses = options.get("losses")
        self._weights = weights_of("cost", self.known_weights, options.get("weights"))
        self._runs = Runs(capacity)
        self._times = ReturnTimes(
            use_kinds.groups(), self._weights["prior"], self._weights["lindy"] * use_kinds.expected()
        )
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
        self._probation = Probation()
        self._victims = Victims(
            self._runs, self._links, self._worth, self._clock, self._probation, options.get("seed", 0)
        )

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
        held: Places = slots * ((self._names[slots - 1] == names) & self._links.here(slots - 1))
        return held

    def _is_here(self, slot: int) -> bool:
        return bool(self._links.here(np.array([slot]))[0])

    # Uses

    def found(self, ids: Ids) -> None:
        if self._found is not None:
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
        if known is None or np.count_nonzero(known):
            tags, slots = ghosts.tags[places], ghosts.slots[places]
            if known is not None:
                tags, slots = tags * known, slots * known
            like = runs.tagged(tags)
            beyond = self._slots_of(names, slots)
            stranded = beyond.nonzero()[0]
            if len(stranded):
                # They are here, but something before them in their chain was not.
                beyond = beyond[stranded] - 1
                standing = runs.standing[beyond]
                # In runs, and each once: names that begin alike lead to the same slot.
                mine = np.zeros(len(beyond), dtype=np.bool_)
                mine[np.unique(beyond, return_index=True)[1]] = True
                mine &= (standing > 1) & ~np.isin(beyond, at)
                stranded, beyond, standing = stranded[mine], beyond[mine], standing[mine]
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
                gone = stretches(like[:behind])
                pieces += [(begin + number, end + number, run) for begin, end, run in gone]
                for begin, end, run in gone:
                    went = runs.went.item(run)
                    if went:
                        self._probation.asked(end - begin, runs.count, went)
        parts = self._use(pieces, number + asked)
        for begin, end, run in parts:
            if end > number:
                ghosts.tags[places[max(begin - number, 0) : end - number]] = runs.tag_of[run]
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
        self._victims.changed()
        runs, times = self._runs, self._times
        now, thinned = self._clock(), times.thinned
        new = path - (before[-1][1] if before else 0)
        turns, gap = 0, -1.0
        if before:
            _, known, run = before[-1]
            deepest = runs.use(run)
            if 4 * known >= 3 * deepest.path or known >= deepest.path - 1 > 1:
                turns, gap = deepest.turns + 1, now - deepest.last
        body = use_kinds.body(turns, new, gap)
        alike: list[tuple[int, Use]] = []
        for begin, end, run in before:
            last, kind, _, uses, length, favour, until, _ = runs.use(run)
            if not thinned or times.noted(run):
                times.returned(now, last, kind, (end - begin) / length)
            own = now - last
            kind = body if turns and own >= gap / 4 else use_kinds.shared(own, uses)
            if not (until > now and favour > 0.0):
                favour, until = 1.0, 0.0
            if not alike or alike[-1][1].kind != kind or alike[-1][1].until != until:
                alike.append((begin, Use(now, kind, turns, uses + 1, path, favour, until, 0.0)))
        if new and (not alike or alike[-1][1].kind != body or alike[-1][1].until):
            alike.append((path - new, Use(now, body, turns, 1, path)))
        self._lookups += 1
        end_kind = use_kinds.end(turns)
        if path > 1 and (self._lookups % _TRIED == 0 or times.apart(end_kind, body)):
            # The last block by itself: it may be but a part of one, which is another one the next time.
            begin, use = alike[-1]
            if begin == path - 1:
                alike.pop()
            alike.append((path - 1, Use(now, end_kind, *use[2:])))
        alike.append((path, NO_USE))
        parts = []
        for (begin, use), (end, _) in pairwise(alike):
            run = runs.make(use)
            parts.append((begin, end, run))
            if not thinned or times.noted(run):
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
            if runs.held_of[old]:
                for _, _, run in mine:
                    runs.rider_of[run] = runs.tag_of[old]
            elif len(mine) > 1:
                for (_, _, run), (_, _, following) in pairwise(mine):
                    runs.rider_of[run] = runs.tag_of[following]
        if len(mine) < len(parts):
            taken = {run for _, _, run in mine}
            for _, _, run in parts:
                if run not in taken:
                    runs.release(run)

    def admit(self, ids: Ids, facts: BlockFacts) -> None:
        if len(ids) == 0:
            return
        self._settle()
        self._victims.changed()
        at = ids.astype(np.intp)
        if self._links.any_here(at):
            self.forget(ids)
        ghosts, names = self._ghosts, facts.names
        places = ghosts.places(names)
        known = ghosts.known(names, places)
        like = ghosts.tags[places]
        if known is not None:
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
        if follow is None:
            cuts = [*(begin for begin, _, _ in stretches(like)), len(at)]
        else:
            breaks = ((like[1:] != like[:-1]) | ~follow).nonzero()[0] + 1
            cuts = [0, *breaks.tolist(), len(at)]
        if ranked and len(cuts) > _MANY and not np.count_nonzero(like):
            # As where a tier takes up this policy.
            runs.add(at, np.array(cuts), Use(self._clock(), use_kinds.UNKNOWN))
            return
        parts = []
        for begin, end in pairwise(cuts):
            of = runs.with_tag(like.item(begin))
            made = runs.make(runs.use(of) if of else Use(self._clock(), use_kinds.UNKNOWN))
            parts.append((begin, end, made))
        runs.put(at, [], parts, ranked=ranked)
        for begin, _, made in parts:
            before = links.before(at.item(begin))
            if before is not None:
                runs.rider_of[runs.standing.item(before) >> 1] = runs.tag_of[made]

    # Ranking

    def insert(self, ids: Ids) -> None:
        if len(ids) == 0:
            return
        if self._found is not None:
            self._settle()
        self._victims.changed()
        at = ids.astype(np.intp)
        runs = self._runs
        standing = runs.standing[at]
        before = stretches(standing)
        if _some_new(before):
            if len(before) == 1:
                self._place(at[::-1], ranked=True)
                return
            self._place(at[standing == 0][::-1], ranked=True)
            at, standing = at[standing > 0], standing[standing > 0]
            before = stretches(standing)
        if self._demotions:
            # What was demoted, and used since, is as good as others.
            for _, _, one in before:
                if runs.favour_of[one >> 1] == 0.0:
                    runs.advise(one >> 1, 1.0, 0.0)
        runs.rank(at, standing, before)

    def remove(self, ids: Ids) -> None:
        if len(ids):
            self._victims.changed()
            if self._found is not None and self._found.ids is ids:
                self._settle(hold=True)
                return
            self._settle()
            self._runs.hold(ids.astype(np.intp))

    def forget(self, ids: Ids, *, chosen: bool = False) -> None:
        if len(ids) == 0:
            return
        self._settle()
        if not chosen:
            self._victims.changed()
        at = ids.astype(np.intp)
        self._let_go(Going(at, stretches(self._runs.standing[at])), chosen=chosen)

    def _let_go(self, going: Going, *, chosen: bool) -> None:
        """These are here no more.

        Args:
            chosen: to make room, and not because they are purged, or were never written.
        """
        self._victims.gone(going)
        runs, ghosts = self._runs, self._ghosts
        names = self._names[going.slots]
        places = ghosts.places_once(names)
        ghosts.names[places] = names
        for begin, end, standing in going.before:
            run = standing >> 1
            ghosts.tags[places[begin:end]] = runs.tag_of[run]
            if chosen and standing & 1:
                runs.gone += end - begin
                early, proven = runs.early.item(run) > 0, not runs.newcomer.item(run)
                runs.went[run] = self._probation.went(end - begin, runs.count, early=early, proven=proven)
        runs.take_out(going.slots, going.before, ends=going.parents is not None)
        self._links.leave(going.slots, going.parents)

    def _worth(self, runs: Places) -> tuple[_Floats, _Floats]:
        """What places are worth that blocks of these runs have, and what if all blocks were alike to lose."""
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
        if self._losses is None:
            return worth, worth
        return worth * self._losses(table.ends(runs).astype(np.int32)), worth

    def wanted(self, facts: BlockFacts, room: int) -> npt.NDArray[np.bool_]:
        self._settle()
        take = np.empty(len(facts), dtype=np.bool_)
        take.fill(True)
        room = max(0, room)
        need = len(facts) - room
        if need <= 0:
            return take
        ranking = self._victims.ranking(need)
        self._victims.stay_with(ranking)
        runs, ghosts, names = self._runs, self._ghosts, facts.names[room:]
        places = ghosts.places(names)
        like = ghosts.tags[places]
        if (known := ghosts.known(names, places)) is not None:
            like *= known
        first = self._times.worth
        most = ceil(self._probation.share * runs.count) - room if ranking.newcomers_first else len(names)
        # How many go, in their order, before one that is worth more than who comes in its place.
        at = gone = 0
        theirs = iter(ranking)
        worth, proven = 0.0, False
        for _, end, tag in stretches(like):
            run = runs.with_tag(tag)
            mine = first.item(runs.kind_of[run] if run else use_kinds.UNKNOWN, 0)
            newcomer = not run or runs.newcomer.item(run)
            while at < end:
                if gone <= at:
                    following = next(theirs, None)
                    if following is None:
                        return take
                    gone += runs.idle_of[following[0]]
                    proven, worth = not runs.newcomer.item(following[0]), following[1]
                # Beyond their share newcomers take no place of what came back.
                stop = most if newcomer and proven and worth > 0.0 else end
                if mine < worth or at >= stop:
                    take[room + at :] = False
                    if mine >= worth and run and not runs.went.item(run):
                        # Who is tried again was told of before.
                        runs.went[run] = self._probation.went(end - at, runs.count, early=True, proven=False)
                    return take
                at = min(end, gone, stop)
        return take

    def coldest(self, count: int) -> Ids:
        self._settle()
        return self._victims.choose(count).slots.astype(np.int32)

    def evict(self, count: int) -> Ids:
        self._settle()
        going = self._victims.choose(count)
        if len(going.slots):
            self._let_go(going, chosen=True)
        return going.slots.astype(np.int32)

    def demote(self, ids: Ids) -> int:
        self._settle()
        at = ids.astype(np.intp)
        runs = self._runs
        at = at[runs.standing[at] & 1 > 0]
        if len(at):
            self._victims.told()
            at = at[::-1]
            before = stretches(runs.standing[at])
            made = runs.make(runs.use(before[0][2] >> 1)._replace(favour=0.0, until=np.inf))
            runs.put(at, before, [(0, len(at), made)])
            self._demotions += 1
            runs.tell_to_go(made, self._demotions)
        return len(at)

    def retain(self, ids: Ids, retention: Retention) -> None:
        self._settle()
        if len(ids) == 0:
            return
        self._victims.told()
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
            (made, runs.order_of[run])
            for (_, _, made), (_, _, run) in zip(parts, _of_runs(before), strict=True)
        ]
        runs.put(at, before, parts)
        for made, order in orders:
            runs.order_of[made] = order

    def check_integrity(self) -> None:
        self._settle()
        self._runs.check_integrity()
        self._links.check_integrity()
