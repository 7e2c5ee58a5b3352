"""What a serving engine is measured by, taken from outside between its steps.

Latencies are those that users have: from a request to its first token, and from each token to the next, with
all that lies between, be it sleep. Numbers of tokens are read from the scheduler's arrays, a few array
operations a step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from kvpager.engine import LLM
from kvpager.engine.sequence import Sequence
from kvpager.kvstore.store import TieredStore
from kvpager.tiers.address import FAR

__all__ = ["Meter", "Traffic", "VramUse", "far_blocks", "percentiles", "vram_use"]

_WASTE_EVERY: Final = 16
"""Steps between two looks at VRAM."""


@dataclass(frozen=True)
class VramUse:
    """What the blocks of the device tier that are not free are for, in tokens of room.

    Attributes:
        allocated: in blocks that are not free.
        wasted: of it, in blocks of running sequences and after their last token; after the last token of the
            partly filled blocks of sleepers; and in blocks that nobody reads: those that copies are on their
            way to.
    """

    allocated: int
    wasted: int

    @property
    def waste(self) -> float:
        """The wasted share of what is allocated."""
        return self.wasted / self.allocated if self.allocated else 0.0


@dataclass(frozen=True)
class Traffic:
    """Blocks that crossed PCIe.

    Attributes:
        copied_up: to the device tier, by copies or as attention read them.
        read_in_place: read in host memory by attention, and not kept.
        copied_down: to host memory.
    """

    copied_up: int
    read_in_place: int
    copied_down: int

    def bytes_per_token(self, block_bytes: int, tokens: int) -> dict[str, float]:
        """Bytes per token of answers, each way and together; JSON."""
        scale = block_bytes / max(1, tokens)
        parts = {
            "copied_up": self.copied_up * scale,
            "read_in_place": self.read_in_place * scale,
            "copied_down": self.copied_down * scale,
        }
        return {**parts, "all": sum(parts.values())}


class Meter:
    """Watches an engine. Call `submitted` for each request and `after_step` after each step.

    Args:
        llm: the engine.
        tails: names of the partly filled blocks of sleepers, and how many tokens are in each; it may change.
    """

    def __init__(self, llm: LLM, tails: Mapping[bytes, int] | None = None) -> None:
        self._llm = llm
        self._tails = {} if tails is None else tails
        self._prompts = np.zeros(1024, dtype=np.int64)
        self._counts = np.zeros(1024, dtype=np.int64)
        self._at = np.zeros(1024)
        self._paused: float | None = None
        self.restart()

    def restart(self) -> None:
        """Begin a window: nothing is measured yet."""
        self._begun = time.monotonic()
        self._first: list[npt.NDArray[np.float64]] = []
        self._gaps: list[npt.NDArray[np.float64]] = []
        self._gap_ids: list[npt.NDArray[np.int64]] = []
        self._steps = 0
        self._uses: list[VramUse] = []
        self._crossed = self._crossed_so_far()
        self._preemptions = self._llm.scheduler.preemptions
        self.tokens = 0
        """Tokens of answers in this window."""

    @property
    def seconds(self) -> float:
        """Length of the window so far."""
        return (self._paused or time.monotonic()) - self._begun

    def pause(self) -> None:
        """The engine makes no steps until `resume`: that time is nobody's."""
        self._paused = time.monotonic()

    def resume(self) -> None:
        """It goes on."""
        if self._paused is not None:
            away = time.monotonic() - self._paused
            self._begun += away
            self._at += away
            self._paused = None

    def submitted(self, sequence: Sequence) -> None:
        """A request came."""
        if sequence.id >= len(self._counts):
            more = max(len(self._counts), sequence.id + 1 - len(self._counts))
            self._prompts, self._counts = (np.pad(old, (0, more)) for old in (self._prompts, self._counts))
            self._at = np.pad(self._at, (0, more))
        self._prompts[sequence.id] = self._counts[sequence.id] = sequence.num_prompt
        self._at[sequence.id] = sequence.arrived_at

    def after_step(self) -> None:
        """A step is done: take the tokens that it gave."""
        now = time.monotonic()
        scheduler = self._llm.scheduler
        # Of rows that somebody has or had: what a sequence had when it left one is no more than is known.
        # Those that were not submitted to this meter have a prompt of no tokens here.
        rows = np.flatnonzero((scheduler.owners >= 0) & (scheduler.owners < len(self._counts)))
        ids, counts = scheduler.owners[rows], scheduler.counts[rows]
        new = (counts > self._counts[ids]) & (self._prompts[ids] > 0)
        ids, counts = ids[new], counts[new]
        first = self._counts[ids] == self._prompts[ids]
        waited = now - self._at[ids]
        self.tokens += int((counts - self._counts[ids]).sum())
        self._counts[ids] = counts
        self._at[ids] = now
        self._first.append(waited[first])
        self._gaps.append(waited[~first])
        self._gap_ids.append(ids[~first])
        self._steps += 1
        if self._steps % _WASTE_EVERY == 1:
            self._uses.append(vram_use(self._llm.store, self._tails))

    def first_tokens(self) -> npt.NDArray[np.float64]:
        """Seconds to the first token of each request that got it, float64."""
        return np.concatenate(self._first) if self._first else np.empty(0)

    def gaps(self, ids: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float64]:
        """Seconds between two tokens of a sequence, float64: of all, or of those with these ids."""
        if not self._gaps:
            return np.empty(0)
        gaps = np.concatenate(self._gaps)
        return gaps if ids is None else gaps[np.isin(np.concatenate(self._gap_ids), ids)]

    def traffic(self) -> Traffic:
        """What crossed PCIe."""
        begun, now = self._crossed, self._crossed_so_far()
        return Traffic(
            now.copied_up - begun.copied_up,
            now.read_in_place - begun.read_in_place,
            now.copied_down - begun.copied_down,
        )

    def _crossed_so_far(self) -> Traffic:
        """What crossed since the engine was made."""
        store, steps = self._llm.store.stats, self._llm.scheduler.stats
        return Traffic(store.promoted, steps.read_in_place - steps.installed, store.written_back)

    def summary(self) -> dict[str, Any]:
        """All of it, for JSON; times in seconds."""
        seconds = self.seconds
        waste = [use.waste for use in self._uses]
        return {
            "seconds": seconds,
            "steps": self._steps,
            "output_tokens": self.tokens,
            "tokens_per_s": self.tokens / seconds,
            "first_token_s": percentiles(self.first_tokens()),
            "between_tokens_s": percentiles(self.gaps()),
            "pcie_bytes_per_token": self.traffic().bytes_per_token(self._llm.layout.block_bytes, self.tokens),
            "vram_waste": {"mean": float(np.mean(waste)), "most": max(waste)} if waste else None,
            "preemptions": self._llm.scheduler.preemptions - self._preemptions,
        }


