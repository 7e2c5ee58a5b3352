"""How sequences come back: read in place within a step's budget, copied up beside the steps, in turns.

The scheduler runs over a real store and real copies, which end when the test lets them; nothing is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from kvpager.engine.preemption import LEAST_STEPS
from kvpager.engine.sampler import SamplingParams
from kvpager.engine.scheduler import Scheduler
from kvpager.engine.sequence import FinishReason, Sequence, SequenceState
from kvpager.engine.step import Step
from kvpager.engine.turns import LEAST_STRETCH
from kvpager.engine.waking import Swap
from kvpager.kvstore.cost import CostModel, LinkCost
from kvpager.kvstore.cost_estimates import CostEstimates
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.store import TieredStore
from kvpager.tiers.arena import AddressArray
from kvpager.tiers.layout import KVLayout
from kvpager.tiers.mover import HostMover, MoverStats, Transfer

SIZE = 4
LAYOUT = KVLayout(1, 1, 2, block_size=SIZE, dtype="float32")
EXTENT = 4096
ROOT = b"r" * 16
STEP_SECONDS = 1.0
BUDGET = 6
"""Blocks that a step may read in place beside others: a tenth of its time."""
PER_BLOCK = 0.1 * STEP_SECONDS / (BUDGET + 0.5)


class GatedMover:
    """A mover whose copies are made at once and are over when the test says so."""

    def __init__(self) -> None:
        self._mover = HostMover()
        self.held = False

    @property
    def stats(self) -> MoverStats:
        return self._mover.stats

    def copy(self, src: AddressArray, dst: AddressArray, nbytes: int) -> Transfer:
        transfer = self._mover.copy(src, dst, nbytes)
        return _Gated(self, transfer.nbytes)

    def close(self) -> None:
        self._mover.close()


@dataclass
class _Gated:
    mover: GatedMover
    nbytes: int
    seconds: float = 0.0
    error: Exception | None = None

    def done(self) -> bool:
        return not self.mover.held

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is None:
            self.mover.held = False
        return self.done()


@dataclass
class Engine:
    """A scheduler whose steps take a second each and compute nothing."""

    device: int
    swap: Swap = Swap.ATTEND
    copy_share: float = 1.0
    """Of what reading in place takes, that copying does."""
    rows: int = 32
    mover: GatedMover = field(default_factory=GatedMover)

    def __post_init__(self) -> None:
        cost = CostModel(
            SIZE,
            LAYOUT.block_bytes,
            None,
            in_place=LinkCost(0.0, PER_BLOCK / LAYOUT.block_bytes),
            copy=LinkCost(0.0, self.copy_share * PER_BLOCK / LAYOUT.block_bytes),
        )
        self.host = HostStore(64 * EXTENT, extent_bytes=EXTENT) if self.swap is not Swap.RECOMPUTE else None
        if self.host is not None:
            assert self.host.arena.wait_ready(self.host.arena.num_extents, timeout=30.0)
        self.store = TieredStore(
            LAYOUT,
            self.device,
            root=ROOT,
            host=self.host,
            max_sequences=self.rows,
            mover=self.mover,
            costs=CostEstimates(SIZE, LAYOUT.block_bytes, cost),
        )
        self.now = 0.0
        self.scheduler = Scheduler(
            self.store,
            max_sequences=self.rows,
            max_tokens=2000,
            step_tokens=512,
            load_seconds=0.0,
            swap=self.swap,
            clock=lambda: self.now,
        )
        self.scheduler.pace.step_seconds = STEP_SECONDS
        self.random = np.random.default_rng(1)
        self.number = 0
        self.steps: list[Step] = []
        self.finished: list[Sequence] = []

    def close(self) -> None:
        self.mover.held = False
        self.store.close()
        if self.host is not None:
            self.host.close()

    def submit(
        self, tokens: int | np.ndarray, answer: int, *, session: str | None = None, priority: int = 0
    ) -> Sequence:
        self.number += 1
        if isinstance(tokens, int):
            tokens = self.random.integers(0, 1000, tokens).astype(np.int32)
        sequence = Sequence(
            id=self.number,
            tokens=tokens,
            num_prompt=len(tokens),
            params=SamplingParams(max_tokens=answer),
            root=ROOT,
            seed=0,
            session=session,
            priority=priority,
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Step | None:
        self.store.poll()
        step = self.scheduler.schedule()
        self.finished += self.scheduler.take_given_up()
        if step is not None:
            self.now += STEP_SECONDS
            sampled = self.random.integers(0, 1000, len(step.sampled_rows)).astype(np.int32)
            self.finished += self.scheduler.postprocess(step, sampled)
            self.steps.append(step)
        self.store.check_integrity()
        return step

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not len(self.scheduler):
                return
            self.step()
        raise AssertionError(f"{len(self.scheduler)} sequences did not end")

    def below(self, tokens: int) -> np.ndarray:
        """A conversation of so many tokens whose KV lies in host memory alone."""
        before = len(self.scheduler)
        sequence = self.submit(tokens, 1, session="s")
        while sequence.state is not SequenceState.FINISHED:
            self.step()
        self.store.flush()
        self.store.evict(self.store.pool.capacity)
        assert len(self.scheduler) == before
        return sequence.tokens


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.close()


def make(engines: list[Engine], device: int, swap: Swap = Swap.ATTEND) -> Engine:
    engines.append(Engine(device, swap))
    return engines[-1]


def test_where_nobody_is_awake_everything_is_attended_at_once(engines: list[Engine]) -> None:
    engine = make(engines, 100)
    back = engine.submit(engine.below(40 * SIZE), 3)
    step = engine.step()
    assert step is not None
    assert step.read_in_place == 40
    assert step.copied == 0
    assert back.state is SequenceState.DECODING
    assert back.row is not None
    assert engine.store.far_blocks(back.row) == 0
    assert engine.scheduler.stats.installed == 40


@pytest.mark.parametrize(("copy_share", "at_once"), [(0.95, True), (0.8, False)])
def test_where_nobody_is_awake_the_way_is_taken_that_ends_sooner(
    engines: list[Engine], copy_share: float, at_once: bool
) -> None:
    engines.append(Engine(100, copy_share=copy_share))
    engine = engines[-1]
    back = engine.submit(engine.below(40 * SIZE), 3)
    engine.run()
    assert back.finish_reason is FinishReason.LENGTH
    stats = engine.scheduler.stats
    assert (stats.attended, stats.copied_first) == ((1, 0) if at_once else (0, 1))


def test_what_does_not_fit_is_read_in_place_whatever_copying_takes(engines: list[Engine]) -> None:
    engines.append(Engine(30, copy_share=0.1))
    engine = engines[-1]
    back = engine.submit(engine.below(40 * SIZE), 3)
    engine.run()
    assert back.finish_reason is FinishReason.LENGTH
    assert engine.scheduler.stats.attended == 1
    assert engine.scheduler.stats.read_in_place > 40


def test_steps_that_took_longer_say_what_reading_in_place_takes_once_some_went_by(
    engines: list[Engine],
) -> None:
    engine = make(engines, 100)
    before = engine.store.costs.model.in_place
    for number in range(6):
        back = engine.submit(engine.below((30 + number) * SIZE), 1)
        engine.scheduler.pace.step_seconds = 0.5 * STEP_SECONDS
        while back.state is not SequenceState.FINISHED:
            engine.step()
    assert engine.store.costs.model.in_place != before


@pytest.mark.parametrize(("blocks", "at_once"), [(BUDGET, True), (BUDGET + 1, False)])
def test_beside_others_it_is_attended_at_once_within_the_budget_and_copied_up_beyond(
    engines: list[Engine], blocks: int, at_once: bool
) -> None:
    engine = make(engines, 100)
    tokens = engine.below(blocks * SIZE)
    awake = engine.submit(20, 100)
    engine.step()
    engine.mover.held = True
    back = engine.submit(tokens, 3)
    before = len(awake.output) + int(engine.scheduler.counts[0])
    for _ in range(5):
        step = engine.step()
        assert step is not None
        assert step.read_in_place <= BUDGET
    # Who is awake goes on meanwhile.
    assert len(awake.output) + int(engine.scheduler.counts[0]) == before + 5
    stats = engine.scheduler.stats
    if at_once:
        assert back.state is SequenceState.FINISHED
        assert (stats.attended, stats.copied_first, stats.copied) == (1, 0, 0)
        return
    assert back.state is SequenceState.ARRIVING
    assert (stats.attended, stats.copied_first, stats.copied) == (0, 1, blocks)
    engine.mover.held = False
    step = engine.step()
    assert step is not None
    assert back.row in step.sampled_rows
    assert step.read_in_place == 0


def test_no_step_reads_more_in_place_than_its_budget_whoever_comes_back(engines: list[Engine]) -> None:
    engine = make(engines, 300)
    talks = [engine.below(SIZE * int(blocks)) for blocks in engine.random.integers(1, 12, 20)]
    engine.submit(20, 200)
    engine.step()
    first = len(engine.steps)
    for tokens in talks:
        engine.submit(tokens, int(engine.random.integers(2, 20)))
        engine.step()
    engine.run()
    stats = engine.scheduler.stats
    assert max(step.read_in_place for step in engine.steps[first:]) <= BUDGET
    assert stats.attended > 0
    assert stats.copied_first > 0
    assert stats.copied == sum(step.copied for step in engine.steps)
    assert stats.read_in_place == sum(step.read_in_place for step in engine.steps)


def test_copies_come_first_where_that_is_asked_for(engines: list[Engine]) -> None:
    engine = make(engines, 100, Swap.COPY)
    back = engine.submit(engine.below(5 * SIZE), 3)
    engine.mover.held = True
    assert engine.step() is None
    assert back.state is SequenceState.ARRIVING
    engine.mover.held = False
    engine.run()
    assert engine.scheduler.stats.copied == 5
    assert all(step.read_in_place == 0 for step in engine.steps)


def test_what_is_larger_than_the_device_tier_is_read_in_place_in_every_step(engines: list[Engine]) -> None:
    engine = make(engines, 16)
    large = engine.submit(40 * SIZE, 60)
    engine.run()
    assert large.finish_reason is FinishReason.LENGTH
    assert sum(step.read_in_place >= 20 for step in engine.steps) >= 60


def test_a_copy_that_is_put_to_sleep_on_its_way_comes_back_later(engines: list[Engine]) -> None:
    engine = make(engines, 40)
    tokens = engine.below(10 * SIZE)
    engine.submit(20, 60)
    engine.step()
    engine.mover.held = True
    back = engine.submit(tokens, 5)
    engine.step()
    assert back.state is SequenceState.ARRIVING
    engine.scheduler.hold(back)
    engine.step()
    engine.mover.held = False
    engine.scheduler.let_go_on(back)
    engine.run()
    assert back.finish_reason is FinishReason.LENGTH


def test_sequences_take_turns_in_long_stretches_where_not_all_have_room(engines: list[Engine]) -> None:
    length = 2 * LEAST_STRETCH + 40
    engine = make(engines, (40 + length) // SIZE + 10)
    sequences = [engine.submit(40, length) for _ in range(6)]
    begun = 0
    while any(one.first_token_at is None for one in sequences):
        engine.step()
        begun += 1
    engine.run()
    stats = engine.scheduler.stats
    assert stats.turns > 0
    # Nobody waits until another one has ended, and nobody is put to sleep more often than it has stretches.
    assert begun <= 6 * LEAST_STRETCH
    assert stats.turns <= 6 * length / LEAST_STRETCH
    assert all(one.finish_reason is FinishReason.LENGTH for one in sequences)


@pytest.mark.parametrize("swap", Swap)
def test_under_heavy_oversubscription_everybody_ends_and_nobody_is_woken_in_vain(
    engines: list[Engine], swap: Swap
) -> None:
    """40 sequences with room for 4."""
    engine = make(engines, 4 * 20, swap)
    sequences = [
        engine.submit(int(engine.random.integers(20, 60)), int(engine.random.integers(10, 40)))
        for _ in range(40)
    ]
    known = {one.id: len(one.tokens) for one in sequences}
    stalled = dict.fromkeys(known, 0)
    longest = 0
    for _ in range(5000):
        if not len(engine.scheduler):
            break
        engine.step()
        for one in sequences:
            count = len(engine.scheduler.tokens_of(one))
            stalled[one.id] = 0 if count > known[one.id] else stalled[one.id] + 1
            known[one.id] = count
            if one.state is not SequenceState.FINISHED:
                longest = max(longest, stalled[one.id])
    assert all(one.finish_reason is FinishReason.LENGTH for one in sequences)
    # Nobody waits longer than all others take, four at a time.
    assert longest <= 40 * 40 / 3
    # No thrash: on the whole a sequence has its minimum of steps for each time that it is put to sleep.
    assert max(one.preemptions for one in sequences) <= 3
    assert engine.scheduler.preemptions <= sum(len(one.output) for one in sequences) / LEAST_STEPS
