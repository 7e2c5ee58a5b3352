"""Keys and values of new tokens land in their rows of their blocks, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kvpager import KVLayout
from kvpager.kernels import write_kv, write_plan
from kvpager.tests.block_arenas import GPU_PLACES, PLACES, Arena, computing_device, put_row, random_elements
from kvpager.tiers.address import FAR, INSTALL
from kvpager.tiers.errors import KernelError

LAYOUTS = [
    KVLayout(2, 8, 128, 16, dtype="float16"),
    KVLayout(3, 2, 64, 32, dtype="bfloat16"),
    KVLayout(2, 1, 256, 8, dtype="float16"),
    KVLayout(2, 3, 128, 16, dtype="bfloat16", format="plain"),
    KVLayout(2, 3, 64, 16, dtype="float32"),
    KVLayout(2, 2, 80, 5, dtype="bfloat16"),
    KVLayout(2, 2, 20, 4, dtype="float16", scale_bytes=24),
    KVLayout(1, 5, 7, 3, dtype="float16"),
]
LAYOUT = LAYOUTS[0]


def name_of(layout: KVLayout) -> str:
    return f"{layout.num_kv_heads}x{layout.head_dim}-{layout.block_size}-{layout.dtype}-{layout.format}"


class Tokens:
    """Tokens with random rows of random blocks, and what their blocks must hold when they are written."""

    def __init__(self, layout: KVLayout, place: str, count: int, seed: int, skip: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.layout = layout
        self.count = count
        slots = -(-count // layout.block_size) + 3
        self.arena = Arena.make(place, layout.block_bytes, slots)
        self.device = computing_device(place)
        places = torch.randperm(slots * layout.block_size, generator=generator)[:count]
        self.blocks, self.rows = places // layout.block_size, places % layout.block_size
        self.addresses = self.arena.addresses[self.blocks.to(self.device)] | INSTALL
        self.offsets = self.rows.to(self.device)
        # Keys and values are parts of one projection, as in a model; `skip` elements before it.
        heads, width = layout.num_kv_heads, layout.head_dim
        dtype = getattr(torch, layout.dtype)
        flat = random_elements((skip + count * (4 * heads + 1) * width,), dtype, generator)
        self.projection = flat.to(self.device)[skip:].view(count, 4 * heads + 1, width)
        self.k, self.v = self.projection[:, heads : 2 * heads], self.projection[:, 3 * heads : 4 * heads]
        self.expected = self.arena.bytes()

    def expect(self, layer: int, tokens: range | None = None) -> None:
        k, v = self.k.cpu(), self.v.cpu()
        for token in tokens or range(self.count):
            block, row = self.expected[self.blocks[token]], int(self.rows[token])
            for head in range(self.layout.num_kv_heads):
                put_row(block, self.layout, layer, 0, head, row, k[token, head])
                put_row(block, self.layout, layer, 1, head, row, v[token, head])

    def assert_written(self) -> None:
        assert torch.equal(self.arena.bytes(), self.expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
@pytest.mark.parametrize("place", PLACES)
def test_tokens_land_in_their_rows_and_nothing_else_changes(layout: KVLayout, place: str) -> None:
    tokens = Tokens(layout, place, 37, seed=layout.head_dim)
    for layer in range(layout.num_layers):
        offsets = tokens.offsets.int() if layer else tokens.offsets
        write_kv(tokens.k, tokens.v, tokens.addresses, offsets, layer, layout)
        tokens.expect(layer)
        tokens.assert_written()


@pytest.mark.parametrize("place", PLACES)
def test_a_plan_serves_all_layers(place: str) -> None:
    tokens = Tokens(LAYOUT, place, 5, seed=2)
    plan = write_plan(tokens.addresses, tokens.offsets, LAYOUT)
    for layer in range(LAYOUT.num_layers):
        write_kv(tokens.k, tokens.v, tokens.addresses, tokens.offsets, layer, LAYOUT, plan=plan)
        tokens.expect(layer)
    tokens.assert_written()


@pytest.mark.parametrize("place", PLACES)
def test_no_tokens_write_nothing(place: str) -> None:
    tokens = Tokens(LAYOUT, place, 4, seed=3)
    write_kv(tokens.k[:0], tokens.v[:0], tokens.addresses[:0], tokens.offsets[:0], 0, LAYOUT)
    tokens.assert_written()


@pytest.mark.parametrize("place", PLACES)
def test_arguments_that_do_not_fit_are_refused_before_anything_is_written(place: str) -> None:
    tokens = Tokens(LAYOUT, place, 4, seed=4)
    k, v, at, row = tokens.k, tokens.v, tokens.addresses, tokens.offsets
    plan = write_plan(at, row, KVLayout(2, 8, 128, 32))
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: write_kv(k.float(), v, at, row, 0, LAYOUT), "k must be torch.float16"),
        (lambda: write_kv(k, v[:, :4], at, row, 0, LAYOUT), "v must have shape"),
        (lambda: write_kv(k[:3], v, at, row, 0, LAYOUT), "k must have shape"),
        (lambda: write_kv(k, v, at.int(), row, 0, LAYOUT), "addresses must be torch.int64"),
        (lambda: write_kv(k, v, at[:, None], row, 0, LAYOUT), "addresses must have shape"),
        (lambda: write_kv(k, v, at, row[:3], 0, LAYOUT), "offsets must have shape"),
        (lambda: write_kv(k, v, at, row.float(), 0, LAYOUT), "offsets must be"),
        (lambda: write_kv(k, v, at, row, 2, LAYOUT), "layer must lie in 0..1"),
        (lambda: write_kv(k, v, at, row, 0, LAYOUT, plan=plan), "another layout"),
        (lambda: write_plan(at, row, KVLayout(2, 8, 128, dtype="uint8")), "uint8"),
        (lambda: write_plan(at, row, KVLayout(2, 8, 128, format="opaque:x")), "opaque:x"),
        (lambda: write_plan(at, row, KVLayout(2, 8, 128, planes=1)), "1 planes"),
    ]
    for call, problem in wrong:
        with pytest.raises(KernelError, match=problem):
            call()
    tokens.assert_written()


@pytest.mark.gpu
def test_what_lies_on_another_device_is_refused() -> None:
    tokens = Tokens(LAYOUT, "vram", 4, seed=4)
    with pytest.raises(KernelError, match="k must be on cuda:0, it is on cpu"):
        write_kv(tokens.k.cpu(), tokens.v, tokens.addresses, tokens.offsets, 0, LAYOUT)
    with pytest.raises(KernelError, match="offsets must be on cuda:0"):
        write_kv(tokens.k, tokens.v, tokens.addresses, tokens.offsets.cpu(), 0, LAYOUT)
    scattered = tokens.k.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(KernelError, match="k must be contiguous in its last dimension"):
        write_kv(scattered, tokens.v, tokens.addresses, tokens.offsets, 0, LAYOUT)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
@pytest.mark.parametrize("place", GPU_PLACES)
def test_keys_and_values_may_start_on_any_element(layout: KVLayout, place: str) -> None:
    for skip in (1, 2, 4):
        tokens = Tokens(layout, place, 21, seed=skip, skip=skip)
        write_kv(tokens.k, tokens.v, tokens.addresses, tokens.offsets, 0, layout)
        tokens.expect(0)
        tokens.assert_written()


@pytest.mark.parametrize("place", GPU_PLACES)
def test_a_graph_writes_what_its_tensors_hold_when_it_is_replayed(place: str) -> None:
    tokens = Tokens(LAYOUT, place, 24, seed=6)
    at = torch.zeros(32, dtype=torch.int64, device="cuda")  # zero: padding
    offsets = torch.zeros(32, dtype=torch.int32, device="cuda")
    k, v = (torch.zeros((32, *tokens.k.shape[1:]), dtype=tokens.k.dtype, device="cuda") for _ in range(2))
    write_kv(k, v, at, offsets, 0, LAYOUT)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = write_plan(at, offsets, LAYOUT)
        for layer in range(2):
            write_kv(k, v, at, offsets, layer, LAYOUT, plan=plan)
    graph.replay()
    tokens.assert_written()
    for some in (range(10), range(10, 24)):
        count = len(some)
        at.zero_()[:count] = tokens.addresses[some.start : some.stop]
        offsets[:count] = tokens.offsets[some.start : some.stop]
        k[:count], v[:count] = tokens.k[some.start : some.stop], tokens.v[some.start : some.stop]
        graph.replay()
        for layer in range(2):
            tokens.expect(layer, some)
        tokens.assert_written()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_random_shapes(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    dtype = ("float16", "bfloat16", "float32")[seed % 3]
    layout = KVLayout(
        draw(1, 3), draw(1, 2, 5, 8), draw(8, 24, 64, 96, 128, 192, 256), draw(1, 7, 16, 32, 64), dtype=dtype
    )
    place = ("vram", "host")[draw(0, 1)]
    tokens = Tokens(layout, place, draw(1, 2, 33, 257, 1025), seed, skip=draw(0, 0, 8, 1))
    layer = layout.num_layers - 1
    write_kv(tokens.k, tokens.v, tokens.addresses, tokens.offsets, layer, layout)
    tokens.expect(layer)
    tokens.assert_written()


@pytest.mark.parametrize("place", PLACES)
def test_an_address_where_no_memory_is_is_refused_in_debug_mode(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = Tokens(LAYOUT, place, 4, seed=4)
    monkeypatch.setenv("KVPAGER_DEBUG", "1")
    write_kv(tokens.k, tokens.v, tokens.addresses, tokens.offsets, 0, LAYOUT)
    tokens.expect(0)
    tokens.addresses[2] = 1 << 20 | FAR
    with pytest.raises(KernelError, match=r"addresses has 0x100000"):
        write_kv(tokens.k, tokens.v, tokens.addresses, tokens.offsets, 0, LAYOUT)
    tokens.assert_written()
