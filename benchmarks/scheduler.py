"""Bookkeeping of one decode step: schedule, tables and postprocess, without a model.

The scheduler and the store do all that a step needs but the forward pass, detokenising and streaming; the
tokens that a sampler would give are drawn beforehand. Sequences stand at random places in their blocks, so
each step fills a sixteenth of them: these are hashed, indexed, and queued for their copies to host memory,
which are made (of a tiny layout) in `TieredStore.poll`, timed with the rest.

Then what the scheduler does now and then: who of 1,000 running sequences is put to sleep, and what waking a
session of 8k tokens takes beside moving its bytes, in this process and over a sidecar's socket.

    python benchmarks/scheduler.py [--steps N] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Final

import numpy as np
from kvpager.api.client import connect
from kvpager.benchmarks.report import write_report
from kvpager.engine.preemption import cheapest_sleep
from kvpager.engine.running import RunningSequences
from kvpager.engine.sampler import SamplingParams
from kvpager.engine.scheduler import Scheduler
from kvpager.engine.sequence import Sequence
from kvpager.engine.step import Step
from kvpager.kvstore.calls import HostCalls
from kvpager.kvstore.cost import ComputeCost, CostModel, LinkCost
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.store import TieredStore
from kvpager.tests.serve_process import ServeProcess
from kvpager.tiers.layout import KVLayout

# (sequences, tokens of each, target of the median in microseconds)
CASES: Final = ((16, 4096, None), (256, 1024, None), (256, 4096, 100), (1024, 4096, 300))
ROOT: Final = bytes(16)
HOST_BYTES: Final = 64 << 20
COST: Final = CostModel(
    16, 1 << 21, ComputeCost(5e-3, 2e-5, 1e-9), in_place=LinkCost(5e-6, 2e-11), copy=LinkCost(4e-6, 1.8e-11)
)


def run(sequences: int, tokens: int, steps: int) -> dict[str, Any]:
    """Microseconds of a decode step with `sequences` running over ``sequences * tokens`` resident tokens."""
    layout = KVLayout(1, 1, 8)
    rng = np.random.default_rng(0)
    blocks = sequences * layout.blocks_for(tokens + steps + 64)
    with HostStore(int(1.1 * blocks * layout.block_bytes) + (64 << 20)) as host:
        host.arena.wait_ready()
        store = TieredStore(layout, blocks + sequences, root=ROOT, host=host, max_sequences=sequences)
        scheduler = Scheduler(
            store,
            max_sequences=sequences,
            max_tokens=tokens + steps + 64,
            step_tokens=1 << 30,
            load_seconds=0.0,
        )
        for number in range(sequences):
            prompt = rng.integers(0, 1000, tokens - int(rng.integers(0, 16)), dtype=np.int32)
            params = SamplingParams(max_tokens=steps + 32, temperature=0.0, ignore_eos=True)
            scheduler.add(Sequence(number, prompt, len(prompt), params, ROOT, seed=0, stop_ids=(1001,)))
        sampled = rng.integers(0, 1000, (steps + 1, sequences), dtype=np.int32)
        prefill = scheduler.schedule()
        if prefill is None or len(prefill.chunks) != sequences:
            raise RuntimeError("the prompts were not scheduled in one step")
        scheduler.postprocess(prefill, sampled[0])
        store.flush()
        gc.collect()
        gc.freeze()
        parts = np.empty((steps, 3))
        for number in range(steps):
            started = perf_counter()
            store.poll()
            polled = perf_counter()
            step = scheduler.schedule()
            if step is None:
                raise RuntimeError("nothing was scheduled")
            _tables(store, step)
            scheduled = perf_counter()
            scheduler.postprocess(step, sampled[number + 1])
            parts[number] = polled - started, scheduled - polled, perf_counter() - scheduled
        gc.unfreeze()
        store.check_integrity()
        store.close()
    whole = parts.sum(axis=1) * 1e6
    poll, schedule, postprocess = np.median(parts, axis=0) * 1e6
    return {
        "sequences": sequences,
        "resident_tokens": sequences * tokens,
        "median_us": float(np.median(whole)),
        "mean_us": float(whole.mean()),
        "p99_us": float(np.percentile(whole, 99)),
        "poll_us": float(poll),
        "schedule_us": float(schedule),
        "postprocess_us": float(postprocess),
    }


def decide(sequences: int, tokens: int, times: int) -> dict[str, Any]:
    """Microseconds to decide who is put to sleep, of so many running sequences."""
    layout = KVLayout(1, 1, 8)
    rng = np.random.default_rng(0)
    store = TieredStore(layout, sequences * layout.blocks_for(tokens), root=ROOT, max_sequences=sequences)
    running = RunningSequences(store, sequences, 2 * tokens)
    for number in range(sequences):
        prompt = rng.integers(0, 1000, int(rng.integers(tokens // 2, tokens)), dtype=np.int32)
        params = SamplingParams(max_tokens=int(rng.integers(1, tokens)))
        sequence = Sequence(number, prompt, len(prompt) - 1, params, ROOT, seed=0)
        row = store.open(prompt).row
        store.reserve(np.array([row]), len(prompt))
        store.advance(row, prompt[:-1])
        running.enter(sequence, row, 0)
        running.start(sequence, row, int(rng.integers(0, 200)))
    gc.collect()
    took = np.empty(times)
    for at in range(times):
        started = perf_counter()
        candidates = running.candidates(running.rows, 200)
        cheapest_sleep(candidates, store.private_blocks, COST, below=True)
        took[at] = perf_counter() - started
    store.close()
    return {"what": "victim", "sequences": sequences, **_summary(took)}


def wake(tokens: int, sleepers: int, times: int, host: HostCalls) -> dict[str, Any]:
    """Microseconds until a sleeping sequence in host memory has its row of the block table again."""
    layout = KVLayout(1, 1, 8)
    rng = np.random.default_rng(0)
    store = TieredStore(layout, 4 * layout.blocks_for(tokens), root=ROOT, host=host, max_sequences=8)
    sleeping = []
    for _ in range(sleepers):
        prompt = rng.integers(0, 1000, tokens - 5, dtype=np.int32)
        row = store.open(prompt).row
        store.reserve(np.array([row]), len(prompt))
        store.advance(row, prompt)
        sleeping.append(store.sleep(row))
        store.flush()
        store.poll()
    store.evict(store.pool.capacity)
    gc.collect()
    gc.freeze()
    took = np.empty(times)
    for number in range(times):
        at = int(rng.integers(sleepers))
        started = perf_counter()
        opened = store.wake(sleeping[at])
        took[number] = perf_counter() - started
        if opened.host != sleeping[at].length:
            raise RuntimeError(f"{opened.host} of {sleeping[at].length} tokens were found in host memory")
        sleeping[at] = store.sleep(opened.row)
        store.poll()
    gc.unfreeze()
    store.close()
    return {"tokens": tokens, **_summary(took)}


def _summary(seconds: np.ndarray) -> dict[str, float]:
    microseconds = seconds * 1e6
    return {
        "median_us": float(np.median(microseconds)),
        "mean_us": float(microseconds.mean()),
        "p99_us": float(np.percentile(microseconds, 99)),
    }


def _tables(store: TieredStore, step: Step) -> None:
    """What the runner reads of the tables: where each token's KV goes."""
    size = store.layout.block_size
    columns = step.lengths // size
    store.table.words[step.rows, columns] + (step.lengths - columns * size)


