"""Who waits for a row, in the order in which they get one: earliest first, by priority."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Final

from .sequence import Sequence

__all__ = ["PRIORITY_SECONDS", "Line"]

PRIORITY_SECONDS: Final = 10.0
"""Who has one priority more goes before those that came up to this much earlier: so nobody waits for ever."""


class Line:
    """Sequences in the order of when they came, each with a head start for its priority.

    Ageing needs no work: a place in the line does not change with time, and who comes later stands later. To
    add or to remove one is a search by halves, so a line of thousands costs a step nothing.
    """

    def __init__(self) -> None:
        self._places: list[tuple[float, int]] = []
        self._sequences: dict[int, tuple[float, Sequence]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Sequence]:
        return (self._sequences[number][1] for _, number in self._places)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self._sequences

    @property
    def first(self) -> Sequence | None:
        """Who is next; None where nobody waits."""
        return self._sequences[self._places[0][1]][1] if self._places else None

    def place_of(self, sequence: Sequence) -> float:
        """Who has the lower one goes first, also of two lines.

        Raises:
            LookupError: it is not in this line.
        """
        return self._sequences[sequence.id][0]

    def add(self, sequence: Sequence, since: float) -> None:
        """It waits.

        Args:
            since: seconds on the monotonic clock; it stands as one that came then.
        """
        place = since - sequence.priority * PRIORITY_SECONDS
        self._sequences[sequence.id] = place, sequence
        insort(self._places, (place, sequence.id))

    def remove(self, sequence: Sequence) -> None:
        """It waits no more.

        Raises:
            LookupError: it is not in this line.
        """
        place, _ = self._sequences.pop(sequence.id)
        del self._places[bisect_left(self._places, (place, sequence.id))]
