"""Who waits gets a row in the order of arrival, with a head start for each priority, and never too late."""

from __future__ import annotations

import numpy as np
import pytest
from kvpager.engine.line import PRIORITY_SECONDS, Line
from kvpager.engine.sampler import SamplingParams
from kvpager.engine.sequence import Sequence


def sequence(number: int, priority: int = 0) -> Sequence:
    tokens = np.ones(3, dtype=np.int32)
    return Sequence(number, tokens, 3, SamplingParams(), b"r" * 16, seed=0, priority=priority)


def test_who_came_first_goes_first_and_of_those_that_came_together_the_lower_number() -> None:
    line = Line()
    for number, since in ((3, 5.0), (1, 7.0), (4, 5.0), (2, 6.0)):
        line.add(sequence(number), since)
    assert [one.id for one in line] == [3, 4, 2, 1]
    assert line.first is not None
    assert line.first.id == 3


def test_a_priority_is_a_head_start_and_no_more() -> None:
    line = Line()
    low, high, late = sequence(1), sequence(2, priority=1), sequence(3, priority=1)
    line.add(low, 100.0)
    line.add(high, 100.0 + 0.9 * PRIORITY_SECONDS)
    line.add(late, 100.0 + 1.1 * PRIORITY_SECONDS)
    assert list(line) == [high, low, late]
    assert line.place_of(high) < line.place_of(low) < line.place_of(late)


def test_who_leaves_is_gone_wherever_it_stood() -> None:
    line = Line()
    all_of_them = [sequence(number) for number in range(50)]
    for one in all_of_them:
        line.add(one, float(one.id % 7))
    for one in all_of_them[::2]:
        line.remove(one)
    assert len(line) == 25
    assert all((one in line) == (one.id % 2 == 1) for one in all_of_them)
    assert [one.id for one in line] == sorted(range(1, 50, 2), key=lambda number: (number % 7, number))
    with pytest.raises(LookupError):
        line.remove(all_of_them[0])
    assert Line().first is None
