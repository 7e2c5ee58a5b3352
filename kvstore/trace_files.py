"""Files of traces: Mooncake's, and logs of kvpager's own events (`kvstore.trace_log`); gzipped or not.

Mooncake's (FAST'25) is a JSON object a line, a request each: ``timestamp`` in ms, ``input_length`` and
``output_length`` in tokens, ``hash_ids`` that name the prompt's blocks. A request looks its blocks up, and
puts those that are missing.
"""

from __future__ import annotations

import gzip
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..tiers.errors import ConfigError, KVPagerError
from ..tiers.settings import expect_integer, shown
from .trace import Trace, TraceEvent, mixed
from .trace_log import LOG_KEY, LOG_VERSION

__all__ = ["MOONCAKE_BLOCK", "read_trace", "write_mooncake"]

_log = logging.getLogger(__name__)

MOONCAKE_BLOCK: Final = 512
"""Tokens of a block of Mooncake's published traces."""
_GZIP: Final = b"\x1f\x8b"
_MOST: Final = (1 << 31) - 1
_MOST_NAME: Final = (1 << 63) - 1
_NAME_BYTES: Final = 8
_NAMES: Final = np.dtype(">u8")


def read_trace(path: str | os.PathLike[str], *, block_size: int | None = None) -> Trace:
    """The trace in a file, of whichever kind it is.

    Args:
        path: the file.
        block_size: tokens of a block, where the file does not say; None: 512, as in Mooncake's.

    Raises:
        ConfigError: the file cannot be read, or a line is none of a trace: the error names it.
    """
    if block_size is not None:
        block_size = expect_integer("block_size", block_size, 1, _MOST)
    lines = _lines(Path(path))
    first = next(lines, None)
    if first is None:
        raise ConfigError("trace", f"{path} is empty")
    number, head = first
    if LOG_KEY in head:
        return _Log(path, number, head, block_size).read(lines)
    events = [_request(path, at, line, block_size or MOONCAKE_BLOCK) for at, line in chain([first], lines)]
    return Trace.of_events(events, block_size or MOONCAKE_BLOCK)


def write_mooncake(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace of requests as Mooncake's files are; gzipped if the name ends with ``.gz``.

    Raises:
        KVPagerError: the file cannot be written.
    """
    try:
        opens = gzip.open if os.fspath(path).endswith(".gz") else open
        with opens(path, "wt") as file:
            for event, (time, tokens) in enumerate(
                zip(trace.times.tolist(), trace.tokens.tolist(), strict=True)
            ):
                line = {
                    "timestamp": round(time * 1e3),
                    "input_length": tokens,
                    "output_length": 0,
                    "hash_ids": trace.chain(event).tolist(),
                }
                file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise KVPagerError(f"{path} cannot be written: {error.strerror}") from error


def _lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The objects of a file, and on which line each is; lines that are empty are passed over.

    One that is cut off, as a log is whose writer was killed, is read up to there, and a warning says so.
    """
    at = 0
    try:
        with path.open("rb") as raw:
            zipped = raw.read(len(_GZIP)) == _GZIP
        with gzip.open(path) if zipped else path.open("rb") as file:
            for at, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)
                except ValueError as error:
                    if not line.endswith(b"\n"):
                        _log.warning("%s is cut off in line %d: what is before it is read", path, at)
                        return
                    raise _wrong(path, at, f"is no JSON: {error}") from error
                if not isinstance(value, dict):
                    raise _wrong(path, at, f"must be a JSON object, got {shown(value)}")
                yield at, value
    except EOFError:
        _log.warning("%s is cut off after line %d: what is before that is read", path, at)
    except OSError as error:
        raise ConfigError("trace", f"{path} cannot be read: {error.strerror or error}") from error


def _wrong(path: str | os.PathLike[str], line: int, problem: str) -> ConfigError:
    return ConfigError("trace", f"{path}, line {line}: {problem}")


def _number(path: str | os.PathLike[str], line: int, value: Mapping[str, Any], key: str) -> float:
    number = value.get(key)
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise _wrong(path, line, f"{key} must be a number, got {shown(number)}")
    return float(number)


def _count(
    path: str | os.PathLike[str], line: int, value: Mapping[str, Any], key: str, least: int = 0
) -> int:
    number = value.get(key)
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= _MOST:
        raise _wrong(path, line, f"{key} must be an integer from {least} to {_MOST}, got {shown(number)}")
    return number


def _request(
    path: str | os.PathLike[str], line: int, value: Mapping[str, Any], block_size: int
) -> TraceEvent:
    """A request of Mooncake's."""
    time = _number(path, line, value, "timestamp") / 1e3
    tokens = _count(path, line, value, "input_length")
    ids = value.get("hash_ids")
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one <= _MOST_NAME for one in ids):
        raise _wrong(path, line, f"hash_ids must be a list of integers from 0, got {shown(ids)}")
    if len(set(ids)) != len(ids):
        raise _wrong(path, line, "hash_ids names a block twice")
    # The last one may be partly full, and be named or not.
    if not tokens // block_size <= len(ids) <= -(-tokens // block_size):
        raise _wrong(
            path, line, f"hash_ids names {len(ids)} blocks of {block_size} tokens, input_length is {tokens}"
        )
    return TraceEvent(time, mixed(np.array(ids, dtype=np.uint64)), len(ids), len(ids), tokens)


