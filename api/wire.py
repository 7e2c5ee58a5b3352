"""The wire protocol of the sidecar, without I/O: frames, and errors that travel.

A connection is a stream of frames: four bytes of length, little-endian, and so many bytes of msgpack. A frame
is an array ``[kind, id, what, fields]``: a *request* has an id of its sender's choice, the *reply* or
*failure* to it carries the same id, and a *notice* (id 0) answers nothing. Requests may be sent without
waiting for replies, which come in any order. What they carry is in `api/messages.py`.

`docs/protocol.md` says the same for whoever writes a client in another language; the frames in
``tests/data/wire_frames.json`` are there to try one on.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgpack

from ..tiers import errors
from ..tiers.errors import KVPagerError, ProtocolError
from .messages import Message, fields_of, message_of

__all__ = [
    "MAGIC",
    "MAX_FRAME",
    "VERSION",
    "Failure",
    "Frame",
    "FrameReader",
    "Notice",
    "Reply",
    "Request",
    "encode",
]

MAGIC: Final = "kvpager"
VERSION: Final = 1
"""Of the protocol. Two sides speak the older of their newest versions, if the other still speaks it."""
MAX_FRAME: Final = 64 << 20
"""Bytes of the largest frame: a few blocks inline."""

_LENGTH: Final = struct.Struct("<I")
_REQUEST, _REPLY, _FAILURE, _NOTICE = range(4)
_MOST_IDS: Final = 1 << 63


@dataclass(frozen=True)
class Request:
    """A message that wants an answer under its id."""

    id: int
    message: Message


@dataclass(frozen=True)
class Reply:
    """The answer to a request."""

    id: int
    message: Message


@dataclass(frozen=True)
class Failure:
    """Why a request was not done."""

    id: int
    error: KVPagerError


@dataclass(frozen=True)
class Notice:
    """A message that answers nothing: an event, or a command."""

    message: Message


Frame: TypeAlias = Request | Reply | Failure | Notice


def encode(frame: Frame, *, max_frame: int = MAX_FRAME) -> bytes:
    """The bytes of a frame.

    Raises:
        ProtocolError: it is longer than `max_frame`.
    """
    body: tuple[int, int, int | str, list[Any]]
    if isinstance(frame, Failure):
        body = (_FAILURE, frame.id, *_named(frame.error))
    elif isinstance(frame, Notice):
        body = (_NOTICE, 0, frame.message.TAG, fields_of(frame.message))
    else:
        kind = _REQUEST if isinstance(frame, Request) else _REPLY
        body = (kind, frame.id, frame.message.TAG, fields_of(frame.message))
    data: bytes = msgpack.packb(body, use_bin_type=True)
    if len(data) > max_frame:
        raise ProtocolError(f"a frame of {len(data)} bytes is longer than the {max_frame} that are taken")
    return _LENGTH.pack(len(data)) + data


class FrameReader:
    """Makes frames of bytes as they come, in pieces of any size.

    Args:
        max_frame: bytes of the largest frame; no more than that and one read is ever held.
    """

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self.max_frame = max_frame
        self._held = bytearray()

    @property
    def held(self) -> int:
        """Bytes of a frame that has not come whole."""
        return len(self._held)

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """The frames that `data` completes.

        Raises:
            ProtocolError: what came is no frame, or one that is too long; nothing after it can be made out.
        """
        self._held += data
        frames: list[Frame] = []
        start = 0
        try:
            while len(self._held) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._held, start)
                if length > self.max_frame:
                    raise ProtocolError(f"a frame of {length} bytes, and {self.max_frame} are taken")
                stop = start + _LENGTH.size + length
                if len(self._held) < stop:
                    break
                body = bytes(memoryview(self._held)[start + _LENGTH.size : stop])
                start = stop
                frames.append(_frame_of(body))
        finally:
            del self._held[:start]
        return frames


def _frame_of(body: bytes) -> Frame:
    try:
        parts = msgpack.unpackb(body, raw=False, use_list=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a frame is no msgpack: {error}") from error
    if type(parts) is not tuple or len(parts) != 4:
        raise ProtocolError("a frame is no array of four")
    kind, number, what, rest = parts
    if type(number) is not int or not 0 <= number < _MOST_IDS:
        raise ProtocolError("a frame has no id")
    if kind == _FAILURE:
        return Failure(number, _error_of(what, rest))
    message = message_of(what, rest)
    if kind == _REQUEST:
        return Request(number, message)
    if kind == _REPLY:
        return Reply(number, message)
    if kind == _NOTICE:
        return Notice(message)
    raise ProtocolError(f"a frame is of no kind that is known: {kind!r:.40}")


def _named(error: KVPagerError) -> tuple[str, list[str]]:
    """The name of an error and what it is made from again."""
    name = type(error).__name__
    if name not in errors.__all__:
        return KVPagerError.__name__, [str(error)]
    return name, [str(part) for part in error.__reduce__()[1]]


def _error_of(name: Any, parts: Any) -> KVPagerError:
    if type(name) is not str or type(parts) is not tuple or not all(type(part) is str for part in parts):
        raise ProtocolError("a failure has no name and reasons")
    kind = getattr(errors, name) if name in errors.__all__ else KVPagerError
    try:
        error = kind(*parts)
    except TypeError as wrong:
        raise ProtocolError(f"a failure of kind {name} has other reasons than it should") from wrong
    if not isinstance(error, KVPagerError):
        raise ProtocolError(f"a failure is of no kind that is known: {name:.40}")
    return error
