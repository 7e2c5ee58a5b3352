"""One request on its way through the engine."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..kvstore.calls import LoadCalls
from ..kvstore.policy import Retention
from ..kvstore.session import SleepingSequence
from ..kvstore.store import NamedPrompt
from .sampler import SamplingParams
from .sessions import SessionLookup

__all__ = ["CachedTokens", "FinishReason", "Sequence", "SequenceState"]


class SequenceState(enum.Enum):
    """Where a sequence stands. ARRIVING, PREFILLING and DECODING ones have a row of the block table."""

    WAITING = "waiting"
    ARRIVING = "arriving"
    """Its blocks are copied up to the device tier before it takes part in steps."""
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ASLEEP = "asleep"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    """A stop token or stop string."""
    LENGTH = "length"
    """Its limit of tokens, or the model's."""
    ABORTED = "aborted"
    """Its caller no longer wants it."""
    CAPACITY = "capacity"
    """No tier had room for one more of its blocks, though it ran alone."""


@dataclass
class CachedTokens:
    """Prompt tokens that were not computed, by the tier they were found in."""

    device: int = 0
    host: int = 0
    cold: int = 0

    @property
    def total(self) -> int:
        """Prompt tokens that were not computed."""
        return self.device + self.host + self.cold


@dataclass(eq=False)
class Sequence:
    """A request's tokens and state. The scheduler changes it; others read it.

    Attributes:
        id: ascending in the order of arrival.
        tokens: int32, all tokens known; while it has a row, `Scheduler.tokens` has the newest ones.
        num_prompt: how many of them its caller gave.
        params: how to sample and when to stop.
        stop_ids: token ids that end it; they are kept in its output.
        root: root of its prefix chain.
        seed: of its draws.
        session: the caller's id of the conversation, or None.
        partial_at: a length at which the session slept with a partly filled last block, or None.
        priority: who has a higher one goes first, and is put to sleep last.
        retention: what its caller told of its KV, or None.
        ends_at: how many tokens it is to have at its end, as its caller told; 0: that is not told.
    """

    id: int
    tokens: npt.NDArray[np.int32]
    num_prompt: int
    params: SamplingParams
    root: bytes
    seed: int
    stop_ids: tuple[int, ...] = ()
    session: str | None = None
    partial_at: int | None = None
    priority: int = 0
    retention: Retention | None = None
    ends_at: int = 0
    returns: bool = True
    """Whether its session may come again."""
    state: SequenceState = SequenceState.WAITING
    row: int | None = None
    lookup: SessionLookup | None = None
    """The record of its session, while that is on its way."""
    prompt: NamedPrompt | None = None
    """Its prompt, named; None before the record of its session has come."""
    load: LoadCalls | None = None
    load_until: float | None = None
    """When it is no longer worth waiting for the load; None before one was started."""
    sleeping: SleepingSequence | None = None
    cached: CachedTokens = field(default_factory=CachedTokens)
    preemptions: int = 0
    computed: int = 0
    """Tokens computed in chunks: its prompt's; what was lost and computed again counts again."""
    arrived_at: float = field(default_factory=time.monotonic)
    scheduled_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    finish_reason: FinishReason | None = None
    text: str | None = None
    """Its text where that was read as it came; a stop string is cut off."""

    @property
    def output(self) -> npt.NDArray[np.int32]:
        """int32, the tokens that were sampled, as far as `tokens` is brought up to date."""
        return self.tokens[self.num_prompt :]

    def loading(self) -> bool:
        """Whether it is worth waiting for blocks that come up from the cold tier."""
        if self.load is None or self.load_until is None:
            return False
        return not self.load.done() and time.monotonic() < self.load_until

    def end_load(self) -> None:
        """It has its blocks, as far as they were to be had."""
        if self.load is not None:
            self.load.release()
        self.load = None
        self.load_until = None
