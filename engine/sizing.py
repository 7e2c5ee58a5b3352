"""Where an engine runs, how large its tiers are, and what moves blocks between them.

All of it comes from settings that may leave it to the machine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Final

import torch

from ..kernels.copy_blocks import AddressCopier
from ..kvstore.calibration import known_calibration, read_calibration
from ..kvstore.cost_estimates import CostEstimates
from ..tiers.arena import MOST_BLOCKS
from ..tiers.errors import ConfigError, KernelError, MemoryUnavailableError
from ..tiers.layout import KVLayout
from ..tiers.memory import memory_headroom
from ..tiers.mover import CudaMover, HostMover, Mover
from .loader import LoadedModel, find_device, find_dtype, load_model

__all__ = [
    "costs_on",
    "default_host_bytes",
    "device_blocks_of",
    "device_name",
    "loaded_on",
    "mover_on",
    "told_by_bytes",
]

_log = logging.getLogger(__name__)

_CPU_DEVICE_BYTES: Final = 256 << 20
_GPU_SHARE: Final = 0.85
_HOST_SHARE: Final = 0.25
_MIN_HOST_BYTES: Final = 64 << 20


def loaded_on(model: str | Path | LoadedModel, device: str, dtype: str) -> tuple[LoadedModel, str]:
    """A model that is loaded, and the device it is on.

    Args:
        model: a loaded one, or what `load_model` takes.
        device: where to load it; ``auto`` of a loaded one is where it is.
        dtype: what to compute in, likewise.

    Raises:
        ConfigError: there is no such device or dtype, or the model was loaded on or in another.
        ModelError: the model cannot be read.
    """
    wanted = find_dtype(dtype)
    if not isinstance(model, LoadedModel):
        place = find_device(device)
        return load_model(model, dtype=dtype, device=place), str(place)
    there = model.model.device
    place = there if device == "auto" else find_device(device)
    if place != there:
        raise ConfigError("device", f"the model was loaded on {there}, so it cannot run on {place}")
    if wanted not in (None, model.model.dtype):
        own = str(model.model.dtype).removeprefix("torch.")
        raise ConfigError("dtype", f"the model was loaded in {own}, so it cannot run in {dtype}")
    return model, str(place)


def device_blocks_of(layout: KVLayout, device: str, blocks: int | None, size: int | None) -> int:
    """Blocks of the device tier, from whichever of `device_blocks` and `device_bytes` says it.

    Raises:
        ConfigError: both do, or there is no room for a block.
    """
    if blocks is not None:
        if size is not None:
            raise ConfigError("device_bytes", "give this or device_blocks, not both")
        return blocks
    if size is None:
        size = _CPU_DEVICE_BYTES
        if device != "cpu":
            size = int(_GPU_SHARE * torch.cuda.mem_get_info(device)[0])
    if size < layout.block_bytes:
        raise ConfigError("device_bytes", f"must hold a block of {layout.block_bytes} bytes, got {size}")
    if size // layout.block_bytes > MOST_BLOCKS:
        most = MOST_BLOCKS * layout.block_bytes
        raise ConfigError("device_bytes", f"must be at most {most}, {MOST_BLOCKS} blocks, got {size}")
    return size // layout.block_bytes


@contextmanager
def told_by_bytes(size: int | None) -> Iterator[None]:
    """A device tier that does not fit is the fault of `device_bytes`, where that is what said its size."""
    try:
        yield
    except MemoryUnavailableError as error:
        setting, _, problem = str(error).partition(": ")
        if size is None or setting != "device_blocks":
            raise
        raise MemoryUnavailableError(f"device_bytes: {problem}") from error


def default_host_bytes() -> int:
    """Bytes of the host tier where no setting says it: a quarter of the memory that is available."""
    return max(_MIN_HOST_BYTES, int(_HOST_SHARE * memory_headroom().usable_bytes))


def device_name(device: str) -> str:
    """What a device is called in calibrations: ``cpu``, or as a GPU calls itself."""
    return "cpu" if device == "cpu" else torch.cuda.get_device_name(device)


def costs_on(
    device: str,
    layout: KVLayout,
    identity: bytes,
    *,
    calibration: str | Path | None,
    cold: str | None,
    step_tokens: int,
) -> CostEstimates:
    """What an engine knows of its costs when it begins.

    Args:
        device: that it runs on.
        layout: of its blocks.
        identity: of its model.
        calibration: the file, or None for the usual one, which is passed over where it is damaged.
        cold: the kind of its cold tier, or None.
        step_tokens: tokens that a step computes at most.

    Raises:
        ConfigError: the file that is named cannot be read, or is no calibration.
    """
    found = known_calibration() if calibration is None else read_calibration(Path(calibration))
    model = None
    if found is not None:
        name = device_name(device)
        model = found.cost_model(
            layout.block_size, layout.block_bytes, device=name, identity=identity, cold=cold
        )
    return CostEstimates(layout.block_size, layout.block_bytes, model, step_tokens=step_tokens)


def mover_on(device: str) -> Mover:
    """What copies the blocks of an engine on a device; its caller closes it.

    Raises:
        ConfigError: there is no such device, or cuda-python is not installed.
    """
    return HostMover() if device == "cpu" else CudaMover(device, _copier(device))


@cache  # compiled once for all engines of a device, and told once where it cannot be
def _copier(device: str) -> AddressCopier | None:
    """The kernel that copies short runs; None where it cannot be compiled, and DMA copies them too."""
    try:
        return AddressCopier(device)
    except KernelError as error:
        _log.warning("small blocks are copied by DMA, several times slower than by a kernel: %s", error)
        return None
