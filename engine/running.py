"""The sequences that have a row of the block table, as arrays over rows.

So a step that only decodes costs a few array operations, not a loop over sequences.
"""

from __future__ import annotations

from bisect import insort

import numpy as np
import numpy.typing as npt

from ..kvstore.store import TieredStore
from .preemption import Candidates, advised_weight
from .sequence import Sequence, SequenceState
from .step import Rows

__all__ = ["RunningSequences"]


class RunningSequences:
    """Who has which row, and how each goes on.

    Args:
        store: whose rows they are.
        max_sequences: rows.
        max_tokens: tokens of one sequence, prompt and output.

    Attributes:
        tokens: int32 [rows, max_tokens], all tokens of the sequences that have a row.
        counts: int64 [rows], how many of them are known.
        owners: int64 [rows], ids of the sequences that have them; of the last one where none has.
        decoding: int64, rows that get one token a step, ascending.
        prefilling: sequences whose prompts are computed, by priority and in the order of arrival: no chunk of
            one takes the room of a chunk before it.
        arriving: by row, sequences whose blocks are copied up before they take part in steps.
    """

    def __init__(self, store: TieredStore, max_sequences: int, max_tokens: int) -> None:
        self._store = store
        self._max_tokens = max_tokens
        # Zeroed by the allocator: pages that no sequence reaches are never touched.
        self.tokens = np.zeros((max_sequences, max_tokens), dtype=np.int32)
        self.counts = np.zeros(max_sequences, dtype=np.int64)
        self.owners = np.full(max_sequences, -1, dtype=np.int64)
        self.decoding: Rows = np.empty(0, dtype=np.int64)
        self.prefilling: list[Sequence] = []
        self.arriving: dict[int, Sequence] = {}
        self._limits = np.zeros(max_sequences, dtype=np.int64)
        self._stops = np.full((max_sequences, 1), -1, dtype=np.int32)
        self._priorities = np.zeros(max_sequences, dtype=np.int64)
        self._weights = np.ones(max_sequences, dtype=np.float64)
        self._ends = np.zeros(max_sequences, dtype=np.int64)
        """Tokens at which callers said that the sequences end; 0: they did not."""
        self._finishing: set[int] = set()
        """Rows of which they did."""
        self._entered = np.zeros(max_sequences, dtype=np.int64)
        self._sequences: list[Sequence | None] = [None] * max_sequences
        self._computing: dict[bytes, int] = {}
        """Prefix hashes of blocks that prefilling sequences are about to compute, and whose they are."""

    def __len__(self) -> int:
        return len(self.decoding) + len(self.prefilling) + len(self.arriving)

    @property
    def awake(self) -> int:
        """Sequences that take part in steps."""
        return len(self.decoding) + len(self.prefilling)

    @property
    def rows(self) -> Rows:
        """int64: the rows of all of them."""
        others = [one.row for one in self.prefilling if one.row is not None]
        return np.concatenate([self.decoding, np.array([*others, *self.arriving], dtype=np.int64)])

    @property
    def sequences(self) -> list[Sequence]:
        """All of them."""
        decoding = [self.at(row) for row in self.decoding.tolist()]
        return [*decoding, *self.prefilling, *self.arriving.values()]

    def at(self, row: int) -> Sequence:
        """The sequence that has a row.

        Raises:
            LookupError: none has it.
        """
        sequence = self._sequences[row]
        if sequence is None:
            raise LookupError(f"row {row} has no sequence")
        return sequence

    def tokens_of(self, sequence: Sequence) -> npt.NDArray[np.int32]:
        """All tokens known of a sequence, int32; a view that the next step may outdate."""
        if sequence.row is None:
            return sequence.tokens
        return self.tokens[sequence.row, : self.counts[sequence.row]]

    def computes(self, name: bytes) -> bool:
        """Whether a prompt that is being computed has this block, and it is not there yet."""
        return name in self._computing

    # Coming and going

    def enter(self, sequence: Sequence, row: int, step: int) -> None:
        """A sequence was given a row; it takes part in steps from `start` on.

        Args:
            step: the number of the step that is put together.
        """
        count = len(sequence.tokens)
        sequence.row = row
        self._sequences[row] = sequence
        self.owners[row] = sequence.id
        self.tokens[row, :count] = sequence.tokens
        self.counts[row] = count
        self._limits[row] = min(self._max_tokens, sequence.num_prompt + sequence.params.max_tokens)
        self._priorities[row] = sequence.priority
        self.advise(sequence)
        self._entered[row] = step
        stops = sequence.stop_ids
        if len(stops) > self._stops.shape[1]:
            wider = np.full((len(self._stops), len(stops)), -1, dtype=np.int32)
            wider[:, : self._stops.shape[1]] = self._stops
            self._stops = wider
        self._stops[row] = -1
        self._stops[row, : len(stops)] = stops
        sequence.state = SequenceState.ARRIVING
        self.arriving[row] = sequence

    def advise(self, sequence: Sequence) -> None:
        """The advice on a sequence that has a row is another one."""
        if (row := sequence.row) is None:
            return
        self._weights[row] = advised_weight(sequence.preemptions, sequence.retention)
        self._ends[row] = sequence.ends_at
        (self._finishing.add if sequence.ends_at else self._finishing.discard)(row)

    def start(self, sequence: Sequence, row: int, step: int) -> None:
        """A sequence that entered takes part in steps from now on: the one with this number is the first."""
        del self.arriving[row]
        self._entered[row] = step
        length, count = int(self._store.lengths[row]), int(self.counts[row])
        if length == count - 1 and count > sequence.num_prompt:
            sequence.state = SequenceState.DECODING
            self.decoding = np.sort(np.append(self.decoding, row))
            return
        sequence.state = SequenceState.PREFILLING
        if sequence.prompt is not None:
            computing = sequence.prompt.hashes[length // self._store.layout.block_size :]
            self._computing.update(dict.fromkeys(computing, sequence.id))
        insort(self.prefilling, sequence, key=lambda other: (-other.priority, other.id))

    def decode(self, sequences: list[Sequence]) -> None:
        """The prompts of these are through."""
        for sequence in sequences:
            self._end_prefill(sequence)
            sequence.state = SequenceState.DECODING
        rows = [sequence.row for sequence in sequences if sequence.row is not None]
        self.decoding = np.sort(np.append(self.decoding, rows).astype(np.int64))

    def leave(self, sequence: Sequence, row: int) -> None:
        """A sequence gives up its row, and keeps its tokens."""
        sequence.tokens = self.tokens_of(sequence).copy()
        if self.arriving.pop(row, None) is None:
            if sequence.state is SequenceState.DECODING:
                self.decoding = self.decoding[self.decoding != row]
            else:
                self._end_prefill(sequence)
        sequence.row = None
        self._sequences[row] = None
        self._finishing.discard(row)

    def _end_prefill(self, sequence: Sequence) -> None:
        self.prefilling.remove(sequence)
        for name in sequence.prompt.hashes if sequence.prompt is not None else ():
            if self._computing.get(name) == sequence.id:
                del self._computing[name]

    # Steps

    def take(
        self, rows: Rows, sampled: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Add a sampled token to each of these rows.

        Returns:
            bool [n], who met a stop token, and the places of those that are at their end.
        """
        counts = self.counts[rows]
        self.tokens[rows, counts] = sampled
        counts += 1
        self.counts[rows] = counts
        stopped: npt.NDArray[np.bool_] = (self._stops[rows] == sampled[:, None]).any(axis=1)
        return stopped, (stopped | (counts >= self._limits[rows])).nonzero()[0]

    def remaining(self, rows: Rows) -> npt.NDArray[np.int64]:
        """Tokens that these rows have to go at most, as far as is known, int64 [n]."""
        counts, limits = self.counts[rows], self._limits[rows]
        if self._finishing:
            # Who goes on past the end that was told is taken to go on to its limit.
            ends = self._ends[rows]
            limits = np.where(ends > counts, np.minimum(ends, limits), limits)
        left: npt.NDArray[np.int64] = limits - counts
        return left

    def candidates(self, rows: Rows, step: int) -> Candidates:
        """What these rows would cost, asleep; `step`: the number of the one that is put together."""
        return Candidates(
            rows=rows,
            ids=self.owners[rows],
            priorities=self._priorities[rows],
            lengths=self._store.lengths[rows],
            blocks=self._store.near_blocks(rows),
            remaining=self.remaining(rows),
            steps=step - self._entered[rows],
            weights=self._weights[rows],
        )
