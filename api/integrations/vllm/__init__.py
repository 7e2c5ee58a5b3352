"""vLLM's KV cache kept in a sidecar: `KVPagerConnector`, which vLLM loads by its ``--kv-transfer-config``.

The scheduler's half names blocks and asks what is there (`scheduling` over `identity`, `naming`, `lookups`);
a worker's half copies (`working` over `pages`); `metadata` is what they say to each other, `metrics` what
they count, `link` the sidecar, which may be absent.
"""

from .supported import check_vllm

check_vllm()

from .connector import KVPagerConnector  # noqa: E402  (vLLM's interface differs where it is not supported)

__all__ = ["KVPagerConnector"]
