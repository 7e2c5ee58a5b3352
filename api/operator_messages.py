"""The messages of operators: how a sidecar is, and what it is to do otherwise while it serves.

A client over TCP with a token of tenants is refused all of them. See `api/messages.py` for how they travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .messages import Hashes, Message, tagged

__all__ = [
    "AttachCold",
    "Configure",
    "Configured",
    "Demote",
    "DetachCold",
    "Disconnect",
    "Drain",
    "EvictWhere",
    "Evictions",
    "FindSpace",
    "GetStatus",
    "Status",
]


@tagged(60)
@dataclass(frozen=True)
class GetStatus(Message):
    """Ask how the sidecar is."""


@tagged(61)
@dataclass(frozen=True)
class Status(Message):
    """The reply to `GetStatus`; `docs/protocol.md` says what the map holds."""

    values: dict[str, Any]


@tagged(62)
@dataclass(frozen=True)
class FindSpace(Message):
    """Open a space that there is by its 16 bytes; answered by `SpaceOpened`."""

    id: bytes


@tagged(63)
@dataclass(frozen=True)
class Configure(Message):
    """Set something otherwise while it serves: all of the map at once, or nothing of it."""

    values: dict[str, Any]


@tagged(64)
@dataclass(frozen=True)
class Configured(Message):
    """The reply to `Configure`: of each key that has another value now, what it was and what it is."""

    changed: dict[str, Any]


@tagged(65)
@dataclass(frozen=True)
class EvictWhere(Message):
    """Let blocks go that all of this is true of; what is empty or zero restricts nothing.

    Args:
        tenant: blocks of this tenant.
        spaces: blocks of spaces of these ids, 16 bytes each, one after the other.
        hashes: these blocks.
        older_than: blocks that were last used so many seconds ago or longer.
        tier: ``host``, also where it is empty: blocks that nobody leases go from host memory; or ``cold``.
        most_bytes: of blocks that go.
        dry_run: tell what would go, and change nothing.
        deadline: seconds that the cold tier may take.
    """

    tenant: str
    spaces: Hashes
    hashes: Hashes
    older_than: float
    tier: str
    most_bytes: int
    dry_run: bool
    deadline: float = 30.0


@tagged(66)
@dataclass(frozen=True)
class Evictions(Message):
    """The reply to `EvictWhere`.

    Args:
        blocks, bytes: that went from the tier, or would.
        lost: how many of the blocks are in no tier any more.
    """

    blocks: int
    bytes: int
    lost: int


@tagged(67)
@dataclass(frozen=True)
class Demote(Message):
    """Have blocks be in the cold tier alone, but for those that are leased; answered by how many went there.

    Args:
        deadline: seconds that copying may take.
    """

    space: int
    hashes: Hashes
    deadline: float


@tagged(68)
@dataclass(frozen=True)
class Disconnect(Message):
    """End a client's connection. What it holds in place stays its own, as after any other end of one.

    Args:
        client: its id in `Clients`.
    """

    client: int


@tagged(69)
@dataclass(frozen=True)
class AttachCold(Message):
    """Have a cold tier where there is none. What it is sealed under is the sidecar's own.

    Args:
        url: of `open_cold_tier`.
        capacity_bytes: most bytes of one on disk; 0: it is none on disk.
    """

    url: str
    capacity_bytes: int


@tagged(70)
@dataclass(frozen=True)
class DetachCold(Message):
    """Be without the cold tier; answered by how many blocks it has no copy of.

    Args:
        deadline: seconds for writing there first what has none.
    """

    deadline: float


@tagged(71)
@dataclass(frozen=True)
class Drain(Message):
    """Take nothing new, and write what has no copy in the cold tier; answered by how many still have none.

    Args:
        on: False: take blocks again.
        deadline: seconds for writing.
    """

    on: bool
    deadline: float
