"""Who waits for a row, and how they come to take part in steps.

New sequences and sleepers stand in one order. Who is next comes in when the device tier has room for all of
it, what it has in host memory counted: that is read in place at once where the step's budget allows it, or
copied up first beside the steps of the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from itertools import chain, islice
from typing import Final

import numpy as np

from ..kvstore.calls import LoadCalls
from ..kvstore.store import Install, NamedPrompt, Opened, TieredStore
from .gate import LoadGate
from .line import Line
from .pace import Pace
from .preemption import LEAST_STEPS
from .running import RunningSequences
from .scheduler_stats import SchedulerStats
from .sequence import CachedTokens, Sequence, SequenceState
from .step import Rows
from .turns import LEAST_STRETCH
from .waking import HostBudget, Swap

__all__ = ["Entrance"]

# How many waiting sequences are looked at in a step: the first of them may wait for their blocks.
_LOOK_AHEAD: Final = 8
# What one copy brings up, so that a long sequence can join the steps before the last of it is there.
_PIECE_BYTES: Final = 64 << 20


class Entrance:
    """Lets sequences in.

    Args:
        store: where the KV is.
        running: who has a row.
        stats: what is counted.
        pace: how long steps take.
        swap: what becomes of sequences whose KV is not in the device tier.
        load_seconds: how long a sequence waits for blocks from the cold tier before it is computed.
        gate: whether blocks come up from there only where that ends sooner than computing them.
        step_tokens: tokens that a step may compute.
        give_up: ends a sequence that never can have room.

    Attributes:
        waiting: sequences that never had a row.
        asleep: those that were put to sleep to make room.
        blocked: who is next and had no room, and how many blocks are to be available for it.
    """

    def __init__(
        self,
        store: TieredStore,
        running: RunningSequences,
        stats: SchedulerStats,
        pace: Pace,
        *,
        swap: Swap,
        load_seconds: float,
        gate: bool,
        step_tokens: int,
        give_up: Callable[[Sequence], None],
    ) -> None:
        self.waiting = Line()
        self.asleep = Line()
        self.blocked: tuple[Sequence, int] | None = None
        self._store = store
        self._running = running
        self._stats = stats
        self._swap = swap
        self._load_seconds = load_seconds
        self._step_tokens = step_tokens
        self._give_up = give_up
        self._budget = HostBudget(swap, store, running, pace)
        self._gate = LoadGate(store, closed=gate)
        self._came_far: set[int] = set()
        """Rows that were attached to far blocks, and have not been in a step since."""
        self._room_came = True
        """Whether trying to let somebody in may have another outcome than last time."""
        self._least_blocks = -(-LEAST_STEPS // store.layout.block_size)
        """Blocks that a sequence may want in the steps that it is to have before it sleeps again."""
        self._piece = max(1, _PIECE_BYTES // store.layout.block_bytes)
        self._drained: tuple[Sequence, int] | None = None
        """Who waits for all that run to be gone, and the number of the step by which they are."""
        self._copied = 0
        """Blocks that began to come up since the last step."""

    # Who waits

    def add(self, sequence: Sequence) -> None:
        """A new sequence waits."""
        if sequence.lookup is None:
            self.name(sequence)
        self.waiting.add(sequence, sequence.arrived_at)
        self._room_came = True

    def add_asleep(self, sequence: Sequence, since: float) -> None:
        """A sequence that was put to sleep waits, as one that came then (seconds on the monotonic clock)."""
        self.asleep.add(sequence, since)
        self._room_came = True

    def left(self, row: int) -> None:
        """A row was given up: there may be room."""
        self._came_far.discard(row)
        self._room_came = True

    def stays_far(self, row: int) -> None:
        """What this row has in host memory is not to come near with its next step."""
        self._came_far.discard(row)

    def end_loads(self) -> bool:
        """Let go of what came up, or comes up, for those that wait; whether there was any."""
        loading = [one for one in chain(self.asleep, self.waiting) if one.load is not None]
        for sequence in loading:
            sequence.end_load()
        return bool(loading)

    def wait(self, seconds: float) -> bool:
        """Wait, `seconds` at most, for copies, a load or the record of a session; whether there is any."""
        if self._running.arriving:
            self._store.wait_for_promotion(seconds)
            return True
        for sequence in chain(islice(self.asleep, _LOOK_AHEAD), islice(self.waiting, _LOOK_AHEAD)):
            if sequence.lookup is not None and not sequence.lookup.done():
                sequence.lookup.wait(seconds)
                return True
            if sequence.load is not None and sequence.loading():
                sequence.load.wait(seconds)
                return True
        return False

    # Who comes in

    def begin_step(self) -> None:
        """A step is put together."""
        self._gate.settle()
        self._budget.begin_step()

    def take_copied(self) -> int:
        """Blocks that began to come up since the last call."""
        copied, self._copied = self._copied, 0
        return copied

    def name(self, sequence: Sequence) -> None:
        sequence.prompt = self._store.name_prompt(
            sequence.tokens, root=sequence.root, partial_at=sequence.partial_at
        )

    def enter(self, sequence: Sequence, row: int) -> None:
        """A sequence was given a row, with the KV that was found."""
        sequence.end_load()
        self._running.enter(sequence, row, self._stats.steps)

    def start(self, sequence: Sequence, row: int) -> None:
        """A sequence that entered takes part in steps from now on."""
        if self._store.far_blocks(row):
            self._came_far.add(row)
        self._running.start(sequence, row, self._stats.steps)

    def headroom(self) -> int:
        """Device blocks that the running sequences may want in a moment."""
        return len(self._running) + 1

    def join(self) -> None:
        """Let those take part in steps whose blocks have come, or are near enough for this step's budget."""
        for row, sequence in list(self._running.arriving.items()):
            if not self._store.brings(row) or (
                self._running.awake and self._budget.take(self._store.far_to_read(row))
            ):
                self.start(sequence, row)

    def let_in(self) -> None:
        """Give rows to those that wait, in their order, while there is room for them to go on.

        Who has to wait for blocks from the cold tier lets others pass, who has to wait for room does not:
        small ones would pass a large one for ever. Where that one is larger than the device tier, and waits
        until nobody runs, those pass that end before then in any case.
        """
        if not self._room_came:
            return
        self._let_in_by_order()
        if self.blocked is not None and self.blocked[1] > self._store.pool.capacity:
            self._let_pass(*self.blocked)

    def _let_in_by_order(self) -> None:
        self.blocked = None
        while (sequence := self._next()) is not None:
            if not self._store.table.free_rows:
                self._no_room(sequence, 0)
                return
            asleep = sequence.state is SequenceState.ASLEEP
            if not (self._wake(sequence) if asleep else self._admit(sequence)):
                return

    def _next(self) -> Sequence | None:
        """Who is to be let in next; None where nobody is, or no more should come up at once."""
        if (
            self._running.arriving
            and self._running.awake
            and self._blocks_arriving() >= self._budget.copies_at_once()
        ):
            return None
        asleep = self.asleep.first
        waiting = self._next_to_admit() if self.waiting else None
        if asleep is None or (asleep.load is not None and asleep.loading()):
            return waiting
        if waiting is None or self.asleep.place_of(asleep) <= self.waiting.place_of(waiting):
            return asleep
        return waiting

    def _let_pass(self, large: Sequence, wanted: int) -> None:
        """Give rows to new sequences that end before `large` can begin (backfilling: Lifka, JSSPP'95).

        By when those that run now are gone is reckoned once, from what they have to go at most and from the
        turns that they take; who passes is to be gone by then, too, so nobody who comes keeps `large` waiting
        for longer.
        """
        if self._drained is None or self._drained[0] is not large:
            self._drained = large, self._stats.steps + self._steps_until_gone()
        passed = {large.id}
        rows = self._running.rows
        # Prompts are computed one after the other: so many tokens come before those of who enters now.
        ahead = int(np.maximum(self._running.counts[rows] - self._store.lengths[rows] - 1, 0).sum())
        while self._store.table.free_rows:
            sequence = self._next_to_admit(passed)
            if sequence is None:
                break
            passed.add(sequence.id)
            prompts = ahead + len(sequence.tokens)
            steps = sequence.params.max_tokens + -(-prompts // self._step_tokens)
            if self._stats.steps + steps <= self._drained[1] and self._admit(sequence):
                ahead = prompts
        self._no_room(large, wanted)

    def _steps_until_gone(self) -> int:
        """Steps in which all that run now have ended, or have had their stretch (`turns`), at most."""
        running = self._running.candidates(self._running.rows, self._stats.steps)
        left = running.remaining
        if self._swap is Swap.ATTEND and self._store.host is not None:
            left = np.minimum(left, np.maximum(LEAST_STRETCH - running.steps, 0))
        return int(left.max(initial=0))

    def _blocks_arriving(self) -> int:
        return sum(self._store.far_blocks(row) for row in self._running.arriving)

    def _wake(self, sequence: Sequence) -> bool:
        """Let a sleeper run again, if the device tier has room for it to go on; whether it runs."""
        sleeping = sequence.sleeping
        if sleeping is None:
            raise LookupError(f"sequence {sequence.id} is asleep without its KV")
        if len(self._running):
            # What waking holds in the device tier again is not there for the others.
            wanted = self._store.missing_blocks(sleeping) + self._store.cached_blocks(sleeping)
            wanted += self.headroom() * (1 + self._least_blocks)
            if wanted > self._store.available_blocks:
                self._no_room(sequence, wanted)
                return False
        if sequence.load_until is None:
            self._start_load(sequence, self._gate.start_sleeping(sleeping))
        if sequence.loading():
            return True
        # What was lost is computed again, which wants room as a new prompt does.
        if not self._enter_if_room(sequence, self._store.wake(sleeping)):
            return False
        self.asleep.remove(sequence)
        sequence.sleeping = None
        return True

    def _admit(self, sequence: Sequence) -> bool:
        """Let a new sequence run, if there is room for its prompt; whether it runs."""
        if sequence.prompt is None:
            raise LookupError(f"sequence {sequence.id} has no named prompt")
        opened = self._store.open_named(sequence.prompt)
        loaded = sequence.load.loaded * self._store.layout.block_size if sequence.load else 0
        if not self._enter_if_room(sequence, opened):
            return False
        from_cold = min(loaded, opened.host)
        sequence.cached = CachedTokens(opened.device, opened.host - from_cold, opened.cold + from_cold)
        self._gate.opened(len(sequence.tokens), opened)
        sequence.scheduled_at = time.monotonic()
        self.waiting.remove(sequence)
        return True

    def _enter_if_room(self, sequence: Sequence, opened: Opened) -> bool:
        """Let a sequence run in its new row; not where it would soon take room from those that run.

        Then the row is closed again, and nobody tries before there is more room. What it has in host memory
        counts as wanted: it is to come near. A sequence that is larger than the device tier runs alone, and
        reads there what does not fit.
        """
        row = opened.row
        new = len(sequence.tokens) - opened.length + 1
        far = self._store.far_to_read(row)
        wanted = far + self._store.blocks_wanted(np.array([row], dtype=np.int64), new) + self.headroom()
        if len(self._running) and wanted > self._store.available_blocks:
            held = self._store.available_blocks
            self._store.close_row(row)
            self._no_room(sequence, wanted + self._store.available_blocks - held)
            return False
        if self._swap is Swap.COPY and far and far + 1 > self._store.available_blocks:
            self._store.close_row(row)
            self._give_up(sequence)
            return False
        self.enter(sequence, row)
        if self._drained is not None and self._drained[0] is sequence:
            self._drained = None
        # Of one that does not fit some is read in place in any case.
        if (self._swap is Swap.ATTEND and wanted > self._store.available_blocks) or self._budget.take(far):
            self._stats.attended += far > 0
            self.start(sequence, row)
        else:
            self._bring_up(sequence, row)
        return True

    def _no_room(self, sequence: Sequence, wanted: int) -> None:
        """It is next, and `wanted` blocks are to be available for it; nobody tries before more are."""
        self.blocked = sequence, wanted
        self._room_came = False

    def _bring_up(self, sequence: Sequence, row: int) -> None:
        """Start copying up what a sequence has in host memory; it joins the steps when enough is there."""
        self._stats.copied_first += 1
        while started := self._store.promote(row, self._piece):
            self._copied += started
            self._stats.copied += started
        if not self._store.brings(row):
            self.start(sequence, row)

    def _next_to_admit(self, passed: Collection[int] = ()) -> Sequence | None:
        """The first waiting sequence that need not wait for its blocks; loads for the first few start here.

        Those with an id in `passed` are passed over.

        Blocks come from the cold tier, or from a sequence that is computing the same prompt right now:
        computing them twice would take longer than waiting.
        """
        ready = None
        may_load = True
        for sequence in islice(self.waiting, _LOOK_AHEAD):
            if sequence.lookup is not None and sequence.lookup.done():
                sequence.partial_at = sequence.lookup.slept_at()
                sequence.lookup = None
                self.name(sequence)
            if sequence.prompt is None:
                continue
            if sequence.load_until is None and may_load:
                # Where one has no room to load, no later one starts: small ones would pass it for ever.
                may_load = self._may_load(sequence.prompt)
                if may_load:
                    self._start_load(sequence, self._gate.start(sequence.prompt))
            if (
                ready is None
                and sequence.id not in passed
                and sequence.load_until is not None
                and not sequence.loading()
            ):
                resident = self._store.resident_blocks(sequence.prompt)
                missing = sequence.prompt.hashes[resident : sequence.prompt.usable]
                if not missing or not self._running.computes(missing[0]):
                    ready = sequence
        return ready

    def _may_load(self, prompt: NamedPrompt) -> bool:
        """Whether host memory has room for one more load: what has come up stays until it is used."""
        if self._store.host is None:
            return True
        loading = sum(
            sequence.prompt.usable
            for sequence in islice(self.waiting, _LOOK_AHEAD)
            if sequence.prompt is not None and sequence.load is not None
        )
        return not loading or loading + prompt.usable <= self._store.host.capacity // 2

    def _start_load(self, sequence: Sequence, load: LoadCalls | None) -> None:
        sequence.load = load
        sequence.load_until = time.monotonic() + self._load_seconds

    def bring_near(self, readers: Rows) -> Install | None:
        """Have the step of these rows bring near what it reads far, as far as that takes nothing from anyone.

        Once for each row that came to far blocks: to try again whenever a block is free would take from the
        others what they are about to want. All of its far blocks cross the bus in this step in any case.
        """
        if not self._came_far:
            return None
        came = np.array([row for row in readers.tolist() if row in self._came_far], dtype=np.int64)
        if not len(came):
            return None
        self._came_far.difference_update(came.tolist())
        own = self._store.blocks_wanted(came, self._running.counts[came] - self._store.lengths[came] + 1)
        return self._store.start_install(came, self._store.available_blocks - own - self.headroom(), readers)
