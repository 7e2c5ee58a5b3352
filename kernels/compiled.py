"""CUDA kernels, compiled when they are first used, and their launches.

The sources are the ``.cu`` files beside this one, which may include each other by name (``#include
"attention.cuh"``) and nothing else. NVRTC compiles them through cuda-core, so that no CUDA toolkit needs to
be installed; what it made is kept on disk. A source says at its top what it is for, so that every form of it
can be compiled where no GPU is::

    // architectures: sm_80 sm_90a sm_100a
    // variant: HEAD_DIM=64 BF16=1
    // variant: HEAD_DIM=128 BF16=1

One line of architectures, from the oldest on; any number of variants, none meaning one without defines.
`compile_cubin` and all that comes before it need neither a GPU nor a driver.

Compiled code lies in ``$KVPAGER_CACHE_DIR``, or in ``kvpager`` under ``$XDG_CACHE_HOME`` or ``~/.cache``. A
cache that cannot be written to or was damaged costs time, and nothing else. It is as much to be trusted as
whoever may write to it.

Sources: NVRTC's manual; the CUDA driver API manual, cuLaunchKernelEx and CUlaunchAttribute.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import struct
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from ..tiers.driver import check, cuda_driver
from ..tiers.errors import KernelError
from ..tiers.extras import how_to_install

__all__ = ["Kernel", "Variant", "arch_of", "compile_cubin", "kernel_sources", "load_kernel", "variants_of"]

Defines = Mapping[str, int | str]
Extent = int | tuple[int, ...]
"""Of a grid or a block: one number, or up to three."""

_FOLDER: Final = Path(__file__).resolve().parent
_NO_DEFINES: Final[Defines] = MappingProxyType({})
_INCLUDE: Final = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_ARCHITECTURES: Final = re.compile(r"^// architectures:(.*)$", re.MULTILINE)
_VARIANT: Final = re.compile(r"^// variant:(.*)$", re.MULTILINE)
_ARCH: Final = re.compile(r"sm_(\d+)(\d)[af]?")
_CACHE_FORMAT: Final = "kvpager-cubin-1"
_STANDARD: Final = "c++17"
_DIGEST_BYTES: Final = 32
_SHARED_BYTES_GIVEN: Final = 48 << 10
"""Shared memory that a kernel may use without asking for it."""
_MISSING: Final = f"compiling kernels needs cuda-core and NVRTC: {how_to_install('cuda')}"
_MOST_CONFIGS: Final = 256
_FIRST_OWN_MAJOR: Final = 9
"""From this compute capability on, code is compiled with the features of the very architecture (sm_90a)."""


# ---- sources ----


@dataclass(frozen=True)
class Variant:
    """One form that a source is compiled in: an architecture, and its defines."""

    arch: str
    defines: tuple[tuple[str, int | str], ...] = ()


def kernel_sources(folder: Path = _FOLDER) -> tuple[str, ...]:
    """The names of all ``.cu`` files of the package."""
    return tuple(sorted(path.name for path in folder.glob("*.cu")))


def variants_of(source: str, folder: Path = _FOLDER) -> tuple[Variant, ...]:
    """What a source says at its top that it is compiled for.

    Raises:
        KernelError: there is no such source, or it does not say.
    """
    text = _read(source, folder)
    forms = [_parsed_defines(line, source) for line in _VARIANT.findall(text)] or [()]
    return tuple(Variant(arch, defines) for arch in _architectures(source, text) for defines in forms)


def arch_of(device: torch.device) -> str:
    """The architecture that code for a CUDA device is compiled for: ``sm_86``, ``sm_90a``."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major >= _FIRST_OWN_MAJOR else ''}"


def _read(source: str, folder: Path) -> str:
    try:
        return (folder / source).read_text(encoding="utf-8")
    except OSError as error:
        raise KernelError(f"the kernel source {source} cannot be read: {error}") from error


def _architectures(source: str, text: str) -> list[str]:
    lines: list[str] = _ARCHITECTURES.findall(text)
    if len(lines) != 1 or not lines[0].split():
        raise KernelError(f"{source} must name its architectures in one line // architectures: sm_...")
    return lines[0].split()


def _parsed_defines(line: str, source: str) -> tuple[tuple[str, int | str], ...]:
    defines: list[tuple[str, int | str]] = []
    for word in line.split():
        name, equals, value = word.partition("=")
        if not (name.isidentifier() and equals):
            raise KernelError(f"{source} has a variant with {word!r}, which is not NAME=VALUE")
        defines.append((name, int(value) if value.isdecimal() else value))
    return tuple(defines)


