"""Which sequences run in the next step, and what becomes of its tokens.

Continuous batching with chunked prefill (Yu et al., Orca, OSDI'22; Agrawal et al., Sarathi-Serve, OSDI'24):
every decoding sequence gets one token a step, and what is left of the step's token budget goes to
chunks of prompts, oldest first. When the device tier is full the youngest sequence is put to sleep: its
KV goes to host memory, and it wakes before anyone new is admitted.

State of running sequences lies in arrays over rows of the block table, so that a step that only decodes
costs a few array operations, not a loop over sequences.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt

from ..kvstore.calls import LoadCalls
from ..kvstore.store import Install, NamedPrompt, Opened, TieredStore
from ..tiers.errors import CapacityError, RequestError
from .gate import LoadGate
from .sequence import CachedTokens, FinishReason, Sequence, SequenceState

__all__ = ["Chunk", "Scheduler", "Step"]

_log = logging.getLogger(__name__)

Rows = npt.NDArray[np.int64]

# How many waiting sequences are looked at in a step: the first of them may wait for their blocks.
_LOOK_AHEAD: Final = 8
# How long a sequence that cannot go on waits for room in host memory that may come: a write to the cold tier
# may take less.
_ROOM_SECONDS: Final = 10.0


@dataclass(frozen=True)
class Chunk:
    """Tokens ``[start, start + count)`` of a sequence whose KV this step computes.

    `last`: the last of them is the newest token known, so its logits are wanted.
    """

    sequence: Sequence
    row: int
    start: int
    count: int
    last: bool


@dataclass(frozen=True)
class Step:
    """What one forward pass computes.

    Attributes:
        rows: int64 [n], the rows that decode, ascending.
        lengths: int64 [n], tokens of each whose KV is there: the position of the token that runs.
        tokens: int32 [n], these tokens.
        chunks: the prompts' parts.
        install: what the step copies to the device tier as it reads it, or None.
    """

    rows: Rows
    lengths: Rows
    tokens: npt.NDArray[np.int32]
    chunks: tuple[Chunk, ...]
    install: Install | None = None

    @property
    def sampled_rows(self) -> Rows:
        """int64: the rows that get a token, in the order of the logits."""
        ends = [chunk.row for chunk in self.chunks if chunk.last]
        return np.concatenate([self.rows, np.array(ends, dtype=np.int64)]) if ends else self.rows


class Scheduler:
    """Decides each step over one `TieredStore`.

    Args:
        store: where the KV is.
        max_sequences: rows of the block table.
        max_tokens: tokens of one sequence, prompt and output.
        step_tokens: tokens a step may compute, decoding ones counted.
        load_seconds: how long a sequence waits for blocks from the cold tier before it is computed.
        gate: whether blocks come up from there only where that ends sooner than computing them.
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
    ) -> None:
        self.store = store
        self.max_tokens = max_tokens
        self.step_tokens = step_tokens
        self.load_seconds = load_seconds
        # Zeroed by the allocator: pages that no sequence reaches are never touched.
        self.tokens = np.zeros((max_sequences, max_tokens), dtype=np.int32)
        """int32 [rows, max_tokens]: all tokens of the sequences that have a row."""
        self.counts = np.zeros(max_sequences, dtype=np.int64)
        """int64 [rows]: how many of them are known."""
        self.owners = np.full(max_sequences, -1, dtype=np.int64)
        """int64 [rows]: ids of the sequences that have them; of the last one where none has."""
        self._limits = np.zeros(max_sequences, dtype=np.int64)
        self._stops = np.full((max_sequences, 1), -1, dtype=np.int32)
        self._sequences: list[Sequence | None] = [None] * max_sequences
        self._waiting: deque[Sequence] = deque()
        self._asleep: deque[Sequence] = deque()
        self._held: list[Sequence] = []
        """Asleep until they are told to go on, whether there is room or not."""
        self._prefilling: list[Sequence] = []
        self._computing: dict[bytes, int] = {}
        """Prefix hashes of blocks that prefilling sequences are about to compute, and whose they are."""
        self._decoding: Rows = np.empty(0, dtype=np.int64)
        self._came_far: set[int] = set()
        """Rows that were attached to far blocks, and have not been in a step since."""
        self._room_came = True
        """Whether trying to admit or to wake may have another outcome than last time."""
        self._given_up: list[Sequence] = []
        self._gate = LoadGate(store, closed=gate)
        self.preemptions = 0

    def __len__(self) -> int:
        """Sequences that are not finished."""
        return len(self._waiting) + len(self._asleep) + len(self._held) + self.num_running

    @property
    def num_running(self) -> int:
        """Sequences that have a row."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        """Sequences that never had a row."""
        return len(self._waiting)

    @property
    def num_asleep(self) -> int:
        """Sequences that were put to sleep to make room."""
        return len(self._asleep)

    @property
    def unfinished(self) -> list[Sequence]:
        """The sequences that are not finished, in the order of arrival."""
        decoding = [self.sequence_at(row) for row in self._decoding.tolist()]
        return sorted(
            [*self._waiting, *self._asleep, *self._held, *self._prefilling, *decoding],
            key=lambda sequence: sequence.id,
        )

    # Coming and going

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        if sequence.lookup is None:
            self._name(sequence)
        self._waiting.append(sequence)
        self._room_came = True

    def _name(self, sequence: Sequence) -> None:
        sequence.prompt = self.store.name_prompt(
            sequence.tokens, root=sequence.root, partial_at=sequence.partial_at
        )

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
        self._enter(twin, row, int(self.store.lengths[row]))

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence wherever it stands. A session's KV sleeps; another's stays cached."""
        if sequence.state is SequenceState.FINISHED:
            return
        if sequence.row is not None:
            self._leave(sequence, keep=sequence.session is not None)
        elif sequence in self._held:
            self._held.remove(sequence)
        elif sequence.state is SequenceState.ASLEEP:
            self._asleep.remove(sequence)
        else:
            self._waiting.remove(sequence)
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
        if sequence in self._held:
            return
        if sequence.row is not None:
            self._leave(sequence, keep=True)
            sequence.state = SequenceState.ASLEEP
        elif sequence.state is SequenceState.ASLEEP:
            self._asleep.remove(sequence)
            sequence.end_load()
        else:
            raise RequestError(
                f"sequence {sequence.id} is {sequence.state.value}; it has nothing to sleep with"
            )
        self._held.append(sequence)

    def holds(self, sequence: Sequence) -> bool:
        """Whether it sleeps until `let_go_on`."""
        return sequence in self._held

    def let_go_on(self, sequence: Sequence) -> None:
        """A sequence that is held wakes when there is room, after those that wait for that already."""
        self._held.remove(sequence)
        self._asleep.append(sequence)
        self._room_came = True

    def tokens_of(self, sequence: Sequence) -> npt.NDArray[np.int32]:
        """All tokens known of a sequence, int32; a view that the next step may outdate."""
        if sequence.row is None:
            return sequence.tokens
        return self.tokens[sequence.row, : self.counts[sequence.row]]

    def sequence_at(self, row: int) -> Sequence:
        """The sequence that has a row.

        Raises:
            LookupError: none has it.
        """
        sequence = self._sequences[row]
        if sequence is None:
            raise LookupError(f"row {row} has no sequence")
        return sequence

    # Schedule, and postprocess

    def schedule(self) -> Step | None:
        """The next step; None where nothing can run now (loads are awaited, or there is no work).

        A sequence that no tier has room for, though it runs alone, ends here: `take_given_up`.
        """
        self._gate.settle()
        # First of all: their slots may be granted to others, and come up for others, by now.
        for row in self.store.take_lost_rows():
            self._put_to_sleep(self.sequence_at(row), keep_tail=False)
        if self._asleep:
            self._wake()
        if self._waiting:
            self._admit()
        self._room_to_decode()
        chunks = self._chunks(self.step_tokens - len(self._decoding)) if self._prefilling else ()
        rows = self._decoding
        if not len(rows) and not chunks:
            return None
        lengths = self.store.lengths[rows]
        install = self._bring_near(rows, chunks) if self._came_far else None
        return Step(rows, lengths, self.tokens[rows, lengths], chunks, install)

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
        if step.install is not None:
            self.store.finish_install()
        if len(step.rows):
            self.store.append(step.rows, step.tokens)
        for chunk in step.chunks:
            tokens = self.tokens[chunk.row, chunk.start : chunk.start + chunk.count]
            self.store.advance(chunk.row, tokens)
            chunk.sequence.computed += chunk.count
        rows = step.sampled_rows
        counts = self.counts[rows]
        self.tokens[rows, counts] = sampled
        counts += 1
        self.counts[rows] = counts
        if step.chunks:
            self._start_decoding(step.chunks)
        stopped = (self._stops[rows] == sampled[:, None]).any(axis=1)
        ended = (stopped | (counts >= self._limits[rows])).nonzero()[0]
        finished = []
        for at in ended.tolist():
            sequence = self.sequence_at(int(rows[at]))
            self.finish(sequence, FinishReason.STOP if stopped[at] else FinishReason.LENGTH)
            finished.append(sequence)
        return finished

    def wait(self, seconds: float) -> None:
        """Wait, `seconds` at most, for the load or the session's record that the next to run needs."""
        for sequence in (*self._asleep, *self._waiting):
            if sequence.lookup is not None and not sequence.lookup.done():
                sequence.lookup.wait(seconds)
                return
            if sequence.load is not None and sequence.loading():
                sequence.load.wait(seconds)
                return
        if self._held:
            time.sleep(seconds)  # who lets them go on says so between two steps

    # Inside

    def _enter(self, sequence: Sequence, row: int, length: int) -> None:
        """A sequence was given a row; the KV of its first `length` tokens is there."""
        count = len(sequence.tokens)
        if self.store.far_blocks(row):
            self._came_far.add(row)
        sequence.row = row
        sequence.end_load()
        self._sequences[row] = sequence
        self.owners[row] = sequence.id
        self.tokens[row, :count] = sequence.tokens
        self.counts[row] = count
        self._limits[row] = min(self.max_tokens, sequence.num_prompt + sequence.params.max_tokens)
        stops = sequence.stop_ids
        if len(stops) > self._stops.shape[1]:
            wider = np.full((len(self._stops), len(stops)), -1, dtype=np.int32)
            wider[:, : self._stops.shape[1]] = self._stops
            self._stops = wider
        self._stops[row] = -1
        self._stops[row, : len(stops)] = stops
        if length == count - 1 and count > sequence.num_prompt:
            sequence.state = SequenceState.DECODING
            self._decoding = np.sort(np.append(self._decoding, row))
        else:
            sequence.state = SequenceState.PREFILLING
            if sequence.prompt is not None:
                computing = sequence.prompt.hashes[length // self.store.layout.block_size :]
                self._computing.update(dict.fromkeys(computing, sequence.id))
            self._prefilling.append(sequence)
            self._prefilling.sort(key=lambda other: other.id)

    def _leave(self, sequence: Sequence, *, keep: bool, keep_tail: bool = True) -> None:
        """Take a sequence's row away; with `keep` its KV sleeps, the partly filled block if `keep_tail`."""
        row = sequence.row
        if row is None:
            return
        sequence.tokens = self.tokens_of(sequence).copy()
        if sequence.state is SequenceState.DECODING:
            self._decoding = self._decoding[self._decoding != row]
        else:
            self._end_prefill(sequence)
        if keep:
            sequence.sleeping = self.store.sleep(row, keep_tail=keep_tail)
        else:
            self.store.close_row(row)
        sequence.row = None
        self._sequences[row] = None
        self._came_far.discard(row)
        self._room_came = True

    def _end_prefill(self, sequence: Sequence) -> None:
        self._prefilling.remove(sequence)
        for name in sequence.prompt.hashes if sequence.prompt is not None else ():
            if self._computing.get(name) == sequence.id:
                del self._computing[name]

    def _start_decoding(self, chunks: tuple[Chunk, ...]) -> None:
        now = time.monotonic()
        ready = [chunk for chunk in chunks if chunk.last]
        for chunk in ready:
            sequence = chunk.sequence
            self._end_prefill(sequence)
            sequence.state = SequenceState.DECODING
            if sequence.first_token_at is None:
                sequence.first_token_at = now
        self._decoding = np.sort(np.append(self._decoding, [chunk.row for chunk in ready]).astype(np.int64))

    def _room_to_decode(self) -> None:
        """See that each decoding row has room for its next token; who does not fit is put to sleep."""
        while len(self._decoding):
            try:
                self.store.reserve(self._decoding, 1)
            except CapacityError:
                if not self._make_room():
                    self._give_up(self.sequence_at(int(self._decoding[0])))
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

    def _make_room(self, younger_than: Sequence | None = None) -> bool:
        """Free device blocks: put the youngest sequence to sleep, or the last one's oldest blocks below.

        Args:
            younger_than: only sequences younger than this one may be put to sleep.

        Returns:
            whether there is more room than before.
        """
        running = [self.sequence_at(row) for row in self._decoding.tolist()] + self._prefilling
        youngest = max(running, key=lambda sequence: sequence.id)
        if len(running) == 1:
            return self._spill(youngest)
        if younger_than is not None and youngest.id <= younger_than.id:
            return False
        self._put_to_sleep(youngest)
        return True

    def _put_to_sleep(self, sequence: Sequence, *, keep_tail: bool = True) -> None:
        """Take a running sequence's row away until `_wake`."""
        self._leave(sequence, keep=True, keep_tail=keep_tail)
        sequence.state = SequenceState.ASLEEP
        sequence.preemptions += 1
        self.preemptions += 1
        self._asleep.appendleft(sequence)

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
        if row is None or host is None:
            return False
        self._came_far.discard(row)  # what goes below now would only be in the way again
        count = self._spill_blocks()
        until = time.monotonic() + _ROOM_SECONDS
        while not self.store.spill(row, count):
            if time.monotonic() > until or not self.store.may_spill(row):
                return False
            loading = [one for one in (*self._asleep, *self._waiting) if one.load is not None]
            for sequence in loading:
                sequence.end_load()
            if not loading and not host.evict(count):
                # All of it is on its way to the cold tier just now, or somebody else's.
                time.sleep(0.01)
        return True

    def _headroom(self) -> int:
        """Device blocks that the running sequences may want in a moment."""
        return self.num_running + 1

    def _wake(self) -> None:
        """Wake sleepers, longest asleep first, while the device tier has room for them to go on."""
        while self._asleep and self.store.table.free_rows and self._room_came:
            sequence = self._asleep[0]
            sleeping = sequence.sleeping
            if sleeping is None:
                raise LookupError(f"sequence {sequence.id} is asleep without its KV")
            # What waking holds in the device tier again is not there for the others.
            left = self.store.available_blocks - self.store.cached_blocks(sleeping)
            if self.num_running and left < 2 * self._headroom():
                return
            if sequence.load_until is None:
                self._start_load(sequence, self._gate.start_sleeping(sleeping))
            if sequence.loading():
                return
            # What was lost is computed again, which wants room as a new prompt does.
            if not self._enter_if_room(sequence, self.store.wake(sleeping)):
                return
            self._asleep.popleft()
            sequence.sleeping = None

    def _admit(self) -> None:
        """Give waiting sequences a row, in the order of arrival, while there is room for their prompts."""
        while self._waiting and self.store.table.free_rows and not self._asleep and self._room_came:
            sequence = self._next_to_admit()
            if sequence is None or sequence.prompt is None:
                return
            opened = self.store.open_named(sequence.prompt)
            loaded = sequence.load.loaded * self.store.layout.block_size if sequence.load else 0
            if not self._enter_if_room(sequence, opened):
                return
            from_cold = min(loaded, opened.host)
            sequence.cached = CachedTokens(opened.device, opened.host - from_cold, opened.cold + from_cold)
            self._gate.opened(len(sequence.tokens), opened)
            sequence.scheduled_at = time.monotonic()
            self._waiting.remove(sequence)

    def _enter_if_room(self, sequence: Sequence, opened: Opened) -> bool:
        """Let a sequence run in its new row; not where it would soon take room from those that run.

        Then the row is closed again, and nobody tries before there is more room.
        """
        row = np.array([opened.row], dtype=np.int64)
        wanted = self.store.blocks_wanted(row, len(sequence.tokens) - opened.length + 1)
        if self.num_running and wanted + self._headroom() > self.store.available_blocks:
            self.store.close_row(opened.row)
            self._room_came = False
            return False
        self._enter(sequence, opened.row, opened.length)
        return True

    def _next_to_admit(self) -> Sequence | None:
        """The first waiting sequence that need not wait for its blocks; loads for the first few start here.

        Blocks come from the cold tier, or from a sequence that is computing the same prompt right now:
        computing them twice would take longer than waiting.
        """
        ready = None
        may_load = True
        for sequence in islice(self._waiting, _LOOK_AHEAD):
            if sequence.lookup is not None and sequence.lookup.done():
                sequence.partial_at = sequence.lookup.slept_at()
                sequence.lookup = None
                self._name(sequence)
            if sequence.prompt is None:
                continue
            if sequence.load_until is None and may_load:
                # Where one has no room to load, no later one starts: small ones would pass it for ever.
                may_load = self._may_load(sequence.prompt)
                if may_load:
                    self._start_load(sequence, self._gate.start(sequence.prompt))
            if ready is None and sequence.load_until is not None and not sequence.loading():
                resident = self.store.resident_blocks(sequence.prompt)
                missing = sequence.prompt.hashes[resident : sequence.prompt.usable]
                if not missing or missing[0] not in self._computing:
                    ready = sequence
        return ready

    def _may_load(self, prompt: NamedPrompt) -> bool:
        """Whether host memory has room for one more load: what has come up stays until it is used."""
        if self.store.host is None:
            return True
        loading = sum(
            sequence.prompt.usable
            for sequence in islice(self._waiting, _LOOK_AHEAD)
            if sequence.prompt is not None and sequence.load is not None
        )
        return not loading or loading + prompt.usable <= self.store.host.capacity // 2

    def _start_load(self, sequence: Sequence, load: LoadCalls | None) -> None:
        sequence.load = load
        sequence.load_until = time.monotonic() + self.load_seconds

    def _bring_near(self, rows: Rows, chunks: tuple[Chunk, ...]) -> Install | None:
        """Have the step bring near what it reads far, as far as that takes nothing from anyone.

        Once for each row that came to far blocks: to try again whenever a block is free would take from the
        others what they are about to want. All of its far blocks cross the bus in this step in any case.
        """
        readers = np.concatenate([rows, np.array([chunk.row for chunk in chunks], dtype=np.int64)])
        came = np.array([row for row in readers.tolist() if row in self._came_far], dtype=np.int64)
        if not len(came):
            return None
        self._came_far.difference_update(came.tolist())
        own = self.store.blocks_wanted(came, self.counts[came] - self.store.lengths[came] + 1)
        return self.store.start_install(came, self.store.available_blocks - own - self._headroom(), readers)

    def _chunks(self, budget: int) -> tuple[Chunk, ...]:
        """Parts of prompts for this step, oldest sequence first, with room for their KV."""
        chunks: list[Chunk] = []
        for sequence in list(self._prefilling):
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
            if not self._make_room(younger_than=sequence):
                if self.num_running == 1:
                    self._give_up(sequence)
                return 0

    def _tokens_that_fit(self, row: int) -> int:
        """Tokens that a row can take with the blocks it has and those that are available."""
        size = self.store.layout.block_size
        blocks = int(self.store.table.counts[row]) + self.store.available_blocks
        return blocks * size - int(self.store.lengths[row])
