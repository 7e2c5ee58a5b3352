"""The messages of the sidecar's protocol: what its frames carry, and how each field travels.

A message is a frozen dataclass with a tag; its fields travel in the order in which they are written. Hashes,
slots and generations of many blocks are one byte string each, so no frame has an object per block. A tag
means the same for ever; a field may be added at a message's end, with a default for those that do not send
it, and none is taken away or changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Final, TypeAlias, TypeVar, get_type_hints

import numpy as np
import numpy.typing as npt

from ..kvstore.handles import Generations
from ..kvstore.hashing import HASH_BYTES
from ..kvstore.policy import Ids
from ..tiers.errors import ProtocolError

__all__ = [
    "MOST_HASHES",
    "Abort",
    "Blocks",
    "Clients",
    "Command",
    "CommandDone",
    "CommandGiven",
    "Commit",
    "Count",
    "CountResident",
    "Done",
    "Event",
    "Evict",
    "Flags",
    "Flush",
    "Get",
    "GetClients",
    "GetNote",
    "GetStats",
    "Hashes",
    "Hello",
    "Hint",
    "LeaseSlots",
    "Leased",
    "Load",
    "Marks",
    "Match",
    "MayHaveRoom",
    "Message",
    "Note",
    "OpenSpace",
    "Pin",
    "Purge",
    "PurgeTenant",
    "Purged",
    "Put",
    "PutNote",
    "Reassert",
    "Release",
    "Report",
    "Reserve",
    "Reserved",
    "SpaceOpened",
    "Stats",
    "Statuses",
    "Subscribe",
    "Unpin",
    "Welcome",
    "fields_of",
    "message_of",
    "tagged",
]

Hashes: TypeAlias = tuple[bytes, ...]
"""Prefix hashes; they travel one after the other, in one byte string."""
_NAME: Final = np.dtype(f"V{HASH_BYTES}")
MOST_HASHES: Final = 1 << 20
"""Hashes of one message: a frame of more would keep its reader from everybody else too long."""
Flags: TypeAlias = npt.NDArray[np.bool_]
Statuses: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class _Codec:
    """How a field travels: what is put into msgpack for it, and what is made of what comes out."""

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


def _exactly(kind: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise ProtocolError(f"a field that should be {kind.__name__} is {type(value).__name__}")
        return value

    return check


def _unpack_float(value: Any) -> float:
    if type(value) not in (int, float):
        raise ProtocolError(f"a field that should be a number is {type(value).__name__}")
    return float(value)


def _array_codec(wire: str, kind: type[np.generic]) -> _Codec:
    travels = np.dtype(wire)
    size = travels.itemsize

    def pack(value: npt.NDArray[Any]) -> bytes:
        return (value if value.dtype == travels else value.astype(travels)).tobytes()

    def unpack(value: Any) -> npt.NDArray[Any]:
        if type(value) is not bytes or len(value) % size:
            raise ProtocolError(f"a field that should be an array of {wire} is not one")
        return np.frombuffer(value, dtype=wire).astype(kind)

    return _Codec(pack, unpack)


def _pack_hashes(value: Hashes) -> bytes:
    if len(value) > MOST_HASHES:
        raise ProtocolError(f"{len(value)} hashes were to go in one message, {MOST_HASHES} may")
    return b"".join(value)


def _unpack_hashes(value: Any) -> Hashes:
    if type(value) is not bytes or len(value) % HASH_BYTES:
        raise ProtocolError("a field that should be hashes is not a multiple of their length")
    if len(value) > MOST_HASHES * HASH_BYTES:
        raise ProtocolError(f"{len(value) // HASH_BYTES} hashes came in one message, {MOST_HASHES} may")
    return tuple(np.frombuffer(value, dtype=_NAME).tolist())  # a loop in C


def _unpack_texts(value: Any) -> tuple[str, ...]:
    if type(value) is not tuple or not all(type(text) is str for text in value):
        raise ProtocolError("a field that should be strings is not")
    return value


def _unpack_map(value: Any) -> dict[str, Any]:
    if type(value) is not dict or not all(type(key) is str for key in value):
        raise ProtocolError("a field that should be a map is not one")
    return value


_CODECS: Final[dict[Any, _Codec]] = {
    int: _Codec(_same, _exactly(int)),
    bool: _Codec(_same, _exactly(bool)),
    str: _Codec(_same, _exactly(str)),
    bytes: _Codec(_same, _exactly(bytes)),
    float: _Codec(float, _unpack_float),
    tuple[str, ...]: _Codec(list, _unpack_texts),
    dict[str, Any]: _Codec(_same, _unpack_map),
    Hashes: _Codec(_pack_hashes, _unpack_hashes),
    Ids: _array_codec("<i4", np.int32),
    Generations: _array_codec("<i8", np.int64),
    Statuses: _array_codec("u1", np.uint8),
    Flags: _array_codec("u1", np.bool_),
}


def _nothing() -> Ids:
    return np.empty(0, dtype=np.int32)


def _codec_of(hint: Any) -> _Codec:
    return _CODECS[hint]


class Message:
    """What a frame carries. Every subclass is a frozen dataclass with a tag of its own."""

    TAG: ClassVar[int]


_M = TypeVar("_M", bound=type[Message])
_messages: dict[int, type[Message]] = {}
_packs: dict[type[Message], tuple[Callable[[Any], Any], ...]] = {}
_unpacks: dict[type[Message], tuple[Callable[[Any], Any], ...]] = {}
_least: dict[type[Message], int] = {}
"""Fields that a message must have: those that came later have defaults."""


def tagged(tag: int) -> Callable[[_M], _M]:
    """Give a message its tag, and find out how its fields travel."""

    def register(kind: _M) -> _M:
        if tag in _messages:
            raise TypeError(f"tag {tag} is {_messages[tag].__name__}'s")
        kind.TAG = tag
        hints = get_type_hints(kind)
        codecs = [_codec_of(hints[one.name]) for one in fields(kind)]  # type: ignore[arg-type]
        _packs[kind] = tuple(codec.pack for codec in codecs)
        _unpacks[kind] = tuple(codec.unpack for codec in codecs)
        needed = [
            one
            for one in fields(kind)  # type: ignore[arg-type]
            if one.default is MISSING and one.default_factory is MISSING
        ]
        _least[kind] = len(needed)
        _messages[tag] = kind
        return kind

    return register


@tagged(1)
@dataclass(frozen=True)
class Hello(Message):
    """The first request of a client.

    Args:
        magic: `MAGIC`, so that whoever is called by mistake can tell.
        newest, oldest: versions of the protocol that it speaks.
        group: 16 bytes that an engine's processes share; leases and reservations are theirs together.
        pid: its process, 0 for one on another machine.
        token: what lets a client in over TCP; empty on a local socket.
        name: what an operator calls it.
        client: 16 bytes that name this client of the group, the same when it connects again: whose leases
            and reservations `Reassert` is about.
    """

    magic: str
    newest: int
    oldest: int
    group: bytes
    pid: int
    token: str
    name: str
    client: bytes = bytes(16)


@tagged(2)
@dataclass(frozen=True)
class Welcome(Message):
    """The reply to `Hello`.

    Args:
        version: the version that is spoken from here on.
        boot_id: 16 bytes, others after each start of the sidecar.
        arena_bytes: length of the arena, whose descriptor comes with this frame on a local socket; 0 where
            blocks travel inline instead.
        extent_bytes: length of its extents.
        max_frame: bytes of the largest frame that the sidecar takes.
    """

    version: int
    boot_id: bytes
    arena_bytes: int
    extent_bytes: int
    max_frame: int


@tagged(3)
@dataclass(frozen=True)
class Done(Message):
    """The reply to what has nothing to tell."""


@tagged(4)
@dataclass(frozen=True)
class Count(Message):
    """The reply of how many."""

    count: int


@tagged(10)
@dataclass(frozen=True)
class OpenSpace(Message):
    """Open the space of a layout and shard; `KVLayout` says what the first nine are, window 0 being none.

    Args:
        shard: which part of the model this is.
        tenant: whose the blocks are: quotas go by it, and no other tenant finds them. May be empty.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    format: str
    planes: int
    window: int
    scale_bytes: int
    shard: str
    tenant: str


