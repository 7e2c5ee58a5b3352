"""The pinned arena: host memory in equal extents, page-locked and mapped for the GPU where there is one.

The arena is one shared mapping, so that other processes can map the same memory by its descriptor. A
background thread brings its extents to life one by one: ``fallocate`` first, so that memory is really there
before it is handed out and a shortage is an error and never a SIGBUS; then ``cuMemHostRegister``, which costs
0.57 s per GiB and must therefore never stand before the first request. An extent may be taken as soon as its
memory is there.

Sources: Linux manual pages memfd_create(2), fallocate(2), madvise(2).
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .driver import device_ordinal, find_device
from .errors import (
    ClosedError,
    ConfigError,
    IntegrityError,
    KVPagerError,
    MemoryUnavailableError,
)
from .mapping import SharedMapping
from .memory import format_bytes, memory_headroom
from .page_locker import MEMLOCK_ADVICE, PageLocker
from .settings import (
    MOST_BYTES,
    expect_flag,
    expect_integer,
    expect_path,
    expect_seconds,
    expect_text,
    expect_type,
    shown,
)

__all__ = ["LARGEST_EXTENT", "PinnedArena", "PinnedStats", "arena_sizes", "capacity_for"]

_log = logging.getLogger(__name__)

_PAGE: Final = mmap.PAGESIZE
_SMALLEST_EXTENT: Final = 4 << 20
LARGEST_EXTENT: Final = 256 << 20
"""Bytes of the largest extent that an arena makes by itself."""
_USUAL_EXTENTS: Final = 16
_SHORTAGE_PAUSE: Final = 2.0
"""Seconds between looks for memory while there is too little for the next extent."""

_ABSENT: Final = 0
_READY: Final = 1
_TAKEN: Final = 2


@dataclass(frozen=True)
class PinnedStats:
    """How far the arena has grown, in bytes."""

    capacity_bytes: int
    """What it grows to."""
    ready_bytes: int
    """Memory that is there."""
    page_locked_bytes: int
    """Memory that the GPU may read in place."""
    taken_bytes: int
    """Memory of extents that somebody has taken."""


class PinnedArena:
    """Host memory in equal extents, which somebody takes, cuts into slots, and gives back when empty.

    All methods may be called from several threads. `close` must be called (or the arena used as a context
    manager): the background thread keeps an open arena alive.

    Args:
        capacity_bytes: bytes that the arena grows to; rounded down to whole extents.
        extent_bytes: bytes of an extent, a multiple of the page size (4 KiB). None: the power of two between
            4 MiB and 256 MiB that makes at least 16 extents, where one does.
        name: path of a file that holds the arena (in ``/dev/shm``, or on a hugetlbfs or tmpfs mount), so that
            its bytes outlive this process. It is made if it is not there, taken as it is if it is, and locked
            against a second owner. None: memory without a name, which goes with its last descriptor.
        file: an open file to hold the arena in place of a name, which its owner has locked and closes
            (`ArenaFile`).
        taken: extents of it that somebody has taken already, and whose memory is there.
        device: ``cuda`` or ``cuda:N`` to page-lock the extents for; None or ``cpu``: none.
        page_lock: False leaves the extents unregistered even where there is a device.

    Raises:
        ConfigError: a value is out of range, the file has another size or another owner, or extents are to be
            page-locked for a device that is not there.
        MemoryUnavailableError: there is less memory than that, as far as it can be known beforehand; the
            message names ``host_bytes`` and what there is.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        extent_bytes: int | None = None,
        name: str | os.PathLike[str] | None = None,
        file: io.FileIO | None = None,
        taken: Sequence[int] = (),
        device: str | None = None,
        page_lock: bool = True,
    ) -> None:
        self.capacity_bytes, self.extent_bytes = arena_sizes(capacity_bytes, extent_bytes)
        """Bytes that the arena grows to, and bytes of an extent."""
        self.num_extents = self.capacity_bytes // self.extent_bytes
        """Extents that the arena grows to."""
        page_lock = expect_flag("page_lock", page_lock)
        ordinal = None
        if device is not None and expect_text("device", device) != "cpu":
            # Who names a GPU wants it: without one, blocks would go by copies for ever.
            ordinal = find_device(device) if page_lock else device_ordinal(device)
        if not isinstance(taken, Sequence):
            raise ConfigError("taken", f"must be a list of extents, got {shown(taken)}")
        self._inherited = frozenset(expect_integer("taken", one, 0, self.num_extents - 1) for one in taken)
        self._lent = file is not None
        if file is not None:
            expect_type("file", file, io.FileIO, "an open file")
        else:
            file = _open_file(None if name is None else expect_path("name", name))
        self._file = self._passed = file
        try:
            _give_length(file, self.capacity_bytes, name)
            self._adopted = os.fstat(file.fileno()).st_blocks * 512 >= self.capacity_bytes
            if self._lent or name is not None:
                # The lock goes with an open file. Who is passed this one must not have it, or keep it.
                self._passed = io.FileIO(
                    os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR | os.O_CLOEXEC), "r+"
                )
            self._mapping = SharedMapping(file.fileno(), self.capacity_bytes)
        except BaseException:
            self._close_files()
            raise
        self.base = self._mapping.base
        """Address of the first extent in this process; a multiple of 2 MiB."""
        self._bytes: memoryview | None = self._mapping.bytes()
        self._state = np.zeros(self.num_extents, np.uint8)
        self._state[list(self._inherited)] = _TAKEN
        self._page_locked = np.zeros(self.num_extents, np.bool_)
        self._device_delta = 0
        self._changed = threading.Condition()
        self._closing = False
        self._settled = False  # every extent is ready, and page-locked as far as it will be
        self._stopped = False  # the background thread adds no more
        self._shortage: MemoryUnavailableError | None = None
        self._thread = threading.Thread(
            target=self._grow, args=(ordinal if page_lock else None,), name="pinned-arena", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> PinnedArena:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def fd(self) -> int:
        """Descriptor of the memory, for another process to map. It does not carry the lock of a named one.

        Raises:
            ClosedError: after `close`.
        """
        self._memory()
        return self._passed.fileno()

    @property
    def device_delta(self) -> int:
        """Device address less host address of the page-locked extents, bytes; 0 under unified addressing."""
        return self._device_delta

    @property
    def ready_extents(self) -> int:
        """Extents whose memory is there, taken ones included."""
        with self._changed:
            return int(np.count_nonzero(self._state))

    def stats(self) -> PinnedStats:
        """How far the arena has grown, as of now."""
        with self._changed:
            return PinnedStats(
                capacity_bytes=self.capacity_bytes,
                ready_bytes=int(np.count_nonzero(self._state)) * self.extent_bytes,
                page_locked_bytes=int(np.count_nonzero(self._page_locked)) * self.extent_bytes,
                taken_bytes=int(np.count_nonzero(self._state == _TAKEN)) * self.extent_bytes,
            )

    def take_extent(self, timeout: float = 0.0) -> int | None:
        """Take an extent whose memory is there: its number, page-locked ones first, then the lowest.

        Args:
            timeout: seconds to wait for one that is being made or given back.

        Returns:
            The number, or None where there is none in that time.

        Raises:
            ClosedError: after `close`.
            ConfigError: ``timeout`` is no number of seconds.
        """
        timeout = expect_seconds("timeout", timeout)
        with self._changed:
            self._memory()
            self._changed.wait_for(lambda: self._closing or (self._state == _READY).any(), timeout)
            self._memory()
            free = self._state == _READY
            locked = free & self._page_locked
            if locked.any():
                free = locked
            extent = int(free.argmax())
            if not free[extent]:
                return None
            self._state[extent] = _TAKEN
            return extent

    def give_extent(self, extent: int) -> None:
        """Give back an extent that was taken. Its bytes are no longer the caller's, nor any mover's.

        Raises:
            ClosedError: after `close`.
            ConfigError: there is no such extent.
            IntegrityError: it is not taken.
        """
        extent = expect_integer("extent", extent, 0, self.num_extents - 1)
        with self._changed:
            self._memory()
            if self._state[extent] != _TAKEN:
                raise IntegrityError(f"extent {extent} was given back but nobody had taken it")
            self._state[extent] = _READY
            self._changed.notify_all()

    def is_page_locked(self, extents: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.bool_]:
        """Which of ``extents`` (integers [n]) the GPU may read and write in place: bool [n].

        Raises:
            ConfigError: there is no such extent.
        """
        try:
            locked: npt.NDArray[np.bool_] = self._page_locked[extents]
        except IndexError as error:
            raise ConfigError("extents", f"must be integers from 0 to {self.num_extents - 1}") from error
        return locked

    def extent_view(self, extent: int) -> memoryview:
        """The bytes of an extent, writable.

        Raises:
            ClosedError: after `close`.
            ConfigError: there is no such extent.
        """
        extent = expect_integer("extent", extent, 0, self.num_extents - 1)
        return self.view(extent * self.extent_bytes, self.extent_bytes)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """``nbytes`` bytes from ``offset`` on, writable; only of extents that are ready.

        A view, and what is made of it (``numpy.frombuffer``), stays good after `close`: the memory is
        unmapped when the last one is gone. Raw addresses do not keep it.

        Raises:
            ClosedError: after `close`.
            ConfigError: the range is not inside the arena.
        """
        memory = self._memory()
        offset = expect_integer("offset", offset, 0, self.capacity_bytes)
        nbytes = expect_integer("nbytes", nbytes, 0, self.capacity_bytes - offset)
        return memory[offset : offset + nbytes]

    def wait_ready(self, n: int | None = None, timeout: float | None = None) -> bool:
        """Wait until ``n`` extents are ready; None: all, and page-locked as far as they will be.

        Args:
            n: extents, taken ones included.
            timeout: seconds; None waits as long as it takes.

        Returns:
            Whether that was so within the time.

        Raises:
            ClosedError: the arena is or was closed.
            ConfigError: the arena has fewer than ``n`` extents; ``timeout`` is no number of seconds.
            MemoryUnavailableError: there is no memory for the next extent now.
        """
        n = None if n is None else expect_integer("n", n, 0, self.num_extents)
        timeout = None if timeout is None else expect_seconds("timeout", timeout)

        def enough() -> bool:
            return self._settled if n is None else int(np.count_nonzero(self._state)) >= n

        with self._changed:
            self._memory()
            self._changed.wait_for(
                lambda: enough() or self._closing or self._stopped or self._shortage is not None, timeout
            )
            if enough():
                return True
            self._memory()
            if self._shortage is not None:
                raise self._shortage
            if self._stopped:
                raise MemoryUnavailableError(
                    f"host_bytes: the arena stopped growing at {np.count_nonzero(self._state)} "
                    f"of {self.num_extents} extents by an error that was reported when it happened"
                )
            return False

    @property
    def shortage(self) -> str | None:
        """Why the arena does not grow though it is smaller than it was to be; None where all is well."""
        with self._changed:
            if self._closing or np.count_nonzero(self._state) == self.num_extents:
                return None
            if self._shortage is not None:
                return str(self._shortage)
            return "the arena stopped growing by an error that its log tells of" if self._stopped else None

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless extents are in known states, with memory behind the ready ones."""
        with self._changed:
            self._memory()
            state = self._state.copy()
            locked = self._page_locked.copy()
        if (state > _TAKEN).any():
            raise IntegrityError("an extent is in no known state")
        if (locked & (state == _ABSENT)).any():
            raise IntegrityError("an extent is page-locked but its memory is not there")
        status = os.fstat(self._file.fileno())
        if status.st_size != self.capacity_bytes:
            raise IntegrityError(f"the arena is {self.capacity_bytes} bytes but its file {status.st_size}")
        if status.st_blocks * 512 < np.count_nonzero(state) * self.extent_bytes:
            raise IntegrityError("the arena's file holds fewer bytes than the extents that are ready")

    def close(self) -> None:
        """Stop growing, unlock the pages and let go of the memory. Idempotent.

        No copy or kernel may still be using the arena, nor anybody its raw addresses. Views stay good (see
        `view`).
        """
        with self._changed:
            if self._bytes is None:
                return
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        with self._changed:
            self._bytes = None
            self._mapping.release()
            self._close_files()

    def _close_files(self) -> None:
        if self._passed is not self._file:
            self._passed.close()
        if not self._lent and not self._file.closed:
            # Not by closing alone: a view that is left holds the open file, and with it the lock.
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()

    def _memory(self) -> memoryview:
        memory = self._bytes
        if memory is None or self._closing:
            raise ClosedError("the pinned arena was closed")
        return memory

    # ---- in the background thread ----

    def _grow(self, ordinal: int | None) -> None:
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self._stop)
            locker = None
            for extent in range(self.num_extents):
                # What another process left is there; faulting it in would hold up the first requests.
                inherited = extent in self._inherited
                if not inherited and not self._allocate(extent):
                    return
                # After the first extent, since making a CUDA context takes a good part of a second.
                if extent == 0 and ordinal is not None:
                    locker = _open_locker(ordinal)
                    if locker is not None:
                        cleanup.callback(self._unlock_all, locker)
                if locker is not None and not self._lock(locker, extent):
                    locker = None
                if locker is None and not inherited:
                    self._mapping.populate(extent * self.extent_bytes, self.extent_bytes)
            with self._changed:
                self._settled = True
                self._changed.notify_all()
                # What was registered is unregistered here, where the context is current.
                if self._page_locked.any():
                    self._changed.wait_for(lambda: self._closing)

    def _unlock_all(self, locker: PageLocker) -> None:
        with self._changed:
            self._page_locked[:] = False
        locker.close()

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _allocate(self, extent: int) -> bool:
        """Have the memory of an extent made; False when the arena is being closed."""
        while True:
            if self._closing:
                return False
            shortage = self._try_allocate(extent)
            with self._changed:
                if shortage is None:
                    self._shortage = None
                    self._state[extent] = _READY
                    self._changed.notify_all()
                    return True
                if self._shortage is None:
                    _log.warning("%s", shortage)
                self._shortage = shortage
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closing, _SHORTAGE_PAUSE)

    def _try_allocate(self, extent: int) -> MemoryUnavailableError | None:
        headroom = memory_headroom()
        if self._adopted or headroom.usable_bytes >= self.extent_bytes:
            try:
                os.posix_fallocate(self._file.fileno(), extent * self.extent_bytes, self.extent_bytes)
                return None
            except OSError as error:
                reason = f"the kernel refuses it ({error.strerror})"
        else:
            reason = f"only {format_bytes(headroom.usable_bytes)} is {headroom.limit}"
        return MemoryUnavailableError(
            f"host_bytes: the arena stays at {format_bytes(extent * self.extent_bytes)} of "
            f"{format_bytes(self.capacity_bytes)} for now: the next extent needs "
            f"{format_bytes(self.extent_bytes)}, and {reason}"
        )

    def _lock(self, locker: PageLocker, extent: int) -> bool:
        """Page-lock an extent; False when no more shall be tried."""
        address = self.base + extent * self.extent_bytes
        try:
            delta = locker.lock(address, self.extent_bytes)
        except KVPagerError as error:
            _log.warning(
                "host memory stays unregistered from %s on (%s): its blocks go to the GPU by slower copies; "
                "%s",
                format_bytes(extent * self.extent_bytes),
                error,
                MEMLOCK_ADVICE,
            )
            return False
        with self._changed:
            if extent and delta != self._device_delta:
                different = True
            else:
                different = False
                self._device_delta = delta
                self._page_locked[extent] = True
                self._changed.notify_all()
        if different:
            locker.unlock(address)
            _log.warning("extent %d has another device address than the first; it stays unregistered", extent)
        return True


def _open_locker(ordinal: int) -> PageLocker | None:
    """None, with the reason logged, where the device's context cannot be had."""
    try:
        return PageLocker(ordinal)
    except KVPagerError as error:
        _log.warning("host memory is not page-locked: %s", error)
        return None


def _extent_bytes(capacity: int, extent: int | None) -> int:
    if capacity < _PAGE:
        raise ConfigError("host_bytes", f"must be at least one page of {_PAGE} bytes, got {capacity}")
    if extent is None:
        wanted = 1 << max(0, (capacity // _USUAL_EXTENTS).bit_length() - 1)
        most = 1 << (capacity.bit_length() - 1)
        return min(max(wanted, _SMALLEST_EXTENT), LARGEST_EXTENT, most)
    extent = expect_integer("extent_bytes", extent, _PAGE, MOST_BYTES)
    if extent % _PAGE:
        raise ConfigError("extent_bytes", f"must be a positive multiple of {_PAGE}, got {extent}")
    if extent > capacity:
        raise ConfigError("extent_bytes", f"{extent} is more than host_bytes, {capacity}")
    return extent


def capacity_for(nbytes: int) -> int:
    """Bytes of an arena from which on it makes extents of at least ``nbytes`` by itself.

    For no more than `LARGEST_EXTENT`: larger ones it never makes.
    """
    extent = 1 << max(_PAGE - 1, nbytes - 1).bit_length()
    return extent if extent <= _SMALLEST_EXTENT else extent * _USUAL_EXTENTS


def arena_sizes(capacity_bytes: int, extent_bytes: int | None) -> tuple[int, int]:
    """Bytes that an arena of these settings grows to, and bytes of its extents.

    Raises:
        ConfigError: a value is out of range.
    """
    capacity_bytes = expect_integer("host_bytes", capacity_bytes, 1, MOST_BYTES)
    extent = _extent_bytes(capacity_bytes, extent_bytes)
    return capacity_bytes // extent * extent, extent


def _open_file(name: str | None) -> io.FileIO:
    """The file behind the arena, its owner's lock held."""
    if name is None:
        return io.FileIO(os.memfd_create("kvpager-arena", os.MFD_CLOEXEC), "r+")
    try:
        file = io.FileIO(os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+")
    except OSError as error:
        raise ConfigError("name", f"{name} cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ConfigError("name", f"{name} is another process's arena") from error
    return file


def _give_length(file: io.FileIO, nbytes: int, name: str | os.PathLike[str] | None) -> None:
    """Have the file ``nbytes`` long, its room checked where known."""
    status = os.fstat(file.fileno())
    if status.st_size not in (0, nbytes):
        # Somebody's blocks may be in it: never cut or grown.
        raise ConfigError(
            "host_bytes",
            f"{name or ''} is an arena of {status.st_size} bytes, not of {nbytes}",
        )
    _check_room(file.fileno(), nbytes, status.st_blocks * 512)
    try:
        os.ftruncate(file.fileno(), nbytes)
    except OSError as error:  # RLIMIT_FSIZE
        raise MemoryUnavailableError(
            f"host_bytes: the arena was to be {format_bytes(nbytes)}, but files of that size are "
            f"not allowed ({error.strerror})"
        ) from error


def _check_room(fd: int, nbytes: int, held: int) -> None:
    """Refuse an arena that cannot come to its full size; ``held`` of its bytes are there already."""
    headroom = memory_headroom()
    bounds: list[tuple[int, str]] = [(headroom.usable_bytes, headroom.limit)]
    room = _file_room(fd)
    if room is not None:
        bounds.append(
            (
                room,
                "free in the file system of the arena (docker run --shm-size; --arena)",
            )
        )
    free, what = min(bounds)
    if nbytes - held > free:
        raise MemoryUnavailableError(
            f"host_bytes: an arena of {format_bytes(nbytes)} was asked for, "
            f"but only {format_bytes(free)} is {what}"
        )


def _file_room(fd: int) -> int | None:
    """Bytes free in the file system of a named arena; None where it has no bound of its own (memfd)."""
    status = os.fstatvfs(fd)
    return status.f_bavail * status.f_frsize if status.f_blocks else None
