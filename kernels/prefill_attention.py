"""Causal attention of chunks of queries over blocks at raw addresses: the prefill step's kernel.

On a GPU of compute capability 9.0 or later, keys and values come into shared memory by bulk copies and are
multiplied on the tensor cores ("FlashAttention-2", Dao 2023, https://arxiv.org/abs/2307.08691). Every tile of
queries reads its whole prefix, so pages that lie far are brought to VRAM first: each once a layer, a layer
ahead of use, by a few CTAs on a stream of their own, which suit a layer's page of a block better than the
copy engine does (one H200, PCIe 5 x16: 51 GB/s at any size, where single DMA copies of 64 KiB reach 17):

- A page whose word is tagged *install* goes to its place in the install table, and stays.
- Others go through a staging ring of two layers. What it has no room for is read in place, by every tile:
  right, and slow.

Elsewhere, and for layouts that the kernel does not read, `kernels/reference.py` answers.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Final

import torch

from ..tiers.errors import KernelError
from ..tiers.layout import KVLayout
from . import reference
from .arguments import (
    expect,
    expect_attention,
    expect_kernel_tensors,
    expect_planned,
    expect_positive_scale,
    expect_rows,
)
from .checks import expect_rows_mapped
from .compiled import Kernel, load_kernel
from .copy_blocks import copy_counted
from .decode_attention import has_kernel, multiprocessors
from .reference import AttentionPlan

__all__ = ["PrefillPlan", "prefill_attention", "prefill_plan"]

_PROBLEM: Final = "QqQQiQqQQQQQqqqiiiiiiif"
_RESOLUTION: Final = "QqQqQiiiiQQQQQQQQ"
"""The structs of the kernels, as `load_kernel` takes them."""

_RESOLVE_THREADS: Final = 256
_MERGE_THREADS: Final = 128
_MMA_ROWS: Final = 16
_LOG2_E: Final = math.log2(math.e)
_STAGING_BYTES: Final = 64 << 20
"""Of a layer's pages in the staging ring, at most; the ring holds two layers."""
_RING_LAYERS: Final = 2
_SPLIT_TOKENS: Final = 512
"""Fewer keys than this are not divided among CTAs."""
_MOST_SPLITS: Final = 32


@dataclass(frozen=True)
class _Form:
    """How the kernel is compiled: tokens of a tile, stages of the ring, warps that attend."""

    tile: int
    stages: int
    warps: int

    def shared_bytes(self, row_bytes: int) -> int:
        return self.stages * (self.tile * 2 * row_bytes + 16)


_FORMS: Final = {
    64: _Form(128, 4, 8),
    80: _Form(64, 4, 8),
    96: _Form(64, 4, 8),
    128: _Form(64, 4, 8),
    256: _Form(64, 3, 4),
}


