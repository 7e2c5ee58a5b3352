"""What the records of one space's slots say of lineage, and how often each block was found.

Advice, in arrays of its own: no CRC is over it, it is written without regard to when a process may be killed,
and no block is found, granted or let go of by it. Read only where a slot is reserved or committed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..tiers.errors import IntegrityError
from .lineage import ChainPlace, Lineage, Words, word_column
from .policy import Ids
from .slot_arrays import SlotArrays

__all__ = ["SlotLineage"]

_Places = npt.NDArray[np.intp]


class SlotLineage:
    """The lineage of what each slot holds. All of it is called with the space's lock held.

    Args:
        arrays: where it lies.
    """

    def __init__(self, arrays: SlotArrays) -> None:
        self._hashes = arrays.hashes
        self._parents = arrays.parents
        self._depths = arrays.depths
        self._hits = arrays.hits

    def grant(self, slots: _Places, lineage: Lineage | None) -> None:
        """Slots are granted for blocks of this lineage; what was known of earlier ones is forgotten."""
        self._hits[slots] = 0
        self._parents[slots] = 0 if lineage is None else lineage.parent_words
        self._depths[slots] = 0 if lineage is None else lineage.depths

    def learn(self, slots: _Places, lineage: Lineage) -> None:
        """Blocks are of this lineage, as far as no other is known of them."""
        known, told = self._depths[slots], lineage.depths
        words = lineage.parent_words
        new = (known == 0) | ((known == told) & (self._parents[slots] == 0))
        new &= (told > 0) | (words > 0)
        slots = slots[new]
        self._parents[slots] = words[new]
        self._depths[slots] = told[new]

    def found(self, slots: _Places, hashes: Sequence[bytes], start: ChainPlace | None) -> None:
        """A match found these slots, one or more: the leading ones of `hashes`.

        Args:
            start: where in its chain the first one is, which the others follow; None: that is not known.
        """
        self._hits[slots] += 1
        if start is not None and not self._depths[slots[-1]]:
            lineage = Lineage.of_chain(hashes[: len(slots)], start)
            depths = self._depths[slots]
            # Who contradicts what is known of some of them may be wrong about the others.
            if ((depths == 0) | (depths == lineage.depths)).all():
                self.learn(slots, lineage)

    def of(self, slots: Ids) -> tuple[Words, npt.NDArray[np.int32]]:
        """What is known of slots: uint64 [n] of their parents' hashes, int32 [n] depths."""
        return self._parents[slots], self._depths[slots]

    def hits(self, slots: Ids) -> npt.NDArray[np.uint32]:
        """How often matches found what slots hold, uint32 [n]; counted modulo 2^32."""
        hits: npt.NDArray[np.uint32] = self._hits[slots]
        return hits

    def adopt(self) -> None:
        """What another process left cannot be wrong but in being no lineage at all."""
        wrong = (self._depths < 0) | ((self._depths == 1) & (self._parents > 0))
        self._depths[wrong] = 0
        self._parents[wrong] = 0

    def check_integrity(self, slots: Ids) -> None:
        """Prove that blocks which precede each other by their hashes do so by their depths.

        Args:
            slots: the committed ones.

        Raises:
            IntegrityError: naming the first block that does not.
        """
        parents, depths = self.of(slots)
        if (depths < 0).any() or (parents[depths == 1] > 0).any():
            raise IntegrityError(
                "a host block has a depth below 0, or a parent and is the first of its chain"
            )
        # Of blocks whose hashes begin alike it is not known which one is meant.
        words, first, times = np.unique(
            word_column(self._hashes[slots]), return_index=True, return_counts=True
        )
        words, first = words[times == 1], first[times == 1]
        children = np.flatnonzero((depths > 0) & (parents > 0) & np.isin(parents, words))
        of_parents = depths[first[np.searchsorted(words, parents[children])]]
        wrong = children[(of_parents > 0) & (of_parents + 1 != depths[children])]
        if len(wrong):
            raise IntegrityError(
                f"host slot {slots[wrong[0]]} is not one deeper in its chain than its parent"
            )
