"""SlotSpace: what every space does with its slots alone, wherever their memory comes from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ..tiers.errors import ConfigError, LayoutError
from ..tiers.layout import KVLayout
from ..tiers.settings import expect_array, expect_byte_strings, expect_integer, expect_seconds, shown
from .handles import Lease, Reservation, ReserveStatus
from .hashing import HASH_BYTES
from .lineage import CHAIN_START, ChainPlace, Lineage
from .policy import Ids

__all__ = ["SlotPlaces", "SlotSpace"]

_INT32: Final = np.dtype(np.int32)
_INT64: Final = np.dtype(np.int64)
_DENIED: Final = int(ReserveStatus.DENIED)


class SlotPlaces(ABC):
    """One layout's slots in an arena that this process has mapped: where they lie, and copying in and out.

    Slots are numbered by extent: slot ``s`` is the ``s % slots_per_extent``-th place of extent
    ``s // slots_per_extent``. Across processes slots travel as these numbers, never as addresses.

    Args:
        layout: how a block lies in memory.
        extent_bytes: length of an extent.
        num_extents: extents of the arena.
    """

    def __init__(self, layout: KVLayout, extent_bytes: int, num_extents: int) -> None:
        self.layout = layout
        self.slots_per_extent = extent_bytes // layout.block_bytes
        self._extent_bytes = extent_bytes
        self._num_extents = num_extents

    @property
    def capacity(self) -> int:
        """Slots that this space would have if every extent were its own."""
        return self.slots_per_extent * self._num_extents

    def addresses(self, slots: Ids) -> npt.NDArray[np.int64]:
        """Addresses of slots in this process, int64 [n]. On a GPU, add `device_delta`.

        Raises:
            ConfigError: `slots` is no int32 array, or a slot is none of this space.
            ClosedError: the memory is given back.
        """
        base = self._base()
        narrow = expect_array("slots", slots, _INT32)
        # Negative ones are the largest.
        if (narrow.view(np.uint32) >= self.capacity).any():
            raise ConfigError("slots", f"must be from 0 to {self.capacity - 1}")
        found = narrow.astype(np.int64)
        extent = found // self.slots_per_extent
        # base + extent * extent_bytes + (slot - extent * slots_per_extent) * block_bytes
        found *= self.layout.block_bytes
        extent *= self._extent_bytes - self.slots_per_extent * self.layout.block_bytes
        found += extent
        found += base
        return found

    def slots_at(self, addresses: npt.NDArray[np.int64]) -> Ids:
        """The inverse of `addresses`; tags in the low seven bits are ignored."""
        offsets = expect_array("addresses", addresses, _INT64) - self._base()
        extent = offsets // self._extent_bytes
        place = offsets - extent * self._extent_bytes
        slots: Ids = (extent * self.slots_per_extent + place // self.layout.block_bytes).astype(np.int32)
        return slots

    def view(self, slot: int) -> memoryview:
        """The bytes of one slot, writable. Write only what is reserved; read only what is leased.

        Raises:
            ConfigError: there is no such slot.
        """
        self._base()
        slot = expect_integer("slot", slot, 0, self.capacity - 1)
        extent, place = divmod(slot, self.slots_per_extent)
        offset = extent * self._extent_bytes + place * self.layout.block_bytes
        return self._bytes(offset, self.layout.block_bytes)

    def check_blocks(self, blocks: npt.NDArray[np.uint8], count: int) -> None:
        """Refuse what is not uint8 [count or more, block_bytes], each row contiguous.

        Raises:
            LayoutError: `blocks` has another shape.
        """
        self._check_shape("blocks", blocks, count)

    def check_out(self, out: npt.NDArray[np.uint8], count: int) -> None:
        """Refuse what blocks cannot be copied to: as `check_blocks`, and writable, no row over another.

        Raises:
            LayoutError: `out` has another shape, or cannot be written.
        """
        self._check_shape("out", out, count)
        if not out.flags.writeable or (len(out) > 1 and abs(out.strides[0]) < self.layout.block_bytes):
            raise LayoutError("out must be writable, and its rows must not lie over each other")

    def write_blocks(self, reservation: Reservation, blocks: npt.NDArray[np.uint8]) -> int:
        """Copy blocks, one for each hash of a reservation, into its new slots.

        Returns:
            how many of the hashes were not denied.
        """
        new = reservation.new
        if len(new):
            source = blocks.ctypes.data + new * blocks.strides[0]
            self._copy(source, self.addresses(reservation.slots[new]))
        return int(np.count_nonzero(reservation.status != _DENIED))

    def read_blocks(self, lease: Lease, out: npt.NDArray[np.uint8]) -> int:
        """Copy leased blocks to the first rows of `out`; returns how many."""
        if len(lease):
            target = out.ctypes.data + np.arange(len(lease)) * out.strides[0]
            self._copy(self.addresses(lease.slots), target)
        return len(lease)

    # What the kinds of spaces differ in

    @abstractmethod
    def _base(self) -> int:
        """Address of the arena in this process. Raises `ClosedError` where it is closed."""

    @abstractmethod
    def _bytes(self, offset: int, nbytes: int) -> memoryview:
        """Bytes of the arena, writable."""

    @abstractmethod
    def _copy(self, source: npt.NDArray[np.int64], target: npt.NDArray[np.int64]) -> None:
        """Copy blocks between addresses of this process, int64 [n]."""

    def _check_shape(self, what: str, blocks: npt.NDArray[np.uint8], count: int) -> None:
        size = self.layout.block_bytes
        if (
            not isinstance(blocks, np.ndarray)
            or blocks.dtype != np.uint8
            or blocks.ndim != 2
            or blocks.shape[0] < count
            or blocks.shape[1] != size
            or blocks.strides[1] != 1
        ):
            got = f"{blocks.dtype} {list(blocks.shape)}" if isinstance(blocks, np.ndarray) else shown(blocks)
            raise LayoutError(f"{what} must be uint8 [{count}, {size}] with contiguous rows, got {got}")


class SlotSpace(SlotPlaces):
    """`SlotPlaces` with the calls that copy blocks in and out by their names."""

    def put(
        self,
        hashes: Sequence[bytes],
        blocks: npt.NDArray[np.uint8],
        *,
        wait: float = 0.0,
        lineage: Lineage | None = None,
    ) -> int:
        """Copy blocks in.

        Args:
            blocks: uint8 [len(hashes), block_bytes], each row contiguous.
            wait: seconds to wait for room.
            lineage: what is known of the chains that they are of.

        Returns:
            how many of the hashes are resident afterwards, or were being written by somebody else.

        Raises:
            LayoutError: `blocks` has another shape.
            QuotaError: the tenant's quota has room for none of the new ones.
        """
        hashes = expect_byte_strings("hashes", hashes, HASH_BYTES)
        wait = expect_seconds("wait", wait)
        self.check_blocks(blocks, len(hashes))
        with self.reserve(hashes, wait=wait, lineage=lineage) as reservation:
            kept = self.write_blocks(reservation, blocks)
            reservation.commit()
            return kept

    def get(self, hashes: Sequence[bytes], out: npt.NDArray[np.uint8]) -> int:
        """Copy the leading resident blocks out.

        Args:
            out: uint8 [at least len(hashes), block_bytes], each row contiguous, none over another.

        Returns:
            how many blocks were copied.

        Raises:
            LayoutError: `out` has another shape, or cannot be written.
        """
        hashes = expect_byte_strings("hashes", hashes, HASH_BYTES)
        self.check_out(out, len(hashes))
        with self.match(hashes, start=None) as lease:
            return self.read_blocks(lease, out)

    @abstractmethod
    def match(
        self, hashes: Sequence[bytes] | None = None, *, start: ChainPlace | None = CHAIN_START
    ) -> Lease:
        """Lease the leading blocks that are resident."""

    @abstractmethod
    def reserve(
        self, hashes: Sequence[bytes], *, wait: float = 0.0, lineage: Lineage | None = None
    ) -> Reservation:
        """Slots to write blocks into."""
