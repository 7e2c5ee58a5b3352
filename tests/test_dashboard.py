"""The dashboard in a real browser, on a real sidecar with its admin process and engines."""

from __future__ import annotations

import json
import platform
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvpager.api.measurements import Measurement, Measurements, Unit, keep, measurements_path
from kvpager.tests.admin_server import AdminServer
from kvpager.tests.chromium import CHROMIUM, Chromium, Page
from kvpager.tests.dashboard_scene import HOST_BYTES, LAYOUT, Scene, scene_on

pytestmark = [
    pytest.mark.skipif(
        CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)"
    ),
    pytest.mark.xdist_group("dashboard"),
]

AXE = Path(__file__).with_name("data") / "axe-core" / "axe.min.js"
DOCS = Path(__file__).resolve().parents[1] / "docs"
DESKTOP = 1440, 900
PHONE = 390, 844
RULES = "wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"
FOCUSED = """(() => {
    const at = document.activeElement;
    const ring = getComputedStyle(at.type === "radio" ? at.nextElementSibling : at).outlineStyle;
    return `${at.id || at.name || at.className || at.ariaLabel}${ring === "none" ? " without a ring" : ""}`;
})()"""
UNITS = {unit: 1 << 10 * place for place, unit in enumerate(("B", "KiB", "MiB", "GiB"))}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminServer]:
    """With a cold tier, and on the same port after each start."""
    folder = tmp_path_factory.mktemp("dashboard")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    measured(folder, 5e10)
    options = f"--admin=127.0.0.1:{port}", f"--cold=disk://{folder}/cold", "--cold-bytes=256M"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        with AdminServer(folder / "sidecar.sock", *options, host_bytes=HOST_BYTES) as made:
            yield made


def measured(state: Path, rate: float) -> None:
    """Have `kvpager bench` have measured this rate to the GPU."""
    found = Measurement("host_to_device", "DMA", rate, Unit.BYTES_PER_SECOND)
    path = measurements_path({"XDG_STATE_HOME": str(state)})
    keep(Measurements(platform.node(), 1.0, "0", (found,), {}), path)


@pytest.fixture(scope="module")
def scene(server: AdminServer) -> Iterator[Scene]:
    with scene_on(server) as made:
        made.fill()
        # Nothing goes on by itself from here.
        made.engines[0].flush()
        yield made


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture
def page(browser: Chromium, server: AdminServer, scene: Scene) -> Iterator[Page]:
    """The dashboard, when it shows all that there is to be shown."""
    with browser.page(*DESKTOP) as made:
        opened(made, server)
        yield made


def opened(page: Page, server: AdminServer) -> Page:
    page.open(f"{server.url}/")
    for shown in ("#prefixes tr", "#sessions tr", "#spaces tr", "#map-words p"):
        page.until(f"document.querySelector('{shown}') !== null")
    return page


def give_token(page: Page, token: str) -> None:
    page.click("#token-open")
    page.write(token)
    page.press("Enter")


def bytes_in(text: str) -> list[float]:
    """Sizes that a text names, in bytes."""
    return [
        float(number.replace(",", "")) * UNITS[unit]
        for number, unit in re.findall(r"([\d.,]+) ([KMG]?i?B)\b", text)
    ]


def shortly(count: int) -> str:
    """As many as that, in three digits."""
    return f"{count:,}" if count < 10_000 else f"{float(f'{count / 1000:.3g}'):g}K"


