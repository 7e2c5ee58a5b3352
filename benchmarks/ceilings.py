"""What the hardware gives: reads of HBM, kernel reads of page-locked host memory, and copies by DMA.

The attention benchmarks take these beside what they measure: over the same bytes, in the same run, taking
turns. A contender is timed by replays of a CUDA graph that are enqueued one behind the other, so that neither
the launch nor the host is in the figure. By itself this prints the ceilings over several sizes.

    python benchmarks/ceilings.py [--json FILE]

The launch-and-time method follows "CUDA C++ Best Practices Guide", timing with events.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from kvpager.benchmarks.report import write_report
from kvpager.tiers.driver import check, cuda_driver

__all__ = [
    "Contender",
    "Timing",
    "Work",
    "by_the_clock",
    "captured",
    "copies_batched",
    "copies_by_kernel",
    "copies_one_by_one",
    "eager",
    "fastest",
    "hbm_reads",
    "host_reads",
    "keep_busy",
    "race",
    "use_stream",
]

Work = Callable[[], object]
"""Enqueues work on torch's current stream."""

ROUNDS: Final = 5
SECONDS: Final = 0.12
"""Time under way, of each contender of a race."""
GRAPH_SECONDS: Final = 1e-3
"""Short steps are repeated in a graph until it takes this long, so that gaps between replays do not count."""
HBM_REGIONS: Final = 8
"""Regions that a ceiling rotates over, so that no read finds the last one's lines in L2."""
HOST_REGIONS: Final = 2
"""Fewer, since L2 does not keep host memory."""

_SOURCE: Final = r"""
typedef unsigned long long u64;
extern "C" {
// Every 16 bytes of a region once, four loads in flight a thread.
__global__ void linear(const uint4* __restrict__ p, u64 n, unsigned* out) {
  u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x, s = (u64)gridDim.x * blockDim.x;
  unsigned a = 0;
  for (; i + 3 * s < n; i += 4 * s) {
    uint4 v0 = __ldcs(p + i), v1 = __ldcs(p + i + s);
    uint4 v2 = __ldcs(p + i + 2 * s), v3 = __ldcs(p + i + 3 * s);
    a ^= v0.x ^ v0.y ^ v0.z ^ v0.w ^ v1.x ^ v1.y ^ v1.z ^ v1.w;
    a ^= v2.x ^ v2.y ^ v2.z ^ v2.w ^ v3.x ^ v3.y ^ v3.z ^ v3.w;
  }
  for (; i < n; i += s) { uint4 v = __ldcs(p + i); a ^= v.x ^ v.y ^ v.z ^ v.w; }
  if (a == 0x12345678) out[0] = a;
}
// Pages by address, a CTA a page; written to `dst` where there is one.
__global__ void pages(const u64* __restrict__ src, const u64* __restrict__ dst, int count, int words,
                      unsigned* out) {
  unsigned a = 0;
  for (int page = blockIdx.x; page < count; page += gridDim.x) {
    const uint4* p = (const uint4*)src[page];
    uint4* d = dst ? (uint4*)dst[page] : 0;
    int i = threadIdx.x, s = blockDim.x;
    for (; i + 3 * s < words; i += 4 * s) {
      uint4 v0 = __ldcs(p + i), v1 = __ldcs(p + i + s);
      uint4 v2 = __ldcs(p + i + 2 * s), v3 = __ldcs(p + i + 3 * s);
      if (d) { d[i] = v0; d[i + s] = v1; d[i + 2 * s] = v2; d[i + 3 * s] = v3; }
      a ^= v0.x ^ v0.y ^ v0.z ^ v0.w ^ v1.x ^ v1.y ^ v1.z ^ v1.w;
      a ^= v2.x ^ v2.y ^ v2.z ^ v2.w ^ v3.x ^ v3.y ^ v3.z ^ v3.w;
    }
    for (; i < words; i += s) {
      uint4 v = __ldcs(p + i);
      if (d) d[i] = v;
      a ^= v.x ^ v.y ^ v.z ^ v.w;
    }
  }
  if (a == 0x12345678) out[0] = a;
}
__global__ void spin(long long cycles) { long long t = clock64(); while (clock64() - t < cycles); }
}
"""
_CYCLES_PER_MS: Final = 2_000_000


# ---- timing ----


