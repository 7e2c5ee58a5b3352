"""Traces: what a cache was asked for and given, over time, as arrays.

An *event* is one call: a look-up of a chain's blocks, blocks that are put, or both. Two kinds of files are
read (`kvstore.trace_files`), and traces are made (`kvstore.chat_traces`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from .lineage import ShortHashes

__all__ = ["BlockNumbers", "Trace", "TraceEvent", "mixed"]

BlockNumbers: TypeAlias = npt.NDArray[np.int32]
"""int32 [n] of a trace's blocks: each different one has a number, from 0 up."""
_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True, eq=False)
class TraceEvent:
    """One event, as a file has it.

    Args:
        time: seconds since the trace's beginning.
        names: uint64 [n], of blocks that follow each other in a chain, none twice.
        asked: how many leading ones are looked up.
        filled: how many leading ones are put where they are not there.
        tokens: of the prompt, or of the blocks.
        depth: 1-based index of the first one in its chain; 0: not known.
        parent: name of the block before the first one; 0: none, or not known.
    """

    time: float
    names: ShortHashes
    asked: int
    filled: int
    tokens: int
    depth: int = 1
    parent: int = 0


@dataclass(frozen=True, eq=False)
class Trace:
    """A trace of n events that name b blocks in all, d different ones.

    Attributes:
        block_size: tokens of a block.
        block_bytes: bytes of a block; None: the trace does not say.
        times: float64 [n], seconds since its beginning, in order.
        starts: int64 [n + 1]; the blocks of event i are ``blocks[starts[i]:starts[i + 1]]``.
        blocks: int32 [b], the blocks' numbers.
        asked: int32 [n], how many leading blocks of each event are looked up.
        filled: int32 [n], how many leading ones are put where they are not there.
        tokens: int64 [n], of the prompt of each event.
        names: uint64 [d], the name of each block number.
        parents: uint64 [d], the name of the block before each; 0: none, or not known.
        depths: int32 [d], 1-based index of each in its chain; 0: not known.
    """

    block_size: int
    block_bytes: int | None
    times: npt.NDArray[np.float64]
    starts: npt.NDArray[np.int64]
    blocks: BlockNumbers
    asked: npt.NDArray[np.int32]
    filled: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int64]
    names: ShortHashes
    parents: ShortHashes
    depths: npt.NDArray[np.int32]

    @classmethod
    def of_events(
        cls, events: Iterable[TraceEvent], block_size: int, block_bytes: int | None = None
    ) -> Trace:
        """The trace of these events, which are put in the order of their times."""
        ordered = sorted(events, key=lambda event: event.time)
        counts = np.array([len(event.names) for event in ordered], dtype=np.int64)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
        named = np.empty(int(starts[-1]), dtype=np.uint64)
        for event, start, end in zip(ordered, starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            named[start:end] = event.names
        names, blocks = np.unique(named, return_inverse=True)
        parents, depths = _places(ordered, starts, named)
        # What a later event says of a block is what the first one said: its name says what is before it.
        known = np.flatnonzero(depths)[::-1]
        block_parents, block_depths = np.zeros_like(names), np.zeros(len(names), dtype=np.int32)
        block_parents[blocks[known]] = parents[known]
        block_depths[blocks[known]] = depths[known]
        first = ordered[0].time if ordered else 0.0
        return cls(
            block_size,
            block_bytes,
            np.array([event.time - first for event in ordered], dtype=np.float64),
            starts,
            blocks.astype(np.int32),
            np.array([event.asked for event in ordered], dtype=np.int32),
            np.array([event.filled for event in ordered], dtype=np.int32),
            np.array([event.tokens for event in ordered], dtype=np.int64),
            names,
            block_parents,
            block_depths,
        )

    def __len__(self) -> int:
        return len(self.times)

    @property
    def distinct(self) -> int:
        """How many different blocks there are."""
        return len(self.names)

    @property
    def references(self) -> int:
        """How many blocks are looked up in all."""
        return int(self.asked.sum())

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts that are looked up."""
        return int(self.tokens[self.asked > 0].sum())

    @property
    def seconds(self) -> float:
        """From the first event to the last."""
        return float(self.times[-1]) if len(self) else 0.0

    def chain(self, event: int) -> BlockNumbers:
        """The blocks of one event."""
        return self.blocks[self.starts[event] : self.starts[event + 1]]

    def hit_tokens(self, hits: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Tokens in so many leading blocks of each event, int64 [n]; the last may be partly full."""
        return np.minimum(hits.astype(np.int64) * self.block_size, self.tokens)


def _places(
    events: Sequence[TraceEvent], starts: npt.NDArray[np.int64], names: ShortHashes
) -> tuple[ShortHashes, npt.NDArray[np.int32]]:
    """The name before each block of all events, and its place in its chain; 0 where that is not known."""
    some = np.flatnonzero(np.diff(starts))
    firsts = starts[some]
    parents = np.concatenate([np.zeros(1, np.uint64), names[:-1]]) if len(names) else names.copy()
    parents[firsts] = [events[at].parent for at in some.tolist()]
    depths = np.array([event.depth for event in events], dtype=np.int64)
    counts = np.diff(starts)
    places = np.arange(len(names)) + np.repeat(depths - starts[:-1], counts)
    unknown = np.repeat(depths == 0, counts)
    places[unknown], parents[unknown] = 0, 0
    return parents, places.astype(np.int32)


def mixed(numbers: npt.NDArray[np.uint64]) -> ShortHashes:
    """Numbers as names that look like hashes: different for different ones, and none of them 0.

    The finaliser of SplitMix64 (Steele, Lea, Flood 2014), which is a bijection, over the numbers from 1 up.
    """
    z = (numbers + np.uint64(1)) * _STEP
    z = (z ^ (z >> np.uint64(30))) * _MIX[0]
    z = (z ^ (z >> np.uint64(27))) * _MIX[1]
    names: ShortHashes = z ^ (z >> np.uint64(31))
    return names
