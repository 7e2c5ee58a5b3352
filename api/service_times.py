"""How long a sidecar takes over requests: a histogram for each kind of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final

__all__ = ["LEAST_BOUND", "ServiceTimes"]

LEAST_BOUND: Final = 16
"""Microseconds of the first bucket; each is twice as wide as the one before."""
_FIRST: Final = LEAST_BOUND.bit_length() - 1
_BUCKETS: Final = 22
"""The last one has what takes longer than 16 seconds."""


@dataclass
class _Times:
    """Of requests of one kind.

    Attributes:
        seconds: of all together.
        counts: how many took longer than the bucket before allows, and not longer than this one does.
    """

    seconds: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * _BUCKETS)


class ServiceTimes:
    """How long requests took, from when they were begun to their reply, since the start. Used on the loop."""

    def __init__(self) -> None:
        self._of: dict[str, _Times] = {}

    def ended(self, kind: str, began: float) -> None:
        """A request of this kind was answered, which was begun at that time of `perf_counter`."""
        seconds = perf_counter() - began
        times = self._of.get(kind)
        if times is None:
            times = self._of[kind] = _Times()
        times.seconds += seconds
        # Rounded up to whole microseconds, less one: up to 16 have four bits, up to 32 five, and so on.
        bits = int(seconds * 1e6).bit_length()
        times.counts[min(max(bits - _FIRST, 0), _BUCKETS - 1)] += 1

    def snapshot(self) -> Mapping[str, Any]:
        """By kind ``seconds`` and ``counts``: of 16 microseconds at most, of up to 32, and so on."""
        return {
            kind: {"seconds": times.seconds, "counts": list(times.counts)} for kind, times in self._of.items()
        }
