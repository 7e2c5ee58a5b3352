"""Files of traces: Mooncake's, and logs of kvpager's own events (`kvstore.trace_log`); gzipped or not.

Mooncake's (FAST'25) is a JSON object a line, a request each: ``timestamp`` in ms, ``input_length`` and
``output_length`` in tokens, ``hash_ids`` that name the prompt's blocks. A request looks its blocks up, and
puts those that are missing.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..tiers.errors import ConfigError, KVPagerError
from ..tiers.memory import format_bytes
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
_KINDS: Final = ("match", "load", "put")
_PAIR_SECONDS: Final = 60.0
"""How far a match and a load of one request may be apart."""
_NAME_BYTES: Final = 8
_NAMES: Final = np.dtype(">u8")


def read_trace(
    path: str | os.PathLike[str], *, block_size: int | None = None, space: int | None = None
) -> Trace:
    """The trace in a file, of whichever kind it is.

    Args:
        path: the file.
        block_size: tokens of a block, where the file does not say; None: 512, as in Mooncake's.
        space: the number of the space whose events are read, of a log of several; None: all, which have
            blocks of one size then.

    Raises:
        ConfigError: the file cannot be read, or a line is none of a trace: the error names it; or there is no
            such space, or none is said where there are blocks of several sizes.
    """
    if block_size is not None:
        block_size = expect_integer("block_size", block_size, 1, _MOST)
    if space is not None:
        space = expect_integer("space", space, 0, _MOST)
    lines = _lines(Path(path))
    first = next(lines, None)
    if first is None:
        raise ConfigError("trace", f"{path} is empty")
    number, head = first
    if LOG_KEY in head:
        return _Log(path, number, head, block_size, space).read(lines)
    if space is not None:
        raise ConfigError("space", f"is of a log that kvpager serve --trace wrote, and {path} is none")
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
                except RecursionError as error:
                    raise _wrong(path, at, "is nested too deep") from error
                except ValueError as error:
                    if not line.endswith(b"\n"):
                        _log.warning("%s is cut off in line %d: what is before it is read", path, at)
                        return
                    raise _wrong(path, at, f"is no JSON: {error}") from error
                if not isinstance(value, dict):
                    raise _wrong(path, at, f"must be a JSON object, got {shown(value)}")
                yield at, value
    except zlib.error as error:
        raise ConfigError("trace", f"{path} is damaged after line {at}: {error}") from error
    except EOFError:
        _log.warning("%s is cut off after line %d: what is before that is read", path, at)
    except OSError as error:
        raise ConfigError("trace", f"{path} cannot be read: {error.strerror or error}") from error


def _wrong(path: str | os.PathLike[str], line: int, problem: str) -> ConfigError:
    return ConfigError("trace", f"{path}, line {line}: {problem}")


def _number(path: str | os.PathLike[str], line: int, value: Mapping[str, Any], key: str) -> float:
    number = value.get(key)
    if (
        not isinstance(number, int | float)
        or isinstance(number, bool)
        or not abs(number) <= sys.float_info.max
    ):
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
        raise _wrong(path, line, f"hash_ids must be a list of integers from 0 to 2^63 - 1, got {shown(ids)}")
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
    time. So do a match and a load of the same blocks, whichever came first: engines match and then load what
    is missing, or load and then match what has come.

    Args:
        path, line, head: the file, and its first line.
        block_size: must be None: the log says it.
        space: whose events are read; None: those of all.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        line: int,
        head: Mapping[str, Any],
        block_size: int | None,
        space: int | None,
    ) -> None:
        if head[LOG_KEY] != LOG_VERSION:
            raise _wrong(path, line, f"is of version {shown(head[LOG_KEY])}, and {LOG_VERSION} can be read")
        if block_size is not None:
            raise ConfigError("block_size", f"{path} says itself of how many tokens a block is")
        self._path = path
        self._space = space
        self._sizes: dict[int, tuple[int, int]] = {}
        """Tokens and bytes of a block of each space."""
        self._events: list[TraceEvent] = []
        self._missing: dict[int, int] = {}
        """Of the first block that a look-up has not got yet, by name, which event that is."""
        self._alone: dict[int, tuple[int | None, str]] = {}
        """Of the first block of a match without a load, or the first that it did not find, or the first of a
        load without a match, by name, which event that is, and its kind."""

    def read(self, lines: Iterator[tuple[int, Mapping[str, Any]]]) -> Trace:
        """The trace of the lines after the first."""
        for line, value in lines:
            if "block_size" in value:
                self._announce(line, value)
            elif kind := next((word for word in _KINDS if word in value), None):
                event = self._event(line, value, kind)
                if self._space in (None, value["space"]) and len(event.names):
                    self._add(event, kind)
            elif not {"lost", "full"} & value.keys():
                raise _wrong(self._path, line, f"says nothing that is known: {shown(value)}")
        return Trace.of_events(self._events, *self._block())

    def _block(self) -> tuple[int, int]:
        """Tokens and bytes of a block of the spaces that are read."""
        if self._space is None:
            sizes = set(self._sizes.values())
            if len(sizes) <= 1:
                return sizes.pop() if sizes else (1, 1)
            problem = "is to be said, as blocks of different sizes share no ranking"
        elif self._space in self._sizes:
            return self._sizes[self._space]
        else:
            problem = f"must be one of the log's, got {self._space}"
        known = ", ".join(
            f"{space} (blocks of {size} tokens, {format_bytes(nbytes)})"
            for space, (size, nbytes) in self._sizes.items()
        )
        raise ConfigError("space", f"{problem}: {self._path} has {known or 'none'}")

    def _add(self, event: TraceEvent, kind: str) -> None:
        if kind == "put":
            event = self._put(event)
            if len(event.names):
                self._events.append(event)
        elif not self._paired(event, kind):
            self._events.append(event)
            at = len(self._events) - 1
            self._await(at)
            if kind == "load" or event.filled < event.asked:
                self._alone[int(event.names[0])] = at, kind
            if kind == "match" and event.filled < event.asked:
                self._alone[int(event.names[event.filled])] = at, kind

    def _paired(self, event: TraceEvent, kind: str) -> bool:
        """Whether a look-up belongs to one of the other kind, which it was made part of then."""
        at, other = self._alone.get(int(event.names[0]), (None, ""))
        if at is None or other == kind:
            return False
        before = self._events[at]
        skipped = int((before.names == event.names[0]).argmax())
        common = min(len(before.names) - skipped, len(event.names))
        same = bool((before.names[skipped:][:common] == event.names[:common]).all())
        if not same or abs(event.time - before.time) > _PAIR_SECONDS:
            return False
        self._end_pairing(at)
        names = np.concatenate([before.names, event.names[common:]])
        place = before if before.depth or skipped else event
        if before.filled < before.asked and self._missing.get(int(before.names[before.filled])) == at:
            del self._missing[int(before.names[before.filled])]
        self._events[at] = replace(
            before,
            names=names,
            asked=len(names),
            filled=max(before.filled, skipped + event.filled),
            tokens=before.tokens // len(before.names) * len(names),
            depth=place.depth,
            parent=place.parent,
        )
        self._await(at)
        return True

    def _end_pairing(self, at: int) -> None:
        event = self._events[at]
        for name in event.names[[0, min(event.filled, len(event.names) - 1)]].tolist():
            if self._alone.get(name, (None, ""))[0] == at:
                del self._alone[name]

    def _await(self, at: int) -> None:
        """What a look-up has not got yet may be put."""
        event = self._events[at]
        if event.filled < event.asked:
            self._missing[int(event.names[event.filled])] = at

    def _put(self, put: TraceEvent) -> TraceEvent:
        """Give blocks to the look-up that wanted them; what is left of the event that puts them."""
        at = self._missing.pop(int(put.names[0]), None)
        if at is None:
            return put
        self._end_pairing(at)
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

    def _event(self, line: int, value: Mapping[str, Any], kind: str) -> TraceEvent:
        space = _count(self._path, line, value, "space")
        if space not in self._sizes:
            raise _wrong(self._path, line, f"is of space {space}, which no line before it describes")
        time = _number(self._path, line, value, "t")
        looks_up = kind != "put"
        names = self._names(line, value, kind)
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
