"""``kvpager evict``: has blocks go from a tier. Without --yes it says what would go, and does nothing.

Every restriction that is given holds; one is needed, or --everything. Blocks that somebody leases, and pinned
ones, stay. What goes from host memory without a copy in the cold tier is lost, and is counted as such.
"""

from __future__ import annotations

import argparse
import inspect
import json
from typing import Any

from ..tiers.errors import ConfigError
from ..tiers.memory import format_bytes, parse_bytes
from ..tiers.settings import expect_seconds
from .admin_client import ADMIN_OPTIONS, add_admin_options, admin_client
from .pin import check_hex

__all__ = ["add_parser"]

_MOST_AGE = 1e9


def add_parser(commands: Any) -> None:
    """Add the command to argparse's subcommands."""
    parser = commands.add_parser(
        "evict",
        help="have blocks go from host memory or the cold tier",
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--tier", choices=("host", "cold"), default="host", help="where from (default: %(default)s)"
    )
    parser.add_argument("--tenant", metavar="NAME", help="blocks of this tenant; empty: of those without one")
    parser.add_argument(
        "--space",
        metavar="ID",
        action="append",
        default=[],
        help="blocks of this space; may be given several times",
    )
    parser.add_argument(
        "--prefix",
        metavar="HASH",
        action="append",
        default=[],
        help="the blocks that this prefix alone has; may be given several times",
    )
    parser.add_argument("--older-than", metavar="SECONDS", type=float, help="blocks not used for so long")
    parser.add_argument("--most-bytes", metavar="SIZE", help="so much at most, coldest first, as 2G")
    parser.add_argument("--everything", action="store_true", help="no restriction is meant")
    parser.add_argument("--yes", action="store_true", help="do it")
    add_admin_options(parser)
    parser.set_defaults(run=_run, settings=lambda options: ADMIN_OPTIONS)


def _run(options: argparse.Namespace) -> int:
    restrictions: dict[str, object] = {}
    if options.space:
        restrictions["spaces"] = [check_hex("--space", one) for one in options.space]
    if options.prefix:
        restrictions["prefixes"] = [check_hex("--prefix", one) for one in options.prefix]
    if options.tenant is not None:
        restrictions["tenant"] = options.tenant
    if options.older_than is not None:
        restrictions["older_than_seconds"] = expect_seconds(
            "--older-than", options.older_than, _MOST_AGE, above=True
        )
    if options.most_bytes is not None:
        restrictions["most_bytes"] = parse_bytes("--most-bytes", options.most_bytes)
    if not restrictions and not options.everything:
        raise ConfigError("--everything", "is needed where nothing else says what is to go")
    if options.tier == "cold" and not options.prefix and not options.yes:
        raise ConfigError(
            "--yes", "is needed: a cold tier does not tell what would go, unless --prefix names it"
        )
    body = {
        "tier": options.tier,
        "everything": options.everything,
        "dry_run": not options.yes,
        **restrictions,
    }
    with admin_client(options) as admin:
        done = admin.ask("POST", "evict", body, {})
    if options.json:
        print(json.dumps(done, indent=2))
        return 0
    words = f"{done['blocks']} blocks, {format_bytes(done['bytes'])}"
    lost = f", {done['lost_blocks']} of them without a copy elsewhere" if done["lost_blocks"] else ""
    if options.yes:
        print(f"{words} went from the {options.tier} tier{lost}")
    else:
        print(f"{words} would go from the {options.tier} tier{lost}; --yes does it")
    return 0
