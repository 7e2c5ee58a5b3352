"""Steps of few tokens, in batches of a few sizes over buffers that stay: what a CUDA graph can be made of.

A step's launches take longer to enqueue than a small model takes to run them. So a batch is padded to the
next of a few sizes, its inputs are copied to where that size's inputs always lie, and the step is captured in
a CUDA graph the second time that a size comes; the first time runs as it is, which compiles what it needs
and is the warm-up that a capture wants. Who says a few words more to a conversation that is kept does not
make a long step of it, either: each token of a short chunk of a prompt decodes, in a row of its own that ends
at it. Plans of the kernels are made within the graph, from the lengths and
words that it finds there. All graphs share one pool of memory, since no two run at a time.

Padding has length 0, which attention skips, and a block address that nothing is written to. Where there is
no GPU the same code runs, and nothing is captured.
"""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ..tiers.layout import KVLayout
from .model import CausalLM, ForwardBatch

__all__ = ["PaddedDecode", "can_capture", "padded_size"]

_log = logging.getLogger(__name__)

_SMALL_SIZES: Final = (1, 2, 4)
_STEP: Final = 8
_PROMPT_STEP: Final = 32
"""Sizes with tokens of prompts are fewer: their number changes from step to step."""
_INPUTS: Final = 6
"""Rows of its inputs: tokens, positions, addresses, offsets, rows of the table, and lengths as int32."""


