"""``kvpager bench --calibrate``: what links of this machine cost, and prefilling with a model on it.

Engines begin with these figures, and refine them while they serve (`kvstore.cost_estimates`). A cost has a
part for each move or step and one for each byte or token, so each link is measured with moves of several
sizes, and a model with parts of prompts, at several depths, on an engine of its own.
"""

from __future__ import annotations

import platform
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from ..kvstore.calibration import Calibration, DeviceCosts, ModelCost
from ..kvstore.cost import LinkCost
from ..kvstore.cost_estimates import LinkEstimate, fitted_compute
from ..tiers.errors import KVPagerError
from ..tiers.mover import HostMover, Mover
from .bench_cold import DEADLINE, expect_done, own_tier
from .bench_memory import names_from

if TYPE_CHECKING:
    from ..engine.llm import LLM

__all__ = ["calibrated", "calibrated_model", "calibration_lines", "well_known"]

_CPU: Final = "cpu"
_GPU: Final = "cuda:0"
_BLOCK_BYTES: Final = 64 << 10
_BATCHES: Final = (1, 16, 64, 256)
"""Blocks of a move: from 64 KiB to 16 MiB."""
_COLD_BYTES: Final = 256 << 10
_COLD_BATCHES: Final = (1, 4, 16)
_LEAST_ROUNDS: Final = 4
_MOST_ROUNDS: Final = 100
_GROWTH: Final = tuple(64 << times for times in range(9))
"""Tokens of the document, each time it grows: to 16,384, as far as time and the model allow."""
_GROWTH_SHARE: Final = 0.5
"""Of the time: what is left is for measuring again and again."""
_QUESTION_SHARE: Final = 1 / 12
"""Of the time: what one question may take."""
_QUESTIONS: Final = (32, 128, 512)
"""Tokens that are computed after a beginning that is there."""
_LEAST_KINDS: Final = 4
"""Of steps, that tell the three figures of a model apart."""
_LEAST_SECONDS: Final = 20.0
"""What a model may take at least: in less, slow machines do not compute so many kinds."""
_QUARTILE: Final = 0.25
_COMPUTE_UNITS: Final = (("us a step", 1e6), ("us a token", 1e6), ("ns a pair", 1e9))
_BLOCK_TOKENS: Final = 16
_DEVICE_BYTES: Final = 1 << 30


def calibrated(colds: Sequence[str], seconds: float, *, gpu: bool) -> Calibration:
    """What the links of this machine cost.

    Args:
        colds: URLs of cold tiers, as of `open_cold_tier`; of a disk a folder in it is used.
        seconds: how long each link may take.
        gpu: whether there is a GPU to measure.

    Raises:
        ConfigError: a URL names no cold tier.
        ColdTierError: one cannot be used.
        KVPagerError: the GPU refuses something.
    """
    cold = dict(_cold(url, seconds) for url in colds)
    # Where host memory stands in for VRAM, reading it in place is reading it.
    devices = {_CPU: DeviceCosts(LinkCost(0.0, 0.0), _host_copies(seconds))}
    if gpu:
        name, costs = _gpu_links(seconds)
        devices[name] = costs
    return Calibration(platform.node(), time.time(), cold, devices)


def calibrated_model(
    model: str | Path, device: str, seconds: float, progress: Callable[[float], None] | None = None
) -> Calibration:
    """What prefilling with a model costs, on an engine that has nothing else to do.

    Args:
        model: what `LLM` takes.
        device: where it runs, as of `LLM`.
        seconds: how long that may take. Where little was measured by then it goes on until it took 20 in all,
            what is compiled at first use among them, and begins no prompt beyond.
        progress: is told now and then what share of that has passed.

    Raises:
        ModelError: the model cannot be read.
        ConfigError: there is no such device.
        KVPagerError: it takes too short prompts, or too long for them; or what prompts took varies so much
            that nothing is known by it.
    """
    # Here, since torch takes a good part of the time in which a command starts.
    from ..engine.llm import LLM
    from ..engine.sizing import device_name, loaded_on

    loaded, place = loaded_on(model, device, "auto")
    with LLM(loaded, device=place, block_size=_BLOCK_TOKENS, device_bytes=_DEVICE_BYTES, host_bytes=0) as llm:
        measured = list(_prefills(llm, seconds, progress or (lambda share: None)))
        step_tokens = llm.scheduler.step_tokens
    if len(measured) < _LEAST_KINDS:
        raise KVPagerError(f"{loaded.name} is not known: too few prompts were done in time")
    cost = ModelCost(loaded.name, *fitted_compute(measured, step_tokens))
    if not well_known(cost, measured):
        raise KVPagerError(
            f"what prefilling with {loaded.name} takes is not known well enough, and not kept: it seems "
            f"to be {_compute_words(cost)}; measure for more --seconds, or while the machine does less"
        )
    costs = DeviceCosts(models={loaded.identity.hex(): cost})
    return Calibration(platform.node(), time.time(), {}, {device_name(place): costs})


