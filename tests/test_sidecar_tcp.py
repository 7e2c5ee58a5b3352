"""Clients over TCP against a real sidecar: who comes in, what they may do, and what becomes of them."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import kvpager
import msgpack
import numpy as np
import numpy.typing as npt
import pytest
from kvpager.api import sidecar as sidecar_module
from kvpager.api.cli import main
from kvpager.api.client import Connection
from kvpager.api.client_space import Lost
from kvpager.api.connection import Limits
from kvpager.api.endpoint import TcpEndpoint, endpoint_of
from kvpager.api.inline_space import InlineSpace
from kvpager.api.messages import (
    Abort,
    Blocks,
    Commit,
    Count,
    Done,
    Get,
    GetStats,
    Leased,
    Match,
    Put,
    Release,
    Reserve,
    Reserved,
    Stats,
)
from kvpager.api.remote_access import RemoteAccess, parse_address, read_tokens, server_tls
from kvpager.api.wire import Failure, Request, encode
from kvpager.kvstore.events import BlockEvent
from kvpager.kvstore.handles import ReserveStatus
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.store import TieredStore
from kvpager.tests.certificates import Authority, Certificate, self_signed
from kvpager.tests.raw_client import ARENA, LAYOUT, RawClient, Running, await_true, counts, names
from kvpager.tests.serve_process import ServeProcess
from kvpager.tiers.cold_disk import DiskColdTier
from kvpager.tiers.errors import (
    AccessDeniedError,
    ClosedError,
    ConfigError,
    KVPagerError,
    LayoutError,
    NotInPlaceError,
    ProtocolError,
    ServiceUnavailableError,
    StaleHandleError,
    TLSError,
)
from kvpager.tiers.layout import KVLayout

SIZE = LAYOUT.block_bytes
TOKEN = "a-token-for-tests"
OTHER = b"o" * 16
LISTEN = ["--listen", "127.0.0.1:0", "--token-file", "TOKEN"]
NEW, PRESENT, PENDING, DENIED = (int(one) for one in ReserveStatus)


def blocks(count: int, seed: int = 0, size: int = SIZE) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, size), dtype=np.uint8)


@pytest.fixture
def host() -> Iterator[HostStore]:
    with HostStore(ARENA, extent_bytes=1 << 20) as store:
        yield store


@pytest.fixture
def running(host: HostStore, tmp_path: Path) -> Iterator[Running]:
    """A sidecar that listens on plain TCP, too."""
    with Running(tmp_path / "socket", host, remote=RemoteAccess("127.0.0.1", 0, TOKEN)) as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def secure(path: Path, host: HostStore, files: Certificate, **more: Any) -> Running:
    """A sidecar that speaks TLS."""
    tls = server_tls(files.certificate, files.key)
    return Running(path / "socket", host, remote=RemoteAccess("127.0.0.1", 0, TOKEN, tls, **more))


@pytest.fixture
def tls_running(host: HostStore, tmp_path: Path, authority: Authority) -> Iterator[Running]:
    with secure(tmp_path, host, authority.certificate()) as sidecar:
        yield sidecar


def url_of(running: Running) -> str:
    return f"kvpager://127.0.0.1:{running.port}"


def connect(running: Running, **more: Any) -> Connection:
    return kvpager.connect(url_of(running), **{"token": TOKEN, "timeout": 10.0, "strict": True, **more})


def raw(running: Running, client: bytes = bytes(16), **more: Any) -> RawClient:
    return RawClient(running.port, client=client, **{"token": TOKEN, **more})


def settled(running: Running, leases: int, reservations: int) -> bool:
    groups = running.sidecar._groups
    await_true(lambda: (groups.leased, groups.reserved) == (leases, reservations))
    return True


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


# Who comes in


def test_a_client_with_the_token_is_told_that_it_gets_no_memory(running: Running) -> None:
    with raw(running) as client:
        assert client.welcome.arena_bytes == 0
        assert client.welcome.extent_bytes == 1 << 20
        assert client.welcome.boot_id == running.sidecar.boot_id
        assert counts(client)["remote"] == 1
    with RawClient(running.path) as local:
        assert local.welcome.arena_bytes == ARENA


@pytest.mark.parametrize("token", ["", "another token than that", TOKEN + "x", TOKEN[:-1], "ü" * 20])
def test_who_does_not_say_the_token_is_not_let_in(running: Running, token: str) -> None:
    with pytest.raises(AccessDeniedError, match="token"):
        raw(running, token=token)
    if len(token) >= 16:
        with pytest.raises(AccessDeniedError, match="token"):
            connect(running, token=token)

        async def denied() -> None:
            with pytest.raises(AccessDeniedError, match="token"):
                await kvpager.connect_async(url_of(running), token=token)

        asyncio.run(denied())
    with raw(running) as client:
        assert counts(client)["refused"] >= 1


def test_refusals_of_one_kind_are_logged_once_and_counted(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvpager"):
        for _ in range(5):
            with pytest.raises(AccessDeniedError):
                raw(running, token="not this one, sorry")
    refusals = [one for one in caplog.records if "refused" in one.getMessage()]
    assert len(refusals) == 1
    assert TOKEN not in caplog.text
    assert "not this one, sorry" not in caplog.text
    await_true(lambda: running.sidecar.counters.refused == 5)


def test_more_clients_than_are_allowed_are_turned_away_and_local_ones_are_not(
    host: HostStore, tmp_path: Path
) -> None:
    access = RemoteAccess("127.0.0.1", 0, TOKEN, max_clients=2)
    with Running(tmp_path / "socket", host, remote=access) as running:
        with raw(running), raw(running):
            with pytest.raises(ServiceUnavailableError, match="has 2 clients"):
                raw(running)
            with RawClient(running.path) as local:
                assert counts(local)["remote"] == 2
        await_true(lambda: not running.sidecar._connections)
        with raw(running) as client:
            assert counts(client)["remote"] == 1


def test_who_says_nothing_is_turned_away_and_holds_no_place_of_others(
    host: HostStore, tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar_module, "_HELLO_SECONDS", 0.5)
    for tls in (False, True):
        folder = tmp_path / str(tls)
        folder.mkdir()
        context = None
        if tls:
            files = authority.certificate()
            context = server_tls(files.certificate, files.key)
        access = RemoteAccess("127.0.0.1", 0, TOKEN, context, max_clients=8)
        with Running(folder / "socket", host, remote=access) as running:
            silent = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(4)]
            silent[0].sendall(b"\x10")  # the beginning of something
            ca = ssl.create_default_context(cafile=authority.path) if tls else None
            with raw(running, tls=ca) as client:
                assert counts(client)["remote"] == 1
                for one in silent:
                    one.settimeout(20)
                    with suppress(ConnectionResetError):
                        while one.recv(1 << 16):
                            pass  # an alert of TLS, perhaps
                    one.close()
                await_true(lambda running=running: not running.sidecar._door._greetings)  # type: ignore[misc]
                assert counts(client)["refused"] == 4


def test_too_many_who_say_nothing_are_turned_away_at_once(host: HostStore, tmp_path: Path) -> None:
    access = RemoteAccess("127.0.0.1", 0, TOKEN, max_clients=4)
    with Running(tmp_path / "socket", host, remote=access) as running:
        silent = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(12)]
        await_true(lambda: running.sidecar.counters.refused == 8)
        for one in silent:
            one.close()
        await_true(lambda: running.sidecar.counters.refused == 12)
        with raw(running) as client:
            assert counts(client)["remote"] == 1


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff\xff\xff\xff",
        struct.pack("<I", 5000) + bytes(5000),
        struct.pack("<I", 4) + b"junk",
        encode(Request(1, GetStats())),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS client
    ],
)
def test_a_first_frame_that_is_none_is_told_so_and_ends_it(running: Running, first: bytes) -> None:
    with raw(running, greet=False) as stranger:
        stranger.socket.sendall(first)
        with suppress(ConnectionResetError):  # what it sent was not read whole
            frame = stranger.receive()
            assert isinstance(frame, Failure)
            assert isinstance(frame.error, ProtocolError)
            with pytest.raises(EOFError):
                stranger.receive()
    with raw(running) as client:
        assert counts(client)["refused"] == 1


def test_a_first_frame_that_cannot_be_made_out_is_refused_by_its_id(running: Running) -> None:
    body = msgpack.packb([0, 6, 1, ["kvpager"]])
    with raw(running, greet=False) as stranger:
        stranger.socket.sendall(struct.pack("<I", len(body)) + body)
        frame = stranger.receive()
        assert isinstance(frame, Failure)
        assert (frame.id, "Hello" in str(frame.error)) == (6, True)


def test_a_hello_in_single_bytes_is_understood(running: Running) -> None:
    from kvpager.tests.raw_client import hello

    with raw(running, greet=False) as slow:
        for byte in encode(Request(7, hello(token=TOKEN))):
            slow.socket.sendall(bytes([byte]))
        assert slow.receive().id == 7  # type: ignore[union-attr]


def test_connections_of_machines_that_are_gone_are_found_out(running: Running) -> None:
    with raw(running):
        (connection,) = running.sidecar._connections
        await_true(lambda: connection._made)
        made = connection._transport.get_extra_info("socket")
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 60_000
        del made
    with endpoint_of(url_of(running), TOKEN).socket(socket.AF_INET) as mine:
        assert mine.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 60_000


def test_a_client_that_comes_back_ends_its_connection_that_is_still_open(running: Running) -> None:
    with raw(running, client=OTHER) as before:
        space = before.open()
        granted = before.call(Reserve(space, names(0, 3), 0.0), Reserved)
        assert len(granted.slots) == 3
        with raw(running, client=OTHER) as after:
            with pytest.raises((EOFError, ConnectionResetError)):
                before.receive()
            assert settled(running, 0, 0)
            assert counts(after)["remote"] == 1
            with raw(running, client=OTHER, group=b"h" * 16) as another:
                assert counts(another)["remote"] == 2
            assert counts(after)["remote"] >= 1


# TLS


@pytest.mark.parametrize("host_name", ["localhost", "127.0.0.1"])
def test_blocks_go_over_tls_and_come_back(tls_running: Running, authority: Authority, host_name: str) -> None:
    url = f"kvpagers://{host_name}:{tls_running.port}"
    kv = blocks(300)
    with kvpager.connect(url, token=TOKEN, ca=authority.path, timeout=10.0, strict=True) as client:
        space = client.space(LAYOUT)
        assert space.put(names(0, 300), kv) == 300
        out = np.zeros_like(kv)
        assert space.get(names(0, 300), out) == 300
        assert (out == kv).all()

    async def again() -> None:
        async with await kvpager.connect_async(url, token=TOKEN, ca=authority.path, timeout=10.0) as client:
            space = await client.space(LAYOUT)
            out = np.zeros_like(kv)
            assert await space.get(names(0, 300), out) == 300
            assert (out == kv).all()

    asyncio.run(again())


def connect_both(url: str, ca: Path | None) -> Iterator[Callable[[], object]]:
    """Attempts to connect, waiting and on a loop."""

    def waiting() -> object:
        return kvpager.connect(url, token=TOKEN, ca=ca, timeout=10.0)

    def on_a_loop() -> object:
        return asyncio.run(kvpager.connect_async(url, token=TOKEN, ca=ca, timeout=10.0))

    yield waiting
    yield on_a_loop


@pytest.mark.parametrize("wrong", ["authority", "self-signed", "expired", "not yet", "name"])
def test_a_certificate_that_is_not_trusted_is_told_at_once(
    host: HostStore, tmp_path: Path, authority: Authority, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = {
        "authority": lambda: Authority(tmp_path, "stranger").certificate(),
        "self-signed": lambda: self_signed(tmp_path),
        "expired": lambda: authority.certificate(file="old", from_now=(-3, -1)),
        "not yet": lambda: authority.certificate(file="new", from_now=(1, 3)),
        "name": lambda: authority.certificate("elsewhere.example", file="other"),
    }[wrong]()
    with secure(tmp_path, host, files) as running:
        url = f"kvpagers://localhost:{running.port}"
        for attempt in connect_both(url, authority.path):
            began = time.monotonic()
            with pytest.raises(TLSError, match="certificate"):
                attempt()
            assert time.monotonic() - began < 5.0
        with RawClient(running.path) as local:  # nobody else noticed
            assert counts(local)["remote"] == 0
        await_true(lambda: running.sidecar.counters.refused >= 2)
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


def test_plain_clients_and_tls_ports_do_not_meet(
    running: Running, tmp_path: Path, authority: Authority, host: HostStore
) -> None:
    for attempt in connect_both(f"kvpagers://localhost:{running.port}", authority.path):
        with pytest.raises(TLSError):
            attempt()
    folder = tmp_path / "tls"
    folder.mkdir()
    with secure(folder, host, authority.certificate()) as other:
        for attempt in connect_both(f"kvpager://localhost:{other.port}", None):
            with pytest.raises(TLSError, match="kvpagers://"):
                attempt()
        with kvpager.connect(
            f"kvpagers://localhost:{other.port}", token=TOKEN, ca=authority.path, timeout=10.0
        ) as client:
            assert client.stats()["sidecar"]["remote"] == 1
    with raw(running) as client:
        assert counts(client)["remote"] == 1


# What a client may do


def test_a_client_writes_nothing_but_what_it_sends(running: Running) -> None:
    """A slot that was reserved and not written holds what lay there before: somebody else's block."""
    with raw(running) as client:
        space = client.open()
        granted = client.call(Reserve(space, names(0, 2), 0.0), Reserved)
        assert granted.statuses.tolist() == [NEW, NEW]
        with pytest.raises(NotInPlaceError):
            client.call(Commit(space, granted.slots, granted.generations))
        assert len(client.call(Match(space, names(0, 2), 0.0), Leased).slots) == 0
        kv = blocks(2)
        assert client.call(Put(space, names(0, 2), kv.tobytes(), 0.0), Count).count == 2
        assert client.call(Get(space, names(0, 2)), Blocks).data == kv.tobytes()
        assert settled(running, 0, 0)
        with pytest.raises(StaleHandleError):
            client.call(Abort(space, granted.slots, granted.generations))


