"""Block tables: per sequence a row of block addresses, the GPU's page table.

A word is a block's address with its tags (`tiers/address.py`). The table here is the truth; a device keeps a
mirror of it, brought up to date with `take_changes`.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ..tiers.errors import CapacityError
from ..tiers.settings import expect_flag, expect_integer

__all__ = ["MOST_ROWS", "BlockTable", "Words"]

MOST_ROWS: Final = 1 << 16
"""Sequences that may run at a time."""
_MOST_WIDTH: Final = 1 << 20

Words: TypeAlias = npt.NDArray[np.int64]


class BlockTable:
    """Rows of block address words.

    `words` is int64 [rows, width]; a row's first `counts[row]` words are valid. The array is replaced
    when a row outgrows the width, so a view of it is valid until the next `set` of a wider row.
    """

    def __init__(self, rows: int, width: int = 64, *, track_changes: bool = False) -> None:
        rows = expect_integer("rows", rows, 1, MOST_ROWS)
        width = expect_integer("width", width, 1, _MOST_WIDTH)
        track_changes = expect_flag("track_changes", track_changes)
        self.words: Words = np.zeros((rows, width), dtype=np.int64)
        self.counts = np.zeros(rows, dtype=np.int32)
        self._free = list(range(rows - 1, -1, -1))
        self._sorted = True
        self._used = np.zeros(rows, dtype=np.bool_)
        self._changes: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] | None = (
            [] if track_changes else None
        )

    @property
    def free_rows(self) -> int:
        """Rows that nobody holds."""
        return len(self._free)

    @property
    def rows_in_use(self) -> npt.NDArray[np.int64]:
        """int64 [n], ascending."""
        return np.flatnonzero(self._used)

    def in_use(self, row: int) -> bool:
        """Whether somebody holds this row."""
        number = isinstance(row, int | np.integer) and not isinstance(row, bool)
        return number and 0 <= row < len(self._used) and bool(self._used[row])

    def take_row(self) -> int:
        """The lowest free row, so that running sequences stay in the first rows.

        Raises:
            CapacityError: every row is in use.
        """
        if not self._free:
            raise CapacityError(f"all {len(self.counts)} rows of the block table are in use")
        if not self._sorted:
            self._free.sort(reverse=True)
            self._sorted = True
        row = self._free.pop()
        self._used[row] = True
        return row

    def give_row(self, row: int) -> None:
        """The row is empty and free again."""
        self.counts[row] = 0
        self._used[row] = False
        self._sorted = self._sorted and (not self._free or row < self._free[-1])
        self._free.append(row)

    def row(self, row: int) -> Words:
        """The valid words of a row: a view, until the table is widened."""
        return self.words[row, : self.counts[row]]

    def set(self, row: int, first: int, words: Words) -> None:
        """Write `words` from column `first` on; the row then ends at the last of them or where it ended."""
        stop = first + len(words)
        if stop > self.words.shape[1]:
            self._widen(stop)
        self.words[row, first:stop] = words
        if stop > self.counts[row]:
            self.counts[row] = stop
        if self._changes is not None and len(words):
            self._changes.append(
                (np.full(len(words), row, dtype=np.int64), np.arange(first, stop, dtype=np.int64))
            )

    def append(self, rows: npt.NDArray[np.int64], words: Words) -> None:
        """Add one word to each of `rows` (no row twice)."""
        columns = self.counts[rows].astype(np.int64)
        if int(columns.max(initial=0)) >= self.words.shape[1]:
            self._widen(int(columns.max()) + 1)
        self.words[rows, columns] = words
        self.counts[rows] = columns + 1
        if self._changes is not None:
            self._changes.append((rows, columns))

    def put(self, rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64], words: Words) -> None:
        """Overwrite single words."""
        self.words[rows, columns] = words
        if self._changes is not None:
            self._changes.append((rows, columns))

    def truncate(self, row: int, count: int) -> None:
        """Forget the words of a row from column `count` on."""
        self.counts[row] = count

    def take_changes(
        self,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Words]:
        """Rows, columns and words written since the last call, in no order, a cell perhaps twice.

        A cell written twice carries its newest word both times. Empty unless changes are tracked.
        """
        if not self._changes:
            none = np.empty(0, dtype=np.int64)
            return none, none, none
        rows = np.concatenate([change[0] for change in self._changes])
        columns = np.concatenate([change[1] for change in self._changes])
        self._changes.clear()
        return rows, columns, self.words[rows, columns]

    def _widen(self, width: int) -> None:
        grown = np.zeros((self.words.shape[0], max(width, 2 * self.words.shape[1])), dtype=np.int64)
        grown[:, : self.words.shape[1]] = self.words
        self.words = grown
