"""What `kvpager bench` measures of a GPU: copies to and from page-locked memory, and reads of it in place."""

from __future__ import annotations

import importlib.util
from contextlib import closing
from typing import Final

import numpy as np

from ..tiers.driver import why_no_driver
from ..tiers.errors import KVPagerError
from ..tiers.extras import how_to_install
from ..tiers.mover import CudaMover
from ..tiers.pinned import PinnedArena
from .bench_memory import BLOCK
from .measurements import Measurement, Unit
from .turns import median_seconds

__all__ = ["measure_gpu", "why_no_gpu"]

_DEVICE: Final = "cuda:0"
_ARENA_BYTES: Final = 512 << 20
_SMALL_BYTES: Final = 64 << 10
"""Of blocks that go by the copy kernel."""


def why_no_gpu() -> str | None:
    """None where a GPU can be measured, else why not, in words."""
    reason = why_no_driver()
    if reason is not None:
        return f"no GPU: {reason}"
    for package, extra in (("cuda.bindings", "cuda"), ("cuda.core", "cuda"), ("torch", "engine")):
        if importlib.util.find_spec(package.partition(".")[0]) is None:
            return f"{package} is missing: {how_to_install(extra)}"
    return None


def measure_gpu(seconds: float) -> list[Measurement]:
    """Copies over the bus in one piece and as blocks, and reads of host memory by a kernel.

    Args:
        seconds: how long it may take, beside page-locking half a GiB.

    Raises:
        KVPagerError: memory cannot be page-locked, or the driver refuses something.
    """
    from ..kernels.copy_blocks import AddressCopier

    with (
        closing(CudaMover(_DEVICE, AddressCopier(_DEVICE))) as mover,
        PinnedArena(_ARENA_BYTES, device=_DEVICE) as arena,
    ):
        arena.wait_ready()
        if not arena.is_page_locked(np.arange(arena.num_extents)).all():
            raise KVPagerError("host memory cannot be page-locked for the GPU: see kvpager doctor")
        # A copy in one piece may not cross from one registration into the next.
        nbytes = arena.extent_bytes
        taken = _taken(arena, nbytes, mover, seconds)
    words = {
        "host_to_device": ("DMA from host memory to the GPU, one piece", None),
        "load": ("blocks of 2 MiB, from host memory to the GPU", "host_to_device"),
        "device_to_host": ("DMA from the GPU to host memory, one piece", None),
        "store": ("blocks of 2 MiB, from the GPU to host memory", "device_to_host"),
        "host_read": ("reads of host memory in place, by a kernel", None),
        "pull": ("blocks of 64 KiB, pulled from host memory by a kernel", "host_read"),
    }
    return [
        Measurement(name, what, nbytes / taken[name], Unit.BYTES_PER_SECOND, ceiling)
        for name, (what, ceiling) in words.items()
    ]


def _taken(arena: PinnedArena, nbytes: int, mover: CudaMover, seconds: float) -> dict[str, float]:
    """Median seconds of each way over the bus, by name, for `nbytes` from the arena's beginning."""
    import torch

    from ..kernels.read_words import read_words
    from ..tiers.arena import DeviceArena

    with closing(DeviceArena(nbytes, 1, _DEVICE)) as vram:
        host = torch.from_numpy(np.frombuffer(arena.view(0, nbytes), np.uint8))
        host.random_(0, 256)
        device = vram.slab[0, :nbytes]
        stream = torch.cuda.current_stream(torch.device(_DEVICE))
        out = torch.zeros(1, dtype=torch.int32, device=_DEVICE)
        rng = np.random.default_rng(0)

        def one_piece(target: torch.Tensor, source: torch.Tensor) -> None:
            target.copy_(source, non_blocking=True)
            stream.synchronize()

        def blocks(source: int, target: int, size: int) -> None:
            places = [rng.permutation(nbytes // size).astype(np.int64) * size for _ in range(2)]
            mover.copy(source + places[0], target + places[1], size).wait()

        def in_place() -> None:
            read_words(arena.base, nbytes, out)
            stream.synchronize()

        near, far = vram.base, arena.base
        taken = median_seconds(
            {
                "host_to_device": lambda: one_piece(device, host),
                "device_to_host": lambda: one_piece(host, device),
                "load": lambda: blocks(far, near, BLOCK.block_bytes),
                "store": lambda: blocks(near, far, BLOCK.block_bytes),
                "host_read": in_place,
                "pull": lambda: blocks(far, near, _SMALL_BYTES),
            },
            seconds,
        )
        torch.cuda.synchronize()
        return taken