def percentiles(seconds: npt.NDArray[np.float64]) -> dict[str, float | int | None]:
    """Median and 99th percentile, and of how many; None where there is nothing."""
    if not len(seconds):
        return {"count": 0, "p50": None, "p99": None}
    p50, p99 = np.percentile(seconds, (50, 99))
    return {"count": len(seconds), "p50": float(p50), "p99": float(p99)}


def far_blocks(store: TieredStore) -> int:
    """Different blocks in host memory that rows name: what a step of all rows reads in place."""
    words = _words(store)
    far = words[(words & FAR) != 0]
    return len(np.unique(far)) if len(far) else 0


def vram_use(store: TieredStore, tails: Mapping[bytes, int]) -> VramUse:
    """What the device tier's blocks are for just now.

    Args:
        tails: names of partly filled blocks that may be kept there, and how many tokens are in each.
    """
    pool, size = store.pool, store.layout.block_size
    rows = store.table.rows_in_use
    # Only after its last token may a row have room that it does not use, and that is in blocks of its own.
    unused = int((store.table.counts[rows] * size - store.lengths[rows]).sum())
    words = _words(store)
    read = len(np.unique(words[(words & FAR) == 0]))
    held = pool.capacity - pool.available
    kept = {name: pool.index[name] for name in tails if name in pool.index}
    unused += sum(size - tails[name] for name, block in kept.items() if not pool.refs[block])
    return VramUse((pool.capacity - pool.free) * size, unused + (held - read) * size)


def _words(store: TieredStore) -> npt.NDArray[np.int64]:
    """The words of all rows, int64."""
    table = store.table
    rows = table.rows_in_use
    counts = table.counts[rows]
    width = int(counts.max(initial=0))
    words: npt.NDArray[np.int64] = table.words[rows, :width][np.arange(width) < counts[:, None]]
    return words
