"""Purges: blocks of a space that are to be gone, from host memory and from the cold tier, and shown to be.

What somebody holds in host memory is found by nobody from then on, and goes when he lets go. What the cold
tier could not be told to remove, blocks or notes, is not read from there, and it is told again; where an
arena outlives this process that is written down, and the next one goes on with it.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ..tiers.cold import ColdPurge, ColdStatus
from ..tiers.errors import IntegrityError
from ..tiers.record import note_hash
from ..tiers.record_file import ArraySpec, Section, SectionKind
from .events import EventKind
from .handles import Generations
from .hashing import HASH_BYTES
from .policy import Ids
from .shared import HostShared
from .slots import SlotRecords
from .tenants import Tenant

__all__ = ["HeldSlots", "PurgeReport", "SpacePurges", "read_barred"]

_MOST_ROUNDS: Final = 8
"""Of looking again at what came back while the cold tier was being told."""
_AGAIN_SECONDS: Final = 1.0
"""Between attempts to have the cold tier remove what it did not."""
_BARRED: Final = struct.Struct("<16s?I?I")
"""Of what stands about barred names: their space; of blocks, then of notes, whether it is all of them, and
how many are named."""
_NO_SLOTS: Final = np.empty(0, np.int32), np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class HeldSlots:
    """Slots that were purged and are still held.

    Args:
        slots: int32 [n].
        generations: int64 [n].
    """

    slots: Ids
    generations: Generations

    def __len__(self) -> int:
        return len(self.slots)


@dataclass
class Barred:
    """Records that the cold tier may have and was to remove.

    Attributes:
        whole: whether it is all that the space has.
        names: which ones, 16 bytes each.
    """

    whole: bool = False
    names: set[bytes] = field(default_factory=set)

    def __bool__(self) -> bool:
        return self.whole or bool(self.names)

    def has(self, name: bytes) -> bool:
        """Whether a record is among them."""
        return self.whole or name in self.names

    def settle(self, names: Sequence[bytes] | None, *, removed: bool) -> bool:
        """These (None: all) were to be removed, and were or not. Returns whether that changes anything."""
        before = self.whole, len(self.names)
        if removed and names is None:
            self.whole = False
            self.names.clear()
        elif removed:
            self.names.difference_update(names or ())
        else:
            self.whole |= names is None
            self.names.update(names or ())
        return (self.whole, len(self.names)) != before

    def wanted(self) -> Sequence[bytes] | None:
        """What to have removed: None: all."""
        return None if self.whole else list(self.names)


@dataclass
class PurgeReport:
    """What a purge of one space came to.

    Attributes:
        host_blocks: blocks that are gone from host memory.
        cold_blocks: records of blocks that are gone from the cold tier.
        notes: notes that are gone from there.
        leased: slots that go when nobody leases them any more, or they are copied below no more.
        reserved: slots that go when they are written.
        cold_left: why records, or copies under way, may be left in the cold tier; None: there are none.
    """

    host_blocks: int = 0
    cold_blocks: int = 0
    notes: int = 0
    leased: HeldSlots = field(default_factory=lambda: HeldSlots(*_NO_SLOTS))
    reserved: HeldSlots = field(default_factory=lambda: HeldSlots(*_NO_SLOTS))
    cold_left: ColdStatus | None = None


class SpacePurges:
    """The purges of one space.

    Args:
        shared: what the space shares with others.
        records: its slots.
        space: its id.
        notes: the space of its notes; with others' where it has no tenant.
        block_bytes: bytes of a block.
        tenant: whose it is.
    """

    def __init__(
        self,
        shared: HostShared,
        records: SlotRecords,
        space: bytes,
        notes: bytes,
        block_bytes: int,
        tenant: Tenant,
    ) -> None:
        self._shared = shared
        self._records = records
        self._space = space
        self._notes = notes
        self._block_bytes = block_bytes
        self._tenant = tenant
        self._blocks = Barred()
        self._barred_notes = Barred()
        self._removing_notes = False
        """Whether the cold tier is being told to remove notes, once at a time: who puts one waits for it."""
        self._again_at = 0.0
        self._section: Section | None = None
        """Where it is written down what is barred."""

    @property
    def pending(self) -> bool:
        """Whether the cold tier was to remove something and did not yet."""
        return bool(self._blocks or self._barred_notes)

    def restore(self, section: Section) -> None:
        """Go on with what another process wrote down as barred; before any other call."""
        self._blocks, self._barred_notes = read_barred(section)
        self._section = section

    def run(self, hashes: Sequence[bytes] | None, notes: Sequence[bytes], until: float) -> PurgeReport:
        """Purge blocks and notes.

        Args:
            hashes: of these blocks; None: of all, and of all notes that are this space's alone.
            notes: names of notes.
            until: when to be done at the latest, by `time.monotonic`.
        """
        report = PurgeReport()
        for at in range(_MOST_ROUNDS):
            if not self._purge_host(hashes, report, until) and at:
                break
            if self._shared.cold.tier is None and not self._shared.cold.went:
                break
            # What was on its way up or down meanwhile may be there again: look once more.
            self._purge_cold(hashes, report, until)
        self._purge_notes(hashes, notes, report, until)
        with self._shared.lock():
            self._shared.stats.purged += report.host_blocks
            self._tenant.stats.purged += report.host_blocks
        return report

    def may_load(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """The leading ones of these that may be read from the cold tier. With the lock held."""
        if not self._blocks:
            return hashes
        return hashes[: next((at for at, name in enumerate(hashes) if self._blocks.has(name)), None)]

    def may_read_note(self, name: bytes) -> bool:
        """Whether a note may be read from the cold tier. With the lock held."""
        return not (self._barred_notes and self._barred_notes.has(self._note(name)))

    def may_put_note(self, name: bytes, until: float) -> bool:
        """Whether a note may be put: what was to be removed under its name is."""
        with self._shared.lock():
            if self.may_read_note(name):
                return True
            names = None if self._barred_notes.whole else [self._note(name)]
        self._remove_notes(names, PurgeReport(), until)
        with self._shared.lock():
            return self.may_read_note(name)

    def written(self, names: Sequence[bytes]) -> None:
        """Blocks of these names were written anew. With the lock held."""
        if self._blocks.names and self._blocks.settle(names, removed=True):
            self._write_down()

    def try_again(self) -> None:
        """Have the cold tier remove what it did not, if there is something and it is time."""
        shared = self._shared
        with shared.lock():
            if time.monotonic() < self._again_at:
                return
            blocks, notes = self._blocks.wanted(), self._barred_notes.wanted()
        self._purge_cold(blocks, PurgeReport(), time.monotonic() + shared.settings.cold_deadline)
        self._remove_notes(notes, PurgeReport(), time.monotonic() + shared.settings.cold_deadline)

    def remove_copies(self, names: Sequence[bytes]) -> None:
        """These were copied to the cold tier while they were purged."""
        self._purge_cold(names, PurgeReport(), time.monotonic() + self._shared.settings.cold_deadline)

    # Inside

    def _purge_host(self, hashes: Sequence[bytes] | None, report: PurgeReport, until: float) -> bool:
        """Whether there was anything."""
        shared, records = self._shared, self._records
        with shared.lock():
            shared.check_open()
            gone = records.purge(hashes)
            shared.post(EventKind.REMOVED, "host", self._space, gone.names)
            shared.changed.notify_all()
            generations = records.generations
            # A copy under way is removed when it is made, so it is waited for.
            while records.any_cleaning(gone.leased) and (left := until - time.monotonic()) > 0:
                shared.changed.wait(left)
                shared.check_open()
            left_over = records.purged(gone.leased)
            report.host_blocks += gone.freed + len(gone.leased) - len(left_over)
            # Each look tells of all that is held, whenever it was purged.
            report.leased = HeldSlots(left_over, generations[left_over])
            report.reserved = HeldSlots(gone.reserved, generations[gone.reserved])
            if records.any_cleaning(left_over):
                report.cold_left = ColdStatus.LATE
        return bool(gone.names)

    def _purge_cold(self, hashes: Sequence[bytes] | None, report: PurgeReport, until: float) -> None:
        shared = self._shared
        if hashes is not None and not hashes:
            return
        with shared.cold.use() as cold:
            if cold is not None:
                done = cold.purge(self._space, hashes, self._block_bytes, max(0.0, until - time.monotonic()))
            elif shared.cold.went:
                done = ColdPurge(0, ColdStatus.UNAVAILABLE)
            else:
                return
        report.cold_blocks += done.removed
        with shared.lock():
            self._settle(self._blocks, hashes, done.status, report)
            if hashes is not None and done.removed:
                shared.post(EventKind.REMOVED, "cold", self._space, hashes)
            if hashes is None:
                # Blocks that came meanwhile and were copied below have no copy there any more.
                self._records.in_cold[:] = False

    def _settle(
        self, barred: Barred, names: Sequence[bytes] | None, status: ColdStatus, report: PurgeReport
    ) -> None:
        """The cold tier was told to remove these (None: all), and answered. With the lock held."""
        removed = status == ColdStatus.OK
        if not removed:
            report.cold_left = status
            self._again_at = time.monotonic() + _AGAIN_SECONDS
        if barred.settle(names, removed=removed):
            self._write_down()

    def _write_down(self) -> None:
        """Write down what is barred, before what is no longer so goes. With the lock held.

        Raises:
            CapacityError, MemoryUnavailableError: there is no room for it.
        """
        records = self._shared.records
        if records is None:
            return
        old, self._section = self._section, None
        blocks, notes = self._blocks, self._barred_notes
        if blocks or notes:
            names = b"".join([*blocks.names, *notes.names])
            about = _BARRED.pack(self._space, blocks.whole, len(blocks.names), notes.whole, len(notes.names))
            specs = [ArraySpec(np.uint8, max(1, len(names)))]
            self._section = records.add(SectionKind.BARRED, about, specs)
            (array,) = self._section.arrays(specs)
            array[: len(names)] = np.frombuffer(names, np.uint8)
        if old is not None:
            records.remove(old)

    def _purge_notes(
        self, hashes: Sequence[bytes] | None, notes: Sequence[bytes], report: PurgeReport, until: float
    ) -> None:
        all_notes = hashes is None and self._tenant.name != ""
        self._remove_notes(None if all_notes else [self._note(name) for name in notes], report, until)

    def _remove_notes(self, names: Sequence[bytes] | None, report: PurgeReport, until: float) -> None:
        """Have the cold tier remove notes of these names; None: all that are this space's alone."""
        shared = self._shared
        if (shared.cold.tier is None and not shared.cold.went) or (names is not None and not names):
            return
        with shared.lock():
            while self._removing_notes and (left := until - time.monotonic()) > 0:
                shared.changed.wait(left)
                shared.check_open()
            if self._removing_notes:
                self._settle(self._barred_notes, names, ColdStatus.LATE, report)
                return
            self._removing_notes = True
        status = ColdStatus.UNAVAILABLE
        try:
            with shared.cold.use() as cold:
                if cold is not None:
                    seconds = max(0.0, until - time.monotonic())
                    done = cold.purge(self._notes, names, HASH_BYTES, seconds)
                    status = done.status
                    report.notes += done.removed
        finally:
            with shared.lock():
                self._removing_notes = False
                self._settle(self._barred_notes, names, status, report)
                shared.changed.notify_all()

    def _note(self, name: bytes) -> bytes:
        """What a note of the space is called in the cold tier."""
        return note_hash(self._space + name)


def read_barred(section: Section) -> tuple[Barred, Barred]:
    """What stands in a section about barred names: of blocks, and of notes.

    Raises:
        IntegrityError: it cannot be read.
    """
    if len(section.about) != _BARRED.size:
        raise IntegrityError("what a cold tier was to remove is described in another way")
    _, all_blocks, blocks, all_notes, notes = _BARRED.unpack(section.about)
    (array,) = section.arrays([ArraySpec(np.uint8, max(1, HASH_BYTES * (blocks + notes)))])
    data = array.tobytes()
    names = [data[at * HASH_BYTES : (at + 1) * HASH_BYTES] for at in range(blocks + notes)]
    return Barred(all_blocks, set(names[:blocks])), Barred(all_notes, set(names[blocks:]))
