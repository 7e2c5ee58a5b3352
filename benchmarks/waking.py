"""Waking, and what else host memory that attention reads in place is good for; the ways to make room of
`oversubscription.py` side by side.

    wake     a session that sleeps in host memory: what rewriting its row takes, how long its next turn waits
             for a first token, and how long sequences that decode meanwhile wait for theirs
    larger   a sequence whose KV is four times VRAM: how near to what kernels can read over PCIe it decodes
    shared   many sessions on one document, that is kept once, against as many that have a copy each

    python benchmarks/waking.py [--figures wake,larger,shared] [--json FILE]
    python benchmarks/waking.py --quick        # tiny, on a CPU
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from kvpager.benchmarks.oversubscription import MODES, engine, greedy, rehearse
from kvpager.benchmarks.random_model import LLAMA_1B, TINY, ModelShape, random_model
from kvpager.benchmarks.report import write_report
from kvpager.benchmarks.serving_meter import Meter, far_blocks, percentiles
from kvpager.engine import LLM
from kvpager.engine.loader import LoadedModel
from kvpager.engine.sequence import FinishReason, SequenceState
from kvpager.engine.sequence import Sequence as Request
from kvpager.kernels.read_words import read_words
from kvpager.kvstore.hashing import ChainIdentity, hash_blocks
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.lineage import Lineage
from kvpager.tiers.errors import RequestError

__all__ = ["QUICK", "SCENE", "Scene", "larger", "shared", "wake"]

Tokens: TypeAlias = npt.NDArray[np.int32]
Say: TypeAlias = Callable[[str], None]


@dataclass(frozen=True)
class Scene:
    """Sizes of the figures, in tokens if not said otherwise.

    Attributes:
        shape, device, dtype, block_size: of the engine.
        host_bytes: host memory, for the largest of them.
        lengths: of the sessions that wake, the longest last.
        wakes: how often each wakes.
        rewritten: how often the row of the longest is rewritten.
        awake: sequences that decode meanwhile, and
        awake_tokens: of each of them.
        wake_every: steps between two wakes.
        larger_vram: of the device tier that a sequence of four times as many decodes in, and
        larger_steps: how many tokens it answers.
        document: that many sessions share, and
        sessions: how many they are.
        answer: of their answers.
        seconds: how long they are measured.
    """

    shape: ModelShape
    device: str
    dtype: torch.dtype
    block_size: int
    host_bytes: int
    lengths: tuple[int, ...]
    wakes: int
    rewritten: int
    awake: int
    awake_tokens: int
    wake_every: int
    larger_vram: int
    larger_steps: int
    document: int
    sessions: int
    answer: int
    seconds: float

    @property
    def longest(self) -> int:
        """Tokens of the longest session that wakes."""
        return self.lengths[-1]

    def blocks(self, tokens: int) -> int:
        """Blocks of so many tokens."""
        return -(-tokens // self.block_size)

    def tokens(self, count: int, seed: int) -> Tokens:
        """Random tokens, int32 [count]."""
        return np.random.default_rng(seed).integers(0, self.shape.vocabulary, count, dtype=np.int32)


SCENE: Final = Scene(
    shape=LLAMA_1B,
    device="cuda:0",
    dtype=torch.float16,
    block_size=16,
    host_bytes=60 << 30,
    lengths=(1024, 2048, 4096, 8192),
    wakes=24,
    rewritten=2000,
    awake=32,
    awake_tokens=1024,
    wake_every=16,
    larger_vram=16_384,
    larger_steps=48,
    document=16_384,
    sessions=100,
    answer=64,
    seconds=5.0,
)
QUICK: Final = Scene(
    shape=TINY,
    device="cpu",
    dtype=torch.float32,
    block_size=8,
    host_bytes=16 << 20,
    lengths=(32, 64),
    wakes=3,
    rewritten=50,
    awake=3,
    awake_tokens=16,
    wake_every=6,
    larger_vram=64,
    larger_steps=8,
    document=256,
    sessions=20,
    answer=8,
    seconds=0.3,
)
_MESSAGE: Final = 16
"""Tokens that a session says when it wakes."""
_CAPTURES: Final = 3
"""Wakes before what is measured: a graph of a step that installs is made the second time one comes."""


def _forget_vram(llm: LLM) -> None:
    """Leave what nobody holds in host memory alone."""
    llm.store.flush()
    llm.store.poll()
    llm.store.evict(llm.store.pool.capacity)


def _is_over(request: Request) -> bool:
    return request.state is SequenceState.FINISHED


def _finish(llm: LLM, request: Request) -> None:
    while not _is_over(request):
        llm.step()


def _first_token(llm: LLM, prompt: Tokens) -> float:
    """Seconds from a request to its first token; then it ends."""
    request = llm.submit(prompt, greedy(2))
    _finish(llm, request)
    if request.first_token_at is None:
        raise SystemExit(f"a prompt of {len(prompt)} tokens got no answer: {request.finish_reason}")
    return request.first_token_at - request.arrived_at


# ---- wake ----


def wake(
    loaded: LoadedModel, host: HostStore, scene: Scene, modes: Sequence[str], say: Say
) -> dict[str, Any]:
    """A session that sleeps in host memory wakes, in each of the modes by turns."""
    histories = {count: scene.tokens(count, count) for count in scene.lengths}
    awake_blocks = scene.awake * scene.blocks(2 * scene.awake_tokens + _steps(scene))
    sizes: dict[str, Any] = {
        "device_blocks": awake_blocks + scene.blocks(2 * scene.longest),
        "block_size": scene.block_size,
        "max_sequences": scene.awake + 4,
        "max_tokens": max(scene.longest, scene.awake_tokens + _steps(scene)) + 64,
    }
    rows: list[dict[str, Any]] = []
    rewriting: dict[str, Any] = {}
    with ExitStack() as made:
        engines = {mode: made.enter_context(engine(loaded, mode, host, **sizes)) for mode in modes}
        # What one mode kept another does not find.
        messages = {mode: 100_000 * (1 + at) for at, mode in enumerate(modes)}
        for llm in engines.values():
            # Also where nothing is kept below: the same is computed for all.
            llm.generate([*histories.values()], greedy(1))
            rehearse(llm, scene.shape.vocabulary, scene.awake + 1)
        for count, history in histories.items():
            seconds: dict[str, list[float]] = {mode: [] for mode in modes}
            for number in range(_CAPTURES + scene.wakes):
                for mode, llm in engines.items():
                    _forget_vram(llm)
                    message = scene.tokens(_MESSAGE, messages[mode] + number + count)
                    seconds[mode].append(_first_token(llm, np.concatenate([history, message])))
            for mode in modes:
                found = percentiles(np.array(seconds[mode][_CAPTURES:]))
                rows.append({"mode": mode, "tokens": count, "awake": 0, "first_token_s": found})
                say(f"wake {mode:>9} {count:6} tokens: first token {found['p50']:.4f} / {found['p99']:.4f} s")
        history = histories[scene.longest]
        beside = _by_turns(
            {mode: _beside(llm, scene, history, messages[mode]) for mode, llm in engines.items()}
        )
        for mode, told in beside.items():
            rows.append({"mode": mode, "tokens": scene.longest, **told})
            say(f"wake {mode:>9} beside {scene.awake}: {rows[-1]}")
        if "attend" in engines:
            rewriting = _rewriting(engines["attend"], scene, history)
            say(f"rewriting a row of {rewriting['blocks']} blocks: {rewriting['seconds']}")
    return {"rows": rows, "rewriting": rewriting}


def _by_turns(runs: Mapping[str, Generator[None, None, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Have each of some programs go on to its next stop, in turns, until all have ended; what they return."""
    found: dict[str, dict[str, Any]] = {}
    while len(found) < len(runs):
        for mode, run in runs.items():
            if mode not in found:
                try:
                    next(run)
                except StopIteration as end:
                    found[mode] = end.value
    return {mode: found[mode] for mode in runs}


