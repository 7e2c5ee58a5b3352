"""What the connections of a sidecar have in common, and what a request is that another thread works on."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from ..kvstore.host import HostStore
from ..tiers.settings import expect_seconds
from .cold_source import ColdSource
from .commands import Engines
from .messages import Message
from .purges import Purges
from .service_times import ServiceTimes

__all__ = ["MOST_WAIT", "Job", "Service", "ServiceCounters", "seconds_of"]

MOST_WAIT: Final = 60.0
"""Seconds that a request waits at most, whatever it asks for."""
_ID_BYTES: Final = 16


@dataclass(frozen=True)
class Job:
    """Work for another thread.

    Args:
        waits: whether it waits for something, rather than being long.
        work: runs in the thread.
        finish: makes the reply of what `work` returned; on the loop.
        undo: gives back what `work` returned where there is nobody to reply to any more; in any thread.
        instead: ends what the request was to end where `work` is never begun; in a thread.
    """

    waits: bool
    work: Callable[[], Any]
    finish: Callable[[Any], Message]
    undo: Callable[[Any], object] | None = None
    instead: Callable[[], object] | None = None


@dataclass
class ServiceCounters:
    """What a sidecar did since its start."""

    connections: int = 0
    refused: int = 0
    """Connections that were not let in."""
    requests: int = 0
    failures: int = 0
    protocol_errors: int = 0
    events_lost: int = 0


@dataclass
class Service:
    """What the connections of a sidecar have in common.

    Args:
        host: the store.
        max_frame: bytes of the largest frame.
        cold: where the cold tier comes from, and another would.
        stopping: whether the sidecar is being stopped: nothing new is reserved.
        drained_since: since when operators let nothing new be reserved, seconds since 1970; None: they do.
        purges: makes purges; there is one once the sidecar is started.
        engines: reports and commands.
        times: how long requests took.
        boot_id: 16 bytes, others after each start.
        started: when that was, seconds since 1970.
    """

    host: HostStore
    max_frame: int
    cold: ColdSource = field(default_factory=ColdSource)
    stopping: bool = False
    drained_since: float | None = None
    counters: ServiceCounters = field(default_factory=ServiceCounters)
    spaces: set[bytes] = field(default_factory=set)
    purges: Purges | None = None
    engines: Engines = field(default_factory=Engines)
    times: ServiceTimes = field(default_factory=ServiceTimes)
    boot_id: bytes = field(default_factory=lambda: secrets.token_bytes(_ID_BYTES))
    started: float = field(default_factory=time.time)


def seconds_of(setting: str, value: float) -> float:
    """How long a request may wait that asks for so many seconds.

    Raises:
        ConfigError: it is no number of seconds.
    """
    return min(expect_seconds(setting, value), MOST_WAIT)
