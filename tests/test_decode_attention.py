"""decode_attention on a GPU against float64, wherever the blocks lie and whoever shares them."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable

import pytest
import torch
from kvpager import KVLayout
from kvpager.kernels import DecodePlan, decode_attention, decode_plan, write_kv
from kvpager.kernels.reference import AttentionPlan
from kvpager.tests.attention_cases import Case, make_case
from kvpager.tiers.address import FAR, INSTALL
from kvpager.tiers.errors import KernelError

pytestmark = pytest.mark.gpu

# Of the module, which the function of the same name hides.
_MODULE = importlib.import_module("kvpager.kernels.decode_attention")
_SEEDS = 240
_TOLERANCE = {"float16": 2e-3, "bfloat16": 1e-2}


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


def _query(case: Case, group: int, seed: int) -> torch.Tensor:
    heads = case.layout.num_kv_heads * group
    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}[case.layout.dtype]
    generator = torch.Generator(device="cuda").manual_seed(seed)
    shape = (len(case.keys), heads, case.layout.head_dim)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def _run(case: Case, q: torch.Tensor, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full_like(q, float("nan"))
    lse = torch.full(q.shape[:2], float("nan"), device=q.device)
    decode_attention(q, case.table, case.lengths, 0, case.layout, out=out, lse=lse, **options)  # type: ignore[arg-type]
    return out, lse


def _check(case: Case, q: torch.Tensor, **options: object) -> torch.Tensor:
    out, lse = _run(case, q, **options)
    window = options.get("window")
    want, want_lse = case.answer(q, case.layout.head_dim**-0.5, window)  # type: ignore[arg-type]
    assert out.isfinite().all()
    assert _error(out, want) < _TOLERANCE[case.layout.dtype]
    filled = case.lengths > 0
    torch.testing.assert_close(lse[filled].double(), want_lse[filled], atol=2e-3, rtol=1e-3)
    assert (lse[~filled] == -torch.inf).all()
    assert (out[~filled] == 0).all()
    return out


def _installed(case: Case) -> None:
    for word, block in zip(case.install.flatten().tolist(), case.blocks.flatten().tolist(), strict=True):
        if word:
            assert torch.equal(case.place(word), case.stored[block])


@pytest.fixture(params=["large shares", "small shares"])
def shares(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work divided as usual, and so finely that small cases have shares of many sizes."""
    if request.param == "small shares":
        monkeypatch.setattr(_MODULE, "_SMALLEST_SHARE", 1)
        monkeypatch.setattr(_MODULE, "_WORTH_DIVIDING", 1)


