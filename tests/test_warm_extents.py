"""Pages that are about to be written are entered ahead, in another process's memory too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import kvpager
import numpy as np
import pytest
from kvpager.api.client_space import Arena
from kvpager.api.warm_extents import WarmExtents
from kvpager.kvstore.host import HostStore
from kvpager.tests.raw_client import ARENA, LAYOUT, Running, names
from kvpager.tiers.mapping import SharedMapping

EXTENT = 1 << 20
EXTENTS = 4


@pytest.fixture
def file() -> Iterator[int]:
    """Memory of which the first two extents are made."""
    fd = os.memfd_create("arena")
    os.ftruncate(fd, EXTENTS * EXTENT)
    make(fd, 0, 2 * EXTENT)
    yield fd
    os.close(fd)


def make(fd: int, offset: int, nbytes: int) -> None:
    """As a sidecar does it."""
    os.posix_fallocate(fd, offset, nbytes)
    SharedMapping(fd, EXTENTS * EXTENT).populate(offset, nbytes)


def entered(base: int) -> int:
    """Bytes of the mapping at an address that are in this process's page table."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            first, last = (int(word, 16) for word in words[0].split("-"))
            found = first <= base < last
        elif found and words[0] == "Rss:":
            return int(words[1]) << 10
    raise AssertionError("there is no such mapping")


def test_an_extent_that_is_granted_and_those_after_it_are_entered_as_far_as_they_are_made(file: int) -> None:
    mapping = SharedMapping(file, EXTENTS * EXTENT)
    memory = mapping.bytes()
    warm = WarmExtents(mapping, EXTENTS, EXTENT)
    assert entered(mapping.base) == 0
    warm.expect({0}, memory)
    warm.wait(20.0)
    assert entered(mapping.base) == 2 * EXTENT
    assert os.fstat(file).st_blocks * 512 == 2 * EXTENT  # nothing came of it that was not there
    make(file, 2 * EXTENT, 2 * EXTENT)
    warm.expect({0}, memory)  # not new
    warm.wait(20.0)
    assert entered(mapping.base) == 2 * EXTENT
    warm.expect({2}, memory)
    warm.wait(20.0)
    assert entered(mapping.base) == EXTENTS * EXTENT


def test_of_anothers_memory_nothing_is_entered_but_what_is_granted(file: int) -> None:
    mapping = SharedMapping(file, EXTENTS * EXTENT)
    warm = WarmExtents(mapping, EXTENTS, EXTENT, owned=False)
    warm.expect({0}, mapping.bytes())
    warm.wait(20.0)
    assert entered(mapping.base) == EXTENT


def test_what_a_client_reserves_is_entered_before_it_writes(tmp_path: Path) -> None:
    with HostStore(ARENA) as host:
        host.arena.wait_ready()
        with Running(tmp_path / "socket", host) as running, kvpager.connect(running.path) as client:
            space = client.space(LAYOUT)
            arena = client.core.arena
            assert isinstance(arena, Arena)
            assert entered(arena.base) == 0
            with space.reserve(names(0, 1)) as reservation:
                arena.wait_warm(20.0)
                assert entered(arena.base) == arena.num_extents * arena.extent_bytes
                reservation.blocks[0][:] = np.uint8(7)
                reservation.commit()
