"""``kvpager pin`` and ``kvpager unpin``: prefixes that stay in host memory, and that need not any more.

HASH is that of a prefix's last block, as kvpager top lists it. Of what it begins with all blocks are kept, in
every space that has them; unpin leaves those that another pinned prefix has, too.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
from typing import Any, Final

from ..tiers.errors import ConfigError
from ..tiers.settings import shown
from .admin_client import ADMIN_OPTIONS, add_admin_options, admin_client

__all__ = ["add_parser", "check_hex"]

_HEX: Final = re.compile(r"[0-9a-f]{32}")


def add_parser(commands: Any) -> None:
    """Add both commands to argparse's subcommands."""
    for name, words, run in (
        ("pin", "keep a prefix in host memory", _pin),
        ("unpin", "let a pinned prefix go again", _unpin),
    ):
        parser = commands.add_parser(
            name,
            help=words,
            description=inspect.cleandoc(__doc__ or ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("hash", metavar="HASH", help="32 hex digits")
        parser.add_argument("--space", metavar="ID", help="in this space alone (default: in all)")
        add_admin_options(parser)
        parser.set_defaults(run=run, settings=lambda options: ADMIN_OPTIONS)


def check_hex(option: str, value: str | None) -> str | None:
    """A hash or the id of a space, if it is one; None if nothing was given.

    Raises:
        ConfigError: it is none; the error names the option.
    """
    if value is not None and _HEX.fullmatch(value) is None:
        raise ConfigError(option, f"must be 32 hex digits, got {shown(value)}")
    return value


def _pin(options: argparse.Namespace) -> int:
    return _change(options, "PUT", "are pinned now that were not")


def _unpin(options: argparse.Namespace) -> int:
    return _change(options, "DELETE", "are not pinned any more")


def _change(options: argparse.Namespace, method: str, words: str) -> int:
    name, space = check_hex("HASH", options.hash), check_hex("--space", options.space)
    with admin_client(options) as admin:
        done = admin.ask(method, f"prefixes/{name}/pin", None, {"space": space})
    if options.json:
        print(json.dumps(done, indent=2))
    else:
        print(f"{done['changed_blocks']} blocks of {name} {words}")
    return 0
