"""``kvpager config``: what a sidecar would be started with, and where each value comes from.

show takes the options of kvpager serve and says what each setting comes to; check says everything that is
wrong with a file; example prints a file with every setting. Secrets are never printed: they lie in files, or
in variables of which show says no more than that they are set.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
from collections.abc import Mapping
from typing import Any, Final

from ..tiers.errors import ConfigError
from ..tiers.memory import format_bytes
from .config_file import CONFIG_VARIABLE, TABLE, config_path, nearest, read_config
from .option_words import in_options
from .serve_settings import (
    COLD_SECRET_VARIABLE,
    SERVE_SETTINGS,
    TOKEN_VARIABLE,
    add_settings,
    find_settings,
)
from .setting import Given, look_up

__all__ = ["add_parser", "example"]

_SECRETS: Final = (TOKEN_VARIABLE, COLD_SECRET_VARIABLE)
_OTHERS: Final = frozenset(
    {
        *_SECRETS,
        CONFIG_VARIABLE,
        *("KVPAGER_ADMIN_URL", "KVPAGER_ADMIN_TOKEN", "KVPAGER_CACHE_DIR", "KVPAGER_URL", "KVPAGER_OPTIONS"),
        *("KVPAGER_VENV", "KVPAGER_PYTHON", "KVPAGER_TORCH"),
    }
)
"""Variables that are no settings of a sidecar, and mean something."""
_WIDTH: Final = 100


def add_parser(commands: Any) -> None:
    """Add the command to argparse's subcommands."""
    parser = commands.add_parser(
        "config",
        help="what a sidecar would be started with, and where each value comes from",
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", dest="action", required=True)
    show = actions.add_parser("show", help="each setting, its value and where it comes from")
    show.add_argument("--json", action="store_true", help="print it as JSON")
    add_settings(show)
    show.set_defaults(run=_show)
    check = actions.add_parser("check", help="everything that is wrong with a file")
    check.add_argument("file", metavar="FILE")
    check.set_defaults(run=_check)
    actions.add_parser("example", help="print a file with every setting").set_defaults(run=_example)
    parser.set_defaults(settings=_settings)


def _settings(options: argparse.Namespace) -> dict[str, str]:
    """Where each setting comes from, in words."""
    given: dict[str, Given] = getattr(options, "given", {})
    return {one.setting.flag: one.where for one in given.values()}


def _show(options: argparse.Namespace) -> int:
    options.given = find_settings(options, os.environ)
    path = config_path(options.config, os.environ)
    rows = [(name, given.setting.kind.shown(given.value()), given) for name, given in options.given.items()]
    secrets = {name: bool(os.environ.get(name)) for name in _SECRETS}
    if options.json:
        settings = {
            name: {"value": value, "source": given.source, "where": given.where}
            for name, value, given in rows
        }
        print(json.dumps({"file": path, "settings": settings, "secrets": secrets}, indent=2))
    else:
        print(f"file: {'none' if path is None else path}")
        for name, value, given in rows:
            print(f"{name:<17} {_words(name, value):<34} {_source_words(given)}")
        for name, there in secrets.items():
            print(f"${name}: {'set, and not shown' if there else 'not set'}")
    for mistaken in _mistaken(os.environ):
        print(f"kvpager config: {mistaken}", file=sys.stderr)
    return 0


def _source_words(given: Given) -> str:
    return given.where if given.source in ("environment", "file") else str(given.source)


def _words(name: str, value: object) -> str:
    """A value in a column; what is not said is a dash."""
    if value is None or value in ({}, (), []):
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value} ({format_bytes(value)})"
    if isinstance(value, Mapping):
        return ", ".join(f"{tenant}={format_bytes(most)}" for tenant, most in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


def _mistaken(environment: Mapping[str, str]) -> list[str]:
    """Variables that look like one of the settings, and are none: nobody else would say so."""
    known = {one.variable for one in SERVE_SETTINGS}
    unknown = [name for name in environment if name.startswith("KVPAGER_") and name not in known | _OTHERS]
    nearly = {name: nearest(name, known) for name in unknown}
    return [f"${name} is no setting; did you mean ${near}?" for name, near in nearly.items() if near]


def _check(options: argparse.Namespace) -> int:
    file = read_config(options.file, (one.name for one in SERVE_SETTINGS))
    problems = [str(one) for one in file.problems]
    for given in look_up(SERVE_SETTINGS, argparse.Namespace(), {}, file.given).values():
        try:
            given.value()
        except ConfigError as error:
            problems.append(in_options(str(error), {given.setting.flag: given.where}))
    for problem in problems:
        print(f"kvpager config: {problem}", file=sys.stderr)
    if not problems:
        print(f"{file.path}: {len(file.given)} settings, nothing is wrong with them")
    return 1 if problems else 0


def _example(options: argparse.Namespace) -> int:
    print(example(), end="")
    return 0


def example() -> str:
    """A ``kvpager.toml`` with every setting, all of them commented out."""
    lines = [
        "# kvpager.toml: the settings of kvpager serve. It is the file of --config or $KVPAGER_CONFIG, else",
        "# ~/.config/kvpager/kvpager.toml of the user who starts it, else /etc/kvpager/kvpager.toml.",
        "# For host_bytes the flag is --host-bytes and the variable KVPAGER_HOST_BYTES: both go before it.",
        "# kvpager config check FILE says what is wrong with it, kvpager config show what it comes to.",
        "",
        f"[{TABLE}]",
    ]
    for one in SERVE_SETTINGS:
        lines += ["", *_comment(one.help), f"# {one.name} = {one.kind.example}"]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    from textwrap import wrap

    return wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