def calibration_lines(calibration: Calibration) -> Iterator[str]:
    """What was measured, for people."""
    links = {f"cold tier ({kind}) to host memory": cost for kind, cost in calibration.cold.items()}
    for name, costs in calibration.devices.items():
        for words, cost in (("reads of host memory in place", costs.in_place), ("copies to it", costs.copy)):
            if cost is not None:
                links[f"{name}: {words}"] = cost
    for words, link in links.items():
        yield f"{words:<58} {link.seconds_per_call * 1e6:8.1f} us + {_rate(link)}"
    for name, costs in calibration.devices.items():
        for model in costs.models.values():
            yield f"{f'{name}: prefill with {model.name}':<58} {_compute_words(model)}"


def well_known(cost: ModelCost, measured: Sequence[tuple[int, float, float]]) -> bool:
    """Whether the error of each figure is less than what it is a part of: no measured step takes, by the
    figures, less than what the error of one of them would add to it.

    So a figure that hardly matters, as that of pairs where prompts are short, need not be known.

    Args:
        cost: with its errors.
        measured: as of `fitted_compute`, what it was fitted to.
    """
    if cost.errors is None:
        return False
    steps = np.array([(1.0, tokens, pairs) for tokens, pairs, _ in measured])
    takes = steps @ np.array(astuple(cost.compute)[:3])
    return bool((steps * np.array(astuple(cost.errors)[:3]) < takes[:, None]).all())


def _compute_words(model: ModelCost) -> str:
    figures = zip(
        _COMPUTE_UNITS,
        astuple(model.compute)[:3],
        astuple(model.errors or model.compute)[:3],
        strict=True,
    )
    return " + ".join(
        f"{value * scale:.2f}" + (f" ± {error * scale:.2f}" if model.errors else "") + f" {unit}"
        for (unit, scale), value, error in figures
    )


def _rate(link: LinkCost) -> str:
    return f"{1e-9 / link.seconds_per_byte:.2f} GB/s" if link.seconds_per_byte else "nothing for a byte"


