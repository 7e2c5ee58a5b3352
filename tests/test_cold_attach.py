"""Cold tiers that come and go while a sidecar serves: disks and Redis servers, and clients that work on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvpager.api.client import connect
from kvpager.api.messages import Count, Done, Flush, GetStats, Leased, Load
from kvpager.api.operator_messages import (
    AttachCold,
    Configure,
    Configured,
    DetachCold,
    Evictions,
    EvictWhere,
    GetStatus,
    Status,
)
from kvpager.kvstore.host import HostStore
from kvpager.tests.installed_policy import install_policy
from kvpager.tests.raw_client import LAYOUT, RawClient, Running, await_true, names, store
from kvpager.tests.redis_servers import RedisServer
from kvpager.tests.serve_process import ServeProcess
from kvpager.tests.troubled_disk import TroubledDisk
from kvpager.tiers.cold import ColdStatus
from kvpager.tiers.cold_disk import DiskColdTier
from kvpager.tiers.errors import ClosedError, ConfigError
from kvpager.tiers.layout import KVLayout


def status(client: RawClient) -> dict[str, Any]:
    values: dict[str, Any] = client.call(GetStatus(), Status).values
    return values


def dirty(client: RawClient) -> int:
    count: int = sum(one["dirty"] for one in status(client)["spaces"])
    return count


def bytes_of(capacity: int) -> list[str]:
    """The option of a disk tier's size."""
    return [f"--cold-bytes={capacity}"] if capacity else []


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with (
        HostStore(1 << 20, extent_bytes=1 << 16) as host,
        Running(tmp_path / "socket", host) as made,
    ):
        yield made


@pytest.fixture
def operator(running: Running) -> Iterator[RawClient]:
    with RawClient(running.path, group=b"o" * 16) as made:
        yield made


