"""What the connector's halves say to each other: with each step down, and what became of it up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from ....tiers.layout import KVLayout

__all__ = ["Load", "ShardMetadata", "StepMetadata", "Store", "WorkerMetadata"]


@dataclass(frozen=True)
class Load:
    """Blocks of kvpager that are to be copied into blocks of vLLM.

    Args:
        request: id of the request that waits for them.
        names: their prefix hashes, in order.
        depth: 1-based place of the first one in its chain.
        before: the hash before the first one; zeros where there is none.
        blocks: vLLM's numbers of its blocks, one for each.
    """

    request: str
    names: list[bytes]
    depth: int
    before: bytes
    blocks: list[int]


@dataclass(frozen=True)
class Store:
    """Full blocks of vLLM that are to be kept; fields as of `Load`.

    Args:
        number: of this store, which is told when it is over.
    """

    number: int
    names: list[bytes]
    depth: int
    before: bytes
    blocks: list[int]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What a worker is to do in a step.

    Args:
        idle: nothing is computed in it, so that the worker may wait a little for a copy that is under way.
    """

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    idle: bool = False


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """What became of it, of one worker or of several.

    Args:
        stored: how many workers are done with each store, by its number.
        refused: numbers of stores of which something is not kept.
        failed: ids of requests of whose loads something did not come.
    """

    stored: Counter[int] = field(default_factory=Counter)
    refused: set[int] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        """Of both."""
        if not isinstance(other, WorkerMetadata):
            raise TypeError(f"must be of kvpager's workers, got {type(other).__name__}")
        return WorkerMetadata(
            self.stored + other.stored, self.refused | other.refused, self.failed | other.failed
        )


@dataclass
class ShardMetadata(KVConnectorHandshakeMetadata):
    """Which space a worker's blocks are in."""

    layout: KVLayout
    shard: str
