"""Checks of settings that many parts share: a wrong value is an error that names the setting."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TypeVar

import numpy as np

from .errors import ConfigError

__all__ = ["expect_choice", "expect_flag", "expect_integer", "expect_number", "expect_text", "expect_type"]

_T = TypeVar("_T")


def expect_integer(setting: str, value: object, least: int, most: int | None = None) -> int:
    """The value, if it is an integer from `least` to `most`.

    Raises:
        ConfigError: it is not; the error names the setting.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ConfigError(setting, f"must be an integer of at least {least}, got {value!r}")
    if most is not None and value > most:
        raise ConfigError(setting, f"must be an integer of at most {most}, got {value!r}")
    return int(value)


def expect_number(setting: str, value: object, least: float, *, above: bool = False) -> float:
    """The value, if it is a finite number of at least `least`; with `above`, greater than that.

    Raises:
        ConfigError: it is not; the error names the setting.
    """
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < least or (above and value == least):  # type: ignore[operator, arg-type]
        bound = f"greater than {least:g}" if above else f"of at least {least:g}"
        raise ConfigError(setting, f"must be a finite number {bound}, got {value!r}")
    return float(value)  # type: ignore[arg-type]


def expect_flag(setting: str, value: object) -> bool:
    """The value, if it is True or False.

    Raises:
        ConfigError: it is not; the error names the setting.
    """
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(setting, f"must be True or False, got {value!r}")
    return bool(value)


def expect_text(setting: str, value: object) -> str:
    """The value, if it is a string that is not empty.

    Raises:
        ConfigError: it is not; the error names the setting.
    """
    if not isinstance(value, str) or not value:
        raise ConfigError(setting, f"must be a string that is not empty, got {value!r}")
    return value


def expect_choice(setting: str, value: object, choices: Collection[str]) -> str:
    """The value, if it is one of the names in `choices`.

    Raises:
        ConfigError: it is not; the error names the setting.
    """
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(setting, f"must be one of {', '.join(choices)}, got {value!r}")
    return value


def expect_type(setting: str, value: object, kind: type[_T], what: str) -> _T:
    """The value, if it is a `kind`; `what` says in words what that is.

    Raises:
        ConfigError: it is not; the error names the setting.
    """
    if not isinstance(value, kind):
        raise ConfigError(setting, f"must be {what}, got {value!r}")
    return value
