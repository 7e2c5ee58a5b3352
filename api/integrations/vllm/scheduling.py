"""The connector's half in vLLM's scheduler: which blocks are loaded, and which are kept."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ....kvstore.lineage import ChainPlace
from ..link import SidecarLink
from .announcing import Announcements, Stored
from .identity import ChainRoots
from .lookups import Lookup, Lookups
from .metadata import Load, ShardMetadata, StepMetadata, Store, WorkerMetadata
from .metrics import ConnectorStats
from .naming import RequestNames, can_be_named
from .settings import ConnectorSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["SchedulerHalf"]

_DIGEST_SECONDS: Final = 5.0
"""How long an engine's start waits for the digest of its weights."""
_CONNECT_SECONDS: Final = 1.0
_MOST_EARLY: Final = 64
"""Requests that are looked up when they come, and hold leases until they are scheduled."""
_IDLE_SECONDS: Final = 0.001
"""How long a step that computes nothing waits for an answer: else it would take the interpreter from whoever
reads it."""
_NAMED_HERE: Final = 4
"""So many blocks are named in the scheduler's thread at most: those that requests fill as they decode."""
_STORING_SHARE: Final = 4
"""At most one in so many of vLLM's blocks is kept from reuse because it is being stored."""


@dataclass
class _Tracked:
    """A request that has come and not finished."""

    request: Request
    named: bool
    """Whether its blocks can have names."""
    lookup: Lookup | None = None
    names: RequestNames | None = None
    local: int = 0
    """Tokens that vLLM had of it when it was asked last."""
    offered: int = 0
    """Leading blocks that were loaded from the sidecar, or handed to be stored."""


@dataclass(frozen=True)
class _Unnamed:
    """Blocks that are full and kept from reuse, and are stored when they have their names."""

    request: Request
    names: RequestNames
    naming: Future[list[bytes]] | None
    """By a thread; None: there are few to name."""
    first: int
    """Index of the first one in its request."""
    blocks: list[int]


@dataclass
class _Storing:
    """A store that workers have not all finished."""

    blocks: list[int]
    left: int
    """Workers that are not done with it."""
    stored: Stored | None
    """What is announced when they are."""
    refused: bool = False
    """Whether a worker has not kept all of it."""


