"""Many more sessions than the device tier holds: the same tokens as with room for all, and nobody starves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kvpager.engine.llm import LLM
from kvpager.engine.preemption import NEARLY_DONE
from kvpager.engine.sampler import SamplingParams
from kvpager.engine.sequence import FinishReason, Sequence, SequenceState
from kvpager.engine.waking import Swap
from kvpager.kvstore.policy import Retention
from kvpager.tests.engine_cases import (
    SIZE,
    Case,
    MakeLLM,
    Tokens,
    check,
    check_nothing_is_held,
    evict_host,
    finish,
    make_case,
    maker,
)
from kvpager.tiers.cold_disk import DiskColdTier
from kvpager.tiers.errors import ConfigError, RequestError

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


def test_a_session_is_put_to_sleep_and_woken_by_its_name(
    make_llm: MakeLLM, prompts: list[list[int]], undisturbed: list[Tokens]
) -> None:
    llm = make_llm()
    one = llm.submit(prompts[0], PARAMS, session="one")
    for _ in range(5):
        llm.step()
    llm.sessions.sleep("one")
    assert llm.sessions.info("one").state == "held"
    for _ in range(5):
        llm.step()
    assert llm.sessions.info("one").state == "held"
    llm.sessions.wake("one")
    assert finish(llm, [one])[0].token_ids == undisturbed[0][:ANSWER]
    info = llm.sessions.info("one")
    assert (info.state, info.tokens) == ("idle", length_of(prompts[0]))
    assert info.device_bytes == info.bytes
    with pytest.raises(RequestError, match="no session 'two'"):
        llm.sessions.wake("two")


def length_of(prompt: list[int]) -> int:
    """Tokens of a session whose KV is there after one answer: the last one was never computed."""
    return len(prompt) + ANSWER - 1


def test_a_session_whose_user_is_typing_is_in_the_device_tier_before_the_request_comes(
    make_llm: MakeLLM, prompts: list[list[int]], undisturbed: list[Tokens], tmp_path: Path
) -> None:
    llm = make_llm(cold=DiskColdTier(tmp_path, capacity_bytes=1 << 30))
    first = llm.generate([prompts[0]], PARAMS, sessions=["one"])[0]
    evict_host(llm)
    assert llm.sessions.info("one").device_bytes == llm.sessions.info("one").host_bytes == 0
    blocks = length_of(prompts[0]) // SIZE
    assert llm.sessions.prefetch("one").host > 0
    for _ in range(500):
        if llm.sessions.info("one").host_bytes == llm.sessions.info("one").bytes:
            break
        llm.step()
    assert llm.sessions.prefetch("one").device == blocks
    llm.store.poll()
    llm.store.poll()
    talk = prompts[0] + list(first.token_ids)
    second = llm.generate([talk], PARAMS, sessions=["one"])[0]
    assert second.token_ids == undisturbed[0][ANSWER:]
    assert second.cached.device >= blocks * SIZE
    check(llm)
    check_nothing_is_held(llm)


def test_a_prefetch_takes_no_room_from_anybody(make_llm: MakeLLM, prompts: list[list[int]]) -> None:
    llm = make_llm(**settings(Swap.ATTEND))
    names = [str(number) for number in range(12)]
    llm.generate(prompts[:12], PARAMS, sessions=names)
    cached = llm.store.pool.cached
    assert not llm.store.pool.free or llm.sessions.prefetch("0").device <= llm.store.pool.free
    llm.store.poll()
    assert llm.store.pool.cached >= cached
    check(llm)


def test_sessions_that_are_expected_back_are_kept_before_those_that_are_not(
    make_llm: MakeLLM, prompts: list[list[int]]
) -> None:
    llm = make_llm(device_blocks=200)
    llm.generate(prompts[:4], PARAMS, sessions=["a", "b", "c", "d"])
    assert llm.sessions.expect("a", 30.0) > 0
    assert llm.sessions.expect("b", None) > 0
    names = {one.name for one in llm.sessions.list()}
    assert names == {"a", "b", "c", "d"}
    assert len(llm.sessions) == 4
    with pytest.raises(ConfigError, match="seconds"):
        llm.sessions.expect("a", -1.0)


@pytest.mark.parametrize(
    "advice",
    [Retention(about_to_finish=True), Retention(priority=50), Retention(will_return=1.0)],
    ids=["about to finish", "of a priority", "back soon"],
)
@pytest.mark.parametrize("told", ["with the request", "while it runs"])
def test_who_is_worth_more_by_advice_is_not_put_to_sleep_while_another_may_be(
    make_llm: MakeLLM, prompts: list[list[int]], advice: Retention, told: str
) -> None:
    def preemptions(retention: Retention | None) -> list[int]:
        llm = make_llm(device_blocks=ROOM - 18)
        short = [prompt[: PROMPT - 9] for prompt in prompts[:4]]
        early = retention if told == "with the request" else None
        running = [llm.submit(one, PARAMS, session=str(at)) for at, one in enumerate(short[:3])]
        running.append(llm.submit(short[3], PARAMS, session="3", retention=early))
        while not (llm.scheduler.preemptions or any(one.finished_at for one in running)):
            if retention is not None and early is None and running[3].row is not None:
                assert llm.sessions.retain("3", retention) == 0
            llm.step()
        slept = [one.preemptions for one in running]
        finish(llm, running)
        return slept

    assert preemptions(None) == [0, 0, 0, 1], "of equals the youngest goes"
    assert preemptions(advice)[3] == 0


def test_who_goes_on_past_the_end_that_was_told_is_as_others_again(
    make_llm: MakeLLM, prompts: list[list[int]]
) -> None:
    llm = make_llm(device_blocks=200)
    told = llm.submit(prompts[0], replace(PARAMS, max_tokens=100), session="a")
    llm.step()
    assert told.state is SequenceState.DECODING
    llm.sessions.retain("a", Retention(about_to_finish=True))
    seen = []
    for _ in range(NEARLY_DONE + 1):
        seen.append(llm.scheduler.remaining(told))
        llm.step()
    assert seen[:2] == [NEARLY_DONE, NEARLY_DONE - 1]
    generated = len(llm.scheduler.tokens_of(told)) - told.num_prompt
    assert llm.scheduler.remaining(told) == 100 - generated > NEARLY_DONE
    finish(llm, [told])


def test_what_is_told_of_a_session_whose_request_runs_holds_for_its_blocks_when_that_ends(
    make_llm: MakeLLM, prompts: list[list[int]]
) -> None:
    llm = make_llm(device_blocks=200)
    assert llm.host is not None
    for name, seconds in (("a", 30.0), ("b", None)):
        before = llm.host.stats.hinted_wanted, llm.host.stats.hinted_unwanted
        running = llm.submit(prompts[0], PARAMS, session=name)
        llm.step()
        assert llm.sessions.expect(name, seconds) == 0
        assert (llm.host.stats.hinted_wanted, llm.host.stats.hinted_unwanted) == before
        finish(llm, [running])
        wanted, unwanted = llm.host.stats.hinted_wanted, llm.host.stats.hinted_unwanted
        assert (wanted > before[0], unwanted > before[1]) == (seconds is not None, seconds is None)


def test_waste_is_what_is_allocated_and_holds_nothing(make_llm: MakeLLM, prompts: list[list[int]]) -> None:
    llm = make_llm(device_blocks=200)
    assert llm.store.waste().share == 0.0
    one = llm.submit(prompts[0], PARAMS, session="one")
    for _ in range(4):
        llm.step()
    waste = llm.store.waste()
    length = len(llm.scheduler.tokens_of(one)) - 1
    assert waste.tokens == length
    assert waste.places == -(-length // SIZE) * SIZE
    finish(llm, [one])
    # Its partly filled block is kept too, and counts with the tokens that it holds.
    assert llm.store.waste().tokens == length_of(prompts[0])
    assert llm.store.waste().share < SIZE / length_of(prompts[0])
