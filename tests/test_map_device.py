"""A sidecar's memory mapped for a GPU of the client: errors where there is none, what is page-locked."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import kvpager
import numpy as np
import pytest
from kvpager.api.client_space import Arena
from kvpager.kvstore.hashing import hash_blocks
from kvpager.kvstore.store import TieredStore
from kvpager.tests.redis_servers import free_port
from kvpager.tests.serve_process import ServeProcess
from kvpager.tests.test_store import LAYOUT, PROMPT, ROOT
from kvpager.tiers.driver import driver_answers
from kvpager.tiers.errors import ClosedError, ConfigError, NotInPlaceError
from kvpager.tiers.mapped_arena import MappedArena, pages_are_there
from kvpager.tiers.mapping import SharedMapping

MIB = 1 << 20
TOKEN = "a token of more than sixteen bytes"

needs_gpu = pytest.mark.skipif(not driver_answers(), reason="no CUDA driver answers cuInit(0)")
without_gpu = pytest.mark.skipif(driver_answers(), reason="a CUDA driver answers")
NAMES = hash_blocks(PROMPT, LAYOUT.block_size, ROOT)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[ServeProcess]:
    with ServeProcess(tmp_path / "socket") as process:
        yield process


def test_pages_are_there_once_they_were_made() -> None:
    fd = os.memfd_create("pages", os.MFD_CLOEXEC)
    os.ftruncate(fd, 4 * MIB)
    mapping = SharedMapping(fd, 4 * MIB)
    assert not pages_are_there(mapping.base, MIB)
    os.close(fd)
    ctypes.memset(mapping.base + MIB, 1, MIB)
    assert pages_are_there(mapping.base + MIB, MIB)
    assert not pages_are_there(mapping.base, 2 * MIB)
    # One page short.
    ctypes.memset(mapping.base, 1, MIB - mmap.PAGESIZE)
    assert not pages_are_there(mapping.base, MIB)
    ctypes.memset(mapping.base, 1, MIB)
    assert pages_are_there(mapping.base, 2 * MIB)
    mapping.release()


@without_gpu
def test_without_a_driver_it_is_said_so_and_the_connection_goes_on(serving: ServeProcess) -> None:
    with kvpager.connect(serving.path) as client:
        space = client.space(LAYOUT)
        for call in (client.map_device, space.map_device):
            for device in (None, "cuda", "cuda:3"):
                with pytest.raises(ConfigError, match="device: no CUDA driver answers on this machine"):
                    call(device)
        assert client.device is None
        assert space.device_delta == 0
        blocks = np.ones((len(NAMES), LAYOUT.block_bytes), np.uint8)
        assert space.put(NAMES, blocks) == len(NAMES)
        with space.match(NAMES) as lease:
            assert space.readable_in_place(lease.slots).all()
        with pytest.raises(ConfigError, match="not mapped for cuda:0"):
            TieredStore(LAYOUT, 8, root=ROOT, host=client, device="cuda:0")


@without_gpu
def test_without_a_driver_asyncio_says_so_too(serving: ServeProcess) -> None:
    async def run() -> None:
        async with await kvpager.connect_async(serving.path) as client:
            space = await client.space(LAYOUT)
            for call in (client.map_device, space.map_device):
                with pytest.raises(ConfigError, match="device: no CUDA driver answers on this machine"):
                    await call()
            assert client.device is None
            assert space.device_delta == 0
            assert space.readable_in_place(np.zeros(1, np.int32)).all()

    asyncio.run(run())


def test_a_device_that_is_no_gpu_is_refused(serving: ServeProcess) -> None:
    with kvpager.connect(serving.path) as client:
        for device in ("cpu", "abacus", "", 3):
            with pytest.raises(ConfigError, match="device: must be"):
                client.map_device(device)  # type: ignore[arg-type]
    with pytest.raises(ClosedError):
        client.map_device()


def test_over_tcp_there_is_nothing_to_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPAGER_TOKEN", TOKEN)
    port = free_port()
    with (
        ServeProcess(tmp_path / "socket", f"--listen=127.0.0.1:{port}"),
        kvpager.connect(f"kvpager://127.0.0.1:{port}", token=TOKEN) as client,
    ):
        for call in (client.map_device, client.space(LAYOUT).map_device):
            with pytest.raises(NotInPlaceError):
                call()


@pytest.mark.gpu
@needs_gpu
class TestOnAGPU:
    def test_every_extent_is_page_locked_once_the_sidecar_has_made_it(self, serving: ServeProcess) -> None:
        with kvpager.connect(serving.path) as client:
            space = client.space(LAYOUT)
            client.map_device("cuda:0")
            assert client.device == "cuda:0"
            arena = client.core.arena
            assert isinstance(arena, Arena)
            assert arena.mapped is not None
            assert arena.mapped.wait_mapped(60)
            assert arena.mapped.page_locked_bytes == arena.nbytes
            assert space.readable_in_place(np.arange(space.capacity, dtype=np.int32)).all()
            client.map_device()
            with pytest.raises(ConfigError, match="mapped for cuda:0 already"):
                client.map_device("cuda:1")

    def test_the_gpu_reads_and_writes_blocks_in_place(self, serving: ServeProcess) -> None:
        cupy = pytest.importorskip("cupy")
        with kvpager.connect(serving.path) as client:
            space = client.space(LAYOUT)
            space.map_device()
            arena = client.core.arena
            assert isinstance(arena, Arena)
            assert arena.mapped is not None
            assert arena.mapped.wait_mapped(60)
            with space.reserve(NAMES[:1]) as reservation:
                address = int(space.addresses(reservation.slots)[0]) + space.device_delta
                memory = cupy.cuda.UnownedMemory(address, LAYOUT.block_bytes, space, 0)
                block = cupy.ndarray((LAYOUT.block_bytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
                block[:] = 7
                cupy.cuda.runtime.deviceSynchronize()
                reservation.commit()
            with space.match(NAMES[:1]) as lease:
                assert set(bytes(space.view(int(lease.slots[0])))) == {7}

    def test_memory_that_takes_the_place_of_a_lost_sidecars_is_mapped(self, serving: ServeProcess) -> None:
        from kvpager.tests.raw_client import await_true

        with kvpager.connect(serving.path) as client:
            client.map_device()
            before = client.core.arena
            serving.kill()
            await_true(lambda: not client.ready)
            serving.start("--fresh")
            client.wait_ready(30)
            arena = client.core.arena
            assert isinstance(arena, Arena)
            assert arena is not before
            await_true(lambda: arena.mapped is not None)
            assert arena.mapped is not None
            assert arena.mapped.wait_mapped(60)

    def test_extents_are_locked_when_their_pages_come_to_be_there(self) -> None:
        fd = os.memfd_create("pages", os.MFD_CLOEXEC)
        os.ftruncate(fd, 4 * MIB)
        mapping = SharedMapping(fd, 4 * MIB)
        ctypes.memset(mapping.base, 1, MIB << 1)
        mapped = MappedArena(mapping.bytes(), mapping.base, MIB, "cuda:0")
        assert not mapped.wait_mapped(1.0)
        assert mapped.page_locked_bytes == 2 * MIB
        ctypes.memset(mapping.base + 2 * MIB, 1, MIB)
        # Of the last one it is known by a slot that was granted.
        mapped.is_page_locked(np.array([3]))
        assert mapped.wait_mapped(30)
        assert mapped.is_page_locked(np.arange(4)).all()
        mapped.close()
        assert mapped.page_locked_bytes == 0
        os.close(fd)
        mapping.release()
