"""The clock of uses: few samples tell how long ago a tick was, over any time and through pauses."""

from __future__ import annotations

import numpy as np
import pytest
from kvpager.kvstore.clock import MOST_SAMPLES, ClockReading, UseClock


class Watch:
    """What time it is, as the test says."""

    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def clock(watch: Watch) -> UseClock:
    return UseClock(watch)


def test_a_clock_that_nothing_used_yet_has_one_sample(watch: Watch, clock: UseClock) -> None:
    watch.at += 5
    assert clock.read() == ClockReading(0, ((0, 5.0),))
    assert clock.read().tick_before(0.0) == 0


def test_ticks_count_up_from_those_of_an_earlier_process(watch: Watch, clock: UseClock) -> None:
    clock.start_after(41)
    clock.start_after(7)
    assert [clock.tick(), clock.tick()] == [42, 43]
    watch.at += 10
    reading = clock.read()
    # Of what was before this process it is known that it is as old as the process.
    assert reading.ages([3, 41, 43]).tolist() == [10.0, 10.0, 10.0]
    assert reading.tick_before(10.0) == 43
    assert reading.tick_before(10.1) == 0


def test_ages_are_right_to_the_second_for_what_was_just_now(watch: Watch, clock: UseClock) -> None:
    used = {}
    for _ in range(300):
        watch.at += 0.1
        used[clock.tick()] = watch.at
    reading = clock.read()
    ticks = list(used)
    assert reading.ages(ticks) == pytest.approx([watch.at - used[tick] for tick in ticks], abs=0.5)


def test_a_pause_is_not_spread_over_what_was_used_before_it(watch: Watch, clock: UseClock) -> None:
    for _ in range(50):
        watch.at += 0.01
        clock.tick()
    watch.at += 3600
    clock.tick()
    reading = clock.read()
    assert reading.ages([50, 51]) == pytest.approx([3600, 0], abs=0.01)
    assert reading.tick_before(1800.0) == 50


def test_a_year_of_uses_is_kept_in_a_bounded_number_of_samples(watch: Watch, clock: UseClock) -> None:
    # Steps that grow, so that the test is quick: a second at first, at last a day.
    times, step = [], 1.0
    start = watch.at
    while watch.at < start + 365 * 86400:
        watch.at += step
        step = min(86400.0, step * 1.01)
        times.append(watch.at)
        clock.tick()
    for _ in range(5000):
        watch.at += 1.0
        times.append(watch.at)
        clock.tick()
    reading = clock.read()
    assert len(reading.samples) <= MOST_SAMPLES
    ticks = np.arange(1, len(times) + 1)
    true = watch.at - np.array(times)
    found = reading.ages(ticks)
    # Half as old again at most, or a few seconds off.
    assert (np.abs(found - true) <= 0.5 * true + 5).all()
    assert (np.diff(found) <= 0).all()


def test_what_is_said_to_be_older_is(watch: Watch, clock: UseClock) -> None:
    for _ in range(2000):
        watch.at += 0.37
        clock.tick()
    reading = clock.read()
    for age in (0.0, 1.0, 10.0, 100.0, 700.0):
        tick = reading.tick_before(age)
        assert reading.ages(tick) >= age - 1e-9
        assert reading.ages(tick + 1) <= age + 1e-9 or tick == reading.now
