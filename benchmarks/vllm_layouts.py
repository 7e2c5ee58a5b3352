"""The vLLM connector's own movers at vLLM's layouts: KV of an 8B, blocks of 16 tokens, 16k tokens a turn.

On a GPU `CudaPages`: host memory is page-locked, a turn one launch for all layers and blocks, timed from the
call until all has been copied, as a worker of vLLM waits for it. Without one `CpuPages`. Beside it, in turns:
a copy for each block and layer, as a connector makes that knows no other way, and all bytes as one copy, the
ceiling.

    python benchmarks/vllm_layouts.py [--device cpu] [--tokens N] [--turns N] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from kvpager import KVLayout
from kvpager.api.integrations.vllm.pages import pages_of
from kvpager.benchmarks.report import write_report

LAYERS, HEADS, HEAD_DIM, TOKENS = 32, 8, 128, 16
ORDERS: Final = ("LBNHC", "LBHNC", "BLNHC", "BLHNC")
"""vLLM's names of its layouts: L layers, B blocks, H heads, N tokens, C keys and values of one."""
SPARE: Final = 4
"""vLLM has so many times the blocks that are copied, which lie scattered in its tensors."""
PAGE_BYTES: Final = TOKENS * HEADS * 2 * HEAD_DIM * 2
LAYOUT: Final = KVLayout(LAYERS, 1, PAGE_BYTES // TOKENS, TOKENS, "uint8", "opaque:bench", planes=1)

Row = dict[str, Any]


def tensors_in(order: str, blocks: int, device: str) -> list[torch.Tensor]:
    """Views [blocks, heads, tokens, content] of the layers of one allocation, as vLLM makes them."""
    sizes = {"L": LAYERS, "B": blocks, "H": HEADS, "N": TOKENS, "C": 2 * HEAD_DIM}
    memory = torch.empty([sizes[letter] for letter in order], dtype=torch.float16, device=device)
    memory.view(torch.int16).random_(0, 1 << 15)
    return list(memory.permute([order.index(letter) for letter in "LBHNC"]).unbind(0))


def measure(order: str, tokens: int, device: str, turns: int) -> list[Row]:
    """GB/s of loads and of stores, of each contender: medians of their turns."""
    count = tokens // TOKENS
    tensors = tensors_in(order, SPARE * count, device)
    pages = pages_of(LAYOUT, {str(at): tensor for at, tensor in enumerate(tensors)})
    host = torch.empty(count * LAYOUT.block_bytes, dtype=torch.uint8, pin_memory=device != "cpu")
    host.random_(0, 256)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randperm(SPARE * count, generator=generator)[:count].tolist()
    slots = torch.randperm(count, generator=generator)
    addresses = (slots * LAYOUT.block_bytes).numpy().astype(np.int64) + host.data_ptr()
    piece = torch.empty_like(host, device=device) if device != "cpu" else torch.empty_like(host)
    fragments = _fragments(tensors, host, numbers, slots.tolist())

    def singly(to_blocks: bool) -> None:
        for page, slot in fragments:
            source, target = (page, slot) if to_blocks else (slot, page)
            target.copy_(source, non_blocking=True)
        _finish(device)

    def one_piece(to_blocks: bool) -> None:
        source, target = (piece, host) if to_blocks else (host, piece)
        target.copy_(source, non_blocking=True)
        _finish(device)

    rows = []
    for direction, to_blocks in (("load", False), ("store", True)):
        move = pages.store if to_blocks else pages.load
        contenders: dict[str, Callable[[], None]] = {
            "connector": lambda move=move: move(numbers, addresses, pages.fence()),  # type: ignore[misc]
            "copy per block and layer": lambda way=to_blocks: singly(way),  # type: ignore[misc]
            "one piece": lambda way=to_blocks: one_piece(way),  # type: ignore[misc]
        }
        seconds = _race(contenders, turns)
        _check(fragments)
        total = count * LAYERS * PAGE_BYTES
        rows.append(
            {
                "order": order,
                "direction": direction,
                "tokens": tokens,
                "bytes": total,
                "gb_per_s": {name: total / statistics.median(taken) / 1e9 for name, taken in seconds.items()},
            }
        )
    pages.close()
    return rows


def _race(contenders: dict[str, Callable[[], None]], turns: int) -> dict[str, list[float]]:
    """Seconds of each in each turn; the first turn, which compiles and touches memory, is left out."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(turns + 1):
        for at in range(len(names)):
            name = names[(turn + at) % len(names)]
            began = time.perf_counter()
            contenders[name]()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def _fragments(
    tensors: list[torch.Tensor], host: torch.Tensor, numbers: list[int], slots: list[int]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A page of the engine and its place in a block, for each block and layer, as bytes."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    blocks = host.view(-1, LAYERS, LAYOUT.page_bytes)
    for at, tensor in enumerate(tensors):
        layer = tensor.view(torch.uint8).as_strided(
            (tensor.shape[0], PAGE_BYTES), (tensor.stride(0) * tensor.element_size(), 1)
        )
        found += [
            (layer[number], blocks[slot, at, :PAGE_BYTES])
            for number, slot in zip(numbers, slots, strict=True)
        ]
    return found


def _check(fragments: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Raises `SystemExit` where a page is not what its block has."""
    for page, slot in fragments[:: max(len(fragments) // 64, 1)]:
        if not torch.equal(page.cpu(), slot):
            raise SystemExit("a page is not what its block has")


def _finish(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def main() -> None:
    """Measure, print, and write what ``--json`` names."""
    parser = argparse.ArgumentParser(description="The vLLM connector's movers at vLLM's layouts.")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=16384, help="copied in a turn")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions and results here")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for order in ORDERS:
        for row in measure(order, arguments.tokens, arguments.device, arguments.turns):
            rates = "  ".join(f"{name} {rate:.2f}" for name, rate in row["gb_per_s"].items())
            print(f"{row['order']} {row['direction']:<5} GB/s: {rates}", flush=True)
            rows.append(row)
    write_report(arguments.json, rows, "torch", "cuda-core", "cuda-bindings", device=arguments.device)


if __name__ == "__main__":
    main()
