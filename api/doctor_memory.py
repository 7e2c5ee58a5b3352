"""What `kvpager doctor` says of host memory: how much, in which file, locked, and in pages of which size.

Sources: Linux manual pages proc(5), tmpfs(5), getrlimit(2), mlock(2); the kernel's admin-guide/mm/transhuge.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import resource
from pathlib import Path
from typing import Final

from ..tiers.errors import KVPagerError, MemoryUnavailableError
from ..tiers.mapping import SharedMapping
from ..tiers.memory import format_bytes, memory_limits
from ..tiers.page_locker import MEMLOCK_ADVICE, PageLocker
from .findings import Finding, ok, problem, warning

__all__ = ["check_huge_pages", "check_memory", "check_page_lock", "check_shared_memory", "memlock_limit"]

_CHUNK: Final = 64 << 20
"""Bytes of the trial of page-locking: what a small limit on locked memory does not let through."""
_SHARED_MEMORY: Final = Path("/dev/shm")
_PROC: Final = Path("/proc")
_CGROUP: Final = Path("/sys/fs/cgroup")
_SYS: Final = Path("/sys")
_UNKNOWN: Final = "an unknown file system"
_SHMEM_HUGE: Final = "kernel/mm/transparent_hugepage/shmem_enabled"


def check_memory(
    host_bytes: int, *, held_bytes: int = 0, proc: Path = _PROC, cgroup: Path = _CGROUP
) -> Finding:
    """Whether there is as much memory as is to be given, under every limit of this process.

    Args:
        host_bytes: what is to be given.
        held_bytes: what arenas that are there have of it already.
        proc, cgroup: where procfs and the control groups are mounted.
    """
    limits = memory_limits(proc, cgroup)
    usable = limits[0].usable_bytes
    listed = ", ".join(f"{format_bytes(one.free_bytes)} {one.limit}" for one in limits)
    found = f"an arena may take {format_bytes(usable)}: {listed}"
    if len(limits) == 1:
        found += "; no control group limits it"
    if host_bytes > usable + held_bytes:
        return problem(
            "memory",
            f"{found}; {format_bytes(host_bytes)} is to be given",
            "give less (--host-bytes), or raise what binds: docker run --memory, MemoryMax=, "
            "resources.limits.memory",
        )
    return ok("memory", found)


def check_shared_memory(
    host_bytes: int, *, held_bytes: int = 0, folder: Path = _SHARED_MEMORY, proc: Path = _PROC
) -> Finding:
    """Whether the arena's file has room.

    Args:
        host_bytes: what is to be given.
        held_bytes: what arenas that are there have of it already.
        folder: where it lies.
        proc: where procfs is mounted.
    """
    name = str(folder)
    if not folder.is_dir():
        return problem(
            name,
            "is no folder" if folder.exists() else "is not there",
            "give the folder of the arenas (--shm), or have a tmpfs mounted there",
        )
    status = os.statvfs(folder)
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    kind, _ = _mount_of(folder, proc)
    found = f"{kind} of {format_bytes(size)}, {format_bytes(free)} free"
    if not os.access(folder, os.W_OK | os.X_OK) or status.f_flag & os.ST_RDONLY:
        return problem(
            name,
            f"{found}, and nothing can be written there",
            "let this user write there, or put the arena elsewhere (kvpager serve --arena PATH)",
        )
    if free + held_bytes < host_bytes:
        larger = (
            f"mount -o remount,size=SIZE {folder}; in a container docker run --shm-size=SIZE, or an emptyDir "
            f"with medium Memory at {folder}"
            if kind in ("tmpfs", _UNKNOWN)
            else "free some"
        )
        return problem(
            name,
            f"{found}; {format_bytes(host_bytes)} is to be given",
            f"{larger}; or put the arena elsewhere (kvpager serve --arena PATH), or give less (--host-bytes)",
        )
    if kind not in ("tmpfs", "ramfs", "hugetlbfs", _UNKNOWN):
        return warning(name, f"{found}: blocks are written to a disk in the end", "put the arena on a tmpfs")
    return ok(name, found)


def memlock_limit() -> int | None:
    """Bytes that this process may lock; None for no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def check_page_lock(limit: int | None, *, gpu: int | None = None, nbytes: int = _CHUNK) -> Finding:
    """The limit on locked memory, and whether a chunk can be locked: by the GPU's driver where there is one.

    Args:
        limit: as `memlock_limit` gives it.
        gpu: the N of the ``cuda:N`` to lock it for; None: the kernel locks it.
        nbytes: of the chunk.
    """
    found = "no limit on locked memory" if limit is None else f"limit on locked memory {format_bytes(limit)}"
    chunk = format_bytes(nbytes)
    who = "the kernel" if gpu is None else f"the driver, for cuda:{gpu},"
    try:
        _lock_chunk(nbytes, gpu)
    except KVPagerError as error:
        if gpu is None:
            # Nothing here needs it.
            return ok(
                "page-locking",
                f"{found}; {who} does not lock {chunk} ({error})",
                MEMLOCK_ADVICE + " for a GPU",
            )
        return problem("page-locking", f"{found}; {who} does not lock {chunk} ({error})", MEMLOCK_ADVICE)
    return ok("page-locking", f"{found}; {who} locked a chunk of {chunk}")


