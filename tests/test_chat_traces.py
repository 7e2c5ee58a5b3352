"""Chats that nobody had: what is drawn is what is asked for."""

from __future__ import annotations

import numpy as np
import pytest
from kvpager.kvstore.chat_traces import ChatTraffic, chat_trace
from kvpager.kvstore.replay import replay_textbook
from kvpager.kvstore.textbook import TEXTBOOK
from kvpager.tiers.errors import ConfigError


def test_one_seed_gives_one_trace() -> None:
    first, again, other = (chat_trace(ChatTraffic(sessions=30), seed) for seed in (7, 7, 8))
    assert first.blocks.tolist() == again.blocks.tolist()
    assert first.times.tolist() == again.times.tolist()
    assert first.blocks.tolist() != other.blocks.tolist()


def test_a_turn_begins_with_the_turn_before_it() -> None:
    trace = chat_trace(ChatTraffic(sessions=1, turns=9.0, scan_share=0.0), 3)
    assert len(trace) > 3
    for event in range(1, len(trace)):
        before, chain = trace.chain(event - 1), trace.chain(event)
        # The last block was partly full, unless it was just full.
        assert len(chain) >= len(before)
        assert np.array_equal(chain[: len(before) - 1], before[:-1])
        assert trace.tokens[event] > trace.tokens[event - 1]


def test_sessions_of_a_tenant_share_its_system_prompt_and_documents() -> None:
    alone = ChatTraffic(sessions=40, tenants=1, documents=1, document_share=1.0, turns=1.0, scan_share=0.0)
    trace = chat_trace(alone, 5)
    shared = min(trace.chain(event).tolist()[:2] for event in range(len(trace)))
    assert all(trace.chain(event).tolist()[:2] == shared for event in range(len(trace)))
    none = chat_trace(ChatTraffic(sessions=40, system_tokens=1, document_share=0.0, turns=1.0), 5)
    assert none.distinct == none.references


def test_what_is_read_once_is_not_read_again() -> None:
    scans = ChatTraffic(sessions=50, scan_share=1.0, turns=1.0, document_share=0.0)
    trace = chat_trace(scans, 2)
    assert len(trace) == 100
    uses = np.bincount(trace.blocks)
    assert (uses == 1).mean() > 0.8


def test_lengths_and_turns_are_about_what_is_asked_for() -> None:
    traffic = ChatTraffic(sessions=400, turns=3.0, scan_share=0.0, document_share=0.0)
    trace = chat_trace(traffic, 9)
    assert len(trace) / traffic.sessions == pytest.approx(3.0, rel=0.15)
    assert np.median(np.diff(trace.starts)) < 20
    found = replay_textbook(trace, TEXTBOOK["LRU"](trace.distinct)).host.sum() / trace.references
    assert 0.3 < found < 0.9


@pytest.mark.parametrize(
    "wrong",
    [{"sessions": 0}, {"turns": 0.5}, {"scan_share": 1.5}, {"think_seconds": 0.0}, {"block_size": "16"}],
)
def test_traffic_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(wrong))}: "):
        ChatTraffic(**wrong)  # type: ignore[arg-type]
