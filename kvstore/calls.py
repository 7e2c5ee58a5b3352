"""What an engine calls of host memory: a `HostStore` fulfils it, and so does a connection to a sidecar.

Where a sidecar does not answer, a call finds or keeps nothing, and does not raise (see `kvpager.connect`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ..tiers.layout import KVLayout
from .control import CommandKind, EngineReport
from .cost import CostModel
from .events import Listener
from .handles import Generations, Lease, Reservation, SlotOwner
from .hashing import Tokens
from .lineage import CHAIN_START, ChainPlace, Lineage
from .policy import Ids, Retention

__all__ = [
    "ControlCalls",
    "CostCalls",
    "EngineCommand",
    "HostCalls",
    "LoadCalls",
    "LostListener",
    "SpaceCalls",
]

LostListener = Callable[[bytes, Ids, Generations], None]
"""Is told of leases that ended though nobody released them: the id of the space, slots, generations."""


class LoadCalls(Protocol):
    """Blocks on their way up from the cold tier to host memory."""

    @property
    def loaded(self) -> int:
        """Blocks that have arrived so far."""
        ...

    @property
    def seconds(self) -> float:
        """How long bringing them up took, without waiting for its turn; 0 before it is done, or not known."""
        ...

    def done(self) -> bool:
        """Whether everything that is to be had has arrived. Raises what the load failed with."""
        ...

    def wait(self, seconds: float) -> bool:
        """Wait until it is done, `seconds` at most; returns whether it is. Raises as `done`."""
        ...

    def stop(self) -> None:
        """Advice: it is no longer waited for, so nothing more needs to be brought up."""
        ...

    def release(self) -> None:
        """Let go of what is resident of them, which stays leased until now. Idempotent."""
        ...


class SpaceCalls(SlotOwner, Protocol):
    """The slots of one layout and shard. Every call is safe from any thread."""

    @property
    def layout(self) -> KVLayout:
        """How a block lies in memory."""
        ...

    @property
    def id(self) -> bytes:
        """16 bytes that name the space."""
        ...

    @property
    def closed(self) -> bool:
        """Whether the host memory was closed on this side: leases ended, calls raise `ClosedError`."""
        ...

    @property
    def capacity(self) -> int:
        """No slot has this number or a higher one; it stays the same."""
        ...

    @property
    def device_delta(self) -> int:
        """What to add to `addresses` on a GPU, bytes; it stays the same once a slot is readable in place."""
        ...

    def for_steps(self) -> SpaceCalls:
        """The same for an engine's steps: a call finds and keeps nothing where another would raise for it."""
        ...

    def addresses(self, slots: Ids) -> npt.NDArray[np.int64]:
        """Addresses of slots in this process, int64 [n]: the same for as long as any slot is held."""
        ...

    def slots_at(self, addresses: npt.NDArray[np.int64]) -> Ids:
        """The inverse of `addresses`, for slots that are held; tags in the low seven bits are ignored."""
        ...

    def readable_in_place(self, slots: Ids) -> npt.NDArray[np.bool_]:
        """bool [n]: which slots attention may read where they lie. It does not become less."""
        ...

    def count_resident(self, hashes: Sequence[bytes]) -> int | None:
        """How many leading blocks are resident; None where a sidecar does not say. It is no use of them."""
        ...

    def match(
        self,
        hashes: Sequence[bytes] | None = None,
        *,
        tokens: Tokens | None = None,
        chain: bytes | None = None,
        cold_deadline: float | None = None,
        start: ChainPlace | None = CHAIN_START,
    ) -> Lease:
        """Lease the leading blocks that are resident; with `cold_deadline` count what cold has after them.

        `start`: where in their chain they begin, here and elsewhere; None: that is not known.
        """
        ...

    def lease(self, slots: Ids, generations: Generations, *, used: bool = False) -> npt.NDArray[np.bool_]:
        """Lease remembered slots: bool [n], False where a slot was granted again since. `used`: that is a
        use of them."""
        ...

    def reserve(
        self, hashes: Sequence[bytes], *, wait: float = 0.0, lineage: Lineage | None = None
    ) -> Reservation:
        """Slots to write blocks into; waits `wait` seconds for room. `lineage`: what is known of theirs."""
        ...

    def reserve_named(
        self, hashes: Sequence[bytes], *, wait: float = 0.0, lineage: Lineage | None = None
    ) -> Reservation:
        """`reserve` that trusts its arguments."""
        ...

    def put(
        self,
        hashes: Sequence[bytes],
        blocks: npt.NDArray[np.uint8],
        *,
        wait: float = 0.0,
        lineage: Lineage | None = None,
    ) -> int:
        """Copy blocks in, uint8 [n, block_bytes]; how many are resident then, or written by another."""
        ...

    def get(self, hashes: Sequence[bytes], out: npt.NDArray[np.uint8]) -> int:
        """Copy the leading resident blocks out, uint8 [n, block_bytes]; returns how many."""
        ...

    def pin(self, hashes: Sequence[bytes], *, ttl: float | None = None) -> int:
        """Keep the leading resident blocks until `unpin`, or for `ttl` seconds; returns how many."""
        ...

    def hint(self, hashes: Sequence[bytes], *, wanted: bool, retention: Retention | None = None) -> int:
        """Advice: blocks will be wanted soon, or not again; for how many it is tried."""
        ...

    def unpin(self, hashes: Sequence[bytes]) -> int:
        """End a pin; returns how many of the blocks were pinned."""
        ...

    def evict(self, count: int) -> int:
        """Let go of up to `count` blocks that nobody holds, coldest first, copied to the cold tier or not;
        returns how many went."""
        ...

    def room_may_come(self, held: int) -> bool:
        """Whether waiting for slots may help; `held`: how many different ones the caller has leased."""
        ...

    def load(
        self, hashes: Sequence[bytes], deadline: float, *, start: ChainPlace | None = CHAIN_START
    ) -> Lease:
        """Bring blocks up from the cold tier; lease the leading ones that are there by the deadline."""
        ...

    def start_load(self, hashes: Sequence[bytes], *, start: ChainPlace | None = CHAIN_START) -> LoadCalls:
        """Start bringing up from the cold tier what it has of the leading blocks; returns at once."""
        ...

    def put_note(self, name: bytes, value: bytes, deadline: float | None = None) -> bool:
        """Keep a small named record in the cold tier; False where it was not kept."""
        ...

    def get_note(self, name: bytes, deadline: float | None = None) -> bytes | None:
        """A named record from the cold tier, or None."""
        ...


