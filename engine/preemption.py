"""Which running sequence is put to sleep when the device tier is full.

The one whose sleep costs least against what it frees. What it costs is bringing back the blocks that it alone
holds, or computing them again where nothing below has them; what it frees are these blocks, for as long as
it would have held them. Three things come before the price:

- Who is about to finish goes only where all are: it frees its blocks by itself in a moment.
- Of the highest priority the one that came first stays, so that somebody always gets to the end.
- Who was woken stays for some steps (no thrash), unless nobody else can go.

Facts lie in arrays over rows. The price is estimated for all of them, and the blocks that are really a
sequence's own are counted for the few cheapest: who shares a long document frees little.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..kvstore.cost import CostModel

__all__ = ["LEAST_STEPS", "NEARLY_DONE", "Candidates", "cheapest_sleep", "wake_seconds"]

LEAST_STEPS: Final = 16
"""Steps that a sequence takes part in before it is put to sleep again, unless nobody else can be."""
NEARLY_DONE: Final = 16
"""Who has no more tokens to go than this is about to finish."""
_HORIZON: Final = 256
"""Tokens ahead that count for how long blocks would be held: `max_tokens` says at most how many come."""
_SHORTLIST: Final = 8
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
        slept: int64, how often they were put to sleep before.
    """

    rows: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    priorities: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    remaining: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]
    slept: npt.NDArray[np.int64]

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
            self.slept[at],
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
        return cost.copy.seconds_per_call + blocks.astype(np.float64) * per_block
    tokens = lengths.astype(np.float64)
    if cost.compute is None:
        return tokens
    compute = cost.compute
    seconds: npt.NDArray[np.float64] = compute.seconds_per_step + tokens * compute.seconds_per_token
    return seconds + tokens * tokens / 2 * compute.seconds_per_token_pair


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
    prices = _prices(candidates, candidates.blocks, cost, below=below)
    may_go = _may_go(candidates)
    prices[~may_go] = np.inf
    if len(prices) > _SHORTLIST:
        few = prices.argpartition(_SHORTLIST)[:_SHORTLIST]
        left = candidates.take(few[may_go[few]])
    else:
        left = candidates.take(may_go)
    if len(left) == 1:
        return int(left.rows[0])
    prices = _prices(left, private_blocks(left.rows), cost, below=below)
    # Of equals the youngest.
    return int(left.rows[np.lexsort((-left.ids, prices))[0]])


def _may_go(candidates: Candidates) -> npt.NDArray[np.bool_]:
    """bool [n]: those among whom the price decides."""
    priorities = candidates.priorities
    highest = int(priorities.max())
    alike = int(priorities.min()) == highest
    first = candidates.ids if alike else np.where(priorities == highest, candidates.ids, _LAST)
    ranks = np.zeros(len(candidates), dtype=np.int8)
    ranks[candidates.remaining <= NEARLY_DONE] = 4
    ranks[candidates.steps < LEAST_STEPS] += 1
    ranks[first.argmin()] += 2
    may_go: npt.NDArray[np.bool_] = ranks == ranks.min()
    if not alike:
        may_go &= priorities == priorities[may_go].min()
    return may_go


def _prices(
    candidates: Candidates, blocks: npt.NDArray[np.int64], cost: CostModel, *, below: bool
) -> npt.NDArray[np.float64]:
    """Seconds for each block that is free for the length of a token, float64 [n].

    Who was put to sleep before is dearer each time, so that it does not always fall on the same.
    """
    seconds = wake_seconds(blocks, candidates.lengths, cost, below=below)
    freed = blocks * np.minimum(candidates.remaining, _HORIZON)
    return seconds * (1 + candidates.slept) / np.maximum(freed, 1e-3)
