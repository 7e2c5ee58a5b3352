"""What the routes work on, and who asks: handed to them by FastAPI."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated

from fastapi import Depends, Request
from starlette.exceptions import HTTPException

from ..client_async import AsyncConnection, AsyncSpace
from ..measurements import measurements_path
from .ceilings import Ceilings
from .feed import Feed
from .models import Role
from .safety import role_of
from .watch import Watch

__all__ = ["Admin", "AdminHere", "RoleHere"]


class Admin:
    """A sidecar, as the routes have it. Used on one event loop.

    Args:
        connection: to the sidecar; as an operator, and strict.
        connect: makes another one, to hear of events on.
        group: the client group of these connections.

    Attributes:
        connection, group: as given.
        watch: knows how the sidecar is.
        feed: its events.
        ceilings: what the machine reaches at best.
        configuring: held while settings are looked at and set.
    """

    def __init__(
        self, connection: AsyncConnection, connect: Callable[[], AsyncConnection], group: bytes
    ) -> None:
        self.connection = connection
        self.group = group
        self.watch = Watch(connection)
        self.feed = Feed(self.watch, connect)
        self.ceilings = Ceilings(measurements_path(os.environ))
        self.configuring = asyncio.Lock()

    async def space(self, name: str) -> AsyncSpace:
        """A space by its id, to have something done in it.

        Raises:
            HTTPException: there is none.
        """
        status = (await self.watch.facts()).value.status
        if not any(space["id"] == name for space in status["spaces"]):
            raise HTTPException(HTTPStatus.NOT_FOUND, f"there is no space {name}")
        return await self.connection.find_space(bytes.fromhex(name))

    async def spaces(self, name: str | None) -> list[AsyncSpace]:
        """The space of this id; None: all that there are.

        Raises:
            HTTPException: there is none of this id.
        """
        if name is not None:
            return [await self.space(name)]
        status = (await self.watch.facts()).value.status
        return [await self.space(space["id"]) for space in status["spaces"]]

    async def refuse_without_cold(self) -> None:
        """Raise `HTTPException` where there is no cold tier."""
        if "cold" not in (await self.watch.facts()).value.status:
            raise HTTPException(HTTPStatus.CONFLICT, "there is no cold tier")

    async def refuse_if_draining(self) -> None:
        """Raise `HTTPException` where the sidecar takes no blocks."""
        if (await self.watch.facts()).value.status["draining"]:
            raise HTTPException(HTTPStatus.CONFLICT, "the sidecar is draining, and loads nothing")

    async def close(self) -> None:
        """End what goes on in the background. The connection stays its maker's."""
        await self.feed.close()
        await self.watch.close()


def _admin(request: Request) -> Admin:
    admin: Admin = request.app.state.admin
    # As of HTTP: what is told is to be as of now, not as of a moment ago.
    if "no-cache" in request.headers.get("cache-control", ""):
        admin.watch.changed()
    return admin


AdminHere = Annotated[Admin, Depends(_admin)]
RoleHere = Annotated[Role | None, Depends(role_of)]
