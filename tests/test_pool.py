from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from kvpager.kvstore.handles import first_generations
from kvpager.kvstore.lineage import Lineage
from kvpager.kvstore.lru_policy import LRUPolicy
from kvpager.kvstore.pool import BlockPool
from kvpager.tiers.arena import SlotAllocator
from kvpager.tiers.errors import CapacityError, IntegrityError


class Fixture:
    def __init__(self, capacity: int) -> None:
        self.gone: list[bytes] = []
        self.pool = BlockPool(SlotAllocator(capacity), LRUPolicy(capacity), self.gone.extend)

    def named(self, *names: bytes) -> npt.NDArray[np.int32]:
        blocks = self.pool.allocate(len(names))
        for block, name in zip(blocks.tolist(), names, strict=True):
            self.pool.publish(np.array([block], dtype=np.int32), [name], Lineage.of_chain([name]))
        return blocks

    def check(self, *held: Sequence[int] | npt.NDArray[np.int32]) -> None:
        counts = np.zeros(self.pool.capacity, dtype=np.int64)
        for blocks in held:
            counts[np.asarray(blocks)] += 1
        self.pool.check_integrity(counts)


def test_a_block_is_free_held_or_cached() -> None:
    fixture = Fixture(4)
    pool = fixture.pool
    blocks = fixture.named(b"a", b"b")
    fixture.check(blocks)
    assert (pool.free, pool.cached, pool.available) == (2, 0, 2)
    pool.drop(blocks)
    fixture.check()
    assert (pool.free, pool.cached, pool.available) == (2, 2, 4)
    pool.hold(pool.match([b"a"]))
    assert (pool.free, pool.cached) == (2, 1)
    fixture.check(blocks[:1])


def test_an_unnamed_block_is_free_as_soon_as_nobody_holds_it() -> None:
    fixture = Fixture(2)
    blocks = fixture.pool.allocate(2)
    fixture.pool.publish(blocks[:1], [b"a"], Lineage.of_chain([b"a"]))
    fixture.pool.drop(blocks)
    assert (fixture.pool.free, fixture.pool.cached) == (1, 1)
    fixture.check()


def test_allocation_evicts_the_coldest_and_tells_their_names() -> None:
    fixture = Fixture(4)
    pool = fixture.pool
    for name in (b"a", b"b", b"c", b"d"):
        pool.drop(fixture.named(name))
    pool.hold(pool.match([b"a"]))
    pool.drop(pool.match([b"a"]))
    blocks = pool.allocate(2)
    assert fixture.gone == [b"b", b"c"]
    assert set(pool.index) == {b"a", b"d"}
    fixture.check(blocks)


def test_of_blocks_dropped_together_the_leaves_of_a_prefix_go_first() -> None:
    fixture = Fixture(3)
    fixture.pool.drop(fixture.named(b"root", b"middle", b"leaf"))
    fixture.pool.allocate(2)
    assert fixture.gone == [b"leaf", b"middle"]


def test_an_allocation_that_does_not_fit_takes_nothing() -> None:
    fixture = Fixture(3)
    held = fixture.named(b"a")
    fixture.pool.drop(fixture.named(b"b"))
    with pytest.raises(CapacityError, match="3 blocks wanted in the device tier, 2 of 3 available"):
        fixture.pool.allocate(3)
    assert fixture.gone == []
    fixture.check(held)


def test_a_match_ends_at_the_first_hole() -> None:
    fixture = Fixture(4)
    blocks = fixture.named(b"a", b"b", b"d")
    assert fixture.pool.match([b"a", b"b", b"c", b"d"]).tolist() == blocks[:2].tolist()
    assert fixture.pool.match([b"a", b"b", b"c", b"d"], 3).tolist() == blocks[2:].tolist()
    assert fixture.pool.match([b"x"]).tolist() == []


def test_a_block_that_was_freed_has_another_generation() -> None:
    fixture = Fixture(1)
    block = fixture.named(b"a")
    remembered = fixture.pool.generations[block].copy()
    fixture.pool.drop(block)
    assert (fixture.pool.generations[block] == remembered).all()
    assert fixture.pool.allocate(1).tolist() == block.tolist()
    assert (fixture.pool.generations[block] != remembered).all()


def test_generations_of_two_stores_never_meet() -> None:
    assert first_generations(1)[0] != first_generations(1)[0]
    assert all(first_generations(1)[0] > 0 for _ in range(100))


def test_a_block_that_is_about_to_change_is_found_no_more_nor_are_its_copies() -> None:
    fixture = Fixture(2)
    block = fixture.named(b"a")
    fixture.pool.host_generations[block] = 5
    fixture.pool.withdraw(int(block[0]))
    assert fixture.pool.match([b"a"]).tolist() == []
    assert fixture.pool.host_generations[block].tolist() == [0]
    assert fixture.gone == [b"a"]
    fixture.check(block)


def test_a_block_that_is_granted_again_knows_no_copy() -> None:
    fixture = Fixture(1)
    block = fixture.named(b"a")
    fixture.pool.host_generations[block] = 5
    fixture.pool.drop(block)
    assert fixture.pool.host_generations[fixture.pool.allocate(1)].tolist() == [0]


def test_chosen_cached_blocks_can_be_evicted_out_of_turn() -> None:
    fixture = Fixture(3)
    for name in (b"a", b"b", b"c"):
        fixture.pool.drop(fixture.named(name))
    fixture.pool.evict(fixture.pool.match([b"b"]))
    assert fixture.gone == [b"b"]
    assert fixture.pool.free == 1
    fixture.check()


@pytest.mark.parametrize("broken", ["refs", "index", "name", "free"])
def test_integrity_names_what_does_not_agree(broken: str) -> None:
    fixture = Fixture(3)
    block = int(fixture.named(b"a")[0])
    if broken == "refs":
        fixture.pool.refs[block] = 2
    elif broken == "index":
        fixture.pool.index[b"x"] = block
    elif broken == "name":
        fixture.pool._hashes[(block + 1) % 3] = b"y"
    else:
        fixture.pool._slots.free(np.array([block], dtype=np.int32))
    with pytest.raises(IntegrityError, match=r"block|hash|named"):
        fixture.check([block])
