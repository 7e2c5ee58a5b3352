"""What the KV of a model in this process depends on, by content.

Weights are known by their bytes as they are in memory, and not by a name, a revision or files: these do not
know of what was trained, merged, quantised or loaded into the model since.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch
import transformers

from ....tiers.errors import LayoutError

__all__ = ["ModelIdentity"]

_PART_BYTES: Final = 32 << 20
_MOST_THREADS: Final = 16
_NOT_CONTENT: Final = frozenset({"_name_or_path", "transformers_version", "_attn_implementation"})


class ModelIdentity:
    """The digest of a model, made again where something of it has changed.

    Args:
        model: of transformers, adapters within it or not.
        device: kind of the device that keys and values are on: their last bits depend on it.
    """

    def __init__(self, model: Any, device: str) -> None:
        self._model = model
        self._device = device
        self._state: object = None
        self._epoch = 0
        self._digest = b""

    def digest(self) -> bytes:
        """32 bytes that name the model as it is now. Reads its weights where they have changed.

        Raises:
            LayoutError: the weights' bytes are not to be had.
        """
        state = self.state()
        if state != self._state:
            self._digest, self._state = self._digest_all(), state
        return self._digest

    def state(self) -> object:
        """Equal where nothing has changed that torch takes note of; of writes to ``.data`` it takes none."""
        tensors = tuple(
            (one.data_ptr() if one.device.type != "meta" else 0, _version(one), one.dtype, tuple(one.shape))
            for some in (self._model.parameters(), self._model.buffers())
            for one in some
        )
        return self._epoch, tensors, self._described(), tuple(_adapters(self._model))

    def forget(self) -> None:
        """The weights may have changed though torch does not know it."""
        self._epoch += 1

    def _described(self) -> str:
        values = {
            key: value for key, value in self._model.config.to_dict().items() if key not in _NOT_CONTENT
        }
        release = ".".join(transformers.__version__.split(".")[:2])
        # Under autocast the same weights compute something else.
        cast = str(torch.get_autocast_dtype(self._device)) if torch.is_autocast_enabled(self._device) else ""
        parts = [type(self._model).__name__, self._device, cast, release, values]
        return json.dumps(parts, sort_keys=True, default=str)

    def _digest_all(self) -> bytes:
        digest = hashlib.blake2b(digest_size=32)
        for text in (self._described(), *_adapters(self._model)):
            digest.update(f"{len(text.encode())}|{text}".encode())
        tensors = list(_tensors(self._model))
        with ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS)) as threads:
            read = threads.map(_digest_tensor, (one for _, one in tensors))
            for (name, one), found in zip(tensors, read, strict=True):
                digest.update(f"{len(name)}|{name}|{one.dtype}|{tuple(one.shape)}|".encode() + found)
        return digest.digest()


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """By name: parameters, all buffers, and what else a state dict has, such as scales of quantisation.

    Those of adapters that are not in use are left out, and names are those without adapters.
    """
    idle = _idle_adapters(model)
    for name, value in sorted({**dict(model.named_buffers()), **model.state_dict(keep_vars=True)}.items()):
        if any(name.startswith(one) and name[len(one) :][:1] in ("", ".") for one in idle):
            continue
        plain = name.replace(".base_layer.", ".")
        if isinstance(value, torch.Tensor):
            yield plain, value
        elif value is not None:
            yield plain, torch.tensor(list(repr(value).encode()), dtype=torch.uint8)


def _digest_tensor(tensor: torch.Tensor) -> bytes:
    """32 bytes of what a tensor holds."""
    if tensor.device.type == "meta":
        raise LayoutError("weights that are offloaded (they are on the device meta) cannot be digested")
    state = hashlib.blake2b(digest_size=32)
    try:
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        for start in range(0, len(flat), _PART_BYTES):
            state.update(flat[start : start + _PART_BYTES].cpu().numpy().data)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise LayoutError(f"weights of kind {type(tensor).__name__} cannot be digested: {error}") from error
    return state.digest()


def _version(tensor: torch.Tensor) -> int:
    """How often it was written to, as far as torch knows."""
    return 0 if tensor.is_inference() else tensor._version


def _tuned(model: Any) -> Iterator[tuple[str, Any, list[str]]]:
    """Modules of peft's, by name, with the adapters that are in use in each."""
    for name, module in model.named_modules():
        if hasattr(module, "adapter_layer_names") and hasattr(module, "active_adapters"):
            yield name, module, [] if module.disable_adapters else list(module.active_adapters)


def _adapters(model: Any) -> Iterator[str]:
    """What is said of adapters in use beside their weights."""
    for name, module, active in _tuned(model):
        if active or getattr(module, "merged_adapters", None):
            scaling = getattr(module, "scaling", {})
            scales = {one: repr(scaling.get(one)) for one in active}
            yield json.dumps(
                [name, type(module).__name__, scales, list(module.merged_adapters)], sort_keys=True
            )


def _idle_adapters(model: Any) -> list[str]:
    """Beginnings of the names of what belongs to adapters that are not in use."""
    idle = []
    for name, module, active in _tuned(model):
        for kind in (*module.adapter_layer_names, *getattr(module, "other_param_names", ())):
            held = getattr(module, kind, None)
            if held is not None and hasattr(held, "keys"):
                idle += [f"{name}.{kind}.{adapter}" for adapter in held if adapter not in active]
    return idle
