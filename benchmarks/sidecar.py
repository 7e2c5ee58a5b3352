"""The sidecar's round trips over its Unix socket, beside the same calls of a `HostStore` in one process.

The sidecar runs in a process of its own; its clients are plain blocking sockets with `api/wire.py`, one a
process, so that what is measured is the sidecar and not a client library; beside them the same calls through
`kvpager.connect`, and what two processes need that send bytes to and fro and do nothing else: what the
machine takes for a round trip by itself. Processor time is told, too, which says more than time where others
use the same cores. Then come whole blocks of 2 MiB, put and got by `kvpager.connect`: mapped, over TCP on the
loopback device, and over TLS there; beside them a plain copy of the same bytes, and what a bare TCP
connection carries. And how long it takes from the start of a sidecar whose predecessor was killed, with its
arena full of blocks, to the first answered match; and the memory that it takes beside its arena.

    python benchmarks/sidecar.py [--seconds N] [--clients N,N] [--restart-bytes SIZE] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Final

import kvpager
import numpy as np
from kvpager.api.client import Connection
from kvpager.api.messages import Abort, Commit, Evict, GetStats, Leased, Match, Release, Reserve, Reserved
from kvpager.benchmarks.report import write_report
from kvpager.kvstore.handles import ReserveStatus
from kvpager.kvstore.host import HostStore
from kvpager.tests.certificates import Authority
from kvpager.tests.raw_client import LAYOUT, RawClient, names
from kvpager.tiers.layout import KVLayout
from kvpager.tiers.memory import format_bytes, parse_bytes

RESIDENT: Final = 65_536
"""Blocks of the longest prefix: 1M tokens of 16."""
MANY: Final = 1 << 20
"""Blocks at which memory beside the arena is looked at."""
ARENA_BYTES: Final = 384 << 20
WIDE: Final = KVLayout(32, 8, 128)
"""Blocks of 2 MiB."""
BLOCKS: Final = 16
"""Of these, put or got in one call."""
_FIRST_PUTS: Final = 10
TOKEN: Final = "a token for one benchmark"
ARENAS: Final = "/dev/shm"
RESTARTED: Final = KVLayout(32, 8, 128), KVLayout(8, 1, 128), LAYOUT
"""Blocks of 2 MiB (Llama-3-8B), of 64 KiB, and of 4 KiB."""

_WARM_UP: Final = 20

Row = dict[str, Any]


def spread(call: Callable[[], object], seconds: float) -> Row:
    """Microseconds of a call, median and 99th percentile, over so many seconds after some that warm up."""
    for _ in range(_WARM_UP):
        call()
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(taken) < 20:
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return {
        "calls": len(taken),
        "median_us": float(np.median(taken)) * 1e6,
        "p99_us": float(np.percentile(taken, 99)) * 1e6,
    }


def over_the_socket(path: Path, seconds: float) -> dict[str, Row]:
    with RawClient(path) as client:
        space = client.open()

        def leased(hashes: tuple[bytes, ...]) -> Leased:
            found: Leased = client.call(Match(space, hashes, 0.0), Leased)
            if len(found.slots) != len(hashes):
                raise SystemExit("a match missed")
            return found

        def match_and_release(hashes: tuple[bytes, ...]) -> Callable[[], None]:
            def call() -> None:
                found = leased(hashes)
                client.call(Release(space, found.slots, found.generations))

            return call

        serial = 1 << 40

        def write(count: int, end: type[Commit] | type[Abort]) -> Callable[[], None]:
            def call() -> None:
                nonlocal serial
                serial += count
                found = client.call(Reserve(space, names(serial, count), 0.0), Reserved)
                if found.statuses.any():
                    raise SystemExit("a reservation was denied")
                client.call(end(space, found.slots, found.generations))

            return call

        miss = names(1 << 60, 64)
        rows = {
            "stats": spread(lambda: client.call(GetStats()), seconds),
            "match of 64, a miss": spread(lambda: client.call(Match(space, miss, 0.0)), seconds),
        }
        for count in (64, 4096, RESIDENT):
            rows[f"match and release of {count}"] = spread(match_and_release(names(0, count)), seconds)
        # What is leased stays while the following ones make room for themselves.
        held = leased(names(0, 4096))
        rows["match of 4096, no release"] = spread(lambda: leased(names(0, 4096)), seconds)
        rows["reserve and abort of 256"] = spread(write(256, Abort), seconds)
        rows["reserve and commit of 256"] = spread(write(256, Commit), seconds)
        client.call(Release(space, held.slots, held.generations))
        return rows


def in_one_process(seconds: float) -> dict[str, Row]:
    """The same without a socket between."""
    with HostStore(ARENA_BYTES) as host:
        host.arena.wait_ready()
        space = host.space(LAYOUT)
        space.reserve(names(0, RESIDENT)).commit()
        serial = 1 << 40

        def write() -> None:
            nonlocal serial
            serial += 256
            space.reserve(names(serial, 256)).commit()

        rows = {}

        def match_and_release(hashes: tuple[bytes, ...]) -> None:
            space.match(hashes).release()

        for count in (64, 4096, RESIDENT):
            call = partial(match_and_release, names(0, count))
            rows[f"match and release of {count}"] = spread(call, seconds)
        return {**rows, "reserve and commit of 256": spread(write, seconds)}


def client_calls(path: Path, sidecar: int, seconds: float) -> dict[str, Row]:
    """Round trips through `kvpager.connect`, with the processor time of both sides.

    Args:
        sidecar: its process.
    """
    with kvpager.connect(path, timeout=30.0, strict=True) as client:
        space = client.space(LAYOUT)

        def match_and_release(hashes: tuple[bytes, ...]) -> None:
            with space.match(hashes) as lease:
                if len(lease) != len(hashes):
                    raise SystemExit("a match missed")

        def timed(call: Callable[[], object]) -> Row:
            mine, its = time.process_time(), processor_seconds(sidecar)
            row = spread(call, seconds)
            mine, its = time.process_time() - mine, processor_seconds(sidecar) - its
            calls = row["calls"] + _WARM_UP
            return {**row, "client_cpu_us": mine / calls * 1e6, "sidecar_cpu_us": its / calls * 1e6}

        counts = (64, 4096, RESIDENT)
        rows = {f"match and release of {n}": timed(partial(match_and_release, names(0, n))) for n in counts}
        return {"stats": timed(client.stats), **rows}


def processor_seconds(pid: int) -> float:
    """What a process has used of processors so far, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def to_and_fro(seconds: float, nbytes: int = 1024) -> Row:
    """A round trip of two processes that do nothing else, over a Unix socket."""
    here, there = socket.socketpair()
    answering = multiprocessing.get_context("fork").Process(target=echo, args=(here, there))
    answering.start()
    there.close()
    data = bytes(nbytes)

    def call() -> None:
        here.sendall(data)
        here.recv(nbytes, socket.MSG_WAITALL)

    with here:
        row = spread(call, seconds)
        here.shutdown(socket.SHUT_RDWR)
    answering.join()
    return row


