"""A sidecar in a thread, and a client of it that is a plain socket and the wire protocol, nothing else."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from kvpager.api.messages import (
    Commit,
    Done,
    GetStats,
    Hello,
    Message,
    OpenSpace,
    Reserve,
    Reserved,
    SpaceOpened,
    Stats,
    Welcome,
)
from kvpager.api.sidecar import Sidecar
from kvpager.api.wire import MAGIC, Failure, Frame, FrameReader, Reply, Request, encode
from kvpager.kvstore.handles import ReserveStatus
from kvpager.kvstore.host import HostStore
from kvpager.tiers.layout import KVLayout

__all__ = [
    "ARENA",
    "LAYOUT",
    "RawClient",
    "Running",
    "await_true",
    "counts",
    "hello",
    "names",
    "open_space",
    "store",
]

LAYOUT = KVLayout(1, 1, 64)
"""Blocks of 4 KiB."""
ARENA = 8 << 20

_M = TypeVar("_M", bound=Message)


def names(first: int, count: int) -> tuple[bytes, ...]:
    """Hashes that are told apart by a number, and by their first bytes, as digests are."""
    return tuple(number.to_bytes(16, "little") for number in range(first, first + count))


def hello(
    group: bytes = b"g" * 16,
    client: bytes = bytes(16),
    *,
    magic: str = MAGIC,
    newest: int = 1,
    oldest: int = 1,
    token: str = "",
) -> Hello:
    return Hello(magic, newest, oldest, group, os.getpid(), token, "test", client)


def open_space(layout: KVLayout = LAYOUT, shard: str = "", tenant: str = "") -> OpenSpace:
    return OpenSpace(
        layout.num_layers,
        layout.num_kv_heads,
        layout.head_dim,
        layout.block_size,
        layout.dtype,
        str(layout.format),
        layout.planes,
        layout.window or 0,
        layout.scale_bytes,
        shard,
        tenant,
    )


class RawClient:
    """A blocking connection; `descriptor` is the arena's.

    `where` is a Unix socket's path, or a port of this machine; `token` and `tls` are for the latter.
    """

    def __init__(
        self,
        where: str | Path | int,
        group: bytes = b"g" * 16,
        client: bytes = bytes(16),
        *,
        greet: bool = True,
        token: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._local = not isinstance(where, int)
        self.socket = socket.socket(socket.AF_UNIX if self._local else socket.AF_INET, socket.SOCK_STREAM)
        self.socket.settimeout(30)
        try:
            self.socket.connect(("127.0.0.1", where) if isinstance(where, int) else str(where))
            if tls is not None:
                self.socket = tls.wrap_socket(self.socket, server_hostname="localhost")
        except OSError:
            self.socket.close()
            raise
        self._reader = FrameReader()
        self._frames: list[Frame] = []
        self._next = 0
        self.descriptor: int | None = None
        if greet:
            try:
                self.welcome = self.greet(hello(group, client, token=token))
            except BaseException:
                self.close()
                raise

    def greet(self, message: Message) -> Welcome:
        """The handshake; takes the descriptor that comes with the reply."""
        self.socket.sendall(encode(Request(7, message)))
        if self._local:
            data, descriptors, _, _ = socket.recv_fds(self.socket, 1 << 16, 4)
            self._frames += self._reader.feed(data)
            if descriptors:
                (self.descriptor,) = descriptors
        frame = self.receive()
        if isinstance(frame, Failure):
            raise frame.error
        assert isinstance(frame, Reply)
        assert frame.id == 7
        assert isinstance(frame.message, Welcome)
        return frame.message

    def send(self, message: Message, number: int | None = None) -> int:
        if number is None:
            self._next += 1
            number = self._next
        self.socket.sendall(encode(Request(number, message)))
        return number

    def receive(self) -> Frame:
        """The next frame; EOFError where the connection is closed."""
        while not self._frames:
            data = self.socket.recv(1 << 20)
            if not data:
                raise EOFError
            self._frames += self._reader.feed(data)
        return self._frames.pop(0)

    def call(self, message: Message, kind: type[_M] | None = None) -> Any:
        """The reply to a request, its failure raised."""
        number = self.send(message)
        frame = self.receive()
        if isinstance(frame, Failure):
            assert frame.id == number
            raise frame.error
        assert isinstance(frame, Reply)
        assert frame.id == number
        if kind is not None:
            assert isinstance(frame.message, kind)
        return frame.message

    def open(self, layout: KVLayout = LAYOUT, shard: str = "", tenant: str = "") -> int:
        number: int = self.call(open_space(layout, shard, tenant), SpaceOpened).space
        return number

    def close(self) -> None:
        self.socket.close()
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Running:
    """A sidecar on a loop of its own thread, until the end of a ``with``; then its books must balance."""

    def __init__(self, path: Path, host: HostStore, **settings: Any) -> None:
        self.path = path
        self.host = host
        self._settings = settings

    def __enter__(self) -> Running:
        # Memory comes in the background, and a test that finds none of it yet is granted nothing.
        assert self.host.arena.wait_ready(self.host.arena.num_extents, timeout=30.0)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

        async def start() -> Sidecar:
            sidecar = Sidecar(self.host, self.path, **self._settings)
            await sidecar.start()
            return sidecar

        try:
            self.sidecar = asyncio.run_coroutine_threadsafe(start(), self.loop).result(30)
        except BaseException:
            self._stop()
            raise
        return self

    @property
    def port(self) -> int:
        """The TCP port, of a sidecar that has one."""
        port = self.sidecar.port
        assert port is not None
        return port

    def stop(self, drain: float = 0.0) -> int:
        return asyncio.run_coroutine_threadsafe(self.sidecar.close(drain), self.loop).result(60)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            self._stop()
        if kind is None:
            self.host.check_integrity()

    def _stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


def store(client: RawClient, space: int, first: int, count: int) -> Reserved:
    """Reserve and commit blocks, without a byte written. A new sidecar has its memory soon."""
    granted: Reserved = client.call(Reserve(space, names(first, count), 20.0), Reserved)
    assert granted.statuses.tolist() == [ReserveStatus.NEW] * count
    client.call(Commit(space, granted.slots, granted.generations), Done)
    return granted


def await_true(check: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until
        time.sleep(0.005)


def counts(client: RawClient) -> dict[str, int]:
    values: dict[str, int] = client.call(GetStats(), Stats).values["sidecar"]
    return values
