"""The spaces that one connection opened, and the numbers that it calls them by."""

from __future__ import annotations

from ..kvstore.space import HostSpace
from ..tiers.errors import ConfigError
from .messages import SpaceOpened

__all__ = ["SpaceBook"]


class SpaceBook:
    """The spaces of one connection, by numbers from 0."""

    def __init__(self) -> None:
        self._spaces: list[HostSpace] = []
        self._numbers: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._spaces)

    def opened(self, space: HostSpace) -> SpaceOpened:
        """A space is opened, perhaps once more; the reply that says so."""
        number = self._numbers.get(space.id)
        if number is None:
            number = self._numbers[space.id] = len(self._spaces)
            self._spaces.append(space)
        return SpaceOpened(number, space.id, space.slots_per_extent)

    def find(self, space: bytes) -> HostSpace | None:
        """The space of this id; None where the connection has not opened it."""
        number = self._numbers.get(space)
        return None if number is None else self._spaces[number]

    def space(self, number: int) -> HostSpace:
        """The space of a number.

        Raises:
            ConfigError: none was opened by it.
        """
        if not 0 <= number < len(self._spaces):
            raise ConfigError("space", f"this connection has opened no space {number}")
        return self._spaces[number]
