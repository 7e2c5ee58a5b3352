"""The GPU that a client has its sidecar's memory mapped for, over all of its connections."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from ..tiers.errors import ClosedError
from ..tiers.settings import expect_text
from .client_space import AbsentArena, Arena, not_here

__all__ = ["DeviceMaps"]

_FIRST: Final = "cuda:0"


class DeviceMaps:
    """Maps arenas for one GPU: the one that is there, and those that take its place. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._device: str | None = None
        self._closed = False
        self._arenas: list[Arena] = []
        """Those that are mapped."""

    @property
    def device(self) -> str | None:
        """The GPU, as ``cuda:N``; None before `map`."""
        return self._device

    def map(self, arena: Arena | AbsentArena | None, device: str | None) -> None:
        """Have an arena mapped, in the background; again for the same GPU is of no effect.

        Args:
            arena: the sidecar's; None before the first connection.
            device: ``cuda`` or ``cuda:N``; None: the first one.

        Raises:
            ConfigError: no CUDA driver answers, cuda-python is not installed, or ``device`` is no GPU; or the
                arena is mapped for another one.
            KVPagerError: there is no such GPU.
            NotInPlaceError: its memory is not in this process.
            ClosedError: the connection was closed.
        """
        device = _FIRST if device is None else expect_text("device", device)
        if arena is None or isinstance(arena, AbsentArena):
            raise not_here()
        with self._lock:
            if self._closed:
                raise ClosedError("the connection to the sidecar was closed")
            arena.map_device(device)
            if arena not in self._arenas:
                self._arenas.append(arena)
            self._device = arena.mapped.device if arena.mapped is not None else None

    def follow(self, arena: Arena | AbsentArena | None, used: Iterable[Arena | AbsentArena]) -> None:
        """Another arena may have taken the place of the one that is mapped: map it, and let go of the unused.

        Args:
            arena: the sidecar's.
            used: those that spaces have slots in.
        """
        if self._device is None:
            return
        with self._lock:
            if self._closed or not isinstance(arena, Arena):
                return
            if arena not in self._arenas:
                arena.map_device(self._device)
                self._arenas.append(arena)
            kept = {id(one) for one in used} | {id(arena)}
            for one in self._arenas:
                if id(one) not in kept and one.mapped is not None:
                    one.mapped.close(wait=False)
            self._arenas = [one for one in self._arenas if id(one) in kept]

    def close(self) -> None:
        """Take all of it back; waits until that is done. Idempotent."""
        with self._lock:
            self._closed = True
            arenas, self._arenas = self._arenas, []
        for arena in arenas:
            if arena.mapped is not None:
                arena.mapped.close()
