"""SipHash-2-4 over arrays: the words of its authors' test vectors, and every length of array alike."""

from __future__ import annotations

import numpy as np
import pytest
from kvpager.kvstore.siphash import KEY_BYTES, siphash

KEY = bytes(range(KEY_BYTES))


def test_the_vector_of_its_authors_for_eight_bytes_comes_out() -> None:
    message = int.from_bytes(bytes(range(8)), "little")
    assert siphash(np.array([message], dtype=np.uint64), KEY).tolist() == [0x93F5F5799A932462]


@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 4097, 9000])
def test_a_word_has_one_hash_wherever_it_stands_and_the_words_stay(count: int) -> None:
    words = np.random.default_rng(count).integers(0, 1 << 63, count).astype(np.uint64)
    before = words.copy()
    hashed = siphash(words, KEY)
    assert np.array_equal(words, before)
    assert np.array_equal(siphash(words[::-1], KEY), hashed[::-1])
    assert len(np.unique(hashed)) == len(np.unique(words))
    if count:
        assert not np.array_equal(siphash(words, bytes(KEY_BYTES)), hashed)
