"""`KVPagerHiCache`: what SGLang calls, answered from a sidecar."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
)

from ....kvstore.handles import Lease, ReserveStatus
from ....kvstore.lineage import NO_PARENT, ChainPlace, Lineage
from ....tiers.errors import KVPagerError, LayoutError
from ....tiers.layout import KVLayout
from ....tiers.mover import HostMover
from ...remote_space import RemoteSpace
from ..link import SidecarLink
from .counts import Counts, Tally
from .identity import PageNames, shard_of
from .pages import Addresses, PoolPages, flat_layout, flat_pieces, pool_kind
from .settings import BackendSettings
from .supported import check_sglang

if TYPE_CHECKING:
    from sglang.srt.observability.metrics_collector import StorageMetrics

__all__ = ["KVPagerHiCache"]

# Under SGLang's own name: its logging shows what is said there.
_log = logging.getLogger("sglang.kvpager")

_CONNECT_SECONDS: Final = 1.0
_DIGEST_SECONDS: Final = 5.0
"""How long an engine's start waits for the digest of its weights."""
_ROOM_SECONDS: Final = 0.05
"""How long a store waits for room in the sidecar."""
_CLEAR_SECONDS: Final = 30.0
_KV: Final = "kv"
"""SGLang's name of the pool that it registers first."""
_THERE: Final = (int(ReserveStatus.PRESENT), int(ReserveStatus.PENDING))
"""Has it, or will when another writer is done."""

_Copy = Callable[[npt.NDArray[np.int64], Addresses], None]
"""Copies between the pages at these positions of a batch, int64 [n], and blocks at these addresses."""


