"""NameIndex: which slot holds the block of a name, in a few bytes a block where there are many.

Few names are kept in a dictionary, which answers soonest where a handful is asked for. Of many names it would
take 120 bytes for each, and half a microsecond to be made anew after a restart. So these are in a hash
table of arrays, and all of it works on batches. The names lie in the slots' records already: the table keeps
of each its slot and a tag, 16 bits of its hash. A name belongs into one bucket of 16 places. Looking at a
batch gathers the buckets' tags, takes the places whose tag agrees, and compares the whole names there.

The table has two places for each slot that there may be, so of names that are digests one in a thousand finds
its bucket full, and stays in the dictionary. So nothing is ever moved, removing leaves no marks behind, and
whoever chooses names such that they meet gains no more than a dictionary's place for each.

The hash is the vector multiply-shift of Dietzfelbinger (1996), as Thorup tells of it in "High speed hashing
for integers and strings" (2015): with random multipliers, which nobody is told, two names meet as seldom as
by chance, in whatever they differ.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ..tiers.errors import IntegrityError
from .hashing import HASH_BYTES, leading
from .policy import Ids

__all__ = ["NAME", "NameIndex", "Names", "name_array"]

NAME: Final = np.dtype(f"V{HASH_BYTES}")
Names: TypeAlias = npt.NDArray[np.void]
"""V16 [n]."""
_Bools: TypeAlias = npt.NDArray[np.bool_]
_Hashes: TypeAlias = npt.NDArray[np.uint64]
_Indices: TypeAlias = npt.NDArray[np.intp]

_FEW: Final = 1 << 16
"""Names up to which a dictionary has all: 9 MiB, and 10 ms to move them to a table, once."""
_WIDTH: Final = 16
"""Places of a bucket, whose tags are in one line of the processor's cache, and so are its slots."""
_PLACE_BITS: Final = np.uint64(4)
_WORDS: Final = HASH_BYTES // 4
_TAGGED: Final = np.uint64(1 << 32)
"""Set in every hash, so that no tag is zero. The bits below are not as random, and are not used."""
_FIRST_LOOK: Final = 64
_LONGEST_LOOK: Final = 8192
"""Names looked at together: what is made on the way stays in the processor's cache."""
_BULK: Final = 1024
"""Names of which it pays to try a place before all of them are looked at."""
_EVERY: Final = np.arange(_LONGEST_LOOK)


def name_array(hashes: Sequence[bytes]) -> Names:
    """Names of 16 bytes each, as an array."""
    return np.frombuffer(b"".join(hashes), dtype=NAME)


