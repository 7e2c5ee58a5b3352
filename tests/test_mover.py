"""Movers: block copies on the CPU, and by a GPU where there is one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpager.tiers.arena import AddressArray, DeviceArena
from kvpager.tiers.driver import driver_answers
from kvpager.tiers.errors import ClosedError, ConfigError, KernelError
from kvpager.tiers.mover import KERNEL_BYTES, CudaMover, HostMover, Mover, is_over, merge_runs
from kvpager.tiers.pinned import PinnedArena

MIB = 1 << 20

needs_gpu = pytest.mark.skipif(not driver_answers(), reason="no CUDA driver answers cuInit(0)")


@pytest.fixture
def host() -> Iterator[HostMover]:
    mover = HostMover()
    yield mover
    mover.close()


@pytest.fixture
def memory() -> Iterator[np.ndarray]:
    """64 MiB of an arena, random in its first half and zero in the second."""
    with PinnedArena(64 * MIB) as arena:
        arena.wait_ready(timeout=30)
        data = np.frombuffer(arena.view(0, arena.capacity_bytes), np.uint8)
        data[: data.size // 2] = np.random.default_rng(3).integers(0, 256, data.size // 2, np.uint8)
        yield data


def scattered(memory: np.ndarray, nbytes: int, n: int, seed: int = 0) -> tuple[AddressArray, AddressArray]:
    """Addresses of ``n`` random blocks of the first half and ``n`` of the second."""
    half = memory.size // 2
    rng = np.random.default_rng(seed)
    places = rng.choice(half // nbytes, (2, n), replace=False) if 2 * n <= half // nbytes else None
    if places is None:
        places = np.stack([rng.permutation(half // nbytes)[:n] for _ in range(2)])
    base = memory.ctypes.data
    return base + places[0] * nbytes, base + half + places[1] * nbytes


def block(memory: np.ndarray, address: int, nbytes: int) -> np.ndarray:
    start = address - memory.ctypes.data
    return memory[start : start + nbytes]


def assert_moved(memory: np.ndarray, src: AddressArray, dst: AddressArray, nbytes: int) -> None:
    for start, to in zip(src.tolist(), dst.tolist(), strict=True):
        assert np.array_equal(block(memory, start, nbytes), block(memory, to, nbytes))


class Failing:
    """A transfer that came to a bad end, or that cannot say how it stands."""

    nbytes = 0
    seconds = 0.0

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def done(self) -> bool:
        raise self.error or KernelError("the driver does not answer")

    def wait(self, timeout: float | None = None) -> bool:
        return self.done()


def test_a_transfer_is_over_also_when_it_failed_but_not_when_asking_fails(memory: np.ndarray) -> None:
    mover = HostMover()
    src, dst = scattered(memory, 4096, 4)
    assert is_over(mover.copy(src, dst, 4096))
    mover.close()
    assert is_over(Failing(KernelError("a bad end")))
    with pytest.raises(KernelError, match="does not answer"):
        is_over(Failing(None))


class TestMergeRuns:
    def test_neighbours_at_both_ends_become_one_copy(self) -> None:
        src = np.array([0, 10, 20, 40, 50], np.int64)
        dst = np.array([100, 110, 120, 130, 200], np.int64)
        runs = merge_runs(src, dst, 10)
        assert runs.src.tolist() == [0, 40, 50]
        assert runs.dst.tolist() == [100, 130, 200]
        assert runs.nbytes.tolist() == [30, 10, 10]

    def test_the_order_of_naming_does_not_matter(self) -> None:
        src = np.array([20, 0, 10], np.int64)
        runs = merge_runs(src, src + 500, 10)
        assert (runs.src.tolist(), runs.dst.tolist(), runs.nbytes.tolist()) == ([0], [500], [30])
        assert runs.order.tolist() == [1, 2, 0]

    def test_groups_are_kept_apart(self) -> None:
        src = np.arange(4, dtype=np.int64) * 10
        runs = merge_runs(src, src + 100, 10, np.array([1, 1, 2, 2], np.int64))
        assert runs.src.tolist() == [0, 20]
        assert runs.first.tolist() == [0, 2]

    @settings(deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=40))
    def test_runs_cover_each_block_once(self, pairs: list[tuple[int, int]]) -> None:
        chosen = dict(reversed(pairs))
        src = np.array(list(chosen), np.int64) * 8
        dst = np.array(list(chosen.values()), np.int64) * 8
        runs = merge_runs(src, dst, 8)
        covered = {
            (start + at, to + at)
            for start, to, size in zip(*(column.tolist() for column in runs[:3]), strict=True)
            for at in range(0, size, 8)
        }
        assert covered == set(zip(src.tolist(), dst.tolist(), strict=True))
        assert int(runs.nbytes.sum()) == 8 * src.size
        assert sorted(runs.order.tolist()) == list(range(src.size))


class TestHostMover:
    @pytest.mark.parametrize(("nbytes", "n"), [(128, 1), (4096, 16), (1000, 7), (2 * MIB, 1), (2 * MIB, 8)])
    def test_scattered_blocks_arrive(self, host: HostMover, memory: np.ndarray, nbytes: int, n: int) -> None:
        src, dst = scattered(memory, nbytes, n)
        transfer = host.copy(src, dst, nbytes)
        assert transfer.wait()
        assert transfer.done()
        assert transfer.error is None
        assert transfer.nbytes == n * nbytes
        assert transfer.seconds > 0
        assert_moved(memory, src, dst, nbytes)

    def test_only_the_named_blocks_are_written(self, host: HostMover, memory: np.ndarray) -> None:
        src, dst = scattered(memory, 128 * 1024, 20)
        assert host.copy(src, dst, 128 * 1024).wait()
        written = np.zeros(memory.size, np.bool_)
        for address in dst.tolist():
            block(written, address - memory.ctypes.data + written.ctypes.data, 128 * 1024)[:] = True
        assert not memory[memory.size // 2 :][~written[memory.size // 2 :]].any()

    def test_long_runs_are_shared_by_threads(self, memory: np.ndarray) -> None:
        mover = HostMover(threads=3)
        src = memory.ctypes.data + np.arange(31, dtype=np.int64) * MIB
        dst = src + memory.size // 2
        assert mover.copy(src, dst, MIB).wait(timeout=30)
        assert_moved(memory, src, dst, MIB)
        assert mover.stats.copies == 1
        mover.close()

    def test_a_small_batch_is_over_at_once(self, host: HostMover, memory: np.ndarray) -> None:
        src, dst = scattered(memory, 4096, 64)
        transfer = host.copy(src, dst, 4096)
        assert transfer.done()
        assert transfer.wait(timeout=0)
        assert_moved(memory, src, dst, 4096)

    def test_a_batch_ends_without_anybody_waiting(self, host: HostMover, memory: np.ndarray) -> None:
        src, dst = scattered(memory, MIB, 16)
        transfer = host.copy(src, dst, MIB)
        pause = threading.Event()
        for _ in range(1000):
            if transfer.done():
                break
            pause.wait(0.01)
        assert transfer.done()
        assert_moved(memory, src, dst, MIB)

    def test_waiting_may_be_given_up(self, memory: np.ndarray) -> None:
        mover = HostMover()
        src, dst = scattered(memory, 2 * MIB, 16)
        transfers = [mover.copy(src, dst, 2 * MIB) for _ in range(4)]
        assert not transfers[-1].wait(timeout=0)
        assert all(transfer.wait() for transfer in transfers)
        mover.close()

    def test_several_threads_use_one_mover(self, memory: np.ndarray) -> None:
        mover = HostMover(threads=2)
        src, dst = scattered(memory, 256 * 1024, 64)

        def move(part: slice) -> None:
            assert mover.copy(src[part], dst[part], 256 * 1024).wait()

        threads = [threading.Thread(target=move, args=[slice(i, None, 4)]) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert_moved(memory, src, dst, 256 * 1024)
        assert mover.stats.bytes == 16 * MIB
        mover.close()

    def test_what_was_moved_is_counted(self, host: HostMover, memory: np.ndarray) -> None:
        src, dst = scattered(memory, MIB, 4)
        assert host.copy(src, dst, MIB).wait()
        host.copy_now(src[:1], dst[:1], MIB)
        stats = host.stats
        assert stats.bytes == stats.within.bytes == 5 * MIB
        assert stats.seconds > 0
        assert (stats.to_device.copies, stats.to_host.copies) == (0, 0)

    def test_nothing_is_a_batch(self, host: HostMover) -> None:
        nothing = np.empty(0, np.int64)
        assert host.copy(nothing, nothing, 4096).wait()
        assert host.stats.bytes == 0

    def test_closing_finishes_what_was_started(self, memory: np.ndarray) -> None:
        mover = HostMover()
        src, dst = scattered(memory, 2 * MIB, 16)
        transfer = mover.copy(src, dst, 2 * MIB)
        mover.close()
        mover.close()
        assert transfer.done()
        assert_moved(memory, src, dst, 2 * MIB)
        for n in (1, 16):
            with pytest.raises(ClosedError):
                mover.copy(src[:n], dst[:n], 2 * MIB)
            with pytest.raises(ClosedError):
                mover.copy_now(src[:n], dst[:n], 2 * MIB)

    @pytest.mark.parametrize("nbytes", [4096, MIB])
    def test_wrong_arguments_move_nothing(self, host: HostMover, memory: np.ndarray, nbytes: int) -> None:
        src, dst = scattered(memory, nbytes, 4)
        for arguments in (
            (src, dst[:3], nbytes),
            (src.reshape(2, 2), dst.reshape(2, 2), nbytes),
            (src.astype(np.float64), dst, nbytes),
            (src, dst, 0),
            (src, dst, -nbytes),
        ):
            with pytest.raises(KernelError):
                host.copy(*arguments)
        assert not memory[memory.size // 2 :].any()

    def test_a_mover_has_threads(self) -> None:
        with pytest.raises(ConfigError, match="threads"):
            HostMover(threads=0)

    def test_it_moves_between_arenas(self, host: HostMover) -> None:
        device = DeviceArena(64 * 1024, 32)
        slots = device.slots.allocate(8)
        device.slab[slots[:4].tolist()] = 9
        src, dst = device.addresses(slots[:4]), device.addresses(slots[4:])
        mover: Mover = host
        assert mover.copy(src, dst, 64 * 1024).wait()
        assert (device.slab[slots[4:].tolist()] == 9).all()
        device.close()


ADDRESSES = np.zeros(1, dtype=np.int64)


@pytest.mark.parametrize(
    ("src", "dst", "nbytes"),
    [
        (None, ADDRESSES, 8),
        (ADDRESSES, [0], 8),
        (ADDRESSES, ADDRESSES.astype(np.int32), 8),
        (ADDRESSES, np.zeros(2, np.int64), 8),
        *[(ADDRESSES, ADDRESSES, size) for size in (0, -8, None, "8", 8.0, True)],
    ],
)
def test_a_copy_of_what_are_no_addresses_is_refused(host: HostMover, src: Any, dst: Any, nbytes: Any) -> None:
    for copy in (host.copy, host.copy_now):
        with pytest.raises(KernelError, match=r"src and dst|nbytes"):
            copy(src, dst, nbytes)


@pytest.mark.skipif(driver_answers(), reason="a CUDA driver answers")
def test_a_cuda_mover_without_a_driver_says_so() -> None:
    with pytest.raises(ConfigError, match="device: no CUDA driver answers"):
        CudaMover("cuda:0")


def test_a_cuda_mover_is_for_cuda_devices() -> None:
    for device in ("cpu", "cuda:x", "cudas", "cuda:"):
        with pytest.raises(ConfigError, match="device"):
            CudaMover(device)


class Ends:
    """A device arena and a page-locked host arena of the same blocks, with a mover between them."""

    def __init__(self, nbytes: int, n: int, copy_kernel: Any = None, **pinned: Any) -> None:
        import torch

        self.nbytes = nbytes
        self.mover = CudaMover("cuda:0", copy_kernel)
        self.device = DeviceArena(nbytes, n, "cuda:0")
        extent = max(4 * MIB, nbytes)  # a block lies inside one extent
        self.arena = PinnedArena(
            max(n * nbytes, 8 * MIB), **{"device": "cuda:0", "extent_bytes": extent, **pinned}
        )
        self.arena.wait_ready(timeout=60)
        self.host = torch.from_numpy(
            np.frombuffer(self.arena.view(0, n * nbytes), np.uint8).reshape(n, nbytes)
        )
        self.slots = np.arange(n, dtype=np.int32)

    def host_addresses(self, slots: np.ndarray) -> AddressArray:
        addresses: AddressArray = self.arena.base + slots.astype(np.int64) * self.nbytes
        return addresses

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *_: object) -> None:
        import torch

        torch.cuda.synchronize()
        self.mover.close()
        self.arena.close()
        self.device.close()


@pytest.mark.gpu
@needs_gpu
class TestCudaMover:
    @pytest.mark.parametrize(("nbytes", "n"), [(4096, 64), (256 * 1024, 64), (2 * MIB, 16), (32 * MIB, 4)])
    @pytest.mark.parametrize("page_lock", [True, False], ids=["page-locked", "pageable"])
    def test_blocks_go_there_and_back(self, nbytes: int, n: int, page_lock: bool) -> None:
        torch = pytest.importorskip("torch")
        with Ends(nbytes, n, page_lock=page_lock) as ends:
            ends.host.random_(0, 256)
            wanted = ends.host.clone()
            order = np.random.default_rng(n).permutation(n).astype(np.int32)
            up = ends.mover.copy(ends.host_addresses(ends.slots), ends.device.addresses(order), nbytes)
            assert up.wait(timeout=30)
            assert torch.equal(ends.device.slab[order.tolist()].cpu(), wanted)
            ends.host.zero_()
            down = ends.mover.copy(ends.device.addresses(order), ends.host_addresses(ends.slots), nbytes)
            assert down.wait()
            assert down.done()
            assert down.error is None
            assert torch.equal(ends.host, wanted)
            stats = ends.mover.stats
            assert stats.to_device.bytes == stats.to_host.bytes == n * nbytes
            assert stats.to_device.seconds > 0
            assert down.seconds > 0

    def test_a_copy_waits_for_the_step_that_writes_its_blocks(self) -> None:
        torch = pytest.importorskip("torch")
        with Ends(2 * MIB, 8) as ends:
            for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
                with torch.cuda.stream(stream):
                    ends.device.slab.zero_()
                    torch.cuda._sleep(50_000_000)
                    ends.device.slab.fill_(5)
                    transfer = ends.mover.copy(
                        ends.device.addresses(ends.slots), ends.host_addresses(ends.slots), ends.nbytes
                    )
                    assert not transfer.done()
                    assert not transfer.wait(timeout=0.001)
                assert transfer.wait()
                assert (ends.host == 5).all()
                ends.host.zero_()

    def test_runs_do_not_cross_registrations(self) -> None:
        torch = pytest.importorskip("torch")
        with Ends(MIB, 32, extent_bytes=4 * MIB) as ends:
            ends.host.random_(0, 256)
            addresses = ends.host_addresses(ends.slots)
            assert ends.mover.copy(addresses, ends.device.addresses(ends.slots), MIB).wait()
            assert torch.equal(ends.device.slab.cpu(), ends.host)
            assert ends.mover.stats.to_device.copies == 8

    def test_a_block_across_two_registrations_is_refused(self) -> None:
        pytest.importorskip("torch")
        with Ends(MIB, 32, extent_bytes=4 * MIB) as ends:
            astride = np.array([ends.arena.base + 4 * MIB - 4096], np.int64)
            with pytest.raises(KernelError, match="lies across two registrations"):
                ends.mover.copy(astride, ends.device.addresses(ends.slots[:1]), MIB)

    def test_a_batch_with_mixed_ends_is_refused(self) -> None:
        pytest.importorskip("torch")
        with Ends(MIB, 32) as ends:
            mixed = np.array([ends.arena.base, ends.device.addresses(ends.slots[5:6])[0]], np.int64)
            with pytest.raises(KernelError, match="partly in device and partly in host"):
                ends.mover.copy(mixed, ends.device.addresses(ends.slots[:2]), MIB)

    def test_blocks_are_copied_within_the_device(self) -> None:
        torch = pytest.importorskip("torch")
        with Ends(MIB, 8) as ends:
            ends.device.slab.random_(0, 256)
            src, dst = ends.device.addresses(ends.slots[:4]), ends.device.addresses(ends.slots[4:])
            assert ends.mover.copy(src, dst, MIB).wait()
            assert torch.equal(ends.device.slab[:4], ends.device.slab[4:])
            assert ends.mover.stats.within.bytes == 4 * MIB

    def test_short_runs_go_to_the_copy_kernel_and_long_ones_to_dma(self) -> None:
        torch = pytest.importorskip("torch")
        launched: list[tuple[AddressArray, AddressArray, int]] = []
        nbytes = 64 * 1024
        long = KERNEL_BYTES // nbytes

        def copy_kernel(src: AddressArray, dst: AddressArray, nbytes: int, stream: int) -> None:
            launched.append((src, dst, nbytes))
            with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
                for start, to in zip(src.tolist(), dst.tolist(), strict=True):
                    row = (start - ends.arena.base) // nbytes
                    ends.device.slab[(to - ends.device.base) // nbytes].copy_(
                        ends.host[row], non_blocking=True
                    )

        with Ends(nbytes, 2 * long + 8, copy_kernel) as ends:
            ends.host.random_(0, 256)
            short = np.array([0, 2, 4], np.int32)
            slots = np.concatenate([short, np.arange(8, 8 + long, dtype=np.int32)])
            transfer = ends.mover.copy(ends.host_addresses(slots), ends.device.addresses(slots), nbytes)
            assert transfer.wait()
            assert torch.equal(ends.device.slab[slots.tolist()].cpu(), ends.host[slots.tolist()])
            ((src, dst, size),) = launched
            assert src.tolist() == ends.host_addresses(short).tolist()
            assert dst.tolist() == ends.device.addresses(short).tolist()
            assert size == nbytes

    def test_a_copy_kernel_that_fails_is_heard_and_leaves_the_mover_working(self) -> None:
        pytest.importorskip("torch")

        def broken(src: AddressArray, dst: AddressArray, nbytes: int, stream: int) -> None:
            raise KernelError("no such kernel")

        with Ends(4096, 64, broken) as ends:
            with pytest.raises(KernelError, match="no such kernel"):
                ends.mover.copy(
                    ends.host_addresses(ends.slots[:1]), ends.device.addresses(ends.slots[:1]), 4096
                )
            large = np.array([ends.arena.base], np.int64)
            other = DeviceArena(4 * MIB, 1, "cuda:0")
            assert ends.mover.copy(large, other.addresses(ends.slots[:1]), 4 * MIB).wait()

    def test_closing_finishes_what_was_started(self) -> None:
        torch = pytest.importorskip("torch")
        with Ends(2 * MIB, 16) as ends:
            ends.host.random_(0, 256)
            transfer = ends.mover.copy(
                ends.host_addresses(ends.slots), ends.device.addresses(ends.slots), ends.nbytes
            )
            ends.mover.close()
            ends.mover.close()
            assert transfer.done()
            assert torch.equal(ends.device.slab.cpu(), ends.host)
            with pytest.raises(ClosedError):
                ends.mover.copy(
                    ends.host_addresses(ends.slots), ends.device.addresses(ends.slots), ends.nbytes
                )
