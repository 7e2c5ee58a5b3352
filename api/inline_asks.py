"""What is done with blocks of a sidecar that passes no memory: several requests each, without I/O.

An operation is a generator: it yields requests that are made at once, is sent what became of each, and
returns its result. A shell drives it: `drive` of `api/client.py` waits, that of `api/client_async.py` is
awaited.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from ..kvstore.handles import Reservation, ReserveStatus
from ..kvstore.hashing import HASH_BYTES
from ..kvstore.lineage import ChainPlace, Lineage
from ..tiers.errors import ProtocolError
from .client_calls import Ask, expect
from .client_core import FRAME_ROOM, ClientCore
from .client_space import ClientSpace
from .copies import BufferedReservation, CopiedLease, Sender
from .holdings import Handles
from .messages import Blocks, Count, Get, Message, Put
from .space_asks import LoadedLease, SpaceAsks

__all__ = ["InlineAsks", "Steps"]

_T = TypeVar("_T")
Steps: TypeAlias = Generator[Sequence[Ask[Any]], Sequence[Any], _T]
"""An operation: requests to make, and its result at the end."""

_BATCH_BYTES: Final = 4 << 20
"""Of blocks in one frame: small enough that others of the connection come between."""
_WINDOW_BYTES: Final = 16 << 20
"""Of blocks in all frames that an operation has under way: one is copied while another is on the wire."""
_BYTES_PER_SECOND: Final = 8 << 20
"""What a network is taken to carry at least: blocks may take so much longer than other requests."""
_DENIED: Final = int(ReserveStatus.DENIED)
_NEW: Final = int(ReserveStatus.NEW)


class InlineAsks:
    """Makes the operations about one space.

    Args:
        core: whose space it is.
        space: the space.
        owner: whom leases and reservations are given back to, and which sends blocks.
        asks: the space's requests.
        give_up: reserved slots will not be written, as far as they still are to be.
    """

    def __init__(
        self,
        core: ClientCore,
        space: ClientSpace,
        owner: Sender,
        asks: SpaceAsks,
        give_up: Callable[[Handles], object],
    ) -> None:
        self._core = core
        self._space = space
        self._owner = owner
        self._asks = asks
        self._give_up = give_up
        self._size = space.layout.block_bytes

    def match(
        self, names: Sequence[bytes], cold_deadline: float | None, start: ChainPlace | None
    ) -> Steps[CopiedLease]:
        """Lease the leading blocks that are resident, and copy them here."""
        (lease,) = yield [self._asks.match(names, cold_deadline, start)]
        return (yield from self._copied(lease, names))

    def load(self, names: Sequence[bytes], deadline: float, start: ChainPlace | None) -> Steps[CopiedLease]:
        """Bring blocks up from the cold tier, lease the leading ones that are there, and copy them here."""
        (lease,) = yield [self._asks.load(names, deadline, start)]
        return (yield from self._copied(lease, names))

    def fetch(self, names: Sequence[bytes], out: npt.NDArray[np.uint8]) -> Steps[int]:
        """Copy the leading resident blocks to the first rows of `out`; how many those are."""
        done = 0
        for batches in self._windows(len(names)):
            seconds = self._seconds(batches)
            got = yield [self._get(tuple(names[start:stop]), seconds) for start, stop in batches]
            for (start, stop), data in zip(batches, got, strict=True):
                rows = np.frombuffer(data, dtype=np.uint8).reshape(-1, self._size)
                out[done : done + len(rows)] = rows
                done += len(rows)
                if len(rows) < stop - start:
                    return done
        return done

    def reserve(
        self, names: Sequence[bytes], wait: float, lineage: Lineage | None
    ) -> Steps[BufferedReservation]:
        """Slots for blocks, and a buffer to write them into."""
        (got,) = yield [self._asks.reserve(names, wait, lineage)]
        return BufferedReservation(
            self._owner, got.hashes, got.status, got.slots, got.generations, self._size
        )

    def put(
        self,
        reservation: Reservation,
        positions: npt.NDArray[np.int64],
        blocks: npt.NDArray[np.uint8],
        rows: npt.NDArray[np.int64],
        start: Callable[[Handles], tuple[Handles, int]],
    ) -> Steps[tuple[int, int]]:
        """Send blocks of a reservation; they are committed where they come.

        Args:
            positions: int64 [n], which of the reservation, none twice.
            blocks: uint8 [at least max(rows) + 1, block_bytes].
            rows: int64 [n], which block each position gets.
            start: `ClientCore.start_commit`: those of the handles that are still reserved.

        Returns:
            how many the sidecar has now, and how many were not reserved any more.
        """
        asked = Handles(reservation.slots[positions], reservation.generations[positions])
        handles, refused = start(asked)
        mine = np.isin(asked.slots, handles.slots)
        positions, rows = positions[mine], rows[mine]
        names = [reservation.hashes[at] for at in positions.tolist()]
        kept = 0
        try:
            for batches in self._windows(len(names)):
                asks = []
                seconds = self._seconds(batches)
                for first, stop in batches:
                    part = Handles(handles.slots[first:stop], handles.generations[first:stop])
                    asks.append(self._put(tuple(names[first:stop]), blocks, rows[first:stop], part, seconds))
                kept += sum((yield asks))
        finally:
            self._give_up(handles)
        return kept, refused

    def store(
        self,
        names: Sequence[bytes],
        blocks: npt.NDArray[np.uint8],
        wait: float,
        lineage: Lineage | None,
        start: Callable[[Handles], tuple[Handles, int]],
    ) -> Steps[int]:
        """Store blocks, uint8 [n, block_bytes]: those that the sidecar does not have are sent.

        Returns:
            how many it has now, or somebody else was writing.
        """
        (reservation,) = yield [self._asks.reserve(names, wait, lineage)]
        new = reservation.take()
        others = int(np.count_nonzero((reservation.status != _DENIED) & (reservation.status != _NEW)))
        kept, _ = yield from self.put(reservation, new, blocks, new, start)
        return others + kept

    # Inside

    def _copied(self, lease: LoadedLease, names: Sequence[bytes]) -> Steps[CopiedLease]:
        count = len(lease)
        copies = np.empty((count, self._size), dtype=np.uint8)
        try:
            got = yield from self.fetch(names[:count], copies)
        except BaseException:
            lease.release()
            raise
        lease.shorten(got)  # the connection broke between
        cold = lease.cold if got == count else 0
        return CopiedLease(self._owner, lease.slots, lease.generations, copies, cold, min(lease.loaded, got))

    def _windows(self, count: int) -> Iterator[list[tuple[int, int]]]:
        """Of so many blocks, the batches (first, end) that travel at a time."""
        most = min(_BATCH_BYTES, self._core.max_frame - FRAME_ROOM)
        size = max(1, most // (self._size + HASH_BYTES))
        batches = [(first, min(first + size, count)) for first in range(0, count, size)]
        at_a_time = max(1, _WINDOW_BYTES // (size * self._size))
        for first in range(0, len(batches), at_a_time):
            yield batches[first : first + at_a_time]

    def _seconds(self, batches: list[tuple[int, int]]) -> float:
        """How much longer these, which share the wire, may take than other requests."""
        return (batches[-1][1] - batches[0][0]) * self._size / _BYTES_PER_SECOND

    def _get(self, names: tuple[bytes, ...], seconds: float) -> Ask[bytes]:
        def convert(reply: Message) -> bytes:
            data = expect(reply, Blocks).data
            if len(data) % self._size or len(data) > self._size * len(names):
                raise ProtocolError("the sidecar sent parts of blocks, or more than were asked for")
            return data

        return Ask(
            self._space,
            lambda number: Get(number, names),
            convert,
            lambda: b"",
            seconds,
        )

    def _put(
        self,
        names: tuple[bytes, ...],
        blocks: npt.NDArray[np.uint8],
        rows: npt.NDArray[np.int64],
        handles: Handles,
        seconds: float,
    ) -> Ask[int]:
        def message(number: int) -> Message:
            first, last = int(rows[0]), int(rows[-1])
            # What lies together is not gathered first.
            together = last - first == len(rows) - 1
            data = (blocks[first : last + 1] if together else blocks[rows]).tobytes()
            return Put(number, names, data, 0.0)

        def convert(reply: Message) -> int:
            count = expect(reply, Count).count
            self._space.held.end_writing(handles)
            return count

        return Ask(
            self._space,
            message,
            convert,
            lambda: 0,
            seconds,
            sends=len(names) * self._size,
        )
