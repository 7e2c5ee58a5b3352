"""Pages of engines' own tensors become blocks and blocks pages, whatever order the engine keeps them in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import pytest
import torch
from kvpager import KVLayout
from kvpager.kernels import EnginePages, gather, scatter
from kvpager.kernels.engine_pages import VllmOrder
from kvpager.tests.block_arenas import GPU_PLACES, PLACES, Arena, computing_device, put_row, random_elements
from kvpager.tiers.errors import KernelError

ORDERS: tuple[VllmOrder, ...] = get_args(VllmOrder)
SIZES = {"P": 2, "N": 11}
LAYOUTS = [
    KVLayout(3, 8, 128, 16, dtype="float16"),
    KVLayout(2, 2, 64, 32, dtype="bfloat16"),
    KVLayout(2, 3, 128, 16, dtype="bfloat16", format="plain"),
    KVLayout(2, 2, 32, 8, dtype="float32"),
    KVLayout(2, 1, 80, 5, dtype="float16"),
    KVLayout(2, 3, 20, 4, dtype="float16"),
    KVLayout(2, 2, 128, 16, dtype="uint8"),
    KVLayout(3, 8, 128, 16, dtype="float16", format="opaque:nhd"),
    KVLayout(2, 3, 20, 4, dtype="float16", format="opaque:small"),
]
LAYOUT = LAYOUTS[0]
PAGES = 11


def name_of(layout: KVLayout) -> str:
    return f"{layout.num_kv_heads}x{layout.head_dim}-{layout.block_size}-{layout.dtype}-{layout.format}"


@dataclass(frozen=True)
class Engine:
    """An engine's tensors, and their description."""

    pages: EnginePages
    tensors: list[torch.Tensor]

    def state(self) -> list[list[torch.Tensor]]:
        """What they hold, [plane][layer] of [pages, tokens, heads, dim], on the CPU."""
        if self.pages.device.type == "cuda":
            torch.cuda.synchronize()
        return [[tensor.cpu().clone() for tensor in plane] for plane in self.pages.planes]

    def refill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.tensors:
            tensor.copy_(random_elements(tensor.shape, tensor.dtype, generator))


Maker = Callable[[KVLayout, torch.device], Engine]


def vllm(order: VllmOrder, *, as_nhd: bool = False) -> Maker:
    """Tensors of vLLM whose memory is in this order; HND may be shown as NHD, as vLLM itself does."""

    def make(layout: KVLayout, device: torch.device) -> Engine:
        sizes = {**SIZES, "T": layout.block_size, "H": layout.num_kv_heads, "D": layout.head_dim}
        shape = [sizes[letter] for letter in order]
        dtype = getattr(torch, layout.dtype)
        tensors = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layout.num_layers)]
        shown, shown_order = tensors, order
        if as_nhd:
            shown = [tensor.transpose(2, 3) for tensor in tensors]
            shown_order = "PNTHD" if order == "PNHTD" else "NPTHD"
        return Engine(EnginePages.vllm(layout, shown, shown_order), tensors)

    return make


def sglang(page_tokens: int) -> Maker:
    def make(layout: KVLayout, device: torch.device) -> Engine:
        size = page_tokens or layout.block_size
        shape = (PAGES * layout.block_size + size - 1, layout.num_kv_heads, layout.head_dim)
        dtype = getattr(torch, layout.dtype)
        keys, values = (
            [torch.empty(shape, dtype=dtype, device=device) for _ in range(layout.num_layers)]
            for _ in range(2)
        )
        return Engine(EnginePages.sglang(layout, keys, values, size), [*keys, *values])

    return make


MAKERS = {
    **{f"vllm-{order}": vllm(order) for order in ORDERS},
    "vllm-PNHTD-as-NHD": vllm("PNHTD", as_nhd=True),
    "vllm-NPHTD-as-NHD": vllm("NPHTD", as_nhd=True),
    "sglang-1": sglang(1),
    "sglang-block": sglang(0),
}