def _steps(scene: Scene) -> int:
    """Steps that the awake decode for, at most: undisturbed, beside the wakes, and beside prompts."""
    return 5 * (scene.wakes + _CAPTURES) * scene.wake_every


def _beside(llm: LLM, scene: Scene, history: Tokens, messages: int) -> Generator[None, None, dict[str, Any]]:
    """How long tokens of sequences that are awake take, undisturbed and while a session wakes ever again.

    Stops after each wake, for others to have a turn.

    Args:
        messages: seed of the first message of the session that wakes.
    """
    awake = [
        llm.submit(scene.tokens(scene.awake_tokens, messages + 20_000 + number), greedy(_steps(scene)))
        for number in range(scene.awake)
    ]
    ids = np.array([request.id for request in awake], dtype=np.int64)
    while any(request.state is not SequenceState.DECODING for request in awake):
        llm.step()
    _forget_vram(llm)
    meter = Meter(llm)
    for request in awake:
        meter.submitted(request)

    def steps(
        wakes: int, message: int | None, *, sleeps: bool = True
    ) -> Generator[None, None, tuple[list[float], npt.NDArray[np.float64]]]:
        meter.restart()
        first = []
        for number in range(wakes):
            waking = None
            if message is not None:
                if sleeps:
                    _forget_vram(llm)
                prompt = np.concatenate([history, scene.tokens(_MESSAGE, message + number)])
                waking = llm.submit(prompt, greedy(2))
            done = 0
            # The next one wakes when this one has: they come one by one.
            while done < scene.wake_every or (waking is not None and waking.finished_at is None):
                llm.step()
                meter.after_step()
                done += 1
            if waking is not None and waking.first_token_at is not None:
                first.append(waking.first_token_at - waking.arrived_at)
            meter.pause()
            yield
            meter.resume()
        return first, meter.gaps(ids)

    yield from steps(_CAPTURES, None)
    yield from steps(_CAPTURES, messages + 30_000)
    before = llm.scheduler.stats.snapshot()
    _, quiet = yield from steps(scene.wakes, None)
    first, disturbed = yield from steps(scene.wakes, messages + 40_000)
    after = llm.scheduler.stats.snapshot()
    # The same prompts of a session that did not sleep: what computing them takes from the others.
    _, prompted = yield from steps(scene.wakes, messages + 50_000, sleeps=False)
    for request in awake:
        llm.abort(request)
    return {
        "awake": scene.awake,
        "first_token_s": percentiles(np.array(first)),
        "between_tokens_s": percentiles(disturbed),
        "between_tokens_undisturbed_s": percentiles(quiet),
        "between_tokens_prompted_s": percentiles(prompted),
        "came_back": {name: after[name] - before[name] for name in after},
    }


