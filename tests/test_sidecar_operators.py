"""What operators see of a sidecar and have it do while it serves: real sidecars, and clients that work on."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvpager.api.client import connect
from kvpager.api.client_async import connect_async
from kvpager.api.messages import (
    Command,
    Commit,
    Count,
    Done,
    GetClients,
    Hint,
    Leased,
    Load,
    Match,
    Message,
    Pin,
    Put,
    Release,
    Reserve,
    Reserved,
    SpaceOpened,
)
from kvpager.api.operator_messages import (
    AttachCold,
    Configure,
    Configured,
    Demote,
    DetachCold,
    Disconnect,
    Drain,
    Evictions,
    EvictWhere,
    FindSpace,
    GetStatus,
    Status,
)
from kvpager.api.remote_access import RemoteAccess
from kvpager.kvstore import cold_link
from kvpager.kvstore.evicting import EvictReport
from kvpager.kvstore.host import HostStore
from kvpager.tests.backwards import Backwards
from kvpager.tests.installed_policy import install_policy
from kvpager.tests.raw_client import LAYOUT, RawClient, Running, await_true, counts, names, store
from kvpager.tests.serve_process import ServeProcess
from kvpager.tests.troubled_disk import TroubledDisk
from kvpager.tiers.cold import ColdStatus
from kvpager.tiers.errors import (
    AccessDeniedError,
    ColdTierUnavailableError,
    ConfigError,
    ServiceUnavailableError,
)

ALL, ANNA = "token of all....", "token of anna..."
OPERATORS_MESSAGES: list[Message] = [
    GetStatus(),
    GetClients(),
    Command("wake", "chat", (), 5.0),
    FindSpace(bytes(16)),
    EvictWhere("", (), (), 0.0, "", 0, True),
    Demote(0, (), 0.0),
    Disconnect(1),
    Configure({}),
    AttachCold("disk:///tmp", 1),
    DetachCold(0.0),
    Drain(False, 0.0),
]


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
            "costs": {},
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
            "policy": "cost",
            "clean_ahead": 0.25,
            "cold_deadline": 5.0,
            "quotas": {"anna": 1 << 20, "*": 2 << 20},
            "policy_weights": {},
            "retention_ttl": 600.0,
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


def test_the_status_says_which_parts_are_degraded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_link, "_RETRY_SECONDS", 0.1)
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
            other = degraded("cold")
            assert other is not None
            assert other["since"] == found["since"]
            assert other["reason"] != found["reason"]
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


def test_a_cold_tier_that_goes_is_noticed_though_nobody_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_link, "_QUIET_SECONDS", 0.1)
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


# Blocks


def test_a_space_is_found_by_its_id(running: Running, operator: RawClient) -> None:
    with RawClient(running.path, group=b"e" * 16) as engine:
        store(engine, engine.open(tenant="anna"), 0, 4)
    (known,) = running.host.spaces
    found = operator.call(FindSpace(known.id), SpaceOpened)
    assert (found.space, found.id, found.slots_per_extent) == (0, known.id, 16)
    assert operator.call(Pin(found.space, names(0, 4)), Count).count == 4
    assert operator.call(FindSpace(known.id)) == found
    assert operator.open(tenant="anna") == found.space
    for wrong in (bytes(16), b"short"):
        with pytest.raises(ConfigError, match="id: "):
            operator.call(FindSpace(wrong))


def evict(client: RawClient, **asked: Any) -> EvictReport:
    values = {
        "tenant": "",
        "spaces": (),
        "hashes": (),
        "older_than": 0.0,
        "tier": "",
        "most_bytes": 0,
        "dry_run": False,
    }
    done = client.call(EvictWhere(**{**values, **asked}), Evictions)
    return EvictReport(done.blocks, done.bytes, done.lost)


def test_what_a_dry_run_tells_is_what_goes(running: Running, operator: RawClient) -> None:
    with RawClient(running.path, group=b"e" * 16) as engine:
        spaces = {
            tenant: engine.open(shard=shard, tenant=tenant)
            for tenant, shard in (("anna", ""), ("ben", ""), ("carl", "tp1/2"))
        }
        for space in spaces.values():
            store(engine, space, 0, 10)
        engine.call(Match(spaces["ben"], names(0, 2), 0.0), Leased)
        engine.call(Pin(spaces["ben"], names(5, 1)))
        ben = running.host.space(LAYOUT, tenant="ben")
        for asked, blocks in (
            ({"tenant": "nobody"}, 0),
            ({"older_than": 3600.0}, 0),
            ({"tenant": "anna", "hashes": names(8, 4)}, 2),
            ({"tenant": "anna", "most_bytes": 3 * 4096 + 1}, 3),
            ({"spaces": (ben.id,)}, 7),
            ({"spaces": (ben.id,), "tenant": "anna"}, 0),
            ({"most_bytes": 4096}, 1),
            ({}, 14),
        ):
            before = {one.id: one.resident for one in running.host.spaces}
            told = evict(operator, **asked, dry_run=True)
            assert {one.id: one.resident for one in running.host.spaces} == before
            assert evict(operator, **asked) == told == EvictReport(blocks, blocks * 4096, blocks), asked
            running.host.check_integrity()
        # What was leased and pinned is left.
        assert [one.resident for one in running.host.spaces] == [0, 3, 0]
    with pytest.raises(ConfigError, match="spaces: there is no space"):
        evict(operator, spaces=(bytes(16),))
    with pytest.raises(ConfigError, match="tier: "):
        evict(operator, tier="tape")


def test_the_longest_unused_goes_first_and_the_end_of_a_prompt_before_its_beginning(
    running: Running, operator: RawClient
) -> None:
    space = running.host.space(LAYOUT)
    for first in (0, 10, 20):
        store(operator, operator.open(), first, 5)
    space.match(names(0, 5)).release()
    assert evict(operator, most_bytes=7 * 4096).blocks == 7
    assert [len(space.match(names(first, 5)).slots) for first in (0, 10, 20)] == [5, 0, 3]


def test_only_what_is_as_old_as_was_said_goes(running: Running, operator: RawClient) -> None:
    space = operator.open()
    store(operator, space, 0, 4)
    time.sleep(1.2)
    store(operator, space, 10, 4)
    assert evict(operator, older_than=0.6, dry_run=True).blocks == 4
    assert evict(operator, older_than=0.6).blocks == 4
    assert running.host.space(LAYOUT).match(names(0, 1)).slots.tolist() == []
    assert len(running.host.space(LAYOUT).match(names(10, 4)).slots) == 4


@pytest.fixture
def over_disk(tmp_path: Path) -> Iterator[tuple[Running, TroubledDisk]]:
    cold = TroubledDisk(tmp_path / "cold")
    with (
        HostStore(1 << 20, cold=cold, extent_bytes=1 << 16, clean_ahead=0.0) as host,
        Running(tmp_path / "socket", host) as made,
    ):
        yield made, cold


def test_the_cold_tier_lets_named_blocks_and_whole_spaces_go(
    over_disk: tuple[Running, TroubledDisk],
) -> None:
    running, cold = over_disk
    with RawClient(running.path) as client:
        space = running.host.space(LAYOUT)
        store(client, client.open(), 0, 10)
        assert running.host.flush() == 0
        space.evict(4)
        for asked in ({"older_than": 1.0}, {"most_bytes": 1}, {"dry_run": True}):
            with pytest.raises(ConfigError):
                evict(client, tier="cold", **asked)
        named = {"tier": "cold", "hashes": names(4, 4)}
        told = evict(client, **named, dry_run=True)
        assert np.count_nonzero(cold.contains(space.id, names(0, 10))) == 10
        # Of the four, two are in host memory yet.
        assert evict(client, **named) == told == EvictReport(4, 4 * 4096, 2)
        assert cold.contains(space.id, names(0, 10)).tolist() == [True] * 4 + [False] * 4 + [True] * 2
        assert space.dirty == 2
        assert evict(client, tier="cold") == EvictReport(6, 6 * 4096, 2)
        assert space.dirty == 6
        cold.fault = ColdStatus.UNAVAILABLE
        with pytest.raises(ColdTierUnavailableError):
            evict(client, tier="cold")
    with HostStore(1 << 20) as host, pytest.raises(ColdTierUnavailableError, match="there is no cold tier"):
        host.evict_where(tier="cold")


def test_demoted_blocks_are_in_the_cold_tier_alone(over_disk: tuple[Running, TroubledDisk]) -> None:
    running, cold = over_disk
    with RawClient(running.path) as client:
        known, space = running.host.space(LAYOUT), client.open()
        store(client, space, 0, 10)
        leased = client.call(Match(space, names(0, 1), 0.0), Leased)
        client.call(Pin(space, names(1, 1)))
        assert client.call(Demote(space, (*names(0, 6), *names(50, 3), *names(5, 1)), 20.0), Count).count == 4
        assert known.resident == 6
        assert cold.contains(known.id, names(0, 10)).tolist() == [False] * 2 + [True] * 4 + [False] * 4
        loaded = client.call(Load(space, names(0, 6), 20.0), Leased)
        assert (len(loaded.slots), loaded.loaded) == (6, 4)
        assert len(leased.slots) == 1
        running.host.check_integrity()
        # What the tier does not take stays.
        cold.fault = ColdStatus.FULL
        assert client.call(Demote(space, names(6, 4), 0.3), Count).count == 0
        assert known.match(names(6, 4)).slots.size == 4


def test_there_must_be_a_cold_tier_to_demote_to(running: Running, operator: RawClient) -> None:
    space = operator.open()
    store(operator, space, 0, 1)
    with pytest.raises(ColdTierUnavailableError, match="no cold tier"):
        operator.call(Demote(space, names(0, 1), 5.0))
    assert running.host.space(LAYOUT).resident == 1


# Clients that are sent away


def test_a_client_that_is_disconnected_keeps_its_leases_while_its_process_lives(tmp_path: Path) -> None:
    with (
        ServeProcess(tmp_path / "socket") as serve,
        RawClient(serve.path, group=b"o" * 16) as operator,
        process_with_leases(serve.path) as engine,
    ):

        def held() -> int:
            return counts(operator)["leased"]

        await_true(lambda: held() == 3)
        (client,) = [
            one for one in operator.call(GetClients()).values.values() if one["name"].startswith("holder")
        ]
        operator.call(Disconnect(client["id"]), Done)
        assert engine.stdout is not None
        assert engine.stdout.readline() == "disconnected\n"
        assert counts(operator)["clients"] == 1
        assert held() == 3
        assert evict(operator).blocks == 1
        engine.kill()
        engine.wait()
        await_true(lambda: held() == 0)
        assert evict(operator).blocks == 3
        for wrong in (client["id"], 10_000, -1):
            with pytest.raises(ConfigError, match="client: "):
                operator.call(Disconnect(wrong))


def test_who_disconnects_himself_is_told_so(running: Running, operator: RawClient) -> None:
    (mine,) = operator.call(GetClients()).values.values()
    assert operator.call(Disconnect(mine["id"])) == Done()
    with pytest.raises((EOFError, ConnectionResetError)):
        operator.receive()


_HOLDER = """
import sys, time
from kvpager.tests.raw_client import RawClient, names, store
from kvpager.api.messages import Match
from kvpager.api.wire import Request, encode
from kvpager.tests.raw_client import hello
import dataclasses
client = RawClient(sys.argv[1], greet=False)
client.greet(dataclasses.replace(hello(), name="holder"))
space = client.open()
store(client, space, 0, 4)
client.call(Match(space, names(0, 3), 0.0))
try:
    client.receive()
