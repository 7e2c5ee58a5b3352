"""The counters of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from ..kvstore.stats import Counters

__all__ = ["SchedulerStats"]


@dataclass
class SchedulerStats(Counters):
    """What a `Scheduler` did since it was made."""

    steps: int = 0
    preemptions: int = 0
    """Sequences that were put to sleep to make room, turns counted."""
    turns: int = 0
    """Of these, whose stretch was over while others waited."""
    attended: int = 0
    """Sequences that came back and read in place at once what was not in the device tier."""
    copied_first: int = 0
    """Sequences that came back when their blocks had been copied up."""
    read_in_place: int = 0
    """Blocks that steps read in host memory; one that they read in every step counts each time."""
    installed: int = 0
    """Of these, blocks that stayed in the device tier then."""
    copied: int = 0
    """Blocks that the copy engine brought up."""
