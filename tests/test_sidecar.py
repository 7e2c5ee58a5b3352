"""The sidecar through a plain socket: who is let in, who holds what, and when that ends."""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvpager
import numpy as np
import pytest
from kvpager.api import answers
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
    Leased,
    LeaseSlots,
    Load,
    Marks,
    Match,
    Message,
    Note,
    OpenSpace,
    Pin,
    Put,
    PutNote,
    Reassert,
    Release,
    Reserve,
    Reserved,
    Stats,
    Unpin,
)
from kvpager.api.sidecar import Sidecar
from kvpager.api.wire import Failure, Reply
from kvpager.kvstore.handles import ReserveStatus
from kvpager.kvstore.host import HostStore
from kvpager.tests.raw_client import (
    ARENA,
    LAYOUT,
    RawClient,
    Running,
    await_true,
    counts,
    hello,
    names,
    open_space,
    store,
)
from kvpager.tiers.cold_disk import DiskColdTier
from kvpager.tiers.errors import (
    AccessDeniedError,
    CapacityError,
    ConfigError,
    KVPagerError,
    LayoutError,
    ProtocolError,
    ServiceUnavailableError,
    StaleHandleError,
)
from kvpager.tiers.layout import KVLayout

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


# The handshake


def test_a_client_is_welcomed_with_the_arena(client: RawClient, running: Running, host: HostStore) -> None:
    welcome = client.welcome
    assert welcome.version == 1
    assert welcome.boot_id == running.sidecar.boot_id
    assert len(welcome.boot_id) == 16
    assert (welcome.arena_bytes, welcome.extent_bytes) == (ARENA, 1 << 20)
    assert client.descriptor is not None
    space = client.open()
    granted = store(client, space, 0, 3)
    with mmap.mmap(client.descriptor, welcome.arena_bytes) as memory:
        slots_per_extent = client.call(open_space()).slots_per_extent
        slot = int(granted.slots[2])
        start = slot // slots_per_extent * welcome.extent_bytes + slot % slots_per_extent * SIZE
        memory[start : start + SIZE] = b"x" * SIZE
    assert bytes(host.space(LAYOUT).view(slot)) == b"x" * SIZE


def test_every_start_has_another_boot_id(host: HostStore, path: Path) -> None:
    assert Sidecar(host, path).boot_id != Sidecar(host, path).boot_id


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (hello(magic="redis"), "does not say"),
        (hello(newest=0, oldest=0), "versions 0 to 0 of the protocol, the sidecar 1 to 1"),
        (hello(newest=9, oldest=2), "versions 2 to 9 of the protocol, the sidecar 1 to 1"),
        (hello(b"short"), "client group has a name of 16 bytes"),
        (GetStats(), "the first frame of a client is a Hello"),
    ],
)
def test_a_first_frame_that_does_not_fit_is_refused(running: Running, message: Message, said: str) -> None:
    with RawClient(running.path, greet=False) as client:
        with pytest.raises(ProtocolError, match=said):
            client.greet(message)
        with pytest.raises(EOFError):
            client.receive()


def test_a_newer_client_is_spoken_to_in_the_older_version(running: Running) -> None:
    with RawClient(running.path, greet=False) as client:
        assert client.greet(hello(newest=7, oldest=1)).version == 1


def test_a_first_frame_that_is_too_long_is_refused_before_it_is_read(running: Running) -> None:
    with RawClient(running.path, greet=False) as client:
        client.socket.sendall(struct.pack("<I", 1 << 20))
        frame = client.receive()
        assert isinstance(frame, Failure)
        assert frame.id == 0
        assert "a Hello 4096 at most" in str(frame.error)


def test_users_who_are_not_allowed_are_not_let_in(host: HostStore, path: Path) -> None:
    with Running(path, host) as running:
        running.sidecar._uids.clear()  # a test cannot be another user
        with RawClient(path, greet=False) as client, pytest.raises(AccessDeniedError, match="not allowed in"):
            client.greet(hello())


def test_more_clients_than_are_taken_are_told_so(host: HostStore, path: Path) -> None:
    with (
        Running(path, host, max_connections=2),
        RawClient(path),
        RawClient(path),
        RawClient(path, greet=False) as third,
        pytest.raises(ServiceUnavailableError, match="2 clients"),
    ):
        third.greet(hello())


def test_more_than_are_greeted_at_a_time_are_told_so(host: HostStore, path: Path) -> None:
    with (
        Running(path, host, max_connections=2) as running,
        RawClient(path, greet=False),
        RawClient(path, greet=False),
    ):
        await_true(lambda: len(running.sidecar._greetings) == 2)
        with RawClient(path, greet=False) as third:
            frame = third.receive()
            assert isinstance(frame, Failure)
            assert frame.id == 0
            assert isinstance(frame.error, ServiceUnavailableError)
            assert "2 other clients" in str(frame.error)


