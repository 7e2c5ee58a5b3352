"""Prompts' KV of Hugging Face transformers, kept beyond the process: `KVPager`, and its `KVPagerCache`.

    pager = KVPager(model)
    model.generate(**inputs, past_key_values=pager.cache(**inputs))

`pager` is what a user makes, `cache` what transformers calls; `model_shape` says what of a model's KV is kept
and refuses what cannot be, `identity` what it depends on, `rows` names its blocks, `keeper` loads and stores
them over `copying`, `homes` are the places that they are kept in.
"""

from .supported import check_transformers

check_transformers()

from .cache import KVPagerCache  # noqa: E402  (transformers' interface differs where it is not supported)
from .pager import KVPager, PagerStats  # noqa: E402

__all__ = ["KVPager", "KVPagerCache", "PagerStats"]
