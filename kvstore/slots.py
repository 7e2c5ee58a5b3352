"""The records of one space's slots: what each holds, who relies on it, and which may go first.

Metadata alone: no bytes, no lock, no clock, no tier below. `HostSpace` holds its lock around every call
and says what time it is, in ticks that count uses.

A slot is *free*, *reserved* (its bytes are being written; nobody can find it) or *committed* (named by a
hash and immutable). A committed slot that is neither leased nor pinned is ranked by the policy and may be
evicted; its generation tells a remembered (slot, generation) pair from a later grant of the same slot.
What is purged while somebody holds it goes when he lets go: a slot is then *purged* (it was committed) or
*void* (it was reserved), and no name leads there.

Where the records lie in a mapping that outlives the process (`SlotArrays.recorded`), they are written in an
order in which a process may be killed between any two writes, and the next one (`adopt`) knows what was
meant:

- a grant writes lineage, hash, CRC, state, and the generation last: before that the CRC fits no record;
- every other change writes the CRC first and the state last, which is one byte.

A slot whose record fits nothing that a killed process leaves is *damaged*: neither found nor granted, until
nobody is left who might write there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ..tiers.arena import SlotAllocator
from ..tiers.errors import ConfigError, IntegrityError
from .cost import CostModel, Tier
from .handles import Generations, ReserveStatus, all_different, first_generations
from .lineage import ChainPlace, Lineage, short_hashes, shortened
from .name_index import NameIndex, Names, name_array
from .policy import BlockFacts, EvictionPolicy, Ids, Losses, Retention
from .slot_arrays import SlotArrays, SlotState
from .slot_crc import Crcs, SlotCrc
from .slot_lineage import SlotLineage
from .slot_looks import SlotLooks

__all__ = ["Adopted", "Evicted", "OldExtent", "Purged", "SlotRecords"]

# Plain numbers: a member looked up on its class costs as much as comparing an array to it.
_FREE: Final = int(SlotState.FREE)
_RESERVED: Final = int(SlotState.RESERVED)
_COMMITTED: Final = int(SlotState.COMMITTED)
_DAMAGED: Final = int(SlotState.DAMAGED)
_PURGED: Final = int(SlotState.PURGED)
_VOID: Final = int(SlotState.VOID)

_Places: TypeAlias = npt.NDArray[np.integer[Any]]
"""Slots, int [n] of any kind."""
_TOGETHER: Final = 1 << 14
"""Slots whose records are looked at together."""
_PRESENT: Final = int(ReserveStatus.PRESENT)
_DENIED: Final = int(ReserveStatus.DENIED)


class Evicted(NamedTuple):
    """Blocks that went."""

    names: list[bytes]
    lost: int
    """How many of them had no copy in the cold tier."""


class Purged(NamedTuple):
    """What became of blocks that are to be found no more."""

    names: list[bytes]
    """Of all that there were, committed or reserved."""
    freed: int
    leased: Ids
    """Slots that go when their leases end, or the copy of them below is made; earlier purges' too."""
    reserved: Ids
    """Slots that go when they are committed or aborted, likewise."""


class Adopted(NamedTuple):
    """What was found in records that another process left, in slots."""

    committed: int
    reserved: int
    unfinished: int
    """It was killed while it changed them, before anybody was told; they are free."""
    damaged: int


class OldExtent(NamedTuple):
    """An extent that can be emptied."""

    extent: int
    used_at: int
    """When one of its blocks was last used."""


