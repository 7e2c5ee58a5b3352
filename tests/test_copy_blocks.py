"""Blocks arrive whole where they are copied to, from any memory to any, and nothing beside them changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from kvpager.kernels import copy_blocks, copy_pages
from kvpager.kernels.copy_blocks import AddressCopier, CopyForm
from kvpager.tests.block_arenas import PLACES, Arena, random_bytes
from kvpager.tiers.arena import AddressArray
from kvpager.tiers.driver import driver_answers
from kvpager.tiers.errors import ConfigError, KernelError
from kvpager.tiers.mover import CudaMover

CPU = "cpu"
WAYS = [
    (CPU, CPU),
    *(
        pytest.param(start, end, marks=pytest.mark.gpu, id=f"{start}-{end}")
        for start in ("vram", "host")
        for end in ("vram", "host")
    ),
]
GPU_WAYS = WAYS[1:]
SIZES = [(128, 1), (384, 70), (4096, 33), (4096 + 128, 40), (65536 - 128, 5), (1 << 20, 3)]


class Copies:
    """Random blocks at one end, poison at the other, and which of them are copied where."""

    def __init__(self, start: str, end: str, nbytes: int, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed + nbytes)
        self.nbytes = nbytes
        self.source, self.target = Arena.make(start, nbytes, count + 2), Arena.make(end, nbytes, count + 3)
        self.data = random_bytes(self.source.rows.shape, generator)
        self.source.rows.copy_(self.data)
        self.chosen = torch.randperm(count + 2, generator=generator)[:count]
        self.places = torch.randperm(count + 3, generator=generator)[:count]
        device = self.source.addresses.device
        self.src = self.source.addresses[self.chosen.to(device)]
        self.dst = self.target.addresses[self.places.to(device)]
        self.expected = self.target.bytes()

    def expect(self, offset: int = 0, nbytes: int | None = None) -> None:
        part = slice(offset, self.nbytes if nbytes is None else offset + nbytes)
        self.expected[self.places, part] = self.data[self.chosen, part]

    def assert_copied(self) -> None:
        assert torch.equal(self.target.bytes(), self.expected)
        assert torch.equal(self.source.bytes(), self.data)

    def on_the_host(self) -> tuple[AddressArray, AddressArray]:
        """The addresses without tags, in host memory."""
        return tuple((words.cpu() & ~127).numpy() for words in (self.src, self.dst))  # type: ignore[return-value]


@pytest.mark.parametrize(("nbytes", "count"), SIZES)
@pytest.mark.parametrize(("start", "end"), WAYS)
def test_blocks_arrive_whole_and_nothing_else_changes(start: str, end: str, nbytes: int, count: int) -> None:
    copies = Copies(start, end, nbytes, count)
    copy_blocks(copies.src, copies.dst, nbytes)
    copies.expect()
    copies.assert_copied()


@pytest.mark.parametrize(("start", "end"), WAYS)
def test_a_page_is_copied_alone(start: str, end: str) -> None:
    copies = Copies(start, end, 3 * 8320, 9)
    for offset, nbytes in ((8320, 8320), (0, 128), (3 * 8320 - 256, 256)):
        copy_pages(copies.src, copies.dst, offset, nbytes)
        copies.expect(offset, nbytes)
        copies.assert_copied()


@pytest.mark.parametrize(("start", "end"), WAYS)
def test_no_blocks_copy_nothing(start: str, end: str) -> None:
    copies = Copies(start, end, 256, 3)
    copy_blocks(copies.src[:0], copies.dst[:0], 256)
    copies.assert_copied()


@pytest.mark.parametrize("place", PLACES)
def test_arguments_that_do_not_fit_are_refused_before_anything_is_copied(place: str) -> None:
    copies = Copies(place, place, 256, 3)
    src, dst = copies.src, copies.dst
    wrong: list[tuple[Callable[[], None], str]] = [
        (lambda: copy_blocks(src.int(), dst, 256), "src must be torch.int64"),
        (lambda: copy_blocks(src, dst[:2], 256), "dst must have shape"),
        (lambda: copy_blocks(src[:, None], dst[:, None], 256), "src must have shape"),
        (lambda: copy_blocks(src, dst, 0), "block_bytes must be"),
        (lambda: copy_blocks(src, dst, 100), "block_bytes must be"),
        (lambda: copy_pages(src, dst, 64, 128), "byte_offset must be"),
        (lambda: copy_pages(src, dst, -128, 128), "byte_offset must be"),
        (lambda: copy_pages(src, dst, 128, 64), "nbytes must be"),
    ]
    for call, problem in wrong:
        with pytest.raises(KernelError, match=problem):
            call()
    copies.assert_copied()


@pytest.mark.parametrize("place", PLACES)
def test_an_address_where_no_memory_is_is_refused_in_debug_mode(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = Copies(place, place, 4096, 3)
    monkeypatch.setenv("KVPAGER_DEBUG", "1")
    copy_blocks(copies.src, copies.dst, 4096)
    copies.expect()
    wrong = copies.dst.clone()
    wrong[1] = 1 << 20
    with pytest.raises(KernelError, match=r"dst has 0x100000"):
        copy_blocks(copies.src, wrong, 4096)
    with pytest.raises(KernelError, match="src has"):
        copy_blocks(copies.src, copies.dst, 1 << 40)
    copies.assert_copied()


@pytest.mark.parametrize(("start", "end"), GPU_WAYS)
@pytest.mark.parametrize("bulk", [True, False], ids=["bulk", "plain"])
def test_every_form_copies_the_same(start: str, end: str, bulk: bool) -> None:
    copies = Copies(start, end, 20608, 50)
    device = copies.src.device
    if bulk and torch.cuda.get_device_capability(device)[0] < 9:
        pytest.skip("bulk copies came with compute capability 9.0")
    for ctas, warps, piece_bytes in ((1, 1, 128), (3, 2, 4096), (4, 4, 8192), (500, 8, 4096), (2, 1, 32768)):
        form = CopyForm(ctas, warps, piece_bytes, bulk)
        copies.target.rows.fill_(0xA5)
        copy_blocks(copies.src, copies.dst, 20608, form=form)
        copies.expect()
        copies.assert_copied()


@pytest.mark.parametrize(("start", "end"), GPU_WAYS)
def test_a_graph_copies_what_its_tables_name_when_it_is_replayed(start: str, end: str) -> None:
    copies = Copies(start, end, 12416, 20)
    src, dst = (torch.zeros(24, dtype=torch.int64, device="cuda") for _ in range(2))  # zero: padding
    copy_blocks(src, dst, 12416)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy_pages(src, dst, 0, 4224)
        copy_pages(src, dst, 4224, 8192)
    graph.replay()
    copies.assert_copied()
    src[2:22], dst[2:22] = copies.src, copies.dst
    graph.replay()
    copies.expect()
    copies.assert_copied()


@pytest.mark.gpu
def test_many_copies_in_a_row_do_not_disturb_each_other() -> None:
    copies = Copies("vram", "vram", 65536, 64)
    for turn in range(200):
        data = copies.data.roll(turn, 0)
        copies.source.rows.copy_(data)
        copy_blocks(copies.src, copies.dst, 65536)
        copies.expected[copies.places] = data[copies.chosen]
        assert torch.equal(copies.target.bytes(), copies.expected), turn


@pytest.mark.skipif(driver_answers(), reason="a CUDA driver answers")
def test_an_address_copier_without_a_driver_says_so() -> None:
    with pytest.raises(ConfigError, match="no CUDA driver"):
        AddressCopier("cuda:0")


@pytest.mark.gpu
@pytest.mark.parametrize(("start", "end"), GPU_WAYS)
@pytest.mark.parametrize(
    ("nbytes", "count"), [*SIZES, (128, 250), (128, 251), (256, 2000), (128, 4001), (4224, 300)]
)
def test_an_address_copier_takes_any_number_of_addresses(
    start: str, end: str, nbytes: int, count: int
) -> None:
    copies = Copies(start, end, nbytes, count)
    copier = AddressCopier("cuda:0")
    src, dst = copies.on_the_host()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    copier(src, dst, nbytes, stream.cuda_stream)
    src[:] = dst[:] = 0  # nothing of a call outlives it
    copies.expect()
    copies.assert_copied()


@pytest.mark.gpu
def test_an_address_copier_refuses_what_does_not_fit() -> None:
    copies = Copies("vram", "host", 256, 4)
    copier = AddressCopier("cuda")
    src, dst = copies.on_the_host()
    wrong: list[tuple[Callable[[], None], str]] = [
        (lambda: copier(src, dst[:3], 256, 0), "src and dst must be int64"),
        (lambda: copier(src.astype(np.int32), dst, 256, 0), "src and dst must be int64"),
        (lambda: copier(src, dst, 0, 0), "nbytes"),
        (lambda: copier(src, dst, 24, 0), "nbytes"),
        (lambda: copier(src + 8, dst, 256, 0), "multiples of 128"),
    ]
    for call, problem in wrong:
        with pytest.raises(KernelError, match=problem):
            call()
    copier(src[:0], dst[:0], 256, 0)
    copies.assert_copied()
    form = replace(CopyForm.over_a_bus(torch.device("cuda", 0)), ctas=1, warps=1)
    copier(src, dst, 256, 0, form=form)
    copies.expect()
    copies.assert_copied()


@pytest.mark.gpu
@pytest.mark.parametrize(("start", "end"), GPU_WAYS)
@pytest.mark.parametrize("nbytes", [4096, 65536])
def test_a_mover_hands_its_short_runs_to_an_address_copier(start: str, end: str, nbytes: int) -> None:
    copies = Copies(start, end, nbytes, 60)
    calls = []
    copier = AddressCopier("cuda:0")

    def counted(src: AddressArray, dst: AddressArray, nbytes: int, stream: int, /) -> None:
        calls.append(len(src))
        copier(src, dst, nbytes, stream)

    mover = CudaMover("cuda:0", counted)
    src, dst = copies.on_the_host()
    assert mover.copy(src, dst, nbytes).wait(timeout=30)
    mover.close()
    assert sum(calls) == 60
    copies.expect()
    copies.assert_copied()


@pytest.mark.gpu
def test_a_copy_over_a_bus_takes_little_of_the_gpu() -> None:
    device = torch.device("cuda", 0)
    few, many = CopyForm.over_a_bus(device), CopyForm.within_vram(device)
    assert few.ctas <= 8
    assert few.shared_bytes <= 66 << 10
    assert many.ctas >= torch.cuda.get_device_properties(device).multi_processor_count
    assert few.grid(1) == many.grid(1) == 1
