"""What holds of every eviction policy, whatever it ranks by."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kvpager.kvstore.cost_policy import CostPolicy
from kvpager.kvstore.policy import BlockFacts, PolicyMaker, Retention, Weight, check_weights, make_policy
from kvpager.kvstore.s3fifo_policy import S3FIFOPolicy
from kvpager.tests.tier_machine import Tier, ids
from kvpager.tiers.errors import ConfigError, IntegrityError

CAPACITY = 24
POLICIES = ("cost", "lru", "s3fifo")


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def names_of(chain: int, length: int, branch: int = 0) -> list[int]:
    """The names of a chain's blocks; those of a branch differ from the third one on."""
    return [1 + chain * 1000 + at + (branch * 100 if at > 1 else 0) for at in range(length)]


chain = st.builds(names_of, st.integers(0, 7), st.integers(1, 12), st.integers(0, 2))
act = st.one_of(
    st.tuples(st.just("request"), chain),
    st.tuples(st.just("request"), chain),
    st.tuples(st.just("hold"), chain),
    st.tuples(st.just("let go"), st.just([])),
    st.tuples(st.just("purge"), chain),
    st.tuples(st.just("demote"), chain),
    st.tuples(st.just("retain"), chain),
    st.tuples(st.just("wait"), chain),
)


