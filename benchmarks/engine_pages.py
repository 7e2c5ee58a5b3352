"""Pages of an engine's layer-first tensors to blocks in host memory and back, and what that costs beside it.

The shape is that of an 8B model: 32 layers, 8 KV heads of 128, fp16, 16 tokens a page, 64 KiB of one layer.
In one run, taking turns: ``gather`` and ``scatter`` with several numbers of CTAs, the copy engine with a copy
a fragment in one call, and all bytes as one copy, the ceiling. Then a large matrix product runs beside a load
and beside a store, by the kernel and by the copy engine.

    python benchmarks/engine_pages.py [--seconds S] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from kvpager import KVLayout
from kvpager.benchmarks.ceilings import (
    Timing,
    captured,
    copies_batched,
    eager,
    keep_busy,
    race,
    use_stream,
)
from kvpager.benchmarks.report import write_report
from kvpager.kernels import EnginePages, gather, scatter

LAYERS, HEADS, HEAD_DIM, TOKENS = 32, 8, 128, 16
PAGES: Final = 1024
BLOCKS: Final = 128
CTAS: Final = (4, 8, 16, 32, 132)
CEILING: Final = "one piece"
HIDE_MS: Final = 40.0
HIDE_BESIDE_MS: Final = 120.0
"""The device is held until copies and products are enqueued: a batched call takes milliseconds."""
PRODUCTS: Final = 20
PRODUCT_SIZE: Final = 8192
ROUNDS: Final = 7
BESIDE_CTAS: Final = (4, 8, 16)

Row = dict[str, Any]
Work = Callable[[], object]


@dataclass(frozen=True)
class Bench:
    """An engine's tensors, blocks in page-locked host memory, and which pages go with which blocks.

    Attributes:
        pages: the engine's tensors.
        slots: int32 [blocks, pages of a block].
        blocks: int64 [blocks], addresses.
        fragments: (engine's address, block's address, bytes) of each contiguous run.
        host: the blocks, uint8.
        total: bytes of all blocks.
    """

    pages: EnginePages
    slots: torch.Tensor
    blocks: torch.Tensor
    fragments: tuple[list[int], list[int], int]
    host: torch.Tensor
    total: int

    @classmethod
    def make(cls, name: str, format: str) -> Bench:  # noqa: A002  as the layout calls it
        layout = KVLayout(LAYERS, HEADS, HEAD_DIM, TOKENS, dtype="float16", format=format)
        if name == "sglang":
            shape = (PAGES * TOKENS, HEADS, HEAD_DIM)
            keys, values = ([_random(shape) for _ in range(LAYERS)] for _ in range(2))
            pages = EnginePages.sglang(layout, keys, values)
        else:
            sizes = {"P": 2, "N": PAGES, "T": TOKENS, "H": HEADS, "D": HEAD_DIM}
            tensors = [_random([sizes[letter] for letter in name]) for _ in range(LAYERS)]
            pages = EnginePages.vllm(layout, tensors, name)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(pages.num_pages, generator=generator)
        slots = order[: BLOCKS * pages.pages_per_block].view(BLOCKS, -1)
        host = torch.empty(BLOCKS * layout.block_bytes, dtype=torch.uint8, pin_memory=True)
        host.random_(0, 256)
        blocks = torch.randperm(BLOCKS, generator=generator) * layout.block_bytes + host.data_ptr()
        fragments = _fragments(pages, slots, blocks, whole=name == "NPTHD")
        return cls(pages, slots.int().cuda(), blocks.cuda(), fragments, host, host.numel())


def _random(shape: Sequence[int]) -> torch.Tensor:
    return torch.randn(tuple(shape), dtype=torch.float16, device="cuda")


def _fragments(
    pages: EnginePages, slots: torch.Tensor, blocks: torch.Tensor, *, whole: bool
) -> tuple[list[int], list[int], int]:
    """Runs that are contiguous at both ends, were rows left in the engine's order; whole: K and V in one."""
    layout = pages.layout
    planes = pages.planes[:1] if whole else pages.planes
    nbytes = layout.page_bytes // len(planes) // pages.pages_per_block
    engine: list[int] = []
    block: list[int] = []
    for layer in range(LAYERS):
        for number, plane in enumerate(planes):
            tensor = plane[layer]
            starts = slots * tensor.stride(0) * tensor.element_size() + tensor.data_ptr()
            at = layer * layout.page_bytes + number * (layout.page_bytes // len(planes))
            places = blocks[:, None] + at + torch.arange(pages.pages_per_block) * nbytes
            engine += starts.flatten().tolist()
            block += places.flatten().tolist()
    return engine, block, nbytes


def directions(bench: Bench) -> dict[str, tuple[Callable[..., None], list[int], list[int]]]:
    """The kernel of each direction, and the sources and targets of its fragments."""
    engine, block, _ = bench.fragments
    return {"load": (scatter, block, engine), "store": (gather, engine, block)}


def alone(seconds: float) -> list[Row]:
    """Rates of the kernels and of the copy engine."""
    rows = []
    for name, layout_format in (
        ("NPTHD", "opaque:bench"),
        ("PNTHD", "opaque:bench"),
        ("PNTHD", "swizzled"),
        ("PNHTD", "swizzled"),
        ("sglang", "swizzled"),
    ):
        bench = Bench.make(name, layout_format)
        piece = torch.empty_like(bench.host, device="cuda")
        for direction, (move, src, dst) in directions(bench).items():
            contenders = {
                f"{ctas} CTAs": captured([partial(move, bench.pages, bench.slots, bench.blocks, ctas=ctas)])
                for ctas in CTAS
            }
            nbytes = bench.fragments[2]
            if nbytes >= 4096:
                contenders["dma batched"] = eager(copies_batched(src, dst, nbytes), HIDE_MS)
            start, end = (bench.host, piece) if direction == "load" else (piece, bench.host)
            contenders[CEILING] = captured([partial(end.copy_, start, non_blocking=True)])
            rows.append(_row(name, layout_format, direction, nbytes, bench.total, race(contenders, seconds)))
    return rows


def _row(
    name: str, layout_format: str, direction: str, nbytes: int, total: int, times: Mapping[str, Timing]
) -> Row:
    return {
        "engine": name,
        "format": layout_format,
        "direction": direction,
        "fragment_bytes": nbytes,
        "gb_per_s": {who: total / timing.seconds / 1e9 for who, timing in times.items()},
        "spread": {who: timing.spread for who, timing in times.items()},
    }


def beside() -> list[Row]:
    """Seconds of matrix products while copies run on another stream, taking turns."""
    bench = Bench.make("NPTHD", "opaque:bench")
    a, b = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    copies: dict[str, Work] = {"nothing": lambda: None}
    for direction, (move, src, dst) in directions(bench).items():
        for ctas in BESIDE_CTAS:
            work = partial(move, bench.pages, bench.slots, bench.blocks, ctas=ctas)
            copies[f"{direction}, {ctas} CTAs"] = work
        copies[f"{direction}, dma"] = copies_batched(src, dst, bench.fragments[2])
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in copies}
    names = list(copies)
    for number in range(ROUNDS + 1):
        for turn in range(len(names)):
            name = names[(number + turn) % len(names)]
            products, rate = _products_beside(copies[name], side, a, b, out, bench.total)
            if number:  # the first round warms up
                samples[name].append((products, 0.0 if name == "nothing" else rate))
    alone = statistics.median(products for products, _ in samples["nothing"])
    rows = []
    for name, found in samples.items():
        products = statistics.median(seconds for seconds, _ in found)
        rows.append(
            {
                "beside": name,
                "products_ms": products * 1e3,
                "slowdown": products / alone - 1,
                "copies_gb_per_s": statistics.median(rate for _, rate in found),
            }
        )
    return rows


