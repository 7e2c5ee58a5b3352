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
    "UNKNOWN_PLACE",
    "Ancestors",
    "ChainPlace",
    "Lineage",
    "Words",
    "expect_lineage",
    "first_words",
]

NO_PARENT: Final = bytes(HASH_BYTES)
"""Stands for the parent of a chain's first block, and for one that is not known."""
Words: TypeAlias = npt.NDArray[np.uint64]
"""uint64 [n]: the first 8 bytes, little-endian, of each of n hashes; 0: none, or not known."""
_INT32: Final = np.dtype(np.int32)
_DEEPEST: Final = np.iinfo(np.int32).max


@dataclass(frozen=True)
class ChainPlace:
    """Where in its chain a run of blocks begins: at the chain's beginning where nothing is said.

    Args:
        before: hash of the block before the first one; zeros: none, or not known.
        depth: 1-based index of the first one in its chain; 0: not known.

    Raises:
        ConfigError: `before` is no hash, `depth` out of range, or something is to be before the first block.
    """

    before: bytes = NO_PARENT
    depth: int = 1

    def __post_init__(self) -> None:
        expect_bytes("before", self.before, HASH_BYTES)
        expect_integer("depth", self.depth, 0, _DEEPEST)
        if self.depth == 1 and self.before != NO_PARENT:
            raise ConfigError("before", "must be zeros for the first block of a chain")

    def after(self, hashes: Sequence[bytes]) -> ChainPlace:
        """Where the blocks begin that follow these, which begin here."""
        if not hashes:
            return self
        return ChainPlace(hashes[-1], self.depth + len(hashes) if self.depth else 0)


CHAIN_START: Final = ChainPlace()
UNKNOWN_PLACE: Final = ChainPlace(depth=0)


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
        if len(depths) and depths.min() < 0:
            raise ConfigError("depths", f"must be at least 0, got {depths.min()}")
        for at in np.flatnonzero(depths == 1).tolist():
            if parents[at] != NO_PARENT:
                raise ConfigError("parents", "must be zeros for the first block of a chain")
        object.__setattr__(self, "parents", parents)
        object.__setattr__(self, "depths", depths)

    @classmethod
    def of_chain(cls, hashes: Sequence[bytes], start: ChainPlace = CHAIN_START) -> Lineage:
        """The lineage of blocks that follow each other.

        Args:
            hashes: of the blocks in order.
            start: where in its chain the first one is.

        Raises:
            ConfigError: the chain would be deeper than 2^31 - 1 blocks.
        """
        if start.depth + len(hashes) > _DEEPEST:
            raise ConfigError("depth", f"must leave room for {len(hashes)} blocks, got {start.depth}")
        parents = (start.before, *hashes[:-1]) if len(hashes) else ()
        if start.depth:
            depths = np.arange(start.depth, start.depth + len(hashes), dtype=np.int32)
        else:
            depths = np.zeros(len(hashes), dtype=np.int32)
        return cls(parents, depths)

    def __len__(self) -> int:
        return len(self.depths)

    @property
    def parent_words(self) -> Words:
        """The parents as the records of slots have them, uint64 [n]."""
        return first_words(self.parents)

    def take(self, positions: npt.NDArray[np.int64]) -> Lineage:
        """That of the blocks at these positions, int64 [m]."""
        if len(positions) == len(self):
            return self
        return Lineage([self.parents[at] for at in positions.tolist()], self.depths[positions])


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


def first_words(hashes: Sequence[bytes]) -> Words:
    """The first 8 bytes of each hash as a little-endian number, uint64 [n]."""
    words: Words = np.frombuffer(b"".join(hashes), dtype="<u8")[::2].astype(np.uint64)
    return words


class Ancestors:
    """Finds the blocks before a block among many, by what records of slots say.

    Args:
        words: uint64 [n], of the blocks' own hashes.
        parents: uint64 [n], of their parents'.
        depths: int32 [n], their places in their chains; 0: not known.
    """

    def __init__(self, words: Words, parents: Words, depths: npt.NDArray[np.int32]) -> None:
        self._order = np.argsort(words, kind="stable")
        self._sorted = words[self._order]
        self._parents = parents
        self._depths = depths

    def parent(self, at: int) -> int | None:
        """The position of the block before the one at `at`; None where it is not there or not known."""
        word, depth = self._parents[at], int(self._depths[at])
        if not word:
            return None
        first, end = (int(np.searchsorted(self._sorted, word, side)) for side in ("left", "right"))
        for found in self._order[first:end].tolist():
            # Others' hashes may begin alike.
            if not depth or int(self._depths[found]) in (0, depth - 1):
                return int(found)
        return None

    def chain(self, at: int) -> list[int]:
        """Positions from the first block of a chain to the one at `at`, as far back as they are there."""
        chain = [at]
        seen = {at}
        while (before := self.parent(chain[-1])) is not None and before not in seen:
            chain.append(before)
            seen.add(before)
        return chain[::-1]
