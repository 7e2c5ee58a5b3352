"""Block copies: the movers beside plain copies of the same bytes.

On the CPU the contenders take turns at scattered slots of the same number: ``memmove`` once a block (the
peer), numpy once a block, and `HostMover` in its two forms. Then, where there is a GPU, blocks go between the
arenas by `CudaMover` beside one copy of the same bytes in one piece.

    python benchmarks/mover.py [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from kvpager.benchmarks.report import write_report
from kvpager.tiers.arena import DeviceArena
from kvpager.tiers.driver import driver_answers
from kvpager.tiers.memory import format_bytes
from kvpager.tiers.mover import CudaMover, HostMover
from kvpager.tiers.pinned import PinnedArena

HOST_BLOCKS: Final = (256 << 10, 2 << 20, 32 << 20)
HOST_BATCHES: Final = (1, 16)
HOST_BYTES: Final = 2 << 30
DEVICE_BLOCKS: Final = (64 << 10, 256 << 10, 1 << 20, 2 << 20, 32 << 20)
DEVICE_BATCH_BYTES: Final = 256 << 20
DEVICE_BYTES: Final = 1 << 30

Addresses = npt.NDArray[np.int64]
Contender = Callable[[Addresses, Addresses], None]
Row = dict[str, Any]


def interleaved(
    contenders: Mapping[str, Contender], pairs: Iterator[tuple[Addresses, Addresses]], rounds: int
) -> dict[str, float]:
    """Median seconds of each contender. They take turns, another one first each round, at other slots each
    turn, so nobody finds in the caches what the one before has copied."""
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 2):
        for turn in range(len(names)):
            name = names[(number + turn) % len(names)]
            src, dst = next(pairs)
            started = time.perf_counter()
            contenders[name](src, dst)
            if number >= 2:  # the first rounds warm up
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in seconds.items()}


def scattered(
    source: int, target: int, nbytes: int, slots: int, batch: int
) -> Iterator[tuple[Addresses, Addresses]]:
    """Endless pairs of the addresses of ``batch`` distinct slots of two arenas of ``slots`` each."""
    rng = np.random.default_rng(0)
    while True:
        src, dst = rng.permutation(slots)[:batch], rng.permutation(slots)[:batch]
        yield source + src * nbytes, target + dst * nbytes


def on_the_host(rounds: int) -> list[Row]:
    """`HostMover` against plain copies from one half of an arena to the other."""
    rows = []
    half = HOST_BYTES // 2
    mover = HostMover()
    with PinnedArena(HOST_BYTES) as arena:
        arena.wait_ready()
        base = arena.base
        data = np.frombuffer(arena.view(0, HOST_BYTES), np.uint8)
        for at in range(0, HOST_BYTES, 64 << 20):
            data[at : at + (64 << 20)] = np.random.default_rng(at).integers(0, 256, 64 << 20, np.uint8)
        for nbytes in HOST_BLOCKS:

            def memmove(src: Addresses, dst: Addresses, nbytes: int = nbytes) -> None:
                for start, to in zip(src.tolist(), dst.tolist(), strict=True):
                    ctypes.memmove(to, start, nbytes)

            def by_numpy(src: Addresses, dst: Addresses, nbytes: int = nbytes) -> None:
                for start, to in zip((src - base).tolist(), (dst - base).tolist(), strict=True):
                    data[to : to + nbytes] = data[start : start + nbytes]

            def copy_now(src: Addresses, dst: Addresses, nbytes: int = nbytes) -> None:
                mover.copy_now(src, dst, nbytes)

            def copy_and_wait(src: Addresses, dst: Addresses, nbytes: int = nbytes) -> None:
                mover.copy(src, dst, nbytes).wait()

            contenders: dict[str, Contender] = {
                "memmove": memmove,
                "numpy": by_numpy,
                "copy_now": copy_now,
                "copy+wait": copy_and_wait,
            }
            for batch in HOST_BATCHES:
                few = max(10, min(rounds * 8, rounds * (64 << 20) // (nbytes * batch)))
                pairs = scattered(base, base + half, nbytes, half // nbytes, batch)
                medians = interleaved(contenders, pairs, few)
                rows.append(_row("host", nbytes, batch, medians, "memmove"))
    mover.close()
    return rows


def on_a_gpu(rounds: int) -> list[Row]:
    """`CudaMover`, as engines make it, between VRAM and page-locked memory against one copy in one piece."""
    import torch
    from kvpager.kernels.copy_blocks import AddressCopier

    rows = []
    mover = CudaMover("cuda:0", AddressCopier("cuda:0"))
    with PinnedArena(DEVICE_BYTES, device="cuda:0") as arena:
        arena.wait_ready()
        base = arena.base
        if not arena.is_page_locked(np.arange(arena.num_extents)).all():
            raise SystemExit("the arena was not page-locked; see its warning")
        whole = DeviceArena(DEVICE_BYTES, 1, "cuda:0")
        piece = min(DEVICE_BATCH_BYTES, arena.extent_bytes)  # a copy may not cross registrations
        host = torch.from_numpy(np.frombuffer(arena.view(0, piece), np.uint8))
        host.random_(0, 256)
        vram = whole.slab[0, :piece]
        stream = torch.cuda.current_stream()
        for nbytes in DEVICE_BLOCKS:
            batch = piece // nbytes
            for direction, source, target in (
                ("to_device", base, whole.base),
                ("to_host", whole.base, base),
            ):
                start, to = (host, vram) if direction == "to_device" else (vram, host)

                def one_piece(
                    src: Addresses, dst: Addresses, start: torch.Tensor = start, to: torch.Tensor = to
                ) -> None:
                    to.copy_(start, non_blocking=True)
                    stream.synchronize()

                def blocks(src: Addresses, dst: Addresses, nbytes: int = nbytes) -> None:
                    mover.copy(src, dst, nbytes).wait()

                contenders: dict[str, Contender] = {"one piece": one_piece, "mover": blocks}
                pairs = scattered(source, target, nbytes, DEVICE_BYTES // nbytes, batch)
                medians = interleaved(contenders, pairs, rounds)
                rows.append(_row(direction, nbytes, batch, medians, "one piece"))
        torch.cuda.synchronize()
        mover.close()
        whole.close()
    return rows


def _row(kind: str, nbytes: int, batch: int, medians: Mapping[str, float], peer: str) -> Row:
    total = nbytes * batch
    return {
        "kind": kind,
        "block_bytes": nbytes,
        "batch": batch,
        "gb_per_s": {name: total / seconds / 1e9 for name, seconds in medians.items()},
        "ratio_to_peer": {name: medians[peer] / seconds for name, seconds in medians.items() if name != peer},
        "peer": peer,
    }


def show(rows: list[Row]) -> None:
    """Print one line a row."""
    for row in rows:
        rates = "  ".join(
            f"{name} {rate:6.2f}" + (f" ({row['ratio_to_peer'][name]:.2f}x)" if name != row["peer"] else "")
            for name, rate in row["gb_per_s"].items()
        )
        print(f"{row['kind']:>9} {format_bytes(row['block_bytes']):>9} x {row['batch']:<4} GB/s: {rates}")


def main() -> None:
    """Measure, print, and write what ``--json`` names."""
    parser = argparse.ArgumentParser(description="Block copies beside plain copies of the same bytes.")
    parser.add_argument("--rounds", type=int, default=40, help="rounds that count, of each cell")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions and results here")
    arguments = parser.parse_args()
    rows = on_the_host(arguments.rounds)
    if driver_answers():
        rows += on_a_gpu(arguments.rounds)
    else:
        print("no CUDA driver answers: copies between host and VRAM are not measured")
    show(rows)
    write_report(arguments.json, rows, "torch", "cuda-python")


if __name__ == "__main__":
    main()
