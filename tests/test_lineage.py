"""The lineage of blocks: who tells it, who learns it, what is forgotten, and what outlives a process."""

from __future__ import annotations

import asyncio
import os
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import kvpager
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpager.api.messages import Count, Leased, Load, Match, Message, Put, Release, Reserve, Reserved
from kvpager.api.remote_access import RemoteAccess
from kvpager.api.wire import Reply
from kvpager.kvstore.hashing import hash_blocks, hash_partial
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.lineage import CHAIN_START, NO_PARENT, Ancestors, ChainPlace, Lineage, short_hashes
from kvpager.kvstore.slot_arrays import SlotArrays
from kvpager.kvstore.slot_lineage import SlotLineage
from kvpager.kvstore.space import HostSpace
from kvpager.kvstore.store import TieredStore
from kvpager.tests.raw_client import LAYOUT, RawClient, Running
from kvpager.tests.serve_process import ServeProcess, remove_arena
from kvpager.tests.test_store import LAYOUT as SMALL
from kvpager.tests.test_store import PROMPT, Engine
from kvpager.tests.test_store import ROOT as STORE_ROOT
from kvpager.tests.test_store_over_sidecar import attached
from kvpager.tests.troubled_disk import TroubledDisk
from kvpager.tiers.arena_file import ArenaFile
from kvpager.tiers.errors import ConfigError, IntegrityError

SIZE = LAYOUT.block_bytes
ROOT = b"r" * 16
TOKEN = "a token of sixteen and more"
HOST = 8 << 20


def chain(seed: int, count: int) -> list[bytes]:
    """The hashes of a chain's first blocks."""
    return hash_blocks(np.full(count * 4, seed, dtype=np.int32), 4, ROOT)


def told(lineage: Lineage) -> list[tuple[bytes, int]]:
    return list(zip(lineage.parents, lineage.depths.tolist(), strict=True))


def truth(hashes: Sequence[bytes]) -> list[tuple[bytes, int]]:
    """Parent and depth of a whole chain's blocks."""
    return [(before, depth) for depth, before in enumerate([NO_PARENT, *hashes][: len(hashes)], 1)]


UNKNOWN = (NO_PARENT, 0)


def put(space: HostSpace, hashes: Sequence[bytes], lineage: Lineage | None = None) -> None:
    blocks = np.zeros((len(hashes), SIZE), np.uint8)
    assert space.put(hashes, blocks, wait=20.0, lineage=lineage) == len(hashes)


def match(space: HostSpace, hashes: Sequence[bytes], **more: Any) -> int:
    with space.match(hashes, **more) as lease:
        return len(lease)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[HostStore]:
    cold = TroubledDisk(tmp_path / "cold")
    with HostStore(64 * SIZE, extent_bytes=8 * SIZE, cold=cold, clean_ahead=0.0) as made:
        assert made.arena.wait_ready(8, timeout=30.0)
        yield made
        made.check_integrity()


@pytest.fixture
def space(host: HostStore) -> HostSpace:
    return host.space(LAYOUT)


