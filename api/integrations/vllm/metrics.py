"""What the connector counts, as vLLM's log and its Prometheus endpoint show it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["COUNTERS", "ConnectorPromMetrics", "ConnectorStats"]

COUNTERS: Final = {
    "hit_requests": "Requests of which the sidecar had something",
    "hit_tokens_host": "Tokens that were found in host memory",
    "hit_tokens_cold": "Tokens that came up from the cold tier",
    "late_lookups": "Requests that were computed because the sidecar did not answer in time",
    "loaded_blocks": "Blocks copied from host memory",
    "loaded_bytes": "Bytes copied from host memory",
    "load_seconds": "Seconds that loads took",
    "failed_blocks": "Blocks that were to be loaded and are computed",
    "stored_blocks": "Blocks copied to host memory",
    "stored_bytes": "Bytes copied to host memory",
    "store_seconds": "Seconds that stores took",
    "present_blocks": "Blocks that were not copied since the sidecar has them",
    "refused_blocks": "Blocks that were not kept: no room, or no answer",
}
"""What each counter says."""


@dataclass
class ConnectorStats(KVConnectorStats):
    """Counts of an interval, by the names of `COUNTERS`."""

    data: dict[str, float] = field(default_factory=dict)

    def add(self, **counts: float) -> None:
        """Count more of these."""
        for name, count in counts.items():
            if count:
                self.data[name] = self.data.get(name, 0) + count

    def reset(self) -> None:
        """Count from zero."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """With what another counted, too."""
        self.add(**other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For one line of a log."""
        return {name: round(self.data[name], 6) for name in COUNTERS if name in self.data}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class ConnectorPromMetrics(KVConnectorPromMetrics):
    """The counters as ``vllm:kvpager_<name>``, for each engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[tuple[str, int], Any] = {}
        for name, text in COUNTERS.items():
            counter = metric_types[Counter](
                name=f"vllm:kvpager_{name}", documentation=f"{text}.", labelnames=labelnames
            )
            for engine, values in per_engine_labelvalues.items():
                self._counters[name, engine] = counter.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's counts."""
        for name, count in transfer_stats_data.items():
            self._counters[name, engine_idx].inc(count)
