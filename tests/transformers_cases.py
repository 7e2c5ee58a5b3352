"""Models of transformers for tests of its caches, and calls of ``generate``."""

from __future__ import annotations

import inspect
from types import TracebackType
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel

__all__ = ["BLOCK", "WORDS", "Computed", "cache_argument", "generate", "prompt_of", "tiny_llama"]

BLOCK = 16
WORDS = 499


def tiny_llama(seed: int = 1, **options: Any) -> Any:
    """A random Llama whose answers differ with what it attends to."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        initializer_range=0.3,
        **options,
    )
    return LlamaForCausalLM(config).eval()


def prompt_of(seed: int, length: int, rows: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, WORDS, (rows, length), generator=generator)


def cache_argument() -> str:
    """What this release of transformers calls it; where both names do, the other one is warned of."""
    return "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"


def generate(
    model: Any, prompt: torch.Tensor, cache: Any = None, count: int = 20, **options: Any
) -> torch.Tensor:
    """What is generated greedily, or by beams, int [rows, count]."""
    given = {} if cache is None else {cache_argument(): cache}
    # Ended by its length alone.
    usual = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count, "pad_token_id": 0}
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), **{**usual, **options}, **given)
    tokens: torch.Tensor = made[:, prompt.shape[1] :]
    return tokens


class Computed:
    """Counts the tokens of a row that a model computes, until the end of a ``with``."""

    def __init__(self, model: Any) -> None:
        self.tokens = 0
        decoder = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._hook = decoder.get_input_embeddings().register_forward_hook(self._count)

    def _count(self, module: Any, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        self.tokens += args[0].shape[1]

    def __enter__(self) -> Computed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()
