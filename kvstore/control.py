"""What engines tell of themselves and what operators may ask of them, through a sidecar."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ..tiers.errors import ConfigError
from ..tiers.settings import expect_bytes, expect_integer, expect_number, expect_text, expect_type, shown
from .cost import CostModel
from .hashing import HASH_BYTES

__all__ = ["ENGINE_COUNTS", "MOST_SESSIONS", "CommandKind", "EngineReport"]

ENGINE_COUNTS: Final = ("saved_tokens", "saved_milliseconds", "gated_tokens", "given_up_tokens")
"""Counters of a `TieredStore` that an engine reports (`StoreStats`)."""

MOST_SESSIONS = 4096
"""Sessions of one report."""
_MOST_NAME = 256
_MOST_COUNT = (1 << 63) - 1


class CommandKind(enum.StrEnum):
    """What an engine is asked to do with a session."""

    SLEEP = "sleep"
    """Give up its place in device memory, and stay asleep until it is woken."""
    WAKE = "wake"
    """Go on, or be ready to."""
    PROMOTE = "promote"
    """Bring its blocks up, to host memory or to the device."""


@dataclass(frozen=True)
class EngineReport:
    """How an engine is.

    Args:
        sessions: conversations by their ids, and what each is doing, in the engine's own words.
        block_bytes: bytes of one block.
        device_blocks: blocks that its device memory holds.
        device_held: how many of them running sequences have.
        to_device, from_device: bytes that blocks moved from and to host memory in a second, lately.
        space: the id of the space that its blocks are of; empty: not told.
        costs: what loading and computing these takes.
        counts: what it counted since it began, by the names of `ENGINE_COUNTS`.

    Raises:
        ConfigError: a value is of a wrong type or out of range.
    """

    sessions: Mapping[str, str] = field(default_factory=dict)
    block_bytes: int = 0
    device_blocks: int = 0
    device_held: int = 0
    to_device: float = 0.0
    from_device: float = 0.0
    space: bytes = b""
    costs: CostModel | None = None
    counts: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.sessions, Mapping):
            raise ConfigError("sessions", f"must map ids to states, got {shown(self.sessions)}")
        if len(self.sessions) > MOST_SESSIONS:
            raise ConfigError("sessions", f"must be {MOST_SESSIONS} at most, got {len(self.sessions)}")
        for name, state in self.sessions.items():
            for text in (expect_text("sessions", name), expect_text("sessions", state)):
                if len(text) > _MOST_NAME:
                    raise ConfigError("sessions", f"ids and states have {_MOST_NAME} characters at most")
        for name in ("block_bytes", "device_blocks", "device_held"):
            expect_integer(name, getattr(self, name), 0, _MOST_COUNT)
        for name in ("to_device", "from_device"):
            expect_number(name, getattr(self, name), 0.0, float(_MOST_COUNT))
        if expect_bytes("space", self.space):
            expect_bytes("space", self.space, HASH_BYTES)
        if self.costs is not None:
            expect_type("costs", self.costs, CostModel, "a CostModel or None")
        if not isinstance(self.counts, Mapping):
            raise ConfigError("counts", f"must map names to counts, got {shown(self.counts)}")
        for name, count in self.counts.items():
            # Names that a later engine has are passed over.
            expect_integer("counts", count if name in ENGINE_COUNTS else 0, 0, _MOST_COUNT)
