"""The package as it is installed: what it imports, in which direction, and what it says of itself."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("tiers", "kernels", "kvstore", "engine", "api")
"""From the lowest up: a module may import from its own folder and from those before it."""
WITHOUT_TORCH = ("tiers", "kvstore")
"""Folders whose modules can be imported where torch is not installed."""

MODULES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def name_of(path: Path) -> str:
    """The import name of a source file: ``kvpager.tiers.layout``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("kvpager", *(part for part in parts if part != "__init__")))


def imported_names(path: Path, *, at_module_level: bool) -> set[str]:
    """Absolute names of the modules that a file imports, without those for type checkers alone.

    ``from ..tiers import layout`` counts as ``kvpager.tiers`` and ``kvpager.tiers.layout``.
    """
    package = name_of(path).split(".")
    if path.name != "__init__.py":
        package.pop()
    names: set[str] = set()

    def walk(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names.update({base, *(f"{base}.{alias.name}" for alias in node.names)})
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for statement in node.orelse:
                walk(statement)
        elif not (at_module_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            for child in ast.iter_child_nodes(node):
                walk(child)

    walk(ast.parse(path.read_text(), filename=str(path)))
    return names


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        timeout=60,
    )


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_run_downward_only(path: Path) -> None:
    level = FOLDERS.index(path.relative_to(ROOT).parts[0])
    upward = {
        name
        for name in imported_names(path, at_module_level=False)
        for folder in FOLDERS[level + 1 :]
        if f"{name}.".startswith(f"kvpager.{folder}.")
    }
    assert not upward


def test_no_modules_import_each_other_in_a_circle() -> None:
    known = {name_of(path) for path in MODULES}
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        names = imported_names(path, at_module_level=True)
        # ``from . import layout`` takes a module, and nothing of the package that it is in.
        modules_alone = {
            package
            for package in names & known
            if (taken := {name for name in names if name.rpartition(".")[0] == package}) and taken <= known
        }
        graph[name_of(path)] = (names & known) - modules_alone
    assert sum(map(len, graph.values())) > len(MODULES)
    TopologicalSorter(graph).prepare()  # raises CycleError, which shows the circle


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_folders_are_imported_by_their_place_in_the_package(path: Path) -> None:
    top_level = {name.split(".")[0] for name in imported_names(path, at_module_level=False)}
    assert not top_level & set(FOLDERS)


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.relative_to(ROOT).parts[0] in WITHOUT_TORCH], ids=name_of
)
def test_tiers_and_kvstore_import_no_torch_at_module_level(path: Path) -> None:
    assert "torch" not in {name.split(".")[0] for name in imported_names(path, at_module_level=True)}


def test_kvstore_imports_no_kernels_at_module_level() -> None:
    for path in sorted((ROOT / "kvstore").rglob("*.py")):
        names = imported_names(path, at_module_level=True)
        assert not {name for name in names if f"{name}.".startswith("kvpager.kernels.")}, name_of(path)


def test_the_base_install_imports_where_no_extra_is_installed() -> None:
    names = [name_of(path) for path in MODULES if path.relative_to(ROOT).parts[0] in WITHOUT_TORCH]
    program = "\n".join(
        [
            "import importlib, sys",
            "for absent in ('torch', 'transformers', 'cupy', 'cuda', 'cryptography', 'lmdb'):",
            "    sys.modules[absent] = None",
            f"for name in {['kvpager', *names]!r}:",
            "    importlib.import_module(name)",
        ]
    )
    done = run_python("-W", "error", "-c", program)
    assert done.returncode == 0, done.stderr


def test_importing_kvpager_is_silent_and_brings_no_torch() -> None:
    done = run_python("-W", "error", "-c", "import kvpager, sys; print('torch' in sys.modules)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_every_name_that_kvpager_hands_on_exists() -> None:
    import kvpager

    for name in getattr(kvpager, "__all__", ()):
        assert getattr(kvpager, name) is not None


def test_the_package_runs_as_a_program() -> None:
    done = run_python("-W", "error", "-m", "kvpager", "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"kvpager {version('kvpager')}\n", "")


def test_importing_the_program_runs_nothing() -> None:
    done = run_python("-W", "error", "-c", "import kvpager.__main__")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_installed_version_is_the_one_in_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert version("kvpager") == project["version"]


def test_every_package_folder_is_listed_in_pyproject() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert {name_of(path.parent) for path in MODULES if path.name == "__init__.py"} <= set(packages)


@pytest.mark.parametrize(
    "path",
    [ROOT / "__init__.py", ROOT / "__main__.py", *MODULES],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_public_module_says_what_it_is(path: Path) -> None:
    if path.name.startswith("_") and path.name != "__init__.py":
        pytest.skip("a private module")
    assert ast.get_docstring(ast.parse(path.read_text()))
