"""The file of an arena that outlives its process: its lock, its records, and what becomes of what was there.

``PATH`` holds the blocks and is what clients map; ``PATH.records`` says what they are, and nobody else gets
it. Whoever has ``PATH`` locked (flock) is its owner. Other processes may have it mapped, whether it has an
owner or not: so a file that has blocks is never cut, grown or written anew. Where it cannot be taken over,
another file takes its place, and the old one goes with the last process that has it mapped.

``PATH`` itself is marked as kvpager's, by an extended attribute where its file system has these (tmpfs since
Linux 6.6): one that has lost its records is told from anybody else's file, and replaced.
Sources: Linux manual pages flock(2), xattr(7).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import logging
import os
import re
import shlex
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from .errors import ClosedError, ConfigError, IntegrityError, MemoryUnavailableError
from .memory import format_bytes
from .record_file import COLD_BYTES, ArenaIdentity, RecordFile, is_record_file
from .settings import expect_flag, expect_path, expect_text

__all__ = ["ArenaFile", "FoundArena", "default_arena_path", "find_arenas"]

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_SHARED_MEMORY: Final = "/dev/shm"
_RECORDS: Final = ".records"
_NEW: Final = ".new"
_OLD: Final = ".old"
"""Records of an arena that is being removed."""
_MARK: Final = "user.kvpager.arena"
"""The extended attribute of a file that kvpager made, or took over."""
_UNMARKABLE: Final = (errno.ENOTSUP, errno.EPERM, errno.ENOSPC)
"""Where a file system has no such attributes, or no room for one."""
_USUAL_NAME: Final = re.compile(r"kvpager-(\d+)-[0-9a-f]{12}\.arena", re.ASCII)
"""Of `default_arena_path`, with the user."""
_LOCK_SECONDS: Final = 0.5
"""How long a lock is waited for: its owner may just be ending, or somebody may be looking who has it."""
_LOCK_POLL: Final = 0.02


def default_arena_path(of: str) -> str:
    """Where the arena of this user's sidecar on the socket ``of`` lies, if nobody says otherwise."""
    return f"{_SHARED_MEMORY}/kvpager-{os.getuid()}-{_digest(os.path.abspath(of), 6).hex()}.arena"


