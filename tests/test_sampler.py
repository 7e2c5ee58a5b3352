"""Sampling: distributions, the edges of top-k and top-p, and independence of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kvpager.engine.sampler import UNLIMITED, SamplingBatch, SamplingParams, sample
from kvpager.tiers.errors import ConfigError


def batch_of(
    rows: int,
    *,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] = UNLIMITED,
    top_p: float | list[float] = 1.0,
    seed: int | list[int] = 0,
    counter: list[int] | None = None,
    **bans: Any,
) -> SamplingBatch:
    return SamplingBatch(
        temperature=np.broadcast_to(np.array(temperature, np.float64), rows).copy(),
        top_k=np.broadcast_to(np.array(top_k, np.int64), rows).copy(),
        top_p=np.broadcast_to(np.array(top_p, np.float64), rows).copy(),
        seed=np.broadcast_to(np.array(seed, np.int64), rows).copy(),
        counter=np.arange(rows) if counter is None else np.array(counter, np.int64),
        **bans,
    )


def shares(probabilities: list[float], draws: int = 20_000, **params: Any) -> torch.Tensor:
    logits = torch.tensor(probabilities).log().expand(draws, -1)
    tokens = sample(logits, batch_of(draws, **params))
    return torch.bincount(tokens, minlength=len(probabilities)) / draws


def test_greedy_rows_take_the_largest_logit() -> None:
    logits = torch.randn((5, 100), generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample(logits, batch_of(5, temperature=0)), logits.argmax(-1))


@pytest.mark.parametrize("seed", [0, 1, 2**62])
def test_draws_follow_the_distribution(seed: int) -> None:
    wanted = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    draws = 20_000
    seen = shares(wanted.tolist(), draws, seed=seed)
    assert seen[1] == 0
    used = wanted > 0
    chi_square = float(((seen - wanted)[used] ** 2 / wanted[used]).sum()) * draws
    assert chi_square < 16.3  # 3 degrees of freedom, p = 0.001


def test_draws_of_one_seed_after_another_follow_the_distribution_too() -> None:
    draws = 20_000
    tokens = sample(torch.zeros((draws, 8)), batch_of(draws, seed=list(range(draws)), counter=[0] * draws))
    seen = torch.bincount(tokens, minlength=8) / draws
    assert float(((seen - 1 / 8) ** 2 * 8).sum()) * draws < 24.3  # 7 degrees of freedom, p = 0.001


def test_temperature_sharpens_and_flattens() -> None:
    squares = torch.tensor([0.6, 0.3, 0.1]) ** 2
    torch.testing.assert_close(
        shares([0.6, 0.3, 0.1], temperature=0.5), squares / squares.sum(), atol=0.015, rtol=0
    )
    assert shares([0.6, 0.3, 0.1], temperature=1e-30)[0] == 1
    torch.testing.assert_close(
        shares([0.6, 0.3, 0.1], temperature=1e6), torch.full((3,), 1 / 3), atol=0.015, rtol=0
    )


def test_top_k_keeps_the_k_most_probable_and_their_equals() -> None:
    wanted = [0.1, 0.4, 0.2, 0.3]
    assert shares(wanted, top_k=1).tolist() == [0, 1, 0, 0]
    torch.testing.assert_close(
        shares(wanted, top_k=2), torch.tensor([0, 4 / 7, 0, 3 / 7]), atol=0.015, rtol=0
    )
    assert (shares(wanted, top_k=4) > 0).all()
    assert (shares(wanted, top_k=9) > 0).all()
    assert (shares([0.25, 0.25, 0.25, 0.25], top_k=2) > 0).all()


def test_top_p_keeps_the_fewest_tokens_that_reach_the_share() -> None:
    wanted = [0.1, 0.4, 0.2, 0.3]
    assert shares(wanted, top_p=1e-9).tolist() == [0, 1, 0, 0]
    assert (shares(wanted, top_p=0.39) > 0).tolist() == [False, True, False, False]
    assert (shares(wanted, top_p=0.41) > 0).tolist() == [False, True, False, True]
    assert (shares(wanted, top_p=0.95) > 0).all()
    # Of the two that top-k leaves, the first has 4/7 of the probability.
    assert (shares(wanted, top_k=2, top_p=0.55) > 0).tolist() == [False, True, False, False]
    assert (shares(wanted, top_k=2, top_p=0.6) > 0).tolist() == [False, True, False, True]


def test_a_nucleus_may_be_wider_than_the_first_candidates() -> None:
    logits = torch.zeros((4000, 5000))
    logits[:, :2500] = 1e-3
    tokens = sample(logits[:1000], batch_of(1000, top_p=[0.5, 0.9999999999999999] * 500))
    assert (tokens[::2] < 2500).all()
    assert (tokens[1::2] >= 2500).any()


def test_a_row_draws_the_same_alone_and_among_others() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn((150, 3000), generator=generator) * 3
    columns: dict[str, list[Any]] = {
        "temperature": [0.0, 0.7, 1.3] * 50,
        "top_k": [UNLIMITED, 40, 1, 2999, 7] * 30,
        "top_p": [1.0, 0.9, 0.9999999] * 50,
        "seed": list(range(150)),
        "counter": [5] * 150,
    }
    together = sample(logits, batch_of(150, **columns))
    order = torch.randperm(150, generator=generator)
    shuffled = {name: [column[i] for i in order] for name, column in columns.items()}
    assert torch.equal(sample(logits[order], batch_of(150, **shuffled)), together[order])
    for row in range(0, 150, 7):
        alone = {name: [column[row]] for name, column in columns.items()}
        assert sample(logits[row : row + 1], batch_of(1, **alone)) == together[row]


def test_seeds_and_counters_make_different_draws() -> None:
    logits = torch.zeros((1, 1 << 16))
    drawn = {
        int(sample(logits, batch_of(1, seed=seed, counter=[counter])))
        for seed in range(10)
        for counter in range(10)
    }
    assert len(drawn) > 95


def test_banned_tokens_are_never_chosen_and_logits_stay_as_they_are() -> None:
    logits = torch.tensor([[1.0, 5.0, 3.0]]).repeat(200, 1)
    before = logits.clone()
    bans: dict[str, Any] = {"banned_rows": np.arange(200), "banned_tokens": np.ones(200, np.int64)}
    assert (sample(logits, batch_of(200, **bans)) != 1).all()
    assert (sample(logits, batch_of(200, temperature=0, **bans)) == 2).all()
    assert torch.equal(logits, before)


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.zeros((0, 7)), batch_of(0)).shape == (0,)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 300),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_k", 0),
        ("top_k", -1),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("seed", -1),
        ("seed", 1 << 63),
        ("stop", [""]),
        ("stop", [3]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.setting == name


def test_parameters_are_plain_values() -> None:
    params = SamplingParams(stop="\n", stop_token_ids=[3, 4], temperature=0)
    assert params.stop == ("\n",)
    assert params.stop_token_ids == (3, 4)
    assert params.greedy
    assert hash(params) == hash(SamplingParams(stop=["\n"], stop_token_ids=(3, 4), temperature=0.0))
