"""What `kvpager doctor` says of GPUs: the driver, PCIe, and which NUMA node is near. Without torch.

Sources: the kernel's ABI/testing/sysfs-bus-pci and sysfs-devices-system-node; PCI Express base specification
(rates of the generations).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from ..tiers.driver import DriverDevice
from .findings import Finding, ok, problem, warning

__all__ = ["check_driver", "check_gpu", "check_numa"]

_SYS: Final = Path("/sys")
_NVIDIA: Final = "0x10de"
_DISPLAY: Final = "0x03"
"""What the class of a GPU begins with."""
_GENERATIONS: Final = {
    "2.5": 1,
    "5": 2,
    "5.0": 2,
    "8": 3,
    "8.0": 3,
    "16": 4,
    "16.0": 4,
    "32": 5,
    "32.0": 5,
    "64": 6,
    "64.0": 6,
}


def check_driver(reason: str | None, devices: Sequence[DriverDevice], *, sys: Path = _SYS) -> Finding:
    """Whether the CUDA driver answers.

    Args:
        reason: why it does not (`why_no_driver`), or None.
        devices: what it finds (`driver_devices`).
        sys: where sysfs is mounted.
    """
    if reason is None and devices:
        return ok("CUDA driver", f"answers, with {len(devices)} device{'s'[: len(devices) > 1]}")
    there = _nvidia_devices(sys)
    if not there:
        return ok(
            "CUDA driver",
            f"{reason or 'no device'}, and no NVIDIA GPU is to be seen: everything runs on the CPU",
        )
    return problem(
        "CUDA driver",
        f"{reason or 'no device'}, but there is an NVIDIA GPU at {', '.join(there)}",
        "install the driver (nvidia-smi must work); in a container docker run --gpus all, or a limit of "
        "nvidia.com/gpu; see that CUDA_VISIBLE_DEVICES hides none",
    )


def check_gpu(ordinal: int, device: DriverDevice, *, sys: Path = _SYS) -> Finding:
    """The name of a GPU, and its link: blocks in host memory are read over it.

    Args:
        ordinal: the N of its ``cuda:N``.
        device: as the driver tells it.
        sys: where sysfs is mounted.
    """
    name = f"cuda:{ordinal}"
    folder = sys / "bus" / "pci" / "devices" / device.bus_id
    now, most = _link(folder, "current"), _link(folder, "max")
    if not device.bus_id or now is None or most is None:
        place = f" at {device.bus_id}" if device.bus_id else ""
        return ok(name, f"{device.name}{place}; its PCIe link cannot be known here")
    found = f"{device.name} at {device.bus_id}, PCIe {_words(now)} now, {_words(most)} at most"
    if now[1] < most[1]:
        return warning(
            name,
            found,
            "fewer lanes than it has: another slot, or a riser, BIOS setting or switch that takes lanes away",
        )
    if now[0] < most[0]:
        return ok(name, f"{found} (an idle link slows down; look again under load)")
    return ok(name, found)


def check_numa(
    devices: Sequence[DriverDevice], *, cpus: Collection[int] | None = None, sys: Path = _SYS
) -> Finding:
    """The NUMA nodes, and whether this process may run near its GPUs.

    Args:
        devices: as the driver tells them.
        cpus: those that this process may run on; None: as the kernel says.
        sys: where sysfs is mounted.
    """
    cpus = os.sched_getaffinity(0) if cpus is None else cpus
    nodes = {
        int(path.name.removeprefix("node")): _cpu_list(path)
        for path in (sys / "devices" / "system" / "node").glob("node[0-9]*")
    }
    if not nodes:
        return ok("NUMA", "the nodes cannot be known here")
    if len(nodes) == 1:
        return ok("NUMA", "one node")
    near = {ordinal: _node_of(device, sys) for ordinal, device in enumerate(devices)}
    places = [
        f"cuda:{ordinal} near {'an unknown node' if node is None else f'node {node}'}"
        for ordinal, node in near.items()
    ]
    found = f"{len(nodes)} nodes" + "".join(f", {place}" for place in places)
    known = sorted({node for node in near.values() if node is not None})
    far = [node for node in known if not nodes.get(node, set()) & set(cpus)]
    if far:
        return warning(
            "NUMA",
            f"{found}; this process may not run on node {', '.join(map(str, far))}",
            f"numactl --cpunodebind={far[0]} --membind={far[0]} kvpager serve ..., and the engine likewise",
        )
    if known:
        listed = ",".join(map(str, known))
        return ok(
            "NUMA",
            found,
            f"numactl --preferred={listed} keeps a sidecar's memory near" if len(known) == 1 else "",
        )
    return ok("NUMA", found)


def _nvidia_devices(sys: Path) -> list[str]:
    """Addresses of NVIDIA's GPUs on the PCI bus."""
    return sorted(
        folder.name
        for folder in (sys / "bus" / "pci" / "devices").glob("*")
        if _read(folder / "vendor") == _NVIDIA and (_read(folder / "class") or "").startswith(_DISPLAY)
    )


def _link(folder: Path, which: str) -> tuple[int, int] | None:
    """(generation, lanes) of a device's link; None where sysfs does not say."""
    speed, width = _read(folder / f"{which}_link_speed"), _read(folder / f"{which}_link_width")
    generation = _GENERATIONS.get((speed or "").split(" ")[0])
    if generation is None or width is None or not width.isdecimal() or not int(width):
        return None
    return generation, int(width)


def _words(link: tuple[int, int]) -> str:
    return f"{link[0]}.0 x{link[1]}"


def _node_of(device: DriverDevice, sys: Path) -> int | None:
    text = _read(sys / "bus" / "pci" / "devices" / device.bus_id / "numa_node") if device.bus_id else None
    return int(text) if text is not None and text.isdecimal() else None  # -1: the firmware does not say


def _cpu_list(node: Path) -> set[int]:
    """The CPUs of a node: ``0-3,8`` are five."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", _read(node / "cpulist") or ""):
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
