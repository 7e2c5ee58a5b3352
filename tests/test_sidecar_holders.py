"""Who holds what of the sidecar after a connection, a client or a process is gone."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kvpager.api.messages import (
    Commit,
    Count,
    Done,
    Evict,
    Leased,
    Marks,
    Match,
    Reassert,
    Release,
    Reserve,
    Reserved,
)
from kvpager.kvstore.handles import ReserveStatus
from kvpager.kvstore.host import HostStore
from kvpager.tests.raw_client import (
    ARENA,
    LAYOUT,
    RawClient,
    Running,
    await_true,
    counts,
    names,
    store,
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


def test_a_client_that_comes_back_says_what_it_holds(running: Running) -> None:
    name = b"c" * 16
    with RawClient(running.path, client=b"d" * 16) as other:
        other.open()
        with RawClient(running.path, client=name) as client:
            client.open()
            granted = store(client, 0, 0, 6)
            client.call(Match(0, names(0, 4), 0.0))
            client.call(Match(0, names(0, 2), 0.0))
            reserved = client.call(Reserve(0, names(10, 3), 0.0), Reserved)
        assert counts(other)["leased"] == 6
        assert counts(other)["reserved"] == 3
        with RawClient(running.path, client=name) as again:
            again.open()
            # It remembers one lease of slot 0, three of 1, one of 5 that the books lack, two reservations, a
            # slot of another generation, two that there are none of, and one twice.
            slots = [
                granted.slots[0],
                granted.slots[1],
                granted.slots[5],
                *reserved.slots[:2],
                2,
                1 << 30,
                -1,
            ]
            generations = [*granted.generations[[0, 1, 5]], *reserved.generations[:2], 77, 1, 1]
            said = Reassert(
                0,
                np.array([*slots, slots[0]], np.int32),
                np.array([*generations, generations[0]], np.int64),
                np.array([1, 3, 1, 0, 0, 1, 1, 0, 1], np.int32),
            )
            for _ in range(2):
                marks = again.call(said, Marks).flags.tolist()
                assert marks == [True, True, True, True, True, False, False, False, False]
                assert counts(other)["leased"] == 1 + 3 + 1
                assert counts(other)["reserved"] == 2
            again.call(Commit(0, reserved.slots[:2], reserved.generations[:2]), Done)
            with pytest.raises(ConfigError, match="counts"):
                again.call(Reassert(0, said.slots, said.generations, said.counts + 100_000))
            nothing = np.zeros(0, np.int32)
            again.call(Reassert(0, nothing, nothing.astype(np.int64), nothing), Marks)
            assert counts(other)["leased"] == 0
    running.host.check_integrity()


def test_the_connection_that_a_client_had_before_is_ended(running: Running) -> None:
    with (
        RawClient(running.path, client=b"c" * 16) as first,
        RawClient(running.path, client=b"c" * 16) as second,
    ):
        with pytest.raises((EOFError, ConnectionResetError)):
            first.receive()
        assert second.open() == 0
        with RawClient(running.path, client=b"d" * 16) as third:
            assert third.open() == 0
            assert second.open() == 0


# Processes

HOLDER = """
import sys
from kvpager.api.messages import Commit, Match, Reserve
from kvpager.tests.raw_client import RawClient, names

client = RawClient(sys.argv[1], sys.argv[2].encode())
space = client.open()
held = client.call(Match(space, names(0, 4), 0.0))
reserved = client.call(Reserve(space, names(int(sys.argv[3]), 5), 0.0))
print(len(held.slots), reserved.statuses.tolist().count(0), flush=True)
sys.stdin.read()
"""


class Holder:
    """A process that leases four blocks and reserves five."""

    def __init__(self, path: Path, group: bytes, first: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", HOLDER, str(path), group.decode(), str(first)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "4 5\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)


def test_what_a_group_holds_ends_when_all_its_processes_are_gone_and_not_before(client: RawClient) -> None:
    client.open()
    store(client, 0, 0, 4)
    first, second = Holder(Path(client.socket.getpeername()), OTHER, 100), None
    try:
        second = Holder(Path(client.socket.getpeername()), OTHER, 200)
        assert (counts(client)["leased"], counts(client)["reserved"], counts(client)["groups"]) == (8, 10, 2)
        first.kill()
        await_true(lambda: counts(client)["clients"] == 2)
        time.sleep(0.2)
        assert (counts(client)["leased"], counts(client)["reserved"], counts(client)["groups"]) == (8, 10, 2)
        assert client.call(Evict(0, 9), Count).count == 0
        second.kill()
        await_true(lambda: counts(client)["groups"] == 1)
        assert (counts(client)["leased"], counts(client)["reserved"]) == (0, 0)
        await_true(lambda: bool(client.call(Evict(0, 9), Count).count == 4))
        again = client.call(Reserve(0, (*names(100, 5), *names(200, 5)), 0.0), Reserved)
        assert again.statuses.tolist() == [NEW] * 10
    finally:
        first.kill()
        if second is not None:
            second.kill()


def test_a_dropped_connection_ends_no_lease(running: Running, client: RawClient) -> None:
    client.open()
    store(client, 0, 0, 4)
    with RawClient(running.path, OTHER) as dropped:
        dropped.open()
        held = dropped.call(Match(0, names(0, 4), 0.0), Leased)
    await_true(lambda: counts(client)["clients"] == 1)
    assert counts(client)["leased"] == 4
    with RawClient(running.path, OTHER) as back:
        back.open()
        back.call(Release(0, held.slots, held.generations), Done)
    await_true(lambda: counts(client)["groups"] == 1)
    assert counts(client)["leased"] == 0


def test_no_books_are_kept_of_clients_that_are_gone_and_hold_nothing(running: Running) -> None:
    with RawClient(running.path, client=b"d" * 16) as staying:
        space = staying.open()
        store(staying, space, 0, 3)
        (group,) = running.sidecar._groups._groups.values()
        for number in range(1, 20):
            with RawClient(running.path, client=number.to_bytes(16, "little")) as passing:
                passing.open()
                leased = passing.call(Match(0, names(0, 3), 0.0), Leased)
                if number != 7:
                    passing.call(Release(0, leased.slots, leased.generations), Done)
        await_true(lambda: len(group.members) == 1)
        (books,) = group._claims.values()
        assert set(books) == {b"d" * 16, (7).to_bytes(16, "little")}
        assert counts(staying)["leased"] == 3
