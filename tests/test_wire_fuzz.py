"""Bytes and requests of any kind, sent to a sidecar that is at work: whoever sends them harms nobody else."""

from __future__ import annotations

import os
import random
import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any, get_type_hints

import kvpager
import msgpack
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvpager.api.client import Connection
from kvpager.api.connection import Limits
from kvpager.api.groups import UNNAMED, Group
from kvpager.api.messages import (
    Abort,
    Blocks,
    Commit,
    Count,
    Done,
    Evict,
    Flush,
    Get,
    GetNote,
    GetStats,
    Hashes,
    Hello,
    LeaseSlots,
    Load,
    Match,
    Message,
    Pin,
    PurgeTenant,
    Put,
    PutNote,
    Reassert,
    Release,
    Report,
    Reserve,
    Stats,
    Subscribe,
    Unpin,
)
from kvpager.api.operator_messages import Drain, EvictWhere
from kvpager.api.remote_access import RemoteAccess
from kvpager.api.wire import Failure, Notice, Reply, Request, encode
from kvpager.kvstore.handles import Generations
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.policy import Ids
from kvpager.kvstore.space import HostSpace
from kvpager.tests.frame_strategies import ANY_FRAME, VALUES
from kvpager.tests.raw_client import (
    ARENA,
    LAYOUT,
    RawClient,
    Running,
    await_true,
    hello,
    names,
    open_space,
)
from kvpager.tests.wire_frames import frames
from kvpager.tiers.errors import KVPagerError, ProtocolError
from kvpager.tiers.layout import KVLayout

SIZE = LAYOUT.block_bytes
TOKEN = "a token for tests"
OTHER = b"o" * 16
ENDED = (EOFError, ConnectionResetError, BrokenPipeError)
KEPT = 1 << 40
"""The number of the first block that the bystanders keep."""


def passing(running: Running) -> list[Group]:
    """Client groups but that of hostile local clients: their process is this one, which lives on."""
    return [group for name, group in running.sidecar._groups._groups.items() if name != OTHER]


