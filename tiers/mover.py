"""Movers: batched block copies between arenas, on the CPU and by a GPU's copy engines.

A batch names blocks by their addresses. Runs of blocks that are neighbours at both ends become one copy,
since copies want megabytes: 4 KiB at a time the copy engine reaches 1.1 GB/s, 1 MiB at a time 48 (one H200,
PCIe 5 x16).
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .arena import AddressArray
from .driver import check, cuda_driver, device_ordinal, find_device
from .errors import ClosedError, ConfigError, KernelError, KVPagerError
from .settings import expect_integer, expect_seconds, shown

__all__ = [
    "CopyKernel",
    "CudaMover",
    "Flow",
    "HostMover",
    "Mover",
    "MoverStats",
    "Runs",
    "Transfer",
    "is_over",
    "merge_runs",
    "wait_through",
]

INLINE_BYTES: Final = 1 << 20
"""A batch of no more bytes is copied by the calling thread: handing it to another and hearing of its end
costs 20 to 100 us, which is about what the copy takes."""
KERNEL_BYTES: Final = 1 << 20
"""Runs shorter than this go through the copy kernel, where there is one: 51 GB/s at any size, while the copy
engine reaches 17 at 64 KiB and 35 at 256 KiB."""
_PIECE_BYTES: Final = 1 << 20
"""Long runs are cut to this, so that threads can share one and end together."""
_INT64: Final = np.dtype(np.int64)
_MOST_THREADS: Final = 256
_POLL_SECONDS: Final = 50e-6
_BATCH_COPY_DRIVER: Final = 13000
"""cuMemcpyBatchAsync came with CUDA 12.8, and took today's arguments with 13.0."""

Direction = Literal["to_device", "to_host", "within"]
"""``within``: both ends on the same side."""


@dataclass(frozen=True)
class Flow:
    """What went one way: blocks may be fewer, larger copies."""

    bytes: int = 0
    seconds: float = 0.0
    """From the first byte of each transfer to its last, added up."""
    copies: int = 0

    def plus(self, nbytes: int, seconds: float, copies: int) -> Flow:
        """This and one transfer more."""
        return Flow(self.bytes + nbytes, self.seconds + seconds, self.copies + copies)


@dataclass(frozen=True)
class MoverStats:
    """What a mover moved by transfers that are over. A `HostMover` knows only ``within``."""

    to_device: Flow = Flow()
    to_host: Flow = Flow()
    within: Flow = Flow()

    @property
    def bytes(self) -> int:
        """Bytes, all directions."""
        return self.to_device.bytes + self.to_host.bytes + self.within.bytes

    @property
    def seconds(self) -> float:
        """Seconds, all directions."""
        return self.to_device.seconds + self.to_host.seconds + self.within.seconds

    @property
    def copies(self) -> int:
        """Copies, all directions."""
        return self.to_device.copies + self.to_host.copies + self.within.copies


class Transfer(Protocol):
    """One batch on its way.

    A transfer that failed is over, and says so wherever it is asked: `done` and `wait` raise its error, each
    time, so nobody takes its destination for written; `error` returns it once either has seen it. The source
    is untouched either way.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of the batch."""
        ...

    @property
    def seconds(self) -> float:
        """From the first byte to the last; 0.0 until it is over."""
        ...

    @property
    def error(self) -> Exception | None:
        """Why it failed; None while it has not."""
        ...

    def done(self) -> bool:
        """Whether it is over, without waiting. Raises its error if it failed."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end, up to ``timeout`` seconds; whether it is over. Raises its error if it failed."""
        ...


def is_over(transfer: Transfer) -> bool:
    """Whether a transfer came to its end, good or bad; `Transfer.wait` then tells which, at once."""
    try:
        return transfer.done()
    except Exception:
        if transfer.error is None:
            raise
        return True


def wait_through(transfer: Transfer) -> None:
    """Wait for the end of a transfer, whatever interrupts: only then may its memory be given to others.

    Raises:
        Exception: what the transfer failed with.
        BaseException: what interrupted the wait, a KeyboardInterrupt for one, once the transfer is over.
    """
    interrupt: BaseException | None = None
    while True:
        try:
            transfer.wait()
            break
        except BaseException as error:
            if is_over(transfer):
                raise
            interrupt = error
    if interrupt is not None:
        raise interrupt


