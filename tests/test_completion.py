"""`kvpager completion`: that shells take what it prints, and what they complete by it."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from kvpager.api.cli import command_parser, main

COMMANDS = {*command_parser()[1]}


@pytest.fixture(scope="module", params=["bash", "zsh", "fish"])
def shell(request: pytest.FixtureRequest) -> str:
    """A shell that is installed."""
    name: str = request.param
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    return name


@pytest.fixture(scope="module")
def script(shell: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is printed for it, as a file."""
    path = tmp_path_factory.mktemp(shell) / f"kvpager.{shell}"
    with path.open("w") as file, redirect_stdout(file):
        assert main(["completion", shell]) == 0
    return path


def ran(shell: str, *arguments: str) -> str:
    options = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["-N"]}[shell]
    done = subprocess.run(
        [shell, *options, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_shell_takes_it(shell: str, script: Path) -> None:
    assert ran(shell, "-n", str(script)) == ""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([""], COMMANDS),
        (["e"], {"evict"}),
        (["evict", "--ti"], {"--tier"}),
        (["evict", "--tier", ""], {"host", "cold"}),
        (["config", ""], {"show", "check", "example"}),
        (["serve", "--keep"], {"--keep-arena"}),
        (["config", "check", "{folder}/kv"], {"{folder}/kvpager.{shell}"}),
    ],
)
def test_commands_options_choices_and_files_are_completed(
    words: list[str], expected: set[str], shell: str, script: Path
) -> None:
    if shell == "zsh":
        pytest.skip("zsh completes in a terminal alone")
    words = [word.format(folder=script.parent) for word in words]
    wanted = {word.format(folder=script.parent, shell=shell) for word in expected}
    if shell == "bash":
        quoted = " ".join(f"'{word}'" for word in ("kvpager", *words))
        program = (
            f"source {script}; COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; "
            "$(complete -p kvpager | sed 's/.*-F \\([^ ]*\\).*/\\1/') kvpager; "
            "printf '%s\\n' \"${COMPREPLY[@]}\""
        )
    else:
        program = f"source {script}; complete -C 'kvpager {' '.join(words)}'"
    found = {line.split("\t")[0] for line in ran(shell, "-c", program).splitlines()}
    assert found - {"--no-keep-arena"} == wanted


def test_another_shell_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["completion", "tcsh"])
    assert ended.value.code == 2
    assert "choose from 'bash', 'zsh', 'fish'" in capsys.readouterr().err
