"""Slots as handles name them."""

from __future__ import annotations

import numpy as np
import pytest
from kvpager.kvstore.handles import all_different


@pytest.mark.parametrize("count", [0, 1, 2, 1023, 1024, 5000])
@pytest.mark.parametrize("step", [1, 3, 400_000])
def test_a_slot_that_is_named_twice_is_seen_among_few_and_many(count: int, step: int) -> None:
    slots = (np.random.default_rng(count).permutation(count) * step - 7).astype(np.int32)
    assert all_different(slots)
    if count > 1:
        slots[count // 2] = slots[count // 2 - 1]
        assert not all_different(slots)
