"""The `cost` policy."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Unpack

import numpy as np
import numpy.typing as npt

from ..tiers.errors import IntegrityError
from ..tiers.settings import expect_integer
from .policy import MOST_BLOCKS, BlockFacts, Ids, PolicyOptions, Retention
from .return_times import ReturnTimes
from .runs import Places, Runs, cuts_of

__all__ = ["CostPolicy"]

_Floats = npt.NDArray[np.float64]

_TURNS: Final = np.array([1, 2, 3, 5])
_GAPS: Final = np.array([0.0, 16.0, 64.0, 256.0])
_NEW: Final = np.array([2, 4, 16])
_OWN_GAPS: Final = np.array([1.0, 4.0, 16.0, 64.0, 256.0])
_USES: Final = np.array([3, 9, 33])
_SHAPE: Final = (len(_TURNS) + 1, len(_NEW) + 1, len(_GAPS) + 1)
_BODIES: Final = _SHAPE[0] * _SHAPE[1] * _SHAPE[2]
_ENDS: Final = 2
_SHARED_SHAPE: Final = (len(_OWN_GAPS) + 1, len(_USES) + 1)
_SHARED: Final = _SHARED_SHAPE[0] * _SHARED_SHAPE[1]
_FIRST_END: Final = _BODIES
_FIRST_SHARED: Final = _BODIES + _ENDS
_KINDS: Final = _BODIES + _ENDS + _SHARED

_LOOKED_AT: Final = 1024
"""Runs that are compared at a time; of more, as many are drawn."""
_FEWEST_GHOSTS: Final = 1 << 16
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


@dataclass(frozen=True, eq=False)
class _Found:
    """What a lookup found, of which it is not known yet what it asked for besides."""

    at: Places
    cuts: Places


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
        "late": 30.0,
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
        self._times = ReturnTimes(_groups(), self._weights["prior"], self._weights["lindy"])
        self._names = np.zeros(capacity, dtype=np.uint64)
        self._up = np.zeros(capacity, dtype=np.intp)
        """Of each slot the slot of the block before it in its chain, plus one; 0: not known."""
        self._children = np.zeros(capacity, dtype=np.int32)
        """Of each slot how many slots hold blocks that follow it."""
        self._born = np.zeros(capacity, dtype=np.int64)
        """Of each slot which call of `admit` told of its block; 0: none."""
        self._up_born = np.zeros(capacity, dtype=np.int64)
        """Of each slot what `_born` was of the one that `_up` tells of."""
        self._births = 0
        self._like = np.zeros(capacity, dtype=np.intp)
        """Of each slot that was not ranked yet the run whose use it is of."""
        self._like_serial = np.zeros(capacity, dtype=np.int64)
        self._make_ghosts(capacity)
        self._found: _Found | None = None
        self._latest = 0
        """The slot that the last lookup found at the end of its chain."""
        self._demotions = 0
        self._draws = 0
        self._changes = 0
        self._ranking: tuple[int, int, Places, _Floats] | None = None

    def __len__(self) -> int:
        return self._runs.count

    def resize(self, capacity: int) -> None:
        more = capacity - len(self._names)
        if more <= 0:
            return
        self._runs.resize(capacity)
        for name in ("_names", "_up", "_children", "_born", "_up_born", "_like", "_like_serial"):
            field = getattr(self, name)
            setattr(self, name, np.concatenate([field, np.zeros(more, dtype=field.dtype)]))
        if 4 * capacity > len(self._ghosts):
            ghosts = np.flatnonzero(self._ghosts)
            names, runs, serials = self._ghosts[ghosts], self._ghost_runs[ghosts], self._ghost_serials[ghosts]
            slots = self._ghost_slots[ghosts]
            self._make_ghosts(capacity)
            at = self._ghost_places(names)
            self._ghosts[at], self._ghost_runs[at], self._ghost_serials[at] = names, runs, serials
            self._ghost_slots[at] = slots

    # What is not here

    def _make_ghosts(self, capacity: int) -> None:
        size = max(_FEWEST_GHOSTS, 1 << (4 * capacity - 1).bit_length() if capacity else 0)
        self._ghosts = np.zeros(size, dtype=np.uint64)
        self._ghost_runs = np.zeros(size, dtype=np.int32)
        self._ghost_serials = np.zeros(size, dtype=np.int64)
        self._ghost_slots = np.zeros(size, dtype=np.int32)
        self._ghost_shift = np.uint64(64 - (size.bit_length() - 1))

    def _ghost_places(self, names: npt.NDArray[np.uint64]) -> Places:
        return ((names * _MULTIPLIER) >> self._ghost_shift).astype(np.intp)

    def _remember(self, names: npt.NDArray[np.uint64], runs: Places | int) -> None:
        """The last use of these blocks was of these runs."""
        at = self._ghost_places(names)
        self._ghosts[at] = names
        self._ghost_runs[at] = runs
        self._ghost_serials[at] = self._runs.serial[runs]
        self._ghost_slots[at] = 0

    def _recall(self, names: npt.NDArray[np.uint64]) -> Places:
        """The runs of which the last use of these blocks was; 0: not known."""
        at = self._ghost_places(names)
        runs = self._ghost_runs[at].astype(np.intp)
        known = (self._ghosts[at] == names) & (self._runs.serial[runs] == self._ghost_serials[at])
        runs[~known] = 0
        return runs

    def _slots(self, names: npt.NDArray[np.uint64]) -> Places:
        """The slots that hold these blocks, plus one; 0: none, or not known."""
        at = self._ghost_places(names)
        slots = self._ghost_slots[at].astype(np.intp)
        slots[(self._ghosts[at] != names) | (self._names[slots - 1] != names)] = 0
        return slots

    # Uses

    def found(self, ids: Ids) -> None:
        self._settle(None)
        if len(ids):
            at = ids.astype(np.intp)
            self._latest = int(at[-1])
            unplaced = self._runs.of[at] == 0
            if unplaced.any():
                self._place(at[unplaced])
            self._found = _Found(at, cuts_of(self._runs.of[at]))

    def missed(self, facts: BlockFacts) -> None:
        if len(facts) == 0:
            return
        found = self._found
        if found is not None and facts.parents[0] not in (0, self._names[found.at[-1]]):
            self._settle(None)
        self._settle(facts)

    def _settle(self, missed: BlockFacts | None) -> None:
        """What was found, and what was asked for besides, are used by one lookup."""
        found, self._found = self._found, None
        if found is None and missed is None:
            return
        self._changes += 1
        runs, times = self._runs, self._times
        now = self._clock()
        at = _NONE if found is None else found.at
        here = runs.of[at]
        if missed is None:
            before = here
            new = 0
        else:
            asked = self._recall(missed.names)
            beyond = self._slots(missed.names)
            stranded = np.flatnonzero(runs.of[beyond - 1] * (beyond > 0))
            if len(stranded):
                beyond = beyond[stranded] - 1
                asked[stranded] = runs.of[beyond]
                at = np.concatenate([at, beyond])
            # A ghost that another one displaced is told by those behind it in the chain.
            there = np.flatnonzero(asked)
            known = int(there[-1]) + 1 if len(there) else 0
            asked[:known] = asked[there[np.searchsorted(there, np.arange(known))]]
            before = np.concatenate([here, asked[:known]])
            new = len(asked) - known
        path = len(before) + new
        cuts = cuts_of(before)
        pieces = before[cuts]
        lengths = np.diff(cuts, append=len(before))
        last = runs.last[pieces]
        turns, gap = 0, -1.0
        if len(pieces):
            noted = np.array([times.noted(serial) for serial in runs.serial[pieces].tolist()])
            shares = lengths / np.maximum(runs.path[pieces], 1)
            times.returned(now, last[noted], runs.kind[pieces[noted]], shares[noted])
            deepest = int(pieces[-1])
            reach = int(runs.path[deepest])
            if 4 * len(before) >= 3 * reach or (reach > 2 and len(before) >= reach - 1):
                turns, gap = int(runs.turns[deepest]) + 1, now - float(last[-1])
        body = int(
            np.ravel_multi_index(
                (
                    np.searchsorted(_TURNS, turns, side="right"),
                    np.searchsorted(_NEW, new, side="right"),
                    0 if gap < 0 else np.searchsorted(_GAPS, gap, side="right"),
                ),
                _SHAPE,
            )
        )
        kinds = np.full(len(pieces) + 2, body)
        uses = np.ones(len(pieces) + 2, dtype=np.int64)
        if len(pieces):
            own = now - last
            uses[:-2] = runs.uses[pieces] + 1
            shared = own < gap / 4 if turns else np.ones(len(pieces), dtype=np.bool_)
            kind = _FIRST_SHARED + (
                np.searchsorted(_OWN_GAPS, own, side="right") * _SHARED_SHAPE[1]
                + np.searchsorted(_USES, uses[:-2] - 1, side="right")
            )
            kinds[:-2][shared] = kind[shared]
        kinds[-1] = _FIRST_END + (turns > 0)
        # Where each stretch of one kind begins: pieces, then what is new, then the last block by itself.
        begins = np.concatenate([cuts, [len(before), path - 1]])
        if path == 1:
            kinds[-1] = kinds[0] if len(pieces) else body
        if new == 1:
            keep = np.ones(len(begins), dtype=np.bool_)
            keep[-2] = False
        elif new == 0:
            keep = np.ones(len(begins), dtype=np.bool_)
            keep[-2] = False
            if len(pieces) and cuts[-1] == path - 1:
                keep[-3] = False
        else:
            keep = np.ones(len(begins), dtype=np.bool_)
        begins, kinds, uses = begins[keep], kinds[keep], uses[keep]
        template = np.zeros(len(begins), dtype=np.intp)
        inside = begins < len(before)
        template[inside] = before[begins[inside]]
        favour, until = runs.favour[template], runs.until[template]
        over = (until <= now) | (favour == 0.0)
        favour[over], until[over] = 1.0, 0.0
        same = np.flatnonzero((kinds[1:] == kinds[:-1]) & (until[1:] == until[:-1])) + 1
        if len(same):
            keep = np.ones(len(begins), dtype=np.bool_)
            keep[same] = False
            begins, kinds, uses = begins[keep], kinds[keep], uses[keep]
            favour, until, template = favour[keep], until[keep], template[keep]
        made = runs.make(np.zeros(len(begins), dtype=np.intp))
        runs.last[made], runs.kind[made], runs.turns[made] = now, kinds, turns
        runs.uses[made], runs.path[made] = uses, path
        runs.favour[made], runs.until[made] = favour, until
        noted = np.array([times.noted(serial) for serial in runs.serial[made].tolist()])
        times.used(now, kinds[noted], (np.diff(begins, append=path) / path)[noted])
        count = len(here)
        which = np.searchsorted(begins, np.arange(path), side="right") - 1
        if missed is not None:
            self._remember(missed.names, made[which[count:]])
        if len(at):
            there = which[:count]
            if len(at) > count:
                there = np.concatenate([there, which[count + stranded]])
                self._ghost_slots[self._ghost_places(self._names[at[count:]])] = at[count:] + 1
            cuts = cuts_of(there)
            old = int(runs.of[at[-1]])
            runs.put(at, cuts, made[there[cuts]])
            if runs.held[old] > 0:
                end = made[there[-1]]
                runs.rider[end], runs.rider_serial[end] = old, runs.serial[old]
        runs.release(made[runs.held[made] == 0])

    def admit(self, ids: Ids, facts: BlockFacts) -> None:
        if len(ids) == 0:
            return
        if self._found is not None:
            self._settle(None)
        self._changes += 1
        at = ids.astype(np.intp)
        if self._names[at].any():
            self.forget(ids)
        names = facts.names
        self._names[at] = names
        like = self._recall(names)
        self._like[at] = like
        self._like_serial[at] = self._runs.serial[like]
        ghosts = self._ghost_places(names)
        self._ghosts[ghosts], self._ghost_slots[ghosts] = names, at + 1
        self._ghost_runs[ghosts], self._ghost_serials[ghosts] = like, self._like_serial[at]
        self._births += 1
        self._born[at] = self._births
        up = np.zeros(len(at), dtype=np.intp)
        follows = facts.parents[1:] == names[:-1]
        up[1:][follows] = at[:-1][follows] + 1
        others = np.flatnonzero((up == 0) & (facts.parents != 0))
        if len(others):
            up[others] = self._slots(facts.parents[others])
            if self._names[self._latest] == facts.parents[others[0]]:
                up[others[0]] = self._latest + 1
        self._up[at] = up
        self._up_born[at] = self._born[up - 1] * (up > 0)
        np.add.at(self._children, up[up > 0] - 1, 1)

    def _place(self, at: Places) -> None:
        """Runs of slots in the order of their chains that have none yet."""
        runs = self._runs
        like = self._like[at]
        like[runs.serial[like] != self._like_serial[at]] = 0
        breaks = np.flatnonzero((like[1:] != like[:-1]) | (self._up[at[1:]] != at[:-1] + 1)) + 1
        cuts = np.concatenate([[0], breaks])
        made = runs.make(like[cuts])
        new = made[like[cuts] == 0]
        if len(new):
            runs.last[new] = self._clock()
            runs.path[new] = 1
            runs.kind[new] = 3 * _SHAPE[2]
        runs.put(at, cuts, made)

    # Ranking

    def insert(self, ids: Ids) -> None:
        if len(ids) == 0:
            return
        if self._found is not None:
            self._settle(None)
        self._changes += 1
        at = ids.astype(np.intp)
        unplaced = at[self._runs.of[at] == 0]
        if len(unplaced):
            self._place(unplaced[::-1])
        demoted = self._runs.of[at]
        demoted = demoted[self._runs.until[demoted] == np.inf]
        if len(demoted):
            self._runs.favour[demoted], self._runs.until[demoted] = 1.0, 0.0
        self._runs.rank(at)

    def remove(self, ids: Ids) -> None:
        if self._found is not None:
            self._settle(None)
        self._changes += 1
        self._runs.hold(ids.astype(np.intp))

    def forget(self, ids: Ids) -> None:
        if len(ids) == 0:
            return
        if self._found is not None:
            self._settle(None)
        self._changes += 1
        at = ids.astype(np.intp)
        of = self._runs.of[at]
        if of.all():
            self._remember(self._names[at], of)
        else:
            some = of > 0
            self._remember(self._names[at[some]], of[some])
        self._runs.take_out(at)
        up = self._up[at]
        known = (up > 0) & (self._born[up - 1] == self._up_born[at])
        np.subtract.at(self._children, up[known] - 1, 1)
        self._children[at] = 0
        self._up[at] = 0
        self._born[at] = 0
        self._names[at] = 0

    def _worth(self, runs: Places, now: float) -> _Floats:
        table = self._runs
        worth = self._times.index(table.kind[runs], now - table.last[runs])
        riders = table.rider[runs]
        on = np.flatnonzero(riders)
        if len(on):
            rider = riders[on]
            there = (table.serial[rider] == table.rider_serial[runs[on]]) & (table.held[rider] > 0)
            on, rider = on[there], rider[there]
            theirs = self._times.index(table.kind[rider], now - table.last[rider])
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
        if self._found is not None:
            self._settle(None)
        take = np.ones(len(facts), dtype=np.bool_)
        need = len(facts) - room
        if need <= 0:
            return take
        runs, worth = self._ranked(need)
        like = self._recall(facts.names)
        kinds = self._runs.kind[like]
        kinds[like == 0] = 3 * _SHAPE[2]
        mine = self._times.index(kinds, np.zeros(len(kinds)))[max(0, room) :]
        theirs = np.repeat(worth, self._runs.idle[runs])[:need]
        less = np.flatnonzero(mine[: len(theirs)] < theirs)
        stop = int(less[0]) if len(less) else len(theirs)
        take[max(0, room) + stop :] = False
        return take

    def _choose(self, count: int) -> Places:
        """Slots that go first, the first one first: of each run from its end, and none before its children."""
        left = min(count, self._runs.count)
        chosen = _NONE
        everything = False
        while left > 0:
            before = left
            runs, _ = self._ranked(self._runs.count if everything else left)
            for run in runs.tolist():
                part = self._runs.last_ranked(run, left)
                if len(chosen):
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
        return chosen

    def _without_children(self, part: Places, chosen: Places) -> Places:
        """The leading slots of these that have no children but those before them and these."""
        if len(part) == 0:
            return part
        children = self._children[part].copy()
        children[1:] -= self._up[part[:-1]] == part[1:] + 1
        for at in np.flatnonzero(children).tolist():
            gone = np.count_nonzero(self._up[chosen] == part[at] + 1) if len(chosen) else 0
            if children[at] > gone:
                return part[:at]
        return part

    def coldest(self, count: int) -> Ids:
        if self._found is not None:
            self._settle(None)
        return self._choose(count).astype(np.int32)

    def evict(self, count: int) -> Ids:
        ids = self.coldest(count)
        self.forget(ids)
        self._draws += 1
        return ids

    def demote(self, ids: Ids) -> int:
        if self._found is not None:
            self._settle(None)
        at = ids.astype(np.intp)
        at = at[self._runs.ranked[at]]
        if len(at):
            self._changes += 1
            runs = self._runs
            made = runs.make(runs.of[at[-1:]])
            runs.put(at[::-1], np.zeros(1, dtype=np.intp), made)
            runs.favour[made], runs.until[made] = 0.0, np.inf
            self._demotions += 1
            runs.order[made] = -self._demotions
        return len(at)

    def retain(self, ids: Ids, retention: Retention) -> None:
        if self._found is not None:
            self._settle(None)
        if len(ids) == 0:
            return
        self._changes += 1
        runs, now, weights = self._runs, self._clock(), self._weights
        at = ids.astype(np.intp)
        unplaced = at[runs.of[at] == 0]
        if len(unplaced):
            self._place(unplaced)
        at = at[np.argsort(runs.place[at])]
        of = runs.of[at]
        cuts = cuts_of(of)
        made = runs.make(of[cuts])
        runs.order[made] = runs.order[of[cuts]]
        runs.put(at, cuts, made)
        favour = 2.0 ** (retention.priority / weights["priority"])
        if retention.about_to_finish:
            favour *= weights["finish"]
        until = now + (weights["hint_seconds"] if retention.ttl is None else retention.ttl)
        due = 0.0
        if retention.will_return is not None:
            due = now + retention.will_return
            late = due + max(weights["late"], retention.will_return / 2)
            until = late if retention.ttl is None else min(until, late)
        runs.favour[made], runs.until[made], runs.due[made] = favour, until, due

    def check_integrity(self) -> None:
        if self._found is not None:
            self._settle(None)
        self._runs.check_integrity()
        up, held = self._up, np.flatnonzero(self._names)
        known = held[(up[held] > 0) & (self._born[up[held] - 1] == self._up_born[held])]
        if not np.array_equal(np.bincount(up[known] - 1, minlength=len(up)), self._children):
            raise IntegrityError("cost: a slot does not have as many children as it counts")
