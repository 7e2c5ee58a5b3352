"""Checks of settings that many parts share: a wrong value is an error that names the setting."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit

import numpy as np
import numpy.typing as npt

from .errors import ConfigError

__all__ = [
    "MOST_BYTES",
    "MOST_SECONDS",
    "expect_array",
    "expect_byte_strings",
    "expect_bytes",
    "expect_choice",
    "expect_flag",
    "expect_integer",
    "expect_methods",
    "expect_number",
    "expect_path",
    "expect_seconds",
    "expect_text",
    "expect_type",
    "public_url",
    "shown",
    "shown_url",
]

MOST_BYTES: Final = (1 << 63) - 1
"""More than any memory or disk has: sizes up to this fit the integers of the system."""
MOST_SECONDS: Final = 1e6
"""The longest that anything is waited for, eleven days: what the system's waits take is not much more."""

_T = TypeVar("_T")
_Number = TypeVar("_Number", bound=np.integer[Any])

_SHOWN: Final = 100
_SHOWN_BITS: Final = 256


def shown(value: object) -> str:
    """A value as the message of an error shows it: cut where it is long."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes, somewhere inside
        return f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def shown_url(url: str) -> str:
    """A URL as the message of an error shows it: of one that may hold a password no more than its scheme."""
    scheme, separator, rest = url.partition("://")
    if "@" not in rest and "?" not in rest:
        return shown(url)
    return shown(f"{scheme}{separator}...")


def public_url(url: str) -> str:
    """A URL as an operator may see it: passwords in it, and in its query, are three stars.

    One that cannot be taken apart is cut as by `shown_url`.
    """
    try:
        parts = urlsplit(url)
        query = parse_qsl(parts.query, keep_blank_values=True)
    except ValueError:
        return shown_url(url)
    user, at, place = parts.netloc.rpartition("@")
    name, colon, _ = user.partition(":")
    hidden = [(key, "***" if "password" in key.lower() else value) for key, value in query]
    if not colon and hidden == query:
        return url
    asked = f"?{urlencode(hidden, safe='*/:')}" if hidden else ""
    return f"{parts.scheme}://{name}{colon and ':***'}{at}{place}{parts.path}{asked}"


def expect_integer(setting: str, value: object, least: int, most: int | None = None) -> int:
    """The value, if it is an integer from `least` to `most`.

    Raises:
        ConfigError: it is not; the error names the setting.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ConfigError(setting, f"must be an integer of at least {least}, got {shown(value)}")
    if most is not None and value > most:
        raise ConfigError(setting, f"must be an integer of at most {most}, got {shown(value)}")
    return int(value)


def expect_number(
    setting: str, value: object, least: float, most: float | None = None, *, above: bool = False
) -> float:
    """The value, if it is a finite number from `least` to `most`; with `above`, greater than `least`.

    Raises:
        ConfigError: it is not; the error names the setting.
    """
    number = math.nan
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # an integer beyond all floats
            number = math.inf
    if not math.isfinite(number) or number < least or (above and number == least):
        bound = f"greater than {least:g}" if above else f"of at least {least:g}"
        raise ConfigError(setting, f"must be a finite number {bound}, got {shown(value)}")
    if most is not None and number > most:
        raise ConfigError(setting, f"must be a number of at most {most:g}, got {shown(value)}")
    return number


def expect_seconds(setting: str, value: object, most: float = MOST_SECONDS, *, above: bool = False) -> float:
    """The value, if it is a number of seconds that may be waited: from 0 to `most`; with `above`, not 0.

    Raises:
        ConfigError: it is not; the error names the setting.
    """
    return expect_number(setting, value, 0.0, most, above=above)


def expect_flag(setting: str, value: object) -> bool:
    """The value, if it is True or False.

    Raises:
        ConfigError: it is not; the error names the setting.
    """
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(setting, f"must be True or False, got {shown(value)}")
    return bool(value)


