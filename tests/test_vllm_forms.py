"""The forms in which vLLM is run, on a CPU: a server, several engines, ranks of a model, other settings."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kvpager import connect, connect_async
from kvpager.tests.serve_process import ServeProcess, remove_arena
from kvpager.tests.vllm_models import WORDS, prompt, save_hybrid, save_model
from kvpager.tests.vllm_process import Engine, end_session, group_of, require_vllm, vllm_environment
from kvpager.tiers.arena_file import default_arena_path

BLOCK = 32
ROOT = Path(__file__).resolve().parents[1]
PROMPTS = [prompt(1, 200), prompt(2, 333), prompt(3, 97)]
CACHEABLE = [192, 320, 96]
"""Tokens of their full blocks."""

PATIENT = {"lookup_seconds": 30}
"""On a busy machine an answer takes its time, and what is late is no hit."""

pytestmark = [pytest.mark.full, pytest.mark.timeout(900), pytest.mark.xdist_group("vllm")]


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


def wait_for(condition: Callable[[], object], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.2)


# Pieces of it, with vLLM's own classes


def test_pieces_name_media_by_content_and_place_and_ranks_as_spaces_and_refuse_a_network(
    tmp_path: Path,
) -> None:
    with Engine(tmp_path) as pieces:
        pieces.ready()
        tokens = prompt(1, 80)

        def names(*media: list[Any]) -> list[str]:
            found: list[str] = pieces.ask("names", tokens=tokens, media=list(media))
            return found

        text = names()
        aa, bb = "aa" * 32, "bb" * 32
        picture, other = names(["image", aa, 20, 30, 1]), names(["image", bb, 20, 30, 2])
        # Blocks before it have no part in it; the first that it reaches into and all after do.
        assert picture[0] == other[0] == text[0]
        assert all(len({a, b, c}) == 3 for a, b, c in zip(text[1:], picture[1:], other[1:], strict=True))
        assert names(["image", aa, 20, 30, 1]) == picture
        assert names(["image", aa, 21, 30, 1])[1:] != picture[1:]
        assert names(["audio", aa, 20, 30, 1])[1] != picture[1]
        # A client may give a picture a name, which says nothing of what is in it: a digest's, too.
        assert names(["image", aa, 20, 30, 2])[1] not in (picture[1], other[1])
        assert names(["image", "my-picture", 20, 30, 1]) == []
        assert names(["image", aa, 20, 30, -1]) == []

        def spaces(*ranks: list[Any]) -> int:
            return len(set(pieces.ask("spaces", ranks=list(ranks))))

        assert spaces(*([[p, 2], [t, 2], ["a"]] for p in (0, 1) for t in (0, 1))) == 4
        # The same rank of more ranks has another part of the model.
        assert spaces([[0, 1], [0, 1], ["a"]], [[0, 2], [0, 1], ["a"]], [[0, 1], [0, 2], ["a"]]) == 3
        # And of as many ranks, where its layers are others, though as many.
        assert spaces([[1, 3], [0, 1], ["b", "c"]], [[1, 3], [0, 1], ["c", "d"]]) == 2
        said = pieces.ask("cache_refusals")
        assert said.pop("full") == said.pop("windows as full") == "16"
        assert "--decode-context-parallel-size 2" in said.pop("decode")
        assert "--prefill-context-parallel-size 2" in said.pop("prefill")
        assert set(said) == {"window", "windows", "chunks", "reference window"}
        assert all("which alone is kept" in one for one in said.values())

        def announced(*steps: list[Any]) -> Any:
            return pieces.ask("announced", steps=[["expect"], *steps])

        everything = ["BlockStored", [0, 1, 2, 3]]
        assert announced(["stored"], ["removed", 2]) == [everything, ["BlockRemoved", [2]]]
        # Evicted before it is known that they were all stored; and stored again after that.
        assert announced(["removed", 2, 3], ["kept", 2], ["stored"]) == [everything, ["BlockRemoved", [3]]]
        # A sidecar that was started again, or whose events were dropped, tells of none of them.
        assert announced(["stored"], ["gap"], ["removed", 1]) == [everything, ["BlockRemoved", [0, 1, 2, 3]]]
        assert announced(["gap"], ["stored"]) == announced(["refused"], ["removed", 1]) == []
        for url in ("tcp://127.0.0.1:7333", "kvpager://127.0.0.1:7333", "kvpagers://host:7333"):
            said = pieces.ask("refusal", url=url)
            assert "a sidecar of this machine" in said
            assert "kvpager serve --cold redis://" in said
        assert pieces.ask("refusal", url=url_of_none(tmp_path)) == ""
        assert "lookup_seconds" in pieces.ask("refusal", lookup_secs=1)


def test_blocks_whose_leases_were_lost_while_they_were_copied_are_computed(
    tmp_path: Path, sidecar: ServeProcess
) -> None:
    with Engine(tmp_path) as pieces:
        flag = tmp_path / "copying"
        pieces.ready().send("failed_loads", url=url_of(sidecar), flag=str(flag))
        wait_for(flag.exists, 60)
        sidecar.kill()
        sidecar.start("--fresh")
        assert pieces.answer() == [[], [2, 3]]


def url_of_none(folder: Path) -> str:
    return f"unix://{folder}/none"


# Several engines


def test_two_engines_at_once_find_what_the_other_one_stores(
    tmp_path: Path, model: Path, sidecar: ServeProcess
) -> None:
    mine, its = [prompt(at, 300) for at in range(12)], [prompt(100 + at, 300) for at in range(12)]
    with (
        Engine(tmp_path, model, url_of(sidecar), extra=PATIENT) as one,
        Engine(tmp_path, model, url_of(sidecar), extra=PATIENT) as other,
    ):
        one.ready()
        other.ready()
        one.send("generate", prompts=mine)
        other.send("generate", prompts=its)
        first, second = one.answer()["tokens"], other.answer()["tokens"]
        assert one.ask("reset")
        assert other.ask("reset")
        one.send("generate", prompts=its)
        other.send("generate", prompts=mine)
        for engine, expected in ((one, second), (other, first)):
            said = engine.answer()
            assert (said["tokens"], said["cached"]) == (expected, [288] * 12)
        # Both store the same blocks at the same time: one does, and both may read them.
        both = [prompt(200 + at, 300) for at in range(12)]
        one.send("generate", prompts=both)
        other.send("generate", prompts=both)
        assert one.answer()["tokens"] == other.answer()["tokens"]
        # What is being stored is stored.
        assert one.ask("reset")
        assert other.ask("reset")
        assert one.count("stored_blocks") + other.count("stored_blocks") == 3 * 9 * 12
        assert one.count("failed_blocks") == other.count("failed_blocks") == 0


def test_a_model_of_several_cache_groups_is_refused_with_what_to_do_and_that_helps(
    tmp_path: Path, sidecar: ServeProcess
) -> None:
    require_vllm()
    hybrid = save_hybrid(tmp_path / "hybrid")
    with (
        Engine(tmp_path, hybrid, url_of(sidecar)) as engine,
        pytest.raises(AssertionError, match="vLLM ended"),
    ):
        engine.ready()
    said = engine.log
    assert "this model has 2 groups of KV caches" in said
    assert "--disable-hybrid-kv-cache-manager" in said
    with Engine(tmp_path) as engine:
        engine.ready().open(hybrid, disable_hybrid_kv_cache_manager=True)
        expected = engine.ask("generate", prompts=PROMPTS)["tokens"]
        engine.open(hybrid, url_of(sidecar), extra=PATIENT, disable_hybrid_kv_cache_manager=True)
        assert engine.ask("generate", prompts=PROMPTS) == {"tokens": expected, "cached": [0, 0, 0]}
        assert engine.ask("reset")
        assert engine.ask("generate", prompts=PROMPTS) == {"tokens": expected, "cached": CACHEABLE}


def test_prompts_alone_are_stored_events_are_passed_on_and_a_reset_shares_nothing(
    tmp_path: Path, model: Path, sidecar: ServeProcess
) -> None:
    with Engine(tmp_path) as engine:
        engine.ready().open(model, url_of(sidecar), extra={"store": "prompt", **PATIENT})
        said = engine.ask("generate", prompts=[PROMPTS[0]], max_tokens=100)["tokens"][0]
        assert engine.ask("reset")
        assert engine.count("stored_blocks") == 192 // BLOCK
        again = engine.ask("generate", prompts=[PROMPTS[0] + said])["cached"]
        assert again == [192]
        # Everything, and what it does is published.
        engine.open(model, url_of(sidecar), extra=PATIENT, events=f"ipc://{tmp_path}/events")
        expected = engine.ask("generate", prompts=[PROMPTS[1]], max_tokens=100)
        assert engine.ask("reset")
        events = engine.ask("events")
        stored = [event for event in events if event["kind"] == "BlockStored"]
        tokens = (PROMPTS[1] + expected["tokens"][0])[: (333 + 99) // BLOCK * BLOCK]
        assert [token for event in stored for token in event["tokens"]] == tokens
        assert len({one for event in stored for one in event["hashes"]}) == len(tokens) // BLOCK
        asyncio.run(_empty(url_of(sidecar)))
        # Published with a step's outputs.
        engine.ask("generate", prompts=[[1, 2, 3]])
        gone = [one for event in engine.ask("events") for one in event["hashes"]]
        assert set(gone) == {one for event in stored for one in event["hashes"]}
        # A sidecar that is started again has nothing of what was announced.
        engine.ask("generate", prompts=[PROMPTS[2]])
        assert engine.ask("reset")
        there = {one for event in engine.ask("events") for one in event["hashes"]}
        assert len(there) >= 3
        sidecar.kill()
        sidecar.start("--fresh")
        engine.ask("generate", prompts=[[1, 2, 3]])
        gone = [one for event in engine.ask("events") for one in event["hashes"]]
        assert there <= set(gone)
        # Weights changed in place: what was kept is not theirs, nor of any engine after.
        engine.ask("generate", prompts=PROMPTS)
        assert engine.ask("reset")
        assert engine.ask("generate", prompts=PROMPTS)["cached"] == CACHEABLE
        assert engine.ask("reset", connector=True)
        assert engine.ask("generate", prompts=PROMPTS)["cached"] == [0, 0, 0]
        assert engine.ask("reset")
        assert engine.ask("generate", prompts=PROMPTS)["cached"] == CACHEABLE


async def _empty(url: str, *spaces: bytes) -> None:
    async with await connect_async(url) as connection:
        assert (await connection.evict_where(tier="host", spaces=spaces or None)).blocks > 0


# Ranks


UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Ranks on a machine that has fewer nodes of memory than there are ranks."""
# Of pipelines there are names alone (above): vLLM's workers for the CPU do not run their stages.
RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def test_ranks_have_a_space_each_a_hit_is_what_all_have_and_one_may_be_killed(
    tmp_path: Path, model: Path, sidecar: ServeProcess
) -> None:
    with connect(url_of(sidecar)) as connection:

        def spaces() -> dict[bytes, dict[str, Any]]:
            return {_id(one): one for one in connection.status()["spaces"]}

        with Engine(tmp_path, model, url_of(sidecar), extra=PATIENT, environment=UNBOUND, **RANKS) as engine:
            expected = engine.ready().ask("generate", prompts=PROMPTS)["tokens"]
            assert engine.ask("reset")
            said = engine.ask("generate", prompts=PROMPTS)
            assert (said["tokens"], said["cached"]) == (expected, CACHEABLE)
        blocks = sum(CACHEABLE) // BLOCK
        assert [one["resident"] for one in spaces().values()] == [blocks, blocks]
        with Engine(tmp_path, model, url_of(sidecar), extra=PATIENT, environment=UNBOUND, **RANKS) as engine:
            said = engine.ready().ask("generate", prompts=PROMPTS)
            assert (said["tokens"], said["cached"]) == (expected, CACHEABLE)
            # One rank has nothing any more: the other's blocks are no hit.
            asyncio.run(_empty(url_of(sidecar), next(iter(spaces()))))
            assert engine.ask("reset")
            said = engine.ask("generate", prompts=PROMPTS)
            assert (said["tokens"], said["cached"]) == (expected, [0, 0, 0])
            # A worker dies while it stores: nothing of it stays reserved.
            engine.send("generate", prompts=[prompt(300 + at, 300) for at in range(48)])
            wait_for(lambda: sum(one["resident"] for one in spaces().values()) > 3 * blocks, 60)
            workers = [pid for pid in group_of(engine.process.pid) if _is_worker(pid)]
            assert len(workers) == 2
            os.kill(workers[1], signal.SIGKILL)
            time.sleep(1)
        wait_for(lambda: all(one["reserved"] == one["leased"] == 0 for one in spaces().values()), 30)


