"""``kvpager doctor``: each check by itself on made-up roots, real files and real servers; and the command."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvpager
import pytest
from kvpager.api.cli import main
from kvpager.api.doctor_arenas import check_arenas, held_by_arenas
from kvpager.api.doctor_cold import check_cold
from kvpager.api.doctor_gpu import check_driver, check_gpu, check_numa
from kvpager.api.doctor_memory import check_huge_pages, check_memory, check_page_lock, check_shared_memory
from kvpager.api.doctor_sidecar import check_sidecar
from kvpager.api.doctor_software import check_extra, check_packages, check_python, requirements
from kvpager.api.findings import Finding, Level
from kvpager.kvstore.host import HostStore
from kvpager.tests.certificates import Authority, Certificate
from kvpager.tests.redis_servers import RedisServer, free_port
from kvpager.tests.serve_process import ServeProcess
from kvpager.tiers.arena_file import ArenaFile
from kvpager.tiers.driver import DriverDevice, driver_answers, driver_devices, why_no_driver

MIB = 1 << 20
GIB = 1 << 30
GPU = DriverDevice("NVIDIA H200", "0000:17:00.0")
TOKEN = "a-token-of-the-right-length"


def write(root: Path, **files: str) -> None:
    """Files under a folder; ``__`` in a name is a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def pci(root: Path, address: str, **files: str) -> None:
    """A device on a made-up PCI bus."""
    write(root / "bus" / "pci" / "devices" / address, **files)


def machine(root: Path, free: int, group: str = "0::/") -> Path:
    """A made-up procfs."""
    meminfo = f"MemTotal: {64 * GIB >> 10} kB\nMemAvailable: {free >> 10} kB"
    write(root, meminfo=meminfo, self__cgroup=group)
    return root


def mounts(root: Path, folder: Path, kind: str = "tmpfs", options: str = "rw,size=64m") -> Path:
    """A made-up procfs that says what a folder is mounted as."""
    lines = (
        "1 0 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw",
        f"2 1 0:5 / {folder} rw - {kind} x {options}",
    )
    write(root, self__mountinfo="\n".join(lines))
    return root


class TestSoftware:
    def test_python_and_kvpager_are_told(self) -> None:
        finding = check_python()
        assert kvpager.__version__ in finding.found
        assert sys.executable in finding.found

    def test_what_the_package_needs_is_installed_here(self) -> None:
        assert any(one.startswith("numpy") for one in requirements())
        finding = check_packages(requirements())
        assert finding.level is Level.OK
        for name in ("numpy", "msgpack", "redis", "xxhash"):
            assert f"{name} " in finding.found

    def test_a_package_that_is_absent_or_too_old_is_a_problem(self) -> None:
        finding = check_packages(["numpy>=1.26", "numpy>=999", "no-such-package-here>=2", "redis<2,>=1"])
        assert finding.level is Level.PROBLEM
        assert "numpy>=1.26" not in finding.found
        for said in ("numpy>=999 (there is ", "no-such-package-here>=2", "redis<2,>=1 (there is "):
            assert said in finding.found
        assert "pip install" in finding.advice

    def test_bounds_are_compared_by_number_and_not_by_text(self) -> None:
        assert check_packages(["numpy>=1.9", "numpy>=0.100.1", "numpy<100"]).level is Level.OK

    def test_a_kvpager_that_is_not_installed_is_told(self) -> None:
        assert check_packages([]).level is Level.WARNING

    def test_an_extra_is_a_matter_of_what_is_there(self) -> None:
        required = ['no-such-package-here>=1; extra == "cuda"', "numpy>=1", 'numpy>=1; extra == "seal"']
        assert check_extra(required, "seal", "sealing", wanted=True).level is Level.OK
        finding = check_extra(required, "cuda", "GPUs")
        assert (finding.level, "no-such-package-here" in finding.found) == (Level.OK, True)
        finding = check_extra(required, "cuda", "GPUs", wanted=True)
        assert finding.level is Level.WARNING
        assert "pip install '.[cuda]'" in finding.advice