except (EOFError, ConnectionResetError):
    print("disconnected", flush=True)
time.sleep(600)
"""


@contextmanager
def process_with_leases(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that leases three of its four blocks and then waits."""
    command = [sys.executable, "-c", _HOLDER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_asyncio_client_has_blocks_go(over_disk: tuple[Running, TroubledDisk]) -> None:
    running, _ = over_disk

    async def work() -> None:
        async with (
            await connect_async(str(running.path), name="engine") as engine,
            await connect_async(str(running.path)) as operator,
        ):
            space = await engine.space(LAYOUT, tenant="anna")
            assert await space.put(names(0, 6), np.zeros((6, 4096), np.uint8), wait=20.0) == 6
            found = await operator.find_space(space.id)
            assert (found.layout, found.tenant) == (LAYOUT, "anna")
            assert await found.demote(names(4, 2)) == 2
            assert await operator.evict_where(tenant="anna", most_bytes=4096) == EvictReport(1, 4096, 1)
            assert await operator.evict_where(spaces=[space.id], dry_run=True) == EvictReport(3, 12288, 3)
            # Who names none means none, and not all.
            assert await operator.evict_where(hashes=[]) == EvictReport(0, 0, 0)
            assert await operator.evict_where(spaces=[]) == EvictReport(0, 0, 0)
            with pytest.raises(ConfigError, match="space_id: "):
                await operator.find_space(bytes(16))
            (one,) = [one for one in (await operator.clients()).values() if "engine" in one["name"]]
            await operator.disconnect(one["id"])
            while one["id"] in [other["id"] for other in (await operator.clients()).values()]:
                await asyncio.sleep(0.01)
            # The client library comes back by itself.
            await engine.wait_ready(20.0)
            assert len(await space.match(names(0, 3))) == 3

    asyncio.run(asyncio.wait_for(work(), 60))


# Settings


def test_what_was_set_is_told_and_the_rest_left(running: Running, operator: RawClient) -> None:
    before = status(operator)["config"]
    changed = operator.call(
        Configure({"clean_ahead": 0.5, "cold_deadline": 5, "quotas": {"ben": 1 << 20}}), Configured
    ).changed
    assert changed == {"clean_ahead": (0.25, 0.5), "quotas": ({"anna": 1 << 16}, {"ben": 1 << 20})}
    after = status(operator)["config"]
    assert after == {**before, "clean_ahead": 0.5, "quotas": {"ben": 1 << 20}}
    assert operator.call(Configure({}), Configured).changed == {}
    assert operator.call(Configure(after), Configured).changed == {}


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"policy": "fifo"}, "policy: must be one of"),
        ({"clean_ahead": 1.5}, "clean_ahead: "),
        ({"clean_ahead": None}, "clean_ahead: has no value"),
        ({"cold_deadline": 0}, "cold_deadline: "),
        ({"quotas": {"ben": 0}}, "quotas: "),
        ({"quotas": 7}, "quotas: "),
        ({"log_level": "loud"}, "log_level: must be one of"),
        ({"clean_ahed": 0.5}, "clean_ahed: .* did you mean clean_ahead"),
        ({"x": 1}, "x: .* these are: policy, "),
    ],
)
def test_one_bad_value_changes_nothing(
    running: Running, operator: RawClient, wrong: dict[str, Any], problem: str
) -> None:
    before = status(operator)["config"]
    good = {"clean_ahead": 0.75, "cold_deadline": 2.0, "quotas": {"carl": 4096}, "log_level": "error"}
    with pytest.raises(ConfigError, match=problem):
        operator.call(Configure({**good, **wrong}))
    assert status(operator)["config"] == before


