"""FlashInfer's paged decoding, as the attention benchmarks time it. `setup_flashinfer` packs it.

Source: FlashInfer's documentation of BatchDecodeWithPagedKVCacheWrapper.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import accumulate
from typing import Final

import torch
from kvpager.benchmarks.attention_bench import ERROR_LIMIT, Bench, Decoding, Row, attention_error
from kvpager.benchmarks.ceilings import Contender, captured

__all__ = ["contenders", "decode_step", "is_installed"]

MODES: Final = {"flashinfer": False, "flashinfer tc": True}
"""Whether decoding runs on the tensor cores, by the name of the contender."""
WORKSPACE_BYTES: Final = 256 << 20


def is_installed() -> bool:
    """Whether the package is there."""
    return find_spec("flashinfer") is not None


def decode_step(
    pages: torch.Tensor,
    ids: torch.Tensor,
    lengths: Sequence[int],
    q: torch.Tensor,
    out: torch.Tensor,
    *,
    tensor_cores: bool,
) -> Callable[[], object]:
    """A decoding step that was planned and can be captured.

    Args:
        pages: [blocks, 2, kv_heads, block_size, head_dim], plain rows.
        ids: int64 [seqs, max_blocks] on the CPU, the number of each sequence's blocks.
        lengths: tokens of each sequence, none empty.
        q, out: [seqs, q_heads, head_dim].
        tensor_cores: which of its two kernels runs: prefill's on the tensor cores, or that for decoding.
    """
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    block_size, dim = pages.shape[3:]
    counts = [-(-length // block_size) for length in lengths]
    bounds = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=q.device)
    indices = torch.cat([row[:count] for row, count in zip(ids, counts, strict=True)])
    last = torch.tensor([(length - 1) % block_size + 1 for length in lengths], dtype=torch.int32)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=tensor_cores)
    wrapper.plan(
        bounds,
        indices.to(q.device, torch.int32),
        last.to(q.device),
        q.shape[1],
        pages.shape[2],
        dim,
        block_size,
        q_data_type=q.dtype,
        kv_data_type=pages.dtype,
    )
    return lambda: wrapper.run(q, pages, out=out)


def contenders(bench: Bench, decoding: Decoding, row: Row) -> dict[str, Contender]:
    """Both modes over the blocks that kvpager reads, taken as plain pages: the same bytes at the same places.

    A mode that refuses the shape, or whose result is wrong, is noted in the row and does not take part.
    """
    found: dict[str, Contender] = {}
    if not bench.peer:
        return found
    pages = bench.memory.blocks(decoding.layout, False)[:, 0]
    last = decoding.batches[-1]
    for name, tensor_cores in MODES.items():
        out = torch.full_like(decoding.out, torch.nan)
        try:
            steps = [
                decode_step(pages, batch.ids, batch.lengths, decoding.q, out, tensor_cores=tensor_cores)
                for batch in decoding.batches
            ]
            steps[-1]()
        except (RuntimeError, ValueError) as refusal:
            row[f"{name} error"] = str(refusal)[:200]
            continue
        error = attention_error(out, decoding.q, last, bench.memory, decoding.layout, swizzled=False)
        if error < ERROR_LIMIT:
            found[name] = captured(steps)
        else:
            row[f"{name} error"] = f"relative error {error:.1e}"
    return found
