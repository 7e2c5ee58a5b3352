"""What `kvpager demo` prints at its end: where the KV came from, and whether the answers are right."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING

from rich.table import Table

from ..engine.judge import ROUNDING

if TYPE_CHECKING:
    from rich.console import Console

    from .demo_chats import Chats, Truth, Turn

__all__ = ["report", "report_answers", "tier_table"]


def report(console: Console, first: Chats, second: Chats, truth: Truth) -> int:
    """What became of the two processes of the demo; returns its exit code."""
    console.print(tier_table({"first process": first, "restarted": second}, truth.seconds))
    ttft = Table(title="Time to first token, one prompt at a time", title_justify="left")
    ttft.add_column("")
    ttft.add_column("ms", justify="right")
    ttft.add_column("times faster", justify="right")
    base = next(iter(second.ttft.values()))
    for name, seconds in second.ttft.items():
        ttft.add_row(name, f"{seconds * 1e3:.0f}", f"{base / seconds:.1f}")
    console.print(ttft)
    counted = first.counters
    console.print(
        f"The first process copied {counted['committed']} blocks to host memory, made room there "
        f"{counted['evicted']} times, and left {counted['cold_written']} blocks in the cold tier; the second "
        f"brought {second.counters['cold_loaded']} up from there."
    )
    saved = max(first.saved_bytes, second.saved_bytes)
    console.print(f"Sharing saved {saved / 1e6:.0f} MB at its peak: blocks that several running chats hold.")
    return report_answers(console, [first, second], truth)


def tier_table(processes: dict[str, Chats], truth_seconds: float) -> Table:
    """Where the KV of each process's prompts came from.

    Args:
        processes: what they did, by what they are called.
        truth_seconds: spent on all of their prompts without any cache.
    """
    table = Table(title="Prompt tokens, by where their KV came from", title_justify="left")
    table.add_column("")
    for title in ("computed", "VRAM", "host", "cold", "reused", "slept", "seconds"):
        table.add_column(title, justify="right")
    for name, chats in processes.items():
        table.add_row(name, *_row(chats.turns, chats.seconds))
    prompt_tokens = sum(len(turn.prompt) for chats in processes.values() for turn in chats.turns)
    table.add_row("no cache", f"{prompt_tokens:,}", "", "", "", "0%", "", f"{truth_seconds:.1f}")
    return table


def report_answers(console: Console, processes: Sequence[Chats], truth: Truth) -> int:
    """What computed attention, and whether all answers are right; returns the exit code."""
    console.print(_attention_words(processes, truth.dtype))
    count = sum(len(chats.turns) for chats in processes)
    wrong = [one for one in truth.differences if not one.tie]
    ties = [one for one in truth.differences if one.tie]
    if wrong:
        beyond = ""
        if truth.dtype in ROUNDING:
            found = max(one.shortfall for one in wrong)
            how = f"by {found:.3g} standard deviations" if isfinite(found) else "where one of them ended"
            beyond = f", and not at a tie ({_tolerance(truth.dtype)}): the worst {how}"
        console.print(
            f"[bold red]{len(wrong)} of {count} answers differ from those computed without cache{beyond}.[/]"
        )
        return 1
    if ties:
        how = f"{_tolerance(truth.dtype)}; the widest {max(one.shortfall for one in ties):.2g}"
        console.print(
            f"[bold green]{count - len(ties)} of {count} answers equal those computed without any cache, "
            f"token by token; {len(ties)} differ at a tie[/] ({how})."
        )
        return 0
    console.print(
        f"[bold green]All {count} answers equal those computed without any cache, token by token.[/]"
    )
    return 0


def _tolerance(dtype: str) -> str:
    """What a tie is, in words."""
    return (
        f"in {dtype}, tokens whose logits, computed without cache, are within {ROUNDING[dtype]:g} standard "
        "deviations of the best"
    )


def _attention_words(processes: Sequence[Chats], dtype: str) -> str:
    """What computed the attention of these processes."""
    kernels = processes[0].kernels
    where = "in the reference code, plain torch"
    if kernels:
        where = f"on kvpager's kernels ({' and '.join(kernels)})"
        if rest := [one for one in ("decode", "prefill") if one not in kernels]:
            where += f", {rest[0]} in the reference code, plain torch"
    captured = sorted({size for chats in processes for size in chats.captured})
    graphs = f"; CUDA graphs of decode steps of {', '.join(map(str, captured))} chats" if captured else ""
    return f"Attention ran in {dtype} {where}{graphs}."


def _row(turns: Sequence[Turn], seconds: float) -> list[str]:
    done = [turn.completion for turn in turns]
    by_tier = [sum(getattr(one.cached, tier) for one in done) for tier in ("device", "host", "cold")]
    computed = sum(one.computed for one in done)
    reused = sum(by_tier) / sum(one.prompt_tokens for one in done)
    slept = sum(one.preemptions for one in done)
    return [
        f"{computed:,}",
        *(f"{count:,}" for count in by_tier),
        f"{reused:.0%}",
        f"{slept}",
        f"{seconds:.1f}",
    ]
