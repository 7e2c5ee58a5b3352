"""docs/protocol.md says of every message what the code does: its tag, its fields and how they travel."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from kvpager.api import listening, remote_access, service, sidecar, wire
from kvpager.api.connection import Limits
from kvpager.api.messages import MOST_HASHES, Flags, Hashes, Message, Statuses
from kvpager.api.remote_access import RemoteAccess
from kvpager.kvstore.handles import Generations, ReserveStatus
from kvpager.kvstore.policy import Ids
from kvpager.tests.wire_frames import MESSAGES
from kvpager.tiers.layout import KVLayout

PAGE = (Path(__file__).parents[1] / "docs" / "protocol.md").read_text()
ROWS = {
    name: (int(tag), written)
    for tag, name, written in re.findall(r"^\| (\d+) \| `(\w+)` \| (.*?) ?\| ", PAGE, flags=re.MULTILINE)
}
TYPES: dict[Any, str] = {
    int: "int",
    bool: "bool",
    str: "str",
    bytes: "bytes",
    float: "float",
    dict[str, Any]: "map",
    Hashes: "hashes",
    Ids: "int32[]",
    Generations: "int64[]",
    Statuses: "uint8[]",
    Flags: "bool[]",
}


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_stands_there_with_its_tag_and_fields(kind: type[Message]) -> None:
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    written = ", ".join(f"`{name}: {TYPES[hints[name]]}`" for name in names)
    assert ROWS[kind.__name__] == (kind.TAG, written)


def test_no_message_stands_there_that_the_code_does_not_have() -> None:
    assert set(ROWS) == {kind.__name__ for kind in MESSAGES}


def test_every_type_of_a_field_is_explained() -> None:
    table = PAGE.partition("| type | msgpack |")[2].partition("\n\n")[0]
    assert {name for name in re.findall(r"`([\w\[\]]+)`", table) if name != "bin"} >= set(TYPES.values())


def test_numbers_are_as_they_are_written() -> None:
    limits = Limits()
    assert f"version {wire.VERSION}." in PAGE
    assert f"`magic` is `{wire.MAGIC}`" in PAGE
    assert f"up to {limits.requests} requests that wait" in PAGE
    assert f"{limits.request_bytes >> 20} MiB, of one connection" in PAGE
    assert f"more than {limits.unread_bytes >> 20} MiB of its replies" in PAGE
    assert f"longer than {service.MOST_WAIT:g} seconds" in PAGE
    assert f"within {sidecar._HELLO_SECONDS:g} seconds" in PAGE
    assert f"{sidecar._MOST_HELLO:,} bytes long at most" in PAGE
    assert f"takes {RemoteAccess('127.0.0.1', 0, 't' * 16).max_clients} clients at a time over TCP" in PAGE
    assert f"for {remote_access._BROKEN_SECONDS} seconds, ends" in PAGE
    assert f"kvpager/{listening._SOCKET_NAME}" in PAGE
    assert f"{MOST_HASHES:,} of them at most" in PAGE
    kinds = wire._REQUEST, wire._REPLY, wire._FAILURE, wire._NOTICE
    for name, number in zip(("request", "reply", "failure", "notice"), kinds, strict=True):
        assert f"| {name} | `[{number}, " in PAGE
    assert [status.name for status in sorted(ReserveStatus)] == ["NEW", "PRESENT", "PENDING", "DENIED"]


@pytest.mark.parametrize(
    "layout", [KVLayout(2, 3, 64), KVLayout(1, 1, 5, 3, "uint8", planes=1), KVLayout(4, 2, 64, scale_bytes=7)]
)
def test_the_length_of_a_block_is_as_it_is_written(layout: KVLayout) -> None:
    used = layout.block_size * layout.head_dim * layout.item_bytes + layout.scale_bytes
    rounded = (used + 127) // 128 * 128
    assert layout.block_bytes == layout.num_layers * layout.planes * layout.num_kv_heads * rounded