def _rewriting(llm: LLM, scene: Scene, history: Tokens) -> dict[str, Any]:
    """What the store takes to give a sequence that sleeps in host memory its row again."""
    request = llm.submit(history, greedy(2), session="waking")
    _finish(llm, request)
    sleeping = request.sleeping
    if sleeping is None:
        raise SystemExit("a session that ended does not sleep")
    _forget_vram(llm)
    seconds = []
    gc.collect()
    gc.freeze()
    for _ in range(scene.rewritten):
        began = time.perf_counter()
        opened = llm.store.wake(sleeping)
        seconds.append(time.perf_counter() - began)
        if opened.length != sleeping.length:
            raise SystemExit(f"{opened.length} tokens of {sleeping.length} woke")
        far = llm.store.far_blocks(opened.row)
        sleeping = llm.store.sleep(opened.row)
        llm.store.poll()
    gc.unfreeze()
    llm.end_session("waking")
    return {"blocks": len(sleeping.hashes), "far_blocks": far, "seconds": percentiles(np.array(seconds))}


# ---- larger ----


def larger(loaded: LoadedModel, host: HostStore, scene: Scene, say: Say) -> dict[str, Any]:
    """A sequence whose KV is four times VRAM decodes, beside reads of as many bytes by a kernel."""
    prompt = scene.tokens(4 * scene.larger_vram, 5)
    sizes: dict[str, Any] = {
        "device_blocks": scene.blocks(scene.larger_vram),
        "block_size": scene.block_size,
        "max_sequences": 1,
        "max_tokens": len(prompt) + scene.larger_steps + 2,
    }
    with engine(loaded, "attend", host, **sizes) as llm:
        request = llm.submit(prompt, greedy(scene.larger_steps))
        began = time.monotonic()
        while request.first_token_at is None and not _is_over(request):
            llm.step()
        prefill = time.monotonic() - began
        rates, ceilings = [], []
        while not _is_over(request):
            before = time.perf_counter()
            llm.step()
            seconds = time.perf_counter() - before
            if _is_over(request):
                break
            nbytes = far_blocks(llm.store) * llm.layout.block_bytes
            rates.append(nbytes / seconds)
            ceilings.append(nbytes / _read_seconds(host, nbytes, scene.device))
        answered = llm.completion(request).finish_reason
    if answered is not FinishReason.LENGTH:
        raise SystemExit(f"a sequence of {len(prompt)} tokens ended by {answered}")
    rate, ceiling = statistics.median(rates), statistics.median(ceilings)
    found = {
        "tokens": len(prompt),
        "vram_tokens": scene.larger_vram,
        "prefill_seconds": prefill,
        "steps": len(rates),
        "far_bytes": nbytes,
        "gb_per_s": rate / 1e9,
        "ceiling_gb_per_s": ceiling / 1e9,
        "of_ceiling": rate / ceiling,
    }
    say(f"larger: {found}")
    return found


