"""Torch tensors over raw addresses: how the reference kernels read and write blocks where they lie.

A `Span` is one flat tensor over everything from the lowest to the highest address of a set of blocks.
Blocks of several arenas may lie in it, with memory that belongs to nobody between them: a tensor does
not touch what is not indexed. Rows that start on multiples of 128 bytes are then elements of one strided
view, so that a single ``index_select`` gathers pages from anywhere.

The tensor is imported through DLPack (https://dmlc.github.io/dlpack/latest/c_api.html) from a descriptor
built here. Of torch's ways to adopt a pointer it is the one that takes the device from the caller instead
of looking the pointer up; that lets a CUDA tensor begin in page-locked host memory and end in VRAM.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final

import torch
from torch.utils.dlpack import from_dlpack

from ..tiers.errors import KernelError
from ..tiers.layout import SLICE_ALIGNMENT

__all__ = ["Span", "byte_tensor"]

_DL_CPU: Final = 1
_DL_CUDA: Final = 2
_DL_UINT: Final = 1
_CAPSULE_NAME: Final = b"dltensor"  # a constant, since a capsule keeps the pointer and not the bytes

_allocate = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(("PyMem_RawMalloc", ctypes.pythonapi))
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_FREE: Final = ctypes.cast(ctypes.pythonapi.PyMem_RawFree, ctypes.c_void_p).value


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (
        ("tensor", _DLTensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        # Beyond the standard's fields, so that shape and descriptor are one allocation.
        ("extent", ctypes.c_int64),
    )


def byte_tensor(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """A uint8 tensor [num_bytes] over memory that somebody else owns and keeps alive.

    On CUDA, `address` is a device address: of VRAM, of mapped host memory, or of a peer's memory.
    Nothing is read, and no address is checked.

    Raises:
        KernelError: the device is neither CPU nor CUDA, or the range is empty or negative.
    """
    if device.type not in ("cpu", "cuda"):
        raise KernelError(f"blocks are read on cpu and cuda devices, not on {device}")
    if address <= 0 or num_bytes <= 0:
        raise KernelError(f"no memory lies at address {address:#x}, {num_bytes} bytes")
    memory = _allocate(ctypes.sizeof(_DLManagedTensor))
    if memory is None:
        raise MemoryError("no memory for a tensor descriptor")
    managed = _DLManagedTensor.from_address(memory)
    managed.extent = num_bytes
    managed.tensor = _DLTensor(
        data=address,
        device_type=_DL_CUDA if device.type == "cuda" else _DL_CPU,
        device_id=_device_index(device),
        ndim=1,
        code=_DL_UINT,
        bits=8,
        lanes=1,
        shape=memory + _DLManagedTensor.extent.offset,
        strides=None,
        byte_offset=0,
    )
    managed.manager_ctx = None
    # The consumer frees the descriptor by calling `deleter(descriptor)`. PyMem_RawFree has that
    # signature and needs no interpreter lock, so it may run on any thread.
    managed.deleter = _FREE
    return from_dlpack(_new_capsule(memory, _CAPSULE_NAME, None))


def _device_index(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    return torch.cuda.current_device() if device.index is None else device.index


@dataclass(frozen=True)
class Span:
    """All memory from `base` on that a set of blocks lies in, as elements of `dtype`.

    Attributes:
        base: the address of the first element; a multiple of 128 bytes.
        flat: the elements, [span bytes / element bytes].
    """

    base: int
    flat: torch.Tensor

    @classmethod
    def over(cls, addresses: torch.Tensor, num_bytes: int, dtype: torch.dtype) -> Span:
        """The span of the blocks of `num_bytes` at `addresses` (int64, any shape, no tags, not empty).

        Waits for the device where the addresses are on one: its ends are needed on the host.
        """
        low, high = (int(end) for end in torch.aminmax(addresses))
        flat = byte_tensor(low, high - low + num_bytes, addresses.device).view(dtype)
        return cls(low, flat)

    def rows(self, length: int, byte_offset: int = 0, stride_bytes: int = SLICE_ALIGNMENT) -> torch.Tensor:
        """A view [rows, length] whose row ``r`` starts at byte ``byte_offset + r * stride_bytes``.

        Rows overlap where they are longer than the stride.
        """
        item = self.flat.element_size()
        stride, first = stride_bytes // item, byte_offset // item
        count = (self.flat.numel() - first - length) // stride + 1
        return self.flat.as_strided((count, length), (stride, 1), first)
