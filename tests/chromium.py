"""A headless Chromium that tests drive by the DevTools protocol, over two pipes: no port, no package."""

from __future__ import annotations

import base64
import json
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final

__all__ = ["CHROMIUM", "Chromium", "Page"]

CHROMIUM: Final = shutil.which("chromium")
"""Debian's; None where it is not installed."""
_FLAGS: Final = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    # Without these it asks hosts of its vendor.
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_ANSWER_SECONDS: Final = 30.0


class Chromium:
    """A browser with a profile of its own, until the end of a ``with``.

    Args:
        profile: an empty folder.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        # The browser reads commands from its descriptor 3 and writes to 4, each message ended by a zero byte.
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        shell = 'exec "$0" "$@" 3<&"$KVPAGER_TEST_COMMANDS" 4>&"$KVPAGER_TEST_ANSWERS"'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            env={**os.environ, "KVPAGER_TEST_COMMANDS": str(commands), "KVPAGER_TEST_ANSWERS": str(answers)},
            pass_fds=(commands, answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._asked = 0
        self._pages: dict[str, Page] = {}
        self._came: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._reader = threading.Thread(target=self._read, name="chromium", daemon=True)
        self._reader.start()

    def page(self, width: int = 1440, height: int = 900, *, dark: bool = False) -> Page:
        """A tab of its own, with nothing of other tabs' storage, until the end of a ``with``."""
        context = self.ask("Target.createBrowserContext")["browserContextId"]
        target = self.ask("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, context)
        self._pages[session] = page
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            page.ask(f"{domain}.enable")
        page.show(width, height, dark=dark)
        return page

    def ask(self, method: str, session: str | None = None, **values: Any) -> dict[str, Any]:
        """What a command of the protocol gives."""
        self._asked += 1
        number = self._asked
        came: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._came[number] = came
        message: dict[str, Any] = {"id": number, "method": method, "params": values}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        answer = came.get(timeout=_ANSWER_SECONDS)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> None:
        with os.fdopen(self._answers, "rb", buffering=0) as answers:
            rest = b""
            while data := answers.read(1 << 16):
                *messages, rest = (rest + data).split(b"\0")
                for one in messages:
                    message = json.loads(one)
                    if "id" in message:
                        self._came.pop(message["id"]).put(message)
                    elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                        page.heard(message["method"], message["params"])

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._commands)  # which ends it
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(10)


class Page:
    """One tab: what it asked for, what it complained of, and what it shows.

    Attributes:
        requests: addresses that were asked for, but those that are in the page itself (``data:``).
        complaints: errors of its console and scripts, and violations of its policy.
    """

    def __init__(self, browser: Chromium, session: str, context: str) -> None:
        self._browser = browser
        self._session = session
        self._context = context
        self.requests: list[str] = []
        self.complaints: list[str] = []

    def ask(self, method: str, **values: Any) -> dict[str, Any]:
        """What a command of the protocol gives, said to this tab."""
        return self._browser.ask(method, self._session, **values)

    def heard(self, method: str, values: dict[str, Any]) -> None:
        """An event of the protocol."""
        if method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = values["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(one.get("value", one)) for one in values["args"]))
        elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            entry = values["entry"]
            self.complaints.append(f"{entry['text']} ({entry.get('url', '')})")

    def show(self, width: int, height: int, *, dark: bool) -> None:
        """Be so large, under this colour scheme; a narrow one is a phone's."""
        narrow = width < 600
        scale = 2 if narrow else 1
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=narrow,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme, still])

    def open(self, url: str) -> None:
        self.ask("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """What an expression is in the page; a promise is awaited."""
        answer = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = 20.0) -> Any:
        """What the expression is as soon as it is true, or not empty. Elements it names may be to come."""
        careful = (
            f"(() => {{ try {{ return {expression}; }} catch (error) {{"
            " if (error instanceof TypeError) return null; throw error; } })()"
        )
        return _until(lambda: self.value(careful), f"{expression} is not so", seconds)

    def text(self, selector: str) -> str:
        """What an element shows, as it is read."""
        shown: str = self.value(f"document.querySelector({json.dumps(selector)}).innerText.trim()")
        return shown

    def click(self, selector: str) -> None:
        """As a mouse does, where the middle of the element is."""
        find = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{find}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.value(
            f"(() => {{ const r = {find}.getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def press(self, key: str, *, shift: bool = False) -> None:
        """One key, by its name: Tab, Enter, Escape, ArrowRight."""
        codes = {
            "Tab": 9,
            "Enter": 13,
            "Escape": 27,
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            " ": 32,
        }
        values = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": codes[key],
            "modifiers": 8 if shift else 0,
        }
        if key == "Enter":
            values["text"] = "\r"
        self.ask("Input.dispatchKeyEvent", type="keyDown", **values)
        values.pop("text", None)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **values)

    def write(self, text: str) -> None:
        """What is written goes to the element that has the focus."""
        self.ask("Input.insertText", text=text)

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._browser.ask("Target.disposeBrowserContext", browserContextId=self._context)

    def picture(self, *, whole: bool = True) -> bytes:
        """The page as a PNG, or what is seen of it without scrolling."""
        answer = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(answer["data"])


def _until(check: Callable[[], Any], problem: str, seconds: float) -> Any:
    until = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < until, problem
        time.sleep(0.05)
    return found
