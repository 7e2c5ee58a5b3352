"""What can be changed while the sidecar runs."""

from __future__ import annotations

import hashlib
from typing import Annotated, Final

from fastapi import APIRouter, Header, Response

from ...kvstore.policy import POLICIES
from .context import Admin, AdminHere
from .models import Config, Policy
from .problems import documented

__all__ = ["router"]

router = APIRouter(tags=["settings"])

_ETAG: Final = {"ETag": {"description": "names the settings as they are", "schema": {"type": "string"}}}
_IfNoneMatch = Annotated[str | None, Header(description="an ETag: 304 where the settings are still these")]


@router.get("/policy", responses=documented(503))
async def policy(admin: AdminHere) -> Policy:
    """How blocks are ranked for eviction."""
    return Policy(policy=(await _config(admin)).policy, policies=sorted(POLICIES))


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
    tag = etag_of(now)
    if if_none_match is not None and tag in [one.strip() for one in if_none_match.split(",")]:
        return Response(status_code=304, headers={"ETag": tag})
    response.headers["ETag"] = tag
    return now


def etag_of(config: Config) -> str:
    """Names these settings."""
    return f'"{hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:32]}"'


async def _config(admin: Admin) -> Config:
    return Config(**(await admin.watch.facts()).value.status["config"])
