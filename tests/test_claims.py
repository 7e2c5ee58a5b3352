"""What clients hold: the sidecar's books and the store's agree after any calls, and all can be given back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpager.api.claims import Claims
from kvpager.api.groups import Group
from kvpager.kvstore.handles import ReserveStatus
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.space import HostSpace
from kvpager.tests.raw_client import LAYOUT, names
from kvpager.tiers.errors import ConfigError, ServiceUnavailableError

BLOCKS = 8
CLIENTS = (bytes(16), b"a" * 16, b"b" * 16)


@pytest.fixture(scope="module")
def host() -> Iterator[HostStore]:
    with HostStore(1 << 20, extent_bytes=1 << 20) as store:
        store.arena.wait_ready()
        yield store


class Books:
    """Two groups of three clients each, driven as `Answers` does, and a model of who holds what."""

    def __init__(self, host: HostStore) -> None:
        self.host = host
        self.space: HostSpace = host.space(LAYOUT)
        self.groups = [Group(bytes([at]) * 16, 0) for at in range(2)]
        self.leases: dict[tuple[int, bytes, int], int] = {}
        self.reserved: dict[int, tuple[int, bytes]] = {}

    def claims(self, group: int, client: bytes) -> Claims:
        return self.groups[group].claims(self.space, client)

    def generations(self, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        return self.space._records.generations[slots]

    def match(self, group: int, client: bytes, first: int, count: int) -> None:
        lease = self.space.match(names(first, count))
        self.claims(group, client).add_leases(lease.slots, lease.generations)
        for slot in lease.slots.tolist():
            self.leases[group, client, slot] = self.leases.get((group, client, slot), 0) + 1

    def reserve(self, group: int, client: bytes, first: int, count: int) -> None:
        found = self.space.reserve(names(first, count))
        new = found.status == ReserveStatus.NEW
        self.claims(group, client).add_reservations(found.slots[new], found.generations[new])
        self.reserved |= dict.fromkeys(found.slots[new].tolist(), (group, client))

    def release(self, group: int, client: bytes, first: int, count: int) -> None:
        slots = np.arange(first, first + count, dtype=np.int32)
        good = self.groups[group].take_leases(self.space, client, slots, self.generations(slots))
        self.space.release(slots[good], self.generations(slots[good]))
        for slot, taken in zip(slots.tolist(), good.tolist(), strict=True):
            holders = [who for who in (client, *CLIENTS) if self.leases.get((group, who, slot))]
            assert taken == bool(holders)
            if taken:
                self.leases[group, holders[0], slot] -= 1

    def end(self, commits: bool, group: int, client: bytes, first: int, count: int) -> None:
        slots = np.arange(first, first + count, dtype=np.int32)
        good = self.groups[group].take_reservations(self.space, client, slots, self.generations(slots))
        assert good.tolist() == [self.reserved.get(slot, (None,))[0] == group for slot in slots.tolist()]
        (self.space.commit if commits else self.space.abort)(slots[good], self.generations(slots[good]))
        for slot in slots[good].tolist():
            del self.reserved[slot]

    def agree(self, group: int, client: bytes, first: int, count: int, leases: int) -> None:
        """The client says that it holds so many leases of each of these slots, or has reserved them."""
        slots = np.arange(first, first + count, dtype=np.int32)
        committed = set(self.space._records.index.slots().tolist())
        mine = [slot for slot, who in self.reserved.items() if who == (group, client)]
        counts = np.array([0 if slot in self.reserved else leases for slot in slots.tolist()], np.int32)
        marks = self.claims(group, client).agree(slots, self.generations(slots), counts)
        for slot, mark, asked in zip(slots.tolist(), marks.tolist(), counts.tolist(), strict=True):
            assert mark == (slot in committed if asked else slot in mine)
        for slot in mine:
            if slot not in slots:
                del self.reserved[slot]
        for key in [key for key in self.leases if key[:2] == (group, client)]:
            del self.leases[key]
        for slot, asked in zip(slots.tolist(), counts.tolist(), strict=True):
            if asked and slot in committed:
                self.leases[group, client, slot] = asked

    def check(self) -> None:
        self.host.check_integrity()
        wanted = np.zeros(self.space.capacity, np.int32)
        for (_, _, slot), count in self.leases.items():
            wanted[slot] += count
        assert np.array_equal(self.space._records.leases, wanted)
        assert sorted(self.space._records.pending.values()) == sorted(self.reserved)
        for at, group in enumerate(self.groups):
            assert group.leased == sum(count for key, count in self.leases.items() if key[0] == at)
            assert group.reserved == sum(who[0] == at for who in self.reserved.values())

    def close(self) -> None:
        for group in self.groups:
            for held in group.take_all():
                held.give_back()
        self.leases.clear()
        self.reserved.clear()
        self.check()
        self.space.evict(self.space.capacity)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["match", "reserve", "release", "commit", "abort", "agree", "evict"]),
        st.integers(0, 1),
        st.sampled_from(CLIENTS),
        st.integers(0, BLOCKS - 1),
        st.integers(0, BLOCKS),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_books_agree_after_any_calls(host: HostStore, steps: list[tuple[str, int, bytes, int, int]]) -> None:
    books = Books(host)
    try:
        for what, group, client, first, count in steps:
            arguments = group, client, first, count
            if what in ("commit", "abort"):
                books.end(what == "commit", *arguments)
            elif what == "agree":
                books.agree(*arguments, 1 + first % 3)
            elif what == "evict":
                books.space.evict(count)
            else:
                getattr(books, what)(*arguments)
            books.check()
    finally:
        books.close()


def test_a_handle_that_is_told_twice_counts_once(host: HostStore) -> None:
    books = Books(host)
    books.reserve(0, CLIENTS[1], 0, 2)
    slots = np.array(sorted(books.reserved), np.int32)
    assert books.groups[0].take_reservations(books.space, CLIENTS[2], slots, books.generations(slots)).all()
    books.space.commit(slots, books.generations(slots))
    books.reserved.clear()
    books.match(0, CLIENTS[1], 0, 2)
    books.match(0, CLIENTS[2], 0, 2)
    twice = np.concatenate([slots, slots])
    good = books.groups[0].take_leases(books.space, CLIENTS[1], twice, books.generations(twice))
    assert good.tolist() == [True, True, False, False]
    books.space.release(slots, books.generations(slots))
    assert books.groups[0].leased == 2
    books.leases = {(0, CLIENTS[2], slot): 1 for slot in slots.tolist()}
    books.check()
    books.close()


def test_arrays_that_do_not_fit_together_are_refused(host: HostStore) -> None:
    claims = Claims(host.space(LAYOUT))
    slots, generations = np.zeros(2, np.int32), np.zeros(1, np.int64)
    for call in (claims.take_leases, claims.take_reservations):
        with pytest.raises(ConfigError, match="generations: must be one for each of 2 slots, got 1"):
            call(slots, generations)
    with pytest.raises(ConfigError, match="counts: must be one for each"):
        claims.agree(slots, slots.astype(np.int64), slots[:1])
    with pytest.raises(ConfigError, match="counts: must be from 0"):
        claims.agree(slots, slots.astype(np.int64), slots - 1)


def test_a_group_that_has_ended_gets_nothing(host: HostStore) -> None:
    group = Group(bytes(16), 0)
    assert group.take_all() == []
    with pytest.raises(ServiceUnavailableError, match="are gone"):
        group.claims(host.space(LAYOUT), bytes(16))