def padded_size(count: int, most: int, *, prompts: bool = False) -> int:
    """What a batch of `count` tokens is padded to, `most` at most.

    Where each is of another sequence: 1, 2, 4, or a multiple of 8; with tokens of `prompts`, of 32.
    """
    if not prompts:
        for size in _SMALL_SIZES:
            if count <= size:
                return min(size, most)
    step = _PROMPT_STEP if prompts else _STEP
    return min(-(-count // step) * step, most)


def can_capture(model: CausalLM, layout: KVLayout) -> bool:
    """Whether no kernel of a decode step waits for the device, so that a graph may be made of it."""
    return "decode" in model.kernels_for(layout)


@dataclass
class _Size:
    """Batches of one size.

    Attributes:
        inputs: int64 [6, size], where they always lie.
        prompts: whether tokens of prompts are among them.
        graph: the step, once it was captured.
    """

    inputs: torch.Tensor
    prompts: bool
    graph: torch.cuda.CUDAGraph | None = None


class PaddedDecode:
    """Runs steps whose tokens all decode.

    Args:
        model: on a CPU, or on a GPU with `can_capture` where `capture` is set.
        layout: how a block lies in memory.
        most: sequences of a step, at most.
        prompt_tokens: tokens of prompts beside them, at most.
        capture: make CUDA graphs.
    """

    def __init__(
        self, model: CausalLM, layout: KVLayout, most: int, *, prompt_tokens: int = 0, capture: bool
    ) -> None:
        self._model = model
        self._layout = layout
        self._most = most
        self.prompt_tokens = prompt_tokens
        self._device = model.device
        self._sizes: dict[tuple[int, bool, bool], _Size] = {}
        rows = most + prompt_tokens
        self._logits = torch.empty((rows, model.config.vocab_size), dtype=torch.float32, device=self._device)
        self._no_queries = torch.zeros(1, dtype=torch.int32, device=self._device)
        self._scratch: torch.Tensor | None = None
        self._padding = 0
        if self._device.type == "cpu":
            # The reference writes wherever it is told to.
            self._scratch = torch.empty(layout.block_bytes + 128, dtype=torch.uint8)
            self._padding = -(-self._scratch.data_ptr() // 128) * 128
        self._capturing = capture
        if capture:
            self._pool: Any = torch.cuda.graph_pool_handle()
            self._stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @property
    def captured(self) -> list[int]:
        """The sizes without tokens of prompts of which there is a graph, ascending."""
        return sorted(
            {size for (size, _, prompts), one in self._sizes.items() if one.graph is not None and not prompts}
        )

    def pack(
        self,
        tokens: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int64],
        addresses: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64],
        *,
        prompts: bool = False,
    ) -> npt.NDArray[np.int64]:
        """The inputs of a step, padded: int64 [6, size], for `run`.

        Args:
            tokens: int32 [n], the tokens.
            positions: int64 [n], the position of each in its sequence.
            addresses: int64 [n], the block that its KV goes to.
            rows: int64 [n], its sequence's row of the block table.
            prompts: whether tokens of prompts are among them, so that several may be of one sequence.
        """
        count = len(rows)
        most = self._most + (self.prompt_tokens if prompts else 0)
        packed = np.zeros((_INPUTS, padded_size(count, most, prompts=prompts)), dtype=np.int64)
        packed[2] = self._padding
        packed[0, :count] = tokens
        packed[1, :count] = positions
        packed[2, :count] = addresses
        packed[3, :count] = positions % self._layout.block_size
        packed[4, :count] = rows
        packed[5].view(np.int32)[:count] = positions + 1
        return packed

    def run(
        self,
        packed: torch.Tensor,
        table: torch.Tensor,
        install: torch.Tensor | None = None,
        *,
        prompts: bool = False,
    ) -> torch.Tensor:
        """Enqueue a step.

        Args:
            packed: of `pack`, on the device.
            table: int64 [rows, max_blocks], the block table; under capture the same memory each time, and
            install: likewise, where its words that are tagged *install* go; None where none is.
            prompts: as for `pack`.

        Returns:
            float32 [size, vocab_size], the logits; overwritten by the next step. Those of padding mean
            nothing.
        """
        size = packed.shape[1]
        key = size, install is not None, prompts
        known = self._sizes.get(key)
        if known is None:
            # Not known before it ran once: a capture wants that all it needs is there.
            new = _Size(packed.clone(), prompts)
            logits = self._forward(new, table, install)
            self._sizes[key] = new
            return logits
        known.inputs.copy_(packed)
        if self._capturing and known.graph is None:
            known.graph = self._capture(known, table, install)
        if known.graph is None:
            return self._forward(known, table, install)
        known.graph.replay()
        return self._logits[:size]

    def close(self) -> None:
        """Give the memory of the graphs back."""
        self._sizes.clear()

    def _forward(self, one: _Size, table: torch.Tensor, install: torch.Tensor | None) -> torch.Tensor:
        size = one.inputs.shape[1]
        tokens, positions, addresses, offsets, rows, packed_lengths = one.inputs.unbind()
        lengths = packed_lengths.view(torch.int32)[:size]
        batch = ForwardBatch(
            tokens=tokens,
            positions=positions,
            addresses=addresses,
            offsets=offsets,
            num_decode=size,
            decode_table=table.index_select(0, rows),
            decode_lens=lengths,
            prefill_table=table[:0],
            prefill_lens=lengths[:0],
            cu_seqlens_q=self._no_queries,
            logits_at=None,
            decode_install=None if install is None else install.index_select(0, rows),
            decode_alone=not one.prompts,
        )
        logits: torch.Tensor = self._model(batch, self._layout, out=self._logits[:size])
        return logits

    def _capture(
        self, one: _Size, table: torch.Tensor, install: torch.Tensor | None
    ) -> torch.cuda.CUDAGraph | None:
        size = one.inputs.shape[1]
        _log.info("capturing the step of %d tokens in a CUDA graph", size)
        started = time.perf_counter()
        # What is freed by the collector meanwhile may be more than a capture allows.
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        # A capture that failed is not tried again at every step: the error is told, and steps run without.
        self._capturing = False
        try:
            with (
                # Back to this stream also where the capture itself does not come to its end.
                torch.cuda.stream(torch.cuda.current_stream(self._device)),
                # Other threads copy blocks and page-lock memory meanwhile, as they may in this mode.
                torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                self._forward(one, table, install)
        except torch.OutOfMemoryError as error:
            _log.warning("no more CUDA graphs are captured, there is no memory for them: %s", error)
            return None
        self._capturing = True
        _log.info("captured it in %.1f s", time.perf_counter() - started)
        return graph
