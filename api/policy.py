"""``kvpager policy [NAME]``: how blocks are ranked for eviction, and by which weights; with NAME, another
way from now on."""

from __future__ import annotations

import argparse
import inspect
import json
from typing import Any

from ..tiers.settings import expect_choice
from .admin_client import ADMIN_OPTIONS, add_admin_options, admin_client

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    """Add the command to argparse's subcommands."""
    parser = commands.add_parser(
        "policy",
        help="how blocks are ranked for eviction, and another way",
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "policy", metavar="NAME", nargs="?", help="rank them so (default: say how it is done)"
    )
    add_admin_options(parser)
    parser.set_defaults(run=_run, settings=lambda options: ADMIN_OPTIONS)


def _run(options: argparse.Namespace) -> int:
    with admin_client(options) as admin:
        said = admin.get("policy")
        if options.policy is not None:
            expect_choice("NAME", options.policy, said["policies"])
            said = admin.ask("PUT", "policy", {"policy": options.policy}, {})
    if options.json:
        print(json.dumps(said, indent=2))
    elif options.policy is None:
        print(f"{said['policy']} (of {', '.join(said['policies'])})")
        for name, weight in said["weights"].items():
            bounds = f"{'above ' * weight['above']}{weight['least']:g} to {weight['most']:g}"
            print(f"  {name}: {weight['value']:g} (usually {weight['usual']:g}; {bounds})")
    else:
        before, after = said["changed"].get("policy", (options.policy, options.policy))
        print(f"{after}, as it was" if before == after else f"{after}, and no longer {before}")
    return 0
