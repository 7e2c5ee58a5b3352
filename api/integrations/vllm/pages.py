"""Between vLLM's KV tensors and blocks of a sidecar: all layers of many blocks at once.

A block keeps vLLM's bytes as they are, layer after layer; what they mean is for engines of the
same backend to know.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ....tiers.errors import LayoutError
from ....tiers.layout import KVLayout
from ....tiers.mover import HostMover

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from ....kernels.engine_pages import EnginePages

__all__ = ["CpuPages", "CudaPages", "Fence", "Pages", "check_caches", "engine_pages", "layout_of", "pages_of"]

Addresses = npt.NDArray[np.int64]
_INT64: Final = np.dtype(np.int64)
_KEEPS_ALL: Final = frozenset({"FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec"})
"""vLLM's kinds of cache that have a block for every token, themselves and not what is derived from them.
Layers with sliding windows are of these where its hybrid manager is disabled."""


class Fence(Protocol):
    """A point in the engine's work."""

    def wait(self) -> None:
        """Have what is copied next happen after it."""
        ...


class Pages(Protocol):
    """An engine's KV tensors, copied to and from blocks in a thread of the caller's."""

    def fence(self) -> Fence | None:
        """Where the engine's work is now; None where it is all done."""
        ...

    def store(self, blocks: Sequence[int], addresses: Addresses, after: Fence | None) -> None:
        """Copy the engine's blocks to these addresses, int64 [n]. Returns when they are there."""
        ...

    def load(self, blocks: Sequence[int], addresses: Addresses, after: Fence | None) -> None:
        """Copy from these addresses into the engine's blocks. Returns when they are there."""
        ...

    def close(self) -> None:
        """Copy nothing more."""
        ...


def check_caches(config: VllmConfig, caches: KVCacheConfig) -> int:
    """The tokens of a block, if this engine's cache is one that can be kept.

    Raises:
        LayoutError: it is not, and why.
    """
    parallel = config.parallel_config
    sizes = {
        "decode": parallel.decode_context_parallel_size,
        "prefill": parallel.prefill_context_parallel_size,
    }
    for kind, size in sizes.items():
        if size > 1:
            raise LayoutError(
                f"with --{kind}-context-parallel-size {size} each rank has a part of a block's tokens, which "
                "KVPagerConnector does not keep: start vLLM with 1, or without the connector"
            )
    groups = caches.kv_cache_groups
    if len(groups) != 1:
        raise LayoutError(
            f"this model has {len(groups)} groups of KV caches (sliding windows or state-space layers beside "
            "full attention); KVPagerConnector keeps those of one: with sliding windows start vLLM with "
            "--disable-hybrid-kv-cache-manager, which has a block for every token, else without the connector"
        )
    spec = groups[0].kv_cache_spec
    # One for layers whose pages differ in bytes has those of the layers.
    for one in getattr(spec, "kv_cache_specs", {"": spec}).values():
        if type(one).__name__ not in _KEEPS_ALL:
            raise LayoutError(
                f"a cache of kind {type(one).__name__} is no prefix cache of full attention, which alone is "
                "kept"
            )
    return int(spec.block_size)


def layout_of(config: VllmConfig, caches: KVCacheConfig, tensors: Mapping[str, torch.Tensor]) -> KVLayout:
    """How a block of this worker lies in the sidecar: the bytes of each layer as the engine has them.

    Raises:
        LayoutError: its tensors are not one run of bytes for each block and layer, all alike.
    """
    block_size = check_caches(config, caches)
    page_bytes = {_page_bytes(name, tensor, caches.num_blocks) for name, tensor in tensors.items()}
    if len(page_bytes) != 1 or (size := page_bytes.pop()) % block_size:
        raise LayoutError("layers' KV tensors differ in the bytes of a block, which is not supported")
    first = next(iter(tensors.values()))
    computing = {_attention_of(config, name) for name in tensors}
    if len(computing) != 1:
        raise LayoutError(f"layers are attended by several backends ({', '.join(sorted(computing))})")
    parts = (
        "vllm",
        str(caches.kv_cache_layout),
        computing.pop(),
        first.device.type if first.is_cuda else f"cpu-{platform.machine()}",
        str(first.dtype).removeprefix("torch."),
        "x".join(str(length) for length in first.shape[1:]),
    )
    return KVLayout(
        len(tensors), 1, size // block_size, block_size, "uint8", f"opaque:{':'.join(parts)}", planes=1
    )


def _attention_of(config: VllmConfig, name: str) -> str:
    """Who reads a layer's pages: its backend, and on a CPU the instructions that it orders them for."""
    layer = config.compilation_config.static_forward_context[name]
    backend: str = layer.get_attn_backend().get_name()
    return f"{backend}-{layer.isa}" if hasattr(layer, "isa") else backend


