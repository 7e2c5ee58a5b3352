"""Values that are made anew when somebody asks for them, and not more often than they are worth."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

__all__ = ["Aged", "Renewed"]

_T = TypeVar("_T")
_PATIENCE: Final = 0.03
"""Seconds that who asks waits for a new value where there is an older one."""


@dataclass(frozen=True)
class Aged(Generic[_T]):
    """A value as it was.

    Args:
        value: the value.
        began: when it was begun to be made, by `time.monotonic`.
        took: seconds that it took.
    """

    value: _T
    began: float
    took: float

    @property
    def age(self) -> float:
        """Seconds since it was so."""
        return max(0.0, time.monotonic() - self.began)


class Renewed(Generic[_T]):
    """A value that is made when it is asked for, at most once at a time.

    The last one is given until it is old. After that who asks waits a moment for a new one, and is given the
    last one where that takes longer; so asking again and again is always answered soon, and the first answer
    after a long time may be an old one, which says its age.

    Args:
        make: makes it.
        seconds: how long one is good enough.
        share: of the time, that making it may take: it is good enough for longer where making it takes long.
    """

    def __init__(self, make: Callable[[], Awaitable[_T]], seconds: float, *, share: float = 1.0) -> None:
        self._make = make
        self._seconds = seconds
        self._share = share
        self._last: Aged[_T] | None = None
        self._making: asyncio.Task[Aged[_T]] | None = None
        self._outdated = float("-inf")

    async def get(self, *, newest: bool = False) -> Aged[_T]:
        """The value.

        Args:
            newest: made after now; however long that takes.

        Raises:
            Exception: what making it failed with.
        """
        last, now = self._last, time.monotonic()
        if last is not None and not newest and last.began >= self._outdated:
            if last.age < max(self._seconds, last.took / self._share):
                return last
            made = await self._within(_PATIENCE)
            return made or last
        since = now if newest else self._outdated
        while True:
            made = await asyncio.shield(self._begun())
            if made.began >= since:
                return made

    def outdate(self) -> None:
        """Something was changed: who asks next waits for a value of after that."""
        self._outdated = time.monotonic()

    def forget(self) -> None:
        """The last value is of something else."""
        self._last = None

    async def settle(self) -> None:
        """Wait until none is being made."""
        if self._making is not None:
            await asyncio.wait([self._making])

    async def _within(self, seconds: float) -> Aged[_T] | None:
        making = self._begun()
        done, _ = await asyncio.wait([making], timeout=seconds)
        return making.result() if done else None

    def _begun(self) -> asyncio.Task[Aged[_T]]:
        making = self._making
        if making is None or making.done():
            making = self._making = asyncio.create_task(self._make_one())
            # Where nobody waits any more, what it failed with is told to who asks next.
            making.add_done_callback(lambda done: done.cancelled() or done.exception())
        return making

    async def _make_one(self) -> Aged[_T]:
        began = time.monotonic()
        value = await self._make()
        self._last = made = Aged(value, began, time.monotonic() - began)
        return made
