"""The cold tier in Redis: one server, or a Cluster.

A batch is cut into values (`tiers/record.py`), the values of one server are queued, and a few lanes, each a
thread with a connection of its own, work the queue off: a lane keeps as much in flight as its line holds,
and hashes a value while another lane's is moved. Socket calls and the hash let go of the interpreter lock.

What a server can do is cost hits: every length it sends is bounded, every record is verified before it
counts, and a connection whose stream is out of step is closed.
"""

from __future__ import annotations

import logging
import ssl
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np
import numpy.typing as npt
from redis.exceptions import AuthenticationError, NoPermissionError

from .cold import LONGEST_DEADLINE, ColdPurge, ColdStatus, RecordTier, StatusArray
from .errors import ClosedError, ColdTierUnavailableError, ConfigError
from .record import DEFAULT_VALUE_BYTES, HEADER_BYTES, NOTE_SPACE, Part, RecordCodec, Verdict
from .redis_fleet import CLUSTER_SLOTS, Fleet, Redirect, Server
from .redis_url import URL_SETTING, Address
from .redis_wire import CONNECT_ERRORS, Reply, ReplyError, Wire, describe, pack
from .settings import expect_integer, expect_seconds

__all__ = ["DEFAULT_CONNECTIONS", "DEFAULT_DEADLINE", "RedisColdTier"]

DEFAULT_CONNECTIONS: Final = 2
"""Two lanes keep a server busy, which is one thread that moves 3 to 4 GB/s: one hashes, the other sends.
More cost more: a gigabyte over four takes 10 to 20% more processor time than over two."""
DEFAULT_DEADLINE: Final = 1.0
"""Seconds."""

_SOUND, _BROKEN = Verdict.OK, Verdict.BROKEN
_OK, _MISS, _CORRUPT, _LATE, _UNAVAILABLE, _FULL = ColdStatus
_log = logging.getLogger(__name__)

_MOST_LANES: Final = 64
_MOST_TTL: Final = (1 << 31) - 1
"""Seconds: 68 years. A server refuses what it cannot add to the time of day in milliseconds."""
_MAX_ROUNDS: Final = 5
_MAX_TRIES: Final = 2
_WINDOW_VALUES: Final = 16
_LEAST_WINDOW_BYTES: Final = 384 << 10
_MOST_WINDOW_BYTES: Final = 4 << 20
_LINE_RATE: Final = 1.25e9
"""A lane keeps in flight what its line holds at this many bytes a second (10 Gbit/s), within these bounds,
and always one value. More is slower: bytes that wait in a socket fall out of the caches, and the server
copies every reply that waits to memory that it must get first. On loopback, values of 256 KiB cost 20% more
processor time with 1 MiB in flight than with two values, and values of 2 MiB 15% more with two than with
one."""
_SEND_BYTES: Final = 128 << 10
"""Smaller values go out together, up to about this much in one call."""
_CALL_CHUNK: Final = 1024
_SCAN_KEYS: Final = 1000
"""That a server looks at in one go: others wait for it meanwhile."""
_STATUS_OF_ERROR: Final = {"OOM": _FULL, "WRONGTYPE": _CORRUPT}

# KEYS[1] is deleted only while it still is the value that failed: same length, same beginning.
_COMPARE_AND_DELETE: Final = (
    b"if redis.call('STRLEN',KEYS[1])==tonumber(ARGV[1])"
    b" and redis.call('GETRANGE',KEYS[1],0,#ARGV[2]-1)==ARGV[2]"
    b" then return redis.call('DEL',KEYS[1]) end return 0"
)


_ASKING: Final = pack(b"ASKING")


class _Operation(ABC):
    """Commands that go to one server in one piece, and their replies.

    `weight` is the bytes in flight, out or home; `outgoing` says that it is the command that is large.
    """

    __slots__ = ("asking", "redirect", "slot", "status", "tries", "weight")
    outgoing = False

    def __init__(self, slot: int, weight: int) -> None:
        self.slot = slot
        self.weight = weight
        self.status = _UNAVAILABLE
        self.tries = 0
        self.asking = False
        self.redirect: Redirect | None = None

    @abstractmethod
    def request(self) -> list[bytes | memoryview]:
        """The commands, as buffers to be written one after another."""

    @abstractmethod
    def receive(self, wire: Wire) -> None:
        """Read the replies and set `status`."""

    def refuse(self, error: ReplyError) -> None:
        """Set status and redirect from an error reply."""
        self.status = _STATUS_OF_ERROR.get(error.code, _UNAVAILABLE)
        self.redirect = Redirect.of(error)


