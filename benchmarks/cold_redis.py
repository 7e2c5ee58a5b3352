"""Put and get of blocks through Redis: the cold tier, plain sockets, and LMCache's two clients.

All against one server that this program starts, taking turns, with equally many connections. Plain sockets
move the same values (record headers included) with `sendmsg` and `recv_into` in as many threads, with one and
with two values in flight each, and check nothing. LMCache is left out where its environment is not there.
Beside the rates stand the processor seconds that a gigabyte costs the client and the server: where the
machine has work of others to do, they are steadier than the rates.

    python benchmarks/cold_redis.py --peer-python "$(benchmarks/peers/setup_lmcache)" --json FILE
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import redis
from kvpager.benchmarks.report import write_report
from kvpager.tests.redis_servers import RedisServer
from kvpager.tiers.cold_redis import DEFAULT_CONNECTIONS, RedisColdTier
from kvpager.tiers.record import HEADER_BYTES, RecordCodec

Blocks = npt.NDArray[np.uint8]
SIZES = {256 << 10: 256, 2 << 20: 64, 32 << 20: 6}
"""Block bytes to blocks of a batch."""


class Cost(NamedTuple):
    """What one batch took, in seconds."""

    elapsed: float
    processor: float
    """Of all threads of the client's process."""


class Stopwatch:
    """Measures one batch in this process."""

    def __init__(self) -> None:
        self._processor = time.process_time()
        self._began = time.perf_counter()

    def stop(self) -> Cost:
        """The cost since construction."""
        elapsed = time.perf_counter() - self._began
        return Cost(elapsed, time.process_time() - self._processor)


Contestant = Callable[[str, Blocks], Cost]


class PlainSockets:
    """The same values over as many connections, with nothing around them."""

    def __init__(self, port: int, connections: int, in_flight: int) -> None:
        self._in_flight = in_flight
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(connections)]
        for each in self._sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._codec = RecordCodec()

    def run(self, op: str, blocks: Blocks) -> Cost:
        """Move one batch."""
        values: list[tuple[bytes, memoryview]] = []
        for index, block in enumerate(blocks):
            view = memoryview(block)
            for part in self._codec.split(bytes(16), bytes(16), len(view)):
                key = b"plain:%d:%06d:%02d" % (len(view), index, part.number)
                values.append((key, view[part.start : part.stop]))
        work = self._put if op == "put" else self._get
        count = len(self._sockets)
        threads = [
            threading.Thread(target=work, args=(sock, values[lane::count]))
            for lane, sock in enumerate(self._sockets)
        ]
        watch = Stopwatch()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return watch.stop()

    def _put(self, sock: socket.socket, values: list[tuple[bytes, memoryview]]) -> None:
        header = bytes(HEADER_BYTES)
        waiting = 0
        for key, view in values:
            size = HEADER_BYTES + len(view)
            begin = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key, size)
            pieces = [memoryview(begin + header), view, memoryview(b"\r\n")]
            left = sum(map(len, pieces))
            while True:
                sent = sock.sendmsg(pieces)
                left -= sent
                if not left:
                    break
                while sent >= len(pieces[0]):
                    sent -= len(pieces.pop(0))
                pieces[0] = pieces[0][sent:]
            waiting += 1
            if waiting == self._in_flight:
                self._expect(sock, b"+OK\r\n")
                waiting -= 1
        for _ in range(waiting):
            self._expect(sock, b"+OK\r\n")

    def _get(self, sock: socket.socket, values: list[tuple[bytes, memoryview]]) -> None:
        header = memoryview(bytearray(HEADER_BYTES))
        asks = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(key), key) for key, _ in values]
        sock.sendall(b"".join(asks[: self._in_flight]))
        for index, (_, view) in enumerate(values):
            self._expect(sock, b"$%d\r\n" % (HEADER_BYTES + len(view)))
            self._fill(sock, header)
            self._fill(sock, view)
            self._expect(sock, b"\r\n")
            if index + self._in_flight < len(asks):
                sock.sendall(asks[index + self._in_flight])

    @staticmethod
    def _fill(sock: socket.socket, view: memoryview) -> None:
        done = 0
        while done < len(view):
            done += sock.recv_into(view[done:], 0, socket.MSG_WAITALL)

    def _expect(self, sock: socket.socket, text: bytes) -> None:
        view = memoryview(bytearray(len(text)))
        self._fill(sock, view)
        if view != text:
            raise RuntimeError(f"expected {text!r}, got {bytes(view)!r}")

    def close(self) -> None:
        """Close the sockets."""
        for each in self._sockets:
            each.close()


