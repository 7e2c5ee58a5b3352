"""``kvpager doctor``: looks at this machine and says what to change, one line for each check.

The exit code is 1 where there is a problem: something that will not work. A warning costs speed or room.
Nothing is changed, except by --remove-orphans.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from ..tiers.driver import DriverDevice, driver_devices, why_no_driver
from ..tiers.memory import parse_bytes
from ..tiers.settings import expect_text
from .doctor_arenas import check_arenas, held_by_arenas
from .doctor_cold import check_cold
from .doctor_gpu import check_driver, check_gpu, check_numa
from .doctor_memory import check_huge_pages, check_memory, check_page_lock, check_shared_memory, memlock_limit
from .doctor_sidecar import check_sidecar
from .doctor_software import check_extra, check_packages, check_python, requirements
from .findings import Finding, Level
from .option_words import in_options
from .remote_access import read_tokens
from .serve import usual_bytes
from .serve_settings import TOKEN_VARIABLE, serving

__all__ = ["add_parser"]

_SHARED_MEMORY: Final = "/dev/shm"


def add_parser(commands: Any) -> None:
    """Add the command to argparse's subcommands."""
    parser = commands.add_parser(
        "doctor",
        help="look at this machine and say what to change",
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--host-bytes",
        metavar="SIZE",
        help="host memory that is to be given, as 8G (default: what kvpager serve would take)",
    )
    parser.add_argument(
        "--socket", metavar="PATH", help="the sidecar's socket, or its URL (default: that of kvpager serve)"
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help="the token of a sidecar over TCP (default: $KVPAGER_TOKEN)"
    )
    parser.add_argument("--ca", metavar="FILE", help="authorities of a sidecar over TLS, PEM")
    parser.add_argument("--cold", metavar="URL", help="look at this cold tier, too")
    parser.add_argument(
        "--shm",
        metavar="FOLDER",
        default=_SHARED_MEMORY,
        help="where the arenas lie (default: %(default)s)",
    )
    parser.add_argument(
        "--remove-orphans", action="store_true", help="remove arenas that no process has, with their records"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=_run, settings=_settings)


def _settings(options: argparse.Namespace) -> dict[str, str]:
    """The option that each setting comes from."""
    by_variable = options.token_file is None and os.environ.get(TOKEN_VARIABLE)
    return {
        "host_bytes": "--host-bytes",
        "url": "--socket",
        "socket": "--socket",
        "token": f"${TOKEN_VARIABLE}" if by_variable else "--token-file",
        "ca": "--ca",
        "folder": "--shm",
        "cold.url": "--cold",
        "cold.path": "--cold",
    }


def _run(options: argparse.Namespace) -> int:
    findings = []
    names = _settings(options)
    for seen in _look(options):
        finding = replace(seen, found=in_options(seen.found, names))
        findings.append(finding)
        if not options.json:
            print(finding.line(), flush=True)
    if options.json:
        print(
            json.dumps(
                {"findings": [asdict(one) for one in findings], "ok": not _problems(findings)}, indent=2
            )
        )
    return 1 if _problems(findings) else 0


def _problems(findings: list[Finding]) -> int:
    return sum(one.level is Level.PROBLEM for one in findings)


def _look(options: argparse.Namespace) -> Iterator[Finding]:
    host_bytes = serving("host_bytes", os.environ) or usual_bytes(None)
    if options.host_bytes is not None:
        host_bytes = parse_bytes("--host-bytes", options.host_bytes)
    folder = Path(expect_text("--shm", options.shm))
    token = None
    if options.token_file is not None:
        tokens = read_tokens("--token-file", options.token_file)
        token = next((one for one, tenants in tokens.items() if tenants is None), next(iter(tokens)))
    elif "://" in (options.socket or "") and not options.socket.startswith("unix:"):
        token = os.environ.get(TOKEN_VARIABLE)
    reason = why_no_driver()
    devices = driver_devices() if reason is None else []
    yield check_python()
    required = requirements()
    yield check_packages(required)
    yield check_extra(required, "cuda", "GPUs", wanted=bool(devices))
    yield check_extra(required, "engine", "the engine and the demo")
    yield check_extra(required, "seal", "sealed cold tiers")
    yield from _look_at_gpus(reason, devices)
    held = held_by_arenas(folder)
    yield check_memory(host_bytes, held_bytes=held)
    yield check_shared_memory(host_bytes, held_bytes=held, folder=folder)
    yield check_page_lock(memlock_limit(), gpu=0 if devices else None)
    yield check_huge_pages(folder=folder)
    yield from check_arenas(folder, remove=options.remove_orphans)
    yield check_sidecar(options.socket, usual=serving("socket", os.environ), token=token, ca=options.ca)
    if options.cold is not None:
        yield check_cold(expect_text("--cold", options.cold))


def _look_at_gpus(reason: str | None, devices: list[DriverDevice]) -> Iterator[Finding]:
    yield check_driver(reason, devices)
    for ordinal, device in enumerate(devices):
        yield check_gpu(ordinal, device)
    yield check_numa(devices)
