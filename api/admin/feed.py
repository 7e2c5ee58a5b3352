"""Events for whoever listens: of blocks, of parts that degrade, of the sidecar coming and going.

The sidecar is subscribed to, on a connection of its own, while somebody listens.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from itertools import count
from typing import Any, Final

from starlette.exceptions import HTTPException

from ...kvstore.events import BlockEvent
from ...tiers.errors import KVPagerError
from ..client_async import AsyncConnection
from .models import EventKind, StoreEvent, TierName
from .watch import Watch

__all__ = ["Feed"]

_GATHER_SECONDS: Final = 0.2
"""Events of blocks of one kind, tier and space are told together."""
_LOOK_SECONDS: Final = 1.0
"""Between looks at what is degraded."""
_ALIVE_SECONDS: Final = 10.0
"""After so long without an event a comment says that the stream is whole."""
_HEARING_SECONDS: Final = 2.0
_MOST_HASHES: Final = 16
_MOST_WAITING: Final = 256
"""Events that a slow listener has not read; later ones are dropped, and counted."""
_MOST_LISTENERS: Final = 32


@dataclass
class _Gathered:
    """Blocks to which the same happened."""

    blocks: int
    hashes: list[str]


class _Listener:
    """One stream."""

    def __init__(self) -> None:
        self._events: deque[StoreEvent] = deque()
        self._came = asyncio.Event()
        self._lost = 0

    def tell(self, event: StoreEvent) -> None:
        """Something happened."""
        if len(self._events) >= _MOST_WAITING:
            self._lost += 1
            return
        self._events.append(event.model_copy(update={"lost": event.lost + self._lost}))
        self._lost = 0
        self._came.set()

    def wake(self) -> None:
        """Wait no longer."""
        self._came.set()

    async def next(self) -> StoreEvent | None:
        """What happened next; None: nothing did for a while, or it was woken."""
        if not self._events:
            self._came.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_ALIVE_SECONDS):
                    await self._came.wait()
        return self._events.popleft() if self._events else None


class Feed:
    """Hands events to streams. Used on one event loop.

    Args:
        watch: knows what is degraded.
        connect: makes a connection to subscribe on.
    """

    def __init__(self, watch: Watch, connect: Callable[[], AsyncConnection]) -> None:
        self._watch = watch
        self._connect = connect
        self._listeners: set[_Listener] = set()
        self._gathered: dict[tuple[str, str, bytes], _Gathered] = {}
        self._numbers = count(1)
        self._task: asyncio.Task[None] | None = None
        self._ended = False
        self._hearing = asyncio.Event()

    def check_room(self) -> None:
        """Raise `HTTPException` where too many listen already."""
        if len(self._listeners) >= _MOST_LISTENERS:
            raise HTTPException(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{_MOST_LISTENERS} streams of events are open, and no more are served",
                {"Retry-After": "10"},
            )

    async def stream(self) -> AsyncIterator[str]:
        """Server-sent events, until who reads them goes away."""
        listener = _Listener()
        self._listeners.add(listener)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve())
        try:
            # The first line comes when what happens from now on will be heard, or the sidecar is away.
            with suppress(TimeoutError):
                async with asyncio.timeout(_HEARING_SECONDS):
                    await self._hearing.wait()
            yield "retry: 1000\n\n"
            while (event := await listener.next()) is not None or not self._ended:
                if event is None:
                    yield ": alive\n\n"
                    continue
                yield f"id: {next(self._numbers)}\nevent: {event.kind}\ndata: {event.model_dump_json()}\n\n"
        finally:
            self._listeners.discard(listener)
            if not self._listeners and self._task is not None:
                self._task.cancel()

    def end(self) -> None:
        """Every stream ends."""
        self._ended = True
        for listener in self._listeners:
            listener.wake()

    async def close(self) -> None:
        """End every stream, and hear no more."""
        self.end()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _serve(self) -> None:
        connection = self._connect()
        try:
            end = connection.subscribe(self._hear)
            with suppress(KVPagerError):
                await connection.wait_ready()
                # Answered after the subscription, which was asked for before.
                await connection.stats()
                self._hearing.set()
            looked = float("-inf")
            degraded: dict[str, str] = {}
            answers: bool | None = None
            while True:
                await asyncio.sleep(_GATHER_SECONDS)
                self._tell_gathered()
                if time.monotonic() - looked >= _LOOK_SECONDS:
                    looked = time.monotonic()
                    answers = await self._look(answers, degraded)
        finally:
            self._hearing.clear()
            with suppress(KVPagerError):
                end()
            await connection.close()

    def _hear(self, event: BlockEvent) -> None:
        key = event.kind.value, event.tier, event.space
        gathered = self._gathered.setdefault(key, _Gathered(0, []))
        gathered.blocks += len(event.hashes)
        room = _MOST_HASHES - len(gathered.hashes)
        gathered.hashes += [name.hex() for name in event.hashes[:room]]

    def _tell_gathered(self) -> None:
        gathered, self._gathered = self._gathered, {}
        for (kind, tier, space), blocks in gathered.items():
            self._tell(
                EventKind(kind),
                tier=TierName(tier),
                space=space.hex(),
                blocks=blocks.blocks,
                hashes=blocks.hashes,
            )

    async def _look(self, answered: bool | None, degraded: dict[str, str]) -> bool:
        """Tell what changed since the last look; returns whether the sidecar answers."""
        try:
            status = (await self._watch.facts()).value.status
        except KVPagerError as error:
            if answered is not False:
                self._tell(EventKind.DISCONNECTED, reason=str(error))
            return False
        if answered is False:
            self._tell(EventKind.CONNECTED)
        now = {one["part"]: one["reason"] for one in status["degraded"]}
        for part in degraded.keys() - now.keys():
            self._tell(EventKind.RECOVERED, part=part)
        for part in now.keys() - degraded.keys():
            self._tell(EventKind.DEGRADED, part=part, reason=now[part])
        degraded.clear()
        degraded.update(now)
        return True

    def _tell(self, kind: EventKind, **about: Any) -> None:
        event = StoreEvent(kind=kind, at=time.time(), **about)
        for listener in self._listeners:
            listener.tell(event)