class Working:
    """What a client that works on did.

    Attributes:
        rounds: times that it wrote and read.
        wrong: blocks that it found to be others than it wrote.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self.wrong = 0
        self.error: Exception | None = None
        self.over = threading.Event()

    def goes_on(self) -> None:
        """Wait until it has done some more."""
        begun = self.rounds
        await_true(lambda: self.rounds > begun + 3 or self.error is not None)
        assert self.error is None

    def run(self, path: Path) -> None:
        try:
            with connect(str(path), timeout=20.0) as client:
                space = client.space(LAYOUT, shard="worker")
                out = np.zeros((8, 4096), np.uint8)
                while not self.over.is_set():
                    first = 8 * (self.rounds % 31)
                    made = np.repeat(np.arange(first, first + 8, dtype=np.uint8)[:, None], 4096, axis=1)
                    with space.load(names(first, 8), 1.0):
                        there = space.get(names(first, 8), out)
                        self.wrong += int(np.count_nonzero((out[:there] != made[:there]).any(axis=1)))
                    space.put(names(first, 8), made, wait=1.0)
                    self.rounds += 1
        except Exception as error:  # noqa: BLE001  told by the test
            self.error = error


@contextmanager
def working(path: Path) -> Iterator[Working]:
    """A client that writes and reads more blocks than host memory holds, for as long as this lasts."""
    work = Working()
    thread = threading.Thread(target=work.run, args=(path,))
    thread.start()
    try:
        yield work
    finally:
        work.over.set()
        thread.join(60)
    if work.error is not None:
        raise work.error
    assert work.wrong == 0


@pytest.fixture(params=["disk", "redis"])
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[tuple[str, int]]]:
    """Two cold tiers of a kind."""
    if request.param == "disk":
        yield [(f"disk://{tmp_path}/cold{number}", 64 << 20) for number in range(2)]
        return
    with ExitStack() as stack:
        servers = [stack.enter_context(RedisServer(tmp_path)) for _ in range(2)]
        yield [(server.url, 0) for server in servers]


def test_cold_tiers_come_and_go_under_a_client_that_works_on(
    urls: list[tuple[str, int]], tmp_path: Path
) -> None:
    (first, capacity), (second, _) = urls
    with (
        ServeProcess(tmp_path / "socket", "--drain=0", host_bytes=1 << 20) as serve,
        working(serve.path) as work,
    ):
        with RawClient(serve.path) as operator:
            with pytest.raises(ConfigError, match="cold: there is no cold tier"):
                operator.call(DetachCold(0.0))
            for url in (first, second, first):
                attach(operator, url, capacity)
                assert status(operator)["cold"]["url"] == url
                with pytest.raises(ConfigError, match="there is a cold tier"):
                    attach(operator, second, capacity)
                await_true(lambda: written(operator) > 20)
                work.goes_on()
                operator.call(DetachCold(0.0), Count)
                assert "cold" not in status(operator)
                assert "cold" not in operator.call(GetStats()).values
                work.goes_on()
            attach(operator, second, capacity)
            await_true(lambda: written(operator) > 20)
        serve.kill()
        serve.start(f"--cold={second}", *bytes_of(capacity))
        with RawClient(serve.path) as operator:
            # It is known what the tier has of the blocks that were there.
            assert dirty(operator) < status(operator)["spaces"][0]["resident"]
            work.goes_on()
            operator.call(DetachCold(0.0), Count)
            attach(operator, first, capacity)
            work.goes_on()


def attach(operator: RawClient, url: str, capacity: int) -> None:
    operator.call(AttachCold(url, capacity), Done)


def written(operator: RawClient) -> int:
    """Blocks that the present cold tier was given."""
    return int(operator.call(GetStats()).values["cold"]["puts"])


def test_a_detached_tier_was_given_what_it_lacked_and_an_attached_one_has_nothing(
    urls: list[tuple[str, int]], tmp_path: Path
) -> None:
    (first, capacity), (second, _) = urls
    with (
        ServeProcess(tmp_path / "socket", f"--cold={first}", *bytes_of(capacity), "--drain=0") as serve,
        RawClient(serve.path) as client,
    ):
        space = client.open()
        store(client, space, 0, 20)
        assert dirty(client) > 0
        assert client.call(DetachCold(20.0), Count).count == 0
        assert dirty(client) == 20
        asked = EvictWhere("", (), names(10, 10), 0.0, "host", 0, False)
        assert client.call(asked) == Evictions(10, 40960, 10)
        assert len(client.call(Load(space, names(0, 20), 5.0), Leased).slots) == 10
        attach(client, second, capacity)
        assert len(client.call(Load(space, names(10, 10), 5.0), Leased).slots) == 0
        assert client.call(Flush(20.0), Count).count == 0
        client.call(DetachCold(0.0), Count)
        attach(client, first, capacity)
        # What it was given is still there, of which the sidecar knows nothing until it asks.
        assert dirty(client) == 10
        loaded = client.call(Load(space, names(10, 10), 20.0), Leased)
        assert (len(loaded.slots), loaded.loaded) == (10, 10)


def test_a_sidecar_that_is_killed_without_a_tier_leaves_no_word_of_copies(
    urls: list[tuple[str, int]], tmp_path: Path
) -> None:
    (url, capacity), _ = urls
    with ServeProcess(tmp_path / "socket", "--drain=0") as serve:
        with RawClient(serve.path) as client:
            store(client, client.open(), 0, 20)
            attach(client, url, capacity)
            assert client.call(Flush(20.0), Count).count == 0
            client.call(DetachCold(0.0), Count)
        serve.kill()
        serve.start(f"--cold={url}", *bytes_of(capacity))
        with RawClient(serve.path) as client:
            assert status(client)["spaces"][0]["resident"] == 20
            assert dirty(client) == 20


@pytest.mark.parametrize(
    ("url", "capacity", "problem"),
    [
        ("disk:///proc/nowhere", 1 << 20, "cold.path: "),
        ("disk:///tmp", 0, "cold.capacity_bytes: is needed"),
        ("redis://127.0.0.1:1", 0, "cold.url: .*cannot be reached"),
        ("redis://127.0.0.1:1", 5, "cold.capacity_bytes: "),
        ("ftp://127.0.0.1", 0, "cold.url: "),
        ("redis://:hunter2@127.0.0.1:1/x", 0, "cold.url: "),
        ("a/folder", 1 << 20, "cold.url: must be a URL"),
        ("", 0, "cold.url: "),
        ("disk:///tmp", -1, "cold.capacity_bytes: "),
    ],
)
def test_a_tier_that_cannot_be_opened_changes_nothing(
    running: Running, operator: RawClient, url: str, capacity: int, problem: str
) -> None:
    before = {**status(operator), "clock": None}
    with pytest.raises(ConfigError, match=problem) as refused:
        operator.call(AttachCold(url, capacity))
    assert "hunter2" not in str(refused.value)
    assert {**status(operator), "clock": None} == before


def test_a_tier_that_never_keeps_blocks_of_a_space_is_refused_and_closed(
    running: Running, operator: RawClient, tmp_path: Path
) -> None:
    operator.open(KVLayout(1, 1, 64, 256))  # blocks of 64 KiB
    with pytest.raises(ConfigError, match="65536 bytes"):
        operator.call(AttachCold(f"disk://{tmp_path}/small", 8192))
    assert running.host.cold is None
    # The folder can be had by another.
    DiskColdTier(tmp_path / "small", capacity_bytes=8192).close()


def test_what_is_purged_while_there_is_no_tier_is_told_to_the_next(tmp_path: Path) -> None:
    cold = TroubledDisk(tmp_path / "cold")
    with HostStore(1 << 20, cold=cold, extent_bytes=1 << 16) as host:
        host.arena.wait_ready()
        space = host.space(LAYOUT)
        assert space.put(names(0, 4), np.ones((4, 4096), np.uint8)) == 4
        assert host.detach_cold(20.0) == 0
        assert host.cold is None
        report = space.purge(names(0, 2), deadline=1.0)
        assert (report.host_blocks, report.cold_left) == (2, ColdStatus.UNAVAILABLE)
        assert [part.part for part in host.status().degraded] == ["purges"]
        again = TroubledDisk(tmp_path / "cold")
        host.attach_cold(again)
        with space.load(names(0, 1), 5.0) as lease:
            assert len(lease) == 0
        await_true(lambda: host.status().degraded == ())
        assert again.contains(space.id, names(0, 4)).tolist() == [False, False, True, True]


def test_calls_under_way_end_before_a_tier_is_closed(tmp_path: Path) -> None:
    cold = TroubledDisk(tmp_path / "cold")
    with HostStore(1 << 20, cold=cold, extent_bytes=1 << 16, clean_ahead=0.0) as host:
        host.arena.wait_ready()
        space = host.space(LAYOUT)
        assert space.put(names(0, 8), np.ones((8, 4096), np.uint8)) == 8
        assert host.flush() == 0
        space.evict(8)
        cold.pause = 0.4
        load = space.start_load(names(0, 8))
        time.sleep(0.1)
        began = time.monotonic()
        host.detach_cold(0.0)
        assert 0.1 < time.monotonic() - began < 10
        assert load.wait(10.0)
        load.release()
        # It was read, and is said to have no copy any more.
        assert (load.loaded, space.resident, space.dirty) == (8, 8, 8)
        host.check_integrity()
        with pytest.raises(ClosedError):
            cold.get_note(b"x")


def test_a_redis_that_stalls_is_replaced_by_a_disk_while_clients_work_on(tmp_path: Path) -> None:
    with (
        RedisServer(tmp_path) as server,
        ServeProcess(tmp_path / "socket", f"--cold={server.url}", "--drain=0", host_bytes=1 << 20) as serve,
        working(serve.path) as work,
        RawClient(serve.path) as operator,
    ):
        await_true(lambda: written(operator) > 20)
        server.stall()
        await_true(lambda: status(operator)["cold"]["state"] in ("stalled", "down"))
        work.goes_on()
        began = time.monotonic()
        operator.call(DetachCold(0.0), Count)
        assert time.monotonic() - began < 20
        attach(operator, f"disk://{tmp_path}/cold", 64 << 20)
        await_true(lambda: written(operator) > 20)
        assert status(operator)["cold"]["state"] == "ready"
        work.goes_on()
        server.resume()


def test_a_policy_is_switched_under_a_client_that_works_on(
    running: Running, operator: RawClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_policy(monkeypatch, tmp_path / "site", "backwards", "kvpager.tests.backwards:Backwards")
    with working(running.path) as work:
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            for name in ("backwards", "lru"):
                operator.call(Configure({"policy": name}), Configured)
        running.host.check_integrity()
        work.goes_on()
