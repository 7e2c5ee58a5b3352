"""Errors of settings, told to those who gave options: a constructor's setting becomes its option."""

from __future__ import annotations

from collections.abc import Mapping

from ..tiers.errors import KVPagerError, ModelError

__all__ = ["error_in_options", "in_options"]


def in_options(text: str, options: Mapping[str, str]) -> str:
    """A message; one that begins with the name of a setting begins with that of its option instead.

    Args:
        options: the option of each setting that comes from one.
    """
    setting, colon, problem = text.partition(": ")
    option = options.get(setting) if colon else None
    return text if option is None else f"{option}: {problem}"


def error_in_options(error: KVPagerError, options: Mapping[str, str]) -> str:
    """What an error says, likewise; what is wrong with a model is said of the option that names it."""
    if isinstance(error, ModelError) and "model" in options:
        return f"{options['model']}: {error}"
    return in_options(str(error), options)