class ArenaFile:
    """An arena's file, locked, and its records. A `HostStore` takes it over and closes it.

    Args:
        path: where it lies: on a tmpfs (``/dev/shm``), or any file system that can be mapped.
        fresh: have what is there replaced.
        keep: whether the files stay when this is closed.
        cold: names the cold tier behind it, by its URL. Of what was copied to the same one it is known that
            it was; with another, or none, all is to be copied.

    Attributes:
        file: the arena's file.
        keep: as given; may be changed until it is closed.

    Raises:
        ConfigError: it is another process's, another user's, or no arena of kvpager's.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, fresh: bool = False, keep: bool = False, cold: str = ""
    ) -> None:
        self.path = expect_path("arena", path)
        self._cold = _cold_digest(cold)
        self.keep = expect_flag("keep", keep)
        fresh = expect_flag("fresh", fresh)
        self.file = _locked(self.path)
        self._records: RecordFile | None = None
        self._taken = False
        self._removed = False
        self._closed = False
        self._reason: str | None = None
        """Why nothing of what is there is taken over, where that is to be told."""
        try:
            if not os.fstat(self.file.fileno()).st_size:
                self._expect_no_foreign_records()
                return
            if not self._is_ours():
                raise ConfigError(
                    "arena",
                    f"{self.path} is there and is no arena of kvpager's, or has lost its records, "
                    f"{self._records_path}: if nobody needs it, remove it (rm {shlex.quote(self.path)}), "
                    "else name another file",
                )
            if not fresh:
                self._records = self._found()
        except BaseException:
            self._unlock()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of the arena that is there and may be taken over; 0 where there is none."""
        return 0 if self._records is None else self._records.identity.capacity_bytes

    @property
    def same_cold(self) -> bool:
        """Whether what the records say of copies in the cold tier is of this one."""
        return self._records is not None and self._records.cold == self._cold != bytes(COLD_BYTES)

    @property
    def records(self) -> RecordFile:
        """The arena's records.

        Raises:
            ClosedError: `take_over` was not called, or it is closed.
        """
        if self._records is None:
            raise ClosedError("the arena's file has no records yet, or no more")
        return self._records

    def take_over(
        self, capacity_bytes: int, extent_bytes: int, read: Callable[[RecordFile], _T], nothing: _T
    ) -> _T:
        """What is there becomes the arena, as ``read`` finds it; else a new one does, and its log says why.

        Args:
            read: reads the records; raises `IntegrityError` where they contradict themselves.
            nothing: what is read of a new one.

        Raises:
            ConfigError: the arena that is there has another size.
            MemoryUnavailableError: there is no room for records.
        """
        if self._records is not None:
            found = self._records.identity
            for setting, here, asked in (
                ("host_bytes", found.capacity_bytes, capacity_bytes),
                ("extent_bytes", found.extent_bytes, extent_bytes),
            ):
                if here != asked:
                    raise ConfigError(
                        setting,
                        f"{self.path} is an arena of {format_bytes(here)}, not of {format_bytes(asked)}; "
                        "give up what is in it (--fresh), or ask for as much",
                    )
            try:
                result = read(self._records)
            except IntegrityError as error:
                self._reason = str(error)
            else:
                self._taken = True
                self._records.set_cold(self._cold)
                _mark(self.file)
                return result
        if self._reason is not None:
            _log.warning("the arena %s is not taken over, a new one is made: %s", self.path, self._reason)
        self._start_over(capacity_bytes, extent_bytes).set_cold(self._cold)
        self._taken = True
        return nothing

    def set_cold(self, cold: str) -> None:
        """Another cold tier has copies of the blocks from now on; empty: none has. See ``cold`` above.

        Raises:
            ClosedError: as of `records`.
        """
        self._cold = _cold_digest(cold)
        self.records.set_cold(self._cold)

    def remove(self) -> None:
        """Remove the files, while they are locked; who has the arena mapped keeps it."""
        if self._removed:
            return
        self._removed = True
        old = Path(self._records_path + _OLD)
        # While nobody else can have the path. Killed in between, it is seen that the arena was kvpager's.
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._records_path, old)
        with contextlib.suppress(FileNotFoundError):  # somebody else did
            if os.lstat(self.path).st_ino == os.fstat(self.file.fileno()).st_ino:
                os.unlink(self.path)
        old.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the files unless they are to stay, and give up the lock. Idempotent.

        One that was not taken over stays, too; one that is empty does not.
        """
        if self._closed:
            return
        if not os.fstat(self.file.fileno()).st_size or (self._taken and not self.keep):
            self.remove()
        self._unlock()

    # Inside

    @property
    def _records_path(self) -> str:
        return self.path + _RECORDS

    def _is_ours(self) -> bool:
        """Whether what is there is kvpager's for sure: by records of any state, its mark, or its name."""
        return (
            is_record_file(self._records_path)
            or is_record_file(self._records_path + _OLD)
            or _is_marked(self.file.fileno())
            or _has_usual_name(self.path)
        )

    def _expect_no_foreign_records(self) -> None:
        """Records are written beside a new arena: not over a file that is somebody else's."""
        path = self._records_path
        if os.path.lexists(path) and not is_record_file(path) and not self._is_ours():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)  # it is empty, and as like as not was made just now
            raise ConfigError(
                "arena",
                f"its records would take the place of {path}, which is none of kvpager's, or is damaged: "
                f"if nobody needs it, remove it (rm {shlex.quote(path)}), else name another file",
            )

    def _found(self) -> RecordFile | None:
        try:
            records = RecordFile.read(self._records_path)
        except IntegrityError as error:
            self._reason = str(error)
            return None
        status, identity = os.fstat(self.file.fileno()), records.identity
        if (identity.device, identity.inode) != (status.st_dev, status.st_ino):
            self._reason = "its records are of another file"
        elif status.st_size != identity.capacity_bytes:
            self._reason = f"it is {status.st_size} bytes long, and its records say {identity.capacity_bytes}"
        else:
            return records
        records.close()
        return None

    def _start_over(self, capacity_bytes: int, extent_bytes: int) -> RecordFile:
        """Another file in place of one that has blocks, and new records."""
        if self._records is not None:
            self._records.close()
            self._records = None
        old, fresh = self.file, self.path + _NEW
        replaces = os.fstat(old.fileno()).st_size > 0
        file = _made(fresh) if replaces else old
        try:
            status = os.fstat(file.fileno())
            identity = ArenaIdentity(status.st_dev, status.st_ino, capacity_bytes, extent_bytes)
            _mark(file)
            # Before the arena has its name: blocks without records are nobody's, and would be refused.
            self._records = RecordFile.create(self._records_path, identity)
            if replaces:
                os.rename(fresh, self.path)
        except BaseException:
            if replaces:
                Path(fresh).unlink(missing_ok=True)
                file.close()
            raise
        Path(self._records_path + _OLD).unlink(missing_ok=True)
        self.file = file
        if replaces:
            # Only now, so that nobody else could take the path.
            fcntl.flock(old, fcntl.LOCK_UN)
            old.close()
        return self._records

    def _unlock(self) -> None:
        self._closed = True
        if self._records is not None:
            self._records.close()
            self._records = None
        # Not by closing alone: a mapping that is left holds the open file, and with it the lock.
        fcntl.flock(self.file, fcntl.LOCK_UN)
        self.file.close()


