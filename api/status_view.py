"""What `kvpager status` and `kvpager top` show in a terminal, of what the admin process answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..tiers.memory import format_bytes

__all__ = ["StatusView", "prefix_table", "terminal"]

_BAR_CELLS: Final = 24
_HASH_CELLS: Final = 32
_WIDE_CELLS: Final = 140
_SPACE_BLOCKS: Final = {
    "blocks": "resident_blocks",
    "leased": "leased_blocks",
    "pinned": "pinned_blocks",
    "free": "free_blocks",
}
_SHARES: Final = (
    ("leased", "leased_bytes"),
    ("pinned", "pinned_bytes"),
    ("reserved", "reserved_bytes"),
    ("idle", "idle_bytes"),
)


def terminal() -> Console:
    """What is printed on; where that is a file or another program, it is wide enough for whole lines."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDE_CELLS)


class StatusView:
    """What is seen of a sidecar; rates are of what changed since it was shown last."""

    def __init__(self) -> None:
        self._before: dict[str, Any] | None = None

    def waiting(self, why: str = "") -> RenderableType:
        """Nothing is known: why not."""
        self._before = None
        return Text(why or "asking", style="bold red" if why else "dim")

    def shown(self, seen: dict[str, Any]) -> RenderableType:
        """All of it.

        Args:
            seen: ``status``, ``tiers`` and ``prefixes`` as the admin process answers; ``no_prefixes``: why
                there are none.
        """
        status = seen["status"]
        parts: list[RenderableType] = [_head(status)]
        parts += [
            Text(f"degraded: {one['part']}: {one['reason']}", style="bold red") for one in status["degraded"]
        ]
        parts += [Text(), _tiers(seen["tiers"]), Text(), self._hits(status["hits"])]
        if status["spaces"]:
            parts += [Text(), _spaces(status["spaces"])]
        if seen["prefixes"]:
            parts += [Text(), prefix_table(seen["prefixes"])]
        elif "no_prefixes" in seen:
            parts += [Text(), Text(f"No prefixes are told of: {seen['no_prefixes']}.", "dim")]
        self._before = status
        return Group(*parts)

    def _hits(self, hits: dict[str, Any]) -> Text:
        """Blocks that were found, in all or since this was shown last."""
        before = self._before["hits"] if self._before else {}
        host, cold, missed = (
            max(0, hits[name] - before.get(name, 0))
            for name in ("host_blocks", "cold_blocks", "missed_blocks")
        )
        # What was brought up from the cold tier had been missed in host memory.
        asked = host + missed
        since = "since it was shown last" if before else "since the start"
        share = f", {host / asked:.0%}" if asked else ""
        text = (
            f"hits {since}: {host:,} of {asked:,} blocks in host memory{share}; {cold:,} from the cold tier"
        )
        if hits["saved_tokens"] is not None:
            text += f"; {hits['saved_tokens']:,} tokens not computed again"
        return Text(text)


def prefix_table(prefixes: Sequence[dict[str, Any]]) -> Table:
    """Prefixes, one a line: what they have alone (own), and how many prompts begin with them (ends)."""
    table = Table(box=None, pad_edge=False)
    table.add_column("prefix", no_wrap=True, min_width=_HASH_CELLS)
    table.add_column("tenant", overflow="ellipsis", no_wrap=True, min_width=6)
    for name in ("tokens", "own", "hits", "ends", "idle"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    table.add_column("", overflow="ellipsis", no_wrap=True)
    for one in prefixes:
        marks = [word for word, there in (("pinned", one["pins"]), ("in cold", one["in_cold"])) if there]
        if one["references"]:
            marks.insert(0, f"{one['references']} leases")
        table.add_row(
            Text(one["hash"]),
            Text(one["tenant"] or "-"),
            "-" if one["tokens"] is None else f"{one['tokens']:,}",
            format_bytes(one["own_bytes"]),
            f"{one['hits']:,}",
            f"{one['continuations']:,}",
            "-" if one["idle_seconds"] is None else _age(one["idle_seconds"]),
            ", ".join(marks),
        )
    return table


def _head(status: dict[str, Any]) -> Text:
    state = "draining" if status["draining"] else "degraded" if status["degraded"] else "serving"
    text = Text.assemble(
        ("kvpager ", "bold"),
        (status["version"], "bold"),
        f" (pid {status['pid']}, up {_age(status['uptime_seconds'])})  ",
        (state, "bold green" if state == "serving" else "bold yellow"),
        f"\nclients: {status['clients']}; sessions: {status['sessions_awake']} awake, "
        f"{status['sessions_asleep']} asleep",
    )
    if status["cold"] is not None:
        text.append(f"; cold tier: {status['cold']['url']}, {status['cold']['state']}")
    return text


def _tiers(tiers: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("tier", no_wrap=True)
    table.add_column("", width=_BAR_CELLS)
    table.add_column("used", justify="right", no_wrap=True)
    table.add_column("of", justify="right", no_wrap=True)
    table.add_column("what fills it")
    for one in tiers:
        used, most = one["used_bytes"], one["capacity_bytes"]
        bar: RenderableType = Text("-", style="dim")
        if used is not None and most:
            bar = Bar(most, 0, used, width=_BAR_CELLS, color="red" if used > most * 0.95 else "cyan")
        words = [
            f"{word} {format_bytes(one[name])}"
            for word, name in (*_SHARES, ("not in cold", "dirty_bytes"))
            if one[name]
        ]
        words += [
            f"{flow['source']} to {flow['target']} {flow['bytes_per_second'] / 1e9:.2f} GB/s"
            for flow in one["flows"]
            if flow["bytes_per_second"]
        ]
        if one["state"] != "ready":
            words.insert(0, f"{one['state']}: {one['reason']}")
        table.add_row(
            Text(one["tier"]),
            bar,
            "-" if used is None else format_bytes(used),
            "-" if most is None else format_bytes(most),
            Text(", ".join(words) or "-"),
        )
    return table


def _spaces(spaces: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("space", no_wrap=True)
    table.add_column("tenant", overflow="ellipsis", no_wrap=True, min_width=6)
    table.add_column("layers x heads x dim", overflow="ellipsis", no_wrap=True)
    for name in ("block", *_SPACE_BLOCKS):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    for one in spaces:
        shape = f"{one['num_layers']} x {one['num_kv_heads']} x {one['head_dim']} {one['dtype']}"
        table.add_row(
            Text(one["id"][:8]),
            Text(one["tenant"] or "-"),
            Text(f"{shape} {one['shard']}".rstrip()),
            format_bytes(one["block_bytes"]),
            *(f"{one[name]:,}" for name in _SPACE_BLOCKS.values()),
        )
    return table


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f}{unit}"
    return f"{seconds:.0f}s"
