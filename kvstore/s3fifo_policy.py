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
from typing import ClassVar, Final, Unpack

import numpy as np
import numpy.typing as npt

from ..tiers.errors import IntegrityError
from ..tiers.settings import expect_integer
from .chain_leaves import ChainLeaves, Followed
from .lineage import ShortHashes
from .policy import MOST_BLOCKS, BlockFacts, Ids, PolicyOptions, Retention, Weight, weights_of

__all__ = ["S3FIFOPolicy"]

_Indices = npt.NDArray[np.intp]
_Bools = npt.NDArray[np.bool_]
_States = npt.NDArray[np.uint8]

_LEAST_LOOK: Final = 64
"""Entries of a queue that are looked at together, at least."""
_NO_IDS: Final = np.empty(0, dtype=np.int32)

# What is known of a block, in one byte: how often it was found, as far as the paper's two bits count,
_USES: Final = np.uint8(3)
# where it belongs, whether it stands there or is in use (nowhere: it is not here),
_HOME: Final = np.uint8(12)
_SMALL: Final = np.uint8(4)
_MAIN: Final = np.uint8(8)
_HELD: Final = np.uint8(12)
"""It was to go, and others follow it yet: it stands in no queue."""
# and whether it may go.
_RANKED: Final = np.uint8(16)
_RANKED_USES: Final = np.uint8(19)
_RANKED_SMALL: Final = np.uint8(20)
_NOT_HOME: Final = np.uint8(255 - 12)
_NOT_RANKED: Final = np.uint8(255 - 16)
_NOT_USES: Final = np.uint8(255 - 3)


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

    known_weights: ClassVar[Mapping[str, Weight]] = {
        "small_share": Weight(0.1, 0.0, 1.0, above=True),
        "ghost_share": Weight(0.9, 0.0, 1.0, above=True),
        "promote_uses": Weight(2.0, 1.0, float(_USES)),
    }
    learns: ClassVar[bool] = True

    def __init__(self, capacity: int = 0, **options: Unpack[PolicyOptions]) -> None:
        capacity = expect_integer("capacity", capacity, 0, MOST_BLOCKS)
        weights = weights_of("s3fifo", self.known_weights, options.get("weights"))
        self._small_share, self._ghost_share = weights["small_share"], weights["ghost_share"]
        self._promote_uses = np.uint8(round(weights["promote_uses"]))
        self._state: _States = np.zeros(0, dtype=np.uint8)
        self._place = np.zeros(0, dtype=np.int64)
        """Where in which queue a block stands (`_Queue`); 0: in none. What is in use keeps its place until
        its turn comes."""
        self._small, self._main, self._next = _Queue(0), _Queue(1), _Queue(2)
        """The last one is of blocks that go before all others, of which the one at its end goes first."""
        self._count = 0
        """Blocks that are ranked,"""
        self._here = 0
        """that are here,"""
        self._in_small = 0
        """that belong to the small queue,"""
        self._held = 0
        """and that are held by those that follow them."""
        self._chains = ChainLeaves()
        self._ghosts = _Ghosts(1)
        self._turns: _Turns | None = None
        """What the last `coldest` found, unless something has changed since."""
        self.resize(capacity)

    def __len__(self) -> int:
        return self._count

    def resize(self, capacity: int) -> None:
        before = len(self._state)
        if capacity <= before:
            return
        for name in ("_state", "_place"):
            grown = np.zeros(capacity, dtype=getattr(self, name).dtype)
            grown[:before] = getattr(self, name)
            setattr(self, name, grown)
        self._chains.resize(capacity)
        self._ghosts = self._ghosts.grown(max(1, int(capacity * self._ghost_share)))

    # What it is told

    def admit(self, ids: Ids, facts: BlockFacts) -> None:
        self._turns = None
        at = ids.astype(np.intp)
        known = self._ghosts.take(facts.names)
        came_back = int(np.count_nonzero(known))
        self._state[at] = np.where(known, _MAIN, _SMALL) if came_back else _SMALL
        self._in_small += len(ids) - came_back
        self._here += len(ids)
        self._chains.admit(ids, facts)

    def found(self, ids: Ids) -> None:
        self._turns = None
        at = ids.astype(np.intp)
        state = self._state[at]
        state += (state & _USES) < _USES
        self._state[at] = state

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
            self._state[ids] |= _USES
        elif retention.priority < 0:
            self._state[ids] &= _NOT_USES

    def insert(self, ids: Ids) -> None:
        self._turns = None
        at = ids.astype(np.intp)
        if self._next.tail > self._next.head:
            self._leave_next(at)
        place = self._place[at]
        placed = np.count_nonzero(place)
        if placed < len(ids):
            self._line_up(ids[place == 0] if placed else ids)
        state = self._state[at]
        self._count += len(ids) - int(np.count_nonzero(state & _RANKED))
        self._state[at] = state | _RANKED

    def remove(self, ids: Ids) -> None:
        self._turns = None
        at = ids.astype(np.intp)
        state = self._state[at]
        self._count -= int(np.count_nonzero(state & _RANKED))
        self._state[at] = state & _NOT_RANKED
        if self._next.tail > self._next.head:
            self._leave_next(at)

    def demote(self, ids: Ids) -> int:
        self._turns = None
        ids = ids[(self._state[ids] & _RANKED) > 0]
        self._state[ids] &= _NOT_USES
        self._go_next(ids)
        return len(ids)

    def forget(self, ids: Ids, *, chosen: bool = False) -> None:
        turns, self._turns = self._turns, None
        if len(ids):
            self._leave(ids, turns if chosen and turns is not None and turns.were_for(ids) else None)

    def _leave(self, ids: Ids, turns: _Turns | None, let_go: list[Followed] | None = None) -> None:
        """These are not here any more.

        Args:
            turns: those in which they were chosen.
            let_go: what they were let go of with; None: they were not yet.
        """
        at = ids.astype(np.intp)
        home = self._state[at] & (_HOME | _RANKED)
        if turns is not None and turns.whole and np.count_nonzero(home == _RANKED_SMALL) == len(ids):
            # Nearly always: they pass through the small queue, and are remembered.
            self._ghosts.add(self._chains.names[at])
            self._go_on_after(turns, ids)
            self._in_small -= len(ids)
            self._count -= len(ids)
        else:
            ranked = int(np.count_nonzero(home & _RANKED))
            home &= _HOME
            # Those that were never written are not remembered.
            passed = ((home == _SMALL) & (self._place[at] > 0)) | (home == _HELD)
            self._ghosts.add(self._chains.names[at[passed]])
            if turns is not None:
                self._go_on_after(turns, ids)
            self._belong(ids, _MAIN)
            self._count -= ranked
        self._here -= len(ids)
        self._state[at] = 0
        self._place[at] = 0
        if let_go is None:
            let_go = [self._chains.let_go(ids)]
        self._chains.forget(ids)
        if self._held:
            self._free_held(np.concatenate([one.ids() for one in let_go]))

    def _free_held(self, followed: _Indices) -> None:
        """Those of these blocks that were held only by those that followed them go next."""
        state = self._state[followed]
        free = followed[((state & _HOME) == _HELD) & ((state & _RANKED) > 0)]
        free = free[(self._chains.followers[free] == 0) & (self._place[free] == 0)]
        if len(free):
            self._go_next(np.unique(free).astype(np.int32))

    def _belong(self, ids: Ids, home: np.uint8) -> None:
        """These belong somewhere else now."""
        state = self._state[ids]
        before = state & _HOME
        self._in_small += len(ids) * int(home == _SMALL) - int(np.count_nonzero(before == _SMALL))
        self._held += len(ids) * int(home == _HELD) - int(np.count_nonzero(before == _HELD))
        self._state[ids] = (state & _NOT_HOME) | home

    def _line_up(self, ids: Ids) -> None:
        """These, which stand in no queue, stand at the end of theirs."""
        small = (self._state[ids] & _HOME) == _SMALL
        count = np.count_nonzero(small)
        if count == len(ids):
            self._small.append(self._place, ids)
            return
        if count:
            self._small.append(self._place, ids[small])
            ids = ids[~small]
        self._belong(ids, _MAIN)
        self._main.append(self._place, ids)

    def _go_next(self, ids: Ids) -> None:
        """These go before all others, the first one first."""
        # What is held by nothing any more is remembered when it goes, as what is in the small queue.
        self._belong(ids[(self._state[ids] & _HOME) == _HELD], _SMALL)
        self._next.append(self._place, ids[::-1])

    def _leave_next(self, at: _Indices) -> None:
        """Those of these that would go before all others do not any more: they were used."""
        ids = at[self._next.has(self._place[at])].astype(np.int32)
        if len(ids):
            self._place[ids] = 0
            self._belong(ids, _MAIN)

    # What goes

    def coldest(self, count: int) -> Ids:
        if self._turns is None or self._turns.asked != count:
            self._turns = self._take_turns(count)
            for followed in self._turns.let_go:
                self._chains.take_back(followed)
        return self._turns.going

    def evict(self, count: int) -> Ids:
        self._turns = None
        turns = self._take_turns(count)
        if len(turns.going):
            self._leave(turns.going, turns, turns.let_go)
        return turns.going

    def _take_turns(self, count: int) -> _Turns:
        """Find out what goes next. Only the result says what else changes than what was let go of."""
        turns = _Turns(count, self._small.head, self._main.head, self._next.tail)
        left = min(count, self._count)
        while left > 0 and turns.next_tail > self._next.head:
            left -= self._turn_of_next(turns, left)
        over = self._in_small - int(self._small_share * self._here)
        look = max(_LEAST_LOOK, left)
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
        for ids, state in reversed(turns.states):
            self._state[ids] = state
        if turns.parts:
            turns.going = turns.parts[0] if len(turns.parts) == 1 else np.concatenate(turns.parts)
        return turns

    def _turn_of_next(self, turns: _Turns, left: int) -> int:
        """Those that go before all others; how many go."""
        start = max(self._next.head, turns.next_tail - max(_LEAST_LOOK, 2 * left))
        ids, at = self._next.entries(self._place, start, turns.next_tail)
        if len(ids) > left:
            ids, start = ids[-left:], int(at[-left])
        turns.next_tail = start
        return self._let_go(turns, ids[::-1], left)

    def _turn_of_small(self, turns: _Turns, look: int, left: int) -> tuple[int, int]:
        """Blocks of the small queue have their turn; how many it has less then, and how many go."""
        stop = min(self._small.tail, turns.small_head + look)
        ids, at = self._small.entries(self._place, turns.small_head, stop)
        state = self._state[ids]
        # Below _RANKED it comes round to far above.
        cold = ((state & _RANKED_USES) - _RANKED) < self._promote_uses
        count = int(np.count_nonzero(cold))
        if count > left:
            cut = int(cold.nonzero()[0][left - 1]) + 1
            stop, count = int(at[cut - 1]) + 1, left
            ids, state, cold = ids[:cut], state[:cut], cold[:cut]
        turns.small_head = stop
        turns.stood.append(ids)
        if count == len(ids):
            return len(ids), self._let_go(turns, ids, left)
        gone = self._let_go(turns, ids[cold], left)
        ranked = (state & _RANKED) > 0
        turns.in_use.append(ids[~ranked])
        found = ids[ranked & ~cold]
        turns.again.append((found, np.zeros(len(found), dtype=np.uint8)))
        return len(ids), gone

    def _turn_of_main(self, turns: _Turns, look: int, left: int) -> int:
        """Blocks of the main queue have their turn; how many go."""
        if turns.main_head < self._main.tail:
            stop = min(self._main.tail, turns.main_head + look)
            ids, at = self._main.entries(self._place, turns.main_head, stop)
            state = self._state[ids]
            cold = (state & _RANKED_USES) == _RANKED
            if np.count_nonzero(cold) > left:
                cut = int(cold.nonzero()[0][left - 1]) + 1
                stop = int(at[cut - 1]) + 1
                ids, state, cold = ids[:cut], state[:cut], cold[:cut]
            turns.main_head = stop
            turns.stood.append(ids)
            uses = state & _USES
        else:
            ids, uses = turns.again.popleft()
            state = self._state[ids]
            cold = ((state & _RANKED) > 0) & (uses == 0)
            if np.count_nonzero(cold) > left:
                cut = int(cold.nonzero()[0][left - 1]) + 1
                turns.again.appendleft((ids[cut:], uses[cut:]))
                ids, state, uses, cold = ids[:cut], state[:cut], uses[:cut], cold[:cut]
        gone = self._let_go(turns, ids[cold], left)
        ranked = (state & _RANKED) > 0
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
        going, followed, held = self._chains.leaves_first(ids)
        if len(held):
            turns.held.append(held)
            self._belong_for_now(turns, held, _HELD)
        turns.parts += going
        turns.let_go += followed
        count = sum(map(len, going))
        if followed and (turns.held or self._held) and count < left:
            count += self._climb(turns, np.concatenate([one.ids() for one in followed]), left - count)
        return count

    def _climb(self, turns: _Turns, followed: _Indices, left: int) -> int:
        """Blocks that only waited for those to go that follow them go, one after the other; how many.

        Args:
            followed: blocks that others followed.
            left: how many may go.
        """
        chains, held = self._chains, _HELD | _RANKED
        free = followed[(self._state[followed] & (_HOME | _RANKED)) == held]
        free = np.unique(free[chains.followers[free] == 0])
        climbed: list[int] = []
        before: list[int] = []
        for start in free.tolist():
            one: int | None = start
            while one is not None and len(climbed) < left:
                if (self._state[one] & (_HOME | _RANKED)) != held or chains.followers[one]:
                    break
                climbed.append(one)
                one = chains.parent_of(one)
                if one is not None:
                    before.append(one)
                    chains.followers[one] -= 1
        if climbed:
            going = np.array(climbed, dtype=np.int32)
            turns.parts.append(going)
            turns.let_go.append(Followed(_NO_IDS.astype(np.intp), before))
            self._belong_for_now(turns, going, _MAIN)
        return len(climbed)

    def _let_go_anyway(self, turns: _Turns, left: int) -> None:
        """Nothing else is left than blocks that others follow which are in use: the deepest ones go first."""
        held = np.flatnonzero((self._state & (_HOME | _RANKED)) == (_HELD | _RANKED)).astype(np.int32)
        order = np.argsort(self._chains.depths[held], kind="stable")[::-1]
        going = held[order[:left]]
        turns.parts.append(going)
        turns.let_go.append(self._chains.let_go(going))

    def _belong_for_now(self, turns: _Turns, ids: Ids, home: np.uint8) -> None:
        """These belong somewhere else until all turns are found out."""
        state = self._state[ids]
        turns.states.append((ids, state))
        self._state[ids] = (state & _NOT_HOME) | home

    def _go_on_after(self, turns: _Turns, gone: Ids) -> None:
        """What was found out comes to be, of all blocks that have had their turn but for those that go."""
        self._small.head, self._main.head = turns.small_head, turns.main_head
        self._next.tail = turns.next_tail
        if not turns.whole:
            for ids in (*turns.stood, *turns.held):
                self._place[ids] = 0
        for ids in turns.held:
            self._belong(ids, _HELD)
        for ids in turns.in_use:
            self._belong(ids, _MAIN)
        for ids, uses in turns.again:
            self._belong(ids, _MAIN)
            self._state[ids] = (self._state[ids] & _NOT_USES) | uses
            self._main.append(self._place, ids)
        if len(gone) < len(turns.going):
            self._go_next(turns.going[~np.isin(turns.going, gone)])

    def check_integrity(self) -> None:
        home, ranked = self._state & _HOME, (self._state & _RANKED) > 0
        self._chains.check_integrity(np.flatnonzero(home).astype(np.int32))
        if np.count_nonzero(ranked) != self._count or (ranked & (home == 0)).any():
            raise IntegrityError("s3fifo: blocks are ranked that are not counted, or not here")
        counts = [int(np.count_nonzero(which)) for which in (home, home == _SMALL, home == _HELD)]
        if counts != [self._here, self._in_small, self._held]:
            raise IntegrityError("s3fifo: blocks belong to a queue that are not counted, or the reverse")
        standing = np.zeros(len(self._state), dtype=np.int64)
        for queue in (self._small, self._main, self._next):
            standing[queue.entries(self._place, queue.head, queue.tail)[0]] += 1
        if not np.array_equal(standing, self._place > 0) or ((standing > 0) & (home == 0)).any():
            raise IntegrityError("s3fifo: a block stands in no queue, or is not here")
        if (ranked & (standing == 0) & (home != _HELD)).any():
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
    stood: list[Ids] = field(default_factory=list)
    """Those of the small and the main queue that have had a turn."""
    again: deque[tuple[Ids, _States]] = field(default_factory=deque)
    """Those that have another turn after all others, and as how often found."""
    in_use: list[Ids] = field(default_factory=list)
    held: list[Ids] = field(default_factory=list)
    """Those that go once others have that follow them."""
    let_go: list[Followed] = field(default_factory=list)
    states: list[tuple[Ids, _States]] = field(default_factory=list)
    """What `ChainLeaves.let_go` returned; and states before they were changed, to be as they were."""

    @property
    def whole(self) -> bool:
        """Whether all go that have had a turn."""
        return not (self.held or self.again or self.in_use)

    def were_for(self, ids: Ids) -> bool:
        """Whether these are most of those that go, and nothing else."""
        if ids is self.going:
            return True
        few = len(self.going) <= 4 * len(ids) + _LEAST_LOOK
        return few and bool(np.isin(ids, self.going).all())


