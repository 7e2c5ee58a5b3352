"""What the sidecar does at the requests of operators."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from .. import __version__
from ..kvstore.hashing import HASH_BYTES
from ..kvstore.status import DegradedPart, SpaceStatus, StoreStatus
from ..tiers.errors import AccessDeniedError, ConfigError
from ..tiers.settings import expect_bytes
from .messages import Clients, Command, Count, Done, GetClients, Message
from .operator_messages import Demote, Disconnect, Evictions, EvictWhere, FindSpace, GetStatus, Status
from .service import Job, Service, seconds_of
from .space_book import SpaceBook

__all__ = ["OperatorAnswers"]

_PACKAGE: Final = logging.getLogger(__name__.partition(".")[0])
"""The logger that all of kvpager's are under."""


class OperatorAnswers:
    """Answers the requests of operators on one connection. See `Answers`, which hands them on.

    Args:
        service: what connections share.
        book: the spaces that the connection opened.
        is_operator: whether the client is one; else all of these are refused.
    """

    def __init__(self, service: Service, book: SpaceBook, *, is_operator: bool) -> None:
        self._service = service
        self._book = book
        self._host = service.host
        self._is_operator = is_operator
        self._handlers: dict[type[Message], Callable[[Any], Message | Job]] = {
            GetStatus: self._get_status,
            GetClients: self._get_clients,
            Command: self._command,
            Disconnect: self._disconnect,
            FindSpace: self._find_space,
            EvictWhere: self._evict_where,
            Demote: self._demote,
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

    def _disconnect(self, asked: Disconnect) -> Message:
        engine = self._service.engines.find(asked.client)
        # Not before the reply is written: it may be the one that asks.
        asyncio.get_running_loop().call_soon(engine.finish)
        return Done()

    # Blocks

    def _find_space(self, asked: FindSpace) -> Message:
        space = self._host.find_space(expect_bytes("id", asked.id, HASH_BYTES))
        if space is None:
            raise ConfigError("id", f"there is no space {asked.id.hex()}")
        return self._book.opened(space)

    def _evict_where(self, asked: EvictWhere) -> Message | Job:
        wait = seconds_of("deadline", asked.deadline)
        evict = partial(
            self._host.evict_where,
            tenant=asked.tenant or None,
            spaces=asked.spaces or None,
            hashes=asked.hashes or None,
            older_than=asked.older_than or None,
            tier=asked.tier or "host",
            most_bytes=asked.most_bytes or None,
            dry_run=asked.dry_run,
            deadline=wait,
        )
        return Job(asked.tier == "cold", evict, lambda done: Evictions(done.blocks, done.bytes, done.lost))

    def _demote(self, asked: Demote) -> Message | Job:
        space, wait = self._book.space(asked.space), seconds_of("deadline", asked.deadline)
        return Job(True, lambda: space.demote(asked.hashes, deadline=wait), Count)


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
