"""The requests of operators, and the asyncio connection's calls that make them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

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
    expect_text,
)
from .client_calls import Ask, expect
from .messages import Count, Done, Message
from .operator_messages import (
    AttachCold,
    Configure,
    Configured,
    DetachCold,
    Disconnect,
    Drain,
    Evictions,
    EvictWhere,
    GetStatus,
    Status,
)

__all__ = ["AsyncOperatorCalls", "status_ask"]

_T = TypeVar("_T")

_OPENING_SECONDS: Final = 30.0
_CLOSING_SECONDS: Final = 60.0
"""For calls of the tier that are under way."""


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
        spaces: Sequence[bytes] | None = None,
        hashes: Sequence[bytes] | None = None,
        older_than: float | None = None,
        tier: str = "host",
        most_bytes: int | None = None,
        dry_run: bool = False,
        deadline: float = 30.0,
    ) -> EvictReport:
        """See `HostStore.evict_where`; but the empty tenant restricts nothing."""
        for some in (spaces, hashes):
            if some is not None and not len(some):
                return EvictReport(0, 0, 0)  # none are named: on the wire that would be all
        asked = EvictWhere(
            "" if tenant is None else check_tenant("tenant", tenant),
            () if spaces is None else tuple(expect_byte_strings("spaces", spaces, HASH_BYTES)),
            () if hashes is None else tuple(expect_byte_strings("hashes", hashes, HASH_BYTES)),
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

    async def configure(self, **values: Any) -> dict[str, tuple[Any, Any]]:
        """Set something otherwise while it serves: all that is given, or nothing of it.

        Args:
            values: ``policy``, ``clean_ahead``, ``cold_deadline``, ``quotas``, ``policy_weights`` and
                ``retention_ttl`` as of `HostStore.configure`;
                ``log_level``: ``debug``, ``info``, ``warning``, ``error`` or ``critical``.

        Returns:
            of each key that has another value now, what it was and what it is.

        Raises:
            ConfigError: there is no such key, or a value is of a wrong type or out of range.
        """
        convert = lambda reply: expect(reply, Configured).changed  # noqa: E731
        return await self.ask(_required(Configure(values), convert, dict))

    async def drain(self, on: bool = True, *, deadline: float = 30.0) -> int:
        """Have the sidecar take nothing new, and write what has no copy below; or take blocks again.

        Args:
            on: False: take blocks again.
            deadline: seconds for writing.

        Returns:
            how many blocks have no copy in the cold tier.
        """
        asked = Drain(expect_flag("on", on), expect_seconds("deadline", deadline))
        return await self.ask(_required(asked, _counted, int, asked.deadline))

    async def attach_cold(self, url: str, *, capacity_bytes: int | None = None) -> None:
        """Have a cold tier where there is none, sealed under the sidecar's own secret.

        Args:
            url, capacity_bytes: as of `open_cold_tier`; a folder as ``disk:///path``.

        Raises:
            ConfigError: there is one, or that one cannot be opened; nothing has changed.
        """
        capacity = 0
        if capacity_bytes is not None:
            capacity = expect_integer("capacity_bytes", capacity_bytes, 1, MOST_BYTES)
        asked = AttachCold(expect_text("url", url), capacity)
        await self.ask(_required(asked, lambda reply: expect(reply, Done), Done, _OPENING_SECONDS))

    async def detach_cold(self, deadline: float = 30.0) -> int:
        """Be without the cold tier.

        Args:
            deadline: seconds for writing there first what has no copy.

        Returns:
            how many blocks it has no copy of.

        Raises:
            ConfigError: there is none.
        """
        asked = DetachCold(expect_seconds("deadline", deadline))
        return await self.ask(_required(asked, _counted, int, asked.deadline + _CLOSING_SECONDS))

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


def _counted(reply: Message) -> int:
    return expect(reply, Count).count


def status_ask() -> Ask[dict[str, Any]]:
    """The request for how the sidecar is."""
    return _required(GetStatus(), lambda reply: expect(reply, Status).values, dict)


def _required(
    asked: Message, convert: Callable[[Message], _T], instead: Callable[[], _T], seconds: float = 0.0
) -> Ask[_T]:
    """A request to the sidecar as a whole, of which no reply is an error."""
    return Ask(None, lambda _: asked, convert, instead, seconds, required=True)
