from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.lru_policy import LRUPolicy
from kvpager.kvstore.policy import make_policy, policy_names
from kvpager.tests.backwards import Backwards
from kvpager.tests.installed_policy import install_policy
from kvpager.tests.raw_client import LAYOUT
from kvpager.tiers.errors import ConfigError, IntegrityError


def ids(*numbers: int) -> npt.NDArray[np.int32]:
    return np.array(numbers, dtype=np.int32)


batch = st.lists(st.integers(0, 19), unique=True, max_size=12)
operation = st.one_of(
    st.tuples(st.just("insert"), batch),
    st.tuples(st.just("remove"), batch),
    st.tuples(st.just("demote"), batch),
    st.tuples(st.just("coldest"), st.integers(0, 25)),
    st.tuples(st.just("evict"), st.integers(0, 25)),
)


@given(operations=st.lists(operation, max_size=60), capacity=st.sampled_from((0, 20)))
@settings(max_examples=150, deadline=None)
def test_lru_does_what_an_ordered_dictionary_does(
    operations: list[tuple[str, list[int] | int]], capacity: int
) -> None:
    policy = LRUPolicy(capacity)
    policy.resize(20)
    model: OrderedDict[int, None] = OrderedDict()
    for name, argument in operations:
        if isinstance(argument, list):
            if name == "demote":
                there = [one for one in argument if one in model]
                assert policy.demote(ids(*argument)) == len(there)
                for one in reversed(there):
                    model.move_to_end(one, last=False)
                policy.check_integrity()
                continue
            getattr(policy, name)(ids(*argument))
            for one in argument:
                model.pop(one, None)
                if name == "insert":
                    model[one] = None
        else:
            expected = list(model)[:argument]
            assert getattr(policy, name)(argument).tolist() == expected
            if name == "evict":
                for one in expected:
                    del model[one]
        policy.check_integrity()
        assert len(policy) == len(model)
    assert policy.evict(100).tolist() == list(model)


def test_what_is_used_again_goes_last() -> None:
    policy = LRUPolicy(4)
    policy.insert(ids(0, 1, 2, 3))
    policy.insert(ids(1))
    policy.remove(ids(2))
    assert policy.coldest(9).tolist() == [0, 3, 1]
    assert policy.evict(2).tolist() == [0, 3]
    assert policy.evict(2).tolist() == [1]
    assert policy.evict(2).tolist() == []


def test_many_touches_leave_the_log_short() -> None:
    policy = LRUPolicy(256)
    policy.insert(np.arange(256, dtype=np.int32))
    rng = np.random.default_rng(0)
    for _ in range(2000):
        policy.insert(rng.permutation(256)[:32].astype(np.int32))
    assert len(policy._log) <= 8 * 256
    policy.check_integrity()


def test_looking_at_the_coldest_passes_what_was_superseded_only_once() -> None:
    policy = LRUPolicy(10_000)
    policy.insert(np.arange(10_000, dtype=np.int32))
    policy.insert(np.arange(1, 10_000, dtype=np.int32))
    assert policy.coldest(3).tolist() == [0, 1, 2]
    assert policy._place[:3].tolist() == [policy._head + 1, policy._head + 2, policy._head + 3]
    policy.check_integrity()
    assert policy.coldest(10_000).tolist() == list(range(10_000))


def test_lru_says_so_when_its_books_disagree() -> None:
    policy = LRUPolicy(4)
    policy.insert(ids(0, 1))
    policy._count = 3
    with pytest.raises(IntegrityError, match="lru"):
        policy.check_integrity()
    with pytest.raises(IntegrityError, match="lru"):
        policy.evict(3)


def test_policies_are_made_by_name_and_an_unknown_one_is_named() -> None:
    assert isinstance(make_policy("lru", 4), LRUPolicy)
    with pytest.raises(ConfigError, match=r"policy: must be one of .*lru.*, got 'mru'"):
        make_policy("mru", 4)


def test_a_policy_of_another_distribution_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "backwards" not in policy_names()
    install_policy(monkeypatch, tmp_path / "one", "backwards", "kvpager.tests.backwards:Backwards")
    install_policy(monkeypatch, tmp_path / "two", "gone", "kvpager.tests.no_such_module:Backwards")
    install_policy(monkeypatch, tmp_path / "three", "lru", "kvpager.tests.backwards:Backwards")
    assert {"backwards", "gone", "lru"} <= set(policy_names())
    policy = make_policy("backwards", 4)
    assert isinstance(policy, Backwards)
    assert isinstance(make_policy("lru", 4), LRUPolicy)
    with pytest.raises(ConfigError, match=r"policy: 'gone' leads to kvpager.tests.no_such_module:Backwards"):
        make_policy("gone", 4)
    for name, leads_to, problem in (
        ("unweighed", "collections:OrderedDict", "which makes no policies: it must be a class whose"),
        ("numbers", "kvpager.tests.installed_policy:Unbounded", "`known_weights` map names to a Weight each"),
    ):
        install_policy(monkeypatch, tmp_path / name, name, leads_to)
        with pytest.raises(ConfigError, match=f"policy: '{name}' leads to {leads_to}, .*{problem}"):
            make_policy(name, 4)
        with pytest.raises(ConfigError, match=f"policy: '{name}' leads to"):
            HostStore(1 << 20, policy=name)
    with HostStore(1 << 20, policy="backwards") as host:
        space = host.space(LAYOUT)
        hashes = [bytes([n]) * 16 for n in range(1, 9)]
        assert space.put(hashes, np.ones((8, LAYOUT.block_bytes), np.uint8)) == 8
        space.match(hashes[:3]).release()
        assert space.evict(2) == 2
        host.check_integrity()
