"""What every benchmark's results file says beside the results: on what, and with which versions."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["write_report"]


def write_report(path: Path | None, results: Any, *packages: str, **versions: str) -> None:
    """Write results with machine and versions as JSON; nothing where there is no path.

    Args:
        path: the file.
        results: whatever JSON holds.
        packages: distributions whose versions matter, beside numpy.
        versions: of what is no distribution here, such as a server or a peer.
    """
    if path is None:
        return
    found = {"python": platform.python_version()}
    for name in ("numpy", *packages):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    report = {"machine": _machine(), "versions": {**found, **versions}, "results": results}
    path.write_text(json.dumps(report, indent=2) + "\n")


def _machine() -> dict[str, Any]:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    machine = {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
    }
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists():
        import torch

        machine["gpu"] = torch.cuda.get_device_name()
        machine["gpu_driver"] = driver.read_text().splitlines()[0].partition("  Release")[0]
    return machine