class SchedulerHalf:
    """Decides in each step of the scheduler. Every call is made in its thread, and none asks the sidecar.

    Args:
        config: vLLM's.
        settings: the user's.
        block_size: tokens of a block.
        log: where it says what a user should know.
    """

    def __init__(
        self, config: VllmConfig, settings: ConnectorSettings, block_size: int, log: logging.Logger
    ) -> None:
        self._settings = settings
        self._block_size = block_size
        self._log = log
        self._roots = ChainRoots(config, log)
        self._link = SidecarLink(
            settings.url,
            "vllm-scheduler",
            log,
            tenant=settings.tenant,
            seconds=settings.lookup_seconds,
        )
        self._lookups = Lookups(self._link, self._roots, block_size, settings.lookup_seconds, log)
        self._tracked: dict[str, _Tracked] = {}
        self._loading: dict[str, Lookup] = {}
        self._loads: list[Load] = []
        self._unnamed: list[_Unnamed] = []
        self._storing: dict[int, _Storing] = {}
        self._blocks_storing = 0
        self._last_store = 0
        self._workers = 1
        self._pool: BlockPool | None = None
        self._stats = ConnectorStats()
        self._announcements: Announcements | None = None
        events = config.kv_events_config
        if events is not None and events.enable_kv_cache_events:
            self._announcements = Announcements(lambda: self._link.event_gaps)
            self._link.subscribe(self._announcements.heard)

    def bind_pool(self, pool: BlockPool) -> None:
        """The blocks of the engine."""
        self._pool = pool

    def serve(self, workers: Mapping[tuple[int, int], ShardMetadata]) -> None:
        """The spaces of the workers, by their pipeline and tensor ranks; the engine starts serving now."""
        self._workers = len(workers)
        shards = {(shard.layout, shard.shard): shard for shard in workers.values()}
        self._lookups.serve(list(shards.values()))
        self._link.wait(_CONNECT_SECONDS)
        self._roots.wait(_DIGEST_SECONDS)

    def add(self, request: Request) -> None:
        """A request came."""
        tracked = self._tracked[request.request_id] = _Tracked(request, can_be_named(request))
        if self._lookups.under_way < _MOST_EARLY and len(self._tracked) <= _MOST_EARLY:
            self._look_up(tracked)

    def matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Tokens after the first `computed` that can be loaded, and whether that is to be waited for.

        None: that is not known yet, ask again.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not tracked.named:
            return 0, False
        if self._readable(request) * self._block_size <= computed:
            return 0, False
        lookup = tracked.lookup
        if lookup is None or lookup.limit != self._readable(request):
            if not self._link.ready:
                return 0, False
            lookup = self._look_up(tracked)
        if not lookup.done:
            lookup.await_answer()
            if not lookup.late:
                return None, False
            if lookup.wanted:
                self._stats.add(late_lookups=1)
                lookup.release()
        more = lookup.found * self._block_size - computed if lookup.wanted else 0
        tracked.local = computed
        return (more, True) if more > 0 else (0, False)

    def allocated(self, request: Request, blocks: KVCacheBlocks, more: int) -> None:
        """vLLM has blocks for the request; `more` tokens are to be loaded into them."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.lookup is None:
            return
        lookup = tracked.lookup
        tracked.names, tracked.lookup = lookup.names or tracked.names, None
        names = tracked.names
        first, count = tracked.local // self._block_size, more // self._block_size
        if not lookup.done or not count or names is None:
            if not lookup.done:
                # Its thread is still naming blocks for it: they are taken from it later.
                tracked.lookup = lookup
            else:
                lookup.release()
            return
        chain = names.first(first + count)
        (numbers,) = blocks.get_block_ids()
        place = ChainPlace.at(chain, first)
        self._loads.append(
            Load(
                request.request_id,
                chain[first:],
                place.depth,
                place.before,
                numbers[first : first + count],
            )
        )
        self._loading[request.request_id] = lookup
        tracked.offered = first + count
        cold = min(lookup.from_cold, count)
        self._stats.add(
            hit_requests=1,
            hit_tokens_host=(count - cold) * self._block_size,
            hit_tokens_cold=cold * self._block_size,
        )

    def plan(self, output: SchedulerOutput) -> StepMetadata:
        """What workers are to do in this step."""
        loads, self._loads = self._loads, []
        idle = not output.total_num_scheduled_tokens
        stores = [] if self._settings.store == "none" else self._stores(output)
        if idle and not loads and self._lookups.under_way:
            self._lookups.wait_a_little(_IDLE_SECONDS)
        return StepMetadata(loads, stores, idle)

    def finish_step(self, output: KVConnectorOutput) -> None:
        """What workers have done."""
        done = output.kv_connector_worker_meta
        if isinstance(done, WorkerMetadata):
            for number, count in done.stored.items():
                self._count_stored(number, count, refused=number in done.refused)
            for name in done.failed:
                # What did not come is computed, and offered again.
                if (tracked := self._tracked.get(name)) is not None:
                    tracked.offered = 0
        for name in output.finished_recving or ():
            if (lookup := self._loading.pop(name, None)) is not None:
                lookup.release()

    def finish(self, request: Request) -> None:
        """A request ends; what is loaded for it goes on until the worker says that it is over."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None and tracked.lookup is not None:
            tracked.lookup.release()

    @property
    def storing(self) -> bool:
        """Whether blocks are kept from reuse because they are being stored."""
        return bool(self._storing or self._unnamed)

    def reset(self) -> None:
        """What is kept is not of this engine's weights any more."""
        self._roots.reset()
        for tracked in self._tracked.values():
            # Its first blocks are of the weights before.
            tracked.named = False
            if tracked.lookup is not None:
                tracked.lookup.release()
                tracked.lookup = None

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Blocks that came into host memory or left it since the last time, where vLLM publishes events."""
        return () if self._announcements is None else self._announcements.take()

    def take_stats(self) -> ConnectorStats | None:
        """What was counted since the last time."""
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, ConnectorStats()
        return taken

    def close(self) -> None:
        """End. Idempotent."""
        self._lookups.close()
        for tracked in self._tracked.values():
            if tracked.lookup is not None:
                tracked.lookup.release()
        for lookup in self._loading.values():
            lookup.release()
        self._link.close()

    # Inside

    def _readable(self, request: Request) -> int:
        """Leading blocks that may be loaded: one token at least is computed."""
        if request.skip_reading_prefix_cache:
            return 0
        return int(request.num_tokens - 1) // self._block_size

    def _look_up(self, tracked: _Tracked) -> Lookup:
        before = tracked.lookup
        if before is not None:
            before.release()
            tracked.names = before.names or tracked.names
        limit = self._readable(tracked.request) if tracked.named else 0
        tracked.lookup = self._lookups.begin(tracked.request, limit, tracked.names)
        return tracked.lookup

    def _names_of(self, tracked: _Tracked) -> RequestNames | None:
        lookup = tracked.lookup
        if lookup is not None and lookup.done:
            tracked.names = lookup.names or tracked.names
            lookup.release()
            tracked.lookup = None
        return tracked.names

    def _stores(self, output: SchedulerOutput) -> list[Store]:
        """Blocks that this step fills, or earlier ones that were not handed over then."""
        pool, tables = self._pool, output.kv_connector_block_state
        if pool is None or tables is None or not self._link.ready:
            return self._named_stores()
        most = max(len(pool.blocks) // _STORING_SHARE, 1)
        for name, scheduled in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(name)
            if tracked is None or not tracked.named:
                continue
            request = tracked.request
            # What is drafted, or sampled by a step under way, is not known: it comes with later steps.
            known = min(request.num_computed_tokens + scheduled, request.num_tokens)
            if self._settings.store == "prompt":
                known = min(known, request.num_prompt_tokens)
            first, full = tracked.offered, known // self._block_size
            full = min(full, first + most - self._blocks_storing)
            if full <= first:
                continue
            names = self._names_of(tracked)
            numbers = tables.get_block_ids(name)
            if names is None or numbers is None:
                continue
            blocks = numbers[0][first:full]
            # A block whose request ends, or is preempted, is not written by another before it is copied.
            pool.touch([pool.blocks[number] for number in blocks])
            self._blocks_storing += len(blocks)
            tracked.offered = full
            naming = None if names.known >= full - _NAMED_HERE else self._lookups.name(names, full)
            self._unnamed.append(_Unnamed(request, names, naming, first, blocks))
        return self._named_stores()

    def _named_stores(self) -> list[Store]:
        """Of the blocks that have their names by now, and that need few more."""
        stores: list[Store] = []
        waiting, self._unnamed = self._unnamed, []
        for one in waiting:
            full = one.first + len(one.blocks)
            if one.naming is not None and not one.naming.done():
                self._unnamed.append(one)
                continue
            if one.naming is not None and (error := one.naming.exception()) is not None:
                self._log.error("kvpager: blocks of a request were not kept: %s", error)
                self._let_go(one.blocks)
                continue
            chain = one.names.first(full)
            place, names = ChainPlace.at(chain, one.first), chain[one.first :]
            announced = None
            if self._announcements is not None:
                announced = Stored(one.request, one.first, names, self._block_size)
                self._announcements.expect(announced)
            self._last_store += 1
            stores.append(Store(self._last_store, names, place.depth, place.before, one.blocks))
            self._storing[self._last_store] = _Storing(one.blocks, self._workers, announced)
        return stores

    def _count_stored(self, number: int, count: int, *, refused: bool) -> None:
        storing = self._storing[number]
        storing.refused |= refused
        storing.left -= count
        if storing.left <= 0 and self._pool is not None:
            del self._storing[number]
            if storing.stored is not None and self._announcements is not None:
                if storing.refused:
                    self._announcements.refused(storing.stored)
                else:
                    self._announcements.stored(storing.stored)
            self._let_go(storing.blocks)

    def _let_go(self, blocks: list[int]) -> None:
        """These are not being stored any more."""
        self._blocks_storing -= len(blocks)
        if self._pool is not None:
            # The end of a prompt goes first.
            self._pool.free_blocks(self._pool.blocks[block] for block in reversed(blocks))