def test_a_lowered_quota_is_kept_when_its_tenant_writes(running: Running, operator: RawClient) -> None:
    space = operator.open(tenant="ben")
    store(operator, space, 0, 10)
    operator.call(Configure({"quotas": {"ben": 4 * 4096}}), Configured)
    (part,) = status(operator)["degraded"]
    assert part["part"] == "quotas"
    assert part["reason"].startswith("tenant 'ben' has 24.0 KiB more than its quota of 16.0 KiB")
    store(operator, space, 20, 1)
    assert running.host.space(LAYOUT, tenant="ben").resident == 4
    assert status(operator)["degraded"] == ()
    operator.call(Configure({"quotas": {}}), Configured)
    store(operator, space, 30, 10)
    assert running.host.space(LAYOUT, tenant="ben").resident == 14


def test_the_log_level_is_that_of_the_package(tmp_path: Path) -> None:
    with ServeProcess(tmp_path / "socket") as serve, RawClient(serve.path) as operator:
        changed = operator.call(Configure({"log_level": "debug"}), Configured).changed
        assert changed == {"log_level": ("warning", "debug")}
        assert status(operator)["config"]["log_level"] == "debug"


def test_another_policy_goes_on_with_the_order_of_the_one_before(
    running: Running, operator: RawClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_policy(monkeypatch, tmp_path / "site", "backwards", "kvpager.tests.backwards:Backwards")
    host, spaces = running.host, [operator.open(shard=shard) for shard in ("tp0/2", "tp1/2")]
    rng = np.random.default_rng(5)
    for number, space in enumerate(spaces):
        store(operator, space, 0, 40)
        known = host.space(LAYOUT, shard=f"tp{number}/2")
        for first in rng.integers(0, 40, 30).tolist():
            known.match(names(first, 1)).release()
        known.hint(names(7, 2), wanted=False)
    held = operator.call(Match(spaces[0], names(20, 3), 0.0), Leased)

    def order() -> list[list[int]]:
        found = []
        for one in host.spaces:
            policy = one._records._policy
            found.append(policy.coldest(len(policy)).tolist())
        return found

    before = order()
    assert [len(one) for one in before] == [37, 40]
    for name in ("backwards", "lru", "backwards"):
        operator.call(Configure({"policy": name}), Configured)
        assert order() == before
        host.check_integrity()
    assert status(operator)["config"]["policy"] == "backwards"
    # The new one ranks from here on.
    operator.call(Release(spaces[0], held.slots, held.generations), Done)
    assert order()[0] == [*held.slots[::-1].tolist(), *before[0]]
    assert host.spaces[0].evict(3) == 3
    assert order() == before
    third = operator.open(shard="of its own")
    store(operator, third, 0, 2)
    assert isinstance(host.spaces[2]._records._policy, Backwards)
    operator.call(Configure({"policy": "lru"}), Configured)
    host.check_integrity()


def test_weights_are_those_of_the_policy_and_go_with_it(running: Running, operator: RawClient) -> None:
    space = operator.open()
    store(operator, space, 0, 40)
    known = running.host.space(LAYOUT)

    def order() -> list[int]:
        policy = known._records._policy
        ranked: list[int] = policy.coldest(len(policy)).tolist()
        return ranked

    before = order()
    weights = {"small_share": 0.2}
    with pytest.raises(ConfigError, match="policy_weights: 'cost' has no weight"):
        operator.call(Configure({"policy_weights": weights}))
    changed = operator.call(
        Configure({"policy": "s3fifo", "policy_weights": weights, "retention_ttl": 60}), Configured
    ).changed
    assert changed == {
        "policy": ("cost", "s3fifo"),
        "policy_weights": ({}, weights),
        "retention_ttl": (600.0, 60.0),
    }
    assert order() == before
    running.host.check_integrity()
    assert operator.call(Configure({"policy_weights": {"small_share": 0.3}}), Configured).changed == {
        "policy_weights": (weights, {"small_share": 0.3})
    }
    assert order() == before
    assert operator.call(Configure({"policy": "lru"}), Configured).changed == {
        "policy": ("s3fifo", "lru"),
        "policy_weights": ({"small_share": 0.3}, {}),
    }
    assert order() == before


# Draining


def test_a_drained_sidecar_takes_nothing_new_until_it_is_told_to(
    over_disk: tuple[Running, TroubledDisk],
) -> None:
    running, cold = over_disk
    with RawClient(running.path, group=b"e" * 16) as engine, RawClient(running.path) as operator:
        space = engine.open()
        store(engine, space, 0, 5)
        granted = engine.call(Reserve(space, names(10, 1), 0.0), Reserved)
        assert operator.call(Drain(True, 20.0), Count).count == 0
        assert np.count_nonzero(cold.contains(running.host.space(LAYOUT).id, names(0, 5))) == 5
        values = status(operator)
        assert values["draining"]
        (part,) = values["degraded"]
        assert part["part"] == "draining"
        for refused in (
            Reserve(space, names(20, 1), 0.0),
            Load(space, names(0, 1), 0.0),
            Put(space, names(20, 1), bytes(4096), 0.0),
            Hint(space, names(20, 1), True),
        ):
            with pytest.raises(ServiceUnavailableError, match="drained"):
                engine.call(refused)
        # What is there is found, and what was reserved can be committed.
        assert len(engine.call(Match(space, names(0, 5), 0.0), Leased).slots) == 5
        engine.call(Commit(space, granted.slots, granted.generations), Done)
        cold.fault = ColdStatus.UNAVAILABLE
        assert operator.call(Drain(True, 0.2), Count).count == 1
        assert part in status(operator)["degraded"]
        cold.fault = None
        assert operator.call(Drain(False, 20.0), Count).count <= 1
        assert not status(operator)["draining"]
        store(engine, space, 20, 1)


def test_the_asyncio_client_sets_drains_and_switches(running: Running, tmp_path: Path) -> None:
    async def work() -> None:
        async with await connect_async(str(running.path)) as operator:
            assert await operator.configure(clean_ahead=1.0) == {"clean_ahead": (0.25, 1.0)}
            with pytest.raises(ConfigError, match="did you mean policy"):
                await operator.configure(polcy="lru")
            await operator.attach_cold(f"disk://{tmp_path}/cold", capacity_bytes=1 << 20)
            space = await operator.space(LAYOUT)
            assert await space.put(names(0, 4), np.ones((4, 4096), np.uint8), wait=20.0) == 4
            assert await operator.drain(deadline=20.0) == 0
            assert (await operator.status())["draining"]
            assert await operator.drain(False) == 0
            assert await operator.detach_cold(20.0) == 0
            with pytest.raises(ConfigError):
                await operator.detach_cold()
            with pytest.raises(ConfigError):
                await operator.attach_cold("nothing://", capacity_bytes=1)

    asyncio.run(asyncio.wait_for(work(), 60))
