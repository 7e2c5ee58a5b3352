"""Settings of a sidecar: flags, variables and `kvpager.toml`, their order, and what is refused."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from kvpager.api.cli import main
from kvpager.api.serve_settings import SERVE_SETTINGS, find_settings, without_settings
from kvpager.api.setting import Source
from kvpager.tests.serve_process import ServeProcess

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this machine is found: neither variables nor a file."""
    for name in list(os.environ):
        if name.startswith("KVPAGER_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def written(folder: Path, text: str, name: str = "kvpager.toml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, object]]:
    """What `config show --json` says of each setting."""
    assert main(["config", "show", "--json", *arguments]) == 0
    found: dict[str, dict[str, object]] = json.loads(capsys.readouterr().out)["settings"]
    return found


def test_a_flag_goes_before_the_environment_that_before_the_file_and_that_before_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, '[serve]\nhost_bytes = "1G"\ndrain = 1\nquiet = true\n')
    monkeypatch.setenv("KVPAGER_HOST_BYTES", "2G")
    monkeypatch.setenv("KVPAGER_DRAIN", "2")
    found = shown(capsys, "--config", str(file), "--host-bytes", "3G")
    assert found["host_bytes"] == {"value": 3 << 30, "source": "flag", "where": "--host-bytes"}
    assert found["drain"] == {"value": 2.0, "source": "environment", "where": "$KVPAGER_DRAIN"}
    assert found["quiet"] == {"value": True, "source": "file", "where": f"{file}, line 4: quiet"}
    assert found["fresh"] == {"value": False, "source": "default", "where": "--fresh"}
    assert shown(capsys, "--config", str(file), "--no-quiet")["quiet"]["value"] is False


def test_every_setting_says_the_same_in_all_three_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"{one.name} = {one.kind.example}" for one in SERVE_SETTINGS]
    file = written(tmp_path, "\n".join(["[serve]", *lines]))
    filed = shown(capsys, "--config", str(file))
    variables = {
        **{one.name: one.kind.example.strip('"[]') for one in SERVE_SETTINGS},
        "quota": "acme=8G,*=1G",
        "policy_weight": "small_share=0.2",
    }
    for one in SERVE_SETTINGS:
        monkeypatch.setenv(one.variable, variables[one.name])
    set_by_variables = shown(capsys)
    flags = [
        part
        for one in SERVE_SETTINGS
        for value in variables[one.name].split(",")
        for part in ([one.flag] if one.metavar is None else [one.flag, value])
    ]
    given = shown(capsys, *flags)
    for one in SERVE_SETTINGS:
        assert filed[one.name]["value"] == set_by_variables[one.name]["value"] == given[one.name]["value"]
        assert [found[one.name]["source"] for found in (filed, set_by_variables, given)] == [
            "file",
            "environment",
            "flag",
        ]


def test_a_list_that_is_given_replaces_what_stands_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, "[serve]\nallow_uid = [1, 2]\n[serve.quota]\nacme = 4096\n")
    monkeypatch.setenv("KVPAGER_ALLOW_UID", "3, 4 5")
    found = shown(capsys, "--config", str(file))
    assert found["allow_uid"]["value"] == [3, 4, 5]
    assert found["quota"]["value"] == {"acme": 4096}
    assert shown(capsys, "--config", str(file), "--allow-uid", "6")["allow_uid"]["value"] == [6]


