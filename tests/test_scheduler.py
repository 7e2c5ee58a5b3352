"""The scheduler over a real store, without a model: KV is written and read back as a model would.

Instead of keys and values each token's place gets a digest of all tokens up to it. Before a row takes part
in a step everything that attention would read is compared, so a wrong block anywhere is found at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from kvpager.engine.sampler import SamplingParams
from kvpager.engine.scheduler import Scheduler
from kvpager.engine.sequence import FinishReason, Sequence, SequenceState
from kvpager.engine.step import Step
from kvpager.engine.waking import Swap
from kvpager.kvstore.host import HostStore
from kvpager.kvstore.space import HostSpace
from kvpager.kvstore.store import TieredStore
from kvpager.tiers.address import FAR, INSTALL, TAG_MASK
from kvpager.tiers.cold import ColdTier
from kvpager.tiers.cold_disk import DiskColdTier
from kvpager.tiers.errors import CapacityError, RequestError
from kvpager.tiers.layout import KVLayout

SIZE = 4
LAYOUT = KVLayout(1, 1, 2, block_size=SIZE, dtype="float32")
EXTENT = 4096
ROOT = b"r" * 16
STOP = 7
MAX_TOKENS = 120


MakeWorld = Callable[..., "World"]


@dataclass(frozen=True)
class Tiers:
    """How large the tiers are, in blocks."""

    device: int
    host: int
    cold: bool = False
    rows: int = 6
    step_tokens: int = 24
    swap: Swap = Swap.ATTEND


class World:
    """A store and a scheduler, and what every place of every sequence should hold."""

    def __init__(self, tiers: Tiers, seed: int, folder: Path) -> None:
        self.random = np.random.default_rng(seed)
        self.tiers = tiers
        self._rest = ExitStack()
        cold: ColdTier | None = DiskColdTier(folder, capacity_bytes=64 << 20) if tiers.cold else None
        host_bytes = -(-tiers.host * LAYOUT.block_bytes // EXTENT) * EXTENT
        self.host = HostStore(host_bytes, cold=cold, extent_bytes=EXTENT) if tiers.host else None
        self.store = TieredStore(LAYOUT, tiers.device, root=ROOT, host=self.host, max_sequences=tiers.rows)
        self.scheduler = Scheduler(
            self.store,
            max_sequences=tiers.rows,
            max_tokens=MAX_TOKENS,
            step_tokens=tiers.step_tokens,
            load_seconds=5.0,
            swap=tiers.swap,
        )
        self.sequences: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.slept: list[tuple[npt.NDArray[np.int32], int]] = []
        self.steps = 0
        self.read = 0
        self.installed = 0
        self._digests: dict[int, list[int]] = {}

    def close(self) -> None:
        self.store.close()
        if self.host is not None:
            self.host.close()

    # Requests

    def submit(
        self,
        tokens: list[int],
        max_tokens: int = 8,
        *,
        session: bool = False,
        partial_at: int | None = None,
        stops: bool = True,
        priority: int = 0,
    ) -> Sequence:
        sequence = self._sequence(np.array(tokens, dtype=np.int32), max_tokens)
        sequence.priority = priority
        sequence.stop_ids = (STOP,) if stops else ()
        sequence.session = f"s{sequence.id}" if session else None
        sequence.partial_at = partial_at
        self.scheduler.add(sequence)
        return sequence

    def fork(self, sequence: Sequence, max_tokens: int) -> Sequence | None:
        twin = self._sequence(sequence.tokens[: sequence.num_prompt], max_tokens)
        try:
            self.scheduler.fork(sequence, twin)
        except CapacityError:
            self.sequences.remove(twin)
            return None
        return twin

    def _sequence(self, tokens: npt.NDArray[np.int32], max_tokens: int) -> Sequence:
        sequence = Sequence(
            id=len(self.sequences) + len(self.finished) + 1,
            tokens=tokens,
            num_prompt=len(tokens),
            params=SamplingParams(max_tokens=max_tokens),
            root=ROOT,
            seed=0,
            stop_ids=(STOP,),
        )
        self.sequences.append(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence, FinishReason.ABORTED)
        self._gone(sequence)

    def _gone(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)
        self.finished.append(sequence)
        if sequence.session is not None and sequence.sleeping is not None:
            self.slept.append((sequence.tokens, sequence.sleeping.length))

    # Steps

    def step(self) -> bool:
        """One step with everything checked; returns whether anything ran."""
        self.store.poll()
        step = self.scheduler.schedule()
        for sequence in self.scheduler.take_given_up():
            self._gone(sequence)
        self.steps += 1
        if step is None:
            self.scheduler.wait(0.01)
            self.check()
            return False
        self._check_step(step)
        for row, start, count in self._parts(step):
            self._read(row, start)
            self._write(row, start, count)
        self._install(step)
        sampled = self.random.integers(0, 50, len(step.sampled_rows)).astype(np.int32)
        for sequence in self.scheduler.postprocess(step, sampled):
            self._gone(sequence)
        self.check()
        return True

    def run(self, limit: int = 3000) -> None:
        """Step until all is done."""
        for _ in range(limit):
            if not len(self.scheduler):
                return
            self.step()
        states = {sequence.id: sequence.state.value for sequence in self.sequences}
        raise AssertionError(f"after {limit} steps there still are {states}")

    def _parts(self, step: Step) -> list[tuple[int, int, int]]:
        decoding = [(row, int(at), 1) for row, at in zip(step.rows.tolist(), step.lengths, strict=True)]
        return decoding + [(chunk.row, chunk.start, chunk.count) for chunk in step.chunks]

    def _check_step(self, step: Step) -> None:
        parts = self._parts(step)
        rows = [row for row, _, _ in parts]
        assert len(set(rows)) == len(rows), "a row twice"
        assert rows[: len(step.rows)] == sorted(step.rows.tolist())
        assert 0 < sum(count for _, _, count in parts) <= max(self.tiers.step_tokens, self.tiers.rows)
        for row, start, count in parts:
            assert count > 0
            assert start == self.store.lengths[row]
            assert start + count <= self.scheduler.counts[row]
        assert np.array_equal(step.tokens, self.scheduler.tokens[step.rows, step.lengths])
        for chunk in step.chunks:
            assert chunk.sequence.row == chunk.row
            assert chunk.sequence.state is SequenceState.PREFILLING
            assert chunk.last == (chunk.start + chunk.count == self.scheduler.counts[chunk.row])

    def _install(self, step: Step) -> None:
        """Copy what the step installs, as its attention would."""
        tagged = {
            (row, column)
            for row in self.store.table.rows_in_use.tolist()
            for column in np.flatnonzero(self.store.table.row(row) & INSTALL).tolist()
        }
        if step.install is None:
            assert not tagged
            return
        rows, columns, destinations = step.install.rows, step.install.columns, step.install.destinations
        assert tagged == set(zip(rows.tolist(), columns.tolist(), strict=True))
        assert set(rows.tolist()) <= {row for row, _, _ in self._parts(step)}
        words = self.store.table.words[rows, columns]
        # One destination for each block, whoever reads it.
        assert len(set(zip(words.tolist(), destinations.tolist(), strict=True))) == len(set(words.tolist()))
        assert len(set(destinations.tolist())) == len(set(words.tolist()))
        read = [self.store.table.row(row) for row in self.store.table.rows_in_use.tolist()]
        assert not np.isin(destinations, np.concatenate(read)).any(), "a destination is read already"
        for word, to in zip(words.tolist(), destinations.tolist(), strict=True):
            assert word & FAR
            ctypes.memmove(to, word & ~TAG_MASK, LAYOUT.block_bytes)
            self.installed += 1

    def check(self) -> None:
        """What holds between steps."""
        scheduler, store = self.scheduler, self.store
        running = [one for one in self.sequences if one.row is not None]
        rows = sorted(one.row for one in running if one.row is not None)
        assert rows == store.table.rows_in_use.tolist()
        assert len(running) == scheduler.num_running
        assert len(scheduler) == len(self.sequences)
        assert scheduler.unfinished == sorted(self.sequences, key=lambda one: one.id)
        for one in running:
            assert one.row is not None
            assert scheduler.sequence_at(one.row) is one
            known, length = int(scheduler.counts[one.row]), int(store.lengths[one.row])
            if one.state is SequenceState.DECODING:
                assert known == length + 1
            else:
                assert one.state is SequenceState.PREFILLING
                assert known > length
        store.check_integrity()
        if self.host is not None:
            self.host.check_integrity()

    def check_nothing_is_held(self) -> None:
        self.store.flush()
        self.store.poll()
        self.check()
        assert self.store.available_blocks == self.store.pool.capacity
        if isinstance(self.store.host, HostSpace) and self.host is not None:
            self.host.flush()
            self.store.host.evict(self.store.host.capacity)
            assert self.store.host.resident == 0, "something still has a lease"

    # What a model would do

    def _digests_of(self, row: int) -> npt.NDArray[np.int64]:
        sequence = self.scheduler.sequence_at(row)
        digests = self._digests.setdefault(sequence.id, [])
        tokens = self.scheduler.tokens_of(sequence).tolist()
        for token in tokens[len(digests) :]:
            digests.append(hash((digests[-1] if digests else 17, token)))
        return np.array(digests, dtype=np.int64)

    def _read(self, row: int, length: int) -> None:
        words = self.store.table.row(row)[: LAYOUT.blocks_for(length)].tolist()
        seen = [place(word) for word in words]
        if seen:
            found = np.concatenate([keys for keys, _ in seen])[:length]
            assert np.array_equal(found, self._digests_of(row)[:length]), f"row {row} reads wrong keys"
            values = np.concatenate([values for _, values in seen])[:length]
            assert np.array_equal(values, ~found), f"row {row} reads wrong values"
            self.read += length

    def _write(self, row: int, start: int, count: int) -> None:
        digests = self._digests_of(row)
        for at in range(start, start + count):
            word = int(self.store.table.words[row, at // SIZE])
            assert not word & FAR, "writes to host memory"
            block = self.store.arena.slots_at(np.array([word]))
            assert self.store.pool.refs[block][0] == 1, "writes to a block that others hold"
            assert self.store.pool.hash_of(int(block[0])) is None, "writes to a block that is named"
            keys, values = place(word)
            keys[at % SIZE] = digests[at]
            values[at % SIZE] = ~digests[at]


def place(word: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The keys and the values of a block, int64 [SIZE] each: a row of two float32 is one int64."""
    address = word & ~TAG_MASK
    planes = (address, address + LAYOUT.slice_bytes)
    keys, values = (
        np.frombuffer(memoryview((ctypes.c_int64 * SIZE).from_address(at)), dtype=np.int64) for at in planes
    )
    return keys, values


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[MakeWorld]:
    worlds: list[World] = []

    def make(tiers: Tiers, seed: int = 0) -> World:
        worlds.append(World(tiers, seed, tmp_path / f"cold-{len(worlds)}"))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


