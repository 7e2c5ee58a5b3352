"""What a model's files say of its KV: layers, KV heads, their width, and sliding windows. Without torch.

Read are ``config.json`` as transformers writes it, and the metadata of GGUF files. Layers whose KV is alike
make a group, which is a `KVLayout`. Where a layer keeps no KV (linear attention, state spaces, layers that
use another one's) it is in no group.

Sources: the configuration classes of transformers; the GGUF specification
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md); DeepSeek-V2 (arXiv 2405.04434), section 2.1, for
latents.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..tiers.errors import ConfigError, ModelError
from ..tiers.layout import KVLayout
from .gguf_metadata import MAGIC, read_metadata

__all__ = ["ModelShape", "read_shape", "shape_of_figures"]

_KEPT: Final = ("float16", "bfloat16", "float32")
_USUAL_DTYPE: Final = "bfloat16"
_MOST: Final = (1 << 31) - 1
"""Of any figure."""
_NESTED: Final = ("text_config", "llm_config", "language_config")
"""Where models of several kinds of input keep what is said of text."""
_WITHOUT_KV: Final = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent", "moe", "mlp"})
_ALL_SLIDE: Final = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})
"""Models that have their window in every layer."""
_CHUNKED: Final = "chunked_attention"
_SLIDING: Final = "sliding_attention"
_FULL: Final = frozenset({"full_attention", "attention", "global"})
_PATTERNS: Final = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
"""Of models whose files need not say it: every so many-th layer sees everything, the others a window."""


@dataclass(frozen=True)
class _Layer:
    """What one layer keeps: KV of all tokens, or none; and the window that it sees, None for everything."""

    keeps: bool = True
    window: int | None = None


_SEES_ALL: Final = _Layer()
_KEEPS_NONE: Final = _Layer(keeps=False)
_BITS_OF_TYPE: Final = {0: "float32", 1: "float16", 32: "bfloat16"}
"""What GGUF's general.file_type says of weights that are not quantised."""


