"""Requests of a client, from asking to the reply, without I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..tiers.errors import KVPagerError, ProtocolError
from .client_space import ClientSpace
from .messages import Message

__all__ = ["Ask", "Call", "expect"]

_T = TypeVar("_T")
_M = TypeVar("_M", bound=Message)


@dataclass(frozen=True)
class Ask(Generic[_T]):
    """A request and what becomes of its reply.

    Args:
        space: the space it is about, or None.
        message: makes the message, of the number that the space has on this connection.
        convert: makes the result of the reply, and writes down what is held from then on.
        instead: makes the result where there is no reply.
        seconds: how long the sidecar may take beyond the usual.
        drop: gives back a result that nobody waits for any more.
        required: whether no reply is an error even of a connection that is not strict.
        lenient: whether `instead` is the result even of a strict one.
        insists: whether it is sent also to a sidecar that does not answer just now.
        refused: is told of an error that came in place of the reply.
        sends: bytes of blocks that it sends; one operation of a connection at a time makes such requests.
        until: when a thread that made it waits no longer, of `time.monotonic()`, whatever else is said here.
    """

    space: ClientSpace | None
    message: Callable[[int], Message]
    convert: Callable[[Message], _T]
    instead: Callable[[], _T]
    seconds: float = 0.0
    drop: Callable[[_T], object] | None = None
    required: bool = False
    lenient: bool = False
    insists: bool = False
    refused: Callable[[KVPagerError], object] | None = None
    sends: int = 0
    until: float | None = None


class Call(Generic[_T]):
    """A request under way. Changed with the shell's lock held.

    Attributes:
        done: whether there is a result or an error.
        result, error: which.
    """

    def __init__(self, ask: Ask[_T], notify: Callable[[], object] | None) -> None:
        self.ask = ask
        self.done = False
        self.result: _T | None = None
        self.error: KVPagerError | None = None
        self.heard = 0
        self._notify = notify
        self._abandoned = False

    def abandon(self) -> None:
        """Nobody waits for it any more: a result that comes late is dropped, one that is there too."""
        if self.done and not self._abandoned and self.error is None:
            self._drop()
        self._abandoned = True

    def answer(self, message: Message) -> None:
        """The reply is there."""
        self.result = self.ask.convert(message)
        if self._abandoned:
            self._drop()
        self._end()

    def fail(self, error: KVPagerError) -> None:
        """There will be no reply."""
        self.error = error
        self._end()

    def _drop(self) -> None:
        if self.ask.drop is not None and self.result is not None:
            self.ask.drop(self.result)

    def _end(self) -> None:
        self.done = True
        if self._notify is not None and not self._abandoned:
            self._notify()


def expect(reply: Message, kind: type[_M]) -> _M:
    """The reply, if it is of the kind that was to come.

    Raises:
        ProtocolError: it is not.
    """
    if not isinstance(reply, kind):
        raise ProtocolError(f"a {kind.__name__} was to come, and a {type(reply).__name__} came")
    return reply
