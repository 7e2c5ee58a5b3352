"""The slots of an arena's spaces as another process sees them, in its records, while their owner goes on.

Nothing is locked, so what is read may change meanwhile: what is told of a slot is what its record said before
and after it was read, or nothing. A space's arrays cover the whole arena; only its own extents are looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..tiers.errors import IntegrityError
from ..tiers.layout import KVLayout
from ..tiers.record_file import RecordView, Section, SectionKind
from .saved_spaces import space_in
from .slot_arrays import SlotArrays, SlotState

__all__ = ["Residents", "SlotUse", "SpaceView", "view_spaces"]


@dataclass(frozen=True, eq=False)
class SlotUse:
    """What the slots of a space's own extents are used for, by extent.

    Args:
        extents: int64 [n], which extents of the arena these are, ascending.
        state: uint8 [n, slots_per_extent] of `SlotState`.
        pins: int32, likewise.
        in_cold: bool, likewise.
        used_at: int64, likewise, the tick of the last use.
    """

    extents: npt.NDArray[np.int64]
    state: npt.NDArray[np.uint8]
    pins: npt.NDArray[np.int32]
    in_cold: npt.NDArray[np.bool_]
    used_at: npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Residents:
    """The committed blocks of a space.

    Args:
        slots: int64 [n].
        hashes: V16 [n].
        parents: uint64 [n], the first 8 bytes of the parent's hash, little-endian; 0: none, or not known.
        depths: int32 [n], 1 for the first block of a chain; 0: not known.
        hits: uint32 [n], how often each was matched.
        pins: int32 [n].
        in_cold: bool [n].
        used_at: int64 [n].
    """

    slots: npt.NDArray[np.int64]
    hashes: npt.NDArray[np.void]
    parents: npt.NDArray[np.uint64]
    depths: npt.NDArray[np.int32]
    hits: npt.NDArray[np.uint32]
    pins: npt.NDArray[np.int32]
    in_cold: npt.NDArray[np.bool_]
    used_at: npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SpaceView:
    """A space of an arena whose owner is another process.

    Args:
        id: 16 bytes.
        layout, shard, tenant: what it is of.
        slots_per_extent: slots that an extent is cut into.
        num_extents: extents that the arena has.
    """

    id: bytes
    layout: KVLayout
    shard: str
    tenant: str
    slots_per_extent: int
    num_extents: int
    _view: RecordView
    _section: Section
    _arrays: SlotArrays

    @property
    def capacity(self) -> int:
        """Slots that it would have with every extent."""
        return self.slots_per_extent * self.num_extents

    def use(self) -> SlotUse | None:
        """What its slots are used for now; None where the space is gone."""
        arrays, extents = self._arrays, self._own_extents()
        use = SlotUse(
            extents,
            self._by_extent(arrays.state)[extents],
            self._by_extent(arrays.pins)[extents],
            self._by_extent(arrays.in_cold)[extents],
            self._by_extent(arrays.used_at)[extents],
        )
        # A state that is none is a damaged record: no block is there.
        use.state[use.state > max(SlotState)] = SlotState.DAMAGED
        return use if self._view.has(self._section) else None

    def residents(self) -> Residents | None:
        """Its committed blocks now; None where the space is gone."""
        arrays, extents = self._arrays, self._own_extents()
        committed = self._by_extent(arrays.state)[extents] == SlotState.COMMITTED
        at, place = np.nonzero(committed)
        slots = extents[at] * self.slots_per_extent + place
        generations = arrays.generations[slots]
        found = Residents(
            slots,
            arrays.hashes[slots],
            arrays.parents[slots],
            arrays.depths[slots],
            arrays.hits[slots],
            arrays.pins[slots],
            arrays.in_cold[slots],
            arrays.used_at[slots],
        )
        # A slot that went to another block in between was not committed at some time, and has another
        # generation since.
        same = (arrays.state[slots] == SlotState.COMMITTED) & (arrays.generations[slots] == generations)
        if not self._view.has(self._section):
            return None
        if np.count_nonzero(same) == len(same):
            return found
        return Residents(*(array[same] for array in vars(found).values()))

    def _own_extents(self) -> npt.NDArray[np.int64]:
        return np.flatnonzero(self._arrays.owned.view(np.uint8) == 1)

    def _by_extent(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array.reshape(self.num_extents, self.slots_per_extent)


def view_spaces(view: RecordView) -> list[SpaceView]:
    """The spaces that an arena has now. One whose description makes no sense is passed over."""
    identity = view.identity
    found: list[SpaceView] = []
    for section in view.sections(SectionKind.SPACE):
        try:
            name = space_in(section)
            per_extent = identity.extent_bytes // name.layout.block_bytes
            num_extents = identity.capacity_bytes // identity.extent_bytes
            arrays = SlotArrays.recorded(section, per_extent * num_extents, num_extents, name.id)
        except IntegrityError:
            continue
        found.append(
            SpaceView(
                name.id, name.layout, name.shard, name.tenant, per_extent, num_extents, view, section, arrays
            )
        )
    return found
