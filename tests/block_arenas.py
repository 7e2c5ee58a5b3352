"""Memory for blocks in the tests of the block kernels, and where each row of a block has its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from kvpager import KVLayout
from kvpager.tiers.address import FAR

POISON = 0xA5
PLACES = [
    "cpu",
    pytest.param("vram", marks=pytest.mark.gpu),
    pytest.param("host", marks=pytest.mark.gpu),
]
"""Where blocks may lie: the CPU's own memory; or a GPU's, and page-locked memory that it reads in place."""
GPU_PLACES = PLACES[1:]


@dataclass(frozen=True)
class Arena:
    """Slots of equal size, filled with poison.

    Attributes:
        rows: uint8 [slots, slot_bytes].
        addresses: int64 [slots], on the device that computes; tagged *far* in host memory.
    """

    rows: torch.Tensor
    addresses: torch.Tensor

    @classmethod
    def make(cls, place: str, slot_bytes: int, slots: int) -> Arena:
        device = "cuda" if place == "vram" else "cpu"
        nbytes = slot_bytes * slots
        memory = torch.empty(nbytes + 128, dtype=torch.uint8, device=device, pin_memory=place == "host")
        start = -memory.data_ptr() % 128
        rows = memory[start : start + nbytes].view(slots, slot_bytes).fill_(POISON)
        addresses = torch.arange(slots) * slot_bytes + rows.data_ptr() + (FAR if place == "host" else 0)
        return cls(rows, addresses.to(computing_device(place)))

    def bytes(self) -> torch.Tensor:
        """What the slots hold, on the CPU, once all that was enqueued is done."""
        if self.addresses.is_cuda:
            torch.cuda.synchronize()
        return self.rows.cpu().clone()


def computing_device(place: str) -> torch.device:
    """The device whose kernels work on blocks that lie there."""
    return torch.device("cpu" if place == "cpu" else "cuda")


def random_bytes(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, tuple(shape), dtype=torch.uint8, generator=generator)


def random_elements(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Elements of random bits, without NaN, of which torch's own operations alter a bit."""
    *rest, last = shape
    elements = random_bytes((*rest, last * dtype.itemsize), generator).view(dtype)
    return elements.masked_fill_(elements.isnan(), 1) if dtype.is_floating_point else elements


def put_row(
    block: torch.Tensor, layout: KVLayout, layer: int, plane: int, head: int, token: int, row: torch.Tensor
) -> None:
    """Put one token's row of one head into a block (uint8 [block_bytes]), where the layout has it."""
    start = layer * layout.page_bytes + (plane * layout.num_kv_heads + head) * layout.slice_bytes
    start += token * layout.row_bytes
    data = row.contiguous().view(torch.uint8)
    if layout.swizzled:
        for chunk in range(layout.row_bytes // 16):
            to = start + (chunk ^ (token % 8)) * 16
            block[to : to + 16] = data[chunk * 16 : chunk * 16 + 16]
    else:
        block[start : start + layout.row_bytes] = data
