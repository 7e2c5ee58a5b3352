"""What the spaces of one host store share: the lock, the arena's extents, the cold tier, the events."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from ..tiers.cold import ColdStatus, ColdTier
from ..tiers.errors import ClosedError, IntegrityError
from ..tiers.mover import HostMover
from ..tiers.pinned import PinnedArena
from ..tiers.record_file import RecordFile
from .events import EventKind, EventStream
from .stats import HostStats
from .tenants import ANY_OTHER, Tenant
from .timed_pins import PinClock

__all__ = ["ExtentHolder", "HostShared"]

_log = logging.getLogger(__name__)

_COLD_RETRY_SECONDS: Final = 1.0
_LOADERS: Final = 2


class ExtentHolder(Protocol):
    """A space, as far as others want extents of it."""

    @property
    def extents(self) -> AbstractSet[int]:
        """The extents that it has."""
        ...

    @property
    def tenant(self) -> Tenant:
        """Whose space it is."""
        ...

    def yield_extent(self, before: int | None) -> bool:
        """Empty an extent and give it back; False where none can be, or was last used before `before`."""
        ...


class HostShared:
    """The lock of a `HostStore`, and everything under it that no space has to itself.

    Called with the lock held, unless said otherwise.

    Args:
        arena: host memory.
        cold: the cold tier, or None.
        device: ``cuda:N`` if that GPU is to read the arena in place.
        clean_ahead: share of host memory that is kept copied to the cold tier ahead of eviction.
        cold_deadline: seconds that one background read or write of the cold tier may take.
        quotas: bytes that each tenant may have, of `check_quotas`.

    Attributes:
        changed: notified whenever waiting for room, for a writer or for the cleaner may be over.
        stats, events: of all the spaces.
        mover: copies blocks in and out.
        loaders: threads that read the cold tier.
        hinted: a thread that reads it ahead, so that nobody's load waits for what is only hinted at.
        hints_under_way: loads that wait for it, or run.
        pin_clock: ends pins that end by themselves.
        clock: uses so far; what was used later has a higher tick, in whichever space.
    """

    def __init__(
        self,
        arena: PinnedArena,
        cold: ColdTier | None,
        device: str | None,
        *,
        clean_ahead: float,
        cold_deadline: float,
        quotas: Mapping[str, int],
    ) -> None:
        self._quotas = quotas
        self.tenants: dict[str, Tenant] = {}
        """Those that have a space, or had one."""
        self.records: RecordFile | None = None
        """Where what outlives this process is written down, if it is."""
        self.arena = arena
        self.cold = cold
        self.device = device
        self.clean_ahead = clean_ahead
        self.cold_deadline = cold_deadline
        self.stats = HostStats()
        self.events = EventStream()
        self.mover = HostMover()
        self.loaders = ThreadPoolExecutor(_LOADERS, thread_name_prefix="kvpager-load")
        self.hinted = ThreadPoolExecutor(1, thread_name_prefix="kvpager-hint")
        self.hints_under_way = 0
        self.pin_clock = PinClock()
        self.changed = threading.Condition(threading.Lock())
        self.closed = False
        self.clock = 0
        self._holders: list[ExtentHolder] = []
        self._taken = 0
        """Extents that spaces have."""
        self._cold_down = False
        self._cold_full = False
        self._cold_retry_at = 0.0
        self._outbox: deque[tuple[EventKind, str, bytes, Sequence[bytes]]] = deque()
        self._telling = threading.Lock()

    # The lock, and what is told after it

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock; at its end, outside of it, tell the listeners what happened."""
        try:
            with self.changed:
                yield
        finally:
            if self._outbox:
                self._tell()

    def post(self, kind: EventKind, tier: str, space: bytes, hashes: Sequence[bytes]) -> None:
        """Tell the listeners of this once the lock is given back."""
        if hashes:
            self._outbox.append((kind, tier, space, hashes))

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

    def tick(self) -> int:
        """The tick of one more use."""
        self.clock += 1
        return self.clock

    def check_open(self) -> None:
        """Raise `ClosedError` if the store is closed."""
        if self.closed:
            raise ClosedError("the host store is closed")

    def stop(self) -> None:
        """Let nothing new begin: whoever waits is woken. Takes the lock."""
        with self.lock():
            self.closed = True
            self.changed.notify_all()

    def close(self, *, keep_cold: bool) -> None:
        """After `stop`, without the lock: end what is under way and give everything back.

        Args:
            keep_cold: but the cold tier.
        """
        self.pin_clock.close()
        self.hinted.shutdown(wait=True, cancel_futures=True)
        self.loaders.shutdown(wait=True)
        self.mover.close()
        if self.cold is not None and not keep_cold:
            self.cold.close()
        self.arena.close()

    # Tenants

    def tenant(self, name: str) -> Tenant:
        """The tenant of a name."""
        tenant = self.tenants.get(name)
        if tenant is None:
            quota = self._quotas.get(name, self._quotas.get(ANY_OTHER))
            tenant = self.tenants[name] = Tenant(name, quota)
        return tenant

    # Extents, which spaces take from the arena and from each other

    def join(self, space: ExtentHolder) -> None:
        """A space was opened; extents that it has already count as taken."""
        self._holders.append(space)
        self._taken += len(space.extents)

    @property
    def unassigned(self) -> int:
        """Extents that no space has, whether their memory is there yet or not."""
        return self.arena.num_extents - self._taken

    @property
    def free_extents(self) -> int:
        """Extents that no space has and whose memory is there."""
        return self.arena.ready_extents - self._taken

    def take_extent(self) -> int | None:
        """An extent that no space has and whose memory is there, or None."""
        extent = self.arena.take_extent() if self.unassigned else None
        if extent is not None:
            self._taken += 1
        return extent

    def give_extent(self, extent: int) -> None:
        """An extent from `take_extent` is empty."""
        self.arena.give_extent(extent)
        self._taken -= 1

    def reclaim_extent(self, asking: ExtentHolder, before: int | None = None) -> bool:
        """Free the longest unused extent of the largest space that may be asked, see `_donors`.

        Args:
            before: only an extent that was last used before this tick.
        """
        donors = self._donors(asking)
        donors.sort(key=lambda space: len(space.extents), reverse=True)
        return any(donor.yield_extent(before) for donor in donors)

    def may_reclaim(self, asking: ExtentHolder) -> bool:
        """Whether an extent of another space would be given to `asking`, were it empty."""
        return bool(self._donors(asking))

    def _donors(self, asking: ExtentHolder) -> list[ExtentHolder]:
        """The spaces that have extents which `asking` may have; none if it has its share itself.

        A space's share is its part of its tenant's share. A tenant's is its part of the arena, by quotas;
        what it has beyond that others may have that lack some of theirs.
        """
        mine = asking.tenant
        shares = self._shares()
        if len(asking.extents) >= max(1, int(shares[mine]) // mine.spaces):
            return []
        held = dict.fromkeys(shares, 0)
        for space in self._holders:
            held[space.tenant] += len(space.extents)
        lacks = held[mine] < max(1.0, shares[mine])
        return [
            space
            for space in self._holders
            if space is not asking
            and space.extents
            and (space.tenant is mine or (lacks and held[space.tenant] > shares[space.tenant]))
        ]

    def _shares(self) -> dict[Tenant, float]:
        """Extents that each tenant with a space should have: by quotas, without one as if by all there is."""
        whole = self.arena.num_extents * self.arena.extent_bytes
        tenants = {space.tenant for space in self._holders}
        quotas = {one: whole if one.quota is None else min(one.quota, whole) for one in tenants}
        return {one: self.arena.num_extents * quotas[one] / sum(quotas.values()) for one in tenants}

    def check_extents(self) -> None:
        """Prove that every extent has one owner.

        Raises:
            IntegrityError: it is not so.
        """
        owned: set[int] = set()
        for space in self._holders:
            if twice := owned & space.extents:
                raise IntegrityError(f"extent {min(twice)} belongs to two spaces")
            owned |= space.extents
        if len(owned) != self._taken:
            raise IntegrityError(f"spaces have {len(owned)} extents, {self._taken} are counted")

    # The cold tier

    @property
    def cold_takes(self) -> bool:
        """Whether a victim without a copy below should wait for one.

        Not from the first batch that the tier did not take until it takes one again: nobody waits for a tier
        that is being tried anew.
        """
        return self.cold is not None and not self._cold_down

    @property
    def cold_is_due(self) -> bool:
        """Whether the tier may be asked to take something: not at once after it did not. Needs no lock."""
        return time.monotonic() >= self._cold_retry_at

    def cold_answered(self, status: npt.NDArray[np.uint8]) -> None:
        """Stop asking a tier that did not take one record of a batch; ask again after a while."""
        full = bool((status == ColdStatus.FULL).any())
        if full and not self._cold_full:
            _log.warning("the cold tier is full, or too small: blocks that it does not take are not kept")
        self._cold_full = full
        self._cold_down = not (status == ColdStatus.OK).any()
        if self._cold_down:
            self._cold_retry_at = time.monotonic() + _COLD_RETRY_SECONDS
