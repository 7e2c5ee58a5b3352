"""The wire protocol: every message and error comes out as it went in, and nothing else comes out at all."""

from __future__ import annotations

import json
import struct
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpager.api import messages
from kvpager.api.messages import (
    MOST_HASHES,
    Count,
    Done,
    GetStats,
    Marks,
    Match,
    Message,
    fields_of,
    message_of,
)
from kvpager.api.wire import MAX_FRAME, Failure, Frame, FrameReader, Notice, Reply, Request, encode
from kvpager.tests.frame_strategies import ANY_FRAME, IDS, values_of
from kvpager.tests.wire_frames import MESSAGES, PATH, error_of_each_class, frames, written
from kvpager.tiers import errors
from kvpager.tiers.errors import ConfigError, KVPagerError, ProtocolError


def same(one: Any, other: Any) -> bool:
    """Equal in values and types, arrays as well."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and np.array_equal(one, other))
    if isinstance(one, KVPagerError):
        return bool(one.args == other.args and vars(one) == vars(other))
    if is_dataclass(one):
        return all(same(getattr(one, item.name), getattr(other, item.name)) for item in fields(one))
    return bool(one == other)


def decode(data: bytes) -> Frame:
    reader = FrameReader()
    (frame,) = reader.feed(data)
    assert reader.held == 0
    return frame


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_comes_out_as_it_went_in(kind: type[Message]) -> None:
    @settings(max_examples=30, deadline=None)
    @given(values_of(kind), IDS)
    def check(message: Message, number: int) -> None:
        for frame in (Request(number, message), Reply(number, message), Notice(message)):
            assert same(decode(encode(frame)), frame)

    check()


@settings(max_examples=100, deadline=None)
@given(st.lists(ANY_FRAME, max_size=6), st.lists(st.integers(0, 400), max_size=12))
def test_frames_may_come_in_pieces_of_any_size(sent: list[Frame], cuts: list[int]) -> None:
    data = b"".join(map(encode, sent))
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    reader, got = FrameReader(), []
    for start, stop in pairwise(places):
        got += reader.feed(memoryview(data)[start:stop])
        assert reader.held <= len(data)
    assert len(got) == len(sent)
    assert all(map(same, got, sent))
    assert reader.held == 0


def test_one_byte_at_a_time_makes_the_same_frames() -> None:
    sent = list(frames().values())
    reader, got = FrameReader(), []
    for byte in b"".join(map(encode, sent)):
        got += reader.feed(bytes([byte]))
    assert len(got) == len(sent)
    assert all(map(same, got, sent))


@pytest.mark.parametrize("error", error_of_each_class(), ids=lambda error: type(error).__name__)
def test_every_error_travels_as_itself(error: KVPagerError) -> None:
    got = decode(encode(Failure(3, error)))
    assert same(got, Failure(3, error))
    assert isinstance(got, Failure)
    assert str(got.error) == str(error)


def test_an_error_that_is_not_known_travels_as_the_base_of_all() -> None:
    class NewError(ConfigError):
        pass

    got = decode(encode(Failure(3, NewError("a", "b"))))
    assert isinstance(got, Failure)
    assert type(got.error) is KVPagerError
    assert str(got.error) == "a: b"
    newer = msgpack.packb((2, 3, "ErrorOfTomorrow", ["what it says"]))
    got = decode(struct.pack("<I", len(newer)) + newer)
    assert same(got, Failure(3, KVPagerError("what it says")))


@pytest.mark.parametrize("name", ["KVPagerError", "errors", "__all__", "annotations"])
def test_only_names_of_errors_make_errors(name: str) -> None:
    body = msgpack.packb((2, 3, name, ["x"]))
    got = decode(struct.pack("<I", len(body)) + body)
    assert isinstance(got, Failure)
    assert type(got.error) is KVPagerError


def test_a_frame_that_is_too_long_is_neither_sent_nor_taken() -> None:
    frame = Request(1, Match(0, (bytes(16),) * 100, 0.0))
    with pytest.raises(ProtocolError, match="longer than the 1000"):
        encode(frame, max_frame=1000)
    reader = FrameReader(1000)
    with pytest.raises(ProtocolError, match="1000 are taken"):
        reader.feed(encode(frame)[:4])  # told by the length alone
    with pytest.raises(ProtocolError, match=str(MAX_FRAME)):
        FrameReader().feed(struct.pack("<I", MAX_FRAME + 1))
    length = len(encode(frame)) - 4
    assert len(encode(frame, max_frame=length)) == length + 4
    assert len(FrameReader(length).feed(encode(frame))) == 1


def test_more_hashes_than_one_message_may_have_are_neither_sent_nor_taken() -> None:
    with pytest.raises(ProtocolError, match="1048577 hashes were to go"):
        encode(Request(1, Match(0, (bytes(16),) * (MOST_HASHES + 1), 0.0)))
    with pytest.raises(ProtocolError, match="1048577 hashes came"):
        FrameReader().feed(framed((0, 1, Match.TAG, [0, bytes(16 * (MOST_HASHES + 1)), 0.0])))
    assert len(FrameReader().feed(framed((0, 1, Match.TAG, [0, bytes(16 * MOST_HASHES), 0.0])))) == 1


def framed(body: Any) -> bytes:
    data = body if isinstance(body, bytes) else msgpack.packb(body, use_bin_type=True)
    return struct.pack("<I", len(data)) + data


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x94\x00",
        bytes(1000),
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\xa4\xff\xff\xff\xff",
        msgpack.packb((0, 1, Done.TAG, [])) + b"\x00",
        7,
        [],
        {},
        {"kind": 0},
        (0, 1, Done.TAG),
        (0, 1, Done.TAG, [], 5),
        (9, 1, Done.TAG, []),
        ("0", 1, Done.TAG, []),
        (0, -1, Done.TAG, []),
        (0, 2**63, Done.TAG, []),
        (0, 1.5, Done.TAG, []),
        (0, True, Done.TAG, []),
        (0, None, Done.TAG, []),
        (0, 1, 9999, []),
        (0, 1, "3", []),
        (0, 1, True, []),
        (0, 1, Done.TAG, {}),
        (0, 1, Done.TAG, None),
        (0, 1, Count.TAG, []),
        (0, 1, Count.TAG, ["1"]),
        (0, 1, Count.TAG, [1.0]),
        (0, 1, Count.TAG, [True]),
        (0, 1, Match.TAG, [0, b"fifteen bytes..", 0.0]),
        (0, 1, Match.TAG, [0, "sixteen bytes...", 0.0]),
        (0, 1, Match.TAG, [0, [bytes(16)], 0.0]),
        (0, 1, Match.TAG, [0, bytes(16), "0"]),
        (0, 1, Match.TAG, [0, bytes(16), True]),
        (1, 1, Marks.TAG, [[1, 0]]),
        (2, 1, 5, ["x"]),
        (2, 1, "KVPagerError", "x"),
        (2, 1, "KVPagerError", [1]),
        (2, 1, "ConfigError", ["only one"]),
        (2, 1, "ConfigError", []),
        (2, -1, "KVPagerError", ["x"]),
        (0, 1, Count.TAG, [msgpack.ExtType(5, b"x")]),
        msgpack.ExtType(5, b"x"),
        msgpack.Timestamp(1, 2),
    ],
    ids=lambda body: repr(body)[:40],
)
def test_what_is_no_frame_is_a_protocol_error(body: Any) -> None:
    with pytest.raises(ProtocolError):
        FrameReader().feed(framed(body))


@pytest.mark.parametrize("kind", [kind for kind in MESSAGES if fields(kind)], ids=lambda kind: kind.__name__)  # type: ignore[arg-type]
def test_fields_of_another_type_and_too_few_are_refused_and_more_are_not(kind: type[Message]) -> None:
    frame = next(
        one for one in frames().values() if not isinstance(one, Failure) and type(one.message) is kind
    )
    assert not isinstance(frame, Failure)
    packed = tuple(tuple(value) if isinstance(value, list) else value for value in fields_of(frame.message))
    assert same(message_of(kind.TAG, (*packed, "a field of tomorrow", 5)), frame.message)
    needed = [one for one in fields(kind) if one.default is MISSING is one.default_factory]  # type: ignore[arg-type]
    for count in range(len(packed)):
        if count < len(needed):
            with pytest.raises(ProtocolError, match="fields"):
                message_of(kind.TAG, packed[:count])
        else:
            short = kind(*list(vars(frame.message).values())[:count])
            assert same(message_of(kind.TAG, packed[:count]), short)
    for at in range(len(packed)):
        for wrong in (None, (), object()):
            with pytest.raises(ProtocolError):
                message_of(kind.TAG, (*packed[:at], wrong, *packed[at + 1 :]))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_junk_is_a_protocol_error_or_waits_for_more(data: bytes) -> None:
    reader = FrameReader(1 << 16)
    try:
        reader.feed(data)
    except ProtocolError:
        return
    assert reader.held <= len(data)


@settings(max_examples=200, deadline=None)
@given(ANY_FRAME, st.data())
def test_a_frame_that_is_cut_or_changed_is_never_anything_but_a_frame_or_an_error(
    frame: Frame, data: st.DataObject
) -> None:
    body = bytearray(encode(frame)[4:])
    if data.draw(st.booleans()):
        del body[data.draw(st.integers(0, len(body) - 1)) :]
    else:
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        (got,) = FrameReader().feed(framed(bytes(body)))
    except ProtocolError:
        return
    # The protocol takes it for a frame: so it is one that it writes.
    assert len(FrameReader().feed(encode(got))) == 1


def test_a_frame_that_has_not_come_whole_is_held_and_no_more() -> None:
    data = encode(Request(1, GetStats()))
    reader = FrameReader()
    assert reader.feed(data[:-1]) == []
    assert reader.held == len(data) - 1
    assert len(reader.feed(data[-1:] + data * 3 + data[:2])) == 4
    assert reader.held == 2


def test_tags_are_told_apart_and_every_message_has_one() -> None:
    assert len({kind.TAG for kind in MESSAGES}) == len(MESSAGES) >= 31
    with pytest.raises(TypeError, match="Done"):
        messages.tagged(Done.TAG)(Count)


# The recorded frames

RECORDED: dict[str, dict[str, Any]] = json.loads(PATH.read_text())


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_frame_is_written_and_read_as_it_was(name: str) -> None:
    recorded, frame = RECORDED[name], frames()[name]
    data = bytes.fromhex(recorded["bytes"])
    assert encode(frame) == data
    assert same(decode(data), frame)
    assert written(frame) == recorded


def test_every_message_and_every_error_is_recorded() -> None:
    assert set(frames()) == set(RECORDED)
    assert {one["message"] for one in RECORDED.values() if "message" in one} == {
        kind.__name__ for kind in MESSAGES
    }
    assert {one["error"] for one in RECORDED.values() if "error" in one} == set(errors.__all__)
