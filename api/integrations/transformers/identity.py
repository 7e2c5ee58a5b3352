"""What the KV of a model in this process depends on, by content.

Weights are known by their bytes as they are in memory, and not by a name, a revision or files: these do not
know of what was trained, merged, quantised or loaded into the model since.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import torch
import transformers
from torch.utils.weak import WeakIdRef

from ....tiers.errors import LayoutError

__all__ = ["ModelIdentity", "ModelState"]

_PART_BYTES: Final = 32 << 20
_MOST_THREADS: Final = 16
_SAMPLED: Final = 256
"""Numbers of every tensor that are looked at to tell whether it was written to."""
_NOT_CONTENT: Final = frozenset({"_name_or_path", "transformers_version", "_attn_implementation"})


@dataclass(frozen=True)
class ModelState:
    """Equal to another of the same model where nothing has changed between them, as far as it can be told.

    Args:
        passing: what one forward pass may be computed with and the next one without, see
            `ModelIdentity.passing`.
        lasting: the tensors themselves, a sample of what they hold, and the configuration.
    """

    passing: object
    lasting: object


class ModelIdentity:
    """The digest of a model, made again where something of it has changed.

    Args:
        model: of transformers, adapters within it or not.
        device: kind of the device that keys and values are on: their last bits depend on it.
    """

    def __init__(self, model: Any, device: str) -> None:
        self._model = model
        self._device = device
        self._state: ModelState | None = None
        self._epoch = 0
        self._digest = b""

    def digest(self, state: ModelState) -> bytes:
        """32 bytes that name the model as it is now. Reads its weights where they have changed.

        Args:
            state: of it, as it is now.

        Raises:
            LayoutError: the weights' bytes are not to be had.
        """
        if state != self._state:
            self._digest, self._state = self._digest_all(), state
        return self._digest

    def state(self) -> ModelState:
        """What the model is now; waits for its device.

        Torch counts writes to a tensor, but not those through ``.data``, as peft merges adapters: of these it
        is a sample of every tensor that differs.

        Raises:
            LayoutError: the weights' bytes are not to be had.
        """
        tensors = list(self._held())
        # A tensor that takes the place of another may have its address and count of writes too.
        known = tuple((WeakIdRef(one), one.dtype, tuple(one.shape), one.requires_grad) for one in tensors)
        return ModelState(self.passing(), (known, _sample(tensors), self._described()))

    def passing(self) -> object:
        """What a pass is computed with, cheaply: equal for passes whose keys and values go together.

        That is where tensors lie and how often they were written to, adapters that are in use, and autocast.
        """
        tensors = tuple((_address(one), _version(one)) for one in self._held())
        return self._epoch, tensors, self._cast(), tuple(_adapters(self._model))

    def forget(self) -> None:
        """The weights may have changed though torch does not know it."""
        self._epoch += 1

    def _held(self) -> Iterator[torch.Tensor]:
        yield from self._model.parameters()
        yield from self._model.buffers()

    def _cast(self) -> str:
        """What the same weights compute in under autocast, which is something else."""
        return str(torch.get_autocast_dtype(self._device)) if torch.is_autocast_enabled(self._device) else ""

    def _described(self) -> str:
        values = {
            key: value for key, value in self._model.config.to_dict().items() if key not in _NOT_CONTENT
        }
        release = ".".join(transformers.__version__.split(".")[:2])
        parts = [type(self._model).__name__, self._device, self._cast(), release, values]
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


def _sample(tensors: list[torch.Tensor]) -> bytes:
    """Some numbers of each, spread over it, as they are in memory."""
    parts: dict[torch.device, list[torch.Tensor]] = {}
    for one in tensors:
        if one.device.type == "meta" or not one.numel():
            continue
        try:
            numbers = one.detach().reshape(-1)
            places = numbers.view(torch.uint8).reshape(len(numbers), -1)[:: -(-len(numbers) // _SAMPLED)]
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise LayoutError(f"weights of kind {type(one).__name__} cannot be read: {error}") from error
        parts.setdefault(one.device, []).append(places.reshape(-1))
    # One copy for each device.
    return b"".join(torch.cat(some).cpu().numpy().tobytes() for some in parts.values())


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() if tensor.device.type != "meta" else 0


def _version(tensor: torch.Tensor) -> int:
    """How often it was written to, as far as torch knows."""
    return 0 if tensor.is_inference() else tensor._version


def _tuned(model: Any) -> Iterator[tuple[str, Any, list[str]]]:
    """Modules of peft's, by name, with the adapters that are in use in each."""
    if "peft" not in sys.modules:
        return
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
