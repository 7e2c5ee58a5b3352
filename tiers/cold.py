"""The interface that every cold tier has, and what those of this package do alike (`RecordTier`).

A cold tier keeps keyed blocks outside host memory: in Redis (`tiers/cold_redis.py`) or on disk
(`tiers/cold_disk.py`). A key is a space and a prefix hash; the value is the block's payload inside a
record (`tiers/record.py`). Calls are batched, safe from several threads at once, and never outlast their
deadline by more than scheduling noise. What cannot be read back exactly as it was written is a miss.
"""

from __future__ import annotations

import enum
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import CapacityError, ClosedError, ConfigError
from .record import NOTE_SPACE, check_key, note_hash
from .settings import expect_bytes, expect_methods, expect_seconds

__all__ = [
    "LONGEST_DEADLINE",
    "ColdPurge",
    "ColdStats",
    "ColdStatus",
    "ColdTier",
    "RecordTier",
    "StatusArray",
    "byte_views",
    "expect_cold_tier",
    "is_open",
]

LONGEST_DEADLINE: Final = 3600.0
"""Seconds: the most that a tier's own deadline may be."""

_NEEDED_CALLS: Final = ("put", "get", "contains", "check_block", "put_note", "get_note", "ping", "close")
"""What a host store and an engine call of a tier."""


class ColdStatus(enum.IntEnum):
    """What became of one key of a batch."""

    OK = 0
    MISS = 1
    """Not there."""
    CORRUPT = 2
    """There, but it cannot be read or does not verify. Counted; the caller treats it as a miss."""
    LATE = 3
    """The deadline came first."""
    UNAVAILABLE = 4
    """The tier could not be reached, refused, or broke off."""
    FULL = 5
    """No room for the record (writes only)."""


class ColdPurge(NamedTuple):
    """What became of records that were to go."""

    removed: int
    """How many blocks, or notes, were there and are not any more."""
    status: ColdStatus
    """OK: nothing of them is left. Else why something may be."""


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

    def purge(
        self, space: bytes, hashes: Sequence[bytes] | None, nbytes: int, deadline: float | None = None
    ) -> ColdPurge:
        """Remove records, and say whether all of them are gone.

        Args:
            hashes: of these blocks; None: every record of the space, whoever wrote it.
            nbytes: bytes of a block's payload.
        """
        ...

    def put_note(
        self, name: bytes, value: bytes, deadline: float | None = None, *, space: bytes = NOTE_SPACE
    ) -> ColdStatus:
        """Keep a small named record (a session's length and hashes), replacing an older one.

        Args:
            space: what it is kept with, 16 bytes, so that `purge` removes it with its like.
        """
        ...

    def get_note(
        self, name: bytes, deadline: float | None = None, *, space: bytes = NOTE_SPACE
    ) -> tuple[ColdStatus, bytes]:
        """Read a named record; the bytes are empty unless the status is OK."""
        ...

    def delete_note(self, name: bytes, deadline: float | None = None) -> bool:
        """Remove a named record; returns whether it was there."""
        ...

    def ping(self, deadline: float | None = None) -> ColdStatus:
        """Whether it answers: OK, LATE or UNAVAILABLE. Nothing is counted."""
        ...

    def check_block(self, nbytes: int) -> None:
        """Raise `ConfigError` where no record of a block of `nbytes` bytes can ever be kept."""
        ...

    def used_bytes(self) -> int | None:
        """Bytes kept by this tier, or None where it cannot say without waiting."""
        ...

    def capacity_bytes(self) -> int | None:
        """Most bytes that this tier keeps, or None where others decide that."""
        ...

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if an invariant of this tier's own bookkeeping does not hold."""
        ...

    def close(self) -> None:
        """Release connections and files. Idempotent."""
        ...


class RecordTier(ABC):
    """What a cold tier does beside keeping records: it checks arguments, keeps time, counts, and closes.

    Args:
        deadline: seconds that a call may take where it does not say.
        note_bytes: most bytes of a note.

    Raises:
        ConfigError: the deadline is out of range.
    """

    def __init__(self, deadline: float, note_bytes: int) -> None:
        self._deadline = expect_seconds("cold.deadline", deadline, LONGEST_DEADLINE, above=True)
        self._note_bytes = note_bytes
        self.stats = ColdStats()
        self._calls = 0
        self._closed = False
        self._idle = threading.Condition()

    # The calls of ColdTier.

    def put(
        self,
        space: bytes,
        hashes: Sequence[bytes],
        payloads: Sequence[memoryview],
        deadline: float | None = None,
    ) -> StatusArray:
        """See `ColdTier.put`."""
        hashes = check_key(space, hashes)
        views = byte_views("payloads", payloads, len(hashes), writable=False)
        with self._call(deadline) as (began, until):
            status = self._put_blocks(space, hashes, views, until)
            self.stats.count_put(status, views, time.monotonic() - began)
        return status

    def get(
        self,
        space: bytes,
        hashes: Sequence[bytes],
        into: Sequence[memoryview],
        deadline: float | None = None,
    ) -> StatusArray:
        """See `ColdTier.get`."""
        hashes = check_key(space, hashes)
        views = byte_views("into", into, len(hashes), writable=True)
        with self._call(deadline) as (began, until):
            status = self._get_blocks(space, hashes, views, until)
            self.stats.count_get(status, views, time.monotonic() - began)
        return status

    def contains(
        self, space: bytes, hashes: Sequence[bytes], deadline: float | None = None
    ) -> npt.NDArray[np.bool_]:
        """See `ColdTier.contains`."""
        hashes = check_key(space, hashes)
        with self._call(deadline) as (_, until):
            return self._contains(space, hashes, until)

    def delete(self, space: bytes, hashes: Sequence[bytes], deadline: float | None = None) -> int:
        """See `ColdTier.delete`."""
        hashes = check_key(space, hashes)
        with self._call(deadline) as (_, until):
            return self._delete_blocks(space, hashes, until)

    def purge(
        self, space: bytes, hashes: Sequence[bytes] | None, nbytes: int, deadline: float | None = None
    ) -> ColdPurge:
        """See `ColdTier.purge`."""
        hashes = None if hashes is None else check_key(space, hashes)
        with self._call(deadline) as (_, until):
            if hashes is None:
                return self._purge_space(space, until)
            return self._purge_blocks(space, hashes, nbytes, until)

    def put_note(
        self, name: bytes, value: bytes, deadline: float | None = None, *, space: bytes = NOTE_SPACE
    ) -> ColdStatus:
        """Keep a small named record, replacing an older one. See `ColdTier.put_note`.

        Raises:
            CapacityError: the note is longer than a value may be (4 MiB, where nothing else was set).
        """
        note = note_hash(name)
        if len(expect_bytes("value", value)) > self._note_bytes:
            raise CapacityError(f"a note of {len(value)} bytes, more than {self._note_bytes}")
        with self._call(deadline) as (_, until):
            status = self._put_note(space, note, value, until)
        self.stats.count(np.array([status], np.uint8))
        return status

    def get_note(
        self, name: bytes, deadline: float | None = None, *, space: bytes = NOTE_SPACE
    ) -> tuple[ColdStatus, bytes]:
        """See `ColdTier.get_note`."""
        note = note_hash(name)
        with self._call(deadline) as (_, until):
            status, value = self._get_note(space, note, until)
        self.stats.count(np.array([status], np.uint8))
        return status, bytes(value) if status == ColdStatus.OK else b""

    def ping(self, deadline: float | None = None) -> ColdStatus:
        """See `ColdTier.ping`."""
        with self._call(deadline) as (_, until):
            return self._ping(until)

    @abstractmethod
    def check_block(self, nbytes: int) -> None:
        """See `ColdTier.check_block`."""

    def delete_note(self, name: bytes, deadline: float | None = None) -> bool:
        """See `ColdTier.delete_note`."""
        note = note_hash(name)
        with self._call(deadline) as (_, until):
            return self._delete_note(note, until)

    def close(self) -> None:
        """Let go of connections and files. Idempotent."""
        with self._idle:
            if self._closed:
                return
            self._closed = True
        self._let_go()

    # What each kind does in its own way. `until` is a reading of `time.monotonic()`, `note` a `note_hash`.

    @abstractmethod
    def _put_blocks(
        self, space: bytes, hashes: Sequence[bytes], views: Sequence[memoryview], until: float
    ) -> StatusArray: ...

    @abstractmethod
    def _get_blocks(
        self, space: bytes, hashes: Sequence[bytes], views: Sequence[memoryview], until: float
    ) -> StatusArray: ...

    @abstractmethod
    def _contains(self, space: bytes, hashes: Sequence[bytes], until: float) -> npt.NDArray[np.bool_]: ...

    @abstractmethod
    def _delete_blocks(self, space: bytes, hashes: Sequence[bytes], until: float) -> int: ...

    @abstractmethod
    def _purge_blocks(
        self, space: bytes, hashes: Sequence[bytes], nbytes: int, until: float
    ) -> ColdPurge: ...

    @abstractmethod
    def _purge_space(self, space: bytes, until: float) -> ColdPurge: ...

    @abstractmethod
    def _put_note(self, space: bytes, note: bytes, value: bytes, until: float) -> ColdStatus: ...

    @abstractmethod
    def _get_note(self, space: bytes, note: bytes, until: float) -> tuple[ColdStatus, bytearray]:
        """The status, and the bytes where it is OK."""

    @abstractmethod
    def _delete_note(self, note: bytes, until: float) -> bool: ...

    @abstractmethod
    def _ping(self, until: float) -> ColdStatus: ...

    @abstractmethod
    def _let_go(self) -> None:
        """Nothing new begins; end the rest."""

    @contextmanager
    def _call(self, deadline: float | None) -> Iterator[tuple[float, float]]:
        """A call under way: when it began, and until when it may last.

        Raises:
            ClosedError: the tier is closed.
            ConfigError: the deadline is no number of seconds.
        """
        seconds = self._deadline if deadline is None else expect_seconds("deadline", deadline)
        with self._idle:
            if self._closed:
                raise ClosedError("the cold tier is closed")
            self._calls += 1
        now = time.monotonic()
        try:
            yield now, now + seconds
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()

    def _wait_for_calls(self) -> None:
        """Wait for the end of every call under way."""
        with self._idle:
            self._idle.wait_for(lambda: not self._calls)


