"""The index of names against a dictionary of the same names: look-ups, changes, and memory.

Both have `--names` names, more than the index keeps in a dictionary itself; they take turns.

    python benchmarks/name_index.py [--names N] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from kvpager.benchmarks.report import write_report
from kvpager.kvstore.hashing import leading
from kvpager.kvstore.name_index import NAME, NameIndex

COUNTS: Final = (1, 8, 64, 256, 4096, 65_536)
_LEAST_CALLS: Final = 5
_NAMES_A_ROUND: Final = 4096

Row = dict[str, float]


def in_turns(index: Callable[[], object], peer: Callable[[], object], calls: int, rounds: int) -> Row:
    """Microseconds of a call of each: the median of rounds of so many calls, which they take in turns."""
    taken: dict[Callable[[], object], list[float]] = {index: [], peer: []}
    for _ in range(rounds):
        for call, times in taken.items():
            call()
            began = time.perf_counter()
            for _ in range(calls):
                call()
            times.append((time.perf_counter() - began) / calls * 1e6)
    return {"index_us": float(np.median(taken[index])), "dict_us": float(np.median(taken[peer]))}


def measure(count: int, rounds: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    names = np.frombuffer(rng.bytes(NAME.itemsize * count), NAME).copy()
    every = np.arange(count, dtype=np.int32)

    def made_index() -> NameIndex:
        index = NameIndex(names)
        index.add(every)
        return index

    def made_dict() -> dict[bytes, int]:
        return dict(zip(names.tolist(), every.tolist(), strict=True))

    rows = {f"make of {count}": in_turns(made_index, made_dict, 1, max(3, rounds // 5))}
    index, peer = made_index(), made_dict()
    for asked in (number for number in COUNTS if number <= count):
        calls = max(_LEAST_CALLS, _NAMES_A_ROUND // asked)
        # Objects of the caller's own, as they come from a message.
        hashes = names[count // 2 :][:asked].tolist()
        missing = np.frombuffer(rng.bytes(NAME.itemsize * asked), NAME).tolist()

        def found(hashes: list[bytes] = hashes) -> object:
            return index.leading(hashes)

        def found_there(hashes: list[bytes] = hashes) -> object:
            return np.array(leading(peer, hashes), dtype=np.int32)

        if not np.array_equal(index.leading(hashes), leading(peer, hashes)):
            raise SystemExit("other slots were found")
        rows[f"leading of {asked}"] = in_turns(found, found_there, calls, rounds)

        def missed(hashes: list[bytes] = missing) -> object:
            return index.find(hashes)

        def missed_there(hashes: list[bytes] = missing) -> object:
            return peer.keys().isdisjoint(hashes)

        rows[f"none of {asked} there"] = in_turns(missed, missed_there, calls, rounds)
        slots = every[count // 2 :][:asked]

        def changed(slots: Any = slots) -> None:
            index.remove(slots)
            index.add(slots)

        def changed_there(slots: Any = slots) -> None:
            some = names[slots].tolist()
            for name in some:
                del peer[name]
            peer.update(zip(some, slots.tolist(), strict=True))

        rows[f"remove and add of {asked}"] = in_turns(changed, changed_there, calls, rounds)
    return {
        "names": count,
        "calls": rows,
        "bytes_a_name": {"index": size(made_index, count), "dict": size(made_dict, count)},
    }


def size(make: Callable[[], object], count: int) -> float:
    """Bytes a name that what is made takes."""
    tracemalloc.start()
    made = make()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del made
    return taken / count


def main() -> None:
    parser = argparse.ArgumentParser(description="The index of names against a dictionary")
    parser.add_argument(
        "--names", type=int, default=1 << 20, help="how many there are (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=25, help="rounds (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write machine, versions and results to this file")
    options = parser.parse_args()
    found = measure(options.names, options.rounds)
    for name, row in found["calls"].items():
        index, peer = row["index_us"], row["dict_us"]
        print(f"{name:>26}: index {index:9.1f} us, dictionary {peer:9.1f} us, ratio {index / peer:.2f}")
    sizes = found["bytes_a_name"]
    print(f"bytes a name: index {sizes['index']:.1f}, dictionary {sizes['dict']:.1f}")
    write_report(options.json, found)


if __name__ == "__main__":
    main()
