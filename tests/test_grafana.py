"""The Grafana dashboard and the alert rules: their syntax, and that they ask for what is exported."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvpager.tests.admin_server import AdminServer, prompt, store_prompt
from kvpager.tests.raw_client import LAYOUT
from prometheus_client.parser import text_string_to_metric_families

GRAFANA = Path(__file__).parents[1] / "docs" / "grafana"
RULES = GRAFANA / "alerts.yaml"
DASHBOARD: dict[str, Any] = json.loads((GRAFANA / "kvpager-dashboard.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
SELECTOR = re.compile(r"\b(kvpager_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)=(~?)"([^"]*)"')
NOT_ALWAYS = {"kvpager_degraded", "kvpager_device_bytes"}
"""Known, and without a value as long as nothing is counted."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """Of every series of a sidecar with all that it can have: the labels of its samples."""
    folder = tmp_path_factory.mktemp("grafana")
    cold = f"--cold=disk://{folder}/cold", "--cold-bytes=64M"
    with AdminServer(folder / "socket", *cold, "--quota=acme=4M") as server:
        with server.client() as client:
            hashes = store_prompt(client, prompt(1, 2))
            client.space(LAYOUT).match(hashes).release()
        # What is known of the sidecar may be a second old.
        until = time.monotonic() + 30
        while 'request="Match"' not in (text := httpx.get(f"{server.url}/metrics", timeout=30).text):
            assert time.monotonic() < until
            time.sleep(0.1)
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(text):
        if family.type != "histogram":
            found[f"{family.name}_total" if family.type == "counter" else family.name] = []
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


@pytest.mark.parametrize("where", ["dashboard", "alerts"])
def test_every_metric_that_is_asked_for_is_exported_with_its_labels(
    where: str, exported: dict[str, list[dict[str, str]]]
) -> None:
    text = RULES.read_text() if where == "alerts" else "\n".join(QUERIES)
    used = SELECTOR.findall(text)
    assert len(used) > 10
    for name, matchers in used:
        assert name in exported, name
        if name in NOT_ALWAYS:
            continue
        for label, pattern, value in MATCHER.findall(matchers):
            if label == "instance":
                continue
            for one in value.split("|") if pattern else [value]:
                assert any(labels.get(label) == one for labels in exported[name]), (name, label, one)


def test_every_metric_that_is_exported_is_on_the_dashboard(
    exported: dict[str, list[dict[str, str]]],
) -> None:
    shown = {name for name, _ in SELECTOR.findall("\n".join(QUERIES))}
    told_elsewhere = {"kvpager_build_info", "kvpager_draining"}
    histogram = "kvpager_request_duration_seconds"
    told_elsewhere |= {f"{histogram}_count", f"{histogram}_sum"}
    assert exported.keys() - shown <= told_elsewhere | NOT_ALWAYS


def test_panels_have_titles_places_and_ids_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["description"]
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken
        taken |= cells


def checked_by_promtool(path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    done = subprocess.run(
        [promtool, "check", "rules", "--lint-fatal", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_the_rules() -> None:
    checked_by_promtool(RULES)


def test_promtool_takes_every_query_of_the_dashboard(tmp_path: Path) -> None:
    queries = [query.replace("$__rate_interval", "5m").replace("$instance", ".*") for query in QUERIES]
    rules = [{"record": f"panel:query:{number}", "expr": query} for number, query in enumerate(queries)]
    path = tmp_path / "queries.yaml"
    path.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))  # JSON is YAML
    checked_by_promtool(path)
