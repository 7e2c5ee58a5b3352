"""`kvpager simulate`: what it prints, draws and refuses."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from kvpager.api.cli import main
from kvpager.api.simulation import Contender, Kind, Outcome, gap_closed
from kvpager.kvstore.calibration import Calibration, DeviceCosts, ModelCost
from kvpager.kvstore.cost import ComputeCost, LinkCost
from kvpager.kvstore.policy import policy_names
from kvpager.kvstore.replay import Score
from kvpager.kvstore.textbook import TEXTBOOK
from kvpager.tests.installed_policy import install_policy

CHATS = ("--generate", "chats", "--sessions", "60")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small trace in a file."""
    path = str(tmp_path_factory.mktemp("chats") / "chats.jsonl.gz")
    assert main(["simulate", *CHATS, "--write", path]) == 0
    return path


def answered(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["simulate", *arguments, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_every_policy_is_compared_at_every_size(chats: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = answered(capsys, chats, "--blocks", "50,0.2k")
    assert answer["trace"]["name"] == "chats.jsonl.gz"
    found = {(one["name"], one["kind"], one["blocks"]): one for one in answer["results"]}
    kinds = {"MIN": "bound", **dict.fromkeys(TEXTBOOK, "textbook"), **dict.fromkeys(policy_names(), "policy")}
    assert set(found) == {(name, kind, size) for name, kind in kinds.items() for size in (50, 200)}
    for size in (50, 200):
        most = found["MIN", "bound", size]["hit_blocks"]
        assert all(one["hit_blocks"] <= most for (_, _, blocks), one in found.items() if blocks == size)
    for one in answer["results"]:
        assert one["host_bytes"] == one["blocks"] * 512 * 131072
        assert 0 < one["hit_seconds"] < one["hit_tokens"] < 1
        assert (one["gap_closed"] is None) == (one["kind"] != "policy")


def test_a_policy_that_cannot_be_made_is_named_before_anything_is_replayed(
    chats: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install_policy(monkeypatch, tmp_path, "unbounded", "kvpager.tests.installed_policy:Unbounded")
    assert main(["simulate", chats, "--jobs=2"]) == 1
    assert "'unbounded' leads to kvpager.tests.installed_policy:Unbounded, which" in capsys.readouterr().err


def test_several_processes_find_what_one_does(chats: str, capsys: pytest.CaptureFixture[str]) -> None:
    def results(*arguments: str) -> list[dict[str, Any]]:
        found = answered(capsys, chats, "--blocks=50,200", "--beside=MIN,LRU", "--policy=lru", *arguments)
        return [{**one, "took_seconds": None} for one in found["results"]]

    assert results("--jobs", "2") == results("--jobs", "1")


def test_the_trace_that_is_made_is_the_one_that_was_written(
    chats: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--blocks", "100", "--policy", "lru", "--beside", "none", "--jobs", "1")
    [read] = answered(capsys, chats, *common)["results"]
    [made] = answered(capsys, *CHATS, *common)["results"]
    assert read["hit_blocks"] == made["hit_blocks"]
    [other] = answered(capsys, *CHATS, *common, "--seed", "1")["results"]
    assert other["hit_blocks"] != made["hit_blocks"]


def test_sizes_in_bytes_are_those_of_blocks_of_the_model(
    tmp_path: Path, chats: str, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64}
    config = {"model_type": "llama", "hidden_size": 256, "torch_dtype": "float16", **figures}
    (tmp_path / "config.json").write_text(json.dumps(config))
    common = (chats, "--beside", "none", "--policy", "lru", "--jobs", "1", "--host-bytes", "64M,26214400")
    for option in (("--model", str(tmp_path)), ("--token-bytes", "512")):
        answer = answered(capsys, *common, *option)
        assert answer["cost"]["block_bytes"] == 512 * 512
        assert [one["blocks"] for one in answer["results"]] == [100, 256]


def test_costs_that_are_given_are_reckoned_with(chats: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = (chats, "--beside", "none", "--policy", "lru", "--jobs", "1", "--blocks", "100")
    [usual] = answered(capsys, *common)["results"]
    fast = answered(capsys, *common, "--seconds-per-token", "1e-9", "--seconds-per-token-pair", "0")
    assert fast["cost"]["source"].startswith("as given, otherwise those of a Llama-3-8B")
    assert fast["results"][0]["hit_blocks"] == usual["hit_blocks"]
    # Nothing is worth loading that takes no time to compute.
    assert fast["results"][0]["seconds_saved"] < 0.1 * usual["seconds_saved"]


def test_costs_that_were_measured_here_are_reckoned_with(
    tmp_path: Path, chats: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "calibration.json"
    link, compute = LinkCost(0.0, 1e-9), ComputeCost(0.0, 1e-3, 0.0)
    models = {"aa": ModelCost("small", compute), "bb": ModelCost("large", ComputeCost(0.0, 2e-3, 0.0))}
    cpu = DeviceCosts(link, None, models)
    Calibration(platform.node(), 0.0, {"disk": link}, {"cpu": cpu, "idle": DeviceCosts()}).write(path)
    common = (chats, "--beside", "none", "--policy", "lru", "--jobs", "1", "--blocks", "100")
    problem = "--model: must be one that the calibration has: small, large"
    assert main(["simulate", *common, "--calibration", str(path)]) == 1
    assert problem in capsys.readouterr().err
    Calibration(
        platform.node(), 0.0, {"disk": link}, {"cpu": replace(cpu, models={"aa": models["aa"]})}
    ).write(path)
    answer = answered(capsys, *common, "--calibration", str(path))
    assert answer["cost"]["source"] == "measured here, of small on cpu and a cold tier on disk"
    assert answer["cost"]["compute"]["seconds_per_token"] == 1e-3
    assert (
        answer["cost"]["copy"]
        == answer["cost"]["cold"]
        == {"seconds_per_call": 0.0, "seconds_per_byte": 1e-9}
    )
    Calibration("another machine", 0.0).write(path)
    assert main(["simulate", *common, "--calibration", str(path)]) == 1
    assert "has nothing that was measured on this machine" in capsys.readouterr().err
    assert main(["simulate", *common, "--device", "cpu"]) == 1
    assert "--device: is one of a calibration" in capsys.readouterr().err


def test_a_cold_tier_is_told_apart(chats: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = (chats, "--beside", "LRU", "--policy", "lru", "--jobs", "1", "--blocks", "50")
    textbook, alone = answered(capsys, *common)["results"]
    whole, both = answered(capsys, *common, "--cold-blocks", "300")["results"]
    assert alone["hit_cold_blocks"] == 0 < both["hit_cold_blocks"] < both["hit_blocks"]
    assert whole["hit_blocks"] > textbook["hit_blocks"]
    assert whole["hit_seconds"] is None
    assert main(["simulate", *common, "--cold-bytes", "18.75G"]) == 0
    shown = capsys.readouterr().out
    assert "cold tier: 300 blocks (18.8 GiB), lru" in shown
    assert "of them cold" in shown


def test_people_are_shown_a_table(chats: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["simulate", chats, "--policy", "lru", "--beside", "MIN,FIFO"]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    assert out.startswith("chats.jsonl.gz: ")
    assert out.count("host memory: ") == 5
    rows = [line.split() for line in out.splitlines() if line.startswith(("MIN ", "FIFO ", "lru "))]
    assert [row[0] for row in rows] == ["MIN", "FIFO", "lru"] * 5
    assert all(row[1].endswith("%") and row[2].endswith("%") and row[3].endswith("%") for row in rows)


def test_one_of_a_thing_is_told_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    common = ("--policy", "lru", "--beside", "none", "--jobs", "1", "--blocks", "1")
    for times, told in (
        ((0,), "1 request in 0 seconds, 1 block of 512 tokens, 1 different one\n"),
        ((0, 119_000), "2 requests in 119 seconds, 2 blocks of 512 tokens, 1 different one\n"),
        ((0, 3_600_000), "2 requests in 60 minutes, 2 blocks of 512 tokens, 1 different one\n"),
    ):
        requests = ({"timestamp": time, "input_length": 512, "hash_ids": [7]} for time in times)
        path.write_text("".join(json.dumps(request) + "\n" for request in requests))
        capsys.readouterr()
        assert main(["simulate", str(path), *common]) == 0
        assert capsys.readouterr().out.startswith(f"trace.jsonl: {told}")


def test_a_log_of_several_block_sizes_is_simulated_one_space_at_a_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[dict[str, Any]] = [{"kvpager_trace": 1, "started": 0.0}]
    lines += [{"space": n, "block_size": 16 << n, "block_bytes": 4096 << n} for n in (0, 1)]
    lines += [{"t": 0.0, "space": n, "match": 16 * str(n), "found": 0, "depth": 1} for n in (0, 1, 1)]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = (str(path), "--policy", "lru", "--beside", "none", "--jobs", "1", "--blocks", "1")
    assert main(["simulate", *common]) == 1
    assert capsys.readouterr().err.startswith("kvpager simulate: --space: is to be said, as blocks of diff")
    answer = answered(capsys, *common, "--space", "1")
    assert (answer["trace"]["block_size"], answer["trace"]["requests"]) == (32, 2)


def test_the_plot_has_every_policy(tmp_path: Path, chats: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hits.svg"
    answer = answered(
        capsys, chats, "--blocks=50,200", "--beside=MIN,LRU", "--policy=lru", "--plot", str(path)
    )
    told = ElementTree.parse(path).getroot().findtext("{http://www.w3.org/2000/svg}desc")
    assert told is not None
    for one in answer["results"]:
        assert f"{one['name']} {one['hit_blocks']:.1%}" in told
        assert f"{one['name']} {one['hit_seconds']:.1%}" in told


def test_the_share_of_a_gap_that_is_closed() -> None:
    def outcome(name: str, kind: Kind, blocks: float) -> Outcome:
        return Outcome(Contender(name, kind), 10, Score(blocks, blocks, None, None, 0.0), 0.0)

    outcomes = [
        outcome("MIN", Kind.BOUND, 0.5),
        outcome("LRU", Kind.TEXTBOOK, 0.1),
        outcome("FIFO", Kind.TEXTBOOK, 0.3),
        outcome("lru", Kind.POLICY, 0.35),
        outcome("bad", Kind.POLICY, 0.2),
    ]
    _, textbook, _, good, bad = outcomes
    assert gap_closed(outcomes, good) == pytest.approx(0.25)
    assert gap_closed(outcomes, bad) == pytest.approx(-0.5)
    assert gap_closed(outcomes, textbook) is None
    assert gap_closed(outcomes[1:], good) is None
    assert gap_closed([outcomes[0], *outcomes[3:]], good) is None
    assert gap_closed([replace(one, blocks=11) for one in outcomes], good) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "TRACE: give a file, or --generate chats"),
        (["x", "--generate", "chats"], "--generate: makes a trace in place of TRACE, which is given too"),
        (["--generate", "chats", "--space", "0"], "--space: is of a log that kvpager serve --trace wrote"),
        (["{chats}", "--space", "0"], "--space: is of a log that kvpager serve --trace wrote"),
        (["{chats}", "--space", "-1"], "--space: must be an integer of at least 0, got -1"),
        (
            ["{chats}", "--plot", "x.png"],
            "--plot: is drawn as SVG: its name must end with .svg, got 'x.png'",
        ),
        (["/none/x"], "TRACE: /none/x cannot be read: No such file or directory"),
        (["{chats}", "--sessions", "3"], "--sessions: is for a trace that is made, and TRACE names a file"),
        (["{chats}", "--block-size", "16"], "TRACE: {chats}, line 1: hash_ids names "),
        (["{chats}", "--block-size", "0"], "--block-size: must be an integer of at least 1, got 0"),
        (["{chats}", "--policy", "best"], "--policy: must be "),
        (["{chats}", "--policy", ","], "--policy: names none of "),
        (["{chats}", "--beside", "lru"], "--beside: must be "),
        (["{chats}", "--blocks", "many"], "--blocks: must be a number of blocks such as 500, 30k or 1.5M"),
        (["{chats}", "--blocks", "0"], "--blocks: must be an integer of at least 1, got 0"),
        (["{chats}", "--blocks", ","], "--blocks: names no size"),
        (["{chats}", "--host-bytes", "1M"], "--host-bytes: 1M holds no block of 64.0 MiB"),
        (["{chats}", "--cold-blocks", "9", "--cold-policy", "best"], "--cold-policy: must be "),
        (["{chats}", "--model", "/none"], "--model: there is no model at /none"),
        (
            ["{chats}", "--seconds-per-token", "-1"],
            "--seconds-per-token: must be a finite number of at least 0",
        ),
        (["{chats}", "--jobs", "0"], "--jobs: must be an integer of at least 1, got 0"),
        (["--generate", "chats", "--sessions", "0"], "--sessions: must be an integer of at least 1, got 0"),
        (["{chats}", "--blocks", "9", "--plot", "/none/x.svg"], "/none/x.svg cannot be written: "),
    ],
)
def test_what_makes_no_sense_is_told_by_its_option(
    arguments: list[str], said: str, chats: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["simulate", "--jobs", "1", *(one.format(chats=chats) for one in arguments)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"kvpager simulate: {said.format(chats=chats)}")
    assert error.count("\n") == 1
