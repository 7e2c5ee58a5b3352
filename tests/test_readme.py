"""The README's examples run as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kvpager.api.cli import main
from kvpager.tests.model_files import require_smollm2

ROOT = Path(__file__).parents[1]


def example(number: int) -> str:
    examples: list[str] = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL
    )
    return examples[number]


def run(source: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source],
        cwd=folder,
        env={**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_simulation_prints_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "README.md").read_text()
    [(command, shown)] = re.findall(
        r"```console\n\$ kvpager (simulate .*?)\n(.*?)```", readme, flags=re.DOTALL
    )
    assert main([*command.split(), "--jobs", "1"]) == 0
    assert capsys.readouterr().out == shown


def test_the_store_example_runs_and_is_short(tmp_path: Path) -> None:
    source = example(0)
    assert len(source.strip().splitlines()) <= 20
    assert run(source, tmp_path).startswith("4 blocks at addresses")


def test_the_engine_example_answers(tmp_path: Path) -> None:
    require_smollm2()
    assert run(example(1), tmp_path).strip()
