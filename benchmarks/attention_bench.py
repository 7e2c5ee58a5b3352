"""What the attention benchmarks share: memory full of random KV, block tables over it, exact results.

Everything here also runs on a CPU, where host memory stands for both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from kvpager import kernels
from kvpager.benchmarks.ceilings import Contender, Timing, Work, race
from kvpager.tiers.address import FAR, INSTALL
from kvpager.tiers.layout import SLICE_ALIGNMENT, KVLayout

__all__ = [
    "ERROR_LIMIT",
    "Batch",
    "Bench",
    "Deck",
    "Decoding",
    "Heads",
    "Memory",
    "Row",
    "attention_error",
    "expected",
    "print_table",
    "relative_error",
    "sequence_kv",
    "trace_lengths",
]

Row = dict[str, Any]
"""One line of a figure's table."""

ERROR_LIMIT: Final = 2e-3
"""Relative error against float64 from which a result in float16 counts as wrong."""
MAX_SETS: Final = 8
"""Batches that a graph rotates over, so that no step finds the last one's pages in L2."""
UNREAD_WORD: Final = -1
"""Stands behind a sequence's last block, where no kernel may look."""
_FILL_ELEMENTS: Final = 1 << 29
_CHUNK_ELEMENTS: Final = 8  # of 2 bytes: the 16 bytes that the swizzle moves


@dataclass(frozen=True)
class Heads:
    """The heads of a model: queries, keys and values, elements of each."""

    query: int
    kv: int
    dim: int

    def layout(self, layers: int = 1, block_size: int = 16) -> KVLayout:
        return KVLayout(layers, self.kv, self.dim, block_size)

    def __str__(self) -> str:
        return f"{self.query}/{self.kv} D{self.dim}"


