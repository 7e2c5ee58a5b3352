"""A real vLLM in a process of its own, told by lines of JSON what to do. Run by an environment that has vLLM.

    python vllm_engine.py '{"model": ..., "url": ...}'

The options are those of ``LLM``; without ``url`` it has no connector, without any there is none yet. Each
line of standard input is a map of ``call`` and its arguments, each answer a line of standard output after
the mark.
``open`` makes another engine in this process and forgets the one before: vLLM takes long to import.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

MARK = "@kvpager@ "
_MOST_STEPS = 5000
"""Of a millisecond each, where an engine that is in this process has nothing to compute."""


def answer(values: object) -> None:
    print(f"{MARK}{json.dumps(values)}", flush=True)


class Engine:
    """Calls by their names."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        url = options.pop("url", None)
        if url is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "KVPagerConnector",
                "kv_connector_module_path": "kvpager.api.integrations.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"url": url, **options.pop("extra", {})},
            }
        events = options.pop("events", None)
        self._events: Any = None
        if events is not None:
            import zmq

            options["kv_events_config"] = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": events,
            }
            self._events = zmq.Context().socket(zmq.SUB)
            self._events.setsockopt(zmq.SUBSCRIBE, b"")
            self._events.connect(events)
        usual = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "float32",
            "block_size": 32,
            "max_model_len": 2048,
            "max_num_batched_tokens": 2048,
            "disable_log_stats": False,
        }
        self._llm = LLM(**{**usual, **options})

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 8,
        salts: list[str | None] | None = None,
        adapters: list[list[Any] | None] | None = None,
    ) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        inputs: list[Any] = []
        for at, tokens in enumerate(prompts):
            salt = salts[at] if salts else None
            inputs.append({"prompt_token_ids": tokens, **({"cache_salt": salt} if salt else {})})
        loras = [None if one is None else LoRARequest(*one) for one in adapters] if adapters else None
        done = self._llm.generate(inputs, params, use_tqdm=False, lora_request=loras)
        return {
            "tokens": [list(one.outputs[0].token_ids) for one in done],
            "cached": [one.num_cached_tokens for one in done],
        }

    def reset(self, connector: bool = False) -> bool:
        """vLLM forgets its own prefix cache, once what is being stored is stored."""
        for _ in range(_MOST_STEPS):
            if bool(self._llm.reset_prefix_cache(reset_connector=connector)):
                return True
            self._llm.llm_engine.step()
        return False

    def events(self) -> list[dict[str, Any]]:
        """What vLLM has published of blocks beyond its own memory, since the last time."""
        import msgspec
        from vllm.distributed.kv_events import KVEventBatch

        found: list[dict[str, Any]] = []
        while self._events.poll(1000):
            _, _, payload = self._events.recv_multipart()
            batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
            for event in batch.events:
                if getattr(event, "medium", None) == "CPU":
                    kind = type(event).__name__
                    hashes = [one.hex() if isinstance(one, bytes) else one for one in event.block_hashes]
                    found.append({"kind": kind, "hashes": hashes, "tokens": getattr(event, "token_ids", [])})
        return found

    def metrics(self) -> dict[str, float]:
        return {one.name: one.value for one in self._llm.get_metrics() if hasattr(one, "value")}


