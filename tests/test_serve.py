"""`kvpager serve`: sizes and settings, what it says, how it stops, and that it needs no torch and no GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvpager.api import serve as command
from kvpager.api.cli import main
from kvpager.api.messages import Commit, Count, Flush, GetStats, Leased, Load, Match, Put, Reserve, Stats
from kvpager.kvstore.host import HostStore
from kvpager.tests.raw_client import LAYOUT, RawClient, names, store
from kvpager.tests.serve_process import remove_arena
from kvpager.tiers.arena_file import ArenaFile, default_arena_path
from kvpager.tiers.cold_url import open_cold_tier
from kvpager.tiers.errors import ConfigError, ServiceUnavailableError
from kvpager.tiers.memory import MemoryHeadroom, parse_bytes

SIZE = LAYOUT.block_bytes


class Serve:
    """The command in a process of its own."""

    def __init__(
        self, path: Path, *arguments: str, program: tuple[str, ...] = ("-m", "kvpager.api.cli")
    ) -> None:
        self.path = path
        self.process = subprocess.Popen(
            [
                sys.executable,
                *program,
                "serve",
                "--socket",
                str(path),
                "--host-bytes",
                "16M",
                "--admin=off",
                *arguments,
            ],
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def connect(self, group: bytes = b"g" * 16) -> RawClient:
        until = time.monotonic() + 60
        while True:
            try:
                return RawClient(self.path, group)
            except (FileNotFoundError, ConnectionRefusedError):
                assert self.process.poll() is None, self.process.communicate()
                assert time.monotonic() < until
                time.sleep(0.02)

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Its exit code, and what it said on stderr; nothing is said on stdout."""
        self.process.send_signal(number)
        out, errors = self.process.communicate(timeout=60)
        assert out == ""
        return self.process.returncode, errors


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "sidecar.sock"


@pytest.fixture
def started(path: Path) -> Iterator[list[Serve]]:
    """Commands that a test started; none is left."""
    path.parent.mkdir()
    made: list[Serve] = []
    yield made
    for one in made:
        one.process.kill()
        one.process.communicate()
    remove_arena(Path(default_arena_path(str(path))))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("8G", 8 << 30),
        ("512M", 512 << 20),
        ("1.5g", 3 << 29),
        ("2KiB", 2048),
        ("1 TB", 1 << 40),
        (" 64k ", 65536),
    ],
)
def test_sizes_are_read(text: str, count: int) -> None:
    assert parse_bytes("--host-bytes", text) == count


@pytest.mark.parametrize(
    "text", ["", "G", "eight", "-1G", "0", "1.2.3G", "8X", "8 G G", "nan", "9" * 5000, "1e9"]
)
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--host-bytes: must be ") as refused:
        parse_bytes("--host-bytes", text)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host-bytes", "much"], "--host-bytes: must be a size like 8G"),
        (["--host-bytes", "1"], "--host-bytes: must be at least one page"),
        (["--host-bytes", "9000T"], "--host-bytes: an arena of 9000.0 TiB was asked for"),
        (["--host-bytes", "16M", "--drain", "-1"], "--drain: must be a finite number"),
        (["--host-bytes", "16M", "--drain", "nan"], "--drain: must be a finite number"),
        (["--host-bytes", "16M", "--allow-uid", "-1"], "--allow-uid: must be an integer"),
        (["--host-bytes", "16M", "--cold", "gopher://x"], "--cold: must begin with redis://"),
        (["--host-bytes", "16M", "--cold", "disk:///nowhere"], "--cold-bytes: is needed for a"),
        (["--host-bytes", "16M", "--cold", "redis://x?nonsense=1"], "--cold: nonsense cannot be set"),
        (["--host-bytes", "16M", "--cold", "redis://x", "--cold-bytes", "1G"], "--cold-bytes: is for a disk"),
        (["--host-bytes", "16M", "--cold", "disk:///", "--cold-bytes", "1G"], "--cold: the root of the file"),
        (["--host-bytes", "16M", "--cold", "disk:///x", "--cold-bytes", "5"], "--cold-bytes: must be"),
        (["--host-bytes", "16M", "--cold-bytes", "1G"], "--cold-bytes: is for a cold tier"),
        (["--host-bytes", "16M", "--cold-secret-file", "x"], "--cold-secret-file: is for a cold tier"),
        (
            ["--host-bytes", "16M", "--cold", "disk:///x", "--cold-secret-file", "/nowhere"],
            "--cold-secret-file: /nowhere cannot be read: No such file",
        ),
        (
            ["--host-bytes", "16M", "--socket", "/no/such/folder/socket"],
            "--socket: /no/such/folder/socket.lock",
        ),
        (["--host-bytes", "16M", "--socket", ""], "--socket: must be a path"),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--socket" not in arguments:
        arguments = [*arguments, "--socket", str(tmp_path / "socket")]
    assert main(["serve", *arguments]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"kvpager serve: {said}")
    assert shown.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_it_serves_until_it_is_asked_to_stop_and_keeps_what_it_had(
    started: list[Serve], path: Path, tmp_path: Path
) -> None:
    cold = "--cold", f"disk://{tmp_path}/cold", "--cold-bytes", "64M"
    first = Serve(path, *cold)
    started.append(first)
    with first.connect() as client:
        client.open()
        assert client.call(Put(0, names(0, 8), bytes(range(8)) * SIZE, 5.0)).count == 8
    code, errors = first.stop()
    assert code == 0
    assert errors.splitlines() == [
        f"kvpager serve: listening on {path}, 16.0 MiB of host memory, and a cold tier",
        "kvpager serve: SIGTERM: stopping, in 30 seconds at most; once more ends it at once",
        "kvpager serve: stopped",
    ]
    assert list(path.parent.iterdir()) == []
    second = Serve(path, *cold, "--quiet")
    started.append(second)
    with second.connect() as client:
        assert client.open() == 0
        assert len(client.call(Load(0, names(0, 9), 20.0), Leased).slots) == 8
    assert second.stop(signal.SIGINT) == (0, "")


