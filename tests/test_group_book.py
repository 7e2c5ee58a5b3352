"""What is written down of client groups, and what of it is not believed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kvpager.api.group_book import ClaimArrays, GroupBook, claims_in
from kvpager.tiers.errors import CapacityError, IntegrityError
from kvpager.tiers.record_file import ArenaIdentity, RecordFile, SectionKind

GROUP, CLIENT, SPACE = b"g" * 16, b"c" * 16, b"s" * 16


@pytest.fixture
def records(tmp_path: Path) -> Iterator[RecordFile]:
    made = RecordFile.create(str(tmp_path / "records"), ArenaIdentity(1, 2, 2 << 20, 1 << 20))
    yield made
    made.close()


def test_the_next_sidecar_reads_what_this_one_wrote(records: RecordFile) -> None:
    book = GroupBook.begin(records, GROUP, 1000)
    for pid in range(1, 6):
        book.add_process(pid, 100 * pid)
    book.remove_process(3, 300)
    book.remove_process(4, 401)
    claims = book.add_claims(CLIENT, SPACE, 64)
    claims.leases[7] = 2
    claims.reserved[9] = True
    again = RecordFile.read(records.path)
    (section,) = again.sections(SectionKind.GROUP)
    read = GroupBook(again, section)
    assert (read.id, read.uid) == (GROUP, 1000)
    assert read.processes() == [(1, 100), (2, 200), (4, 400), (5, 500)]
    (section,) = again.sections(SectionKind.CLAIMS)
    named = claims_in(section)
    assert (named.group, named.client, named.space) == (GROUP, CLIENT, SPACE)
    held = ClaimArrays.recorded(section, 64)
    assert (held.leases.sum(), held.leases[7], np.flatnonzero(held.reserved).tolist()) == (2, 2, [9])
    again.close()
    book.remove_claims(claims)
    book.remove_claims(ClaimArrays.alone(64))
    book.end()
    again = RecordFile.read(records.path)
    assert again.sections(SectionKind.GROUP) == again.sections(SectionKind.CLAIMS) == []
    again.close()


def test_a_group_has_so_many_processes_and_no_more(records: RecordFile) -> None:
    book = GroupBook.begin(records, GROUP, 0)
    for pid in range(1, 1025):
        book.add_process(pid, 5)
    with pytest.raises(CapacityError, match="1024 processes"):
        book.add_process(2000, 5)
    book.remove_process(77, 5)
    book.add_process(2000, 5)
    assert len(book.processes()) == 1024


def test_what_is_damaged_is_not_believed(records: RecordFile) -> None:
    book = GroupBook.begin(records, GROUP, 0)
    book.add_process(1, 5)
    book._started[0] ^= 1
    with pytest.raises(IntegrityError, match="processes are damaged"):
        book.processes()
    claims = book.add_claims(CLIENT, SPACE, 64)
    assert claims.section is not None
    claims.leases[3] = -1
    with pytest.raises(IntegrityError, match="what a client holds are damaged"):
        ClaimArrays.recorded(claims.section, 64)
    claims.leases[3] = 0
    claims.reserved.view(np.uint8)[3] = 9
    with pytest.raises(IntegrityError, match="what a client holds are damaged"):
        ClaimArrays.recorded(claims.section, 64)
    with pytest.raises(IntegrityError, match="too short"):
        ClaimArrays.recorded(claims.section, 1 << 16)
    nameless = records.add(SectionKind.CLAIMS, b"", [])
    with pytest.raises(IntegrityError, match="what a client holds are damaged"):
        claims_in(nameless)
    with pytest.raises(IntegrityError, match="of a client group are damaged"):
        GroupBook(records, nameless)
