"""The admin process over a full arena: how long each GET takes, and what being watched costs the engines.

A sidecar with a million resident blocks of the smallest kind, in chains of which many share their beginning,
is asked for everything that the admin API tells, again and again. Then an engine's match of 64 blocks is
timed with nobody watching, and with a dashboard open and a Prometheus that scrapes every second, in turns.

    python benchmarks/admin.py [--blocks N] [--rounds N] [--seconds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
from kvpager.api.admin.discovery import find_admin
from kvpager.api.client import Connection, connect
from kvpager.benchmarks.report import write_report
from kvpager.kvstore.lineage import Lineage
from kvpager.tiers.errors import ServiceUnavailableError
from kvpager.tiers.layout import KVLayout

LAYOUT: Final = KVLayout(1, 1, 1, dtype="uint8", planes=1)
"""128 bytes a block, the smallest there is: what is timed is bookkeeping."""
CHAIN: Final = 512
"""Blocks of a chain, 8k tokens, and
SHARED: of them that each of a group of chains has."""
SHARED: Final = 128
GROUP: Final = 16
MATCHED: Final = 64
PAGE: Final = (
    "/v1/status",
    "/v1/tiers",
    "/v1/tiers/host",
    "/v1/tiers/host/map?cells=1024",
    "/v1/prefixes?order=largest&limit=20",
    "/v1/prefixes?order=hottest&limit=20",
    "/v1/prefixes?order=shared&limit=20",
    "/v1/sessions",
    "/v1/clients",
    "/v1/config",
    "/metrics",
)
"""What a dashboard and a Prometheus ask."""

Row = dict[str, Any]


@contextmanager
def served(folder: Path, nbytes: int) -> Iterator[str]:
    """The socket of a sidecar with an admin process."""
    path = folder / "socket"
    command = [sys.executable, "-P", "-m", "kvpager", "serve", "--quiet", "--socket", str(path)]
    command += ["--host-bytes", str(nbytes), "--admin", "127.0.0.1:0"]
    process = subprocess.Popen(command)
    try:
        yield str(path)
    finally:
        process.terminate()
        process.wait()


def admin_url(path: str) -> str:
    """Where its admin process is, as soon as it answers."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with suppress(ServiceUnavailableError, httpx.TransportError):
            url = find_admin(path).url
            if httpx.get(f"{url}/readyz").status_code == 200:
                return url
        time.sleep(0.1)
    raise SystemExit("the admin process does not serve")


def fill(engine: Connection, blocks: int) -> list[bytes]:
    """Have so many blocks resident; returns the hashes of one chain."""
    rng = np.random.default_rng(0)
    space = engine.space(LAYOUT)
    data = np.zeros((CHAIN, LAYOUT.block_bytes), np.uint8)
    trunk: list[bytes] = []
    chain: list[bytes] = []
    written = number = 0
    while written < blocks:
        if number % GROUP == 0:
            trunk = [rng.bytes(16) for _ in range(SHARED)]
        chain = [*trunk, *(rng.bytes(16) for _ in range(CHAIN - SHARED))]
        if space.put(chain, data, wait=5.0, lineage=Lineage.of_chain(chain)) != CHAIN:
            raise SystemExit("host memory denied a block")
        written += CHAIN - SHARED if number % GROUP else CHAIN
        number += 1
    return chain


def spread(seconds: list[float]) -> Row:
    """Milliseconds, median, 99th percentile and worst."""
    taken = np.array(seconds) * 1e3
    return {
        "calls": len(taken),
        "median_ms": float(np.median(taken)),
        "p99_ms": float(np.percentile(taken, 99)),
        "worst_ms": float(taken.max()),
    }


def time_gets(url: str, last: bytes, rounds: int) -> dict[str, Row]:
    """Each GET, in turns, while what is told is renewed as it would be."""
    paths = (*PAGE, f"/v1/prefixes/{last.hex()}", "/healthz", "/readyz")
    taken: dict[str, list[float]] = {path: [] for path in paths}
    with httpx.Client(base_url=url, timeout=60) as client:
        client.get("/v1/prefixes")
        client.get("/v1/tiers/host/map")
        for number in range(rounds):
            for path in paths:
                began = time.perf_counter()
                answer = client.get(path)
                took = time.perf_counter() - began
                if answer.status_code != 200:
                    raise SystemExit(f"{path}: {answer.text}")
                if number:
                    taken[path].append(took)
            time.sleep(0.1)
    return {path: spread(times) for path, times in taken.items()}


class Watchers:
    """A dashboard and a Prometheus, which ask for everything every second, and hear of events."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._watch()))

    def __enter__(self) -> Watchers:
        self._thread.start()
        time.sleep(1.0)
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _watch(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=60) as client:
            listening = asyncio.create_task(self._listen(client))
            while not self._stop.is_set():
                began = time.monotonic()
                for path in PAGE:
                    await client.get(path)
                await asyncio.sleep(max(0.0, 1.0 - (time.monotonic() - began)))
            listening.cancel()
            with suppress(asyncio.CancelledError):
                await listening

    async def _listen(self, client: httpx.AsyncClient) -> None:
        async with client.stream("GET", "/v1/events") as stream:
            async for _ in stream.aiter_lines():
                pass


def time_matches(engine: Connection, hashes: list[bytes], seconds: float) -> list[float]:
    """Matches of 64 blocks and their releases, for so long."""
    space = engine.space(LAYOUT)
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        lease = space.match(hashes)
        taken.append(time.perf_counter() - began)
        lease.release()
        time.sleep(0.0005)  # as an engine's requests come: not all the time
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description="The admin process over a full arena")
    parser.add_argument("--blocks", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=100, help="of all GETs")
    parser.add_argument("--seconds", type=float, default=5.0, help="of matches at a time")
    parser.add_argument("--json", type=Path, help="write machine, versions and results to this file")
    options = parser.parse_args()
    nbytes = -(-options.blocks * LAYOUT.block_bytes * 5 // 4 >> 24) << 24
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), nbytes) as path:
        url = admin_url(path)
        with connect(path, name="engine", timeout=60, strict=True) as engine:
            chain = fill(engine, options.blocks)
            resident = httpx.get(f"{url}/v1/tiers/host", headers={"Cache-Control": "no-cache"}).json()[
                "blocks"
            ]
            print(f"{resident} blocks resident")
            gets = time_gets(url, chain[-1], options.rounds)
            for name, row in gets.items():
                print(f"{name:40} {row['median_ms']:8.1f} {row['p99_ms']:8.1f} {row['worst_ms']:8.1f} ms")
            alone: list[float] = []
            watched: list[float] = []
            for _ in range(4):
                alone += time_matches(engine, chain[:MATCHED], options.seconds)
                with Watchers(url):
                    watched += time_matches(engine, chain[:MATCHED], options.seconds)
    matches = {"alone": spread(alone), "watched": spread(watched)}
    for name, row in matches.items():
        print(f"match of {MATCHED}, {name:10} {row['median_ms']:8.3f} {row['p99_ms']:8.3f} ms")
    if options.json is not None:
        write_report(options.json, {"resident": resident, "gets": gets, "matches": matches})


if __name__ == "__main__":
    main()
