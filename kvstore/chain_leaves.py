"""Which blocks of a tier others there follow: so that a policy lets a prefix's leaves go before its root.

A block without those before it is found by nobody. Who ranks blocks one by one asks here in which order some
of them may go.
"""

from __future__ import annotations

from itertools import repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..tiers.errors import IntegrityError
from .lineage import ShortHashes
from .policy import BlockFacts, Ids

__all__ = ["ChainLeaves", "Followed"]

_Indices = npt.NDArray[np.intp]
_Bools = npt.NDArray[np.bool_]


class Followed(NamedTuple):
    """Blocks that others followed which were let go: once for each of these."""

    at: _Indices
    """No block twice."""
    more: list[int]

    def ids(self) -> _Indices:
        """All of them, some more than once."""
        return np.concatenate([self.at, np.array(self.more, dtype=np.intp)]) if self.more else self.at


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
        if not len(ids):
            return
        at = ids.astype(np.intp)
        names, parents = facts.names, facts.parents
        self.names[at], self.parents[at], self.depths[at] = names, parents, facts.depths
        self.followers[at] = 0
        listed = names.tolist()
        self._ids.update(zip(listed, ids.tolist(), strict=True))
        # Of a run of blocks all but the first one follow the one before them.
        others = parents[:1].tolist()
        if parents[1:].all() and parents[1:].tobytes() == names[:-1].tobytes():
            self.followers[at[:-1]] = 1
        else:
            follows = parents[1:] == names[:-1]
            follows &= parents[1:] != 0
            self.followers[at[:-1][follows]] = 1
            others += parents[1:][~follows].tolist()
        for name in others:
            if name:
                found = self._ids.get(name)
                if found is None:
                    self._waiting[name] = self._waiting.get(name, 0) + 1
                else:
                    self.followers[found] += 1
        if self._waiting:
            for name in self._waiting.keys() & set(listed):
                self.followers[self._ids[name]] += self._waiting.pop(name)

    def let_go(self, ids: Ids) -> Followed:
        """Those that these follow count them no more, until `take_back`, or for ever with `forget`.

        So it is found out what else may go once these are gone.
        """
        at = ids.astype(np.intp)
        names, parents = self.names[at], self.parents[at]
        return self._let_go(at, parents, _next_is_parent(names, parents))

    def take_back(self, followed: Followed) -> None:
        """Undo a `let_go`, which returned this."""
        self.followers[followed.at] += 1
        for one in followed.more:
            self.followers[one] += 1

    def forget(self, ids: Ids) -> None:
        """These blocks are gone, after `let_go`."""
        at = ids.astype(np.intp)
        names, listed = self.names[at].tolist(), ids.tolist()
        if self._waiting:
            for name in self.parents[at].tolist():
                if name in self._waiting:
                    self._waiting[name] -= 1
                    if not self._waiting[name]:
                        del self._waiting[name]
        popped = list(map(self._ids.pop, names, repeat(None)))
        if popped != listed:
            # Others that begin alike came later, and stay.
            gone = set(listed)
            self._ids.update(
                (name, one)
                for name, one in zip(names, popped, strict=True)
                if one is not None and one not in gone
            )
        left = self.followers[at]
        if np.count_nonzero(left):
            for which in left.nonzero()[0].tolist():
                self._waiting[names[which]] = self._waiting.get(names[which], 0) + int(left[which])
            self.followers[at] = 0
        self.names[at] = 0
        self.parents[at] = 0

    def parent_of(self, one: int) -> int | None:
        """The block that this one follows, if it is here."""
        parent = int(self.parents[one])
        return self._ids.get(parent) if parent else None

    def leaves_first(self, ids: Ids) -> tuple[list[Ids], list[Followed], Ids]:
        """Which of these may go, in which order, so that none is left behind that follows one of them.

        Those are let go.

        Args:
            ids: in the order in which they would go otherwise.

        Returns:
            ids that may go, in parts; what `let_go` returned, of each; and the ids that may not.
        """
        going: list[Ids] = []
        followed: list[Followed] = []
        while len(ids):
            at = ids.astype(np.intp)
            parents = self.parents[at]
            next_is_parent = _next_is_parent(self.names[at], parents)
            followers = self.followers[at]
            # Nearly always they are whole ends of chains from the last block on, each with one follower.
            if np.count_nonzero(followers):
                may_go = _after_their_follower(followers, next_is_parent)
                count = np.count_nonzero(may_go)
                if not count:
                    break
                if count < len(ids):
                    chosen = ids[may_go]
                    going.append(chosen)
                    followed.append(self.let_go(chosen))
                    ids = ids[~may_go]
                    continue
            going.append(ids)
            followed.append(self._let_go(at, parents, next_is_parent))
            ids = ids[:0]
        return going, followed, ids

    def _let_go(self, at: _Indices, parents: ShortHashes, next_is_parent: _Bools) -> Followed:
        followed = at[1:][next_is_parent]
        self.followers[followed] -= 1
        more: list[int] = []
        for name in [*parents[:-1][~next_is_parent].tolist(), *parents[-1:].tolist()]:
            if name and (found := self._ids.get(name)) is not None:
                self.followers[found] -= 1
                more.append(found)
        return Followed(followed, more)

    def check_integrity(self, ids: Ids) -> None:
        """Prove the counts, where these are all the blocks that there are.

        Raises:
            IntegrityError: a count is wrong.
        """
        counted = np.zeros_like(self.followers)
        waiting: dict[int, int] = {}
        for name in self.parents[ids].tolist():
            if name and name in self._ids:
                counted[self._ids[name]] += 1
            elif name:
                waiting[name] = waiting.get(name, 0) + 1
        if not np.array_equal(counted, self.followers) or waiting != self._waiting:
            raise IntegrityError("a block is not followed by as many as is said of it")


def _next_is_parent(names: ShortHashes, parents: ShortHashes) -> _Bools:
    """bool [n - 1]: which of n blocks, but for the last, stand just before the one that they follow."""
    there: _Bools = parents[:-1] == names[1:]
    there &= parents[:-1] != 0
    return there


def _after_their_follower(followers: npt.NDArray[np.int32], next_is_parent: _Bools) -> _Bools:
    """bool [n]: which have no follower, or one that stands just before them and may go as well."""
    after = next_is_parent & (followers[1:] == 1)
    if not followers[0] and np.count_nonzero(after) == len(after):
        return np.ones(len(followers), dtype=np.bool_)
    run = np.arange(len(followers))
    run[1:][after] = 0
    may_go: _Bools = followers[np.maximum.accumulate(run)] == 0
    return may_go
