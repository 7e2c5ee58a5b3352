"""SGLang's HiCache on a sidecar: `KVPagerHiCache`, a dynamic storage backend.

`storage` is what SGLang calls; `pages` knows where a page lies in its host pool and copies, `identity` names
what pages are of, `counts` what happened. The sidecar may be absent.
"""

from .supported import check_sglang

check_sglang()

from .storage import KVPagerHiCache  # noqa: E402  (SGLang's interface differs where it is not supported)

__all__ = ["KVPagerHiCache"]
