"""Loads prompts' blocks into caches, and keeps what caches have, in a thread beside the model."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np

from ....kvstore.calls import SpaceCalls
from ....kvstore.handles import Lease, ReserveStatus
from ....kvstore.lineage import ChainPlace, Lineage
from ....tiers.errors import KVPagerError
from .copying import Filling, KVTensors, Snapshot
from .homes import Home
from .model_shape import ModelShape

__all__ = ["Keeper", "PagerStats"]

_BATCH_BYTES: Final = 256 << 20
"""Blocks that are leased or reserved at a time: a prompt may be larger than host memory."""
_COLD_SECONDS: Final = 0.1
"""How long counting what the cold tier has may take."""
_ROOM_SECONDS: Final = 1.0
"""How long a save waits for room, which nobody waits for."""
_THERE: Final = (int(ReserveStatus.PRESENT), int(ReserveStatus.PENDING))


@dataclass(frozen=True)
class PagerStats:
    """What a pager did so far.

    Attributes:
        prompts: rows that a cache was asked for.
        hit_prompts: those of which something was found.
        prompt_tokens: of all of them.
        hit_tokens: found, and not computed again.
        loaded_bytes: copied for that.
        load_seconds: that it took.
        stored_blocks: kept.
        present_blocks: not kept because they were there.
        refused_blocks: not kept for want of room, or because there was no answer.
        store_seconds: that keeping took, in its thread.
    """

    prompts: int = 0
    hit_prompts: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    stored_blocks: int = 0
    present_blocks: int = 0
    refused_blocks: int = 0
    store_seconds: float = 0.0


class _Follower(Protocol):
    """A cache that may have something that is not kept yet."""

    def offer_rest(self) -> None:
        """Have it kept."""
        ...


class Keeper:
    """What the caches of one pager share. Any thread may call.

    Args:
        home: where blocks are kept; closed with this.
        shape: of the model.
        seconds: how long a prompt waits at most for its blocks to come up from a cold tier.
        log: where it says what a user should know.
    """

    def __init__(self, home: Home, shape: ModelShape, seconds: float, log: logging.Logger) -> None:
        self._home = home
        self._shape = shape
        self._seconds = seconds
        self._log = log
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvpager-store")
        self._lock = threading.Lock()
        self._stats = PagerStats()
        self._pid = os.getpid()
        self._closed = False
        self._last: Future[None] | None = None
        self._followers: weakref.WeakSet[_Follower] = weakref.WeakSet()

    @property
    def stats(self) -> PagerStats:
        """What was done so far."""
        return self._stats

    @property
    def closed(self) -> bool:
        """Whether nothing is loaded or kept any more; in a forked child it is so."""
        return self._closed or os.getpid() != self._pid

    @property
    def busy(self) -> bool:
        """Whether something is being kept."""
        return self._last is not None and not self._last.done()

    def load(self, chains: Sequence[Sequence[bytes]], tokens: int) -> tuple[list[KVTensors], int]:
        """Keys and values of the leading blocks that every row has, of each layer, and how many they are.

        Args:
            chains: of each row, the names of the blocks that may be loaded.
            tokens: of each row's prompt.
        """
        began = time.monotonic()
        filling, count = None, 0
        try:
            space = None if self.closed else self._home.space(self._shape.layout)
            if space is not None:
                filling, count = self._fill(space, chains, began + self._seconds)
        except KVPagerError as error:
            self._log.warning("kvpager: nothing was found for a prompt: %s", error)
        found = count * self._shape.layout.block_size
        self._add(
            prompts=len(chains),
            hit_prompts=len(chains) if count else 0,
            prompt_tokens=len(chains) * tokens,
            hit_tokens=len(chains) * found,
            loaded_bytes=len(chains) * count * self._shape.layout.block_bytes,
            load_seconds=time.monotonic() - began,
        )
        return (filling.tensors(count), count) if filling is not None and count else ([], 0)

    def store(self, snapshot: Snapshot, wanted: Sequence[tuple[int, list[bytes], list[int]]]) -> None:
        """Keep blocks, in a thread.

        Args:
            snapshot: of the cache that has them.
            wanted: row, names of all its blocks, and the indices of those that are to be kept, for each row.
        """
        with self._lock:
            if not self.closed:
                self._last = self._thread.submit(self._store, snapshot, wanted)

    def follow(self, cache: _Follower) -> None:
        """Ask it at the end for what is not kept yet."""
        self._followers.add(cache)

    def offer_all(self) -> None:
        """Have kept what caches have."""
        for cache in list(self._followers):
            cache.offer_rest()

    def flush(self) -> None:
        """Wait until what was to be kept is kept."""
        if self._last is not None and not self.closed:
            self._last.result()

    def close(self) -> None:
        """Keep what is to be kept, then end. Idempotent."""
        self.offer_all()
        with self._lock:
            if self.closed:
                return
            self._closed = True
        self._thread.shutdown()
        self._home.close()

    # Inside

    def _add(self, **more: float) -> None:
        with self._lock:
            now = {name: getattr(self._stats, name) + count for name, count in more.items()}
            self._stats = replace(self._stats, **now)

    def _batch(self, rows: int) -> int:
        return max(1, _BATCH_BYTES // (self._shape.layout.block_bytes * rows))

    def _fill(
        self, space: SpaceCalls, chains: Sequence[Sequence[bytes]], until: float
    ) -> tuple[Filling | None, int]:
        limit, batch = min(map(len, chains)), self._batch(len(chains))
        filling: Filling | None = None
        done = 0
        while done < limit:
            part = count = min(batch, limit - done)
            with contextlib.ExitStack() as held:
                leases: list[Lease] = []
                for chain in chains:
                    leases.append(held.enter_context(_lease(space, chain, done, count, until)))
                    count = min(count, len(leases[-1]))
                    if not count:
                        return filling, done
                if filling is None:
                    filling = Filling(self._shape, len(chains), limit, batch)
                for row, lease in enumerate(leases):
                    filling.write(row, done, done, lease.blocks[:count])
                filling.send(done, count)
            done += count
            if count < part:
                break
        return filling, done

    def _store(self, snapshot: Snapshot, wanted: Sequence[tuple[int, list[bytes], list[int]]]) -> None:
        began, stored, present = time.monotonic(), 0, 0
        try:
            space = self._home.space(self._shape.layout)
            if space is not None:
                for row, chain, indices in wanted:
                    new, there = self._store_row(space, snapshot, row, chain, indices)
                    stored, present = stored + new, present + there
                self._home.settle()
        except KVPagerError as error:
            self._log.warning("kvpager: blocks were not kept: %s", error)
        except Exception:
            self._log.exception("kvpager: keeping blocks failed")
            raise
        finally:
            self._add(
                stored_blocks=stored,
                present_blocks=present,
                refused_blocks=sum(len(indices) for _, _, indices in wanted) - stored - present,
                store_seconds=time.monotonic() - began,
            )

    def _store_row(
        self, space: SpaceCalls, snapshot: Snapshot, row: int, chain: list[bytes], indices: list[int]
    ) -> tuple[int, int]:
        """How many blocks were kept, and how many were there already."""
        stored = present = 0
        batch = self._batch(1)
        for start in range(0, len(indices), batch):
            part = indices[start : start + batch]
            names = [chain[at] for at in part]
            lineage = Lineage.in_chain(chain, np.array(part, dtype=np.int64))
            with space.reserve(names, wait=_ROOM_SECONDS, lineage=lineage) as reservation:
                new = reservation.new
                if len(new):
                    snapshot.copy_out(row, [part[at] for at in new.tolist()], reservation.blocks)
                    reservation.commit()
                there = int(np.count_nonzero(np.isin(reservation.status, _THERE)))
            stored, present = stored + len(new), present + there
            if len(new) + there < len(part):
                break  # without these, those after them would not be found
        return stored, present


def _lease(space: SpaceCalls, chain: Sequence[bytes], begin: int, count: int, until: float) -> Lease:
    """The leading ones of so many blocks of a chain, brought up from the cold tier where they are there."""
    place, names = ChainPlace.at(chain, begin), chain[begin : begin + count]
    lease = space.match(names, start=place, cold_deadline=_COLD_SECONDS)
    if lease.cold and len(lease) < len(names):
        wanted = names[: len(lease) + lease.cold]
        loaded = space.load(wanted, max(until - time.monotonic(), 0.0), start=place)
        lease.release()
        return loaded
    return lease
