"""What both clients, the waiting one and asyncio's, do around their core."""

from __future__ import annotations

import array
import logging
import os
import random
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final

from ..kvstore.events import EventStream, Listener
from ..kvstore.tenants import check_tenant
from ..tiers.errors import (
    AccessDeniedError,
    ConfigError,
    KVPagerError,
    ProtocolError,
    ServiceUnavailableError,
    TLSError,
)
from ..tiers.settings import expect_bytes, expect_seconds, expect_text, shown
from .client_calls import Ask, expect
from .client_core import GROUP_BYTES, ClientCore
from .client_space import AbsentArena, Arena, Lost
from .device_maps import DeviceMaps
from .endpoint import Endpoint
from .messages import Count, Flush, GetStats, Purged, PurgeTenant, Stats

__all__ = [
    "READ_BYTES",
    "REFUSALS",
    "Backoff",
    "Subscriptions",
    "core_of",
    "flush_ask",
    "follow_arena",
    "nothing_purged",
    "purge_tenant_ask",
    "read_socket",
    "stats_ask",
    "tell_lost",
    "why_not_reached",
]

_log = logging.getLogger(__name__)

REFUSALS: Final = (AccessDeniedError, ProtocolError, TLSError)
"""What another attempt would most likely end in, too."""
READ_BYTES: Final = 1 << 18
"""Of a read at most."""
_MOST_FDS: Final = 4
_CHANCE: Final = random.Random()
"""Not the module's own, whose sequence may be one that the program has seeded."""


class Backoff:
    """Seconds between attempts to connect: more and more, and not the same for all clients."""

    _FIRST: Final = 0.02
    _MOST: Final = 2.0

    def __init__(self) -> None:
        self._next = self._FIRST

    def reset(self) -> None:
        """An attempt was good."""
        self._next = self._FIRST

    def seconds(self) -> float:
        """How long to wait for the next."""
        seconds, self._next = self._next, min(self._MOST, 2 * self._next)
        return seconds * _CHANCE.uniform(0.5, 1.0)


def read_socket(
    connected: socket.socket, room: memoryview | None, place: memoryview, fds: list[int] | None = None
) -> memoryview | int:
    """What there is to read of a socket.

    Args:
        room: where to put it, if it is in the midst of a long frame.
        place: where to put it otherwise.
        fds: where to put descriptors that come with it; None: none do.

    Returns:
        the bytes, in `place`; or how many were put into `room`.

    Raises:
        OSError: as of `recv`; BlockingIOError where there is nothing.
        ServiceUnavailableError: the other side closed it.
    """
    if room is not None:
        count = connected.recv_into(room)
        if not count:
            raise ServiceUnavailableError("the sidecar closed the connection")
        return count
    if fds is None:
        count = connected.recv_into(place)
    else:
        size = array.array("i").itemsize
        space = socket.CMSG_SPACE(_MOST_FDS * size)
        count, ancillary, _, _ = connected.recvmsg_into([place], space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, passed in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.extend(array.array("i", passed[: len(passed) - len(passed) % size]))
    if not count:
        raise ServiceUnavailableError("the sidecar closed the connection")
    return place[:count]


def why_not_reached(endpoint: Endpoint, error: OSError) -> ServiceUnavailableError:
    """What the operating system said of a connection, as an error of this tree."""
    return ServiceUnavailableError(f"{endpoint}: {error.strerror or error or type(error).__name__}")


class Subscriptions:
    """Listeners of events, which are sent while there are any.

    Args:
        events: hands them on.
        listen: has them sent, or no more.
    """

    def __init__(self, events: EventStream, listen: Callable[[bool], None]) -> None:
        self._events = events
        self._listen = listen
        self._ends: set[Callable[[], None]] = set()

    def add(self, listener: Listener) -> Callable[[], None]:
        """One more; returns how to end it.

        Raises:
            ConfigError: it cannot be called.
        """
        unsubscribe = self._events.subscribe(listener)
        self._ends.add(unsubscribe)
        self._listen(True)

        def end() -> None:
            if unsubscribe in self._ends:
                self._ends.remove(unsubscribe)
                unsubscribe()
                self._listen(bool(self._ends))

        return end


def flush_ask(deadline: float) -> Ask[int]:
    """The request that the cold tier be given all that it has no copy of."""
    seconds = expect_seconds("deadline", deadline)
    return Ask(
        None,
        lambda _: Flush(seconds),
        lambda reply: expect(reply, Count).count,
        lambda: 0,
        seconds,
        required=True,
    )


def stats_ask() -> Ask[dict[str, Any]]:
    """The request for the sidecar's counters."""
    return Ask(None, lambda _: GetStats(), lambda reply: expect(reply, Stats).values, dict, required=True)


def purge_tenant_ask(tenant: str, deadline: float) -> Ask[Purged]:
    """The request that all of a tenant be gone."""
    tenant, seconds = check_tenant("tenant", tenant), expect_seconds("deadline", deadline)
    return Ask(
        None,
        lambda _: PurgeTenant(tenant, seconds),
        lambda reply: expect(reply, Purged),
        nothing_purged,
        seconds,
        required=True,
    )


def nothing_purged() -> Purged:
    """What stands for the reply where there is none."""
    return Purged(0, 0, 0, 0, 0, 0, {})


def tell_lost(lost: Lost, listener: Callable[[Lost], None] | None) -> None:
    """Log what was lost, and tell who wants to know."""
    _log.warning(
        "%d leases and %d reservations are lost: the sidecar does not have them any more",
        len(lost.leased),
        len(lost.reserved),
    )
    if listener is not None:
        try:
            listener(lost)
        except Exception:  # noqa: BLE001  a listener's fault must not stop the connection
            _log.exception("a listener of lost leases failed")


def follow_arena(
    maps: DeviceMaps, arena: Arena | AbsentArena | None, used: Sequence[Arena | AbsentArena]
) -> None:
    """`DeviceMaps.follow`; where the new memory cannot be mapped it is logged, and blocks are copied."""
    try:
        maps.follow(arena, used)
    except KVPagerError as error:
        _log.warning("the sidecar's new memory is not mapped for %s: %s", maps.device, error)


def core_of(
    endpoint: Endpoint, name: str | None, group: bytes | None, on_lost: Callable[[Lost], None] | None
) -> ClientCore:
    """The core of a client, for the arguments of `connect`.

    Raises:
        ConfigError: one is of a wrong type, or `group` not 16 bytes.
    """
    if on_lost is not None and not callable(on_lost):
        raise ConfigError("on_lost", f"must be a function of what was lost, got {shown(on_lost)}")
    name = f"pid {os.getpid()}" if name is None else expect_text("name", name)
    group = secrets.token_bytes(GROUP_BYTES) if group is None else expect_bytes("group", group, GROUP_BYTES)
    return ClientCore(group, name, pid=os.getpid() if endpoint.local else 0, token=endpoint.token)
