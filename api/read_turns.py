"""Who reads a connection's socket: its thread, or a caller that waits for a reply anyway.

A reply that the thread reads has to wake the caller: one more switch between threads than the socket costs by
itself. So a caller reads while it waits, for others who wait, too; the thread then does not watch the socket,
but looks every few milliseconds whether callers still come.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from contextlib import suppress
from typing import Final

__all__ = ["ReadTurns"]

_LOOK_SECONDS: Final = 0.003
"""How often the thread looks while callers read."""


class ReadTurns:
    """Whose turn it is. All but `wait`, `wake` and `readable` is called with the connection's lock held.

    Args:
        lock: the connection's, as a condition.
    """

    def __init__(self, lock: threading.Condition) -> None:
        self._lock = lock
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._socket: socket.socket | None = None
        self._poll = select.poll()
        self._mask = 0
        self._watched = True
        """By the thread."""
        self._reading = False
        """Somebody is, outside of the lock."""
        self._caller_reads = False
        """Who reads, or read last, is one of those that wait."""
        self._waiting = 0
        """Callers, with the one that reads."""
        self._came = False
        """A caller did, since the thread looked."""
        self._asleep = False
        """The thread does not look, since one caller reads for long."""

    def attach(self, connected: socket.socket) -> None:
        """There is a socket, and the thread watches it."""
        self._socket = connected
        self._watched, self._mask = True, select.EPOLLIN
        self._epoll.register(connected, self._mask)
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)

    def detach(self) -> None:
        """The socket is about to be closed; waits until nobody reads it."""
        connected, self._socket = self._socket, None
        if connected is None:
            return
        if self._reading:
            # Whoever reads it is woken; where the other side reset it he was already.
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
            self._lock.wait_for(lambda: not self._reading)
        self._epoll.unregister(connected)

    def close(self) -> None:
        """The thread is over."""
        self._epoll.close()
        os.close(self._wake)

    # A caller's

    def come(self) -> socket.socket | None:
        """A caller waits from now on, until `leave`: the socket, if it is to read it until `end`."""
        self._waiting += 1
        if self._reading or self._socket is None:
            return None
        self._reading = self._came = self._caller_reads = True
        if self._watched:
            self._watched = False
            self._set_mask(0)
            self.wake()
        return self._socket

    def leave(self) -> None:
        """A caller of `come` does not wait any more."""
        self._waiting -= 1

    def readable(self, seconds: float) -> bool:
        """Wait until there is something to read, so long at most. For the caller that reads."""
        return bool(self._poll.poll(1000 * seconds + 1))

    # The thread's

    def look(self, *, writing: bool) -> float | None:
        """Watch the socket, unless callers do: how long to `wait` at most, None: for ever.

        Args:
            writing: there is something to write that the socket did not take.
        """
        self._asleep = False
        seconds = None
        if not self._watched:
            if self._came:
                self._came, seconds = False, _LOOK_SECONDS
            elif self._reading:
                self._asleep = True
            else:
                self._watch()
        self._set_mask((select.EPOLLIN if self._watched else 0) | (select.EPOLLOUT if writing else 0))
        return seconds

    def wait(self, seconds: float | None) -> bool:
        """Wait for the socket, or for `wake`; whether there is something to read."""
        readable = False
        for which, happened in self._epoll.poll(seconds):
            if which == self._wake:
                os.eventfd_read(self._wake)
            else:
                readable = bool(happened & ~select.EPOLLOUT)
        return readable

    def wake(self) -> None:
        """Let the thread look."""
        os.eventfd_write(self._wake, 1)

    def begin(self) -> bool:
        """The thread is about to read, until `end`; False where a caller does."""
        if self._reading:
            return False
        self._reading, self._caller_reads = True, False
        return True

    def end(self) -> None:
        """Whoever read, a caller or the thread, does not read any more."""
        self._reading = False
        if self._socket is None:
            self._lock.notify_all()
        elif self._waiting > self._caller_reads:
            self._watch()
        elif self._asleep:
            self.wake()

    def _watch(self) -> None:
        self._watched = True
        self._set_mask(self._mask | select.EPOLLIN)

    def _set_mask(self, mask: int) -> None:
        if mask != self._mask and self._socket is not None:
            self._mask = mask
            self._epoll.modify(self._socket, mask)