# What it is


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 12), st.integers(0, 12))
def test_the_parts_of_a_chain_have_the_lineage_of_the_whole(first: int, rest: int) -> None:
    hashes = chain(1, first + rest)
    whole = Lineage.of_chain(hashes)
    assert told(whole) == truth(hashes)
    parts = (
        Lineage.of_chain(hashes[:first]),
        Lineage.of_chain(hashes[first:], CHAIN_START.after(hashes[:first])),
    )
    assert told(parts[0]) + told(parts[1]) == told(whole)
    assert ChainPlace.at(hashes, first) == CHAIN_START.after(hashes[:first])
    some = np.arange(0, first + rest, 2)
    assert told(whole.take(some)) == told(Lineage.in_chain(hashes, some)) == told(whole)[::2]


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: Lineage([b"x"], np.zeros(1, np.int32)), "parents"),
        (lambda: Lineage("x" * 16, np.zeros(1, np.int32)), "parents"),  # type: ignore[arg-type]
        (lambda: Lineage([ROOT], np.ones(1, np.int32)), "parents"),
        (lambda: Lineage([NO_PARENT], np.zeros(2, np.int32)), "depths"),
        (lambda: Lineage([NO_PARENT], np.full(1, -1, np.int32)), "depths"),
        (lambda: Lineage([NO_PARENT], np.zeros(1, np.float32)), "depths"),
        (lambda: Lineage.of_chain([ROOT] * 2, ChainPlace(ROOT, 2**31 - 2)), "depth"),
        (lambda: ChainPlace(ROOT), "before"),
        (lambda: ChainPlace(b"short", 2), "before"),
        (lambda: ChainPlace(ROOT, 0), "depth"),
        (lambda: ChainPlace(ROOT, 2**31), "depth"),
    ],
)
def test_what_is_no_lineage_is_refused(make: Callable[[], object], setting: str) -> None:
    with pytest.raises(ConfigError, match=f"^{setting}:"):
        make()


