"""Calibrations: what `kvpager bench --calibrate` keeps, and who begins with it."""

from __future__ import annotations

import json
import platform
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvpager.api import calibrate
from kvpager.api.calibrate import well_known
from kvpager.api.cli import main
from kvpager.kvstore.calibration import (
    Calibration,
    DeviceCosts,
    ModelCost,
    calibration_path,
    known_calibration,
    read_calibration,
)
from kvpager.kvstore.cost import ComputeCost, CostModel, LinkCost
from kvpager.kvstore.cost_estimates import fitted_compute
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.lineage import Lineage
from kvpager.tests.raw_client import LAYOUT, names
from kvpager.tests.redis_servers import RedisServer
from kvpager.tests.troubled_disk import TroubledDisk
from kvpager.tiers.errors import ConfigError, KVPagerError

LINK, OTHER = LinkCost(1e-5, 2e-11), LinkCost(2e-5, 3e-11)
COMPUTE = ComputeCost(1e-3, 2e-5, 3e-10, 512)
IDENTITY = bytes(range(32))
FOUND = Calibration(
    platform.node(),
    1000.0,
    {"redis": OTHER},
    {"cpu": DeviceCosts(LINK, None, {IDENTITY.hex(): ModelCost("a model", COMPUTE)})},
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("KVPAGER_CALIBRATION", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvpager" / "calibration.json"


def test_it_lies_where_the_setting_the_variable_or_the_cache_says() -> None:
    there = {"KVPAGER_CALIBRATION": "/b", "XDG_CACHE_HOME": "/c", "HOME": "/d"}
    assert calibration_path(there, "/a") == Path("/a")
    assert calibration_path(there) == Path("/b")
    assert calibration_path({"XDG_CACHE_HOME": "/c", "HOME": "/d"}) == Path("/c/kvpager/calibration.json")
    assert calibration_path({"XDG_CACHE_HOME": "c", "HOME": "/d"}) == Path(
        "/d/.cache/kvpager/calibration.json"
    )


def test_it_is_read_as_it_was_written_on_this_machine_alone(cache: Path) -> None:
    assert known_calibration() is None
    FOUND.write(cache)
    assert known_calibration() == read_calibration(cache) == FOUND
    replace(FOUND, machine="another").write(cache)
    assert known_calibration() is None
    cache.write_text(json.dumps({**json.loads(FOUND.as_json()), "format": 2}))
    assert known_calibration() is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 1, "machine": 5}'])
def test_one_that_cannot_be_read_is_an_error_where_it_is_named_and_a_warning_elsewhere(
    cache: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(text)
    with pytest.raises(ConfigError, match="kvpager bench --calibrate writes it anew"):
        read_calibration(cache)
    assert known_calibration() is None
    assert "costs are measured anew" in caplog.text


def test_what_was_not_measured_now_stays_as_it_was() -> None:
    more = Calibration(platform.node(), 2000.0, {"disk": LINK}, {"cpu": DeviceCosts(None, OTHER)})
    both = more.with_earlier(FOUND)
    assert both.at == 2000.0
    assert both.cold == {"redis": OTHER, "disk": LINK}
    assert both.devices["cpu"] == DeviceCosts(LINK, OTHER, FOUND.devices["cpu"].models)
    assert more.with_earlier(replace(FOUND, machine="another")) == more


def test_a_cost_model_is_of_one_device_model_and_kind_of_cold_tier() -> None:
    def of(device: str, identity: bytes, cold: str | None) -> CostModel:
        return FOUND.cost_model(16, 4096, device=device, identity=identity, cold=cold)

    assert of("cpu", IDENTITY, "redis") == CostModel(16, 4096, COMPUTE, LINK, LINK, OTHER)
    assert of("cpu", bytes(32), None) == CostModel(16, 4096, None, LINK, LINK, None)
    free = LinkCost(0.0, 0.0)
    assert of("a GPU", IDENTITY, "disk") == CostModel(16, 4096, None, free, free, None)


def test_the_command_measures_links_a_cold_tier_and_a_model_and_keeps_them(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    from kvpager.engine.llm import LLM
    from kvpager.tests.model_files import save_tiny_model

    folder = tmp_path / "model"
    save_tiny_model("llama", folder)
    (tmp_path / "cold").mkdir()
    asked = ["bench", "--calibrate", "--seconds", "0.1", "--device", "cpu", "--model", str(folder)]
    assert main([*asked, "--cold", f"disk://{tmp_path / 'cold'}"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"kept in {cache}"
    assert any(line.startswith(f"cpu: prefill with {folder}") for line in said)
    assert list((tmp_path / "cold").iterdir()) == []
    found = known_calibration()
    assert found is not None
    assert found.cold["disk"].seconds(1 << 20) > 0
    copy = found.devices["cpu"].copy
    assert copy is not None
    assert 1e-11 < copy.seconds_per_byte < 1e-7
    # Another tier is added, and the model stays.
    with RedisServer(tmp_path) as server:
        assert main(["bench", "--calibrate", "--seconds", "0.02", "--cold", server.url, "--json"]) == 0
        assert server.client().dbsize() == 0
    again = known_calibration()
    assert again is not None
    assert json.loads(capsys.readouterr().out)["devices"].keys() == again.devices.keys()
    assert set(again.cold) == {"disk", "redis"}
    assert again.devices["cpu"].models == found.devices["cpu"].models
    # An engine of that model knows what computing takes when it begins; one that reads another file does not.
    sizes: dict[str, Any] = {"device": "cpu", "device_blocks": 16, "host_bytes": 0}
    with LLM(folder, **sizes) as llm, LLM(folder, calibration=tmp_path / "none", **sizes) as other:
        (one,) = found.devices["cpu"].models.values()
        known = llm.store.costs.model.compute
        assert known is not None
        assert known.seconds(0, 300) == pytest.approx(one.compute.seconds(0, 300), rel=0.05)
        assert other.store.costs.model.compute is None
    assert main(["size", str(folder), "--tokens", "100", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["computed_again"]
    assert told["device"] == "cpu"
    assert told["seconds"] == pytest.approx(one.compute.seconds(0, 100))
    # A simulation reckons with it, and a sidecar begins with what its cold tier takes.
    asked = [
        "simulate",
        "--generate",
        "chats",
        "--sessions",
        "4",
        "--policy",
        "lru",
        "--beside",
        "none",
        "--jobs",
        "1",
    ]
    assert main([*asked, "--blocks", "200", "--calibration", str(cache), "--json"]) == 0
    cost = json.loads(capsys.readouterr().out)["cost"]
    assert cost["source"].startswith(f"measured here, of {folder} on cpu and a cold tier on ")
    for name in ("seconds_per_step", "seconds_per_token", "seconds_per_token_pair"):
        assert cost["compute"][name] == getattr(one.compute, name)
    assert one.errors is not None
    assert one.errors.seconds_per_token_pair > 0


def test_where_it_cannot_be_kept_is_found_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    file.touch()
    for path, problem in ((folder, "Is a directory"), (file / "beneath", "Not a directory|File exists")):
        began = time.monotonic()
        # More than this many seconds would be measured.
        assert main(["bench", "--calibrate", "--seconds", "10", "--calibration", str(path)]) == 1
        assert time.monotonic() - began < 9.0
        assert re.search(f"{path} cannot be written: ({problem})", capsys.readouterr().err)
        with pytest.raises(KVPagerError, match=f"{path} cannot be written: ({problem})"):
            FOUND.write(path)
    assert sorted(tmp_path.iterdir()) == [file, folder]
    assert list(folder.iterdir()) == []


def test_what_is_known_less_well_than_prompts_take_is_told_and_not_kept(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from kvpager.tests.model_files import save_tiny_model

    folder = tmp_path / "model"
    save_tiny_model("llama", folder)
    asked = ["bench", "--calibrate", "--seconds", "0.0001", "--device", "cpu", "--model", str(folder)]
    # As on a machine that has no time for it at all.
    monkeypatch.setattr(calibrate, "_LEAST_SECONDS", 0.0)
    assert main(asked) == 1
    told = capsys.readouterr()
    assert "is not known: too few prompts were done in time" in told.err
    assert told.out.splitlines()[-1] == f"kept in {cache}"
    found = known_calibration()
    assert found is not None
    assert found.devices["cpu"].copy is not None
    assert not found.devices["cpu"].models


def test_a_figure_may_be_uncertain_where_it_hardly_matters() -> None:
    sizes = [(32, 512.0), (128, 8192.0), (32, 2560.0), (128, 16384.0), (512, 131072.0)]
    true = (1e-3, 2e-5, 3e-10)

    def fitted(noise: list[float]) -> bool:
        measured = [
            (tokens, pairs, (true[0] + true[1] * tokens + true[2] * pairs) * times)
            for (tokens, pairs), times in zip(sizes, noise, strict=True)
        ]
        return well_known(ModelCost("a model", *fitted_compute(measured, 512)), measured)

    assert fitted([1.0] * 5)
    assert fitted([1.02, 0.99, 1.0, 1.01, 0.98])
    assert not fitted([30.0, 1.0, 1.0, 40.0, 0.2])
    assert not well_known(ModelCost("a model", COMPUTE), [])


def test_options_of_a_calibration_are_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--model", "smollm2"]) == 1
    assert "--model: is for --calibrate" in capsys.readouterr().err


# What losing blocks of host memory costs


def test_a_space_reckons_losses_by_what_it_was_told_and_where_copies_are(tmp_path: Path) -> None:
    disk = TroubledDisk(tmp_path)
    with HostStore(1 << 20, cold=disk, extent_bytes=1 << 16) as host:
        host.calibrate_cold(OTHER)
        space = host.space(LAYOUT)
        held = names(0, 3)
        blocks = np.zeros((3, LAYOUT.block_bytes), np.uint8)
        assert space.put(held, blocks, wait=20.0, lineage=Lineage.of_chain(held)) == 3
        assert host.flush() == 0
        assert (
            space.put(names(3, 1), blocks[:1], wait=20.0) == 1
        )  # of which nothing is known, and no copy there
        with space.match([*held, *names(3, 1)], start=None) as lease:
            records = space._records
            assert records.losses(lease.slots).tolist() == [1.0] * 4
            slow = ComputeCost(0.0, 1.0, 0.5)
            space.tell_costs(CostModel(LAYOUT.block_size, LAYOUT.block_bytes, slow, LINK, LINK, LINK))
            records.in_cold[lease.slots] = [False, False, True, False]
            losses = records.losses(lease.slots)
            size = LAYOUT.block_size
            computed = [size + 0.5 * size * size / 2, size + 0.5 * size * (size + size / 2)]
            assert losses[:2] == pytest.approx(computed)
            assert losses[3] == pytest.approx(computed[0])
            # The store's own figure of its cold tier counts, not what the engine was told of it.
            nbytes = LAYOUT.block_bytes
            assert losses[2] == pytest.approx(
                nbytes * (OTHER.seconds_per_byte + LINK.seconds_per_byte), rel=0.1
            )
        with pytest.raises(ConfigError, match="costs"):
            space.tell_costs(CostModel(1, 1, None, LINK, LINK))


def test_a_store_learns_what_its_cold_tier_takes_by_reading_it(tmp_path: Path) -> None:
    disk = TroubledDisk(tmp_path)
    with HostStore(1 << 20, cold=disk, extent_bytes=1 << 16) as host:
        space = host.space(LAYOUT)
        held = names(0, 8)
        assert space.put(held, np.zeros((8, LAYOUT.block_bytes), np.uint8), wait=20.0) == 8
        told = CostModel(LAYOUT.block_size, LAYOUT.block_bytes, None, LINK, LINK)
        space.tell_costs(told)
        assert space.costs == told
        disk.pause = 0.02
        for name in held:
            space.demote([name])
            space.load([name], 5.0).release()
        space.tell_costs(told)
        assert space.costs is not None
        assert space.costs.cold is not None
        assert 0.02 < space.costs.cold.seconds(LAYOUT.block_bytes) < 0.2
