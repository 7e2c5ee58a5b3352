"""What `kvpager bench` measures of host memory: plain copies, and blocks put and got in an arena."""

from __future__ import annotations

from itertools import count
from typing import Final

import numpy as np

from ..kvstore.host import HostStore
from ..tiers.errors import KVPagerError
from ..tiers.layout import KVLayout
from .measurements import Measurement, Unit
from .turns import median_seconds

__all__ = ["BLOCK", "measure_memory", "names_from"]

BLOCK: Final = KVLayout(32, 8, 128)
"""Blocks of 2 MiB: a Llama-3-8B's."""
_ARENA_BYTES: Final = 256 << 20
_BATCH: Final = 16


def names_from(first: int, number: int) -> list[bytes]:
    """Hashes of blocks that are none of any prompt."""
    return [at.to_bytes(16, "little") for at in range(first, first + number)]


def measure_memory(seconds: float) -> list[Measurement]:
    """Copies of 32 MiB within host memory, beside `put` and `get` of as many bytes.

    Args:
        seconds: how long it may take.

    Raises:
        KVPagerError: the arena lost blocks.
    """
    size = BLOCK.block_bytes
    nbytes = _BATCH * size
    source = np.random.default_rng(0).integers(0, 256, (_BATCH, size), np.uint8)
    target, plain = np.zeros_like(source), np.zeros_like(source)
    with HostStore(_ARENA_BYTES) as host:
        host.arena.wait_ready()
        space = host.space(BLOCK)
        held = names_from(0, _BATCH)
        space.put(held, source)
        space.pin(held)
        batches = count(1)

        def put() -> None:
            if space.put(names_from(next(batches) * _BATCH, _BATCH), source) != _BATCH:
                raise KVPagerError("the arena had no room for a block")

        def get() -> None:
            if space.get(held, target) != _BATCH:
                raise KVPagerError("a block was not found")

        taken = median_seconds({"copy": lambda: np.copyto(plain, source), "put": put, "get": get}, seconds)
        if not np.array_equal(target, source):
            raise KVPagerError("a block came back with other bytes")
    rate = {name: nbytes / each for name, each in taken.items()}
    return [
        Measurement("memory_copy", "memory: plain copy, 32 MiB", rate["copy"], Unit.BYTES_PER_SECOND),
        Measurement(
            "memory_put", "put of 16 blocks of 2 MiB", rate["put"], Unit.BYTES_PER_SECOND, "memory_copy"
        ),
        Measurement(
            "memory_get", "get of 16 blocks of 2 MiB", rate["get"], Unit.BYTES_PER_SECOND, "memory_copy"
        ),
    ]
