"""The admin API against its own OpenAPI document: what is asked at random is answered as that says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.errors import Unsatisfiable
from kvpager.api.client import Connection
from kvpager.kvstore.control import EngineReport
from kvpager.tests.admin_server import AdminServer, prompt, store_prompt
from kvpager.tests.raw_client import LAYOUT
from kvpager.tiers.errors import KVPagerError

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed (extra: test)")

from schemathesis.specs.openapi.checks import ignored_auth  # noqa: E402  where it is installed

pytestmark = pytest.mark.xdist_group("admin openapi")
ENDLESS = "/v1/events"
SETTINGS: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "phases": [Phase.generate],
    "suppress_health_check": list(HealthCheck),
    "verbosity": Verbosity.quiet,
}


class Engine:
    """A live engine: it writes, matches, reports sessions and obeys, whatever operators do meanwhile."""

    def __init__(self, client: Connection) -> None:
        self._client = client
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._live)
        self.turns = 0
        client.on_command(lambda command: command.done(1))

    def __enter__(self) -> Engine:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _live(self) -> None:
        while not self._stop.wait(0.05):
            self.turns += 1
            with suppress(KVPagerError):  # the sidecar drains
                hashes = store_prompt(self._client, prompt(self.turns % 50, 5, shared=2), tenant="lives")
                self._client.space(LAYOUT, tenant="lives").match(hashes).release()
            self._client.report(EngineReport({"one": "decoding", "two": "asleep"}, 4096, 10, 5, 1.0, 1.0))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminServer]:
    folder = tmp_path_factory.mktemp("admin")
    with (
        AdminServer(folder / "socket", f"--cold=disk://{folder}/cold", "--cold-bytes=64M") as made,
        made.client(name="engine") as client,
        Engine(client) as engine,
    ):
        yield made
    assert engine.turns > 1


def ask(server: AdminServer, case: Any) -> None:
    """Ask one case with an operator's token; fails where the answer is not as it should be.

    What is answered to wrong tokens is tried elsewhere: here they would be too many.
    """
    for name in ("if-match", "If-Match"):
        case.headers.pop(name, None)  # a tag that nobody was given is refused, and should be
    headers = {"Authorization": f"Bearer {server.tokens['operate']}"}
    case.validate_response(case.call(base_url=server.url, headers=headers), excluded_checks=[ignored_auth])


def restore(server: AdminServer, url: str) -> None:
    """As it was, so that the next requests are not all refused for one reason."""
    server.operate("POST", "/v1/drain", {"on": False})
    if server.get("/v1/status")["cold"] is None:
        server.operate("POST", "/v1/tiers/cold/attach", {"url": url, "capacity_bytes": 64 << 20})


def ask_at_random(server: AdminServer, examples: int) -> int:
    """Ask every route so often, rightly and wrongly; returns how often that was."""
    document, url = server.get("/openapi.json"), server.get("/v1/status")["cold"]["url"]
    count = 0
    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = found.ok()
        if operation.path == ENDLESS:
            continue
        for mode in schemathesis.GenerationMode:

            @seed(1)
            @settings(max_examples=examples, **SETTINGS)
            @given(case=operation.as_strategy(generation_mode=mode))
            def run(case: Any) -> None:
                nonlocal count
                count += 1
                ask(server, case)

            with suppress(Unsatisfiable):  # without a parameter nothing is wrong
                run()
        restore(server, url)
    return count


def test_every_route_answers_as_the_document_says(server: AdminServer) -> None:
    assert ask_at_random(server, 3) > 100


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_every_route_answers_as_the_document_says_for_long(server: AdminServer) -> None:
    assert ask_at_random(server, 60) > 2000


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_routes_asked_one_after_the_other_answer_as_the_document_says(server: AdminServer) -> None:
    document = server.get("/openapi.json")
    del document["paths"][ENDLESS]
    schema = schemathesis.openapi.from_dict(document)
    schema.config.generation.modes = [schemathesis.GenerationMode.POSITIVE]
    machine = schema.as_state_machine()

    class Asked(machine):  # type: ignore[misc, valid-type]
        def get_call_kwargs(self, case: Any) -> dict[str, Any]:
            return {
                "base_url": server.url,
                "headers": {"Authorization": f"Bearer {server.tokens['operate']}"},
            }

        def validate_response(self, response: Any, case: Any, **options: Any) -> None:
            case.validate_response(response, excluded_checks=[ignored_auth])

    Asked.run(settings=settings(max_examples=20, stateful_step_count=8, **SETTINGS))
