"""Records that outlive their process: arrays in the sections of a file beside the arena.

The file is mapped by its owner alone and never handed out: who may write blocks cannot write what is known
of them. It says of which arena it is, and when and where it was made. What is appended to it are *sections*,
each with a description and as much memory as its arrays need; a section is there from the moment that its
entry's kind is written, and gone when that is taken back.

A process that is killed between any two writes leaves a file that can be read. Whatever else is wrong with it
is an `IntegrityError`, and nothing of it is believed.
Sources: Linux manual pages fallocate(2), pid_namespaces(7), proc_sys_kernel(5) (random/boot_id).
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .errors import CapacityError, IntegrityError, MemoryUnavailableError
from .mapping import SharedMapping
from .memory import format_bytes

__all__ = [
    "COLD_BYTES",
    "ArenaIdentity",
    "ArraySpec",
    "RecordFile",
    "RecordView",
    "Section",
    "SectionKind",
    "is_record_file",
]

_PAGE: Final = mmap.PAGESIZE
_MAGIC: Final = b"kvpager records\n"
_VERSION: Final = 2
"""Another one for every change of what is written, in here or by whoever adds sections."""
_HEADER: Final = struct.Struct("<16sIIQQQQ16sQ16s")
"""Magic, version, CRC with zeros here, device, inode, bytes of arena and extent, boot, namespace, cold."""
COLD_BYTES: Final = 16
"""Of what names a cold tier."""
_PLACE: Final = np.dtype([("kind", "<u4"), ("crc", "<u4"), ("offset", "<u8"), ("nbytes", "<u8")])
"""An entry of the table: which section lies where; the kind, 0 for none, is written last."""
_MOST_SECTIONS: Final = 4096
_TABLE_BYTES: Final = -(-_MOST_SECTIONS * _PLACE.itemsize // _PAGE) * _PAGE
_FIRST: Final = _PAGE + _TABLE_BYTES
_ABOUT: Final = struct.Struct("<II")
"""Length and CRC of a section's description, which follows."""
_ABOUT_BYTES: Final = _PAGE
"""Of a section, before its arrays."""
_ALIGNMENT: Final = 64
_PUNCH_HOLE: Final = 3
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE"""


class SectionKind(enum.IntEnum):
    """What a section is about."""

    SPACE = 1
    """One space's slots."""
    GROUP = 2
    """A client group's processes."""
    CLAIMS = 3
    """What one client holds of one space."""
    BARRED = 4
    """What of one space the cold tier was to remove and did not yet."""


@dataclass(frozen=True)
class ArenaIdentity:
    """Which arena records are of.

    Args:
        device, inode: of its file.
        capacity_bytes, extent_bytes: how it is cut.
    """

    device: int
    inode: int
    capacity_bytes: int
    extent_bytes: int