def _page_bytes(name: str, tensor: torch.Tensor, blocks: int) -> int:
    """Bytes of one block in a layer's tensor, if they are one run."""
    if not isinstance(tensor, torch.Tensor) or tensor.shape[0] != blocks:
        raise LayoutError(
            f"the KV cache of {name} is not one tensor whose first dimension is {blocks} blocks"
        )
    expected = 1
    for length, stride in sorted(
        zip(tensor.shape[1:], tensor.stride()[1:], strict=True), key=lambda pair: pair[1]
    ):
        if length > 1 and stride != expected:
            raise LayoutError(f"the KV cache of {name} has blocks that are no single run of bytes")
        expected *= length
    return expected * tensor.element_size()


def pages_of(layout: KVLayout, tensors: Mapping[str, torch.Tensor]) -> Pages:
    """The pages of these tensors, in the order that they are given in: on a GPU or the CPU."""
    some = list(tensors.values())
    return CudaPages(layout, some) if some[0].is_cuda else CpuPages(layout, some)


class CpuPages:
    """KV tensors in this process's memory: copied as runs of bytes, without the interpreter's lock.

    Args:
        layout: of blocks.
        tensors: one for each layer.
    """

    def __init__(self, layout: KVLayout, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._page_bytes = layout.page_bytes
        self._used = layout.block_size * layout.row_bytes
        self._starts = np.array([tensor.data_ptr() for tensor in tensors], dtype=_INT64)
        self._strides = np.array(
            [tensor.stride(0) * tensor.element_size() for tensor in tensors], dtype=_INT64
        )
        self._offsets = np.arange(len(tensors), dtype=_INT64) * layout.page_bytes
        self._mover = HostMover()

    def fence(self) -> None:
        """A step of the CPU is over when it returns."""

    def store(self, blocks: Sequence[int], addresses: Addresses, after: Fence | None) -> None:
        """See `Pages.store`."""
        self._mover.copy_now(self._places(blocks), self._slices(addresses), self._used)

    def load(self, blocks: Sequence[int], addresses: Addresses, after: Fence | None) -> None:
        """See `Pages.load`."""
        self._mover.copy_now(self._slices(addresses), self._places(blocks), self._used)

    def close(self) -> None:
        """See `Pages.close`."""
        self._mover.close()

    def _places(self, blocks: Sequence[int]) -> Addresses:
        """Of each block in each layer's tensor."""
        numbers = np.array(blocks, dtype=_INT64)
        places: Addresses = (self._starts + numbers[:, None] * self._strides).ravel()
        return places

    def _slices(self, addresses: Addresses) -> Addresses:
        """Of each layer's part of each block."""
        slices: Addresses = (addresses[:, None] + self._offsets).ravel()
        return slices


def engine_pages(layout: KVLayout, tensors: Sequence[torch.Tensor]) -> EnginePages:
    """Tensors as the gather and scatter kernels take them: one run of bytes for each block and layer."""
    from ....kernels.engine_pages import EnginePages

    heads, elements = layout.num_kv_heads, layout.head_dim
    views = tuple(
        tensor.view(torch.uint8).as_strided(
            (tensor.shape[0], layout.block_size, heads, elements),
            (tensor.stride(0) * tensor.element_size(), heads * elements, elements, 1),
        )
        for tensor in tensors
    )
    return EnginePages(layout, (views,))


class CudaPages:
    """KV tensors of a GPU: all layers and blocks in one launch, on a stream of its own.

    Args:
        layout: of blocks.
        tensors: one for each layer, on one GPU that the sidecar's memory is mapped for.
    """

    def __init__(self, layout: KVLayout, tensors: Sequence[torch.Tensor]) -> None:
        self._pages = engine_pages(layout, tensors)
        self._stream = torch.cuda.Stream(device=self._pages.device)  # type: ignore[no-untyped-call]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self._pages.device

    def fence(self) -> _CudaFence:
        """What was launched on the caller's stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return _CudaFence(event, self._stream)

    def store(self, blocks: Sequence[int], addresses: Addresses, after: Fence | None) -> None:
        """See `Pages.store`."""
        self._copy(blocks, addresses, after, to_blocks=True)

    def load(self, blocks: Sequence[int], addresses: Addresses, after: Fence | None) -> None:
        """See `Pages.load`."""
        self._copy(blocks, addresses, after, to_blocks=False)

    def close(self) -> None:
        """See `Pages.close`."""
        self._stream.synchronize()

    def _copy(
        self, blocks: Sequence[int], addresses: Addresses, after: Fence | None, *, to_blocks: bool
    ) -> None:
        from ....kernels.engine_pages import gather, scatter

        move = gather if to_blocks else scatter
        with torch.cuda.stream(self._stream):
            if after is not None:
                after.wait()
            slots = torch.tensor(blocks, dtype=torch.int64).to(self._pages.device, non_blocking=True)
            there = torch.from_numpy(addresses).to(self._pages.device, non_blocking=True)
            move(self._pages, slots, there)
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record()
        # A wait that leaves the interpreter to others.
        done.synchronize()


class _CudaFence:
    def __init__(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        self._event = event
        self._stream = stream

    def wait(self) -> None:
        self._stream.wait_event(self._event)