def test_a_space_refuses_the_lineage_of_other_blocks(space: HostSpace) -> None:
    hashes = chain(1, 3)
    lineage = Lineage.of_chain(hashes[:2])
    for call in (
        lambda: space.reserve(hashes, lineage=lineage),
        lambda: space.reserve_at_once(hashes, lineage=lineage),
        lambda: space.put(hashes, np.zeros((3, SIZE), np.uint8), lineage=lineage),
        lambda: space.reserve(hashes, lineage=hashes),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=r"^lineage:"):
            call()
    with pytest.raises(ConfigError, match=r"^start:"):
        space.match(hashes, start=2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^start:"):
        space.load(hashes, 1.0, start=ROOT)  # type: ignore[arg-type]
    put(space, hashes)
    deep = ChainPlace(ROOT, 2**31 - 2)
    with pytest.raises(ConfigError, match=r"^depth:"):
        space.match(hashes, start=deep)
    with pytest.raises(ConfigError, match=r"^depth:"):
        space.load(hashes, 1.0, start=deep)
    assert space.evict(3) == 3


def test_a_chain_is_followed_to_where_it_is_not_known_and_never_in_a_circle() -> None:
    hashes = chain(1, 6)
    array = np.array(hashes, dtype="V16")
    short, none = short_hashes(array), np.zeros(6, np.int32)
    parents = np.concatenate([[np.uint64(0)], short[:-1]])
    whole = Ancestors(array, parents, np.arange(1, 7, dtype=np.int32))
    assert whole.chain(5) == hashes
    assert Ancestors(array[2:], parents[2:], none[2:]).chain(3) == hashes[2:]
    circle = np.roll(short, 1)
    assert sorted(Ancestors(array, circle, none).chain(5)) == sorted(hashes)
    # Of two whose hashes begin alike the one that is where a parent should be.
    alike = np.array([hashes[0][:8] + bytes(8), *hashes[:2]], dtype="V16")
    found = Ancestors(alike, np.array([1, 0, short[0]], np.uint64), np.array([7, 1, 2], np.int32)).chain(2)
    assert found == hashes[:2]


# Who tells it


def test_blocks_that_are_put_with_a_lineage_have_it(space: HostSpace) -> None:
    hashes = chain(1, 4)
    put(space, hashes[:2], Lineage.of_chain(hashes[:2]))
    with space.reserve(hashes, lineage=Lineage.of_chain(hashes)) as reservation:
        assert told(space.lineage(hashes))[2:] == [UNKNOWN] * 2
        reservation.commit()
    assert told(space.lineage(hashes)) == truth(hashes)
    assert told(space.lineage(hashes[::-1])) == truth(hashes)[::-1]
    assert told(space.lineage([*hashes[3:], *chain(2, 1)])) == [(hashes[2], 4), UNKNOWN]
    assert space.chain_of(hashes[2]) == hashes[:3]
    assert space.chain_of(chain(2, 1)[0]) == []


def test_what_is_there_already_learns_from_a_reservation(space: HostSpace) -> None:
    hashes = chain(1, 4)
    put(space, hashes[:3])
    assert told(space.lineage(hashes[:3])) == [UNKNOWN] * 3
    assert space.chain_of(hashes[2]) == hashes[2:3]
    put(space, hashes[1:], Lineage.of_chain(hashes[1:], ChainPlace(hashes[0], 2)))
    assert told(space.lineage(hashes)) == [UNKNOWN, *truth(hashes)[1:]]
    assert space.chain_of(hashes[3]) == hashes


def test_a_match_from_the_beginning_of_a_chain_teaches_it(space: HostSpace) -> None:
    hashes = chain(1, 6)
    put(space, hashes)
    assert match(space, hashes[2:4], start=None) == 2
    assert told(space.lineage(hashes)) == [UNKNOWN] * 6
    assert match(space, hashes[:3]) == 3
    assert told(space.lineage(hashes)) == [*truth(hashes)[:3], *[UNKNOWN] * 3]
    assert match(space, [*hashes[3:5], *chain(2, 1)], start=ChainPlace.at(hashes, 3)) == 2
    assert told(space.lineage(hashes)) == [*truth(hashes)[:5], UNKNOWN]
    # Who is wrong about what is known is believed in nothing.
    assert match(space, hashes[3:]) == 3
    assert told(space.lineage(hashes)) == [*truth(hashes)[:5], UNKNOWN]
    assert match(space, hashes) == 6
    assert told(space.lineage(hashes)) == truth(hashes)


def test_what_comes_up_from_the_cold_tier_has_a_lineage(host: HostStore, space: HostSpace) -> None:
    hashes = chain(1, 12)
    put(space, hashes)
    assert host.flush() == 0
    space.evict(12)
    with space.load(hashes[:5], 20.0) as lease:
        assert len(lease) == 5
    assert told(space.lineage(hashes[:5])) == truth(hashes)[:5]
    with space.load(hashes[4:9], 20.0, start=ChainPlace.at(hashes, 4)) as lease:
        assert len(lease) == 5
    assert told(space.lineage(hashes[:9])) == truth(hashes)[:9]
    with space.load(hashes[9:], 20.0, start=None) as lease:
        assert len(lease) == 3
    assert told(space.lineage(hashes[9:])) == [UNKNOWN] * 3
    assert space.chain_of(hashes[8]) == hashes[:9]


def test_a_long_load_has_the_lineage_of_its_chain_in_every_batch(
    host: HostStore, space: HostSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpager.kvstore.cold_writes.COLD_BATCH_BYTES", 3 * SIZE)
    hashes = chain(1, 11)
    put(space, hashes)
    assert host.flush() == 0
    space.evict(11)
    with space.load(hashes, 20.0) as lease:
        assert len(lease) == 11
    assert told(space.lineage(hashes)) == truth(hashes)


# What is counted, and forgotten


def test_a_block_counts_how_often_a_match_found_it(space: HostSpace) -> None:
    hashes = chain(1, 3)
    put(space, hashes)
    for count in (1, 2, 3):
        match(space, hashes[:count])
    match(space, hashes[2:], start=None)
    with space.lease_resident(hashes):
        assert space.hits([*hashes, *chain(2, 1)]).tolist() == [3, 2, 2, 0]


def test_hits_go_round_at_two_to_the_power_of_32() -> None:
    arrays = SlotArrays.alone(4, 1)
    arrays.hits[:] = 2**32 - 1
    SlotLineage(arrays).found(np.arange(2), chain(1, 2), None)
    assert arrays.hits.tolist() == [0, 0, 2**32 - 1, 2**32 - 1]


LEAVINGS = [lambda space, _: space.evict(3), lambda space, hashes: space.purge(hashes)]


@pytest.mark.parametrize("leave", LEAVINGS, ids=["evict", "purge"])
def test_a_block_that_comes_again_has_nothing_of_the_one_that_went(
    space: HostSpace, leave: Callable[[HostSpace, list[bytes]], object]
) -> None:
    hashes = chain(1, 3)
    put(space, hashes, Lineage.of_chain(hashes))
    match(space, hashes)
    leave(space, hashes)
    assert told(space.lineage(hashes)) == [UNKNOWN] * 3
    assert space.hits(hashes).tolist() == [0] * 3
    put(space, hashes)
    assert told(space.lineage(hashes)) == [UNKNOWN] * 3
    assert space.hits(hashes).tolist() == [0] * 3


@dataclass
class Model:
    """What a space should know of blocks that are there: (whether the lineage is known, hits)."""

    known: dict[bytes, bool] = field(default_factory=dict)
    hits: dict[bytes, int] = field(default_factory=dict)


def family() -> list[list[bytes]]:
    """Chains that share beginnings."""
    stem = np.arange(12, dtype=np.int32)
    chains = []
    for shared in (0, 1, 2, 3):
        tokens = np.concatenate([stem[: 4 * shared], np.full(20 - 4 * shared, 100 + shared, np.int32)])
        chains.append(hash_blocks(tokens, 4, ROOT))
    return chains


CHAINS = family()
OPERATION = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 3), st.integers(0, 5), st.booleans()),
    st.tuples(st.just("match"), st.integers(0, 3), st.integers(0, 5), st.booleans()),
    st.tuples(st.just("purge"), st.integers(0, 3), st.integers(0, 5), st.just(False)),
    st.tuples(st.just("evict"), st.integers(0, 4), st.just(0), st.just(False)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(OPERATION, max_size=25))
