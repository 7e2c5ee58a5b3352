"""Settings of a command, each of which can be given as a flag, in the environment and in ``kvpager.toml``.

A `Setting` is one entry of a command's table. All of its names are made of one: ``--host-bytes`` is
``KVPAGER_HOST_BYTES`` in the environment and ``host_bytes`` in the file. A flag goes before the environment,
that before the file, and the file before the default; what is given once replaces what stands behind it, also
where it is a list.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from ..kvstore.tenants import check_quotas
from ..tiers.errors import ConfigError
from ..tiers.memory import parse_bytes
from ..tiers.settings import expect_integer, expect_number, expect_path, expect_seconds, public_url, shown

__all__ = [
    "Given",
    "Kind",
    "Setting",
    "Source",
    "add_flags",
    "integer",
    "integers",
    "look_up",
    "numbers_by_name",
    "path",
    "seconds",
    "size",
    "sizes_by_tenant",
    "switch",
    "text",
    "url",
]

_PREFIX: Final = "KVPAGER_"
_YES: Final = frozenset({"1", "true", "yes", "on"})
_NO: Final = frozenset({"0", "false", "no", "off"})
_SEPARATORS: Final = re.compile(r"[,\s]+")


@dataclass(frozen=True)
class Kind:
    """What values a setting takes.

    Args:
        words: what it is, in words for a table.
        example: a value as a file writes it.
        read: the value, of the setting's flag (for errors) and of what the command line or a file gave.
        parse: what `read` takes, of the flag and of the text of an environment variable.
        flag: what argparse is told of the flag.
        shown: the value as it may be printed.
    """

    words: str
    example: str
    read: Callable[[str, object], Any]
    parse: Callable[[str, str], object] = lambda _, text: text
    flag: Mapping[str, Any] = field(default_factory=dict)
    shown: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Setting:
    """One setting of a command.

    Args:
        flag: as on the command line: ``--host-bytes``.
        kind: what values it takes.
        help: what it is for, and its default.
        default: the value where nobody gives one, as `kind` reads it.
        metavar: what the flag's value is called in its help; None for a switch.
    """

    flag: str
    kind: Kind
    help: str
    default: Any = None
    metavar: str | None = None

    @property
    def name(self) -> str:
        """Its key in the file, and its attribute among parsed options."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return _PREFIX + self.name.upper()


class Source(StrEnum):
    """Where a value came from."""

    FLAG = "flag"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"


@dataclass(frozen=True)
class Given:
    """What was given for a setting, not yet read.

    Args:
        setting: whose it is.
        source: where it came from.
        where: the same in words that begin the message of an error.
        raw: as the setting's kind reads it; the value itself where it is the default.
    """

    setting: Setting
    source: Source
    where: str
    raw: object

    def value(self) -> Any:
        """The value.

        Raises:
            ConfigError: it is none; the error names the setting's flag.
        """
        raw = self.raw
        if self.source is Source.DEFAULT:
            return raw
        if self.source is Source.ENVIRONMENT:
            raw = self.setting.kind.parse(self.setting.flag, str(raw))
        return self.setting.kind.read(self.setting.flag, raw)


def add_flags(parser: argparse.ArgumentParser, settings: Sequence[Setting]) -> None:
    """Add the flags of a table to a command. One that is not given is None among the parsed options."""
    for one in settings:
        options = {**one.kind.flag, "help": one.help, "default": None}
        if one.metavar is not None:
            options["metavar"] = one.metavar
        parser.add_argument(one.flag, **options)


def look_up(
    settings: Sequence[Setting],
    flags: argparse.Namespace,
    environment: Mapping[str, str],
    filed: Mapping[str, tuple[object, str]],
) -> dict[str, Given]:
    """What is given for each setting of a table, by its name.

    Args:
        flags: parsed options.
        environment: variables; an empty one counts as none.
        filed: of each key of the file its value, and in words where it stands.
    """
    found = {}
    for one in settings:
        flag = getattr(flags, one.name, None)
        if flag is not None:
            found[one.name] = Given(one, Source.FLAG, one.flag, flag)
        elif environment.get(one.variable):
            found[one.name] = Given(one, Source.ENVIRONMENT, f"${one.variable}", environment[one.variable])
        elif one.name in filed:
            raw, where = filed[one.name]
            found[one.name] = Given(one, Source.FILE, where, raw)
        else:
            found[one.name] = Given(one, Source.DEFAULT, one.flag, one.default)
    return found


# ---- kinds ----


def _as_text(flag: str, raw: object) -> str:
    if not isinstance(raw, str):
        raise ConfigError(flag, f"must be a string, got {shown(raw)}")
    return raw


def _as_size(flag: str, raw: object) -> int:
    if isinstance(raw, str):
        return parse_bytes(flag, raw)
    if isinstance(raw, bool) or not isinstance(raw, int):
        raise ConfigError(flag, f"must be a size like 8G, 512M or 1.5G, got {shown(raw)}")
    return parse_bytes(flag, str(raw))


