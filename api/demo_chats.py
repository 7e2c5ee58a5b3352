"""What the demo's processes do: chats over shared documents, on a model whose KV lies in three tiers.

Imported only in the processes that compute, since it brings torch.
"""

from __future__ import annotations

import argparse
import heapq
import inspect
import shutil
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..engine.judge import Difference, compare
from ..engine.llm import LLM, Completion
from ..engine.loader import LoadedModel, find_device, load_model
from ..engine.sampler import SamplingParams
from ..kvstore.hashing import HASH_BYTES, hash_blocks
from ..tiers.cold import ColdStatus, ColdTier
from ..tiers.cold_url import open_cold_tier
from ..tiers.errors import ColdTierFullError, ColdTierUnavailableError, KVPagerError
from .client import connect

__all__ = [
    "Chats",
    "Settings",
    "Truth",
    "Turn",
    "first_process",
    "first_talks",
    "on_sidecar",
    "second_process",
    "try_cold",
    "uncached",
]

Talk = list[dict[str, str]]

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
_DISK_BYTES: Final = 8 << 30
_COLD_SECONDS: Final = 3.0
# How much of the KV of all chats together the upper tiers hold.
_DEVICE_SHARE: Final = 0.55
_HOST_SHARE: Final = 0.8
_RUNNING: Final = 16


@dataclass(frozen=True)
class Settings:
    """What the demo was asked for.

    Attributes:
        dtype: what to compute in; ``auto`` is float16 where kernels compute attention, and float32 elsewhere.
    """

    model: str
    device: str
    sessions: int
    answer_tokens: int
    cold: str
    dtype: str = "auto"


@dataclass
class Turn:
    """One prompt and its answer."""

    prompt: list[int]
    answer: tuple[int, ...]
    completion: Completion


@dataclass
class Chats:
    """What one process did; travels to the other process and to the report.

    Attributes:
        talks: the conversations so far.
        turns: prompts and answers of this process.
        device_blocks, host_blocks: size of the tiers.
        first_chat: the number of the first of these conversations.
        seconds: spent on the turns.
        saved_bytes: what sharing saved at its peak.
        counters: of both stores, when they were closed.
        ttft: seconds to the first token, by where the KV of the prompt was.
        kernels: which attention ran on kernels, of ``decode`` and ``prefill``.
        captured: sizes of the batches whose decode step became a CUDA graph.
    """

    talks: list[Talk]
    device_blocks: int
    host_blocks: int
    first_chat: int = 0
    turns: list[Turn] = field(default_factory=list)
    seconds: float = 0.0
    saved_bytes: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    ttft: dict[str, float] = field(default_factory=dict)
    kernels: tuple[str, ...] = ()
    captured: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Truth:
    """What answers without any cache say of those that were given.

    Attributes:
        dtype: what all of them were computed in.
        seconds: spent on the answers without cache.
        differences: one for each answer that is not the same, token by token.
    """

    dtype: str
    seconds: float
    differences: list[Difference]


def first_process(settings: Settings) -> Chats:
    """Two turns of every chat; what was computed is left in the cold tier."""
    try_cold(settings)
    loaded = _load(settings)
    chats = _size(settings, loaded, first_talks(settings.sessions))
    with _engine(settings, loaded, chats) as llm:
        _take_turns(llm, settings, chats, (0, 1), "turn {}")
    return chats


def second_process(settings: Settings, first: Chats) -> tuple[Chats, Truth]:
    """One more turn, from the cold tier; then every prompt of both processes without any cache."""
    loaded = _load(settings)
    chats = Chats(first.talks, first.device_blocks, first.host_blocks)
    with _engine(settings, loaded, chats) as llm:
        _take_turns(llm, settings, chats, (2,), "turn {} after the restart")
        _measure_ttft(llm, chats)
    return chats, _answer_uncached(settings, loaded, [*first.turns, *chats.turns])


def first_talks(sessions: int) -> list[Talk]:
    """Conversations that begin with a document and a question about it."""
    documents = _documents()
    return [
        [{"role": "user", "content": f"{documents[chat % len(documents)]}\n\n{_question(chat, 0)}"}]
        for chat in range(sessions)
    ]


def on_sidecar(
    settings: Settings, socket: str, talks: list[Talk], first_chat: int, turn: int, name: str, quiet: bool
) -> Chats:
    """One turn of some chats, by an engine whose host memory is a sidecar's.

    Args:
        socket: the sidecar's.
        talks: the conversations so far.
        first_chat: the number of the first of them.
        turn: which question is asked now, from 0.
        name: what the engine is called.
        quiet: show no progress, since another one does.
    """
    loaded = _load(settings, quiet)
    blocks, longest = _blocks_of_all(settings, loaded, talks, 1)
    device_blocks = max(int(blocks * _DEVICE_SHARE), longest + 2)
    chats = Chats(talks, device_blocks, 0, first_chat)
    with connect(socket, name=name) as pool, ExitStack() as ending:
        if loaded.model.device.type == "cuda":
            pool.map_device(str(loaded.model.device))
        llm = LLM(loaded, device_blocks=device_blocks, host=pool, max_sequences=_RUNNING)
        ending.enter_context(llm)
        _take_turns(llm, settings, chats, (turn,), f"{name}, turn {{}}", quiet)
        llm.close(drain=60.0)
    return chats


