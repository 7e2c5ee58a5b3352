"""Bookkeeping of one decode step: schedule, tables and postprocess, without a model.

The scheduler and the store do all that a step needs but the forward pass, detokenising and streaming; the
tokens that a sampler would give are drawn beforehand. Sequences stand at random places in their blocks, so
each step fills a sixteenth of them: these are hashed, indexed, and queued for their copies to host memory,
which are made (of a tiny layout) in `TieredStore.poll`, timed with the rest.

    python benchmarks/scheduler.py [--steps N] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np
from kvpager.benchmarks.report import write_report
from kvpager.engine.sampler import SamplingParams
from kvpager.engine.scheduler import Scheduler
from kvpager.engine.sequence import Sequence
from kvpager.engine.step import Step
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.store import TieredStore
from kvpager.tiers.layout import KVLayout

# (sequences, tokens of each, target of the median in microseconds)
CASES: Final = ((16, 4096, None), (256, 1024, None), (256, 4096, 100), (1024, 4096, 300))
ROOT: Final = bytes(16)


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


def _tables(store: TieredStore, step: Step) -> None:
    """What the runner reads of the tables: where each token's KV goes."""
    size = store.layout.block_size
    columns = step.lengths // size
    store.table.words[step.rows, columns] + (step.lengths - columns * size)


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
    write_report(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
