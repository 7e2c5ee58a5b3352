"""A client's half of the protocol, without I/O: what is asked, answered, held, and said again.

A shell (`api/client.py`, `api/client_async.py`) connects, reads and writes bytes, waits, and holds a lock
around every call. `ClientCore` does the rest: request ids, replies that come late, spaces and what is held of
them, the handshake, and what follows when a connection was lost or the sidecar was started anew.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from ..kvstore.events import BlockEvent, EventKind
from ..kvstore.hashing import space_id
from ..kvstore.stats import Counters
from ..tiers.errors import (
    AccessDeniedError,
    ColdTierUnavailableError,
    ConfigError,
    KVPagerError,
    LayoutError,
    ProtocolError,
    QuotaError,
    ServiceUnavailableError,
    StaleHandleError,
    TLSError,
)
from ..tiers.layout import KVLayout
from ..tiers.memory import format_bytes
from ..tiers.pinned import LARGEST_EXTENT, capacity_for
from .client_calls import Ask, Call, expect
from .client_space import AbsentArena, Arena, ClientSpace, Lost
from .holdings import Claimed, Handles, Holdings
from .messages import (
    Abort,
    CommandDone,
    CommandGiven,
    Commit,
    Done,
    Event,
    Hello,
    Marks,
    Message,
    Reassert,
    Release,
    Report,
    SpaceOpened,
    Subscribe,
    Welcome,
)
from .tls_stream import TLSStream
from .wire import MAGIC, MAX_FRAME, VERSION, Failure, Frame, FrameReader, Notice, Reply, Request, encode_parts

__all__ = ["FRAME_ROOM", "GROUP_BYTES", "ClientCore", "ClientCounters", "GivenCommand", "News"]

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
_M = TypeVar("_M", bound=Message)

GROUP_BYTES: Final = 16
FRAME_ROOM: Final = 128
"""Bytes of a frame of one block beside the block, at most."""
_TLS_ALERT: Final = b"\x15\x03"
"""What whoever speaks TLS answers to somebody who does not."""
_MOST_OUTPUT: Final = 2 * MAX_FRAME
"""Bytes that wait for a sidecar that does not read: beyond this the connection is given up."""
_TOGETHER: Final = 1 << 15
"""Bytes of frames that are written at once."""
_CALLERS_FAULT: Final = (ConfigError, LayoutError, AccessDeniedError)


@dataclass(frozen=True)
class GivenCommand:
    """A command that came, and on which connection.

    Args:
        epoch: the core's, then.
        given: what came.
    """

    epoch: int
    given: CommandGiven

    @property
    def number(self) -> int:
        """What the answer calls it."""
        return self.given.command


class News(NamedTuple):
    """What a connection's listeners are to be told."""

    events: list[BlockEvent]
    losses: list[Lost]
    commands: list[GivenCommand]


@dataclass(frozen=True)
class _Outage:
    """Why there are no answers, None while there are; and whether that was told."""

    reason: KVPagerError | None = None
    told: bool = False


@dataclass
class ClientCounters(Counters):
    """What a connection saw since it was made. They only grow."""

    requests: int = 0
    unanswered: int = 0
    """Calls that found or kept nothing because the sidecar did not answer, or not in time."""
    refused: int = 0
    """Handles that were released or committed and not held any more."""
    over_quota: int = 0
    """Calls that found no room within the tenant's quota."""
    lost: int = 0
    """Leases and reservations that ended with a sidecar, or while there was no connection."""
    connects: int = 0
    restarts: int = 0
    """Connections to a sidecar that had been started anew."""
    events_lost: int = 0


