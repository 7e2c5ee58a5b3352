"""What the spaces of one host store share: the lock, the arena's extents, the cold tier, the events."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, Protocol

from ..tiers.cold import ColdTier
from ..tiers.errors import ClosedError, IntegrityError
from ..tiers.mover import HostMover
from ..tiers.pinned import PinnedArena
from ..tiers.record_file import RecordFile
from .clock import UseClock
from .cold_link import ColdLink
from .cost_estimates import LinkEstimate
from .events import EventKind, EventStream
from .stats import HostStats
from .store_settings import StoreSettings
from .tenants import Tenant
from .timed_pins import PinClock
from .trace_log import TraceLog

__all__ = ["ExtentHolder", "HostShared"]

_LOADERS: Final = 2
_FIRST_TICK: Final = 1
"""Blocks were used at this tick or later; an extent that was used before holds none."""


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

    @property
    def waiting(self) -> int:
        """How many callers wait until it has more free slots than it has."""
        ...

    @property
    def may_have_empty(self) -> bool:
        """Whether an extent of it may hold nothing."""
        ...

    def oldest_use(self) -> int | None:
        """When the block that is longest unused, leased or not, was last used; None where there is none."""
        ...

    def yield_extent(self, before: int | None) -> bool:
        """Empty an extent and give it back; False where none can be, or was last used before `before`."""
        ...

    def copy_extent(self, before: int | None) -> bool:
        """Have what `yield_extent` would empty copied to the cold tier first; whether there is something."""
        ...


class HostShared:
    """The lock of a `HostStore`, and everything under it that no space has to itself.

    Called with the lock held, unless said otherwise.

    Args:
        arena: host memory.
        cold: the cold tier, or None.
        device: ``cuda:N`` if that GPU is to read the arena in place.
        settings: what can be set while the store serves.

    Attributes:
        changed: notified whenever waiting for room, for a writer or for the cleaner may be over.
        stats, events: of all the spaces.
        mover: copies blocks in and out.
        loaders: threads that read the cold tier.
        hinted: a thread that reads it ahead, so that nobody's load waits for what is only hinted at.
        hints_under_way: loads that wait for it, or run.
        pin_clock: ends pins that end by themselves.
        clock: counts uses; what was used later has a higher tick, in whichever space.
        cold: the cold tier, and how it does.
        cold_reads: what reading it takes.
    """

    def __init__(
        self,
        arena: PinnedArena,
        cold: ColdTier | None,
        device: str | None,
        settings: StoreSettings,
    ) -> None:
        self.settings = settings
        self.tenants: dict[str, Tenant] = {}
        """Those that have a space, or had one."""
        self.records: RecordFile | None = None
        """Where what outlives this process is written down, if it is."""
        self.trace: TraceLog | None = None
        """Where it is written down what is looked up and put, if it is."""
        self.arena = arena
        self.device = device
        self.stats = HostStats()
        self.events = EventStream()
        self.mover = HostMover()
        self.loaders = ThreadPoolExecutor(_LOADERS, thread_name_prefix="kvpager-load")
        self.hinted = ThreadPoolExecutor(1, thread_name_prefix="kvpager-hint")
        self.hints_under_way = 0
        self.pin_clock = PinClock()
        self.changed = threading.Condition(threading.Lock())
        self.cold = ColdLink(cold, self.changed)
        self.cold_reads = LinkEstimate()
        self.closed = False
        self.clock = UseClock()
        self._holders: list[ExtentHolder] = []
        self._taken = 0
        """Extents that spaces have."""
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
        if self.trace is not None:
            self.trace.close()
        if self.cold.tier is not None and not keep_cold:
            self.cold.tier.close()
        self.arena.close()

    # Tenants

    def tenant(self, name: str) -> Tenant:
        """The tenant of a name."""
        tenant = self.tenants.get(name)
        if tenant is None:
            tenant = self.tenants[name] = Tenant(name, self.settings.quota_of(name))
        return tenant

    def configure(self, settings: StoreSettings) -> None:
        """Other settings are in force from now on, but for the policy, which is the spaces' own."""
        self.settings = settings
        for tenant in self.tenants.values():
            tenant.quota = settings.quota_of(tenant.name)
        self.changed.notify_all()

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
        """Free an extent of another space: an empty one, else one of whom `_donors` tells.

        Args:
            before: only up to the share of `asking`, and what was last used before this tick.
        """
        # What somebody waits with for more is not idle.
        idle = (one for one in self._holders if one is not asking and not one.waiting and one.may_have_empty)
        if any(space.yield_extent(_FIRST_TICK) for space in idle):
            return True
        if before is not None:
            return any(donor.yield_extent(before) for donor, _ in self._donors(asking, up_to_share=True))
        return any(donor.yield_extent(until) for donor, until in self._donors(asking))

    def copy_extent_for(self, asking: ExtentHolder) -> bool:
        """Have an extent that would be given to `asking` copied below first; whether there is one."""
        return any(donor.copy_extent(until) for donor, until in self._donors(asking))

    def may_reclaim(self, asking: ExtentHolder) -> bool:
        """Whether another space has more than its share, so that `asking` would be given what idles of it."""
        return any(until is None for _, until in self._donors(asking))

    def _donors(
        self, asking: ExtentHolder, *, up_to_share: bool = False
    ) -> list[tuple[ExtentHolder, int | None]]:
        """Whose extents `asking` may have, who is furthest above its share first, and used until when.

        Only spaces that have extents count, and the one that asks. A tenant's share is its part of the arena,
        by quotas; a space's is its part of that, or of what the tenant has if that is more. Other tenants
        give what they have above their share, whatever `asking` has already: nobody else asks for it. So do
        spaces of the same tenant, and then what they have not used since any block that `asking` holds.

        Args:
            up_to_share: nothing if `asking` has its share, and only of those above theirs.
        """
        active = [space for space in self._holders if space.extents or space is asking]
        mine = asking.tenant
        shares = self._shares({space.tenant for space in active})
        held, spaces = dict.fromkeys(shares, 0), dict.fromkeys(shares, 0)
        for space in active:
            held[space.tenant] += len(space.extents)
            spaces[space.tenant] += 1
        part = max(1, int(max(shares[mine], held[mine]) / spaces[mine]))
        if up_to_share and len(asking.extents) >= part:
            return []
        others_give = not up_to_share or held[mine] < max(1.0, shares[mine])
        above: list[ExtentHolder] = []
        within: list[ExtentHolder] = []
        for space in active:
            if space is asking:
                continue
            if space.tenant is mine:
                if len(space.extents) > part:
                    above.append(space)
                elif not space.waiting:
                    within.append(space)
            elif others_give and held[space.tenant] > shares[space.tenant]:
                above.append(space)
        for some in (above, within):
            some.sort(
                key=lambda one: len(one.extents) - shares[one.tenant] / spaces[one.tenant], reverse=True
            )
        donors: list[tuple[ExtentHolder, int | None]] = [(space, None) for space in above]
        if within and not up_to_share:
            # Else one whose blocks are all leased would bit by bit get what another goes on using.
            until = asking.oldest_use()
            donors += [(space, self.clock.now + 1 if until is None else until) for space in within]
        return donors

    def _shares(self, tenants: AbstractSet[Tenant]) -> dict[Tenant, float]:
        """Extents that each of these should have: by quotas, without one as if by all there is."""
        whole = self.arena.num_extents * self.arena.extent_bytes
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
