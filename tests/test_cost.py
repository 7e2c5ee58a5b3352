from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpager.kvstore.cost import ComputeCost, CostModel, LinkCost, Run, Tier
from kvpager.tiers.errors import ConfigError

BLOCK = 16
BYTES = 1 << 20
FREE = LinkCost(0.0, 0.0)
COMPUTE = ComputeCost(1e-3, 1e-4, 1e-8)


def model(
    compute: ComputeCost | None = COMPUTE, cold: LinkCost | None = None, host: LinkCost = FREE
) -> CostModel:
    return CostModel(BLOCK, BYTES, compute, host, host, cold)


def test_a_link_costs_a_call_and_its_bytes_and_nothing_where_nothing_moves() -> None:
    link = LinkCost(0.5, 0.25)
    assert link.seconds(4) == 1.5
    assert link.seconds(4, calls=3) == 2.5
    assert link.seconds(0) == 0.0


def test_computing_in_two_parts_costs_what_it_costs_at_once_but_for_a_step_more() -> None:
    cost = ComputeCost(0.5, 0.25, 0.125)
    assert cost.seconds(0, 8) == 0.5 + 8 * 0.25 + 32 * 0.125
    assert cost.seconds(0, 3) + cost.seconds(3, 8) == cost.seconds(0, 8) + 0.5
    assert cost.seconds(8, 8) == 0.0
    assert ComputeCost(0.5, 0.25, 0.125, step_tokens=3).seconds(0, 8) == cost.seconds(0, 8) + 2 * 0.5


def test_a_deeper_block_costs_more_to_compute_again() -> None:
    depths = np.array([1, 2, 100, 0], dtype=np.int32)
    seconds = COMPUTE.block_seconds(depths, BLOCK)
    by_hand = [COMPUTE.seconds((depth - 1) * BLOCK, depth * BLOCK) - 1e-3 for depth in (1, 2, 100, 1)]
    assert seconds == pytest.approx(by_hand)
    assert seconds[0] < seconds[1] < seconds[2]


def test_a_block_is_brought_up_by_the_faster_way_and_from_the_cold_tier_through_host_memory() -> None:
    costs = CostModel(BLOCK, BYTES, None, LinkCost(0.0, 2e-9), LinkCost(1e-3, 1e-9), LinkCost(1.0, 1e-8))
    assert costs.load_seconds(Tier.DEVICE, 5) == 0.0
    assert costs.load_seconds(Tier.HOST, 1000) == 1e-3 + 1000 * BYTES * 1e-9
    assert costs.load_seconds(Tier.HOST, 0) == 0.0
    few = costs.load_seconds(Tier.HOST, 1)
    assert few == pytest.approx(1e-3 + BYTES * 1e-9)
    assert few is not None
    assert costs.load_seconds(Tier.COLD, 1) == pytest.approx(1.0 + BYTES * 1e-8 + few)
    assert costs.load_seconds(Tier.NONE, 1) is None
    assert model().load_seconds(Tier.COLD, 1) is None


def test_losing_a_block_costs_the_sooner_of_loading_and_computing_it_again() -> None:
    costs = model(cold=LinkCost(1.0, 4e-9), host=LinkCost(0.0, 1e-10))
    depths = np.array([1, 1, 1, 5000, 5000, 5000], dtype=np.int32)
    below = np.array([0, 1, 2] * 2, dtype=np.uint8)
    losses = costs.losses(depths, below)
    shallow, deep = COMPUTE.block_seconds(depths[2:4], BLOCK)
    up = 4.1e-9 * BYTES
    assert shallow < up < deep
    assert losses == pytest.approx([shallow, shallow, 1e-10 * BYTES, deep, up, 1e-10 * BYTES])


def test_losses_are_alike_where_the_compute_is_not_known() -> None:
    costs = model(compute=None, cold=LinkCost(1.0, 1.0))
    losses = costs.losses(np.array([1, 50], np.int32), np.array([0, 1], np.uint8))
    assert losses.tolist() == [1.0, 1.0]


def test_a_fast_cold_tier_is_loaded_to_the_end_and_a_slow_one_not_at_all() -> None:
    runs = [(Tier.DEVICE, 2), (Tier.HOST, 3), (Tier.COLD, 10)]
    tokens = 20 * BLOCK
    fast = model(cold=LinkCost(1e-4, 1e-11)).split(runs, tokens)
    assert (fast.load_blocks, fast.compute_from) == (15, 15 * BLOCK)
    slow = model(cold=LinkCost(1e-4, 1e-6)).split(runs, tokens)
    assert (slow.load_blocks, slow.compute_from, slow.seconds_load) == (5, 5 * BLOCK, 0.0)
    assert slow.seconds_no_cache == COMPUTE.seconds(0, tokens)
    assert slow.seconds_saved == COMPUTE.seconds(0, tokens) - COMPUTE.seconds(5 * BLOCK, tokens)