def _print(what: str, row: dict[str, Any], target: float | None) -> None:
    print(
        f"{what}: median {row['median_us']:.1f} us, mean {row['mean_us']:.1f}, p99 {row['p99_us']:.1f}"
        + (f", target of the p99 {target}" if target else "")
    )


def main() -> int:
    """Run the cases and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path, help="write machine, versions and results there")
    options = parser.parse_args()
    rows = []
    for sequences, tokens, target in CASES:
        row = run(sequences, tokens, options.steps)
        rows.append({**row, "target_us": target})
        print(
            f"{sequences:5} sequences, {row['resident_tokens'] / 1e6:5.2f}M tokens: "
            f"median {row['median_us']:6.1f} us"
            f" (poll {row['poll_us']:.1f}, schedule {row['schedule_us']:.1f}, postprocess"
            f" {row['postprocess_us']:.1f}), mean {row['mean_us']:.1f}, p99 {row['p99_us']:.1f}"
            + (f", target {target}" if target else "")
        )
    for sequences in (100, 1000):
        row = decide(sequences, 2048, options.steps)
        rows.append({**row, "target_us": 100})
        _print(f"who of {sequences} sequences is put to sleep", row, 100)
    with HostStore(HOST_BYTES) as host:
        host.arena.wait_ready()
        row = wake(8192, 64, 4 * options.steps, host)
    rows.append({"what": "wake, embedded", **row, "target_us": 100})
    _print("waking 8k tokens, embedded", row, 100)
    with (
        TemporaryDirectory(prefix="kvpager-bench-") as folder,
        ServeProcess(Path(folder) / "socket", host_bytes=HOST_BYTES) as serve,
        connect(str(serve.path)) as connection,
    ):
        row = wake(8192, 64, 4 * options.steps, connection)
    rows.append({"what": "wake, sidecar", **row, "target_us": None})
    _print("waking 8k tokens, over a sidecar", row, None)
    write_report(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
