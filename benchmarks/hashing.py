"""Prefix hashes: how many tokens a second, and how long a prompt of a million tokens takes to match.

The peer of hashing is the definition written down plainly: a block at a time, its bytes by numpy.

    python benchmarks/hashing.py [--tokens N] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from kvpager.benchmarks.report import write_report
from kvpager.kvstore.hashing import hash_blocks
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.space import HostSpace
from kvpager.kvstore.store import TieredStore
from kvpager.tiers.layout import KVLayout

LAYOUT: Final = KVLayout(1, 1, 1, dtype="uint8", planes=1)
"""128 bytes a block, the smallest there is: what is timed is bookkeeping."""
ROOT: Final = bytes(16)


def one_by_one(tokens: npt.NDArray[np.int32], size: int, parent: bytes) -> list[bytes]:
    """The definition, a block at a time."""
    hashes = []
    count = size.to_bytes(4, "little")
    for first in range(0, len(tokens) // size * size, size):
        message = parent + count + tokens[first : first + size].tobytes()
        parent = hashlib.blake2b(message, digest_size=16).digest()
        hashes.append(parent)
    return hashes


def medians(contenders: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median seconds of each contender; they take turns, another one first each round."""
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for turn in range(len(names)):
            name = names[(number + turn) % len(names)]
            started = time.perf_counter()
            contenders[name]()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in seconds.items()}


def fill(space: HostSpace, hashes: list[bytes]) -> None:
    """Make blocks of these names resident in host memory."""
    blocks = np.zeros((len(hashes), space.layout.block_bytes), dtype=np.uint8)
    if space.put(hashes, blocks) != len(hashes):
        raise SystemExit("host memory denied a block")


def measure(count: int, rounds: int) -> dict[str, Any]:
    """Hashing and matching `count` tokens in blocks of 16; seconds, and tokens a second."""
    tokens = np.random.default_rng(0).integers(0, 128_256, count, dtype=np.int32)
    hashes = hash_blocks(tokens, LAYOUT.block_size, ROOT)
    if hashes != one_by_one(tokens, LAYOUT.block_size, ROOT):
        raise SystemExit("the peer has other hashes")
    blocks = len(hashes)
    with HostStore(2 * blocks * LAYOUT.block_bytes) as host:
        host.arena.wait_ready()
        space = host.space(LAYOUT)
        fill(space, hashes)
        near = TieredStore(LAYOUT, blocks + 16, root=ROOT, max_sequences=4)
        opened = near.open(tokens)
        near.reserve(np.array([opened.row]), count)
        near.advance(opened.row, tokens)
        near.close_row(opened.row)
        far = TieredStore(LAYOUT, 16, root=ROOT, host=host, max_sequences=4)

        def open_in(store: TieredStore) -> None:
            opened = store.open(tokens)
            if opened.length < count - LAYOUT.block_size:
                raise SystemExit("a resident prompt was not found")
            store.close_row(opened.row)
            store.poll()

        def match_in_host() -> None:
            lease = space.match(tokens=tokens, chain=ROOT)
            if len(lease) != blocks:
                raise SystemExit("a resident prompt was not found")
            lease.release()

        seconds = medians(
            {
                "hash": lambda: _discard(hash_blocks(tokens, LAYOUT.block_size, ROOT)),
                "hash, one by one": lambda: _discard(one_by_one(tokens, LAYOUT.block_size, ROOT)),
                "open and close, in the device tier": lambda: open_in(near),
                "open and close, in host memory": lambda: open_in(far),
                "HostSpace.match and release": match_in_host,
            },
            rounds,
        )
        near.close()
        far.close()
    return {
        "tokens": count,
        "block_size": LAYOUT.block_size,
        "seconds": seconds,
        "hash_tokens_per_s": count / seconds["hash"],
        "hash_ratio_to_peer": seconds["hash, one by one"] / seconds["hash"],
    }


def _discard(hashes: list[bytes]) -> None:
    """What was measured is not looked at."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Prefix hashes, and matching a long prompt")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="length of the prompt")
    parser.add_argument("--rounds", type=int, default=15, help="rounds (default: 15)")
    parser.add_argument("--json", type=Path, help="write machine, versions and results to this file")
    options = parser.parse_args()
    found = measure(options.tokens, options.rounds)
    for name, seconds in found["seconds"].items():
        print(f"{name:>36}: {seconds * 1e3:7.1f} ms for {found['tokens']} tokens")
    print(
        f"{found['hash_tokens_per_s'] / 1e6:.1f}M tokens/s at block size {found['block_size']}, "
        f"{found['hash_ratio_to_peer']:.2f}x of one by one"
    )
    write_report(options.json, found)


if __name__ == "__main__":
    main()
