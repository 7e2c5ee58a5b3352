"""``kvpager demo``: chats over shared documents on a real model, with KV in three tiers.

Many more chats than the device tier holds talk about a few documents; host memory is smaller than all of
them together, so blocks reach the cold tier. Then the process ends, and another one answers the next
question of every chat from the cold tier. At last every prompt is answered once more without any cache,
and the answers are compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

from ..tiers.errors import ConfigError
from ..tiers.extras import how_to_install
from ..tiers.settings import expect_integer, expect_text
from .processes import Interruptions

if TYPE_CHECKING:
    from rich.console import Console

    from .demo_chats import Chats, Turn

__all__ = ["add_parser"]

_MOST_SESSIONS: Final = 10_000
_MOST_ANSWER_TOKENS: Final = 1024


def add_parser(commands: Any) -> None:
    """Add the command to argparse's subcommands."""
    parser = commands.add_parser(
        "demo",
        help="chats over shared documents, KV in three tiers, checked against no cache at all",
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", default="smollm2", help="a folder, a file, or a name (default: %(default)s)"
    )
    parser.add_argument("--sessions", type=int, default=20, help="chats (default: %(default)s)")
    parser.add_argument(
        "--answer-tokens", type=int, default=16, help="tokens of an answer (default: %(default)s)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda:N (default: %(default)s)")
    cold = parser.add_mutually_exclusive_group()
    cold.add_argument("--redis", metavar="URL", help="keep the cold tier in this Redis")
    cold.add_argument(
        "--disk", metavar="PATH", help="keep the cold tier in this folder (default: a temporary one)"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    expect_text("--model", options.model)
    expect_text("--device", options.device)
    expect_integer("--sessions", options.sessions, 1, _MOST_SESSIONS)
    expect_integer("--answer-tokens", options.answer_tokens, 1, _MOST_ANSWER_TOKENS)
    for package in ("torch", "transformers", "safetensors", "gguf", "rich"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError("demo", f"needs the engine, {package} is missing: {how_to_install('engine')}")
    from rich.console import Console

    from .demo_chats import Settings, first_process, second_process

    console = Console()
    with Interruptions() as interruptions, _cold_place(options, interruptions) as cold:
        settings = Settings(options.model, options.device, options.sessions, options.answer_tokens, cold)
        first: Chats = interruptions.run_apart(first_process, settings)
        console.print("\n[bold]The process has ended; another one starts with empty VRAM and host memory.[/]")
        second: Chats = interruptions.run_apart(second_process, settings, first)
    return _report(console, first, second)


@contextmanager
def _cold_place(options: argparse.Namespace, interruptions: Interruptions) -> Iterator[str]:
    """Where the cold tier is kept; a folder made for the demo goes when it is over."""
    if options.redis is not None:
        url = expect_text("--redis", options.redis)
        if "://" not in url:
            raise ConfigError("--redis", f"must be a URL such as redis://localhost:6379, got {url!r}")
        yield url
        return
    if options.disk is not None:
        yield expect_text("--disk", options.disk)
        return
    with ExitStack() as rest:
        with interruptions.put_off():
            folder = tempfile.mkdtemp(prefix="kvpager-demo-")
            rest.callback(shutil.rmtree, folder)
        yield folder


def _report(console: Console, first: Chats, second: Chats) -> int:
    from rich.table import Table

    turns = [*first.turns, *second.turns]
    table = Table(title="Prompt tokens, by where their KV came from", title_justify="left")
    table.add_column("")
    for title in ("computed", "VRAM", "host", "cold", "reused", "slept", "seconds"):
        table.add_column(title, justify="right")
    table.add_row("first process", *_row(first.turns, first.seconds))
    table.add_row("restarted", *_row(second.turns, second.seconds))
    prompt_tokens = sum(len(turn.prompt) for turn in turns)
    table.add_row("no cache", f"{prompt_tokens:,}", "", "", "", "0%", "", f"{second.truth_seconds:.1f}")
    console.print(table)
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
    wrong = sum(turn.answer != answer for turn, answer in zip(turns, second.truth, strict=True))
    if wrong:
        console.print(
            f"[bold red]{wrong} of {len(turns)} answers differ from those computed without cache.[/]"
        )
        return 1
    console.print(
        f"[bold green]All {len(turns)} answers equal those computed without any cache, token by token.[/]"
    )
    return 0


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
