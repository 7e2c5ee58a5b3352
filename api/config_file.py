"""``kvpager.toml``: where it lies, what it says and on which line, and what is wrong with it.

One file is read: that of ``--config``, else of ``$KVPAGER_CONFIG``, else the user's, else the machine's. Its
table ``[serve]`` has the settings of ``kvpager serve``. A file in the folder that a command is started in is
never read. Passwords are in it only as far as URLs have them; secrets lie in files of their own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..tiers.errors import ConfigError
from ..tiers.settings import expect_path, shown

__all__ = ["CONFIG_VARIABLE", "TABLE", "ConfigFile", "config_path", "nearest", "read_config"]

CONFIG_VARIABLE: Final = "KVPAGER_CONFIG"
"""The environment variable that names the file where ``--config`` does not."""
TABLE: Final = "serve"
"""The table of the settings of ``kvpager serve``."""

_NAME: Final = Path("kvpager", "kvpager.toml")
_MACHINE: Final = Path("/etc")
_MOST_BYTES: Final = 1 << 20
_HEADER: Final = re.compile(r"\s*\[\s*(?P<table>[\w-]+)\s*\]")
_KEY: Final = re.compile(r"\s*\"?'?(?P<key>[\w-]+)\"?'?\s*[.=]")


@dataclass(frozen=True)
class ConfigFile:
    """What a file says.

    Args:
        path: where it lies; None where there is none, which says nothing.
        given: of each key of `TABLE` its value, and in words where it stands.
        problems: keys that are none.
    """

    path: str | None = None
    given: Mapping[str, tuple[object, str]] = field(default_factory=dict)
    problems: tuple[ConfigError, ...] = ()


def config_path(named: str | None, environment: Mapping[str, str]) -> str | None:
    """Where the file lies that is to be read; None where there is none.

    ``--config``, ``$KVPAGER_CONFIG``, ``kvpager/kvpager.toml`` in ``$XDG_CONFIG_HOME`` or ``~/.config``,
    ``/etc/kvpager/kvpager.toml``: the first that is named, or is there.

    Args:
        named: what ``--config`` says.
        environment: variables.
    """
    if named is not None:
        return expect_path("--config", named)
    if environment.get(CONFIG_VARIABLE):
        return environment[CONFIG_VARIABLE]
    folders = [environment.get("XDG_CONFIG_HOME", ""), f"{environment.get('HOME', '')}/.config"]
    user = next((folder for folder in folders if folder.startswith("/")), "/")
    places = (Path(user, _NAME), _MACHINE / _NAME)
    return next((str(place) for place in places if os.path.lexists(place)), None)


def read_config(path: str | None, known: Iterable[str]) -> ConfigFile:
    """What the file at `path` says.

    Args:
        path: as of `config_path`.
        known: the keys that `TABLE` may have.

    Raises:
        ConfigError: it cannot be read, or is no TOML.
    """
    if path is None:
        return ConfigFile()
    import tomllib  # here, since a start without a file does without it

    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(path, f"cannot be read: {error.strerror}") from error
    if len(data) > _MOST_BYTES:
        raise ConfigError(path, f"has more than {_MOST_BYTES} bytes")
    try:
        source = data.decode()
        tables = tomllib.loads(source)
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError are such
        raise ConfigError(path, f"is no TOML: {error}") from error
    return _checked(path, _Lines(path, source), tables, set(known))


def _checked(path: str, lines: _Lines, tables: Mapping[str, Any], known: set[str]) -> ConfigFile:
    problems = []
    for name, value in tables.items():
        where = lines.where(None, name)
        if name == TABLE:
            if not isinstance(value, dict):
                problems.append(ConfigError(where, f"must be a table, got {shown(value)}"))
        elif name in known:
            problems.append(ConfigError(where, f"belongs below [{TABLE}]"))
        else:
            what = "table" if isinstance(value, dict) else "key"
            problems.append(ConfigError(where, f"is no {what} that is known{_advice(name, {TABLE, *known})}"))
    section = tables.get(TABLE)
    given: dict[str, tuple[object, str]] = {}
    for key, value in (section if isinstance(section, dict) else {}).items():
        where = lines.where(TABLE, key)
        if key in known:
            given[key] = value, where
        else:
            problems.append(ConfigError(where, f"is no setting of kvpager serve{_advice(key, known)}"))
    return ConfigFile(path, given, tuple(problems))


def nearest(word: str, known: Iterable[str]) -> str | None:
    """What was probably meant by an unknown word; None where nothing is near."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(word.replace("-", "_"), list(known), 1)), None)


def _advice(word: str, known: Iterable[str]) -> str:
    """The same for the end of a message."""
    near = nearest(word.lower(), known)
    return f"; did you mean {near}?" if near else ""


class _Lines:
    """On which line of a TOML file a key stands, which tomllib does not tell.

    Keys are looked for as they are usually written: at the beginning of a line, bare or in quotes. Where one
    is not found so, no line is told.
    """

    def __init__(self, path: str, source: str) -> None:
        self._path = path
        self._at: dict[tuple[str | None, str], int] = {}
        table: str | None = None
        for number, line in enumerate(source.splitlines(), 1):
            if (header := _HEADER.match(line)) is not None:
                table = header["table"]
                self._at.setdefault((None, table), number)
            elif (key := _KEY.match(line)) is not None:
                self._at.setdefault((table, key["key"]), number)

    def where(self, table: str | None, key: str) -> str:
        """Where a key of a table (None: of none) stands, in words."""
        number = self._at.get((table, key))
        line = "" if number is None else f", line {number}"
        return f"{self._path}{line}: {key}"
