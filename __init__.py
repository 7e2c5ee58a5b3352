"""kvpager: a tiered KV-cache offload service for LLM inference.

KV blocks live in VRAM, in pinned host memory that attention reads in place, and in a cold tier (Redis or
disk). Names are loaded when they are first used, so that the base install, which has no torch, imports.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api.client import connect as connect
    from .api.client_async import connect_async as connect_async
    from .kvstore.hashing import ChainIdentity as ChainIdentity
    from .kvstore.hashing import hash_blocks as hash_blocks
    from .kvstore.host import HostStore as HostStore
    from .kvstore.lineage import ChainPlace as ChainPlace
    from .kvstore.lineage import Lineage as Lineage
    from .kvstore.store import TieredStore as TieredStore
    from .tiers.cold_url import open_cold_tier as open_cold_tier
    from .tiers.errors import KVPagerError as KVPagerError
    from .tiers.layout import KVLayout as KVLayout

__version__ = "0.1.0"

_HOMES = {
    "ChainIdentity": ".kvstore.hashing",
    "ChainPlace": ".kvstore.lineage",
    "HostStore": ".kvstore.host",
    "KVLayout": ".tiers.layout",
    "KVPagerError": ".tiers.errors",
    "Lineage": ".kvstore.lineage",
    "TieredStore": ".kvstore.store",
    "connect": ".api.client",
    "connect_async": ".api.client_async",
    "hash_blocks": ".kvstore.hashing",
    "open_cold_tier": ".tiers.cold_url",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home, __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
