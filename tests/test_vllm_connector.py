"""A real vLLM on the CPU, with its KV cache in a sidecar: it says what it says without, and computes less."""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvpager import connect, connect_async
from kvpager.tests.redis_servers import RedisServer
from kvpager.tests.serve_process import ServeProcess
from kvpager.tests.vllm_models import prompt, save_adapter, save_model
from kvpager.tests.vllm_process import Engine, require_vllm

BLOCK = 32

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("vllm")]


PROMPTS = [prompt(1, 200), prompt(2, 333), prompt(3, 97)]
CACHEABLE = [192, 320, 96]
"""Tokens of their full blocks."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_vllm()
    return save_model(tmp_path_factory.mktemp("vllm-model"), 1)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ServeProcess]:
    with ServeProcess(tmp_path / "s", host_bytes=64 << 20) as serving:
        yield serving


def url_of(sidecar: ServeProcess) -> str:
    return f"unix://{sidecar.path}"


def poison(sidecar: ServeProcess) -> None:
    """Every number in its memory changes its sign."""
    numbers = np.memmap(sidecar.arena, dtype=np.float32, mode="r+")
    np.negative(numbers, out=numbers)
    numbers.flush()


def test_a_prompt_is_computed_once_by_engines_that_come_and_go_and_what_is_stored_is_what_is_read(
    tmp_path: Path, model: Path, sidecar: ServeProcess
) -> None:
    # Both import vLLM at the same time; the second one has an engine only when the first one is gone.
    with Engine(tmp_path) as first, Engine(tmp_path) as second:
        expected = first.ready().open(model).ask("generate", prompts=PROMPTS)["tokens"]
        first.open(model, url_of(sidecar))
        cold = first.ask("generate", prompts=PROMPTS)
        assert (cold["tokens"], cold["cached"]) == (expected, [0, 0, 0])
        assert first.ask("reset")
        again = first.ask("generate", prompts=PROMPTS)
        assert (again["tokens"], again["cached"]) == (expected, CACHEABLE)
        assert first.count("hit_tokens_host") == sum(CACHEABLE)
        assert first.count("loaded_blocks") == first.count("stored_blocks") == sum(CACHEABLE) // BLOCK
        first.close()
        second.ready().open(model, url_of(sidecar))
        fresh = second.ask("generate", prompts=PROMPTS)
        assert (fresh["tokens"], fresh["cached"]) == (expected, CACHEABLE)
        assert second.count("stored_blocks") == 0
        assert second.ask("reset")
        poison(sidecar)
        poisoned = second.ask("generate", prompts=PROMPTS)
        assert poisoned["cached"] == CACHEABLE
        assert all(one != other for one, other in zip(poisoned["tokens"], expected, strict=True))


def test_a_release_of_vllm_that_is_not_supported_is_told_in_one_sentence(tmp_path: Path) -> None:
    info = tmp_path / "vllm-0.99.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.99.1\n")
    links = Path(__file__).resolve().parents[1] / ".links"
    ended = subprocess.run(
        [require_vllm(), "-c", "from kvpager.api.integrations.vllm import KVPagerConnector"],
        env={"PYTHONPATH": f"{tmp_path}:{links}", "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("kvpager: vLLM 0.99.1 is not supported")
    assert "0.32.x" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.full
def test_salts_and_adapters_share_nothing_and_an_adapter_is_known_by_its_content(
    tmp_path: Path, model: Path, sidecar: ServeProcess
) -> None:
    text = PROMPTS[1]
    one, other = save_adapter(tmp_path / "one", 1), save_adapter(tmp_path / "other", 2)
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with Engine(tmp_path, model, url_of(sidecar), **options) as engine:

        def cached(**values: Any) -> int:
            assert engine.ask("reset")
            count: int = engine.ask("generate", prompts=[text], **values)["cached"][0]
            return count

        engine.ready()
        assert cached(salts=["a"]) == 0
        assert cached() == 0
        assert cached(salts=["b"]) == 0
        assert [cached(salts=["a"]), cached()] == [320, 320]
        named = {"adapters": [["name", 1, str(one)]]}
        assert cached(**named) == 0
        assert cached(adapters=[["another", 2, str(other)]]) == 0
        assert cached(**named) == 320
        assert cached(salts=["a"], **named) == 0
        # Other weights under its old name: not loaded by vLLM yet; then loaded, and the other's.
        save_adapter(one, 2)
        assert cached(**named) == 0
        assert cached(adapters=[["name", 3, str(one), None, True]]) == 320
        save_adapter(one, 4)
        assert cached(adapters=[["name", 4, str(one), None, True]]) == 0
        # It may have been loaded before they changed, as a server does when told to: then it is its own.
        newer = {"adapters": [["name", 5, str(one)]]}
        assert [cached(**newer), cached(**newer)] == [0, 320]


@pytest.mark.full
def test_tails_at_every_offset_and_many_requests_at_once_say_what_they_say_without(
    tmp_path: Path, model: Path, sidecar: ServeProcess
) -> None:
    base = PROMPTS[1]
    tails = [
        base[:cut] + prompt(cut, length)
        for cut in range(BLOCK - 2, 2 * BLOCK + 3)
        for length in (1, BLOCK - 1, BLOCK, BLOCK + 1)
    ]
    draw = random.Random(5)
    many = [base[: draw.randrange(333)] + prompt(at, draw.randrange(1, 200)) for at in range(64)]
    patient = {"lookup_seconds": 30}
    with (
        Engine(tmp_path, model) as plain,
        Engine(tmp_path, model, url_of(sidecar), extra=patient) as engine,
    ):
        plain.ready()
        engine.ready()
        engine.ask("generate", prompts=[base])
        for prompts, times in ((tails, 1), (many, 2)):
            assert plain.ask("reset")
            expected = plain.ask("generate", prompts=prompts)["tokens"]
            for _ in range(times):
                assert engine.ask("reset")
                said = engine.ask("generate", prompts=prompts)
                assert said["tokens"] == expected
        # Of each all full blocks, from the sidecar or from another request that had them from there.
        assert said["cached"] == [(len(one) - 1) // BLOCK * BLOCK for one in many]
        assert engine.count("hit_tokens_host") > sum(len(one) for one in many) / 4
        assert engine.count("failed_blocks") == 0


@pytest.mark.full
def test_preempted_requests_say_what_they_say_without(
    tmp_path: Path, model: Path, sidecar: ServeProcess
) -> None:
    prompts = [prompt(at, 150) for at in range(12)]
    options: dict[str, Any] = {
        "num_gpu_blocks_override": 32,
        "max_num_batched_tokens": 512,
        "max_model_len": 512,
    }
    with (
        Engine(tmp_path, model, **options) as plain,
        Engine(tmp_path, model, url_of(sidecar), **options) as engine,
    ):
        expected = plain.ready().ask("generate", prompts=prompts, max_tokens=150)["tokens"]
        engine.ready()
        for _ in range(2):
            assert engine.ask("generate", prompts=prompts, max_tokens=150)["tokens"] == expected
        assert engine.ask("metrics")["vllm:num_preemptions"] > 0
        assert engine.count("hit_tokens_host") > 0


@pytest.mark.full
def test_a_sidecar_that_is_absent_killed_or_stalled_costs_hits_alone_and_is_said_once(
    tmp_path: Path, model: Path
) -> None:
    many = [prompt(at, 300) for at in range(24)]
    sidecar = ServeProcess(tmp_path / "s", host_bytes=64 << 20)
    with Engine(tmp_path, model, url_of(sidecar)) as engine:
        expected = engine.ready().ask("generate", prompts=many)["tokens"]
        assert engine.log.count("serving on without") == 1

        def same() -> list[int]:
            assert engine.ask("reset")
            said = engine.ask("generate", prompts=many)
            assert said["tokens"] == expected
            cached: list[int] = said["cached"]
            return cached

        with sidecar:
            _wait_for(lambda: "is there again" in engine.log or not same(), 30)
            same()
            assert same() == [288] * 24
            for pause in (0.0, 0.005, 0.02, 0.05, 0.1):
                assert engine.ask("reset")
                engine.send("generate", prompts=many)
                time.sleep(pause)
                sidecar.kill()
                assert engine.answer()["tokens"] == expected
                same()
                sidecar.start()
                _wait_for(lambda: sum(same()) > 0, 30)
            sidecar.pause()
            began = time.monotonic()
            for _ in range(4):
                same()
            assert time.monotonic() - began < 12
            sidecar.resume()
            _wait_for(lambda: same() == [288] * 24, 30)


def _wait_for(condition: Any, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.2)


@pytest.mark.full
def test_an_engine_core_that_is_killed_while_it_stores_leaves_nothing_reserved_or_half_stored(
    tmp_path: Path, model: Path, sidecar: ServeProcess
) -> None:
    many = [prompt(at, 300) for at in range(48)]
    # vLLM's usual form: scheduler and worker in a process of their own, steps prepared ahead.
    apart = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with connect(url_of(sidecar)) as connection:

        def slots(kind: str) -> int:
            return sum(space[kind] for space in connection.status()["spaces"])

        with Engine(tmp_path, model, url_of(sidecar), environment=apart) as engine:
            engine.ready()
            engine.send("generate", prompts=many)
            _wait_for(lambda: slots("resident") > 0, 60)
        stored = slots("resident")
        _wait_for(lambda: slots("reserved") == slots("leased") == 0, 30)
    with Engine(tmp_path, model) as plain, Engine(tmp_path, model, url_of(sidecar)) as engine:
        expected = plain.ready().ask("generate", prompts=many)["tokens"]
        assert engine.ready().ask("generate", prompts=many)["tokens"] == expected
        assert 0 < engine.count("loaded_blocks") <= stored


async def _empty_host(sidecar: ServeProcess) -> None:
    async with await connect_async(url_of(sidecar)) as connection:
        assert await connection.flush(10) == 0
        assert (await connection.evict_where(tier="host")).lost == 0


@pytest.mark.full
def test_blocks_come_up_from_redis_and_a_stalled_or_lying_one_costs_hits_alone(
    tmp_path: Path, model: Path
) -> None:
    with (
        RedisServer(tmp_path) as redis,
        ServeProcess(tmp_path / "s", f"--cold={redis.url}", host_bytes=64 << 20) as sidecar,
        Engine(tmp_path, model, url_of(sidecar)) as engine,
    ):
        expected = engine.ready().ask("generate", prompts=PROMPTS)["tokens"]

        def evict() -> None:
            """vLLM and host memory have nothing any more."""
            assert engine.ask("reset")
            asyncio.run(_empty_host(sidecar))

        evict()
        said = engine.ask("generate", prompts=PROMPTS)
        assert (said["tokens"], said["cached"]) == (expected, CACHEABLE)
        assert engine.count("hit_tokens_cold") == sum(CACHEABLE)
        evict()
        client = redis.client()
        for key in client.scan_iter():
            value = client.get(key)
            assert isinstance(value, bytes)
            client.set(key, value[:-1] + bytes([value[-1] ^ 1]))
        assert engine.ask("generate", prompts=PROMPTS)["tokens"] == expected
        evict()
        redis.stall()
        assert engine.ask("generate", prompts=PROMPTS)["tokens"] == expected
        redis.resume()
