"""Traces replayed: as the live store would have it, and what hits come to."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpager.kvstore.chat_traces import ChatTraffic, chat_trace
from kvpager.kvstore.cost import ComputeCost, CostModel, LinkCost
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.lineage import ChainPlace, Lineage, shortened
from kvpager.kvstore.policy import make_policy, policy_names
from kvpager.kvstore.replay import Hits, ReplayedTier, TierChoice, replay, replay_textbook, score
from kvpager.kvstore.space import HostSpace
from kvpager.kvstore.textbook import TEXTBOOK, BeladyMIN
from kvpager.kvstore.trace import Trace, TraceEvent
from kvpager.kvstore.trace_files import read_trace
from kvpager.kvstore.trace_log import TraceLog
from kvpager.tests.trace_files import trace_of
from kvpager.tiers.errors import ConfigError, QuotaError
from kvpager.tiers.layout import KVLayout

BLOCK = KVLayout(1, 1, 32, block_size=4, dtype="float32")  # 1 KiB
COST = CostModel(
    4,
    1024,
    ComputeCost(0.0, 1.0, 0.0),
    LinkCost(0.0, 0.5 / 1024),
    LinkCost(0.0, 1.0),
    LinkCost(0.0, 1 / 1024),
)
"""A token takes a second to compute; a block half a second from host memory, and one and a half from
below."""


def chains(seed: int, count: int) -> list[list[bytes]]:
    """Requests of conversations that grow, fork and are left, and of what is read once."""
    drawn = random.Random(seed)
    known: list[list[bytes]] = [[]]
    asked = []
    for _ in range(count):
        before = drawn.choice(known[-12:])
        kept = before[: drawn.randint(0, len(before))] if drawn.random() < 0.3 else before
        chain = [*kept, *(drawn.randbytes(16) for _ in range(drawn.randint(0, 4)))]
        if chain:
            asked.append(chain)
            known.append(chain if drawn.random() < 0.9 else [])
    return asked


def ask(space: HostSpace, chain: Sequence[bytes]) -> int:
    """What an engine does of a request: look up, compute what is missing, write it, let go."""
    lease = space.match(chain)
    found = len(lease)
    rest = chain[found:]
    if rest:
        lineage = Lineage.of_chain(rest, ChainPlace.at(chain, found))
        try:
            with space.reserve(rest, lineage=lineage) as reservation:
                reservation.commit()
        except QuotaError:
            pass  # every block is leased
    lease.release()
    return found


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1 << 32), blocks=st.sampled_from([4, 8, 16, 32]))
@pytest.mark.parametrize("policy", policy_names())
def test_the_live_store_finds_what_the_simulated_one_does(policy: str, seed: int, blocks: int) -> None:
    requests = chains(seed, 90)
    trace = Trace.of_events(
        (
            TraceEvent(float(at), shortened(chain), len(chain), len(chain), 4 * len(chain))
            for at, chain in enumerate(requests)
        ),
        4,
    )
    live = []
    now = 0.0
    with HostStore(blocks * 1024, extent_bytes=blocks * 1024) as host:
        space = host.space(BLOCK)
        host.arena.wait_ready()
        # The policy that the simulation drives, by a clock that goes as the trace's does.
        space._records.use_policy(space._records.ranked_by(make_policy(policy, 0, clock=lambda: now)))
        for at, chain in enumerate(requests):
            now = float(at)
            live.append(ask(space, chain))
            host.check_integrity()
    assert replay(trace, TierChoice(policy, blocks)).host.tolist() == live


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_a_log_of_the_live_store_replayed_finds_what_that_found(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "trace.jsonl"
    with HostStore(16 * 1024, extent_bytes=16 * 1024, policy="lru", trace=TraceLog(path)) as host:
        space = host.space(BLOCK)
        host.arena.wait_ready()
        live = [ask(space, chain) for chain in chains(seed, 100)]
    trace = read_trace(path)
    hits = replay(trace, TierChoice("lru", 16))
    assert hits.host[trace.asked > 0].tolist() == live


@pytest.mark.parametrize("policy", policy_names())
def test_a_replay_repeats_itself(policy: str) -> None:
    trace = chat_trace(ChatTraffic(sessions=60, seconds=600.0), 3)
    choice = TierChoice(policy, 150)
    first, again = (replay(trace, choice, seed=5) for _ in range(2))
    assert first.host.tolist() == again.host.tolist()
    assert 0 < first.host.sum() < trace.references


@pytest.mark.parametrize("policy", policy_names())
def test_books_agree_after_every_event(policy: str) -> None:
    trace = chat_trace(ChatTraffic(sessions=12, seconds=300.0, block_size=256), 1)
    tier = ReplayedTier(trace, TierChoice(policy, 60))
    for event in range(len(trace)):
        chain = trace.chain(event)
        tier.now = float(trace.times[event])
        found = tier.look_up(chain)
        taken, gone = tier.put(chain[found:])
        tier.check_integrity()
        assert tier.has(taken).all()
        assert not tier.has(gone).any()
        # What is looked up is in use: room for the rest is not made of it.
        assert tier.has(chain[:found]).all()
        tier.release(chain[:found])
        tier.check_integrity()


def test_the_lru_of_the_store_finds_as_much_as_the_textbook_does() -> None:
    trace = chat_trace(ChatTraffic(sessions=100, seconds=900.0), 2)
    textbook = replay_textbook(trace, TEXTBOOK["LRU"](400)).host.sum()
    assert replay(trace, TierChoice("lru", 400)).host.sum() == pytest.approx(textbook, rel=0.01)


def test_nothing_finds_more_than_there_is_to_find() -> None:
    trace = chat_trace(ChatTraffic(sessions=80, seconds=900.0), 4)
    room = trace.distinct
    everything = replay_textbook(trace, BeladyMIN(trace, room)).host
    for policy in policy_names():
        assert replay(trace, TierChoice(policy, room)).host.tolist() == everything.tolist()


def test_what_leaves_host_memory_is_found_in_the_cold_tier() -> None:
    trace = trace_of([1, 2], [3, 4], [1, 2], [1, 2])
    hits = replay(trace, TierChoice("lru", 2), TierChoice("lru", 4))
    assert hits.cold.tolist() == [0, 0, 2, 0]
    assert hits.host.tolist() == [0, 0, 0, 2]
    assert replay(trace, TierChoice("lru", 2)).blocks.tolist() == [0, 0, 0, 2]


def test_a_cold_tier_lets_its_coldest_go_too() -> None:
    trace = trace_of([1], [2], [3], [4], [1], [3])
    hits = replay(trace, TierChoice("lru", 1), TierChoice("lru", 2))
    assert hits.cold.tolist() == [0, 0, 0, 0, 0, 1]


def test_blocks_that_are_put_alone_are_found_and_count_for_nothing_themselves() -> None:
    put = TraceEvent(0.0, np.array([7, 8], np.uint64), 0, 2, 8)
    look = TraceEvent(1.0, np.array([7, 8, 9], np.uint64), 3, 0, 12)
    trace = Trace.of_events([look, put], 4)
    for hits in (replay(trace, TierChoice("lru", 9)), replay_textbook(trace, TEXTBOOK["LRU"](9))):
        assert hits.host.tolist() == [0, 2]
        assert score(trace, hits).blocks == pytest.approx(2 / 3)


def test_a_look_up_that_nobody_fills_leaves_nothing_behind() -> None:
    look = TraceEvent(0.0, np.array([7], np.uint64), 1, 0, 4)
    trace = Trace.of_events([look, look], 4)
    assert replay(trace, TierChoice("lru", 9)).host.tolist() == [0, 0]
    assert replay_textbook(trace, TEXTBOOK["LFU"](9)).host.tolist() == [0, 0]


def test_what_hits_come_to() -> None:
    # Ten tokens: two blocks of four that are full, and one that holds two.
    event = TraceEvent(0.0, np.arange(1, 4, dtype=np.uint64), 3, 3, 10)
    trace = Trace.of_events([event, event], 4)
    none = np.zeros(2, np.int32)
    whole = score(trace, Hits(np.array([0, 3], np.int32), none), COST)
    assert (whole.blocks, whole.tokens, whole.cold_blocks) == (0.5, 0.5, 0.0)
    # Eight seconds of computing, less one of loading two blocks.
    assert whole.seconds_saved == pytest.approx(7.0)
    assert whole.seconds == pytest.approx(7 / 20)
    below = score(trace, Hits(none, np.array([0, 1], np.int32)), COST)
    assert below.seconds_saved == pytest.approx(2.5)
    assert below.cold_blocks == pytest.approx(1 / 6)


def test_what_is_slower_to_load_than_to_compute_saves_nothing() -> None:
    trace = trace_of([1, 2], [1, 2])
    hits = replay(trace, TierChoice("lru", 2))
    slow = CostModel(4, 1024, ComputeCost(0.0, 1.0, 0.0), LinkCost(0.0, 1.0), LinkCost(0.0, 1.0))
    assert score(trace, hits, slow).seconds_saved == 0.0
    assert score(trace, hits, CostModel(4, 1024, None, LinkCost(0, 0), LinkCost(0, 0))).seconds is None
    assert score(trace, hits).seconds is None


def test_progress_is_told() -> None:
    trace = trace_of(*([at] for at in range(600)))
    told: list[int] = []
    replay(trace, TierChoice("lru", 9), progress=told.append)
    assert told == [0, 256, 512]


def test_a_tier_of_nothing_or_of_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="blocks: must be an integer of at least 1"):
        TierChoice("lru", 0)
    with pytest.raises(ConfigError, match="policy"):
        replay(trace_of([1]), TierChoice("best", 1))
