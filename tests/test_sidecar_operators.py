"""What operators see of a sidecar and have it do while it serves: real sidecars, and clients that work on."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvpager.api.client import connect
from kvpager.api.client_async import connect_async
from kvpager.api.messages import GetClients, Leased, Match, Message, Pin, Reserve
from kvpager.api.operator_messages import GetStatus, Status
from kvpager.api.remote_access import RemoteAccess
from kvpager.kvstore.host import HostStore
from kvpager.tests.raw_client import LAYOUT, RawClient, Running, names, store
from kvpager.tests.serve_process import ServeProcess
from kvpager.tests.troubled_disk import TroubledDisk
from kvpager.tiers.cold import ColdStatus
from kvpager.tiers.errors import AccessDeniedError

ALL, ANNA = "token of all....", "token of anna..."
OPERATORS_MESSAGES: list[Message] = [GetStatus(), GetClients()]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    remote = RemoteAccess("127.0.0.1", 0, {ALL: None, ANNA: frozenset({"anna"})})
    with (
        HostStore(1 << 20, extent_bytes=1 << 16, quotas={"anna": 1 << 16}) as host,
        Running(tmp_path / "socket", host, remote=remote) as made,
    ):
        yield made


@pytest.fixture
def operator(running: Running) -> Iterator[RawClient]:
    with RawClient(running.path, group=b"o" * 16) as made:
        yield made


def status(client: RawClient) -> dict[str, Any]:
    values: dict[str, Any] = client.call(GetStatus(), Status).values
    return values


@pytest.mark.parametrize("message", OPERATORS_MESSAGES, ids=lambda one: type(one).__name__)
def test_a_token_of_tenants_is_refused(running: Running, message: Message) -> None:
    with RawClient(running.port, token=ANNA) as bound, pytest.raises(AccessDeniedError, match="operators"):
        bound.call(message)


# How it is


def test_the_status_says_what_every_slot_is(running: Running, operator: RawClient) -> None:
    with RawClient(running.path) as engine:
        space = engine.open(shard="tp0/2", tenant="anna")
        store(engine, space, 0, 8)
        engine.call(Match(space, names(0, 3), 0.0), Leased)
        engine.call(Pin(space, names(2, 3)))
        engine.call(Reserve(space, names(100, 2), 0.0))
        (one,) = status(operator)["spaces"]
        known = running.host.space(LAYOUT, shard="tp0/2", tenant="anna")
        assert one == {
            "id": known.id.hex(),
            "num_layers": 1,
            "num_kv_heads": 1,
            "head_dim": 64,
            "block_size": 16,
            "dtype": "float16",
            "format": "swizzled",
            "planes": 2,
            "window": 0,
            "scale_bytes": 0,
            "shard": "tp0/2",
            "tenant": "anna",
            "block_bytes": 4096,
            "slots_per_extent": 16,
            "extents": 1,
            "capacity": 256,
            "resident": 8,
            "reserved": 2,
            "leased": 3,
            "evictable": 3,
            "free": 6,
            "dirty": 8,
            "cleaning": 0,
            "pinned": 3,
        }


def test_the_status_says_which_sidecar_it_is_and_what_is_set(tmp_path: Path) -> None:
    before = time.time()
    with ServeProcess(tmp_path / "socket", "--quota=anna=1M", "--quota=*=2M") as serve:
        with RawClient(serve.path) as operator:
            values = status(operator)
            assert values["boot_id"] == operator.welcome.boot_id.hex()
        assert values["pid"] == serve.running.pid
        assert before - 1 < values["started"] < time.time()
        assert (values["draining"], values["degraded"], values["spaces"]) == (False, (), ())
        assert "cold" not in values
        assert values["records"] == f"{serve.arena}.records"
        assert Path(values["records"]).exists()
        assert values["config"] == {
            "policy": "lru",
            "clean_ahead": 0.25,
            "cold_deadline": 5.0,
            "quotas": {"anna": 1 << 20, "*": 2 << 20},
            "log_level": "warning",
        }
        assert values["clock"]["now"] == 0


def test_the_clock_tells_how_long_ago_a_tick_was(running: Running, operator: RawClient) -> None:
    with RawClient(running.path) as engine:
        space = engine.open()
        for at in range(5):
            store(engine, space, at, 1)
        clock = status(operator)["clock"]
        assert clock["now"] == running.host._shared.clock.now == 5
        ticks, ages = zip(*clock["samples"], strict=True)
        assert ticks[0] == 5
        assert list(ticks) == sorted(ticks, reverse=True)
        assert list(ages) == sorted(ages)
        assert 0 <= ages[0] < 20


def test_the_status_says_which_parts_are_degraded(tmp_path: Path) -> None:
    cold = TroubledDisk(tmp_path / "cold")
    with (
        HostStore(1 << 20, cold=cold, extent_bytes=1 << 16, clean_ahead=1.0) as host,
        Running(tmp_path / "socket", host) as running,
        RawClient(running.path) as client,
    ):
        space = client.open()

        def degraded(part: str) -> dict[str, Any] | None:
            return next((one for one in status(client)["degraded"] if one["part"] == part), None)

        def wait_for(state: str) -> None:
            until = time.monotonic() + 20
            while (now := status(client)["cold"]["state"]) != state:
                assert time.monotonic() < until, now
                time.sleep(0.02)

        assert status(client)["cold"] == {"kind": "disk", "url": "", "state": "ready"}
        assert degraded("cold") is None
        cold.fault = ColdStatus.UNAVAILABLE
        store(client, space, 0, 2)
        wait_for("down")
        found = degraded("cold")
        assert found is not None
        assert "cannot be reached" in found["reason"]
        assert time.time() - 20 < found["since"] <= time.time()
        for fault, state in ((ColdStatus.LATE, "stalled"), (ColdStatus.FULL, "full")):
            cold.fault = fault
            wait_for(state)
            assert degraded("cold") is not None
        host.space(LAYOUT).purge(names(0, 1), deadline=1.0)
        cold.fault = None
        wait_for("ready")
        assert degraded("cold") is None


def test_a_purge_that_the_cold_tier_was_not_told_of_is_degraded_until_it_is(tmp_path: Path) -> None:
    cold = TroubledDisk(tmp_path / "cold")
    with (
        HostStore(1 << 20, cold=cold, extent_bytes=1 << 16) as host,
        Running(tmp_path / "socket", host) as running,
        RawClient(running.path) as client,
    ):
        store(client, client.open(), 0, 2)
        host.flush()
        cold.fault = ColdStatus.UNAVAILABLE
        host.space(LAYOUT).purge(names(0, 1), deadline=1.0)
        parts = [one["part"] for one in status(client)["degraded"]]
        assert "purges" in parts
        cold.fault = None
        until = time.monotonic() + 20
        while "purges" in [one["part"] for one in status(client)["degraded"]]:
            assert time.monotonic() < until
            time.sleep(0.05)


def test_a_cold_tier_that_goes_is_noticed_though_nobody_needs_it(tmp_path: Path) -> None:
    cold = TroubledDisk(tmp_path / "cold")
    with HostStore(1 << 20, cold=cold, extent_bytes=1 << 16) as host:
        cold.fault = ColdStatus.UNAVAILABLE
        until = time.monotonic() + 20
        while (found := host.status().cold) is None or found.condition != "down":
            assert time.monotonic() < until
            time.sleep(0.05)
        cold.fault = None
        while (found := host.status().cold) is None or found.condition != "ready":
            assert time.monotonic() < until
            time.sleep(0.05)


def test_no_password_is_told(tmp_path: Path) -> None:
    url = "redis://reader:hunter2@127.0.0.1:1/3?ssl_password=hunter3&client_name=kv"
    url = url.replace("ssl_password=hunter3&", "")
    with (
        ServeProcess(tmp_path / "socket", f"--cold={url}", "--drain=0") as serve,
        RawClient(serve.path) as operator,
    ):
        values = status(operator)
        assert values["cold"]["url"] == "redis://reader@127.0.0.1:1/3?client_name=kv"
        assert "hunter" not in repr(values)


def test_clients_have_ids_that_stay_and_never_come_again(running: Running, operator: RawClient) -> None:
    def ids() -> dict[str, int]:
        listed = operator.call(GetClients()).values
        assert all(str(one["id"]) == key for key, one in listed.items())
        return {one["group"]: one["id"] for one in listed.values()}

    with RawClient(running.path, group=b"a" * 16):
        first = ids()
        with RawClient(running.path, group=b"b" * 16):
            second = ids()
            assert second.items() > first.items()
    with RawClient(running.path, group=b"a" * 16):
        again = ids()
        assert again[(b"a" * 16).hex()] > max(second.values())
        assert again[(b"o" * 16).hex()] == first[(b"o" * 16).hex()]


def test_both_clients_ask_for_the_status(running: Running) -> None:
    async def asked() -> dict[str, Any]:
        async with await connect_async(str(running.path)) as operator:
            return await operator.status()

    with connect(str(running.path)) as operator:
        assert operator.status()["pid"] == asyncio.run(asked())["pid"] == os.getpid()
