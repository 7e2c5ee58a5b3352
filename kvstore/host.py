"""HostStore: the authority over host memory and the cold tier behind it.

A `HostStore` owns one pinned arena and at most one cold tier. `HostStore.space` opens a *space* (one
layout and shard), and everything else is called on it. Calls are safe from several threads; none waits
for the cold tier but `load`, `flush`, `reserve` and `match` with a deadline, and these only until it.

A slot is *free*, *reserved* (its bytes are being written; nobody can find it) or *committed* (named by a
hash and immutable). A committed slot that is neither leased nor pinned may be evicted; its generation
tells a remembered (slot, generation) pair from a later grant of the same slot.

Demotion to the cold tier runs ahead of eviction: a background thread keeps the coldest `clean_ahead`
share of host memory copied there, so that making room moves no bytes (blocks are immutable, so a copy
stays good for ever).
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Final

import numpy as np
import numpy.typing as npt

from ..tiers.arena import SlotAllocator
from ..tiers.cold import ColdStatus, ColdTier
from ..tiers.errors import (
    ClosedError,
    ConfigError,
    IntegrityError,
    LayoutError,
    MemoryUnavailableError,
    StaleHandleError,
)
from ..tiers.layout import KVLayout
from ..tiers.mover import HostMover
from ..tiers.pinned import PinnedArena
from .events import EventKind, EventStream, Listener
from .hashing import HASH_BYTES, Tokens, hash_blocks, leading, space_id
from .policy import EvictionPolicy, Ids, make_policy
from .pool import first_generations

__all__ = ["ColdLoad", "HostSpace", "HostStats", "HostStore", "Lease", "Reservation", "ReserveStatus"]

_log = logging.getLogger(__name__)

Generations = npt.NDArray[np.int64]

_FREE: Final = 0
_RESERVED: Final = 1
_COMMITTED: Final = 2

# What one background write or load carries: enough to keep several connections busy, little enough that
# a batch is through in tens of milliseconds.
_COLD_BATCH_BYTES: Final = 32 << 20
_COLD_RETRY_SECONDS: Final = 1.0
_CLEAN_POLL_SECONDS: Final = 0.25
_CLEAN_PAUSE_SECONDS: Final = 0.02
_CLEAN_REST: Final = 20
_LOOK_TICKS: Final = 64


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


# Plain numbers: a member looked up on its class costs as much as comparing an array to it.
_NEW: Final = int(ReserveStatus.NEW)
_PRESENT: Final = int(ReserveStatus.PRESENT)
_DENIED: Final = int(ReserveStatus.DENIED)


@dataclass
class HostStats:
    """Counters since the store was opened, in blocks."""

    matched: int = 0
    missed: int = 0
    committed: int = 0
    evicted: int = 0
    dropped: int = 0
    """Evicted with no copy below, because the cold tier was absent, down or full."""
    denied: int = 0
    cold_written: int = 0
    cold_write_failed: int = 0
    cold_loaded: int = 0
    cold_missed: int = 0
    stale: int = 0
    """Late commits and releases of slots that were granted again since; refused."""

    def snapshot(self) -> dict[str, int]:
        """The counters by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


