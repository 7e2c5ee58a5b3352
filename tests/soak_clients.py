"""Processes of many clients of one sidecar, each with connections of its own, that do all a client can do.

What they read is compared with what it must be, under every lease, when it is taken and when it ends.
"""

from __future__ import annotations

import asyncio
import random
import resource
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Final

import numpy as np
from kvpager.api.client_async import AsyncConnection, AsyncSpace, connect_async
from kvpager.kvstore.handles import Lease
from kvpager.tests.crash_workers import KEPT, NEVER, block_of, context, name_of
from kvpager.tests.raw_client import LAYOUT

__all__ = ["PINNED", "Crowd", "CrowdTold", "Figures", "chain_of", "figures_of"]

_CHAINS: Final = 300
_LENGTH: Final = 8
"""Chains that clients have in common, and blocks of one."""
PINNED: Final = 20
"""Chains that may be pinned: the others have room beside them."""
_TIMEOUT: Final = 20.0
_SECONDS: Final = 60.0
_MOST_HELD: Final = 5
"""Leases that a client has at a time."""


def chain_of(number: int) -> list[bytes]:
    """The names of a chain's blocks."""
    return [name_of(KEPT, number % 256, number << 8 | at) for at in range(_LENGTH)]


@dataclass(frozen=True)
class Figures:
    """What a process has.

    Args:
        descriptors: files and sockets that are open.
        threads: how many there are.
        anonymous: bytes of its own memory; a mapped arena is none.
        processor: seconds of processor time.
    """

    descriptors: int
    threads: int
    anonymous: int
    processor: float


def figures_of(process: int) -> Figures:
    """What a process of this machine has just now."""
    folder = Path(f"/proc/{process}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    # After the name, which may hold anything and ends at the last bracket.
    times = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
    return Figures(
        descriptors=sum(1 for _ in (folder / "fd").iterdir()),
        threads=int(status["Threads"]),
        anonymous=int(status["RssAnon"].split()[0]) << 10,
        processor=sum(map(int, times)) / 100,
    )


@dataclass(frozen=True)
class CrowdTold:
    """What a crowd did.

    Args:
        done: how often each operation was done.
        right: blocks that were read and right.
        lost: leases and reservations that clients on the socket lost.
        processor: seconds of processor time.
    """

    done: Counter[str]
    right: int
    lost: int
    processor: float


class Crowd:
    """A process of clients, at work until it is stopped or killed.

    Args:
        url: the sidecar's socket.
        tcp: where it listens.
        token: what it wants to be told there.
        seed: of what they do.
        local, remote: how many clients there are of either kind.
        pause: seconds that a client rests between two operations, on average.
    """

    def __init__(
        self, url: str, tcp: str, token: str, seed: int, local: int, remote: int, pause: float
    ) -> None:
        self._pipe, theirs = context().Pipe()
        arguments = theirs, url, tcp, token, seed, local, remote, pause
        self.process = context().Process(target=_run, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def await_all(self) -> None:
        """Wait until every client is connected."""
        assert self._pipe.poll(_SECONDS), "a crowd does not start"
        told = self._pipe.recv()
        assert told == "ready", told

    def check(self) -> None:
        """Nothing has gone wrong so far.

        Raises:
            RuntimeError: something has.
        """
        if self._pipe.poll():
            raise self._pipe.recv()

    def stop(self) -> CrowdTold:
        """Have everything given back, and the process end; returns what it did."""
        self._pipe.send(None)
        assert self._pipe.poll(_SECONDS), "a crowd does not stop"
        told: CrowdTold | BaseException = self._pipe.recv()
        if isinstance(told, BaseException):
            raise told
        self.process.join(_SECONDS)
        assert self.process.exitcode == 0
        self._pipe.close()
        return told

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


def _run(
    pipe: Pipe, url: str, tcp: str, token: str, seed: int, local: int, remote: int, pause: float
) -> None:
    try:
        told: object = asyncio.run(_all(pipe, url, tcp, token, seed, local, remote, pause))
    except BaseException as error:  # noqa: BLE001  who started it is told
        told = RuntimeError(f"the crowd of {seed}: {error!r} {_notes(error)}")
    pipe.send(told)


def _notes(error: BaseException) -> str:
    inside = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return ", ".join(map(repr, inside))


async def _all(
    pipe: Pipe, url: str, tcp: str, token: str, seed: int, local: int, remote: int, pause: float
) -> CrowdTold:
    clients = [
        _Client(url if at < local else tcp, "" if at < local else token, seed * 1000 + at, pause)
        for at in range(local + remote)
    ]
    for client in clients:
        await client.connect()
    pipe.send("ready")
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), stop.set)
    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(client.live(stop))
        await stop.wait()
    asyncio.get_running_loop().remove_reader(pipe.fileno())
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return CrowdTold(
        sum((client.done for client in clients), Counter()),
        sum(client.right for client in clients),
        sum(client.lost for client in clients[:local]),
        spent.ru_utime + spent.ru_stime,
    )


