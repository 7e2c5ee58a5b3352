"""The requests of operators, and the asyncio connection's calls that make them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeVar

from .client_calls import Ask, expect
from .operator_messages import GetStatus, Status

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

    @abstractmethod
    async def ask(self, ask: Ask[_T]) -> _T:
        """Make a request and wait for what becomes of it."""


def status_ask() -> Ask[dict[str, Any]]:
    """The request for how the sidecar is."""
    return Ask(None, lambda _: GetStatus(), lambda reply: expect(reply, Status).values, dict, required=True)
