"""Promotions: far blocks are copied to the device tier in the background; rows then read them there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..tiers.address import FAR
from ..tiers.mover import Transfer, is_over
from .device import DeviceTier
from .far import FarBlocks
from .handles import Generations
from .policy import Ids
from .tables import BlockTable, Words

__all__ = ["Promotions"]


@dataclass(frozen=True, eq=False)
class _Promotion:
    transfer: Transfer
    blocks: Ids
    slots: Ids
    generations: Generations
    names: Sequence[bytes]


class Promotions:
    """The copies under way from host memory to the device tier.

    A promotion holds its slots and its blocks until it is over, whatever becomes of the rows.

    Args:
        device: where blocks are copied to.
        far: the far blocks they are copied from.
        table: the rows whose words change.
    """

    def __init__(self, device: DeviceTier, far: FarBlocks, table: BlockTable) -> None:
        self._device = device
        self._far = far
        self._table = table
        self._under_way: list[_Promotion] = []

    def __len__(self) -> int:
        return len(self._under_way)

    def are_moving(self, slots: Ids) -> npt.NDArray[np.bool_]:
        """bool [n]: which slots are being copied already."""
        if not self._under_way:
            return np.zeros(len(slots), dtype=np.bool_)
        return np.isin(slots, np.concatenate([promotion.slots for promotion in self._under_way]))

    def start(self, words: Words, names: Sequence[bytes]) -> None:
        """Start copying full far blocks, none of them moving.

        Args:
            words: int64 [n], their far words.
            names: their prefix hashes.

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
        generations = self._far.keep(slots)
        self._under_way.append(_Promotion(transfer, blocks, slots, generations, names))
        self.finish()

    def finish(self) -> None:
        """Rewrite the words of far blocks whose copies have arrived, in every row that holds them.

        Raises:
            Exception: what a copy failed with; its rows go on reading far.
        """
        for promotion in [one for one in self._under_way if is_over(one.transfer)]:
            self._under_way.remove(promotion)
            self._end(promotion)

    def finish_all(self) -> None:
        """Wait for every copy and end it, also where others failed.

        Raises:
            Exception: what a copy failed with.
        """
        with ExitStack() as rest:
            for promotion in self._under_way:
                rest.callback(self._end, promotion)
            self._under_way = []

    def count_held(self, blocks: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]) -> None:
        """Add one for each device block and each host slot that a promotion holds."""
        for promotion in self._under_way:
            blocks[promotion.blocks] += 1
            slots[promotion.slots] += 1

    def _end(self, promotion: _Promotion) -> None:
        try:
            promotion.transfer.wait()
            self._install(promotion)
        finally:
            self._far.let_go(promotion.slots)
            self._device.pool.drop(promotion.blocks)

    def _install(self, promotion: _Promotion) -> None:
        """Have every row that reads these slots read the new blocks instead."""
        order = np.argsort(promotion.slots)
        sorted_slots = promotion.slots[order]
        for row in self._far.rows:
            words = self._table.row(row)
            columns = np.flatnonzero(words & FAR)
            slots = self._far.slots_at(words[columns])
            here = np.isin(slots, sorted_slots)
            columns, slots = columns[here], slots[here]
            if len(columns):
                blocks = promotion.blocks[order[np.searchsorted(sorted_slots, slots)]]
                self._device.pool.hold(blocks)
                self._table.put(np.full(len(columns), row), columns, self._device.arena.addresses(blocks))
                self._far.end(row, slots)
        self._device.promoted(promotion.blocks, promotion.slots, promotion.generations, promotion.names)