def test_a_put_writes_what_was_reserved_what_was_not_and_nothing_of_others(running: Running) -> None:
    with raw(running) as client, raw(running) as other:
        space, theirs = client.open(), other.open()
        client.call(Reserve(space, names(0, 2), 0.0), Reserved)
        other.call(Reserve(theirs, names(2, 1), 0.0), Reserved)
        kv = blocks(6)
        order = (*names(4, 2), *names(0, 3), *names(0, 1))  # new ones, its own, another's, one twice
        assert client.call(Put(space, order, kv.tobytes(), 0.0), Count).count == 6
        assert client.call(Get(space, names(4, 2)), Blocks).data == kv[:2].tobytes()
        stored = client.call(Get(space, names(0, 3)), Blocks).data
        assert len(stored) == 2 * SIZE  # the third is still being written
        assert stored[SIZE:] == kv[3].tobytes()
        assert stored[:SIZE] in (kv[2].tobytes(), kv[5].tobytes())
        assert settled(running, 0, 1)
        assert other.call(Put(theirs, names(2, 1), kv[:1].tobytes(), 0.0), Count).count == 1
    assert settled(running, 0, 0)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (Put(0, names(0, 2), bytes(2 * SIZE - 1), 0.0), LayoutError),
        (Put(0, names(0, 2), bytes(3 * SIZE), 0.0), LayoutError),
        (Put(1, names(0, 1), bytes(SIZE), 0.0), ConfigError),
        (Put(-1, names(0, 1), bytes(SIZE), 0.0), ConfigError),
        (Put(0, names(0, 1), bytes(SIZE), float("nan")), ConfigError),
        (Get(7, names(0, 1)), ConfigError),
        (Match(7, names(0, 1), 0.0), ConfigError),
    ],
)
def test_bytes_that_do_not_fit_their_space_are_refused(
    running: Running, request_: Any, error: type[KVPagerError]
) -> None:
    with raw(running) as client, raw(running) as other:
        client.open()
        other.open()
        other.open(KVLayout(1, 1, 128))
        with pytest.raises(error):
            client.call(request_)
        assert isinstance(client.call(GetStats()), Stats)


