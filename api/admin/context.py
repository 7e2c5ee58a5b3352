"""What the routes work on, and who asks: handed to them by FastAPI."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Final

from fastapi import Depends, Request
from starlette.exceptions import HTTPException

from ...tiers.layout import KVLayout
from ..client_async import AsyncConnection, AsyncSpace
from .feed import Feed
from .models import Role
from .safety import role_of
from .watch import Watch

__all__ = ["Admin", "AdminHere", "RoleHere"]

_LAYOUT: Final = (
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "block_size",
    "dtype",
    "format",
    "planes",
    "scale_bytes",
)


class Admin:
    """A sidecar, as the routes have it. Used on one event loop.

    Args:
        connection: to the sidecar; as an operator, and strict.
        connect: makes another one, to hear of events on.

    Attributes:
        connection: as given.
        watch: knows how the sidecar is.
        feed: its events.
    """

    def __init__(self, connection: AsyncConnection, connect: Callable[[], AsyncConnection]) -> None:
        self.connection = connection
        self.watch = Watch(connection)
        self.feed = Feed(self.watch, connect)

    async def space(self, name: str) -> AsyncSpace:
        """A space by its id, to have something done in it.

        Raises:
            HTTPException: there is none.
        """
        status = (await self.watch.facts()).value.status
        found = next((space for space in status["spaces"] if space["id"] == name), None)
        if found is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"there is no space {name}")
        layout = KVLayout(**{field: found[field] for field in _LAYOUT}, window=found["window"] or None)
        return await self.connection.space(layout, shard=found["shard"], tenant=found["tenant"])

    async def spaces(self, name: str | None) -> list[AsyncSpace]:
        """The space of this id; None: all that there are.

        Raises:
            HTTPException: there is none of this id.
        """
        if name is not None:
            return [await self.space(name)]
        status = (await self.watch.facts()).value.status
        return [await self.space(space["id"]) for space in status["spaces"]]

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
    return admin


AdminHere = Annotated[Admin, Depends(_admin)]
RoleHere = Annotated[Role | None, Depends(role_of)]
