"""The client against a real sidecar: what is kept and found, and when it fails."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kvpager
import numpy as np
import numpy.typing as npt
import pytest
from kvpager.api.client import Connection
from kvpager.api.client_space import Lost
from kvpager.api.messages import Match, Reserve
from kvpager.api.remote_space import RemoteSpace
from kvpager.kvstore.events import BlockEvent
from kvpager.kvstore.handles import ReserveStatus
from kvpager.kvstore.hashing import hash_blocks
from kvpager.kvstore.host import HostStore
from kvpager.tests.raw_client import ARENA, LAYOUT, RawClient, Running, await_true, names
from kvpager.tests.serve_process import ServeProcess
from kvpager.tiers.cold_disk import DiskColdTier
from kvpager.tiers.errors import (
    ClosedError,
    ConfigError,
    LayoutError,
    ProtocolError,
    ServiceUnavailableError,
    StaleHandleError,
)
from kvpager.tiers.layout import KVLayout
from kvpager.tiers.pinned import arena_sizes

SIZE = LAYOUT.block_bytes


def blocks(first: int, count: int) -> npt.NDArray[np.uint8]:
    """Block ``n`` is full of ``n`` + 1."""
    return np.repeat(np.arange(first + 1, first + count + 1, dtype=np.uint8)[:, None], SIZE, axis=1)


def put(space: RemoteSpace, first: int, count: int) -> int:
    return space.put(names(first, count), blocks(first, count))


def found(space: RemoteSpace, first: int, count: int) -> int:
    """How many leading blocks are there, each with its own bytes."""
    with space.match(names(first, count)) as lease:
        for number, block in enumerate(lease.blocks, first + 1):
            assert (block == number).all()
        return len(lease)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """A sidecar in a thread, whose books can be looked at."""
    with HostStore(ARENA) as host:
        host.arena.wait_ready()
        with Running(tmp_path / "socket", host) as sidecar:
            yield sidecar


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[ServeProcess]:
    """A sidecar in a process of its own."""
    with ServeProcess(tmp_path / "socket") as process:
        yield process


def holds(running: Running, leases: int, reservations: int) -> bool:
    """Whether the sidecar comes to have so many in its books: what is given back is not waited for."""
    groups = running.sidecar._groups
    await_true(lambda: (groups.leased, groups.reserved) == (leases, reservations))
    return True


def break_socket(connection: Connection) -> None:
    """The connection breaks, as a network or a full buffer would break it."""
    connected = connection._socket
    assert connected is not None
    connected.shutdown(socket.SHUT_RDWR)
    await_true(lambda: connection._socket not in (None, connected) and connection.ready)


# What a client can do


def test_blocks_are_written_and_read_where_they_lie(running: Running) -> None:
    with kvpager.connect(running.path) as writer, kvpager.connect(f"unix://{running.path}") as reader:
        space, other = writer.space(LAYOUT), reader.space(LAYOUT)
        with space.reserve(names(0, 3)) as reservation:
            for number, block in enumerate(reservation.blocks, 1):
                block[:] = number
            reservation.commit(np.array([0, 1]))
        assert found(other, 0, 3) == 2
        assert holds(running, 0, 0)  # what was not committed was aborted
        lease = other.match(names(0, 2))
        with pytest.raises(ValueError, match="read-only"):
            lease.blocks[0][0] = 9
        assert holds(running, 2, 0)
        assert space.evict(2) == 0
        lease.release()
        assert reader.stats()["sidecar"]["leased"] == 0
        assert space.evict(2) == 2
        running.host.check_integrity()


def test_a_match_hashes_tokens_as_the_store_does(running: Running) -> None:
    tokens, root = list(range(40)), b"r" * 16
    with kvpager.connect(running.path) as client:
        space = client.space(LAYOUT)
        hashes = hash_blocks(tokens, LAYOUT.block_size, root)
        assert space.put(hashes, blocks(0, len(hashes))) == 2
        with space.match(tokens=tokens, chain=root) as lease:
            assert len(lease) == 2
        with pytest.raises(ConfigError, match="hashes"):
            space.match(hashes, tokens=tokens)


def test_spaces_are_apart_and_the_same_for_equal_ones(running: Running) -> None:
    other = KVLayout(1, 1, 64, block_size=32)
    with kvpager.connect(running.path) as client:
        space = client.space(LAYOUT)
        assert client.space(KVLayout(1, 1, 64)) is space
        assert client.space(LAYOUT, shard="1/2") is not space
        assert put(space, 0, 1) == 1
        assert found(space, 0, 1) == 1
        assert len(client.space(LAYOUT, shard="1/2").match(names(0, 1))) == 0
        assert len(client.space(other).match(names(0, 1))) == 0
        wide = KVLayout(1000, 8, 128)
        with pytest.raises(
            ConfigError, match=r"block_size: .* give kvpager serve --host-bytes 1024M at least"
        ):
            client.space(wide)
        assert arena_sizes((1024 << 20) - 1, None)[1] < wide.block_bytes <= arena_sizes(1024 << 20, None)[1]
        with pytest.raises(ConfigError, match=r"block_size: .* no sidecar's are larger than 256.0 MiB"):
            client.space(KVLayout(10000, 8, 128))
        assert (
            running.host.space(LAYOUT).addresses(np.array([3, 5], np.int32)).tolist()
            == (
                space.addresses(np.array([3, 5], np.int32)) - client.core.arena.base + running.host.arena.base  # type: ignore[union-attr]
            ).tolist()
        )


def test_wrong_arguments_are_the_callers_fault_and_named(running: Running) -> None:
    with kvpager.connect(running.path) as client:
        space = client.space(LAYOUT)
        for call, setting in (
            (lambda: space.match([b"short"]), "hashes"),
            (lambda: space.reserve(names(0, 1), wait=-1), "wait"),
            (lambda: space.evict(-1), "count"),
            (lambda: space.release([1, 2], [3]), "generations"),  # type: ignore[arg-type]
            (lambda: client.space("layout"), "layout"),  # type: ignore[arg-type]
            (lambda: space.view(space.capacity), "slot"),
            (lambda: kvpager.connect("tcp://there:1"), "url"),
            (lambda: kvpager.connect(5), "url"),  # type: ignore[arg-type]
            (lambda: kvpager.connect(running.path, group=b"short"), "group"),
            (lambda: kvpager.connect(running.path, timeout=0), "timeout"),
            (lambda: kvpager.connect(running.path, on_lost="me"), "on_lost"),  # type: ignore[arg-type]
        ):
            with pytest.raises(ConfigError, match=f"^{setting}:"):
                call()
        with pytest.raises(LayoutError, match="blocks must be"):
            space.put(names(0, 2), blocks(0, 1))


def test_pins_evictions_counters_and_remembered_slots(running: Running) -> None:
    with kvpager.connect(running.path, name="me") as client:
        space = client.space(LAYOUT)
        assert put(space, 0, 4) == 4
        assert space.pin(names(0, 2)) == 2
        assert space.evict(10) == 2
        assert space.unpin(names(0, 4)) == 2
        with space.match(names(0, 2)) as lease:
            slots, generations = lease.slots, lease.generations
        assert space.lease(slots, generations + np.array([0, 1])).tolist() == [True, False]
        assert holds(running, 1, 0)
        space.release(slots[:1], generations[:1])
        space.release(slots[:1], generations[:1])  # late: refused, and nothing happens
        assert client.counters.refused == 1
        assert client.stats()["host"]["evicted"] == 2
        assert client.stats()["sidecar"]["leased"] == 0


def test_many_threads_share_a_connection(running: Running) -> None:
    with kvpager.connect(running.path) as client:
        space = client.space(LAYOUT)

        def work(thread: int) -> None:
            for round_ in range(30):
                first = thread * 5 + round_ % 5
                space.put(names(first, 1), blocks(first, 1))
                assert found(space, first, 1) <= 1

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        assert client.stats()["sidecar"]["leased"] == 0
        assert found(space, 0, 40) == 40


def test_events_are_heard_while_somebody_listens(running: Running) -> None:
    events: list[BlockEvent] = []
    with kvpager.connect(running.path) as client:
        space = client.space(LAYOUT)
        end = client.subscribe(events.append)
        assert put(space, 0, 2) == 2
        await_true(lambda: len(events) == 1)
        assert (events[0].kind, events[0].tier, events[0].space) == ("stored", "host", space.id)
        assert events[0].hashes == names(0, 2)
        break_socket(client)
        assert put(space, 2, 1) == 1
        await_true(lambda: len(events) == 2)
        end()
        end()
        assert put(space, 3, 1) == 1
        client.stats()
        assert len(events) == 2


def test_the_cold_tier_is_written_and_loaded_from(tmp_path: Path) -> None:
    cold = DiskColdTier(tmp_path / "cold", capacity_bytes=1 << 20)
    with HostStore(ARENA, cold=cold) as host:
        host.arena.wait_ready()
        with Running(tmp_path / "socket", host) as sidecar, kvpager.connect(sidecar.path) as client:
            space = client.space(LAYOUT)
            assert put(space, 0, 4) == 4
            assert client.flush(10.0) == 0
            assert space.evict(4) == 4
            lease = space.match(names(0, 5), cold_deadline=5.0)
            assert (len(lease), lease.cold) == (0, 4)
            with space.load(names(0, 5), 5.0) as lease:
                assert len(lease) == 4
                assert (lease.blocks[3] == 4).all()
            assert space.evict(4) == 4
            load = space.start_load(names(0, 4))
            await_true(load.done)
            assert found(space, 0, 4) == 4
            assert space.evict(4) == 0
            load.release()
            assert space.evict(4) == 4
            assert space.put_note(b"name", b"value", 5.0)
            assert space.get_note(b"name", 5.0) == b"value"
            assert space.get_note(b"other", 5.0) is None


def test_a_load_that_nobody_waits_for_is_given_back(tmp_path: Path) -> None:
    cold = DiskColdTier(tmp_path / "cold", capacity_bytes=1 << 20)
    with HostStore(ARENA, cold=cold) as host:
        host.arena.wait_ready()
        with Running(tmp_path / "socket", host) as sidecar, kvpager.connect(sidecar.path) as client:
            space = client.space(LAYOUT)
            assert put(space, 0, 4) == 4
            assert client.flush(10.0) == 0
            assert space.evict(4) == 4
            space.start_load(names(0, 4)).release()
            await_true(lambda: client.stats()["host"]["cold_loaded"] == 4)
            assert holds(sidecar, 0, 0)


def test_views_outlive_lease_and_connection(running: Running) -> None:
    with kvpager.connect(running.path) as client:
        space = client.space(LAYOUT)
        assert put(space, 0, 1) == 1
        lease = space.match(names(0, 1))
        block = lease.blocks[0]
        base = client.core.arena.base  # type: ignore[union-attr]
    mapped = f"{base:x}-"
    del space, lease, client
    gc.collect()
    assert mapped in Path("/proc/self/maps").read_text()
    assert (block == 1).all()
    del block
    gc.collect()
    assert mapped not in Path("/proc/self/maps").read_text()


def test_blocks_are_counted_without_being_used(serving: ServeProcess) -> None:
    with kvpager.connect(serving.path, timeout=5.0) as client:
        space = client.space(LAYOUT)
        assert space.put(names(0, 3), np.zeros((3, LAYOUT.block_bytes), np.uint8), wait=20.0) == 3
        before = client.stats()["host"]
        assert space.count_resident(names(0, 5)) == 3
        assert space.count_resident(names(3, 2)) == space.count_resident([]) == 0
        assert client.stats()["host"] == before
        with pytest.raises(ConfigError, match="hashes"):
            space.count_resident([b"short"])
        serving.kill()
        await_true(lambda: not client.ready)
        assert space.count_resident(names(0, 3)) is None


def test_room_may_come_while_somebody_else_has_some_or_nobody_knows(serving: ServeProcess) -> None:
    with kvpager.connect(serving.path, timeout=5.0) as mine, kvpager.connect(serving.path) as others:
        space, other = mine.space(LAYOUT), others.space(LAYOUT)
        await_true(lambda: mine.stats()["arena"]["ready_bytes"] == ARENA)
        count = space.capacity
        assert space.room_may_come(0)  # slots are free
        writing = other.reserve(names(0, count))
        assert len(writing.new) == count
        assert space.room_may_come(0)
        writing.commit()
        leased = space.match(names(0, count))
        assert not space.room_may_come(count)
        theirs = other.match(names(0, 1))
        assert not space.room_may_come(count)  # which are the caller's, too
        leased.shorten(count - 1)
        theirs.release()
        await_true(lambda: space.room_may_come(count - 1))  # one that nobody has
        assert other.pin(names(0, count)) == count
        leased.release()
        # Of pins nobody knows that they end.
        await_true(lambda: not space.room_may_come(0))
        assert other.unpin(names(0, 1)) == 1
        assert space.room_may_come(0)
        assert other.pin(names(0, 1)) == 1
        with pytest.raises(ConfigError, match="held"):
            space.room_may_come(-1)
        serving.kill()
        await_true(lambda: not mine.ready)
        assert space.room_may_come(0)


def test_a_closed_connection_says_so_and_has_given_back(running: Running) -> None:
    client = kvpager.connect(running.path)
    space = client.space(LAYOUT)
    assert put(space, 0, 2) == 2
    lease = space.match(names(0, 2))
    space.reserve(names(2, 1))
    descriptors = len(os.listdir("/proc/self/fd"))
    client.close()
    client.close()
    assert len(os.listdir("/proc/self/fd")) < descriptors
    assert holds(running, 0, 0)
    lease.release()
    for call in (
        lambda: space.match(names(0, 1)),
        lambda: space.lease(lease.slots[:0], lease.generations[:0]),
        lambda: space.commit(lease.slots[:0], lease.generations[:0]),
        lambda: space.readable_in_place(lease.slots),
        lambda: space.room_may_come(0),
        lambda: space.addresses(lease.slots),
        lambda: client.space(LAYOUT),
        lambda: client.subscribe(print),
        lambda: client.stats(),
        lambda: client.wait_ready(),
    ):
        with pytest.raises(ClosedError):
            call()


def test_the_base_install_connects_without_torch(running: Running) -> None:
    program = (
        "import sys, kvpager\n"
        "from kvpager.tests.raw_client import LAYOUT\n"
        f"with kvpager.connect({str(running.path)!r}) as client:\n"
        "    client.space(LAYOUT).match([])\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False\n"


# What is not there


def test_calls_that_nothing_can_stand_for_raise_without_a_sidecar_on_every_connection(
    serving: ServeProcess,
) -> None:
    with kvpager.connect(serving.path, timeout=5.0) as client:
        space = client.space(LAYOUT)
        serving.kill()
        assert found(space, 0, 1) == put(space, 0, 1) == space.pin(names(0, 1)) == 0
        calls: list[Callable[[], object]] = [
            client.stats,
            client.status,
            client.flush,
            client.clients,
            lambda: client.command("sleep", "anna"),
            lambda: client.purge_tenant("acme"),
            lambda: client.wait_ready(0.1),
            lambda: space.purge(names(0, 1)),
            lambda: space.demote(names(0, 1)),
            lambda: space.purge_session("anna", root=bytes(16)),
        ]
        for call in calls:
            with pytest.raises(ServiceUnavailableError):
                call()


def test_no_sidecar_is_an_error_when_connecting(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ServiceUnavailableError, match="socket: No such file"):
        kvpager.connect(tmp_path / "socket", timeout=0.2)
    assert time.monotonic() - began < 5


def test_another_programs_socket_is_an_error_when_connecting(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        listening.listen()
        with pytest.raises(ServiceUnavailableError, match="gree"):
            kvpager.connect(tmp_path / "socket", timeout=0.2)

        def answer() -> None:
            accepted, _ = listening.accept()
            with accepted:
                accepted.recv(1 << 16)
                accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                accepted.recv(1)

        answering = threading.Thread(target=answer)
        while True:  # what the first attempts left in the queue
            listening.setblocking(False)
            try:
                listening.accept()[0].close()
            except BlockingIOError:
                break
        listening.setblocking(True)
        answering.start()
        with pytest.raises(ProtocolError):
            kvpager.connect(tmp_path / "socket", timeout=5)
        answering.join()


# Connections that break


def test_what_is_held_stays_held_over_a_broken_connection(running: Running) -> None:
    lost: list[Lost] = []
    with kvpager.connect(running.path, on_lost=lost.append) as client:
        space = client.space(LAYOUT)
        assert put(space, 0, 3) == 3
        lease, again = space.match(names(0, 3)), space.match(names(0, 2))
        reservation = space.reserve(names(3, 2))
        block = reservation.blocks[0]
        break_socket(client)
        assert holds(running, 5, 2)
        assert space.evict(3) == 0
        block[:] = 4
        reservation.commit(np.array([0]))
        reservation.abort()
        again.release()
        assert found(space, 0, 5) == 4
        assert holds(running, 3, 0)
        lease.release()
        assert client.stats()["sidecar"]["leased"] == 0
        assert (client.lost, lost, client.counters.connects) == ((), [], 2)


def test_what_ended_while_there_was_no_connection_ends(running: Running) -> None:
    with kvpager.connect(running.path) as client:
        space = client.space(LAYOUT)
        assert put(space, 0, 3) == 3
        lease, other = space.match(names(0, 3)), space.match(names(0, 1))
        written, dropped = space.reserve(names(3, 1)), space.reserve(names(4, 1))
        written.blocks[0][:] = 4
        running.loop.call_soon_threadsafe(running.loop.stop)  # it does not see its clients any more
        running._thread.join()
        client._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
        await_true(lambda: not client.ready)
        lease.release()
        dropped.abort()
        written.commit()  # is said again when somebody hears it
        assert found(space, 0, 1) == 0
        running._thread = threading.Thread(target=running.loop.run_forever)
        running._thread.start()
        client.wait_ready(30)
        assert holds(running, 1, 0)
        assert found(space, 0, 5) == 4
        other.release()
        assert client.stats()["sidecar"]["leased"] == 0
        assert client.lost == ()


def test_replies_that_are_lost_leak_nothing(running: Running) -> None:
    with kvpager.connect(running.path) as client:
        space = client.space(LAYOUT)
        assert put(space, 0, 3) == 3
        lease = space.match(names(0, 1))
        hello = client.core._hello
        # As far as the sidecar knows it is the client that connected again, and asked, and heard no reply.
        with client._lock, RawClient(running.path, hello.group, hello.client) as unheard:
            number = unheard.open()
            unheard.call(Match(number, names(0, 3), 0.0))
            unheard.call(Reserve(number, names(3, 2), 0.0))
            assert holds(running, 4, 2)
        await_true(lambda: client.counters.connects == 2 and client.ready)
        assert holds(running, 1, 0)
        assert (lease.blocks[0] == 1).all()
        assert client.lost == ()


# A sidecar that stops, dies, and comes again


def test_a_stalled_sidecar_costs_one_timeout_and_then_misses(
    serving: ServeProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with kvpager.connect(serving.path, timeout=0.3) as client:
        space = client.space(LAYOUT)
        assert put(space, 0, 4) == 4
        lease = space.match(names(0, 2))
        reservation = space.reserve(names(4, 1))
        serving.pause()
        with caplog.at_level(logging.WARNING):
            began = time.monotonic()
            assert len(space.match(names(0, 4))) == 0
            assert 0.25 < time.monotonic() - began < 5
            began = time.monotonic()
            for _ in range(50):
                assert len(space.match(names(0, 4))) == 0
                assert set(space.reserve(names(7, 2)).status) == {ReserveStatus.DENIED}
                assert put(space, 9, 1) == 0
                assert space.pin(names(0, 1)) == 0
                assert not space.lease(lease.slots, lease.generations).any()
                assert space.get_note(b"name") is None
                assert space.start_load(names(0, 1)).done()
            assert time.monotonic() - began < 2
        assert len([one for one in caplog.records if "done without" in one.message]) == 1
        assert client.counters.unanswered > 300
        with pytest.raises(ServiceUnavailableError):
            client.stats()
        assert (lease.blocks[1] == 2).all()
        reservation.blocks[0][:] = 5
        reservation.commit()
        lease.release()
        serving.resume()
        await_true(lambda: found(space, 0, 5) == 5)
        # Also what the call that timed out had leased.
        await_true(lambda: client.stats()["sidecar"]["leased"] == 0)
        assert client.stats()["sidecar"]["reserved"] == 0
        assert (client.lost, client.counters.connects) == ((), 1)


def test_a_strict_connection_says_that_the_sidecar_does_not_answer(serving: ServeProcess) -> None:
    with kvpager.connect(serving.path, timeout=0.3, strict=True) as client:
        space = client.space(LAYOUT)
        assert put(space, 0, 1) == 1
        lease = space.match(names(0, 1))
        serving.pause()
        for _ in range(2):
            with pytest.raises(ServiceUnavailableError):
                space.match(names(0, 1))
        serving.kill()
        with pytest.raises(ServiceUnavailableError):
            put(space, 1, 1)
        lease.release()  # no answer is wanted
        with pytest.raises(StaleHandleError):
            space.release(lease.slots, lease.generations)


def test_a_killed_sidecars_successor_goes_on_with_all_that_was_there_and_held(
    serving: ServeProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with kvpager.connect(serving.path) as client:
        space = client.space(LAYOUT)
        assert put(space, 0, 3) == 3
        lease = space.match(names(0, 3))
        remembered = lease.slots[:1].copy(), lease.generations[:1].copy()
        reservation = space.reserve(names(3, 2))
        address = space.addresses(lease.slots).tolist()
        boot = client.boot_id
        serving.kill()
        await_true(lambda: not client.ready)
        assert put(space, 5, 1) == 0
        assert (lease.blocks[2] == 3).all()
        serving.start()
        client.wait_ready(30)
        assert client.boot_id != boot
        assert (client.counters.restarts, client.counters.lost, client.lost) == (1, 0, ())
        assert space.addresses(lease.slots).tolist() == address
        reservation.blocks[0][:] = 4
        reservation.commit(np.array([0]))
        reservation.abort()
        assert found(space, 0, 5) == 4
        lease.release()
        assert space.lease(*remembered).tolist() == [True]
        space.release(*remembered)
        stats = client.stats()
        assert (stats["sidecar"]["leased"], stats["sidecar"]["reserved"]) == (0, 0)
        assert (stats["host"]["stale"], stats["host"]["adopted"]) == (0, 3)
        assert space.evict(9) == 4
        assert space.lease(*remembered).tolist() == [False]


def test_a_killed_sidecar_is_misses_and_a_fresh_one_is_used_when_nothing_of_the_old_is_held(
    serving: ServeProcess, caplog: pytest.LogCaptureFixture
) -> None:
    lost: list[Lost] = []
    with kvpager.connect(serving.path, on_lost=lost.append) as client:
        space, other = client.space(LAYOUT), client.space(LAYOUT, shard="other")
        assert put(space, 0, 3) == 3
        lease = space.match(names(0, 3))
        reservation = space.reserve(names(3, 1))
        address = space.addresses(lease.slots).tolist()
        boot = client.boot_id
        serving.kill()
        await_true(lambda: not client.ready)
        assert len(space.match(names(0, 3))) == 0
        assert put(space, 5, 1) == 0
        late = client.space(LAYOUT, shard="late")
        assert put(late, 0, 1) == 0
        serving.start("--fresh")
        client.wait_ready(30)
        assert client.boot_id != boot
        assert client.counters.restarts == 1
        await_true(lambda: len(lost) == 1)
        (what,) = client.lost
        assert what is lost[0]
        assert what.space == space.id
        assert sorted(what.leased.slots.tolist()) == sorted(lease.slots.tolist())
        assert what.reserved.slots.tolist() == reservation.slots.tolist()
        # Others go on at once; this one keeps to its old memory for as long as somebody may be reading it.
        assert put(other, 0, 2) == 2
        assert found(other, 0, 2) == 2
        assert put(late, 0, 1) == 1
        assert put(space, 0, 1) == 0
        assert (lease.blocks[2] == 3).all()
        assert space.addresses(lease.slots).tolist() == address
        assert space.slots_at(np.array(address)).tolist() == lease.slots.tolist()
        reservation.commit()
        assert put(space, 0, 1) == 0
        lease.release()
        assert put(space, 0, 2) == 2
        assert found(space, 0, 2) == 2
        lease.release()
        assert client.stats()["sidecar"]["leased"] == 0
        assert client.stats()["host"]["stale"] == 0


def test_a_sidecar_that_dies_again_and_again_in_mid_use(serving: ServeProcess) -> None:
    with kvpager.connect(serving.path, timeout=0.5) as client:
        space = client.space(LAYOUT)
        over = threading.Event()

        def work(thread: int) -> int:
            rounds = 0
            while not over.is_set():
                first = 10 * thread + rounds % 10
                put(space, first, 1)
                rounds += found(space, first, 1)
            return rounds

        with ThreadPoolExecutor(4) as pool:
            working = [pool.submit(work, thread) for thread in range(4)]
            for number in range(4):
                time.sleep(0.2)
                if number % 2:
                    serving.pause()
                    time.sleep(0.1)
                serving.kill()
                serving.start()
                client.wait_ready(30)
            time.sleep(0.2)
            over.set()
            assert all(one.result() > 10 for one in working)
        assert client.counters.restarts == 4
        await_true(lambda: client.stats()["sidecar"]["leased"] == 0)
        assert client.stats()["sidecar"]["reserved"] == 0


def test_a_process_that_is_gone_gives_back_what_its_group_held(running: Running) -> None:
    program = (
        "import os, kvpager\n"
        "from kvpager.tests.raw_client import LAYOUT, names\n"
        f"client = kvpager.connect({str(running.path)!r})\n"
        "space = client.space(LAYOUT)\n"
        "space.put(names(0, 2), __import__('numpy').ones((2, LAYOUT.block_bytes), 'u1'))\n"
        "lease, reservation = space.match(names(0, 2)), space.reserve(names(2, 3))\n"
        "print(len(lease), len(reservation.new), flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "2 3\n"
        assert holds(running, 2, 3)
        other.kill()
    assert holds(running, 0, 0)


# asyncio


def run(work: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def test_asyncio_has_the_same_calls(running: Running) -> None:
    async def work() -> None:
        events: list[BlockEvent] = []
        async with await kvpager.connect_async(running.path) as client:
            space = await client.space(LAYOUT)
            assert await client.space(LAYOUT) is space
            end = client.subscribe(events.append)
            assert await space.put(names(0, 4), blocks(0, 4)) == 4
            out = np.zeros((4, SIZE), dtype=np.uint8)
            assert await space.get(names(0, 4), out) == 4
            assert (out == blocks(0, 4)).all()
            with await space.reserve(names(4, 2)) as reservation:
                reservation.blocks[0][:] = 5
                reservation.commit(np.array([0]))
            await space.committed()
            leases = await asyncio.gather(*(space.match(names(0, count)) for count in range(7)))
            assert [len(lease) for lease in leases] == [0, 1, 2, 3, 4, 5, 5]
            assert (leases[-1].blocks[4] == 5).all()
            for lease in leases:
                lease.release()
            assert (await client.stats())["sidecar"]["leased"] == 0
            assert await space.pin(names(0, 1)) == await space.unpin(names(0, 1)) == 1
            assert await space.evict(1) == 1
            assert await client.flush(1.0) == 4
            await until(lambda: len(events) == 3)
            end()
            with pytest.raises(ConfigError, match="count"):
                await space.evict(-1)
        with pytest.raises(ClosedError):
            await space.match(names(0, 1))

    run(work)


def test_asyncio_outlives_a_stalled_and_a_dead_sidecar(serving: ServeProcess) -> None:
    async def work() -> None:
        async with await kvpager.connect_async(serving.path, timeout=0.3) as client:
            space = await client.space(LAYOUT)
            assert await space.put(names(0, 2), blocks(0, 2)) == 2
            lease = await space.match(names(0, 2))
            serving.pause()
            for _ in range(20):
                assert len(await space.match(names(0, 2))) == 0
            serving.resume()
            await until(lambda: client.counters.unanswered > 0 and not client.core.has_output)
            async with asyncio.timeout(30):
                while len(other := await space.match(names(0, 2))) < 2:
                    await asyncio.sleep(0.01)
            other.release()
            serving.kill()
            await until(lambda: not client.ready)
            assert await space.put(names(2, 1), blocks(2, 1)) == 0
            serving.start()
            await client.wait_ready(30)
            assert not client.lost
            assert (lease.blocks[1] == blocks(1, 1)[0]).all()
            serving.kill()
            await until(lambda: not client.ready)
            serving.start("--fresh")
            await client.wait_ready(30)
            assert len(client.lost[0].leased) == 2
            lease.release()
            assert await space.put(names(2, 1), blocks(2, 1)) == 1
            assert (await client.stats())["sidecar"]["leased"] == 0

    run(work)


def test_a_cold_tier_that_holds_no_block_is_told_to_whoever_opens_the_space(tmp_path: Path) -> None:
    wide = KVLayout(1, 1, 32, block_size=32, dtype="float32")  # 8 KiB
    cold = (f"--cold=disk://{tmp_path}/cold", "--cold-bytes=8192")
    with ServeProcess(tmp_path / "socket", *cold) as serving, kvpager.connect(serving.path) as client:
        with pytest.raises(ConfigError) as caught:
            client.space(wide)
        assert caught.value.setting == "cold.capacity_bytes"
        assert "8192 bytes do not hold a block of 8192 bytes: give at least 12288" in str(caught.value)
        # Others have their place.
        with client.space(LAYOUT).reserve(names(0, 1)) as reservation:
            assert len(reservation.blocks) == 1
