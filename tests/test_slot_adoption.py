"""Slot records that outlive their process: wherever it is killed, the next one finds what was meant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpager.kvstore import slots as slots_module
from kvpager.kvstore.policy import EvictionPolicy, Losses, make_policy
from kvpager.kvstore.slot_arrays import SlotArrays, slot_specs
from kvpager.kvstore.slot_lineage import SlotLineage
from kvpager.kvstore.slots import Adopted, SlotRecords
from kvpager.tests.raw_client import names
from kvpager.tiers.errors import ConfigError, IntegrityError
from kvpager.tiers.record_file import ArenaIdentity, RecordFile, Section, SectionKind

PER_EXTENT, EXTENTS = 8, 3
CAPACITY = PER_EXTENT * EXTENTS
SPACE = b"s" * 16
NOBODY = np.zeros(CAPACITY, np.int32), np.zeros(CAPACITY, np.bool_)


class KilledError(Exception):
    """The process ends here."""


class Mortal(np.ndarray[Any, Any]):
    """An array of which the writes are counted by whoever made it, and at one of them the process ends."""

    clock: list[int]

    def __array_finalize__(self, of: Any) -> None:
        self.clock = getattr(of, "clock", [0])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.clock[0] -= 1
        if self.clock[0] == 0:
            slots = np.atleast_1d(np.arange(len(self))[key])
            half = slots[: len(slots) // 2]
            values = np.broadcast_to(np.asarray(value), slots.shape)[: len(half)]
            super().__setitem__(half, values)
            raise KilledError
        super().__setitem__(key, value)


def lru(losses: Losses) -> EvictionPolicy:
    return make_policy("lru", 0, losses=losses)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[RecordFile]:
    made = RecordFile.create(str(tmp_path / "records"), ArenaIdentity(1, 2, 3 << 20, 1 << 20))
    yield made
    made.close()


def arrays_of(section: Section) -> SlotArrays:
    return SlotArrays.recorded(section, CAPACITY, EXTENTS, SPACE)


def records_of(arrays: SlotArrays) -> SlotRecords:
    return SlotRecords(PER_EXTENT, EXTENTS, lru, arrays)


def new_section(file: RecordFile) -> Section:
    section = file.add(SectionKind.SPACE, b"", slot_specs(CAPACITY, EXTENTS))
    arrays_of(section).begin()
    return section


def mortal(arrays: SlotArrays, writes: int) -> SlotArrays:
    """The same arrays, which end the process at a write."""
    clock = [writes]

    def made(array: npt.NDArray[Any]) -> Any:
        view = array.view(Mortal)
        view.clock = clock
        return view

    return SlotArrays(
        made(arrays.generations),
        made(arrays.state),
        made(arrays.hashes),
        made(arrays.pins),
        made(arrays.in_cold),
        made(arrays.used_at),
        made(arrays.owned),
        made(arrays.parents),
        made(arrays.depths),
        made(arrays.hits),
        made(arrays.crcs),  # type: ignore[arg-type]
        arrays.crc,
    )


def adopted(section: Section) -> tuple[SlotRecords, Adopted]:
    records = records_of(arrays_of(section))
    found = records.adopt()
    records.check_integrity()
    return records, found


def grant(records: SlotRecords, first: int, count: int) -> npt.NDArray[np.int32]:
    slots = records.take(count)
    records.reserve(slots, list(names(first, len(slots))))
    return slots


def test_what_was_committed_is_found_and_what_was_reserved_waits_for_its_owner(file: RecordFile) -> None:
    section = new_section(file)
    records = records_of(arrays_of(section))
    records.add_extent(1)
    kept = grant(records, 0, 3)
    records.commit(kept, 7, in_cold=True)
    records.pin(kept[:1])
    waits = grant(records, 10, 2)
    generations = records.generations.copy()
    again, found = adopted(section)
    assert found == Adopted(3, 2, 0, 0)
    assert again.extents == {1}
    assert again.last_use == 7
    assert again.dirty == 3
    again, _ = adopted(section)
    assert again.dirty == 3
    assert again.leases[kept].tolist() == [1, 0, 0]
    assert again.committed(kept, generations[kept]).all()
    assert again.reserved(waits, generations[waits]).all()
    assert not again.restore(NOBODY[0], np.isin(np.arange(CAPACITY), waits[:1])).any()
    again.check_integrity()
    assert again.reserved(waits, generations[waits]).tolist() == [True, False]
    assert again.free == PER_EXTENT - 4


def test_blocks_go_in_the_order_in_which_they_were_used(file: RecordFile) -> None:
    section = new_section(file)
    records = records_of(arrays_of(section))
    records.add_extent(0)
    for now, first in enumerate((30, 10, 20)):
        records.commit(grant(records, first, 2), now, in_cold=False)
    wanted = records.names(records._policy.coldest(6))
    again, _ = adopted(section)
    assert again.names(again._policy.coldest(6)) == wanted


def test_many_extents_are_taken_over_some_at_a_time(
    file: RecordFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots_module, "_TOGETHER", PER_EXTENT)
    section = new_section(file)
    records = records_of(arrays_of(section))
    for extent in (0, 2):
        records.add_extent(extent)
    for now, first in enumerate((30, 10, 20)):
        records.commit(grant(records, first, 4), now, in_cold=False)
    waits = grant(records, 60, 2)
    records.pin(records.resident(names(10, 1)))
    again, found = adopted(section)
    assert found == Adopted(12, 2, 0, 0)
    assert again.extents == {0, 2}
    assert named(again) == named(records)
    assert again.names(again._policy.coldest(11)) == records.names(records._policy.coldest(11))
    assert sorted(again.pending.values()) == waits.tolist()
    assert (again.free, again.lent) == (2, 0)
    assert again.leases[again.resident(names(10, 1))].tolist() == [1]
    arrays = arrays_of(section)
    arrays.hashes[2 * PER_EXTENT] = arrays.hashes[0]
    assert arrays.crcs is not None
    assert arrays.crc is not None
    sealed = arrays.crc.of(arrays.hashes, arrays.generations) ^ arrays.crc.of_state[arrays.state]
    arrays.crcs[2 * PER_EXTENT] = sealed[2 * PER_EXTENT]
    with pytest.raises(IntegrityError, match="two slots hold the same block"):
        records_of(arrays).adopt()


def test_times_that_cannot_be_give_no_order_and_no_trouble(file: RecordFile) -> None:
    section = new_section(file)
    records = records_of(arrays_of(section))
    records.add_extent(0)
    slots = grant(records, 0, 5)
    records.commit(slots, 1, in_cold=False)
    limits = np.iinfo(np.int64)
    arrays_of(section).used_at[slots] = 7, limits.min, 5, limits.max, -1
    again, found = adopted(section)
    assert found == Adopted(5, 0, 0, 0)
    assert again.last_use == limits.max
    # What is told to be that long ago is as old as can be: the highest slot first.
    assert again._policy.coldest(5).tolist() == slots[[4, 2, 1, 0, 3]].tolist()


def named(records: SlotRecords) -> dict[bytes, int]:
    """What the index has: names and slots."""
    slots = records.index.slots()
    return dict(zip(records.names(slots), slots.tolist(), strict=True))


def reserving(records: SlotRecords) -> None:
    grant(records, 100, 5)


def committing(records: SlotRecords) -> None:
    records.commit(np.array(sorted(records.pending.values()), np.int32), 9, in_cold=False)


def aborting(records: SlotRecords) -> None:
    records.abort(np.array(sorted(records.pending.values()), np.int32))


def evicting(records: SlotRecords) -> None:
    records.evict(2, spare_dirty=False)


def removing(records: SlotRecords) -> None:
    old = records.oldest_extent(spare_dirty=False)
    assert old is not None
    records.remove_extent(old.extent)


def adding(records: SlotRecords) -> None:
    records.add_extent(2)


def purging(records: SlotRecords) -> None:
    records.take_leases(np.sort(records.index.slots())[:2])
    records.purge(None)


@pytest.mark.parametrize("change", [reserving, committing, aborting, evicting, removing, adding, purging])
def test_a_process_may_be_killed_at_any_write(
    change: Callable[[SlotRecords], None], file: RecordFile
) -> None:
    for writes in range(1, 100):
        section = new_section(file)
        before = records_of(arrays_of(section))
        before.add_extent(0)
        before.commit(grant(before, 0, 6), 1, in_cold=False)
        before.add_extent(1)
        before.commit(before_held := grant(before, 6, 3), 2, in_cold=False)
        if change is not removing:
            grant(before, 50, 4)
        victim, _ = adopted(section)
        victim._arrays = dying = mortal(victim._arrays, writes)
        victim.generations, victim._state, victim._hashes = dying.generations, dying.state, dying.hashes
        victim.in_cold, victim._used_at, victim._pins = dying.in_cold, dying.used_at, dying.pins
        victim.lineage = SlotLineage(dying)
        told = set(named(victim))
        try:
            change(victim)
            ended = False
        except KilledError:
            ended = True
        granted = before.generations.copy()
        again, found = adopted(section)
        assert found.damaged == 0
        left = set(named(again))
        if change in (evicting, removing, purging):
            assert left <= told
        else:
            assert told <= left
        if change is not committing:
            assert left <= told
        else:
            assert left - told <= set(names(50, 4))
        if change not in (evicting, removing, purging):
            assert again.committed(before_held, granted[before_held]).all()
        assert not again.restore(*NOBODY).any()
        again.check_integrity()
        # Whatever is granted now has a generation that no handle of before has.
        slots = grant(again, 200, again.free)
        assert not again.reserved(slots, granted[slots]).any()
        if not ended:
            return
        file.remove(section)
    raise AssertionError("the change has no end")


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 7), st.integers(0, 12))
def test_a_flipped_bit_is_never_believed(
    tmp_path_factory: pytest.TempPathFactory, at: int, bit: int, slot: int
) -> None:
    path = tmp_path_factory.mktemp("records") / "records"
    file = RecordFile.create(str(path), ArenaIdentity(1, 2, 3 << 20, 1 << 20))
    try:
        section = new_section(file)
        records = records_of(arrays_of(section))
        records.add_extent(0)
        records.add_extent(1)
        held = grant(records, 0, 8)
        records.commit(held, 1, in_cold=False)
        writing = grant(records, 20, 5)
        told = named(records)
        arrays = arrays_of(section)
        field = (arrays.generations, arrays.hashes, arrays.state, arrays.crcs)[at % 4]
        assert field is not None
        field[slot : slot + 1].view(np.uint8)[at % field.itemsize] ^= 1 << bit
        again, found = adopted(section)
        # One slot is lost at most, and nothing is found that was not there.
        assert found.committed + found.reserved >= 12
        assert named(again).items() <= told.items()
        leases = np.zeros(CAPACITY, np.int32)
        leases[held] = 1
        wrong = again.restore(leases, np.isin(np.arange(CAPACITY), writing))
        again.check_integrity()
        assert set(np.flatnonzero(wrong).tolist()) <= {slot}
        # Where its owner may still read or write, nobody else is granted the slot.
        slots = grant(again, 200, again.free)
        assert not np.isin(slots, [*held.tolist(), *writing.tolist()]).any()
        assert again.free_damaged() == len(np.flatnonzero(wrong))
        again.check_integrity()
    finally:
        file.close()


def test_slots_that_are_damaged_stay_so_over_another_kill(file: RecordFile) -> None:
    section = new_section(file)
    records = records_of(arrays_of(section))
    records.add_extent(0)
    slots = grant(records, 0, 4)
    records.commit(slots, 1, in_cold=False)
    crcs = arrays_of(section).crcs
    assert crcs is not None
    crcs[slots[1]] ^= 1
    for _ in range(3):
        again, found = adopted(section)
        assert found == Adopted(3, 0, 0, 1)
        assert again.damaged == 1
        assert again.oldest_extent(spare_dirty=False) is None
    assert again.free_damaged() == 1
    _, found = adopted(section)
    assert found == Adopted(3, 0, 0, 0)


def contradict_extents(arrays: SlotArrays) -> None:
    arrays.owned[0] = False


def contradict_names(arrays: SlotArrays) -> None:
    arrays.hashes[1] = arrays.hashes[0]
    assert arrays.crcs is not None
    assert arrays.crc is not None
    arrays.crcs[:2] = arrays.crc.of(arrays.hashes[:2], arrays.generations[:2]) ^ arrays.crc.of_state[2]


def contradict_pins(arrays: SlotArrays) -> None:
    arrays.pins[0] = -1


def contradict_flags(arrays: SlotArrays) -> None:
    arrays.owned.view(np.uint8)[1] = 7


@pytest.mark.parametrize(
    ("contradict", "said"),
    [
        (contradict_extents, "not their space's"),
        (contradict_names, "two slots hold the same block"),
        (contradict_pins, "pins"),
        (contradict_flags, "extents is damaged"),
    ],
)
def test_records_that_contradict_each_other_are_not_believed(
    contradict: Callable[[SlotArrays], None], said: str, file: RecordFile
) -> None:
    section = new_section(file)
    records = records_of(arrays_of(section))
    records.add_extent(0)
    records.commit(grant(records, 0, 4), 1, in_cold=False)
    contradict(arrays_of(section))
    with pytest.raises(IntegrityError, match=said):
        records_of(arrays_of(section)).adopt()


def test_records_that_go_with_their_process_have_nothing_to_adopt() -> None:
    with pytest.raises(ConfigError, match="go with their process"):
        SlotRecords(PER_EXTENT, EXTENTS, lru).adopt()


def test_what_was_purged_and_is_held_stays_unfound_over_a_kill(file: RecordFile) -> None:
    section = new_section(file)
    records = records_of(arrays_of(section))
    records.add_extent(0)
    committed = grant(records, 0, 4)
    records.commit(committed, 1, in_cold=False)
    records.take_leases(committed[:2])
    records.pin(committed[2:3])
    reserved = grant(records, 10, 2)
    gone = records.purge([*names(0, 4), *names(10, 2), *names(90, 1)])
    assert (gone.freed, gone.leased.tolist(), gone.reserved.tolist()) == (
        2,
        committed[:2].tolist(),
        reserved.tolist(),
    )
    again, found = adopted(section)
    assert found.damaged == 0
    assert not len(again.index)
    assert not again.pending
    leases, holds = np.zeros(again.capacity, np.int32), np.zeros(again.capacity, np.bool_)
    leases[committed[0]] = 1
    holds[reserved[0]] = True
    free = again.free
    assert not again.restore(leases, holds).any()
    again.check_integrity()
    # What nobody holds any more is free; of the rest handles are good, and end.
    assert again.free == free + 2
    held, written = committed[:1], reserved[:1]
    assert again.leased(held, again.generations[held]).all()
    assert not again.committed(held, again.generations[held]).any()
    assert again.reserved(written, again.generations[written]).all()
    assert again.commit(written, 2, in_cold=False) == []
    again.drop_leases(held, 3)
    again.check_integrity()
    assert again.free == PER_EXTENT