def test_whatever_is_done_what_is_known_is_true(operations: list[tuple[str, int, int, bool]]) -> None:
    model = Model()
    of = {name: one for hashes in CHAINS for name, one in zip(hashes, truth(hashes), strict=True)}
    every = list(of)
    with HostStore(8 * SIZE, extent_bytes=4 * SIZE) as host:
        host.arena.wait_ready()
        space = host.space(LAYOUT)
        events: list[Any] = []
        host.subscribe(events.append)
        for what, which, count, tells in operations:
            events.clear()
            hashes = CHAINS[which % 4][:count]
            if what == "put":
                lineage = Lineage.of_chain(hashes) if tells else None
                with space.reserve(hashes, lineage=lineage) as reservation:
                    reservation.commit()
                    present = [
                        name for name, status in zip(hashes, reservation.status, strict=True) if status == 1
                    ]
            elif what == "match":
                found = hashes[: match(space, hashes, start=CHAIN_START if tells else None)]
            elif what == "purge":
                space.purge(hashes)
            else:
                space.evict(which)
            for event in events:
                for name in event.hashes:
                    if event.kind == "removed":
                        del model.known[name], model.hits[name]
                    else:
                        model.known[name], model.hits[name] = tells, 0
            if what == "put" and tells:
                model.known.update(dict.fromkeys(present, True))
            if what == "match":
                for name in found:
                    model.hits[name] += 1
                if found and tells and not model.known[found[-1]]:
                    model.known.update(dict.fromkeys(found, True))
            host.check_integrity()
            depths = space.lineage(every).depths.tolist()
            for name, depth in zip(every, depths, strict=True):
                assert depth == (of[name][1] if model.known.get(name) else 0)
            assert space.hits(every).tolist() == [model.hits.get(name, 0) for name in every]
            for name in model.known:
                line = space.chain_of(name)
                assert [of[one][1] for one in line] == list(
                    range(of[name][1] - len(line) + 1, of[name][1] + 1)
                )
                parents = dict(zip(every, space.lineage(every).parents, strict=True))
                assert all(parents[below] == above for above, below in pairwise(line))


