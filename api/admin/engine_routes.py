"""Who is connected, which sessions engines hold, and what is to be gone of whom."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from starlette.exceptions import HTTPException

from ..messages import Purged as PurgedMessage
from .context import AdminHere
from .cursors import Cursor, read_cursor, write_cursor
from .models import (
    MOST_PAGE,
    Client,
    Counted,
    EngineState,
    Hex,
    Listed,
    Page,
    Purged,
    Session,
    SessionCommanded,
)
from .problems import documented
from .status_routes import ASLEEP
from .watch import Facts

__all__ = ["router"]

router = APIRouter()

_Session = Annotated[str, Path(min_length=1, max_length=256, description="the engine's id of it")]
_Wait = Annotated[float, Query(gt=0, le=60, description="seconds that it may take")]


@router.get("/clients", tags=["clients"], responses=documented(503))
async def clients(admin: AdminHere) -> Listed[Client]:
    """Who is connected."""
    facts = (await admin.watch.facts()).value
    return Listed[Client](items=[_client(one) for one in facts.clients.values()])


@router.delete("/clients/{id}", tags=["clients"], responses=documented(401, 403, 404, 409, 422, 503))
async def disconnect(
    id: Annotated[int, Path(ge=0, le=1 << 53, description="its `id`")],  # noqa: A002
    admin: AdminHere,
) -> Counted:
    """End a connection. What its processes may still touch stays as it is; most clients connect again."""
    facts = (await admin.watch.facts()).value
    found = next((one for one in facts.clients.values() if one["id"] == id), None)
    if found is None:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"no client has the id {id}")
    if found["group"] == admin.group.hex():
        raise HTTPException(HTTPStatus.CONFLICT, "this is the admin process's own connection")
    await admin.connection.disconnect(id)
    admin.watch.changed()
    return Counted(count=1)


@router.get("/sessions", tags=["sessions"], responses=documented(404, 422, 503))
async def sessions(
    admin: AdminHere,
    state: Annotated[
        Literal["awake", "asleep"] | None,
        Query(description="those with a place in device memory, or without"),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_PAGE, description="how many at most")] = 200,
    cursor: Cursor = None,
) -> Page[Session]:
    """Conversations that engines hold, by their ids."""
    facts = await admin.watch.facts()
    found = sorted(_sessions(facts.value), key=lambda one: (one.id, one.client))
    if state is not None:
        found = [one for one in found if one.asleep == (state == "asleep")]
    if cursor is not None:
        after = tuple(read_cursor(cursor, str, int))
        found = [one for one in found if (one.id, one.client) > after]
    more = len(found) > limit
    found = found[:limit]
    return Page[Session](
        items=found,
        next_cursor=write_cursor(found[-1].id, found[-1].client) if more else None,
        age_seconds=facts.age,
    )


@router.post(
    "/sessions/{id:path}/sleep", tags=["sessions"], responses=documented(401, 403, 404, 409, 422, 503)
)
async def sleep(id: _Session, admin: AdminHere, deadline_seconds: _Wait = 10.0) -> SessionCommanded:  # noqa: A002
    """Have the engine that holds a session take it off the device, until it is woken."""
    return await _command(admin, "sleep", id, deadline_seconds)


@router.post(
    "/sessions/{id:path}/wake", tags=["sessions"], responses=documented(401, 403, 404, 409, 422, 503)
)
async def wake(id: _Session, admin: AdminHere, deadline_seconds: _Wait = 10.0) -> SessionCommanded:  # noqa: A002
    """Have the engine that holds a session go on with it, or be ready to."""
    return await _command(admin, "wake", id, deadline_seconds)


@router.delete("/sessions/{id:path}", tags=["sessions"], responses=documented(401, 403, 404, 422, 502, 503))
async def purge_session(
    id: _Session,  # noqa: A002
    admin: AdminHere,
    root: Annotated[Hex, Query(description="where the engine's chain of hashes starts")],
    space: Annotated[Hex | None, Query(description="in this space alone; none: in all")] = None,
    deadline_seconds: _Wait = 30.0,
) -> Purged:
    """Have a session be gone from every tier: its record, and the blocks that the record names."""
    name = bytes.fromhex(root)
    purged = [
        await one.purge_session(id, root=name, deadline=deadline_seconds) for one in await admin.spaces(space)
    ]
    admin.watch.changed()
    return _purged(purged)


@router.delete("/tenants/{id:path}", tags=["tenants"], responses=documented(401, 403, 404, 422, 503))
async def purge_tenant(
    id: Annotated[str, Path(min_length=1, max_length=256, description="its name")],  # noqa: A002
    admin: AdminHere,
    deadline_seconds: _Wait = 30.0,
) -> Purged:
    """Have all of a tenant be gone from every tier."""
    if id not in (await admin.watch.facts()).value.stats["tenants"]:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"the sidecar has no space of tenant {id!r}")
    purged = await admin.connection.purge_tenant(id, deadline_seconds)
    admin.watch.changed()
    return _purged([purged])


async def _command(
    admin: AdminHere, command: Literal["sleep", "wake"], session: str, seconds: float
) -> SessionCommanded:
    facts = (await admin.watch.facts()).value
    if not any(one.id == session for one in _sessions(facts)):
        raise HTTPException(
            HTTPStatus.NOT_FOUND, f"no engine that is connected has reported session {session!r}"
        )
    # A command may wait for the engine's next step.
    done = await asyncio.shield(admin.connection.command(command, session, deadline=seconds))
    admin.watch.changed()
    return SessionCommanded(session=session, command=command, blocks=done)


def _client(values: Mapping[str, Any]) -> Client:
    report = values.get("report")
    return Client(
        id=values["id"],
        name=values["name"],
        group=values["group"],
        remote=values["remote"],
        leased_blocks=values["leased"],
        reserved_blocks=values["reserved"],
        engine=None if report is None else _engine(report),
    )


def _engine(report: Mapping[str, Any]) -> EngineState:
    return EngineState(
        block_bytes=report["block_bytes"],
        device_blocks=report["device_blocks"],
        device_held_blocks=report["device_held"],
        to_device_bytes_per_second=report["to_device"],
        from_device_bytes_per_second=report["from_device"],
        sessions=len(report["sessions"]),
        age_seconds=report["age"],
    )


def _sessions(facts: Facts) -> list[Session]:
    return [
        Session(
            id=name,
            client=client["id"],
            engine=client["name"],
            state=state,
            asleep=state.lower() in ASLEEP,
            age_seconds=client["report"]["age"],
        )
        for client in facts.clients.values()
        if "report" in client
        for name, state in client["report"]["sessions"].items()
    ]


def _purged(parts: Sequence[PurgedMessage]) -> Purged:
    left: dict[str, Any] = {}
    for part in parts:
        for kind, value in part.left.items():
            if isinstance(value, Mapping):
                counts = left.setdefault(kind, {})
                for who, blocks in value.items():
                    counts[who] = counts.get(who, 0) + blocks
            else:
                left[kind] = value
    names = "spaces", "host_blocks", "host_bytes", "cold_blocks", "cold_bytes", "notes"
    return Purged(**{name: sum(getattr(part, name) for part in parts) for name in names}, left=left)
