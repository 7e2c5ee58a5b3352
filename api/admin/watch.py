"""What the admin process knows of the sidecar: asked of it seldom, and read from its arena's records.

A look at a million blocks costs the sidecar nothing: a thread of this process reads the records.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from starlette.exceptions import HTTPException

from ...kvstore.clock import ClockReading
from ...tiers.errors import IntegrityError, ServiceUnavailableError
from ...tiers.record_file import RecordView
from ..client_async import AsyncConnection
from .forest import Tree, grow
from .occupancy import Occupancy, look
from .renewed import Aged, Renewed

__all__ = ["Facts", "FlowRate", "Watch"]

_T = TypeVar("_T")
_FACTS_SECONDS: Final = 0.25
_LOOK_SECONDS: Final = 1.0
_LOOK_SHARE: Final = 0.1
"""Of a core, that looking at records takes."""
_RATE_SECONDS: Final = 5.0
"""That a rate is of."""


@dataclass(frozen=True)
class Facts:
    """What the sidecar says of itself.

    Args:
        status: as of `Status`.
        stats: as of `Stats`.
        clients: as of `Clients`.
    """

    status: Mapping[str, Any]
    stats: Mapping[str, Any]
    clients: Mapping[str, Any]

    @cached_property
    def _clock(self) -> ClockReading:
        clock = self.status["clock"]
        return ClockReading(clock["now"], tuple((tick, age) for tick, age in clock["samples"]))

    def ages(self, ticks: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Seconds since ticks, float64 [n]; not numbers where they are not."""
        return self._clock.ages(ticks)


@dataclass(frozen=True)
class FlowRate:
    """How fast bytes move: lately, and at best; None: none did."""

    lately: float | None
    best: float | None


class _Rates:
    """Rates of counters of bytes."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, dict[str, int]]] = deque()
        self._best: dict[str, float] = {}

    def note(self, counters: dict[str, int]) -> None:
        now = time.monotonic()
        self._samples.append((now, counters))
        while len(self._samples) > 2 and now - self._samples[1][0] > _RATE_SECONDS:
            self._samples.popleft()
        for name in counters:
            rate = self._lately(name)
            if rate is not None:
                self._best[name] = max(rate, self._best.get(name, 0.0))

    def rate(self, name: str) -> FlowRate:
        return FlowRate(self._lately(name), self._best.get(name))

    def _lately(self, name: str) -> float | None:
        if len(self._samples) < 2:
            return None
        (began, before), (ended, after) = self._samples[0], self._samples[-1]
        moved = after.get(name, 0) - before.get(name, 0)
        # Less than before: the sidecar, or its cold tier, is another one.
        return moved / (ended - began) if moved > 0 and ended > began else None


class Watch:
    """Knows how the sidecar is. Used on one event loop.

    Args:
        connection: to the sidecar; as an operator, and strict.
    """

    def __init__(self, connection: AsyncConnection) -> None:
        self.connection = connection
        self._facts = Renewed(self._ask, _FACTS_SECONDS)
        self._occupancy = Renewed(lambda: self._read(look), _LOOK_SECONDS, share=_LOOK_SHARE)
        self._trees = Renewed(lambda: self._read(grow), _LOOK_SECONDS, share=_LOOK_SHARE)
        self._rates = _Rates()
        self._view: RecordView | None = None
        self._boot = ""
        self._following = asyncio.Lock()

    async def facts(self) -> Aged[Facts]:
        """What the sidecar says of itself.

        Raises:
            ServiceUnavailableError: it does not answer.
        """
        if not self.connection.ready:
            # What was so before it went away is not so now.
            self._facts.forget()
        return await self._facts.get()

    async def occupancy(self) -> Aged[Occupancy]:
        """What fills host memory.

        Raises:
            HTTPException: its memory has no records.
            ServiceUnavailableError: the sidecar does not answer.
        """
        await self._follow()
        return await self._occupancy.get()

    async def trees(self, *, newest: bool = False) -> Aged[list[Tree]]:
        """The prefixes that are resident.

        Args:
            newest: as they are now, however long that takes.

        Raises:
            HTTPException: its memory has no records.
            ServiceUnavailableError: the sidecar does not answer.
        """
        await self._follow()
        return await self._trees.get(newest=newest)

    def rate(self, name: str) -> FlowRate:
        """How fast the cold tier's ``put_bytes`` or ``get_bytes`` grow."""
        return self._rates.rate(name)

    def changed(self) -> None:
        """Something was changed: who looks next is told how it is after that."""
        for kept in (self._facts, self._occupancy, self._trees):
            kept.outdate()

    async def close(self) -> None:
        """Read no more."""
        for reading in (self._occupancy, self._trees):
            await reading.settle()
        if self._view is not None:
            self._view.close()
            self._view = None

    async def _ask(self) -> Facts:
        if not self.connection.ready:
            with suppress(ServiceUnavailableError):
                await self.connection.wait_ready(self.connection.timeout)
        status, stats, clients = await asyncio.gather(
            self.connection.status(), self.connection.stats(), self.connection.clients()
        )
        cold = stats.get("cold", {})
        self._rates.note({name: int(cold.get(name, 0)) for name in ("get_bytes", "put_bytes")})
        return Facts(status, stats, clients)

    async def _follow(self) -> None:
        """Have the records of the arena that the sidecar has now."""
        async with self._following:
            status = (await self.facts()).value.status
            if self._view is not None and self._boot == status["boot_id"]:
                return
            if not status["records"]:
                raise HTTPException(
                    HTTPStatus.CONFLICT, "the sidecar's memory has no records to look at (--arena=memory)"
                )
            await self.close()
            try:
                self._view = await asyncio.to_thread(RecordView, status["records"])
            except IntegrityError as error:
                raise ServiceUnavailableError(f"the arena's records cannot be read: {error}") from error
            self._boot = status["boot_id"]
            self._occupancy.forget()
            self._trees.forget()

    async def _read(self, how: Callable[[RecordView], _T]) -> _T:
        view = self._view
        if view is None:
            raise ServiceUnavailableError("the arena's records are another sidecar's by now")
        return await asyncio.to_thread(how, view)
