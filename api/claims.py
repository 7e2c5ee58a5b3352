"""What clients hold of a space: leases and reservations, in arrays over its slots.

The store knows that a slot is leased, not by whom. Here it is written down by whom, so that nobody ends
another's lease or commits another's reservation, and so that all that a group held can be given back when its
processes are gone. No lock: one thread, the sidecar's loop, reads and changes these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from ..kvstore.handles import Generations, all_different
from ..kvstore.policy import Ids
from ..kvstore.space import HostSpace
from ..tiers.errors import ConfigError
from .group_book import ClaimArrays

__all__ = ["Claims", "HeldHandles"]

_BATCH: Final = 1 << 14
"""Slots that are given back in one go: the store's lock is free in between."""
_MOST_LEASES: Final = 1024
"""Leases of one slot that a client says it holds."""


class HeldHandles:
    """What a group held of a space and is to be given back. Belongs to whoever took it from `Claims`."""

    def __init__(
        self, space: HostSpace, leases: npt.NDArray[np.int32], reserved: Ids, generations: Generations
    ) -> None:
        self.space = space
        self._leases = leases
        self._reserved = reserved
        self._generations = generations

    def give_back(self) -> None:
        """Abort the reservations and end the leases. Called from any thread.

        Raises:
            ClosedError: the store is closed; they ended with it.
        """
        for slots in _batches(self._reserved):
            self.space.abort(slots, self._generations[slots])
        leases = self._leases
        while len(slots := np.flatnonzero(leases).astype(np.int32)):
            for batch in _batches(slots):
                self.space.release(batch, self._generations[batch])
            leases[slots] -= 1


