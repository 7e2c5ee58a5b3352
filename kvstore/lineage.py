"""The lineage of blocks: which block each one follows in its chain, and how far it is from the beginning.

A block's hash names everything before it, and does not say what that is. Who computed a chain knows; what he
tells is kept for operators and for policies that rank chains, and nothing else depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ..tiers.errors import ConfigError
from ..tiers.settings import expect_array, expect_byte_strings, expect_bytes, expect_integer, expect_type
from .hashing import HASH_BYTES

__all__ = [
    "CHAIN_START",
    "NO_PARENT",
    "Ancestors",
    "ChainPlace",
    "Lineage",
    "ShortHashes",
    "expect_lineage",
    "expect_place",
    "short_hashes",
    "shortened",
]

NO_PARENT: Final = bytes(HASH_BYTES)
"""Stands for the parent of a chain's first block, and for one that is not known."""
ShortHashes: TypeAlias = npt.NDArray[np.uint64]
"""uint64 [n]: the first 8 bytes, little-endian, of each of n hashes; 0: none, or not known."""
_INT32: Final = np.dtype(np.int32)
_DEEPEST: Final = np.iinfo(np.int32).max


@dataclass(frozen=True)
class ChainPlace:
    """Where in its chain a run of blocks begins: at the chain's beginning where nothing is said.

    Args:
        before: hash of the block before the first one; zeros: none, or not known.
        depth: 1-based index of the first one in its chain.

    Raises:
        ConfigError: `before` is no hash, `depth` out of range, or something is to be before the first block.
    """

    before: bytes = NO_PARENT
    depth: int = 1

    def __post_init__(self) -> None:
        expect_bytes("before", self.before, HASH_BYTES)
        expect_integer("depth", self.depth, 1, _DEEPEST)
        if self.depth == 1 and self.before != NO_PARENT:
            raise ConfigError("before", "must be zeros for the first block of a chain")

    @classmethod
    def at(cls, chain: Sequence[bytes], index: int) -> ChainPlace:
        """Where a chain goes on after its first `index` blocks; `chain` has these at least."""
        return cls(chain[index - 1], index + 1) if index else CHAIN_START

    def after(self, hashes: Sequence[bytes]) -> ChainPlace:
        """Where the blocks begin that follow these, which begin here."""
        return ChainPlace(hashes[-1], self.depth + len(hashes)) if hashes else self


CHAIN_START: Final = ChainPlace()


@dataclass(frozen=True, eq=False)
class Lineage:
    """What is known of the chains that n blocks are of.

    Args:
        parents: n hashes, of the block before each; zeros: it is the first of its chain, or not known.
        depths: int32 [n], 1-based index of each in its chain; 0: not known.

    Raises:
        ConfigError: `parents` are no hashes, `depths` no such numbers or not one for each, or the first block
            of a chain is to have a parent.
    """

    parents: Sequence[bytes]
    depths: npt.NDArray[np.int32]

    def __post_init__(self) -> None:
        parents = expect_byte_strings("parents", self.parents, HASH_BYTES)
        depths = expect_array("depths", self.depths, _INT32)
        if len(depths) != len(parents):
            raise ConfigError("depths", f"must be one for each of {len(parents)} parents, got {len(depths)}")
        if (depths < 0).any():
            raise ConfigError("depths", f"must be at least 0, got {depths.min()}")
        for at in np.flatnonzero(depths == 1).tolist():
            if parents[at] != NO_PARENT:
                raise ConfigError("parents", "must be zeros for the first block of a chain")
        object.__setattr__(self, "parents", parents)
        object.__setattr__(self, "depths", depths)

    @classmethod
    def unchecked(cls, parents: Sequence[bytes], depths: npt.NDArray[np.int32]) -> Lineage:
        """`Lineage` that trusts its arguments: for what is made of hashes of `kvstore.hashing`, in a step."""
        made = object.__new__(cls)
        object.__setattr__(made, "parents", parents)
        object.__setattr__(made, "depths", depths)
        return made

    @classmethod
    def of_chain(cls, hashes: Sequence[bytes], start: ChainPlace = CHAIN_START) -> Lineage:
        """The lineage of blocks that follow each other.

        Args:
            hashes: of the blocks in order, 16 bytes each.
            start: where in its chain the first one is.

        Raises:
            ConfigError: the chain would be deeper than 2^31 - 1 blocks.
        """
        expect_place(start, count := len(hashes))
        parents = (start.before, *hashes[:-1]) if count else ()
        return cls.unchecked(parents, np.arange(start.depth, start.depth + count, dtype=np.int32))

    @classmethod
    def in_chain(cls, chain: Sequence[bytes], indices: npt.NDArray[np.int64]) -> Lineage:
        """That of the blocks of a whole chain at these indices, int64 [n]."""
        parents = [chain[at - 1] if at else NO_PARENT for at in indices.tolist()]
        return cls.unchecked(parents, (indices + 1).astype(np.int32))

    def __len__(self) -> int:
        return len(self.depths)

    @property
    def short_parents(self) -> ShortHashes:
        """The parents as the records of slots have them, uint64 [n]."""
        return shortened(self.parents)

    def take(self, positions: npt.NDArray[np.int64]) -> Lineage:
        """That of the blocks at these positions, int64 [m], ascending and none twice."""
        if len(positions) == len(self):
            return self
        return Lineage.unchecked([self.parents[at] for at in positions.tolist()], self.depths[positions])


