"""What prefilling takes, learned from the steps that an engine runs anyway."""

from __future__ import annotations

from typing import Final

from ..kvstore.store import TieredStore
from .step import Step

__all__ = ["learn_compute"]

_CHUNK_SHARE: Final = 0.75
"""Of a step's tokens: where fewer are of prompts, it tells of decoding rather than of prefilling."""


def learn_compute(store: TieredStore, step: Step, seconds: float) -> None:
    """A step took so many seconds: refine the store's cost model.

    A step that reads host memory in place says something of that, too, and is passed over.
    """
    if not step.chunks:
        return
    chunked = sum(chunk.count for chunk in step.chunks)
    tokens = chunked + len(step.rows)
    if chunked < _CHUNK_SHARE * tokens or any(store.far_blocks(chunk.row) for chunk in step.chunks):
        return
    pairs = sum(chunk.count * (chunk.start + chunk.count / 2) for chunk in step.chunks)
    store.costs.compute.computed(tokens, pairs + float(step.lengths.sum()), seconds)
