"""The `cost` policy: what it learns, and that it keeps what is told to be worth keeping."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from kvpager.kvstore.cost_policy import CostPolicy
from kvpager.kvstore.policy import BlockFacts, EvictionPolicy, Losses, Retention, make_policy
from kvpager.kvstore.replay import TierChoice, replay
from kvpager.kvstore.return_times import ReturnTimes
from kvpager.kvstore.trace import Trace, TraceEvent

Request = tuple[float, list[int]]
"""When, and the numbers of its blocks."""


class Tier:
    """A tier without bytes: it tells its policy what a store tells, and checks what that does."""

    def __init__(
        self, name: str, capacity: int, *, seed: int = 7, check: bool = False, losses: Losses | None = None
    ) -> None:
        self.now = 0.0
        self.policy: EvictionPolicy = make_policy(
            name, capacity, clock=lambda: self.now, seed=seed, losses=losses
        )
        self._check = check
        self._free = list(range(capacity - 1, -1, -1))
        self.slots: dict[int, int] = {}
        self._blocks: dict[int, int] = {}
        self.gone: list[int] = []
        self.asked = self.hits = 0

    def request(self, now: float, blocks: list[int]) -> int:
        self.now = now
        policy = self.policy
        number = len(blocks)
        found = next((at for at, block in enumerate(blocks) if block not in self.slots), number)
        self.asked += number
        self.hits += found
        names = (np.array(blocks, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        parents = np.concatenate([[np.uint64(0)], names[:-1]])
        depths = np.arange(1, number + 1, dtype=np.int32)
        if policy.learns:
            policy.found(self._ids(blocks[:found]))
            if found < number:
                policy.missed(BlockFacts(names[found:], parents[found:], depths[found:]))
        here = self._ids([block for block in blocks if block in self.slots])
        policy.remove(here)
        new = np.array([at for at, block in enumerate(blocks) if block not in self.slots], dtype=np.intp)
        if policy.learns and len(new) > len(self._free):
            facts = BlockFacts(names[new], parents[new], depths[new])
            new = new[policy.wanted(facts, len(self._free))]
        for slot in policy.evict(max(0, len(new) - len(self._free))).tolist():
            block = self._blocks.pop(slot)
            del self.slots[block]
            self._free.append(slot)
            self.gone.append(block)
        new = new[: len(self._free)]
        ids = np.array([self._free.pop() for _ in new], dtype=np.int32)
        for at, slot in zip(new.tolist(), ids.tolist(), strict=True):
            self.slots[blocks[at]], self._blocks[slot] = slot, blocks[at]
        if policy.learns and len(new):
            policy.admit(ids, BlockFacts(names[new], parents[new], depths[new]))
        policy.insert(ids[::-1])
        policy.insert(here[::-1])
        if self._check:
            policy.check_integrity()
        return found

    def retain(self, blocks: list[int], retention: Retention) -> None:
        self.policy.retain(self._ids(blocks), retention)

    def _ids(self, blocks: list[int]) -> npt.NDArray[np.int32]:
        return np.array([self.slots[block] for block in blocks], dtype=np.int32)

    def replay(self, requests: list[Request]) -> float:
        for now, blocks in requests:
            self.request(now, blocks)
        return self.hits / self.asked


def chats(seed: int, seconds: float = 3000.0) -> list[Request]:
    """Chats behind one system prompt, whose turns come after a minute or so, and prompts sent once."""
    random = np.random.default_rng(seed)
    requests: list[Request] = []
    fresh = iter(range(1, 10_000_000))
    for start in np.cumsum(random.exponential(1.5, int(seconds / 1.5))).tolist():
        if random.random() < 0.5:
            requests.append((start, [0, *(next(fresh) for _ in range(int(random.integers(4, 40))))]))
            continue
        blocks, now = [0], start
        for _ in range(int(random.geometric(0.25))):
            blocks = [*blocks, *(next(fresh) for _ in range(int(random.integers(1, 5))))]
            requests.append((now, blocks))
            now += float(random.lognormal(np.log(60.0), 0.5))
    return sorted(requests)


def chain(number: int, length: int) -> list[int]:
    return [number * 1000 + at for at in range(length)]


def conversation_trace() -> list[Request]:
    folder = os.environ.get("KVPAGER_TRACES")
    where = Path(folder) if folder else Path(__file__).resolve().parents[2] / "shared" / "traces"
    path = where / "mooncake_conversation.jsonl"
    if not path.is_file():
        pytest.skip("no mooncake_conversation.jsonl: set KVPAGER_TRACES to the folder that has it")
    with path.open() as lines:
        rows = [json.loads(line) for line in lines]
    return [(row["timestamp"] / 1000, row["hash_ids"]) for row in rows]


@pytest.mark.parametrize("capacity", [300, 1000])
def test_chats_are_kept_before_what_is_sent_once(capacity: int) -> None:
    requests = chats(3)
    ratio = {name: Tier(name, capacity).replay(requests) for name in ("cost", "lru", "s3fifo")}
    assert ratio["cost"] > 1.1 * max(ratio["lru"], ratio["s3fifo"])


def chats_and_scan(documents: int, blocks: int, seed: int) -> tuple[Trace, list[int]]:
    """Eight chats whose users think for a minute or so, and between two turns documents that are read once.

    Returns:
        the trace, and which events are the chats' turns after the documents.
    """
    random = np.random.default_rng(seed)
    events: list[tuple[float, str, int]] = []
    for chat in range(8):
        thought = 60.0 * np.exp(random.normal(0, 0.4, 4))
        turns = 7.0 * chat + np.cumsum(thought)
        events += [(float(time), f"chat {chat}", 6 * (turn + 1)) for turn, time in enumerate(turns)]
    scanned = max(events)[0] + 5.0
    events += [(scanned + at / 2, f"document {at}", blocks) for at in range(documents)]
    after = scanned + documents / 2
    back = [(after + random.uniform(5.0, 40.0), f"chat {chat}", 24) for chat in range(8)]
    events = sorted(events + back)
    trace = Trace.of_events(
        (TraceEvent(time, chain_names(who, count), count, count, count) for time, who, count in events), 1
    )
    return trace, [at for at, event in enumerate(events) if event in back]


def chain_names(who: str, count: int) -> npt.NDArray[np.uint64]:
    digests = [hashlib.blake2b(f"{who} {at}".encode(), digest_size=8).digest() for at in range(count)]
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


@pytest.mark.parametrize(("documents", "blocks", "least"), [(16, 32, 0.6), (1, 512, 0.35)])
def test_documents_that_are_read_once_do_not_flush_the_chats(
    documents: int, blocks: int, least: float
) -> None:
    kept = dict.fromkeys(("lru", "s3fifo", "cost"), 0)
    for seed in range(3):
        trace, back = chats_and_scan(documents, blocks, seed)
        for policy in kept:
            kept[policy] += int(replay(trace, TierChoice(policy, 256)).blocks[back].sum())
    everything = 3 * 8 * 24
    assert kept["lru"] == 0
    assert kept["cost"] > max(least * everything, kept["s3fifo"])


def test_the_same_seed_gives_the_same_victims_and_the_books_agree() -> None:
    requests = chats(4, 400.0)
    first, second = Tier("cost", 150, check=True), Tier("cost", 150)
    assert first.replay(requests) == second.replay(requests)
    assert first.gone == second.gone


@pytest.mark.parametrize(
    ("capacity", "least"), [(1000, 0.0708), (3000, 0.1234), (10_000, 0.233), (100_000, 0.362)]
)
def test_on_the_conversation_trace_it_finds_what_it_is_known_to_find(capacity: int, least: float) -> None:
    assert Tier("cost", capacity).replay(conversation_trace()) >= least


@pytest.fixture
def learned() -> Tier:
    """A tier that has seen chats."""
    tier = Tier("cost", 300)
    tier.replay(chats(5, 600.0))
    return tier


def test_nothing_stays_for_ever(learned: Tier) -> None:
    now = learned.now
    for turn in range(1, 8):
        learned.request(now + 60.0 * turn, chain(90_001, 2 * turn))
    assert learned.request(now + 480.0, chain(90_001, 14)) == 14
    for at in range(200):
        learned.request(now + 600.0 + 600.0 * at, chain(91_000 + at, 12))
    assert not set(chain(90_001, 14)) & set(learned.slots)


@pytest.mark.parametrize(
    "advice",
    [Retention(priority=100), Retention(about_to_finish=True, priority=50), Retention(will_return=20.0)],
)
def test_advice_keeps_blocks_while_it_holds(advice: Retention) -> None:
    kept = {}
    for hinted in (False, True):
        tier = Tier("cost", 60, check=True)
        tier.request(0.0, chain(1, 10))
        if hinted:
            tier.retain(chain(1, 10), advice)
        for at in range(12):
            tier.request(1.0 + at, chain(10 + at, 8))
        kept[hinted] = len(set(chain(1, 10)) & set(tier.slots))
    assert kept[True] == 10 > kept[False]


def test_a_low_priority_goes_first() -> None:
    tier = Tier("cost", 30, check=True)
    for number in (1, 2, 3):
        tier.request(float(number), chain(number, 10))
    tier.retain(chain(3, 10), Retention(priority=-100))
    tier.request(4.0, chain(4, 10))
    assert set(tier.gone) == set(chain(3, 10))


def test_what_is_dear_to_lose_stays() -> None:
    def losses(ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        return np.where(ids < 10, 1.0, 1e-3)

    tier = Tier("cost", 30, check=True, losses=losses)
    for number in (1, 2, 3):
        tier.request(float(number), chain(number, 10))
    tier.request(4.0, chain(4, 10))
    tier.request(5.0, chain(5, 10))
    assert set(chain(1, 10)) <= set(tier.slots)


def test_a_place_is_worth_most_when_who_thinks_is_about_to_be_back() -> None:
    times = ReturnTimes([np.zeros(2, dtype=np.intp), np.arange(2)], 4.0, np.full(2, 0.1))
    for at in range(400):
        now = 10.0 * at
        times.used(now, at % 2, 1.0)
        if at >= 6 and at % 2 == 0:
            # Kind 0 comes back after a minute, kind 1 never does.
            times.returned(now, now - 60.0, 0, 1.0)
    times.fit(4000.0)
    ages = np.array([1.0, 45.0, 2000.0])
    back, never = (times.index(np.full(3, kind), ages) for kind in (0, 1))
    assert back[1] > back[0] > back[2]
    assert (back[:2] > 5 * never[:2]).all()


def test_a_conversation_that_was_evicted_is_known_when_it_comes_back() -> None:
    tier = Tier("cost", 40, check=True)
    for turn in range(1, 5):
        tier.request(100.0 * turn, chain(1, 4 * turn))
        for at in range(5):
            tier.request(100.0 * turn + at + 1, chain(100 * turn + at, 20))
    policy = tier.policy
    assert isinstance(policy, CostPolicy)
    tier.request(500.0, chain(1, 20))
    run = policy._runs.standing[tier.slots[chain(1, 20)[0]]] >> 1
    assert policy._runs.use(run).turns == 4


def facts_of(chains: int, length: int, *, placed: bool) -> BlockFacts:
    """Facts of chains one after the other, or of the same blocks where nobody knows their places."""
    number = chains * length
    names = (np.arange(number, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    depths = np.tile(np.arange(1, length + 1, dtype=np.int32), chains)
    parents = np.where(depths > 1, np.roll(names, 1), np.uint64(0))
    return BlockFacts(names, parents * np.uint64(placed), depths * np.int32(placed))


def test_many_chains_that_come_at_once_go_in_the_order_in_which_they_were_inserted() -> None:
    policy = CostPolicy(400, clock=lambda: 0.0)
    ids = np.arange(400, dtype=np.int32)
    policy.admit(ids, facts_of(100, 4, placed=True))
    policy.insert(ids[::-1])
    policy.check_integrity()
    assert policy.evict(390).tolist() == ids[:9:-1].tolist()
    policy.check_integrity()
    assert len(policy) == 10


def test_blocks_of_unknown_places_that_come_together_are_of_one_run() -> None:
    policy = CostPolicy(64, clock=lambda: 0.0)
    ids = np.arange(64, dtype=np.int32)
    policy.admit(ids, facts_of(1, 64, placed=False))
    policy.insert(ids[::-1])
    policy.check_integrity()
    assert len(policy._runs.candidates) == 1
    assert policy.evict(64).tolist() == ids[::-1].tolist()


def used_twice(policy: EvictionPolicy, clock: list[float], first: int, length: int) -> None:
    """A chain in the slots from `first` on, whose names are their numbers; it comes back once."""
    ids = np.arange(first, first + length, dtype=np.int32)
    names = ids.astype(np.uint64) + np.uint64(1)
    facts = BlockFacts(
        names, np.concatenate([[np.uint64(0)], names[:-1]]), np.arange(1, length + 1, dtype=np.int32)
    )
    policy.found(ids[:0])
    policy.missed(facts)
    policy.admit(ids, facts)
    policy.insert(ids[::-1])
    clock[0] += 1.0
    policy.found(ids)
    policy.remove(ids)
    policy.insert(ids[::-1])


def scan_facts(length: int) -> BlockFacts:
    names = np.arange(length, dtype=np.uint64) + np.uint64(1 << 40)
    return BlockFacts(
        names, np.concatenate([[np.uint64(0)], names[:-1]]), np.arange(1, length + 1, dtype=np.int32)
    )


@pytest.mark.parametrize("length", [10, 100, 1000])
def test_newcomers_take_no_more_than_their_share_however_long_the_runs_are(length: int) -> None:
    clock = [0.0]
    policy = make_policy("cost", 1000, clock=lambda: clock[0], seed=1)
    for first in range(0, 1000, length):
        used_twice(policy, clock, first, length)
    facts = scan_facts(900)
    policy.found(np.empty(0, dtype=np.int32))
    policy.missed(facts)
    taken = [int(np.count_nonzero(policy.wanted(facts, 0))) for _ in range(3)]
    assert taken[0] <= 300
    assert taken == taken[:1] * 3


def test_what_was_never_written_or_is_purged_while_in_use_is_let_go_of() -> None:
    clock = [0.0]
    policy = make_policy("cost", 16, clock=lambda: clock[0], seed=1)
    ids = np.arange(4, dtype=np.int32)
    policy.admit(ids, scan_facts(4))
    policy.forget(ids)
    policy.admit(ids, scan_facts(4))
    policy.insert(ids[::-1])
    policy.found(ids)
    policy.remove(ids)
    policy.forget(ids)
    assert len(policy) == 0
    policy.check_integrity()


def test_a_prompt_that_finds_nothing_is_no_turn_of_what_was_found_before() -> None:
    clock = [0.0]
    policy = make_policy("cost", 64, clock=lambda: clock[0], seed=1)
    assert isinstance(policy, CostPolicy)
    used_twice(policy, clock, 0, 8)
    held = np.arange(8, dtype=np.int32)
    policy.found(held)
    policy.remove(held)
    policy.found(held)  # by another one, while it is in use: nothing is removed
    policy.found(np.empty(0, dtype=np.int32))
    policy.missed(scan_facts(4))
    new = np.arange(8, 12, dtype=np.int32)
    policy.admit(new, scan_facts(4))
    policy.insert(new[::-1])
    use = policy._runs.use(int(policy._runs.standing[8]) >> 1)
    assert (use.turns, use.uses, use.path) == (0, 1, 4)


def test_what_is_told_to_go_goes_next_however_many_runs_there_are() -> None:
    clock = [0.0]
    policy = make_policy("cost", 6000, clock=lambda: clock[0], seed=1)
    for first in range(0, 6000, 2):
        used_twice(policy, clock, first, 2)
    for first in (100, 2222, 5998):
        told = np.array([first + 1, first], dtype=np.int32)
        assert policy.demote(told) == 2
        assert policy.coldest(2).tolist() == told.tolist()


def test_a_look_at_many_does_not_change_which_few_go() -> None:
    clock = [0.0]
    one, other = (make_policy("cost", 6000, clock=lambda: clock[0], seed=1) for _ in range(2))
    for first in range(0, 6000, 2):
        for policy in (one, other):
            clock[0] = float(first)
            used_twice(policy, clock, first, 2)
    one.coldest(2000)
    assert one.evict(8).tolist() == other.evict(8).tolist()


def test_ends_go_first_where_all_that_may_go_has_what_is_held_behind_it() -> None:
    clock = [0.0]
    policy = make_policy("cost", 8, clock=lambda: clock[0], seed=1)
    used_twice(policy, clock, 0, 4)
    policy.remove(np.array([3], dtype=np.int32))
    assert policy.evict(2).tolist() == [2, 1]


def test_runs_are_told_apart_after_billions_of_them() -> None:
    clock = [0.0]
    policy = make_policy("cost", 64, clock=lambda: clock[0], seed=1)
    assert isinstance(policy, CostPolicy)
    policy._runs._made = policy._links._joined = (1 << 32) - 4
    for first in range(0, 64, 8):
        used_twice(policy, clock, first, 8)
    assert len(policy.evict(64)) == 64