SOAKS = {
    "roomy": Tiers(device=96, host=256),
    "tiny device": Tiers(device=10, host=96),
    "tiny device, no host": Tiers(device=40, host=0),
    "tiny host": Tiers(device=16, host=32),
    "tiny host over a disk": Tiers(device=12, host=48, cold=True),
    "one row": Tiers(device=40, host=64, rows=1),
    "many rows, few blocks": Tiers(device=20, host=128, rows=16, step_tokens=16),
    "many rows, few blocks, no host": Tiers(device=36, host=0, rows=12, step_tokens=16),
    "tiny steps": Tiers(device=14, host=64, cold=True, step_tokens=6),
    "copies first": Tiers(device=40, host=128, rows=8, swap=Swap.COPY),
    "computes again": Tiers(device=40, host=0, rows=8, swap=Swap.RECOMPUTE),
}


def soak(world: World, steps: int) -> None:
    """Arrivals, forks, aborts and continued conversations for a while; then everything finishes."""
    random = world.random
    prefixes = [random.integers(8, 50, 40).tolist() for _ in range(4)]
    # As the engine does: what could never run is refused.
    host = world.store.host.capacity if world.store.host is not None else 0
    most = (world.tiers.device + host - 1) * SIZE
    for _ in range(steps):
        if len(world.sequences) < 14 and random.random() < 0.5:
            if world.slept and random.random() < 0.4:
                tokens, slept = world.slept.pop(int(random.integers(len(world.slept))))
                prompt, partial_at = [*tokens.tolist(), *random.integers(8, 50, 3).tolist()], slept
            else:
                prefix = prefixes[int(random.integers(len(prefixes)))][: int(random.integers(40))]
                prompt = prefix + random.integers(8, 50, int(random.integers(1, 24))).tolist()
                partial_at = None
            answer = int(random.integers(1, 30))
            if len(prompt) < MAX_TOKENS and min(MAX_TOKENS, len(prompt) + answer) <= most:
                world.submit(prompt, answer, session=bool(random.random() < 0.4), partial_at=partial_at)
        decoding = [one for one in world.sequences if one.state is SequenceState.DECODING]
        if decoding and random.random() < 0.05:
            parent = decoding[int(random.integers(len(decoding)))]
            left = most - parent.num_prompt
            world.fork(parent, int(min(left, len(world.scheduler.tokens_of(parent)) + 6)))
            world.check()
        if world.sequences and random.random() < 0.03:
            world.abort(world.sequences[int(random.integers(len(world.sequences)))])
            world.check()
        world.step()
    world.run()
    world.check_nothing_is_held()


