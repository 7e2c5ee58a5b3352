"""KV events of vLLM's: which blocks can be had from host memory, for routers that subscribe to the engine."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from ....kvstore.events import BlockEvent, EventKind

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["Announcements", "Stored"]


class Stored:
    """What is announced of blocks once they are stored: taken from their request while it is known.

    Args:
        request: whose blocks they are.
        first: index of the first one.
        names: their prefix hashes.
        block_size: tokens of a block.

    Attributes:
        gaps: what may have been missed of the sidecar's events when their store began.
    """

    def __init__(self, request: Request, first: int, names: list[bytes], block_size: int) -> None:
        end = first + len(names)
        adapter = request.lora_request
        self.names = names
        self.gaps = 0
        # Routers know blocks by vLLM's own hashes.
        self.hashes = [maybe_convert_block_hash(one) for one in request.block_hashes[first:end]]
        self.event = BlockStored(
            block_hashes=self.hashes,
            parent_block_hash=maybe_convert_block_hash(request.block_hashes[first - 1]) if first else None,
            token_ids=list(request.all_token_ids[first * block_size : end * block_size]),
            block_size=block_size,
            lora_id=adapter.lora_int_id if adapter else None,
            medium=MEDIUM_CPU,
            lora_name=adapter.lora_name if adapter else None,
        )


class Announcements:
    """Events since they were taken last. What others stored is not known by vLLM's hashes: it is left out.

    Where the sidecar's events may have been missed, nobody knows what it still has: all is taken back.

    Args:
        gaps: a number that grows there, see `SidecarLink.event_gaps`.
    """

    def __init__(self, gaps: Callable[[], int]) -> None:
        self._gaps = gaps
        self._seen = gaps()
        self._events: list[KVCacheEvent] = []
        self._hashes: dict[bytes, bytes | int] = {}
        """vLLM's hash of each block that was announced and is still there, by its name."""
        self._expected: Counter[bytes] = Counter()
        """Names of blocks that are being stored."""
        self._gone: set[tuple[bytes, bytes]] = set()
        """Space and name of those of them that the sidecar had and has no more."""
        self._lock = threading.Lock()

    def expect(self, stored: Stored) -> None:
        """These are being stored; `stored` or `refused` follows."""
        with self._lock:
            self._follow()
            stored.gaps = self._seen
            self._expected.update(stored.names)

    def refused(self, stored: Stored) -> None:
        """Not all of these were kept, and none is announced."""
        with self._lock:
            self._end(stored)

    def stored(self, stored: Stored) -> None:
        """These can be had."""
        with self._lock:
            self._follow()
            gone = self._end(stored)
            if stored.gaps != self._seen:
                return
            self._hashes.update(zip(stored.names, stored.hashes, strict=True))
            self._events.append(stored.event)
            self._take_back(gone)

    def heard(self, event: BlockEvent) -> None:
        """The sidecar says what became of blocks; in the connection's thread."""
        if event.tier != "host":
            return
        with self._lock:
            about = {(event.space, name) for name in event.hashes if name in self._expected}
            if event.kind is not EventKind.REMOVED:
                self._gone -= about
                return
            self._gone |= about
            self._take_back(event.hashes)

    def take(self) -> Iterable[KVCacheEvent]:
        """Events in their order."""
        with self._lock:
            self._follow()
            taken, self._events = self._events, []
            return taken

    def _follow(self) -> None:
        gaps = self._gaps()
        if gaps != self._seen:
            self._seen = gaps
            self._take_back(list(self._hashes))

    def _end(self, stored: Stored) -> list[bytes]:
        """These are not expected any more; returns those that are gone already."""
        self._expected -= Counter(stored.names)
        names = set(stored.names)
        gone = [name for _, name in self._gone if name in names]
        self._gone = {one for one in self._gone if one[1] in self._expected}
        return gone

    def _take_back(self, names: Iterable[bytes]) -> None:
        gone = [self._hashes.pop(name) for name in names if name in self._hashes]
        if gone:
            self._events.append(BlockRemoved(block_hashes=gone, medium=MEDIUM_CPU))
