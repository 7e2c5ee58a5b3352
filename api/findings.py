"""What a check of the machine found: one line, how bad it is, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Finding", "Level", "ok", "problem", "warning"]


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    """It works, slower or with less than it could."""
    PROBLEM = "problem"
    """Something will not work."""


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Args:
        check: what was looked at, in a word or two.
        level: how bad it is.
        found: what there is.
        advice: what to do about it; empty where there is nothing to do.
    """

    check: str
    level: Level
    found: str
    advice: str = ""

    def line(self) -> str:
        """The finding in one line."""
        text = f"{self.level:<8} {self.check}: {self.found}"
        return f"{text} -> {self.advice}" if self.advice else text


def ok(check: str, found: str, advice: str = "") -> Finding:
    """A finding that is as it should be."""
    return Finding(check, Level.OK, found, advice)


def warning(check: str, found: str, advice: str) -> Finding:
    """A finding that costs speed or room."""
    return Finding(check, Level.WARNING, found, advice)


def problem(check: str, found: str, advice: str) -> Finding:
    """A finding with which something will not work."""
    return Finding(check, Level.PROBLEM, found, advice)