def test_nobody_over_tcp_ends_what_a_local_group_holds(running: Running) -> None:
    """The same group and client by name, and yet another's."""
    group, client = b"g" * 16, b"c" * 16
    with RawClient(running.path, group, client) as local:
        space = local.open()
        granted = local.call(Reserve(space, names(0, 4), 0.0), Reserved)
        local.call(Commit(space, granted.slots, granted.generations), Done)
        held = local.call(Match(space, names(0, 4), 0.0), Leased)
        with raw(running, client, group=group) as stranger:
            theirs = stranger.open()
            with pytest.raises(StaleHandleError):
                stranger.call(Release(theirs, held.slots, held.generations))
        local.call(Release(space, held.slots, held.generations), Done)


def test_what_is_held_ends_with_the_connection(running: Running) -> None:
    with raw(running) as client:
        space = client.open()
        client.call(Put(space, names(0, 5), blocks(5).tobytes(), 0.0), Count)
        assert len(client.call(Match(space, names(0, 5), 0.0), Leased).slots) == 5
        client.call(Reserve(space, names(10, 3), 0.0), Reserved)
        assert settled(running, 5, 3)
    assert settled(running, 0, 0)
    await_true(lambda: running.host.space(LAYOUT).evict(10) == 5)
    assert running.sidecar.groups == 0


