"""What Prometheus scrapes: named by its rules, and equal to what the sidecar counts."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from time import perf_counter

import pytest
from kvpager.api.admin.metrics import exposition
from kvpager.api.admin.watch import Facts
from kvpager.api.client import Connection
from kvpager.api.service_times import ServiceTimes
from kvpager.kvstore.control import EngineReport
from kvpager.tests.admin_server import AdminServer, prompt, store_prompt
from kvpager.tests.raw_client import LAYOUT
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.xdist_group("admin metrics")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminServer]:
    folder = tmp_path_factory.mktemp("admin")
    options = f"--cold=disk://{folder}/cold", "--cold-bytes=64M", "--quota=rich=4M"
    with AdminServer(folder / "socket", *options) as made:
        yield made


@pytest.fixture(scope="module")
def engine(server: AdminServer) -> Iterator[Connection]:
    with server.client(name="engine") as made:
        hashes = store_prompt(made, prompt(1, 5), tenant="rich")
        space = made.space(LAYOUT, tenant="rich")
        space.match(hashes).release()
        space.match([*hashes[:2], bytes(16)]).release()
        made.flush()
        made.report(EngineReport({"one": "decoding"}, 4096, 10, 5, 1.0, 1.0))
        yield made


def scraped(server: AdminServer) -> dict[tuple[str, ...], float]:
    """Values by name and labels, these in the order of their names."""
    answer = server.ask("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_the_metrics_are_what_the_sidecar_counts(server: AdminServer, engine: Connection) -> None:
    found = scraped(server)
    stats = engine.stats()
    assert found["kvpager_hit_blocks_total", "host"] == stats["host"]["matched"] == 7
    assert found["kvpager_missed_blocks_total", "absent", "host"] == stats["host"]["missed"] == 1
    assert found["kvpager_saved_tokens_total",] == 7 * LAYOUT.block_size
    assert found["kvpager_moved_blocks_total", "host", "cold"] == 5
    assert found["kvpager_moved_bytes_total", "host", "cold"] == 5 * LAYOUT.block_bytes
    assert found["kvpager_tenant_bytes", "rich"] == 5 * LAYOUT.block_bytes
    assert found["kvpager_tenant_quota_bytes", "rich"] == 4 << 20
    assert found["kvpager_host_blocks", "resident"] == 5
    assert found["kvpager_device_bytes", "held"] == 5 * 4096
    assert found["kvpager_sessions",] == 1
    assert found["kvpager_host_capacity_bytes",] == 8 << 20
    assert found["kvpager_host_largest_free_run_bytes",] > 4 << 20


def test_how_long_requests_take_is_a_histogram(server: AdminServer, engine: Connection) -> None:
    found = scraped(server)
    assert found["kvpager_request_duration_seconds_count", "Match"] == 2
    assert found["kvpager_request_duration_seconds_bucket", "+Inf", "Match"] == 2
    assert 0 < found["kvpager_request_duration_seconds_sum", "Match"] < 2
    bucket = "kvpager_request_duration_seconds_bucket"
    bounds = [key[1] for key in found if key[0] == bucket and key[2] == "Match"]
    assert bounds[:3] == ["1.6e-05", "3.2e-05", "6.4e-05"]


def test_promtool_finds_nothing_to_say(server: AdminServer, engine: Connection) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian's package prometheus; scripts/test brings it)")
    text = server.ask("GET", "/metrics").text
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_many_tenants_are_told_together(server: AdminServer, engine: Connection) -> None:
    status = engine.status()
    tenants = {f"tenant {number:03}": {"bytes": 1, "quota": 0} for number in range(100)}
    tenants["rich"] = {"bytes": 5, "quota": 9}
    facts = Facts(status, {**engine.stats(), "tenants": tenants}, engine.clients())
    samples = [
        sample
        for family in text_string_to_metric_families(exposition(facts, None).decode())
        if family.name == "kvpager_tenant_bytes"
        for sample in family.samples
    ]
    assert len(samples) == 33
    assert samples[0].labels == {"tenant": "rich"}
    assert (samples[-1].labels, samples[-1].value) == ({"tenant": "*"}, 69)


def test_a_time_falls_into_the_first_bucket_that_holds_it() -> None:
    times = ServiceTimes()
    for microseconds in (0, 10, 40, 1000, 20_000_000):
        times.ended("Match", perf_counter() - microseconds / 1e6)
    counted = times.snapshot()["Match"]
    assert sum(counted["counts"]) == 5
    assert counted["counts"][0] in (1, 2)  # what it takes to look at the clock is counted, too
    assert counted["counts"][-1] == 1
    assert counted["counts"][6] == 1  # up to 1024 microseconds
    assert counted["seconds"] == pytest.approx(20.00105, rel=0.01)
