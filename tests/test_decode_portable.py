"""The portable kernel of decode_attention, on any GPU, against float64."""

from __future__ import annotations

import random

import pytest
import torch
from kvpager import KVLayout
from kvpager.kernels import DecodePlan, decode_attention
from kvpager.kernels.compiled import variants_of
from kvpager.kernels.decode_attention import PORTABLE_FORMS, plan_on_gpu
from kvpager.tests.attention_cases import Case, make_case

_SEEDS = 48
_TOLERANCE = {"float16": 2e-3, "bfloat16": 1e-2}
_FORMS = (
    (64, "float16"),
    (80, "float16"),
    (96, "bfloat16"),
    (128, "float16"),
    (128, "bfloat16"),
    (256, "float16"),
)
"""Head dimensions and dtypes of the variants that the source names, so that few are compiled."""
_LEAST_SHARED_BYTES = 99 << 10
"""Shared memory that a CTA may have at most on sm_86 and sm_89, the least of what the kernel is for."""


def _plan(case: Case) -> DecodePlan:
    return plan_on_gpu(case.table, case.lengths, case.layout, portable=True)


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


def _query(case: Case, group: int, seed: int) -> torch.Tensor:
    shape = (len(case.keys), case.layout.num_kv_heads * group, case.layout.head_dim)
    generator = torch.Generator(device="cuda").manual_seed(seed)
    dtype = torch.float16 if case.layout.dtype == "float16" else torch.bfloat16
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def _check(case: Case, q: torch.Tensor, *, window: int | None = None) -> torch.Tensor:
    """The result, held against float64; what is tagged *install* must have come where it belongs."""
    out = torch.full_like(q, float("nan"))
    lse = torch.full(q.shape[:2], float("nan"), device=q.device)
    decode_attention(
        q, case.table, case.lengths, 0, case.layout,
        window=window, install=case.install, plan=_plan(case), out=out, lse=lse,
    )  # fmt: skip
    want, want_lse = case.answer(q, case.layout.head_dim**-0.5, window)
    assert out.isfinite().all()
    assert _error(out, want) < _TOLERANCE[case.layout.dtype]
    filled = case.lengths > 0
    torch.testing.assert_close(lse[filled].double(), want_lse[filled], atol=2e-3, rtol=1e-3)
    assert (lse[~filled] == -torch.inf).all()
    assert (out[~filled] == 0).all()
    for word, block in zip(case.install.flatten().tolist(), case.blocks.flatten().tolist(), strict=True):
        if word:
            assert torch.equal(case.place(word), case.stored[block])
    return out


def _bits(out: torch.Tensor) -> torch.Tensor:
    return out.view(torch.int16)


def test_every_form_fits_the_smallest_gpu_that_it_is_for() -> None:
    for head_dim, form in PORTABLE_FORMS.items():
        assert 0 < form.shared_bytes(2 * head_dim) <= _LEAST_SHARED_BYTES


def test_every_form_is_one_that_is_compiled_in_advance() -> None:
    named = {
        (dict(v.defines)["HEAD_DIM"], dict(v.defines)["TILE"]) for v in variants_of("decode_portable.cu")
    }
    assert named == {(head_dim, form.tile) for head_dim, form in PORTABLE_FORMS.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(_SEEDS))