@runtime_checkable
class CostCalls(Protocol):
    """A space whose policies reckon with what its blocks cost: one of this process."""

    def tell_costs(self, costs: CostModel) -> None:
        """What loading and computing its blocks takes, as far as an engine knows it."""
        ...


class EngineCommand(Protocol):
    """A command of an operator, to be answered once, from any thread."""

    @property
    def kind(self) -> CommandKind:
        """What is to be done."""
        ...

    @property
    def session(self) -> str:
        """The id of the session that it is to be done with."""
        ...

    @property
    def hashes(self) -> Sequence[bytes]:
        """The blocks of the session that it is about; none: all."""
        ...

    def done(self, count: int = 0) -> None:
        """It was done, to so many blocks."""
        ...

    def refuse(self, why: str) -> None:
        """It will not be done."""
        ...


@runtime_checkable
class ControlCalls(Protocol):
    """Host memory through which operators reach this engine: a sidecar's."""

    def report(self, report: EngineReport) -> None:
        """Say how this engine is. Does not wait; the last report is the one that is kept."""
        ...

    def on_command(self, listener: Callable[[EngineCommand], object]) -> Callable[[], None]:
        """Call `listener` with every command, in a thread that must not be held up; returns how to end it."""
        ...


class HostCalls(Protocol):
    """Host memory and the cold tier behind it, in this process or in a sidecar."""

    @property
    def device(self) -> str | None:
        """The GPU (``cuda:N``) that its memory is mapped for, or None."""
        ...

    @property
    def in_place(self) -> bool:
        """Whether its memory is in this process; of a sidecar that is reached over TCP it is not."""
        ...

    def space(self, layout: KVLayout, *, shard: str = "") -> SpaceCalls:
        """The space of a layout and shard; the same for equal ones."""
        ...

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with every later event; returns how to end it."""
        ...

    def subscribe_lost(self, listener: LostListener) -> Callable[[], None]:
        """Call `listener`, in any thread, with leases whose slots may hold other blocks by now; it only
        takes note, and makes no call of the host memory.

        Returns:
            how to end it.
        """
        ...

    def flush(self, deadline: float = 30.0) -> int:
        """Write what has no copy in the cold tier there; how many blocks still have none."""
        ...

    def close(self, *, drain: float = 0.0) -> None:
        """Use it no more. Idempotent. Of a sidecar this ends the connection, and nothing in the sidecar."""
        ...
