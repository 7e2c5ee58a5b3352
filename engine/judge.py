"""Whether an answer is one that the model gives: every token the best one, or as good but for rounding.

In float32 the same prompt gets the same tokens however its KV came about. In 16 bits sums are rounded
otherwise in another batch or by another kernel, and of two tokens that are all but equal either may come out
as the best; from there on the answers are different texts, and both are right. So where answers differ the
model says what it thinks of each token: logits, computed in one pass over KV that nobody else had.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from ..kernels import token_slots
from ..tiers.layout import SLICE_ALIGNMENT
from .model import CausalLM, ForwardBatch

__all__ = ["ROUNDING", "Difference", "compare", "shortfalls", "uncached_logits"]

ROUNDING: Final[Mapping[str, float]] = MappingProxyType({"float16": 0.03, "bfloat16": 0.24})
"""Standard deviations of a place's logits up to which tokens are a tie, by the dtype that is computed in.

Sixty times the dtype's unit roundoff (2^-11, 2^-8). The distance of the two best tokens of SmolLM2-135M, 30
layers, is another one by 0.003 in float16 and 0.024 in bfloat16 than in float32 (root mean square; 0.008 and
0.053 at most of some hundred places), and here two computations are compared by a third one. In float32
there are no ties."""


@dataclass(frozen=True)
class Difference:
    """What there is to say of an answer that differs from the one it should be.

    Attributes:
        at: the first token that differs, from 0.
        shortfall: by how much the worst of the tokens in question is worse than the best one at its place, in
            standard deviations of the place's logits; infinite where an answer ends before the other one.
        tie: whether that is within what rounding explains.
    """

    at: int
    shortfall: float
    tie: bool


def compare(
    model: CausalLM, prompt: Sequence[int], answer: Sequence[int], truth: Sequence[int]
) -> Difference | None:
    """How a greedy answer differs from the one that was computed without any cache; None if it does not.

    At the first token that differs both must be a tie with the best one. What follows in the answer belongs
    to another text than what follows in `truth`, so each of its tokens must be the best there, or a tie.

    Args:
        prompt: ids, one at least.
        answer, truth: ids.
    """
    if tuple(answer) == tuple(truth):
        return None
    both = min(len(answer), len(truth))
    at = next((at for at in range(both) if answer[at] != truth[at]), both)
    if at == both:
        return Difference(at, math.inf, False)
    logits = uncached_logits(model, prompt, answer)[at:]
    found = torch.cat((shortfalls(logits, answer[at:]), shortfalls(logits[:1], truth[at : at + 1])))
    worst = float(found.max())
    return Difference(at, worst, worst < ROUNDING.get(str(model.dtype).removeprefix("torch."), 0.0))


def shortfalls(logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """By how much each token is worse than the best one at its place.

    Args:
        logits: float32 [n, vocab_size], what each token was chosen from.
        tokens: [n], ids.

    Returns:
        float32 [n], on the logits' device, in standard deviations of the place's logits; 0 for the best.
    """
    taken = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    return (logits.amax(-1) - taken) / logits.std(-1)


@torch.inference_mode()
def uncached_logits(model: CausalLM, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """What each token of an answer is chosen from, computed in one pass over KV of its own.

    Args:
        prompt: ids, one at least.
        answer: ids, one at least.

    Returns:
        float32 [len(answer), vocab_size], on the model's device.
    """
    device, layout = model.device, model.kv_layout()
    tokens = torch.tensor([*prompt, *answer[:-1]], device=device)
    count = len(tokens)
    blocks = layout.blocks_for(count)
    memory = torch.zeros(blocks * layout.block_bytes + SLICE_ALIGNMENT, dtype=torch.uint8, device=device)
    first = -(-memory.data_ptr() // SLICE_ALIGNMENT) * SLICE_ALIGNMENT
    table = (first + torch.arange(blocks, device=device) * layout.block_bytes)[None]
    positions = torch.arange(count, device=device)
    addresses, offsets = token_slots(table, torch.zeros_like(positions), positions, layout)
    lengths = torch.tensor([count], dtype=torch.int32, device=device)
    batch = ForwardBatch(
        tokens=tokens,
        positions=positions,
        addresses=addresses,
        offsets=offsets,
        num_decode=0,
        decode_table=table[:0],
        decode_lens=lengths[:0],
        prefill_table=table,
        prefill_lens=lengths,
        cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32, device=device),
        logits_at=positions[len(prompt) - 1 :],
        prefill_far=False,
    )
    logits: torch.Tensor = model(batch, layout)
    return logits
