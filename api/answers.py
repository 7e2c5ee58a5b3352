"""What the sidecar does at each request: a message in, a message out, or work that another thread does first.

`Answers` belongs to one connection and is used from the loop's thread. What is quick is done there and then.
What may wait (for the cold tier, for room) or is long (many bytes, very many blocks) is returned as a `Job`:
its `work` runs in a thread and touches the store only; its `finish` runs on the loop again and writes down
what the client group holds from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, fields, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .. import __version__
from ..kvstore.cost import CostModel
from ..kvstore.handles import Generations, Lease, Reservation, ReserveStatus
from ..kvstore.hashing import space_id
from ..kvstore.lineage import ChainPlace, Lineage, expect_lineage, expect_place
from ..kvstore.loading import ColdLoad
from ..kvstore.policy import Ids, Retention
from ..kvstore.space import HostSpace
from ..kvstore.tenants import check_tenant
from ..tiers.cold import ColdStatus
from ..tiers.errors import (
    AccessDeniedError,
    CapacityError,
    ColdTierUnavailableError,
    ConfigError,
    KVPagerError,
    LayoutError,
    NotInPlaceError,
    ServiceUnavailableError,
    StaleHandleError,
)
from ..tiers.layout import KVLayout
from ..tiers.settings import expect_seconds, expect_text
from .claims import Claims
from .commands import Engine
from .groups import UNNAMED, Group
from .messages import (
    Abort,
    Blocks,
    CommandDone,
    Commit,
    Count,
    CountResident,
    Done,
    Evict,
    Flush,
    Get,
    GetNote,
    GetStats,
    Hint,
    Leased,
    LeaseSlots,
    Load,
    Marks,
    Match,
    MayHaveRoom,
    Message,
    Note,
    OpenSpace,
    Pin,
    Purge,
    PurgeTenant,
    Put,
    PutNote,
    Reassert,
    Release,
    Report,
    Reserve,
    Reserved,
    Stats,
    Subscribe,
    Unpin,
)
from .operator_answers import OperatorAnswers
from .purges import Purges
from .service import Job, Service, seconds_of
from .space_book import SpaceBook

__all__ = ["Answers", "request_bytes"]

_QUICK_BLOCKS: Final = 1 << 14
"""More blocks than these in one request are another thread's work."""
_QUICK_BYTES: Final = 256 << 10
"""So are more bytes of blocks than these."""
_MOST_SPACES: Final = 256
"""Spaces of a sidecar; each has records of all the slots that it might have."""
_MOST_SLOTS: Final = 1 << 24
"""Slots of a space: an arena in blocks of a few bytes would be all records."""
_MOST_TEXT: Final = 256
_REPLY_BYTES: Final = 64
"""What a frame with one byte string has around it, at most."""
_NEW: Final = int(ReserveStatus.NEW)
_ADVICE: Final = frozenset(one.name for one in fields(Retention))


def request_bytes(message: Message) -> int:
    """About how many bytes a request keeps in memory while it is worked on; a `Get` its reply's, too."""
    size = 64
    for value in vars(message).values():
        if isinstance(value, bytes):
            size += len(value)
        elif isinstance(value, tuple):
            size += 64 * len(value)
        elif isinstance(value, np.ndarray):
            size += value.nbytes
    return size


