"""RemoteSpace: a space of a sidecar, whose blocks are read and written where they lie."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ..kvstore.handles import Generations, Lease, Reservation
from ..kvstore.hashing import HASH_BYTES, Tokens
from ..kvstore.lineage import CHAIN_START, ChainPlace, Lineage
from ..kvstore.policy import Ids, Retention
from ..kvstore.session import session_key
from ..kvstore.slot_space import SlotSpace
from ..tiers.errors import StaleHandleError
from ..tiers.mover import HostMover
from ..tiers.settings import expect_byte_strings, expect_bytes, expect_seconds, expect_text
from .client_calls import Ask
from .client_core import ClientCore
from .client_space import ClientSpace, device_delta, is_being_mapped, readable_in_place
from .holdings import Handles
from .messages import Message, Purged
from .space_asks import LoadedLease, SpaceAsks, handles_of, session_blocks

__all__ = ["RemoteLoad", "RemoteSpace", "Shell"]

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)
_INT32: Final = np.dtype(np.int32)
_LOAD_SECONDS: Final = 10.0
"""How long a load that is not waited for goes on at most."""


class Shell(Protocol):
    """A connection, as far as its spaces need it."""

    core: ClientCore
    mover: HostMover
    strict: bool
    timeout: float

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        ...

    def check_open(self) -> None:
        """Raise `ClosedError` where it was closed, or is another process's."""
        ...

    @property
    def device(self) -> str | None:
        """The GPU that its memory is mapped for."""
        ...

    def map_device(self, device: str | None = None) -> None:
        """Have the memory mapped for a GPU."""
        ...

    def ask(self, ask: Ask[_T]) -> _T:
        """Make a request and wait for what becomes of it."""
        ...

    def begin(self, ask: Ask[_T]) -> PendingCall[_T]:
        """Make a request without waiting."""
        ...

    def release(self, space: ClientSpace, handles: Handles) -> int:
        """`ClientCore.release`, sent."""
        ...

    def abort(self, space: ClientSpace, handles: Handles) -> int:
        """`ClientCore.abort`, sent."""
        ...

    def commit(
        self, space: ClientSpace, handles: Handles, *, lenient: bool = False, until: float | None = None
    ) -> int:
        """Commit, and wait for it, see `Ask.until`; returns how many were refused at once."""
        ...


class PendingCall(Protocol[_T_co]):
    """A request that was made and is not waited for."""

    def result(self, seconds: float) -> _T_co | None:
        """What became of it; None where that is not known after so many seconds."""
        ...

    def abandon(self) -> None:
        """Nobody wants the result, now or later: it is given back."""
        ...


class RemoteLoad:
    """Blocks on their way up from the cold tier of a sidecar. See `ColdLoad`, which this stands in for.

    Args:
        shell: the connection.
        ask: the request for them.

    Attributes:
        loaded: blocks that have arrived, once the sidecar has said so,
        seconds: and how long it took to bring them up; 0 where it does not know.
    """

    def __init__(self, shell: Shell, ask: Ask[LoadedLease]) -> None:
        self.loaded = 0
        self.seconds = 0.0
        self._until = time.monotonic() + _LOAD_SECONDS
        self._lease: LoadedLease | None = None
        self._answered = False
        self._released = False

        def convert(reply: Message) -> LoadedLease:
            # Also of what nobody waits for any more.
            lease = ask.convert(reply)
            self.loaded, self.seconds, self._answered = lease.loaded, lease.seconds, True
            return lease

        self._call = shell.begin(replace(ask, convert=convert))

    def done(self) -> bool:
        """Whether everything that is to be had has arrived."""
        return self.wait(0.0)

    def wait(self, seconds: float) -> bool:
        """Wait until it is done, `seconds` at most; returns whether it is."""
        seconds = expect_seconds("seconds", seconds)
        if self._lease is None and not self._released:
            self._lease = self._call.result(seconds)
        return self._lease is not None or self._answered or time.monotonic() > self._until

    def stop(self) -> None:
        """Nothing: the sidecar brings up what it was asked for, and the next request finds it."""

    def release(self) -> None:
        """Whoever waited has leases of his own now, or wants the blocks no more. Idempotent."""
        if not self._released:
            self._released = True
            if self._lease is not None:
                self._lease.release()
            else:
                self._call.abandon()


