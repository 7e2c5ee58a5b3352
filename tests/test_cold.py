"""What every cold tier owes its callers, asked of each of them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from kvpager.tests.redis_servers import RedisServer, make_tls_files, three_masters
from kvpager.tiers.cold import ColdStatus, ColdTier
from kvpager.tiers.cold_disk import DiskColdTier
from kvpager.tiers.cold_redis import RedisColdTier
from kvpager.tiers.cold_url import open_cold_tier, public_url
from kvpager.tiers.errors import CapacityError, ClosedError, ConfigError

Blocks = npt.NDArray[np.uint8]
SECRET = "correct horse battery staple"
PASSWORD = "pa$s/w:rd@1"
KINDS = ["disk", "disk sealed", "redis", "redis unix sealed", "redis tls auth", "redis cluster"]
SPACE = b"space 0123456789"


def hashes_of(name: str, count: int) -> list[bytes]:
    return [f"{name:>10}{index:06d}".encode() for index in range(count)]


def blocks_of(count: int, size: int, seed: int = 0) -> Blocks:
    return np.random.default_rng(seed).integers(0, 256, (count, size), np.uint8)


def views(blocks: Blocks) -> list[memoryview]:
    return [memoryview(block) for block in blocks]


@pytest.fixture(scope="module")
def redis_urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Starts each kind of server when it is first asked for."""
    from contextlib import ExitStack

    urls: dict[str, str] = {}
    with ExitStack() as stack:

        def url_of(kind: str) -> str:
            if kind not in urls:
                folder = tmp_path_factory.mktemp("redis")
                if kind == "cluster":
                    nodes = stack.enter_context(three_masters(folder))
                    urls[kind] = f"redis+cluster://127.0.0.1:{nodes[1].port}"
                elif kind == "tls":
                    files = make_tls_files(folder)
                    server = RedisServer(
                        folder,
                        *("--tls-auth-clients", "no", "--requirepass", PASSWORD),
                        *("--tls-ca-cert-file", str(files.ca), "--tls-key-file", str(files.key)),
                        *("--tls-cert-file", str(files.certificate)),
                        tls=True,
                        password=PASSWORD,
                    )
                    stack.enter_context(server)
                    quoted = "pa%24s%2Fw%3Ard%401"
                    urls[kind] = f"rediss://:{quoted}@127.0.0.1:{server.port}/3?ssl_ca_certs={files.ca}"
                else:
                    server = stack.enter_context(RedisServer(folder))
                    urls["plain"], urls["unix"] = server.url, server.unix_url
            return urls[kind]

        yield url_of


@pytest.fixture(params=KINDS)
def tier(
    request: pytest.FixtureRequest, redis_urls: Callable[[str], str], tmp_path: Path
) -> Iterator[ColdTier]:
    kind: str = request.param
    opened: ColdTier
    if kind.startswith("disk"):
        secret = SECRET if "sealed" in kind else None
        opened = DiskColdTier(tmp_path / "cold", capacity_bytes=1 << 28, secret=secret)
    elif "unix" in kind:
        opened = RedisColdTier(redis_urls("unix"), secret=SECRET, deadline=20, ttl=1000)
    else:
        key = "tls" if "tls" in kind else "cluster" if "cluster" in kind else "plain"
        opened = RedisColdTier(redis_urls(key), deadline=20)
    yield opened
    opened.check_integrity()
    opened.close()
    opened.close()


@pytest.mark.parametrize("size", [0, 1, 4096, 700_001, 9 << 20])
def test_blocks_come_back_as_they_were_put(tier: ColdTier, size: int) -> None:
    count = 3 if size > 1 << 20 else 20
    blocks, hashes = blocks_of(count, size), hashes_of(f"s{size}", count)
    assert not tier.put(SPACE, hashes, views(blocks)).any()
    into = np.empty_like(blocks)
    assert not tier.get(SPACE, hashes, views(into)).any()
    assert np.array_equal(into, blocks)
    assert tier.contains(SPACE, hashes).all()
    assert tier.stats.puts == tier.stats.gets == count
    assert tier.stats.put_bytes == tier.stats.get_bytes == blocks.nbytes


def test_what_was_never_put_is_a_miss(tier: ColdTier) -> None:
    blocks, hashes = blocks_of(2, 1000), hashes_of("missing", 4)
    assert not tier.put(SPACE, hashes[1:3], views(blocks)).any()
    into = np.zeros((4, 1000), np.uint8)
    assert tier.get(SPACE, hashes, views(into)).tolist() == [1, 0, 0, 1]
    assert np.array_equal(into[1:3], blocks)
    assert not into[[0, 3]].any()
    assert tier.contains(SPACE, hashes).tolist() == [False, True, True, False]
    assert tier.stats.misses == 2


def test_spaces_never_share_blocks(tier: ColdTier) -> None:
    blocks, hashes = blocks_of(1, 1000), hashes_of("spaces", 1)
    tier.put(SPACE, hashes, views(blocks))
    assert tier.get(b"another space 16", hashes, views(blocks.copy())).tolist() == [ColdStatus.MISS]
    assert not tier.contains(b"another space 16", hashes).any()


