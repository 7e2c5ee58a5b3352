"""The sidecar: one pool of host memory and its cold tier, served to the engines of a host over a Unix socket.

It holds no CUDA context and needs no torch. Only metadata crosses the socket: a client gets the descriptor of
the arena in the handshake, maps it, and reads and writes slots in place. Clients over TCP get no descriptor:
their blocks travel in the frames. `docs/protocol.md` says how.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final

from ..kvstore.events import BlockEvent
from ..kvstore.hashing import HASH_BYTES
from ..kvstore.host import HostStore
from ..tiers.errors import (
    AccessDeniedError,
    ClosedError,
    KVPagerError,
    ProtocolError,
    ServiceUnavailableError,
)
from ..tiers.settings import expect_integer, expect_seconds, expect_type
from .answers import Answers
from .claims import HeldHandles
from .cold_source import ColdSource
from .connection import Connection, Limits, Threads
from .groups import Group, Groups, peer_of
from .listening import ListeningSocket
from .messages import Event, Hello, Welcome
from .purges import Purges
from .remote_access import RemoteAccess
from .remote_door import RemoteDoor
from .service import Service
from .survivors import Survivors, restore_groups
from .wire import MAGIC, MAX_FRAME, VERSION, Failure, Frame, FrameReader, Notice, Reply, Request, encode

__all__ = ["Sidecar"]

_log = logging.getLogger(__name__)

_OLDEST_VERSION: Final = 1
_LENGTH: Final = struct.Struct("<I")
_MOST_HELLO: Final = 4096
"""Bytes of the first frame."""
_NAME_BYTES: Final = 16
_MOST_NAME: Final = 64
"""Characters of what a client calls itself, where it is told."""
_HELLO_SECONDS: Final = 5.0
_ACCEPT_PAUSE: Final = 1.0
"""Seconds without new connections when descriptors have run out."""
_LEAST_FRAME: Final = 4096
_WAITING_THREADS: Final = 64
_WORKING_THREADS: Final = 4
_MOST_EVENTS: Final = 4096
"""Events that wait for the loop."""
_EVENT_HASHES: Final = 1 << 14
"""Of one event's frame; what is more goes in several."""
_EVENT_BYTES: Final = 256
"""Of an event's frame beside them, at most."""
_DRAIN_POLL: Final = 0.01
_LAST_WORD_SECONDS: Final = 0.5
"""For clients to read their last replies."""
_COMMIT_SHARE: Final = 0.5
"""Of the time to drain, for commits that are outstanding; the rest is for the cold tier."""


