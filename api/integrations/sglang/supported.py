"""Which releases of SGLang the backend is written for. Its interface changes from release to release."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

from ....tiers.errors import ConfigError

__all__ = ["SUPPORTED", "check_sglang"]

SUPPORTED: Final = ("0.5.20", "0.5.21", "0.5.22", "0.5.23")
"""Releases that have this interface. Before 0.5.20 the names of pages say nothing of adapters and salts."""


def check_sglang() -> str:
    """The release of SGLang.

    Raises:
        ConfigError: it is not installed, or not supported.
    """
    try:
        found = version("sglang")
    except PackageNotFoundError:
        raise ConfigError("sglang", "is not installed in this environment") from None
    if found.split(".post")[0] not in SUPPORTED:
        raise ConfigError(
            "sglang",
            f"{found} is not supported by this release of kvpager, which works with {', '.join(SUPPORTED)}: "
            "install one of these, or start SGLang without --hicache-storage-backend",
        )
    return found
