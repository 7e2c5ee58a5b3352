"""How the KV of one block lies in memory: the same bytes in every tier."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from .errors import ConfigError
from .settings import MOST_BYTES, expect_choice, expect_integer, expect_text

__all__ = ["SLICE_ALIGNMENT", "KVLayout"]

SLICE_ALIGNMENT: Final = 128
"""Bytes. Every (layer, plane, head) slice starts on a multiple of this, so the low seven bits of a
block address are free for tags."""

_ITEM_BYTES: Final = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "uint8": 1,
}
_SWIZZLED_ROW_BYTES: Final = (128, 256, 512)
_OPAQUE_PREFIX: Final = "opaque:"
_MOST_PARTS: Final = 1 << 20
"""Of layers, heads, and tokens of a block: more than any model has."""
_MOST: Final = (1 << 31) - 1


@dataclass(frozen=True)
class KVLayout:
    """Shape and byte order of a block: ``[layer][K|V][kv_head][token][head_dim]``, contiguous.

    Args:
        num_layers: layers whose KV a block holds (of one rank).
        num_kv_heads: **KV** heads per layer (of one rank); not query heads.
        head_dim: elements of one head's key or value.
        block_size: tokens per block.
        dtype: element type as the model computes: ``float16``, ``bfloat16``, ``float32``; ``uint8``
            for bytes that the store does not interpret.
        format: ``swizzled`` stores the 16-byte chunk ``c`` of token row ``t`` at chunk
            ``c XOR (t mod 8)``, so that tensor-core loads of a row meet no bank conflicts;
            ``plain`` stores rows as they are; ``opaque:NAME`` marks another engine's bytes.
            ``None`` picks ``swizzled`` where a row is 128, 256 or 512 bytes of 2-byte elements.
        planes: 2 for keys and values, 1 for a single latent.
        window: sliding window in tokens of the layers of this group, or None. Part of the
            description only: a block keeps all of its tokens.
        scale_bytes: bytes of quantisation scales after each slice's rows.

    Raises:
        ConfigError: a value is of a wrong type or out of range, or a format does not fit the row.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: str = "float16"
    format: str | None = None
    planes: int = field(default=2, kw_only=True)
    window: int | None = field(default=None, kw_only=True)
    scale_bytes: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        checked: dict[str, object] = {
            "num_layers": expect_integer("num_layers", self.num_layers, 1, _MOST_PARTS),
            "num_kv_heads": expect_integer("num_kv_heads", self.num_kv_heads, 1, _MOST_PARTS),
            "head_dim": expect_integer("head_dim", self.head_dim, 1, _MOST),
            "block_size": expect_integer("block_size", self.block_size, 1, _MOST_PARTS),
            "dtype": expect_choice("dtype", self.dtype, _ITEM_BYTES),
            "planes": expect_integer("planes", self.planes, 1, 2),
            "window": None if self.window is None else expect_integer("window", self.window, 1, _MOST),
            "scale_bytes": expect_integer("scale_bytes", self.scale_bytes, 0, _MOST),
        }
        # Integers of numpy become plain ones: a fingerprint is made of how they are written.
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "format", self._format())
        if self.block_bytes > MOST_BYTES:
            raise ConfigError(
                "block_size",
                f"{self.block_size} tokens of {self.num_layers} layers, {self.num_kv_heads} heads and "
                f"{self.head_dim} elements are more bytes than there are addresses",
            )

    def _format(self) -> str:
        """The format that is meant, if rows can have it."""
        can_swizzle = self.item_bytes == 2 and self.row_bytes in _SWIZZLED_ROW_BYTES
        if self.format is None:
            return "swizzled" if can_swizzle else "plain"
        name = expect_text("format", self.format)
        if name == "swizzled":
            if not can_swizzle:
                raise ConfigError(
                    "format",
                    "swizzled needs token rows of 128, 256 or 512 bytes of 2-byte elements, "
                    f"this row is {self.row_bytes} bytes of {self.dtype}",
                )
        elif name != "plain" and not (name.startswith(_OPAQUE_PREFIX) and len(name) > len(_OPAQUE_PREFIX)):
            raise ConfigError("format", f"must be swizzled, plain or opaque:NAME, got {name!r}")
        return name

    @property
    def swizzled(self) -> bool:
        """Whether 16-byte chunks of a row are permuted by its token index."""
        return self.format == "swizzled"

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return _ITEM_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token of one head of one plane."""
        return self.head_dim * self.item_bytes

    @cached_property
    def slice_bytes(self) -> int:
        """Bytes from one (layer, plane, head) slice to the next: rows and scales, rounded up to 128."""
        used = self.block_size * self.row_bytes + self.scale_bytes
        return -(-used // SLICE_ALIGNMENT) * SLICE_ALIGNMENT

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one layer's slice of a block; what a kernel adds per layer."""
        return self.planes * self.num_kv_heads * self.slice_bytes

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a block, all layers."""
        return self.num_layers * self.page_bytes

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token: planes × layers × KV heads × head_dim × element bytes."""
        return self.planes * self.num_layers * self.num_kv_heads * self.row_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens, 0 or more.

        Raises:
            ConfigError: it is no such number.
        """
        return -(-expect_integer("num_tokens", num_tokens, 0) // self.block_size)

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes that name this layout. Equal layouts have equal fingerprints in every process."""
        text = (
            f"kvpager-layout-1|{self.num_layers}|{self.num_kv_heads}|{self.head_dim}|{self.block_size}"
            f"|{self.dtype}|{self.format}|{self.planes}|{self.window or 0}|{self.scale_bytes}"
        )
        return hashlib.blake2b(text.encode(), digest_size=16).digest()