def test_what_can_be_no_lineage_is_told(space: HostSpace) -> None:
    put(space, chain(1, 3), Lineage.of_chain(chain(1, 3)))
    depths = space._records._arrays.depths
    before = depths.copy()
    for wrong in (-1, 1):
        depths[:] = wrong
        with pytest.raises(IntegrityError, match="depth below 0, or is the first of its chain"):
            space.check_integrity()
    depths[:] = before


def test_a_device_block_that_is_not_one_deeper_than_its_parent_is_told() -> None:
    one = Engine(device_blocks=8, extents=0, cold=None)
    one.run(PROMPT)
    one.check()
    one.store.pool.depths[one.store.pool.match(hash_blocks(PROMPT, SMALL.block_size, STORE_ROOT)[2:])] = 7
    with pytest.raises(IntegrityError, match="not one deeper in its chain than its parent"):
        one.store.check_integrity()
    one.store.close()


# What outlives a process


@pytest.fixture
def arena() -> Iterator[Path]:
    """A name in shared memory, of which nothing is left."""
    path = Path(f"/dev/shm/kvpager-test-{os.getpid()}-{random.randrange(1 << 30)}")
    yield path
    remove_arena(path)


@pytest.fixture
def serving(tmp_path: Path, arena: Path) -> Iterator[ServeProcess]:
    """A sidecar whose arena others may open when it was killed."""
    with ServeProcess(tmp_path / "socket", f"--arena={arena}", host_bytes=HOST) as process:
        yield process


def test_lineage_and_hits_outlive_a_sidecar_that_was_killed(serving: ServeProcess, arena: Path) -> None:
    hashes, others = chain(1, 5), chain(2, 3)
    blocks = np.zeros((5, SIZE), np.uint8)
    with kvpager.connect(serving.path, timeout=20.0, strict=True) as client:
        space = client.space(LAYOUT)
        assert space.put(hashes, blocks, wait=20.0, lineage=Lineage.of_chain(hashes)) == 5
        assert space.put(others, blocks[:3], wait=20.0) == 3
        for count in (5, 2):
            space.match(hashes[:count]).release()
        serving.kill()
        serving.start()
        client.wait_ready(20.0)
        space.match(hashes[:1]).release()
        space.match(others).release()
        assert client.stats()["sidecar"]["leased"] == 0
        serving.kill()
    with HostStore(HOST, arena=ArenaFile(arena, keep=True)) as host:
        host.check_integrity()
        found = host.space(LAYOUT)
        assert told(found.lineage(hashes)) == truth(hashes)
        assert told(found.lineage(others)) == truth(others)
        assert found.hits(hashes + others).tolist() == [3, 2, 1, 1, 1, 1, 1, 1]
        assert found.chain_of(hashes[4]) == hashes


def test_what_cannot_be_a_lineage_is_not_taken_over() -> None:
    arrays = SlotArrays.alone(4, 1)
    arrays.depths[:] = [-5, 1, 1, 3]
    arrays.parents[:] = [9, 9, 0, 9]
    SlotLineage(arrays).adopt(np.arange(4))
    assert (arrays.depths.tolist(), arrays.parents.tolist()) == ([0, 0, 1, 3], [0, 0, 0, 9])


# Over the wire


@pytest.fixture
def running(host: HostStore, tmp_path: Path) -> Iterator[Running]:
    remote = RemoteAccess("127.0.0.1", 0, TOKEN)
    with Running(tmp_path / "socket", host, remote=remote) as sidecar:
        yield sidecar


def ask(client: RawClient, tag: int, *fields: Any) -> Message:
    """The reply to a request with these fields alone, as a client of another version makes them."""
    body = msgpack.packb([0, 99, tag, list(fields)])
    client.socket.sendall(struct.pack("<I", len(body)) + body)
    frame = client.receive()
    assert isinstance(frame, Reply)
    return frame.message


