"""Chats of many sessions: turns with think times between them, made from a few numbers and a seed.

A session begins with a history, whose KV is computed before anything is measured. Each turn adds a message
and an answer of drawn lengths. Then its user thinks, and others have their turns. How many sessions are
active is held: when a turn ends, the session whose user is done first takes the next one, so think times say
in which order sessions come back, not how fast. Most are away for long, some come back soon.

Nothing but numpy is imported here.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["ChatWorkload", "Thinking", "Turn"]

Tokens: TypeAlias = npt.NDArray[np.int32]

_SPREAD: Final = 0.25
"""Histories and messages are up to this much shorter or longer than the mean, evenly."""
_ANSWER_SIGMA: Final = 0.6
_THINK_SIGMA: Final = 1.0
_LEAST: Final = 4
"""Tokens of a message or an answer, at least."""


@dataclass(frozen=True)
class Turn:
    """One turn of a session.

    Attributes:
        message: int32, what its user says.
        answer_tokens: how long the answer is.
        think: how long its user thinks after it, in units of a typical think time.
    """

    message: Tokens
    answer_tokens: int
    think: float


@dataclass(frozen=True)
class ChatWorkload:
    """The numbers that chats are made from.

    Attributes:
        sessions: how many there are.
        history_tokens: tokens of a session before its first turn, on average: even around it, whole blocks.
        message_tokens: of a message, on average.
        answer_tokens: of an answer, on average: log-normal, at most four times this.
        vocabulary: token ids are below this.
        block_size: tokens of a block.
        seed: of everything that is drawn.
    """

    sessions: int
    history_tokens: int
    message_tokens: int
    answer_tokens: int
    vocabulary: int
    block_size: int
    seed: int = 0

    @property
    def turn_tokens(self) -> int:
        """Tokens of a session at the end of its first turn, on average."""
        return self.history_tokens + self.message_tokens + self.answer_tokens

    def history(self, session: int) -> Tokens:
        """The history of a session, int32, of whole blocks."""
        random = np.random.default_rng([self.seed, session])
        blocks = round(self.history_tokens * random.uniform(1 - _SPREAD, 1 + _SPREAD) / self.block_size)
        return random.integers(0, self.vocabulary, max(1, blocks) * self.block_size, dtype=np.int32)

    def turn(self, session: int, number: int) -> Turn:
        """A turn of a session, from 0."""
        random = np.random.default_rng([self.seed, session, 1 + number])
        length = max(_LEAST, round(self.message_tokens * random.uniform(1 - _SPREAD, 1 + _SPREAD)))
        drawn = random.lognormal(np.log(self.answer_tokens) - _ANSWER_SIGMA**2 / 2, _ANSWER_SIGMA)
        return Turn(
            message=random.integers(0, self.vocabulary, length, dtype=np.int32),
            answer_tokens=int(np.clip(round(drawn), _LEAST, 4 * self.answer_tokens)),
            think=float(random.lognormal(0.0, _THINK_SIGMA)),
        )

    def first_thoughts(self) -> npt.NDArray[np.float64]:
        """When the user of each session is done thinking for the first time, float64 [sessions]."""
        random = np.random.default_rng([self.seed, self.sessions, 0, 0])
        return random.lognormal(0.0, _THINK_SIGMA, self.sessions)


class Thinking:
    """The sessions whose users think, by when these are done. Time is that of the last who was.

    Args:
        done_at: when each session's user is done, by its number.
    """

    def __init__(self, done_at: Iterable[float]) -> None:
        self._heap = [(at, session) for session, at in enumerate(done_at)]
        heapq.heapify(self._heap)
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._heap)

    def take(self) -> int:
        """The session whose user is done first."""
        self._now, session = heapq.heappop(self._heap)
        return session

    def begin(self, session: int, think: float) -> None:
        """The user of a session thinks, so long from now on."""
        heapq.heappush(self._heap, (self._now + think, session))