class Pieces:
    """Of the connector, without an engine."""

    def names(self, tokens: list[int], media: list[list[Any]], salt: str | None = None) -> list[str]:
        """The names of a request's blocks of 16 tokens, none where it cannot have any.

        Media: modality, vLLM's digest or a client's uuid, offset, length, and a number that is its content or
        -1, where that is not seen.
        """
        import torch
        from kvpager.api.integrations.vllm.naming import RequestNames, can_be_named
        from vllm import SamplingParams
        from vllm.multimodal.inputs import (
            MultiModalFeatureSpec,
            MultiModalFieldElem,
            MultiModalKwargsItem,
            MultiModalSharedField,
            PlaceholderRange,
        )
        from vllm.v1.request import Request

        def item(content: int) -> MultiModalKwargsItem | None:
            pixels = torch.full((3, 2), content, dtype=torch.bfloat16)
            element = MultiModalFieldElem(data=pixels, field=MultiModalSharedField(batch_size=1))
            return MultiModalKwargsItem({"pixel_values": element}) if content >= 0 else None

        features = [
            MultiModalFeatureSpec(
                data=item(content),
                modality=kind,
                identifier=digest,
                mm_position=PlaceholderRange(offset=offset, length=length),
                mm_hash=digest,
            )
            for kind, digest, offset, length, content in media
        ]
        params = SamplingParams(max_tokens=1)
        params.update_from_generation_config({})
        request = Request("one", tokens, params, None, mm_features=features, cache_salt=salt)
        if not can_be_named(request):
            return []
        return [name.hex() for name in RequestNames(request, 16, bytes(16)).first(len(tokens) // 16)]

    def failed_loads(self, url: str, flag: str) -> list[list[int]]:
        """Blocks that do not come of a load, and of one that makes a file and then awaits a restart."""
        import logging
        import time
        from pathlib import Path
        from types import SimpleNamespace

        import torch
        from kvpager import KVLayout
        from kvpager.api.integrations.vllm.metadata import Load, StepMetadata, Store
        from kvpager.api.integrations.vllm.pages import CpuPages
        from kvpager.api.integrations.vllm.settings import ConnectorSettings
        from kvpager.api.integrations.vllm.working import WorkerHalf

        def wait_for(condition: Any) -> Any:
            until = time.monotonic() + 60
            while not (found := condition()):
                assert time.monotonic() < until
                time.sleep(0.01)
            return found

        class PagesOfALostLease(CpuPages):
            def load(self, *arguments: Any) -> None:
                before = worker._link.lost
                Path(flag).touch()
                wait_for(lambda: worker._link.lost is not before)
                super().load(*arguments)

        config: Any = SimpleNamespace(parallel_config=SimpleNamespace(rank=0))
        settings = ConnectorSettings(url=url, lookup_seconds=30)
        worker = WorkerHalf(config, config, settings, logging.getLogger("kvpager.pieces"))
        worker._link.wait(30)
        worker._layout = layout = KVLayout(2, 1, 64, 16, "uint8", "opaque:test", planes=1)
        tensors = [torch.ones(4, 16, 64, dtype=torch.uint8) for _ in range(2)]
        names = [bytes([at]) * 16 for at in range(2)]
        worker._pages = CpuPages(layout, tensors)
        worker.start_stores(StepMetadata([], [Store(1, names, 1, bytes(16), [0, 1])]))
        done = wait_for(worker.take_done)
        assert not done.refused
        found = []
        for kind in (CpuPages, PagesOfALostLease):
            worker._pages = kind(layout, tensors)
            worker.start_loads(StepMetadata([Load("one", names, 1, bytes(16), [2, 3])], []))
            wait_for(worker.take_loaded)
            found.append(sorted(worker.take_failed()))
        worker.close()
        return found

    def announced(self, steps: list[list[Any]]) -> list[list[Any]]:
        """What is published of the blocks of a request: kind and which blocks.

        Steps: expect, stored, refused; removed and kept with blocks that the sidecar says so of; gap.
        """
        from kvpager.api.integrations.vllm.announcing import Announcements, Stored
        from kvpager.kvstore.events import BlockEvent, EventKind
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256)
        params = SamplingParams(max_tokens=1)
        params.update_from_generation_config({})
        request = Request(
            "one", list(range(64)), params, None, block_hasher=get_request_block_hasher(16, sha256)
        )
        names = [bytes([at]) * 16 for at in range(4)]
        gaps = 0
        announcements = Announcements(lambda: gaps)
        stored = Stored(request, 0, names, 16)
        blocks = {digest: at for at, digest in enumerate(stored.hashes)}
        found = []
        for step, *which in steps:
            if step == "gap":
                gaps += 1
            elif step in ("removed", "kept"):
                kind = EventKind.REMOVED if step == "removed" else EventKind.STORED
                announcements.heard(BlockEvent(kind, "host", bytes(16), tuple(names[at] for at in which)))
            else:
                getattr(announcements, step)(stored)
            events: Any = announcements.take()
            found += [[type(one).__name__, [blocks[of] for of in one.block_hashes]] for one in events]
        return found

    def refusal(self, **extra: Any) -> str:
        """What is said of settings that are refused."""
        from kvpager.api.integrations.vllm.settings import ConnectorSettings
        from kvpager.tiers.errors import ConfigError

        try:
            ConnectorSettings.of(extra)
        except ConfigError as error:
            return str(error)
        return ""

    def spaces(self, ranks: list[list[Any]]) -> list[str]:
        """The spaces of ranks of one layout: each of pipelines, and of tensors, of how many; its layers."""
        from kvpager import KVLayout
        from kvpager.api.integrations.vllm.working import shard_name
        from kvpager.kvstore.hashing import space_id

        layout = KVLayout(2, 1, 64, 16, "uint8", "opaque:test", planes=1)
        return [
            space_id(layout, shard_name(tuple(pipeline), tuple(tensor), layers)).hex()
            for pipeline, tensor, layers in ranks
        ]

    def cache_refusals(self) -> dict[str, str]:
        """What is said of caches of each kind that vLLM has for a decoder."""
        import torch
        from kvpager.api.integrations.vllm.pages import check_caches
        from kvpager.tiers.errors import LayoutError
        from vllm.config import ParallelConfig, VllmConfig
        from vllm.v1.kv_cache_interface import (
            ChunkedLocalAttentionSpec,
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            RSWASpec,
            SlidingWindowSpec,
            UniformTypeKVCacheSpecs,
        )

        shape: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
        window = SlidingWindowSpec(**shape, sliding_window=64)
        specs = {
            "full": FullAttentionSpec(**shape),
            "windows as full": FullAttentionSpec(**shape, sliding_window=64),
            "window": window,
            "windows": UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": window}),
            "chunks": ChunkedLocalAttentionSpec(**shape, attention_chunk_size=64),
            "reference window": RSWASpec(**shape, rswa_window=64),
        }
        found = {}
        for name, spec in specs.items():
            caches = KVCacheConfig(9, [], [KVCacheGroupSpec(["a"], spec)])
            try:
                found[name] = str(check_caches(VllmConfig(), caches))
            except LayoutError as error:
                found[name] = str(error)
        for name in ("decode", "prefill"):
            config = VllmConfig()
            config.parallel_config = ParallelConfig()
            setattr(config.parallel_config, f"{name}_context_parallel_size", 2)
            try:
                check_caches(config, KVCacheConfig(9, [], [KVCacheGroupSpec(["a"], specs["full"])]))
            except LayoutError as error:
                found[name] = str(error)
        return found


def main() -> None:
    import vllm  # noqa: F401

    options = json.loads(sys.argv[1])
    engine: Engine | Pieces = Engine(options) if options else Pieces()
    answer("ready")
    for line in sys.stdin:
        values = json.loads(line)
        call = values.pop("call")
        if call == "open":
            engine = Engine(values)
            answer("ready")
        else:
            answer(getattr(engine, call)(**values))
    sys.stdout.flush()
    os._exit(0)  # the engine's own threads take seconds to end


if __name__ == "__main__":
    main()
