"""What every test file may rely on: the long form of soaks, and tests that need a GPU."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the soaks in their long form as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        _skip(items, "full", "a long soak; --full runs it")
    if any("gpu" in item.keywords for item in items) and not _has_gpu():
        _skip(items, "gpu", "no CUDA device")


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if marker in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))


def _has_gpu() -> bool:
    # Imported where it is asked for: most runs have no such test, and torch takes seconds.
    import torch

    return torch.cuda.is_available()