@tagged(11)
@dataclass(frozen=True)
class SpaceOpened(Message):
    """The reply to `OpenSpace`.

    Slot ``s`` lies in the arena at ``s // slots_per_extent * extent_bytes``, and in its extent at
    ``s % slots_per_extent * block_bytes``.

    Args:
        space: what requests of this connection call it.
        id: the 16 bytes that events call it.
        slots_per_extent: slots that an extent is cut into.
    """

    space: int
    id: bytes
    slots_per_extent: int


@tagged(12)
@dataclass(frozen=True)
class Match(Message):
    """Lease the leading blocks of `hashes` that are resident, and count what follows in the cold tier.

    Args:
        deadline: seconds that the cold tier may be asked for; 0: not at all.
        before: hash of the block before the first one in its chain; zeros: none, or not known.
        depth: 1-based index of the first one in its chain, which the others follow; 0: not known.
    """

    space: int
    hashes: Hashes
    deadline: float
    before: bytes = bytes(HASH_BYTES)
    depth: int = 0


@tagged(13)
@dataclass(frozen=True)
class Leased(Message):
    """Leased slots in the order of their hashes, and how many further blocks the cold tier has.

    Args:
        loaded: how many of the slots were brought up from the cold tier for this request.
        seconds: how long that took, without waiting for its turn; 0: not known.
    """

    slots: Ids
    generations: Generations
    cold: int
    loaded: int = 0
    seconds: float = 0.0


