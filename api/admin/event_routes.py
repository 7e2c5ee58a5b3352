"""`GET /v1/events`: what happens, as it happens."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from .context import AdminHere
from .problems import documented

__all__ = ["router"]

router = APIRouter(tags=["events"])
_DESCRIPTION = (
    "server-sent events; `data` of each is a StoreEvent, `event` its kind. "
    "A comment comes where nothing happens for ten seconds"
)


@router.get(
    "/events",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": _DESCRIPTION,
            "content": {
                "text/event-stream": {
                    "schema": {"$ref": "#/components/schemas/StoreEvent"},
                    "example": 'id: 1\nevent: stored\ndata: {"kind": "stored", "tier": "host"}\n\n',
                }
            },
        },
        **documented(429),
    },
)
async def events(admin: AdminHere) -> StreamingResponse:
    """What happens, until who listens goes away."""
    admin.feed.check_room()
    return StreamingResponse(admin.feed.stream(), media_type="text/event-stream")
