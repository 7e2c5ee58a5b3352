"""Calibrations: what `kvpager bench --calibrate` measured of a machine's links, and of models on it.

One JSON file, ``kvpager/calibration.json`` in ``$XDG_CACHE_HOME`` or ``~/.cache`` unless another is named.
What it says counts on the machine that it was measured on alone, a link's cost for the device that it leads
to, and a model's for the model of that identity: of others it is as if nothing was measured.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from ..tiers.errors import ConfigError, KVPagerError
from .cost import ComputeCost, CostModel, LinkCost

__all__ = [
    "CALIBRATION_VARIABLE",
    "Calibration",
    "DeviceCosts",
    "ModelCost",
    "calibration_path",
    "expect_writable",
    "known_calibration",
    "put_in_place",
    "read_calibration",
]

_log = logging.getLogger(__name__)

CALIBRATION_VARIABLE: Final = "KVPAGER_CALIBRATION"
"""The environment variable that names the file where no setting does."""
_FORMAT: Final = 1
_NAME: Final = Path("kvpager", "calibration.json")
_FREE: Final = LinkCost(0.0, 0.0)


def calibration_path(environment: Mapping[str, str], path: str | Path | None = None) -> Path:
    """Where calibrations are kept: `path`, else what ``$KVPAGER_CALIBRATION`` names, else in the cache."""
    named = path or environment.get(CALIBRATION_VARIABLE)
    if named:
        return Path(named)
    folders = environment.get("XDG_CACHE_HOME", ""), f"{environment.get('HOME', '')}/.cache"
    return Path(next((folder for folder in folders if folder.startswith("/")), "/"), _NAME)


@dataclass(frozen=True)
class ModelCost:
    """What prefilling with one model takes.

    Args:
        name: as it was asked for.
        compute: what it takes.
        errors: the standard error of each of its figures; None: not known.
    """

    name: str
    compute: ComputeCost
    errors: ComputeCost | None = None


@dataclass(frozen=True)
class DeviceCosts:
    """What was measured of one device.

    Args:
        in_place: a step on it reading host memory where it lies; None: not measured.
        copy: from host memory to it; None likewise.
        models: prefilling on it, by the model's identity in hex (`LoadedModel.identity`).
    """

    in_place: LinkCost | None = None
    copy: LinkCost | None = None
    models: Mapping[str, ModelCost] = field(default_factory=dict)

    def with_earlier(self, earlier: DeviceCosts) -> DeviceCosts:
        """This, and what was measured before of what was not measured now."""
        return DeviceCosts(
            self.in_place or earlier.in_place, self.copy or earlier.copy, {**earlier.models, **self.models}
        )


@dataclass(frozen=True)
class Calibration:
    """What was measured of one machine.

    Args:
        machine: its name (`platform.node`).
        at: when, seconds since 1970.
        cold: loads from a cold tier to host memory, by its kind (``redis``, ``disk``).
        devices: of each device, by its name: ``cpu``, or as a GPU calls itself.
    """

    machine: str
    at: float
    cold: Mapping[str, LinkCost] = field(default_factory=dict)
    devices: Mapping[str, DeviceCosts] = field(default_factory=dict)

    def cost_model(
        self, block_size: int, block_bytes: int, *, device: str, identity: bytes, cold: str | None
    ) -> CostModel:
        """The cost model of one model's blocks.

        Args:
            block_size: tokens of a block.
            block_bytes: bytes of a block.
            device: the name of the device that the model runs on.
            identity: the model's.
            cold: the kind of the cold tier, or None.
        """
        costs = self.devices.get(device, DeviceCosts())
        model = costs.models.get(identity.hex())
        return CostModel(
            block_size,
            block_bytes,
            None if model is None else model.compute,
            costs.in_place or costs.copy or _FREE,
            costs.copy or costs.in_place or _FREE,
            None if cold is None else self.cold.get(cold),
        )

    def with_earlier(self, earlier: Calibration | None) -> Calibration:
        """This, and what an earlier one of the same machine has beyond it."""
        if earlier is None or earlier.machine != self.machine:
            return self
        devices = dict(earlier.devices)
        for name, costs in self.devices.items():
            devices[name] = costs.with_earlier(devices.get(name, DeviceCosts()))
        return Calibration(self.machine, self.at, {**earlier.cold, **self.cold}, devices)

    def as_json(self) -> str:
        """As it is kept."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=2)

    def write(self, path: Path) -> None:
        """Keep it in place of what is there.

        Raises:
            KVPagerError: it cannot be written.
        """
        put_in_place(path, self.as_json())


def put_in_place(path: Path, text: str) -> None:
    """Keep a text in place of what a file has, whole or not at all.

    Raises:
        KVPagerError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            try:
                file.write(text)
                file.flush()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise KVPagerError(f"{path} cannot be written: {error.strerror}") from error


def expect_writable(path: Path) -> None:
    """See that a calibration can be kept there, before the time is spent that measuring takes.

    Raises:
        KVPagerError: it cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name):
            pass
    except OSError as error:
        raise KVPagerError(f"{path} cannot be written: {error.strerror}") from error


def read_calibration(path: Path) -> Calibration | None:
    """The calibration in a file; None where there is none, none of this format, or one of another machine.

    Raises:
        ConfigError: the file cannot be read, or is no such thing.
    """
    try:
        value: dict[str, Any] = json.loads(path.read_text())
        if value.pop("format") != _FORMAT:
            return None
        value["cold"] = {kind: LinkCost(**one) for kind, one in value["cold"].items()}
        value["devices"] = {name: _device_costs(one) for name, one in value["devices"].items()}
        found = Calibration(**value)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ConfigError) as error:
        raise ConfigError(
            "calibration", f"{path} holds none that can be read: kvpager bench --calibrate writes it anew"
        ) from error
    return found if found.machine == platform.node() else None


def known_calibration() -> Calibration | None:
    """The calibration of this machine in the usual place; None where none is that can be read."""
    try:
        return read_calibration(calibration_path(os.environ))
    except ConfigError as error:
        _log.warning("costs are measured anew: %s", error)
        return None


def _device_costs(value: Mapping[str, Any]) -> DeviceCosts:
    in_place, copy = (None if value[one] is None else LinkCost(**value[one]) for one in ("in_place", "copy"))
    models = {
        identity: ModelCost(
            str(one["name"]),
            ComputeCost(**one["compute"]),
            None if one.get("errors") is None else ComputeCost(**one["errors"]),
        )
        for identity, one in value["models"].items()
    }
    return DeviceCosts(in_place, copy, models)
