"""Textbook policies: by hand on small traces, and by their published figures on a real one."""

from __future__ import annotations

import pytest
from kvpager.kvstore.replay import replay_textbook
from kvpager.kvstore.textbook import TEXTBOOK, BeladyMIN
from kvpager.kvstore.trace import Trace
from kvpager.kvstore.trace_files import read_trace
from kvpager.tests.trace_files import conversation_trace, trace_of
from kvpager.tiers.errors import ConfigError

KNOWN = {
    "MIN": {1000: 0.191, 3000: 0.295, 10000: 0.366, 30000: 0.366},
    "LRU": {1000: 0.045, 3000: 0.065, 10000: 0.212, 30000: 0.326, 100000: 0.364},
    "LFU": {1000: 0.048, 3000: 0.075, 10000: 0.132, 30000: 0.276},
    "CLOCK": {1000: 0.045, 3000: 0.068, 10000: 0.215, 30000: 0.329},
    "S3-FIFO": {1000: 0.057, 3000: 0.093, 10000: 0.198, 30000: 0.304},
}


@pytest.fixture(scope="module")
def conversation() -> Trace:
    return read_trace(conversation_trace())


def hits(trace: Trace, name: str, capacity: int) -> list[int]:
    cache = BeladyMIN(trace, capacity) if name == "MIN" else TEXTBOOK[name](capacity)
    found: list[int] = replay_textbook(trace, cache).host.tolist()
    return found


@pytest.mark.parametrize(("name", "size"), [(name, size) for name, sizes in KNOWN.items() for size in sizes])
def test_hit_ratios_on_the_conversation_trace_are_the_known_ones(
    conversation: Trace, name: str, size: int
) -> None:
    ratio = sum(hits(conversation, name, size)) / conversation.references
    # They are known to three digits, of which the last may have been rounded either way.
    assert ratio == pytest.approx(KNOWN[name][size], abs=0.00055)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # 1 and 2 come, 1 is used again, 3 comes for one of them; then 1 and 2 are asked for.
        ("LRU", [0, 0, 1, 0, 1, 0]),
        ("FIFO", [0, 0, 1, 0, 0, 0]),
        ("LFU", [0, 0, 1, 0, 1, 0]),
        ("CLOCK", [0, 0, 1, 0, 1, 0]),
        ("SIEVE", [0, 0, 1, 0, 1, 0]),
        ("MIN", [0, 0, 1, 0, 1, 1]),
    ],
)
def test_who_goes_of_single_blocks(name: str, expected: list[int]) -> None:
    assert hits(trace_of([1], [2], [1], [3], [1], [2]), name, 2) == expected


def test_fifo_takes_what_came_first_whether_it_was_used_or_not() -> None:
    assert hits(trace_of([1], [2], [1], [3], [2]), "FIFO", 2) == [0, 0, 1, 0, 1]


def test_clock_gives_a_second_chance_once() -> None:
    # 1 and 2 are marked, and the hand clears both before it takes 3; then 2 is marked again, and 4 takes 1.
    found = hits(trace_of([1], [2], [1], [2], [3], [2], [4], [2], [1]), "CLOCK", 2)
    assert found == [0, 0, 1, 1, 0, 1, 0, 1, 0]


def test_sieve_goes_on_from_where_its_hand_is() -> None:
    # 1 is marked and stays; the hand takes 2, goes on to 3, and does not come back to 1 before the end.
    assert hits(trace_of([1], [2], [3], [1], [4], [5], [1], [4]), "SIEVE", 3) == [0, 0, 0, 1, 0, 0, 1, 1]


def test_s3fifo_takes_what_comes_back_into_its_main_queue() -> None:
    # Of 10 places one is for newcomers: 0 is pushed out, comes back, and outlives 20 more newcomers.
    newcomers = [[at] for at in range(1, 11)]
    more = [[at] for at in range(100, 120)]
    found = hits(trace_of([0], *newcomers, [0], *more, [0]), "S3-FIFO", 10)
    assert sum(found) == found[-1] == 1


def test_the_end_of_a_chain_goes_before_its_beginning() -> None:
    for name in TEXTBOOK:
        assert hits(trace_of([1, 2, 3], [4], [1, 2, 3]), name, 3)[-1] == 2, name


def test_what_follows_a_block_that_is_missing_is_no_hit() -> None:
    # 2 and 3 are there when 1 is not.
    assert hits(trace_of([2, 3], [1, 2, 3], [1, 2, 3]), "LRU", 9) == [0, 0, 3]


def test_nothing_finds_more_than_min() -> None:
    trace = trace_of(*([at * at % 11, 20 + at % 7] for at in range(60)))
    for capacity in (1, 2, 5, 9):
        most = sum(hits(trace, "MIN", capacity))
        assert all(sum(hits(trace, name, capacity)) <= most for name in TEXTBOOK)
    assert sum(hits(trace, "MIN", 2)) < sum(hits(trace, "MIN", 9))


@pytest.mark.parametrize("name", [*TEXTBOOK])
def test_a_cache_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="capacity: must be an integer of at least 1"):
        TEXTBOOK[name](0)
