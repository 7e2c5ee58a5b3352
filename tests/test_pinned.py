"""The pinned arena, and how much memory there is."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from kvpager.kvstore.host import HostStore
from kvpager.tiers import pinned
from kvpager.tiers.driver import driver_answers
from kvpager.tiers.errors import ClosedError, ConfigError, IntegrityError, MemoryUnavailableError
from kvpager.tiers.memory import format_bytes, memory_headroom
from kvpager.tiers.mover import CudaMover
from kvpager.tiers.pinned import PinnedArena

MIB = 1 << 20

needs_gpu = pytest.mark.skipif(not driver_answers(), reason="no CUDA driver answers cuInit(0)")


def in_a_process(program: str) -> str:
    """Output of ``program`` run by a Python of its own; fails with its errors if it does not end well."""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


class TestGrowth:
    @pytest.mark.parametrize(
        ("capacity", "extent"),
        [
            (4096, 4096),
            (3 * MIB, 2 * MIB),
            (16 * MIB, 4 * MIB),
            (100 * MIB, 4 * MIB),
            (1024 * MIB, 64 * MIB),
        ],
    )
    def test_extents_are_powers_of_two_that_suit_the_capacity(self, capacity: int, extent: int) -> None:
        with PinnedArena(capacity) as arena:
            assert arena.extent_bytes == extent
            assert arena.num_extents == capacity // extent
            assert arena.capacity_bytes == arena.num_extents * extent

    def test_every_extent_comes_to_life_in_the_background(self) -> None:
        with PinnedArena(32 * MIB) as arena:
            assert arena.base % (2 * MIB) == 0
            assert arena.wait_ready(1, timeout=10)
            assert arena.wait_ready(timeout=10)
            assert arena.ready_extents == arena.num_extents == 8
            stats = arena.stats()
            assert (stats.capacity_bytes, stats.ready_bytes) == (32 * MIB, 32 * MIB)
            assert (stats.page_locked_bytes, stats.taken_bytes) == (0, 0)
            arena.check_integrity()

    def test_the_memory_is_there_before_it_is_handed_out(self) -> None:
        with PinnedArena(16 * MIB) as arena:
            extent = arena.take_extent(timeout=10)
            assert extent is not None
            assert os.fstat(arena.fd).st_blocks * 512 >= arena.extent_bytes

    def test_without_a_device_nothing_is_page_locked(self) -> None:
        with PinnedArena(8 * MIB, device="cpu") as arena:
            arena.wait_ready(timeout=10)
            assert not arena.is_page_locked(np.arange(2)).any()
            assert arena.device_delta == 0

    @pytest.mark.skipif(driver_answers(), reason="a CUDA driver answers")
    def test_where_no_driver_answers_a_device_is_refused_by_all_who_are_given_one(self) -> None:
        for make in (
            lambda: PinnedArena(16 * MIB, device="cuda:0"),
            lambda: HostStore(16 * MIB, device="cuda:0"),
            lambda: HostStore(16 * MIB, device="cuda"),
            CudaMover,
        ):
            with pytest.raises(ConfigError, match=r"^device: no CUDA driver answers on this machine$"):
                make().close()
        # Nothing is wanted of it.
        with PinnedArena(MIB, device="cuda:0", page_lock=False) as arena:
            assert arena.wait_ready(timeout=10)

    @pytest.mark.gpu
    def test_a_gpu_that_is_not_there_is_refused(self) -> None:
        for make in (
            lambda: PinnedArena(16 * MIB, device="cuda:77"),
            lambda: HostStore(16 * MIB, device="cuda:77"),
            lambda: CudaMover("cuda:77"),
        ):
            with pytest.raises(ConfigError, match=r"^device: there is no cuda:77: this machine has \d+ CUDA"):
                make().close()


class TestExtents:
    @pytest.mark.parametrize("nbytes", [1, 4096, 4097, MIB, 4 * MIB, 4 * MIB + 1, 9 * MIB, 256 * MIB])
    def test_the_capacity_told_for_an_extent_is_the_least_that_makes_one(self, nbytes: int) -> None:
        capacity = pinned.capacity_for(nbytes)
        assert pinned._extent_bytes(capacity, None) >= nbytes
        if capacity > 4096:
            assert pinned._extent_bytes(capacity - 1, None) < nbytes

    def test_an_extent_has_one_owner(self) -> None:
        with PinnedArena(16 * MIB) as arena:
            arena.wait_ready(timeout=10)
            assert [arena.take_extent() for _ in range(5)] == [0, 1, 2, 3, None]
            arena.give_extent(2)
            assert arena.stats().taken_bytes == 12 * MIB
            assert arena.take_extent() == 2
            arena.check_integrity()

    def test_only_a_taken_extent_is_given_back(self) -> None:
        with PinnedArena(8 * MIB) as arena:
            arena.wait_ready(timeout=10)
            with pytest.raises(IntegrityError, match="nobody had taken it"):
                arena.give_extent(0)
            for extent in (-1, 2):
                with pytest.raises(ConfigError, match="extent"):
                    arena.give_extent(extent)

    def test_taking_waits_for_one_that_is_given_back(self) -> None:
        with PinnedArena(4 * MIB) as arena:
            assert arena.take_extent(timeout=10) == 0
            assert arena.take_extent(timeout=0.01) is None
            timer = threading.Timer(0.05, arena.give_extent, [0])
            timer.start()
            assert arena.take_extent(timeout=10) == 0
            timer.join()

    def test_views_write_into_the_arena(self) -> None:
        with PinnedArena(8 * MIB) as arena:
            arena.wait_ready(timeout=10)
            arena.extent_view(1)[:5] = b"block"
            assert bytes(arena.view(arena.extent_bytes, 5)) == b"block"
            assert ctypes.string_at(arena.base + arena.extent_bytes, 5) == b"block"
            assert arena.extent_view(0).nbytes == arena.extent_bytes

    def test_another_mapping_of_the_descriptor_sees_the_same_bytes(self) -> None:
        with PinnedArena(8 * MIB) as arena:
            arena.wait_ready(timeout=10)
            with mmap.mmap(arena.fd, arena.capacity_bytes) as other:
                other[100:106] = b"shared"
            assert bytes(arena.view(100, 6)) == b"shared"

    @pytest.mark.parametrize(("offset", "nbytes"), [(-1, 4), (0, 8 * MIB + 1), (8 * MIB, 1), (0, -1)])
    def test_views_stay_inside(self, offset: int, nbytes: int) -> None:
        with PinnedArena(8 * MIB) as arena, pytest.raises(ConfigError, match=r"offset|nbytes"):
            arena.view(offset, nbytes)

    def test_there_are_no_other_extents(self) -> None:
        with PinnedArena(8 * MIB) as arena:
            for extent in (-1, 2):
                with pytest.raises(ConfigError, match=r"extent: must be an integer of at (least 0|most 1)"):
                    arena.extent_view(extent)
            with pytest.raises(ConfigError, match="n: must be an integer of at most 2"):
                arena.wait_ready(3)


class TestClosing:
    def test_a_view_outlives_the_arena(self) -> None:
        arena = PinnedArena(8 * MIB)
        arena.wait_ready(timeout=10)
        block = np.frombuffer(arena.view(4096, 4096), np.uint8)
        block[:] = 7
        base = arena.base
        arena.close()
        assert is_mapped(base)
        assert (block == 7).all()
        del block
        gc.collect()
        assert not is_mapped(base)

    def test_a_closed_arena_refuses_everything(self) -> None:
        arena = PinnedArena(8 * MIB)
        arena.close()
        arena.close()
        for call in (
            arena.take_extent,
            lambda: arena.give_extent(0),
            lambda: arena.view(0, 1),
            lambda: arena.extent_view(0),
            arena.wait_ready,
            arena.check_integrity,
            lambda: arena.fd,
        ):
            with pytest.raises(ClosedError, match="pinned arena was closed"):
                call()

    def test_closing_ends_whoever_waits(self) -> None:
        arena = PinnedArena(4 * MIB)
        arena.take_extent(timeout=10)
        ends: list[BaseException] = []

        def wait() -> None:
            try:
                arena.take_extent(timeout=30)
            except ClosedError as error:
                ends.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        arena.close()
        waiter.join(10)
        assert len(ends) == 1

    def test_closing_does_not_wait_for_the_rest_to_grow(self) -> None:
        descriptors = len(os.listdir("/proc/self/fd"))
        for _ in range(10):
            PinnedArena(256 * MIB).close()
        assert len(os.listdir("/proc/self/fd")) == descriptors

    def test_a_process_that_forgets_to_close_ends_well(self) -> None:
        assert (
            in_a_process(
                "from kvpager.tiers.pinned import PinnedArena\n"
                "arena = PinnedArena(1 << 28)\n"
                "print(arena.take_extent(timeout=10))"
            )
            == "0\n"
        )


class TestNamedArena:
    def test_its_bytes_outlive_its_owner(self, tmp_path: Path) -> None:
        path = tmp_path / "arena"
        with PinnedArena(8 * MIB, name=path) as arena:
            arena.wait_ready(timeout=10)
            arena.view(5 * MIB, 4)[:] = b"kept"
        with PinnedArena(8 * MIB, name=path) as arena:
            assert arena.wait_ready(timeout=10)
            assert bytes(arena.view(5 * MIB, 4)) == b"kept"

    def test_it_has_one_owner(self, tmp_path: Path) -> None:
        with (
            PinnedArena(8 * MIB, name=tmp_path / "arena"),
            pytest.raises(ConfigError, match=r"name: .* is another process's arena"),
        ):
            PinnedArena(8 * MIB, name=tmp_path / "arena")

    def test_it_is_never_cut_or_grown(self, tmp_path: Path) -> None:
        path = tmp_path / "arena"
        PinnedArena(8 * MIB, name=path).close()
        for capacity in (4 * MIB, 16 * MIB):
            with pytest.raises(ConfigError, match=f"host_bytes: .* {8 * MIB} bytes, not of {capacity}"):
                PinnedArena(capacity, name=path)
        assert path.stat().st_size == 8 * MIB

    def test_a_place_that_cannot_be_opened_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"name: .*/absent/arena cannot be opened"):
            PinnedArena(8 * MIB, name=tmp_path / "absent" / "arena")


class TestWantOfMemory:
    def test_an_arena_larger_than_memory_is_refused_with_what_there_is(self) -> None:
        descriptors = len(os.listdir("/proc/self/fd"))
        with pytest.raises(
            MemoryUnavailableError, match=r"host_bytes: an arena of 64\.0 TiB .* but only .*iB is"
        ):
            PinnedArena(64 << 40)
        assert len(os.listdir("/proc/self/fd")) == descriptors

    def test_an_arena_larger_than_its_file_system_is_refused(self) -> None:
        room = os.statvfs("/dev/shm")
        path = Path("/dev/shm") / f"kvpager-test-{os.getpid()}"
        try:
            with pytest.raises(MemoryUnavailableError, match="host_bytes"):
                PinnedArena(room.f_bavail * room.f_frsize + (1 << 30), name=path)
        finally:
            path.unlink(missing_ok=True)

    def test_a_limit_on_address_space_is_an_error(self) -> None:
        assert "host_bytes" in in_a_process(
            "import resource\n"
            "from kvpager.tiers.errors import MemoryUnavailableError\n"
            "from kvpager.tiers.pinned import PinnedArena\n"
            "resource.setrlimit(resource.RLIMIT_AS, (600 << 20, 600 << 20))\n"
            "try:\n"
            "    PinnedArena(1 << 30)\n"
            "except MemoryUnavailableError as error:\n"
            "    print(error)"
        )

    def test_a_limit_on_file_size_is_an_error(self) -> None:
        assert "files of that size are not allowed" in in_a_process(
            "import resource\n"
            "from kvpager.tiers.errors import MemoryUnavailableError\n"
            "from kvpager.tiers.pinned import PinnedArena\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
            "try:\n"
            "    PinnedArena(1 << 23)\n"
            "except MemoryUnavailableError as error:\n"
            "    print(error)"
        )

    def test_growth_pauses_where_memory_runs_out_and_says_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def have(mib: int) -> None:
            written = tmp_path / "written"
            written.write_text(f"MemTotal: {16000 * 1024} kB\nMemAvailable: {mib * 1024} kB\n")
            written.rename(tmp_path / "meminfo")

        class TakenByOthers(PinnedArena):
            def _grow(self, ordinal: int | None) -> None:
                have(502)  # of which 500 are left to others
                super()._grow(ordinal)

        monkeypatch.setattr(pinned, "memory_headroom", lambda: memory_headroom(tmp_path))
        have(600)
        with TakenByOthers(8 * MIB) as arena:
            with pytest.raises(MemoryUnavailableError) as raised:
                arena.wait_ready(timeout=20)
            assert str(raised.value) == (
                "host_bytes: the arena stays at 0 B of 8.0 MiB for now: the next extent needs 4.0 MiB, "
                "and only 2.0 MiB is memory available on this machine"
            )
            assert arena.shortage == str(raised.value)
            assert arena.take_extent() is None
            arena.check_integrity()
            have(600)
            assert arena.take_extent(timeout=20) == 0
            assert arena.wait_ready(timeout=20)
            assert not arena.shortage
        assert [record.message for record in caplog.records] == [str(raised.value)]

    @pytest.mark.parametrize(
        ("arguments", "setting"),
        [
            ({"capacity_bytes": 0}, "host_bytes"),
            ({"capacity_bytes": -4096}, "host_bytes"),
            ({"capacity_bytes": MIB, "extent_bytes": 1000}, "extent_bytes"),
            ({"capacity_bytes": MIB, "extent_bytes": 2 * MIB}, "extent_bytes"),
            ({"capacity_bytes": MIB, "device": "gpu"}, "device"),
        ],
    )
    def test_wrong_settings_are_named(self, arguments: dict[str, int], setting: str) -> None:
        with pytest.raises(ConfigError, match=setting):
            PinnedArena(**arguments)  # type: ignore[arg-type]


class TestHeadroom:
    """Against trees that are written as the kernel writes them."""

    @staticmethod
    def machine(root: Path, cgroup_line: str, available_mib: int = 8000) -> tuple[Path, Path]:
        proc, cgroup = root / "proc", root / "cgroup"
        (proc / "self").mkdir(parents=True)
        cgroup.mkdir()
        (proc / "meminfo").write_text(
            f"MemTotal:       {16000 * 1024} kB\nMemAvailable:   {available_mib * 1024} kB\n"
        )
        (proc / "self" / "cgroup").write_text(cgroup_line)
        return proc, cgroup

    @staticmethod
    def version_2(group: Path, limit: str, used_mib: int, cache_mib: int = 0) -> None:
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used_mib * MIB}\n")
        (group / "memory.stat").write_text(f"anon 1\ninactive_file {cache_mib * MIB}\n")

    def test_this_machine_has_some(self) -> None:
        headroom = memory_headroom()
        assert 0 < headroom.usable_bytes < headroom.free_bytes

    def test_without_limits_the_machine_binds(self, tmp_path: Path) -> None:
        headroom = memory_headroom(*self.machine(tmp_path, "0::/\n"))
        assert headroom.free_bytes == 8000 * MIB
        assert headroom.reserve_bytes == 500 * MIB
        assert headroom.limit == "memory available on this machine"

    def test_the_tightest_group_above_binds(self, tmp_path: Path) -> None:
        proc, cgroup = self.machine(tmp_path, "0::/pod/engine\n")
        self.version_2(cgroup / "pod" / "engine", "max", 100)
        self.version_2(cgroup / "pod", str(1000 * MIB), 700, cache_mib=50)
        headroom = memory_headroom(proc, cgroup)
        assert headroom.free_bytes == 350 * MIB
        assert headroom.usable_bytes == 350 * MIB - 1000 * MIB // 32
        assert headroom.limit.endswith("control group " + str(cgroup / "pod"))

    def test_a_container_finds_its_group_at_the_root(self, tmp_path: Path) -> None:
        proc, cgroup = self.machine(tmp_path, "0::/docker/0123\n")
        self.version_2(cgroup, str(512 * MIB), 600)
        assert memory_headroom(proc, cgroup).usable_bytes == 0

    def test_version_1_limits_count_too(self, tmp_path: Path) -> None:
        proc, cgroup = self.machine(tmp_path, "5:cpu:/\n4:memory:/docker/0123\n")
        group = cgroup / "memory" / "docker" / "0123"
        group.mkdir(parents=True)
        for where, limit in ((group, 1000 * MIB), (cgroup / "memory", 9223372036854771712)):
            (where / "memory.limit_in_bytes").write_text(f"{limit}\n")
            (where / "memory.usage_in_bytes").write_text(f"{400 * MIB}\n")
            (where / "memory.stat").write_text(f"inactive_file 5\ntotal_inactive_file {100 * MIB}\n")
        assert memory_headroom(proc, cgroup).free_bytes == 700 * MIB

    def test_sizes_are_written_in_binary_units(self) -> None:
        sizes = (512, 4096, 3 * MIB // 2, 5 << 30, 64 << 40)
        assert [format_bytes(size) for size in sizes] == [
            "512 B",
            "4.0 KiB",
            "1.5 MiB",
            "5.0 GiB",
            "64.0 TiB",
        ]


@pytest.mark.gpu
@needs_gpu
class TestPageLocking:
    def test_extents_are_page_locked_and_mapped(self) -> None:
        with PinnedArena(256 * MIB, device="cuda:0") as arena:
            assert arena.wait_ready(timeout=60)
            assert arena.is_page_locked(np.arange(arena.num_extents)).all()
            assert arena.stats().page_locked_bytes == arena.capacity_bytes
            assert arena.device_delta == 0
            arena.check_integrity()

    def test_the_first_extent_is_there_while_others_are_being_page_locked(self) -> None:
        with PinnedArena(8 << 30, device="cuda:0") as arena:
            assert arena.take_extent(timeout=5) is not None
            assert arena.stats().page_locked_bytes < arena.capacity_bytes

    def test_page_locked_extents_are_taken_first(self) -> None:
        with PinnedArena(1 << 30, device="cuda:0") as arena:
            arena.wait_ready(timeout=60)
            extent = arena.take_extent()
            assert extent is not None
            assert arena.is_page_locked(np.array([extent])).all()

    def test_page_locking_can_be_refused(self) -> None:
        with PinnedArena(64 * MIB, device="cuda:0", page_lock=False) as arena:
            arena.wait_ready(timeout=60)
            assert arena.stats().page_locked_bytes == 0

    def test_a_kernel_reads_and_writes_it_in_place(self) -> None:
        cupy = pytest.importorskip("cupy")
        with PinnedArena(64 * MIB, device="cuda:0") as arena:
            arena.wait_ready(timeout=60)
            host = np.frombuffer(arena.view(0, arena.capacity_bytes), np.uint32)
            host[:] = np.random.default_rng(1).integers(0, 2**32, host.size, np.uint32)
            expected = host * np.uint32(3)
            memory = cupy.cuda.UnownedMemory(arena.base + arena.device_delta, arena.capacity_bytes, arena, 0)
            mapped = cupy.ndarray(host.shape, cupy.uint32, cupy.cuda.MemoryPointer(memory, 0))
            cupy.ElementwiseKernel("", "uint32 x", "x = x * 3u", "triple")(mapped)
            cupy.cuda.runtime.deviceSynchronize()
            assert np.array_equal(host, expected)

    def test_closing_takes_the_registrations_back(self) -> None:
        from kvpager.tiers.driver import check, cuda_driver

        arena = PinnedArena(64 * MIB, device="cuda:0")
        arena.wait_ready(timeout=60)
        view = arena.view(0, 64 * MIB)
        base = arena.base
        arena.close()
        driver = cuda_driver()
        attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        (memory_type,) = check(driver.cuPointerGetAttributes(1, [attribute], base))
        assert int(memory_type) == 0
        view.release()


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            return "kvpager-arena" in line
    return False