def expect_lineage(lineage: object, count: int) -> Lineage | None:
    """The lineage, if it is None or one of so many blocks.

    Raises:
        ConfigError: it is neither.
    """
    if lineage is None:
        return None
    known = expect_type("lineage", lineage, Lineage, "a Lineage or None")
    if len(known) != count:
        raise ConfigError("lineage", f"must be of the {count} blocks, is of {len(known)}")
    return known


def expect_place(start: object, count: int) -> ChainPlace | None:
    """The place in a chain of so many blocks, if it is one or None.

    Raises:
        ConfigError: it is neither, or the chain would be deeper than 2^31 - 1 blocks.
    """
    if start is None:
        return None
    place = expect_type("start", start, ChainPlace, "a ChainPlace or None")
    if place.depth > _DEEPEST - count:
        raise ConfigError("depth", f"must leave room for {count} blocks, got {place.depth}")
    return place


def shortened(hashes: Sequence[bytes]) -> ShortHashes:
    """The first 8 bytes of each hash, uint64 [n]."""
    short: ShortHashes = np.frombuffer(b"".join(hashes), dtype="<u8")[::2].astype(np.uint64)
    return short


def short_hashes(hashes: npt.NDArray[np.void]) -> ShortHashes:
    """The first 8 bytes of each hash of an array, V16 [n] to uint64 [n]."""
    short: ShortHashes = np.ascontiguousarray(hashes).view("<u8")[::2].astype(np.uint64)
    return short


class Ancestors:
    """Finds the blocks before a block among many, by what records of slots say.

    Args:
        hashes: V16 [n], the blocks' own.
        parents: uint64 [n], the first 8 bytes of their parents'.
        depths: int32 [n], their places in their chains; 0: not known.
    """

    def __init__(
        self, hashes: npt.NDArray[np.void], parents: ShortHashes, depths: npt.NDArray[np.int32]
    ) -> None:
        self._hashes = hashes
        self._parents = parents
        self._depths = depths
        self._order: npt.NDArray[np.intp] | None = None
        self._sorted = np.empty(0, dtype=np.uint64)

    def parent(self, at: int) -> int | None:
        """The position of the block before the one at `at`; None where it is not there or not known."""
        short, depth = self._parents[at], int(self._depths[at])
        if not short:
            return None
        order = self._by_hash()
        first, end = np.searchsorted(self._sorted, short), np.searchsorted(self._sorted, short, "right")
        for found in order[first:end].tolist():
            # Others' hashes may begin alike.
            if not depth or int(self._depths[found]) in (0, depth - 1):
                return int(found)
        return None

    def chain(self, at: int) -> list[bytes]:
        """Hashes from the first block of a chain to the one at `at`, as far back as they are there."""
        chain = [at]
        seen = {at}
        while (before := self.parent(chain[-1])) is not None and before not in seen:
            chain.append(before)
            seen.add(before)
        names: list[bytes] = self._hashes[chain[::-1]].tolist()
        return names

    def _by_hash(self) -> npt.NDArray[np.intp]:
        """The positions in the order of their short hashes, which are sorted when they are needed."""
        if self._order is None:
            short = short_hashes(self._hashes)
            self._order = np.argsort(short, kind="stable")
            self._sorted = short[self._order]
        return self._order
