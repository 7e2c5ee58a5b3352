"""Attaching: rows get blocks that are there already, wherever they lie, by name or by remembered place."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ..tiers.address import FAR
from .device import DeviceTier
from .far import FarBlocks
from .lineage import ChainPlace, Lineage
from .policy import Ids
from .session import Places
from .tables import BlockTable, Words

__all__ = ["Attacher", "Found"]


@dataclass
class Found:
    """Blocks attached to a row so far, by the tier they were found in."""

    device: int = 0
    host: int = 0
    cold: int = 0

    @property
    def blocks(self) -> int:
        """All of them."""
        return self.device + self.host + self.cold


class Attacher:
    """Finds blocks and writes their words into rows.

    A near block is held by the row; a far one is leased. Where this raises, the row holds what its words
    name and nothing else.

    Args:
        table: the rows.
        device: the device tier.
        far: the blocks that rows read in host memory; None where there is none.
    """

    def __init__(self, table: BlockTable, device: DeviceTier, far: FarBlocks | None) -> None:
        self._table = table
        self._device = device
        self._far = far

    def split(self, words: Words) -> tuple[Ids, Ids]:
        """Device blocks and host slots that words name."""
        far = (words & FAR) != 0
        if self._far is None or not far.any():
            return self._device.blocks_at(words), np.empty(0, dtype=np.int32)
        return self._device.blocks_at(words[~far]), self._far.slots_at(words[far])

    def addresses(self, words: Words) -> Words:
        """Where the bytes of these words are, for a mover."""
        found, far = words.copy(), (words & FAR) != 0
        if self._far is not None and far.any():
            found[far] = self._far.addresses(words[far])
        return found

    def share(self, row: int, other: int, count: int) -> None:
        """Row `other`, an empty one, holds the first `count` blocks of `row` too."""
        words = self._table.row(row)[:count].copy()
        self._table.set(other, 0, words)
        near, slots = self.split(words)
        self._device.pool.hold(near)
        if self._far is not None:
            self._far.share(other, slots)

    def let_go(self, row: int, words: Words) -> None:
        """The row no longer holds the blocks that these words name."""
        near, slots = self.split(words)
        self._device.pool.drop(near)
        if self._far is not None:
            self._far.end(row, slots)

    # By name

    def find(self, row: int, names: Sequence[bytes], cold_deadline: float, found: Found) -> None:
        """Attach ``names[found.blocks:]`` as far as they are found, near ones first, and count them.

        The cold tier is asked when nothing more is found above it, until `cold_deadline` seconds are over.
        """
        pool = self._device.pool
        end = time.monotonic() + cold_deadline
        first = count = found.blocks
        while count < len(names):
            near = pool.match(names, count)
            if len(near) or count == first:
                pool.found(near)
            if len(near):
                pool.hold(near)
                self._table.set(row, count, self._device.arena.addresses(near))
                found.device += len(near)
                count += len(near)
                if count == len(names):
                    return
            far = self._find_far(row, names, count, 0.0)
            found.host += far
            if not far and cold_deadline > 0 and (left := end - time.monotonic()) > 0:
                # Not further than to what is near: that may be on its way to host memory by this very thread.
                stop = next((at for at in range(count, len(names)) if names[at] in pool.index), None)
                far = self._find_far(row, names[:stop], count, left)
                found.cold += far
            if not far:
                break
            pool.missed(names, count, count + far)
            count += far
        pool.missed(names, count)

    def _find_far(self, row: int, names: Sequence[bytes], column: int, cold_deadline: float) -> int:
        """Attach the leading blocks from a column on in host memory (or bring them there); how many."""
        if self._far is None:
            return 0
        far = self._far
        lease = far.find(row, names[column:], ChainPlace.at(names, column), cold_deadline)
        written = 0
        try:
            written = self._write_far(far, row, column, lease.slots, names)
        finally:
            far.end(row, lease.slots[written:])
        return written

    def _write_far(self, far: FarBlocks, row: int, column: int, slots: Ids, names: Sequence[bytes]) -> int:
        """Write words of slots that the row holds; returns how many. The rest are left to the caller.

        Blocks that the device cannot read in place yet are copied to it, as far as it has room.

        Args:
            column: of the first slot.
            names: of the row's blocks from the first column on.
        """
        if not len(slots):
            return 0
        in_place = far.host.readable_in_place(slots)
        if in_place.all():
            words = far.words(slots)
        else:
            moving = np.flatnonzero(~in_place)
            room = self._device.pool.available
            if len(moving) > room:
                stop = int(moving[room])
                slots, in_place, moving = slots[:stop], in_place[:stop], moving[:room]
            words = far.words(slots)
            words[moving] = self._copy_up(far, slots[moving], names, column + moving)
            far.end(row, slots[moving])
        self._table.set(row, column, words)
        return len(slots)

    def _copy_up(
        self, far: FarBlocks, slots: Ids, names: Sequence[bytes], columns: npt.NDArray[np.int64]
    ) -> Words:
        """The words of device blocks that slots were copied to, for others to find too.

        Args:
            names: of a row's blocks, of which these are at `columns`, int64 [n].
        """
        blocks = self._device.allocate(len(slots))
        words = self._device.arena.addresses(blocks)
        try:
            self._device.copy(far.host.addresses(slots), words)
        except BaseException:
            self._device.pool.drop(blocks)
            raise
        own = [names[at] for at in columns.tolist()]
        lineage = Lineage.in_chain(names, columns)
        self._device.promoted(blocks, slots, far.generations(slots), own, lineage)
        return words

    # By remembered place

    def places(self, words: Words) -> Places:
        """Where the blocks of a row lie, to find them there again (`find_again`)."""
        pool = self._device.pool
        is_far = (words & FAR) != 0
        near = np.flatnonzero(~is_far)
        blocks = self._device.blocks_at(words[near])
        places = Places.unknown(len(words))
        places.device_blocks[near] = blocks
        places.device_generations[near] = pool.generations[blocks]
        places.host_slots[near] = pool.host_slots[blocks]
        places.host_generations[near] = pool.host_generations[blocks]
        if self._far is not None:
            far = np.flatnonzero(is_far)
            slots = self._far.slots_at(words[far])
            places.host_slots[far] = slots
            places.host_generations[far] = self._far.generations(slots)
        return places

    def place_copies(self, places: Places) -> bool:
        """Note copies in host memory that were made since, while a block is where it was in the device tier.

        Returns:
            whether there is nothing more to note.
        """
        pool = self._device.pool
        lacking = np.flatnonzero(places.host_generations == 0)
        blocks = places.device_blocks[lacking]
        there = pool.generations[blocks] == places.device_generations[lacking]
        lacking, blocks = lacking[there], blocks[there]
        places.host_slots[lacking] = pool.host_slots[blocks]
        places.host_generations[lacking] = pool.host_generations[blocks]
        return bool(places.host_generations[lacking].all())

    def find_again(self, row: int, places: Places, names: Sequence[bytes]) -> Found:
        """Attach the leading blocks that still are where they were."""
        if not len(places):
            return Found()
        pool, far = self._device.pool, self._far
        near = pool.generations[places.device_blocks] == places.device_generations
        stop = self._lease_again(far, row, places, near) if far is not None else _leading(near)
        near = near[:stop]
        blocks, slots = places.device_blocks[:stop], places.host_slots[:stop]
        if far is not None and not near.any():
            return self._find_all_far(far, row, slots, names)
        pool.found(blocks[near])
        pool.hold(blocks[near])
        written = 0
        # Runs of near and far words in turn; there is one run, most of the time.
        edges = (np.flatnonzero(np.diff(near)) + 1).tolist()
        try:
            for first, last in pairwise([0, *edges, stop]):
                if near[first:last].all():
                    self._table.set(row, first, self._device.arena.addresses(blocks[first:last]))
                    written = last
                elif far is not None:
                    written += self._write_far(far, row, first, slots[first:last], names)
                if written < last:
                    break
        finally:
            pool.drop(blocks[written:][near[written:]])
            if far is not None:
                far.end(row, slots[written:][~near[written:]])
        attached = int(np.count_nonzero(near[:written]))
        return Found(attached, written - attached)

    def _find_all_far(self, far: FarBlocks, row: int, slots: Ids, names: Sequence[bytes]) -> Found:
        """Write words of slots that the row holds, its leading blocks."""
        written = 0
        try:
            written = self._write_far(far, row, 0, slots, names)
        finally:
            far.end(row, slots[written:])
        return Found(0, written)

    def _lease_again(self, far: FarBlocks, row: int, places: Places, near: npt.NDArray[np.bool_]) -> int:
        """Hold what is far; returns how many leading blocks are there. Beyond these nothing is held."""
        asked = np.flatnonzero(~near & (places.host_generations > 0))
        whole = len(asked) == len(near)
        slots = places.host_slots if whole else places.host_slots[asked]
        generations = places.host_generations if whole else places.host_generations[asked]
        leased = far.host.lease(slots, generations, used=True)
        if whole and leased.all():
            far.hold(row, slots, generations)
            return len(near)
        there = near.copy()
        there[asked] = leased
        stop = _leading(there)
        wanted = leased & (asked < stop)
        far.hold(row, slots[wanted], generations[wanted])
        beyond = leased & ~wanted
        if beyond.any():
            far.host.release(slots[beyond], generations[beyond])
        return stop


def _leading(there: npt.NDArray[np.bool_]) -> int:
    """How many leading ones are true."""
    return len(there) if there.all() else int(there.argmin())