def _prefills(
    llm: LLM, seconds: float, progress: Callable[[float], None]
) -> Iterator[tuple[int, float, float]]:
    """Tokens, pairs and seconds of steps of several lengths, as deep in a prompt as there is time for.

    What attention takes shows in tokens far from the beginning, and to compute these alone takes little time
    where what comes before them is there: a document grows, and questions about beginnings of it follow, in
    turns. Of each the lower quartile counts: what else the machine does makes it slower, and nothing faster.
    """
    from ..engine.sampler import SamplingParams

    random = np.random.default_rng(0)
    one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    # Half of the device tier is for the questions, so that the document stays.
    most = min(llm.max_tokens - 2, llm.store.pool.capacity * _BLOCK_TOKENS // 2)
    document = random.integers(0, llm.vocabulary, _GROWTH[-1]).astype(np.int32)

    def compute(depth: int, count: int) -> tuple[float, bool]:
        """Seconds to compute so many tokens after so many of the document, and whether these were there."""
        new = random.integers(0, llm.vocabulary, count).astype(np.int32)
        began = time.perf_counter()
        (done,) = llm.generate([np.concatenate([document[:depth], new])], one)
        return time.perf_counter() - began, done.cached.device == depth

    counts = [count for count in _QUESTIONS if count <= min(most, llm.scheduler.step_tokens)]
    given_up = time.perf_counter() + max(seconds, _LEAST_SECONDS)
    for count in counts[:2]:
        if time.perf_counter() < given_up:
            compute(0, count)  # what is compiled at first use
    began = time.perf_counter()
    reached, rate = 0, 0.0
    for length in _GROWTH:
        # A part is as large as all before it, and each of its tokens takes somewhat longer.
        expected = 1.5 * rate * (length - reached)
        if length > most or time.perf_counter() + expected > min(given_up, began + _GROWTH_SHARE * seconds):
            break
        started = time.perf_counter()
        llm.generate([document[:length]], one)
        rate = (time.perf_counter() - started) / (length - reached)
        reached = length
    depths = dict.fromkeys((0, reached // 2, reached))
    kinds = [(depth, count) for depth in depths for count in counts if depth + count <= most]
    times: dict[tuple[int, int], list[float]] = {kind: [] for kind in kinds}
    for number in range(_MOST_ROUNDS):
        for kind, taken in times.items():
            expected = taken[-1] if taken else rate * kind[1]
            # Those that take long leave no time for the others, and say no more.
            left = began + seconds - time.perf_counter()
            short = expected <= min(left, _QUESTION_SHARE * seconds)
            first = not number and kind[1] in counts[:2] and time.perf_counter() + expected <= given_up
            if short or first:
                progress(min(1.0, 1.0 - left / seconds))
                one_more, whole = compute(*kind)
                if whole:
                    taken.append(one_more)
    for (depth, count), taken in times.items():
        if taken:
            yield count, count * (depth + count / 2), float(np.quantile(taken, _QUARTILE))


def _cost(moves: Iterator[tuple[int, float]]) -> LinkCost:
    """The cost that explains how long moves of so many bytes took."""
    estimate = LinkEstimate()
    for nbytes, seconds in moves:
        estimate.moved(nbytes, seconds)
    if estimate.cost is None:
        raise KVPagerError("nothing was moved in time")
    return estimate.cost


def _cold(url: str, seconds: float) -> tuple[str, LinkCost]:
    """The kind of a cold tier, and what reading blocks from it costs."""
    with own_tier(url) as tier:
        space = secrets.token_bytes(16)
        names = names_from(0, max(_COLD_BATCHES))
        blocks = np.random.default_rng(0).integers(0, 256, (len(names), _COLD_BYTES), np.uint8)
        back = [memoryview(block) for block in np.empty_like(blocks)]
        try:
            expect_done(tier.put(space, names, [memoryview(block) for block in blocks], DEADLINE), "written")

            def get(blocks: int) -> None:
                expect_done(tier.get(space, names[:blocks], back[:blocks], DEADLINE), "read")

            return tier.name, _cost(_rounds(get, seconds, _COLD_BATCHES, _COLD_BYTES))
        finally:
            tier.delete(space, names, DEADLINE)


def _rounds(
    move: Callable[[int], object],
    seconds: float,
    batches: Sequence[int] = _BATCHES,
    block_bytes: int = _BLOCK_BYTES,
) -> Iterator[tuple[int, float]]:
    """Blocks of moves of all sizes, and how long each took, in turns for so many seconds."""
    until = time.perf_counter() + seconds
    number = 0
    while number < _LEAST_ROUNDS or time.perf_counter() < until:
        for blocks in batches:
            began = time.perf_counter()
            move(blocks)
            if number:  # the first ones touch memory for the first time
                yield blocks * block_bytes, time.perf_counter() - began
        number += 1


def _copies(mover: Mover, source: int, target: int, seconds: float) -> Iterator[tuple[int, float]]:
    places = np.arange(max(_BATCHES), dtype=np.int64) * _BLOCK_BYTES

    def copy(blocks: int) -> None:
        mover.copy(source + places[:blocks], target + places[:blocks], _BLOCK_BYTES).wait()

    return _rounds(copy, seconds)


def _host_copies(seconds: float) -> LinkCost:
    source, target = (np.zeros(max(_BATCHES) * _BLOCK_BYTES, dtype=np.uint8) for _ in range(2))
    with closing(HostMover()) as mover:
        return _cost(_copies(mover, source.ctypes.data, target.ctypes.data, seconds))


def _gpu_links(seconds: float) -> tuple[str, DeviceCosts]:
    """The GPU's name, and what copying to it and reading host memory in place cost."""
    import torch

    from ..engine.sizing import device_name
    from ..kernels.copy_blocks import AddressCopier
    from ..kernels.read_words import read_words
    from ..tiers.arena import DeviceArena
    from ..tiers.mover import CudaMover
    from ..tiers.pinned import PinnedArena

    nbytes = max(_BATCHES) * _BLOCK_BYTES
    with (
        closing(CudaMover(_GPU, AddressCopier(_GPU))) as mover,
        PinnedArena(nbytes, device=_GPU) as arena,
        closing(DeviceArena(nbytes, 1, _GPU)) as vram,
    ):
        arena.wait_ready()
        if not arena.is_page_locked(np.arange(arena.num_extents)).all():
            raise KVPagerError("host memory cannot be page-locked for the GPU: see kvpager doctor")
        stream = torch.cuda.current_stream(torch.device(_GPU))
        out = torch.zeros(1, dtype=torch.int32, device=_GPU)

        def in_place(blocks: int) -> None:
            read_words(arena.base, blocks * _BLOCK_BYTES, out)
            stream.synchronize()

        copy = _cost(_copies(mover, arena.base, vram.base, seconds))
        return device_name(_GPU), DeviceCosts(_cost(_rounds(in_place, seconds)), copy)