def test_a_buffer_of_another_size_is_corrupt_and_the_record_stays(tier: ColdTier) -> None:
    blocks, hashes = blocks_of(1, 1000), hashes_of("other size", 1)
    tier.put(SPACE, hashes, views(blocks))
    for size in (0, 999, 1001, 6 << 20):
        into = np.zeros((1, size), np.uint8)
        assert tier.get(SPACE, hashes, views(into)).tolist() == [ColdStatus.CORRUPT]
    into = np.zeros_like(blocks)
    assert not tier.get(SPACE, hashes, views(into)).any()
    assert np.array_equal(into, blocks)


def test_deleted_blocks_are_gone_with_all_their_parts(tier: ColdTier) -> None:
    blocks, hashes = blocks_of(3, 5 << 20), hashes_of("deleted", 3)
    tier.put(SPACE, hashes, views(blocks))
    assert tier.delete(SPACE, [*hashes[:2], *hashes_of("nothing", 1)]) == 2
    assert tier.contains(SPACE, hashes).tolist() == [False, False, True]
    assert tier.get(SPACE, hashes, views(blocks.copy())).tolist() == [1, 1, 0]
    assert tier.delete(SPACE, hashes) == 1


def test_notes_are_replaced_read_and_removed(tier: ColdTier) -> None:
    name = b"session " + os.urandom(4)
    assert tier.get_note(name) == (ColdStatus.MISS, b"")
    for value in (b"first", b"", b"longer than the first", os.urandom(100_000)):
        assert tier.put_note(name, value) is ColdStatus.OK
        assert tier.get_note(name) == (ColdStatus.OK, value)
    assert tier.delete_note(name)
    assert not tier.delete_note(name)
    assert tier.get_note(name) == (ColdStatus.MISS, b"")
    with pytest.raises(CapacityError):
        tier.put_note(name, bytes((4 << 20) + 1))