class Mover(Protocol):
    """Copies blocks between raw addresses. Safe to call from several threads."""

    @property
    def stats(self) -> MoverStats:
        """What was moved so far."""
        ...

    def copy(self, src: AddressArray, dst: AddressArray, nbytes: int) -> Transfer:
        """Start copying ``nbytes`` bytes from each of ``src`` to its ``dst`` (int64 [n], tags zero).

        No source overlaps a destination of the same batch, and no two destinations overlap. Batches run in no
        order that may be relied on. Both ends stay as they are until the transfer is over.

        Raises:
            ClosedError: the mover was closed.
            KernelError: the arrays are not int64 or differ in shape, or ``nbytes`` is no positive integer.
        """
        ...

    def close(self) -> None:
        """Finish what was started, and give threads and streams back. Idempotent."""
        ...


class Runs(NamedTuple):
    """Copies that a batch comes to: int64 [runs] each, ordered by source."""

    src: AddressArray
    dst: AddressArray
    nbytes: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    """Index of each run's first block in `order`."""
    order: npt.NDArray[np.int64]
    """int64 [n]: the batch's blocks in the order of the runs."""


def merge_runs(
    src: AddressArray, dst: AddressArray, nbytes: int, groups: npt.NDArray[np.int64] | None = None
) -> Runs:
    """Merge blocks that are neighbours at both ends, in whatever order they were named.

    Args:
        src: int64 [n], n > 0.
        dst: int64 [n].
        nbytes: bytes of a block.
        groups: int64 [n]; blocks of different groups are never merged. None: all are of one group.
    """
    order = np.arange(src.size, dtype=np.int64)
    if (src[1:] < src[:-1]).any():
        order = src.argsort(kind="stable").astype(np.int64, copy=False)
        src, dst = src[order], dst[order]
        groups = None if groups is None else groups[order]
    broken = (src[1:] - src[:-1] != nbytes) | (dst[1:] - dst[:-1] != nbytes)
    if groups is not None:
        broken |= groups[1:] != groups[:-1]
    first = np.empty(np.count_nonzero(broken) + 1, np.int64)
    first[0] = 0
    first[1:] = np.flatnonzero(broken) + 1
    lengths = np.append(first[1:], src.size) - first
    return Runs(src[first], dst[first], lengths * nbytes, first, order)


def _check(src: AddressArray, dst: AddressArray, nbytes: int) -> None:
    if not isinstance(src, np.ndarray) or not isinstance(dst, np.ndarray):
        raise KernelError(
            f"src and dst must be arrays of addresses, got {type(src).__name__} and {type(dst).__name__}"
        )
    if src.ndim != 1 or src.shape != dst.shape:
        raise KernelError(f"src and dst must be alike and one-dimensional, got {src.shape} and {dst.shape}")
    if src.dtype != _INT64 or dst.dtype != _INT64:
        raise KernelError(f"src and dst must be int64, got {src.dtype} and {dst.dtype}")
    if type(nbytes) is not int or nbytes < 1:
        raise KernelError(f"nbytes must be a positive integer, got {shown(nbytes)}")


# ---- on the CPU ----