class Claims:
    """What one client of a group holds of one space.

    Args:
        space: the space.
        arrays: where it is written down; None: in this process alone.

    Attributes:
        leased: leases that the client holds.
        reserved: slots that it has reserved.
        arrays: as given.
    """

    def __init__(self, space: HostSpace, arrays: ClaimArrays | None = None) -> None:
        self.space = space
        self.arrays = arrays or ClaimArrays.alone(space.capacity)
        self.leased = 0
        self.reserved = 0
        self._leases = self.arrays.leases
        self._reserved = self.arrays.reserved
        # Zeros that nobody touched take no memory.
        self._generations = np.zeros(space.capacity, dtype=np.int64)

    def existing(self, slots: Ids) -> npt.NDArray[np.bool_]:
        """bool [n]: which of these numbers are slots of the space."""
        found: npt.NDArray[np.bool_] = (slots >= 0) & (slots < len(self._leases))
        return found

    def add_leases(self, slots: Ids, generations: Generations) -> None:
        """The client has one more lease on each of these slots (none twice)."""
        at = slots.astype(np.intp)  # indices of any other type are made so each time
        self._leases[at] += 1
        self._generations[at] = generations
        self.leased += len(slots)

    def add_reservations(self, slots: Ids, generations: Generations) -> None:
        """The client reserved these slots."""
        self._reserved[slots] = True
        self._generations[slots] = generations
        self.reserved += len(slots)

    def take_leases(self, slots: Ids, generations: Generations) -> npt.NDArray[np.bool_]:
        """One lease less on each of these that the client has: bool [n], each slot told once.

        Raises:
            ConfigError: there is not one generation for each slot.
        """
        good = self._held(slots, generations, self._leases)
        mine = slots if np.count_nonzero(good) == len(good) else slots[good]
        self._leases[mine.astype(np.intp)] -= 1
        self.leased -= len(mine)
        return good

    def take_reservations(self, slots: Ids, generations: Generations) -> npt.NDArray[np.bool_]:
        """These are reserved by the client no longer: bool [n] where they were, each slot told once.

        Raises:
            ConfigError: there is not one generation for each slot.
        """
        good = self._held(slots, generations, self._reserved)
        mine = slots[good]
        self._reserved[mine] = False
        self.reserved -= len(mine)
        return good

    def holds(self, slots: Ids, generations: Generations) -> npt.NDArray[np.bool_]:
        """bool [n]: which of these the client has leased or reserved."""
        held: npt.NDArray[np.bool_] = (self._leases[slots] > 0) | self._reserved[slots]
        held &= self._generations[slots] == generations
        return held

    def agree(self, slots: Ids, generations: Generations, counts: Ids) -> npt.NDArray[np.bool_]:
        """Make this agree with what the client says that it holds, and nothing else.

        What is written here beyond it is released or aborted; leases that are lacking are taken.

        Args:
            counts: leases of each slot; 0 for a reservation.

        Returns:
            bool [n]: which of these the client has now as it says; each slot is told once.

        Raises:
            ConfigError: the arrays differ in length, or a count is out of range.
            ClosedError: the store is closed.
        """
        if not len(slots) == len(generations) == len(counts):
            raise ConfigError("counts", f"must be one for each of {len(slots)} slots and their generations")
        if len(counts) and not 0 <= counts.min() <= counts.max() <= _MOST_LEASES:
            raise ConfigError("counts", f"must be from 0 to {_MOST_LEASES}")
        good = _first_of_each(slots, self.existing(slots))
        at = np.where(good, slots, 0)
        known = good & (self._generations[at] == generations)
        wanted = np.zeros_like(self._leases)
        wanted[at[known]] = counts[known]
        kept = np.zeros_like(self._reserved)
        kept[at[known & (counts == 0)]] = True
        dropped = np.flatnonzero(self._reserved & ~kept).astype(np.int32)
        if len(dropped):
            self.take_reservations(dropped, self._generations[dropped])
            self.space.abort(dropped, self._generations[dropped])
        while len(over := np.flatnonzero(self._leases > wanted).astype(np.int32)):
            self.take_leases(over, self._generations[over])
            self.space.release(over, self._generations[over])
        # What is left here of another generation is nothing: those leases went.
        lacking = np.where(good, counts - np.where(known, self._leases[at], 0), 0)
        while len(asked := np.flatnonzero(lacking > 0)):
            got = asked[self.space.lease(slots[asked], generations[asked])]
            self.add_leases(slots[got], generations[got])
            lacking[got] -= 1
            lacking[np.setdiff1d(asked, got)] = 0
        held = np.where(counts > 0, self._leases[at] == counts, self._reserved[at])
        found: npt.NDArray[np.bool_] = good & held & (self._generations[at] == generations)
        return found

    def restore(self, wrong: npt.NDArray[np.bool_]) -> None:
        """The arrays are those of a client that outlived its sidecar: it holds what they say, but ``wrong``.

        Args:
            wrong: bool [capacity].
        """
        self._leases[wrong] = 0
        self._reserved[wrong] = False
        held = np.flatnonzero((self._leases > 0) | self._reserved).astype(np.int32)
        self._generations[held] = self.space.generations_of(held)
        self.leased = int(self._leases.sum())
        self.reserved = int(np.count_nonzero(self._reserved))

    def take_all(self) -> HeldHandles:
        """All that the client holds, which it holds no longer. The claims are not used after this."""
        self.leased = self.reserved = 0
        reserved = np.flatnonzero(self._reserved).astype(np.int32)
        # The memory of arrays that are written down is another client's soon.
        leases = self._leases if self.arrays.section is None else self._leases.copy()
        return HeldHandles(self.space, leases, reserved, self._generations)

    def _held(
        self, slots: Ids, generations: Generations, held: npt.NDArray[np.int32] | npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.bool_]:
        if len(slots) != len(generations):
            raise ConfigError(
                "generations", f"must be one for each of {len(slots)} slots, got {len(generations)}"
            )
        try:
            at = slots.view(np.uint32).astype(np.intp)  # negative ones are the largest
            good: npt.NDArray[np.bool_] = held[at] > 0
            good &= self._generations[at] == generations
        except IndexError:
            good = self.existing(slots)
            at = np.where(good, slots, 0).astype(np.intp)
            good &= (held[at] > 0) & (self._generations[at] == generations)
        return _first_of_each(slots, good)


def _first_of_each(slots: Ids, good: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """bool [n]: the good ones, of a slot that is named twice the first only."""
    if all_different(slots):
        return good
    first = np.zeros(len(slots), dtype=np.bool_)
    first[np.unique(np.where(good, slots, -1), return_index=True)[1]] = True
    return good & first


def _batches(slots: Ids) -> Iterator[Ids]:
    for start in range(0, len(slots), _BATCH):
        yield slots[start : start + _BATCH]