class _Log:
    """Reads a log of kvpager's own events.

    Blocks that are put after a look-up did not find them belong to it: they were computed by whoever looked
    them up, who has what he found in use until they are written. So they make one event, at the look-up's
    time.

    Args:
        path, line, head: the file, and its first line.
        block_size: must be None: the log says it.
    """

    def __init__(
        self, path: str | os.PathLike[str], line: int, head: Mapping[str, Any], block_size: int | None
    ) -> None:
        if head[LOG_KEY] != LOG_VERSION:
            raise _wrong(path, line, f"is of version {shown(head[LOG_KEY])}, and {LOG_VERSION} can be read")
        if block_size is not None:
            raise ConfigError("block_size", f"{path} says itself of how many tokens a block is")
        self._path = path
        self._sizes: dict[int, tuple[int, int]] = {}
        """Tokens and bytes of a block of each space."""
        self._events: list[TraceEvent] = []
        self._missing: dict[int, int] = {}
        """Of the first block that a look-up has not got yet, by name, which event that is."""

    def read(self, lines: Iterator[tuple[int, Mapping[str, Any]]]) -> Trace:
        """The trace of the lines after the first."""
        for line, value in lines:
            if "block_size" in value:
                self._announce(line, value)
            elif "match" in value or "put" in value:
                self._add(self._event(line, value))
            elif not {"lost", "full"} & value.keys():
                raise _wrong(self._path, line, f"says nothing that is known: {shown(value)}")
        sizes = set(self._sizes.values())
        if len(sizes) > 1:
            raise ConfigError(
                "trace", f"{self._path} has spaces with blocks of different sizes, which share no ranking"
            )
        size, nbytes = sizes.pop() if sizes else (1, 1)
        return Trace.of_events(self._events, size, nbytes)

    def _add(self, event: TraceEvent) -> None:
        if not event.asked:
            event = self._joined(event)
        if len(event.names):
            self._events.append(event)
            self._await(len(self._events) - 1)

    def _await(self, at: int) -> None:
        """What a look-up has not got yet may be put."""
        event = self._events[at]
        if event.filled < event.asked:
            self._missing[int(event.names[event.filled])] = at

    def _joined(self, put: TraceEvent) -> TraceEvent:
        """Give blocks to the look-up that wanted them; what is left of the event that puts them."""
        at = self._missing.pop(int(put.names[0]), None) if len(put.names) else None
        if at is None:
            return put
        event = self._events[at]
        wanted = event.names[event.filled : event.filled + len(put.names)]
        same = wanted == put.names[: len(wanted)]
        count = len(wanted) if same.all() else int(same.argmin())
        self._events[at] = replace(event, filled=event.filled + count)
        self._await(at)
        return replace(
            put,
            names=put.names[count:],
            filled=put.filled - count,
            tokens=put.tokens // len(put.names) * (put.filled - count),
            depth=put.depth and put.depth + count,
            parent=int(put.names[count - 1]),
        )

    def _announce(self, line: int, value: Mapping[str, Any]) -> None:
        space = _count(self._path, line, value, "space")
        size = _count(self._path, line, value, "block_size", 1)
        self._sizes[space] = size, _count(self._path, line, value, "block_bytes", 1)

    def _event(self, line: int, value: Mapping[str, Any]) -> TraceEvent:
        space = _count(self._path, line, value, "space")
        if space not in self._sizes:
            raise _wrong(self._path, line, f"is of space {space}, which no line before it describes")
        time = _number(self._path, line, value, "t")
        looks_up = "match" in value
        names = self._names(line, value, "match" if looks_up else "put")
        filled = _count(self._path, line, value, "found") if looks_up else len(names)
        if filled > len(names):
            raise _wrong(self._path, line, f"found {filled} of {len(names)} blocks")
        depth = _count(self._path, line, value, "depth")
        before = self._names(line, value, "parent") if "parent" in value else names[:0]
        if len(before) > 1:
            raise _wrong(self._path, line, "parent names several blocks")
        return TraceEvent(
            time,
            names,
            len(names) if looks_up else 0,
            filled,
            len(names) * self._sizes[space][0],
            depth,
            int(before[0]) if len(before) else 0,
        )

    def _names(self, line: int, value: Mapping[str, Any], key: str) -> np.ndarray[Any, np.dtype[np.uint64]]:
        given = value.get(key)
        try:
            raw = bytes.fromhex(given) if isinstance(given, str) else None
        except ValueError:
            raw = None
        if raw is None or len(raw) % _NAME_BYTES:
            raise _wrong(
                self._path,
                line,
                f"{key} must be names of {2 * _NAME_BYTES} hex digits each, got {shown(given)}",
            )
        names = np.frombuffer(raw, dtype=_NAMES).astype(np.uint64)
        if len(np.unique(names)) != len(names):
            raise _wrong(self._path, line, f"{key} names a block twice")
        return names