@dataclass(frozen=True)
class ArraySpec:
    """An array of a section.

    Args:
        dtype: of its elements.
        count: how many.
    """

    dtype: npt.DTypeLike
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, rounded up so that the next one is aligned."""
        return -(-np.dtype(self.dtype).itemsize * self.count // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, eq=False)
class Section:
    """A part of the file.

    Args:
        kind: what it is about.
        about: its description.
        entry: its number in the table.
        memory: its arrays' bytes, zeros when it is new.
    """

    kind: SectionKind
    about: bytes
    entry: int
    memory: memoryview

    def arrays(self, specs: Sequence[ArraySpec]) -> list[npt.NDArray[Any]]:
        """Its arrays where they lie; writable, if the file is this process's own.

        Raises:
            IntegrityError: it is shorter than these are.
        """
        if sum(spec.nbytes for spec in specs) > len(self.memory):
            raise IntegrityError(f"a section of {self.kind.name.lower()} records is too short")
        found = []
        at = 0
        for spec in specs:
            found.append(np.frombuffer(self.memory, spec.dtype, spec.count, at))
            at += spec.nbytes
        return found


class RecordFile:
    """The records of one arena. Calls are safe from any thread; arrays are their users' to guard.

    Made by `create` and `read`, by whoever has the arena's lock.

    Attributes:
        identity: which arena they are of.
        cold: 16 bytes that name the cold tier which has copies of its blocks; zeros for none.
    """

    def __init__(self, path: str, fd: int, identity: ArenaIdentity, cold: bytes = bytes(COLD_BYTES)) -> None:
        self.path = path
        self.identity = identity
        self.cold = cold
        self._fd = fd
        self._closed = False
        self._lock = threading.Lock()
        mapping = SharedMapping(fd, _FIRST)
        self._table = np.frombuffer(mapping.bytes(), _PLACE, _MOST_SECTIONS, _PAGE)
        mapping.release()
        self._sections: dict[int, Section] = {}

    @classmethod
    def create(cls, path: str, identity: ArenaIdentity) -> RecordFile:
        """New records of an arena, in place of a file that may be there.

        Raises:
            MemoryUnavailableError: there is no room for them.
        """
        # Under another name until it can be read, so that no half of one is ever found.
        fresh = f"{path}.new"
        fd = -1
        try:
            Path(fresh).unlink(missing_ok=True)
            fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            os.posix_fallocate(fd, 0, _FIRST)
            os.pwrite(fd, _header(identity, bytes(COLD_BYTES)), 0)
            os.rename(fresh, path)
            return cls(path, fd, identity)
        except BaseException as error:
            if fd >= 0:
                os.close(fd)
                Path(fresh).unlink(missing_ok=True)
            if isinstance(error, OSError):
                reason = f"arena: its records {path} cannot be made: {error.strerror}"
                raise MemoryUnavailableError(reason) from error
            raise

    @classmethod
    def read(cls, path: str) -> RecordFile:
        """The records that are there.

        Raises:
            IntegrityError: they are none, another version's, of before this machine or its pid namespace
                started, or damaged.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise IntegrityError(f"its records cannot be read ({error.strerror})") from error
        try:
            nbytes = os.fstat(fd).st_size
            if nbytes < _FIRST:
                raise IntegrityError("its records are cut short")
            records = cls(path, fd, *_read_header(os.pread(fd, _HEADER.size, 0)))
            records._read_sections(nbytes)
        except BaseException:
            os.close(fd)
            raise
        return records

    @staticmethod
    def read_only(path: str) -> RecordView:
        """The records of an arena that another process has.

        Raises:
            IntegrityError: as of `read`.
        """
        return RecordView(path)

    def sections(self, kind: SectionKind) -> list[Section]:
        """The sections of a kind."""
        with self._lock:
            return [section for section in self._sections.values() if section.kind is kind]

    def add(self, kind: SectionKind, about: bytes, specs: Sequence[ArraySpec]) -> Section:
        """A new section, which is there when this returns.

        Args:
            about: what it is of; a page of bytes at most.
            specs: its arrays, which are zeros.

        Raises:
            CapacityError: there are too many.
            MemoryUnavailableError: there is no memory for it.
        """
        if len(about) > _ABOUT_BYTES - _ABOUT.size:
            raise CapacityError(f"a description of {len(about)} bytes is too long for the arena's records")
        inside = sum(spec.nbytes for spec in specs)
        nbytes = -(-(_ABOUT_BYTES + inside) // _PAGE) * _PAGE
        with self._lock:
            free = np.flatnonzero(self._table["kind"] == 0)
            if not len(free):
                raise CapacityError(f"the arena has {_MOST_SECTIONS} sections of records, and takes no more")
            entry = int(free[0])
            offset = self._place_for(nbytes)
            self._clear(offset, nbytes)
            try:
                os.posix_fallocate(self._fd, offset, nbytes)
            except OSError as error:
                raise MemoryUnavailableError(
                    f"the arena's records need {format_bytes(nbytes)} more: {error.strerror}"
                ) from error
            os.pwrite(self._fd, _ABOUT.pack(len(about), zlib.crc32(about)) + about, offset)
            section = self._sections[entry] = self._mapped(kind, about, entry, offset, nbytes)
            place = self._table[entry : entry + 1]
            place["offset"], place["nbytes"] = offset, nbytes
            place["crc"] = _place_crc(kind, offset, nbytes)
            place["kind"] = kind
            return section

    def remove(self, section: Section) -> None:
        """A section is no longer needed: nobody uses its arrays after this."""
        with self._lock:
            if self._sections.pop(section.entry, None) is None:
                return
            place = self._table[section.entry : section.entry + 1]
            place["kind"] = 0
            if not self._closed:
                self._clear(int(place["offset"][0]), int(place["nbytes"][0]))

    def set_cold(self, cold: bytes) -> None:
        """Another cold tier has copies of the blocks from now on, or none."""
        self.cold = cold
        os.pwrite(self._fd, _header(self.identity, cold), 0)

    def close(self) -> None:
        """Use it no more. Idempotent. Arrays that are left keep their memory."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._fd)

    # Inside, with the lock held or before anybody else has it

    def _read_sections(self, nbytes: int) -> None:
        used = np.flatnonzero(self._table["kind"])
        before = _FIRST
        for entry in used[np.argsort(self._table["offset"][used])].tolist():
            kind, crc, offset, length = (int(self._table[name][entry]) for name in _PLACE.names or ())
            if kind not in list(SectionKind) or crc != _place_crc(kind, offset, length):
                raise IntegrityError("an entry of the table of its records is damaged")
            if offset < before or offset % _PAGE or length < _ABOUT_BYTES or offset + length > nbytes:
                raise IntegrityError("sections of its records lie over each other")
            before = offset + length
            size, crc = _ABOUT.unpack(os.pread(self._fd, _ABOUT.size, offset))
            about = os.pread(self._fd, min(size, _ABOUT_BYTES - _ABOUT.size), offset + _ABOUT.size)
            if len(about) != size or zlib.crc32(about) != crc:
                raise IntegrityError("the description of a section of its records is damaged")
            self._sections[entry] = self._mapped(SectionKind(kind), about, entry, offset, length)

    def _mapped(self, kind: SectionKind, about: bytes, entry: int, offset: int, nbytes: int) -> Section:
        mapping = SharedMapping(self._fd, nbytes, offset)
        memory = mapping.bytes()[_ABOUT_BYTES:]
        mapping.release()  # the views keep it
        return Section(kind, about, entry, memory)

    def _place_for(self, nbytes: int) -> int:
        """Where so many bytes are free between sections, or after the last of them."""
        used = self._table[self._table["kind"] != 0]
        at = _FIRST
        for place in np.argsort(used["offset"]).tolist():
            if int(used["offset"][place]) - at >= nbytes:
                break
            at = int(used["offset"][place] + used["nbytes"][place])
        return at

    def _clear(self, offset: int, nbytes: int) -> None:
        """Give the memory back; what is read there then are zeros."""
        nbytes = min(nbytes, os.fstat(self._fd).st_size - offset)
        if nbytes <= 0:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
        if libc.fallocate(self._fd, _PUNCH_HOLE, offset, nbytes):  # a file system that has no holes
            os.pwrite(self._fd, bytes(nbytes), offset)


class RecordView:
    """The records of an arena, to be read while the process that has them goes on writing.

    Sections come and go meanwhile, and their place is used again: who copied arrays asks `has` afterwards
    whether their section was there all the time. The file is never cut, so what is mapped can be read.

    Attributes:
        path: of the file.
        identity: which arena they are of.
        file: device and inode of the file, which tell it from another one in its place.

    Raises:
        IntegrityError: as of `RecordFile.read`.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise IntegrityError(f"its records cannot be read ({error.strerror})") from error
        try:
            status = os.fstat(self._fd)
            self.file = status.st_dev, status.st_ino
            if status.st_size < _FIRST:
                raise IntegrityError("its records are cut short")
            self.identity, _ = _read_header(os.pread(self._fd, _HEADER.size, 0))
            self._memory = self._mapped(status.st_size)
        except BaseException:
            os.close(self._fd)
            raise

    def sections(self, kind: SectionKind) -> list[Section]:
        """The sections of a kind that are there and whole, arrays read only; others are passed over."""
        nbytes = os.fstat(self._fd).st_size
        if nbytes > len(self._memory):
            self._memory = self._mapped(nbytes)
        entries = np.flatnonzero(self._table()["kind"] == kind)
        found = (self._section(kind, int(entry)) for entry in entries)
        return [section for section in found if section is not None]

    def has(self, section: Section) -> bool:
        """Whether a section is there still, so that what was read of it since is its own."""
        now = self._section(section.kind, section.entry)
        return now is not None and (now.about, len(now.memory)) == (section.about, len(section.memory))

    def close(self) -> None:
        """Use it no more. Arrays that are left keep their memory."""
        os.close(self._fd)
        self._memory = memoryview(b"")

    def _mapped(self, nbytes: int) -> memoryview:
        return memoryview(mmap.mmap(self._fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ))

    def _table(self) -> npt.NDArray[np.void]:
        return np.frombuffer(self._memory, _PLACE, _MOST_SECTIONS, _PAGE)

    def _section(self, kind: SectionKind, entry: int) -> Section | None:
        """The section of an entry; None where that is none, or is being written."""
        place = self._table()[entry : entry + 1]
        before = place.tobytes()
        written, crc, offset, nbytes = (int(value) for value in np.frombuffer(before, _PLACE)[0])
        if written != kind or crc != _place_crc(kind, offset, nbytes):
            return None
        if offset < _FIRST or nbytes < _ABOUT_BYTES or offset + nbytes > len(self._memory):
            return None
        memory = self._memory[offset : offset + nbytes]
        size, crc = _ABOUT.unpack_from(memory)
        about = bytes(memory[_ABOUT.size : _ABOUT.size + size])
        if size > _ABOUT_BYTES - _ABOUT.size or zlib.crc32(about) != crc or place.tobytes() != before:
            return None
        return Section(kind, about, entry, memory[_ABOUT_BYTES:])


def is_record_file(path: str | os.PathLike[str]) -> bool:
    """Whether this is a file of records, of whichever version and state."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return os.pread(fd, len(_MAGIC), 0) == _MAGIC
    except OSError:  # a folder
        return False
    finally:
        os.close(fd)


def _place_crc(kind: int, offset: int, nbytes: int) -> int:
    return zlib.crc32(struct.pack("<IQQ", kind, offset, nbytes))


def _here() -> tuple[bytes, int]:
    """Since which start of the machine, and in which pid namespace, process ids mean what they mean now."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return bytes.fromhex(boot), os.stat("/proc/self/ns/pid").st_ino


def _header(identity: ArenaIdentity, cold: bytes) -> bytes:
    boot, namespace = _here()
    numbers = identity.device, identity.inode, identity.capacity_bytes, identity.extent_bytes
    crc = zlib.crc32(_HEADER.pack(_MAGIC, _VERSION, 0, *numbers, boot, namespace, cold))
    return _HEADER.pack(_MAGIC, _VERSION, crc, *numbers, boot, namespace, cold)


def _read_header(header: bytes) -> tuple[ArenaIdentity, bytes]:
    magic, version, crc, *numbers, boot, namespace, cold = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise IntegrityError("its records are none of kvpager's")
    if version != _VERSION:
        raise IntegrityError(f"its records are of version {version}, this is version {_VERSION}")
    if crc != zlib.crc32(_HEADER.pack(magic, version, 0, *numbers, boot, namespace, cold)):
        raise IntegrityError("the head of its records is damaged")
    here = _here()
    if boot != here[0]:
        # Pages may have reached the disk in any order, and process ids mean others.
        raise IntegrityError("it was written before this machine was started")
    if namespace != here[1]:
        raise IntegrityError("it was written in another pid namespace, whose processes cannot be seen")
    return ArenaIdentity(*numbers), cold
