"""Runs a step: turns it into tensors, runs the model over the store's blocks, samples."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import torch

from ..kvstore.store import TieredStore
from .model import CausalLM, ForwardBatch
from .sampler import UNLIMITED, SamplingBatch, sample
from .scheduler import Scheduler, Step
from .sequence import Sequence

__all__ = ["Runner"]


class Runner:
    """A model over one store's block tables.

    Args:
        model: on the store's device.
        store: where the KV is.
    """

    def __init__(self, model: CausalLM, store: TieredStore) -> None:
        self._model = model
        self._store = store
        self._device = torch.device(store.device)
        self._mirror: torch.Tensor | None = None
        self._columns = _SamplingColumns(len(store.lengths))

    @torch.inference_mode()
    def run(self, step: Step, scheduler: Scheduler) -> npt.NDArray[np.int32]:
        """Compute the step's KV and sample a token for each of `Step.sampled_rows`; int32, in their order.

        Waits for the device: when this returns, the step's work is done.
        """
        logits = self._model(self._batch(step, scheduler.tokens), self._store.layout)
        rows = step.sampled_rows
        if not len(rows):
            self._settle()
            return np.empty(0, dtype=np.int32)
        sampled = sample(logits, self._columns.batch(rows, scheduler))
        return sampled.cpu().numpy().astype(np.int32)

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _batch(self, step: Step, all_tokens: npt.NDArray[np.int32]) -> ForwardBatch:
        size = self._store.layout.block_size
        chunks = step.chunks
        decoding = len(step.rows)
        tokens = [step.tokens]
        positions = [step.lengths]
        rows = [step.rows]
        for chunk in chunks:
            stop = chunk.start + chunk.count
            tokens.append(all_tokens[chunk.row, chunk.start : stop])
            positions.append(np.arange(chunk.start, stop, dtype=np.int64))
            rows.append(np.full(chunk.count, chunk.row, dtype=np.int64))
        places = np.concatenate(positions)
        columns = places // size
        offsets = places - columns * size
        words = self._store.table.words
        chunk_rows = np.array([chunk.row for chunk in chunks], dtype=np.int64)
        chunk_lengths = np.array([chunk.start + chunk.count for chunk in chunks], dtype=np.int32)
        bounds = list(itertools.accumulate((chunk.count for chunk in chunks), initial=0))
        ends = [decoding + bound - 1 for chunk, bound in zip(chunks, bounds[1:], strict=True) if chunk.last]
        lengths = (step.lengths + 1).astype(np.int32)
        table = self._table()
        return ForwardBatch(
            tokens=self._tensor(np.concatenate(tokens).astype(np.int64)),
            positions=self._tensor(places),
            addresses=self._tensor(words[np.concatenate(rows), columns]),
            offsets=self._tensor(offsets),
            num_decode=decoding,
            decode_table=self._rows(table, step.rows, int(lengths.max(initial=0))),
            decode_lens=self._tensor(lengths),
            prefill_table=self._rows(table, chunk_rows, int(chunk_lengths.max(initial=0))),
            prefill_lens=self._tensor(chunk_lengths),
            cu_seqlens_q=self._tensor(np.array(bounds, dtype=np.int32)),
            logits_at=self._tensor(np.array([*range(decoding), *ends], dtype=np.int64)),
        )

    def _rows(self, table: torch.Tensor, rows: npt.NDArray[np.int64], length: int) -> torch.Tensor:
        """The rows' words as far as `length` tokens need: a view where the rows are the first, in order."""
        width = self._store.layout.blocks_for(length)
        count = len(rows)
        # Chunks come in the order of arrival, which need not be that of their rows.
        if np.array_equal(rows, np.arange(count)):
            return table[:count, :width]
        return table[self._tensor(rows), :width]

    def _table(self) -> torch.Tensor:
        """The block table on the device. On a CPU it is the table itself, elsewhere a mirror of it."""
        table = self._store.table
        if self._device.type == "cpu":
            return torch.from_numpy(table.words)
        rows, columns, words = table.take_changes()
        if self._mirror is None or self._mirror.shape != table.words.shape:
            self._mirror = torch.from_numpy(table.words).to(self._device)
        elif len(rows):
            self._mirror[self._tensor(rows), self._tensor(columns)] = self._tensor(words)
        return self._mirror

    def _tensor(self, array: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


class _SamplingColumns:
    """Sampling parameters as arrays over rows, so that a step's are a few array operations."""

    def __init__(self, rows: int) -> None:
        self._owners = np.full(rows, -1, dtype=np.int64)
        self._temperature = np.zeros(rows, dtype=np.float64)
        self._top_k = np.full(rows, UNLIMITED, dtype=np.int64)
        self._top_p = np.ones(rows, dtype=np.float64)
        self._seed = np.zeros(rows, dtype=np.int64)
        self._prompt = np.zeros(rows, dtype=np.int64)
        self._min_tokens = np.zeros(rows, dtype=np.int64)

    def batch(self, rows: npt.NDArray[np.int64], scheduler: Scheduler) -> SamplingBatch:
        """The parameters of `rows`, read anew for rows that another sequence has now."""
        owners = scheduler.owners[rows]
        changed = np.flatnonzero(self._owners[rows] != owners)
        for row in rows[changed].tolist():
            self._read(row, scheduler.sequence_at(row))
        self._owners[rows] = owners
        generated = scheduler.counts[rows] - self._prompt[rows]
        early = np.flatnonzero(generated < self._min_tokens[rows])
        bans = [
            (at, token) for at in early.tolist() for token in scheduler.sequence_at(int(rows[at])).stop_ids
        ]
        banned = np.array(bans, dtype=np.int64).reshape(-1, 2)
        return SamplingBatch(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            seed=self._seed[rows],
            counter=generated,
            banned_rows=banned[:, 0].copy(),
            banned_tokens=banned[:, 1].copy(),
        )

    def _read(self, row: int, sequence: Sequence) -> None:
        params = sequence.params
        self._temperature[row] = params.temperature
        self._top_k[row] = UNLIMITED if params.top_k is None else params.top_k
        self._top_p[row] = params.top_p
        self._seed[row] = sequence.seed
        self._prompt[row] = sequence.num_prompt
        self._min_tokens[row] = params.min_tokens
