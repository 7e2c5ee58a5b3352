from __future__ import annotations

import numpy as np
from kvpager.api.holdings import Handles, Holdings


def handles(*pairs: tuple[int, int]) -> Handles:
    slots, generations = zip(*pairs, strict=True) if pairs else ((), ())
    return Handles(np.array(slots, np.int32), np.array(generations, np.int64))


def pairs(of: Handles) -> list[tuple[int, int]]:
    return list(zip(of.slots.tolist(), of.generations.tolist(), strict=True))


def test_leases_are_counted_and_late_releases_are_not() -> None:
    held = Holdings(8)
    held.add_leases(handles((1, 5), (2, 6)))
    held.add_leases(handles((1, 5)))
    assert held.leases == 3
    assert held.counts(handles((1, 5), (1, 4), (3, 0))).tolist() == [2, 0, 0]
    assert held.take_leases(handles((1, 5), (2, 7), (3, 0))).tolist() == [True, False, False]
    assert held.take_leases(handles((1, 5))).all()
    assert not held.take_leases(handles((1, 5))).any()
    assert (held.leases, held.empty) == (1, False)
    assert held.take_leases(handles((2, 6))).all()
    assert held.empty


def test_a_slot_that_is_named_twice_is_told_in_two_rounds() -> None:
    twice = handles((1, 5), (2, 6), (1, 5), (3, 7), (1, 5))
    assert [pairs(one) for one in twice.rounds()] == [[(1, 5), (2, 6), (3, 7)], [(1, 5)], [(1, 5)]]
    assert list(handles().rounds()) == []


def test_a_reservation_is_committed_once() -> None:
    held = Holdings(8)
    held.add_reservations(handles((1, 5), (2, 6)))
    assert held.start_commit(handles((1, 5), (2, 7))).tolist() == [True, False]
    assert not held.start_commit(handles((1, 5))).any()
    assert held.committing(handles((1, 5), (2, 6))).tolist() == [True, False]
    assert held.end_writing(handles((1, 5), (2, 6))).all()
    assert not held.end_writing(handles((1, 5), (2, 6))).any()
    assert held.empty


def test_a_lease_on_a_slot_is_an_answer_to_its_commit() -> None:
    held = Holdings(8)
    held.add_reservations(handles((1, 5)))
    held.start_commit(handles((1, 5)))
    held.add_leases(handles((1, 5), (1, 5)))
    assert (held.leases, held.reservations) == (2, 0)
    assert held.claim().counts.tolist() == [2]


def test_what_changed_while_it_was_claimed_is_said_afterwards() -> None:
    held = Holdings(16)
    held.add_leases(handles((1, 5), (2, 5), (3, 5)))
    for _ in range(2):
        held.add_leases(handles((1, 5)))
    held.add_reservations(handles((8, 5), (9, 5), (10, 5), (11, 5), (12, 5)))
    held.start_commit(handles((9, 5), (11, 5)))
    claimed = held.claim()
    assert pairs(claimed.handles) == [(slot, 5) for slot in (1, 2, 3, 8, 9, 10, 11, 12)]
    assert claimed.counts.tolist() == [3, 1, 1, 0, 0, 0, 0, 0]
    for _ in range(2):
        held.take_leases(handles((1, 5)))
    held.take_leases(handles((2, 5)))
    held.end_writing(handles((10, 5)))
    # The lease on 3 and the reservation of 8 are gone; of 11 nobody knows whether it was committed.
    good = np.array([True, True, False, False, True, True, False, True])
    amends = held.settle(claimed, good)
    assert pairs(amends.lost.handles) == [(3, 5), (8, 5)]
    assert amends.lost.counts.tolist() == [1, 0]
    assert [pairs(one) for one in amends.released] == [[(1, 5), (2, 5)], [(1, 5)]]
    assert pairs(amends.aborted) == [(10, 5)]
    assert pairs(amends.committed) == [(9, 5)]
    assert (held.leases, held.reservations) == (1, 2)
    assert not held.take_leases(handles((3, 5))).any()
    assert held.take_leases(handles((1, 5))).all()
    assert held.end_writing(handles((9, 5), (12, 5))).all()
    assert held.empty