class Transfer:
    """Blocks in an arena, pages of an engine, and which belong together."""

    def __init__(self, maker: Maker, layout: KVLayout, place: str, count: int = 6, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.layout = layout
        self.engine = maker(layout, computing_device(place))
        self.engine.refill(seed)
        self.arena = Arena.make(place, layout.block_bytes, count + 2)
        pages = self.engine.pages
        self.chosen = torch.randperm(count + 2, generator=generator)[:count]
        order = torch.randperm(pages.num_pages, generator=generator)
        self.slots = order[: count * pages.pages_per_block].view(count, -1)
        self.blocks = self.arena.addresses[self.chosen.to(pages.device)]

    def on_device(self, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return self.slots.to(self.engine.pages.device, dtype)

    def put(self, state: list[list[torch.Tensor]], blocks: torch.Tensor, layers: range | None = None) -> None:
        """Put what an engine holds into blocks (uint8 [blocks, block_bytes]), by each format's definition."""
        layout, tokens = self.layout, self.engine.pages.page_tokens
        for number, slots in zip(self.chosen.tolist(), self.slots.tolist(), strict=True):
            for index, slot in enumerate(slots):
                for layer in layers or range(layout.num_layers):
                    for plane in range(layout.planes):
                        if slot < 0:
                            continue
                        page = state[plane][layer][slot]
                        if self.engine.pages.opaque:
                            self.put_opaque(blocks[number], layer, plane, index, slot)
                            continue
                        for token in range(tokens):
                            at = index * tokens + token
                            for head in range(layout.num_kv_heads):
                                put_row(blocks[number], layout, layer, plane, head, at, page[token, head])

    def put_opaque(self, block: torch.Tensor, layer: int, plane: int, index: int, slot: int) -> None:
        """The bytes of a page in the order of their addresses."""
        page = self.engine.pages.planes[plane][layer][slot]
        strides = page.stride()
        by_address = sorted(range(3), key=lambda dim: (-strides[dim], dim))
        data = page.permute(by_address).contiguous().cpu().view(torch.uint8).flatten()
        plane_bytes = self.layout.page_bytes // self.layout.planes
        start = layer * self.layout.page_bytes + plane * plane_bytes + index * len(data)
        block[start : start + len(data)] = data


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("place", PLACES)
def test_pages_become_blocks_and_blocks_pages(layout: KVLayout, maker: Maker, place: str) -> None:
    transfer = Transfer(maker, layout, place, seed=layout.head_dim)
    before = transfer.engine.state()
    expected = transfer.arena.bytes()
    transfer.put(before, expected)
    gather(transfer.engine.pages, transfer.on_device(), transfer.blocks)
    assert torch.equal(transfer.arena.bytes(), expected)
    assert same(transfer.engine.state(), before)

    transfer.engine.refill(99)
    wanted = transfer.engine.state()
    used = transfer.slots.flatten()
    for plane in range(2):
        for layer in range(layout.num_layers):
            wanted[plane][layer][used] = before[plane][layer][used]
    scatter(transfer.engine.pages, transfer.on_device(torch.int64), transfer.blocks)
    assert same(transfer.engine.state(), wanted)
    assert torch.equal(transfer.arena.bytes(), expected)


def same(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for some, others in zip(one, other, strict=True)
        for a, b in zip(some, others, strict=True)
    )


@pytest.mark.parametrize("layout", [LAYOUT, LAYOUTS[1], LAYOUTS[7]], ids=name_of)
@pytest.mark.parametrize("place", PLACES)
def test_absent_pages_padding_and_other_layers_stay_as_they_are(layout: KVLayout, place: str) -> None:
    transfer = Transfer(sglang(4), layout, place, count=5)
    transfer.slots[1, -1] = -1
    transfer.slots[3] = -1
    before, expected = transfer.engine.state(), transfer.arena.bytes()
    layers = range(1, layout.num_layers)
    transfer.put(before, expected, layers)
    padded = torch.cat((transfer.blocks, transfer.blocks.new_tensor([0, 1])))
    slots = torch.cat((transfer.on_device(), transfer.on_device()[:2]))
    gather(transfer.engine.pages, slots, padded, layers=layers)
    assert torch.equal(transfer.arena.bytes(), expected)

    transfer.engine.refill(7)
    wanted = transfer.engine.state()
    used = transfer.slots[transfer.slots >= 0]
    for plane in range(2):
        for layer in layers:
            wanted[plane][layer][used] = before[plane][layer][used]
    scatter(transfer.engine.pages, slots, padded, layers=layers)
    assert same(transfer.engine.state(), wanted)


@pytest.mark.parametrize("place", PLACES)
def test_a_latent_has_one_plane(place: str) -> None:
    layout = KVLayout(2, 1, 576, 16, dtype="bfloat16", format="plain", planes=1)

    def latents(layout: KVLayout, device: torch.device) -> Engine:
        tensors = [torch.empty((PAGES, 16, 1, 576), dtype=torch.bfloat16, device=device) for _ in range(2)]
        return Engine(EnginePages(layout, (tuple(tensors),)), tensors)

    transfer = Transfer(latents, layout, place)
    expected = transfer.arena.bytes()
    transfer.put(transfer.engine.state(), expected)
    gather(transfer.engine.pages, transfer.on_device(), transfer.blocks)
    assert torch.equal(transfer.arena.bytes(), expected)


@pytest.mark.parametrize("place", PLACES)
def test_slots_of_one_page_a_block_may_be_a_plain_list(place: str) -> None:
    transfer = Transfer(vllm("PNTHD"), LAYOUT, place)
    expected = transfer.arena.bytes()
    transfer.put(transfer.engine.state(), expected)
    gather(transfer.engine.pages, transfer.on_device()[:, 0], transfer.blocks)
    assert torch.equal(transfer.arena.bytes(), expected)


@pytest.mark.parametrize("place", PLACES)
def test_nothing_to_move_moves_nothing(place: str) -> None:
    transfer = Transfer(vllm("PNTHD"), LAYOUT, place)
    before = transfer.arena.bytes()
    pages = transfer.engine.pages
    gather(pages, transfer.on_device()[:0], transfer.blocks[:0])
    gather(pages, transfer.on_device(), transfer.blocks, layers=range(1, 1))
    assert torch.equal(transfer.arena.bytes(), before)


def test_tensors_that_do_not_fit_are_named() -> None:
    layout = KVLayout(2, 2, 64, 16, dtype="float16")
    opaque = KVLayout(2, 2, 64, 16, dtype="float16", format="opaque:x")

    def good(pages: int = 4, tokens: int = 16, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.zeros((pages, tokens, 2, 64), dtype=dtype)

    fine = (good(), good())
    strided = torch.zeros((4, 16, 2, 128), dtype=torch.float16)
    EnginePages(layout, (fine, (good(), strided[..., :64])))
    for planes, problem in (
        ((fine,), "planes must be 2 times 2 tensors"),
        ((fine, fine[:1]), "planes must be 2 times 2 tensors"),
        ((fine, (good(), good(dtype=torch.float32))), "values of layer 1 must have elements of 2 bytes"),
        (((good(dtype=torch.bfloat16), good()), fine), "keys of layer 0 must be float16"),
        ((fine, (good()[..., :32], good())), "values of layer 0 must be .*pages, page_tokens, 2, 64"),
        ((fine, (good()[0], good())), "values of layer 0 must be .*pages, page_tokens, 2, 64"),
        (((good(), good(5)), fine), "keys of layer 1 is .*others are"),
        (((good(tokens=12),) * 2,) * 2, "keys of layer 0 has pages of 12 tokens"),
        ((fine, (strided[..., ::2], good())), "contiguous in its last dimension"),
    ):
        with pytest.raises(KernelError, match=problem):
            EnginePages(layout, planes)
    with pytest.raises(KernelError, match="values of layer 1 has pages with gaps"):
        EnginePages(opaque, (fine, (good(), strided[..., :64])))
    with pytest.raises(KernelError, match=r"keys of layer 1 is torch\.float16, others are torch\.bfloat16"):
        EnginePages(opaque, ((good(dtype=torch.bfloat16), good()), fine))
    with pytest.raises(KernelError, match="scale_bytes"):
        EnginePages(KVLayout(2, 2, 64, 16, scale_bytes=8), (fine, fine))
    with pytest.raises(KernelError, match=r"layer 1 is .*which is not PNTHD"):
        EnginePages.vllm(layout, [torch.zeros(2, 4, 16, 2, 64), torch.zeros(4, 2, 16, 2, 64)], "PNTHD")
    with pytest.raises(KernelError, match="order must be"):
        EnginePages.vllm(layout, [torch.zeros(2, 4, 16, 2, 64)] * 2, "PNTTD")  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="values of layer 0 must have three dimensions"):
        EnginePages.sglang(layout, [good().flatten(0, 1)] * 2, [good()] * 2)
    with pytest.raises(KernelError, match="page_tokens"):
        EnginePages.sglang(layout, [good().flatten(0, 1)] * 2, [good().flatten(0, 1)] * 2, 0)


@pytest.mark.parametrize("place", PLACES)
def test_arguments_that_do_not_fit_are_refused_before_anything_moves(place: str) -> None:
    transfer = Transfer(sglang(4), LAYOUT, place)
    pages, slots, blocks = transfer.engine.pages, transfer.on_device(), transfer.blocks
    before, state = transfer.arena.bytes(), transfer.engine.state()
    wrong: list[tuple[tuple[torch.Tensor, torch.Tensor], dict[str, Any], str]] = [
        ((slots, blocks.int()), {}, "blocks must be torch.int64"),
        ((slots, blocks[:, None]), {}, "blocks must have shape"),
        ((slots.float(), blocks), {}, "slots must be int32 or int64"),
        ((slots[:, 0], blocks), {}, "slots must have shape"),
        ((slots[:3], blocks), {}, "slots must have shape"),
        ((slots, blocks), {"layers": range(4)}, "layers must be a range"),
        ((slots, blocks), {"layers": range(0, 2, 2)}, "layers must be a range"),
        ((slots, blocks), {"ctas": 0}, "ctas must be positive"),
    ]
    for move in (gather, scatter):
        for arguments, options, problem in wrong:
            with pytest.raises(KernelError, match=problem):
                move(pages, *arguments, **options)
    assert torch.equal(transfer.arena.bytes(), before)
    assert same(transfer.engine.state(), state)


@pytest.mark.parametrize("place", PLACES)
def test_slots_and_addresses_are_looked_at_in_debug_mode(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = Transfer(vllm("PNTHD"), LAYOUT, place)
    before = transfer.arena.bytes()
    monkeypatch.setenv("KVPAGER_DEBUG", "1")
    with pytest.raises(KernelError, match="slots has 11, the engine's tensors have 11 pages"):
        gather(transfer.engine.pages, transfer.on_device() * 0 + PAGES, transfer.blocks)
    with pytest.raises(KernelError, match="blocks has 0x100000"):
        gather(transfer.engine.pages, transfer.on_device(), transfer.blocks * 0 + (1 << 20))
    assert torch.equal(transfer.arena.bytes(), before)


# ---- on a GPU ----


@pytest.mark.gpu
def test_what_lies_on_another_device_is_refused() -> None:
    transfer = Transfer(vllm("PNTHD"), LAYOUT, "vram")
    with pytest.raises(KernelError, match="slots must be on cuda:0"):
        gather(transfer.engine.pages, transfer.slots.int(), transfer.blocks)
    with pytest.raises(KernelError, match="blocks must be on cuda:0"):
        gather(transfer.engine.pages, transfer.on_device(), transfer.blocks.cpu())


@pytest.mark.parametrize("place", GPU_PLACES)
@pytest.mark.parametrize("ctas", [1, 3, 1000])
def test_any_number_of_ctas_moves_the_same(place: str, ctas: int) -> None:
    transfer = Transfer(vllm("NPHTD"), LAYOUT, place)
    before, expected = transfer.engine.state(), transfer.arena.bytes()
    transfer.put(before, expected)
    gather(transfer.engine.pages, transfer.on_device(), transfer.blocks, ctas=ctas)
    assert torch.equal(transfer.arena.bytes(), expected)
    for tensor in transfer.engine.tensors:
        tensor.zero_()
    scatter(transfer.engine.pages, transfer.on_device(), transfer.blocks, ctas=ctas)
    after = transfer.engine.state()
    used = transfer.slots.flatten()
    assert same(
        [[layer[used] for layer in plane] for plane in after],
        [[layer[used] for layer in plane] for plane in before],
    )


@pytest.mark.parametrize("place", GPU_PLACES)
def test_tensors_may_start_on_any_element(place: str) -> None:
    def shifted(layout: KVLayout, device: torch.device) -> Engine:
        shape = (PAGES, layout.block_size, layout.num_kv_heads, layout.head_dim)
        size = torch.Size(shape).numel()
        flat = [torch.empty(size + 1, dtype=torch.float16, device=device)[1:] for _ in range(6)]
        tensors = [tensor.view(shape) for tensor in flat]
        return Engine(EnginePages(layout, (tuple(tensors[:3]), tuple(tensors[3:]))), tensors)

    transfer = Transfer(shifted, LAYOUT, place)
    expected = transfer.arena.bytes()
    transfer.put(transfer.engine.state(), expected)
    gather(transfer.engine.pages, transfer.on_device(), transfer.blocks)
    assert torch.equal(transfer.arena.bytes(), expected)


@pytest.mark.parametrize("place", GPU_PLACES)
def test_a_graph_moves_what_its_tables_name_when_it_is_replayed(place: str) -> None:
    transfer = Transfer(vllm("NPTHD"), LAYOUT, place)
    pages = transfer.engine.pages
    slots = torch.zeros((8, 1), dtype=torch.int32, device="cuda")
    blocks = torch.zeros(8, dtype=torch.int64, device="cuda")  # zero: padding
    gather(pages, slots, blocks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather(pages, slots, blocks)
    expected = transfer.arena.bytes()
    graph.replay()
    assert torch.equal(transfer.arena.bytes(), expected)
    slots[1:7], blocks[1:7] = transfer.on_device(), transfer.blocks
    transfer.put(transfer.engine.state(), expected)
    graph.replay()
    assert torch.equal(transfer.arena.bytes(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(16))
def test_random_shapes(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    names = list(MAKERS)
    maker = MAKERS[names[draw(*range(len(names)))]]
    layout = KVLayout(
        draw(1, 2, 5),
        draw(1, 2, 5, 8),
        draw(8, 24, 64, 96, 128, 256),
        draw(1, 7, 16, 32),
        dtype=("float16", "bfloat16", "float32")[draw(0, 1, 2)],
        format=(None, "plain", "opaque:x")[draw(0, 1, 2)],
    )
    transfer = Transfer(maker, layout, ("vram", "host")[draw(0, 1)], draw(1, 3, 9), seed)
    expected = transfer.arena.bytes()
    transfer.put(transfer.engine.state(), expected)
    gather(transfer.engine.pages, transfer.on_device(), transfer.blocks)
    assert torch.equal(transfer.arena.bytes(), expected)
