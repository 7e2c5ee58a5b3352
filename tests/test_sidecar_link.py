"""`SidecarLink` beside a real sidecar that stalls."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kvpager import KVLayout
from kvpager.api.integrations import link as link_module
from kvpager.api.integrations.link import SidecarLink
from kvpager.tests.serve_process import ServeProcess

pytestmark = pytest.mark.timeout(120)

LAYOUT = KVLayout(2, 1, 64, 16, "uint8", "opaque:test", planes=1)
NAMES = [bytes([at]) * 16 for at in range(3)]


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_sidecar_that_stalls_is_there_again_when_it_answers_and_not_when_the_pause_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(link_module, "_PAUSE_SECONDS", 0.2)
    log = logging.getLogger("kvpager.test-link")

    def ready() -> bool:
        return link.ready

    def said(words: str) -> int:
        return sum(words in one.getMessage() for one in caplog.records)

    with caplog.at_level(logging.INFO, log.name), ServeProcess(tmp_path / "s") as sidecar:
        link = SidecarLink(f"unix://{sidecar.path}", "test", log, tenant="", seconds=0.3)
        link.wait(30)
        space = link.space(LAYOUT, "")
        assert space is not None
        assert ready()
        sidecar.pause()
        assert len(space.match(NAMES)) == 0
        link.pause()
        assert not ready()
        time.sleep(0.5)
        assert not ready()
        assert (said("serving on without"), said("is there again")) == (1, 0)
        sidecar.resume()
        wait_for(ready)
        assert ready()
        assert (said("serving on without"), said("is there again")) == (1, 1)
        link.close()
