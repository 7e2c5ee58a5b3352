"""Between an engine's own paged KV tensors and blocks: one launch for all layers and all blocks.

Engines keep a tensor for each layer, cut into pages of some tokens; a block holds all layers. `EnginePages`
describes the tensors, whatever the order of their dimensions; `gather` copies pages into blocks and `scatter`
blocks into pages. A block is written in its layout's own format, so that attention can read it where it lies
(``swizzled``, ``plain``), or, where the format is ``opaque:NAME``, as ``[layer][plane][page]`` of bytes as
the engine has them.

On CUDA nothing waits for the device and no value is looked at, so calls can be captured into a graph. The
kernel goes through a block's bytes in their order, a warp 2 KiB at a time, so that on the block's side, which
may lie beyond a bus, long runs are read and written whatever the engine's order is.

Layouts: vLLM, the ``get_kv_cache_shape`` and ``get_kv_cache_stride_order`` of its attention backends; SGLang,
the ``k_buffer`` and ``v_buffer`` of ``MHATokenToKVPool``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final, Literal

import torch

from ..tiers.address import TAG_MASK
from ..tiers.errors import KernelError
from ..tiers.layout import SLICE_ALIGNMENT, KVLayout
from .arguments import expect
from .checks import access_bytes, debugging, expect_mapped
from .compiled import Kernel, load_kernel
from .memory import Span

__all__ = ["PAGE_CTAS", "EnginePages", "gather", "scatter"]

PAGE_CTAS: Final = 16
"""CTAs that saturate PCIe in either direction."""
_WARPS: Final = 16
_LANES: Final = 32
_AT_ONCE: Final = 4
"""Accesses of a lane for one piece; as in engine_pages.cu."""
_MOST_PIECES: Final = 1 << 31
_PARAMETERS: Final = "Q Q i Q I I I I I Q Q"
_CHUNK_BYTES: Final = 16
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_PLANE_NAMES: Final = {1: ("latents",), 2: ("keys", "values")}

VllmOrder = Literal["PNTHD", "NPTHD", "PNHTD", "NPHTD"]


@dataclass(frozen=True, eq=False)
class EnginePages:
    """An engine's KV tensors of all layers, as pages of tokens.

    Args:
        layout: the layout of the blocks that they are copied to and from. A block is a whole number of pages.
        planes: for keys and values (or a single latent), for each layer, [pages, page_tokens, kv_heads,
            head_dim], a view in that order of whatever the engine has, contiguous in the last dimension. All
            are alike, on one device. The tensors are kept alive.

    Raises:
        KernelError: a tensor does not fit the layout or the others; the message names it.
    """

    layout: KVLayout
    planes: tuple[tuple[torch.Tensor, ...], ...]
    _table: torch.Tensor = field(init=False, repr=False, compare=False)
    """int64 [layers, planes, 4]: where each begins, and the bytes between its pages, rows and heads."""
    _unit_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        layout = self.layout
        if layout.scale_bytes:
            raise KernelError("layout must have no scale_bytes: an engine's scales are not copied")
        if len(self.planes) != layout.planes or any(len(some) != layout.num_layers for some in self.planes):
            raise KernelError(
                f"planes must be {layout.planes} times {layout.num_layers} tensors, "
                f"got {[len(some) for some in self.planes]}"
            )
        for name, tensors in zip(_PLANE_NAMES[layout.planes], self.planes, strict=True):
            for layer, tensor in enumerate(tensors):
                self._expect(f"{name} of layer {layer}", tensor)
        table = [
            [self._strides(tensors[layer]) for tensors in self.planes] for layer in range(layout.num_layers)
        ]
        every = (number for layer in table for plane in layer for number in plane)
        object.__setattr__(self, "_unit_bytes", access_bytes(self.row_bytes, *every))
        object.__setattr__(self, "_table", torch.tensor(table, dtype=torch.int64, device=self.device))

    @classmethod
    def vllm(cls, layout: KVLayout, tensors: Sequence[torch.Tensor], order: VllmOrder) -> EnginePages:
        """The tensors of vLLM: one a layer, with keys and values in it.

        Args:
            layout: the layout of the blocks.
            tensors: five-dimensional, one a layer.
            order: the dimensions of their *shape*: P planes (2), N pages, T tokens, H heads, D elements.
                ``PNTHD`` and ``NPTHD`` are NHD; ``PNHTD`` and ``NPHTD`` HND, which vLLM itself shows as a
                view whose shape is NHD.
        """
        if sorted(order) != sorted("PNTHD"):
            raise KernelError(f"order must be PNTHD, NPTHD, PNHTD or NPHTD, got {order!r}")
        for layer, tensor in enumerate(tensors):
            if tensor.dim() != len(order) or tensor.shape[order.index("P")] != 2:
                raise KernelError(
                    f"the tensor of layer {layer} is {list(tensor.shape)}, which is not {order}"
                )
        views = [tensor.permute([order.index(letter) for letter in "PNTHD"]) for tensor in tensors]
        return cls(layout, (tuple(view[0] for view in views), tuple(view[1] for view in views)))

    @classmethod
    def sglang(
        cls,
        layout: KVLayout,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        page_tokens: int = 1,
    ) -> EnginePages:
        """The tensors of SGLang: keys and values of each layer by token.

        Args:
            layout: the layout of the blocks.
            keys, values: for each layer [tokens, kv_heads, head_dim].
            page_tokens: how many tokens from each multiple of it on lie together, the engine's page size.
                Tokens beyond the last whole page are left out.
        """
        if page_tokens < 1:
            raise KernelError(f"page_tokens must be positive, got {page_tokens}")
        for name, tensors in (("keys", keys), ("values", values)):
            for layer, tensor in enumerate(tensors):
                if tensor.dim() != 3:
                    raise KernelError(
                        f"{name} of layer {layer} must have three dimensions, got {tensor.dim()}"
                    )
        planes = (
            tuple(
                tensor[: tensor.shape[0] // page_tokens * page_tokens].view(
                    -1, page_tokens, *tensor.shape[1:]
                )
                for tensor in tensors
            )
            for tensors in (keys, values)
        )
        return cls(layout, tuple(planes))

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.planes[0][0].device

    @property
    def num_pages(self) -> int:
        """Pages of each tensor."""
        return self.planes[0][0].shape[0]

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self.planes[0][0].shape[1]

    @property
    def pages_per_block(self) -> int:
        """Pages that a block holds."""
        return self.layout.block_size // self.page_tokens

    @property
    def opaque(self) -> bool:
        """Whether a block keeps the engine's bytes as they are."""
        return self.layout.format not in ("swizzled", "plain")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: a page of one plane where the bytes are opaque, else a token of one head."""
        page_bytes = self.page_tokens * self.layout.num_kv_heads * self.layout.row_bytes
        return page_bytes if self.opaque else self.layout.row_bytes

    @property
    def rows(self) -> int:
        """Rows of a slice of a block."""
        return self.pages_per_block if self.opaque else self.layout.block_size

    @property
    def heads(self) -> int:
        """Slices of a plane."""
        return 1 if self.opaque else self.layout.num_kv_heads

    @property
    def slice_bytes(self) -> int:
        """From one slice of a block to the next."""
        return self.layout.num_kv_heads // self.heads * self.layout.slice_bytes

    def _expect(self, name: str, tensor: torch.Tensor) -> None:
        layout, first = self.layout, self.planes[0][0]
        if tensor.element_size() != layout.item_bytes:
            raise KernelError(f"{name} must have elements of {layout.item_bytes} bytes, got {tensor.dtype}")
        if not self.opaque and layout.dtype != "uint8" and tensor.dtype != getattr(torch, layout.dtype):
            raise KernelError(f"{name} must be {layout.dtype}, got {tensor.dtype}")
        if tensor.dim() != 4 or tuple(tensor.shape[2:]) != (layout.num_kv_heads, layout.head_dim):
            raise KernelError(
                f"{name} must be [pages, page_tokens, {layout.num_kv_heads}, {layout.head_dim}], "
                f"got {list(tensor.shape)}"
            )
        if tensor.shape != first.shape:
            raise KernelError(f"{name} is {list(tensor.shape)}, others are {list(first.shape)}")
        if tensor.device != first.device:
            raise KernelError(f"{name} is on {tensor.device}, others are on {first.device}")
        if tensor.dtype != first.dtype:
            raise KernelError(f"{name} is {tensor.dtype}, others are {first.dtype}")
        if tensor.shape[1] < 1 or layout.block_size % tensor.shape[1]:
            raise KernelError(
                f"{name} has pages of {tensor.shape[1]} tokens, of which no whole number makes a block "
                f"of {layout.block_size}"
            )
        if layout.head_dim > 1 and tensor.stride(3) != 1:
            raise KernelError(f"{name} must be contiguous in its last dimension")
        if self.opaque and not _is_dense(tensor[0]):
            raise KernelError(f"{name} has pages with gaps in them, which cannot be kept as they are")

    def _strides(self, tensor: torch.Tensor) -> tuple[int, int, int, int]:
        page, token, head, _ = (
            stride * tensor.element_size() if size > 1 else 0
            for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        )
        return (tensor.data_ptr(), page, 0, 0) if self.opaque else (tensor.data_ptr(), page, token, head)

    def _by_rows(self, layer: int, plane: int, head: int) -> torch.Tensor:
        """A view of one slice of all pages as integers: [pages, rows of a page, elements of a row]."""
        tensor = self.planes[plane][layer]
        tensor = tensor.view(_INTEGERS[tensor.element_size()])
        if not self.opaque:
            return tensor[:, :, head]
        elements = self.row_bytes // tensor.element_size()
        return tensor.as_strided((self.num_pages, 1, elements), (tensor.stride(0), elements, 1))


def gather(
    engine: EnginePages,
    slots: torch.Tensor,
    blocks: torch.Tensor,
    *,
    layers: range | None = None,
    ctas: int = PAGE_CTAS,
) -> None:
    """Copy pages of an engine into blocks.

    Args:
        engine: the engine's tensors.
        slots: int32 or int64 [n, pages_per_block], or [n] where that is one: the pages of each block, in the
            order of their tokens. A negative one is left out, and what is in its place stays.
        blocks: int64 [n] block addresses; tags are ignored. Zero marks padding, which is left out.
        layers: only these, with a step of 1; None: all.
        ctas: how much of the GPU it takes. 16 saturate PCIe; blocks in VRAM want one or two a multiprocessor.

    Raises:
        KernelError: an argument does not fit, found before memory is written. On CUDA, slots and addresses
            are looked at in debug mode only (`kernels/checks.py`).
    """
    _move(engine, slots, blocks, layers, ctas, to_blocks=True)


def scatter(
    engine: EnginePages,
    slots: torch.Tensor,
    blocks: torch.Tensor,
    *,
    layers: range | None = None,
    ctas: int = PAGE_CTAS,
) -> None:
    """Copy blocks into pages of an engine: arguments and errors as of `gather`. No page appears twice."""
    _move(engine, slots, blocks, layers, ctas, to_blocks=False)


def _move(
    engine: EnginePages,
    slots: torch.Tensor,
    blocks: torch.Tensor,
    layers: range | None,
    ctas: int,
    *,
    to_blocks: bool,
) -> None:
    layout, device = engine.layout, engine.device
    count = blocks.shape[0] if blocks.dim() else 0
    expect("blocks", blocks, torch.int64, (count,), device)
    shape = (count, engine.pages_per_block)
    if slots.dim() == 1 and shape[1] == 1:
        slots = slots[:, None]
    if slots.dtype not in (torch.int32, torch.int64):
        raise KernelError(f"slots must be int32 or int64, got {slots.dtype}")
    expect("slots", slots, slots.dtype, shape, device)
    layers = range(layout.num_layers) if layers is None else layers
    if layers.step != 1 or not 0 <= layers.start <= layers.stop <= layout.num_layers:
        raise KernelError(f"layers must be a range within 0..{layout.num_layers}, got {layers}")
    if ctas < 1:
        raise KernelError(f"ctas must be positive, got {ctas}")
    if count == 0 or len(layers) == 0:
        return
    expect_mapped("blocks", blocks, layout.block_bytes)
    capturing = slots.is_cuda and torch.cuda.is_current_stream_capturing()
    if (not slots.is_cuda or debugging()) and not capturing and int(slots.max()) >= engine.num_pages:
        raise KernelError(f"slots has {int(slots.max())}, the engine's tensors have {engine.num_pages} pages")
    if slots.is_cuda:
        _launch(engine, slots, blocks, layers, ctas, to_blocks)
    else:
        reference_move(engine, slots, blocks, layers, to_blocks=to_blocks)


def _launch(
    engine: EnginePages,
    slots: torch.Tensor,
    blocks: torch.Tensor,
    layers: range,
    ctas: int,
    to_blocks: bool,
) -> None:
    layout = engine.layout
    slots, blocks = slots.contiguous(), blocks.contiguous()
    piece_bytes = engine._unit_bytes * _LANES * _AT_ONCE
    pieces = -(-engine.rows * engine.row_bytes // piece_bytes)
    pieces *= blocks.shape[0] * len(layers) * layout.planes * engine.heads
    if pieces >= _MOST_PIECES:
        raise KernelError(f"blocks names {blocks.shape[0]}, more than one launch copies")
    page_rows = 1 if engine.opaque else engine.page_tokens
    form = (engine._unit_bytes, int(layout.swizzled), engine.row_bytes, engine.rows, page_rows)
    _kernel(engine.device, "gather" if to_blocks else "scatter", form).launch(
        min(ctas, -(-pieces // _WARPS)),
        _WARPS * _LANES,
        (
            engine._table.data_ptr(),
            slots.data_ptr(),
            slots.dtype == torch.int64,
            blocks.data_ptr(),
            blocks.shape[0],
            layers.start,
            len(layers),
            layout.planes,
            engine.heads,
            layout.page_bytes,
            engine.slice_bytes,
        ),
        stream=torch.cuda.current_stream(engine.device).cuda_stream,
    )


@cache
def _kernel(device: torch.device, name: str, form: tuple[int, ...]) -> Kernel:
    names = ("UNIT_BYTES", "SWIZZLED", "ROW_BYTES", "ROWS", "PAGE_ROWS")
    defines = dict(zip(names, form, strict=True))
    return load_kernel("engine_pages.cu", name, _PARAMETERS, device=device, defines=defines)


def _is_dense(page: torch.Tensor) -> bool:
    """Whether the elements of a page are one run of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(page.stride(), page.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


# ---- the reference ----


@torch.no_grad()
def reference_move(
    engine: EnginePages, slots: torch.Tensor, blocks: torch.Tensor, layers: range, *, to_blocks: bool
) -> None:
    """`gather` (`to_blocks`) or `scatter` in plain torch, on any device; it waits for the device."""
    layout = engine.layout
    kept = (blocks & ~TAG_MASK) != 0
    blocks, slots = blocks[kept] & ~TAG_MASK, slots[kept].long()
    if not blocks.numel():
        return
    there = slots >= 0
    pages = slots[there]
    dtype = _INTEGERS[layout.item_bytes]
    span = Span.over(blocks, layout.block_bytes, dtype)
    places = (blocks - span.base) // SLICE_ALIGNMENT
    elements = engine.row_bytes // layout.item_bytes
    order = _stored_order(engine, elements, blocks.device)
    for layer in layers:
        for number in range(layout.planes * engine.heads):
            plane, head = divmod(number, engine.heads)
            at = layer * layout.page_bytes + number * engine.slice_bytes
            stored = span.rows(engine.rows * elements, at)
            of_engine = engine._by_rows(layer, plane, head)
            # [blocks, pages of a block, rows of a page, elements of a row]
            shape = (len(places), engine.pages_per_block, of_engine.shape[1], elements)
            rows = stored.index_select(0, places)[:, order].view(shape)
            if to_blocks:
                rows[there] = of_engine[pages]
                stored.index_copy_(0, places, rows.view(len(places), -1)[:, order])
            else:
                of_engine[pages] = rows[there]


def _stored_order(engine: EnginePages, elements: int, device: torch.device) -> torch.Tensor:
    """int64 [elements of a slice]: where each is stored in it. Applied twice, it changes nothing."""
    every = torch.arange(engine.rows * elements, device=device)
    if not engine.layout.swizzled:
        return every
    chunk_elements = _CHUNK_BYTES // engine.layout.item_bytes
    return every ^ ((every // elements % 8) * chunk_elements)
