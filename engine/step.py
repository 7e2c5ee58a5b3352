"""What one forward pass computes, as the scheduler decided it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..kvstore.store import Install
from .sequence import Sequence

__all__ = ["Chunk", "Rows", "Step"]

Rows: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Chunk:
    """Tokens ``[start, start + count)`` of a sequence whose KV this step computes.

    `last`: the last of them is the newest token known, so its logits are wanted.
    """

    sequence: Sequence
    row: int
    start: int
    count: int
    last: bool


@dataclass(frozen=True)
class Step:
    """What one forward pass computes.

    Attributes:
        rows: int64 [n], the rows that decode, ascending.
        lengths: int64 [n], tokens of each whose KV is there: the position of the token that runs.
        tokens: int32 [n], these tokens.
        chunks: the prompts' parts.
        install: what the step copies to the device tier as it reads it, or None.
        read_in_place: blocks of host memory that it reads where they lie, what it installs counted.
        copied: blocks that began to come up by the copy engine when it was put together.
    """

    rows: Rows
    lengths: Rows
    tokens: npt.NDArray[np.int32]
    chunks: tuple[Chunk, ...]
    install: Install | None = None
    read_in_place: int = 0
    copied: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(chunk.count for chunk in self.chunks)

    @property
    def sampled_rows(self) -> Rows:
        """int64: the rows that get a token, in the order of the logits."""
        ends = [chunk.row for chunk in self.chunks if chunk.last]
        return np.concatenate([self.rows, np.array(ends, dtype=np.int64)]) if ends else self.rows