@tagged(14)
@dataclass(frozen=True)
class Load(Message):
    """Bring what the cold tier has of `hashes` to host memory; lease the leading blocks that are there.

    Args:
        deadline: seconds; what has not come by then is not leased.
        before, depth: as of `Match`.
        ahead: a `Match` of them follows, which is the use of what has come up; else this is.
    """

    space: int
    hashes: Hashes
    deadline: float
    before: bytes = bytes(HASH_BYTES)
    depth: int = 0
    ahead: bool = False


@tagged(15)
@dataclass(frozen=True)
class LeaseSlots(Message):
    """Lease slots that were remembered; answered by `Marks`, false where a slot was granted again since.

    Args:
        used: this is a use of the blocks, which are in the order of their chain, as a match would be.
    """

    space: int
    slots: Ids
    generations: Generations
    used: bool = False


@tagged(16)
@dataclass(frozen=True)
class Marks(Message):
    """One byte for each of what was asked for, 1 or 0."""

    flags: Flags


@tagged(17)
@dataclass(frozen=True)
class Release(Message):
    """End leases."""

    space: int
    slots: Ids
    generations: Generations


@tagged(18)
@dataclass(frozen=True)
class Reserve(Message):
    """Ask for slots to write blocks into.

    Args:
        wait: seconds to wait for room.
        parents: for each hash that of the block before it in its chain; zeros: none, or not known.
        depths: for each its 1-based index in its chain; 0: not known. Both empty: nothing is known.
    """

    space: int
    hashes: Hashes
    wait: float
    parents: Hashes = ()
    depths: Ids = field(default_factory=_nothing)


@tagged(19)
@dataclass(frozen=True)
class Reserved(Message):
    """The reply to `Reserve`, for each hash: its `ReserveStatus`, slot and generation."""

    statuses: Statuses
    slots: Ids
    generations: Generations


@tagged(20)
@dataclass(frozen=True)
class Commit(Message):
    """Reserved slots are written: let them be found."""

    space: int
    slots: Ids
    generations: Generations


@tagged(21)
@dataclass(frozen=True)
class Abort(Message):
    """Reserved slots will not be written."""

    space: int
    slots: Ids
    generations: Generations


@tagged(22)
@dataclass(frozen=True)
class Pin(Message):
    """Keep resident blocks from eviction; answered by how many are.

    Args:
        ttl: seconds until the pin ends by itself; 0: never.
    """

    space: int
    hashes: Hashes
    ttl: float = 0.0