def test_a_connection_that_breaks_in_the_middle_of_puts_leaves_nothing_behind(
    host: HostStore, tmp_path: Path
) -> None:
    # One thread works for it, so that some of its jobs are never begun.
    access = RemoteAccess("127.0.0.1", 0, TOKEN)
    with Running(tmp_path / "socket", host, remote=access) as running:
        kv = blocks(200).tobytes()  # more than what is done at once
        for attempt in range(10):
            with raw(running) as client:
                space = client.open()
                for at in range(5):
                    first = attempt * 1000 + at * 200
                    client.send(Reserve(space, names(first, 200), 0.0))
                    client.send(Put(space, names(first, 200), kv, 0.0))
                if attempt % 2:
                    client.receive()
                # What was not read is answered with a reset.
                client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert settled(running, 0, 0)
        space_here = running.host.space(LAYOUT)
        await_true(lambda: not space_here._records.pending)
        running.host.check_integrity()


def test_events_come_over_tcp(running: Running) -> None:
    heard: list[BlockEvent] = []
    with connect(running) as client:
        space = client.space(LAYOUT)
        end = client.subscribe(heard.append)
        client.stats()  # the subscription went before it
        space.put(names(0, 3), blocks(3))
        await_true(lambda: any(event.hashes == names(0, 3) for event in heard))
        end()


# The client


