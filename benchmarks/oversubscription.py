"""More sessions than VRAM holds: the same chats on the same engine, by three ways to make room in VRAM.

    recompute  what leaves VRAM is forgotten, and computed again when its session comes back
    copy       it is in host memory; all blocks of a sequence are copied to VRAM before it is scheduled
    attend     kvpager: it is in host memory, and how it comes back is reckoned; attention may read it there

A tenth of all sessions fits the device tier. Some are active at a time, from half of what fits to twice as
much; their histories are computed before and lie in host memory, where each case finds them alone again.
Each case warms up until as many turns have ended as are active, and is measured for some seconds then, or
until it has had its number of turns. The modes of a share take turns of half a second, so that what else the
machine does falls on all alike; an engine whose turn it is not makes no step, and its clocks stand.

    python benchmarks/oversubscription.py --shape 1b [--modes copy,attend] [--shares 0.5,1] [--json FILE]
    python benchmarks/oversubscription.py --quick        # tiny, on a CPU
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from kvpager.benchmarks.chat_sessions import ChatWorkload, Thinking
from kvpager.benchmarks.random_model import LLAMA_1B, LLAMA_8B, TINY, ModelShape, random_model
from kvpager.benchmarks.report import write_report
from kvpager.benchmarks.serving_meter import Meter
from kvpager.engine import LLM, SamplingParams
from kvpager.engine.judge import compare
from kvpager.engine.loader import LoadedModel
from kvpager.engine.sequence import FinishReason
from kvpager.engine.sequence import Sequence as Request
from kvpager.engine.waking import Swap
from kvpager.kvstore.hashing import hash_blocks, hash_partial
from kvpager.kvstore.host import HostStore

__all__ = ["MODES", "QUICK", "SCENES", "Scene", "Window", "engine", "fill", "greedy", "measure", "rehearse"]

MODES: Final = tuple(map(str, (Swap.RECOMPUTE, Swap.COPY, Swap.ATTEND)))
SHARES: Final = (0.5, 1.0, 1.2, 1.5, 2.0)
STEP_TOKENS: Final = 2048
_FILL_TOKENS: Final = 8192
"""Tokens of a step that computes histories: nobody waits for a token meanwhile."""
_JUDGED: Final = 16
"""Answers that differ which the model is asked about."""

Tokens: TypeAlias = npt.NDArray[np.int32]
Answers: TypeAlias = dict[tuple[int, int], tuple[int, ...]]
"""Answers by session and turn."""


@dataclass(frozen=True)
class Window:
    """How long a case runs.

    Attributes:
        warm_seconds: how long it warms up at most.
        seconds: how long it is measured, at most.
        turns: after how many turns in all it ends; None: by the time.
    """

    warm_seconds: float
    seconds: float
    turns: int | None = None


@dataclass(frozen=True)
class Scene:
    """What is served, and on what.

    Attributes:
        shape: of the model.
        device: where it runs.
        dtype: what it computes in.
        workload: the chats.
        host_bytes: host memory: for the histories, and what is added in a case.
        window: of each case.
    """

    shape: ModelShape
    device: str
    dtype: torch.dtype
    workload: ChatWorkload
    host_bytes: int
    window: Window

    @property
    def fitting(self) -> int:
        """Sessions that the device tier holds, at the end of a turn: a tenth of them."""
        return max(1, self.workload.sessions // 10)

    @property
    def device_blocks(self) -> int:
        """Blocks of the device tier."""
        return self.fitting * -(-self.workload.turn_tokens // self.workload.block_size)

    @property
    def max_tokens(self) -> int:
        """Tokens that a session may come to."""
        return 4 * self.workload.turn_tokens

    def active(self, share: float) -> int:
        """Sessions whose KV is this share of the device tier."""
        return max(1, round(share * self.fitting))


def _chats(sessions: int, vocabulary: int) -> ChatWorkload:
    """Sessions of 2,048 tokens at the end of a turn."""
    return ChatWorkload(sessions, 1952, 32, 64, vocabulary, 16)


_REHEARSAL: Final = Window(0.0, 2.0, 10)
_GPU_WINDOW: Final = Window(4.0, 3.0)
_SLICE_SECONDS: Final = 0.5
"""Of a case, before it is the turn of the next mode."""

SCENES: Final = {
    "1b": Scene(
        LLAMA_1B,
        "cuda:0",
        torch.float16,
        _chats(1000, LLAMA_1B.vocabulary),
        72 << 30,
        _GPU_WINDOW,
    ),
    "8b": Scene(
        LLAMA_8B,
        "cuda:0",
        torch.float16,
        _chats(350, LLAMA_8B.vocabulary),
        94 << 30,
        _GPU_WINDOW,
    ),
}
QUICK: Final = Scene(
    TINY,
    "cpu",
    torch.float32,
    ChatWorkload(30, 64, 8, 8, TINY.vocabulary, 8),
    16 << 20,
    Window(0.0, 30.0, turns=18),
)


def greedy(tokens: int) -> SamplingParams:
    """An answer of so many tokens, the best one each time."""
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


@contextmanager
def engine(
    loaded: LoadedModel, mode: str, host: HostStore, *, device_blocks: int, block_size: int, **settings: Any
) -> Iterator[LLM]:
    """An engine that makes room in VRAM by one of `MODES`; its host memory is not closed with it."""
    with LLM(
        loaded,
        block_size=block_size,
        device_blocks=device_blocks,
        step_tokens=STEP_TOKENS,
        swap=mode,
        host=None if mode == "recompute" else host,
        **settings,
    ) as llm:
        yield llm


# ---- one case ----


@dataclass
class _Session:
    """A session while it runs.

    Attributes:
        tokens: all of them so far.
        turns: how many it had.
        ends: lengths at which it slept, in this case.
    """

    tokens: Tokens
    turns: int = 0
    ends: list[int] = field(default_factory=list)


class _Case:
    """Chats on an engine, `active` of them at a time."""

    def __init__(self, llm: LLM, workload: ChatWorkload, active: int) -> None:
        self._llm = llm
        self._workload = workload
        self._active = active
        self._thinking = Thinking(workload.first_thoughts())
        self._sessions: dict[int, _Session] = {}
        self._running: dict[int, int] = {}
        self._tails: dict[bytes, int] = {}
        self.meter = Meter(llm, self._tails)
        self.answers: Answers = {}
        self.turns = 0
        """Turns that ended, and"""
        self.unanswered = 0
        """those of them that ended before their time."""
        self._computed = 0
        self._before = 0, 0

    def warm_up(self, window: Window) -> None:
        """Run until as many turns have ended as are active, and no longer than a window says."""
        began = time.monotonic()
        while not self._has_its_turns(window) and self.turns < self._active:
            if time.monotonic() - began > window.warm_seconds:
                break
            self._step()
        self._before = self.turns, self._computed
        self.meter.restart()
        self.meter.pause()

    def run(self, window: Window) -> None:
        """A slice of what is measured."""
        self.meter.resume()
        until = self.meter.seconds + _SLICE_SECONDS
        while not self.is_over(window) and self.meter.seconds < until:
            self._step()
        self.meter.pause()

    def is_over(self, window: Window) -> bool:
        """Whether all of a window was measured."""
        return self._has_its_turns(window) or self.meter.seconds >= window.seconds

    def summary(self) -> dict[str, Any]:
        """What `Meter.summary` says, and how many turns ended meanwhile."""
        turns, computed = self.turns - self._before[0], self._computed - self._before[1]
        return {
            **self.meter.summary(),
            "turns": turns,
            "computed_tokens_per_turn": computed / max(1, turns),
            "turns_in_all": self.turns,
            "unanswered": self.unanswered,
            "session_tokens": float(np.mean([len(one.tokens) for one in self._sessions.values()])),
        }

    def _has_its_turns(self, window: Window) -> bool:
        return window.turns is not None and self.turns >= window.turns

    def _step(self) -> None:
        while len(self._running) < self._active and len(self._thinking):
            self._begin_turn(self._thinking.take())
        for request in self._llm.step():
            self._end_turn(request)
        self.meter.after_step()

    def _begin_turn(self, number: int) -> None:
        session = self._sessions.setdefault(number, _Session(self._workload.history(number)))
        turn = self._workload.turn(number, session.turns)
        prompt = np.concatenate([session.tokens, turn.message])
        request = self._llm.submit(prompt, greedy(turn.answer_tokens), session=str(number))
        self._running[request.id] = number
        self.meter.submitted(request)

    def _end_turn(self, request: Request) -> None:
        number = self._running.pop(request.id)
        session = self._sessions[number]
        turn = self._workload.turn(number, session.turns)
        self.turns += 1
        self.unanswered += request.finish_reason is not FinishReason.LENGTH
        self._computed += request.computed
        self.answers[number, session.turns] = tuple(request.output.tolist())
        self._slept(session, request)
        session.turns += 1
        self._thinking.begin(number, turn.think)

    def _slept(self, session: _Session, request: Request) -> None:
        """A request of a session is over: its last token is not computed, the rest is kept."""
        session.tokens = request.tokens.copy()
        if request.sleeping is not None:
            session.ends.append(request.sleeping.length)
            if request.sleeping.partial is not None:
                self._tails[request.sleeping.partial] = len(request.sleeping.tail)

    def end(self, host: HostStore) -> None:
        """Leave host memory with the histories alone, and the device tier with nothing."""
        llm, store = self._llm, self._llm.store
        for request in llm.scheduler.unfinished:
            llm.abort(request)
            self._slept(self._sessions[self._running.pop(request.id)], request)
        for number in self._sessions:
            llm.end_session(str(number))
        store.flush()
        store.poll()
        store.evict(store.pool.capacity)
        (space,) = host.spaces
        for number, session in self._sessions.items():
            size = self._workload.block_size
            names = hash_blocks(session.tokens, size, store.root)
            kept = len(self._workload.history(number)) // size
            partial = [
                hash_partial(session.tokens[end // size * size : end], names[end // size - 1])
                for end in session.ends
                if end % size
            ]
            space.purge([*names[kept:], *partial])


def measure(
    engines: Mapping[str, LLM], host: HostStore, scene: Scene, share: float
) -> list[tuple[dict[str, Any], Answers]]:
    """Run the cases of a share, by turns: what each mode took, and what was answered.

    Args:
        engines: by mode.
    """
    active = scene.active(share)
    cases = {mode: _Case(llm, scene.workload, active) for mode, llm in engines.items()}
    try:
        for case in cases.values():
            case.warm_up(scene.window)
        turn = list(cases.values())
        while any(not case.is_over(scene.window) for case in turn):
            for case in turn:
                case.run(scene.window)
            turn.reverse()
        found = {mode: case.summary() for mode, case in cases.items()}
    finally:
        for case in cases.values():
            case.end(host)
    return [
        ({"mode": mode, "share": share, "active": active, **found[mode]}, case.answers)
        for mode, case in cases.items()
    ]


# ---- before and after ----


def fill(loaded: LoadedModel, host: HostStore, workload: ChatWorkload, device_blocks: int) -> None:
    """Compute the KV of all histories and have it in host memory, as that grows."""
    size = workload.block_size
    histories = [workload.history(number) for number in range(workload.sessions)]
    with LLM(
        loaded,
        block_size=size,
        device_blocks=device_blocks,
        host=host,
        max_sequences=64,
        max_tokens=max(map(len, histories)) + 1,
        step_tokens=_FILL_TOKENS,
        cuda_graphs=False,
    ) as llm:
        block_bytes, extent = llm.layout.block_bytes, host.arena.extent_bytes
        done = 0
        for first in range(0, len(histories), 32):
            some = histories[first : first + 32]
            done += sum(map(len, some)) // size
            extents = -(-done // (extent // block_bytes))
            host.arena.wait_ready(min(extents + 1, host.arena.num_extents))
            llm.generate(some, greedy(1))
            llm.store.flush()
    host.arena.wait_ready()
    resident = sum(space.resident for space in host.spaces)
    if resident < done:
        raise SystemExit(f"host memory took {resident} of {done} blocks of histories: give it more")


def rehearse(llm: LLM, vocabulary: int, most: int) -> None:
    """Have every size of batch decode, so that graphs are made before anything is measured.

    Args:
        vocabulary: token ids are below this.
        most: sequences of the largest batch.
    """
    random = np.random.default_rng(0)
    prompts = random.integers(0, vocabulary, (most, llm.layout.block_size), dtype=np.int32)
    # Sequences end eight at a time, after three steps of each size.
    llm.generate([*prompts], [greedy(3 + 3 * (number // 8)) for number in range(most)])
    llm.store.flush()
    llm.store.evict(llm.store.pool.capacity)


def agreement(
    loaded: LoadedModel, workload: ChatWorkload, truth: Answers, answers: Answers
) -> dict[str, float]:
    """How the answers of two modes compare, turn by turn of a session up to the first that differs.

    In 16 bits sums are rounded otherwise in another batch, so answers differ where two tokens are all but
    equally good (`engine/judge.py`).

    Returns:
        how many were ``compared`` and ``equal``; of those that differ, how many the model was asked about
        (``judged``), of how many it says that either is right (``ties``), and the largest ``shortfall``, in
        standard deviations of the logits, that it found.
    """
    found: dict[str, float] = {"compared": 0, "equal": 0, "judged": 0, "ties": 0, "shortfall": 0.0}
    for session in dict.fromkeys(session for session, _ in truth):
        number = 0
        prompt = workload.history(session)
        while (session, number) in truth and (session, number) in answers:
            prompt = np.concatenate([prompt, workload.turn(session, number).message])
            one, other = truth[session, number], answers[session, number]
            found["compared"] += 1
            if one != other:
                if found["judged"] < _JUDGED and (
                    difference := compare(loaded.model, prompt.tolist(), other, one)
                ):
                    found["judged"] += 1
                    found["ties"] += difference.tie
                    found["shortfall"] = max(found["shortfall"], difference.shortfall)
                break
            found["equal"] += 1
            prompt = np.concatenate([prompt, np.array(one, dtype=np.int32)])
            number += 1
    return found


def run(
    scene: Scene, modes: Sequence[str], shares: Sequence[float], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """All cases of a scene; a row each."""
    workload = scene.workload
    rows: list[dict[str, Any]] = []
    loaded = random_model(scene.shape, device=scene.device, dtype=scene.dtype)
    truths: dict[float, Answers] = {}
    most = max(map(scene.active, shares))
    began = time.monotonic()
    with HostStore(scene.host_bytes, device=scene.device) as host:
        fill(loaded, host, workload, 4 * scene.device_blocks)
        say(f"{workload.sessions} histories in host memory after {time.monotonic() - began:.1f} s")
        began = time.monotonic()
        with ExitStack() as made:
            engines = {}
            for mode in modes:
                engines[mode] = made.enter_context(
                    engine(
                        loaded,
                        mode,
                        host,
                        device_blocks=scene.device_blocks,
                        block_size=workload.block_size,
                        max_sequences=most,
                        max_tokens=scene.max_tokens,
                    )
                )
                rehearse(engines[mode], workload.vocabulary, most)
            measure(engines, host, replace(scene, window=_REHEARSAL), max(shares))
            say(f"engines are ready after {time.monotonic() - began:.1f} s")
            for share in shares:
                for row, answers in measure(engines, host, scene, share):
                    # The first mode is what the others are held to.
                    truth = truths.setdefault(share, answers)
                    row["answers"] = None if truth is answers else agreement(loaded, workload, truth, answers)
                    rows.append({"shape": scene.shape.name, **row})
                    say(_told(rows[-1]))
    return rows


def _told(row: dict[str, Any]) -> str:
    """A row as a line."""
    first, gap = row["first_token_s"], row["between_tokens_s"]

    def ms(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds * 1e3:.1f}"

    return (
        f"{row['shape']} {row['mode']:>9} {row['share']:4.0%} ({row['active']} active): "
        f"{row['tokens_per_s']:8.0f} tokens/s, first token {ms(first['p50'])} / {ms(first['p99'])} ms, "
        f"between {ms(gap['p50'])} / {ms(gap['p99'])} ms, "
        f"{row['pcie_bytes_per_token']['all'] / 1e6:.2f} MB/token, waste "
        f"{row['vram_waste']['mean'] if row['vram_waste'] else 0.0:.2%}, {row['turns']} turns in "
        f"{row['seconds']:.1f} s, {row['preemptions']} preemptions, {row['computed_tokens_per_turn']:.0f} "
        f"computed a turn, answers {_agreed(row['answers'])}, "
        f"{row['unanswered']} unanswered"
    )


def _agreed(answers: dict[str, float] | None) -> str:
    if answers is None:
        return "for the others to be held to"
    told = f"{answers['equal']}/{answers['compared']} equal"
    return f"{told}, {answers['ties']}/{answers['judged']} others ties, up to {answers['shortfall']:.4f}"


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What `attend` reaches over the other modes, a row for each share: ratios of rates and of times."""
    ratios = []
    by = {(row["share"], row["mode"]): row for row in rows}
    for share in dict.fromkeys(row["share"] for row in rows):
        ours = by.get((share, "attend"))
        for other in ("copy", "recompute"):
            theirs = by.get((share, other))
            if ours is None or theirs is None:
                continue
            times = {
                f"{what}_{name}": ours[key][name] / theirs[key][name]
                for what, key in (("first_token", "first_token_s"), ("between_tokens", "between_tokens_s"))
                for name in ("p50", "p99")
                if ours[key][name] and theirs[key][name]
            }
            rate = ours["tokens_per_s"] / theirs["tokens_per_s"]
            ratios.append({"share": share, "over": other, "tokens_per_s": rate, **times})
    return ratios


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=tuple(SCENES), default="1b", help="whose sizes the model has")
    parser.add_argument("--quick", action="store_true", help="tiny, on a CPU")
    parser.add_argument("--modes", default=",".join(MODES), help="of recompute, copy, attend")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="of VRAM, active at a time")
    parser.add_argument("--seconds", type=float, help="how long each case is measured")
    parser.add_argument("--sessions", type=int, help="how many there are")
    parser.add_argument("--host-gib", type=float, help="host memory")
    parser.add_argument("--json", type=Path, help="write machine, versions and results there")
    options = parser.parse_args(arguments)
    scene = QUICK if options.quick else SCENES[options.shape]
    if options.sessions is not None:
        scene = replace(scene, workload=replace(scene.workload, sessions=options.sessions))
    if options.host_gib is not None:
        scene = replace(scene, host_bytes=int(options.host_gib * 2**30))
    if options.seconds is not None:
        scene = replace(
            scene,
            window=replace(scene.window, seconds=options.seconds),
        )
    modes = options.modes.split(",")
    if unknown := set(modes) - set(MODES):
        parser.error(f"--modes: {', '.join(sorted(unknown))}: no such mode; there are {', '.join(MODES)}")
    shares = [float(share) for share in options.shares.split(",")]
    rows = run(scene, modes, shares, lambda line: print(line, flush=True))
    ratios = summarise(rows)
    for ratio in ratios:
        print(
            f"attend over {ratio['over']}, {ratio['share']:.0%} active: {ratio['tokens_per_s']:.2f}x tokens/s"
        )
    write_report(options.json, {"cases": rows, "ratios": ratios}, "torch", "cuda-bindings")
    return 0


if __name__ == "__main__":
    sys.exit(main())
