from __future__ import annotations

import time

import numpy as np
import pytest
from kvpager.kvstore.cost import ComputeCost, CostModel, LinkCost
from kvpager.kvstore.cost_estimates import ComputeEstimate, CostEstimates, LinkEstimate

LINK = LinkCost(2e-4, 1e-9)
COMPUTE = ComputeCost(3e-3, 5e-5, 2e-9, 512)


def moves(count: int, seed: int = 1) -> list[int]:
    return [int(2**power) for power in np.random.default_rng(seed).uniform(14, 25, count)]


def near(found: LinkCost | None, true: LinkCost, share: float = 0.05) -> bool:
    assert found is not None
    return all(abs(found.seconds(n) / true.seconds(n) - 1) < share for n in (1 << 16, 1 << 20, 1 << 24))


def test_a_link_is_learned_from_moves_of_many_sizes_with_noise() -> None:
    noise = np.random.default_rng(3).normal(1.0, 0.05, 300)
    estimate = LinkEstimate()
    assert estimate.cost is None
    for size, share in zip(moves(300), noise, strict=True):
        estimate.moved(size, LINK.seconds(size) * share)
    assert near(estimate.cost, LINK)


def test_moves_of_one_size_tell_what_that_size_takes() -> None:
    estimate = LinkEstimate()
    for _ in range(10):
        estimate.moved(1 << 20, 5e-3)
    assert estimate.cost is not None
    assert estimate.cost.seconds(1 << 20) == pytest.approx(5e-3, rel=1e-3)


def test_one_move_that_is_far_off_changes_nothing_and_two_in_a_row_are_believed() -> None:
    estimate = LinkEstimate(LINK)
    for size in moves(20):
        estimate.moved(size, LINK.seconds(size))
    before = estimate.cost
    estimate.moved(1 << 20, 100 * LINK.seconds(1 << 20))
    assert estimate.cost == before
    estimate.moved(1 << 20, LINK.seconds(1 << 20))
    estimate.moved(1 << 20, 100 * LINK.seconds(1 << 20))
    assert near(estimate.cost, LINK)
    slow = LinkCost(100 * LINK.seconds_per_call, 100 * LINK.seconds_per_byte)
    estimate.moved(1 << 18, slow.seconds(1 << 18))
    assert near(estimate.cost, slow)


def test_a_link_that_recovers_is_known_for_it_after_two_moves() -> None:
    slow = LinkCost(100 * LINK.seconds_per_call, 100 * LINK.seconds_per_byte)
    estimate = LinkEstimate(slow)
    for size in (1 << 20, 1 << 22):
        estimate.moved(size, LINK.seconds(size))
    assert near(estimate.cost, LINK)


def test_a_calibrated_link_costs_what_was_calibrated_until_moves_say_otherwise() -> None:
    estimate = LinkEstimate(LINK)
    assert estimate.cost == LINK
    twice = LinkCost(2 * LINK.seconds_per_call, 2 * LINK.seconds_per_byte)
    for size in moves(200):
        estimate.moved(size, twice.seconds(size))
    assert near(estimate.cost, twice)


def test_prefilling_is_learned_from_chunks_at_many_depths() -> None:
    random = np.random.default_rng(5)
    estimate = ComputeEstimate(step_tokens=512)
    for number in range(200):
        start, count = int(random.integers(0, 8000)), int(random.integers(16, 512))
        seconds = COMPUTE.seconds(start, start + count) * random.normal(1.0, 0.05)
        estimate.computed(count, count * (2 * start + count) / 2, seconds)
        assert (estimate.cost is None) == (number < 3)
    assert estimate.cost is not None
    for start, end in ((0, 4096), (0, 64), (8000, 8512)):
        assert estimate.cost.seconds(start, end) == pytest.approx(COMPUTE.seconds(start, end), rel=0.08)


def test_steps_of_a_few_tokens_tell_nothing_of_prefilling() -> None:
    estimate = ComputeEstimate()
    for _ in range(20):
        estimate.computed(3, 6.0, 1.0)
    assert estimate.cost is None


def test_an_estimate_is_cheap_to_refine() -> None:
    estimate = ComputeEstimate()
    best = 1.0
    for _ in range(5):
        began = time.perf_counter()
        for number in range(100):
            estimate.computed(100 + number, 1e4 + number, 0.01)
        best = min(best, (time.perf_counter() - began) / 100)
    assert best < 200e-6


def test_links_that_nobody_measured_cost_nothing_and_one_stands_for_the_other() -> None:
    estimates = CostEstimates(16, 4096)
    assert estimates.model == CostModel(16, 4096, None, LinkCost(0.0, 0.0), LinkCost(0.0, 0.0))
    estimates.copy.moved(1 << 20, 1e-3)
    assert estimates.model.in_place == estimates.model.copy
    calibrated = CostModel(16, 4096, COMPUTE, LINK, LinkCost(0.0, 2e-9), LinkCost(1e-3, 1e-8))
    model = CostEstimates(16, 4096, calibrated, step_tokens=512).model
    assert (model.in_place, model.copy, model.cold) == (LINK, calibrated.copy, calibrated.cold)
    assert model.compute is not None
    assert model.compute.seconds(0, 4096) == pytest.approx(COMPUTE.seconds(0, 4096), rel=1e-3)
