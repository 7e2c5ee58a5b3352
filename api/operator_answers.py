"""What the sidecar does at the requests of operators."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Final

from .. import __version__
from ..kvstore.status import DegradedPart, SpaceStatus, StoreStatus
from ..tiers.errors import AccessDeniedError
from .messages import Clients, Command, GetClients, Message
from .operator_messages import GetStatus, Status
from .service import Job, Service, seconds_of

__all__ = ["OperatorAnswers"]

_PACKAGE: Final = logging.getLogger(__name__.partition(".")[0])
"""The logger that all of kvpager's are under."""


class OperatorAnswers:
    """Answers the requests of operators on one connection. See `Answers`, which hands them on.

    Args:
        service: what connections share.
        is_operator: whether the client is one; else all of these are refused.
    """

    def __init__(self, service: Service, *, is_operator: bool) -> None:
        self._service = service
        self._host = service.host
        self._is_operator = is_operator
        self._handlers: dict[type[Message], Callable[[Any], Message | Job]] = {
            GetStatus: self._get_status,
            GetClients: self._get_clients,
            Command: self._command,
        }

    def handlers(self) -> dict[type[Message], Callable[[Any], Message | Job]]:
        """What answers which message."""
        return dict.fromkeys(self._handlers, self._answer)

    def _answer(self, message: Message) -> Message | Job:
        if not self._is_operator:
            raise AccessDeniedError("the token is one of tenants, not of operators")
        return self._handlers[type(message)](message)

    # Looking

    def _get_status(self, asked: GetStatus) -> Message | Job:
        return Job(False, self._host.status, self._status)

    def _status(self, status: StoreStatus) -> Message:
        service, records = self._service, self._host.records
        values: dict[str, Any] = {
            "version": __version__,
            "boot_id": service.boot_id.hex(),
            "pid": os.getpid(),
            "started": service.started,
            "draining": service.stopping or service.drained_since is not None,
            "config": self._config(status),
            "degraded": [vars(part) for part in (*status.degraded, *self._draining())],
            "records": "" if records is None else records.path,
            "clock": {"now": status.clock.now, "samples": [list(one) for one in status.clock.samples]},
            "spaces": [_space_values(one) for one in status.spaces],
        }
        if status.cold is not None:
            values["cold"] = {
                "kind": status.cold.kind,
                "url": service.cold.public_url,
                "state": status.cold.condition.value,
            }
        return Status(values)

    def _config(self, status: StoreStatus) -> dict[str, Any]:
        """What can be set while it serves, as it is."""
        level = logging.getLevelName(_PACKAGE.getEffectiveLevel()).lower()
        return {**vars(status.settings), "log_level": level}

    def _draining(self) -> list[DegradedPart]:
        since = self._service.drained_since
        if since is None:
            return []
        return [DegradedPart("draining", since, "operators have it take no new blocks")]

    # Clients and their engines

    def _get_clients(self, asked: GetClients) -> Message:
        return Clients(self._service.engines.listed())

    def _command(self, asked: Command) -> Message | Job:
        wait = seconds_of("deadline", asked.deadline)
        return Job(True, self._service.engines.give(asked, wait), _same)


def _same(reply: Message) -> Message:
    return reply


def _space_values(space: SpaceStatus) -> dict[str, Any]:
    layout = space.layout
    return {
        "id": space.id.hex(),
        "num_layers": layout.num_layers,
        "num_kv_heads": layout.num_kv_heads,
        "head_dim": layout.head_dim,
        "block_size": layout.block_size,
        "dtype": layout.dtype,
        "format": str(layout.format),
        "planes": layout.planes,
        "window": layout.window or 0,
        "scale_bytes": layout.scale_bytes,
        "shard": space.shard,
        "tenant": space.tenant,
        "block_bytes": layout.block_bytes,
        "slots_per_extent": space.slots_per_extent,
        "extents": space.extents,
        "capacity": space.capacity,
        "resident": space.resident,
        "reserved": space.reserved,
        "leased": space.slots.leased,
        "evictable": space.evictable,
        "free": space.free,
        "dirty": space.slots.dirty,
        "cleaning": space.cleaning,
        "pinned": space.slots.pinned,
    }
