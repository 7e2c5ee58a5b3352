"""The device tier's blocks: who holds each, what each is named, which may go.

Everything is an array over block ids (slots of the device arena) but the prefix index, a dictionary from
hash to id: a dictionary of bytes answers a probe in 60 ns, where an array hash table costs tens of
microseconds a call and wins only on batches of thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ..tiers.arena import SlotAllocator
from ..tiers.errors import CapacityError, IntegrityError
from .handles import first_generations
from .hashing import leading
from .lineage import ChainPlace, Lineage, shortened
from .policy import BlockFacts, EvictionPolicy, Ids, Retention

__all__ = ["BlockPool"]


class BlockPool:
    """Reference-counted blocks, the prefix index over them, and eviction of those nobody holds.

    A block is *free* (in the allocator), *held* (`refs` > 0), or *cached* (named by a hash, held by
    nobody, ranked by the policy until it is evicted or held again).

    Args:
        slots: the arena's allocator; the pool is its only user.
        policy: ranks cached blocks.
        on_evict: told the hashes that left the index.
    """

    def __init__(
        self,
        slots: SlotAllocator,
        policy: EvictionPolicy,
        on_evict: Callable[[Sequence[bytes]], None],
    ) -> None:
        capacity = slots.capacity
        self.refs = np.zeros(capacity, dtype=np.int32)
        self.generations = first_generations(capacity)
        """Raised whenever a block is freed, so that a remembered id can be checked."""
        self.host_slots = np.zeros(capacity, dtype=np.int32)
        self.host_generations = np.zeros(capacity, dtype=np.int64)
        """The copy in host memory, if any: a slot and its generation; generation 0 means none is known."""
        self.moving = np.zeros(capacity, dtype=np.bool_)
        """A copy to host memory is being made: its bytes must stay."""
        self.lacking = np.zeros(capacity, dtype=np.int32)
        """Of named blocks, how many tokens each lacks to be full, as far as that is known."""
        self.index: dict[bytes, int] = {}
        self.depths = np.zeros(capacity, dtype=np.int32)
        """Of named blocks, the 1-based index of each in its chain, and"""
        self._parents = np.full(capacity, None, dtype=object)
        """the hash of the block before it there, zeros for the first one."""
        self._hashes = np.full(capacity, None, dtype=object)
        self._named = np.zeros(capacity, dtype=np.bool_)
        self._slots = slots
        self._policy = policy
        self._on_evict = on_evict
        policy.resize(capacity)

    @property
    def capacity(self) -> int:
        """Blocks in all."""
        return len(self.refs)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: free or cached."""
        return self._slots.free_count + len(self._policy)

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return self._slots.free_count

    @property
    def cached(self) -> int:
        """Blocks that are named, held by nobody, and may be evicted."""
        return len(self._policy)

    def hash_of(self, block: int) -> bytes | None:
        """The prefix hash by which a block can be found, or None."""
        name: bytes | None = self._hashes[block]
        return name

    def named(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Which blocks can be found by a hash (bool [n])."""
        found: npt.NDArray[np.bool_] = self._named[ids]
        return found

    def hashes_of(self, ids: Ids) -> list[bytes]:
        """The prefix hashes of blocks, all of them `named`."""
        names: list[bytes] = self._hashes[ids].tolist()
        return names

    def lineage_of(self, ids: Ids) -> Lineage:
        """The lineage of blocks, all of them `named`."""
        return Lineage.unchecked(self._parents[ids].tolist(), self.depths[ids])

    def coldest(self, count: int) -> Ids:
        """Up to `count` cached blocks that would be evicted next."""
        return self._policy.coldest(count)

    def allocate(self, count: int) -> Ids:
        """Grant `count` blocks, held once each, evicting cached ones where too few are free.

        Raises:
            CapacityError: fewer are available; nothing was taken.
        """
        missing = count - self._slots.free_count
        if missing > 0:
            if missing > len(self._policy):
                raise CapacityError(
                    f"{count} blocks wanted in the device tier, {self.available} of {self.capacity} available"
                )
            self.evict(self._policy.coldest(missing))
        ids: Ids = self._slots.allocate(count)
        self.refs[ids] = 1
        self.host_generations[ids] = 0
        self.lacking[ids] = 0
        return ids

    def evict(self, victims: Ids) -> None:
        """Free cached blocks, none of them moving."""
        self._policy.forget(victims, chosen=True)
        gone = self.hashes_of(victims)
        for name in gone:
            del self.index[name]
        self._set_unnamed(victims)
        self._free(victims)
        self._on_evict(gone)

    def match(self, hashes: Sequence[bytes], start: int = 0) -> Ids:
        """Ids of the leading blocks of ``hashes[start:]`` that are in the index. Takes no hold of them."""
        return np.array(leading(self.index, hashes, start), dtype=np.int32)

    def found(self, ids: Ids) -> None:
        """A lookup found these, which follow each other, and is about to hold them: a use of each."""
        if self._policy.learns:
            self._policy.found(ids)

    def missed(self, hashes: Sequence[bytes], start: int, end: int | None = None) -> None:
        """That lookup wanted ``hashes[start:end]`` of a whole chain, too, which are not here."""
        if self._policy.learns and start < (len(hashes) if end is None else end):
            self._policy.missed(BlockFacts.of_chain(hashes[start:end], ChainPlace.at(hashes, start)))

    def retain(self, ids: Ids, retention: Retention) -> None:
        """Advice on named blocks, cached or held."""
        if self._policy.learns and len(ids):
            self._policy.retain(ids, retention)

    def hold(self, ids: Ids) -> None:
        """One more reference to each (no id twice)."""
        before = self.refs[ids]
        self.refs[ids] = before + 1
        if not before.all():
            self._policy.remove(ids[before == 0])

    def drop(self, ids: Ids) -> None:
        """One reference less to each (no id twice). What nobody holds is cached if named, else free.

        Of blocks that become cached together, later ones are evicted sooner: a prefix's leaves go before
        its root.
        """
        after = self.refs[ids] - 1
        self.refs[ids] = after
        if after.all():
            return
        idle = ids[after == 0]
        named = self._named[idle]
        if named.all():
            self._policy.insert(idle[::-1])
        else:
            self._policy.insert(idle[named][::-1])
            self._free(idle[~named])

    def _free(self, ids: Ids) -> None:
        self.generations[ids] += 1
        self._slots.free(ids)

    def publish(self, ids: Ids, names: Sequence[bytes], lineage: Lineage) -> Ids:
        """Blocks are full and immutable: let them be found by their hashes, unless others can be already.

        Args:
            lineage: the chains that they are of.

        Returns:
            int32 [n], per hash the block that is found by it now: its own, or one with the same KV. `ids`
            itself where all are their own.
        """
        listed = ids.tolist()
        found = list(map(self.index.setdefault, names, listed))
        if found == listed:
            self._set_names(ids, names, lineage)
            return ids
        holders = np.array(found, dtype=np.int32)
        own = np.flatnonzero(holders == ids)
        self._set_names(ids[own], [names[at] for at in own.tolist()], lineage.take(own))
        return holders

    def _set_names(self, ids: Ids, names: Sequence[bytes], lineage: Lineage) -> None:
        at = ids.astype(np.intp)  # indices of any other type are made so each time
        # Without a type numpy makes fixed-width strings of them, and loses a hash's last byte that is zero.
        self._hashes[at] = np.array(names, dtype=object)
        self._parents[at] = np.array(lineage.parents, dtype=object)
        self.depths[at] = lineage.depths
        self._named[at] = True
        if self._policy.learns:
            self._policy.admit(ids, BlockFacts(shortened(names), lineage.short_parents, lineage.depths))

    def _set_unnamed(self, ids: Ids) -> None:
        at = ids.astype(np.intp)
        self._hashes[at] = None
        self._named[at] = False

    def withdraw(self, block: int) -> None:
        """A held block can no longer be found, nor do its copies below hold: it is about to change."""
        name = self.hash_of(block)
        self.host_generations[block] = 0
        if name is not None:
            del self.index[name]
            gone = np.array([block], dtype=np.int32)
            self._policy.forget(gone)
            self._set_unnamed(gone)
            self._on_evict([name])

    def check_integrity(self, held: npt.NDArray[np.int64]) -> None:
        """Prove that every block is free, cached, or held as often as `held` (int [capacity]) says.

        Raises:
            IntegrityError: naming the first thing that does not agree.
        """
        self._slots.check_integrity()
        self._policy.check_integrity()
        if not np.array_equal(self.refs, held):
            block = int(np.flatnonzero(self.refs != held)[0])
            raise IntegrityError(
                f"device block {block} counts {self.refs[block]} references, {held[block]} are held"
            )
        for name, block in self.index.items():
            if self._hashes[block] != name:
                raise IntegrityError(f"the index names device block {block}, which has another hash")
        named = np.array([name is not None for name in self._hashes])
        if not np.array_equal(named, self._named):
            raise IntegrityError("a device block has a hash and is not said to be named, or the reverse")
        if (self.depths[named] < 1).any():
            raise IntegrityError("a device block has a hash and no place in a chain")
        for block in self.index.values():
            parent = self.index.get(self._parents[block])
            if parent is not None and self.depths[parent] + 1 != self.depths[block]:
                raise IntegrityError(f"device block {block} is not one deeper in its chain than its parent")
        if int(named.sum()) != len(self.index):
            raise IntegrityError(
                f"{int(named.sum())} device blocks are named, {len(self.index)} in the index"
            )
        free = self._slots.is_free(np.arange(self.capacity, dtype=np.int32))
        cached = np.zeros(self.capacity, dtype=np.bool_)
        cached[self._policy.coldest(len(self._policy))] = True
        owners = free.astype(np.int8) + cached + (self.refs > 0)
        if not (owners == 1).all():
            block = int(np.flatnonzero(owners != 1)[0])
            raise IntegrityError(
                f"device block {block}: free {bool(free[block])}, cached {bool(cached[block])}, "
                f"{self.refs[block]} references"
            )
        if (self.moving & ~named).any():
            raise IntegrityError("a device block is being copied to host memory without a name")
        if (cached & ~named).any() or (free & named).any():
            raise IntegrityError("a cached device block has no hash, or a free one has")
