"""What the KV of a vLLM engine depends on, by content: the roots of its chains."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ....kvstore.hashing import ChainIdentity
from ..weights import Digest, digest_folder, folder_of, last_change, state_of_folder

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

__all__ = ["ChainRoots", "digest_model"]

_ROPE_BY_LENGTH: Final = (b'"longrope"', b'"su"', b'"dynamic"')
"""Kinds of RoPE whose parameters vLLM takes by how long a request may become."""
_NOT_CONTENT: Final = frozenset({"_name_or_path", "transformers_version"})


def digest_model(config: VllmConfig) -> bytes:
    """32 bytes that name what this engine computes KV with.

    Weights by content; the model's configuration as vLLM resolved it, RoPE and windows included; how it
    computes and keeps it: types, quantisation.

    Raises:
        OSError: the weights cannot be read here.
    """
    model = config.model_config
    state = hashlib.blake2b(digest_size=32)
    configuration = _as_text(model.hf_config.to_dict())
    parts = [
        _digest_weights(model, config.load_config.load_format),
        configuration,
        str(model.dtype).encode(),
        str(model.quantization).encode(),
        str(config.cache_config.cache_dtype).encode(),
    ]
    if any(kind in configuration for kind in _ROPE_BY_LENGTH):
        parts.append(str(model.max_model_len).encode())
    speculative = config.speculative_config
    if speculative is not None and speculative.draft_model_config is not None:
        draft = speculative.draft_model_config
        parts += [str(speculative.method).encode(), _digest_weights(draft, config.load_config.load_format)]
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part)
    return state.digest()


def _digest_weights(model: ModelConfig, load_format: object) -> bytes:
    if str(load_format) == "dummy":
        return f"dummy|{model.seed}".encode()
    return digest_folder(folder_of(model.model, model.revision))


def _as_text(values: dict[str, Any]) -> bytes:
    kept = {key: value for key, value in values.items() if key not in _NOT_CONTENT}
    return json.dumps(kept, sort_keys=True, default=str).encode()


class ChainRoots:
    """The roots of an engine's chains: of its model, and of each adapter and salt.

    The model's digest is made in a thread: it reads weights that are not from a cache of digests. Until it is
    known, and where it cannot be made, nothing is named.

    Args:
        config: vLLM's.
        log: where it is said that there is none.
    """

    def __init__(self, config: VllmConfig, log: logging.Logger) -> None:
        self._model = Digest(lambda: digest_model(config), log)
        self._adapters = _Adapters(log)
        self._epoch = 0

    def wait(self, seconds: float) -> None:
        """Wait until the model's digest is known, so many seconds at most."""
        self._model.wait(seconds)

    def root(self, request: Request) -> bytes | None:
        """The root of a request's chain; None where it is not known. May read an adapter's files."""
        model = self._model.value
        if model is None:
            return None
        adapter = b""
        if request.lora_request is not None:
            digest = self._adapters.digest(request.lora_request)
            if digest is None:
                return None
            adapter = digest
        salt = (request.cache_salt or "").encode()
        return ChainIdentity(model, adapter, epoch=self._epoch, salt=salt).root

    def reset(self) -> None:
        """Weights were changed in place: from now on KV is shared with no engine, not with itself before."""
        self._epoch = int.from_bytes(os.urandom(8), "little") | 1


class _Adapters:
    """Digests of adapters by their numbers, each made once for a state of its files.

    vLLM loads an adapter's files when it is told to or when it is first used, and again where a request says
    so; the connector sees requests alone. Of some files nobody knows whether they are what is loaded:

    - those that have changed since the engine started, at an adapter's first request: its digest is of this
      engine alone, as its own prefix cache is;
    - those that have changed since they were digested, and no request said so: then it has none.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._known: dict[int, tuple[object, bytes | None]] = {}
        self._lock = threading.Lock()
        self._started = time.time_ns()

    def digest(self, adapter: LoRARequest) -> bytes | None:
        with self._lock:
            known = self._known.get(adapter.lora_int_id)
            try:
                folder = folder_of(adapter.lora_path, None)
                state = (str(folder), state_of_folder(folder))
                if known is None or adapter.load_inplace:
                    if known is None or known[0] != state:
                        known = (state, self._digest_files(adapter, folder))
                elif known[0] != state and known[1] is not None:
                    self._log.warning(
                        "kvpager: the files of adapter %s have changed: nothing is found or kept of it until "
                        "it is loaded under another number, or in place",
                        adapter.lora_name,
                    )
                    known = (known[0], None)
            except (OSError, ValueError) as error:  # also of a name that is neither a folder's nor the Hub's
                if known is None or known[1] is not None:
                    self._log.warning(
                        "kvpager: nothing is found or kept of adapter %s: its files cannot be digested (%s)",
                        adapter.lora_name,
                        error,
                    )
                known = ((), None)
            self._known[adapter.lora_int_id] = known
            return known[1]

    def _digest_files(self, adapter: LoRARequest, folder: Path) -> bytes:
        digest = digest_folder(folder)
        if adapter.load_inplace or last_change(folder) <= self._started:
            return digest
        self._log.info(
            "kvpager: the files of adapter %s are newer than this engine, which may have loaded others: what "
            "is kept of it is found by this engine alone, until it is started again",
            adapter.lora_name,
        )
        return hashlib.blake2b(digest, key=os.urandom(32), digest_size=32).digest()
