"""`GET /metrics`: what the sidecar counts, as Prometheus names it.

Names and units follow Prometheus' rules (seconds, bytes, ``_total`` for what only grows); every label has few
values: tiers, reasons, and tenants, of which those beyond the first ones are told together.
Source: prometheus.io/docs/practices/naming.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ..service_times import LEAST_BOUND
from .occupancy import Occupancy
from .watch import Facts

__all__ = ["CONTENT_TYPE", "exposition"]

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_MOST_TENANTS: Final = 32
_OTHERS: Final = "*"
"""No tenant's name."""

_Row = tuple[Sequence[str], float]


def exposition(facts: Facts, occupancy: Occupancy | None) -> bytes:
    """The metrics as text.

    Args:
        facts: what the sidecar says of itself.
        occupancy: what fills its memory; None: that is not known.
    """
    registry = CollectorRegistry()
    registry.register(_Collector(facts, occupancy))
    return generate_latest(registry)


class _Collector(Collector):
    """Makes metrics of what was asked just now."""

    def __init__(self, facts: Facts, occupancy: Occupancy | None) -> None:
        self._status = facts.status
        self._host: Mapping[str, int] = facts.stats["host"]
        self._cold: Mapping[str, Any] | None = facts.stats.get("cold")
        self._sidecar: Mapping[str, Any] = facts.stats["sidecar"]
        self._arena: Mapping[str, int] = facts.stats["arena"]
        self._tenants: Mapping[str, Mapping[str, int]] = facts.stats["tenants"]
        self._engines: Mapping[str, int] = facts.stats["engines"]
        self._clients: Sequence[Mapping[str, Any]] = list(facts.clients.values())
        self._latency: Mapping[str, Mapping[str, Any]] = facts.stats["latency"]
        self._occupancy = occupancy

    def collect(self) -> Iterator[Metric]:
        yield from self._process()
        yield from self._took()
        yield from self._found()
        yield from self._spared()
        yield from self._moved()
        yield from self._left()
        yield from self._held()
        yield from self._room()
        yield from self._failed()
        yield from self._owned()

    def _process(self) -> Iterator[Metric]:
        status = self._status
        yield _gauge("build_info", "The sidecar's version.", ["version"], [([status["version"]], 1)])
        yield _gauge(
            "start_time_seconds", "When the sidecar was started, since 1970.", [], [([], status["started"])]
        )
        yield _gauge(
            "degraded",
            "Whether a part does not do all of its work.",
            ["part"],
            [([part], 1) for part in sorted({one["part"] for one in status["degraded"]})],
        )
        yield _gauge("draining", "Whether it takes no new blocks.", [], [([], float(status["draining"]))])
        yield _gauge(
            "clients",
            "Connections.",
            ["transport"],
            [
                (["local"], self._sidecar["clients"] - self._sidecar["remote"]),
                (["tcp"], self._sidecar["remote"]),
            ],
        )
        yield _counter(
            "requests", "Requests of clients, by what became of them.", ["result"],
            [
                (["done"], self._sidecar["requests"] - self._sidecar["failures"]),
                (["failed"], self._sidecar["failures"]),
            ],
        )  # fmt: skip

    def _took(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            "kvpager_request_duration_seconds",
            "How long the sidecar took over requests, by their kind.",
            labels=["request"],
        )
        for kind, times in sorted(self._latency.items()):
            counts = list(accumulate(times["counts"]))
            bounds = [f"{LEAST_BOUND * 2**at / 1e6:g}" for at in range(len(counts) - 1)]
            family.add_metric([kind], list(zip([*bounds, "+Inf"], counts, strict=True)), times["seconds"])
        yield family

    def _found(self) -> Iterator[Metric]:
        host, cold = self._host, self._cold
        hits: list[_Row] = [(["host"], host["matched"])]
        misses: list[_Row] = [(["host", "absent"], host["missed"])]
        if cold is not None:
            hits.append((["cold"], host["cold_loaded"]))
            misses += [
                (["cold", reason], cold[name])
                for name, reason in (
                    ("misses", "absent"),
                    ("corrupt", "corrupt"),
                    ("late", "late"),
                    ("unavailable", "unavailable"),
                )
            ]
        yield _counter("hit_blocks", "Blocks that were asked for and found.", ["tier"], hits)
        yield _counter(
            "missed_blocks", "Blocks that were asked for and not found.", ["tier", "reason"], misses
        )
        yield _counter(
            "saved_tokens",
            "Tokens of blocks that were found, which nobody computed again; each shard counts.",
            [],
            [([], host["matched_tokens"])],
        )

    def _spared(self) -> Iterator[Metric]:
        engines = self._engines
        yield _counter(
            "prompt_tokens_saved",
            "Tokens of prompts that engines found in any tier and did not compute.",
            [],
            [([], engines["saved_tokens"])],
        )
        yield _counter(
            "prompt_seconds_saved",
            "Time that computing these would have taken, as engines reckon it.",
            [],
            [([], engines["saved_milliseconds"] / 1e3)],
        )
        yield _counter(
            "gated_tokens",
            "Tokens that engines computed though the cold tier might have had them: loading them would have "
            "taken longer, or turned out to.",
            ["reason"],
            [(["slower"], engines["gated_tokens"]), (["late"], engines["given_up_tokens"])],
        )

    def _moved(self) -> Iterator[Metric]:
        if self._cold is None:
            return
        ways = ((["host", "cold"], "put"), (["cold", "host"], "get"))
        labels = ["source", "target"]
        yield _counter(
            "moved_bytes",
            "Bytes that moved.",
            labels,
            [(way, self._cold[f"{name}_bytes"]) for way, name in ways],
        )
        yield _counter(
            "moved_blocks",
            "Blocks that moved.",
            labels,
            [(way, self._cold[f"{name}s"]) for way, name in ways],
        )
        yield _counter(
            "moved_seconds",
            "Time that moving took, of all movers together.",
            labels,
            [(way, self._cold[f"{name}_seconds"]) for way, name in ways],
        )

    def _left(self) -> Iterator[Metric]:
        host = self._host
        rows: list[_Row] = [
            (["host", "copied"], host["evicted"] - host["dropped"]),
            (["host", "lost"], host["dropped"]),
            (["host", "purged"], host["purged"]),
        ]
        if self._cold is not None:
            rows.append((["cold", "room"], self._cold["evicted"]))
        yield _counter("evicted_blocks", "Blocks that left a tier.", ["tier", "reason"], rows)
        yield _counter(
            "written_blocks", "Blocks that engines wrote, or that came up.", [], [([], host["committed"])]
        )
        yield _counter(
            "unwanted_blocks",
            "Blocks that the eviction policy did not find worth a place.",
            [],
            [([], host["unwanted"])],
        )

    def _held(self) -> Iterator[Metric]:
        names = "resident", "reserved", "leased", "pinned", "evictable", "dirty", "cleaning"
        yield _gauge(
            "host_blocks",
            "Blocks of host memory, by what holds of them.",
            ["state"],
            [([name], sum(space[name] for space in self._status["spaces"])) for name in names],
        )
        reports = [client["report"] for client in self._clients if "report" in client]
        yield _gauge(
            "device_bytes",
            "Device memory of the engines that report it.",
            ["state"],
            [
                ([label], sum(report[name] * report["block_bytes"] for report in reports))
                for label, name in (("held", "device_held"), ("capacity", "device_blocks"))
            ],
        )
        yield _gauge(
            "sessions",
            "Sessions that engines report.",
            [],
            [([], sum(len(one["sessions"]) for one in reports))],
        )

    def _room(self) -> Iterator[Metric]:
        yield _gauge("host_capacity_bytes", "Host memory.", [], [([], self._arena["capacity_bytes"])])
        spaces = self._status["spaces"]
        used = sum((space["resident"] + space["reserved"]) * space["block_bytes"] for space in spaces)
        yield _gauge("host_used_bytes", "Host memory with blocks in it.", [], [([], used)])
        sizes = self._cold or {}
        yield _gauge(
            "cold_bytes",
            "Bytes of a cold tier on disk.",
            ["state"],
            [([name], sizes[f"{name}_bytes"]) for name in ("used", "capacity") if f"{name}_bytes" in sizes],
        )
        if self._occupancy is not None:
            runs = self._occupancy.free_runs
            yield _gauge(
                "host_largest_free_run_bytes",
                "The longest stretch with no block in it.",
                [],
                [([], runs.largest_bytes)],
            )
            yield _gauge("host_free_runs", "Stretches with no block in them.", [], [([], runs.count)])
            yield _gauge(
                "host_remainder_bytes",
                "Ends of extents that are shorter than a block.",
                [],
                [([], self._occupancy.remainder_bytes)],
            )

    def _failed(self) -> Iterator[Metric]:
        host, cold, sidecar = self._host, self._cold, self._sidecar
        rows: list[_Row] = [
            (["denied"], host["denied"]),
            (["stale"], host["stale"]),
            (["damaged"], host["damaged"]),
            (["connection_refused"], sidecar["refused"]),
            (["protocol"], sidecar["protocol_errors"]),
            (["event_lost"], sidecar["events_lost"]),
        ]
        if cold is not None:
            rows += [([f"cold_{name}"], cold[name]) for name in ("corrupt", "late", "unavailable", "full")]
        yield _counter("errors", "What was not done, by kind.", ["kind"], rows)

    def _owned(self) -> Iterator[Metric]:
        named = sorted(self._tenants, key=lambda one: (not self._tenants[one]["quota"], one))
        told, others = named[:_MOST_TENANTS], named[_MOST_TENANTS:]
        rows: list[_Row] = [([name], self._tenants[name]["bytes"]) for name in told]
        if others:
            rows.append(([_OTHERS], sum(self._tenants[name]["bytes"] for name in others)))
        yield _gauge("tenant_bytes", "Host memory that a tenant's blocks take.", ["tenant"], rows)
        yield _gauge(
            "tenant_quota_bytes",
            "Host memory that a tenant's blocks may take.",
            ["tenant"],
            [([name], self._tenants[name]["quota"]) for name in told if self._tenants[name]["quota"]],
        )


def _counter(name: str, says: str, labels: Sequence[str], rows: Sequence[_Row]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"kvpager_{name}", says, labels=labels)
    for values, count in rows:
        family.add_metric(values, count)
    return family


def _gauge(name: str, says: str, labels: Sequence[str], rows: Sequence[_Row]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"kvpager_{name}", says, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family
