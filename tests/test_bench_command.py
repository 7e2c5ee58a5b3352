"""`kvpager bench`: what it measures, what it leaves behind, and where its figures are kept."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kvpager.api.bench import measurement_line
from kvpager.api.bench_gpu import measure_gpu, why_no_gpu
from kvpager.api.cli import main
from kvpager.api.measurements import Measurement, Measurements, Unit, keep, kept, measurements_path
from kvpager.api.turns import median_seconds
from kvpager.tests.redis_servers import RedisServer
from kvpager.tiers.errors import ConfigError

Output = pytest.CaptureFixture[str]
MEMORY = ["memory_copy", "memory_put", "memory_get"]
SIDECAR = ["socket_round_trip", "sidecar_match", "sidecar_match_p99"]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where figures are kept; another sidecar's settings are there, and are none of the bench's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("KVPAGER_COLD", "nonsense://")
    monkeypatch.setenv("KVPAGER_FRESH", "yes")
    return tmp_path / "state" / "kvpager" / "bench.json"


def test_it_measures_what_it_can_says_why_it_cannot_and_leaves_nothing(
    tmp_path: Path, state: Path, capsys: Output
) -> None:
    folder = tmp_path / "cold"
    folder.mkdir()
    urls = [f"disk://{folder}", "redis://:sesame@127.0.0.1:1", "http://x", "disk:///proc/none"]
    assert main(["bench", "--seconds", "0.05", "--json", *(f"--cold={url}" for url in urls)]) == 1
    said = capsys.readouterr()
    found: dict[str, Any] = json.loads(said.out)
    names = [one["name"] for one in found["found"]]
    gpu = [name for name in names if name not in (*MEMORY, *SIDECAR) and not name.startswith("disk_")]
    assert names == [*MEMORY, *gpu, *SIDECAR, "disk_plain_put", "disk_put", "disk_plain_get", "disk_get"]
    assert bool(gpu) == (why_no_gpu() is None) == ("GPU" not in found["missing"])
    assert all(one["value"] > 0 for one in found["found"])
    assert all(one["ceiling"] in (None, *names) for one in found["found"])
    missing = found["missing"]
    assert "127.0.0.1:1 cannot be used" in missing["cold tier redis://:***@127.0.0.1:1"]
    assert missing["cold tier http://x"].startswith("--cold: must begin with redis://")
    assert "no folder can be made in /proc" in missing["cold tier disk:///proc/none"]
    assert "sesame" not in said.out + said.err
    last = kept(state)
    assert last is not None
    assert json.loads(last.as_json()) == found
    assert list(folder.iterdir()) == []
    assert sorted(one.name for one in tmp_path.iterdir()) == ["cold", "state"]


def test_people_read_lines_with_shares_of_the_machines_own(
    tmp_path: Path, capsys: Output, state: Path
) -> None:
    with RedisServer(tmp_path) as server:
        assert main(["bench", "--seconds", "0.05", "--cold", server.url]) == 0
        assert server.client().dbsize() == 0
    said = capsys.readouterr()
    assert said.err == ""
    lines = said.out.splitlines()
    assert lines[0].startswith("memory: plain copy, 32 MiB")
    assert "GB/s" in lines[0]
    assert lines[1].startswith("  put of 16 blocks of 2 MiB")
    assert lines[1].endswith("%")
    assert any(line.startswith("  blocks of 2 MiB read and verified") for line in lines)
    assert lines[-1] == f"kept in {state}"
    last = kept(state)
    assert last is not None
    assert [one.name for one in last.found][-4:] == [
        "redis_plain_put",
        "redis_put",
        "redis_plain_get",
        "redis_get",
    ]


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "11"])
def test_seconds_that_make_no_sense_are_refused(seconds: str, capsys: Output) -> None:
    assert main(["bench", "--seconds", seconds]) == 1
    assert capsys.readouterr().err.startswith("kvpager bench: --seconds: must be a ")


@pytest.mark.gpu
def test_a_gpu_is_measured() -> None:
    found = {one.name: one for one in measure_gpu(1.0)}
    assert {*found} == {"host_to_device", "device_to_host", "load", "store", "host_read", "pull"}
    # Nothing goes over a bus faster than a bus does.
    assert all(1e8 < one.value < 1e12 for one in found.values())


def test_a_share_is_that_of_the_figure_that_could_be_equalled() -> None:
    ceiling = Measurement("copy", "copy", 10e9, Unit.BYTES_PER_SECOND)
    reached = Measurement("put", "put", 9e9, Unit.BYTES_PER_SECOND, "copy")
    trip = Measurement("trip", "trip", 10e-6, Unit.SECONDS)
    match = Measurement("match", "match", 40e-6, Unit.SECONDS, "trip")
    alone = replace(reached, ceiling="none")
    all_of_them = Measurements("here", 0.0, "1", (ceiling, reached, trip, match), {})
    assert all_of_them.reached(reached) == pytest.approx(0.9)
    assert all_of_them.reached(match) == pytest.approx(0.25)
    assert all_of_them.reached(ceiling) is all_of_them.reached(alone) is None
    assert measurement_line(all_of_them, match).split() == ["match", "40.0", "us", "25%"]


def test_figures_are_kept_whole_or_told_to_be_none(tmp_path: Path, state: Path) -> None:
    assert measurements_path(os.environ) == state
    assert kept(state) is None
    figures = Measurements(
        "here", 1.5, "1", (Measurement("copy", "copy", 1.0, Unit.SECONDS),), {"GPU": "none"}
    )
    keep(figures, state)
    assert kept(state) == figures
    assert [one.name for one in state.parent.iterdir()] == ["bench.json"]
    state.write_text(state.read_text().replace('"format": 1', '"format": 2'))
    assert kept(state) is None
    for text in ("", "[]", '{"format": 1}', '{"format": 1, "found": [{}]}'):
        state.write_text(text)
        with pytest.raises(ConfigError, match="kvpager bench writes them anew"):
            kept(state)
    shutil.rmtree(state.parent)


def test_contenders_take_turns_and_another_one_goes_first_each_round() -> None:
    calls: list[str] = []
    taken = median_seconds({name: partial(calls.append, name) for name in "abc"}, 0.0)
    assert "".join(calls) == "abcbcacababc"
    assert {*taken} == {*"abc"}
