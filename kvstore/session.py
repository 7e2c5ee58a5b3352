"""What is kept of a sequence that does not run: in memory while it sleeps, in the cold tier for later."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgpack
import numpy as np
import numpy.typing as npt

from ..tiers.errors import ConfigError, RecordError
from .handles import Generations
from .hashing import HASH_BYTES, ExtraKeys, as_tokens, check_extra_keys, hash_blocks, hash_partial
from .policy import Ids
from .prompt import PartialBlock

__all__ = ["Places", "SessionRecord", "SleepingSequence", "session_key"]

_VERSION = 1


def session_key(root: bytes, name: str) -> bytes:
    """The name of the note that keeps a session.

    Args:
        root: the root of its chain.
        name: the caller's id of it.
    """
    return b"session:" + root + name.encode()


@dataclass(frozen=True, eq=False)
class Places:
    """Where the leading blocks of a sequence lay. Hints: blocks may have gone since, and others come.

    Attributes:
        device_blocks: int32 [n], in the device tier, and
        device_generations: int64 [n], their generations there; 0 where a block was not there.
        host_slots: int32 [n], in host memory, and
        host_generations: int64 [n], likewise; 0 where no copy was known.
    """

    device_blocks: Ids
    device_generations: Generations
    host_slots: Ids
    host_generations: Generations

    @classmethod
    def unknown(cls, count: int) -> Places:
        """Places of `count` blocks that may be anywhere."""
        blocks, generations = np.zeros((2, count), dtype=np.int32), np.zeros((2, count), dtype=np.int64)
        return cls(blocks[0], generations[0], blocks[1], generations[1])

    def __len__(self) -> int:
        return len(self.device_blocks)


@dataclass(frozen=True)
class SleepingSequence:
    """A sequence that gave up its VRAM. `TieredStore.wake` makes it run again.

    Attributes:
        root: the root of its chain.
        hashes: prefix hashes of its full blocks.
        length: tokens whose KV was computed.
        tail: int32 [length % block_size], the tokens after the last full block.
        extra_keys: by block index, what its blocks depend on beside tokens.
        partial: the hash under which the partly filled last block was kept; None where there is none.
        places: where its leading blocks lay, the partly filled one last, if it was kept.
    """

    root: bytes
    hashes: tuple[bytes, ...]
    length: int
    tail: npt.NDArray[np.int32]
    extra_keys: ExtraKeys
    partial: bytes | None
    places: Places

    @property
    def names(self) -> list[bytes]:
        """The names of its blocks, the partly filled one last, if it was kept."""
        return [*self.hashes, *([] if self.partial is None else [self.partial])]

    @property
    def partial_block(self) -> PartialBlock | None:
        """The partly filled last block, where there is one."""
        return PartialBlock(self.partial, self.length) if self.partial is not None else None


@dataclass(frozen=True)
class SessionRecord:
    """A session as the cold tier keeps it: enough for any process to find its blocks and go on.

    Attributes:
        root: the root of its chain.
        length: tokens whose KV was computed.
        tokens: int32 [at least length], the whole conversation so far.
        extra_keys: by block index, what its blocks depend on beside tokens.
    """

    root: bytes
    length: int
    tokens: npt.NDArray[np.int32]
    extra_keys: ExtraKeys = field(default_factory=dict)

    def pack(self) -> bytes:
        """The record as bytes (msgpack)."""
        keys = [[at, *keys] for at, keys in self.extra_keys.items()]
        packed: bytes = msgpack.packb(
            [_VERSION, self.root, self.length, as_tokens(self.tokens).tobytes(), keys], use_bin_type=True
        )
        return packed

    @classmethod
    def unpack(cls, data: bytes) -> SessionRecord:
        """The record in `data`.

        Raises:
            RecordError: `data` is no session record of this version.
        """
        try:
            version, root, length, tokens, keys = msgpack.unpackb(data, raw=False)
            extra_keys = {at: tuple(of_block) for at, *of_block in keys}
            check_extra_keys(extra_keys)
        except (ValueError, TypeError, ConfigError, msgpack.UnpackException) as error:
            raise RecordError(f"not a session record: {error}") from error
        whole = (
            version == _VERSION
            and isinstance(root, bytes)
            and len(root) == HASH_BYTES
            and isinstance(length, int)
            and isinstance(tokens, bytes)
            and len(tokens) % 4 == 0
            and 0 <= length <= len(tokens) // 4
        )
        if not whole:
            raise RecordError(f"not a session record of version {_VERSION}")
        return cls(root, length, np.frombuffer(tokens, dtype="<i4"), extra_keys)

    def blocks(self, block_size: int) -> list[bytes]:
        """The hashes of all of its blocks, the partly filled one included."""
        sleeping = self.sleeping(block_size)
        return [*sleeping.hashes, *([] if sleeping.partial is None else [sleeping.partial])]

    def sleeping(self, block_size: int) -> SleepingSequence:
        """The sequence to wake, with no hint of where its blocks lie."""
        full = self.length // block_size * block_size
        hashes = hash_blocks(self.tokens[:full], block_size, self.root, self.extra_keys)
        tail = self.tokens[full : self.length]
        last = hashes[-1] if hashes else self.root
        keys = self.extra_keys.get(len(hashes), ())
        return SleepingSequence(
            root=self.root,
            hashes=tuple(hashes),
            length=self.length,
            tail=tail,
            extra_keys=self.extra_keys,
            partial=hash_partial(tail, last, keys) if len(tail) else None,
            places=Places.unknown(0),
        )
