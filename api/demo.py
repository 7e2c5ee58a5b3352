"""``kvpager demo``: chats over shared documents on a real model, with KV in three tiers.

Many more sessions than the device tier holds talk about a few documents; host memory is smaller than all
of them together, so blocks reach the cold tier. Then the process ends, and another one answers the next
question of every session from the cold tier. At last every prompt is answered once more without any
cache, and the answers are compared.

Each part runs in a process of its own, so nothing survives but what the cold tier keeps.
"""

from __future__ import annotations

import argparse
import heapq
import inspect
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..tiers.errors import ConfigError, KVPagerError

if TYPE_CHECKING:
    from ..engine.llm import LLM, Completion

__all__ = ["add_parser"]

_QUESTIONS: Final = (
    "What is this text about? Answer in one sentence.",
    "Name one function it describes.",
    "Who would read this text?",
    "Give a short title for this text.",
    "What is the most important idea in it?",
    "What could go wrong when using it?",
    "Explain it to a child in one sentence.",
    "Which word is used most in it?",
)
_DOCUMENT_WORDS: Final = 260
_TTFT_PROMPTS: Final = 3
# How much of all sessions' KV together the upper tiers hold.
_DISK_BYTES: Final = 8 << 30
_DEVICE_SHARE: Final = 0.25
_HOST_SHARE: Final = 0.6


@dataclass(frozen=True)
class _Settings:
    """What the parts of the demo share; travels to their processes."""

    model: str
    device: str
    sessions: int
    answer_tokens: int
    cold: str
    device_blocks: int
    host_bytes: int


@dataclass
class _Turn:
    """One prompt and its answer."""

    session: int
    prompt: list[int]
    answer: list[int]
    device: int
    host: int
    cold: int
    computed: int
    preemptions: int
    first_token_seconds: float


@dataclass
class _Part:
    """What one process did."""

    turns: list[_Turn] = field(default_factory=list)
    messages: list[list[dict[str, str]]] = field(default_factory=list)
    seconds: float = 0.0
    saved_bytes: int = 0
    ttft: dict[str, float] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    answers: list[list[int]] = field(default_factory=list)


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
    try:
        from rich.console import Console

        from ..engine import llm as _  # noqa: F401
    except ImportError as error:
        raise ConfigError("demo", f"needs the engine: pip install 'kvpager[engine]' ({error})") from error
    if options.sessions < 1:
        raise ConfigError("--sessions", f"must be positive, got {options.sessions}")
    if options.answer_tokens < 1:
        raise ConfigError("--answer-tokens", f"must be positive, got {options.answer_tokens}")
    console = Console()
    with _cold_place(options) as cold:
        settings = _size(options, cold, console)
        first = _in_process(_serve, settings, None)
        console.print("\n[bold]The process has ended; another one starts with empty VRAM and host memory.[/]")
        second = _in_process(_serve, settings, first.messages)
        console.print("\n[bold]Every prompt once more, without any cache.[/]")
        turns = [*first.turns, *second.turns]
        truth = _in_process(_answer_uncached, settings, [turn.prompt for turn in turns])
    return _report(console, first, second, truth)


