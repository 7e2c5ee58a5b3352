"""Which slot holds the block before each in its chain: so that no block goes before those that follow it.

Links are by slot. Each names the block that it leads to beside its slot, so that one whose block is gone
leads nowhere, and nobody need look for those that led there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from ..tiers.errors import IntegrityError
from .lineage import ShortHashes
from .policy import BlockFacts

__all__ = ["ChainLinks"]

_Places = npt.NDArray[np.intp]
_SLOT_BITS: Final = 31
_SLOT: Final = (1 << _SLOT_BITS) - 1
_MOST_JOINED: Final = (1 << (63 - _SLOT_BITS)) - 1
"""Then they are counted from 1 again."""
_NOT_TOLD: Final = 1
"""Stands for the block before one of which nobody said where in its chain it is: no block has this number."""
_FIRST: Final = np.zeros(1, dtype=np.intp)
_ONE: Final = np.ones(1, dtype=np.int32).tobytes()
_NOBODY: Final = bytes(len(_ONE))


class ChainLinks:
    """Links between the blocks of a tier.

    Args:
        capacity: slots are below it.
    """

    def __init__(self, capacity: int) -> None:
        self._self = np.zeros(capacity, dtype=np.int64)
        """Of each slot a number that only its present block has; 0: it has none."""
        self._up = np.zeros(capacity, dtype=np.int64)
        """Of each slot that number of the block before its own; 0: not known."""
        self._children = np.zeros(capacity, dtype=np.int32)
        """Of each slot how many blocks here follow its own."""
        self._joined = 0

    def resize(self, capacity: int) -> None:
        """Slots are below this from now on. There are never fewer than before."""
        for name in ("_self", "_up", "_children"):
            field = getattr(self, name)
            more = np.zeros(max(0, capacity - len(field)), dtype=field.dtype)
            setattr(self, name, np.concatenate([field, more]))

    def here(self, slots: _Places) -> npt.NDArray[np.bool_]:
        """bool [n]: which of these slots have a block."""
        here: npt.NDArray[np.bool_] = self._self[slots] > 0
        return here

    def any_here(self, slots: _Places) -> bool:
        """Whether one of these slots has a block."""
        there = self._self[slots].tobytes()
        return there != bytes(len(there))

    def join(
        self,
        slots: _Places,
        facts: BlockFacts,
        find: Callable[[ShortHashes], _Places],
    ) -> None:
        """Blocks come, to slots that have none.

        Args:
            find: tells the slots of blocks by name, plus one; 0: they are not here.
        """
        names, parents = facts.names, facts.parents
        self._joined = self._joined % _MOST_JOINED + 1
        mine = slots | (self._joined << _SLOT_BITS)
        self._self[slots] = mine
        up = np.empty(len(slots), dtype=np.int64)
        up[0] = 0
        if parents[1:].tobytes() == names[:-1].tobytes():
            up[1:] = mine[:-1]
            self._children[slots[:-1]] = 1
            others = _FIRST if parents.item(0) else None
        else:
            follows = parents[1:] == names[:-1]
            up[1:] = mine[:-1] * follows
            self._children[slots[:-1]] = follows
            others = np.flatnonzero((up == 0) & (parents != 0))
        if others is not None:
            found = find(parents[others])
            others, found = others[found > 0], found[found > 0] - 1
            up[others] = self._self[found]
            np.add.at(self._children, found, 1)
        if not facts.depths.item(0):
            up[(up == 0) & (parents == 0) & (facts.depths == 0)] = _NOT_TOLD
        self._up[slots] = up

    def leave(self, slots: _Places, outside: Mapping[int, int] | None = None) -> None:
        """The blocks in these slots go.

        Args:
            outside: of slots whose blocks these follow, how many of them do, but for those that stand just
                before such a slot in `slots`: as of `free`; None: it is not known.
        """
        if outside is None:
            up = self._up[slots]
            outside = Counter(self._outside(up, up[:-1] == self._self[slots[1:]]))
        for parent, number in outside.items():
            self._children[parent] -= number
        self._self[slots] = self._up[slots] = self._children[slots] = 0

    def _outside(self, up: npt.NDArray[np.int64], inside: npt.NDArray[np.bool_]) -> list[int]:
        """The slots of the blocks that some slots follow, but for those that stand just after one of these.

        Args:
            up, inside: of these slots; bool [n - 1]: of all but the last, whether it leads to the next one.
        """
        links = [up.item(-1)]
        if np.count_nonzero(inside) < len(inside):
            links += up[:-1][~inside].tolist()
        is_here = self._self.item
        return [link & _SLOT for link in links if link > _SLOT and is_here(link & _SLOT) == link]

    def follow(self, slots: _Places) -> npt.NDArray[np.bool_] | None:
        """bool [n - 1]: which of these but the first may hold what follows the block before; None: all."""
        up, before = self._up[slots[1:]], self._self[slots[:-1]]
        if up.tobytes() == before.tobytes():
            return None
        follow: npt.NDArray[np.bool_] = up == before
        if np.count_nonzero(follow) < len(follow):
            follow |= up == _NOT_TOLD
        return follow

    def before(self, slot: int) -> int | None:
        """The slot of the block before this one's; None: it is not here, or not known."""
        up = self._up.item(slot)
        return up & _SLOT if up > _SLOT and self._self.item(up & _SLOT) == up else None

    def free(self, slots: _Places, gone: dict[int, int]) -> _Places:
        """The leading ones of these, a chain from its end, that nothing follows but those before them.

        Args:
            gone: how many of those that follow each slot's block are to go already; these will be among them.
        """
        up, own, children = self._up[slots], self._self[slots], self._children[slots]
        line = _NOBODY + _ONE * (len(slots) - 1)
        if children.tobytes() == line and up[:-1].tobytes() == own[1:].tobytes():
            # Nearly always: the end of a chain as it is.
            link = up.item(-1)
            parent = link & _SLOT
            if link > _SLOT and self._self.item(parent) == link:
                gone[parent] = gone.get(parent, 0) + 1
            return slots
        inside = up[:-1] == own[1:]
        if children.item(0) or np.count_nonzero(children[1:] != inside):
            children[1:] -= inside
            for at in children.nonzero()[0].tolist():
                if children.item(at) > gone.get(slots.item(at), 0):
                    if at == 0:
                        return slots[:0]
                    slots, up, inside = slots[:at], up[:at], inside[: at - 1]
                    break
        for parent in self._outside(up, inside):
            gone[parent] = gone.get(parent, 0) + 1
        return slots

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the bookkeeping does not agree with itself."""
        up = self._up[self._up > _SLOT]
        parents = up[self._self[up & _SLOT] == up] & _SLOT
        if not np.array_equal(np.bincount(parents, minlength=len(self._self)), self._children):
            raise IntegrityError("cost: a slot does not have as many children as it counts")
        here = self._self > 0
        if self._up[~here].any() or self._children[~here].any():
            raise IntegrityError("cost: a block that is not here has a parent or children")
