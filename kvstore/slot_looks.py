"""Looks at the slots of one space that need no lock: what they hold, counted, and which have long been idle.

Arrays stay where they are and are written a batch at a time, so a look while others write shows some slots as
they were and some as they are. Whoever acts on one looks at the slot again, with the lock held. Slots are
looked at a slice at a time, so that a million of them take little memory, and other threads their turns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from .handles import Generations
from .policy import Ids
from .slot_arrays import SlotArrays, SlotState

__all__ = ["IdleBlocks", "SlotCounts", "SlotLooks"]

_SLICE: Final = 1 << 16
_COMMITTED: Final = int(SlotState.COMMITTED)
_DAMAGED: Final = int(SlotState.DAMAGED)


@dataclass(frozen=True)
class SlotCounts:
    """How many slots are what.

    Args:
        leased: leased otherwise than by pins; purged ones that somebody still holds, too.
        pinned: pinned.
        dirty: committed, and without a copy in the cold tier.
        damaged: out of use, since their records are damaged.
    """

    leased: int = 0
    pinned: int = 0
    dirty: int = 0
    damaged: int = 0


@dataclass(frozen=True, eq=False)
class IdleBlocks:
    """Blocks that may go, longest unused first.

    Args:
        slots: int32 [n].
        generations: int64 [n].
        used_at: int64 [n], the ticks of their last use.
    """

    slots: Ids
    generations: Generations
    used_at: npt.NDArray[np.int64]


class SlotLooks:
    """Looks at one space's slots.

    Args:
        slots_per_extent: slots that an extent is cut into.
        arrays: the records.
        leases: int32 [capacity], pins included.
        timed: int32 [capacity], pins that end by themselves.
        cleaning: bool [capacity], being copied to the cold tier.
    """

    def __init__(
        self,
        slots_per_extent: int,
        arrays: SlotArrays,
        leases: npt.NDArray[np.int32],
        timed: npt.NDArray[np.int32],
        cleaning: npt.NDArray[np.bool_],
    ) -> None:
        self._per_extent = slots_per_extent
        self._arrays = arrays
        self._leases = leases
        self._timed = timed
        self._cleaning = cleaning

    def count(self, extents: Collection[int]) -> SlotCounts:
        """Count the slots of these extents."""
        leased = pinned = dirty = damaged = 0
        arrays = self._arrays
        for slots in self._slices(extents):
            state = arrays.state[slots]
            pins = arrays.pins[slots] + self._timed[slots]
            leased += int(np.count_nonzero(self._leases[slots] > pins))
            pinned += int(np.count_nonzero(pins))
            dirty += int(np.count_nonzero((state == _COMMITTED) & ~arrays.in_cold[slots]))
            damaged += int(np.count_nonzero(state == _DAMAGED))
        return SlotCounts(leased, pinned, dirty, damaged)

    def idle(self, extents: Collection[int], until: int) -> IdleBlocks:
        """Blocks of these extents that may go and were last used up to a tick.

        Of what was used together, higher slots come before lower ones, which mostly hold what is earlier in a
        prompt.
        """
        found: list[Ids] = [np.empty(0, np.int32)]
        used: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
        for part in self._slices(extents):
            used_at = self._arrays.used_at[part]
            idle = (self._arrays.state[part] == _COMMITTED) & (self._leases[part] == 0)
            idle &= ~self._cleaning[part] & (used_at <= until)
            at = np.flatnonzero(idle)
            found.append((at + part.start).astype(np.int32))
            used.append(used_at[at])
        slots, ticks = np.concatenate(found)[::-1], np.concatenate(used)[::-1]
        order = np.argsort(ticks, kind="stable")
        slots = slots[order]
        return IdleBlocks(slots, self._arrays.generations[slots], ticks[order])

    def _slices(self, extents: Collection[int]) -> Iterator[slice]:
        """The slots of these extents: neighbouring ones together, up to `_SLICE` at a time, ascending."""
        numbers = np.array(sorted(extents), dtype=np.int64)
        runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1) if len(numbers) else []
        for run in runs:
            stop = (int(run[-1]) + 1) * self._per_extent
            for start in range(int(run[0]) * self._per_extent, stop, _SLICE):
                yield slice(start, min(start + _SLICE, stop))
