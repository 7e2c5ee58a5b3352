"""What `kvpager doctor` says of software: the system, Python, and the packages that kvpager needs."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Final

from .. import __version__
from ..tiers.extras import how_to_install
from .findings import Finding, ok, problem, warning

__all__ = ["check_extra", "check_packages", "check_python", "requirements"]

_REQUIREMENT: Final = re.compile(
    r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?"
)
_EXTRA: Final = re.compile(r"""extra\s*==\s*["']([^"']+)["']""")
_BOUND: Final = re.compile(r"(>=|<)\s*([0-9][0-9.]*)")
_TESTED: Final = ("Linux", "x86_64")


def check_python() -> Finding:
    """Python, kvpager's version, and whether it was tested on such a machine."""
    found = f"kvpager {__version__} on Python {platform.python_version()} ({sys.executable})"
    if (platform.system(), platform.machine()) != _TESTED:
        return warning(
            "Python",
            f"{found}, {platform.system()} on {platform.machine()}",
            "only Linux on x86-64 is tested: run the tests here before you rely on it",
        )
    return ok("Python", found)


def requirements() -> list[str]:
    """What the installed package says that it needs, as in ``numpy>=1.26``; none if it is not installed."""
    try:
        return metadata.requires("kvpager") or []
    except metadata.PackageNotFoundError:
        return []


def check_packages(required: Sequence[str]) -> Finding:
    """The packages that every install needs.

    Args:
        required: as `requirements` gives them.
    """
    if not required:
        return warning(
            "packages",
            "kvpager is not installed, so what it needs is not known",
            "pip install . in its folder",
        )
    there, lacking = _sorted_out(_of_extra(required, None))
    if lacking:
        return problem(
            "packages", f"lacks {', '.join(lacking)}", "pip install --upgrade . in kvpager's folder"
        )
    return ok("packages", ", ".join(there))


def check_extra(required: Sequence[str], extra: str, what_for: str, *, wanted: bool = False) -> Finding:
    """The packages of an extra. One that is not installed is no fault, unless this machine wants it.

    Args:
        required: as `requirements` gives them.
        extra: its name in ``pyproject.toml``.
        what_for: what cannot be had without it.
        wanted: there is something here that it is for.
    """
    there, lacking = _sorted_out(_of_extra(required, extra))
    name = f"[{extra}]"
    if not lacking and there:
        return ok(name, ", ".join(there))
    found = f"lacks {', '.join(lacking)}" if lacking else "not known, as kvpager is not installed"
    found = f"{found}; it is for {what_for}"
    return warning(name, found, how_to_install(extra)) if wanted else ok(name, found, how_to_install(extra))


def _of_extra(required: Sequence[str], extra: str | None) -> list[tuple[str, str]]:
    """Name and bounds of the requirements of an extra; None: of every install."""
    found = []
    for line in required:
        match = _REQUIREMENT.fullmatch(line)
        if match is None:
            continue
        name, bounds, condition = match.groups()
        of = _EXTRA.search(condition or "")
        if (of[1] if of else None) == extra:
            found.append((name, bounds.strip()))
    return found


def _sorted_out(needed: list[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """Those that are installed in a good version, and those that are not, in words."""
    there, lacking = [], []
    for name, bounds in needed:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            lacking.append(f"{name}{bounds}")
            continue
        if _fits(version, bounds):
            there.append(f"{name} {version}")
        else:
            lacking.append(f"{name}{bounds} (there is {version})")
    return there, lacking


def _fits(version: str, bounds: str) -> bool:
    release = _release(version)
    return all(
        release >= _release(bound) if sign == ">=" else release < _release(bound)
        for sign, bound in _BOUND.findall(bounds)
    )


def _release(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: (2, 6) of ``2.6.0rc1``, without zeros at its end."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