class KVPagerHiCache(HiCacheStorage):
    """A storage backend of SGLang's HiCache, see its base class for what each method is called for.

    Where the sidecar is absent or does not answer in time nothing is found or kept, and no call raises but
    `clear`. A hit of several keys is the longest run of them from the first. Safe to call from any thread.

    Args:
        storage_config: SGLang's; of its ``extra_config`` `BackendSettings` are taken.
        options: what else SGLang's factory gives to dynamic backends; of no effect.

    Raises:
        ConfigError: a setting is wrong.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, options: object = None) -> None:
        super().__init__()
        extra = storage_config.extra_config or {}
        self._settings = settings = BackendSettings.of(extra)
        self._release = check_sglang()
        self._by_pointer = bool(extra.get("interface_v1", 0))
        self._shard = shard_of(storage_config)
        self._names = PageNames(storage_config, settings.model, _log)
        self._link = SidecarLink(
            settings.url,
            f"sglang {self._shard}",
            _log,
            tenant=settings.tenant,
            seconds=settings.lookup_seconds,
        )
        self._tally = Tally(for_sglang=storage_config.enable_storage_metrics)
        self._mover = HostMover()
        self._pages: PoolPages | None = None
        self._flat: dict[tuple[torch.dtype, int], KVLayout] = {}
        """Layouts of tensors that were stored, or will be."""
        self._kind = ""
        self._clearing = threading.Lock()
        """Held while pages are published, and while all of them are removed."""
        self._clears = 0
        self._clear_is_due = False
        self._link.wait(_CONNECT_SECONDS)
        self._names.wait(_DIGEST_SECONDS)

    @property
    def counts(self) -> Counts:
        """What happened since this backend was made."""
        return self._tally.counts

    # Host pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """SGLang's host pool, whose pages these are.

        Raises:
            LayoutError: pages are to be copied by pointer, and it does not say where they lie.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._kind = pool_kind(mem_pool_host, self._release)
        if self._by_pointer:
            self._pages = PoolPages(mem_pool_host, self._release)
            return
        _log.info('kvpager: pages are copied one by one; "interface_v1": 1 has them copied in batches')
        page = mem_pool_host.get_dummy_flat_data_page()
        self._flat_layout(page)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """One more pool of a model that has several.

        Raises:
            LayoutError: it is another one than `register_mem_pool_host` has.
        """
        if str(host_pool_name) != _KV:
            raise LayoutError(
                f"this model keeps a pool named {host_pool_name} beside its KV (state-space layers, sliding "
                "windows, an indexer or a draft model), and KVPagerHiCache keeps KV alone: start SGLang "
                "without --hicache-storage-backend"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    # Lookups

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        names = self._names.of(keys)
        found = 0
        if names:
            layouts = self._flat.values() if self._pages is None else (self._pages.layout,)
            found = max((self._leading(layout, names) for layout in tuple(layouts)), default=0)
        self._tally.add(found_pages=found, missed_pages=len(keys) - found)
        return found

    # Pages of the host pool, by pointer

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        pages, tokens = self._pool_pages(keys, host_indices)
        came = self._load(pages.layout, keys, lambda at, blocks: pages.load(tokens[at], blocks))
        return [at < came for at in range(len(keys))]

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        pages, tokens = self._pool_pages(keys, host_indices)
        return self._store(pages.layout, keys, lambda at, blocks: pages.store(tokens[at], blocks), extra_info)

    # Tensors

    def get(
        self, key: str, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> torch.Tensor | None:
        targets = None if target_location is None else [target_location]
        return self.batch_get([key], targets)[0]

    def batch_get(
        self, keys: list[str], target_locations: Any | None = None, target_sizes: Any | None = None
    ) -> list[torch.Tensor | None]:
        """See the base class. Without targets tensors like the host pool's pages are made.

        Raises:
            LayoutError: targets are not contiguous tensors on the CPU, alike, one for each key.
        """
        if not keys:
            return []
        if target_locations is None:
            target_locations = [self._new_page() for _ in keys]
        targets, layout = self._alike(keys, target_locations)
        places = flat_pieces(targets)
        nbytes = targets[0].nbytes

        def copy(at: npt.NDArray[np.int64], blocks: Addresses) -> None:
            self._mover.copy_now(blocks, places[at], nbytes)

        came = self._load(layout, keys, copy)
        return [target if at < came else None for at, target in enumerate(targets)]

    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        return self.batch_set([key], [target_location if value is None else value])

    def batch_set(
        self,
        keys: list[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """See the base class.

        Raises:
            LayoutError: values are not tensors on the CPU, alike, one for each key.
        """
        if not keys:
            return True
        given = target_locations if values is None else values
        tensors, layout = self._alike(keys, given)
        tensors = [tensor.contiguous() for tensor in tensors]
        places = flat_pieces(tensors)
        nbytes = tensors[0].nbytes

        def copy(at: npt.NDArray[np.int64], blocks: Addresses) -> None:
            self._mover.copy_now(places[at], blocks, nbytes)

        return all(self._store(layout, keys, copy, None))

    # The rest

    def clear(self) -> None:
        """Have all pages of this backend's tenant be gone, of every engine and from every tier.

        Raises:
            KVPagerError: the sidecar does not answer. Until that was made up for nothing is found or kept.
        """
        with self._clearing:
            self._clears += 1
            self._clear_is_due = True
            self._clear_now()

    def get_stats(self) -> StorageMetrics:
        return self._tally.take()

    def close(self) -> None:
        """End the connection. Idempotent. SGLang calls it when it detaches the backend."""
        self._link.close()
        self._mover.close()
        if self._pages is not None:
            self._pages.close()

    # Inside

    def _clear_now(self) -> None:
        self._link.purge(self._settings.tenant, _CLEAR_SECONDS)
        self._clear_is_due = False

    def _space(self, layout: KVLayout) -> RemoteSpace | None:
        """Where these pages are; None where that cannot be asked now."""
        if not self._link.ready:
            return None
        if self._clear_is_due:
            try:
                with self._clearing:
                    if self._clear_is_due:
                        self._clear_now()
            except KVPagerError:
                self._link.pause()
                return None
        return self._link.space(layout, self._shard)

    def _leading(self, layout: KVLayout, names: list[bytes]) -> int:
        """How many of these, from the first, are in host memory or in the cold tier."""
        try:
            space = self._space(layout)
            if space is None:
                return 0
            # A look that counts as no use: whoever finds something gets it next.
            found = space.count_resident(names)
            if found is None:
                self._link.pause()
                return 0
            if found < len(names):
                rest = names[found:]
                with space.match(rest, cold_deadline=self._settings.lookup_seconds, start=None) as lease:
                    found += len(lease) + lease.cold
            return found
        except KVPagerError as error:
            _log.warning("kvpager: nothing is found: %s", error)
            return 0

    def _load(self, layout: KVLayout, keys: Sequence[str], copy: _Copy) -> int:
        """Copy what there is of these; returns how many pages came, from the first."""
        came, began = 0, time.monotonic()
        try:
            names = self._names.of(keys)
            space = None if not names else self._space(layout)
            if space is not None and names:
                with self._leased(space, names) as lease:
                    count, lost = len(lease), self._link.lost
                    if count:
                        copy(np.arange(count), space.addresses(lease.slots))
                    if self._link.lost is lost:  # else its memory may have held other pages meanwhile
                        came = count
        except KVPagerError as error:
            _log.warning("kvpager: pages did not come: %s", error)
            came = 0
        seconds = time.monotonic() - began
        self._tally.loaded(came, len(keys) - came, came * layout.block_bytes, seconds)
        return came

    def _leased(self, space: RemoteSpace, names: list[bytes]) -> Lease:
        """The leading pages that are in host memory, brought up from the cold tier where they are there."""
        seconds, began = self._settings.lookup_seconds, time.monotonic()
        lease = space.match(names, cold_deadline=seconds, start=None)
        if lease.cold and len(lease) < len(names):
            loaded = space.load(names[: len(lease) + lease.cold], seconds, start=None)
            lease.release()
            lease = loaded
        if not len(lease) and time.monotonic() - began >= seconds:
            self._link.pause()
        return lease

    def _store(
        self, layout: KVLayout, keys: Sequence[str], copy: _Copy, extra_info: HiCacheStorageExtraInfo | None
    ) -> list[bool]:
        """Keep these pages; returns of which ones the sidecar has, or will have, a copy."""
        kept = [False] * len(keys)
        stored, began = 0, time.monotonic()
        try:
            names = self._names.of(keys)
            space = None if not names else self._space(layout)
            if space is not None and names:
                clears = self._clears
                lineage = self._lineage(names, extra_info)
                with space.reserve(names, wait=_ROOM_SECONDS, lineage=lineage) as reservation:
                    new = reservation.new
                    if len(new):
                        copy(new, space.addresses(reservation.slots[new]))
                        with self._clearing:
                            if self._clears != clears:
                                return kept
                            reservation.commit(new)
                        stored = len(new)
                    there = np.isin(reservation.status, _THERE)
                there[new] = True
                kept = there.tolist()
        except KVPagerError as error:
            _log.warning("kvpager: pages were not kept: %s", error)
        finally:
            seconds, all_kept = time.monotonic() - began, sum(kept)
            self._tally.stored(
                stored, all_kept - stored, len(keys) - all_kept, stored * layout.block_bytes, seconds
            )
        return kept

    def _lineage(self, names: list[bytes], extra_info: HiCacheStorageExtraInfo | None) -> Lineage:
        """Pages of a batch follow each other; what is before them SGLang says where it is told to."""
        before = None if extra_info is None else extra_info.prefix_keys
        if before is None:
            return Lineage([NO_PARENT, *names[:-1]], np.zeros(len(names), dtype=np.int32))
        last = self._names.of(before[-1:]) or []
        return Lineage.of_chain(names, ChainPlace(last[-1], len(before) + 1) if last else ChainPlace())

    def _pool_pages(
        self, keys: Sequence[str], indices: torch.Tensor
    ) -> tuple[PoolPages, npt.NDArray[np.int64]]:
        if self._pages is None:
            raise LayoutError(
                'there is no host pool to copy by pointer: the extra config needs "interface_v1": 1, and '
                "register_mem_pool_host comes first"
            )
        return self._pages, self._pages.first_tokens(indices, len(keys))

    def _new_page(self) -> torch.Tensor:
        pool = getattr(self, "mem_pool_host", None)
        if pool is None:
            raise LayoutError("without a host pool targets are needed: what a page is like is not known")
        page: torch.Tensor = pool.get_dummy_flat_data_page()
        return page

    def _alike(self, keys: Sequence[str], tensors: Any) -> tuple[list[torch.Tensor], KVLayout]:
        """Tensors of one kind, one for each key, and how they are kept."""
        found = list(tensors or ())
        if len(found) != len(keys) or not all(isinstance(one, torch.Tensor) for one in found):
            raise LayoutError(f"{len(keys)} pages need as many tensors")
        first = found[0]
        if any(one.dtype != first.dtype or one.nbytes != first.nbytes for one in found):
            raise LayoutError("pages of one call are to be alike")
        return found, self._flat_layout(first)

    def _flat_layout(self, tensor: torch.Tensor) -> KVLayout:
        key = (tensor.dtype, tensor.nbytes)
        layout = self._flat.get(key)
        if layout is None:
            layout = self._flat[key] = flat_layout(tensor.nbytes, tensor.dtype, self._kind)
        return layout
