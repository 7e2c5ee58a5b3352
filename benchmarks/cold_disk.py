"""Put, get, delete and open of the cold tier on disk, beside LMDB and beside plain files.

Four contestants on one file system, taking turns, in a steady state: the store holds as much as it may, and
every put makes room by dropping as many bytes as it brings.

- kvpager: `DiskColdTier`, one block a call; checksums made and checked.
- files: one file a record with a header, written under another name and renamed; the old one unlinked.
  No checksum: what the tier would be without its reuse of dropped files.
- LMDB (py-lmdb), a transaction a record, random keys, `sync=False`: as safe as the others against a killed
  process. Reads copy into the caller's buffer, as the tier's do.
- LMDB, metasync: `sync=True, metasync=False`. This one waits for the disk.

Everything fits the page cache, so this measures the ways and not the disk.

    python benchmarks/cold_disk.py --json FILE
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import lmdb
import numpy as np
from kvpager.benchmarks.report import write_report
from kvpager.tiers.cold_disk import DiskColdTier
from kvpager.tiers.record import HEADER_BYTES

SIZES = {64 << 10: 1500, 736 << 10: 200, 2 << 20: 80, 32 << 20: 8}
"""Record bytes to records that the store holds."""
SPACE = bytes(16)


class Store(Protocol):
    """What is measured."""

    def put(self, key: bytes, payload: memoryview, dropped: bytes) -> None: ...
    def get(self, key: bytes, into: memoryview) -> None: ...
    def delete(self, key: bytes) -> None: ...
    def close(self) -> None: ...


class Tier:
    """The tier drops by itself: the key that was used least recently is the one that the others are told."""

    def __init__(self, folder: Path, size: int, count: int) -> None:
        room = -(-(size + HEADER_BYTES) // 4096) * 4096
        self._tier = DiskColdTier(folder, capacity_bytes=room * count, deadline=60)

    def put(self, key: bytes, payload: memoryview, dropped: bytes) -> None:
        self._check(self._tier.put(SPACE, [key], [payload]))

    def get(self, key: bytes, into: memoryview) -> None:
        self._check(self._tier.get(SPACE, [key], [into]))

    @staticmethod
    def _check(status: Sequence[int] | np.ndarray[Any, Any]) -> None:
        if any(status):
            raise RuntimeError(f"failed: {status}")

    def delete(self, key: bytes) -> None:
        if self._tier.delete(SPACE, [key]) != 1:
            raise RuntimeError("was not there")

    def close(self) -> None:
        self._tier.close()


class Files:
    """A file a record."""

    def __init__(self, folder: Path, size: int, count: int) -> None:
        del size, count
        self._folder = folder
        self._head = bytearray(HEADER_BYTES)
        for shard in range(256):
            (folder / f"{shard:02x}").mkdir(exist_ok=True)
        self.found = sum(
            file.stat().st_size for shard in os.scandir(folder) for file in os.scandir(shard.path)
        )

    def _path(self, key: bytes) -> str:
        return f"{self._folder}/{key[0]:02x}/{key.hex()}"

    def put(self, key: bytes, payload: memoryview, dropped: bytes) -> None:
        if dropped:
            os.unlink(self._path(dropped))
        path = self._path(key)
        file = os.open(path + ".unfinished", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        written = os.writev(file, [self._head, payload])
        os.close(file)
        if written != HEADER_BYTES + len(payload):
            raise RuntimeError("short write")
        os.rename(path + ".unfinished", path)

    def get(self, key: bytes, into: memoryview) -> None:
        file = os.open(self._path(key), os.O_RDONLY)
        read = os.readv(file, [self._head, into])
        os.close(file)
        if read != HEADER_BYTES + len(into):
            raise RuntimeError("short read")

    def delete(self, key: bytes) -> None:
        os.unlink(self._path(key))

    def close(self) -> None:
        """Nothing is open."""


class LMDB:
    """A transaction a record."""

    def __init__(self, folder: Path, size: int, count: int, *, sync: bool) -> None:
        self._env = lmdb.open(
            str(folder),
            map_size=(size + 65536) * count * 2 + (64 << 20),
            sync=sync,
            metasync=False,
            readahead=False,
        )
        with self._env.begin() as transaction:
            self.found = sum(1 for _ in transaction.cursor().iternext(keys=True, values=False))
        self._head = bytes(HEADER_BYTES)

    def put(self, key: bytes, payload: memoryview, dropped: bytes) -> None:
        with self._env.begin(write=True, buffers=True) as transaction:
            if dropped:
                transaction.delete(dropped)
            transaction.put(key, b"".join((self._head, payload)))

    def get(self, key: bytes, into: memoryview) -> None:
        with self._env.begin(buffers=True) as transaction:
            found = transaction.get(key)
            if found is None:
                raise RuntimeError("was not there")
            into[:] = found[HEADER_BYTES:]

    def delete(self, key: bytes) -> None:
        with self._env.begin(write=True) as transaction:
            transaction.delete(key)

    def close(self) -> None:
        self._env.close()


CONTESTANTS: dict[str, Callable[[Path, int, int], Store]] = {
    "kvpager": Tier,
    "files": Files,
    "LMDB": lambda folder, size, count: LMDB(folder, size, count, sync=False),
    "LMDB, metasync": lambda folder, size, count: LMDB(folder, size, count, sync=True),
}


def measure(root: Path, rounds: int) -> dict[str, Any]:
    """Microseconds for each record (milliseconds for an open), by record size and contestant: medians."""
    results: dict[str, Any] = {}
    random = np.random.default_rng(3)
    for size, count in SIZES.items():
        payloads = [memoryview(random.bytes(size)) for _ in range(4)]
        into = memoryview(bytearray(size))
        times: dict[str, dict[str, list[float]]] = {}
        stores: dict[str, Store] = {}
        held: dict[str, deque[bytes]] = {}
        for name, make in CONTESTANTS.items():
            folder = root / name.replace(", ", "-")
            folder.mkdir()
            stores[name] = make(folder, size, count)
            held[name] = deque()
            for _ in range(count):
                held[name].append(random.bytes(16))
                stores[name].put(held[name][-1], payloads[0], b"")
        os.sync()
        batch = max(2, count // 4)
        for turn in range(rounds + 1):
            names = list(CONTESTANTS)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                store, keys = stores[name], held[name]
                fresh = [random.bytes(16) for _ in range(batch)]
                took: dict[str, float] = {}
                began = time.perf_counter()
                for index, key in enumerate(fresh):
                    store.put(key, payloads[index % 4], keys[index])
                took["put"] = (time.perf_counter() - began) / batch
                for key in fresh:
                    keys.popleft()
                    keys.append(key)
                picked = [keys[index] for index in random.permutation(len(keys))[:batch]]
                began = time.perf_counter()
                for key in picked:
                    store.get(key, into)
                took["get"] = (time.perf_counter() - began) / batch
                # In the order of use again, so that the tier drops what the others are told to.
                for key in keys:
                    store.get(key, into)
                if turn:
                    for what, seconds in took.items():
                        times.setdefault(name, {}).setdefault(what, []).append(seconds * 1e6)
            os.sync()
        for name, make in CONTESTANTS.items():
            folder = root / name.replace(", ", "-")
            stores[name].close()
            began = time.perf_counter()
            store = make(folder, size, count)
            times[name]["open, ms"] = [(time.perf_counter() - began) * 1e3]
            began = time.perf_counter()
            for key in held[name]:
                store.delete(key)
            times[name]["delete"] = [(time.perf_counter() - began) / count * 1e6]
            store.close()
            shutil.rmtree(folder)
        results[f"{size >> 10} KiB x {count}"] = {
            name: {
                **{what: round(statistics.median(values), 2) for what, values in rows.items()},
                **{
                    f"{what}, GB/s": round(size / statistics.median(rows[what]) / 1e3, 2)
                    for what in ("put", "get")
                },
            }
            for name, rows in times.items()
        }
    return results


def main() -> None:
    """Measure, print a table, and write JSON where asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        results = measure(Path(folder), arguments.rounds)
    for records, names in results.items():
        print(records)
        for name, row in names.items():
            print(
                f"  {name:15} put {row['put, GB/s']:6.2f} GB/s ({row['put']:8.1f} us)   get "
                f"{row['get, GB/s']:6.2f} GB/s ({row['get']:7.1f} us)   delete {row['delete']:7.1f} us   "
                f"open {row['open, ms']:6.2f} ms"
            )
    write_report(arguments.json, results, "lmdb", "xxhash", lmdb_library=".".join(map(str, lmdb.version())))


if __name__ == "__main__":
    main()
