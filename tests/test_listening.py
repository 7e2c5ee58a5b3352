"""The sidecar's socket: who can reach it, and that one sidecar has it."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvpager.api.listening import ListeningSocket, default_socket_path
from kvpager.kvstore.handles import ReserveStatus
from kvpager.kvstore.host import HostStore
from kvpager.tests.raw_client import (
    ARENA,
    LAYOUT,
    RawClient,
    Running,
)
from kvpager.tiers.errors import (
    ConfigError,
)

SIZE = LAYOUT.block_bytes
OTHER = b"o" * 16

NEW, PRESENT, PENDING, DENIED = (int(one) for one in ReserveStatus)


@pytest.fixture
def host() -> Iterator[HostStore]:
    with HostStore(ARENA, extent_bytes=1 << 20) as store:
        store.arena.wait_ready()
        yield store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sidecar.sock"


@pytest.fixture
def running(host: HostStore, path: Path) -> Iterator[Running]:
    with Running(path, host) as sidecar:
        yield sidecar


@pytest.fixture
def client(running: Running) -> Iterator[RawClient]:
    with RawClient(running.path) as made:
        yield made


def test_only_its_user_reaches_the_socket_whatever_the_umask(host: HostStore, tmp_path: Path) -> None:
    for mask in (0o000, 0o777):
        before = os.umask(mask)
        try:
            listening = ListeningSocket(tmp_path / f"{mask}.sock", 0o600)
        finally:
            os.umask(before)
        assert stat.S_IMODE(os.stat(listening.path).st_mode) == 0o600
        listening.close()
    with Running(tmp_path / "all.sock", host, allow_uids=[os.getuid() + 1]):
        assert stat.S_IMODE(os.stat(tmp_path / "all.sock").st_mode) == 0o666
    assert list(tmp_path.iterdir()) == []


def test_a_dead_sidecars_socket_is_replaced_and_a_live_ones_is_not(host: HostStore, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    path.with_name("sidecar.sock.lock").touch()
    with Running(path, host):
        with pytest.raises(ConfigError, match="another sidecar listens on"):
            ListeningSocket(path, 0o600)
        with RawClient(path) as client:
            assert client.open() == 0
    assert list(path.parent.iterdir()) == []


def test_what_is_no_sidecars_is_not_removed(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(ConfigError, match="another program listens on"):
            ListeningSocket(path, 0o600)
    path.unlink()
    path.write_text("a letter")
    with pytest.raises(ConfigError, match="is no socket"):
        ListeningSocket(path, 0o600)
    assert path.read_text() == "a letter"
    with pytest.raises(ConfigError, match="107 bytes at most"):
        ListeningSocket(path.with_name("x" * 200), 0o600)
    with pytest.raises(ConfigError, match="cannot be opened: No such file"):
        ListeningSocket(path.parent / "no" / "folder", 0o600)
    assert [one.name for one in path.parent.iterdir()] == ["sidecar.sock"]


def test_the_default_folder_is_its_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    wanted = tmp_path / "kvpager"
    assert default_socket_path() == str(wanted / "sidecar.sock")
    assert not wanted.exists()
    assert default_socket_path(make=True) == str(wanted / "sidecar.sock")
    assert stat.S_IMODE(wanted.stat().st_mode) == 0o700
    wanted.chmod(0o755)
    with pytest.raises(ConfigError, match="must be a folder of this user's"):
        default_socket_path()
    wanted.rmdir()
    wanted.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="must be a folder of this user's"):
        default_socket_path(make=True)


def test_a_lock_that_its_owner_removed_is_no_lock(path: Path) -> None:
    stale = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(stale, fcntl.LOCK_EX)
    os.unlink(f"{path}.lock")
    listening = ListeningSocket(path, 0o600)
    listening.close()
    os.close(stale)
