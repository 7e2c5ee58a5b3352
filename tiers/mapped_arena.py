"""An arena that another process owns, page-locked and mapped for this process's GPU, extent by extent.

The owner brings extents to life one after another (`PinnedArena`). Page-locking one before would take memory
behind the owner's back. So one is locked when all of its pages are seen to be there, or when the owner has
granted a slot in it, which it does not do before.
Sources: Linux manual page mincore(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import threading
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .driver import find_device
from .errors import ConfigError, KVPagerError
from .memory import format_bytes
from .page_locker import MEMLOCK_ADVICE, PageLocker
from .settings import expect_seconds

__all__ = ["MappedArena", "pages_are_there"]

_log = logging.getLogger(__name__)

_PAUSE: Final = 0.25
"""Seconds between looks for extents that the owner is still making."""


def pages_are_there(address: int, nbytes: int) -> bool:
    """Whether all pages of a mapped range are in memory, and were ever written or read.

    Args:
        address: of the first, a multiple of the page size.
        nbytes: length of the range.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    there = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
    return libc.mincore(address, nbytes, there.ctypes.data) == 0 and bool((there & 1).all())


class MappedArena:
    """Page-locks an arena's extents in a thread of its own, until `close`.

    Args:
        memory: the arena's bytes, a multiple of ``extent_bytes``. They are kept until nothing is locked.
        base: address of the first.
        extent_bytes: bytes of an extent, a multiple of the page size.
        device: ``cuda`` or ``cuda:N``.

    Raises:
        ConfigError: no CUDA driver answers, cuda-python is not installed, or ``device`` is no GPU of this
            machine.
    """

    def __init__(self, memory: memoryview, base: int, extent_bytes: int, device: str) -> None:
        ordinal = find_device(device)
        self.device = f"cuda:{ordinal}"
        """The GPU."""
        self.device_delta = 0
        """Device address less host address of what is locked, bytes; 0 under unified addressing."""
        self._memory = memory
        self._base = base
        self._extent_bytes = extent_bytes
        self._locked = np.zeros(memory.nbytes // extent_bytes, np.bool_)
        self._granted = np.zeros(len(self._locked), np.bool_)
        self._changed = threading.Condition()
        self._closing = False
        self._settled = False
        self._thread = threading.Thread(
            target=self._run, args=(ordinal,), name="kvpager-map-device", daemon=True
        )
        self._thread.start()

    def is_page_locked(self, extents: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.bool_]:
        """Which of ``extents`` (integers [n]) the GPU may read and write in place: bool [n].

        They are extents in which slots are held; those that are not locked yet come next.

        Raises:
            ConfigError: there is no such extent.
        """
        try:
            self._granted[extents] = True
            locked: npt.NDArray[np.bool_] = self._locked[extents]
        except IndexError as error:
            raise ConfigError("extents", f"must be integers from 0 to {len(self._locked) - 1}") from error
        return locked

    @property
    def page_locked_bytes(self) -> int:
        """Memory that the GPU may read in place."""
        return int(np.count_nonzero(self._locked)) * self._extent_bytes

    def wait_mapped(self, timeout: float) -> bool:
        """Wait until every extent is page-locked, or as many as will be; returns whether that is so."""
        timeout = expect_seconds("timeout", timeout)
        with self._changed:
            self._changed.wait_for(lambda: self._settled or self._closing, timeout)
            return self._settled

    def close(self, *, wait: bool = True) -> None:
        """Take the page-locking back. Idempotent. No copy or kernel may still be using the arena.

        Args:
            wait: until that is done, 0.5 s a GiB; False leaves it to the thread.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if wait:
            self._thread.join()

    # In the thread

    def _run(self, ordinal: int) -> None:
        try:
            with contextlib.closing(PageLocker(ordinal)) as locker:
                try:
                    self._lock_all(locker)
                    with self._changed:
                        self._settled = True
                        self._changed.notify_all()
                        self._changed.wait_for(lambda: self._closing)
                finally:
                    self._locked[:] = False
        except KVPagerError as error:
            _log.warning("the sidecar's memory is not page-locked: %s", error)
        with self._changed:
            self._settled = True
            self._changed.notify_all()

    def _lock_all(self, locker: PageLocker) -> None:
        """Lock extents as they come to be there; returns when no more are to be tried."""
        waiting = list(range(len(self._locked)))
        while waiting and not self._is_closing():
            absent = []
            for extent in waiting:
                if self._is_closing():
                    return
                address = self._base + extent * self._extent_bytes
                if not (self._granted[extent] or pages_are_there(address, self._extent_bytes)):
                    absent.append(extent)
                elif not self._lock(locker, extent):
                    return
            waiting = absent
            if waiting:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, _PAUSE)

    def _is_closing(self) -> bool:
        return self._closing

    def _lock(self, locker: PageLocker, extent: int) -> bool:
        """Page-lock an extent; False when no more shall be tried."""
        address = self._base + extent * self._extent_bytes
        try:
            delta = locker.lock(address, self._extent_bytes)
        except KVPagerError as error:
            _log.warning(
                "extent %d of the sidecar's memory (%s) is not page-locked, nor are those that would follow "
                "(%s): their blocks go to the GPU by slower copies; %s",
                extent,
                format_bytes(self._extent_bytes),
                error,
                MEMLOCK_ADVICE,
            )
            return False
        if self._locked.any() and delta != self.device_delta:
            locker.unlock(address)
            _log.warning("extent %d has another device address than the first; it stays unregistered", extent)
            return True
        self.device_delta = delta
        self._locked[extent] = True
        return True
