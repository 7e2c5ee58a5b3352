"""The engine on tiny random models, on the CPU and on a GPU: the same greedy tokens as transformers.

Wherever the KV comes from, and whatever else runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kvpager.engine.llm import LLM
from kvpager.engine.sampler import SamplingParams
from kvpager.engine.sequence import FinishReason, SequenceState
from kvpager.tests.engine_cases import (
    GREEDY,
    SIZE,
    TOKENS,
    Case,
    MakeLLM,
    answers,
    check,
    check_nothing_is_held,
    evict_device,
    evict_host,
    finish,
    make_case,
    maker,
    reads_cost_nothing,
    run_until,
)
from kvpager.tiers.cold_disk import DiskColdTier
from kvpager.tiers.errors import RequestError


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen3"])
def case(request: pytest.FixtureRequest, device: str, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(request.param, device, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def make_llm(case: Case, made: list[LLM]) -> MakeLLM:
    return maker(case, made)


# The same tokens as transformers


def test_prompts_alone_and_in_a_batch(case: Case, make_llm: MakeLLM) -> None:
    llm = make_llm()
    assert answers(llm, case.prompts) == case.truth
    check_nothing_is_held(llm)
    alone = make_llm(host_bytes=0)
    assert [answers(alone, [prompt])[0] for prompt in case.prompts] == case.truth


@pytest.mark.parametrize("step_tokens", [1, 7, 13])
def test_prompts_computed_in_odd_chunks(case: Case, make_llm: MakeLLM, step_tokens: int) -> None:
    llm = make_llm(step_tokens=step_tokens, max_sequences=1 if step_tokens == 1 else 3)
    assert answers(llm, case.prompts) == case.truth


def test_prefixes_from_every_tier(case: Case, make_llm: MakeLLM, tmp_path: Path) -> None:
    llm = make_llm(cold=DiskColdTier(tmp_path, capacity_bytes=1 << 30))
    assert answers(llm, case.prompts) == case.truth
    known = [(len(prompt) - 1) // SIZE * SIZE for prompt in case.prompts]
    for tier, evict in (("device", None), ("host", evict_device), ("cold", evict_host)):
        if evict is not None:
            evict(llm)
        found = llm.generate(case.prompts, GREEDY)
        assert [answer.token_ids for answer in found] == case.truth, tier
        assert [answer.cached.total for answer in found] == known, tier
        assert getattr(found[5].cached, tier) == known[5], tier
        check(llm)


def test_far_blocks_are_read_in_place(case: Case, make_llm: MakeLLM) -> None:
    llm = make_llm(device_blocks=8)
    assert answers(llm, case.prompts) == case.truth
    evict_device(llm)
    longest = llm.submit(case.prompts[5], GREEDY)
    llm.step()
    row = longest.row
    assert row is not None
    far = llm.store.far_blocks(row)
    if case.device == "cpu":
        assert far > 0
    assert finish(llm, [longest])[0].token_ids == case.truth[5]
    assert longest.cached.host == 72


def test_what_is_read_far_is_installed_by_the_step_that_reads_it(case: Case, make_llm: MakeLLM) -> None:
    llm = make_llm()
    assert llm.host is not None
    assert llm.host.arena.wait_ready(llm.host.arena.num_extents, timeout=30.0)
    assert answers(llm, case.prompts) == case.truth
    evict_device(llm)
    reads_cost_nothing(llm)
    sequences = [llm.submit(prompt, GREEDY) for prompt in case.prompts]
    llm.step()
    rows = [one.row for one in sequences]
    assert None not in rows
    assert [llm.store.far_blocks(row) for row in rows if row is not None] == [0] * len(rows)
    # Two prompts more begin with the four blocks that the seventh begins with.
    known = sum((len(prompt) - 1) // SIZE for prompt in case.prompts)
    assert llm.store.stats.promoted == known - 2 * 4
    check(llm)
    assert [one.token_ids for one in finish(llm, sequences)] == case.truth
    check_nothing_is_held(llm)


def test_a_fork_goes_on_as_its_parent_does(case: Case, make_llm: MakeLLM) -> None:
    llm = make_llm(max_sequences=40)
    sequences = [llm.submit(prompt, GREEDY) for prompt in case.prompts]
    for _ in range(9):
        llm.step()
    twins = [llm.fork(sequence) for sequence in sequences]
    llm.step()
    more = [llm.fork(twin) for twin in twins]
    assert llm.store.sharing().saved_blocks > 0
    check(llm)
    for family in (sequences, twins, more):
        assert [one.token_ids for one in finish(llm, family)] == case.truth
    assert llm.store.stats.copied_on_write > 0
    check_nothing_is_held(llm)


def test_a_fork_is_preempted_and_aborted_like_any_other(case: Case, make_llm: MakeLLM) -> None:
    llm = make_llm(device_blocks=24)
    sequences = [llm.submit(prompt, GREEDY) for prompt in case.prompts[:4]]
    for sequence in sequences:
        run_until(llm, sequence, SequenceState.DECODING)
    twins = [llm.fork(sequence) for sequence in sequences for _ in range(2)]
    llm.step()
    llm.abort(sequences[0])
    llm.abort(twins[3])
    check(llm)
    rest = [*sequences[1:], *twins[:3], *twins[4:]]
    expected = [*case.truth[1:4], *(case.truth[at // 2] for at in range(8) if at != 3)]
    assert [one.token_ids for one in finish(llm, rest)] == expected
    check_nothing_is_held(llm)


@pytest.mark.parametrize("evict", [None, evict_device, evict_host])
def test_a_session_wakes_with_its_partly_filled_block(
    case: Case, make_llm: MakeLLM, evict: Callable[[LLM], None] | None, tmp_path: Path
) -> None:
    llm = make_llm(cold=DiskColdTier(tmp_path, capacity_bytes=1 << 30))
    names = [f"chat-{number}" for number in range(len(case.prompts))]
    begin, rest = (replace(GREEDY, max_tokens=count) for count in (10, TOKENS - 10))
    first = llm.generate(case.prompts, begin, sessions=names)
    talks = [prompt + list(answer.token_ids) for prompt, answer in zip(case.prompts, first, strict=True)]
    if evict is not None:
        evict(llm)
    second = llm.generate(talks, rest, sessions=names)
    assert [a.token_ids + b.token_ids for a, b in zip(first, second, strict=True)] == case.truth
    # All but the last sampled token had its KV, in full blocks and in the partly filled one.
    assert [answer.cached.total for answer in second] == [len(talk) - 1 for talk in talks]
    check_nothing_is_held(llm)


def test_preempted_sequences_sleep_and_lose_nothing(case: Case, make_llm: MakeLLM) -> None:
    llm = make_llm(device_blocks=20)
    assert llm.host is not None
    # Host memory grows in the background; what leaves the device tier before is dropped where it must be.
    assert llm.host.arena.wait_ready(llm.host.arena.num_extents, timeout=30.0)
    found = llm.generate(case.prompts, GREEDY)
    assert [answer.token_ids for answer in found] == case.truth
    assert llm.scheduler.preemptions > 0
    assert sum(answer.computed for answer in found) <= sum(map(len, case.prompts)) + len(found) * TOKENS
    assert llm.store.stats.dropped == 0
    check_nothing_is_held(llm)


def test_preempted_sequences_are_computed_again_where_nothing_is_below(case: Case, make_llm: MakeLLM) -> None:
    llm = make_llm(device_blocks=20, host_bytes=0)
    assert answers(llm, case.prompts) == case.truth
    assert llm.scheduler.preemptions > 0
    check_nothing_is_held(llm)


@pytest.mark.parametrize("device_blocks", [3, 5])
def test_a_sequence_larger_than_the_device_tier(case: Case, make_llm: MakeLLM, device_blocks: int) -> None:
    llm = make_llm(device_blocks=device_blocks)
    assert answers(llm, case.prompts) == case.truth
    if case.device == "cpu":
        assert llm.store.stats.spilled > 0
    check_nothing_is_held(llm)


def test_a_restarted_engine_goes_on_from_the_cold_tier(case: Case, make_llm: MakeLLM, tmp_path: Path) -> None:
    names = [f"chat-{number}" for number in range(len(case.prompts))]
    begin, rest = (replace(GREEDY, max_tokens=count) for count in (11, TOKENS - 11))
    llm = make_llm(cold=DiskColdTier(tmp_path, capacity_bytes=1 << 30))
    first = llm.generate(case.prompts, begin, sessions=names)
    llm.close(drain=30.0)

    llm = make_llm(cold=DiskColdTier(tmp_path, capacity_bytes=1 << 30))
    talks = [prompt + list(answer.token_ids) for prompt, answer in zip(case.prompts, first, strict=True)]
    saved = llm.session_tokens("chat-3")
    assert saved is not None
    assert saved.tolist() == talks[3]
    second = llm.generate(talks, rest, sessions=names)
    assert [a.token_ids + b.token_ids for a, b in zip(first, second, strict=True)] == case.truth
    assert [answer.cached.total for answer in second] == [len(talk) - 1 for talk in talks]
    assert all(answer.cached.cold > 0 for answer in second)
    check_nothing_is_held(llm)


def test_rows_of_chunks_in_any_order(llama: Case, make_llama: MakeLLM) -> None:
    llm = make_llama(step_tokens=70)
    long, gone = 5, 4
    first = llm.submit(llama.prompts[long], GREEDY)
    aborted = llm.submit(llama.prompts[gone], GREEDY)
    second = llm.submit(llama.prompts[2], GREEDY)
    llm.step()
    assert [one.row for one in (first, aborted, second)] == [0, 1, 2]
    llm.abort(aborted)
    third, fourth = (llm.submit(llama.prompts[at], GREEDY) for at in (0, 1))
    llm.step()
    # The chunks of this step were of rows 0, 2, 1, 3, in the order of arrival.
    assert [one.row for one in (first, second, third, fourth)] == [0, 2, 1, 3]
    tokens = [one.token_ids for one in finish(llm, [first, second, third, fourth])]
    assert tokens == [llama.truth[at] for at in (long, 2, 0, 1)]


def test_many_requests_with_few_rows(llama: Case, make_llama: MakeLLM) -> None:
    llm = make_llama(max_sequences=4, device_blocks=40, host_bytes=1 << 20, step_tokens=32)
    order = np.random.default_rng(3).integers(0, len(llama.prompts), 72).tolist()
    found = answers(llm, [llama.prompts[at] for at in order])
    assert found == [llama.truth[at] for at in order]
    check_nothing_is_held(llm)


def test_a_session_that_is_ended_is_forgotten_and_its_blocks_stay_cached(
    llama: Case, make_llama: MakeLLM
) -> None:
    llm = make_llama()
    prompt = llama.prompts[-1]
    llm.generate([prompt], GREEDY, sessions=["one"])
    assert llm.end_session("one")
    assert not llm.end_session("one")
    assert llm.session_tokens("one") is None
    assert llm.generate([prompt], GREEDY)[0].cached.total == (len(prompt) - 1) // SIZE * SIZE


def test_what_runs_when_an_engine_is_closed_goes_on_elsewhere(
    llama: Case, make_llama: MakeLLM, tmp_path: Path
) -> None:
    llm = make_llama(cold=DiskColdTier(tmp_path, capacity_bytes=1 << 30))
    sequence = llm.submit(llama.prompts[5], GREEDY, session="chat")
    run_until(llm, sequence, SequenceState.DECODING)
    for _ in range(6):
        llm.step()
    llm.close(drain=30.0)
    done = llm.completion(sequence).token_ids
    assert done == llama.truth[5][:7]

    llm = make_llama(cold=DiskColdTier(tmp_path, capacity_bytes=1 << 30))
    rest = replace(GREEDY, max_tokens=TOKENS - len(done))
    (answer,) = llm.generate(llama.prompts[5] + list(done), rest, sessions=["chat"])
    assert done + answer.token_ids == llama.truth[5]
    assert answer.cached.cold == len(llama.prompts[5]) + len(done) - 1


# What is shared, and what never is


def test_a_prefix_submitted_many_times_at_once_is_computed_once(llama: Case, make_llama: MakeLLM) -> None:
    llm = make_llama()
    shared = llama.prompts[8][: 4 * SIZE]
    prompts = [[*shared, number, number] for number in range(2, 12)]
    sequences = [llm.submit(prompt, GREEDY) for prompt in prompts]
    finish(llm, sequences)
    # All but the last of its tokens run once each.
    generated = len(prompts) * TOKENS - len(prompts)
    prefill = sum(one.computed for one in sequences)
    assert prefill == len(shared) + 2 * len(prompts), f"{generated} decoded"


def test_salts_and_tenants_never_share(llama: Case, make_llama: MakeLLM, tmp_path: Path) -> None:
    llm = make_llama(cold=DiskColdTier(tmp_path, capacity_bytes=1 << 30))
    prompt = llama.prompts[5]

    def cached(llm: LLM, salt: bytes) -> int:
        sequence = llm.submit(prompt, GREEDY, salt=salt)
        assert finish(llm, [sequence])[0].token_ids == llama.truth[5]
        return sequence.cached.total

    assert cached(llm, b"") == 0
    assert cached(llm, b"a") == 0
    assert cached(llm, b"b") == 0
    assert cached(llm, b"a") == cached(llm, b"") == 72
    llm.close(drain=30.0)
    for tenant, expected in ((b"other", 0), (b"", 72), (b"other", 72)):
        llm = make_llama(cold=DiskColdTier(tmp_path, capacity_bytes=1 << 30), tenant=tenant)
        assert cached(llm, b"") == expected, tenant
        llm.close(drain=30.0)


def test_reset_cache_makes_everything_unknown(llama: Case, make_llama: MakeLLM) -> None:
    llm = make_llama()
    llm.generate(llama.prompts, GREEDY, sessions=[str(at) for at in range(len(llama.prompts))])
    llm.reset_cache()
    again = llm.generate(llama.prompts, GREEDY)
    assert [answer.token_ids for answer in again] == llama.truth
    # What they share among each other is as before; nothing more.
    shared = 4 * SIZE
    assert [answer.cached.total for answer in again] == [0] * 7 + [shared] * 2
    assert llm.session_tokens("0") is None


def test_the_cache_is_not_reset_under_running_requests(llama: Case, make_llama: MakeLLM) -> None:
    llm = make_llama()
    sequence = llm.submit(llama.prompts[5], GREEDY)
    with pytest.raises(RequestError, match="1 sequences are not finished"):
        llm.reset_cache()
    assert finish(llm, [sequence])[0].token_ids == llama.truth[5]
    llm.reset_cache()


# How an answer is sampled, and when it ends


def test_a_seed_draws_the_same_tokens_wherever_it_runs(llama: Case, make_llama: MakeLLM) -> None:
    params = [
        SamplingParams(max_tokens=16, temperature=1.3, top_k=50, top_p=0.95, seed=at, ignore_eos=True)
        for at in range(len(llama.prompts))
    ]
    alone = make_llama()
    expected = [answers(alone, [prompt], one)[0] for prompt, one in zip(llama.prompts, params, strict=True)]
    batch = make_llama().generate(llama.prompts, params)
    assert [answer.token_ids for answer in batch] == expected
    tight = make_llama(device_blocks=18, step_tokens=16)
    assert [answer.token_ids for answer in tight.generate(llama.prompts, params)] == expected
    assert tight.scheduler.preemptions > 0
    # Without a seed every time is another one.
    free = replace(params[0], seed=None)
    assert len({answers(alone, [llama.prompts[0]], free)[0] for _ in range(4)}) > 1


def test_forks_draw_other_tokens_unless_a_seed_was_asked_for(llama: Case, make_llama: MakeLLM) -> None:
    llm = make_llama()
    for seed, same in ((11, True), (None, False)):
        params = SamplingParams(max_tokens=20, temperature=2.0, seed=seed, ignore_eos=True)
        sequence = llm.submit(llama.prompts[4], params)
        run_until(llm, sequence, SequenceState.DECODING)
        twin = llm.fork(sequence)
        first, second = finish(llm, [sequence, twin])
        assert first.token_ids[0] == second.token_ids[0]
        assert (first.token_ids == second.token_ids) is same


def test_answers_end_where_they_should(llama: Case, make_llama: MakeLLM) -> None:
    llm = make_llama(max_tokens=100)
    prompt, truth = llama.prompts[4], llama.truth[4]
    (ended,) = llm.generate(prompt, replace(GREEDY, stop_token_ids=(truth[5],)))
    at = truth.index(truth[5])
    assert ended.token_ids == truth[: at + 1]
    assert ended.finish_reason is FinishReason.STOP
    (later,) = llm.generate(prompt, replace(GREEDY, stop_token_ids=(truth[0],), min_tokens=4))
    assert len(later.token_ids) >= 4
    assert truth[0] not in later.token_ids[:4]
    (one,) = llm.generate(prompt, replace(GREEDY, max_tokens=1))
    assert (one.token_ids, one.finish_reason) == (truth[:1], FinishReason.LENGTH)
    (limited,) = llm.generate(llama.prompts[5], replace(GREEDY, max_tokens=10**6))
    assert len(limited.token_ids) == 100 - len(llama.prompts[5])
    assert limited.token_ids[:TOKENS] == llama.truth[5]
    assert limited.finish_reason is FinishReason.LENGTH


def test_the_end_token_of_the_model_ends_an_answer_unless_it_is_ignored(llama: Case, made: list[LLM]) -> None:
    truth = llama.truth[4]
    ending = replace(llama.loaded, eos_ids=frozenset({truth[6]}))
    llm = maker(replace(llama, loaded=ending), made)()
    at = truth.index(truth[6])
    plain = replace(GREEDY, ignore_eos=False)
    (ended,) = llm.generate(llama.prompts[4], plain)
    assert (ended.token_ids, ended.finish_reason) == (truth[: at + 1], FinishReason.STOP)
    assert answers(llm, [llama.prompts[4]]) == [truth]


@pytest.mark.parametrize(
    "state",
    [SequenceState.WAITING, SequenceState.PREFILLING, SequenceState.DECODING, SequenceState.ASLEEP],
)
@pytest.mark.parametrize("session", [None, "chat"])
def test_an_aborted_sequence_frees_everything(
    llama: Case, make_llama: MakeLLM, state: SequenceState, session: str | None
) -> None:
    settings: dict[SequenceState, dict[str, int]] = {
        SequenceState.WAITING: {"max_sequences": 2},
        SequenceState.PREFILLING: {"step_tokens": 12},
        SequenceState.DECODING: {},
        SequenceState.ASLEEP: {"device_blocks": 17},
    }
    llm = make_llama(**settings[state])
    others = [llm.submit(prompt, GREEDY) for prompt in (llama.prompts[4], llama.prompts[3])]
    sequence = llm.submit(llama.prompts[5], GREEDY, session=session)
    run_until(llm, sequence, state)
    llm.abort(sequence)
    llm.abort(sequence)
    check(llm)
    completion = llm.completion(sequence)
    assert completion.finish_reason is FinishReason.ABORTED
    assert completion.token_ids == llama.truth[5][: len(completion.token_ids)]
    assert [one.token_ids for one in finish(llm, others)] == [llama.truth[4], llama.truth[3]]
    check_nothing_is_held(llm)
    if session is not None:
        assert (llm.session_tokens(session) is None) == (state is SequenceState.WAITING)


# Text


def test_a_streamed_answer_is_the_whole_text(speaking: Case, made: list[LLM]) -> None:
    llm = maker(speaking, made)()
    (whole,) = llm.generate(speaking.prompts[4], GREEDY)
    assert whole.token_ids == speaking.truth[4]
    pieces = list(llm.stream(speaking.prompts[4], GREEDY))
    assert "".join(pieces) == whole.text
    assert len(pieces) > 3
    assert all(pieces)
    check_nothing_is_held(llm)


def test_streams_side_by_side_lose_nothing(speaking: Case, made: list[LLM]) -> None:
    llm = maker(speaking, made)()
    whole = [answer.text for answer in llm.generate(speaking.prompts[3:6], GREEDY)]
    streams = [llm.stream(prompt, GREEDY) for prompt in speaking.prompts[3:6]]
    texts = [next(stream) for stream in streams]
    # The last is read first: the others end meanwhile.
    for at in (2, 0, 1):
        texts[at] += "".join(streams[at])
    assert texts == whole
    check_nothing_is_held(llm)


def test_a_stream_that_is_given_up_frees_everything(speaking: Case, made: list[LLM]) -> None:
    llm = maker(speaking, made)()
    stream = llm.stream(speaking.prompts[5], GREEDY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    check_nothing_is_held(llm)


def test_stop_strings_end_an_answer_also_across_tokens(speaking: Case, made: list[LLM]) -> None:
    llm = maker(speaking, made)()
    (whole,) = llm.generate(speaking.prompts[4], GREEDY)
    for start in range(2, len(whole.text) - 3):
        stop = whole.text[start : start + 3]
        if "\ufffd" in stop:
            continue
        params = replace(GREEDY, stop=(stop, "never said"))
        (cut,) = llm.generate(speaking.prompts[4], params)
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert cut.finish_reason is FinishReason.STOP
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
        assert "".join(llm.stream(speaking.prompts[4], params)) == cut.text
    check_nothing_is_held(llm)


def test_a_fork_stops_at_its_own_strings(speaking: Case, made: list[LLM]) -> None:
    llm = maker(speaking, made)()
    (whole,) = llm.generate(speaking.prompts[4], GREEDY)
    sequence = llm.submit(speaking.prompts[4], GREEDY)
    run_until(llm, sequence, SequenceState.DECODING)
    stop = next(whole.text[at : at + 2] for at in range(4, 20) if "\ufffd" not in whole.text[at : at + 2])
    twin = llm.fork(sequence, replace(GREEDY, stop=stop))
    first, second = finish(llm, [sequence, twin])
    assert first.text == whole.text
    assert second.text == whole.text[: whole.text.index(stop)]
