"""The device tier: blocks in VRAM are granted, published, and copied to host memory before they go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Final

import numpy as np
import numpy.typing as npt

from ..tiers.arena import DeviceArena
from ..tiers.errors import IntegrityError
from ..tiers.layout import KVLayout
from ..tiers.mover import CudaMover, HostMover, Mover, Transfer, wait_through
from .calls import SpaceCalls
from .cost import Tier
from .cost_estimates import CostEstimates
from .events import EventKind, EventStream
from .handles import Generations
from .lineage import Lineage
from .policy import Ids, make_policy
from .pool import BlockPool
from .stats import StoreStats
from .tables import Words
from .writeback import WriteBack

__all__ = ["DeviceTier"]

# How long making room in the device tier may wait for room in host memory, before KV is dropped.
_ROOM_SECONDS: Final = 0.5
_EVICT_AHEAD: Final = 128


class DeviceTier:
    """VRAM (or host memory that stands in for it), the pool of its blocks, and the way down.

    Args:
        layout: how a block lies in memory.
        blocks: how many there are.
        device: ``cuda:N`` or ``cpu``.
        space: the id of the space that its blocks are of.
        host: host memory below, or None.
        policy: name of the eviction policy.
        policy_weights: those of its weights that are to be other than its own.
        mover: copies blocks; None makes one for the device.
        stats: what is counted.
        costs: what loading and computing blocks takes.

    Raises:
        ConfigError: there is no such policy.
        MemoryUnavailableError: the device does not have that many blocks.
    """

    def __init__(
        self,
        layout: KVLayout,
        blocks: int,
        device: str,
        *,
        space: bytes,
        host: SpaceCalls | None,
        policy: str,
        policy_weights: Mapping[str, float] | None,
        mover: Mover | None,
        stats: StoreStats,
        costs: CostEstimates,
    ) -> None:
        self._costs = costs
        ranks = make_policy(policy, 0, losses=self._losses, weights=policy_weights)
        self.arena = DeviceArena(layout.block_bytes, blocks, device)
        # Once it is known that there is room for so many: what a policy keeps of each takes memory, too.
        ranks.resize(blocks)
        self.pool = BlockPool(self.arena.slots, ranks, self._tell_removed)
        self.events = EventStream()
        self._space = space
        self._host = host
        self._stats = stats
        self._mover: Mover = mover or (HostMover() if device == "cpu" else CudaMover(device))
        self._write_back = (
            None if host is None else WriteBack(self.pool, self.arena, host, self._mover, stats)
        )

    def blocks_at(self, words: Words) -> Ids:
        """Blocks that near words name: `DeviceArena.slots_at` without its checks, for hot paths."""
        blocks: Ids = ((words - self.arena.base) // self.arena.slot_bytes).astype(np.int32)
        return blocks

    # Room

    def _losses(self, blocks: Ids) -> npt.NDArray[np.float64]:
        """Seconds that losing each of these blocks costs, float64 [n]."""
        at = blocks.astype(np.intp)
        below = np.where(self.pool.host_generations[at] > 0, Tier.HOST, Tier.NONE).astype(np.uint8)
        return self._costs.model.losses(self.pool.depths[at], below)

    def allocate(self, count: int) -> Ids:
        """Grant blocks, held once each; what is evicted for them is copied below first, if it has room.

        Raises:
            CapacityError: fewer are available.
        """
        missing = count - self.pool.free
        if 0 < missing <= self.pool.cached:
            # A few more than are wanted, so that most steps of a full device tier evict nothing.
            self.evict(max(missing, min(_EVICT_AHEAD, self.pool.capacity // 256)))
        return self.pool.allocate(count)

    def evict(self, count: int) -> int:
        """Let go of up to `count` blocks that nobody holds, coldest first, copied below before.

        Returns:
            how many went.
        """
        victims = self.pool.coldest(count)
        self.verify_copies(victims)
        self.save(victims)
        self._stats.dropped += int(np.count_nonzero(self.pool.host_generations[victims] == 0))
        self.pool.evict(victims)
        return len(victims)

    def verify_copies(self, blocks: Ids) -> None:
        """Forget copies in host memory that it has let go of since.

        A block that is read in the device tier all the time looks cold there.
        """
        if self._host is None:
            return
        pool = self.pool
        known = blocks[pool.host_generations[blocks] > 0]
        slots, generations = pool.host_slots[known], pool.host_generations[known]
        there = self._host.lease(slots, generations)
        self._host.release(slots[there], generations[there])
        pool.host_generations[known[~there]] = 0

    def save(self, blocks: Ids) -> None:
        """See that named blocks have a copy in host memory, as far as there is room, and none is moving."""
        if self._write_back is None:
            return
        if self.pool.moving[blocks].any():
            self._write_back.finish()
        lacking = blocks[self.pool.host_generations[blocks] == 0]
        if len(lacking):
            self._write_back.add(lacking)
            self.flush()

    # Names

    def publish(self, blocks: Ids, names: Sequence[bytes], lineage: Lineage) -> Ids:
        """Blocks are full: let them be found by their names, queue their copies to host memory.

        Args:
            lineage: the chains that they are of.

        Returns:
            int32 [n], `BlockPool.publish`'s: `blocks` itself, unless some were computed twice.
        """
        holders = self.pool.publish(blocks, names, lineage)
        if holders is not blocks:
            own = (holders == blocks).nonzero()[0]
            blocks, names = blocks[own], [names[at] for at in own.tolist()]
        if len(blocks):
            self._stats.published += len(blocks)
            self.events.emit(EventKind.STORED, "device", self._space, names)
            if self._write_back is not None:
                self._write_back.add(blocks)
        return holders

    def promoted(
        self,
        blocks: Ids,
        slots: Ids,
        generations: Generations,
        names: Sequence[bytes],
        lineage: Lineage,
    ) -> None:
        """Blocks were copied up from host memory: let them be found, unless others are already.

        Args:
            blocks: int32 [n], held by the caller.
            slots: int32 [n], where their copies lie.
            generations: int64 [n], of these slots.
            names: their prefix hashes.
            lineage: the chains that they are of.
        """
        self.pool.host_slots[blocks] = slots
        self.pool.host_generations[blocks] = generations
        new = np.array([at for at, name in enumerate(names) if name not in self.pool.index], dtype=np.int64)
        names = [names[at] for at in new.tolist()]
        self.pool.publish(blocks[new], names, lineage.take(new))
        self.events.emit(EventKind.STORED, "device", self._space, names)
        self._stats.promoted += len(blocks)

    def _tell_removed(self, hashes: Sequence[bytes]) -> None:
        self.events.emit(EventKind.REMOVED, "device", self._space, hashes)

    # Copies

    def start_copy(self, source: Words, target: Words) -> Transfer:
        """Start copying blocks between addresses without tags."""
        return self._mover.copy(source, target, self.arena.slot_bytes)

    def copy(self, source: Words, target: Words) -> None:
        """Copy blocks between addresses without tags, and wait for it.

        Raises:
            Exception: what the copy failed with.
        """
        transfer = self.start_copy(source, target)
        wait_through(transfer)
        if transfer.error is not None:
            raise transfer.error

    def start_write_back(self) -> None:
        """Start copying to host memory what is queued."""
        if self._write_back is not None:
            self._write_back.start()

    def poll(self) -> None:
        """Finish copies to host memory, and start a batch if one has gathered. Raises as `WriteBack.poll`."""
        if self._write_back is not None:
            self._write_back.poll()

    def flush(self) -> None:
        """Wait until every named block has its copy in host memory, as far as there is room."""
        if self._write_back is not None:
            self._write_back.flush(wait=_ROOM_SECONDS)

    def close(self) -> None:
        """End what is being copied, and give the memory back."""
        with ExitStack() as rest:
            rest.callback(self.arena.close)
            self._mover.close()

    def check_integrity(self, held: npt.NDArray[np.int64]) -> None:
        """Prove that every block is held as often as `held` (int64 [blocks]) says, and no book disagrees.

        Raises:
            IntegrityError: naming the first thing that does not agree.
        """
        moving = np.zeros(self.pool.capacity, dtype=np.bool_)
        if self._write_back is not None:
            for blocks in self._write_back.in_flight:
                moving[blocks] = True
        if not np.array_equal(moving, self.pool.moving):
            raise IntegrityError("the pool and the write-back disagree on what is being copied")
        self.pool.check_integrity(held)
