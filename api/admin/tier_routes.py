"""How full the tiers are, with what, and what moves between them: `GET /v1/tiers`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Query
from starlette.exceptions import HTTPException

from .context import Admin, AdminHere
from .models import (
    MOST_CELLS,
    Flow,
    Listed,
    MapCells,
    MapSpace,
    SpaceShare,
    TenantShare,
    Tier,
    TierDetail,
    TierMap,
    TierName,
)
from .occupancy import KINDS, MapSums
from .problems import documented
from .status_routes import tiers_of
from .watch import Facts

__all__ = ["router"]

router = APIRouter(tags=["tiers"])
_DIGITS = 4
"""Of a share."""


@router.get("/tiers", responses=documented(503))
async def tiers(admin: AdminHere) -> Listed[Tier]:
    """How full each tier is."""
    facts = (await admin.watch.facts()).value
    return Listed[Tier](items=[_tier(name, facts) for name in tiers_of(facts)])


@router.get("/tiers/{tier}", responses=documented(404, 422, 503))
async def tier(tier: TierName, admin: AdminHere) -> TierDetail:
    """A tier, who fills it, and what moves to and from it."""
    facts = await admin.watch.facts()
    _refuse_absent(tier, facts.value)
    values = _tier(tier, facts.value).model_dump()
    flows = [flow for flow in _flows(admin, facts.value) if tier in (flow.source, flow.target)]
    if tier is not TierName.HOST:
        return TierDetail(
            **values,
            tenants=None,
            spaces=None,
            flows=flows,
            queue_blocks=None,
            largest_free_run_bytes=None,
            remainder_bytes=None,
            last_blocks_bytes=_in_last_blocks(facts.value) if tier is TierName.DEVICE else None,
            age_seconds=facts.age,
        )
    recorded = bool(facts.value.status["records"])
    occupancy = (await admin.watch.occupancy()).value if recorded else None
    spaces = facts.value.status["spaces"]
    return TierDetail(
        **values,
        tenants=_tenants(facts.value),
        spaces=[_space_share(space) for space in spaces],
        flows=flows,
        queue_blocks=sum(space["cleaning"] for space in spaces),
        largest_free_run_bytes=None if occupancy is None else occupancy.free_runs.largest_bytes,
        remainder_bytes=None if occupancy is None else occupancy.remainder_bytes,
        last_blocks_bytes=None,
        age_seconds=facts.age,
    )


@router.get("/tiers/{tier}/map", responses=documented(404, 409, 422, 503))
async def tier_map(
    tier: TierName,
    admin: AdminHere,
    cells: Annotated[int, Query(ge=1, le=MOST_CELLS, description="how many at most")] = 1024,
) -> TierMap:
    """What lies where in host memory, from its first byte to its last."""
    if tier is not TierName.HOST:
        raise HTTPException(
            HTTPStatus.NOT_FOUND, f"the {tier} tier has no map: its blocks have no places here"
        )
    facts = (await admin.watch.facts()).value
    seen = await admin.watch.occupancy()
    occupancy = seen.value
    sums = occupancy.sums.coarser(cells)
    return TierMap(
        tier=tier,
        capacity_bytes=occupancy.capacity_bytes,
        cell_bytes=sums.part_bytes,
        count=sums.kinds.shape[1],
        extents=occupancy.capacity_bytes // occupancy.extent_bytes,
        spaces=[
            MapSpace(space=space.id.hex(), tenant=space.tenant, shard=space.shard)
            for space in occupancy.spaces
        ],
        cells=_cells(sums, occupancy.capacity_bytes, facts),
        free_bytes=occupancy.capacity_bytes
        - sum(
            totals.held * space.layout.block_bytes
            for space, totals in zip(occupancy.spaces, occupancy.totals, strict=True)
        ),
        largest_free_run_bytes=occupancy.free_runs.largest_bytes,
        free_runs=occupancy.free_runs.count,
        remainder_bytes=occupancy.remainder_bytes,
        age_seconds=seen.age,
    )


def _cells(sums: MapSums, capacity: int, facts: Facts) -> MapCells:
    count = sums.kinds.shape[1]
    sizes = np.full(count, float(sums.part_bytes))
    if count:
        sizes[-1] = capacity - sums.part_bytes * (count - 1)
    held = sums.kinds[1:].sum(axis=0)
    # Reserved slots have no use yet.
    used = held - sums.kinds[KINDS.index("reserved")]
    ages = np.where(used > 0, facts.ages(sums.used_at / np.maximum(used, 1)), np.nan)
    shares = {name: _shares(sums.kinds[at] / sizes) for at, name in enumerate(KINDS)}
    vacant = 1 - sums.kinds.sum(axis=0) / sizes
    owner = sums.owners.argmax(axis=0) if len(sums.owners) else np.zeros(count, np.int64)
    return MapCells(
        vacant=_shares(vacant),
        **shares,
        dirty=_shares(sums.dirty / sizes),
        age_seconds=[None if math.isnan(age) else round(age, 1) for age in ages.tolist()],
        space=[at if some > 0 else None for at, some in zip(owner.tolist(), held.tolist(), strict=True)],
    )


def _shares(values: npt.NDArray[np.float64]) -> list[float]:
    shares: list[float] = values.clip(0, 1).round(_DIGITS).tolist()
    return shares


def _refuse_absent(tier: TierName, facts: Facts) -> None:
    if tier in tiers_of(facts):
        return
    absent = {
        TierName.DEVICE: "no engine that is connected has reported its device memory",
        TierName.COLD: "there is no cold tier",
    }
    raise HTTPException(HTTPStatus.NOT_FOUND, absent[tier])


def _tier(tier: TierName, facts: Facts) -> Tier:
    if tier is TierName.HOST:
        return _host(facts)
    if tier is TierName.DEVICE:
        return _device(facts)
    return _cold(facts)


def _host(facts: Facts) -> Tier:
    spaces = facts.status["spaces"]

    def total(name: str) -> int:
        return sum(space[name] * space["block_bytes"] for space in spaces)

    capacity = facts.stats["arena"]["capacity_bytes"]
    used = total("resident") + total("reserved")
    return Tier(
        tier=TierName.HOST,
        state="ready",
        reason=None,
        capacity_bytes=capacity,
        used_bytes=used,
        free_bytes=max(0, capacity - used),
        idle_bytes=total("evictable"),
        leased_bytes=total("leased"),
        pinned_bytes=sum(_only_pinned(space) * space["block_bytes"] for space in spaces),
        reserved_bytes=total("reserved"),
        dirty_bytes=total("dirty"),
        blocks=sum(space["resident"] for space in spaces),
    )


def _device(facts: Facts) -> Tier:
    reports = _reports(facts)
    capacity = sum(report["device_blocks"] * report["block_bytes"] for report in reports)
    held = sum(report["device_held"] * report["block_bytes"] for report in reports)
    return Tier(
        tier=TierName.DEVICE,
        state="ready",
        reason=None,
        capacity_bytes=capacity,
        used_bytes=held,
        free_bytes=max(0, capacity - held),
        idle_bytes=None,
        leased_bytes=held,
        pinned_bytes=None,
        reserved_bytes=None,
        dirty_bytes=None,
        blocks=sum(report["device_held"] for report in reports),
    )


def _cold(facts: Facts) -> Tier:
    sizes = facts.stats.get("cold", {})
    capacity, used = sizes.get("capacity_bytes"), sizes.get("used_bytes")
    reason = next((one["reason"] for one in facts.status["degraded"] if one["part"] == "cold"), None)
    return Tier(
        tier=TierName.COLD,
        state="ready" if reason is None else "degraded",
        reason=reason,
        capacity_bytes=capacity,
        used_bytes=used,
        free_bytes=None if capacity is None or used is None else max(0, capacity - used),
        idle_bytes=None,
        leased_bytes=None,
        pinned_bytes=None,
        reserved_bytes=None,
        dirty_bytes=None,
        blocks=None,
    )


def _only_pinned(space: Mapping[str, Any]) -> int:
    """Blocks of a space that are kept by pins alone."""
    return max(0, int(space["resident"] - space["evictable"] - space["leased"]))


def _space_share(space: Mapping[str, Any]) -> SpaceShare:
    size = space["block_bytes"]
    return SpaceShare(
        space=space["id"],
        tenant=space["tenant"],
        shard=space["shard"],
        blocks=space["resident"],
        used_bytes=(space["resident"] + space["reserved"]) * size,
        leased_bytes=space["leased"] * size,
        pinned_bytes=_only_pinned(space) * size,
        free_bytes=space["free"] * size,
    )


def _tenants(facts: Facts) -> list[TenantShare]:
    shares = [_space_share(space) for space in facts.status["spaces"]]

    def total(tenant: str, name: str) -> int:
        return sum(getattr(share, name) for share in shares if share.tenant == tenant)

    return [
        TenantShare(
            tenant=tenant,
            blocks=values["blocks"],
            used_bytes=values["bytes"],
            leased_bytes=total(tenant, "leased_bytes"),
            pinned_bytes=total(tenant, "pinned_bytes"),
            quota_bytes=values["quota"] or None,
        )
        for tenant, values in sorted(facts.stats["tenants"].items())
    ]


def _flows(admin: Admin, facts: Facts) -> list[Flow]:
    flows: list[Flow] = []
    reports = _reports(facts)
    if reports:
        for source, target, name in (
            (TierName.DEVICE, TierName.HOST, "from_device"),
            (TierName.HOST, TierName.DEVICE, "to_device"),
        ):
            rate = sum(report[name] for report in reports)
            flows.append(
                Flow(
                    source=source,
                    target=target,
                    moved_bytes=None,
                    busy_seconds=None,
                    bytes_per_second=rate or None,
                    best_bytes_per_second=None,
                    ceiling_bytes_per_second=admin.ceilings.between(source, target, None),
                )
            )
    cold = facts.stats.get("cold")
    if cold is not None:
        kind = facts.status.get("cold", {}).get("kind")
        for source, target, name in (
            (TierName.HOST, TierName.COLD, "put"),
            (TierName.COLD, TierName.HOST, "get"),
        ):
            rates = admin.watch.rate(f"{name}_bytes")
            flows.append(
                Flow(
                    source=source,
                    target=target,
                    moved_bytes=cold[f"{name}_bytes"],
                    busy_seconds=cold[f"{name}_seconds"],
                    bytes_per_second=rates.lately,
                    best_bytes_per_second=rates.best,
                    ceiling_bytes_per_second=admin.ceilings.between(source, target, kind),
                )
            )
    return flows


def _reports(facts: Facts) -> Sequence[Mapping[str, Any]]:
    return [client["report"] for client in facts.clients.values() if "report" in client]


def _in_last_blocks(facts: Facts) -> int:
    """Bytes that are lost at most in blocks that are not full: less than one block a session."""
    return sum(len(report["sessions"]) * report["block_bytes"] for report in _reports(facts))
