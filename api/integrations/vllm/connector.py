"""`KVPagerConnector`: what vLLM calls, handed to the half that it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ....tiers.errors import KVPagerError
from .metadata import ShardMetadata, StepMetadata
from .metrics import ConnectorPromMetrics, ConnectorStats
from .pages import check_caches
from .scheduling import SchedulerHalf
from .settings import ConnectorSettings
from .working import WorkerHalf

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["KVPagerConnector"]

# Under vLLM's own name: its logging shows what is said there.
_log = init_logger("vllm.kvpager")


class KVPagerConnector(KVConnectorBase_V1, SupportsHMA):
    """A connector of vLLM, see its base class for what each method is called for.

    Raises:
        LayoutError: the engine's KV cache is of a kind that is not kept.
        ConfigError: an option of ``kv_connector_extra_config`` is wrong.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = ConnectorSettings.of(self._kv_transfer_config.kv_connector_extra_config)
        # What cannot be loaded is computed, whatever vLLM does by default: a cache fails no request.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        block_size = check_caches(vllm_config, kv_cache_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(vllm_config, settings, block_size, _log)
        else:
            self._worker = WorkerHalf(vllm_config, kv_cache_config, settings, _log)

    @property
    def requires_kv_delivery(self) -> bool:
        """No: what is not kept is computed again."""
        return False

    @property
    def _scheduling(self) -> SchedulerHalf:
        if self._scheduler is None:
            raise KVPagerError("a worker's connector was called as the scheduler's")
        return self._scheduler

    @property
    def _working(self) -> WorkerHalf:
        if self._worker is None:
            raise KVPagerError("the scheduler's connector was called as a worker's")
        return self._worker

    # In a worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._working.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._working.metadata

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._working.start_loads(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is scheduled when its loads are over."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing: all layers of a block are stored together."""

    def wait_for_save(self) -> None:
        """Begins the step's stores, and waits for none: their blocks are not reused before they are over."""
        self._working.start_stores(self._step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._step.idle:
            self._working.wait_a_little()
        return KVConnectorTransferResults(finished_recving=self._working.take_loaded())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._working.take_failed()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._working.take_done()

    @property
    def _step(self) -> StepMetadata:
        step = self._get_connector_metadata()
        return step if isinstance(step, StepMetadata) else StepMetadata()

    # In the scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._scheduling.bind_pool(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        shards: Mapping[tuple[int, int], ShardMetadata] = {
            rank: shard for rank, shard in metadata.items() if isinstance(shard, ShardMetadata)
        }
        self._scheduling.serve(shards)

    def on_new_request(self, request: Request) -> None:
        self._scheduling.add(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduling.matched(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduling.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduling.plan(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduling.finish_step(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._scheduling.finish(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduling.finish(request)
        return False, None

    def has_pending_block_frees(self) -> bool:
        return self._scheduling.storing

    def has_pending_push_work(self) -> bool:
        """Whether the engine is to go on with empty steps, until what is being stored is stored."""
        return self._scheduling.storing

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._scheduling.take_events()

    def reset_cache(self) -> bool:
        """What was kept stays for engines of the same weights; this one finds none of it any more."""
        self._scheduling.reset()
        return True

    # In both

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        half = self._scheduler if self._scheduler is not None else self._working
        return half.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorPromMetrics:
        return ConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()
