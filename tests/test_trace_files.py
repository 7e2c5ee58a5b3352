"""Files of traces: read as they are written, and what is wrong with one told by its line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from kvpager.kvstore.chat_traces import ChatTraffic, chat_trace
from kvpager.kvstore.trace import mixed
from kvpager.kvstore.trace_files import read_trace, write_mooncake
from kvpager.tests.trace_files import conversation_trace
from kvpager.tiers.errors import ConfigError, KVPagerError

REQUEST = {"timestamp": 1500, "input_length": 1025, "output_length": 3, "hash_ids": [4, 9, 2]}
HEAD = {"kvpager_trace": 1, "started": 0.0}
SPACE = {"space": 0, "block_size": 16, "block_bytes": 4096}


def written(folder: Path, *lines: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def name(number: int) -> str:
    return f"{number:016x}"


def test_requests_are_read_in_the_order_of_their_times(tmp_path: Path) -> None:
    later = {**REQUEST, "timestamp": 4500, "input_length": 512, "hash_ids": [4]}
    trace = read_trace(written(tmp_path, later, "", REQUEST))
    assert trace.block_size == 512
    assert trace.block_bytes is None
    assert trace.times.tolist() == [0.0, 3.0]
    assert trace.tokens.tolist() == [1025, 512]
    assert trace.asked.tolist() == trace.filled.tolist() == [3, 1]
    assert trace.names[trace.chain(0)].tolist() == mixed(np.array([4, 9, 2], np.uint64)).tolist()
    assert trace.chain(1).tolist() == trace.chain(0)[:1].tolist()
    assert trace.depths[trace.chain(0)].tolist() == [1, 2, 3]
    assert trace.parents[trace.chain(0)].tolist() == [0, *trace.names[trace.chain(0)[:2]].tolist()]
    assert (trace.references, trace.distinct, trace.prompt_tokens, trace.seconds) == (4, 3, 1537, 3.0)
    assert trace.hit_tokens(np.array([3, 1], np.int32)).tolist() == [1025, 512]


def test_the_conversation_trace_is_read_whole() -> None:
    trace = read_trace(conversation_trace())
    assert (len(trace), trace.references, trace.distinct) == (12031, 288500, 182790)


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
def test_a_trace_that_was_made_is_the_same_when_it_is_read(tmp_path: Path, ending: str) -> None:
    made = chat_trace(ChatTraffic(sessions=20), 1)
    path = tmp_path / f"chats.{ending}"
    write_mooncake(made, path)
    read = read_trace(path, block_size=made.block_size)
    assert read.times == pytest.approx(made.times, abs=0.002)
    assert read.tokens.tolist() == made.tokens.tolist()
    # Blocks have other numbers, and are the same ones where they were.
    renamed = dict(zip(made.blocks.tolist(), read.blocks.tolist(), strict=True))
    assert [renamed[block] for block in made.blocks.tolist()] == read.blocks.tolist()
    assert len(set(renamed.values())) == made.distinct


def test_numbers_become_names_that_are_all_different() -> None:
    names = mixed(np.arange(100_000, dtype=np.uint64))
    assert len(np.unique(names)) == len(names)
    assert (names > 0).all()
    # They look random: of each bit about half are set.
    ones = [int((names >> np.uint64(bit) & np.uint64(1)).sum()) for bit in range(64)]
    assert 48_000 < min(ones) <= max(ones) < 52_000


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "is no JSON: "),
        ("[" * 100_000, "is nested too deep"),
        ("[1]", r"must be a JSON object, got \[1\]"),
        ({**REQUEST, "timestamp": "now"}, "timestamp must be a number, got 'now'"),
        ({**REQUEST, "timestamp": True}, "timestamp must be a number, got True"),
        ({**REQUEST, "timestamp": 10**400}, "timestamp must be a number, got an integer of 1329 bits"),
        ({**REQUEST, "input_length": -1}, "input_length must be an integer from 0 to 2147483647, got -1"),
        ({"timestamp": 0, "input_length": 9}, "hash_ids must be a list of integers from 0 to "),
        (
            {**REQUEST, "hash_ids": [1, 2, 1 << 63]},
            r"hash_ids must be a list of integers from 0 to 2\^63 - 1",
        ),
        ({**REQUEST, "hash_ids": [1, 2.5]}, "hash_ids must be a list of integers"),
        ({**REQUEST, "hash_ids": [1, 2, 1]}, "hash_ids names a block twice"),
        (
            {**REQUEST, "hash_ids": [1, 2, 3, 4]},
            "hash_ids names 4 blocks of 512 tokens, input_length is 1025",
        ),
    ],
)
def test_a_request_that_is_none_is_told_by_its_line(tmp_path: Path, line: object, problem: str) -> None:
    path = written(tmp_path, REQUEST, line)
    with pytest.raises(ConfigError, match=f"^trace: {path}, line 2: {problem}"):
        read_trace(path)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"t": 1.0, "space": 1, "match": name(5), "found": 0, "depth": 1}, "is of space 1, which no line"),
        ({"t": 1.0, "space": 0, "match": "xyz", "found": 0, "depth": 1}, "match must be names of 16 hex"),
        ({"t": 1.0, "space": 0, "match": "abcd", "found": 0, "depth": 1}, "match must be names of 16 hex"),
        ({"t": 1.0, "space": 0, "match": name(5), "found": 2, "depth": 1}, "found 2 of 1 blocks"),
        ({"t": 1.0, "space": 0, "put": name(5) * 2, "depth": 1}, "put names a block twice"),
        ({"t": 1.0, "space": 0, "put": name(5)}, "depth must be an integer"),
        (
            {"t": 1.0, "space": 0, "put": name(5), "depth": 3, "parent": name(1) + name(2)},
            "parent names several",
        ),
        ({"space": 1, "block_size": 0, "block_bytes": 1}, "block_size must be an integer from 1"),
        ({"t": 1.0, "dance": 1}, "says nothing that is known"),
    ],
)
def test_an_event_that_is_none_is_told_by_its_line(tmp_path: Path, line: object, problem: str) -> None:
    path = written(tmp_path, HEAD, SPACE, line)
    with pytest.raises(ConfigError, match=f"^trace: {path}, line 3: {problem}"):
        read_trace(path)


def test_what_is_put_after_a_look_up_belongs_to_it(tmp_path: Path) -> None:
    asked = "".join(map(name, (1, 2, 3, 4)))
    trace = read_trace(
        written(
            tmp_path,
            HEAD,
            SPACE,
            {"t": 1.0, "space": 0, "match": asked, "found": 1, "depth": 1},
            {"t": 1.5, "space": 0, "put": name(2) + name(3), "depth": 2, "parent": name(1)},
            {"t": 2.0, "lost": 3},
            {"t": 2.0, "space": 0, "put": name(4) + name(5), "depth": 4, "parent": name(3)},
            {"t": 3.0, "space": 0, "put": name(9), "depth": 0},
            {"t": 3.0, "full": 100},
        )
    )
    assert (trace.block_size, trace.block_bytes) == (16, 4096)
    assert trace.asked.tolist() == [4, 0, 0]
    assert trace.filled.tolist() == [4, 1, 1]
    assert trace.tokens.tolist() == [64, 16, 16]
    assert trace.times.tolist() == [0.0, 1.0, 2.0]
    assert trace.names.tolist() == [1, 2, 3, 4, 5, 9]
    assert trace.parents.tolist() == [0, 1, 2, 3, 4, 0]
    assert trace.depths.tolist() == [1, 2, 3, 4, 5, 0]


def test_a_log_of_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 1: is of version 2, and 1 can be read"):
        read_trace(written(tmp_path, {"kvpager_trace": 2}))


def test_a_log_with_blocks_of_several_sizes_is_read_one_space_at_a_time(tmp_path: Path) -> None:
    other = {"space": 3, "block_size": 32, "block_bytes": 8192}
    looked_up = [{"t": at, "space": at, "match": name(at + 1), "found": 0, "depth": 1} for at in (0, 3)]
    path = written(tmp_path, HEAD, SPACE, other, *looked_up)
    spaces = r"has 0 \(blocks of 16 tokens, 4.0 KiB\), 3 \(blocks of 32 tokens, 8.0 KiB\)"
    with pytest.raises(ConfigError, match=f"^space: is to be said, as blocks of different sizes .* {spaces}"):
        read_trace(path)
    with pytest.raises(ConfigError, match=f"^space: must be one of the log's, got 1: .* {spaces}"):
        read_trace(path, space=1)
    for space, size, nbytes in ((0, 16, 4096), (3, 32, 8192)):
        trace = read_trace(path, space=space)
        assert (trace.block_size, trace.block_bytes, trace.tokens.tolist()) == (size, nbytes, [size])
        assert trace.names.tolist() == [space + 1]
    with pytest.raises(ConfigError, match=r"block_size: .* says itself"):
        read_trace(path, block_size=16)
    with pytest.raises(ConfigError, match="space: is of a log that kvpager serve --trace wrote"):
        read_trace(written(tmp_path, REQUEST), space=0)


def looked_up(kind: str, at: float, numbers: Sequence[int], found: int, depth: int = 1) -> dict[str, object]:
    return {"t": at, "space": 0, kind: "".join(map(name, numbers)), "found": found, "depth": depth}


@pytest.mark.parametrize(
    ("lines", "asked", "filled"),
    [
        # An engine loads what its match did not find, named from the prompt's beginning or from there on.
        ([looked_up("match", 1, (1, 2, 3, 4), 1), looked_up("load", 2, (1, 2, 3), 3)], [4], [3]),
        ([looked_up("match", 1, (1, 2, 3, 4), 1), looked_up("load", 2, (2, 3, 4, 5), 2, 2)], [5], [3]),
        # Or matches what was loaded ahead.
        ([looked_up("load", 1, (1, 2, 3), 2, 0), looked_up("match", 2, (1, 2, 3, 4), 2)], [4], [2]),
        # Other requests for the same blocks are others.
        ([looked_up("load", 1, (1, 2), 1), looked_up("load", 2, (1, 2), 1)], [2, 2], [1, 1]),
        ([looked_up("match", 1, (1, 2), 1), looked_up("load", 99, (1, 2), 1)], [2, 2], [1, 1]),
        ([looked_up("match", 1, (1, 2), 2), looked_up("load", 2, (1, 2), 2)], [2, 2], [2, 2]),
        ([looked_up("match", 1, (1, 2), 1), looked_up("load", 2, (1, 3), 1)], [2, 2], [1, 1]),
        (
            [
                looked_up("match", 1, (1, 2), 0),
                {"t": 2.0, "space": 0, "put": name(1) + name(2), "depth": 1},
                looked_up("load", 3, (1, 2), 2),
            ],
            [2, 2],
            [2, 2],
        ),
    ],
)
def test_a_match_and_a_load_of_one_request_are_one_look_up(
    tmp_path: Path, lines: list[object], asked: list[int], filled: list[int]
) -> None:
    trace = read_trace(written(tmp_path, HEAD, SPACE, *lines))
    assert trace.asked.tolist() == asked
    assert trace.filled.tolist() == filled
    assert trace.tokens.tolist() == [16 * count for count in asked]
    assert trace.depths.tolist()[:2] == [1, 2]


def test_what_is_put_after_a_load_belongs_to_its_look_up(tmp_path: Path) -> None:
    lines = [
        looked_up("match", 1, (1, 2, 3), 0),
        looked_up("load", 2, (1, 2, 3), 2),
        {"t": 3.0, "space": 0, "put": name(3) + name(4), "depth": 0},
    ]
    trace = read_trace(written(tmp_path, HEAD, SPACE, *lines))
    assert trace.asked.tolist() == [3, 0]
    assert trace.filled.tolist() == [3, 1]


def test_a_file_that_is_cut_off_is_read_up_to_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = b"".join(json.dumps({**REQUEST, "timestamp": at}).encode() + b"\n" for at in range(2000))
    zipped = gzip.compress(text)
    for name, part in (("plain", text[: len(text) // 2 + 9]), ("zipped", zipped[: len(zipped) // 2])):
        (tmp_path / name).write_bytes(part)
        assert 500 < len(read_trace(tmp_path / name)) < 1500
        assert f"{tmp_path / name} is cut off " in caplog.text


def test_a_zipped_file_that_is_damaged_is_told(tmp_path: Path) -> None:
    zipped = bytearray(gzip.compress(b"".join(json.dumps(REQUEST).encode() + b"\n" for _ in range(2000))))
    zipped[20:60] = b"\xff" * 40
    (tmp_path / "damaged").write_bytes(zipped)
    with pytest.raises(ConfigError, match=r"^trace: .*damaged is damaged after line 0: "):
        read_trace(tmp_path / "damaged")


def test_files_that_cannot_be_read_or_written_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace: .* cannot be read: No such file"):
        read_trace(tmp_path / "none")
    with pytest.raises(ConfigError, match="is empty"):
        read_trace(written(tmp_path))
    with pytest.raises(KVPagerError, match="cannot be written: "):
        write_mooncake(chat_trace(ChatTraffic(sessions=1)), tmp_path / "none" / "file")
