"""Prefix hashes: the content-derived names of blocks, the same in every process and on every host.

The *chain* names what a block's KV was computed from. With ``h[-1]`` the root of a chain::

    h[i] = BLAKE2b-128(h[i-1] || token count || tokens of block i || extra keys of block i)

Token count and tokens are little-endian uint32 and int32; every extra key (the content hash of an image,
say) is preceded by its length as little-endian uint32. The root is a digest of everything else that the
KV depends on, so two chains that differ in any of it share no hash. The *space* names how the bytes lie:
layout, shard and, for opaque bytes, the engine's own layout.

BLAKE2 is RFC 7693. Test vectors are in ``tests/test_hashing.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ..tiers.errors import ConfigError
from ..tiers.layout import KVLayout

__all__ = [
    "HASH_BYTES",
    "ChainIdentity",
    "ExtraKeys",
    "Tokens",
    "as_tokens",
    "hash_blocks",
    "hash_partial",
    "leading",
    "link",
    "pack_blocks",
    "pack_keys",
    "space_id",
]

HASH_BYTES: Final = 16
_INT32: Final = np.iinfo(np.int32)
_PROBES: Final = 16
_EMPTY: Final = hashlib.blake2b(digest_size=HASH_BYTES)

Tokens: TypeAlias = "npt.NDArray[np.int32] | Sequence[int]"
"""Token ids: an int32 array, or any sequence of ints that fit one."""

ExtraKeys: TypeAlias = Mapping[int, Sequence[bytes]]
"""Block index to the extra keys of that block."""


def _digest(*parts: bytes) -> bytes:
    """BLAKE2b-128 of the parts, each preceded by its length, so that no two lists run together."""
    state = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in parts:
        state.update(len(part).to_bytes(4, "little"))
        state.update(part)
    return state.digest()


@dataclass(frozen=True)
class ChainIdentity:
    """What the KV of a token depends on beside the tokens before it.

    Args:
        model: content digest of weights, quantisation and RoPE parameters; not a name.
        adapter: content digest of a LoRA or other adapter, empty for none.
        tenant: salt of a tenant that must not share KV with others, empty for none.
        epoch: changed whenever weights are updated in place.
        salt: KV is shared only between requests of the same salt; empty for the usual.

    Raises:
        ConfigError: `model` is empty, or `epoch` out of range.
    """

    model: bytes
    adapter: bytes = b""
    tenant: bytes = b""
    epoch: int = 0
    salt: bytes = b""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model", "must be a content digest of the weights, not empty")
        if not 0 <= self.epoch < 1 << 64:
            raise ConfigError("epoch", f"must be from 0 to 2**64 - 1, got {self.epoch!r}")

    @property
    def root(self) -> bytes:
        """``h[-1]`` of the chain, 16 bytes."""
        parts = [self.model, self.adapter, self.tenant, self.epoch.to_bytes(8, "little")]
        if self.salt:
            parts.append(self.salt)
        return _digest(b"kvpager-chain-1", *parts)


def space_id(layout: KVLayout, shard: str = "") -> bytes:
    """16 bytes that name a space: how block bytes lie, and which part of the model they are of.

    Args:
        layout: its fingerprint goes in, format and dtype included.
        shard: the layers and heads of this rank, in any fixed spelling (``"pp0/2 tp1/4"``).
    """
    return _digest(b"kvpager-space-1", layout.fingerprint, shard.encode())


def as_tokens(tokens: Tokens) -> npt.NDArray[np.int32]:
    """Token ids as a contiguous little-endian int32 array, without a copy where they are one.

    Raises:
        ConfigError: they are no flat sequence of integers that fit one; cut to fit, different prompts would
            have the same names.
    """
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigError("tokens", f"must be a flat sequence of integers, got {array.dtype} {array.shape}")
    if array.dtype != np.int32 and array.size and not _INT32.min <= array.min() <= array.max() <= _INT32.max:
        raise ConfigError("tokens", f"must fit 32 bits, got {array.min()} to {array.max()}")
    return np.ascontiguousarray(array, dtype="<i4")


def hash_blocks(
    tokens: Tokens,
    block_size: int,
    parent: bytes,
    extra_keys: ExtraKeys | None = None,
) -> list[bytes]:
    """The prefix hashes of the full blocks of `tokens`, 16 bytes each.

    Args:
        tokens: int32 [n]; the ``n % block_size`` last ones are not hashed.
        block_size: tokens per block.
        parent: the hash before the first block: a chain's root, or the last hash of what precedes.
        extra_keys: by block index, counted from the first block of `tokens`.

    Raises:
        ConfigError: `tokens` are no token ids, `block_size` is not positive, `parent` is no hash.
    """
    tokens = as_tokens(tokens)
    if block_size < 1:
        raise ConfigError("block_size", f"must be positive, got {block_size!r}")
    if len(parent) != HASH_BYTES:
        raise ConfigError("chain", f"must be a hash of {HASH_BYTES} bytes, got {len(parent)}")
    count = len(tokens) // block_size
    if not count:
        return []
    messages = pack_blocks(tokens[: count * block_size].reshape(count, block_size))
    if extra_keys:
        for index, keys in extra_keys.items():
            if index < count:
                messages[index] += pack_keys(keys)
    # Copying an empty state and updating it is a third faster than constructing one per block.
    fresh = _EMPTY.copy
    hashes = []
    last = parent
    for message in messages:
        state = fresh()
        state.update(last + message)
        last = state.digest()
        hashes.append(last)
    return hashes


def pack_blocks(rows: npt.NDArray[np.int32]) -> list[bytes]:
    """What follows the parent in the hash of each full block: its token count and its tokens.

    Args:
        rows: int32 [blocks, block_size].
    """
    packed = np.empty((len(rows), 1 + rows.shape[1]), dtype="<i4")
    packed[:, 0] = rows.shape[1]
    packed[:, 1:] = rows
    messages: list[bytes] = packed.view(f"V{packed.shape[1] * 4}").ravel().tolist()
    return messages


def link(parent: bytes, message: bytes) -> bytes:
    """The hash of one block: `parent`, then its message from `pack_blocks`."""
    state = _EMPTY.copy()
    state.update(parent + message)
    return state.digest()


def hash_partial(tokens: Tokens, parent: bytes, extra_keys: Sequence[bytes] = ()) -> bytes:
    """The hash of one block, full or partly filled, that follows `parent`."""
    tokens = as_tokens(tokens)
    message = len(tokens).to_bytes(4, "little") + tokens.tobytes() + pack_keys(extra_keys)
    return link(parent, message)


def pack_keys(keys: Sequence[bytes]) -> bytes:
    """What follows a block's tokens in its hash."""
    return b"".join(len(key).to_bytes(4, "little") + key for key in keys)


def leading(index: Mapping[bytes, int], names: Sequence[bytes], start: int = 0) -> list[int]:
    """What `index` has for ``names[start:]``, up to the first name that it does not know."""
    get = index.get
    found: list[int] = []
    count = _PROBES
    while start < len(names):
        # A map in C costs half of a loop; in growing parts, so that little after a miss is probed.
        part = list(map(get, names[start : start + count]))
        if None in part:
            return found + cast("list[int]", part[: part.index(None)])
        found += cast("list[int]", part)
        start += count
        count *= 2
    return found
