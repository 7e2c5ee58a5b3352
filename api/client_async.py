"""The client for asyncio: `connect_async`, over the same core, requests and books as `api/client.py`."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ..kvstore.control import EngineReport
from ..kvstore.events import EventStream, Listener
from ..kvstore.handles import Generations, Lease, Reservation
from ..kvstore.hashing import HASH_BYTES, Tokens
from ..kvstore.lineage import CHAIN_START, ChainPlace, Lineage
from ..kvstore.policy import Ids, Retention
from ..kvstore.session import session_key
from ..kvstore.slot_space import SlotPlaces
from ..kvstore.tenants import check_tenant
from ..tiers.errors import (
    ClosedError,
    ConfigError,
    KVPagerError,
    ServiceUnavailableError,
    StaleHandleError,
)
from ..tiers.layout import KVLayout
from ..tiers.mover import HostMover
from ..tiers.settings import (
    expect_byte_strings,
    expect_bytes,
    expect_flag,
    expect_seconds,
    expect_text,
    expect_type,
)
from .client_calls import Ask, Call
from .client_commands import CommandListener, CommandListeners, clients_ask, command_ask, report_of
from .client_core import ClientCounters, GivenCommand
from .client_operators import AsyncOperatorCalls
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
from .client_space import AbsentArena, ClientSpace, Lost, device_delta, not_here, readable_in_place
from .copies import BufferedReservation, CopiedLease, fill_buffer, read_copies, rows_of
from .device_maps import DeviceMaps
from .endpoint import Endpoint, endpoint_of
from .forks import WAS_CLOSED, close_in_children
from .holdings import Handles
from .inline_asks import InlineAsks, Steps
from .messages import Purged
from .space_asks import SpaceAsks, handles_of, session_blocks

__all__ = ["AsyncConnection", "AsyncSpace", "connect_async"]

_T = TypeVar("_T")


async def connect_async(
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
) -> AsyncConnection:
    """`connect` for asyncio: arguments and errors are the same. To be used on the loop that it ran on."""
    connection = AsyncConnection(
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
        await connection.wait_ready()
    except BaseException:
        await connection.close()
        raise
    return connection


class AsyncConnection(AsyncOperatorCalls):
    """A sidecar's memory and cold tier, for one event loop. From `connect_async`; an async context manager.

    What is said of `Connection` holds here.

    Attributes:
        core: what is asked and held.
        strict, timeout, tenant: as given to `connect_async`.
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
        self.closed = False
        self._why_closed = WAS_CLOSED
        self._on_lost = on_lost
        self._place = memoryview(bytearray(READ_BYTES))
        self._events = EventStream()
        self._subscriptions = Subscriptions(self._events, self._listen)
        self._commands = CommandListeners(self._answer_command)
        self._opening = asyncio.Lock()
        self._sending = asyncio.Lock()
        self._spaces: dict[ClientSpace, AsyncSpace] = {}
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._writing = False
        self._changed = asyncio.Event()
        self._ended: asyncio.Future[KVPagerError] | None = None
        self._refused: KVPagerError | None = None
        close_in_children(self)
        self._task = self._loop.create_task(self._run())

    async def space(self, layout: KVLayout, *, shard: str = "", tenant: str | None = None) -> AsyncSpace:
        """The space of `layout` and `shard`. See `Connection.space`."""
        expect_type("layout", layout, KVLayout, "a KVLayout")
        tenant = self.tenant if tenant is None else check_tenant("tenant", tenant)
        async with self._opening:
            self.check_open()
            space, is_new = self.core.space(layout, shard, tenant)
            if is_new:
                try:
                    await self.ask(self.core.opening(space))
                except KVPagerError:
                    self.core.forget(space)
                    raise
            made = self._spaces.get(space)
            if made is None:
                made = self._spaces[space] = (AsyncInlineSpace if space.inline else AsyncSpace)(self, space)
            return made

    async def find_space(self, space_id: bytes) -> AsyncSpace:
        """Open a space that there is by its 16 bytes, whoever opened it first. For operators.

        Raises:
            ConfigError: there is none.
        """
        name = expect_bytes("space_id", space_id, HASH_BYTES).hex()
        for one in (await self.status())["spaces"]:
            if one["id"] == name:
                layout = KVLayout(
                    one["num_layers"],
                    one["num_kv_heads"],
                    one["head_dim"],
                    one["block_size"],
                    one["dtype"],
                    one["format"],
                    planes=one["planes"],
                    window=one["window"] or None,
                    scale_bytes=one["scale_bytes"],
                )
                return await self.space(layout, shard=one["shard"], tenant=one["tenant"])
        raise ConfigError("space_id", f"there is no space {name}")

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener`, on the loop, with every later event; returns how to end it."""
        self.check_open()
        return self._subscriptions.add(listener)

    async def flush(self, deadline: float = 30.0) -> int:
        """See `Connection.flush`."""
        return await self.ask(flush_ask(deadline))

    async def purge_tenant(self, tenant: str, deadline: float = 30.0) -> Purged:
        """See `Connection.purge_tenant`."""
        return await self.ask(purge_tenant_ask(tenant, deadline))

    async def stats(self) -> dict[str, Any]:
        """See `Connection.stats`."""
        return await self.ask(stats_ask())

    async def clients(self) -> dict[str, Any]:
        """See `Connection.clients`."""
        return await self.ask(clients_ask())

    async def command(
        self, kind: str, session: str, *, hashes: Sequence[bytes] = (), deadline: float = 10.0
    ) -> int:
        """See `Connection.command`."""
        return await self.ask(command_ask(kind, session, hashes, deadline))

    def report(self, report: EngineReport) -> None:
        """See `Connection.report`."""
        self.check_open()
        self.core.report(report_of(report))
        self.write()

    def on_command(self, listener: CommandListener) -> Callable[[], None]:
        """Call `listener`, on the loop, with every command. See `Connection.on_command`."""
        self.check_open()
        return self._commands.listen(listener)

    async def map_device(self, device: str | None = None) -> None:
        """Have the sidecar's memory mapped for a GPU, in the background. See `Connection.map_device`."""
        self.check_open()
        # Making ready to use the driver takes a moment.
        await asyncio.to_thread(self._maps.map, self.core.arena, device)

    async def close(self) -> None:
        """Release what is held and end the connection. Idempotent. See `Connection.close`."""
        if self.closed:
            return
        self.core.release_all()
        self.write()
        self.closed = True
        self._task.cancel()
        await asyncio.wait([self._task])
        self.core.disconnected(ClosedError(WAS_CLOSED))
        self._changed.set()
        await asyncio.to_thread(self._maps.close)
        self.mover.close()

    async def __aenter__(self) -> AsyncConnection:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def device(self) -> str | None:
        """The GPU that the memory is mapped for. See `Connection.device`."""
        return self._maps.device

    @property
    def in_place(self) -> bool:
        """Whether the sidecar's memory is in this process. See `Connection.in_place`."""
        return not isinstance(self.core.arena, AbsentArena)

    @property
    def ready(self) -> bool:
        """Whether the sidecar can be asked."""
        return self.core.ready

    @property
    def lost(self) -> tuple[Lost, ...]:
        """What was held before the last connection and is not any more."""
        return self.core.lost

    @property
    def counters(self) -> ClientCounters:
        """What this connection saw."""
        return self.core.counters

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until the sidecar can be asked. See `Connection.wait_ready`."""
        seconds = self.timeout if timeout is None else expect_seconds("timeout", timeout)
        try:
            async with asyncio.timeout(seconds):
                while not self.core.ready and self._refused is None and not self.closed:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass  # why is known better below
        self.check_open()
        if not self.core.ready:
            raise self._refused or self.core.unavailable

    # For its spaces

    def check_open(self) -> None:
        """Raise `ClosedError` after `close`, and in a forked child."""
        if self.closed:
            raise ClosedError(self._why_closed)

    async def ask(self, ask: Ask[_T]) -> _T:
        """Make a request and wait for what becomes of it."""
        answered = self._loop.create_future()

        def notify() -> None:
            if not answered.done():
                answered.set_result(None)

        call = self.begin(ask, notify)
        if not call.done:
            try:
                async with asyncio.timeout(0.0 if self.core.stalled else ask.seconds + self.timeout):
                    await answered
            except TimeoutError:
                self.core.time_out(call)
            except BaseException:
                call.abandon()
                self.write()
                raise
        if call.error is None:
            return cast(_T, call.result)
        return self.core.without_answer(call, strict=self.strict)

    def begin(self, ask: Ask[_T], notify: Callable[[], object]) -> Call[_T]:
        """Make a request without waiting."""
        self.check_open()
        call = self.core.start(ask, self.core.frame_of(ask), notify)
        self.write()
        return call

    async def drive(self, steps: Steps[_T]) -> _T:
        """Make an operation's requests and return its result."""
        try:
            asks = next(steps)
            while True:
                try:
                    results = await self._ask_all(asks)
                except BaseException as error:  # noqa: BLE001  the operation ends with it
                    asks = steps.throw(error)
                else:
                    asks = steps.send(results)
        except StopIteration as end:
            return cast(_T, end.value)

    def start_commit(self, space: ClientSpace, handles: Handles) -> tuple[Handles, int]:
        """Those of these that are reserved, to be committed now, and how many are not."""
        self.check_open()
        return self.core.start_commit(space, handles)

    def give_up(self, space: ClientSpace, handles: Handles) -> None:
        """Reserved slots will not be written, as far as they are not committed yet."""
        self.core.give_up(space, handles)
        self.write()

    async def _ask_all(self, asks: Sequence[Ask[Any]]) -> list[Any]:
        if any(ask.sends for ask in asks):
            # What waits to be sent is bounded: see `ClientCore.overflowing`.
            async with self._sending:
                return await asyncio.gather(*map(self.ask, asks))
        if len(asks) == 1:
            return [await self.ask(asks[0])]
        return await asyncio.gather(*map(self.ask, asks))

    def write(self) -> None:
        """Write what the socket takes; the rest when it takes more."""
        connected = self._socket
        if connected is None:
            return
        while data := self.core.take_output():
            try:
                sent = connected.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                break  # reading finds out
            if sent < len(data):
                self.core.return_output(memoryview(data)[sent:])
                break
        writing = self.core.has_output
        if writing and not self._writing:
            self._loop.add_writer(connected, self.write)
        elif self._writing and not writing:
            self._loop.remove_writer(connected)
        self._writing = writing
        if self.core.overflowing:
            self._end(ServiceUnavailableError("the sidecar does not read what it is sent"))

    def leave_to(self, why: str) -> None:
        """In a forked child: it is the parent's, and closed here. See `close_in_children`."""
        if self.closed:
            return
        self.closed, self._why_closed = True, why
        self.core.ready = False
        connected, self._socket = self._socket, None
        if connected is not None:
            connected.close()  # not the loop's business: what it watches with is the parent's, too

    # Inside

    def _answer_command(self, given: GivenCommand, count: int, problem: str) -> None:
        """Called from any thread."""

        def say() -> None:
            if not self.closed:
                self.core.answer_command(given, count, problem)
                self.write()

        with suppress(RuntimeError):  # the loop is closed, and the connection with it
            self._loop.call_soon_threadsafe(say)

    def _listen(self, on: bool) -> None:
        if not self.closed:
            self.core.subscribe(on)
            self.write()

    async def _run(self) -> None:
        backoff = Backoff()
        while True:
            reason = await self._connect_and_serve(backoff)
            self.core.disconnected(reason)
            if isinstance(reason, REFUSALS):
                self._refused = reason
            self._changed.set()
            await asyncio.sleep(backoff.seconds())

    async def _connect_and_serve(self, backoff: Backoff) -> KVPagerError:
        """One connection from its beginning to its end; returns why it ended."""
        fds: list[int] = []
        try:
            connected = await self._connected()
        except OSError as error:
            return why_not_reached(self._endpoint, error)
        with connected:
            ended: asyncio.Future[KVPagerError] = self._loop.create_future()
            self._ended = ended
            self._socket = connected
            try:
                self.core.connected(self._endpoint.tls())
            except KVPagerError as error:
                self._socket = None
                return error
            self._loop.add_reader(connected, self._read, connected, fds, backoff)
            greeting = self._loop.call_later(self.timeout, self._expect_greeting)
            try:
                self.write()
                return await ended
            finally:
                greeting.cancel()
                self._loop.remove_reader(connected)
                self._loop.remove_writer(connected)
                self._writing = False
                self._socket = None
                for fd in fds:
                    os.close(fd)

    async def _connected(self) -> socket.socket:
        """A socket that is connected to the first address of the sidecar that answers.

        Raises:
            OSError: none does within the time of a call.
        """
        until = self._loop.time() + self.timeout
        if self._endpoint.local:
            addresses = self._endpoint.addresses()
        else:
            addresses = await self._loop.run_in_executor(None, self._endpoint.addresses)
        for at, (family, address) in enumerate(addresses):
            connected = self._endpoint.socket(family)
            try:
                async with asyncio.timeout((until - self._loop.time()) / (len(addresses) - at)):
                    await self._loop.sock_connect(connected, address)
                return connected
            except BaseException as error:
                connected.close()
                if not isinstance(error, OSError) or at == len(addresses) - 1:
                    raise
        raise ConnectionRefusedError(errno.ECONNREFUSED, "the host has no address")

    def _expect_greeting(self) -> None:
        if not self.core.ready:
            self._end(ServiceUnavailableError(f"{self._endpoint}: no greeting in time"))

    def _read(self, connected: socket.socket, fds: list[int], backoff: Backoff) -> None:
        try:
            came = read_socket(connected, self.core.room, self._place, fds)
            if isinstance(came, int):
                self.core.filled(came)
            else:
                self.core.received(came, fds)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(why_not_reached(self._endpoint, error))
            return
        except KVPagerError as error:
            self._end(error)
            return
        self.write()
        if self.core.ready:
            self._refused = None
            backoff.reset()
            self._changed.set()
            while fds:
                os.close(fds.pop())
        if self._maps.device is not None:
            follow_arena(self._maps, self.core.arena, self.core.arenas_in_use())
        news = self.core.take_news()
        for event in news.events:
            self._events.emit(event.kind, event.tier, event.space, event.hashes)
        for lost in news.losses:
            tell_lost(lost, self._on_lost)
        self._commands.tell(news.commands)

    def _end(self, reason: KVPagerError) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(reason)


class AsyncSpace(SlotPlaces):
    """One layout and shard in a sidecar. Open it with `AsyncConnection.space`.

    Calls and what becomes of them are those of `RemoteSpace`. Leases and reservations are released, committed
    and aborted without waiting, so their ``with`` is as everywhere; `committed` waits for commits.
    """

    def __init__(self, connection: AsyncConnection, space: ClientSpace) -> None:
        super().__init__(space.layout, space.arena.extent_bytes, space.arena.num_extents)
        self.shard = space.shard
        self.tenant = space.tenant
        self.id = space.id
        self._connection = connection
        self._core = connection.core
        self._space = space
        self._asks = SpaceAsks(connection.core, space, self)
        self._commits: set[asyncio.Task[None]] = set()

    @property
    def device_delta(self) -> int:
        """What to add to `addresses` on a GPU, bytes. See `RemoteSpace.device_delta`."""
        return device_delta(self._space)

    def readable_in_place(self, slots: Ids) -> npt.NDArray[np.bool_]:
        """Which slots attention may read where they lie, bool [n]. See `RemoteSpace.readable_in_place`."""
        self._connection.check_open()
        return readable_in_place(self._space, self._connection.device, slots)

    async def map_device(self, device: str | None = None) -> None:
        """See `Connection.map_device`."""
        await self._connection.map_device(device)

    async def match(
        self,
        hashes: Sequence[bytes] | None = None,
        *,
        tokens: Tokens | None = None,
        chain: bytes | None = None,
        cold_deadline: float | None = None,
        start: ChainPlace | None = CHAIN_START,
    ) -> Lease:
        """See `HostSpace.match`."""
        names = self._asks.hashes(hashes, tokens, chain)
        return await self._connection.ask(self._asks.match(names, cold_deadline, start))

    async def load(
        self, hashes: Sequence[bytes], deadline: float, *, start: ChainPlace | None = CHAIN_START
    ) -> Lease:
        """See `HostSpace.load`."""
        return await self._connection.ask(self._asks.load(hashes, deadline, start))

    async def lease(
        self, slots: Ids, generations: Generations, *, used: bool = False
    ) -> npt.NDArray[np.bool_]:
        """See `HostSpace.lease`."""
        return await self._connection.ask(self._asks.lease(slots, generations, used=used))

    async def reserve(
        self, hashes: Sequence[bytes], *, wait: float = 0.0, lineage: Lineage | None = None
    ) -> Reservation:
        """See `HostSpace.reserve`."""
        hashes = expect_byte_strings("hashes", hashes, HASH_BYTES)
        return await self._connection.ask(self._asks.reserve(hashes, expect_seconds("wait", wait), lineage))

    async def put(
        self,
        hashes: Sequence[bytes],
        blocks: npt.NDArray[np.uint8],
        *,
        wait: float = 0.0,
        lineage: Lineage | None = None,
    ) -> int:
        """See `HostSpace.put`."""
        self.check_blocks(blocks, len(expect_byte_strings("hashes", hashes, HASH_BYTES)))
        with await self.reserve(hashes, wait=wait, lineage=lineage) as reservation:
            kept = self.write_blocks(reservation, blocks)
            reservation.commit()
        await self.committed()
        return kept

    async def get(self, hashes: Sequence[bytes], out: npt.NDArray[np.uint8]) -> int:
        """See `HostSpace.get`."""
        self.check_out(out, len(expect_byte_strings("hashes", hashes, HASH_BYTES)))
        with await self.match(hashes, start=None) as lease:
            return self.read_blocks(lease, out)

    async def pin(self, hashes: Sequence[bytes], *, ttl: float | None = None) -> int:
        """See `HostSpace.pin`."""
        return await self._connection.ask(self._asks.pin(hashes, ttl))

    async def hint(self, hashes: Sequence[bytes], *, wanted: bool, retention: Retention | None = None) -> int:
        """See `HostSpace.hint`."""
        return await self._connection.ask(self._asks.hint(hashes, wanted, retention))

    async def unpin(self, hashes: Sequence[bytes]) -> int:
        """See `HostSpace.unpin`."""
        return await self._connection.ask(self._asks.unpin(hashes))

    async def evict(self, count: int) -> int:
        """See `HostSpace.evict`."""
        return await self._connection.ask(self._asks.evict(count))

    async def demote(self, hashes: Sequence[bytes], *, deadline: float = 30.0) -> int:
        """See `HostSpace.demote`. For operators: a token of tenants is refused."""
        return await self._connection.ask(self._asks.demote(hashes, deadline))

    async def purge(self, hashes: Sequence[bytes], *, note: bytes = b"", deadline: float = 30.0) -> Purged:
        """See `RemoteSpace.purge`."""
        return await self._connection.ask(self._asks.purge(hashes, note, deadline))

    async def purge_session(self, name: str, *, root: bytes, deadline: float = 30.0) -> Purged:
        """See `RemoteSpace.purge_session`."""
        key = session_key(expect_bytes("root", root, HASH_BYTES), expect_text("name", name))
        found = await self._connection.ask(self._asks.get_note(key, deadline, required=True))
        return await self.purge(session_blocks(found, self.layout), note=key, deadline=deadline)

    async def put_note(self, name: bytes, value: bytes, deadline: float | None = None) -> bool:
        """See `HostSpace.put_note`."""
        seconds = self._connection.timeout if deadline is None else deadline
        return await self._connection.ask(self._asks.put_note(name, value, seconds)) > 0

    async def get_note(self, name: bytes, deadline: float | None = None) -> bytes | None:
        """See `HostSpace.get_note`."""
        seconds = self._connection.timeout if deadline is None else deadline
        return await self._connection.ask(self._asks.get_note(name, seconds))

    async def committed(self) -> None:
        """Wait until the sidecar has answered every commit so far.

        Raises:
            KVPagerError: what one of them failed with, where the connection is strict.
        """
        for commit in tuple(self._commits):
            await commit

    # For its leases and reservations

    def release(self, slots: Ids, generations: Generations) -> None:
        """End leases. Does not wait."""
        self._connection.check_open()
        refused = self._core.release(self._space, handles_of(slots, generations))
        self._connection.write()
        self._refused("release", refused)

    def commit(self, slots: Ids, generations: Generations, *, in_cold: bool = False) -> None:
        """Reserved slots are written: let them be found. Does not wait: see `committed`."""
        self._connection.check_open()
        written, refused = self._core.start_commit(self._space, handles_of(slots, generations))
        if len(written):
            committing: Ask[None] = self._core.committing(self._space, written)
            self._later(self._connection.ask(committing))
        self._refused("commit", refused)

    def abort(self, slots: Ids, generations: Generations) -> None:
        """Reserved slots will not be written. Does not wait."""
        self._connection.check_open()
        refused = self._core.abort(self._space, handles_of(slots, generations))
        self._connection.write()
        self._refused("abort", refused)

    # Inside

    def _base(self) -> int:
        self._connection.check_open()
        base: int = self._space.arena.base
        return base

    def _bytes(self, offset: int, nbytes: int) -> memoryview:
        return self._space.arena.bytes[offset : offset + nbytes]

    def _copy(self, source: npt.NDArray[np.int64], target: npt.NDArray[np.int64]) -> None:
        self._connection.mover.copy_now(source, target, self.layout.block_bytes)

    def _later(self, commit: Coroutine[Any, Any, None]) -> None:
        """Do it without waiting; `committed` waits."""
        task = asyncio.get_running_loop().create_task(commit)
        self._commits.add(task)
        task.add_done_callback(self._commits.discard)

    def _refused(self, what: str, count: int) -> None:
        if count and self._connection.strict:
            raise StaleHandleError(f"{what} refused for {count} slots: not held any more")


class AsyncInlineSpace(AsyncSpace):
    """One layout and shard in a sidecar that is reached over TCP: `InlineSpace` for asyncio.

    `commit` of a reservation sends its blocks without waiting: `committed` waits.
    """

    def __init__(self, connection: AsyncConnection, space: ClientSpace) -> None:
        super().__init__(connection, space)
        self._drive = connection.drive
        self._inline = InlineAsks(
            connection.core, space, self, self._asks, lambda handles: connection.give_up(space, handles)
        )

    async def match(
        self,
        hashes: Sequence[bytes] | None = None,
        *,
        tokens: Tokens | None = None,
        chain: bytes | None = None,
        cold_deadline: float | None = None,
        start: ChainPlace | None = CHAIN_START,
    ) -> CopiedLease:
        """See `InlineSpace.match`."""
        names = self._asks.hashes(hashes, tokens, chain)
        return await self._drive(self._inline.match(names, cold_deadline, start))

    async def load(
        self, hashes: Sequence[bytes], deadline: float, *, start: ChainPlace | None = CHAIN_START
    ) -> CopiedLease:
        """See `InlineSpace.load`."""
        return await self._drive(self._inline.load(hashes, deadline, start))

    async def reserve(
        self, hashes: Sequence[bytes], *, wait: float = 0.0, lineage: Lineage | None = None
    ) -> BufferedReservation:
        """See `InlineSpace.reserve_named`."""
        hashes = expect_byte_strings("hashes", hashes, HASH_BYTES)
        return await self._drive(self._inline.reserve(hashes, expect_seconds("wait", wait), lineage))

    async def put(
        self,
        hashes: Sequence[bytes],
        blocks: npt.NDArray[np.uint8],
        *,
        wait: float = 0.0,
        lineage: Lineage | None = None,
    ) -> int:
        """See `InlineSpace.put`."""
        hashes = expect_byte_strings("hashes", hashes, HASH_BYTES)
        wait = expect_seconds("wait", wait)
        self.check_blocks(blocks, len(hashes))
        return await self._drive(self._inline.store(hashes, blocks, wait, lineage, self._start))

    async def get(self, hashes: Sequence[bytes], out: npt.NDArray[np.uint8]) -> int:
        """See `InlineSpace.get`."""
        hashes = expect_byte_strings("hashes", hashes, HASH_BYTES)
        self.check_out(out, len(hashes))
        return await self._drive(self._inline.fetch(hashes, out))

    def send(self, reservation: BufferedReservation, positions: npt.NDArray[np.int64]) -> None:
        """Send these positions of a reservation; does not wait: see `committed`."""
        self._connection.check_open()
        self._later(self._send(reservation, positions))

    def write_blocks(self, reservation: Reservation, blocks: npt.NDArray[np.uint8]) -> int:
        """See `InlineSpace.write_blocks`."""
        return fill_buffer(reservation, blocks)

    def read_blocks(self, lease: Lease, out: npt.NDArray[np.uint8]) -> int:
        """See `InlineSpace.read_blocks`."""
        return read_copies(lease, out)

    async def lease(
        self, slots: Ids, generations: Generations, *, used: bool = False
    ) -> npt.NDArray[np.bool_]:
        """Not over TCP: raises `NotInPlaceError`. See `InlineSpace.lease`."""
        raise not_here()

    def commit(self, slots: Ids, generations: Generations, *, in_cold: bool = False) -> None:
        """Not over TCP: raises `NotInPlaceError`. See `InlineSpace.commit`."""
        raise not_here()

    def _start(self, handles: Handles) -> tuple[Handles, int]:
        return self._connection.start_commit(self._space, handles)

    async def _send(self, reservation: BufferedReservation, positions: npt.NDArray[np.int64]) -> None:
        rows = rows_of(reservation, positions)
        steps = self._inline.put(reservation, positions, reservation.buffer, rows, self._start)
        _, refused = await self._drive(steps)
        self._refused("commit", refused)