def _lock_chunk(nbytes: int, gpu: int | None) -> None:
    """Lock a chunk of memory, and let it go.

    Raises:
        KVPagerError: it cannot be locked.
    """
    fd = os.memfd_create("kvpager-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        mapping = SharedMapping(fd, nbytes)
    finally:
        os.close(fd)
    try:
        if gpu is not None:
            locker = PageLocker(gpu)
            try:
                locker.lock(mapping.base, nbytes)
            finally:
                locker.close()
            return
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mlock.argtypes = libc.munlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        if libc.mlock(mapping.base, nbytes):
            raise MemoryUnavailableError(os.strerror(ctypes.get_errno()))
        libc.munlock(mapping.base, nbytes)
    finally:
        mapping.release()


def check_huge_pages(*, folder: Path = _SHARED_MEMORY, sys: Path = _SYS, proc: Path = _PROC) -> Finding:
    """Whether the arena may have huge pages: a file goes by its mount, and the kernel may overrule that.

    Args:
        folder: where the arena's file lies.
        sys, proc: where sysfs and procfs are mounted.
    """
    if not folder.is_dir():
        return warning(
            "huge pages", f"cannot be known: {folder} is no folder", "give the folder of the arenas (--shm)"
        )
    kind, options = _mount_of(folder, proc)
    by_mount = next((one.partition("=")[2] for one in options if one.startswith("huge=")), "never")
    if kind == "hugetlbfs":
        return ok("huge pages", f"{folder} is a hugetlbfs")
    try:
        text = (sys / _SHMEM_HUGE).read_text()
    except OSError:
        return ok(
            "huge pages", "this kernel has no transparent huge pages for shared memory, or does not tell"
        )
    if kind != "tmpfs":
        # Only a tmpfs has the option, and nothing is gained by it elsewhere.
        return ok("huge pages", f"{folder} is on {kind}: they are for arenas on a tmpfs or hugetlbfs")
    chosen = re.search(r"\[(\w+)\]", text)
    by_kernel = chosen[1] if chosen else text.strip()
    found = f"{folder} is mounted with huge={by_mount}, and shmem_enabled is {by_kernel}"
    if by_kernel == "force" or (by_kernel != "deny" and by_mount != "never"):
        return ok("huge pages", found)
    advice = (
        f"pages of {mmap.PAGESIZE >> 10} KiB cost page faults and page-locking time; as root: "
        f"mount -o remount,huge=advise {folder}"
    )
    if by_kernel == "deny":
        advice += f"; echo advise > {sys / _SHMEM_HUGE}"
    return warning("huge pages", found, advice)


def _mount_of(path: Path, proc: Path) -> tuple[str, list[str]]:
    """File system type and options of the mount that a path is on."""
    try:
        lines = (proc / "self" / "mountinfo").read_text().splitlines()
    except OSError:
        return _UNKNOWN, []
    real = path.resolve()
    best: tuple[int, str, list[str]] = (-1, _UNKNOWN, [])
    for line in lines:
        before, _, after = line.partition(" - ")
        point = Path(before.split()[4].encode().decode("unicode_escape"))
        kind, _, options = after.split(" ", 2)
        # Of two mounts on one place the later one is seen.
        if (real == point or point in real.parents) and len(point.parts) >= best[0]:
            best = (len(point.parts), kind, [*before.split()[5].split(","), *options.split(",")])
    return best[1], best[2]
