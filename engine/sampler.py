"""From logits to tokens: greedy, temperature, top-k, top-p, with a seed per request.

A token is drawn by inverting the cumulative distribution at one uniform number, which is a hash of the
request's seed and of how many tokens it has drawn. So a draw needs no generator that lives from step to
step: a request that was preempted, moved to another host or batched with others draws the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from ..tiers.errors import ConfigError
from ..tiers.settings import expect_flag, expect_integer, expect_number, shown
from .upload import upload

__all__ = ["UNLIMITED", "SamplingBatch", "SamplingParams", "sample"]

_MOST_SEED: Final = 2**63 - 1
UNLIMITED: Final = 2**31 - 1
"""The top-k of a row that keeps all tokens: more than any vocabulary has."""

_ROWS_AT_ONCE: Final = 64
"""Rows whose distributions are held in float64 at once."""
_CANDIDATES: Final = 1024
"""Most probable tokens among which a nucleus is looked for first; a sort of all is dear."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when its answer ends.

    Attributes:
        max_tokens: tokens that are generated at most.
        temperature: what logits are divided by; 0 takes the most probable token (greedy).
        top_k: draw among the k most probable tokens (and their equals); None for all.
        top_p: draw among the fewest tokens, most probable first, that have this share of the probability
            (and their equals), after top-k; 1 for all. Holtzman et al., arXiv:1904.09751.
        seed: makes the draws repeatable, 0 up to 2**63 - 1; None for another seed each time.
        stop: texts that end an answer; they are not part of it.
        stop_token_ids: tokens that end an answer, beside the model's own.
        ignore_eos: go on after the model's own end tokens.
        min_tokens: tokens before which no end or stop token is chosen.

    Raises:
        ConfigError: a value is out of range; the error names the field.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0

    def __post_init__(self) -> None:
        # What was given as another type of number, or as a list, is kept as what the fields say.
        checked: dict[str, object] = {
            "max_tokens": expect_integer("max_tokens", self.max_tokens, 1),
            "temperature": expect_number("temperature", self.temperature, 0.0),
            "top_k": None if self.top_k is None else expect_integer("top_k", self.top_k, 1, UNLIMITED),
            "top_p": expect_number("top_p", self.top_p, 0.0, 1.0, above=True),
            "seed": None if self.seed is None else expect_integer("seed", self.seed, 0, _MOST_SEED),
            "stop": _texts(self.stop),
            "stop_token_ids": _token_ids(self.stop_token_ids),
            "ignore_eos": expect_flag("ignore_eos", self.ignore_eos),
            "min_tokens": expect_integer("min_tokens", self.min_tokens, 0),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.min_tokens > self.max_tokens:
            raise ConfigError("min_tokens", f"must not exceed max_tokens ({self.max_tokens})")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature == 0


@dataclass(frozen=True)
class SamplingBatch:
    """Columns of the sampling parameters of a step's rows of logits, on the host.

    Attributes:
        temperature: float64 [samples], 0 for greedy rows.
        top_k: int64 [samples], `UNLIMITED` to keep all.
        top_p: float64 [samples], 1 to keep all.
        seed: int64 [samples], not negative.
        counter: int64 [samples], how many tokens the request has generated before.
        banned_rows, banned_tokens: int64 [bans], tokens that a row must not choose.
    """

    temperature: npt.NDArray[np.float64]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    seed: npt.NDArray[np.int64]
    counter: npt.NDArray[np.int64]
    banned_rows: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    banned_tokens: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


@torch.no_grad()
def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Choose one token a row. A row's token does not depend on the other rows.

    Nothing waits for a GPU, but for rows with a `top_p` below 1: these look once whether few enough tokens
    make up the nucleus.

    Args:
        logits: float32 [samples, vocab_size].
        batch: the parameters of each row.

    Returns:
        int64 [samples] on the device of the logits.
    """
    if batch.banned_rows.size:
        rows, tokens = (_to(logits.device, a) for a in (batch.banned_rows, batch.banned_tokens))
        logits = logits.index_put((rows, tokens), logits.new_full((), -math.inf))
    chosen = logits.argmax(-1)
    drawn = np.flatnonzero(batch.temperature > 0)
    uniform = _uniform(batch.seed, batch.counter)
    for start in range(0, drawn.size, _ROWS_AT_ONCE):
        some = drawn[start : start + _ROWS_AT_ONCE]
        index = _to(logits.device, some)
        weights = _weights(
            logits[index], batch.temperature[some], batch.top_k[some], batch.top_p[some]
        ).cumsum(-1)
        total = weights[:, -1:]
        # Rounding must not lift the target to the total, which no token's share exceeds.
        below = torch.nextafter(total, torch.zeros_like(total))
        target = torch.minimum(_to(logits.device, uniform[some])[:, None] * total, below)
        chosen[index] = torch.searchsorted(weights, target, right=True)[:, 0]
    return chosen


def _weights(
    logits: torch.Tensor,
    temperature: npt.NDArray[np.float64],
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
) -> torch.Tensor:
    """Probabilities up to a factor, float64 [rows, vocab_size]; 0 for what top-k and top-p leave out.

    Both cut by value and leave the tokens in their order, so that what is drawn does not depend on how a
    sort happens to place equals.
    """
    device, vocab = logits.device, logits.shape[1]
    scores = logits.double()
    scores = (scores - scores.amax(-1, keepdim=True)) / _to(device, temperature)[:, None]
    limited = np.flatnonzero(top_k < vocab)
    if limited.size:
        rows, ranks = _to(device, limited), _to(device, top_k[limited])[:, None]
        best = scores[rows].topk(int(top_k[limited].max())).values
        kept = scores[rows]
        scores[rows] = kept.masked_fill(kept < best.gather(1, ranks - 1), -math.inf)
    weights = scores.exp()
    limited = np.flatnonzero(top_p < 1)
    if limited.size:
        rows = _to(device, limited)
        kept = weights[rows]
        least = _least_in_nucleus(kept, _to(device, top_p[limited])[:, None])
        weights[rows] = kept.masked_fill(kept < least, 0)
    return weights


def _least_in_nucleus(weights: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """The smallest weight [rows, 1] among the fewest largest ones that have the share of the total."""
    goal = weights.sum(-1, keepdim=True) * share
    vocab = weights.shape[1]
    best = weights.topk(min(_CANDIDATES, vocab)).values
    reached = best.cumsum(-1) >= goal
    if not bool(reached[:, -1].all()):
        best = weights.sort(-1, descending=True).values
        reached = best.cumsum(-1) >= goal
        # The sum of all may miss a share next to 1 by rounding.
        reached[:, -1] = True
    return best.gather(1, reached.to(torch.uint8).argmax(-1, keepdim=True))


def _uniform(seed: npt.NDArray[np.int64], counter: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """A number in (0, 1) for each pair, with 52 random bits."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    bits = _mix(_mix(seed.astype(np.uint64) + golden) + golden * (counter.astype(np.uint64) + np.uint64(1)))
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _to(device: torch.device, column: npt.NDArray[np.generic]) -> torch.Tensor:
    return upload([column], device)[0]


def _texts(stop: object) -> tuple[str, ...]:
    """The stop strings; a single text is meant as one, not as its letters."""
    given = (stop,) if isinstance(stop, str) else stop
    if not isinstance(given, Sequence | AbstractSet) or not all(
        isinstance(text, str) and text for text in given
    ):
        raise ConfigError("stop", f"must be texts that are not empty, got {shown(stop)}")
    return tuple(given)


def _token_ids(tokens: object) -> tuple[int, ...]:
    if isinstance(tokens, np.ndarray):
        tokens = tokens.tolist()
    if not isinstance(tokens, Sequence | AbstractSet) or isinstance(tokens, str | bytes | bytearray):
        raise ConfigError("stop_token_ids", f"must be a list of token ids, got {shown(tokens)}")
    return tuple(expect_integer("stop_token_ids", token, 0) for token in tokens)
