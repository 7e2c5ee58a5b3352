"""Processes that a test looks at from outside: whose they are, and whether they are still there."""

from __future__ import annotations

import time
from pathlib import Path

__all__ = ["await_child", "is_there"]


def await_child(parent: int, words: str, seconds: float = 60.0) -> int:
    """The id of the first child of a process whose command line has these words, as soon as there is one."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                # After the name, which may hold anything and ends at the last bracket: state, parent.
                state, owner = (process / "stat").read_text().rpartition(")")[2].split()[:2]
                line = (process / "cmdline").read_text()
            except OSError:
                continue  # it ended just now
            if int(owner) == parent and state != "Z" and words in line:
                return int(process.name)
    raise AssertionError(f"process {parent} has no child with {words!r} after {seconds} seconds")


def is_there(process: int) -> bool:
    """Whether a process runs: one that has ended, and that nobody waited for, does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
