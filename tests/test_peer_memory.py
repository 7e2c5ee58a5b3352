"""Blocks in the memory of another GPU, read and written in place at their addresses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kvpager import KVLayout
from kvpager.kernels import copy_blocks, decode_attention, prefill_attention
from kvpager.tests.attention_cases import Case, make_case
from kvpager.tiers.arena import DeviceArena

LAYOUT = KVLayout(1, 8, 128)
LENGTHS = [2500, 700, 33, 1, 1600, 90]
SLOTS = 400

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a peer's memory needs two GPUs"),
]


@pytest.fixture
def peer() -> Iterator[DeviceArena]:
    arena = DeviceArena(LAYOUT.block_bytes, SLOTS, "cuda:1")
    try:
        arena.open_to("cuda:0")
        yield arena
    finally:
        arena.close()


def cases(peer: DeviceArena) -> list[Case]:
    """The same batch in one GPU's memory, partly in a peer's, and in that alone, without and with install."""
    shares = ((0.0, 0.0), (0.3, 0.0), (1.0, 0.0), (1.0, 1.0))
    gpu = torch.device("cuda:0")
    return [
        make_case(
            LAYOUT, LENGTHS, gpu, seed=3, far_share=far, install_share=install, far_slots=peer.slab.clone()
        )
        for far, install in shares
    ]


def expect_the_same(case: Case, out: torch.Tensor, want: torch.Tensor, first: torch.Tensor) -> None:
    assert float((out.double() - want).norm() / want.norm()) < 2e-3
    assert torch.equal(out.view(torch.int16), first.view(torch.int16))
    for word, block in zip(case.install.flatten().tolist(), case.blocks.flatten().tolist(), strict=True):
        if word:
            assert torch.equal(case.place(word), case.stored[block])


def test_a_step_reads_a_peers_blocks_in_place_and_installs_them(peer: DeviceArena) -> None:
    q = torch.randn(len(LENGTHS), 32, 128, dtype=torch.float16, device="cuda:0")
    outs = []
    for case in cases(peer):
        out = decode_attention(q, case.table, case.lengths, 0, LAYOUT, install=case.install)
        outs.append(out)
        want, _lse = case.answer(q, LAYOUT.head_dim**-0.5, None)
        expect_the_same(case, out, want, outs[0])


def test_a_chunk_reads_a_peers_blocks_in_place_and_installs_them(peer: DeviceArena) -> None:
    tokens = [300, 200, 33, 1, 64, 90]
    bounds = [0]
    for count in tokens:
        bounds.append(bounds[-1] + count)
    cu = torch.tensor(bounds, dtype=torch.int32, device="cuda:0")
    q = torch.randn(bounds[-1], 32, 128, dtype=torch.float16, device="cuda:0")
    outs = []
    for case in cases(peer):
        out = prefill_attention(q, cu, case.table, case.lengths, 0, LAYOUT, install=case.install)
        outs.append(out)
        expect_the_same(case, out, case.causal_answer(q, bounds, LAYOUT.head_dim**-0.5), outs[0])


def test_blocks_go_to_a_peer_and_come_back(peer: DeviceArena) -> None:
    here = DeviceArena(LAYOUT.block_bytes, SLOTS, "cuda:0")
    back = DeviceArena(LAYOUT.block_bytes, SLOTS, "cuda:0")
    here.slab.random_(0, 256)
    for source, target in ((here, peer), (peer, back)):
        offsets = torch.arange(SLOTS, device="cuda:0") * LAYOUT.block_bytes
        copy_blocks(source.base + offsets, target.base + offsets, LAYOUT.block_bytes)
    assert torch.equal(back.slab, here.slab)
