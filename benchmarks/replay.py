"""Hit ratios of all policies, of textbook ones and of Belady's MIN, on real chats and on chats that are made.

The real one is Mooncake's conversation trace (FAST'25), which is not part of this repository:
https://github.com/kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl. The other is what
``kvpager simulate --generate chats`` makes. Nothing in a policy was fitted to either.

    python benchmarks/replay.py --trace FILE [--json FILE]
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, Final

from kvpager.api.simulate import USUAL_COSTS
from kvpager.api.simulation import MIN, Contender, Kind, Plan, gap_closed, simulate
from kvpager.benchmarks.report import write_report
from kvpager.kvstore.chat_traces import ChatTraffic, chat_trace
from kvpager.kvstore.policy import policy_names
from kvpager.kvstore.textbook import TEXTBOOK
from kvpager.kvstore.trace import Trace
from kvpager.kvstore.trace_files import read_trace

CONVERSATION: Final = "conversation"
CHATS: Final = "chats"
SIZES: Final = {
    CONVERSATION: (1_000, 3_000, 10_000, 30_000, 100_000),
    CHATS: (300, 1_000, 3_000, 10_000),
}
"""Blocks of 512 tokens in host memory."""


def measured(name: str, trace: Trace, jobs: int) -> list[dict[str, Any]]:
    """A row for each size and contender."""
    contenders = [Contender(MIN, Kind.BOUND), *(Contender(one, Kind.TEXTBOOK) for one in TEXTBOOK)]
    contenders += [Contender(one, Kind.POLICY) for one in policy_names()]
    costs = USUAL_COSTS.model(trace.block_size, None)
    plan = Plan(trace, tuple(contenders), SIZES[name], None, "lru", costs, 0)
    outcomes = simulate(plan, jobs)
    return [
        {
            "trace": name,
            "blocks": one.blocks,
            "policy": one.contender.name,
            "kind": one.contender.kind,
            "hit_blocks": one.score.blocks,
            "hit_tokens": one.score.tokens,
            "hit_seconds": one.score.seconds,
            "gap_closed": gap_closed(outcomes, one),
        }
        for one in outcomes
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of one trace as docs/performance.md has them: a line a contender, a column a size."""
    sizes = list(dict.fromkeys(row["blocks"] for row in rows))
    kinds = {row["policy"]: row["kind"] for row in rows}
    found = {(row["policy"], row["blocks"]): row for row in rows}
    lines = [f"| blocks found / seconds saved, % | {' | '.join(f'{size:,}' for size in sizes)} |"]
    lines.append("|---" * (len(sizes) + 1) + "|")
    for name, kind in kinds.items():
        shares = (
            f"{100 * found[name, size]['hit_blocks']:.1f} / {100 * found[name, size]['hit_seconds']:.1f}"
            for size in sizes
        )
        shown = f"`{name}`" if kind == Kind.POLICY else name
        lines.append(f"| {shown} | {' | '.join(shares)} |")
    return "\n".join(lines)


def main() -> None:
    """Replay both traces."""
    parser = argparse.ArgumentParser(description="Hit ratios of eviction policies on traces.")
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="the conversation trace")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    chosen = parser.parse_args()
    traces = {CONVERSATION: read_trace(chosen.trace), CHATS: chat_trace(ChatTraffic(sessions=2000))}
    rows: list[dict[str, Any]] = []
    for name, trace in traces.items():
        found = measured(name, trace, chosen.jobs)
        rows += found
        print(f"\n{name}: {len(trace):,} requests, {trace.references:,} blocks, {trace.distinct:,} different")
        print(f"\n{table(found)}")
    write_report(chosen.json, rows)


if __name__ == "__main__":
    main()
