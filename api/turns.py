"""Contenders that are timed in turns, so that whatever else the machine does falls on all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Final

__all__ = ["median_seconds"]

_LEAST_ROUNDS: Final = 3
_WARM_UP: Final = 1


def median_seconds(contenders: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median seconds of one call of each contender. Another one goes first in each round.

    Args:
        contenders: by name.
        seconds: how long all of it may take, beyond the first rounds.
    """
    names = list(contenders)
    taken: dict[str, list[float]] = {name: [] for name in names}
    until = time.perf_counter() + seconds
    number = 0
    while number < _LEAST_ROUNDS + _WARM_UP or time.perf_counter() < until:
        for turn in range(len(names)):
            name = names[(number + turn) % len(names)]
            began = time.perf_counter()
            contenders[name]()
            if number >= _WARM_UP:
                taken[name].append(time.perf_counter() - began)
        number += 1
    return {name: statistics.median(times) for name, times in taken.items()}
