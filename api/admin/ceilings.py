"""What this machine reaches at best between tiers, as `kvpager bench` measured it last."""

from __future__ import annotations

import logging
import platform
from pathlib import Path
from typing import Final

from ...tiers.errors import ConfigError
from ..measurements import Measurements, kept
from .models import TierName

__all__ = ["Ceilings"]

_log: Final = logging.getLogger(__name__)
_NAMES: Final = {
    (TierName.DEVICE, TierName.HOST): "device_to_host",
    (TierName.HOST, TierName.DEVICE): "host_to_device",
}
_COLD_NAMES: Final = {
    (TierName.HOST, TierName.COLD): "plain_put",
    (TierName.COLD, TierName.HOST): "plain_get",
}


class Ceilings:
    """Reads the measurements again when they are others.

    Args:
        path: where `kvpager bench` keeps them; there need be none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_at: int | None = None
        self._measurements: Measurements | None = None

    def between(self, source: TierName, target: TierName, cold_kind: str | None) -> float | None:
        """Bytes a second that may be reached at best; None: not measured on this machine.

        Args:
            cold_kind: of the cold tier: ``disk``, ``redis``; None without one.
        """
        self._refresh()
        name = _NAMES.get((source, target))
        if name is None and cold_kind is not None and (source, target) in _COLD_NAMES:
            name = f"{cold_kind}_{_COLD_NAMES[source, target]}"
        if name is None or self._measurements is None:
            return None
        return self._measurements.value(name)

    def _refresh(self) -> None:
        try:
            written = self._path.stat().st_mtime_ns
        except OSError:
            self._read_at = self._measurements = None
            return
        if written == self._read_at:
            return
        self._read_at, self._measurements = written, None
        try:
            found = kept(self._path)
        except ConfigError as error:
            _log.warning("bandwidth is told without ceilings: %s", error)
            return
        # A home may be several machines' own.
        if found is not None and found.host == platform.node():
            self._measurements = found