class _Bringer:
    """Brings far pages to where attention reads them, one layer after the other, on a stream of its own.

    Args:
        plan: the plan whose words are resolved.
        install: the install table, or None.
    """

    def __init__(self, plan: PrefillPlan, install: torch.Tensor | None) -> None:
        table = plan.block_table
        device = table.device
        seqs, columns = table.shape
        layout = plan.layout
        words = seqs * columns
        self._layout = layout
        self._pages = min(words, plan.staging_pages) if plan.far else 0
        self.words = torch.empty((seqs, columns), dtype=torch.int64, device=device)
        self._lists = torch.empty((4, max(1, words)), dtype=torch.int64, device=device)
        self._counts = torch.zeros(2, dtype=torch.int32, device=device)
        self._ring = torch.empty(
            _RING_LAYERS * self._pages * layout.page_bytes, dtype=torch.uint8, device=device
        )
        self._stream = _side_stream(device)
        self._installs = install is not None
        self._installed: dict[int, torch.cuda.Event] = {}
        self._staged: dict[int, tuple[int, torch.cuda.Event]] = {}
        self._attended: dict[int, torch.cuda.Event] = {}
        arguments = (
            table.data_ptr(),
            table.stride(0),
            0 if install is None else install.data_ptr(),
            0 if install is None else install.stride(0),
            plan.seq_lens.data_ptr(),
            seqs,
            layout.block_size,
            columns,
            self._pages,
            self.words.data_ptr(),
            *(self._lists[i].data_ptr() for i in range(4)),
            self._counts.data_ptr(),
            self._ring.data_ptr(),
            layout.page_bytes,
        )
        stream = torch.cuda.current_stream(device)
        for name in ("resolve", "follow"):
            _kernel(name, _RESOLUTION, layout, device).launch(
                (-(-columns // _RESOLVE_THREADS), seqs),
                _RESOLVE_THREADS,
                arguments,
                stream=stream.cuda_stream,
            )
        if plan.far:
            self._stream.wait_stream(stream)
            for tensor in (self._lists, self._counts, self._ring):
                tensor.record_stream(self._stream)

    def ring_at(self, layer: int) -> int:
        """Where the staged pages of a layer are."""
        return self._ring.data_ptr() + (layer % _RING_LAYERS) * self._pages * self._layout.page_bytes

    def bring(self, layer: int) -> None:
        """Have a layer's far pages brought, unless they are on their way or there."""
        layout = self._layout
        offset = layer * layout.page_bytes
        if self._installs and layer not in self._installed:
            self._copy(0, offset, offset)
            self._installed[layer] = self._stream.record_event()
        slot = layer % _RING_LAYERS
        if self._pages and (slot not in self._staged or self._staged[slot][0] != layer):
            if slot in self._staged:
                self._stream.wait_event(self._attended[self._staged[slot][0]])
            self._copy(1, offset, slot * self._pages * layout.page_bytes)
            self._staged[slot] = (layer, self._stream.record_event())

    def wait(self, layer: int, stream: torch.cuda.Stream) -> None:
        """Let a stream wait until a layer's far pages are there."""
        if self._installs:
            stream.wait_event(self._installed[layer])
        if self._pages:
            stream.wait_event(self._staged[layer % _RING_LAYERS][1])

    def attended(self, layer: int, stream: torch.cuda.Stream) -> None:
        """The layer's attention was enqueued on `stream`: after it, its staged pages may go."""
        if self._pages:
            self._attended[layer] = stream.record_event()

    def _copy(self, which: int, from_offset: int, to_offset: int) -> None:
        copy_counted(
            self._lists[2 * which],
            self._lists[2 * which + 1],
            self._counts[which : which + 1],
            from_offset,
            to_offset,
            self._layout.page_bytes,
            stream=self._stream.cuda_stream,
        )


@dataclass(frozen=True)
class PrefillPlan:
    """Where a step's attention reads each block, as found on the GPU; good until a word or a length changes.

    Attributes:
        layout: the layout of the blocks.
        cu_seqlens_q: int32 [seqs + 1].
        block_table: int64 [seqs, max_blocks].
        seq_lens: int32 [seqs].
        far: whether any word may name a block outside this GPU's memory.
        staging_pages: far pages of a layer that are staged; more are read in place.
    """

    layout: KVLayout
    cu_seqlens_q: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    far: bool
    staging_pages: int
    _bringers: dict[int, _Bringer] = field(default_factory=dict)

    def _bringer(self, install: torch.Tensor | None) -> _Bringer:
        key = 0 if install is None else install.data_ptr()
        if key not in self._bringers:
            self._bringers[key] = _Bringer(self, install)
        return self._bringers[key]


def prefill_plan(
    cu_seqlens_q: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    layout: KVLayout,
    *,
    far: bool = True,
    staging_pages: int | None = None,
) -> AttentionPlan | PrefillPlan:
    """What `prefill_attention` needs once a step for all layers.

    Args:
        cu_seqlens_q: int32 [seqs + 1]; the queries of sequence ``s`` are ``q[cu[s]:cu[s + 1]]``.
        block_table: int64 [seqs, max_blocks] of block addresses, any row stride; only the first
            ``ceil(len / block_size)`` words of a row are read.
        seq_lens: int32 [seqs].
        layout: the layout of the blocks.
        far: False where the caller knows that all blocks lie in this GPU's memory, which saves looking.
        staging_pages: far pages of a layer for which VRAM is set aside (twice, for two layers) where no word
            is tagged *install*; None for as many as the table has words, up to 64 MiB a layer.

    Raises:
        KernelError: wrong dtype, shape or device. Values are looked at only where the reference answers.
    """
    if not has_kernel(block_table.device, layout):
        return reference.prefill_plan(cu_seqlens_q, block_table, seq_lens, layout)
    seqs = expect_rows(block_table, seq_lens)
    expect("cu_seqlens_q", cu_seqlens_q, torch.int32, (seqs + 1,), block_table.device)
    if not cu_seqlens_q.is_contiguous():
        raise KernelError("cu_seqlens_q must be contiguous")
    if staging_pages is None:
        staging_pages = _STAGING_BYTES // layout.page_bytes
    if staging_pages < 0:
        raise KernelError(f"staging_pages must not be negative, got {staging_pages}")
    expect_rows_mapped(block_table, seq_lens, layout)
    return PrefillPlan(layout, cu_seqlens_q, block_table, seq_lens, far, staging_pages)


@torch.no_grad()
def prefill_attention(
    q: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    layer: int,
    layout: KVLayout,
    *,
    scale: float | None = None,
    window: int | None = None,
    install: torch.Tensor | None = None,
    plan: AttentionPlan | PrefillPlan | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the last ``len_q`` positions of each sequence over the blocks of one layer.

    With a plan for all layers, pages of the layer after this one are brought while this one is computed; so
    layers are best called in ascending order. What is installed for a layer is there, for what follows on the
    same stream, once that layer was called.

    Args:
        q: [tokens, q_heads, head_dim], the queries of one sequence after the other, the last two dimensions
            contiguous.
        cu_seqlens_q: int32 [seqs + 1]; the queries of sequence ``s`` are ``q[cu[s]:cu[s + 1]]``.
        plan: `prefill_plan` of the same arguments.

        The others are those of `decode_attention`. A sequence of length 0 gives zeros.

    Returns:
        [tokens, q_heads, head_dim], the dtype of `q`.

    Raises:
        KernelError: an argument does not fit, found before memory is read or written.
    """
    if plan is None:
        plan = prefill_plan(cu_seqlens_q, block_table, seq_lens, layout)
    if isinstance(plan, AttentionPlan):
        return reference.prefill_attention(
            q, cu_seqlens_q, block_table, seq_lens, layer, layout,
            scale=scale, window=window, install=install, plan=plan, out=out,
        )  # fmt: skip
    device = plan.seq_lens.device
    expect_planned(plan.layout, layout, layer)
    tokens = q.shape[0] if q.dim() else 0
    heads = layout.num_kv_heads
    group, out = expect_attention(q, layout, tokens, device, window=window, out=out)
    form = _FORMS[layout.head_dim]
    rows = form.warps * _MMA_ROWS
    if group > rows:
        raise KernelError(f"{group} query heads of a KV head are more than the {rows} that this kernel takes")
    for name, given, planned in (
        ("block_table", block_table, plan.block_table),
        ("seq_lens", seq_lens, plan.seq_lens),
        ("cu_seqlens_q", cu_seqlens_q, plan.cu_seqlens_q),
    ):
        if given.data_ptr() != planned.data_ptr():
            raise KernelError(f"the plan was made for another {name}")
    expect_positive_scale(scale)
    expect_kernel_tensors(q, out, block_table, install)
    seqs, columns = plan.block_table.shape
    if seqs == 0 or columns == 0 or tokens == 0:
        return out.zero_()
    stream = torch.cuda.current_stream(device)
    bringer = plan._bringer(install)
    if plan.far:
        bringer.bring(layer)
        if layer + 1 < layout.num_layers:
            bringer.bring(layer + 1)
        bringer.wait(layer, stream)
    tile_queries = rows // group
    tiles = tokens // tile_queries + min(seqs, tokens)
    splits = _splits(tiles * heads, columns * layout.block_size, multiprocessors(device))
    parts = tiles * heads * splits * rows if splits > 1 else 0
    partial_out = torch.empty((parts, layout.head_dim), dtype=torch.float32, device=device)
    partial_sum = torch.empty((parts, 2), dtype=torch.float32, device=device)
    problem = (
        q.data_ptr(),
        q.stride(0),
        plan.cu_seqlens_q.data_ptr(),
        plan.seq_lens.data_ptr(),
        seqs,
        bringer.words.data_ptr(),
        columns,
        bringer.ring_at(layer),
        layout.page_bytes,
        partial_out.data_ptr(),
        partial_sum.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        layer * layout.page_bytes,
        layout.slice_bytes,
        group,
        heads,
        layout.block_size,
        window or 0,
        tile_queries,
        tiles,
        splits,
        (layout.head_dim**-0.5 if scale is None else scale) * _LOG2_E,
    )
    _kernel("prefill", _PROBLEM, layout, device).launch(
        (tiles * heads, splits),
        32 * (form.warps + 1),
        problem,
        stream=stream.cuda_stream,
        shared_bytes=form.shared_bytes(layout.row_bytes),
    )
    if splits > 1:
        _kernel("merge", _PROBLEM, layout, device).launch(
            tiles * heads, _MERGE_THREADS, problem, stream=stream.cuda_stream
        )
    if plan.far:
        bringer.attended(layer, stream)
    return out


def _splits(ctas: int, tokens: int, multiprocessors: int) -> int:
    """Among how many CTAs the keys of a tile are divided, so that few queries have the whole GPU too."""
    return max(1, min(multiprocessors // ctas, tokens // _SPLIT_TOKENS, _MOST_SPLITS))


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _kernel(name: str, parameters: str, layout: KVLayout, device: torch.device) -> Kernel:
    return _loaded(name, parameters, layout.head_dim, layout.dtype, layout.swizzled, device)


@functools.cache
def _loaded(
    name: str, parameters: str, head_dim: int, dtype: str, swizzled: bool, device: torch.device
) -> Kernel:
    form = _FORMS[head_dim]
    defines = {
        "HEAD_DIM": head_dim,
        "BFLOAT16": int(dtype == "bfloat16"),
        "SWIZZLED": int(swizzled),
        "TILE": form.tile,
        "STAGES": form.stages,
        "WARPS": form.warps,
    }
    return load_kernel("prefill_attention.cu", name, parameters, device=device, defines=defines)
