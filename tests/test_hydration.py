"""Hydration elsewhere: a second process, with empty tiers of its own, goes on from the same Redis.

Each part runs in a Python of its own with another PYTHONHASHSEED; they share a Redis and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvpager.tests.model_files import save_tiny_model
from kvpager.tests.redis_servers import RedisServer

PART = """
import json, sys

from kvpager.engine.llm import LLM
from kvpager.engine.sampler import SamplingParams
from kvpager.tiers.cold_redis import RedisColdTier

asked = json.loads(sys.argv[1])
cold = None if asked["url"] is None else RedisColdTier(asked["url"], secret=asked["secret"], deadline=5.0)
llm = LLM(
    asked["model"],
    device="cpu",
    dtype=asked["dtype"],
    block_size=asked["block_size"],
    tenant=asked["tenant"].encode(),
    device_blocks=64,
    host_bytes=4 << 20,
    cold=cold,
)
params = SamplingParams(max_tokens=asked["count"], temperature=0.0, ignore_eos=True)
known = llm.session_tokens("chat")
(answer,) = llm.generate([asked["prompt"]], params, sessions=["chat"])
llm.store.check_integrity()
llm.host.check_integrity()
corrupt = 0 if cold is None else cold.stats.corrupt
llm.close(drain=30.0)
print(
    json.dumps(
        {
            "tokens": answer.token_ids,
            "cached": [answer.cached.device, answer.cached.host, answer.cached.cold],
            "computed": answer.computed,
            "known": None if known is None else known.tolist(),
            "corrupt": corrupt,
            "seed": hash("kvpager"),
        }
    )
)
"""
PROMPT = [(number * 37) % 190 + 5 for number in range(45)]
FIRST, REST = 10, 9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model("llama", folder)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


def answer(model: Path, url: str | None, prompt: list[int], count: int, **changes: Any) -> dict[str, Any]:
    """What a new process answers, and what it found."""
    asked: dict[str, Any] = {
        "model": str(model),
        "url": url,
        "prompt": prompt,
        "count": count,
        "secret": "kept between the two",
        "tenant": "one",
        "dtype": "float32",
        "block_size": 8,
    }
    environment = os.environ | {
        "PYTHONHASHSEED": str(changes.pop("hash_seed", 1)),
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", PART, json.dumps(asked | changes)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def begun(model: Path, server: RedisServer) -> dict[str, Any]:
    """The first process: it began the conversation and is gone."""
    first = answer(model, server.url, PROMPT, FIRST)
    assert first["known"] is None
    assert first["cached"] == [0, 0, 0]
    assert first["computed"] == len(PROMPT)
    return first


def test_another_process_goes_on_where_the_first_stopped(
    model: Path, server: RedisServer, begun: dict[str, Any]
) -> None:
    uninterrupted = answer(model, None, PROMPT, FIRST + REST)
    talk = PROMPT + begun["tokens"]
    second = answer(model, server.url, talk, REST, hash_seed=2)
    assert second["seed"] != begun["seed"]
    assert begun["tokens"] + second["tokens"] == uninterrupted["tokens"]
    assert second["known"] == talk
    # All but the last sampled token, the six tokens of the partly filled block among them.
    assert second["cached"] == [0, 0, len(talk) - 1]
    assert (len(talk) - 1) % 8 == 6
    assert second["computed"] == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"secret": "another one than that"},
        {"secret": None},
        {"tenant": "two"},
        {"dtype": "bfloat16"},
        {"block_size": 16},
    ],
    ids=["another secret", "no secret", "tenant", "dtype", "block_size"],
)
def test_who_differs_in_anything_finds_nothing(
    model: Path, server: RedisServer, begun: dict[str, Any], changes: dict[str, Any]
) -> None:
    talk = PROMPT + begun["tokens"]
    other = answer(model, server.url, talk, 2, hash_seed=3, **changes)
    assert other["known"] is None
    assert other["cached"] == [0, 0, 0]
    assert other["computed"] == len(talk)
    assert other["corrupt"] == 0


def test_another_model_of_the_same_shape_finds_nothing(
    server: RedisServer, begun: dict[str, Any], tmp_path: Path
) -> None:
    save_tiny_model("llama", tmp_path, seed=1)
    talk = PROMPT + begun["tokens"]
    other = answer(tmp_path, server.url, talk, 2)
    assert other["known"] is None
    assert other["cached"] == [0, 0, 0]