def echo(here: socket.socket, there: socket.socket) -> None:
    here.close()
    with there:
        while data := there.recv(1 << 16):
            there.sendall(data)


def client_process(path: str, number: int, seconds: float, barrier: Barrier, results: Any) -> None:
    """One of several clients: matches and releases of 16 blocks, one call after the other."""
    with RawClient(path, number.to_bytes(16, "big")) as client:
        space = client.open()
        hashes = names(number * 100, 16)
        calls, taken = 0, []
        barrier.wait()
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until:
            found = client.call(Match(space, hashes, 0.0))
            taken.append(time.perf_counter() - began)
            client.call(Release(space, found.slots, found.generations))
            calls += 2
        results.put((calls, float(np.median(taken)), float(np.percentile(taken, 99))))


def pipelined(path: Path, seconds: float, depth: int = 64) -> Row:
    """One client that has so many requests under way: what the sidecar has through when it never waits."""
    with RawClient(path) as client:
        space = client.open()
        hashes = names(1 << 50, 16)
        calls = 0
        until = time.perf_counter() + seconds
        began = time.perf_counter()
        while time.perf_counter() < until:
            for _ in range(depth):
                client.send(Match(space, hashes, 0.0))
            for _ in range(depth):
                client.receive()
            calls += depth
        return {"calls_per_s": calls / (time.perf_counter() - began), "under_way": depth}


