"""A tier without bytes: what it tells a policy, in order, and what it may rely on."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from kvpager.kvstore.policy import BlockFacts, EvictionPolicy, Ids

__all__ = ["Tier", "ids"]


def ids(numbers: Iterable[int]) -> Ids:
    """As policies take them."""
    return np.array(list(numbers), dtype=np.int32)


class Tier:
    """What a tier does with a policy, and what it may rely on.

    Args:
        policy: of `capacity` ids.
        capacity: how many blocks there is room for.
        check: prove the books after every call.

    Attributes:
        held: of each name that is here its id.
        leased: of each id how often it is in use; pinned ones too.
    """

    def __init__(self, policy: EvictionPolicy, capacity: int, *, check: bool = True) -> None:
        self.policy = policy
        self.held: dict[int, int] = {}
        self.leased: dict[int, int] = {}
        self.hits = 0
        self.victims: list[int] = []
        """Names, in the order in which they went."""
        self._free = list(range(capacity))[::-1]
        self._parents: dict[int, int] = {}
        self._check = check

    def request(self, chain: list[int]) -> int:
        """Use a chain of names, as a request does; how many of its blocks were found."""
        before = self.hits
        self.drop(self.start(chain))
        self._prove()
        return self.hits - before

    def start(self, chain: list[int]) -> list[int]:
        """The same, until it ends with `drop` of the ids that are returned."""
        found = []
        for name in chain:
            if name not in self.held:
                break
            found.append(self.held[name])
        rest = [name for name in chain[len(found) :] if name not in self.held]
        # What is there beyond a gap is in use while the gap is filled.
        beyond = [self.held[name] for name in chain[len(found) :] if name in self.held]
        places = {name: at for at, name in enumerate(chain)}
        policy = self.policy
        if policy.learns:
            if found:
                policy.found(ids(found))
            if rest:
                policy.missed(self._facts(chain, places, rest))
        self.take(found + beyond)
        self._room_for(len(rest))
        rest = rest[: len(self._free)]
        new = [self._free.pop() for _ in rest]
        if policy.learns and rest:
            policy.admit(ids(new), self._facts(chain, places, rest))
        for name, one in zip(rest, new, strict=True):
            self.held[name] = one
            self._parents[name] = chain[places[name] - 1] if places[name] else 0
            self.leased[one] = 1
        self.hits += len(found)
        self._prove()
        mine = {*found, *beyond, *new}
        return [self.held[name] for name in chain if self.held.get(name) in mine]

    def _facts(self, chain: list[int], places: dict[int, int], names: list[int]) -> BlockFacts:
        at = [places[name] for name in names]
        return BlockFacts(
            np.array(names, np.uint64),
            np.array([chain[one - 1] if one else 0 for one in at], np.uint64),
            np.array(at, np.int32) + 1,
        )

    def _room_for(self, count: int) -> None:
        wanted = count - len(self._free)
        if wanted <= 0:
            return
        expected = self.policy.coldest(wanted).tolist()
        assert self.policy.coldest(wanted).tolist() == expected, "looking at the coldest changes nothing"
        gone = self.policy.evict(wanted).tolist()
        assert gone == expected, "what goes is what was said to go"
        assert len(gone) == min(wanted, sum(not count for count in self.leased.values()))
        self._left(gone)

    def _left(self, gone: list[int]) -> None:
        names = {one: name for name, one in self.held.items()}
        for one in gone:
            assert self.leased.pop(one) == 0, "what is in use is no victim"
            name = names[one]
            followers = [
                other for other, parent in self._parents.items() if parent == name and other in self.held
            ]
            assert all(self.leased[self.held[other]] for other in followers), "a root went under its children"
            del self.held[name]
            del self._parents[name]
            self.victims.append(name)
            self._free.append(one)

    def take(self, blocks: list[int]) -> None:
        """These are in use once more."""
        idle = [one for one in blocks if not self.leased[one]]
        for one in blocks:
            self.leased[one] += 1
        self.policy.remove(ids(idle))

    def drop(self, blocks: list[int]) -> None:
        """These are in use once less; the last ones of a chain are told first."""
        for one in blocks:
            self.leased[one] -= 1
        self.policy.insert(ids([one for one in blocks if not self.leased[one]][::-1]))

    def purge(self, names: list[int]) -> None:
        """These are gone, whatever follows them."""
        gone = [self.held.pop(name) for name in names if name in self.held]
        self.policy.forget(ids(gone))
        for name in names:
            self._parents.pop(name, None)
        for one in gone:
            del self.leased[one]
            self._free.append(one)
        self._prove()

    def demote(self, names: list[int]) -> None:
        """These go next, the last ones of a chain before."""
        known = [self.held[name] for name in names if name in self.held]
        ranked = sum(not self.leased[one] for one in known)
        assert self.policy.demote(ids(known[::-1])) == ranked
        self._prove()

    def _prove(self) -> None:
        if self._check:
            self.policy.check_integrity()
            idle = sorted(one for one, count in self.leased.items() if not count)
            assert len(self.policy) == len(idle)
            assert np.sort(self.policy.coldest(len(idle) + 1)).tolist() == idle
            self.policy.check_integrity()
