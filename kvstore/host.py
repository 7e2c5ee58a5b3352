"""HostStore: the authority over host memory and the cold tier behind it.

A `HostStore` owns one pinned arena and at most one cold tier. `HostStore.space` opens a *space* (one
layout and shard), and everything else is called on it. Calls are safe from several threads; none waits
for the cold tier but `load`, `flush`, `reserve` and `match` with a deadline, and these only until it.

Demotion to the cold tier runs ahead of eviction: a background thread keeps the coldest `clean_ahead`
share of host memory copied there, so that making room moves no bytes (blocks are immutable, so a copy
stays good for ever).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Final

import numpy as np

from ..tiers.arena_file import ArenaFile
from ..tiers.cold import ColdTier, expect_cold_tier
from ..tiers.errors import ClosedError, ConfigError, IntegrityError
from ..tiers.layout import KVLayout
from ..tiers.memory import format_bytes
from ..tiers.pinned import LARGEST_EXTENT, PinnedArena, arena_sizes, capacity_for
from ..tiers.record_file import RecordFile
from ..tiers.settings import (
    MOST_BYTES,
    expect_byte_strings,
    expect_choice,
    expect_flag,
    expect_integer,
    expect_seconds,
    expect_text,
    expect_type,
    shown,
)
from .calls import LostListener
from .cost import LinkCost
from .cost_estimates import LinkEstimate
from .events import Listener
from .evicting import MOST_AGE, EvictReport, evict_from_cold, evict_from_host
from .handles import Lease
from .hashing import HASH_BYTES, space_id
from .policy import DEFAULT_POLICY
from .saved_spaces import SavedSpace, new_records, read_spaces
from .shared import HostShared
from .slots import SlotRecords
from .space import HostSpace
from .status import StatusReader, StoreStatus
from .store_settings import RETENTION_TTL, StoreSettings
from .tenants import check_tenant
from .trace_log import TraceLog

__all__ = ["HostStore"]

_log = logging.getLogger(__name__)

_CLEAN_POLL_SECONDS: Final = 0.25
_CLEAN_PAUSE_SECONDS: Final = 0.02
_CLEAN_REST: Final = 20
"""The cleaner rests this many times as long as it looked in vain."""


class HostStore:
    """Host memory and the cold tier, shared by every space opened on it.

    Args:
        host_bytes: capacity of the pinned arena.
        cold: the cold tier, or None. It is closed with the store, but not by a store that cannot be made.
        policy: name of the eviction policy (`kvstore.policy.policy_names`).
        device: ``cuda:N`` to page-lock and map the arena for that GPU; None or ``cpu`` for a machine without
            one.
        extent_bytes: size of an extent; None for a size that fits the capacity.
        clean_ahead: share of host memory that is kept copied to the cold tier ahead of eviction.
        cold_deadline: seconds that one background read or write of the cold tier may take.
        arena: the file that holds the arena, so that committed blocks outlive this process: what is there is
            taken over at once. Closed with the store. What other processes hold of it is settled by
            `HostSpace.restore`. None: memory that goes with this process.
        quotas: bytes that the blocks of each tenant may take; ``*``: of each that is not named. None: all.
        policy_weights: of the policy's weights (docs/reference.md) those that are to be other than its own.
        retention_ttl: seconds that advice on how long to keep blocks holds (`Retention`) where it does not
            say that.
        trace: where it is written down what is looked up and put, for `kvpager simulate`. Closed with the
            store. None: nowhere.

    Raises:
        ConfigError: a value is of a wrong type or out of range, there is no such `device`, or `arena` is of
            another size.
        ClosedError: the cold tier is closed.
        MemoryUnavailableError: the machine does not have `host_bytes`.
    """

    def __init__(
        self,
        host_bytes: int,
        *,
        cold: ColdTier | None = None,
        policy: str = DEFAULT_POLICY,
        device: str | None = None,
        extent_bytes: int | None = None,
        clean_ahead: float = 0.25,
        cold_deadline: float = 5.0,
        arena: ArenaFile | None = None,
        quotas: Mapping[str, int] | None = None,
        policy_weights: Mapping[str, float] | None = None,
        retention_ttl: float = RETENTION_TTL,
        trace: TraceLog | None = None,
    ) -> None:
        if cold is not None:
            expect_cold_tier(cold)
        if trace is not None:
            expect_type("trace", trace, TraceLog, "a TraceLog")
        settings = StoreSettings(policy, clean_ahead, cold_deadline, quotas, policy_weights, retention_ttl)
        if device is not None:
            device = None if expect_text("device", device) == "cpu" else device
        self._file = None if arena is None else expect_type("arena", arena, ArenaFile, "an ArenaFile")
        saved: list[SavedSpace] = []
        if arena is not None:
            capacity, extent = arena_sizes(host_bytes, extent_bytes)
            saved = arena.take_over(capacity, extent, partial(_saved_in, arena, settings), [])
        self.arena = PinnedArena(
            host_bytes,
            extent_bytes=extent_bytes,
            device=device,
            file=None if arena is None else arena.file,
            taken=[number for one in saved for number in one.records.extents],
        )
        self.device = device
        self._extents_chosen = extent_bytes is not None
        self._shared = HostShared(self.arena, cold, device, settings)
        self._shared.records = self.records
        self._shared.trace = trace
        self.stats = self._shared.stats
        self.events = self._shared.events
        self.inherits = arena is not None
        """Whether others may hold blocks since before this store, which `HostSpace.restore` settles."""
        self._status = StatusReader(self._shared)
        self._spaces: dict[bytes, HostSpace] = {}
        for one in saved:
            self._take_over(one)
        self._flusher = ThreadPoolExecutor(1, "kvpager-flush")
        self._switching = threading.Lock()
        """Held while a cold tier comes or goes."""
        self._cleaner: threading.Thread | None = None
        if cold is not None:
            self._start_cleaner()

    @property
    def cold(self) -> ColdTier | None:
        """The cold tier that there is just now."""
        return self._shared.cold.tier

    @property
    def in_place(self) -> bool:
        """Whether the memory is in this process: it is."""
        return True

    def space(self, layout: KVLayout, *, shard: str = "", tenant: str = "") -> HostSpace:
        """Open the space of `layout`, `shard` and `tenant`; the same object for equal ones.

        Args:
            tenant: whose the blocks are: quotas go by it, and no other tenant finds them.

        Raises:
            ConfigError: a block does not fit an extent, or is more than all that the cold tier keeps, or an
                argument is of a wrong type.
            ClosedError: the store is closed.
        """
        name = space_id(layout, shard, check_tenant("tenant", tenant))
        with self._shared.lock():
            self._shared.check_open()
            space = self._spaces.get(name)
            if space is None:
                if layout.block_bytes > self.arena.extent_bytes:
                    raise self._does_not_fit(layout)
                if self.cold is not None:
                    self.cold.check_block(layout.block_bytes)
                records = self._new_records(layout, shard, tenant)
                space = HostSpace(self._shared, layout, shard, tenant, records)
                self._spaces[name] = space
            return space

    @property
    def spaces(self) -> tuple[HostSpace, ...]:
        """The spaces that are open, those that were taken over included."""
        with self._shared.lock():
            return tuple(self._spaces.values())

    def find_space(self, space: bytes) -> HostSpace | None:
        """The open space of this id; None where there is none."""
        with self._shared.lock():
            return self._spaces.get(space)

    def tenant_of(self, space: bytes) -> str | None:
        """Whose the space of this id is; None where there is none."""
        found = self.find_space(space)
        return None if found is None else found.tenant

    def tenants(self) -> dict[str, dict[str, Any]]:
        """Of each tenant with a space: its counters, ``blocks`` and ``bytes``, and ``quota`` (0: none)."""
        with self._shared.lock():
            return {name: tenant.snapshot() for name, tenant in self._shared.tenants.items()}

    def status(self) -> StoreStatus:
        """The store as it is. Slots are counted without the lock, so that nobody waits for it.

        Raises:
            ClosedError: the store is closed.
        """
        return self._status.read(self.spaces)

    def configure(
        self,
        *,
        policy: str | None = None,
        clean_ahead: float | None = None,
        cold_deadline: float | None = None,
        quotas: Mapping[str, int] | None = None,
        policy_weights: Mapping[str, float] | None = None,
        retention_ttl: float | None = None,
    ) -> dict[str, tuple[Any, Any]]:
        """Set something otherwise while the store is used: all that is given at once, or nothing of it.

        Another policy, or the same one of other weights, goes on with the order of the one before, and has
        what it learns from uses yet to learn. A tenant that has more than a new quota gives blocks up when it
        writes.

        Args:
            policy, clean_ahead, cold_deadline, retention_ttl: as of the store; None: as it is.
            quotas: those of all tenants, in place of those that there are; empty: none. None: as they are.
            policy_weights: those of the policy that are other than its own, in place of those that there
                are; empty: none. None: as they are, and none where the policy is another one.

        Returns:
            what was set otherwise, by its name: before, and now.

        Raises:
            ConfigError: a value is of a wrong type or out of range.
            ClosedError: the store is closed.
        """
        given: dict[str, Any] = {
            "policy": policy,
            "clean_ahead": clean_ahead,
            "cold_deadline": cold_deadline,
            "quotas": quotas,
            "policy_weights": policy_weights,
            "retention_ttl": retention_ttl,
        }
        shared = self._shared
        with shared.lock():
            shared.check_open()
            before = shared.settings
            if policy not in (None, before.policy) and policy_weights is None:
                given["policy_weights"] = {}
            after = replace(before, **{name: value for name, value in given.items() if value is not None})
            if (after.policy, after.policy_weights) != (before.policy, before.policy_weights):
                spaces = self._spaces.values()
                for put_in_place in [space.ranked_by(after.make_policy) for space in spaces]:
                    put_in_place()
            shared.configure(after)
        return before.differences(after)

    def attach_cold(self, cold: ColdTier, *, name: str = "") -> None:
        """Have a cold tier, where there is none, while the store is used. Nothing is known to be there.

        Args:
            cold: the tier; closed with the store, or when it is detached. Where this raises it stays its
                caller's.
            name: names it where an arena outlives this process, as ``cold`` of `ArenaFile`.

        Raises:
            ConfigError: there is a cold tier; `cold` is none, or never keeps blocks of a space as large.
            ClosedError: it is closed, or the store is.
        """
        expect_cold_tier(cold)
        name = expect_text("name", name, empty=True)
        shared = self._shared
        with self._switching:
            with shared.lock():
                shared.check_open()
                if shared.cold.tier is not None:
                    raise ConfigError("cold", "there is a cold tier: it is detached before another comes")
                for space in self._spaces.values():
                    cold.check_block(space.layout.block_bytes)
                if self._file is not None:
                    self._file.set_cold(name)
                shared.cold.attach(cold)
                shared.cold_reads = LinkEstimate()  # of this one nothing is known
            self._start_cleaner()

    def calibrate_cold(self, link: LinkCost | None) -> None:
        """Begin with what reading the cold tier was calibrated to take; what it does take is learned."""
        if link is not None:
            expect_type("link", link, LinkCost, "a LinkCost or None")
        with self._shared.lock():
            self._shared.cold_reads = LinkEstimate(link)

    def detach_cold(self, deadline: float = 30.0) -> int:
        """Be without the cold tier while the store is used, and close it when the calls under way have ended.

        Loads end with what has arrived. What is purged while there is none is told to the next one.

        Args:
            deadline: seconds for writing there first what has no copy; 0: none.

        Returns:
            how many committed blocks it has no copy of.

        Raises:
            ConfigError: there is none, or `deadline` is no number of seconds.
            ClosedError: the store is closed.
        """
        left = self.flush(deadline)
        shared = self._shared
        with self._switching:
            with shared.lock():
                shared.check_open()
                if shared.cold.tier is None:
                    raise ConfigError("cold", "there is no cold tier")
                cold = shared.cold.detach()
                # Before the name goes: killed in between, the next process knows of no copies.
                for space in self._spaces.values():
                    space.forget_copies()
                if self._file is not None:
                    self._file.set_cold("")
            if self._cleaner is not None:
                self._cleaner.join()
                self._cleaner = None
        cold.close()
        return left

    @property
    def records(self) -> RecordFile | None:
        """Where it is written down what outlives this process; None where nothing does."""
        return None if self._file is None else self._file.records

    def match(self, spaces: Sequence[HostSpace], hashes: Sequence[bytes]) -> list[Lease]:
        """Lease the leading blocks that all of several spaces have: a hit needs every shard.

        Args:
            spaces: the shards of one model; their chains are the same.
            hashes: prefix hashes in order.

        Returns:
            one lease a space, all of the same length.

        Raises:
            ConfigError: `spaces` are none, or `hashes` no prefix hashes.
            ClosedError: the store is closed.
        """
        if not isinstance(spaces, Sequence):
            raise ConfigError("spaces", f"must be a list of spaces, got {shown(spaces)}")
        for space in spaces:
            expect_type("spaces", space, HostSpace, "a list of spaces")
        hashes = expect_byte_strings("hashes", hashes, HASH_BYTES)
        with self._shared.lock():
            self._shared.check_open()
        leases: list[Lease] = []
        try:
            for space in spaces:
                # Not further than the shards before: what these lack is no hit.
                leases.append(space.match(hashes[: len(leases[-1])] if leases else hashes))
            for lease in leases:
                lease.shorten(len(leases[-1]))
        except BaseException:
            for lease in leases:
                lease.release()
            raise
        return leases

    def evict_where(
        self,
        *,
        tenant: str | None = None,
        spaces: Collection[bytes] | None = None,
        hashes: Sequence[bytes] | None = None,
        older_than: float | None = None,
        tier: str = "host",
        most_bytes: int | None = None,
        dry_run: bool = False,
        deadline: float = 30.0,
    ) -> EvictReport:
        """Let blocks go that all of this is true of; what is None restricts nothing.

        From host memory go blocks that nobody leases or has pinned, longest unused first. From the cold tier
        goes what it has of whole spaces, or of named blocks: it knows neither ages nor amounts.

        Args:
            tenant: blocks of this tenant.
            spaces: blocks of spaces of these ids.
            hashes: these blocks.
            older_than: blocks that were last used so many seconds ago or longer. What was there before this
                store was opened counts as used then.
            tier: ``host`` or ``cold``.
            most_bytes: of blocks that go.
            dry_run: tell what would go, and change nothing.
            deadline: seconds that the cold tier may take.

        Raises:
            ConfigError: an argument is of a wrong type or out of range, there is no such space, or the cold
                tier cannot tell what is asked for.
            ColdTierUnavailableError: there is no cold tier, or it did not remove all in time.
            ClosedError: the store is closed.
        """
        tier = expect_choice("tier", tier, ("host", "cold"))
        if hashes is not None:
            hashes = list(dict.fromkeys(expect_byte_strings("hashes", hashes, HASH_BYTES)))
        if older_than is not None:
            older_than = expect_seconds("older_than", older_than, MOST_AGE)
        if most_bytes is not None:
            most_bytes = expect_integer("most_bytes", most_bytes, 0, MOST_BYTES)
        dry_run, deadline = expect_flag("dry_run", dry_run), expect_seconds("deadline", deadline)
        chosen = [space.evictions for space in self._chosen(tenant, spaces)]
        if tier == "host":
            return evict_from_host(
                self._shared,
                chosen,
                hashes=hashes,
                older_than=older_than,
                most_bytes=most_bytes,
                dry_run=dry_run,
            )
        for name, value in (("older_than", older_than), ("most_bytes", most_bytes)):
            if value is not None:
                raise ConfigError(name, "a cold tier knows neither ages nor amounts: this is for host memory")
        return evict_from_cold(self._shared, chosen, hashes=hashes, deadline=deadline, dry_run=dry_run)

    def _chosen(self, tenant: str | None, spaces: Collection[bytes] | None) -> list[HostSpace]:
        """The open spaces of a tenant and of these ids."""
        with self._shared.lock():
            self._shared.check_open()
            known = dict(self._spaces)
        if spaces is not None:
            ids = expect_byte_strings("spaces", list(spaces), HASH_BYTES)
            for one in ids:
                if one not in known:
                    raise ConfigError("spaces", f"there is no space {one.hex()}")
            known = {one: known[one] for one in ids}
        if tenant is None:
            return list(known.values())
        tenant = check_tenant("tenant", tenant)
        return [space for space in known.values() if space.tenant == tenant]

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with every later event of host memory and cold tier; returns how to end it.

        Raises:
            ConfigError: it cannot be called.
            ClosedError: the store is closed.
        """
        with self._shared.lock():
            self._shared.check_open()
        return self.events.subscribe(listener)

    def subscribe_lost(self, listener: LostListener) -> Callable[[], None]:
        """Of no effect: no lease ends here that nobody released. For a sidecar's, see `Connection`."""
        return lambda: None

    def flush(self, deadline: float = 30.0) -> int:
        """Write what has no copy in the cold tier there, batch by batch, in the order of eviction.

        What is written last stays longest where the cold tier must make room: what would be evicted last,
        and of every prefix its beginning.

        Returns:
            how many committed blocks still have no copy after `deadline` seconds.

        Raises:
            ConfigError: `deadline` is no number of seconds.
            ClosedError: the store is closed.
        """
        deadline = expect_seconds("deadline", deadline)
        shared = self._shared
        with shared.lock():
            shared.check_open()
        end = time.monotonic() + deadline
        while self.cold is not None and time.monotonic() < end:
            if self._written_by_another_thread(end):
                continue
            with shared.lock():
                # What the background thread is writing just now is as good as written.
                if not any(space.cleaning for space in self._spaces.values()):
                    break
                shared.changed.wait(max(0.0, end - time.monotonic()))
        with shared.lock():
            return sum(space.dirty for space in self._spaces.values())

    def close(self, *, drain: float = 0.0, keep_cold: bool = False) -> None:
        """Stop the background work and give the memory back. Idempotent.

        Args:
            drain: seconds to spend on writing to the cold tier what has no copy there.
            keep_cold: leave the cold tier open, for whoever has it.

        Raises:
            ConfigError: an argument is of a wrong type or out of range; the store is not closed.
        """
        drain = expect_seconds("drain", drain)
        keep_cold = expect_flag("keep_cold", keep_cold)
        if self._shared.closed:
            return
        if drain > 0 and self.cold is not None:
            left = self.flush(drain)
            if left:
                _log.warning("closed with %d blocks not in the cold tier", left)
        with self._switching:
            self._shared.stop()
        self._flusher.shutdown()
        if self._cleaner is not None:
            self._cleaner.join()
        try:
            self._shared.close(keep_cold=keep_cold)
        finally:
            if self._file is not None:
                self._file.close()

    def check_integrity(self) -> None:
        """Prove that every extent and slot has one owner and every index agrees with its slots.

        Raises:
            IntegrityError: naming the first thing that does not agree.
        """
        self.arena.check_integrity()
        with self._shared.lock():
            self._shared.check_extents()
            for space in self._spaces.values():
                space.check_integrity()
        if self.cold is not None:
            self.cold.check_integrity()

    def __enter__(self) -> HostStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _new_records(self, layout: KVLayout, shard: str, tenant: str) -> SlotRecords:
        policy, extents = self._shared.settings.make_policy, self.arena.num_extents
        if self._file is None:
            return SlotRecords(self.arena.extent_bytes // layout.block_bytes, extents, policy)
        return new_records(self._file.records, layout, shard, tenant, extents, policy)

    def _take_over(self, saved: SavedSpace) -> None:
        """A space that another process had is this one's."""
        shared = self._shared
        space = HostSpace(shared, saved.name.layout, saved.name.shard, saved.name.tenant, saved.records)
        self._spaces[space.id] = space
        if saved.barred is not None:
            space.bar(saved.barred)
        shared.clock.start_after(saved.records.last_use)
        shared.stats.adopted += saved.adopted.committed
        shared.stats.damaged += saved.adopted.damaged
        if saved.adopted.damaged:
            _log.error(
                "%d records of a space of %s are damaged: their slots are out of use until nobody is left "
                "who might write there",
                saved.adopted.damaged,
                saved.name.layout,
            )

    def _written_by_another_thread(self, until: float) -> int:
        """`_write_batches` in a thread that no interrupt reaches, so that slots are let go of when read."""
        try:
            batches = self._flusher.submit(self._write_batches, until)
        except RuntimeError as error:
            raise ClosedError("the host store is closed") from error
        return batches.result()

    def _write_batches(self, until: float) -> int:
        """Write one batch of every space to the cold tier; how many blocks were written."""
        return sum(space.write_to_cold(flush=True, until=until) for space in self._opened())

    def _opened(self) -> list[HostSpace]:
        """The spaces, also while others are being opened."""
        with self._shared.lock():
            return list(self._spaces.values())

    def _start_cleaner(self) -> None:
        self._cleaner = threading.Thread(target=self._clean, name="kvpager-clean", daemon=True)
        self._cleaner.start()

    def _clean(self) -> None:
        """The background thread that keeps the coldest blocks copied to the cold tier, while there is one."""
        shared = self._shared
        while True:
            with shared.lock():
                if not shared.closed and shared.cold.tier is not None:
                    shared.changed.wait(_CLEAN_POLL_SECONDS)
                if shared.closed or shared.cold.tier is None:
                    return
            began = time.monotonic()
            try:
                if shared.cold.is_quiet:
                    self._ask_whether_cold_is_there()
                for space in self._opened():
                    space.retry_purges()
                written = sum(space.write_to_cold() for space in self._opened()) if shared.cold.is_due else 0
            except ClosedError:
                if not shared.closed:
                    _log.error("the cold tier was closed under its host store, which goes on without it")
                return
            if not written:
                # Looking costs a pass over the coldest blocks: not after every single change, and the more
                # seldom the more of them there are.
                rest = _CLEAN_REST * (time.monotonic() - began)
                time.sleep(min(max(_CLEAN_PAUSE_SECONDS, rest), _CLEAN_POLL_SECONDS))

    def _ask_whether_cold_is_there(self) -> None:
        """So that operators know of a tier that is gone before somebody needs it."""
        shared = self._shared
        with shared.cold.use() as cold:
            if cold is None:
                return
            status = cold.ping(shared.settings.cold_deadline)
        with shared.lock():
            shared.cold.heard(np.array([status], np.uint8))

    def _does_not_fit(self, layout: KVLayout) -> ConfigError:
        """Which setting to change for a block that no extent holds: the one that the user gave."""
        extent, block = self.arena.extent_bytes, layout.block_bytes
        if self._extents_chosen:
            return ConfigError("extent_bytes", f"{extent} bytes do not hold a block of {block} bytes")
        if block <= LARGEST_EXTENT:
            return ConfigError(
                "host_bytes",
                f"{self.arena.capacity_bytes} bytes are too few for blocks of {block} bytes: give at least "
                f"{capacity_for(block)}",
            )
        return ConfigError(
            "block_size",
            f"blocks of {layout.block_size} tokens are {format_bytes(block)} each, and host memory comes in "
            f"extents of at most {format_bytes(LARGEST_EXTENT)} where extent_bytes does not say otherwise",
        )


def _saved_in(arena: ArenaFile, settings: StoreSettings, records: RecordFile) -> list[SavedSpace]:
    """The spaces in an arena's records, if the memory that they say they have is there.

    Raises:
        IntegrityError: it is not, or the records are damaged.
    """
    saved = read_spaces(records, settings.make_policy, same_cold=arena.same_cold)
    extents = sum(len(one.records.extents) for one in saved)
    if os.fstat(arena.file.fileno()).st_blocks * 512 < extents * records.identity.extent_bytes:
        raise IntegrityError("it holds fewer bytes than its records say")
    return saved