def check_soak(world: World) -> None:
    assert len(world.finished) > 20
    assert world.read > 1000
    worst = max(world.finished, key=lambda one: one.preemptions)
    # A sequence that wakes has room to go on for a while: no endless to and fro.
    assert worst.preemptions <= 2 + len(worst.tokens) / SIZE, f"{worst.id}: {worst.preemptions} preemptions"


@pytest.mark.parametrize("name", SOAKS)
def test_a_soak_reads_what_was_written_and_everybody_finishes(name: str, make_world: MakeWorld) -> None:
    world = make_world(SOAKS[name], seed=1)
    soak(world, 250)
    check_soak(world)
    assert (world.installed > 0) == (world.tiers.host > 0 and world.tiers.swap is Swap.ATTEND)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize("name", SOAKS)
def test_a_long_soak_reads_what_was_written_and_everybody_finishes(
    name: str, seed: int, make_world: MakeWorld
) -> None:
    world = make_world(SOAKS[name], seed=seed)
    soak(world, 2500)
    check_soak(world)


def test_a_block_whose_copy_went_is_copied_again_before_it_is_spilled(make_world: MakeWorld) -> None:
    world = make_world(Tiers(device=8, host=16))
    sequence = world.submit(list(range(8, 34)), 8, stops=False)
    world.step()
    world.store.flush()
    assert sequence.row is not None
    assert world.store.host is not None
    names = [bytes([number]) * 16 for number in range(16)]
    assert world.store.host.put(names, np.zeros((16, LAYOUT.block_bytes), dtype=np.uint8), wait=1.0) == 16
    assert world.store.spill(sequence.row, 3) == 3
    world.check()
    world.run()