def several(path: Path, clients: int, seconds: float) -> Row:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(clients), context.Queue()
    processes = [
        context.Process(target=client_process, args=(str(path), number, seconds, barrier, results))
        for number in range(clients)
    ]
    for process in processes:
        process.start()
    rows = [results.get(timeout=seconds + 120) for _ in processes]
    for process in processes:
        process.join()
    return {
        "clients": clients,
        "calls_per_s": sum(row[0] for row in rows) / seconds,
        "median_us": float(np.median([row[1] for row in rows])) * 1e6,
        "p99_us": max(row[2] for row in rows) * 1e6,
    }


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def whole_blocks(folder: Path, seconds: float) -> dict[str, Row]:
    """Blocks of 2 MiB, put and got by each kind of client of one sidecar, GB/s."""
    files = Authority(folder)
    server = files.certificate()
    rows: dict[str, Row] = {}
    ports = {"TCP": free_port(), "TLS": free_port()}
    urls = {"TCP": f"kvpager://127.0.0.1:{ports['TCP']}", "TLS": f"kvpagers://127.0.0.1:{ports['TLS']}"}
    for name in ("mapped", "TCP", "TLS"):
        path = folder / name
        options = [] if name == "mapped" else ["--listen", f"127.0.0.1:{ports[name]}"]
        if name == "TLS":
            options += ["--tls-cert", str(server.certificate), "--tls-key", str(server.key)]
        serve = start(path, *options)
        try:
            await_memory(path)
            if name == "mapped":
                client = kvpager.connect(path, timeout=10.0, strict=True)
            else:
                ca = files.path if name == "TLS" else None
                client = kvpager.connect(urls[name], token=TOKEN, ca=ca, timeout=10.0, strict=True)
            with client:
                rows[name] = puts_and_gets(client, seconds)
        finally:
            serve.terminate()
            serve.wait(30)
    return rows