def test_who_has_not_said_hello_when_it_stops_is_told_so(host: HostStore, path: Path) -> None:
    with Running(path, host) as running, RawClient(path, greet=False) as client:
        await_true(lambda: bool(running.sidecar._greetings))
        stopping = threading.Thread(target=running.stop)
        stopping.start()
        await_true(lambda: running.sidecar._service.stopping)
        with pytest.raises(ServiceUnavailableError, match="being stopped"):
            client.greet(hello())
        stopping.join(30)
        assert not path.exists()


def test_one_who_comes_and_says_nothing_holds_up_no_stop(host: HostStore, path: Path) -> None:
    with Running(path, host) as running, RawClient(path, greet=False) as client:
        await_true(lambda: bool(running.sidecar._greetings))
        began = time.monotonic()
        running.stop()
        assert time.monotonic() - began < 4  # and not the 5 s of a handshake
        with pytest.raises((EOFError, ConnectionResetError)):
            client.receive()


# Spaces, leases, reservations


def test_a_space_is_opened_once_and_others_share_nothing_with_it(client: RawClient) -> None:
    spaces = [
        client.open(),
        client.open(shard="tp1/2"),
        client.open(KVLayout(1, 1, 64, 16, "bfloat16")),
        client.open(KVLayout(1, 1, 64, 16, "float16", "plain")),
        client.open(KVLayout(1, 1, 64, 16, window=128)),
    ]
    assert spaces == [0, 1, 2, 3, 4]
    assert client.open() == 0
    store(client, 0, 0, 4)
    assert [len(client.call(Match(space, names(0, 4), 0.0), Leased).slots) for space in spaces] == [
        4,
        0,
        0,
        0,
        0,
    ]


def test_no_more_spaces_are_opened_than_there_may_be(client: RawClient) -> None:
    numbers = [client.open(shard=str(at)) for at in range(256)]
    assert numbers == list(range(256))
    with pytest.raises(CapacityError, match="the sidecar has 256 spaces"):
        client.open(shard="one more")
    assert client.open(shard="7") == 7
    with pytest.raises(CapacityError, match="the sidecar has 256 spaces"):
        client.open(shard="7", tenant="one more")


def test_an_arena_is_not_cut_into_more_slots_than_have_records(
    client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "_MOST_SLOTS", 65_535)
    with pytest.raises(ConfigError, match="block_size: blocks of 128 bytes are 65536 slots"):
        client.open(KVLayout(1, 1, 1, 1, "uint8", planes=1))


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        (open_space(KVLayout(64, 64, 128, 64)), ConfigError, "extent_bytes"),
        (OpenSpace(0, 1, 64, 16, "float16", "plain", 2, 0, 0, "", ""), ConfigError, "num_layers"),
        (OpenSpace(1, 1, 64, 16, "float99", "plain", 2, 0, 0, "", ""), ConfigError, "dtype"),
        (OpenSpace(1, 1, 64, 16, "float16", "", 2, 0, 0, "", ""), ConfigError, "format"),
        (OpenSpace(1 << 40, 1 << 40, 64, 16, "float16", "plain", 2, 0, 0, "", ""), ConfigError, "num_layers"),
        (open_space(shard="x" * 1000), ConfigError, "shard: must be 256 characters at most"),
        (Match(9, names(0, 1), 0.0), ConfigError, "has opened no space 9"),
        (Match(-1, names(0, 1), 0.0), ConfigError, "has opened no space -1"),
        (Match(0, names(0, 1) * 2, 0.0), ConfigError, "a hash is named twice"),
        (Match(0, names(0, 1), float("nan")), ConfigError, "deadline"),
        (Reserve(0, names(0, 1), -1.0), ConfigError, "wait"),
        (Evict(0, -1), ConfigError, "count"),
        (Put(0, names(0, 2), b"x", 0.0), LayoutError, "2 blocks of 4096 bytes were to come, and 1 bytes"),
        (Release(0, np.zeros(2, np.int32), np.zeros(1, np.int64)), ConfigError, "generations"),
        (LeaseSlots(0, np.zeros(2, np.int32), np.zeros(1, np.int64)), ConfigError, "generations"),
        (
            Reassert(0, np.zeros(1, np.int32), np.zeros(1, np.int64), np.ones(1, np.int32)),
            ConfigError,
            "client",
        ),
    ],
)
def test_what_cannot_be_done_is_told_and_the_connection_goes_on(
    client: RawClient, asked: Message, error: type[KVPagerError], said: str
) -> None:
    client.open()
    store(client, 0, 0, 1)
    with pytest.raises(error, match=said):
        client.call(asked)
    assert counts(client)["failures"] == 1