class LMCache:
    """LMCache's clients, in a process of their own."""

    def __init__(self, python: str, port: int, connections: int) -> None:
        driver = Path(__file__).parent / "peers" / "lmcache_redis.py"
        self._process = subprocess.Popen(
            [python, str(driver), str(port), str(connections)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONSAFEPATH": "1", "LMCACHE_LOG_LEVEL": "ERROR"},
        )

    def run(self, client: str, op: str, size: int, count: int) -> Cost:
        """Move one batch."""
        job = {"client": client, "op": op, "bytes": size, "count": count}
        to, of = self._pipes()
        print(json.dumps(job), file=to, flush=True)
        line = of.readline()
        if not line:
            raise RuntimeError("the peer ended; see above")
        answer = json.loads(line)
        return Cost(answer["seconds"], answer["processor_seconds"])

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the peer has no pipes")
        return self._process.stdin, self._process.stdout

    def close(self) -> None:
        """End the process."""
        for pipe in self._pipes():
            pipe.close()
        self._process.wait(10)


@contextlib.contextmanager
def contestants(
    server: RedisServer, url: str, connections: int, peer_python: str | None
) -> Iterator[dict[str, Contestant]]:
    """What takes turns: name to a function that moves one batch."""
    space = bytes(16)
    with contextlib.ExitStack() as stack:
        tier = stack.enter_context(
            contextlib.closing(RedisColdTier(url, connections=connections, deadline=60))
        )

        def ours(op: str, blocks: Blocks) -> Cost:
            hashes = [b"%016d" % index for index in range(len(blocks))]
            views = [memoryview(block) for block in blocks]
            landing = LANDING[: blocks.size].reshape(blocks.shape)
            watch = Stopwatch()
            if op == "put":
                status = tier.put(space, hashes, views)
            else:
                status = tier.get(space, hashes, [memoryview(block) for block in landing])
            cost = watch.stop()
            if status.any() or (op == "get" and not np.array_equal(landing, blocks)):
                raise RuntimeError(f"{op} failed: {status}")
            return cost

        table: dict[str, Contestant] = {"kvpager": ours}
        for in_flight in (1, 2):
            plain = stack.enter_context(contextlib.closing(PlainSockets(server.port, connections, in_flight)))
            table[f"sockets, {in_flight} each"] = (
                lambda op, blocks, plain=plain: plain.run(  # type: ignore[misc]
                    op, blocks if op == "put" else LANDING[: blocks.size].reshape(blocks.shape)
                )
            )
        if peer_python is not None:
            peer = stack.enter_context(contextlib.closing(LMCache(peer_python, server.port, connections)))
            for client in ("native", "python"):
                table[f"LMCache {client}"] = lambda op, blocks, client=client: peer.run(  # type: ignore[misc]
                    client, op, blocks.shape[1], len(blocks)
                )
        yield table


LANDING: Blocks = np.zeros(max(size * count for size, count in SIZES.items()), np.uint8)


def measure(connections: int, rounds: int, peer_python: str | None) -> dict[str, Any]:
    """By block size, operation and contestant: rates in GB/s (1e9 bytes), and processor seconds per GB."""
    results: dict[str, Any] = {}
    random = np.random.default_rng(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer(Path(folder)) as server,
        contestants(server, server.url, connections, peer_python) as table,
        server.client() as client,
    ):
        for size, count in SIZES.items():
            blocks = random.integers(0, 256, (count, size), np.uint8)
            turns: dict[tuple[str, str], list[Turn]] = {}
            names = list(table)
            for number in range(rounds + 1):
                order = names[number % len(names) :] + names[: number % len(names)]
                for op in ("put", "get"):
                    for name in order:
                        before = _server_seconds(client)
                        cost = table[name](op, blocks)
                        turn = Turn(cost, _server_seconds(client) - before)
                        if number:  # the first turn opens connections and touches memory
                            turns.setdefault((op, name), []).append(turn)
            client.flushall()
            results[f"{size >> 10} KiB x {count}"] = {
                op: {
                    name: _summary(blocks.nbytes / 1e9, turns[op, name], turns[op, names[0]])
                    for name in names
                }
                for op in ("put", "get")
            }
    return results


class Turn(NamedTuple):
    """One batch of one contestant."""

    cost: Cost
    server_processor: float


def _server_seconds(client: redis.Redis) -> float:
    """Processor seconds that the server has used so far."""
    used = client.info("cpu")
    return float(used["used_cpu_user_main_thread"]) + float(used["used_cpu_sys_main_thread"])


def _summary(gigabytes: float, turns: list[Turn], ours: list[Turn]) -> dict[str, float]:
    """Medians; how often ours contains theirs is the median of the ratios within a turn."""
    rates = [gigabytes / turn.cost.elapsed for turn in turns]
    ratios = [a.cost.elapsed / b.cost.elapsed for a, b in zip(turns, ours, strict=True)]
    return {
        "GB/s": round(statistics.median(rates), 3),
        "least": round(min(rates), 3),
        "greatest": round(max(rates), 3),
        "kvpager is times": round(statistics.median(ratios), 3),
        "client s/GB": round(statistics.median(turn.cost.processor for turn in turns) / gigabytes, 3),
        "server s/GB": round(statistics.median(turn.server_processor for turn in turns) / gigabytes, 3),
    }


def main() -> None:
    """Measure, print a table, and write JSON where asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--connections", type=int, default=DEFAULT_CONNECTIONS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--peer-python", help="python of LMCache's environment")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = measure(arguments.connections, arguments.rounds, arguments.peer_python)
    for blocks, ops in results.items():
        for op, names in ops.items():
            print(f"{blocks}, {op}")
            for name, row in names.items():
                print(
                    f"  {name:16} {row['GB/s']:6.2f} GB/s ({row['least']:.2f}-{row['greatest']:.2f})"
                    f"   kvpager is {row['kvpager is times']:.2f} times this"
                    f"   processor {row['client s/GB']:.2f} + {row['server s/GB']:.2f} s/GB"
                )
    server = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=True)
    write_report(
        arguments.json,
        {"connections": arguments.connections, "rounds": arguments.rounds, **results},
        "redis",
        "xxhash",
        redis_server=server.stdout.split()[2].removeprefix("v="),
        lmcache="0.5.6" if arguments.peer_python else "not measured",
    )


if __name__ == "__main__":
    main()
