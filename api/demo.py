"""``kvpager demo``: chats over shared documents on a real model, with KV in three tiers.

Many more chats than the device tier holds talk about a few documents; host memory is smaller than all of
them together, so blocks reach the cold tier. Then the process ends, and another one answers the next
question of every chat from the cold tier. At last every prompt is answered once more without any cache,
and the answers are compared, token by token. On a GPU attention runs on kernels, in float16; there one that
differs must do so where two tokens are a tie but for rounding, by logits that are computed without cache.

With --sidecar the host memory is a sidecar's: one engine takes the first turn of every chat and ends, another
one goes on from its KV, and then two at once share the chats. Their answers are compared likewise.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from ..tiers.errors import ConfigError, KVPagerError
from ..tiers.extras import how_to_install
from ..tiers.settings import expect_integer, expect_text, shown
from .demo_folder import COLD, demo_folder, remove_abandoned
from .processes import Interruptions

if TYPE_CHECKING:
    from .demo_chats import Chats

__all__ = ["add_parser"]

_SESSIONS: Final = 20
_SIDECAR_SESSIONS: Final = 6
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
    parser.add_argument(
        "--sessions", type=int, help=f"chats (default: {_SESSIONS}, {_SIDECAR_SESSIONS} with --sidecar)"
    )
    parser.add_argument(
        "--answer-tokens", type=int, default=16, help="tokens of an answer (default: %(default)s)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda:N (default: %(default)s)")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "float16", "bfloat16"),
        default="auto",
        help="what to compute in (default: float16 on a GPU whose kernels compute attention, else float32). "
        "In 16 bits answers may differ where two tokens are a tie but for rounding, which is checked",
    )
    parser.add_argument(
        "--sidecar", action="store_true", help="engines one after the other, then at once, on one sidecar"
    )
    parser.add_argument(
        "--socket", metavar="PATH", help="with --sidecar: use the one that listens there, with its cold tier"
    )
    cold = parser.add_mutually_exclusive_group()
    cold.add_argument("--redis", metavar="URL", help="keep the cold tier in this Redis")
    cold.add_argument(
        "--disk", metavar="PATH", help="keep the cold tier in this folder (default: a temporary one)"
    )
    parser.set_defaults(run=_run, settings=_settings)


def _settings(options: argparse.Namespace) -> dict[str, str]:
    """The option that each setting comes from."""
    cold = "--redis" if options.redis is not None else "--disk"
    names = {name: f"--{name}" for name in ("model", "device", "dtype", "socket")}
    return {**names, "url": "--socket", "cold.url": cold, "cold.path": cold}


def _run(options: argparse.Namespace) -> int:
    expect_text("--model", options.model)
    expect_text("--device", options.device)
    if options.socket is not None:
        expect_text("--socket", options.socket)
        if not options.sidecar:
            raise ConfigError("--socket", "is a sidecar's, and goes with --sidecar")
        if "://" in options.socket and not options.socket.startswith("unix://"):
            raise ConfigError("--socket", f"must be a path on this machine, got {shown(options.socket)}")
        if options.redis is not None or options.disk is not None:
            raise ConfigError(
                "--socket", "its cold tier is its own: --redis and --disk are for one that is started"
            )
    sessions = options.sessions
    if sessions is None:
        sessions = _SIDECAR_SESSIONS if options.sidecar else _SESSIONS
    # Two engines share them.
    sessions = expect_integer("--sessions", sessions, 2 if options.sidecar else 1, _MOST_SESSIONS)
    expect_integer("--answer-tokens", options.answer_tokens, 1, _MOST_ANSWER_TOKENS)
    for package in ("torch", "transformers", "safetensors", "gguf", "rich"):
        if importlib.util.find_spec(package) is None:
            raise KVPagerError(f"needs the engine, {package} is missing: {how_to_install('engine')}")
    from rich.console import Console

    console = Console()
    for folder in remove_abandoned():
        console.print(f"{folder}, which a demo that was killed had left, is removed.")
    console.print(f"Loading {options.model}.")
    # These bring torch, which takes seconds: a word comes first.
    from .demo_chats import Settings, first_process, second_process, try_cold
    from .demo_report import report
    from .demo_sidecar import run_on_sidecar

    with Interruptions() as interruptions, _cold_place(options, interruptions) as cold:
        settings = Settings(
            options.model, options.device, sessions, options.answer_tokens, cold, options.dtype
        )
        if options.sidecar:
            if options.socket is None:
                try_cold(settings)
            return run_on_sidecar(console, interruptions, settings, options.socket)
        first: Chats = interruptions.run_apart(first_process, settings)
        console.print("\n[bold]The process has ended; another one starts with empty VRAM and host memory.[/]")
        second, truth = interruptions.run_apart(second_process, settings, first)
    return report(console, first, second, truth)


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
    with demo_folder(interruptions) as folder:
        yield os.path.join(folder, COLD)