class TestMemory:
    def test_what_is_to_be_given_must_be_there(self, tmp_path: Path) -> None:
        proc = machine(tmp_path / "proc", 10 * GIB)
        finding = check_memory(4 * GIB, proc=proc, cgroup=tmp_path)
        assert finding.level is Level.OK
        assert "an arena may take 9.0 GiB" in finding.found
        assert "no control group limits it" in finding.found
        finding = check_memory(12 * GIB, proc=proc, cgroup=tmp_path)
        assert finding.level is Level.PROBLEM
        assert "12.0 GiB is to be given" in finding.found
        assert check_memory(12 * GIB, held_bytes=4 * GIB, proc=proc, cgroup=tmp_path).level is Level.OK

    @pytest.mark.parametrize("version", [1, 2])
    def test_a_control_group_of_either_version_binds(self, tmp_path: Path, version: int) -> None:
        group = "4:memory:/box" if version == 1 else "0::/box"
        proc = machine(tmp_path / "proc", 10 * GIB, group)
        root = tmp_path / "cgroup"
        if version == 1:
            files = {"memory.limit_in_bytes": GIB, "memory.usage_in_bytes": GIB // 4}
            folder = root / "memory" / "box"
        else:
            files = {"memory.max": GIB, "memory.current": GIB // 4}
            folder = root / "box"
        folder.mkdir(parents=True)
        for name, value in files.items():
            (folder / name).write_text(f"{value}\n")
        (folder / "memory.stat").write_text("")
        assert check_memory(GIB // 2, proc=proc, cgroup=root).level is Level.OK
        finding = check_memory(GIB, proc=proc, cgroup=root)
        assert finding.level is Level.PROBLEM
        assert f"768.0 MiB left under the memory limit of control group {folder}" in finding.found
        assert "10.0 GiB memory available on this machine" in finding.found

    def test_the_arenas_folder_must_have_room(self, tmp_path: Path) -> None:
        proc = mounts(tmp_path / "proc", tmp_path)
        finding = check_shared_memory(MIB, folder=tmp_path, proc=proc)
        assert finding.level is Level.OK
        assert finding.found.startswith("tmpfs of ")
        finding = check_shared_memory(1 << 60, folder=tmp_path, proc=proc)
        assert finding.level is Level.PROBLEM
        assert "--shm-size" in finding.advice
        # What an arena has already need not be free.
        finding = check_shared_memory(1 << 60, held_bytes=1 << 60, folder=tmp_path, proc=proc)
        assert finding.level is Level.OK

    def test_an_arenas_folder_on_a_disk_is_told(self, tmp_path: Path) -> None:
        proc = mounts(tmp_path / "proc", tmp_path, kind="xfs")
        finding = check_shared_memory(MIB, folder=tmp_path, proc=proc)
        assert finding.level is Level.WARNING
        assert finding.found.startswith("xfs of ")
        finding = check_shared_memory(1 << 60, folder=tmp_path, proc=proc)
        assert finding.level is Level.PROBLEM
        assert "free some" in finding.advice
        assert "remount" not in finding.advice

    def test_an_arenas_folder_on_a_disk_has_no_option_for_huge_pages(self, tmp_path: Path) -> None:
        proc = mounts(tmp_path / "proc", tmp_path, kind="ext4")
        write(tmp_path / "sys", kernel__mm__transparent_hugepage__shmem_enabled="always [advise] never")
        finding = check_huge_pages(folder=tmp_path, sys=tmp_path / "sys", proc=proc)
        assert (finding.level, finding.advice) == (Level.OK, "")
        assert f"{tmp_path} is on ext4" in finding.found

    def test_an_arenas_folder_that_is_not_there_is_a_problem(self, tmp_path: Path) -> None:
        finding = check_shared_memory(MIB, folder=tmp_path / "none", proc=tmp_path)
        assert (finding.level, finding.found) == (Level.PROBLEM, "is not there")
        assert "remount" not in finding.advice
        finding = check_huge_pages(folder=tmp_path / "none")
        assert "is no folder" in finding.found
        assert "remount" not in finding.advice

    @pytest.mark.parametrize(
        ("options", "setting", "level"),
        [
            ("rw,huge=advise", "always within_size advise [never] deny force", Level.OK),
            ("rw", "always within_size advise never deny [force]", Level.OK),
            ("rw", "always within_size [advise] never deny force", Level.WARNING),
            ("rw,huge=always", "always within_size advise never [deny] force", Level.WARNING),
        ],
    )
    def test_huge_pages_go_by_the_mount_unless_the_kernel_overrules_it(
        self, tmp_path: Path, options: str, setting: str, level: Level
    ) -> None:
        proc = mounts(tmp_path / "proc", tmp_path, options=options)
        write(tmp_path / "sys", kernel__mm__transparent_hugepage__shmem_enabled=setting)
        finding = check_huge_pages(folder=tmp_path, sys=tmp_path / "sys", proc=proc)
        assert finding.level is level
        assert (f"remount,huge=advise {tmp_path}" in finding.advice) == (level is Level.WARNING)
        assert ("echo advise" in finding.advice) == ("[deny]" in setting)

    def test_a_kernel_without_huge_pages_for_shared_memory_is_told(self, tmp_path: Path) -> None:
        assert "does not tell" in check_huge_pages(folder=tmp_path, sys=tmp_path, proc=tmp_path).found

    def test_a_chunk_is_locked_and_let_go(self) -> None:
        def locked() -> str:
            return next(
                line for line in Path("/proc/self/status").read_text().splitlines() if "VmLck" in line
            )

        before = locked()
        finding = check_page_lock(1 << 16, nbytes=1 << 16)
        assert (finding.level, "locked a chunk of 64.0 KiB" in finding.found) == (Level.OK, True)
        assert "limit on locked memory 64.0 KiB" in finding.found
        assert locked() == before

    def test_a_chunk_that_the_kernel_does_not_lock_is_told(self) -> None:
        # In a process without the right to lock as much as it wants, and with a limit.
        program = (
            "import os, resource\n"
            "from kvpager.api.doctor_memory import check_page_lock, memlock_limit\n"
            "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
            "if os.getuid() == 0: os.setuid(65534)\n"
            "print(check_page_lock(memlock_limit(), nbytes=1 << 20).line())\n"
        )
        done = subprocess.run(
            [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=True
        )
        assert "limit on locked memory 64.0 KiB; the kernel does not lock 1.0 MiB (" in done.stdout
        assert "ulimit -l unlimited" in done.stdout

    @pytest.mark.skipif(driver_answers(), reason="a CUDA driver answers")
    def test_a_gpu_that_is_not_there_locks_nothing(self) -> None:
        finding = check_page_lock(None, gpu=0, nbytes=1 << 16)
        assert finding.level is Level.PROBLEM
        assert "no CUDA driver answers" in finding.found

    @pytest.mark.gpu
    @pytest.mark.skipif(not driver_answers(), reason="no CUDA driver answers cuInit(0)")
    def test_the_driver_locks_a_chunk(self) -> None:
        finding = check_page_lock(None, gpu=0, nbytes=1 << 20)
        assert finding.level is Level.OK, finding


class TestGPU:
    def test_a_machine_without_a_gpu_needs_no_driver(self, tmp_path: Path) -> None:
        pci(tmp_path, "0000:00:02.0", vendor="0x8086", **{"class": "0x030000"})
        finding = check_driver("the driver's library libcuda.so.1 is not here", [], sys=tmp_path)
        assert finding.level is Level.OK
        assert "runs on the CPU" in finding.found

    def test_a_gpu_whose_driver_does_not_answer_is_a_problem(self, tmp_path: Path) -> None:
        pci(tmp_path, "0000:17:00.0", vendor="0x10de", **{"class": "0x030200"})
        pci(tmp_path, "0000:18:00.0", vendor="0x10de", **{"class": "0x068000"})  # a switch
        finding = check_driver("cuInit answers with error 999", [], sys=tmp_path)
        assert finding.level is Level.PROBLEM
        assert finding.found == "cuInit answers with error 999, but there is an NVIDIA GPU at 0000:17:00.0"

    def test_a_driver_that_answers_is_well(self, tmp_path: Path) -> None:
        assert check_driver(None, [GPU, GPU], sys=tmp_path) == Finding(
            "CUDA driver", Level.OK, "answers, with 2 devices"
        )

    @pytest.mark.parametrize(
        ("now", "width", "level", "said"),
        [
            ("32.0 GT/s PCIe", "16", Level.OK, "PCIe 5.0 x16 now, 5.0 x16 at most"),
            ("2.5 GT/s PCIe", "16", Level.OK, "PCIe 1.0 x16 now, 5.0 x16 at most (an idle link slows down"),
            ("32.0 GT/s PCIe", "8", Level.WARNING, "PCIe 5.0 x8 now, 5.0 x16 at most"),
            ("Unknown", "0", Level.OK, "its PCIe link cannot be known here"),
        ],
    )
    def test_the_link_is_told_now_and_at_most(
        self, tmp_path: Path, now: str, width: str, level: Level, said: str
    ) -> None:
        pci(
            tmp_path,
            GPU.bus_id,
            current_link_speed=now,
            current_link_width=width,
            max_link_speed="32.0 GT/s PCIe",
            max_link_width="16",
        )
        finding = check_gpu(0, GPU, sys=tmp_path)
        assert finding.level is level
        assert said in finding.found
        assert "NVIDIA H200 at 0000:17:00.0" in finding.found

    def test_a_link_of_which_nothing_is_said_cannot_be_known(self, tmp_path: Path) -> None:
        assert "cannot be known" in check_gpu(0, GPU, sys=tmp_path).found
        assert "cannot be known" in check_gpu(0, DriverDevice("GPU", ""), sys=tmp_path).found

    def test_the_node_that_is_near_is_told(self, tmp_path: Path) -> None:
        write(tmp_path / "devices" / "system" / "node", node0__cpulist="0-3,8", node1__cpulist="4-7")
        pci(tmp_path, GPU.bus_id, numa_node="1")
        finding = check_numa([GPU], cpus={0, 4}, sys=tmp_path)
        assert (finding.level, finding.found) == (Level.OK, "2 nodes, cuda:0 near node 1")
        assert "--preferred=1" in finding.advice
        finding = check_numa([GPU], cpus={0, 8}, sys=tmp_path)
        assert finding.level is Level.WARNING
        assert "--cpunodebind=1" in finding.advice

    def test_a_node_that_the_firmware_does_not_say_is_unknown(self, tmp_path: Path) -> None:
        write(tmp_path / "devices" / "system" / "node", node0__cpulist="0", node1__cpulist="1")
        pci(tmp_path, GPU.bus_id, numa_node="-1")
        assert check_numa([GPU], cpus={0}, sys=tmp_path).found == "2 nodes, cuda:0 near an unknown node"

    def test_one_node_needs_no_choice(self, tmp_path: Path) -> None:
        assert "cannot be known" in check_numa([GPU], cpus={0}, sys=tmp_path).found
        write(tmp_path / "devices" / "system" / "node", node0__cpulist="0-1")
        assert check_numa([GPU], cpus={0}, sys=tmp_path).found == "one node"

    @pytest.mark.skipif(driver_answers(), reason="a CUDA driver answers")
    def test_where_no_driver_answers_there_are_no_devices(self) -> None:
        assert driver_devices() == []
        assert why_no_driver() is not None

    @pytest.mark.gpu
    @pytest.mark.skipif(not driver_answers(), reason="no CUDA driver answers cuInit(0)")
    def test_the_driver_names_its_devices(self) -> None:
        devices = driver_devices()
        assert devices
        assert all(one.name and one.bus_id.count(":") == 2 for one in devices)


class TestArenas:
    def make(self, folder: Path, name: str = "kvpager-0-abc.arena") -> ArenaFile:
        """An arena of 8 MiB whose owner ends without removing it."""
        file = ArenaFile(folder / name, keep=True)
        HostStore(8 * MIB, arena=file).close()
        return file

    def test_a_folder_without_arenas_has_none(self, tmp_path: Path) -> None:
        (finding,) = check_arenas(tmp_path)
        assert (finding.level, finding.found) == (Level.OK, f"none in {tmp_path}")

    def test_an_orphan_is_told_and_stays_until_it_is_to_be_removed(self, tmp_path: Path) -> None:
        path = self.make(tmp_path).path
        (finding,) = check_arenas(tmp_path)
        assert finding.level is Level.WARNING
        assert f"{path}, " in finding.found
        assert "for 8.0 MiB of blocks; with its records " in finding.found
        assert finding.found.endswith("no sidecar has it")
        assert "--remove-orphans" in finding.advice
        # It lies where no socket's own arena does.
        assert f"kvpager serve with --arena {path} takes it over" in finding.advice
        assert len(list(tmp_path.iterdir())) == 2
        (finding,) = check_arenas(tmp_path, remove=True)
        assert finding.level is Level.OK
        assert finding.found.endswith("; removed")
        assert list(tmp_path.iterdir()) == []

    def test_one_that_is_owned_stays(self, tmp_path: Path) -> None:
        self.make(tmp_path)
        owner = ArenaFile(tmp_path / "kvpager-0-abc.arena", keep=True)
        try:
            (finding,) = check_arenas(tmp_path, remove=True)
        finally:
            owner.close()
        assert (finding.level, "its sidecar lives" in finding.found) == (Level.OK, True)
        assert len(list(tmp_path.iterdir())) == 2

    def test_one_without_records_is_not_removed_but_told(self, tmp_path: Path) -> None:
        path = tmp_path / "kvpager-0-abc.arena"
        path.write_bytes(bytes(4096))
        path.chmod(0o600)
        (finding,) = check_arenas(tmp_path, remove=True)
        assert finding.level is Level.WARNING
        assert "its records are gone" in finding.found
        assert "not removed, since its name is not one that kvpager gives" in finding.found
        assert path.exists()

    def orphan(self, folder: Path) -> Path:
        """An arena of this user's by its name and form, that has lost its records."""
        path = Path(self.make(folder, f"kvpager-{os.getuid()}-0123456789ab.arena").path)
        path.with_name(path.name + ".records").unlink()
        return path

    def test_an_orphan_that_has_lost_its_records_is_named_and_removed_when_it_is_said(
        self, tmp_path: Path
    ) -> None:
        path = self.orphan(tmp_path)
        (finding,) = check_arenas(tmp_path)
        assert finding.level is Level.WARNING
        assert f"{path}, for 8.0 MiB of blocks" in finding.found
        assert "its records are gone, and with them its blocks, and no process has it" in finding.found
        assert finding.advice == "--remove-orphans gives it back"
        assert path.exists()
        (finding,) = check_arenas(tmp_path, remove=True)
        assert (finding.level, finding.found.endswith("; removed")) == (Level.OK, True)
        assert list(tmp_path.iterdir()) == []

    def test_one_without_records_that_a_process_has_mapped_or_locked_stays(self, tmp_path: Path) -> None:
        path = self.orphan(tmp_path)
        with path.open("r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE):
            (finding,) = check_arenas(tmp_path, remove=True)
            assert finding.level is Level.WARNING
            assert f"not removed, since process {os.getpid()} has it mapped" in finding.found
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            (finding,) = check_arenas(tmp_path, remove=True)
        assert (finding.level, "its sidecar lives" in finding.found) == (Level.OK, True)
        assert path.exists()

    @pytest.mark.parametrize("spoilt", ["mode", "length", "linked", "records", "name"])
    def test_one_without_records_that_may_be_no_arena_stays(self, tmp_path: Path, spoilt: str) -> None:
        path = self.orphan(tmp_path)
        if spoilt == "mode":
            path.chmod(0o644)
        elif spoilt == "length":
            os.truncate(path, 8 * MIB - 1)
        elif spoilt == "linked":
            os.link(path, tmp_path / "kept")
        elif spoilt == "records":
            path.with_name(path.name + ".records").write_text("something else")
        else:
            path = path.rename(tmp_path / f"kvpager-{os.getuid() + 1}-0123456789ab.arena")
        # A link to an arena is another name of it, and is told of as well.
        (finding,) = (one for one in check_arenas(tmp_path, remove=True) if str(path) in one.found)
        assert finding.level is Level.WARNING
        assert "not removed, since " in finding.found
        assert f"rm {path}" in finding.advice
        assert path.exists()

    def test_a_folder_that_cannot_be_read_is_a_problem(self, tmp_path: Path) -> None:
        (finding,) = check_arenas(tmp_path / "none")
        assert finding.level is Level.PROBLEM

    def test_what_arenas_have_is_counted(self, tmp_path: Path) -> None:
        assert held_by_arenas(tmp_path) == held_by_arenas(tmp_path / "none") == 0
        path = Path(self.make(tmp_path).path)
        assert held_by_arenas(tmp_path) > path.stat().st_blocks * 512 > 0


@contextmanager
def behind_tls(folder: Path, mine: Certificate) -> Iterator[tuple[ServeProcess, str]]:
    """A sidecar that is reached over TLS with `TOKEN`, and its URL."""
    secret, port = folder / "token", free_port()
    secret.write_text(TOKEN)
    secret.chmod(0o600)
    with ServeProcess(
        folder / "socket",
        f"--listen=localhost:{port}",
        f"--token-file={secret}",
        f"--tls-cert={mine.certificate}",
        f"--tls-key={mine.key}",
    ) as serving:
        yield serving, f"kvpagers://localhost:{port}"


class TestSidecar:
    def test_one_that_answers_tells_what_it_has(self, tmp_path: Path) -> None:
        with ServeProcess(tmp_path / "socket") as serving:
            finding = check_sidecar(str(serving.path))
            assert finding.level is Level.OK
            assert f"kvpager {kvpager.__version__}, " in finding.found
            assert "of 8.0 MiB there, 0 clients, 0 leases" in finding.found
            serving.kill()
            finding = check_sidecar(str(serving.path))
            assert finding.level is Level.PROBLEM
            assert "kvpager serve" in finding.advice

    def test_the_advice_fits_what_keeps_it_from_answering(self, tmp_path: Path) -> None:
        authority = Authority(tmp_path)
        ca, token, secret = str(authority.path), TOKEN, tmp_path / "token"
        with behind_tls(tmp_path, authority.certificate("localhost")) as (serving, there):

            def advice(place: str, token: str | None = None, ca: str | None = None) -> str:
                finding = check_sidecar(place, token=token, ca=ca)
                assert finding.level is Level.PROBLEM
                return finding.advice

            assert check_sidecar(there, token=token, ca=ca).level is Level.OK
            assert "--token-file" in advice(there, ca=ca)
            assert "--token-file" in advice(there, "no token of its", ca)
            assert "--token-file" in advice(there, "another-one-of-the-right-length", ca)
            assert "--ca FILE" in advice(there, token)
            assert f"--socket {there}" in advice(there.replace("kvpagers", "kvpager"), token)
            assert "leave it out" in advice(there.replace("kvpagers", "kvpager"), token, ca)
            assert "leave it out" in advice(str(serving.path), token)
            assert "give --socket the path" in advice("http://localhost", token)
            assert "PEM" in advice(there, token, str(secret))
        assert "--listen" in advice(there, token, ca)
        assert "start it (kvpager serve)" in advice(str(serving.path))

    @pytest.mark.parametrize(
        ("name", "days", "said"),
        [("localhost", (-3, -1), "valid now"), ("elsewhere", (-1, 1), "as its certificate does")],
    )
    def test_a_certificate_that_is_not_good_here_is_told_from_one_that_nobody_knows(
        self, tmp_path: Path, name: str, days: tuple[int, int], said: str
    ) -> None:
        authority = Authority(tmp_path)
        with behind_tls(tmp_path, authority.certificate(name, from_now=days)) as (_, there):
            finding = check_sidecar(there, token=TOKEN, ca=str(authority.path))
        assert finding.level is Level.PROBLEM
        assert said in finding.advice, finding

    def test_one_that_speaks_plain_tcp_is_told_from_one_whose_certificate_is_not_trusted(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:

            def answer() -> None:
                with server.accept()[0] as connected:
                    connected.recv(1 << 12)
                    connected.sendall(b"no TLS is spoken here" * 4)

            answering = threading.Thread(target=answer)
            answering.start()
            finding = check_sidecar(
                f"kvpagers://127.0.0.1:{server.getsockname()[1]}", token="a token of the right length"
            )
            answering.join()
        assert finding.level is Level.PROBLEM
        assert "kvpager://" in finding.advice

    def test_one_that_nobody_named_may_be_absent(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        assert check_sidecar() == Finding(
            "sidecar", Level.OK, f"none on {tmp_path}/kvpager/sidecar.sock", "kvpager serve starts one"
        )


class TestColdTier:
    @pytest.mark.parametrize(
        ("settings", "level", "said"),
        [
            (("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"), Level.OK, "maxmemory 64.0 MiB"),
            ((), Level.WARNING, "maxmemory none"),
            (("--maxmemory", "64mb", "--maxmemory-policy", "noeviction"), Level.WARNING, "policy noeviction"),
        ],
    )
    def test_a_redis_tells_its_version_memory_and_distance(
        self, tmp_path: Path, settings: tuple[str, ...], level: Level, said: str
    ) -> None:
        with RedisServer(tmp_path, *settings) as server:
            finding = check_cold(server.url)
        assert finding.level is level
        assert said in finding.found
        assert f"Redis {server_version()} at 127.0.0.1:{server.port}, 0." in finding.found
        assert " ms away" in finding.found

    def test_a_redis_of_another_kind_than_the_url_says_is_a_problem(self, tmp_path: Path) -> None:
        with RedisServer(tmp_path) as server:
            finding = check_cold(server.url.replace("redis://", "redis+cluster://"))
        assert (finding.level, finding.advice) == (Level.PROBLEM, "use redis://")

    def test_a_password_that_is_wrong_is_a_problem_and_is_not_shown(self, tmp_path: Path) -> None:
        with RedisServer(tmp_path, "--requirepass", "open", password="open") as server:
            finding = check_cold(f"redis://:sesame@127.0.0.1:{server.port}")
            assert finding.level is Level.PROBLEM
            assert "sesame" not in finding.line()
            assert check_cold(f"redis://:open@127.0.0.1:{server.port}").level is Level.WARNING

    def test_a_redis_that_is_down_is_a_problem(self) -> None:
        finding = check_cold(f"redis://127.0.0.1:{free_port()}")
        assert finding.level is Level.PROBLEM
        assert "cannot be used" in finding.found

    @pytest.mark.parametrize("url", ["http://127.0.0.1", "disk://relative", "disk://", ""])
    def test_a_url_that_names_no_cold_tier_is_a_problem(self, url: str) -> None:
        assert check_cold(url).level is Level.PROBLEM

    def test_a_folder_is_tried_and_nothing_is_left_in_it(self, tmp_path: Path) -> None:
        for url in (f"disk://{tmp_path}", str(tmp_path)):
            finding = check_cold(url)
            assert finding.level is not Level.PROBLEM
            assert " free" in finding.found
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_that_is_to_be_made_is_not_made(self, tmp_path: Path) -> None:
        finding = check_cold(f"disk://{tmp_path}/a/b")
        assert f"(to be made in {tmp_path})" in finding.found
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_that_cannot_be_used_is_a_problem(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        assert check_cold(f"disk://{tmp_path}/file/cold").level is Level.PROBLEM
        # Nobody, not even root, writes there.
        assert check_cold("disk:///proc/self").level is Level.PROBLEM
        finding = check_cold("disk:///proc/none/cold")
        assert finding.level is Level.PROBLEM
        assert "cannot be made" in finding.found

    def test_a_folder_below_on_another_file_system_is_a_problem(self, tmp_path: Path) -> None:
        other = Path("/dev/shm")
        if other.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("the temporary folder is on the same file system as /dev/shm")
        (tmp_path / "ab").symlink_to(other)
        finding = check_cold(f"disk://{tmp_path}")
        assert (finding.level, "another file system" in finding.found) == (Level.PROBLEM, True)


class TestTheCommand:
    def run(self, tmp_path: Path, *arguments: str) -> list[str]:
        """Arguments that keep it away from what else is on this machine."""
        return ["doctor", "--host-bytes", "8M", "--shm", str(tmp_path), *arguments]

    def test_there_is_one_line_for_each_check_and_the_same_in_json(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with ServeProcess(tmp_path / "socket") as serving:
            where = self.run(tmp_path, "--socket", str(serving.path), "--cold", f"disk://{tmp_path}/cold")
            code = main(where)
            lines = capsys.readouterr().out.splitlines()
            assert main([*where, "--json"]) == code
            told: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert [line.split()[0] for line in lines] == [one["level"] for one in told["findings"]]
        assert [line[9:].partition(": ")[0] for line in lines] == [one["check"] for one in told["findings"]]
        assert told["ok"] == (code == 0)
        checks = {one["check"] for one in told["findings"]}
        assert {"Python", "packages", "CUDA driver", "NUMA", "memory", str(tmp_path)} < checks
        assert {"page-locking", "huge pages", "arenas", "sidecar", "cold tier"} < checks

    def test_a_problem_ends_it_with_1(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(self.run(tmp_path, "--socket", str(tmp_path / "none"))) == 1
        assert "problem  sidecar: " in capsys.readouterr().out

    def test_orphans_are_removed_when_it_is_said(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        TestArenas().make(tmp_path)
        main(self.run(tmp_path))
        assert "no sidecar has it" in capsys.readouterr().out
        assert len(list(tmp_path.iterdir())) == 2
        main(self.run(tmp_path, "--remove-orphans"))
        assert "; removed" in capsys.readouterr().out
        assert list(tmp_path.iterdir()) == []

    def test_it_loads_no_torch(self, tmp_path: Path) -> None:
        program = (
            "import sys\nfrom kvpager.api.cli import main\n"
            f"main({self.run(tmp_path, '--cold', 'redis://127.0.0.1:1')!r})\n"
            "print('torch' in sys.modules)\n"
        )
        done = subprocess.run(
            [sys.executable, "-P", "-c", program],
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        )
        assert done.stdout.endswith("False\n")
        assert done.stderr == ""

    def test_a_size_that_makes_no_sense_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["doctor", "--host-bytes", "much"]) == 1
        assert capsys.readouterr().err.startswith("kvpager doctor: --host-bytes: must be a size")


def server_version() -> str:
    """The version of the redis-server that is installed."""
    done = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=True)
    return done.stdout.split("v=")[1].split()[0]