@tagged(23)
@dataclass(frozen=True)
class Unpin(Message):
    """Let pinned blocks be evicted again; answered by how many were pinned."""

    space: int
    hashes: Hashes


@tagged(24)
@dataclass(frozen=True)
class Evict(Message):
    """Let go of up to so many blocks, coldest first; answered by how many went."""

    space: int
    count: int


@tagged(25)
@dataclass(frozen=True)
class PutNote(Message):
    """Keep a small record in the cold tier; answered by a count of 1 where it was kept."""

    space: int
    name: bytes
    value: bytes
    deadline: float


@tagged(26)
@dataclass(frozen=True)
class GetNote(Message):
    """Ask for a small record."""

    space: int
    name: bytes
    deadline: float


@tagged(27)
@dataclass(frozen=True)
class Note(Message):
    """The reply to `GetNote`."""

    found: bool
    value: bytes


@tagged(28)
@dataclass(frozen=True)
class Put(Message):
    """Store blocks whose bytes come with the frame, one after the other; answered by how many were stored.

    Args:
        wait: seconds to wait for room.
        parents, depths: as of `Reserve`.
    """

    space: int
    hashes: Hashes
    data: bytes
    wait: float
    parents: Hashes = ()
    depths: Ids = field(default_factory=_nothing)


@tagged(29)
@dataclass(frozen=True)
class Get(Message):
    """Ask for the bytes of the leading resident blocks."""

    space: int
    hashes: Hashes


@tagged(30)
@dataclass(frozen=True)
class Blocks(Message):
    """The bytes of blocks, one after the other."""

    data: bytes


@tagged(31)
@dataclass(frozen=True)
class GetStats(Message):
    """Ask for the counters."""


@tagged(32)
@dataclass(frozen=True)
class Stats(Message):
    """The reply to `GetStats`: numbers, strings, and maps of these."""

    values: dict[str, Any]


@tagged(33)
@dataclass(frozen=True)
class Subscribe(Message):
    """Have `Event` sent for every change from here on, or no more."""

    on: bool


@tagged(34)
@dataclass(frozen=True)
class Event(Message):
    """A notice: blocks came into a tier or left it; the fields are those of `BlockEvent`.

    Args:
        lost: events before this one that were not sent, since the client took them too slowly.
    """

    kind: str
    tier: str
    space: bytes
    hashes: Hashes
    lost: int


@tagged(35)
@dataclass(frozen=True)
class Flush(Message):
    """Write what the cold tier has no copy of; answered by how many blocks still have none.

    Args:
        deadline: seconds.
    """

    deadline: float


@tagged(36)
@dataclass(frozen=True)
class Reassert(Message):
    """What this client holds in a space: sent after it connected again, before anything else about the space.

    The sidecar makes its books of this client agree: what they have beyond this is released or aborted (the
    replies were lost), what they lack is taken where the generation is right. Saying it twice changes
    nothing. Answered by `Marks`, false where a slot was granted again since, or is no reservation any more.

    Args:
        counts: leases of each slot that the client holds; 0 for a reservation that is not committed.
    """

    space: int
    slots: Ids
    generations: Generations
    counts: Ids


@tagged(40)
@dataclass(frozen=True)
class Purge(Message):
    """Have blocks of a space, and a note of it, be gone from host memory and the cold tier.

    Args:
        note: the note's name; empty: none.
        deadline: seconds that the cold tier may take.
    """

    space: int
    hashes: Hashes
    note: bytes
    deadline: float


@tagged(41)
@dataclass(frozen=True)
class PurgeTenant(Message):
    """Have everything of a tenant be gone: in all spaces that the sidecar knows of it, blocks and notes.

    Args:
        deadline: seconds that the cold tier may take.
    """

    tenant: str
    deadline: float