@contextmanager
def _cold_place(options: argparse.Namespace) -> Iterator[str]:
    """Where the cold tier is kept; a folder made for the demo goes when it is over."""
    if options.redis or options.disk:
        yield options.redis or options.disk
        return
    folder = tempfile.mkdtemp(prefix="kvpager-demo-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _size(options: argparse.Namespace, cold: str, console: Any) -> _Settings:
    """Size the tiers so that all three are needed, and say what a token costs."""
    plan = _in_process(_measure, options.model, options.device, options.sessions, options.answer_tokens)
    blocks, block_bytes, token_bytes, device, shape = plan
    device_blocks = max(32, int(blocks * _DEVICE_SHARE))
    host_blocks = max(48, int(blocks * _HOST_SHARE))
    console.print(f"[bold]{options.model}[/] on {device}: {shape} = {token_bytes:,} bytes of KV a token")
    console.print(
        f"{options.sessions} sessions need {blocks * block_bytes / 1e6:.0f} MB of KV, shared parts counted "
        f"once; the device tier gets {device_blocks * block_bytes / 1e6:.0f} MB, "
        f"host memory {host_blocks * block_bytes / 1e6:.0f} MB, the rest goes to {cold}"
    )
    return _Settings(
        options.model,
        device,
        options.sessions,
        options.answer_tokens,
        cold,
        device_blocks,
        host_blocks * block_bytes,
    )


# Processes


def _in_process(work: Callable[..., Any], *arguments: object) -> Any:
    """Run `work` in a fresh process and return what it returns; its errors are raised here."""
    # Threads that spin while they wait would take the time of the ones that compute, on a shared machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sender, work, arguments))
    process.start()
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:
        process.join()
        raise KVPagerError(f"a part of the demo ended without a word, exit code {process.exitcode}") from None
    process.join()
    if isinstance(result, BaseException):
        raise result
    return result


def _send_result(sender: Connection, work: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    try:
        sender.send(work(*arguments))
    except KVPagerError as error:
        sender.send(error)
    finally:
        sender.close()


def _measure(model: str, device: str, sessions: int, answer_tokens: int) -> tuple[int, int, int, str, str]:
    """How many blocks all sessions need, a block's and a token's bytes, the device, and the arithmetic."""
    with _engine(_Settings(model, device, 1, 1, "", 4, 0), cold=False) as llm:
        layout = llm.layout
        documents = _documents()
        blocks = sum(
            layout.blocks_for(len(llm.encode_chat([{"role": "user", "content": text}]))) for text in documents
        )
        question = len(llm.encode_chat([{"role": "user", "content": _QUESTIONS[0]}]))
        blocks += sessions * layout.blocks_for(3 * (question + answer_tokens))
        shape = (
            f"2 x {layout.num_layers} layers x {layout.num_kv_heads} KV heads x {layout.head_dim} x "
            f"{layout.item_bytes} bytes"
        )
        return blocks, layout.block_bytes, layout.token_bytes, llm.store.device, shape


@contextmanager
def _engine(settings: _Settings, *, cold: bool) -> Iterator[LLM]:
    from ..engine.llm import LLM
    from ..tiers.cold_url import open_cold_tier

    on_disk = not settings.cold.startswith(("redis", "unix"))
    with LLM(
        settings.model,
        device=settings.device,
        dtype="float32",  # so that answers are comparable to the last bit that decides a token
        device_blocks=settings.device_blocks,
        host_bytes=settings.host_bytes,
        cold=open_cold_tier(settings.cold, capacity_bytes=_DISK_BYTES if on_disk else None) if cold else None,
        max_sequences=16,
    ) as llm:
        yield llm


def _serve(settings: _Settings, messages: list[list[dict[str, str]]] | None) -> _Part:
    """Two turns of every session; or one more, after a restart, with the conversations so far."""
    part = _Part()
    with _engine(settings, cold=True) as llm:
        restarted = messages is not None
        if messages is None:
            documents = _documents()
            messages = [
                [{"role": "user", "content": f"{documents[chat % len(documents)]}\n\n{_question(chat, 0)}"}]
                for chat in range(settings.sessions)
            ]
            turns: tuple[int, ...] = (0, 1)
        else:
            turns = (2,)
        started = time.monotonic()
        for turn in turns:
            if turn:
                for chat, talk in enumerate(messages):
                    talk.append({"role": "user", "content": _question(chat, turn)})
            _one_turn(
                llm,
                settings,
                messages,
                part,
                f"turn {turn + 1}" + (" after the restart" if restarted else ""),
            )
        part.seconds = time.monotonic() - started
        part.messages = messages
        if restarted:
            _measure_ttft(llm, part)
        llm.close(drain=60.0)
        if llm.host is not None:
            part.counters = {**llm.store.stats.snapshot(), **llm.host.stats.snapshot()}
    return part


def _one_turn(
    llm: LLM, settings: _Settings, messages: list[list[dict[str, str]]], part: _Part, title: str
) -> None:
    from ..engine.sampler import SamplingParams

    params = SamplingParams(max_tokens=settings.answer_tokens, temperature=0.0)
    sequences = [
        llm.submit(llm.encode_chat(talk), params, session=f"chat-{chat}")
        for chat, talk in enumerate(messages)
    ]
    prompts = [sequence.tokens.tolist() for sequence in sequences]
    with _progress(title, len(sequences)) as advance:
        while len(llm.scheduler):
            advance(len(llm.step()))
            tables = llm.store.sharing()
            part.saved_bytes = max(part.saved_bytes, tables.saved_blocks * llm.layout.block_bytes)
    for chat, sequence in enumerate(sequences):
        completion = llm.completion(sequence)
        messages[chat].append({"role": "assistant", "content": completion.text})
        part.turns.append(_turn_of(chat, prompts[chat], completion))


def _turn_of(chat: int, prompt: list[int], completion: Completion) -> _Turn:
    return _Turn(
        session=chat,
        prompt=prompt,
        answer=list(completion.token_ids),
        device=completion.cached.device,
        host=completion.cached.host,
        cold=completion.cached.cold,
        computed=completion.computed,
        preemptions=completion.preemptions,
        first_token_seconds=completion.first_token_seconds,
    )


def _measure_ttft(llm: LLM, part: _Part) -> None:
    """Time to the first token of the same prompts, alone, with their KV in each tier in turn."""
    from ..engine.sampler import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0)
    prompts = [turn.prompt for turn in part.turns[:_TTFT_PROMPTS]]

    def first_tokens(salt: bytes = b"") -> float:
        seconds = []
        for at, prompt in enumerate(prompts):
            sequence = llm.submit(prompt, params, salt=salt and salt + bytes([at]))
            while len(llm.scheduler):
                llm.step()
            seconds.append(llm.completion(sequence).first_token_seconds)
        return statistics.median(seconds)

    with _progress("time to first token, by tier", 4) as advance:
        part.ttft["computed, no cache"] = first_tokens(salt=b"no cache")
        advance(1)
        first_tokens()
        part.ttft["from VRAM" if llm.store.device != "cpu" else "from the device tier"] = first_tokens()
        advance(1)
        llm.store.evict(llm.store.pool.capacity)
        part.ttft["from host memory"] = first_tokens()
        advance(1)
        llm.store.evict(llm.store.pool.capacity)
        if llm.host is not None and llm.store.host is not None:
            llm.host.flush()
            llm.store.host.evict(llm.store.host.capacity)
        part.ttft["from the cold tier"] = first_tokens()
        advance(1)


def _answer_uncached(settings: _Settings, prompts: list[list[int]]) -> _Part:
    """Answer every prompt with a salt of its own, so that none finds anything that another computed."""
    from ..engine.sampler import SamplingParams

    params = SamplingParams(max_tokens=settings.answer_tokens, temperature=0.0)
    part = _Part()
    with _engine(settings, cold=False) as llm:
        started = time.monotonic()
        sequences = [
            llm.submit(prompt, params, salt=at.to_bytes(4, "little")) for at, prompt in enumerate(prompts)
        ]
        with _progress("answers without any cache", len(sequences)) as advance:
            while len(llm.scheduler):
                advance(len(llm.step()))
        part.seconds = time.monotonic() - started
        completions = [llm.completion(sequence) for sequence in sequences]
        part.answers = [list(completion.token_ids) for completion in completions]
        reused = sum(completion.cached.total for completion in completions)
        if reused:
            raise KVPagerError(f"the run without cache reused {reused} tokens")
    return part


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)


