"""Blocks of 2 MiB put into LMCache's cache server and got from it, beside kvpager's sidecar, on a CPU.

LMCache's server is another process that engines of a machine share, as the sidecar is. Its own benchmark's
client (``lmcache bench server --mode cpu``) stores and retrieves a request's KV from and to an engine's
tensors in either way that it has: *engine driven* (the client gathers and scatters) and *server driven* (the
server does, through POSIX shared memory). 16 tokens of a model with 32 layers and 8 KV heads of 128 float16
elements are 2 MiB, and the server's chunk. Beside them are kvpager's clients, mapped and over TCP on the
loopback device, with whole blocks, and mapped from and to the same tensors as LMCache's; and a plain copy of
as many bytes. All take turns in one run.

What is timed is in the peer's favour: its store until it is answered, which may be before the KV is found
(``found`` is until then), and its retrieve without the lookup that goes before it. kvpager's calls are whole:
names in, blocks found there or got.

    python benchmarks/peers/lmcache_server.py --peer-python "$(benchmarks/peers/setup_lmcache)" [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

LAYERS: Final = 32
HEADS: Final = 8
HEAD_DIM: Final = 128
TOKENS: Final = 16
"""Of a block."""
BLOCKS: Final = 16
"""Put or got in one call."""
BLOCK_BYTES: Final = LAYERS * 2 * HEADS * HEAD_DIM * TOKENS * 2
TENSOR_BLOCKS: Final = 64
"""Blocks that an engine's tensors hold."""
HOST_BYTES: Final = 1 << 29
WARM: Final = HOST_BYTES // BLOCK_BYTES // BLOCKS + 2
"""Turns before any is timed: all of the memory has been written once then, and makes room for what comes."""
ROUNDS: Final = 5
TOKEN: Final = "a token for one benchmark"
WAYS: Final = {"engine driven": "engine_driven", "server driven": "lmcache_driven"}
_START_SECONDS: Final = 120.0

Timed = dict[str, list[float]]


# ---- in LMCache's environment ----


def drive(rpc: str, http: str, way: str) -> None:
    """Store and retrieve once for each line that comes; answer with the seconds that it took."""
    import torch
    from lmcache.cli.commands.bench.server_bench.client import (  # type: ignore[import-not-found]
        ServerBenchClient,
    )
    from lmcache.cli.commands.bench.server_bench.config import (  # type: ignore[import-not-found]
        BenchConfig,
    )

    config = BenchConfig(
        rpc_url=rpc,
        http_url=http,
        mode="cpu",
        transfer_mode=way,
        tp_size=1,
        use_mla=False,
        num_tokens=BLOCKS * TOKENS,
        kvcache_shape_spec=f"(2,{TENSOR_BLOCKS},{TOKENS},{HEADS},{HEAD_DIM}):float16:{LAYERS}",
        num_blocks=TENSOR_BLOCKS,
        block_size=TOKENS,
    )
    client = ServerBenchClient(config, lambda _: None)
    client.start()
    tensors = list(client._workers[0].kv_caches.values())
    for number, _ in enumerate(sys.stdin):
        request = client.create_request(number, f"put-{number}", "put")
        blocks = slice(request.block_offset, request.block_offset + BLOCKS)
        for tensor in tensors:
            tensor[:, blocks] = torch.rand_like(tensor[:, blocks])
        kept = [tensor[:, blocks].clone() for tensor in tensors]
        if not client.lookup(request).is_full_miss:
            raise SystemExit("something is there already")
        began = time.perf_counter()
        stored = client.store(request, 0, request.num_full_tokens)
        put = time.perf_counter() - began
        if not stored.succeeded:
            raise SystemExit("a store was refused")
        while True:
            client.end_session(request)
            request = client.create_request(number, f"get-{number}-{time.monotonic_ns()}", "get")
            if client.lookup(request).is_full_hit:
                break
            if time.perf_counter() > began + 30:
                raise SystemExit("what was stored is not found")
        found = time.perf_counter() - began
        for tensor in tensors:
            tensor[:, blocks] = 0
        began = time.perf_counter()
        retrieved = client.retrieve(request, 0, request.num_full_tokens)
        get = time.perf_counter() - began
        client.end_session(request)
        same = all(torch.equal(tensor[:, blocks], one) for tensor, one in zip(tensors, kept, strict=True))
        if not (retrieved.succeeded and same):
            raise SystemExit("other bytes came back")
        print(json.dumps({"put": put, "found": found, "get": get}), file=_answers(), flush=True)
    client.close()


def _answers() -> Any:
    """Where answers go, which log lines do not mix with."""
    return os.fdopen(int(os.environ["KVPAGER_ANSWERS"]), "w", closefd=False)


# ---- in kvpager's ----


