"""What the records of one space's slots are made of: arrays in this process, or in the file of an arena."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..tiers.record_file import ArraySpec, Section
from .handles import Generations, first_generations
from .hashing import HASH_BYTES
from .slot_crc import Crcs, SlotCrc

__all__ = ["SlotArrays", "SlotState", "slot_specs"]

_NAME: Final = f"V{HASH_BYTES}"


class SlotState(enum.IntEnum):
    """What a slot holds."""

    FREE = 0
    RESERVED = 1
    COMMITTED = 2
    DAMAGED = 3
    """Its record is not to be believed: neither found nor granted."""
    PURGED = 4
    """Was committed; nobody finds it. It is free when who leases it, or copies it below, lets go of it."""
    VOID = 5
    """Is reserved, and will be free when it is committed: its name was purged."""


@dataclass(frozen=True, eq=False)
class SlotArrays:
    """Arrays over slots, and one over extents.

    Args:
        generations: int64 [capacity], raised with every grant.
        state: uint8 [capacity] of `SlotState`.
        hashes: V16 [capacity], of reserved and committed slots.
        pins: int32 [capacity].
        in_cold: bool [capacity], whether the cold tier has a copy.
        used_at: int64 [capacity], the tick of the last use.
        owned: bool [extents], which extents the space has.
        parents: uint64 [capacity], the first 8 bytes, little-endian, of the hash of the block before each in
            its chain; 0: it is the first one, or that is not known.
        depths: int32 [capacity], 1-based index of each in its chain; 0: not known.
        hits: uint32 [capacity], how often a match found it, modulo 2^32.
        crcs: uint32 [capacity] where records outlive this process, else None.
        crc: makes these, or None.
    """

    generations: Generations
    state: npt.NDArray[np.uint8]
    hashes: npt.NDArray[np.void]
    pins: npt.NDArray[np.int32]
    in_cold: npt.NDArray[np.bool_]
    used_at: npt.NDArray[np.int64]
    owned: npt.NDArray[np.bool_]
    parents: npt.NDArray[np.uint64]
    depths: npt.NDArray[np.int32]
    hits: npt.NDArray[np.uint32]
    crcs: Crcs | None = None
    crc: SlotCrc | None = None

    @classmethod
    def alone(cls, capacity: int, num_extents: int) -> SlotArrays:
        """Arrays that go with this process."""
        return cls(
            generations=first_generations(capacity),
            state=np.zeros(capacity, dtype=np.uint8),
            hashes=np.zeros(capacity, dtype=_NAME),
            pins=np.zeros(capacity, dtype=np.int32),
            in_cold=np.zeros(capacity, dtype=np.bool_),
            used_at=np.zeros(capacity, dtype=np.int64),
            owned=np.zeros(num_extents, dtype=np.bool_),
            parents=np.zeros(capacity, dtype=np.uint64),
            depths=np.zeros(capacity, dtype=np.int32),
            hits=np.zeros(capacity, dtype=np.uint32),
        )

    @classmethod
    def recorded(cls, section: Section, capacity: int, num_extents: int, space: bytes) -> SlotArrays:
        """Arrays in a section of an arena's records, as they are.

        Args:
            space: the space's id.

        Raises:
            IntegrityError: the section is too short for them.
        """
        generations, hashes, used_at, pins, crcs, state, in_cold, parents, depths, hits, owned = (
            section.arrays(slot_specs(capacity, num_extents))
        )
        return cls(
            generations=generations,
            state=state,
            hashes=hashes,
            pins=pins,
            in_cold=in_cold,
            used_at=used_at,
            owned=owned,
            parents=parents,
            depths=depths,
            hits=hits,
            crcs=crcs,
            crc=SlotCrc(space),
        )

    def begin(self) -> None:
        """Make the records of a new section: every slot is free."""
        if self.crcs is not None and self.crc is not None and len(self.generations):
            self.generations[:] = first_generations(len(self.generations))
            self.crcs[:] = self.crc.of(self.hashes[:1], self.generations[:1])


def slot_specs(capacity: int, num_extents: int) -> list[ArraySpec]:
    """The arrays of a section about a space."""
    kinds: list[npt.DTypeLike] = [np.int64, _NAME, np.int64, np.int32, np.uint32, np.uint8, np.bool_]
    of_lineage: list[npt.DTypeLike] = [np.uint64, np.int32, np.uint32]
    return [
        *(ArraySpec(kind, capacity) for kind in kinds + of_lineage),
        ArraySpec(np.bool_, num_extents),
    ]
