"""A log of what a host store was asked for and given, which `kvpager simulate` replays.

A file of JSON lines, gzipped if its name ends with ``.gz``. The first has the format's version; one
describes each space before its first event; then come the events, ``t`` seconds after the log began:

    {"kvpager_trace": 1, "started": 1764547200.0}
    {"space": 0, "block_size": 16, "block_bytes": 2097152}
    {"t": 0.5, "space": 0, "match": "5f0c9a...", "found": 2, "depth": 1}
    {"t": 0.6, "space": 0, "load": "5f0c9a...", "found": 2, "depth": 1}
    {"t": 0.9, "space": 0, "put": "17e1b0...", "depth": 3, "parent": "5f0c9a..."}

``match``, ``load`` and ``put`` are names of blocks that follow each other, 16 hex digits each; ``found`` is
how many leading ones were there, of a load with what came up from the cold tier: it is told when it ends, and
``t`` is when it began. ``depth`` is the 1-based place of the first one in its chain (0: not known),
``parent`` the name before it. ``{"t": ..., "lost": n}`` says that n events are missing there, ``{"t": ...,
"full": bytes}`` that nothing follows.

Names are keyed hashes of the blocks' own, under a key that is made for each log and kept nowhere: who has
the log learns which prompts begin alike, and cannot tell whether one that he knows is among them.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Final, TextIO

import numpy as np
import numpy.typing as npt

from ..tiers.errors import ConfigError
from ..tiers.layout import KVLayout
from ..tiers.settings import expect_integer, expect_path
from .lineage import ChainPlace, ShortHashes, shortened
from .siphash import KEY_BYTES, siphash

__all__ = ["LOG_KEY", "LOG_VERSION", "MOST_TRACE_BYTES", "TraceLog"]

_log = logging.getLogger(__name__)

LOG_KEY: Final = "kvpager_trace"
"""The key of a log's first line, with its version."""
LOG_VERSION: Final = 1
MOST_TRACE_BYTES: Final = 1 << 30
"""Where a log ends if nobody says otherwise."""
_LEAST_BYTES: Final = 1 << 16
_NAME_BYTES: Final = 8
_MOST_WAITING: Final = 1 << 20
"""Blocks that may wait for the thread that writes, which names millions a second; what is beyond is lost."""
_IDLE_SECONDS: Final = 1.0
_GATHER_SECONDS: Final = 0.05
"""For how long events are gathered before they are written together."""


@dataclass(frozen=True, eq=False)
class _LookUp:
    """Its kind, "match" or "load"; the blocks in order, how many were there, where they begin."""

    kind: str
    at: float
    space: bytes
    layout: KVLayout
    hashes: Sequence[bytes]
    found: int
    start: ChainPlace | None


@dataclass(frozen=True, eq=False)
class _Put:
    """Blocks that came, in the order in which they were written, and what is known of their chains."""

    at: float
    space: bytes
    layout: KVLayout
    hashes: Sequence[bytes]
    parents: ShortHashes
    depths: npt.NDArray[np.int32]


