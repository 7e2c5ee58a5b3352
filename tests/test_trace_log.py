"""The log of what a host store was asked for: what it tells, what it does not, and where it ends."""

from __future__ import annotations

import gzip
import json
import logging
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvpager.kvstore import trace_log
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.lineage import ChainPlace, Lineage
from kvpager.kvstore.trace_files import read_trace
from kvpager.kvstore.trace_log import TraceLog
from kvpager.tiers.cold_disk import DiskColdTier
from kvpager.tiers.errors import ConfigError
from kvpager.tiers.layout import KVLayout

BLOCK = KVLayout(1, 1, 32, block_size=4, dtype="float32")
NAMES = [bytes([number]) * 16 for number in range(1, 9)]
SPACE = b"s" * 16


def lines(path: Path) -> list[dict[str, Any]]:
    raw = path.read_bytes()
    text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    return [json.loads(line) for line in text.splitlines()]


def store(path: Path, **options: Any) -> HostStore:
    host = HostStore(32 << 10, extent_bytes=4096, trace=TraceLog(path), **options)
    host.arena.wait_ready()
    return host


def test_what_is_looked_up_and_put_is_told_with_its_place_in_its_chain(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with store(path) as host:
        space = host.space(BLOCK)
        kv = np.zeros((4, BLOCK.block_bytes), np.uint8)
        assert len(space.match(NAMES[:4])) == 0
        with space.reserve(NAMES[:4], lineage=Lineage.of_chain(NAMES[:4])) as reservation:
            reservation.commit()
        space.match(NAMES[2:6], start=ChainPlace(NAMES[1], 3)).release()
        space.put(NAMES[6:8], kv[:2])
    head, described, asked, put, again, *unplaced = lines(path)
    assert head["kvpager_trace"] == 1
    assert described == {"space": 0, "block_size": 4, "block_bytes": 1024}
    names = [asked["match"][at : at + 16] for at in range(0, 64, 16)]
    assert len(set(names)) == 4
    assert asked == {"t": asked["t"], "space": 0, "match": "".join(names), "found": 0, "depth": 1}
    assert put == {"t": put["t"], "space": 0, "put": "".join(names), "depth": 1}
    assert again["match"].startswith(names[2] + names[3])
    assert (again["found"], again["depth"], again["parent"]) == (2, 3, names[1])
    assert [(one["depth"], len(one["put"])) for one in unplaced] == [(0, 16), (0, 16)]
    assert asked["t"] <= put["t"] <= again["t"]


def test_chains_that_are_put_together_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with store(path) as host:
        one, other = Lineage.of_chain(NAMES[:2]), Lineage.of_chain(NAMES[4:6])
        both = Lineage([*one.parents, *other.parents], np.concatenate([one.depths, other.depths]))
        with host.space(BLOCK).reserve([*NAMES[:2], *NAMES[4:6]], lineage=both) as reservation:
            reservation.commit()
    assert [(len(line["put"]), line["depth"]) for line in lines(path)[2:]] == [(32, 1), (32, 1)]


def test_what_comes_up_from_the_cold_tier_is_not_told_as_put(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with store(path, cold=DiskColdTier(tmp_path / "cold", capacity_bytes=1 << 20)) as host:
        space = host.space(BLOCK)
        space.put(NAMES[:2], np.zeros((2, BLOCK.block_bytes), np.uint8))
        host.flush()
        space.evict(2)
        space.load(NAMES[:2], deadline=5.0).release()
        assert space.resident == 2
    assert sum("put" in line for line in lines(path)) == 2


def test_loads_are_told_as_look_ups_with_their_places(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with store(path, cold=DiskColdTier(tmp_path / "cold", capacity_bytes=1 << 20)) as host:
        space = host.space(BLOCK)
        space.put(NAMES[:3], np.zeros((3, BLOCK.block_bytes), np.uint8))
        host.flush()
        space.evict(2)
        space.load(NAMES[:4], deadline=5.0).release()
        space.load(NAMES[1:2], deadline=5.0, start=ChainPlace(NAMES[0], 2)).release()
        space.load(NAMES[2:3], deadline=5.0, start=None).release()
        space.hint(NAMES[5:7], wanted=True)
    loads = [line for line in lines(path) if "load" in line]
    names = [loads[0]["load"][at : at + 16] for at in range(0, 64, 16)]
    assert [(one["found"], one["depth"], one.get("parent")) for one in loads] == [
        (3, 1, None),
        (1, 2, names[0]),
        (1, 0, None),
    ]
    assert [one["load"] for one in loads[1:]] == names[1:3]
    # What was put without a place has the one that loads told.
    trace = read_trace(path)
    assert (trace.references, trace.asked.tolist()) == (6, [0, 0, 0, 4, 1, 1])
    assert sorted(trace.depths.tolist()) == [1, 2, 3, 4]


def test_a_load_that_nothing_can_come_of_is_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with store(path) as host:
        host.space(BLOCK).load(NAMES[:2], deadline=5.0).release()
    assert [line["found"] for line in lines(path) if "load" in line] == [0]


def test_names_are_none_of_the_store_and_others_in_each_log(tmp_path: Path) -> None:
    told = []
    for number in range(2):
        log = TraceLog(tmp_path / f"{number}.gz")
        for space in (SPACE, b"t" * 16):
            log.matched(space, BLOCK, NAMES, 0, None)
        log.close()
        told += [line["match"] for line in lines(tmp_path / f"{number}.gz") if "match" in line]
        assert NAMES[0].hex()[:16] not in gzip.decompress((tmp_path / f"{number}.gz").read_bytes()).decode()
    assert len(set(told)) == 4
    assert stat.S_IMODE((tmp_path / "0.gz").stat().st_mode) == 0o600


def test_an_earlier_log_is_kept_beside_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for _ in range(2):
        TraceLog(path).close()
    assert lines(path)[0]["kvpager_trace"] == lines(tmp_path / "trace.jsonl.1")[0]["kvpager_trace"] == 1


def test_a_log_ends_where_it_is_full_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.jsonl"
    log = TraceLog(path, most_bytes=1 << 16)
    for _ in range(1000):
        log.matched(SPACE, BLOCK, NAMES, 0, None)
        time.sleep(0)
    log.close()
    assert log.ended
    assert path.stat().st_size < (1 << 16) + 100
    assert lines(path)[-1]["full"] == 1 << 16
    assert len(read_trace(path)) > 100
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "has 65536 bytes, as many as it may have: it ends here" in warning.getMessage()


def test_events_that_cannot_be_kept_up_with_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_log, "_MOST_WAITING", 20_000)
    path = tmp_path / "trace.jsonl"
    log = TraceLog(path)
    many = [number.to_bytes(16, "little") for number in range(5000)]
    for _ in range(200):
        log.matched(SPACE, BLOCK, many, 0, None)
    log.close()
    told = lines(path)
    lost = sum(line.get("lost", 0) for line in told)
    assert lost > 0
    assert lost + sum("match" in line for line in told) == 200
    assert log.lost == 0


def test_a_file_that_cannot_be_made_or_written_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"^trace: .* cannot be written: No such file"):
        TraceLog(tmp_path / "none" / "trace")
    with pytest.raises(ConfigError, match="trace_bytes: must be an integer of at least 65536"):
        TraceLog(tmp_path / "trace", most_bytes=9)
    with pytest.raises(ConfigError, match="trace: must be a TraceLog"):
        HostStore(1 << 20, trace="trace.jsonl")  # type: ignore[arg-type]
    log = TraceLog(tmp_path / "trace")
    log._file.close()
    log._file = open("/dev/full", "w")  # noqa: SIM115  the log closes it
    for _ in range(500):
        log.matched(SPACE, BLOCK, NAMES, 0, None)
    log.close()
    assert log.ended
    assert "cannot be written: No space left on device: it ends here" in caplog.text


def test_being_served_does_not_wait_for_the_log(tmp_path: Path) -> None:
    def per_call(call: Callable[[], None]) -> float:
        best = []
        for _ in range(20):
            began = time.perf_counter()
            for _ in range(5):
                call()
            best.append((time.perf_counter() - began) / 5)
        return min(best)

    log = TraceLog(tmp_path / "trace")
    many = [number.to_bytes(16, "little") for number in range(5000)]
    # Naming them takes milliseconds.
    assert per_call(lambda: log.matched(SPACE, BLOCK, many, 0, None)) < 500e-6
    assert log.lost == 0
    log.close()
