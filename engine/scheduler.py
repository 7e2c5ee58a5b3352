"""Which sequences run in the next step, and what becomes of its tokens.

Continuous batching with chunked prefill (Yu et al., Orca, OSDI'22; Agrawal et al., Sarathi-Serve, OSDI'24):
every decoding sequence gets one token a step, and what is left of the step's token budget goes to
chunks of prompts, oldest first. When the device tier is full the sequence whose sleep costs least goes to
host memory (`preemption`). Who waits, asleep or new, comes in when there is room for all of it (`entrance`).
Where there is none, those that had their stretch make some (`turns`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from ..kvstore.policy import Retention
from ..kvstore.store import TieredStore
from ..tiers.errors import CapacityError, RequestError
from .entrance import Entrance
from .pace import Pace
from .preemption import NEARLY_DONE, Candidates, cheapest_sleep
from .running import RunningSequences
from .scheduler_stats import SchedulerStats
from .sequence import FinishReason, Sequence, SequenceState
from .step import Chunk, Step
from .turns import Turns
from .waking import Swap

__all__ = ["Scheduler"]

_log = logging.getLogger(__name__)

# How long a sequence that cannot go on waits for room in host memory that may come: a write to the cold tier
# may take less.
_ROOM_SECONDS: Final = 10.0
# Times an undisturbed step, from which on it is reading in place that a step of few tokens takes longer for.
_LONG: Final = 1.5
_FEW_TOKENS: Final = 64
# Such steps that say nothing yet: at first kernels are compiled and graphs captured.
_PASSED_OVER: Final = 3


class Scheduler:
    """Decides each step over one `TieredStore`.

    Args:
        store: where the KV is.
        max_sequences: rows of the block table.
        max_tokens: tokens of one sequence, prompt and output.
        step_tokens: tokens a step may compute, decoding ones counted.
        load_seconds: how long a sequence waits for blocks from the cold tier before it is computed.
        gate: whether blocks come up from there only where that ends sooner than computing them.
        swap: what becomes of sequences whose KV is not in the device tier.
        clock: seconds, of whichever origin, by which steps are measured.
    """

    def __init__(
        self,
        store: TieredStore,
        *,
        max_sequences: int,
        max_tokens: int,
        step_tokens: int,
        load_seconds: float,
        gate: bool = True,
        swap: Swap = Swap.ATTEND,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.store = store
        self.max_tokens = max_tokens
        self.step_tokens = step_tokens
        self.swap = swap
        self.stats = SchedulerStats()
        self.pace = Pace(clock)
        self._running = RunningSequences(store, max_sequences, max_tokens)
        self.tokens = self._running.tokens
        """int32 [rows, max_tokens]: all tokens of the sequences that have a row."""
        self.counts = self._running.counts
        """int64 [rows]: how many of them are known."""
        self.owners = self._running.owners
        """int64 [rows]: ids of the sequences that have them; of the last one where none has."""
        self._held: dict[int, Sequence] = {}
        """By id. Asleep until they are told to go on, whether there is room or not."""
        self._read_in_place = 0
        """Steps of few tokens that read host memory in place."""
        self._turns = Turns(store.costs, self.pace)
        self._given_up: list[Sequence] = []
        self._entrance = Entrance(
            store,
            self._running,
            self.stats,
            self.pace,
            swap=swap,
            load_seconds=load_seconds,
            gate=gate,
            step_tokens=step_tokens,
            give_up=self._give_up,
        )

    def __len__(self) -> int:
        """Sequences that are not finished."""
        return len(self._entrance.waiting) + len(self._entrance.asleep) + len(self._held) + self.num_running

    @property
    def num_running(self) -> int:
        """Sequences that have a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that never had a row."""
        return len(self._entrance.waiting)

    @property
    def num_asleep(self) -> int:
        """Sequences that were put to sleep to make room."""
        return len(self._entrance.asleep)

    @property
    def preemptions(self) -> int:
        """How often a sequence was put to sleep to make room."""
        return self.stats.preemptions

    @property
    def unfinished(self) -> list[Sequence]:
        """The sequences that are not finished, in the order of arrival."""
        return sorted(
            [*self._entrance.waiting, *self._entrance.asleep, *self._held.values(), *self._running.sequences],
            key=lambda sequence: sequence.id,
        )

    # Coming and going

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._entrance.add(sequence)

    def fork(self, sequence: Sequence, twin: Sequence) -> None:
        """Let `twin` go on from where a decoding sequence stands, on the same blocks.

        Raises:
            RequestError: the sequence is not decoding.
            CapacityError: every row is in use.
        """
        if sequence.row is None or sequence.state is not SequenceState.DECODING:
            raise RequestError(f"sequence {sequence.id} is {sequence.state.value}; only a decoding one forks")
        twin.tokens = self.tokens_of(sequence).copy()
        row = self.store.fork(sequence.row)
        twin.scheduled_at = twin.first_token_at = time.monotonic()
        self._entrance.enter(twin, row)
        self._entrance.start(twin, row)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence wherever it stands. A session's KV sleeps; another's stays cached."""
        if sequence.state is SequenceState.FINISHED:
            return
        if sequence.row is not None:
            self._leave(sequence, keep=sequence.session is not None, ends=True)
        elif sequence.id in self._held:
            del self._held[sequence.id]
        elif sequence.state is SequenceState.ASLEEP:
            self._entrance.asleep.remove(sequence)
        else:
            self._entrance.waiting.remove(sequence)
        sequence.end_load()
        if sequence.lookup is not None:
            sequence.lookup.end()
            sequence.lookup = None
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason = reason
        sequence.finished_at = time.monotonic()

    def hold(self, sequence: Sequence) -> None:
        """Put a sequence to sleep until `let_go_on`, however much room there is. Between steps.

        Raises:
            RequestError: it has not begun, or has ended.
        """
        if self.holds(sequence):
            return
        if sequence.row is not None:
            self._leave(sequence, keep=True)
            sequence.state = SequenceState.ASLEEP
        elif sequence.state is SequenceState.ASLEEP:
            self._entrance.asleep.remove(sequence)
            sequence.end_load()
        else:
            raise RequestError(
                f"sequence {sequence.id} is {sequence.state.value}; it has nothing to sleep with"
            )
        self._held[sequence.id] = sequence

    def remaining(self, sequence: Sequence) -> int:
        """Tokens that a sequence which has a row has to go at most, as far as is known."""
        return int(self._running.remaining(np.array([sequence.row], dtype=np.int64))[0])

    def advise(self, sequence: Sequence, retention: Retention | None) -> None:
        """What is known of a sequence that is not finished: it counts when somebody is to be put to sleep.

        Its blocks are kept accordingly from when it gives up its row.

        Args:
            retention: `about_to_finish`: a few tokens from now; `will_return`: seconds after its end. None:
                nothing is known of it any more.
        """
        sequence.retention = retention
        finishing = retention is not None and retention.about_to_finish
        sequence.ends_at = len(self.tokens_of(sequence)) + NEARLY_DONE if finishing else 0
        self._running.advise(sequence)

    def holds(self, sequence: Sequence) -> bool:
        """Whether it sleeps until `let_go_on`."""
        return sequence.id in self._held

    def let_go_on(self, sequence: Sequence) -> None:
        """A sequence that is held wakes when there is room, after those that wait for that already."""
        del self._held[sequence.id]
        self._entrance.add_asleep(sequence, time.monotonic())

    def tokens_of(self, sequence: Sequence) -> npt.NDArray[np.int32]:
        """All tokens known of a sequence, int32; a view that the next step may outdate."""
        return self._running.tokens_of(sequence)

    def sequence_at(self, row: int) -> Sequence:
        """The sequence that has a row.

        Raises:
            LookupError: none has it.
        """
        return self._running.at(row)

    # Schedule, and postprocess

    def schedule(self) -> Step | None:
        """The next step; None where nothing can run now (blocks are awaited, or there is no work).

        A sequence that no tier has room for, though it runs alone, ends here: `take_given_up`.
        """
        running, entrance = self._running, self._entrance
        # First of all: their slots may be granted to others, and come up for others, by now.
        for row in self.store.take_lost_rows():
            self._put_to_sleep(self.sequence_at(row), keep_tail=False)
        entrance.begin_step()
        entrance.join()
        entrance.let_in()
        if entrance.blocked is not None and self._take_turns(*entrance.blocked):
            entrance.let_in()
        self._room_to_decode()
        chunks = self._chunks(self.step_tokens - len(running.decoding)) if running.prefilling else ()
        rows = running.decoding
        if not len(rows) and not chunks:
            return None
        lengths = self.store.lengths[rows]
        readers = rows
        if chunks:
            readers = np.concatenate([rows, np.array([chunk.row for chunk in chunks], dtype=np.int64)])
        install = entrance.bring_near(readers)
        step = Step(
            rows,
            lengths,
            self.tokens[rows, lengths],
            chunks,
            install,
            self.store.read_in_place(readers),
            entrance.take_copied(),
        )
        self.pace.begin()
        return step

    def take_given_up(self) -> list[Sequence]:
        """The sequences that `schedule` has ended since the last call, with `FinishReason.CAPACITY`."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def postprocess(self, step: Step, sampled: npt.NDArray[np.int32]) -> list[Sequence]:
        """Take what a step computed and sampled.

        Args:
            sampled: int32, one token for each of `Step.sampled_rows`.

        Returns:
            the sequences that finished.
        """
        self._learn(step, self.pace.end(disturbed=bool(step.chunks) or step.read_in_place > 0))
        self.stats.steps += 1
        self.stats.read_in_place += step.read_in_place
        if step.install is not None:
            self.stats.installed += len(np.unique(step.install.destinations))
            self.store.finish_install()
        if len(step.rows):
            self.store.append(step.rows, step.tokens)
        for chunk in step.chunks:
            tokens = self.tokens[chunk.row, chunk.start : chunk.start + chunk.count]
            self.store.advance(chunk.row, tokens)
            chunk.sequence.computed += chunk.count
        rows = step.sampled_rows
        stopped, ended = self._running.take(rows, sampled)
        if step.chunks:
            self._start_decoding(step.chunks)
        finished = []
        for at in ended.tolist():
            sequence = self.sequence_at(int(rows[at]))
            self.finish(sequence, FinishReason.STOP if stopped[at] else FinishReason.LENGTH)
            finished.append(sequence)
        return finished

    def wait(self, seconds: float) -> None:
        """Wait, `seconds` at most, for what the next to run needs: copies, a load, its session's record."""
        if self._entrance.wait(seconds):
            return
        if self._held:
            time.sleep(seconds)  # who lets them go on says so between two steps

    # Inside

    def _leave(self, sequence: Sequence, *, keep: bool, keep_tail: bool = True, ends: bool = False) -> None:
        """Take a sequence's row away; with `keep` its KV sleeps, the partly filled block if `keep_tail`.

        Args:
            ends: it is over, so it is not about to finish any more; else it is to go on soon, whenever it is
                expected to return after its end.
        """
        row = sequence.row
        if row is None:
            return
        self._running.leave(sequence, row)
        advice = sequence.retention
        if advice is not None:
            advice = replace(advice, about_to_finish=False) if ends else replace(advice, will_return=None)
        if not keep:
            self.store.close_row(row, retention=advice)
        else:
            sequence.sleeping = self.store.sleep(row, keep_tail=keep_tail)
            if advice is not None:
                self.store.retain(sequence.sleeping.names, advice)
        self._entrance.left(row)

    def _learn(self, step: Step, seconds: float) -> None:
        """A step that took longer for what it read in place says what that costs: what it took more."""
        undisturbed = self.pace.step_seconds
        if not step.read_in_place or not undisturbed or step.prompt_tokens > _FEW_TOKENS:
            return
        self._read_in_place += 1
        if self._read_in_place > _PASSED_OVER and seconds > _LONG * undisturbed:
            nbytes = step.read_in_place * self.store.layout.block_bytes
            self.store.costs.in_place.moved(nbytes, seconds - undisturbed)

    def _start_decoding(self, chunks: tuple[Chunk, ...]) -> None:
        now = time.monotonic()
        ready = [chunk.sequence for chunk in chunks if chunk.last]
        self._running.decode(ready)
        for sequence in ready:
            if sequence.first_token_at is None:
                sequence.first_token_at = now

    def _room_to_decode(self) -> None:
        """See that each decoding row has room for its next token; who does not fit is put to sleep."""
        while len(self._running.decoding):
            try:
                self.store.reserve(self._running.decoding, 1)
            except CapacityError:
                if not self._make_room():
                    self._give_up(self.sequence_at(int(self._running.decoding[0])))
            else:
                return

    def _give_up(self, alone: Sequence) -> None:
        """End a sequence that no tier has room for though it runs alone: the others go on."""
        host = self.store.host
        _log.warning(
            "sequence %d ends at %d tokens: device_blocks (%d) and host_bytes (%d blocks) hold no more",
            alone.id,
            len(self.tokens_of(alone)),
            self.store.pool.capacity,
            host.capacity if host is not None else 0,
        )
        self.finish(alone, FinishReason.CAPACITY)
        self._given_up.append(alone)

    def _make_room(self, for_chunk_of: Sequence | None = None) -> bool:
        """Free device blocks: put a sequence to sleep, or the last one's oldest blocks below.

        Args:
            for_chunk_of: only younger sequences, and those of lower priority, may be put to sleep.

        Returns:
            whether there is more room than before.
        """
        rows = self._running.rows
        if len(rows) == 1:
            return self._spill(self.sequence_at(int(rows[0])))
        candidates = self._running.candidates(rows, self.stats.steps)
        if for_chunk_of is not None:
            lower = candidates.priorities < for_chunk_of.priority
            lower |= (candidates.priorities == for_chunk_of.priority) & (candidates.ids > for_chunk_of.id)
            candidates = candidates.take(lower)
            if not len(candidates):
                return False
        self._put_to_sleep(self.sequence_at(self._victim(candidates)))
        return True

    def _victim(self, candidates: Candidates) -> int:
        """The row that costs least, asleep; other engines take the one that came last."""
        if self.swap is not Swap.ATTEND:
            return int(candidates.rows[candidates.ids.argmax()])
        return cheapest_sleep(
            candidates, self.store.private_blocks, self.store.costs.model, below=self.store.host is not None
        )

    def _put_to_sleep(self, sequence: Sequence, *, keep_tail: bool = True, turn: bool = False) -> None:
        """Take a running sequence's row away until `_wake`; after its turn it goes to the end of the line."""
        self._leave(sequence, keep=True, keep_tail=keep_tail)
        sequence.state = SequenceState.ASLEEP
        sequence.preemptions += 1
        self.stats.preemptions += 1
        self.stats.turns += turn
        self._entrance.add_asleep(sequence, time.monotonic() if turn else sequence.arrived_at)

    def _take_turns(self, first: Sequence, wanted: int) -> bool:
        """Put those to sleep whose stretch is over; whether any was.

        Where nothing below keeps what leaves the device tier there are no turns: it would be computed again.

        Args:
            first: who is next, if it still waits, and
            wanted: how many blocks are to be available for it.
        """
        if self.swap is not Swap.ATTEND or self.store.host is None:
            return False
        if first not in self._entrance.asleep and first not in self._entrance.waiting:
            return False
        candidates = self._running.candidates(self._running.decoding, self.stats.steps)
        candidates = candidates.take(self._turns.over(candidates, first.priority))
        took = False
        while len(candidates) and (wanted > self.store.available_blocks or not self.store.table.free_rows):
            row = self._victim(candidates)
            self._put_to_sleep(self.sequence_at(row), turn=True)
            candidates = candidates.take(candidates.rows != row)
            took = True
        return took

    def _spill_blocks(self) -> int:
        """How many blocks a sequence alone on the device lets go at once: enough for the next chunks."""
        return max(1, self.store.pool.capacity // 4)

    def _spill(self, alone: Sequence) -> bool:
        """Let a sequence that is alone on the device read its oldest blocks in host memory.

        Where that has no room, what is in the way there goes: first what came up for others, then the
        coldest of what nobody holds. A slow cold tier costs hits, not a request. What others hold there is
        waited for; where none of it can come, nothing is.
        """
        row, host = alone.row, self.store.host
        if row is None or host is None or self.swap is Swap.COPY:
            return False
        self._entrance.stays_far(row)  # what goes below now would only be in the way again
        count = self._spill_blocks()
        until = time.monotonic() + _ROOM_SECONDS
        while not self.store.spill(row, count):
            if time.monotonic() > until or not self.store.may_spill(row):
                return False
            if not self._entrance.end_loads() and not host.evict(count):
                # All of it is on its way to the cold tier just now, or somebody else's.
                time.sleep(0.01)
        return True

    def _chunks(self, budget: int) -> tuple[Chunk, ...]:
        """Parts of prompts for this step, oldest sequence first, with room for their KV."""
        chunks: list[Chunk] = []
        for sequence in list(self._running.prefilling):
            row = sequence.row
            if budget <= 0 or row is None:
                continue
            start = int(self.store.lengths[row])
            count = self._reserve_chunk(sequence, row, min(budget, int(self.counts[row]) - start))
            if not count:
                break
            chunks.append(Chunk(sequence, row, start, count, start + count == int(self.counts[row])))
            budget -= count
        return tuple(chunks)

    def _reserve_chunk(self, sequence: Sequence, row: int, count: int) -> int:
        """Make room for up to `count` tokens of a row; returns for how many there is."""
        rows = np.array([row], dtype=np.int64)
        while True:
            fits = min(count, self._tokens_that_fit(row))
            if fits > 0:
                try:
                    self.store.reserve(rows, fits)
                except CapacityError:
                    fits = 0
                else:
                    return fits
            if not self._make_room(for_chunk_of=sequence):
                if self.num_running == 1:
                    self._give_up(sequence)
                return 0

    def _tokens_that_fit(self, row: int) -> int:
        """Tokens that a row can take with the blocks it has and those that are available."""
        size = self.store.layout.block_size
        blocks = int(self.store.table.counts[row]) + self.store.available_blocks
        return blocks * size - int(self.store.lengths[row])
