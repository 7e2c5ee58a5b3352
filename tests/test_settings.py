"""Settings of wrong types and values: the error is one of kvpager's own and names what the user set."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvpager.kvstore.hashing import ChainIdentity, hash_blocks, hash_partial, space_id
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.lru_policy import LRUPolicy
from kvpager.kvstore.policy import make_policy
from kvpager.kvstore.space import HostSpace
from kvpager.kvstore.store import TieredStore
from kvpager.kvstore.tables import BlockTable
from kvpager.tiers.arena import DeviceArena, SlotAllocator
from kvpager.tiers.cold_disk import DiskColdTier
from kvpager.tiers.cold_redis import RedisColdTier
from kvpager.tiers.cold_url import open_cold_tier
from kvpager.tiers.driver import device_ordinal
from kvpager.tiers.errors import (
    ConfigError,
    KVPagerError,
    MemoryUnavailableError,
    RequestError,
)
from kvpager.tiers.layout import KVLayout
from kvpager.tiers.mover import CudaMover, HostMover
from kvpager.tiers.pinned import PinnedArena
from kvpager.tiers.record import RecordCodec
from kvpager.tiers.settings import (
    expect_byte_strings,
    expect_integer,
    expect_number,
    expect_path,
    expect_text,
)

LAYOUT = KVLayout(1, 1, 32, block_size=4, dtype="float32")  # 1 KiB a block
ROOT = b"r" * 16
NAME = b"n" * 16
BLOCK = np.zeros((1, LAYOUT.block_bytes), dtype=np.uint8)
ADDRESSES = np.zeros(1, dtype=np.int64)
NOWHERE = "redis://127.0.0.1:1"
"""Nobody listens there; a tier that opens all the same has believed its settings."""
SPACE = b"s" * 16
VIEW = memoryview(bytearray(8))


@dataclass(frozen=True)
class House:
    """One open thing of each kind, for calls that must change nothing in it."""

    path: Path
    host: HostStore
    space: HostSpace
    store: TieredStore
    disk: DiskColdTier
    arena: PinnedArena
    mover: HostMover


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    path = tmp_path_factory.mktemp("house")
    disk = DiskColdTier(path / "disk", capacity_bytes=1 << 20)
    with HostStore(1 << 20, cold=disk) as host, PinnedArena(1 << 20) as arena, closing(HostMover()) as mover:
        host.arena.wait_ready()
        with closing(TieredStore(LAYOUT, 8, root=ROOT, host=host)) as store:
            yield House(path, host, host.space(LAYOUT), store, disk, arena, mover)
            store.check_integrity()
            host.check_integrity()


def layout(**settings: Any) -> Callable[[House], object]:
    return lambda _: KVLayout(**{"num_layers": 1, "num_kv_heads": 1, "head_dim": 64, **settings})


def host(**settings: Any) -> Callable[[House], object]:
    return lambda _: HostStore(**{"host_bytes": 1 << 20, **settings})


def tiered(**settings: Any) -> Callable[[House], object]:
    return lambda _: TieredStore(**{"layout": LAYOUT, "device_blocks": 4, "root": ROOT, **settings})


def disk(**settings: Any) -> Callable[[House], object]:
    return lambda house: DiskColdTier(**{"path": house.path / "new", "capacity_bytes": 1 << 20, **settings})


def redis(**settings: Any) -> Callable[[House], object]:
    return lambda _: RedisColdTier(**{"url": NOWHERE, **settings})


def identity(**settings: Any) -> Callable[[House], object]:
    return lambda _: ChainIdentity(**{"model": b"m", **settings})


def blocks(**settings: Any) -> Callable[[House], object]:
    return lambda _: hash_blocks(**{"tokens": range(8), "block_size": 4, "parent": ROOT, **settings})


NO_NUMBER: Any = "x"

Case = tuple[Callable[[House], object], str]

LAYOUTS: list[Case] = [
    *[
        (layout(**{name: value}), name)
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size")
        for value in (None, "2", 2.0, True, 0, -1, 10**30, [2])
    ],
    (layout(num_layers=1 << 20, num_kv_heads=1 << 20, head_dim=1 << 20, block_size=16), "block_size"),
    (layout(block_size=10**9), "block_size"),
    *[(layout(dtype=value), "dtype") for value in (["float16"], None, 16, "float8")],
    *[(layout(format=value), "format") for value in (5, ["plain"], "", "opaque:", "tiled", "opaque:\ud800")],
    *[(layout(planes=value), "planes") for value in (True, 2.0, 3, 0, None, "2")],
    *[(layout(window=value), "window") for value in ("x", 1.5, 0, True, 10**30)],
    *[
        (lambda _, value=value: LAYOUT.blocks_for(value), "num_tokens")
        for value in (None, "5", 5.0, True, -1, [5], 2.5, b"5")
    ],
    *[(layout(scale_bytes=value), "scale_bytes") for value in (None, 1.5, -1, "x", True)],
]

NAMES: list[Case] = [
    *[(identity(model=value), "model") for value in ("x", b"", None, bytearray(b"m"), 5)],
    *[
        (identity(**{name: value}), name)
        for name in ("adapter", "tenant", "salt")
        for value in ("x", None, 5, [b"x"])
    ],
    *[(identity(epoch=value), "epoch") for value in (-1, 1 << 64, 1.5, "1", True, None)],
    (lambda _: space_id(None), "layout"),  # type: ignore[arg-type]
    (lambda _: space_id(LAYOUT, None), "shard"),  # type: ignore[arg-type]
    (lambda _: space_id(LAYOUT, "\ud800"), "shard"),
    *[(blocks(tokens=value), "tokens") for value in (None, "text", [[1], [2, 3]], [1.5], {1, 2}, [10**30])],
    *[(blocks(block_size=value), "block_size") for value in (0, "4", None, 4.0, True)],
    *[(blocks(parent=value), "parent") for value in (None, "r" * 16, b"short", 5)],
    *[
        (blocks(extra_keys=value), "extra_keys")
        for value in (5, [b"x"], {0: b"x"}, {0: ["x"]}, {"0": [b"x"]}, {-1: [b"x"]}, {0: None})
    ],
    (lambda _: hash_partial([1], None), "parent"),  # type: ignore[arg-type]
    (lambda _: hash_partial([1], ROOT, b"key"), "extra_keys"),  # type: ignore[arg-type]
    *[(lambda _, bad=bad: make_policy(bad, 0), "policy") for bad in (["lru"], None, "mru", 5)],
]

HOSTS: list[Case] = [
    *[(host(host_bytes=value), "host_bytes") for value in ("1G", None, 0, -1, 1.5, True, 100, 10**30)],
    *[(host(cold=value), "cold") for value in list[Any](("folder", 5, DiskColdTier, {}))],
    *[(host(policy=value), "policy") for value in (["lru"], None, "magic")],
    *[
        (host(device=value), "device")
        for value in (5, "", "gpu", "cuda:x", "cuda:-1", ["cuda:0"], "cuda:99999")
    ],
    *[(host(extent_bytes=value), "extent_bytes") for value in ("x", 0, -4096, 1000, 4096.0, True, 2 << 20)],
    *[(host(policy_weights=value), "policy_weights") for value in ({"x": 1}, [0.5], "x", 5)],
    *[(host(retention_ttl=value), "retention_ttl") for value in (0, -1.0, math.nan, "x", None, True)],
    *[
        (host(clean_ahead=value), "clean_ahead")
        for value in (math.nan, math.inf, -0.1, 1.5, "x", None, True, 10**400)
    ],
    *[
        (host(cold_deadline=value), "cold_deadline")
        for value in (math.nan, math.inf, 0, -1, "x", None, True, 1e300)
    ],
    (lambda house: house.host.space(None), "layout"),  # type: ignore[arg-type]
    (lambda house: house.host.space("small"), "layout"),  # type: ignore[arg-type]
    (lambda house: house.host.space(LAYOUT, shard=None), "shard"),  # type: ignore[arg-type]
    (lambda house: house.host.match(house.space, [NAME]), "spaces"),  # type: ignore[arg-type]
    (lambda house: house.host.match([None], [NAME]), "spaces"),  # type: ignore[list-item]
    (lambda house: house.host.match([house.space], NAME), "hashes"),  # type: ignore[arg-type]
    (lambda house: house.host.flush(None), "deadline"),  # type: ignore[arg-type]
    (lambda house: house.host.flush(math.nan), "deadline"),
    (lambda house: house.host.close(drain="x"), "drain"),  # type: ignore[arg-type]
    (lambda house: house.host.close(drain=-1.0), "drain"),
    (lambda house: house.host.subscribe(None), "listener"),  # type: ignore[arg-type]
]

BAD_HASHES: tuple[Any, ...] = (
    None,
    NAME,
    "n" * 16,
    [b"short"],
    ["n" * 16],
    [5],
    5,
    {NAME: 1},
    [None],
    [[NAME]],
)

SPACES: list[Case] = [
    *[
        (lambda house, call=call, bad=bad: call(house.space, bad), "hashes")
        for bad in BAD_HASHES
        for call in (
            lambda space, bad: space.match(bad),
            lambda space, bad: space.reserve(bad),
            lambda space, bad: space.put(bad, BLOCK),
            lambda space, bad: space.get(bad, BLOCK.copy()),
            lambda space, bad: space.pin(bad),
            lambda space, bad: space.unpin(bad),
            lambda space, bad: space.load(bad, 0.0),
            lambda space, bad: space.start_load(bad),
            lambda space, bad: space.lease_resident(bad),
        )
    ],
    (lambda house: house.space.match(), "hashes"),
    (lambda house: house.space.match(tokens=range(8)), "hashes"),
    (lambda house: house.space.match([NAME], tokens=range(8), chain=ROOT), "hashes"),
    (lambda house: house.space.match(tokens=range(8), chain=b"x"), "chain"),
    (lambda house: house.space.match(tokens="text", chain=ROOT), "tokens"),  # type: ignore[arg-type]
    (lambda house: house.space.match([NAME], cold_deadline=math.nan), "cold_deadline"),
    (lambda house: house.space.reserve([NAME], wait=NO_NUMBER), "wait"),
    (lambda house: house.space.put([NAME], BLOCK, wait=None), "wait"),  # type: ignore[arg-type]
    (lambda house: house.space.put([NAME], BLOCK, wait=math.inf), "wait"),
    *[(lambda house, count=count: house.space.evict(count), "count") for count in (None, -1, 1.0, "1", True)],
    (lambda house: house.space.load([NAME], NO_NUMBER), "deadline"),
    (lambda house: house.space.start_load([NAME]).wait(NO_NUMBER), "seconds"),
    (lambda house: house.space.match([NAME]).shorten(-1), "count"),
    (lambda house: house.space.reserve([]).commit([0]), "positions"),  # type: ignore[arg-type]
    (lambda house: house.space.reserve([]).abort("x"), "positions"),  # type: ignore[arg-type]
    *[(lambda house, slot=slot: house.space.view(slot), "slot") for slot in (-1, None, 1.5, 1 << 40)],
    *[
        (lambda house, call=call, bad=bad: call(house.space, bad), "slots")
        for bad in list[Any]((None, "x", [1.5], [[0]], [1 << 40], NAME))
        for call in (
            lambda space, bad: space.addresses(bad),
            lambda space, bad: space.readable_in_place(bad),
            lambda space, bad: space.lease(bad, [1]),
            lambda space, bad: space.release(bad, [1]),
            lambda space, bad: space.commit(bad, [1]),
            lambda space, bad: space.abort(bad, [1]),
        )
    ],
    (lambda house: house.space.lease([1 << 30], [1]), "slots"),  # type: ignore[arg-type]
    (lambda house: house.space.lease([0], [1, 2]), "generations"),  # type: ignore[arg-type]
    (lambda house: house.space.release([0], "x"), "generations"),  # type: ignore[arg-type]
    (lambda house: house.space.slots_at(None), "addresses"),  # type: ignore[arg-type]
    (lambda house: house.space.put_note("name", b""), "name"),  # type: ignore[arg-type]
    (lambda house: house.space.put_note(b"name", "value"), "value"),  # type: ignore[arg-type]
    (lambda house: house.space.put_note(b"name", b"", NO_NUMBER), "deadline"),
    (lambda house: house.space.get_note(None), "name"),  # type: ignore[arg-type]
]

COLD: list[Case] = [
    *[
        (kind(deadline=value), "cold.deadline")
        for kind in (disk, redis)
        for value in ("x", 0, -1.0, math.nan, math.inf, None, True, 3601)
    ],
    *[
        (kind(secret=value), "cold.secret")
        for kind in (disk, redis)
        for value in (5, b"short", "short", ["x" * 16], bytearray(16), "\ud800" * 16)
    ],
    *[
        (disk(capacity_bytes=value), "cold.capacity_bytes")
        for value in (10**30, 0, 4095, "1G", 1e9, True, None, -1)
    ],
    *[(disk(fsync=value), "cold.fsync") for value in ("yes", 1, None)],
    *[(disk(path=value), "cold.path") for value in (None, 5, "", "a\0b", b"x")],
    *[(redis(ttl=value), "cold.ttl") for value in (10**30, 0, -1, 1.5, "60", True)],
    *[(redis(connections=value), "cold.connections") for value in (0, 65, None, "2", 2.0, True)],
    *[
        (redis(connect_timeout=value), "cold.connect_timeout")
        for value in (0, -1, "x", math.nan, None, 10**400)
    ],
    *[(redis(value_bytes=value), "cold.value_bytes") for value in (0, 100, 1 << 32, None, "4M", 1e6)],
    *[
        (redis(url=value), "cold.url")
        for value in (
            *(None, 5, "", "localhost:6379", "http://localhost", "redis://[::1", "redis://localhost:0"),
            *("redis://localhost/xx", "redis://localhost/-1", "redis://localhost?db=xx"),
            *("redis://localhost?socket_timeout=1", "redis://localhost:port", f"redis://localhost/{1 << 40}"),
        )
    ],
    *[
        (lambda _, url=url: open_cold_tier(url, capacity_bytes=1 << 20), "cold.url")
        for url in (None, 5, b"x", "", "disk://", "disk://relative", "a\0b")
    ],
    (lambda _: open_cold_tier("disk:///x"), "cold.capacity_bytes"),
    (lambda _: open_cold_tier("disk:///x", capacity_bytes="1G"), "cold.capacity_bytes"),  # type: ignore[arg-type]
    (lambda _: open_cold_tier(NOWHERE, capacity_bytes=1 << 20), "cold.capacity_bytes"),
    (lambda _: open_cold_tier(NOWHERE, fsync=None), "cold.fsync"),  # type: ignore[arg-type]
    (lambda _: open_cold_tier(NOWHERE, ttl=10**30), "cold.ttl"),
    (lambda _: open_cold_tier(NOWHERE, deadline=NO_NUMBER), "cold.deadline"),
    (lambda _: open_cold_tier("ftp://localhost"), "cold.url"),
    *[
        (lambda house, call=call, bad=bad: call(house.disk, bad), "hashes")
        for bad in BAD_HASHES
        for call in (
            lambda tier, bad: tier.put(SPACE, bad, [VIEW]),
            lambda tier, bad: tier.get(SPACE, bad, [VIEW]),
            lambda tier, bad: tier.contains(SPACE, bad),
            lambda tier, bad: tier.delete(SPACE, bad),
        )
    ],
    (lambda house: house.disk.contains("s" * 16, [NAME]), "space"),  # type: ignore[arg-type]
    (lambda house: house.disk.put(SPACE, [NAME], [5]), "payloads"),  # type: ignore[list-item]
    (lambda house: house.disk.put(SPACE, [NAME], None), "payloads"),  # type: ignore[arg-type]
    (lambda house: house.disk.get(SPACE, [NAME], ["text"]), "into"),  # type: ignore[list-item]
    (lambda house: house.disk.contains(SPACE, [NAME], NO_NUMBER), "deadline"),
    (lambda house: house.disk.get_note(b"x", math.nan), "deadline"),
    (lambda house: house.disk.put_note("x", b""), "name"),  # type: ignore[arg-type]
    (lambda house: house.disk.put_note(b"x", "y"), "value"),  # type: ignore[arg-type]
    (lambda house: house.disk.delete_note(None), "name"),  # type: ignore[arg-type]
]

STORES: list[Case] = [
    *[(tiered(layout=value), "layout") for value in (None, "llama", 5)],
    *[(tiered(device_blocks=value), "device_blocks") for value in (None, 0, -1, "4", 4.0, True, 10**30)],
    *[(tiered(root=value), "root") for value in (None, "x", "r" * 16, b"short", 5)],
    *[(tiered(host=value), "host") for value in ("x", 5, HostStore)],
    *[(tiered(device=value), "device") for value in (None, 5, "", "tpu9", "meta", "cuda:99")],
    *[(tiered(max_sequences=value), "max_sequences") for value in (None, 0, 1 << 20, "8", 8.0, True)],
    *[(tiered(policy=value), "policy") for value in (["lru"], None, "magic")],
    *[(tiered(shard=value), "shard") for value in (None, 5, "\ud800")],
    *[(tiered(mover=value), "mover") for value in ("x", 5, HostMover)],
    (lambda house: house.store.open(None), "tokens"),  # type: ignore[arg-type]
    (lambda house: house.store.open([1], root="r" * 16), "root"),  # type: ignore[arg-type]
    (lambda house: house.store.open([1], extra_keys=[b"x"]), "extra_keys"),  # type: ignore[arg-type]
    (lambda house: house.store.open([1], partial_at="x"), "partial_at"),  # type: ignore[arg-type]
    (lambda house: house.store.open([1], partial_at=-1), "partial_at"),
    (lambda house: house.store.open([1], cold_deadline=math.nan), "cold_deadline"),
    (lambda house: house.store.open_named([1, 2]), "prompt"),  # type: ignore[arg-type]
    (lambda house: house.store.resident_blocks(None), "prompt"),  # type: ignore[arg-type]
    (lambda house: house.store.start_load(None), "prompt"),  # type: ignore[arg-type]
    (lambda house: house.store.start_load_sleeping(None), "sleeping"),  # type: ignore[arg-type]
    (lambda house: house.store.wake(None), "sleeping"),  # type: ignore[arg-type]
    (lambda house: house.store.cached_blocks(None), "sleeping"),  # type: ignore[arg-type]
    (lambda house: house.store.evict(None), "count"),  # type: ignore[arg-type]
    (lambda house: house.store.evict(-1), "count"),
    (lambda house: house.store.save_session(None, None, [1]), "name"),  # type: ignore[arg-type]
    (lambda house: house.store.save_session("anna", None, [1]), "sleeping"),  # type: ignore[arg-type]
    (lambda house: house.store.find_session(5), "name"),  # type: ignore[arg-type]
    (lambda house: house.store.find_session("anna", root=b"x"), "root"),
    (lambda house: house.store.subscribe("x"), "listener"),  # type: ignore[arg-type]
]

ARENAS: list[Case] = [
    *[(lambda _, n=n: SlotAllocator(n), "num_slots") for n in (-1, 1 << 40, "4", None, 1.5, True)],
    *[(lambda _, n=n: SlotAllocator(4).allocate(n), "n") for n in (-1, "1", None, 1.0, True)],
    *[
        (lambda _, bad=bad: SlotAllocator(4).free(bad), "slots")
        for bad in list[Any]((None, [0.5], "x", [[0]]))
    ],
    (lambda _: SlotAllocator(4).is_free([0.5]), "slots"),  # type: ignore[arg-type]
    (lambda house: house.arena.is_page_locked(np.array([99])), "extents"),
    (lambda house: house.arena.is_page_locked(["x"]), "extents"),  # type: ignore[arg-type]
    (lambda _: SlotAllocator().add("0", 4), "first"),  # type: ignore[arg-type]
    (lambda _: SlotAllocator().add(0, None), "count"),  # type: ignore[arg-type]
    *[(lambda _, size=size: DeviceArena(size, 4), "block_bytes") for size in (None, "128", 128.0, 100, 0)],
    *[(lambda _, n=n: DeviceArena(128, n), "device_blocks") for n in (None, "4", 0, True, 10**30)],
    *[
        (lambda _, name=name: DeviceArena(128, 4, name), "device")
        for name in (None, 5, "", "tpu9", "cuda:99")
    ],
    *[(lambda _, n=n: PinnedArena(n), "host_bytes") for n in (None, "1G", 0, 1.5, True, 10**30)],
    *[(lambda _, n=n: PinnedArena(1 << 20, extent_bytes=n), "extent_bytes") for n in ("x", 0, 4096.0, 1000)],
    *[(lambda _, n=n: PinnedArena(1 << 20, name=n), "name") for n in (5, "", "a\0b", b"x")],
    *[(lambda _, n=n: PinnedArena(1 << 20, device=n), "device") for n in (5, "", "gpu", ["cuda"])],
    (lambda _: PinnedArena(1 << 20, page_lock="no"), "page_lock"),  # type: ignore[arg-type]
    *[(lambda house, n=n: house.arena.take_extent(n), "timeout") for n in (None, "x", -1, math.nan, 1e300)],
    *[(lambda house, n=n: house.arena.give_extent(n), "extent") for n in (None, "0", -1, 1.0, 99)],
    *[(lambda house, n=n: house.arena.extent_view(n), "extent") for n in (None, "0", -1, 1.0, 99)],
    (lambda house: house.arena.view("0", 1), "offset"),  # type: ignore[arg-type]
    (lambda house: house.arena.view(0, None), "nbytes"),  # type: ignore[arg-type]
    (lambda house: house.arena.wait_ready("all"), "n"),  # type: ignore[arg-type]
    (lambda house: house.arena.wait_ready(None, "x"), "timeout"),  # type: ignore[arg-type]
    *[(lambda _, n=n: HostMover(n), "threads") for n in (0, None, "2", 1.5, True, 10**9)],
    *[
        (lambda _, name=name: CudaMover(name), "device")
        for name in (None, 5, "cpu", "cuda:", "cuda:٣", "cuda:x")
    ],
    (lambda _: CudaMover("cuda:0", "kernel"), "copy_kernel"),  # type: ignore[arg-type]
    (lambda _: device_ordinal(None), "device"),  # type: ignore[arg-type]
    *[(lambda _, n=n: LRUPolicy(n), "capacity") for n in (-1, None, "4", 10**30)],
    *[(lambda _, n=n: BlockTable(n), "rows") for n in (0, None, "4", 10**30)],
    (lambda _: BlockTable(1, None), "width"),  # type: ignore[arg-type]
    (lambda _: RecordCodec(5), "cold.secret"),  # type: ignore[arg-type]
]


def cases(*tables: list[Case]) -> list[Any]:
    """Every row, with an id that can be told from the others."""
    return [
        pytest.param(call, setting, id=f"{setting} {number}")
        for number, (call, setting) in enumerate(row for table in tables for row in table)
    ]


@pytest.mark.parametrize(("call", "setting"), cases(LAYOUTS, NAMES, HOSTS, SPACES, COLD, STORES, ARENAS))
def test_a_setting_of_a_wrong_type_or_value_is_refused_by_its_name(
    house: House, call: Callable[[House], object], setting: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        call(house)
    assert caught.value.setting == setting
    assert len(str(caught.value)) < 300


# Rows


@pytest.mark.parametrize("row", [0, -1, 10**30, None, "0", 1.5, False])
def test_a_row_that_is_not_in_use_is_refused(house: House, row: Any) -> None:
    store = house.store
    for call in (
        store.close_row,
        store.fork,
        store.sleep,
        store.far_blocks,
        lambda row: store.promote(row, 1),
        lambda row: store.spill(row, 1),
        lambda row: store.advance(row, np.zeros(1, dtype=np.int32)),
    ):
        with pytest.raises(RequestError, match="is not in use"):
            call(row)


def test_counts_of_a_row_in_use_are_checked(house: House) -> None:
    row = house.store.open([1, 2]).row
    try:
        for wrong in (None, "x", 1.5):
            with pytest.raises(ConfigError, match="limit"):
                house.store.promote(row, wrong)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="count"):
                house.store.spill(row, wrong)  # type: ignore[arg-type]
        sleeping = house.store.sleep(house.store.fork(row))
        with pytest.raises(ConfigError, match="tokens"):
            house.store.save_session("anna", sleeping, "text")  # type: ignore[arg-type]
        house.store.reserve(np.array([row]), 2)
        house.store.advance(row, np.array([1, 2], dtype=np.int32))
        longer = house.store.sleep(house.store.fork(row))
        with pytest.raises(ConfigError, match="tokens: must be all 2"):
            house.store.save_session("anna", longer, [1])
    finally:
        house.store.close_row(row)


# What the user set is what is named


@pytest.mark.parametrize(
    ("settings", "shape", "setting"),
    [
        ({"host_bytes": 4096}, {}, "host_bytes"),
        ({"host_bytes": 64 << 20}, {"num_layers": 80, "block_size": 64}, "host_bytes"),
        ({"host_bytes": 64 << 20, "extent_bytes": 4096}, {}, "extent_bytes"),
        ({"host_bytes": 64 << 20}, {"num_layers": 80, "block_size": 1 << 16}, "block_size"),
    ],
)
def test_a_block_that_does_not_fit_is_blamed_on_what_the_user_set(
    settings: dict[str, int], shape: dict[str, int], setting: str
) -> None:
    shape = {"num_layers": 4, "num_kv_heads": 8, "head_dim": 128, **shape}
    with HostStore(**settings) as host, pytest.raises(ConfigError) as caught:  # type: ignore[arg-type]
        host.space(KVLayout(**shape))  # type: ignore[arg-type]
    assert caught.value.setting == setting


def test_the_capacity_that_the_error_asks_for_is_enough() -> None:
    shape = KVLayout(1, 64, 128, block_size=160)  # 5 MiB
    with HostStore(64 << 20) as host, pytest.raises(ConfigError, match=f"give at least {128 << 20}$"):
        host.space(shape)
    with HostStore(128 << 20) as host:
        assert host.space(shape).slots_per_extent == 1


def test_one_block_that_memory_cannot_hold_is_blamed_on_its_size() -> None:
    with pytest.raises(MemoryUnavailableError, match="block_size: one block is"):
        TieredStore(KVLayout(1000, 1000, 1000, block_size=1 << 20), 4, root=ROOT)


def test_a_secret_is_never_shown(tmp_path: Path) -> None:
    for secret in (b"hush-hush", "hush-hush", ["hush-hush" * 4], "hush-hush" * 4 + "\ud800"):
        with pytest.raises(ConfigError) as caught:
            DiskColdTier(tmp_path, capacity_bytes=1 << 20, secret=secret)  # type: ignore[arg-type]
        assert "hush" not in f"{caught.value}{caught.value.__cause__}"


def test_integers_of_numpy_are_integers() -> None:
    shape = KVLayout(np.int64(2), np.int32(2), np.int64(64), block_size=np.uint8(16))  # type: ignore[arg-type]
    assert shape == KVLayout(2, 2, 64, block_size=16)
    assert shape.fingerprint == KVLayout(2, 2, 64, block_size=16).fingerprint
    assert ChainIdentity(b"m", epoch=np.int64(3)).root == ChainIdentity(b"m", epoch=3).root  # type: ignore[arg-type]
    assert type(shape.blocks_for(np.int32(17))) is int  # type: ignore[arg-type]
    assert [shape.blocks_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
    with HostStore(np.int64(1 << 20), clean_ahead=np.float32(0.5)) as host:  # type: ignore[arg-type]
        assert host.space(shape).slots_per_extent == (1 << 20) // shape.block_bytes


# Everything that is no value at all


NONSENSE: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, math.nan, math.inf, 10**30, 10**400, -(10**30), 10**5000),
    *("", "x", "\ud800", "a\0b", b"", b"x", [], [1], {}, {1: 2}, object(), int, np.zeros(3), [10**5000]),
)

CONSTRUCTORS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (KVLayout, {"num_layers": 1, "num_kv_heads": 1, "head_dim": 64}),
    (ChainIdentity, {"model": b"m"}),
    (HostStore, {"host_bytes": 1 << 20}),
    (TieredStore, {"layout": LAYOUT, "device_blocks": 4, "root": ROOT}),
    (DiskColdTier, {"path": "disk", "capacity_bytes": 1 << 20}),
    (RedisColdTier, {"url": NOWHERE}),
    (open_cold_tier, {"url": "disk", "capacity_bytes": 1 << 20}),
    (open_cold_tier, {"url": NOWHERE}),
    (RecordCodec, {}),
    (PinnedArena, {"capacity_bytes": 1 << 20}),
    (DeviceArena, {"block_bytes": 128, "num_blocks": 4}),
    (SlotAllocator, {}),
    (HostMover, {}),
    (LRUPolicy, {}),
    (BlockTable, {"rows": 4}),
    (make_policy, {"name": "lru", "capacity": 4}),
    (hash_blocks, {"tokens": range(8), "block_size": 4, "parent": ROOT}),
    (hash_partial, {"tokens": range(8), "parent": ROOT}),
    (space_id, {"layout": LAYOUT}),
]


@pytest.mark.parametrize(
    ("construct", "settings", "name"),
    [
        pytest.param(construct, settings, name, id=f"{construct.__name__} {number} {name}")
        for number, (construct, settings) in enumerate(CONSTRUCTORS)
        for name in inspect.signature(construct).parameters
    ],
)
def test_no_value_of_any_setting_raises_an_error_of_pythons_own(
    construct: Callable[..., Any],
    settings: dict[str, Any],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in NONSENSE:
        try:
            made = construct(**{**settings, name: value})
        except KVPagerError:
            continue
        if hasattr(made, "close"):
            made.close()


# The checks themselves


def test_a_message_shows_no_more_of_a_value_than_a_line_holds() -> None:
    for value in (10**5000, [10**5000], "x" * 10_000, np.zeros(10_000)):
        with pytest.raises(ConfigError, match="n: must be") as caught:
            expect_integer("n", value, 1, 5)
        assert len(str(caught.value)) < 200


def test_bounds_are_told_and_belong_to_what_is_allowed() -> None:
    assert [expect_integer("n", value, 1, 5) for value in (1, np.int64(5))] == [1, 5]
    assert [expect_number("n", value, 0.0, 1.0) for value in (0, 1, np.float32(0.5))] == [0.0, 1.0, 0.5]
    with pytest.raises(ConfigError, match="greater than 0"):
        expect_number("n", 0, 0.0, above=True)
    with pytest.raises(ConfigError, match="at most 1"):
        expect_number("n", 1.5, 0.0, 1.0)
    assert expect_text("n", "", empty=True) == ""
    assert expect_path("n", Path("a") / "b") == "a/b"
    assert expect_byte_strings("n", (NAME,), 16) == (NAME,)
    assert expect_byte_strings("n", [], 16) == []