class Peer:
    """LMCache's server and a client of it, each a process in its environment."""

    def __init__(self, python: str, folder: Path, way: str) -> None:
        rpc, http = _free_ports(2)
        program = str(Path(python).with_name("lmcache"))
        settings = {
            "--host": "127.0.0.1",
            "--port": str(rpc),
            "--http-port": str(http),
            "--chunk-size": str(TOKENS),
            "--l1-size-gb": str(HOST_BYTES / (1 << 30)),
            "--eviction-policy": "LRU",
            # By default the tensors' first block is no block, and nothing that begins there is found.
            "--null-block-id": str(TENSOR_BLOCKS),
            "--supported-transfer-mode": way,
        }
        command = [program, "server", "--no-l1-use-lazy", "--disable-observability"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment |= {
            "LMCACHE_DISABLE_BANNER": "1",
            "LMCACHE_LOG_LEVEL": "ERROR",
            "LMCACHE_TRACK_USAGE": "false",
        }
        self._log = (folder / f"{way}.log").open("w+")
        quiet: dict[str, Any] = {"stdout": self._log, "stderr": self._log, "cwd": folder}
        self._server = subprocess.Popen(
            [*command, *(word for pair in settings.items() for word in pair)], env=environment, **quiet
        )
        _await_http(f"http://127.0.0.1:{http}/", self._server)
        answers, theirs = os.pipe()
        self._answers = os.fdopen(answers)
        self._client = subprocess.Popen(
            [python, __file__, "--drive", f"tcp://127.0.0.1:{rpc}", f"http://127.0.0.1:{http}", way],
            stdin=subprocess.PIPE,
            text=True,
            pass_fds=[theirs],
            env={**environment, "KVPAGER_ANSWERS": str(theirs)},
            **quiet,
        )
        os.close(theirs)

    def take_turn(self, into: Timed) -> None:
        """One put and one get."""
        if self._client.stdin is None:
            raise TypeError("the client has a pipe")
        print("go", file=self._client.stdin, flush=True)
        line = self._answers.readline()
        if not line:
            self._log.seek(0)
            raise SystemExit(f"LMCache's client ended:\n{self._log.read()[-4000:]}")
        for what, seconds in json.loads(line).items():
            into.setdefault(what, []).append(seconds)

    def close(self) -> None:
        for process in (self._client, self._server):
            process.kill()
            process.wait()
        self._answers.close()
        self._log.close()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _await_http(url: str, server: subprocess.Popen[Any]) -> None:
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except urllib.error.HTTPError:
            return  # it answers, whatever it thinks of the page
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise SystemExit("LMCache's server does not start")


@contextlib.contextmanager
def sidecar(folder: Path) -> Iterator[tuple[Path, int]]:
    """A sidecar's socket and port."""
    import kvpager
    from kvpager.tiers.errors import ServiceUnavailableError

    (port,) = _free_ports(1)
    path = folder / "sidecar.sock"
    words = ["serve", "--quiet", "--socket", str(path), "--host-bytes", str(HOST_BYTES), "--arena", "memory"]
    serve = subprocess.Popen(
        [sys.executable, "-m", "kvpager.api.cli", *words, "--listen", f"127.0.0.1:{port}"],
        env={**os.environ, "PYTHONSAFEPATH": "1", "KVPAGER_TOKEN": TOKEN},
    )
    try:
        until = time.monotonic() + _START_SECONDS
        ready = 0
        while ready < HOST_BYTES:
            if serve.poll() is not None or time.monotonic() > until:
                raise SystemExit("the sidecar does not start")
            with contextlib.suppress(ServiceUnavailableError), kvpager.connect(path) as client:
                ready = client.stats()["arena"]["ready_bytes"]
            time.sleep(0.05)
        yield path, port
    finally:
        serve.terminate()
        serve.wait(60)


def of_kvpager(path: Path, port: int, stack: contextlib.ExitStack) -> dict[str, Callable[[Timed], None]]:
    """What takes turns of kvpager's: a put and a get of blocks, in each way."""
    import kvpager
    import numpy as np
    from kvpager.tests.raw_client import names

    layout = kvpager.KVLayout(LAYERS, HEADS, HEAD_DIM, TOKENS)
    clients = {
        "mapped": stack.enter_context(kvpager.connect(path, timeout=30.0, strict=True)),
        "tcp": stack.enter_context(
            kvpager.connect(f"kvpager://127.0.0.1:{port}", token=TOKEN, timeout=30.0, strict=True)
        ),
    }
    spaces = {name: client.space(layout) for name, client in clients.items()}
    generator = np.random.default_rng(0)
    kv = generator.integers(0, 256, (BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    out = np.zeros_like(kv)
    page = TOKENS * HEADS * HEAD_DIM * 2
    tensors = generator.integers(0, 256, (LAYERS, 2, TENSOR_BLOCKS, page), dtype=np.uint8)
    serial = 0

    def fresh() -> tuple[bytes, ...]:
        nonlocal serial
        serial += BLOCKS
        return names(serial, BLOCKS)

    def whole(name: str, into: Timed) -> None:
        hashes, space = fresh(), spaces[name]
        began = time.perf_counter()
        kept = space.put(hashes, kv, wait=5.0)
        between = time.perf_counter()
        got = space.get(hashes, out)
        ended = time.perf_counter()
        if (kept, got) != (BLOCKS, BLOCKS) or not np.array_equal(out, kv):
            raise SystemExit("other bytes came back")
        out[:] = 0
        into.setdefault("put", []).append(between - began)
        into.setdefault("get", []).append(ended - between)

    def gathered(into: Timed) -> None:
        """From an engine's tensors to the slots, and back: by numpy, a layer of a block at a time."""
        hashes, space = fresh(), spaces["mapped"]
        began = time.perf_counter()
        with space.reserve(hashes, wait=5.0) as reservation:
            for at, block in enumerate(reservation.blocks):
                block.reshape(LAYERS, 2, page)[:] = tensors[:, :, at]
            reservation.commit()
        between = time.perf_counter()
        with space.match(hashes) as lease:
            for at, block in enumerate(lease.blocks):
                tensors[:, :, BLOCKS + at] = block.reshape(LAYERS, 2, page)
        ended = time.perf_counter()
        if not np.array_equal(tensors[:, :, :BLOCKS], tensors[:, :, BLOCKS : 2 * BLOCKS]):
            raise SystemExit("other bytes came back")
        tensors[:, :, BLOCKS : 2 * BLOCKS] = 0
        into.setdefault("put", []).append(between - began)
        into.setdefault("get", []).append(ended - between)

    def plain(into: Timed) -> None:
        for what, source, target in (("put", kv, out), ("get", out, kv)):
            began = time.perf_counter()
            np.copyto(target, source)
            into.setdefault(what, []).append(time.perf_counter() - began)

    return {
        "kvpager, mapped": lambda into: whole("mapped", into),
        "kvpager, mapped, an engine's tensors": gathered,
        "kvpager, TCP": lambda into: whole("tcp", into),
        "plain copy": plain,
    }


def report(timed: dict[str, Timed]) -> dict[str, Any]:
    """Rates of every way, and how many times slower than kvpager's mapped client."""
    nbytes = BLOCKS * BLOCK_BYTES
    rates = {
        name: {what: nbytes / statistics.median(seconds) / 1e9 for what, seconds in one.items()}
        for name, one in timed.items()
    }
    base = rates["kvpager, mapped"]
    rows = {}
    for name, one in rates.items():
        slower = {what: base["put" if what == "found" else what] / rate for what, rate in one.items()}
        rows[name] = {"calls": len(timed[name]["put"]), "GB_s": one, "times_slower_than_mapped": slower}
        shown = ", ".join(f"{what} {rate:6.2f} GB/s ({slower[what]:5.1f}x)" for what, rate in one.items())
        print(f"{name:38} {shown}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="LMCache's cache server beside kvpager's sidecar, on a CPU")
    parser.add_argument("--peer-python", metavar="PATH", help="of LMCache's environment (setup_lmcache)")
    parser.add_argument("--calls", type=int, default=8, help="in each of the rounds (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write machine, versions and results to this file")
    parser.add_argument("--drive", nargs=3, metavar=("RPC", "HTTP", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive is not None:
        drive(*options.drive)
        return
    if options.peer_python is None:
        parser.error("--peer-python names LMCache's python")
    from kvpager.benchmarks.report import write_report

    timed: dict[str, Timed] = {}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        path, port = stack.enter_context(sidecar(folder))
        turns = of_kvpager(path, port, stack)
        for shown, way in WAYS.items():
            peer = Peer(options.peer_python, folder, way)
            stack.callback(peer.close)
            turns[f"LMCache, {shown}"] = peer.take_turn
        for turn in turns.values():
            for _ in range(WARM):
                turn({})
        for _ in range(ROUNDS):
            for shown, turn in turns.items():
                for _ in range(options.calls):
                    turn(timed.setdefault(shown, {}))
    print(f"{BLOCKS} blocks of {BLOCK_BYTES >> 20} MiB a call, medians; times slower than mapped")
    rows = report(timed)
    version = subprocess.run(
        [options.peer_python, "-c", "import importlib.metadata as m; print(m.version('lmcache'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    write_report(options.json, rows, "msgpack", lmcache=version.stdout.strip())


if __name__ == "__main__":
    main()
