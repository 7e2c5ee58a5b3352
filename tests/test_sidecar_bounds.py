"""Clients that flood, do not read, or send anything at all: they harm themselves alone."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from kvpager.api.connection import Limits
from kvpager.api.messages import (
    Commit,
    Count,
    Done,
    Event,
    Evict,
    GetNote,
    GetStats,
    Leased,
    Match,
    Release,
    Reserve,
    Reserved,
    Stats,
    Subscribe,
)
from kvpager.api.wire import Failure, Notice, Reply, Request, encode
from kvpager.kvstore.handles import ReserveStatus
from kvpager.kvstore.host import HostStore
from kvpager.tests.raw_client import (
    ARENA,
    LAYOUT,
    RawClient,
    Running,
    counts,
    hello,
    names,
    store,
)
from kvpager.tiers.cold_disk import DiskColdTier
from kvpager.tiers.errors import (
    KVPagerError,
    ProtocolError,
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


# Clients that take more than their part


def test_a_client_that_never_reads_slows_itself_alone(running: Running, client: RawClient) -> None:
    client.open()
    with RawClient(running.path, OTHER) as greedy:
        greedy.open()
        greedy.socket.settimeout(0.5)
        sent = 0
        request = encode(Request(1, GetStats())) * 100
        try:
            while sent < 1_000_000:
                greedy.socket.sendall(request)
                sent += 100
        except TimeoutError:
            pass  # it is not read from any more
        assert 100 < sent < 200_000
        worst = 0.0
        for _ in range(200):
            began = time.monotonic()
            client.call(Match(0, names(0, 3), 0.0), Leased)
            worst = max(worst, time.monotonic() - began)
        assert worst < 0.5
        # Once it reads, it goes on.
        greedy.socket.settimeout(30)
        for _ in range(1000):
            assert isinstance(greedy.receive(), Reply)


def test_a_flood_of_requests_leaves_others_their_turn(running: Running, client: RawClient) -> None:
    client.open()
    stop = threading.Event()

    def flood() -> None:
        with RawClient(running.path, OTHER) as greedy:
            greedy.open()
            request = encode(Request(1, Match(0, names(0, 500), 0.0))) * 50
            while not stop.is_set():
                greedy.socket.sendall(request)
                for _ in range(50):
                    greedy.receive()

    threads = [threading.Thread(target=flood) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        taken = []
        for _ in range(100):
            began = time.monotonic()
            client.call(Match(0, names(0, 3), 0.0), Leased)
            taken.append(time.monotonic() - began)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert sorted(taken)[50] < 0.1
    assert max(taken) < 2.0


def test_requests_that_wait_are_bounded_and_the_clients_quick_ones_go_on(tmp_path: Path, path: Path) -> None:
    cold = DiskColdTier(tmp_path / "cold", capacity_bytes=64 << 20)
    limits = Limits(requests=8, waiting=2)
    with (
        HostStore(ARENA, cold=cold, clean_ahead=0.0) as host,
        Running(path, host, limits=limits) as running,
        RawClient(path, client=b"c" * 16) as client,
        RawClient(path, OTHER) as other,
    ):
        space = client.open()
        other.open()
        host.arena.wait_ready()
        capacity = host.space(LAYOUT).capacity
        granted = client.call(Reserve(space, names(0, capacity), 0.0), Reserved)
        client.call(Commit(space, granted.slots, granted.generations), Done)
        leases = client.call(Match(space, names(0, capacity - 1), 0.0), Leased)
        # One block could go once it is below, but nothing is written there: these wait.
        host._shared.cold._retry_at = time.monotonic() + 3600
        waiting = [client.send(Reserve(space, names(capacity + at * 2, 2), 0.3)) for at in range(7)]
        quick = client.send(GetStats())
        frame = client.receive()
        assert isinstance(frame, Reply)
        assert frame.id == quick
        assert other.call(GetStats(), Stats).values["sidecar"]["reserved"] == 0
        # At its bound of requests it is not read from; others are.
        waiting += [client.send(Reserve(space, names(capacity + at * 2, 2), 0.3)) for at in range(7, 12)]
        late = client.send(Release(space, leases.slots, leases.generations))
        time.sleep(0.2)
        assert other.call(GetStats(), Stats).values["sidecar"]["leased"] == capacity - 1
        got = [client.receive() for _ in range(len(waiting) + 1)]
        assert sorted(one.id for one in got if isinstance(one, Reply)) == [*waiting, late]
        assert running.sidecar.groups == 2


def test_a_request_with_the_number_of_one_under_way_ends_the_connection(host: HostStore, path: Path) -> None:
    # No thread may wait for it: the first is under way for good.
    with Running(path, host, limits=Limits(waiting=0)), RawClient(path) as client:
        client.open()
        client.socket.sendall(encode(Request(5, GetNote(0, b"x", 5.0))) * 2)
        frame = client.receive()
        assert isinstance(frame, Failure)
        assert (frame.id, str(frame.error)) == (5, "request 5 is under way already")


# Events


def test_who_subscribes_is_told_what_happens(running: Running, client: RawClient) -> None:
    space = running.host.space(LAYOUT)
    with RawClient(running.path, OTHER) as watching:
        watching.call(Subscribe(True), Done)
        client.open()
        store(client, 0, 0, 2)
        client.call(Evict(0, 2), Count)
        for kind, hashes in (("stored", names(0, 2)), ("removed", None)):
            frame = watching.receive()
            assert isinstance(frame, Notice)
            assert isinstance(frame.message, Event)
            assert (frame.message.kind, frame.message.tier, frame.message.space) == (kind, "host", space.id)
            assert hashes is None or frame.message.hashes == hashes
            assert frame.message.lost == 0
        watching.call(Subscribe(False), Done)
        store(client, 0, 10, 2)
        assert isinstance(watching.call(GetStats()), Stats)


def test_an_event_of_many_blocks_comes_in_parts_that_fit_a_frame(host: HostStore, path: Path) -> None:
    with (
        Running(path, host, max_frame=4096),
        RawClient(path) as watching,
        host.space(LAYOUT).reserve(names(0, 500)) as reservation,
    ):
        watching.call(Subscribe(True), Done)
        reservation.commit()
        got: list[bytes] = []
        while len(got) < 500:
            frame = watching.receive()
            assert isinstance(frame, Notice)
            assert isinstance(frame.message, Event)
            assert len(encode(frame)) <= 4100
            got += frame.message.hashes
        assert tuple(got) == names(0, 500)


def test_who_does_not_take_events_is_told_how_many_were_lost(running: Running, client: RawClient) -> None:
    client.open()
    with RawClient(running.path, OTHER) as slow:
        slow.call(Subscribe(True), Done)
        told = 0
        while not counts(client)["events_lost"]:
            store(client, 0, 0, 1000)
            client.call(Evict(0, 1000), Count)
            told += 2
            assert told < 10_000
        lost = counts(client)["events_lost"]
        seen = 0
        while seen + lost < told:
            frame = slow.receive()
            assert isinstance(frame, Notice)
            assert isinstance(frame.message, Event)
            seen += 1
        store(client, 0, 0, 1)
        frame = slow.receive()
        assert isinstance(frame, Notice)
        assert isinstance(frame.message, Event)
        assert frame.message.lost == lost


# Hostile input


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", 0xFFFFFFFF),
        struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
        struct.pack("<I", 0),
        encode(Reply(1, Done())),
        encode(Failure(1, KVPagerError("x"))),
        encode(Notice(Done())),
        encode(Request(1, Done())),
        encode(Request(1, hello())),
        encode(Request(1, GetStats()))[:-1] + b"\x91",
    ],
    ids=["long", "no msgpack", "empty", "reply", "failure", "notice", "no request", "hello again", "short"],
)
def test_what_is_no_request_ends_that_connection_with_a_reason(
    running: Running, client: RawClient, data: bytes
) -> None:
    with RawClient(running.path, OTHER) as wrong:
        wrong.socket.sendall(data)
        frame = wrong.receive()
        assert isinstance(frame, Failure)
        assert isinstance(frame.error, ProtocolError)
        with pytest.raises((EOFError, ConnectionResetError)):
            wrong.receive()
    assert client.open() == 0
    assert counts(client)["protocol_errors"] == 1


@pytest.mark.parametrize(
    ("frame", "number", "said"),
    [
        ([0, 5, 999, []], 5, "999"),
        ([0, 6, 12, [0]], 6, "Match"),
        ([0, 7, 12, ["a", b"", 0.0]], 7, "should be int"),
        ([0, 8, "12", []], 8, ""),
        ([0, 9, 12, 4], 9, ""),
        ([1, 9, 999, []], 0, "999"),
        ([4, 9, 12, [0, b"", 0.0]], 0, "of no kind"),
        ([0, -1, 12, [0, b"", 0.0]], 0, "has no id"),
        ([0, 1], 0, "no array of four"),
    ],
)
@pytest.mark.parametrize("first", [False, True])
def test_a_request_that_cannot_be_made_out_is_refused_by_its_id(
    running: Running, frame: list[Any], number: int, said: str, first: bool
) -> None:
    body = msgpack.packb(frame)
    with RawClient(running.path, OTHER, greet=not first) as wrong:
        wrong.socket.sendall(struct.pack("<I", len(body)) + body)
        reply = wrong.receive()
        assert isinstance(reply, Failure)
        assert isinstance(reply.error, ProtocolError)
        assert (reply.id, said in str(reply.error)) == (number, True), str(reply.error)


def test_a_frame_that_is_nested_too_deeply_is_refused_with_a_reason(running: Running) -> None:
    body = b"\x91" * 4000 + b"\x00"
    with RawClient(running.path, OTHER) as wrong:
        wrong.socket.sendall(struct.pack("<I", len(body)) + body)
        reply = wrong.receive()
        assert isinstance(reply, Failure)
        assert str(reply.error).endswith("a frame is no msgpack: it is nested too deeply")