@dataclass(frozen=True)
class ModelShape:
    """What is kept of a model's tokens.

    Args:
        name: what the model is called.
        groups: its layers with KV, by what they keep of a token and by their window.
        layers: all of its layers.
        query_heads: of a layer; None where it is not known.
        most_tokens: of a sequence; None where it is not known.
        notes: what the figures leave out or suppose, in sentences.
    """

    name: str
    groups: tuple[KVLayout, ...]
    layers: int
    query_heads: int | None
    most_tokens: int | None
    notes: tuple[str, ...] = ()

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token."""
        return sum(group.token_bytes for group in self.groups)

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes of the blocks that a sequence of so many tokens takes, its last ones whole."""
        return sum(group.blocks_for(num_tokens) * group.block_bytes for group in self.groups)

    def token_bytes_by_query_heads(self) -> int | None:
        """Bytes of a token as if every query head had KV of its own; None where that cannot be told."""
        if self.query_heads is None or any(group.planes == 1 for group in self.groups):
            return None
        return sum(group.token_bytes // group.num_kv_heads * self.query_heads for group in self.groups)


def shape_of_figures(
    num_layers: int, num_kv_heads: int, head_dim: int, *, query_heads: int | None, dtype: str, block_size: int
) -> ModelShape:
    """The shape that is told by its figures.

    Raises:
        ConfigError: a figure is out of range.
    """
    layout = KVLayout(num_layers, num_kv_heads, head_dim, block_size, dtype)
    return ModelShape("a model of these figures", (layout,), num_layers, query_heads, None)


def read_shape(path: Path, *, dtype: str | None, block_size: int) -> ModelShape:
    """The shape of the model in a folder, in its ``config.json``, or in a GGUF file.

    Args:
        dtype: what KV is kept in; None: what the model is published in, bfloat16 where its weights are
            quantised.
        block_size: tokens of a block.

    Raises:
        ModelError: there is none, or it does not say what is needed.
        ConfigError: a setting is out of range.
    """
    if path.is_dir():
        file = path / "config.json"
        if not file.exists():
            found = sorted(path.glob("*.gguf"))
            if len(found) != 1:
                raise ModelError(f"{path} has no config.json, and not one GGUF file")
            file = found[0]
    else:
        file = path
    try:
        with file.open("rb") as opened:
            binary = opened.read(len(MAGIC)) == MAGIC
        said = _gguf_figures(file) if binary else _json_figures(file)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    return said.shape(dtype or said.dtype, block_size)


@dataclass(frozen=True)
class _Figures:
    """What a file says.

    Args:
        heads: KV heads of each layer that keeps KV; of a latent 1.
        windows: the window of each such layer.
    """

    name: str
    layers: int
    heads: Sequence[int]
    windows: Sequence[int | None]
    head_dim: int
    planes: int
    query_heads: int | None
    most_tokens: int | None
    dtype: str
    notes: tuple[str, ...]

    def shape(self, dtype: str, block_size: int) -> ModelShape:
        kinds = Counter(zip(self.heads, self.windows, strict=True))
        try:
            groups = tuple(
                KVLayout(number, heads, self.head_dim, block_size, dtype, planes=self.planes, window=window)
                for (heads, window), number in kinds.items()
            )
        except ConfigError as error:
            if error.setting in ("block_size", "dtype"):
                raise
            raise ModelError(f"its {error}") from error
        if not groups:
            raise ModelError("none of its layers keeps KV")
        return ModelShape(self.name, groups, self.layers, self.query_heads, self.most_tokens, self.notes)


def _fixed_state(number: int, layers: int) -> str:
    return f"{number} of {layers} layers keep a state of fixed size, which is not counted."


def _latents(width: int) -> str:
    return f"Attention over latents: {width} elements a layer stand for keys and values of all heads."


# ---- config.json ----


def _json_figures(file: Path) -> _Figures:
    try:
        outer = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is neither a config.json nor a GGUF file: {error}") from error
    if not isinstance(outer, dict):
        raise ModelError(f"{file} must hold a JSON object, not {type(outer).__name__}")
    config = outer
    for name in _NESTED:
        if isinstance(outer.get(name), dict):
            config = {**outer, **outer[name]}
    layers = _number(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    query_heads = _number(config, "num_attention_heads", "n_head", "n_heads")
    notes: list[str] = []
    if config.get("kv_lora_rank"):
        # A latent and the rotated part of the keys, which all heads share.
        head_dim = _number(config, "kv_lora_rank") + _number(config, "qk_rope_head_dim")
        planes, heads = 1, [1] * layers
        notes.append(_latents(head_dim))
    else:
        width = _optional(config, "head_dim", "kv_channels")
        hidden = None if width else _number(config, "hidden_size", "n_embd", "d_model")
        if hidden is not None and hidden % query_heads:
            raise ModelError(f"its {hidden} dimensions are not divided evenly among {query_heads} heads")
        head_dim = width or (hidden or 0) // query_heads
        planes, heads = 2, _heads_of_layers(config, layers, query_heads)
    kinds = _layers(config, layers, notes)
    shared = _optional(config, "num_kv_shared_layers") or 0
    if shared:
        notes.append(f"The last {shared} layers use the KV of others, and keep none.")
    with_kv = [at for at in range(layers - shared) if kinds[at].keeps]
    if len(with_kv) + shared < layers:
        notes.append(_fixed_state(layers - shared - len(with_kv), layers))
    name = outer.get("_name_or_path") or (file.parent.name if file.name == "config.json" else file.stem)
    return _Figures(
        name=str(name),
        layers=layers,
        heads=[heads[at] for at in with_kv],
        windows=[kinds[at].window for at in with_kv],
        head_dim=head_dim,
        planes=planes,
        query_heads=query_heads,
        most_tokens=_optional(config, "max_position_embeddings", "n_positions", "max_seq_len"),
        dtype=_dtype_of(config),
        notes=tuple(notes),
    )


def _dtype_of(config: Mapping[str, Any]) -> str:
    said = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return said if said in _KEPT else _USUAL_DTYPE


def _heads_of_layers(config: Mapping[str, Any], layers: int, query_heads: int) -> list[int]:
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        return [1] * layers
    for name in ("num_key_value_heads", "num_kv_heads", "n_head_kv"):
        if config.get(name) is not None:
            return _by_layer(config, name, layers)
    return [query_heads] * layers


def _layers(config: Mapping[str, Any], layers: int, notes: list[str]) -> list[_Layer]:
    """What each layer keeps."""
    window = _optional(config, "sliding_window")
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if kinds is not None:
        return [_layer_of(kind, window, config) for kind in _listed(kinds, layers)]
    period = _optional(config, "attn_layer_period")
    if period:
        offset = _optional(config, "attn_layer_offset") or 0
        return [_SEES_ALL if at % period == offset else _KEEPS_NONE for at in range(layers)]
    if window is None or config.get("use_sliding_window") is False:
        return [_SEES_ALL] * layers
    slides = _Layer(window=window)
    family = str(config.get("model_type"))
    pattern = _optional(config, "sliding_window_pattern", "_sliding_window_pattern") or _PATTERNS.get(family)
    if pattern:
        return [_SEES_ALL if (at + 1) % pattern == 0 else slides for at in range(layers)]
    if "use_sliding_window" in config:
        first = _optional(config, "max_window_layers") or 0
        return [slides if at >= first else _SEES_ALL for at in range(layers)]
    if family not in _ALL_SLIDE:
        notes.append("Its file does not say which layers have the window: it is taken to be all of them.")
    return [slides] * layers


def _listed(kinds: object, layers: int) -> list[str]:
    if not isinstance(kinds, list) or len(kinds) < layers or not all(isinstance(one, str) for one in kinds):
        raise ModelError(f"its layer_types must name each of {layers} layers, not {kinds!r:.80}")
    return kinds[:layers]


def _layer_of(kind: str, window: int | None, config: Mapping[str, Any]) -> _Layer:
    if kind in _FULL:
        return _SEES_ALL
    if kind in _WITHOUT_KV:
        return _KEEPS_NONE
    if kind == _SLIDING and window is not None:
        return _Layer(window=window)
    if kind == _CHUNKED:
        return _Layer(window=_number(config, "attention_chunk_size"))
    raise ModelError(f"it has layers of type {kind}, which are not known: give its figures by options")


def _number(config: Mapping[str, Any], *names: str) -> int:
    found = _optional(config, *names)
    if found is None:
        raise ModelError(f"it does not say its {names[0]}: give its figures by options")
    if found == 0:
        raise ModelError(f"its {names[0]} must be at least 1")
    return found


def _by_layer(config: Mapping[str, Any], name: str, layers: int) -> list[int]:
    """A figure of each layer: one that is the same for all, or one for each."""
    given = config.get(name)
    found: list[Any] = given if isinstance(given, list) else [given] * layers
    if len(found) != layers or not all(type(one) is int and 0 <= one <= _MOST for one in found):
        raise ModelError(f"its {name} must be a whole number, or one for each layer, not {given!r:.80}")
    return found


def _optional(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of these that is there and not null."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if type(value) is not int or not 0 <= value <= _MOST:
            raise ModelError(f"its {name} must be a whole number up to {_MOST}, not {value!r:.80}")
        return value
    return None


# ---- GGUF ----


def _gguf_figures(file: Path) -> _Figures:
    fields = read_metadata(file)
    architecture = fields.get("general.architecture")
    said = {
        name.partition(".")[2]: value for name, value in fields.items() if name.startswith(f"{architecture}.")
    }
    layers = _number(said, "block_count")
    query_heads = max(_by_layer(said, "attention.head_count", layers))
    kv_heads = "attention.head_count_kv"
    heads = _by_layer(said, kv_heads, layers) if kv_heads in said else [query_heads] * layers
    notes: list[str] = []
    rank = _optional(said, "attention.kv_lora_rank")
    if rank:
        width, planes, heads = rank + _number(said, "rope.dimension_count"), 1, [1] * layers
        notes.append(_latents(width))
    else:
        planes = 2
        width = _optional(said, "attention.key_length") or _number(said, "embedding_length") // query_heads
    if _optional(said, "attention.sliding_window"):
        notes.append(
            "Some of its layers have a sliding window, which the file does not name: all are taken to "
            "see everything."
        )
    with_kv = [one for one in heads if one]
    if len(with_kv) < layers:
        notes.append(_fixed_state(layers - len(with_kv), layers))
    return _Figures(
        name=str(fields.get("general.name", file.stem)),
        layers=layers,
        heads=with_kv,
        windows=[None] * len(with_kv),
        head_dim=width,
        planes=planes,
        query_heads=query_heads,
        most_tokens=_optional(said, "context_length"),
        dtype=_BITS_OF_TYPE.get(fields.get("general.file_type", -1), _USUAL_DTYPE),
        notes=tuple(notes),
    )
