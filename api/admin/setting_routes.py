"""What can be changed while the sidecar runs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import APIRouter, Header, Response
from starlette.exceptions import HTTPException

from ...kvstore.policy import known_weights, policy_names
from ...tiers.errors import ConfigError
from .context import Admin, AdminHere
from .models import (
    ColdAttach,
    ColdChange,
    ColdDetach,
    Config,
    ConfigChange,
    ConfigChanged,
    DrainChange,
    Drained,
    Policy,
    PolicyChange,
    PolicyWeight,
)
from .problems import documented
from .status_routes import cold_of

__all__ = ["router"]

router = APIRouter(tags=["settings"])

_ETAG: Final = {"ETag": {"description": "names the settings as they are", "schema": {"type": "string"}}}
_IfMatch = Annotated[str | None, Header(description="an ETag: 412 where the settings are others by now")]
_IfNoneMatch = Annotated[str | None, Header(description="an ETag: 304 where the settings are still these")]


@router.get("/policy", responses=documented(503))
async def policy(admin: AdminHere) -> Policy:
    """How blocks are ranked for eviction, and by which numbers."""
    config = await _config(admin)
    weights = {
        name: PolicyWeight(value=config.policy_weights.get(name, weight.usual), **asdict(weight))
        for name, weight in known_weights(config.policy).items()
    }
    return Policy(policy=config.policy, weights=weights, policies=policy_names())


@router.get(
    "/config",
    responses={200: {"headers": _ETAG}, 304: {"description": "they are still these"}, **documented(503)},
    response_model=Config,
)
async def config(
    admin: AdminHere, response: Response, if_none_match: _IfNoneMatch = None
) -> Config | Response:
    """What can be changed while the sidecar runs, as it is."""
    now = await _config(admin)
    tag = _etag_of(now)
    if _matches(if_none_match, tag):
        return Response(status_code=304, headers={"ETag": tag})
    response.headers["ETag"] = tag
    return now


@router.put("/policy", responses=documented(401, 403, 413, 422, 503))
async def set_policy(asked: PolicyChange, admin: AdminHere) -> ConfigChanged:
    """Rank blocks by another policy from now on."""
    return await _configure(admin, {"policy": asked.policy})


@router.patch("/config", responses={200: {"headers": _ETAG}, **documented(401, 403, 409, 412, 413, 422, 503)})
async def set_config(
    asked: ConfigChange, admin: AdminHere, response: Response, if_match: _IfMatch = None
) -> ConfigChanged:
    """Set something otherwise, all of it at once or nothing. It does not outlive the sidecar.

    422 where `policy_weights` are not those of the policy that is asked for, or out of its bounds, or no
    policy's; 409 where no policy is asked for, and they are those of another one than is in force.
    """
    async with admin.configuring:
        if if_match is not None:
            admin.watch.changed()
            if not _matches(if_match, _etag_of(await _config(admin))):
                raise HTTPException(HTTPStatus.PRECONDITION_FAILED, "the settings are others by now")
        try:
            changed = await _configure(admin, asked.model_dump(exclude_none=True))
        except ConfigError as error:
            if not error.setting.startswith("policy_weights"):
                raise
            # Some policy takes them: it depends on how things are.
            raise HTTPException(HTTPStatus.CONFLICT, str(error)) from error
    response.headers["ETag"] = _etag_of(changed.config)
    return changed


@router.post("/tiers/cold/attach", responses=documented(401, 403, 409, 413, 422, 503))
async def attach(asked: ColdAttach, admin: AdminHere) -> ColdChange:
    """Have a cold tier, where there is none. The sidecar's own secret seals what goes there."""
    if cold_of((await admin.watch.facts()).value.status) is not None:
        raise HTTPException(HTTPStatus.CONFLICT, "there is a cold tier: detach it first")
    await admin.connection.attach_cold(asked.url, capacity_bytes=asked.capacity_bytes)
    return await _cold_change(admin)


@router.post("/tiers/cold/detach", responses=documented(401, 403, 409, 413, 422, 503))
async def detach(asked: ColdDetach, admin: AdminHere) -> ColdChange:
    """Write to the cold tier what it lacks, as far as there is time, and be without it."""
    await admin.refuse_without_cold()
    await admin.connection.detach_cold(asked.deadline_seconds)
    return await _cold_change(admin)


@router.post("/drain", responses=documented(401, 403, 413, 422, 503))
async def drain(asked: DrainChange, admin: AdminHere) -> Drained:
    """Take nothing new and write to the cold tier what it lacks; or take blocks again."""
    left = await admin.connection.drain(asked.on, deadline=asked.deadline_seconds)
    admin.watch.changed()
    return Drained(draining=asked.on, dirty_blocks=left)


async def _config(admin: Admin) -> Config:
    return Config(**(await admin.watch.facts()).value.status["config"])


async def _configure(admin: Admin, values: Mapping[str, Any]) -> ConfigChanged:
    changed = await admin.connection.configure(**values)
    admin.watch.changed()
    return ConfigChanged(
        changed={name: (before, after) for name, (before, after) in changed.items()},
        config=await _config(admin),
    )


async def _cold_change(admin: Admin) -> ColdChange:
    admin.watch.changed()
    status = (await admin.watch.facts()).value.status
    return ColdChange(cold=cold_of(status), dirty_blocks=sum(space["dirty"] for space in status["spaces"]))


def _etag_of(config: Config) -> str:
    """Names these settings."""
    return f'"{hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:32]}"'


def _matches(tags: str | None, tag: str) -> bool:
    """Whether a header's list of tags has this one."""
    return tags is not None and any(one.strip() in (tag, "*") for one in tags.split(","))
