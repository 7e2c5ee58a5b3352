"""InlineSpace: a space of a sidecar that is reached over TCP; its blocks are copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ..kvstore.handles import Generations, Lease, Reservation
from ..kvstore.hashing import HASH_BYTES, Tokens
from ..kvstore.lineage import CHAIN_START, ChainPlace, Lineage
from ..kvstore.policy import Ids
from ..tiers.settings import expect_byte_strings, expect_seconds
from .client_space import ClientSpace, not_here
from .copies import BufferedReservation, CopiedLease, fill_buffer, read_copies, rows_of
from .holdings import Handles
from .inline_asks import InlineAsks, Steps
from .remote_space import RemoteSpace, Shell

__all__ = ["InlineShell", "InlineSpace"]

_T = TypeVar("_T")


class InlineShell(Shell, Protocol):
    """A connection, as far as such spaces need it."""

    def drive(self, steps: Steps[_T]) -> _T:
        """Make an operation's requests and return its result."""
        ...

    def start_commit(self, space: ClientSpace, handles: Handles) -> tuple[Handles, int]:
        """`ClientCore.start_commit`."""
        ...

    def give_up(self, space: ClientSpace, handles: Handles) -> None:
        """`ClientCore.give_up`, sent."""
        ...


class InlineSpace(RemoteSpace):
    """One layout and shard in a sidecar that is reached over TCP. Open it with `Connection.space`.

    Calls are those of `RemoteSpace`. A lease has copies of its blocks, which are fetched as it is made, and a
    reservation has a buffer, which is sent as it is committed. What is about places in the sidecar's memory
    raises `NotInPlaceError`: `addresses`, `slots_at`, `view`, `readable_in_place`, `for_steps`, `until`,
    and `lease` and `commit` of slots.
    """

    def __init__(self, shell: InlineShell, space: ClientSpace) -> None:
        super().__init__(shell, space)
        self._drive = shell.drive
        self._inline_shell = shell
        self._inline = InlineAsks(
            shell.core, space, self, self._asks, lambda handles: shell.give_up(space, handles)
        )

    def match(
        self,
        hashes: Sequence[bytes] | None = None,
        *,
        tokens: Tokens | None = None,
        chain: bytes | None = None,
        cold_deadline: float | None = None,
        start: ChainPlace | None = CHAIN_START,
    ) -> CopiedLease:
        """Lease the leading blocks that are resident, and copy them here. See `HostSpace.match`."""
        names = self._asks.hashes(hashes, tokens, chain)
        return self._drive(self._inline.match(names, cold_deadline, start))

    def load(
        self, hashes: Sequence[bytes], deadline: float, *, start: ChainPlace | None = CHAIN_START
    ) -> CopiedLease:
        """Bring blocks up from the cold tier, lease the leading ones that are there, and copy them here."""
        return self._drive(self._inline.load(hashes, deadline, start))

    def reserve_named(
        self, hashes: Sequence[bytes], *, wait: float = 0.0, lineage: Lineage | None = None
    ) -> BufferedReservation:
        """A buffer for blocks, for those that the sidecar has room for. See `HostSpace.reserve`."""
        return self._drive(self._inline.reserve(hashes, wait, lineage))

    def put(
        self,
        hashes: Sequence[bytes],
        blocks: npt.NDArray[np.uint8],
        *,
        wait: float = 0.0,
        lineage: Lineage | None = None,
    ) -> int:
        """Send blocks. See `HostSpace.put`; what the sidecar has already is not sent."""
        hashes = expect_byte_strings("hashes", hashes, HASH_BYTES)
        wait = expect_seconds("wait", wait)
        self.check_blocks(blocks, len(hashes))
        return self._drive(self._inline.store(hashes, blocks, wait, lineage, self._start))

    def get(self, hashes: Sequence[bytes], out: npt.NDArray[np.uint8]) -> int:
        """Fetch the leading resident blocks. See `HostSpace.get`."""
        hashes = expect_byte_strings("hashes", hashes, HASH_BYTES)
        self.check_out(out, len(hashes))
        return self._drive(self._inline.fetch(hashes, out))

    def send(self, reservation: BufferedReservation, positions: npt.NDArray[np.int64]) -> None:
        """Store the blocks of these positions of a reservation; for `BufferedReservation.commit`."""
        rows = rows_of(reservation, positions)
        steps = self._inline.put(reservation, positions, reservation.buffer, rows, self._start)
        _, refused = self._drive(steps)
        self._refused("commit", refused)

    def write_blocks(self, reservation: Reservation, blocks: npt.NDArray[np.uint8]) -> int:
        """See `SlotPlaces.write_blocks`: to the reservation's buffer."""
        return fill_buffer(reservation, blocks)

    def read_blocks(self, lease: Lease, out: npt.NDArray[np.uint8]) -> int:
        """See `SlotPlaces.read_blocks`: of the lease's copies."""
        return read_copies(lease, out)

    def for_steps(self) -> RemoteSpace:
        """Not over TCP: an engine's steps read blocks in place.

        Raises:
            NotInPlaceError: always.
        """
        raise not_here()

    def until(self, deadline: float) -> RemoteSpace:
        """Not over TCP, as `for_steps`.

        Raises:
            NotInPlaceError: always.
        """
        raise not_here()

    def lease(self, slots: Ids, generations: Generations, *, used: bool = False) -> npt.NDArray[np.bool_]:
        """Not over TCP: `match` gets blocks by their names.

        Raises:
            NotInPlaceError: always.
        """
        raise not_here()

    def commit(self, slots: Ids, generations: Generations, *, in_cold: bool = False) -> None:
        """Not over TCP: reservations are committed, with their blocks.

        Raises:
            NotInPlaceError: always.
        """
        raise not_here()

    def readable_in_place(self, slots: Ids) -> npt.NDArray[np.bool_]:
        """Not over TCP.

        Raises:
            NotInPlaceError: always.
        """
        raise not_here()

    def _start(self, handles: Handles) -> tuple[Handles, int]:
        return self._inline_shell.start_commit(self._space, handles)