class SlotRecords:
    """Every record of one space's slots. Arrays are over slots, and read only for others.

    Slots are numbered by extent: slot ``s`` is the ``s % slots_per_extent``-th place of extent
    ``s // slots_per_extent``. They exist as their extents come (`add_extent`) and go (`remove_extent`).

    Args:
        slots_per_extent: slots that an extent is cut into.
        num_extents: extents that there may be.
        policy: makes what ranks the blocks that may be evicted, of what losing blocks costs.
        arrays: where the records lie; None: in this process's memory.

    Attributes:
        extents: the extents that the space has.
        index: finds the slots of committed blocks by their hashes.
        pending: hash to slot, of reserved ones.
        generations: int64 [capacity], raised with every grant.
        leases: int32 [capacity], pins included.
        in_cold: bool [capacity], whether the cold tier has a copy.
        looks: what is found out about slots without the lock.
        lineage: the chains that blocks are of, and how often each was found.
    """

    def __init__(
        self,
        slots_per_extent: int,
        num_extents: int,
        policy: Callable[[Losses], EvictionPolicy],
        arrays: SlotArrays | None = None,
    ) -> None:
        capacity = slots_per_extent * num_extents
        arrays = arrays or SlotArrays.alone(capacity, num_extents)
        self.slots_per_extent = slots_per_extent
        self.extents: set[int] = set()
        self.index = NameIndex(arrays.hashes)
        self.pending: dict[bytes, int] = {}
        self.generations = arrays.generations
        self.leases = np.zeros(capacity, dtype=np.int32)
        self.in_cold = arrays.in_cold
        self.lineage = SlotLineage(arrays)
        self._arrays = arrays
        self._state = arrays.state
        self._pins = arrays.pins
        self._timed = np.zeros(capacity, dtype=np.int32)
        """Pins that end by themselves, and with this process."""
        self._cleaning = np.zeros(capacity, dtype=np.bool_)
        """Being copied to the cold tier just now."""
        self._num_cleaning = 0
        self._used_at = arrays.used_at
        self._hashes = arrays.hashes
        self._free = SlotAllocator()
        self.costs: CostModel | None = None
        """What an engine has told of loading and computing these blocks; None: nothing yet."""
        self._policy = policy(self.losses)
        self._policy.resize(capacity)
        self.looks = SlotLooks(slots_per_extent, arrays, self.leases, self._timed, self._cleaning)

    @property
    def capacity(self) -> int:
        """Slots that there would be with every extent."""
        return len(self._state)

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return self._free.free_count

    @property
    def evictable(self) -> int:
        """Committed blocks that nobody leases."""
        return len(self._policy)

    @property
    def lent(self) -> int:
        """Committed blocks that somebody leases, otherwise than by pins."""
        return int(np.count_nonzero(self.leases > self._pins + self._timed))

    @property
    def dirty(self) -> int:
        """Committed blocks that have no copy in the cold tier."""
        return int(np.count_nonzero((self._state == _COMMITTED) & ~self.in_cold))

    @property
    def cleaning(self) -> int:
        """Blocks that are being copied to the cold tier just now."""
        return self._num_cleaning

    def ranked_by(self, policy: EvictionPolicy) -> EvictionPolicy:
        """A new policy, which ranks the blocks that may go in the order of the present one."""
        policy.resize(self.capacity)
        if policy.learns:
            held = (self._state == _COMMITTED) | (self._state == _RESERVED)
            self._admit(policy, np.flatnonzero(held).astype(np.int32))
        order = self._policy.coldest(len(self._policy))
        # In parts that stay in the processor's caches, which takes a fifth of the time.
        for start in range(0, len(order), _TOGETHER):
            policy.insert(order[start : start + _TOGETHER])
        return policy

    def use_policy(self, policy: EvictionPolicy) -> None:
        """Another one ranks blocks from now on: one of `ranked_by`."""
        self._policy = policy

    def _admit(self, policy: EvictionPolicy, slots: Ids) -> None:
        """Tell a policy of the blocks that slots hold."""
        for start in range(0, len(slots), _TOGETHER):
            part = slots[start : start + _TOGETHER]
            policy.admit(part, self.facts(part))

    def losses(self, slots: Ids) -> npt.NDArray[np.float64]:
        """Seconds that losing the blocks in these slots costs, float64 [n]; all 1 where that is not known."""
        if self.costs is None:
            return np.ones(len(slots), dtype=np.float64)
        at = slots.astype(np.intp)
        below = np.where(self.in_cold[at], Tier.COLD, Tier.NONE).astype(np.uint8)
        return self.costs.losses(self.lineage.of(at)[1], below)

    def facts(self, slots: Ids) -> BlockFacts:
        """What is known of the blocks that slots hold."""
        at = slots.astype(np.intp)
        return BlockFacts(short_hashes(self._hashes[at]), *self.lineage.of(at))

    # Finding

    def looked_up(self, slots: Ids, hashes: Sequence[bytes], start: ChainPlace | None) -> None:
        """A match found these slots, the leading ones of `hashes`, and is about to lease them.

        Args:
            start: where in its chain the first one is, which the others follow; None: that is not known.
        """
        found = len(slots)
        if found:
            self.lineage.found(slots.astype(np.intp), hashes, start)
        if self._policy.learns:
            self._policy.found(slots)
            if found < len(hashes):
                after = None if start is None else start.after(hashes[:found])
                self._policy.missed(BlockFacts.of_chain(hashes[found:], after))

    def hinted(self, hashes: Sequence[bytes]) -> None:
        """Advice that these leading blocks will be used soon: the resident ones count as just used."""
        if self._policy.learns:
            self.used(self.resident(hashes))

    def used(self, slots: Ids) -> None:
        """These committed blocks, in the order of their chain, are used by who remembered where they are."""
        if self._policy.learns and len(slots):
            self._policy.found(slots)

    def retain(self, slots: Ids, retention: Retention) -> None:
        """Advice on these committed blocks."""
        if self._policy.learns and len(slots):
            self._policy.retain(slots, retention)

    @property
    def admits_some(self) -> bool:
        """Whether the policy may not want each new block."""
        return self._policy.learns

    def wanted(self, hashes: Sequence[bytes], lineage: Lineage | None, room: int) -> npt.NDArray[np.bool_]:
        """bool [n]: which of these new blocks the policy takes if so many slots are free."""
        if len(hashes) <= room:
            return np.ones(len(hashes), dtype=np.bool_)
        names = shortened(hashes)
        unknown = np.zeros(len(names), dtype=np.int32)
        parents, depths = (
            (np.zeros_like(names), unknown) if lineage is None else (lineage.short_parents, lineage.depths)
        )
        return self._policy.wanted(BlockFacts(names, parents, depths), room)

    def resident(self, hashes: Sequence[bytes]) -> Ids:
        """Slots of the leading committed blocks.

        Raises:
            ConfigError: a hash is named twice.
        """
        slots = self.index.leading(hashes)
        if not all_different(slots):
            raise ConfigError("hashes", "a hash is named twice; a prefix names each of its blocks once")
        return slots

    def committed(self, slots: Ids, generations: Generations) -> npt.NDArray[np.bool_]:
        """bool [n]: which handles name a committed block still, each slot told once."""
        return self._valid(slots, generations, _COMMITTED)

    def reserved(self, slots: Ids, generations: Generations) -> npt.NDArray[np.bool_]:
        """bool [n]: which handles name a reserved slot still, each slot told once."""
        return self._valid(slots, generations, _RESERVED, _VOID)

    def leased(self, slots: Ids, generations: Generations) -> npt.NDArray[np.bool_]:
        """bool [n]: which handles name a block that is leased otherwise than by pins."""
        good = self._valid(slots, generations, _COMMITTED, _PURGED)
        at = slots.astype(np.intp)
        good &= self.leases[at] > self._pins[at] + self._timed[at]
        return good

    def _valid(self, slots: Ids, generations: Generations, *states: int) -> npt.NDArray[np.bool_]:
        try:
            at = slots.astype(np.intp)
            state = self._state[at]
            good: npt.NDArray[np.bool_] = state == states[0]
            if np.count_nonzero(good) < len(good):
                for other in states[1:]:
                    good |= state == other
            good &= self.generations[at] == generations
        except IndexError as error:
            raise ConfigError("slots", f"must be from 0 to {self.capacity - 1}") from error
        if not all_different(slots):
            first = np.zeros(len(slots), dtype=np.bool_)
            first[np.unique(np.where(good, slots, -1), return_index=True)[1]] = True
            good &= first
        return good

    def names(self, slots: Ids) -> list[bytes]:
        """The hashes of reserved or committed slots."""
        names: list[bytes] = self._hashes[slots].tolist()
        return names

    def hashes_of(self, slots: Ids) -> npt.NDArray[np.void]:
        """The same as an array, V16 [n]."""
        hashes: npt.NDArray[np.void] = self._hashes[slots]
        return hashes

    @property
    def committed_slots(self) -> Ids:
        """The slots that hold a committed block, ascending."""
        return np.flatnonzero(self._state == _COMMITTED).astype(np.int32)

    # Leases

    def take_leases(self, slots: Ids) -> None:
        """One more lease on each of these committed slots (none twice)."""
        at = slots.astype(np.intp)  # indices of any other type are made so each time
        before = self.leases[at]
        self.leases[at] = before + 1
        leased = np.count_nonzero(before)
        if leased < len(slots):
            self._policy.remove(slots[before == 0] if leased else slots)

    def drop_leases(self, slots: Ids, now: int) -> bool:
        """One lease less on each (none twice); returns whether a block may be evicted now.

        Of blocks that become evictable together, later ones are evicted sooner.
        """
        at = slots.astype(np.intp)
        after = self.leases[at]
        after -= 1
        self.leases[at] = after
        leased = np.count_nonzero(after)
        if leased == len(slots):
            return False
        idle = slots
        if leased:
            idle, at = slots[after == 0], at[after == 0]
        purged = self._state[at] == _PURGED
        if np.count_nonzero(purged):
            self._end_purged(idle[purged])
            idle, at = idle[~purged], at[~purged]
        self._used_at[at] = now
        self._policy.insert(idle[::-1])
        return True

    def pin(self, slots: Ids, *, timed: bool = False) -> None:
        """A lease on each of these slots that `leased` does not tell of.

        Args:
            timed: it ends by `end_timed`, or with this process.
        """
        self.take_leases(slots)
        (self._timed if timed else self._pins)[slots] += 1

    def unpin(self, hashes: Sequence[bytes]) -> tuple[Ids, Ids]:
        """One pin less on each of these blocks that has one, before timed ones such as do not end.

        Returns:
            int32 [n] and int32 [m]: slots that had one, and slots that had timed ones alone; their leases are
            to be dropped.
        """
        slots = np.unique(self.slots_of(hashes))
        lasting = self._pins[slots] > 0
        timed = slots[~lasting & (self._timed[slots] > 0)]
        slots = slots[lasting]
        self._pins[slots] -= 1
        self._timed[timed] -= 1
        return slots, timed

    def end_timed(self, slots: Ids, generations: Generations) -> Ids:
        """A timed pin of these is over: those that have one yet, whose leases are to be dropped."""
        ended: Ids = slots[(self.generations[slots] == generations) & (self._timed[slots] > 0)]
        self._timed[ended] -= 1
        return ended

    def demote(self, hashes: Sequence[bytes]) -> int:
        """Those of these blocks that nobody leases go first, a prefix's last ones before; how many."""
        return self._policy.demote(self.slots_of(list(dict.fromkeys(hashes)))[::-1])

    def slots_of(self, hashes: Sequence[bytes]) -> Ids:
        """The slots of those of these that are committed."""
        slots, found = self.index.find(hashes)
        return slots[found]

    # Writing

    def classify(self, hashes: Sequence[bytes]) -> tuple[npt.NDArray[np.uint8], Ids, npt.NDArray[np.int64]]:
        """What would become of a reservation: uint8 [n] of `ReserveStatus`, DENIED for what wants a slot.

        Returns:
            the status, int32 [n] the slots of what is present, and the positions that want a slot.
        """
        slots, present = self.index.find(hashes)
        status = np.full(len(hashes), _DENIED, dtype=np.uint8)
        status[present] = _PRESENT
        left = np.flatnonzero(~present)
        names = hashes if len(left) == len(hashes) else [hashes[at] for at in left.tolist()]
        if self.pending.keys().isdisjoint(names) and len(set(names)) == len(names):
            return status, slots, left
        wanted: list[int] = []
        asked: set[bytes] = set()
        for at, name in zip(left.tolist(), names, strict=True):
            if name in self.pending or name in asked:
                status[at] = ReserveStatus.PENDING
            else:
                asked.add(name)
                wanted.append(at)
        return status, slots, np.array(wanted, dtype=np.int64)

    def take(self, count: int) -> Ids:
        """Up to `count` free slots, ascending: to be given back, or reserved.

        What was evicted together is free in the reverse of its order in memory; so it is one run again.
        """
        slots = self._free.allocate(min(count, self._free.free_count))
        slots.sort()
        return slots

    def give_back(self, slots: Ids) -> None:
        """Slots that were taken and not reserved."""
        self._free.free(slots)

    def reserve(self, slots: Ids, names: list[bytes], lineage: Lineage | None = None) -> None:
        """Slots that were taken are granted for blocks of these names, and of this lineage if it is known."""
        if not names:
            return
        hashes = name_array(names)
        at = slots.astype(np.intp)
        generations = self.generations[at] + 1
        self.lineage.grant(at, lineage)
        self._hashes[at] = hashes
        self._seal(slots, hashes, generations, _RESERVED)
        self._state[at] = _RESERVED
        self.generations[at] = generations
        self.pending.update(zip(names, slots.tolist(), strict=True))
        if self._policy.learns:
            self._policy.admit(slots, self.facts(slots))

    def commit(self, slots: Ids, now: int, *, in_cold: bool) -> list[bytes]:
        """Reserved slots are written: they can be found by their names, which are returned.

        Those whose names were purged are free instead.
        """
        if (void := self._state[slots] == _VOID).any():
            self._set_state(slots[void], _VOID, _FREE)
            self._free.free(slots[void])
            slots = slots[~void]
        names = self.names(slots)
        for name in names:
            del self.pending[name]
        self.index.add(slots)
        at = slots.astype(np.intp)
        self.in_cold[at] = in_cold
        self._used_at[at] = now
        self._set_state(slots, _RESERVED, _COMMITTED)
        self._policy.insert(slots[::-1])
        return names

    def abort(self, slots: Ids) -> None:
        """Reserved slots will not be written: they are free."""
        if (void := self._state[slots] == _VOID).any():
            self._set_state(slots[void], _VOID, _FREE)
            self._free.free(slots[void])
            slots = slots[~void]
        for name in self.names(slots):
            del self.pending[name]
        self._policy.forget(slots)
        self._set_state(slots, _RESERVED, _FREE)
        self._free.free(slots)

    # Leaving

    def coldest_use(self) -> int | None:
        """When the block that would go next was last used; None where none may go."""
        coldest = self._policy.coldest(1)
        return int(self._used_at[coldest[0]]) if len(coldest) else None

    def oldest_use(self) -> int | None:
        """When the committed block that is longest unused, leased or not, was last used; None: none is."""
        committed = self._state == _COMMITTED
        return int(self._used_at[committed].min()) if committed.any() else None

    def evict(self, count: int, *, spare_dirty: bool) -> Evicted:
        """Let up to `count` blocks go, coldest first, none that is being copied to the cold tier.

        Args:
            spare_dirty: only blocks that have a copy there.
        """
        if spare_dirty:
            candidates = self._policy.coldest(2 * count + 64)
            may_go = self.in_cold[candidates] & ~self._cleaning[candidates]
        elif self._num_cleaning:
            candidates = self._policy.coldest(count + self._num_cleaning)
            may_go = ~self._cleaning[candidates]
        else:
            return self._forget(self._policy.evict(count))
        victims = candidates[may_go][:count]
        self._policy.forget(victims, chosen=True)
        return self._forget(victims)

    def idle(self, slots: Ids, generations: Generations, until: int) -> Ids:
        """Those of these handles, none twice, whose blocks may go and were not used after a tick."""
        at = slots.astype(np.intp)
        idle = (self._state[at] == _COMMITTED) & (self.generations[at] == generations)
        idle &= (self.leases[at] == 0) & ~self._cleaning[at] & (self._used_at[at] <= until)
        found: Ids = slots[idle]
        return found

    def idle_named(self, hashes: Sequence[bytes]) -> Ids:
        """The slots of those of these blocks that nobody leases; of those being copied below, too."""
        slots = self.slots_of(list(dict.fromkeys(hashes)))
        idle: Ids = slots[self.leases[slots] == 0]
        return idle

    def used_at(self, slots: Ids) -> npt.NDArray[np.int64]:
        """The ticks of the last use of these."""
        ticks: npt.NDArray[np.int64] = self._used_at[slots]
        return ticks

    def is_cleaning(self, slots: Ids) -> npt.NDArray[np.bool_]:
        """bool [n]: which of these are being copied to the cold tier."""
        cleaning: npt.NDArray[np.bool_] = self._cleaning[slots]
        return cleaning

    def evict_idle(self, slots: Ids) -> Evicted:
        """Let these go, which `idle` found."""
        self._policy.forget(slots)
        return self._forget(slots)

    def _forget(self, slots: Ids) -> Evicted:
        """Free blocks that the policy has forgotten."""
        names = self.names(slots)
        self.index.remove(slots)
        lost = int(np.count_nonzero(~self.in_cold[slots]))
        self._set_state(slots, _COMMITTED, _FREE)
        self.in_cold[slots] = False
        self._free.free(slots)
        return Evicted(names, lost)

    def _seal(self, slots: _Places, hashes: Names, generations: Generations, state: int) -> None:
        """Write the CRCs of records that have, or will have, these fields."""
        crcs, crc = self._arrays.crcs, self._arrays.crc
        if crcs is not None and crc is not None:
            crcs[slots.astype(np.intp)] = crc.of(hashes, generations) ^ crc.of_state[state]

    def _set_state(self, slots: Ids, before: int, after: int) -> None:
        """Change the state of slots that all have the same, the CRC first."""
        crcs, crc = self._arrays.crcs, self._arrays.crc
        at = slots.astype(np.intp)
        if crcs is not None and crc is not None:
            crcs[at] ^= crc.of_state[before] ^ crc.of_state[after]
        self._state[at] = after

    def purge(self, hashes: Sequence[bytes] | None) -> Purged:
        """Have blocks found no more, pinned ones too; free what nobody holds.

        Args:
            hashes: of blocks that are to go; None: all there are.
        """
        if hashes is None:
            committed = self.committed_slots
            pending = list(self.pending)
        else:
            hashes = list(dict.fromkeys(hashes))
            committed = self.slots_of(hashes)
            pending = [name for name in hashes if name in self.pending]
        names = self.names(committed) + pending
        self.index.remove(committed)
        reserved = np.array([self.pending.pop(name) for name in pending], dtype=np.int32)
        self._policy.forget(np.concatenate([committed, reserved]))
        self.leases[committed] -= self._pins[committed] + self._timed[committed]
        self._pins[committed] = self._timed[committed] = 0
        stays = (self.leases[committed] > 0) | self._cleaning[committed]
        free, leased = committed[~stays], committed[stays]
        self._set_state(free, _COMMITTED, _FREE)
        self._set_state(leased, _COMMITTED, _PURGED)
        self._set_state(reserved, _RESERVED, _VOID)
        self.in_cold[committed] = False
        self._free.free(free)
        held = np.flatnonzero((self._state == _PURGED) | (self._state == _VOID)).astype(np.int32)
        if hashes is not None:
            wanted = set(hashes)
            held = held[np.fromiter((name in wanted for name in self.names(held)), np.bool_, len(held))]
        is_void = self._state[held] == _VOID
        return Purged(names, len(free), held[~is_void], held[is_void])

    def _end_purged(self, slots: Ids) -> None:
        """Nobody leases these purged slots any more: they are free, but those being copied below."""
        gone = slots[~self._cleaning[slots]]
        self._set_state(gone, _PURGED, _FREE)
        self._free.free(gone)

    # Copies in the cold tier

    def to_clean(self, ahead: int) -> Ids:
        """Of the `ahead` coldest blocks those that have no copy in the cold tier."""
        if not ahead:
            return np.empty(0, dtype=np.int32)
        candidates = self._policy.coldest(ahead)
        return candidates[~self.in_cold[candidates] & ~self._cleaning[candidates]]

    def next_dirty(self, limit: int) -> Ids:
        """Up to `limit` of the blocks that have no copy in the cold tier: those that would be evicted first.

        In the order of eviction, a prefix's root after its leaves: a cold tier that must make room forgets
        what was written first. What is leased comes last, in the reverse of the order of last uses, and of
        slots.
        """
        ranked = self._policy.coldest(len(self._policy))
        dirty: Ids = ranked[~self.in_cold[ranked] & ~self._cleaning[ranked]][:limit]
        if len(dirty) < limit:
            held = (self._state == _COMMITTED) & (self.leases > 0) & ~self.in_cold & ~self._cleaning
            slots = np.flatnonzero(held).astype(np.int32)
            slots = slots[np.argsort(self._used_at[slots], kind="stable")][::-1]
            dirty = np.concatenate([dirty, slots[: limit - len(dirty)]])
        return dirty

    def dirty_in(self, extent: int) -> Ids:
        """The committed blocks of an extent that have no copy in the cold tier."""
        first = extent * self.slots_per_extent
        slots = np.arange(first, first + self.slots_per_extent, dtype=np.int32)
        dirty: Ids = slots[(self._state[slots] == _COMMITTED) & ~self.in_cold[slots] & ~self._cleaning[slots]]
        return dirty

    def start_cleaning(self, slots: Ids) -> None:
        """These are being copied to the cold tier: they stay until `end_cleaning`."""
        self._cleaning[slots] = True
        self._num_cleaning += len(slots)

    def end_cleaning(self, slots: Ids, copied: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """`copied` of these have a copy in the cold tier now.

        Returns:
            bool [n]: those that were purged meanwhile, so that the copy must go.
        """
        self._cleaning[slots] = False
        self._num_cleaning -= len(slots)
        purged: npt.NDArray[np.bool_] = self._state[slots] == _PURGED
        self.in_cold[slots[copied & ~purged]] = True
        self._end_purged(slots[purged & (self.leases[slots] == 0)])
        return purged

    def purged(self, slots: Ids) -> Ids:
        """Those of these slots that were purged, committed or reserved, and are still held."""
        state = self._state[slots]
        found: Ids = slots[(state == _PURGED) | (state == _VOID)]
        return found

    def void(self, hashes: Sequence[bytes]) -> dict[bytes, int]:
        """Reserved slots of these names that were purged since."""
        slots = np.flatnonzero(self._state == _VOID).astype(np.int32)
        if not len(slots):
            return {}
        wanted = set(hashes)
        found = zip(self.names(slots), slots.tolist(), strict=True)
        return {name: slot for name, slot in found if name in wanted}

    def any_cleaning(self, slots: Ids) -> bool:
        """Whether one of these is being copied to the cold tier just now."""
        return bool(self._num_cleaning and self._cleaning[slots].any())

    # Extents

    def add_extent(self, extent: int) -> None:
        """The slots of an extent come into being, free."""
        self.extents.add(extent)
        self._arrays.owned[extent] = True
        self._free.add(extent * self.slots_per_extent, self.slots_per_extent)

    def oldest_extent(self, *, spare_dirty: bool) -> OldExtent | None:
        """The longest unused extent that can be emptied, if there is one.

        Args:
            spare_dirty: none with a block that has no copy in the cold tier.
        """
        extents = np.array(sorted(self.extents), dtype=np.int64)
        shape = (-1, self.slots_per_extent)
        state = self._state.reshape(shape)[extents]
        stays = (self.leases.reshape(shape)[extents] > 0) | self._cleaning.reshape(shape)[extents]
        if spare_dirty:
            stays |= ~self.in_cold.reshape(shape)[extents]
        stuck = (state == _RESERVED) | (state >= _DAMAGED) | ((state == _COMMITTED) & stays)
        movable = np.flatnonzero(~stuck.any(axis=1))
        if not len(movable):
            return None
        used_at = np.where(state == _COMMITTED, self._used_at.reshape(shape)[extents], 0).max(axis=1)
        oldest = movable[np.argmin(used_at[movable])]
        return OldExtent(int(extents[oldest]), int(used_at[oldest]))

    def remove_extent(self, extent: int) -> Evicted:
        """Evict what an extent from `oldest_extent` holds; its slots cease to be."""
        first = extent * self.slots_per_extent
        slots = np.arange(first, first + self.slots_per_extent, dtype=np.int32)
        victims = slots[self._state[slots] == _COMMITTED]
        self._policy.forget(victims)
        evicted = self._forget(victims)
        self._free.remove(first, self.slots_per_extent)
        self.extents.discard(extent)
        self._arrays.owned[extent] = False
        return evicted

    # What another process left

    def adopt(self, *, same_cold: bool = False) -> Adopted:
        """Take over the records of another process, which nobody writes any more: at once, and once.

        Committed blocks can be found; what is reserved stays so until `restore` says by whom.

        Args:
            same_cold: the cold tier is the one that it was, and has what the records say.

        Raises:
            IntegrityError: the records contradict each other, and nothing of them can be believed.
        """
        arrays = self._arrays
        if arrays.crcs is None or arrays.crc is None:
            raise ConfigError("arrays", "these records go with their process: there are none to adopt")
        if (arrays.owned.view(np.uint8) > 1).any():
            raise IntegrityError("the list of a space's extents is damaged")
        extents = np.flatnonzero(arrays.owned)
        held = self._state.reshape(-1, self.slots_per_extent)[extents]
        if np.count_nonzero(self._state) > np.count_nonzero(held):
            raise IntegrityError("blocks lie in extents that are not their space's")
        if not same_cold or (self.in_cold.view(np.uint8) > 1).any():
            self.in_cold[:] = False
        self.extents.update(extents.tolist())
        found = Adopted(0, 0, 0, 0)
        idle: list[Ids] = []
        named: list[Future[None]] = []
        self.index.make_room(int(np.count_nonzero(held == _COMMITTED)))
        # Some at a time: what is made on the way takes the same little memory again and again; memory that no
        # process had before takes longer to come by than the rest of this. Names are half of the work, and a
        # thread's of its own.
        together = max(1, _TOGETHER // self.slots_per_extent)
        with ThreadPoolExecutor(1, "kvpager-adopt") as naming:
            for start in range(0, len(extents), together):
                firsts = extents[start : start + together, None] * self.slots_per_extent
                slots = (firsts + np.arange(self.slots_per_extent)).ravel()
                part, committed = self._mend(slots, arrays.crcs, arrays.crc)
                named.append(naming.submit(self.index.add, committed))
                found = Adopted(*(sum(counts) for counts in zip(found, part, strict=True)))
                idle.append(committed[self.leases[committed] == 0])
            for run in np.split(extents, np.flatnonzero(np.diff(extents) > 1) + 1):
                if len(run):
                    first, count = int(run[0]) * self.slots_per_extent, len(run) * self.slots_per_extent
                    self._free.add(first, count, taken=self._state[first : first + count] != _FREE)
            if self._policy.learns:
                held_slots = np.flatnonzero((self._state == _COMMITTED) | (self._state == _RESERVED))
                self._admit(self._policy, held_slots.astype(np.int32))
            self._insert_by_use(idle)
        for one in named:
            one.result()
        return found

    def _mend(self, slots: _Places, crcs: Crcs, crc: SlotCrc) -> tuple[Adopted, Ids]:
        """Mend the records of slots that exist.

        Returns:
            what was found, and int32 [n] the committed slots.
        """
        hashes, generations, state = self._hashes[slots], self.generations[slots], self._state[slots]
        sealed = crcs[slots] ^ crc.of(hashes, generations)
        of_state = crc.of_state
        fits = (sealed == of_state[state]) & (state <= _VOID)
        # States that a change had not come to yet.
        ending = ~fits & (sealed == of_state[_FREE]) & (state <= _VOID) & (state != _DAMAGED)
        purging = ~fits & (sealed == of_state[_PURGED]) & (state == _COMMITTED)
        voiding = ~fits & (sealed == of_state[_VOID]) & (state == _RESERVED)
        writing = ~fits & (sealed == of_state[_COMMITTED]) & (state == _RESERVED)
        granting = ~fits & (state == _FREE)
        late = np.flatnonzero(~fits & (state == _RESERVED))
        next_crcs = crc.of(hashes[late], generations[late] + 1) ^ of_state[_RESERVED]
        granting[late] |= crcs[slots[late]] == next_crcs
        unfinished = ending | granting
        damaged = ~(fits | unfinished | writing | purging | voiding) | (fits & (state == _DAMAGED))
        for which, becomes in ((unfinished, _FREE), (damaged, _DAMAGED)):
            self._write_anew(slots[which], becomes)
        # Somebody may hold these: their handles stay good.
        for which, becomes in ((writing, _RESERVED), (purging, _PURGED), (voiding, _VOID)):
            self._write_anew(slots[which], becomes, keep_generation=True)
        state = self._state[slots]
        committed, reserved = slots[state == _COMMITTED], slots[state == _RESERVED]
        pending = len(self.pending) + len(reserved)
        self.pending.update(zip(self._hashes[reserved].tolist(), reserved.tolist(), strict=True))
        if len(self.pending) < pending:
            raise IntegrityError("two slots are reserved for the same block")
        pins = self._pins[committed]
        if (pins < 0).any():
            raise IntegrityError("the pins of a block are damaged")
        self.lineage.adopt(slots)
        pinned = pins > 0
        self.leases[committed[pinned]] = pins[pinned]
        others = slots[state != _COMMITTED]
        self._pins[others] = 0
        self.in_cold[others] = False
        part = Adopted(
            len(committed),
            len(reserved),
            int(np.count_nonzero(unfinished | writing)),
            int(np.count_nonzero(damaged)),
        )
        return part, committed.astype(np.int32)

    def _insert_by_use(self, parts: list[Ids]) -> None:
        """Have the policy rank slots as they were used, which are ascending in each part, as the parts are.

        Of what was used together later blocks go sooner, and these mostly lie in higher slots. It takes one
        sort of numbers, each a time and a position: a quarter of the time of finding the order of others.
        What was used longer ago than the bits beside a position can tell counts as used together.
        """
        slots = np.concatenate([part[::-1] for part in parts[::-1]]) if parts else np.empty(0, np.int32)
        bits = max(1, len(slots) - 1).bit_length()
        latest = np.uint64((1 << (64 - bits)) - 1)
        now = np.array(self.last_use).astype(np.uint64)
        order = np.arange(len(slots), dtype=np.uint64)
        for start in range(0, len(slots), _TOGETHER):
            part = slice(start, start + _TOGETHER)
            # Unsigned, so that no difference is too large.
            ago = now - self._used_at[slots[part]].view(np.uint64)
            order[part] |= (latest - np.minimum(ago, latest)) << np.uint64(bits)
        order.sort()
        order &= np.uint64((1 << bits) - 1)
        for start in range(0, len(slots), _TOGETHER):
            self._policy.insert(slots[order[start : start + _TOGETHER].view(np.intp)])

    @property
    def last_use(self) -> int:
        """The tick of the last use of any block."""
        return int(self._used_at.max(initial=0))

    @property
    def damaged(self) -> int:
        """Slots whose records are not to be believed."""
        return int(np.count_nonzero(self._state == _DAMAGED))

    def restore(
        self, leases: npt.NDArray[np.int32], reserved: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.bool_]:
        """After `adopt`: what is still held by processes that live on. What nobody has reserved is free.

        Args:
            leases: int32 [capacity], leases of each slot beside its pins.
            reserved: bool [capacity].

        Returns:
            bool [capacity]: slots whose records say otherwise, and which count as damaged.
        """
        state = self._state
        wrong: npt.NDArray[np.bool_] = ((leases > 0) & (state != _COMMITTED) & (state != _PURGED)) | (
            reserved & (state != _RESERVED) & (state != _VOID)
        )
        wrong |= state == _DAMAGED
        slots = np.flatnonzero(wrong & (state != _DAMAGED)).astype(np.int32)
        exist = np.isin(slots // self.slots_per_extent, np.array(sorted(self.extents), dtype=np.int32))
        slots = slots[exist]
        self.index.remove(slots[state[slots] == _COMMITTED])
        for name in self.names(slots[state[slots] == _RESERVED]):
            del self.pending[name]
        self._policy.forget(slots[(state[slots] == _COMMITTED) | (state[slots] == _RESERVED)])
        self._free.withdraw(slots[state[slots] == _FREE])
        self.leases[slots] = self._pins[slots] = 0
        self._write_anew(slots, _DAMAGED)
        held = np.flatnonzero((leases > 0) & ~wrong).astype(np.int32)
        self._policy.remove(held)
        self.leases[held] += leases[held]
        self.abort(np.flatnonzero(((state == _RESERVED) | (state == _VOID)) & ~reserved).astype(np.int32))
        self._end_purged(np.flatnonzero((state == _PURGED) & (self.leases == 0)).astype(np.int32))
        return wrong

    def free_damaged(self) -> int:
        """Nobody is left who might write to damaged slots: they are free. Returns how many there were."""
        slots = np.flatnonzero(self._state == _DAMAGED).astype(np.int32)
        self._set_state(slots, _DAMAGED, _FREE)
        self._free.free(slots)
        return len(slots)

    def _write_anew(self, slots: _Places, state: int, *, keep_generation: bool = False) -> None:
        """Write whole records; with generations that no handle has, unless these are kept."""
        if not len(slots):
            return
        generations = self.generations[slots] if keep_generation else first_generations(len(slots))
        # Killed in here, the next process finds the same, or that nothing fits.
        if state != _FREE:
            self._seal(slots, self._hashes[slots], generations, state)
        self._state[slots] = state
        self.generations[slots] = generations
        if state == _FREE:
            self._seal(slots, self._hashes[slots], generations, state)

    def check_integrity(self) -> None:
        """Prove that index, states, free slots, leases and ranks agree.

        Raises:
            IntegrityError: naming the first thing that does not agree.
        """
        self._free.check_integrity()
        self._policy.check_integrity()
        place = np.arange(self.capacity, dtype=np.int32)
        owned = np.isin(place // self.slots_per_extent, np.array(sorted(self.extents), dtype=np.int32))
        free = np.zeros(self.capacity, dtype=np.bool_)
        free[place[owned]] = self._free.is_free(place[owned])
        if (free != (owned & (self._state == _FREE))).any() or (self._state[~owned] != _FREE).any():
            raise IntegrityError("a host slot is free in one book and not in the other")
        self.index.check_integrity()
        committed = np.flatnonzero(self._state == _COMMITTED)
        reserved = np.flatnonzero(self._state == _RESERVED)
        pending = np.array(list(self.pending.values()), dtype=np.int32)
        for named, slots in ((self.index.slots(), committed), (pending, reserved)):
            if not np.array_equal(np.sort(named), slots):
                raise IntegrityError(f"{len(named)} host blocks are named, {len(slots)} slots hold one")
        if self.names(pending) != list(self.pending):
            raise IntegrityError("a reserved host slot has another hash than it was granted for")
        self.lineage.check_integrity()
        if self._num_cleaning != np.count_nonzero(self._cleaning):
            raise IntegrityError(f"{self._num_cleaning} host blocks are counted as being copied below")
        if (self.leases < 0).any() or (self._pins + self._timed > self.leases).any():
            raise IntegrityError("a host slot has fewer leases than pins, or less than none")
        evictable = np.flatnonzero((self._state == _COMMITTED) & (self.leases == 0))
        ranked = np.sort(self._policy.coldest(len(self._policy)))
        if not np.array_equal(evictable, ranked):
            raise IntegrityError(
                f"{len(evictable)} host blocks may be evicted, the policy ranks {len(ranked)}"
            )
