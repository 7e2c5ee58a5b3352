"""Attention over raw block addresses, and the block writes that go with it.

Every function takes addresses instead of tensors of blocks, so that one call reads blocks of any arena.
"""

try:
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
except ModuleNotFoundError as error:
    raise ImportError(
        f'kvpager.kernels needs {error.name}, which is not installed: pip install "kvpager[engine]"',
        name=error.name,
    ) from error

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
