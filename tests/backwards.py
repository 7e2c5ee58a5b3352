"""A policy of nobody's use, and in plain lists: it is strict about what it is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Unpack

import numpy as np
import numpy.typing as npt
from kvpager.kvstore.policy import BlockFacts, Ids, PolicyOptions, Retention, Weight
from kvpager.tiers.errors import IntegrityError

__all__ = ["Backwards"]


class Backwards:
    """What came last goes first."""

    known_weights: ClassVar[Mapping[str, Weight]] = {}
    learns: ClassVar[bool] = True

    def __init__(self, capacity: int = 0, **options: Unpack[PolicyOptions]) -> None:
        self._order: list[int] = []
        self._here: set[int] = set()
        """Those admitted and not forgotten."""

    def __len__(self) -> int:
        return len(self._order)

    def admit(self, ids: Ids, facts: BlockFacts) -> None:
        new = set(ids.tolist())
        if len(facts) != len(ids) or new & self._here:
            raise IntegrityError("a block was admitted without its facts, or twice")
        self._here |= new

    def found(self, ids: Ids) -> None:
        self._expect_here(ids)

    def missed(self, facts: BlockFacts) -> None:
        pass

    def wanted(self, facts: BlockFacts, room: int) -> npt.NDArray[np.bool_]:
        return np.ones(len(facts), dtype=np.bool_)

    def retain(self, ids: Ids, retention: Retention) -> None:
        self._expect_here(ids)

    def forget(self, ids: Ids, *, chosen: bool = False) -> None:
        self._expect_here(ids)
        self.remove(ids)
        self._here -= set(ids.tolist())

    def _expect_here(self, ids: Ids) -> None:
        if not set(ids.tolist()) <= self._here:
            raise IntegrityError("a block is spoken of that was not admitted")

    def insert(self, ids: Ids) -> None:
        self._expect_here(ids)
        self.remove(ids)
        # Carried over are the coldest first; here the first of the list goes first.
        self._order = [*self._order, *ids.tolist()] if not self._order else [*ids.tolist(), *self._order]

    def remove(self, ids: Ids) -> None:
        gone = set(ids.tolist())
        self._order = [one for one in self._order if one not in gone]

    def demote(self, ids: Ids) -> int:
        there = [one for one in ids.tolist() if one in set(self._order)]
        self.remove(np.array(there, np.int32))
        self._order = [*there, *self._order]
        return len(there)

    def coldest(self, count: int) -> Ids:
        return np.array(self._order[:count], np.int32)

    def evict(self, count: int) -> Ids:
        gone = self.coldest(count)
        self.forget(gone)
        return gone

    def resize(self, capacity: int) -> None:
        pass

    def check_integrity(self) -> None:
        if len(set(self._order)) != len(self._order):
            raise IntegrityError("a block is ranked twice")
