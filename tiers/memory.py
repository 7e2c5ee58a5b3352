"""How much memory this process may still take, by everything that limits it.

The kernel grants address space freely and kills later, so an arena asks here before it takes memory: what the
machine has left (``MemAvailable``), and what every control group above this process has left (versions 1
and 2), whichever is least. Sources: proc(5); the kernel's admin-guide/cgroup-v2 and cgroup-v1/memory pages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .errors import ConfigError
from .settings import MOST_BYTES, expect_integer

__all__ = ["MemoryHeadroom", "format_bytes", "memory_headroom", "memory_limits", "parse_bytes"]

_NO_LIMIT: Final = 1 << 60
"""Version 1 writes "no limit" as a number near 2**63 rounded down to a page."""
_RESERVE_SHARE: Final = 32
_RESERVE_MOST: Final = 1 << 30
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.ASCII | re.IGNORECASE)
_UNITS: Final = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


@dataclass(frozen=True)
class MemoryHeadroom:
    """What may still be taken, and what sets the bound.

    Args:
        free_bytes: bytes that can be had without swapping or an OOM kill, as the kernel estimates.
        reserve_bytes: bytes of those that an arena leaves to everybody else: a 32nd of the memory that
            the binding limit covers, at most 1 GiB.
        limit: what binds, in words for a message.
    """

    free_bytes: int
    reserve_bytes: int
    limit: str

    @property
    def usable_bytes(self) -> int:
        """What an arena may take: free bytes less the reserve."""
        return max(0, self.free_bytes - self.reserve_bytes)


def format_bytes(count: int) -> str:
    """``count`` bytes in binary units, for messages: ``512 B``, ``1.5 GiB``."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def parse_bytes(setting: str, text: str) -> int:
    """Bytes that a size like ``8G``, ``512M``, ``1.5GiB`` or ``4096`` means; units are powers of 1024.

    Raises:
        ConfigError: it is none; the error names the setting.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(setting, f"must be a size like 8G, 512M or 1.5G, got {text[:40]!r}")
    number, unit = found.groups()
    try:
        count = (
            int(float(number) * (1 << _UNITS[unit.upper()]))
            if "." in number
            else (int(number) << _UNITS[unit.upper()])
        )
    except (ValueError, OverflowError) as error:
        raise ConfigError(setting, f"must be a size like 8G, 512M or 1.5G, got {text[:40]!r}") from error
    return expect_integer(setting, count, 1, MOST_BYTES)


def memory_headroom(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> MemoryHeadroom:
    """The tightest of the machine's available memory and the limits of all control groups of this process.

    Args:
        proc: where procfs is mounted.
        cgroup: where the control groups are mounted.
    """
    return memory_limits(proc, cgroup)[0]


def memory_limits(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> list[MemoryHeadroom]:
    """The machine's available memory and the limits of all control groups of this process, tightest first.

    Args:
        proc: where procfs is mounted.
        cgroup: where the control groups are mounted.
    """
    total, available = _meminfo(proc)
    found = [(available, total, "memory available on this machine")]
    found += _cgroup_headroom(proc, cgroup)
    return [
        MemoryHeadroom(free, min(limit // _RESERVE_SHARE, _RESERVE_MOST), what)
        for free, limit, what in sorted(found)
    ]


def _meminfo(proc: Path) -> tuple[int, int]:
    """(MemTotal, MemAvailable) in bytes."""
    fields: dict[str, int] = {}
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * 1024
    return fields["MemTotal"], fields["MemAvailable"]


def _cgroup_headroom(proc: Path, cgroup: Path) -> list[tuple[int, int, str]]:
    """(bytes free, limit, words) of each control group with a limit, from this process's up to the root."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except FileNotFoundError:  # a kernel without control groups
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            # Mixed set-ups mount version 2 under "unified"; memory is then version 1's business.
            root, names = cgroup, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = (
                cgroup / "memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            )
        else:
            continue
        group = root / path.lstrip("/")
        if not group.is_dir():
            group = root  # a container sees its own group as the root, and names it by the host's path
        while True:
            entry = _group_limit(group, *names)
            if entry is not None:
                found.append(entry)
            if group == root:
                break
            group = group.parent
    return found


def _group_limit(
    group: Path, limit_name: str, usage_name: str, cache_name: str
) -> tuple[int, int, str] | None:
    try:
        text = (group / limit_name).read_text().strip()
        usage = int((group / usage_name).read_text())
        stat = (group / "memory.stat").read_text()
    except FileNotFoundError:  # the root group has no limit, nor has one without the memory controller
        return None
    if text == "max" or int(text) >= _NO_LIMIT:
        return None
    limit = int(text)
    # Page cache that nobody used lately is given back before anybody is killed; so it counts as free.
    cache = next(
        (
            int(value)
            for name, _, value in (row.partition(" ") for row in stat.splitlines())
            if name == cache_name
        ),
        0,
    )
    return max(0, limit - usage + cache), limit, f"left under the memory limit of control group {group}"
