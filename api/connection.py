"""One client's connection after the handshake: frames in, replies out, and the bounds of both.

What a client may have under way is bounded in requests and bytes. When it is at a bound, or does not take its
replies, it is not read from: its own requests wait in its own socket. Requests that wait for something run in
threads, a few of each connection at a time, so that no client takes the threads of the others; and a
connection has the loop for a couple of milliseconds in a row.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Final, cast

from ..tiers.errors import ClosedError, KVPagerError, ProtocolError, ServiceUnavailableError
from .answers import Answers, request_bytes
from .messages import CommandGiven, Message
from .service import Job, Service
from .wire import Failure, Frame, FrameReader, Notice, Reply, Request, encode_parts

__all__ = ["Connection", "Limits", "Threads"]

_log = logging.getLogger(__name__)

_TURN_SECONDS: Final = 0.002
_LAST_WORD_SECONDS: Final = 2.0
"""How long a connection that is being ended may take to read why."""
_SMALL_READ: Final = 16 << 10


@dataclass(frozen=True)
class Limits:
    """What one connection may have under way.

    Args:
        requests: that threads work on, or will.
        request_bytes: of these and their replies; one request is always taken.
        waiting: threads that wait for it.
        working: threads that copy for it.
        unread_bytes: of replies that it did not take yet, before it is read from no more.
        unread_event_bytes: of anything that it did not take yet, before events are dropped.
    """

    requests: int = 64
    request_bytes: int = 128 << 20
    waiting: int = 4
    working: int = 1
    unread_bytes: int = 1 << 20
    unread_event_bytes: int = 256 << 10


@dataclass(frozen=True)
class Threads:
    """Where jobs run."""

    waiting: Executor
    working: Executor


@dataclass(frozen=True)
class _Started:
    """A job under way."""

    id: int
    cost: int
    job: Job
    kind: str
    began: float


class Connection(asyncio.BufferedProtocol):
    """Reads requests and writes replies. Lives on the loop's thread.

    Args:
        service: what connections share.
        make_answers: makes the connection's `Answers` of it.
        threads: where jobs run.
        limits: what it may have under way.
        closed: is called once when the connection is over.
        remote: whether it came over TCP.
        tenants: those that it has to do with; None: all.
    """

    def __init__(
        self,
        service: Service,
        make_answers: Callable[[Connection], Answers],
        threads: Threads,
        limits: Limits,
        closed: Callable[[Connection], None],
        *,
        remote: bool = False,
        tenants: frozenset[str] | None = None,
    ) -> None:
        self.remote = remote
        self.tenants = tenants
        self.lost_events = 0
        self._loop = asyncio.get_running_loop()
        self._service = service
        self._answers = make_answers(self)
        self._threads = threads
        self._limits = limits
        self._closed = closed
        self._reader = FrameReader(service.max_frame)
        self._small = memoryview(bytearray(_SMALL_READ))
        self._frames: deque[Frame] = deque()
        """Read, and not begun yet."""
        self._under_way: set[int] = set()
        self._bytes_under_way = 0
        self._queued: dict[bool, deque[_Started]] = {True: deque(), False: deque()}
        self._running: dict[bool, int] = {True: 0, False: 0}
        self._made = False
        self._reading = True
        self._ending = False
        self._over = False
        self._unread = False
        """Whether the client leaves too many replies unread."""
        self._turn_due = False

    # What the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._limits.unread_bytes)
        self._made = True
        if self._ending:
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        # Small frames are decoded a few at a time; the bytes of a long one go where they stay.
        return self._reader.room or self._small

    def buffer_updated(self, nbytes: int) -> None:
        if self._ending:
            return
        try:
            if self._reader.room is not None:
                self._frames.extend(self._reader.fill(nbytes))
            else:
                self._frames.extend(self._reader.feed(self._small[:nbytes]))
        except ProtocolError as error:
            self._refuse(self._reader.refused, error)
            return
        self._take_turn()

    def eof_received(self) -> bool:
        return False  # nobody reads replies any more: close

    def pause_writing(self) -> None:
        self._unread = True
        self._steer()

    def resume_writing(self) -> None:
        self._unread = False
        if not self._turn_due:
            self._take_turn()

    def connection_lost(self, error: Exception | None) -> None:
        self._ending = self._over = True
        self._frames.clear()
        for queue in self._queued.values():
            while queue:
                self._instead(queue.popleft().job)
        self._closed(self)

    # What others call

    @property
    def idle(self) -> bool:
        """Whether no request is under way or waits to be."""
        return not self._under_way and not self._frames

    def end(self) -> None:
        """Close it at once; what it did not read is lost."""
        self._ending = True
        if self._made:
            self._transport.abort()

    def finish(self) -> None:
        """Close it once the client has read its replies, or does not in a while."""
        if self._ending:
            return
        self._ending = True
        self._frames.clear()
        if not self._made:
            return
        self._transport.close()
        self._loop.call_later(_LAST_WORD_SECONDS, self._transport.abort)

    def send_notice(self, message: CommandGiven) -> None:
        """Send a notice that must not be lost; a client that leaves too much unread is closed."""
        if self._ending or not self._made:
            return
        if self._transport.get_write_buffer_size() > self._limits.unread_bytes:
            self.end()
            return
        for part in self._encoded(Notice(message)):
            self._transport.write(part)

    def send_event(self, make: Callable[[int], bytes]) -> None:
        """Send an event, unless the client is behind with reading; it is told how many it missed.

        Args:
            make: the event's frame, of how many were lost before it.
        """
        if self._ending or not self._made:
            return
        if self._transport.get_write_buffer_size() > self._limits.unread_event_bytes:
            self.lose_events(1)
            return
        self._transport.write(make(self.lost_events))
        self.lost_events = 0

    def lose_events(self, count: int) -> None:
        """So many events are not sent; the next one says so."""
        self.lost_events += count
        self._service.counters.events_lost += count

    # Requests

    def _take_turn(self) -> None:
        """Begin requests, for a short time, as far as the bounds allow; then let others go on."""
        self._turn_due = False
        until = self._loop.time() + _TURN_SECONDS
        replies: list[bytes] = []
        size = 0
        while self._frames and not self._ending and self._may_begin(self._frames[0]):
            reply = self._begin(self._frames.popleft())
            if reply is not None:
                replies += reply
                size += sum(map(len, reply))
            if size > self._limits.unread_bytes or self._loop.time() > until:
                if self._frames:
                    self._turn_due = True
                    self._loop.call_soon(self._take_turn)
                break
        # After a failure that ends the connection, it is too late for them.
        if replies and not self._transport.is_closing():
            self._transport.write(b"".join(replies) if len(replies) > 1 else replies[0])
        self._steer()

    def _may_begin(self, frame: Frame) -> bool:
        if self._unread or len(self._under_way) >= self._limits.requests:
            return False
        return not self._bytes_under_way or (
            self._bytes_under_way + self._cost(frame) <= self._limits.request_bytes
        )

    def _cost(self, frame: Frame) -> int:
        if not isinstance(frame, Request):
            return 0
        return request_bytes(frame.message) + self._answers.reply_bytes(frame.message)

    def _begin(self, frame: Frame) -> list[bytes] | None:
        """Answer a request, or have it worked on."""
        if not isinstance(frame, Request) or not self._answers.understands(frame.message):
            number = frame.id if isinstance(frame, Request) else 0
            what = type(frame.message if isinstance(frame, Request) else frame).__name__
            self._refuse(number, ProtocolError(f"a client does not send {what} here"))
            return None
        if frame.id in self._under_way:
            self._refuse(frame.id, ProtocolError(f"request {frame.id} is under way already"))
            return None
        self._service.counters.requests += 1
        kind, began = type(frame.message).__name__, perf_counter()
        done = self._attempt(frame.id, partial(self._answers.answer, frame.message))
        if not isinstance(done, Job):
            self._service.times.ended(kind, began)
            return done
        started = _Started(frame.id, self._cost(frame), done, kind, began)
        self._under_way.add(frame.id)
        self._bytes_under_way += started.cost
        self._queued[done.waits].append(started)
        self._start_jobs(done.waits)
        return None

    def _attempt(self, number: int, work: Callable[[], Message | Job]) -> list[bytes] | Job:
        """What `work` comes to: a job, or the bytes of the reply or failure, in parts."""
        try:
            done = work()
            return done if isinstance(done, Job) else self._encoded(Reply(number, done))
        except KVPagerError as error:
            return self._failed(number, error)
        except Exception:  # noqa: BLE001  one request's fault ends neither the connection nor the sidecar
            _log.exception("request %d failed by a fault of the sidecar", number)
            return self._failed(number, KVPagerError("a fault of the sidecar, which its log tells of"))

    def _encoded(self, frame: Frame) -> list[bytes]:
        return encode_parts(frame, max_frame=self._service.max_frame)

    def _failed(self, number: int, error: KVPagerError) -> list[bytes]:
        self._service.counters.failures += 1
        return self._encoded(Failure(number, error))

    def _refuse(self, number: int, error: ProtocolError) -> None:
        """Say what is wrong with what came, and end the connection: nothing after it can be trusted."""
        self._service.counters.protocol_errors += 1
        self._transport.write(b"".join(self._encoded(Failure(number, error))))
        self.finish()

    def _steer(self) -> None:
        """Read on, or do not, by what is under way."""
        if self._ending:
            return
        reads = (
            not self._frames
            and not self._unread
            and len(self._under_way) < self._limits.requests
            and self._bytes_under_way < self._limits.request_bytes
        )
        if reads != self._reading and not self._transport.is_closing():
            self._reading = reads
            if reads:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    # Jobs

    def _start_jobs(self, waits: bool) -> None:
        queue = self._queued[waits]
        most = self._limits.waiting if waits else self._limits.working
        pool = self._threads.waiting if waits else self._threads.working
        while queue and self._running[waits] < most:
            started = queue.popleft()
            self._running[waits] += 1
            future = pool.submit(started.job.work)
            future.add_done_callback(partial(self._job_ended, started))

    def _job_ended(self, started: _Started, future: Future[Any]) -> None:
        """In the job's thread."""
        try:
            self._loop.call_soon_threadsafe(self._finish_job, started, future)
        except RuntimeError:  # the loop is closed: the sidecar has ended, and nobody is left to reply to
            _undo(started.job, future)

    def _instead(self, job: Job) -> None:
        """A job is never begun: what it was to end is ended all the same."""
        if job.instead is not None:
            with suppress(RuntimeError):  # the threads are gone: the store is about to close
                self._threads.working.submit(_quietly, job.instead)

    def _finish_job(self, started: _Started, future: Future[Any]) -> None:
        if future.cancelled():
            self._instead(started.job)
        self._running[started.job.waits] -= 1
        self._under_way.discard(started.id)
        self._bytes_under_way -= started.cost
        if self._over or self._transport.is_closing():
            _undo(started.job, future)
            return
        reply = self._attempt(started.id, lambda: started.job.finish(_result(future)))
        if isinstance(reply, Job):
            raise TypeError("a job ends in a reply")
        self._service.times.ended(started.kind, started.began)
        for part in reply:
            self._transport.write(part)
        self._start_jobs(started.job.waits)
        if not self._turn_due:
            self._take_turn()


def _result(future: Future[Any]) -> Any:
    if future.cancelled():
        raise ServiceUnavailableError("the sidecar is being stopped")
    return future.result()


def _quietly(work: Callable[[], object]) -> None:
    try:
        work()
    except ClosedError:
        pass  # it ended with the store
    except KVPagerError:
        _log.exception("what a lost connection had asked for could not be ended")


def _undo(job: Job, future: Future[Any]) -> None:
    if job.undo is None or future.cancelled() or future.exception() is not None:
        return
    with suppress(ClosedError):  # it ended with the store
        job.undo(future.result())
