"""KV events of vLLM's: which blocks can be had from host memory, for routers that subscribe to the engine."""

from __future__ import annotations

import threading
from collections.abc import Iterable
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
    """

    def __init__(self, request: Request, first: int, names: list[bytes], block_size: int) -> None:
        end = first + len(names)
        adapter = request.lora_request
        self.names = names
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
    """Events since they were taken last. What others stored is not known by vLLM's hashes: it is left out."""

    def __init__(self) -> None:
        self._events: list[KVCacheEvent] = []
        self._hashes: dict[bytes, bytes | int] = {}
        """vLLM's hash of each block that was announced and is still there, by its name."""
        self._lock = threading.Lock()

    def stored(self, stored: Stored) -> None:
        """These can be had."""
        with self._lock:
            self._hashes.update(zip(stored.names, stored.hashes, strict=True))
            self._events.append(stored.event)

    def heard(self, event: BlockEvent) -> None:
        """The sidecar says what became of blocks; in the connection's thread."""
        if event.kind is not EventKind.REMOVED or event.tier != "host":
            return
        with self._lock:
            gone = [self._hashes.pop(name) for name in event.hashes if name in self._hashes]
            if gone:
                self._events.append(BlockRemoved(block_hashes=gone, medium=MEDIUM_CPU))

    def take(self) -> Iterable[KVCacheEvent]:
        """Events in their order."""
        with self._lock:
            taken, self._events = self._events, []
            return taken