def test_leases_and_reservations_are_ended_once_and_by_their_group_alone(running: Running) -> None:
    with RawClient(running.path) as mine, RawClient(running.path, OTHER) as theirs:
        space = mine.open(), theirs.open()
        granted = mine.call(Reserve(space[0], names(0, 4), 0.0), Reserved)
        handles = granted.slots, granted.generations
        for kind in (Commit, Abort):
            with pytest.raises(StaleHandleError, match="refused for 4 slots"):
                theirs.call(kind(space[1], *handles))
        assert theirs.call(Reserve(space[1], names(0, 4), 0.0)).statuses.tolist() == [PENDING] * 4
        mine.call(Commit(space[0], *handles), Done)
        with pytest.raises(StaleHandleError, match="commit refused"):
            mine.call(Commit(space[0], *handles))
        leased = mine.call(Match(space[0], names(0, 9), 0.0), Leased)
        assert leased.slots.tolist() == granted.slots.tolist()
        with pytest.raises(StaleHandleError, match="release refused"):
            theirs.call(Release(space[1], *handles))
        assert counts(mine)["leased"] == 4
        # What is held is ended, also where something beside it is not.
        wrong = np.array([0, -1, 1, 1, 2_000_000_000], np.int32)
        generations = np.array([handles[1][0], handles[1][0], handles[1][1], handles[1][1], 5], np.int64)
        with pytest.raises(StaleHandleError, match="refused for 3 slots"):
            mine.call(Release(space[0], wrong, generations))
        assert counts(mine)["leased"] == 2
        mine.call(Release(space[0], handles[0][2:], handles[1][2:]), Done)
        with pytest.raises(StaleHandleError):
            mine.call(Release(space[0], handles[0][2:], handles[1][2:]))
        assert counts(mine)["leased"] == 0
        # A late handle of a slot that was granted again.
        assert mine.call(Evict(space[0], 4), Count).count == 4
        again = mine.call(Reserve(space[0], names(10, 4), 0.0), Reserved)
        with pytest.raises(StaleHandleError):
            mine.call(Commit(space[0], *handles))
        mine.call(Abort(space[0], again.slots, again.generations), Done)
        assert counts(mine)["reserved"] == 0
        running.host.check_integrity()


def test_what_one_client_of_a_group_reserved_another_may_commit(running: Running) -> None:
    with (
        RawClient(running.path, client=b"a" * 16) as scheduler,
        RawClient(running.path, client=b"b" * 16) as worker,
    ):
        assert scheduler.open() == worker.open() == 0
        granted = scheduler.call(Reserve(0, names(0, 4), 0.0), Reserved)
        worker.call(Commit(0, granted.slots, granted.generations), Done)
        leased = scheduler.call(Match(0, names(0, 4), 0.0), Leased)
        worker.call(Match(0, names(0, 2), 0.0), Leased)
        worker.call(Release(0, leased.slots, leased.generations), Done)
        scheduler.call(Release(0, leased.slots[:2], leased.generations[:2]), Done)
        with pytest.raises(StaleHandleError):
            worker.call(Release(0, leased.slots[:1], leased.generations[:1]))
        assert counts(worker)["leased"] == 0


def test_leased_and_pinned_blocks_stay_and_others_go(client: RawClient, host: HostStore) -> None:
    client.open()
    granted = store(client, 0, 0, 6)
    client.call(Match(0, names(0, 2), 0.0), Leased)
    assert client.call(Pin(0, names(0, 3)), Count).count == 3
    assert client.call(Evict(0, 100), Count).count == 3
    assert client.call(Match(0, names(0, 6), 0.0), Leased).slots.tolist() == granted.slots[:3].tolist()
    assert client.call(Unpin(0, names(0, 6)), Count).count == 3
    remembered = client.call(LeaseSlots(0, granted.slots, granted.generations), Marks)
    assert remembered.flags.tolist() == [True] * 3 + [False] * 3
    strange = np.array([-1, 1 << 30], np.int32), granted.generations[:2]
    assert client.call(LeaseSlots(0, *strange), Marks).flags.tolist() == [False, False]
    assert counts(client)["leased"] == 2 + 3 + 3
    host.check_integrity()


def test_bytes_that_come_inline_are_stored_and_read_back(client: RawClient) -> None:
    client.open()
    rng = np.random.default_rng(0)
    for count in (1, 300):  # on the loop, and in a thread
        data = rng.bytes(count * SIZE)
        assert client.call(Put(0, names(count, count), data, 0.0), Count).count == count
        assert client.call(Get(0, (*names(count, count), *names(9999, 1))), Blocks).data == data
    assert client.call(Get(0, names(5000, 4)), Blocks).data == b""
    assert client.call(Get(0, ()), Blocks).data == b""


