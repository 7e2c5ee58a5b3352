"""The Unix socket that a sidecar listens on: where it lies, who may reach it, and that nobody else has it.

A file beside the socket, ``PATH.lock``, is locked (flock) by the sidecar that has the path: a socket file
whose lock is free is a dead sidecar's, and is removed.
Sources: Linux manual pages unix(7), flock(2), fchmod(2).
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from pathlib import Path
from typing import Final

from ..tiers.errors import ConfigError
from ..tiers.settings import expect_path

__all__ = ["ListeningSocket", "default_socket_path", "refuse_if_taken"]

_BACKLOG: Final = 128
_LONGEST_PATH: Final = 107
"""Bytes of a Unix socket's path."""
_SOCKET_NAME: Final = "sidecar.sock"


def default_socket_path(*, make: bool = False) -> str:
    """Where a sidecar of this user listens if nobody says otherwise.

    In ``kvpager`` under ``$XDG_RUNTIME_DIR`` or ``/run/user/UID``, whichever there is, else in
    ``/tmp/kvpager-UID``.

    Args:
        make: make the folder if it is not there.

    Raises:
        ConfigError: the folder is another user's, or others may enter it.
    """
    uid = os.getuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    for base in (runtime, f"/run/user/{uid}"):
        if base.startswith("/") and os.access(base, os.W_OK | os.X_OK) and Path(base).is_dir():
            folder = Path(base) / "kvpager"
            break
    else:
        folder = Path(f"/tmp/kvpager-{uid}")
    if make:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError("--socket", f"{folder} cannot be made: {error.strerror}") from error
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return str(folder / _SOCKET_NAME)
    # Who made the folder in /tmp first could listen in our place.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            "--socket", f"{folder} must be a folder of this user's that nobody else may enter (mode 0700)"
        )
    return str(folder / _SOCKET_NAME)


def refuse_if_taken(path: str | os.PathLike[str]) -> None:
    """Say that another sidecar has a path before anything else is done; `ListeningSocket` sees again.

    Raises:
        ConfigError: it has, or nothing can be made there.
    """
    path = expect_path("socket", path)
    _unlock(path, _lock_of(path))


class ListeningSocket:
    """A Unix socket that is listened on, and its path's lock.

    Args:
        path: where it lies.
        mode: who may connect, as a file's mode; in force before anybody can.

    Raises:
        ConfigError: the path is another sidecar's, is no socket's, or cannot be listened on.
    """

    def __init__(self, path: str | os.PathLike[str], mode: int) -> None:
        self.path = expect_path("socket", path)
        if len(os.fsencode(self.path)) > _LONGEST_PATH:
            raise ConfigError("socket", f"a path has {_LONGEST_PATH} bytes at most, {self.path} is longer")
        self._lock = _lock_of(self.path)
        try:
            _remove_stale(self.path)
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                # Linux makes the file with the mode that the descriptor has.
                os.fchmod(self.socket.fileno(), mode)
                self.socket.bind(self.path)
                # The umask took its part; before listen() nobody can connect.
                os.chmod(self.path, mode)
                self._inode = os.lstat(self.path).st_ino
                self.socket.listen(_BACKLOG)
            except BaseException:
                self.socket.close()
                raise
        except OSError as error:
            self._unlock()
            raise ConfigError("socket", f"{self.path} cannot be listened on: {error.strerror}") from error
        except BaseException:
            self._unlock()
            raise
        self._open = True

    def close(self) -> None:
        """Listen no more, and remove the socket and its lock. Idempotent."""
        if self._open:
            self._open = False
            self.socket.close()
            self.remove()
            self._unlock()

    def remove(self) -> None:
        """Remove the socket's file, unless another one lies there by now."""
        try:
            if os.lstat(self.path).st_ino == self._inode:
                os.unlink(self.path)
        except FileNotFoundError:
            pass  # somebody else did

    def _unlock(self) -> None:
        _unlock(self.path, self._lock)


def _unlock(path: str, lock: int) -> None:
    # Removed while it is locked: whoever opened it before sees that it is no longer the one at the path.
    Path(f"{path}.lock").unlink(missing_ok=True)
    os.close(lock)


def _lock_of(path: str) -> int:
    """The locked descriptor of the file beside the socket."""
    name = f"{path}.lock"
    while True:
        try:
            lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError("socket", f"{name} cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_ino == os.stat(name).st_ino:
                return lock
        except BlockingIOError as error:
            os.close(lock)
            raise ConfigError("socket", f"another sidecar listens on {path}") from error
        except FileNotFoundError:
            pass  # its last owner removed it between
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _remove_stale(path: str) -> None:
    """Remove what a dead sidecar left; with the path's lock."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError("socket", f"{path} is there and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as trial:
        answered = trial.connect_ex(path)
    if answered in (0, errno.EAGAIN):
        raise ConfigError("socket", f"another program listens on {path}")
    os.unlink(path)
