"""What the backend counts: for SGLang's own metrics, and in all."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sglang.srt.observability.metrics_collector import StorageMetrics

__all__ = ["Counts", "Tally"]

_GB: Final = 1e9
_MOST_KEPT: Final = 4096
"""Batches that are remembered until SGLang asks."""


@dataclass(frozen=True)
class Counts:
    """Since the backend was made. A page that was asked for and is not found is missed.

    Attributes:
        found_pages, missed_pages: of lookups.
        loaded_pages, lost_pages: copied into the host pool, and not there when they were to be.
        stored_pages, present_pages, refused_pages: copied to the sidecar, there already, and not kept.
    """

    found_pages: int = 0
    missed_pages: int = 0
    loaded_pages: int = 0
    lost_pages: int = 0
    stored_pages: int = 0
    present_pages: int = 0
    refused_pages: int = 0


class Tally:
    """Counts, from any thread.

    Args:
        for_sglang: whether its metrics are on, so that `take` is called.
    """

    def __init__(self, *, for_sglang: bool) -> None:
        self._counts = Counts()
        self._for_sglang = for_sglang
        self._loads: list[tuple[int, float]] = []
        self._stores: list[tuple[int, float]] = []
        self._lock = threading.Lock()

    @property
    def counts(self) -> Counts:
        """Until now."""
        return self._counts

    def add(self, **more: int) -> None:
        """Count more of these."""
        with self._lock:
            self._add(more)

    def loaded(self, pages: int, lost: int, nbytes: int, seconds: float) -> None:
        """A batch was copied into the host pool."""
        with self._lock:
            self._add({"loaded_pages": pages, "lost_pages": lost})
            self._keep(self._loads, pages, nbytes, seconds)

    def stored(self, pages: int, present: int, refused: int, nbytes: int, seconds: float) -> None:
        """A batch was copied to the sidecar."""
        with self._lock:
            self._add({"stored_pages": pages, "present_pages": present, "refused_pages": refused})
            self._keep(self._stores, pages, nbytes, seconds)

    def take(self) -> StorageMetrics:
        """What SGLang's metrics want since it asked last: pages and GB/s of each batch."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            loads, self._loads = self._loads, []
            stores, self._stores = self._stores, []
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in loads],
            backup_pgs=[pages for pages, _ in stores],
            prefetch_bandwidth=[rate for _, rate in loads],
            backup_bandwidth=[rate for _, rate in stores],
        )

    def _add(self, more: dict[str, int]) -> None:
        self._counts = replace(
            self._counts,
            **{
                field.name: getattr(self._counts, field.name) + more[field.name]
                for field in fields(Counts)
                if field.name in more
            },
        )

    def _keep(self, batches: list[tuple[int, float]], pages: int, nbytes: int, seconds: float) -> None:
        if self._for_sglang and pages and len(batches) < _MOST_KEPT:
            batches.append((pages, nbytes / _GB / max(seconds, 1e-9)))
