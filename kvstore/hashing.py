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
from ..tiers.settings import expect_bytes, expect_integer, expect_text, expect_type, shown

__all__ = [
    "HASH_BYTES",
    "ChainIdentity",
    "ExtraKeys",
    "Tokens",
    "as_tokens",
    "check_extra_keys",
    "hash_blocks",
    "hash_partial",
    "leading",
    "link",
    "pack_blocks",
    "pack_keys",
    "space_id",
]

HASH_BYTES: Final = 16
_MOST_EPOCH: Final = (1 << 64) - 1
_MOST_KEY_BYTES: Final = (1 << 32) - 1
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
        ConfigError: `model` is empty, `epoch` out of range, or a field of another type.
    """

    model: bytes
    adapter: bytes = b""
    tenant: bytes = b""
    epoch: int = 0
    salt: bytes = b""

    def __post_init__(self) -> None:
        expect_bytes("model", self.model, least=1)
        expect_bytes("adapter", self.adapter)
        expect_bytes("tenant", self.tenant)
        expect_bytes("salt", self.salt)
        object.__setattr__(self, "epoch", expect_integer("epoch", self.epoch, 0, _MOST_EPOCH))

    @property
    def root(self) -> bytes:
        """``h[-1]`` of the chain, 16 bytes."""
        parts = [self.model, self.adapter, self.tenant, self.epoch.to_bytes(8, "little")]
        if self.salt:
            parts.append(self.salt)
        return _digest(b"kvpager-chain-1", *parts)


def space_id(layout: KVLayout, shard: str = "", tenant: str = "") -> bytes:
    """16 bytes that name a space: how block bytes lie, which part of the model they are of, whose they are.

    Args:
        layout: its fingerprint goes in, format and dtype included.
        shard: the layers and heads of this rank, in any fixed spelling (``"pp0/2 tp1/4"``).
        tenant: whose the blocks are; empty where nobody says.

    Raises:
        ConfigError: `layout` is none, or `shard` or `tenant` no string.
    """
    expect_type("layout", layout, KVLayout, "a KVLayout")
    expect_text("shard", shard, empty=True)
    expect_text("tenant", tenant, empty=True)
    parts = [layout.fingerprint, shard.encode()]
    if tenant:
        parts.append(tenant.encode())
    return _digest(b"kvpager-space-1", *parts)


def notes_id(space: bytes) -> bytes:
    """16 bytes that name where the notes of a space with a tenant are kept."""
    return _digest(b"kvpager-notes-1", space)


def as_tokens(tokens: Tokens) -> npt.NDArray[np.int32]:
    """Token ids as a contiguous little-endian int32 array, without a copy where they are one.

    Raises:
        ConfigError: they are no flat sequence of integers that fit one; cut to fit, different prompts would
            have the same names.
    """
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError) as error:  # lists of unequal lengths, tensors of a GPU
        raise ConfigError("tokens", f"must be a flat sequence of integers: {error}") from error
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
        ConfigError: `tokens` are no token ids, `block_size` is not positive, `parent` is no hash,
            `extra_keys` are none.
    """
    tokens = as_tokens(tokens)
    block_size = expect_integer("block_size", block_size, 1)
    expect_bytes("parent", parent, HASH_BYTES)
    if extra_keys is not None:
        check_extra_keys(extra_keys)
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


def check_extra_keys(extra_keys: ExtraKeys) -> None:
    """Raise `ConfigError` unless these are extra keys: byte strings, listed by block index."""
    if not isinstance(extra_keys, Mapping):
        raise ConfigError("extra_keys", f"must map block indices to byte strings, got {shown(extra_keys)}")
    for index, keys in extra_keys.items():
        expect_integer("extra_keys", index, 0)
        _check_keys(keys)


def _check_keys(keys: object) -> None:
    if (
        not isinstance(keys, Sequence)
        or isinstance(keys, str | bytes)
        or not all(isinstance(key, bytes) and len(key) <= _MOST_KEY_BYTES for key in keys)
    ):
        raise ConfigError("extra_keys", f"must be lists of byte strings, got {shown(keys)}")


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
    """The hash of one block, full or partly filled, that follows `parent`.

    Raises:
        ConfigError: `tokens` are no token ids, `parent` is no hash, `extra_keys` are no byte strings.
    """
    tokens = as_tokens(tokens)
    expect_bytes("parent", parent, HASH_BYTES)
    _check_keys(extra_keys)
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