def test_loads_of_those_who_wait_do_not_keep_room_from_who_runs(make_world: MakeWorld) -> None:
    world = make_world(Tiers(device=8, host=32))
    known = list(range(8, 48)) + list(range(8, 33))
    world.submit(known, 1)
    world.run()
    long = world.submit([9] * 8, 110, stops=False)
    while len(world.scheduler.tokens_of(long)) < 28:
        world.step()
    waiting = world.submit(known, 1)
    world.step()
    assert waiting.load is not None
    world.run()
    assert long.finish_reason is FinishReason.LENGTH
    assert waiting.finish_reason is not None
    assert world.store.stats.dropped == 0
    world.check_nothing_is_held()


def test_a_large_prompt_is_not_overtaken_for_ever_by_small_ones(make_world: MakeWorld) -> None:
    world = make_world(Tiers(device=60, host=48, rows=1, step_tokens=120))
    random = world.random

    def small() -> None:
        world.submit(random.integers(8, 50, 9).tolist(), 2)

    for _ in range(3):
        small()
    large = world.submit(random.integers(8, 50, 110).tolist(), 2)
    for _ in range(60):
        small()
        world.step()
    assert large.scheduled_at is not None
    world.run()
    world.check_nothing_is_held()


def test_short_ones_run_beside_what_a_sequence_larger_than_the_device_waits_for(
    make_world: MakeWorld,
) -> None:
    world = make_world(Tiers(device=20, host=128, rows=8, step_tokens=64))
    random = world.random

    def small(answer: int) -> Sequence:
        return world.submit(random.integers(8, 50, 6).tolist(), answer, stops=False)

    running = small(60)
    world.step()
    large = world.submit(random.integers(8, 50, 100).tolist(), 8, stops=False)
    first = [small(4) for _ in range(3)]
    for _ in range(8):
        world.step()
    assert [one.finish_reason for one in first] == [FinishReason.LENGTH] * 3
    assert running not in world.finished
    # Who would end later than what it waits for does not pass, nor do short ones keep it waiting for ever.
    late = small(70)
    steps = 0
    while large.scheduled_at is None:
        small(4)
        world.step()
        steps += 1
        assert steps <= 60
    assert late.scheduled_at is None or late.scheduled_at >= large.scheduled_at
    world.run()
    world.check_nothing_is_held()


