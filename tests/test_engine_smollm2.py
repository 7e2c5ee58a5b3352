"""The engine against transformers' own `generate`, on SmolLM2-135M in float32: the same greedy tokens.

Twenty prompts of 64 tokens, wherever their KV comes from: computed, each tier, sleep and wake, fork,
preemption, a restart, and a Redis that another process filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from kvpager.engine.llm import LLM
from kvpager.engine.loader import LoadedModel, load_model
from kvpager.engine.sampler import SamplingParams
from kvpager.engine.sequence import Sequence, SequenceState
from kvpager.tests.model_files import require_smollm2
from kvpager.tiers.cold_disk import DiskColdTier

# One process has the answers of transformers, which take long.
# What transformers answers with takes minutes by itself where others have the cores.
pytestmark = [pytest.mark.xdist_group("smollm2"), pytest.mark.timeout(1200)]

TOKENS = 64
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
STORY = (
    "A small harbour town lies at the mouth of a river. Every morning the fishing boats come back before the "
    "sun is high, and the market on the quay begins. The keeper of the lighthouse buys bread, lamp oil and "
    "the news of the day. She has kept a diary for thirty years, and in it she writes about the weather, the "
    "ships that pass, and the strangers who ask her for the way."
)
QUESTIONS = (
    "Who keeps the diary?",
    "What is sold on the quay?",
    "Describe the town in one sentence.",
    "When do the boats come back?",
    "Write a title for this text.",
    "What might the strangers want?",
    "How long has she kept the diary?",
    "What does the keeper buy?",
    "Continue the story.",
    "Which river is it?",
)
PLAIN = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a king who",
    "Water boils at a temperature of",
    "The three primary colours are red, blue and",
    "In the year 1969 the first people",
    "To make a good cup of tea, first",
    "Dear Sir or Madam, I am writing to",
    "The quick brown fox jumps over",
    "A list of prime numbers: 2, 3, 5, 7, 11,",
)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    require_smollm2()
    return load_model("smollm2", dtype="float32")


@pytest.fixture(scope="module")
def prompts(loaded: LoadedModel) -> list[list[int]]:
    chats = [
        loaded.encode_chat([{"role": "user", "content": f"{STORY}\n\n{question}"}]) for question in QUESTIONS
    ]
    return [*chats, *(loaded.tokenizer.encode(text) for text in PLAIN)]


@pytest.fixture(scope="module")
def truth(loaded: LoadedModel, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    path = require_smollm2()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    answers = []
    for prompt in prompts:
        # An end token that never comes, so that each answer has all of its tokens.
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(tuple(output[0, len(prompt) :].tolist()))
    return answers


@pytest.fixture
def make_llm(loaded: LoadedModel) -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def make(**settings: object) -> LLM:
        defaults: dict[str, object] = {"device": "cpu", "device_blocks": 400, "host_bytes": 512 << 20}
        llm = LLM(loaded, **{**defaults, "max_sequences": 20, **settings})  # type: ignore[arg-type]
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.close()


def check(llm: LLM) -> None:
    llm.store.check_integrity()
    if llm.host is not None:
        llm.host.check_integrity()


def tokens(llm: LLM, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in llm.generate(prompts, GREEDY)]


def finish(llm: LLM, sequences: list[Sequence]) -> list[tuple[int, ...]]:
    while any(sequence.state is not SequenceState.FINISHED for sequence in sequences):
        llm.step()
    return [llm.completion(sequence).token_ids for sequence in sequences]


def test_prompts_alone_and_in_a_batch_give_the_tokens_of_transformers(
    make_llm: Callable[..., LLM], prompts: list[list[int]], truth: list[tuple[int, ...]]
) -> None:
    llm = make_llm()
    assert tokens(llm, prompts) == truth
    alone = [tokens(make_llm(host_bytes=0), [prompt])[0] for prompt in prompts[8:11]]
    assert alone == truth[8:11]
    check(llm)


def test_prefixes_from_every_tier_give_the_same_tokens(
    make_llm: Callable[..., LLM], prompts: list[list[int]], truth: list[tuple[int, ...]], tmp_path: Path
) -> None:
    # All of it is wanted from the cold tier, however slow the machine is at the moment.
    llm = make_llm(cold=DiskColdTier(tmp_path, capacity_bytes=1 << 30), gate=False, load_seconds=60.0)
    answers = llm.generate(prompts, GREEDY)
    assert [answer.token_ids for answer in answers] == truth
    known = [prompt + list(answer) for prompt, answer in zip(prompts, truth, strict=True)]
    more = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    for tier in ("device", "host", "cold"):
        if tier != "device":
            llm.store.evict(llm.store.pool.capacity)
        if tier == "cold":
            assert llm.host is not None
            assert llm.store.host is not None
            assert llm.host.flush() == 0
            llm.store.host.evict(llm.store.host.capacity)
        answers = llm.generate(prompts, GREEDY)
        assert [answer.token_ids for answer in answers] == truth, tier
        assert sum(getattr(answer.cached, tier) for answer in answers) > 0, tier
        # What a chat shares with an earlier one is in the device tier by the time it is its turn.
        assert all(
            answer.cached.total == (len(prompt) - 1) // 16 * 16
            for answer, prompt in zip(answers, prompts, strict=True)
        ), tier
        check(llm)
    # What was generated is found again, too, as the prompt of a next turn.
    again = llm.generate([one[:-1] for one in known], more)
    assert [answer.token_ids[0] for answer in again] == [answer[-1] for answer in truth]
    assert all(
        answer.cached.total >= (len(one) - 1) // 16 * 16 - 16
        for answer, one in zip(again, known, strict=True)
    )


def test_a_session_sleeps_and_wakes_with_its_partly_filled_block(
    make_llm: Callable[..., LLM], prompts: list[list[int]], truth: list[tuple[int, ...]]
) -> None:
    llm = make_llm()
    names = [f"chat-{number}" for number in range(len(prompts))]
    half = SamplingParams(max_tokens=TOKENS // 2 + 3, temperature=0.0, ignore_eos=True)
    first = llm.generate(prompts, half, sessions=names)
    talks = [prompt + list(answer.token_ids) for prompt, answer in zip(prompts, first, strict=True)]
    rest = SamplingParams(max_tokens=TOKENS - TOKENS // 2 - 3, temperature=0.0, ignore_eos=True)
    second = llm.generate(talks, rest, sessions=names)
    whole = [a.token_ids + b.token_ids for a, b in zip(first, second, strict=True)]
    assert whole == truth
    # All but the last sampled token had its KV, in full blocks and in the partly filled one.
    assert [answer.cached.total for answer in second] == [len(talk) - 1 for talk in talks]
    check(llm)


def test_forks_share_their_blocks_and_give_the_same_tokens(
    make_llm: Callable[..., LLM], prompts: list[list[int]], truth: list[tuple[int, ...]]
) -> None:
    llm = make_llm(max_sequences=40)
    sequences = [llm.submit(prompt, GREEDY) for prompt in prompts]
    for _ in range(24):
        llm.step()
    twins = [llm.fork(sequence) for sequence in sequences]
    assert llm.store.sharing().saved_blocks >= sum(len(prompt) // 16 for prompt in prompts)
    assert finish(llm, sequences) == truth
    assert finish(llm, twins) == truth
    assert llm.store.stats.copied_on_write > 0
    check(llm)


def test_preempted_sequences_sleep_and_give_the_same_tokens(
    make_llm: Callable[..., LLM], prompts: list[list[int]], truth: list[tuple[int, ...]]
) -> None:
    llm = make_llm(device_blocks=48)
    answers = llm.generate(prompts, GREEDY)
    assert [answer.token_ids for answer in answers] == truth
    assert llm.scheduler.preemptions > 0
    # Nothing was dropped: what had been computed was not computed again.
    assert sum(answer.computed for answer in answers) <= sum(map(len, prompts)) + len(prompts) * TOKENS
    assert llm.store.stats.dropped == 0
    check(llm)


def test_a_sequence_larger_than_the_device_tier_reads_the_rest_in_place(
    make_llm: Callable[..., LLM], prompts: list[list[int]], truth: list[tuple[int, ...]]
) -> None:
    llm = make_llm(device_blocks=5)
    assert tokens(llm, prompts[:2]) == truth[:2]
    assert llm.store.stats.spilled > 0
    check(llm)


def test_a_restarted_engine_goes_on_from_the_cold_tier(
    make_llm: Callable[..., LLM], prompts: list[list[int]], truth: list[tuple[int, ...]], tmp_path: Path
) -> None:
    names = [f"chat-{number}" for number in range(len(prompts))]
    half = SamplingParams(max_tokens=TOKENS // 2, temperature=0.0, ignore_eos=True)
    llm = make_llm(cold=DiskColdTier(tmp_path, capacity_bytes=1 << 30), gate=False)
    first = llm.generate(prompts, half, sessions=names)
    llm.close(drain=30.0)

    # All of it is wanted from the cold tier, however slow the machine is at the moment.
    llm = make_llm(cold=DiskColdTier(tmp_path, capacity_bytes=1 << 30), gate=False, load_seconds=60.0)
    talks = [prompt + list(answer.token_ids) for prompt, answer in zip(prompts, first, strict=True)]
    saved = llm.session_tokens("chat-3")
    assert saved is not None
    assert np.array_equal(saved, talks[3])
    second = llm.generate(talks, half, sessions=names)
    assert [a.token_ids + b.token_ids for a, b in zip(first, second, strict=True)] == truth
    assert [answer.cached.total for answer in second] == [len(talk) - 1 for talk in talks]
    assert all(answer.cached.cold > 0 for answer in second)
    check(llm)


def test_its_tokenizer_is_the_one_that_transformers_would_choose(loaded: LoadedModel) -> None:
    file = require_smollm2()
    tokenizers: Any = transformers.AutoTokenizer
    chosen = tokenizers.from_pretrained(
        file.parent, gguf_file=file.name, local_files_only=True, clean_up_tokenization_spaces=False
    )
    assert type(loaded.tokenizer) is type(chosen)
    assert loaded.tokenizer.get_vocab() == chosen.get_vocab()
    assert loaded.tokenizer.special_tokens_map == chosen.special_tokens_map
    assert loaded.tokenizer.chat_template == chosen.chat_template
    for text in (STORY, *PLAIN, "  Ünïcödé \n\t你好 🙂<|im_end|>"):
        ids = loaded.tokenizer(text).input_ids
        assert ids == chosen(text).input_ids
        assert loaded.tokenizer.decode(ids) == chosen.decode(ids)
