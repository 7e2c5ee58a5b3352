"""Many more sessions than the device tier holds: the same tokens as with room for all, and nobody starves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kvpager.engine.llm import LLM
from kvpager.engine.sampler import SamplingParams
from kvpager.engine.sequence import FinishReason, Sequence, SequenceState
from kvpager.engine.waking import Swap
from kvpager.tests.engine_cases import (
    SIZE,
    Case,
    MakeLLM,
    Tokens,
    check,
    check_nothing_is_held,
    finish,
    make_case,
    maker,
)
from kvpager.tiers.errors import ConfigError

SESSIONS = 40
PROMPT = 6 * SIZE
ANSWER = 30
PARAMS = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
ROOM = 4 * (-(-(PROMPT + ANSWER) // SIZE) + 1)
"""Blocks of the device tier: four sessions."""


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case("llama", "cpu", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def make_llm(case: Case, made: list[LLM]) -> MakeLLM:
    return maker(case, made)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(2, 199, PROMPT + int(random.integers(-9, 9))).tolist() for _ in range(SESSIONS)]


@pytest.fixture(scope="module")
def undisturbed(case: Case, prompts: list[list[int]]) -> list[Tokens]:
    """What they are answered with room for all: two turns, as one answer of twice the length."""
    llm = LLM(case.loaded, device="cpu", block_size=SIZE, device_blocks=2000, host_bytes=0, max_sequences=64)
    with llm:
        return [one.token_ids for one in llm.generate(prompts, replace(PARAMS, max_tokens=2 * ANSWER))]


def settings(swap: Swap) -> dict[str, object]:
    host_bytes = 0 if swap is Swap.RECOMPUTE else 16 << 20
    return {"device_blocks": ROOM, "max_sequences": 24, "swap": swap, "host_bytes": host_bytes}


@pytest.mark.parametrize("swap", Swap)
def test_two_turns_of_many_sessions_are_as_with_room_for_all(
    swap: Swap, make_llm: MakeLLM, prompts: list[list[int]], undisturbed: list[Tokens]
) -> None:
    llm = make_llm(**settings(swap))
    names = [f"session {number}" for number in range(SESSIONS)]
    first = llm.generate(prompts, PARAMS, sessions=names)
    assert [one.token_ids for one in first] == [tokens[:ANSWER] for tokens in undisturbed]
    talks = [prompt + list(one.token_ids) for prompt, one in zip(prompts, first, strict=True)]
    second = llm.generate(talks, PARAMS, sessions=names)
    assert [one.token_ids for one in second] == [tokens[ANSWER:] for tokens in undisturbed]
    computed = sum(one.computed for one in second)
    most = SESSIONS * (SIZE + 1)
    assert (computed > 4 * most) if swap is Swap.RECOMPUTE else (computed <= most)
    check(llm)
    # No thrash: who is put to sleep had its minimum of steps.
    assert max(one.preemptions for one in (*first, *second)) <= 1 + ANSWER // 4
    check_nothing_is_held(llm)


@pytest.mark.parametrize("swap", Swap)
def test_every_session_makes_progress(swap: Swap, make_llm: MakeLLM, prompts: list[list[int]]) -> None:
    """Nobody waits longer than it takes the others to end."""
    llm = make_llm(**settings(swap))
    sequences = [llm.submit(prompt, replace(PARAMS, max_tokens=100)) for prompt in prompts[:10]]
    known = {one.id: len(one.tokens) for one in sequences}
    waited = dict.fromkeys(known, 0)
    longest = 0
    while any(one.state is not SequenceState.FINISHED for one in sequences):
        llm.step()
        for one in sequences:
            count = len(llm.scheduler.tokens_of(one))
            waited[one.id] = 0 if count > known[one.id] else waited[one.id] + 1
            known[one.id] = count
            if one.state is not SequenceState.FINISHED:
                longest = max(longest, waited[one.id])
    assert all(one.finish_reason is FinishReason.LENGTH for one in sequences)
    assert longest < 10 * 100
    check_nothing_is_held(llm)


def test_turns_let_those_begin_who_would_wait_for_the_end_of_others(
    make_llm: MakeLLM, prompts: list[list[int]]
) -> None:
    def first_tokens(swap: Swap) -> tuple[int, LLM]:
        """After how many steps everybody had a token."""
        llm = make_llm(**{**settings(swap), "device_blocks": 40})
        sequences = [llm.submit(prompt, replace(PARAMS, max_tokens=240)) for prompt in prompts[:7]]
        steps = 0
        while any(one.first_token_at is None for one in sequences):
            llm.step()
            steps += 1
        finish(llm, sequences)
        return steps, llm

    turns, llm = first_tokens(Swap.ATTEND)
    others, _ = first_tokens(Swap.COPY)
    assert llm.scheduler.stats.turns > 0
    assert turns < others
    check_nothing_is_held(llm)


def test_higher_priorities_go_first_and_lower_ones_still_end(
    make_llm: MakeLLM, prompts: list[list[int]]
) -> None:
    llm = make_llm(**settings(Swap.ATTEND))
    low = [llm.submit(prompt, PARAMS) for prompt in prompts[:10]]
    for _ in range(3):
        llm.step()
    high = [llm.submit(prompt, PARAMS, priority=5) for prompt in prompts[10:16]]
    completions = finish(llm, [*low, *high])
    assert {one.finish_reason for one in completions} == {FinishReason.LENGTH}
    assert max(ended(one) for one in high) < max(ended(one) for one in low)
    assert sum(one.preemptions for one in high) <= sum(one.preemptions for one in low)


def ended(sequence: Sequence) -> float:
    assert sequence.finished_at is not None
    return sequence.finished_at


def test_a_sequence_larger_than_the_device_tier_runs_in_place_and_not_by_copies(
    make_llm: MakeLLM, case: Case, prompts: list[list[int]]
) -> None:
    prompt = [token for one in prompts[:3] for token in one]
    reference = make_llm(host_bytes=0).generate([prompt], PARAMS)[0]
    small = {"device_blocks": len(prompt) // SIZE // 4, "host_bytes": 16 << 20}
    here = make_llm(**small).generate([prompt], PARAMS)[0]
    assert here.token_ids == reference.token_ids
    copies = make_llm(**small, swap=Swap.COPY).generate([prompt], PARAMS)[0]
    assert copies.finish_reason is FinishReason.CAPACITY


@pytest.mark.parametrize("more", [{"host_bytes": 1 << 20}, {"swap": "elsewhere"}])
def test_settings_that_contradict_are_refused(
    more: dict[str, object], make_llm: MakeLLM, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="swap"):
        make_llm(**{"swap": "recompute", **more})
    assert make_llm(swap="recompute", host_bytes=None).host is None