def _with_includes(source: str, folder: Path) -> dict[str, str]:
    """The text of a source and of everything that it includes, by file name."""
    texts: dict[str, str] = {}
    names = [source]
    while names:
        name = names.pop()
        if name not in texts:
            texts[name] = _read(name, folder)
            names += _INCLUDE.findall(texts[name])
    return texts


# ---- compilation ----


def compile_cubin(source: str, *, arch: str, defines: Defines = _NO_DEFINES, folder: Path = _FOLDER) -> bytes:
    """Compile a source for one architecture, or take what was compiled before from the disk.

    Args:
        source: the name of a file beside this one, such as ``decode.cu``.
        arch: ``sm_86``, ``sm_90a``.
        defines: preprocessor macros.
        folder: where the sources lie.

    Returns:
        a cubin.

    Raises:
        KernelError: it does not compile (the message is the compiler's), a file is missing, or cuda-core
            or NVRTC are not installed.
    """
    texts = _with_includes(source, folder)
    macros = [(name, str(value)) for name, value in sorted(defines.items())]
    kept = _cache_file(texts, arch, macros)
    cubin = _kept_cubin(kept)
    if cubin is None:
        cubin = _compile(texts[source], source, arch, macros, folder)
        _keep_cubin(kept, cubin)
    return cubin


def _compile(text: str, source: str, arch: str, macros: list[tuple[str, str]], folder: Path) -> bytes:
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise KernelError(_MISSING) from error
    options = ProgramOptions(
        name=source,
        arch=arch,
        std=_STANDARD,
        lineinfo=True,
        define_macro=[*macros] or None,
        include_path=[str(folder)],
    )
    try:
        # Of the object code only its bytes: its other attributes ask the driver, which may not be there.
        return bytes(Program(text, "c++", options).compile("cubin").code)
    except Exception as error:
        if not type(error).__module__.startswith("cuda."):
            raise
        raise KernelError(f"{source} does not compile for {arch}: {error}") from error


def _nvrtc_version() -> str:
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise KernelError(_MISSING) from error
    return f"{major}.{minor}"


def _cache_file(texts: Mapping[str, str], arch: str, macros: list[tuple[str, str]]) -> Path:
    named = [_CACHE_FORMAT, _nvrtc_version(), _STANDARD, arch]
    parts = [
        *named,
        *(part for pair in macros for part in pair),
        *(part for pair in sorted(texts.items()) for part in pair),
    ]
    key = hashlib.sha256()
    for part in parts:
        data = part.encode()
        key.update(len(data).to_bytes(8, "little"))
        key.update(data)
    return _cache_folder() / f"{key.hexdigest()}.cubin"


def _cache_folder() -> Path:
    own = os.environ.get("KVPAGER_CACHE_DIR")
    if own:
        return Path(own) / "kernels"
    shared = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(shared) / "kvpager" / "kernels"


def _kept_cubin(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, cubin = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return cubin if cubin and hashlib.sha256(cubin).digest() == digest else None


def _keep_cubin(path: Path, cubin: bytes) -> None:
    # Whoever cannot keep it compiles again next time.
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".new")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(cubin).digest() + cubin)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise


# ---- launches ----


class _Packed(threading.local):
    """A thread's memory for the arguments of one kernel, and the pointers to them that a launch takes."""

    def __init__(self, num_bytes: int, offsets: tuple[int, ...]) -> None:
        self.memory = ctypes.create_string_buffer(max(1, num_bytes))
        base = ctypes.addressof(self.memory)
        self._array = (ctypes.c_void_p * max(1, len(offsets)))(*(base + offset for offset in offsets))
        self.pointers = ctypes.addressof(self._array)


