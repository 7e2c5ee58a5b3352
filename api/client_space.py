"""What a client knows of the sidecar's memory and of its spaces, over all of its connections."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..kvstore.hashing import space_id
from ..tiers.errors import NotInPlaceError, ProtocolError
from ..tiers.layout import KVLayout
from ..tiers.mapping import SharedMapping
from .holdings import Handles, Holdings
from .messages import OpenSpace

__all__ = ["AbsentArena", "Arena", "ClientSpace", "Lost", "not_here"]


@dataclass(frozen=True)
class Lost:
    """What is no longer held of a space though nobody released it. Its memory may come to hold other blocks.

    Where the sidecar's memory went with it, views and addresses of these slots stay readable until they are
    released, and the space finds and keeps nothing until all of them are.

    Args:
        space: the 16-byte id of the space.
        leased: slots and generations that were leased.
        reserved: those that were reserved and not committed.
    """

    space: bytes
    leased: Handles
    reserved: Handles


class Arena:
    """A sidecar's memory in this process; unmapped when the last view of it is gone.

    Args:
        fd: its descriptor; stays the caller's.
        nbytes, extent_bytes: as `Welcome` says.

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
