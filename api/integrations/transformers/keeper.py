"""Loads prompts' blocks into caches, and keeps what caches have, in a thread beside the model."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeAlias

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
_PENDING_BYTES: Final = 2 << 30
"""Of snapshots, whose keys and values stay on their devices until they are kept: beyond it none is taken."""
_PENDING_LEAST: Final = 2
"""Snapshots that are taken on whatever they hold: of what a cache has at first, and of the rest."""
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


@dataclass(frozen=True)
class _Save:
    """Blocks that are to be kept, see `Keeper.store`; `number` is that of what is pending."""

    number: int
    snapshot: Snapshot
    wanted: Sequence[tuple[int, list[bytes], list[int]]]

    @property
    def blocks(self) -> int:
        return sum(len(indices) for _, _, indices in self.wanted)


@dataclass(frozen=True)
class _Refused:
    """So many blocks that were not taken on."""

    blocks: int


@dataclass(frozen=True)
class _Reached:
    """What came before it is done; `told`: also what of that failed."""

    done: Future[None]
    told: bool


class _End:
    """No more comes but what is on its way."""


_Job: TypeAlias = _Save | _Refused | _Reached | _End

_ending: Final[set[Future[None]]] = set()
"""Of keepers that nobody has any more, and that are not done yet."""
os.register_at_fork(after_in_child=_ending.clear)


class Keeper:
    """What the caches of one pager share. Any thread may call.

    `store` and `abandon` may be called by the garbage collector too, which may stop any thread anywhere: they
    wait for nothing and take no lock.

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
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._pending: dict[int, int] = {}
        """Bytes of each snapshot that is not kept yet."""
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._stats = PagerStats()
        self._pid = os.getpid()
        self._closed = False
        self._followers: weakref.WeakSet[_Follower] = weakref.WeakSet()
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._keep, name="kvpager-store", daemon=True)
        self._thread.start()

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
        return bool(self._pending)

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
        """Keep blocks, in a thread; refuse them where too much is pending, see `wait_room`.

        Args:
            snapshot: of the cache that has them.
            wanted: row, names of all its blocks, and the indices of those that are to be kept, for each row.
        """
        if self.closed:
            return
        job = _Save(next(self._numbers), snapshot, wanted)
        if self._full:
            self._jobs.put(_Refused(job.blocks))
            return
        self._pending[job.number] = snapshot.nbytes
        self._jobs.put(job)

    def wait_room(self, seconds: float | None = None) -> None:
        """Wait, so long at most, until something may be kept. What caches have waits on their devices."""
        if self._full and not self.closed:
            wait([self._reach(told=False), self._ended], seconds, FIRST_COMPLETED)

    def follow(self, cache: _Follower) -> None:
        """Ask it at the end for what is not kept yet."""
        self._followers.add(cache)

    def offer_all(self) -> None:
        """Have kept what caches have."""
        for cache in list(self._followers):
            cache.offer_rest()

    def flush(self) -> None:
        """Wait until what was to be kept is kept."""
        if not self.closed:
            reached = self._reach(told=True)
            wait([reached, self._ended], None, FIRST_COMPLETED)
            if reached.done():
                reached.result()

    def close(self) -> None:
        """Keep what is to be kept, then end. Idempotent."""
        if os.getpid() != self._pid:
            return
        try:
            self.offer_all()
        finally:
            self._jobs.put(_End())
            self._ended.result()

    def abandon(self) -> None:
        """Keep what is on its way, then end, without being waited for but by `wait_abandoned`."""
        if not self.closed:
            _ending.add(self._ended)
            self._jobs.put(_End())

    @staticmethod
    def wait_abandoned() -> None:
        """Wait until those that nobody has any more have ended: what they had is kept, their homes free."""
        ended, _ = wait(list(_ending))
        _ending.difference_update(ended)

    # Inside

    @property
    def _full(self) -> bool:
        pending = list(self._pending.values())
        return len(pending) >= _PENDING_LEAST and sum(pending) >= _PENDING_BYTES

    def _reach(self, *, told: bool) -> Future[None]:
        reached: Future[None] = Future()
        self._jobs.put(_Reached(reached, told))
        return reached

    def _keep(self) -> None:
        """The thread."""
        failed: Exception | None = None
        try:
            while True:
                job = self._jobs.get()
                if isinstance(job, _End):
                    break
                failed = self._do(job, failed)
                del job  # which has a cache's keys and values, until the next one comes
            # The garbage collector ends a pager before caches of the same rubbish.
            with contextlib.suppress(queue.Empty):
                while True:
                    failed = self._do(self._jobs.get_nowait(), failed)
        finally:
            self._closed = True
            self._end()

    def _end(self) -> None:
        try:
            self._home.close()
        except Exception as error:  # noqa: BLE001  (raised by `close`)
            self._log.exception("kvpager: ending failed")
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    def _do(self, job: _Job, failed: Exception | None) -> Exception | None:
        """Do it; returns what failed of that since it was last said to whoever waited."""
        if isinstance(job, _Save):
            try:
                self._store(job)
            except Exception as error:  # noqa: BLE001  (raised by `flush`; the thread goes on)
                self._log.exception("kvpager: keeping blocks failed")
                return error.with_traceback(None)  # whose frames have the snapshot
            finally:
                del self._pending[job.number]
        elif isinstance(job, _Refused):
            self._add(refused_blocks=job.blocks)
        elif isinstance(job, _Reached):
            if failed is None or not job.told:
                job.done.set_result(None)
            else:
                job.done.set_exception(failed)
                return None
        return failed

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
            lost = self._home.lost
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
                if self._home.lost is not lost:
                    break  # other blocks may have been where these were read
            done += count
            if count < part:
                break
        return filling, done

    def _store(self, job: _Save) -> None:
        began, stored, present = time.monotonic(), 0, 0
        try:
            space = self._home.space(self._shape.layout)
            if space is not None:
                for row, chain, indices in job.wanted:
                    new, there = self._store_row(space, job.snapshot, row, chain, indices)
                    stored, present = stored + new, present + there
                self._home.settle()
        except KVPagerError as error:
            self._log.warning("kvpager: blocks were not kept: %s", error)
        finally:
            self._add(
                stored_blocks=stored,
                present_blocks=present,
                refused_blocks=job.blocks - stored - present,
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
        # Held for as long as that takes, so that these are there still.
        with lease:
            wanted = names[: len(lease) + lease.cold]
            return space.load(wanted, max(until - time.monotonic(), 0.0), start=place)
    return lease