class HostMover:
    """Copies by the CPU: ``memmove`` over merged runs, which leaves the interpreter to others meanwhile.

    Small batches are copied before `copy` returns; others by worker threads, and by whoever waits for one
    without a timeout, so that waiting costs no more than copying.

    Args:
        threads: worker threads.

    Raises:
        ConfigError: ``threads`` is out of range.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads = expect_integer("threads", threads, 1, _MOST_THREADS)
        self._workers = ThreadPoolExecutor(threads, thread_name_prefix="host-mover")
        self._lock = threading.Lock()
        # Plain numbers: making a Flow for each copy would be felt at 256 KiB.
        self._bytes = 0
        self._seconds = 0.0
        self._copies = 0
        self._closed = False

    @property
    def stats(self) -> MoverStats:
        """What was moved so far, all of it under ``within``."""
        with self._lock:
            return MoverStats(within=Flow(self._bytes, self._seconds, self._copies))

    def copy(self, src: AddressArray, dst: AddressArray, nbytes: int) -> Transfer:
        """See `Mover.copy`. Batches of up to 1 MiB are over when this returns."""
        _check(src, dst, nbytes)
        if src.size * nbytes <= INLINE_BYTES:
            started = time.perf_counter()
            self._copy_now(src, dst, nbytes)
            return _Finished(src.size * nbytes, time.perf_counter() - started)
        transfer = _HostTransfer(self, src, dst, nbytes)
        with self._lock:
            if self._closed:
                raise ClosedError("the mover was closed")
            transfer.start(self._workers, self._threads)
        return transfer

    def copy_now(self, src: AddressArray, dst: AddressArray, nbytes: int) -> None:
        """Copy a batch on the calling thread; arguments and errors as of `copy`."""
        _check(src, dst, nbytes)
        self._copy_now(src, dst, nbytes)

    def _copy_now(self, src: AddressArray, dst: AddressArray, nbytes: int) -> None:
        if self._closed:
            raise ClosedError("the mover was closed")
        if src.size == 0:
            return
        started = time.perf_counter()
        if src.size == 1:
            ctypes.memmove(dst.item(), src.item(), nbytes)
            copies = 1
        else:
            copies = 0
            for to, start, size in _host_runs(src, dst, nbytes):
                ctypes.memmove(to, start, size)
                copies += 1
        self._count(src.size * nbytes, time.perf_counter() - started, copies)

    def close(self) -> None:
        """Finish what was started and end the threads. Idempotent."""
        with self._lock:
            self._closed = True
        self._workers.shutdown(wait=True)

    def _count(self, nbytes: int, seconds: float, copies: int) -> None:
        with self._lock:
            self._bytes += nbytes
            self._seconds += seconds
            self._copies += copies


def _host_runs(src: AddressArray, dst: AddressArray, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """(dst, src, bytes) of each run, in the order of the batch.

    A plain loop, since the copy itself is a Python call per run: `merge_runs` would take longer to set up for
    a few dozen blocks than it saves.
    """
    starts, targets = src.tolist(), dst.tolist()
    start, to, size = starts[0], targets[0], nbytes
    for next_start, next_to in zip(starts[1:], targets[1:], strict=True):
        if next_start == start + size and next_to == to + size:
            size += nbytes
        else:
            yield to, start, size
            start, to, size = next_start, next_to, nbytes
    yield to, start, size


@dataclass(frozen=True)
class _Finished:
    """A transfer that was over before anybody could ask."""

    nbytes: int
    seconds: float
    error: None = None

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> bool:
        return True


class _HostTransfer:
    """Pieces of runs, taken by whichever thread comes first."""

    def __init__(self, mover: HostMover, src: AddressArray, dst: AddressArray, nbytes: int) -> None:
        pieces: deque[tuple[int, int, int]] = deque()
        copies = 0
        for to, start, size in _host_runs(src, dst, nbytes):
            copies += 1
            pieces.extend(
                (to + at, start + at, min(_PIECE_BYTES, size - at)) for at in range(0, size, _PIECE_BYTES)
            )
        self.nbytes = src.size * nbytes
        self.seconds = 0.0
        self._mover = mover
        self._pieces = pieces
        self._copies = copies
        self._left = len(pieces)
        self._lock = threading.Lock()
        self._started: float | None = None
        self._futures: list[Future[None]] = []

    def start(self, workers: ThreadPoolExecutor, threads: int) -> None:
        self._futures = [workers.submit(self._work) for _ in range(min(threads, self._left))]

    @property
    def error(self) -> Exception | None:
        for future in self._futures:
            if future.done() and not future.cancelled():
                error = future.exception()
                if isinstance(error, Exception):
                    return error
        return None

    def done(self) -> bool:
        if self._left == 0:
            return True
        error = self.error
        if error is not None:
            raise error
        return False

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None:
            wait_for_futures(self._futures, expect_seconds("timeout", timeout))
            return self.done()
        # The waiting thread would be idle: it takes part, alone where no worker has begun.
        busy = [future for future in self._futures if not future.cancel()]
        self._work()
        for future in busy:
            future.result()
        return self.done()

    def _work(self) -> None:
        if self._started is None:
            self._started = time.perf_counter()
        while True:
            try:
                to, start, size = self._pieces.popleft()
            except IndexError:
                return
            try:
                ctypes.memmove(to, start, size)
            except BaseException:  # an interrupt: the piece is anybody's again
                self._pieces.append((to, start, size))
                raise
            with self._lock:
                if self._left == 1:
                    self.seconds = time.perf_counter() - self._started
                    self._mover._count(self.nbytes, self.seconds, self._copies)
                self._left -= 1


# ---- by the GPU ----


class CopyKernel(Protocol):
    """A kernel that copies blocks between addresses that the GPU reaches; handed in from above."""

    def __call__(self, src: AddressArray, dst: AddressArray, nbytes: int, stream: int, /) -> None:
        """Enqueue the copy of ``nbytes`` from each of ``src`` to ``dst`` (int64 [n], in host memory).

        ``stream`` is the raw handle of a CUDA stream. What the launch needs is kept until the stream is past.
        """
        ...


class CudaMover:
    """Copies by a GPU's copy engines, one stream a direction, and by a copy kernel where runs are short.

    A batch begins after what the calling thread's current torch stream was given before, so blocks that
    earlier steps write or still read are safe; call `copy` from the thread that launches those steps. It goes
    one way: its sources are all on one side, and so are its destinations. That stream must not be under
    capture into a graph at the time.

    Page-locked memory moves by DMA. Host memory that is not page-locked is correct too, but slower: the
    driver stages it, and `copy` returns when that is over. Where the driver has it (13.0), all the runs of a
    batch are submitted by one cuMemcpyBatchAsync; before that one by one.

    Args:
        device: ``cuda`` or ``cuda:N``.
        copy_kernel: used for runs below 1 MiB between memory that the GPU reaches; None: DMA for all.

    Raises:
        ConfigError: ``device`` is no CUDA device of this machine, no driver answers, or cuda-python is not
            installed.
        KVPagerError: the device cannot be had.

    Sources: CUDA driver API manual, cuMemcpyBatchAsync (it refuses the legacy default stream) and
    cuMemcpyAsync; its page on synchronisation behaviour for memory that is not page-locked.
    """

    def __init__(self, device: str = "cuda:0", copy_kernel: CopyKernel | None = None) -> None:
        device_ordinal(device)  # a name that is none is told of first, then what else is wrong
        if copy_kernel is not None and not callable(copy_kernel):
            raise ConfigError(
                "copy_kernel", f"must be a function that copies blocks, got {shown(copy_kernel)}"
            )
        self._ordinal = find_device(device)
        driver = self._driver = cuda_driver()
        self._handle = check(driver.cuDeviceGet(self._ordinal), f"opening {device}")
        self._context = check(
            driver.cuDevicePrimaryCtxRetain(self._handle), f"retaining the context of {device}"
        )
        self._lock = threading.RLock()
        self._events: list[Any] = []
        self._flows: dict[Direction, Flow] = {"to_device": Flow(), "to_host": Flow(), "within": Flow()}
        self._closed = False
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        if not check(driver.cuDeviceGetAttribute(attribute, self._handle)):
            copy_kernel = None  # host addresses mean nothing to a kernel there
        self._copy_kernel = copy_kernel
        self._batches = check(driver.cuDriverGetVersion()) >= _BATCH_COPY_DRIVER
        kind = driver.CUpointer_attribute
        self._wanted = [
            kind.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            kind.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            kind.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        ]
        self._device_memory = int(driver.CUmemorytype.CU_MEMORYTYPE_DEVICE)
        with self._entered():
            flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            down, up = (check(driver.cuStreamCreate(flags), "making a stream") for _ in range(2))
        self._streams: dict[Direction, Any] = {"to_host": down, "to_device": up, "within": up}
        # In the order of submission, hence of completion, by the stream's handle.
        self._pending: dict[int, deque[_CudaTransfer]] = {int(down): deque(), int(up): deque()}

    @property
    def stats(self) -> MoverStats:
        """What was moved by transfers that are over."""
        with self._lock:
            if not self._closed:
                with self._entered():
                    self._reap()
            return MoverStats(**self._flows)

    def copy(self, src: AddressArray, dst: AddressArray, nbytes: int) -> Transfer:
        """See `Mover.copy`. When this raises, nothing of the batch is on its way any more.

        Raises:
            ClosedError: the mover was closed.
            KernelError: the arrays differ in shape, ``nbytes`` is not positive, a batch goes several ways, or
                a block lies across two registrations of host memory.
            KVPagerError: the driver refuses a copy.
        """
        _check(src, dst, nbytes)
        if src.size == 0:
            return _Finished(0, 0.0)
        with self._lock:
            if self._closed:
                raise ClosedError("the mover was closed")
            with self._entered():
                self._reap()
                return self._submit(src, dst, nbytes)

    def close(self) -> None:
        """Wait for what was started, and give the streams back. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            driver = self._driver
            with self._entered():
                for transfers in self._pending.values():
                    while transfers:
                        self._settle(transfers.popleft(), block=True)
                for event in self._events:
                    check(driver.cuEventDestroy(event), "destroying an event")
                for direction in ("to_host", "to_device"):
                    check(driver.cuStreamDestroy(self._streams[direction]), "destroying a stream")
            self._copy_kernel = None
            check(driver.cuDevicePrimaryCtxRelease(self._handle), "releasing the CUDA context")

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        """The device's context current, and the thread's own again after."""
        check(self._driver.cuCtxPushCurrent(self._context), "entering the CUDA context")
        try:
            yield
        finally:
            check(self._driver.cuCtxPopCurrent(), "leaving the CUDA context")

    def _submit(self, src: AddressArray, dst: AddressArray, nbytes: int) -> Transfer:
        import torch

        driver = self._driver
        sources = self._locate(src, nbytes)
        targets = self._locate(dst, nbytes)
        direction: Direction = "within"
        if sources.on_device != targets.on_device:
            direction = "to_host" if sources.on_device else "to_device"
        # Neither end of a copy may cross from one registration into the next, though addresses go on.
        groups = sources.group * (targets.group.max() + 1) + targets.group
        runs = merge_runs(src, dst, nbytes, groups)
        first = runs.order[runs.first]
        reached = sources.reached[first] & targets.reached[first]
        by_kernel = reached & (runs.nbytes < KERNEL_BYTES) & (self._copy_kernel is not None)

        stream = self._streams[direction]
        before, start, end = (self._event() for _ in range(3))
        compute = torch.cuda.current_stream(self._ordinal).cuda_stream
        check(driver.cuEventRecord(before, compute), "recording an event")
        check(driver.cuStreamWaitEvent(stream, before, 0), "waiting for the compute stream")
        self._events.append(before)  # a wait keeps what was recorded, not the event
        check(driver.cuEventRecord(start, stream), "recording an event")
        try:
            if self._copy_kernel is not None and by_kernel.any():
                chosen = runs.order[np.repeat(by_kernel, runs.nbytes // nbytes)]
                self._copy_kernel(src[chosen], dst[chosen], nbytes, int(stream))
            self._copy_runs(runs, reached & ~by_kernel, stream, batched=self._batches)
            self._copy_runs(runs, ~reached, stream, batched=False)
            check(driver.cuEventRecord(end, stream), "recording an event")
        except BaseException:
            check(driver.cuStreamSynchronize(stream), "waiting for a batch that was begun")
            self._events += [start, end]
            raise
        transfer = _CudaTransfer(self, direction, src.size * nbytes, runs.src.size, start, end)
        self._pending[int(stream)].append(transfer)
        return transfer

    def _copy_runs(self, runs: Runs, chosen: npt.NDArray[np.bool_], stream: Any, *, batched: bool) -> None:
        driver = self._driver
        pointer = driver.CUdeviceptr
        dst = [pointer(address) for address in runs.dst[chosen].tolist()]
        src = [pointer(address) for address in runs.src[chosen].tolist()]
        sizes = runs.nbytes[chosen].tolist()
        if batched and len(sizes) > 1:
            attributes = driver.CUmemcpyAttributes()
            attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
            check(
                driver.cuMemcpyBatchAsync(dst, src, sizes, len(sizes), [attributes], [0], 1, stream),
                f"copying {len(sizes)} runs",
            )
            return
        for to, start, size in zip(dst, src, sizes, strict=True):
            check(driver.cuMemcpyAsync(to, start, size, stream), f"copying {size} bytes")

    def _locate(self, addresses: AddressArray, nbytes: int) -> _Located:
        """Which allocation or registration each block is in, asking the driver once for each of them."""
        count = addresses.size
        one = self._memory_at(int(addresses.min()))
        if one.reached and int(addresses.max()) + nbytes <= one.stop:
            return _Located(np.ones(count, np.int64), np.ones(count, np.bool_), one.on_device)
        order = addresses.argsort(kind="stable")
        ordered = addresses[order].tolist()
        numbers: list[int] = []  # of each run of blocks that are together; 0: memory that CUDA does not know
        counts: list[int] = []
        sides = set()
        at = 0
        while at < count:
            one = self._memory_at(ordered[at])
            sides.add(one.on_device)
            stop = at + 1
            if one.reached:
                stop = bisect_left(ordered, one.stop, stop)
                # Device memory may be mapped from several pieces, across which the driver copies; host memory
                # that was registered in pieces it refuses.
                if not one.on_device and ordered[stop - 1] + nbytes > one.stop:
                    raise KernelError(
                        f"a block of {nbytes} bytes near {ordered[stop - 1]:#x} lies across two registrations"
                    )
            numbers.append(len(numbers) + 1 if one.reached else 0)
            counts.append(stop - at)
            at = stop
        if len(sides) > 1:
            raise KernelError("one end of a batch is partly in device and partly in host memory")
        group = np.empty(count, np.int64)
        group[order] = np.repeat(np.array(numbers, np.int64), counts)
        return _Located(group, group > 0, sides.pop())

    def _memory_at(self, address: int) -> _Memory:
        """The allocation or registration that an address is in."""
        wanted = self._wanted
        memory, start, size = check(
            self._driver.cuPointerGetAttributes(len(wanted), wanted, address),
            f"looking address {address:#x} up",
        )
        memory = int(memory)
        if memory == 0:
            return _Memory(False, False, address)
        return _Memory(True, memory == self._device_memory, int(start) + int(size))

    def _event(self) -> Any:
        if self._events:
            return self._events.pop()
        flags = int(self._driver.CUevent_flags.CU_EVENT_BLOCKING_SYNC)
        return check(self._driver.cuEventCreate(flags), "making an event")

    def _reap(self) -> None:
        """Count what is over; transfers of a stream end in the order in which they were submitted."""
        for transfers in self._pending.values():
            while transfers and (transfers[0].over or self._settle(transfers[0], block=False)):
                transfers.popleft()

    def _settle(self, transfer: _CudaTransfer, *, block: bool) -> bool:
        """Whether a transfer is over, by now or after waiting; takes its time and its events when it is."""
        if transfer.over:
            return True
        driver = self._driver
        ask = driver.cuEventSynchronize if block else driver.cuEventQuery
        status = ask(transfer.end)
        if status[0] == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        try:
            check(status, "a transfer")
            milliseconds = check(driver.cuEventElapsedTime(transfer.start, transfer.end), "timing a transfer")
        except KVPagerError as error:  # the context is lost, and its events with it
            transfer.error = error
        else:
            transfer.seconds = milliseconds / 1e3
            flow = self._flows[transfer.direction]
            self._flows[transfer.direction] = flow.plus(transfer.nbytes, transfer.seconds, transfer.copies)
            self._events += [transfer.start, transfer.end]
        transfer.over = True
        return True


class _Memory(NamedTuple):
    """An allocation or registration."""

    reached: bool
    """Whether CUDA knows of it, so that the GPU reaches it."""
    on_device: bool
    stop: int
    """The address after its last byte, where that is known."""


class _Located(NamedTuple):
    """Where the blocks of one end of a batch lie."""

    group: npt.NDArray[np.int64]
    """int64 [n]: blocks of one number may be merged."""
    reached: npt.NDArray[np.bool_]
    """bool [n]: whether the GPU reaches the block."""
    on_device: bool


class _CudaTransfer:
    """A batch in a stream."""

    def __init__(
        self, mover: CudaMover, direction: Direction, nbytes: int, copies: int, start: Any, end: Any
    ) -> None:
        self.nbytes = nbytes
        self.seconds = 0.0
        self.error: Exception | None = None
        self.direction = direction
        self.copies = copies
        self.start = start
        self.end = end
        self.over = False
        self._mover = mover

    def done(self) -> bool:
        if not self.over:
            mover = self._mover
            with mover._lock, mover._entered():
                mover._settle(self, block=False)
        if self.error is not None:
            raise self.error
        return self.over

    def wait(self, timeout: float | None = None) -> bool:
        deadline = None if timeout is None else time.monotonic() + expect_seconds("timeout", timeout)
        # Not held up inside the driver: others submit and ask through the same mover meanwhile.
        while not self.done():
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True