def test_a_client_that_knows_of_no_lineage_is_served_and_teaches_none(
    running: Running, space: HostSpace
) -> None:
    hashes = chain(1, 4)
    joined = b"".join(hashes)
    with RawClient(running.path) as client:
        number = client.open()
        got = ask(client, Put.TAG, number, joined, bytes(4 * SIZE), 0.0)
        assert isinstance(got, Count)
        assert got.count == 4
        for tag in (Match.TAG, Load.TAG):
            lease = ask(client, tag, number, joined[32:], 0.0)
            assert isinstance(lease, Leased)
            client.call(Release(number, lease.slots, lease.generations))
        granted = ask(client, Reserve.TAG, number, joined, 0.0)
        assert isinstance(granted, Reserved)
        assert granted.statuses.tolist() == [1] * 4
    assert told(space.lineage(hashes)) == [UNKNOWN] * 4
    assert space.hits(hashes).tolist() == [0, 0, 1, 1]


def test_requests_carry_what_is_known(running: Running, host: HostStore, space: HostSpace) -> None:
    hashes = chain(1, 8)
    parents = (NO_PARENT, *hashes[:-1])
    depths = np.arange(1, 9, dtype=np.int32)
    with RawClient(running.port, token=TOKEN) as client:
        number = client.open()
        client.call(Reserve(number, tuple(hashes[:2]), 0.0), Reserved)
        client.call(Reserve(number, tuple(hashes[2:3]), 0.0, parents[2:3], depths[2:3]), Reserved)
        data = bytes(4 * SIZE)
        assert (
            client.call(Put(number, tuple(hashes[:4]), data, 0.0, parents[:4], depths[:4]), Count).count == 4
        )
        assert told(space.lineage(hashes[:4])) == truth(hashes)[:4]
        client.call(Put(number, tuple(hashes[4:]), data, 0.0), Count)
        leased = [client.call(Match(number, tuple(hashes[4:6]), 0.0, hashes[3], 5), Leased)]
        assert told(space.lineage(hashes)) == [*truth(hashes)[:6], *[UNKNOWN] * 2]
        assert host.flush() == 0
        space.evict(64)
        leased.append(client.call(Load(number, tuple(hashes[6:]), 20.0, hashes[5], 7), Leased))
        assert told(space.lineage(hashes[5:]))[1:] == truth(hashes)[6:]
        for wrong, setting in (
            (Reserve(number, tuple(hashes), 0.0, parents, depths[:3]), "depths"),
            (Reserve(number, tuple(hashes), 0.0, (), depths), "depths"),
            (Reserve(number, tuple(hashes), 0.0, parents[:3], depths[:3]), "lineage"),
            (Put(number, tuple(hashes[:1]), data[:SIZE], 0.0, (ROOT,), depths[:1]), "parents"),
            (Match(number, tuple(hashes), 0.0, b"short", 3), "before"),
            (Match(number, tuple(hashes), 0.0, ROOT, -1), "depth"),
            (Load(number, tuple(hashes), 0.0, ROOT, 1), "before"),
            (Match(number, tuple(hashes), 0.0, ROOT, 2**31 - 2), "depth"),
            (Load(number, tuple(hashes), 0.0, ROOT, 2**31 - 2), "depth"),
        ):
            with pytest.raises(ConfigError, match=f"^{setting}:"):
                client.call(wrong)
        for lease in leased:
            client.call(Release(number, lease.slots, lease.generations))
        assert space.evict(64) == 4


