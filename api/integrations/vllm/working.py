"""The connector's half in a worker of vLLM: copies, in threads beside the engine's steps."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
import torch

from ....kvstore.handles import ReserveStatus
from ....kvstore.lineage import ChainPlace, Lineage
from ....tiers.errors import KVPagerError
from ....tiers.layout import KVLayout
from ...remote_space import RemoteSpace
from ..link import SidecarLink
from .metadata import Load, ShardMetadata, StepMetadata, Store, WorkerMetadata
from .metrics import ConnectorStats
from .pages import CudaPages, Fence, Pages, layout_of, pages_of
from .settings import ConnectorSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["WorkerHalf", "shard_name"]

_Job = TypeVar("_Job", Load, Store)

_IDLE_SECONDS: Final = 0.001
"""How long a step that computes nothing waits for a copy."""
_ROOM_SECONDS: Final = 0.05
"""How long a store waits for room in the sidecar."""
_THERE: Final = (int(ReserveStatus.PRESENT), int(ReserveStatus.PENDING))
"""Has it, or will when another writer is done."""


class WorkerHalf:
    """Copies blocks as the scheduler's half says. Loads and stores have a thread each.

    Args:
        config: vLLM's.
        caches: its KV caches.
        settings: the user's.
        log: where it says what a user should know.
    """

    def __init__(
        self, config: VllmConfig, caches: KVCacheConfig, settings: ConnectorSettings, log: logging.Logger
    ) -> None:
        parallel = config.parallel_config
        self._config = config
        self._caches = caches
        self._log = log
        self._link = SidecarLink(
            settings.url,
            f"vllm-worker-{parallel.rank}",
            log,
            tenant=settings.tenant,
            seconds=settings.lookup_seconds,
        )
        self._shard = ""
        self._layout: KVLayout | None = None
        self._pages: Pages | None = None
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="kvpager-load")
        self._storer = ThreadPoolExecutor(1, thread_name_prefix="kvpager-store")
        self._changed = threading.Condition()
        """Of what follows, which threads write and the engine's thread takes."""
        self._under_way = 0
        self._loaded: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._done = WorkerMetadata()
        self._stats = ConnectorStats()

    def register(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The engine's KV tensors, by layer.

        Raises:
            LayoutError: they cannot be kept.
        """
        named = {
            name: tensors[name] for name in self._caches.kv_cache_groups[0].layer_names if name in tensors
        }
        self._layout = layout_of(self._config, self._caches, named)
        self._shard = _shard_of(named)
        self._pages = pages_of(self._layout, named)

    @property
    def metadata(self) -> ShardMetadata | None:
        """Which space its blocks are in; None before `register`."""
        return None if self._layout is None else ShardMetadata(self._layout, self._shard)

    def start_loads(self, step: StepMetadata) -> None:
        """Begin the loads of a step."""
        self._submit(self._loader, self._load, step.loads)

    def start_stores(self, step: StepMetadata) -> None:
        """Begin the stores of a step, whose blocks are written by what was launched until now."""
        self._submit(self._storer, self._store, step.stores)

    def wait_a_little(self) -> None:
        """Wait for a copy, if one is under way: the engine has nothing to compute."""
        with self._changed:
            if self._under_way and not self._loaded and not self._done.stored:
                self._changed.wait(_IDLE_SECONDS)

    def take_loaded(self) -> set[str]:
        """Ids of requests whose loads are over since the last time."""
        with self._changed:
            taken, self._loaded = self._loaded, set()
            return taken

    def take_failed(self) -> set[int]:
        """vLLM's numbers of blocks that did not come since the last time."""
        with self._changed:
            taken, self._failed_blocks = self._failed_blocks, set()
            return taken

    def take_done(self) -> WorkerMetadata | None:
        """What else the scheduler's half is to know since the last time."""
        with self._changed:
            if not self._done.stored and not self._done.failed:
                return None
            taken, self._done = self._done, WorkerMetadata()
            return taken

    def take_stats(self) -> ConnectorStats | None:
        """What was counted since the last time."""
        with self._changed:
            if self._stats.is_empty():
                return None
            taken, self._stats = self._stats, ConnectorStats()
            return taken

    def close(self) -> None:
        """End when what is being copied is copied. Idempotent."""
        self._loader.shutdown()
        self._storer.shutdown()
        if self._pages is not None:
            self._pages.close()
        self._link.close()

    # Inside

    def _submit(
        self, threads: ThreadPoolExecutor, run: Callable[[_Job, Fence | None], None], jobs: Sequence[_Job]
    ) -> None:
        if not jobs or self._pages is None:
            return
        fence = self._pages.fence()
        with self._changed:
            self._under_way += len(jobs)
        for job in jobs:
            threads.submit(run, job, fence)

    def _space(self) -> RemoteSpace | None:
        if self._layout is None:
            return None
        space = self._link.space(self._layout, self._shard)
        if space is not None and isinstance(self._pages, CudaPages) and self._link.device is None:
            # By number: this thread's own GPU is the first one, whatever the engine's is.
            self._link.map_device(str(self._pages.device))
        return space

    def _load(self, job: Load, fence: Fence | None) -> None:
        came, began = 0, time.monotonic()
        try:
            came = self._copy_in(job, fence)
        except KVPagerError as error:
            self._log.warning("kvpager: blocks of a request did not come, and are computed: %s", error)
        except Exception:
            self._log.exception("kvpager: a load failed, and its blocks are computed")
            raise
        finally:
            self._end_load(job, came, time.monotonic() - began)

    def _end_load(self, job: Load, came: int, seconds: float) -> None:
        lost = job.blocks[came:]
        with self._changed:
            self._under_way -= 1
            self._loaded.add(job.request)
            self._failed_blocks.update(lost)
            if lost:
                self._done.failed.add(job.request)
            self._stats.add(
                loaded_blocks=came,
                loaded_bytes=came * (self._layout.block_bytes if self._layout else 0),
                load_seconds=seconds,
                failed_blocks=len(lost),
            )
            self._changed.notify_all()

    def _copy_in(self, job: Load, fence: Fence | None) -> int:
        space, pages = self._space(), self._pages
        if space is None or pages is None:
            return 0
        lost = self._link.lost
        with space.match(job.names, start=ChainPlace(job.before, job.depth)) as lease:
            count = len(lease)
            if isinstance(pages, CudaPages):
                readable = space.readable_in_place(lease.slots)
                count = count if readable.all() else int(np.argmin(readable))
            if count:
                delta = space.device_delta if isinstance(pages, CudaPages) else 0
                pages.load(job.blocks[:count], space.addresses(lease.slots[:count]) + delta, fence)
            if self._link.lost is not lost:  # its memory may have come to hold other blocks meanwhile
                return 0
        return count

    def _store(self, job: Store, fence: Fence | None) -> None:
        stored, present, began = 0, 0, time.monotonic()
        try:
            stored, present = self._copy_out(job, fence)
        except KVPagerError as error:
            self._log.warning("kvpager: blocks were not kept: %s", error)
        except Exception:
            self._log.exception("kvpager: a store failed, and its blocks are not kept")
            raise
        finally:
            self._end_store(job, stored, present, time.monotonic() - began)

    def _end_store(self, job: Store, stored: int, present: int, seconds: float) -> None:
        with self._changed:
            self._under_way -= 1
            self._done.stored += Counter({job.number: 1})
            if stored + present < len(job.blocks):
                self._done.refused.add(job.number)
            self._stats.add(
                stored_blocks=stored,
                stored_bytes=stored * (self._layout.block_bytes if self._layout else 0),
                store_seconds=seconds,
                present_blocks=present,
                refused_blocks=len(job.blocks) - stored - present,
            )
            self._changed.notify_all()

    def _copy_out(self, job: Store, fence: Fence | None) -> tuple[int, int]:
        """How many blocks were copied, and how many were there already."""
        space, pages = self._space(), self._pages
        if space is None or pages is None:
            return 0, 0
        lineage = Lineage.of_chain(job.names, ChainPlace(job.before, job.depth))
        with space.reserve(job.names, wait=_ROOM_SECONDS, lineage=lineage) as reservation:
            new = reservation.new
            present = int(np.count_nonzero(np.isin(reservation.status, _THERE)))
            if isinstance(pages, CudaPages):
                new = new[space.readable_in_place(reservation.slots[new])]
            if len(new):
                delta = space.device_delta if isinstance(pages, CudaPages) else 0
                blocks = [job.blocks[at] for at in new.tolist()]
                pages.store(blocks, space.addresses(reservation.slots[new]) + delta, fence)
                reservation.commit(new)
        return len(new), present


def _shard_of(layers: Collection[str]) -> str:
    """The part of the model that this worker has, with these layers."""
    from vllm.distributed import get_pp_group, get_tp_group

    pipeline, tensor = get_pp_group(), get_tp_group()
    return shard_name(
        (pipeline.rank_in_group, pipeline.world_size), (tensor.rank_in_group, tensor.world_size), layers
    )


def shard_name(pipeline: tuple[int, int], tensor: tuple[int, int], layers: Collection[str]) -> str:
    """The part of a model that a rank of so many has, of layers (`pipeline`) and of heads (`tensor`).

    Args:
        layers: names of its layers, in the order that a block has them. Ranks of as many pipelines may have
            others (``VLLM_PP_LAYER_PARTITION``), though no more of them.
    """
    names = hashlib.blake2b("\n".join(layers).encode(), digest_size=8).hexdigest()
    return f"pp{pipeline[0]}/{pipeline[1]} tp{tensor[0]}/{tensor[1]} layers {names}"