@pytest.mark.parametrize("seed", range(_SEEDS))
def test_random_batches_agree_with_float64(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = random.Random(seed)
    monkeypatch.setattr(_MODULE, "_SMALLEST_SHARE", choose.choice([1, 3, _MODULE._SMALLEST_SHARE]))
    monkeypatch.setattr(_MODULE, "_WORTH_DIVIDING", choose.choice([1, 8, _MODULE._WORTH_DIVIDING]))
    head_dim = choose.choice([64, 128, 128, 256, 80, 96])
    layout = KVLayout(
        1,
        choose.choice([1, 2, 3, 8]),
        head_dim,
        block_size=choose.choice([16, 16, 32, 64]),
        dtype=choose.choice(["float16", "bfloat16"]),
        format=choose.choice([None, None, None, "plain"]),
    )
    group = choose.choice([1, 2, 3, 4, 5, 7, 8, 16])
    seqs = choose.choice([1, 2, 3, 8, 40, 150])
    most = choose.choice([20, 300, 3000 // max(1, seqs // 8)])
    lengths = [
        choose.choice([0, 1, 16, most, choose.randint(1, most), choose.randint(1, most)]) for _ in range(seqs)
    ]
    case = make_case(
        layout,
        lengths,
        torch.device("cuda"),
        seed=seed,
        far_share=choose.choice([0.0, 0.1, 0.5, 1.0]),
        install_share=choose.choice([0.0, 0.5, 1.0]),
        shared_share=choose.choice([0.0, 0.5, 0.95]),
    )
    q = _query(case, group, seed)
    window = choose.choice([None, None, None, 1, 33, 200])
    _check(case, q, window=window, install=case.install)
    _installed(case)


@pytest.mark.usefixtures("shares")
def test_a_long_sequence_beside_short_ones() -> None:
    layout = KVLayout(1, 2, 128)
    case = make_case(layout, [200_000, 1, 17, 4096], torch.device("cuda"), seed=3, far_share=0.01)
    _check(case, _query(case, 8, 3))


@pytest.mark.usefixtures("shares")
def test_many_sequences_on_one_prefix() -> None:
    layout = KVLayout(1, 2, 128)
    lengths = [2048 + 16 + i % 30 for i in range(300)]
    case = make_case(layout, lengths, torch.device("cuda"), seed=4, far_share=0.5, shared_share=1.0)
    _check(case, _query(case, 4, 4))


@pytest.mark.usefixtures("shares")
def test_followers_that_leave_a_prefix_everywhere() -> None:
    layout = KVLayout(1, 1, 64)
    lengths = [16 * (200 - i) + 5 for i in range(150)]
    case = make_case(layout, lengths, torch.device("cuda"), seed=5, far_share=0.3, shared_share=1.0)
    _check(case, _query(case, 2, 5))


def _bits(out: torch.Tensor) -> torch.Tensor:
    return out.view(torch.int16)


@pytest.mark.usefixtures("shares")
@pytest.mark.parametrize("shared", [0.0, 0.9])
def test_the_same_batch_gives_the_same_bits_from_any_memory_and_with_install(shared: float) -> None:
    layout = KVLayout(1, 8, 128)
    lengths = [random.Random(i).randint(1, 2500) for i in range(30)]
    results = []
    for far, install in ((0.0, 0.0), (0.2, 0.0), (0.2, 1.0), (1.0, 0.5)):
        case = make_case(
            layout,
            lengths,
            torch.device("cuda"),
            seed=6,
            far_share=far,
            install_share=install,
            shared_share=shared,
        )
        results.append(_check(case, _query(case, 4, 6), install=case.install))
        _installed(case)
    for other in results[1:]:
        assert torch.equal(_bits(results[0]), _bits(other))


@pytest.mark.usefixtures("shares")
@pytest.mark.parametrize("shared", [0.0, 0.9])
def test_a_thousand_repeats_give_the_same_bits(shared: float) -> None:
    layout = KVLayout(1, 8, 128)
    lengths = [random.Random(i).randint(1, 1500) for i in range(64)]
    case = make_case(layout, lengths, torch.device("cuda"), seed=7, far_share=0.02, shared_share=shared)
    q = _query(case, 4, 7)
    plan = decode_plan(case.table, case.lengths, layout)
    first = _check(case, q, plan=plan)
    moved = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        out, _ = _run(case, q, plan=plan)
        moved += (_bits(out) != _bits(first)).sum()
    assert int(moved) == 0


@pytest.mark.usefixtures("shares")
def test_a_captured_graph_follows_new_words_and_lengths() -> None:
    layout = KVLayout(1, 8, 128)
    device = torch.device("cuda")
    lengths = [random.Random(i).randint(100, 1500) for i in range(20)]
    others = [random.Random(100 + i).choice([0, 1, length]) for i, length in enumerate(lengths)]
    first = make_case(layout, lengths, device, seed=8, far_share=0.1, shared_share=0.5)
    second = make_case(layout, others, device, seed=9, far_share=0.1, install_share=1.0, shared_share=0.5)
    width = max(first.table.shape[1], second.table.shape[1])
    table = torch.zeros((20, width), dtype=torch.int64, device=device)
    install = torch.zeros_like(table)
    lens = torch.zeros(20, dtype=torch.int32, device=device)
    q = _query(first, 4, 8)
    out = torch.empty_like(q)

    def step() -> None:
        plan = decode_plan(table, lens, layout)
        decode_attention(q, table, lens, 0, layout, plan=plan, out=out, install=install)

    def load(case: Case) -> None:
        table.zero_()
        install.zero_()
        table[:, : case.table.shape[1]] = case.table
        install[:, : case.table.shape[1]] = case.install
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
    _installed(second)


@pytest.mark.usefixtures("shares")
def test_a_plan_that_was_used_sees_the_token_that_was_written_just_before() -> None:
    """Attention fetches blocks while the kernel ahead of it still writes the last token of each sequence."""
    layout = KVLayout(1, 2, 128)
    rng = random.Random(11)
    seqs, steps = 40, 60
    case = make_case(layout, [rng.randint(1, 3000) for _ in range(seqs)], torch.device("cuda"), seed=11)
    last = (case.lengths.long() - 1).view(-1, 1)
    addresses = case.table.gather(1, last // layout.block_size).view(-1)
    offsets = (last % layout.block_size).view(-1)
    generator = torch.Generator("cuda").manual_seed(11)
    kv = torch.randn(2, steps, seqs, 2, 128, generator=generator, device="cuda", dtype=torch.float16)
    q = _query(case, 4, 11)
    plan = decode_plan(case.table, case.lengths, layout)
    outs = q.new_empty((steps, *q.shape))

    def step(number: int, plan: AttentionPlan | DecodePlan) -> torch.Tensor:
        write_kv(kv[0, number], kv[1, number], addresses, offsets, 0, layout)
        return decode_attention(q, case.table, case.lengths, 0, layout, plan=plan, out=outs[number])

    step(0, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(steps):
            step(number, plan)
    outs.fill_(torch.nan)
    graph.replay()
    found = outs.clone()
    for number in range(steps):
        torch.cuda.synchronize()
        step(number, decode_plan(case.table, case.lengths, layout))
    assert torch.equal(_bits(found), _bits(outs))
    assert len({bytes(_bits(out).cpu().numpy()) for out in outs}) == steps


@pytest.mark.usefixtures("shares")
def test_rows_of_one_sequence_see_what_the_kernel_just_before_wrote_for_the_others() -> None:
    """The last tokens of each sequence are in a row each; all of them are written in every step."""
    layout = KVLayout(1, 2, 128)
    rng = random.Random(12)
    seqs, tokens, steps = 12, 20, 40
    case = make_case(layout, [rng.randint(tokens, 3000) for _ in range(seqs)], torch.device("cuda"), seed=12)
    table = case.table.repeat_interleave(tokens, 0)
    earlier = torch.arange(tokens - 1, -1, -1, device="cuda", dtype=torch.int32).repeat(seqs)
    lens = case.lengths.repeat_interleave(tokens) - earlier
    last = (lens.long() - 1).view(-1, 1)
    addresses = table.gather(1, last // layout.block_size).view(-1)
    offsets = (last % layout.block_size).view(-1)
    generator = torch.Generator("cuda").manual_seed(12)
    rows = seqs * tokens
    kv = torch.randn(2, steps, rows, 2, 128, generator=generator, device="cuda", dtype=torch.float16)
    q = torch.randn(rows, 4, 128, generator=generator, device="cuda", dtype=torch.float16)
    plan = decode_plan(table, lens, layout, early=False)
    outs = q.new_empty((steps, *q.shape))

    def step(number: int, plan: AttentionPlan | DecodePlan) -> torch.Tensor:
        write_kv(kv[0, number], kv[1, number], addresses, offsets, 0, layout)
        return decode_attention(q, table, lens, 0, layout, plan=plan, out=outs[number])

    step(0, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(steps):
            step(number, plan)
    outs.fill_(torch.nan)
    graph.replay()
    found = outs.clone()
    for number in range(steps):
        torch.cuda.synchronize()
        step(number, decode_plan(table, lens, layout))
    assert torch.equal(_bits(found), _bits(outs))
    assert len({bytes(_bits(out).cpu().numpy()) for out in outs}) == steps


def test_wrong_arguments_are_told_before_the_launch() -> None:
    layout = KVLayout(2, 2, 128)
    case = make_case(KVLayout(1, 2, 128), [100, 3], torch.device("cuda"), seed=1)
    q = torch.zeros((2, 4, 128), dtype=torch.float16, device="cuda")
    table, lens = case.table, case.lengths
    calls: list[Callable[[], object]] = [
        lambda: decode_attention(q.float(), table, lens, 0, layout),
        lambda: decode_attention(q[:1], table, lens, 0, layout),
        lambda: decode_attention(q[:, :3], table, lens, 0, layout),
        lambda: decode_attention(q.cpu(), table, lens, 0, layout),
        lambda: decode_attention(q, table, lens.long(), 0, layout),
        lambda: decode_attention(q, table.int(), lens, 0, layout),
        lambda: decode_attention(q, table, lens, 2, layout),
        lambda: decode_attention(q, table, lens, 0, layout, scale=0.0),
        lambda: decode_attention(q, table, lens, 0, layout, window=0),
        lambda: decode_attention(q, table, lens, 0, layout, install=table[:, 1:]),
        lambda: decode_attention(
            q, table, lens, 0, layout, plan=decode_plan(table, lens, KVLayout(1, 2, 128))
        ),
        lambda: decode_attention(q, table.clone(), lens, 0, layout, plan=decode_plan(table, lens, layout)),
        lambda: decode_attention(torch.empty_strided(q.shape, (512, 1, 4)).to(q), table, lens, 0, layout),
    ]
    for call in calls:
        with pytest.raises(KernelError):
            call()


def test_words_that_differ_in_tags_alone_are_still_installed() -> None:
    layout = KVLayout(1, 2, 128)
    case = make_case(layout, [64, 64], torch.device("cuda"), seed=2, far_share=1.0)
    table = case.table.clone()
    table[1, :3] = table[0, :3]
    table[1, 1] |= INSTALL
    slot = torch.zeros(layout.block_bytes, dtype=torch.uint8, device="cuda")
    install = torch.zeros_like(table)
    install[1, 1] = slot.data_ptr()
    q = _query(case, 4, 2)
    decode_attention(q, table, case.lengths, 0, layout, install=install)
    assert int(table[0, 1]) & FAR
    assert torch.equal(slot, case.stored[int(case.blocks[0, 1])])
