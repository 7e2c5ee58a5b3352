"""The status of a host store: how full its spaces are, what is set, which parts do not do all their work."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ..tiers.layout import KVLayout
from ..tiers.memory import format_bytes
from .clock import ClockReading
from .cold_link import ColdCondition, ColdState
from .cost import CostModel
from .shared import HostShared
from .slot_looks import SlotCounts
from .store_settings import StoreSettings

__all__ = ["DegradedPart", "SpaceStatus", "StatusReader", "StoreStatus"]

_COLD: Final = "cold"
_HOST: Final = "host"
_RECORDS: Final = "records"
_PURGES: Final = "purges"
_QUOTAS: Final = "quotas"


@dataclass(frozen=True)
class DegradedPart:
    """A part that does not do all of its work.

    Args:
        part: ``cold`` (down, stalled or full), ``host`` (there is not the memory), ``records`` (some were
            damaged), ``purges`` (not done in the cold tier), ``quotas`` (a tenant has more than its own); a
            sidecar has ``draining``, too.
        since: since when, seconds since 1970; of what only a look finds, since the first look.
        reason: why, in words.
    """

    part: str
    since: float
    reason: str


@dataclass(frozen=True)
class SpaceStatus:
    """One layout and shard in host memory.

    Args:
        id: its 16 bytes.
        layout, shard, tenant: what it is of.
        slots_per_extent: slots that an extent is cut into.
        extents: that it has.
        capacity: slots that it would have with every extent.
        resident: committed blocks.
        reserved: slots that are being written.
        evictable: blocks that may go.
        free: slots of its extents that hold nothing.
        cleaning: blocks that are being copied to the cold tier.
        slots: what else its slots are; counted a moment later.
        unpurged: whether the cold tier was to remove something of it and did not yet.
        costs: what an engine told last of loading and computing its blocks; None: none did.
    """

    id: bytes
    layout: KVLayout
    shard: str
    tenant: str
    slots_per_extent: int
    extents: int
    capacity: int
    resident: int
    reserved: int
    evictable: int
    free: int
    cleaning: int
    slots: SlotCounts
    unpurged: bool
    costs: CostModel | None = None


@dataclass(frozen=True)
class StoreStatus:
    """A host store.

    Args:
        settings: what can be set while it serves.
        cold: the cold tier; None where there is none.
        degraded: parts that do not do all of their work.
        clock: how long ago which tick was.
        spaces: those that are open.
    """

    settings: StoreSettings
    cold: ColdState | None
    degraded: tuple[DegradedPart, ...]
    clock: ClockReading
    spaces: tuple[SpaceStatus, ...]


class StatusSource(Protocol):
    """A space, as far as its status is asked for."""

    def status(self) -> SpaceStatus:
        """The space as it is."""
        ...


class StatusReader:
    """Takes the status of a store, and remembers since when what is.

    Args:
        shared: what the store's spaces have in common.
    """

    def __init__(self, shared: HostShared) -> None:
        self._shared = shared
        self._since: dict[tuple[str, str], float] = {}

    def read(self, spaces: Sequence[StatusSource]) -> StoreStatus:
        """The status with these spaces. Takes the store's lock for moments.

        Raises:
            ClosedError: the store is closed.
        """
        shared = self._shared
        found = tuple(space.status() for space in spaces)
        with shared.lock():
            shared.check_open()
            cold, clock, settings = shared.cold.state, shared.clock.read(), shared.settings
            over = {
                tenant.name: (used - tenant.quota, tenant.quota)
                for tenant in shared.tenants.values()
                if tenant.quota is not None and (used := tenant.used) > tenant.quota
            }
        degraded = (
            []
            if cold is None or cold.condition is ColdCondition.READY
            else [DegradedPart(_COLD, cold.since, cold.reason)]
        )
        reasons: dict[tuple[str, str], str] = {}
        if (shortage := shared.arena.shortage) is not None:
            reasons[_HOST, ""] = shortage
        if damaged := sum(one.slots.damaged for one in found):
            reasons[_RECORDS, ""] = (
                f"the records of {damaged} slots were damaged, which are out of use until nobody is left "
                "who might write there"
            )
        if unpurged := sum(one.unpurged for one in found):
            reasons[_PURGES, ""] = (
                f"the cold tier was not told yet to remove all that was purged of {unpurged} spaces; nothing "
                "of it is read from there"
            )
        for tenant, (more, quota) in over.items():
            reasons[_QUOTAS, tenant] = (
                f"tenant {tenant!r} has {format_bytes(more)} more than its quota of {format_bytes(quota)}, "
                "and makes room when it writes"
            )
        now = time.time()
        self._since = {key: self._since.get(key, now) for key in reasons}
        degraded += [DegradedPart(key[0], self._since[key], why) for key, why in reasons.items()]
        return StoreStatus(settings, cold, tuple(degraded), clock, found)
