"""vLLM's KV cache kept in a sidecar: `KVPagerConnector`, which vLLM loads by its ``--kv-transfer-config``.

The scheduler's half names blocks and asks what is there (`scheduling` over `identity`, `naming`, `lookups`);
a worker's half copies (`working` over `pages`); `metadata` is what they say to each other, `metrics` what
they count, `link` the sidecar, which may be absent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import KVPagerConnector as KVPagerConnector

__all__ = ["KVPagerConnector"]


def __getattr__(name: str) -> Any:
    """The connector when it is asked for: what copies, `pages`, is of use and measured without a vLLM."""
    if name != "KVPagerConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .supported import check_vllm

    # vLLM's interface differs where it is not supported.
    check_vllm()
    from .connector import KVPagerConnector

    return KVPagerConnector
