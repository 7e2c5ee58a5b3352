"""The counters of the store's two halves. They only grow; whoever wants rates takes differences."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["Counters", "HostStats", "StoreStats"]


@dataclass
class Counters:
    """Counters with names."""

    def snapshot(self) -> dict[str, int]:
        """The counters by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


@dataclass
class HostStats(Counters):
    """What a `HostStore` did since it was opened, in blocks if not said otherwise."""

    matched: int = 0
    matched_tokens: int = 0
    """Tokens of these blocks; each shard counts."""
    missed: int = 0
    committed: int = 0
    evicted: int = 0
    dropped: int = 0
    """Evicted with no copy below, because the cold tier was absent, down or full."""
    denied: int = 0
    """There was no room for them."""
    unwanted: int = 0
    """The policy did not find them worth a place."""
    cold_written: int = 0
    cold_write_failed: int = 0
    cold_loaded: int = 0
    cold_missed: int = 0
    stale: int = 0
    """Late commits and releases of slots that were granted again since; refused."""
    purged: int = 0
    hinted_wanted: int = 0
    hinted_unwanted: int = 0
    adopted: int = 0
    """Found committed in an arena that another process left."""
    damaged: int = 0
    """Slots of such an arena whose records do not verify: free, once nobody is left who might write there."""


@dataclass
class StoreStats(Counters):
    """What a `TieredStore` did since it was opened, in blocks."""

    device_hits: int = 0
    host_hits: int = 0
    cold_hits: int = 0
    published: int = 0
    adopted: int = 0
    """Computed twice at the same time; one copy was kept."""
    promoted: int = 0
    spilled: int = 0
    copied_on_write: int = 0
    written_back: int = 0
    """Copied to host memory."""
    refused: int = 0
    """Copied to host memory in vain: it refused the commit, since the slot was no longer the store's."""
    dropped: int = 0
    """Left the device tier without a copy below, because nothing below had room."""
    slept: int = 0
    woken: int = 0
    gated_tokens: int = 0
    """Tokens of blocks that were not brought up from the cold tier, since computing them ends first."""
    given_up_tokens: int = 0
    """The same of loads that were begun, and took longer than they should have."""
    saved_tokens: int = 0
    """Tokens of prompts that were found and not computed."""
    saved_milliseconds: int = 0
    """That computing these would have taken beyond finding them, by the cost model, where it knows."""