class ClientCore:
    """The state of a client over all its connections. Every call is made with the shell's lock held.

    Args:
        group: 16 bytes, the client group.
        name: what an operator calls this client.
        pid: the process, 0 where it means nothing to the sidecar.
        token: what a sidecar over TCP wants to be told.

    Attributes:
        ready: whether the handshake is through and every space can be asked again.
        counters: what was seen so far.
        lost: what the last connection found lost.
        stalled: whether the sidecar did not answer in time, and nothing was heard of it since.
        epoch: grows with every connection and every end of one: requests made before it are not sent.
    """

    def __init__(self, group: bytes, name: str, *, pid: int = 0, token: str = "") -> None:
        self.counters = ClientCounters()
        self.lost: tuple[Lost, ...] = ()
        self.epoch = 0
        self.ready = False
        self.arena: Arena | AbsentArena | None = None
        self.boot_id: bytes | None = None
        self._hello = Hello(
            MAGIC, VERSION, VERSION, group, pid, token, name, secrets.token_bytes(GROUP_BYTES)
        )
        self._ids = count(1)
        self._calls: dict[int, Call[Any]] = {}
        self._reader = FrameReader()
        self._output: deque[bytes] = deque()
        """Frames, in parts."""
        self._wire: deque[bytes | memoryview] = deque()
        """What the socket did not take yet."""
        self._output_bytes = 0
        self._tls: TLSStream | None = None
        self._nothing_came = True
        self._greeted = False
        self._spaces: dict[bytes, ClientSpace] = {}
        self._opening = 0
        self._subscribed = False
        self._events: list[BlockEvent] = []
        self._commands: list[GivenCommand] = []
        self._report: Report | None = None
        self._new_losses: list[Lost] = []
        self._heard = 0
        self.stalled = False
        self._out = _Outage(ServiceUnavailableError("there is no connection yet"))
        self.max_frame = MAX_FRAME

    # Connections come and go

    def connected(self, tls: TLSStream | None = None) -> None:
        """There is a connection: say hello.

        Args:
            tls: TLS for it, where it has that.
        """
        self.epoch += 1
        self._opening = 0
        self._tls = tls
        self._nothing_came = True
        self._greeted = False
        if tls is not None:
            tls.start()
        self._out = _Outage(ServiceUnavailableError("the sidecar does not greet"), self._out.told)
        self._reader = FrameReader()
        self._send_call(self._ask_core(lambda _: self._hello, lambda reply: expect(reply, Welcome)))

    def disconnected(self, reason: KVPagerError) -> None:
        """The connection is gone, or there never was one: calls under way end without a reply."""
        self.epoch += 1
        self.ready = False
        self.stalled = False
        self._output.clear()
        self._wire.clear()
        self._output_bytes = 0
        self._tls = None
        for space in self._spaces.values():
            space.number = space.opened = None
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.fail(reason)
        self._out = _Outage(reason, self._out.told)

    def received(self, data: bytes | memoryview, fds: Sequence[int] = ()) -> None:
        """Bytes came, and descriptors with them, which stay the caller's.

        Raises:
            ProtocolError: this is no sidecar, or one of another version: the connection is of no use.
            AccessDeniedError: the sidecar does not let this client in.
            ServiceUnavailableError: it does not now: it has too many, or is being stopped.
            TLSError: its certificate is not trusted, or only one side speaks TLS.
        """
        self._heard += 1
        self.stalled = False
        if self._tls is not None:
            data = self._tls.receive(data)
        elif self._nothing_came and bytes(data[: len(_TLS_ALERT)]) == _TLS_ALERT:
            raise TLSError("the sidecar speaks TLS: kvpagers://")
        self._nothing_came = False
        for frame in self._reader.feed(data):
            self._frame(frame, fds)

    @property
    def room(self) -> memoryview | None:
        """In the midst of a long frame, where its next bytes may be put before `filled`; else None."""
        return self._reader.room if self._tls is None else None

    def filled(self, count: int) -> None:
        """So many bytes came, and were put into `room`. Raises as `received`."""
        self._heard += 1
        self.stalled = False
        for frame in self._reader.fill(count):
            self._frame(frame, ())

    @property
    def unavailable(self) -> KVPagerError:
        """Why there was no answer lately."""
        return self._out.reason or ServiceUnavailableError("the sidecar does not answer")

    def take_output(self) -> bytes | memoryview:
        """The next bytes to write; empty where there are none."""
        if not self._wire:
            self._fill_wire()
        if not self._wire:
            return b""
        data = self._wire.popleft()
        self._output_bytes -= len(data)
        return data

    def return_output(self, data: bytes | memoryview) -> None:
        """Bytes that could not be written yet."""
        self._wire.appendleft(data)
        self._output_bytes += len(data)

    @property
    def has_output(self) -> bool:
        """Whether there are bytes to write."""
        if self._wire or (self._tls is not None and self._tls.pending):
            return True
        return bool(self._output) and (self._tls is None or self._tls.ready)

    @property
    def overflowing(self) -> bool:
        """Whether the sidecar leaves so much unread that the connection is to be given up."""
        return self._output_bytes > _MOST_OUTPUT

    @property
    def has_news(self) -> bool:
        """Whether there is something for `take_news`. Needs no lock."""
        return bool(self._events or self._commands or self._new_losses)

    @property
    def new_losses(self) -> Sequence[Lost]:
        """What was lost since the last `take_news`."""
        return self._new_losses

    def take_news(self) -> News:
        """What came since, or was found out."""
        news = News(self._events, self._new_losses, self._commands)
        self._events, self._new_losses, self._commands = [], [], []
        return news

    def arenas_in_use(self) -> list[Arena | AbsentArena]:
        """The memories that spaces have slots in."""
        return [space.arena for space in self._spaces.values()]

    # Asking

    def frame_of(self, ask: Ask[Any]) -> tuple[int, int, list[bytes]] | None:
        """Epoch, id and bytes of a request; None where it cannot be asked now. Needs no lock.

        Raises:
            ProtocolError: it is longer than the sidecar takes.
        """
        epoch = self.epoch
        number = 0 if ask.space is None else ask.space.number
        if number is None or not self.ready or (self.stalled and not ask.insists):
            return None
        request = next(self._ids)
        return epoch, request, encode_parts(Request(request, ask.message(number)), max_frame=self.max_frame)

    def start(
        self, ask: Ask[_T], frame: tuple[int, int, list[bytes]] | None, notify: Callable[[], object] | None
    ) -> Call[_T]:
        """Send a request of `frame_of`; it is done at once where it cannot be sent."""
        call = Call(ask, notify)
        self.counters.requests += 1
        if frame is None or frame[0] != self.epoch:
            call.error = self.unavailable
            call.done = True
        else:
            _, request, data = frame
            call.heard = self._heard
            self._calls[request] = call
            self._write(data)
        return call

    def time_out(self, call: Call[_T]) -> None:
        """A call was waited for long enough. Until something is heard again, nothing is waited for."""
        if not call.done:
            call.abandon()
            call.error = ServiceUnavailableError("the sidecar did not answer in time")
            if self._heard == call.heard:
                self.stalled = True
                self._out = _Outage(call.error, self._out.told)

    def without_answer(self, call: Call[_T], *, strict: bool) -> _T:
        """The result of a call that has an error.

        Raises:
            KVPagerError: the error, where it is the caller's fault, or the connection strict and the request
                not lenient.
        """
        error = call.error
        if error is None:
            raise TypeError("the call has a result")
        if isinstance(error, ColdTierUnavailableError) and not call.ask.required:
            return call.ask.instead()  # the sidecar did answer, and a miss is no error
        strict = strict and not call.ask.lenient
        if strict or call.ask.required or isinstance(error, _CALLERS_FAULT):
            raise error
        if isinstance(error, StaleHandleError):
            return call.ask.instead()  # it did answer
        if isinstance(error, QuotaError):
            self.counters.over_quota += 1
            return call.ask.instead()
        self.counters.unanswered += 1
        if not self._out.told:
            self._out = replace(self._out, told=True)
            _log.warning("the sidecar is done without until it answers: %s", error)
        return call.ask.instead()

    def subscribe(self, on: bool) -> None:
        """Have events sent, on this connection and all later ones, or no more."""
        if on != self._subscribed:
            self._subscribed = on
            if self.ready:
                self._tell_subscription()

    def report(self, report: Report) -> None:
        """Say how this engine is, on this connection and, until there is another report, on later ones."""
        self._report = report
        if self.ready:
            self._tell_report(report)

    def answer_command(self, given: GivenCommand, count: int, problem: str) -> None:
        """Say what became of a command. One of an earlier connection has failed there already."""
        if given.epoch == self.epoch and self.ready:
            answer = CommandDone(given.number, count, problem)
            self._send_call(self._ask_core(lambda _: answer, lambda reply: expect(reply, Done)))

    # Spaces and what is held of them

    def space(self, layout: KVLayout, shard: str, tenant: str) -> tuple[ClientSpace, bool]:
        """The space of these, and whether it must be opened first.

        Raises:
            ServiceUnavailableError: there never was a connection.
            ConfigError: a block does not fit an extent.
        """
        name = space_id(layout, shard, tenant)
        space = self._spaces.get(name)
        if space is not None:
            return space, False
        if self.arena is None:
            raise self.unavailable
        if layout.block_bytes > self.arena.extent_bytes:
            raise _does_not_fit(layout, self.arena.extent_bytes)
        if isinstance(self.arena, AbsentArena) and layout.block_bytes > self.max_frame - FRAME_ROOM:
            raise ConfigError(
                "block_size",
                f"blocks of {layout.block_bytes} bytes do not fit frames of {self.max_frame} bytes, "
                "in which they travel over TCP",
            )
        space = self._spaces[name] = ClientSpace(layout, shard, tenant, self.arena)
        return space, True

    def opening(self, space: ClientSpace) -> Ask[None]:
        """The request to open a space that is new."""
        return self._ask_core(lambda _: space.open_message(), lambda reply: self._opened(space, reply))

    def forget(self, space: ClientSpace) -> None:
        """A space that the sidecar refused."""
        self._spaces.pop(space.id, None)

    def release(self, space: ClientSpace, handles: Handles) -> int:
        """End leases; returns how many of them were not held."""
        if not space.held.fits(handles):
            self.counters.refused += len(handles)
            return len(handles)
        refused = 0
        for part in handles.rounds():
            good = space.held.take_leases(part)
            refused += len(part) - int(np.count_nonzero(good))
            self._tell(space, Release, part.where(good))
        self.counters.refused += refused
        self._go_ashore(space)
        return refused

    def abort(self, space: ClientSpace, handles: Handles) -> int:
        """Reserved slots will not be written; returns how many of them were not reserved any more."""
        if not space.held.fits(handles):
            self.counters.refused += len(handles)
            return len(handles)
        good = space.held.end_writing(handles)
        self._tell(space, Abort, handles.where(good))
        refused = len(handles) - int(np.count_nonzero(good))
        self.counters.refused += refused
        self._go_ashore(space)
        return refused

    def give_up(self, space: ClientSpace, handles: Handles) -> None:
        """Reserved slots will not be written, as far as they are not committed yet."""
        if len(handles) and space.held.fits(handles):
            self.abort(space, handles.where(space.held.writing(handles)))

    def start_commit(self, space: ClientSpace, handles: Handles) -> tuple[Handles, int]:
        """Reserved slots are written: those that are to be committed, and how many were not reserved."""
        if not space.held.fits(handles):
            good = np.zeros(len(handles), dtype=np.bool_)
        else:
            good = space.held.start_commit(handles)
            if space.adrift is not None:
                space.held.end_writing(handles.where(good))
                good[:] = False
                self._go_ashore(space)
        refused = len(handles) - int(np.count_nonzero(good))
        self.counters.refused += refused
        return handles.where(good), refused

    def committing(self, space: ClientSpace, handles: Handles, *, lenient: bool = False) -> Ask[None]:
        """The request to commit slots of `start_commit`. Where it is not answered it is made again."""

        def end(reply: Message) -> None:
            expect(reply, Done)
            space.held.end_writing(handles)

        return Ask(
            space,
            lambda number: Commit(number, handles.slots, handles.generations),
            end,
            lambda: None,
            lenient=lenient,
            insists=True,
            refused=lambda _: space.held.end_writing(handles),
        )

    def release_all(self) -> None:
        """Give everything back, since the client is closed."""
        for space in self._spaces.values():
            while len((claimed := space.held.claim()).handles):
                leased = claimed.counts > 0
                self.release(space, claimed.handles.where(leased))
                self.abort(space, claimed.handles.where(~leased))

    # Inside

    def _frame(self, frame: Frame, fds: Sequence[int]) -> None:
        if isinstance(frame, Notice):
            if isinstance(frame.message, Event):
                self._event(frame.message)
            elif isinstance(frame.message, CommandGiven):
                self._commands.append(GivenCommand(self.epoch, frame.message))
            return
        if isinstance(frame, Request):
            raise ProtocolError("the sidecar sent a request")
        if isinstance(frame, Failure) and frame.id == 0:
            raise frame.error  # it is about no request: the sidecar ends the connection
        call = self._calls.pop(frame.id, None)
        if call is None:
            raise ProtocolError(f"a reply to no request, {frame.id}")
        if isinstance(frame, Failure):
            self._failed(call, frame.error)
            return
        if not self.ready and isinstance(frame.message, Welcome):
            self._welcome(frame.message, fds)
            return
        self._answered(call, frame)

    def _answered(self, call: Call[Any], frame: Reply) -> None:
        try:
            call.answer(frame.message)
        except KVPagerError as error:
            call.fail(error)
            raise
        if self._out.reason is not None and self.ready:
            self._back()

    def _failed(self, call: Call[Any], error: KVPagerError) -> None:
        if isinstance(error, StaleHandleError):
            self.counters.refused += 1
        call.fail(error)
        if call.ask.refused is not None:
            call.ask.refused(error)
        if not self._greeted or isinstance(error, ProtocolError):
            raise error

    def _back(self) -> None:
        if self._out.told:
            _log.warning("the sidecar answers again")
        self._out = _Outage()

    def _event(self, event: Event) -> None:
        try:
            kind = EventKind(event.kind)
        except ValueError:
            return  # a newer sidecar's
        self.counters.events_lost += event.lost
        self._events.append(BlockEvent(kind, event.tier, event.space, event.hashes))

    def _arena_of(self, welcome: Welcome, fds: Sequence[int]) -> Arena | AbsentArena:
        """The memory that was passed, or what is known of it where none is; the old one if it is the same."""
        before = self.arena
        if welcome.arena_bytes == 0:
            if before is None:
                return AbsentArena(welcome.extent_bytes)
            if not isinstance(before, AbsentArena) or before.extent_bytes != welcome.extent_bytes:
                raise ProtocolError("the sidecar cuts its memory in another way, or passes none any more")
            return before
        if not fds or isinstance(before, AbsentArena):
            raise ProtocolError("the sidecar passed no memory, or does now and did not before")
        status = os.fstat(fds[0])
        if before is not None and before.file == (status.st_dev, status.st_ino):
            return before
        return Arena(fds[0], welcome.arena_bytes, welcome.extent_bytes)

    def _welcome(self, welcome: Welcome, fds: Sequence[int]) -> None:
        if welcome.version != VERSION:
            raise ProtocolError(f"the sidecar speaks version {welcome.version}, this client {VERSION}")
        before, arena = self.arena, self._arena_of(welcome, fds)
        self._greeted = True
        again, self.boot_id = self.boot_id, welcome.boot_id
        self.counters.connects += 1
        self.counters.restarts += again not in (None, welcome.boot_id)
        self.arena = arena
        self.max_frame = min(MAX_FRAME, welcome.max_frame)
        self.lost = ()
        if self._subscribed:
            self._tell_subscription()
        if self._report is not None:
            self._tell_report(self._report)
        for space in self._spaces.values():
            if arena is not before:
                self._set_adrift(space, arena)
            self._opening += 1
            self._send_call(
                self._ask_core(
                    lambda _, space=space: space.open_message(),  # type: ignore[misc]
                    lambda reply, space=space: self._reopened(space, reply),  # type: ignore[misc]
                    lambda error, space=space: self._not_reopened(space, error),  # type: ignore[misc]
                )
            )
        self._settle()

    def _set_adrift(self, space: ClientSpace, arena: Arena | AbsentArena) -> None:
        """The memory that a space's slots are in is no longer the sidecar's."""
        if space.adrift is None:
            claimed = space.held.claim()
            self._lose(space, claimed, readable=True)
            # Nobody will give back what was committed and not answered.
            space.held.end_writing(claimed.handles.where(space.held.committing(claimed.handles)))
        space.adrift = arena
        self._go_ashore(space)

    def _go_ashore(self, space: ClientSpace) -> None:
        """Go on in the sidecar's memory, if nothing is held of the old one any more."""
        arena = space.adrift
        if arena is None or not space.held.empty:
            return
        if (arena.nbytes, arena.extent_bytes) != (space.arena.nbytes, space.arena.extent_bytes):
            return  # slots would not mean the same: it stays without answers, and a new connection has some
        space.arena, space.adrift = arena, None
        space.held = Holdings(space.capacity)
        space.number = space.opened

    def _lose(self, space: ClientSpace, claimed: Claimed, *, readable: bool = False) -> None:
        if len(claimed.handles):
            leased = claimed.counts > 0
            lost = Lost(space.id, claimed.handles.where(leased), claimed.handles.where(~leased), readable)
            self.counters.lost += len(claimed.handles)
            self._new_losses.append(lost)
            self.lost = (*self.lost, lost)

    def _not_reopened(self, space: ClientSpace, error: KVPagerError) -> None:
        _log.error("the sidecar has a space no longer, which finds and keeps nothing from now on: %s", error)
        self._opening -= 1
        self._settle()

    def _opened(self, space: ClientSpace, reply: Message) -> None:
        opened = expect(reply, SpaceOpened)
        here = space.adrift or space.arena
        if opened.id != space.id or opened.slots_per_extent != here.extent_bytes // space.layout.block_bytes:
            raise ProtocolError("the sidecar means another space, or cuts its extents in another way")
        space.opened = opened.space
        if space.adrift is None:
            space.number = opened.space

    def _reopened(self, space: ClientSpace, reply: Message) -> None:
        """A space is open on a new connection: say what is held of it before it is asked anything else."""
        self._opened(space, reply)
        number, space.number = space.number, None
        if number is None:
            self._opening -= 1
            self._settle()
            return
        claimed = space.held.claim()
        handles = claimed.handles
        self._send_call(
            self._ask_core(
                lambda _: Reassert(number, handles.slots, handles.generations, claimed.counts),
                lambda marks: self._reasserted(space, number, claimed, expect(marks, Marks)),
                lambda error: self._not_reopened(space, error),
            )
        )

    def _reasserted(self, space: ClientSpace, number: int, claimed: Claimed, marks: Marks) -> None:
        good = marks.flags
        if len(good) != len(claimed.handles):
            raise ProtocolError("the sidecar answers for more or fewer slots than it was asked for")
        amends = space.held.settle(claimed, good)
        self._lose(space, amends.lost)
        space.number = number
        for handles in amends.released:
            self._tell(space, Release, handles)
        self._tell(space, Abort, amends.aborted)
        if len(amends.committed):
            self._send_call(self.committing(space, amends.committed), number)
        self._opening -= 1
        self._settle()

    def _settle(self) -> None:
        if not self._opening:
            self.ready = True
            self._back()

    def _tell(self, space: ClientSpace, kind: type[Release] | type[Abort], handles: Handles) -> None:
        """Send what needs no answer; where it cannot be sent, `Reassert` says it later."""
        if len(handles) and space.number is not None:
            number = space.number
            self._send_call(
                self._ask_core(
                    lambda _: kind(number, handles.slots, handles.generations),
                    lambda reply: expect(reply, Done),
                )
            )

    def _tell_subscription(self) -> None:
        on = self._subscribed
        self._send_call(self._ask_core(lambda _: Subscribe(on), lambda reply: expect(reply, Done)))

    def _tell_report(self, report: Report) -> None:
        self._send_call(self._ask_core(lambda _: report, lambda reply: expect(reply, Done)))

    def _ask_core(
        self,
        message: Callable[[int], Message],
        convert: Callable[[Message], Any],
        refused: Callable[[KVPagerError], object] | None = None,
    ) -> Ask[Any]:
        return Ask(None, message, convert, lambda: None, refused=refused)

    def _send_call(self, ask: Ask[Any], space: int = 0) -> None:
        request = next(self._ids)
        self._calls[request] = Call(ask, None)
        self._write(encode_parts(Request(request, ask.message(space)), max_frame=self.max_frame))

    def _write(self, parts: list[bytes]) -> None:
        self._output.extend(parts)
        self._output_bytes += sum(map(len, parts))

    def _fill_wire(self) -> None:
        """Bytes for the socket, of a frame or of the handshake."""
        tls = self._tls
        if tls is None:
            # What is short goes together, in one write.
            together = [self._output.popleft()] if self._output else []
            size = sum(map(len, together))
            while self._output and size + len(self._output[0]) <= _TOGETHER:
                size += len(self._output[0])
                together.append(self._output.popleft())
            if together:
                self._wire.append(b"".join(together) if len(together) > 1 else together[0])
            return
        if self._output and tls.ready:
            data = self._output.popleft()
            self._output_bytes -= len(data)
            tls.send(data)
        if tls.pending:
            sealed = tls.take()
            self._wire.append(sealed)
            self._output_bytes += len(sealed)


def _does_not_fit(layout: KVLayout, extent: int) -> ConfigError:
    """What to change where no extent of the sidecar's holds a block."""
    block = layout.block_bytes
    least = capacity_for(block)
    advice = (
        f"give kvpager serve --host-bytes {-(-least >> 20)}M at least (--fresh where it has an arena), or"
        if block <= LARGEST_EXTENT
        else f"no sidecar's are larger than {format_bytes(LARGEST_EXTENT)}:"
    )
    return ConfigError(
        "block_size",
        f"blocks of {layout.block_size} tokens are {block} bytes each, and do not fit the sidecar's extents "
        f"of {extent}: {advice} take fewer tokens a block",
    )