@dataclass(frozen=True)
class Contender:
    """Something that is timed.

    Attributes:
        run: enqueues the work once.
        steps: steps that it makes; its time is divided by them.
        before: enqueued before each run, outside of its time; None for runs that follow each other.
        keep: what must live as long as the contender.
    """

    run: Work
    steps: int
    before: Work | None = None
    keep: Sequence[object] = field(default=(), repr=False)


@dataclass(frozen=True)
class Timing:
    """Seconds of one step: the median over all runs, and the middle half of them."""

    seconds: float
    low: float
    high: float

    @property
    def us(self) -> float:
        """Microseconds, the median."""
        return self.seconds * 1e6

    @property
    def spread(self) -> float:
        """How far apart the middle half lies, of the median."""
        return (self.high - self.low) / self.seconds


def use_stream() -> None:
    """Make another stream the current one: the default stream neither captures nor takes batched copies."""
    torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]


def captured(steps: Sequence[Work], turns: int | None = None) -> Contender:
    """A contender that replays a graph of these steps. They run before, which compiles what they need.

    Args:
        steps: one behind the other.
        turns: how often they stand in the graph; None: so often that it takes a millisecond.
    """
    for step in steps:
        step()
    start, end = _event(), _event()
    start.record()
    for step in steps:
        step()
    end.record()
    end.synchronize()
    if turns is None:
        turns = min(16, max(1, round(GRAPH_SECONDS / (start.elapsed_time(end) / 1e3))))
    graph = torch.cuda.CUDAGraph()
    # Not torch.cuda.graph, which collects garbage and empties the cache each time: there are hundreds.
    graph.capture_begin()
    try:
        for step in [*steps] * turns:
            step()
    finally:
        graph.capture_end()
    return Contender(graph.replay, len(steps) * turns, keep=tuple(steps))


def eager(step: Work, hide_ms: float) -> Contender:
    """A contender that is not captured. The device is kept busy meanwhile, so enqueuing costs nothing."""
    return Contender(step, 1, before=lambda: keep_busy(hide_ms))


def race(
    contenders: Mapping[str, Contender], seconds: float = SECONDS, rounds: int = ROUNDS
) -> dict[str, Timing]:
    """Time contenders, which take turns, another one first each round.

    Args:
        contenders: by name.
        seconds: device time that each is given, more or less.
        rounds: turns of each.
    """
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    repeats = {}
    for name, contender in contenders.items():
        contender.run()
        once = _timed(contender, 1)[0]
        most = 50 if contender.before is None else 8  # what comes before takes its time too
        repeats[name] = min(most, max(1, round(seconds / rounds / once)))
    for number in range(rounds):
        for turn in range(len(names)):
            name = names[(number + turn) % len(names)]
            samples[name] += _timed(contenders[name], repeats[name])
    return {name: _timing(samples[name], contenders[name].steps) for name in names}


def _timed(contender: Contender, repeats: int) -> list[float]:
    """Seconds of each of several runs."""
    events = [_event() for _ in range(repeats + 1)]
    seconds = []
    if contender.before is not None:
        start, end = events[:2]
        for _ in range(repeats):
            contender.before()
            start.record()
            contender.run()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        return seconds
    keep_busy(0.5)
    contender.run()  # what the one before left in L2 and in the page tables is gone after this
    events[0].record()
    for event in events[1:]:
        contender.run()
        event.record()
    events[-1].synchronize()
    for start, end in itertools.pairwise(events):
        seconds.append(start.elapsed_time(end) / 1e3)
    return seconds


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _timing(samples: list[float], steps: int) -> Timing:
    ordered = sorted(sample / steps for sample in samples)
    quarter = len(ordered) // 4
    return Timing(statistics.median(ordered), ordered[quarter], ordered[-1 - quarter])


def by_the_clock(works: Mapping[str, Work], rounds: int = 9) -> dict[str, Timing]:
    """Time works that use streams of their own, from an idle device to an idle device, taking turns."""
    names = list(works)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 2):
        for turn in range(len(names)):
            name = names[(number + turn) % len(names)]
            torch.cuda.synchronize()
            started = time.perf_counter()
            works[name]()
            torch.cuda.synchronize()
            if number >= 2:  # the first rounds warm up
                samples[name].append(time.perf_counter() - started)
    return {name: _timing(samples[name], 1) for name in names}