class Memory:
    """Device memory and page-locked host memory, both full of normal random float16.

    Swizzled rows of independent random numbers are such rows again, so the bytes serve any layout as they
    are: what a block holds is what reading it by its layout gives. So kvpager and its peer read the very same
    bytes, each by its own rules.

    Args:
        device: a GPU, or the CPU, where both are ordinary memory.
        near_bytes, far_bytes: of the device's memory and the host's.
    """

    def __init__(self, device: torch.device, near_bytes: int, far_bytes: int) -> None:
        self.device = device
        self.near = _aligned(near_bytes, device, pinned=False)
        for piece in torch.split(self.near, _FILL_ELEMENTS):
            piece.normal_()
        self.far = _aligned(far_bytes, torch.device("cpu"), pinned=device.type == "cuda")
        for piece in torch.split(self.far, _FILL_ELEMENTS):
            piece.copy_(torch.randn(piece.shape, dtype=torch.float16, device=device))

    def blocks(self, layout: KVLayout, far: bool) -> torch.Tensor:
        """float16 [blocks, layers, 2, kv_heads, block_size, head_dim]: one memory as it lies."""
        memory = self.far if far else self.near
        size = layout.block_bytes // 2
        count = memory.numel() // size
        shape = (layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        return memory[: count * size].view(count, *shape)


def _aligned(nbytes: int, device: torch.device, *, pinned: bool) -> torch.Tensor:
    """float16 memory from a multiple of 128 bytes on. What CUDA allocates begins on one."""
    spare = 0 if pinned or device.type == "cuda" else SLICE_ALIGNMENT
    memory = torch.empty((nbytes + spare) // 2, dtype=torch.float16, device=device, pin_memory=pinned)
    skipped = -memory.data_ptr() % SLICE_ALIGNMENT // 2
    return memory[skipped : skipped + nbytes // 2]


class Deck:
    """Deals the numbers of blocks in random order, none twice."""

    def __init__(self, memory: Memory, layout: KVLayout, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._left = {
            far: torch.randperm(memory.blocks(layout, far).shape[0], generator=generator)
            for far in (False, True)
        }

    def deal(self, count: int, far: bool) -> torch.Tensor:
        """int64 [count], on the CPU."""
        left = self._left[far]
        if count > len(left):
            raise SystemExit(
                f"{count} more blocks in {'host' if far else 'device'} memory do not fit: give it more"
            )
        self._left[far] = left[count:]
        return left[:count]


@dataclass(frozen=True)
class Batch:
    """The block table of one step.

    Attributes:
        lengths: tokens of each sequence.
        ids: int64 [seqs, max_blocks] on the CPU, the number of each block in its memory.
        far: bool [seqs, max_blocks] on the CPU, whether that is the host's.
        words: int64 [seqs, max_blocks] on the device, block addresses with their tags.
        lens: int32 [seqs] on the device.
        near_bytes, far_bytes: KV that attention reads of each memory, a block once for every sequence.
    """

    lengths: tuple[int, ...]
    ids: torch.Tensor
    far: torch.Tensor
    words: torch.Tensor
    lens: torch.Tensor
    near_bytes: int
    far_bytes: int

    @classmethod
    def over(
        cls,
        memory: Memory,
        layout: KVLayout,
        lengths: Sequence[int],
        ids: torch.Tensor,
        far: torch.Tensor,
        *,
        install: bool = False,
    ) -> Batch:
        """A batch over blocks that were dealt. ``install`` tags the far ones so."""
        tokens = _tokens(layout, lengths, ids.shape[1])
        tags = torch.where(far, FAR | (INSTALL if install else 0), 0)
        base = torch.where(far, memory.far.data_ptr(), memory.near.data_ptr())
        words = torch.where(tokens > 0, base + ids * layout.block_bytes + tags, UNREAD_WORD)
        token_bytes = layout.token_bytes // layout.num_layers
        return cls(
            tuple(lengths),
            ids,
            far,
            words.to(memory.device),
            torch.tensor(lengths, dtype=torch.int32, device=memory.device),
            near_bytes=int(tokens[~far].sum()) * token_bytes,
            far_bytes=int(tokens[far].sum()) * token_bytes,
        )

    @classmethod
    def dealt(
        cls,
        memory: Memory,
        layout: KVLayout,
        deck: Deck,
        lengths: Sequence[int],
        far: torch.Tensor | bool = False,
    ) -> Batch:
        """A batch over blocks of its own; ``far``: of each [seqs, max_blocks], or of all."""
        width = max(layout.blocks_for(length) for length in lengths)
        used = _tokens(layout, lengths, width) > 0
        where = torch.full(used.shape, far) if isinstance(far, bool) else far
        ids = torch.zeros(used.shape, dtype=torch.int64)
        for side in (False, True):
            chosen = used & (where == side)
            ids[chosen] = deck.deal(int(chosen.sum()), side)
        return cls.over(memory, layout, lengths, ids, where & used)


def _tokens(layout: KVLayout, lengths: Sequence[int], width: int) -> torch.Tensor:
    """int64 [seqs, width]: tokens in each block, per layer."""
    begins = torch.arange(width) * layout.block_size
    return (torch.tensor(lengths)[:, None] - begins).clamp(0, layout.block_size)


def sequence_kv(
    batch: Batch, seq: int, memory: Memory, layout: KVLayout, layer: int = 0, *, swizzled: bool = True
) -> torch.Tensor:
    """float64 [2, kv_heads, tokens, head_dim]: what a sequence's blocks hold.

    ``swizzled`` False reads rows as they lie, as a peer does.
    """
    length = batch.lengths[seq]
    count = layout.blocks_for(length)
    ids, far = batch.ids[seq, :count], batch.far[seq, :count]
    shape = (count, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    data = torch.empty(shape, dtype=torch.float16, device=memory.device)
    for side in (False, True):
        if bool((far == side).any()):
            blocks = memory.blocks(layout, side)
            chosen = ids[far == side].to(blocks.device)
            data[(far == side).to(data.device)] = blocks[:, layer][chosen].to(data.device)
    if swizzled:
        # Chunk c of row t is stored at chunk c XOR (t mod 8).
        chunks = torch.arange(layout.head_dim // _CHUNK_ELEMENTS, device=data.device)
        stored = chunks ^ (torch.arange(layout.block_size, device=data.device) % 8)[:, None]
        split = data.view(*shape[:-1], -1, _CHUNK_ELEMENTS)
        data = split.gather(4, stored[:, :, None].expand(split.shape)).view(shape)
    rows = data.permute(1, 2, 0, 3, 4).reshape(2, layout.num_kv_heads, -1, layout.head_dim)
    return rows[:, :, :length].double()


def expected(q: torch.Tensor, positions: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """Causal attention in float64.

    Args:
        q: [n, q_heads, head_dim].
        positions: int64 [n], each query's position in its sequence.
        kv: float64 [2, kv_heads, tokens, head_dim].

    Returns:
        float64 [n, q_heads, head_dim].
    """
    keys, values = kv
    heads, tokens, dim = keys.shape
    queries = q.double().view(q.shape[0], heads, -1, dim)
    scores = torch.einsum("nhgd,htd->nhgt", queries, keys) / math.sqrt(dim)
    hidden = torch.arange(tokens, device=q.device) > positions[:, None]
    weights = scores.masked_fill(hidden[:, None, None], -math.inf).softmax(-1)
    return torch.einsum("nhgt,htd->nhgd", weights, values).reshape(q.shape)


def attention_error(
    out: torch.Tensor,
    q: torch.Tensor,
    batch: Batch,
    memory: Memory,
    layout: KVLayout,
    *,
    swizzled: bool = True,
) -> float:
    """The larger relative error of two sequences of a decoding step, the first and the last.

    Args:
        out, q: [seqs, q_heads, head_dim].
    """
    worst = 0.0
    for seq in {0, len(batch.lengths) - 1}:
        kv = sequence_kv(batch, seq, memory, layout, swizzled=swizzled)
        last = torch.tensor([batch.lengths[seq] - 1], device=q.device)
        worst = max(worst, relative_error(out[seq : seq + 1], expected(q[seq : seq + 1], last, kv)))
    return worst


def relative_error(found: torch.Tensor, true: torch.Tensor) -> float:
    """The norm of the difference over the norm of what is right; infinity where something is no number."""
    error = float((found.double() - true).norm() / true.norm())
    return error if math.isfinite(error) else math.inf


@dataclass
class Bench:
    """What the figures share.

    Attributes:
        memory: what they read.
        timed: whether cases are timed after they were checked.
        seconds: device time of each contender of a race.
        peer: whether the peer takes part.
        trace: a file of requests, or None.
        wrong: cases whose result was wrong.
    """

    memory: Memory
    timed: bool
    seconds: float
    peer: bool = False
    trace: Path | None = None
    wrong: list[str] = field(default_factory=list)

    def judge(self, case: str, error: float, row: Row) -> bool:
        """Note a case's error; whether to go on and time it."""
        row.update(case=case, error=error)
        if not error < ERROR_LIMIT:
            self.wrong.append(case)
            row["right"] = False
            return False
        return self.timed

    def race(self, contenders: Mapping[str, Contender]) -> dict[str, Timing]:
        """Time them, each for as long as this benchmark gives a contender."""
        return race(contenders, self.seconds)

    def sets(self, nbytes: int, *, far: bool = False) -> int:
        """How many batches of ``nbytes`` to rotate over."""
        memory = self.memory.far if far else self.memory.near
        return min(MAX_SETS, max(1, memory.numel() * memory.element_size() // nbytes))


class Decoding:
    """kvpager's decoding of batches of one shape, planned, a step each.

    Attributes:
        q: float16 [seqs, q_heads, head_dim], of all batches.
        out: where every step writes.
        steps: one for each batch.
    """

    def __init__(
        self,
        memory: Memory,
        heads: Heads,
        layout: KVLayout,
        batches: Sequence[Batch],
        installs: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        self.memory, self.layout, self.batches = memory, layout, batches
        seqs = len(batches[0].lengths)
        self.q = torch.randn(seqs, heads.query, heads.dim, dtype=torch.float16, device=memory.device)
        self.out = torch.empty_like(self.q)
        targets = installs or [None] * len(batches)
        self.steps = [self._step(batch, to) for batch, to in zip(batches, targets, strict=True)]

    def _step(self, batch: Batch, install: torch.Tensor | None) -> Work:
        plan = kernels.decode_plan(batch.words, batch.lens, self.layout)

        def step() -> None:
            kernels.decode_attention(
                self.q, batch.words, batch.lens, 0, self.layout, install=install, plan=plan, out=self.out
            )

        return step

    def error(self) -> float:
        """The worst relative error of the first and the last batch, over what was there before."""
        worst = 0.0
        for number in {0, len(self.batches) - 1}:
            self.out.fill_(torch.nan)
            self.steps[number]()
            batch = self.batches[number]
            worst = max(worst, attention_error(self.out, self.q, batch, self.memory, self.layout))
        return worst


def trace_lengths(path: Path | None, count: int, seed: int) -> list[int]:
    """Lengths of sequences as they were asked for: prompt and answer of requests drawn from a trace.

    Args:
        path: lines of JSON with ``input_length`` and ``output_length``; None, or a file that is not there:
            a log-normal distribution with a median of 7,000 tokens.
    """
    rng = np.random.default_rng(seed)
    if path is None or not path.exists():
        drawn = np.exp(rng.normal(math.log(7000), 0.9, count)).clip(1, 131072)
        return [int(length) for length in drawn]
    with path.open() as lines:
        requests = [json.loads(line) for line in lines]
    every = [request["input_length"] + request["output_length"] for request in requests]
    return [int(length) for length in rng.choice(every, count, replace=False)]


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows under the names of what they hold."""
    if not rows:
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    print(f"\n{title}", flush=True)
    for line in cells:
        print("  ".join(_padded(line, widths)).rstrip(), flush=True)


def _padded(line: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    for i, (text, width) in enumerate(zip(line, widths, strict=True)):
        yield text.ljust(width) if i == 0 else text.rjust(width)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return (
            f"{value:.1e}" if 0 < abs(value) < 0.01 else f"{value:.3f}" if abs(value) < 20 else f"{value:.1f}"
        )
    return str(value)
