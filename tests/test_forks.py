"""A process that has connections forks: they stay its own, and its child is told so."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvpager.kvstore.host import HostStore
from kvpager.tests.raw_client import ARENA, Running

_WAITING = """
import os, sys, threading
import kvpager
from kvpager.tests.raw_client import LAYOUT, names
from kvpager.tiers.errors import ClosedError

def tried(call):
    try:
        return call()
    except ClosedError as error:
        return str(error)

def in_child(work):
    pid = os.fork()
    if not pid:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0

connection = kvpager.connect(sys.argv[1], timeout=10.0, strict=True)
space = connection.space(LAYOUT)
with space.reserve(names(0, 4)) as first:
    first.commit()
lease, reservation = space.match(names(0, 4)), space.reserve(names(10, 2))
said = f"this connection is process {os.getpid()}'s: connect again in the child"

def child():
    assert connection.closed and not connection.ready
    for call in (
        lambda: space.match(names(0, 1)), lambda: space.reserve(names(20, 1)), lambda: space.view(0),
        lambda: space.release(lease.slots, lease.generations), reservation.abort, connection.stats,
        lambda: reservation.commit(), lambda: connection.space(LAYOUT), lambda: connection.subscribe(print),
        lambda: lease.blocks[0], connection.wait_ready, connection.flush,
    ):
        assert tried(call) == said, (tried(call), call)
    lease.release()
    with reservation, connection:
        pass
    connection.close()
    with kvpager.connect(sys.argv[1], timeout=10.0, strict=True) as other:
        assert len(other.space(LAYOUT).match(names(0, 4))) == 4
        in_child(lambda: None)

ended = threading.Event()
def busy():
    while not ended.is_set():
        with space.match(names(0, 4)) as one:
            assert len(one) == 4
threads = [threading.Thread(target=busy) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(10):
    in_child(child)
ended.set()
for thread in threads:
    thread.join()
in_child(lambda: None)
connects = connection.counters.connects
assert (connects, connection.lost, connection.counters.lost) == (1, (), 0), connection.counters
reservation.commit()
lease.release()
assert len(space.match(names(10, 2))) == 2
connection.close()
told = tried(lambda: space.match(names(0, 1)))
in_child(lambda: told == tried(connection.stats) == "the connection to the sidecar was closed" or 1 / 0)
"""

_ON_A_LOOP = """
import asyncio, os, sys
import kvpager
from kvpager.tests.raw_client import LAYOUT, names
from kvpager.tiers.errors import ClosedError

async def main():
    connection = await kvpager.connect_async(sys.argv[1], timeout=10.0, strict=True)
    space = await connection.space(LAYOUT)
    reservation = await space.reserve(names(0, 4))
    said = f"this connection is process {os.getpid()}'s: connect again in the child"
    pid = os.fork()
    if not pid:
        code = 1
        try:
            for call in (connection.check_open, reservation.abort, reservation.commit, lambda: space.view(0)):
                try:
                    call()
                except ClosedError as error:
                    assert str(error) == said
                else:
                    raise AssertionError(call)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    reservation.commit()
    await space.committed()
    assert len(await space.match(names(0, 4))) == 4
    assert connection.counters.connects == 1
    await connection.close()

asyncio.run(main())
"""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with HostStore(ARENA) as host, Running(tmp_path / "socket", host) as sidecar:
        yield sidecar


@pytest.mark.parametrize("program", [_WAITING, _ON_A_LOOP])
def test_a_forked_child_is_told_to_connect_by_itself_and_its_parent_goes_on(
    running: Running, program: str
) -> None:
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, str(running.path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