def fastest(times: Mapping[str, Timing], prefix: str) -> Timing:
    """The fastest of the contenders whose names begin so: a ceiling is the best of several ways to it."""
    return min((times[name] for name in times if name.startswith(prefix)), key=lambda timing: timing.seconds)


# ---- reads by kernels ----


def hbm_reads(pool: torch.Tensor, nbytes: int) -> dict[str, Contender]:
    """Streaming reads of ``nbytes`` in HBM, by several shapes of grid, each over regions of the pool in turn.

    Args:
        pool: contiguous, on the GPU; larger than L2 by far.
        nbytes: bytes of one read, a multiple of 16.
    """
    processors = torch.cuda.get_device_properties(pool.device).multi_processor_count
    regions = _regions(pool, nbytes, HBM_REGIONS)
    return {
        f"hbm read {per}x{threads}": captured(
            [_linear(at, nbytes, per * processors, threads) for at in regions]
        )
        for per, threads in ((2, 1024), (8, 512))
    }


def host_reads(
    host: torch.Tensor, nbytes: int, page_bytes: int = 65536, seed: int = 0
) -> dict[str, Contender]:
    """Kernel reads of ``nbytes`` of page-locked host memory in place: linear, and by pages in random order.

    Args:
        host: contiguous, page-locked.
        nbytes: bytes of one read, a multiple of 16.
        page_bytes: bytes of a page, a multiple of 16.
        seed: of the order of the pages.
    """
    regions = _regions(host, nbytes, HOST_REGIONS)
    count = -(-nbytes // page_bytes)
    generator = torch.Generator().manual_seed(seed)
    size = host.numel() * host.element_size()
    order = torch.randperm(size // page_bytes, generator=generator)
    tables = [
        (host.data_ptr() + chosen * page_bytes).cuda()
        for chosen in torch.split(order, count)
        if len(chosen) == count
    ][:HOST_REGIONS]
    # The last page may end early; the bytes that count are all read, and up to a page more.
    contenders = {
        f"host read linear {ctas}": captured([_linear(at, nbytes, ctas, 512) for at in regions])
        for ctas in (16, 132)
    }
    for ctas in (132, 264):
        steps = [_pages(table, None, page_bytes, ctas) for table in tables]
        contenders[f"host read pages {ctas}"] = captured(steps)
    return contenders


def _regions(memory: torch.Tensor, nbytes: int, most: int) -> list[int]:
    """Addresses of up to ``most`` regions of ``nbytes`` that do not overlap."""
    size = memory.numel() * memory.element_size()
    stride = -(-nbytes // 128) * 128
    if size < nbytes:
        raise SystemExit(f"a ceiling over {nbytes} bytes needs as much memory; there are {size}")
    return [memory.data_ptr() + i * stride for i in range(min(most, max(1, size // stride)))]


@cache
def _kernels() -> Any:
    import cupy

    return cupy.RawModule(code=_SOURCE, options=("--std=c++17",), backend="nvrtc")


@cache
def _sink() -> torch.Tensor:
    """Where a kernel would write what it read: never, but the compiler does not know."""
    return torch.zeros(4, dtype=torch.int32, device="cuda")


def _launch(name: str, ctas: int, threads: int, *arguments: object) -> None:
    import cupy

    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
    with stream:
        _kernels().get_function(name)((ctas,), (threads,), arguments)


def _linear(address: int, nbytes: int, ctas: int, threads: int) -> Work:
    sink = np.uint64(_sink().data_ptr())
    return lambda: _launch("linear", ctas, threads, np.uint64(address), np.uint64(nbytes // 16), sink)


def _pages(src: torch.Tensor, dst: torch.Tensor | None, page_bytes: int, ctas: int) -> Work:
    sink = np.uint64(_sink().data_ptr())
    words, count = np.int32(page_bytes // 16), np.int32(src.numel())
    source, target = np.uint64(src.data_ptr()), np.uint64(0 if dst is None else dst.data_ptr())
    kept = (src, dst)

    def work(kept: object = kept) -> None:
        _launch("pages", ctas, 256, source, target, count, words, sink)

    return work


def keep_busy(ms: float) -> None:
    """Hold the current stream for so long, while work behind it is enqueued."""
    _launch("spin", 1, 1, np.int64(ms * _CYCLES_PER_MS))


# ---- copies ----


def copies_by_kernel(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], nbytes: int) -> dict[str, Contender]:
    """Copies of pages by a kernel, by several grids; all of them are one step.

    Args:
        pairs: of each launch the addresses of its pages, source and destination: int64 [n] on the GPU,
            multiples of 16.
        nbytes: bytes of a page, a multiple of 16.
    """
    contenders = {}
    for ctas in (16, 132):
        launches = [_pages(src, dst, nbytes, ctas) for src, dst in pairs]
        contenders[f"kernel copy {ctas}"] = captured([_in_turn(launches)])
    return contenders


def _in_turn(works: Sequence[Work]) -> Work:
    def work() -> None:
        for part in works:
            part()

    return work


def copies_batched(src: Iterable[int], dst: Iterable[int], nbytes: int) -> Work:
    """DMA copies submitted by one call (cuMemcpyBatchAsync), where they are ordered by the stream alone."""
    driver = cuda_driver()
    to, start = [driver.CUdeviceptr(at) for at in dst], [driver.CUdeviceptr(at) for at in src]
    sizes = [nbytes] * len(to)
    attributes = driver.CUmemcpyAttributes()
    attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM

    def work() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        check(driver.cuMemcpyBatchAsync(to, start, sizes, len(to), [attributes], [0], 1, stream), "copying")

    return work


def copies_one_by_one(src: Iterable[int], dst: Iterable[int], nbytes: int) -> Work:
    """DMA copies, a call each (cuMemcpyAsync). Captured, they are a graph's nodes, and cost no call."""
    driver = cuda_driver()
    pairs = [(driver.CUdeviceptr(to), driver.CUdeviceptr(at)) for at, to in zip(src, dst, strict=True)]

    def work() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for to, start in pairs:
            check(driver.cuMemcpyAsync(to, start, nbytes, stream), "copying")

    return work


# ---- by itself ----


def _measure(pool: torch.Tensor, host: torch.Tensor, seconds: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def add(what: str, nbytes: int, times: Mapping[str, Timing]) -> None:
        for name, timing in times.items():
            rate = nbytes / timing.seconds / 1e9
            rows.append(
                {"what": what, "bytes": nbytes, "by": name, "gb_per_s": rate, "spread": timing.spread}
            )
            size = f"{nbytes / 2**20:.1f} MiB"
            print(
                f"{what:>16} {size:>10}  {name:<24} {rate:8.1f} GB/s, spread {timing.spread:.1%}", flush=True
            )

    for mib in (24, 128, 256, 512, 1024, 2048, 4096):
        add("HBM", mib << 20, race(hbm_reads(pool, mib << 20), seconds))
    for mib in (8, 32, 256):
        add("host, in place", mib << 20, race(host_reads(host, mib << 20), seconds))
    for page in (4096, 16384):
        times = race(host_reads(host, 256 << 20, page), seconds)
        pages = {name: timing for name, timing in times.items() if "pages" in name}
        add(f"host, {page} B", 256 << 20, pages)
    total = 256 << 20
    for piece in (65536, 2 << 20, total):
        src = [host.data_ptr() + at for at in range(0, total, piece)]
        dst = [pool.data_ptr() + at for at in range(0, total, piece)]
        work = {"batched": eager(copies_batched(src, dst, piece), 20.0)}
        if len(src) <= 4096:
            work["one by one"] = captured([copies_one_by_one(src, dst, piece)])
        add(f"DMA, {piece >> 10} KiB", total, race(work, seconds))
    return rows


def main() -> None:
    """Measure, print, and write what ``--json`` names."""
    parser = argparse.ArgumentParser(description="Ceilings of HBM and of PCIe.")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="device time of each contender")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions and results here")
    arguments = parser.parse_args()
    use_stream()
    pool = torch.randint(-(2**31), 2**31 - 1, (2 << 30,), dtype=torch.int32, device="cuda")
    host = torch.empty(1 << 28, dtype=torch.int32, pin_memory=True)
    host.copy_(pool[: 1 << 28])
    rows = _measure(pool, host, arguments.seconds)
    write_report(arguments.json, rows, "torch", "cupy-cuda13x", "cuda-bindings")


if __name__ == "__main__":
    main()