class Bystanders:
    """Two clients, one local and one over TCP, who hold blocks, and find them as they left them."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self._blocks = np.random.default_rng(1).integers(0, 256, (32, SIZE), dtype=np.uint8)
        self._clients: list[Connection] = [
            kvpager.connect(running.path, strict=True, timeout=20.0),
            kvpager.connect(f"kvpager://127.0.0.1:{running.port}", token=TOKEN, strict=True, timeout=20.0),
        ]
        self._spaces = [client.space(LAYOUT) for client in self._clients]
        assert self._spaces[1].put(names(KEPT, 32), self._blocks) == 32
        self._leases = [space.match(names(KEPT, 32)) for space in self._spaces]
        self._reservation = self._spaces[0].reserve(names(KEPT + 100, 4))
        self.check()

    def check(self) -> None:
        """They noticed nothing: no connection was lost, and what they hold is theirs and unharmed."""
        out = np.zeros_like(self._blocks)
        for client, space, lease in zip(self._clients, self._spaces, self._leases, strict=True):
            assert client.counters.connects == 1
            assert len(lease) == 32
            assert all((block == kept).all() for block, kept in zip(lease.blocks, self._blocks, strict=True))
            assert space.get(names(KEPT, 32), out) == 32
            assert (out == self._blocks).all()
        assert self.sidecar["spaces"] >= 1

    @property
    def sidecar(self) -> dict[str, int]:
        counts: dict[str, int] = self._clients[0].stats()["sidecar"]
        return counts

    def leave(self) -> None:
        """They give back what they hold, which nobody else gave back, and nobody else holds anything."""
        self.check()
        for block in self._reservation.blocks:
            block[:] = 3
        self._reservation.commit()
        with self._spaces[1].match(names(KEPT + 100, 4)) as lease:
            assert all((block == 3).all() for block in lease.blocks)
        for lease in self._leases:
            lease.release()
        await_true(lambda: not any(group.leased or group.reserved for group in passing(self.running)))
        for client in self._clients:
            client.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with (
        HostStore(ARENA, extent_bytes=1 << 20) as host,
        Running(tmp_path / "socket", host, remote=RemoteAccess("127.0.0.1", 0, TOKEN)) as sidecar,
    ):
        yield sidecar


@pytest.fixture
def bystanders(running: Running) -> Iterator[Bystanders]:
    both = Bystanders(running)
    yield both
    both.leave()


@pytest.fixture(params=["unix", "tcp"])
def enter(request: pytest.FixtureRequest, running: Running) -> Callable[..., RawClient]:
    """Makes hostile clients of one kind of socket."""
    tcp = request.param == "tcp"
    numbers = count(1)

    def made(**more: Any) -> RawClient:
        # Books of a local client that holds something are kept as long as its process lives: this one.
        name = next(numbers).to_bytes(16, "big") if tcp else UNNAMED
        where, token = (running.port, TOKEN) if tcp else (running.path, "")
        client = RawClient(where, OTHER, name, token=token, **more)
        client.socket.settimeout(20)
        return client

    return made


def unanswered(client: RawClient, numbers: set[int]) -> set[int]:
    """Read until these requests are answered, or the sidecar ends the connection: those that are not."""
    left = set(numbers)
    with suppress(*ENDED):
        while left:
            frame = client.receive()
            if isinstance(frame, Reply | Failure):
                left.discard(frame.id)
    return left


# Frames that are wrong in one way


def framed(body: Any) -> bytes:
    data = msgpack.packb(body)
    return struct.pack("<I", len(data)) + bytes(data)


@pytest.mark.parametrize(
    ("data", "ends"),
    [
        pytest.param(struct.pack("<I", (64 << 20) + 1), True, id="oversize"),
        pytest.param(struct.pack("<I", 0xFFFFFFFF) + bytes(100), True, id="very oversize"),
        pytest.param(struct.pack("<I", 0), True, id="empty"),
        pytest.param(struct.pack("<I", 4) + b"\xc1\x93\x01\x02", True, id="no msgpack"),
        pytest.param(framed([0, 1, 9999, []]), True, id="unknown message"),
        pytest.param(framed([7, 1, 31, []]), True, id="unknown kind"),
        pytest.param(framed([0, 1, 12, [0, b"x" * 15, 0.0]]), True, id="hashes cut"),
        pytest.param(framed([0, 1, 12, [0]]), True, id="fields lacking"),
        pytest.param(encode(Request(1, hello(token=TOKEN))), True, id="Hello again"),
        pytest.param(encode(Reply(1, Done())), True, id="a reply"),
        pytest.param(encode(Notice(Done())), True, id="a notice"),
        pytest.param(encode(Request(1, Get(99, names(0, 1)))), False, id="space not opened"),
        pytest.param(encode(Request(1, Put(0, names(0, 2), bytes(SIZE), 0.0))), False, id="bytes lacking"),
        pytest.param(
            encode(Request(1, open_space(KVLayout(1, 1, 64, 1 << 20)))), False, id="layout too large"
        ),
        pytest.param(framed([0, 1, 10, [0, 0, 0, 0, "x", "y", 0, 0, 0, "", ""]]), False, id="no layout"),
        pytest.param(framed([0, 1, 10, [1, 1, 64, 16, "float16", "z" * 999, 2, 0, 0, "", ""]]), False),
        pytest.param(framed([0, 1, 24, [0, -5]]), False, id="a negative count"),
        pytest.param(framed([0, 1, 18, [0, b"x" * 16, float("inf")]]), False, id="an endless wait"),
    ],
)
def test_a_frame_that_is_wrong_gets_a_typed_error_and_others_notice_nothing(
    enter: Callable[..., RawClient], bystanders: Bystanders, data: bytes, ends: bool
) -> None:
    with enter() as client:
        client.open()
        client.socket.sendall(data)
        frame = client.receive()
        assert isinstance(frame, Failure)
        assert type(frame.error) is not KVPagerError  # a fault of the sidecar
        assert isinstance(frame.error, ProtocolError) is ends
        if ends:
            with pytest.raises(ENDED):
                client.receive()
        else:
            assert isinstance(client.call(GetStats()), Stats)


def test_a_frame_that_is_cut_ends_with_its_connection(
    enter: Callable[..., RawClient], bystanders: Bystanders
) -> None:
    frame = encode(Request(5, Put(0, names(0, 64), bytes(64 * SIZE), 0.0)))
    for length in (0, 1, 3, 4, 5, 20, 70_000, len(frame) - 1):
        with enter() as client:
            client.open()
            client.socket.sendall(frame[:length])
            client.socket.shutdown(socket.SHUT_WR)
            with pytest.raises(ENDED):
                client.receive()
    assert bystanders.running.host.space(LAYOUT).match(names(0, 1)).slots.tolist() == []


def test_an_id_that_is_under_way_ends_the_connection(tmp_path: Path) -> None:
    # No thread may wait for it: the first is under way for good.
    remote, limits = RemoteAccess("127.0.0.1", 0, TOKEN), Limits(waiting=0)
    with (
        HostStore(ARENA) as host,
        Running(tmp_path / "socket", host, remote=remote, limits=limits) as running,
    ):
        for where in (running.path, running.port):
            with RawClient(where, token=TOKEN) as client:
                client.open()
                client.socket.sendall(encode(Request(5, GetNote(0, b"x", 5.0))) * 2)
                frame = client.receive()
                assert isinstance(frame, Failure)
                assert (frame.id, str(frame.error)) == (5, "request 5 is under way already")
                with pytest.raises(ENDED):
                    client.receive()


@pytest.mark.parametrize(
    "first",
    [
        Request(7, hello(newest=0, oldest=0, token=TOKEN)),
        Request(7, hello(newest=9, oldest=2, token=TOKEN)),
        Request(7, hello(magic="other", token=TOKEN)),
        Request(7, hello(group=b"short", token=TOKEN)),
        Request(7, hello(client=b"", token=TOKEN)),
        Request(7, GetStats()),
        Reply(7, Done()),
        Notice(hello(token=TOKEN)),
    ],
)
def test_a_first_frame_that_is_wrong_is_told_so(
    enter: Callable[..., RawClient], bystanders: Bystanders, first: Any
) -> None:
    with enter(greet=False) as client:
        client.socket.sendall(encode(first))
        frame = client.receive()
        assert isinstance(frame, Failure)
        assert isinstance(frame.error, ProtocolError)
        assert frame.id in (0, 7)
        with pytest.raises(ENDED):
            client.receive()


# Requests of any kind


LIKELY: dict[Any, st.SearchStrategy[Any]] = {
    **VALUES,
    int: st.integers(-1, 40) | VALUES[int],
    float: st.sampled_from([0.0, 0.0, -1.0, float("inf"), float("nan")]),
    bytes: st.sampled_from([b"", bytes(SIZE), bytes(3 * SIZE), bytes(16)]) | VALUES[bytes],
    Hashes: st.integers(0, 40).flatmap(
        lambda first: st.integers(0, 5).map(lambda count: names(first, count))
    ),
    Ids: st.lists(st.integers(-2, 64), max_size=6).map(lambda slots: np.array(slots, np.int32)),
}


REQUESTS: list[type[Message]] = [type(frame.message) for frame in frames().values() if type(frame) is Request]
REQUESTS.remove(Hello)


def likely(kind: type[Message], seen: dict[str, Generations]) -> st.SearchStrategy[Message]:
    """A message that is close to making sense: numbers of spaces and slots that there are."""
    hints = get_type_hints(kind)
    of_names: dict[str, st.SearchStrategy[Any]] = {
        "space": st.integers(0, 2) | st.integers(-1, 4),
        "counts": st.lists(st.integers(-1, 3), max_size=6).map(lambda some: np.array(some, np.int32)),
        "generations": st.lists(st.sampled_from(range(64)), max_size=6).map(
            lambda at: seen["generations"][np.array(at, np.int64)]
        ),
    }
    # Not the bystanders', whose blocks would go; nobody guesses the ids of their connections.
    if kind in (PurgeTenant, EvictWhere):
        of_names["tenant"] = st.sampled_from(["anna", "é" * 300])
    if kind is Drain:
        of_names["on"] = st.just(False)
    if kind is Report:  # its space is a name, its counts are by name
        of_names = {}
    return st.builds(
        kind,
        **{
            field.name: of_names.get(field.name, LIKELY[hints[field.name]])
            for field in fields(kind)  # type: ignore[arg-type]
        },
    )


@pytest.mark.parametrize("examples", [150, pytest.param(5000, marks=pytest.mark.full)])
@pytest.mark.timeout(1200)
def test_requests_that_nearly_make_sense_are_answered_each_and_harm_nobody(
    enter: Callable[..., RawClient], bystanders: Bystanders, examples: int
) -> None:
    space = bystanders.running.host.space(LAYOUT)
    seen = {"generations": space._records.generations}
    request = st.sampled_from(REQUESTS).flatmap(lambda kind: likely(kind, seen))

    @settings(
        max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
    )
    @given(st.lists(request, max_size=8))
    def check(requests: list[Message]) -> None:
        with enter() as client:
            client.open()
            client.open(shard="another")
            for number, message in enumerate(requests):
                client.send(message, number)
            assert not unanswered(client, set(range(len(requests))))

    check()
    bystanders.check()


def spares_the_bystanders(frame: Any) -> bool:
    """Whether the bystanders, who have no tenant, keep what they have and go on."""
    message = frame.message if isinstance(frame, Request) else None
    if isinstance(message, PurgeTenant | EvictWhere):
        return message.tenant != ""
    return not (isinstance(message, Drain) and message.on)


@pytest.mark.parametrize("examples", [100, pytest.param(5000, marks=pytest.mark.full)])
@pytest.mark.timeout(1200)
def test_frames_of_any_kind_are_answered_or_end_the_connection(
    enter: Callable[..., RawClient], bystanders: Bystanders, examples: int
) -> None:
    @settings(
        max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
    )
    @given(st.lists(ANY_FRAME.filter(spares_the_bystanders), max_size=8), st.booleans())
    def check(sent: list[Any], greet: bool) -> None:
        with enter(greet=greet) as client, suppress(*ENDED):
            for frame in sent:
                client.socket.sendall(encode(frame))
            if greet or sent:  # nobody waits for the first frame
                client.send(GetStats(), 1 << 62)
                unanswered(client, {1 << 62})

    check()
    bystanders.check()


# Bytes of any kind


def mutated(frame: bytes, chance: random.Random) -> bytes:
    """A frame of which now and then bytes are others, lost, doubled or added."""
    changed = bytearray(frame)
    for _ in range(chance.choice((0, 0, 1, 1, 4))):
        at = chance.randrange(len(changed))
        some = chance.randrange(1, 9)
        how = chance.randrange(4)
        if how == 0:
            changed[at] = chance.randrange(256)
        elif how == 1 and len(changed) > 16:
            del changed[at : at + some]
        elif how == 2:
            changed[at:at] = changed[at : at + some]
        else:
            changed[at:at] = chance.randbytes(some)
    return bytes(changed)


def requests_about(space: HostSpace, slots: Ids) -> list[Message]:
    """Requests about these slots, which others hold, and about names that nobody does."""
    generations: npt.NDArray[np.int64] = space._records.generations[slots]
    return [
        open_space(),
        Match(0, names(0, 3), 0.0),
        Load(0, names(0, 3), 0.0),
        LeaseSlots(0, slots, generations),
        Release(0, slots, generations),
        Reserve(0, names(0, 3), 0.0),
        Commit(0, slots, generations),
        Abort(0, slots, generations),
        Evict(0, 3),
        Get(0, names(0, 3)),
        Put(0, names(0, 1), bytes(SIZE), 0.0),
        PutNote(0, b"a", b"b", 0.0),
        GetNote(0, b"a", 0.0),
        Subscribe(True),
        GetStats(),
        Flush(0.0),
        Pin(0, names(0, 1)),
        Unpin(0, names(0, 1)),
        Reassert(0, slots, generations, np.ones(len(slots), np.int32)),
    ]


def fuzz(running: Running, enter: Callable[..., RawClient], least: int, seed: int) -> None:
    """That many frames with bytes changed, lost, doubled and swapped, whole and cut, greeted and not."""
    chance = random.Random(seed)
    space = running.host.space(LAYOUT)
    requests = requests_about(space, np.flatnonzero(space._records.leases).astype(np.int32)[:32])
    done = 0
    while done < least:
        with enter() as hostile, suppress(*ENDED):
            hostile.open()
            while True:
                done += 1
                whole = encode(Request(chance.randrange(1 << 16), chance.choice(requests)))
                body = mutated(whole[4:], chance)
                hostile.socket.sendall(struct.pack("<I", len(body)) + body)
                while isinstance(hostile.receive(), Notice):
                    pass
        with enter(greet=chance.random() < 0.8) as hostile, suppress(*ENDED):
            done += 1
            data = encode(Request(1, chance.choice([*requests, hello(token=TOKEN)])))
            hostile.socket.sendall(mutated(data * 3, chance))
            hostile.socket.shutdown(socket.SHUT_WR)
            while hostile.socket.recv(1 << 16):
                pass


def resources() -> tuple[int, int, int]:
    """Descriptors, threads and KiB of memory that were ever used at once."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return len(os.listdir("/proc/self/fd")), threading.active_count(), peak