class RemoteSpace(SlotSpace):
    """One layout and shard in a sidecar. Open it with `Connection.space`; call it from any thread.

    Calls are those of `HostSpace`. Where the sidecar does not answer in time they find and keep nothing, and
    do not raise unless the connection is strict: then `ServiceUnavailableError`, and `StaleHandleError` for
    handles that are not held any more. After `Connection.close` they raise `ClosedError`.

    Args:
        shell: the connection.
        space: what its core knows of it.
        lenient: whether calls do not raise of a strict connection either (`for_steps`).
        deadline: of all calls together, see `until`.

    Attributes:
        deadline: of all calls together, of `time.monotonic()`; None: each has the connection's time.
    """

    def __init__(
        self, shell: Shell, space: ClientSpace, *, lenient: bool = False, deadline: float | None = None
    ) -> None:
        super().__init__(space.layout, space.arena.extent_bytes, space.arena.num_extents)
        self.shard = space.shard
        self.tenant = space.tenant
        self.id = space.id
        self._shell = shell
        self._space = space
        self._lenient = lenient
        self.deadline = deadline
        self._asks = SpaceAsks(shell.core, space, self, lenient=lenient)

    def for_steps(self) -> RemoteSpace:
        """The same for an engine's steps, as of a connection that is not strict.

        A request of an engine goes on when nothing can be kept of it (the sidecar does not answer, or a quota
        has no room), and computes again what is lost.
        """
        return RemoteSpace(self._shell, self._space, lenient=True)

    def until(self, deadline: float) -> RemoteSpace:
        """The same for some calls that have one deadline together: none of them waits for an answer after it.

        Args:
            deadline: of `time.monotonic()`. Its attribute of that name may be put off between two calls.
        """
        return RemoteSpace(self._shell, self._space, lenient=self._lenient, deadline=deadline)

    @property
    def closed(self) -> bool:
        """Whether the connection was closed."""
        return self._shell.closed

    @property
    def device_delta(self) -> int:
        """What to add to `addresses` on a GPU, bytes; known once a slot is `readable_in_place` there."""
        return device_delta(self._space)

    def readable_in_place(self, slots: Ids) -> npt.NDArray[np.bool_]:
        """Whether attention may read these slots where they lie, bool [n]: the CPU may.

        After `map_device` it is the GPU's turn: it may as soon as they are page-locked.
        """
        self._check_open()
        return readable_in_place(self._space, self._shell.device, slots)

    def map_device(self, device: str | None = None) -> None:
        """Have the sidecar's memory mapped for a GPU: `Connection.map_device`."""
        self._shell.map_device(device)

    def match(
        self,
        hashes: Sequence[bytes] | None = None,
        *,
        tokens: Tokens | None = None,
        chain: bytes | None = None,
        cold_deadline: float | None = None,
        start: ChainPlace | None = CHAIN_START,
    ) -> Lease:
        """Lease the leading blocks that are resident. See `HostSpace.match`."""
        names = self._asks.hashes(hashes, tokens, chain)
        return self._ask(self._asks.match(names, cold_deadline, start))

    def count_resident(self, hashes: Sequence[bytes]) -> int | None:
        """How many leading blocks are resident; None where the sidecar does not answer. Counts no hits."""
        return self._ask(self._asks.count_resident(hashes))

    def lease(self, slots: Ids, generations: Generations, *, used: bool = False) -> npt.NDArray[np.bool_]:
        """Lease remembered slots, each once. See `HostSpace.lease`."""
        self._check_open()
        if not len(slots):
            return np.zeros(0, dtype=np.bool_)
        return self._ask(self._asks.lease(slots, generations, used=used))

    def release(self, slots: Ids, generations: Generations) -> None:
        """End leases. Does not wait: what cannot be said now is said by the next connection."""
        self._refused("release", self._shell.release(self._space, handles_of(slots, generations)))

    def reserve(
        self, hashes: Sequence[bytes], *, wait: float = 0.0, lineage: Lineage | None = None
    ) -> Reservation:
        """Slots to write blocks into. See `HostSpace.reserve`."""
        hashes = expect_byte_strings("hashes", hashes, HASH_BYTES)
        return self.reserve_named(hashes, wait=expect_seconds("wait", wait), lineage=lineage)

    def reserve_named(
        self, hashes: Sequence[bytes], *, wait: float = 0.0, lineage: Lineage | None = None
    ) -> Reservation:
        """`reserve` that trusts its arguments."""
        return self._ask(self._asks.reserve(hashes, wait, lineage))

    def commit(self, slots: Ids, generations: Generations, *, in_cold: bool = False) -> None:
        """Reserved slots are written: let them be found. Waits for the reply.

        Where it does not come the commit is said again by the next connection.

        Args:
            in_cold: of no effect here; the sidecar knows what its cold tier has.
        """
        self._check_open()
        handles = handles_of(slots, generations)
        if len(handles):
            self._refused("commit", self._commit(handles))

    def abort(self, slots: Ids, generations: Generations) -> None:
        """Reserved slots will not be written. Does not wait, as `release`."""
        self._refused("abort", self._shell.abort(self._space, handles_of(slots, generations)))

    def pin(self, hashes: Sequence[bytes], *, ttl: float | None = None) -> int:
        """Keep resident blocks in host memory until `unpin`, or for `ttl` seconds. See `HostSpace.pin`."""
        return self._ask(self._asks.pin(hashes, ttl))

    def hint(self, hashes: Sequence[bytes], *, wanted: bool, retention: Retention | None = None) -> int:
        """Advice: these blocks will be wanted soon, or not again. See `HostSpace.hint`."""
        return self._ask(self._asks.hint(hashes, wanted, retention))

    def unpin(self, hashes: Sequence[bytes]) -> int:
        """End a pin; returns how many of the blocks were pinned."""
        return self._ask(self._asks.unpin(hashes))

    def evict(self, count: int) -> int:
        """Let go of up to `count` blocks, coldest first; returns how many went."""
        return self._ask(self._asks.evict(count))

    def room_may_come(self, held: int) -> bool:
        """Whether waiting for slots may help: others have some, or there will be more that a GPU may read.

        True where the sidecar does not answer: the next one may have some.

        Args:
            held: how many different slots the caller has leased itself.
        """
        return bool(self._ask(self._asks.room_may_come(held))) or is_being_mapped(self._space)

    def load(
        self, hashes: Sequence[bytes], deadline: float, *, start: ChainPlace | None = CHAIN_START
    ) -> Lease:
        """Bring blocks up from the cold tier and lease the leading ones that are resident then."""
        return self._ask(self._asks.load(hashes, deadline, start))

    def start_load(self, hashes: Sequence[bytes], *, start: ChainPlace | None = CHAIN_START) -> RemoteLoad:
        """Start bringing up from the cold tier what it has of the leading blocks; returns at once."""
        return RemoteLoad(self._shell, self._asks.load(hashes, _LOAD_SECONDS, start, ahead=True))

    def demote(self, hashes: Sequence[bytes], *, deadline: float = 30.0) -> int:
        """See `HostSpace.demote`. For operators: a token of tenants is refused."""
        return self._ask(self._asks.demote(hashes, deadline))

    def purge(self, hashes: Sequence[bytes], *, note: bytes = b"", deadline: float = 30.0) -> Purged:
        """Have blocks, and a note, be gone from host memory and the cold tier. See `Connection.purge_tenant`.

        Raises:
            ServiceUnavailableError: the sidecar does not answer.
        """
        return self._ask(self._asks.purge(hashes, note, deadline))

    def purge_session(self, name: str, *, root: bytes, deadline: float = 30.0) -> Purged:
        """Have a session that was saved be gone, its record and its blocks, those that others share included.

        Where there is no record of it nothing is known of its blocks: purge these by their hashes.

        Args:
            name: its id.
            root: the root of its chain.

        Raises:
            RecordError: its record is of another version.
            ColdTierUnavailableError: the cold tier does not say whether it has one; nothing was purged.
            ServiceUnavailableError: the sidecar does not answer.
        """
        key = session_key(expect_bytes("root", root, HASH_BYTES), expect_text("name", name))
        found = self._ask(self._asks.get_note(key, deadline, required=True))
        return self.purge(session_blocks(found, self.layout), note=key, deadline=deadline)

    def put_note(self, name: bytes, value: bytes, deadline: float | None = None) -> bool:
        """Keep a small named record in the cold tier; False where there is none or it did not take it."""
        seconds = self._shell.timeout if deadline is None else deadline
        return bool(self._ask(self._asks.put_note(name, value, seconds)))

    def get_note(self, name: bytes, deadline: float | None = None) -> bytes | None:
        """A named record from the cold tier, or None."""
        seconds = self._shell.timeout if deadline is None else deadline
        return self._ask(self._asks.get_note(name, seconds))

    # Inside

    def _ask(self, ask: Ask[_T]) -> _T:
        return self._shell.ask(ask if self.deadline is None else replace(ask, until=self.deadline))

    def _commit(self, handles: Handles) -> int:
        return self._shell.commit(self._space, handles, lenient=self._lenient, until=self.deadline)

    def _check_open(self) -> None:
        self._shell.check_open()

    def _base(self) -> int:
        self._check_open()
        base: int = self._space.arena.base
        return base

    def _bytes(self, offset: int, nbytes: int) -> memoryview:
        return self._space.arena.bytes[offset : offset + nbytes]

    def _copy(self, source: npt.NDArray[np.int64], target: npt.NDArray[np.int64]) -> None:
        self._shell.mover.copy_now(source, target, self.layout.block_bytes)

    def _refused(self, what: str, count: int) -> None:
        if count and self._shell.strict and not self._lenient:
            raise StaleHandleError(f"{what} refused for {count} slots: not held any more")
