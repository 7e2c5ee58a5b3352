"""What the machine reaches between tiers, from what was measured on it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest
from kvpager.api.admin.ceilings import Ceilings
from kvpager.api.admin.models import TierName
from kvpager.api.measurements import Measurement, Measurements, Unit, keep

DEVICE, HOST, COLD = TierName.DEVICE, TierName.HOST, TierName.COLD


def measured(path: Path, host: str, **rates: float) -> None:
    found = tuple(Measurement(name, name, rate, Unit.BYTES_PER_SECOND) for name, rate in rates.items())
    keep(Measurements(host, 1.0, "0", found, {}), path)


def test_a_ceiling_is_that_of_the_way_and_of_the_kind_of_cold_tier(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    measured(path, platform.node(), host_to_device=5e10, disk_plain_put=2e9, redis_plain_get=1e9)
    ceilings = Ceilings(path)
    assert ceilings.between(HOST, DEVICE, None) == 5e10
    assert ceilings.between(DEVICE, HOST, None) is None
    assert ceilings.between(HOST, COLD, "disk") == 2e9
    assert ceilings.between(HOST, COLD, "redis") is None
    assert ceilings.between(COLD, HOST, "redis") == 1e9
    assert ceilings.between(COLD, HOST, None) is None


def test_there_is_none_without_measurements_and_of_those_of_another_machine(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    ceilings = Ceilings(path)
    assert ceilings.between(HOST, DEVICE, None) is None
    measured(path, "another machine", host_to_device=5e10)
    assert ceilings.between(HOST, DEVICE, None) is None


def test_measurements_are_read_again_when_they_are_others(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    ceilings = Ceilings(path)
    for rate in (5e10, 6e10):
        measured(path, platform.node(), host_to_device=rate)
        os.utime(path, ns=(0, int(rate)))
        assert ceilings.between(HOST, DEVICE, None) == rate
    path.unlink()
    assert ceilings.between(HOST, DEVICE, None) is None


def test_a_file_that_holds_none_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "bench.json"
    path.write_text("measurements")
    ceilings = Ceilings(path)
    for _ in range(2):
        assert ceilings.between(HOST, DEVICE, None) is None
    (told,) = caplog.messages
    assert told.startswith("bandwidth is told without ceilings: ")
