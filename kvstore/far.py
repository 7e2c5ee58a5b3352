"""Far blocks: those that rows read where they lie in host memory, and the leases that keep them there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..tiers.address import FAR, TAG_MASK
from ..tiers.errors import IntegrityError
from .calls import SpaceCalls
from .handles import Generations, Lease
from .lineage import ChainPlace
from .policy import Ids
from .tables import Words

__all__ = ["FarBlocks"]


class FarBlocks:
    """The far words of every row, and one lease a slot that is held for them, however many rows hold it.

    A lease that is no longer needed ends with the step that may still read under it: `release_ended`.

    Args:
        host: the space that the blocks are of.
        rows: rows of the block table.

    Attributes:
        host: that space.
        counts: int32 [rows], far blocks that each row holds. Read only.
    """

    def __init__(self, host: SpaceCalls, rows: int) -> None:
        self.counts = np.zeros(rows, dtype=np.int32)
        self.host = host
        self._refs = np.zeros(host.capacity, dtype=np.int32)
        self._generations = np.zeros(host.capacity, dtype=np.int64)
        self._ended: list[tuple[Ids, Generations]] = []

    # Words and slots

    def words(self, slots: Ids) -> Words:
        """The words of slots that are `SpaceCalls.readable_in_place`."""
        words = self.host.addresses(slots)
        words += self.host.device_delta
        words |= FAR
        return words

    def slots_at(self, words: Words) -> Ids:
        """The slots that far words name."""
        return self.host.slots_at(words - self.host.device_delta)

    def addresses(self, words: Words) -> npt.NDArray[np.int64]:
        """The addresses of far words in this process, int64 [n]: what a mover wants."""
        return (words & ~TAG_MASK) - self.host.device_delta

    def among(self, slots: Ids, generations: Generations) -> Ids:
        """Those of these slots that are held under these generations."""
        found: Ids = slots[(self._refs[slots] > 0) & (self._generations[slots] == generations)]
        return found

    # Who holds them

    @property
    def held(self) -> int:
        """Slots that are leased, for rows or until `release_ended`."""
        leased = self._refs > 0
        for slots, _ in self._ended:
            leased[slots] = True
        return int(np.count_nonzero(leased))

    @property
    def rows(self) -> list[int]:
        """Rows that hold far blocks."""
        rows: list[int] = np.flatnonzero(self.counts).tolist()
        return rows

    def find(self, row: int, names: Sequence[bytes], start: ChainPlace, cold_deadline: float) -> Lease:
        """Have a row hold the leading blocks in host memory, brought up from the cold tier if need be.

        Args:
            start: where in their chain these are.
            cold_deadline: seconds to wait for the cold tier; 0 does not ask it.

        Returns:
            what the row holds now; the lease is not the caller's to release.
        """
        if cold_deadline > 0:
            lease = self.host.load(names, cold_deadline, start=start)
        else:
            lease = self.host.match(names, start=start)
        self.hold(row, lease.slots, lease.generations)
        return lease

    def hold(self, row: int, slots: Ids, generations: Generations) -> None:
        """A row holds these slots, on which the caller has taken a lease that is ours from now on."""
        at = slots.astype(np.intp)  # indices of any other type are made so each time
        before = self._refs[at]
        self._refs[at] = before + 1
        self._generations[at] = generations
        self.counts[row] += len(slots)
        if before.any():
            again = before > 0
            self._ended.append((slots[again], generations[again]))

    def share(self, row: int, slots: Ids) -> None:
        """A row holds these slots, which another one holds too."""
        self._refs[slots] += 1
        self.counts[row] += len(slots)

    def end(self, row: int, slots: Ids) -> None:
        """A row no longer holds these slots."""
        if len(slots):
            self.counts[row] -= len(slots)
            self.let_go(slots)

    def keep(self, slots: Ids) -> Generations:
        """Hold slots that rows hold on nobody's behalf, until `let_go`; returns their generations."""
        self._refs[slots] += 1
        return self.generations(slots)

    def let_go(self, slots: Ids) -> None:
        """End a `keep`."""
        at = slots.astype(np.intp)
        after = self._refs[at]
        after -= 1
        self._refs[at] = after
        if not after.all():
            gone = at[after == 0]
            self._ended.append((gone.astype(np.int32), self._generations[gone]))

    def generations(self, slots: Ids) -> Generations:
        """The generations of slots that are held."""
        generations: Generations = self._generations[slots]
        return generations

    def release_ended(self) -> None:
        """The last step is done: give back the leases that nobody needs any more."""
        if self._ended:
            ended, self._ended = self._ended, []
            for slots, generations in ended:
                self.host.release(slots, generations)

    def check_integrity(self, held: npt.NDArray[np.int64]) -> None:
        """Prove that every slot is held as often as `held` (int64 [capacity]) says.

        Raises:
            IntegrityError: naming the first slot that is not.
        """
        if not np.array_equal(held, self._refs):
            slot = int(np.flatnonzero(held != self._refs)[0])
            raise IntegrityError(f"host slot {slot} is held {held[slot]} times, {self._refs[slot]} counted")
