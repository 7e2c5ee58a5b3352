"""Purges as clients ask for them: of blocks of a space, or of a tenant; and who holds what is left."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..kvstore.host import HostStore
from ..kvstore.purging import HeldSlots, PurgeReport
from ..kvstore.space import HostSpace
from ..tiers.cold import ColdStatus
from .groups import Groups
from .messages import Purged

__all__ = ["Purges"]

_NOBODY = "the sidecar"
"""Who holds what no client does: loads under way."""


@dataclass(frozen=True)
class _Done:
    """What became of a purge in one space."""

    space: HostSpace
    report: PurgeReport


class Purges:
    """Makes purges and the replies to them.

    Args:
        host: the store.
        groups: the client groups. Used on the loop.
    """

    def __init__(self, host: HostStore, groups: Groups) -> None:
        self._host = host
        self._groups = groups

    def of_space(
        self, space: HostSpace, hashes: Sequence[bytes], notes: Sequence[bytes], seconds: float
    ) -> tuple[Callable[[], Sequence[_Done]], Callable[[Sequence[_Done]], Purged]]:
        """The work that purges blocks and notes, for a thread; and what makes the reply, on the loop."""
        return lambda: [_Done(space, space.purge(hashes, notes=notes, deadline=seconds))], self._reply

    def of_tenant(
        self, tenant: str, seconds: float
    ) -> tuple[Callable[[], Sequence[_Done]], Callable[[Sequence[_Done]], Purged]]:
        """Likewise, of all that a tenant has."""

        def work() -> Sequence[_Done]:
            until = time.monotonic() + seconds
            return [
                _Done(space, space.purge(None, deadline=max(0.0, until - time.monotonic())))
                for space in self._host.spaces
                if space.tenant == tenant
            ]

        return work, self._reply

    def _reply(self, done: Sequence[_Done]) -> Purged:
        leased: Counter[str] = Counter()
        reserved: Counter[str] = Counter()
        left: dict[str, Any] = {}
        host_blocks = host_bytes = 0
        for one in done:
            freed = one.report.host_blocks
            for held, book in ((one.report.leased, leased), (one.report.reserved, reserved)):
                still = one.space.still_purged(held)
                if book is leased:
                    freed += len(held) - len(still)
                book.update(self._holders(one.space, still))
            host_blocks += freed
            host_bytes += freed * one.space.layout.block_bytes
            if one.report.cold_left is not None:
                left["cold"] = _WHY_COLD.get(one.report.cold_left, str(one.report.cold_left))
        for why, counted in (("leased", leased), ("reserved", reserved)):
            if counted:
                left[why] = dict(counted)
        return Purged(
            spaces=len(done),
            host_blocks=host_blocks,
            host_bytes=host_bytes,
            cold_blocks=sum(one.report.cold_blocks for one in done),
            cold_bytes=sum(one.report.cold_blocks * one.space.layout.block_bytes for one in done),
            notes=sum(one.report.notes for one in done),
            left=left,
        )

    def _holders(self, space: HostSpace, slots: HeldSlots) -> dict[str, int]:
        """Who holds these slots, and how many of them."""
        holders, unheld = self._groups.holders(space, slots.slots, slots.generations)
        if unheld:
            holders[_NOBODY] = unheld
        return holders


_WHY_COLD = {
    ColdStatus.LATE: "not done by the deadline",
    ColdStatus.UNAVAILABLE: "the cold tier cannot be reached, or refuses",
}
