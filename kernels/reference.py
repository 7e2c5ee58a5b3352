"""Attention over block addresses in plain torch: the CPU path, and what every other kernel is held against.

Blocks are read where they lie, through raw 64-bit addresses (`kernels/memory.py`). One sequence at a time:
its pages of one layer are gathered, then multiplied in float32. Nothing that is computed for a sequence
depends on which others are in the call, so a token is the same alone and in a batch, to the bit.

What does not change between the layers of a step is found once, in a plan: cleaned addresses, the span of
memory that they lie in, the rows to gather. Plans are made from the values of a table, so a plan is good
until one of the words changes.

All functions run in stream order on CUDA. The reference waits for the device while it makes a plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ..tiers.address import FAR, INSTALL, TAG_MASK
from ..tiers.errors import KernelError
from ..tiers.layout import SLICE_ALIGNMENT, KVLayout
from .arguments import (
    DTYPES,
    expect,
    expect_attention,
    expect_planned,
    expect_readable,
    table_shape,
)
from .memory import Span

__all__ = [
    "AttentionPlan",
    "WritePlan",
    "copy_blocks",
    "decode_attention",
    "decode_plan",
    "prefill_attention",
    "prefill_plan",
    "token_slots",
    "write_kv",
    "write_plan",
]

_CHUNK_BYTES: Final = 16
_QUERY_TILE: Final = 64
"""Queries whose scores are held at once: bounds memory, and keeps a tile's scores near the cache."""
_COPY_BYTES: Final = 16 << 20
"""Bytes that `copy_blocks` holds in between."""


@dataclass(frozen=True)
class AttentionPlan:
    """What one step's attention needs to know about a block table, for all layers.

    Attributes:
        layout: the layout of the blocks.
        query_bounds: host copy of the query offsets, [seqs + 1].
        lengths: host copy of the sequence lengths, [seqs].
        span: the memory that the blocks lie in; None where no sequence has a token.
        slices: for each sequence int64 [2, kv_heads, blocks], where the slice (plane, head) of each block
            begins in layer 0, in units of 128 bytes from the span's base.
        chunk_order: int64 [block_size * chunks], where each 16-byte chunk of a slice, in order, is stored in
            it; None where rows are stored as they are.
        installs: int64 [3, n] of the words tagged *install*: row and column in the table, and where the
            block begins, in units of 128 bytes from the span's base.
    """

    layout: KVLayout
    query_bounds: tuple[int, ...]
    lengths: tuple[int, ...]
    span: Span | None
    slices: tuple[torch.Tensor, ...]
    chunk_order: torch.Tensor | None
    installs: torch.Tensor


@dataclass(frozen=True)
class WritePlan:
    """Where the keys and values of a step's tokens go, for all layers.

    Attributes:
        layout: the layout of the blocks.
        num_tokens: tokens that are written.
        span: the memory that the blocks lie in; None where there are no tokens.
        rows: int64 [2 * tokens * kv_heads], the rows of (plane, token, head) in layer 0, in units of
            `granule_bytes` from the span's base.
        granule_bytes: the largest unit that all rows begin on.
        chunk_order: int64 [tokens, chunks], which 16-byte chunk of a row is stored at each place; None
            where rows are stored as they are.
    """

    layout: KVLayout
    num_tokens: int
    span: Span | None
    rows: torch.Tensor
    granule_bytes: int
    chunk_order: torch.Tensor | None


def decode_plan(block_table: torch.Tensor, seq_lens: torch.Tensor, layout: KVLayout) -> AttentionPlan:
    """What `decode_attention` needs once a step for all layers.

    Args:
        block_table: int64 [seqs, max_blocks] of block addresses, any row stride; only the first
            ``ceil(len / block_size)`` words of a row are read.
        seq_lens: int32 [seqs]; 0 marks padding.
        layout: the layout of the blocks.

    Raises:
        KernelError: wrong dtype, shape or device; a sequence longer than its row; a word that is no
            address, or whose tags say an element encoding that the reference does not read.
    """
    seqs, _ = table_shape(block_table)
    return _attention_plan(range(seqs + 1), block_table, seq_lens, layout)


