"""Prefilling a chunk on a long prefix that lies in host memory, all layers of an 8B model.

The same chunk on the same bytes in three places: the prefix in host memory with room for it in VRAM, so that
it is installed on the way; in host memory without room; and in HBM, which is what the arithmetic alone takes.
Beside them are movers that do nothing else: a layer's pages by a kernel, by the copy engine in one call a
layer, and whole blocks by the copy engine in one call. The chunk is to take the longer of the better mover of
pages and of the arithmetic, and little more.

A chunk is timed by the clock, from an idle device to an idle device, since it may use streams of its own; its
plan is made anew each time. Results and installed bytes are checked before. ``--tiny`` checks a small chunk
and times nothing, also on a CPU.

    python benchmarks/prefill_attention.py [--out DIR]
    python benchmarks/prefill_attention.py --device cpu --tiny
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from kvpager import kernels
from kvpager.benchmarks.attention_bench import (
    ERROR_LIMIT,
    Batch,
    Bench,
    Deck,
    Heads,
    Memory,
    Row,
    expected,
    print_table,
    relative_error,
    sequence_kv,
)
from kvpager.benchmarks.ceilings import (
    SECONDS,
    Contender,
    Work,
    by_the_clock,
    copies_batched,
    copies_by_kernel,
    eager,
    fastest,
    use_stream,
)
from kvpager.benchmarks.report import write_report
from kvpager.tiers.layout import KVLayout

HEADS: Final = Heads(32, 8, 128)
TARGET: Final = 1.10
CHECKED_QUERIES: Final = 3
_BLOCKS_AT_ONCE: Final = 64


@dataclass(frozen=True)
class Chunk:
    """A chunk of queries on a prefix.

    Attributes:
        layers: of the model.
        prefix: tokens that are there already, whole blocks.
        queries: tokens of the chunk, whole blocks; their own keys and values are in VRAM.
    """

    layers: int
    prefix: int
    queries: int


FULL: Final = Chunk(32, 16384, 512)
TINY: Final = Chunk(3, 96, 32)


class Prefill:
    """kvpager's prefill of one chunk over a batch of one sequence, all layers.

    Attributes:
        q: float16 [layers, queries, q_heads, head_dim].
        out: where each layer's result goes, of the same shape.
    """

    def __init__(
        self, q: torch.Tensor, batch: Batch, layout: KVLayout, install: torch.Tensor | None = None
    ) -> None:
        self.q, self.batch, self.layout, self.install = q, batch, layout, install
        self.out = torch.empty_like(q)
        self._bounds = torch.tensor([0, q.shape[1]], dtype=torch.int32, device=q.device)

    def run(self) -> None:
        """A plan, and one call a layer."""
        batch, layout = self.batch, self.layout
        plan = kernels.prefill_plan(self._bounds, batch.words, batch.lens, layout)
        for layer in range(layout.num_layers):
            kernels.prefill_attention(
                self.q[layer],
                self._bounds,
                batch.words,
                batch.lens,
                layer,
                layout,
                install=self.install,
                plan=plan,
                out=self.out[layer],
            )

    def error(self, memory: Memory) -> float:
        """The worst relative error of the first and the last layer: first, middle and last query."""
        self.out.fill_(torch.nan)
        self.run()
        count = self.q.shape[1]
        chosen = torch.linspace(0, count - 1, CHECKED_QUERIES).long().to(self.q.device)
        positions = chosen + self.batch.lengths[0] - count
        worst = 0.0
        for layer in (0, self.layout.num_layers - 1):
            kv = sequence_kv(self.batch, 0, memory, self.layout, layer)
            true = expected(self.q[layer, chosen], positions, kv)
            worst = max(worst, relative_error(self.out[layer, chosen], true))
        if not bool(self.out.isfinite().all()):
            return float("inf")
        return worst


def measure(bench: Bench, chunk: Chunk) -> list[Row]:
    """The chunk in its three places, and the movers."""
    memory, layout = bench.memory, HEADS.layout(chunk.layers)
    blocks, own = layout.blocks_for(chunk.prefix), layout.blocks_for(chunk.queries)
    deck = Deck(memory, layout, seed=7)
    length = [chunk.prefix + chunk.queries]
    prefix, copies, tail = deck.deal(blocks, True), deck.deal(blocks, False), deck.deal(own, False)
    is_far = (torch.arange(blocks + own) < blocks)[None]
    far_ids, near_ids = torch.cat((prefix, tail))[None], torch.cat((copies, tail))[None]
    read = Batch.over(memory, layout, length, far_ids, is_far)
    tagged = Batch.over(memory, layout, length, far_ids, is_far, install=True)
    near = Batch.over(memory, layout, length, near_ids, torch.zeros_like(is_far))
    shape = (chunk.layers, chunk.queries, HEADS.query, HEADS.dim)
    q = torch.randn(shape, dtype=torch.float16, device=memory.device)
    chunks = {
        "host, installed": Prefill(q, tagged, layout, install=near.words),
        "host, no room": Prefill(q, read, layout),
        "HBM": Prefill(q, near, layout),  # last: it reads what the first one installed
    }
    memory.blocks(layout, False)[copies.to(memory.device)] = torch.nan
    rows: dict[str, Row] = {name: {} for name in chunks}
    timed = True
    for name, prefill in chunks.items():
        timed &= bench.judge(name, prefill.error(memory), rows[name])
        if name == "host, installed":
            rows[name]["bytes equal"] = installed = _installed(memory, layout, prefix, copies)
            if not installed:
                bench.wrong.append(f"{name}: installed bytes")
                return list(rows.values())
        rows[name]["bit-equal"] = torch.equal(prefill.out, chunks["host, installed"].out)
    if not timed:
        return list(rows.values())

    nbytes = chunk.prefix * layout.token_bytes
    times = by_the_clock({name: prefill.run for name, prefill in chunks.items()})
    moved = bench.race(movers(memory, layout, prefix, copies))
    page_movers = {name: timing for name, timing in moved.items() if not name.startswith("whole")}
    best = fastest(page_movers, "").seconds
    limit = max(best, times["HBM"].seconds)
    for name, row in rows.items():
        row |= {"ms": times[name].seconds * 1e3, "spread": times[name].spread}
        if name != "HBM":
            ratio = times[name].seconds / limit
            row |= {"prefix GB/s": nbytes / times[name].seconds / 1e9, "of limit": ratio}
            row["target"] = ratio <= TARGET
    return [
        *rows.values(),
        *(
            {
                "case": f"mover: {name}",
                "ms": timing.seconds * 1e3,
                "spread": timing.spread,
                "prefix GB/s": nbytes / timing.seconds / 1e9,
            }
            for name, timing in moved.items()
        ),
    ]


def _installed(memory: Memory, layout: KVLayout, prefix: torch.Tensor, copies: torch.Tensor) -> bool:
    """Whether the copies hold what the prefix holds, in all layers, to the bit."""
    far, near = memory.blocks(layout, True), memory.blocks(layout, False)
    pairs = zip(torch.split(prefix, _BLOCKS_AT_ONCE), torch.split(copies, _BLOCKS_AT_ONCE), strict=True)
    return all(
        torch.equal(
            far[source].to(memory.device).view(torch.int16), near[to.to(memory.device)].view(torch.int16)
        )
        for source, to in pairs
    )


def movers(
    memory: Memory, layout: KVLayout, prefix: torch.Tensor, copies: torch.Tensor
) -> dict[str, Contender]:
    """What brings the prefix into VRAM and does nothing else: pages layer by layer, or whole blocks."""
    src = memory.far.data_ptr() + prefix * layout.block_bytes
    dst = memory.near.data_ptr() + copies * layout.block_bytes
    offsets = [layer * layout.page_bytes for layer in range(layout.num_layers)]
    on_device = [((src + at).to(memory.device), (dst + at).to(memory.device)) for at in offsets]
    batches: list[Work] = [
        copies_batched((src + at).tolist(), (dst + at).tolist(), layout.page_bytes) for at in offsets
    ]

    def all_batches() -> None:
        for batch in batches:
            batch()

    hide_ms = 100.0
    whole = copies_batched(src.tolist(), dst.tolist(), layout.block_bytes)
    return {
        **copies_by_kernel(on_device, layout.page_bytes),
        "pages by DMA, a call a layer": eager(all_batches, hide_ms),
        "whole blocks by DMA, one call": eager(whole, hide_ms),
    }


def main() -> None:
    """Check, measure, print, and write what ``--out`` names."""
    parser = argparse.ArgumentParser(description="Prefill on a prefix in host memory.")
    parser.add_argument("--tiny", action="store_true", help="a small chunk, checked and not timed")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with --tiny")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="device time of each mover")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write prefill_attention.json here")
    arguments = parser.parse_args()
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("nothing is timed on a CPU: give --tiny")
    device = torch.device(arguments.device)
    if device.type == "cuda":
        use_stream()
    chunk = TINY if arguments.tiny else FULL
    layout = HEADS.layout(chunk.layers)
    far = layout.blocks_for(chunk.prefix) * layout.block_bytes
    near = far + 2 * layout.blocks_for(chunk.queries) * layout.block_bytes
    bench = Bench(Memory(device, near, far), timed=not arguments.tiny, seconds=arguments.seconds)
    rows = measure(bench, chunk)
    title = f"6. {chunk.queries} tokens on a prefix of {chunk.prefix}, {HEADS}, {chunk.layers} layers"
    print_table(title, rows)
    results: dict[str, Any] = {"error_limit": ERROR_LIMIT, "target": TARGET, "rows": rows}
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        path = arguments.out / "prefill_attention.json"
        write_report(path, results, "torch", "cupy-cuda13x", "cuda-bindings")
    if bench.wrong:
        sys.exit(f"wrong results: {', '.join(bench.wrong)}")


if __name__ == "__main__":
    main()
