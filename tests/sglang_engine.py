"""SGLang's host pools, factory and controller with a `KVPagerHiCache`, told by lines of JSON what to do.

    python sglang_engine.py WEIGHTS

Run by an environment that has SGLang. Each line of standard input is a map of ``call`` and its arguments;
each answer a line of standard output after the mark.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import sys
import threading
import time
import traceback
from typing import Any
from unittest import mock

import torch

MARK = "@kvpager@ "
LAYERS, HEADS, DIM = 3, 2, 32
MODULE = "kvpager.api.integrations.sglang"
WEIGHTS = ""

_vision: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
"""What torchvision's own library would define; there is none for a torch without CUDA."""
for _name in ("nms", "qnms"):
    _vision.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def answer(values: object) -> None:
    print(f"{MARK}{json.dumps(values)}", flush=True)


def host_pool(kind: str, layout: str, dtype: str, page_size: int, pages: int) -> tuple[Any, Any]:
    """A host pool of SGLang's, over a device pool of its own on the CPU: both, the device's first."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    size = page_size * 4
    sizes = {"layer_num": LAYERS, "device": "cpu", "enable_memory_saver": False}
    of = getattr(torch, dtype)
    device: Any
    if kind == "mla":
        device = MLATokenToKVPool(size, page_size, of, kv_lora_rank=24, qk_rope_head_dim=8, **sizes)
        more = {"target_layer_num": LAYERS}
    else:
        device = MHATokenToKVPool(
            size, page_size, of, head_num=HEADS, head_dim=DIM, enable_alt_stream=False, **sizes
        )
        more = {}
    with host_memory_budget_scope(1 << 30):
        pool = (MLATokenToKVPoolHost if kind == "mla" else MHATokenToKVPoolHost)(
            device.get_device_pool_infos()[0].buffer_info,
            host_to_device_ratio=1.0,
            host_size=0,
            page_size=page_size,
            layout=layout,
            pin_memory=False,
            device_capacity_tokens=device.size,
            start_layer=device.start_layer,
            end_layer=device.end_layer,
            host_token_capacity=page_size * pages,
            **more,
        )
    return device, pool


class Rank:
    """A backend made by SGLang's factory, and the pool that it is registered with."""

    def __init__(
        self,
        url: str,
        kind: str = "mha",
        layout: str = "page_first",
        dtype: str = "float16",
        page_size: int = 4,
        pages: int = 16,
        rank: tuple[int, int] = (0, 1),
        stage: tuple[int, int] = (0, 1),
        model_name: str | None = "a-model",
        by_pointer: bool = True,
        extra: dict[str, Any] | None = None,
    ) -> None:
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
        from sglang.srt.mem_cache.storage import StorageBackendFactory

        self.device, self.pool = host_pool(kind, layout, dtype, page_size, pages)
        self.page_size, self.pages = page_size, pages
        config = HiCacheStorageConfig(
            tp_rank=rank[0],
            tp_size=rank[1],
            pp_rank=stage[0],
            pp_size=stage[1],
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=kind == "mla",
            enable_storage_metrics=True,
            is_page_first_layout=layout == "page_first",
            model_name=model_name,
            extra_config=extra_config(url, by_pointer, extra),
        )
        self.backend = StorageBackendFactory.create_backend("dynamic", config, self.pool)
        self.backend.register_mem_pool_host(self.pool)

    def indices(self, pages: list[int]) -> torch.Tensor:
        return torch.cat([torch.arange(self.page_size) + page * self.page_size for page in pages])

    def fill(self, seed: int) -> None:
        """All pages hold random bytes."""
        generator = torch.Generator().manual_seed(seed)
        buffer = self.pool.kv_buffer
        numbers = torch.randint(0, 256, (buffer.nbytes,), dtype=torch.uint8, generator=generator)
        buffer.view(torch.uint8).view(-1).copy_(numbers)

    def digests(self, pages: list[int]) -> list[str]:
        flat = [self.pool.get_data_page(page * self.page_size).view(torch.uint8) for page in pages]
        return [hashlib.blake2b(one.numpy().tobytes(), digest_size=8).hexdigest() for one in flat]


def extra_config(url: str, by_pointer: bool, extra: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "backend_name": "kvpager",
        "module_path": MODULE,
        "class_name": "KVPagerHiCache",
        "interface_v1": int(by_pointer),
        "kvpager_url": url,
        "kvpager_model": WEIGHTS,
        **(extra or {}),
    }


