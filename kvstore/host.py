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
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final

from ..tiers.cold import ColdTier
from ..tiers.errors import ConfigError
from ..tiers.layout import KVLayout
from ..tiers.pinned import PinnedArena
from ..tiers.settings import expect_integer
from .events import Listener
from .handles import Lease
from .hashing import space_id
from .policy import make_policy
from .shared import HostShared
from .space import HostSpace

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
        cold: the cold tier, or None. It is closed with the store.
        policy: name of the eviction policy (`kvstore.policy.POLICIES`).
        device: ``cuda:N`` to page-lock and map the arena for that GPU; None for a machine without one.
        extent_bytes: size of an extent; None for a size that fits the capacity.
        clean_ahead: share of host memory that is kept copied to the cold tier ahead of eviction.
        cold_deadline: seconds that one background read or write of the cold tier may take.

    Raises:
        ConfigError: a value is out of range.
        MemoryUnavailableError: the machine does not have `host_bytes`.
    """

    def __init__(
        self,
        host_bytes: int,
        *,
        cold: ColdTier | None = None,
        policy: str = "lru",
        device: str | None = None,
        extent_bytes: int | None = None,
        clean_ahead: float = 0.25,
        cold_deadline: float = 5.0,
    ) -> None:
        host_bytes = expect_integer("host_bytes", host_bytes, 1)
        if cold is not None and not callable(getattr(cold, "contains", None)):
            raise ConfigError(
                "cold", f"must be a cold tier; open_cold_tier({cold!r}, ...) opens one from a URL or a folder"
            )
        if not 0.0 <= clean_ahead <= 1.0:
            raise ConfigError("clean_ahead", f"must be between 0 and 1, got {clean_ahead!r}")
        if not cold_deadline > 0:
            raise ConfigError("cold_deadline", f"must be positive seconds, got {cold_deadline!r}")
        make_policy(policy, 0)
        self.arena = PinnedArena(host_bytes, extent_bytes=extent_bytes, device=device)
        self.cold = cold
        self.device = device
        self._shared = HostShared(
            self.arena, cold, device, clean_ahead=clean_ahead, cold_deadline=cold_deadline
        )
        self.stats = self._shared.stats
        self.events = self._shared.events
        self._policy = policy
        self._spaces: dict[bytes, HostSpace] = {}
        self._cleaner: threading.Thread | None = None
        if cold is not None:
            self._cleaner = threading.Thread(
                target=self._clean_until_closed, name="kvpager-clean", daemon=True
            )
            self._cleaner.start()

    def space(self, layout: KVLayout, *, shard: str = "") -> HostSpace:
        """Open the space of `layout` and `shard`; the same object for equal ones.

        Raises:
            ConfigError: a block does not fit an extent.
            ClosedError: the store is closed.
        """
        with self._shared.lock():
            self._shared.check_open()
            name = space_id(layout, shard)
            space = self._spaces.get(name)
            if space is None:
                if layout.block_bytes > self.arena.extent_bytes:
                    raise ConfigError(
                        "extent_bytes",
                        f"{self.arena.extent_bytes} bytes do not hold a block of {layout.block_bytes} bytes",
                    )
                space = HostSpace(self._shared, layout, shard, name, make_policy(self._policy, 0))
                self._spaces[name] = space
            return space

    def match(self, spaces: Sequence[HostSpace], hashes: Sequence[bytes]) -> list[Lease]:
        """Lease the leading blocks that all of several spaces have: a hit needs every shard.

        Args:
            spaces: the shards of one model; their chains are the same.
            hashes: prefix hashes in order.

        Returns:
            one lease a space, all of the same length.
        """
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

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with every later event of host memory and cold tier; returns how to end it."""
        return self.events.subscribe(listener)

    def flush(self, deadline: float = 30.0) -> int:
        """Write what has no copy in the cold tier there: batch by batch, what would be evicted last first.

        Returns:
            how many committed blocks still have no copy after `deadline` seconds.

        Raises:
            ClosedError: the store is closed.
        """
        shared = self._shared
        with shared.lock():
            shared.check_open()
        end = time.monotonic() + deadline
        while self.cold is not None and time.monotonic() < end:
            if sum(space.write_to_cold(flush=True, until=end) for space in self._opened()):
                continue
            with shared.lock():
                # What the background thread is writing just now is as good as written.
                if not any(space.cleaning for space in self._spaces.values()):
                    break
                shared.changed.wait(max(0.0, end - time.monotonic()))
        with shared.lock():
            return sum(space.dirty for space in self._spaces.values())

    def close(self, *, drain: float = 0.0) -> None:
        """Stop the background work and give the memory back. Idempotent.

        Args:
            drain: seconds to spend on writing to the cold tier what has no copy there.
        """
        if self._shared.closed:
            return
        if drain > 0 and self.cold is not None:
            left = self.flush(drain)
            if left:
                _log.warning("closed with %d blocks not in the cold tier", left)
        self._shared.stop()
        if self._cleaner is not None:
            self._cleaner.join()
        self._shared.close()

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

    def _opened(self) -> list[HostSpace]:
        """The spaces, also while others are being opened."""
        with self._shared.lock():
            return list(self._spaces.values())

    def _clean_until_closed(self) -> None:
        """The background thread that keeps the coldest blocks copied to the cold tier."""
        shared = self._shared
        while True:
            with shared.lock():
                if not shared.closed:
                    shared.changed.wait(_CLEAN_POLL_SECONDS)
                if shared.closed:
                    return
            began = time.monotonic()
            if not shared.cold_is_due or not sum(space.write_to_cold() for space in self._opened()):
                # Looking costs a pass over the coldest blocks: not after every single change, and the more
                # seldom the more of them there are.
                rest = _CLEAN_REST * (time.monotonic() - began)
                time.sleep(min(max(_CLEAN_PAUSE_SECONDS, rest), _CLEAN_POLL_SECONDS))
