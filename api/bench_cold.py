"""What `kvpager bench` measures of a cold tier: plain values or files, and kvpager's own records.

Nothing of what is there is touched, and nothing is left: records have names of their own and are removed; of
a bench that was killed those in a Redis expire within a minute, and those on disk lie in a folder
``kvpager-bench-...``.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt

from ..tiers.cold import ColdStatus, ColdTier
from ..tiers.cold_url import cold_folder, open_cold_tier
from ..tiers.errors import ColdTierError, ConfigError
from .bench_memory import BLOCK, names_from
from .measurements import Measurement, Unit
from .turns import median_seconds

if TYPE_CHECKING:
    from ..tiers.redis_wire import Wire

__all__ = ["DEADLINE", "expect_done", "measure_cold", "own_tier"]

_BLOCKS: Final = 8
_CAPACITY_BYTES: Final = 64 << 20
DEADLINE: Final = 20.0
"""Seconds that a call may take, here where nobody waits for it."""
_CONNECT_SECONDS: Final = 2.0
_TTL: Final = 60
_HEAD_BYTES: Final = 64
"""Of a value, read apart from the rest as the tier reads its headers."""
_CONNECTIONS: Final = 2
"""As many as the tier has."""

Blocks = npt.NDArray[np.uint8]


def measure_cold(url: str, seconds: float) -> list[Measurement]:
    """Blocks of 2 MiB to and from the cold tier that a URL names, beside plain values or files of that size.

    Args:
        url: as of `open_cold_tier`; of a disk a folder in it is used.
        seconds: how long it may take.

    Raises:
        ConfigError: the URL names no cold tier.
        ColdTierError: it cannot be used.
    """
    try:
        return _measured(url, seconds)
    except OSError as error:  # TimeoutError is one
        raise ColdTierError(f"cannot be used: {error.strerror or error}") from error


def _measured(url: str, seconds: float) -> list[Measurement]:
    folder = cold_folder(url)
    blocks = np.random.default_rng(0).integers(0, 256, (_BLOCKS, BLOCK.block_bytes), np.uint8)
    back = np.zeros_like(blocks)
    space = secrets.token_bytes(16)
    with ExitStack() as stack:
        if folder is None:
            kind, what = "redis", "Redis: plain value"
            plain: _Plain = stack.enter_context(closing(_PlainRedis(url)))
            tier = stack.enter_context(closing(open_cold_tier(url, ttl=_TTL)))
        else:
            kind, what = "disk", "disk, through the page cache: plain file"
            place = stack.enter_context(_own_folder(Path(folder)))
            plain = _PlainFiles(Path(place))
            disk = open_cold_tier(f"disk://{place}/tier", capacity_bytes=_CAPACITY_BYTES)
            tier = stack.enter_context(closing(disk))
        stack.callback(tier.delete, space, names_from(0, _BLOCKS), DEADLINE)
        taken = median_seconds(dict(_contenders(plain, tier, space, blocks, back)), seconds)
        if not np.array_equal(blocks, back):
            raise ColdTierError("a block came back with other bytes")
    rate = {name: blocks.nbytes / each for name, each in taken.items()}
    found = []
    for op, words in (("put", "blocks of 2 MiB written"), ("get", "blocks of 2 MiB read and verified")):
        done = "written" if op == "put" else "read"
        plainly = Measurement(
            f"{kind}_plain_{op}", f"{what}s of 2 MiB {done}", rate[f"plain {op}"], Unit.BYTES_PER_SECOND
        )
        found += [
            plainly,
            Measurement(f"{kind}_{op}", words, rate[op], Unit.BYTES_PER_SECOND, plainly.name),
        ]
    return found


def _contenders(
    plain: _Plain, tier: ColdTier, space: bytes, blocks: Blocks, back: Blocks
) -> Iterator[tuple[str, Callable[[], object]]]:
    names = names_from(0, _BLOCKS)
    out, into = [memoryview(block) for block in blocks], [memoryview(block) for block in back]

    def put() -> None:
        # A record that is there already is left as it is.
        tier.delete(space, names, DEADLINE)
        expect_done(tier.put(space, names, out, DEADLINE), "written")

    def get() -> None:
        expect_done(tier.get(space, names, into, DEADLINE), "read")

    put()
    plain.put(blocks)
    yield "plain put", lambda: plain.put(blocks)
    yield "put", put
    yield "plain get", lambda: plain.get(back)
    yield "get", get


@contextmanager
def own_tier(url: str) -> Iterator[ColdTier]:
    """A cold tier as a URL names it, in a folder of its own if it is on disk.

    Raises:
        ConfigError: the URL names none.
        ColdTierError: it cannot be used.
    """
    folder = cold_folder(url)
    try:
        with ExitStack() as stack:
            if folder is None:
                yield stack.enter_context(closing(open_cold_tier(url, ttl=_TTL)))
                return
            place = stack.enter_context(_own_folder(Path(folder)))
            disk = open_cold_tier(f"disk://{place}/tier", capacity_bytes=_CAPACITY_BYTES)
            yield stack.enter_context(closing(disk))
    except OSError as error:
        raise ColdTierError(f"cannot be used: {error.strerror or error}") from error


def expect_done(statuses: npt.NDArray[np.uint8], what: str) -> None:
    """Raise `ColdTierError` where one of a batch is not OK."""
    if statuses.any():
        wrong = ColdStatus(int(statuses[statuses != ColdStatus.OK][0]))
        raise ColdTierError(f"a block was not {what}: {wrong.name.lower()}")


def _own_folder(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder for the time of the measurement, on the file system that the tier is or would be on."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        return tempfile.TemporaryDirectory(prefix="kvpager-bench-", dir=there)
    except OSError as error:
        raise ConfigError("cold.path", f"no folder can be made in {there}: {error.strerror}") from error


class _Plain(Protocol):
    """What the tier is compared with."""

    def put(self, blocks: Blocks) -> None: ...
    def get(self, into: Blocks) -> None: ...


class _PlainFiles:
    """A file a block: written under another name and renamed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, blocks: Blocks) -> None:
        for index, block in enumerate(blocks):
            path = self._folder / f"plain-{index}"
            with open(f"{path}.unfinished", "wb", buffering=0) as file:
                file.write(block)
            os.rename(f"{path}.unfinished", path)

    def get(self, into: Blocks) -> None:
        for index, block in enumerate(into):
            with open(self._folder / f"plain-{index}", "rb", buffering=0) as file:
                file.readinto(block)


