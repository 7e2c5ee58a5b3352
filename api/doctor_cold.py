"""What `kvpager doctor` says of a cold tier: a Redis, or a folder."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..tiers.cold_url import cold_folder
from ..tiers.errors import ConfigError, KVPagerError
from ..tiers.memory import format_bytes
from .findings import Finding, ok, problem, warning

if TYPE_CHECKING:
    from ..tiers.redis_wire import Wire

__all__ = ["check_cold", "check_disk", "check_redis"]

_CHECK: Final = "cold tier"
_SECONDS: Final = 2.0
"""How long a Redis may take to answer."""
_PINGS: Final = 20
_SLOW: Final = 0.005
"""Seconds of a round trip from which on a Redis is far away."""
_LITTLE: Final = 1 << 30
"""Free bytes of a disk below which it is hardly worth having."""


def check_cold(url: str) -> Finding:
    """The cold tier that a URL names; nothing is left there."""
    try:
        path = cold_folder(url)
    except ConfigError as error:
        return problem(_CHECK, str(error), "see docs/reference.md for the URLs")
    return check_redis(url) if path is None else check_disk(Path(path))


def check_redis(url: str) -> Finding:
    """Whether a Redis answers, its version, its memory, and how far away it is."""
    # Here, since redis takes a good part of the time in which a command starts.
    from ..tiers.redis_url import Address
    from ..tiers.redis_wire import CONNECT_ERRORS, describe

    try:
        address = Address.parse(url)
    except ConfigError as error:
        return problem(_CHECK, str(error), "see docs/reference.md for the URLs")
    try:
        with closing(address.wire()) as wire:
            wire.connect(_SECONDS)
            info = _info(wire)
            seconds = _round_trip(wire)
    except (*CONNECT_ERRORS, KVPagerError, TimeoutError) as error:
        return problem(
            _CHECK,
            f"{address.label} cannot be used: {describe(error)}",
            "see that it runs and can be reached, and that the URL has the right password and ssl_...",
        )
    found = f"Redis {info.get('redis_version', 'of an unknown version')} at {address.label}"
    clustered = info.get("cluster_enabled") == "1"
    if clustered != address.cluster and "cluster_enabled" in info:
        return problem(
            _CHECK,
            f"{found} is {'a' if clustered else 'no'} node of a Cluster",
            f"use {'redis+cluster://' if clustered else 'redis://'}",
        )
    most, policy = int(info.get("maxmemory", 0)), info.get("maxmemory_policy", "unknown")
    found += (
        f", {seconds * 1e3:.2f} ms away, maxmemory {format_bytes(most) if most else 'none'}, policy {policy}"
    )
    if "maxmemory" not in info:
        return ok(_CHECK, f"{found} (this user may not see more: INFO memory)")
    if not most:
        return warning(_CHECK, found, "it grows until the machine has no memory: set maxmemory, and a policy")
    if policy == "noeviction":
        return warning(_CHECK, found, "a full one takes nothing new: set maxmemory-policy allkeys-lru")
    if seconds > _SLOW:
        return warning(_CHECK, found, "it is far away: a block may come later than it would be computed")
    return ok(_CHECK, found)


def check_disk(folder: Path) -> Finding:
    """Whether a folder can be written and renamed in, and what is free there."""
    advice = "give a folder of its own that this user can write"
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        return problem(_CHECK, f"{there} is no folder", advice)
    free = shutil.disk_usage(there).free
    found = f"{folder}, {format_bytes(free)} free"
    if there != folder:
        try:
            # Permissions do not tell: of some file systems not even root can make a folder in them.
            with tempfile.TemporaryDirectory(prefix="kvpager-doctor-", dir=there):
                pass
        except OSError as error:
            return problem(
                _CHECK,
                f"{folder} is not there and cannot be made: no folder can be made in {there} "
                f"({error.strerror})",
                advice,
            )
        found += f" (to be made in {there})"
    else:
        try:
            _rename_in(folder)
        except OSError as error:
            return problem(
                _CHECK, f"{found}: a file cannot be written and renamed there ({error.strerror})", advice
            )
        elsewhere = [
            one.path
            for one in os.scandir(folder)
            if one.is_dir() and one.stat().st_dev != folder.stat().st_dev
        ]
        if elsewhere:
            return problem(
                _CHECK,
                f"{found}: {min(elsewhere)} is on another file system, and files cannot be renamed into it",
                "have all of the folder on one file system",
            )
    if free < _LITTLE:
        return warning(
            _CHECK, found, "free some, or give a folder on a larger disk; --cold-bytes bounds what it takes"
        )
    return ok(_CHECK, found)


def _rename_in(folder: Path) -> None:
    """Write a file and rename it into a folder below, as a disk tier does.

    Raises:
        OSError: it cannot be done.
    """
    with (
        tempfile.TemporaryDirectory(prefix="kvpager-doctor-", dir=folder) as below,
        tempfile.NamedTemporaryFile(prefix="kvpager-doctor-", dir=folder, delete=False) as file,
    ):
        try:
            file.write(b"kvpager")
            file.flush()
            target = Path(below, "renamed")
            os.rename(file.name, target)
            target.unlink()
        finally:
            Path(file.name).unlink(missing_ok=True)


def _info(wire: Wire) -> dict[str, str]:
    """The fields of INFO that this user may see."""
    fields: dict[str, str] = {}
    for section in (b"server", b"memory", b"cluster"):
        wire.limit(time.monotonic() + _SECONDS)
        reply = wire.call(b"INFO", section)
        if isinstance(reply, bytes):
            for line in reply.decode(errors="replace").splitlines():
                name, colon, value = line.partition(":")
                if colon:
                    fields[name] = value
    return fields


def _round_trip(wire: Wire) -> float:
    """Median seconds of a PING."""
    taken = []
    for _ in range(_PINGS):
        wire.limit(time.monotonic() + _SECONDS)
        began = time.monotonic()
        wire.call(b"PING")
        taken.append(time.monotonic() - began)
    return statistics.median(taken)
