"""What a forked child finds of its parent's connections: they are closed there.

A child has the parent's socket, and none of its threads: whatever it said would end what the parent holds,
and whatever it read the parent would not.
Sources: Linux manual pages fork(2), epoll(7).
"""

from __future__ import annotations

import os
from typing import Final, Protocol
from weakref import WeakKeyDictionary

__all__ = ["WAS_CLOSED", "close_in_children"]

WAS_CLOSED: Final = "the connection to the sidecar was closed"
"""Why calls fail after `close`."""


class Inherited(Protocol):
    """A connection, as far as a fork is its concern."""

    def leave_to(self, why: str) -> None:
        """It is another process's: closed here, for this reason, and nothing shared is touched."""
        ...


_living: WeakKeyDictionary[Inherited, int] = WeakKeyDictionary()
"""Connections that are open, and the process of each."""


def close_in_children(connection: Inherited) -> None:
    """Have a connection be left to this process in every child that is forked from here on."""
    _living[connection] = os.getpid()


def _leave_all() -> None:
    """In a child, before anything else runs there."""
    for connection, process in tuple(_living.items()):
        connection.leave_to(f"this connection is process {process}'s: connect again in the child")
    _living.clear()


os.register_at_fork(after_in_child=_leave_all)
