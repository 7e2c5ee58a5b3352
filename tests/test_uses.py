"""What comes up from the cold tier, or is leased where it was remembered to be, is used by that, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from kvpager.api.client import connect
from kvpager.kvstore.calls import SpaceCalls
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.policy import Ids
from kvpager.kvstore.s3fifo_policy import S3FIFOPolicy
from kvpager.kvstore.space import HostSpace
from kvpager.kvstore.store import TieredStore
from kvpager.tests.installed_policy import install_policy
from kvpager.tests.raw_client import LAYOUT, Running, names
from kvpager.tiers.cold_disk import DiskColdTier

COUNT = 6
CHAIN = names(0, COUNT)


class Listening(S3FIFOPolicy):
    """Remembers how many blocks each look-up that it was told of found."""

    told: list[int]

    def found(self, ids: Ids) -> None:
        if not hasattr(self, "told"):
            self.told = []
        self.told.append(len(ids))
        super().found(ids)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostStore]:
    """Its cold tier alone has the blocks, but for the first two."""
    install_policy(monkeypatch, tmp_path / "policies", "listening", f"{__name__}:Listening")
    cold = DiskColdTier(tmp_path / "cold", capacity_bytes=64 << 20)
    with HostStore(8 << 20, cold=cold, policy="listening") as made:
        space = made.space(LAYOUT)
        assert space.put(CHAIN, np.zeros((COUNT, LAYOUT.block_bytes), np.uint8), wait=5.0) == COUNT
        made.flush()
        assert space.evict(COUNT) == COUNT
        with space.load(CHAIN[:2], 20.0) as lease:
            assert len(lease) == 2
        told(space).clear()
        yield made
        made.check_integrity()


def told(space: HostSpace) -> list[int]:
    policy = space._records._policy
    assert isinstance(policy, Listening)
    return policy.told


def load(space: SpaceCalls) -> None:
    with space.load(CHAIN, 20.0) as lease:
        assert len(lease) == COUNT


def load_after_a_match(space: SpaceCalls) -> None:
    with space.match(CHAIN) as lease:
        assert len(lease) == 2
    load(space)


def load_ahead_of_a_match(space: SpaceCalls) -> None:
    ahead = space.start_load(CHAIN)
    assert ahead.wait(20.0)
    with space.match(CHAIN) as lease:
        assert len(lease) == COUNT
    ahead.release()


@pytest.mark.parametrize("where", ["in the process", "over a sidecar"])
@pytest.mark.parametrize(
    ("ask", "uses"),
    [(load, [COUNT - 2]), (load_after_a_match, [2, COUNT - 2]), (load_ahead_of_a_match, [COUNT])],
)
def test_a_policy_is_told_once_of_what_came_up(
    host: HostStore, tmp_path: Path, where: str, ask: Callable[[SpaceCalls], None], uses: list[int]
) -> None:
    (own,) = host.spaces
    if where == "in the process":
        ask(own)
    else:
        with Running(tmp_path / "socket", host), connect(tmp_path / "socket", timeout=20.0) as client:
            ask(client.space(LAYOUT))
    assert told(own) == uses
    load(own)
    assert told(own) == uses, "nothing came up: matches tell of what is there"


@pytest.mark.parametrize("where", ["in the process", "over a sidecar"])
def test_a_policy_is_told_of_remembered_slots_whose_lease_is_a_use(
    host: HostStore, tmp_path: Path, where: str
) -> None:
    (own,) = host.spaces
    with ExitStack() as stack:
        space: SpaceCalls = own
        if where == "over a sidecar":
            stack.enter_context(Running(tmp_path / "socket", host))
            space = stack.enter_context(connect(tmp_path / "socket", timeout=20.0)).space(LAYOUT)
        with space.match(CHAIN) as lease:
            slots, generations = lease.slots.copy(), lease.generations.copy()
        told(own).clear()
        for used, uses in ((False, []), (True, [2])):
            assert space.lease(slots, generations, used=used).all()
            space.release(slots, generations)
            assert told(own) == uses


def test_a_sequence_that_wakes_uses_its_blocks(host: HostStore) -> None:
    (own,) = host.spaces
    tokens = np.arange(4 * LAYOUT.block_size, dtype=np.int32)
    store = TieredStore(LAYOUT, 8, root=bytes(16), host=host)
    row = store.open(tokens).row
    store.reserve(np.array([row]), len(tokens))
    store.advance(row, tokens)
    sleeping = store.sleep(row)
    store.flush()
    assert store.evict(8) == 4
    for _ in range(2):
        told(own).clear()
        woken = store.wake(sleeping)
        assert told(own) == [4]
        sleeping = store.sleep(woken.row)
    store.check_integrity()
    store.close()
