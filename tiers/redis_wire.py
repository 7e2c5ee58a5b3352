"""One connection to a Redis server that moves payloads between the socket and the caller's buffers.

redis-py connects, negotiates TLS and authenticates. Its connections take the reply parser as an argument
(`parser_class`); the parser given here hands a bulk string straight to a buffer with `recv_into`, and a
command is written as a scatter list with `sendmsg`, so that no payload is ever copied in Python. Every wait
ends at the wire's `until`, a reading of `time.monotonic()`.

The protocol is RESP2 (https://redis.io/docs/latest/develop/reference/protocol-spec/). What a server sends is
believed in nothing: lengths, nesting and line lengths are bounded before memory is taken.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from redis._parsers import BaseParser
from redis.exceptions import RedisError, ResponseError

from .errors import ColdTierUnavailableError

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

__all__ = ["CONNECT_ERRORS", "Reply", "ReplyError", "Wire", "describe", "pack"]

_BUFFER_BYTES: Final = 16 << 10
_MAX_REPLY_BYTES: Final = 1 << 20
_MAX_REPLY_ITEMS: Final = 1 << 17
_MAX_DEPTH: Final = 6
_MAX_DIGITS: Final = 12
_BULK_LINE_BYTES: Final = 10
"""The line before a value of 1 to 9 MiB, end included."""
_TLS_CHUNK: Final = 256 << 10
_SKIP_BYTES: Final = 64 << 10
_TIMER_SLACK: Final = 0.005
_WAITALL: Final = int(socket.MSG_WAITALL)
_TIMEVAL: Final = struct.Struct("ll")


class ReplyError(str):
    """An error reply, such as ``OOM command not allowed``, without its leading dash."""

    __slots__ = ()

    @property
    def code(self) -> str:
        """The first word."""
        return self.split(" ", 1)[0]


Reply: TypeAlias = "bytes | int | ReplyError | list[Reply] | None"


def pack(*arguments: bytes) -> bytes:
    """One command as RESP bytes."""
    pieces = [b"*%d\r\n" % len(arguments)]
    pieces += [b"$%d\r\n%s\r\n" % (len(argument), argument) for argument in arguments]
    return b"".join(pieces)


class _Replies(BaseParser):
    """Reads replies from a socket through a small buffer; payloads bypass it.

    Raises TimeoutError at `until`, OSError where the connection breaks, `ColdTierUnavailableError` where
    what arrives is not RESP2 within the bounds. After any of these the stream is out of step.
    """

    def __init__(self) -> None:
        self.sock: Any = None
        self.kernel_timeouts = False
        self._armed_for = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}
        self.until = 0.0
        self.active_at = 0.0
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._low = 0
        self._high = 0
        self._items = 0

    # What redis-py calls while it connects.

    def on_connect(self, connection: Any) -> None:
        self.sock = connection._sock  # as every parser of redis-py does
        self.kernel_timeouts = False
        self._armed_for = dict.fromkeys(self._armed_for, 0.0)
        self._low = self._high = 0

    def on_disconnect(self) -> None:
        self.sock = None
        self._low = self._high = 0

    def can_read(self, timeout: float = 0) -> bool:
        del timeout
        return self._low < self._high

    def read_response(self, disable_decoding: bool = False, **_: object) -> Any:
        del disable_decoding
        reply = self.read_reply()
        if not isinstance(reply, ReplyError):
            return reply
        error: Exception = self.parse_error(str(reply))  # type: ignore[no-untyped-call]
        if isinstance(error, ResponseError):
            return error
        raise error

    # Reading.

    def receive(self, view: memoryview) -> int:
        """Some bytes, at least one, straight from the socket."""
        return self._receive(self.armed(socket.SO_RCVTIMEO), view, 0)

    def armed(self, option: int) -> Any:
        """The socket, its waits to receive or to send limited by the deadline."""
        remaining = self.until - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the deadline has passed")
        if self.sock is None:
            raise ConnectionResetError("not connected")
        if not self.kernel_timeouts:
            self.sock.settimeout(remaining)
        elif not 0 <= self._armed_for[option] - remaining < _TIMER_SLACK:
            # Zero would mean no limit.
            seconds, micros = divmod(max(1, int(remaining * 1e6)), 1_000_000)
            self.sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(seconds, micros))
            self._armed_for[option] = remaining
        return self.sock

    def _receive(self, sock: Any, view: memoryview, flags: int) -> int:
        try:
            count: int = sock.recv_into(view, 0, flags)
        except BlockingIOError:
            raise TimeoutError("the deadline has passed") from None
        if count == 0:
            raise ConnectionResetError("the server closed the connection")
        self.active_at = time.monotonic()
        return count

    def _fill(self, limit: int = _BUFFER_BYTES) -> None:
        if self._low == self._high:
            self._low = self._high = 0
        elif self._high == _BUFFER_BYTES:
            rest = self._high - self._low
            self._buffer[:rest] = self._buffer[self._low : self._high]
            self._low, self._high = 0, rest
        self._high += self.receive(self._view[self._high : self._high + limit])

    def read_line(self, limit: int = _BUFFER_BYTES) -> bytes:
        """One line without its end, reading at most `limit` bytes at a time from the socket."""
        while True:
            end = self._buffer.find(b"\r\n", self._low, self._high)
            if end >= 0:
                line = bytes(self._view[self._low : end])
                self._low = end + 2
                return line
            if self._high - self._low >= _BUFFER_BYTES:
                raise ColdTierUnavailableError("not the Redis protocol: a line without end")
            self._fill(limit)

    def read_lines(self, count: int) -> list[bytes]:
        """`count` lines without their ends."""
        lines: list[bytes] = []
        while len(lines) < count:
            end = self._buffer.rfind(b"\r\n", self._low, self._high)
            if end < 0:
                lines.append(self.read_line())
                continue
            found = bytes(self._view[self._low : end]).split(b"\r\n", count - len(lines))
            if len(lines) + len(found) > count:
                end -= len(found.pop())
                self._low = end
            else:
                self._low = end + 2
            lines += found
        return lines

    def read_into(self, view: memoryview) -> None:
        """Fill the view: first from the buffer, then from the socket directly."""
        done = min(len(view), self._high - self._low)
        view[:done] = self._view[self._low : self._low + done]
        self._low += done
        flags = _WAITALL if self.kernel_timeouts else 0
        while done < len(view):
            done += self._receive(self.armed(socket.SO_RCVTIMEO), view[done:], flags)

    def read_end(self, limit: int = _BUFFER_BYTES) -> None:
        """The line end after a bulk string, and at most `limit` bytes of the reply that follows."""
        while self._high - self._low < 2:
            self._fill(2 + limit)
        if self._buffer[self._low : self._low + 2] != b"\r\n":
            raise ColdTierUnavailableError("not the Redis protocol: a bulk string without its end")
        self._low += 2

    def skip(self, count: int) -> None:
        """Read and forget."""
        scratch = memoryview(bytearray(min(count, _SKIP_BYTES)))
        while count > 0:
            piece = min(count, len(scratch))
            self.read_into(scratch[:piece])
            count -= piece

    def read_reply(self) -> Reply:
        """Any reply, of at most 1 MiB a string and 131,072 items."""
        self._items = 0
        return self._read_reply(0)

    def _read_reply(self, depth: int) -> Reply:
        line = self.read_line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return ReplyError(rest.decode("utf-8", "replace"))
        if kind == b":":
            return self.number(rest)
        if kind == b"$":
            size = self.number(rest)
            if size == -1:
                return None
            if not 0 <= size <= _MAX_REPLY_BYTES:
                raise ColdTierUnavailableError(f"a reply of {size} bytes where a short one belongs")
            value = bytearray(size)
            self.read_into(memoryview(value))
            self.read_end()
            return bytes(value)
        if kind == b"*":
            size = self.number(rest)
            if size == -1:
                return None
            self._items += size
            if depth >= _MAX_DEPTH or size < 0 or self._items > _MAX_REPLY_ITEMS:
                raise ColdTierUnavailableError("a reply that is nested too deep or too long")
            return [self._read_reply(depth + 1) for _ in range(size)]
        raise ColdTierUnavailableError(f"not the Redis protocol: {line[:40]!r}")

    @staticmethod
    def number(text: bytes) -> int:
        """A decimal number of a sane length."""
        digits = text[1:] if text[:1] == b"-" else text
        if not digits.isdigit() or len(digits) > _MAX_DIGITS:
            raise ColdTierUnavailableError(f"not the Redis protocol: {text[:40]!r} is no number")
        return int(text)


class Wire:
    """A connection. Used by one thread at a time.

    Its calls raise TimeoutError at `until`, and `ColdTierUnavailableError` where the connection breaks or
    the server does not speak RESP2; the wire is of no more use then and must be closed.

    Args:
        connection_class: a connection class of redis-py.
        options: what to construct it with.
    """

    def __init__(self, connection_class: type[AbstractConnection], options: dict[str, Any]) -> None:
        self._replies = _Replies()
        self._connection: Any = connection_class(
            **options, protocol=2, parser_class=lambda socket_read_size: self._replies
        )
        self._scatter = False
        self.round_trip = 0.0
        """Seconds that a PING took when the connection was made."""

    @property
    def idle_seconds(self) -> float:
        """Seconds since a byte moved, or since `limit`: tells a slow server from one that stalls."""
        return time.monotonic() - self._replies.active_at

    def limit(self, until: float) -> None:
        """Every wait from now on ends at this reading of `time.monotonic()`."""
        self._replies.until = until
        self._replies.active_at = time.monotonic()

    def connect(self, timeout: float) -> None:
        """Connect, negotiate, authenticate, and hear one PONG. Each step may take `timeout` seconds.

        Raises:
            RedisError, OSError, ValueError: as redis-py and the standard library raise them.
            ColdTierUnavailableError: what answers is not a Redis, or it is still loading.
        """
        self._connection.socket_connect_timeout = timeout
        self._connection.socket_timeout = timeout
        self.limit(time.monotonic() + timeout)
        self._connection.connect()
        sock = self._replies.sock
        self._scatter = not isinstance(sock, ssl.SSLSocket)
        if self._scatter:
            # One system call for a whole value, in which the kernel keeps the time (`man 7 socket`,
            # SO_RCVTIMEO), instead of a poll and a call for each piece that arrives, between which
            # lanes would contend for the interpreter lock.
            sock.settimeout(None)
            self._replies.kernel_timeouts = True
        self.limit(time.monotonic() + timeout)
        began = time.monotonic()
        answer = self.call(b"PING")
        self.round_trip = time.monotonic() - began
        if isinstance(answer, ReplyError):
            raise self._replies.parse_error(str(answer))  # type: ignore[no-untyped-call]
        if answer != b"PONG":
            raise ColdTierUnavailableError(f"answers PING with {answer!r}")

    def close(self) -> None:
        """Close the socket."""
        self._connection.disconnect()

    def call(self, *arguments: bytes) -> Reply:
        """Send one command and read its reply."""
        self.send([pack(*arguments)])
        return self.read_reply()

    def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Write the buffers one after another, without joining them."""
        try:
            if self._scatter:
                self._send_scatter([memoryview(buffer) for buffer in buffers])
            else:
                for buffer in buffers:
                    self._send_whole(memoryview(buffer))
        except TimeoutError:
            raise
        except BlockingIOError:
            raise TimeoutError("the deadline has passed") from None
        except OSError as error:
            raise ColdTierUnavailableError(f"while writing: {error}") from error

    def _send_scatter(self, buffers: list[memoryview]) -> None:
        left = sum(map(len, buffers))
        while True:
            sent = self._replies.armed(socket.SO_SNDTIMEO).sendmsg(buffers)
            self._replies.active_at = time.monotonic()
            left -= sent
            if not left:
                return
            while sent >= len(buffers[0]):
                sent -= len(buffers.pop(0))
            buffers[0] = buffers[0][sent:]

    def _send_whole(self, buffer: memoryview) -> None:
        while len(buffer):
            buffer = buffer[self._replies.armed(socket.SO_SNDTIMEO).send(buffer[:_TLS_CHUNK]) :]
            self._replies.active_at = time.monotonic()

    def read_reply(self) -> Reply:
        """Any short reply (a string of at most 1 MiB)."""
        try:
            return self._replies.read_reply()
        except TimeoutError:
            raise
        except OSError as error:
            raise ColdTierUnavailableError(f"while reading: {error}") from error

    def read_numbers(self, count: int) -> list[int | ReplyError]:
        """The replies of `count` commands that each answer with a number."""
        try:
            lines = self._replies.read_lines(count)
        except TimeoutError:
            raise
        except OSError as error:
            raise ColdTierUnavailableError(f"while reading: {error}") from error
        return [self._number(line) for line in lines]

    def _number(self, line: bytes) -> int | ReplyError:
        if line[:1] == b":":
            return self._replies.number(line[1:])
        if line[:1] == b"-":
            return ReplyError(line[1:].decode("utf-8", "replace"))
        raise ColdTierUnavailableError(f"not the Redis protocol: {line[:40]!r} where a number belongs")

    def read_bulk(self, head: memoryview, body: memoryview, limit: int) -> int | ReplyError | None:
        """A bulk string, its beginning into `head` and what follows straight into `body`.

        Where its size is not exactly that of both, as much as fits of its beginning goes to `head`, the rest
        is read and forgotten, and `body` is not touched.

        Args:
            head, body: writable byte views.
            limit: a string longer than this breaks the connection off instead of being read through.

        Returns:
            The size of the string in bytes, None where there is none, or the error reply.
        """
        replies = self._replies
        # What is read before a large body is its beginning alone: the rest goes straight to its place.
        ahead = _BULK_LINE_BYTES + len(head) if len(body) >= _BUFFER_BYTES else _BUFFER_BYTES
        try:
            line = replies.read_line(ahead)
            if line[:1] == b"-":
                return ReplyError(line[1:].decode("utf-8", "replace"))
            if line[:1] != b"$":
                raise ColdTierUnavailableError(f"not a bulk string: {line[:40]!r}")
            size = replies.number(line[1:])
            if size == -1:
                return None
            if not 0 <= size <= limit:
                raise ColdTierUnavailableError(f"a value of {size} bytes, more than any record has")
            if size == len(head) + len(body):
                replies.read_into(head)
                replies.read_into(body)
            else:
                begun = min(size, len(head))
                replies.read_into(head[:begun])
                replies.skip(size - begun)
            replies.read_end(ahead)
        except TimeoutError:
            raise
        except OSError as error:
            raise ColdTierUnavailableError(f"while reading: {error}") from error
        return size


def describe(error: Exception) -> str:
    """What went wrong, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


CONNECT_ERRORS: Final = (RedisError, OSError, ValueError, ColdTierUnavailableError)
"""What `Wire.connect` may raise."""
