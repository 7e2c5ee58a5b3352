"""``kvpager status``: what a sidecar has and does, by its admin process. --watch shows it until Ctrl-C.

It begins with what is degraded, and why. A sidecar that does not answer while it is watched is waited for.
"""

from __future__ import annotations

import argparse
import inspect
import json
import time
from typing import Any, Final

from ..tiers.errors import AccessDeniedError, ServiceError, ServiceUnavailableError
from ..tiers.settings import expect_seconds
from .admin_client import ADMIN_OPTIONS, AdminClient, add_admin_options, admin_client

__all__ = ["add_parser"]

_SECONDS: Final = 2.0
_MOST_SECONDS: Final = 3600.0
_LEAST_SECONDS: Final = 0.2
_PREFIXES: Final = 5


def add_parser(commands: Any) -> None:
    """Add the command to argparse's subcommands."""
    parser = commands.add_parser(
        "status",
        help="what a sidecar has and does",
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--watch",
        metavar="SECONDS",
        type=float,
        nargs="?",
        const=_SECONDS,
        help="show it again and again, so often (default: every 2); with --json an object a line",
    )
    add_admin_options(parser)
    parser.set_defaults(run=_run, settings=lambda options: ADMIN_OPTIONS)


def _run(options: argparse.Namespace) -> int:
    if options.watch is None:
        with admin_client(options) as admin:
            seen = _look(admin)
        _print(seen, as_json=options.json)
        return 0
    seconds = max(_LEAST_SECONDS, expect_seconds("--watch", options.watch, _MOST_SECONDS, above=True))
    if options.json:
        while True:
            print(json.dumps(_look_again(options)), flush=True)
            time.sleep(seconds)
    from rich.live import Live

    from .status_view import StatusView, terminal

    view = StatusView()
    console = terminal()
    if not console.is_terminal:
        while True:
            seen = _look_again(options)
            console.print(view.shown(seen) if "error" not in seen else view.waiting(seen["error"]))
            time.sleep(seconds)
    with Live(view.waiting(), auto_refresh=False, screen=True) as live:
        while True:
            seen = _look_again(options)
            live.update(
                view.shown(seen) if "error" not in seen else view.waiting(seen["error"]), refresh=True
            )
            time.sleep(seconds)


def _look(admin: AdminClient) -> dict[str, Any]:
    """All that is shown."""
    status = admin.get("status")
    seen: dict[str, Any] = {
        "status": status,
        "tiers": [admin.get(f"tiers/{tier}") for tier in status["tiers"]],
        "prefixes": [],
    }
    try:
        seen["prefixes"] = admin.get("prefixes", order="hottest", limit=_PREFIXES)["items"]
    except (ServiceUnavailableError, AccessDeniedError):
        raise
    except ServiceError as error:
        # Memory without a file has no records that another process could look at.
        seen["no_prefixes"] = str(error)
    return seen


def _look_again(options: argparse.Namespace) -> dict[str, Any]:
    """The same, by whichever admin process there is by now; ``error`` where there is none."""
    try:
        with admin_client(options) as admin:
            return _look(admin)
    except ServiceUnavailableError as error:
        return {"error": str(error)}


def _print(seen: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(seen, indent=2))
        return
    from .status_view import StatusView, terminal

    terminal().print(StatusView().shown(seen))
