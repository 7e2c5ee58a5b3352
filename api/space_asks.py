"""The requests that are made of a space, and what their replies become; the same for every shell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ..kvstore.handles import Generations, Lease, Reservation, ReserveStatus, SlotOwner
from ..kvstore.hashing import HASH_BYTES, Tokens, hash_blocks
from ..kvstore.lineage import NO_PARENT, ChainPlace, Lineage, expect_lineage, expect_place
from ..kvstore.policy import Ids, Retention, expect_retention
from ..kvstore.session import SessionRecord
from ..tiers.errors import ConfigError, ProtocolError
from ..tiers.layout import KVLayout
from ..tiers.settings import (
    expect_array,
    expect_byte_strings,
    expect_bytes,
    expect_flag,
    expect_integer,
    expect_seconds,
)
from .client_calls import Ask, expect
from .client_core import ClientCore
from .client_shell import nothing_purged
from .client_space import ClientSpace
from .holdings import Handles
from .messages import (
    Count,
    CountResident,
    Evict,
    GetNote,
    Hint,
    Leased,
    LeaseSlots,
    Load,
    Marks,
    Match,
    MayHaveRoom,
    Message,
    Note,
    Pin,
    Purge,
    Purged,
    PutNote,
    Reserve,
    Reserved,
    Unpin,
)
from .operator_messages import Demote

__all__ = ["LoadedLease", "SpaceAsks", "handles_of", "session_blocks"]

_INT32: Final = np.dtype(np.int32)
_INT64: Final = np.dtype(np.int64)
_NEW: Final = int(ReserveStatus.NEW)
_DENIED: Final = int(ReserveStatus.DENIED)


class LoadedLease(Lease):
    """A lease whose blocks may have been brought up from the cold tier for it.

    Attributes:
        loaded: how many of them were.
        seconds: how long that took; 0: not known.
    """

    def __init__(
        self,
        space: SlotOwner,
        slots: Ids,
        generations: Generations,
        cold: int = 0,
        loaded: int = 0,
        seconds: float = 0.0,
    ) -> None:
        super().__init__(space, slots, generations, cold)
        self.loaded = loaded
        self.seconds = seconds


class SpaceAsks:
    """Makes the requests about one space. Arguments are checked here, once for all shells.

    Args:
        core: whose space it is.
        space: the space.
        owner: whom leases and reservations are given back to.
        lenient: whether they find and keep nothing, rather than raise, of a strict connection too.
    """

    def __init__(
        self, core: ClientCore, space: ClientSpace, owner: SlotOwner, *, lenient: bool = False
    ) -> None:
        self._lenient = lenient
        self._core = core
        self._space = space
        self._owner = owner

    def hashes(
        self, hashes: Sequence[bytes] | None, tokens: Tokens | None, chain: bytes | None
    ) -> Sequence[bytes]:
        """The names that a match is of; arguments as of `HostSpace.match`."""
        if hashes is None and tokens is not None and chain is not None:
            chain = expect_bytes("chain", chain, HASH_BYTES)
            return hash_blocks(tokens, self._space.layout.block_size, chain)
        if hashes is None or tokens is not None or chain is not None:
            raise ConfigError("hashes", "give these, or tokens and the root of their chain")
        return expect_byte_strings("hashes", hashes, HASH_BYTES)

    def match(
        self, hashes: Sequence[bytes], cold_deadline: float | None, start: ChainPlace | None
    ) -> Ask[Lease]:
        """Lease the leading blocks that are resident."""
        seconds = 0.0 if cold_deadline is None else expect_seconds("cold_deadline", cold_deadline)
        names = tuple(hashes)
        place = _place(start, len(names))
        return Ask(
            self._space,
            lambda number: Match(number, names, seconds, *place),
            lambda reply: self._leased(reply, len(names)),
            self._no_lease,
            seconds,
            self._drop_lease,
            lenient=self._lenient,
        )

    def load(
        self, hashes: Sequence[bytes], deadline: float, start: ChainPlace | None, *, ahead: bool = False
    ) -> Ask[LoadedLease]:
        """Bring blocks up from the cold tier, and lease the leading ones; `ahead`: of a match of them."""
        names = tuple(expect_byte_strings("hashes", hashes, HASH_BYTES))
        seconds = expect_seconds("deadline", deadline)
        place = _place(start, len(names))
        return Ask(
            self._space,
            lambda number: Load(number, names, seconds, *place, ahead),
            lambda reply: self._leased(reply, len(names)),
            self._no_lease,
            seconds,
            self._drop_lease,
            lenient=self._lenient,
        )

    def lease(self, slots: Ids, generations: Generations, *, used: bool) -> Ask[npt.NDArray[np.bool_]]:
        """Lease remembered slots."""
        handles = handles_of(slots, generations)

        def convert(reply: Message) -> npt.NDArray[np.bool_]:
            flags = expect(reply, Marks).flags
            if len(flags) != len(handles):
                raise ProtocolError("there is not one mark for each slot that was to be leased")
            leased = handles.where(flags)
            self._check(leased)
            self._space.held.add_leases(leased)
            return flags

        return Ask(
            self._space,
            lambda number: LeaseSlots(number, handles.slots, handles.generations, used),
            convert,
            lambda: np.zeros(len(handles), dtype=np.bool_),
            drop=lambda flags: self._core.release(self._space, handles.where(flags)),
            lenient=self._lenient,
        )

    def reserve(self, hashes: Sequence[bytes], wait: float, lineage: Lineage | None) -> Ask[Reservation]:
        """Ask for slots to write blocks into."""
        names = tuple(hashes)
        known = expect_lineage(lineage, len(names))
        told = () if known is None else (tuple(known.parents), known.depths)

        def convert(reply: Message) -> Reservation:
            got = expect(reply, Reserved)
            if not len(got.statuses) == len(got.slots) == len(got.generations) == len(names):
                raise ProtocolError("there is not one answer for each block that was to be reserved")
            new = Handles(got.slots, got.generations).where(got.statuses == _NEW)
            self._check(new)
            self._space.held.add_reservations(new)
            self._space.expect_writes(new.slots)
            return Reservation(self._owner, names, got.statuses, got.slots, got.generations)

        def instead() -> Reservation:
            status = np.full(len(names), _DENIED, dtype=np.uint8)
            slots, generations = np.zeros(len(names), np.int32), np.zeros(len(names), np.int64)
            return Reservation(self._owner, names, status, slots, generations)

        def drop(reservation: Reservation) -> None:
            new = reservation.new
            self._core.abort(self._space, Handles(reservation.slots[new], reservation.generations[new]))

        return Ask(
            self._space,
            lambda number: Reserve(number, names, wait, *told),
            convert,
            instead,
            wait,
            drop,
            lenient=self._lenient,
        )

    def pin(self, hashes: Sequence[bytes], ttl: float | None) -> Ask[int]:
        """Keep resident blocks from eviction."""
        names = tuple(expect_byte_strings("hashes", hashes, HASH_BYTES))
        seconds = 0.0 if ttl is None else expect_seconds("ttl", ttl, above=True)
        return self._counted(lambda number: Pin(number, names, seconds))

    def hint(self, hashes: Sequence[bytes], wanted: bool, retention: Retention | None) -> Ask[int]:
        """Say what will be wanted, or not."""
        names = tuple(expect_byte_strings("hashes", hashes, HASH_BYTES))
        wanted = expect_flag("wanted", wanted)
        retention = expect_retention(retention)
        given = {} if retention is None else vars(retention)
        advice = {name: value for name, value in given.items() if value is not None}
        return self._counted(lambda number: Hint(number, names, wanted, advice))

    def unpin(self, hashes: Sequence[bytes]) -> Ask[int]:
        """Let pinned blocks be evicted again."""
        names = tuple(expect_byte_strings("hashes", hashes, HASH_BYTES))
        return self._counted(lambda number: Unpin(number, names))

    def demote(self, hashes: Sequence[bytes], deadline: float) -> Ask[int]:
        """Have blocks be in the cold tier alone."""
        names = tuple(expect_byte_strings("hashes", hashes, HASH_BYTES))
        seconds = expect_seconds("deadline", deadline)
        return Ask(
            self._space,
            lambda number: Demote(number, names, seconds),
            lambda reply: expect(reply, Count).count,
            lambda: 0,
            seconds,
            required=True,
        )

    def evict(self, count: int) -> Ask[int]:
        """Let go of blocks, coldest first."""
        count = expect_integer("count", count, 0)
        return self._counted(lambda number: Evict(number, count))

    def count_resident(self, hashes: Sequence[bytes]) -> Ask[int | None]:
        """How many leading blocks are resident; None where the sidecar does not say."""
        names = tuple(expect_byte_strings("hashes", hashes, HASH_BYTES))
        return Ask(
            self._space,
            lambda number: CountResident(number, names),
            lambda reply: min(expect(reply, Count).count, len(names)),
            lambda: None,
            lenient=self._lenient,
        )

    def room_may_come(self, held: int) -> Ask[int]:
        """Whether waiting for slots may help; 1, too, where that is not known."""
        held = expect_integer("held", held, 0)
        return Ask(
            self._space,
            lambda number: MayHaveRoom(number, held),
            lambda reply: expect(reply, Count).count,
            lambda: 1,
            lenient=self._lenient,
        )

    def purge(self, hashes: Sequence[bytes], note: bytes, deadline: float) -> Ask[Purged]:
        """Have blocks and a note be gone."""
        names = tuple(expect_byte_strings("hashes", hashes, HASH_BYTES))
        note, seconds = expect_bytes("note", note), expect_seconds("deadline", deadline)
        return Ask(
            self._space,
            lambda number: Purge(number, names, note, seconds),
            lambda reply: expect(reply, Purged),
            nothing_purged,
            seconds,
            required=True,
        )

    def put_note(self, name: bytes, value: bytes, deadline: float) -> Ask[int]:
        """Keep a small record in the cold tier; 1 where it was kept."""
        name, value = expect_bytes("name", name), expect_bytes("value", value)
        seconds = expect_seconds("deadline", deadline)
        return self._counted(lambda number: PutNote(number, name, value, seconds), seconds)

    def get_note(self, name: bytes, deadline: float, *, required: bool = False) -> Ask[bytes | None]:
        """A small record from the cold tier.

        Args:
            required: whether it is an error that it cannot be known whether there is one.
        """
        name, seconds = expect_bytes("name", name), expect_seconds("deadline", deadline)

        def convert(reply: Message) -> bytes | None:
            note = expect(reply, Note)
            return note.value if note.found else None

        return Ask(
            self._space,
            lambda number: GetNote(number, name, seconds),
            convert,
            lambda: None,
            seconds,
            required=required,
            lenient=self._lenient,
        )

    # Inside: what follows is called with the shell's lock held.

    def _counted(self, message: Callable[[int], Message], seconds: float = 0.0) -> Ask[int]:
        return Ask(
            self._space,
            message,
            lambda reply: expect(reply, Count).count,
            lambda: 0,
            seconds,
            lenient=self._lenient,
        )

    def _leased(self, reply: Message, asked: int) -> LoadedLease:
        got = expect(reply, Leased)
        handles = Handles(got.slots, got.generations)
        if len(got.slots) > asked:
            raise ProtocolError("more blocks were leased than were asked for")
        self._check(handles)
        self._space.held.add_leases(handles)
        return LoadedLease(self._owner, got.slots, got.generations, got.cold, got.loaded, got.seconds)

    def _no_lease(self) -> LoadedLease:
        return LoadedLease(self._owner, np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64))

    def _drop_lease(self, lease: Lease) -> None:
        self._core.release(self._space, Handles(lease.slots, lease.generations))

    def _check(self, handles: Handles) -> None:
        self._space.held.make_room(handles.slots)
        if not self._space.held.fits(handles):
            raise ProtocolError("the sidecar names slots that the space does not have")


def _place(start: ChainPlace | None, count: int) -> tuple[bytes, int]:
    """How it travels where in a chain so many blocks begin."""
    known = expect_place(start, count)
    return (NO_PARENT, 0) if known is None else (known.before, known.depth)


def session_blocks(note: bytes | None, layout: KVLayout) -> list[bytes]:
    """The blocks of a session that was saved: none where there is no note of it.

    Raises:
        RecordError: the note is of another version.
    """
    return [] if note is None else SessionRecord.unpack(note).blocks(layout.block_size)


def handles_of(slots: Ids, generations: Generations) -> Handles:
    """Slots and generations that a caller gives.

    Raises:
        ConfigError: they are no integers, or not one generation for each slot.
    """
    slots = expect_array("slots", slots, _INT32)
    generations = expect_array("generations", generations, _INT64)
    if len(slots) != len(generations):
        raise ConfigError(
            "generations", f"must be one for each of {len(slots)} slots, got {len(generations)}"
        )
    return Handles(slots, generations)