class Engine:
    """Calls by their names."""

    def __init__(self) -> None:
        self._ranks: dict[str, Rank] = {}

    def make(self, name: str, **options: Any) -> str | None:
        """A rank; returns what was wrong."""
        try:
            self._ranks[name] = Rank(**options)
        except Exception as error:  # noqa: BLE001  whatever it is, the test is told
            traceback.print_exc()
            return f"{type(error).__name__}: {error}"
        return None

    def fill(self, name: str, seed: int) -> None:
        self._ranks[name].fill(seed)

    def digests(self, name: str, pages: list[int]) -> list[str]:
        return self._ranks[name].digests(pages)

    def set(self, name: str, keys: list[str], pages: list[int], before: list[str] | None = None) -> Any:
        """By pointer."""
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

        rank = self._ranks[name]
        return rank.backend.batch_set_v1(
            keys, rank.indices(pages), HiCacheStorageExtraInfo(prefix_keys=before)
        )

    def get(self, name: str, keys: list[str], pages: list[int]) -> Any:
        rank = self._ranks[name]
        return rank.backend.batch_get_v1(keys, rank.indices(pages))

    def get_while_loads_fail(self, name: str, keys: list[str], pages: list[int]) -> Any:
        """`get`, where asking for blocks of the cold tier raises."""
        from kvpager.api.remote_space import RemoteSpace
        from kvpager.tiers.errors import ServiceUnavailableError

        def fail(*_: object, **__: object) -> Any:
            raise ServiceUnavailableError("as asked for")

        with mock.patch.object(RemoteSpace, "load", fail):
            return self.get(name, keys, pages)

    def set_flat(self, name: str, keys: list[str], pages: list[int]) -> Any:
        """As the controller does without ``interface_v1``."""
        rank = self._ranks[name]
        data = [rank.pool.get_data_page(page * rank.page_size) for page in pages]
        if len(keys) == 1:
            return rank.backend.set(keys[0], data[0])
        return rank.backend.batch_set(keys, data)

    def get_flat(self, name: str, keys: list[str], pages: list[int]) -> list[bool]:
        rank = self._ranks[name]
        targets = [rank.pool.get_dummy_flat_data_page() for _ in keys]
        got = (
            [rank.backend.get(keys[0], targets[0])]
            if len(keys) == 1
            else rank.backend.batch_get(keys, targets)
        )
        for page, data in zip(pages, got, strict=True):
            if data is not None:
                rank.pool.set_from_flat_data_page(page * rank.page_size, data)
        return [one is not None for one in got]

    def exists(self, name: str, keys: list[str]) -> Any:
        backend = self._ranks[name].backend
        return [backend.batch_exists(keys), *(backend.exists(key) for key in keys)]

    def clear(self, name: str) -> str | None:
        try:
            self._ranks[name].backend.clear()
        except Exception as error:  # noqa: BLE001
            return type(error).__name__
        return None

    def counts(self, name: str) -> Any:
        return vars(self._ranks[name].backend.counts)

    def stats(self, name: str) -> Any:
        return vars(self._ranks[name].backend.get_stats())

    def timed(self, name: str, keys: list[str], pages: list[int]) -> float:
        """Seconds of a lookup, a load and a store."""
        began = time.monotonic()
        self.exists(name, keys[:1])
        self.get(name, keys, pages)
        self.set(name, keys, pages)
        return time.monotonic() - began

    def close(self, name: str) -> None:
        self._ranks.pop(name).backend.close()

    def register_second_pool(self, name: str, pool_name: str) -> str | None:
        rank = self._ranks[name]
        try:
            rank.backend.register_mem_host_pool_v2(rank.pool, pool_name)
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"
        return None

    def signatures(self) -> list[str]:
        """What a call of the base class could pass that the backend's would not take, or names otherwise."""
        from kvpager.api.integrations.sglang import KVPagerHiCache
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

        wrong = []
        for name, method in inspect.getmembers(HiCacheStorage, inspect.isfunction):
            mine = getattr(KVPagerHiCache, name)
            if name.startswith("__") or mine is method:
                continue
            theirs, ours = (list(inspect.signature(one).parameters.values()) for one in (method, mine))
            same = [(one.name, one.kind, one.default) for one in theirs]
            if [(one.name, one.kind, one.default) for one in ours] != same:
                wrong.append(name)
        return wrong + sorted(KVPagerHiCache.__abstractmethods__)

    def inherited(self) -> list[str]:
        """What the base class has and the backend leaves as it is."""
        from kvpager.api.integrations.sglang import KVPagerHiCache
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

        members = inspect.getmembers(HiCacheStorage, inspect.isfunction)
        return sorted(name for name, method in members if getattr(KVPagerHiCache, name) is method)

    def engine_fields(self) -> list[str]:
        """Names that the identity takes from SGLang's arguments and that these do not have."""
        from kvpager.api.integrations.sglang.identity import ENGINE_FIELDS
        from sglang.srt.server_args import ServerArgs

        others = ("model_path", "revision", "random_seed", "lora_paths")
        draft = ("speculative_draft_model_path", "speculative_draft_model_revision")
        wanted = (*ENGINE_FIELDS, *others, *draft)
        return [name for name in wanted if name not in ServerArgs.__struct_fields__]

    def page_name(self, arguments: dict[str, Any], model: str = "") -> str | None:
        """What a page is called where the engine of this process was started with these arguments."""
        from kvpager.api.integrations.sglang.identity import PageNames
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
        from sglang.srt.runtime_context import get_context, reset_context
        from sglang.srt.server_args import ServerArgs

        get_context().set_server_args(ServerArgs(**arguments))
        try:
            ranks = {f"{kind}_rank": 0 for kind in ("tp", "pp", "attn_cp")}
            sizes = {f"{kind}_size": 1 for kind in ("tp", "pp", "attn_cp")}
            config = HiCacheStorageConfig(
                **ranks,
                **sizes,
                is_mla_model=False,
                enable_storage_metrics=False,
                is_page_first_layout=True,
                model_name="a-model",
            )
            names = PageNames(config, model, logging.getLogger("sglang.kvpager"))
        finally:
            reset_context()
        names.wait(20)
        named = names.of(["a page"])
        return None if named is None else named[0].hex()

    def hashes(self) -> str | None:
        """Why SGLang cannot name pages here; it compiles what does so when it is first used."""
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        try:
            get_storage_hash_str([1, 2], None, page_size=1)
        except RuntimeError as error:
            return str(error)
        return None

    def controlled(self, url: str, write: bool, tokens: list[int], page_size: int = 4) -> Any:
        """A prompt's pages by SGLang's own controller and its threads: written, or found and read.

        Returns:
            pages that it found, and digests of what was written or read.
        """
        from sglang.srt.managers.cache_controller import HiCacheController
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.utils import get_storage_hash_str
        from sglang.srt.runtime_context import get_parallel

        rank = Rank(url, page_size=page_size, by_pointer=True)
        rank.backend.close()
        alone = {
            "tp_rank": 0,
            "tp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
            "attn_dcp_rank": 0,
            "attn_dcp_size": 1,
        }
        allocator = PagedTokenToKVPoolAllocator(
            rank.device.size, page_size, rank.device.dtype, "cpu", rank.device, need_sort=False
        )
        with get_parallel().override(**alone):
            controller = HiCacheController(
                allocator,
                rank.pool,
                page_size,
                None,
                threading.Event(),
                io_backend="direct",
                storage_backend="dynamic",
                prefetch_threshold=page_size,
                model_name="a-model",
                storage_backend_extra_config=extra_config(url, True, None),
            )
        keys = get_storage_hash_str(tokens, None, page_size=page_size)
        pages = list(range(len(keys)))
        if write:
            rank.fill(11)
            controller.write_storage(rank.indices(pages), tokens, hash_value=keys)
            controller.ack_backup_queue.get(timeout=20)
            found = len(keys)
        else:
            rank.fill(12)
            operation = controller.prefetch("a-request", tokens)
            controller.prefetch_hit_queue.get(timeout=20)
            found = len(operation.hash_value)
            if found:
                operation.host_indices = rank.indices(pages[:found])
                controller.prefetch_buffer.put(operation)
                while not controller.ack_prefetch_queue.get(timeout=20).completed_req:
                    pass
        controller.detach_storage_backend()
        return [found, rank.digests(pages[:found])]


def main() -> None:
    engine = Engine()
    answer("ready")
    for line in sys.stdin:
        values = json.loads(line)
        answer(getattr(engine, values.pop("call"))(**values))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    WEIGHTS = sys.argv[1]
    main()
