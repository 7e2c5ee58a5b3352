"""Host memory: put and get beside plain copies of the same bytes, and what ranking blocks costs.

Put and get go through everything a caller's bytes do (index, slots, eviction, events); the peer is
``memmove`` once a block between the same two memories. They take turns, another one first each round, and
move other blocks each turn.

    python benchmarks/host.py [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from kvpager.benchmarks.report import write_report
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.lru_policy import LRUPolicy
from kvpager.tiers.layout import KVLayout
from kvpager.tiers.memory import format_bytes

ARENA_BYTES: Final = 2 << 30
CALLER_BYTES: Final = 1 << 30
CALL_BYTES: Final = 256 << 20
"""What a batched call carries, a prefix of some thousand tokens; the other calls carry a single block, and
the caches are cold to their bookkeeping, since the copy before has gone through them."""
LAYOUTS: Final = (
    KVLayout(8, 4, 128),  # 256 KiB
    KVLayout(32, 8, 128),  # 2 MiB, a Llama-3-8B
    KVLayout(128, 32, 128),  # 32 MiB
)
POLICY_BLOCKS: Final = 1 << 20
POLICY_BATCH: Final = 64

Row = dict[str, Any]


def medians(contenders: dict[str, Callable[[int], None]], rounds: int) -> dict[str, float]:
    """Median seconds of each contender over `rounds` turns, after two that warm up."""
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 2):
        for turn in range(len(names)):
            name = names[(number + turn) % len(names)]
            started = time.perf_counter()
            contenders[name](number)
            if number >= 2:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in seconds.items()}


def copies(layout: KVLayout, batch: int, rounds: int) -> Row:
    """`HostSpace.put` and `HostSpace.get` of `batch` blocks a call against ``memmove``."""
    size = layout.block_bytes
    rng = np.random.default_rng(0)
    caller = rng.integers(0, 256, CALLER_BYTES, np.uint8).reshape(-1, size)
    with HostStore(ARENA_BYTES, extent_bytes=256 << 20) as host:
        host.arena.wait_ready()
        space = host.space(layout)
        names = [number.to_bytes(16, "little") for number in range(space.capacity)]
        for first in range(0, space.capacity, len(caller)):
            space.put(names[first : first + len(caller)], caller[: space.capacity - first])
        serial = space.capacity

        def rows() -> npt.NDArray[np.uint8]:
            start = int(rng.integers(0, max(1, len(caller) - batch)))
            return caller[start : start + batch]

        def neighbours() -> range:
            start = int(rng.integers(0, space.capacity - batch + 1))
            return range(start, start + batch)

        def put(number: int) -> None:
            nonlocal serial
            fresh = [(serial + at).to_bytes(16, "little") for at in range(batch)]
            serial += batch
            if space.put(fresh, rows()) != batch:
                raise SystemExit("a put was denied")

        def get(number: int) -> None:
            start = serial - batch * (1 + number % max(1, space.capacity // batch // 2))
            wanted = [(start + at).to_bytes(16, "little") for at in range(batch)]
            if space.get(wanted, rows()) != batch:
                raise SystemExit("a get missed")

        def memmove_in(number: int) -> None:
            source = rows().ctypes.data
            for at, slot in enumerate(neighbours()):
                ctypes.memmove(host.arena.base + slot * size, source + at * size, size)

        def memmove_out(number: int) -> None:
            target = rows().ctypes.data
            for at, slot in enumerate(neighbours()):
                ctypes.memmove(target + at * size, host.arena.base + slot * size, size)

        few = max(rounds // 2, min(40 * rounds, rounds * (32 << 20) // (size * batch)))
        seconds = medians({"memmove in": memmove_in, "put": put, "memmove out": memmove_out, "get": get}, few)
    return {
        "block_bytes": size,
        "batch": batch,
        "gb_per_s": {name: size * batch / taken / 1e9 for name, taken in seconds.items()},
        "put_ratio": seconds["memmove in"] / seconds["put"],
        "get_ratio": seconds["memmove out"] / seconds["get"],
    }


def ranking() -> Row:
    """`LRUPolicy` with 1M blocks in batches of 64: touches (in use, then idle again), and admissions."""
    policy = LRUPolicy(POLICY_BLOCKS)
    policy.insert(np.arange(POLICY_BLOCKS, dtype=np.int32))
    rng = np.random.default_rng(0)
    batches = [rng.choice(POLICY_BLOCKS, POLICY_BATCH, replace=False).astype(np.int32) for _ in range(20_000)]
    started = time.perf_counter()
    for batch in batches:
        policy.remove(batch)
        policy.insert(batch)
    touches = time.perf_counter() - started
    started = time.perf_counter()
    for _ in batches:
        policy.insert(policy.evict(POLICY_BATCH))
    admissions = time.perf_counter() - started
    policy.check_integrity()
    count = len(batches) * POLICY_BATCH
    return {
        "blocks": POLICY_BLOCKS,
        "batch": POLICY_BATCH,
        "touches_per_s": count / touches,
        "admissions_per_s": count / admissions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Host memory beside plain copies, and the eviction policy")
    parser.add_argument("--rounds", type=int, default=25, help="rounds of the largest copies (default: 25)")
    parser.add_argument("--json", type=Path, help="write machine, versions and results to this file")
    options = parser.parse_args()
    rows = []
    for layout in LAYOUTS:
        for batch in sorted({1, CALL_BYTES // layout.block_bytes}):
            row = copies(layout, batch, options.rounds)
            rows.append(row)
            rates = "  ".join(f"{name} {rate:5.2f}" for name, rate in row["gb_per_s"].items())
            print(
                f"{format_bytes(row['block_bytes']):>8} x {batch:<3} GB/s: {rates}   "
                f"put {row['put_ratio']:.2f}x get {row['get_ratio']:.2f}x of memmove"
            )
    lru = ranking()
    print(
        f"LRU, {lru['blocks']} blocks, batches of {lru['batch']}: "
        f"{lru['touches_per_s'] / 1e6:.1f}M touches/s, {lru['admissions_per_s'] / 1e6:.1f}M admissions/s"
    )
    write_report(options.json, {"copies": rows, "lru": lru})


if __name__ == "__main__":
    main()