# What is talked about


def _documents() -> list[str]:
    """Texts that ship with Python."""
    sources = (
        getattr(heapq, "__about__", "") + (heapq.__doc__ or ""),
        inspect.getdoc(textwrap.TextWrapper) or "",
        inspect.getdoc(argparse) or "",
        inspect.getdoc(statistics) or "",
    )
    filler = " ".join(
        inspect.getdoc(one) or "" for one in (sys.modules["inspect"], tempfile, shutil.copytree, Path)
    )
    texts = []
    for source in sources:
        words = f"{source} {filler}".split()
        texts.append(" ".join(words[:_DOCUMENT_WORDS]))
    return texts


def _question(chat: int, turn: int) -> str:
    return _QUESTIONS[(chat + 3 * turn) % len(_QUESTIONS)]


# What came of it


def _report(console: Any, first: _Part, second: _Part, truth: _Part) -> int:
    from rich.table import Table

    turns = [*first.turns, *second.turns]
    prompt_tokens = sum(len(turn.prompt) for turn in turns)
    table = Table(title="Prompt tokens, by where their KV came from", title_justify="left")
    table.add_column("")
    for title in ("computed", "VRAM", "host", "cold", "reused", "slept", "seconds"):
        table.add_column(title, justify="right")
    table.add_row("first process", *_row(first.turns, first.seconds))
    table.add_row("restarted", *_row(second.turns, second.seconds))
    table.add_row("no cache", f"{prompt_tokens:,}", "", "", "", "0%", "", f"{truth.seconds:.1f}")
    console.print(table)
    ttft = Table(title="Time to first token, one prompt at a time", title_justify="left")
    ttft.add_column("")
    ttft.add_column("ms", justify="right")
    ttft.add_column("times faster", justify="right")
    base = next(iter(second.ttft.values()))
    for name, seconds in second.ttft.items():
        ttft.add_row(name, f"{seconds * 1e3:.0f}", f"{base / seconds:.1f}")
    console.print(ttft)
    written = first.counters.get("cold_written", 0)
    evicted = first.counters.get("evicted", 0)
    console.print(
        f"The first process moved {first.counters.get('committed', 0)} blocks to host memory, made room for "
        f"{evicted} of them there, and left {written} in the cold tier."
    )
    saved = max(first.saved_bytes, second.saved_bytes)
    console.print(f"Sharing saved {saved / 1e6:.0f} MB at its peak: blocks that several running chats hold.")
    wrong = sum(turn.answer != answer for turn, answer in zip(turns, truth.answers, strict=True))
    if wrong:
        console.print(
            f"[bold red]{wrong} of {len(turns)} answers differ from those computed without cache.[/]"
        )
        return 1
    console.print(
        f"[bold green]All {len(turns)} answers equal those computed without any cache, token by token.[/]"
    )
    return 0


def _row(turns: Sequence[_Turn], seconds: float) -> list[str]:
    by_tier = [sum(getattr(turn, tier) for turn in turns) for tier in ("device", "host", "cold")]
    computed = sum(turn.computed for turn in turns)
    reused = sum(by_tier) / sum(len(turn.prompt) for turn in turns)
    slept = sum(turn.preemptions for turn in turns)
    return [
        f"{computed:,}",
        *(f"{count:,}" for count in by_tier),
        f"{reused:.0%}",
        f"{slept}",
        f"{seconds:.1f}",
    ]