def test_mutated_frames_harm_nobody(
    running: Running, enter: Callable[..., RawClient], bystanders: Bystanders
) -> None:
    fuzz(running, enter, 2_000, 4)
    await_true(lambda: len(running.sidecar._connections) == 2)
    assert len(passing(running)) == 2
    assert bystanders.sidecar["protocol_errors"] > 100


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_very_many_mutated_frames_harm_nobody_and_nothing_grows(
    running: Running, enter: Callable[..., RawClient], bystanders: Bystanders
) -> None:
    fuzz(running, enter, 10_000, 5)
    before = resources()
    fuzz(running, enter, 100_000, 6)
    await_true(lambda: len(running.sidecar._connections) == 2)
    after = resources()
    assert after[0] <= before[0] + 2
    assert after[1] <= before[1] + 2
    assert after[2] <= before[2] + (32 << 10)


def test_blocks_are_what_was_sent_while_others_send_anything(
    running: Running, enter: Callable[..., RawClient], bystanders: Bystanders
) -> None:
    stop = threading.Event()
    failed: list[BaseException] = []

    def flood(seed: int) -> None:
        try:
            while not stop.is_set():
                fuzz(running, enter, 50, seed)
        except BaseException as error:  # noqa: BLE001  it is told below
            failed.append(error)

    threads = [threading.Thread(target=flood, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    try:
        with enter() as client:
            space = client.open(shard="mine")
            for number in range(50):
                data = random.Random(number).randbytes(2 * SIZE)
                mine = names(1000 * (number + 1), 2)
                assert client.call(Put(space, mine, data, 0.0), Count).count == 2
                assert client.call(Get(space, mine), Blocks).data == data
            bystanders.check()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failed == []