class Answers:
    """Answers the requests of one connection.

    Args:
        service: what connections share.
        group: the client group that this one is of.
        client: which client of the group.
        subscribe: has events sent to this connection, or no more.
        counts: further numbers for `Stats`.
        tenants: those whose spaces it may open; None: all.
        engine: the connection, as commands know it.

    Over TCP (the group is of no user of this machine) a client has no memory to write to: what it reserved is
    committed by the `Put` that brings its bytes, and by nothing else.
    """

    def __init__(
        self,
        service: Service,
        group: Group,
        client: bytes,
        subscribe: Callable[[bool], None],
        counts: Callable[[], dict[str, int]],
        tenants: Collection[str] | None,
        engine: Engine,
    ) -> None:
        self._service = service
        self._host = service.host
        self._group = group
        self._client = client
        self._subscribe = subscribe
        self._counts = counts
        self._tenants = tenants
        self._engine = engine
        self._spaces = SpaceBook()
        self._handlers: dict[type[Message], Callable[[Any], Message | Job]] = {
            OpenSpace: self._open_space,
            Match: self._match,
            Load: self._load,
            LeaseSlots: self._lease_slots,
            Release: self._release,
            Reassert: self._reassert,
            Reserve: self._reserve,
            Commit: self._commit,
            Abort: self._abort,
            Pin: self._pin,
            Unpin: self._unpin,
            Hint: self._hint,
            Evict: self._evict,
            MayHaveRoom: self._may_have_room,
            CountResident: self._count_resident,
            PutNote: self._put_note,
            GetNote: self._get_note,
            Put: self._put,
            Get: self._get,
            GetStats: self._get_stats,
            Subscribe: self._change_subscription,
            Flush: self._flush,
            Purge: self._purge,
            PurgeTenant: self._purge_tenant,
            Report: self._report,
            CommandDone: self._command_done,
            **OperatorAnswers(service, self._spaces, is_operator=tenants is None).handlers(),
        }

    def understands(self, message: Message) -> bool:
        """Whether this is a request that may be sent after the handshake."""
        return type(message) in self._handlers

    def answer(self, message: Message) -> Message | Job:
        """The reply to a request, or the work that must be done for it.

        Raises:
            KVPagerError: why it is not done.
        """
        return self._handlers[type(message)](message)

    def reply_bytes(self, message: Message) -> int:
        """Bytes of the reply, where it may be long."""
        if type(message) is not Get or not 0 <= message.space < len(self._spaces):
            return 0
        return self._fitting(self._spaces.space(message.space), len(message.hashes))

    # Spaces

    def _open_space(self, asked: OpenSpace) -> Message:
        shard, tenant = _short("shard", asked.shard), check_tenant("tenant", asked.tenant)
        self._refuse_other_tenants(tenant)
        _short("format", asked.format)
        layout = KVLayout(
            asked.num_layers,
            asked.num_kv_heads,
            asked.head_dim,
            asked.block_size,
            asked.dtype,
            asked.format,
            planes=asked.planes,
            window=asked.window or None,
            scale_bytes=asked.scale_bytes,
        )
        arena, service = self._host.arena, self._service
        slots = arena.extent_bytes // layout.block_bytes * arena.num_extents
        if slots > _MOST_SLOTS:
            raise ConfigError(
                "block_size",
                f"blocks of {layout.block_bytes} bytes are {slots} slots, {_MOST_SLOTS} are taken",
            )
        name = space_id(layout, shard, tenant)
        if name not in service.spaces and len(service.spaces) >= _MOST_SPACES:
            raise CapacityError(f"the sidecar has {_MOST_SPACES} spaces, and takes no more")
        space = self._host.space(layout, shard=shard, tenant=tenant)
        service.spaces.add(name)
        return self._spaces.opened(space)

    def _refuse_other_tenants(self, tenant: str) -> None:
        if self._tenants is not None and tenant not in self._tenants:
            raise AccessDeniedError(f"the token is not one of tenant {tenant!r}")

    # Leases

    def _match(self, asked: Match) -> Message | Job:
        space, wait = self._spaces.space(asked.space), seconds_of("deadline", asked.deadline)
        hashes, start = asked.hashes, _start(asked)
        asks_cold = wait > 0 and self._host.cold is not None
        if not asks_cold and len(hashes) <= _QUICK_BLOCKS:
            return self._leased(space.match_named(hashes, None, start))
        return Job(
            asks_cold,
            lambda: space.match_named(hashes, wait if asks_cold else None, start),
            self._leased,
            Lease.release,
        )

    def _load(self, asked: Load) -> Message | Job:
        space, wait = self._spaces.space(asked.space), seconds_of("deadline", asked.deadline)
        start = _start(asked)
        self._refuse_if_draining()

        def work() -> tuple[Lease, ColdLoad]:
            load = space.start_load(asked.hashes, start=start)
            try:
                load.wait(wait)
                if asked.ahead:
                    return space.lease_resident(asked.hashes), load
                return space.lease_loaded(load, asked.hashes, start), load
            finally:
                load.release()

        def finish(found: tuple[Lease, ColdLoad]) -> Message:
            lease, load = found
            leased = self._leased(lease)
            return replace(leased, loaded=min(load.loaded, len(lease)), seconds=load.seconds)

        return Job(True, work, finish, lambda found: found[0].release())

    def _leased(self, lease: Lease) -> Leased:
        space = lease.space
        if not isinstance(space, HostSpace):
            raise TypeError("a lease of a HostStore is of a HostSpace")
        self._claims_or(space, lease.release).add_leases(lease.slots, lease.generations)
        return Leased(lease.slots, lease.generations, lease.cold)

    def _lease_slots(self, asked: LeaseSlots) -> Message:
        space = self._spaces.space(asked.space)
        claims = self._claims(space)
        slots, generations = _handles(asked.slots, asked.generations)
        good = claims.existing(slots)
        good[good] = space.lease(slots[good], generations[good], used=asked.used)
        claims.add_leases(slots[good], generations[good])
        return Marks(good)

    def _release(self, asked: Release) -> Message | Job:
        space = self._spaces.space(asked.space)
        # The group's books say that they are leased: the store need not look, too.
        end = lambda slots, _: space.end_leases(slots)  # noqa: E731
        return self._end("release", self._group.take_leases, end, space, asked)

    def _reassert(self, asked: Reassert) -> Message:
        space = self._spaces.space(asked.space)
        if self._client == UNNAMED:
            raise ConfigError(
                "client", "a client that re-asserts must have said in its Hello which one it is"
            )
        return Marks(self._claims(space).agree(asked.slots, asked.generations, asked.counts))

    # Reservations

    def _reserve(self, asked: Reserve) -> Message | Job:
        space, wait = self._spaces.space(asked.space), seconds_of("wait", asked.wait)
        lineage = _lineage(asked)
        self._refuse_if_draining()
        if len(asked.hashes) <= _QUICK_BLOCKS:
            # Mostly there is room, and no thread is needed.
            reserve = space.reserve_at_once if wait else space.reserve
            done = reserve(asked.hashes, lineage=lineage)
            if done is not None:
                return self._reserved(done)
        return Job(
            wait > 0,
            lambda: space.reserve(asked.hashes, wait=wait, lineage=lineage),
            self._reserved,
            Reservation.abort,
        )

    def _reserved(self, reservation: Reservation) -> Message:
        space = reservation.space
        if not isinstance(space, HostSpace):
            raise TypeError("a reservation of a HostStore is of a HostSpace")
        new = reservation.status == _NEW
        self._claims_or(space, reservation.abort).add_reservations(
            reservation.slots[new], reservation.generations[new]
        )
        return Reserved(reservation.status, reservation.slots, reservation.generations)

    def _commit(self, asked: Commit) -> Message | Job:
        space = self._spaces.space(asked.space)
        if self._group.uid is None:
            # It was never written: what lies there was somebody else's.
            raise NotInPlaceError("over TCP blocks are written and committed by Put")
        return self._end("commit", self._group.take_reservations, space.commit, space, asked)

    def _abort(self, asked: Abort) -> Message | Job:
        space = self._spaces.space(asked.space)
        return self._end("abort", self._group.take_reservations, space.abort, space, asked)

    def _end(
        self,
        what: str,
        take: Callable[[HostSpace, bytes, Ids, Generations], Any],
        end: Callable[[Ids, Generations], None],
        space: HostSpace,
        asked: Release | Commit | Abort,
    ) -> Message | Job:
        """End what the group holds of these handles; then, if it did not hold all of them, say so.

        It is the group's no longer before the store is told: whatever comes after it is refused.
        """
        slots, generations = _handles(asked.slots, asked.generations)
        good = take(space, self._client, slots, generations)
        whole = np.count_nonzero(good) == len(good)
        mine, named = (slots, generations) if whole else (slots[good], generations[good])

        def finish(_: object) -> Message:
            if whole:
                return Done()
            stale = slots[~good]
            raise StaleHandleError(
                f"{what} refused for {len(stale)} slots, {stale.tolist()[:8]} and so on: "
                "granted again, or not held by this client group"
            )

        if len(mine) > _QUICK_BLOCKS:
            return Job(False, lambda: end(mine, named), finish, instead=lambda: end(mine, named))
        if len(mine):
            end(mine, named)
        return finish(None)

    def _claims(self, space: HostSpace) -> Claims:
        return self._group.claims(space, self._client)

    def _claims_or(self, space: HostSpace, give_back: Callable[[], object]) -> Claims:
        """The group's claims, to write down what was just got; if that cannot be, this is given back."""
        try:
            return self._claims(space)
        except KVPagerError:  # the group has ended, or there is no room to write it down
            give_back()
            raise

    def _refuse_if_draining(self) -> None:
        if self._service.stopping:
            raise ServiceUnavailableError("the sidecar is being stopped, it takes no more blocks")
        if self._service.drained_since is not None:
            raise ServiceUnavailableError("the sidecar is being drained, it takes no more blocks")

    # Keeping and losing blocks

    def _pin(self, asked: Pin) -> Message | Job:
        space = self._spaces.space(asked.space)
        ttl = expect_seconds("ttl", asked.ttl) or None
        return _counted(len(asked.hashes), lambda: space.pin(asked.hashes, ttl=ttl))

    def _hint(self, asked: Hint) -> Message | Job:
        space = self._spaces.space(asked.space)
        if asked.wanted:
            self._refuse_if_draining()
        # What later clients add is passed over.
        given = {name: value for name, value in asked.retention.items() if name in _ADVICE}
        advice = Retention(**given) if given else None
        return _counted(
            len(asked.hashes), lambda: space.hint(asked.hashes, wanted=asked.wanted, retention=advice)
        )

    def _unpin(self, asked: Unpin) -> Message | Job:
        space = self._spaces.space(asked.space)
        return _counted(len(asked.hashes), lambda: space.unpin(asked.hashes))

    def _may_have_room(self, asked: MayHaveRoom) -> Message:
        return Count(int(self._spaces.space(asked.space).room_may_come(asked.held)))

    def _count_resident(self, asked: CountResident) -> Message | Job:
        space = self._spaces.space(asked.space)
        return _counted(len(asked.hashes), lambda: space.count_resident(asked.hashes))

    def _evict(self, asked: Evict) -> Message | Job:
        space = self._spaces.space(asked.space)
        return _counted(asked.count, lambda: space.evict(min(asked.count, space.capacity)))

    def _purge(self, asked: Purge) -> Message | Job:
        space, wait = self._spaces.space(asked.space), seconds_of("deadline", asked.deadline)
        notes = [asked.note] if asked.note else []
        return Job(True, *self._purges.of_space(space, asked.hashes, notes, wait))

    def _purge_tenant(self, asked: PurgeTenant) -> Message | Job:
        tenant = check_tenant("tenant", asked.tenant)
        self._refuse_other_tenants(tenant)
        return Job(True, *self._purges.of_tenant(tenant, seconds_of("deadline", asked.deadline)))

    @property
    def _purges(self) -> Purges:
        purges = self._service.purges
        if purges is None:
            raise ServiceUnavailableError("the sidecar is not started yet")
        return purges

    # Reports and commands

    def _report(self, asked: Report) -> Message:
        self._service.engines.keep(self._engine, asked)
        space = self._spaces.find(asked.space)
        if space is not None and asked.costs:
            space.tell_costs(CostModel.of_map(asked.costs))
        return Done()

    def _command_done(self, asked: CommandDone) -> Message:
        self._service.engines.done(self._engine, asked)
        return Done()

    # Bytes

    def _put(self, asked: Put) -> Message | Job:
        """Blocks that the group has reserved go to their slots; for the others there is room made now."""
        space, wait = self._spaces.space(asked.space), seconds_of("wait", asked.wait)
        size, hashes = space.layout.block_bytes, asked.hashes
        if len(asked.data) != size * len(hashes):
            raise LayoutError(
                f"{len(hashes)} blocks of {size} bytes were to come, and {len(asked.data)} bytes came"
            )
        lineage = expect_lineage(_lineage(asked), len(hashes))
        blocks = np.frombuffer(asked.data, dtype=np.uint8).reshape(len(hashes), size)
        at, slots, generations = space.reserved(hashes) if self._group.reserved else _nothing_reserved()
        if len(at) < len(hashes):
            self._refuse_if_draining()
        if len(at):
            good = self._group.take_reservations(space, self._client, slots, generations)
            at, slots, generations = at[good], slots[good], generations[good]
        if lineage is not None and len(at):
            space.learn(slots, lineage.take(at))
        status = np.full(len(at), _NEW, dtype=np.uint8)
        mine = Reservation(space, [hashes[one] for one in at.tolist()], status, slots, generations)

        def work() -> int:
            if not len(at):
                return space.put(hashes, blocks, wait=wait, lineage=lineage)
            rest = np.setdiff1d(np.arange(len(hashes)), at)
            with mine:
                space.write_blocks(mine, blocks if not len(rest) else blocks[at])
                mine.commit()
            if not len(rest):
                return len(at)
            of_rest = None if lineage is None else lineage.take(rest)
            others = [hashes[one] for one in rest.tolist()]
            return len(at) + space.put(others, blocks[rest], wait=wait, lineage=of_rest)

        if wait or len(asked.data) > _QUICK_BYTES or len(hashes) > _QUICK_BLOCKS:
            return Job(wait > 0, work, Count, instead=mine.abort if len(at) else None)
        return Count(work())

    def _get(self, asked: Get) -> Message | Job:
        space = self._spaces.space(asked.space)
        size = space.layout.block_bytes
        count = self._fitting(space, len(asked.hashes)) // size
        if not asked.hashes:
            return Blocks(b"")
        if not count:
            raise CapacityError(f"a block of {size} bytes is longer than the largest frame")

        def work() -> bytes:
            out = np.empty((count, size), dtype=np.uint8)
            return out[: space.get(asked.hashes[:count], out)].tobytes()

        if count * size > _QUICK_BYTES:
            return Job(False, work, Blocks)
        return Blocks(work())

    def _fitting(self, space: HostSpace, count: int) -> int:
        """Bytes of up to `count` blocks, as many as one frame holds."""
        size = space.layout.block_bytes
        return min(count, (self._service.max_frame - _REPLY_BYTES) // size) * size

    # Notes, counters, events

    def _put_note(self, asked: PutNote) -> Message | Job:
        space, wait = self._spaces.space(asked.space), seconds_of("deadline", asked.deadline)
        return Job(True, lambda: int(space.put_note(asked.name, asked.value, wait)), Count)

    def _get_note(self, asked: GetNote) -> Message | Job:
        space, wait = self._spaces.space(asked.space), seconds_of("deadline", asked.deadline)

        def finish(read: tuple[ColdStatus, bytes]) -> Message:
            status, value = read
            if status in (ColdStatus.LATE, ColdStatus.UNAVAILABLE):
                raise ColdTierUnavailableError("the cold tier did not say whether it has the record")
            return Note(status == ColdStatus.OK, value)

        return Job(True, lambda: space.read_note(asked.name, wait), finish)

    def _get_stats(self, asked: GetStats) -> Message:
        values: dict[str, Any] = {
            "host": self._host.stats.snapshot(),
            "arena": asdict(self._host.arena.stats()),
            "sidecar": {**asdict(self._service.counters), **self._counts(), "version": __version__},
            "tenants": {
                name: values
                for name, values in self._host.tenants().items()
                if self._tenants is None or name in self._tenants
            },
        }
        if self._tenants is None:
            values["latency"] = self._service.times.snapshot()
            values["engines"] = dict(self._service.engines.counts)
        cold = self._host.cold
        counted = getattr(cold, "stats", None)
        if cold is not None and counted is not None:
            sizes = {"used_bytes": cold.used_bytes(), "capacity_bytes": cold.capacity_bytes()}
            known = {name: size for name, size in sizes.items() if size is not None}
            values["cold"] = {**asdict(counted), **known}
        return Stats(values)

    def _change_subscription(self, asked: Subscribe) -> Message:
        self._subscribe(asked.on)
        return Done()

    def _flush(self, asked: Flush) -> Message | Job:
        wait = seconds_of("deadline", asked.deadline)
        return Job(True, lambda: self._host.flush(wait), Count)


def _nothing_reserved() -> tuple[npt.NDArray[np.int64], Ids, Generations]:
    return np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int64)


def _start(asked: Match | Load) -> ChainPlace | None:
    """Where in their chain the hashes begin; None where the client does not say."""
    if not asked.depth:
        return None
    return expect_place(ChainPlace(asked.before, asked.depth), len(asked.hashes))


def _lineage(asked: Reserve | Put) -> Lineage | None:
    """What the client knows of the blocks' chains; None where it does not say."""
    return Lineage(asked.parents, asked.depths) if asked.parents or len(asked.depths) else None


def _counted(blocks: int, work: Callable[[], int]) -> Message | Job:
    return Job(False, work, Count) if blocks > _QUICK_BLOCKS else Count(work())


def _short(what: str, value: str) -> str:
    if len(expect_text(what, value, empty=True)) > _MOST_TEXT:
        raise ConfigError(what, f"must be {_MOST_TEXT} characters at most, got {len(value)}")
    return value


def _handles(slots: Ids, generations: Generations) -> tuple[Ids, Generations]:
    if len(slots) != len(generations):
        raise ConfigError(
            "generations", f"must be one for each of {len(slots)} slots, got {len(generations)}"
        )
    return slots, generations
