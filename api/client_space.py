"""What a client knows of the sidecar's memory and of its spaces, over all of its connections."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..kvstore.hashing import space_id
from ..kvstore.policy import Ids
from ..tiers.driver import device_ordinal
from ..tiers.errors import ConfigError, NotInPlaceError, ProtocolError
from ..tiers.layout import KVLayout
from ..tiers.mapped_arena import MappedArena
from ..tiers.mapping import SharedMapping
from ..tiers.settings import expect_array
from .holdings import Handles, Holdings
from .messages import OpenSpace
from .warm_extents import WarmExtents

__all__ = [
    "AbsentArena",
    "Arena",
    "ClientSpace",
    "Lost",
    "device_delta",
    "is_being_mapped",
    "not_here",
    "readable_in_place",
]

_INT32: Final = np.dtype(np.int32)


@dataclass(frozen=True)
class Lost:
    """What is no longer held of a space though nobody released it. Its memory may come to hold other blocks.

    Where the sidecar's memory went with it, views and addresses of these slots stay readable until they are
    released, and the space finds and keeps nothing until all of them are (`readable`).

    Args:
        space: the 16-byte id of the space.
        leased: slots and generations that were leased.
        reserved: those that were reserved and not committed.
        readable: what was leased can still be read, as the memory went with the sidecar and is nobody else's.
    """

    space: bytes
    leased: Handles
    reserved: Handles
    readable: bool = False


class Arena:
    """A sidecar's memory in this process; unmapped when the last view of it is gone.

    Args:
        fd: its descriptor; stays the caller's.
        nbytes, extent_bytes: as `Welcome` says.

    Attributes:
        mapped: what page-locks it for a GPU, after `map_device`.

    Raises:
        ProtocolError: the descriptor is of something shorter.
        MemoryUnavailableError: there is no address space for it.
    """

    def __init__(self, fd: int, nbytes: int, extent_bytes: int) -> None:
        status = os.fstat(fd)
        if not 0 < extent_bytes <= nbytes <= status.st_size:
            raise ProtocolError(f"an arena of {nbytes} bytes was announced, of {status.st_size} came")
        self.file = status.st_dev, status.st_ino
        self.nbytes = nbytes
        self.extent_bytes = extent_bytes
        mapping = SharedMapping(fd, nbytes)
        self.base = mapping.base
        self.bytes = mapping.bytes()
        mapping.release()  # the views keep it
        owned = status.st_uid == os.geteuid()
        self._warm = WarmExtents(mapping, self.num_extents, extent_bytes, owned=owned)
        self.mapped: MappedArena | None = None

    def expect_writes(self, extents: Iterable[int]) -> None:
        """These extents are about to be written, and the next ones perhaps: see `WarmExtents`."""
        self._warm.expect(extents, self.bytes)

    def wait_warm(self, seconds: float) -> None:
        """Wait until the pages of expected writes are entered, so long at most."""
        self._warm.wait(seconds)

    def map_device(self, device: str) -> None:
        """Page-lock it for a GPU, ``cuda`` or ``cuda:N``, in the background.

        Raises:
            ConfigError: no CUDA driver answers, cuda-python is not installed, or ``device`` is no GPU; or it
                is mapped for another one.
            KVPagerError: there is no such GPU.
        """
        if self.mapped is None:
            memory = self.bytes[: self.num_extents * self.extent_bytes]
            self.mapped = MappedArena(memory, self.base, self.extent_bytes, device)
        elif self.mapped.device != f"cuda:{device_ordinal(device)}":
            raise ConfigError("device", f"the memory is mapped for {self.mapped.device} already")

    @property
    def num_extents(self) -> int:
        """Its extents."""
        return self.nbytes // self.extent_bytes


class AbsentArena:
    """What is known of the memory of a sidecar that passes none: over TCP.

    Args:
        extent_bytes: as `Welcome` says.

    Raises:
        ProtocolError: an extent has no bytes.
    """

    num_extents = 0

    def __init__(self, extent_bytes: int) -> None:
        if extent_bytes <= 0:
            raise ProtocolError(f"extents of {extent_bytes} bytes were announced")
        self.nbytes = 0
        self.extent_bytes = extent_bytes

    @property
    def base(self) -> int:
        """There is none.

        Raises:
            NotInPlaceError: always.
        """
        raise not_here()

    @property
    def bytes(self) -> memoryview:
        """There are none.

        Raises:
            NotInPlaceError: always.
        """
        raise not_here()


def not_here() -> NotInPlaceError:
    return NotInPlaceError(
        "the sidecar was reached over TCP, and its memory is not in this process: read lease.blocks, write "
        "reservation.blocks, or use get and put"
    )


class ClientSpace:
    """A space as a client knows it, over all of its connections.

    Args:
        layout, shard, tenant: what it is of.
        arena: the memory that its slots are in.

    Attributes:
        id: 16 bytes.
        inline: whether its memory is not here, and blocks travel in frames; how many slots there are is then
            not known.
        arena: the memory that its slots are in; another one after the sidecar's was lost, when nothing of
            the old one is held any more.
        number: what it is called on this connection; None while it cannot be asked.
        held: leases and reservations.
    """

    def __init__(self, layout: KVLayout, shard: str, tenant: str, arena: Arena | AbsentArena) -> None:
        self.layout = layout
        self.shard = shard
        self.tenant = tenant
        self.id = space_id(layout, shard, tenant)
        self.arena = arena
        self.capacity = arena.extent_bytes // layout.block_bytes * arena.num_extents
        self.inline = isinstance(arena, AbsentArena)
        self.number: int | None = None
        self.held = Holdings(self.capacity, grows=self.inline)
        self.opened: int | None = None
        self.adrift: Arena | AbsentArena | None = None
        """Where the memory was lost: the one to go on in when nothing is held of it."""

    def expect_writes(self, slots: Ids) -> None:
        """These slots are about to be written."""
        if isinstance(self.arena, Arena):
            per_extent = self.arena.extent_bytes // self.layout.block_bytes
            self.arena.expect_writes(set((slots // per_extent).tolist()))

    def open_message(self) -> OpenSpace:
        """The request to open it."""
        layout = self.layout
        return OpenSpace(
            layout.num_layers,
            layout.num_kv_heads,
            layout.head_dim,
            layout.block_size,
            layout.dtype,
            str(layout.format),
            layout.planes,
            layout.window or 0,
            layout.scale_bytes,
            self.shard,
            self.tenant,
        )


def device_delta(space: ClientSpace) -> int:
    """Device address less host address of a space's slots, bytes; 0 where no GPU has them."""
    arena = space.arena
    return arena.mapped.device_delta if isinstance(arena, Arena) and arena.mapped is not None else 0


def is_being_mapped(space: ClientSpace) -> bool:
    """Whether more of a space's memory may come to be readable by the GPU that it is mapped for."""
    arena = space.arena
    return isinstance(arena, Arena) and arena.mapped is not None and not arena.mapped.wait_mapped(0.0)


def readable_in_place(space: ClientSpace, device: str | None, slots: Ids) -> npt.NDArray[np.bool_]:
    """bool [n]: which slots the GPU may read where they lie; all of them where ``device`` is None.

    Raises:
        NotInPlaceError: the memory is not in this process.
        ConfigError: slots are no integers, or there is no such slot.
    """
    slots = expect_array("slots", slots, _INT32)
    arena = space.arena
    if isinstance(arena, AbsentArena):
        raise not_here()
    if device is None:
        return np.ones(len(slots), dtype=np.bool_)
    if arena.mapped is None:  # it took another one's place, and is about to be mapped
        return np.zeros(len(slots), dtype=np.bool_)
    return arena.mapped.is_page_locked(slots // (arena.extent_bytes // space.layout.block_bytes))
