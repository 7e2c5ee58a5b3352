"""``kvpager bench --calibrate``: what links of this machine cost, and prefilling with a model on it.

Engines begin with these figures, and refine them while they serve (`kvstore.cost_estimates`). A cost has a
part for each move or step and one for each byte or token, so each link is measured with moves of several
sizes, and a model with prompts of several lengths on an engine of its own, which measures itself.
"""

from __future__ import annotations

import platform
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from ..kvstore.calibration import Calibration, DeviceCosts, ModelCost
from ..kvstore.cost import LinkCost
from ..kvstore.cost_estimates import LinkEstimate
from ..tiers.errors import KVPagerError
from ..tiers.mover import HostMover, Mover
from .bench_cold import DEADLINE, expect_done, own_tier
from .bench_memory import names_from

if TYPE_CHECKING:
    from ..engine.llm import LLM

__all__ = ["calibrated", "calibrated_model", "calibration_lines"]

_CPU: Final = "cpu"
_GPU: Final = "cuda:0"
_BLOCK_BYTES: Final = 64 << 10
_BATCHES: Final = (1, 16, 64, 256)
"""Blocks of a move: from 64 KiB to 16 MiB."""
_COLD_BYTES: Final = 256 << 10
_COLD_BATCHES: Final = (1, 4, 16)
_LEAST_ROUNDS: Final = 4
_MOST_ROUNDS: Final = 100
_LENGTHS: Final = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Tokens of prompts, as far as time and the model allow."""
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


def calibrated_model(model: str | Path, device: str, seconds: float) -> Calibration:
    """What prefilling with a model costs, on an engine that has nothing else to do.

    Args:
        model: what `LLM` takes.
        device: where it runs, as of `LLM`.
        seconds: after which no longer prompts are tried.

    Raises:
        ModelError: the model cannot be read.
        ConfigError: there is no such device.
        KVPagerError: it takes too short prompts, or too long for them.
    """
    # Here, since torch takes a good part of the time in which a command starts.
    from ..engine.llm import LLM
    from ..engine.sizing import device_name, loaded_on

    loaded, place = loaded_on(model, device, "auto")
    with LLM(loaded, device=place, block_size=_BLOCK_TOKENS, device_bytes=_DEVICE_BYTES, host_bytes=0) as llm:
        _run_prompts(llm, seconds)
        cost = llm.store.costs.compute.cost
    if cost is None:
        raise KVPagerError(f"{loaded.name} is not known: too few prompts were done in {seconds:g} seconds")
    costs = DeviceCosts(models={loaded.identity.hex(): ModelCost(loaded.name, cost)})
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
            compute = model.compute
            token, pair = compute.seconds_per_token * 1e6, compute.seconds_per_token_pair * 1e9
            step, words = compute.seconds_per_step * 1e6, f"{name}: prefill with {model.name}"
            yield f"{words:<58} {step:8.1f} us a step + {token:.2f} us a token + {pair:.2f} ns a pair"


def _rate(link: LinkCost) -> str:
    return f"{1e-9 / link.seconds_per_byte:.2f} GB/s" if link.seconds_per_byte else "nothing for a byte"


def _run_prompts(llm: LLM, seconds: float) -> None:
    """Have an engine compute prompts of as many lengths as there is time for, again and again."""
    from ..engine.sampler import SamplingParams
    from ..kvstore.cost_estimates import ComputeEstimate

    random = np.random.default_rng(0)
    one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    most = min(llm.max_tokens - 2, llm.store.pool.capacity * _BLOCK_TOKENS - _BLOCK_TOKENS)
    lengths = [length for length in _LENGTHS if length <= most]

    def compute(length: int) -> float:
        began = time.perf_counter()
        llm.generate([random.integers(0, llm.vocabulary, length).astype(np.int32)], one)
        return time.perf_counter() - began

    for length in lengths[:2]:
        compute(length)  # what is compiled at first use
    llm.store.costs.compute = ComputeEstimate(step_tokens=llm.scheduler.step_tokens)
    until = time.perf_counter() + seconds
    for _ in range(_MOST_ROUNDS):
        taken = 0.0
        for length in lengths:
            # Twice as long a prompt takes some three times as long.
            if time.perf_counter() + 3 * taken > until:
                break
            taken = compute(length)


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
