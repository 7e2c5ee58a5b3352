"""``kvpager demo`` from beginning to end: small, on disk and on a real Redis."""

from __future__ import annotations

import argparse
import heapq
import inspect
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import kvpager
import pytest
import tokenizers
import torch
import transformers
from kvpager.api.demo_chats import Settings, Truth, first_process, second_process, uncached
from kvpager.api.demo_report import report, report_answers
from kvpager.engine.judge import Difference
from kvpager.engine.loader import load_model
from kvpager.engine.sequence import FinishReason
from kvpager.kvstore.hashing import hash_blocks
from kvpager.tests.model_files import require_smollm2
from kvpager.tests.process_tree import await_child, is_there
from kvpager.tests.raw_client import await_true
from kvpager.tests.redis_servers import RedisServer, free_port
from kvpager.tests.serve_process import ServeProcess
from rich.console import Console

SCRIPT = str(Path(sys.executable).with_name("kvpager"))
SMALL = ("demo", "--sessions", "3", "--answer-tokens", "4", "--device", "cpu")
EQUAL = re.compile(r"All (\d+) answers equal")
TIED = re.compile(r"(\d+) of (\d+) answers equal .* (\d+) differ at a tie")


def run(
    *arguments: str, command: tuple[str, ...] = (SCRIPT,), folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """The command with three short chats, in a process of its own; ``folder`` has its temporary files."""
    where = {} if folder is None else {"TMPDIR": str(folder)}
    return subprocess.run(
        [*command, *SMALL, *arguments],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "2", "COLUMNS": "200", **where},
    )


