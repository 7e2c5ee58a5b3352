"""The benchmarks of oversubscription and waking, tiny: that what they count is so, not how fast it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvpager.benchmarks import oversubscription, waking
from kvpager.benchmarks.chat_sessions import ChatWorkload, Thinking
from kvpager.benchmarks.oversubscription import MODES, QUICK, engine, fill, greedy, measure
from kvpager.benchmarks.random_model import TINY, random_model
from kvpager.benchmarks.serving_meter import Meter, Traffic, percentiles, vram_use
from kvpager.engine.loader import LoadedModel
from kvpager.engine.sequence import SequenceState
from kvpager.kvstore.host import HostStore
from kvpager.tests.engine_cases import check_nothing_is_held

CHATS = ChatWorkload(200, 64, 16, 12, vocabulary=99, block_size=8, seed=3)
SHARES = (0.5, 2.0)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return random_model(TINY, device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the tiny form of all cases writes."""
    path = tmp_path_factory.mktemp("oversubscription") / "results.json"
    shares = ",".join(map(str, SHARES))
    assert oversubscription.main(["--quick", "--shares", shares, "--json", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module")
def waking_report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the tiny form of the figures of waking writes."""
    path = tmp_path_factory.mktemp("waking") / "results.json"
    assert waking.main(["--quick", "--json", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


# The workload


def test_chats_are_the_same_from_the_same_numbers_and_others_from_another_seed() -> None:
    again, other = replace(CHATS), replace(CHATS, seed=4)
    for session in range(5):
        np.testing.assert_array_equal(CHATS.history(session), again.history(session))
        assert not np.array_equal(CHATS.history(session)[:8], other.history(session)[:8])
        for number in range(3):
            one, two = CHATS.turn(session, number), again.turn(session, number)
            np.testing.assert_array_equal(one.message, two.message)
            assert (one.answer_tokens, one.think) == (two.answer_tokens, two.think)


def test_histories_are_whole_blocks_and_lengths_are_as_long_as_was_asked_on_average() -> None:
    histories = [CHATS.history(session) for session in range(CHATS.sessions)]
    assert all(len(history) % CHATS.block_size == 0 for history in histories)
    assert np.mean([*map(len, histories)]) == pytest.approx(CHATS.history_tokens, rel=0.05)
    turns = [CHATS.turn(session, number) for session in range(CHATS.sessions) for number in range(5)]
    assert np.mean([len(turn.message) for turn in turns]) == pytest.approx(CHATS.message_tokens, rel=0.05)
    assert np.mean([turn.answer_tokens for turn in turns]) == pytest.approx(CHATS.answer_tokens, rel=0.1)
    assert max(turn.answer_tokens for turn in turns) <= 4 * CHATS.answer_tokens


def test_whose_user_is_done_first_is_next_and_time_is_that_of_the_last_one() -> None:
    thinking = Thinking([3.0, 1.0, 2.0])
    assert thinking.take() == 1
    thinking.begin(1, 1.5)  # until 2.5
    assert [thinking.take() for _ in range(3)] == [2, 1, 0]
    assert not len(thinking)


# The model


def test_what_a_random_model_answers_depends_on_the_keys_and_values_it_reads(loaded: LoadedModel) -> None:
    prompts = [[*range(1, 40), 7], [*range(2, 41), 7]]  # the same last token after another history
    with HostStore(4 << 20) as host, engine(loaded, "attend", host, device_blocks=64, block_size=8) as llm:
        one, other, again = (
            llm.generate([prompt], greedy(12))[0].token_ids for prompt in (*prompts, prompts[0])
        )
    assert one == again
    assert one != other
    assert len(set(one)) > 3


def test_a_random_model_is_named_by_what_its_weights_come_from(loaded: LoadedModel) -> None:
    same = random_model(TINY, device="cpu", dtype=torch.float32)
    assert same.identity == loaded.identity
    assert all(map(torch.equal, same.model.state_dict().values(), loaded.model.state_dict().values()))
    assert random_model(TINY, device="cpu", dtype=torch.float32, seed=1).identity != loaded.identity


# The cases


def test_every_mode_answers_every_turn_and_all_answer_alike(report: dict[str, Any]) -> None:
    cases = report["results"]["cases"]
    assert [(case["mode"], case["share"]) for case in cases] == [
        (mode, share) for share in SHARES for mode in MODES
    ]
    for case in cases:
        assert case["turns_in_all"] >= QUICK.window.turns
        assert case["unanswered"] == 0
        answers = case["answers"]
        if case["mode"] == MODES[0]:
            assert answers is None
        else:
            assert answers["compared"] > case["turns_in_all"] // 2
            assert answers["equal"] == answers["compared"]


def test_only_what_is_kept_below_crosses_the_bus_and_the_rest_is_computed_again(
    report: dict[str, Any],
) -> None:
    for case in report["results"]["cases"]:
        crossed = case["pcie_bytes_per_token"]
        assert crossed["all"] == pytest.approx(
            crossed["copied_up"] + crossed["read_in_place"] + crossed["copied_down"]
        )
        if case["mode"] == "recompute":
            assert crossed["copied_up"] == crossed["read_in_place"] == 0
            assert case["computed_tokens_per_turn"] > QUICK.workload.history_tokens / 2
        else:
            assert crossed["copied_up"] + crossed["read_in_place"] > 0
            assert case["computed_tokens_per_turn"] < QUICK.workload.history_tokens / 2
        if case["mode"] == "copy":
            assert crossed["read_in_place"] == 0


def test_a_case_tells_rates_latencies_and_waste(report: dict[str, Any]) -> None:
    assert {"machine", "versions", "results"} <= report.keys()
    for case in report["results"]["cases"]:
        assert case["tokens_per_s"] == pytest.approx(case["output_tokens"] / case["seconds"])
        for what in ("first_token_s", "between_tokens_s"):
            assert 0 < case[what]["p50"] <= case[what]["p99"] < 30
        assert case["between_tokens_s"]["count"] + case["first_token_s"]["count"] == case["output_tokens"]
        assert 0 < case["vram_waste"]["mean"] <= case["vram_waste"]["most"] < 0.5
        assert case["active"] == QUICK.active(case["share"])


def test_ratios_hold_kvpager_to_the_other_modes(report: dict[str, Any]) -> None:
    cases = {(case["mode"], case["share"]): case for case in report["results"]["cases"]}
    ratios = report["results"]["ratios"]
    assert [(ratio["share"], ratio["over"]) for ratio in ratios] == [
        (share, other) for share in SHARES for other in ("copy", "recompute")
    ]
    for ratio in ratios:
        ours, theirs = cases["attend", ratio["share"]], cases[ratio["over"], ratio["share"]]
        assert ratio["tokens_per_s"] == pytest.approx(ours["tokens_per_s"] / theirs["tokens_per_s"])
        assert ratio["first_token_p99"] == pytest.approx(
            ours["first_token_s"]["p99"] / theirs["first_token_s"]["p99"]
        )


def test_a_case_leaves_host_memory_with_the_histories_alone_for_the_next(loaded: LoadedModel) -> None:
    workload = QUICK.workload
    with HostStore(QUICK.host_bytes) as host:
        fill(loaded, host, workload, 64)
        (space,) = host.spaces
        blocks = sum(len(workload.history(number)) for number in range(workload.sessions)) // 8
        assert space.resident == blocks
        sizes: dict[str, Any] = {"max_sequences": 8, "max_tokens": QUICK.max_tokens}
        with engine(loaded, "attend", host, device_blocks=QUICK.device_blocks, block_size=8, **sizes) as llm:
            ((_, answers),) = measure({"attend": llm}, host, QUICK, 2.0)
            assert space.resident == blocks
            ((_, again),) = measure({"attend": llm}, host, QUICK, 2.0)
            common = answers.keys() & again.keys()
            assert len(common) > QUICK.fitting
            assert all(answers[turn] == again[turn] for turn in common)
            check_nothing_is_held(llm)


def test_who_gives_too_little_host_memory_is_told(loaded: LoadedModel) -> None:
    with HostStore(4 << 20, extent_bytes=4 << 20) as host, pytest.raises(SystemExit, match="give it more"):
        fill(loaded, host, replace(QUICK.workload, sessions=300), 64)


# The meter


def test_a_meter_counts_each_token_once_also_of_sequences_that_slept(loaded: LoadedModel) -> None:
    with (
        HostStore(4 << 20) as host,
        engine(loaded, "attend", host, device_blocks=12, block_size=8, max_sequences=4) as llm,
    ):
        llm.generate([[5, 6, 7]], greedy(3))  # before it watches
        meter = Meter(llm)
        requests = [llm.submit([number, *range(20)], greedy(20)) for number in range(3)]
        for request in requests:
            meter.submitted(request)
        while any(request.state is not SequenceState.FINISHED for request in requests):
            llm.step()
            meter.after_step()
        assert llm.scheduler.preemptions > 0
        assert meter.tokens == 60
        assert len(meter.first_tokens()) == 3
        assert len(meter.gaps()) == 57
        assert len(meter.gaps(np.array([requests[0].id]))) == 19
        whole = sum(meter.gaps(np.array([requests[0].id])))
        assert 0 < whole <= max(request.finished_at or 0.0 for request in requests) - requests[0].arrived_at
        stats = llm.store.stats
        assert meter.traffic().copied_down <= stats.written_back


def test_waste_is_what_is_allocated_and_holds_no_token(loaded: LoadedModel) -> None:
    with (
        HostStore(4 << 20) as host,
        engine(loaded, "attend", host, device_blocks=16, block_size=8) as llm,
    ):
        assert vram_use(llm.store, {}).waste == 0.0
        request = llm.submit([*range(19)], greedy(9), session="one")
        llm.step()  # 19 tokens are in 3 blocks
        assert vram_use(llm.store, {}) == type(vram_use(llm.store, {}))(24, 5)
        while request.state is not SequenceState.FINISHED:
            llm.step()
        sleeping = request.sleeping
        assert sleeping is not None
        assert sleeping.partial is not None
        tails = {sleeping.partial: len(sleeping.tail)}
        assert sleeping.length == 27
        assert vram_use(llm.store, tails) == type(vram_use(llm.store, {}))(32, 5)


def test_bytes_are_told_by_the_token_and_by_the_way() -> None:
    assert Traffic(3, 4, 1).bytes_per_token(1000, 10) == {
        "copied_up": 300.0,
        "read_in_place": 400.0,
        "copied_down": 100.0,
        "all": 800.0,
    }
    assert percentiles(np.array([])) == {"count": 0, "p50": None, "p99": None}


# Waking


def test_a_session_wakes_in_every_mode_alone_and_beside_others(waking_report: dict[str, Any]) -> None:
    scene = waking.QUICK
    rows = waking_report["results"]["wake"]["rows"]
    assert [(row["mode"], row["tokens"], row["awake"]) for row in rows] == [
        *((mode, count, 0) for count in scene.lengths for mode in MODES),
        *((mode, scene.longest, scene.awake) for mode in MODES),
    ]
    for row in rows:
        assert row["first_token_s"]["count"] == scene.wakes
        if row["awake"]:
            least = scene.awake * scene.wakes * scene.wake_every
            assert row["between_tokens_undisturbed_s"]["count"] == least
            assert row["between_tokens_s"]["count"] >= least


def test_rewriting_a_row_moves_nothing_and_finds_all_of_it(waking_report: dict[str, Any]) -> None:
    found = waking_report["results"]["wake"]["rewriting"]
    assert found["seconds"]["count"] == waking.QUICK.rewritten
    assert found["blocks"] == waking.QUICK.longest // waking.QUICK.block_size
    assert found["far_blocks"] >= found["blocks"]


def test_a_sequence_of_four_times_vram_is_answered_whole_and_mostly_read_in_place(
    waking_report: dict[str, Any],
) -> None:
    found = waking_report["results"]["larger"]
    assert found["tokens"] == 4 * found["vram_tokens"]
    assert found["steps"] == waking.QUICK.larger_steps - 2
    layout = random_model(TINY, device="cpu", dtype=torch.float32).model.kv_layout(waking.QUICK.block_size)
    assert found["far_bytes"] >= (found["tokens"] - found["vram_tokens"]) * layout.token_bytes
    assert found["of_ceiling"] == pytest.approx(found["gb_per_s"] / found["ceiling_gb_per_s"])


def test_a_document_that_is_shared_is_there_once(waking_report: dict[str, Any]) -> None:
    found = waking_report["results"]["shared"]
    together, apart = found["rows"]
    assert not together["own_copies"]
    assert apart["own_copies"]
    assert together["unanswered"] == apart["unanswered"] == 0
    assert together["turns"] >= found["sessions"]
    # Without sharing the device tier holds a tenth of them.
    assert together["blocks_saved"] >= (found["sessions"] // 4) * together["document_blocks"]
    assert apart["blocks_saved"] == 0
    assert found["times"] == pytest.approx(together["tokens_per_s"] / apart["tokens_per_s"])


@pytest.mark.parametrize(
    ("program", "wrong", "told"),
    [
        (oversubscription.main, ["--quick", "--modes", "swap"], "swap: no such mode"),
        (waking.main, ["--quick", "--figures", "sleep"], "there is no sleep"),
    ],
)
def test_what_there_is_not_is_told(
    program: Any, wrong: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        program(wrong)
    assert told in capsys.readouterr().err