class NameIndex:
    """Names to slots. Each name is in it once, and each slot.

    Args:
        names: V16 [capacity], the name of each slot. It is the owner's, who changes a slot's name only while
            the slot is not in the index.
        few: names up to which a dictionary has all of them.
    """

    def __init__(self, names: Names, few: int = _FEW) -> None:
        self._names = names
        self._few = few
        self._plain: dict[bytes, int] = {}
        """All names while they are few; then those whose bucket was full."""
        self._placed = 0
        """Names in the table."""
        self._multipliers = np.frombuffer(secrets.token_bytes(8 * _WORDS), dtype=np.uint64)
        self._make_table(0)

    def __len__(self) -> int:
        return len(self._plain) + self._placed

    def find(self, hashes: Sequence[bytes]) -> tuple[Ids, _Bools]:
        """Slots of names: int32 [n], zero where there is none; and bool [n], whether there is one."""
        slots, found = np.zeros(len(hashes), dtype=np.int32), np.zeros(len(hashes), dtype=np.bool_)
        rest: Sequence[int] = range(len(hashes))
        if self._placed:
            names = name_array(hashes)
            for start in range(0, len(names), _LONGEST_LOOK):
                which, there = self._look(names[start : start + _LONGEST_LOOK])
                if len(there):
                    slots[which + start], found[which + start] = there, True
            rest = np.flatnonzero(~found).tolist()
            hashes = [hashes[at] for at in rest]
        if not self._plain.keys().isdisjoint(hashes):
            for at, slot in zip(rest, map(self._plain.get, hashes), strict=True):
                if slot is not None:
                    slots[at], found[at] = slot, True
        return slots, found

    def leading(self, hashes: Sequence[bytes]) -> Ids:
        """Slots of the leading names that are in, int32 [n]; not much is looked at beyond them."""
        if not self._placed:
            return np.array(leading(self._plain, hashes), dtype=np.int32)
        looks: list[Ids] = []
        start, count = 0, _FIRST_LOOK
        while start < len(hashes):
            part = hashes[start : start + count]
            which, slots = self._look(name_array(part))
            if len(slots) < len(part):
                slots = self._leading(part, which, slots)
            looks.append(slots)
            if len(slots) < len(part):
                break
            start += count
            count = min(4 * count, _LONGEST_LOOK)
        if len(looks) == 1:
            return looks[0]
        return np.concatenate(looks) if looks else np.empty(0, dtype=np.int32)

    def make_room(self, count: int) -> None:
        """Have the table made if so many more names are not few any more, before they come in parts."""
        if len(self._tags) or len(self) + count <= self._few:
            return
        slots = np.fromiter(self._plain.values(), np.int32, len(self._plain))
        self._plain.clear()
        # For all there may be. To grow by and by would be to wait a tenth of a second for some of it.
        self._make_table(len(self._names))
        self.add(slots)

    def add(self, slots: Ids) -> None:
        """Slots whose names are not in yet.

        Raises:
            IntegrityError: two slots have the same name. It is seen as long as none was removed.
        """
        self.make_room(len(slots))
        if not len(self._tags):
            self._keep_plain(slots)
            return
        for start in range(0, len(slots), _LONGEST_LOOK):
            self._place(slots[start : start + _LONGEST_LOOK])

    def remove(self, slots: Ids) -> None:
        """Slots that are in, each once, under the names that they have still."""
        if not self._placed:
            for name in self._names[slots].tolist():
                del self._plain[name]
            return
        for start in range(0, len(slots), _LONGEST_LOOK):
            self._remove(slots[start : start + _LONGEST_LOOK])

    def slots(self) -> Ids:
        """All slots that are in, int32 [n], in no order."""
        plain = np.fromiter(self._plain.values(), np.int32, len(self._plain))
        return np.concatenate([self._all_slots[self._all_tags != 0], plain])

    def check_integrity(self) -> None:
        """Prove that every slot is found by its name, and counted.

        Raises:
            IntegrityError: naming what does not agree.
        """
        slots = self.slots()
        if len(slots) != len(self):
            raise IntegrityError(f"{len(self)} names are counted, and {len(slots)} are in the index")
        found, there = self.find(self._names[slots].tolist())
        if wrong := np.count_nonzero((found != slots) | ~there):
            raise IntegrityError(f"{wrong} slots are in the index and not found by their names")

    # Inside

    def _make_table(self, most: int) -> None:
        """Make an empty table for as many names; none for 0."""
        bits = max(1, (2 * most - 1).bit_length() - (_WIDTH - 1).bit_length())
        buckets = 1 << bits if most else 0
        self._shift = np.uint64(64 - bits)
        self._tags = np.zeros((buckets, _WIDTH), dtype=np.uint16)
        """Zero: the place is free."""
        self._slots = np.zeros((buckets, _WIDTH), dtype=np.int32)
        self._all_tags, self._all_slots = self._tags.ravel(), self._slots.ravel()

    def _keep_plain(self, slots: Ids) -> None:
        count = len(self._plain) + len(slots)
        self._plain.update(zip(self._names[slots].tolist(), slots.tolist(), strict=True))
        if len(self._plain) < count:
            raise IntegrityError("two slots hold the same block")

    def _hash(self, names: Names) -> _Hashes:
        words = names.view(np.uint32).reshape(-1, _WORDS)
        hashes: _Hashes = words.astype(np.uint64).dot(self._multipliers)
        hashes |= _TAGGED
        return hashes

    def _bucket(self, hashes: _Hashes) -> _Indices:
        return (hashes >> self._shift).view(np.intp)

    def _look(self, names: Names) -> tuple[_Indices, Ids]:
        """Which of up to `_LONGEST_LOOK` names are in the table, ascending, and their slots."""
        hashes = self._hash(names)
        bucket = self._bucket(hashes)
        at = (self._tags.take(bucket, axis=0) == _tags(hashes)).ravel().nonzero()[0]
        if not len(at):
            return at, self._all_slots[:0]
        slots: Ids = self._slots.take(bucket, axis=0).ravel().take(at)
        there = self._names.take(slots)
        # As a rule one tag agrees for each, and so does the name.
        if len(slots) == len(names) and there.tobytes() == names.tobytes():
            return _EVERY[: len(names)], slots
        which = at // _WIDTH
        same = there == names.take(which)
        return which[same], slots[same]

    def _leading(self, hashes: Sequence[bytes], which: _Indices, slots: Ids) -> Ids:
        """The leading slots of these, some of which are not in the table."""
        every = np.zeros(len(hashes), dtype=np.int32)
        every[which] = slots
        missing = np.ones(len(hashes), dtype=np.bool_)
        missing[which] = False
        for at in np.flatnonzero(missing).tolist():
            slot = self._plain.get(hashes[at])
            if slot is None:
                return every[:at]
            every[at] = slot
        return every

    def _place(self, slots: Ids) -> None:
        """Give up to `_LONGEST_LOOK` slots places of their buckets that are free."""
        hashes = self._hash(self._names.take(slots))
        if len(slots) >= _BULK:
            slots, hashes = self._place_at_once(slots, hashes)
        while len(slots):
            bucket = self._bucket(hashes)
            tags = self._tags.take(bucket, axis=0)
            agree = tags == _tags(hashes)
            if np.count_nonzero(agree):
                self._expect_others(slots, bucket, agree)
            place = bucket * _WIDTH
            place += (tags == 0).argmax(axis=1)
            free = self._all_tags.take(place) == 0
            if np.count_nonzero(free) < len(free):
                self._keep_plain(slots[~free])
                slots, hashes, place = slots[free], hashes[free], place[free]
            # Of those that want the same place one has it, and the others take the next.
            self._all_slots[place] = slots
            has = self._all_slots.take(place) == slots
            if np.count_nonzero(has) == len(has):
                self._all_tags[place] = _tags(hashes)[:, 0]
                self._placed += len(slots)
                return
            self._all_tags[place[has]] = _tags(hashes[has])[:, 0]
            self._placed += int(np.count_nonzero(has))
            slots, hashes = slots[~has], hashes[~has]

    def _place_at_once(self, slots: Ids, hashes: _Hashes) -> tuple[Ids, _Hashes]:
        """Give slots the place in their bucket that further bits of the hash name, and return the others.

        Most of many find it free, and to look at the whole bucket takes half as long again. Whose name is in
        already finds it taken, by that one or by another.
        """
        place = (hashes >> (self._shift - _PLACE_BITS)).view(np.intp)
        free = (self._all_tags.take(place) == 0).nonzero()[0]
        wanted, wanting = place.take(free), slots.take(free)
        self._all_slots[wanted] = wanting
        has = free[self._all_slots.take(wanted) == wanting]
        self._all_tags[place.take(has)] = _tags(hashes).take(has)
        self._placed += len(has)
        left = np.ones(len(slots), dtype=np.bool_)
        left[has] = False
        return slots[left], hashes[left]

    def _expect_others(self, slots: Ids, bucket: _Indices, agree: _Bools) -> None:
        """Where tags agree, the names do not."""
        which, place = agree.nonzero()
        there = self._slots[bucket[which], place]
        if np.count_nonzero(self._names[there] == self._names[slots[which]]):
            raise IntegrityError("two slots hold the same block")

    def _remove(self, slots: Ids) -> None:
        names = self._names.take(slots)
        hashes = self._hash(names)
        bucket = self._bucket(hashes)
        here = self._slots.take(bucket, axis=0) == slots[:, None]
        here &= self._tags.take(bucket, axis=0) == _tags(hashes)
        at = here.ravel().nonzero()[0]
        if len(at) < len(slots):
            for name in names[~here.any(axis=1)].tolist():
                del self._plain[name]
        self._all_tags[bucket.take(at // _WIDTH) * _WIDTH + at % _WIDTH] = 0
        self._placed -= len(at)


def _tags(hashes: _Hashes) -> npt.NDArray[np.uint16]:
    """uint16 [n, 1]: the bits from 32 to 47."""
    return hashes.view(np.uint16)[2::4, None]
