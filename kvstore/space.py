"""HostSpace: one layout and shard in host memory, with the cold tier behind it.

What its slots hold is written down in `SlotRecords`; here is what needs more than that: the lock, the bytes,
room that is waited for, and the copies to and from the cold tier.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import Final, NoReturn

import numpy as np
import numpy.typing as npt

from ..tiers.cold import ColdStatus, ColdTier
from ..tiers.errors import ConfigError, QuotaError, StaleHandleError
from ..tiers.layout import KVLayout
from ..tiers.record import NOTE_SPACE
from ..tiers.record_file import Section
from ..tiers.settings import (
    expect_array,
    expect_byte_strings,
    expect_bytes,
    expect_flag,
    expect_integer,
    expect_seconds,
    expect_type,
)
from .cold_writes import ColdWrites
from .cost import CostModel
from .events import EventKind
from .evicting import SpaceEvictions
from .handles import Generations, Lease, Reservation, ReserveStatus
from .hashing import HASH_BYTES, Tokens, hash_blocks, notes_id, space_id
from .lineage import (
    CHAIN_START,
    NO_PARENT,
    Ancestors,
    ChainPlace,
    Lineage,
    expect_lineage,
    expect_place,
    short_hashes,
    shortened,
)
from .loading import ColdLoad
from .policy import EvictionPolicy, Ids, Losses, Retention, expect_retention
from .purging import HeldSlots, PurgeReport, SpacePurges
from .room import SpaceRoom
from .shared import HostShared
from .slot_looks import SlotCounts
from .slot_space import SlotSpace
from .slots import SlotRecords
from .status import SpaceStatus
from .timed_pins import TimedPin, TimedPins

__all__ = ["HostSpace"]

_log = logging.getLogger(__name__)

_INT32: Final = np.dtype(np.int32)
_INT64: Final = np.dtype(np.int64)
# Plain numbers: a member looked up on its class costs as much as comparing an array to it.
_NEW: Final = int(ReserveStatus.NEW)
_PRESENT: Final = int(ReserveStatus.PRESENT)

_ROOM_POLL_SECONDS: Final = 0.02
_MOST_HINTS: Final = 64
"""Loads ahead that may be under way; what is hinted at beyond them is not loaded."""


class HostSpace(SlotSpace):
    """One layout and shard in a `HostStore`. Open it with `HostStore.space`; call it from any thread.

    Calls raise `ClosedError` once the store is closed; its leases ended then. Arguments of a wrong type or
    out of range raise `ConfigError`; of arrays the type is looked at, not every value.

    Args:
        shared: what it shares with the other spaces.
        layout: how a block lies in memory.
        shard: the layers and heads it is of.
        tenant: whose it is.
        records: its slots.
    """

    def __init__(
        self, shared: HostShared, layout: KVLayout, shard: str, tenant: str, records: SlotRecords
    ) -> None:
        super().__init__(layout, shared.arena.extent_bytes, shared.arena.num_extents)
        self.shard = shard
        self.tenant = tenant
        self.id = space_id(layout, shard, tenant)
        self._shared = shared
        self._records = records
        self._tenant = shared.tenant(tenant)
        self._room = SpaceRoom(shared, records, self.id, self._tenant, layout.block_bytes)
        self._tenant.join(self._room)
        shared.join(self._room)
        self._timed = TimedPins()
        self._notes = notes_id(self.id) if tenant else NOTE_SPACE
        self._purges = SpacePurges(shared, records, self.id, self._notes, layout.block_bytes, self._tenant)
        self._writes = ColdWrites(shared, records, self.id, layout.block_bytes, self.view, self._purges)
        self.evictions = SpaceEvictions(shared, records, self._room, self._writes, self.id)
        """What operators have go of it."""

    # Where slots are

    @property
    def closed(self) -> bool:
        """Whether the store is closed."""
        return self._shared.closed

    @property
    def extents(self) -> AbstractSet[int]:
        """The extents of the arena that it has."""
        return self._records.extents

    @property
    def resident(self) -> int:
        """Committed blocks."""
        return len(self._records.index)

    @property
    def dirty(self) -> int:
        """Committed blocks that have no copy in the cold tier."""
        return self._records.dirty

    @property
    def cleaning(self) -> int:
        """Blocks that are being copied to the cold tier just now."""
        return self._records.cleaning

    @property
    def device_delta(self) -> int:
        """What to add to `addresses` on a GPU, bytes; known once a slot is `readable_in_place`."""
        return self._shared.arena.device_delta

    def readable_in_place(self, slots: Ids) -> npt.NDArray[np.bool_]:
        """Whether attention may read these slots where they lie: page-locked, or no GPU is in play."""
        self._shared.check_open()
        slots = expect_array("slots", slots, _INT32)
        if self._shared.device is None:
            return np.ones(len(slots), dtype=np.bool_)
        return self._shared.arena.is_page_locked(slots // self.slots_per_extent)

    def for_steps(self) -> HostSpace:
        """This space: what is in this process answers. Steps call `reserve_named`, which a quota denies."""
        return self

    # Finding blocks

    def match(
        self,
        hashes: Sequence[bytes] | None = None,
        *,
        tokens: Tokens | None = None,
        chain: bytes | None = None,
        cold_deadline: float | None = None,
        start: ChainPlace | None = CHAIN_START,
    ) -> Lease:
        """Lease the leading blocks that are resident.

        Args:
            hashes: prefix hashes in order; or give
            tokens: token ids, hashed here from
            chain: the root of their chain (`ChainIdentity.root`).
            cold_deadline: seconds to spend on asking how many of the following blocks the cold tier
                seems to have; None asks nothing.
            start: where in their chain the hashes begin, which `lineage` tells of from then on; None: that is
                not known, or they do not follow each other.

        Raises:
            ConfigError: neither hashes, nor tokens and chain, or both.
        """
        if hashes is None and tokens is not None and chain is not None:
            hashes = hash_blocks(tokens, self.layout.block_size, expect_bytes("chain", chain, HASH_BYTES))
        elif hashes is None or tokens is not None or chain is not None:
            raise ConfigError("hashes", "give these, or tokens and the root of their chain")
        else:
            hashes = expect_byte_strings("hashes", hashes, HASH_BYTES)
        if cold_deadline is not None:
            cold_deadline = expect_seconds("cold_deadline", cold_deadline)
        return self.match_named(hashes, cold_deadline, expect_place(start, len(hashes)))

    def match_named(
        self,
        hashes: Sequence[bytes],
        cold_deadline: float | None = None,
        start: ChainPlace | None = CHAIN_START,
    ) -> Lease:
        """`match` that trusts its arguments: for names that were looked at already."""
        shared = self._shared
        with shared.lock():
            shared.check_open()
            slots = self._records.resident(hashes)
            self._records.looked_up(slots, hashes, start)
            lease = self._leased(slots)
            found = len(slots)
            shared.stats.matched += found
            shared.stats.matched_tokens += found * self.layout.block_size
            shared.stats.missed += len(hashes) - found
            self._tenant.stats.matched += found
            self._tenant.stats.missed += len(hashes) - found
            if shared.trace is not None:
                shared.trace.matched(self.id, self.layout, hashes, found, start)
        if cold_deadline is not None and found < len(hashes):
            with shared.cold.use() as cold:
                if cold is not None:
                    lease.cold = self.count_in_cold(cold, hashes[found:], cold_deadline)
        return lease

    def count_resident(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks are resident. Not counted as hits and misses."""
        hashes = expect_byte_strings("hashes", hashes, HASH_BYTES)
        with self._shared.lock():
            self._shared.check_open()
            return len(self._records.resident(hashes))

    def lease_resident(self, hashes: Sequence[bytes]) -> Lease:
        """`match` that does not count hits and misses."""
        hashes = expect_byte_strings("hashes", hashes, HASH_BYTES)
        with self._shared.lock():
            self._shared.check_open()
            return self._leased(self._records.resident(hashes))

    def lease(self, slots: Ids, generations: Generations, *, used: bool = False) -> npt.NDArray[np.bool_]:
        """Lease remembered slots, each once.

        Args:
            used: this is a use of the blocks, which are in the order of their chain, as a match would be:
                the policy is told.

        Returns:
            bool [n], False where a slot was granted to another block since, or was named before.
        """
        slots, generations = _handles(slots, generations)
        with self._shared.lock():
            self._shared.check_open()
            good = self._records.committed(slots, generations)
            if used:
                self._records.used(slots[good])
            self._records.take_leases(slots[good])
            return good

    def release(self, slots: Ids, generations: Generations) -> None:
        """End leases; of blocks that become evictable together, later ones are evicted sooner.

        Raises:
            StaleHandleError: a slot is not leased under this generation; the others are released.
        """
        slots, generations = _handles(slots, generations)
        with self._shared.lock():
            self._shared.check_open()
            good = self._records.leased(slots, generations)
            whole = np.count_nonzero(good) == len(good)
            self._drop_leases(slots if whole else slots[good])
            if not whole:
                self._refuse("release", slots[~good])

    def end_leases(self, slots: Ids) -> None:
        """`release` that trusts its arguments: for whoever keeps books of leases, no slot twice."""
        with self._shared.lock():
            self._shared.check_open()
            self._drop_leases(slots)

    # Chains

    def lineage(self, hashes: Sequence[bytes]) -> Lineage:
        """What is known of the chains that these blocks are of; nothing of those that are not resident.

        A parent is told by its hash if it is resident, or among `hashes`.
        """
        hashes = expect_byte_strings("hashes", hashes, HASH_BYTES)
        records = self._records
        names = dict(zip(shortened(hashes).tolist(), hashes, strict=True))
        resident = None
        with self._shared.lock():
            self._shared.check_open()
            there, slots = self._resident_of(hashes)
            short, known = records.lineage.of(slots)
            if not names.keys() >= set(short.tolist()) - {0}:
                resident = records.hashes_of(records.committed_slots)
        if resident is not None:
            resident = resident[np.isin(short_hashes(resident), short)]
            names |= zip(short_hashes(resident).tolist(), resident.tolist(), strict=True)
        names[0] = NO_PARENT
        parents = [NO_PARENT] * len(hashes)
        for at, parent in zip(there.tolist(), short.tolist(), strict=True):
            parents[at] = names.get(parent, NO_PARENT)
        depths = np.zeros(len(hashes), dtype=np.int32)
        depths[there] = known
        return Lineage(parents, depths)

    def chain_of(self, name: bytes) -> list[bytes]:
        """The blocks from the first of a chain to the one of this hash, as far back as they are resident.

        None where that one is not. All blocks are looked at, most of the time without the lock.
        """
        expect_bytes("name", name, HASH_BYTES)
        records = self._records
        with self._shared.lock():
            self._shared.check_open()
            _, slots = self._resident_of([name])
            resident = records.committed_slots
            ancestors = Ancestors(records.hashes_of(resident), *records.lineage.of(resident))
        return ancestors.chain(int(np.searchsorted(resident, slots[0]))) if len(slots) else []

    def hits(self, hashes: Sequence[bytes]) -> npt.NDArray[np.uint32]:
        """How often matches found these blocks since they came, uint32 [n]; 0 for those that are not here."""
        hashes = expect_byte_strings("hashes", hashes, HASH_BYTES)
        hits = np.zeros(len(hashes), dtype=np.uint32)
        with self._shared.lock():
            self._shared.check_open()
            there, slots = self._resident_of(hashes)
            hits[there] = self._records.lineage.hits(slots)
        return hits

    def learn(self, slots: Ids, lineage: Lineage) -> None:
        """What these slots hold is of this lineage, as far as no other is known of it.

        Trusts its arguments: for whoever has the slots leased or reserved.
        """
        with self._shared.lock():
            self._shared.check_open()
            self._records.lineage.learn(slots.astype(np.intp), lineage)

    # Writing blocks

    def reserve(
        self, hashes: Sequence[bytes], *, wait: float = 0.0, lineage: Lineage | None = None
    ) -> Reservation:
        """Slots to write blocks into.

        What the policy does not find worth a place is DENIED, too, without a wait.

        Args:
            hashes: the blocks' names; a name twice is PENDING the second time.
            wait: seconds to wait for room that the background writer is making, here or in a space that is to
                give some.
            lineage: what is known of the chains that the blocks are of, for operators and policies.

        Raises:
            ConfigError: a hash is not 16 bytes, or `lineage` of other blocks.
            QuotaError: there are blocks to write and the tenant's quota has room for none of them: what it
                has is leased, pinned or being written.
        """
        hashes = expect_byte_strings("hashes", hashes, HASH_BYTES)
        lineage = expect_lineage(lineage, len(hashes))
        return self._unless_over_quota(*self._reserve(hashes, expect_seconds("wait", wait), lineage))

    def reserve_at_once(
        self, hashes: Sequence[bytes], *, lineage: Lineage | None = None
    ) -> Reservation | None:
        """`reserve` with time to wait, where none is needed; None, and nothing is granted, where it is.

        Raises:
            QuotaError: as of `reserve`.
        """
        hashes = expect_byte_strings("hashes", hashes, HASH_BYTES)
        done = self._grant(hashes, 0.0, expect_lineage(lineage, len(hashes)), at_once=True)
        return None if done is None else self._unless_over_quota(*done)

    def _unless_over_quota(self, reservation: Reservation, over_quota: bool) -> Reservation:
        if over_quota and not (reservation.status == _NEW).any():
            raise QuotaError(
                f"tenant {self.tenant!r} has a quota of {self._tenant.quota} bytes, and all of it is leased, "
                f"pinned or being written: there is no room for blocks of {self.layout.block_bytes} bytes"
            )
        return reservation

    def reserve_named(
        self, hashes: Sequence[bytes], *, wait: float = 0.0, lineage: Lineage | None = None
    ) -> Reservation:
        """`reserve` that trusts its arguments: for names made by `kvstore.hashing`, in an engine's step.

        Where the tenant's quota has no room, blocks are denied, as they are for want of memory.
        """
        return self._reserve(hashes, wait, lineage)[0]

    def _reserve(
        self, hashes: Sequence[bytes], wait: float, lineage: Lineage | None, *, asked_for: bool = False
    ) -> tuple[Reservation, bool]:
        """Slots to write blocks into, and whether the tenant's quota was why there were not enough.

        Args:
            asked_for: somebody waits for these blocks: whether they are worth a place is no question.
        """
        done = self._grant(hashes, wait, lineage, asked_for=asked_for)
        if done is None:
            raise TypeError("only what is to be granted at once or not at all may be nothing")
        return done

    def _grant(
        self,
        hashes: Sequence[bytes],
        wait: float,
        lineage: Lineage | None,
        *,
        at_once: bool = False,
        asked_for: bool = False,
    ) -> tuple[Reservation, bool] | None:
        """See `_reserve`; `at_once`: None, rather than to wait where that may help."""
        end = time.monotonic() + wait
        shared, records = self._shared, self._records
        with shared.lock():
            shared.check_open()
            while True:
                status, slots, wanted = records.classify(hashes)
                # Making room must not evict what was just found to be present.
                present = np.unique(slots[status == _PRESENT]) if len(wanted) < len(hashes) else None
                if present is not None:
                    records.take_leases(present)
                unwanted = 0
                if records.admits_some and not asked_for and len(wanted):
                    wanted, unwanted = self._admitted(hashes, lineage, wanted)
                granted = self._room.take(len(wanted))
                short = len(wanted) - len(granted)
                left = end - time.monotonic()
                waits = short > 0 and (at_once or left > 0) and self._room.may_come()
                if present is not None:
                    self._drop_leases(present)
                if not waits:
                    break
                records.give_back(granted)
                shared.changed.notify_all()
                if at_once:
                    return None
                self._room.waiting += 1
                try:
                    shared.changed.wait(min(left, _ROOM_POLL_SECONDS))
                finally:
                    self._room.waiting -= 1
                shared.check_open()
            chosen = wanted[: len(granted)]
            status[chosen] = _NEW
            slots[chosen] = granted
            of_chosen = None if lineage is None else lineage.take(chosen)
            records.reserve(granted, [hashes[at] for at in chosen.tolist()], of_chosen)
            if present is not None and lineage is not None:
                known = np.flatnonzero(status == _PRESENT)
                records.lineage.learn(slots[known].astype(np.intp), lineage.take(known))
            shared.stats.denied += short
            shared.stats.unwanted += unwanted
            over_quota = short > 0 and self._room.over_quota
            self._tenant.stats.denied += short
            self._tenant.stats.unwanted += unwanted
            self._tenant.stats.over_quota += short if over_quota else 0
            generations = np.where(status <= _PRESENT, records.generations[slots], 0)
        return Reservation(self, hashes, status, slots, generations), over_quota

    def _admitted(
        self, hashes: Sequence[bytes], lineage: Lineage | None, wanted: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], int]:
        """Those of these positions whose blocks are worth a place, and how many are not."""
        names = [hashes[at] for at in wanted.tolist()]
        of_them = None if lineage is None else lineage.take(wanted)
        worth = self._records.wanted(names, of_them, self._room.unused)
        return wanted[worth], len(wanted) - int(np.count_nonzero(worth))

    def reserved(self, hashes: Sequence[bytes]) -> tuple[npt.NDArray[np.int64], Ids, Generations]:
        """Which of these are being written: int64 [n] positions, each hash once; slots and generations.

        Those that were purged since they were reserved are told, too, so that they go when they are written.
        """
        with self._shared.lock():
            pending = self._records.pending
            if void := self._records.void(hashes):
                pending = void | pending
            found = {name: at for at, name in enumerate(hashes) if name in pending} if pending else {}
            slots = np.fromiter((pending[name] for name in found), np.int32, len(found))
            return np.fromiter(found.values(), np.int64, len(found)), slots, self._records.generations[slots]

    def commit(self, slots: Ids, generations: Generations, *, in_cold: bool = False) -> None:
        """Reserved slots are written: name them, let them be found.

        Args:
            in_cold: the cold tier has them already.

        Raises:
            StaleHandleError: a slot is not reserved under this generation; the others are committed.
        """
        shared = self._shared
        slots, generations = _handles(slots, generations)
        with shared.lock():
            shared.check_open()
            good = self._records.reserved(slots, generations)
            mine = slots if good.all() else slots[good]
            names = self._records.commit(mine, shared.clock.tick(), in_cold=in_cold)
            if shared.trace is not None and not in_cold:
                lineage = self._records.lineage.of(self._records.slots_of(names))
                shared.trace.put(self.id, self.layout, names, *lineage)
            self._purges.written(names)
            shared.stats.committed += len(names)
            self._tenant.stats.committed += len(names)
            shared.post(EventKind.STORED, "host", self.id, names)
            shared.changed.notify_all()
            if len(mine) < len(slots):
                self._refuse("commit", slots[~good])

    def abort(self, slots: Ids, generations: Generations) -> None:
        """Reserved slots will not be written.

        Raises:
            StaleHandleError: a slot is not reserved under this generation; the others are freed.
        """
        self._shared.check_open()
        slots, generations = _handles(slots, generations)
        if not len(slots):
            return
        with self._shared.lock():
            self._shared.check_open()
            good = self._records.reserved(slots, generations)
            self._records.abort(slots[good])
            if not good.all():
                self._refuse("abort", slots[~good])

    def _base(self) -> int:
        self._shared.check_open()
        base: int = self._shared.arena.base
        return base

    def _bytes(self, offset: int, nbytes: int) -> memoryview:
        return self._shared.arena.view(offset, nbytes)

    def _copy(self, source: npt.NDArray[np.int64], target: npt.NDArray[np.int64]) -> None:
        self._shared.mover.copy_now(source, target, self.layout.block_bytes)

    # Keeping and losing blocks

    def pin(self, hashes: Sequence[bytes], *, ttl: float | None = None) -> int:
        """Keep resident blocks in host memory until `unpin`; returns how many leading ones were there.

        Args:
            ttl: seconds after which the pin ends by itself; it does not outlive this store then, as pins
                without an end may. None: it does not end.
        """
        hashes = expect_byte_strings("hashes", hashes, HASH_BYTES)
        if ttl is not None:
            ttl = expect_seconds("ttl", ttl, above=True)
        with self._shared.lock():
            self._shared.check_open()
            slots = self._records.resident(hashes)
            self._records.pin(slots, timed=ttl is not None)
            if ttl is not None and len(slots):
                until = time.monotonic() + ttl
                pin = TimedPin(slots, self._records.generations[slots], until)
                self._timed.add(pin)
                self._shared.pin_clock.call_at(until, partial(self._end_pin, pin))
            return len(slots)

    def _end_pin(self, pin: TimedPin) -> None:
        """A pin's time is over. Called by the clock."""
        with self._shared.lock():
            if not self._shared.closed:
                pin = self._timed.take(pin)
                self._drop_leases(self._records.end_timed(pin.slots, pin.generations))

    def unpin(self, hashes: Sequence[bytes]) -> int:
        """End a pin; returns how many of the blocks were pinned."""
        hashes = expect_byte_strings("hashes", hashes, HASH_BYTES)
        with self._shared.lock():
            self._shared.check_open()
            lasting, timed = self._records.unpin(hashes)
            self._timed.end(timed)
            self._drop_leases(lasting)
            self._drop_leases(timed)
            return len(lasting) + len(timed)

    def hint(self, hashes: Sequence[bytes], *, wanted: bool, retention: Retention | None = None) -> int:
        """Advice: these blocks will be wanted soon, or not again.

        Args:
            wanted: True: what the cold tier has of them is brought up, when nothing else is to be. False:
                those that nobody leases go first.
            retention: how long they are worth keeping, for policies that rank by it. None: the leading ones
                that are wanted count as just used.

        Returns:
            how many blocks this is tried for: leading ones that are resident or may come up; those that go
            first.
        """
        hashes = expect_byte_strings("hashes", hashes, HASH_BYTES)
        wanted = expect_flag("wanted", wanted)
        retention = expect_retention(retention)
        shared = self._shared
        if not wanted:
            with shared.lock():
                shared.check_open()
                self._retain(hashes, retention)
                count = self._records.demote(hashes)
                shared.stats.hinted_unwanted += count
                return count
        load = ColdLoad(self, hashes, None)
        resident = len(hashes) - len(load.missing)
        with shared.lock():
            shared.check_open()
            has_cold = shared.cold.tier is not None
            loads = bool(load.missing) and has_cold and shared.hints_under_way < _MOST_HINTS
            count = len(hashes) if loads else resident
            shared.stats.hinted_wanted += count
            if retention is None:
                self._records.hinted(hashes[:resident])
            self._retain(hashes, retention)
            if loads:
                shared.hints_under_way += 1
                shared.hinted.submit(self._load_ahead, load, hashes[resident:], retention)
        if not loads:
            load.release()
        return count

    def _load_ahead(self, load: ColdLoad, hashes: Sequence[bytes], retention: Retention | None) -> None:
        """In a loader thread; `retention` is of these, which are to be loaded."""
        try:
            self._load_up(load)
            with self._shared.lock():
                self._retain(hashes, retention)
            load.release()
            load.done()
        except Exception:  # noqa: BLE001  nobody waits for it
            _log.exception("blocks that were hinted at could not be loaded")
        finally:
            with self._shared.lock():
                self._shared.hints_under_way -= 1

    def evict(self, count: int) -> int:
        """Let go of up to `count` blocks, coldest first, whether they were copied to the cold tier or not.

        It does not wait for copies: what `flush` or the background writer has not copied yet is lost, and
        counts as ``dropped``.

        Returns:
            how many went.
        """
        count = expect_integer("count", count, 0)
        with self._shared.lock():
            self._shared.check_open()
            return self._room.evict(count, spare_dirty=False)

    def demote(self, hashes: Sequence[bytes], *, deadline: float = 30.0) -> int:
        """Have blocks be in the cold tier alone: copied there if they are not yet, then dropped here.

        What somebody leases or has pinned stays, and so does what the cold tier does not take in time; of a
        prompt the end goes first.

        Args:
            hashes: which blocks.
            deadline: seconds that copying may take.

        Returns:
            how many were dropped.

        Raises:
            ColdTierUnavailableError: there is no cold tier.
        """
        hashes = expect_byte_strings("hashes", hashes, HASH_BYTES)
        return self.evictions.demote(hashes, time.monotonic() + expect_seconds("deadline", deadline))

    def room_may_come(self, held: int) -> bool:
        """Whether waiting for slots may help: others have some, or the arena is growing.

        Args:
            held: how many different slots the caller has leased itself.
        """
        held = expect_integer("held", held, 0)
        with self._shared.lock():
            self._shared.check_open()
            return self._room.may_come_from_others(held)

    # From the cold tier

    def load(
        self, hashes: Sequence[bytes], deadline: float, *, start: ChainPlace | None = CHAIN_START
    ) -> Lease:
        """Bring blocks up from the cold tier and lease the leading ones that are resident then.

        What has not arrived after `deadline` seconds goes on loading and serves the next request.

        Args:
            start: where in their chain the hashes begin, as of `match`.
        """
        deadline = expect_seconds("deadline", deadline)
        load = self.start_load(hashes, start=start)
        try:
            load.wait(deadline)
            return self.lease_loaded(load, hashes, start)
        finally:
            load.release()

    def lease_loaded(self, load: ColdLoad, hashes: Sequence[bytes], start: ChainPlace | None) -> Lease:
        """Lease the leading resident blocks, for whoever asked for a load of them.

        What has come up is used by that, as what a match finds is: the policy is told. What was there before
        the load is told of by matches.

        Args:
            load: of these blocks.
            hashes, start: as of `load`.
        """
        with self._shared.lock():
            self._shared.check_open()
            slots = self._records.resident(hashes)
            before = len(hashes) - len(load.missing)
            if load.loaded and before < len(slots):
                place = None if start is None else start.after(hashes[:before])
                self._records.looked_up(slots[before:], hashes[before : len(slots)], place)
            return self._leased(slots)

    def start_load(self, hashes: Sequence[bytes], *, start: ChainPlace | None = CHAIN_START) -> ColdLoad:
        """Start bringing up from the cold tier what it has of the leading blocks; returns at once.

        Args:
            start: where in their chain the hashes begin, as of `match`.
        """
        shared = self._shared
        hashes = expect_byte_strings("hashes", hashes, HASH_BYTES)
        start = expect_place(start, len(hashes))
        ended = None
        if (trace := shared.trace) is not None:
            ended = partial(trace.loaded, self.id, self.layout, hashes, start=start, began=time.monotonic())
        load = ColdLoad(self, hashes, start, ended)
        with shared.lock():
            shared.check_open()
            if load.missing and shared.cold.tier is not None:
                shared.loaders.submit(self._load_up, load)
            else:
                load.finish()
        return load

    def _load_up(self, load: ColdLoad) -> None:
        """In a loader thread."""
        with self._shared.cold.use() as cold:
            if cold is None:  # it went meanwhile
                load.finish()
            else:
                load.run(cold, self._shared.settings.cold_deadline)

    def count_in_cold(self, cold: ColdTier, hashes: Sequence[bytes], deadline: float) -> int:
        """How many leading blocks the cold tier seems to have; 0 where it does not answer by `deadline`."""
        with self._shared.lock():
            hashes = self._purges.may_load(hashes)
        there = cold.contains(self.id, hashes, deadline)
        return len(there) if there.all() else int(there.argmin())

    def read_from_cold(
        self, cold: ColdTier, hashes: Sequence[bytes], deadline: float, start: ChainPlace | None
    ) -> tuple[int, int]:
        """Read one batch of leading blocks, those that are not resident nor being written.

        Args:
            deadline: seconds to wait for room, and for the cold tier.
            start: where in its chain the first one is, which the others follow; None: that is not known.

        Returns:
            how many leading blocks that was about, and how many of them arrived.
        """
        shared = self._shared
        batch = list(hashes[: self._writes.most])
        with shared.lock():
            if shared.cold.tier is not cold:
                return 0, 0  # it is about to go, and waits for this load
            # Not further than to what is resident: it may have to make room for what comes first.
            _, found = self._records.index.find(batch)
            if found.any():
                batch = batch[: int(found.argmax())]
            batch = list(self._purges.may_load(batch))
        # No room, by the quota or not, is a miss.
        lineage = None if start is None else Lineage.of_chain(batch, start)
        with self._reserve(batch, deadline, lineage, asked_for=True)[0] as reservation:
            new = reservation.new
            names = [batch[at] for at in new.tolist()]
            views = [self.view(slot) for slot in reservation.slots[new].tolist()]
            began = time.monotonic()
            try:
                status = cold.get(self.id, names, views, deadline)
            finally:
                for view in views:
                    view.release()
            seconds = time.monotonic() - began
            arrived = new[status == ColdStatus.OK]
            reservation.commit(arrived, in_cold=True)
        with shared.lock():
            shared.cold.heard(status)
            shared.cold_reads.moved(len(arrived) * self.layout.block_bytes, seconds)
            shared.stats.cold_loaded += len(arrived)
            shared.stats.cold_missed += len(new) - len(arrived)
        return len(batch), len(arrived)

    def wait_for_writers(self, hashes: Sequence[bytes], until: float) -> None:
        """Wait while the first block that is not resident is being written by somebody else.

        Args:
            until: for how long at most, by `time.monotonic`.
        """
        shared, records = self._shared, self._records
        with shared.lock():
            while (left := until - time.monotonic()) > 0 and not shared.closed:
                resident = len(records.resident(hashes))
                if resident == len(hashes) or hashes[resident] not in records.pending:
                    return
                shared.changed.wait(left)

    # To the cold tier

    def write_to_cold(self, *, flush: bool = False, until: float | None = None) -> int:
        """Copy one batch of blocks to the cold tier, those first that would be evicted first.

        Args:
            flush: also blocks that are not about to be evicted.
            until: when to be done at the latest, by `time.monotonic`.

        Returns:
            how many were written; 0 when there is nothing to do or the tier did not take any.
        """
        shared = self._shared
        shared.check_open()
        with shared.cold.use() as cold:
            if cold is None:
                return 0
            return self._writes.write(cold, self._records.next_dirty if flush else self._to_clean, until)

    def _to_clean(self, limit: int) -> Ids:
        return self._room.to_clean()[:limit]

    def put_note(self, name: bytes, value: bytes, deadline: float | None = None) -> bool:
        """Keep a small named record in the cold tier; False where there is none or it did not take it."""
        self._shared.check_open()
        key = self.id + expect_bytes("name", name)
        expect_bytes("value", value)
        seconds = (
            self._shared.settings.cold_deadline if deadline is None else expect_seconds("deadline", deadline)
        )
        with self._shared.cold.use() as cold:
            if cold is None or not self._purges.may_put_note(name, time.monotonic() + seconds):
                return False
            if not self.tenant:
                return cold.put_note(key, value, deadline) == ColdStatus.OK
            return cold.put_note(key, value, deadline, space=self._notes) == ColdStatus.OK

    def get_note(self, name: bytes, deadline: float | None = None) -> bytes | None:
        """A named record from the cold tier, or None."""
        status, value = self.read_note(name, deadline)
        return value if status == ColdStatus.OK else None

    def read_note(self, name: bytes, deadline: float | None = None) -> tuple[ColdStatus, bytes]:
        """A named record from the cold tier, or why there is none: one that was purged is a miss."""
        self._shared.check_open()
        key = self.id + expect_bytes("name", name)
        with self._shared.cold.use() as cold:
            with self._shared.lock():
                if cold is None or not self._purges.may_read_note(name):
                    return ColdStatus.MISS, b""
            if not self.tenant:
                return cold.get_note(key, deadline)
            return cold.get_note(key, deadline, space=self._notes)

    def purge(
        self, hashes: Sequence[bytes] | None, *, notes: Sequence[bytes] = (), deadline: float = 30.0
    ) -> PurgeReport:
        """Have blocks be gone from host memory and the cold tier, whether they are pinned or not.

        After this nobody finds them, what is leased included; that goes when its leases end.

        Args:
            hashes: of these blocks; None: of all, and all notes of a space that has a tenant.
            notes: names of notes that are to go as well.
            deadline: seconds that the cold tier may take, and copies to it that are under way.
        """
        if hashes is not None:
            hashes = expect_byte_strings("hashes", hashes, HASH_BYTES)
        for name in notes:
            expect_bytes("notes", name)
        return self._purges.run(hashes, notes, time.monotonic() + expect_seconds("deadline", deadline))

    def still_purged(self, held: HeldSlots) -> HeldSlots:
        """Those of the slots that a purge left that somebody still holds."""
        with self._shared.lock():
            same = self._records.generations[held.slots] == held.generations
            slots = self._records.purged(held.slots[same])
            return HeldSlots(slots, self._records.generations[slots])

    def bar(self, section: Section) -> None:
        """What another process had the cold tier remove, and it did not yet, is not loaded here either."""
        self._purges.restore(section)

    def retry_purges(self) -> None:
        """Have the cold tier remove what it was to and did not, if there is something and it is time."""
        self._purges.try_again()

    def status(self) -> SpaceStatus:
        """The space as it is. Slots are counted without the lock."""
        records = self._records
        with self._shared.lock():
            self._shared.check_open()
            extents = frozenset(records.extents)
            known = SpaceStatus(
                self.id,
                self.layout,
                self.shard,
                self.tenant,
                slots_per_extent=self.slots_per_extent,
                extents=len(extents),
                capacity=self.capacity,
                resident=len(records.index),
                reserved=len(records.pending),
                evictable=records.evictable,
                free=records.free,
                cleaning=records.cleaning,
                slots=SlotCounts(),
                unpurged=self._purges.pending,
                costs=records.costs,
            )
        return replace(known, slots=records.looks.count(extents))

    def ranked_by(self, policy: Callable[[Losses], EvictionPolicy]) -> Callable[[], None]:
        """Have a new policy rank the blocks that may go, in their order; returns what puts it in place.

        With the lock held until then.
        """
        ranked = self._records.ranked_by(policy(self._records.losses))
        return partial(self._records.use_policy, ranked)

    def tell_costs(self, costs: CostModel) -> None:
        """What loading and computing blocks of this space takes, as an engine knows it.

        Where the store itself has read the cold tier, what it took there counts.
        """
        expect_type("costs", costs, CostModel, "a CostModel")
        if costs.block_size != self.layout.block_size or costs.block_bytes != self.layout.block_bytes:
            raise ConfigError("costs", "are those of blocks of another size")
        with self._shared.lock():
            self._shared.check_open()
            self._records.costs = replace(costs, cold=self._shared.cold_reads.cost or costs.cold)

    @property
    def costs(self) -> CostModel | None:
        """What an engine told last of its costs; None: none did."""
        return self._records.costs

    def forget_copies(self) -> None:
        """There is another cold tier, which has no copies, or none. With the lock held."""
        self._records.in_cold[:] = False

    # What another process left

    @property
    def damaged(self) -> int:
        """Slots out of use because their records were damaged."""
        return self._records.damaged

    def generations_of(self, slots: Ids) -> Generations:
        """The generations under which slots were granted last, int64 [n]."""
        generations: Generations = self._records.generations[slots]
        return generations

    def restore(
        self, leases: npt.NDArray[np.int32], reserved: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.bool_]:
        """Take over what processes hold that outlived the one with this store; once, before any other call.

        Args:
            leases: int32 [capacity], leases of each slot.
            reserved: bool [capacity]. What is reserved and not told here is free.

        Returns:
            bool [capacity]: slots whose records say otherwise. They count as damaged, and nobody holds them.
        """
        with self._shared.lock():
            self._shared.check_open()
            before = self._records.damaged
            wrong = self._records.restore(leases, reserved)
            self._shared.stats.damaged += self._records.damaged - before
            return wrong

    def free_damaged(self) -> int:
        """Nobody is left who might write to slots whose records were damaged: how many are free now."""
        with self._shared.lock():
            self._shared.check_open()
            count = self._records.free_damaged()
            self._shared.changed.notify_all()
            return count

    def check_integrity(self) -> None:
        """Prove that the records of the slots agree with each other. With the lock held.

        Raises:
            IntegrityError: naming the first thing that does not agree.
        """
        self._records.check_integrity()

    # Inside: all of it is called with the lock held.

    def _resident_of(self, hashes: Sequence[bytes]) -> tuple[npt.NDArray[np.int64], Ids]:
        """Which of these are resident: int64 [n] positions, and their slots."""
        slots, found = self._records.index.find(hashes)
        there = np.flatnonzero(found)
        return there, slots[there]

    def _retain(self, hashes: Sequence[bytes], retention: Retention | None) -> None:
        """Advice on those of these that are resident."""
        if retention is not None:
            if retention.ttl is None:
                retention = replace(retention, ttl=self._shared.settings.retention_ttl)
            self._records.retain(np.unique(self._records.slots_of(hashes)), retention)

    def _leased(self, slots: Ids) -> Lease:
        """A lease of these resident blocks."""
        self._records.take_leases(slots)
        return Lease(self, slots, self._records.generations[slots.astype(np.intp)])

    def _drop_leases(self, slots: Ids) -> None:
        if self._records.drop_leases(slots, self._shared.clock.tick()):
            self._shared.changed.notify_all()

    def _refuse(self, what: str, slots: Ids) -> NoReturn:
        self._shared.stats.stale += len(slots)
        raise StaleHandleError(f"{what} refused for slots {slots.tolist()[:8]}: granted again, or not held")


def _handles(slots: Ids, generations: Generations) -> tuple[Ids, Generations]:
    slots = expect_array("slots", slots, _INT32)
    generations = expect_array("generations", generations, _INT64)
    if len(slots) != len(generations):
        raise ConfigError(
            "generations", f"must be one for each of {len(slots)} slots, got {len(generations)}"
        )
    return slots, generations
