"""What the KV of a SGLang engine depends on, by content, and which part of it a rank has."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ....kvstore.hashing import HASH_BYTES, ChainIdentity
from ....tiers.errors import ConfigError
from ..weights import Digest, digest_folder, folder_of

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

__all__ = ["ENGINE_FIELDS", "PageNames", "engine_arguments", "shard_of"]

ENGINE_FIELDS: Final = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "quantization_param_path",
    "json_model_override_args",
    "context_length",
    "load_format",
    "speculative_algorithm",
    "trust_remote_code",
    "model_impl",
    "model_loader_extra_config",
    "custom_weight_loader",
    "modelopt_quant",
    "rl_quant_profile",
    "forward_hooks",
)
"""Of SGLang's arguments: how KV is computed, beside the files that are read. Not every release has all."""


def engine_arguments() -> Any | None:
    """The arguments that the engine of this process was started with; None where there is no engine."""
    from sglang.srt.runtime_context import get_server_args

    try:
        return get_server_args()
    except ValueError:  # so it says that there are none
        return None


def shard_of(config: HiCacheStorageConfig) -> str:
    """The part of the model whose pages a rank has. Ranks of a latent cache all have the same."""
    parts = [f"pp{config.pp_rank}/{config.pp_size}", f"cp{config.attn_cp_rank}/{config.attn_cp_size}"]
    dcp_size = int(getattr(config, "dcp_size", 1))  # not in every release
    if dcp_size > 1:
        parts.append(f"dcp{config.dcp_rank}/{dcp_size}")
    parts.append("latent" if config.is_mla_model else f"tp{config.tp_rank}/{config.tp_size}")
    return " ".join(parts)


class PageNames:
    """Names pages, once it is known what computes them: weights are digested in a thread.

    SGLang's key of a page names its tokens and those before them, adapter and salt; here the rest is added.

    Args:
        config: SGLang's.
        model: folder, file or Hugging Face name of the weights; empty: that of the engine of this process.
        log: where it is said that they cannot be digested.

    Raises:
        ConfigError: nothing says which weights it has.
    """

    def __init__(self, config: HiCacheStorageConfig, model: str, log: logging.Logger) -> None:
        self._engine = engine_arguments()
        name = config.model_name or ""
        if not model and self._engine is None:
            raise ConfigError(
                "kvpager_model",
                "is needed: SGLang does not say which model this is, but for a name, which others may have",
            )
        self._root = Digest(lambda: _root(name, model, self._engine), log)

    def wait(self, seconds: float) -> None:
        """Wait until the weights are digested, so many seconds at most."""
        self._root.wait(seconds)

    def of(self, keys: Sequence[str]) -> list[bytes] | None:
        """Names of pages, 16 bytes each; None where it is not known what their KV is computed with."""
        root = self._root.value
        if root is None:
            return None
        start = hashlib.blake2b(root, digest_size=HASH_BYTES)
        names = []
        for key in keys:
            state = start.copy()
            state.update(key.encode())
            names.append(state.digest())
        return names


def _root(name: str, model: str, engine: Any | None) -> bytes:
    parts: list[bytes] = [name.encode()]
    if model:
        parts.append(digest_folder(folder_of(model, None)))
    elif engine is not None and str(engine.load_format) == "dummy":
        parts.append(f"dummy|{engine.model_path}|{engine.random_seed}".encode())
    elif engine is not None:
        parts.append(digest_folder(folder_of(engine.model_path, engine.revision)))
    if engine is not None:
        parts += [f"{field}={getattr(engine, field, None)}".encode() for field in ENGINE_FIELDS]
        scales = engine.quantization_param_path
        parts.append(b"" if scales is None else Path(scales).read_bytes())
        draft, revision = engine.speculative_draft_model_path, engine.speculative_draft_model_revision
        parts.append(b"" if draft is None else digest_folder(folder_of(draft, revision)))
        # SGLang numbers these adapters by name and path: other files there are another adapter.
        for adapter in sorted(map(str, engine.lora_paths or ())):
            parts.append(adapter.encode())
        for path in sorted(_adapter_paths(engine.lora_paths)):
            parts.append(digest_folder(folder_of(path, None)))
    state = hashlib.blake2b(digest_size=32)
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part)
    return ChainIdentity(state.digest()).root


def _adapter_paths(adapters: Any) -> list[str]:
    """Where the adapters of ``--lora-paths`` are, in any form that SGLang takes or makes of it."""
    if not adapters:
        return []
    if isinstance(adapters, dict):
        return [str(getattr(one, "lora_path", one)) for one in adapters.values()]
    paths = []
    for one in adapters:
        if isinstance(one, dict):
            paths.append(str(one["lora_path"]))
        elif isinstance(one, str):
            paths.append(one.partition("=")[2] or one)
        else:
            paths.append(str(one.lora_path))
    return paths