class Kernel:
    """One kernel on one device; `load_kernel` makes them. Safe to launch from several threads.

    It stays loaded for as long as the process lives.
    """

    def __init__(self, cubin: bytes, name: str, parameters: str, device: torch.device) -> None:
        driver = self._driver = cuda_driver()
        self.name = name
        self.device = device
        self._struct, offsets, sizes = _packing(parameters, name)
        self._packed = _Packed(self._struct.size, offsets)
        self._lock = threading.Lock()
        self._configs: dict[tuple[Any, ...], Any] = {}
        self._handle = check(driver.cuDeviceGet(device.index), f"opening {device}")
        self._context = check(
            driver.cuDevicePrimaryCtxRetain(self._handle), f"retaining the context of {device}"
        )
        self._context_id = int(self._context)
        with self._entered():
            self._function = self._loaded(cubin, sizes)
            self._static_bytes = self._attribute("SHARED_SIZE_BYTES")
            self.registers = self._attribute("NUM_REGS")
            self.local_bytes = self._attribute("LOCAL_SIZE_BYTES")
            self.max_threads = self._attribute("MAX_THREADS_PER_BLOCK")
        self._shared_bytes = max(0, _SHARED_BYTES_GIVEN - self._static_bytes)

    registers: int
    """Registers of a thread."""
    local_bytes: int
    """Bytes of local memory of a thread: spills and indexed arrays."""
    max_threads: int
    """The largest block that can be launched."""

    def launch(
        self,
        grid: Extent,
        block: Extent,
        args: Sequence[int | float | bytes],
        *,
        stream: int,
        shared_bytes: int = 0,
        dependent: bool = False,
    ) -> None:
        """Enqueue the kernel; also into a graph that the stream is captured into.

        Args:
            grid: CTAs, all positive.
            block: threads of a CTA.
            args: one number for every parameter (for every member of one that is a struct), bytes for ``s``.
            stream: the raw handle of a stream of the kernel's device.
            shared_bytes: dynamic shared memory of a CTA.
            dependent: let it begin before the kernel ahead of it in the stream is over, which it then waits
                for itself (``griddepcontrol.wait``): programmatic dependent launch.

        Raises:
            KernelError: the arguments do not fit the parameters, or there is not that much shared memory.
            KVPagerError: the driver refuses the launch.
        """
        config = self._configs.get((grid, block, shared_bytes, stream, dependent))
        if config is None:
            config = self._configure(grid, block, shared_bytes, stream, dependent)
        packed = self._packed
        try:
            self._struct.pack_into(packed.memory, 0, *args)
        except (struct.error, TypeError) as error:
            raise KernelError(f"arguments {list(args)} do not fit kernel {self.name}: {error}") from error
        driver = self._driver
        if int(driver.cuCtxGetCurrent()[1]) == self._context_id:
            (status,) = driver.cuLaunchKernelEx(config, self._function, packed.pointers, 0)
        else:  # another device's, or a thread that used no CUDA before
            with self._entered():
                (status,) = driver.cuLaunchKernelEx(config, self._function, packed.pointers, 0)
        if status:
            check((status,), f"launching {self.name}")

    def max_ctas_per_sm(self, threads: int, shared_bytes: int = 0) -> int:
        """CTAs of that size that one multiprocessor holds at a time.

        Raises:
            KernelError: there is not that much shared memory.
        """
        self._allow_shared(shared_bytes)
        with self._entered():
            count = check(
                self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    self._function, threads, shared_bytes
                ),
                f"asking for the occupancy of {self.name}",
            )
        return int(count)

    @contextlib.contextmanager
    def _entered(self) -> Any:
        check(self._driver.cuCtxPushCurrent(self._context), "entering the CUDA context")
        try:
            yield
        finally:
            check(self._driver.cuCtxPopCurrent(), "leaving the CUDA context")

    def _loaded(self, cubin: bytes, sizes: tuple[int, ...]) -> Any:
        driver = self._driver
        # Loading allocates, which a thread that captures a graph is not allowed unless it says so.
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = check(driver.cuThreadExchangeStreamCaptureMode(relaxed))
        try:
            module = check(driver.cuModuleLoadData(cubin), f"loading {self.name}")
            function = check(
                driver.cuModuleGetFunction(module, self.name.encode()), f"finding kernel {self.name}"
            )
            check(driver.cuFuncLoad(function), f"loading {self.name}")
        finally:
            check(driver.cuThreadExchangeStreamCaptureMode(before))
        found: list[int] = []
        while True:
            status, _, size = driver.cuFuncGetParamInfo(function, len(found))
            if status:
                break
            found.append(int(size))
        if tuple(found) != sizes:
            raise KernelError(f"kernel {self.name} takes parameters of {found} bytes, not {list(sizes)}")
        return function

    def _attribute(self, name: str) -> int:
        attribute = getattr(self._driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        return int(check(self._driver.cuFuncGetAttribute(attribute, self._function), f"asking {self.name}"))

    def _allow_shared(self, shared_bytes: int) -> None:
        with self._lock:
            if shared_bytes <= self._shared_bytes:
                return
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            with self._entered():
                (status,) = self._driver.cuFuncSetAttribute(self._function, attribute, shared_bytes)
            if status:
                raise KernelError(
                    f"kernel {self.name} cannot have {shared_bytes} bytes of dynamic shared memory "
                    f"on {self.device}, beside {self._static_bytes} static ones"
                )
            self._shared_bytes = shared_bytes

    def _configure(self, grid: Extent, block: Extent, shared_bytes: int, stream: int, dependent: bool) -> Any:
        self._allow_shared(shared_bytes)
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = _extent(grid)
        config.blockDimX, config.blockDimY, config.blockDimZ = _extent(block)
        config.sharedMemBytes = shared_bytes
        config.hStream = driver.CUstream(stream)
        if dependent:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            value = driver.CUlaunchAttributeValue()
            value.programmaticStreamSerializationAllowed = 1
            attribute.value = value
            config.attrs = [attribute]
            config.numAttrs = 1
        with self._lock:
            if len(self._configs) >= _MOST_CONFIGS:
                self._configs.clear()
            self._configs[grid, block, shared_bytes, stream, dependent] = config
        return config


def _extent(extent: Extent) -> tuple[int, int, int]:
    sizes = (extent,) if isinstance(extent, int) else extent
    x, y, z = (*sizes, 1, 1, 1)[:3]
    if len(sizes) > 3 or min(x, y, z) < 1:
        raise KernelError(f"a grid or block has one to three positive sizes, got {extent}")
    return x, y, z


def _packing(parameters: str, name: str) -> tuple[struct.Struct, tuple[int, ...], tuple[int, ...]]:
    """How arguments are packed: the format, where each parameter begins in it, and its size."""
    words = parameters.split()
    offsets: list[int] = []
    sizes: list[int] = []
    packed = "@"
    try:
        for word in words:
            packed += "0q"  # every parameter begins on 8 bytes
            offsets.append(struct.calcsize(packed))
            # A struct is as long as a multiple of its widest member.
            widest = max((x for x in word if x.isalpha()), key=struct.calcsize)
            sizes.append(struct.calcsize(f"@{word}0{widest}"))
            packed += word
        return struct.Struct(packed), tuple(offsets), tuple(sizes)
    except (struct.error, ValueError) as error:
        raise KernelError(f"{parameters!r} are no parameters for kernel {name}: {error}") from error


def load_kernel(
    source: str, name: str, parameters: str, *, device: torch.device, defines: Defines = _NO_DEFINES
) -> Kernel:
    """A kernel of a source on a device, compiled and loaded when it is first asked for.

    Args:
        source: the name of a file beside this one, such as ``decode.cu``.
        name: the kernel, declared ``extern "C" __global__``.
        parameters: one word for each of its parameters, in `struct`'s letters: ``Q`` a pointer, ``q``, ``i``
            and ``I`` integers of 64 and 32 bits, ``f`` a float; several letters, or ``100s`` for 100 bytes as
            they are, for a struct passed by value. They are held against the compiled kernel's.
        device: a CUDA device.
        defines: preprocessor macros.

    Raises:
        ConfigError: no driver answers, or cuda-python is not installed.
        KernelError: the source does not compile, is not for this device, or has no such kernel.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return _load_kernel(source, name, parameters, tuple(sorted(defines.items())), index)


@cache
def _load_kernel(
    source: str, name: str, parameters: str, defines: tuple[tuple[str, int | str], ...], index: int
) -> Kernel:
    device = torch.device("cuda", index)
    cuda_driver()
    arch = arch_of(device)
    oldest = _architectures(source, _read(source, _FOLDER))[0]
    if _capability(arch) < _capability(oldest):
        raise KernelError(f"{source} runs on {oldest} and later, and {device} is {arch}")
    return Kernel(compile_cubin(source, arch=arch, defines=dict(defines)), name, parameters, device)


def _capability(arch: str) -> tuple[int, int]:
    match = _ARCH.fullmatch(arch)
    if match is None:
        raise KernelError(f"{arch!r} is no architecture such as sm_86 or sm_90a")
    return int(match[1]), int(match[2])
