"""Slots and the device arena."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kvpager.tiers.arena import DeviceArena, SlotAllocator
from kvpager.tiers.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    IntegrityError,
    MemoryUnavailableError,
)


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


class TestSlotAllocator:
    def test_fresh_slots_come_lowest_first(self) -> None:
        allocator = SlotAllocator(8)
        first = allocator.allocate(3)
        assert first.dtype == np.int32
        assert first.tolist() == [0, 1, 2]
        assert allocator.allocate(2).tolist() == [3, 4]
        assert (allocator.free_count, allocator.capacity) == (3, 8)

    def test_a_batch_that_was_freed_comes_back_in_its_order(self) -> None:
        allocator = SlotAllocator(8)
        allocator.allocate(8)
        allocator.free(slots(4, 5, 6, 7))
        assert allocator.allocate(4).tolist() == [4, 5, 6, 7]

    def test_what_was_allocated_is_the_callers_to_keep(self) -> None:
        allocator = SlotAllocator(4)
        mine = allocator.allocate(2)
        allocator.free(mine)
        allocator.allocate(4)
        assert mine.tolist() == [0, 1]

    def test_too_large_a_batch_takes_nothing(self) -> None:
        allocator = SlotAllocator(4)
        allocator.allocate(2)
        with pytest.raises(CapacityError, match="3 slots were asked for, 2 of 4 are free"):
            allocator.allocate(3)
        assert allocator.free_count == 2
        allocator.check_integrity()

    def test_an_empty_batch_is_nothing(self) -> None:
        allocator = SlotAllocator()
        assert allocator.allocate(0).size == 0
        allocator.free(slots())
        allocator.check_integrity()

    @pytest.mark.parametrize(
        ("batch", "message"),
        [
            (slots(1, 3), "slot 3 was freed but is free already"),
            (slots(1, 4), "slot 4 was freed but does not exist"),
            (slots(1, -1), "slot -1 was freed but does not exist"),
            (slots(1, 0, 1), "slot 1 was freed twice in one batch"),
            (slots(0, 1, 2, 0, 1, 2), "slot 0 was freed twice in one batch"),
        ],
    )
    def test_a_wrong_free_is_refused_whole(self, batch: np.ndarray, message: str) -> None:
        allocator = SlotAllocator(4)
        allocator.allocate(3)
        with pytest.raises(IntegrityError, match=message):
            allocator.free(batch)
        assert allocator.free_count == 1
        assert not allocator.is_free(slots(0, 1, 2)).any()
        allocator.check_integrity()

    def test_ranges_may_be_sparse(self) -> None:
        allocator = SlotAllocator()
        allocator.add(100, 4)
        allocator.add(7, 2)
        assert allocator.capacity == 6
        assert allocator.is_free(slots(7, 8, 9, 99, 100, 103, 104, -1, 10_000)).tolist() == [
            True,
            True,
            False,
            False,
            True,
            True,
            False,
            False,
            False,
        ]
        with pytest.raises(IntegrityError, match="slot 50 was freed but does not exist"):
            allocator.free(slots(50))
        assert sorted(allocator.allocate(6).tolist()) == [7, 8, 100, 101, 102, 103]

    def test_of_a_range_that_is_added_some_may_be_taken_already(self) -> None:
        allocator = SlotAllocator(2)
        allocator.add(4, 4, taken=np.array([True, False, False, True]))
        allocator.check_integrity()
        assert (allocator.free_count, allocator.capacity) == (4, 6)
        assert allocator.is_free(slots(4, 5, 6, 7)).tolist() == [False, True, True, False]
        assert allocator.allocate(4).tolist() == [5, 6, 0, 1]
        allocator.free(slots(4, 7, 0, 1, 5, 6))
        allocator.check_integrity()

    def test_a_range_can_be_added_once_only(self) -> None:
        allocator = SlotAllocator(4)
        with pytest.raises(IntegrityError, match="some exist already"):
            allocator.add(3, 2)
        assert allocator.capacity == 4
        allocator.check_integrity()

    def test_a_range_in_use_is_not_removed(self) -> None:
        allocator = SlotAllocator(8)
        allocator.allocate(1)
        for first, count in ((0, 4), (6, 4)):
            with pytest.raises(IntegrityError, match="not all of them are free"):
                allocator.remove(first, count)
        allocator.remove(4, 4)
        assert (allocator.free_count, allocator.capacity) == (3, 4)
        assert sorted(allocator.allocate(3).tolist()) == [1, 2, 3]
        allocator.check_integrity()

    @pytest.mark.parametrize(("first", "count"), [(-1, 2), (0, -1), (2**31 - 1, 2)])
    def test_ranges_outside_int32_are_refused(self, first: int, count: int) -> None:
        allocator = SlotAllocator()
        with pytest.raises(ConfigError, match=r"first|count"):
            allocator.add(first, count)
        with pytest.raises(ConfigError, match=r"first|count"):
            allocator.remove(first, count)

    def test_negative_numbers_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="num_slots"):
            SlotAllocator(-1)
        with pytest.raises(ConfigError, match="n: must be an integer of at least 0"):
            SlotAllocator(4).allocate(-1)


class AllocatorAgainstSets(RuleBasedStateMachine):
    """Random calls against two plain sets."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlotAllocator()
        self.free: set[int] = set()
        self.taken: set[int] = set()

    @rule(extent=st.integers(0, 9))
    def add_or_remove_an_extent(self, extent: int) -> None:
        members = set(range(extent * 7, extent * 7 + 7))
        if not members & (self.free | self.taken):
            self.allocator.add(extent * 7, 7)
            self.free |= members
        elif members <= self.free:
            self.allocator.remove(extent * 7, 7)
            self.free -= members
        else:
            with pytest.raises(IntegrityError):
                self.allocator.remove(extent * 7, 7)

    @rule(n=st.integers(0, 12))
    def allocate(self, n: int) -> None:
        if n > len(self.free):
            with pytest.raises(CapacityError):
                self.allocator.allocate(n)
            return
        got = self.allocator.allocate(n).tolist()
        assert len(set(got)) == n
        assert set(got) <= self.free
        self.free -= set(got)
        self.taken |= set(got)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        batch = data.draw(st.lists(st.sampled_from(sorted(self.taken)), unique=True))
        self.allocator.free(slots(*batch))
        self.taken -= set(batch)
        self.free |= set(batch)

    @rule(batch=st.lists(st.integers(-3, 80), min_size=1, max_size=6))
    def give_back_anything(self, batch: list[int]) -> None:
        if set(batch) <= self.taken and len(set(batch)) == len(batch):
            return
        with pytest.raises(IntegrityError):
            self.allocator.free(slots(*batch))

    @invariant()
    def agrees(self) -> None:
        self.allocator.check_integrity()
        assert self.allocator.free_count == len(self.free)
        assert self.allocator.capacity == len(self.free | self.taken)
        everything = np.arange(80, dtype=np.int32)
        assert set(everything[self.allocator.is_free(everything)].tolist()) == self.free


