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
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Final, Unpack

import numpy as np
import numpy.typing as npt

from ..tiers.errors import IntegrityError
from ..tiers.settings import expect_integer
from .lineage import ShortHashes
from .policy import MOST_BLOCKS, BlockFacts, Ids, PolicyOptions, Retention
from .return_times import ReturnTimes
from .runs import Places, Runs, Use, stretches

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

_LOOKED_AT: Final = 1024
"""Runs that are compared at a time; of more, as many are drawn."""
_FEWEST_GHOSTS: Final = 1 << 16
_TRIED: Final = 4
"""Of so many lookups one is looked at whether its last block does as the others do, where it seemed to."""
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)
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
        self._names = np.zeros(capacity, dtype=np.uint64)
        self._up = np.zeros(capacity, dtype=np.intp)
        """Of each slot the slot of the block before it in its chain, plus one; 0: not known."""
        self._children = np.zeros(capacity, dtype=np.int32)
        """Of each slot how many slots hold blocks that follow it."""
        self._born = np.zeros(capacity, dtype=np.bool_)
        """Of each slot whether a block was admitted to it."""
        self._like = np.zeros(capacity, dtype=np.int64)
        """Of each slot that was not ranked yet the tag of the run whose use it is of; 0: not known."""
        self._make_ghosts(capacity)
        self._found: tuple[Places, Places] | None = None
        self._latest = 0
        """The slot that the last lookup found at the end of its chain."""
        self._demotions = 0
        self._draws = 0
        self._lookups = 0
        self._changes = 0
        self._ranking: tuple[int, int, Places, _Floats] | None = None

    def __len__(self) -> int:
        return self._runs.count

    def resize(self, capacity: int) -> None:
        more = capacity - len(self._names)
        if more <= 0:
            return
        self._runs.resize(capacity)
        for name in ("_names", "_up", "_children", "_born", "_like"):
            field = getattr(self, name)
            setattr(self, name, np.concatenate([field, np.zeros(more, dtype=field.dtype)]))
        if 4 * capacity > len(self._ghosts):
            ghosts = np.flatnonzero(self._ghosts)
            names, tags, slots = self._ghosts[ghosts], self._ghost_tags[ghosts], self._ghost_slots[ghosts]
            self._make_ghosts(capacity)
            at = self._ghost_places(names)
            self._ghosts[at], self._ghost_tags[at], self._ghost_slots[at] = names, tags, slots

    # What is known by name

    def _make_ghosts(self, capacity: int) -> None:
        size = max(_FEWEST_GHOSTS, 1 << (4 * capacity - 1).bit_length() if capacity else 0)
        self._ghosts = np.zeros(size, dtype=np.uint64)
        self._ghost_tags = np.zeros(size, dtype=np.int64)
        self._ghost_slots = np.zeros(size, dtype=np.intp)
        self._ghost_shift = np.uint64(64 - (size.bit_length() - 1))

    def _ghost_places(self, names: ShortHashes) -> Places:
        return ((names * _MULTIPLIER) >> self._ghost_shift).view(np.intp)

    def _remember(self, names: ShortHashes, tags: npt.NDArray[np.int64]) -> None:
        """The last use of these blocks, which are not here, was of the runs with these tags."""
        at = self._ghost_places(names)
        self._ghosts[at] = names
        self._ghost_tags[at] = tags

    def _recall(self, names: ShortHashes, at: Places) -> Places:
        """The runs of which the last use of these blocks was; 0: not known."""
        runs = self._runs.tagged(self._ghost_tags[at])
        runs *= self._ghosts[at] == names
        return runs

    def _slots(self, names: ShortHashes, at: Places) -> Places:
        """The slots that hold these blocks, plus one; 0: none, or not known."""
        slots = self._ghost_slots[at]
        slots *= (self._names[slots - 1] == names) & self._born[slots - 1]
        return slots

    # Uses

    def found(self, ids: Ids) -> None:
        self._settle()
        if len(ids):
            at = ids.astype(np.intp)
            self._latest = int(at[-1])
            here = self._runs.of[at]
            if not here.all():
                self._place(at[here == 0])
                here = self._runs.of[at]
            self._found = at, here

    def missed(self, facts: BlockFacts) -> None:
        if len(facts) == 0:
            return
        if self._found is not None and facts.parents[0] not in (0, self._names[self._latest]):
            self._settle()
        found, self._found = self._found, None
        runs = self._runs
        ghosts = self._ghost_places(facts.names)
        asked = self._recall(facts.names, ghosts)
        at, here = (_NONE, _NONE) if found is None else found
        number = len(here)
        beyond = self._slots(facts.names, ghosts)
        stranded = np.flatnonzero(beyond)
        stranded = stranded[runs.of[beyond[stranded] - 1] > 0]
        if len(stranded):
            # They are here, but something before them in their chain was not.
            beyond = beyond[stranded] - 1
            asked[stranded] = runs.of[beyond]
            at = np.concatenate([at, beyond])
        there = np.flatnonzero(asked)
        known = 0
        if len(there):
            # A ghost that another one displaced is told by those behind it in the chain.
            known = int(there[-1]) + 1
            if len(there) < known:
                asked[:known] = asked[there[np.searchsorted(there, np.arange(known))]]
            here = np.concatenate([here, asked[:known]])
        parts = self._use(here, len(asked) - known)
        tags = np.empty(len(asked), dtype=np.int64)
        for begin, end, run in parts:
            if end > number:
                tags[max(begin - number, 0) : end - number] = runs.tag[run]
        self._ghosts[ghosts], self._ghost_tags[ghosts] = facts.names, tags
        positions = None
        if len(stranded):
            positions = np.concatenate([np.arange(number), stranded + number])
        self._restamp(at, positions, parts)

    def _settle(self) -> None:
        """What was found was all that was asked for."""
        if self._found is not None:
            (at, here), self._found = self._found, None
            self._restamp(at, None, self._use(here, 0))

    def _use(self, before: Places, new: int) -> list[tuple[int, int, int]]:
        """A lookup asked for a chain.

        Args:
            before: of each of its leading blocks that were used before the run of which that was.
            new: how many blocks follow them.

        Returns:
            where in the chain each stretch of what is alike begins and ends, and a new run for it.
        """
        self._changes += 1
        runs, times = self._runs, self._times
        now = self._clock()
        path = len(before) + new
        pieces = [(begin, end, run, runs.use(run)) for begin, end, run in stretches(before)]
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
            alike.append((len(before), Use(now, body, turns, 1, path)))
        self._lookups += 1
        end_kind = _FIRST_END + (turns > 0)
        if path > 1 and (self._lookups % _TRIED == 0 or times.apart(end_kind, body)):
            # The last block by itself: it may be but a part of one, which is another one the next time.
            begin, use = alike[-1]
            if begin == path - 1:
                alike.pop()
            alike.append((path - 1, replace(use, kind=end_kind)))
        parts = []
        for (begin, use), end in zip(alike, [*(begin for begin, _ in alike[1:]), path], strict=True):
            run = runs.make(use)
            parts.append((begin, end, run))
            if times.noted(run):
                times.used(now, use.kind, (end - begin) / path)
        return parts

    def _restamp(self, at: Places, positions: Places | None, parts: list[tuple[int, int, int]]) -> None:
        """These slots are of the runs of their latest use; those runs that get none are ghosts'.

        Args:
            positions: which of the chain's blocks the slots hold; None: the leading ones.
            parts: as of `_use`.
        """
        runs = self._runs
        number = len(at)
        rest = parts
        if number:
            old = int(runs.of[at[-1]])
            if positions is None:
                mine = [(begin, min(end, number), run) for begin, end, run in parts if begin < number]
            else:
                bounds = np.searchsorted(
                    positions, [*(begin for begin, _, _ in parts), len(positions) and parts[-1][1]]
                )
                mine = [
                    (begin, end, run)
                    for begin, end, (_, _, run) in zip(
                        bounds[:-1].tolist(), bounds[1:].tolist(), parts, strict=True
                    )
                    if begin < end
                ]
            runs.put(at, mine)
            if runs.held[old]:
                # What is left of it follows these in its chain, and must not be worth more than they.
                for _, _, run in mine:
                    runs.rider[run] = runs.tag[old]
            taken = {run for _, _, run in mine}
            rest = [part for part in parts if part[2] not in taken]
        for _, _, run in rest:
            runs.release(run)

    def admit(self, ids: Ids, facts: BlockFacts) -> None:
        if len(ids) == 0:
            return
        self._settle()
        self._changes += 1
        at = ids.astype(np.intp)
        if self._born[at].any():
            self.forget(ids)
        names, parents = facts.names, facts.parents
        ghosts = self._ghost_places(names)
        like = self._recall(names, ghosts)
        like = self._runs.tag[like]
        self._like[at] = like
        self._names[at] = names
        self._ghosts[ghosts], self._ghost_slots[ghosts], self._ghost_tags[ghosts] = names, at + 1, like
        self._born[at] = True
        up = np.zeros(len(at), dtype=np.intp)
        follows = parents[1:] == names[:-1]
        up[1:] = (at[:-1] + 1) * follows
        others = np.flatnonzero((up == 0) & (parents != 0))
        if len(others):
            asked = parents[others]
            up[others] = self._slots(asked, self._ghost_places(asked))
            if self._names[self._latest] == asked[0] and self._born[self._latest]:
                up[others[0]] = self._latest + 1
        self._up[at] = up
        up = up[up > 0] - 1
        np.add.at(self._children, up, 1)

    def _place(self, at: Places) -> None:
        """Runs of slots in the order of their chains that have none yet."""
        runs = self._runs
        like = runs.tagged(self._like[at])
        breaks = np.flatnonzero((like[1:] != like[:-1]) | (self._up[at[1:]] != at[:-1] + 1)) + 1
        cuts = [0, *breaks.tolist()]
        unknown = Use(self._clock(), _UNKNOWN)
        parts = []
        for begin, end, run in zip(cuts, [*cuts[1:], len(at)], like[cuts].tolist(), strict=True):
            made = runs.make(runs.use(run) if run else unknown)
            parts.append((begin, end, made))
            before = int(self._up[at[begin]])
            if before:
                runs.rider[runs.of[before - 1]] = runs.tag[made]
        runs.put(at, parts)

    # Ranking

    def insert(self, ids: Ids) -> None:
        if len(ids) == 0:
            return
        self._settle()
        self._changes += 1
        at = ids.astype(np.intp)
        runs = self._runs
        here = runs.of[at]
        if not here.all():
            self._place(at[here == 0][::-1])
            here = runs.of[at]
        if self._demotions:
            # What was demoted, and used since, is as good as others.
            demoted = here[runs.favour[here] == 0.0]
            runs.favour[demoted], runs.until[demoted] = 1.0, 0.0
        runs.rank(at)

    def remove(self, ids: Ids) -> None:
        if len(ids):
            self._settle()
            self._changes += 1
            self._runs.hold(ids.astype(np.intp))

    def forget(self, ids: Ids) -> None:
        if len(ids) == 0:
            return
        self._settle()
        self._changes += 1
        at = ids.astype(np.intp)
        self._remember(self._names[at], self._runs.tag[self._runs.of[at]])
        self._runs.take_out(at)
        up = self._up[at]
        # A parent that went before these has no children to count, nor has who came in its place.
        known = up > 0
        up = up[known] - 1
        np.subtract.at(self._children, up, 1)
        self._up[at] = 0
        self._born[at] = 0
        orphans = at[self._children[at] > 0]
        if len(orphans):
            self._up[np.flatnonzero(np.isin(self._up, orphans + 1))] = 0
            self._children[orphans] = 0

    def _worth(self, runs: Places, now: float) -> _Floats:
        table = self._runs
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

    def _ranked(self, count: int) -> tuple[Places, _Floats]:
        """Runs that go first, the first one first, with `count` ranked slots if there are so many."""
        kept = self._ranking
        if kept is not None and kept[0] == self._changes and kept[1] >= count:
            return kept[2], kept[3]
        table, now = self._runs, self._clock()
        runs = table.candidates
        if len(runs) > _LOOKED_AT and count * 8 <= self._runs.count:
            drawn = np.random.default_rng((self._seed, self._draws)).integers(len(runs), size=_LOOKED_AT)
            runs = runs[np.unique(drawn)]
        worth = self._worth(runs, now)
        order = np.lexsort((table.order[runs], worth))
        runs, worth = runs[order], worth[order]
        self._ranking = (self._changes, count, runs, worth)
        return runs, worth

    def wanted(self, facts: BlockFacts, room: int) -> npt.NDArray[np.bool_]:
        self._settle()
        take = np.ones(len(facts), dtype=np.bool_)
        need = len(facts) - room
        if need <= 0:
            return take
        runs, worth = self._ranked(need)
        names = facts.names[max(0, room) :]
        like = self._recall(names, self._ghost_places(names))
        kinds = self._runs.kind[like]
        kinds[like == 0] = _UNKNOWN
        mine = self._times.worth[kinds, 0]
        theirs = np.repeat(worth, self._runs.idle[runs])[:need]
        less = np.flatnonzero(mine[: len(theirs)] < theirs)
        stop = int(less[0]) if len(less) else len(theirs)
        take[max(0, room) + stop :] = False
        return take

    def _choose(self, count: int) -> Places:
        """Slots that go first, in this order: of each run from its end, and none before its children."""
        left = min(count, self._runs.count)
        chosen = _NONE
        everything = again = False
        while left > 0:
            before = left
            runs, _ = self._ranked(self._runs.count if everything else left)
            for run in runs.tolist():
                part = self._runs.last_ranked(run, left)
                if again:
                    part = part[~np.isin(part, chosen)]
                part = self._without_children(part, chosen)
                if len(part):
                    chosen = np.concatenate([chosen, part])
                    left -= len(part)
                    if left <= 0:
                        break
            if left == before:
                if everything:
                    # What is held has what may go before it in its chain, which then goes.
                    rest = self._runs.ranked.copy()
                    rest[chosen] = False
                    return np.concatenate([chosen, np.flatnonzero(rest)[:left]])
                everything = True
            again = True
        return chosen

    def _without_children(self, part: Places, chosen: Places) -> Places:
        """The leading slots of these that have no children but those before them and these."""
        if len(part) == 0:
            return part
        children = self._children[part]
        children[1:] -= self._up[part[:-1]] == part[1:] + 1
        for at in np.flatnonzero(children).tolist():
            gone = np.count_nonzero(self._up[chosen] == part[at] + 1) if len(chosen) else 0
            if children[at] > gone:
                return part[:at]
        return part

    def coldest(self, count: int) -> Ids:
        self._settle()
        return self._choose(count).astype(np.int32)

    def evict(self, count: int) -> Ids:
        ids = self.coldest(count)
        self.forget(ids)
        self._draws += 1
        return ids

    def demote(self, ids: Ids) -> int:
        self._settle()
        at = ids.astype(np.intp)
        at = at[self._runs.ranked[at]]
        if len(at):
            self._changes += 1
            runs = self._runs
            made = runs.make(replace(runs.use(int(runs.of[at[-1]])), favour=0.0, until=np.inf))
            runs.put(at[::-1], [(0, len(at), made)])
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
        unplaced = at[runs.of[at] == 0]
        if len(unplaced):
            self._place(unplaced)
        favour = 2.0 ** (retention.priority / weights["priority"])
        if retention.about_to_finish:
            favour *= weights["finish"]
        until = now + (weights["hint_seconds"] if retention.ttl is None else retention.ttl)
        due = 0.0
        if retention.will_return is not None:
            due = now + retention.will_return
            late = due + max(weights["late"], retention.will_return / 2)
            until = late if retention.ttl is None else min(until, late)
        at = at[np.argsort(runs.place[at])]
        parts = []
        for begin, end, run in stretches(runs.of[at]):
            made = runs.make(replace(runs.use(run), favour=favour, until=until, due=due))
            runs.order[made] = runs.order[run]
            parts.append((begin, end, made))
        runs.put(at, parts)

    def check_integrity(self) -> None:
        self._settle()
        self._runs.check_integrity()
        up = self._up[self._up > 0] - 1
        if not np.array_equal(np.bincount(up, minlength=len(self._up)), self._children):
            raise IntegrityError("cost: a slot does not have as many children as it counts")
        if not (self._born[self._up > 0].all() and self._born[up].all()):
            raise IntegrityError("cost: a block that is not here has a parent or children")
