"""Pages between SGLang's host pool and a sidecar: in batches by pointer, and one by one as SGLang does else.

    PYTHONSAFEPATH=1 .venv-sglang/bin/python benchmarks/sglang_pages.py

Wants the environment of ``scripts/setup sglang`` and a sidecar of its own, which it starts.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpager.tests import sglang_engine
from kvpager.tests.serve_process import ServeProcess

PAGES, PAGE_SIZE, ROUNDS = 64, 64, 7


def main() -> None:
    sglang_engine.LAYERS, sglang_engine.HEADS, sglang_engine.DIM = 8, 8, 128
    with (
        tempfile.TemporaryDirectory() as folder,
        ServeProcess(Path(folder) / "s", host_bytes=2 << 30) as sidecar,
    ):
        weights = Path(folder) / "model.safetensors"
        weights.write_bytes(b"of no model")
        sglang_engine.WEIGHTS = str(weights)
        for layout in ("page_first", "layer_first"):
            measure(f"unix://{sidecar.path}", layout)


def measure(url: str, layout: str) -> None:
    ranks = {
        by_pointer: sglang_engine.Rank(
            url, layout=layout, page_size=PAGE_SIZE, pages=PAGES, by_pointer=by_pointer
        )
        for by_pointer in (True, False)
    }
    pages = list(range(PAGES))
    gigabytes = ranks[True].pool.kv_buffer.nbytes / 1e9
    rates: dict[tuple[str, bool], list[float]] = {}
    for turn in range(ROUNDS):
        for by_pointer, rank in ranks.items():
            keys = [f"{turn} {page}" for page in pages]
            for what, call in calls(rank, keys, pages, by_pointer):
                began = time.perf_counter()
                call()
                rates.setdefault((what, by_pointer), []).append(gigabytes / (time.perf_counter() - began))
    for what in ("store", "load"):
        batched, one_by_one = (statistics.median(rates[what, which][1:]) for which in (True, False))
        print(
            f"{layout}, {what}: {batched:.2f} GB/s by pointer, {one_by_one:.2f} one by one, "
            f"{batched / one_by_one:.1f} times"
        )


def calls(
    rank: Any, keys: list[str], pages: list[int], by_pointer: bool
) -> list[tuple[str, Callable[[], None]]]:
    """A store and a load of all pages, each as SGLang's controller makes them."""
    pool, backend, indices = rank.pool, rank.backend, rank.indices(pages)

    def store() -> None:
        if by_pointer:
            assert all(backend.batch_set_v1(keys, indices))
        else:
            assert backend.batch_set(keys, [pool.get_data_page(page * PAGE_SIZE) for page in pages])

    def load() -> None:
        if by_pointer:
            assert all(backend.batch_get_v1(keys, indices))
            return
        got = backend.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
        for page, data in zip(pages, got, strict=True):
            pool.set_from_flat_data_page(page * PAGE_SIZE, data)

    return [("store", store), ("load", load)]


if __name__ == "__main__":
    main()
