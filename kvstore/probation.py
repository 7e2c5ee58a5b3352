"""How many newcomers a tier holds: so that what nobody uses again does not flush what came back.

What a place is worth follows from how soon others alike came back (`return_times`). A scan looks like the
beginning of as many conversations, so by that alone it is worth as much, and what came back before it looks
old. So newcomers, which never came back, are on probation: where they are more than a share of what may go,
they go before what did.

The share is learned, as in "ARC: a self-tuning, low overhead replacement cache" (Megiddo and Modha, FAST
2003), from the cases where it mattered: of what had come back and went, and of newcomers that went though
others were worth less, how much is asked for soon after. Of whom that is more there is to be more. So where
worth tells them apart, as where people's think times are known, it decides, and the share is a bound for when
it does not.
"""

from __future__ import annotations

from typing import Final

__all__ = ["Probation"]

_LEAST: Final = 0.3
"""The share at first, and at least: a tier can tell who comes back only of those it has."""
_SWING: Final = 1 / 8
"""Newcomers go first until they are by so much of their share below it: so this does not change often."""
_SOON: Final = 0.5
"""Who is asked for again before so much of the tier went after him is asked for soon."""
_REMEMBERED: Final = 2.0
"""As many times the tier is remembered of what went."""
_PRIOR: Final = 0.01
"""So much of the tier of each sort is taken to have gone without being asked for."""


class Probation:
    """The share of newcomers.

    Attributes:
        share: of the blocks that may go, so many may be newcomers.
    """

    def __init__(self) -> None:
        self.share = _LEAST
        self._gone = 0
        self._proven = self._early = 0.0
        """How many blocks went lately that had come back, and how many newcomers before their time."""
        self._proven_back = self._early_back = 0.0
        """How many of these were asked for soon after."""

    def crowds(self, newcomers: int, blocks: int, *, already: bool) -> bool:
        """Whether newcomers go first.

        Args:
            newcomers: how many there will be.
            blocks: that may go.
            already: newcomers went first until now.
        """
        return newcomers > self.share * blocks * (1.0 - _SWING if already else 1.0)

    def went(self, number: int, blocks: int, *, early: bool, proven: bool) -> int:
        """Of so many blocks that may go these went, or were not let in.

        Args:
            early: they are newcomers, and others were worth less.
            proven: they had come back.

        Returns:
            what to tell of them when they are asked for; 0: nothing.
        """
        self._gone += number
        if early:
            self._early += number
        elif proven:
            self._proven += number
        else:
            return 0
        if self._early + self._proven > _REMEMBERED * blocks:
            self._early, self._early_back = self._early / 2, self._early_back / 2
            self._proven, self._proven_back = self._proven / 2, self._proven_back / 2
        few = _PRIOR * max(1, blocks)
        early_back = self._early_back / (self._early + few)
        proven_back = self._proven_back / (self._proven + few)
        if early_back != proven_back:
            step = (early_back - proven_back) / (early_back + proven_back)
            self.share = min(1.0, max(_LEAST, self.share + step * number / max(1, blocks)))
        return self._gone if early else -self._gone

    def asked(self, number: int, blocks: int, went: int) -> None:
        """Blocks that went are asked for.

        Args:
            number, blocks: how many, and how many may go.
            went: as `went` gave it.
        """
        if self._gone - abs(went) > _SOON * blocks:
            return
        if went > 0:
            self._early_back += number
        else:
            self._proven_back += number
