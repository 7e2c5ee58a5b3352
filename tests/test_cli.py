"""The command line: what it prints, its exit codes, and that nobody is shown a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import kvpager
import pytest
from kvpager.api.cli import command_parser, main
from kvpager.tests.process_tree import await_child, is_there

SCRIPT = Path(sys.executable).with_name("kvpager")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The installed command, in a process of its own."""
    return subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, timeout=120, check=False)


def check_one_line(code: int, error: str, begins: str, *, expected: int = 1) -> None:
    """It failed, and said why in one line."""
    assert code == expected
    assert error.startswith(begins)
    assert error.count("\n") == 1
    assert "Traceback" not in error


def test_the_installed_command_tells_its_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"kvpager {kvpager.__version__}\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_output_that_cannot_be_written_is_told_in_a_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [str(SCRIPT), "config", "show"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    check_one_line(done.returncode, done.stderr, "kvpager config: the output was not written: ")


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"\n    {command} " in shown for command in command_parser()[1])
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for option in ("--model", "--sessions", "--redis", "--disk", "--device", "--dtype", "--answer-tokens"):
        assert option in shown


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["dance"],
        ["demo", "--sessions", "many"],
        ["demo", "--nonsense"],
        ["demo", "--dtype", "int8"],
        ["demo", "--redis", "redis://127.0.0.1", "--disk", "x"],
    ],
)
def test_wrong_usage_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: kvpager" in capsys.readouterr().err


@pytest.mark.parametrize("command", [*command_parser()[1]])
def test_an_unknown_option_is_told_with_the_usage_of_its_command(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = {"config": ["show"], "pin": ["x"], "unpin": ["x"], "completion": ["bash"]}.get(command, [])
    with pytest.raises(SystemExit) as ended:
        main([command, *needed, "--bogus"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"usage: kvpager {command} ")
    assert f"kvpager {command}: error: unrecognized arguments: --bogus" in said
    with pytest.raises(SystemExit):
        main(["--bogus", command, *needed])
    assert capsys.readouterr().err.startswith("usage: kvpager [-h]")


@pytest.mark.parametrize("option", ["--sessions", "--answer-tokens"])
@pytest.mark.parametrize("value", ["0", "-3"])
def test_numbers_that_make_no_sense_are_refused(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["demo", option, value])
    check_one_line(
        code,
        capsys.readouterr().err,
        f"kvpager demo: {option}: must be an integer of at least 1, got {value}\n",
    )


def test_a_model_that_is_not_there_is_said_to_be_so() -> None:
    done = run("demo", "--model", "/no/model")
    check_one_line(done.returncode, done.stderr, "kvpager demo: --model: there is no model at /no/model")


def test_a_model_that_cannot_be_read_is_said_to_be_so(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF is not all that a model needs")
    done = run("demo", "--model", str(path))
    check_one_line(done.returncode, done.stderr, f"kvpager demo: --model: {path}: the GGUF file is cut off")


@pytest.mark.parametrize("device", ["cuda:99", "abacus"])
def test_a_device_that_is_not_there_is_said_to_be_so(device: str) -> None:
    done = run("demo", "--device", device)
    check_one_line(done.returncode, done.stderr, "kvpager demo: --device: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--socket", "x"], "--socket: is a sidecar's, and goes with --sidecar"),
        (["--sidecar", "--socket", "kvpager://h:1"], "--socket: must be a path on this machine"),
        (["--sidecar", "--socket", "x", "--disk", "y"], "--socket: its cold tier is its own"),
        (["--sidecar", "--socket", ""], "--socket: must be a string that is not empty"),
        (["--sidecar", "--sessions", "1"], "--sessions: must be an integer of at least 2, got 1"),
    ],
)
def test_options_of_the_demo_that_contradict_each_other_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_one_line(main(["demo", *arguments]), capsys.readouterr().err, f"kvpager demo: {said}")


def test_a_demo_without_its_sidecar_says_so(tmp_path: Path) -> None:
    done = run("demo", "--sidecar", "--socket", str(tmp_path / "none"))
    check_one_line(done.returncode, done.stderr, f"kvpager demo: unix://{tmp_path}/none", expected=3)


@pytest.mark.parametrize("arguments", [[], ["--sidecar"]])
@pytest.mark.parametrize(("option", "value"), [("--redis", "http://x"), ("--disk", "/")])
def test_a_cold_tier_of_the_demo_that_cannot_be_is_told_by_its_option(
    arguments: list[str], option: str, value: str
) -> None:
    done = run("demo", *arguments, option, value)
    check_one_line(done.returncode, done.stderr, f"kvpager demo: {option}: ")


def test_a_secret_in_the_environment_is_named_by_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVPAGER_COLD_SECRET", "short")
    cold = ["--cold", f"disk://{tmp_path}/cold", "--cold-bytes", "1G"]
    code = main(["serve", "--socket", f"{tmp_path}/socket", *cold])
    check_one_line(code, capsys.readouterr().err, "kvpager serve: $KVPAGER_COLD_SECRET: must be at least 16")


def test_findings_of_the_doctor_name_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KVPAGER_TOKEN", raising=False)
    for arguments, said in (
        (["--socket", "http://x"], "sidecar: --socket: must be unix:///path"),
        (["--socket", "kvpager://localhost:1"], "sidecar: --token-file: a sidecar that is reached over TCP"),
        (["--cold", "http://x"], "cold tier: --cold: must begin with redis://"),
        (["--cold", "disk:///proc/none"], "cold tier: /proc/none is not there and cannot be made"),
        (["--shm", f"{tmp_path}/none"], f"arenas: --shm: {tmp_path}/none cannot be read"),
    ):
        assert main(["doctor", *arguments]) == 1
        assert f"problem  {said}" in capsys.readouterr().out


def test_a_redis_that_is_no_url_is_not_taken_for_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--redis", "localhost:6379"]) == 1
    assert "--redis: must be a URL such as redis://" in capsys.readouterr().err


def test_a_password_is_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--redis", "redis://:sesame@127.0.0.1:1"]) == 1
    shown = capfd.readouterr()
    assert "redis://:***@127.0.0.1:1 keeps nothing" in shown.err
    assert "sesame" not in shown.out + shown.err


def test_what_is_empty_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--redis", "--disk", "--model", "--device"):
        code = main(["demo", flag, ""])
        said = f"kvpager demo: {flag}: must be a string that is not empty, got ''\n"
        check_one_line(code, capsys.readouterr().err, said)


def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-m", "kvpager.api.cli", "demo", "--sessions", "4"],
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Imports take seconds before that.
    child = await_child(demo.pid, "spawn_main", 100.0)
    assert list(tmp_path.glob("kvpager-demo-*"))
    demo.send_signal(signal.SIGTERM)
    _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert errors == ""
    assert not is_there(child)
    assert not list(tmp_path.glob("kvpager-demo-*"))


@pytest.mark.parametrize("command", ["serve", "demo", "doctor", "size", "status"])
def test_one_that_is_interrupted_while_it_is_imported_says_nothing(command: str) -> None:
    # The signal comes when numpy is imported: by then the command line is running, and no command is.
    program = """
import builtins, os, signal, sys
from kvpager.api.cli import command_parser, main
importing = builtins.__import__
def interrupted(name, *more):
    if name.partition(".")[0] == "numpy":
        os.kill(os.getpid(), signal.SIGINT)
    return importing(name, *more)
builtins.__import__ = interrupted
sys.exit(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, command],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
