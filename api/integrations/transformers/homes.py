"""Where blocks are kept: a sidecar, or a store in this process."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final, Protocol

from ....kvstore.calls import HostCalls, SpaceCalls
from ....kvstore.host import HostStore
from ....tiers.cold_url import open_cold_tier
from ....tiers.errors import ConfigError
from ....tiers.layout import KVLayout
from ...endpoint import endpoint_of
from ...listening import default_socket_path
from ..link import SidecarLink

__all__ = ["GivenHome", "Home", "SidecarHome", "folder_home"]

_FLUSH_SECONDS: Final = 600.0
"""A disk that takes longer for one prompt is not waited for."""


class Home(Protocol):
    """Where blocks are kept."""

    def space(self, layout: KVLayout) -> SpaceCalls | None:
        """The space of a layout; None where it cannot be had now."""
        ...

    @property
    def lost(self) -> object:
        """Another object where leases were lost, of which memory may then hold other blocks."""
        ...

    def settle(self) -> None:
        """Return when what was kept outlives this process, as far as it is to."""
        ...

    def close(self) -> None:
        """Use it no more. Idempotent."""
        ...


class SidecarHome:
    """A sidecar of this machine, which may be absent.

    Args:
        url: ``unix:///path``; empty: where ``kvpager serve`` listens by itself.
        tenant: whose the blocks are.
        seconds: that it may take to answer.
        log: where it is said that it is absent.
    """

    def __init__(self, url: str, tenant: str, seconds: float, log: logging.Logger) -> None:
        url = url or f"unix://{default_socket_path()}"
        if not endpoint_of(url, None, None).local:
            raise ConfigError(
                "url",
                f"must be unix:///path, got {url}; another machine's: store=kvpager.connect({url!r}, ...)",
            )
        self._link = SidecarLink(url, "transformers", log, tenant=tenant, seconds=seconds)
        self._link.wait(seconds)

    def space(self, layout: KVLayout) -> SpaceCalls | None:
        """See `Home.space`."""
        return self._link.space(layout, "") if self._link.ready else None

    @property
    def lost(self) -> object:
        """See `Home.lost`."""
        return self._link.lost

    def settle(self) -> None:
        """The sidecar outlives this process."""

    def close(self) -> None:
        """See `Home.close`."""
        self._link.close()


class GivenHome:
    """A store, or a connection, of somebody's.

    Args:
        host: whose it is.
        owned: it is closed with this.
    """

    def __init__(self, host: HostCalls, *, owned: bool = False) -> None:
        self._host = host
        self._owned = owned

    def space(self, layout: KVLayout) -> SpaceCalls:
        """See `Home.space`."""
        return self._host.space(layout)

    @property
    def lost(self) -> object:
        """See `Home.lost`. A store in this process loses none; a connection has a `Connection.lost`."""
        return getattr(self._host, "lost", None)

    def settle(self) -> None:
        """See `Home.settle`."""
        if self._owned:
            self._host.flush(_FLUSH_SECONDS)

    def close(self) -> None:
        """See `Home.close`."""
        if self._owned:
            self._host.close(drain=_FLUSH_SECONDS)


def folder_home(folder: str | os.PathLike[str], host_bytes: int, disk_bytes: int) -> GivenHome:
    """A store of this process's own, whose blocks are on disk in a folder.

    Raises:
        ConfigError: a value is out of range, or another process has the folder.
        MemoryUnavailableError: the machine does not have `host_bytes`.
    """
    path = Path(folder).expanduser().absolute()
    cold = open_cold_tier(f"disk://{path}", capacity_bytes=disk_bytes)
    try:
        # Everything is written to disk ahead of time: it is to be there tomorrow.
        return GivenHome(HostStore(host_bytes, cold=cold, clean_ahead=1.0), owned=True)
    except BaseException:
        cold.close()
        raise
