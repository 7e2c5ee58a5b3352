"""Records that outlive their process: sections of arrays in a file, and what is not believed."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kvpager.tiers import record_file
from kvpager.tiers.errors import CapacityError, IntegrityError, MemoryUnavailableError
from kvpager.tiers.record_file import (
    ArenaIdentity,
    ArraySpec,
    RecordFile,
    SectionKind,
    is_record_file,
)

ARENA = ArenaIdentity(3, 4, 8 << 20, 1 << 20)
SPECS = [ArraySpec(np.int64, 5), ArraySpec("V16", 3), ArraySpec(np.bool_, 1000)]
HEAD = 4096


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "arena.records")


@pytest.fixture
def file(path: str) -> Iterator[RecordFile]:
    made = RecordFile.create(path, ARENA)
    yield made
    made.close()


def test_what_is_written_is_read_by_the_next(file: RecordFile, path: str) -> None:
    for number in range(5):
        section = file.add(SectionKind.GROUP, bytes([number]) * number, SPECS)
        numbers, texts, flags = section.arrays(SPECS)
        assert not numbers.any()
        assert not flags.any()
        numbers[:] = number
        texts[2] = b"x" * 16
        flags[number] = True
    file.remove(file.sections(SectionKind.GROUP)[2])
    file.add(SectionKind.SPACE, b"space", [])
    again = RecordFile.read(path)
    assert again.identity == ARENA
    found = again.sections(SectionKind.GROUP)
    assert sorted(section.about for section in found) == [b"", b"\1", b"\3" * 3, b"\4" * 4]
    for section in found:
        numbers, texts, flags = section.arrays(SPECS)
        number = len(section.about)
        assert (numbers == number).all()
        assert bytes(texts[2]) == b"x" * 16
        assert np.flatnonzero(flags).tolist() == [number]
    assert [section.about for section in again.sections(SectionKind.SPACE)] == [b"space"]
    assert again.sections(SectionKind.CLAIMS) == []
    again.close()


@pytest.mark.parametrize("holes", [True, False])
def test_the_place_of_what_went_is_used_again_and_is_zeros(
    holes: bool, file: RecordFile, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not holes:
        monkeypatch.setattr(record_file, "_PUNCH_HOLE", 0xFFFF)
    first = file.add(SectionKind.CLAIMS, b"first", SPECS)
    file.add(SectionKind.CLAIMS, b"second", SPECS)
    size = os.stat(path).st_size
    for array in first.arrays(SPECS):
        array.view(np.uint8)[:] = 255
    file.remove(first)
    file.remove(first)
    third = file.add(SectionKind.CLAIMS, b"third", SPECS)
    assert os.stat(path).st_size == size
    for array in third.arrays(SPECS):
        assert not array.view(np.uint8).any()
    again = RecordFile.read(path)
    assert {section.about for section in again.sections(SectionKind.CLAIMS)} == {b"second", b"third"}
    again.close()


def test_arrays_outlive_the_file_and_what_is_too_much_is_refused(
    file: RecordFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = file.add(SectionKind.SPACE, b"", SPECS)
    (numbers, *_) = section.arrays(SPECS)
    with pytest.raises(IntegrityError, match="space records is too short"):
        section.arrays([ArraySpec(np.int64, 5000)])
    with pytest.raises(CapacityError, match="too long"):
        file.add(SectionKind.SPACE, bytes(5000), [])
    with pytest.raises(MemoryUnavailableError, match=r"need .* more"):
        file.add(SectionKind.SPACE, b"", [ArraySpec(np.int64, 1 << 45)])
    monkeypatch.setattr(record_file, "_MOST_SECTIONS", 1)
    file._table["kind"][1:] = 1
    with pytest.raises(CapacityError, match="1 sections"):
        file.add(SectionKind.SPACE, b"", [])
    file.close()
    file.close()
    numbers[:] = 3
    assert numbers.sum() == 15


def test_it_is_known_by_its_first_bytes(file: RecordFile, path: str, tmp_path: Path) -> None:
    assert is_record_file(path)
    other = tmp_path / "other"
    other.write_bytes(b"hello")
    assert not is_record_file(other)
    assert not is_record_file(tmp_path)
    assert not is_record_file(tmp_path / "absent")


def poke(path: str, at: int, data: bytes) -> None:
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, data, at)
    os.close(fd)


def header(path: str) -> bytes:
    return Path(path).read_bytes()[: record_file._HEADER.size]


@pytest.mark.parametrize(
    ("at", "data", "said"),
    [
        (0, b"something", "none of kvpager's"),
        (16, b"\1", "are of version 1, this is version 2"),
        (24, b"\0", "head of its records is damaged"),
        (HEAD, struct.pack("<I", 77), "an entry of the table"),
        (HEAD + 8, b"\1", "an entry of the table"),
    ],
)
def test_what_is_not_as_it_was_written_is_not_believed(
    at: int, data: bytes, said: str, file: RecordFile, path: str
) -> None:
    file.add(SectionKind.SPACE, b"about", SPECS)
    poke(path, at, data)
    with pytest.raises(IntegrityError, match=said):
        RecordFile.read(path)


def test_descriptions_and_places_are_checked(file: RecordFile, path: str) -> None:
    file.add(SectionKind.SPACE, b"about", SPECS)
    offset = int(file._table["offset"][0])
    poke(path, offset + 8, b"A")
    with pytest.raises(IntegrityError, match="description of a section"):
        RecordFile.read(path)
    poke(path, offset + 8, b"a")
    RecordFile.read(path).close()
    poke(path, offset, struct.pack("<I", 1 << 31))
    with pytest.raises(IntegrityError, match="description of a section"):
        RecordFile.read(path)
    for kind, place, nbytes in ((1, offset, 1 << 40), (1, 0, 8192), (1, offset + 1, 8192), (1, offset, 0)):
        crc = zlib.crc32(struct.pack("<IQQ", kind, place, nbytes))
        poke(path, HEAD, struct.pack("<IIQQ", kind, crc, place, nbytes))
        with pytest.raises(IntegrityError, match="lie over each other"):
            RecordFile.read(path)


def test_a_file_that_is_cut_or_absent_is_not_believed(file: RecordFile, path: str, tmp_path: Path) -> None:
    os.truncate(path, 5000)
    with pytest.raises(IntegrityError, match="cut short"):
        RecordFile.read(path)
    with pytest.raises(IntegrityError, match="cannot be read"):
        RecordFile.read(str(tmp_path / "absent"))


@pytest.mark.parametrize(
    ("here", "said"),
    [((b"b" * 16, None), "before this machine was started"), ((None, 5), "another pid namespace")],
)
def test_records_of_another_time_or_namespace_are_not_believed(
    here: tuple[bytes | None, int | None],
    said: str,
    file: RecordFile,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    boot, namespace = record_file._here()
    monkeypatch.setattr(record_file, "_here", lambda: (here[0] or boot, here[1] or namespace))
    with pytest.raises(IntegrityError, match=said):
        RecordFile.read(path)


def test_records_that_cannot_be_made_are_an_error_with_their_path(tmp_path: Path) -> None:
    with pytest.raises(MemoryUnavailableError, match=r"absent/records cannot be made: No such file"):
        RecordFile.create(str(tmp_path / "absent" / "records"), ARENA)
    assert list(tmp_path.iterdir()) == []
