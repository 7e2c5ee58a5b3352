"""Checks of what kernels are called with: a wrong dtype, shape or device is told before anything is launched.

Only what a tensor says of itself is looked at. Its values are in `kernels/checks.py`, in debug mode.
"""

from __future__ import annotations

from typing import Final

import torch

from ..tiers.errors import KernelError
from ..tiers.layout import KVLayout

__all__ = [
    "DTYPES",
    "expect",
    "expect_attention",
    "expect_kernel_tensors",
    "expect_planned",
    "expect_positive_scale",
    "expect_readable",
    "expect_rows",
    "table_shape",
]

DTYPES: Final = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
"""Of the layouts whose bytes are keys and values."""

_ROW_START: Final = 16
"""Bytes that the rows of queries and results start on multiples of: the widest access of a kernel."""


def expect(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device | None = None,
) -> None:
    """Refuse a tensor of another dtype, shape or device.

    Raises:
        KernelError: naming the argument.
    """
    if tensor.dtype != dtype:
        raise KernelError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise KernelError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
    if device is not None and tensor.device != device:
        raise KernelError(f"{name} must be on {device}, it is on {tensor.device}")


def table_shape(block_table: torch.Tensor) -> tuple[int, int]:
    """Sequences and columns of a block table.

    Raises:
        KernelError: it is none.
    """
    if block_table.dtype != torch.int64 or block_table.dim() != 2:
        raise KernelError(
            f"block_table must be int64 [seqs, max_blocks], got {block_table.dtype} {list(block_table.shape)}"
        )
    return block_table.shape[0], block_table.shape[1]


def expect_rows(block_table: torch.Tensor, seq_lens: torch.Tensor) -> int:
    """What a kernel reads a step's sequences from; returns how many there are.

    Raises:
        KernelError: `block_table` is not int64 [seqs, max_blocks] with contiguous rows, or `seq_lens` not
            int32 [seqs], contiguous.
    """
    seqs, _ = table_shape(block_table)
    expect("seq_lens", seq_lens, torch.int32, (seqs,), block_table.device)
    if not seq_lens.is_contiguous():
        raise KernelError("seq_lens must be contiguous")
    if block_table.stride(1) != 1:
        raise KernelError("block_table must have contiguous rows")
    return seqs


def expect_readable(layout: KVLayout) -> None:
    """Refuse a layout that attention cannot read.

    Raises:
        KernelError: it has no keys and values, or they are not float16, bfloat16 or float32.
    """
    if layout.dtype not in DTYPES or layout.planes != 2 or layout.format not in ("swizzled", "plain"):
        raise KernelError(
            "attention reads keys and values of float16, bfloat16 or float32, swizzled or plain; "
            f"this layout is {layout.planes} planes of {layout.dtype}, {layout.format}"
        )


def expect_planned(planned: KVLayout, layout: KVLayout, layer: int) -> None:
    """Refuse a plan of another layout, and a layer that the layout does not have.

    Raises:
        KernelError: saying which.
    """
    if planned is not layout and planned != layout:
        raise KernelError("the plan was made for another layout")
    if not 0 <= layer < layout.num_layers:
        raise KernelError(f"layer must lie in 0..{layout.num_layers - 1}, got {layer}")


def expect_attention(
    q: torch.Tensor,
    layout: KVLayout,
    queries: int,
    device: torch.device,
    *,
    window: int | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None = None,
) -> tuple[int, torch.Tensor]:
    """What every attention takes: queries, and where results go.

    Args:
        q: [queries, q_heads, head_dim] in the layout's dtype.
        queries: how many there must be.
        device: where all tensors must be.
        window: tokens that a query sees, or None.
        out: shape and dtype of `q`, or None.
        lse: float32 [queries, q_heads], or None.

    Returns:
        query heads of a KV head, and `out`, made if it was None.

    Raises:
        KernelError: an argument does not fit.
    """
    q_heads = q.shape[1] if q.dim() == 3 else 0
    expect("q", q, DTYPES[layout.dtype], (queries, q_heads, layout.head_dim), device)
    if q_heads == 0 or q_heads % layout.num_kv_heads:
        raise KernelError(f"{q_heads} query heads do not divide into {layout.num_kv_heads} KV heads")
    if window is not None and window < 1:
        raise KernelError(f"window must be a positive number of tokens or None, got {window}")
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=device)
    else:
        expect("out", out, q.dtype, tuple(q.shape), device)
    if lse is not None:
        expect("lse", lse, torch.float32, (queries, q_heads), device)
    return q_heads // layout.num_kv_heads, out


def expect_positive_scale(scale: float | None) -> None:
    """Refuse a scale that kernels cannot mask with.

    Raises:
        KernelError: it is not positive.
    """
    if scale is not None and not scale > 0:
        raise KernelError(f"scale must be positive, got {scale}")


def expect_kernel_tensors(
    q: torch.Tensor,
    out: torch.Tensor,
    block_table: torch.Tensor,
    install: torch.Tensor | None,
    lse: torch.Tensor | None = None,
) -> None:
    """What kernels ask of their tensors' memory, beyond `expect_attention`.

    Raises:
        KernelError: rows of queries or results do not lie in one piece from a multiple of 16 bytes on,
            `install` is not int64 of the table's shape with contiguous rows, or `lse` is not contiguous.
    """
    for name, tensor in (("q", q), ("out", out)):
        row_bytes = tensor.stride(0) * tensor.element_size()
        if (
            tensor.stride()[1:] != (tensor.shape[2], 1)
            or tensor.data_ptr() % _ROW_START
            or row_bytes % _ROW_START
        ):
            raise KernelError(f"{name} must have contiguous heads and start every row on {_ROW_START} bytes")
    if lse is not None and not lse.is_contiguous():
        raise KernelError("lse must be contiguous")
    if install is not None:
        expect("install", install, torch.int64, tuple(block_table.shape), block_table.device)
        if install.stride(1) != 1:
            raise KernelError("install must have contiguous rows")
