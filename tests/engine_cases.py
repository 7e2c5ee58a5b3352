"""Tiny engines for tests: a random model, prompts, and the tokens that transformers answers them with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from kvpager.engine.judge import ROUNDING, shortfalls
from kvpager.engine.llm import LLM, Completion
from kvpager.engine.loader import LoadedModel, load_model
from kvpager.engine.runner import Runner
from kvpager.engine.sampler import SamplingParams
from kvpager.engine.sequence import Sequence, SequenceState
from kvpager.kvstore.cost import LinkCost
from kvpager.kvstore.cost_estimates import LinkEstimate
from kvpager.kvstore.space import HostSpace
from kvpager.tests.model_files import save_tiny_model

__all__ = [
    "GREEDY",
    "HALF_SIZE",
    "SIZE",
    "TOKENS",
    "Case",
    "Judge",
    "MakeLLM",
    "Tokens",
    "answers",
    "byte_tokenizer",
    "check",
    "check_nothing_is_held",
    "evict_device",
    "evict_host",
    "finish",
    "make_case",
    "make_half_case",
    "maker",
    "reads_cost_nothing",
    "run_padded",
    "run_until",
]

TOKENS = 21
"""Tokens of an answer."""
SIZE = 8
"""Tokens per block."""
HALF_SIZE = 16
"""The same of `make_half_case`: what the kernels take."""
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)

Tokens = tuple[int, ...]
MakeLLM = Callable[..., LLM]


@dataclass(frozen=True)
class Case:
    """A tiny model on a device, prompts, and the tokens that transformers answers them with on the CPU."""

    loaded: LoadedModel
    device: str
    prompts: list[list[int]]
    truth: list[Tokens]


def make_case(kind: str, device: str, folder: Path) -> Case:
    model = save_tiny_model(kind, folder)
    random = np.random.default_rng(7)
    shared = random.integers(2, 199, 4 * SIZE).tolist()
    lengths = (1, SIZE - 1, SIZE, SIZE + 1, 3 * SIZE + 2, 77)
    prompts = [random.integers(2, 199, length).tolist() for length in lengths]
    prompts += [shared + random.integers(2, 199, length).tolist() for length in (1, SIZE, 13)]
    loaded = load_model(folder, dtype="float32", device=device)
    return Case(loaded, device, prompts, [continued(model, prompt, TOKENS) for prompt in prompts])


def make_half_case(kind: str, device: str, folder: Path) -> Case:
    """A model in float16 that the kernels for a GPU read: heads of 64 elements, some with a window.

    `Case.truth` is empty: which token is the best of two that are all but equal, rounding decides. See
    `Judge`.
    """
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=199,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        initializer_range=0.2,
        eos_token_id=1,
        **({"sliding_window": 37} if kind == "mistral" else {}),
    )
    torch.manual_seed(1)
    auto: Any = transformers.AutoModelForCausalLM
    auto.from_config(config, attn_implementation="eager").eval().save_pretrained(folder)
    random = np.random.default_rng(8)
    shared = random.integers(2, 199, 4 * HALF_SIZE).tolist()
    prompts = [random.integers(2, 199, length).tolist() for length in (1, 15, 16, 17, 50, 111)]
    prompts += [shared + random.integers(2, 199, length).tolist() for length in (1, 16, 29)]
    return Case(load_model(folder, dtype="float16", device=device), device, prompts, [])


class Judge:
    """A model of transformers in float32 on the CPU, which says what the best next tokens are."""

    def __init__(self, folder: Path) -> None:
        auto: Any = transformers.AutoModelForCausalLM
        self._model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.no_grad()
    def check(self, prompt: list[int], answer: Tokens) -> None:
        """Each token of a greedy answer is the best after those before it, or as good but for rounding."""
        logits = self._model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        lacking = shortfalls(logits, answer)
        assert float(lacking.max()) < ROUNDING["float16"], f"token {int(lacking.argmax())} of {answer}"


def run_padded(llm: LLM) -> LLM:
    """The engine with its decode steps padded: under graphs on a GPU, elsewhere by the same code without."""
    if llm.store.device == "cpu":
        llm._runner = Runner(llm._loaded.model, llm.store, llm.max_tokens, padded=True)
    return llm


def continued(model: Any, prompt: list[int], count: int) -> Tokens:
    """The tokens that transformers' own generate, greedy, adds to a prompt."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tuple(output[0, len(prompt) :].tolist())


def maker(case: Case, made: list[LLM]) -> MakeLLM:
    def make(**settings: Any) -> LLM:
        defaults: dict[str, Any] = {
            "device": case.device,
            "block_size": SIZE,
            "device_blocks": 160,
            "host_bytes": 8 << 20,
            "max_sequences": 12,
            # What is found where must not hang on how fast the machine computes just now.
            "gate": False,
        }
        made.append(LLM(case.loaded, **(defaults | settings)))
        return made[-1]

    return make


def check(llm: LLM) -> None:
    llm.store.check_integrity()
    if llm.host is not None:
        llm.host.check_integrity()


def reads_cost_nothing(llm: LLM) -> None:
    """Have the engine take it that reading host memory in place takes next to nothing, and copying more.

    So it copies nothing up beside the steps, once it knows how long one takes.
    """
    llm.store.costs.in_place = LinkEstimate(LinkCost(0.0, 1e-15))
    llm.store.costs.copy = LinkEstimate(LinkCost(0.0, 1e-12))


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[Tokens]:
    return [completion.token_ids for completion in llm.generate(prompts, params)]


def finish(llm: LLM, sequences: list[Sequence]) -> list[Completion]:
    while any(sequence.state is not SequenceState.FINISHED for sequence in sequences):
        llm.step()
    return [llm.completion(sequence) for sequence in sequences]


def evict_device(llm: LLM) -> None:
    llm.store.evict(llm.store.pool.capacity)


def evict_host(llm: LLM) -> None:
    """Leave KV in the cold tier alone."""
    evict_device(llm)
    assert llm.host is not None
    assert isinstance(llm.store.host, HostSpace)
    assert llm.host.flush() == 0
    llm.store.host.evict(llm.store.host.capacity)
    assert llm.store.host.resident == 0


def check_nothing_is_held(llm: LLM) -> None:
    """Every row, block and lease is given back."""
    assert len(llm.scheduler) == 0
    llm.store.flush()
    llm.store.poll()
    check(llm)
    assert not len(llm.store.table.rows_in_use)
    assert llm.store.available_blocks == llm.store.pool.capacity
    if isinstance(llm.store.host, HostSpace):
        llm.store.host.evict(llm.store.host.capacity)
        assert llm.store.host.resident == 0, "something still has a lease"


def run_until(llm: LLM, sequence: Sequence, state: SequenceState) -> None:
    for _ in range(500):
        if sequence.state is state:
            return
        llm.step()
    raise AssertionError(f"the sequence never was {state.value}")


def byte_tokenizer(size: int) -> Any:
    """A byte-level BPE tokenizer with `size` tokens, a few of them words."""
    import tokenizers

    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    symbols = sorted(alphabet)[: size - 8]
    vocabulary = {symbol: at for at, symbol in enumerate(symbols)}
    merges: list[tuple[str, str]] = []
    for left, right in (("t", "h"), ("th", "e"), ("a", "t"), ("s", "at"), ("c", "at")):
        if left in vocabulary and right in vocabulary:
            merges.append((left, right))
            vocabulary[left + right] = len(vocabulary)
    while len(vocabulary) < size:
        vocabulary[f"<{len(vocabulary)}>"] = len(vocabulary)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    fast: Any = transformers.PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer)
