"""The Redis servers behind a URL: their connections, whether they are up, and who holds which slot.

Connections are made by background threads only, so that no call waits for a name server or a TLS
handshake beyond its deadline. A server that cannot be reached, or that stalls, is marked down: calls
then fail within microseconds, and a thread tries again with growing pauses until it answers.

The slots of a Cluster are learnt from CLUSTER SLOTS and from MOVED and ASK replies
(https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/).
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Final

from redis.crc import key_slot

from .errors import ClosedError, ColdTierUnavailableError, IntegrityError
from .redis_url import Address
from .redis_wire import CONNECT_ERRORS, Reply, ReplyError, Wire, describe

__all__ = ["CLUSTER_SLOTS", "Fleet", "Redirect", "Server"]

_log = logging.getLogger(__name__)

_CHANCE: Final = random.Random()
"""Not the module's own, whose sequence may be one that the program has seeded."""
_STALL_SECONDS: Final = 0.1
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 2.0
CLUSTER_SLOTS: Final = 16384


class Server:
    """One Redis server: its idle connections, and whether it is worth trying.

    Args:
        label: how logs and errors name it.
        make: constructs an unconnected wire.
        limit: most connections at a time.
        connect_timeout: seconds for each step of connecting.
    """

    def __init__(self, label: str, make: Callable[[], Wire], limit: int, connect_timeout: float) -> None:
        self.label = label
        self._make = make
        self._limit = limit
        self._connect_timeout = connect_timeout
        self._condition = threading.Condition()
        self._idle: list[Wire] = []
        self._busy = 0
        self._dialing = 0
        self._trouble: str | None = None
        self._closed = False

    @property
    def trouble(self) -> str | None:
        """Why it is down, or None."""
        return self._trouble

    def dial(self) -> Wire:
        """A new connection, made in this thread."""
        wire = self._make()
        try:
            wire.connect(self._connect_timeout)
        except BaseException:
            wire.close()
            raise
        return wire

    def adopt(self, wire: Wire) -> None:
        """Take over a connection made by `dial`."""
        with self._condition:
            self._idle.append(wire)
            self._condition.notify_all()

    def acquire(self, until: float, work: Sized) -> Wire | None:
        """An open connection, waiting for one until then; None once `work` is empty: others did it.

        Raises:
            ColdTierUnavailableError: the server is down.
            TimeoutError: none came free in time.
            ClosedError: the tier was closed.
        """
        with self._condition:
            while True:
                if not work:
                    return None
                if self._closed:
                    raise ClosedError("the cold tier is closed")
                if self._trouble is not None:
                    raise ColdTierUnavailableError(f"{self.label}: {self._trouble}")
                if self._idle:
                    self._busy += 1
                    wire = self._idle.pop()
                    wire.limit(until)
                    return wire
                if self._busy + self._dialing < self._limit:
                    self._start_dialing()
                remaining = until - time.monotonic()
                if remaining <= 0 or not self._condition.wait(remaining):
                    raise TimeoutError(f"{self.label}: no connection within the deadline")

    def release(self, wire: Wire) -> None:
        """Give back a connection whose stream is in step."""
        with self._condition:
            self._busy -= 1
            self._condition.notify_all()
            if not self._closed and self._trouble is None:
                self._idle.append(wire)
                return
        wire.close()

    def discard(self, wire: Wire, *, stale: bool = False) -> None:
        """Give back a connection that broke; `stale` drops the idle ones as well."""
        with self._condition:
            self._busy -= 1
            dropped = [wire]
            if stale:
                dropped += self._idle
                self._idle = []
            self._condition.notify_all()
        for each in dropped:
            each.close()

    def suspect(self, wire: Wire) -> bool:
        """Mark the server down if not a byte moved for a while before the deadline; whether it is so."""
        stalled = wire.idle_seconds >= _STALL_SECONDS
        if stalled:
            self.mark_down(f"did not answer for {wire.idle_seconds:.1f} s")
        return stalled

    def mark_down(self, why: str) -> None:
        """Fail calls at once from now on, and try again in the background until it answers."""
        with self._condition:
            if self._trouble is None and not self._closed:
                _log.warning("cold tier %s is down: %s", self.label, why)
                self._trouble = why
            dropped, self._idle = self._idle, []
            if not self._dialing and not self._closed:
                self._start_dialing()
            self._condition.notify_all()
        for wire in dropped:
            wire.close()

    def _start_dialing(self) -> None:
        self._dialing += 1
        threading.Thread(target=self._dial_until_up, name="kvpager-redis-dial", daemon=True).start()

    def _dial_until_up(self) -> None:
        pause = _FIRST_PAUSE
        again = True
        while True:
            began = time.monotonic()
            try:
                wire = self.dial()
            except CONNECT_ERRORS as error:
                if again and self._trouble is None and time.monotonic() - began < _STALL_SECONDS:
                    again = False  # a server that has just restarted may break one connection off
                    continue
                with self._condition:
                    if self._trouble is None and not self._closed:
                        _log.warning("cold tier %s is down: %s", self.label, describe(error))
                        self._trouble = describe(error)
                    self._condition.notify_all()
                    # One thread is enough to knock at a closed door.
                    if self._dialing > 1 or self._condition.wait_for(
                        lambda: self._closed, pause * _CHANCE.uniform(0.8, 1.2)
                    ):
                        self._dialing -= 1
                        return
                pause = min(pause * 2, _LONGEST_PAUSE)
                continue
            with self._condition:
                self._dialing -= 1
                if not self._closed:
                    if self._trouble is not None:
                        _log.warning("cold tier %s is back", self.label)
                        self._trouble = None
                    self._idle.append(wire)
                    self._condition.notify_all()
                    return
            wire.close()
            return

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless the counts of connections agree."""
        with self._condition:
            open_ = len(self._idle) + self._busy
            if self._busy < 0 or self._dialing < 0 or open_ + self._dialing > self._limit + 1:
                raise IntegrityError(
                    f"{self.label}: {len(self._idle)} idle, {self._busy} busy and {self._dialing} dialing "
                    f"connections of {self._limit}"
                )
            if self._trouble is not None and not self._closed and not self._dialing:
                raise IntegrityError(f"{self.label} is down and nobody tries again")

    def close(self) -> None:
        """Close idle connections; busy ones are closed when they come back."""
        with self._condition:
            self._closed = True
            dropped, self._idle = self._idle, []
            self._condition.notify_all()
        for wire in dropped:
            wire.close()


@dataclass(frozen=True)
class Redirect:
    """Where another server of a Cluster wants a command to go."""

    slot: int
    host: str
    port: int
    ask: bool

    @staticmethod
    def of(error: ReplyError) -> Redirect | None:
        """Read MOVED and ASK replies; None for other errors and for nonsense."""
        words = error.split(" ")
        if words[0] not in ("MOVED", "ASK") or len(words) != 3:
            return None
        host, _, port = words[2].rpartition(":")
        if not (
            words[1].isdecimal() and port.isdecimal() and int(words[1]) < CLUSTER_SLOTS and int(port) < 65536
        ):
            return None
        return Redirect(int(words[1]), host, int(port), words[0] == "ASK")


class Fleet:
    """The servers behind the URL, and which of them holds a key's slot."""

    def __init__(self, address: Address, limit: int, connect_timeout: float) -> None:
        self._address = address
        self._limit = limit
        self._connect_timeout = connect_timeout
        self._lock = threading.Lock()
        self._servers: dict[tuple[str, int], Server] = {}
        self._slots: list[Server | None] = []
        self._stale = address.cluster
        self._asked_at = float("-inf")
        self._closed = False
        self.seed = self._server(address.host, address.port)

    @property
    def clustered(self) -> bool:
        """Whether keys are spread by slot."""
        return self._address.cluster

    def servers(self) -> list[Server]:
        """Every server known."""
        with self._lock:
            return list(self._servers.values())

    def _server(self, host: str, port: int) -> Server:
        with self._lock:
            server = self._servers.get((host, port))
            if server is None:
                address = self._address.at(host, port)
                server = Server(address.label, address.wire, self._limit, self._connect_timeout)
                if self._closed:
                    server.close()
                self._servers[host, port] = server
            return server

    def slot(self, key: bytes) -> int:
        """The key's slot; 0 where there is no Cluster."""
        return key_slot(key) if self._address.cluster else 0

    def server_of(self, slot: int, redirect: Redirect | None = None) -> Server | None:
        """Where to send a key's command; None where no server is known to hold its slot."""
        if redirect is not None and redirect.ask:
            return self._server(redirect.host or self._address.host, redirect.port)
        if not self._address.cluster:
            return self.seed
        return self._slots[slot] if self._slots else None

    def follow(self, redirect: Redirect) -> None:
        """Believe a MOVED reply, and learn the rest of the map soon."""
        server = self._server(redirect.host or self._address.host, redirect.port)
        with self._lock:
            if self._slots:
                self._slots[redirect.slot] = server
            self._stale = True

    def doubt(self) -> None:
        """A server failed: its slots may have moved."""
        self._stale = self._address.cluster

    def refresh(self, until: float) -> None:
        """Ask the servers known for the map, if it is in doubt and was not asked for just now."""
        now = time.monotonic()
        with self._lock:
            if not self._stale or now - self._asked_at < (_FIRST_PAUSE if self._slots else 0.0):
                return
            self._asked_at = now
            candidates = [server for server in self._servers.values() if server.trouble is None]
        _CHANCE.shuffle(candidates)
        for server in candidates:
            try:
                wire = server.acquire(until, ["CLUSTER SLOTS"])
            except (TimeoutError, ColdTierUnavailableError):
                continue
            if wire is None:
                continue
            try:
                self._learn(wire.call(b"CLUSTER", b"SLOTS"))
            except TimeoutError:
                server.discard(wire)
                server.suspect(wire)
            except ColdTierUnavailableError as error:
                server.discard(wire, stale=True)
                _log.warning("cold tier %s: %s", server.label, error)
            else:
                server.release(wire)
                return

    def _learn(self, reply: Reply) -> None:
        if not isinstance(reply, list):
            raise ColdTierUnavailableError(f"answers CLUSTER SLOTS with {reply!r}")
        slots: list[Server | None] = [None] * CLUSTER_SLOTS
        keep = {(self._address.host, self._address.port)}
        for entry in reply:
            match entry:
                # A node that does not know its own name sends none, and means where it was asked.
                case [int(first), int(last), [bytes() | None as host, int(port), *_], *_] if (
                    0 <= first <= last < CLUSTER_SLOTS and 0 < port < 65536
                ):
                    where = ((host or b"").decode("ascii", "replace") or self._address.host, port)
                    keep.add(where)
                    slots[first : last + 1] = [self._server(*where)] * (last + 1 - first)
                case _:
                    raise ColdTierUnavailableError(f"answers CLUSTER SLOTS with {entry!r:.80}")
        with self._lock:
            self._slots = slots
            self._stale = not all(slots)
            gone = [self._servers.pop(where) for where in list(self._servers) if where not in keep]
        for server in gone:
            server.close()

    def close(self) -> None:
        """Close all servers."""
        with self._lock:
            self._closed = True
            servers = list(self._servers.values())
        for server in servers:
            server.close()
