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
import numpy as np

from ..tiers import errors
from ..tiers.errors import KVPagerError, ProtocolError
from . import operator_messages as operator_messages  # so that its messages have their tags
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
    "encode_parts",
]

MAGIC: Final = "kvpager"
VERSION: Final = 1
"""Of the protocol. Two sides speak the older of their newest versions, if the other still speaks it."""
MAX_FRAME: Final = 64 << 20
"""Bytes of the largest frame: a few blocks inline."""

_LENGTH: Final = struct.Struct("<I")
_REQUEST, _REPLY, _FAILURE, _NOTICE = range(4)
_LONG: Final = 1 << 16
"""Bytes from which msgpack has one form of header, and from which a copy costs more than what saves it."""
_FIXARRAY: Final = 0x90
"""And the length of a short array, in msgpack."""
_BIN32: Final = struct.Struct(">BI")
_MOST_IDS: Final = 1 << 63
_UNPACK_REASONS: Final = {
    msgpack.StackError: "it is nested too deeply",
    msgpack.FormatError: "a byte that begins nothing",
    msgpack.OutOfData: "it ends in the middle",
}
"""Of errors that msgpack says nothing of."""


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
    return b"".join(encode_parts(frame, max_frame=max_frame))


def encode_parts(frame: Frame, *, max_frame: int = MAX_FRAME) -> list[bytes]:
    """The bytes of a frame, one after the other: long byte strings are not copied. Raises as `encode`."""
    body: tuple[int, int, int | str, list[Any]]
    if isinstance(frame, Failure):
        body = (_FAILURE, frame.id, *_named(frame.error))
    elif isinstance(frame, Notice):
        body = (_NOTICE, 0, frame.message.TAG, fields_of(frame.message))
    else:
        kind = _REQUEST if isinstance(frame, Request) else _REPLY
        body = (kind, frame.id, frame.message.TAG, fields_of(frame.message))
    parts = _packed(body)
    length = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
    if length > max_frame:
        raise ProtocolError(f"a frame of {length} bytes is longer than the {max_frame} that are taken")
    # What is short goes together, in one write.
    if len(parts) == 1:
        return [_LENGTH.pack(length) + parts[0]]
    together: list[bytes] = []
    short = [_LENGTH.pack(length)]
    for part in parts:
        if len(part) < _LONG:
            short.append(part)
        else:
            together += [b"".join(short), part]
            short = []
    return [*together, b"".join(short)] if short else together


def _packed(body: tuple[int, int, int | str, list[Any]]) -> list[bytes]:
    """msgpack of a frame, in parts: long byte strings are not copied into it."""
    fields = body[3]
    if not [field for field in fields if type(field) is bytes and len(field) >= _LONG]:
        return [msgpack.packb(body, use_bin_type=True)]
    parts = [bytes([_FIXARRAY + len(body)]), *map(msgpack.packb, body[:3]), bytes([_FIXARRAY + len(fields)])]
    for field in fields:
        if type(field) is bytes and len(field) >= _LONG:
            parts += [_BIN32.pack(0xC6, len(field)), field]
        else:
            parts.append(msgpack.packb(field, use_bin_type=True))
    return parts


class FrameReader:
    """Makes frames of bytes as they come, in pieces of any size.

    Args:
        max_frame: bytes of the largest frame; no more than that and one read is ever held.

    Attributes:
        refused: after a `ProtocolError`, the id of the request that it is about; 0 where none could be read.
    """

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self.max_frame = max_frame
        self.refused = 0
        self._held = bytearray()
        self._long: memoryview | None = None
        """Place for a long frame that has not come whole; memory that nobody wrote to takes none."""
        self._filled = 0

    @property
    def held(self) -> int:
        """Bytes of a frame that has not come whole."""
        return len(self._held) if self._long is None else self._filled + _LENGTH.size

    @property
    def room(self) -> memoryview | None:
        """In a long frame, where its next bytes are to be put, before `fill` is told; else None."""
        return None if self._long is None else self._long[self._filled :]

    def fill(self, count: int) -> list[Frame]:
        """So many bytes were put into `room`: the frame, if that completes it. Raises as `feed`."""
        if self._long is None or count > len(self._long) - self._filled:
            raise TypeError("more was put than there is room for")
        self._filled += count
        if self._filled < len(self._long):
            return []
        body, self._long = self._long, None
        return [self._frame_of(body)]

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """The frames that `data` completes.

        Raises:
            ProtocolError: what came is no frame, or one that is too long; nothing after it can be made out.
        """
        frames: list[Frame] = []
        room = self.room
        if room is not None:
            count = min(len(room), len(data))
            room[:count] = data[:count]
            frames = self.fill(count)
            data = memoryview(data)[count:]
        if self._held:
            self._held += data
            if self._is_short():
                return frames
            data = bytes(self._held)
            self._held.clear()
        view, start = memoryview(data), 0
        try:
            while len(view) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(view, start)
                if length > self.max_frame:
                    raise ProtocolError(f"a frame of {length} bytes, and {self.max_frame} are taken")
                stop = start + _LENGTH.size + length
                if len(view) < stop:
                    if length >= _LONG:
                        came = view[start + _LENGTH.size :]
                        self._long, self._filled = np.empty(length, dtype=np.uint8).data, len(came)
                        self._long[: len(came)] = came
                        start = len(view)
                    break
                body = view[start + _LENGTH.size : stop]
                start = stop
                frames.append(self._frame_of(body))
        finally:
            self._held += view[start:]
        return frames

    def _frame_of(self, body: bytes | memoryview) -> Frame:
        parts = _unpacked(body)
        try:
            return _frame_from(*parts)
        except ProtocolError:
            self.refused = parts[1] if parts[0] == _REQUEST else 0
            raise

    def _is_short(self) -> bool:
        """Whether what is held is a part of a short frame, of which more is to come."""
        if len(self._held) < _LENGTH.size:
            return True
        (length,) = _LENGTH.unpack_from(self._held)
        return bool(length < _LONG and len(self._held) < _LENGTH.size + length)


def _unpacked(body: bytes | memoryview) -> tuple[Any, int, Any, Any]:
    """Kind, id, what, and fields of a frame, of which the id alone is known to be one."""
    try:
        parts = msgpack.unpackb(body, raw=False, use_list=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        reason = str(error) or _UNPACK_REASONS.get(type(error), type(error).__name__)
        raise ProtocolError(f"a frame is no msgpack: {reason}") from error
    if type(parts) is not tuple or len(parts) != 4:
        raise ProtocolError("a frame is no array of four")
    number = parts[1]
    if type(number) is not int or not 0 <= number < _MOST_IDS:
        raise ProtocolError("a frame has no id")
    return parts


def _frame_from(kind: Any, number: int, what: Any, rest: Any) -> Frame:
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