TestAllocatorAgainstSets = AllocatorAgainstSets.TestCase
TestAllocatorAgainstSets.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class TestDeviceArena:
    def test_addresses_and_slots_are_each_others_inverse(self) -> None:
        arena = DeviceArena(384, 10)
        every = np.arange(10, dtype=np.int32)
        addresses = arena.addresses(every)
        assert addresses.dtype == np.int64
        assert addresses[0] == arena.base
        assert np.diff(addresses).tolist() == [384] * 9
        tagged = addresses | 0b1010101
        assert arena.slots_at(tagged).dtype == np.int32
        assert np.array_equal(arena.slots_at(tagged), every)
        arena.close()

    def test_other_addresses_are_told_apart(self) -> None:
        arena = DeviceArena(256, 4)
        inside = np.array([arena.base, arena.base + 4 * 256 - 1], np.int64)
        outside = np.array([arena.base - 1, arena.base + 4 * 256], np.int64)
        assert arena.contains(inside).tolist() == [True, True]
        assert arena.contains(outside).tolist() == [False, False]
        for wrong in (arena.base - 256, arena.base + 4 * 256, arena.base + 128):
            with pytest.raises(IntegrityError, match="not that of a slot"):
                arena.slots_at(np.array([arena.base, wrong], np.int64))
        arena.close()

    def test_host_memory_stands_in_at_page_alignment(self) -> None:
        arena = DeviceArena(128, 3)
        assert arena.device == "cpu"
        assert arena.base % 4096 == 0
        assert (arena.num_slots, arena.slot_bytes, arena.slots.capacity) == (3, 128, 3)
        assert arena.slab.shape == (3, 128)
        assert arena.slab.data_ptr() == arena.base
        arena.close()

    def test_a_closed_arena_lends_no_memory(self) -> None:
        arena = DeviceArena(128, 3)
        arena.close()
        arena.close()
        with pytest.raises(ClosedError):
            _ = arena.slab

    @pytest.mark.parametrize("block_bytes", [0, -128, 100, 4095])
    def test_block_bytes_are_a_multiple_of_128(self, block_bytes: int) -> None:
        with pytest.raises(ConfigError, match=r"block_bytes: must be .* 128"):
            DeviceArena(block_bytes, 4)

    def test_wrong_settings_are_named(self) -> None:
        with pytest.raises(ConfigError, match="device_blocks"):
            DeviceArena(128, 0)
        for device in ("tpu9", "meta", "cuda:99"):
            with pytest.raises(ConfigError, match="device: "):
                DeviceArena(128, 1, device)

    def test_want_of_memory_names_the_setting_and_what_there_is(self) -> None:
        with pytest.raises(MemoryUnavailableError, match=r"device_blocks: .* but only .*iB is .* blocks fit"):
            DeviceArena(1 << 30, 1 << 20)
        with pytest.raises(MemoryUnavailableError, match=r"block_size: one block is 1024\.0 TiB"):
            DeviceArena(1 << 50, 1)

    @pytest.mark.gpu
    def test_vram_is_one_slab_of_a_cuda_device(self) -> None:
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("torch finds no CUDA device")
        arena = DeviceArena(1 << 20, 8, "cuda")
        assert arena.device == f"cuda:{torch.cuda.current_device()}"
        assert arena.base % 128 == 0
        assert np.array_equal(arena.slots_at(arena.addresses(np.arange(8, dtype=np.int32))), np.arange(8))
        arena.close()
        with pytest.raises(MemoryUnavailableError, match="device_blocks"):
            DeviceArena(1 << 30, 1 << 20, "cuda:0")


def test_an_arena_that_no_gpu_holds_is_not_opened_to_one() -> None:
    arena = DeviceArena(1024, 4)
    with pytest.raises(ConfigError, match="cpu is not in the memory of a GPU"):
        arena.open_to("cuda:0")
