"""Which running sequence is put to sleep when the device tier is full.

The one whose sleep costs least against what it frees. What it costs is bringing back the blocks that it alone
holds, or computing them again where nothing below has them; what it frees are these blocks, for as long as
it would have held them. Three things come before the price:

- Who is about to finish goes only where all are: it frees its blocks by itself in a moment.
- Of the highest priority the one that came first stays, so that somebody always gets to the end.
- Who was woken stays for some steps (no thrash), unless nobody else can go.

Facts lie in arrays over rows. The price is estimated for all of them, as if all blocks were a sequence's own:
who shares a long document frees little, and its price is above that, never below. So these blocks are counted
for the cheapest one, and for a few more only where another may be cheaper then.

What a caller tells of a sequence (`Retention`) comes in with its facts: one that is said to be about to
finish has few tokens to go, and its advice weighs its price (`advised_weight`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..kvstore.cost import CostModel
from ..kvstore.policy import Retention

__all__ = ["LEAST_STEPS", "NEARLY_DONE", "Candidates", "advised_weight", "cheapest_sleep", "wake_seconds"]

LEAST_STEPS: Final = 16
"""Steps that a sequence takes part in before it is put to sleep again, unless nobody else can be."""
NEARLY_DONE: Final = 16
"""Who has no more tokens to go than this is about to finish."""
_HORIZON: Final = 256
"""Tokens ahead that count for how long blocks would be held: `max_tokens` says at most how many come."""
_SHORTLIST: Final = 8
_DOUBLES: Final = 10.0
"""So much more priority in advice doubles a price: as it doubles what blocks are worth to the cost policy."""
_SOON_SECONDS: Final = 60.0
"""A next turn that comes after so long counts half of what one counts that comes at once."""
_LAST: Final = np.iinfo(np.int64).max
"""An id after all others."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """Facts of n running sequences, arrays [n] each.

    Attributes:
        rows: int64, their rows.
        ids: int64, ascending in the order of arrival.
        priorities: int64, higher ones stay.
        lengths: int64, tokens whose KV is there.
        blocks: int64, device blocks that they hold, shared ones too.
        remaining: int64, tokens to go at most.
        steps: int64, steps since they were let in.
        weights: float64 above 0, how many times as dear the sleep of each is as its blocks make it.
    """

    rows: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    priorities: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    remaining: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, at: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> Candidates:
        """Those at these places."""
        return Candidates(
            self.rows[at],
            self.ids[at],
            self.priorities[at],
            self.lengths[at],
            self.blocks[at],
            self.remaining[at],
            self.steps[at],
            self.weights[at],
        )


def wake_seconds(
    blocks: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], cost: CostModel, *, below: bool
) -> npt.NDArray[np.float64]:
    """What waking each of n sequences takes, float64 [n].

    Args:
        blocks: int64 [n], device blocks that are to be brought back.
        lengths: int64 [n], tokens that are to be computed where nothing below has them.
        cost: what a link or computing takes, if that is known; what comes back counts by its size if not.
        below: whether host memory keeps what leaves the device tier.
    """
    if below:
        per_block = cost.copy.seconds_per_byte * cost.block_bytes or 1.0
        up: npt.NDArray[np.float64] = np.multiply(blocks, per_block, dtype=np.float64)
        up += cost.copy.seconds_per_call
        return up
    tokens = lengths.astype(np.float64)
    if cost.compute is None:
        return tokens
    compute = cost.compute
    seconds: npt.NDArray[np.float64] = compute.seconds_per_step + tokens * compute.seconds_per_token
    return seconds + tokens * tokens / 2 * compute.seconds_per_token_pair


def advised_weight(slept: int, advice: Retention | None) -> float:
    """How many times as dear a sequence's sleep is as its blocks make it.

    One more for each time that it was put to sleep before, so that it does not always fall on the same; twice
    as many for each ten of priority; and up to twice as many where the next turn is to come soon, which waits
    for the end of this one.

    Args:
        slept: how often it was put to sleep before.
        advice: what its caller told of it, or None.
    """
    weight = 1.0 + slept
    if advice is not None:
        weight *= 2.0 ** (advice.priority / _DOUBLES)
        if advice.will_return is not None:
            weight *= 1.0 + _SOON_SECONDS / (_SOON_SECONDS + advice.will_return)
    return weight


def cheapest_sleep(
    candidates: Candidates,
    private_blocks: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]],
    cost: CostModel,
    *,
    below: bool,
) -> int:
    """The row of the sequence to put to sleep.

    Args:
        candidates: one at least.
        private_blocks: rows, int64 [k] -> device blocks that no other row holds, int64 [k].
        cost, below: as for `wake_seconds`.
    """
    if len(candidates) == 1:
        return int(candidates.rows[0])
    may_go = _may_go(candidates)
    prices = _prices(candidates, candidates.blocks, cost, below=below)
    prices[~may_go] = np.inf
    # Of equals the youngest.
    cheapest = (prices == prices[prices.argmin()]).nonzero()[0]
    at = cheapest[[candidates.ids[cheapest].argmax()]]
    first = candidates.rows[at]
    own = private_blocks(first)
    if own == candidates.blocks[at]:
        return int(first[0])
    estimate = prices[at]
    prices[at] = np.inf
    if _prices(candidates.take(at), own, cost, below=below)[0] <= prices.min():
        return int(first[0])
    prices[at] = estimate
    few = prices.argpartition(_SHORTLIST)[:_SHORTLIST] if len(prices) > _SHORTLIST else np.arange(len(prices))
    left = candidates.take(few[may_go[few]])
    exact = _prices(left, private_blocks(left.rows), cost, below=below)
    return int(left.rows[np.lexsort((-left.ids, exact))[0]])


def _may_go(candidates: Candidates) -> npt.NDArray[np.bool_]:
    """bool [n]: those among whom the price decides."""
    ids, priorities = candidates.ids, candidates.priorities
    alike = bool((priorities == priorities[0]).all())
    first = (ids if alike else np.where(priorities == priorities.max(), ids, _LAST)).argmin()
    finishing, fresh = candidates.remaining <= NEARLY_DONE, candidates.steps < LEAST_STEPS
    may_go: npt.NDArray[np.bool_] = ~(finishing | fresh)
    may_go[first] = False
    if not may_go.any():
        ranks = 4 * finishing.astype(np.int8)
        ranks += fresh
        ranks[first] += 2
        may_go = ranks == ranks.min()
    if not alike:
        may_go &= priorities == priorities[may_go].min()
    return may_go


def _prices(
    candidates: Candidates, blocks: npt.NDArray[np.int64], cost: CostModel, *, below: bool
) -> npt.NDArray[np.float64]:
    """Seconds for each block that is free for the length of a token, float64 [n]."""
    prices = wake_seconds(blocks, candidates.lengths, cost, below=below)
    prices *= candidates.weights
    prices /= np.maximum(blocks * np.minimum(candidates.remaining, _HORIZON), 1e-3)
    return prices
