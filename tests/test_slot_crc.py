"""CRCs of slot records: those of zlib, made of many at once."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from kvpager.kvstore.slot_crc import SlotCrc


@pytest.mark.parametrize("count", [0, 1, 7, 40_000])
def test_they_are_those_of_zlib(count: int) -> None:
    rng = np.random.default_rng(count)
    space = rng.bytes(16)
    hashes = np.frombuffer(rng.bytes(16 * count), dtype="V16")
    generations = rng.integers(0, 1 << 62, count)
    crc = SlotCrc(space)
    states = rng.integers(0, 256, count)
    found = crc.of(hashes, generations) ^ crc.of_state[states]
    for at in range(0, count, 97):
        record = space + bytes(hashes[at]) + int(generations[at]).to_bytes(8, "little") + bytes([states[at]])
        assert found[at] == zlib.crc32(record)
    assert len(found) == count


def test_any_bit_and_any_other_space_changes_them() -> None:
    name, generation = np.zeros(1, "V16"), np.zeros(1, np.int64)
    crc = SlotCrc(bytes(16))
    seen = {int(crc.of(name, generation)[0]), int(SlotCrc(bytes([1, *bytes(15)])).of(name, generation)[0])}
    for bit in range(192):
        changed = (1 << bit).to_bytes(24, "little")
        seen.add(int(crc.of(np.frombuffer(changed, "V16", 1), np.frombuffer(changed, "<i8", 1, 16))[0]))
    assert len(seen) == 194
    assert len(set(crc.of_state.tolist())) == 256