class _Client:
    """One client with a connection, which it gives up now and then."""

    def __init__(self, url: str, token: str, seed: int, pause: float) -> None:
        self.done: Counter[str] = Counter()
        self.right = 0
        self.lost = 0
        self._url = url
        self._token = token or None
        self._seed = seed
        self._pause = pause
        self._rng = random.Random(seed)
        self._serial = 0
        self._held: deque[tuple[list[bytes], Lease]] = deque()
        self._connection: AsyncConnection
        self._space: AsyncSpace

    async def connect(self) -> None:
        self._connection = await connect_async(
            self._url, name=f"client {self._seed}", timeout=_TIMEOUT, token=self._token
        )
        self._space = await self._connection.space(LAYOUT)

    async def live(self, stop: asyncio.Event) -> None:
        """Do one thing after another, and give everything back at the end."""
        operations: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self._match, 30),
            (self._store, 30),
            (self._release, 15),
            (self._give_up, 6),
            (self._abort, 5),
            (self._load, 4),
            (self._pin, 2),
            (self._unpin, 4),
            (self._evict, 2),
            (self._hint, 2),
            (self._note, 2),
            (self._purge, 1),
            (self._break, 2),
            (self._leave, 2),
        ]
        calls, weights = zip(*operations, strict=True)
        while not stop.is_set():
            (call,) = self._rng.choices(calls, weights)
            await call()
            self.done[call.__name__[1:]] += 1
            await asyncio.sleep(2 * self._pause * self._rng.random())
        await self._leave()

    # What clients do

    async def _match(self) -> None:
        asked = self._some()
        wait = self._rng.choice([None, None, 0.05])
        self._hold(asked, await self._space.match(asked, cold_deadline=wait))

    async def _load(self) -> None:
        asked = self._some()
        self._hold(asked, await self._space.load(asked, 0.2))

    async def _release(self) -> None:
        if self._held:
            self._end(self._rng.randrange(len(self._held)))

    async def _store(self) -> None:
        """Reserve blocks, write them, and commit most of them."""
        asked = self._some()
        with await self._space.reserve(asked, wait=self._rng.choice([0.0, 0.0, 0.1])) as reservation:
            new = reservation.new
            views = list(reservation.blocks)
            # Wrong first: whoever reads a block too early sees it.
            for at, view in zip(new.tolist(), views, strict=True):
                view[:] = ~block_of(asked[at])
            await asyncio.sleep(self._rng.choice([0.0, 0.02]))
            for at, view in zip(new.tolist(), views, strict=True):
                view[:] = block_of(asked[at])
            reservation.commit(new[: self._rng.randint(0, len(new))])
        await self._space.committed()

    async def _abort(self) -> None:
        """Reserve blocks that nobody ever commits: they are not found."""
        self._serial += 1
        never = [name_of(NEVER, self._seed % 256, self._serial)]
        with await self._space.reserve(never):
            assert not len(await self._space.match(never)), "it was not committed, and found"

    async def _give_up(self) -> None:
        """Ask for something and not wait for it."""
        asked = self._some()
        try:
            async with asyncio.timeout(self._rng.random() * 0.003):
                if self._rng.random() < 0.5:
                    self._hold(asked, await self._space.match(asked, cold_deadline=0.1))
                else:
                    (await self._space.reserve(asked, wait=0.1)).abort()
        except TimeoutError:
            self.done["given up"] += 1

    async def _pin(self) -> None:
        ttl = self._rng.choice([None, 0.5])
        await self._space.pin(chain_of(self._rng.randrange(PINNED)), ttl=ttl)

    async def _unpin(self) -> None:
        await self._space.unpin(chain_of(self._rng.randrange(PINNED)))

    async def _evict(self) -> None:
        await self._space.evict(self._rng.randint(1, 64))

    async def _hint(self) -> None:
        await self._space.hint(self._some(), wanted=self._rng.random() < 0.5)

    async def _note(self) -> None:
        name = self._rng.randbytes(1)
        if await self._space.put_note(name, name * 40):
            found = await self._space.get_note(name)
            assert found in (None, name * 40), "another note than was put"

    async def _purge(self) -> None:
        await self._space.purge(self._some(), deadline=5.0)

    async def _break(self) -> None:
        """The connection is torn, and made again by itself."""
        connected = self._connection._socket
        if connected is not None:
            connected.shutdown(2)
        if self._token is not None:
            # Leases of a remote client end with its connection: it has copies.
            while self._held:
                self._end(0)
        until = time.monotonic() + _TIMEOUT
        while self._connection._socket is connected and time.monotonic() < until:
            await asyncio.sleep(0.005)
        await self._connection.wait_ready()

    async def _leave(self) -> None:
        """Say goodbye, and come back as somebody else."""
        if self._rng.random() < 0.5:
            while self._held:
                self._end(0)
        self._held.clear()  # what was not given back is with the connection
        await self._connection.close()
        self.lost += self._connection.counters.lost
        await self.connect()

    # Inside

    def _some(self) -> list[bytes]:
        """The beginning of a chain; some are wanted more often than others."""
        chain = int(_CHAINS * self._rng.random() ** 2)
        return chain_of(chain)[: self._rng.randint(1, _LENGTH)]

    def _hold(self, asked: list[bytes], lease: Lease) -> None:
        self._held.append((asked, lease))
        self._check(asked, lease)
        if len(self._held) > _MOST_HELD:
            self._end(0)

    def _end(self, at: int) -> None:
        asked, lease = self._held[at]
        del self._held[at]
        self._check(asked, lease)
        lease.release()

    def _check(self, asked: list[bytes], lease: Lease) -> None:
        for name, block in zip(asked, lease.blocks, strict=False):
            assert np.array_equal(block, block_of(name)), "wrong bytes"
            self.right += 1
