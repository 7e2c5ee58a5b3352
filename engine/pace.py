"""How long a step takes that nothing disturbs: what other work beside it is measured against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

__all__ = ["Pace"]

_WEIGHT: Final = 0.1
"""Of a new step in the running mean."""


class Pace:
    """The running mean of the seconds that undisturbed steps took.

    Args:
        clock: seconds, of whichever origin.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self.step_seconds: float | None = None
        """None before the first one."""

    def begin(self) -> None:
        """A step was decided on, and runs."""
        self._began = self._clock()

    def end(self, *, disturbed: bool) -> float:
        """It is done; what it took counts unless it was disturbed. Returns these seconds."""
        took = self._clock() - self._began
        if not disturbed:
            mean = self.step_seconds
            self.step_seconds = took if mean is None else mean + _WEIGHT * (took - mean)
        return took
