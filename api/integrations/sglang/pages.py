"""Where pages lie in SGLang's host pool, and their copies to and from blocks: many at once, without a stop
between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ....tiers.errors import LayoutError
from ....tiers.layout import KVLayout
from ....tiers.mover import HostMover

__all__ = ["Addresses", "PoolPages", "flat_layout", "flat_pieces", "pool_kind"]

Addresses = npt.NDArray[np.int64]
"""int64 [n]."""
_INT64: Final = np.dtype(np.int64)


class PoolPages:
    """The pages of a host pool. A page is some runs of bytes, which a block has one after the other.

    Args:
        pool: SGLang's ``HostKVCache``.
        release: of SGLang.

    Attributes:
        layout: of a block.

    Raises:
        LayoutError: the pool does not say where its pages lie, or they do not lie evenly.
    """

    def __init__(self, pool: Any, release: str) -> None:
        self._page_size = size = int(pool.page_size)
        pages = int(pool.size) // size
        if getattr(pool, "kv_buffer", None) is None or pages < 1:
            raise LayoutError(f"a host pool of kind {type(pool).__name__} has no pages of its own to keep")
        some = sorted({0, 1, pages - 1} & set(range(pages)))
        starts, sizes = [], []
        for page in some:
            try:
                pointers, lengths = pool.get_page_buffer_meta(
                    torch.arange(page * size, (page + 1) * size, dtype=torch.int64)
                )
            except (AttributeError, NotImplementedError, ValueError) as error:
                raise LayoutError(
                    f"a host pool of kind {type(pool).__name__} with layout {pool.layout} does not say where "
                    f"its pages lie ({error})"
                ) from error
            starts.append(np.array(pointers, dtype=_INT64))
            sizes.append(np.array(lengths, dtype=_INT64))
        self._starts, self._sizes = starts[0], sizes[0]
        self._strides = starts[1] - starts[0] if pages > 1 else np.zeros_like(starts[0])
        for page, start, lengths in zip(some, starts, sizes, strict=True):
            if (lengths != self._sizes).any() or (start != self._starts + page * self._strides).any():
                raise LayoutError(f"pages of a host pool with layout {pool.layout} do not lie evenly")
        self._offsets = np.cumsum(self._sizes) - self._sizes
        runs = "+".join(f"{count}x{length}" for length, count in _runs(self._sizes))
        self.layout = _layout_of(int(self._sizes.sum()), size, f"{pool_kind(pool, release)}:{runs}")
        self._mover = HostMover()

    def first_tokens(self, indices: torch.Tensor, pages: int) -> npt.NDArray[np.int64]:
        """Index of the first token of each page in the pool, int64 [pages].

        Args:
            indices: int64 [pages * page_size], the pool's indices of their tokens.

        Raises:
            LayoutError: there are more or fewer.
        """
        if indices.numel() != pages * self._page_size:
            raise LayoutError(
                f"{pages} pages of {self._page_size} tokens were to be copied, of {indices.numel()} tokens"
            )
        first: npt.NDArray[np.int64] = indices[:: self._page_size].cpu().numpy()
        return first

    def store(self, first_tokens: npt.NDArray[np.int64], blocks: Addresses) -> None:
        """Copy pages to blocks at these addresses, int64 [n]."""
        places, slices = self._places(first_tokens), blocks[:, None] + self._offsets
        self._copy(places, slices)

    def load(self, first_tokens: npt.NDArray[np.int64], blocks: Addresses) -> None:
        """Copy blocks at these addresses, int64 [n], into pages."""
        places, slices = self._places(first_tokens), blocks[:, None] + self._offsets
        self._copy(slices, places)

    def close(self) -> None:
        """Copy nothing more."""
        self._mover.close()

    def _places(self, first_tokens: npt.NDArray[np.int64]) -> Addresses:
        """Of each run of each page, int64 [n, runs]."""
        places: Addresses = self._starts + (first_tokens // self._page_size)[:, None] * self._strides
        return places

    def _copy(self, source: Addresses, target: Addresses) -> None:
        for length in np.unique(self._sizes).tolist():
            chosen = self._sizes == length
            self._mover.copy_now(source[:, chosen].ravel(), target[:, chosen].ravel(), length)


def pool_kind(pool: Any, release: str) -> str:
    """How bytes of a host pool's pages lie, in words: two pools whose words differ share nothing.

    Args:
        pool: SGLang's ``HostKVCache``.
        release: of SGLang, which may change what these words mean.
    """
    parts = (
        "sglang",
        release,
        type(pool).__name__,
        str(pool.layout),
        str(pool.dtype).removeprefix("torch."),
        str(getattr(pool, "storage_format_tag", None) or ""),
        f"page{pool.page_size}",
        f"layers{pool.start_layer}-{pool.end_layer}of{getattr(pool, 'layer_num', '')}",
        f"heads{getattr(pool, 'head_num', '')}x{getattr(pool, 'head_dim', '')}",
    )
    return ":".join(parts)


def flat_layout(nbytes: int, dtype: torch.dtype, kind: str) -> KVLayout:
    """Of a block that is one tensor's bytes, as `KVPagerHiCache.set` is given them.

    Args:
        kind: what else is known of how they lie: the `pool_kind` of their pool.
    """
    return _layout_of(nbytes, 1, f"flat:{str(dtype).removeprefix('torch.')}:{kind}")


def flat_pieces(tensors: Sequence[torch.Tensor]) -> Addresses:
    """Addresses of tensors, int64 [n].

    Raises:
        LayoutError: one is not a single run of bytes in this process's memory.
    """
    for tensor in tensors:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise LayoutError("a page is to be a contiguous tensor on the CPU")
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=_INT64)


def _layout_of(nbytes: int, tokens: int, name: str) -> KVLayout:
    if nbytes < 1 or nbytes % tokens:
        raise LayoutError(f"pages of {nbytes} bytes for {tokens} tokens cannot be kept")
    return KVLayout(1, 1, nbytes // tokens, tokens, "uint8", f"opaque:{name}", planes=1)


def _runs(sizes: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """(bytes, how many follow each other) of the runs of a page, in order."""
    runs: list[tuple[int, int]] = []
    for size in sizes.tolist():
        if runs and runs[-1][0] == size:
            runs[-1] = (size, runs[-1][1] + 1)
        else:
            runs.append((size, 1))
    return runs
