"""`kvpager status`, `top`, `pin`, `unpin`, `evict` and `policy`, beside what the admin process says."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from kvpager.api.cli import main
from kvpager.api.status_view import StatusView, terminal
from kvpager.tests.admin_server import AdminServer, prompt, store_prompt

ABSENT = "0" * 32
Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminServer]:
    folder = tmp_path_factory.mktemp("operators")
    with AdminServer(folder / "socket", f"--cold=disk://{folder}/cold", "--cold-bytes=64M") as made:
        yield made


@pytest.fixture
def blocks(server: AdminServer) -> Iterator[list[bytes]]:
    """The hashes of a prompt of 8 blocks in host memory, and of nothing else."""
    with server.client(tenant="acme") as client:
        server.operate("POST", "/v1/evict", {"everything": True})
        yield store_prompt(client, prompt(1, 8), tenant="acme")


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables and files of this machine say nothing."""
    for name in list(os.environ):
        if name.startswith("KVPAGER_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def run(server: AdminServer, capsys: Output, *arguments: str, code: int = 0) -> str:
    """What a command prints about this sidecar."""
    assert main([*arguments, "--socket", str(server.path)]) == code
    said = capsys.readouterr()
    assert said.err == "" if code == 0 else said.out == ""
    return said.out or said.err


def answer(server: AdminServer, capsys: Output, *arguments: str) -> Any:
    return json.loads(run(server, capsys, *arguments, "--json"))


def test_status_says_what_the_admin_process_says(
    server: AdminServer, blocks: list[bytes], capsys: Output
) -> None:
    seen = answer(server, capsys, "status")
    status = server.get("/v1/status")
    same = ("boot_id", "pid", "version", "spaces", "degraded", "cold")
    assert {name: seen["status"][name] for name in same} == {name: status[name] for name in same}
    assert [tier["tier"] for tier in seen["tiers"]] == status["tiers"] == ["host", "cold"]
    shown = run(server, capsys, "status")
    assert f"pid {status['pid']}" in shown
    assert "serving" in shown
    assert "disk://" in shown
    assert "acme" in shown
    assert blocks[-1].hex() in shown


def test_status_tells_what_is_degraded_first(capsys: Output, server: AdminServer) -> None:
    seen = answer(server, capsys, "status")
    seen["status"]["degraded"] = [{"part": "cold", "since": 1.0, "reason": "it does not answer"}]
    terminal().print(StatusView().shown(seen))
    shown = capsys.readouterr().out
    assert "degraded" in shown.splitlines()[0]
    assert "degraded: cold: it does not answer" in shown


def test_top_lists_prefixes_in_the_order_that_is_asked_for(
    server: AdminServer, blocks: list[bytes], capsys: Output
) -> None:
    with server.client(tenant="acme") as client:
        longer = store_prompt(client, prompt(2, 12), tenant="acme")
    names = [one["hash"] for one in answer(server, capsys, "top", "--by", "largest")["items"]]
    assert names == [longer[-1].hex(), blocks[-1].hex()]
    assert run(server, capsys, "top", "-n", "1").splitlines()[1].startswith(longer[-1].hex())
    assert answer(server, capsys, "top", "--tenant", "nobody")["items"] == []
    assert "no prefixes" in run(server, capsys, "top", "--tenant", "nobody")


def test_a_pinned_prefix_stays_until_it_is_unpinned(
    server: AdminServer, blocks: list[bytes], capsys: Output
) -> None:
    name = blocks[-1].hex()
    assert answer(server, capsys, "pin", name) == {"hash": name, "pinned": True, "changed_blocks": 8}
    assert run(server, capsys, "pin", name) == f"0 blocks of {name} are pinned now that were not\n"
    assert answer(server, capsys, "evict", "--everything", "--yes")["blocks"] == 0
    assert "pinned" in run(server, capsys, "top")
    assert run(server, capsys, "unpin", name) == f"8 blocks of {name} are not pinned any more\n"
    assert answer(server, capsys, "evict", "--everything", "--yes")["blocks"] == 8


def test_evict_does_nothing_without_yes(server: AdminServer, blocks: list[bytes], capsys: Output) -> None:
    size = server.get("/v1/status")["spaces"][0]["block_bytes"]
    for _ in range(2):
        said = run(server, capsys, "evict", "--tenant", "acme", "--most-bytes", str(3 * size))
        assert said.startswith("3 blocks, ")
        assert "would go from the host tier" in said
        assert said.endswith("; --yes does it\n")
    done = answer(server, capsys, "evict", "--tenant", "acme", "--most-bytes", str(3 * size), "--yes")
    assert (done["dry_run"], done["blocks"], done["bytes"]) == (False, 3, 3 * size)
    said = run(server, capsys, "evict", "--prefix", blocks[4].hex(), "--yes")
    assert said.startswith("5 blocks, ")
    assert "went from the host tier" in said
    assert server.get("/v1/status")["spaces"][0]["resident_blocks"] == 0


def test_policy_is_told_and_changed(server: AdminServer, capsys: Output) -> None:
    said = answer(server, capsys, "policy")
    assert said == server.get("/v1/policy")
    name, *weights = run(server, capsys, "policy").splitlines()
    assert name == f"{said['policy']} (of {', '.join(said['policies'])})"
    assert [line.split(":")[0].strip() for line in weights] == list(said["weights"])
    assert run(server, capsys, "policy", said["policy"]) == f"{said['policy']}, as it was\n"
    assert answer(server, capsys, "policy", said["policy"])["config"]["policy"] == said["policy"]
    weighed = {"policy": "s3fifo", "policy_weights": {"small_share": 0.2}}
    server.operate("PATCH", "/v1/config", weighed)
    try:
        told = server.get("/v1/policy")["weights"]
        shares = {"least": 0.0, "most": 1.0, "above": True}
        assert told["small_share"] == {"value": 0.2, "usual": 0.1, **shares}
        assert told["ghost_share"] == {"value": 0.9, "usual": 0.9, **shares}
        lines = run(server, capsys, "policy").splitlines()
        assert lines[1] == "  small_share: 0.2 (usually 0.1; above 0 to 1)"
        assert lines[3] == "  promote_uses: 2 (usually 2; 1 to 3)"
        # All of them are given: what is not named is as usual again.
        server.operate("PATCH", "/v1/config", {"policy_weights": {"ghost_share": 0.5}})
        told = server.get("/v1/policy")["weights"]
        assert (told["small_share"]["value"], told["ghost_share"]["value"]) == (0.1, 0.5)
    finally:
        server.operate("PUT", "/v1/policy", {"policy": said["policy"]})
    wrong = run(server, capsys, "policy", "nonsense", code=1)
    assert wrong == f"kvpager policy: NAME: must be one of {', '.join(said['policies'])}, got 'nonsense'\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pin", "short"], "kvpager pin: HASH: must be 32 hex digits, got 'short'"),
        (["pin", ABSENT, "--space", "x"], "kvpager pin: --space: must be 32 hex digits, got 'x'"),
        (["pin", ABSENT], f"kvpager pin: host memory has no block {ABSENT}"),
        (["top", "-n", "0"], "kvpager top: --count: must be an integer of at least 1, got 0"),
        (["evict"], "kvpager evict: --everything: is needed where nothing else says what is to go"),
        (["evict", "--most-bytes", "x"], "kvpager evict: --most-bytes: must be a size like 8G"),
        (["evict", "--older-than", "-1"], "kvpager evict: --older-than: must be a finite number"),
        (["status", "--url", "http://x"], "kvpager status: --socket: is where a URL is found, and --url"),
    ],
)
def test_what_makes_no_sense_is_told_in_one_line(
    arguments: list[str], said: str, server: AdminServer, capsys: Output
) -> None:
    wrong = run(server, capsys, *arguments, code=1)
    assert wrong.startswith(said)
    assert wrong.count("\n") == 1