def _products_beside(
    copy: Work, side: torch.cuda.Stream, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, total: int
) -> tuple[float, float]:
    """Seconds of the products, and bytes per second of copies that began with them and outlast them."""
    start, end, first, last = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(4)
    )
    turns = 16
    torch.cuda.synchronize()
    main = torch.cuda.current_stream()
    keep_busy(HIDE_BESIDE_MS)
    main.record_event(start)
    # The products first: enqueuing thousands of copies waits for those before, as soon as the queue is full.
    for _ in range(PRODUCTS):
        torch.mm(a, b, out=out)
    main.record_event(end)
    with torch.cuda.stream(side):
        side.wait_event(start)
        side.record_event(first)
        for _ in range(turns):
            copy()
        side.record_event(last)
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3, turns * total / max(1e-9, first.elapsed_time(last) / 1e3) / 1e9


def show(rows: list[Row]) -> None:
    """Print one line a row."""
    for row in rows:
        if "beside" in row:
            print(
                f"{PRODUCTS} products beside {row['beside']:<16} {row['products_ms']:7.2f} ms "
                f"({row['slowdown']:+.1%}), copies {row['copies_gb_per_s']:.1f} GB/s"
            )
            continue
        rates = "  ".join(f"{name} {rate:.1f}" for name, rate in row["gb_per_s"].items())
        what = f"{row['engine']} {row['format']} {row['direction']}, {row['fragment_bytes']} B"
        print(f"{what:<44} GB/s: {rates}", flush=True)


def main() -> None:
    """Measure, print, and write what ``--json`` names."""
    parser = argparse.ArgumentParser(description="Engine pages to host blocks and back.")
    parser.add_argument("--seconds", type=float, default=0.12, help="device time of each contender")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions and results here")
    arguments = parser.parse_args()
    use_stream()
    rows = [*alone(arguments.seconds), *beside()]
    show(rows)
    write_report(arguments.json, rows, "torch", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc")


if __name__ == "__main__":
    main()
