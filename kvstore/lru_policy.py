"""The `lru` policy: what was used least recently goes first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Unpack

import numpy as np
import numpy.typing as npt

from ..tiers.errors import IntegrityError
from ..tiers.settings import expect_integer
from .policy import MOST_BLOCKS, BlockFacts, Ids, PolicyOptions, Retention, Weight

__all__ = ["LRUPolicy"]


class LRUPolicy:
    """Least recently used, on arrays.

    Insertions are appended to a log; `_place[id]` is where the id's valid entry stands, plus one. Entries
    that were superseded stay in the log until the head passes them or the log is compacted, so every
    operation is a few array operations whatever the batch, O(1) per id amortised. A look at the coldest
    entries moves them together, so that what was superseded between them is passed once.

    A prefix's leaves go before its root by the order of insertions: who uses a block uses those before it in
    its chain, and inserts these after it.

    Args:
        capacity: ids are below it, until `resize`.
        options: which every policy is given; this one needs none of it, and has no weights.

    Raises:
        ConfigError: `capacity` is out of range.
    """

    known_weights: ClassVar[Mapping[str, Weight]] = {}
    learns: ClassVar[bool] = False

    def __init__(self, capacity: int = 0, **options: Unpack[PolicyOptions]) -> None:
        capacity = expect_integer("capacity", capacity, 0, MOST_BLOCKS)
        self._place = np.zeros(capacity, dtype=np.int64)
        self._log = np.empty(max(64, 2 * capacity), dtype=np.int32)
        self._head = 0
        self._tail = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def resize(self, capacity: int) -> None:
        if capacity > len(self._place):
            grown = np.zeros(capacity, dtype=np.int64)
            grown[: len(self._place)] = self._place
            self._place = grown
        if not self._tail:
            self._log = np.empty(max(64, 2 * capacity), dtype=np.int32)

    def admit(self, ids: Ids, facts: BlockFacts) -> None:
        """It ranks by `insert` alone."""

    def found(self, ids: Ids) -> None:
        """A use is told by `remove` and `insert`."""

    def missed(self, facts: BlockFacts) -> None:
        """What is not here has no rank."""

    def retain(self, ids: Ids, retention: Retention) -> None:
        """It takes no advice."""

    def wanted(self, facts: BlockFacts, room: int) -> npt.NDArray[np.bool_]:
        return np.ones(len(facts), dtype=np.bool_)

    def insert(self, ids: Ids) -> None:
        count = len(ids)
        if self._tail + count > len(self._log):
            self._compact(count)
        tail = self._tail + count
        self._log[self._tail : tail] = ids
        at = ids.astype(np.intp)  # indices of any other type are made so each time
        self._count += count - int(np.count_nonzero(self._place[at]))
        self._place[at] = np.arange(self._tail + 1, tail + 1)
        self._tail = tail

    def remove(self, ids: Ids) -> None:
        at = ids.astype(np.intp)
        self._count -= int(np.count_nonzero(self._place[at]))
        self._place[at] = 0

    def forget(self, ids: Ids, *, chosen: bool = False) -> None:
        self.remove(ids)

    def demote(self, ids: Ids) -> int:
        ids = ids[self._place[ids] > 0]
        count = len(ids)
        if self._head < count:
            self._compact(0, before=count)
        # Their entries further on are superseded by these.
        self._log[self._head - count : self._head] = ids
        self._place[ids] = np.arange(self._head - count + 1, self._head + 1)
        self._head -= count
        return count

    def coldest(self, count: int) -> Ids:
        ids, stop = self._scan(count)
        self._head = stop - len(ids)
        self._log[self._head : stop] = ids
        self._place[ids] = np.arange(self._head + 1, stop + 1)
        return ids

    def evict(self, count: int) -> Ids:
        ids, self._head = self._scan(count)
        self._place[ids] = 0
        self._count -= len(ids)
        return ids

    def _scan(self, count: int) -> tuple[Ids, int]:
        """The first `count` valid entries from the head, and the position after the last of them."""
        left = min(count, self._count)
        found: list[Ids] = []
        at = self._head
        span = max(64, 2 * left)
        while left > 0:
            stop = min(self._tail, at + span)
            if stop == at:
                raise IntegrityError(f"lru: {self._count} counted, {left} of them are not in the log")
            entries = self._log[at:stop]
            valid = np.flatnonzero(self._place[entries] == np.arange(at + 1, stop + 1))[:left]
            found.append(entries[valid])
            left -= len(valid)
            at = at + int(valid[-1]) + 1 if left == 0 else stop
            span *= 2
        return (np.concatenate(found) if found else np.empty(0, np.int32)), at

    def _compact(self, room: int, before: int = 0) -> None:
        entries = self._log[self._head : self._tail]
        live = entries[self._place[entries] == np.arange(self._head + 1, self._tail + 1)]
        # Twice what is live: the next compaction is as many insertions away as it moves entries.
        if len(self._log) < 2 * (len(live) + room + before):
            self._log = np.empty(4 * (len(live) + room + before), dtype=np.int32)
        self._head, self._tail = before, before + len(live)
        self._log[self._head : self._tail] = live
        self._place[live] = np.arange(self._head + 1, self._tail + 1)

    def check_integrity(self) -> None:
        entries = self._log[self._head : self._tail]
        live = entries[self._place[entries] == np.arange(self._head + 1, self._tail + 1)]
        placed = np.flatnonzero(self._place)
        if len(live) != self._count or not np.array_equal(np.sort(live), placed):
            raise IntegrityError(f"lru: {self._count} counted, {len(live)} in the log, {len(placed)} placed")