def uncached(settings: Settings, turns: list[Turn]) -> Truth:
    """Every prompt answered without any cache, and what that says of the answers."""
    return _answer_uncached(settings, _load(settings), turns)


def try_cold(settings: Settings) -> None:
    """Keep a note there: the engine would go on without its cold tier, and the demo would show nothing.

    Raises:
        ColdTierFullError: it has no room.
        ColdTierUnavailableError: it keeps nothing for another reason.
    """
    cold = _open_cold(settings)
    try:
        status = cold.put_note(b"kvpager-demo", b"begun", _COLD_SECONDS)
    finally:
        cold.close()
    if status != ColdStatus.OK:
        kind = ColdTierFullError if status == ColdStatus.FULL else ColdTierUnavailableError
        raise kind(f"{_place(settings)} keeps nothing: {status.name.lower()}")


def _open_cold(settings: Settings) -> ColdTier:
    """The cold tier that was asked for: a URL, or a folder."""
    on_disk = "://" not in settings.cold or settings.cold.startswith("disk://")
    return open_cold_tier(settings.cold, capacity_bytes=_DISK_BYTES if on_disk else None)


def _place(settings: Settings) -> str:
    """Where the cold tier is, without what is secret in it."""
    parts = urlsplit(settings.cold)
    return settings.cold.replace(f"{parts.password}@", "***@") if parts.password else settings.cold


def _load(settings: Settings, quiet: bool = False) -> LoadedModel:
    with Console(quiet=quiet).status(f"loading {settings.model}"):
        if settings.dtype != "auto":
            return load_model(settings.model, dtype=settings.dtype, device=settings.device)
        device = find_device(settings.device)
        if device.type == "cuda":
            loaded = load_model(settings.model, dtype="float16", device=device)
            if "decode" in loaded.model.kernels_for(loaded.model.kv_layout(16)):
                return loaded
            del loaded
        # Where no kernel wants 16 bits, answers are comparable to the last bit that decides a token.
        return load_model(settings.model, dtype="float32", device=device)


def _size(settings: Settings, loaded: LoadedModel, talks: list[Talk]) -> Chats:
    """Size the tiers so that all three are needed, and say what a token costs."""
    layout = loaded.model.kv_layout(16)
    blocks, _ = _blocks_of_all(settings, loaded, talks, 2)
    # After the restart there is one more turn.
    _, longest = _blocks_of_all(settings, loaded, talks, 3)
    device_blocks = max(int(blocks * _DEVICE_SHARE), longest + 2)
    host_blocks = max(int(blocks * _HOST_SHARE), device_blocks)
    size = layout.block_bytes / 1e6
    console = Console()
    console.print(
        f"[bold]{settings.model}[/] on {loaded.model.device} in {layout.dtype}: "
        f"2 x {layout.num_layers} layers x {layout.num_kv_heads} KV heads x {layout.head_dim} x "
        f"{layout.item_bytes} bytes = {layout.token_bytes:,} bytes of KV a token"
    )
    console.print(
        f"{settings.sessions} chats over {min(settings.sessions, len(_documents()))} documents need about "
        f"{blocks * size:.1f} MB of KV, shared parts counted once. The device tier gets "
        f"{device_blocks * size:.1f} MB, host memory {host_blocks * size:.1f} MB; the rest goes to "
        f"{_place(settings)}"
    )
    return Chats(talks, device_blocks, host_blocks)


def _blocks_of_all(settings: Settings, loaded: LoadedModel, talks: list[Talk], turns: int) -> tuple[int, int]:
    """About how many different blocks some turns of all chats fill, and how many the longest chat alone.

    Args:
        talks: each up to the first question.
        turns: questions that are answered, the first one included.
    """
    layout = loaded.model.kv_layout(16)
    reply = {"role": "assistant", "content": ""}
    asked = [{"role": "user", "content": text} for text in _QUESTIONS]
    later = max(
        len(loaded.encode_chat([asked[0], reply, one])) - len(loaded.encode_chat([asked[0]])) for one in asked
    )
    known: set[bytes] = set()
    own = longest = 0
    for talk in talks:
        tokens = loaded.encode_chat(talk)
        # What chats begin with in common is there once; what is added to them is each one's own.
        names = hash_blocks(tokens, layout.block_size, bytes(HASH_BYTES))
        known.update(names)
        count = layout.blocks_for(len(tokens) + turns * settings.answer_tokens + (turns - 1) * later)
        own += count - len(names)
        longest = max(longest, count)
    return len(known) + own, longest