@pytest.mark.parametrize(
    "url", ["ftp://x", "http://", "x", "http://me:secret@h", "http://h:port", "http://[::1", "http://h?a=b"]
)
def test_what_is_no_url_is_refused(url: str, capsys: Output) -> None:
    assert main(["status", "--url", url]) == 1
    assert capsys.readouterr().err.startswith("kvpager status: --url: must be http://HOST:PORT or https")


def test_nobody_who_answers_ends_with_3(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for arguments, said in (
        (["--socket", f"{tmp_path}/none"], f"no admin process serves {tmp_path}/none"),
        (["--url", f"http://127.0.0.1:{port}"], f"http://127.0.0.1:{port} does not answer: "),
        ([], "no admin process serves "),
    ):
        assert main(["status", *arguments]) == 3
        assert capsys.readouterr().err.startswith(f"kvpager status: {said}")
    monkeypatch.setenv("KVPAGER_ADMIN_URL", f"http://127.0.0.1:{port}")
    assert main(["policy"]) == 3


def test_who_is_no_admin_process_is_not_believed(capsys: Output) -> None:
    def answer_once(listening: socket.socket) -> None:
        with listening, listening.accept()[0] as there:
            there.recv(4096)
            there.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Type: text/html\r\n\r\n<p>hi")

    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    thread = threading.Thread(target=answer_once, args=(listening,))
    thread.start()
    assert main(["policy", "--url", f"http://127.0.0.1:{port}"]) == 1
    thread.join()
    assert "and not as an admin process does" in capsys.readouterr().err


def test_the_token_of_a_file_or_variable_is_said_and_never_shown(
    server: AdminServer,
    blocks: list[bytes],
    tmp_path: Path,
    capsys: Output,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask = ["unpin", blocks[0].hex(), "--url", server.url]
    assert main(ask) == 1  # a URL alone brings no token
    assert "(--token-file FILE, or $KVPAGER_ADMIN_TOKEN)" in capsys.readouterr().err
    file = tmp_path / "tokens"
    file.write_text(f"# of operators\nread:{server.tokens['read']}\n")
    assert main([*ask, "--token-file", str(file)]) == 1
    assert "others than its owner: chmod 600 it" in capsys.readouterr().err
    file.chmod(0o600)
    assert main([*ask, "--token-file", str(file)]) == 1
    with file.open("a") as more:
        more.write(f"operate:{server.tokens['operate']}\n")
    assert main([*ask, "--token-file", str(file)]) == 0
    monkeypatch.setenv("KVPAGER_ADMIN_TOKEN", server.tokens["operate"])
    assert main(ask) == 0
    said = capsys.readouterr()
    assert not any(token in said.out + said.err for token in server.tokens.values())
    file.write_text("nothing\n")
    assert main([*ask, "--token-file", str(file)]) == 1
    assert "has no line read:TOKEN or operate:TOKEN" in capsys.readouterr().err


def test_the_socket_of_the_settings_is_looked_at_first(
    server: AdminServer, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPAGER_SOCKET", str(server.path))
    assert main(["policy"]) == 0
    assert capsys.readouterr().out.startswith("cost")


def watching(server: AdminServer, *arguments: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "kvpager", "status", "--socket", str(server.path), *arguments]
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True)


def test_watching_goes_on_when_the_admin_process_is_another_one(server: AdminServer) -> None:
    watch = watching(server, "--watch", "0.2", "--json")
    try:
        assert watch.stdout is not None
        first = json.loads(watch.stdout.readline())
        before = server.url
        server.kill_admin()
        server.await_admin(other_than=before)
        until = time.monotonic() + 30
        while "error" in (later := json.loads(watch.stdout.readline())) or later is first:
            assert time.monotonic() < until
        assert later["status"]["boot_id"] == first["status"]["boot_id"]
        watch.send_signal(signal.SIGINT)
        _, errors = watch.communicate(timeout=30)
        assert (watch.returncode, errors) == (130, "")
    finally:
        watch.kill()
        watch.communicate()


def test_a_terminal_shows_it_until_ctrl_c(server: AdminServer) -> None:
    screen, terminal_of_it = pty.openpty()
    watch = watching(server, "--watch", "0.2", stdout=terminal_of_it)
    os.close(terminal_of_it)
    seen = b""
    try:
        while b"hits since it was shown last" not in seen:
            seen += os.read(screen, 4096)
        watch.send_signal(signal.SIGINT)
        with suppress(OSError):  # the terminal's other end is closed
            while more := os.read(screen, 4096):
                seen += more
        assert watch.communicate(timeout=30)[1] == ""
        assert watch.returncode == 130
        assert seen.endswith(b"\x1b[?25h\x1b[?1049l")  # cursor and screen are as they were
    finally:
        os.close(screen)
        watch.kill()
        watch.wait()


def test_memory_without_records_has_a_status_all_the_same(tmp_path: Path, capsys: Output) -> None:
    with AdminServer(tmp_path / "socket", "--arena=memory") as server:
        assert main(["status", "--socket", str(server.path)]) == 0
        assert "No prefixes are told of: the sidecar's memory has no records" in capsys.readouterr().out


def test_what_goes_from_the_cold_tier_is_told_of_prefixes_alone(server: AdminServer, capsys: Output) -> None:
    assert main(["evict", "--tier", "cold", "--everything", "--socket", str(server.path)]) == 1
    assert "--yes: is needed" in capsys.readouterr().err


def test_a_file_gets_what_is_watched_too(server: AdminServer) -> None:
    watch = watching(server, "--watch", "0.2")
    try:
        assert watch.stdout is not None
        assert "kvpager" in watch.stdout.readline()
    finally:
        watch.send_signal(signal.SIGINT)
        watch.communicate(timeout=30)