def puts_and_gets(client: Connection, seconds: float) -> Row:
    space = client.space(WIDE)
    kv = np.random.default_rng(0).integers(0, 256, (BLOCKS, WIDE.block_bytes), dtype=np.uint8)
    out = np.zeros_like(kv)
    serial = 0

    def put() -> None:
        nonlocal serial
        serial += BLOCKS
        if space.put(names(serial, BLOCKS), kv, wait=1.0) != BLOCKS:
            raise SystemExit("a put was refused")

    def get() -> None:
        if space.get(names(serial, BLOCKS), out) != BLOCKS:
            raise SystemExit("a get missed")

    # As much memory as the arena, all of it touched: no copy finds its place in a cache.
    plain = np.ones((ARENA_BYTES // kv.nbytes, kv.nbytes), dtype=np.uint8)
    turn = 0

    def copy() -> None:
        nonlocal turn
        turn = (turn + 1) % len(plain)
        ctypes.memmove(plain[turn].ctypes.data, kv.ctypes.data, kv.nbytes)

    # Into memory that this process has not touched yet: the arena has room for some more than these.
    first = []
    for _ in range(_FIRST_PUTS):
        began = time.perf_counter()
        put()
        first.append(time.perf_counter() - began)
    taken: dict[Callable[[], None], list[float]] = {put: [], get: [], copy: []}
    until = time.perf_counter() + 2 * seconds
    while time.perf_counter() < until or len(taken[copy]) < 20:
        for call, times in taken.items():  # by turns: whatever else the machine does befalls all of them
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
    get()
    if not np.array_equal(out, kv):
        raise SystemExit("other bytes came back")
    rates = {call: kv.nbytes / float(np.median(times)) / 1e9 for call, times in taken.items()}
    return {
        "block_bytes": WIDE.block_bytes,
        "put_GB_s": rates[put],
        "get_GB_s": rates[get],
        "memcpy_GB_s": rates[copy],
        "first_put_GB_s": kv.nbytes / float(np.median(first)) / 1e9,
    }


def bare_tcp(seconds: float) -> float:
    """GB/s of one connection over the loopback device, sent in 2 MiB and thrown away."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        reader = multiprocessing.get_context("fork").Process(target=throw_away, args=(listening,))
        reader.start()
        data, sent = bytes(WIDE.block_bytes), 0
        with socket.create_connection(listening.getsockname()) as sending:
            began = time.perf_counter()
            while time.perf_counter() < began + seconds:
                sending.sendall(data)
                sent += len(data)
            sending.shutdown(socket.SHUT_WR)
            sending.recv(1)
            taken = time.perf_counter() - began
        reader.join()
    return sent / taken / 1e9


def throw_away(listening: socket.socket) -> None:
    connected, _ = listening.accept()
    place = bytearray(1 << 20)
    with connected:
        while connected.recv_into(place):
            pass


def start(path: Path, *more: str, nbytes: int = ARENA_BYTES) -> subprocess.Popen[bytes]:
    settings = "--quiet", "--admin", "off", "--socket", str(path), "--host-bytes", str(nbytes), *more
    return subprocess.Popen(
        [sys.executable, "-m", "kvpager.api.cli", "serve", *settings],
        env={**os.environ, "PYTHONSAFEPATH": "1", "KVPAGER_TOKEN": TOKEN},
    )


def await_memory(path: Path) -> None:
    """Wait for the sidecar and its memory."""
    until = time.monotonic() + 60
    while not path.exists():
        if time.monotonic() > until:
            raise SystemExit("the sidecar did not start")
        time.sleep(0.05)
    with RawClient(path) as client:
        while client.call(GetStats()).values["arena"]["ready_bytes"] < ARENA_BYTES:
            time.sleep(0.05)


def fill(path: Path) -> None:
    """Wait for the sidecar and its memory, and make the prefix resident."""
    await_memory(path)
    with RawClient(path) as client:
        space = client.open()
        found = client.call(Reserve(space, names(0, RESIDENT), 0.0), Reserved)
        if found.statuses.any():
            raise SystemExit("the arena is too small")
        client.call(Commit(space, found.slots, found.generations))
        client.call(Evict(space, 0))


def connected(path: Path) -> RawClient:
    """A client, as soon as there can be one."""
    until = time.monotonic() + 60
    while True:
        try:
            return RawClient(path, b"b" * 16)
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > until:
                raise SystemExit("the sidecar did not start") from None
            time.sleep(0.001)


def resident_beside(pid: int, arena: str) -> int:
    """Bytes of a process's resident memory but for what it has mapped of an arena's file."""
    total, mapped = 0, ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            mapped = words[5] if len(words) > 5 else ""
        elif words[0] == "Rss:" and mapped != arena:
            total += int(words[1]) << 10
    return total


def restart(folder: Path, nbytes: int, layout: KVLayout, runs: int = 3) -> Row:
    """Seconds from the start of a sidecar to the first answered match, its arena full of committed blocks."""
    path, file = folder / "restart.sock", f"{ARENAS}/kvpager-bench-{os.getpid()}.arena"
    arena = f"--arena={file}"
    serve = start(path, arena, nbytes=nbytes)
    resident: dict[int, int] = {}
    try:
        with connected(path) as client:
            space = client.open(layout)
            while client.call(GetStats()).values["arena"]["ready_bytes"] < nbytes:
                time.sleep(0.05)
            blocks = 0
            while True:
                found = client.call(Reserve(space, names(blocks, RESIDENT), 0.0), Reserved)
                new = found.statuses == ReserveStatus.NEW
                client.call(Commit(space, found.slots[new], found.generations[new]))
                blocks += int(new.sum())
                if blocks == MANY:
                    resident[blocks] = resident_beside(serve.pid, file)
                if not new.all() or blocks * layout.block_bytes >= nbytes:
                    break
            resident[blocks] = resident_beside(serve.pid, file)
        taken = []
        for _ in range(runs):
            serve.kill()
            serve.wait()
            began = time.perf_counter()
            serve = start(path, arena, nbytes=nbytes)
            with connected(path) as client:
                asked = names(0, min(64, blocks))
                leased = client.call(Match(client.open(layout), asked, 0.0), Leased)
                taken.append(time.perf_counter() - began)
                if (
                    len(leased.slots) != len(asked)
                    or client.call(GetStats()).values["host"]["adopted"] != blocks
                ):
                    raise SystemExit("a block was lost")
    finally:
        serve.terminate()
        serve.wait(60)
    return {
        "bytes": nbytes,
        "block_bytes": layout.block_bytes,
        "blocks": blocks,
        "seconds": taken,
        "resident_beside_arena": {str(count): nbytes for count, nbytes in resident.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Round trips of the sidecar over its Unix socket")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each figure (default: %(default)s)")
    parser.add_argument(
        "--clients", default="1,8,16", help="how many clients at once, of each figure (default: %(default)s)"
    )
    parser.add_argument(
        "--restart-bytes",
        metavar="SIZE",
        default="8G",
        help="of the arena that is full when its sidecar is killed, in /dev/shm (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, help="write machine, versions and results to this file")
    options = parser.parse_args()
    restart_bytes = parse_bytes("--restart-bytes", options.restart_bytes)
    alone = in_one_process(options.seconds)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sidecar.sock"
        serve = start(path)
        try:
            fill(path)
            calls = client_calls(path, serve.pid, options.seconds)
            bare_trip = to_and_fro(options.seconds)
            rows = over_the_socket(path, options.seconds)
            many = [several(path, int(count), options.seconds) for count in options.clients.split(",")]
            never_waiting = pipelined(path, options.seconds)
        finally:
            serve.terminate()
            serve.wait(30)
        wide = whole_blocks(Path(folder), options.seconds)
        restarts = [restart(Path(folder), restart_bytes, layout) for layout in RESTARTED]
    bare = bare_tcp(options.seconds)
    for name, row in rows.items():
        beside = f"   in one process {alone[name]['median_us']:8.0f} us" if name in alone else ""
        print(f"{name:28} median {row['median_us']:8.0f} us  p99 {row['p99_us']:8.0f} us{beside}")
    for name, row in calls.items():
        print(
            f"client: {name:24} median {row['median_us']:8.0f} us  p99 {row['p99_us']:8.0f} us   "
            f"processor time: client {row['client_cpu_us']:.0f} us, sidecar {row['sidecar_cpu_us']:.0f} us"
        )
    print(f"1 KiB to and fro, bare: median {bare_trip['median_us']:.0f} us  p99 {bare_trip['p99_us']:.0f} us")
    for row in many:
        print(
            f"{row['clients']} clients, match and release of 16: {row['calls_per_s']:.0f} calls/s, "
            f"median {row['median_us']:.0f} us, p99 {row['p99_us']:.0f} us"
        )
    depth, rate = never_waiting["under_way"], never_waiting["calls_per_s"]
    print(f"one client, {depth} matches under way: {rate:.0f} calls/s")
    for name, row in wide.items():
        rates = (
            f"put {row['put_GB_s']:.2f} GB/s (first {row['first_put_GB_s']:.2f}), "
            f"get {row['get_GB_s']:.2f} GB/s, plain copy {row['memcpy_GB_s']:.2f}"
        )
        print(f"{BLOCKS} blocks of 2 MiB, {name:6}: {rates}")
    print(f"bare TCP over the loopback device: {bare:.2f} GB/s")
    for row in restarts:
        print(
            f"restart of {format_bytes(row['bytes'])} full of {row['blocks']} blocks of "
            f"{format_bytes(row['block_bytes'])}: first match after "
            f"{', '.join(f'{seconds:.2f}' for seconds in row['seconds'])} s; beside the arena it takes "
            + ", ".join(
                f"{format_bytes(size)} at {count} blocks"
                for count, size in row["resident_beside_arena"].items()
            )
        )
    loop = "uvloop" if importlib.util.find_spec("uvloop") is not None else "asyncio"
    write_report(
        options.json,
        {
            "loop": loop,
            "socket": rows,
            "client": calls,
            "to_and_fro": bare_trip,
            "one_process": alone,
            "clients": many,
            "pipelined": never_waiting,
            "blocks": wide,
            "bare_tcp_GB_s": bare,
            "restarts": restarts,
        },
        "msgpack",
        "uvloop",
    )


if __name__ == "__main__":
    main()
