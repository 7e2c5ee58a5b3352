"""The sidecar's door for TCP: TLS, the first frame of each connection, and the bounds of both.

Whoever has not said the token is given little: a few seconds, 4 KiB, and one of a bounded number of places.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, cast

from ..tiers.errors import AccessDeniedError, KVPagerError, ProtocolError, TLSError
from .messages import Hello
from .remote_access import RemoteAccess, keep_alive
from .wire import Failure, Frame, FrameReader, Notice, encode

__all__ = ["RemoteDoor"]

_log = logging.getLogger(__name__)

_LENGTH: Final = struct.Struct("<I")
_ACCEPT_PAUSE: Final = 1.0
"""Seconds without new connections when descriptors have run out."""
_SHUTDOWN_SECONDS: Final = 1.0
"""For the other side to say that it read everything, when TLS is ended."""
_TLS_HANDSHAKE: Final = b"\x16\x03"
"""What a TLS client begins with."""


class _Greeting(asyncio.Protocol):
    """Takes the first frame of a connection, and nothing after it.

    Args:
        most: bytes of it.

    Attributes:
        frame: the frame, or why there is none.
        refused: the id of a request that is no frame, as far as it could be read; else 0.
        lost: whether the connection is over.
    """

    def __init__(self, most: int) -> None:
        self.frame: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self.refused = 0
        self.lost = False
        self._most = most
        self._held = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.frame.done():
            self.transport.abort()  # it reads no more until the first frame is answered
            return
        self._held += data
        try:
            frame = self._first()
        except ProtocolError as error:
            self._fail(error)
            return
        if frame is not None:
            self.transport.pause_reading()
            self.frame.set_result(frame)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self._fail(error or ConnectionResetError("closed in the first frame"))

    def _first(self) -> Frame | None:
        if self._held.startswith(_TLS_HANDSHAKE):
            raise ProtocolError("this port speaks no TLS")
        if len(self._held) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._held)
        if length > self._most:
            raise ProtocolError(f"the first frame has {length} bytes, a Hello {self._most} at most")
        if len(self._held) > _LENGTH.size + length:
            raise ProtocolError("nothing is sent after a Hello until it is answered")
        reader = FrameReader(self._most)
        try:
            frames = reader.feed(self._held)
        finally:
            self.refused = reader.refused
        return frames[0] if frames else None

    def _fail(self, error: Exception) -> None:
        if not self.frame.done():
            self.frame.set_exception(error)
            self.frame.exception()  # it is looked at, whether somebody waits or not


class RemoteDoor:
    """Listens on TCP and reads what clients say first. Lives on the loop's thread.

    Args:
        access: where, and who may come in.
        seconds: for TLS and the first frame together.
        most: bytes of the first frame.
        hello_of: the version to speak and the `Hello` of a first frame; raises `ProtocolError`.
        admit: takes the client in: id of the request, version, `Hello`, transport. Raises `KVPagerError`.
        refused: is called for everybody who does not come in.

    Raises:
        ConfigError: as of `RemoteAccess.open`.
    """

    def __init__(
        self,
        access: RemoteAccess,
        seconds: float,
        most: int,
        hello_of: Callable[[Frame], tuple[int, Hello]],
        admit: Callable[[int, int, Hello, asyncio.Transport], None],
        refused: Callable[[], None],
    ) -> None:
        self._access = access
        self._seconds = seconds
        self._most = most
        self._hello_of = hello_of
        self._admit = admit
        self._refused = refused
        self._told: set[str] = set()
        self._greetings: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._listening = access.open()
        self.port: int = self._listening[0].getsockname()[1]
        """The port that is listened on."""
        for listening in self._listening:
            self._accept_on(listening)

    @property
    def greets(self) -> bool:
        """Whether somebody is there who has not come in, and is not turned away yet."""
        return bool(self._greetings)

    def close(self) -> None:
        """Listen no more; whoever has not come in is turned away. Idempotent."""
        for listening in self._listening:
            self._loop.remove_reader(listening.fileno())
            listening.close()
        self._listening.clear()
        for greeting in tuple(self._greetings):
            greeting.cancel()

    def _accept_on(self, listening: socket.socket) -> None:
        if listening in self._listening:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        try:
            connected, _ = listening.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                _log.error("no connection over TCP can be taken: %s", error.strerror)
                self._loop.remove_reader(listening.fileno())
                self._loop.call_later(_ACCEPT_PAUSE, partial(self._accept_on, listening))
            return
        if len(self._greetings) >= self._access.max_clients:
            self._tell("crowd", f"{self._access.max_clients} others have not said the token yet")
            self._refused()
            connected.close()
            return
        connected.setblocking(False)
        greeting = self._loop.create_task(self._greet(connected))
        self._greetings.add(greeting)
        greeting.add_done_callback(self._greetings.discard)

    async def _greet(self, connected: socket.socket) -> None:
        """Read `Hello`, see whether it may come in; the transport is a `Connection`'s then."""
        greeting = _Greeting(self._most)
        transport: asyncio.Transport | None = None
        number = 0
        try:
            async with asyncio.timeout(self._seconds):
                keep_alive(connected)
                if self._access.tls is not None and not await self._begins_tls(connected):
                    raise TLSError("this port speaks TLS: kvpagers://")
                transport = await self._transport(connected, greeting)
                frame = await greeting.frame
            number = 0 if isinstance(frame, Notice) else frame.id
            if greeting.lost:
                raise ConnectionResetError("closed after the first frame")
            version, hello = self._hello_of(frame)
            if not self._access.admits(hello.token):
                raise AccessDeniedError(
                    "the token is not the sidecar's"
                    if hello.token
                    else "there is no token, and one is needed"
                )
            self._admit(number, version, hello, transport)
        except (TimeoutError, OSError) as error:  # it said nothing, is gone, or speaks no TLS
            if isinstance(error, ssl.SSLError):
                self._tell("TLS", f"TLS did not come about: {error.reason or error}")
            elif isinstance(error, TimeoutError):
                self._tell("silence", f"it said nothing in {self._seconds:g} seconds")
            self._turn_away(connected, transport)
        except KVPagerError as error:
            number = number or greeting.refused
            self._tell(type(error).__name__, str(error))
            if transport is None:
                with suppress(OSError):
                    connected.send(encode(Failure(number, error)))
                self._turn_away(connected, transport)
            else:
                transport.write(encode(Failure(number, error)))
                transport.close()
                self._loop.call_later(_SHUTDOWN_SECONDS, transport.abort)
                self._refused()
        except BaseException:
            self._turn_away(connected, transport)
            raise

    async def _begins_tls(self, connected: socket.socket) -> bool:
        """Whether what comes first, and stays to be read, is TLS."""
        came = asyncio.Event()
        self._loop.add_reader(connected.fileno(), came.set)
        try:
            await came.wait()
        finally:
            self._loop.remove_reader(connected.fileno())
        return _TLS_HANDSHAKE.startswith(connected.recv(len(_TLS_HANDSHAKE), socket.MSG_PEEK))

    async def _transport(self, connected: socket.socket, greeting: _Greeting) -> asyncio.Transport:
        if self._access.tls is None:
            made = await self._loop.connect_accepted_socket(lambda: greeting, connected)
        else:
            made = await self._loop.connect_accepted_socket(
                lambda: greeting,
                connected,
                ssl=self._access.tls,
                ssl_handshake_timeout=self._seconds,
                ssl_shutdown_timeout=_SHUTDOWN_SECONDS,
            )
        return made[0]

    def _turn_away(self, connected: socket.socket, transport: asyncio.Transport | None) -> None:
        self._refused()
        if transport is None:
            connected.close()
        else:
            transport.abort()

    def _tell(self, kind: str, why: str) -> None:
        """Log the first of each kind: who knocks at a door again and again fills no disk."""
        if kind not in self._told:
            self._told.add(kind)
            _log.warning("a client over TCP was refused, and later ones like it are only counted: %s", why)
