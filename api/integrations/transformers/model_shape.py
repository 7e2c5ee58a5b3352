"""What of a model's KV is kept, and which models' cannot be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ....tiers.errors import LayoutError
from ....tiers.layout import KVLayout

__all__ = ["ModelShape", "decoder_of", "shape_of", "unwrapped"]

_TYPES: Final = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
_ROPE_BY_LENGTH: Final = ("dynamic", "longrope", "su")
"""Kinds of RoPE with which a token's keys depend on how long its prompt has become."""


@dataclass(frozen=True)
class ModelShape:
    """The KV of a model.

    Args:
        layout: of blocks.
        dtype: of keys and values.
        devices: of each layer's.
    """

    layout: KVLayout
    dtype: torch.dtype
    devices: tuple[torch.device, ...]


def unwrapped(model: Any) -> Any:
    """The model of transformers itself: that within a model of peft.

    Raises:
        LayoutError: it has virtual tokens, whose KV no token ids name.
    """
    if not hasattr(model, "get_base_model"):
        return model
    if any(config.is_prompt_learning for config in model.peft_config.values()):
        raise LayoutError("adapters that put virtual tokens before a prompt are not supported")
    return model.get_base_model()


def decoder_of(model: Any) -> torch.nn.Module:
    """The part of a model that is given token ids and a cache, whoever calls the model."""
    find = getattr(model, "get_decoder", None)
    decoder = find() if find is not None else None
    if decoder is None:
        decoder = getattr(model, getattr(model, "base_model_prefix", ""), model)
    if not isinstance(decoder, torch.nn.Module):
        raise LayoutError(f"{type(model).__name__} has no decoder that is known")
    return decoder


def shape_of(model: Any, block_size: int) -> ModelShape:
    """The shape of a model's KV, seen at one token that it computes.

    Raises:
        LayoutError: its KV cannot be kept, and why.
    """
    _check_kind(model)
    tokens = torch.zeros((1, 1), dtype=torch.long, device=model.get_input_embeddings().weight.device)
    with torch.no_grad():
        outputs = model(input_ids=tokens, use_cache=True)
    caches = [value for value in outputs.values() if isinstance(value, Cache)]
    if not caches:
        raise LayoutError(f"{type(model).__name__} returns no cache of transformers")
    return _shape_of_cache(caches[0], block_size)


def _check_kind(model: Any) -> None:
    config = model.config
    if config.is_encoder_decoder:
        raise LayoutError("the KV of encoder-decoder models is not that of a prefix: it is not kept")
    if config.get_text_config(decoder=True) is not config:
        raise LayoutError(
            f"{type(model).__name__} takes more than text: what token ids do not name cannot be kept by them"
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if any(kind in str(rope) for kind in map(repr, _ROPE_BY_LENGTH)):
        raise LayoutError(
            "this model's RoPE depends on how long a prompt becomes (dynamic, longrope): the same prefix has "
            "other KV in another prompt"
        )


def _shape_of_cache(cache: Cache, block_size: int) -> ModelShape:
    kinds = {type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer}
    if type(cache) is not DynamicCache or kinds:
        raise LayoutError(
            f"only caches of full attention in every layer are kept, and this model has "
            f"{type(cache).__name__}{' of ' + ', '.join(sorted(kinds)) if kinds else ''} (sliding windows, "
            "state-space layers, layers that share KV, or another cache than transformers' usual one)"
        )
    shapes = {(layer.keys.shape, layer.values.shape, layer.keys.dtype) for layer in cache.layers}
    keys, values, dtype = next(iter(shapes))
    if len(shapes) > 1 or keys != values:
        raise LayoutError("layers, or keys and values, that differ in their shapes are not supported")
    if dtype not in _TYPES:
        raise LayoutError(
            f"keys and values of type {dtype} are not supported: {', '.join(_TYPES.values())} are"
        )
    _, heads, _, head_dim = keys
    layout = KVLayout(len(cache.layers), heads, head_dim, block_size, _TYPES[dtype], "plain")
    return ModelShape(layout, dtype, tuple(layer.keys.device for layer in cache.layers))
