"""The index of names finds what a dictionary finds, however names meet in it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpager.kvstore.name_index import _WIDTH, NAME, NameIndex, Names, name_array
from kvpager.tests.raw_client import names
from kvpager.tiers.errors import IntegrityError

CAPACITY = 96


class Checked:
    """An index beside a dictionary that is told the same.

    Args:
        few: names that are kept in a dictionary.
        multipliers: of the hash; where they are zero names meet.
    """

    def __init__(
        self, capacity: int = CAPACITY, few: int = 0, multipliers: Sequence[int] | None = None
    ) -> None:
        self.named = np.zeros(capacity, dtype=NAME)
        self.index = NameIndex(self.named, few)
        if multipliers is not None:
            self.index._multipliers = np.array(multipliers, dtype=np.uint64)
        self.slots: dict[bytes, int] = {}

    def add(self, some: list[bytes], slots: npt.NDArray[np.int32]) -> None:
        self.named[slots] = name_array(some)
        self.index.add(slots)
        self.slots.update(zip(some, slots.tolist(), strict=True))

    def remove(self, some: list[bytes]) -> None:
        self.index.remove(np.array([self.slots.pop(name) for name in some], np.int32))

    def free(self, count: int) -> npt.NDArray[np.int32]:
        """Slots that are not in."""
        taken = np.zeros(len(self.named), dtype=np.bool_)
        taken[list(self.slots.values())] = True
        return np.flatnonzero(~taken)[:count].astype(np.int32)

    def check(self, asked: list[bytes]) -> None:
        self.index.check_integrity()
        assert len(self.index) == len(self.slots)
        assert sorted(self.index.slots().tolist()) == sorted(self.slots.values())
        slots, found = self.index.find(asked)
        assert found.tolist() == [name in self.slots for name in asked]
        assert slots.tolist() == [self.slots.get(name, 0) for name in asked]
        assert self.index.leading(asked).tolist() == self.leading(asked)

    def leading(self, asked: list[bytes]) -> list[int]:
        found: list[int] = []
        for name in asked:
            if name not in self.slots:
                break
            found.append(self.slots[name])
        return found


MANY = names(0, 4 * CAPACITY)
HASHES = st.sampled_from([None, (0, 0, 0, 0), (0, 0, 0, 1 << 40)])
"""Random ones; all the same; those of names that end alike."""


@settings(max_examples=200, deadline=None)
@given(HASHES, st.sampled_from([0, 20, CAPACITY]), st.data())
def test_it_finds_what_a_dictionary_finds(
    multipliers: Sequence[int] | None, few: int, data: st.DataObject
) -> None:
    both = Checked(few=few, multipliers=multipliers)
    for _ in range(data.draw(st.integers(1, 8), "changes")):
        removes: bool = data.draw(st.booleans(), "removes")
        if removes and both.slots:
            both.remove(data.draw(st.lists(st.sampled_from(sorted(both.slots)), unique=True), "gone"))
        else:
            new = [name for name in MANY if name not in both.slots]
            some = data.draw(st.lists(st.sampled_from(new), unique=True, max_size=64), "new")
            slots = both.free(len(some))
            both.add(some[: len(slots)], slots)
        both.check(data.draw(st.lists(st.sampled_from(MANY), max_size=40), "asked"))
        both.check([*both.slots, *MANY[:8]])


def test_names_of_one_hash_are_all_found_and_a_removed_one_is_not() -> None:
    both = Checked(capacity=4 * _WIDTH, multipliers=[0, 0, 0, 0])
    some = list(names(0, 3 * _WIDTH))
    both.add(some, both.free(len(some)))
    assert len(both.index._plain) == 2 * _WIDTH
    both.check(some)
    both.remove(some[::2])
    both.check(some)
    # Places that came free are taken again; who waited in the dictionary stays there.
    both.add(some[::2], both.free(len(some[::2])))
    both.check(some)


def test_a_slot_that_was_removed_is_not_found_though_it_has_its_name_still() -> None:
    both = Checked()
    some = list(names(0, 8))
    both.add(some, both.free(8))
    both.remove(some)
    assert both.named[:8].tolist() == some
    both.check(some)


def test_few_names_take_no_table_and_many_one_of_twelve_bytes_twice_a_slot() -> None:
    both = Checked(capacity=8192, few=2048)
    some = np.frombuffer(np.random.default_rng(0).bytes(8192 * NAME.itemsize), NAME).tolist()
    both.add(some[:2048], both.free(2048))
    assert both.index._tags.nbytes + both.index._slots.nbytes == 0
    both.check(some[:3000])
    for first in range(2048, 8192, 1024):
        both.add(some[first : first + 1024], both.free(1024))
        both.index.check_integrity()
    assert both.index._tags.nbytes + both.index._slots.nbytes == 2 * 8192 * 6
    assert len(both.index._plain) < 8192 // 20
    both.check(some)
    both.remove(some[:7000])
    both.check(some)


def test_where_many_are_to_come_the_table_is_made_before_them() -> None:
    both = Checked(capacity=4096, few=1000)
    both.add(list(names(0, 10)), both.free(10))
    both.index.make_room(990)
    assert not len(both.index._tags)
    both.index.make_room(991)
    assert len(both.index._tags)
    both.check(list(names(0, 20)))


def test_a_long_prefix_is_found_whole_and_a_short_one_up_to_its_end() -> None:
    both = Checked(capacity=20_000)
    some = list(names(0, 20_000))
    both.add(some, both.free(20_000))
    assert np.array_equal(both.index.leading(some), np.arange(20_000))
    both.remove([some[15_000]])
    assert np.array_equal(both.index.leading(some), np.arange(15_000))
    assert len(both.index.leading([])) == 0


class Counting(NameIndex):
    """Counts the names that are looked at."""

    looked = 0

    def _look(self, names: Names) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int32]]:
        self.looked += len(names)
        return super()._look(names)


def test_little_is_looked_at_behind_the_first_name_that_is_missing() -> None:
    named = name_array(names(0, 100_000)).copy()
    index = Counting(named, few=0)
    index.add(np.arange(1, 1000, dtype=np.int32))
    assert len(index.leading(named.tolist())) == 0
    assert index.looked <= 64
    index.looked = 0
    assert len(index.leading(named[1:].tolist())) == 999
    assert index.looked <= 5 * 1000


def test_names_that_an_adversary_chose_take_no_more_time_than_their_number() -> None:
    both = Checked(capacity=1 << 15, multipliers=[0, 0, 0, 0])
    rounds = 0
    real = both.index._bucket

    def counted(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
        nonlocal rounds
        rounds += len(hashes)
        return real(hashes)

    both.index._bucket = counted  # type: ignore[method-assign]
    some = list(names(0, 1 << 15))
    both.add(some, both.free(1 << 15))
    assert rounds <= 2 * (_WIDTH + 1) * len(some)
    rounds = 0
    both.check(some)
    both.remove(some)
    assert rounds <= 4 * len(some)
    both.check(some[:100])


@pytest.mark.parametrize(("few", "multipliers"), [(0, None), (0, [0, 0, 0, 0]), (10_000, None)])
@pytest.mark.parametrize("at", [0, 20, 5000])
def test_a_name_that_two_slots_have_is_told(few: int, multipliers: list[int] | None, at: int) -> None:
    named = name_array(names(0, 10_000)).copy()
    named[9999] = named[at]
    index = NameIndex(named, few)
    if multipliers is not None:
        index._multipliers = np.array(multipliers, dtype=np.uint64)
    with pytest.raises(IntegrityError, match="two slots hold the same block"):
        index.add(np.arange(10_000, dtype=np.int32))


def test_what_does_not_agree_is_told() -> None:
    both = Checked()
    both.add(list(names(0, 8)), both.free(8))
    both.named[3] = both.named[20]
    with pytest.raises(IntegrityError, match="1 slots are in the index and not found"):
        both.index.check_integrity()
    both.index._placed += 1
    with pytest.raises(IntegrityError, match="9 names are counted"):
        both.index.check_integrity()


def test_an_index_of_no_slots_finds_nothing() -> None:
    index = NameIndex(np.zeros(0, dtype=NAME))
    assert not index.find(names(0, 3))[1].any()
    assert len(index.leading(names(0, 3))) == 0
