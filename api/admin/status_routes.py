"""How the sidecar is: `GET /v1/status`, and what probes and Prometheus ask."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Response

from .context import AdminHere, RoleHere
from .metrics import CONTENT_TYPE, exposition
from .models import (
    Alive,
    ColdTier,
    DegradedPart,
    HitCounters,
    Ready,
    Role,
    Space,
    Status,
    TierName,
)
from .problems import documented
from .watch import Facts

__all__ = ["ASLEEP", "cold_of", "probes", "router", "tiers_of"]

ASLEEP = frozenset({"asleep", "sleeping", "held", "idle"})
"""Words by which engines say that a session has no place in device memory."""

router = APIRouter(tags=["status"])
probes = APIRouter(tags=["probes"])


@router.get("/status", responses=documented(503))
async def status(admin: AdminHere, role: RoleHere) -> Status:
    """The sidecar as it is."""
    facts = await admin.watch.facts()
    values = facts.value.status
    states = [
        state.lower()
        for client in facts.value.clients.values()
        for state in client.get("report", {}).get("sessions", {}).values()
    ]
    asleep = sum(state in ASLEEP for state in states)
    return Status(
        version=values["version"],
        boot_id=values["boot_id"],
        pid=values["pid"],
        started_at=values["started"],
        uptime_seconds=max(0.0, time.time() - values["started"]),
        draining=values["draining"],
        degraded=_degraded(values),
        tiers=tiers_of(facts.value),
        cold=cold_of(values),
        spaces=[_space(one) for one in values["spaces"]],
        clients=len(facts.value.clients),
        sessions_awake=len(states) - asleep,
        sessions_asleep=asleep,
        hits=_hits(facts.value.stats["host"]),
        role=role or Role.READ,
        age_seconds=facts.age,
    )


@probes.get("/healthz", responses=documented())
async def healthz() -> Alive:
    """Whether the admin process runs."""
    return Alive()


@probes.get("/readyz", responses=documented(503))
async def readyz(admin: AdminHere) -> Ready:
    """Whether the sidecar serves, and which parts of it are degraded."""
    degraded = _degraded((await admin.watch.facts()).value.status)
    return Ready(status="degraded" if degraded else "ready", degraded=degraded)


@probes.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **documented(503)},
)
async def metrics(admin: AdminHere) -> Response:
    """What Prometheus scrapes, in its text format."""
    facts = (await admin.watch.facts()).value
    occupancy = (await admin.watch.occupancy()).value if facts.status["records"] else None
    return Response(exposition(facts, occupancy), media_type=CONTENT_TYPE)


def tiers_of(facts: Facts) -> list[TierName]:
    """The tiers that there are."""
    reported = any("report" in client for client in facts.clients.values())
    return [
        *([TierName.DEVICE] if reported else []),
        TierName.HOST,
        *([TierName.COLD] if "cold" in facts.status else []),
    ]


def cold_of(values: Mapping[str, Any]) -> ColdTier | None:
    """The cold tier that `Status` tells of."""
    cold = values.get("cold")
    return None if cold is None else ColdTier(kind=cold["kind"], url=cold["url"], state=cold["state"])


def _degraded(values: Mapping[str, Any]) -> list[DegradedPart]:
    return [DegradedPart(**one) for one in values["degraded"]]


def _space(values: Mapping[str, Any]) -> Space:
    layout = (
        "id", "tenant", "shard", "num_layers", "num_kv_heads", "head_dim", "block_size", "dtype", "format",
        "planes", "scale_bytes", "block_bytes", "extents",
    )  # fmt: skip
    counts = "resident", "reserved", "leased", "pinned", "evictable", "free", "dirty"
    return Space(
        **{name: values[name] for name in layout},
        **{f"{name}_blocks": values[name] for name in counts},
        window=values["window"] or None,
    )


def _hits(host: dict[str, int]) -> HitCounters:
    return HitCounters(
        host_blocks=host["matched"],
        cold_blocks=host["cold_loaded"],
        missed_blocks=host["missed"],
        saved_tokens=host["matched_tokens"],
    )
