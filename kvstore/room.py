"""How a space of host memory comes by slots: what is free, evicted, or taken from a space that idles."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

from ..tiers.errors import MemoryUnavailableError
from .events import EventKind
from .policy import Ids
from .shared import HostShared
from .slots import Evicted, SlotRecords
from .tenants import Tenant

__all__ = ["SpaceRoom"]

_LOOK_TICKS: Final = 64


class SpaceRoom:
    """Room for the blocks of one space. All of it is called with the shared lock held.

    Args:
        shared: what the space shares with others, which may want extents of it.
        records: the space's slots.
        space: the space's id.
        tenant: whose it is.
        block_bytes: bytes of a block.

    Attributes:
        tenant, block_bytes: as given.
        over_quota: whether the tenant's quota was what lacked when slots were asked for last.
        waiting: how many callers wait for more slots than are free.
    """

    def __init__(
        self, shared: HostShared, records: SlotRecords, space: bytes, tenant: Tenant, block_bytes: int
    ) -> None:
        self._shared = shared
        self._records = records
        self._space = space
        self.tenant = tenant
        self.block_bytes = block_bytes
        self.over_quota = False
        self.waiting = 0
        self._short = 0
        """Slots that were asked for last and not to be had."""
        self._look_again = 0
        self._comes_from_others = False
        """Whether somebody else's extent is being copied below, to be given to this space."""
        self._to_copy = 0
        """Blocks that should be copied below next, since the tenant needs room for others."""
        self._extent_to_copy: int | None = None
        """An extent that should be copied below next, since another space wants it."""

    @property
    def extents(self) -> AbstractSet[int]:
        """The extents that the space has."""
        return self._records.extents

    @property
    def blocks(self) -> int:
        """Slots that hold a block, or will."""
        return len(self._records.extents) * self._records.slots_per_extent - self._records.free

    @property
    def evictable(self) -> int:
        """Blocks that nobody leases."""
        return self._records.evictable

    def coldest_use(self) -> int | None:
        """When the block that would go next was last used; None where none may go."""
        return self._records.coldest_use()

    def take(self, count: int) -> Ids:
        """Up to `count` slots: free ones, a new extent's, or those of blocks evicted for it.

        Not more than the tenant's quota has room for, once the tenant's own blocks made some.
        """
        shared, records = self._shared, self._records
        allowed = self.tenant.make_room(count, self.block_bytes, spare_dirty=shared.cold.takes)
        while (missing := allowed - records.free) > 0:
            extent = shared.take_extent()
            if extent is not None:
                records.add_extent(extent)
            elif not (
                self._outlive()
                or self.evict(missing, spare_dirty=shared.cold.takes)
                or shared.reclaim_extent(self)
            ):
                break
        slots = records.take(allowed)
        self._short = count - len(slots)
        self.over_quota = len(slots) == allowed < count
        self._comes_from_others = False
        if self._short and shared.cold.takes:
            if self.over_quota:
                self.tenant.copy_ahead(self._short * self.block_bytes)
            else:
                self._comes_from_others = shared.copy_extent_for(self)
        return slots

    @property
    def unused(self) -> int:
        """Slots that are to be had for nothing: free ones, and those of extents that nobody has."""
        records = self._records
        free = records.free + self._shared.unassigned * records.slots_per_extent
        left = self.tenant.left(self.block_bytes)
        return free if left is None else min(free, left)

    def evict(self, count: int, *, spare_dirty: bool) -> int:
        """Let go of up to `count` blocks, coldest first; returns how many went.

        Args:
            spare_dirty: only blocks that have a copy in the cold tier.
        """
        return self._tell(self._records.evict(count, spare_dirty=spare_dirty))

    def evict_idle(self, slots: Ids) -> int:
        """Let go of these blocks, which may; returns how many went."""
        count = self._tell(self._records.evict_idle(slots))
        self._shared.changed.notify_all()
        return count

    def may_come(self) -> bool:
        """Whether waiting for more slots may help: the arena is growing, or blocks are being copied below,
        of this space or of one that would give it an extent."""
        if self.over_quota:
            return self._shared.cold.takes and self.tenant.evictable
        if self._shared.cold.takes and (self._records.evictable or self._comes_from_others):
            return True
        return self._grows(self._shared.arena.num_extents) or self._extent_came()

    def may_come_from_others(self, held: int) -> bool:
        """Whether waiting may help though all that this space may evict has gone.

        It does while somebody else has slots, which a lease or a write gives back one day, or an extent has
        come to be free, or the arena is growing or being page-locked. Not where all there is are pins, the
        caller's own leases, and spaces that have no more than their share.

        Args:
            held: slots that the caller leases.
        """
        records = self._records
        if records.free or records.evictable or records.pending or records.lent > held:
            return True
        if self.tenant.left(self.block_bytes) == 0:
            return self.tenant.evictable
        return self._shared.may_reclaim(self) or self._grows(None) or self._extent_came()

    def _grows(self, extents: int | None) -> bool:
        """Whether the arena comes to have so many extents; None: all, page-locked as far as they will be."""
        try:
            return not self._shared.arena.wait_ready(extents, timeout=0.0)
        except MemoryUnavailableError:
            return False

    def _extent_came(self) -> bool:
        """Whether there is an extent to take after all. The arena may have grown since slots were asked for
        in vain, so this is asked when it was seen not to grow any more."""
        return self._shared.free_extents > 0

    def to_clean(self) -> Ids:
        """The blocks that will soon have to go and have no copy in the cold tier, coldest first.

        Those of an extent that another space wants, before all. Else as many of the coldest are looked at as
        the clean share does not have free; or as were asked for in vain, since a share of a few slots may
        come to none.
        """
        shared, records = self._shared, self._records
        if self._extent_to_copy is not None:
            dirty = records.dirty_in(self._extent_to_copy)
            self._extent_to_copy = None
            if len(dirty):
                return dirty
        unassigned = shared.unassigned
        slots = (len(records.extents) + unassigned) * records.slots_per_extent
        free = records.free + unassigned * records.slots_per_extent
        if (left := self.tenant.left(self.block_bytes)) is not None:
            free = min(free, left)
            slots = min(slots, left + self.blocks)
        ahead = max(int(slots * shared.settings.clean_ahead) - free, self._short, self._to_copy)
        self._to_copy = 0
        return records.to_clean(ahead)

    def copy_ahead(self, count: int) -> None:
        """Have the `count` coldest blocks copied to the cold tier next, so that they may go."""
        self._to_copy = max(self._to_copy, count)

    @property
    def may_have_empty(self) -> bool:
        """Whether an extent may hold nothing: as many slots are free as one has."""
        return self._records.free >= self._records.slots_per_extent

    def oldest_use(self) -> int | None:
        """When the block that is longest unused, leased or not, was last used; None where there is none."""
        return self._records.oldest_use()

    def copy_extent(self, before: int | None) -> bool:
        """Have what `yield_extent` would empty copied to the cold tier first; whether there is something.

        Args:
            before: only if it was last used before this tick.
        """
        if self._records.cleaning:
            return True
        oldest = self._records.oldest_extent(spare_dirty=False)
        if oldest is None or (before is not None and oldest.used_at >= before):
            return False
        self._extent_to_copy = oldest.extent
        return True

    def yield_extent(self, before: int | None) -> bool:
        """Give the longest unused extent that may be emptied back, for another space.

        Args:
            before: only if it was last used before this tick.
        """
        oldest = self._records.oldest_extent(spare_dirty=self._shared.cold.takes)
        if oldest is None or (before is not None and oldest.used_at >= before):
            return False
        self._tell(self._records.remove_extent(oldest.extent))
        self._shared.give_extent(oldest.extent)
        return True

    def _outlive(self) -> bool:
        """Take an extent that another space has not used since this one used its coldest block.

        Else a space that came late would go round in its first extent, beside others that lie idle. Looking
        costs a pass over the other's slots, so a look in vain is not repeated at once.
        """
        if self._shared.clock.now < self._look_again:
            return False
        coldest = self._records.coldest_use()
        if coldest is None:
            return False
        found = self._shared.reclaim_extent(self, coldest)
        if not found:
            self._look_again = self._shared.clock.now + _LOOK_TICKS
        return found

    def _tell(self, evicted: Evicted) -> int:
        """Count evicted blocks and tell of them; returns how many."""
        count = len(evicted.names)
        self._shared.stats.evicted += count
        self._shared.stats.dropped += evicted.lost
        self.tenant.stats.evicted += count
        self._shared.post(EventKind.REMOVED, "host", self._space, evicted.names)
        return count