def test_no_more_is_read_than_a_frame_holds(host: HostStore, path: Path) -> None:
    with Running(path, host, max_frame=3 * SIZE), RawClient(path) as client:
        client.open()
        for number in range(4):
            client.call(Put(0, names(number, 1), bytes([number]) * SIZE, 0.0))
        assert client.call(Get(0, names(0, 4)), Blocks).data == bytes(SIZE) + b"\1" * SIZE
        large = client.open(KVLayout(4, 1, 64))
        with pytest.raises(CapacityError, match="longer than the largest frame"):
            client.call(Get(large, names(0, 1)))


def test_the_cold_tier_is_behind_it(tmp_path: Path, path: Path) -> None:
    cold = DiskColdTier(tmp_path / "cold", capacity_bytes=64 << 20)
    with HostStore(ARENA, cold=cold, clean_ahead=0.0) as host, Running(path, host), RawClient(path) as client:
        client.open()
        store(client, 0, 0, 8)
        assert client.call(Flush(20.0), Count).count == 0
        assert client.call(Evict(0, 8), Count).count == 8
        assert client.call(Match(0, names(0, 8), 0.0), Leased).cold == 0
        assert client.call(Match(0, names(0, 9), 10.0), Leased).cold == 8
        loaded = client.call(Load(0, names(0, 9), 10.0), Leased)
        assert (len(loaded.slots), loaded.loaded) == (8, 8)
        client.call(Release(0, loaded.slots, loaded.generations), Done)
        assert client.call(Load(0, names(0, 8), 10.0), Leased).loaded == 0
        assert client.call(PutNote(0, b"name", b"value", 5.0), Count).count == 1
        assert client.call(GetNote(0, b"name", 5.0), Note) == Note(True, b"value")
        assert client.call(GetNote(0, b"other", 5.0), Note) == Note(False, b"")
        values = client.call(GetStats(), Stats).values
        assert values["cold"]["puts"] == 8
        assert values["arena"]["capacity_bytes"] == ARENA


def test_a_reservation_waits_for_room_in_a_thread_while_others_are_answered(
    client: RawClient, host: HostStore
) -> None:
    space = client.open()
    capacity = host.space(LAYOUT).capacity
    granted = client.call(Reserve(space, names(0, capacity), 0.0), Reserved)
    assert granted.statuses.tolist() == [NEW] * capacity
    assert client.call(Reserve(space, names(capacity, 1), 0.5), Reserved).statuses.tolist() == [DENIED]
    client.call(Abort(space, granted.slots, granted.generations), Done)


def test_requests_may_be_sent_without_waiting(client: RawClient) -> None:
    space = client.open()
    sent = [client.send(Match(space, names(0, 3), 0.0)) for _ in range(1000)]
    got = [client.receive() for _ in sent]
    assert sorted(frame.id for frame in got if isinstance(frame, Reply)) == sent


# The end


def test_while_it_stops_nothing_new_is_reserved_and_commits_are_waited_for(
    host: HostStore, path: Path
) -> None:
    with Running(path, host) as running, RawClient(path) as client:
        client.open()
        granted = client.call(Reserve(0, names(0, 2), 0.0), Reserved)
        stopping = threading.Thread(target=running.stop, args=(20.0,))
        began = time.monotonic()
        stopping.start()

        def refused() -> bool:
            reply: Any = None
            try:
                reply = client.call(Reserve(0, names(5, 1), 0.0), Reserved)
            except ServiceUnavailableError:
                return True
            client.call(Abort(0, reply.slots, reply.generations), Done)
            return False

        await_true(refused)
        for asked in (Put(0, names(5, 1), bytes(SIZE), 0.0), Load(0, names(0, 1), 0.0)):
            with pytest.raises(ServiceUnavailableError, match="being stopped"):
                client.call(asked)
        for _ in range(2):
            with (
                RawClient(path, greet=False) as late,
                pytest.raises(ServiceUnavailableError, match="being stopped"),
            ):
                late.greet(hello(b"l" * 16))
        with pytest.raises(ServiceUnavailableError, match="being stopped"):
            kvpager.connect(path, timeout=0.3)
        assert stopping.is_alive()
        client.call(Commit(0, granted.slots, granted.generations), Done)
        stopping.join(30)
        assert time.monotonic() - began < 10
        with pytest.raises((EOFError, ConnectionResetError)):
            client.receive()
        assert not path.exists()
