"""Hydration elsewhere: a second process, with empty tiers of its own, goes on from the same Redis.

Each process is a Python of its own with another PYTHONHASHSEED; they share a Redis and nothing else.
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

# Opens one engine after the other, each with empty tiers, and has each answer one prompt.
# One process has what the first engine said.
pytestmark = pytest.mark.xdist_group("hydration")

PROGRAM = """
import json, sys

from kvpager.engine.llm import LLM
from kvpager.engine.sampler import SamplingParams
from kvpager.tiers.cold_redis import RedisColdTier

found = []
for asked in json.loads(sys.argv[1]):
    cold = RedisColdTier(asked["url"], secret=asked["secret"], deadline=5.0) if asked["url"] else None
    llm = LLM(
        asked["model"],
        device="cpu",
        dtype=asked["dtype"],
        block_size=asked["block_size"],
        tenant=asked["tenant"].encode(),
        device_blocks=64,
        host_bytes=4 << 20,
        cold=cold,
        gate=False,  # whether it pays is another question
    )
    params = SamplingParams(max_tokens=asked["count"], temperature=0.0, ignore_eos=True)
    known = llm.session_tokens("chat")
    (answer,) = llm.generate([asked["prompt"]], params, sessions=["chat"])
    llm.store.check_integrity()
    llm.host.check_integrity()
    llm.close(drain=30.0)
    found.append(
        {
            "tokens": answer.token_ids,
            "cached": [answer.cached.device, answer.cached.host, answer.cached.cold],
            "computed": answer.computed,
            "known": None if known is None else known.tolist(),
            "corrupt": 0 if cold is None else cold.stats.corrupt,
            "hash": hash("kvpager"),
        }
    )
print(json.dumps(found))
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


def request(model: Path, server: RedisServer | None, prompt: list[int], count: int) -> dict[str, Any]:
    """An engine to open, and what it is asked."""
    return {
        "model": str(model),
        "url": server.url if server is not None else None,
        "prompt": prompt,
        "count": count,
        "secret": "kept between the two",
        "tenant": "one",
        "dtype": "float32",
        "block_size": 8,
    }


def answers(hash_seed: int, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    """What a new process answers, and what it found."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(requests)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONHASHSEED": str(hash_seed), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def begun(model: Path, server: RedisServer) -> dict[str, Any]:
    """What the first process said before it was gone; and the whole answer, uninterrupted."""
    first, whole = answers(
        1, request(model, server, PROMPT, FIRST), request(model, None, PROMPT, FIRST + REST)
    )
    assert first["known"] is None
    assert first["cached"] == [0, 0, 0]
    assert first["computed"] == len(PROMPT)
    return first | {"whole": whole["tokens"]}


def test_another_process_goes_on_where_the_first_stopped(
    model: Path, server: RedisServer, begun: dict[str, Any]
) -> None:
    talk = PROMPT + begun["tokens"]
    (second,) = answers(2, request(model, server, talk, REST))
    assert second["hash"] != begun["hash"]
    assert begun["tokens"] + second["tokens"] == begun["whole"]
    assert second["known"] == talk
    # All but the last sampled token, the six tokens of the partly filled block among them.
    assert (len(talk) - 1) % 8 == 6
    assert second["cached"] == [0, 0, len(talk) - 1]
    assert second["computed"] == 1


def test_who_differs_in_anything_finds_nothing(
    model: Path, server: RedisServer, begun: dict[str, Any], tmp_path: Path
) -> None:
    save_tiny_model("llama", tmp_path, seed=1)
    talk = PROMPT + begun["tokens"]
    differences: list[dict[str, Any]] = [
        {"secret": "another one than that"},
        {"secret": None},
        {"tenant": "two"},
        {"dtype": "bfloat16"},
        {"block_size": 16},
        {"model": str(tmp_path)},
    ]
    found = answers(3, *(request(model, server, talk, 2) | change for change in differences))
    for change, other in zip(differences, found, strict=True):
        assert other["known"] is None, change
        assert other["cached"] == [0, 0, 0], change
        assert other["computed"] == len(talk), change
        assert other["corrupt"] == 0, change