class Sidecar:
    """Serves a `HostStore` on a Unix socket. Made, started and closed on one event loop.

    The store stays its caller's, who closes it after the sidecar.

    Args:
        host: the store, opened with ``device=None``.
        path: the socket, made with mode 0600; 0666 where other users are allowed, whom their credentials
            then let in.
        allow_uids: users who may connect beside the one that this process runs as.
        max_frame: bytes of the largest frame.
        max_connections: clients at a time.
        limits: what one connection may have under way.
        remote: where clients come in over TCP, and which; None: nowhere.
        cold: where the store's cold tier comes from, and another would; None: nobody needs to know.

    Raises:
        ConfigError: a value is of a wrong type or out of range.
    """

    def __init__(
        self,
        host: HostStore,
        path: str | os.PathLike[str],
        *,
        allow_uids: Collection[int] | None = None,
        max_frame: int = MAX_FRAME,
        max_connections: int = 256,
        limits: Limits | None = None,
        remote: RemoteAccess | None = None,
        cold: ColdSource | None = None,
    ) -> None:
        self._host = expect_type("host", host, HostStore, "a HostStore")
        self._path = path
        self._uids = {os.getuid()} | {expect_integer("allow_uids", uid, 0) for uid in allow_uids or ()}
        max_frame = expect_integer("max_frame", max_frame, _LEAST_FRAME, (1 << 32) - 1)
        self._max_connections = expect_integer("max_connections", max_connections, 1)
        self._limits = limits or Limits()
        self._remote = (
            None if remote is None else expect_type("remote", remote, RemoteAccess, "a RemoteAccess")
        )
        self._door: RemoteDoor | None = None
        source = ColdSource() if cold is None else expect_type("cold", cold, ColdSource, "a ColdSource")
        self._service = Service(host, max_frame, source)
        self.counters = self._service.counters
        self.boot_id = self._service.boot_id
        self._connections: set[Connection] = set()
        self._greetings: set[asyncio.Task[None]] = set()
        self._subscribers: tuple[Connection, ...] = ()
        self._events: deque[BlockEvent] = deque()
        self._events_dropped = 0
        self._events_due = False
        self._listening: ListeningSocket | None = None
        self._accepting = False
        self._ended = False
        self._closed = False
        self._unsubscribe: Callable[[], None] = _nothing
        self._survivors: Survivors | None = None

    @property
    def path(self) -> str:
        """The socket's path."""
        return os.fspath(self._path)

    @property
    def reserved(self) -> int:
        """Slots that clients have reserved and not yet committed."""
        return self._groups.reserved

    @property
    def groups(self) -> int:
        """Client groups that are attached."""
        return len(self._groups)

    @property
    def port(self) -> int | None:
        """The TCP port that is listened on, or None."""
        return None if self._door is None else self._door.port

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the path is another sidecar's, or cannot be listened on.
            ClosedError: it was started before, or the store is closed.
            IntegrityError: the arena's records do not say who holds what of it.
        """
        if self._listening is not None or self._ended:
            raise ClosedError("a sidecar is started once")
        others = self._uids - {os.getuid()}
        self._loop = asyncio.get_running_loop()
        self._threads = Threads(
            ThreadPoolExecutor(_WAITING_THREADS, thread_name_prefix="kvpager-wait"),
            ThreadPoolExecutor(_WORKING_THREADS, thread_name_prefix="kvpager-work"),
        )
        self._unsubscribe = self._host.subscribe(self._hear)
        try:
            self._listening = ListeningSocket(self._path, 0o666 if others else 0o600)
            self._groups = Groups(self._loop, self._give_back, self._host.records)
            self._service.purges = Purges(self._host, self._groups)
            self._survivors = restore_groups(self._groups, self._host, self._loop)
            if self._remote is not None:
                self._door = self._open_door(self._remote)
        except BaseException:
            self._unsubscribe()
            if self._listening is not None:
                self._listening.close()
                self._listening = None
            for pool in (self._threads.waiting, self._threads.working):
                pool.shutdown()
            raise
        self._service.spaces.update(space.id for space in self._host.spaces)
        self._accept_on()

    async def close(self, drain: float = 0.0) -> int:
        """Stop: refuse new clients and reservations, let the others end, remove the socket. Idempotent.

        Who comes meanwhile is told that it is being stopped.

        Args:
            drain: seconds for outstanding commits (half of it at most) and for writing to the cold tier
                what has no copy there.

        Returns:
            how many committed blocks have no copy in the cold tier, where there is one.

        Raises:
            ConfigError: `drain` is no number of seconds.
        """
        drain = expect_seconds("drain", drain)
        if self._listening is None or self._ended:
            return 0
        self._ended = True
        self._service.stopping = True
        left = 0
        try:
            end = self._loop.time() + drain
            commits = self._loop.time() + drain * _COMMIT_SHARE
            while self._groups.reserved and self._loop.time() < commits:
                await asyncio.sleep(_DRAIN_POLL)
            if self._host.cold is not None and drain > 0:
                seconds = max(0.0, end - self._loop.time())
                left = await self._loop.run_in_executor(
                    self._threads.working, lambda: self._host.flush(seconds)
                )
        finally:
            self._unsubscribe()
            self._service.engines.close()
            for connection in tuple(self._connections):
                connection.finish()
            self._groups.close()
            if self._survivors is not None:
                self._survivors.close()
            for pool in (self._threads.waiting, self._threads.working):
                pool.shutdown(wait=False, cancel_futures=True)
            try:
                await self._say_last_words()
            finally:
                self._closed = True
                self._accept_off()
                self._listening.close()
                if self._door is not None:
                    self._door.close()
                for greeting in tuple(self._greetings):
                    greeting.cancel()
                for connection in tuple(self._connections):
                    connection.end()
        return left

    async def _say_last_words(self) -> None:
        """Let clients read their last replies, and who is at the door why it stays shut."""
        until = self._loop.time() + _LAST_WORD_SECONDS
        await asyncio.sleep(0)  # who connected just now is let in to be told
        while self._loop.time() < until and (
            self._connections or self._greetings or (self._door is not None and self._door.greets)
        ):
            await asyncio.sleep(_DRAIN_POLL)

    def remove_socket(self) -> None:
        """Remove the socket's file and nothing else; for who ends the process at once."""
        if self._listening is not None:
            self._listening.close()

    # Connections

    def _accept_on(self) -> None:
        if not self._accepting and not self._closed and self._listening is not None:
            self._accepting = True
            self._loop.add_reader(self._listening.socket.fileno(), self._accept)

    def _accept_off(self) -> None:
        if self._accepting and self._listening is not None:
            self._accepting = False
            self._loop.remove_reader(self._listening.socket.fileno())

    def _accept(self) -> None:
        if self._listening is None:
            return
        try:
            connected, _ = self._listening.socket.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                _log.error("no connection can be taken: %s", error.strerror)
                self._accept_off()
                self._loop.call_later(_ACCEPT_PAUSE, self._accept_on)
            return
        connected.setblocking(False)
        if len(self._greetings) >= self._max_connections:
            self.counters.refused += 1
            crowd = f"{self._max_connections} other clients have not said hello yet"
            with connected, contextlib.suppress(OSError):
                connected.send(encode(Failure(0, ServiceUnavailableError(crowd))))
            return
        greeting = self._loop.create_task(self._greet(connected))
        self._greetings.add(greeting)
        greeting.add_done_callback(self._greetings.discard)

    async def _greet(self, connected: socket.socket) -> None:
        """Read `Hello`, see whether it may come in, and answer; the socket is a `Connection`'s then."""
        accepted = time.clock_gettime(time.CLOCK_BOOTTIME)
        number = 0
        reader = FrameReader(_MOST_HELLO)
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                frame = await self._read_first(connected, reader)
            number = 0 if isinstance(frame, Notice) else frame.id
            version, hello = _hello_of(frame)
            group = self._let_in(connected, accepted, hello)
        except (TimeoutError, OSError):  # it said nothing, or is gone
            self.counters.refused += 1
            connected.close()
            return
        except KVPagerError as error:
            self.counters.refused += 1
            with contextlib.suppress(OSError):
                connected.send(encode(Failure(number or reader.refused, error)))
            connected.close()
            return
        except BaseException:
            connected.close()
            raise
        connection = self._join(group, hello)
        try:
            welcome = self._welcome(number, version, self._host.arena.capacity_bytes)
            if socket.send_fds(connected, [welcome], [self._host.arena.fd]) != len(welcome):
                raise OSError(errno.EAGAIN, "the first reply did not fit the socket")
            await self._loop.connect_accepted_socket(lambda: connection, connected)
            self.counters.connections += 1
        except (OSError, ClosedError):  # the client is gone, or the store
            connected.close()
            self._forget(connection, group)

    def _open_door(self, remote: RemoteAccess) -> RemoteDoor:
        def admit(number: int, version: int, hello: Hello, transport: asyncio.Transport) -> None:
            self._check_room(sum(one.remote for one in self._connections), remote.max_clients)
            tenants = remote.tenants_of(hello.token)
            group = self._groups.attach_remote(hello.group, hello.client)
            connection = self._join(group, hello, tenants)
            # No descriptor goes this way: 0 bytes of arena.
            transport.write(self._welcome(number, version, 0))
            transport.set_protocol(connection)
            connection.connection_made(transport)
            transport.resume_reading()
            self.counters.connections += 1

        def refused() -> None:
            self.counters.refused += 1

        return RemoteDoor(remote, _HELLO_SECONDS, _MOST_HELLO, _hello_of, admit, refused)

    def _check_room(self, clients: int, most: int) -> None:
        if self._ended:
            raise ServiceUnavailableError("the sidecar is being stopped")
        if clients >= most:
            raise ServiceUnavailableError(f"the sidecar has {most} clients, and takes no more")

    def _join(self, group: Group, hello: Hello, tenants: frozenset[str] | None = None) -> Connection:
        """A connection of a group, which is not made yet.

        Args:
            tenants: those whose spaces it may open, and whose events it hears; None: all.
        """
        remote, client = group.uid is None, hello.client
        connection = Connection(
            self._service,
            lambda made: self._answers(made, group, client, tenants),
            self._threads,
            self._limits,
            lambda made: self._forget(made, group),
            remote=remote,
            tenants=tenants,
        )
        self._connections.add(connection)
        group.join(connection, client, hello.name[:_MOST_NAME])
        self._service.engines.come(connection, partial(group.called, client), partial(_about, group, client))
        return connection

    def _welcome(self, number: int, version: int, arena_bytes: int) -> bytes:
        lengths = arena_bytes, self._host.arena.extent_bytes, self._service.max_frame
        return encode(Reply(number, Welcome(version, self.boot_id, *lengths)))

    async def _read_first(self, connected: socket.socket, reader: FrameReader) -> Frame:
        head = await self._read_exactly(connected, _LENGTH.size)
        (length,) = _LENGTH.unpack(head)
        if length > _MOST_HELLO:
            raise ProtocolError(f"the first frame has {length} bytes, a Hello {_MOST_HELLO} at most")
        (frame,) = reader.feed(head + await self._read_exactly(connected, length))
        return frame

    async def _read_exactly(self, connected: socket.socket, length: int) -> bytes:
        data = b""
        while len(data) < length:
            part = await self._loop.sock_recv(connected, length - len(data))
            if not part:
                raise ConnectionResetError("closed in the first frame")
            data += part
        return data

    def _let_in(self, connected: socket.socket, accepted: float, hello: Hello) -> Group:
        local = sum(not one.remote for one in self._connections)
        self._check_room(local, self._max_connections)
        peer = peer_of(connected, accepted)
        if peer.uid not in self._uids:
            os.close(peer.pidfd)
            raise AccessDeniedError(f"user {peer.uid} is not allowed in")
        return self._groups.attach(hello.group, peer)

    def _answers(
        self, connection: Connection, group: Group, client: bytes, tenants: frozenset[str] | None
    ) -> Answers:
        def subscribe(on: bool) -> None:
            others = tuple(one for one in self._subscribers if one is not connection)
            self._subscribers = (*others, connection) if on else others

        return Answers(self._service, group, client, subscribe, self._counts, tenants, connection)

    def _forget(self, connection: Connection, group: Group) -> None:
        """A connection is over."""
        self._connections.discard(connection)
        self._service.engines.go(connection)
        self._subscribers = tuple(one for one in self._subscribers if one is not connection)
        self._groups.leave(group, connection)

    def _counts(self) -> dict[str, int]:
        return {
            "clients": len(self._connections),
            "remote": sum(one.remote for one in self._connections),
            "groups": len(self._groups),
            "leased": self._groups.leased,
            "reserved": self._groups.reserved,
            "spaces": len(self._service.spaces),
        }

    def _give_back(self, held: Sequence[HeldHandles]) -> None:
        """What a group held that has ended goes back to the store, in another thread."""

        def work() -> None:
            for one in held:
                try:
                    one.give_back()
                except ClosedError:
                    return  # it ended with the store
                except KVPagerError:
                    _log.exception("what a client group held could not be given back whole")

        # Once the pool is shut down the store is about to close.
        with contextlib.suppress(RuntimeError):
            self._threads.working.submit(work)

    # Events

    def _hear(self, event: BlockEvent) -> None:
        """In the thread where it happens."""
        if not self._subscribers:
            return
        if len(self._events) >= _MOST_EVENTS:
            self._events_dropped += 1
            return
        self._events.append(event)
        if not self._events_due:
            self._events_due = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._send_events)

    def _send_events(self) -> None:
        self._events_due = False
        dropped, self._events_dropped = self._events_dropped, 0
        most = min(_EVENT_HASHES, (self._service.max_frame - _EVENT_BYTES) // HASH_BYTES)
        while self._events:
            event = self._events.popleft()
            for start in range(0, len(event.hashes), most):
                part = replace(event, hashes=event.hashes[start : start + most])
                # Made once for all who missed as many before it.
                frame = cache(partial(_event_frame, part, self._service.max_frame))
                for connection in self._subscribers:
                    if connection.tenants is None or self._host.tenant_of(event.space) in connection.tenants:
                        connection.send_event(frame)
        if dropped:
            for connection in self._subscribers:
                connection.lose_events(dropped)


def _nothing() -> None:
    """What ends a subscription that was not begun."""


def _about(group: Group, client: bytes) -> dict[str, Any]:
    """What operators are told of a client beside its name and report."""
    leased, reserved = group.held_by(client)
    return {
        "remote": group.uid is None,
        "group": group.id[-16:].hex(),
        "leased": leased,
        "reserved": reserved,
    }


def _event_frame(event: BlockEvent, max_frame: int, lost: int) -> bytes:
    message = Event(event.kind.value, event.tier, event.space, event.hashes, lost)
    return encode(Notice(message), max_frame=max_frame)


def _hello_of(frame: Frame) -> tuple[int, Hello]:
    """The version to speak, and the client's `Hello`."""
    if not isinstance(frame, Request) or not isinstance(frame.message, Hello):
        raise ProtocolError("the first frame of a client is a Hello")
    hello = frame.message
    if hello.magic != MAGIC:
        raise ProtocolError("the client does not say that it speaks kvpager's protocol")
    for what, name in (("client group", hello.group), ("client", hello.client)):
        if len(name) != _NAME_BYTES:
            raise ProtocolError(f"a {what} has a name of {_NAME_BYTES} bytes, got {len(name)}")
    version = min(VERSION, hello.newest)
    if version < max(_OLDEST_VERSION, hello.oldest):
        raise ProtocolError(
            f"the client speaks versions {hello.oldest} to {hello.newest} of the protocol, "
            f"the sidecar {_OLDEST_VERSION} to {VERSION}"
        )
    return version, hello
