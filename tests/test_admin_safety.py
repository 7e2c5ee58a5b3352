"""Who may ask the admin process what: with which token, from where, how much and how often."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvpager.api.admin.models import Role
from kvpager.api.admin.safety import Bounds, Safety, is_loopback_host
from kvpager.api.admin.tokens import Tokens, make_token_file
from kvpager.tests.admin_server import AdminServer
from kvpager.tiers.errors import ConfigError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

pytestmark = pytest.mark.xdist_group("admin safety")
HASH = "0" * 32
ROOT = {"root": HASH}
CHANGES = [
    ("PUT", f"/v1/prefixes/{HASH}/pin", None),
    ("DELETE", f"/v1/prefixes/{HASH}/pin", None),
    ("POST", f"/v1/prefixes/{HASH}/promote", None),
    ("POST", f"/v1/prefixes/{HASH}/demote", None),
    ("POST", "/v1/evict", {"everything": True}),
    ("POST", "/v1/warm", {"hashes": [HASH]}),
    ("POST", "/v1/sessions/one/sleep", None),
    ("POST", "/v1/sessions/one/wake", None),
    ("DELETE", f"/v1/sessions/one?root={HASH}", None),
    ("DELETE", "/v1/tenants/one", None),
    ("DELETE", "/v1/clients/99999", None),
    ("PUT", "/v1/policy", {"policy": "lru"}),
    ("PATCH", "/v1/config", {"clean_ahead": 0.5}),
    ("POST", "/v1/tiers/cold/attach", {"url": "disk:///nowhere"}),
    ("POST", "/v1/tiers/cold/detach", {}),
    ("POST", "/v1/drain", {}),
]
READS = [
    "/v1/status",
    "/v1/tiers",
    "/v1/tiers/host",
    "/v1/tiers/host/map",
    "/v1/prefixes",
    f"/v1/prefixes/{HASH}",
    "/v1/sessions",
    "/v1/clients",
    "/v1/policy",
    "/v1/config",
    "/metrics",
    "/openapi.json",
    "/docs",
]
NAMED = [
    ("GET", "/v1/prefixes/{}"),
    ("PUT", "/v1/prefixes/{}/pin"),
    ("DELETE", "/v1/prefixes/{}/pin"),
    ("POST", "/v1/prefixes/{}/promote"),
    ("POST", "/v1/prefixes/{}/demote"),
    ("GET", "/v1/prefixes?space={}"),
    ("DELETE", "/v1/sessions/one?root={}"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminServer]:
    with AdminServer(tmp_path_factory.mktemp("admin") / "socket") as made:
        yield made


def is_problem(answer: httpx.Response, status: int) -> bool:
    """Whether it is a problem of this status that says why."""
    if answer.headers["content-type"] != "application/problem+json":
        return False
    values = answer.json()
    return values["status"] == answer.status_code == status and bool(values["detail"])


def test_every_route_is_tried_here(server: AdminServer) -> None:
    document = server.get("/openapi.json")
    tried = {(method, path.partition("?")[0]) for method, path, _ in CHANGES}
    tried |= {("GET", path) for path in READS}
    known = {"/v1/events", "/v1/prefixes/lookup", "/healthz", "/readyz"}  # tried below, or open
    for path, methods in document["paths"].items():
        concrete = path.replace("{hash}", HASH).replace("{tier}", "host")
        concrete = concrete.replace("clients/{id}", "clients/99999").replace("{id}", "one")
        for method in methods:
            assert path in known or (method.upper(), concrete) in tried


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
def test_changing_anything_needs_a_token_that_may(
    method: str, path: str, body: object, server: AdminServer
) -> None:
    answer = server.ask(method, path, json=body)
    assert is_problem(answer, 401)
    assert answer.headers["WWW-Authenticate"].startswith("Bearer")
    assert is_problem(server.ask(method, path, "read", json=body), 403)


@pytest.mark.parametrize("path", READS)
def test_reading_needs_a_loopback_host_or_a_token(path: str, server: AdminServer) -> None:
    rebound = {"Host": "attacker.example:8737"}
    assert is_problem(server.ask("GET", path, headers=rebound), 401)
    assert is_problem(server.ask("GET", path, headers={"X-Forwarded-For": "10.0.0.1"}), 401)
    assert is_problem(server.ask("GET", path, headers={"Sec-Fetch-Site": "cross-site"}), 401)
    for headers in ({}, {"Host": "localhost"}, {"Host": "[::1]:1"}):
        assert server.ask("GET", path, headers=headers).status_code in (200, 404)
    assert server.ask("GET", path, "read", headers=rebound).status_code in (200, 404)


def test_a_lookup_is_a_read_and_events_are(server: AdminServer) -> None:
    rebound = {"Host": "attacker.example"}
    body = {"tokens": [], **ROOT}
    assert is_problem(server.ask("POST", "/v1/prefixes/lookup", json=body, headers=rebound), 401)
    assert server.ask("POST", "/v1/prefixes/lookup", json=body).status_code == 200
    assert is_problem(server.ask("GET", "/v1/events", headers=rebound), 401)


def test_probes_and_the_page_are_open_and_nothing_else(server: AdminServer) -> None:
    rebound = {"Host": "attacker.example"}
    for path in ("/healthz", "/readyz", "/static/reference.css"):
        assert server.ask("GET", path, headers=rebound).status_code == 200
    for path in ("/v2", "//healthz", "/healthz/", "/v1", "/v1/../v1/status"):
        assert server.ask("GET", path, headers=rebound).status_code == 401


@pytest.mark.parametrize("path", ["/", "/healthz", "/readyz", "/v1/status", "/v1/events", "/nowhere"])
def test_head_is_answered_as_get_is_without_the_body(path: str, server: AdminServer) -> None:
    head = server.ask("HEAD", path)
    with httpx.stream("GET", f"{server.url}{path}", timeout=30) as got:
        assert (head.status_code, head.content) == (got.status_code, b"")
        assert head.headers["content-type"] == got.headers["content-type"]
    assert server.ask("HEAD", path, headers={"Host": "elsewhere"}).status_code == (
        head.status_code if path in ("/", "/healthz", "/readyz") else 401
    )


@pytest.mark.parametrize(
    "name", ["..%2F..%2Fetc%2Fpasswd", "g" * 32, "A" * 32, HASH[:31], HASH + "0", "%00" * 32, "é" * 32]
)
@pytest.mark.parametrize(("method", "path"), NAMED)
def test_a_hash_is_32_hex_digits(method: str, path: str, name: str, server: AdminServer) -> None:
    answer = server.ask(method, path.format(name), "operate")
    assert answer.status_code in (404, 405, 422)
    assert is_problem(answer, answer.status_code)
    assert "passwd" not in answer.json()["detail"]


@pytest.mark.parametrize(
    ("method", "path"), [(one[0], one[1]) for one in CHANGES] + [("POST", "/v1/prefixes/lookup")]
)
def test_a_giant_body_is_refused(method: str, path: str, server: AdminServer) -> None:
    body = b'{"a": "' + b"x" * (3 << 20) + b'"}'
    assert is_problem(server.ask(method, path, "operate", content=body), 413)


def test_a_giant_body_in_pieces_is_refused_while_it_comes(server: AdminServer) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * (1 << 16)

    answer = server.ask("POST", "/v1/prefixes/lookup", content=pieces())
    assert is_problem(answer, 413)


def test_no_other_site_may_read_and_pages_run_no_code_of_others(server: AdminServer) -> None:
    asked = {"Origin": "https://attacker.example", "Access-Control-Request-Method": "DELETE"}
    for method in ("GET", "OPTIONS"):
        answer = server.ask(method, "/v1/status", headers=asked)
        assert not any(name.startswith("access-control-") for name in answer.headers)
    answer = server.ask("GET", "/static/reference.css")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert server.ask("GET", "/v1/status").headers["cache-control"] == "no-store"


def test_wrong_tokens_are_answered_only_so_often(server: AdminServer) -> None:
    def tried() -> int:
        headers = {"Authorization": "Bearer " + "guess" * 5}
        return server.ask("GET", "/v1/status", headers=headers).status_code

    assert tried() == 401
    seen = {tried() for _ in range(120)}
    assert seen == {401, 429}
    # Who says a right one, or none, is not concerned.
    assert server.ask("GET", "/v1/status", "operate").status_code == 200
    assert server.ask("GET", "/v1/status").status_code == 200


def test_a_problem_does_not_say_what_was_sent(server: AdminServer) -> None:
    said = "a secret prompt"
    answer = server.ask("POST", "/v1/prefixes/lookup", json={"text": said, **ROOT, "space": said})
    assert is_problem(answer, 422)
    assert said not in answer.text


def test_headers_that_are_none_end_a_connection(server: AdminServer) -> None:
    url = httpx.URL(server.url)
    for said in (b"GET / HTTP/1.1\r\nHost: a\r\nHost: localhost\r\n\r\n", b"\0" * 64 + b"\r\n\r\n"):
        with socket.create_connection((url.host, url.port), 10) as raw:
            raw.sendall(said)
            answer = raw.recv(1 << 16)
        assert answer.split(b" ")[1] in (b"400", b"401", b"200")
    assert server.get("/healthz")


@pytest.mark.parametrize(
    ("hosts", "local"),
    [
        (["localhost"], True),
        (["LOCALHOST:80"], True),
        (["127.0.0.1:8737"], True),
        (["127.8.9.10"], True),
        (["[::1]:8737"], True),
        (["[::ffff:127.0.0.1]"], True),
        (["localhost.attacker.example"], False),
        (["127.0.0.1.attacker.example"], False),
        (["10.0.0.1"], False),
        (["0.0.0.0"], False),
        ([""], False),
        ([], False),
        (["localhost", "attacker.example"], False),
    ],
)
def test_a_host_is_this_machine_s_own_or_not(hosts: list[str], local: bool) -> None:
    assert is_loopback_host(hosts) is local


def bounded(bounds: Bounds, peer: str = "127.0.0.1") -> httpx.AsyncClient:
    """Who asks an application behind bounds, from an address."""

    async def answer(request: Request) -> JSONResponse:
        return JSONResponse({"role": request.state.role})

    app = Starlette(routes=[Route("/v1/x", answer, methods=["GET", "POST"])])
    safe = Safety(app, Tokens({"r" * 16: Role.READ, "o" * 16: Role.OPERATE}), bounds)
    transport = httpx.ASGITransport(safe, client=(peer, 1))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


def test_an_address_asks_only_so_often() -> None:
    async def run() -> list[int]:
        async with bounded(Bounds(requests=5, requests_per_second=0.001)) as client:
            return [(await client.get("/v1/x")).status_code for _ in range(8)]

    assert asyncio.run(run()) == [200] * 5 + [429] * 3


def test_other_machines_need_a_token_for_everything() -> None:
    async def run() -> list[Any]:
        async with bounded(Bounds(), peer="10.1.2.3") as client:
            said = [{}, {"Authorization": "Basic cjo="}, {"Authorization": f"Bearer {'x' * 16}"}]
            refused = [(await client.get("/v1/x", headers=one)).status_code for one in said]
            roles = [
                (await client.get("/v1/x", headers={"Authorization": f"bearer {one * 16}"})).json()["role"]
                for one in "ro"
            ]
            return [refused, roles]

    assert asyncio.run(run()) == [[401, 401, 401], ["read", "operate"]]


def test_tokens_are_made_once_for_their_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    make_token_file(path)
    text = path.read_text()
    make_token_file(path)
    assert path.read_text() == text
    assert path.stat().st_mode & 0o777 == 0o600
    assert [line.partition(":")[0] for line in text.splitlines()] == ["read", "operate"]
    tokens = Tokens.read("--admin-token-file", path)
    assert [tokens.role_of(line.partition(":")[2]) for line in text.splitlines()] == ["read", "operate"]
    assert tokens.role_of("") is None
    assert tokens.role_of("\udcff" * 20) is None
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError, match="cannot be made"):
        make_token_file(tmp_path / "absent" / "tokens")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no token"),
        ("# nothing\n", "has no token"),
        ("operate:short", "line 1 .* has 5"),
        (f"\nadmin:{'x' * 16}", "line 2 .* is no ROLE:TOKEN"),
        ("x" * 20, "line 1 .* is no ROLE:TOKEN"),
        ("\xff", "is no text"),
    ],
)
def test_a_token_file_that_says_something_else_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(text.encode("latin-1"))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=said) as refused:
        Tokens.read("--admin-token-file", path)
    assert "x" * 16 not in str(refused.value)


def test_a_token_file_that_others_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    make_token_file(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        Tokens.read("--admin-token-file", path)


def test_a_token_of_both_roles_may_operate(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"operate:{'x' * 16}\nread:{'x' * 16}\n")
    path.chmod(0o600)
    assert Tokens.read("--admin-token-file", path).role_of("x" * 16) is Role.OPERATE
