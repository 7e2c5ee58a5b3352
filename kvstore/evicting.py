"""Evictions that operators ask for: which blocks go from a tier, and what that costs.

A million blocks are gone through without the lock, longest unused first; what was chosen is looked at again,
and goes, a slice at a time with it. So nobody waits for more than a slice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..tiers.cold import ColdPurge, ColdStatus, ColdTier
from ..tiers.errors import ColdTierUnavailableError, ConfigError
from .cold_writes import ColdWrites
from .handles import Generations
from .policy import Ids
from .room import SpaceRoom
from .shared import HostShared
from .slot_looks import IdleBlocks
from .slots import SlotRecords

__all__ = ["MOST_AGE", "EvictReport", "SpaceEvictions", "evict_from_cold", "evict_from_host"]

MOST_AGE: Final = 1e10
"""Seconds, three centuries: the most that may be said of how long a block was not used."""
_SLICE: Final = 1024
"""Blocks that are looked up, or go, before others have the lock."""


@dataclass(frozen=True)
class EvictReport:
    """What went, or would.

    Args:
        blocks, bytes: of the tier that was asked for.
        lost: how many of the blocks are in no tier any more.
    """

    blocks: int
    bytes: int
    lost: int


class SpaceEvictions:
    """The evictions of one space.

    Args:
        shared: what the space shares with others.
        records: its slots.
        room: how it comes by slots.
        writes: copies its blocks to the cold tier.
        space: its id.
    """

    def __init__(
        self, shared: HostShared, records: SlotRecords, room: SpaceRoom, writes: ColdWrites, space: bytes
    ) -> None:
        self._shared = shared
        self._records = records
        self._room = room
        self._writes = writes
        self.space = space
        self.block_bytes = room.block_bytes

    def demote(self, hashes: Sequence[bytes], until: float) -> int:
        """See `HostSpace.demote`.

        Args:
            until: when to be done at the latest, by `time.monotonic`.
        """
        shared, records = self._shared, self._records
        count = 0
        with shared.cold.use() as cold:
            if cold is None:
                raise ColdTierUnavailableError("there is no cold tier to demote blocks to")
            for names in _from_the_end(hashes, min(_SLICE, self._writes.most)):
                done = self._writes.write_named(cold, names, until)
                with shared.lock():
                    shared.check_open()
                    slots = records.idle_named(names)
                    going = slots[records.in_cold[slots] & ~records.is_cleaning(slots)]
                    count += self._room.evict_idle(going)
                if not done:
                    break
        return count

    def idle(self, hashes: Sequence[bytes] | None, until: int) -> IdleBlocks:
        """Blocks that may go and were not used after a tick, longest unused first.

        Args:
            hashes: of these; None: of all, found without the lock.
        """
        shared, records = self._shared, self._records
        if hashes is None:
            with shared.lock():
                extents = frozenset(records.extents)
            return records.looks.idle(extents, until)
        found: list[Ids] = [np.empty(0, np.int32)]
        generations: list[Generations] = [np.empty(0, np.int64)]
        used_at: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
        # Of what was used together a prompt's beginning is to stay longest.
        for names in _from_the_end(hashes, _SLICE):
            with shared.lock():
                slots = records.idle_named(names)[::-1]
                slots = records.idle(slots, records.generations[slots], until)
                found.append(slots)
                generations.append(records.generations[slots])
                used_at.append(records.used_at(slots))
        ticks = np.concatenate(used_at)
        order = np.argsort(ticks, kind="stable")
        return IdleBlocks(np.concatenate(found)[order], np.concatenate(generations)[order], ticks[order])

    def evict(self, slots: Ids, generations: Generations, until: int, *, dry_run: bool) -> tuple[int, int]:
        """Let go of blocks of `idle`, as far as they still may.

        Args:
            dry_run: change nothing.

        Returns:
            how many went, or would, and how many of them have no copy in the cold tier.
        """
        gone = lost = 0
        for start in range(0, len(slots), _SLICE):
            part = slice(start, start + _SLICE)
            with self._shared.lock():
                self._shared.check_open()
                going = self._records.idle(slots[part], generations[part], until)
                lost += int(np.count_nonzero(~self._records.in_cold[going]))
                gone += len(going) if dry_run else self._room.evict_idle(going)
        return gone, lost

    def count_copied(self, cold: ColdTier, hashes: Sequence[bytes] | None, until: float) -> int:
        """How many of these blocks (None: of all) are resident and have a copy in the cold tier.

        It is asked for those of which that is not known: it may have them since before they came here.
        """
        count = 0
        for slots in self._resident(hashes):
            with self._shared.lock():
                known = self._records.in_cold[slots]
                names = self._records.names(slots[~known])
            there = (
                cold.contains(self.space, names, max(0.0, until - time.monotonic())) if names else known[:0]
            )
            count += int(np.count_nonzero(known)) + int(np.count_nonzero(there))
        return count

    def _resident(self, hashes: Sequence[bytes] | None) -> Iterator[Ids]:
        """The slots of these blocks (None: of all), a few at a time."""
        if hashes is not None:
            for names in _from_the_end(hashes, _SLICE):
                with self._shared.lock():
                    slots = self._records.slots_of(names)
                yield slots
            return
        with self._shared.lock():
            slots = self._records.committed_slots
        for start in range(0, len(slots), _SLICE):
            yield slots[start : start + _SLICE]

    def forget_copies(self, hashes: Sequence[bytes] | None) -> None:
        """The cold tier has no copy of these blocks (None: of any) any more.

        Of what is being copied there at this moment it may be told otherwise: that costs a hit.
        """
        for slots in self._resident(hashes):
            with self._shared.lock():
                self._records.in_cold[slots] = False


def evict_from_host(
    shared: HostShared,
    spaces: Sequence[SpaceEvictions],
    *,
    hashes: Sequence[bytes] | None,
    older_than: float | None,
    most_bytes: int | None,
    dry_run: bool,
) -> EvictReport:
    """Evict blocks that nobody leases and that are not being copied below, longest unused first.

    Args:
        spaces: of these.
        hashes: these blocks, none twice; None: all.
        older_than: those that were last used so many seconds ago or longer; None: all.
        most_bytes: until so many bytes of them have gone; None: all.
        dry_run: tell what would go, and change nothing.
    """
    with shared.lock():
        shared.check_open()
        clock = shared.clock.read()
    until = clock.now if older_than is None else clock.tick_before(older_than)
    found = [space.idle(hashes, until) for space in spaces]
    counts = [len(one.slots) for one in found]
    whose = np.repeat(np.arange(len(spaces)), counts)
    ticks = np.concatenate([np.empty(0, np.int64), *(one.used_at for one in found)])
    order = np.argsort(ticks, kind="stable")
    if most_bytes is not None:
        sizes = np.repeat([space.block_bytes for space in spaces], counts)
        order = order[np.cumsum(sizes[order]) <= most_bytes]
    blocks = nbytes = lost = first = 0
    for number, (space, idle) in enumerate(zip(spaces, found, strict=True)):
        chosen = order[whose[order] == number] - first
        first += counts[number]
        gone, without_copy = space.evict(idle.slots[chosen], idle.generations[chosen], until, dry_run=dry_run)
        blocks += gone
        nbytes += gone * space.block_bytes
        lost += without_copy
    return EvictReport(blocks, nbytes, lost)


def evict_from_cold(
    shared: HostShared,
    spaces: Sequence[SpaceEvictions],
    *,
    hashes: Sequence[bytes] | None,
    deadline: float,
    dry_run: bool,
) -> EvictReport:
    """Have blocks be gone from the cold tier; what host memory has of them stays, and may be copied again.

    Args:
        spaces: of these.
        hashes: these blocks, none twice; None: all.
        deadline: seconds.
        dry_run: tell what would go, and change nothing.

    Raises:
        ConfigError: it cannot be told what would go.
        ColdTierUnavailableError: there is none, or it did not remove all in time.
    """
    if dry_run and hashes is None:
        raise ConfigError("dry_run", "a cold tier does not tell what it has of a space: name the blocks")
    until = time.monotonic() + deadline
    blocks = nbytes = lost = 0
    with shared.cold.use() as cold:
        if cold is None:
            raise ColdTierUnavailableError("there is no cold tier")
        for space in spaces:
            left = max(0.0, until - time.monotonic())
            copied = space.count_copied(cold, hashes, until)
            if dry_run:
                there = np.count_nonzero(cold.contains(space.space, hashes or (), left))
                done = ColdPurge(int(there), ColdStatus.OK)
            else:
                done = cold.purge(space.space, hashes, space.block_bytes, left)
                space.forget_copies(hashes)
            blocks += done.removed
            nbytes += done.removed * space.block_bytes
            lost += max(0, done.removed - copied)
            if done.status is not ColdStatus.OK:
                raise ColdTierUnavailableError(
                    f"{blocks} blocks are gone from the cold tier, which did not remove the others in time"
                )
    return EvictReport(blocks, nbytes, lost)


def _from_the_end(hashes: Sequence[bytes], count: int) -> Iterator[Sequence[bytes]]:
    """So many at a time, the last ones first; among these their order stays."""
    for stop in range(len(hashes), 0, -count):
        yield hashes[max(0, stop - count) : stop]
