"""A process with KV in a sidecar's memory: it computes blocks where they lie, and attends to them there.

On a GPU it has a CUDA context of its own. What sequences hold depends on their number alone, so that every
process knows what it is to find.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from kvpager.api.client import Connection, connect
from kvpager.kernels import copy_blocks, decode_attention, write_kv
from kvpager.kvstore.handles import Lease, Reservation
from kvpager.tests.block_arenas import Arena
from kvpager.tests.raw_client import await_true, names
from kvpager.tiers.address import FAR
from kvpager.tiers.layout import KVLayout

__all__ = ["BLOCKS", "LAYOUT", "LENGTHS", "AttendingProcess", "answers_of"]

LAYOUT: Final = KVLayout(2, 2, 128)
LENGTHS: Final = (208, 15, 330)
"""Tokens that are attended to; sequences are stored in whole blocks."""
BLOCKS: Final = sum(LAYOUT.blocks_for(length) for length in LENGTHS)
_QUERY_HEADS: Final = 8
_SECONDS: Final = 60.0


def _kv(sequence: int) -> torch.Tensor:
    """Keys and values of a sequence, float16 [layers, 2, tokens, kv_heads, head_dim], on the CPU."""
    tokens = LAYOUT.blocks_for(LENGTHS[sequence]) * LAYOUT.block_size
    shape = (LAYOUT.num_layers, 2, tokens, LAYOUT.num_kv_heads, LAYOUT.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(sequence)).half()


def _queries(layer: int) -> torch.Tensor:
    """float16 [sequences, query heads, head_dim], on the CPU."""
    shape = (len(LENGTHS), _QUERY_HEADS, LAYOUT.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + layer)).half()


def _names() -> list[list[bytes]]:
    """The blocks of each sequence."""
    counts = map(LAYOUT.blocks_for, LENGTHS)
    return [list(names(1000 * at, count)) for at, count in enumerate(counts)]


def answers_of() -> npt.NDArray[np.float64]:
    """What attention is to answer, in float64 from the keys and values themselves.

    Returns:
        float64 [layers, sequences, query heads, head_dim].
    """
    out = torch.zeros(LAYOUT.num_layers, len(LENGTHS), _QUERY_HEADS, LAYOUT.head_dim, dtype=torch.float64)
    for layer in range(LAYOUT.num_layers):
        for sequence, length in enumerate(LENGTHS):
            # [kv_heads, tokens, head_dim]
            keys, values = _kv(sequence)[layer, :, :length].double().transpose(1, 2)
            q = _queries(layer)[sequence].double().view(LAYOUT.num_kv_heads, -1, LAYOUT.head_dim)
            scores = (q @ keys.transpose(1, 2) * LAYOUT.head_dim**-0.5).softmax(-1)
            out[layer, sequence] = (scores @ values).view(_QUERY_HEADS, -1)
    return out.numpy()


class AttendingProcess:
    """A process on a sidecar's socket, which does what it is called with. A context manager, which kills it.

    Args:
        path: the socket.
        device: ``cpu`` or ``cuda:N``.
    """

    def __init__(self, path: Path, device: str) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawning.Pipe()
        self.process = spawning.Process(target=_run, args=(theirs, str(path), device), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, what: str, *arguments: Any) -> None:
        """Have it call a method of `_Attending`, without waiting."""
        self._pipe.send((what, arguments))

    def call(self, what: str, *arguments: Any) -> Any:
        """What a method of `_Attending` returns."""
        self.begin(what, *arguments)
        assert self._pipe.poll(_SECONDS), f"{what} does not end"
        result = self._pipe.recv()
        if isinstance(result, BaseException):
            raise result
        return result

    def kill(self) -> None:
        """It ends without a word, whatever it is at."""
        self.process.kill()
        self.process.join()

    def __enter__(self) -> AttendingProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._pipe.close()


def _run(pipe: Pipe, path: str, device: str) -> None:
    with connect(path, timeout=20, strict=True, name=f"attends on {device}") as client:
        if device != "cpu":
            client.map_device(device)
        attending = _Attending(client, torch.device(device))
        while True:
            try:
                what, arguments = pipe.recv()
            except EOFError:
                return
            try:
                result = getattr(attending, what)(*arguments)
            except BaseException as error:  # noqa: BLE001  who asked is told
                result = RuntimeError(f"{what}: {error!r}")
            pipe.send(result)


class _Attending:
    """What the process can do. Blocks are numbered through all sequences."""

    def __init__(self, client: Connection, device: torch.device) -> None:
        self._client = client
        self._space = client.space(LAYOUT)
        self._device = device
        self._reservation: Reservation | None = None

    def pid(self) -> int:
        return os.getpid()

    def reserve(self) -> int:
        """Reserve all blocks; returns for how many there is a slot."""
        every = [name for sequence in _names() for name in sequence]
        self._reservation = self._space.reserve(every, wait=20.0)
        return len(self._reservation.new)

    def write(self, first: int, last: int) -> None:
        """Compute blocks into their slots, where they lie."""
        self._write(self._reserved(first, last), first)
        self._wait()

    def write_for_ever(self, first: int, last: int) -> None:
        """The same again and again, until the process is killed."""
        words = self._reserved(first, last)
        while True:
            self._write(words, first)
            self._wait()

    def copy_in(self, first: int, last: int) -> None:
        """Compute blocks in the device's own memory, and copy them to their slots by the kernel for that."""
        own = self._arena(last - first)
        self._write(own.addresses, first)
        copy_blocks(own.addresses, self._reserved(first, last), LAYOUT.block_bytes)
        self._wait()

    def commit(self, first: int, last: int) -> None:
        assert self._reservation is not None
        self._reservation.commit(np.arange(first, last))

    def await_death(self) -> None:
        await_true(lambda: not self._client.ready)

    def await_life(self) -> int:
        """Wait until there is a sidecar again; returns how much was lost with the one before."""
        self._client.wait_ready(30)
        return self._client.counters.lost

    def resident(self) -> list[int]:
        """How many leading blocks of each sequence are found."""
        found = []
        for sequence in _names():
            with self._space.match(sequence) as lease:
                found.append(len(lease))
        return found

    def attend(self) -> npt.NDArray[np.float16]:
        """Attention to all sequences where they lie in the sidecar's memory.

        Returns:
            float16 [layers, sequences, query heads, head_dim].
        """
        leases = [self._space.match(sequence) for sequence in _names()]
        try:
            assert [len(lease) for lease in leases] == [len(sequence) for sequence in _names()]
            return self._attention([self._words(lease) for lease in leases])
        finally:
            for lease in leases:
                lease.release()

    def attend_by_reference(self) -> npt.NDArray[np.float16]:
        """The same in plain torch on the CPU, which reads the same memory."""
        leases = [self._space.match(sequence) for sequence in _names()]
        try:
            rows = [torch.from_numpy(self._space.addresses(lease.slots)) for lease in leases]
            return self._attention(rows)
        finally:
            for lease in leases:
                lease.release()

    def attend_to_own(self) -> npt.NDArray[np.float16]:
        """The same over blocks of its own, computed here, in the device's own memory."""
        own = self._arena(BLOCKS)
        self._write(own.addresses, 0)
        ends = np.cumsum([len(sequence) for sequence in _names()])[:-1].tolist()
        return self._attention(list(torch.tensor_split(own.addresses, ends)))

    # Inside

    def _arena(self, blocks: int) -> Arena:
        return Arena.make("cpu" if self._device.type == "cpu" else "vram", LAYOUT.block_bytes, blocks)

    def _reserved(self, first: int, last: int) -> torch.Tensor:
        assert self._reservation is not None
        return self._addresses(self._reservation.slots[first:last])

    def _words(self, lease: Lease) -> torch.Tensor:
        return self._addresses(lease.slots) | FAR

    def _addresses(self, slots: npt.NDArray[np.int32]) -> torch.Tensor:
        """Where slots lie for the device, once it has them page-locked: int64 [n], on it."""
        await_true(lambda: bool(self._space.readable_in_place(slots).all()))
        addresses = self._space.addresses(slots) + self._space.device_delta
        return torch.from_numpy(addresses).to(self._device)

    def _write(self, words: torch.Tensor, first: int) -> None:
        """Compute the blocks from `first` on into these."""
        whole = torch.cat([_kv(sequence) for sequence in range(len(LENGTHS))], 2).to(self._device)
        size, count = LAYOUT.block_size, len(words)
        kv = whole[:, :, first * size : (first + count) * size]
        offsets = torch.arange(count * size, device=self._device) % size
        for layer in range(LAYOUT.num_layers):
            keys, values = kv[layer]
            write_kv(keys, values, words.repeat_interleave(size), offsets, layer, LAYOUT)

    def _attention(self, rows: list[torch.Tensor]) -> npt.NDArray[np.float16]:
        device = rows[0].device
        table = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
        out = [
            decode_attention(_queries(layer).to(device), table, lengths, layer, LAYOUT)
            for layer in range(LAYOUT.num_layers)
        ]
        return torch.stack(out).cpu().numpy()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
