"""Appending keys and values of new tokens to their blocks: one launch a layer.

On CUDA nothing waits for the device and no value is looked at, so calls can be captured into a graph, whose
padding are tokens with a block address of zero. Elsewhere it is the reference (`kernels/reference.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from ..tiers.errors import KernelError
from ..tiers.layout import KVLayout
from . import reference
from .arguments import DTYPES, expect, expect_planned, expect_readable
from .checks import access_bytes, expect_mapped
from .compiled import Kernel, load_kernel

__all__ = ["WritePlan", "write_kv", "write_plan"]

_PARAMETERS: Final = "Q Q q q q q Q Q i I I I Q Q Q"
_THREADS: Final = 256
_MOST_ITEMS: Final = 1 << 32


@dataclass(frozen=True)
class WritePlan:
    """Where the keys and values of a step's tokens go, checked once for all layers.

    Attributes:
        layout: the layout of the blocks.
        addresses: int64 [tokens], the block of each token.
        offsets: int32 or int64 [tokens], its row in the block.
        reference: what the reference found in their values; None on CUDA, where they are read by each launch.
    """

    layout: KVLayout
    addresses: torch.Tensor
    offsets: torch.Tensor
    reference: reference.WritePlan | None


def write_plan(addresses: torch.Tensor, offsets: torch.Tensor, layout: KVLayout) -> WritePlan:
    """What `write_kv` needs once a step for all layers; arguments and errors as there.

    On CUDA it stays good when the values in the tensors change.
    """
    if not addresses.is_cuda:
        found = reference.write_plan(addresses, offsets, layout)
        expect_mapped("addresses", addresses, layout.block_bytes)
        return WritePlan(layout, addresses, offsets, found)
    expect_readable(layout)
    tokens = addresses.shape[0] if addresses.dim() else 0
    expect("addresses", addresses, torch.int64, (tokens,))
    if offsets.dtype not in (torch.int32, torch.int64):
        raise KernelError(f"offsets must be int32 or int64, got {offsets.dtype}")
    expect("offsets", offsets, offsets.dtype, (tokens,), addresses.device)
    expect_mapped("addresses", addresses, layout.block_bytes)
    return WritePlan(layout, addresses.contiguous(), offsets.contiguous(), None)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    addresses: torch.Tensor,
    offsets: torch.Tensor,
    layer: int,
    layout: KVLayout,
    *,
    plan: WritePlan | None = None,
) -> None:
    """Write keys and values of tokens into one layer of their blocks, wherever these lie.

    Args:
        k, v: [tokens, kv_heads, head_dim] in the layout's dtype; tokens and heads may be any distance apart,
            and 16-byte accesses are used where all of them start on 16 bytes.
        addresses: int64 [tokens], the address of the block that each token lies in; tags are ignored. On CUDA
            nothing is written for an address of zero, which marks padding.
        offsets: int32 or int64 [tokens], the token's row in its block. No two tokens share a row.
        layer: index of the layer in the block.
        layout: the layout of the blocks.
        plan: `write_plan` of the same addresses, offsets and layout.

    Raises:
        KernelError: an argument does not fit, found before memory is written. On CUDA the values of addresses
            are looked at in debug mode only (`kernels/checks.py`), those of offsets not at all.
    """
    if plan is None:
        plan = write_plan(addresses, offsets, layout)
    if plan.reference is not None:
        reference.write_kv(k, v, addresses, offsets, layer, layout, plan=plan.reference)
        return
    expect_planned(plan.layout, layout, layer)
    tokens, device = plan.addresses.shape[0], plan.addresses.device
    shape = (tokens, layout.num_kv_heads, layout.head_dim)
    strides: list[int] = []
    for name, tensor in (("k", k), ("v", v)):
        expect(name, tensor, DTYPES[layout.dtype], shape, device)
        if tensor.stride(2) != 1 and layout.head_dim > 1:
            raise KernelError(f"{name} must be contiguous in its last dimension")
        strides += (
            stride * layout.item_bytes if size > 1 else 0
            for stride, size in zip(tensor.stride()[:2], shape[:2], strict=True)
        )
    if tokens == 0:
        return
    unit = access_bytes(k.data_ptr(), v.data_ptr(), layout.row_bytes, *strides)
    row_units = layout.row_bytes // unit
    count = tokens * layout.num_kv_heads * row_units
    if count >= _MOST_ITEMS:
        raise KernelError(f"k has {tokens} tokens, more than one launch writes")
    _kernel(device, unit, layout.swizzled).launch(
        -(-count // _THREADS),
        _THREADS,
        (
            k.data_ptr(),
            v.data_ptr(),
            *strides,
            plan.addresses.data_ptr(),
            plan.offsets.data_ptr(),
            plan.offsets.dtype == torch.int64,
            count,
            layout.num_kv_heads,
            row_units,
            layer * layout.page_bytes,
            layout.num_kv_heads * layout.slice_bytes,
            layout.slice_bytes,
        ),
        stream=torch.cuda.current_stream(device).cuda_stream,
    )


@cache
def _kernel(device: torch.device, unit_bytes: int, swizzled: bool) -> Kernel:
    defines = {"UNIT_BYTES": unit_bytes, "SWIZZLED": int(swizzled)}
    return load_kernel("write_kv.cu", "write_kv", _PARAMETERS, device=device, defines=defines)
