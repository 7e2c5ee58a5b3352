"""The interface that every cold tier has, and what the store asks of it.

A cold tier keeps keyed blocks outside host memory: in Redis (`tiers/cold_redis.py`) or on disk
(`tiers/cold_disk.py`). A key is a space and a prefix hash; the value is the block's payload inside a
record (`tiers/record.py`). Calls are batched, safe from several threads at once, and never outlast their
deadline by more than scheduling noise. What cannot be read back exactly as it was written is a miss.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import ConfigError

__all__ = ["ColdStats", "ColdStatus", "ColdTier", "StatusArray", "byte_views"]


class ColdStatus(enum.IntEnum):
    """What became of one key of a batch."""

    OK = 0
    MISS = 1
    """Not there."""
    CORRUPT = 2
    """There, but it does not verify. Counted; the caller treats it as a miss."""
    LATE = 3
    """The deadline came first."""
    UNAVAILABLE = 4
    """The tier could not be reached, refused, or broke off."""
    FULL = 5
    """No room for the record (writes only)."""


StatusArray: TypeAlias = npt.NDArray[np.uint8]
"""uint8 [keys] of `ColdStatus`, in the order of the keys."""


@dataclass
class ColdStats:
    """Counters since the tier was opened. Under `lock` where several are changed together."""

    puts: int = 0
    put_bytes: int = 0
    put_seconds: float = 0.0
    gets: int = 0
    get_bytes: int = 0
    get_seconds: float = 0.0
    misses: int = 0
    corrupt: int = 0
    late: int = 0
    unavailable: int = 0
    full: int = 0
    evicted: int = 0

    def __post_init__(self) -> None:
        self.lock = threading.Lock()

    def count_put(self, status: StatusArray, payloads: Sequence[memoryview], seconds: float) -> None:
        """Count one batch of puts: those that are OK with their bytes, the others by status."""
        done = np.flatnonzero(status == ColdStatus.OK)
        with self.lock:
            self.puts += len(done)
            self.put_bytes += sum(payloads[index].nbytes for index in done.tolist())
            self.put_seconds += seconds
        self.count(status)

    def count_get(self, status: StatusArray, into: Sequence[memoryview], seconds: float) -> None:
        """Count one batch of gets: those that are OK with their bytes, the others by status."""
        done = np.flatnonzero(status == ColdStatus.OK)
        with self.lock:
            self.gets += len(done)
            self.get_bytes += sum(into[index].nbytes for index in done.tolist())
            self.get_seconds += seconds
        self.count(status)

    def count(self, status: StatusArray) -> None:
        """Add one to the counter of every status that is not OK."""
        for code, name in _COUNTER.items():
            hits = int(np.count_nonzero(status == code))
            if hits:
                with self.lock:
                    setattr(self, name, getattr(self, name) + hits)


_COUNTER = {
    ColdStatus.MISS: "misses",
    ColdStatus.CORRUPT: "corrupt",
    ColdStatus.LATE: "late",
    ColdStatus.UNAVAILABLE: "unavailable",
    ColdStatus.FULL: "full",
}


class ColdTier(Protocol):
    """Keyed blocks outside host memory.

    `space` is 16 bytes (a digest of layout and shard), `hashes` are 16-byte prefix hashes, payloads are
    contiguous byte buffers. `deadline` is seconds from the call; None means the tier's default. None of
    these calls raises for what a server or a disk does: the status array says it.
    """

    name: str
    """``redis`` or ``disk``; used in logs, events and metrics."""
    stats: ColdStats

    def put(
        self,
        space: bytes,
        hashes: Sequence[bytes],
        payloads: Sequence[memoryview],
        deadline: float | None = None,
    ) -> StatusArray:
        """Write one record per hash. A record that is there already may be left as it is."""
        ...

    def get(
        self,
        space: bytes,
        hashes: Sequence[bytes],
        into: Sequence[memoryview],
        deadline: float | None = None,
    ) -> StatusArray:
        """Read each payload into its writable buffer. Only buffers whose status is OK hold anything.

        A record whose payload has another length than its buffer is CORRUPT. When this returns, no
        thread writes into any of the buffers any more, also after LATE.
        """
        ...

    def contains(
        self, space: bytes, hashes: Sequence[bytes], deadline: float | None = None
    ) -> npt.NDArray[np.bool_]:
        """Which hashes seem to be there (bool [hashes]); False where it could not be asked in time."""
        ...

    def delete(self, space: bytes, hashes: Sequence[bytes], deadline: float | None = None) -> int:
        """Remove records; returns how many were there."""
        ...

    def put_note(self, name: bytes, value: bytes, deadline: float | None = None) -> ColdStatus:
        """Keep a small named record (a session's length and hashes), replacing an older one."""
        ...

    def get_note(self, name: bytes, deadline: float | None = None) -> tuple[ColdStatus, bytes]:
        """Read a named record; the bytes are empty unless the status is OK."""
        ...

    def delete_note(self, name: bytes, deadline: float | None = None) -> bool:
        """Remove a named record; returns whether it was there."""
        ...

    def used_bytes(self) -> int | None:
        """Bytes kept by this tier, or None where it cannot say without waiting."""
        ...

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if an invariant of this tier's own bookkeeping does not hold."""
        ...

    def close(self) -> None:
        """Release connections and files. Idempotent."""
        ...


def byte_views(name: str, buffers: Sequence[memoryview], count: int, *, writable: bool) -> list[memoryview]:
    """The buffers as flat views of bytes, without a copy.

    Raises:
        ConfigError: not `count` of them, or one is not contiguous, or read-only where it must be written.
    """
    if len(buffers) != count:
        raise ConfigError(name, f"{len(buffers)} buffers for {count} hashes")
    views = []
    for buffer in buffers:
        view = memoryview(buffer)
        if not view.c_contiguous or (writable and view.readonly):
            raise ConfigError(name, "must be contiguous" + (" and writable" if writable else ""))
        views.append(view.cast("B"))
    return views
