"""Steps that only decode, padded to a few sizes: the same tokens, under CUDA graphs where there is a GPU."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from kvpager.engine import sizing
from kvpager.engine.llm import LLM
from kvpager.engine.padded import PaddedDecode, padded_size
from kvpager.engine.sampler import SamplingParams
from kvpager.engine.sequence import Sequence, SequenceState
from kvpager.engine.upload import upload
from kvpager.tests.engine_cases import (
    GREEDY,
    HALF_SIZE,
    TOKENS,
    Case,
    Judge,
    MakeLLM,
    answers,
    check,
    check_nothing_is_held,
    evict_device,
    finish,
    make_half_case,
    maker,
    reads_cost_nothing,
    run_padded,
    run_until,
)
from kvpager.tiers.errors import KernelError


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen3"])
def judged(
    request: pytest.FixtureRequest, device: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Case, Judge]:
    """A model in float16 of a shape that the kernels take, and who says whether its answers are right."""
    folder = tmp_path_factory.mktemp(request.param)
    return make_half_case(request.param, device, folder), Judge(folder)


@pytest.fixture
def half(judged: tuple[Case, Judge]) -> Case:
    return judged[0]


@pytest.fixture
def judge(judged: tuple[Case, Judge]) -> Judge:
    return judged[1]


@pytest.fixture
def make_half(half: Case, made: list[LLM]) -> MakeLLM:
    """Makes engines on it whose decode steps are padded, and graphs on a GPU."""

    def make(**settings: object) -> LLM:
        settings = {"block_size": HALF_SIZE, "cuda_graphs": True} | settings
        llm = run_padded(maker(half, made)(**settings))
        if llm.host is not None:
            # What is not page-locked yet is not read in place.
            assert llm.host.arena.wait_ready(llm.host.arena.num_extents, timeout=60.0)
        return llm

    return make


def check_answers(judge: Judge, case: Case, found: list[tuple[int, ...]]) -> None:
    for prompt, answer in zip(case.prompts, found, strict=True):
        judge.check(prompt, answer)


# Sizes and inputs


def test_batches_are_padded_to_few_sizes_and_never_beyond_the_most() -> None:
    for most in (1, 2, 3, 5, 8, 12, 20, 64, 256):
        sizes = [padded_size(count, most) for count in range(1, most + 1)]
        assert all(count <= size <= most for count, size in enumerate(sizes, 1))
        assert sizes == sorted(sizes)
        assert set(sizes) <= {1, 2, 4, most, *range(8, most + 1, 8)}
        assert all(size - count < 8 for count, size in enumerate(sizes, 1))
        beside = [padded_size(count, most, prompts=True) for count in range(1, most + 1)]
        assert all(count <= size <= most for count, size in enumerate(beside, 1))
        assert set(beside) <= {most, *range(32, most + 1, 32)}


def test_inputs_say_what_each_sequence_runs_and_that_the_rest_is_padding(llama: Case) -> None:
    padded = PaddedDecode(llama.loaded.model, llama.loaded.model.kv_layout(16), 8, capture=False)
    packed = padded.pack(
        np.array([7, 8, 9], dtype=np.int32),
        np.array([0, 31, 5], dtype=np.int64),
        np.array([1 << 40, 2 << 40, 3 << 40], dtype=np.int64),
        np.array([4, 0, 2], dtype=np.int64),
    )
    tokens, positions, addresses, offsets, rows, lengths = packed
    assert packed.shape == (6, 4)
    assert tokens.tolist() == [7, 8, 9, 0]
    assert positions.tolist() == [0, 31, 5, 0]
    assert addresses[:3].tolist() == [1 << 40, 2 << 40, 3 << 40]
    assert offsets.tolist() == [0, 15, 5, 0]
    assert rows.tolist() == [4, 0, 2, 0]
    assert lengths.view(np.int32)[:4].tolist() == [1, 32, 6, 0]
    if llama.device != "cpu":
        assert addresses[3] == 0


def test_arrays_arrive_as_they_were(device: str) -> None:
    arrays: list[npt.NDArray[Any]] = [
        np.arange(5, dtype=np.int32),
        np.array([[1, 2], [3, -(1 << 62)]], dtype=np.int64),
        np.empty(0, dtype=np.int64),
        np.array([0.25, -1e300]),
        np.arange(12, dtype=np.int64).reshape(3, 4)[:, 1],
        np.empty((0, 3), dtype=np.int32),
    ]
    for _ in range(3):
        tensors = upload(arrays, torch.device(device))
        for array, tensor in zip(arrays, tensors, strict=True):
            assert str(tensor.device) == device
            found = tensor.cpu().numpy()
            assert found.dtype == array.dtype
            assert np.array_equal(found, array)
            assert found.shape == array.shape


# The same tokens


@pytest.mark.parametrize("settings", [{}, {"step_tokens": 13, "max_sequences": 3}, {"device_blocks": 20}])
def test_padded_steps_give_the_tokens_of_transformers(
    llama: Case, made: list[LLM], settings: dict[str, int]
) -> None:
    llm = run_padded(maker(llama, made)(**settings))
    assert answers(llm, llama.prompts) == llama.truth
    assert llm._runner.captured == [], "float32 has no kernel that a graph could hold"
    check_nothing_is_held(llm)


def test_batches_that_shrink_go_through_all_sizes(half: Case, judge: Judge, make_half: MakeLLM) -> None:
    llm = make_half()
    params = [replace(GREEDY, max_tokens=TOKENS - at) for at in range(len(half.prompts))]
    for _ in range(2):
        found = llm.generate(half.prompts, params)
        check_answers(judge, half, [answer.token_ids for answer in found])
    assert llm.captured == ([] if half.device == "cpu" else [1, 2, 4, 8, 12])
    assert ("decode" in llm.kernels) == (half.device != "cpu")
    check_nothing_is_held(llm)


def test_without_graphs_the_answers_are_as_good(half: Case, judge: Judge, made: list[LLM]) -> None:
    llm = maker(half, made)(block_size=HALF_SIZE, cuda_graphs=False)
    check_answers(judge, half, answers(llm, half.prompts))
    assert llm._runner.captured == []


def test_preempted_sequences_wake_into_padded_steps(half: Case, judge: Judge, make_half: MakeLLM) -> None:
    llm = make_half(device_blocks=14)
    for _ in range(2):
        check_answers(judge, half, answers(llm, half.prompts))
    assert llm.scheduler.preemptions > 0
    check_nothing_is_held(llm)


def test_far_blocks_are_read_in_place_by_padded_steps(half: Case, judge: Judge, make_half: MakeLLM) -> None:
    llm = make_half(device_blocks=7)
    longest = half.prompts[5]
    answers(llm, [longest])
    evict_device(llm)
    sequence = llm.submit(longest, GREEDY)
    run_until(llm, sequence, SequenceState.DECODING)
    far = []
    while sequence.row is not None:
        far.append(llm.store.far_blocks(sequence.row))
        llm.step()
    assert min(far) > 0
    judge.check(longest, llm.completion(sequence).token_ids)
    assert llm._runner.captured == ([] if half.device == "cpu" else [1])
    check_nothing_is_held(llm)


def test_a_sequence_larger_than_the_device_tier_decodes_padded(
    half: Case, judge: Judge, make_half: MakeLLM
) -> None:
    llm = make_half(device_blocks=4)
    check_answers(judge, half, answers(llm, half.prompts))
    assert llm.store.stats.spilled > 0
    check_nothing_is_held(llm)


def test_forks_and_aborts_leave_rows_in_any_order(half: Case, judge: Judge, make_half: MakeLLM) -> None:
    llm = make_half(max_sequences=20)
    sequences = [llm.submit(prompt, GREEDY) for prompt in half.prompts]
    for _ in range(6):
        llm.step()
    twins = [llm.fork(sequence) for sequence in sequences]
    for gone in (0, 3, 4):
        llm.abort(sequences[gone])
        llm.step()
    check(llm)
    check_answers(judge, half, [one.token_ids for one in finish(llm, twins)])
    kept = [at for at in range(len(sequences)) if at not in (0, 3, 4)]
    for at, one in zip(kept, finish(llm, [sequences[at] for at in kept]), strict=True):
        judge.check(half.prompts[at], one.token_ids)
    check_nothing_is_held(llm)


def test_short_chunks_of_prompts_run_in_padded_steps_and_long_ones_do_not(
    llama: Case, made: list[LLM]
) -> None:
    if llama.device != "cpu":
        pytest.skip("float32 has no kernel that a graph could hold")
    llm = run_padded(maker(llama, made)())
    padded = llm._runner._padded
    assert padded is not None
    others = [llm.submit(prompt, GREEDY) for prompt in llama.prompts[:2]]
    for sequence in others:
        run_until(llm, sequence, SequenceState.DECODING)
    padded._sizes.clear()
    longest = padded.prompt_tokens
    size = padded_size(2 + longest, 12 + longest, prompts=True)
    for count, beside in ((longest + 1, set()), (longest, {(size, False, True)})):
        prompt = [2 + (count + number) % 190 for number in range(count)]
        sequence = llm.submit(prompt, replace(GREEDY, max_tokens=1))
        run_until(llm, sequence, SequenceState.FINISHED)
        assert {key for key in padded._sizes if key[2]} == beside
    for at, sequence in enumerate(others):
        answer = llm.scheduler.tokens_of(sequence)[sequence.num_prompt :].tolist()
        assert answer == list(llama.truth[at][: len(answer)])
        llm.abort(sequence)
    check_nothing_is_held(llm)


def test_a_session_wakes_into_padded_steps(half: Case, judge: Judge, make_half: MakeLLM) -> None:
    llm = make_half()
    names = [str(at) for at in range(len(half.prompts))]
    begin, rest = (replace(GREEDY, max_tokens=count) for count in (10, TOKENS - 10))
    first = llm.generate(half.prompts, begin, sessions=names)
    talks = [prompt + list(answer.token_ids) for prompt, answer in zip(half.prompts, first, strict=True)]
    evict_device(llm)
    second = llm.generate(talks, rest, sessions=names)
    check_answers(judge, half, [a.token_ids + b.token_ids for a, b in zip(first, second, strict=True)])
    assert all(answer.cached.host > 0 for answer in second)


def test_who_wakes_far_is_installed_by_the_step_that_reads_it(
    half: Case, judge: Judge, make_half: MakeLLM
) -> None:
    llm = make_half()
    pair = [llm.submit(half.prompts[at], GREEDY) for at in (4, 5)]
    for sequence in pair:
        run_until(llm, sequence, SequenceState.DECODING)
    llm.step()  # by then it is known how long a step takes that nothing disturbs
    promoted = 0
    for _ in range(3):
        assert llm.scheduler._make_room()
        assert pair[1].state is SequenceState.ASLEEP
        evict_device(llm)
        assert pair[1].sleeping is not None
        promoted += len(pair[1].sleeping.hashes)
        reads_cost_nothing(llm)
        llm.step()
        assert pair[1].row is not None
        assert llm.store.far_blocks(pair[1].row) == 0
        assert llm.store.stats.promoted == promoted > 0
        check(llm)
        llm.step()
    padded = llm._runner._padded
    assert padded is not None
    assert (padded._sizes[2, True, False].graph is None) == (half.device == "cpu")
    for at, answer in zip((4, 5), finish(llm, pair), strict=True):
        judge.check(half.prompts[at], answer.token_ids)
    check_nothing_is_held(llm)


def test_a_closed_engine_gives_its_graphs_back(half: Case, make_half: MakeLLM) -> None:
    llm = make_half()
    answers(llm, half.prompts[:2])
    llm.close()
    assert llm._runner.captured == []


# What only a GPU shows


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the GPU raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it does not notice all of it
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def decoding(llm: LLM, case: Case, params: SamplingParams) -> list[Sequence]:
    """Sequences that decode, two steps after the last prompt was through."""
    sequences = [llm.submit(prompt, params) for prompt in case.prompts]
    for sequence in sequences:
        run_until(llm, sequence, SequenceState.DECODING)
    for _ in range(2):
        llm.step()
    return sequences


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_decode_step_waits_for_nothing_before_its_tokens_are_read(
    half: Case, make_half: MakeLLM, cuda_graphs: bool, temperature: float
) -> None:
    if half.device == "cpu":
        pytest.skip("there is no GPU to wait for")
    llm = make_half(cuda_graphs=cuda_graphs)
    sequences = decoding(
        llm, half, SamplingParams(temperature=temperature, top_k=50, max_tokens=40, ignore_eos=True)
    )
    # Long enough that rows get blocks meanwhile, and their words change.
    for _ in range(18):
        llm.store.poll()
        step = llm.scheduler.schedule()
        assert step is not None
        assert not step.chunks
        with no_waiting():
            sampled = llm._runner.start(step, llm.scheduler)
        llm.scheduler.postprocess(step, sampled.cpu().numpy())
    for sequence in sequences:
        llm.abort(sequence)
    check_nothing_is_held(llm)


def test_a_graph_gives_the_logits_of_the_same_step_without(half: Case, make_half: MakeLLM) -> None:
    if half.device == "cpu":
        pytest.skip("nothing is captured without a GPU")
    llm = make_half(max_sequences=len(half.prompts))
    decoding(llm, half, GREEDY)
    assert llm._runner.captured == [len(half.prompts)]
    padded = llm._runner._padded
    mirror = llm._runner._mirror
    assert padded is not None
    assert mirror is not None
    for (_, installs, prompts), known in padded._sizes.items():
        if known.graph is None or installs:
            continue
        with torch.inference_mode():
            replayed = padded.run(known.inputs.clone(), mirror, prompts=prompts).clone()
            plain = padded._forward(known, mirror, None).clone()
        # Not one rounding differs: the same kernels ran on the same inputs.
        assert torch.equal(replayed, plain)


# What copies blocks


def test_where_the_copy_kernel_cannot_be_compiled_dma_copies_and_that_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(device: str) -> None:
        raise KernelError(f"no NVRTC for {device}")

    monkeypatch.setattr(sizing, "AddressCopier", missing)
    sizing._copier.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert [sizing._copier("cuda:0") for _ in range(3)] == [None] * 3
    finally:
        sizing._copier.cache_clear()
    assert len(caplog.records) == 1
    assert "no NVRTC for cuda:0" in caplog.text


@pytest.mark.gpu
def test_an_engine_on_a_gpu_copies_small_blocks_by_the_kernel(tmp_path: Path) -> None:
    assert sizing._copier("cuda:0") is not None
    with LLM(make_half_case("llama", "cuda:0", tmp_path).loaded, device_blocks=16, host_bytes=8 << 20) as llm:
        assert llm.store._device._mover._copy_kernel is sizing._copier("cuda:0")  # type: ignore[attr-defined]
