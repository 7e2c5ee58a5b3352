"""What to install where a package is missing that the base install does without."""

from __future__ import annotations

__all__ = ["how_to_install"]


def how_to_install(extra: str) -> str:
    """How to get the packages of an extra (one of ``pyproject.toml``): words for the end of a message."""
    return (
        f"pip install '.[{extra}]' in the folder that kvpager was cloned to, or scripts/setup {extra} there"
    )
