"""Attention over raw block addresses, and the block writes that go with it.

Every function takes addresses instead of tensors of blocks, so that one call reads blocks of any arena.
"""

from .reference import (
    AttentionPlan,
    WritePlan,
    copy_blocks,
    decode_attention,
    decode_plan,
    prefill_attention,
    prefill_plan,
    token_slots,
    write_kv,
    write_plan,
)

__all__ = [
    "AttentionPlan",
    "WritePlan",
    "copy_blocks",
    "decode_attention",
    "decode_plan",
    "prefill_attention",
    "prefill_plan",
    "token_slots",
    "write_kv",
    "write_plan",
]
