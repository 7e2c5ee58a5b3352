"""The requests of operators, and the asyncio connection's calls that make them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..kvstore.evicting import MOST_AGE, EvictReport
from ..kvstore.hashing import HASH_BYTES
from ..kvstore.tenants import check_tenant
from ..tiers.settings import (
    MOST_BYTES,
    expect_byte_strings,
    expect_choice,
    expect_flag,
    expect_integer,
    expect_seconds,
)
from .client_calls import Ask, expect
from .messages import Done, Message
from .operator_messages import Disconnect, Evictions, EvictWhere, GetStatus, Status

__all__ = ["AsyncOperatorCalls", "status_ask"]

_T = TypeVar("_T")


class AsyncOperatorCalls(ABC):
    """What operators have a sidecar do. Calls raise `AccessDeniedError` where the token is one of tenants.

    None of them is a call of the serving path: where the sidecar does not answer, `ServiceUnavailableError`
    is raised on every connection.
    """

    async def status(self) -> dict[str, Any]:
        """How the sidecar is: the map of `Status` in docs/protocol.md."""
        return await self.ask(status_ask())

    async def evict_where(
        self,
        *,
        tenant: str | None = None,
        spaces: Sequence[bytes] = (),
        hashes: Sequence[bytes] = (),
        older_than: float | None = None,
        tier: str = "host",
        most_bytes: int | None = None,
        dry_run: bool = False,
        deadline: float = 30.0,
    ) -> EvictReport:
        """See `HostStore.evict_where`; no `spaces` or `hashes`, or the empty tenant, restrict nothing."""
        asked = EvictWhere(
            "" if tenant is None else check_tenant("tenant", tenant),
            tuple(expect_byte_strings("spaces", spaces, HASH_BYTES)),
            tuple(expect_byte_strings("hashes", hashes, HASH_BYTES)),
            0.0 if older_than is None else expect_seconds("older_than", older_than, MOST_AGE, above=True),
            expect_choice("tier", tier, ("host", "cold")),
            0 if most_bytes is None else expect_integer("most_bytes", most_bytes, 1, MOST_BYTES),
            expect_flag("dry_run", dry_run),
            expect_seconds("deadline", deadline),
        )

        def report(reply: Message) -> EvictReport:
            done = expect(reply, Evictions)
            return EvictReport(done.blocks, done.bytes, done.lost)

        return await self.ask(_required(asked, report, lambda: EvictReport(0, 0, 0), asked.deadline))

    async def disconnect(self, client: int) -> None:
        """End a client's connection. What it holds in place stays its own while a process of it lives.

        Args:
            client: its ``id`` in `clients`.
        """
        asked = Disconnect(expect_integer("client", client, 0, MOST_BYTES))
        await self.ask(_required(asked, lambda reply: expect(reply, Done), Done))

    @abstractmethod
    async def ask(self, ask: Ask[_T]) -> _T:
        """Make a request and wait for what becomes of it."""


def status_ask() -> Ask[dict[str, Any]]:
    """The request for how the sidecar is."""
    return _required(GetStatus(), lambda reply: expect(reply, Status).values, dict)


def _required(
    asked: Message, convert: Callable[[Message], _T], instead: Callable[[], _T], seconds: float = 0.0
) -> Ask[_T]:
    """A request to the sidecar as a whole, of which no reply is an error."""
    return Ask(None, lambda _: asked, convert, instead, seconds, required=True)