@pytest.mark.parametrize("tcp", [False, True])
def test_spaces_of_a_connection_tell_what_they_are_told(
    running: Running, space: HostSpace, tcp: bool
) -> None:
    where = f"kvpager://127.0.0.1:{running.port}" if tcp else str(running.path)
    token = TOKEN if tcp else None
    first, second, third = chain(1, 3), chain(2, 3), chain(3, 3)
    blocks = np.zeros((3, SIZE), np.uint8)
    with kvpager.connect(where, token=token, timeout=20.0, strict=True) as client:
        one = client.space(LAYOUT)
        assert one.put(first, blocks, lineage=Lineage.of_chain(first)) == 3
        with one.reserve(second, lineage=Lineage.of_chain(second)) as reservation:
            reservation.commit()
        assert one.put(third, blocks) == 3
        with one.match(third[1:], start=None) as lease:
            assert len(lease) == 2
        assert told(space.lineage(third)) == [UNKNOWN] * 3
        with one.match(third) as lease:
            assert len(lease) == 3
        with pytest.raises(ConfigError, match=r"^lineage:"):
            one.put(first, blocks, lineage=Lineage.of_chain(first[:1]))
        with pytest.raises(ConfigError, match=r"^start:"):
            one.match(first, start="x")  # type: ignore[arg-type]
    for hashes in (first, second, third):
        assert told(space.lineage(hashes)) == truth(hashes)


@pytest.mark.parametrize("tcp", [False, True])
def test_spaces_for_asyncio_tell_what_they_are_told(running: Running, space: HostSpace, tcp: bool) -> None:
    where = f"kvpager://127.0.0.1:{running.port}" if tcp else str(running.path)
    first, second, third = chain(1, 3), chain(2, 3), chain(3, 3)
    blocks = np.zeros((3, SIZE), np.uint8)

    async def work() -> None:
        async with await kvpager.connect_async(
            where, token=TOKEN if tcp else None, timeout=20.0, strict=True
        ) as client:
            one = await client.space(LAYOUT)
            assert await one.put(first, blocks, lineage=Lineage.of_chain(first)) == 3
            with await one.reserve(second, lineage=Lineage.of_chain(second)) as reservation:
                reservation.commit()
            await one.committed()
            assert await one.put(third, blocks) == 3
            with await one.load(third, 1.0, start=None) as lease:
                assert len(lease) == 3
            with await one.match(third) as lease:
                assert len(lease) == 3

    asyncio.run(work())
    for hashes in (first, second, third):
        assert told(space.lineage(hashes)) == truth(hashes)


# The engine's half


def expected(*sequences: Sequence[int]) -> dict[bytes, tuple[bytes, int]]:
    """The lineage of every block of sequences of the small layout, partly filled last ones included."""
    found: dict[bytes, tuple[bytes, int]] = {}
    for tokens in sequences:
        array = np.array(tokens, dtype=np.int32)
        hashes = hash_blocks(array, SMALL.block_size, STORE_ROOT)
        if tail := len(array) % SMALL.block_size:
            hashes.append(hash_partial(array[-tail:], hashes[-1] if hashes else STORE_ROOT))
        found.update(zip(hashes, truth(hashes), strict=True))
    return found


def converse(one: Engine) -> list[list[int]]:
    """A prompt, a fork of it that goes another way, and one that shares a beginning with it; all asleep."""
    store = one.store
    row = one.run(PROMPT).row
    other = store.fork(row)
    one.compute(other, np.array([7, 8, 9], dtype=np.int32))
    for token in (1, 2, 3):
        store.reserve(np.array([row]), 1)
        store.append(np.array([row]), np.array([token], dtype=np.int32))
    shared = np.concatenate([PROMPT[:8], np.array([50, 51, 52, 53, 54], dtype=np.int32)])
    third = one.run(shared)
    assert third.length == 8
    for each in (row, other, third.row):
        store.sleep(each)
    store.flush()
    store.poll()
    one.check()
    return [[*PROMPT.tolist(), 1, 2, 3], [*PROMPT.tolist(), 7, 8, 9], shared.tolist()]


def check_pool(store: TieredStore, of: dict[bytes, tuple[bytes, int]]) -> None:
    """The device tier knows the lineage of every block that can be found there."""
    ids = np.array(list(store.pool.index.values()), dtype=np.int32)
    assert dict(zip(store.pool.index, told(store.pool.lineage_of(ids)), strict=True)) == {
        name: of[name] for name in store.pool.index
    }


