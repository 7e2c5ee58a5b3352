"""The prefix hashes of a request, made as far as they are asked for."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from ....kvstore.hashing import hash_blocks

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["RequestNames", "can_be_named"]

_INT32: Final = np.dtype("<i4")


def can_be_named(request: Request) -> bool:
    """Whether the KV of a request follows from token ids that do not change."""
    return request.prompt_embeds is None and request.prompt_token_ids is not None and not request.resumable


class RequestNames:
    """Names of a request's full blocks. Any thread may ask.

    Args:
        request: vLLM's, whose tokens only grow.
        block_size: tokens of a block.
        root: of its chain.
    """

    def __init__(self, request: Request, block_size: int, root: bytes) -> None:
        self._request = request
        self._block_size = block_size
        self._root = root
        self._names: list[bytes] = []
        self._lock = threading.Lock()
        self._media = _media_by_block(request, block_size)

    @property
    def known(self) -> int:
        """How many blocks have their names. Does not wait."""
        return len(self._names)

    def first(self, blocks: int) -> list[bytes]:
        """The names of the first `blocks` blocks, 16 bytes each; their tokens are known.

        Waits for another thread that makes some.
        """
        with self._lock:
            done = len(self._names)
            if done < blocks:
                size = self._block_size
                tokens = np.array(self._request.all_token_ids[done * size : blocks * size], dtype=_INT32)
                extra = {at - done: keys for at, keys in self._media.items() if at >= done}
                parent = self._names[-1] if done else self._root
                self._names += hash_blocks(tokens, size, parent, extra or None)
            return self._names[:blocks]


def _media_by_block(request: Request, block_size: int) -> dict[int, Sequence[bytes]]:
    """Of each block that an image or the like reaches into: what it is, by content, and where it begins."""
    keys: dict[int, list[bytes]] = defaultdict(list)
    for feature in request.mm_features:
        place = feature.mm_position
        key = f"{feature.modality}|{feature.mm_hash or feature.identifier}|{place.offset}".encode()
        last = place.offset + max(place.length, 1) - 1
        for block in range(place.offset // block_size, last // block_size + 1):
            keys[block].append(key)
    return dict(keys)
