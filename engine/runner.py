"""Runs a step: turns it into tensors, runs the model over the store's blocks, samples."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ..kvstore.store import Install, TieredStore
from ..tiers.errors import IntegrityError
from .model import CausalLM, ForwardBatch
from .padded import PaddedDecode, can_capture
from .sampler import UNLIMITED, SamplingBatch, sample
from .scheduler import Scheduler
from .sequence import Sequence
from .step import Rows, Step
from .upload import upload

__all__ = ["Runner"]

_SHORT_PROMPTS: Final = 64
"""Tokens of prompts with which a step is still run as one of few tokens."""


class Runner:
    """A model over one store's block tables.

    On a GPU nothing waits for it before the sampled tokens are read, as far as kernels exist for the model's
    KV (`kernels/`): a step's arrays go there in one copy, and plans are made there.

    Args:
        model: on the store's device.
        store: where the KV is.
        max_tokens: tokens of one sequence, at most.
        cuda_graphs: capture steps of few tokens in CUDA graphs, where that can be.
        padded: run these steps padded, as for a graph, also where none can be captured.
    """

    def __init__(
        self,
        model: CausalLM,
        store: TieredStore,
        max_tokens: int,
        *,
        cuda_graphs: bool = True,
        padded: bool = False,
    ) -> None:
        self._model = model
        self._store = store
        self._device = torch.device(store.device)
        rows = len(store.lengths)
        self._columns = _SamplingColumns(rows)
        self._mirror: torch.Tensor | None = None
        self._targets: torch.Tensor | None = None
        if self._device.type == "cuda":
            self._mirror = self._new_mirror(rows, max_tokens)
        self._padded: PaddedDecode | None = None
        capture = cuda_graphs and can_capture(model, store.layout)
        if capture or padded:
            self._padded = PaddedDecode(
                model, store.layout, rows, prompt_tokens=_SHORT_PROMPTS, capture=capture
            )

    @property
    def captured(self) -> list[int]:
        """The sizes of batches whose decode step is a CUDA graph by now, ascending."""
        return [] if self._padded is None else self._padded.captured

    def run(self, step: Step, scheduler: Scheduler) -> npt.NDArray[np.int32]:
        """Compute the step's KV and sample a token for each of `Step.sampled_rows`; int32, in their order.

        Waits for the device: when this returns, the step's work is done.
        """
        sampled = self.start(step, scheduler).cpu()
        if not len(sampled) and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return sampled.numpy()

    @torch.inference_mode()
    def start(self, step: Step, scheduler: Scheduler) -> torch.Tensor:
        """Enqueue a step; returns the tokens that `run` does, on the device."""
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            if self._padded is not None and step.prompt_tokens <= self._padded.prompt_tokens:
                logits = self._run_padded(self._padded, step, scheduler.tokens)
            else:
                logits = self._model(self._batch(step, scheduler.tokens), self._store.layout)
            rows = step.sampled_rows
            if not len(rows):
                return torch.empty(0, dtype=torch.int32, device=self._device)
            return sample(logits, self._columns.batch(rows, scheduler)).to(torch.int32)

    def close(self) -> None:
        """Give the memory of CUDA graphs back."""
        if self._padded is not None:
            self._padded.close()

    def _run_padded(
        self, padded: PaddedDecode, step: Step, all_tokens: npt.NDArray[np.int32]
    ) -> torch.Tensor:
        tokens, places, rows, sampled_at = _tokens_of(step, all_tokens)
        words = self._store.table.words[rows, places // self._store.layout.block_size]
        prompts = bool(step.chunks)
        packed = padded.pack(tokens, places, words, rows, prompts=prompts)
        table = self._table()
        if not prompts:
            (inputs,), install = self._moved(step.install, table, packed)
            return padded.run(inputs, table, install)[: len(rows)]
        (inputs, at), install = self._moved(step.install, table, packed, sampled_at)
        return padded.run(inputs, table, install, prompts=True).index_select(0, at)

    def _batch(self, step: Step, all_tokens: npt.NDArray[np.int32]) -> ForwardBatch:
        size = self._store.layout.block_size
        chunks = step.chunks
        decoding = len(step.rows)
        tokens, places, rows, sampled_at = _tokens_of(step, all_tokens)
        columns = places // size
        chunk_rows = np.array([chunk.row for chunk in chunks], dtype=np.int64)
        chunk_lengths = np.array([chunk.start + chunk.count for chunk in chunks], dtype=np.int32)
        bounds = list(itertools.accumulate((chunk.count for chunk in chunks), initial=0))
        lengths = (step.lengths + 1).astype(np.int32)
        table = self._table()
        moved, install = self._moved(
            step.install,
            table,
            tokens,
            places,
            self._store.table.words[rows, columns],
            places - columns * size,
            step.rows,
            lengths,
            chunk_rows,
            chunk_lengths,
            np.array(bounds, dtype=np.int32),
            sampled_at,
        )
        ids, at, addresses, offsets, decode_rows, decode_lens, prefill_rows, prefill_lens, cu, logits_at = (
            moved
        )
        far = any(self._store.far_blocks(chunk.row) > 0 for chunk in chunks)
        batch = ForwardBatch(
            tokens=ids,
            positions=at,
            addresses=addresses,
            offsets=offsets,
            num_decode=decoding,
            decode_table=self._rows(table, step.rows, decode_rows, lengths),
            decode_lens=decode_lens,
            prefill_table=self._rows(table, chunk_rows, prefill_rows, chunk_lengths),
            prefill_lens=prefill_lens,
            cu_seqlens_q=cu,
            logits_at=logits_at,
            prefill_far=far,
        )
        if install is None:
            return batch
        return replace(
            batch,
            decode_install=self._rows(install, step.rows, decode_rows, lengths),
            prefill_install=self._rows(install, chunk_rows, prefill_rows, chunk_lengths) if far else None,
        )

    def _rows(
        self,
        table: torch.Tensor,
        rows: npt.NDArray[np.int64],
        moved: torch.Tensor,
        lengths: npt.NDArray[np.int32],
    ) -> torch.Tensor:
        """The rows' words as far as their lengths need: a view where the rows are the first, in order."""
        words = table[:, : self._store.layout.blocks_for(int(lengths.max(initial=0)))]
        count = len(rows)
        # Chunks come in the order of arrival, which need not be that of their rows.
        if np.array_equal(rows, np.arange(count)):
            return words[:count]
        return words.index_select(0, moved)

    # The block table on the device: on a CPU the table itself, elsewhere a mirror of it.

    def _new_mirror(self, rows: int, max_tokens: int) -> torch.Tensor:
        """A mirror for the longest sequences that there may be: graphs find it where it always is."""
        table = self._store.table
        table.take_changes()
        whole = np.zeros((rows, self._store.layout.blocks_for(max_tokens)), dtype=np.int64)
        width = min(whole.shape[1], table.words.shape[1])
        whole[:, :width] = table.words[:, :width]
        return torch.from_numpy(whole).to(self._device)

    def _table(self) -> torch.Tensor:
        return torch.from_numpy(self._store.table.words) if self._mirror is None else self._mirror

    def _moved(
        self,
        install: Install | None,
        table: torch.Tensor,
        *arrays: npt.NDArray[np.int64] | npt.NDArray[np.int32],
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """The arrays on the device, and where what is to be installed goes: int64, shape of `table`, or None.

        What changed in the block table since goes with them, to the mirror.
        """
        width = table.shape[1]
        parts: list[npt.NDArray[Any]] = [*arrays]
        if self._mirror is not None:
            rows, columns, words = self._store.table.take_changes()
            if int(columns.max(initial=0)) >= width:
                raise IntegrityError(
                    f"a row of the block table has more than the {width} blocks of max_tokens"
                )
            parts += [rows * width + columns, words]
        if install is not None:
            parts += [install.rows * width + install.columns, install.destinations]
        moved = upload(parts, self._device)
        if install is not None:
            *moved, cells, written = moved
            # Only what is read at tagged words counts; the rest is from earlier steps.
            if self._targets is None or self._targets.shape != table.shape:
                self._targets = torch.zeros_like(table)
            self._targets.view(-1).index_copy_(0, cells, written)
        if self._mirror is not None:
            *moved, cells, written = moved
            if len(cells):
                self._mirror.view(-1).index_copy_(0, cells, written)
        return moved, None if install is None else self._targets


def _tokens_of(
    step: Step, all_tokens: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int32], Rows, Rows, Rows]:
    """The tokens of a step, first those that decode: int32 [n]; and int64 [n] each their positions and rows.

    Last, int64 [samples]: which of them are sampled after.
    """
    if not step.chunks:
        return step.tokens, step.lengths, step.rows, np.arange(len(step.rows), dtype=np.int64)
    tokens, positions, rows = [step.tokens], [step.lengths], [step.rows]
    ends = []
    count = len(step.rows)
    for chunk in step.chunks:
        stop = chunk.start + chunk.count
        tokens.append(all_tokens[chunk.row, chunk.start : stop])
        positions.append(np.arange(chunk.start, stop, dtype=np.int64))
        rows.append(np.full(chunk.count, chunk.row, dtype=np.int64))
        count += chunk.count
        if chunk.last:
            ends.append(count - 1)
    sampled_at = np.array([*range(len(step.rows)), *ends], dtype=np.int64)
    return np.concatenate(tokens), np.concatenate(positions), np.concatenate(rows), sampled_at


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
