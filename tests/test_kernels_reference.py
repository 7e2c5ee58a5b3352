"""The reference kernels against dense attention in float64, on blocks scattered over several buffers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from kvpager.kernels import (
    copy_blocks,
    decode_attention,
    decode_plan,
    prefill_attention,
    prefill_plan,
    token_slots,
    write_kv,
    write_plan,
)
from kvpager.kernels.memory import Span, byte_tensor
from kvpager.tiers.errors import KernelError
from kvpager.tiers.layout import KVLayout

FAR = 1
INSTALL = 2
CPU = torch.device("cpu")
TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}


@dataclass
class Blocks:
    """Two buffers of blocks, filled with NaN, and the addresses of their blocks in random order."""

    layout: KVLayout
    near: torch.Tensor
    far: torch.Tensor
    words: list[int]

    @classmethod
    def make(cls, layout: KVLayout, count: int, generator: torch.Generator) -> Blocks:
        buffers = [torch.full((count * layout.block_bytes + 128,), 0xFF, dtype=torch.uint8) for _ in range(2)]
        words = []
        for tag, buffer in enumerate(buffers):
            start = -(-buffer.data_ptr() // 128) * 128
            words += [start + i * layout.block_bytes + tag for i in range(count)]
        order = torch.randperm(len(words), generator=generator).tolist()
        return cls(layout, buffers[0], buffers[1], [words[i] for i in order])

    def take(self, lengths: list[int]) -> torch.Tensor:
        """A block table with rows for sequences of these lengths; unread words are no addresses."""
        counts = [self.layout.blocks_for(length) for length in lengths]
        table = torch.full((len(lengths), max([*counts, 1]) + 3), -1, dtype=torch.int64)
        for row, count in enumerate(counts):
            table[row, :count] = torch.tensor([self.words.pop() for _ in range(count)], dtype=torch.int64)
        return table


def random_kv(layout: KVLayout, lengths: list[int], generator: torch.Generator) -> list[torch.Tensor]:
    dtype = getattr(torch, layout.dtype)
    shape = (layout.num_kv_heads, layout.head_dim)
    return [torch.randn((2, n, *shape), generator=generator).to(dtype) for n in lengths]


def write_sequences(layout: KVLayout, table: torch.Tensor, kv: list[torch.Tensor], layer: int) -> None:
    for row, (keys, values) in enumerate(kv):
        positions = torch.arange(keys.shape[0])
        addresses, offsets = token_slots(table, torch.full_like(positions, row), positions, layout)
        write_kv(keys, values, addresses, offsets, layer, layout)


def dense(
    q: torch.Tensor, kv: torch.Tensor, window: int | None, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the last positions in float64: result [n, q_heads, dim], lse [n, q_heads]."""
    keys, values = kv.double()
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("nhd,thd->hnt", q.double(), keys) * (q.shape[2] ** -0.5 if scale is None else scale)
    query_at = torch.arange(keys.shape[0] - q.shape[0], keys.shape[0])[:, None]
    key_at = torch.arange(keys.shape[0])[None]
    hidden = key_at > query_at
    if window is not None:
        hidden |= key_at <= query_at - window
    scores = scores.masked_fill(hidden, -math.inf)
    return torch.einsum("hnt,thd->nhd", scores.softmax(-1), values), scores.logsumexp(-1).t()


SHAPES = [
    KVLayout(2, 3, 64, dtype="float32"),
    KVLayout(3, 1, 80, dtype="float16"),
    KVLayout(2, 2, 80, 5, dtype="bfloat16"),
    KVLayout(2, 2, 96, 16, dtype="bfloat16"),
    KVLayout(2, 2, 64, 16, dtype="float16"),
    KVLayout(2, 2, 128, 16, dtype="float16"),
    KVLayout(2, 2, 128, 12, dtype="bfloat16"),
    KVLayout(2, 1, 256, 8, dtype="float16"),
    KVLayout(2, 2, 128, 16, dtype="float16", format="plain"),
    KVLayout(2, 2, 20, 4, dtype="float16", scale_bytes=24),
]
LAYOUT = SHAPES[0]


