"""Drives LMCache's two Redis clients for `benchmarks/cold_redis.py`. Runs in LMCache's environment.

Reads lines of JSON such as ``{"client": "native", "op": "put", "bytes": 2097152, "count": 64}`` and answers
each with ``{"seconds": ..., "processor_seconds": ...}``. ``native`` is its RESP client in C++ (what its
``resp://`` connector is made of), ``python`` its ``redis://`` connector, both fed with as many blocks at once
as asked for.

    python lmcache_redis.py PORT CONNECTIONS
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch

# Its log lines would mix with the answers.
_ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

from lmcache.utils import CacheEngineKey  # type: ignore[import-not-found] # noqa: E402
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj  # type: ignore[import-not-found] # noqa: E402
from lmcache.v1.storage_backend.connector.redis_connector import RedisConnector  # type: ignore[import-not-found] # noqa: E402
from lmcache.v1.storage_backend.native_clients.resp_client import RESPClient  # type: ignore[import-not-found] # noqa: E402

_LAYERS, _TOKENS = 4, 256


class _Blocks:
    """Memory objects and keys of one block size, and a stand-in for the pool that hands them out."""

    def __init__(self, size: int, count: int) -> None:
        self.shape = torch.Size((2, _LAYERS, _TOKENS, size // (2 * _LAYERS * _TOKENS * 2)))
        generator = torch.Generator().manual_seed(size)
        self.objects = [
            self._wrap(torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator), size)
            for _ in range(count)
        ]
        self.landing = [self._wrap(torch.zeros(size, dtype=torch.uint8), size) for _ in range(count)]
        self.keys = [CacheEngineKey("bench", 1, 0, size * 1000 + i, torch.bfloat16) for i in range(count)]
        self._next = 0

    def _wrap(self, raw: torch.Tensor, size: int) -> TensorMemoryObj:
        metadata = MemoryObjMetadata(
            self.shape,
            torch.bfloat16,
            0,
            size,
            1,
            0,
            MemoryFormat.KV_2LTD,
            None,
            [self.shape],
            [torch.bfloat16],
        )
        return TensorMemoryObj(raw, metadata, None)

    def allocate(self, *_: Any) -> TensorMemoryObj:
        self._next = (self._next + 1) % len(self.landing)
        return self.landing[self._next]


def _same(sent: TensorMemoryObj, read: TensorMemoryObj) -> bool:
    return torch.equal(sent.raw_data, read.raw_data)


async def _serve(port: int, connections: int) -> None:
    loop = asyncio.get_running_loop()
    native = RESPClient("127.0.0.1", port, connections, loop)
    connectors: dict[int, RedisConnector] = {}
    sizes: dict[tuple[int, int], _Blocks] = {}
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        job = json.loads(line)
        size, count = job["bytes"], job["count"]
        blocks = sizes.get((size, count))
        if blocks is None:
            blocks = sizes[size, count] = _Blocks(size, count)
        if job["client"] == "native":
            keys = [key.to_string() for key in blocks.keys]
            chosen = blocks.objects if job["op"] == "put" else blocks.landing
            views = [memoryview(each.byte_array).cast("B") for each in chosen]
            call = native.batch_set if job["op"] == "put" else native.batch_get
            used = time.process_time()
            began = time.perf_counter()
            await call(keys, views)
            seconds = time.perf_counter() - began
            processor = time.process_time() - used
        else:
            if size not in connectors:
                metadata = SimpleNamespace(
                    get_shapes=lambda: [blocks.shape],  # noqa: B023
                    get_dtypes=lambda: [torch.bfloat16],
                    use_mla=False,
                    chunk_size=_TOKENS,
                    get_num_groups=lambda: 1,
                )
                pool = SimpleNamespace(
                    config=SimpleNamespace(extra_config=None, use_layerwise=False),
                    metadata=metadata,
                    allocate=blocks.allocate,
                )
                connectors[size] = RedisConnector(f"redis://127.0.0.1:{port}", loop, pool)
            connector = connectors[size]
            used = time.process_time()
            began = time.perf_counter()
            if job["op"] == "put":
                await connector.batched_put(blocks.keys, blocks.objects)
            else:
                found = await asyncio.gather(*(connector.get(key) for key in blocks.keys))
                if not all(found):
                    raise RuntimeError("a block is missing")
            seconds = time.perf_counter() - began
            processor = time.process_time() - used
        native_get = job["client"] == "native" and job["op"] == "get"
        if native_get and not all(map(_same, blocks.objects, blocks.landing)):
            raise RuntimeError("a block came back altered")
        print(json.dumps({"seconds": seconds, "processor_seconds": processor}), file=_ANSWERS, flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2])))
