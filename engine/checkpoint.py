"""Published checkpoints of the Llama family: their tensors, configuration and tokenizer, as files have them.

Two kinds are read: a folder of safetensors beside ``config.json``, and a GGUF file
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), whose weights are dequantised as they are read.
Both answer with the tensor names of the Hugging Face checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import gguf
import numpy as np
import torch
import transformers
from gguf.gguf_reader import READER_SUPPORTED_VERSIONS
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..tiers.errors import ModelError
from .model import ModelConfig

__all__ = ["READ_ERRORS", "Checkpoint", "open_checkpoint", "safetensors_paths"]

READ_ERRORS: Final = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    SafetensorError,
    StrictDataclassError,
)
"""What the readers of configurations, tokenizers and tensors raise for files that are not right."""

_FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")
_ROPE_TYPES: Final = ("linear", "llama3", "yarn", "dynamic")
# Text is exactly what the tokens say: to tidy spaces up takes some that the model wrote.
_TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", _TOKENIZER_CONFIG)

_GGUF_MODULES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BYTE_ORDERS: Final[tuple[Literal["little", "big"], ...]] = ("little", "big")
_GGUF_ROPE_DIVISORS: Final = "rope_freqs.weight"
"""Llama 3's scaling of frequencies, which GGUF keeps as a tensor instead of parameters."""


class Checkpoint(Protocol):
    """A model as it was published.

    Attributes:
        paths: the files that hold the weights.
        names: the tensors in them.
        config: what the model is made of.
        stored_dtype: what the weights were published in; of quantised weights, what they decode to.
        eos_ids: tokens that end an answer.
    """

    @property
    def paths(self) -> Sequence[Path]: ...
    @property
    def names(self) -> frozenset[str]: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def stored_dtype(self) -> torch.dtype: ...
    @property
    def eos_ids(self) -> frozenset[int]: ...

    def read(self, name: str) -> torch.Tensor:
        """One tensor on the CPU."""
        ...

    def tokenizer(self) -> Any:
        """transformers' tokenizer, or None where there is none with the model."""
        ...


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a folder or file.

    Raises:
        ModelError: there is none, or it is of a kind that the engine does not run.
        One of READ_ERRORS: a file is damaged.
    """
    return _GGUF(path) if path.suffix == ".gguf" else _Safetensors(path)


def safetensors_paths(path: Path) -> list[Path]:
    """The weight files of a folder, or the file itself.

    Raises:
        ModelError: there is none, or the index names one that is not there.
    """
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ModelError("it is neither a .safetensors nor a .gguf file")
        return [path]
    index = path / "model.safetensors.index.json"
    if index.exists():
        names = _read_object(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ModelError(f"{index.name} has no weight_map from tensors to files")
        files = sorted({path / name for name in names.values()})
    else:
        files = [path / "model.safetensors"]
    for file in files:
        if not file.exists():
            raise ModelError(f"there is no {file.name}")
    return files


def _read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        value = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ModelError(f"{file.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file.name} must hold a JSON object, not {type(value).__name__}")
    return value


class _Safetensors:
    def __init__(self, path: Path) -> None:
        self.paths = safetensors_paths(path)
        self._folder = path if path.is_dir() else path.parent
        file = self._folder / "config.json"
        if not file.exists():
            raise ModelError("there is no config.json")
        # Before transformers may object to it in its own words.
        _expect_family(_read_object(file).get("model_type"))
        config = transformers.AutoConfig.from_pretrained(self._folder, local_files_only=True)
        if getattr(config, "quantization_config", None) is not None:
            raise ModelError("quantised safetensors are not read; take the full weights, or a GGUF file")
        self.config = _model_config(config, *_rope(config))
        self.stored_dtype: torch.dtype = config.dtype or torch.float32
        self.eos_ids = self._eos_ids(config)
        self._files: dict[str, Any] = {}
        for weights in self.paths:
            opened: Any = safe_open(weights, framework="pt", device="cpu")
            for name in opened.keys():  # noqa: SIM118 - the file is no mapping
                if name in self._files:
                    raise ModelError(f"the tensor {name} is in two files")
                self._files[name] = opened
        self.names = frozenset(self._files)

    def _eos_ids(self, config: Any) -> frozenset[int]:
        ids = config.eos_token_id
        file = self._folder / "generation_config.json"
        if file.exists():
            ids = _read_object(file).get("eos_token_id", ids)
        listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(isinstance(token, int) for token in listed):
            raise ModelError(f"eos_token_id must be token ids, it is {ids!r}")
        return frozenset(listed)

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def tokenizer(self) -> Any:
        if not any((self._folder / name).exists() for name in _TOKENIZER_FILES):
            return None
        return _read_tokenizer(transformers.AutoTokenizer, self._folder)


class _PlainReader(gguf.GGUFReader):
    """gguf's reader over a plain view of its mapping: a memmap makes each of its many slices dear."""

    @property
    def data(self) -> Any:
        return self._data

    @data.setter
    def data(self, mapping: Any) -> None:
        self._data = mapping.view(np.ndarray)