@pytest.mark.parametrize("layout", SHAPES, ids=lambda x: f"{x.head_dim}-{x.block_size}-{x.dtype}-{x.format}")
@pytest.mark.parametrize("window", [None, 1, 24])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_decode_equals_dense_attention(layout: KVLayout, window: int | None, group: int) -> None:
    generator = torch.Generator().manual_seed(layout.head_dim + group)
    lengths = [1, layout.block_size, 0, 3 * layout.block_size + 1, 70]
    blocks = Blocks.make(layout, 40, generator)
    table, kv = blocks.take(lengths), random_kv(layout, lengths, generator)
    layer = layout.num_layers - 1
    write_sequences(layout, table, kv, layer)
    q = torch.randn((5, group * layout.num_kv_heads, layout.head_dim), generator=generator)
    q = q.to(getattr(torch, layout.dtype))
    lse = torch.empty(q.shape[:2])
    out = decode_attention(
        q, table, torch.tensor(lengths, dtype=torch.int32), layer, layout, window=window, lse=lse
    )
    assert out.dtype == q.dtype
    for row, sequence in enumerate(kv):
        if lengths[row] == 0:
            assert (out[row] == 0).all()
            assert (lse[row] == -math.inf).all()
            continue
        expected, expected_lse = dense(q[row : row + 1], sequence, window)
        torch.testing.assert_close(
            out[row : row + 1].double(), expected, atol=TOLERANCE[layout.dtype], rtol=1e-2
        )
        torch.testing.assert_close(lse[row : row + 1].double(), expected_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", SHAPES, ids=lambda x: f"{x.head_dim}-{x.block_size}-{x.dtype}-{x.format}")
@pytest.mark.parametrize("window", [None, 1, 24, 100])
def test_prefill_equals_dense_attention(layout: KVLayout, window: int | None) -> None:
    generator = torch.Generator().manual_seed(layout.head_dim)
    lengths, queries = [7, 150, 0, 33, 90, 200], [7, 150, 0, 1, 65, 0]
    blocks = Blocks.make(layout, 80, generator)
    table, kv = blocks.take(lengths), random_kv(layout, lengths, generator)
    write_sequences(layout, table, kv, 0)
    bounds = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    q = torch.randn((sum(queries), 3 * layout.num_kv_heads, layout.head_dim), generator=generator)
    q = q.to(getattr(torch, layout.dtype))
    out = prefill_attention(
        q, bounds, table, torch.tensor(lengths, dtype=torch.int32), 0, layout, window=window, scale=0.2
    )
    for row, sequence in enumerate(kv):
        part = slice(int(bounds[row]), int(bounds[row + 1]))
        if part.start < part.stop:
            expected, _ = dense(q[part], sequence, window, 0.2)
            torch.testing.assert_close(out[part].double(), expected, atol=TOLERANCE[layout.dtype], rtol=1e-2)


def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = [130, 17, 64]
    blocks = Blocks.make(LAYOUT, 20, generator)
    table, kv = blocks.take(lengths), random_kv(LAYOUT, lengths, generator)
    write_sequences(LAYOUT, table, kv, 0)
    lens = torch.tensor(lengths, dtype=torch.int32)
    q = torch.randn((3, 9, 64), generator=generator)
    together = decode_attention(q, table, lens, 0, LAYOUT)
    for row in range(3):
        one = slice(row, row + 1)
        assert torch.equal(decode_attention(q[one], table[one], lens[one], 0, LAYOUT), together[one])


def test_a_plan_serves_all_layers_and_out_is_written_in_place() -> None:
    generator = torch.Generator().manual_seed(2)
    layout = KVLayout(3, 2, 64, dtype="float16")
    lengths = [40, 3]
    blocks = Blocks.make(layout, 5, generator)
    table, kv = blocks.take(lengths), random_kv(layout, lengths, generator)
    lens, bounds = torch.tensor(lengths, dtype=torch.int32), torch.tensor([0, 9, 10], dtype=torch.int32)
    # Slices of one larger tensor, as a fused projection gives them.
    q = torch.randn((10, 8, 64), generator=generator).half()[:, 2:6]
    decode, prefill = decode_plan(table, lens, layout), prefill_plan(bounds, table, lens, layout)
    for layer in range(3):
        write_sequences(layout, table, kv, layer)
        out = torch.empty((2, 4, 64), dtype=torch.float16)
        result = decode_attention(q[:2], table, lens, layer, layout, plan=decode, out=out)
        assert result.data_ptr() == out.data_ptr()
        assert torch.equal(out, decode_attention(q[:2], table, lens, layer, layout))
        assert torch.equal(
            prefill_attention(q, bounds, table, lens, layer, layout, plan=prefill),
            prefill_attention(q, bounds, table, lens, layer, layout),
        )


def test_tagged_blocks_are_installed_page_by_page_while_they_are_attended() -> None:
    generator = torch.Generator().manual_seed(3)
    layout = KVLayout(2, 2, 64, dtype="float16")
    lengths = [50, 20]
    blocks = Blocks.make(layout, 12, generator)
    table, kv = blocks.take(lengths), random_kv(layout, lengths, generator)
    for layer in range(2):
        write_sequences(layout, table, kv, layer)
    lens = torch.tensor(lengths, dtype=torch.int32)
    install = torch.zeros_like(table)
    tagged = [(0, 1), (0, 3), (1, 0)]
    for row, column in tagged:
        install[row, column] = blocks.words.pop() & ~127
        table[row, column] |= INSTALL | FAR
    q = torch.randn((2, 4, 64), generator=generator).half()
    moved = table.clone()
    for row, column in tagged:
        moved[row, column] = install[row, column]
    for layer in range(2):
        # A window hides block (0, 1); it is installed all the same.
        before = decode_attention(q, table, lens, layer, layout, install=install, window=20)
        assert torch.equal(decode_attention(q, moved, lens, layer, layout, window=20), before)
    for row, column in tagged:
        source, target = (
            byte_tensor(int(words[row, column]) & ~127, layout.block_bytes, CPU) for words in (table, install)
        )
        assert torch.equal(source, target)


@pytest.mark.parametrize("layout", SHAPES, ids=lambda x: f"{x.head_dim}-{x.block_size}-{x.dtype}-{x.format}")
def test_written_bytes_lie_where_the_layout_says(layout: KVLayout) -> None:
    generator = torch.Generator().manual_seed(4)
    blocks = Blocks.make(layout, 4, generator)
    lengths = [2 * layout.block_size - 1]
    table, kv = blocks.take(lengths), random_kv(layout, lengths, generator)
    write_sequences(layout, table, kv, 1)
    dtype = getattr(torch, layout.dtype)
    for position in (0, layout.block_size - 1, layout.block_size + 1):
        row = position % layout.block_size
        block = byte_tensor(int(table[0, position // layout.block_size]) & ~127, layout.block_bytes, CPU)
        for plane in range(2):
            for head in range(layout.num_kv_heads):
                start = layout.page_bytes + (plane * layout.num_kv_heads + head) * layout.slice_bytes
                stored = block[start + row * layout.row_bytes :][: layout.row_bytes].view(dtype)
                if layout.swizzled:
                    chunks = stored.view(-1, 8)
                    stored = torch.stack([chunks[c ^ (row % 8)] for c in range(chunks.shape[0])]).flatten()
                assert torch.equal(stored, kv[0][plane, position, head])
        assert (block[: layout.page_bytes] == 0xFF).all(), "another layer's page was touched"


def test_a_write_plan_serves_all_layers() -> None:
    generator = torch.Generator().manual_seed(5)
    layout = KVLayout(2, 2, 128, dtype="bfloat16")
    blocks = Blocks.make(layout, 4, generator)
    addresses = torch.tensor([blocks.words[0], blocks.words[1], blocks.words[0]])
    offsets = torch.tensor([3, 0, 15], dtype=torch.int32)
    plan = write_plan(addresses, offsets, layout)
    kv = random_kv(layout, [3], generator)[0]
    for layer in range(2):
        write_kv(kv[0], kv[1], addresses, offsets, layer, layout, plan=plan)
    block = byte_tensor(blocks.words[0] & ~127, layout.block_bytes, CPU)
    assert torch.equal(block[: layout.page_bytes], block[layout.page_bytes :])
    write_kv(kv[0][:0], kv[1][:0], addresses[:0], offsets[:0], 0, layout)


def test_blocks_are_copied_between_buffers() -> None:
    generator = torch.Generator().manual_seed(6)
    layout = KVLayout(2, 2, 64)
    blocks = Blocks.make(layout, 8, generator)
    for buffer in (blocks.near, blocks.far):
        buffer.copy_(torch.randint(0, 255, buffer.shape, generator=generator))
    words = torch.tensor(blocks.words)
    source, target = words[:6], words[6:12]
    copy_blocks(source, target, layout.block_bytes)
    for src, dst in zip(source.tolist(), target.tolist(), strict=True):
        assert torch.equal(*(byte_tensor(a & ~127, layout.block_bytes, CPU) for a in (src, dst)))
    copy_blocks(source[:0], target[:0], layout.block_bytes)


def test_token_slots_follow_the_table() -> None:
    table = torch.tensor([[1024, 2048], [4096, 8192]])
    addresses, offsets = token_slots(table, torch.tensor([1, 0, 1]), torch.tensor([0, 17, 31]), LAYOUT)
    assert addresses.tolist() == [4096, 2048, 8192]
    assert offsets.tolist() == [0, 1, 15]
    with pytest.raises(KernelError, match="beyond a block table"):
        token_slots(table, torch.tensor([0]), torch.tensor([32]), LAYOUT)


def test_a_span_is_the_memory_itself() -> None:
    buffer = torch.zeros(1024, dtype=torch.uint8)
    start = -(-buffer.data_ptr() // 128) * 128
    span = Span.over(torch.tensor([start + 256, start]), 128, torch.float32)
    span.rows(32)[2] = 1.0
    skip = start - buffer.data_ptr()
    assert (buffer[skip + 256 : skip + 384].view(torch.float32) == 1).all()
    assert int(buffer.count_nonzero()) == 64
    with pytest.raises(KernelError, match="no memory"):
        byte_tensor(0, 128, CPU)
    with pytest.raises(KernelError, match="cpu and cuda"):
        byte_tensor(start, 128, torch.device("meta"))


def test_what_does_not_fit_is_refused_before_memory_is_touched() -> None:
    layout = replace(LAYOUT, num_layers=2)
    # No such memory exists: to touch it would end the process.
    table = torch.full((2, 2), 1 << 40)
    lens, bounds = torch.tensor([20, 5], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
    q = torch.zeros((2, 9, 64))
    kv = torch.zeros((2, 3, 64))
    at, row = table[:, 0].clone(), torch.tensor([0, 1])

    def refused(message: str, **changes: object) -> None:
        given: dict[str, object] = {
            "q": q,
            "block_table": table,
            "seq_lens": lens,
            "layer": 0,
            "layout": layout,
        }
        given |= changes
        with pytest.raises(KernelError, match=message):
            decode_attention(**given)  # type: ignore[arg-type]
        if "lse" not in changes:
            with pytest.raises(KernelError, match=message):
                prefill_attention(cu_seqlens_q=bounds, **given)  # type: ignore[arg-type]

    refused("q must be torch.float32", q=q.half())
    refused("q must have shape", q=q[:, :, :32])
    refused("q must have shape", q=q[0])
    refused("query heads do not divide", q=q[:, :8])
    refused("block_table must be int64", block_table=table.int())
    refused("block_table must be int64", block_table=table[0])
    refused("seq_lens must be torch.int32", seq_lens=lens.long())
    refused("seq_lens must have shape", seq_lens=lens[:1])
    refused("a sequence of 33 tokens in a row of 2 blocks", seq_lens=lens + 13)
    refused("a sequence of -1 tokens", seq_lens=lens - 21)
    refused("no address", block_table=torch.zeros_like(table))
    refused("no address", block_table=-table)
    refused("element encoding", block_table=table + 4)
    refused("tagged install", block_table=table + INSTALL)
    refused("multiples of 128", block_table=table + INSTALL, install=table + 64)
    refused("install must have shape", block_table=table + INSTALL, install=table[:1])
    refused("layer must lie in", layer=2)
    refused("layer must lie in", layer=-1)
    refused("window must be", window=0)
    refused("out must have shape", out=q[:1])
    refused("lse must be", lse=torch.zeros((2, 9), dtype=torch.float64))
    refused("keys and values", layout=KVLayout(2, 3, 64, dtype="uint8"))
    refused("keys and values", layout=KVLayout(2, 3, 64, format="opaque:other"))
    refused("another layout", plan=decode_plan(table, lens, replace(layout, num_layers=3)))
    refused("plan of 1 sequences|2 sequences, the table 1", plan=decode_plan(table[:1], lens[:1], layout))

    with pytest.raises(KernelError, match="has 2 queries"):
        prefill_plan(
            torch.tensor([0, 1, 3], dtype=torch.int32),
            table,
            torch.tensor([20, 1], dtype=torch.int32),
            layout,
        )
    with pytest.raises(KernelError, match="not descend"):
        prefill_plan(torch.tensor([0, 3, 2], dtype=torch.int32), table, lens, layout)
    with pytest.raises(KernelError, match="k must have shape"):
        write_kv(kv[:, :2], kv, at, row, 0, layout)
    with pytest.raises(KernelError, match="v must be"):
        write_kv(kv, kv.half(), at, row, 0, layout)
    with pytest.raises(KernelError, match="offsets must lie in"):
        write_kv(kv, kv, at, row + 15, 0, layout)
    with pytest.raises(KernelError, match="offsets must be int32"):
        write_kv(kv, kv, at, row.float(), 0, layout)
    with pytest.raises(KernelError, match="no address"):
        write_kv(kv, kv, at * 0, row, 0, layout)
    with pytest.raises(KernelError, match="block_bytes must be"):
        copy_blocks(at, at, 100)
    with pytest.raises(KernelError, match="dst must have shape"):
        copy_blocks(at, at[:1], 128)
