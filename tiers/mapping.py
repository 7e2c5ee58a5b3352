"""A shared mapping of an arena's file: in the process that owns it, and in those that it is passed to."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Final

from .errors import ClosedError, MemoryUnavailableError
from .memory import format_bytes

__all__ = ["SharedMapping"]

_PAGE: Final = mmap.PAGESIZE
_HUGE_PAGE: Final = 2 << 20
_MADV_POPULATE_WRITE: Final = 23
_MAP_FIXED: Final = 0x10
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


class SharedMapping:
    """A shared, writable mapping at a multiple of 2 MiB, which lasts until the last view of it is gone.

    The descriptor may be closed once it is made.

    Args:
        fd: the file.
        nbytes: how much of it; it must be that long, or what reads beyond its end dies.
        offset: where in the file, a multiple of the page size.

    Attributes:
        base: address of the first byte in this process.

    Raises:
        MemoryUnavailableError: there is no address space for it.
    """

    def __init__(self, fd: int, nbytes: int, offset: int = 0) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_long,
        )
        libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        # Address space for one huge page more, then the file over its aligned part.
        spare = nbytes + _HUGE_PAGE
        reserved = libc.mmap(None, spare, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if reserved == _MAP_FAILED:
            raise _no_address_space(nbytes)
        base = -(-reserved // _HUGE_PAGE) * _HUGE_PAGE
        access = mmap.PROT_READ | mmap.PROT_WRITE
        if libc.mmap(base, nbytes, access, mmap.MAP_SHARED | _MAP_FIXED, fd, offset) == _MAP_FAILED:
            error = _no_address_space(nbytes)
            libc.munmap(reserved, spare)
            raise error
        end = -(-(base + nbytes) // _PAGE) * _PAGE
        if base > reserved:
            libc.munmap(reserved, base - reserved)
        libc.munmap(end, reserved + spare - end)
        # Fewer page faults and TLB misses where shared memory may have huge pages; where not, this says no.
        libc.madvise(base, nbytes, mmap.MADV_HUGEPAGE)
        self._libc = libc
        self.base = base
        array = (ctypes.c_ubyte * nbytes).from_address(base)
        weakref.finalize(array, libc.munmap, base, nbytes).atexit = False
        self._array: ctypes.Array[ctypes.c_ubyte] | None = array

    def bytes(self) -> memoryview:
        """All of it, writable. Slices keep the mapping."""
        if self._array is None:
            raise ClosedError("the mapping was released")
        return memoryview(self._array).cast("B")

    def release(self) -> None:
        """Unmap it as soon as no view is left."""
        self._array = None

    def is_present(self, offset: int, nbytes: int) -> bool:
        """Whether the file has the first page and the last one, so that `populate` would make nothing new.

        Of a file of another user's the kernel says yes in any case.

        Args:
            offset: a multiple of the page size.
        """
        flag = ctypes.c_ubyte()
        for page in (offset, (offset + nbytes - 1) // _PAGE * _PAGE):
            if self._libc.mincore(self.base + page, _PAGE, ctypes.byref(flag)) or not flag.value & 1:
                return False
        return True

    def populate(self, offset: int, nbytes: int) -> None:
        """Fault the pages in, so that no request does. Linux before 5.14 cannot, and says no."""
        self._libc.madvise(self.base + offset, nbytes, _MADV_POPULATE_WRITE)


def _no_address_space(nbytes: int) -> MemoryUnavailableError:
    return MemoryUnavailableError(
        f"host_bytes: an arena of {format_bytes(nbytes)} was asked for, but it cannot be mapped "
        f"({os.strerror(ctypes.get_errno())}; see ulimit -v)"
    )