@pytest.mark.parametrize("text", ["1", "TRUE", "yes", "on", "0", "False", "no", "off"])
def test_a_switch_is_read_from_the_environment(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVPAGER_FRESH", text)
    assert shown(capsys)["fresh"]["value"] is (text.lower() in ("1", "true", "yes", "on"))


def test_an_empty_variable_counts_as_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVPAGER_HOST_BYTES", "")
    assert shown(capsys)["host_bytes"]["source"] == "default"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('host_byte = "8G"', "host_byte: is no setting of kvpager serve; did you mean host_bytes?"),
        ("nonsense = 1", "nonsense: is no setting of kvpager serve"),
        ('host_bytes = "much"', "host_bytes: must be a size like 8G, 512M or 1.5G, got 'much'"),
        ("host_bytes = true", "host_bytes: must be a size like 8G, 512M or 1.5G, got True"),
        ("host_bytes = 1.5", "host_bytes: must be a size like 8G, 512M or 1.5G, got 1.5"),
        ("socket = 5", "socket: must be a path, got 5"),
        ("cold = []", "cold: must be a string, got []"),
        ('fresh = "yes"', "fresh: must be true or false, got 'yes'"),
        ('drain = "soon"', "drain: must be a finite number of at least 0, got 'soon'"),
        ("drain = -1", "drain: must be a finite number of at least 0, got -1"),
        ("allow_uid = 5", "allow_uid: must be a list of integers, got 5"),
        ('allow_uid = ["x"]', "allow_uid: must be an integer of at least 0, got 'x'"),
        ("quota = 5", "quota: must be a table of sizes by tenant, got 5"),
        ("quota = { acme = -5 }", "quota: must be a size like 8G, 512M or 1.5G, got '-5'"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_by_file_line_and_key(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, f"# a comment\n[serve]\n{line}\n")
    for arguments in (["serve", "--config", str(file)], ["config", "check", str(file)]):
        assert main(arguments) == 1
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err == f"kvpager {arguments[0]}: {file}, line 3: {said}\n"


def test_a_check_says_all_that_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, 'drain = 1\n[serv]\n[serve]\nhost_bytes = "x"\nquiet = 1\nquite = true\n')
    assert main(["config", "check", str(file)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"kvpager config: {file}, line 1: drain: belongs below [serve]",
        f"kvpager config: {file}, line 2: serv: is no table that is known; did you mean serve?",
        f"kvpager config: {file}, line 6: quite: is no setting of kvpager serve; did you mean quiet?",
        f"kvpager config: {file}, line 4: host_bytes: must be a size like 8G, 512M or 1.5G, got 'x'",
        f"kvpager config: {file}, line 5: quiet: must be true or false, got 1",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [("[serve", "is no TOML: "), ("x = \udcff", "is no TOML: "), ("#" * (1 << 20) + "#", "has more than ")],
)
def test_a_file_that_cannot_be_read_is_told_by_its_path(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kvpager.toml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    assert main(["config", "check", str(file)]) == 1
    assert capsys.readouterr().err.startswith(f"kvpager config: {file}: {said}")
    assert main(["serve", "--config", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err == (
        f"kvpager serve: {tmp_path}/none: cannot be read: No such file or directory\n"
    )


def test_what_is_wrong_with_a_variable_is_told_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVPAGER_FRESH", "perhaps")
    assert main(["serve"]) == 1
    assert capsys.readouterr().err == "kvpager serve: $KVPAGER_FRESH: must be true or false, got 'perhaps'\n"
    monkeypatch.delenv("KVPAGER_FRESH")
    monkeypatch.setenv("KVPAGER_COLD_BYTES", "1G")
    assert main(["serve"]) == 1
    assert capsys.readouterr().err == (
        "kvpager serve: $KVPAGER_COLD_BYTES: is for a cold tier, and --cold names none\n"
    )


def test_a_variable_that_is_nearly_one_is_mentioned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVPAGER_HOST_BYTE", "8G")
    monkeypatch.setenv("KVPAGER_OPTIONS", "--quiet")
    assert main(["config", "show"]) == 0
    assert capsys.readouterr().err == (
        "kvpager config: $KVPAGER_HOST_BYTE is no setting; did you mean $KVPAGER_HOST_BYTES?\n"
    )


def test_the_first_file_that_is_named_or_there_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(capsys)["drain"]["source"] == "default"
    usual = written(tmp_path / "config" / "kvpager", "[serve]\ndrain = 1\n")
    assert shown(capsys)["drain"]["where"] == f"{usual}, line 2: drain"
    named = written(tmp_path, "[serve]\ndrain = 2\n", "named.toml")
    monkeypatch.setenv("KVPAGER_CONFIG", str(named))
    assert shown(capsys)["drain"]["where"] == f"{named}, line 2: drain"
    assert shown(capsys, "--config", str(usual))["drain"]["value"] == 1.0
    assert shown(capsys, "--config", os.devnull)["drain"]["source"] == "default"


def test_a_file_in_the_folder_that_it_is_started_in_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, "[serve]\ndrain = 1\n")
    monkeypatch.chdir(tmp_path)
    assert shown(capsys)["drain"]["source"] == "default"


def test_secrets_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVPAGER_TOKEN", "sesame")
    monkeypatch.setenv("KVPAGER_COLD_SECRET", "sesame")
    file = written(tmp_path, '[serve]\ncold = "redis://me:sesame@h:1?ssl_password=sesame"\n')
    for more in ([], ["--json"]):
        assert main(["config", "show", "--config", str(file), *more]) == 0
        said = capsys.readouterr()
        assert "sesame" not in said.out + said.err
        assert "redis://me:***@h:1?ssl_password=***" in said.out
        assert "KVPAGER_TOKEN" in said.out


def test_the_example_is_a_file_with_every_setting_and_the_one_that_is_shipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "example"]) == 0
    example = capsys.readouterr().out
    assert example == (ROOT / "deploy" / "kvpager.toml").read_text()
    assert tomllib.loads(example) == {"serve": {}}
    assert max(map(len, example.splitlines())) <= 110
    values = [line.removeprefix("# ") for line in example.splitlines() if " = " in line]
    file = written(tmp_path, "[serve]\n" + "\n".join(values))
    assert main(["config", "check", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: {len(SERVE_SETTINGS)} settings, nothing is wrong with them\n"


def test_a_sidecar_is_started_by_a_file_and_variables_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, f'[serve]\ncold = "disk://{tmp_path}/cold"\ncold_bytes = "64M"\nquiet = false\n')
    monkeypatch.setenv("KVPAGER_CONFIG", str(file))
    with ServeProcess(tmp_path / "socket") as serving:
        assert serving.terminate() == 0
    assert (tmp_path / "cold").is_dir()


def test_a_start_without_a_file_imports_no_toml(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from kvpager.api.cli import main\n"
            "code = main(['serve', '--drain', '-1'])\n"
            "unwanted = {'tomllib', 'shtab', 'rich', 'http.client'}\n"
            "sys.exit(code + 10 * len(unwanted & set(sys.modules)))",
        ],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (
        1,
        "kvpager serve: --drain: must be a finite number of at least 0, got -1.0\n",
    )


def test_an_environment_for_flags_alone_has_no_settings_and_keeps_secrets() -> None:
    given = {one.variable: "x" for one in SERVE_SETTINGS} | {"KVPAGER_COLD_SECRET": "s", "HOME": "/none"}
    rest = without_settings(given)
    assert rest == {"KVPAGER_COLD_SECRET": "s", "HOME": "/none", "KVPAGER_CONFIG": os.devnull}
    found = find_settings(argparse.Namespace(config=None), rest)
    assert {one.source for one in found.values()} == {Source.DEFAULT}


def test_names_are_made_of_flags_alone() -> None:
    found = find_settings(argparse.Namespace(config=None), {})
    assert [*found] == [one.flag[2:].replace("-", "_") for one in SERVE_SETTINGS]
    assert {one.variable for one in SERVE_SETTINGS} == {f"KVPAGER_{name.upper()}" for name in found}
