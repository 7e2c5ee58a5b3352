"""Who is at the other end of a socket, and when a process is gone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvpager.api import groups
from kvpager.api.groups import peer_of
from kvpager.tiers.errors import AccessDeniedError


def since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@pytest.fixture(params=["by the socket", "by its number"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the process is found: as of Linux 6.5, and before."""
    if request.param == "by its number":
        monkeypatch.setattr(groups, "_SO_PEERPIDFD", 9999)
    return str(request.param)


@pytest.fixture
def pair() -> Iterator[socket.socket]:
    one, other = socket.socketpair()
    with one, other:
        yield one


def test_the_kernel_says_who_connected(way: str, pair: socket.socket) -> None:
    peer = peer_of(pair, since_boot())
    try:
        assert (peer.pid, peer.uid) == (os.getpid(), os.getuid())
        stat = Path("/proc/self/stat").read_text()
        assert peer.started == int(stat.rpartition(")")[2].split()[19])
        assert os.readlink(f"/proc/self/fd/{peer.pidfd}") == "anon_inode:[pidfd]"
    finally:
        os.close(peer.pidfd)


def test_a_process_that_connected_and_ended_is_gone(way: str, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    program = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({str(path)!r})"
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        subprocess.run([sys.executable, "-c", program], check=True)
        connected, _ = listening.accept()
        with connected, pytest.raises(AccessDeniedError, match=r"is gone|cannot be (watched|seen)"):
            peer_of(connected, since_boot())
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_that_started_after_its_client_connected_is_another(
    pair: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "_SO_PEERPIDFD", 9999)
    with pytest.raises(AccessDeniedError, match="is gone"):
        peer_of(pair, 0.0)
