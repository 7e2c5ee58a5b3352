"""Loads: blocks on their way up from the cold tier to host memory, in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ..tiers.cold import ColdTier
from ..tiers.errors import ClosedError
from ..tiers.settings import expect_seconds
from .handles import Lease
from .lineage import ChainPlace

__all__ = ["ColdLoad", "LoadTarget"]


class LoadTarget(Protocol):
    """The space that is loaded into, as far as a load needs it."""

    def lease_resident(self, hashes: Sequence[bytes]) -> Lease:
        """Lease the leading blocks that are resident."""
        ...

    def count_in_cold(self, cold: ColdTier, hashes: Sequence[bytes], deadline: float) -> int:
        """How many leading blocks the cold tier seems to have."""
        ...

    def read_from_cold(
        self, cold: ColdTier, hashes: Sequence[bytes], deadline: float, start: ChainPlace | None
    ) -> tuple[int, int]:
        """Read one batch of the leading blocks that are not resident: how many it was of, and arrived."""
        ...

    def wait_for_writers(self, hashes: Sequence[bytes], until: float) -> None:
        """Wait while the first block that is not resident is being written by somebody else."""
        ...


class ColdLoad:
    """Blocks on their way up from the cold tier. What is resident of them stays leased until `release`.

    Args:
        into: the space.
        hashes: names of blocks that follow each other; what is resident of them is leased at once.
        start: where in its chain the first one is; None: that is not known.
        ended: is called once no more is to be had, with how many leading blocks were resident or arrived.

    Attributes:
        loaded: blocks that have arrived so far.
        seconds: from when a loader thread began with it to its end; 0 before that.
        missing: the blocks that were not resident at the beginning.
    """

    def __init__(
        self,
        into: LoadTarget,
        hashes: Sequence[bytes],
        start: ChainPlace | None,
        ended: Callable[[int], None] | None = None,
    ) -> None:
        self.loaded = 0
        self.seconds = 0.0
        self._stopped = False
        self._into = into
        self._ended = ended
        self._error: Exception | None = None
        self._finished = threading.Event()
        self._leases: list[Lease] | None = []
        self._lock = threading.Lock()
        resident = self._lease(hashes)
        self.missing = list(hashes[resident:])
        self._found = resident
        self._start = None if start is None else start.after(hashes[:resident])

    def done(self) -> bool:
        """Whether everything that is to be had has arrived.

        Raises:
            Exception: what the load failed with.
        """
        finished = self._finished.is_set()
        if self._error is not None:
            raise self._error
        return finished

    def wait(self, seconds: float) -> bool:
        """Wait until it is done, `seconds` at most; returns whether it is. Raises as `done`.

        Raises:
            ConfigError: `seconds` is no number of seconds.
        """
        self._finished.wait(expect_seconds("seconds", seconds))
        return self.done()

    def release(self) -> None:
        """Whoever waited has leases of his own now, or wants the blocks no more. Idempotent."""
        with self._lock:
            leases, self._leases = self._leases, None
        for lease in leases or ():
            lease.release()

    def stop(self) -> None:
        """Bring nothing more up than what is on its way by now: it is no longer waited for."""
        self._stopped = True

    def run(self, cold: ColdTier, deadline: float) -> None:
        """Load what `cold` has, batch after batch, until one block is not to be had. In a loader thread.

        Args:
            deadline: seconds that one call of the cold tier may take, and waiting for other writers.
        """
        began = time.monotonic()
        try:
            self._run(cold, deadline)
            self.seconds = time.monotonic() - began
        except ClosedError:
            self.finish()  # what has arrived, has
        except Exception as error:  # noqa: BLE001  whoever waits for the load is told
            self._error = error
            self.finish()
        else:
            self.finish()

    def finish(self) -> None:
        """No more is to be had."""
        if self._ended is not None:
            self._ended(self._found)
        self._finished.set()

    def _run(self, cold: ColdTier, deadline: float) -> None:
        until = time.monotonic() + deadline
        start = self._start
        missing = self.missing[: self._into.count_in_cold(cold, self.missing, deadline)]
        while missing and not self._stopped:
            asked, arrived = self._into.read_from_cold(cold, missing, deadline, start)
            self.loaded += arrived
            self._into.wait_for_writers(missing[:asked], until)
            # What came first must not make room for what comes last.
            resident = self._lease(missing)
            self._found += resident
            if resident < max(1, asked):
                return
            start = None if start is None else start.after(missing[:resident])
            missing = missing[resident:]

    def _lease(self, hashes: Sequence[bytes]) -> int:
        """Lease the leading resident blocks until `release`; returns how many there are."""
        lease = self._into.lease_resident(hashes)
        with self._lock:
            if self._leases is not None:
                self._leases.append(lease)
                return len(lease)
        lease.release()
        return len(lease)
