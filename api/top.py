"""``kvpager top``: the prefixes that host memory has, largest, hottest or most shared first."""

from __future__ import annotations

import argparse
import inspect
import json
from typing import Any, Final

from ..tiers.settings import expect_integer
from .admin_client import ADMIN_OPTIONS, add_admin_options, admin_client
from .pin import check_hex

__all__ = ["add_parser"]

_ORDERS: Final = ("largest", "hottest", "shared")
_MOST: Final = 1000


def add_parser(commands: Any) -> None:
    """Add the command to argparse's subcommands."""
    parser = commands.add_parser(
        "top",
        help="the largest, hottest or most shared prefixes",
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--by",
        choices=_ORDERS,
        default=_ORDERS[0],
        help="by tokens, how often they were matched, or how many go on from them (default: %(default)s)",
    )
    parser.add_argument(
        "-n", "--count", metavar="N", type=int, default=20, help="how many at most (default: %(default)s)"
    )
    parser.add_argument("--tenant", metavar="NAME", help="of this tenant alone")
    parser.add_argument("--space", metavar="ID", help="in this space alone")
    add_admin_options(parser)
    parser.set_defaults(run=_run, settings=lambda options: ADMIN_OPTIONS)


def _run(options: argparse.Namespace) -> int:
    count = expect_integer("--count", options.count, 1, _MOST)
    space = check_hex("--space", options.space)
    with admin_client(options) as admin:
        page = admin.get("prefixes", order=options.by, tenant=options.tenant, space=space, limit=count)
    if options.json:
        print(json.dumps(page, indent=2))
        return 0
    from .status_view import prefix_table, terminal

    if page["items"]:
        terminal().print(prefix_table(page["items"]))
    else:
        print("host memory has no prefixes of this kind")
    return 0
