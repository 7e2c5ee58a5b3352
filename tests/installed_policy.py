"""A distribution that adds an eviction policy by its entry point, as one that is installed."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

__all__ = ["Unbounded", "install_policy"]


class Unbounded:
    """Would be a policy, but tells its weights without their bounds."""

    known_weights: ClassVar[dict[str, float]] = {"weight": 1.0}


def install_policy(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, leads_to: str) -> None:
    """Have a policy found by its name until the test ends.

    Args:
        monkeypatch: undoes it.
        folder: an empty one.
        name: of the policy.
        leads_to: ``module:attribute`` of what makes it.
    """
    about = folder / f"kvpager_policy_{name}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvpager-policy-{name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[kvpager.policies]\n{name} = {leads_to}\n")
    monkeypatch.syspath_prepend(folder)
