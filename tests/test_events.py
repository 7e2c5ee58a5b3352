from __future__ import annotations

import logging

import pytest
from kvpager.kvstore.events import BlockEvent, EventKind, EventStream


def test_every_listener_hears_every_later_event_in_order() -> None:
    stream = EventStream()
    first: list[BlockEvent] = []
    second: list[BlockEvent] = []
    stream.subscribe(first.append)
    stream.emit(EventKind.STORED, "host", b"s", [b"a"])
    stream.subscribe(second.append)
    stream.emit(EventKind.REMOVED, "host", b"s", [b"a", b"b"])
    assert first == [
        BlockEvent(EventKind.STORED, "host", b"s", (b"a",)),
        BlockEvent(EventKind.REMOVED, "host", b"s", (b"a", b"b")),
    ]
    assert second == first[1:]


def test_who_unsubscribed_hears_no_more_and_may_do_so_twice() -> None:
    stream = EventStream()
    heard: list[BlockEvent] = []
    end = stream.subscribe(heard.append)
    end()
    end()
    stream.emit(EventKind.STORED, "device", b"s", [b"a"])
    assert heard == []


def test_an_event_of_no_blocks_is_none() -> None:
    stream = EventStream()
    heard: list[BlockEvent] = []
    stream.subscribe(heard.append)
    stream.emit(EventKind.STORED, "device", b"s", [])
    assert heard == []


def test_a_listener_that_fails_is_logged_and_the_others_still_hear(caplog: pytest.LogCaptureFixture) -> None:
    stream = EventStream()
    heard: list[BlockEvent] = []

    def fail(event: BlockEvent) -> None:
        raise RuntimeError("not today")

    stream.subscribe(fail)
    stream.subscribe(heard.append)
    with caplog.at_level(logging.ERROR):
        stream.emit(EventKind.STORED, "host", b"s", [b"a"])
    assert len(heard) == 1
    assert "a listener of block events failed" in caplog.text
    assert "not today" in caplog.text
