"""What `kvpager doctor` says of sidecars: the one on a socket, and the arenas that lie about."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from .. import __version__
from ..tiers.arena_file import ArenaFile, find_arenas
from ..tiers.errors import ConfigError, KVPagerError
from ..tiers.memory import format_bytes
from .client import connect
from .findings import Finding, ok, problem, warning
from .listening import default_socket_path

__all__ = ["check_arenas", "check_sidecar", "held_by_arenas"]

_SHARED_MEMORY: Final = Path("/dev/shm")
_TIMEOUT: Final = 2.0
"""Seconds that a sidecar may take to answer."""


def check_sidecar(socket: str | None = None, *, token: str | None = None, ca: str | None = None) -> Finding:
    """Whether a sidecar answers, and what it has.

    Args:
        socket: path of its socket, or its URL; None: where this user's is by default. There it may be absent.
        token, ca: as for `connect`.
    """
    try:
        place = default_socket_path() if socket is None else socket
        if socket is None and not os.path.lexists(place):
            return ok("sidecar", f"none on {place}", "kvpager serve starts one")
        with connect(place, name="kvpager doctor", timeout=_TIMEOUT, token=token, ca=ca) as client:
            began = time.monotonic()
            stats = client.stats()
            seconds = time.monotonic() - began
    except KVPagerError as error:
        return problem("sidecar", str(error), "start it (kvpager serve), or see its log")
    arena, counts, host = stats["arena"], stats["sidecar"], stats["host"]
    version = counts.get("version", "of an unknown version")
    found = (
        f"{place} answers in {seconds * 1e3:.1f} ms: kvpager {version}, "
        f"{format_bytes(arena['ready_bytes'])} of {format_bytes(arena['capacity_bytes'])} there, "
        # The doctor is one of them.
        f"{counts['clients'] - 1} clients, {counts['leased']} leases, {counts['reserved']} reservations, "
        f"{host['committed']} blocks committed, {host['dropped']} dropped"
    )
    if version != __version__:
        return warning("sidecar", found, f"this is kvpager {__version__}: run the same on both sides")
    return ok("sidecar", found)


def check_arenas(folder: Path = _SHARED_MEMORY, *, remove: bool = False) -> list[Finding]:
    """The arenas in a folder: whose sidecar lives, and which are orphans.

    Args:
        remove: remove those that nobody has, with their records.
    """
    try:
        arenas = find_arenas(folder)
    except ConfigError as error:
        return [problem("arenas", str(error), "give the folder of the arenas (--shm)")]
    if not arenas:
        return [ok("arenas", f"none in {folder}")]
    findings = []
    for arena in arenas:
        found = f"{arena.path}, {format_bytes(arena.held_bytes)} of {format_bytes(arena.nbytes)} there"
        if arena.owned:
            findings.append(ok("arena", f"{found}, its sidecar lives"))
        elif arena.owned is None:
            findings.append(ok("arena", f"{found}, another user's"))
        elif remove:
            findings.append(_removed(arena.path, found))
        else:
            findings.append(
                warning(
                    "arena",
                    f"{found}, and no sidecar has it",
                    "the next one on the same socket takes it over; if none is to come, --remove-orphans",
                )
            )
    return findings


def held_by_arenas(folder: Path = _SHARED_MEMORY) -> int:
    """Bytes that the arenas in a folder have; 0 where it cannot be read."""
    try:
        return sum(arena.held_bytes for arena in find_arenas(folder))
    except ConfigError:
        return 0


def _removed(path: str, found: str) -> Finding:
    try:
        # It is locked meanwhile: a sidecar that starts now waits for it, or has taken it first.
        arena = ArenaFile(path, fresh=True, keep=True)
    except ConfigError as error:
        return warning(
            "arena", f"{found}, not removed ({error.problem})", f"look at it, and remove it: rm {path}*"
        )
    try:
        arena.remove()
    finally:
        arena.close()
    return ok("arena", f"{found}, removed")
