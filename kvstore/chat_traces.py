"""Chats that nobody had: traces to simulate with where no real one is at hand.

A session belongs to a tenant, begins with the tenant's system prompt, may go on with one of its documents,
and then takes turns: each prompt is everything so far and a new question. Between them come long documents
that are read once. Whatever is drawn comes from one seed, so a trace is the same wherever it is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..tiers.settings import expect_integer, expect_number
from .trace import Trace, TraceEvent, mixed

__all__ = ["ChatTraffic", "chat_trace"]

_SKEW: Final = 1.1
"""Exponent of Zipf's law, by which tenants and documents are chosen."""


@dataclass(frozen=True)
class ChatTraffic:
    """What chats are like. Lengths are medians of log-normal distributions, in tokens.

    Args:
        sessions: how many there are.
        seconds: over which sessions begin, evenly.
        block_size: tokens of a block.
        tenants: whose they are; few have most of them.
        system_tokens: of each tenant's system prompt.
        documents: of each tenant; few are read by most.
        document_tokens: of a document.
        document_share: of the sessions that read one.
        turns: of a session, on average (geometric).
        think_seconds: the median from one turn to the next.
        think_spread: standard deviation of its logarithm.
        question_tokens, answer_tokens: of a turn.
        scan_share: requests that read a long document which nobody reads again, to each session.
        scan_tokens: of such a document.

    Raises:
        ConfigError: a value is out of range.
    """

    sessions: int = 2000
    seconds: float = 3600.0
    block_size: int = 512
    tenants: int = 8
    system_tokens: int = 800
    documents: int = 20
    document_tokens: int = 8000
    document_share: float = 0.3
    turns: float = 4.0
    think_seconds: float = 120.0
    think_spread: float = 1.2
    question_tokens: int = 300
    answer_tokens: int = 350
    scan_share: float = 0.1
    scan_tokens: int = 20000

    def __post_init__(self) -> None:
        for name in ("sessions", "block_size", "tenants", "documents"):
            expect_integer(name, getattr(self, name), 1)
        for name in ("system_tokens", "document_tokens", "question_tokens", "answer_tokens", "scan_tokens"):
            expect_integer(name, getattr(self, name), 1)
        for name in ("seconds", "think_seconds", "think_spread"):
            expect_number(name, getattr(self, name), 0.0, above=True)
        for name in ("document_share", "scan_share"):
            expect_number(name, getattr(self, name), 0.0, 1.0)
        expect_number("turns", self.turns, 1.0)


def chat_trace(traffic: ChatTraffic, seed: int = 0) -> Trace:
    """A trace of such chats.

    Args:
        traffic: what they are like.
        seed: the same one gives the same trace.
    """
    made = _Chats(traffic, expect_integer("seed", seed, 0))
    events = [event for start in made.starts() for event in made.session(start)]
    events += [made.scan(start) for start in made.scan_starts()]
    return Trace.of_events(events, traffic.block_size)


class _Chats:
    """Draws sessions. A block is a number: what is new gets new ones, what is shared has the same ones."""

    def __init__(self, traffic: ChatTraffic, seed: int) -> None:
        self._traffic = traffic
        self._random = np.random.default_rng(seed)
        self._next = 0
        self._systems = [self._length(traffic.system_tokens, 0.5) for _ in range(traffic.tenants)]
        self._documents = [
            [self._length(traffic.document_tokens, 0.8) for _ in range(traffic.documents)]
            for _ in range(traffic.tenants)
        ]
        self._shared: dict[tuple[int, ...], npt.NDArray[np.uint64]] = {}
        self._tenant_odds = _zipf(traffic.tenants)
        self._document_odds = _zipf(traffic.documents)

    def starts(self) -> list[float]:
        """When sessions begin."""
        drawn: list[float] = self._random.uniform(0.0, self._traffic.seconds, self._traffic.sessions).tolist()
        return sorted(drawn)

    def scan_starts(self) -> list[float]:
        """When documents are read that nobody reads again."""
        count = round(self._traffic.sessions * self._traffic.scan_share)
        drawn: list[float] = self._random.uniform(0.0, self._traffic.seconds, count).tolist()
        return sorted(drawn)

    def session(self, start: float) -> list[TraceEvent]:
        """The requests of one session."""
        traffic, random = self._traffic, self._random
        tenant = int(random.choice(traffic.tenants, p=self._tenant_odds))
        tokens = self._systems[tenant]
        blocks = self._prefix((tenant,), np.empty(0, np.uint64), tokens)
        if random.random() < traffic.document_share:
            document = int(random.choice(traffic.documents, p=self._document_odds))
            tokens += self._documents[tenant][document]
            blocks = self._prefix((tenant, document), blocks, tokens)
        events = []
        time = start
        for _ in range(int(random.geometric(1.0 / traffic.turns))):
            tokens += self._length(traffic.question_tokens, 0.9)
            # What the answer before it left partly full is full of other tokens by now.
            blocks = self._extended(blocks, tokens // traffic.block_size)
            asked = self._extended(blocks, -(-tokens // traffic.block_size))
            events.append(TraceEvent(time, mixed(asked), len(asked), len(asked), tokens))
            tokens += self._length(traffic.answer_tokens, 0.7)
            time += traffic.think_seconds * float(random.lognormal(0.0, traffic.think_spread))
        return events

    def scan(self, start: float) -> TraceEvent:
        """One request that reads what nobody reads again."""
        tokens = self._length(self._traffic.scan_tokens, 0.5)
        blocks = self._extended(np.empty(0, np.uint64), -(-tokens // self._traffic.block_size))
        return TraceEvent(start, mixed(blocks), len(blocks), len(blocks), tokens)

    def _prefix(
        self, key: tuple[int, ...], before: npt.NDArray[np.uint64], tokens: int
    ) -> npt.NDArray[np.uint64]:
        """The full blocks of what everyone begins with who has this key."""
        if key not in self._shared:
            self._shared[key] = self._extended(before, tokens // self._traffic.block_size)
        return self._shared[key]

    def _extended(self, blocks: npt.NDArray[np.uint64], count: int) -> npt.NDArray[np.uint64]:
        """These blocks, and new ones up to so many."""
        new = max(0, count - len(blocks))
        first, self._next = self._next, self._next + new
        return np.concatenate([blocks, np.arange(first, first + new, dtype=np.uint64)])

    def _length(self, median: int, spread: float) -> int:
        return max(1, round(median * float(self._random.lognormal(0.0, spread))))


def _zipf(count: int) -> npt.NDArray[Any]:
    odds = 1.0 / np.arange(1, count + 1) ** _SKEW
    shares: npt.NDArray[Any] = odds / odds.sum()
    return shares
