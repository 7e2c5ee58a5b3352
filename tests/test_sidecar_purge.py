"""Purges through a sidecar: the reply says what is gone and who holds the rest, over restarts too."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kvpager.api.client import connect
from kvpager.api.client_async import connect_async
from kvpager.api.messages import (
    Commit,
    Done,
    Leased,
    LeaseSlots,
    Marks,
    Match,
    Purge,
    Purged,
    PurgeTenant,
    Release,
    Reserve,
    Reserved,
)
from kvpager.api.remote_access import RemoteAccess
from kvpager.kvstore.handles import ReserveStatus
from kvpager.kvstore.hashing import ChainIdentity
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.session import SessionRecord, session_key
from kvpager.tests.raw_client import LAYOUT, RawClient, Running, names, store
from kvpager.tests.serve_process import ServeProcess
from kvpager.tests.troubled_disk import TroubledDisk
from kvpager.tiers.cold import ColdStatus
from kvpager.tiers.cold_disk import DiskColdTier
from kvpager.tiers.errors import (
    AccessDeniedError,
    ColdTierUnavailableError,
    ConfigError,
    StaleHandleError,
)

SIZE = LAYOUT.block_bytes
TOKEN = "token of anna..."
NOTHING = Purged(1, 0, 0, 0, 0, 0, {})


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    cold = DiskColdTier(tmp_path / "cold", capacity_bytes=16 << 20)
    remote = RemoteAccess("127.0.0.1", 0, {TOKEN: frozenset({"anna"})})
    with (
        HostStore(1 << 20, extent_bytes=1 << 16, cold=cold, clean_ahead=0.0) as host,
        Running(tmp_path / "socket", host, remote=remote) as sidecar,
    ):
        yield sidecar


@pytest.fixture
def client(running: Running) -> Iterator[RawClient]:
    with RawClient(running.path) as made:
        yield made


def matched(client: RawClient, space: int, first: int, count: int) -> int:
    leased: Leased = client.call(Match(space, names(first, count), 0.0), Leased)
    client.call(Release(space, leased.slots, leased.generations), Done)
    return len(leased.slots)


def test_the_reply_says_what_is_gone_from_where(running: Running, client: RawClient) -> None:
    space = client.open()
    store(client, space, 0, 4)
    assert running.host.flush() == 0
    store(client, space, 10, 1)
    asked = Purge(space, (*names(0, 2), *names(10, 1)), b"", 5.0)
    assert client.call(asked) == Purged(1, 3, 3 * SIZE, 2, 2 * SIZE, 0, {})
    assert client.call(asked) == NOTHING
    assert (matched(client, space, 0, 1), matched(client, space, 2, 2)) == (0, 2)


def test_who_holds_what_is_left_is_told_and_it_goes_when_he_lets_go(
    running: Running, client: RawClient
) -> None:
    space = client.open()
    store(client, space, 0, 4)
    with connect(str(running.path), name="engine 7", group=b"7" * 16) as engine:
        held = engine.space(LAYOUT).match(names(0, 2))
        writing = engine.space(LAYOUT).reserve(names(50, 1))
        other = client.call(Match(space, names(0, 1), 0.0), Leased)
        done: Purged = client.call(Purge(space, (*names(0, 4), *names(50, 1)), b"", 5.0), Purged)
        assert (done.host_blocks, set(done.left)) == (2, {"leased", "reserved"})
        assert sorted(done.left["leased"].values()) == [1, 2]
        both = next(name for name, count in done.left["leased"].items() if count == 2)
        assert both.startswith("engine 7 (pid ")
        assert list(done.left["reserved"].values()) == [1]
        assert matched(client, space, 0, 1) == 0
        marks: Marks = client.call(LeaseSlots(space, other.slots, other.generations), Marks)
        assert not marks.flags.any()
        writing.commit()
        assert matched(client, space, 50, 1) == 0
        held.release()
        client.call(Release(space, other.slots, other.generations), Done)
        assert client.call(Purge(space, names(0, 4), b"", 5.0)) == NOTHING
        assert running.host.tenants()[""]["blocks"] == 0


def test_a_tenant_is_purged_in_all_of_its_spaces(running: Running, client: RawClient) -> None:
    for shard in ("1", "2"):
        store(client, client.open(shard=shard, tenant="anna"), 0, 3)
    bert = client.open(tenant="bert")
    store(client, bert, 0, 3)
    assert running.host.flush() == 0
    assert client.call(PurgeTenant("anna", 5.0)) == Purged(2, 6, 6 * SIZE, 6, 6 * SIZE, 0, {})
    assert client.call(PurgeTenant("nobody", 5.0)) == Purged(0, 0, 0, 0, 0, 0, {})
    assert matched(client, bert, 0, 3) == 3
    with pytest.raises(ConfigError, match="tenant: "):
        client.call(PurgeTenant("*", 5.0))


def test_over_tcp_a_tenant_purges_itself_alone(running: Running) -> None:
    url = f"kvpager://127.0.0.1:{running.port}"
    with connect(url, token=TOKEN, tenant="anna") as connection:
        space = connection.space(LAYOUT)
        assert space.put(names(0, 2), np.zeros((2, SIZE), np.uint8)) == 2
        with pytest.raises(AccessDeniedError, match="tenant 'bert'"):
            connection.purge_tenant("bert")
        assert space.purge(names(0, 1)).host_blocks == 1
        with space.match(names(1, 1)) as lease:
            assert len(lease) == 1
            done = connection.purge_tenant("anna")
            assert list(done.left["leased"]) == [f"{connection.core._hello.name} (over TCP)"]
            with space.match(names(1, 1)) as again:
                assert len(again) == 0


def test_what_is_put_over_tcp_and_was_purged_since_it_was_reserved_is_not_found(running: Running) -> None:
    with connect(f"kvpager://127.0.0.1:{running.port}", token=TOKEN, tenant="anna") as connection:
        space = connection.space(LAYOUT)
        with space.reserve(names(0, 2)) as reservation:
            assert space.purge(names(0, 1)).left["reserved"]
            reservation.commit()
        with space.match(names(0, 1)) as gone, space.match(names(1, 1)) as there:
            assert (len(gone), len(there)) == (0, 1)
        assert running.host.tenants()["anna"]["blocks"] == 1


def test_a_session_is_purged_with_its_record(running: Running) -> None:
    root = ChainIdentity(b"model").root
    record = SessionRecord(root, 40, np.arange(50, dtype=np.int32))
    blocks = record.blocks(LAYOUT.block_size)

    def save() -> None:
        with connect(str(running.path)) as connection:
            space = connection.space(LAYOUT, tenant="anna")
            assert space.put_note(session_key(root, "talk"), record.pack())
            assert space.put(blocks, np.zeros((len(blocks), SIZE), np.uint8)) == len(blocks)

    async def purge_async() -> Purged:
        async with await connect_async(str(running.path)) as connection:
            space = await connection.space(LAYOUT, tenant="anna")
            return await space.purge_session("talk", root=root)

    save()
    with connect(str(running.path)) as connection:
        space = connection.space(LAYOUT, tenant="anna")
        done = space.purge_session("talk", root=root)
        assert (done.host_blocks, done.notes, done.left) == (3, 1, {})
        assert space.get_note(session_key(root, "talk")) is None
        assert space.purge_session("talk", root=root) == NOTHING
    save()
    done = asyncio.run(purge_async())
    assert (done.host_blocks, done.notes, done.left) == (3, 1, {})


def test_a_session_whose_record_cannot_be_read_is_not_purged_by_halves(tmp_path: Path) -> None:
    root = ChainIdentity(b"model").root
    record = SessionRecord(root, 40, np.arange(50, dtype=np.int32))
    blocks = record.blocks(LAYOUT.block_size)
    cold = TroubledDisk(tmp_path / "cold")
    with HostStore(1 << 20, cold=cold) as host, Running(tmp_path / "socket", host) as running:
        for strict in (False, True):
            with connect(str(running.path), strict=strict) as connection:
                space = connection.space(LAYOUT)
                assert space.put_note(session_key(root, "talk"), record.pack())
                assert space.put(blocks, np.zeros((len(blocks), SIZE), np.uint8)) == len(blocks)
                cold.fault = ColdStatus.UNAVAILABLE
                # A miss, and no sign that the sidecar does not answer.
                assert space.get_note(session_key(root, "talk")) is None
                assert connection.counters.unanswered == 0
                with pytest.raises(ColdTierUnavailableError):
                    space.purge_session("talk", root=root)
                cold.fault = None
                done = space.purge_session("talk", root=root)
                assert (done.host_blocks, done.notes, done.left) == (3, 1, {})


def test_a_purge_outlives_a_sidecar_that_is_killed(tmp_path: Path) -> None:
    options = f"--cold=disk://{tmp_path / 'cold'}", "--cold-bytes=16M"
    with ServeProcess(tmp_path / "socket", *options) as serve:
        client = RawClient(serve.path, client=b"c" * 16)
        space = client.open(tenant="anna")
        granted: Reserved = client.call(Reserve(space, names(0, 4), 20.0), Reserved)
        client.call(Commit(space, granted.slots, granted.generations), Done)
        leased: Leased = client.call(Match(space, names(0, 2), 0.0), Leased)
        writing: Reserved = client.call(Reserve(space, names(50, 1), 20.0), Reserved)
        done: Purged = client.call(PurgeTenant("anna", 20.0), Purged)
        assert (done.host_blocks, set(done.left)) == (2, {"leased", "reserved"})
        serve.kill()
        client.close()
        serve.start()
        with RawClient(serve.path, client=b"c" * 16) as again:
            space = again.open(tenant="anna")
            assert matched(again, space, 0, 1) == matched(again, space, 2, 1) == 0
            assert not again.call(LeaseSlots(space, leased.slots, leased.generations), Marks).flags.any()
            # What is left of it is still known, and still goes.
            held: Purged = again.call(PurgeTenant("anna", 20.0), Purged)
            assert [sum(held.left[why].values()) for why in ("leased", "reserved")] == [2, 1]
            again.call(Release(space, leased.slots, leased.generations), Done)
            again.call(Commit(space, writing.slots, writing.generations), Done)
            assert again.call(PurgeTenant("anna", 20.0)) == NOTHING
            assert again.call(Reserve(space, names(0, 1), 20.0)).statuses.tolist() == [ReserveStatus.NEW]
            with pytest.raises(StaleHandleError):
                again.call(Release(space, leased.slots, leased.generations))
