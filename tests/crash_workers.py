"""Processes for the tests of a killed sidecar: the sidecar itself, writers, readers, and holders of handles.

They are forked from a process that has everything imported, so that hundreds of them are started in a test.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import socket
import struct
import sys
import time
from collections import deque
from multiprocessing.connection import Connection as Pipe
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from kvpager.api.cli import main
from kvpager.api.client import Connection, connect
from kvpager.api.messages import Leased, Match, Reserve, Reserved
from kvpager.api.remote_space import RemoteSpace
from kvpager.kvstore.handles import Lease
from kvpager.tests.raw_client import LAYOUT, RawClient
from kvpager.tiers.errors import ServiceUnavailableError, StaleHandleError

__all__ = ["Holder", "Killable", "Worker", "block_of", "context", "name_of", "read", "write"]

KEPT: Final = 0
"""Blocks that are committed."""
NEVER: Final = 1
"""Blocks that are reserved and written, and never committed."""
_START_SECONDS: Final = 60.0
_TIMEOUT: Final = 20.0


def context() -> ForkServerContext:
    """What processes are made of."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload([__name__])
    return made


def name_of(kind: int, writer: int, serial: int) -> bytes:
    """A block's hash."""
    return struct.pack(">BBxxQxxxx", kind, writer, serial)


def block_of(name: bytes) -> npt.NDArray[np.uint8]:
    """The right bytes of a block."""
    seed = np.frombuffer(hashlib.blake2b(name).digest(), np.uint8)
    return np.resize(seed, LAYOUT.block_bytes)


class Killable:
    """``kvpager serve`` in a process, on an arena that outlives it."""

    def __init__(self, path: Path, arena: Path, host_bytes: int) -> None:
        self.path = path
        self.arena = arena
        self._arguments = [
            "serve",
            f"--socket={path}",
            f"--arena={arena}",
            f"--host-bytes={host_bytes}",
            "--admin=off",
        ]
        self._process: ForkServerProcess | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        assert self._process.pid is not None
        return self._process.pid

    def start(self, *more: str) -> None:
        """Returns when it listens."""
        arguments = [*self._arguments, "--quiet", *more]
        self._process = process = context().Process(target=_serve, args=(arguments,), daemon=True)
        process.start()
        until = time.monotonic() + _START_SECONDS
        while True:
            with socket.socket(socket.AF_UNIX) as trial:
                if trial.connect_ex(str(self.path)) == 0:
                    return
            assert process.is_alive(), f"the sidecar ended with {process.exitcode}"
            assert time.monotonic() < until, "the sidecar does not listen"
            time.sleep(0.003)

    def kill(self) -> None:
        """It ends without a word."""
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def terminate(self) -> int | None:
        """It is asked to end; returns its exit code."""
        assert self._process is not None
        self._process.terminate()
        self._process.join(60)
        return self._process.exitcode


def _serve(arguments: list[str]) -> None:
    sys.exit(main(arguments))


