"""vLLM's KV tensors, in every order that it keeps them in, become blocks and pages again. Without a vLLM."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from kvpager import KVLayout
from kvpager.api.integrations.vllm.pages import CudaPages, engine_pages, pages_of
from kvpager.kernels import gather, scatter
from kvpager.tests.conftest import DEVICES

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 7, 2, 16, 64
"""CONTENT: keys and values of a token and head, as vLLM has them."""
ORDERS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
"""vLLM's `KVCacheLayout`, where a block of a layer is one run of bytes."""
LAYOUT = KVLayout(LAYERS, 1, HEADS * CONTENT * 2, TOKENS, "uint8", "opaque:test", planes=1)


def tensors_in(order: str, device: str) -> list[torch.Tensor]:
    """Views [blocks, heads, tokens, content] of layers of one allocation, as vLLM makes them."""
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": CONTENT}
    generator = torch.Generator().manual_seed(1)
    shape = [sizes[letter] for letter in order]
    memory = torch.randint(-1000, 1000, shape, generator=generator).to(torch.int16).to(device)
    logical = memory.permute([order.index(letter) for letter in "LBHNC"]).view(torch.bfloat16)
    return list(logical.unbind(0))


def expected(tensors: list[torch.Tensor], block: int) -> bytes:
    """What a block is: each layer's bytes of it as they lie."""
    parts = []
    for tensor in tensors:
        page = tensor[block].view(torch.int16)
        order = sorted(range(page.dim()), key=page.stride, reverse=True)
        parts.append(page.permute(order).contiguous().cpu().numpy().tobytes())
    return b"".join(parts)


def host_memory(slots: int, device: str) -> torch.Tensor:
    """On 128 bytes, as a sidecar's is."""
    size = slots * LAYOUT.block_bytes
    memory = torch.zeros(size + 128, dtype=torch.uint8, pin_memory=device != "cpu")
    start = -memory.data_ptr() % 128
    return memory[start : start + size]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("device", DEVICES)
def test_blocks_are_stored_as_the_engine_has_them_and_come_back_into_others(order: str, device: str) -> None:
    tensors = tensors_in(order, device)
    pages = pages_of(LAYOUT, {str(at): tensor for at, tensor in enumerate(tensors)})
    host = host_memory(5, device)
    addresses = np.array([3, 0, 4], dtype=np.int64) * LAYOUT.block_bytes + host.data_ptr()
    pages.store([5, 1, 2], addresses, pages.fence())
    stored = {block: expected(tensors, block) for block in (5, 1, 2)}
    slots = host.view(5, -1)
    for slot, block in ((3, 5), (0, 1), (4, 2)):
        assert slots[slot].numpy().tobytes()[: LAYERS * HEADS * TOKENS * CONTENT * 2] == stored[block]
    assert not slots[[1, 2]].any()
    untouched = {block: expected(tensors, block) for block in (1, 2, 3, 5)}
    pages.load([0, 4, 6], addresses, pages.fence())
    assert [expected(tensors, block) for block in (0, 4, 6)] == [stored[block] for block in (5, 1, 2)]
    assert {block: expected(tensors, block) for block in (1, 2, 3, 5)} == untouched
    pages.close()


@pytest.mark.parametrize("order", ORDERS)
def test_the_kernels_are_given_the_places_that_the_cpu_copies_from(order: str) -> None:
    tensors = tensors_in(order, "cpu")
    pages = engine_pages(LAYOUT, tensors)
    host = host_memory(4, "cpu")
    blocks = torch.tensor([2, 0, 3]) * LAYOUT.block_bytes + host.data_ptr()
    numbers = torch.tensor([6, 0, 3])
    gather(pages, numbers, blocks)
    slots = host.view(4, -1)
    used = LAYERS * HEADS * TOKENS * CONTENT * 2
    assert [slots[at].numpy().tobytes()[:used] for at in (2, 0, 3)] == [
        expected(tensors, at) for at in (6, 0, 3)
    ]
    scatter(pages, torch.tensor([1, 2, 4]), blocks)
    assert [expected(tensors, at) for at in (1, 2, 4)] == [expected(tensors, at) for at in (6, 0, 3)]
    # What the kernel is launched with: where each layer begins, and from block to block.
    for layer, tensor in enumerate(tensors):
        assert pages._table[layer, 0].tolist() == [tensor.data_ptr(), tensor.stride(0) * 2, 0, 0]
    assert (pages.rows, pages.heads, pages.row_bytes) == (1, 1, HEADS * TOKENS * CONTENT * 2)


@pytest.mark.gpu
def test_a_copy_waits_for_what_was_launched_before_its_fence() -> None:
    tensors = tensors_in("LBNHC", "cuda:0")
    pages = CudaPages(LAYOUT, tensors)
    host = host_memory(1, "cuda:0")
    address = np.array([host.data_ptr()], dtype=np.int64)
    pages.store([0], address, pages.fence())  # compiled
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    for tensor in tensors:
        tensor[0].fill_(1.0)
    pages.store([0], address, pages.fence())
    assert host.numpy().tobytes()[: len(expected(tensors, 0))] == expected(tensors, 0)
    pages.close()


def test_the_orders_are_those_where_layers_and_blocks_are_outermost() -> None:
    every = {"".join(one) for one in permutations("LBHNC") if one[-1] == "C" and set(one[:2]) == {"L", "B"}}
    assert every == set(ORDERS)
