"""Leases and reservations whose blocks are copies in this process: of a sidecar that is reached over TCP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from ..kvstore.handles import BlockViews, Generations, Lease, Reservation, ReserveStatus, SlotOwner
from ..kvstore.policy import Ids
from ..tiers.errors import ClosedError
from .client_space import not_here
from .space_asks import LoadedLease

__all__ = ["BufferedReservation", "CopiedLease", "Sender", "fill_buffer", "read_copies", "rows_of"]

_DENIED: Final = int(ReserveStatus.DENIED)


class _Rows:
    """Blocks one after the other, numbered from 0; stands in for the space whose slots they would be.

    Args:
        blocks: uint8 [n, block_bytes], contiguous.
    """

    def __init__(self, blocks: npt.NDArray[np.uint8]) -> None:
        self._blocks = blocks

    def view(self, slot: int) -> memoryview:
        """The bytes of one block."""
        view: memoryview = self._blocks[slot].data
        return view


class CopiedLease(LoadedLease):
    """A lease with copies of its blocks, uint8 [n, block_bytes].

    The copies stay as they are, whatever becomes of the connection. Until `release` the sidecar keeps the
    blocks, as far as the connection lasts.
    """

    def __init__(
        self,
        space: SlotOwner,
        slots: Ids,
        generations: Generations,
        copies: npt.NDArray[np.uint8],
        cold: int = 0,
        loaded: int = 0,
    ) -> None:
        super().__init__(space, slots, generations, cold, loaded)
        self._copies = copies

    @property
    def blocks(self) -> BlockViews:
        """The copies: ``lease.blocks[i]`` is uint8 [block_bytes], read only.

        Raises:
            ClosedError: the lease was released.
        """
        return BlockViews(_Rows(self.copies), np.arange(len(self), dtype=np.int32), writable=False)

    @property
    def copies(self) -> npt.NDArray[np.uint8]:
        """The copies in one array, uint8 [n, block_bytes].

        Raises:
            ClosedError: the lease was released.
        """
        if not self._held:
            raise ClosedError("the lease was released")
        return self._copies[: len(self)]


class Sender(SlotOwner, Protocol):
    """The space that a reservation is of: it sends what is committed."""

    def send(self, reservation: BufferedReservation, positions: npt.NDArray[np.int64]) -> None:
        """Store the blocks of these positions."""
        ...


class BufferedReservation(Reservation):
    """A reservation whose blocks are written here and sent when they are committed.

    Attributes:
        buffer: uint8 [m, block_bytes], the `new` blocks in their order. Zeros that nobody wrote.
    """

    def __init__(
        self,
        space: Sender,
        hashes: Sequence[bytes],
        status: npt.NDArray[np.uint8],
        slots: Ids,
        generations: Generations,
        block_bytes: int,
    ) -> None:
        super().__init__(space, hashes, status, slots, generations)
        self._sender = space
        self.buffer = np.zeros((len(self.new), block_bytes), dtype=np.uint8)

    @property
    def blocks(self) -> BlockViews:
        """Where to write the `new` blocks until `commit`, in their order: uint8 [block_bytes] each."""
        return BlockViews(_Rows(self.buffer), np.arange(len(self.buffer), dtype=np.int32), writable=True)

    def commit(self, positions: npt.NDArray[np.int64] | None = None, *, in_cold: bool = False) -> None:
        """Send the bytes of these positions (default: all that are still open), and publish them.

        Args:
            positions: int64 [m], or a list of positions.
            in_cold: of no effect here; the sidecar knows what its cold tier has.

        Raises:
            ConfigError: `positions` are none of this reservation.
            ClosedError: the connection was closed.
            StaleHandleError: over a strict connection: a slot is not reserved any more; the others are sent.
            ServiceUnavailableError: over a strict connection: the sidecar does not answer.
        """
        self._sender.send(self, self.take(positions))


def rows_of(reservation: BufferedReservation, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Which row of the buffer each of these new positions has, int64 [n]."""
    rows: npt.NDArray[np.int64] = np.searchsorted(reservation.new, positions)
    return rows


def fill_buffer(reservation: Reservation, blocks: npt.NDArray[np.uint8]) -> int:
    """Copy blocks, one for each hash of a reservation, to its buffer; how many hashes were not denied.

    Raises:
        NotInPlaceError: it has none.
    """
    if not isinstance(reservation, BufferedReservation):
        raise not_here()
    reservation.buffer[:] = blocks[reservation.new]
    return int(np.count_nonzero(reservation.status != _DENIED))


def read_copies(lease: Lease, out: npt.NDArray[np.uint8]) -> int:
    """Copy a lease's blocks to the first rows of `out`; how many.

    Raises:
        NotInPlaceError: it has no copies.
    """
    if not isinstance(lease, CopiedLease):
        raise not_here()
    out[: len(lease)] = lease.copies
    return len(lease)
