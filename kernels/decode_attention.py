"""Attention of one query per sequence over blocks at raw addresses: the decode step's kernel.

On a GPU a persistent grid pulls tiles of keys and values into shared memory, from VRAM, mapped host memory
or a peer alike, and multiplies them on the tensor cores. From compute capability 9.0 on it pulls with bulk
copies (``cp.async.bulk``), from 8.0 on with 16-byte ones (``cp.async``). What makes it fit block tables of
raw addresses:

- Work is found on the GPU from `seq_lens` and the table, so a step can be captured in a CUDA graph and
  replayed over other lengths and words. Teams of CTAs get equal shares of all blocks ("stream-K", Osama et
  al. 2023, https://arxiv.org/abs/2301.03598); where that divides a sequence, partial results merge by
  log-sum-exp ("Flash-Decoding", https://crfm.stanford.edu/2023/10/12/flashdecoding.html). There are large
  shares and small ones, of which the small ones go to whoever is free, so that a team that reads one sequence
  over the bus is not waited for.
- Sequences whose words are equal share those blocks: one read serves them all, as the GPU's L2 does not keep
  host memory and each byte of it should cross the bus once (compare "Hydragen", Juravsky et al. 2024,
  https://arxiv.org/abs/2402.05099). Sharing is found from the words, and need not be declared.
- A page that is tagged *install* is written to its place in VRAM from shared memory, as it passes.

Results depend on lengths and sharing, not on where blocks lie: the same batch gives the same bits from any
memory.

Elsewhere, and for layouts that the kernel does not read, `kernels/reference.py` answers.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from ..tiers.errors import KernelError
from ..tiers.layout import KVLayout
from . import reference
from .arguments import (
    expect_attention,
    expect_kernel_tensors,
    expect_planned,
    expect_positive_scale,
    expect_rows,
)
from .checks import expect_rows_mapped
from .compiled import Kernel, load_kernel
from .reference import AttentionPlan

__all__ = ["DecodePlan", "decode_attention", "decode_plan"]

_SHARING: Final = "QqQiiQQQQQQQ"
_DIVISION: Final = "iiiiiiiiiiqQQQQQQQ"
_PROBLEM: Final = "QqQqQqQQQQQQQQqQqqiiiif"
_CHAIN: Final = "QQQQQQi"
"""The structs of the kernels, as `load_kernel` takes them."""

_ROUNDS: Final = 3
_RUN_BYTES: Final = 64
_START_BYTES: Final = 144
_RESULT_BYTES: Final = 20
_SHARES_WORDS: Final = 12
_LEFT_WORDS: Final = 4
_MOST_LEVELS: Final = 6
_WORTH_DIVIDING: Final = 200
_SMALLEST_SHARE: Final = 20
"""Tiles of a team's work from which on it pays to divide it in large and small shares, and of the smallest
ones: each further share costs a merge (one H200)."""
_SHARE_THREADS: Final = 256
_DIVIDE_THREADS: Final = 1024
_COMBINE_THREADS: Final = 256
_COMBINE_CTAS_PER_SM: Final = 2
"""As many as fit beside the first CTAs that end: the next launch waits until all of them have begun."""
_MOST_HIDDEN_CTAS: Final = 16
_WARPS: Final = 4
_MMA_ROWS: Final = 16
_DTYPES: Final = ("float16", "bfloat16")
_BLOCK_SIZES: Final = (16, 32, 64)
_MOST_SHARED_ROWS: Final = 512
"""Rows of one KV head for which partial results have room in every CTA; more rows are divided among fewer."""
_LOG2_E: Final = math.log2(math.e)
_PORTABLE_FROM: Final = (8, 0)
_BULK_COPIES_FROM: Final = (9, 0)
"""Compute capabilities that the two kernels need."""


@dataclass(frozen=True)
class _Form:
    """How a kernel is compiled: tokens of a tile, stages of the ring, CTAs of a multiprocessor.

    A portable one is of ``decode_portable.cu``, where every warp copies and attends.
    """

    tile: int
    stages: int
    ctas_per_sm: int
    portable: bool = False

    @property
    def source(self) -> str:
        return "decode_portable.cu" if self.portable else "decode_attention.cu"

    @property
    def warps(self) -> int:
        """Warps that attend."""
        return self.tile // 16 if self.portable else _WARPS

    @property
    def threads(self) -> int:
        return 32 * (self.warps if self.portable else self.warps + 1)

    def shared_bytes(self, row_bytes: int) -> int:
        stage = self.tile * 2 * row_bytes
        if self.portable:
            return self.stages * (stage + 32 * self.warps) + self.warps * _MMA_ROWS * 8
        stage += _MMA_ROWS * row_bytes
        about = 48 + 8 * (self.tile // 16)
        merging = _WARPS * (_MMA_ROWS * (2 * row_bytes + 8) + _RESULT_BYTES)
        return self.stages * (stage + about + 16) + merging


_FORMS: Final = {
    64: _Form(128, 2, 2),
    80: _Form(64, 3, 2),
    96: _Form(64, 3, 2),
    128: _Form(64, 2, 2),
    256: _Form(64, 2, 1),
}
_FORM_OF_FEW: Final = {64: _Form(128, 3, 1), 128: _Form(64, 3, 1)}
_FEW_SEQUENCES: Final = 16
"""Up to so many sequences another form is faster: fewer bytes under way suit the memory, and two CTAs of a
multiprocessor pay only where many rows share a prefix (one H200)."""
PORTABLE_FORMS: Final = {dim: _Form(32 if dim > 128 else 64, 2, 2, portable=True) for dim in _FORMS}
_CTA_SHARED_BYTES: Final = 1 << 10
"""Shared memory that the driver takes for itself in every CTA."""


def _portable_form(layout: KVLayout, device: torch.device) -> _Form:
    form = PORTABLE_FORMS[layout.head_dim]
    taken = form.shared_bytes(layout.row_bytes) + _CTA_SHARED_BYTES
    room = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return replace(form, ctas_per_sm=min(form.ctas_per_sm, room // taken))


def _form(layout: KVLayout, seqs: int) -> _Form:
    few = _FORM_OF_FEW.get(layout.head_dim) if seqs <= _FEW_SEQUENCES else None
    return few or _FORMS[layout.head_dim]


@dataclass
class _Divided:
    """The work of a step, divided for a number of query heads and a window.

    It is settled once a kernel of its stream has waited for the kernels that made it.
    """

    members: int
    taken: int
    left: int
    shares: int
    runs: int
    starts: int
    first_run: int
    partial_out: torch.Tensor
    partial_sum: torch.Tensor
    memory: torch.Tensor
    settled: bool = False


@dataclass(frozen=True)
class DecodePlan:
    """Who shares which blocks in a step, as found on the GPU; good until a word or a length changes.

    From its second use on, attention fetches blocks before the kernels ahead of it in the stream are over,
    where it is `early`. These may write the last token of each sequence, and nothing else that it reads.

    Made inside a captured graph, it is made anew from the table's and the lengths' memory at every replay.

    Attributes:
        layout: the layout of the blocks.
        block_table: int64 [seqs, max_blocks].
        seq_lens: int32 [seqs].
        early: whether attention does not wait for the kernels ahead of it.
    """

    layout: KVLayout
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    early: bool
    _memory: torch.Tensor
    _form: _Form
    _divided: dict[tuple[int, int], _Divided] = field(default_factory=dict)

    def _words(self) -> tuple[int, ...]:
        """Addresses of the arrays of `Sharing`, in its order."""
        seqs = self.seq_lens.shape[0]
        base = self._memory.data_ptr()
        step = 4 * _ROUNDS * seqs
        rounds = [base + step * i for i in range(5)]
        return (*rounds, *(base + 5 * step + 4 * seqs * i for i in range(2)))

    def _sharing(self) -> tuple[int, ...]:
        return (
            self.block_table.data_ptr(),
            self.block_table.stride(0),
            self.seq_lens.data_ptr(),
            self.seq_lens.shape[0],
            self.layout.block_size,
            *self._words(),
        )

    def _divide(self, group: int, window: int) -> _Divided:
        """The work divided for `group` query heads of a KV head; found once for all layers."""
        known = self._divided.get((group, window))
        if known is not None:
            return known
        device = self.seq_lens.device
        layout = self.layout
        seqs = self.seq_lens.shape[0]
        form = self._form
        ctas = multiprocessors(device) * form.ctas_per_sm
        heads = layout.num_kv_heads
        levels = 1 if form.portable else _MOST_LEVELS
        shared_rows = max(min(seqs * group, _MOST_SHARED_ROWS), levels * min(seqs * group, _MMA_ROWS))
        rows = 2 * (_ROUNDS + 1) * seqs * heads * group + ctas * shared_rows
        runs = (_ROUNDS + 1) * seqs + 2
        teams = max(1, ctas // heads)
        words = (_SHARES_WORDS, seqs + 1, runs, _LEFT_WORDS * seqs, heads)
        sizes = (runs * _RUN_BYTES, teams * levels * _START_BYTES, *(4 * count for count in words))
        ends = list(itertools.accumulate(-(-size // 16) * 16 for size in sizes))
        memory = torch.empty(ends[-1], dtype=torch.uint8, device=device)
        base = memory.data_ptr()
        at_runs, at_starts, at_shares, at_first, at_members, at_left, at_taken = (
            base + start for start in (0, *ends[:-1])
        )
        divided = _Divided(
            members=at_members,
            taken=at_taken,
            left=at_left,
            shares=at_shares,
            runs=at_runs,
            starts=at_starts,
            first_run=at_first,
            partial_out=torch.empty((rows, layout.head_dim), dtype=torch.float32, device=device),
            partial_sum=torch.empty((rows, 2), dtype=torch.float32, device=device),
            memory=memory,
        )
        _plan_kernel("divide", f"{_SHARING} {_DIVISION}", device).launch(
            1,
            _DIVIDE_THREADS,
            (
                *self._sharing(),
                group,
                heads,
                max(1, form.tile // layout.block_size),
                form.warps * _MMA_ROWS,
                _MMA_ROWS,
                window,
                teams,
                levels,
                _WORTH_DIVIDING,
                _SMALLEST_SHARE,
                rows,
                at_first,
                at_members,
                at_shares,
                at_left,
                at_taken,
                at_runs,
                at_starts,
            ),
            stream=torch.cuda.current_stream(device).cuda_stream,
        )
        self._divided[group, window] = divided
        return divided


def decode_plan(
    block_table: torch.Tensor, seq_lens: torch.Tensor, layout: KVLayout, *, early: bool = True
) -> AttentionPlan | DecodePlan:
    """What `decode_attention` needs once a step for all layers.

    Args:
        block_table: int64 [seqs, max_blocks] of block addresses, any row stride; only the first
            ``ceil(len / block_size)`` words of a row are read.
        seq_lens: int32 [seqs], contiguous; 0 marks padding.
        layout: the layout of the blocks.
        early: kernels between two uses of the plan write no more than the last token of each sequence, so
            that attention need not wait for them before it fetches the others. False where several rows are
            tokens of one sequence: what each writes the later ones read.

    Raises:
        KernelError: wrong dtype, shape or device. Lengths and words are looked at only where the reference
            answers; on the GPU they are the caller's to keep right, since nothing waits for them.
    """
    device = block_table.device
    if not has_kernel(device, layout, _PORTABLE_FROM):
        return reference.decode_plan(block_table, seq_lens, layout)
    portable = _capability(device) < _BULK_COPIES_FROM
    return plan_on_gpu(block_table, seq_lens, layout, portable=portable, early=early)


def plan_on_gpu(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    layout: KVLayout,
    *,
    portable: bool,
    early: bool = True,
) -> DecodePlan:
    """`decode_plan` for the kernel of bulk copies, or for the portable one, which runs on newer GPUs too."""
    seqs = expect_rows(block_table, seq_lens)
    device = block_table.device
    expect_rows_mapped(block_table, seq_lens, layout)
    memory = torch.empty(seqs * (5 * _ROUNDS + 2), dtype=torch.int32, device=device)
    form = _portable_form(layout, device) if portable else _form(layout, seqs)
    plan = DecodePlan(layout, block_table, seq_lens, early, memory, form)
    if seqs == 0:
        return plan
    sharing = plan._sharing()
    stream = torch.cuda.current_stream(device).cuda_stream
    share = _plan_kernel("share", f"{_SHARING} i", device)
    for number in range(_ROUNDS):
        share.launch(seqs, _SHARE_THREADS, (*sharing, number), stream=stream)
    for name in ("rank", "place"):
        _plan_kernel(name, _SHARING, device).launch(seqs, _SHARE_THREADS, sharing, stream=stream)
    return plan


@torch.no_grad()
def decode_attention(
    q: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    layer: int,
    layout: KVLayout,
    *,
    scale: float | None = None,
    window: int | None = None,
    install: torch.Tensor | None = None,
    plan: AttentionPlan | DecodePlan | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query per sequence, its last position, over the blocks of one layer.

    Args:
        q: [seqs, q_heads, head_dim] in the layout's dtype, its last two dimensions contiguous. Query head
            ``h`` reads KV head ``h // (q_heads / kv_heads)``.
        block_table: int64 [seqs, max_blocks] of block addresses, any row stride; only the first
            ``ceil(len / block_size)`` words of a row are read.
        seq_lens: int32 [seqs], tokens of each sequence, the query's own included; 0 gives zeros.
        layer: index of the layer in the block.
        layout: the layout of the blocks.
        scale: what scores are multiplied by, positive on a GPU; None for ``1 / sqrt(head_dim)``.
        window: a query at position ``i`` sees keys ``i - window < j <= i``; None for all ``j <= i``.
        install: int64, shape of `block_table`: where the page of this layer of each block whose word is
            tagged *install* is copied to.
        plan: `decode_plan` of the same table, lengths and layout. Where it was used before and is `early`,
            kernels since then may have written the last token of each sequence, `q`, and nothing else that
            is read here.
        out: where the result is written, shape and dtype of `q`; None for a new tensor.
        lse: float32 [seqs, q_heads], takes the natural logarithm of the sum of exponentials of the
            scaled scores; minus infinity for an empty sequence.

    Returns:
        [seqs, q_heads, head_dim], the dtype of `q`.

    Raises:
        KernelError: an argument does not fit, found before memory is read or written.
    """
    if plan is None:
        plan = decode_plan(block_table, seq_lens, layout)
    if isinstance(plan, AttentionPlan):
        return reference.decode_attention(
            q, block_table, seq_lens, layer, layout,
            scale=scale, window=window, install=install, plan=plan, out=out, lse=lse,
        )  # fmt: skip
    device = plan.seq_lens.device
    seqs = plan.seq_lens.shape[0]
    expect_planned(plan.layout, layout, layer)
    heads = layout.num_kv_heads
    group, out = expect_attention(q, layout, seqs, device, window=window, out=out, lse=lse)
    if group > _MMA_ROWS:
        return reference.decode_attention(
            q, block_table, seq_lens, layer, layout,
            scale=scale, window=window, install=install, out=out, lse=lse,
        )  # fmt: skip
    for name, given, planned in (
        ("block_table", block_table, plan.block_table),
        ("seq_lens", seq_lens, plan.seq_lens),
    ):
        if given.data_ptr() != planned.data_ptr():
            raise KernelError(f"the plan was made for another {name}")
    expect_positive_scale(scale)
    expect_kernel_tensors(q, out, block_table, install, lse)
    if seqs == 0:
        return out
    divided = plan._divide(group, window or 0)
    form = plan._form
    problem = (
        q.data_ptr(),
        q.stride(0),
        block_table.data_ptr(),
        block_table.stride(0),
        0 if install is None else install.data_ptr(),
        0 if install is None else install.stride(0),
        divided.shares,
        divided.runs,
        divided.starts,
        divided.members,
        divided.taken,
        divided.partial_out.data_ptr(),
        divided.partial_sum.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        0 if lse is None else lse.data_ptr(),
        layer * layout.page_bytes,
        layout.slice_bytes,
        int(divided.settled),
        group,
        heads,
        layout.block_size,
        (layout.head_dim**-0.5 if scale is None else scale) * _LOG2_E,
    )
    words = plan._words()
    chain = (divided.left, *words[:3], divided.first_run, plan.seq_lens.data_ptr(), seqs)
    stream = torch.cuda.current_stream(device).cuda_stream
    slices = -(-group * layout.head_dim // 128)  # a warp's words, of four columns each
    sms = multiprocessors(device)
    _attention_kernel("decode", _PROBLEM, layout, form, device).launch(
        max(heads, sms * form.ctas_per_sm),
        form.threads,
        problem,
        stream=stream,
        shared_bytes=form.shared_bytes(layout.row_bytes),
        dependent=not form.portable,
    )
    divided.settled = plan.early
    _attention_kernel("combine", f"{_PROBLEM} {_CHAIN}", layout, form, device).launch(
        min(-(-32 * seqs * heads * slices // _COMBINE_THREADS), sms * _COMBINE_CTAS_PER_SM),
        _COMBINE_THREADS,
        (*problem, *chain),
        stream=stream,
        dependent=not form.portable,
    )
    if install is not None and window is not None:
        columns = min(block_table.shape[1], _MOST_HIDDEN_CTAS)
        _attention_kernel("install_hidden", f"{_PROBLEM} Q i", layout, form, device).launch(
            (columns, seqs),
            _COMBINE_THREADS,
            (*problem, plan.seq_lens.data_ptr(), window),
            stream=stream,
        )
    return out


def has_kernel(device: torch.device, layout: KVLayout, oldest: tuple[int, int] = _BULK_COPIES_FROM) -> bool:
    """Whether the GPU and the layout are ones that a kernel for compute capability `oldest` on is for."""
    return (
        device.type == "cuda"
        and layout.dtype in _DTYPES
        and layout.planes == 2
        and layout.format in ("swizzled", "plain")
        and layout.block_size in _BLOCK_SIZES
        and layout.head_dim in _FORMS
        and _capability(device) >= oldest
    )


def _plan_kernel(name: str, parameters: str, device: torch.device) -> Kernel:
    return load_kernel("decode_plan.cu", name, parameters, device=device)


def _attention_kernel(
    name: str, parameters: str, layout: KVLayout, form: _Form, device: torch.device
) -> Kernel:
    return _loaded(name, parameters, layout.head_dim, layout.dtype, layout.swizzled, form, device)


@functools.cache
def _loaded(
    name: str,
    parameters: str,
    head_dim: int,
    dtype: str,
    swizzled: bool,
    form: _Form,
    device: torch.device,
) -> Kernel:
    defines = {
        "HEAD_DIM": head_dim,
        "BFLOAT16": int(dtype == "bfloat16"),
        "SWIZZLED": int(swizzled),
        "TILE": form.tile,
        "STAGES": form.stages,
    }
    if not form.portable:
        defines["CTAS_PER_SM"] = form.ctas_per_sm
    return load_kernel(form.source, name, parameters, device=device, defines=defines)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
