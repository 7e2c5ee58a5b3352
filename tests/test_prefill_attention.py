"""prefill_attention on a GPU against float64, wherever the prefixes lie."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from kvpager import KVLayout
from kvpager.kernels import prefill_attention, prefill_plan
from kvpager.tests.attention_cases import Case, make_case
from kvpager.tiers.errors import KernelError

pytestmark = pytest.mark.gpu

_SEEDS = 120
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_TOLERANCE = {"float16": 2e-3, "bfloat16": 1e-2}


def _queries(
    case: Case, counts: list[int], group: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    bounds = list(itertools.accumulate(counts, initial=0))
    generator = torch.Generator(device="cuda").manual_seed(seed)
    shape = (bounds[-1], case.layout.num_kv_heads * group, case.layout.head_dim)
    q = torch.randn(shape, generator=generator, device="cuda").to(_DTYPES[case.layout.dtype])
    return q, torch.tensor(bounds, dtype=torch.int32, device="cuda"), bounds


def _check(case: Case, counts: list[int], group: int, seed: int, **options: object) -> torch.Tensor:
    q, cu, bounds = _queries(case, counts, group, seed)
    out = torch.full_like(q, float("nan"))
    prefill_attention(q, cu, case.table, case.lengths, 0, case.layout, out=out, **options)  # type: ignore[arg-type]
    want = case.causal_answer(q, bounds, case.layout.head_dim**-0.5, options.get("window"))  # type: ignore[arg-type]
    assert out.isfinite().all()
    assert float((out.double() - want).norm() / want.norm().clamp_min(1e-30)) < _TOLERANCE[case.layout.dtype]
    return out


def _installed(case: Case) -> None:
    for word, block in zip(case.install.flatten().tolist(), case.blocks.flatten().tolist(), strict=True):
        if word:
            assert torch.equal(case.place(word), case.stored[block])


@pytest.mark.parametrize("seed", range(_SEEDS))
def test_random_chunks_agree_with_float64(seed: int) -> None:
    choose = random.Random(seed)
    layout = KVLayout(
        1,
        choose.choice([1, 2, 3, 8]),
        choose.choice([64, 128, 128, 256, 80, 96]),
        block_size=choose.choice([16, 16, 32, 64]),
        dtype=choose.choice(["float16", "bfloat16"]),
        format=choose.choice([None, None, None, "plain"]),
    )
    seqs = choose.choice([1, 2, 5, 40])
    most = choose.choice([40, 600, 3000 // max(1, seqs // 2)])
    lengths = [choose.choice([0, 1, 16, most, choose.randint(1, most)]) for _ in range(seqs)]
    counts = [
        choose.choice([0, 1, min(length, 70), choose.randint(0, min(length, 400))]) for length in lengths
    ]
    counts = [min(count, length) if length else count for count, length in zip(counts, lengths, strict=True)]
    case = make_case(
        layout,
        lengths,
        torch.device("cuda"),
        seed=seed,
        far_share=choose.choice([0.0, 0.2, 1.0]),
        install_share=choose.choice([0.0, 0.5, 1.0]),
        shared_share=choose.choice([0.0, 0.7]),
    )
    group = choose.choice([1, 2, 3, 4, 5, 8, 16])
    plan = prefill_plan(
        torch.tensor(list(itertools.accumulate(counts, initial=0)), dtype=torch.int32, device="cuda"),
        case.table,
        case.lengths,
        layout,
        staging_pages=choose.choice([None, 0, 3]),
    )
    if sum(counts) == 0:
        return
    window = choose.choice([None, None, None, 1, 33, 200])
    q, _, bounds = _queries(case, counts, group, seed)
    out = torch.full_like(q, float("nan"))
    prefill_attention(
        q, plan.cu_seqlens_q, case.table, case.lengths, 0, layout,  # type: ignore[union-attr]
        window=window, install=case.install, plan=plan, out=out,
    )  # fmt: skip
    want = case.causal_answer(q, bounds, layout.head_dim**-0.5, window)
    assert out.isfinite().all()
    assert float((out.double() - want).norm() / want.norm().clamp_min(1e-30)) < _TOLERANCE[layout.dtype]
    _installed(case)


def test_few_queries_on_a_long_prefix_have_the_whole_gpu() -> None:
    case = make_case(KVLayout(1, 2, 128), [60_000, 9000], torch.device("cuda"), seed=3, far_share=0.01)
    _check(case, [5, 17], 4, 3)


def test_the_same_chunk_gives_the_same_bits_from_any_memory_and_with_install() -> None:
    layout = KVLayout(1, 8, 128)
    lengths = [2500, 700, 33]
    results = []
    for far, install in ((0.0, 0.0), (0.3, 0.0), (0.3, 1.0), (1.0, 0.5)):
        case = make_case(layout, lengths, torch.device("cuda"), seed=6, far_share=far, install_share=install)
        results.append(_check(case, [300, 200, 33], 4, 6, install=case.install))
        _installed(case)
    for other in results[1:]:
        assert torch.equal(results[0].view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize("staging_pages", [None, 5])
def test_layers_in_turn_find_their_own_pages(staging_pages: int | None) -> None:
    layers, layout = 5, KVLayout(5, 2, 64)
    case = make_case(layout, [700, 90], torch.device("cuda"), seed=9, far_share=0.7, install_share=0.5)
    q, cu, bounds = _queries(case, [100, 90], 3, 9)
    plan = prefill_plan(cu, case.table, case.lengths, layout, staging_pages=staging_pages)
    for _ in range(20):
        for layer in range(layers):
            out = torch.full_like(q, float("nan"))
            prefill_attention(
                q, cu, case.table, case.lengths, layer, layout, install=case.install, plan=plan, out=out
            )
            want = case.of_layer(layer).causal_answer(q, bounds, layout.head_dim**-0.5)
            assert float((out.double() - want).norm() / want.norm()) < _TOLERANCE["float16"]
    _installed(case)


def test_wrong_arguments_are_told_before_the_launch() -> None:
    layout = KVLayout(1, 2, 128)
    case = make_case(layout, [100, 3], torch.device("cuda"), seed=1)
    q, cu, _ = _queries(case, [10, 3], 2, 1)
    table, lens = case.table, case.lengths
    calls: list[Callable[[], object]] = [
        lambda: prefill_attention(q.float(), cu, table, lens, 0, layout),
        lambda: prefill_attention(q[:, :3], cu, table, lens, 0, layout),
        lambda: prefill_attention(q, cu[:2], table, lens, 0, layout),
        lambda: prefill_attention(q, cu.long(), table, lens, 0, layout),
        lambda: prefill_attention(q, cu, table, lens, 1, layout),
        lambda: prefill_attention(q, cu, table, lens, 0, layout, scale=-1.0),
        lambda: prefill_attention(q, cu, table, lens, 0, layout, window=0),
        lambda: prefill_attention(q, cu, table, lens, 0, layout, out=q[:5]),
        lambda: prefill_attention(
            q, cu, table.clone(), lens, 0, layout, plan=prefill_plan(cu, table, lens, layout)
        ),
        lambda: prefill_plan(cu, table, lens, layout, staging_pages=-1),
    ]
    for call in calls:
        with pytest.raises(KernelError):
            call()
