"""Reads of memory by a kernel, in place: what a link gives to kernels that read over it.

Attention that reads blocks in host memory can be no faster. The bytes are XORed, so that none of the reads
can be left out. Nothing waits for the device. Method: four loads of 16 bytes a thread in flight, as in "CUDA
C++ Best Practices Guide", coalesced access.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final

import numpy as np
import torch

from ..tiers.errors import KernelError
from .compiled import Kernel, load_kernel

__all__ = ["read_words"]

_UNIT_BYTES: Final = 16
_THREADS: Final = 512
_BUS_CTAS: Final = 16
"""So many of this size keep enough loads in flight for a PCIe 5 link of 16 lanes."""


def read_words(address: int, nbytes: int, out: torch.Tensor, *, ctas: int = _BUS_CTAS) -> None:
    """XOR `out` with all words of 32 bits of a region.

    Args:
        address: where the region begins, a multiple of 16; mapped for `out`'s device.
        nbytes: how long it is, a positive multiple of 16.
        out: int32 [1]. On a GPU the kernel goes to torch's current stream there; on a CPU numpy does it.
        ctas: how many CTAs read.

    Raises:
        KernelError: an argument does not fit, or the kernel cannot be compiled.
    """
    if address <= 0 or address % _UNIT_BYTES or nbytes <= 0 or nbytes % _UNIT_BYTES:
        raise KernelError(
            f"address and nbytes must be positive multiples of {_UNIT_BYTES}, got {address} and {nbytes}"
        )
    if out.dtype != torch.int32 or out.shape != (1,):
        raise KernelError(f"out must be int32 [1], got {out.dtype} {list(out.shape)}")
    if out.device.type == "cpu":
        words = np.frombuffer(memoryview((ctypes.c_char * nbytes).from_address(address)), np.int32)
        out ^= int(np.bitwise_xor.reduce(words))
        return
    stream = torch.cuda.current_stream(out.device).cuda_stream
    _kernel(out.device).launch(
        ctas, _THREADS, (address, nbytes // _UNIT_BYTES, out.data_ptr()), stream=stream
    )


@cache
def _kernel(device: torch.device) -> Kernel:
    return load_kernel("read_words.cu", "read_words", "Q Q Q", device=device)
