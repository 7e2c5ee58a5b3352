"""Blocks copied between where they are kept and the keys and values of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ....kvstore.handles import BlockViews
from ....tiers.layout import KVLayout
from .model_shape import ModelShape

__all__ = ["Filling", "KVTensors", "Snapshot"]

KVTensors: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of a layer, [rows, heads, tokens, head_dim] each."""
_Bytes: TypeAlias = npt.NDArray[np.uint8]


class Filling:
    """Keys and values of all layers that blocks are copied into.

    Tensors of a CPU are written where they are. Those of a GPU get a batch of blocks in one copy for each
    layer, from page-locked memory.

    Args:
        shape: of the model.
        rows: sequences.
        blocks: of each, at most.
        batch: blocks that are copied together.
    """

    def __init__(self, shape: ModelShape, rows: int, blocks: int, batch: int) -> None:
        self._layout = layout = shape.layout
        self._devices = shape.devices
        self._direct = all(device.type == "cpu" for device in shape.devices)
        length = blocks * layout.block_size
        self._staged = torch.empty(
            _staged_shape(layout, rows, length if self._direct else batch * layout.block_size),
            dtype=shape.dtype,
            pin_memory=not self._direct,
        )
        self._layers = list(self._staged)
        if not self._direct:
            one = _staged_shape(layout, rows, length)[1:]
            self._layers = [torch.empty(one, dtype=shape.dtype, device=device) for device in shape.devices]
        self._bytes = _as_bytes(self._staged)

    def write(self, row: int, first: int, begin: int, blocks: BlockViews) -> None:
        """Copy blocks to a row.

        Args:
            row: of the batch.
            first: index of the first block in its row.
            begin: that of the batch of blocks that are copied together.
            blocks: where they lie.
        """
        layout = self._layout
        used = layout.block_size * layout.row_bytes
        at = first if self._direct else first - begin
        target = self._bytes.reshape(*self._bytes.shape[:4], -1)[:, :, row]
        for index in range(len(blocks)):
            start = (at + index) * used
            target[..., start : start + used] = _slices(layout, blocks[index])

    def send(self, begin: int, count: int) -> None:
        """A batch of blocks is written for every row. Returns when it may be written over."""
        if self._direct:
            return
        size = self._layout.block_size
        for layer, staged in zip(self._layers, self._staged, strict=True):
            part = layer[..., begin * size : (begin + count) * size, :]
            part.copy_(staged[..., : count * size, :], non_blocking=True)
        for device in set(self._devices):
            torch.cuda.synchronize(device)

    def tensors(self, blocks: int) -> list[KVTensors]:
        """Of each layer, the leading blocks."""
        length = blocks * self._layout.block_size
        return [(layer[0, ..., :length, :], layer[1, ..., :length, :]) for layer in self._layers]


class Snapshot:
    """Keys and values as they are now. They are not written to later: a cache that grows makes others.

    Args:
        shape: of the model.
        layers: of every one of its layers.
    """

    def __init__(self, shape: ModelShape, layers: Sequence[KVTensors]) -> None:
        self._layout = shape.layout
        self._layers = layers
        self._events: list[tuple[torch.device, Any]] = []
        for device in {keys.device for keys, _ in layers if keys.is_cuda}:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._events.append((device, event))

    @property
    def nbytes(self) -> int:
        """That it holds, on the devices of the layers."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._layers)

    def copy_out(self, row: int, indices: Sequence[int], blocks: BlockViews) -> None:
        """Copy blocks of a row to where they are to be kept. Returns when they are there.

        Args:
            row: of the batch.
            indices: of the blocks in it, ascending.
            blocks: one place for each.
        """
        layout = self._layout
        size, used = layout.block_size, layout.block_size * layout.row_bytes
        start, end = indices[0] * size, (indices[-1] + 1) * size
        parts = [
            (keys[row, :, start:end].detach(), values[row, :, start:end].detach())
            for keys, values in self._layers
        ]
        if self._events:
            parts = self._fetch(parts)
        sources = [(_as_bytes(keys), _as_bytes(values)) for keys, values in parts]
        for index, place in zip(indices, map(blocks.__getitem__, range(len(blocks))), strict=True):
            at = index * size - start
            target = _slices(layout, place)
            for layer, planes in enumerate(sources):
                for plane, source in enumerate(planes):
                    target[layer, plane].reshape(layout.num_kv_heads, used)[:] = np.ascontiguousarray(
                        source[:, at : at + size]
                    ).reshape(layout.num_kv_heads, used)

    def _fetch(self, parts: list[KVTensors]) -> list[KVTensors]:
        """Those of GPUs in page-locked memory, copied on a stream of each beside what it computes."""
        streams = {}
        for device, event in self._events:
            streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            streams[device].wait_event(event)
        fetched: list[KVTensors] = []
        for keys, values in parts:
            if not keys.is_cuda:
                fetched.append((keys, values))
                continue
            with torch.cuda.stream(streams[keys.device]):
                there = torch.empty((2, *keys.shape), dtype=keys.dtype, pin_memory=True)
                there[0].copy_(keys, non_blocking=True)
                there[1].copy_(values, non_blocking=True)
            fetched.append((there[0], there[1]))
        for stream in streams.values():
            stream.synchronize()
        return fetched


def _staged_shape(layout: KVLayout, rows: int, tokens: int) -> tuple[int, ...]:
    return (layout.num_layers, 2, rows, layout.num_kv_heads, tokens, layout.head_dim)


def _as_bytes(tensor: torch.Tensor) -> _Bytes:
    """The same memory: the last dimension in bytes."""
    array: _Bytes = tensor.view(torch.uint8).numpy()
    return array


def _slices(layout: KVLayout, block: _Bytes) -> _Bytes:
    """The rows in a block, uint8 [layers, planes, heads, bytes of a slice's rows]."""
    whole = block.reshape(layout.num_layers, layout.planes, layout.num_kv_heads, layout.slice_bytes)
    return whole[..., : layout.block_size * layout.row_bytes]
