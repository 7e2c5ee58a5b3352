"""What a kernel can be told of the memory that it is given, before it is launched.

Values of a tensor are not looked at, since that would wait for the device. They are in debug mode, that is
with ``KVPAGER_DEBUG=1`` in the environment: an address that is not in memory which the device reaches is
refused, where it would end in a fault or in somebody else's bytes. A stream that is captured into a graph
cannot be waited for, so nothing is looked at there.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch

from ..tiers.address import TAG_MASK
from ..tiers.driver import cuda_driver
from ..tiers.errors import KernelError
from ..tiers.layout import KVLayout

__all__ = [
    "access_bytes",
    "debugging",
    "expect_mapped",
    "expect_rows_mapped",
]

_WIDEST: Final = 16
"""Bytes of the widest access of a thread."""
_MAPS: Final = Path("/proc/self/maps")


def access_bytes(*positions: int) -> int:
    """The widest access, 1 to 16 bytes, that addresses, strides and lengths are all multiples of."""
    return min(_WIDEST, *(position & -position or _WIDEST for position in positions))


def debugging() -> bool:
    """Whether debug mode is on."""
    return os.environ.get("KVPAGER_DEBUG", "") not in ("", "0")


def expect_mapped(name: str, words: torch.Tensor, num_bytes: int) -> None:
    """In debug mode, refuse words that name memory which their device does not reach.

    Args:
        name: the argument that the words are of.
        words: int64, any shape: block addresses; tags are ignored, and so are words that are zero.
        num_bytes: bytes from each of them on.

    Raises:
        KernelError: naming the argument and the first such address.
    """
    if not debugging() or (words.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    addresses: list[int] = (words & ~TAG_MASK).flatten().tolist()
    wanted = sorted({address for address in addresses if address})
    find = _missing_on_cuda if words.is_cuda else _missing_on_cpu
    missing = find(wanted, num_bytes)
    if missing is not None:
        raise KernelError(
            f"{name} has {missing:#x}, where no {num_bytes} bytes lie that {words.device} reaches"
        )


def expect_rows_mapped(block_table: torch.Tensor, seq_lens: torch.Tensor, layout: KVLayout) -> None:
    """In debug mode, refuse rows of a block table that are too short, or name memory that is not reached.

    Args:
        block_table: int64 [seqs, max_blocks] of block addresses.
        seq_lens: int32 [seqs].
        layout: the layout of the blocks.

    Raises:
        KernelError: naming the length or the address.
    """
    if not debugging() or (block_table.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    columns = block_table.shape[1]
    longest = int(seq_lens.max()) if len(seq_lens) else 0
    if longest > columns * layout.block_size:
        raise KernelError(f"seq_lens has a sequence of {longest} tokens in a row of {columns} blocks")
    used = torch.arange(columns, device=block_table.device)[None] * layout.block_size < seq_lens[:, None]
    expect_mapped("block_table", block_table.where(used, 0), layout.block_bytes)


def _missing_on_cpu(addresses: Iterable[int], num_bytes: int) -> int | None:
    ends: list[tuple[int, int]] = []
    for line in _MAPS.read_text().splitlines():
        span, access, *_ = line.split(maxsplit=2)
        low, high = (int(end, 16) for end in span.split("-"))
        if not access.startswith("r"):
            continue
        if ends and ends[-1][1] == low:  # one buffer may lie across several lines
            ends[-1] = (ends[-1][0], high)
        else:
            ends.append((low, high))
    for address in addresses:
        at = bisect_right(ends, (address, 1 << 64)) - 1
        if at < 0 or address + num_bytes > ends[at][1]:
            return address
    return None


def _missing_on_cuda(addresses: Iterable[int], num_bytes: int) -> int | None:
    driver = cuda_driver()
    kind = driver.CUpointer_attribute
    wanted = [kind.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, kind.CU_POINTER_ATTRIBUTE_RANGE_SIZE]
    low = high = 0
    for address in addresses:
        if not low <= address < high:
            low = high = address
        while high < address + num_bytes:  # memory may be allocated or registered in pieces side by side
            start, end = _allocation(driver, wanted, high)
            if not start <= high < end:
                return address
            high = end
    return None


def _allocation(driver: Any, wanted: list[Any], address: int) -> tuple[int, int]:
    """The allocation or registration that an address is in; empty where CUDA knows of none."""
    status, values = driver.cuPointerGetAttributes(len(wanted), wanted, address)
    if int(status):
        return 0, 0
    start, size = (int(value or 0) for value in values)
    return start, start + size