def _read_seconds(host: HostStore, nbytes: int, device: str) -> float:
    """How long a kernel takes to read so many bytes of the arena in place."""
    out = torch.zeros(1, dtype=torch.int32, device=device)
    began = time.perf_counter()
    read_words(host.arena.base + host.arena.device_delta, nbytes, out)
    out.cpu()
    return time.perf_counter() - began


def copy_larger(loaded: LoadedModel, host: HostStore, scene: Scene) -> str:
    """What becomes of such a sequence where all of its blocks have to be in VRAM."""
    prompt = scene.tokens(4 * scene.larger_vram, 5)
    with engine(
        loaded,
        "copy",
        host,
        device_blocks=scene.blocks(scene.larger_vram),
        block_size=scene.block_size,
        max_sequences=1,
        max_tokens=len(prompt) + scene.larger_steps + 2,
    ) as llm:
        try:
            (completion,) = llm.generate([prompt], greedy(scene.larger_steps))
        except RequestError as error:
            return str(error)
        return str(completion.finish_reason)


# ---- shared ----


def shared(loaded: LoadedModel, host: HostStore, scene: Scene, say: Say) -> dict[str, Any]:
    """Sessions on one document, kept once and attended, and with a copy each that is copied in."""
    document = scene.tokens(scene.document, 6)
    found: dict[str, Any] = {"document": scene.document, "sessions": scene.sessions, "rows": []}
    for mode, salted in (("attend", False), ("copy", True)):
        if salted:
            began = time.monotonic()
            _multiply(loaded, host, scene, document)
            say(f"shared: {scene.sessions} copies after {time.monotonic() - began:.1f} s")
        row = _on_document(loaded, host, scene, document, mode, salted)
        found["rows"].append(row)
        say(f"shared {mode:>9}: {row}")
    ours, theirs = found["rows"]
    found["times"] = ours["tokens_per_s"] / theirs["tokens_per_s"]
    return found


def _salt(session: int, salted: bool) -> bytes:
    return b"session %d" % session if salted else b""


def _multiply(loaded: LoadedModel, host: HostStore, scene: Scene, document: Tokens) -> None:
    """Keep the document's blocks under the names that each session has for them: the same tokens and the
    same model make the same KV, so they are copied, not computed."""
    (space,) = host.spaces
    names = hash_blocks(document, scene.block_size, ChainIdentity(loaded.identity).root)
    blocks = np.empty((len(names), space.layout.block_bytes), dtype=np.uint8)
    if space.get(names, blocks) < len(names):
        raise SystemExit("the document is not in host memory")
    for session in range(scene.sessions):
        root = ChainIdentity(loaded.identity, salt=_salt(session, True)).root
        own = hash_blocks(document, scene.block_size, root)
        if space.put(own, blocks, wait=5.0, lineage=Lineage.of_chain(own)) < len(own):
            raise SystemExit(f"host memory takes no more than {session} copies of the document")


