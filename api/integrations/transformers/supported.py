"""Which releases of transformers are supported. Its caches change from release to release."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

from ....tiers.extras import how_to_install

__all__ = ["FIRST", "check_transformers", "is_supported"]

FIRST: Final = (4, 57)
"""The first release with caches of layers as they are used here."""
_MAJOR_AFTER: Final = 6
"""Not known yet."""


def check_transformers() -> None:
    """Raise `ImportError` with one sentence unless transformers is there, of a supported release."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        raise ImportError(
            f"kvpager: transformers is not installed in this environment: {how_to_install('transformers')}"
        ) from None
    if not is_supported(found):
        raise ImportError(
            f"kvpager: transformers {found} is not supported by this release of kvpager, which works with "
            f"{FIRST[0]}.{FIRST[1]} and later, before {_MAJOR_AFTER}.0"
        )


def is_supported(release: str) -> bool:
    """Whether a release, such as ``5.24.0``, is one of them."""
    major, minor = (int(part) for part in release.split(".")[:2])
    return FIRST <= (major, minor) < (_MAJOR_AFTER, 0)
