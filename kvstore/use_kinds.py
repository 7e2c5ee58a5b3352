"""Kinds of uses: what could be seen of one, as a small number, so that what became of others like it is told.

Of a conversation that goes on it is how many turns it had, the gap before this one, and how many blocks of
the prompt nobody asked for before. What others share is of a kind by its own uses and gap. The last block of
a prompt, which may be filled only in part, is of a kind of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["UNKNOWN", "body", "end", "expected", "groups", "shared"]

_TURNS: Final = [1, 2, 3, 5]
_NEW: Final = [2, 4, 16]
_GAPS: Final = [0.0, 16.0, 64.0, 256.0]
_OWN_GAPS: Final = [1.0, 4.0, 16.0, 64.0, 256.0]
_USES: Final = [3, 9, 33]
"""Where the next one begins of the classes of what is counted or measured, which kinds are made of."""
_SHAPE: Final = (len(_TURNS) + 1, len(_NEW) + 1, len(_GAPS) + 1)
_BODIES: Final = _SHAPE[0] * _SHAPE[1] * _SHAPE[2]
_ENDS: Final = 2
_SHARED_SHAPE: Final = (len(_OWN_GAPS) + 1, len(_USES) + 1)
_SHARED: Final = _SHARED_SHAPE[0] * _SHARED_SHAPE[1]
_FIRST_END: Final = _BODIES
_FIRST_SHARED: Final = _BODIES + _ENDS
_KINDS: Final = _BODIES + _ENDS + _SHARED
UNKNOWN: Final = (len(_NEW)) * _SHAPE[2]
"""The kind of what nobody asked for before it came: as if a long new chain were of it."""


def groups() -> list[npt.NDArray[np.intp]]:
    """The groups of kinds, coarser ones first."""
    turns, new, _ = np.unravel_index(np.arange(_BODIES), _SHAPE)
    ends, others = np.arange(_ENDS), np.arange(_SHARED)
    families = np.repeat([0, 1, 2], [_BODIES, _ENDS, _SHARED])
    by_new = np.concatenate([(turns > 0) * 4 + new, 8 + ends * 0, 9 + others * 0])
    by_turns = np.concatenate([turns * 4 + new, 20 + ends, 22 + others // _SHARED_SHAPE[1]])
    return [np.asarray(one, dtype=np.intp) for one in (families, by_new, by_turns, np.arange(_KINDS))]


def expected() -> npt.NDArray[np.float64]:
    """How much sooner than another each kind is expected back while nothing was seen."""
    turns = np.unravel_index(np.arange(_BODIES), _SHAPE)[0]
    uses = np.arange(_SHARED) % _SHARED_SHAPE[1] + 1
    return np.concatenate([1.0 + turns, [1.0, 2.0], 1.0 + uses])


def body(turns: int, new: int, gap: float) -> int:
    """The kind of what is used by a lookup.

    Args:
        turns: how often its conversation was gone on with.
        new: how many blocks nobody asked for before.
        gap: seconds since the conversation's last turn; below 0: it has none.
    """
    return (bisect_right(_TURNS, turns) * _SHAPE[1] + bisect_right(_NEW, new)) * _SHAPE[2] + (
        bisect_right(_GAPS, gap)
    )


def shared(gap: float, uses: int) -> int:
    """The kind of what was used by others, too, so many times, and the last time so many seconds ago."""
    return _FIRST_SHARED + bisect_right(_OWN_GAPS, gap) * _SHARED_SHAPE[1] + bisect_right(_USES, uses)


def end(turns: int) -> int:
    """The kind of the last block of a prompt."""
    return _FIRST_END + (turns > 0)
