"""What messages and pages say of packages that are missing works where kvpager is got from: a clone."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from kvpager.tiers.extras import how_to_install

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
SAID = [
    path
    for pattern in ("[a-z]*/*.py", "*.py", "*.md", "docs/*.md", "scripts/*")
    for path in sorted(ROOT.glob(pattern))
    if path.is_file() and path.parent.name != "tests"
]


@pytest.mark.parametrize("path", SAID, ids=lambda path: str(path.relative_to(ROOT)))
def test_nobody_is_sent_to_a_registry_for_kvpager(path: Path) -> None:
    assert not re.findall(r"pip install [\"']?kvpager\b", path.read_text())


def test_what_is_said_to_be_installed_is_an_extra_of_the_project() -> None:
    named = set()
    for path in SAID:
        text = path.read_text()
        named |= set(re.findall(r"how_to_install\([\"'](\w+)[\"']\)", text))
        named |= set(re.findall(r"pip install '\.\[(\w+)\]'", text))
    assert {"engine", "cuda", "seal"} <= named <= set(EXTRAS)


@pytest.mark.parametrize(
    ("program", "absent", "extra"),
    [
        ("import kvpager.engine", "torch", "engine"),
        ("import kvpager.kernels", "torch", "engine"),
        ("from kvpager.api.cli import main; raise SystemExit(main(['demo']))", "rich", "engine"),
        ("from kvpager.tiers.record import RecordCodec; RecordCodec('s' * 16)", "cryptography", "seal"),
    ],
)
def test_who_lacks_a_package_is_told_what_to_install(program: str, absent: str, extra: str) -> None:
    without = f"import sys\nsys.modules[{absent!r}] = None\n{program}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", without], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(how_to_install(extra))
    assert "demo: demo" not in done.stderr


def test_the_way_of_installing_that_messages_name_is_the_readmes() -> None:
    said = (ROOT / "README.md").read_text()
    for extra in ("engine", "seal"):
        command = how_to_install(extra).partition(" in ")[0]
        assert f"`{command}`" in said
    assert (ROOT / "scripts" / "setup").is_file()