class _Put(_Operation):
    """SET of one value."""

    outgoing = True
    __slots__ = ("_codec", "_expiry", "_key", "_part", "_payload", "_write_id")

    def __init__(
        self,
        slot: int,
        key: bytes,
        codec: RecordCodec,
        part: Part,
        payload: memoryview,
        write_id: int,
        ttl: int | None,
    ) -> None:
        super().__init__(slot, len(payload))
        self._key = key
        self._codec = codec
        self._part = part
        self._payload = payload
        self._write_id = write_id
        self._expiry = b"" if ttl is None else b"$2\r\nEX\r\n$%d\r\n%d\r\n" % (len(str(ttl)), ttl)

    def request(self) -> list[bytes | memoryview]:
        header, body = self._codec.encode(self._part, self._payload, self._write_id)
        begin = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n%s" % (
            5 if self._expiry else 3,
            len(self._key),
            self._key,
            HEADER_BYTES + len(body),
            header,
        )
        return [begin, body, b"\r\n" + self._expiry]

    def receive(self, wire: Wire) -> None:
        reply = wire.read_reply()
        if reply == b"OK":
            self.status = _OK
        elif isinstance(reply, ReplyError):
            self.refuse(reply)
        else:
            raise ColdTierUnavailableError(f"answers SET with {reply!r}")


class _Get(_Operation):
    """GET of one value into its place in the caller's buffer."""

    __slots__ = ("_codec", "_into", "_limit", "failed", "header", "key", "part", "size", "write_id")

    def __init__(
        self, slot: int, key: bytes, codec: RecordCodec, part: Part, into: memoryview, limit: int
    ) -> None:
        super().__init__(slot, len(into))
        self.key = key
        self.part = part
        self._codec = codec
        self._into = into
        self._limit = limit
        self.header = bytearray(HEADER_BYTES)
        self.size = 0
        self.write_id = 0
        self.failed = False
        """A record of our own version that does not verify."""

    def request(self) -> list[bytes | memoryview]:
        return [b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(self.key), self.key)]

    def receive(self, wire: Wire) -> None:
        size = wire.read_bulk(memoryview(self.header), self._into, self._limit)
        if isinstance(size, ReplyError):
            self.refuse(size)
        elif size is None:
            self.status = _MISS
        else:
            self.size = size
            if size == HEADER_BYTES + len(self._into):
                verdict, self.write_id = self._codec.decode(self.part, self.header, self._into)
            else:
                del self.header[size:]
                verdict = self._codec.judge_size(self.header, size)
            self.status = _OK if verdict is _SOUND else _CORRUPT
            self.failed = verdict is _BROKEN


class _Calls(_Operation):
    """Short commands, one reply each."""

    __slots__ = ("commands", "indices", "numbers", "replies")

    def __init__(self, slot: int, commands: list[bytes], indices: list[int], *, numbers: bool) -> None:
        super().__init__(slot, sum(map(len, commands)))
        self.commands = commands
        self.indices = indices
        self.numbers = numbers
        self.replies: Sequence[Reply] = []

    def request(self) -> list[bytes | memoryview]:
        return [b"".join(self.commands)]

    def receive(self, wire: Wire) -> None:
        if self.numbers:
            self.replies = wire.read_numbers(len(self.commands))
        else:
            self.replies = [wire.read_reply() for _ in self.commands]
        self.status = _OK