def play(name: str, acts: list[tuple[str, list[int]]], *, check: bool = True) -> Tier:
    clock = Clock()
    tier = Tier(make_policy(name, CAPACITY, clock=clock, seed=7), CAPACITY, check=check)
    running: list[list[int]] = []
    for what, chain in acts:
        clock.now += 1.0
        used = {one for blocks in running for one in blocks}
        if what == "request":
            tier.request(chain)
        elif what == "hold":
            running.append(tier.start(chain))
        elif what == "let go" and running:
            tier.drop(running.pop(0))
        elif what == "purge":
            tier.purge([one for one in chain[len(chain) // 2 :] if tier.held.get(one) not in used])
        elif what == "demote" and name != "lru":
            # `lru` does as it is told, also where that strands what follows.
            tier.demote(chain)
        elif what == "retain" and tier.policy.learns:
            known = [tier.held[one] for one in chain if one in tier.held]
            tier.policy.retain(ids(known), Retention(priority=len(chain) - 6, ttl=5.0, will_return=2.0))
        elif what == "wait":
            clock.now += 500.0
    return tier


@pytest.mark.parametrize("name", POLICIES)
@given(acts=st.lists(act, max_size=50))
@example(  # what is purged after a look at all that may go was no victim of it
    acts=[
        ("request", [1, 2]),
        ("purge", [1]),
        ("request", [1, 2]),
        ("request", names_of(1, 12)),
        ("request", names_of(2, 12)),
        ("request", names_of(3, 12)),
    ]
)
@settings(max_examples=80, deadline=None)
def test_nothing_in_use_goes_leaves_go_before_roots_and_the_books_agree(
    name: str, acts: list[tuple[str, list[int]]]
) -> None:
    tier = play(name, acts)
    again = play(name, acts, check=False)
    assert again.victims == tier.victims
    assert again.hits == tier.hits


@pytest.mark.parametrize("name", ["cost", "lru"])
@given(
    requests=st.lists(
        st.tuples(st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True), st.booleans()),
        max_size=30,
    )
)
@settings(max_examples=40, deadline=None)
def test_blocks_whose_names_begin_alike_are_each_ranked_once(
    name: str, requests: list[tuple[list[int], bool]]
) -> None:
    """Twelve blocks of three names, one of which is that of none, in a tier of eight."""
    clock = Clock()
    policy = make_policy(name, 8, clock=clock)
    held: dict[int, int] = {}
    free = list(range(8))

    def facts(blocks: list[int]) -> BlockFacts:
        names = np.array([block % 3 for block in blocks], np.uint64)
        return BlockFacts(names, np.array([0, *names[:-1]], np.uint64), np.arange(len(names), dtype=np.int32))

    for blocks, purge in requests:
        clock.now += 1.0
        count = next((at for at, block in enumerate(blocks) if block not in held), len(blocks))
        found, rest = blocks[:count], [block for block in blocks[count:] if block not in held]
        if found:
            policy.found(ids([held[block] for block in found]))
        policy.missed(facts(blocks[count:]))
        policy.remove(ids([held[block] for block in found]))
        if rest:
            gone = policy.evict(len(rest) - len(free)).tolist() if len(rest) > len(free) else []
            held = {block: one for block, one in held.items() if one not in gone}
            free += gone
            new = [free.pop() for _ in rest]
            policy.admit(ids(new), facts(rest))
            held.update(zip(rest, new, strict=True))
        policy.insert(ids([held[block] for block in (found + rest)[::-1]]))
        if purge and blocks[-1] in held:
            policy.forget(ids([held[blocks[-1]]]))
            free.append(held.pop(blocks[-1]))
        policy.check_integrity()
        assert sorted(policy.coldest(9).tolist()) == sorted(held.values())


@pytest.mark.parametrize("name", POLICIES)
def test_a_root_goes_after_blocks_that_came_to_it_later(name: str) -> None:
    tier = Tier(make_policy(name, 12), 12)
    tier.request(names_of(0, 4))
    tier.request(names_of(1, 4))
    tier.request(names_of(0, 8))
    tier.request(names_of(2, 6))
    tier.request(names_of(3, 12))
    first = [name for name in tier.victims if name in names_of(0, 8)]
    assert first == sorted(first, reverse=True)


@pytest.mark.parametrize("name", POLICIES)
def test_where_all_that_may_go_is_followed_by_what_is_in_use_it_goes_all_the_same(name: str) -> None:
    policy = make_policy(name, 4)
    chain = names_of(0, 4)
    facts = BlockFacts(
        np.array(chain, np.uint64), np.array([0, *chain[:-1]], np.uint64), np.arange(1, 5, dtype=np.int32)
    )
    policy.admit(ids(range(4)), facts)
    policy.insert(ids([2, 1, 0]))
    policy.check_integrity()
    expected = policy.coldest(9).tolist()
    assert sorted(expected) == [0, 1, 2]
    assert policy.evict(2).tolist() == expected[:2]
    policy.insert(ids([3]))
    policy.check_integrity()
    assert sorted(policy.evict(9).tolist()) == sorted([expected[2], 3])
    policy.check_integrity()


@pytest.mark.parametrize("name", POLICIES)
def test_ids_come_as_a_tier_grows(name: str) -> None:
    policy = make_policy(name, 0)
    policy.resize(4)
    tier = Tier(policy, 4)
    for at in range(8):
        tier.request(names_of(at, 3))
    policy.resize(4096)
    policy.check_integrity()
    assert len(policy) == 4


# s3fifo


def test_a_scan_takes_no_place_of_what_was_found_often_under_s3fifo() -> None:
    chats = [names_of(at, 10) for at in range(4)]
    found = {}
    for name in ("lru", "s3fifo"):
        tier = Tier(make_policy(name, 60), 60, check=False)
        for _ in range(4):
            for chat in chats:
                tier.request(chat)
        for at in range(100, 130):
            tier.request(names_of(at, 12))
        found[name] = sum(tier.request(chat) for chat in chats)
    assert found == {"lru": 0, "s3fifo": 40}


def test_what_comes_back_soon_after_it_went_is_for_the_main_queue() -> None:
    tier = Tier(make_policy("s3fifo", 40), 40, check=False)
    tier.request(names_of(0, 10))
    for at in range(1, 5):
        tier.request(names_of(at, 10))
    assert tier.request(names_of(0, 10)) == 0
    for at in range(5, 20):
        tier.request(names_of(at, 10))
    assert tier.request(names_of(0, 10)) == 10


def test_a_name_is_not_remembered_for_ever() -> None:
    tier = Tier(make_policy("s3fifo", 40), 40, check=False)
    tier.request(names_of(0, 10))
    for at in range(1, 30):
        tier.request(names_of(at, 10))
    tier.request(names_of(0, 10))
    for at in range(30, 40):
        tier.request(names_of(at, 10))
    assert tier.request(names_of(0, 10)) == 0


def test_advice_counts_as_uses_under_s3fifo() -> None:
    tier = Tier(make_policy("s3fifo", 40), 40, check=False)
    for at in (0, 1):
        tier.request(names_of(at, 10))
    tier.policy.retain(ids(tier.held[one] for one in names_of(0, 10)), Retention(will_return=60.0))
    for at in range(2, 20):
        tier.request(names_of(at, 10))
    assert [tier.request(names_of(at, 10)) for at in (0, 1)] == [10, 0]


def test_s3fifo_says_so_when_its_books_disagree() -> None:
    for break_it in (
        lambda policy: policy._place.__setitem__(1, 0),
        lambda policy: policy._state.__setitem__(0, 8),
        lambda policy: policy._state.__setitem__(0, 4),
        lambda policy: policy._chains.followers.__setitem__(2, 1),
    ):
        policy = make_policy("s3fifo", 4)
        names = np.arange(1, 4, dtype=np.uint64)
        policy.admit(ids(range(3)), BlockFacts(names, np.zeros_like(names), np.ones(3, np.int32)))
        policy.insert(ids(range(3)))
        policy.check_integrity()
        break_it(policy)  # type: ignore[no-untyped-call]
        with pytest.raises(IntegrityError):
            policy.check_integrity()


# Weights and advice


def test_weights_are_the_policys_own_and_are_looked_at() -> None:
    assert check_weights("s3fifo", {"small_share": 1}) == {"small_share": 1.0}
    assert check_weights("lru", None) == {}
    for wrong, problem in (
        ({"small": 0.5}, r"policy_weights: 's3fifo' has no weight 'small'; these are: small_share, "),
        ({"small_share": 0}, "policy_weights.small_share"),
        ({"small_share": "much"}, "policy_weights.small_share"),
        ({"promote_uses": 4}, "policy_weights.promote_uses"),
        ({"small_share": 1e308}, "policy_weights.small_share: must be a number of at most 1, "),
        ([0.5], "policy_weights: must be a mapping"),
    ):
        with pytest.raises(ConfigError, match=problem):
            make_policy("s3fifo", 4, weights=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="it has none"):
        make_policy("lru", 4, weights={"small_share": 0.5})


@pytest.mark.parametrize(
    "wrong",
    [{"priority": 0}, {"prior": 0}, {"lindy": 0.0}, {"finish": 0}, {"late": -1}, {"return_trust": 1.5}],
)
def test_what_the_cost_policy_divides_by_is_never_zero(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"policy_weights.{next(iter(wrong))}"):
        make_policy("cost", 4, weights=wrong)
    with pytest.raises(ConfigError, match="policy_weights"):
        make_policy("cost", 4, weights=dict.fromkeys(wrong, 1e308))


@pytest.mark.parametrize("name", ["cost", "s3fifo"])
@pytest.mark.parametrize("end", ["least", "most"])
def test_a_policy_ranks_with_its_weights_at_their_bounds(name: str, end: str) -> None:
    makers: dict[str, PolicyMaker] = {"cost": CostPolicy, "s3fifo": S3FIFOPolicy}
    known = makers[name].known_weights
    for weights in (
        *({one: _at(weight, end)} for one, weight in known.items()),
        {one: _at(weight, end) for one, weight in known.items()},
    ):
        clock = Clock()
        tier = Tier(make_policy(name, CAPACITY, clock=clock, weights=weights), CAPACITY, check=False)
        advice = [
            Retention(priority=100, about_to_finish=True),
            Retention(priority=-100),
            Retention(will_return=0.0),
            Retention(priority=100, will_return=1e6),
        ]
        with np.errstate(all="raise", under="ignore"):
            for turn in range(32):
                clock.now += (0.0, 1.0, 1e4)[turn % 3]
                asked = names_of(turn % 7, 2 + turn % 5, turn % 2)
                tier.request(asked)
                tier.policy.retain(ids(tier.held[one] for one in asked if one in tier.held), advice[turn % 4])
        tier.policy.check_integrity()
        assert len(tier.policy) == CAPACITY


def _at(weight: Weight, end: str) -> float:
    return weight.least + 1e-9 * weight.above if end == "least" else weight.most


@pytest.mark.parametrize(
    ("wrong", "setting"),
    [
        ({"priority": 101}, "priority"),
        ({"priority": 0.5}, "priority"),
        ({"ttl": 0}, "ttl"),
        ({"will_return": -1}, "will_return"),
        ({"about_to_finish": 1}, "about_to_finish"),
    ],
)
def test_advice_that_is_none_is_refused(wrong: dict[str, float], setting: str) -> None:
    with pytest.raises(ConfigError, match=setting):
        Retention(**wrong)  # type: ignore[arg-type]