def _open_gguf(path: Path) -> _PlainReader:
    """A reader of a GGUF file that is whole, as far as its header says."""
    with path.open("rb") as file:
        magic, version = file.read(4), file.read(4)
    if magic != b"GGUF":
        raise ModelError("it is not a GGUF file")
    if not {int.from_bytes(version, order) for order in _BYTE_ORDERS} & set(READER_SUPPORTED_VERSIONS):
        raise ModelError("the GGUF file is cut off, or of a version that is not read")
    try:
        return _PlainReader(path)
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        # What the reader says of an end that comes too early is about arrays.
        raise ModelError(
            "the GGUF file is cut off or damaged: its header promises more than it holds"
        ) from error


class _GGUF:
    """Tensors dequantised to float32.

    The converter to GGUF interleaves, in models of the architecture ``llama``, the two halves that rotary
    positions turn against each other (llama.cpp, convert_hf_to_gguf.py); reading puts them back.
    """

    stored_dtype = torch.bfloat16

    def __init__(self, path: Path) -> None:
        self.paths = (path,)
        reader = _open_gguf(path)
        self._fields = reader.fields
        self._architecture = str(self._required("general.architecture"))
        _expect_family(self._architecture)
        self._tensors = {self._published(tensor.name): tensor for tensor in reader.tensors}
        divisors = self._tensors.pop(_GGUF_ROPE_DIVISORS, None)
        self.names = frozenset(self._tensors)
        config = self._hf_config()
        inv_freq, factor = _rope(config)
        if divisors is not None:
            inv_freq = inv_freq / self._values(divisors)
        self.config = _model_config(config, inv_freq, factor)
        self._heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}
        ends = (self._field(f"tokenizer.ggml.{kind}_token_id", None) for kind in ("eos", "eot"))
        self.eos_ids = frozenset(int(token) for token in ends if token is not None)

    def _field(self, name: str, *default: Any) -> Any:
        name = name.replace("ARCH", self._architecture)
        if default and name not in self._fields:
            return default[0]
        return self._required(name)

    def _required(self, name: str) -> Any:
        if name not in self._fields:
            raise ModelError(f"the GGUF file does not say its {name}")
        return self._fields[name].contents()

    def _hf_config(self) -> Any:
        """The configuration as transformers would have it, from the metadata of the file."""
        heads = self._field("ARCH.attention.head_count")
        hidden = self._field("ARCH.embedding_length")
        rope = {"rope_type": "default", "rope_theta": self._field("ARCH.rope.freq_base", 10000.0)}
        scaling = self._field("ARCH.rope.scaling.type", "none")
        if scaling != "none":
            rope |= {"rope_type": scaling, "factor": self._field("ARCH.rope.scaling.factor")}
            original = self._field("ARCH.rope.scaling.original_context_length", None)
            if original is not None:
                rope["original_max_position_embeddings"] = original
        options = {}
        if self._architecture == "llama":
            options["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in self._tensors
        return transformers.AutoConfig.for_model(
            self._architecture,
            vocab_size=int(self._tensors["model.embed_tokens.weight"].shape[1]),
            hidden_size=hidden,
            intermediate_size=self._field("ARCH.feed_forward_length"),
            num_hidden_layers=self._field("ARCH.block_count"),
            num_attention_heads=heads,
            num_key_value_heads=self._field("ARCH.attention.head_count_kv", heads),
            head_dim=self._field("ARCH.attention.key_length", hidden // heads),
            rms_norm_eps=self._field("ARCH.attention.layer_norm_rms_epsilon"),
            max_position_embeddings=self._field("ARCH.context_length"),
            tie_word_embeddings="lm_head.weight" not in self._tensors,
            rope_parameters=rope,
            **options,
        )

    @staticmethod
    def _published(name: str) -> str:
        module, _, kind = name.rpartition(".")
        prefix, _, leaf = module.rpartition(".")
        if leaf not in _GGUF_MODULES:
            return name
        layer = prefix.replace("blk.", "model.layers.", 1) + "." if prefix else ""
        return f"{layer}{_GGUF_MODULES[leaf]}.{kind}"

    @staticmethod
    def _values(tensor: Any) -> torch.Tensor:
        return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())

    def read(self, name: str) -> torch.Tensor:
        values = self._values(self._tensors[name])
        heads = self._heads.get(name.split(".")[-2])
        if heads is None or self._architecture != "llama":
            return values
        return values.view(heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)

    def tokenizer(self) -> Any:
        if "tokenizer.ggml.tokens" not in self._fields:
            return None
        path = self.paths[0]
        kind: Any = transformers.AutoTokenizer
        named = self._field("general.name", "") == "mistral" or (path.parent / _TOKENIZER_CONFIG).exists()
        if self._architecture == "llama" and not named:
            # What it comes to, after a reading of the whole file anew that takes seconds.
            kind = transformers.PreTrainedTokenizerFast
        return _read_tokenizer(kind, path.parent, gguf_file=path.name)


def _read_tokenizer(kind: Any, folder: Path, **where: str) -> Any:
    tokenizer = kind.from_pretrained(
        folder, local_files_only=True, clean_up_tokenization_spaces=False, **where
    )
    # Not every version of transformers takes it from the call, and those tell of it at each text.
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def _expect_family(family: object) -> None:
    if family not in _FAMILIES:
        raise ModelError(f"models of type {family} are not ones the engine runs ({', '.join(_FAMILIES)})")


def _model_config(config: Any, inv_freq: torch.Tensor, rope_factor: float) -> ModelConfig:
    """The engine's description of a model, out of that of transformers."""
    if config.hidden_act != "silu":
        raise ModelError(f"the activation {config.hidden_act} is not one the engine runs (silu)")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise ModelError(f"{heads} query heads do not divide into {kv_heads} KV heads")
    family = config.model_type
    attention_bias = bool(getattr(config, "attention_bias", False))
    return ModelConfig(
        family=family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(config),
        norm_eps=config.rms_norm_eps,
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=family == "qwen3",
        tied_embeddings=config.tie_word_embeddings,
        windows=_windows(config),
        inv_freq=tuple(inv_freq.tolist()),
        rope_factor=float(rope_factor),
        max_positions=config.max_position_embeddings,
    )


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _windows(config: Any) -> tuple[int | None, ...]:
    """Each layer's sliding window."""
    layers = int(config.num_hidden_layers)
    if config.model_type == "llama":
        return (None,) * layers
    if config.model_type == "mistral":
        return (config.sliding_window,) * layers
    windows: dict[str, int | None] = {"full_attention": None, "sliding_attention": config.sliding_window}
    unknown = set(config.layer_types) - set(windows)
    if unknown:
        raise ModelError(f"layers of type {', '.join(sorted(unknown))} are not ones the engine runs")
    return tuple(windows[kind] for kind in config.layer_types)


def _rope(config: Any) -> tuple[torch.Tensor, float]:
    """Inverse frequencies float32 [head_dim / 2], and what cosines and sines are multiplied by."""
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("rotary positions on a part of each head are not what the engine runs")
    if kind == "default":
        dim = _head_dim(config)
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    if kind not in _ROPE_TYPES:
        raise ModelError(f"rotary positions of type {kind} are not what the engine runs")
    # "dynamic" changes the frequencies only beyond max_position_embeddings, where no sequence gets.
    inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"))
    return inv_freq.float(), factor
