"""Pins that end by themselves, and advice about what will be wanted and what will not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kvpager.api.client import connect
from kvpager.api.client_async import connect_async
from kvpager.api.messages import Count, Hint, Pin, Unpin
from kvpager.kvstore import space as space_module
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.policy import Retention
from kvpager.kvstore.space import HostSpace
from kvpager.kvstore.timed_pins import PinClock
from kvpager.tests.raw_client import LAYOUT, RawClient, Running, await_true, names, store
from kvpager.tests.serve_process import ServeProcess
from kvpager.tests.troubled_disk import TroubledDisk
from kvpager.tiers.errors import ConfigError

SIZE = LAYOUT.block_bytes
EXTENT = 4 * SIZE
LONG = 1000.0


@pytest.fixture
def host(tmp_path: Path) -> Iterator[HostStore]:
    """Room for 8 blocks."""
    cold = TroubledDisk(tmp_path / "cold")
    with HostStore(2 * EXTENT, extent_bytes=EXTENT, cold=cold, clean_ahead=0.0) as made:
        assert made.arena.wait_ready(2, timeout=30.0)
        yield made
        made.check_integrity()


@pytest.fixture
def space(host: HostStore) -> HostSpace:
    return host.space(LAYOUT)


def fill(space: HostSpace, first: int, count: int) -> None:
    assert space.put(names(first, count), np.zeros((count, SIZE), np.uint8)) == count


def resident(space: HostSpace, *numbers: int) -> list[int]:
    """Which of these are there."""
    found = []
    for number in numbers:
        with space.lease_resident(names(number, 1)) as lease:
            found += [number] * len(lease)
    return found


# Pins


def test_a_pin_ends_by_itself_and_not_before(space: HostSpace) -> None:
    fill(space, 0, 4)
    assert space.pin(names(0, 2), ttl=LONG) == 2
    assert space.pin(names(2, 2), ttl=0.05) == 2
    await_true(lambda: space.evict(4) > 0)
    await_true(lambda: resident(space, 2, 3) == [] or space.evict(4) > 0)
    assert space.evict(4) == 0
    assert resident(space, 0, 1, 2, 3) == [0, 1]
    assert space.unpin(names(0, 4)) == 2
    assert space.evict(4) == 2


def test_each_of_several_pins_ends_for_itself(space: HostSpace, host: HostStore) -> None:
    fill(space, 0, 1)
    one = names(0, 1)
    assert space.pin(one) == space.pin(one, ttl=LONG) == space.pin(one, ttl=0.05) == 1
    # One that does not end goes before those that do, and of these the first to end.
    assert space.unpin(one) == 1
    assert space.unpin(one) == 1
    host.check_integrity()
    assert space.evict(1) == 0
    assert space.unpin(one) == 1
    assert space.unpin(one) == 0
    assert space.evict(1) == 1
    # The ended one's time comes, and takes nothing from who pinned since.
    fill(space, 0, 1)
    assert space.pin(one, ttl=LONG) == 1
    fired = threading.Event()
    fill(space, 1, 1)
    space.pin(names(1, 1), ttl=0.1)
    threading.Timer(0.2, fired.set).start()
    assert fired.wait(30)
    await_true(lambda: resident(space, 1) == [] or space.evict(1) == 1)
    assert resident(space, 0) == [0]


def test_a_lease_is_not_ended_by_the_end_of_a_pin(space: HostSpace) -> None:
    fill(space, 0, 2)
    with space.match(names(0, 1)) as lease:
        assert space.pin(names(0, 2), ttl=0.05) == 2
        await_true(lambda: space.evict(2) == 1)
        assert resident(space, 0) == [0]
        assert len(lease) == 1
    assert space.evict(2) == 1


def test_a_purge_ends_pins_with_a_time(space: HostSpace, host: HostStore) -> None:
    fill(space, 0, 2)
    assert space.pin(names(0, 2), ttl=0.05) == 2
    assert space.purge(names(0, 2)).host_blocks == 2
    fill(space, 0, 2)
    assert space.pin(names(0, 1), ttl=LONG) == 1
    fill(space, 5, 1)
    space.pin(names(5, 1), ttl=0.1)
    await_true(lambda: resident(space, 5) == [] or space.evict(1) > 0)
    assert resident(space, 0) == [0]
    host.check_integrity()


@pytest.mark.parametrize("ttl", [0, -1.0, float("nan"), "1"])
def test_the_time_of_a_pin_is_a_number_of_seconds(space: HostSpace, ttl: object) -> None:
    with pytest.raises(ConfigError, match="ttl: "):
        space.pin(names(0, 1), ttl=ttl)  # type: ignore[arg-type]


def test_the_clock_calls_in_order_and_not_after_its_end(caplog: pytest.LogCaptureFixture) -> None:
    clock = PinClock()
    called: list[int] = []
    done = threading.Event()

    def fail() -> None:
        raise ValueError("broken")

    for at, work in (
        (3.0, done.set),
        (2.0, lambda: called.append(2)),
        (1.5, fail),
        (1.0, lambda: called.append(1)),
    ):
        clock.call_at(at, work)
    assert done.wait(30)
    assert called == [1, 2]
    assert "a pin could not be ended" in caplog.text
    clock.close()
    clock.close()
    clock.call_at(0.0, lambda: called.append(3))
    assert called == [1, 2]


# Hints


def test_what_is_not_wanted_again_goes_first(space: HostSpace, host: HostStore) -> None:
    fill(space, 0, 8)
    with space.match(names(7, 1)):
        assert space.hint([*names(2, 2), *names(7, 1), *names(90, 1)], wanted=False) == 2
        host.check_integrity()
        assert space.evict(1) == 1
        assert resident(space, 3) == []
        assert space.evict(1) == 1
        assert resident(space, *range(8)) == [0, 1, 4, 5, 6, 7]
    assert host.stats.hinted_unwanted == 2


def test_what_will_be_wanted_comes_up_ahead_and_is_held_by_nobody(space: HostSpace, host: HostStore) -> None:
    fill(space, 0, 6)
    assert host.flush() == 0
    space.evict(5)
    assert space.hint(names(0, 6), wanted=True) == 6
    await_true(lambda: resident(space, *range(6)) == list(range(6)))
    await_true(lambda: space.evict(8) == 6 or space.resident == 0)
    assert host.stats.hinted_wanted == 6


def test_what_is_resident_counts_as_just_used(space: HostSpace) -> None:
    fill(space, 0, 2)
    fill(space, 2, 2)
    assert space.hint(names(0, 2), wanted=True) == 2
    await_true(lambda: space._shared.hints_under_way == 0)
    space.evict(2)
    assert resident(space, 0, 1, 2, 3) == [0, 1]


def test_hints_beyond_the_bound_load_nothing(
    space: HostSpace, host: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(space, 0, 2)
    assert host.flush() == 0
    space.evict(2)
    monkeypatch.setattr(space_module, "_MOST_HINTS", 0)
    assert space.hint(names(0, 2), wanted=True) == 0
    assert resident(space, 0, 1) == []


# Through a sidecar


def test_pins_and_hints_go_through_a_sidecar(host: HostStore, tmp_path: Path) -> None:
    with Running(tmp_path / "socket", host) as running, RawClient(running.path) as client:
        number = client.open()
        store(client, number, 0, 4)
        assert client.call(Pin(number, names(0, 2), LONG), Count).count == 2
        assert client.call(Unpin(number, names(0, 1)), Count).count == 1
        assert client.call(Hint(number, names(3, 1), False), Count).count == 1
        with connect(str(running.path)) as connection:
            space = connection.space(LAYOUT)
            assert space.pin(names(2, 1), ttl=LONG) == 1
            assert space.hint(names(0, 4), wanted=True) == 4
            with pytest.raises(ConfigError, match="ttl: "):
                space.pin(names(0, 1), ttl=0.0)

        async def ask() -> tuple[int, int]:
            async with await connect_async(str(running.path)) as connection:
                space = await connection.space(LAYOUT)
                return await space.pin(names(3, 1), ttl=LONG), await space.hint(names(0, 2), wanted=False)

        assert asyncio.run(ask()) == (1, 1)
        with pytest.raises(ConfigError, match="ttl: "):
            client.call(Pin(number, names(0, 1), -1.0))


def test_advice_on_keeping_blocks_goes_through_a_sidecar(tmp_path: Path) -> None:
    hashes = [bytes([at]) * 16 for at in range(40)]
    with HostStore(8 * SIZE, extent_bytes=EXTENT, policy="s3fifo") as host:
        assert host.arena.wait_ready(2, timeout=30.0)
        with Running(tmp_path / "socket", host) as running, RawClient(running.path) as client:
            number = client.open()
            with connect(str(running.path)) as connection:
                space = connection.space(LAYOUT)
                assert space.put(hashes[:6], np.zeros((6, SIZE), np.uint8)) == 6
                assert space.hint(hashes[:1], wanted=True, retention=Retention(will_return=60.0)) == 1
                with pytest.raises(ConfigError, match="retention: "):
                    space.hint(hashes[:1], wanted=True, retention={"priority": 1})  # type: ignore[arg-type]

                async def ask() -> int:
                    async with await connect_async(str(running.path)) as another:
                        advice = Retention(priority=5, ttl=60.0)
                        opened = await another.space(LAYOUT)
                        return await opened.hint(hashes[1:2], wanted=True, retention=advice)

                assert asyncio.run(ask()) == 1
                # What a later client says beside is passed over; one that says nothing may be an earlier one.
                later = {"about_to_finish": True, "colour": "green"}
                assert client.call(Hint(number, tuple(hashes[2:3]), True, later), Count).count == 1
                assert client.call(Hint(number, tuple(hashes[3:4]), True), Count).count == 1
                with pytest.raises(ConfigError, match="priority: "):
                    client.call(Hint(number, tuple(hashes[3:4]), True, {"priority": "high"}))
                for at in range(10, 40):
                    assert space.put(hashes[at : at + 1], np.zeros((1, SIZE), np.uint8)) == 1
        known = host.space(LAYOUT)
        there = [at for at in range(6) if len(known.lease_resident(hashes[at : at + 1]))]
        assert there == [0, 1, 2]
        host.check_integrity()


def test_a_pin_with_a_time_ends_with_its_sidecar_and_one_without_does_not(tmp_path: Path) -> None:
    with ServeProcess(tmp_path / "socket") as serve:
        with connect(str(serve.path)) as connection:
            space = connection.space(LAYOUT)
            with space.reserve(names(0, 2), wait=20.0) as reservation:
                assert len(reservation.new) == 2
                reservation.commit()
            assert space.pin(names(0, 1), ttl=LONG) == space.pin(names(1, 1)) == 1
            assert space.evict(2) == 0
        serve.kill()
        serve.start()
        with connect(str(serve.path)) as connection:
            assert connection.space(LAYOUT).evict(2) == 1