class _Queue:
    """Blocks first in, first out: a log of them. Where each stands is its own place in an array over ids.

    A place is four times the position in the log plus one, plus the queue's number. Entries of blocks that
    left before their turn stay in the log until it is written anew, which is when it is full: so all is O(1)
    per id, amortised.

    Args:
        number: from 0 to 3.

    Attributes:
        head, tail: the positions of its entries are from `head` on, and below `tail`.
    """

    def __init__(self, number: int) -> None:
        self.head = self.tail = 0
        self._number = number
        self._log = np.empty(_LEAST_LOOK, dtype=np.int32)

    def append(self, place: npt.NDArray[np.int64], ids: Ids) -> None:
        """These come to its end, and leave whichever queue they stand in."""
        count = len(ids)
        if not count:
            return
        if self.tail + count > len(self._log):
            self._write_anew(place, count)
        stop = self.tail + count
        self._log[self.tail : stop] = ids
        place[ids.astype(np.intp)] = self._places(self.tail, stop)
        self.tail = stop

    def has(self, places: npt.NDArray[np.int64]) -> _Bools:
        """bool [n]: which of these places are in it."""
        there: _Bools = (places > 0) & ((places & 3) == self._number)
        return there

    def entries(
        self, place: npt.NDArray[np.int64], start: int, stop: int
    ) -> tuple[Ids, npt.NDArray[np.int64]]:
        """What stands between two positions, and at which."""
        entries = self._log[start:stop]
        stands = place[entries.astype(np.intp)] == self._places(start, stop)
        if np.count_nonzero(stands) < len(stands):
            return entries[stands], np.flatnonzero(stands) + start
        return entries.copy(), np.arange(start, stop)

    def _places(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        number = self._number
        return np.arange(4 * start + 4 + number, 4 * stop + 4 + number, 4)

    def _write_anew(self, place: npt.NDArray[np.int64], room: int) -> None:
        ids, _ = self.entries(place, self.head, self.tail)
        # Four times what is live: until it is written anew again as many come as are moved, and more.
        self._log = np.empty(4 * (len(ids) + room), dtype=np.int32)
        self.head, self.tail = 0, len(ids)
        self._log[: len(ids)] = ids
        place[ids] = self._places(0, len(ids))


class _Ghosts:
    """Names of blocks that went not long ago, in a table: of two whose place is the same the later one stays.

    Args:
        capacity: so many that came last are remembered, but for one in ten.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        bits = (4 * capacity).bit_length()
        self._mask = (1 << bits) - 1
        self._names = np.zeros(1 << bits, dtype=np.uint64)
        self._came = np.zeros(1 << bits, dtype=np.int64)
        """When each came, in names that came before; 0: it is none."""
        self._now = 0

    def add(self, names: ShortHashes) -> None:
        """Remember these."""
        count = len(names)
        if count:
            place = self._place(names)
            self._names[place] = names
            self._came[place] = np.arange(self._now + 1, self._now + 1 + count)
            self._now += count

    def take(self, names: ShortHashes) -> _Bools:
        """bool [n]: which of these are remembered; these are not any more."""
        place = self._place(names)
        found: _Bools = self._names[place] == names
        if np.count_nonzero(found):
            found &= self._came[place] > max(0, self._now - self._capacity)
            self._came[place[found]] = 0
        return found

    def grown(self, capacity: int) -> _Ghosts:
        """The same names in a table for more."""
        grown = _Ghosts(capacity)
        order = np.argsort(self._came)
        grown.add(self._names[order[self._came[order] > max(0, self._now - self._capacity)]])
        return grown

    def _place(self, names: ShortHashes) -> npt.NDArray[np.intp]:
        # They are hashes already.
        place: npt.NDArray[np.intp] = names.view(np.intp) & self._mask
        return place
