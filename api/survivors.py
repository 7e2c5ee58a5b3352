"""What outlived a sidecar that was killed: client groups whose processes live, and what these hold.

All of it is settled before the next sidecar lets anybody in. What a group holds whose processes are all gone
is given back; what nobody holds is free. The rest stays as it was, until its clients say again what they
hold, or are gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..kvstore.host import HostStore
from ..tiers.record_file import RecordFile, SectionKind
from .claims import Claims
from .group_book import ClaimArrays, GroupBook, claims_in
from .groups import Groups, Watched, start_of

__all__ = ["Survivors", "restore_groups"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Survivor:
    """A group of which a process lives."""

    book: GroupBook
    processes: Sequence[Watched]
    claims: list[tuple[bytes, Claims]] = field(default_factory=list)
    """Of each client."""


class Survivors:
    """Waits for the end of processes that had the arena before: nobody is left then who might write there.

    Args:
        loop: tells when a process is gone.
        pidfds: descriptors of the processes, this one's own from now on.
        all_gone: is called once, on the loop, when all are gone; at once where there are none.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, pidfds: Sequence[int], all_gone: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._pidfds = set(pidfds)
        self._all_gone = all_gone
        for pidfd in pidfds:
            loop.add_reader(pidfd, self._gone, pidfd)
        if not pidfds:
            all_gone()

    def close(self) -> None:
        """Wait no more. Idempotent."""
        for pidfd in self._pidfds:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        self._pidfds.clear()

    def _gone(self, pidfd: int) -> None:
        self._pidfds.remove(pidfd)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        if not self._pidfds:
            self._all_gone()


def restore_groups(groups: Groups, host: HostStore, loop: asyncio.AbstractEventLoop) -> Survivors | None:
    """Have groups and store agree on what the arena's records say; before anything is asked of either.

    Returns:
        who waits until damaged slots may be used again; None where there are none.

    Raises:
        IntegrityError: the records of groups are damaged, and it is not known who holds what.
    """
    records = host.records
    if records is None or not host.inherits:
        return None
    survivors: dict[bytes, _Survivor] = {}
    try:
        _find(records, survivors)
        _restore(records, survivors, host)
    except BaseException:
        for one in survivors.values():
            for process in one.processes:
                os.close(process.pidfd)
        raise
    host.inherits = False
    damaged = sum(space.damaged for space in host.spaces)
    watched = [process.pidfd for one in survivors.values() for process in one.processes]
    waiting = [os.dup(pidfd) for pidfd in watched] if damaged else []
    for one in survivors.values():
        groups.adopt(one.book, one.processes, one.claims)
    if not damaged:
        return None
    _log.error(
        "%d slots have damaged records; they are free when %d processes are gone that had the arena before",
        damaged,
        len(waiting),
    )

    def free() -> None:
        freed = sum(space.free_damaged() for space in host.spaces)
        _log.warning("%d slots that had damaged records are free", freed)

    return Survivors(loop, waiting, free)


def _find(records: RecordFile, survivors: dict[bytes, _Survivor]) -> None:
    """The groups of which a process lives; the others' books are closed."""
    for section in records.sections(SectionKind.GROUP):
        book = GroupBook(records, section)
        living = []
        for pid, started in book.processes():
            pidfd = _living(pid, started)
            if pidfd is None:
                book.remove_process(pid, started)
            else:
                living.append(Watched(pid, started, pidfd))
        if living:
            survivors[book.id] = _Survivor(book, living)
        else:
            book.end()


def _restore(records: RecordFile, survivors: dict[bytes, _Survivor], host: HostStore) -> None:
    """What they hold, as the store has it too."""
    spaces = {space.id: space for space in host.spaces}
    leases = {name: np.zeros(space.capacity, np.int32) for name, space in spaces.items()}
    reserved = {name: np.zeros(space.capacity, np.bool_) for name, space in spaces.items()}
    claims: list[Claims] = []
    for section in records.sections(SectionKind.CLAIMS):
        named = claims_in(section)
        survivor, space = survivors.get(named.group), spaces.get(named.space)
        if survivor is None or space is None:
            records.remove(section)
            continue
        arrays = ClaimArrays.recorded(section, space.capacity)
        one = Claims(space, arrays)
        claims.append(one)
        survivor.claims.append((named.client, one))
        leases[named.space] += arrays.leases
        reserved[named.space] |= arrays.reserved
    for name, space in spaces.items():
        wrong = space.restore(leases[name], reserved[name])
        for one in claims:
            if one.space is space:
                one.restore(wrong)


def _living(pid: int, started: int) -> int | None:
    """A descriptor of this very process if it lives, else None."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        # Alive after the look at its number: so the look was at this process.
        lives = start_of(pid) == started and not ended.poll(0)
    except (FileNotFoundError, ProcessLookupError):
        lives = False
    except BaseException:
        os.close(pidfd)
        raise
    if not lives:
        os.close(pidfd)
    return pidfd if lives else None
