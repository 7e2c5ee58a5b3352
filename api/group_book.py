"""What is written down of a client group in the arena's records: its processes, and what its clients hold.

The next sidecar reads it where this one is killed. A process stands there before it is given the arena, a
lease or reservation before the client is told of it, and either is taken out only when it has ended.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..tiers.errors import CapacityError, IntegrityError
from ..tiers.record_file import ArraySpec, RecordFile, Section, SectionKind

__all__ = ["ClaimArrays", "GroupBook", "claims_in"]

_MOST_PROCESSES: Final = 1024
"""Of a group at a time."""
_GROUP: Final = struct.Struct("<16sI")
_CLAIMS: Final = struct.Struct("<16s16s16s")
_PROCESSES: Final = [
    ArraySpec(np.int64, _MOST_PROCESSES),
    ArraySpec(np.int64, _MOST_PROCESSES),
    ArraySpec(np.uint32, _MOST_PROCESSES),
]


@dataclass(frozen=True, eq=False)
class ClaimArrays:
    """What one client holds of one space, by slot.

    Args:
        leases: int32 [capacity].
        reserved: bool [capacity].
        section: where they are written down; None: nowhere.
    """

    leases: npt.NDArray[np.int32]
    reserved: npt.NDArray[np.bool_]
    section: Section | None = None

    @classmethod
    def alone(cls, capacity: int) -> ClaimArrays:
        """Arrays that go with this process."""
        # Zeros that nobody touched take no memory.
        return cls(np.zeros(capacity, dtype=np.int32), np.zeros(capacity, dtype=np.bool_))

    @classmethod
    def recorded(cls, section: Section, capacity: int) -> ClaimArrays:
        """Arrays in a section, as they are.

        Raises:
            IntegrityError: they are of another length, or hold what cannot be held.
        """
        leases, reserved = section.arrays(_claim_specs(capacity))
        if (leases < 0).any() or (reserved.view(np.uint8) > 1).any():
            raise IntegrityError("the arena's records of what a client holds are damaged")
        return cls(leases, reserved, section)


@dataclass(frozen=True)
class _ClaimsName:
    """Whose claims a section has.

    Args:
        group, client, space: 16 bytes each.
    """

    group: bytes
    client: bytes
    space: bytes


def claims_in(section: Section) -> _ClaimsName:
    """Whose claims a section has.

    Raises:
        IntegrityError: it does not say so.
    """
    if len(section.about) != _CLAIMS.size:
        raise IntegrityError("the arena's records of what a client holds are damaged")
    return _ClaimsName(*_CLAIMS.unpack(section.about))


class GroupBook:
    """One group's part of the records. Used from the loop's thread only.

    Args:
        records: the arena's.
        section: the group's.

    Attributes:
        id: 16 bytes that its processes share.
        uid: the user that they run as.

    Raises:
        IntegrityError: the section is damaged.
    """

    def __init__(self, records: RecordFile, section: Section) -> None:
        if len(section.about) != _GROUP.size:
            raise IntegrityError("the arena's records of a client group are damaged")
        self.id, self.uid = _GROUP.unpack(section.about)
        self._records = records
        self._section = section
        self._pids, self._started, self._checks = section.arrays(_PROCESSES)

    @classmethod
    def begin(cls, records: RecordFile, group: bytes, uid: int) -> GroupBook:
        """The book of a new group.

        Raises:
            CapacityError, MemoryUnavailableError: there is no room for it.
        """
        section = records.add(SectionKind.GROUP, _GROUP.pack(group, uid), _PROCESSES)
        return cls(records, section)

    def processes(self) -> list[tuple[int, int]]:
        """The number and start of each process.

        Raises:
            IntegrityError: one is damaged, and it is not known whom to wait for.
        """
        found = []
        for at in np.flatnonzero(self._pids).tolist():
            pid, started = int(self._pids[at]), int(self._started[at])
            if int(self._checks[at]) != _check(pid, started):
                raise IntegrityError("the arena's records of a client group's processes are damaged")
            found.append((pid, started))
        return found

    def add_process(self, pid: int, started: int) -> None:
        """A process is of the group.

        Raises:
            CapacityError: it has too many.
        """
        free = np.flatnonzero(self._pids == 0)
        if not len(free):
            raise CapacityError(f"a client group has {_MOST_PROCESSES} processes at most")
        at = int(free[0])
        self._started[at] = started
        self._checks[at] = _check(pid, started)
        self._pids[at] = pid  # last: it stands there from now on

    def remove_process(self, pid: int, started: int) -> None:
        """A process is gone."""
        self._pids[(self._pids == pid) & (self._started == started)] = 0

    def add_claims(self, client: bytes, space: bytes, capacity: int) -> ClaimArrays:
        """Where to write down what a client holds of a space.

        Raises:
            CapacityError, MemoryUnavailableError: there is no room for it.
        """
        about = _CLAIMS.pack(self.id, client, space)
        section = self._records.add(SectionKind.CLAIMS, about, _claim_specs(capacity))
        return ClaimArrays.recorded(section, capacity)

    def remove_claims(self, claims: ClaimArrays) -> None:
        """A client holds nothing of a space; the arrays are not used any more."""
        if claims.section is not None:
            self._records.remove(claims.section)

    def end(self) -> None:
        """The group is no more, nor do its clients hold anything."""
        self._records.remove(self._section)


def _claim_specs(capacity: int) -> list[ArraySpec]:
    return [ArraySpec(np.int32, capacity), ArraySpec(np.bool_, capacity)]


def _check(pid: int, started: int) -> int:
    return zlib.crc32(struct.pack("<qq", pid, started))
