"""What `kvpager doctor` says of the arenas that lie in a folder, and how it removes those that nobody has."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from ..tiers.arena_file import ArenaFile, FoundArena, find_arenas
from ..tiers.errors import ConfigError
from ..tiers.memory import format_bytes
from ..tiers.record_file import is_record_file
from .findings import Finding, ok, problem, warning

__all__ = ["check_arenas", "held_by_arenas"]

_SHARED_MEMORY: Final = Path("/dev/shm")
_PROC: Final = Path("/proc")
_RECORDS: Final = ".records"
_OLD_RECORDS: Final = ".records.old"
"""Those of an arena that was being removed."""
_USUAL_NAME: Final = re.compile(r"kvpager-(\d+)-[0-9a-f]{12}\.arena(?:\.new)?", re.ASCII)
"""Of the arena of a socket (`default_arena_path`), and of the one that was to take its place."""


def check_arenas(folder: Path = _SHARED_MEMORY, *, remove: bool = False, proc: Path = _PROC) -> list[Finding]:
    """The arenas in a folder: whose sidecar lives, and which are orphans.

    Args:
        remove: remove those that nobody has, with their records. One whose records are gone is removed only
            where it is surely an arena of this user's.
        proc: where procfs is mounted.
    """
    try:
        arenas = find_arenas(folder)
    except ConfigError as error:
        return [problem("arenas", str(error), "give the folder of the arenas (--shm)")]
    if not arenas:
        return [ok("arenas", f"none in {folder}")]
    return [_look_at(arena, remove, proc) for arena in arenas]


def held_by_arenas(folder: Path = _SHARED_MEMORY) -> int:
    """Bytes that the arenas in a folder have; 0 where it cannot be read."""
    try:
        return sum(arena.held_bytes for arena in find_arenas(folder))
    except ConfigError:
        return 0


def _look_at(arena: FoundArena, remove: bool, proc: Path) -> Finding:
    path = arena.path
    found = (
        f"{path}, for {format_bytes(arena.nbytes)} of blocks; with its records "
        f"{format_bytes(arena.held_bytes)} are taken"
    )
    if arena.owned:
        return ok("arena", f"{found}; its sidecar lives")
    if arena.owned is None:
        return ok("arena", f"{found}; another user's")
    if arena.nbytes and not _has_records(path):
        return _without_records(path, found, remove, proc)
    if remove:
        return _removed(path, found)
    usual = _USUAL_NAME.fullmatch(os.path.basename(path)) and path.startswith(f"{_SHARED_MEMORY}/")
    who = "on the same socket" if usual else f"with --arena {path}"
    return warning(
        "arena",
        f"{found}; no sidecar has it",
        f"the next kvpager serve {who} takes it over; if none is to come, --remove-orphans",
    )


def _has_records(path: str) -> bool:
    return is_record_file(path + _RECORDS) or is_record_file(path + _OLD_RECORDS)


def _removed(path: str, found: str) -> Finding:
    try:
        # It is locked meanwhile: a sidecar that starts now waits for it, or has taken it first.
        arena = ArenaFile(path, fresh=True, keep=True)
    except ConfigError as error:
        return warning(
            "arena", f"{found}; not removed ({error.problem})", f"look at it, and remove it: rm {path}*"
        )
    try:
        arena.remove()
    finally:
        arena.close()
    return ok("arena", f"{found}; removed")


# An arena without records: nobody knows its blocks any more. The next sidecar there begins anew.


def _without_records(path: str, found: str, remove: bool, proc: Path) -> Finding:
    found += "; its records are gone, and with them its blocks"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        return warning("arena", f"{found}, and it cannot be opened ({error.strerror})", "look who has it")
    try:
        try:
            # While it is locked no sidecar can begin with it.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ok("arena", f"{found}; a process has it locked just now")
        doubt = _doubt(fd, path, proc)
        if doubt is not None:
            return warning(
                "arena",
                f"{found}; {'not removed, since ' if remove else ''}{doubt}",
                f"look at it, and remove it yourself: rm {path}",
            )
        if not remove:
            return warning("arena", f"{found}, and no process has it", "--remove-orphans gives it back")
        os.unlink(path)
    finally:
        os.close(fd)
    return ok("arena", f"{found}; removed")


def _doubt(fd: int, path: str, proc: Path) -> str | None:
    """Why a file without records may be somebody's, or no arena; None where it surely is an orphan."""
    status = os.fstat(fd)
    name = _USUAL_NAME.fullmatch(os.path.basename(path))
    if name is None or int(name[1]) != os.getuid():
        return "its name is not one that kvpager gives to an arena of this user's"
    if status.st_uid != os.getuid():
        return "it is another user's"
    if stat.S_IMODE(status.st_mode) != 0o600 or status.st_nlink != 1 or status.st_size % mmap.PAGESIZE:
        return "it has not the form of an arena"
    if os.path.lexists(path + _RECORDS) or os.path.lexists(path + _OLD_RECORDS):
        return "what lies beside it are no records that can be read"
    with suppress(FileNotFoundError):
        if os.lstat(path).st_ino != status.st_ino:
            return "another file takes its place just now"
    process = _mapped_by(status, path, proc)
    return None if process is None else f"process {process} has it mapped"


def _mapped_by(status: os.stat_result, path: str, proc: Path) -> int | None:
    """A process that has a file mapped; None where none is seen: root alone sees what other users' have."""
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    inode = str(status.st_ino)
    for folder in proc.iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            lines = (folder / "maps").read_text(errors="replace").splitlines()
        except OSError:  # it is gone, or another user's
            continue
        for line in lines:
            fields = line.split(maxsplit=5)
            # Some file systems have another device there than stat tells.
            if fields[4] == inode and (fields[3] == device or fields[5:] == [path]):
                return int(folder.name)
    return None
