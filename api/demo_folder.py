"""Folders that demos make in the system's temporary one, and what is left of those that were killed.

A demo holds a lock on a file in its folder, which the kernel lets go of with the process, however that ends:
there is no process number that another process could have by now. The next demo removes what nobody holds.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from ..tiers.cold_disk import LOCK_NAME
from .processes import Interruptions

__all__ = ["COLD", "demo_folder", "remove_abandoned"]

COLD: Final = "cold"
"""The folder in it that is a cold tier's."""

_log = logging.getLogger(__name__)

_PREFIX: Final = "kvpager-demo-"
_LOCK: Final = "kvpager-demo.lock"
_LOOK: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def demo_folder(interruptions: Interruptions) -> Iterator[str]:
    """A folder of this demo's own, which goes when it is over."""
    # The lock is held until the folder is gone: whoever gets it before removes it, too.
    with ExitStack() as last, ExitStack() as rest:
        with interruptions.put_off():
            folder = tempfile.mkdtemp(prefix=_PREFIX)
            rest.callback(shutil.rmtree, folder)
            # Nobody finds it before it is held.
            fresh = os.path.join(folder, f"{_LOCK}.new")
            lock = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            last.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(fresh, os.path.join(folder, _LOCK))
        yield folder


def remove_abandoned(parent: str | None = None) -> list[str]:
    """Remove folders that demos of this user made, and that neither they nor what they started has any more.

    What is not plainly such a folder is left alone: another user's, one that others may enter, a symbolic
    link, one without the lock.

    Args:
        parent: where to look; None: the system's temporary folder.

    Returns:
        their paths.
    """
    parent = tempfile.gettempdir() if parent is None else parent
    removed = []
    for path in sorted(Path(parent).glob(f"{_PREFIX}*")):
        with ExitStack() as opened:
            try:
                folder = _open(opened, str(path), _FOLDER)
                lock = _open(opened, _LOCK, _LOOK, folder)
                _take(lock)
                with suppress(FileNotFoundError):
                    # Processes that a demo started may outlive it by moments.
                    _take(_open(opened, f"{COLD}/{LOCK_NAME}", _LOOK, folder))
            except OSError:
                continue
            try:
                _empty(folder)
                os.rmdir(path)
            except OSError as error:
                _log.warning("%s, which a demo left, cannot be removed: %s", path, error.strerror)
                continue
        removed.append(str(path))
    return removed


def _open(opened: ExitStack, path: str, flags: int, folder: int | None = None) -> int:
    """A file or folder of this user's that nobody else may open.

    Raises:
        OSError: it is not there, or none of these.
    """
    found = os.open(path, flags, dir_fd=folder)
    opened.callback(os.close, found)
    status = os.fstat(found)
    kind = stat.S_ISDIR if flags & os.O_DIRECTORY else stat.S_ISREG
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or not kind(status.st_mode):
        raise PermissionError(f"{path} is none of this user's alone")
    return found


def _take(lock: int) -> None:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _empty(folder: int) -> None:
    """Remove what is in a folder; links in it and not what they lead to, and the lock last."""
    for name in sorted(os.listdir(folder), key=_LOCK.__eq__):
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
