"""Copies of blocks at random places by the kernel, beside the copy engine, and one copy of as many bytes.

Three ways: within VRAM, from page-locked host memory to VRAM, and back. The contenders take turns in one run:

- ``blocks``: `kernels.copy_blocks` in the form for VRAM; ``bus``: in the form for a bus; ``plain``: without
  bulk copies; ``listed``: `AddressCopier`, its addresses in host memory;
- ``dma batched``: the copy engine, a copy a block in one call, where these are not too many;
- ``one piece``: all bytes as one copy, the ceiling.

Within VRAM a byte counts twice, as it is read and written.

    python benchmarks/copy_blocks.py [--seconds S] [--sweep] [--json FILE]

``--sweep`` tries the kernel's forms instead: CTAs, warps and bytes of a piece.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from kvpager.benchmarks.ceilings import Contender, Timing, captured, copies_batched, eager, race, use_stream
from kvpager.benchmarks.report import write_report
from kvpager.kernels.copy_blocks import AddressCopier, CopyForm, copy_blocks
from kvpager.tiers.memory import format_bytes

BLOCKS: Final = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
POOL_BYTES: Final = 4 << 30
HOST_BYTES: Final = 1 << 30
BYTES: Final = {"within": 1 << 30, "to_device": 256 << 20, "to_host": 256 << 20}
CEILING: Final = "one piece"
HIDE_MS: Final = 30.0
"""The device is kept busy while copies are enqueued one by one."""
MOST_DMA_COPIES: Final = 4096
SWEEP_CTAS: Final = {"within": (132, 264), "to_device": (1, 2, 4, 8, 16), "to_host": (1, 2, 4, 8, 16)}
SWEEP_WARPS: Final = (2, 4, 8, 16)
SWEEP_PIECES: Final = (2048, 4096, 8192)
SHARED_BYTES: Final = 220 << 10

Row = dict[str, Any]


@dataclass(frozen=True)
class Memory:
    """Random bytes in VRAM and in page-locked host memory."""

    pool: torch.Tensor
    host: torch.Tensor

    @classmethod
    def make(cls) -> Memory:
        pool = torch.randint(-(2**31), 2**31 - 1, (POOL_BYTES // 4,), dtype=torch.int32, device="cuda")
        host = torch.empty(HOST_BYTES // 4, dtype=torch.int32, pin_memory=True)
        host.copy_(pool[: host.numel()])
        return cls(pool, host)

    def ends(self, way: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Where copies of one way come from and go to: tensors that do not overlap."""
        half = self.pool.numel() // 2
        if way == "within":
            return self.pool[:half], self.pool[half:]
        return (self.host, self.pool) if way == "to_device" else (self.pool, self.host)


def scattered(memory: torch.Tensor, block_bytes: int, count: int, seed: int) -> torch.Tensor:
    """int64 [count] on the CPU: addresses of distinct blocks in random order."""
    generator = torch.Generator().manual_seed(seed)
    slots = memory.numel() * memory.element_size() // block_bytes
    return torch.randperm(slots, generator=generator)[:count] * block_bytes + memory.data_ptr()


def contenders(memory: Memory, way: str, block_bytes: int) -> dict[str, Contender]:
    """All ways to copy as many blocks as `BYTES` says."""
    device = memory.pool.device
    source, target = memory.ends(way)
    total = BYTES[way]
    count = total // block_bytes
    src, dst = (scattered(end, block_bytes, count, seed) for seed, end in enumerate((source, target)))
    src_on_gpu, dst_on_gpu = src.cuda(), dst.cuda()
    piece = total // 4
    vram, bus = CopyForm.within_vram(device), CopyForm.over_a_bus(device)
    plain = CopyForm(2 * vram.ctas if way == "within" else 16, 16, 4096, bulk=False)
    copier = AddressCopier(str(device))

    def listed() -> None:
        copier(src.numpy(), dst.numpy(), block_bytes, torch.cuda.current_stream().cuda_stream)

    def one_piece() -> None:
        target[:piece].copy_(source[:piece], non_blocking=True)

    forms = {"blocks": vram, "bus": bus, "plain": plain}
    if way == "within":
        del forms["bus"]
    found = {
        name: captured([partial(copy_blocks, src_on_gpu, dst_on_gpu, block_bytes, form=form)])
        for name, form in forms.items()
    }
    found["listed"] = eager(listed, HIDE_MS)
    if count <= MOST_DMA_COPIES:
        found["dma batched"] = eager(copies_batched(src.tolist(), dst.tolist(), block_bytes), HIDE_MS)
    found[CEILING] = captured([one_piece])
    return found


def measure(memory: Memory, seconds: float) -> list[Row]:
    """All ways and sizes."""
    rows = []
    for way in BYTES:
        for block_bytes in BLOCKS:
            times = race(contenders(memory, way, block_bytes), seconds)
            rows.append(_row(way, block_bytes, times))
            show(rows[-1])
    return rows


def sweep(memory: Memory, seconds: float) -> list[Row]:
    """Forms of the kernel at 64 KiB and at 4 KiB."""
    rows = []
    for way, block_bytes in itertools.product(BYTES, (64 << 10, 4 << 10)):
        source, target = memory.ends(way)
        count = BYTES[way] // block_bytes
        src, dst = (
            scattered(end, block_bytes, count, seed).cuda() for seed, end in enumerate((source, target))
        )
        found = {}
        for ctas, warps, piece, bulk in itertools.product(
            SWEEP_CTAS[way], SWEEP_WARPS, SWEEP_PIECES, (True, False)
        ):
            form = CopyForm(ctas, warps, min(piece, block_bytes), bulk)
            if form.shared_bytes <= SHARED_BYTES and (bulk or piece == 4096):
                name = f"{ctas}x{warps}x{piece}{'' if bulk else ' plain'}"
                found[name] = captured([partial(copy_blocks, src, dst, block_bytes, form=form)])
        rows.append(_row(way, block_bytes, race(found, seconds, rounds=3)))
        show(rows[-1])
    return rows


def _row(way: str, block_bytes: int, times: Mapping[str, Timing]) -> Row:
    moved = BYTES[way] * (2 if way == "within" else 1)
    rates = {name: moved / timing.seconds / 1e9 for name, timing in times.items()}
    ceiling = rates.get(CEILING)
    return {
        "way": way,
        "block_bytes": block_bytes,
        "gb_per_s": rates,
        "of_one_piece": {name: rate / ceiling for name, rate in rates.items()} if ceiling else None,
        "spread": {name: timing.spread for name, timing in times.items()},
    }


def show(row: Row) -> None:
    """Print a row, the fastest first in a sweep."""
    rates = row["gb_per_s"]
    names = rates if row["of_one_piece"] else sorted(rates, key=lambda name: -rates[name])[:12]
    line = "  ".join(f"{name} {rates[name]:.1f}" for name in names)
    print(f"{row['way']:>9} {format_bytes(row['block_bytes']):>9} GB/s: {line}", flush=True)


def main() -> None:
    """Measure, print, and write what ``--json`` names."""
    parser = argparse.ArgumentParser(description="Block copies by the kernel beside the copy engine.")
    parser.add_argument("--seconds", type=float, default=0.12, help="device time of each contender")
    parser.add_argument("--sweep", action="store_true", help="try the kernel's forms")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions and results here")
    arguments = parser.parse_args()
    use_stream()
    memory = Memory.make()
    rows = (sweep if arguments.sweep else measure)(memory, arguments.seconds)
    write_report(arguments.json, rows, "torch", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc")


if __name__ == "__main__":
    main()