def numbers_in(text: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", text)]


def shown_alike(size: float) -> Any:
    """Told in three digits."""
    return pytest.approx(size, rel=0.006)


def violations(page: Page, part: str = "html") -> list[str]:
    """What axe finds wrong with a part of what is shown."""
    if not page.value("'axe' in window"):
        page.value(f"{AXE.read_text()}; true")
    rules = json.dumps({"runOnly": {"type": "tag", "values": RULES}})
    found = page.value(
        f"axe.run('{part}', {rules}).then((said) => said.violations.flatMap("
        "(one) => one.nodes.map((node) => `${one.id}: ${node.target} ${node.failureSummary}`)))"
    )
    assert isinstance(found, list)
    return found


def test_the_page_loads_without_an_error_and_asks_nobody_else(page: Page, server: AdminServer) -> None:
    assert page.text("#state") == "Serving"
    page.until("document.querySelectorAll('.tier').length === 3")
    assert page.complaints == []
    assert len(page.requests) > 10
    assert [url for url in page.requests if not url.startswith(f"{server.url}/")] == []


def test_a_page_has_scripts_and_styles_of_its_own_files_alone(server: AdminServer) -> None:
    answer = server.ask("GET", "/")
    policy = answer.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "http" not in policy
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=|https?://", answer.text)


def test_pictures_of_it_are_small_and_shown() -> None:
    page = (DOCS / "rest.md").read_text()
    pictures = {path.name: path.stat().st_size for path in (DOCS / "figures").glob("dashboard_*.png")}
    assert set(re.findall(r"\(figures/(dashboard_.*?)\)", page)) == set(pictures)
    assert len(pictures) == 3
    assert all(size < 250_000 for size in pictures.values())


def test_numbers_are_those_of_the_api(page: Page, server: AdminServer) -> None:
    status, host, cells = (server.get(f"/v1/{path}") for path in ("status", "tiers/host", "tiers/host/map"))
    rows = page.value(
        "[...document.querySelectorAll('#spaces tr')].map((row) => [row.firstElementChild.title,"
        " ...[...row.querySelectorAll('.number')].map((cell) => Number(cell.innerText.replaceAll(',', '')))])"
    )
    names = ("id", "resident_blocks", "leased_blocks", "pinned_blocks", "free_blocks")
    assert rows == [[space[name] for name in names] for space in status["spaces"]]
    tenants = page.value("[...document.querySelectorAll('#tenants tr')].map((row) => row.innerText)")
    assert len(tenants) == 4
    for row, share in zip(tenants, host["tenants"], strict=True):
        assert row.startswith(share["tenant"] or "no tenant")
        assert bytes_in(row)[0] == shown_alike(share["used_bytes"])
    filled = page.text(".tier:nth-child(2) .fill")
    assert bytes_in(filled) == [shown_alike(host["used_bytes"]), shown_alike(host["capacity_bytes"])]
    assert numbers_in(filled)[-1] == host["blocks"]
    cold = server.get("/v1/tiers/cold")
    filled = page.text(".tier:nth-child(3) .fill")
    assert bytes_in(filled) == [shown_alike(cold["used_bytes"]), shown_alike(cold["capacity_bytes"])]
    share = page.value(
        "parseFloat(document.querySelector('.tier:nth-child(3) .state-used').getAttribute('width'))"
    )
    assert share == pytest.approx(100 * cold["used_bytes"] / cold["capacity_bytes"], abs=0.01)
    free, longest = bytes_in(page.text("#map-words p"))
    assert free == shown_alike(cells["free_bytes"])
    assert longest == shown_alike(cells["largest_free_run_bytes"])
    assert cells["free_runs"] in numbers_in(page.text("#map-words p"))
    listed = page.value(
        "[...document.querySelectorAll('#prefixes tr')].map((row) => row.dataset.key.split(' ')[1])"
    )
    assert listed == [one["hash"] for one in server.get(f"/v1/prefixes?limit={len(listed)}")["items"]]
    assert numbers_in(page.text("#sessions-sum")) == [status["sessions_awake"], status["sessions_asleep"]]


def test_what_is_stored_and_asked_for_shows_by_itself(page: Page, server: AdminServer, scene: Scene) -> None:
    before = server.get("/v1/status")["hits"]
    page.until("document.querySelector('#hits .summary').innerText !== ''")
    for _ in range(6):
        scene.serve()
    scene.rest()
    blocks = server.get("/v1/tiers/host")["blocks"]
    page.until(
        f"document.querySelector('.tier:nth-child(2) .fill').innerText.endsWith('· {blocks:,} blocks')"
    )
    page.until("document.querySelector('#events .blocks[data-kind=stored]') !== null")
    hits = server.get("/v1/status")["hits"]
    found = hits["host_blocks"] - before["host_blocks"]
    asked = found + hits["missed_blocks"] - before["missed_blocks"]
    assert asked > found > 0
    page.until(
        f"document.querySelector('#hits .summary').innerText.includes('minute {100 * found / asked:.1f}%')"
    )
    assert page.value("document.querySelectorAll('#hits polygon').length") == 2
    tokens = hits["saved_tokens"] - before["saved_tokens"]
    assert tokens == found * LAYOUT.block_size
    told = f"{shortly(hits['saved_tokens'])} since"
    page.until(f"document.querySelector('#saved .summary').innerText.startsWith('{told}')")
    assert page.value("document.querySelectorAll('#saved polygon').length") == 1


def test_the_map_tells_of_each_place_by_state_age_and_tenant(page: Page, server: AdminServer) -> None:
    cells = server.get("/v1/tiers/host/map?cells=2048")
    colours = (
        "(() => { const map = document.querySelector('#map'); return new Set(map.getContext('2d')"
        ".getImageData(0, 0, map.width, map.height).data.join().match(/\\d+,\\d+,\\d+,255/g)).size; })()"
    )
    assert page.value(colours) >= 3
    for by in ("age", "tenant"):
        page.click(f"#map-by input[value={by}] + span")
        assert page.value(colours) >= 2
    legend = page.text("#map-legend")
    assert all((space["tenant"] or "no tenant") in legend for space in cells["spaces"])
    assert page.value("Number(document.querySelector('#map-at').max)") == cells["count"] - 1
    place = cells["cells"]["space"].index(1)
    page.value(
        f"(() => {{ const at = document.querySelector('#map-at'); at.value = {place};"
        " at.dispatchEvent(new Event('input')); })()"
    )
    space = cells["spaces"][1]
    assert f"mostly {space['tenant']} · {space['shard']}" in page.text("#map-told")
    assert page.value("document.querySelectorAll('#map-rows tr').length") == 16


def test_pinning_needs_a_token_and_says_so(page: Page, server: AdminServer) -> None:
    page.click("#prefixes .pin")
    assert page.text("#token-why") == "Pinning needs a token of role operate."
    assert page.value("document.activeElement.id") == "token"
    page.write("not a token")
    page.press("Enter")
    page.until("document.querySelector('#token-problem').innerText === 'This token is none that is known.'")
    page.press("Escape")
    assert not page.value("document.querySelector('#token-dialog').open")
    give_token(page, server.tokens["read"])
    page.until("document.querySelector('#token-open').innerText === 'Role: read'")
    page.click("#prefixes .pin")
    assert page.text("#token-why") == "Pinning needs a token of role operate."
    assert not [url for url in page.requests if url.endswith("/pin")]
    page.value("sessionStorage.setItem('kvpager-token', 'of another time')")
    opened(page, server)
    page.until("document.querySelector('#token-open').innerText === 'Token…'")
    assert page.text("#state") == "Serving"


def test_looking_from_elsewhere_asks_for_a_token(
    browser: Chromium, server: AdminServer, scene: Scene
) -> None:
    with browser.page(*DESKTOP) as page:
        # As of a proxy, behind which nobody is of this machine.
        page.ask("Network.setExtraHTTPHeaders", headers={"X-Forwarded-For": "192.0.2.1"})
        page.open(f"{server.url}/")
        page.until("document.querySelector('#state').innerText === 'A token is needed'")
        assert page.text("#token-why") == "Looking from another machine needs a token."
        page.write(server.tokens["read"])
        page.press("Enter")
        page.until("document.querySelector('#state').innerText === 'Serving'")
        page.until("document.querySelector('#prefixes tr') !== null")
        until = time.monotonic() + 20
        while not page.value("document.querySelector('#events li') !== null"):
            assert time.monotonic() < until, "no event is shown"
            scene.serve()
            time.sleep(0.2)
        scene.rest()


def test_prefixes_are_pinned_unpinned_and_evicted_with_a_token(page: Page, server: AdminServer) -> None:
    give_token(page, server.tokens["operate"])
    page.until("document.querySelector('#token-open').innerText === 'Role: operate'")
    space, prefix = page.value("document.querySelector('#prefixes tr').dataset.key").split()
    row = f"#prefixes [data-key='{space} {prefix}']"
    address = f"/v1/prefixes/{prefix}?space={space}"
    page.click(f"{row} .pin")
    page.until(f"document.querySelector(\"{row} .pin\").innerText === 'Unpin'")
    assert server.get(address)["prefix"]["pins"] == 1
    page.click(f"{row} .pin")
    page.until(f"document.querySelector(\"{row} .pin\").innerText === 'Pin'")
    own = server.get(address)["prefix"]
    assert own["pins"] == 0
    page.click(f"{row} .evict")
    words = page.until(
        "document.querySelector('#evict-dialog').open && document.querySelector('#evict-words').innerText"
    )
    assert numbers_in(words)[0] == own["own_blocks"]
    assert server.get(address)["prefix"]["own_blocks"] == own["own_blocks"]
    page.click("#evict-do")
    page.until(f'document.querySelector("{row}") === null')
    assert page.text("#notice").startswith("Evicted")
    assert server.ask("GET", address).status_code == 404
    secret = server.tokens["operate"]
    assert not [url for url in page.requests if secret in url]
    assert secret not in page.value("JSON.stringify(localStorage) + document.cookie + location.href")
    page.open(f"{server.url}/")
    page.until("document.querySelector('#token-open').innerText === 'Role: operate'")
    page.click("#token-open")
    page.click("#token-forget")
    page.until("document.querySelector('#token-open').innerText === 'Token…'")
    assert page.value("sessionStorage.length") == 0


def test_sessions_sleep_and_wake(page: Page, server: AdminServer) -> None:
    give_token(page, server.tokens["operate"])
    page.until("document.querySelector('#token-open').innerText === 'Role: operate'")
    page.value(
        "document.querySelector('#session-state').value = 'awake';"
        "document.querySelector('#session-state').dispatchEvent(new Event('change'))"
    )
    page.until(
        "[...document.querySelectorAll('#sessions .chip')].every((chip) => chip.innerText === 'running')"
    )
    name = page.text("#sessions tr:first-child th")
    page.click("#sessions tr:first-child button")
    page.until(f"document.querySelector('#notice').innerText === '{name} sleeps: 7 blocks.'")
    page.until(f"![...document.querySelectorAll('#sessions th')].some((cell) => cell.innerText === '{name}')")
    asleep = [one["id"] for one in server.get("/v1/sessions?state=asleep")["items"]]
    assert name in asleep


def test_bandwidth_is_told_against_what_the_machine_reaches(page: Page, server: AdminServer) -> None:
    flows = {(flow["source"], flow["target"]): flow for flow in server.get("/v1/tiers/device")["flows"]}
    flow = flows["host", "device"]
    assert flow["ceiling_bytes_per_second"] == 5e10
    assert flows["device", "host"]["ceiling_bytes_per_second"] is None
    share = flow["bytes_per_second"] / 5e10
    told = page.value("[...document.querySelectorAll('#flows li')].map((one) => one.innerText)")
    assert f"{100 * share:.1f}% of 50 GB/s, measured here" in next(
        one for one in told if "host → device" in one
    )
    assert "the best seen" in next(one for one in told if "device → host" in one)
    measured(server.path.parent, 8e10)
    page.until("document.querySelector('#flows').innerText.includes('of 80 GB/s, measured here')")


def test_what_is_degraded_is_told_with_its_reason(page: Page, server: AdminServer) -> None:
    server.operate("PATCH", "/v1/config", {"quotas": {"acme": 1 << 20, "globex": 1 << 20}})
    page.until("document.querySelector('#state').innerText === 'Serving, degraded'")
    reasons = [one["reason"] for one in server.get("/v1/status")["degraded"]]
    assert len(reasons) == 2
    for reason in reasons:
        assert reason.partition(" has ")[0] in page.text("#degraded")
    page.until("document.querySelector('#tenants').innerText.includes('1 MiB (')")
    server.operate("PATCH", "/v1/config", {"quotas": {}})
    page.until("document.querySelector('#state').innerText === 'Serving'")
    assert page.value("document.querySelector('#degraded').hidden")
    server.operate("POST", "/v1/drain", {"on": True, "deadline_seconds": 5})
    page.until("document.querySelector('#state').innerText === 'Draining'")
    server.operate("POST", "/v1/drain", {"on": False})
    page.until("document.querySelector('#state').innerText === 'Serving'")


def test_everything_is_reached_by_keyboard(page: Page) -> None:
    reached: list[str] = []
    for _ in range(40):
        page.press("Tab")
        reached.append(page.value(FOCUSED))
    for wanted in (
        "skip",
        "token-open",
        "theme",
        "map-by",
        "map-at",
        "order",
        "prefix-tenant",
        "hash",
        "pin",
        "evict",
    ):
        assert wanted in reached, reached
    assert [one for one in reached if one.endswith("without a ring")] == []
    page.value("document.querySelector('#map-at').focus()")
    before = page.text("#map-told")
    page.press("ArrowRight")
    assert page.text("#map-told") != before
    page.value("document.querySelector('#prefixes .pin').focus()")
    page.press("Enter")
    assert page.value("document.querySelector('#token-dialog').open")
    page.press("Escape")
    page.until("document.activeElement.className === 'pin'")


def test_what_is_listed_anew_keeps_its_elements_and_the_focus(page: Page) -> None:
    kept = page.value("""(async () => {
        const { element, keyed } = await import("/static/elements.js");
        const list = document.body.appendChild(element("div"));
        const add = (one, name) => one.append(name);
        const show = (names) => keyed(list, names, String, () => element("button"), add);
        show(["a", "b", "c"]);
        const last = list.lastElementChild;
        last.focus();
        show(["d", "c", "a"]);
        return [list.innerText, document.activeElement === last, list.children[1] === last];
    })()""")
    assert kept == ["dccaa", True, True]


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_axe_finds_nothing_to_be_wrong(
    browser: Chromium, server: AdminServer, scene: Scene, size: tuple[int, int]
) -> None:
    with browser.page(*size) as page:
        opened(page, server)
        page.value("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        for dark in (False, True):
            page.show(*size, dark=dark)
            assert page.value("document.documentElement.scrollWidth") == size[0]
            assert violations(page) == []
            page.click("#token-open")
            assert violations(page, "#token-dialog") == []
            page.press("Escape")


def test_light_and_dark_are_chosen_by_hand_too(page: Page, server: AdminServer) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.value(ground)
    page.click("#theme")
    assert page.value(ground) == light
    page.click("#theme")
    dark = page.value(ground)
    assert dark != light
    opened(page, server)
    assert page.value(ground) == dark
    page.click("#theme")
    assert page.value(ground) == light


def test_the_page_outlives_a_sidecar_that_is_killed(page: Page, server: AdminServer) -> None:
    before = server.get("/v1/status")
    server.serve.kill()
    page.until("document.querySelector('#state').innerText === 'Away'")
    assert page.text("#away").startswith("The sidecar is away: nobody answers. What is shown is of ")
    server.serve.start()
    page.until("document.querySelector('#state').innerText === 'Serving'", 60.0)
    server.await_admin()
    after = server.get("/v1/status")
    assert after["boot_id"] != before["boot_id"]
    assert page.value("document.querySelector('#away').hidden")
    page.until(f"document.querySelector('#facts').innerText.includes('boot {after['boot_id'][:8]}')")
    page.until("document.querySelector('#events [data-kind=connected]') !== null")