def prefill_plan(
    cu_seqlens_q: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, layout: KVLayout
) -> AttentionPlan:
    """What `prefill_attention` needs once a step for all layers; arguments and errors as there."""
    seqs, _ = table_shape(block_table)
    expect("cu_seqlens_q", cu_seqlens_q, torch.int32, (seqs + 1,), block_table.device)
    bounds: list[int] = cu_seqlens_q.tolist()
    if bounds[0] != 0 or any(stop < start for start, stop in itertools.pairwise(bounds)):
        raise KernelError(f"cu_seqlens_q must begin with 0 and not descend, got {bounds}")
    return _attention_plan(bounds, block_table, seq_lens, layout)


@torch.no_grad()
def decode_attention(
    q: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    layer: int,
    layout: KVLayout,
    *,
    scale: float | None = None,
    window: int | None = None,
    install: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query per sequence, its last position, over the blocks of one layer.

    Args:
        q: [seqs, q_heads, head_dim] in the layout's dtype, last dimension contiguous. Query head ``h``
            reads KV head ``h // (q_heads / kv_heads)``.
        block_table: int64 [seqs, max_blocks] of block addresses, any row stride; only the first
            ``ceil(len / block_size)`` words of a row are read.
        seq_lens: int32 [seqs], tokens of each sequence, the query's own included; 0 gives zeros.
        layer: index of the layer in the block.
        layout: the layout of the blocks.
        scale: what scores are multiplied by; None for ``1 / sqrt(head_dim)``.
        window: a query at position ``i`` sees keys ``i - window < j <= i``; None for all ``j <= i``.
        install: int64, shape of `block_table`: where the page of this layer of each block whose word is
            tagged *install* is copied to.
        plan: `decode_plan` of the same table, lengths and layout.
        out: where the result is written, shape and dtype of `q`; None for a new tensor.
        lse: float32 [seqs, q_heads], takes the natural logarithm of the sum of exponentials of the
            scaled scores; minus infinity for an empty sequence.

    Returns:
        [seqs, q_heads, head_dim], the dtype of `q`.

    Raises:
        KernelError: an argument does not fit, found before memory is read or written.
    """
    if plan is None:
        plan = decode_plan(block_table, seq_lens, layout)
    if q.dim() == 3 and q.shape[0] != len(plan.lengths):
        raise KernelError(f"q has {q.shape[0]} sequences, the table {len(plan.lengths)}")
    return _attention(q, block_table, layer, layout, scale, window, install, plan, out, lse)


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
    plan: AttentionPlan | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the last ``len_q`` positions of each sequence over the blocks of one layer.

    Args:
        q: [tokens, q_heads, head_dim], the queries of one sequence after the other.
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
    return _attention(q, block_table, layer, layout, scale, window, install, plan, out, None)


def write_plan(addresses: torch.Tensor, offsets: torch.Tensor, layout: KVLayout) -> WritePlan:
    """What `write_kv` needs once a step for all layers; arguments and errors as there."""
    expect_readable(layout)
    tokens = addresses.shape[0] if addresses.dim() else 0
    expect("addresses", addresses, torch.int64, (tokens,))
    if offsets.dtype not in (torch.int32, torch.int64):
        raise KernelError(f"offsets must be int32 or int64, got {offsets.dtype}")
    expect("offsets", offsets, offsets.dtype, (tokens,), addresses.device)
    granule = math.gcd(SLICE_ALIGNMENT, layout.row_bytes)
    if tokens == 0:
        return WritePlan(layout, 0, None, addresses, granule, None)
    clean = _clean(addresses, "addresses")
    rows = offsets.long()
    low, high = (int(end) for end in torch.aminmax(rows))
    if low < 0 or high >= layout.block_size:
        raise KernelError(f"offsets must lie in 0..{layout.block_size - 1}, got {low}..{high}")
    span = Span.over(clean, layout.block_bytes, DTYPES[layout.dtype])
    first = (clean - span.base + rows * layout.row_bytes) // granule
    slices = _slice_offsets(layout, granule, addresses.device)
    order = None
    if layout.swizzled:
        chunks = torch.arange(layout.row_bytes // _CHUNK_BYTES, device=rows.device)
        order = chunks ^ (rows % 8)[:, None]
    return WritePlan(layout, tokens, span, (first[:, None] + slices[:, None]).flatten(), granule, order)


@torch.no_grad()
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
    """Write keys and values of tokens into one layer of their blocks.

    Args:
        k, v: [tokens, kv_heads, head_dim] in the layout's dtype.
        addresses: int64 [tokens], the address of the block that each token lies in; tags are ignored.
        offsets: int32 or int64 [tokens], the token's row in its block. No two tokens share a row.
        layer: index of the layer in the block.
        layout: the layout of the blocks.
        plan: `write_plan` of the same addresses, offsets and layout.

    Raises:
        KernelError: an argument does not fit, found before memory is written.
    """
    if plan is None:
        plan = write_plan(addresses, offsets, layout)
    expect_planned(plan.layout, layout, layer)
    dtype = DTYPES[layout.dtype]
    shape = (plan.num_tokens, layout.num_kv_heads, layout.head_dim)
    expect("k", k, dtype, shape, plan.rows.device)
    expect("v", v, dtype, shape, plan.rows.device)
    if plan.span is None:
        return
    data = torch.stack((k, v))
    if plan.chunk_order is not None:
        data = data.view(2, *shape[:2], -1, _CHUNK_BYTES // layout.item_bytes)
        data = data.gather(3, plan.chunk_order[None, :, None, :, None].expand(data.shape))
    target = plan.span.rows(layout.head_dim, layer * layout.page_bytes, plan.granule_bytes)
    target.index_copy_(0, plan.rows, data.view(-1, layout.head_dim))


def token_slots(
    block_table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, layout: KVLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """The block and the row in it of tokens, as `write_kv` takes them.

    Args:
        block_table: int64 [seqs, max_blocks] of block addresses.
        rows: int64 [tokens], each token's sequence: a row of the table.
        positions: int64 [tokens], each token's position in its sequence.
        layout: the layout of the blocks.

    Returns:
        addresses int64 [tokens], offsets int64 [tokens].

    Raises:
        KernelError: wrong dtype, shape or device, or a row or position beyond the table.
    """
    seqs, max_blocks = table_shape(block_table)
    tokens = positions.shape[0] if positions.dim() else 0
    expect("positions", positions, torch.int64, (tokens,), block_table.device)
    expect("rows", rows, torch.int64, (tokens,), block_table.device)
    columns = positions // layout.block_size
    for name, index, limit in (
        ("rows", rows, block_table.shape[0]),
        ("positions", columns, block_table.shape[1]),
    ):
        if tokens and not bool(((index >= 0) & (index < limit)).all()):
            raise KernelError(f"{name} point beyond a block table of {seqs} rows and {max_blocks} blocks")
    return block_table[rows, columns], positions % layout.block_size


@torch.no_grad()
def copy_blocks(src: torch.Tensor, dst: torch.Tensor, block_bytes: int) -> None:
    """Copy whole blocks, from any arena to any arena.

    Args:
        src, dst: int64 [n] block addresses; tags are ignored. No block of `dst` appears twice or in `src`.
        block_bytes: bytes of a block, a multiple of 128.

    Raises:
        KernelError: an argument does not fit, found before memory is written.
    """
    count = src.shape[0] if src.dim() else 0
    expect("src", src, torch.int64, (count,))
    expect("dst", dst, torch.int64, (count,), src.device)
    if block_bytes <= 0 or block_bytes % SLICE_ALIGNMENT:
        raise KernelError(f"block_bytes must be a positive multiple of {SLICE_ALIGNMENT}, got {block_bytes}")
    if count == 0:
        return
    sources, targets = _clean(src, "src"), _clean(dst, "dst")
    read = Span.over(sources, block_bytes, torch.int64)
    write = Span.over(targets, block_bytes, torch.int64)
    from_rows, to_rows = read.rows(block_bytes // 8), write.rows(block_bytes // 8)
    from_index = (sources - read.base) // SLICE_ALIGNMENT
    to_index = (targets - write.base) // SLICE_ALIGNMENT
    at_once = max(1, _COPY_BYTES // block_bytes)
    for some, into in zip(torch.split(from_index, at_once), torch.split(to_index, at_once), strict=True):
        to_rows.index_copy_(0, into, from_rows.index_select(0, some))


def _attention_plan(
    query_bounds: Sequence[int], block_table: torch.Tensor, seq_lens: torch.Tensor, layout: KVLayout
) -> AttentionPlan:
    expect_readable(layout)
    seqs, max_blocks = table_shape(block_table)
    expect("seq_lens", seq_lens, torch.int32, (seqs,), block_table.device)
    lengths: list[int] = seq_lens.tolist()
    for length, (start, stop) in zip(lengths, itertools.pairwise(query_bounds), strict=True):
        if length < 0 or layout.blocks_for(length) > max_blocks:
            raise KernelError(f"a sequence of {length} tokens in a row of {max_blocks} blocks")
        if 0 < length < stop - start:
            raise KernelError(f"a sequence of {length} tokens has {stop - start} queries")
    counts = [layout.blocks_for(length) for length in lengths]
    device = block_table.device
    used = torch.arange(max_blocks, device=device) < torch.tensor(counts, device=device)[:, None]
    words = block_table[used]
    if not words.numel():
        installs = torch.empty((3, 0), dtype=torch.int64, device=device)
        return AttentionPlan(layout, tuple(query_bounds), tuple(lengths), None, (), None, installs)
    if bool((words & (TAG_MASK & ~(FAR | INSTALL))).any()):
        raise KernelError("block_table has words whose element encoding the reference does not read")
    blocks = _clean(words, "block_table")
    span = Span.over(blocks, layout.block_bytes, DTYPES[layout.dtype])
    starts = (blocks - span.base) // SLICE_ALIGNMENT
    tagged = (words & INSTALL) != 0
    installs = torch.cat((used.nonzero()[tagged].t(), starts[tagged][None]))
    offsets = _slice_offsets(layout, SLICE_ALIGNMENT, device)[:, :, None]
    slices = tuple(part + offsets for part in torch.split(starts, counts))
    order = _stored_chunks(layout, device) if layout.swizzled else None
    return AttentionPlan(layout, tuple(query_bounds), tuple(lengths), span, slices, order, installs)


def _attention(
    q: torch.Tensor,
    block_table: torch.Tensor,
    layer: int,
    layout: KVLayout,
    scale: float | None,
    window: int | None,
    install: torch.Tensor | None,
    plan: AttentionPlan,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    """Both kinds of attention: decoding is a prefill of one query a sequence."""
    expect_planned(plan.layout, layout, layer)
    if len(plan.lengths) != block_table.shape[0]:
        raise KernelError(f"a plan of {len(plan.lengths)} sequences for a table of {block_table.shape[0]}")
    group, out = expect_attention(
        q, layout, plan.query_bounds[-1], block_table.device, window=window, out=out, lse=lse
    )
    if plan.installs.shape[1]:
        _install(block_table, layer, layout, plan, install)

    # The query heads of one KV head become rows of one matrix, so that keys are not repeated for them.
    grouped = (group, layout.head_dim)
    queries = q.float() * (layout.head_dim**-0.5 if scale is None else scale)
    queries = queries.view(-1, layout.num_kv_heads, *grouped)
    results = out.view(-1, layout.num_kv_heads, *grouped)
    order = plan.chunk_order
    for seq, (start, stop) in enumerate(itertools.pairwise(plan.query_bounds)):
        length = plan.lengths[seq]
        if start == stop:
            continue
        some_lse = None if lse is None else lse[start:stop]
        if length == 0 or plan.span is None:
            out[start:stop] = 0
            if some_lse is not None:
                some_lse.fill_(-math.inf)
            continue
        first = length - (stop - start)
        skipped = 0 if window is None else max(0, first - window + 1) // layout.block_size
        source = plan.span.rows(layout.block_size * layout.head_dim, layer * layout.page_bytes)
        kv = source.index_select(0, plan.slices[seq][:, :, skipped:].flatten())
        if order is not None:
            kv = kv.view(kv.shape[0], order.shape[0], -1).index_select(1, order)
        hidden = skipped * layout.block_size
        # Rows beyond the length are whatever the memory holds; they are cut off before any arithmetic.
        keys, values = kv.view(2, layout.num_kv_heads, -1, layout.head_dim)[:, :, : length - hidden].float()
        _attend(queries[start:stop], keys, values, first - hidden, window, results[start:stop], some_lse)
    return out


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: int,
    window: int | None,
    results: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Causal attention of one sequence.

    Args:
        queries: float32 [n, kv_heads, group, dim], scaled; the first is at position `first` of the keys.
        keys, values: float32 [kv_heads, tokens, dim].
        window: tokens that a query sees, or None.
        results: [n, kv_heads, group, dim], written.
        lse: float32 [n, kv_heads * group], written, or None.
    """
    kv_heads, _, dim = keys.shape
    queries, results = queries.permute(1, 2, 0, 3), results.permute(1, 2, 0, 3)
    for tile in range(0, queries.shape[2], _QUERY_TILE):
        rows = queries[:, :, tile : tile + _QUERY_TILE]
        group, count = rows.shape[1:3]
        position = first + tile
        stop = position + count
        unseen = 0 if window is None else position - window + 1
        begin = max(0, unseen)
        scores = torch.bmm(rows.reshape(kv_heads, group * count, dim), keys[:, begin:stop].transpose(1, 2))
        if count > 1:
            masked = scores.view(kv_heads, group, count, stop - begin)
            every = torch.ones((count, count), dtype=torch.bool, device=scores.device)
            masked[..., -count:].masked_fill_(every.triu(1), -math.inf)
            if window is not None:
                masked[..., :count].masked_fill_(every.tril(unseen - begin - 1), -math.inf)
        if lse is not None:
            lse[tile : tile + count] = scores.logsumexp(-1).view(kv_heads * group, count).t()
        weighted = torch.bmm(scores.softmax(-1), values[:, begin:stop])
        results[:, :, tile : tile + count] = weighted.view(kv_heads, group, count, dim)


def _install(
    block_table: torch.Tensor,
    layer: int,
    layout: KVLayout,
    plan: AttentionPlan,
    install: torch.Tensor | None,
) -> None:
    """Copy this layer's page of every block tagged *install* to its destination."""
    if install is None:
        raise KernelError("block_table has words tagged install, but no install table was given")
    expect("install", install, torch.int64, tuple(block_table.shape), block_table.device)
    rows, columns, starts = plan.installs
    words = install[rows, columns]
    if bool((words & TAG_MASK).any()):
        raise KernelError("install has destinations that are not multiples of 128 bytes")
    targets = _clean(words, "install")
    dtype = DTYPES[layout.dtype]
    page, offset = layout.page_bytes // layout.item_bytes, layer * layout.page_bytes
    if plan.span is not None:
        span = Span.over(targets, layout.block_bytes, dtype)
        pages = plan.span.rows(page, offset).index_select(0, starts)
        span.rows(page, offset).index_copy_(0, (targets - span.base) // SLICE_ALIGNMENT, pages)


def _slice_offsets(layout: KVLayout, unit_bytes: int, device: torch.device) -> torch.Tensor:
    """int64 [2, kv_heads]: where the slice of a plane and head begins in a page, in units."""
    step = layout.slice_bytes // unit_bytes
    return torch.arange(0, 2 * layout.num_kv_heads * step, step, device=device).view(2, layout.num_kv_heads)


def _stored_chunks(layout: KVLayout, device: torch.device) -> torch.Tensor:
    """int64 [block_size * chunks]: where each 16-byte chunk of a slice, in order, is stored in it."""
    chunks = layout.row_bytes // _CHUNK_BYTES
    rows = torch.arange(layout.block_size, device=device)[:, None]
    stored: torch.Tensor = torch.arange(chunks, device=device) ^ (rows % 8)
    return torch.add(stored, rows, alpha=chunks).flatten()


def _clean(words: torch.Tensor, name: str) -> torch.Tensor:
    """Block addresses without their tags."""
    addresses: torch.Tensor = words & ~TAG_MASK
    if bool((addresses <= 0).any()):
        raise KernelError(f"{name} has words that are no address")
    return addresses
