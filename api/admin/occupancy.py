"""What fills host memory, slot by slot: totals by space and tenant, the map, stretches that are free.

Made from the arena's records by array operations alone, some tens of milliseconds for a million slots. Claims
of
clients over TCP are not in the records: what only these lease is told as idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ...kvstore.records_view import SpaceView, view_spaces
from ...kvstore.slot_arrays import SlotState
from ...tiers.errors import IntegrityError
from ...tiers.record_file import RecordView, SectionKind
from ..group_book import ClaimArrays, claims_in

__all__ = ["KINDS", "FreeRuns", "MapSums", "Occupancy", "SpaceTotals", "leases_of", "look"]

KINDS: Final = ("free", "reserved", "leased", "pinned", "idle")
"""What a slot is, of several the first that holds of: leased, pinned, reserved, idle."""
_FREE, _RESERVED, _LEASED, _PINNED, _IDLE = range(len(KINDS))
_FINEST: Final = 4096
"""Parts of the arena that a map may have."""

_Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SpaceTotals:
    """How many slots of a space are what, and how many committed ones have no copy in the cold tier."""

    free: int
    reserved: int
    leased: int
    pinned: int
    idle: int
    dirty: int

    @property
    def held(self) -> int:
        """Slots with a block in them, or one on its way."""
        return self.reserved + self.leased + self.pinned + self.idle


@dataclass(frozen=True)
class FreeRuns:
    """Stretches of the arena with no block in them, over the ends of extents, too."""

    count: int
    largest_bytes: int


@dataclass(frozen=True, eq=False)
class MapSums:
    """The arena in parts of equal size.

    Args:
        part_bytes: bytes of one part.
        kinds: float64 [kinds, parts], bytes of each kind in each.
        dirty: float64 [parts], bytes without a copy in the cold tier.
        used_at: float64 [parts], sum over the bytes of blocks of the tick of their last use.
        owners: float64 [spaces, parts], bytes of blocks of each space.
    """

    part_bytes: int
    kinds: _Doubles
    dirty: _Doubles
    used_at: _Doubles
    owners: _Doubles

    def coarser(self, cells: int) -> MapSums:
        """The same in as many parts as there are, `cells` at most, each a whole number of these ones."""
        parts = self.kinds.shape[1]
        group = -(-parts // cells)
        starts = np.arange(0, parts, group)
        return MapSums(
            self.part_bytes * group,
            np.add.reduceat(self.kinds, starts, axis=1),
            np.add.reduceat(self.dirty, starts),
            np.add.reduceat(self.used_at, starts),
            np.add.reduceat(self.owners, starts, axis=1) if len(self.owners) else self.owners,
        )


@dataclass(frozen=True, eq=False)
class Occupancy:
    """What fills the arena.

    Args:
        spaces: those that it has, and
        totals: of each.
        capacity_bytes, extent_bytes: of the arena.
        owned_extents: extents that a space has.
        sums: the map in its finest parts.
        free_runs: stretches with no block.
        remainder_bytes: ends of spaces' extents that are shorter than a block.
    """

    spaces: Sequence[SpaceView]
    totals: Sequence[SpaceTotals]
    capacity_bytes: int
    extent_bytes: int
    owned_extents: int
    sums: MapSums
    free_runs: FreeRuns
    remainder_bytes: int


def leases_of(view: RecordView, spaces: Sequence[SpaceView]) -> dict[bytes, npt.NDArray[np.int32]]:
    """How many leases clients have on each slot of each space that has any: int32 [capacity] by space."""
    capacities = {space.id: space.capacity for space in spaces}
    found: dict[bytes, npt.NDArray[np.int32]] = {}
    for section in view.sections(SectionKind.CLAIMS):
        try:
            space = claims_in(section).space
            if space not in capacities:
                continue
            leases = ClaimArrays.recorded(section, capacities[space]).leases.copy()
        except IntegrityError:  # it went meanwhile, and its place is another's
            continue
        if view.has(section):
            if space in found:
                found[space] += leases
            else:
                found[space] = leases
    return found


def look(view: RecordView) -> Occupancy:
    """What fills the arena now."""
    identity = view.identity
    num_extents = identity.capacity_bytes // identity.extent_bytes
    spaces = view_spaces(view)
    leases = leases_of(view, spaces)
    parts = _Parts(num_extents, identity.extent_bytes)
    runs = _Runs(num_extents, identity.extent_bytes)
    kept: list[SpaceView] = []
    totals: list[SpaceTotals] = []
    owners: list[_Doubles] = []
    remainder = owned = 0
    for space in spaces:
        use = space.use()
        if use is None:
            continue
        claimed = leases.get(space.id)
        kinds = np.full(use.state.shape, _FREE, dtype=np.uint8)
        committed = use.state == SlotState.COMMITTED
        held = (use.state == SlotState.RESERVED) | (use.state == SlotState.VOID)
        kinds[held | (use.state == SlotState.DAMAGED)] = _RESERVED
        kinds[committed] = _IDLE
        kinds[committed & (use.pins > 0)] = _PINNED
        if claimed is not None:
            leased = claimed.reshape(num_extents, -1)[use.extents] > 0
            kinds[leased & (committed | (use.state == SlotState.PURGED))] = _LEASED
        dirty = committed & ~use.in_cold
        counts = np.bincount(kinds.ravel(), minlength=len(KINDS))
        kept.append(space)
        totals.append(SpaceTotals(**dict(zip(KINDS, counts.tolist(), strict=True)), dirty=int(dirty.sum())))
        block_bytes = space.layout.block_bytes
        owners.append(parts.add(use.extents, kinds, dirty, np.where(committed, use.used_at, 0), block_bytes))
        runs.add(use.extents, kinds == _FREE, block_bytes)
        remainder += len(use.extents) * (identity.extent_bytes - space.slots_per_extent * block_bytes)
        owned += len(use.extents)
    return Occupancy(
        kept,
        totals,
        identity.capacity_bytes,
        identity.extent_bytes,
        owned,
        parts.sums(owners),
        runs.found(),
        remainder,
    )


class _Parts:
    """Sums over parts of the arena that are a whole fraction of an extent, or one extent."""

    def __init__(self, num_extents: int, extent_bytes: int) -> None:
        self._per_extent = 1
        while num_extents * self._per_extent * 2 <= _FINEST:
            self._per_extent *= 2
        self._extent_bytes = extent_bytes
        shape = num_extents, self._per_extent
        self._kinds = np.zeros((len(KINDS), *shape))
        self._dirty = np.zeros(shape)
        self._used_at = np.zeros(shape)

    def add(
        self,
        extents: npt.NDArray[np.int64],
        kinds: npt.NDArray[np.uint8],
        dirty: npt.NDArray[np.bool_],
        used_at: npt.NDArray[np.int64],
        block_bytes: int,
    ) -> _Doubles:
        """Add what fills a space's extents, arrays [extents, slots]; returns its blocks' bytes by part."""
        per_slot = float(block_bytes)
        blocks = np.zeros(self._dirty.shape)
        if not len(extents):
            return blocks
        for kind in range(len(KINDS)):
            sums = self._by_part(kinds == kind, block_bytes) * per_slot
            self._kinds[kind][extents] = sums
            if kind != _FREE:
                blocks[extents] += sums
        # The end of an extent that is shorter than a block is room that nobody has.
        rest = self._extent_bytes / self._per_extent - self._kinds[:, extents].sum(axis=0)
        self._kinds[_FREE][extents] += rest.clip(0)
        self._dirty[extents] = self._by_part(dirty, block_bytes) * per_slot
        self._used_at[extents] = self._by_part(used_at, block_bytes) * per_slot
        return blocks

    def _by_part(
        self, values: npt.NDArray[np.bool_] | npt.NDArray[np.int64], block_bytes: int
    ) -> npt.NDArray[np.float64]:
        """The sum of values over each part, float64 [extents, parts]; a slot in two counts in shares."""
        slots = values.shape[1]
        sums = np.zeros((len(values), slots + 1))
        np.cumsum(values, axis=1, out=sums[:, 1:])
        edges = np.arange(self._per_extent + 1) * (self._extent_bytes / self._per_extent / block_bytes)
        edges = edges.clip(max=slots)
        whole = np.minimum(edges.astype(np.int64), slots - 1)
        at = sums[:, whole] + values[:, whole] * (edges - whole)
        by_part: npt.NDArray[np.float64] = np.diff(at, axis=1)
        return by_part

    def sums(self, owners: Sequence[_Doubles]) -> MapSums:
        flat = [one.ravel() for one in owners]
        return MapSums(
            self._extent_bytes // self._per_extent,
            self._kinds.reshape(len(KINDS), -1),
            self._dirty.ravel(),
            self._used_at.ravel(),
            np.array(flat) if flat else np.zeros((0, self._dirty.size)),
        )


class _Runs:
    """Finds stretches with no block in them."""

    def __init__(self, num_extents: int, extent_bytes: int) -> None:
        self._extent_bytes = extent_bytes
        # Of each extent, bytes that are free at its beginning and end; all of it where nobody has it.
        self._head = np.full(num_extents, extent_bytes, dtype=np.int64)
        self._tail = self._head.copy()
        self._inner = 0
        self._largest = 0

    def add(self, extents: npt.NDArray[np.int64], free: npt.NDArray[np.bool_], block_bytes: int) -> None:
        """What is free of a space's extents, bool [extents, slots]."""
        slots = free.shape[1]
        used = np.flatnonzero(~free)
        if not len(used):
            return
        extent, place = np.divmod(used, slots)
        gaps = np.diff(used) - 1
        gaps = gaps[(extent[1:] == extent[:-1]) & (gaps > 0)]
        self._inner += len(gaps)
        self._largest = max(self._largest, int(gaps.max(initial=0)) * block_bytes)
        first = np.flatnonzero(np.diff(extent, prepend=-1))
        last = np.append(first[1:], len(extent)) - 1
        self._head[extents[extent[first]]] = place[first] * block_bytes
        self._tail[extents[extent[first]]] = self._extent_bytes - (place[last] + 1) * block_bytes

    def found(self) -> FreeRuns:
        """All of them, those over ends of extents joined."""
        count, largest = self._inner, self._largest
        run = 0
        for head, tail in zip(self._head.tolist(), self._tail.tolist(), strict=True):
            run += head
            if head < self._extent_bytes:
                count += run > 0
                largest = max(largest, run)
                run = tail
        return FreeRuns(count + (run > 0), max(largest, run))
