"""A prompt with the names of its blocks: hashed once for all that is asked about it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..tiers.settings import expect_bytes, expect_integer
from .hashing import HASH_BYTES, ExtraKeys, Tokens, as_tokens, hash_blocks, hash_partial

__all__ = ["NamedPrompt", "PartialBlock", "name_prompt"]


@dataclass(frozen=True)
class PartialBlock:
    """A partly filled block that may have been kept.

    Attributes:
        name: the hash of its tokens.
        length: the sequence's length at its end.
    """

    name: bytes
    length: int


@dataclass(frozen=True)
class NamedPrompt:
    """A prompt and the names of its blocks, from `TieredStore.name_prompt`.

    Attributes:
        tokens: int32, the whole prompt.
        root: root of its chain.
        hashes: prefix hashes of its full blocks.
        usable: how many of them may be attached: the last token is left to be computed.
        partial: a partly filled block that may have been kept.
        extra_keys: by block index.
    """

    tokens: npt.NDArray[np.int32]
    root: bytes
    hashes: tuple[bytes, ...]
    usable: int
    partial: PartialBlock | None
    extra_keys: ExtraKeys


def name_prompt(
    tokens: Tokens,
    block_size: int,
    root: bytes,
    extra_keys: ExtraKeys | None = None,
    partial_at: int | None = None,
) -> NamedPrompt:
    """Name the blocks of a prompt.

    Args:
        tokens: int32 [n], the whole prompt.
        block_size: tokens per block.
        root: root of its chain.
        extra_keys: by block index, see `kvstore.hashing`.
        partial_at: a length at which a sequence with this beginning once slept, so that a partly filled
            block may have been kept there.

    Raises:
        ConfigError: an argument is of a wrong type or out of range.
    """
    tokens = as_tokens(tokens)
    expect_bytes("root", root, HASH_BYTES)
    if partial_at is not None:
        partial_at = expect_integer("partial_at", partial_at, 0)
    hashes = hash_blocks(tokens, block_size, root, extra_keys)
    partial = None
    if partial_at is not None and 0 < partial_at < len(tokens) and partial_at % block_size:
        column = partial_at // block_size
        keys = extra_keys.get(column, ()) if extra_keys else ()
        last = hashes[column - 1] if column else root
        name = hash_partial(tokens[column * block_size : partial_at], last, keys)
        partial = PartialBlock(name, partial_at)
    usable = max(0, len(tokens) - 1) // block_size
    return NamedPrompt(tokens, root, tuple(hashes), usable, partial, extra_keys or {})