def test_what_is_computed_together_is_computed_once_also_after_an_abort(make_world: MakeWorld) -> None:
    world = make_world(Tiers(device=60, host=0, step_tokens=12))
    prompt = list(range(8, 48))
    first = world.submit(prompt, 4, stops=False)
    others = [world.submit([*prompt, number], 4, stops=False) for number in (48, 49)]
    world.step()
    assert first.state is SequenceState.PREFILLING
    assert [one.state for one in others] == [SequenceState.WAITING] * 2
    world.abort(first)
    world.run()
    # The abort left three full blocks; one of the others computed the rest.
    assert sum(one.computed for one in others) == (len(prompt) - 12) + 2
    world.check_nothing_is_held()


def test_only_a_decoding_sequence_forks_and_only_into_a_free_row(make_world: MakeWorld) -> None:
    world = make_world(Tiers(device=20, host=0, rows=1))
    sequence = world.submit(list(range(8, 20)), 6, stops=False)
    with pytest.raises(RequestError, match="only a decoding one forks"):
        world.scheduler.fork(sequence, sequence)
    world.step()
    assert world.fork(sequence, 6) is None
    world.run()


@pytest.mark.parametrize("prompt", [10, 30])
def test_a_sequence_too_large_for_all_tiers_ends_and_says_what_to_change(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture, prompt: int
) -> None:
    world = make_world(Tiers(device=4, host=0))
    large = world.submit(list(range(8, 8 + prompt)), 80, stops=False)
    small = [world.submit([9] * 6, 4, stops=False) for _ in range(3)]
    world.run()
    assert large.finish_reason is FinishReason.CAPACITY
    # Its prompt of 10 tokens fits into four blocks, that of 30 does not.
    assert len(large.tokens) == (17 if prompt == 10 else 30)
    assert [one.finish_reason for one in small] == [FinishReason.LENGTH] * 3
    assert "device_blocks (4) and host_bytes (0 blocks)" in caplog.text
    world.check_nothing_is_held()


def test_a_sleeper_that_lost_its_blocks_wakes_only_where_it_can_be_computed_again(
    make_world: MakeWorld,
) -> None:
    world = make_world(Tiers(device=40, host=0, step_tokens=64))
    world.submit([9] * 8, 100, stops=False)
    for number in range(3):
        world.submit([10 + number] * 8, 44 + 6 * number, stops=False)
    large = world.submit(list(range(60, 140)), 30, stops=False, priority=-1)
    world.run()
    # It waits for room for all that it lost: in less it would be put to sleep again before it is through.
    assert large.preemptions == 1
    assert large.computed <= 2 * len(large.tokens)
    assert {one.finish_reason for one in world.finished} == {FinishReason.LENGTH}
    world.check_nothing_is_held()