def _on_document(
    loaded: LoadedModel, host: HostStore, scene: Scene, document: Tokens, mode: str, salted: bool
) -> dict[str, Any]:
    """All sessions ask about the document, again and again, each as soon as it is answered."""
    of_a_session = scene.document + _MESSAGE + scene.answer
    with engine(
        loaded,
        mode,
        host,
        device_blocks=max(1, scene.sessions // 10) * scene.blocks(of_a_session),
        block_size=scene.block_size,
        max_sequences=scene.sessions,
        max_tokens=of_a_session + 2,
    ) as llm:
        rehearse(llm, scene.shape.vocabulary, scene.sessions)
        if not salted:
            llm.generate([document], greedy(1))
            _forget_vram(llm)
        meter = Meter(llm)
        running: dict[int, int] = {}
        asked = ended = unanswered = 0

        def ask(session: int) -> None:
            nonlocal asked
            prompt = np.concatenate([document, scene.tokens(_MESSAGE, 50_000 + asked)])
            # The first answers end one after the other, as later ones do.
            answer = scene.answer if asked >= scene.sessions else 2 + asked * scene.answer // scene.sessions
            request = llm.submit(prompt, greedy(answer), salt=_salt(session, salted))
            running[request.id] = session
            meter.submitted(request)
            asked += 1

        for session in range(scene.sessions):
            ask(session)
        most = saved = 0
        warm = True
        # However slow a machine is, each of them is answered once.
        while warm or meter.seconds < scene.seconds or ended < scene.sessions:
            for request in llm.step():
                ended += 1
                unanswered += request.finish_reason is not FinishReason.LENGTH
                ask(running.pop(request.id))
            meter.after_step()
            most = max(most, llm.store.pool.capacity - llm.store.available_blocks)
            if warm:  # looking at all rows takes time, which is not measured yet
                saved = max(saved, llm.store.sharing().saved_blocks)
            if warm and (ended >= scene.sessions or meter.seconds > scene.seconds):
                warm = False
                meter.restart()
        summary = meter.summary()
        for request in llm.scheduler.unfinished:
            llm.abort(request)
        _forget_vram(llm)
        return {
            "mode": mode,
            "own_copies": salted,
            **summary,
            "turns": ended,
            "unanswered": unanswered,
            "device_blocks_held": most,
            "blocks_saved": saved,
            "document_blocks": scene.blocks(scene.document),
        }


# ---- all ----


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the figures that are asked for, print them and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny, on a CPU")
    parser.add_argument("--figures", default="wake,larger,shared", help="of wake, larger, shared")
    parser.add_argument("--modes", default=",".join(MODES), help="of wake: recompute, copy, attend")
    parser.add_argument("--host-gib", type=float, help="host memory")
    parser.add_argument("--json", type=Path, help="write machine, versions and results there")
    options = parser.parse_args(arguments)
    scene = QUICK if options.quick else SCENE
    if options.host_gib is not None:
        scene = replace(scene, host_bytes=int(options.host_gib * 2**30))
    found: dict[str, Any] = {"shape": scene.shape.name}

    def say(line: str) -> None:
        print(line, flush=True)

    began = time.monotonic()
    loaded = random_model(scene.shape, device=scene.device, dtype=scene.dtype)
    with HostStore(scene.host_bytes, device=scene.device) as host:
        host.arena.wait_ready()
        say(f"host memory is there after {time.monotonic() - began:.1f} s")
        for figure in options.figures.split(","):
            if figure == "wake":
                found["wake"] = wake(loaded, host, scene, options.modes.split(","), say)
            elif figure == "larger":
                found["larger"] = larger(loaded, host, scene, say)
                found["larger"]["copied_in_before"] = copy_larger(loaded, host, scene)
            elif figure == "shared":
                found["shared"] = shared(loaded, host, scene, say)
            else:
                parser.error(f"--figures: there is no {figure}")
    write_report(options.json, found, "torch", "cuda-bindings")
    return 0


if __name__ == "__main__":
    sys.exit(main())