class RedisColdTier(RecordTier):
    """Blocks in Redis. Safe from any number of threads.

    Args:
        url: ``redis://[[user]:password@]host[:port][/db]``, ``rediss://`` for TLS, ``unix:///path`` for a
            Unix socket, ``redis+cluster://`` or ``rediss+cluster://`` with any one node of a Cluster. A query
            may say what redis-py knows as ``ssl_...`` (``?ssl_ca_certs=/path``; not OCSP), ``db``,
            ``username``, ``password``, ``client_name`` and ``socket_keepalive``.
        secret: seal payloads (`RecordCodec`); every host that is to read them needs the same.
        ttl: seconds until a record that is not written again expires; None keeps it until the server evicts
            it. Set `maxmemory-policy` on the server so that it does.
        connections: lanes, and connections to each server. Two or more keep a server busy.
        deadline: seconds that a call may take where it does not say.
        value_bytes: upper limit of one value, header included. Hosts must agree on it to share records.
        connect_timeout: seconds for each step of connecting (in the background, except in this constructor).

    Raises:
        ConfigError: the URL, the credentials, the TLS settings or another setting is refused. A server
            that is merely down is allowed: the tier answers UNAVAILABLE and recovers by itself.
        ColdTierUnavailableError: something answers there that is no Redis.
    """

    name = "redis"

    def __init__(
        self,
        url: str,
        *,
        secret: str | bytes | None = None,
        ttl: int | None = None,
        connections: int = DEFAULT_CONNECTIONS,
        deadline: float = DEFAULT_DEADLINE,
        value_bytes: int = DEFAULT_VALUE_BYTES,
        connect_timeout: float = 2.0,
    ) -> None:
        codec = RecordCodec(secret, value_bytes=value_bytes)
        super().__init__(deadline, codec.part_bytes)
        self._codec = codec
        self._ttl = None if ttl is None else expect_integer("cold.ttl", ttl, 1, _MOST_TTL)
        self._lanes = expect_integer("cold.connections", connections, 1, _MOST_LANES)
        timeout = expect_seconds("cold.connect_timeout", connect_timeout, LONGEST_DEADLINE, above=True)
        self._fleet = Fleet(Address.parse(url), self._lanes, timeout)
        self._pool = ThreadPoolExecutor(max(4, 4 * self._lanes), thread_name_prefix="kvpager-redis")
        try:
            self._greet()
        except BaseException:
            self.close()
            raise

    def check_block(self, nbytes: int) -> None:
        """See `ColdTier.check_block`: large blocks are several values, and room is the server's to say."""

    def _greet(self) -> None:
        """Connect once, to tell settings that can never work from a server that is down."""
        seed = self._fleet.seed
        try:
            wire = seed.dial()
        except (AuthenticationError, NoPermissionError) as error:
            raise ConfigError(
                URL_SETTING, f"the server refuses the credentials: {describe(error)}"
            ) from error
        except CONNECT_ERRORS as error:
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            if isinstance(cause, ssl.SSLError):
                raise ConfigError(URL_SETTING, f"no TLS with this server: {describe(cause)}") from error
            if isinstance(cause, FileNotFoundError | PermissionError) and not seed.label.startswith("unix:"):
                raise ConfigError(URL_SETTING, f"a TLS file cannot be read: {describe(cause)}") from error
            if isinstance(error, ColdTierUnavailableError) and "loading" not in str(error).lower():
                raise ColdTierUnavailableError(f"{URL_SETTING}: {seed.label}: {describe(error)}") from error
            if "DB index" in str(error) or "invalid DB" in str(error):
                raise ConfigError(
                    URL_SETTING, f"the server has no such database: {describe(error)}"
                ) from error
            seed.mark_down(describe(error))
            return
        wire.limit(time.monotonic() + self._deadline)
        try:
            about = wire.call(b"INFO", b"cluster")
        except (TimeoutError, ColdTierUnavailableError) as error:
            wire.close()
            seed.mark_down(describe(error))
            return
        seed.adopt(wire)
        if isinstance(about, bytes) and b"cluster_enabled:" in about:
            clustered = b"cluster_enabled:1" in about
            if clustered and not self._fleet.clustered:
                raise ConfigError(URL_SETTING, f"{seed.label} is a Cluster node: use redis+cluster://")
            if self._fleet.clustered and not clustered:
                raise ConfigError(URL_SETTING, f"{seed.label} is not a Cluster node: use redis://")
        self._fleet.refresh(time.monotonic() + self._deadline)

    # The calls of ColdTier, as `RecordTier` wants them.

    def _put_blocks(
        self, space: bytes, hashes: Sequence[bytes], views: Sequence[memoryview], until: float
    ) -> StatusArray:
        """Write one record per hash, replacing what is there and starting its TTL anew."""
        blocks: list[list[_Operation]] = []
        for prefix_hash, view in zip(hashes, views, strict=True):
            key, slot = self._place(space, prefix_hash)
            write_id = self._codec.new_write_id()
            blocks.append(
                [
                    _Put(
                        slot,
                        b"%s:%d" % (key, part.number),
                        self._codec,
                        part,
                        view[part.start : part.stop],
                        write_id,
                        self._ttl,
                    )
                    for part in self._codec.split(space, prefix_hash, len(view))
                ]
            )
        self._carry_out([operation for block in blocks for operation in block], until)
        return np.fromiter((_worst(block) for block in blocks), np.uint8, len(blocks))

    def _get_blocks(
        self, space: bytes, hashes: Sequence[bytes], views: Sequence[memoryview], until: float
    ) -> StatusArray:
        """Read each payload into its buffer, verified."""
        blocks: list[list[_Get]] = []
        for prefix_hash, view in zip(hashes, views, strict=True):
            key, slot = self._place(space, prefix_hash)
            blocks.append(
                [
                    _Get(
                        slot,
                        b"%s:%d" % (key, part.number),
                        self._codec,
                        part,
                        view[part.start : part.stop],
                        self._codec.value_bytes,
                    )
                    for part in self._codec.split(space, prefix_hash, len(view))
                ]
            )
        self._carry_out([operation for block in blocks for operation in block], until)
        status = np.fromiter((_worst(block) for block in blocks), np.uint8, len(blocks))
        unsound = [each for block in blocks for each in block if each.failed]
        for index, block in enumerate(blocks):
            if len(block) == 1:
                continue
            if status[index] == _OK and len({each.write_id for each in block}) > 1:
                status[index] = _CORRUPT
                unsound.append(block[0])
            elif status[index] == _MISS and block[0].status == _OK:
                # The first part stands for the record in `contains`; without the others it never will verify.
                unsound.append(block[0])
        self._delete_unsound(unsound, until)
        return status

    def _contains(self, space: bytes, hashes: Sequence[bytes], until: float) -> npt.NDArray[np.bool_]:
        """Whether the first part of each record is there."""
        keys = [self._place(space, prefix_hash) for prefix_hash in hashes]
        commands = [(slot, pack(b"EXISTS", key + b":0")) for key, slot in keys]
        replies = self._call_each(commands, until, numbers=True)
        return np.fromiter((reply == 1 for reply in replies), np.bool_, len(hashes))

    def _ping(self, until: float) -> ColdStatus:
        """Whether one server, of a Cluster any, says whether it has a key."""
        key, slot = self._place(NOTE_SPACE, bytes(16))
        (reply,) = self._call_each([(slot, pack(b"EXISTS", key))], until, numbers=True)
        if isinstance(reply, int):
            return _OK
        return _LATE if reply is None and time.monotonic() >= until else _UNAVAILABLE

    def _delete_blocks(self, space: bytes, hashes: Sequence[bytes], until: float) -> int:
        """Remove records with all their parts."""
        places = [self._place(space, prefix_hash) for prefix_hash in hashes]
        looks = [
            (slot, pack(b"GETRANGE", key + b":0", b"0", b"%d" % (HEADER_BYTES - 1))) for key, slot in places
        ]
        commands = []
        for (key, slot), header in zip(places, self._call_each(looks, until, numbers=False), strict=True):
            count = (self._codec.stored_parts(header) if isinstance(header, bytes) else None) or 1
            parts = [b"%s:%d" % (key, index) for index in range(count)]
            commands.append((slot, pack(b"DEL", *parts)))
        replies = self._call_each(commands, until, numbers=True)
        return sum(1 for reply in replies if isinstance(reply, int) and reply > 0)

    def _purge_blocks(self, space: bytes, hashes: Sequence[bytes], nbytes: int, until: float) -> ColdPurge:
        """Every part that a record of so many bytes has, whichever of them are still there."""
        commands = []
        for prefix_hash in hashes:
            key, slot = self._place(space, prefix_hash)
            parts = range(len(self._codec.split(space, prefix_hash, nbytes)))
            commands.append((slot, pack(b"DEL", *(b"%s:%d" % (key, index) for index in parts))))
        return self._purge(commands, until)

    def _purge_space(self, space: bytes, until: float) -> ColdPurge:
        """Also what was sealed with another secret, or was split in another way."""
        self._fleet.refresh(until)
        slots = range(CLUSTER_SLOTS) if self._fleet.clustered else range(1)
        servers = {self._fleet.server_of(slot) for slot in slots}
        parts: dict[bytes, list[bytes]] = {}
        status = _OK
        for server in servers:
            if server is None:
                status = _UNAVAILABLE
                continue
            try:
                for key in self._scan(server, self._codec.keys_of(space), until):
                    parts.setdefault(key.rpartition(b":")[0], []).append(key)
            except TimeoutError:
                status = _LATE
            except (ColdTierUnavailableError, ClosedError):
                self._fleet.doubt()
                status = _UNAVAILABLE
        commands = [(self._fleet.slot(key), pack(b"DEL", *of_key)) for key, of_key in parts.items()]
        done = self._purge(commands, until)
        return done if status == _OK else ColdPurge(done.removed, status)

    def _purge(self, commands: list[tuple[int, bytes]], until: float) -> ColdPurge:
        """Send DELs, one for each block, and see what they came to."""
        replies = self._call_each(commands, until, numbers=True)
        removed = sum(1 for reply in replies if isinstance(reply, int) and reply > 0)
        if all(isinstance(reply, int) for reply in replies):
            return ColdPurge(removed, _OK)
        return ColdPurge(removed, _LATE if time.monotonic() >= until else _UNAVAILABLE)

    def _scan(self, server: Server, pattern: bytes, until: float) -> Iterator[bytes]:
        """The keys of one server that are like this; some may come twice.

        Raises:
            ColdTierUnavailableError: the server is down, or refuses.
            TimeoutError: it was not through in time.
        """
        cursor = b"0"
        while True:
            wire = server.acquire(until, [pattern])
            if wire is None:
                return
            try:
                reply = wire.call(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % _SCAN_KEYS)
            except TimeoutError:
                server.discard(wire)
                raise
            except BaseException:
                server.discard(wire, stale=True)
                raise
            server.release(wire)
            match reply:
                case [bytes() as cursor, list() as keys] if all(isinstance(key, bytes) for key in keys):
                    yield from keys
                case _:
                    raise ColdTierUnavailableError(f"answers SCAN with {reply!r:.80}")
            if cursor == b"0":
                return

    def _put_note(self, space: bytes, note: bytes, value: bytes, until: float) -> ColdStatus:
        key, slot = self._place(space, note)
        (part,) = self._codec.split(space, note, len(value))
        write_id = self._codec.new_write_id()
        operation = _Put(slot, key + b":0", self._codec, part, memoryview(value), write_id, self._ttl)
        self._carry_out([operation], until)
        return operation.status

    def _get_note(self, space: bytes, note: bytes, until: float) -> tuple[ColdStatus, bytearray]:
        key, slot = self._place(space, note)
        # Its length is not known beforehand: look, then fetch; again if it changed in between.
        operation: _Get | None = None
        status = _MISS
        value = bytearray()
        for _ in range(3):
            (length,) = self._call_each([(slot, pack(b"STRLEN", key + b":0"))], until, numbers=True)
            if not isinstance(length, int):
                status = _LATE if time.monotonic() >= until else _UNAVAILABLE
                if isinstance(length, ReplyError) and length.code == "WRONGTYPE":
                    status = _CORRUPT
                break
            if length == 0:
                status = _MISS
                break
            value = bytearray(min(max(0, length - HEADER_BYTES), self._codec.value_bytes - HEADER_BYTES))
            part = Part(space, note, len(value), 0, 1, 0, len(value))
            operation = _Get(slot, key + b":0", self._codec, part, memoryview(value), self._codec.value_bytes)
            self._carry_out([operation], until)
            status = operation.status
            if status != _CORRUPT or operation.size == length:
                break
        if operation is not None and operation.failed and status == _CORRUPT:
            self._delete_unsound([operation], until)
        return status, value

    def _delete_note(self, note: bytes, until: float) -> bool:
        key, slot = self._place(NOTE_SPACE, note)
        (reply,) = self._call_each([(slot, pack(b"DEL", key + b":0"))], until, numbers=True)
        return reply == 1

    def used_bytes(self) -> int | None:
        """None: the server's memory is shared, and asking would wait."""
        return None

    def capacity_bytes(self) -> int | None:
        """None: the servers have a ``maxmemory``, or not."""
        return None

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the counts of connections do not agree."""
        for server in self._fleet.servers():
            server.check_integrity()

    def _let_go(self) -> None:
        """Close connections, and end the lanes."""
        self._fleet.close()
        self._pool.shutdown(wait=True)

    # How calls are carried out.

    def _place(self, space: bytes, prefix_hash: bytes) -> tuple[bytes, int]:
        key = self._codec.key(space, prefix_hash)
        return key, self._fleet.slot(key)

    def _carry_out(self, operations: Sequence[_Operation], until: float) -> None:
        """Run operations where their slots are, following redirections until they end or time does."""
        pending: Sequence[_Operation] = operations
        for _ in range(_MAX_ROUNDS):
            self._fleet.refresh(until)
            queues: dict[Server, deque[_Operation]] = {}
            for operation in pending:
                server = self._fleet.server_of(operation.slot, operation.redirect)
                operation.asking = operation.redirect is not None and operation.redirect.ask
                operation.redirect = None
                if server is None:
                    operation.status = _UNAVAILABLE
                else:
                    queues.setdefault(server, deque()).append(operation)
            self._run_lanes(queues, until)
            pending = [operation for operation in pending if operation.redirect is not None]
            if not pending or not self._fleet.clustered:
                return
            for operation in pending:
                if operation.redirect is not None and not operation.redirect.ask:
                    self._fleet.follow(operation.redirect)

    def _run_lanes(self, queues: dict[Server, deque[_Operation]], until: float) -> None:
        # No lane takes more than its share at once, or short batches would end up with few lanes.
        lanes = [
            (server, queue, min(_WINDOW_VALUES, -(-len(queue) // self._lanes)))
            for server, queue in queues.items()
            for _ in range(min(self._lanes, len(queue)))
        ]
        if not lanes:
            return
        others: list[tuple[Future[None], deque[_Operation]]] = []
        try:
            for server, queue, share in lanes[1:]:
                others.append((self._pool.submit(self._lane, server, queue, share, until), queue))
        except RuntimeError as error:
            if not self._closed:
                raise
            raise ClosedError("the cold tier is closed") from error
        # The calling thread is a lane itself: a single block needs no hand-over.
        self._lane(*lanes[0], until)
        for future, queue in others:
            # A lane that runs ends by the deadline, and is waited for: it writes into the caller's buffers.
            if not queue and future.cancel():
                continue
            try:
                future.result(max(0.0, until - time.monotonic()))
            except TimeoutError:
                if not future.cancel():
                    future.result()
        for queue in queues.values():
            for operation in queue:
                operation.status = _LATE

    def _lane(self, server: Server, queue: deque[_Operation], share: int, until: float) -> None:
        while queue:
            try:
                wire = server.acquire(until, queue)
            except TimeoutError:
                _settle(queue, _LATE)
                return
            except (ColdTierUnavailableError, ClosedError):
                self._fleet.doubt()
                _settle(queue, _UNAVAILABLE)
                return
            if wire is None:
                return
            flight: deque[_Operation] = deque()
            try:
                _pump(wire, queue, flight, share)
            except TimeoutError:
                _settle(flight, _LATE)
                _settle(queue, _LATE)
                server.discard(wire)
                if server.suspect(wire):
                    self._fleet.doubt()
                return
            except ColdTierUnavailableError as error:
                _log.info("cold tier %s: a connection broke: %s", server.label, error)
                server.discard(wire, stale=True)
                for operation in flight:
                    operation.tries += 1
                    if operation.tries < _MAX_TRIES:
                        queue.append(operation)
                    else:
                        operation.status = _UNAVAILABLE
            except BaseException:
                server.discard(wire)
                raise
            else:
                server.release(wire)

    def _call_each(self, commands: list[tuple[int, bytes]], until: float, *, numbers: bool) -> list[Reply]:
        """Replies to short commands, each on the server of its slot; None where there is none."""
        replies: list[Reply] = [None] * len(commands)
        pending = list(range(len(commands)))
        for _ in range(_MAX_ROUNDS):
            operations: list[_Calls] = []
            for indices in self._by_server(commands, pending):
                operations += [
                    _Calls(
                        commands[chunk[0]][0], [commands[index][1] for index in chunk], chunk, numbers=numbers
                    )
                    for chunk in (
                        indices[start : start + _CALL_CHUNK] for start in range(0, len(indices), _CALL_CHUNK)
                    )
                ]
            self._carry_out(operations, until)
            pending = []
            for operation in operations:
                for index, reply in zip(operation.indices, operation.replies, strict=False):
                    replies[index] = reply
                    redirect = Redirect.of(reply) if isinstance(reply, ReplyError) else None
                    if redirect is not None and self._fleet.clustered and not redirect.ask:
                        self._fleet.follow(redirect)
                        pending.append(index)
            if not pending:
                break
        return replies

    def _by_server(self, commands: list[tuple[int, bytes]], indices: list[int]) -> Iterator[list[int]]:
        if not self._fleet.clustered:
            yield indices
            return
        groups: dict[Server | None, list[int]] = {}
        for index in indices:
            groups.setdefault(self._fleet.server_of(commands[index][0]), []).append(index)
        yield from groups.values()

    def _delete_unsound(self, operations: list[_Get], until: float) -> None:
        """Remove what can never verify, if it still is what was read and time is left."""
        if operations and time.monotonic() < until:
            self._call_each(
                [
                    (
                        each.slot,
                        pack(
                            b"EVAL",
                            _COMPARE_AND_DELETE,
                            b"1",
                            each.key,
                            b"%d" % each.size,
                            bytes(each.header),
                        ),
                    )
                    for each in operations
                ],
                until,
                numbers=True,
            )


def _pump(wire: Wire, queue: deque[_Operation], flight: deque[_Operation], share: int) -> None:
    """Work a queue off over one connection, with a bounded number of values and bytes in flight."""
    window = min(max(_LEAST_WINDOW_BYTES, int(wire.round_trip * _LINE_RATE)), _MOST_WINDOW_BYTES)
    weight = 0
    while True:
        # Refilled when half empty: requests go out a few at a time, and the server never waits for one.
        if len(flight) <= share // 2:
            buffers: list[bytes | memoryview] = []
            outgoing = 0
            while not flight or (len(flight) < share and weight < window):
                try:
                    operation = queue.popleft()
                except IndexError:
                    break
                flight.append(operation)
                weight += operation.weight
                if operation.asking:
                    buffers.append(_ASKING)
                buffers += operation.request()
                if operation.outgoing:
                    outgoing += operation.weight
                    if outgoing >= _SEND_BYTES:
                        # Its hash is made, so it may go while the next one's is.
                        wire.send(buffers)
                        buffers = []
                        outgoing = 0
            if buffers:
                wire.send(buffers)
        if not flight:
            return
        operation = flight[0]
        if operation.asking:
            wire.read_reply()
        operation.receive(wire)
        flight.popleft()
        weight -= operation.weight


def _settle(operations: deque[_Operation], status: ColdStatus) -> None:
    """Empty a queue, giving every operation this status. Other lanes may be at it as well."""
    while operations:
        try:
            operations.popleft().status = status
        except IndexError:
            return


_SEVERITY: Final = (
    _LATE,
    _UNAVAILABLE,
    _FULL,
    _CORRUPT,
    _MISS,
)


def _worst(operations: Sequence[_Operation]) -> ColdStatus:
    """What became of a block, from what became of its parts."""
    if len(operations) == 1:
        return operations[0].status
    states = {operation.status for operation in operations}
    return next((status for status in _SEVERITY if status in states), _OK)
