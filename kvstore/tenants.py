"""Tenants: whose blocks a space holds, how much of host memory they may take, and what they did.

A tenant's blocks lie in spaces of its own, so no other finds them. Its *quota* bounds the bytes of its
blocks, reserved ones included: at it, a tenant makes room among its own blocks, coldest first. Extents are
what tenants take from each other: what one has above its *share* of the arena, and nobody leases, others may
have (`HostShared.reclaim_extent`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from ..tiers.errors import ConfigError
from ..tiers.settings import MOST_BYTES, expect_integer, expect_text, shown
from .stats import Counters

__all__ = ["ANY_OTHER", "MOST_TENANT", "Tenant", "TenantRoom", "TenantStats", "check_quotas", "check_tenant"]

ANY_OTHER: Final = "*"
"""In quotas: every tenant that is not named, those without a name included."""
MOST_TENANT: Final = 256
"""Characters of a tenant's name."""


@dataclass
class TenantStats(Counters):
    """What happened to one tenant's blocks since the store was opened. They only grow."""

    matched: int = 0
    missed: int = 0
    committed: int = 0
    evicted: int = 0
    denied: int = 0
    over_quota: int = 0
    """Of those denied: the quota was what lacked, not memory."""
    unwanted: int = 0
    """The policy did not find them worth a place."""
    purged: int = 0


class TenantRoom(Protocol):
    """A space of a tenant, as far as the tenant makes room in it."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one of its blocks."""
        ...

    @property
    def blocks(self) -> int:
        """Slots that hold a block, or will."""
        ...

    @property
    def evictable(self) -> int:
        """Blocks that nobody leases."""
        ...

    def coldest_use(self) -> int | None:
        """When the block that would go next was last used; None where none may go."""
        ...

    def evict(self, count: int, *, spare_dirty: bool) -> int:
        """Let go of up to `count` blocks, coldest first; returns how many went."""
        ...

    def copy_ahead(self, count: int) -> None:
        """Have the `count` coldest blocks copied to the cold tier next, so that they may go."""
        ...


class Tenant:
    """One tenant of a host store. Used with the store's lock held.

    Args:
        name: what it is called; empty for spaces that nobody named a tenant of.
        quota: bytes that its blocks may take; None: all there are.

    Attributes:
        name, quota: as given.
        stats: what happened to its blocks.
    """

    def __init__(self, name: str, quota: int | None) -> None:
        self.name = name
        self.quota = quota
        self.stats = TenantStats()
        self._rooms: list[TenantRoom] = []

    def join(self, room: TenantRoom) -> None:
        """A space of it was opened."""
        self._rooms.append(room)

    @property
    def blocks(self) -> int:
        """Blocks that it has, reserved ones included."""
        return sum(room.blocks for room in self._rooms)

    @property
    def used(self) -> int:
        """Bytes of these."""
        return sum(room.blocks * room.block_bytes for room in self._rooms)

    @property
    def evictable(self) -> bool:
        """Whether it has a block that nobody leases."""
        return any(room.evictable for room in self._rooms)

    def left(self, block_bytes: int) -> int | None:
        """Blocks of so many bytes that its quota has room for; None where it has no quota."""
        return None if self.quota is None else max(0, self.quota - self.used) // block_bytes

    def make_room(self, count: int, block_bytes: int, *, spare_dirty: bool) -> int:
        """Evict its own blocks, coldest first, until its quota has room for `count` of so many bytes.

        Args:
            spare_dirty: only blocks that have a copy in the cold tier.

        Returns:
            how many there is room for, `count` at most.
        """
        if self.quota is None:
            return count
        wanted = count * block_bytes
        while (over := self.used + wanted - self.quota) > 0 and self._evict(over, spare_dirty=spare_dirty):
            pass
        return min(count, max(0, self.quota - self.used) // block_bytes)

    def _evict(self, over: int, *, spare_dirty: bool) -> bool:
        """Let blocks go of the space whose coldest is coldest, else of the next; whether any went."""
        return any(room.evict(count, spare_dirty=spare_dirty) for room, count in self._parts(over))

    def copy_ahead(self, size: int) -> None:
        """Have so many bytes of blocks copied to the cold tier next, so that `make_room` may let them go."""
        for room, count in self._parts(size):
            room.copy_ahead(count)

    def _parts(self, size: int) -> list[tuple[TenantRoom, int]]:
        """How many blocks of each space make up so many bytes, the space first whose coldest is coldest."""
        ranked = [(used_at, room) for room in self._rooms if (used_at := room.coldest_use()) is not None]
        ranked.sort(key=lambda one: one[0])
        # Spaces of several shards are used in step: not all of what must go is the coldest one's.
        part = -(-size // len(ranked)) if ranked else size
        return [(room, -(-part // room.block_bytes)) for _, room in ranked]

    def snapshot(self) -> dict[str, Any]:
        """Its counters, and how much it has: ``blocks``, ``bytes``, ``quota`` (0: none)."""
        return {
            **self.stats.snapshot(),
            "blocks": self.blocks,
            "bytes": self.used,
            "quota": self.quota or 0,
        }


def check_tenant(setting: str, name: object) -> str:
    """The name of a tenant, if it is one.

    Raises:
        ConfigError: it is no text, too long, or stands for others.
    """
    name = expect_text(setting, name, empty=True)
    if len(name) > MOST_TENANT:
        raise ConfigError(setting, f"must be {MOST_TENANT} characters at most, got {len(name)}")
    if name == ANY_OTHER:
        raise ConfigError(setting, f"{ANY_OTHER!r} stands for every other tenant and is no tenant's name")
    return name


def check_quotas(setting: str, quotas: Mapping[str, int] | None) -> dict[str, int]:
    """Quotas by tenant, `ANY_OTHER` for those that are not named.

    Raises:
        ConfigError: they are no mapping of names to bytes.
    """
    if quotas is None:
        return {}
    if not isinstance(quotas, Mapping):
        raise ConfigError(setting, f"must map tenants to bytes, got {shown(quotas)}")
    return {
        name if name == ANY_OTHER else check_tenant(setting, name): expect_integer(
            setting, count, 1, MOST_BYTES
        )
        for name, count in quotas.items()
    }