@dataclass(frozen=True)
class FoundArena:
    """An arena's file that lies somewhere.

    Args:
        path: the file.
        nbytes: bytes that it may come to.
        held_bytes: bytes of memory, or of the disk, that it and its records take.
        owned: whether a process has it locked; None where this user may not look. One that nobody owns is an
            orphan: the next sidecar there takes it over, or replaces it where its records are gone, and if
            there is none to come it may be removed.
    """

    path: str
    nbytes: int
    held_bytes: int
    owned: bool | None


def find_arenas(folder: str | os.PathLike[str] = _SHARED_MEMORY) -> list[FoundArena]:
    """The arenas in a folder, those of other users included, by their paths.

    Raises:
        ConfigError: the folder cannot be read.
    """
    folder = expect_path("folder", folder)
    try:
        names = {entry.name for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)}
    except OSError as error:
        raise ConfigError("folder", f"{folder} cannot be read: {error.strerror}") from error
    arenas = {
        name for name in names if name.startswith("kvpager-") and name.endswith((".arena", ".arena.new"))
    }
    for name in names:
        base = name.removesuffix(_RECORDS)
        if base != name and base in names and is_record_file(Path(folder, name)):
            arenas.add(base)
        elif _is_marked(os.path.join(folder, name)):
            arenas.add(name)
    found = []
    for name in sorted(arenas):
        path = os.path.join(folder, name)
        try:
            status = os.lstat(path)
            held = status.st_blocks * 512
            if name + _RECORDS in names:
                held += os.lstat(path + _RECORDS).st_blocks * 512
            found.append(FoundArena(path, status.st_size, held, _is_owned(path)))
        except FileNotFoundError:
            continue  # it went meanwhile
    return found


def _mark(file: io.FileIO) -> None:
    """Have it be told from other files, where the file system can."""
    try:
        os.setxattr(file.fileno(), _MARK, b"1")
    except OSError as error:
        if error.errno not in _UNMARKABLE:
            raise MemoryUnavailableError(f"arena: its file cannot be marked: {error.strerror}") from error


def _is_marked(file: int | str) -> bool:
    try:
        os.getxattr(file, _MARK, follow_symlinks=False) if isinstance(file, str) else os.getxattr(file, _MARK)
    except OSError:  # there is no mark, it cannot be had, or the file went meanwhile
        return False
    return True


def _has_usual_name(path: str) -> bool:
    """Whether it is one of `default_arena_path`, of this user."""
    folder, name = os.path.split(os.path.abspath(path))
    found = _USUAL_NAME.fullmatch(name)
    return folder == _SHARED_MEMORY and found is not None and int(found[1]) == os.getuid()


def _is_owned(path: str) -> bool | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except PermissionError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _opened(path: str, flags: int = 0) -> io.FileIO:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    return io.FileIO(fd, "r+")


def _digest(text: str, nbytes: int) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=nbytes).digest()


def _cold_digest(cold: str) -> bytes:
    """What stands in records for the name of a cold tier."""
    return _digest(cold, COLD_BYTES) if expect_text("cold", cold, empty=True) else bytes(COLD_BYTES)


def _made(path: str) -> io.FileIO:
    """A new file, locked, in place of what a killed process left there."""
    try:
        Path(path).unlink(missing_ok=True)
        file = _opened(path, os.O_EXCL)
    except OSError as error:
        raise ConfigError("arena", f"{path} cannot be made: {error.strerror}") from error
    fcntl.flock(file, fcntl.LOCK_EX)  # who looks whether it has an owner has it for a moment
    return file


def _locked(path: str) -> io.FileIO:
    """The file at the path, made if there is none, and its lock."""
    until = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            file = _opened(path)
        except OSError as error:
            raise ConfigError("arena", f"{path} cannot be opened: {error.strerror}") from error
        try:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise ConfigError(
                    "arena", f"{path} must be a file of this user's that nobody else may open (mode 0600)"
                )
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(path, follow_symlinks=False).st_ino == status.st_ino:
                return file
        except BlockingIOError as error:
            if time.monotonic() > until:
                file.close()
                raise ConfigError("arena", f"{path} is the arena of another process") from error
            time.sleep(_LOCK_POLL)
        except FileNotFoundError:
            pass  # its last owner removed it between
        except BaseException:
            file.close()
            raise
        file.close()
