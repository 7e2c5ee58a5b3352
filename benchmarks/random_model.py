"""Models of real shapes with random weights: what an engine does with memory does not depend on training.

Weights are drawn where they are to be, so that nothing is read, copied or downloaded. Linear layers keep the
variance of their inputs. Queries and keys are drawn wider, so that attention prefers some tokens to others:
what a model answers depends on the keys and values that it reads, and a wrong block changes the answer.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Final

import torch
from kvpager.engine.loader import LoadedModel
from kvpager.engine.model import CausalLM, ModelConfig

__all__ = ["LLAMA_1B", "LLAMA_8B", "TINY", "ModelShape", "random_model"]

_ROPE_BASE: Final = 500_000.0
_SHARPNESS: Final = 1.5
"""How much wider queries and keys are drawn: attention scores have its square as their standard deviation."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model of the Llama family.

    Attributes:
        name: of the model that has them.
        tied: whether the output matrix is the embedding.
        others: as in `ModelConfig`.
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocabulary: int
    tied: bool
    max_positions: int = 131_072

    def config(self) -> ModelConfig:
        """The configuration of a model of this shape: no biases, full attention, plain rotary positions."""
        pairs = self.head_dim // 2
        return ModelConfig(
            family="llama",
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            norm_eps=1e-5,
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            qk_norm=False,
            tied_embeddings=self.tied,
            windows=(None,) * self.layers,
            inv_freq=tuple(_ROPE_BASE ** (-pair / pairs) for pair in range(pairs)),
            rope_factor=1.0,
            max_positions=self.max_positions,
        )


LLAMA_1B: Final = ModelShape("Llama-3.2-1B", 16, 32, 8, 64, 2048, 8192, 128_256, tied=True)
LLAMA_8B: Final = ModelShape("Llama-3.1-8B", 32, 32, 8, 128, 4096, 14336, 128_256, tied=False)
TINY: Final = ModelShape("tiny", 2, 4, 2, 16, 32, 64, 199, tied=True)
"""For a CPU, in moments."""


@torch.inference_mode()
def random_model(shape: ModelShape, *, device: str, dtype: torch.dtype, seed: int = 0) -> LoadedModel:
    """A model of a shape, without a tokenizer or end tokens, its weights drawn on a device.

    Args:
        device: ``cpu`` or ``cuda:N``.
        dtype: what it computes in.
        seed: of the weights; the same one gives the same weights on the same kind of device.
    """
    config = shape.config()
    with torch.device("meta"):
        model = CausalLM(config)
    model = model.to(dtype).to_empty(device=device)
    random = torch.Generator(device).manual_seed(seed)
    turned = (config.num_heads + config.num_kv_heads) * config.head_dim
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            weight.fill_(1.0)  # of a norm
            continue
        weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=random)
        if name.endswith("attention.qkv.weight"):
            weight[:turned] *= _SHARPNESS
    about = {"config": asdict(config), "dtype": str(dtype), "seed": seed, "device": torch.device(device).type}
    identity = hashlib.sha256(b"random-model-1" + json.dumps(about, sort_keys=True).encode()).digest()
    model = model.requires_grad_(False).eval()
    return LoadedModel(shape.name, model, config, None, frozenset(), config.max_positions, identity)