def _id(space: dict[str, Any]) -> bytes:
    return bytes.fromhex(space["id"])


def _is_worker(pid: int) -> bool:
    try:
        return b"Worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


# The server


def quick_start() -> tuple[str, str]:
    """The commands of the page: the sidecar's and vLLM's."""
    page = (ROOT / "docs" / "integrations.md").read_text()
    section = page.partition("### Quick start")[2].partition("\n###")[0]
    lines = re.findall(r"^    (.*)$", section, flags=re.MULTILINE)
    serve = lines[0]
    server = "\n".join(lines[1:])
    assert serve.startswith("kvpager serve ")
    assert serve.endswith(" &")
    assert server.startswith("python -m vllm.entrypoints.openai.api_server --model MODEL ")
    return serve, server


@contextmanager
def shell(command: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command as somebody types it who has vLLM's environment."""
    python = require_vllm()
    environment = {
        **vllm_environment(),
        "PATH": f"{Path(python).parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_RUNTIME_DIR": str(folder),
    }
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end_session(process)


def test_the_quick_start_runs_as_printed_and_a_server_that_is_restarted_has_its_prompt_from_kvpager(
    tmp_path: Path, model: Path
) -> None:
    from kvpager.tests.engine_cases import byte_tokenizer

    byte_tokenizer(WORDS).save_pretrained(model)
    serve, server = quick_start()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    # What is the reader's own: a model, where it listens, and what makes a test short.
    own = f"{model} --host 127.0.0.1 --port {port} --enforce-eager --enable-prompt-tokens-details"
    text = " ".join(f"the cat sat at {number}" for number in range(40))
    said = []
    with shell(serve.removesuffix(" &"), tmp_path):
        wait_for(lambda: list(tmp_path.glob("kvpager/*sock*")), 60)
        for told in (b"KV Transfer metrics", b"KV Transfer metrics: hit_requests=1, hit_tokens_host="):
            with shell(f"exec {server.replace('MODEL', own)}", tmp_path) as process:
                wait_for(lambda: _answers(f"http://127.0.0.1:{port}/health", process), 400)
                asked = {"model": str(model), "prompt": text, "temperature": 0, "max_tokens": 8}
                answer = _post(f"http://127.0.0.1:{port}/v1/completions", asked)
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
                    metrics = reply.read().decode()
                said.append((answer["choices"][0]["text"], answer["usage"], metrics))
                wait_for(lambda: told in (tmp_path / "server.log").read_bytes(), 60)  # noqa: B023
                process.send_signal(signal.SIGTERM)
                process.wait(60)
    remove_arena(Path(default_arena_path(str(tmp_path / "kvpager" / "sidecar.sock"))))
    (first, cold, _), (second, warm, metrics) = said
    assert first == second
    assert not (cold["prompt_tokens_details"] or {}).get("cached_tokens")
    found = warm["prompt_tokens_details"]["cached_tokens"]
    assert warm["prompt_tokens"] - 200 < found < warm["prompt_tokens"]
    [counted] = re.findall(r"^vllm:kvpager_hit_tokens_host_total\{.*\} (\S+)$", metrics, flags=re.MULTILINE)
    assert float(counted) == found


def _answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "the server ended"
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def _post(url: str, values: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(values).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.loads(reply.read())
