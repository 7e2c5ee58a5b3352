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

from ....kvstore.handles import Lease, Reservation, ReserveStatus
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
_COLD_SHARE: Final = 0.8
"""Of the time that is left to a call: what the cold tier may take of it. The rest is for the answer's way."""
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
        """Held while pages are published, and while all of them are removed. See `_publish`."""
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
            deadline = self._deadline()
            found = max((self._leading(layout, names, deadline) for layout in tuple(layouts)), default=0)
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
        self._clear_is_due = True  # at once: nobody waits for the lock with pages that are to be gone
        with self._clearing:
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
        """With the lock held."""
        self._clear_is_due = True
        self._clears += 1
        self._link.purge(self._settings.tenant, _CLEAR_SECONDS)
        self._clear_is_due = False

    def _start_clear(self) -> None:
        """Make up for a clear in a thread of its own, unless there is one: no call waits for it."""
        if self._clearing.acquire(blocking=False):
            try:
                threading.Thread(target=self._make_up, name="kvpager-clear", daemon=True).start()
            except BaseException:
                self._clearing.release()
                raise

    def _make_up(self) -> None:
        try:
            self._clear_now()
        except KVPagerError:
            self._link.pause()
        finally:
            self._clearing.release()

    def _deadline(self) -> float:
        """Of a call that is made now, of `time.monotonic()`."""
        return time.monotonic() + self._settings.lookup_seconds

    def _space(self, layout: KVLayout, deadline: float) -> RemoteSpace | None:
        """Where these pages are, for calls until then; None where that cannot be asked now."""
        if not self._link.ready:
            return None
        if self._clear_is_due:
            self._start_clear()
            return None
        space = self._link.space(layout, self._shard)
        # It may have been opened.
        return None if space is None or time.monotonic() >= deadline else space.until(deadline)

    def _leading(self, layout: KVLayout, names: list[bytes], deadline: float) -> int:
        """How many of these, from the first, are in host memory or in the cold tier."""
        try:
            space = self._space(layout, deadline)
            if space is None:
                return 0
            # A look that counts as no use: whoever finds something gets it next.
            found = space.count_resident(names)
            if found is None:
                self._link.pause()
                return 0
            if found < len(names) and (cold := _cold_seconds(deadline)):
                with space.match(names[found:], cold_deadline=cold, start=None) as lease:
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
            deadline = self._deadline()
            space = None if not names else self._space(layout, deadline)
            if space is not None and names:
                lost = self._link.lost
                with self._leased(space, names, deadline) as lease:
                    count = len(lease)
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

    def _leased(self, space: RemoteSpace, names: list[bytes], deadline: float) -> Lease:
        """The leading pages that are in host memory, brought up from the cold tier where they are there."""
        too_late = time.monotonic() + _cold_seconds(deadline)
        lease = space.match(names, cold_deadline=_cold_seconds(deadline), start=None)
        if lease.cold and len(lease) < len(names):
            with lease:  # which ends also where the load raises
                wanted = names[: len(lease) + lease.cold]
                lease = space.load(wanted, _cold_seconds(deadline), start=None)
        if not len(lease) and time.monotonic() >= too_late:
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
            clears = self._clears  # before it is seen whether one is due
            space = None if not names else self._space(layout, self._deadline())
            if space is not None and names:
                lineage = self._lineage(names, extra_info)
                with space.reserve(names, wait=_ROOM_SECONDS, lineage=lineage) as reservation:
                    new = reservation.new
                    if len(new):
                        if not self._publish(space, reservation, new, copy, clears):
                            return kept
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

    def _publish(
        self,
        space: RemoteSpace,
        reservation: Reservation,
        new: npt.NDArray[np.int64],
        copy: _Copy,
        clears: int,
    ) -> bool:
        """Copy pages, and let them be found unless all were cleared since `clears`; whether they are."""
        began = time.monotonic()
        copy(new, space.addresses(reservation.slots[new]))
        now = time.monotonic()
        # It is of what the sidecar takes.
        deadline = space.deadline = (space.deadline or began) + now - began
        # Where all are being removed just now, that is not waited for.
        if self._clear_is_due or not self._clearing.acquire(timeout=max(0.0, deadline - now)):
            return False
        try:
            if self._clears != clears:
                return False
            reservation.commit(new)
        finally:
            self._clearing.release()
        return True

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


def _cold_seconds(deadline: float) -> float:
    """What the cold tier may take of the time until then; 0 where it has passed."""
    return max(0.0, deadline - time.monotonic()) * _COLD_SHARE
