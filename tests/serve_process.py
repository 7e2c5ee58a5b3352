"""A real sidecar in a process of its own, which tests stop, kill and start again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from kvpager.tiers.arena_file import default_arena_path

__all__ = ["ServeProcess", "remove_arena"]

_START_SECONDS = 60.0


class ServeProcess:
    """``kvpager serve`` on a socket, until the end of a ``with``, when its arena goes too."""

    def __init__(self, path: Path, *options: str, host_bytes: int = 8 << 20) -> None:
        self.path = path
        self.arena = Path(default_arena_path(str(path)))
        self._options = [f"--host-bytes={host_bytes}", "--quiet", "--admin=off", *options]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        """Returns when it listens.

        Args:
            more: options of this start alone.
        """
        serve = [sys.executable, "-m", "kvpager.api.cli", "serve", f"--socket={self.path}"]
        command = [*serve, *self._options, *more]
        self._process = process = subprocess.Popen(command, env={**os.environ, "PYTHONSAFEPATH": "1"})
        until = time.monotonic() + _START_SECONDS
        while not self._listens():
            assert process.poll() is None, f"the sidecar ended with {process.returncode}"
            assert time.monotonic() < until, "the sidecar does not listen"
            time.sleep(0.02)

    @property
    def running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def pause(self) -> None:
        """It does nothing any more, and does not know it."""
        self.running.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.running.pid, os.WSTOPPED)

    def resume(self) -> None:
        self.running.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """It ends without a word."""
        self.running.kill()
        self.running.wait()

    def terminate(self) -> int:
        """It is asked to end; returns its exit code."""
        self.running.terminate()
        return self.running.wait(60)

    def __enter__(self) -> ServeProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        remove_arena(self.arena)

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as trial:
            return trial.connect_ex(str(self.path)) == 0


def remove_arena(path: Path) -> None:
    """What a killed sidecar left for the next one, of which there is none."""
    for name in (path, Path(f"{path}.records")):
        name.unlink(missing_ok=True)
