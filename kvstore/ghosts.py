"""What a policy knows of blocks by name, of those that are here and of ghosts: those that are not.

("Ghosts": "ARC: a self-tuning, low overhead replacement cache", Megiddo and Modha, FAST 2003.) It is a table
by hash, which names are already: an entry tells of one name, and gives way to the next one whose place is
the same. So each batch takes a few array operations, and what was displaced is not known.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from .lineage import ShortHashes

__all__ = ["Ghosts"]

_Places = npt.NDArray[np.intp]
_FEWEST: Final = 1 << 16


class Ghosts:
    """Of each name a tag, and the slot that held its block the last time.

    Args:
        capacity: blocks that there may be here; of four times as many is known.

    Attributes:
        names: uint64, of each entry.
        tags: int64, what the policy said of it; 0: nothing.
        slots: intp, plus one; 0: none.
    """

    def __init__(self, capacity: int) -> None:
        bits = max(_FEWEST.bit_length() - 1, (4 * capacity - 1).bit_length() if capacity else 0)
        # Side by side: what is looked at of an entry is in one line of the processor's caches, mostly.
        table = np.zeros((1 << bits, 3), dtype=np.int64)
        self.names: ShortHashes = table[:, 0].view(np.uint64)
        self.tags = table[:, 1]
        self.slots = table[:, 2].view(np.intp)
        self._mask = np.array((1 << bits) - 1)
        self._asked = b""
        self._places = np.zeros(0, dtype=np.intp)
        """Those of the names that were asked for last, as bytes: a batch is asked for several times."""

    def places(self, names: ShortHashes) -> _Places:
        """Which entry each of these has, if any. It is not to be written to."""
        asked = names.tobytes()
        if asked != self._asked:
            self._asked, self._places = asked, self.places_once(names)
        return self._places

    def places_once(self, names: ShortHashes) -> _Places:
        """The same of names that are not asked for again soon."""
        places: _Places = names.view(np.intp) & self._mask
        return places

    def known(self, names: ShortHashes, places: _Places) -> npt.NDArray[np.bool_] | None:
        """bool [n]: which of these names are those of their entries; None: all of them."""
        held = self.names[places]
        if held.tobytes() == names.tobytes():
            return None
        known: npt.NDArray[np.bool_] = held == names
        return known

    def grown(self, capacity: int) -> Ghosts:
        """The same, of more blocks."""
        if 4 * capacity <= len(self.names):
            return self
        grown = Ghosts(capacity)
        old = np.flatnonzero(self.names)
        new = grown.places(self.names[old])
        grown.names[new], grown.tags[new], grown.slots[new] = self.names[old], self.tags[old], self.slots[old]
        return grown
