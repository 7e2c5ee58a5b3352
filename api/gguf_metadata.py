"""The metadata of a GGUF file but for its tokenizer's: read from the head of the file, in milliseconds.

The package gguf makes arrays of every token and merge before it answers anything, which takes seconds.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, Final

from ..tiers.errors import ModelError

__all__ = ["MAGIC", "read_metadata"]

MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING: Final = 8
_ARRAY: Final = 9
_TOKENIZER: Final = "tokenizer."


def read_metadata(path: Path) -> dict[str, Any]:
    """Numbers, strings and lists of them, by key.

    Raises:
        ModelError: it is no GGUF file, of a version that is not read, cut off or damaged.
        OSError: it cannot be read.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Head(data).metadata()
        except (struct.error, UnicodeDecodeError, KeyError, RecursionError) as error:
            raise ModelError(f"{path}: the GGUF file is cut off or damaged") from error


class _Head:
    """Reads what comes first, from its beginning on."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = len(MAGIC)
        # A version fits two bytes: where the lower ones are empty, the file is of the other byte order.
        self._order = "<" if int.from_bytes(data[4:6], "little") else ">"

    def metadata(self) -> dict[str, Any]:
        version = self._number("I")
        if self._data[: len(MAGIC)] != MAGIC or version not in _VERSIONS:
            raise ModelError("it is no GGUF file, or of a version that is not read")
        self._number("Q")  # tensors
        found = {}
        for _ in range(self._number("Q")):
            name = self._string()
            value = self._value(self._number("I"), keep=not name.startswith(_TOKENIZER))
            if value is not None:
                found[name] = value
        return found

    def _number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(self._order + kind, self._data, self._at)
        self._at += struct.calcsize(self._order + kind)
        return value

    def _string(self) -> str:
        length = self._number("Q")
        text = self._data[self._at : self._at + length]
        if len(text) < length:
            raise struct.error
        self._at += length
        return text.decode()

    def _value(self, kind: int, *, keep: bool) -> Any:
        """The next value of a kind; None where it is not kept."""
        if kind == _STRING and not keep:
            self._pass_string()
            return None
        if kind == _STRING:
            value: Any = self._string()
        elif kind == _ARRAY:
            value = self._array(keep=keep)
        else:
            value = self._number(_SCALARS[kind])
        return value if keep else None

    def _array(self, *, keep: bool) -> list[Any]:
        kind, count = self._number("I"), self._number("Q")
        if kind in _SCALARS and not keep:
            self._at += count * struct.calcsize(self._order + _SCALARS[kind])
            return []
        values = []
        for _ in range(count):
            value = self._value(kind, keep=keep)
            if keep:
                values.append(value)
        return values

    def _pass_string(self) -> None:
        if self._at >= len(self._data):  # a count that promises more than there is would be followed for ever
            raise struct.error
        length = self._data[self._at : self._at + 8]
        self._at += 8 + int.from_bytes(length, "little" if self._order == "<" else "big")