class _PlainRedis:
    """A value a block, over as many connections as the tier has, with nothing around them."""

    def __init__(self, url: str) -> None:
        # Here, since redis takes a good part of the time in which a command starts.
        from ..tiers.redis_url import Address
        from ..tiers.redis_wire import CONNECT_ERRORS, describe

        address = Address.parse(url)
        if address.cluster:
            raise ConfigError("cold.url", "a Cluster is not measured: name one of its servers by redis://")
        self._prefix = f"kvpager-bench:{secrets.token_hex(8)}:"
        self._wires: list[Wire] = []
        self._threads = ThreadPoolExecutor(_CONNECTIONS)
        try:
            for _ in range(_CONNECTIONS):
                wire = address.wire()
                self._wires.append(wire)
                wire.connect(_CONNECT_SECONDS)
        except (*CONNECT_ERRORS, TimeoutError) as error:
            self._disconnect()
            raise ColdTierError(f"{address.label} cannot be used: {describe(error)}") from error

    def put(self, blocks: Blocks) -> None:
        self._in_threads(blocks, self._put_one)

    def get(self, into: Blocks) -> None:
        self._in_threads(into, self._get_one)

    def close(self) -> None:
        """Remove the values, and let go of the connections."""
        try:
            self._wires[0].limit(time.monotonic() + _CONNECT_SECONDS)
            self._wires[0].call(b"DEL", *(self._key(index) for index in range(_BLOCKS)))
        finally:
            self._disconnect()

    def _disconnect(self) -> None:
        for wire in self._wires:
            wire.close()
        self._threads.shutdown()

    def _in_threads(self, blocks: Blocks, move: Callable[[Wire, int, memoryview], None]) -> None:
        def work(lane: int) -> None:
            wire = self._wires[lane]
            wire.limit(time.monotonic() + DEADLINE)
            for index in range(lane, len(blocks), _CONNECTIONS):
                move(wire, index, memoryview(blocks[index]))

        list(self._threads.map(work, range(_CONNECTIONS)))

    def _key(self, index: int) -> bytes:
        return f"{self._prefix}{index}".encode()

    def _put_one(self, wire: Wire, index: int, block: memoryview) -> None:
        key = self._key(index)
        begin = b"*5\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key, len(block))
        wire.send([begin, block, b"\r\n$2\r\nEX\r\n$%d\r\n%d\r\n" % (len(str(_TTL)), _TTL)])
        reply = wire.read_reply()
        if reply != b"OK":
            raise ColdTierError(f"the server does not take a value: {reply!r:.200}")

    def _get_one(self, wire: Wire, index: int, into: memoryview) -> None:
        key = self._key(index)
        wire.send([b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(key), key)])
        size = wire.read_bulk(into[:_HEAD_BYTES], into[_HEAD_BYTES:], len(into))
        if size != len(into):
            raise ColdTierError(f"the server does not have a value any more: {size!r:.200}")