def test_an_engine_tells_the_lineage_of_all_its_blocks() -> None:
    one = Engine(device_blocks=24, extents=4, cold=None)
    of = expected(*converse(one))
    assert set(one.store.pool.index) == set(of)
    check_pool(one.store, of)
    assert one.host is not None
    space = one.host.space(SMALL)
    assert dict(zip(of, told(space.lineage(list(of))), strict=True)) == of
    deepest = max(of, key=lambda name: of[name][1])
    assert [of[name][1] for name in space.chain_of(deepest)] == list(range(1, of[deepest][1] + 1))
    one.store.close()
    one.host.close()


def test_what_was_promoted_and_lost_below_is_written_back_with_its_lineage() -> None:
    one = Engine(device_blocks=24, extents=4, cold=None)
    row = one.run(PROMPT).row
    of = expected(PROMPT.tolist())
    sleeping = one.store.sleep(row)
    one.store.flush()
    one.store.evict(24)
    assert not one.store.pool.index
    row = one.store.wake(sleeping).row
    assert one.store.promote(row, 2) == 2
    one.store.poll()
    install = one.store.start_install(np.array([row]), 1, np.array([row]))
    assert install is not None
    one.store.finish_install()
    check_pool(one.store, of)
    assert len(one.store.pool.index) == 3
    one.store.poll()
    assert one.host is not None
    space = one.host.space(SMALL)
    one.store.close_row(row)
    one.store.poll()
    space.evict(16)
    assert told(space.lineage(list(of))) == [UNKNOWN] * len(of)
    one.store.evict(24)
    full = list(of)[:3]
    assert told(space.lineage(full)) == [of[name] for name in full]
    one.check()
    one.store.close()
    one.host.close()


def test_what_an_engine_brings_up_from_the_cold_tier_has_its_lineage(tmp_path: Path) -> None:
    one = Engine(device_blocks=24, extents=4, cold=TroubledDisk(tmp_path))
    long = [*PROMPT.tolist(), *range(40)]
    one.store.sleep(one.run(PROMPT).row)
    one.store.close_row(one.run(np.array(long, dtype=np.int32)).row)
    of = expected(PROMPT.tolist(), long)
    one.store.flush()
    assert one.host is not None
    assert one.host.flush() == 0
    space = one.host.space(SMALL)
    full = [name for name in of if told(space.lineage([name])) != [UNKNOWN]]
    one.store.evict(24)
    one.store.poll()
    space.evict(64)
    # The prompt goes over a partly filled block that was kept: in the list to be loaded, not in the chain.
    prompt = one.store.name_prompt(np.array([*long, 1], dtype=np.int32), partial_at=len(PROMPT))
    load = one.store.start_load(prompt)
    assert load is not None
    assert load.wait(20.0)
    for name, known in zip(full, told(space.lineage(full)), strict=True):
        assert known in (of[name], UNKNOWN)
    opened = one.store.open_named(prompt, cold_deadline=20.0)
    load.release()
    assert opened.length >= 48
    hashes = hash_blocks(np.array(long, dtype=np.int32), SMALL.block_size, STORE_ROOT)
    assert told(space.lineage(hashes)) == truth(hashes)
    one.check()
    one.store.close()
    one.host.close()


def test_an_engine_on_a_sidecar_tells_the_lineage_of_all_its_blocks(
    serving: ServeProcess, arena: Path
) -> None:
    with attached(serving.path, device_blocks=24) as one:
        of = expected(*converse(one))
        check_pool(one.store, of)
        one.store.evict(24)
        woken = one.run(PROMPT)
        assert woken.host == 12
        one.store.close_row(woken.row)
        one.store.poll()
    serving.kill()
    with HostStore(HOST, arena=ArenaFile(arena, keep=True)) as host:
        space = host.space(SMALL)
        space.restore(np.zeros(space.capacity, np.int32), np.zeros(space.capacity, np.bool_))
        assert dict(zip(of, told(space.lineage(list(of))), strict=True)) == of
        assert space.hits(list(of)).max() >= 1
        host.check_integrity()