def _as_switch(flag: str, raw: object) -> bool:
    if not isinstance(raw, bool):
        raise ConfigError(flag, f"must be true or false, got {shown(raw)}")
    return raw


def _switch_of(flag: str, given: str) -> bool:
    word = given.strip().lower()
    if word not in _YES | _NO:
        raise ConfigError(flag, f"must be true or false, got {shown(given)}")
    return word in _YES


def _number_of(flag: str, given: str) -> object:
    """A number as TOML would have it; text that is none stays, and is refused where it is read."""
    for kind in (int, float):
        try:
            return kind(given)
        except ValueError:
            continue
    return given


def _listed(flag: str, given: str) -> list[str]:
    return [part for part in _SEPARATORS.split(given) if part]


def _as_quotas(flag: str, raw: object) -> dict[str, int]:
    """Bytes by tenant, of ``TENANT=SIZE`` each or of a table."""
    if isinstance(raw, Mapping):
        return check_quotas(flag, {str(tenant): _as_size(flag, given) for tenant, given in raw.items()})
    if not isinstance(raw, list):
        raise ConfigError(flag, f"must be a table of sizes by tenant, got {shown(raw)}")
    quotas: dict[str, int] = {}
    for given in raw:
        tenant, said, amount = _as_text(flag, given).rpartition("=")
        if not said:
            raise ConfigError(flag, f"must be TENANT=SIZE, got {shown(given)}")
        if tenant in quotas:
            raise ConfigError(flag, f"names tenant {tenant!r} twice")
        quotas[tenant] = parse_bytes(flag, amount)
    return check_quotas(flag, quotas)


def _as_numbers(flag: str, raw: object) -> dict[str, float]:
    """Numbers by name, of ``NAME=NUMBER`` each or of a table."""
    if isinstance(raw, Mapping):
        return {str(name): expect_number(flag, given, 0.0) for name, given in raw.items()}
    if not isinstance(raw, list):
        raise ConfigError(flag, f"must be a table of numbers by name, got {shown(raw)}")
    numbers: dict[str, float] = {}
    for given in raw:
        name, said, number = _as_text(flag, given).partition("=")
        if not said:
            raise ConfigError(flag, f"must be NAME=NUMBER, got {shown(given)}")
        if name in numbers:
            raise ConfigError(flag, f"names {name!r} twice")
        numbers[name] = expect_number(flag, _number_of(flag, number), 0.0)
    return numbers


def text(example: str) -> Kind:
    """Any text; whoever uses it says what is wrong with it."""
    return Kind("text", f'"{example}"', _as_text)


def url(example: str) -> Kind:
    """A URL, shown without passwords."""
    return Kind("URL", f'"{example}"', _as_text, shown=lambda value: value and public_url(value))


def path(example: str) -> Kind:
    """A file's or folder's path."""
    return Kind("path", f'"{example}"', expect_path)


def size(example: str) -> Kind:
    """Bytes, as ``8G`` or a number."""
    return Kind("size", f'"{example}"', _as_size)


def seconds(most: float, example: str) -> Kind:
    """Seconds from 0 to `most`."""
    return Kind(
        "seconds",
        example,
        lambda flag, raw: expect_seconds(flag, raw, most),
        _number_of,
        {"type": float},
    )


def integer(least: int, most: int, example: str) -> Kind:
    """A whole number."""
    return Kind(
        "integer",
        example,
        lambda flag, raw: expect_integer(flag, raw, least, most),
        _number_of,
        {"type": int},
    )


def integers(least: int, most: int, example: str) -> Kind:
    """Whole numbers: a flag that is given several times, a list in the file."""

    def read(flag: str, raw: object) -> list[int]:
        if not isinstance(raw, list):
            raise ConfigError(flag, f"must be a list of integers, got {shown(raw)}")
        return [expect_integer(flag, one, least, most) for one in raw]

    return Kind(
        "list of integers",
        example,
        read,
        lambda flag, given: [_number_of(flag, part) for part in _listed(flag, given)],
        {"type": int, "action": "append"},
    )


def sizes_by_tenant(example: str) -> Kind:
    """Bytes by tenant: a flag ``TENANT=SIZE`` that is given several times, a table in the file."""
    return Kind("table of sizes", example, _as_quotas, _listed, {"action": "append"})


def numbers_by_name(example: str) -> Kind:
    """Numbers by name: a flag ``NAME=NUMBER`` that is given several times, a table in the file."""
    return Kind("table of numbers", example, _as_numbers, _listed, {"action": "append"})


def switch() -> Kind:
    """Yes or no; ``--no-...`` says no where the file says yes."""
    return Kind("true or false", "true", _as_switch, _switch_of, {"action": argparse.BooleanOptionalAction})
