"""Tiny models with random weights, and what vLLM's tests ask them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

__all__ = ["WORDS", "prompt", "save_adapter", "save_hybrid", "save_model"]

WORDS = 512


def prompt(seed: int, length: int) -> list[int]:
    """Token ids that another seed does not have."""
    draw = random.Random(seed)
    return [draw.randrange(WORDS) for _ in range(length)]


_SHAPE: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.3,
}


def save_model(folder: Path, seed: int) -> Path:
    """A Llama whose answers differ with what it attends to."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **_SHAPE)).save_pretrained(folder)
    return folder


def save_hybrid(folder: Path) -> Path:
    """A Gemma of layers with a sliding window beside those with full attention."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        num_hidden_layers=2, layer_types=kinds, sliding_window=64, query_pre_attn_scalar=32, **_SHAPE
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


def save_adapter(folder: Path, seed: int) -> Path:
    """A random LoRA for it."""
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(3):
        for name, width in (("q_proj", 128), ("v_proj", 64)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(8, 128, generator=generator)
            weights[f"{at}.lora_B.weight"] = torch.randn(width, 8, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder
