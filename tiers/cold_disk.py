"""The cold tier on a local disk: a file a record, in 256 folders, renamed into place when whole.

Plain files were chosen over LMDB (py-lmdb, `sync=False`) by `benchmarks/cold_disk.py`: with the file of a
dropped record written over for the next one, a put is about six times faster at 2 MiB and 32 MiB (LMDB's is
faster below 1 MiB: 1.6 times at 736 KiB), and a full disk or a bad sector is a status instead of a signal.

What a put acknowledged survives the death of the process at any moment. A loss of power may cost the records
written shortly before it (they are then short, or hold other bytes, and are found so when they are read),
unless `fsync` is set.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from .cold import ColdPurge, ColdStatus, RecordTier, StatusArray
from .errors import ConfigError, IntegrityError
from .record import HEADER_BYTES, NOTE_SPACE, Part, RecordCodec, Verdict
from .settings import MOST_BYTES, expect_flag, expect_integer, expect_path

__all__ = ["DEFAULT_DEADLINE", "LOCK_NAME", "DiskColdTier"]

DEFAULT_DEADLINE: Final = 5.0
"""Seconds."""
LOCK_NAME: Final = "kvpager-cold.lock"
"""The file in a tier's folder that its opener has locked (flock)."""

_SETTING: Final = "cold.path"
_MARKER: Final = "kvpager-cold"
_FORMAT: Final = "kvpager cold tier on disk, format 1\n"
_RECORD_NAME: Final = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{12}")
_UNFINISHED_SUFFIX: Final = ".unfinished"
_OWN_BEFORE_MARKER: Final = frozenset({LOCK_NAME, _MARKER + _UNFINISHED_SUFFIX, "lost+found"})
"""What may be in a folder that is to become a tier's: what an opener that was killed left, and what the root
of a file system has."""
_UNFINISHED_NAME: Final = re.compile(r"[0-9]+\.unfinished")
_FILE_LIMIT: Final = (1 << 32) - 1
_NOTE_LIMIT: Final = 4 << 20
_FOLDER_CHARACTERS: Final = 3
"""Of a record's name, before the space."""
_GRAIN: Final = 4096
_LANES: Final = 4
_STAMP_SECONDS: Final = 600.0
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNREADABLE: Final = (
    *(errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA, errno.EACCES, errno.EPERM),
    *(errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV),
)
"""What is wrong with a record, and not with this process or the way to the disk."""


@dataclass(slots=True)
class _Entry:
    """A record that is there.

    Args:
        room: what it takes of the capacity.
        stamped: the time that its file says.
        sound: whether this tier wrote it or has read it whole; one found when it was opened may be damaged.
    """

    room: int
    stamped: float
    sound: bool


class _Call:
    """What one call has under way: files that it moves, and the room counted for a record it writes."""

    def __init__(self) -> None:
        self.room = 0


class DiskColdTier(RecordTier):
    """Blocks in files under a folder of their own. Safe from any number of threads of one process.

    Args:
        path: the folder; made where it is missing. It is empty (but for the ``lost+found`` of a file system),
            or a tier's already; then files that others put into it are left alone.
        capacity_bytes: most bytes of records, rounded up to 4 KiB each. Before exceeding it, the tier drops
            the records least recently written or read.
        secret: seal payloads (`RecordCodec`). Records sealed with another secret stay until dropped for room.
        fsync: force each record and its name to the disk before it is acknowledged.
        deadline: seconds that a call may take where it does not say. Looked at between records: a single
            read or write that the disk itself holds up cannot be broken off.

    Raises:
        ConfigError: the folder cannot be used, is in use by another opener, holds another format or other
            people's files; another setting is of a wrong type or out of range.
    """

    name = "disk"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        capacity_bytes: int,
        secret: str | bytes | None = None,
        fsync: bool = False,
        deadline: float = DEFAULT_DEADLINE,
    ) -> None:
        super().__init__(deadline, _NOTE_LIMIT)
        self._root = Path(expect_path(_SETTING, path))
        self._capacity = expect_integer("cold.capacity_bytes", capacity_bytes, _GRAIN, MOST_BYTES)
        self._fsync = expect_flag("cold.fsync", fsync)
        self._codec = RecordCodec(secret, value_bytes=_FILE_LIMIT)
        self._lock = threading.Lock()  # never held over anything that the disk may hold up
        self._moved = threading.Condition(self._lock)
        self._index: OrderedDict[str, _Entry] = OrderedDict()
        # By name and not by entry: a reader may have opened the file of a later record of that name.
        self._readers: Counter[str] = Counter()
        self._moving: dict[str, _Call] = {}
        """Names whose files are being moved to or from their places, and by which call."""
        self._used = 0
        self._pending = 0
        self._serial = itertools.count(1)
        self._lock_file = -1
        try:
            self._open()
        except OSError as error:
            self._unlock()
            raise ConfigError(_SETTING, f"{self._root} cannot be used: {error.strerror}") from error
        except ConfigError:
            self._unlock()
            raise
        self._pool = ThreadPoolExecutor(_LANES - 1, thread_name_prefix="kvpager-disk")

    # Opening.

    def _open(self) -> None:
        if self._root.resolve() == Path("/"):
            raise ConfigError(_SETTING, "the root of the file system is no place for a cold tier")
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        marker = self._root / _MARKER
        # Before anything is written there; the marker is looked for after the rest, which is made after it.
        foreign = set(os.listdir(self._root)) - _OWN_BEFORE_MARKER
        if foreign and not marker.exists():
            raise ConfigError(
                _SETTING,
                f"{self._root} is not empty and no cold tier's: it holds {min(foreign)!r}; "
                "give a folder of its own",
            )
        self._lock_file = os.open(self._root / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(_SETTING, f"{self._root} is in use by another cold tier") from error
        try:
            found = marker.read_text("utf-8", "replace")
        except FileNotFoundError:
            unfinished = marker.with_suffix(_UNFINISHED_SUFFIX)
            unfinished.write_text(_FORMAT)
            unfinished.rename(marker)
        else:
            if found != _FORMAT:
                raise ConfigError(
                    _SETTING,
                    f"{self._root} holds another format ({found[:60].strip()!r}, "
                    f"this version reads {_FORMAT.strip()!r}): use another folder",
                )
        found_records: list[tuple[float, str, int]] = []
        for shard in range(256):
            folder = self._root / f"{shard:02x}"
            folder.mkdir(mode=0o700, exist_ok=True)
            with os.scandir(folder) as files:
                for file in files:
                    if _UNFINISHED_NAME.fullmatch(file.name):
                        _discard(file.path)
                    elif _RECORD_NAME.fullmatch(file.name) and file.is_file(follow_symlinks=False):
                        about = file.stat(follow_symlinks=False)
                        name = f"{shard:02x}/{file.name}"
                        found_records.append((about.st_mtime, name, _room(about.st_size)))
        # The time of the last change stands in for the order of use, which only memory keeps exactly.
        for touched, name, room in sorted(found_records):
            self._index[name] = _Entry(room, touched, sound=False)
            self._used += room
        while self._used > self._capacity:
            name, entry = self._index.popitem(last=False)
            os.unlink(self._path(name))
            self._used -= entry.room
            self.stats.evicted += 1

    def _unlock(self) -> None:
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1

    # The calls of ColdTier, as `RecordTier` wants them.

    def _put_blocks(
        self, space: bytes, hashes: Sequence[bytes], views: Sequence[memoryview], until: float
    ) -> StatusArray:
        """Write one record per hash; one that is known to be there is only marked as used."""

        def write(index: int) -> ColdStatus:
            return self._put(space, hashes[index], views[index], replace=False)

        return self._each(len(hashes), write, until)

    def _get_blocks(
        self, space: bytes, hashes: Sequence[bytes], views: Sequence[memoryview], until: float
    ) -> StatusArray:
        """Read each payload into its buffer, verified. One that is not sound, or unreadable, is removed."""

        def read(index: int) -> ColdStatus:
            return self._get(space, hashes[index], views[index])

        return self._each(len(hashes), read, until)

    def _contains(self, space: bytes, hashes: Sequence[bytes], until: float) -> npt.NDArray[np.bool_]:
        """Which hashes have a record, from memory."""
        names = [self._name(space, prefix_hash) for prefix_hash in hashes]
        with self._lock:
            return np.fromiter((name in self._index for name in names), np.bool_, len(names))

    def _ping(self, until: float) -> ColdStatus:
        """Whether its folder can be read."""
        try:
            os.listdir(self._root)
        except OSError:
            return ColdStatus.UNAVAILABLE
        return ColdStatus.OK if time.monotonic() < until else ColdStatus.LATE

    def _delete_blocks(self, space: bytes, hashes: Sequence[bytes], until: float) -> int:
        removed = 0
        for prefix_hash in hashes:
            if time.monotonic() >= until:
                break
            removed += self._delete(self._name(space, prefix_hash))
        return removed

    def _purge_blocks(self, space: bytes, hashes: Sequence[bytes], nbytes: int, until: float) -> ColdPurge:
        return self._purge([self._name(space, prefix_hash) for prefix_hash in hashes], until)

    def _purge_space(self, space: bytes, until: float) -> ColdPurge:
        """Also what was sealed with another secret."""
        digits = space.hex()
        with self._lock:
            names = [name for name in self._index if name.startswith(digits, _FOLDER_CHARACTERS)]
        return self._purge(names, until)

    def _purge(self, names: Sequence[str], until: float) -> ColdPurge:
        removed, status = 0, ColdStatus.OK
        for name in names:
            if time.monotonic() >= until:
                return ColdPurge(removed, ColdStatus.LATE)
            was_there, gone = self._remove(name)
            removed += was_there
            if not gone:
                status = ColdStatus.UNAVAILABLE
        return ColdPurge(removed, status)

    def _put_note(self, space: bytes, note: bytes, value: bytes, until: float) -> ColdStatus:
        return self._put(space, note, memoryview(value), replace=True)

    def _get_note(self, space: bytes, note: bytes, until: float) -> tuple[ColdStatus, bytearray]:
        try:
            size = os.stat(self._path(self._name(space, note))).st_size - HEADER_BYTES
        except OSError:
            size = 0  # then reading it says what is wrong
        value = bytearray(min(max(size, 0), _NOTE_LIMIT))
        return self._get(space, note, memoryview(value)), value

    def _delete_note(self, note: bytes, until: float) -> bool:
        return self._delete(self._name(NOTE_SPACE, note))

    def used_bytes(self) -> int | None:
        """Bytes of all records, rounded up to 4 KiB each."""
        with self._lock:
            return self._used

    def capacity_bytes(self) -> int | None:
        """As given."""
        return self._capacity

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if index, sizes, capacity and files do not agree."""
        with self._lock:
            total = sum(entry.room for entry in self._index.values())
            if total + self._pending != self._used:
                raise IntegrityError(
                    f"{self._used} bytes counted, {total} indexed and {self._pending} being written"
                )
            if self._used > self._capacity:
                raise IntegrityError(f"{self._used} bytes used of {self._capacity}")
            if any(count < 1 for count in self._readers.values()):
                raise IntegrityError("a record has fewer than no readers")
            missing = [name for name in self._index if not os.path.exists(self._path(name))]
            if missing:
                raise IntegrityError(f"{len(missing)} records are indexed and have no file: {missing[0]}")

    def _let_go(self) -> None:
        """Wait for calls under way, and let another opener in."""
        self._wait_for_calls()
        self._pool.shutdown(wait=True)
        self._unlock()

    # How calls are carried out.

    def _each(self, count: int, work: Callable[[int], ColdStatus], until: float) -> StatusArray:
        """Do the work for every index, on a few threads so that the disk has several requests to serve."""
        status = np.full(count, ColdStatus.LATE, np.uint8)
        left = deque(range(count))

        def lane() -> None:
            while time.monotonic() < until:
                try:
                    index = left.popleft()
                except IndexError:
                    return
                status[index] = work(index)

        others = [self._pool.submit(lane) for _ in range(min(_LANES, count) - 1)]
        lane()
        for other in others:
            if not other.cancel():
                other.result()
        return status

    def _name(self, space: bytes, prefix_hash: bytes) -> str:
        digits = prefix_hash.hex()
        return f"{digits[:2]}/{space.hex()}{digits}.{self._codec.key_id}"

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def check_block(self, nbytes: int) -> None:
        """See `ColdTier.check_block`."""
        size = HEADER_BYTES + nbytes
        if size > _FILE_LIMIT:
            raise ConfigError(
                "block_size", f"a block of {nbytes} bytes is more than a disk tier keeps in a file"
            )
        if _room(size) > self._capacity:
            raise ConfigError(
                "cold.capacity_bytes",
                f"{self._capacity} bytes do not hold a block of {nbytes} bytes: give at least {_room(size)}",
            )

    def _put(self, space: bytes, prefix_hash: bytes, payload: memoryview, *, replace: bool) -> ColdStatus:
        name = self._name(space, prefix_hash)
        size = HEADER_BYTES + len(payload)
        if size > _FILE_LIMIT:
            return ColdStatus.FULL
        call = _Call()
        written = False
        unfinished = ""
        try:
            with self._lock:
                entry = self._index.get(name)
                present = entry is not None and entry.sound and not replace
                if entry is not None:
                    self._index.move_to_end(name)
                victims = None if present else self._make_room(_room(size), call)
            if present:
                self._stamp(name)
                return ColdStatus.OK
            if victims is None:
                return ColdStatus.FULL
            # Writing over blocks and cached pages that are there takes a fraction of the time of giving them
            # back and getting new ones.
            unfinished, *others = self._move_aside(victims, call) or [self._unfinished()]
            for path in others:
                _discard(path)
            (part,) = self._codec.split(space, prefix_hash, len(payload))
            header, body = self._codec.encode(part, payload, self._codec.new_write_id())
            self._write(unfinished, header, body)
            with self._moved:
                self._moved.wait_for(lambda: name not in self._moving)
                self._moving[name] = call
            self._rename(unfinished, self._path(name))
            written = True
        except OSError as error:
            _discard(unfinished)
            return _status_of(error)
        finally:
            with self._moved:
                self._pending -= call.room
                if written:
                    replaced = self._index.pop(name, None)
                    self._used -= replaced.room if replaced is not None else 0
                    self._index[name] = _Entry(call.room, time.time(), sound=True)
                else:
                    self._used -= call.room
                self._end_moves(call)
        if self._fsync:
            try:
                _sync_folder(os.path.dirname(self._path(name)))
            except OSError as error:
                return _status_of(error)
        return ColdStatus.OK

    def _make_room(self, need: int, call: _Call) -> list[str] | None:
        """Count `need` bytes as used, dropping records for it; called under the lock.

        Returns:
            the names of records dropped, whose files are to be moved aside. None where there is no room.
        """
        victims: list[str] = []
        freed = 0
        for name, entry in self._index.items():
            if self._used - freed + need <= self._capacity:
                break
            # Read just now, its file must stay as it is.
            if name not in self._readers and name not in self._moving:
                victims.append(name)
                freed += entry.room
        if self._used - freed + need > self._capacity:
            return None
        for name in victims:
            self._drop(name, call)
        with self.stats.lock:
            self.stats.evicted += len(victims)
        self._used += need
        self._pending += need
        call.room = need
        return victims

    def _drop(self, name: str, call: _Call) -> None:
        """Forget a record, whose file the call moves aside next; called under the lock.

        Until it has, nobody puts a later record of that name there, which would be moved in its stead.
        """
        self._moving[name] = call
        self._used -= self._index.pop(name).room

    def _move_aside(self, names: list[str], call: _Call) -> list[str]:
        """Rename the files of records dropped, without the lock; the new paths of those that were there.

        Only renamed: giving back the blocks of a file can take milliseconds, for which nobody need wait.
        """
        moved = []
        for name in names:
            aside = self._unfinished()
            # Gone already; or it cannot be, and is found again when the tier is next opened.
            with suppress(OSError):
                self._rename(self._path(name), aside)
                moved.append(aside)
        with self._moved:
            self._end_moves(call)
        return moved

    def _end_moves(self, call: _Call) -> None:
        """Whoever waits for a file that the call moved may go on; called under the lock."""
        if self._moving:
            for name in [name for name, other in self._moving.items() if other is call]:
                del self._moving[name]
            self._moved.notify_all()

    def _unfinished(self) -> str:
        serial = next(self._serial)
        return self._path(f"{serial & 255:02x}/{serial}{_UNFINISHED_SUFFIX}")

    def _rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def _delete(self, name: str, entry: _Entry | None = None) -> bool:
        """Remove a record (only if it still is this one); whether it was there."""
        return self._remove(name, entry)[0]

    def _remove(self, name: str, entry: _Entry | None = None) -> tuple[bool, bool]:
        """Remove a record (only if it still is this one); whether it was there, and whether it is gone.

        Bytes that stay go when the tier is next opened.
        """
        call = _Call()
        try:
            with self._moved:
                while (found := self._index.get(name)) is not None and name in self._moving:
                    self._moved.wait()  # it is being replaced
                if found is None or (entry is not None and found is not entry):
                    return False, True
                self._drop(name, call)
            moved = self._move_aside([name], call)
        finally:
            with self._moved:
                self._end_moves(call)
        gone = [_discard(aside) for aside in moved]
        return True, all(gone) and not os.path.lexists(self._path(name))

    def _write(self, path: str, header: bytes, body: memoryview) -> None:
        with _opened(path, os.O_WRONLY | os.O_CREAT) as file:
            size = HEADER_BYTES + len(body)
            done = os.pwritev(file, [header, body], 0)
            while done < size:
                if done < HEADER_BYTES:
                    done += os.pwritev(file, [header[done:], body], done)
                else:
                    done += os.pwritev(file, [body[done - HEADER_BYTES :]], done)
            os.ftruncate(file, size)
            if self._fsync:
                os.fsync(file)

    def _get(self, space: bytes, prefix_hash: bytes, into: memoryview) -> ColdStatus:
        name = self._name(space, prefix_hash)
        with self._lock:
            entry = self._index.get(name)
            if entry is None:
                return ColdStatus.MISS
            # While it is read it is not dropped, and so its file is not written over.
            self._readers[name] += 1
            self._index.move_to_end(name)
        useless = False
        try:
            (part,) = self._codec.split(space, prefix_hash, len(into))
            status, useless = self._read(self._path(name), part, into)
        except FileNotFoundError:
            status, useless = ColdStatus.MISS, True
        except OSError as error:
            # One that cannot be read is of no use to anyone, and in the way of the next put.
            useless = error.errno in _UNREADABLE
            status = ColdStatus.CORRUPT if useless else ColdStatus.UNAVAILABLE
        finally:
            with self._lock:
                self._readers[name] -= 1
                if not self._readers[name]:
                    del self._readers[name]
        if useless:
            self._delete(name, entry)
        else:
            entry.sound |= status == ColdStatus.OK
            self._stamp(name)
        return status

    def _read(self, path: str, part: Part, into: memoryview) -> tuple[ColdStatus, bool]:
        """The status of a record, and whether it is good for nothing and to be removed."""
        with _opened(path, os.O_RDONLY) as file:
            stored = os.fstat(file).st_size
            if stored != HEADER_BYTES + part.size:
                header = os.pread(file, HEADER_BYTES, 0)
                sound = (
                    self._codec.stored_parts(header) is not None
                    and self._codec.judge_size(header, stored) is Verdict.FOREIGN
                )
                return ColdStatus.CORRUPT, not sound
            head = bytearray(HEADER_BYTES)
            done = os.preadv(file, [head, into], 0)
            while 0 < done < stored:
                if done < HEADER_BYTES:
                    more = os.preadv(file, [memoryview(head)[done:], into], done)
                else:
                    more = os.preadv(file, [into[done - HEADER_BYTES :]], done)
                if not more:
                    return ColdStatus.CORRUPT, True
                done += more
            verdict, _ = self._codec.decode(part, head, into)
            sound = verdict is Verdict.OK
            return ColdStatus.OK if sound else ColdStatus.CORRUPT, not sound

    def _stamp(self, name: str) -> None:
        """Let the file's time follow the order of use, some minutes behind: a restart goes by it."""
        now = time.time()
        entry = self._index.get(name)
        if entry is not None and now - entry.stamped > _STAMP_SECONDS:
            entry.stamped = now
            with suppress(OSError):  # nothing but that order depends on it
                os.utime(self._path(name), (now, now))


def _discard(path: str) -> bool:
    """Remove a file; whether it is gone. What is left under this name goes when the tier is next opened."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _room(size: int) -> int:
    return -(-size // _GRAIN) * _GRAIN


def _status_of(error: OSError) -> ColdStatus:
    return ColdStatus.FULL if error.errno in _NO_ROOM else ColdStatus.UNAVAILABLE


@contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _sync_folder(path: str) -> None:
    with _opened(path, os.O_RDONLY | os.O_DIRECTORY) as folder:
        os.fsync(folder)
