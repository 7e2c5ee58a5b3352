"""Attention over raw block addresses, and the block writes that go with it.

Every function takes addresses instead of tensors of blocks, so that one call reads blocks of any arena.
"""

from ..tiers.extras import how_to_install

try:
    from .copy_blocks import copy_blocks, copy_pages
    from .decode_attention import DecodePlan, decode_attention, decode_plan
    from .engine_pages import EnginePages, gather, scatter
    from .prefill_attention import PrefillPlan, prefill_attention, prefill_plan
    from .reference import AttentionPlan, token_slots
    from .write_kv import WritePlan, write_kv, write_plan
except ModuleNotFoundError as error:
    raise ImportError(
        f"kvpager.kernels needs {error.name}, which is not installed: {how_to_install('engine')}",
        name=error.name,
    ) from error

__all__ = [
    "AttentionPlan",
    "DecodePlan",
    "EnginePages",
    "PrefillPlan",
    "WritePlan",
    "copy_blocks",
    "copy_pages",
    "decode_attention",
    "decode_plan",
    "gather",
    "prefill_attention",
    "prefill_plan",
    "scatter",
    "token_slots",
    "write_kv",
    "write_plan",
]
