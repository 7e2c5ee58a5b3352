"""Random batches for the attention kernels, with answers: blocks near and far, shared and private."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from kvpager import KVLayout
from kvpager.tiers.address import FAR, INSTALL

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Case:
    """A batch, and the float64 keys and values of each sequence.

    Attributes:
        layout: the layout of the blocks.
        table: int64 [seqs, max_blocks] of block addresses.
        lengths: int32 [seqs].
        keys, values: of layer 0, for each sequence float64 [kv_heads, tokens, head_dim].
        install: int64, shape of `table`: a place in VRAM for every word tagged *install*.
        stored: uint8 [blocks, block_bytes], the bytes of every block.
        blocks: int64 [seqs, max_blocks], which of `stored` each word names.
        memory: what the addresses point into.
        kv: [blocks, layers, 2, kv_heads, block_size, head_dim], as it was computed.
        rows: the blocks of each sequence.
    """

    layout: KVLayout
    table: torch.Tensor
    lengths: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    install: torch.Tensor
    stored: torch.Tensor
    blocks: torch.Tensor
    memory: tuple[torch.Tensor, ...]
    kv: torch.Tensor
    rows: list[list[int]]

    def of_layer(self, layer: int) -> Case:
        """The same with the keys and values of another layer."""
        keys, values = _sequences(self.kv, layer, self.rows, self.lengths.tolist())
        return replace(self, keys=keys, values=values)

    def place(self, word: int) -> torch.Tensor:
        """The bytes at a place of the install table."""
        slots = self.memory[2]
        at = (word - slots.data_ptr()) // self.layout.block_bytes
        return slots[at]

    def answer(
        self, q: torch.Tensor, scale: float, window: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one query a sequence in float64, and the logarithm of its sum."""
        out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
        lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64, device=q.device)
        for i, (k, v) in enumerate(zip(self.keys, self.values, strict=True)):
            if k.shape[1]:
                first = 0 if window is None else max(0, k.shape[1] - window)
                rows = q[i].double().view(k.shape[0], -1, k.shape[2])
                scores = rows @ k[:, first:].transpose(1, 2) * scale
                lse[i] = scores.logsumexp(-1).flatten()
                out[i] = (scores.softmax(-1) @ v[:, first:]).reshape(q.shape[1:])
        return out, lse

    def causal_answer(
        self, q: torch.Tensor, bounds: Sequence[int], scale: float, window: int | None = None
    ) -> torch.Tensor:
        """Causal attention of each sequence's last queries in float64; its own are those up to its bound."""
        out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
        for i, (k, v) in enumerate(zip(self.keys, self.values, strict=True)):
            start, stop = bounds[i], bounds[i + 1]
            heads, length, dim = k.shape
            if start == stop or length == 0:
                continue
            rows = q[start:stop].double().view(stop - start, heads, -1, dim).permute(1, 2, 0, 3)
            scores = rows @ k[:, None].transpose(2, 3) * scale
            position = torch.arange(length - (stop - start), length, device=q.device)[:, None]
            token = torch.arange(length, device=q.device)[None]
            hidden = token > position
            if window is not None:
                hidden |= token <= position - window
            scores = scores.masked_fill(hidden, -math.inf)
            out[start:stop] = (scores.softmax(-1) @ v[:, None]).permute(2, 0, 1, 3).reshape(-1, *q.shape[1:])
        return out


