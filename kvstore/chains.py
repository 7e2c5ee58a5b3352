"""The names of each row's blocks, and the tokens that will make up the next one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .hashing import ExtraKeys, hash_blocks, hash_partial, link, pack_blocks, pack_keys
from .lineage import NO_PARENT, Lineage

__all__ = ["RowChains"]


class RowChains:
    """Per row of the block table a chain of prefix hashes, and the tokens after the last full block.

    A chain may be known further than the row's KV: a prompt is named whole before it is computed.

    Args:
        rows: rows of the block table.
        block_size: tokens per block.
    """

    def __init__(self, rows: int, block_size: int) -> None:
        self._block_size = block_size
        self._roots: list[bytes] = [b""] * rows
        self._hashes: list[list[bytes]] = [[] for _ in range(rows)]
        self._extra_keys: list[ExtraKeys] = [{}] * rows
        self._tails = np.zeros((rows, block_size), dtype=np.int32)

    def start(self, row: int, root: bytes, hashes: Sequence[bytes], extra_keys: ExtraKeys) -> None:
        """A sequence enters a row; `hashes` is what is known of its chain."""
        self._roots[row] = root
        self._hashes[row] = list(hashes)
        self._extra_keys[row] = extra_keys

    def fork(self, row: int, other: int) -> None:
        """The sequence in row `other` has the same tokens so far."""
        self.start(other, self._roots[row], self._hashes[row], self._extra_keys[row])
        self._tails[other] = self._tails[row]

    def end(self, row: int) -> None:
        """The sequence in this row is over."""
        self._hashes[row] = []
        self._extra_keys[row] = {}

    def root(self, row: int) -> bytes:
        """The root of the row's chain."""
        return self._roots[row]

    def hashes(self, row: int) -> Sequence[bytes]:
        """The chain, as far as it is known."""
        return self._hashes[row]

    def named(
        self, rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]
    ) -> tuple[list[bytes], Lineage]:
        """Names and lineage of blocks (row, column) that are named already."""
        of_rows = {row: self._hashes[row] for row in np.unique(rows).tolist()}
        cells = list(zip(rows.tolist(), columns.tolist(), strict=True))
        names = [of_rows[row][column] for row, column in cells]
        parents = [of_rows[row][column - 1] if column else NO_PARENT for row, column in cells]
        return names, Lineage.unchecked(parents, (columns + 1).astype(np.int32))

    def extra_keys(self, row: int) -> ExtraKeys:
        """What the row's blocks depend on beside tokens, by block index."""
        return self._extra_keys[row]

    def tail(self, row: int, length: int) -> npt.NDArray[np.int32]:
        """int32: the tokens after the last full block of a row of `length` tokens."""
        return self._tails[row, : length % self._block_size].copy()

    def set_tail(self, row: int, tokens: npt.NDArray[np.int32]) -> None:
        """The row's last block, partly filled, holds these."""
        self._tails[row, : len(tokens)] = tokens

    def extend(self, row: int, length: int, tokens: npt.NDArray[np.int32]) -> Sequence[bytes]:
        """More tokens of a row that had `length`; returns the names of the blocks that became full."""
        size = self._block_size
        stop = length + len(tokens)
        first, last = length // size, stop // size
        if first == last:
            self._tails[row, length % size : stop % size] = tokens
            return ()
        pending = np.concatenate([self._tails[row, : length % size], tokens])
        hashes = self._hashes[row]
        known = len(hashes)
        if last > known:
            unnamed = pending[(known - first) * size : (last - first) * size]
            keys = {at - known: keys for at, keys in self._extra_keys[row].items() if at >= known}
            hashes += hash_blocks(unnamed, size, hashes[-1] if hashes else self._roots[row], keys)
        self._tails[row, : stop % size] = pending[(last - first) * size :]
        return hashes[first:last]

    def append(
        self, rows: npt.NDArray[np.int64], places: npt.NDArray[np.int64], tokens: npt.NDArray[np.int32]
    ) -> None:
        """One more token of each row, at these places of their last blocks."""
        self._tails[rows, places] = tokens

    def names(
        self, rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]
    ) -> tuple[list[bytes], Lineage]:
        """Names and lineage of blocks, one a row, that the last tokens of `append` made full."""
        names = []
        parents = []
        messages: list[bytes] | None = None
        for at, (row, column) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
            hashes = self._hashes[row]
            parent = hashes[column - 1] if column else NO_PARENT
            if column >= len(hashes):
                if messages is None:
                    messages = pack_blocks(self._tails[rows])
                message = messages[at]
                if self._extra_keys[row]:
                    message += pack_keys(self._extra_keys[row].get(column, ()))
                hashes.append(link(parent if column else self._roots[row], message))
            names.append(hashes[column])
            parents.append(parent)
        return names, Lineage.unchecked(parents, (columns + 1).astype(np.int32))

    def partial_name(self, row: int, length: int) -> bytes | None:
        """The hash of the tokens in the last block of a row of `length` tokens; None where it is full."""
        column, filled = divmod(length, self._block_size)
        if not filled:
            return None
        last = self._hashes[row][column - 1] if column else self._roots[row]
        return hash_partial(self._tails[row, :filled], last, self._extra_keys[row].get(column, ()))
