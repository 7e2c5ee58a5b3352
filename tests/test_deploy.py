"""The files in deploy/: their syntax, and that what they name is there."""

from __future__ import annotations

import argparse
import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from kvpager.api import doctor, serve
from kvpager.tests.serve_process import ServeProcess
from kvpager.tiers.memory import parse_bytes

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
UNITS = ["kvpager.service", "kvpager-user.service"]
PATH = "/run/kvpager/sidecar.sock"


def options_of(arguments: list[str]) -> argparse.Namespace:
    """What `kvpager serve` understands by its arguments; fails where it would refuse them."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    serve.add_parser(parser.add_subparsers())
    options, left = parser.parse_known_args(["serve", *arguments])
    assert left == []
    return options


def unit(name: str) -> configparser.ConfigParser:
    """A unit; names of settings as they are written."""
    found = configparser.ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    found.optionxform = str  # type: ignore[assignment, method-assign]
    found.read_string((DEPLOY / name).read_text())
    return found


def manifest() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="no YAML parser is installed (it comes with transformers)")
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "kubernetes.yaml").read_text())
    return found


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_starts_the_sidecar_with_options_that_it_has(name: str) -> None:
    service = unit(name)["Service"]
    program, command, *arguments = shlex.split(service["ExecStart"])
    assert Path(program).name == "kvpager"
    assert command == "serve"
    assert arguments.pop() == "$KVPAGER_OPTIONS"
    options = options_of(arguments)
    assert options.keep_arena
    assert float(service["TimeoutStopSec"]) > options.drain
    # Where the socket lies is made by the unit.
    folder = Path(options.socket).parent
    assert folder.name == service["RuntimeDirectory"]
    assert (service["KillSignal"], service["LimitMEMLOCK"]) == ("SIGTERM", "infinity")


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_names_options_in_its_head_that_the_sidecar_has(name: str) -> None:
    known = {name for one in options_parser()._actions for name in one.option_strings}
    known |= {"--system", "--home-dir", "--now", "--user", "--remove-orphans"}  # of other commands
    head = (DEPLOY / name).read_text()
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", head)) <= known


def options_parser() -> argparse.ArgumentParser:
    commands = argparse.ArgumentParser().add_subparsers()
    serve.add_parser(commands)
    found: argparse.ArgumentParser = commands.choices["serve"]
    return found


@pytest.mark.parametrize("name", UNITS)
def test_systemd_takes_the_unit(name: str, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    path = tmp_path / name
    # The program is not where the unit expects it.
    path.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", (DEPLOY / name).read_text(), flags=re.M))
    tmp_path.chmod(0o700)
    user = ["--user"] if "user" in name else []
    done = subprocess.run(
        [analyze, *user, "verify", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_image_is_built_of_everything_that_the_package_has() -> None:
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    known = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "VOLUME", "STOPSIGNAL", "ENTRYPOINT"}
    assert {line[0] for line in lines} <= known
    copied = {
        source.rstrip("/")
        for line in lines
        if line[0] == "COPY" and "--from" not in line[1]
        for source in line[1:-1]
    }
    assert all((ROOT / source).exists() for source in copied)
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {name.split(".")[1] for name in setup["tool"]["setuptools"]["packages"] if "." in name}
    assert (
        folders | {"__init__.py", "__main__.py", "py.typed", "pyproject.toml", "README.md", "LICENSE"}
        <= copied
    )
    (extras,) = [line[1].partition("=")[2] for line in lines if line[1].startswith("EXTRAS=")]
    assert extras in setup["project"]["optional-dependencies"]
    assert ["USER", "10001:10001"] in lines
    (entry,) = [" ".join(line[1:]) for line in lines if line[0] == "ENTRYPOINT"]
    program, command, *arguments = re.findall(r'"([^"]*)"', entry)
    assert (program, command) == ("kvpager", "serve")
    assert options_of(arguments).socket == PATH


def test_the_pod_gives_the_sidecar_what_it_needs() -> None:
    pod = manifest()["spec"]["template"]["spec"]
    assert pod["shareProcessNamespace"] is True
    assert pod["securityContext"]["runAsNonRoot"] is True
    (sidecar,) = pod["initContainers"]
    assert sidecar["restartPolicy"] == "Always"
    options = options_of(sidecar["args"])
    assert pod["terminationGracePeriodSeconds"] > options.drain
    host_bytes = parse_bytes("--host-bytes", options.host_bytes)
    volumes = {one["name"]: one["emptyDir"] for one in pod["volumes"]}
    mounts = {one["mountPath"]: one["name"] for one in sidecar["volumeMounts"]}
    arena = volumes[mounts["/dev/shm"]]
    assert arena["medium"] == "Memory"
    room = parse_bytes("sizeLimit", arena["sizeLimit"] + "B")
    assert host_bytes < room < parse_bytes("limits", sidecar["resources"]["limits"]["memory"] + "B")
    (engine,) = pod["containers"]
    shared = {one["mountPath"]: one["name"] for one in engine["volumeMounts"]}
    assert shared["/run/kvpager"] == mounts["/run/kvpager"]
    assert engine["env"][0]["value"] == f"unix://{PATH}"
    assert {*mounts.values(), *shared.values()} == set(volumes)


def test_the_pods_probe_asks_a_sidecar(tmp_path: Path) -> None:
    (sidecar,) = manifest()["spec"]["template"]["spec"]["initContainers"]
    for probe in ("startupProbe", "livenessProbe"):
        program, *arguments = sidecar[probe]["exec"]["command"]
        assert program == "python"
    assert PATH in arguments[-1]
    arguments[-1] = arguments[-1].replace(PATH, str(tmp_path / "socket"))

    def ask() -> int:
        return subprocess.run(
            [sys.executable, "-P", *arguments], capture_output=True, timeout=60, check=False
        ).returncode

    with ServeProcess(tmp_path / "socket") as serving:
        assert ask() == 0
        serving.kill()
        assert ask() != 0


def test_the_page_speaks_of_files_and_options_that_are_there() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    for name in os.listdir(DEPLOY):
        assert f"`{name}`" in page
    for link in re.findall(r"\]\(([\w./-]+\.md)", page):
        assert (ROOT / "docs" / link).is_file()

    commands = argparse.ArgumentParser().add_subparsers()
    for one in (serve, doctor):
        one.add_parser(commands)
    known = {
        name for parser in commands.choices.values() for one in parser._actions for name in one.option_strings
    }
    for code in re.findall(r"`(kvpager (?:serve|doctor)[^`]*)`", page):
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", code)) <= known, code
