"""The admin process beside its sidecar: it comes, dies and comes again, and ends with it."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from kvpager.api.admin.discovery import find_admin, place_file
from kvpager.api.cli import main
from kvpager.tests.admin_server import AdminServer, prompt, store_prompt
from kvpager.tests.certificates import self_signed
from kvpager.tests.raw_client import LAYOUT, await_true
from kvpager.tests.serve_process import ServeProcess
from kvpager.tiers.errors import ServiceUnavailableError

pytestmark = pytest.mark.xdist_group("admin process")


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminServer]:
    with AdminServer(tmp_path_factory.mktemp("admin") / "socket") as made:
        yield made


def test_it_is_started_again_where_it_dies_and_the_sidecar_serves_on(server: AdminServer) -> None:
    first, tokens = server.admin_pid, server.tokens
    with server.client() as engine:
        hashes = store_prompt(engine, prompt(1, 3))
        server.kill_admin()
        with engine.space(LAYOUT).match(hashes) as lease:
            assert len(lease) == 3
        server.await_admin(other_than=server.url)
        assert server.admin_pid != first
        assert server.tokens == tokens
        assert server.get("/v1/tiers/host")["blocks"] == 3


def test_a_sidecar_that_is_killed_takes_it_along_and_the_next_tells_what_was_kept(tmp_path: Path) -> None:
    with AdminServer(tmp_path / "socket") as server:
        with server.client() as engine:
            hashes = store_prompt(engine, prompt(1, 3))
        before, url, boot = server.admin_pid, server.url, server.get("/v1/status")["boot_id"]
        server.serve.kill()
        await_true(lambda: is_gone(before))
        server.serve.start()
        server.await_admin(other_than=url)
        assert server.get("/v1/status")["boot_id"] != boot
        assert server.get(f"/v1/prefixes/{hashes[-1].hex()}")["chain_blocks"] == 3
        # It ends with a sidecar that is asked to end, and leaves nothing but its tokens.
        last = server.admin_pid
        assert server.serve.terminate() == 0
        assert is_gone(last)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["socket.admin.token"]


def test_where_the_sidecar_stalls_it_says_so(server: AdminServer) -> None:
    server.serve.pause()
    try:
        answer = server.ask("GET", "/readyz")
        assert answer.status_code == 503
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["type"] == "urn:kvpager:problem:service-unavailable"
        assert int(answer.headers["Retry-After"]) > 0
        assert server.get("/healthz") == {"status": "alive"}
        assert server.ask("GET", "/v1/tiers/host/map").status_code == 503
    finally:
        server.serve.resume()
    await_true(lambda: server.ask("GET", "/readyz").status_code == 200)


def connects(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0


def test_a_taken_port_is_told_once_and_listened_on_when_it_is_free(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = [sys.executable, "-m", "kvpager.api.cli", "serve", f"--socket={tmp_path}/socket"]
        command += ["--host-bytes=8M", "--quiet", f"--admin=127.0.0.1:{port}"]
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        try:
            said = [process.stderr.readline() for _ in range(2)] if process.stderr is not None else []
            assert "cannot be listened on: Address already in use" in said[0]
            assert "the sidecar serves without it" in said[1]
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(f"{tmp_path}/socket")
            time.sleep(1.5)
            other.close()
            await_true(lambda: connects(port))
        finally:
            process.terminate()
            rest = process.communicate(timeout=60)[1]
        assert (process.returncode, rest) == (0, "")
        # Tokens are for the next one, too.
        assert [path.name for path in tmp_path.iterdir()] == ["socket.admin.token"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--admin=0.0.0.0:0"], "reached from other machines, which must say a token"),
        (["--admin=nowhere"], "must be HOST:PORT"),
        (["--admin=off", "--admin-token-file=x"], "is off, and files are named for it"),
        (["--admin=127.0.0.1:0", "--admin-token-file=/nowhere"], "cannot be read"),
        (["--admin=127.0.0.1:0", "--admin-tls-cert=x"], "given together"),
    ],
)
def test_what_would_not_be_safe_does_not_start(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", f"--socket={tmp_path}/socket", "--host-bytes=8M", *options]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "socket").exists()


def test_other_machines_are_served_with_tokens_that_were_given_over_tls(tmp_path: Path) -> None:
    tokens = tmp_path / "given"
    tokens.write_text(f"read:{'r' * 20}\noperate:{'o' * 20}\n")
    tokens.chmod(0o600)
    made = self_signed(tmp_path)
    options = [
        "--admin=0.0.0.0:0",
        f"--admin-token-file={tokens}",
        f"--admin-tls-cert={made.certificate}",
        f"--admin-tls-key={made.key}",
    ]
    path = tmp_path / "socket"
    with ServeProcess(path, *options):
        await_true(Path(place_file(str(path))).exists)
        place = find_admin(str(path))
        assert place.url.startswith("https://127.0.0.1:")
        assert place.token_file == str(tokens)
        context = ssl.create_default_context(cafile=str(made.certificate))
        with httpx.Client(verify=context) as client:
            url = place.url.replace("127.0.0.1", "localhost")
            said = {"Authorization": f"Bearer {'r' * 20}"}
            assert client.get(f"{url}/v1/status", headers=said).json()["role"] == "read"


def test_streams_of_events_end_with_it(server: AdminServer) -> None:
    with httpx.stream("GET", f"{server.url}/v1/events", timeout=20) as stream:
        lines = stream.iter_lines()
        next(lines)
        began = time.monotonic()
        os.kill(server.admin_pid, signal.SIGTERM)
        for _ in lines:
            pass
    assert time.monotonic() - began < 8
    server.await_admin(other_than=server.url)


def test_where_it_is_is_told_by_a_file_that_says_so(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with pytest.raises(ServiceUnavailableError, match="no admin process serves"):
        find_admin(path)
    for text in ("", "[]", json.dumps({"url": "x"})):
        Path(place_file(path)).write_text(text)
        with pytest.raises(ServiceUnavailableError, match="does not say"):
            find_admin(path)
