"""What a client holds of a space: leases and reservations, in arrays over its slots, without I/O.

The sidecar has the same books. They are made to agree after every new connection (`Reassert`), so nothing
leaks where a reply was lost, and nothing is released twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..kvstore.handles import Generations, all_different
from ..kvstore.policy import Ids

__all__ = ["Amends", "Claimed", "Handles", "Holdings"]

_FREE: Final = 0
_RESERVED: Final = 1
_COMMITTING: Final = 2
_MOST_SLOTS: Final = 1 << 24
"""Slots of any space."""


@dataclass(frozen=True)
class Handles:
    """Slots and the generations under which they were granted.

    Args:
        slots: int32 [n].
        generations: int64 [n].
    """

    slots: Ids
    generations: Generations

    def __len__(self) -> int:
        return len(self.slots)

    def rounds(self) -> Iterator[Handles]:
        """The same in parts, no slot twice in one."""
        if all_different(self.slots):
            if len(self):
                yield self
            return
        left = self
        while len(left):
            first = np.zeros(len(left), dtype=np.bool_)
            first[np.unique(left.slots, return_index=True)[1]] = True
            if first.all():
                yield left
                return
            yield left.where(first)
            left = left.where(~first)

    def where(self, chosen: npt.NDArray[np.bool_]) -> Handles:
        """Those that are chosen, bool [n]."""
        if np.count_nonzero(chosen) == len(chosen):
            return self
        return Handles(self.slots[chosen], self.generations[chosen])


@dataclass(frozen=True)
class Claimed:
    """All that was held when it was said so to the sidecar; ``counts`` is 0 for reservations."""

    handles: Handles
    counts: Ids


@dataclass(frozen=True)
class Amends:
    """What is to be said after `Reassert` was answered.

    Args:
        lost: what is not held any more.
        released: leases that were given back after they were claimed, in parts with no slot twice.
        aborted: reservations, likewise.
        committed: reservations whose commits were not answered.
    """

    lost: Claimed
    released: tuple[Handles, ...]
    aborted: Handles
    committed: Handles


class Holdings:
    """Leases and reservations of a space.

    Args:
        capacity: slots that it may have.
        grows: whether that is not known: then there is room for the slots that it turns out to have.

    Attributes:
        leases: how many leases are held, those of one slot each counted.
        reservations: how many slots are reserved, or their commits not answered.
    """

    def __init__(self, capacity: int, *, grows: bool = False) -> None:
        self._grows = grows
        self.leases = 0
        self.reservations = 0
        # Zeros that nobody touched take no memory.
        self._counts = np.zeros(capacity, dtype=np.int32)
        self._writing = np.zeros(capacity, dtype=np.uint8)
        self._generations = np.zeros(capacity, dtype=np.int64)

    @property
    def empty(self) -> bool:
        """Whether nothing is held."""
        return not self.leases and not self.reservations

    def make_room(self, slots: Ids) -> None:
        """The space has these slots. Of no effect where its capacity is known, or no space has so many."""
        if not self._grows:
            return
        most = int(slots.max(initial=-1))
        if not len(self._counts) <= most < _MOST_SLOTS:
            return
        more = max(most + 1, 2 * len(self._counts)) - len(self._counts)
        self._counts = np.pad(self._counts, (0, more))
        self._writing = np.pad(self._writing, (0, more))
        self._generations = np.pad(self._generations, (0, more))

    def fits(self, handles: Handles) -> bool:
        """Whether there is a generation for each of these, and they are slots of the space."""
        slots = handles.slots
        if len(slots) != len(handles.generations):
            return False
        # Negative ones are the largest.
        return not len(slots) or bool(slots.view(np.uint32).max() < len(self._counts))

    def add_leases(self, handles: Handles) -> None:
        """One more lease on each of these."""
        slots = handles.slots
        at = slots.astype(np.intp)  # indices of any other type are made so each time
        if all_different(slots):
            self._counts[at] += 1
        else:
            np.add.at(self._counts, slots, 1)
        self._generations[at] = handles.generations
        # Who has a lease on it need not ask any more whether its commit arrived.
        self._end_writing(slots)
        self.leases += len(slots)

    def take_leases(self, handles: Handles) -> npt.NDArray[np.bool_]:
        """One lease less on each of these, no slot twice: bool [n], which of them were held."""
        mine = handles.slots.astype(np.intp)
        good: npt.NDArray[np.bool_] = self._generations[mine] == handles.generations
        good &= self._counts[mine] > 0
        if np.count_nonzero(good) < len(good):
            mine = mine[good]
        self._counts[mine] -= 1
        self.leases -= len(mine)
        return good

    def add_reservations(self, handles: Handles) -> None:
        """These are reserved."""
        self._writing[handles.slots] = _RESERVED
        self._generations[handles.slots] = handles.generations
        self.reservations += len(handles)

    def start_commit(self, handles: Handles) -> npt.NDArray[np.bool_]:
        """These are written: bool [n], which of them were reserved. They stay here until `end_writing`."""
        good = self._current(handles)
        good[self._writing[handles.slots] != _RESERVED] = False
        self._writing[handles.slots[good]] = _COMMITTING
        return good

    def end_writing(self, handles: Handles) -> npt.NDArray[np.bool_]:
        """These were committed, aborted or refused: bool [n], which of them were still to be."""
        good = self.writing(handles)
        self._end_writing(handles.slots[good])
        return good

    def committing(self, handles: Handles) -> npt.NDArray[np.bool_]:
        """bool [n]: of which of these the commit was not answered."""
        found: npt.NDArray[np.bool_] = self._current(handles)
        found &= self._writing[handles.slots] == _COMMITTING
        return found

    def writing(self, handles: Handles) -> npt.NDArray[np.bool_]:
        """bool [n]: which of these are reserved, or committed without an answer."""
        found: npt.NDArray[np.bool_] = self._current(handles)
        found &= self._writing[handles.slots] != _FREE
        return found

    def counts(self, handles: Handles) -> Ids:
        """int32 [n]: leases that are held under these handles."""
        held: Ids = np.where(self._current(handles), self._counts[handles.slots], 0).astype(np.int32)
        return held

    def claim(self) -> Claimed:
        """All that is held."""
        leased = np.flatnonzero(self._counts).astype(np.int32)
        writing = np.flatnonzero(self._writing).astype(np.int32)
        slots = np.concatenate([leased, writing])
        counts = np.concatenate([self._counts[leased], np.zeros(len(writing), dtype=np.int32)])
        return Claimed(Handles(slots, self._generations[slots]), counts)

    def lose(self, handles: Handles) -> None:
        """These are no longer held, whatever was held of them."""
        current = handles.where(self._current(handles))
        self.leases -= int(self._counts[current.slots].sum())
        self._counts[current.slots] = 0
        self._end_writing(current.slots)
        # A generation that none has, so what is released late is not taken for what comes after it.
        self._generations[current.slots] = 0

    def settle(self, claimed: Claimed, good: npt.NDArray[np.bool_]) -> Amends:
        """What was claimed is answered, bool [n]: forget what is lost, and tell what is to be said now."""
        leased = claimed.counts > 0
        # A commit whose reply was lost may well have been done.
        unknown = ~good & ~leased & self.committing(claimed.handles)
        gone = ~good & ~unknown
        self.end_writing(claimed.handles.where(unknown))
        self.lose(claimed.handles.where(gone))
        kept = claimed.handles.where(good & leased)
        over = claimed.counts[good & leased] - self.counts(kept)
        most = int(over.max()) if len(over) else 0
        reserved = claimed.handles.where(good & ~leased)
        return Amends(
            Claimed(claimed.handles.where(gone), claimed.counts[gone]),
            tuple(kept.where(over > number) for number in range(most)),
            reserved.where(~self.writing(reserved)),
            reserved.where(self.committing(reserved)),
        )

    def _current(self, handles: Handles) -> npt.NDArray[np.bool_]:
        same: npt.NDArray[np.bool_] = self._generations[handles.slots] == handles.generations
        return same

    def _end_writing(self, slots: Ids) -> None:
        if self.reservations and self._writing[slots].any():
            slots = np.unique(slots)
            self.reservations -= int(np.count_nonzero(self._writing[slots]))
            self._writing[slots] = _FREE
