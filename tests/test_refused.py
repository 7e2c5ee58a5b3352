"""A constructor that refuses a setting leaves what it was given open, whichever setting that was."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvpager
import numpy as np
import pytest
from kvpager.api.sidecar import Sidecar
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.store import TieredStore
from kvpager.tests.raw_client import Running
from kvpager.tiers.cold import is_open
from kvpager.tiers.cold_disk import DiskColdTier
from kvpager.tiers.errors import ConfigError, KVPagerError, MemoryUnavailableError, ServiceUnavailableError
from kvpager.tiers.layout import KVLayout
from kvpager.tiers.mover import HostMover

if TYPE_CHECKING:
    from kvpager.tests.engine_cases import Case

LAYOUT = KVLayout(1, 1, 32, block_size=4, dtype="float32")  # 1 KiB a block
ROOT = b"r" * 16

OF_A_HOST_STORE: list[tuple[dict[str, Any], type[KVPagerError]]] = [
    ({"host_bytes": -1}, ConfigError),
    ({"host_bytes": 1 << 60}, MemoryUnavailableError),
    ({"policy": "luck"}, ConfigError),
    ({"device": "abacus"}, ConfigError),
    ({"extent_bytes": 1}, ConfigError),
    ({"clean_ahead": 2.0}, ConfigError),
    ({"cold_deadline": 0.0}, ConfigError),
]
OF_A_STORE: list[tuple[dict[str, Any], type[KVPagerError]]] = [
    ({"layout": KVLayout(64, 64, 128)}, ConfigError),  # no extent of the host store holds such a block
    ({"device_blocks": 0}, ConfigError),
    ({"device_blocks": 1 << 30}, MemoryUnavailableError),
    ({"root": b"short"}, ConfigError),
    ({"device": "abacus"}, ConfigError),
    ({"max_sequences": 1 << 40}, ConfigError),
    ({"policy": "luck"}, ConfigError),
    ({"shard": 5}, ConfigError),
]
OF_AN_ENGINE: list[tuple[dict[str, Any], type[KVPagerError]]] = [
    ({"device": "abacus"}, ConfigError),
    ({"dtype": "int3"}, ConfigError),
    ({"block_size": 0}, ConfigError),
    ({"block_size": 1 << 16}, ConfigError),  # no extent of the host store holds such a block
    ({"device_blocks": 0}, ConfigError),
    ({"device_blocks": 1 << 30}, MemoryUnavailableError),
    ({"device_bytes": 1 << 20}, ConfigError),
    ({"max_sequences": 1 << 40}, ConfigError),
    ({"max_tokens": 10**9}, ConfigError),
    ({"step_tokens": 0}, ConfigError),
    ({"load_seconds": -1.0}, ConfigError),
    ({"cuda_graphs": "yes"}, ConfigError),
    ({"tenant": "text"}, ConfigError),
]
OF_ITS_HOST_MEMORY: list[tuple[dict[str, Any], type[KVPagerError]]] = [
    ({"host_bytes": 0}, ConfigError),
    ({"host_bytes": 1 << 60}, MemoryUnavailableError),
]


def named(cases: list[tuple[dict[str, Any], type[KVPagerError]]]) -> list[Any]:
    """Parameters of a test: wrong settings and what is raised for them."""
    return [
        pytest.param(wrong, error, id="-".join(f"{name}={value!r:.30}" for name, value in wrong.items()))
        for wrong, error in cases
    ]


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[DiskColdTier]:
    tier = DiskColdTier(tmp_path / "cold", capacity_bytes=1 << 20)
    yield tier
    tier.close()


@pytest.fixture
def host() -> Iterator[HostStore]:
    with HostStore(1 << 20) as store:
        yield store


@pytest.mark.parametrize(("wrong", "error"), named(OF_A_HOST_STORE))
def test_a_host_store_that_is_refused_leaves_its_cold_tier_open(
    cold: DiskColdTier, wrong: dict[str, Any], error: type[KVPagerError]
) -> None:
    settings: dict[str, Any] = {"host_bytes": 1 << 20, "cold": cold}
    with pytest.raises(error):
        HostStore(**(settings | wrong))
    assert is_open(cold)
    HostStore(**settings).close()
    assert not is_open(cold)


def test_a_host_store_may_be_closed_without_its_cold_tier(cold: DiskColdTier) -> None:
    block = np.ones((1, LAYOUT.block_bytes), dtype=np.uint8)
    for _ in range(2):
        with HostStore(1 << 20, cold=cold) as one:
            one.arena.wait_ready()
            one.space(LAYOUT).put([ROOT], block)
            one.close(drain=5.0, keep_cold=True)
        assert is_open(cold)
    into = np.zeros_like(block)
    with HostStore(1 << 20, cold=cold) as one, one.space(LAYOUT).load([ROOT], 5.0) as lease:
        into[:] = lease.blocks[0]
    assert np.array_equal(into, block)


@pytest.mark.parametrize(("wrong", "error"), named(OF_A_STORE))
def test_a_tiered_store_that_is_refused_leaves_host_memory_and_mover_open(
    host: HostStore, wrong: dict[str, Any], error: type[KVPagerError]
) -> None:
    mover = HostMover()
    settings: dict[str, Any] = {"layout": LAYOUT, "device_blocks": 4, "root": ROOT, "host": host}
    with pytest.raises(error):
        TieredStore(**(settings | {"mover": mover} | wrong))
    host.check_integrity()
    store = TieredStore(**settings, mover=mover)
    row = store.open(range(5)).row
    store.reserve(np.array([row]), 4)
    store.advance(row, np.arange(4, dtype=np.int32))
    store.flush()  # copied by the mover, to the host store
    assert store.stats.written_back == 1
    store.close()


@pytest.mark.parametrize(("wrong", "error"), named([*OF_AN_ENGINE, *OF_ITS_HOST_MEMORY]))
def test_an_engine_that_is_refused_leaves_its_cold_tier_open(
    llama: Case, cold: DiskColdTier, wrong: dict[str, Any], error: type[KVPagerError]
) -> None:
    from kvpager.engine.llm import LLM

    settings: dict[str, Any] = {
        "device": llama.device,
        "device_blocks": 8,
        "host_bytes": 1 << 20,
        "cold": cold,
    }
    with pytest.raises(error):
        LLM(llama.loaded, **(settings | wrong))
    assert is_open(cold)
    LLM(llama.loaded, **settings).close()
    assert not is_open(cold)


@pytest.mark.parametrize(("wrong", "error"), named([*OF_AN_ENGINE, ({"host_bytes": 1 << 20}, ConfigError)]))
def test_an_engine_that_is_refused_leaves_the_host_memory_of_others_open(
    llama: Case, wrong: dict[str, Any], error: type[KVPagerError]
) -> None:
    from kvpager.engine.llm import LLM

    with HostStore(1 << 20, device=llama.device) as host:
        settings: dict[str, Any] = {"device": llama.device, "device_blocks": 8, "host": host}
        with pytest.raises(error):
            LLM(llama.loaded, **(settings | wrong))
        host.check_integrity()
        LLM(llama.loaded, **settings).close()
        host.check_integrity()


@pytest.mark.parametrize(("wrong", "error"), named(OF_AN_ENGINE))
def test_an_engine_that_is_refused_leaves_a_connection_open(
    llama: Case, host: HostStore, tmp_path: Path, wrong: dict[str, Any], error: type[KVPagerError]
) -> None:
    from kvpager.engine.llm import LLM

    with Running(tmp_path / "socket", host) as sidecar, kvpager.connect(sidecar.path) as connection:
        settings: dict[str, Any] = {"device": llama.device, "device_blocks": 8, "host": connection}
        if llama.device != "cpu":
            connection.map_device(llama.device)
        with pytest.raises(error):
            LLM(llama.loaded, **(settings | wrong))
        assert not connection.closed
        assert connection.stats()["sidecar"]["leased"] == 0


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"name": 5}, ConfigError),
        ({"group": b"short"}, ConfigError),
        ({"timeout": 0}, ConfigError),
        ({"strict": "yes"}, ConfigError),
        ({"on_lost": 5}, ConfigError),
        ({"url": 5}, ConfigError),
        ({"url": "nobody-listens-here"}, ServiceUnavailableError),
    ],
)
def test_a_connection_that_is_refused_leaves_no_thread_or_descriptor_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], error: type[KVPagerError]
) -> None:
    monkeypatch.chdir(tmp_path)
    threads, descriptors = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    settings: dict[str, Any] = {"url": "socket", "timeout": 0.1} | wrong
    with pytest.raises(error):
        kvpager.connect(**settings)
    assert set(threading.enumerate()) <= threads
    assert set(os.listdir("/proc/self/fd")) <= descriptors


@pytest.mark.parametrize("wrong", [{"allow_uids": [-1]}, {"max_frame": 1}, {"max_connections": 0}])
def test_a_sidecar_that_is_refused_leaves_its_host_store_open(
    host: HostStore, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError):
        Sidecar(host, tmp_path / "socket", **wrong)
    host.check_integrity()