class Worker:
    """A process that works until it is told to stop, and then tells what it did."""

    def __init__(self, work: Any, *arguments: Any) -> None:
        self._pipe, theirs = context().Pipe()
        self.process = context().Process(target=_work, args=(work, theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()
        assert self._pipe.poll(_START_SECONDS), "a worker does not start"
        assert self._pipe.recv() == "ready"

    def begin(self, *what: Any) -> None:
        """Work, until `stop`."""
        self._pipe.send(what)

    def stop(self) -> Any:
        """What it did since `begin`."""
        self._pipe.send(None)
        assert self._pipe.poll(_START_SECONDS), "a worker does not answer"
        result = self._pipe.recv()
        if isinstance(result, BaseException):
            raise result
        return result

    def end(self) -> None:
        """It gives everything back and ends."""
        self._pipe.close()
        self.process.join(_START_SECONDS)
        assert self.process.exitcode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


def _work(work: Any, pipe: Pipe, path: str, number: int) -> None:
    rng = random.Random(number)
    with connect(path, timeout=_TIMEOUT, strict=True, name=f"{work.__name__} {number}") as client:
        space = client.space(LAYOUT)
        doer = work(client, space, number, rng)
        pipe.send("ready")
        while True:
            try:
                what = pipe.recv()
            except EOFError:
                break
            try:
                doer.begin(*what)
                while not pipe.poll():
                    try:
                        doer.step()
                    except (ServiceUnavailableError, StaleHandleError):
                        pipe.poll(0.005)  # it is dead just now
                pipe.recv()
                # Nothing that was held is ever lost: the memory and what is known of it outlive the sidecar.
                assert client.counters.lost == 0, client.lost
                result = doer.result()
            except BaseException as error:  # noqa: BLE001  who started it is told
                result = RuntimeError(f"{work.__name__} {number}: {error!r}")
            pipe.send(result)


class write:  # noqa: N801  a kind of work
    """Writes blocks, some of which it never commits. Tells how far it came, and what was acknowledged."""

    def __init__(self, client: Connection, space: RemoteSpace, number: int, rng: random.Random) -> None:
        self._space = space
        self._number = number
        self._rng = rng
        self._serial = 0
        self._acknowledged: list[bytes] = []
        self._quota = 0

    def begin(self, quota: int) -> None:
        self._acknowledged = []
        self._quota = quota

    def step(self) -> None:
        if len(self._acknowledged) >= self._quota:
            time.sleep(0.002)
            return
        first, kept = self._serial, self._rng.randint(1, 8)
        self._serial += kept + 2
        asked = [name_of(KEPT, self._number, first + at) for at in range(kept)]
        asked += [name_of(NEVER, self._number, first + kept + at) for at in range(2)]
        with self._space.reserve(asked, wait=1.0) as reservation:
            positions = reservation.new
            # Wrong first: whoever reads a block too early sees it.
            for at, view in zip(positions.tolist(), reservation.blocks, strict=True):
                view[:] = ~block_of(asked[at])
            for at, view in zip(positions.tolist(), reservation.blocks, strict=True):
                view[:] = block_of(asked[at])
            chosen = positions[positions < kept]
            reservation.commit(chosen)
            self._acknowledged += [asked[at] for at in chosen.tolist()]

    def result(self) -> tuple[int, list[bytes]]:
        return self._serial, self._acknowledged


class read:  # noqa: N801  a kind of work
    """Reads what it finds, under leases that it keeps for a while. Tells how many blocks were right."""

    def __init__(self, client: Connection, space: RemoteSpace, number: int, rng: random.Random) -> None:
        self._space = space
        self._rng = rng
        self._held: deque[tuple[list[bytes], Lease]] = deque()
        self._right = 0
        self._serials = 0

    def begin(self, serials: int) -> None:
        """`serials`: how far writers may come."""
        self._serials = serials

    def step(self) -> None:
        writer, first = self._rng.randint(0, 1), self._rng.randrange(self._serials)
        assert not len(self._space.match([name_of(NEVER, writer, first)])), "never committed, and found"
        asked = [name_of(KEPT, writer, first + at) for at in range(8)]
        lease = self._space.match(asked)
        self._held.append((asked, lease))
        self._check(*self._held[-1])
        if len(self._held) > 6:
            asked, lease = self._held.popleft()
            self._check(asked, lease)
            lease.release()

    def _check(self, asked: list[bytes], lease: Lease) -> None:
        for name, block in zip(asked, lease.blocks, strict=False):
            assert (block == block_of(name)).all(), "wrong bytes"
            self._right += 1

    def result(self) -> int:
        for asked, lease in self._held:
            self._check(asked, lease)
        return self._right


class Holder:
    """A process that leases and reserves, and then does nothing.

    Attributes:
        leased, reserved: what it got.
    """

    def __init__(
        self, path: Path, group: bytes, leases: tuple[bytes, ...], reserves: tuple[bytes, ...]
    ) -> None:
        self._pipe, theirs = context().Pipe()
        arguments = theirs, str(path), group, leases, reserves
        self.process = context().Process(target=_hold, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        assert self._pipe.poll(_START_SECONDS)
        self.leased, self.reserved = self._pipe.recv()

    def pause(self) -> None:
        """It does nothing any more, and does not know it."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def read(self) -> bytes:
        """The leased blocks as it sees them."""
        self._pipe.send(None)
        assert self._pipe.poll(_START_SECONDS)
        data: bytes = self._pipe.recv()
        return data

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def __enter__(self) -> Holder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._pipe.close()


def _hold(
    pipe: Pipe, path: str, group: bytes, leases: tuple[bytes, ...], reserves: tuple[bytes, ...]
) -> None:
    with RawClient(path, group) as client:
        space = client.open()
        leased: Leased = client.call(Match(space, leases, 0.0), Leased)
        reserved: Reserved = client.call(Reserve(space, reserves, 5.0), Reserved)
        assert client.descriptor is not None
        arena = np.memmap(os.fdopen(os.dup(client.descriptor), "r+b"), np.uint8)
        size, extent = LAYOUT.block_bytes, client.welcome.extent_bytes

        def block(slot: int) -> npt.NDArray[np.uint8]:
            place = slot // (extent // size) * extent + slot % (extent // size) * size
            return arena[place : place + size]

        for slot in reserved.slots[reserved.statuses == 0].tolist():
            block(slot)[:] = 0xEE
        pipe.send((leased, reserved))
        while True:
            pipe.recv()
            pipe.send(b"".join(block(slot).tobytes() for slot in leased.slots.tolist()))
