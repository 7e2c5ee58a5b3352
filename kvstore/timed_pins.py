"""Pins that end by themselves: which there are in a space, and the clock that ends them."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Final

import numpy as np

from .handles import Generations
from .policy import Ids

__all__ = ["PinClock", "TimedPin", "TimedPins"]

_log = logging.getLogger(__name__)
_MOST_WAIT: Final = 3600.0


@dataclass(eq=False)
class TimedPin:
    """Blocks that were pinned together.

    Attributes:
        slots: int32 [n], those whose pin has not ended yet.
        generations: int64 [n].
        until: when it ends, by `time.monotonic`.
    """

    slots: Ids
    generations: Generations
    until: float


class TimedPins:
    """The timed pins of one space. Used with the store's lock held."""

    def __init__(self) -> None:
        self._pins: list[TimedPin] = []

    def add(self, pin: TimedPin) -> None:
        """These are pinned."""
        self._pins.append(pin)

    def take(self, pin: TimedPin) -> TimedPin:
        """A pin is over: what is left of it."""
        self._pins.remove(pin)
        return pin

    def end(self, slots: Ids) -> None:
        """One pin less on each of these: of several, the one that would end first."""
        left = slots
        for pin in sorted(self._pins, key=lambda one: one.until):
            if not len(left):
                return
            ended = np.isin(pin.slots, left)
            left = left[~np.isin(left, pin.slots)]
            pin.slots, pin.generations = pin.slots[~ended], pin.generations[~ended]


class PinClock:
    """Calls back when pins end, in a thread of its own, which there is from the first of them on."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def call_at(self, until: float, work: Callable[[], None]) -> None:
        """Call `work` then, by `time.monotonic`; not if this is closed before."""
        with self._changed:
            heapq.heappush(self._due, (until, next(self._serial), work))
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="kvpager-pins", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Call nothing any more. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._due or self._due[0][0] > time.monotonic()):
                    wait = self._due[0][0] - time.monotonic() if self._due else _MOST_WAIT
                    self._changed.wait(min(max(0.0, wait), _MOST_WAIT))
                if self._closed:
                    return
                _, _, work = heapq.heappop(self._due)
            try:
                work()
            except Exception:  # noqa: BLE001  one pin's fault must not keep the others
                _log.exception("a pin could not be ended")