def expect_cold_tier(value: ColdTier) -> ColdTier:
    """The value of a setting `cold`, if it is a cold tier that takes calls.

    Raises:
        ConfigError: it is none; the error names the setting.
        ClosedError: it is closed.
    """
    what = "a cold tier (open_cold_tier opens one from a URL or a folder)"
    expect_methods("cold", value, _NEEDED_CALLS, what)
    if not is_open(value):
        raise ClosedError(
            "cold: this tier is closed, as a store or an engine does with its own; open it again"
        )
    return value


def is_open(cold: ColdTier) -> bool:
    """Whether a cold tier takes calls: not once it was closed."""
    try:
        cold.contains(bytes(16), [])
    except ClosedError:
        return False
    return True


def byte_views(name: str, buffers: Sequence[memoryview], count: int, *, writable: bool) -> list[memoryview]:
    """The buffers as flat views of bytes, without a copy.

    Raises:
        ConfigError: not `count` of them, or one is no buffer, not contiguous, or read-only where it must be
            written.
    """
    if not isinstance(buffers, Sequence):
        raise ConfigError(name, f"must be a list of buffers, got a {type(buffers).__name__}")
    if len(buffers) != count:
        raise ConfigError(name, f"{len(buffers)} buffers for {count} hashes")
    views = []
    for buffer in buffers:
        try:
            view = memoryview(buffer)
        except TypeError as error:
            raise ConfigError(name, f"must be buffers, got a {type(buffer).__name__}") from error
        if not view.c_contiguous or (writable and view.readonly):
            raise ConfigError(name, "must be contiguous" + (" and writable" if writable else ""))
        views.append(view.cast("B"))
    return views
