"""Which blocks of a tier others there follow: so that a policy lets a prefix's leaves go before its root.

A block without those before it is found by nobody. Who ranks blocks one by one asks here in which order some
of them may go.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..tiers.errors import IntegrityError
from .lineage import ShortHashes
from .policy import BlockFacts, Ids

__all__ = ["ChainLeaves"]

_Indices = npt.NDArray[np.intp]


class ChainLeaves:
    """Counts, of each block of a tier, the blocks there that come next in a chain. Of ids below a capacity.

    Blocks are known by the first 8 bytes of their hashes; two that begin alike count as one, and one of them
    may then go too early.

    Attributes:
        names, parents, depths: of each id, as of `BlockFacts`.
        followers: int32 [capacity], how many blocks come next after each.
    """

    def __init__(self, capacity: int = 0) -> None:
        self.names: ShortHashes = np.zeros(capacity, dtype=np.uint64)
        self.parents: ShortHashes = np.zeros(capacity, dtype=np.uint64)
        self.depths = np.zeros(capacity, dtype=np.int32)
        self.followers = np.zeros(capacity, dtype=np.int32)
        self._ids: dict[int, int] = {}
        """Of a name, the id."""
        self._waiting: dict[int, int] = {}
        """Of a name that is not here, how many blocks follow it."""

    def resize(self, capacity: int) -> None:
        """Ids up to `capacity` - 1 may come."""
        for name in ("names", "parents", "depths", "followers"):
            before = getattr(self, name)
            if capacity > len(before):
                grown = np.zeros(capacity, dtype=before.dtype)
                grown[: len(before)] = before
                setattr(self, name, grown)

    def admit(self, ids: Ids, facts: BlockFacts) -> None:
        """These ids hold these blocks from now on."""
        at = ids.astype(np.intp)
        names, parents = facts.names, facts.parents
        self.names[at], self.parents[at], self.depths[at] = names, parents, facts.depths
        self.followers[at] = 0
        listed = names.tolist()
        self._ids.update(zip(listed, ids.tolist(), strict=True))
        # Of a run of blocks all but the first one follow the one before them.
        follows = np.zeros(len(ids), dtype=np.bool_)
        np.equal(parents[1:], names[:-1], out=follows[1:])
        follows &= parents != 0
        self.followers[at[:-1][follows[1:]]] = 1
        others = (~follows & (parents != 0)).nonzero()[0]
        if len(others):
            found, missing = self._find(parents[others].tolist())
            np.add.at(self.followers, found, 1)
            for name in missing:
                self._waiting[name] = self._waiting.get(name, 0) + 1
        if self._waiting:
            for name in self._waiting.keys() & set(listed):
                self.followers[self._ids[name]] += self._waiting.pop(name)

    def let_go(self, ids: Ids) -> _Indices:
        """Those that these follow count them no more, until `take_back`, or for ever with `forget`.

        So it is found out what else may go once these are gone.

        Returns:
            intp [m], the ids of these, some more than once.
        """
        at = ids.astype(np.intp)
        names, parents = self.names[at], self.parents[at]
        follows = np.zeros(len(ids), dtype=np.bool_)
        np.equal(parents[:-1], names[1:], out=follows[:-1])
        follows &= parents != 0
        before = at[1:][follows[:-1]]
        others = (~follows & (parents != 0)).nonzero()[0]
        if len(others):
            found, _ = self._find(parents[others].tolist())
            before = np.concatenate([before, found])
        np.subtract.at(self.followers, before, 1)
        return before

    def take_back(self, before: _Indices) -> None:
        """Undo a `let_go`, which returned this."""
        np.add.at(self.followers, before, 1)

    def forget(self, ids: Ids) -> None:
        """These blocks are gone, after `let_go`."""
        at = ids.astype(np.intp)
        names = self.names[at].tolist()
        if self._waiting:
            for name in self.parents[at].tolist():
                if name in self._waiting:
                    self._waiting[name] -= 1
                    if not self._waiting[name]:
                        del self._waiting[name]
        for name, one in zip(names, ids.tolist(), strict=True):
            if self._ids.get(name) == one:
                del self._ids[name]
        left = self.followers[at]
        if left.any():
            for which in left.nonzero()[0].tolist():
                self._waiting[names[which]] = self._waiting.get(names[which], 0) + int(left[which])
            self.followers[at] = 0
        self.names[at] = 0
        self.parents[at] = 0

    def parent_of(self, one: int) -> int | None:
        """The block that this one follows, if it is here."""
        parent = int(self.parents[one])
        return self._ids.get(parent) if parent else None

    def _find(self, names: list[int]) -> tuple[_Indices, list[int]]:
        """The ids of those of these that are here, and the names of the others."""
        found = list(map(self._ids.get, names))
        here = [one for one in found if one is not None]
        missing = [] if len(here) == len(names) else [name for name in names if name not in self._ids]
        return np.array(here, dtype=np.intp), missing

    def leaves_first(self, ids: Ids) -> tuple[list[Ids], list[_Indices], Ids]:
        """Which of these may go without a block being left behind that follows one of them, and in which order.

        Those are let go.

        Args:
            ids: in the order in which they would go otherwise.

        Returns:
            ids that may go, in parts; what `let_go` returned, of each; and the ids that may not.
        """
        going: list[Ids] = []
        before: list[_Indices] = []
        while len(ids):
            followers = self.followers[ids]
            may_go = followers == 0
            # Nearly always they are whole ends of chains from the last block on, each with one follower.
            if not may_go.all():
                may_go = self._after_their_follower(ids, followers)
                if not may_go.any():
                    break
            chosen = ids[may_go]
            going.append(chosen)
            before.append(self.let_go(chosen))
            ids = ids[~may_go]
        return going, before, ids

    def _after_their_follower(self, ids: Ids, followers: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """bool [n]: which have no follower, or one that stands just before them here and may go as well."""
        after = np.zeros(len(ids), dtype=np.bool_)
        np.equal(self.parents[ids[:-1]], self.names[ids[1:]], out=after[1:])
        after &= followers == 1
        run = np.maximum.accumulate(np.where(after, 0, np.arange(len(ids))))
        may_go: npt.NDArray[np.bool_] = followers[run] == 0
        return may_go

    def check_integrity(self, ids: Ids) -> None:
        """Prove the counts, where these are all the blocks that there are.

        Raises:
            IntegrityError: a count is wrong.
        """
        counted = np.zeros_like(self.followers)
        waiting: dict[int, int] = {}
        for name in self.parents[ids].tolist():
            if name in self._ids:
                counted[self._ids[name]] += 1
            elif name:
                waiting[name] = waiting.get(name, 0) + 1
        if not np.array_equal(counted, self.followers) or waiting != self._waiting:
            raise IntegrityError("a block is not followed by as many as is said of it")
