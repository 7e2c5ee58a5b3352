"""Promotions: far blocks are copied to the device tier, and rows then read them there.

Either a mover copies them in the background, or the attention of a step does as it reads them, which takes
them over the bus once instead of twice: such a block's words are tagged *install* for that step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..tiers.address import FAR, INSTALL
from ..tiers.mover import Transfer, is_over, wait_through
from .cost_estimates import LinkEstimate
from .device import DeviceTier
from .far import FarBlocks
from .handles import Generations
from .lineage import Lineage
from .policy import Ids
from .tables import BlockTable, Words

__all__ = ["Install", "Promotions"]


@dataclass(frozen=True, eq=False)
class Install:
    """What a step is to copy to the device tier as it reads it.

    Attributes:
        rows, columns: int64 [n], the cells of the block table whose words are tagged *install*; a block has
            one in each row of the step that reads it.
        destinations: int64 [n], the addresses of the device blocks that these go to.
    """

    rows: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    destinations: Words


@dataclass(frozen=True, eq=False)
class _Promotion:
    blocks: Ids
    slots: Ids
    generations: Generations
    names: Sequence[bytes]
    lineage: Lineage
    transfer: Transfer | None
    """None: a step copies them."""


class Promotions:
    """The copies under way from host memory to the device tier.

    A promotion holds its slots and its blocks until it is over, whatever becomes of the rows.

    Args:
        device: where blocks are copied to.
        far: the far blocks they are copied from.
        table: the rows whose words change.
        link: is told what copies took.
    """

    def __init__(self, device: DeviceTier, far: FarBlocks, table: BlockTable, link: LinkEstimate) -> None:
        self._device = device
        self._far = far
        self._table = table
        self._link = link
        self._under_way: list[_Promotion] = []
        self._installing: _Promotion | None = None

    def __len__(self) -> int:
        return len(self._all)

    @property
    def _all(self) -> list[_Promotion]:
        return self._under_way if self._installing is None else [*self._under_way, self._installing]

    def are_moving(self, slots: Ids) -> npt.NDArray[np.bool_]:
        """bool [n]: which slots are being copied already."""
        if not len(self):
            return np.zeros(len(slots), dtype=np.bool_)
        return np.isin(slots, np.concatenate([promotion.slots for promotion in self._all]))

    def wait(self, seconds: float) -> None:
        """Wait, `seconds` at most, for the copies that were started first."""
        if self._under_way and (transfer := self._under_way[0].transfer) is not None:
            try:
                transfer.wait(seconds)
            except Exception:
                if transfer.error is None:
                    raise
                # `finish` tells what it failed with, when its blocks are given back.

    def start(self, words: Words, names: Sequence[bytes], lineage: Lineage) -> None:
        """Start copying full far blocks, none of them moving.

        Args:
            words: int64 [n], their far words.
            names: their prefix hashes.
            lineage: the chains that they are of.

        Raises:
            CapacityError: the device tier has no room.
        """
        slots = self._far.slots_at(words)
        blocks = self._device.allocate(len(words))
        try:
            source = self._far.addresses(words)
            transfer = self._device.start_copy(source, self._device.arena.addresses(blocks))
        except BaseException:
            self._device.pool.drop(blocks)
            raise
        self._under_way.append(self._promotion(blocks, slots, names, lineage, transfer))
        self.finish()

    def start_install(
        self, words: Words, names: Sequence[bytes], lineage: Lineage, readers: npt.NDArray[np.int64]
    ) -> Install:
        """Have the next step copy full far blocks, none of them moving, as it reads them; one step at a time.

        Their words are tagged until `finish_install` or `abandon_install`.

        Args:
            words: int64 [n], n > 0, their far words, each once.
            names: their prefix hashes.
            lineage: the chains that they are of.
            readers: int64, the rows of that step; one of them at least reads each block.

        Raises:
            CapacityError: the device tier has no room.
        """
        slots = self._far.slots_at(words)
        blocks = self._device.allocate(len(words))
        self._installing = promotion = self._promotion(blocks, slots, names, lineage, None)
        rows, columns, destinations = [], [], []
        for row, here, at in self._cells(promotion, readers.tolist()):
            rows.append(np.full(len(here), row, dtype=np.int64))
            columns.append(here)
            destinations.append(self._device.arena.addresses(blocks[at]))
        cells = np.concatenate(rows), np.concatenate(columns)
        self._table.put(*cells, self._table.words[cells] | INSTALL)
        return Install(*cells, np.concatenate(destinations))

    def finish_install(self) -> None:
        """The step is done: every row that holds what it installed reads it in the device tier from now on.

        Every layer's pages are written then, since the whole step ran. Rows may have ended meanwhile.
        """
        promotion, self._installing = self._installing, None
        if promotion is not None:
            self._end(promotion)

    def abandon_install(self) -> None:
        """The step did not come to its end: nobody may read what it was to install."""
        promotion, self._installing = self._installing, None
        if promotion is None:
            return
        for row in self._far.rows:
            words = self._table.row(row)
            columns = np.flatnonzero(words & INSTALL)
            if len(columns):
                self._table.put(np.full(len(columns), row), columns, words[columns] & ~INSTALL)
        self._let_go(promotion)

    def finish(self) -> None:
        """Rewrite the words of far blocks whose copies have arrived, in every row that holds them.

        Raises:
            Exception: what a copy failed with; its rows go on reading far.
        """
        for promotion in [one for one in self._under_way if one.transfer and is_over(one.transfer)]:
            self._under_way.remove(promotion)
            self._end(promotion)

    def finish_all(self) -> None:
        """Wait for every copy and end it, also where others failed. An install that is not done is abandoned.

        Raises:
            Exception: what a copy failed with.
        """
        with ExitStack() as rest:
            for promotion in self._under_way:
                rest.callback(self._end, promotion)
            self._under_way = []
            self.abandon_install()

    def count_held(self, blocks: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]) -> None:
        """Add one for each device block and each host slot that a promotion holds."""
        for promotion in self._all:
            blocks[promotion.blocks] += 1
            slots[promotion.slots] += 1

    def _promotion(
        self, blocks: Ids, slots: Ids, names: Sequence[bytes], lineage: Lineage, transfer: Transfer | None
    ) -> _Promotion:
        """A promotion that holds its slots from now on."""
        return _Promotion(blocks, slots, self._far.keep(slots), names, lineage, transfer)

    def _let_go(self, promotion: _Promotion) -> None:
        self._far.let_go(promotion.slots)
        self._device.pool.drop(promotion.blocks)

    def _end(self, promotion: _Promotion) -> None:
        try:
            if promotion.transfer is not None:
                wait_through(promotion.transfer)
                self._link.moved(promotion.transfer.nbytes, promotion.transfer.seconds)
            self._rewrite(promotion)
        finally:
            self._let_go(promotion)

    def _cells(
        self, promotion: _Promotion, rows: Sequence[int]
    ) -> Iterator[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Of each row that holds slots of a promotion: its number, their columns, their places in it."""
        order = np.argsort(promotion.slots)
        sorted_slots = promotion.slots[order]
        for row in rows:
            words = self._table.row(row)
            columns = np.flatnonzero(words & FAR)
            slots = self._far.slots_at(words[columns])
            here = np.isin(slots, sorted_slots)
            if here.any():
                yield row, columns[here], order[np.searchsorted(sorted_slots, slots[here])]

    def _rewrite(self, promotion: _Promotion) -> None:
        """Have every row that reads these slots read the new blocks instead."""
        for row, columns, at in self._cells(promotion, self._far.rows):
            blocks = promotion.blocks[at]
            self._device.pool.hold(blocks)
            self._table.put(np.full(len(columns), row), columns, self._device.arena.addresses(blocks))
            self._far.end(row, promotion.slots[at])
        self._device.promoted(
            promotion.blocks, promotion.slots, promotion.generations, promotion.names, promotion.lineage
        )
