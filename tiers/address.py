"""Block address words: a 64-bit address with tags in its low seven bits.

Slices of a block start on multiples of 128 bytes (`SLICE_ALIGNMENT`), so seven bits are free: bit 0 *far*,
not in this GPU's memory; bit 1 *install*, a device slot waits for the page; bits 2-4 the element encoding, 0
as the model computes; the rest are zero.
"""

from __future__ import annotations

from typing import Final

from .layout import SLICE_ALIGNMENT

__all__ = ["FAR", "INSTALL", "TAG_MASK"]

FAR: Final = 1
INSTALL: Final = 2
TAG_MASK: Final = SLICE_ALIGNMENT - 1
