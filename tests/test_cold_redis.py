"""The cold tier in Redis beside servers that stall, die, fill up, move, alter values and lie."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import redis
from kvpager.tests.redis_servers import RedisServer, free_port, make_tls_files, require_redis, three_masters
from kvpager.tiers.cold import ColdPurge, ColdStatus
from kvpager.tiers.cold_redis import RedisColdTier
from kvpager.tiers.errors import ColdTierUnavailableError, ConfigError
from kvpager.tiers.record import HEADER_BYTES, RecordCodec
from redis.crc import key_slot

OK, MISS, CORRUPT, LATE, UNAVAILABLE, FULL = ColdStatus
Blocks = npt.NDArray[np.uint8]
SPACE = b"space 0123456789"
NOISE = 0.3
"""Seconds that a busy machine may add to a deadline."""


def hashes_of(name: str, count: int) -> list[bytes]:
    return [f"{name:>10}{index:06d}".encode() for index in range(count)]


def blocks_of(count: int, size: int, seed: int = 0) -> Blocks:
    return np.random.default_rng(seed).integers(0, 256, (count, size), np.uint8)


def views(blocks: Blocks) -> list[memoryview]:
    return [memoryview(block) for block in blocks]


def key_of(prefix_hash: bytes, part: int = 0) -> bytes:
    return RecordCodec().key(SPACE, prefix_hash) + b":%d" % part


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as started:
        yield started


@pytest.fixture
def tier(server: RedisServer) -> Iterator[RedisColdTier]:
    opened = RedisColdTier(server.url, deadline=5.0, connect_timeout=0.5)
    yield opened
    opened.check_integrity()
    opened.close()


def test_a_stalled_server_costs_the_deadline_once_and_then_microseconds(
    server: RedisServer, tier: RedisColdTier
) -> None:
    blocks, hashes = blocks_of(8, 1 << 20), hashes_of("stall", 8)
    assert not tier.put(SPACE, hashes, views(blocks)).any()
    server.stall()
    into = np.zeros_like(blocks)
    began = time.monotonic()
    status = tier.get(SPACE, hashes, views(into), deadline=0.4)
    took = time.monotonic() - began
    assert set(status) <= {LATE, UNAVAILABLE}
    assert LATE in status
    assert took < 0.4 + NOISE
    times = []
    for _ in range(50):
        began = time.monotonic()
        assert set(tier.put(SPACE, hashes, views(blocks), deadline=0.4)) == {UNAVAILABLE}
        times.append(time.monotonic() - began)
    assert statistics.median(times) < 0.01
    assert not tier.contains(SPACE, hashes).any()
    before = into.copy()
    server.resume()
    assert until(lambda: not tier.get(SPACE, hashes, views(np.zeros_like(blocks))).any())
    assert np.array_equal(into, before), "written into after the call had returned"


def test_whether_a_server_is_there_is_told_in_time(server: RedisServer) -> None:
    with contextlib.closing(RedisColdTier(server.url, deadline=5.0, connect_timeout=0.5)) as tier:
        assert tier.ping() is ColdStatus.OK
        server.stall()
        began = time.monotonic()
        assert tier.ping(0.3) is ColdStatus.LATE
        assert time.monotonic() - began < 0.3 + NOISE
        server.kill()
        assert tier.ping(0.3) is ColdStatus.UNAVAILABLE


def test_a_server_that_stalls_within_a_value_does_not_write_late(
    server: RedisServer, tier: RedisColdTier
) -> None:
    blocks, hashes = blocks_of(24, 2 << 20), hashes_of("midway", 24)
    assert not tier.put(SPACE, hashes, views(blocks)).any()
    for delay in (0.002, 0.005, 0.01):
        into = np.zeros_like(blocks)
        timer = threading.Timer(delay, server.stall)
        timer.start()
        began = time.monotonic()
        status = tier.get(SPACE, hashes, views(into), deadline=0.3)
        assert time.monotonic() - began < 0.3 + NOISE
        timer.join()
        before = into.copy()
        server.resume()
        good = np.flatnonzero(status == OK)
        assert np.array_equal(into[good], blocks[good])
        assert until(lambda: bool(tier.contains(SPACE, hashes[:1]).all()))
        assert np.array_equal(into, before)


def test_a_server_killed_and_restarted_in_mid_run_costs_hits_only(
    server: RedisServer, tier: RedisColdTier, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    blocks = blocks_of(16, 300_000)
    wrong: list[str] = []
    seen: set[int] = set()
    stop = threading.Event()

    def work(number: int) -> None:
        hashes = hashes_of(f"run{number}", 16)
        while not stop.is_set():
            into = np.zeros_like(blocks)
            put = tier.put(SPACE, hashes, views(blocks), deadline=1.0)
            got = tier.get(SPACE, hashes, views(into), deadline=1.0)
            seen.update(put.tolist(), got.tolist())
            good = np.flatnonzero(got == OK)
            if not np.array_equal(into[good], blocks[good]) or set(put) & {MISS, CORRUPT, FULL}:
                wrong.append(f"{put} {got}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        time.sleep(0.15)
        server.kill()
        time.sleep(0.1)
        server.start()
    time.sleep(0.3)
    assert until(lambda: not tier.put(SPACE, hashes_of("end", 16), views(blocks)).any())
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert seen >= {OK, UNAVAILABLE}
    assert CORRUPT not in seen
    assert any("is down" in message for message in caplog.messages)
    assert any("is back" in message for message in caplog.messages)


def test_a_server_that_is_down_at_the_start_is_allowed_and_comes_up(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    tier = RedisColdTier(server.url, connect_timeout=0.5)
    blocks, hashes = blocks_of(1, 1000), hashes_of("down", 1)
    times = []
    for _ in range(100):
        began = time.monotonic()
        assert tier.put(SPACE, hashes, views(blocks)).tolist() == [UNAVAILABLE]
        times.append(time.monotonic() - began)
    assert statistics.median(times) < 0.001
    assert tier.stats.unavailable == 100
    tier.check_integrity()
    with server:
        assert until(lambda: tier.put(SPACE, hashes, views(blocks)).tolist() == [OK])
    tier.close()


def test_connections_that_went_stale_are_replaced_without_a_loss(
    server: RedisServer, tier: RedisColdTier
) -> None:
    blocks, hashes = blocks_of(8, 10_000), hashes_of("stale", 8)
    for _ in range(5):
        assert not tier.put(SPACE, hashes, views(blocks)).any()
        with server.client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert not tier.get(SPACE, hashes, views(np.zeros_like(blocks))).any()


def test_a_server_at_maxmemory_is_full_for_writes_and_still_read(tmp_path: Path) -> None:
    with RedisServer(tmp_path, "--maxmemory", "20mb", "--maxmemory-policy", "noeviction") as server:
        tier = RedisColdTier(server.url, deadline=5.0)
        blocks, hashes = blocks_of(40, 1 << 20), hashes_of("full", 40)
        status = tier.put(SPACE, hashes, views(blocks))
        assert set(status) == {OK, FULL}
        assert tier.stats.full == np.count_nonzero(status == FULL)
        into = np.zeros_like(blocks)
        got = tier.get(SPACE, hashes, views(into))
        assert np.array_equal(got == OK, status == OK)
        assert np.array_equal(into[got == OK], blocks[got == OK])
        tier.close()


def test_a_server_that_became_a_replica_refuses_writes_until_it_is_none_any_more(
    server: RedisServer, tier: RedisColdTier
) -> None:
    blocks, hashes = blocks_of(2, 1000), hashes_of("replica", 2)
    assert not tier.put(SPACE, hashes, views(blocks)).any()
    with server.client() as client:
        client.replicaof("127.0.0.1", free_port())
        assert set(tier.put(SPACE, hashes, views(blocks))) == {UNAVAILABLE}
        client.replicaof("NO", "ONE")
        assert not tier.put(SPACE, hashes, views(blocks)).any()


def test_records_expire_and_a_put_starts_their_time_anew(server: RedisServer) -> None:
    tier = RedisColdTier(server.url, ttl=100)
    blocks, hashes = blocks_of(1, 1000), hashes_of("ttl", 1)
    tier.put(SPACE, hashes, views(blocks))
    with server.client() as client:
        assert 98 <= client.ttl(key_of(hashes[0])) <= 100
        client.expire(key_of(hashes[0]), 5)
        tier.put(SPACE, hashes, views(blocks))
        assert 98 <= client.ttl(key_of(hashes[0])) <= 100
        tier.put_note(b"n", b"x")
        assert all(98 <= client.ttl(key) <= 100 for key in client.keys("*"))
    tier.close()


def flip(client: redis.Redis, key: bytes, offset: int = 500) -> None:
    value = client.get(key)
    assert isinstance(value, bytes)
    client.setrange(key, offset, bytes([value[offset] ^ 1]))


def flip_header(client: redis.Redis, key: bytes) -> None:
    flip(client, key, 40)


def truncate(client: redis.Redis, key: bytes) -> None:
    client.set(key, client.getrange(key, 0, 700))


def truncate_header(client: redis.Redis, key: bytes) -> None:
    client.set(key, client.getrange(key, 0, 20))


def lengthen(client: redis.Redis, key: bytes) -> None:
    client.append(key, b"more")


@pytest.mark.parametrize("damage", [flip, flip_header, truncate, truncate_header, lengthen])
def test_a_damaged_record_is_corrupt_and_deleted(
    server: RedisServer, tier: RedisColdTier, damage: Callable[[redis.Redis, bytes], None]
) -> None:
    blocks, hashes = blocks_of(3, 1000), hashes_of("damage", 3)
    tier.put(SPACE, hashes, views(blocks))
    into = np.zeros_like(blocks)
    with server.client() as client:
        damage(client, key_of(hashes[1]))
        assert tier.get(SPACE, hashes, views(into)).tolist() == [OK, CORRUPT, OK]
        assert client.exists(key_of(hashes[1])) == 0
    assert np.array_equal(into[[0, 2]], blocks[[0, 2]])
    assert tier.stats.corrupt == 1
    assert tier.contains(SPACE, hashes).tolist() == [True, False, True]


def test_what_is_not_ours_is_corrupt_and_left_alone(server: RedisServer, tier: RedisColdTier) -> None:
    blocks, hashes = blocks_of(6, 1000), hashes_of("foreign", 6)
    tier.put(SPACE, hashes, views(blocks))
    with server.client() as client:
        other = client.get(key_of(hashes[0]))
        newer = bytearray(other)
        newer[4] = 2  # a later format version
        client.set(key_of(hashes[1]), other)
        client.set(key_of(hashes[2]), bytes(newer))
        client.set(key_of(hashes[3]), b"somebody else's value")
        client.set(key_of(hashes[4]), b"")
        client.delete(key_of(hashes[5]))
        client.lpush(key_of(hashes[5]), b"a list")
        status = tier.get(SPACE, hashes, views(np.zeros_like(blocks)))
        assert status.tolist() == [OK, CORRUPT, CORRUPT, CORRUPT, CORRUPT, CORRUPT]
        assert all(client.exists(key_of(each)) for each in hashes)
    assert not tier.put(SPACE, hashes, views(blocks)).any()
    assert not tier.get(SPACE, hashes, views(np.zeros_like(blocks))).any()


def test_a_record_whose_parts_are_gone_in_part_is_a_miss_and_is_put_again(
    server: RedisServer, tier: RedisColdTier
) -> None:
    blocks, hashes = blocks_of(3, 9 << 20), hashes_of("parts", 3)
    tier.put(SPACE, hashes, views(blocks))
    into = np.zeros_like(blocks)
    with server.client() as client:
        client.delete(key_of(hashes[0], 1), key_of(hashes[1], 0))
        assert tier.get(SPACE, hashes, views(into)).tolist() == [MISS, MISS, OK]
        assert np.array_equal(into[2], blocks[2])
        # The parts that are left can never verify, so the record is not said to be there.
        assert tier.contains(SPACE, hashes).tolist() == [False, False, True]
        flip(client, key_of(hashes[2], 2))
        assert tier.get(SPACE, hashes[2:], views(into[2:])).tolist() == [CORRUPT]
    assert not tier.put(SPACE, hashes, views(blocks)).any()
    assert not tier.get(SPACE, hashes, views(into)).any()
    assert np.array_equal(into, blocks)


def test_parts_of_two_writes_never_make_one_block(server: RedisServer, tier: RedisColdTier) -> None:
    one, two = blocks_of(1, 9 << 20, 1), blocks_of(1, 9 << 20, 2)
    hashes = hashes_of("mixed", 1)
    tier.put(SPACE, hashes, views(one))
    with server.client() as client:
        kept = client.get(key_of(hashes[0], 1))
        tier.put(SPACE, hashes, views(two))
        client.set(key_of(hashes[0], 1), kept)
    assert tier.get(SPACE, hashes, views(np.zeros_like(one))).tolist() == [CORRUPT]
    assert not tier.contains(SPACE, hashes).any()


def test_a_damaged_note_is_corrupt_and_deleted(server: RedisServer, tier: RedisColdTier) -> None:
    assert tier.put_note(b"note", bytes(1000)) is OK
    with server.client() as client:
        (key,) = client.keys("*")
        flip(client, key)
        assert tier.get_note(b"note") == (CORRUPT, b"")
        assert tier.get_note(b"note") == (MISS, b"")
        client.lpush(key, b"a list")
        assert tier.get_note(b"note") == (CORRUPT, b"")


def test_urls_that_can_never_work_are_refused_by_name(server: RedisServer, tmp_path: Path) -> None:
    url = server.url
    for wrong, problem in {
        "http://localhost": "must begin with redis://",
        "localhost:6379": "must begin with redis://",
        "unix://": "needs the path of a socket",
        f"{url}/99": "no such database",
        f"{url}/{1 << 70}": "no such database",
        f"{url}/xx": "a database is a number from 0 up, got 'xx'",
        f"{url}/-1": "a database is a number from 0 up, got '-1'",
        f"{url}/1/2": "a database is a number",
        f"{url}?db=xx": "db cannot be 'xx'",
        f"{url}?db=-1": "a database is a number from 0 up, got '-1'",
        "redis://[::1": "cannot be used",
        "redis://localhost:0": "no port 0",
        f"{url}?nonsense=1": "nonsense cannot be set",
        f"{url}?protocol=3": "protocol cannot be set",
        "redis://localhost:99999": "cannot be used",
        "redis+cluster://localhost/1": "a Cluster has database 0 only",
        url.replace("redis://", "redis+cluster://"): "is not a Cluster node",
        url.replace("redis://", "redis://user:secret-word@"): "refuses the credentials",
    }.items():
        with pytest.raises(ConfigError, match=problem) as caught:
            RedisColdTier(wrong, connect_timeout=1.0).close()
        assert str(caught.value).startswith("cold.url: ")
        assert "secret-word" not in str(caught.value)
    for settings in ({"ttl": 0}, {"connections": 0}, {"deadline": 0}, {"connect_timeout": -1.0}):
        with pytest.raises(ConfigError, match=f"cold.{next(iter(settings))}"):
            RedisColdTier(url, **settings)


def test_an_option_of_the_url_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """Before anything is connected to: nobody listens there."""
    files = make_tls_files(tmp_path)
    text = tmp_path / "text"
    text.write_text("no certificate")
    hidden = tmp_path / "hidden" / "file"
    signed = files.certificate
    tls = f"rediss://127.0.0.1:{free_port()}?"
    for wrong, problem in {
        f"{tls}ssl_ca_certs=/no/such/file": "ssl_ca_certs: /no/such/file cannot be read: No such file",
        f"{tls}ssl_ca_certs={tmp_path}": f"ssl_ca_certs: {tmp_path} cannot be read: Is a directory",
        f"{tls}ssl_ca_certs={text}": f"ssl_ca_certs: {text} holds no certificates that can be read",
        f"{tls}ssl_ca_certs=": "ssl_ca_certs has no value",
        f"{tls}ssl_ca_path={hidden}": f"ssl_ca_path: {hidden} is no folder",
        f"{tls}ssl_ca_data=nonsense": "ssl_ca_data: holds no certificates",
        f"{tls}ssl_certfile={hidden}": f"ssl_certfile: {hidden} cannot be read",
        f"{tls}ssl_certfile={signed}&ssl_keyfile={hidden}": f"ssl_keyfile: {hidden} cannot be read",
        f"{tls}ssl_certfile={signed}&ssl_keyfile={text}": f"ssl_certfile: {signed} and ssl_keyfile={text}",
        f"{tls}ssl_keyfile={files.key}": "ssl_keyfile goes with ssl_certfile",
        f"{tls}ssl_cert_reqs=perhaps": "ssl_cert_reqs cannot be 'perhaps'",
        f"{tls}ssl_min_version=newest": "ssl_min_version cannot be 'newest'",
        f"{tls}ssl_min_version=7": "ssl_min_version: 7 is no version of TLS",
        f"{tls}ssl_ciphers=rot13": "ssl_ciphers: names none",
        f"{tls}ssl_nonsense=1": "ssl_nonsense cannot be set in the URL",
        # redis-py passes over what is not True itself: nothing would be validated.
        f"{tls}ssl_validate_ocsp=true": "ssl_validate_ocsp cannot be set in the URL",
        f"{tls}socket_keepalive=": "socket_keepalive has no value",
        f"redis://127.0.0.1?ssl_ca_certs={files.ca}": "ssl_ca_certs is for TLS: use rediss://",
        f"redis+cluster://localhost?ssl_ca_certs={files.ca}": "ssl_ca_certs is for TLS: use rediss+cluster://",
        f"unix:///redis.sock?ssl_ca_certs={files.ca}": "ssl_ca_certs is for TLS: there is none on a socket",
        "unix:///run/redis.sock?socket_keepalive=1": "socket_keepalive is no option of unix://",
    }.items():
        with pytest.raises(ConfigError) as caught:
            RedisColdTier(wrong, connect_timeout=1.0).close()
        assert str(caught.value).startswith(f"cold.url: {problem}"), wrong
    # What can be used is: the server alone is not there.
    for right in (
        f"ssl_ca_certs={files.ca}&ssl_min_version=771&ssl_cert_reqs=optional",
        f"ssl_certfile={signed}&ssl_keyfile={files.key}&ssl_ca_path={tmp_path}",
        "ssl_check_hostname=no&ssl_cert_reqs=none&socket_keepalive=1&client_name=me",
    ):
        RedisColdTier(tls + right, connect_timeout=1.0).close()


def test_tls_and_credentials_are_checked_when_the_tier_is_opened(tmp_path: Path) -> None:
    require_redis()
    files = make_tls_files(tmp_path)
    with RedisServer(
        tmp_path,
        *("--tls-auth-clients", "no", "--requirepass", "right"),
        *("--tls-ca-cert-file", str(files.ca), "--tls-key-file", str(files.key)),
        *("--tls-cert-file", str(files.certificate)),
        tls=True,
        password="right",
    ) as server:
        place = f"127.0.0.1:{server.port}"
        for url, problem in {
            f"rediss://:right@{place}": "no TLS with this server: .*certificate",
            f"rediss://:wrong@{place}?ssl_ca_certs={files.ca}": "refuses the credentials",
            f"rediss://{place}?ssl_ca_certs={files.ca}": "refuses the credentials",
        }.items():
            with pytest.raises(ConfigError, match=problem):
                RedisColdTier(url).close()
        tier = RedisColdTier(f"rediss://:right@{place}?ssl_ca_certs={files.ca}", deadline=5.0)
        blocks, hashes = blocks_of(2, 100_000), hashes_of("tls", 2)
        assert not tier.put(SPACE, hashes, views(blocks)).any()
        server.stall()
        began = time.monotonic()
        assert LATE in tier.get(SPACE, hashes, views(np.zeros_like(blocks)), deadline=0.3)
        assert time.monotonic() - began < 0.3 + NOISE
        server.resume()
        tier.close()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    with three_masters(tmp_path_factory.mktemp("cluster")) as started:
        yield started


def node_id(server: RedisServer) -> str:
    with server.client() as client:
        return str(client.execute_command("CLUSTER", "MYID").decode())


def owner(nodes: list[RedisServer], slot: int) -> int:
    return 0 if slot < 5461 else 1 if slot < 10923 else 2


def test_a_cluster_node_is_not_taken_for_a_lone_server(nodes: list[RedisServer]) -> None:
    with pytest.raises(ConfigError, match=r"is a Cluster node: use redis\+cluster://"):
        RedisColdTier(nodes[0].url)


def move(nodes: list[RedisServer], slot: int, source: int, target: int) -> None:
    """Give an empty slot to another node. Importing first makes its claim the newest one."""
    with nodes[target].client() as client:
        client.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", node_id(nodes[source]))
    for server in (nodes[target], *nodes):
        with server.client() as client:
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", node_id(nodes[target]))


def test_slots_that_move_are_followed(nodes: list[RedisServer]) -> None:
    tier = RedisColdTier(f"redis+cluster://127.0.0.1:{nodes[0].port}", deadline=5.0)
    blocks, hashes = blocks_of(4, 5 << 20), hashes_of("moved", 4)
    slots = [key_slot(key_of(each)) for each in hashes]
    assert len({key_slot(key_of(hashes[0], part)) for part in range(3)}) == 1, "one hash tag per block"
    moves = [(slot, owner(nodes, slot), (owner(nodes, slot) + 1) % 3) for slot in slots]
    for slot, source, target in moves:
        move(nodes, slot, source, target)
    try:
        assert not tier.put(SPACE, hashes, views(blocks)).any()
        assert tier.contains(SPACE, hashes).all()
        into = np.zeros_like(blocks)
        assert not tier.get(SPACE, hashes, views(into)).any()
        assert np.array_equal(into, blocks)
        assert tier.delete(SPACE, hashes) == 4
        tier.check_integrity()
    finally:
        for server in nodes:
            with server.client() as client:
                client.flushall()
        for slot, source, target in moves:
            move(nodes, slot, target, source)
    tier.close()


def test_a_slot_that_is_being_moved_is_asked_for_at_its_new_place(nodes: list[RedisServer]) -> None:
    tier = RedisColdTier(f"redis+cluster://127.0.0.1:{nodes[0].port}", deadline=5.0)
    blocks, hashes = blocks_of(1, 1000), hashes_of("asked", 1)
    slot = key_slot(key_of(hashes[0]))
    here, there = nodes[owner(nodes, slot)], nodes[(owner(nodes, slot) + 1) % 3]
    with here.client() as source, there.client() as target:
        target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", node_id(here))
        source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", node_id(there))
        try:
            assert not tier.put(SPACE, hashes, views(blocks)).any()
            into = np.zeros_like(blocks)
            assert not tier.get(SPACE, hashes, views(into)).any()
            assert np.array_equal(into, blocks)
            assert target.execute_command("CLUSTER", "COUNTKEYSINSLOT", slot) == 1
        finally:
            source.execute_command("CLUSTER", "SETSLOT", slot, "STABLE")
            target.execute_command("CLUSTER", "SETSLOT", slot, "STABLE")
            target.flushall()
    tier.close()


def test_a_cluster_with_a_stalled_node_still_serves_the_others(nodes: list[RedisServer]) -> None:
    tier = RedisColdTier(f"redis+cluster://127.0.0.1:{nodes[0].port}", deadline=5.0, connect_timeout=0.5)
    blocks, hashes = blocks_of(60, 10_000), hashes_of("one stalls", 60)
    assert not tier.put(SPACE, hashes, views(blocks)).any()
    lost = np.array([owner(nodes, key_slot(key_of(each))) == 1 for each in hashes])
    nodes[1].stall()
    try:
        began = time.monotonic()
        status = tier.get(SPACE, hashes, views(np.zeros_like(blocks)), deadline=0.3)
        assert time.monotonic() - began < 0.3 + NOISE
        assert np.array_equal(status == OK, ~lost)
        assert set(status[lost]) <= {LATE, UNAVAILABLE}
    finally:
        nodes[1].resume()
    assert until(lambda: not tier.get(SPACE, hashes, views(np.zeros_like(blocks))).any())
    tier.close()


class Liar:
    """A scripted server on loopback: polite until it is asked for a value."""

    def __init__(self, lie: Callable[[socket.socket, list[bytes]], None]) -> None:
        self._lie = lie
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self._closing = False
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, sock.makefile("rb") as file, contextlib.suppress(OSError, ValueError):
            while line := file.readline():
                words = [file.read(int(file.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))]
                command = words[0].upper()
                if command == b"PING":
                    sock.sendall(b"+PONG\r\n")
                elif command in (b"CLIENT", b"SELECT"):
                    sock.sendall(b"+OK\r\n")
                elif command == b"INFO":
                    sock.sendall(b"-ERR no\r\n")
                else:
                    self._lie(sock, words)

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)


def says(text: bytes) -> Callable[[socket.socket, list[bytes]], None]:
    return lambda sock, words: sock.sendall(text)


def hangs_up(sock: socket.socket, words: list[bytes]) -> None:
    sock.shutdown(socket.SHUT_RDWR)


def trickles(sock: socket.socket, words: list[bytes]) -> None:
    sock.sendall(b"$%d\r\n" % (HEADER_BYTES + 5000))
    for _ in range(200):
        sock.sendall(b"x")
        time.sleep(0.02)


def floods(sock: socket.socket, words: list[bytes]) -> None:
    for _ in range(64):
        sock.sendall(b"x" * (1 << 20))


def sends_half(sock: socket.socket, words: list[bytes]) -> None:
    sock.sendall(b"$%d\r\n%s" % (HEADER_BYTES + 5000, b"x" * 2000))
    sock.shutdown(socket.SHUT_RDWR)


def another_block(sock: socket.socket, words: list[bytes]) -> None:
    codec = RecordCodec()
    (part,) = codec.split(SPACE, b"another hash 016", 5000)
    header, body = codec.encode(part, memoryview(bytes(5000)), 1)
    sock.sendall(b"$%d\r\n%s%s\r\n" % (HEADER_BYTES + 5000, header, bytes(body)))


LIES = {
    "garbage": says(b"HTTP/1.1 400 Bad Request\r\nServer: nothing\r\n\r\n"),
    "binary garbage": lambda sock, words: sock.sendall(os.urandom(50_000) + b"\r\n"),
    "a huge length": says(b"$999999999999\r\nx"),
    "a length beyond any record": says(b"$104857600\r\n" + b"x" * 1000),
    "a negative length": says(b"$-5\r\n"),
    "a length that is no number": says(b"$--1\r\n"),
    "a length with too many digits": says(b"$" + b"9" * 5000 + b"\r\n"),
    "a record of zeros": says(b"$%d\r\n%s\r\n" % (HEADER_BYTES + 5000, bytes(HEADER_BYTES + 5000))),
    "a record without its end": says(b"$%d\r\n%s??" % (HEADER_BYTES + 5000, bytes(HEADER_BYTES + 5000))),
    "an empty value": says(b"$0\r\n\r\n"),
    "a status": says(b"+OK\r\n"),
    "a number": says(b":1\r\n"),
    "a list": says(b"*2\r\n$1\r\na\r\n$1\r\nb\r\n"),
    "lists in lists": says(b"*1\r\n" * 10_000),
    "a list without end": says(b"*2147483647\r\n"),
    "an empty line": says(b"\r\n"),
    "an error": says(b"-ERR unknown command\r\n"),
    "an error without a word": says(b"-\r\n"),
    "a redirection": says(b"-MOVED 1 127.0.0.1:1\r\n"),
    "a redirection to nowhere": says(b"-MOVED 99999 :::::\r\n"),
    "a line without end": floods,
    "two replies": says(b"$-1\r\n$-1\r\n$-1\r\n"),
    "half a value": sends_half,
    "a trickle": trickles,
    "nothing": lambda sock, words: None,
    "the end": hangs_up,
    "another block": another_block,
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_lying_server_costs_hits_and_time_within_the_deadline_only(
    lie: Callable[[socket.socket, list[bytes]], None],
) -> None:
    liar = Liar(lie)
    tier = RedisColdTier(liar.url, connections=2, connect_timeout=1.0)
    blocks, hashes = blocks_of(3, 5000), hashes_of("lie", 3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        calls: list[Callable[[], object]] = [
            lambda: tier.get(SPACE, hashes, views(np.zeros_like(blocks)), deadline=0.2),
            lambda: tier.put(SPACE, hashes, views(blocks), deadline=0.2),
            lambda: tier.contains(SPACE, hashes, deadline=0.2),
            lambda: tier.delete(SPACE, hashes, deadline=0.2),
            lambda: tier.get_note(b"note", deadline=0.2),
            lambda: tier.put_note(b"note", b"value", deadline=0.2),
        ]
        for call in calls:
            began = time.monotonic()
            result = call()
            assert time.monotonic() - began < 0.2 + NOISE
            if call is calls[0]:
                assert isinstance(result, np.ndarray)
                assert OK not in result
            if call is calls[4]:
                assert isinstance(result, tuple)
                assert result[0] is not OK
        tier.check_integrity()
    finally:
        tier.close()
        liar.close()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 << 10, "KiB of memory taken at a liar's word"


def test_what_is_no_redis_is_refused_at_the_start() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.recv(1000)
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(ColdTierUnavailableError, match=r"cold\.url: .* not the Redis protocol"):
        RedisColdTier(f"redis://127.0.0.1:{listener.getsockname()[1]}")
    thread.join()
    listener.close()


def test_a_purge_of_a_server_that_does_not_answer_says_so(server: RedisServer, tier: RedisColdTier) -> None:
    blocks, hashes = blocks_of(4, 4096), hashes_of("purge", 4)
    assert not tier.put(SPACE, hashes, views(blocks)).any()
    server.stall()
    assert tier.purge(SPACE, hashes, 4096, 0.2) == ColdPurge(0, ColdStatus.LATE)
    assert tier.purge(SPACE, None, 4096, 0.2).status in (ColdStatus.LATE, ColdStatus.UNAVAILABLE)
    server.resume()
    assert until(lambda: tier.purge(SPACE, hashes[:1], 4096, 2.0).status == ColdStatus.OK)
    # What was not answered in time may have been done later.
    assert not tier.contains(SPACE, hashes)[0]
    server.kill()
    assert tier.purge(SPACE, hashes, 4096, 0.5).status in (ColdStatus.LATE, ColdStatus.UNAVAILABLE)
    assert tier.purge(SPACE, None, 4096, 0.5).status in (ColdStatus.LATE, ColdStatus.UNAVAILABLE)


def test_a_purge_of_a_space_takes_parts_and_what_other_secrets_sealed(
    server: RedisServer, tier: RedisColdTier
) -> None:
    blocks, hashes = blocks_of(3, 20000), hashes_of("purge", 3)
    parted = RedisColdTier(server.url, deadline=5.0, secret=b"s" * 16, value_bytes=8192)
    assert not parted.put(SPACE, hashes, views(blocks)).any()
    assert not parted.put(b"o" * 16, hashes, views(blocks)).any()
    assert not tier.put(SPACE, hashes, views(blocks)).any()
    # A part that is alone holds bytes, too.
    server.client().delete(RecordCodec(b"s" * 16).key(SPACE, hashes[0]) + b":0")
    assert tier.purge(SPACE, None, 20000) == ColdPurge(6, ColdStatus.OK)
    left = server.client().keys("*")
    assert left
    assert all((b"o" * 16).hex().encode() in key for key in left)
    parted.close()