class _Names:
    """Names of blocks of one space that are to be written, and are keyed together.

    Args:
        key: of the space.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._parts: list[ShortHashes] = []
        self._text = ""
        self._taken = 0

    def ask(self, names: ShortHashes) -> None:
        """These are to be written."""
        self._parts.append(names)

    def name(self) -> None:
        """What was asked for can be taken."""
        hashed = siphash(np.concatenate(self._parts).astype(np.uint64), self._key)
        self._text, self._taken = hashed.astype(">u8").tobytes().hex(), 0
        self._parts.clear()

    def take(self, count: int) -> str:
        """What the log calls the next `count` blocks, in the order in which they were asked for."""
        begin = self._taken
        self._taken = end = begin + 2 * _NAME_BYTES * count
        return self._text[begin:end]


class TraceLog:
    """Writes the log in a thread of its own: whoever is served only hands it what happened.

    The thread gathers events for a moment and names their blocks together, so that it takes little of the
    time of whoever is served.

    Where the thread does not keep up, events are lost; where the file reaches its size or cannot be
    written, the log ends. The file says so, and a warning does.

    Args:
        path: the file; one that is there already becomes ``path`` with ``.1`` at its end.
        most_bytes: where the log ends, in bytes before they are zipped.

    Raises:
        ConfigError: the file cannot be made, or `most_bytes` is out of range.
    """

    def __init__(self, path: str | os.PathLike[str], *, most_bytes: int = MOST_TRACE_BYTES) -> None:
        self.path = expect_path("trace", path)
        self._most = expect_integer("trace_bytes", most_bytes, _LEAST_BYTES)
        self._file = _new_file(self.path)
        self._began = time.monotonic()
        self._key = secrets.token_bytes(KEY_BYTES)
        self._spaces: dict[bytes, int] = {}
        self._names: list[_Names] = []
        """Of each space."""
        self._written = 0
        self._ended = False
        self._lost = 0
        self._blocks_waiting = 0
        self._counting = threading.Lock()
        self._waiting: list[_LookUp | _Put] = []
        self._there_are_some = threading.Event()
        self._closing = threading.Event()
        self._write({LOG_KEY: LOG_VERSION, "started": time.time()})
        self._thread = threading.Thread(target=self._run, name="kvpager-trace", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Events that were lost since the log last said so."""
        return self._lost

    @property
    def ended(self) -> bool:
        """Whether nothing is written any more: the file is as large as it may be, or cannot be written."""
        return self._ended

    def matched(
        self, space: bytes, layout: KVLayout, hashes: Sequence[bytes], found: int, start: ChainPlace | None
    ) -> None:
        """Blocks were looked up, of which `found` leading ones were there. Costs a microsecond.

        Args:
            space: its id.
            layout: how its blocks lie.
            hashes: of the blocks in order; nobody changes them any more.
            found: how many leading ones were there.
            start: where in their chain they begin; None: that is not known.
        """
        if hashes and not self._ended:
            self._hand_over(_LookUp("match", time.monotonic(), space, layout, hashes, found, start))

    def loaded(
        self,
        space: bytes,
        layout: KVLayout,
        hashes: Sequence[bytes],
        found: int,
        start: ChainPlace | None,
        began: float,
    ) -> None:
        """A load ended: `found` leading blocks were there, or came up.

        Args:
            space, layout, hashes, found, start: as of `matched`.
            began: when it did, by `time.monotonic`.
        """
        if hashes and not self._ended:
            self._hand_over(_LookUp("load", began, space, layout, hashes, found, start))

    def put(
        self,
        space: bytes,
        layout: KVLayout,
        hashes: Sequence[bytes],
        parents: ShortHashes,
        depths: npt.NDArray[np.int32],
    ) -> None:
        """Blocks were written, and can be found.

        Args:
            space, layout, hashes: as of `matched`, in any order.
            parents: uint64 [n], short hashes of what is before each; 0: nothing, or not known.
            depths: int32 [n], their places in their chains; 0: not known.
        """
        if hashes and not self._ended:
            self._hand_over(_Put(time.monotonic(), space, layout, hashes, parents, depths))

    def close(self) -> None:
        """Write what was handed over, and close the file. Idempotent."""
        if self._thread.is_alive():
            self._closing.set()
            self._there_are_some.set()
            self._thread.join()

    def _hand_over(self, event: _LookUp | _Put) -> None:
        count = len(event.hashes)
        with self._counting:
            if self._blocks_waiting and self._blocks_waiting + count > _MOST_WAITING:
                self._lost += 1
                return
            self._blocks_waiting += count
            self._waiting.append(event)
            if len(self._waiting) == 1:
                self._there_are_some.set()

    # In the thread

    def _run(self) -> None:
        closing = False
        while not closing:
            if not self._there_are_some.wait(_IDLE_SECONDS):
                self._flush()
                continue
            closing = self._closing.wait(_GATHER_SECONDS)
            self._there_are_some.clear()
            with self._counting:
                events, self._waiting = self._waiting, []
            if events:
                self._write_events(events)
                with self._counting:
                    self._blocks_waiting -= sum(len(event.hashes) for event in events)
                self._tell_lost(events[-1].at)
        self._tell_lost(time.monotonic())
        try:
            self._file.close()
        except OSError as error:
            self._end(f"cannot be written: {error.strerror}")

    def _write_events(self, events: list[_LookUp | _Put]) -> None:
        numbers = [self._number(event.space, event.layout) for event in events]
        for number, event in zip(numbers, events, strict=True):
            if isinstance(event, _LookUp):
                self._ask_for_look_up(self._names[number], event)
            else:
                self._names[number].ask(shortened(event.hashes))
                self._names[number].ask(event.parents)
        for number in set(numbers):
            self._names[number].name()
        for number, event in zip(numbers, events, strict=True):
            if isinstance(event, _LookUp):
                self._write_look_up(number, event)
            else:
                self._write_put(number, event)

    def _tell_lost(self, at: float) -> None:
        with self._counting:
            lost, self._lost = self._lost, 0
        if lost:
            self._write({"t": self._since(at), "lost": lost})

    def _ask_for_look_up(self, names: _Names, event: _LookUp) -> None:
        names.ask(shortened(event.hashes))
        if event.start is not None and event.start.depth > 1:
            names.ask(shortened([event.start.before]))

    def _write_look_up(self, number: int, event: _LookUp) -> None:
        place, names = event.start, self._names[number]
        line: dict[str, Any] = {
            "t": self._since(event.at),
            "space": number,
            event.kind: names.take(len(event.hashes)),
            "found": event.found,
            "depth": 0 if place is None else place.depth,
        }
        if place is not None and place.depth > 1:
            line["parent"] = names.take(1)
        self._write(line)

    def _write_put(self, number: int, event: _Put) -> None:
        """A line for each run of blocks that follow each other."""
        parents, depths = event.parents, event.depths
        follows = (parents[1:] == shortened(event.hashes)[:-1]) & (depths[1:] == depths[:-1] + 1)
        follows &= depths[:-1] > 0
        cuts = [0, *(np.flatnonzero(~follows) + 1).tolist(), len(parents)]
        size = 2 * _NAME_BYTES
        named, before = (self._names[number].take(len(parents)) for _ in range(2))
        for first, end in pairwise(cuts):
            line = {
                "t": self._since(event.at),
                "space": number,
                "put": named[size * first : size * end],
                "depth": int(depths[first]),
            }
            if parents[first]:
                line["parent"] = before[size * first : size * (first + 1)]
            self._write(line)

    def _since(self, at: float) -> float:
        return round(at - self._began, 6)

    def _number(self, space: bytes, layout: KVLayout) -> int:
        number = self._spaces.get(space)
        if number is None:
            number = self._spaces[space] = len(self._spaces)
            salt = number.to_bytes(_NAME_BYTES, "little")
            self._names.append(_Names(blake2b(digest_size=KEY_BYTES, key=self._key, salt=salt).digest()))
            self._write({"space": number, "block_size": layout.block_size, "block_bytes": layout.block_bytes})
        return number

    def _write(self, line: dict[str, Any]) -> None:
        if self._ended:
            return
        text = json.dumps(line) + "\n"
        full = self._written + len(text) > self._most
        if full:
            text = json.dumps({"t": line.get("t", 0.0), "full": self._most}) + "\n"
        try:
            self._file.write(text)
        except OSError as error:
            self._end(f"cannot be written: {error.strerror}")
            return
        self._written += len(text)
        if full:
            self._flush()
            self._end(f"has {self._most} bytes, as many as it may have")

    def _flush(self) -> None:
        if not self._ended:
            try:
                self._file.flush()
            except OSError as error:
                self._end(f"cannot be written: {error.strerror}")

    def _end(self, why: str) -> None:
        if not self._ended:
            self._ended = True
            _log.warning("the trace at %s %s: it ends here", self.path, why)


def _new_file(path: str) -> TextIO:
    """A file that only its owner can read; what was there is kept under another name."""
    try:
        if os.path.exists(path):
            os.replace(path, f"{path}.1")
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        return gzip.open(path, "wt", encoding="ascii") if path.endswith(".gz") else open(path, "w")
    except OSError as error:
        raise ConfigError("trace", f"{path} cannot be written: {error.strerror}") from error
