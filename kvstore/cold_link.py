"""The cold tier behind a store: which one there is just now, how it does, and who is calling it.

A tier may come and go while the store is used. Whoever calls one is counted (`ColdLink.use`), so that one
that goes is closed when nobody calls it any more, and nobody finds it closed.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..tiers.cold import ColdStatus, ColdTier, StatusArray

__all__ = ["ColdCondition", "ColdLink", "ColdState"]

_log = logging.getLogger(__name__)

_RETRY_SECONDS: Final = 1.0
_QUIET_SECONDS: Final = 2.0
"""Without any answer of a tier, before it is asked whether it is there."""


class ColdCondition(enum.StrEnum):
    """How a cold tier does."""

    READY = "ready"
    DOWN = "down"
    """It cannot be reached, or refuses."""
    STALLED = "stalled"
    """It does not answer in time."""
    FULL = "full"
    """It has no room, and keeps what it has."""


_WHY: Final = {
    ColdCondition.READY: "",
    ColdCondition.DOWN: "the cold tier cannot be reached, or refuses",
    ColdCondition.STALLED: "the cold tier does not answer in time",
    ColdCondition.FULL: "the cold tier is full, or too small: blocks that it does not take are not kept",
}


@dataclass(frozen=True)
class ColdState:
    """A cold tier as it is.

    Args:
        kind: ``redis`` or ``disk``.
        condition: how it does.
        since: since when it is ready, or in whichever way is not, seconds since 1970.
    """

    kind: str
    condition: ColdCondition
    since: float

    @property
    def reason(self) -> str:
        """What is wrong, in words; empty: nothing."""
        return _WHY[self.condition]


class ColdLink:
    """The cold tier of a store, or none. Used with the store's lock held, unless said otherwise.

    Args:
        tier: the tier, or None.
        changed: the store's lock, which is notified when calls of a tier have ended.

    Attributes:
        tier: the tier that there is; needs no lock to be looked at. Who calls it does so within `use`.
        went: whether there was one that was taken away: it may come back, and what is purged meanwhile is to
            be told to the next one.
    """

    def __init__(self, tier: ColdTier | None, changed: threading.Condition) -> None:
        self.tier = tier
        self._changed = changed
        self.went = False
        self._users = 0
        self._down = False
        """Whether it did not take one record of the last batch."""
        self._retry_at = 0.0
        self._begin()

    def _begin(self) -> None:
        """A tier is there that nobody has asked yet."""
        self._down = False
        self._retry_at = 0.0
        self._condition = ColdCondition.READY
        self._since = time.time()
        self._heard_at = time.monotonic()

    @contextmanager
    def use(self) -> Iterator[ColdTier | None]:
        """The tier, or None, for calls within; it is not closed before they have ended. Takes the lock."""
        with self._changed:
            tier = self.tier
            self._users += tier is not None
        try:
            yield tier
        finally:
            if tier is not None:
                with self._changed:
                    self._users -= 1
                    if not self._users:
                        self._changed.notify_all()

    # Which one there is

    def attach(self, tier: ColdTier) -> None:
        """A tier is there, where none was."""
        self.tier = tier
        self._begin()

    def detach(self) -> ColdTier:
        """Nobody is given the tier any more; returns it when the last call of it has ended."""
        tier, self.tier = self.tier, None
        if tier is None:
            raise TypeError("only a tier that is there can be taken away")
        self.went = True
        self._changed.notify_all()
        while self._users:
            self._changed.wait()
        return tier

    # How it does

    @property
    def takes(self) -> bool:
        """Whether a victim without a copy below should wait for one.

        Not from the first batch that the tier did not take until it takes one again: nobody waits for a tier
        that is being tried anew.
        """
        return self.tier is not None and not self._down

    @property
    def is_due(self) -> bool:
        """Whether the tier may be asked to take something: not at once after it did not. Needs no lock."""
        return time.monotonic() >= self._retry_at

    @property
    def is_quiet(self) -> bool:
        """Whether nothing was heard of the tier for a while. Needs no lock."""
        return self.tier is not None and time.monotonic() >= self._heard_at + _QUIET_SECONDS

    @property
    def state(self) -> ColdState | None:
        """The tier as it is; None where there is none."""
        if self.tier is None:
            return None
        return ColdState(self.tier.name, self._condition, self._since)

    def took(self, status: StatusArray) -> None:
        """A batch was written. One of which nothing was taken is the last for a while."""
        self._down = not (status == ColdStatus.OK).any()
        if self._down:
            self._retry_at = time.monotonic() + _RETRY_SECONDS
        if (status == ColdStatus.FULL).any():
            self._is(ColdCondition.FULL)
        else:
            self._hear(status)

    def heard(self, status: StatusArray) -> None:
        """A batch was read, or the tier was asked whether it is there."""
        # Of what it has no room for, only a write tells.
        if self._condition is not ColdCondition.FULL or not _answers(status):
            self._hear(status)

    def _hear(self, status: StatusArray) -> None:
        if not len(status):
            return
        if _answers(status):
            self._is(ColdCondition.READY)
        elif (status == ColdStatus.LATE).all():
            self._is(ColdCondition.STALLED)
        else:
            self._is(ColdCondition.DOWN)

    def _is(self, condition: ColdCondition) -> None:
        self._heard_at = time.monotonic()
        if condition is self._condition:
            return
        if condition is ColdCondition.FULL:
            _log.warning("%s", _WHY[condition])
        # A tier that stalled is soon called down: it is the same trouble.
        if ColdCondition.READY in (condition, self._condition):
            self._since = time.time()
        self._condition = condition


def _answers(status: StatusArray) -> bool:
    """Whether one of a batch was answered, whatever the answer was."""
    return bool(np.isin(status, (ColdStatus.LATE, ColdStatus.UNAVAILABLE), invert=True).any())
