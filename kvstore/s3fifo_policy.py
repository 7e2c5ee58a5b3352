"""The `s3fifo` policy: three first-in-first-out queues, as of Yang et al., "FIFO Queues are All You Need for
Cache Eviction" (SOSP 2023).

New blocks come into a small queue, a tenth of the tier. What is found again there in time moves to the main
queue when its turn comes; what is not goes, and its name is remembered for a while: if it comes back it comes
to the main queue at once. So a document that is read once passes through the tenth and takes no place from
others. In the main queue a block that was found since its last turn has another turn.

Here two things are added. A block that is in use when its turn comes goes to the end of the main queue when
it is not any more. And one that is to go while others in the tier follow it in its chain goes as soon as
these have, before any other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Unpack

import numpy as np
import numpy.typing as npt

from ..tiers.errors import IntegrityError
from ..tiers.settings import expect_integer, expect_number
from .chain_leaves import ChainLeaves
from .lineage import ShortHashes
from .policy import MOST_BLOCKS, BlockFacts, Ids, PolicyOptions, Retention

__all__ = ["S3FIFOPolicy"]

_Indices = npt.NDArray[np.intp]
_Bools = npt.NDArray[np.bool_]
_Uses = npt.NDArray[np.uint8]

_MOST_USES: Final = 3
"""Uses that are counted: two bits, as in the paper."""
_LEAST_LOOK: Final = 64
"""Entries of a queue that are looked at together, at least."""
# Where a block belongs, whether it stands there or is in use.
_NOWHERE: Final = 0
_SMALL: Final = 1
_MAIN: Final = 2
_HELD: Final = 3
"""It was to go, and others follow it yet."""
_HOMES: Final = 4
_NO_IDS: Final = np.empty(0, dtype=np.int32)
_WAYS: Final = 4
"""Names of a bucket. There are twice as many places as names, or more."""
_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio: its multiples' high bits are as spread as can be (Knuth, volume 3, 6.4)."""


