"""What the records of one space's slots say of lineage, and how often each block was found.

Advice, in arrays of its own: no CRC is over it, it is written without regard to when a process may be killed,
and no block is found, granted or let go of by it. Read only where a slot is reserved or committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..tiers.errors import IntegrityError
from .lineage import ChainPlace, Lineage, ShortHashes
from .slot_arrays import SlotArrays

__all__ = ["SlotLineage"]

_Places: TypeAlias = npt.NDArray[np.integer[Any]]
"""Slots, int [n] of any kind; of intp where it is a hot path."""


class SlotLineage:
    """The lineage of what each slot holds. All of it is called with the space's lock held.

    Args:
        arrays: where it lies.
    """

    def __init__(self, arrays: SlotArrays) -> None:
        self._parents = arrays.parents
        self._depths = arrays.depths
        self._hits = arrays.hits

    def grant(self, slots: _Places, lineage: Lineage | None) -> None:
        """Slots are granted for blocks of this lineage; what was known of earlier ones is forgotten."""
        self._hits[slots] = 0
        self._parents[slots] = 0 if lineage is None else lineage.short_parents
        self._depths[slots] = 0 if lineage is None else lineage.depths

    def learn(self, slots: _Places, lineage: Lineage) -> None:
        """Blocks are of this lineage, as far as no other is known of them."""
        known, told = self._depths[slots], lineage.depths
        parents = lineage.short_parents
        new = (known == 0) | ((known == told) & (self._parents[slots] == 0))
        new &= (told > 0) | (parents > 0)
        slots = slots[new]
        self._parents[slots] = parents[new]
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

    def of(self, slots: _Places) -> tuple[ShortHashes, npt.NDArray[np.int32]]:
        """What is known of slots: uint64 [n] of their parents' hashes, int32 [n] depths."""
        return self._parents[slots], self._depths[slots]

    def hits(self, slots: _Places) -> npt.NDArray[np.uint32]:
        """How often matches found what slots hold, uint32 [n]; counted modulo 2^32."""
        hits: npt.NDArray[np.uint32] = self._hits[slots]
        return hits

    def adopt(self, slots: _Places) -> None:
        """Forget what another process left of these slots where it can be no lineage."""
        wrong = slots[_impossible(*self.of(slots))]
        self._parents[wrong] = 0
        self._depths[wrong] = 0

    def check_integrity(self) -> None:
        """Prove that what is known of each slot can be a lineage.

        Not that blocks agree with each other: who matches what is no chain teaches what is not so.

        Raises:
            IntegrityError: it cannot.
        """
        if _impossible(self._parents, self._depths).any():
            raise IntegrityError(
                "a host block has a depth below 0, or is the first of its chain and has a parent"
            )


def _impossible(parents: ShortHashes, depths: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    wrong: npt.NDArray[np.bool_] = (depths < 0) | ((depths == 1) & (parents > 0))
    return wrong
