"""What a space of host memory hands out: leases and reservations.

A handle is a slot and the generation under which it was granted: if the slot was granted again since, the
handle names nothing, and a late commit or release of it is refused.
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Protocol, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from ..tiers.errors import ClosedError, ConfigError
from ..tiers.settings import expect_array, expect_integer, shown
from .policy import Ids

__all__ = [
    "BlockViews",
    "Generations",
    "Lease",
    "Reservation",
    "ReserveStatus",
    "SlotOwner",
    "SlotViews",
    "all_different",
    "first_generations",
]

_FEW: Final = 1024
"""Slots among which a set finds repetitions sooner than arrays do."""
_SPARSE: Final = 256
Generations: TypeAlias = npt.NDArray[np.int64]
"""int64 [n]: how often each of n slots had been granted when it was."""


def first_generations(capacity: int) -> Generations:
    """Generations to start from, int64 [capacity]: a random positive number.

    So a handle that was remembered from another store, or from before a restart, names nothing in this one.
    """
    return np.full(capacity, secrets.randbits(62) + 1, dtype=np.int64)


def all_different(slots: Ids) -> bool:
    """Whether no slot of int32 [n] is named twice."""
    count = len(slots)
    if (slots[1:] > slots[:-1]).all():  # as most are that were granted together
        return True
    if count < _FEW:
        return len(set(slots.tolist())) == count
    lowest, highest = int(slots.min()), int(slots.max())
    if highest - lowest > _SPARSE * count:  # numbers that came over a wire
        return len(np.unique(slots)) == count
    seen = np.zeros(highest - lowest + 1, dtype=np.bool_)
    seen[slots - lowest] = True
    return bool(np.count_nonzero(seen) == count)


class SlotViews(Protocol):
    """Whose blocks can be looked at, by slot."""

    def view(self, slot: int) -> memoryview:
        """The bytes of one slot, writable."""
        ...


class SlotOwner(SlotViews, Protocol):
    """The space that granted a handle, as far as the handle needs it."""

    def release(self, slots: Ids, generations: Generations) -> None:
        """End leases."""
        ...

    def commit(self, slots: Ids, generations: Generations, *, in_cold: bool = False) -> None:
        """Reserved slots are written: name them, let them be found."""
        ...

    def abort(self, slots: Ids, generations: Generations) -> None:
        """Reserved slots will not be written."""
        ...


class ReserveStatus(enum.IntEnum):
    """What became of one hash of a reservation."""

    NEW = 0
    """A slot was granted: write it, then commit."""
    PRESENT = 1
    """Committed already; its slot and generation are told, and not leased."""
    PENDING = 2
    """Another writer holds a reservation for it."""
    DENIED = 3
    """There was no room."""


_INT64: Final = np.dtype(np.int64)
# A plain number: a member looked up on its class costs as much as comparing an array to it.
_NEW: Final = int(ReserveStatus.NEW)


class BlockViews(Sequence[npt.NDArray[np.uint8]]):
    """The bytes of slots where they lie: uint8 [block_bytes] each, not copied, made when it is asked for.

    Args:
        space: whose slots they are.
        slots: int32 [n].
        writable: False for what is leased.
    """

    def __init__(self, space: SlotViews, slots: Ids, *, writable: bool) -> None:
        self._space = space
        self._slots = slots
        self._writable = writable

    def __len__(self) -> int:
        return len(self._slots)

    @overload
    def __getitem__(self, at: int) -> npt.NDArray[np.uint8]: ...

    @overload
    def __getitem__(self, at: slice) -> BlockViews: ...

    def __getitem__(self, at: int | slice) -> npt.NDArray[np.uint8] | BlockViews:
        if isinstance(at, slice):
            return BlockViews(self._space, self._slots[at], writable=self._writable)
        view = self._space.view(int(self._slots[at]))
        return np.frombuffer(view if self._writable else view.toreadonly(), dtype=np.uint8)


class Lease:
    """A promise that blocks stay where they are, until `release`. A context manager.

    Attributes:
        space: the space whose slots they are.
        slots: int32 [n], the leading blocks that are resident.
        generations: int64 [n].
        cold: how many blocks after these seemed to be in the cold tier; no promise.
    """

    def __init__(self, space: SlotOwner, slots: Ids, generations: Generations, cold: int = 0) -> None:
        self.space = space
        self.slots = slots
        self.generations = generations
        self.cold = cold
        self._held = True

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def blocks(self) -> BlockViews:
        """The blocks where they lie, to be read until `release`: ``lease.blocks[i]`` is uint8 [block_bytes].

        Raises:
            ClosedError: the lease was released.
        """
        if not self._held:
            raise ClosedError("the lease was released")
        return BlockViews(self.space, self.slots, writable=False)

    def release(self) -> None:
        """End the lease. Idempotent; where the store was closed it has ended already."""
        if self._held:
            self._held = False
            with suppress(ClosedError):  # the store's end was the lease's
                self.space.release(self.slots, self.generations)

    def shorten(self, count: int) -> None:
        """Keep the first `count` blocks only.

        Raises:
            ConfigError: `count` is no number of blocks.
        """
        count = expect_integer("count", count, 0)
        if self._held and count < len(self.slots):
            slots, generations = self.slots[count:], self.generations[count:]
            self.slots, self.generations = self.slots[:count], self.generations[:count]
            self.space.release(slots, generations)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Reservation:
    """Slots to be written, one per hash. A context manager: what was not committed is aborted at its end.

    Attributes:
        space: the space whose slots they are.
        hashes: the hashes asked for.
        status: uint8 [n] of `ReserveStatus`.
        slots: int32 [n]; meaningful where the status is NEW or PRESENT.
        generations: int64 [n], likewise.
    """

    def __init__(
        self,
        space: SlotOwner,
        hashes: Sequence[bytes],
        status: npt.NDArray[np.uint8],
        slots: Ids,
        generations: Generations,
    ) -> None:
        self.space = space
        self.hashes = hashes
        self.status = status
        self.slots = slots
        self.generations = generations
        self._open = status == _NEW

    @property
    def new(self) -> npt.NDArray[np.int64]:
        """int64 [m]: positions of the hashes that were granted a slot."""
        return np.flatnonzero(self.status == _NEW)

    @property
    def blocks(self) -> BlockViews:
        """Where to write the `new` blocks until `commit`, in their order: uint8 [block_bytes] each."""
        return BlockViews(self.space, self.slots[self.new], writable=True)

    def commit(self, positions: npt.NDArray[np.int64] | None = None, *, in_cold: bool = False) -> None:
        """The bytes of these positions (default: all that are still open) are written: publish them.

        Args:
            positions: int64 [m], or a list of positions.
            in_cold: the cold tier has them already.

        Raises:
            ConfigError: `positions` are none of this reservation.
            ClosedError: the store is closed.
            StaleHandleError: a slot was granted again since; the others are committed all the same.
        """
        chosen = self.take(positions)
        self.space.commit(self.slots[chosen], self.generations[chosen], in_cold=in_cold)

    def abort(self, positions: npt.NDArray[np.int64] | None = None) -> None:
        """Give the slots of these positions (default: all that are still open) back.

        Raises:
            ConfigError: `positions` are none of this reservation.
            ClosedError: the store is closed.
            StaleHandleError: a slot was granted again since; the others are freed all the same.
        """
        chosen = self.take(positions)
        self.space.abort(self.slots[chosen], self.generations[chosen])

    def take(self, positions: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.int64]:
        """The positions among these (default: all) that are still open; they no longer are."""
        if positions is None:
            chosen = np.flatnonzero(self._open)
        else:
            asked = expect_array("positions", positions, _INT64)
            if len(asked) and not 0 <= asked.min() <= asked.max() < len(self._open):
                raise ConfigError(
                    "positions", f"must be from 0 to {len(self._open) - 1}, got {shown(positions)}"
                )
            chosen = asked[self._open[asked]]
        self._open[chosen] = False
        return chosen

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open.any():
            with suppress(ClosedError):  # then there are no slots to give back
                self.abort()
