"""Checks of settings that many parts share: a wrong value is an error that names the setting."""

from __future__ import annotations

import numpy as np

from .errors import ConfigError

__all__ = ["expect_integer"]


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
