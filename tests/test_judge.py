"""Answers that differ are judged by logits: a tie passes, and nothing else does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from kvpager.engine.judge import ROUNDING, compare, shortfalls, uncached_logits
from kvpager.engine.llm import LLM
from kvpager.engine.loader import LoadedModel, load_model
from kvpager.tests.engine_cases import GREEDY, HALF_SIZE, make_half_case, maker

PLACE = 5
"""Where answers are made to differ."""


@dataclass(frozen=True)
class Answered:
    """A model with prompts and its own answers; `twins` are tokens that it has the same logits for."""

    loaded: LoadedModel
    prompts: list[list[int]]
    answers: list[tuple[int, ...]]
    twins: tuple[int, int]


def answered(folder: Path, dtype: str, device: str) -> Answered:
    """A model whose first prompt's answer has a token at `PLACE` that another one is as good as."""
    case = make_half_case("llama", device, folder)
    loaded = load_model(folder, dtype=dtype, device=device)
    made: list[LLM] = []
    make = maker(type(case)(loaded, device, case.prompts, []), made)
    with make(block_size=HALF_SIZE, host_bytes=0) as llm:
        token = llm.generate(case.prompts[0], GREEDY)[0].token_ids[PLACE]
    weight = loaded.model.embedding.weight if loaded.model.head is None else loaded.model.head.weight
    twin = (token + 1) % len(weight)
    with torch.no_grad():
        weight[twin] = weight[token]
    with make(block_size=HALF_SIZE, host_bytes=0) as llm:
        answers = [one.token_ids for one in llm.generate(case.prompts, GREEDY)]
    assert answers[0][PLACE] in (token, twin)
    return Answered(loaded, case.prompts, answers, (token, twin))


@pytest.fixture(scope="module", params=["float16", "bfloat16"])
def half(request: pytest.FixtureRequest, device: str, tmp_path_factory: pytest.TempPathFactory) -> Answered:
    return answered(tmp_path_factory.mktemp("half"), request.param, device)


def other(token: int, twins: tuple[int, int]) -> int:
    return twins[1] if token == twins[0] else twins[0]


def with_token(answer: tuple[int, ...], at: int, token: int) -> tuple[int, ...]:
    return (*answer[:at], token, *answer[at + 1 :])


def test_the_same_answer_is_no_difference(half: Answered) -> None:
    for prompt, answer in zip(half.prompts, half.answers, strict=True):
        assert compare(half.loaded.model, prompt, answer, answer) is None


def test_every_token_of_its_own_answers_is_the_best_or_a_tie(half: Answered) -> None:
    limit = ROUNDING[half.loaded.model.kv_layout().dtype]
    for prompt, answer in zip(half.prompts, half.answers, strict=True):
        logits = uncached_logits(half.loaded.model, prompt, answer)
        assert logits.shape == (len(answer), half.loaded.config.vocab_size)
        assert float(shortfalls(logits, answer).max()) < limit


def test_answers_that_part_at_a_tie_pass(half: Answered) -> None:
    prompt, truth = half.prompts[0], half.answers[0]
    tied = with_token(truth, PLACE, other(truth[PLACE], half.twins))[: PLACE + 1]
    found = compare(half.loaded.model, prompt, tied, truth)
    assert found is not None
    assert (found.at, found.tie) == (PLACE, True)
    assert 0.0 <= found.shortfall < ROUNDING[half.loaded.model.kv_layout().dtype]
    # It goes both ways.
    swapped = compare(half.loaded.model, prompt, truth, tied)
    assert swapped is not None
    assert swapped.tie


def test_a_wrong_token_is_no_tie(half: Answered) -> None:
    logits = uncached_logits(half.loaded.model, half.prompts[0], half.answers[0])
    worst = int(logits[PLACE].argmin())
    wrong = with_token(half.answers[0], PLACE, worst)
    found = compare(half.loaded.model, half.prompts[0], wrong, half.answers[0])
    assert found is not None
    assert (found.at, found.tie) == (PLACE, False)
    # Nor is it where it is the truth that is wrong.
    found = compare(half.loaded.model, half.prompts[0], half.answers[0], wrong)
    assert found is not None
    assert not found.tie


def test_a_token_just_beyond_the_tolerance_is_no_tie(half: Answered) -> None:
    prompt, answer = half.prompts[1], half.answers[1]
    limit = ROUNDING[half.loaded.model.kv_layout().dtype]
    logits = uncached_logits(half.loaded.model, prompt, answer)[0]
    lacking = (logits.max() - logits) / logits.std()
    beyond = int(torch.where(lacking > limit, lacking, math.inf).argmin())
    found = compare(half.loaded.model, prompt, (beyond,), answer)
    assert found is not None
    assert not found.tie
    assert found.shortfall == pytest.approx(float(lacking[beyond]), rel=1e-2)


def test_what_follows_a_tie_must_be_right_too(half: Answered) -> None:
    prompt, truth = half.prompts[0], half.answers[0]
    start = with_token(truth, PLACE, other(truth[PLACE], half.twins))[: PLACE + 1]
    logits = uncached_logits(half.loaded.model, prompt, (*start, 0))[-1]
    right, wrong = int(logits.argmax()), int(logits.argmin())
    for token, tie in ((right, True), (wrong, False)):
        found = compare(half.loaded.model, prompt, (*start, token), truth)
        assert found is not None
        assert (found.at, found.tie) == (PLACE, tie)


def test_the_answer_to_another_prompt_is_no_tie(half: Answered) -> None:
    for at, truth in enumerate(half.answers):
        stolen = half.answers[at - 1]
        if stolen[0] != truth[0]:
            found = compare(half.loaded.model, half.prompts[at], stolen, truth)
            assert found is not None
            assert not found.tie
    assert len({answer[0] for answer in half.answers}) > 1


def test_an_answer_that_ends_early_is_no_tie(half: Answered) -> None:
    truth = half.answers[0]
    for one, another in ((truth[:3], truth), (truth, truth[:3]), ((), truth)):
        found = compare(half.loaded.model, half.prompts[0], one, another)
        assert found is not None
        assert (found.shortfall, found.tie) == (math.inf, False)


def test_a_model_that_overflows_makes_no_ties(tmp_path: Path, device: str) -> None:
    case = make_half_case("llama", device, tmp_path)
    model = case.loaded.model
    with torch.no_grad():
        model.norm.weight.fill_(math.inf)
    assert uncached_logits(model, case.prompts[0], (1, 2)).isnan().any()
    found = compare(model, case.prompts[0], (1, 2), (1, 3))
    assert found is not None
    assert not found.tie


def test_in_float32_nothing_is_a_tie(tmp_path: Path) -> None:
    case = answered(tmp_path, "float32", "cpu")
    truth = case.answers[0]
    tied = with_token(truth, PLACE, other(truth[PLACE], case.twins))[: PLACE + 1]
    found = compare(case.loaded.model, case.prompts[0], tied, truth)
    assert found is not None
    assert found.shortfall == 0.0
    assert not found.tie
