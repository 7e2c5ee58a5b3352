"""What `kvpager bench` measures of a sidecar of its own: a match of 64 blocks, beside a bare round trip."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from ..tiers.errors import ServiceUnavailableError
from ..tiers.layout import KVLayout
from .bench_memory import names_from
from .client import connect
from .measurements import Measurement, Unit
from .serve_settings import NO_ADMIN, without_settings

__all__ = ["measure_sidecar"]

_LAYOUT: Final = KVLayout(1, 1, 64)
_BLOCKS: Final = 64
_HOST_BYTES: Final = 16 << 20
_MESSAGE_BYTES: Final = 1024
"""What names of 64 blocks take."""
_START_SECONDS: Final = 30.0
_STOP_SECONDS: Final = 10.0
_WARM_UP: Final = 50
_LEAST_CALLS: Final = 50
_ECHO: Final = """
import socket, sys
with socket.socket(fileno=int(sys.argv[1])) as there:
    while data := there.recv(1 << 16):
        there.sendall(data)
"""


def measure_sidecar(seconds: float) -> list[Measurement]:
    """Round trips over a Unix socket: two processes that do nothing else, and a client of a sidecar.

    Args:
        seconds: how long it may take, beside the start of a sidecar.

    Raises:
        ServiceUnavailableError: the sidecar does not start.
    """
    with _echo() as bare, _sidecar() as path, connect(path, name="kvpager bench", strict=True) as client:
        space = client.space(_LAYOUT)
        hashes = names_from(0, _BLOCKS)
        space.put(hashes, np.zeros((_BLOCKS, _LAYOUT.block_bytes), np.uint8), wait=_START_SECONDS)

        def match() -> float:
            began = time.perf_counter()
            lease = space.match(hashes)
            taken = time.perf_counter() - began
            found = len(lease)
            lease.release()
            if found != _BLOCKS:
                raise ServiceUnavailableError("the sidecar did not find the blocks that it was given")
            return taken

        trips = _samples(bare, seconds / 2)
        matches = _samples(match, seconds / 2)
    return [
        Measurement(
            "socket_round_trip",
            "socket: 1 KiB to another process and back",
            statistics.median(trips),
            Unit.SECONDS,
        ),
        Measurement(
            "sidecar_match",
            "match of 64 blocks in a sidecar, median",
            statistics.median(matches),
            Unit.SECONDS,
            "socket_round_trip",
        ),
        Measurement(
            "sidecar_match_p99",
            "match of 64 blocks in a sidecar, 99th percentile",
            float(np.percentile(matches, 99)),
            Unit.SECONDS,
        ),
    ]


def _samples(call: Callable[[], float], seconds: float) -> list[float]:
    """Seconds of each of many calls."""
    for _ in range(_WARM_UP):
        call()
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(taken) < _LEAST_CALLS:
        taken.append(call())
    return taken


@contextmanager
def _echo() -> Iterator[Callable[[], float]]:
    """A process that sends back what it gets; the call says how long that took."""
    here, there = socket.socketpair()
    data = bytes(_MESSAGE_BYTES)

    def trip() -> float:
        began = time.perf_counter()
        here.sendall(data)
        here.recv(_MESSAGE_BYTES, socket.MSG_WAITALL)
        return time.perf_counter() - began

    with here:
        with there:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _ECHO, str(there.fileno())], pass_fds=[there.fileno()]
            )
        try:
            yield trip
        finally:
            here.shutdown(socket.SHUT_RDWR)
            process.wait(_STOP_SECONDS)


@contextmanager
def _sidecar() -> Iterator[str]:
    """The socket of a sidecar of its own, which ends with this, and with this process at the latest."""
    with tempfile.TemporaryDirectory(prefix="kvpager-bench-") as folder:
        path = str(Path(folder, "sidecar.sock"))
        command = [sys.executable, "-P", "-m", "kvpager", "serve", "--quiet"]
        command += [
            "--admin",
            NO_ADMIN,
            "--socket",
            path,
            "--host-bytes",
            str(_HOST_BYTES),
            "--arena",
            "memory",
        ]
        command += ["--with-process", str(os.getpid())]
        process = subprocess.Popen(command, env=without_settings(os.environ), start_new_session=True)
        try:
            until = time.monotonic() + _START_SECONDS
            while not _listens(path):
                if process.poll() is not None or time.monotonic() > until:
                    raise ServiceUnavailableError("a sidecar to be measured does not start")
                time.sleep(0.02)
            yield path
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as trial:
        return trial.connect_ex(path) == 0
