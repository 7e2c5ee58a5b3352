"""The cold record: framing, checks, seals and names."""

from __future__ import annotations

import builtins
import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpager.tiers.errors import ConfigError
from kvpager.tiers.record import (
    DEFAULT_VALUE_BYTES,
    HEADER_BYTES,
    Part,
    RecordCodec,
    Verdict,
    check_key,
    note_hash,
)

SPACE = bytes(range(16))
HASH = bytes(range(16, 32))
SECRET = "a secret of more than sixteen bytes"


def _stored(codec: RecordCodec, payload: bytes, part: Part | None = None) -> tuple[Part, bytearray]:
    part = part or codec.split(SPACE, HASH, len(payload))[0]
    header, body = codec.encode(part, memoryview(payload), codec.new_write_id())
    return part, bytearray(header + bytes(body))


def _verdict(codec: RecordCodec, part: Part, stored: bytearray) -> tuple[Verdict, bytes]:
    body = stored[HEADER_BYTES:]
    verdict, _ = codec.decode(part, stored[:HEADER_BYTES], memoryview(body))
    return verdict, bytes(body)


@pytest.fixture(scope="module", params=[None, SECRET], ids=["plain", "sealed"])
def codec(request: pytest.FixtureRequest) -> RecordCodec:
    if request.param is not None:
        pytest.importorskip("cryptography", reason="sealing needs the extra seal")
    return RecordCodec(request.param)


def test_a_record_comes_back_as_it_was_written(codec: RecordCodec) -> None:
    for size in (0, 1, 63, 4096, 1_000_003):
        payload = os.urandom(size)
        part, stored = _stored(codec, payload)
        assert len(stored) == HEADER_BYTES + size
        assert _verdict(codec, part, stored) == (Verdict.OK, payload)


def test_every_flipped_bit_is_found(codec: RecordCodec) -> None:
    part, stored = _stored(codec, os.urandom(40))
    for bit in range(len(stored) * 8):
        altered = bytearray(stored)
        altered[bit // 8] ^= 1 << bit % 8
        verdict, _ = _verdict(codec, part, altered)
        # The magic and the version tell whose record it is; with another it is not ours to judge.
        assert verdict is (Verdict.FOREIGN if bit < 48 else Verdict.BROKEN), bit


def test_a_sound_record_of_something_else_is_foreign(codec: RecordCodec) -> None:
    part, stored = _stored(codec, os.urandom(100))
    others = [
        part._replace(space=HASH),
        part._replace(prefix_hash=SPACE),
        part._replace(total=101),
        part._replace(number=1),
        part._replace(parts=2),
    ]
    for other in others:
        assert _verdict(codec, other, bytearray(stored))[0] is Verdict.FOREIGN


def test_a_size_that_does_not_match_the_header_is_broken_and_one_that_does_is_foreign(
    codec: RecordCodec,
) -> None:
    _, stored = _stored(codec, bytes(100))
    header = stored[:HEADER_BYTES]
    assert codec.judge_size(header, len(stored)) is Verdict.FOREIGN
    assert codec.judge_size(header, len(stored) - 1) is Verdict.BROKEN
    assert codec.judge_size(header[:50], 50) is Verdict.BROKEN
    assert codec.judge_size(b"", 0) is Verdict.FOREIGN
    assert codec.judge_size(b"somebody else's value", 21) is Verdict.FOREIGN


def test_sealed_payloads_are_not_readable_and_no_two_seals_are_equal() -> None:
    pytest.importorskip("cryptography", reason="sealing needs the extra seal")
    codec = RecordCodec(SECRET)
    payload = b"the user's prompt " * 100
    one, two = (bytes(_stored(codec, payload)[1]) for _ in range(2))
    assert b"prompt" not in one
    assert one[HEADER_BYTES:] != two[HEADER_BYTES:]


def test_key_ids_part_secrets_and_value_sizes() -> None:
    pytest.importorskip("cryptography", reason="sealing needs the extra seal")
    ids = {
        RecordCodec().key_id,
        RecordCodec(SECRET).key_id,
        RecordCodec(SECRET + "!").key_id,
        RecordCodec(value_bytes=1 << 20).key_id,
    }
    assert len(ids) == 4
    assert RecordCodec(SECRET.encode()).key_id == RecordCodec(SECRET).key_id


def test_a_record_sealed_with_another_secret_is_broken() -> None:
    pytest.importorskip("cryptography", reason="sealing needs the extra seal")
    part, stored = _stored(RecordCodec(SECRET), bytes(100))
    assert _verdict(RecordCodec(SECRET + "!"), part, stored)[0] is Verdict.BROKEN
    part, stored = _stored(RecordCodec(SECRET), bytes(100))
    assert _verdict(RecordCodec(), part, stored)[0] is Verdict.BROKEN


@given(size=st.integers(0, 1 << 20), value_bytes=st.integers(160, 70_000))
def test_parts_cover_the_payload_and_fit_their_values(size: int, value_bytes: int) -> None:
    codec = RecordCodec(value_bytes=value_bytes)
    parts = codec.split(SPACE, HASH, size)
    assert len(parts) == codec.part_count(size)
    assert parts[0].start == 0
    assert parts[-1].stop == size
    assert all(a.stop == b.start for a, b in itertools.pairwise(parts))
    assert all(0 <= part.size <= value_bytes - HEADER_BYTES for part in parts)
    assert [part.number for part in parts] == list(range(len(parts)))


def test_a_32_mib_block_is_cut_into_nine_values_of_at_most_4_mib() -> None:
    parts = RecordCodec().split(SPACE, HASH, 32 << 20)
    assert len(parts) == 9
    assert max(part.size for part in parts) + HEADER_BYTES <= DEFAULT_VALUE_BYTES


def test_key_names_and_headers_are_the_same_in_every_process() -> None:
    script = (
        "import sys; from kvpager.tiers.record import *; c = RecordCodec();"
        f"p = c.split({SPACE!r}, {HASH!r}, 5)[0];"
        f"print(c.key({SPACE!r}, {HASH!r}).decode(), c.encode(p, memoryview(b'12345'), 7)[0].hex(),"
        "note_hash(b'a').hex())"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1
    key, header, _ = said.pop().split()
    # Test vectors: what one version writes, its later releases must find.
    assert key == (
        "kvp:1:"
        + RecordCodec().key_id
        + ":{000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f}"
    )
    assert header == (
        "4b56505201000000050000000000000005000000000001000700000000000000"
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
        "00000000000000000000000000000000a3a2700e4a9e66113136a6a7640a5674"
    )


def test_names_of_notes_and_keys_have_16_bytes() -> None:
    assert len(note_hash(b"session-1")) == 16
    check_key(SPACE, [HASH])
    with pytest.raises(ConfigError, match="space"):
        check_key(b"short", [])
    with pytest.raises(ConfigError, match="hashes"):
        check_key(SPACE, [HASH, b"short"])


def test_a_short_secret_or_a_wrong_value_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cold\.secret: must be at least 16 bytes"):
        RecordCodec("short")
    for size in (0, 100, 1 << 32):
        with pytest.raises(ConfigError, match=r"cold\.value_bytes"):
            RecordCodec(value_bytes=size)
    with pytest.raises(ConfigError, match="too small for payloads"):
        RecordCodec(value_bytes=160).split(SPACE, HASH, 1 << 30)


def test_a_secret_without_the_package_that_seals_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"cold\.secret: needs the package cryptography"):
        RecordCodec(SECRET)
