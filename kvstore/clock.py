"""The clock of uses: what is used counts ticks, and samples tell ticks from seconds.

Records say at which tick a block was last used, since ticks cost nothing and never go back. How long ago that
was is found between samples, of which a bounded number is kept: close to each other for what was just now,
further apart the older they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["MOST_SAMPLES", "ClockReading", "UseClock"]

MOST_SAMPLES: Final = 64
"""Of a reading."""
_SAMPLE_SECONDS: Final = 1.0


@dataclass(frozen=True)
class ClockReading:
    """What a clock said at one moment.

    Args:
        now: the tick of the last use.
        samples: at which tick it was how many seconds ago, newest first, 64 at most. What was used before
            the last of them was used at least as long ago.
    """

    now: int
    samples: tuple[tuple[int, float], ...]

    def ages(self, ticks: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Seconds since these ticks, float64 [n]; for what was before the first sample those since it."""
        known, ages = self._arrays()
        return np.interp(np.asarray(ticks, dtype=np.float64), known, ages)

    def tick_before(self, age: float) -> int:
        """The last tick that was at least so many seconds ago; 0 where none is known to be."""
        known, ages = self._arrays()
        if age > ages[0]:
            return 0
        # Rounded down: what was used at the tick after it may be younger.
        return int(np.interp(-age, -ages, known))

    def _arrays(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Ticks and ages, oldest first."""
        ticks, ages = np.array(self.samples, dtype=np.float64)[::-1].T
        return ticks, ages


class UseClock:
    """Counts uses, over all spaces of a store. Used with the store's lock held.

    A sample is taken at most once a second, when something is used; before a pause, the last use is one, too.

    Args:
        seconds: what time it is.

    Attributes:
        now: the tick of the last use.
    """

    def __init__(self, seconds: Callable[[], float] = time.monotonic) -> None:
        self.now = 0
        self._seconds = seconds
        self._last_use = seconds()
        self._due = self._last_use
        self._samples: list[tuple[int, float]] = [(0, self._last_use)]
        """Tick and time, oldest first. The first one is the start: what was before it has no time."""

    def start_after(self, tick: int) -> None:
        """Uses up to this tick were an earlier process's. Before the first use."""
        if tick > self.now:
            self.now = tick
            self._samples = [(tick, self._samples[0][1])]

    def tick(self) -> int:
        """The tick of one more use."""
        at = self._seconds()
        if at >= self._due:
            self._sample(at)
        self._last_use = at
        self.now += 1
        return self.now

    def read(self) -> ClockReading:
        """What it says now."""
        at = self._seconds()
        samples = self._samples
        if self.now > samples[-1][0]:
            samples = _thinned([*samples, (self.now, self._last_use)])
        return ClockReading(self.now, tuple((tick, at - when) for tick, when in reversed(samples)))

    def _sample(self, at: float) -> None:
        """The next use is at this time."""
        if self.now > self._samples[-1][0]:
            self._samples.append((self.now, self._last_use))
        self._samples = _thinned([*self._samples, (self.now + 1, at)])
        self._due = at + _SAMPLE_SECONDS


def _thinned(samples: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most `MOST_SAMPLES` of these, oldest first: who lacks least for his age goes, but neither end."""
    while len(samples) > MOST_SAMPLES:
        at: npt.NDArray[Any] = np.array([when for _, when in samples])
        gaps = at[2:] - at[:-2]
        ages = at[-1] - at[1:-1]
        del samples[1 + int(np.argmin(gaps / np.maximum(ages, _SAMPLE_SECONDS)))]
    return samples