def test_it_waits_for_commits_and_then_gives_up(started: list[Serve], path: Path) -> None:
    serve = Serve(path, "--drain", "4")
    started.append(serve)
    with serve.connect() as client:
        client.open()
        granted = client.call(Reserve(0, names(0, 3), 5.0))
        serve.process.send_signal(signal.SIGTERM)
        until = time.monotonic() + 20
        while True:
            try:
                client.call(Reserve(0, names(9, 1), 0.0))
            except ServiceUnavailableError:
                break
            assert time.monotonic() < until
        client.call(Commit(0, granted.slots[:1], granted.generations[:1]))
        out, errors = serve.process.communicate(timeout=30)
    assert (serve.process.returncode, out) == (0, "")
    assert "waiting for commits of" in errors


def test_a_second_signal_ends_it_at_once(started: list[Serve], path: Path) -> None:
    serve = Serve(path, "--drain", "600")
    started.append(serve)
    with serve.connect() as client:
        client.open()
        client.call(Reserve(0, names(0, 3), 5.0))
        serve.process.send_signal(signal.SIGTERM)
        assert serve.process.stderr is not None
        while "stopping" not in serve.process.stderr.readline():
            pass
        began = time.monotonic()
        assert serve.stop()[0] == 128 + signal.SIGTERM
        assert time.monotonic() - began < 20
    assert list(path.parent.iterdir()) == []


def test_it_stops_when_the_process_that_it_serves_for_is_killed(started: list[Serve], path: Path) -> None:
    master = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    arguments = ["--keep-arena", "--with-process", str(master.pid)]
    try:
        serve = Serve(path, *arguments)
        started.append(serve)
        with serve.connect() as client:
            store(client, client.open(), 0, 3)
    finally:
        master.kill()
        master.wait()
    _, errors = serve.process.communicate(timeout=60)
    assert serve.process.returncode == 0
    assert "the process that it served for is gone: stopping" in errors
    assert not path.exists()
    # As if it had been asked to stop.
    assert Path(default_arena_path(str(path))).exists()
    # One that is gone already.
    late = Serve(path, *arguments)
    started.append(late)
    _, errors = late.process.communicate(timeout=60)
    assert late.process.returncode == 1
    assert f"--with-process: process {master.pid} cannot be watched: No such process" in errors


@pytest.mark.parametrize("loads", [False, True])
def test_what_it_is_asked_for_is_written_down_and_can_be_simulated(
    started: list[Serve], path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], loads: bool
) -> None:
    trace = tmp_path / "trace.jsonl.gz"
    asked = tuple(bytes([number]) * 16 for number in (1, 2, 3))
    started.append(Serve(path, "--trace", str(trace), "--trace-bytes", "1M"))
    with started[-1].connect() as client:
        client.open()
        for _ in range(2):
            client.call(Load(0, asked, 0.0, depth=1) if loads else Match(0, asked, 0.0), Leased)
            client.call(Put(0, asked, bytes(3 * SIZE), 5.0))
    assert started[-1].stop()[0] == 0
    capsys.readouterr()
    assert (
        main(["simulate", str(trace), "--policy", "lru", "--beside", "none", "--blocks", "9", "--json"]) == 0
    )
    [result] = json.loads(capsys.readouterr().out)["results"]
    assert result["hit_blocks"] == pytest.approx(0.5)


