"""What `kvpager bench` measured on this machine, and where the last measurements are kept.

The file is ``kvpager/bench.json`` in ``$XDG_STATE_HOME`` or ``~/.local/state``. `kvpager size` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from ..kvstore.calibration import put_in_place
from ..tiers.errors import ConfigError

__all__ = ["Measurement", "Measurements", "Unit", "keep", "kept", "measurements_path"]

_FORMAT: Final = 1
_NAME: Final = Path("kvpager", "bench.json")


class Unit(StrEnum):
    """What a figure counts."""

    BYTES_PER_SECOND = "B/s"
    SECONDS = "s"


@dataclass(frozen=True)
class Measurement:
    """One figure.

    Args:
        name: what it is called in JSON, ``host_to_device``.
        words: what was done.
        value: the median.
        unit: of the value.
        ceiling: the measurement that this one could equal at best, by name; None: it is one itself.
    """

    name: str
    words: str
    value: float
    unit: Unit
    ceiling: str | None = None


@dataclass(frozen=True)
class Measurements:
    """All figures of one run.

    Args:
        host: the machine's name.
        at: when, in seconds since 1970.
        version: of kvpager.
        found: the figures.
        missing: of what was not measured, why not.
    """

    host: str
    at: float
    version: str
    found: tuple[Measurement, ...]
    missing: Mapping[str, str]

    def value(self, name: str) -> float | None:
        """The figure of this name; None where it was not measured."""
        return next((one.value for one in self.found if one.name == name), None)

    def reached(self, one: Measurement) -> float | None:
        """The share of its ceiling that a figure comes to; None where it has none."""
        ceiling = None if one.ceiling is None else self.value(one.ceiling)
        if not ceiling or not one.value:
            return None
        return one.value / ceiling if one.unit is Unit.BYTES_PER_SECOND else ceiling / one.value

    def as_json(self) -> str:
        """As it is printed and kept."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=2)


def measurements_path(environment: Mapping[str, str]) -> Path:
    """Where measurements are kept.

    Args:
        environment: variables.
    """
    folders = [environment.get("XDG_STATE_HOME", ""), f"{environment.get('HOME', '')}/.local/state"]
    return Path(next((folder for folder in folders if folder.startswith("/")), "/"), _NAME)


def keep(measurements: Measurements, path: Path) -> None:
    """Keep measurements in place of the last ones.

    Raises:
        KVPagerError: they cannot be written.
    """
    put_in_place(path, measurements.as_json())


def kept(path: Path) -> Measurements | None:
    """The last measurements; None where there are none, or none of this format.

    Raises:
        ConfigError: the file cannot be read, or is no such thing.
    """
    try:
        value: dict[str, Any] = json.loads(path.read_text())
        if value.pop("format") != _FORMAT:
            return None
        found = tuple(Measurement(**{**one, "unit": Unit(one["unit"])}) for one in value.pop("found"))
        return Measurements(**value, found=found)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            str(path), "holds no measurements that can be read: kvpager bench writes them anew"
        ) from error
