"""Copies of blocks, and of one layer's pages, between any arenas: VRAM, mapped host memory, a peer's VRAM.

On CUDA one kernel does it, at about the same rate for any size of block: what PCIe gives to small blocks is
3 times what the copy engine makes of it at 64 KiB, and 47 times at 4 KiB. From compute capability 9.0 on, the
bytes pass through shared memory in bulk copies (PTX ISA, ``cp.async.bulk``), a ring of them for each warp;
before that through registers. A few CTAs are all that a bus takes, so a copy over it leaves the rest of the
GPU to others; copies within VRAM take a CTA of every multiprocessor.

Nothing waits for the device and no value is looked at, so calls can be captured into a graph, whose padding
are addresses of zero. Elsewhere it is the reference (`kernels/reference.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import torch

from ..tiers.address import TAG_MASK
from ..tiers.arena import AddressArray
from ..tiers.driver import check, cuda_driver, device_ordinal
from ..tiers.errors import KernelError
from ..tiers.layout import SLICE_ALIGNMENT
from . import reference
from .arguments import expect
from .checks import expect_mapped
from .compiled import Kernel, load_kernel

__all__ = ["BUS_CTAS", "AddressCopier", "CopyForm", "copy_blocks", "copy_counted", "copy_pages"]

BUS_CTAS: Final = 4
"""CTAs that saturate a bus to host memory."""
_BUS_WARPS: Final = 4
_VRAM_WARPS: Final = 8
_PLAIN_WARPS: Final = 16
_PIECE_BYTES: Final = 4096
_STAGES: Final = 4
"""Of a warp's ring; as in copy_blocks.cu."""
_RING_BYTES: Final = 80
"""Beside its stages: a barrier, an address and a length for each."""
_LANES: Final = 32
_BULK_MAJOR: Final = 9
_MOST_PIECES: Final = 1 << 31
_UNIT_BYTES: Final = 16
_FEW_PAIRS: Final = 250
"""A launch carries 4 KiB of parameters at no cost, and up to 32,764 bytes at some."""
_MANY_PAIRS: Final = 2000


