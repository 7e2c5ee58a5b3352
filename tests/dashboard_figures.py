"""``python -m kvpager.tests.dashboard_figures docs/figures``: how the dashboard looks.

A real sidecar with what engines would store and ask for, and the page after some minutes of it, at the width
of a desktop and of a phone.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from kvpager.tests.admin_server import AdminServer
from kvpager.tests.chromium import CHROMIUM, Chromium
from kvpager.tests.dashboard_scene import Scene, scene_on
from kvpager.tiers.layout import KVLayout

_SECONDS: Final = 120.0
_LAYOUT: Final = KVLayout(8, 8, 64)
"""Blocks of 256 KiB."""
_HOST_BYTES: Final = 1 << 30
_PICTURES: Final = (
    ("dashboard_desktop.png", 1440, 940, False, "state", "body"),
    ("dashboard_desktop_dark.png", 1440, 820, True, "state", ".third"),
    ("dashboard_phone.png", 390, 844, False, "state", "body"),
)


def main(folder: Path) -> int:
    """Draw them all; returns the exit code."""
    if CHROMIUM is None:
        print("chromium is not installed", file=sys.stderr)
        return 1
    # Short, since the page shows it.
    with tempfile.TemporaryDirectory(prefix="kvpager-") as name:
        place = Path(name)
        options = f"--cold=disk://{place}/cold", "--cold-bytes=4G"
        with (
            AdminServer(place / "sidecar.sock", *options, host_bytes=_HOST_BYTES) as server,
            scene_on(server, _LAYOUT) as scene,
            Chromium(place / "profile") as browser,
        ):
            scene.fill()
            server.operate("PATCH", "/v1/config", {"quotas": {"acme": 768 << 20}})
            for picture, data in _drawn(browser, server.url, scene):
                (folder / picture).write_bytes(data)
                print(f"{picture}: {len(data)} bytes")
    return 0


def _drawn(browser: Chromium, url: str, scene: Scene) -> list[tuple[str, bytes]]:
    pages = []
    for picture, width, height, dark, by, start in _PICTURES:
        page = browser.page(width, height, dark=dark)
        page.open(f"{url}/")
        page.until("document.querySelector('#prefixes tr') !== null")
        page.click(f"#map-by input[value={by}] + span")
        page.click("#prefix-order input[value=hottest] + span")
        pages.append((picture, page, start))
    until = time.monotonic() + _SECONDS
    while time.monotonic() < until:
        scene.serve()
        scene.report()
        time.sleep(0.2)
    for _, page, start in pages:
        page.value(f"document.querySelector('{start}').scrollIntoView({{behavior: 'instant'}})")
    return [(picture, page.picture(whole=False)) for picture, page, _ in pages]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
