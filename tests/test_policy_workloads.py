"""Workloads that are hard on an eviction policy, on real stores: a scan, a loop, a flood, all alike, none."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.lineage import ChainPlace, Lineage
from kvpager.kvstore.policy import Retention
from kvpager.kvstore.space import HostSpace
from kvpager.kvstore.store import TieredStore
from kvpager.tests.raw_client import LAYOUT
from kvpager.tiers.errors import ConfigError

BLOCKS = 256
POLICIES = ("cost", "lru", "s3fifo")


@contextmanager
def store(policy: str, quotas: dict[str, int] | None = None) -> Iterator[HostStore]:
    size = BLOCKS * LAYOUT.block_bytes
    with HostStore(size, policy=policy, extent_bytes=size // 16, quotas=quotas) as host:
        host.arena.wait_ready()
        yield host


def chain(name: object, length: int) -> list[bytes]:
    return [hashlib.blake2b(f"{name} {at}".encode(), digest_size=16).digest() for at in range(length)]


def serve(space: HostSpace, hashes: list[bytes]) -> int:
    """What an engine does for a prompt: how many of its blocks were found."""
    with space.match(hashes) as lease:
        found = len(lease)
        rest = hashes[found:]
        lineage = Lineage.of_chain(rest, ChainPlace.at(hashes, found))
        with space.reserve(rest, lineage=lineage) as reservation:
            reservation.commit()
        return found


@pytest.mark.parametrize("policy", POLICIES)
def test_a_document_that_is_read_once_does_not_flush_the_chats(policy: str) -> None:
    with store(policy) as host:
        space = host.space(LAYOUT)
        chats = [chain(f"chat {at}", 24) for at in range(8)]
        # Each turn finds what the one before left, and adds to it.
        for length in (6, 12, 18, 24):
            for chat in chats:
                serve(space, chat[:length])
        for chat in chats:
            serve(space, chat)
        document = chain("document", 2 * BLOCKS)
        for length in range(32, 2 * BLOCKS + 1, 32):
            serve(space, document[:length][-32:])
            host.check_integrity()
        kept = [serve(space, chat) for chat in chats]
        if policy == "cost":
            # All but what went before there were more newcomers than may be.
            assert min(kept) >= 18
            assert sum(kept) >= 8 * 22
        else:
            # All that was found twice and more.
            assert kept == [18 if policy == "s3fifo" else 0] * 8


@pytest.mark.parametrize("policy", POLICIES)
def test_of_a_loop_that_is_larger_than_the_tier_a_part_is_found_but_by_lru(policy: str) -> None:
    with store(policy) as host:
        space = host.space(LAYOUT)
        prompts = [chain(at, 8) for at in range(BLOCKS // 8 + 8)]
        found = [sum(serve(space, prompt) for prompt in prompts) for _ in range(12)]
        host.check_integrity()
        share = sum(found[4:]) / (8 * 8 * len(prompts))
        # No policy finds more than 0.8: so many of the blocks there is room for.
        if policy == "lru":
            assert share == 0
        else:
            assert 0.3 < share <= 0.8


@pytest.mark.parametrize("policy", POLICIES)
def test_prompts_that_nobody_sends_again_come_and_go(policy: str) -> None:
    with store(policy) as host:
        space = host.space(LAYOUT)
        assert sum(serve(space, chain(at, 1 + at % 40)) for at in range(200)) == 0
        host.check_integrity()
        assert space.resident <= BLOCKS
        assert host.stats.evicted + space.resident == host.stats.committed


@pytest.mark.parametrize("policy", POLICIES)
def test_what_all_prompts_begin_with_stays(policy: str) -> None:
    with store(policy) as host:
        space = host.space(LAYOUT)
        shared = chain("instructions", 64)
        found = [serve(space, shared + chain(at, 24)) for at in range(60)]
        host.check_integrity()
        assert found == [0] + [64] * 59


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tenant_that_floods_the_tier_takes_nothing_of_another_within_its_quota(policy: str) -> None:
    quotas = {"calm": BLOCKS // 4 * LAYOUT.block_bytes, "loud": BLOCKS // 4 * 3 * LAYOUT.block_bytes}
    with store(policy, quotas) as host:
        calm, loud = (host.space(LAYOUT, tenant=name) for name in ("calm", "loud"))
        chats = [chain(f"chat {at}", 8) for at in range(6)]
        for chat in chats:
            serve(calm, chat)
        for at in range(100):
            serve(loud, chain(f"flood {at}", 32))
            tenants = host.tenants()
            assert all(tenants[name]["bytes"] <= quotas[name] for name in quotas)
        assert [serve(calm, chat) for chat in chats] == [8] * 6
        host.check_integrity()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_leased_or_pinned_is_no_victim_whatever_comes(policy: str) -> None:
    with store(policy) as host:
        space = host.space(LAYOUT)
        leased, pinned = chain("leased", 40), chain("pinned", 40)
        for one in (leased, pinned):
            serve(space, one)
        space.pin(pinned)
        with space.match(leased):
            for at in range(60):
                serve(space, chain(at, 30))
                host.check_integrity()
            idle = space.resident - 80
            assert space.evict(10 * BLOCKS) == idle
            assert space.resident == 80
            assert serve(space, pinned) == 40
        host.check_integrity()


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_two_stores_that_are_told_the_same_keep_the_same(policy: str) -> None:
    rng = np.random.default_rng(3)
    asked = [chain(int(at), 4 + int(at) % 20) for at in rng.zipf(1.3, 150) % 60]
    kept = []
    for _ in range(2):
        with store(policy) as host:
            space = host.space(LAYOUT)
            kept.append([serve(space, one) for one in asked])
    assert kept[0] == kept[1]


def test_advice_of_an_engine_reaches_its_device_tier_and_host_memory() -> None:
    with HostStore(64 * LAYOUT.block_bytes, policy="s3fifo") as host:
        tiered = TieredStore(LAYOUT, 8, root=bytes(16), host=host, policy="s3fifo")
        size = LAYOUT.block_size
        rows = [tiered.open(np.arange(size, dtype=np.int32) + at * size) for at in range(3)]
        for at, opened in enumerate(rows):
            one = np.array([opened.row])
            tiered.reserve(one, size)
            tiered.advance(opened.row, np.arange(size, dtype=np.int32) + at * size)
        slept = [tiered.sleep(opened.row) for opened in rows]
        tiered.flush()
        advice = Retention(will_return=30.0)
        assert tiered.retain(slept[1].hashes, advice) == 1
        assert tiered.retain([], advice) == 0
        assert tiered.evict(2) == 2
        assert [name in tiered.pool.index for one in slept for name in one.hashes] == [False, True, False]
        assert host.stats.hinted_wanted == 1
        with pytest.raises(ConfigError, match="retention"):
            tiered.retain(slept[1].hashes, None)  # type: ignore[arg-type]
        tiered.check_integrity()
        tiered.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_not_written_or_is_purged_while_in_use_leaves_no_trace(policy: str) -> None:
    with store(policy) as host:
        space = host.space(LAYOUT)
        space.reserve(chain("aborted", 4)).abort()
        host.check_integrity()
        serve(space, chain("purged", 4))
        with space.match(chain("purged", 4)):
            space.purge(chain("purged", 4))
        host.check_integrity()
        assert space.resident == 0
