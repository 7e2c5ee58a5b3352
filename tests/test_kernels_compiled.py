"""CUDA sources compile for all that they are for, and what was compiled is kept; on a GPU, launches."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from kvpager.kernels.compiled import (
    Kernel,
    Variant,
    arch_of,
    compile_cubin,
    kernel_sources,
    load_kernel,
    variants_of,
)
from kvpager.tiers.driver import driver_answers
from kvpager.tiers.errors import ConfigError, KernelError

ADD = """\
// architectures: sm_80 sm_90a
// variant: STEP=1
// variant: STEP=2 WIDE=int
#include "step.cuh"
extern "C" __global__ void add(long long* out, int n, float scale, Pair pair) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = (long long)(scale * (i * STEP + offset(pair)));
}
extern "C" __global__ void ends(int* out) {
  extern __shared__ int memory[];
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  memory[threadIdx.x * 255] = out[0];
  __syncthreads();
  if (threadIdx.x == 0) out[0] = memory[255 * 64] + 1;
}
"""
STEP = """\
struct Pair { long long high; int low; };
__device__ inline long long offset(Pair pair) { return pair.high + pair.low; }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources, with a cache of its own in ``cache/kernels``."""
    monkeypatch.setenv("KVPAGER_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "add.cu").write_text(ADD)
    (tmp_path / "step.cuh").write_text(STEP)
    return tmp_path


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "kernels").glob("*"))


def compiled(folder: Path, arch: str = "sm_90a", **defines: int | str) -> bytes:
    return compile_cubin("add.cu", arch=arch, defines=defines or {"STEP": 1}, folder=folder)


@pytest.mark.parametrize(
    ("source", "variant"),
    [(source, variant) for source in kernel_sources() for variant in variants_of(source)],
    ids=lambda x: x if isinstance(x, str) else f"{x.arch}-" + "-".join(f"{k}={v}" for k, v in x.defines),
)
def test_every_kernel_compiles_for_every_architecture_that_it_is_for(source: str, variant: Variant) -> None:
    assert compile_cubin(source, arch=variant.arch, defines=dict(variant.defines))[:4] == b"\x7fELF"


def test_a_source_names_its_architectures_and_variants(folder: Path) -> None:
    one, two = (("STEP", 1),), (("STEP", 2), ("WIDE", "int"))
    assert variants_of("add.cu", folder) == (
        Variant("sm_80", one),
        Variant("sm_80", two),
        Variant("sm_90a", one),
        Variant("sm_90a", two),
    )
    (folder / "plain.cu").write_text("// architectures: sm_86\n")
    assert variants_of("plain.cu", folder) == (Variant("sm_86", ()),)
    assert kernel_sources(folder) == ("add.cu", "plain.cu")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "architectures"),
        ("// architectures:\n", "architectures"),
        ("// architectures: sm_80\n// variant: A=1 B\n", "'B'"),
        ("// architectures: sm_80\n// variant: 1A=1\n", "'1A=1'"),
    ],
)
def test_a_source_that_does_not_say_what_it_is_for_is_refused(folder: Path, text: str, problem: str) -> None:
    (folder / "add.cu").write_text(text)
    with pytest.raises(KernelError, match=problem):
        variants_of("add.cu", folder)


def test_compiled_code_is_kept_and_taken_from_the_disk_the_next_time(folder: Path) -> None:
    first = compiled(folder)
    (file,) = kept(folder)
    assert file.read_bytes()[32:] == first
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    before = file.stat().st_mtime_ns
    assert compiled(folder) == first
    assert [path.stat().st_mtime_ns for path in kept(folder)] == [before]


def test_whatever_the_code_depends_on_names_it_in_the_cache(folder: Path) -> None:
    compiled(folder)
    compiled(folder, "sm_80")
    compiled(folder, STEP=2)
    (folder / "step.cuh").write_text(STEP + "// altered\n")
    compiled(folder)
    (folder / "add.cu").write_text(ADD + "// altered\n")
    compiled(folder)
    assert len(kept(folder)) == 5


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 5000])
def test_a_damaged_cache_is_compiled_over(folder: Path, damage: bytes) -> None:
    first = compiled(folder)
    (file,) = kept(folder)
    file.write_bytes(damage)
    assert compiled(folder) == first
    assert file.read_bytes()[32:] == first


def test_a_cache_that_cannot_be_written_to_only_costs_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "occupied").write_text("a file, where a folder would be")
    monkeypatch.setenv("KVPAGER_CACHE_DIR", str(folder / "occupied"))
    assert compiled(folder)[:4] == b"\x7fELF"


def test_the_cache_lies_in_the_users_cache_folder_unless_told_otherwise(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVPAGER_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "xdg"))
    compiled(folder)
    assert len(list((folder / "xdg" / "kvpager" / "kernels").iterdir())) == 1


def test_the_compilers_message_is_told(folder: Path) -> None:
    (folder / "add.cu").write_text('extern "C" __global__ void add() { nonsense; }\n')
    with pytest.raises(KernelError, match=r'add\.cu\(1\): error: identifier "nonsense" is undefined'):
        compiled(folder)
    assert kept(folder) == []


def test_an_architecture_that_is_none_is_refused(folder: Path) -> None:
    with pytest.raises(KernelError, match="sm_1"):
        compiled(folder, "sm_1")


def test_a_source_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(KernelError, match=r"other\.cu"):
        compile_cubin("other.cu", arch="sm_80", folder=folder)
    (folder / "step.cuh").unlink()
    with pytest.raises(KernelError, match=r"step\.cuh"):
        compiled(folder)


@pytest.mark.skipif(driver_answers(), reason="a CUDA driver answers")
def test_loading_a_kernel_without_a_driver_says_so() -> None:
    with pytest.raises(ConfigError, match="no CUDA driver"):
        load_kernel("add.cu", "add", "Q", device=torch.device("cuda", 0))


# ---- on a GPU ----


def current_stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def loaded(folder: Path, name: str = "add", parameters: str = "Q i f qi", **defines: Any) -> Kernel:
    device = torch.device("cuda", torch.cuda.current_device())
    return Kernel(compiled(folder, arch_of(device), **defines), name, parameters, device)


@pytest.mark.gpu
def test_a_kernel_gets_the_arguments_that_it_was_launched_with(folder: Path) -> None:
    kernel = loaded(folder, STEP=3)
    out = torch.full((1000,), -1, dtype=torch.int64, device="cuda")
    kernel.launch(8, 128, (out.data_ptr(), 900, 2.0, 1 << 20, 7), stream=current_stream())
    expected = (torch.arange(900) * 3 + (1 << 20) + 7) * 2
    assert torch.equal(out[:900].cpu(), expected)
    assert (out[900:] == -1).all()


@pytest.mark.gpu
def test_launches_of_several_threads_do_not_mix_their_arguments(folder: Path) -> None:
    kernel = loaded(folder, STEP=1)
    outs = torch.full((8, 200, 64), -1, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()

    def work(number: int) -> None:
        # A thread that never used torch has no context of its own.
        for turn in range(200):
            out = outs[number, turn].data_ptr()
            kernel.launch(1, 64, (out, 64, 1.0, number << 10, turn), stream=0)

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(work, number) for number in range(8)]:
            done.result()
    torch.cuda.synchronize()
    first = (torch.arange(8)[:, None] << 10) + torch.arange(200)
    assert torch.equal(outs.cpu(), first[..., None] + torch.arange(64))


@pytest.mark.gpu
def test_dependent_launches_with_much_shared_memory_are_captured_and_run_in_order(folder: Path) -> None:
    kernel = loaded(folder, "ends", "Q")
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            kernel.launch(
                1, 65, (out.data_ptr(),), stream=current_stream(), shared_bytes=65 << 10, dependent=True
            )
    assert out.item() == 0
    for _ in range(5):
        graph.replay()
    assert out.item() == 50


@pytest.mark.gpu
def test_a_kernel_may_be_loaded_while_a_graph_is_captured(folder: Path) -> None:
    out = torch.zeros(4, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loaded(folder).launch(1, 4, (out.data_ptr(), 4, 1.0, 0, 5), stream=current_stream())
    graph.replay()
    assert out.tolist() == [5, 6, 7, 8]


@pytest.mark.gpu
def test_a_kernel_tells_what_it_needs(folder: Path) -> None:
    kernel = loaded(folder, "ends", "Q")
    assert 0 < kernel.registers < 256
    assert kernel.local_bytes == 0
    assert kernel.max_threads == 1024
    most = torch.cuda.get_device_properties(kernel.device).max_threads_per_multi_processor
    assert kernel.max_ctas_per_sm(256) == most // 256
    assert kernel.max_ctas_per_sm(64, 90 << 10) in (1, 2)


@pytest.mark.gpu
def test_arguments_that_do_not_fit_are_refused_before_the_launch(folder: Path) -> None:
    kernel = loaded(folder)
    out = torch.zeros(4, dtype=torch.int64, device="cuda")
    good = (out.data_ptr(), 4, 1.0, 0, 5)
    wrong: list[tuple[Any, ...]] = [
        good[:-1],
        (*good, 1),
        (out.data_ptr(), 1 << 40, 1.0, 0, 5),
        (out, *good[1:]),
    ]
    for args in wrong:
        with pytest.raises(KernelError, match="add"):
            kernel.launch(1, 4, args, stream=0)
    for grid, block in ((0, 4), (1, 0), ((1, 2, 3, 4), 4)):
        with pytest.raises(KernelError, match="sizes"):
            kernel.launch(grid, block, good, stream=0)
    with pytest.raises(KernelError, match="shared memory"):
        kernel.launch(1, 4, good, stream=0, shared_bytes=1 << 20)
    torch.cuda.synchronize()
    assert (out == 0).all()
    with pytest.raises(KernelError, match=r"\[8, 4, 4, 16\]"):
        loaded(folder, parameters="Q i f q")
    with pytest.raises(KernelError, match="no parameters"):
        loaded(folder, parameters="Q ?? *")
