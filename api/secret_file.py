"""Secrets in files: what a file holds that nobody but its owner can read or write."""

from __future__ import annotations

import os
import stat
from typing import Final

from ..tiers.errors import ConfigError
from ..tiers.settings import expect_path

__all__ = ["check_secret_file", "read_secret_file"]

_MOST_BYTES: Final = 4096


def read_secret_file(setting: str, path: str | os.PathLike[str], *, most: int = _MOST_BYTES) -> bytes:
    """What a file holds, `most` bytes at most, without a line's end at its end.

    Raises:
        ConfigError: the file cannot be read, others than its owner can read or write it, or it is too long.
    """
    path = expect_path(setting, path)
    try:
        with open(path, "rb") as file:
            _check(setting, path, os.fstat(file.fileno()).st_mode)
            data = file.read(most + 1)
    except OSError as error:
        raise ConfigError(setting, f"{path} cannot be read: {error.strerror}") from error
    if len(data) > most:
        raise ConfigError(setting, f"{path} has more than {most} bytes")
    return data.removesuffix(b"\n").removesuffix(b"\r")


def check_secret_file(setting: str, path: str | os.PathLike[str]) -> None:
    """See that a file can be read, and by nobody but its owner; for who has it read by others' code.

    Raises:
        ConfigError: as of `read_secret_file`.
    """
    path = expect_path(setting, path)
    try:
        with open(path, "rb") as file:
            _check(setting, path, os.fstat(file.fileno()).st_mode)
    except OSError as error:
        raise ConfigError(setting, f"{path} cannot be read: {error.strerror}") from error


def _check(setting: str, path: str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise ConfigError(setting, f"{path} is no file")
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(setting, f"{path} can be read or written by others than its owner: chmod 600 it")