def swizzled(kv: torch.Tensor) -> torch.Tensor:
    """Rows [..., token, head_dim] with the 16-byte chunk c of row t stored at chunk c XOR (t mod 8)."""
    chunks = kv.view(*kv.shape[:-1], -1, 16 // kv.element_size())
    token = torch.arange(kv.shape[-2], device=kv.device)[:, None] % 8
    order = torch.arange(chunks.shape[-2], device=kv.device)[None] ^ token
    stored: torch.Tensor = chunks.gather(-2, order[..., None].expand_as(chunks))
    return stored.flatten(-2)


def make_case(
    layout: KVLayout,
    lengths: Sequence[int],
    device: torch.device,
    *,
    seed: int,
    far_share: float = 0.0,
    install_share: float = 0.0,
    shared_share: float = 0.0,
    far_slots: torch.Tensor | None = None,
) -> Case:
    """A batch of sequences of `lengths`.

    Args:
        far_share: of the blocks, how many are far: in host memory.
        install_share: of those, how many are tagged *install*.
        shared_share: of the sequences, how many begin with blocks of another one.
        far_slots: uint8 [slots, block_bytes], where far blocks lie instead; enough for all.
    """
    choose = random.Random(seed)
    size = layout.block_size
    rows: list[list[int]] = []
    count = 0
    for length in lengths:
        columns = layout.blocks_for(length)
        row: list[int] = []
        if rows and choose.random() < shared_share:
            parent = choose.randrange(len(rows))
            whole = min(length // size, lengths[parent] // size)
            row = rows[parent][: choose.randint(0, whole) if choose.random() < 0.5 else whole]
        fresh = columns - len(row)
        row = row + list(range(count, count + fresh))
        count += fresh
        rows.append(row)
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = _DTYPES[layout.dtype]
    shape = (max(1, count), layout.num_layers, 2, layout.num_kv_heads, size, layout.head_dim)
    kv = torch.randn(shape, generator=generator, device=device).to(dtype)
    for length, row in zip(lengths, rows, strict=True):
        if length % size:
            kv[row[-1], ..., length % size :, :] = math.nan  # memory that was never written
    stored = (swizzled(kv) if layout.swizzled else kv).contiguous().view(torch.uint8).view(shape[0], -1)
    on_gpu = device.type == "cuda"
    order = torch.randperm(shape[0], generator=generator, device=device)
    near = torch.empty_like(stored)
    near[order] = stored
    if far_slots is None:
        far_slots = torch.empty(stored.shape, dtype=torch.uint8, pin_memory=on_gpu)
    far = far_slots[: shape[0]]
    far[order.to(far.device)] = stored.to(far.device)
    is_far = torch.rand(shape[0], generator=generator, device=device) < far_share
    tagged = is_far & (torch.rand(shape[0], generator=generator, device=device) < install_share)
    near[order[is_far]] = 0xFF  # NaN, so that nobody takes the wrong copy
    far[order[~is_far].to(far.device)] = 0xFF
    slots = torch.full((shape[0], layout.block_bytes), 0xA5, dtype=torch.uint8, device=device)
    place = order * layout.block_bytes
    word = torch.where(is_far, far.data_ptr() + place + FAR, near.data_ptr() + place) + tagged * INSTALL
    width = max([1, *map(len, rows)]) + 3
    blocks = torch.zeros((len(lengths), width), dtype=torch.int64)
    for i, row in enumerate(rows):
        blocks[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
    blocks = blocks.to(device)
    inside = (
        torch.arange(width, device=device)[None] < torch.tensor(list(map(len, rows)), device=device)[:, None]
    )
    table = torch.where(inside, word[blocks], 0x7FFF_FFFF_FFFF_0000)
    destinations = slots.data_ptr() + torch.arange(shape[0], device=device) * layout.block_bytes
    install = torch.where(inside & ((table & INSTALL) != 0), destinations[blocks], 0)
    keys, values = _sequences(kv, 0, rows, lengths)
    return Case(
        layout,
        table,
        torch.tensor(list(lengths), dtype=torch.int32, device=device),
        keys,
        values,
        install,
        stored,
        torch.where(inside, blocks, 0),
        (near, far, slots),
        kv,
        rows,
    )


def _sequences(
    kv: torch.Tensor, layer: int, rows: Sequence[Sequence[int]], lengths: Sequence[int]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    keys, values = [], []
    for length, row in zip(lengths, rows, strict=True):
        some = kv[torch.tensor(row, dtype=torch.int64, device=kv.device), layer].double()
        some = some.permute(1, 2, 0, 3, 4).reshape(2, kv.shape[3], -1, kv.shape[5])[:, :, :length]
        keys.append(some[0])
        values.append(some[1])
    return keys, values