def test_random_batches_agree_with_float64(seed: int) -> None:
    choose = random.Random(seed)
    head_dim, dtype = _FORMS[seed % len(_FORMS)]
    layout = KVLayout(
        1, choose.choice([1, 2, 3, 8]), head_dim, block_size=choose.choice([16, 16, 32, 64]), dtype=dtype
    )
    seqs = choose.choice([1, 2, 3, 8, 40, 100])
    most = choose.choice([20, 300, 3000 // max(1, seqs // 8)])
    case = make_case(
        layout,
        [choose.choice([0, 1, 16, most, choose.randint(1, most)]) for _ in range(seqs)],
        torch.device("cuda"),
        seed=seed,
        far_share=choose.choice([0.0, 0.1, 0.5, 1.0]),
        install_share=choose.choice([0.0, 0.05, 1.0]),
        shared_share=choose.choice([0.0, 0.5, 0.95]),
    )
    group = choose.choice([1, 2, 3, 4, 5, 7, 8, 16])
    _check(case, _query(case, group, seed), window=choose.choice([None, None, None, 1, 33, 200]))


@pytest.mark.gpu
def test_a_long_sequence_beside_short_ones() -> None:
    layout = KVLayout(1, 2, 128)
    case = make_case(layout, [60_000, 1, 17, 4096], torch.device("cuda"), seed=3, far_share=0.01)
    _check(case, _query(case, 8, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 256])
def test_many_sequences_on_one_prefix(head_dim: int) -> None:
    layout = KVLayout(1, 2, head_dim)
    lengths = [1024 + 16 + i % 30 for i in range(200)]
    case = make_case(
        layout, lengths, torch.device("cuda"), seed=4, far_share=0.5, install_share=0.02, shared_share=1.0
    )
    _check(case, _query(case, 4, 4))


@pytest.mark.gpu
def test_followers_that_leave_a_prefix_everywhere() -> None:
    layout = KVLayout(1, 1, 64)
    lengths = [16 * (150 - i) + 5 for i in range(120)]
    case = make_case(layout, lengths, torch.device("cuda"), seed=5, far_share=0.3, shared_share=1.0)
    _check(case, _query(case, 2, 5))


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [0.0, 0.9])
def test_the_same_batch_gives_the_same_bits_from_any_memory_and_with_install(shared: float) -> None:
    layout = KVLayout(1, 8, 128)
    lengths = [random.Random(i).randint(1, 1500) for i in range(30)]
    results = []
    for far, install in ((0.0, 0.0), (0.2, 0.5), (1.0, 0.1)):
        case = make_case(
            layout,
            lengths,
            torch.device("cuda"),
            seed=6,
            far_share=far,
            install_share=install,
            shared_share=shared,
        )
        results.append(_check(case, _query(case, 4, 6)))
    for other in results[1:]:
        assert torch.equal(_bits(results[0]), _bits(other))


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [0.0, 0.9])
def test_repeats_give_the_same_bits(shared: float) -> None:
    layout = KVLayout(1, 8, 128)
    lengths = [random.Random(i).randint(1, 1500) for i in range(64)]
    case = make_case(layout, lengths, torch.device("cuda"), seed=7, far_share=0.02, shared_share=shared)
    q = _query(case, 4, 7)
    plan = _plan(case)
    first = _check(case, q)
    moved = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(300):
        out = torch.full_like(q, float("nan"))
        decode_attention(q, case.table, case.lengths, 0, layout, plan=plan, out=out)
        moved += (_bits(out) != _bits(first)).sum()
    assert int(moved) == 0


@pytest.mark.gpu
def test_a_captured_graph_follows_new_words_and_lengths() -> None:
    layout = KVLayout(1, 8, 128)
    device = torch.device("cuda")
    lengths = [random.Random(i).randint(100, 1500) for i in range(20)]
    others = [random.Random(100 + i).choice([0, 1, length]) for i, length in enumerate(lengths)]
    first = make_case(layout, lengths, device, seed=8, far_share=0.1, shared_share=0.5)
    second = make_case(layout, others, device, seed=9, far_share=0.1, shared_share=0.5)
    width = max(first.table.shape[1], second.table.shape[1])
    table = torch.zeros((20, width), dtype=torch.int64, device=device)
    lens = torch.zeros(20, dtype=torch.int32, device=device)
    q = _query(first, 4, 8)
    out = torch.empty_like(q)

    def step() -> None:
        plan = plan_on_gpu(table, lens, layout, portable=True)
        decode_attention(q, table, lens, 0, layout, plan=plan, out=out)

    def load(case: Case) -> None:
        table.zero_()
        table[:, : case.table.shape[1]] = case.table
        lens.copy_(case.lengths)

    load(first)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for case in (first, second, first):
        load(case)
        out.fill_(float("nan"))
        graph.replay()
        want, _ = case.answer(q, layout.head_dim**-0.5)
        assert _error(out, want) < _TOLERANCE["float16"]