@dataclass(frozen=True)
class CopyForm:
    """How a copy is spread over the GPU.

    Args:
        ctas: CTAs, at most.
        warps: warps of a CTA.
        piece_bytes: what a warp moves at a time, a multiple of 128.
        bulk: by bulk copies through shared memory, which takes ``4 * warps * piece_bytes`` of it.
    """

    ctas: int
    warps: int
    piece_bytes: int
    bulk: bool

    @classmethod
    def within_vram(cls, device: torch.device) -> CopyForm:
        """All of the GPU."""
        return _within_vram(device)

    @classmethod
    def over_a_bus(cls, device: torch.device) -> CopyForm:
        """As little of the GPU as saturates PCIe in either direction."""
        return _over_a_bus(device)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self.warps * (_STAGES * self.piece_bytes + _RING_BYTES) if self.bulk else 0

    def grid(self, pieces: int) -> int:
        """CTAs for so many pieces."""
        return min(self.ctas, -(-pieces // self.warps))


def copy_blocks(
    src: torch.Tensor, dst: torch.Tensor, block_bytes: int, *, form: CopyForm | None = None
) -> None:
    """Copy whole blocks, from any arena to any arena.

    Args:
        src, dst: int64 [n] block addresses; tags are ignored. No block of `dst` appears twice or in `src`. On
            CUDA a pair with an address of zero is left out; it marks padding.
        block_bytes: bytes of a block, a multiple of 128.
        form: how it is spread over the GPU; None: `CopyForm.within_vram`, which is as good over a bus, but
            for what runs beside.

    Raises:
        KernelError: an argument does not fit, found before memory is written. On CUDA, addresses are looked
            at in debug mode only (`kernels/checks.py`).
    """
    _copy(src, dst, 0, block_bytes, "block_bytes", form)


def copy_pages(
    src: torch.Tensor, dst: torch.Tensor, byte_offset: int, nbytes: int, *, form: CopyForm | None = None
) -> None:
    """Copy the same part of blocks, such as one layer's page: arguments and errors as of `copy_blocks`.

    Args:
        src, dst: int64 [n] block addresses.
        byte_offset: where the part begins in a block, a multiple of 128: ``layer * layout.page_bytes``.
        nbytes: bytes of the part, a multiple of 128: ``layout.page_bytes``.
        form: as of `copy_blocks`.
    """
    if byte_offset < 0 or byte_offset % SLICE_ALIGNMENT:
        raise KernelError(f"byte_offset must be a multiple of {SLICE_ALIGNMENT}, got {byte_offset}")
    _copy(src, dst, byte_offset, nbytes, "nbytes", form)


def _copy(
    src: torch.Tensor, dst: torch.Tensor, skipped: int, nbytes: int, size_name: str, form: CopyForm | None
) -> None:
    count = src.shape[0] if src.dim() else 0
    expect("src", src, torch.int64, (count,))
    expect("dst", dst, torch.int64, (count,), src.device)
    if nbytes <= 0 or nbytes % SLICE_ALIGNMENT:
        raise KernelError(f"{size_name} must be a positive multiple of {SLICE_ALIGNMENT}, got {nbytes}")
    if count == 0:
        return
    expect_mapped("src", src, skipped + nbytes)
    expect_mapped("dst", dst, skipped + nbytes)
    if not src.is_cuda:
        if skipped:
            src, dst = (src & ~TAG_MASK) + skipped, (dst & ~TAG_MASK) + skipped
        reference.copy_blocks(src, dst, nbytes)
        return
    form = form or CopyForm.within_vram(src.device)
    pieces = count * -(-nbytes // form.piece_bytes)
    if pieces >= _MOST_PIECES:
        raise KernelError(f"src names {count} blocks, more than one launch copies")
    src, dst = src.contiguous(), dst.contiguous()
    _kernel(src.device, form.bulk, "copy_blocks", _FEW_PAIRS).launch(
        form.grid(pieces),
        form.warps * _LANES,
        (src.data_ptr(), dst.data_ptr(), count, skipped, nbytes, form.piece_bytes),
        shared_bytes=form.shared_bytes,
        stream=torch.cuda.current_stream(src.device).cuda_stream,
    )


def copy_counted(
    src: torch.Tensor,
    dst: torch.Tensor,
    count: torch.Tensor,
    src_offset: int,
    dst_offset: int,
    nbytes: int,
    *,
    stream: int,
) -> None:
    """Copy part of as many blocks as the GPU counted, over a bus: on CUDA only.

    Args:
        src, dst: int64 [n] block addresses on the device; tags are ignored.
        count: int32 [1], how many of them to copy, at most n.
        src_offset, dst_offset: where the part begins in a block, multiples of 128.
        nbytes: bytes of the part, a multiple of 128.
        stream: the raw handle of the stream.
    """
    form = CopyForm.over_a_bus(src.device)
    _kernel(src.device, form.bulk, "copy_counted", _FEW_PAIRS).launch(
        form.ctas,
        form.warps * _LANES,
        (src.data_ptr(), dst.data_ptr(), count.data_ptr(), src_offset, dst_offset, nbytes, form.piece_bytes),
        shared_bytes=form.shared_bytes,
        stream=stream,
    )


class AddressCopier:
    """Copies blocks whose addresses lie in host memory: the `CopyKernel` that a `CudaMover` is handed.

    The addresses travel in the launch itself, so nothing has to outlive a call. Safe to call from several
    threads. The kernels are compiled when it is made.

    Args:
        device: ``cuda`` or ``cuda:N``.

    Raises:
        ConfigError: `device` is no CUDA device, no driver answers, or cuda-python is not installed.
        KernelError: the kernels cannot be compiled or loaded.
    """

    def __init__(self, device: str) -> None:
        self._driver = cuda_driver()
        self._device = torch.device("cuda", device_ordinal(device))
        self._vram = CopyForm.within_vram(self._device)
        self._bus = CopyForm.over_a_bus(self._device)
        for pairs in (_FEW_PAIRS, _MANY_PAIRS):
            _kernel(self._device, self._bus.bulk, "copy_listed", pairs)

    def __call__(
        self,
        src: AddressArray,
        dst: AddressArray,
        nbytes: int,
        stream: int,
        /,
        *,
        form: CopyForm | None = None,
    ) -> None:
        """Enqueue the copy of `nbytes` from each of `src` to `dst` (int64 [n], in host memory).

        Args:
            src, dst: addresses without tags, multiples of 128.
            nbytes: a positive multiple of 16.
            stream: the raw handle of a stream of the device.
            form: how it is spread over the GPU; None: by where the first block lies.

        Raises:
            KernelError: an argument does not fit.
        """
        if src.shape != dst.shape or src.ndim != 1 or src.dtype != np.int64 or dst.dtype != np.int64:
            raise KernelError(f"src and dst must be int64 [n], got {src.shape} and {dst.shape}")
        if nbytes <= 0 or nbytes % _UNIT_BYTES:
            raise KernelError(f"nbytes must be a positive multiple of {_UNIT_BYTES}, got {nbytes}")
        if src.size == 0:
            return
        pairs = np.stack((src, dst), 1)
        if (pairs & TAG_MASK).any():
            raise KernelError(f"src and dst must be multiples of {SLICE_ALIGNMENT}")
        if form is None:
            near = self._is_device_memory(int(src[0])) and self._is_device_memory(int(dst[0]))
            form = self._vram if near else self._bus
        most = _FEW_PAIRS if src.size <= _FEW_PAIRS else _MANY_PAIRS
        kernel = _kernel(self._device, form.bulk, "copy_listed", most)
        each = -(-nbytes // form.piece_bytes)
        if each * most >= _MOST_PIECES:
            raise KernelError(f"nbytes must not be that large for this kernel, got {nbytes}")
        for start in range(0, src.size, most):
            some = pairs[start : start + most]
            kernel.launch(
                form.grid(len(some) * each),
                form.warps * _LANES,
                (some.tobytes(), len(some), nbytes, form.piece_bytes),
                shared_bytes=form.shared_bytes,
                stream=stream,
            )

    def _is_device_memory(self, address: int) -> bool:
        kind = self._driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        status, memory = self._driver.cuPointerGetAttribute(kind, address)
        # Host memory that CUDA was not told of has no type.
        return not status and int(memory) == int(self._driver.CUmemorytype.CU_MEMORYTYPE_DEVICE)


@cache
def _within_vram(device: torch.device) -> CopyForm:
    sms = _attribute(device, "MULTIPROCESSOR_COUNT")
    if not _has_bulk_copies(device):
        return CopyForm(2 * sms, _PLAIN_WARPS, _PIECE_BYTES, bulk=False)
    room = _attribute(device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
    warps = min(_VRAM_WARPS, room // (_STAGES * _PIECE_BYTES + _RING_BYTES))
    return CopyForm(sms, warps, _PIECE_BYTES, bulk=True)


@cache
def _over_a_bus(device: torch.device) -> CopyForm:
    bulk = _has_bulk_copies(device)
    return CopyForm(BUS_CTAS, _BUS_WARPS if bulk else _PLAIN_WARPS, _PIECE_BYTES, bulk)


def _has_bulk_copies(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= _BULK_MAJOR


def _attribute(device: torch.device, name: str) -> int:
    driver = cuda_driver()
    attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    handle = check(driver.cuDeviceGet(device.index), f"opening {device}")
    return int(check(driver.cuDeviceGetAttribute(attribute, handle), f"asking {device}"))


@cache
def _kernel(device: torch.device, bulk: bool, name: str, pairs: int) -> Kernel:
    parameters = {
        "copy_blocks": "Q Q I Q Q I",
        "copy_counted": "Q Q Q Q Q Q I",
        "copy_listed": f"{16 * pairs}s I Q I",
    }[name]
    defines = {"BULK": int(bulk), "PAIRS": pairs}
    return load_kernel("copy_blocks.cu", name, parameters, device=device, defines=defines)