@tagged(42)
@dataclass(frozen=True)
class Purged(Message):
    """The reply to `Purge` and `PurgeTenant`: what is gone, and what is not yet.

    Args:
        spaces: spaces that this was about.
        host_blocks, host_bytes: gone from host memory.
        cold_blocks, cold_bytes: gone from the cold tier.
        notes: notes that are gone.
        left: why something is left: ``leased`` and ``reserved`` map who holds blocks to how many; they go
            when these let go of them, and are found by nobody meanwhile. ``cold`` says what kept the cold
            tier from removing all of it; it is told again, and nothing of it is loaded.
    """

    spaces: int
    host_blocks: int
    host_bytes: int
    cold_blocks: int
    cold_bytes: int
    notes: int
    left: dict[str, Any]


@tagged(43)
@dataclass(frozen=True)
class Hint(Message):
    """Advice: blocks will be wanted soon, or not again; answered by how many it is tried for.

    Args:
        retention: of each field of `Retention` that has a value, that; empty: there is no such advice.
    """

    space: int
    hashes: Hashes
    wanted: bool
    retention: dict[str, Any] = field(default_factory=dict)


@tagged(44)
@dataclass(frozen=True)
class Report(Message):
    """How an engine is; the fields are those of `EngineReport`. The last one is kept until it disconnects.

    Args:
        costs: of `CostModel.as_map`; empty: not known.
        counts: what the engine counted since it began, by name.
    """

    sessions: dict[str, Any]
    block_bytes: int
    device_blocks: int
    device_held: int
    to_device: float
    from_device: float
    space: bytes = b""
    costs: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)


@tagged(45)
@dataclass(frozen=True)
class GetClients(Message):
    """Ask who is connected, and what each reported last."""


@tagged(46)
@dataclass(frozen=True)
class Clients(Message):
    """The reply to `GetClients`: a map for each client, by its id."""

    values: dict[str, Any]


@tagged(47)
@dataclass(frozen=True)
class Command(Message):
    """Have the engine that holds a session do something with it; answered by its `CommandDone`.

    Args:
        kind: a `CommandKind`.
        session: its id, as the engine reports it.
        hashes: of ``promote``: these of its blocks; none: all.
        deadline: seconds that the engine may take.
    """

    kind: str
    session: str
    hashes: Hashes
    deadline: float


@tagged(48)
@dataclass(frozen=True)
class CommandGiven(Message):
    """A notice to an engine that reported the session; it answers with `CommandDone`.

    Args:
        command: what the answer calls it.
        deadline: seconds after which nobody waits for the answer any more.
    """

    command: int
    kind: str
    session: str
    hashes: Hashes
    deadline: float


@tagged(49)
@dataclass(frozen=True)
class CommandDone(Message):
    """What became of a command: from the engine to the sidecar, and as the reply to who asked.

    Args:
        count: blocks, or whatever else was to be counted.
        problem: why it was not done; empty: it was.
    """

    command: int
    count: int
    problem: str


@tagged(50)
@dataclass(frozen=True)
class MayHaveRoom(Message):
    """Ask whether waiting for slots may help, where none can be had; answered by a count, 1: it may, or 0.

    `held`: how many different slots of the space who asks has leased itself.
    """

    space: int
    held: int


@tagged(51)
@dataclass(frozen=True)
class CountResident(Message):
    """Ask how many leading blocks are resident; answered by their count. It is no use of them."""

    space: int
    hashes: Hashes


def fields_of(message: Message) -> list[Any]:
    """What is put into msgpack for a message's fields."""
    # A dataclass has its fields in their order.
    return [pack(value) for pack, value in zip(_packs[type(message)], message.__dict__.values(), strict=True)]


def message_of(tag: object, values: object) -> Message:
    """The message of a tag and what came out of msgpack for its fields.

    Raises:
        ProtocolError: there is no such message, or a field is not what it should be.
    """
    kind = _messages.get(tag) if type(tag) is int else None
    if kind is None:
        raise ProtocolError(f"there is no message with tag {tag!r:.40}")
    unpacks = _unpacks[kind]
    # A newer peer may have added fields at the end; an older one leaves out those that came later alone.
    if type(values) is not tuple or len(values) < _least[kind]:
        raise ProtocolError(f"{kind.__name__} has {len(unpacks)} fields")
    return kind(*[unpack(value) for unpack, value in zip(unpacks, values, strict=False)])