@contextmanager
def _engine(settings: Settings, loaded: LoadedModel, chats: Chats) -> Iterator[LLM]:
    """An engine on three tiers; at its end everything is left in the cold tier."""
    with LLM(
        loaded,
        device_blocks=chats.device_blocks,
        host_bytes=chats.host_blocks * loaded.model.kv_layout(16).block_bytes,
        cold=_open_cold(settings),
        max_sequences=_RUNNING,
    ) as llm:
        yield llm
        llm.close(drain=60.0)
        if llm.host is not None:
            chats.counters = {**llm.store.stats.snapshot(), **llm.host.stats.snapshot()}


def _take_turns(
    llm: LLM, settings: Settings, chats: Chats, turns: tuple[int, ...], title: str, quiet: bool = False
) -> None:
    started = time.monotonic()
    for turn in turns:
        if turn:
            for chat, talk in enumerate(chats.talks):
                talk.append({"role": "user", "content": _question(chats.first_chat + chat, turn)})
        _take_turn(llm, settings, chats, title.format(turn + 1), quiet)
    chats.seconds = time.monotonic() - started
    chats.kernels, chats.captured = llm.kernels, llm.captured


def _take_turn(llm: LLM, settings: Settings, chats: Chats, title: str, quiet: bool) -> None:
    params = SamplingParams(max_tokens=settings.answer_tokens, temperature=0.0)
    sequences = [
        llm.submit(llm.encode_chat(talk), params, session=f"chat-{chats.first_chat + chat}")
        for chat, talk in enumerate(chats.talks)
    ]
    prompts = [sequence.tokens.tolist() for sequence in sequences]
    with _progress(title, len(sequences), quiet) as advance:
        while len(llm.scheduler):
            advance(len(llm.step()))
            saved = llm.store.sharing().saved_blocks * llm.layout.block_bytes
            chats.saved_bytes = max(chats.saved_bytes, saved)
    for talk, prompt, sequence in zip(chats.talks, prompts, sequences, strict=True):
        completion = llm.completion(sequence)
        talk.append({"role": "assistant", "content": completion.text})
        chats.turns.append(Turn(prompt, completion.token_ids, completion))


def _measure_ttft(llm: LLM, chats: Chats) -> None:
    """Time to the first token of the same prompts, alone, with their KV in each tier in turn."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    prompts = [turn.prompt for turn in chats.turns[:_TTFT_PROMPTS]]

    def first_tokens(salt: bytes = b"") -> float:
        seconds = []
        for at, prompt in enumerate(prompts):
            sequence = llm.submit(prompt, params, salt=salt and salt + bytes([at]))
            while len(llm.scheduler):
                llm.step()
            seconds.append(llm.completion(sequence).first_token_seconds)
        return statistics.median(seconds)

    with _progress("time to first token, by tier", 4) as advance:
        chats.ttft["computed, no cache"] = first_tokens(salt=b"no cache")
        advance(1)
        first_tokens()
        chats.ttft["from VRAM" if llm.store.device != "cpu" else "from the device tier"] = first_tokens()
        advance(1)
        llm.store.evict(llm.store.pool.capacity)
        chats.ttft["from host memory"] = first_tokens()
        advance(1)
        llm.store.evict(llm.store.pool.capacity)
        if llm.host is not None and llm.store.host is not None:
            llm.host.flush()
            llm.store.host.evict(llm.store.host.capacity)
        chats.ttft["from the cold tier"] = first_tokens()
        advance(1)


def _answer_uncached(settings: Settings, loaded: LoadedModel, turns: list[Turn]) -> Truth:
    """Answer every prompt with a salt of its own, so that none finds anything that another computed.

    Then the answers are compared with those of the turns.
    """
    Console().print("\n[bold]Every prompt once more, without any cache.[/]")
    params = SamplingParams(max_tokens=settings.answer_tokens, temperature=0.0)
    prompts = [turn.prompt for turn in turns]
    longest = max(map(len, prompts)) + settings.answer_tokens
    blocks = _RUNNING * (loaded.model.kv_layout(16).blocks_for(longest) + 1)
    with LLM(loaded, device_blocks=blocks, host_bytes=0, max_sequences=_RUNNING) as llm:
        started = time.monotonic()
        sequences = [
            llm.submit(prompt, params, salt=at.to_bytes(4, "little")) for at, prompt in enumerate(prompts)
        ]
        with _progress("answers without any cache", len(sequences)) as advance:
            while len(llm.scheduler):
                advance(len(llm.step()))
        seconds = time.monotonic() - started
        completions = [llm.completion(sequence) for sequence in sequences]
    reused = sum(completion.cached.total for completion in completions)
    if reused:
        raise KVPagerError(f"the run without cache reused {reused} tokens")
    found = (
        compare(loaded.model, turn.prompt, turn.answer, completion.token_ids)
        for turn, completion in zip(turns, completions, strict=True)
    )
    return Truth(loaded.model.kv_layout().dtype, seconds, [one for one in found if one is not None])


@contextmanager
def _progress(title: str, total: int, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, disable=quiet) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)


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
    return [" ".join(f"{source} {filler}".split()[:_DOCUMENT_WORDS]) for source in sources]


def _question(chat: int, turn: int) -> str:
    return _QUESTIONS[(chat + 3 * turn) % len(_QUESTIONS)]
