"""Who is put to sleep: the sequence whose sleep costs least against what it frees, with a few exceptions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from kvpager.engine.pace import Pace
from kvpager.engine.preemption import LEAST_STEPS, NEARLY_DONE, Candidates, advised_weight, cheapest_sleep
from kvpager.engine.turns import LEAST_STRETCH, Turns
from kvpager.kvstore.cost import ComputeCost, CostModel, LinkCost
from kvpager.kvstore.cost_estimates import CostEstimates
from kvpager.kvstore.policy import Retention

COST = CostModel(
    block_size=16,
    block_bytes=1 << 20,
    compute=ComputeCost(1e-3, 1e-5, 1e-9),
    in_place=LinkCost(5e-6, 1 / 51e9),
    copy=LinkCost(5e-6, 1 / 55e9),
)
UNKNOWN = CostEstimates(16, 1 << 20).model


class Running:
    """Sequences with the facts that a test is about; the rest is alike, and the first one came first."""

    def __init__(self, count: int, **facts: list[int] | list[float]) -> None:
        defaults = {
            "priorities": [0] * count,
            "lengths": [1600] * count,
            "blocks": [100] * count,
            "remaining": [200] * count,
            "steps": [1000] * count,
            "weights": [1] * count,
            "private": [100] * count,
        }
        arrays = {name: np.array(values, dtype=np.int64) for name, values in {**defaults, **facts}.items()}
        self._private = arrays.pop("private")
        weights = np.array(facts.get("weights", [1] * count), dtype=np.float64)
        del arrays["weights"]
        at = np.arange(count, dtype=np.int64)
        self.candidates = Candidates(rows=at, ids=at + 1, weights=weights, **arrays)
        self.looked_at = 0

    def victim(self, *, cost: CostModel = COST, below: bool = True) -> int:
        return cheapest_sleep(self.candidates, self._private_blocks, cost, below=below)

    def _private_blocks(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        self.looked_at = len(rows)
        blocks: npt.NDArray[np.int64] = self._private[rows]
        return blocks


def test_of_equals_the_youngest_goes() -> None:
    assert Running(5).victim() == 4


@pytest.mark.parametrize("cost", [COST, UNKNOWN], ids=["measured", "unknown"])
def test_who_has_most_tokens_to_go_frees_its_blocks_for_longest(cost: CostModel) -> None:
    assert Running(4, remaining=[50, 50, 200, 100]).victim(cost=cost) == 2


def test_who_shares_its_blocks_frees_little() -> None:
    assert Running(3, private=[100, 100, 2], blocks=[100, 100, 900]).victim() == 1
    # One call costs the same however little it brings back.
    assert Running(3, private=[2, 100, 2]).victim() == 1


def test_what_is_private_is_counted_for_one_and_for_a_few_more_only_where_that_may_change_who_goes() -> None:
    running = Running(1000)
    running.victim()
    assert running.looked_at == 1
    running = Running(1000, remaining=[*[200] * 999, 220], private=[*[100] * 999, 2])
    assert running.victim() != 999
    assert 1 < running.looked_at <= 8
    # Cheapest of all also with half of its blocks.
    running = Running(1000, remaining=[*[50] * 999, 220], private=[*[100] * 999, 50])
    assert running.victim() == 999
    assert running.looked_at == 1


def test_who_is_about_to_finish_stays_while_another_may_go() -> None:
    done = NEARLY_DONE
    assert Running(3, remaining=[500, done, done]).victim() == 0
    assert Running(3, remaining=[done, done, done + 1], priorities=[0, 0, 9]).victim() == 2
    assert Running(3, remaining=[500, done, done], steps=[0, 1000, 1000]).victim() == 0
    assert Running(3, remaining=[1, 2, 3]).victim() == 2


def test_who_was_woken_stays_for_some_steps_unless_nobody_else_may_go() -> None:
    assert Running(4, steps=[1000, 1000, LEAST_STEPS, LEAST_STEPS - 1]).victim() == 2
    assert Running(3, steps=[0, 0, 0]).victim() == 2
    assert Running(2, steps=[1000, 0]).victim() == 1


def test_a_lower_priority_goes_first_whatever_it_costs() -> None:
    assert Running(4, priorities=[1, 0, 1, 1], private=[100, 3, 100, 100]).victim() == 1


def test_the_first_of_the_highest_priority_stays() -> None:
    assert Running(3, remaining=[900, 20, 20]).victim() != 0
    assert Running(3, priorities=[0, 1, 1], remaining=[20, 900, 20]).victim() == 0


def test_who_was_put_to_sleep_before_is_dearer_each_time() -> None:
    victims = []
    slept = [0, 0, 0, 0]
    for _ in range(6):
        victims.append(Running(4, weights=[advised_weight(one, None) for one in slept]).victim())
        slept[victims[-1]] += 1
    assert sorted(victims) == [1, 1, 2, 2, 3, 3]


def test_advice_of_a_priority_makes_sleep_twice_as_dear_or_cheap_for_each_ten() -> None:
    weights = [advised_weight(0, Retention(priority=priority)) for priority in (0, 10, -10, 25)]
    assert weights == pytest.approx([1.0, 2.0, 0.5, 2**2.5])
    assert advised_weight(3, Retention(priority=10)) == pytest.approx(2 * advised_weight(3, None))
    assert Running(4, weights=weights).victim() == 2
    # It is a price: who frees four times as much for as little goes all the same.
    assert Running(2, weights=[1.0, 2.0], remaining=[60, 240]).victim() == 1


def test_who_is_to_return_soon_is_dearer_than_who_returns_late_or_who_knows_when() -> None:
    soon, late, never = (advised_weight(0, Retention(will_return=after)) for after in (1.0, 3600.0, None))
    assert 2 >= soon > late > never == 1.0
    assert Running(3, weights=[soon, late, soon]).victim() == 1


def test_where_nothing_below_keeps_it_a_long_prompt_is_dear() -> None:
    # The attention over a long prompt costs more for each of its tokens.
    facts = {"lengths": [400, 400, 64_000], "blocks": [25, 25, 4000], "private": [25, 25, 4000]}
    far = Running(3, **facts)
    assert far.victim(below=True) == 2
    assert far.victim(below=False) == 1


def test_a_turn_is_over_when_bringing_the_sequence_back_is_a_small_share_of_it() -> None:
    pace = Pace(lambda: 0.0)
    pace.step_seconds = 1e-3
    turns = Turns(CostEstimates(16, 1 << 20, COST), pace)
    small, large = LEAST_STRETCH, int(4000 * (1 << 20) / 55e9 / 0.02 / 1e-3)
    assert large > 2 * small
    at = Running(
        4,
        blocks=[10, 10, 4000, 4000],
        steps=[small - 1, small, large - 10, large + 10],
    ).candidates
    assert turns.over(at, 0).tolist() == [False, True, False, True]
    assert turns.over(at, -1).tolist() == [False] * 4, "for a lower priority"
    last = Running(2, steps=[5000, 5000], remaining=[NEARLY_DONE, NEARLY_DONE + 1]).candidates
    assert turns.over(last, 0).tolist() == [False, True]
