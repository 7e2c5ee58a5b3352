"""The prefix hashes of a request, made as far as they are asked for."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from ....kvstore.hashing import hash_blocks

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

__all__ = ["RequestNames", "can_be_named"]

_INT32: Final = np.dtype("<i4")
_HEX_DIGITS: Final = frozenset("0123456789abcdef")
_DIGEST_DIGITS: Final = (64, 128)
"""Of the algorithms that vLLM digests media with."""
_IN_SHARED_MEMORY: Final = frozenset({"address", "monotonic_id", "signature"})
"""What the scheduler has of media that ``--mm-processor-cache-type shm`` hands to the workers."""


def can_be_named(request: Request) -> bool:
    """Whether the KV of a request follows from token ids and media that do not change and are seen here."""
    if request.prompt_embeds is not None or request.prompt_token_ids is None or request.resumable:
        return False
    return all(_has_content(feature) for feature in request.mm_features)


def _has_content(feature: MultiModalFeatureSpec) -> bool:
    """Whether an image or the like can be named by its content.

    One with a client's ``uuid`` cannot: vLLM finds by it what it has computed of another one that had it.
    """
    digest = feature.mm_hash or feature.identifier
    if len(digest) not in _DIGEST_DIGITS or not _HEX_DIGITS.issuperset(digest):
        return False
    return feature.data is not None and not _IN_SHARED_MEMORY.issubset(feature.data)


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

        Waits for another thread that makes some, where they are not all known.
        """
        if blocks <= len(self._names):
            # Not behind a thread that names a long prompt.
            return self._names[:blocks]
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
        digest = feature.mm_hash or feature.identifier
        key = f"{feature.modality}|{digest}|{_digest_content(feature)}|{place.offset}".encode()
        last = place.offset + max(place.length, 1) - 1
        for block in range(place.offset // block_size, last // block_size + 1):
            keys[block].append(key)
    return dict(keys)


def _digest_content(feature: MultiModalFeatureSpec) -> str:
    """Of what the model is given: a client may have said vLLM's own digest to be another one."""
    from vllm.multimodal.hasher import MultiModalHasher

    content = feature.data.get_data()
    digest: str = MultiModalHasher.hash_kwargs("sha256", **{name: content[name] for name in sorted(content)})
    return digest
