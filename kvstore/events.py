"""What happens to blocks, told to whoever subscribes: routers, metrics, an operator's screen."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..tiers.errors import ConfigError
from ..tiers.settings import shown

__all__ = ["BlockEvent", "EventKind", "EventStream", "Listener"]

_log = logging.getLogger(__name__)


class EventKind(enum.StrEnum):
    """What became of the blocks."""

    STORED = "stored"
    REMOVED = "removed"


@dataclass(frozen=True)
class BlockEvent:
    """Blocks that came into a tier or left it.

    Args:
        kind: stored or removed.
        tier: ``device``, ``host`` or ``cold``.
        space: the 16-byte id of their space.
        hashes: their prefix hashes.
    """

    kind: EventKind
    tier: str
    space: bytes
    hashes: tuple[bytes, ...]


Listener: TypeAlias = Callable[[BlockEvent], None]


class EventStream:
    """Hands events to its listeners, in the thread where they happen and outside any lock.

    A listener must be quick; one that raises is logged, and the others still hear.
    """

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with every later event. Returns a function that ends it.

        Raises:
            ConfigError: it cannot be called.
        """
        if not callable(listener):
            raise ConfigError("listener", f"must be a function of an event, got {shown(listener)}")
        self._listeners = (*self._listeners, listener)

        def unsubscribe() -> None:
            self._listeners = tuple(other for other in self._listeners if other is not listener)

        return unsubscribe

    def emit(self, kind: EventKind, tier: str, space: bytes, hashes: Sequence[bytes]) -> None:
        """Tell the listeners; costs nothing where there are none."""
        if not self._listeners or not hashes:
            return
        event = BlockEvent(kind, tier, space, tuple(hashes))
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:  # noqa: BLE001  a listener's fault must not stop the store
                _log.exception("a listener of block events failed on %s in %s", event.kind, event.tier)