class S3FIFOPolicy:
    """S3-FIFO on arrays.

    Its weights:

    - ``small_share``: share of the blocks above which the small queue gives up blocks before the main one;
    - ``ghost_share``: names that are remembered, as a share of the ids that there may be;
    - ``promote_uses``: 1 to 3, uses in the small queue for which a block moves to the main one.

    Args:
        capacity: ids are below it, until `resize`.
        options: which every policy is given; of these it takes the weights.

    Raises:
        ConfigError: `capacity` or a weight is out of range.
    """

    known_weights: ClassVar[Mapping[str, float]] = {
        "small_share": 0.1,
        "ghost_share": 0.9,
        "promote_uses": 2.0,
    }
    learns: ClassVar[bool] = True

    def __init__(self, capacity: int = 0, **options: Unpack[PolicyOptions]) -> None:
        capacity = expect_integer("capacity", capacity, 0, MOST_BLOCKS)
        weights = {**self.known_weights, **options.get("weights", {})}
        shares = [
            expect_number(f"policy_weights.{name}", weights[name], 0.0, 1.0, above=True)
            for name in ("small_share", "ghost_share")
        ]
        self._small_share, self._ghost_share = shares
        uses = expect_number("policy_weights.promote_uses", weights["promote_uses"], 1, _MOST_USES)
        self._promote_uses = round(uses)
        self._home = np.zeros(0, dtype=np.uint8)
        self._at_home = np.zeros(_HOMES, dtype=np.int64)
        """Of each place in which blocks belong, how many do."""
        self._uses = np.zeros(0, dtype=np.uint8)
        self._ranked = np.zeros(0, dtype=np.bool_)
        self._count = 0
        """Blocks that are ranked."""
        self._queued = np.zeros(0, dtype=np.bool_)
        """Stands in a queue. What is in use keeps its place until its turn comes."""
        self._small, self._main, self._next = _Queue(), _Queue(), _Queue()
        """The last one is of blocks that go before all others, of which the one at its end goes first."""
        self._chains = ChainLeaves()
        self._ghosts = _Ghosts(1)
        self._turns: _Turns | None = None
        """What the last `coldest` found, unless something has changed since."""
        self.resize(capacity)

    def __len__(self) -> int:
        return self._count

    def resize(self, capacity: int) -> None:
        before = len(self._home)
        if capacity <= before:
            return
        for name in ("_home", "_uses", "_ranked", "_queued"):
            grown = np.zeros(capacity, dtype=getattr(self, name).dtype)
            grown[:before] = getattr(self, name)
            setattr(self, name, grown)
        for queue in (self._small, self._main, self._next):
            queue.resize(capacity)
        self._chains.resize(capacity)
        self._ghosts = self._ghosts.grown(max(1, int(capacity * self._ghost_share)))

    # What it is told

    def admit(self, ids: Ids, facts: BlockFacts) -> None:
        self._turns = None
        at = ids.astype(np.intp)
        self._uses[at] = 0
        self._belong(at, np.where(self._ghosts.take(facts.names), _MAIN, _SMALL))
        self._chains.admit(ids, facts)

    def found(self, ids: Ids) -> None:
        self._turns = None
        at = ids.astype(np.intp)
        uses = self._uses[at]
        uses += uses < _MOST_USES
        self._uses[at] = uses

    def missed(self, facts: BlockFacts) -> None:
        """What comes back is known by its name when it is admitted."""

    def wanted(self, facts: BlockFacts, room: int) -> _Bools:
        """All of them: which are worth a place shows in the small queue."""
        return np.ones(len(facts), dtype=np.bool_)

    def retain(self, ids: Ids, retention: Retention) -> None:
        """What is worth more, or will be used again, counts as found as often as is counted; what is worth
        less as not found yet. How long that holds the queues decide."""
        self._turns = None
        if retention.priority > 0 or retention.will_return is not None or retention.about_to_finish:
            self._uses[ids] = _MOST_USES
        elif retention.priority < 0:
            self._uses[ids] = 0

    def insert(self, ids: Ids) -> None:
        self._turns = None
        at = ids.astype(np.intp)
        if len(self._next):
            self._leave_next(ids)
        queued = self._queued[at]
        if np.count_nonzero(queued) < len(ids):
            self._line_up(ids[~queued])
        self._count += len(ids) - int(np.count_nonzero(self._ranked[at]))
        self._ranked[at] = True

    def remove(self, ids: Ids) -> None:
        self._turns = None
        at = ids.astype(np.intp)
        self._count -= int(np.count_nonzero(self._ranked[at]))
        self._ranked[at] = False
        if len(self._next):
            self._leave_next(ids)

    def demote(self, ids: Ids) -> int:
        self._turns = None
        ids = ids[self._ranked[ids]]
        self._uses[ids] = 0
        self._go_next(ids)
        return len(ids)

    def forget(self, ids: Ids) -> None:
        turns, self._turns = self._turns, None
        if turns is not None and turns.were_for(ids):
            self._go_on_after(turns, ids)
        at = ids.astype(np.intp)
        home = self._home[at]
        self._ghosts.add(self._chains.names[at[((home == _SMALL) & self._queued[at]) | (home == _HELD)]])
        self._belong(at, _NOWHERE)
        self._count -= int(np.count_nonzero(self._ranked[at]))
        self._ranked[at] = False
        self._stand_nowhere(ids)
        followed = self._chains.let_go(ids)
        self._chains.forget(ids)
        if self._at_home[_HELD]:
            followed = followed[(self._home[followed] == _HELD) & (self._chains.followers[followed] == 0)]
            if len(followed):
                self._go_next(np.unique(followed[~self._queued[followed] & self._ranked[followed]]))

    def _belong(self, at: _Indices, home: int | npt.NDArray[np.integer[Any]]) -> None:
        """These belong somewhere else now."""
        self._at_home -= np.bincount(self._home[at], minlength=_HOMES)
        self._home[at] = home
        self._at_home += np.bincount(self._home[at], minlength=_HOMES)

    def _line_up(self, ids: Ids) -> None:
        """These, which stand in no queue, stand at the end of theirs."""
        small = self._home[ids] == _SMALL
        self._small.append(ids[small])
        others = ids[~small]
        self._belong(others.astype(np.intp), _MAIN)
        self._main.append(others)
        self._queued[ids] = True

    def _stand_nowhere(self, ids: Ids) -> None:
        for queue in (self._small, self._main, self._next):
            queue.drop(ids)
        self._queued[ids] = False

    def _go_next(self, ids: Ids) -> None:
        """These go before all others, the first one first."""
        self._stand_nowhere(ids)
        # They are held by nothing any more, and their names are remembered as those of the small queue are.
        self._belong(ids[self._home[ids] == _HELD].astype(np.intp), _SMALL)
        self._next.append(ids[::-1])
        self._queued[ids] = True

    def _leave_next(self, ids: Ids) -> None:
        """Those of these that would go before all others do not any more: they were used."""
        ids = ids[self._next.has(ids)]
        self._next.drop(ids)
        self._queued[ids] = False
        self._belong(ids.astype(np.intp), _MAIN)

    # What goes

    def coldest(self, count: int) -> Ids:
        if self._turns is None or self._turns.asked != count:
            self._turns = self._take_turns(count)
        return self._turns.going

    def evict(self, count: int) -> Ids:
        going = self.coldest(count)
        self.forget(going)
        return going

    def _take_turns(self, count: int) -> _Turns:
        """Find out what goes next. Only the result says what else would change."""
        turns = _Turns(count, self._small.head, self._main.head, self._next.tail)
        left = min(count, self._count)
        try:
            while left > 0 and turns.next_tail > self._next.head:
                left -= self._turn_of_next(turns, left)
            resident = int(self._at_home[1:].sum())
            over = int(self._at_home[_SMALL]) - int(self._small_share * resident)
            look = max(_LEAST_LOOK, 2 * left)
            while left > 0:
                main_is_over = turns.main_head == self._main.tail and not turns.again
                if turns.small_head < self._small.tail and (over > 0 or main_is_over):
                    moved, gone = self._turn_of_small(turns, look if main_is_over else min(look, over), left)
                    over -= moved
                elif not main_is_over:
                    gone = self._turn_of_main(turns, look, left)
                else:
                    break
                left -= gone
                look *= 2
            if left > 0:
                self._let_go_anyway(turns, left)
        finally:
            for before in turns.let_go:
                self._chains.take_back(before)
            for ids, home in reversed(turns.homes):
                self._home[ids] = home
        turns.going = np.concatenate(turns.parts) if turns.parts else np.empty(0, dtype=np.int32)
        return turns

    def _turn_of_next(self, turns: _Turns, left: int) -> int:
        """Those that go before all others; how many go."""
        start = max(self._next.head, turns.next_tail - max(_LEAST_LOOK, 2 * left))
        ids, at = self._next.entries(start, turns.next_tail)
        if len(ids) > left:
            ids, start = ids[-left:], int(at[-left])
        turns.next_tail = start
        return self._let_go(turns, ids[::-1], left)

    def _turn_of_small(self, turns: _Turns, look: int, left: int) -> tuple[int, int]:
        """Blocks of the small queue have their turn; how many it has less then, and how many go."""
        stop = min(self._small.tail, turns.small_head + look)
        ids, at = self._small.entries(turns.small_head, stop)
        ranked, uses = self._ranked[ids], self._uses[ids]
        cold = ranked & (uses < self._promote_uses)
        if np.count_nonzero(cold) > left:
            cut = int(cold.nonzero()[0][left - 1]) + 1
            stop = int(at[cut - 1]) + 1
            ids, ranked, cold = ids[:cut], ranked[:cut], cold[:cut]
        turns.small_head = stop
        gone = self._let_go(turns, ids[cold], left)
        turns.in_use.append(ids[~ranked])
        found = ids[ranked & ~cold]
        if len(found):
            turns.again.append((found, np.zeros(len(found), dtype=np.uint8)))
        return len(ids), gone

    def _turn_of_main(self, turns: _Turns, look: int, left: int) -> int:
        """Blocks of the main queue have their turn; how many go."""
        if turns.main_head < self._main.tail:
            stop = min(self._main.tail, turns.main_head + look)
            ids, at = self._main.entries(turns.main_head, stop)
            uses = self._uses[ids]
        else:
            ids, uses = turns.again.popleft()
            at = stop = None
        ranked = self._ranked[ids]
        cold = ranked & (uses == 0)
        if np.count_nonzero(cold) > left:
            cut = int(cold.nonzero()[0][left - 1]) + 1
            if at is None:
                turns.again.appendleft((ids[cut:], uses[cut:]))
            else:
                stop = int(at[cut - 1]) + 1
            ids, uses, ranked, cold = ids[:cut], uses[:cut], ranked[:cut], cold[:cut]
        if stop is not None:
            turns.main_head = stop
        gone = self._let_go(turns, ids[cold], left)
        turns.in_use.append(ids[~ranked])
        found = ranked & ~cold
        if found.any():
            turns.again.append((ids[found], uses[found] - np.uint8(1)))
        return gone

    def _let_go(self, turns: _Turns, ids: Ids, left: int) -> int:
        """Of these, whose turn it is to go, and those that only waited for them; how many go.

        Args:
            left: how many may.
        """
        if not len(ids):
            return 0
        going, before, held = self._chains.leaves_first(ids)
        if len(held):
            turns.held.append(held)
            self._belong_for_now(turns, held, _HELD)
        turns.parts += going
        turns.let_go += before
        count = sum(map(len, going))
        if before and (turns.held or self._at_home[_HELD]):
            count += self._climb(turns, np.concatenate(before), left - count)
        return count

    def _climb(self, turns: _Turns, followed: _Indices, left: int) -> int:
        """Blocks that only waited for those to go that follow them go, one after the other; how many.

        Args:
            followed: blocks that others followed.
            left: how many may go.
        """
        chains = self._chains
        free = followed[(self._home[followed] == _HELD) & (chains.followers[followed] == 0)]
        climbed: list[int] = []
        before: list[int] = []
        for start in np.unique(free).tolist():
            one: int | None = start
            while one is not None and len(climbed) < left and self._home[one] == _HELD and self._ranked[one]:
                climbed.append(one)
                one = chains.parent_of(one)
                if one is not None:
                    before.append(one)
                    chains.followers[one] -= 1
                    if chains.followers[one]:
                        break
        if climbed:
            going = np.array(climbed, dtype=np.int32)
            turns.parts.append(going)
            turns.let_go.append(np.array(before, dtype=np.intp))
            self._belong_for_now(turns, going, _NOWHERE)
        return len(climbed)

    def _let_go_anyway(self, turns: _Turns, left: int) -> None:
        """Nothing else is left than blocks that others follow which are in use: the deepest ones go first."""
        held = np.flatnonzero(self._ranked & (self._home == _HELD)).astype(np.int32)
        order = np.argsort(self._chains.depths[held], kind="stable")[::-1]
        turns.parts.append(held[order[:left]])

    def _belong_for_now(self, turns: _Turns, ids: Ids, home: int) -> None:
        """These belong somewhere else until all turns are found out."""
        turns.homes.append((ids, self._home[ids]))
        self._home[ids] = home

    def _go_on_after(self, turns: _Turns, gone: Ids) -> None:
        """What was found out comes to be, of all blocks that have had their turn but for those that go."""
        small, _ = self._small.entries(self._small.head, turns.small_head)
        main, _ = self._main.entries(self._main.head, turns.main_head)
        self._small.head, self._main.head = turns.small_head, turns.main_head
        self._next.tail = turns.next_tail
        held = np.concatenate([_NO_IDS, *turns.held])
        for ids in (small, main, held):
            self._stand_nowhere(ids)
        self._belong(held.astype(np.intp), _HELD)
        for ids in turns.in_use:
            self._belong(ids.astype(np.intp), _MAIN)
        for ids, uses in turns.again:
            self._belong(ids.astype(np.intp), _MAIN)
            self._uses[ids] = uses
            self._main.append(ids)
            self._queued[ids] = True
        if len(gone) < len(turns.going):
            self._go_next(turns.going[~np.isin(turns.going, gone)])

    def check_integrity(self) -> None:
        resident = np.flatnonzero(self._home).astype(np.int32)
        self._chains.check_integrity(resident)
        if np.count_nonzero(self._ranked) != self._count or self._ranked[self._home == _NOWHERE].any():
            raise IntegrityError("s3fifo: blocks are ranked that are not counted, or not here")
        if not np.array_equal(np.bincount(self._home, minlength=_HOMES)[1:], self._at_home[1:]):
            raise IntegrityError("s3fifo: a queue has another number of blocks than is counted")
        standing = np.zeros(len(self._home), dtype=np.int64)
        for name, queue in (("small", self._small), ("main", self._main), ("next", self._next)):
            ids = queue.check_integrity(name)
            standing[ids] += 1
        if not np.array_equal(standing, self._queued) or (self._queued & (self._home == _NOWHERE)).any():
            raise IntegrityError("s3fifo: a block stands in two queues, or in none that it is said to")
        if (self._ranked & ~self._queued & (self._home != _HELD)).any():
            raise IntegrityError("s3fifo: a block is ranked and stands in no queue")