def expect_text(setting: str, value: object, *, empty: bool = False) -> str:
    """The value, if it is a string that UTF-8 can hold, and not empty unless `empty` allows it.

    Raises:
        ConfigError: it is not; the error names the setting.
    """
    if not isinstance(value, str) or not (value or empty):
        what = "a string" if empty else "a string that is not empty"
        raise ConfigError(setting, f"must be {what}, got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(setting, f"must be text that UTF-8 can hold, got {shown(value)}") from error
    return value


def expect_path(setting: str, value: object) -> str:
    """The value, if it names a file or a folder: a string or a path that the system can write.

    Raises:
        ConfigError: it is not; the error names the setting.
    """
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise ConfigError(setting, f"must be a path, got {shown(value)}")
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise ConfigError(setting, f"must be a path, got {shown(value)}") from error
    return path


def expect_bytes(setting: str, value: object, length: int | None = None, *, least: int = 0) -> bytes:
    """The value, if it is a byte string: of exactly `length` bytes, or of at least `least`.

    Raises:
        ConfigError: it is not; the error names the setting.
    """
    if not isinstance(value, bytes):
        what = "bytes" if length is None else f"{length} bytes"
        raise ConfigError(setting, f"must be {what}, got {shown(value)}")
    if length is not None and len(value) != length:
        raise ConfigError(setting, f"must be {length} bytes, got {len(value)}")
    if len(value) < least:
        raise ConfigError(setting, f"must be at least {least} bytes, got {len(value)}")
    return value


def expect_byte_strings(setting: str, values: object, length: int) -> Sequence[bytes]:
    """The values, if they are a list (or another sequence) of byte strings, `length` bytes each.

    Costs some 40 ns a value, without a loop in Python.

    Raises:
        ConfigError: they are not; the error names the setting.
    """
    if not isinstance(values, list | tuple):
        if not isinstance(values, Sequence) or isinstance(values, str | bytes | bytearray | memoryview):
            raise ConfigError(
                setting, f"must be a list of byte strings of {length} bytes each, got {shown(values)}"
            )
        values = list(values)
    if not set(map(type, values)) <= {bytes} or not set(map(len, values)) <= {length}:
        wrong = next(one for one in values if type(one) is not bytes or len(one) != length)
        raise ConfigError(setting, f"must be byte strings of {length} bytes each, got {shown(wrong)}")
    return values


def expect_array(setting: str, values: object, dtype: np.dtype[_Number]) -> npt.NDArray[_Number]:
    """The values as an array [n] of this type, if they are integers that it holds.

    An array of the type is taken as it is, without a look at its values; this costs 0.1 us.

    Raises:
        ConfigError: they are not; the error names the setting.
    """
    if type(values) is np.ndarray and values.dtype is dtype and values.ndim == 1:
        return values
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(setting, f"must be a flat list of integers: {error}") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigError(setting, f"must be a flat list of integers, got {array.dtype} {array.shape}")
    limits = np.iinfo(dtype)
    if array.size and not limits.min <= array.min() <= array.max() <= limits.max:
        raise ConfigError(setting, f"must fit {dtype}, got {array.min()} to {array.max()}")
    return array.astype(dtype)


def expect_choice(setting: str, value: object, choices: Collection[str]) -> str:
    """The value, if it is one of the names in `choices`.

    Raises:
        ConfigError: it is not; the error names the setting.
    """
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(setting, f"must be one of {', '.join(choices)}, got {shown(value)}")
    return value


def expect_type(setting: str, value: object, kind: type[_T], what: str) -> _T:
    """The value, if it is a `kind`; `what` says in words what that is.

    Raises:
        ConfigError: it is not; the error names the setting.
    """
    if not isinstance(value, kind):
        raise ConfigError(setting, f"must be {what}, got {shown(value)}")
    return value


def expect_methods(setting: str, value: object, names: Collection[str], what: str) -> None:
    """Refuse a value that lacks one of these methods; `what` says in words what it must be.

    For what is given by its interface. A class is none, though it has the methods of its instances.

    Raises:
        ConfigError: it lacks one; the error names the setting.
    """
    if isinstance(value, type) or not all(callable(getattr(value, name, None)) for name in names):
        raise ConfigError(setting, f"must be {what}, got {shown(value)}")