def test_blocks_are_bit_equal_both_ways_in_many_batches(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpager.api import inline_asks

    monkeypatch.setattr(inline_asks, "_BATCH_BYTES", 7 * (SIZE + 16))
    kv = blocks(200)
    with connect(running) as writer, connect(running) as reader:
        space, other = writer.space(LAYOUT), reader.space(LAYOUT)
        assert isinstance(space, InlineSpace)
        assert space.put(names(0, 200), kv[::-1]) == 200  # rows in any order of memory
        out = np.zeros((250, SIZE), dtype=np.uint8)
        assert other.get(names(0, 250), out) == 200
        assert (out[:200] == kv[::-1]).all()
        assert not out[200:].any()
        with other.match(names(0, 250)) as lease:
            assert len(lease) == 200
            for number in (0, 6, 7, 199):
                assert (lease.blocks[number] == kv[199 - number]).all()
            with pytest.raises(ValueError, match="read-only"):
                lease.blocks[0][0] = 1
            assert settled(running, 200, 0)
            assert space.evict(200) == 0
            lease.shorten(50)
            assert settled(running, 50, 0)
        with pytest.raises(ClosedError):
            _ = lease.blocks
        assert settled(running, 0, 0)
        # Local clients see the same bytes.
        with kvpager.connect(running.path) as local, local.space(LAYOUT).match(names(0, 200)) as lease:
            assert all((block == kv[199 - at]).all() for at, block in enumerate(lease.blocks))


def test_blocks_are_bit_equal_both_ways_on_a_loop(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpager.api import inline_asks

    monkeypatch.setattr(inline_asks, "_BATCH_BYTES", 7 * (SIZE + 16))
    kv = blocks(200)

    async def go() -> None:
        async with await kvpager.connect_async(
            url_of(running), token=TOKEN, timeout=10.0, strict=True
        ) as client:
            assert not client.in_place
            space = await client.space(LAYOUT)
            assert await client.space(LAYOUT) is space
            assert await space.put(names(0, 100), kv[:100]) == 100
            with await space.reserve(names(50, 150)) as reservation:
                assert reservation.status.tolist() == [PRESENT] * 50 + [NEW] * 100
                assert space.write_blocks(reservation, kv[50:]) == 150
                reservation.commit()
            await space.committed()
            out = np.zeros_like(kv)
            assert await space.get(names(0, 200), out) == 200
            assert (out == kv).all()
            with await space.match(names(0, 200)) as lease:
                assert len(lease) == 200
                assert (lease.blocks[199] == kv[199]).all()
                out[:] = 0
                assert space.read_blocks(lease, out) == 200
                assert (out == kv).all()
            assert (await client.stats())["sidecar"]["remote"] == 1
            for call in (
                lambda: space.commit(np.zeros(1, np.int32), np.zeros(1, np.int64)),
                lambda: space.view(0),
                lambda: space.addresses(np.zeros(1, np.int32)),
            ):
                with pytest.raises(NotInPlaceError):
                    call()
            with pytest.raises(NotInPlaceError):
                await space.lease(np.zeros(1, np.int32), np.zeros(1, np.int64))

    asyncio.run(go())
    assert settled(running, 0, 0)


def test_a_reservation_is_a_buffer_that_is_sent_when_it_is_committed(running: Running) -> None:
    with connect(running) as client, connect(running) as other:
        space = client.space(LAYOUT)
        space.put(names(1, 1), blocks(1))
        with space.reserve(names(0, 5)) as reservation:
            assert reservation.status.tolist() == [NEW, PRESENT, NEW, NEW, NEW]
            assert len(reservation.blocks) == 4
            for number, block in enumerate(reservation.blocks):
                block[:] = number + 1
            with other.space(LAYOUT).reserve(names(2, 1)) as theirs:
                assert theirs.status.tolist() == [PENDING]
            reservation.commit(np.array([3, 0]))
            assert settled(running, 0, 2)
        assert settled(running, 0, 0)  # the others were aborted
        out = np.zeros((2, SIZE), dtype=np.uint8)
        assert space.get(names(0, 5), out.repeat(3, axis=0)) == 2
        assert space.get((*names(0, 1), *names(3, 1)), out) == 2
        assert (out == np.array([[1], [3]])).all()
        assert len(space.match(names(2, 1))) == 0
        with pytest.raises(StaleHandleError):
            space.abort(reservation.slots[[0]], reservation.generations[[0]])


def test_what_the_sidecar_has_is_not_sent_again(running: Running) -> None:
    with connect(running) as client:
        space = client.space(LAYOUT)
        assert space.put(names(0, 10), blocks(10)) == 10
        before = client.stats()["host"]["committed"]
        assert space.put(names(0, 12), blocks(12, seed=1)) == 12
        assert client.stats()["host"]["committed"] == before + 2
        out = np.zeros((10, SIZE), dtype=np.uint8)
        assert space.get(names(0, 10), out) == 10
        assert (out == blocks(10)).all()


def test_what_there_is_no_room_for_is_not_kept(running: Running) -> None:
    with connect(running) as client:
        space = client.space(LAYOUT)
        capacity = running.host.space(LAYOUT).capacity
        kv = np.zeros((capacity + 5, SIZE), dtype=np.uint8)
        assert space.put(names(0, capacity + 5), kv) == capacity
        lease = space.match(names(0, capacity))
        assert len(lease) == capacity
        assert space.put(names(1 << 20, 3), kv[:3]) == 0
        lease.release()


def test_layouts_shards_and_tenants_are_apart(running: Running) -> None:
    wide = KVLayout(2, 2, 128)
    with connect(running) as client, connect(running) as other:
        one = client.space(LAYOUT, tenant="anna")
        two = other.space(wide, tenant="bert")
        shard = other.space(LAYOUT, shard="1/2", tenant="bert")
        small, large = blocks(4), blocks(4, 1, wide.block_bytes)
        assert one.put(names(0, 4), small) == two.put(names(0, 4), large) == 4
        assert len(shard.match(names(0, 4))) == 0
        assert one.capacity == two.capacity == 0  # of no meaning here
        got = np.zeros_like(large)
        assert two.get(names(0, 4), got) == 4
        assert (got == large).all()
        got = np.zeros_like(small)
        assert one.get(names(0, 4), got) == 4
        assert (got == small).all()
        with pytest.raises(LayoutError):
            two.put(names(5, 1), small[:1])
        with pytest.raises(LayoutError):
            two.get(names(0, 1), got)


def test_blocks_that_no_frame_holds_are_refused_when_their_space_is_opened(
    host: HostStore, tmp_path: Path
) -> None:
    access = RemoteAccess("127.0.0.1", 0, TOKEN)
    with (
        Running(tmp_path / "socket", host, remote=access, max_frame=SIZE + 64) as running,
        connect(running) as client,
        pytest.raises(ConfigError, match=r"block_size: .* frames"),
    ):
        client.space(LAYOUT)
    with (
        Running(tmp_path / "again", host, remote=access, max_frame=3 * SIZE) as running,
        connect(running) as client,
    ):
        space = client.space(LAYOUT)
        assert space.put(names(0, 20), blocks(20)) == 20
        out = np.zeros((20, SIZE), dtype=np.uint8)
        assert space.get(names(0, 20), out) == 20
        assert (out == blocks(20)).all()


def test_calls_about_places_in_memory_say_that_it_is_not_here(running: Running) -> None:
    slots, generations = np.zeros(1, np.int32), np.zeros(1, np.int64)
    with connect(running) as client, kvpager.connect(running.path) as local:
        space = client.space(LAYOUT)
        assert not client.in_place
        assert local.in_place
        calls: list[Callable[[], object]] = [
            lambda: space.addresses(slots),
            lambda: space.slots_at(generations),
            lambda: space.view(0),
            lambda: space.readable_in_place(slots),
            lambda: space.lease(slots, generations),
            lambda: space.commit(slots, generations),
        ]
        for call in calls:
            with pytest.raises(NotInPlaceError, match="over TCP"):
                call()
        with pytest.raises(ConfigError, match=r"host: .* over TCP"):
            TieredStore(LAYOUT, 4, root=b"r" * 16, host=client)
    with pytest.raises(ClosedError):
        space.view(0)


def test_the_cold_tier_is_asked_over_tcp(tmp_path: Path) -> None:
    cold = DiskColdTier(tmp_path / "cold", capacity_bytes=64 << 20)
    access = RemoteAccess("127.0.0.1", 0, TOKEN)
    with (
        HostStore(ARENA, cold=cold) as host,
        Running(tmp_path / "socket", host, remote=access) as running,
        connect(running) as client,
    ):
        space = client.space(LAYOUT)
        kv = blocks(8)
        assert space.put(names(0, 8), kv) == 8
        assert client.flush() == 0
        assert space.evict(8) == 8
        with space.match(names(0, 8), cold_deadline=5.0) as lease:
            assert (len(lease), lease.cold) == (0, 8)
        with space.load(names(0, 8), 10.0) as lease:
            assert (len(lease), getattr(lease, "loaded", None)) == (8, 8)
            assert all((block == kv[at]).all() for at, block in enumerate(lease.blocks))
        assert space.evict(8) == 8
        load = space.start_load(names(0, 8))
        assert load.wait(10.0)
        assert settled(running, 8, 0)
        load.release()
        assert space.put_note(b"name", b"value")
        assert space.get_note(b"name") == b"value"
        assert space.pin(names(0, 8)) == 8
        assert space.unpin(names(0, 8)) == 8


# Slow ones, broken ones, dead ones


def test_a_client_that_does_not_read_slows_itself_alone(host: HostStore, tmp_path: Path) -> None:
    access = RemoteAccess("127.0.0.1", 0, TOKEN)
    limits = Limits(request_bytes=4 << 20)
    with (
        Running(tmp_path / "socket", host, remote=access, limits=limits) as running,
        connect(running) as fast,
        raw(running) as slow,
    ):
        quick = fast.space(LAYOUT)
        quick.put(names(0, 256), blocks(256))
        space = slow.open()
        slow.socket.settimeout(1.0)
        asked = 0
        with suppress(TimeoutError):
            while asked < 100_000:
                slow.socket.sendall(encode(Request(asked + 10, Get(space, names(0, 256)))))
                asked += 1
        assert 0 < asked < 100_000  # it is read from no more
        (connection,) = (one for one in running.sidecar._connections if not one._reading or one._unread)
        assert connection._transport.get_write_buffer_size() < 16 << 20
        out = np.zeros((256, SIZE), dtype=np.uint8)
        began = time.monotonic()
        for _ in range(20):
            assert quick.get(names(0, 256), out) == 256
        assert time.monotonic() - began < 10.0
        slow.socket.settimeout(30)
        for _ in range(50):  # once it reads it goes on
            frame = slow.receive()
            assert len(frame.message.data) == 256 * SIZE  # type: ignore[union-attr]


def test_a_client_that_sends_slowly_holds_up_nobody(running: Running) -> None:
    with raw(running) as slow, connect(running) as fast:
        space = slow.open()
        frame = encode(Request(5, Put(space, names(0, 100), blocks(100).tobytes(), 0.0)))
        slow.socket.sendall(frame[: len(frame) // 2])
        quick = fast.space(LAYOUT)
        assert quick.put(names(200, 50), blocks(50)) == 50
        slow.socket.sendall(frame[len(frame) // 2 : -1])
        out = np.zeros((50, SIZE), dtype=np.uint8)
        assert quick.get(names(200, 50), out) == 50
        assert quick.get(names(0, 1), out[:1]) == 0
        slow.socket.sendall(frame[-1:])
        assert slow.receive().message == Count(100)  # type: ignore[union-attr]


def break_socket(connection: Connection) -> None:
    connected = connection._socket
    assert connected is not None
    connected.shutdown(socket.SHUT_RDWR)
    await_true(lambda: connection._socket not in (None, connected) and connection.ready)


def test_after_a_connection_broke_leases_are_taken_again_and_reservations_are_lost(running: Running) -> None:
    lost: list[Lost] = []
    with connect(running, on_lost=lost.append, strict=False) as client:
        space = client.space(LAYOUT)
        kv = blocks(10)
        space.put(names(0, 10), kv)
        lease = space.match(names(0, 10))
        reservation = space.reserve(names(20, 2))
        break_socket(client)
        assert settled(running, 10, 0)
        (told,) = client.lost
        assert (len(told.leased), len(told.reserved)) == (0, 2)
        await_true(lambda: len(lost) == 1)
        reservation.commit()  # in vain
        assert len(space.match(names(20, 2))) == 0
        lease.release()
        assert settled(running, 0, 0)
        # Blocks that went meanwhile are told, and their copies stay.
        lease = space.match(names(0, 10))
        with client._lock:  # it does not come back before they are gone
            connected = client._socket
            assert connected is not None
            connected.shutdown(socket.SHUT_RDWR)
            await_true(lambda: running.host.space(LAYOUT).evict(10) == 10)
        await_true(lambda: client.counters.connects == 3 and client.ready)
        assert [len(one.leased) for one in client.lost] == [10]
        assert (lease.blocks[9] == kv[9]).all()
        lease.release()
        assert client.counters.lost == 12


@pytest.mark.parametrize("tls", [False, True])
def test_a_sidecar_that_is_killed_in_the_middle_of_calls_costs_hits(
    tmp_path: Path, authority: Authority, tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPAGER_TOKEN", TOKEN)
    port, files = free_port(), authority.certificate()
    options = [f"--listen=127.0.0.1:{port}"]
    if tls:
        options += [f"--tls-cert={files.certificate}", f"--tls-key={files.key}"]
    url = f"kvpager{'s' if tls else ''}://localhost:{port}"
    ca = authority.path if tls else None
    serving = ServeProcess(tmp_path / "socket", *options, host_bytes=64 << 20)
    kv = blocks(2000)
    with serving, kvpager.connect(url, token=TOKEN, ca=ca, timeout=5.0) as client:
        space = client.space(LAYOUT)
        await_true(lambda: space.put(names(0, 2000), kv) == 2000)
        failed: list[BaseException] = []
        results: list[int] = []
        began = threading.Barrier(4)
        stop = threading.Event()

        def work(number: int) -> None:
            out = np.zeros_like(kv)
            began.wait()
            try:
                while not stop.is_set():
                    if number == 0:
                        results.append(space.put(names(5000, 500), kv[:500]))
                        space.evict(2000)
                    elif number == 1:
                        with space.match(names(0, 2000)) as lease:
                            results.append(len(lease))
                            assert all((lease.blocks[at] == kv[at]).all() for at in range(0, len(lease), 97))
                    else:
                        results.append(count := space.get(names(0, 2000), out))
                        assert (out[:count] == kv[:count]).all()
            except BaseException as error:  # noqa: BLE001  it is told below
                failed.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        began.wait()
        await_true(lambda: len(results) > 10)
        serving.kill()
        await_true(lambda: not client.ready)
        stop.set()
        for thread in threads:
            thread.join()
        assert failed == []
        assert space.put(names(0, 10), kv[:10]) == 0
        assert len(space.match(names(0, 10))) == 0
        assert client.counters.unanswered > 0
        serving.start()
        await_true(lambda: client.ready)
        assert client.counters.restarts == 1
        await_true(lambda: space.put(names(0, 10), kv[:10]) == 10)
        out = np.zeros((10, SIZE), dtype=np.uint8)
        assert space.get(names(0, 10), out) == 10
        assert (out == kv[:10]).all()


def test_what_a_stalled_sidecar_was_not_sent_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpager.api import inline_asks

    monkeypatch.setattr(inline_asks, "_BATCH_BYTES", 4 * (SIZE + 16))
    monkeypatch.setattr(inline_asks, "_WINDOW_BYTES", 4 * SIZE)
    monkeypatch.setenv("KVPAGER_TOKEN", TOKEN)
    port = free_port()
    with (
        ServeProcess(tmp_path / "socket", f"--listen=127.0.0.1:{port}") as serving,
        kvpager.connect(f"kvpager://127.0.0.1:{port}", token=TOKEN, timeout=2.0) as client,
    ):
        space = client.space(LAYOUT)
        await_true(lambda: client.stats()["arena"]["ready_bytes"] == 8 << 20)
        reservation = space.reserve(names(0, 20))
        assert len(reservation.new) == 20
        serving.pause()
        reservation.commit()  # the first of it is sent, and not answered
        assert not client.core._spaces[space.id].held.reservations
        assert space.put(names(50, 1), blocks(1)) == 0
        serving.resume()
        with RawClient(serving.path) as local:
            await_true(lambda: counts(local)["reserved"] == 0)
        await_true(lambda: space.put(names(0, 20), blocks(20)) == 20)
        out = np.zeros((20, SIZE), dtype=np.uint8)
        assert space.get(names(4, 16), out) == 16
        assert (out[:16] == blocks(20)[4:]).all()


def test_a_strict_client_is_told_that_the_sidecar_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPAGER_TOKEN", TOKEN)
    port = free_port()
    with ServeProcess(tmp_path / "socket", f"--listen=127.0.0.1:{port}") as serving:
        with kvpager.connect(f"kvpager://127.0.0.1:{port}", token=TOKEN, timeout=5.0, strict=True) as client:
            space = client.space(LAYOUT)
            reservation = space.reserve(names(0, 1))
            serving.kill()
            await_true(lambda: not client.ready)
            for call in (
                lambda: space.match(names(0, 1)),
                lambda: space.put(names(0, 1), blocks(1)),
                lambda: space.get(names(0, 1), blocks(1)),
                reservation.commit,
            ):
                with pytest.raises(ServiceUnavailableError):
                    call()
        with pytest.raises(ServiceUnavailableError, match="refused"):
            kvpager.connect(f"kvpager://127.0.0.1:{port}", token=TOKEN, timeout=0.5)


def test_a_sidecar_that_stops_takes_what_was_reserved_and_nothing_new(
    host: HostStore, tmp_path: Path
) -> None:
    access = RemoteAccess("127.0.0.1", 0, TOKEN)
    with Running(tmp_path / "socket", host, remote=access) as running, connect(running) as client:
        space = client.space(LAYOUT)
        reservation = space.reserve(names(0, 3))
        stopping = threading.Thread(target=running.stop, args=(60.0,))
        stopping.start()
        await_true(lambda: running.sidecar._service.stopping)
        with pytest.raises(ServiceUnavailableError):
            space.put(names(10, 1), blocks(1))
        for _ in range(2):
            with pytest.raises(ServiceUnavailableError, match="being stopped"):
                raw(running)
        with pytest.raises(AccessDeniedError):
            raw(running, token="b" * 16)
        reservation.blocks[1][:] = 7
        reservation.commit()
        stopping.join(20)
        assert not stopping.is_alive()
        assert host.space(LAYOUT).match(names(0, 3)).blocks[1].tolist() == [7] * SIZE


# Settings


@pytest.mark.parametrize(
    ("url", "token", "ca", "said"),
    [
        ("kvpager://localhost", TOKEN, None, "url: "),
        ("kvpager://:7000", TOKEN, None, "url: "),
        ("kvpager://localhost:99999", TOKEN, None, "url: "),
        ("kvpager://localhost:0", TOKEN, None, "url: "),
        ("kvpager://localhost:7000/path", TOKEN, None, "url: "),
        ("kvpager://localhost:7000?a=b", TOKEN, None, "url: "),
        ("kvpager://me:a-secret-token-xx@localhost:7000", TOKEN, None, "url: names no user or token"),
        ("http://localhost:7000", None, None, "url: "),
        ("http://localhost:7000", TOKEN, None, "url: must be unix:///path, a path, kvpager://host:port or"),
        ("http://me:a-secret-token-xx@localhost:7000", None, "/dev/null", "url: must be unix:///path"),
        ("kvpager://localhost:7000", None, None, "token: "),
        ("kvpager://localhost:7000", "short", None, "token: "),
        ("kvpager://localhost:7000", "x" * 2000, None, "token: "),
        ("kvpager://localhost:7000", "with a\nline end in it", None, "token: "),
        ("kvpager://localhost:7000", 5, None, "token: "),
        ("kvpager://localhost:7000", TOKEN, "/dev/null", "ca: "),
        ("kvpagers://localhost:7000", TOKEN, "/no/such/file", "ca: "),
        ("kvpagers://localhost:7000", TOKEN, "/dev/null", "ca: "),
        ("/a/path", TOKEN, None, "token: "),
        ("unix:///a/path", None, "/dev/null", "ca: "),
    ],
)
def test_addresses_and_tokens_that_make_no_sense_are_refused(
    url: str, token: Any, ca: Any, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        endpoint_of(url, token, ca)
    assert str(refused.value).startswith(said)
    assert "secret" not in str(refused.value)
    with pytest.raises(ConfigError):
        kvpager.connect(url, token=token, ca=ca, timeout=0.1)


def test_a_url_names_host_and_port_and_nothing_shows_the_token() -> None:
    endpoint = endpoint_of("kvpager://[::1]:7000/", TOKEN)
    assert isinstance(endpoint, TcpEndpoint)
    assert (endpoint.host, endpoint.port) == ("::1", 7000)
    assert str(endpoint) == "kvpager://[::1]:7000"
    assert TOKEN not in repr(endpoint)
    assert TOKEN not in repr(RemoteAccess("127.0.0.1", 0, TOKEN))


def test_addresses_to_listen_on_are_read() -> None:
    assert parse_address("--listen", "0.0.0.0:7000") == ("0.0.0.0", 7000)
    assert parse_address("--listen", "[::]:7000") == ("::", 7000)
    assert parse_address("--listen", "host.example:1") == ("host.example", 1)
    for wrong in (
        "",
        "7000",
        ":7000",
        "host",
        "host:",
        "host:99999",
        "::1:7000",
        "host:7000 ",
        "host:\uff11",
    ):
        with pytest.raises(ConfigError, match="--listen: must be HOST:PORT"):
            parse_address("--listen", wrong)


def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"  {TOKEN}\n")
    for mode in (0o644, 0o640, 0o604, 0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=r"--token-file: .* chmod 600"):
            read_tokens("--token-file", path)
    path.chmod(0o600)
    assert read_tokens("--token-file", path) == {TOKEN: None}
    for content in (
        b"",
        b"\n# none yet\n",
        b"short\n",
        b"x" * 5000,
        b"\xff" * 20,
        b"two lines of\ntext in the file",
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="--token-file: "):
            read_tokens("--token-file", path)
    with pytest.raises(ConfigError, match=r"--token-file: .* cannot be read"):
        read_tokens("--token-file", tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="--token-file: "):
        read_tokens("--token-file", tmp_path)


def test_a_key_that_others_can_read_is_refused(authority: Authority) -> None:
    files = authority.certificate(file="open")
    for mode in (0o644, 0o640, 0o604, 0o620, 0o602):
        files.key.chmod(mode)
        with pytest.raises(ConfigError, match=r"--tls-key: .* chmod 600"):
            server_tls(files.certificate, files.key)
    files.key.chmod(0o400)
    files.certificate.chmod(0o644)
    server_tls(files.certificate, files.key)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--token-file", "x"], "--token-file: is for clients over TCP"),
        (["--tls-cert", "x"], "--tls-cert: is for clients over TCP"),
        (["--tls-key", "x"], "--tls-key: is for clients over TCP"),
        (["--insecure"], "--insecure: is for clients over TCP"),
        (["--listen", "127.0.0.1:0"], "--listen: needs a token"),
        (["--listen", "somewhere", "--token-file", "TOKEN"], "--listen: must be HOST:PORT"),
        (["--listen", "0.0.0.0:0", "--token-file", "TOKEN"], "--listen: 0.0.0.0:0 is reached from other"),
        (["--listen", "192.0.2.1:7", "--token-file", "TOKEN", "--insecure"], "--listen: 192.0.2.1:7 cannot"),
        (["--listen", "127.0.0.1:0", "--token-file", "/nowhere"], "--token-file: /nowhere cannot be read"),
        (
            ["--listen", "127.0.0.1:0", "--token-file", "TOKEN", "--tls-cert", "CERT"],
            "--tls-key: a certificate",
        ),
        (
            ["--listen", "127.0.0.1:0", "--token-file", "TOKEN", "--tls-key", "KEY"],
            "--tls-cert: a certificate",
        ),
        (
            [
                "--listen",
                "127.0.0.1:0",
                "--token-file",
                "TOKEN",
                "--tls-cert",
                "CERT",
                "--tls-key",
                "/nowhere",
            ],
            "--tls-key: /nowhere cannot be read",
        ),
        (
            ["--listen", "127.0.0.1:0", "--token-file", "TOKEN", "--tls-cert", "KEY", "--tls-key", "KEY"],
            "--tls-cert: ",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused_in_one_line(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    authority: Authority,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KVPAGER_TOKEN", raising=False)
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    files = authority.certificate()
    known = {"TOKEN": str(token), "CERT": str(files.certificate), "KEY": str(files.key)}
    given = [known.get(one, one) for one in arguments]
    assert main(["serve", "--host-bytes", "16M", "--socket", str(tmp_path / "socket"), *given]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith(f"kvpager serve: {said}")
    assert shown.err.count("\n") == 1
    assert TOKEN not in shown.err
    assert not (tmp_path / "socket").exists()


def test_a_token_in_the_environment_or_a_file_lets_clients_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPAGER_TOKEN", TOKEN)
    token = tmp_path / "token"
    token.write_text("the-token-of-the-file\n")
    token.chmod(0o600)
    for options, said in (([], TOKEN), ([f"--token-file={token}"], "the-token-of-the-file")):
        port = free_port()
        with ServeProcess(tmp_path / "socket", f"--listen=localhost:{port}", *options) as serving:
            with kvpager.connect(f"kvpager://localhost:{port}", token=said, timeout=5.0) as client:
                assert client.stats()["sidecar"]["remote"] == 1
            with pytest.raises(AccessDeniedError):
                kvpager.connect(f"kvpager://localhost:{port}", token="neither of the two!", timeout=5.0)
            command = Path(f"/proc/{serving.running.pid}/cmdline").read_bytes()
            assert said.encode() not in command
            assert serving.terminate() == 0
    assert os.listdir(tmp_path) == ["token"]
