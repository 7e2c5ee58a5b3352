"""The client: `connect` and `Connection`, for callers that wait. One thread reads, any thread may call.

What is asked and held is `ClientCore`'s business; here are the lock, the thread, and the bytes.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Generic, TypeVar, cast

from ..kvstore.calls import LostListener
from ..kvstore.control import EngineReport
from ..kvstore.events import EventStream, Listener
from ..kvstore.tenants import check_tenant
from ..tiers.errors import (
    ClosedError,
    KVPagerError,
    ServiceError,
    ServiceUnavailableError,
)
from ..tiers.layout import KVLayout
from ..tiers.mover import HostMover
from ..tiers.settings import expect_flag, expect_seconds, expect_type
from .client_calls import Ask, Call
from .client_commands import CommandListener, CommandListeners, clients_ask, command_ask, report_of
from .client_core import ClientCounters, GivenCommand
from .client_operators import status_ask
from .client_shell import (
    READ_BYTES,
    REFUSALS,
    Backoff,
    Subscriptions,
    core_of,
    flush_ask,
    follow_arena,
    purge_tenant_ask,
    read_socket,
    stats_ask,
    tell_lost,
    why_not_reached,
)
from .client_space import AbsentArena, ClientSpace, Lost
from .device_maps import DeviceMaps
from .endpoint import Endpoint, endpoint_of
from .forks import WAS_CLOSED, close_in_children
from .holdings import Handles
from .inline_asks import Steps
from .inline_space import InlineSpace
from .messages import Purged
from .read_turns import ReadTurns
from .remote_space import RemoteSpace

__all__ = ["Connection", "connect"]

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_LAST_WORDS_SECONDS: Final = 0.5
"""How long a connection that is closed waits for the sidecar to take what it still has to say."""


def connect(
    url: str | os.PathLike[str],
    *,
    name: str | None = None,
    group: bytes | None = None,
    timeout: float = 1.0,
    strict: bool = False,
    on_lost: Callable[[Lost], None] | None = None,
    token: str | None = None,
    ca: str | os.PathLike[str] | None = None,
    tenant: str = "",
) -> Connection:
    """Connect to a sidecar (``kvpager serve``).

    Args:
        url: ``unix:///path``, or the path of its socket; ``kvpager://host:port``, or ``kvpagers://host:port``
            with TLS, where blocks are copied over the network.
        name: what an operator calls this client; None: by its process.
        group: 16 bytes that the processes of one engine share, see `Connection`; None: a group of its own.
        timeout: seconds that the sidecar may take to answer, beyond what a call itself waits for.
        strict: raise `ServiceUnavailableError` where the sidecar does not answer, rather than find nothing;
            not in the steps of an engine, which go on.
        on_lost: is told, in the connection's thread, of leases and reservations that are lost.
        token: what a sidecar that is reached over TCP wants to be told.
        ca: file of the authorities whose certificates are trusted, PEM; None: those of the system.
        tenant: whose the blocks of spaces are that do not say it themselves; quotas go by it.

    Raises:
        ConfigError: an argument is of a wrong type or out of range.
        ServiceUnavailableError: there is no sidecar within `timeout`, whether `strict` or not.
        AccessDeniedError: it does not let this client in.
        ProtocolError: it speaks another version, or is no sidecar.
        TLSError: its certificate is not trusted, or only one side speaks TLS.
    """
    connection = Connection(
        url,
        name=name,
        group=group,
        timeout=timeout,
        strict=strict,
        on_lost=on_lost,
        token=token,
        ca=ca,
        tenant=tenant,
    )
    try:
        connection.wait_ready()
    except BaseException:
        connection.close()
        raise
    return connection


class _Pending(Generic[_T]):
    """A request that was made and is not waited for yet."""

    def __init__(self, connection: Connection, call: Call[_T], answered: threading.Lock) -> None:
        self._connection = connection
        self._call = call
        self._answered = answered

    def result(self, seconds: float) -> _T | None:
        """What became of it; None where that is not known after so many seconds."""
        if not self._call.done and self._answered.acquire(timeout=seconds):
            self._answered.release()
        return self._connection.outcome(self._call) if self._call.done else None

    def abandon(self) -> None:
        """Nobody wants the result, now or later: it is given back."""
        self._connection.abandon(self._call)


class Connection:
    """A sidecar's memory and cold tier, used like a `HostStore`. From `connect`; a context manager.

    Leases and reservations are the client *group*'s: of every process that connected with the same 16 bytes.
    They end when they are released, or when all these processes are gone; not with a connection. A connection
    that breaks is made again in the background; what is held is then asserted again, and what is not held any
    more is `lost`. Meanwhile calls find and keep nothing, at once.

    Over TCP the memory is not here: spaces are `InlineSpace`, whose leases and reservations have copies of
    their blocks, and end in the sidecar with the connection.

    Attributes:
        device: the GPU that the memory is mapped for (`map_device`), or None.
        timeout, strict, tenant: as given to `connect`.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        name: str | None = None,
        group: bytes | None = None,
        timeout: float = 1.0,
        strict: bool = False,
        on_lost: Callable[[Lost], None] | None = None,
        token: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        tenant: str = "",
    ) -> None:
        self._endpoint: Endpoint = endpoint_of(url, token, ca)
        self.tenant = check_tenant("tenant", tenant)
        self.timeout = expect_seconds("timeout", timeout, above=True)
        self.strict = expect_flag("strict", strict)
        self.core = core_of(self._endpoint, name, group, on_lost)
        self._maps = DeviceMaps()
        self.mover = HostMover()
        self._on_lost = on_lost
        self._losers: list[LostListener] = []
        self._events = EventStream()
        self._subscriptions = Subscriptions(self._events, self._listen)
        self._commands = CommandListeners(self._answer_command)
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._sending = threading.Lock()
        self._spaces: dict[ClientSpace, RemoteSpace] = {}
        """Made with `_opening` held."""
        self._socket: socket.socket | None = None
        self._changed = threading.Condition(self._lock)
        self._turns = ReadTurns(self._changed)
        self._place = memoryview(bytearray(READ_BYTES))
        """Where whoever reads puts what came."""
        self._broken: KVPagerError | None = None
        """Why a caller found the connection of no use any more."""
        self._refused: KVPagerError | None = None
        self._closing = threading.Event()
        self._why_closed = WAS_CLOSED
        close_in_children(self)
        self._thread = threading.Thread(target=self._run, name="kvpager-client", daemon=True)
        self._thread.start()

    # Like a HostStore

    def space(self, layout: KVLayout, *, shard: str = "", tenant: str | None = None) -> RemoteSpace:
        """The space of `layout` and `shard`; the same object for equal ones.

        Args:
            tenant: whose the blocks are: no other tenant finds them. None: the connection's.

        Raises:
            ConfigError: a block does not fit an extent, or an argument is of a wrong type.
            ClosedError: the connection was closed.
        """
        expect_type("layout", layout, KVLayout, "a KVLayout")
        tenant = self.tenant if tenant is None else check_tenant("tenant", tenant)
        with self._opening:
            with self._lock:
                self.check_open()
                space, is_new = self.core.space(layout, shard, tenant)
                opening = self.core.opening(space)
            if is_new:
                try:
                    self.ask(opening)
                except KVPagerError:
                    with self._lock:
                        self.core.forget(space)
                    raise
            made = self._spaces.get(space)
            if made is None:
                made = self._spaces[space] = (InlineSpace if space.inline else RemoteSpace)(self, space)
            return made

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener`, in the connection's thread, with every later event; returns how to end it.

        Raises:
            ConfigError: it cannot be called.
            ClosedError: the connection was closed.
        """
        self.check_open()
        return self._subscriptions.add(listener)

    def subscribe_lost(self, listener: LostListener) -> Callable[[], None]:
        """Call `listener`, in the connection's thread, with leases that the sidecar does not have any more
        though its memory is the same: their slots may hold other blocks. Returns how to end it.

        For a `TieredStore`; `on_lost` of `connect` is told of all that is lost. It may only take note: no
        call of the connection goes on meanwhile.
        """
        self._losers.append(listener)

        def end() -> None:
            with suppress(ValueError):  # ended before
                self._losers.remove(listener)

        return end

    def flush(self, deadline: float = 30.0) -> int:
        """Have the sidecar write what its cold tier has no copy of; how many blocks still have none.

        Raises:
            ServiceUnavailableError: it does not answer. This is no call of the serving path.
        """
        return self.ask(flush_ask(deadline))

    def purge_tenant(self, tenant: str, deadline: float = 30.0) -> Purged:
        """Have all of a tenant be gone from host memory and the cold tier, in all its spaces.

        What somebody holds is found by nobody from then on and goes when he lets go of it; `Purged.left` says
        who. Blocks in an engine's own device memory are the engine's business.

        Args:
            deadline: seconds that the cold tier may take.

        Raises:
            AccessDeniedError: the token is not one of this tenant.
            ServiceUnavailableError: the sidecar does not answer.
        """
        return self.ask(purge_tenant_ask(tenant, deadline))

    def stats(self) -> dict[str, Any]:
        """The sidecar's counters.

        Raises:
            ServiceUnavailableError: it does not answer. This is no call of the serving path.
        """
        return self.ask(stats_ask())

    def status(self) -> dict[str, Any]:
        """How the sidecar is: the map of `Status` in docs/protocol.md.

        Raises:
            AccessDeniedError: the token is one of tenants.
            ServiceUnavailableError: the sidecar does not answer.
        """
        return self.ask(status_ask())

    def clients(self) -> dict[str, Any]:
        """Who is connected, for operators: a map for each, with its ``name``, what it holds, its ``report``.

        Raises:
            AccessDeniedError: the token is one of tenants.
            ServiceUnavailableError: the sidecar does not answer.
        """
        return self.ask(clients_ask())

    def command(
        self, kind: str, session: str, *, hashes: Sequence[bytes] = (), deadline: float = 10.0
    ) -> int:
        """Have the engine that holds a session do something with it, and wait for its answer.

        Args:
            kind: ``sleep``, ``wake`` or ``promote``.
            session: its id, as the engine reports it.
            hashes: of ``promote``: these of its blocks; none: all.
            deadline: seconds that the engine may take.

        Returns:
            how many blocks the engine says it was done to.

        Raises:
            CommandError: no engine holds the session, it refused, went away, or did not answer in time.
            AccessDeniedError: the token is one of tenants.
            ServiceUnavailableError: the sidecar does not answer.
        """
        return self.ask(command_ask(kind, session, hashes, deadline))

    def report(self, report: EngineReport) -> None:
        """Say how this engine is, for operators. Does not wait.

        The last report is kept until the connection ends, and is said again on later ones.

        Raises:
            ConfigError: it is no `EngineReport`.
            ClosedError: the connection was closed.
        """
        message = report_of(report)
        with self._lock:
            self.check_open()
            self.core.report(message)
            self._write()

    def on_command(self, listener: CommandListener) -> Callable[[], None]:
        """Call `listener`, in the connection's thread, with every command; returns how to end it.

        A command comes for a session of the last report. It is answered by its `done` or `refuse`, from any
        thread; the listener itself must not wait for the sidecar. There is one listener at a time.

        Raises:
            ConfigError: it cannot be called.
            ClosedError: the connection was closed.
        """
        self.check_open()
        return self._commands.listen(listener)

    def map_device(self, device: str | None = None) -> None:
        """Have the sidecar's memory page-locked and mapped for a GPU of this process, in the background.

        From then on `device` names it, and a space's `readable_in_place` says which slots it may read and
        write: at their `addresses` plus `device_delta`. Extents follow as the sidecar makes them, 0.5 s a
        GiB; memory that takes the place of a lost sidecar's is mapped likewise. It ends with `close`, before
        which no copy or kernel may still be using it.

        Args:
            device: ``cuda`` or ``cuda:N``; None: ``cuda:0``.

        Raises:
            ConfigError: no CUDA driver answers, cuda-python is not installed, ``device`` is no GPU, or the
                memory is mapped for another one.
            KVPagerError: there is no such GPU.
            NotInPlaceError: the sidecar was reached over TCP.
            ClosedError: the connection was closed.
        """
        self.check_open()
        self._maps.map(self.core.arena, device)

    def close(self, *, drain: float = 0.0) -> None:
        """Release what is held and end the connection. Idempotent. The sidecar goes on.

        Views of blocks stay readable, but what they show may change from here on.

        Args:
            drain: seconds that the sidecar may take to write to its cold tier first.
        """
        drain = expect_seconds("drain", drain)
        if self.closed:
            return
        if drain:
            try:
                self.flush(drain)
            except ServiceError as error:
                _log.warning("closed without a flush: %s", error)
        with self._lock:
            self.core.release_all()
            self._closing.set()
            self._write()
            self._turns.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._maps.close()
        self.mover.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # How it is

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or this is a forked child, where it is the parent's."""
        return self._closing.is_set()

    @property
    def device(self) -> str | None:
        """The GPU that the memory is mapped for, ``cuda:N``; None before `map_device`."""
        return self._maps.device

    @property
    def in_place(self) -> bool:
        """Whether the sidecar's memory is in this process; over TCP it is not."""
        return not isinstance(self.core.arena, AbsentArena)

    @property
    def ready(self) -> bool:
        """Whether the sidecar can be asked."""
        return self.core.ready

    @property
    def event_gaps(self) -> int:
        """Grows where events may have been missed: a connection ended or began, or some were dropped."""
        return self.core.epoch + self.core.counters.events_lost

    @property
    def stalled(self) -> bool:
        """Whether the sidecar did not answer in time, and nothing was heard of it since."""
        return self.core.stalled

    @property
    def lost(self) -> tuple[Lost, ...]:
        """What was held before the last connection and is not any more."""
        with self._lock:
            return self.core.lost

    @property
    def boot_id(self) -> bytes | None:
        """16 bytes, others after each start of the sidecar; None before the first connection."""
        return self.core.boot_id

    @property
    def counters(self) -> ClientCounters:
        """What this connection saw."""
        return self.core.counters

    def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until the sidecar can be asked.

        Args:
            timeout: seconds; None: the connection's.

        Raises:
            ServiceUnavailableError: it cannot in that time.
            AccessDeniedError, ProtocolError: it refuses.
        """
        seconds = self.timeout if timeout is None else expect_seconds("timeout", timeout)
        with self._changed:
            self._changed.wait_for(
                lambda: self.core.ready or self._refused is not None or self.closed, seconds
            )
            self.check_open()
            if not self.core.ready:
                raise self._refused or self.core.unavailable

    # For its spaces

    def check_open(self) -> None:
        """Raise `ClosedError` after `close`, and in a forked child."""
        if self._closing.is_set():
            raise ClosedError(self._why_closed)

    def ask(self, ask: Ask[_T]) -> _T:
        """Make a request and wait for what becomes of it."""
        answered = threading.Lock()
        answered.acquire()
        call = self._start(ask, answered.release)
        try:
            self._await(call, answered)
        except BaseException:
            self.abandon(call)
            raise
        return self.outcome(call)

    def ask_all(self, asks: Sequence[Ask[_T]]) -> list[_T]:
        """Make several requests at once and wait for what becomes of each."""
        answered = [threading.Lock() for _ in asks]
        calls: list[Call[_T]] = []
        try:
            for ask, lock in zip(asks, answered, strict=True):
                lock.acquire()
                calls.append(self._start(ask, lock.release))
            for call, lock in zip(calls, answered, strict=True):
                self._await(call, lock)
        except BaseException:
            for call in calls:
                self.abandon(call)
            raise
        results: list[_T] = []
        for at, call in enumerate(calls):
            try:
                results.append(self.outcome(call))
            except BaseException:
                for other in calls[:at] + calls[at + 1 :]:
                    self.abandon(other)
                raise
        return results

    def _await(self, call: Call[_T], answered: threading.Lock) -> None:
        """Wait until a call is done, or was waited for long enough; read, if nobody else does."""
        until = time.monotonic() + (0.0 if self.core.stalled else call.ask.seconds + self.timeout)
        if call.ask.until is not None:
            until = min(until, call.ask.until)
        with self._lock:
            if call.done:
                return
            connected = self._turns.come()
        try:
            if connected is not None:
                try:
                    self._read_for(connected, call, until)
                finally:
                    with self._lock:
                        self._turns.end()
            if not call.done:
                answered.acquire(timeout=max(0.0, until - time.monotonic()))
        finally:
            with self._lock:
                self._turns.leave()
        if not call.done:
            with self._lock:
                self.core.time_out(call)

    def _read_for(self, connected: socket.socket, call: Call[Any], until: float) -> None:
        """Read until a call is done. What is for the connection's thread is left to it."""
        taken = False
        try:
            while not call.done and (left := until - time.monotonic()) > 0:
                if not self._turns.readable(left):
                    continue
                taken = True
                with suppress(BlockingIOError):
                    came = read_socket(connected, self.core.room, self._place)
                    with self._lock:
                        self._received(came, [])
                        if self.core.has_news:
                            self._turns.wake()
                taken = False
        except OSError as error:
            self._break(why_not_reached(self._endpoint, error))
        except KVPagerError as error:
            self._break(error)
        except BaseException:
            if taken:  # what came may be lost
                self._break(ServiceUnavailableError("a caller was interrupted while it read"))
            raise

    def _break(self, reason: KVPagerError) -> None:
        """Have the thread end the connection."""
        with self._lock:
            self._broken = reason
            self._turns.wake()

    def begin(self, ask: Ask[_T]) -> _Pending[_T]:
        """Make a request without waiting."""
        answered = threading.Lock()
        answered.acquire()
        return _Pending(self, self._start(ask, answered.release), answered)

    def outcome(self, call: Call[_T]) -> _T:
        """The result of a call that is done."""
        if call.error is None:
            return cast(_T, call.result)
        with self._lock:
            return self.core.without_answer(call, strict=self.strict)

    def abandon(self, call: Call[Any]) -> None:
        """Nobody wants the result of a call, now or later."""
        with self._lock:
            call.abandon()
            self._write()

    def release(self, space: ClientSpace, handles: Handles) -> int:
        """End leases; returns how many were not held."""
        with self._lock:
            self.check_open()
            refused = self.core.release(space, handles)
            self._write()
        return refused

    def abort(self, space: ClientSpace, handles: Handles) -> int:
        """Reserved slots will not be written; returns how many were not reserved."""
        with self._lock:
            self.check_open()
            refused = self.core.abort(space, handles)
            self._write()
        return refused

    def commit(
        self, space: ClientSpace, handles: Handles, *, lenient: bool = False, until: float | None = None
    ) -> int:
        """Reserved slots are written, see `Ask.until`; returns how many were not reserved."""
        with self._lock:
            self.check_open()
            written, refused = self.core.start_commit(space, handles)
        if len(written):
            ask = self.core.committing(space, written, lenient=lenient)
            self.ask(ask if until is None else replace(ask, until=until))
        return refused

    def start_commit(self, space: ClientSpace, handles: Handles) -> tuple[Handles, int]:
        """Those of these that are reserved, to be committed now, and how many are not."""
        with self._lock:
            self.check_open()
            return self.core.start_commit(space, handles)

    def give_up(self, space: ClientSpace, handles: Handles) -> None:
        """Reserved slots will not be written, as far as they are not committed yet."""
        with self._lock:
            self.core.give_up(space, handles)
            self._write()

    def drive(self, steps: Steps[_T]) -> _T:
        """Make an operation's requests and return its result."""
        try:
            asks = next(steps)
            while True:
                try:
                    # What waits to be sent is bounded: see `ClientCore.overflowing`.
                    with self._sending if any(ask.sends for ask in asks) else nullcontext():
                        results = self.ask_all(asks)
                except BaseException as error:  # noqa: BLE001  the operation ends with it
                    asks = steps.throw(error)
                else:
                    asks = steps.send(results)
        except StopIteration as end:
            return cast(_T, end.value)

    def leave_to(self, why: str) -> None:
        """In a forked child: it is the parent's, and closed here. See `close_in_children`."""
        # Threads that are not here may have had them.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._opening, self._sending = threading.Lock(), threading.Lock()
        if self._closing.is_set():
            return
        self._why_closed = why
        self._closing = threading.Event()
        self._closing.set()
        self.core.ready = False
        connected, self._socket = self._socket, None
        if connected is not None:
            connected.close()  # this process's descriptor of it
        self._turns.close()

    # Inside

    def _answer_command(self, given: GivenCommand, count: int, problem: str) -> None:
        with self._lock:
            if not self.closed:
                self.core.answer_command(given, count, problem)
                self._write()

    def _start(self, ask: Ask[_T], notify: Callable[[], object]) -> Call[_T]:
        frame = self.core.frame_of(ask)
        with self._lock:
            self.check_open()
            call = self.core.start(ask, frame, notify)
            self._write()
        return call

    def _listen(self, on: bool) -> None:
        with self._lock:
            if not self.closed:
                self.core.subscribe(on)
                self._write()

    def _write(self) -> None:
        """Write what the socket takes; the thread writes the rest. With the lock held."""
        connected = self._socket
        while connected is not None and (data := self.core.take_output()):
            try:
                sent = connected.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # the thread finds out by itself
            if sent < len(data):
                self.core.return_output(memoryview(data)[sent:])
                self._turns.wake()
                return

    # In the thread

    def _run(self) -> None:
        backoff = Backoff()
        while not self._closing.is_set():
            reason = self._connect_and_serve(backoff)
            with self._lock:
                self.core.disconnected(reason)
                if isinstance(reason, REFUSALS):
                    self._refused = reason
                self._changed.notify_all()
            self._closing.wait(backoff.seconds())
        with self._changed:
            self._changed.notify_all()
            self._turns.close()

    def _connect_and_serve(self, backoff: Backoff) -> KVPagerError:
        """One connection from its beginning to its end; returns why it ended."""
        fds: list[int] = []
        try:
            connected = self._connected()
        except OSError as error:
            return why_not_reached(self._endpoint, error)
        with connected:
            try:
                with self._lock:
                    self._socket = connected
                    self._broken = None
                    self._turns.attach(connected)
                    self.core.connected(self._endpoint.tls())
                    self._write()
                self._serve(connected, fds, backoff)
            except OSError as error:
                return why_not_reached(self._endpoint, error)
            except KVPagerError as error:
                return error
            finally:
                with self._lock:
                    self._socket = None
                    self._turns.detach()
                for fd in fds:
                    os.close(fd)
        return ServiceUnavailableError("the connection was closed")

    def _connected(self) -> socket.socket:
        """A socket that is connected to the first address of the sidecar that answers.

        Raises:
            OSError: none does within the time of a call.
        """
        until = time.monotonic() + self.timeout
        addresses = self._endpoint.addresses()
        for at, (family, address) in enumerate(addresses):
            connected = self._endpoint.socket(family)
            try:
                if self._endpoint.local:
                    connected.connect(address)
                else:
                    connected.settimeout(max(0.001, (until - time.monotonic()) / (len(addresses) - at)))
                    connected.connect(address)
                    connected.setblocking(False)
                return connected
            except BaseException as error:
                connected.close()
                if not isinstance(error, OSError) or at == len(addresses) - 1:
                    raise
        raise ConnectionRefusedError(errno.ECONNREFUSED, "the host has no address")

    def _serve(self, connected: socket.socket, fds: list[int], backoff: Backoff) -> None:
        until = time.monotonic() + self.timeout
        last = None
        while True:
            with self._lock:
                self._write()
                writing = self.core.has_output
                ready = self.core.ready
                if self._broken is not None:
                    raise self._broken
                if self.core.overflowing:
                    raise ServiceUnavailableError("the sidecar does not read what it is sent")
                wait = self._turns.look(writing=writing)
            if self._closing.is_set():
                last = last or time.monotonic() + _LAST_WORDS_SECONDS
                if not writing or time.monotonic() > last:
                    return
            if ready:
                backoff.reset()
            elif last is None and time.monotonic() > until:
                raise ServiceUnavailableError(f"{self._endpoint}: no greeting in time")
            if last is not None or not ready:
                left = max(0.0, (until if last is None else last) - time.monotonic())
                wait = left if wait is None else min(wait, left)
            # Where memory is mapped for a GPU it is seen to at every look, see `follow_arena`.
            if self._turns.wait(wait) or self.core.has_news or self._maps.device is not None:
                self._read(connected, fds)

    def _read(self, connected: socket.socket, fds: list[int]) -> None:
        """Read what there is, unless a caller does, and tell the news, whoever read it."""
        with self._lock:
            reads = self._turns.begin()
        try:
            came = None
            if reads:
                with suppress(BlockingIOError):
                    came = read_socket(connected, self.core.room, self._place, fds)
            with self._lock:
                if came is not None:
                    self._received(came, fds)
                news = self.core.take_news()
                arena = self.core.arena
                used = self.core.arenas_in_use() if self._maps.device is not None else []
        finally:
            if reads:
                with self._lock:
                    self._turns.end()
        follow_arena(self._maps, arena, used)
        for event in news.events:
            self._events.emit(event.kind, event.tier, event.space, event.hashes)
        for lost in news.losses:
            tell_lost(lost, self._on_lost)
        self._commands.tell(news.commands)

    def _received(self, came: memoryview | int, fds: list[int]) -> None:
        was_ready = self.core.ready
        if isinstance(came, int):
            self.core.filled(came)
        else:
            self.core.received(came, fds)
        # Before any other call can be made: slots may come to be leased again, with other blocks.
        for lost in self.core.new_losses:
            for listener in () if lost.readable else tuple(self._losers):
                listener(lost.space, lost.leased.slots, lost.leased.generations)
        while fds and self.core.ready:
            os.close(fds.pop())
        if self.core.ready and not was_ready:
            self._refused = None
            self._changed.notify_all()