def test_many_threads_at_once_each_get_their_own_bytes(tier: ColdTier) -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        blocks, hashes = blocks_of(6, 50_000, number), hashes_of(f"thread{number}", 6)
        for _ in range(5):
            into = np.zeros_like(blocks)
            statuses = (tier.put(SPACE, hashes, views(blocks)), tier.get(SPACE, hashes, views(into)))
            if any(status.any() for status in statuses) or not np.array_equal(into, blocks):
                wrong.append(f"{number}: {statuses}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_deadline_that_has_passed_touches_nothing(tier: ColdTier) -> None:
    blocks, hashes = blocks_of(5, 100_000), hashes_of("late", 5)
    assert set(tier.put(SPACE, hashes, views(blocks), deadline=0.0)) == {ColdStatus.LATE}
    tier.put(SPACE, hashes, views(blocks))
    into = np.zeros_like(blocks)
    assert set(tier.get(SPACE, hashes, views(into), deadline=0.0)) == {ColdStatus.LATE}
    assert not into.any()
    assert tier.stats.late == 10


def test_a_tier_that_is_there_answers_and_nothing_is_counted(tier: ColdTier) -> None:
    before = replace(tier.stats)
    assert tier.ping() is ColdStatus.OK
    assert tier.ping(0.0) is not ColdStatus.OK
    assert tier.stats == before


def test_empty_batches_are_fine(tier: ColdTier) -> None:
    assert tier.put(SPACE, [], []).shape == (0,)
    assert tier.get(SPACE, [], []).shape == (0,)
    assert tier.contains(SPACE, []).shape == (0,)
    assert tier.delete(SPACE, []) == 0


def test_arguments_that_make_no_sense_are_refused_by_name(tier: ColdTier) -> None:
    block = memoryview(bytearray(10))
    with pytest.raises(ConfigError, match="space"):
        tier.put(b"short", [bytes(16)], [block])
    with pytest.raises(ConfigError, match="hashes"):
        tier.get(SPACE, [b"short"], [block])
    with pytest.raises(ConfigError, match="payloads: 2 buffers for 1 hashes"):
        tier.put(SPACE, [bytes(16)], [block, block])
    with pytest.raises(ConfigError, match="into: must be contiguous and writable"):
        tier.get(SPACE, [bytes(16)], [memoryview(bytes(10))])
    with pytest.raises(ConfigError, match="payloads: must be contiguous"):
        tier.put(SPACE, [bytes(16)], [block[::2]])


def test_a_closed_tier_says_so(tier: ColdTier) -> None:
    tier.close()
    with pytest.raises(ClosedError):
        tier.put(SPACE, [bytes(16)], [memoryview(b"x")])
    with pytest.raises(ClosedError):
        tier.get_note(b"x")


_OTHER_PROCESS = """
import sys
from kvpager.tiers.cold_url import open_cold_tier
url, what, seed = sys.argv[1:]
tier = open_cold_tier(url, capacity_bytes=None if "://" in url else 1 << 24, secret="a shared secret phrase")
space, hashes = b"s" * 16, [bytes([i]) * 16 for i in range(4)]
payloads = [bytes([i]) * 5000 for i in range(4)]
if what == "put":
    assert not tier.put(space, hashes, [memoryview(p) for p in payloads]).any()
    assert tier.put_note(b"note", b"value") == 0
else:
    into = [bytearray(5000) for _ in hashes]
    assert not tier.get(space, hashes, [memoryview(b) for b in into]).any()
    assert into == payloads
    assert tier.get_note(b"note") == (0, b"value")
tier.close()
"""


@pytest.mark.parametrize("kind", ["redis", "disk"])
def test_processes_with_other_hash_seeds_find_each_others_records(
    kind: str, redis_urls: Callable[[str], str], tmp_path: Path
) -> None:
    url = redis_urls("plain") if kind == "redis" else str(tmp_path)
    for what, seed in (("put", "1"), ("get", "31337")):
        subprocess.run(
            [sys.executable, "-W", "error", "-c", _OTHER_PROCESS, url, what, seed],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            timeout=60,
        )


@pytest.mark.parametrize("kind", ["redis", "disk"])
def test_hosts_with_other_secrets_do_not_see_each_others_records(
    kind: str, redis_urls: Callable[[str], str], tmp_path: Path
) -> None:
    block, hashes = blocks_of(1, 1000), hashes_of("secrets", 1)
    for secret in (None, SECRET, SECRET + " other"):
        tier: ColdTier
        if kind == "redis":
            tier = RedisColdTier(redis_urls("plain"), secret=secret)
        else:
            tier = DiskColdTier(tmp_path, capacity_bytes=1 << 20, secret=secret)
        assert tier.get(SPACE, hashes, views(block.copy())).tolist() == [ColdStatus.MISS]
        assert not tier.put(SPACE, hashes, views(block)).any()
        tier.close()


def test_the_url_decides_which_tier_is_opened(redis_urls: Callable[[str], str], tmp_path: Path) -> None:
    for url in (redis_urls("plain"), redis_urls("unix")):
        tier = open_cold_tier(url, deadline=3.0)
        assert tier.name == "redis"
        tier.close()
    for url in (f"disk://{tmp_path}/a", str(tmp_path / "b")):
        tier = open_cold_tier(url, capacity_bytes=1 << 20)
        assert tier.name == "disk"
        tier.close()
    assert (tmp_path / "a").is_dir()


@pytest.mark.parametrize(
    ("url", "settings", "problem"),
    [
        ("memcached://localhost", {}, "cold.url: must begin with redis://"),
        ("ftp://x/y", {}, "or disk:///, or be a folder's path, got 'ftp://x/y'$"),
        ("ftp://me:sesame@x", {}, "got 'ftp://...'$"),
        ("disk://relative", {"capacity_bytes": 1 << 20}, "cold.url: .* needs an absolute path"),
        ("", {"capacity_bytes": 1 << 20}, "cold.url: must be a path, got ''"),
        ("/tmp/x", {}, "cold.capacity_bytes: is needed"),
        ("/tmp/x", {"capacity_bytes": 1 << 20, "ttl": 3}, "cold.ttl: is for a Redis"),
        ("redis://localhost", {"capacity_bytes": 1 << 20}, "cold.capacity_bytes: is for a disk"),
        ("redis://localhost", {"fsync": True}, "cold.fsync: is for a disk"),
    ],
)
def test_settings_that_do_not_fit_the_url_are_refused(
    url: str, settings: dict[str, int], problem: str
) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match=problem):
        open_cold_tier(url, **settings)  # type: ignore[arg-type]
    assert time.monotonic() - began < 1


def test_a_folder_may_be_a_path_and_never_the_root(tmp_path: Path) -> None:
    open_cold_tier(tmp_path / "cold", capacity_bytes=1 << 20).close()
    for nothing in (None, 5, b"x"):
        with pytest.raises(ConfigError, match=r"cold\.url"):
            open_cold_tier(nothing, capacity_bytes=1 << 20)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="root of the file system"):
        open_cold_tier("disk:///", capacity_bytes=1 << 20)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("redis://host:6379/3", "redis://host:6379/3"),
        ("redis://reader:hunter2@host/3", "redis://reader@host/3"),
        ("redis://:hunter2@host", "redis://host"),
        ("redis://host/0?password=hunter2&client_name=kv", "redis://host/0?client_name=kv"),
        (
            "rediss://a:hunter2@host?ssl_password=hunter2&ssl_ca_certs=/etc/ca",
            "rediss://a@host?ssl_ca_certs=%2Fetc%2Fca",
        ),
        ("unix://reader:hunter2@/run/redis.sock?db=2", "unix://reader@/run/redis.sock?db=2"),
        ("redis+cluster://u:p@hunter2@[::1]:7000", "redis+cluster://u@[::1]:7000"),
        ("redis://[hunter2", "redis://"),
        ("disk:///var/a@b?c", "disk:///var/a@b?c"),
        ("/var/a@b", "/var/a@b"),
    ],
)
def test_what_is_told_of_a_url_has_no_password_in_it(url: str, told: str) -> None:
    assert public_url(url) == told
    assert "hunter2" not in told