class Lease:
    """A promise that blocks stay where they are, until `release`. A context manager.

    Attributes:
        slots: int32 [n], the leading blocks that are resident.
        generations: int64 [n].
        cold: how many blocks after these seemed to be in the cold tier; no promise.
    """

    def __init__(self, space: HostSpace, slots: Ids, generations: Generations, cold: int = 0) -> None:
        self.space = space
        self.slots = slots
        self.generations = generations
        self.cold = cold
        self._held = True

    def __len__(self) -> int:
        return len(self.slots)

    def release(self) -> None:
        """End the lease. Idempotent."""
        if self._held:
            self._held = False
            self.space.release(self.slots, self.generations)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class ColdLoad:
    """Blocks on their way up from the cold tier. What is resident of them stays leased until `release`.

    Attributes:
        loaded: blocks that have arrived so far.
    """

    def __init__(self) -> None:
        self.loaded = 0
        self._error: Exception | None = None
        self._finished = threading.Event()
        self._leases: list[Lease] | None = []
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Whether everything that is to be had has arrived.

        Raises:
            Exception: what the load failed with.
        """
        return self.wait(0.0)

    def wait(self, seconds: float) -> bool:
        """Wait until it is done, `seconds` at most; returns whether it is. Raises as `done`."""
        finished = self._finished.wait(seconds)
        if self._error is not None:
            raise self._error
        return finished

    def release(self) -> None:
        """Whoever waited has leases of his own now, or wants the blocks no more. Idempotent."""
        with self._lock:
            leases, self._leases = self._leases, None
        for lease in leases or ():
            lease.release()

    def _keep(self, lease: Lease) -> Lease:
        """Hold a lease until `release`."""
        with self._lock:
            if self._leases is not None:
                self._leases.append(lease)
                return lease
        lease.release()
        return lease


class Reservation:
    """Slots to be written, one per hash. A context manager: what was not committed is aborted at its end.

    Attributes:
        hashes: the hashes asked for.
        status: uint8 [n] of `ReserveStatus`.
        slots: int32 [n]; meaningful where the status is NEW or PRESENT.
        generations: int64 [n], likewise.
    """

    def __init__(
        self,
        space: HostSpace,
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

    def commit(self, positions: npt.NDArray[np.int64] | None = None) -> None:
        """The bytes of these positions (default: all that are still open) are written: publish them.

        Raises:
            StaleHandleError: a slot was granted again since; the others are committed all the same.
        """
        chosen = self._take(positions)
        self.space.commit(self.slots[chosen], self.generations[chosen])

    def abort(self, positions: npt.NDArray[np.int64] | None = None) -> None:
        """Give the slots of these positions (default: all that are still open) back."""
        chosen = self._take(positions)
        self.space.abort(self.slots[chosen], self.generations[chosen])

    def _take(self, positions: npt.NDArray[np.int64] | None) -> npt.NDArray[np.int64]:
        chosen = np.flatnonzero(self._open) if positions is None else positions[self._open[positions]]
        self._open[chosen] = False
        return chosen

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class HostStore:
    """Host memory and the cold tier, shared by every space opened on it.

    Args:
        host_bytes: capacity of the pinned arena.
        cold: the cold tier, or None. It is closed with the store.
        policy: name of the eviction policy (`kvstore.policy.POLICIES`).
        device: ``cuda:N`` to page-lock and map the arena for that GPU; None for a machine without one.
        extent_bytes: size of an extent; None for a size that fits the capacity.
        clean_ahead: share of host memory that is kept copied to the cold tier ahead of eviction.
        cold_deadline: seconds that one background read or write of the cold tier may take.

    Raises:
        ConfigError: a value is out of range.
        MemoryUnavailableError: the machine does not have `host_bytes`.
    """

    def __init__(
        self,
        host_bytes: int,
        *,
        cold: ColdTier | None = None,
        policy: str = "lru",
        device: str | None = None,
        extent_bytes: int | None = None,
        clean_ahead: float = 0.25,
        cold_deadline: float = 5.0,
    ) -> None:
        if not 0.0 <= clean_ahead <= 1.0:
            raise ConfigError("clean_ahead", f"must be between 0 and 1, got {clean_ahead!r}")
        if cold_deadline <= 0:
            raise ConfigError("cold_deadline", f"must be positive seconds, got {cold_deadline!r}")
        make_policy(policy, 0)
        self.arena = PinnedArena(host_bytes, extent_bytes=extent_bytes, device=device)
        self.cold = cold
        self.device = device
        self.stats = HostStats()
        self.events = EventStream()
        self._policy = policy
        self._clean_ahead = clean_ahead
        self._cold_deadline = cold_deadline
        self._cold_down = False
        self._cold_retry_at = 0.0
        self._changed = threading.Condition(threading.Lock())
        self._outbox: deque[tuple[EventKind, str, bytes, list[bytes]]] = deque()
        self._telling = threading.Lock()
        self._spaces: dict[bytes, HostSpace] = {}
        self._mover = HostMover()
        self._clock = 0
        self._taken = 0
        """Extents that spaces have."""
        self._closed = False
        self._loaders = ThreadPoolExecutor(2, thread_name_prefix="kvpager-load") if cold else None
        self._cleaner: threading.Thread | None = None
        if cold is not None:
            self._cleaner = threading.Thread(
                target=self._clean_until_closed, name="kvpager-clean", daemon=True
            )
            self._cleaner.start()

    def space(self, layout: KVLayout, *, shard: str = "") -> HostSpace:
        """Open the space of `layout` and `shard`; the same object for equal ones.

        Raises:
            ConfigError: a block does not fit an extent.
            ClosedError: the store is closed.
        """
        with self._lock():
            self._check_open()
            name = space_id(layout, shard)
            space = self._spaces.get(name)
            if space is None:
                if layout.block_bytes > self.arena.extent_bytes:
                    raise ConfigError(
                        "extent_bytes",
                        f"{self.arena.extent_bytes} bytes do not hold a block of {layout.block_bytes} bytes",
                    )
                space = HostSpace(self, layout, shard, name, make_policy(self._policy, 0))
                self._spaces[name] = space
            return space

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with every later event of host memory and cold tier; returns how to end it."""
        return self.events.subscribe(listener)

    def flush(self, deadline: float = 30.0) -> int:
        """Write what has no copy in the cold tier there, most recently used first.

        Returns:
            how many committed blocks still have no copy after `deadline` seconds.
        """
        end = time.monotonic() + deadline
        while self.cold is not None and time.monotonic() < end:
            if sum(space.write_to_cold(flush=True, until=end) for space in self._snapshot()):
                continue
            with self._lock():
                # What the background thread is writing just now is as good as written.
                if not any(space._num_cleaning for space in self._spaces.values()):
                    break
                self._changed.wait(max(0.0, end - time.monotonic()))
        with self._lock():
            return sum(space.dirty for space in self._spaces.values())

    def close(self, *, drain: float = 0.0) -> None:
        """Stop the background work and give the memory back. Idempotent.

        Args:
            drain: seconds to spend on writing to the cold tier what has no copy there.
        """
        if self._closed:
            return
        if drain > 0 and self.cold is not None:
            left = self.flush(drain)
            if left:
                _log.warning("closed with %d blocks not in the cold tier", left)
        with self._lock():
            self._closed = True
            self._changed.notify_all()
        if self._cleaner is not None:
            self._cleaner.join()
        if self._loaders is not None:
            self._loaders.shutdown(wait=True)
        self._mover.close()
        if self.cold is not None:
            self.cold.close()
        self.arena.close()

    def check_integrity(self) -> None:
        """Prove that every extent and slot has one owner and every index agrees with its slots.

        Raises:
            IntegrityError: naming the first thing that does not agree.
        """
        self.arena.check_integrity()
        with self._lock():
            owned: dict[int, HostSpace] = {}
            for space in self._spaces.values():
                for extent in space.extents:
                    if extent in owned:
                        raise IntegrityError(f"extent {extent} belongs to two spaces")
                    owned[extent] = space
                space._check_integrity()
            if len(owned) != self._taken:
                raise IntegrityError(f"spaces have {len(owned)} extents, {self._taken} are counted")
        if self.cold is not None:
            self.cold.check_integrity()

    def __enter__(self) -> HostStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Below: what the spaces share. All of it is called with the lock held unless said otherwise.

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the lock; at its end, outside of it, tell the listeners what happened."""
        try:
            with self._changed:
                yield
        finally:
            if self._outbox:
                self._tell()

    def _tell(self) -> None:
        """Tell the listeners what happened, in the order in which it did. Called without the lock.

        One thread tells at a time, also what others add meanwhile: who comes second leaves it to the first.
        """
        while self._outbox and self._telling.acquire(blocking=False):
            try:
                while self._outbox:
                    self.events.emit(*self._outbox.popleft())
            finally:
                self._telling.release()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the host store is closed")

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _cold_takes(self) -> bool:
        """Whether a victim without a copy below should wait for one.

        Not from the first batch that the tier did not take until it takes one again: nobody waits for a tier
        that is being tried anew.
        """
        return self.cold is not None and not self._cold_down

    def _reclaim_extent(self, asking: HostSpace, before: int | None = None) -> bool:
        """Free the longest unused extent of the largest space, if `asking` has less than a share.

        Args:
            before: only an extent that was last used before this tick.
        """
        share = self.arena.num_extents // max(1, len(self._spaces))
        donors = [space for space in self._spaces.values() if space is not asking and space.extents]
        if not donors or len(asking.extents) >= max(1, share):
            return False
        donors.sort(key=lambda space: len(space.extents), reverse=True)
        return any(donor._yield_extent(before) for donor in donors)

    def _snapshot(self) -> list[HostSpace]:
        """The spaces. Takes the lock."""
        with self._lock():
            return list(self._spaces.values())

    def _clean_until_closed(self) -> None:
        """The background thread that keeps the coldest blocks copied to the cold tier."""
        while True:
            with self._lock():
                if not self._closed:
                    self._changed.wait(_CLEAN_POLL_SECONDS)
                if self._closed:
                    return
            began = time.monotonic()
            due = began >= self._cold_retry_at
            if not due or not sum(space.write_to_cold() for space in self._snapshot()):
                # Looking costs a pass over the coldest blocks: not after every single change, and the more
                # seldom the more of them there are.
                rest = _CLEAN_REST * (time.monotonic() - began)
                time.sleep(min(max(_CLEAN_PAUSE_SECONDS, rest), _CLEAN_POLL_SECONDS))

    def _cold_answered(self, status: npt.NDArray[np.uint8]) -> None:
        """Stop asking a tier that did not take one record of a batch; ask again after a while."""
        self._cold_down = not (status == ColdStatus.OK).any()
        if self._cold_down:
            self._cold_retry_at = time.monotonic() + _COLD_RETRY_SECONDS


class HostSpace:
    """One layout and shard in a `HostStore`. Open it with `HostStore.space`.

    Slots are numbered by extent: slot ``s`` is the ``s % slots_per_extent``-th place of extent
    ``s // slots_per_extent``. Across processes slots travel as these numbers, never as addresses.
    """

    def __init__(
        self, store: HostStore, layout: KVLayout, shard: str, name: bytes, policy: EvictionPolicy
    ) -> None:
        self.store = store
        self.layout = layout
        self.shard = shard
        self.id = name
        self.slots_per_extent = store.arena.extent_bytes // layout.block_bytes
        self.extents: set[int] = set()
        capacity = self.slots_per_extent * store.arena.num_extents
        self._slots = SlotAllocator()
        self._policy = policy
        policy.resize(capacity)
        self._index: dict[bytes, int] = {}
        self._pending: dict[bytes, int] = {}
        self._state = np.zeros(capacity, dtype=np.uint8)
        self._generations = first_generations(capacity)
        self._leases = np.zeros(capacity, dtype=np.int32)
        self._pins = np.zeros(capacity, dtype=np.int32)
        self._in_cold = np.zeros(capacity, dtype=np.bool_)
        self._cleaning = np.zeros(capacity, dtype=np.bool_)
        """Being copied to the cold tier just now."""
        self._num_cleaning = 0
        self._used_at = np.zeros(capacity, dtype=np.int64)
        self._hashes = np.zeros(capacity, dtype=f"V{HASH_BYTES}")
        self._look_again = 0
        self._short = 0
        """Slots that the last reservation did not get."""

    # Where slots are

    @property
    def capacity(self) -> int:
        """Slots that this space would have if every extent were its own."""
        return len(self._state)

    @property
    def resident(self) -> int:
        """Committed blocks."""
        return len(self._index)

    @property
    def dirty(self) -> int:
        """Committed blocks that have no copy in the cold tier."""
        return int(np.count_nonzero((self._state == _COMMITTED) & ~self._in_cold))

    def addresses(self, slots: Ids) -> npt.NDArray[np.int64]:
        """Host addresses of slots, int64 [n]. On a GPU, add `PinnedArena.device_delta`."""
        slots = slots.astype(np.int64)
        extent = slots // self.slots_per_extent
        place = slots - extent * self.slots_per_extent
        arena = self.store.arena
        found: npt.NDArray[np.int64] = (
            arena.base + extent * arena.extent_bytes + place * self.layout.block_bytes
        )
        return found

    def slots_at(self, addresses: npt.NDArray[np.int64]) -> Ids:
        """The inverse of `addresses`; tags in the low seven bits are ignored."""
        arena = self.store.arena
        offsets = addresses - arena.base
        extent = offsets // arena.extent_bytes
        place = offsets - extent * arena.extent_bytes
        slots: Ids = (extent * self.slots_per_extent + place // self.layout.block_bytes).astype(np.int32)
        return slots

    def readable_in_place(self, slots: Ids) -> npt.NDArray[np.bool_]:
        """Whether attention may read these slots where they lie: page-locked, or no GPU is in play."""
        if self.store.device is None:
            return np.ones(len(slots), dtype=np.bool_)
        return self.store.arena.is_page_locked(slots // self.slots_per_extent)

    def view(self, slot: int) -> memoryview:
        """The bytes of one slot, writable. Write only what is reserved; read only what is leased."""
        extent, place = divmod(slot, self.slots_per_extent)
        arena = self.store.arena
        return arena.view(
            extent * arena.extent_bytes + place * self.layout.block_bytes, self.layout.block_bytes
        )

    # Finding blocks

    def match(
        self,
        hashes: Sequence[bytes] | None = None,
        *,
        tokens: Tokens | None = None,
        chain: bytes | None = None,
        cold_deadline: float | None = None,
    ) -> Lease:
        """Lease the leading blocks that are resident.

        Args:
            hashes: prefix hashes in order; or give
            tokens: token ids, hashed here from
            chain: the root of their chain (`ChainIdentity.root`).
            cold_deadline: seconds to spend on asking how many of the following blocks the cold tier
                seems to have; None asks nothing.

        Raises:
            ConfigError: neither hashes, nor tokens and chain.
        """
        if hashes is None:
            if tokens is None or chain is None:
                raise ConfigError("match", "wants hashes, or tokens and the root of their chain")
            hashes = hash_blocks(tokens, self.layout.block_size, chain)
        store = self.store
        lease = self._lease_resident(hashes, count=True)
        if cold_deadline is not None and store.cold is not None and len(lease) < len(hashes):
            there = store.cold.contains(self.id, hashes[len(lease) :], cold_deadline)
            lease.cold = len(there) if there.all() else int(there.argmin())
        return lease

    def _lease_resident(self, hashes: Sequence[bytes], *, count: bool = False) -> Lease:
        """Lease the leading resident blocks; with `count`, as hits and misses. Takes the lock."""
        with self.store._lock():
            self.store._check_open()
            slots = self._resident(hashes)
            self._take_leases(slots)
            if count:
                self.store.stats.matched += len(slots)
                self.store.stats.missed += len(hashes) - len(slots)
            return Lease(self, slots, self._generations[slots])

    def lease(self, slots: Ids, generations: Generations) -> npt.NDArray[np.bool_]:
        """Lease remembered slots, each once.

        Returns:
            bool [n], False where a slot was granted to another block since, or was named before.
        """
        with self.store._lock():
            self.store._check_open()
            good = self._valid(slots, generations, _COMMITTED)
            self._take_leases(slots[good])
            return good

    def release(self, slots: Ids, generations: Generations) -> None:
        """End leases; of blocks that become evictable together, later ones are evicted sooner.

        Raises:
            StaleHandleError: a slot is not leased under this generation; the others are released.
        """
        with self.store._lock():
            good = self._valid(slots, generations, _COMMITTED)
            good &= self._leases[slots] > self._pins[slots]
            self._drop_leases(slots if good.all() else slots[good])
            if not good.all():
                self._refuse("release", slots[~good])

    # Writing blocks

    def reserve(self, hashes: Sequence[bytes], *, wait: float = 0.0) -> Reservation:
        """Slots to write blocks into.

        Args:
            hashes: the blocks' names; a name twice is PENDING the second time.
            wait: seconds to wait for room that the background writer is making.

        Raises:
            ConfigError: a hash has another length than 16 bytes.
        """
        if not set(map(len, hashes)) <= {HASH_BYTES}:
            raise ConfigError("hashes", f"must be {HASH_BYTES} bytes each")
        end = time.monotonic() + wait
        store = self.store
        with store._lock():
            store._check_open()
            while True:
                status, slots, wanted = self._classify(hashes)
                # Making room must not evict what was just found to be present.
                present = np.unique(slots[status == _PRESENT]) if len(wanted) < len(hashes) else None
                if present is not None:
                    self._take_leases(present)
                granted = self._take_slots(len(wanted))
                self._short = len(wanted) - len(granted)
                left = end - time.monotonic()
                waits = self._short > 0 and left > 0 and self._room_may_come()
                if present is not None:
                    self._drop_leases(present)
                if not waits:
                    break
                self._slots.free(granted)
                store._changed.notify_all()
                store._changed.wait(min(left, 0.02))
                store._check_open()
            chosen = wanted[: len(granted)]
            names = [hashes[at] for at in chosen.tolist()]
            status[chosen] = _NEW
            slots[chosen] = granted
            self._state[granted] = _RESERVED
            self._generations[granted] += 1
            self._pending.update(zip(names, granted.tolist(), strict=True))
            if names:
                self._hashes[granted] = np.frombuffer(b"".join(names), dtype=f"V{HASH_BYTES}")
            store.stats.denied += len(wanted) - len(granted)
            generations = np.where(status <= _PRESENT, self._generations[slots], 0)
        return Reservation(self, hashes, status, slots, generations)

    def commit(self, slots: Ids, generations: Generations, *, in_cold: bool = False) -> None:
        """Reserved slots are written: name them, let them be found.

        Raises:
            StaleHandleError: a slot is not reserved under this generation; the others are committed.
        """
        with self.store._lock():
            good = self._valid(slots, generations, _RESERVED)
            mine = slots if good.all() else slots[good]
            names = self._names(mine)
            for name in names:
                del self._pending[name]
            self._index.update(zip(names, mine.tolist(), strict=True))
            self._state[mine] = _COMMITTED
            self._in_cold[mine] = in_cold
            self._used_at[mine] = self.store._tick()
            self._policy.insert(mine[::-1])
            self.store.stats.committed += len(mine)
            self.store._outbox.append((EventKind.STORED, "host", self.id, names))
            self.store._changed.notify_all()
            if len(mine) < len(slots):
                self._refuse("commit", slots[~good])

    def abort(self, slots: Ids, generations: Generations) -> None:
        """Reserved slots will not be written.

        Raises:
            StaleHandleError: a slot is not reserved under this generation; the others are freed.
        """
        if not len(slots):
            return
        with self.store._lock():
            good = self._valid(slots, generations, _RESERVED)
            mine = slots[good]
            for name in self._names(mine):
                del self._pending[name]
            self._free(mine)
            if not good.all():
                self._refuse("abort", slots[~good])

    def put(self, hashes: Sequence[bytes], blocks: npt.NDArray[np.uint8], *, wait: float = 0.0) -> int:
        """Copy blocks in.

        Args:
            blocks: uint8 [len(hashes), block_bytes], each row contiguous.
            wait: seconds to wait for room.

        Returns:
            how many of the hashes are resident afterwards, or were being written by somebody else.

        Raises:
            LayoutError: `blocks` has another shape.
        """
        self._check_blocks(blocks, len(hashes))
        with self.reserve(hashes, wait=wait) as reservation:
            new = reservation.new
            if len(new):
                source = blocks.ctypes.data + new * blocks.strides[0]
                self._copy(source, self.addresses(reservation.slots[new]))
            reservation.commit()
            return int(np.count_nonzero(reservation.status != _DENIED))

    def get(self, hashes: Sequence[bytes], out: npt.NDArray[np.uint8]) -> int:
        """Copy the leading resident blocks out.

        Args:
            out: uint8 [at least len(hashes), block_bytes], each row contiguous.

        Returns:
            how many blocks were copied.

        Raises:
            LayoutError: `out` has another shape.
        """
        self._check_blocks(out, len(hashes))
        with self.match(hashes) as lease:
            if len(lease):
                target = out.ctypes.data + np.arange(len(lease)) * out.strides[0]
                self._copy(self.addresses(lease.slots), target)
            return len(lease)

    def _copy(self, source: npt.NDArray[np.int64], target: npt.NDArray[np.int64]) -> None:
        self.store._mover.copy_now(source, target, self.layout.block_bytes)

    # Keeping and losing blocks

    def pin(self, hashes: Sequence[bytes]) -> int:
        """Keep resident blocks in host memory until `unpin`; returns how many leading ones were there."""
        with self.store._lock():
            self.store._check_open()
            slots = self._resident(hashes)
            self._take_leases(slots)
            self._pins[slots] += 1
            return len(slots)

    def unpin(self, hashes: Sequence[bytes]) -> int:
        """End a pin; returns how many of the blocks were pinned."""
        with self.store._lock():
            found = {self._index[name] for name in hashes if name in self._index}
            slots = np.array(sorted(found), dtype=np.int32)
            slots = slots[self._pins[slots] > 0]
            self._pins[slots] -= 1
            self._drop_leases(slots)
            return len(slots)

    def evict(self, count: int) -> int:
        """Let go of up to `count` blocks, coldest first, copied to the cold tier or not.

        Returns:
            how many went.
        """
        with self.store._lock():
            candidates = self._policy.coldest(count)
            return self._evict(candidates[~self._cleaning[candidates]])

    def load(self, hashes: Sequence[bytes], deadline: float) -> Lease:
        """Bring blocks up from the cold tier and lease the leading ones that are resident then.

        What has not arrived after `deadline` seconds goes on loading and serves the next request.
        """
        load = self.start_load(hashes)
        try:
            load.wait(deadline)
            return self._lease_resident(hashes)
        finally:
            load.release()

    def start_load(self, hashes: Sequence[bytes]) -> ColdLoad:
        """Start bringing up from the cold tier what it has of the leading blocks; returns at once."""
        load = ColdLoad()
        resident = len(load._keep(self._lease_resident(hashes)))
        with self.store._lock():
            self.store._check_open()
            if self.store._loaders is None or resident == len(hashes):
                load._finished.set()
            else:
                self.store._loaders.submit(self._load, list(hashes[resident:]), load)
        return load

    def _load(self, hashes: list[bytes], load: ColdLoad) -> None:
        """Load batch after batch until one block is not to be had; runs in a loader thread."""
        store = self.store
        end = time.monotonic() + store._cold_deadline
        try:
            if store.cold is None:
                return
            there = store.cold.contains(self.id, hashes, store._cold_deadline)
            missing = hashes[: len(there) if there.all() else int(there.argmin())]
            stride = max(1, _COLD_BATCH_BYTES // self.layout.block_bytes)
            while missing:
                # Not further than to what is resident: it may have to make room for what comes first.
                batch = self._absent(missing[:stride])
                load.loaded += self._load_batch(store.cold, batch)
                self._wait_for_writers(batch, end)
                # What came first must not make room for what comes last.
                lease = load._keep(self._lease_resident(missing))
                if len(lease) < max(1, len(batch)):
                    return
                missing = missing[len(lease) :]
        except ClosedError:
            return
        except Exception as error:  # noqa: BLE001  whoever waits for the load is told
            load._error = error
        finally:
            load._finished.set()

    def _absent(self, hashes: list[bytes]) -> list[bytes]:
        """The leading blocks that are not resident. Takes the lock."""
        with self.store._lock():
            stop = next((at for at, name in enumerate(hashes) if name in self._index), None)
        return hashes[:stop]

    def _load_batch(self, cold: ColdTier, hashes: list[bytes]) -> int:
        """Read blocks that are neither resident nor on their way; returns how many arrived."""
        store = self.store
        with self.reserve(hashes, wait=store._cold_deadline) as reservation:
            new = reservation.new
            names = [hashes[at] for at in new.tolist()]
            views = [self.view(slot) for slot in reservation.slots[new].tolist()]
            try:
                status = cold.get(self.id, names, views, store._cold_deadline)
            finally:
                for view in views:
                    view.release()
            arrived = reservation._take(new[status == ColdStatus.OK])
            self.commit(reservation.slots[arrived], reservation.generations[arrived], in_cold=True)
        with store._lock():
            store.stats.cold_loaded += len(arrived)
            store.stats.cold_missed += len(new) - len(arrived)
        return len(arrived)

    def _wait_for_writers(self, hashes: Sequence[bytes], end: float) -> None:
        """Wait until `end` while the first block that is not resident is being written by another."""
        with self.store._lock():
            while (left := end - time.monotonic()) > 0 and not self.store._closed:
                resident = len(self._resident(hashes))
                if resident == len(hashes) or hashes[resident] not in self._pending:
                    return
                self.store._changed.wait(left)

    def write_to_cold(self, *, flush: bool = False, until: float | None = None) -> int:
        """Copy one batch of blocks to the cold tier: those about to be evicted, or any when flushing.

        Returns:
            how many were written; 0 when there is nothing to do or the tier did not take any.
        """
        store = self.store
        if store.cold is None:
            return 0
        limit = max(1, _COLD_BATCH_BYTES // self.layout.block_bytes)
        with store._lock():
            if flush:
                dirty = np.flatnonzero((self._state == _COMMITTED) & ~self._in_cold & ~self._cleaning)
                if len(dirty) > limit:
                    dirty = dirty[np.argpartition(-self._used_at[dirty], limit)[:limit]]
                slots = dirty.astype(np.int32)
            else:
                slots = self._to_clean()[:limit]
            if not len(slots):
                return 0
            self._cleaning[slots] = True
            self._num_cleaning += len(slots)
            names = self._names(slots)
            generations = self._generations[slots]
        deadline = store._cold_deadline
        if until is not None:
            deadline = min(deadline, max(0.001, until - time.monotonic()))
        views = [self.view(slot) for slot in slots.tolist()]
        status = np.full(len(slots), ColdStatus.UNAVAILABLE, dtype=np.uint8)
        try:
            status = store.cold.put(self.id, names, views, deadline)
        finally:
            for view in views:
                view.release()
            with store._lock():
                self._cleaning[slots] = False
                self._num_cleaning -= len(slots)
                done = (status == ColdStatus.OK) & (self._generations[slots] == generations)
                self._in_cold[slots[done]] = True
                written = int(np.count_nonzero(done))
                store.stats.cold_written += written
                store.stats.cold_write_failed += len(slots) - written
                store._cold_answered(status)
                store._outbox.append(
                    (EventKind.STORED, "cold", self.id, [names[at] for at in np.flatnonzero(done)])
                )
                store._changed.notify_all()
        return written

    # Small records beside the blocks

    def put_note(self, name: bytes, value: bytes, deadline: float | None = None) -> bool:
        """Keep a small named record in the cold tier; False where there is none or it did not take it."""
        cold = self.store.cold
        return cold is not None and cold.put_note(self.id + name, value, deadline) == ColdStatus.OK

    def get_note(self, name: bytes, deadline: float | None = None) -> bytes | None:
        """A named record from the cold tier, or None."""
        cold = self.store.cold
        if cold is None:
            return None
        status, value = cold.get_note(self.id + name, deadline)
        return value if status == ColdStatus.OK else None

    # Inside: all of it is called with the store's lock held.

    def _resident(self, hashes: Sequence[bytes]) -> Ids:
        found = leading(self._index, hashes)
        if len(set(found)) < len(found):
            raise ConfigError("hashes", "a hash is named twice; a prefix names each of its blocks once")
        return np.array(found, dtype=np.int32)

    def _valid(self, slots: Ids, generations: Generations, state: int) -> npt.NDArray[np.bool_]:
        """Which handles are of slots in `state` that were not granted again since, each told once."""
        good: npt.NDArray[np.bool_] = (self._generations[slots] == generations) & (
            self._state[slots] == state
        )
        if len(set(slots.tolist())) < len(slots):
            first = np.zeros(len(slots), dtype=np.bool_)
            first[np.unique(np.where(good, slots, -1), return_index=True)[1]] = True
            good &= first
        return good

    def _names(self, slots: Ids) -> list[bytes]:
        names: list[bytes] = self._hashes[slots].tolist()
        return names

    def _take_leases(self, slots: Ids) -> None:
        before = self._leases[slots]
        self._leases[slots] = before + 1
        if not before.all():
            self._policy.remove(slots[before == 0])

    def _drop_leases(self, slots: Ids) -> None:
        after = self._leases[slots] - 1
        self._leases[slots] = after
        if not after.all():
            idle = slots[after == 0]
            self._used_at[idle] = self.store._tick()
            self._policy.insert(idle[::-1])
            self.store._changed.notify_all()

    def _refuse(self, what: str, slots: Ids) -> None:
        self.store.stats.stale += len(slots)
        raise StaleHandleError(f"{what} refused for slots {slots.tolist()[:8]}: granted again, or not held")

    def _classify(self, hashes: Sequence[bytes]) -> tuple[npt.NDArray[np.uint8], Ids, npt.NDArray[np.int64]]:
        """Per hash its status, with the slot of what is present, and the positions that want a slot."""
        status = np.full(len(hashes), _DENIED, dtype=np.uint8)
        slots = np.zeros(len(hashes), dtype=np.int32)
        known = self._index.keys(), self._pending.keys()
        if all(names.isdisjoint(hashes) for names in known) and len(set(hashes)) == len(hashes):
            return status, slots, np.arange(len(hashes))
        wanted: list[int] = []
        asked: set[bytes] = set()
        for at, name in enumerate(hashes):
            slot = self._index.get(name)
            if slot is not None:
                status[at] = ReserveStatus.PRESENT
                slots[at] = slot
            elif name in self._pending or name in asked:
                status[at] = ReserveStatus.PENDING
            else:
                asked.add(name)
                wanted.append(at)
        return status, slots, np.array(wanted, dtype=np.int64)

    def _take_slots(self, count: int) -> Ids:
        """Up to `count` slots: free ones, a new extent's, or those of blocks evicted for it."""
        store = self.store
        while (missing := count - self._slots.free_count) > 0:
            extent = store.arena.take_extent() if store._taken < store.arena.num_extents else None
            if extent is not None:
                store._taken += 1
                self.extents.add(extent)
                self._slots.add(extent * self.slots_per_extent, self.slots_per_extent)
            elif not self._outlive() and not self._evict_clean(missing) and not store._reclaim_extent(self):
                break
        return self._slots.allocate(min(count, self._slots.free_count))

    def _outlive(self) -> bool:
        """Take an extent that another space has not used since this one used its coldest block.

        Else a space that came late would go round in its first extent, beside others that lie idle. Looking
        costs a pass over the other's slots, so a look in vain is not repeated at once.
        """
        store = self.store
        if store._clock < self._look_again or len(store._spaces) == 1:
            return False
        coldest = self._policy.coldest(1)
        if not len(coldest):
            return False
        found = store._reclaim_extent(self, int(self._used_at[coldest[0]]))
        if not found:
            self._look_again = store._clock + _LOOK_TICKS
        return found

    def _room_may_come(self) -> bool:
        """Whether waiting may help: the arena is growing, or blocks are being copied below."""
        if self.store._cold_takes() and len(self._policy) > 0:
            return True
        try:
            return not self.store.arena.wait_ready(self.store.arena.num_extents, timeout=0.0)
        except MemoryUnavailableError:
            return False

    def _evict_clean(self, count: int) -> int:
        """Evict up to `count` blocks that lose nothing: copied below, or with nothing below to copy to."""
        if self.store._cold_takes():
            candidates = self._policy.coldest(2 * count + 64)
            clean = self._in_cold[candidates] & ~self._cleaning[candidates]
        elif self._num_cleaning:
            candidates = self._policy.coldest(count + self._num_cleaning)
            clean = ~self._cleaning[candidates]
        else:
            return self._forget(self._policy.evict(count))
        return self._evict(candidates[clean][:count])

    def _evict(self, slots: Ids) -> int:
        self._policy.remove(slots)
        return self._forget(slots)

    def _forget(self, slots: Ids) -> int:
        """Free blocks that the policy ranks no more; returns how many."""
        if len(slots):
            names = self._names(slots)
            for name in names:
                del self._index[name]
            stats = self.store.stats
            stats.evicted += len(slots)
            stats.dropped += int(np.count_nonzero(~self._in_cold[slots]))
            self._free(slots)
            self.store._outbox.append((EventKind.REMOVED, "host", self.id, names))
        return len(slots)

    def _free(self, slots: Ids) -> None:
        self._state[slots] = _FREE
        self._in_cold[slots] = False
        self._slots.free(slots)

    def _yield_extent(self, before: int | None) -> bool:
        """Empty the longest unused extent that may be emptied and hand it back to the arena.

        Args:
            before: only if it was last used before this tick.
        """
        extents = np.array(sorted(self.extents), dtype=np.int64)
        shape = (self.store.arena.num_extents, self.slots_per_extent)
        state = self._state.reshape(shape)[extents]
        loses = ~self._in_cold.reshape(shape)[extents] & self.store._cold_takes()
        stuck = (state == _RESERVED) | (
            (state == _COMMITTED)
            & ((self._leases.reshape(shape)[extents] > 0) | self._cleaning.reshape(shape)[extents] | loses)
        )
        movable = np.flatnonzero(~stuck.any(axis=1))
        if not len(movable):
            return False
        age = np.where(state == _COMMITTED, self._used_at.reshape(shape)[extents], 0).max(axis=1)
        oldest = movable[np.argmin(age[movable])]
        if before is not None and age[oldest] >= before:
            return False
        extent = int(extents[oldest])
        first = extent * self.slots_per_extent
        slots = np.arange(first, first + self.slots_per_extent, dtype=np.int32)
        self._evict(slots[self._state[slots] == _COMMITTED])
        self._slots.remove(first, self.slots_per_extent)
        self.extents.discard(extent)
        self.store.arena.give_extent(extent)
        self.store._taken -= 1
        return True

    def _ahead(self) -> int:
        """How many of the coldest blocks need a copy below.

        Those that the clean share does not have free, and as many as were asked for in vain: a share of a
        few slots may come to none.
        """
        arena = self.store.arena
        owned = len(self.extents)
        unassigned = arena.num_extents - self.store._taken
        slots = (owned + unassigned) * self.slots_per_extent
        free = self._slots.free_count + unassigned * self.slots_per_extent
        return max(int(slots * self.store._clean_ahead) - free, self._short)

    def _to_clean(self) -> Ids:
        ahead = self._ahead()
        if not ahead:
            return np.empty(0, dtype=np.int32)
        candidates = self._policy.coldest(ahead)
        return candidates[~self._in_cold[candidates] & ~self._cleaning[candidates]]

    def _check_blocks(self, blocks: npt.NDArray[np.uint8], count: int) -> None:
        size = self.layout.block_bytes
        if (
            blocks.dtype != np.uint8
            or blocks.ndim != 2
            or blocks.shape[0] < count
            or blocks.shape[1] != size
            or blocks.strides[1] != 1
        ):
            raise LayoutError(
                f"blocks must be uint8 [{count}, {size}] with contiguous rows, "
                f"got {blocks.dtype} {list(blocks.shape)}"
            )

    def _check_integrity(self) -> None:
        self._slots.check_integrity()
        self._policy.check_integrity()
        place = np.arange(self.capacity, dtype=np.int32)
        owned = np.isin(place // self.slots_per_extent, np.array(sorted(self.extents), dtype=np.int32))
        free = np.zeros(self.capacity, dtype=np.bool_)
        free[place[owned]] = self._slots.is_free(place[owned])
        if (free != (owned & (self._state == _FREE))).any() or (self._state[~owned] != _FREE).any():
            raise IntegrityError("a host slot is free in one book and not in the other")
        committed = np.flatnonzero(self._state == _COMMITTED)
        reserved = np.flatnonzero(self._state == _RESERVED)
        for book, slots in ((self._index, committed), (self._pending, reserved)):
            if sorted(book.values()) != slots.tolist():
                raise IntegrityError(f"{len(book)} host blocks are named, {len(slots)} slots hold one")
            for name, slot in book.items():
                if self._hashes[slot].tolist() != name:
                    raise IntegrityError(f"host slot {slot} has another hash than the index says")
        if self._num_cleaning != np.count_nonzero(self._cleaning):
            raise IntegrityError(f"{self._num_cleaning} host blocks are counted as being copied below")
        if (self._leases < 0).any() or (self._pins > self._leases).any():
            raise IntegrityError("a host slot has fewer leases than pins, or less than none")
        evictable = np.flatnonzero((self._state == _COMMITTED) & (self._leases == 0))
        ranked = np.sort(self._policy.coldest(len(self._policy)))
        if not np.array_equal(evictable, ranked):
            raise IntegrityError(
                f"{len(evictable)} host blocks may be evicted, the policy ranks {len(ranked)}"
            )
