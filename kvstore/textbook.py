"""Textbook policies, and Belady's MIN: what a simulation compares the store's own policies with.

Each is a cache of blocks, known by number, that is told of one event at a time. Within an event the chain's
last block counts as used first, so that leaves go before roots, and room is made once the whole event is
in. They rank single blocks, and know nothing of chains, sizes or costs.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from ..tiers.settings import expect_integer
from .trace import Trace

__all__ = ["TEXTBOOK", "BeladyMIN", "TextbookCache"]


class TextbookCache(Protocol):
    """A cache of so many blocks."""

    def __contains__(self, block: object) -> bool:
        """Whether a block is there."""
        ...

    def use(self, event: int, blocks: Sequence[int]) -> None:
        """Blocks of one event, in the order of their chain, are used; those that are not there come in."""
        ...


class _LRU:
    """Least recently used."""

    def __init__(self, capacity: int) -> None:
        self._capacity = expect_integer("capacity", capacity, 1)
        self._queue: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: object) -> bool:
        return block in self._queue

    def use(self, event: int, blocks: Sequence[int]) -> None:
        queue = self._queue
        for block in reversed(blocks):
            if block in queue:
                queue.move_to_end(block)
            else:
                queue[block] = None
        while len(queue) > self._capacity:
            queue.popitem(last=False)


class _FIFO(_LRU):
    """First in, first out."""

    def use(self, event: int, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._queue.setdefault(block)
        while len(self._queue) > self._capacity:
            self._queue.popitem(last=False)


class _LFU:
    """Least frequently used while it was there; of equals the one whose last use is longest ago."""

    def __init__(self, capacity: int) -> None:
        self._capacity = expect_integer("capacity", capacity, 1)
        self._uses: dict[int, int] = {}
        self._heap: list[tuple[int, int, int]] = []
        """Uses, when it was, block; entries of fewer uses than a block has are passed over."""
        self._clock = 0

    def __contains__(self, block: object) -> bool:
        return block in self._uses

    def use(self, event: int, blocks: Sequence[int]) -> None:
        uses, heap = self._uses, self._heap
        for block in reversed(blocks):
            self._clock += 1
            uses[block] = count = uses.get(block, 0) + 1
            heapq.heappush(heap, (count, self._clock, block))
        while len(uses) > self._capacity:
            count, _, block = heapq.heappop(heap)
            if uses.get(block) == count:
                del uses[block]


class _CLOCK:
    """Second chance (Corbató 1968): what was used since the hand came by goes round once more."""

    def __init__(self, capacity: int) -> None:
        self._capacity = expect_integer("capacity", capacity, 1)
        self._used: OrderedDict[int, bool] = OrderedDict()

    def __contains__(self, block: object) -> bool:
        return block in self._used

    def use(self, event: int, blocks: Sequence[int]) -> None:
        used = self._used
        for block in reversed(blocks):
            used[block] = block in used
        while len(used) > self._capacity:
            block, was_used = used.popitem(last=False)
            if was_used:
                used[block] = False


class _SIEVE:
    """SIEVE (Zhang and others, NSDI'24): the hand goes from the oldest to the newest; what was used stays
    where it is, and loses its mark."""

    def __init__(self, capacity: int) -> None:
        self._capacity = expect_integer("capacity", capacity, 1)
        self._used: dict[int, bool] = {}
        self._newer: dict[int, int | None] = {}
        self._older: dict[int, int | None] = {}
        self._newest: int | None = None
        self._oldest: int | None = None
        self._hand: int | None = None

    def __contains__(self, block: object) -> bool:
        return block in self._used

    def use(self, event: int, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if block in self._used:
                self._used[block] = True
            else:
                self._push(block)
        while len(self._used) > self._capacity:
            self._evict()

    def _push(self, block: int) -> None:
        self._used[block] = False
        self._newer[block], self._older[block] = None, self._newest
        if self._newest is not None:
            self._newer[self._newest] = block
        self._newest = block
        if self._oldest is None:
            self._oldest = block

    def _evict(self) -> None:
        at = self._oldest if self._hand is None else self._hand
        while at is not None and self._used[at]:
            self._used[at] = False
            at = self._newer[at] if self._newer[at] is not None else self._oldest
        if at is None:
            return
        del self._used[at]
        self._hand = newer = self._newer.pop(at)
        older = self._older.pop(at)
        if newer is None:
            self._newest = older
        else:
            self._older[newer] = older
        if older is None:
            self._oldest = newer
        else:
            self._newer[older] = newer


class _S3FIFO:
    """S3-FIFO (Yang and others, SOSP'23): a small queue in which most blocks end, a main one, and a ghost
    queue of as many names as there are blocks, by which what comes back goes to the main one."""

    _SMALL_SHARE: Final = 10
    _MOST_USES: Final = 3

    def __init__(self, capacity: int) -> None:
        self._capacity = expect_integer("capacity", capacity, 1)
        self._small: OrderedDict[int, int] = OrderedDict()
        self._main: OrderedDict[int, int] = OrderedDict()
        self._ghost: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: object) -> bool:
        return block in self._small or block in self._main

    def use(self, event: int, blocks: Sequence[int]) -> None:
        small, main, ghost = self._small, self._main, self._ghost
        for block in reversed(blocks):
            if block in small:
                small[block] = min(self._MOST_USES, small[block] + 1)
            elif block in main:
                main[block] = min(self._MOST_USES, main[block] + 1)
            elif block in ghost:
                del ghost[block]
                main[block] = 0
            else:
                small[block] = 0
        while len(small) + len(main) > self._capacity:
            if len(small) > self._capacity // self._SMALL_SHARE or not main:
                block, uses = small.popitem(last=False)
                if uses > 1:
                    main[block] = uses
                else:
                    ghost[block] = None
                    if len(ghost) > self._capacity:
                        ghost.popitem(last=False)
            else:
                block, uses = main.popitem(last=False)
                if uses:
                    main[block] = uses - 1


TEXTBOOK: Final[dict[str, Callable[[int], TextbookCache]]] = {
    "LRU": _LRU,
    "LFU": _LFU,
    "FIFO": _FIFO,
    "CLOCK": _CLOCK,
    "SIEVE": _SIEVE,
    "S3-FIFO": _S3FIFO,
}
"""Makes a cache of so many blocks, by name."""


class BeladyMIN:
    """Belady's MIN, which knows what comes: the block that is looked up again last goes first.

    Of those that are never looked up again, the deepest of a chain.

    Args:
        trace: what comes.
        capacity: blocks.
    """

    def __init__(self, trace: Trace, capacity: int) -> None:
        self._capacity = expect_integer("capacity", capacity, 1)
        self._uses = _uses(trace)
        self._until: dict[int, int] = {}
        """When each block that is there is looked up again."""
        self._heap: list[tuple[int, int, int]] = []

    def __contains__(self, block: object) -> bool:
        return block in self._until

    def use(self, event: int, blocks: Sequence[int]) -> None:
        until, heap = self._until, self._heap
        for place, block in enumerate(blocks):
            uses = self._uses[block]
            while uses[-1] <= event:
                uses.pop()
            until[block] = again = uses[-1]
            heapq.heappush(heap, (-again, -place, block))
        while len(until) > self._capacity:
            again, _, block = heapq.heappop(heap)
            if until.get(block) == -again:
                del until[block]


def _uses(trace: Trace) -> list[list[int]]:
    """Of each block the events that look it up, the last one first, and before them one that never comes."""
    uses = [[len(trace)] for _ in range(trace.distinct)]
    for event in range(len(trace) - 1, -1, -1):
        for block in trace.chain(event)[: trace.asked[event]].tolist():
            uses[block].append(event)
    return uses