@dataclass
class _Turns:
    """Which blocks have their turn, and what becomes of them."""

    asked: int
    small_head: int
    main_head: int
    next_tail: int
    parts: list[Ids] = field(default_factory=list)
    """Of those that go,"""
    going: Ids = field(default_factory=lambda: _NO_IDS)
    """which these are, one after the other."""
    again: deque[tuple[Ids, _Uses]] = field(default_factory=deque)
    """Those that have another turn after all others, and as how often found."""
    in_use: list[Ids] = field(default_factory=list)
    held: list[Ids] = field(default_factory=list)
    """Those that go once others have that follow them."""
    let_go: list[_Indices] = field(default_factory=list)
    homes: list[tuple[Ids, npt.NDArray[np.uint8]]] = field(default_factory=list)
    """What is to be undone: what `ChainLeaves.let_go` returned, and where blocks belong."""

    def were_for(self, ids: Ids) -> bool:
        """Whether these are most of those that go, and nothing else."""
        if ids is self.going:
            return True
        few = len(self.going) <= 4 * len(ids) + _LEAST_LOOK
        return few and len(ids) > 0 and bool(np.isin(ids, self.going).all())


class _Queue:
    """Blocks first in, first out: a log of them, and where in it each stands.

    Entries of those that left before their turn stay in the log until it is written anew, which is when it is
    full: so all is O(1) per id, amortised.

    Attributes:
        head, tail: the positions of its entries are from `head` on, and below `tail`.
    """

    def __init__(self) -> None:
        self.head = self.tail = 0
        self._log = np.empty(_LEAST_LOOK, dtype=np.int32)
        self._place = np.zeros(0, dtype=np.int64)
        """Of each id the position of its entry, plus one; 0: it has none."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def resize(self, capacity: int) -> None:
        """Ids up to `capacity` - 1 may come."""
        grown = np.zeros(capacity, dtype=np.int64)
        grown[: len(self._place)] = self._place
        self._place = grown

    def append(self, ids: Ids) -> None:
        """These, which are not in it, come to its end."""
        count = len(ids)
        if not count:
            return
        if self.tail + count > len(self._log):
            self._write_anew(count)
        stop = self.tail + count
        self._log[self.tail : stop] = ids
        self._place[ids.astype(np.intp)] = np.arange(self.tail + 1, stop + 1)
        self.tail = stop
        self._count += count

    def drop(self, ids: Ids) -> None:
        """Those of these that are in it leave it."""
        if self._count:
            at = ids.astype(np.intp)
            self._count -= int(np.count_nonzero(self._place[at]))
            self._place[at] = 0

    def has(self, ids: Ids) -> _Bools:
        """bool [n]: which of these are in it."""
        there: _Bools = self._place[ids] > 0
        return there

    def entries(self, start: int, stop: int) -> tuple[Ids, npt.NDArray[np.int64]]:
        """What stands between two positions, and at which."""
        entries = self._log[start:stop]
        at = np.arange(start, stop)
        stands = self._place[entries.astype(np.intp)] == at + 1
        if np.count_nonzero(stands) < len(stands):
            return entries[stands], at[stands]
        return entries.copy(), at

    def _write_anew(self, room: int) -> None:
        ids, _ = self.entries(self.head, self.tail)
        # Four times what is live: until it is written anew again as many come as are moved, and more.
        self._log = np.empty(4 * (len(ids) + room), dtype=np.int32)
        self.head, self.tail = 0, len(ids)
        self._log[: len(ids)] = ids
        self._place[ids] = np.arange(1, len(ids) + 1)

    def check_integrity(self, name: str) -> Ids:
        """The ids that are in it.

        Raises:
            IntegrityError: its books do not agree.
        """
        ids, _ = self.entries(self.head, self.tail)
        if not len(ids) == self._count == np.count_nonzero(self._place):
            raise IntegrityError(f"s3fifo: {self._count} in the {name} queue, {len(ids)} stand there")
        return ids


class _Ghosts:
    """Names of blocks that went not long ago, in a table of buckets: the oldest one of a bucket gives way.

    Args:
        capacity: so many that came last are remembered, but for a few whose bucket is full.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        bits = max(1, (capacity // 2).bit_length())
        self._shift = np.uint64(64 - bits)
        self._names = np.zeros((1 << bits, _WAYS), dtype=np.uint64)
        self._came = np.zeros((1 << bits, _WAYS), dtype=np.int64)
        """When each came, in names that came before; 0: it is none."""
        self._now = 0

    def add(self, names: ShortHashes) -> None:
        """Remember these."""
        if not len(names):
            return
        buckets = self._buckets(names)
        way = self._came[buckets].argmin(axis=1)
        self._names[buckets, way] = names
        self._came[buckets, way] = np.arange(self._now + 1, self._now + 1 + len(names))
        self._now += len(names)

    def take(self, names: ShortHashes) -> _Bools:
        """bool [n]: which of these are remembered; these are not any more."""
        buckets = self._buckets(names)
        here = self._names[buckets] == names[:, None]
        here &= self._came[buckets] > max(0, self._now - self._capacity)
        found: _Bools = here.any(axis=1)
        if np.count_nonzero(found):
            row, way = here.nonzero()
            self._came[buckets[row], way] = 0
        return found

    def grown(self, capacity: int) -> _Ghosts:
        """The same names in a table for more."""
        grown = _Ghosts(capacity)
        order = np.argsort(self._came, axis=None)
        came = self._came.ravel()[order]
        grown.add(self._names.ravel()[order[came > max(0, self._now - self._capacity)]])
        return grown

    def _buckets(self, names: ShortHashes) -> npt.NDArray[np.intp]:
        return ((names * _SPREAD) >> self._shift).astype(np.intp)