def test_a_cold_run_is_loaded_for_the_sake_of_what_lies_beyond_it() -> None:
    # Loading 4 blocks takes longer than computing them, but 500 more of host memory hang on them.
    cold = LinkCost(0.0, COMPUTE.seconds_per_token * BLOCK * 2 / BYTES)
    alone = model(cold=cold).split([(Tier.COLD, 4)], 520 * BLOCK)
    assert alone.load_blocks == 0
    split = model(cold=cold).split([(Tier.COLD, 4), (Tier.HOST, 500)], 520 * BLOCK)
    assert split.load_blocks == 504


def test_without_calibration_everything_is_taken() -> None:
    split = model(compute=None).split([(Tier.COLD, 4), (Tier.HOST, 2)], 6 * BLOCK)
    assert (split.load_blocks, split.compute_from) == (6, 6 * BLOCK - 1)
    assert split.seconds_compute is None
    assert split.seconds_no_cache is None
    assert split.seconds_saved is None
    # A cold tier that nobody has measured is tried.
    assert model().split([(Tier.COLD, 4)], 6 * BLOCK).load_blocks == 4


_COST = st.floats(0, 1e-2)
_RUNS = st.lists(
    st.tuples(st.sampled_from([Tier.DEVICE, Tier.HOST, Tier.COLD]), st.integers(0, 30)), max_size=5
)


@given(
    compute=st.builds(ComputeCost, _COST, st.floats(0, 1e-3), st.floats(0, 1e-6)),
    host=st.builds(LinkCost, _COST, st.floats(0, 1e-8)),
    cold=st.builds(LinkCost, _COST, st.floats(0, 1e-8)),
    runs=_RUNS,
    more=st.integers(1, 400),
)
def test_a_split_is_never_slower_than_no_cache_nor_than_any_other_split(
    compute: ComputeCost, host: LinkCost, cold: LinkCost, runs: list[Run], more: int
) -> None:
    costs = model(compute, cold, host)
    blocks = [tier for tier, count in runs for _ in range(count)]
    tokens = len(blocks) * BLOCK + more
    split = costs.split(runs, tokens)
    assert split.seconds_compute is not None
    assert split.seconds_no_cache is not None
    ends = split.seconds_load + split.seconds_compute
    for count in range(len(blocks) + 1):
        parts = [costs.load_seconds(tier, blocks[:count].count(tier)) for tier in Tier if tier in blocks]
        load = sum(part or 0.0 for part in parts)
        assert ends <= load + compute.seconds(count * BLOCK, tokens) + 1e-9


@pytest.mark.parametrize("compute", [COMPUTE, ComputeCost(1.0, 2.0, 3.0, 512), None])
def test_a_model_travels_as_a_map(compute: ComputeCost | None) -> None:
    costs = CostModel(BLOCK, BYTES, compute, LinkCost(1.0, 2.0), FREE, LinkCost(3.0, 4.0))
    assert CostModel.of_map(costs.as_map()) == costs
    assert CostModel.of_map({**costs.as_map(), "cold": None, "later": 5}).cold is None


@pytest.mark.parametrize("wrong", [{}, {"in_place": 5}, {"compute": (1.0,)}, {"cold": ("a", "b")}])
def test_what_is_no_map_of_costs_is_refused(wrong: dict[str, object]) -> None:
    values = model().as_map() | wrong if wrong else {}
    with pytest.raises(ConfigError):
        CostModel.of_map(values)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), "fast", None])
def test_a_cost_that_is_none_is_refused_by_name(wrong: object) -> None:
    with pytest.raises(ConfigError, match="seconds_per_byte"):
        LinkCost(0.0, wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="seconds_per_token_pair"):
        ComputeCost(0.0, 0.0, wrong)  # type: ignore[arg-type]


def test_runs_that_cannot_be_a_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match="runs"):
        model().split([(Tier.NONE, 1)], 100)
    with pytest.raises(ConfigError, match="runs"):
        model().split([(Tier.HOST, 7)], 6 * BLOCK)
    with pytest.raises(ConfigError, match="below"):
        model().losses(np.array([1], np.int32), np.array([], np.uint8))
