"""Pages of a sidecar's memory that are about to be written, faulted in by a thread of this process.

The sidecar's own page table says nothing to another process: the first write to each page of a mapping takes
a page fault, which costs several times the copy. So what lies in extents that were granted, and in the next
ones, is entered ahead, as far as the sidecar has made it already.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from ..tiers.mapping import SharedMapping

__all__ = ["WarmExtents"]

_AHEAD_BYTES: Final = 256 << 20
_STEP_BYTES: Final = 4 << 20
"""Of one call: a fault of another thread waits no longer than for these."""


class WarmExtents:
    """Which extents were faulted in. Called from any thread.

    Args:
        mapping: the memory; whoever calls has it mapped.
        num_extents, extent_bytes: how it is cut.
        owned: the file is this user's. Of another's the kernel does not tell what is made already: then
            nothing is entered but what is granted.
    """

    def __init__(
        self, mapping: SharedMapping, num_extents: int, extent_bytes: int, *, owned: bool = True
    ) -> None:
        self._mapping = mapping
        self._extent_bytes = extent_bytes
        self._num_extents = num_extents
        self._ahead = max(1, _AHEAD_BYTES // extent_bytes) if owned else 0
        self._lock = threading.Lock()
        self._seen: set[int] = set()
        self._next: dict[int, None] = {}
        self._thread: threading.Thread | None = None

    def expect(self, extents: Iterable[int], memory: memoryview) -> None:
        """These will be written soon. Does not wait.

        Args:
            memory: keeps the mapping while it is worked on.
        """
        new = set(extents) - self._seen
        if not new:
            return
        with self._lock:
            self._seen |= new
            for first in sorted(new):
                for extent in range(first, min(first + 1 + self._ahead, self._num_extents)):
                    self._next[extent] = None
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, args=(memory,), name="kvpager-warm", daemon=True
                )
                self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait until what is expected is done, so long at most."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def _run(self, memory: memoryview) -> None:
        done: set[int] = set()
        while True:
            with self._lock:
                extent = next((one for one in self._next if one not in done), None)
                if extent is None:
                    # What is not there yet is looked at again when an extent is granted.
                    self._next.clear()
                    self._thread = None
                    return
                done.add(extent)
            start = extent * self._extent_bytes
            if self._mapping.is_present(start, self._extent_bytes):
                for offset in range(start, start + self._extent_bytes, _STEP_BYTES):
                    self._mapping.populate(offset, min(_STEP_BYTES, start + self._extent_bytes - offset))
