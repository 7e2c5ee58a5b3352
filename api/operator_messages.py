"""The messages of operators: how a sidecar is, and what it is to do otherwise while it serves.

A client over TCP with a token of tenants is refused all of them. See `api/messages.py` for how they travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .messages import Message, tagged

__all__ = ["GetStatus", "Status"]


@tagged(60)
@dataclass(frozen=True)
class GetStatus(Message):
    """Ask how the sidecar is."""


@tagged(61)
@dataclass(frozen=True)
class Status(Message):
    """The reply to `GetStatus`; `docs/protocol.md` says what the map holds."""

    values: dict[str, Any]
