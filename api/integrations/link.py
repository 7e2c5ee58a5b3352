"""The sidecar as an engine of others sees it: it may be absent or slow, go away and come back."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

from ...kvstore.events import Listener
from ...tiers.errors import KVPagerError
from ...tiers.layout import KVLayout
from ..client import Connection
from ..client_space import Lost
from ..endpoint import endpoint_of
from ..messages import Purged
from ..remote_space import RemoteSpace

__all__ = ["SidecarLink", "is_local"]

_PAUSE_SECONDS: Final = 5.0
"""So that requests which come meanwhile do not wait for a sidecar that stalls, one after the other."""


def is_local(url: str) -> bool:
    """Whether a URL is of a sidecar of this machine. Raises `ConfigError` where it only seems to be one."""
    scheme, mark, _ = url.partition("://")
    return (not mark or scheme == "unix") and endpoint_of(url, None, None).local


class SidecarLink:
    """A connection that is made in the background, for as long as it takes.

    Args:
        url: of a sidecar of this machine.
        name: what its operators call this process.
        log: where it is said that the sidecar is absent, and that it is there again.
        tenant: whose the blocks are.
        seconds: that it may take to answer.
    """

    def __init__(self, url: str, name: str, log: logging.Logger, *, tenant: str, seconds: float) -> None:
        self._url = url
        self._log = log
        self._connection = Connection(url, name=name, tenant=tenant, timeout=seconds)
        self._lock = threading.Lock()
        self._said_absent = False
        self._slow_until = 0.0
        self._spaces: dict[tuple[KVLayout, str], RemoteSpace] = {}

    def wait(self, seconds: float) -> None:
        """Wait for the sidecar, so many seconds at most, and say whether it is there."""
        try:
            self._connection.wait_ready(seconds)
        except KVPagerError as error:
            self._say_absent(str(error))
        else:
            self._log.info("kvpager: connected to %s", self._url)

    @property
    def ready(self) -> bool:
        """Whether the sidecar can be asked now. Does not wait.

        One that stalled answers what it was asked when it goes on, which ends that.
        """
        connection = self._connection
        ready = connection.ready and not connection.stalled and time.monotonic() >= self._slow_until
        if not ready:
            self._say_absent("it does not answer")
        elif self._said_absent:
            with self._lock:
                said, self._said_absent = self._said_absent, False
            if said:
                self._log.warning("kvpager: %s is there again", self._url)
        return ready

    def subscribe(self, listener: Listener) -> None:
        """Call `listener` with every event of blocks, in the connection's thread."""
        self._connection.subscribe(listener)

    @property
    def event_gaps(self) -> int:
        """Grows wherever events may have been missed: `Connection.event_gaps`."""
        return self._connection.event_gaps

    def pause(self) -> None:
        """It did not answer in time: nothing is asked of it for some seconds."""
        self._slow_until = time.monotonic() + _PAUSE_SECONDS
        self._say_absent("it does not answer in time")

    def space(self, layout: KVLayout, shard: str) -> RemoteSpace | None:
        """The space of a shard, opened where it is not yet; None where that cannot be done now. Waits."""
        key = (layout, shard)
        space = self._spaces.get(key)
        if space is None and self.ready:
            try:
                space = self._spaces[key] = self._connection.space(layout, shard=shard).for_steps()
            except KVPagerError as error:
                self._say_absent(str(error))
        return space

    def purge(self, tenant: str, seconds: float) -> Purged:
        """Have all of a tenant be gone, see `Connection.purge_tenant`."""
        return self._connection.purge_tenant(tenant, seconds)

    @property
    def lost(self) -> tuple[Lost, ...]:
        """What was lost with an earlier connection, another object where that changed: `Connection.lost`."""
        return self._connection.lost

    @property
    def device(self) -> str | None:
        """The GPU that the sidecar's memory is mapped for."""
        return self._connection.device

    def map_device(self, device: str) -> None:
        """Have the sidecar's memory mapped for a GPU, see `Connection.map_device`."""
        self._connection.map_device(device)

    def close(self) -> None:
        """End the connection; what is held in the sidecar is released. Idempotent."""
        self._connection.close()

    def _say_absent(self, why: str) -> None:
        with self._lock:
            said, self._said_absent = self._said_absent, True
        if not said:
            self._log.warning("kvpager: serving on without %s (%s): nothing is found or kept", self._url, why)
