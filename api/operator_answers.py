"""What the sidecar does at the requests of operators."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, Final

from .. import __version__
from ..kvstore.hashing import HASH_BYTES
from ..kvstore.status import DegradedPart, SpaceStatus, StoreStatus
from ..kvstore.store_settings import StoreSettings
from ..tiers.errors import AccessDeniedError, ConfigError
from ..tiers.settings import MOST_BYTES, expect_bytes, expect_choice, expect_integer, expect_text, shown
from .messages import Clients, Command, Count, Done, GetClients, Message
from .operator_messages import (
    AttachCold,
    Configure,
    Configured,
    Demote,
    DetachCold,
    Disconnect,
    Drain,
    Evictions,
    EvictWhere,
    FindSpace,
    GetStatus,
    Status,
)
from .service import Job, Service, seconds_of
from .space_book import SpaceBook

__all__ = ["OperatorAnswers"]

_PACKAGE: Final = logging.getLogger(__name__.partition(".")[0])
"""The logger that all of kvpager's are under."""
_LOG_LEVEL: Final = "log_level"
_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
_SETTINGS: Final = (*(one.name for one in fields(StoreSettings)), _LOG_LEVEL)
"""What `Configure` takes."""


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
            Configure: self._configure,
            Drain: self._drain,
            AttachCold: self._attach_cold,
            DetachCold: self._detach_cold,
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
        return {**vars(status.settings), _LOG_LEVEL: _log_level()}

    def _draining(self) -> list[DegradedPart]:
        since = self._service.drained_since
        if since is None:
            return []
        return [DegradedPart("draining", since, "operators have it take no new blocks")]

    # Settings

    def _configure(self, asked: Configure) -> Message | Job:
        values = dict(asked.values)
        for name in values:
            if name not in _SETTINGS:
                near = get_close_matches(name, _SETTINGS, 1)
                advice = f"did you mean {near[0]}?" if near else f"these are: {', '.join(_SETTINGS)}"
                raise ConfigError(shown(name)[1:-1], f"is nothing that can be set while it serves; {advice}")
            if values[name] is None:
                raise ConfigError(name, "has no value")
        level = None
        if _LOG_LEVEL in values:
            level = expect_choice(_LOG_LEVEL, values.pop(_LOG_LEVEL), _LEVELS)

        def finish(changed: dict[str, tuple[Any, Any]]) -> Message:
            if level is not None and level != (before := _log_level()):
                _PACKAGE.setLevel(level.upper())
                changed = {**changed, _LOG_LEVEL: (before, level)}
            return Configured(changed)

        return Job(False, lambda: self._host.configure(**values), finish)

    def _drain(self, asked: Drain) -> Message | Job:
        wait, service = seconds_of("deadline", asked.deadline), self._service
        if not asked.on:
            service.drained_since = None
        elif service.drained_since is None:
            service.drained_since = time.time()
        return Job(True, lambda: self._host.flush(wait if asked.on else 0.0), Count)

    # The cold tier

    def _attach_cold(self, asked: AttachCold) -> Message | Job:
        url = expect_text("cold.url", asked.url)
        if "://" not in url:
            raise ConfigError(
                "cold.url", f"must be a URL like redis://host or disk:///folder, got {shown(url)}"
            )
        if self._host.cold is not None:
            raise ConfigError("cold.url", "there is a cold tier: it is detached before another comes")
        capacity = expect_integer("cold.capacity_bytes", asked.capacity_bytes, 0, MOST_BYTES) or None
        service, host = self._service, self._host
        source = replace(service.cold, url=url)

        def attach() -> None:
            cold = source.open_reachable(capacity)
            try:
                host.attach_cold(cold, name=source.name)
            except BaseException:
                cold.close()
                raise
            service.cold = source

        return Job(True, attach, lambda _: Done())

    def _detach_cold(self, asked: DetachCold) -> Message | Job:
        wait, service, host = seconds_of("deadline", asked.deadline), self._service, self._host

        def detach() -> int:
            left = host.detach_cold(wait)
            service.cold = replace(service.cold, url=None)
            return left

        return Job(True, detach, Count)

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


def _log_level() -> str:
    return logging.getLevelName(_PACKAGE.getEffectiveLevel()).lower()


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
        "costs": {} if space.costs is None else space.costs.as_map(),
    }