def check_done(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    said = EQUAL.search(done.stdout)
    assert said is not None, done.stdout
    # Two turns of each chat, and one after the restart.
    assert said[1] == "9"
    assert "Traceback" not in done.stderr


_ON_A_FULL_DISK = """
import resource, sys
from kvpager.api.demo_chats import Settings, first_process
from kvpager.tiers.errors import ColdTierFullError
# No file may have more: a full disk to a record, and none to the marker of the folder.
resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
try:
    first_process(Settings("smollm2", "cpu", 3, 4, sys.argv[1]))
except ColdTierFullError as error:
    print(error)
"""


def test_a_full_cold_tier_is_told_before_anything_else(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", _ON_A_FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout == f"{tmp_path} keeps nothing: full\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that can be talked to: it has a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1024,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (inspect.getdoc(one) or "" for one in (argparse, heapq, inspect, statistics, tempfile))
    tokenizer.train_from_iterator(texts, trainer)
    fast: Any = transformers.PreTrainedTokenizerFast
    talking = fast(tokenizer_object=tokenizer)
    talking.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    talking.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,  # what kernels take
        max_position_embeddings=8192,
        initializer_range=0.2,
        eos_token_id=0,
        bos_token_id=0,
    )
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    auto.from_config(config).save_pretrained(folder)
    return folder


def tokens_from_cold(printed: str) -> int:
    """Prompt tokens that the restarted process found in the cold tier, out of the demo's table."""
    row = next(line for line in printed.splitlines() if "restarted" in line)
    return int(row.split("│")[5].strip().replace(",", ""))


def test_the_demo_on_redis_answers_as_without_any_cache(tiny: Path, tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        done = run("--model", str(tiny), "--redis", server.url)
        check_done(done)
        assert tokens_from_cold(done.stdout) > 300
        with server.client() as client:
            assert client.dbsize() > 0


def test_the_demo_of_the_package_run_as_a_program_answers_as_without_any_cache(
    tiny: Path, tmp_path: Path
) -> None:
    # Its two processes are spawned, which imports the program once more.
    command = (sys.executable, "-P", "-m", "kvpager")
    done = run("--model", str(tiny), "--disk", str(tmp_path), command=command)
    check_done(done)
    assert tokens_from_cold(done.stdout) > 300


def rows(printed: str) -> dict[str, list[str]]:
    """The demo's table: what stands behind each name, from ``computed`` on."""
    found = (line.split("│") for line in printed.splitlines() if line.startswith("│"))
    return {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in found}


def test_engines_on_a_sidecar_answer_from_each_others_kv(tiny: Path, tmp_path: Path) -> None:
    done = run("--sidecar", "--model", str(tiny), folder=tmp_path)
    # Three turns of three chats.
    check_done(done)
    table = rows(done.stdout)
    assert set(table) >= {"first engine", "second engine", "third engine", "fourth engine", "no cache"}
    assert table["first engine"][2] == "0"
    for name in ("second engine", "third engine", "fourth engine"):
        assert int(table[name][2].replace(",", "")) > 300, table
    assert list(tmp_path.iterdir()) == []


def test_engines_use_a_sidecar_that_is_there(tiny: Path, tmp_path: Path) -> None:
    with ServeProcess(tmp_path / "socket", host_bytes=64 << 20) as serving:
        done = run("--sidecar", "--socket", str(serving.path), "--model", str(tiny))
        check_done(done)
        assert serving.running.poll() is None
        assert "64.0 MiB of host memory for 0 blocks" in done.stdout
        with kvpager.connect(serving.path) as client:
            assert client.stats()["sidecar"]["leased"] == 0
            assert client.stats()["host"]["committed"] > 0


def test_a_sidecar_that_is_too_small_to_pass_anything_on_is_told(tiny: Path, tmp_path: Path) -> None:
    with ServeProcess(tmp_path / "socket", host_bytes=1 << 16) as serving:
        done = run("--sidecar", "--socket", str(serving.path), "--model", str(tiny))
    assert done.returncode == 1
    assert "The second engine found nothing" in done.stdout
    assert "answers equal those" in done.stdout


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_in_16_bits_the_demo_tells_how_many_answers_are_equal_and_that_the_others_part_at_a_tie(
    tiny: Path, tmp_path: Path, dtype: str
) -> None:
    done = run("--model", str(tiny), "--disk", str(tmp_path), "--dtype", dtype)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Attention ran in {dtype} in the reference code, plain torch." in done.stdout
    assert f"on cpu in {dtype}: 2 x 2 layers" in done.stdout
    equal, tied = EQUAL.search(done.stdout), TIED.search(done.stdout)
    if equal is not None:
        assert equal[1] == "9"
    else:
        assert tied is not None, done.stdout
        assert int(tied[1]) + int(tied[3]) == int(tied[2]) == 9


def joined(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed, in one line."""
    return " ".join(capsys.readouterr().out.split())


def wide() -> Console:
    return Console(width=500, record=True, quiet=False)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_wrong_answer_is_told_and_fails_the_demo(tiny: Path, tmp_path: Path, dtype: str) -> None:
    settings = Settings(str(tiny), "cpu", 3, 4, str(tmp_path), dtype)
    chats = first_process(settings)
    console = wide()
    assert report_answers(console, [chats], uncached(settings, chats.turns)) == 0
    right = chats.turns[0]
    # Not the answer to this prompt: what wrong KV would lead to.
    stolen = next(turn.answer for turn in chats.turns if turn.answer[0] != right.answer[0])
    chats.turns[0] = replace(right, answer=stolen)
    truth = uncached(settings, chats.turns)
    assert [one.tie for one in truth.differences if one.at == 0] == [False]
    assert report_answers(console, [chats], truth) == 1
    said = console.export_text()
    assert "1 of 6 answers differ from those computed without cache" in said
    tolerance = {"float16": "within 0.03", "bfloat16": "within 0.24"}
    assert dtype == "float32" or f"{tolerance[dtype]} standard deviations of the best" in said


def test_the_report_counts_what_is_equal_what_ties_and_what_is_wrong(tiny: Path, tmp_path: Path) -> None:
    settings = Settings(str(tiny), "cpu", 3, 4, str(tmp_path), "float16")
    chats = first_process(settings)
    tie, wrong = Difference(2, 0.0123, True), Difference(1, 0.5, False)
    console = wide()
    assert report_answers(console, [chats], Truth("float16", 1.0, [tie, tie])) == 0
    assert (
        "4 of 6 answers equal those computed without any cache, token by token; 2 differ at a tie (in "
        "float16, tokens whose logits, computed without cache, are within 0.03 standard deviations of the "
        "best; the widest 0.012).\n"
    ) in console.export_text()
    assert report_answers(console, [chats], Truth("float16", 1.0, [tie, wrong])) == 1
    said = console.export_text()
    assert "1 of 6 answers differ from those computed without cache, and not at a tie" in said


@pytest.mark.parametrize("sessions", [1, 2, 9])
def test_few_chats_are_estimated_to_need_what_they_need(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], sessions: int
) -> None:
    settings = Settings(str(tiny), "cpu", sessions, 4, str(tmp_path))
    chats = first_process(settings)
    layout = load_model(tiny).model.kv_layout(16)
    # At the end of its second turn a chat has its whole prompt and answer.
    ends = [[*turn.prompt, *turn.answer] for turn in chats.turns[-sessions:]]
    full = {name for tokens in ends for name in hash_blocks(tokens, 16, bytes(16))}
    megabytes = (len(full) + sessions) * layout.block_bytes / 1e6
    said = re.search(
        rf"{sessions} chats over {min(sessions, 4)} documents need about ([\d.]+) MB", joined(capsys)
    )
    assert said is not None
    assert 0.95 * megabytes - 0.1 <= float(said[1]) <= 1.15 * megabytes + 0.1


def test_one_chat_with_long_answers_fits(tiny: Path, tmp_path: Path) -> None:
    settings = Settings(str(tiny), "cpu", 1, 500, str(tmp_path))
    first = first_process(settings)
    second, truth = second_process(settings, first)
    assert report(wide(), first, second, truth) == 0
    # Two turns, and one after the restart, each as long as it may be, or up to its own end.
    assert all(
        len(turn.answer) == 500 or turn.completion.finish_reason is FinishReason.STOP
        for turn in (*first.turns, *second.turns)
    )


@pytest.mark.gpu
def test_on_a_gpu_the_demo_runs_on_kernels_in_float16(tiny: Path, tmp_path: Path) -> None:
    settings = Settings(str(tiny), "cuda:0", 3, 6, str(tmp_path))
    first = first_process(settings)
    second, truth = second_process(settings, first)
    console = wide()
    assert report(console, first, second, truth) == 0
    said = console.export_text()
    assert truth.dtype == "float16"
    assert re.search(r"Attention ran in float16 on kvpager's kernels \(decode( and prefill)?\)", said), said
    assert first.captured
    assert "CUDA graphs of decode steps of" in said
    assert sum(turn.completion.cached.cold for turn in second.turns) > 300
    # A wrong answer is no tie on kernels either.
    right = second.turns[0]
    turns = (*second.turns, *first.turns)
    stolen = next(turn.answer for turn in turns if turn.answer[0] != right.answer[0])
    wrong = uncached(settings, [replace(right, answer=stolen)])
    assert [one.tie for one in wrong.differences] == [False]


@pytest.mark.full
def test_the_demo_on_a_real_model_answers_as_without_any_cache(tmp_path: Path) -> None:
    require_smollm2()
    done = run("--disk", str(tmp_path))
    check_done(done)
    assert "46,080 bytes of KV a token" in done.stdout
    assert tokens_from_cold(done.stdout) > 1000


def test_the_demo_without_its_redis_says_so_and_shows_no_traceback(tiny: Path) -> None:
    done = run("--model", str(tiny), "--redis", f"redis://127.0.0.1:{free_port()}")
    assert "Traceback" not in done.stderr
    assert "Connection refused" in done.stderr
    if done.returncode == 0:
        check_done(done)
    else:
        assert done.returncode == 1


def test_a_demo_that_is_killed_leaves_no_sidecar_and_no_engine(tiny: Path, tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [SCRIPT, *SMALL, "--model", str(tiny), "--sidecar"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "2", "COLUMNS": "200", "TMPDIR": str(tmp_path)},
    )
    assert demo.stdout is not None
    assert any("One sidecar on" in line for line in demo.stdout)
    children = [await_child(demo.pid, words) for words in ("serve", "spawn_main")]
    demo.kill()
    demo.communicate(timeout=60)
    await_true(lambda: not any(map(is_there, children)), 60.0)


@pytest.mark.parametrize(
    ("arguments", "begins"), [((), "The process has ended"), (("--sidecar",), "It has ended; another")]
)
def test_a_demo_that_is_interrupted_as_its_second_process_starts_ends_quietly(
    tiny: Path, tmp_path: Path, arguments: tuple[str, ...], begins: str
) -> None:
    demo = subprocess.Popen(
        [
            SCRIPT,
            *SMALL,
            "--model",
            str(tiny),
            *arguments,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "2", "COLUMNS": "200", "TMPDIR": str(tmp_path)},
    )
    assert demo.stdout is not None
    assert any(begins in line for line in demo.stdout)
    children = [await_child(demo.pid, "spawn_main")]
    if arguments:
        children.append(await_child(demo.pid, "serve"))
    demo.send_signal(signal.SIGTERM)
    _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert errors == ""
    assert not any(map(is_there, children))
    assert not list(tmp_path.glob("kvpager-demo-*"))
