"""Write-back: full blocks are copied from the device tier to host memory in the background.

So leaving the device tier later is free: the copy is there, and a full block never changes.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..tiers.arena import DeviceArena
from ..tiers.errors import ClosedError, StaleHandleError
from ..tiers.mover import Mover, Transfer, is_over, wait_through
from .calls import SpaceCalls
from .handles import Reservation, ReserveStatus
from .policy import Ids
from .pool import BlockPool
from .stats import StoreStats

__all__ = ["WriteBack"]

_log = logging.getLogger(__name__)

# A batch waits for more blocks until it has this many, or its first block has waited this long: so the
# bookkeeping of a copy is spent on many.
_BATCH: Final = 256
_LINGER_SECONDS: Final = 0.02
_RETRY_SECONDS: Final = 0.05


@dataclass(frozen=True)
class _Write:
    transfer: Transfer
    reservation: Reservation
    positions: npt.NDArray[np.int64]
    blocks: Ids


class WriteBack:
    """The queue of blocks to be copied to host memory, and the copies under way.

    A block under way is marked as moving in the pool: whoever evicts it waits for its copy first (`finish`),
    and whoever would write it copies it instead. It keeps its rank among the blocks that may be evicted.
    """

    def __init__(
        self, pool: BlockPool, arena: DeviceArena, host: SpaceCalls, mover: Mover, stats: StoreStats
    ) -> None:
        self._pool = pool
        self._arena = arena
        self._host = host
        self._mover = mover
        self._stats = stats
        self._queue: list[tuple[Ids, npt.NDArray[np.int64]]] = []
        self._queued = 0
        self._retry_at = 0.0
        self._waits_again_at = 0.0
        self._due_at = 0.0
        self._writes: deque[_Write] = deque()

    @property
    def in_flight(self) -> list[Ids]:
        """The blocks of which a copy is under way, one array per batch."""
        return [write.blocks for write in self._writes]

    def add(self, blocks: Ids) -> None:
        """Queue blocks that were just published."""
        if not self._queue:
            self._due_at = time.monotonic() + _LINGER_SECONDS
        self._queue.append((blocks, self._pool.generations[blocks]))
        self._queued += len(blocks)

    def poll(self) -> None:
        """Finish what is done; start a batch if one has gathered. Called once a step.

        Raises:
            Exception: what a copy failed with, after its slots were given back.
        """
        while self._writes and is_over(self._writes[0].transfer):
            self._finish(self._writes.popleft())
        if self._queue:
            now = time.monotonic()
            if now >= self._retry_at and (self._queued >= _BATCH or now >= self._due_at):
                self.start()

    def start(self, *, wait: float = 0.0) -> None:
        """Reserve host slots for everything queued and start copying.

        What is denied stays queued, and so does what others are writing: they may give it up.

        Args:
            wait: seconds to wait for room in host memory.
        """
        if not self._queue:
            return
        blocks = np.concatenate([entry[0] for entry in self._queue])
        generations = np.concatenate([entry[1] for entry in self._queue])
        self._queue.clear()
        self._queued = 0
        pool = self._pool
        current = (pool.generations[blocks] == generations) & (pool.host_generations[blocks] == 0)
        current &= pool.named(blocks) & ~pool.moving[blocks]
        blocks = blocks[current]
        # A block is queued twice if it was withdrawn and filled on in between. The order stays: of blocks
        # that come together the last ones, a prefix's leaves, are the first to be denied or evicted.
        asked = blocks[np.sort(np.unique(blocks, return_index=True)[1])]
        if not len(asked):
            return
        if time.monotonic() < self._waits_again_at:
            wait = 0.0
        reservation = self._host.reserve_named(
            pool.hashes_of(asked), wait=wait, lineage=pool.lineage_of(asked)
        )
        status = reservation.status
        present = np.flatnonzero(status == ReserveStatus.PRESENT)
        pool.host_slots[asked[present]] = reservation.slots[present]
        pool.host_generations[asked[present]] = reservation.generations[present]
        new = reservation.new
        if len(new):
            moving = asked[new]
            try:
                transfer = self._mover.copy(
                    self._arena.addresses(moving),
                    self._host.addresses(reservation.slots[new]),
                    self._host.layout.block_bytes,
                )
            except BaseException:
                reservation.abort()
                raise
            pool.moving[moving] = True
            self._writes.append(_Write(transfer, reservation, new, moving))
        denied = status == ReserveStatus.DENIED
        again = asked[denied | (status == ReserveStatus.PENDING)]
        if len(again):
            # Not counted: no number of blocks that wait for others makes a batch that is worth trying.
            self._queue.append((again, pool.generations[again]))
            self._due_at = time.monotonic() + _RETRY_SECONDS
        if denied.any():
            now = time.monotonic()
            self._retry_at = now + max(_RETRY_SECONDS, 4 * wait)
            if wait > 0:
                # Who waited in vain does not wait again before long: it may be a step of an engine that
                # waits. A batch of `poll` that was denied is no reason: the memory may just be coming.
                self._waits_again_at = self._retry_at

    def flush(self, *, wait: float = 0.0) -> None:
        """Copy everything queued and wait until it is done.

        Args:
            wait: seconds to wait for room in host memory.

        Raises:
            Exception: what a copy failed with, after its slots were given back.
        """
        self.start(wait=wait)
        self.finish()

    def finish(self) -> None:
        """Wait for the copies that are under way.

        Raises:
            Exception: what a copy failed with, after its slots were given back.
        """
        while self._writes:
            self._finish(self._writes.popleft())

    def _finish(self, write: _Write) -> None:
        """Wait for a copy, and commit it."""
        reservation, blocks = write.reservation, write.blocks
        try:
            wait_through(write.transfer)
        except BaseException:
            self._settle(reservation.abort, len(blocks))
            raise
        finally:
            self._pool.moving[blocks] = False
        if self._settle(reservation.commit, len(blocks)):
            self._pool.host_slots[blocks] = reservation.slots[write.positions]
            self._pool.host_generations[blocks] = reservation.generations[write.positions]
            self._stats.written_back += len(blocks)

    def _settle(self, settle: Callable[[], None], count: int) -> bool:
        """Commit or abort; False if host memory refused: its slots are no longer ours, nor is it our fault.

        The blocks count as not copied. Those among them that were committed are found to be present when
        they are queued again.
        """
        try:
            settle()
        except (StaleHandleError, ClosedError) as error:
            if not self._stats.refused:
                _log.warning(
                    "host memory refused copies of %d blocks, and is not told again: %s", count, error
                )
            self._stats.refused += count
            return False
        return True