def test_the_size_of_a_trace_without_a_trace_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--trace-bytes", "1M"]) == 1
    assert "--trace-bytes: is for a trace, and --trace names none" in capsys.readouterr().err


def test_without_a_size_it_takes_no_more_than_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(command, "memory_headroom", lambda: MemoryHeadroom(1 << 60, 0, "plenty"))
    assert command.usual_bytes(None) == 1 << 58
    room = os.statvfs(tmp_path)
    file = ArenaFile(tmp_path / "arena")
    assert 0 < command.usual_bytes(file) <= room.f_blocks * room.f_frsize // 2
    assert f"for want of room at {tmp_path}/arena" in caplog.text
    file.close()


def test_one_that_is_ended_while_it_starts_leaves_nothing(started: list[Serve], path: Path) -> None:
    arena = Path(default_arena_path(str(path)))
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        serve = Serve(path, "--quiet")
        started.append(serve)
        while not arena.exists():
            assert serve.process.poll() is None
            time.sleep(0.001)
        code, _ = serve.stop(number)
        assert code in (0, 130)
        assert list(path.parent.iterdir()) == []
        assert list(arena.parent.glob(f"{arena.name}*")) == []


def test_one_that_cannot_start_leaves_the_blocks_of_the_one_before(
    started: list[Serve], path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Serve(path, "--quiet")
    started.append(first)
    with first.connect() as client:
        client.open()
        store(client, 0, 0, 3)
        first.process.kill()
        first.process.communicate()
    arena = default_arena_path(str(path))
    for arguments, said in (
        (["--host-bytes", "8M"], f"--host-bytes: {arena} is an arena of 16.0 MiB, not of 8.0 MiB"),
        (["--arena", arena, "--socket", str(tmp_path / "no" / "socket")], "--socket: "),
        (["--arena", "memory", "--fresh"], "--arena: memory is no file"),
        (["--arena", str(tmp_path)], f"--arena: {tmp_path} cannot be opened: Is a directory"),
    ):
        assert main(["serve", "--socket", str(path), "--quiet", *arguments]) == 1
        assert capsys.readouterr().err.startswith(f"kvpager serve: {said}")
    # Nobody says how much: it is as large as it was.
    second = Serve(path)
    started.append(second)
    with second.connect() as client:
        client.open()
        assert len(client.call(Match(0, names(0, 4), 0.0), Leased).slots) == 3
    _, errors = second.stop()
    assert errors.startswith("kvpager serve: 3 blocks were there, and are served\n")


def test_a_second_one_on_the_same_socket_is_refused_and_a_killed_ones_place_is_taken(
    started: list[Serve], path: Path
) -> None:
    first = Serve(path)
    started.append(first)
    with first.connect() as client:
        second = Serve(path)
        started.append(second)
        _, errors = second.process.communicate(timeout=60)
        assert second.process.returncode == 1
        assert errors == f"kvpager serve: --socket: another sidecar listens on {path}\n"
        assert client.open() == 0
        boot = client.welcome.boot_id
    first.process.kill()
    first.process.communicate()
    assert path.exists()
    third = Serve(path, "--quiet")
    started.append(third)
    with third.connect() as client:
        assert client.welcome.boot_id != boot
    assert third.stop() == (0, "")


SECRET = b"sixteen bytes and some more"


@pytest.mark.parametrize("by", ["file", "variable"])
def test_what_goes_to_the_cold_tier_is_sealed_under_the_secret_that_is_given(
    started: list[Serve], path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    arguments = ["--quiet", "--cold", f"disk://{tmp_path}/cold", "--cold-bytes", "64M"]
    if by == "file":
        key = tmp_path / "key"
        key.write_bytes(SECRET + b"\n")
        key.chmod(0o600)
        sealed = [*arguments, "--cold-secret-file", str(key)]
    else:
        monkeypatch.setenv("KVPAGER_COLD_SECRET", SECRET.decode())
        sealed = arguments
    serve = Serve(path, *sealed)
    started.append(serve)
    block = (b"what nobody may read" * SIZE)[:SIZE]
    with serve.connect() as client:
        client.open()
        client.call(Put(0, names(0, 1), block, 5.0))
    assert serve.stop() == (0, "")
    records = [file for file in (tmp_path / "cold").rglob("*") if file.stat().st_size > SIZE]
    assert len(records) == 1
    assert b"nobody may read" not in records[0].read_bytes()
    monkeypatch.delenv("KVPAGER_COLD_SECRET", raising=False)
    for secret, found in ((SECRET, 1), (None, 0), (b"another secret than that", 0)):
        cold = open_cold_tier(tmp_path / "cold", capacity_bytes=64 << 20, secret=secret)
        with HostStore(16 << 20, cold=cold) as host, host.space(LAYOUT).load(names(0, 1), 5.0) as lease:
            assert len(lease) == found
            if found:
                assert bytes(lease.blocks[0]) == block


def test_a_secret_that_others_can_read_or_that_is_short_is_refused_and_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    arguments = ["serve", "--socket", str(tmp_path / "socket"), "--host-bytes", "16M"]
    arguments += ["--cold", f"disk://{tmp_path}/cold", "--cold-bytes", "64M", "--cold-secret-file", str(key)]
    for text, mode, said in (
        ("sesame and as many more", 0o640, f"--cold-secret-file: {key} can be read or written by others"),
        ("sesame", 0o600, "--cold-secret-file: must be at least 16 bytes, got 6"),
        ("sesame" * 1000, 0o600, f"--cold-secret-file: {key} has more than 4096 bytes"),
    ):
        key.write_text(text)
        key.chmod(mode)
        assert main(arguments) == 1
        shown = capsys.readouterr().err
        assert shown.startswith(f"kvpager serve: {said}")
        assert "sesame" not in shown


def test_blocks_that_were_sealed_under_another_secret_count_as_not_copied(
    started: list[Serve], path: Path, tmp_path: Path
) -> None:
    arguments = ["--quiet", "--cold", f"disk://{tmp_path}/cold", "--cold-bytes", "64M", "--keep-arena"]
    for at, secret in enumerate((SECRET, SECRET, b"another secret than that")):
        key = tmp_path / f"key-{at}"
        key.write_bytes(secret)
        key.chmod(0o600)
        serve = Serve(path, *arguments, "--cold-secret-file", str(key))
        started.append(serve)
        with serve.connect() as client:
            client.open()
            if not at:
                client.call(Put(0, names(0, 1), bytes(SIZE), 5.0))
            assert client.call(Flush(10.0), Count).count == 0
            written = client.call(GetStats(), Stats).values["host"]["cold_written"]
        # Under the same one nothing is to be written again.
        assert written == (0 if at == 1 else 1)
        assert serve.stop() == (0, "")


WATCHED = """
import sys

seen = []

def hook(event, arguments):
    if event == "import" and arguments[0].partition(".")[0] in ("torch", "cuda", "cupy", "transformers"):
        seen.append(arguments[0])
    if event in ("ctypes.dlopen", "open") and "cuda" in str(arguments[0]):
        seen.append(str(arguments[0]))

sys.addaudithook(hook)
from kvpager.api.cli import main

code = main(sys.argv[1:])
print(seen, "torch" in sys.modules, file=sys.stderr)
sys.exit(code)
"""


def test_it_imports_no_torch_and_opens_no_cuda(started: list[Serve], path: Path) -> None:
    serve = Serve(path, "--quiet", program=("-c", WATCHED))
    started.append(serve)
    with serve.connect() as client:
        client.open()
        client.call(Put(0, names(10, 100), bytes(100 * SIZE), 5.0))
        store(client, 0, 0, 3)
        client.call(Match(0, names(0, 3), 0.0), Leased)
        maps = Path(f"/proc/{serve.process.pid}/maps").read_text()
        assert "numpy" in maps
        assert "torch" not in maps
        assert "libcuda" not in maps
    assert serve.stop() == (0, "[] False\n")


def test_the_watch_would_see_torch_and_cuda() -> None:
    program = WATCHED.replace(
        "code = main(sys.argv[1:])",
        "import importlib.util, ctypes\n"
        "try:\n    ctypes.CDLL('libcuda.so.1')\nexcept OSError:\n    pass\n"
        "try:\n    import torch.nothing\nexcept ImportError:\n    pass\n"
        "code = 0",
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert "'libcuda.so.1'" in done.stderr
    assert "'torch" in done.stderr
