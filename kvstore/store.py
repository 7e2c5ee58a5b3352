"""TieredStore: the block tables of one engine over device memory, host memory and the cold tier.

A *row* is a running sequence's line in the block table. Its blocks are near (device tier, held by
reference count) or far (host memory, held by a lease and read in place). Rows are plain ints and state
lies in arrays over rows, so that a decode step costs a few array operations whatever the batch.

One thread drives a store. `poll` is called between steps, when the last step's work on the device is
done: leases that ended are given back then, copies that are done take effect, and words are rewritten.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from ..tiers.address import FAR, TAG_MASK
from ..tiers.arena import DeviceArena
from ..tiers.errors import ConfigError, IntegrityError
from ..tiers.layout import KVLayout
from ..tiers.mover import CudaMover, HostMover, Mover, Transfer
from .events import EventKind, EventStream, Listener
from .hashing import (
    ExtraKeys,
    Tokens,
    as_tokens,
    hash_blocks,
    hash_partial,
    link,
    pack_blocks,
    pack_keys,
    space_id,
)
from .host import HostStore
from .loading import ColdLoad
from .policy import Ids, make_policy
from .pool import BlockPool
from .session import SessionRecord, SleepingSequence
from .space import HostSpace
from .tables import BlockTable, Words
from .writeback import WriteBack, is_over

__all__ = ["NamedPrompt", "Opened", "Sharing", "StoreStats", "TieredStore"]

# How long making room in the device tier may wait for room in host memory, before KV is dropped.
_ROOM_SECONDS: Final = 0.5
_EVICT_AHEAD: Final = 128


@dataclass(frozen=True)
class Opened:
    """A sequence with a row, and how much of its KV was found.

    Attributes:
        row: its row of the block table.
        length: tokens whose KV is there; the engine computes from here on.
        device: of these, tokens found in the device tier,
        host: in host memory,
        cold: brought up from the cold tier for this call.
    """

    row: int
    length: int
    device: int
    host: int
    cold: int


@dataclass(frozen=True)
class Sharing:
    """Words in the block tables, and how many different blocks they name."""

    words: int
    blocks: int

    @property
    def saved_blocks(self) -> int:
        """Blocks that there would be more without sharing."""
        return self.words - self.blocks


@dataclass
class StoreStats:
    """Counters since the store was opened, in blocks."""

    device_hits: int = 0
    host_hits: int = 0
    cold_hits: int = 0
    published: int = 0
    adopted: int = 0
    """Computed twice at the same time; one copy was kept."""
    promoted: int = 0
    spilled: int = 0
    copied_on_write: int = 0
    dropped: int = 0
    """Left the device tier without a copy below, because nothing below had room."""
    slept: int = 0
    woken: int = 0

    def snapshot(self) -> dict[str, int]:
        """The counters by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


@dataclass(frozen=True)
class _Partial:
    """A partly filled block that may have been kept: its name, and the sequence's length at its end."""

    name: bytes
    length: int


@dataclass(frozen=True)
class NamedPrompt:
    """A prompt and the names of its blocks, from `TieredStore.name_prompt`.

    Attributes:
        tokens: int32, the whole prompt.
        root: root of its chain.
        hashes: prefix hashes of its full blocks.
        usable: how many of them may be attached: the last token is left to be computed.
        partial: a partly filled block that may have been kept.
        extra_keys: by block index.
    """

    tokens: npt.NDArray[np.int32]
    root: bytes
    hashes: tuple[bytes, ...]
    usable: int
    partial: _Partial | None
    extra_keys: ExtraKeys


@dataclass
class _Found:
    """Blocks attached so far, by the tier they were found in."""

    device: int
    host: int
    cold: int


@dataclass(frozen=True, eq=False)
class _Promotion:
    """Far blocks on their way to the device tier."""

    transfer: Transfer
    blocks: Ids
    slots: Ids
    generations: npt.NDArray[np.int64]
    hashes: list[bytes]


class TieredStore:
    """Block tables, sharing, copy-on-write, promotion, sleep and wake for one engine on one device.

    Args:
        layout: how a block lies in memory.
        device_blocks: blocks of the device tier.
        root: root of the chain of sequences that name no other (`ChainIdentity.root`).
        host: host memory and cold tier below, or None for a device tier alone.
        device: ``cuda:N``, or ``cpu``, where host memory stands in for VRAM.
        max_sequences: rows of the block table.
        policy: name of the device tier's eviction policy.
        shard: the layers and heads of this rank, see `space_id`.
        mover: copies blocks; None makes one for the device.

    Raises:
        ConfigError: a value is out of range.
        MemoryUnavailableError: the device does not have that many blocks.
    """

    def __init__(
        self,
        layout: KVLayout,
        device_blocks: int,
        *,
        root: bytes,
        host: HostStore | None = None,
        device: str = "cpu",
        max_sequences: int = 256,
        policy: str = "lru",
        shard: str = "",
        mover: Mover | None = None,
    ) -> None:
        if device_blocks < 1:
            raise ConfigError("device_blocks", f"must be positive, got {device_blocks!r}")
        if max_sequences < 1:
            raise ConfigError("max_sequences", f"must be positive, got {max_sequences!r}")
        on_gpu = device != "cpu"
        ranks = make_policy(policy, device_blocks)
        self.layout = layout
        self.root = root
        self.device = device
        self.space = space_id(layout, shard)
        self.arena = DeviceArena(layout.block_bytes, device_blocks, device)
        self.pool = BlockPool(self.arena.slots, ranks, self._tell_removed)
        self.table = BlockTable(max_sequences, track_changes=on_gpu)
        self.host: HostSpace | None = host.space(layout, shard=shard) if host is not None else None
        self.stats = StoreStats()
        self.events = EventStream()
        self._mover: Mover = mover or (CudaMover(device) if on_gpu else HostMover())
        self._write_back = (
            WriteBack(self.pool, self.arena, self.host, self._mover) if self.host is not None else None
        )
        self.lengths = np.zeros(max_sequences, dtype=np.int64)
        """int64 [max_sequences]: tokens of each row whose KV is there. Read only."""
        self._roots: list[bytes] = [root] * max_sequences
        self._hashes: list[list[bytes]] = [[] for _ in range(max_sequences)]
        self._extra_keys: list[ExtraKeys] = [{}] * max_sequences
        self._tails = np.zeros((max_sequences, layout.block_size), dtype=np.int32)
        self._shared_tail = np.zeros(max_sequences, dtype=np.bool_)
        """The row's last, partly filled block must become its own before it is written."""
        self._far = np.zeros(max_sequences, dtype=np.int32)
        """Far words of each row."""
        slots = self.host.capacity if self.host is not None else 0
        self._far_refs = np.zeros(slots, dtype=np.int32)
        self._far_generations = np.zeros(slots, dtype=np.int64)
        self._promoting = np.zeros(slots, dtype=np.bool_)
        self._promotions: list[_Promotion] = []
        self._ended: list[tuple[Ids, npt.NDArray[np.int64]]] = []
        """Leases that end once the step that may still read their slots is done."""

    # Sequences come and go

    def open(
        self,
        tokens: Tokens,
        *,
        root: bytes | None = None,
        extra_keys: ExtraKeys | None = None,
        partial_at: int | None = None,
        cold_deadline: float = 0.0,
    ) -> Opened:
        """Give a sequence a row and attach what is known of its KV, wherever it lies.

        At least the last token is left to be computed: its logits are wanted.

        Args:
            tokens: the whole prompt.
            root: root of its chain; None for the store's.
            extra_keys: by block index, see `kvstore.hashing`.
            partial_at: a length at which a sequence with this beginning once slept, so that a partly
                filled block may be found there.
            cold_deadline: seconds to wait for blocks from the cold tier.

        Raises:
            CapacityError: every row is in use.
        """
        prompt = self.name_prompt(tokens, root=root, extra_keys=extra_keys, partial_at=partial_at)
        return self.open_named(prompt, cold_deadline=cold_deadline)

    def name_prompt(
        self,
        tokens: Tokens,
        *,
        root: bytes | None = None,
        extra_keys: ExtraKeys | None = None,
        partial_at: int | None = None,
    ) -> NamedPrompt:
        """Name the blocks of a prompt, once for all that is asked about it. Arguments as for `open`."""
        size = self.layout.block_size
        tokens = as_tokens(tokens)
        root = self.root if root is None else root
        hashes = hash_blocks(tokens, size, root, extra_keys)
        partial = None
        if partial_at is not None and 0 < partial_at < len(tokens) and partial_at % size:
            column = partial_at // size
            keys = extra_keys.get(column, ()) if extra_keys else ()
            last = hashes[column - 1] if column else root
            partial = _Partial(hash_partial(tokens[column * size : partial_at], last, keys), partial_at)
        usable = max(0, len(tokens) - 1) // size
        return NamedPrompt(tokens, root, tuple(hashes), usable, partial, extra_keys or {})

    def open_named(self, prompt: NamedPrompt, *, cold_deadline: float = 0.0) -> Opened:
        """`open` for a prompt that was named before."""
        row = self.table.take_row()
        self._roots[row] = prompt.root
        self._hashes[row] = list(prompt.hashes)
        self._extra_keys[row] = prompt.extra_keys
        try:
            usable = prompt.hashes[: prompt.usable]
            opened = self._attach(row, 0, 0, usable, prompt.partial, cold_deadline)
        except BaseException:
            self.close_row(row)
            raise
        filled = opened.length % self.layout.block_size
        self._tails[row, :filled] = prompt.tokens[opened.length - filled : opened.length]
        return opened

    def resident_blocks(self, prompt: NamedPrompt) -> int:
        """How many leading blocks of a prompt `open_named` would find in the device tier."""
        return len(self.pool.match(prompt.hashes[: prompt.usable]))

    def start_load(self, prompt: NamedPrompt) -> ColdLoad | None:
        """Start bringing a prompt's blocks up from the cold tier to host memory, ahead of `open_named`.

        Returns:
            the load to wait for; None where everything is near, or there is nothing below.
        """
        return self._start_load(prompt.hashes[: prompt.usable], prompt.partial)

    def start_load_sleeping(self, sleeping: SleepingSequence) -> ColdLoad | None:
        """Start bringing a sleeping sequence's blocks up from the cold tier, ahead of `wake`."""
        return self._start_load(sleeping.hashes, _partial_of(sleeping))

    def _start_load(self, hashes: Sequence[bytes], partial: _Partial | None) -> ColdLoad | None:
        if self.host is None:
            return None
        names = list(hashes)
        if partial is not None:
            names.insert(partial.length // self.layout.block_size, partial.name)
        near = len(self.pool.match(names))
        return self.host.start_load(names[near:]) if near < len(names) else None

    def fork(self, row: int) -> int:
        """A second sequence with the same KV: all blocks are shared, the last one copied when written.

        Raises:
            CapacityError: every row is in use.
        """
        other = self.table.take_row()
        length = int(self.lengths[row])
        words = self.table.row(row)[: self.layout.blocks_for(length)].copy()
        self.table.set(other, 0, words)
        near, slots = self._split(words)
        self.pool.hold(near)
        self._far_refs[slots] += 1
        self._far[other] = len(slots)
        self.lengths[other] = length
        self._roots[other] = self._roots[row]
        self._hashes[other] = list(self._hashes[row])
        self._extra_keys[other] = self._extra_keys[row]
        self._tails[other] = self._tails[row]
        if length % self.layout.block_size:
            self._shared_tail[[row, other]] = True
        return other

    def close_row(self, row: int) -> None:
        """The sequence is over. Its full blocks stay cached; its row and the rest are free."""
        near, slots = self._split(self.table.row(row))
        self.pool.drop(near)
        self._end_far(slots)
        self._far[row] = 0
        self._shared_tail[row] = False
        self.lengths[row] = 0
        self._hashes[row] = []
        self._extra_keys[row] = {}
        self.table.give_row(row)

    def sleep(self, row: int) -> SleepingSequence:
        """Free the row and all VRAM it needs; its KV is copied to host memory and stays findable there.

        The partly filled last block is kept under the hash of its tokens. Copies go on in the background;
        the blocks leave the device tier when room is wanted.
        """
        size = self.layout.block_size
        length = int(self.lengths[row])
        full = length // size
        words = self.table.row(row)
        near = np.flatnonzero((words[:full] & FAR) == 0)
        blocks = self.arena.slots_at(words[near])
        host_slots = np.zeros(full, dtype=np.int32)
        host_generations = np.zeros(full, dtype=np.int64)
        host_slots[near] = self.pool.host_slots[blocks]
        host_generations[near] = self.pool.host_generations[blocks]
        if self.host is not None:
            far = np.flatnonzero((words[:full] & FAR) != 0)
            host_slots[far] = self.host.slots_at(words[far])
            host_generations[far] = self._far_generations[host_slots[far]]
        device_blocks = np.zeros(full, dtype=np.int32)
        device_generations = np.full(full, -1, dtype=np.int64)
        device_blocks[near] = blocks
        device_generations[near] = self.pool.generations[blocks]
        sleeping = SleepingSequence(
            root=self._roots[row],
            hashes=tuple(self._hashes[row][:full]),
            length=length,
            tail=self._tails[row, : length % size].copy(),
            extra_keys=self._extra_keys[row],
            partial=self._keep_partial(row, length),
            device_blocks=device_blocks,
            device_generations=device_generations,
            host_slots=host_slots,
            host_generations=host_generations,
        )
        self.close_row(row)
        if self._write_back is not None:
            self._write_back.start()
        self.stats.slept += 1
        return sleeping

    def wake(self, sleeping: SleepingSequence, *, cold_deadline: float = 0.0) -> Opened:
        """Give a sleeping sequence a row again. Blocks are read where they lie: nothing is copied.

        Where `Opened.length` is less than the sequence's, the engine computes the rest again.

        Args:
            sleeping: from `sleep`, or from a session record.
            cold_deadline: seconds to wait for blocks from the cold tier.

        Raises:
            CapacityError: every row is in use.
        """
        row = self.table.take_row()
        self._roots[row] = sleeping.root
        self._hashes[row] = list(sleeping.hashes)
        self._extra_keys[row] = sleeping.extra_keys
        self._tails[row, : len(sleeping.tail)] = sleeping.tail
        try:
            count, device = self._reattach(row, sleeping)
            opened = self._attach(row, count, device, sleeping.hashes, _partial_of(sleeping), cold_deadline)
        except BaseException:
            self.close_row(row)
            raise
        self.stats.woken += 1
        return opened

    def cached_blocks(self, sleeping: SleepingSequence) -> int:
        """How many of `available_blocks` waking a sequence would hold again."""
        blocks = sleeping.device_blocks
        there = self.pool.generations[blocks] == sleeping.device_generations
        return int(np.count_nonzero(there & (self.pool.refs[blocks] == 0)))

    # Steps

    @property
    def available_blocks(self) -> int:
        """Blocks of the device tier that `reserve` can give."""
        return self.pool.available

    def blocks_wanted(self, rows: npt.NDArray[np.int64], counts: npt.NDArray[np.int64] | int) -> int:
        """Device blocks that `reserve` would take; an upper bound where tails are shared."""
        wanted = -(-(self.lengths[rows] + counts) // self.layout.block_size) - self.table.counts[rows]
        return int(wanted.clip(0).sum()) + int(np.count_nonzero(self._shared_tail[rows]))

    def reserve(self, rows: npt.NDArray[np.int64], counts: npt.NDArray[np.int64] | int) -> None:
        """See that each row has private blocks for `counts` more tokens.

        Args:
            rows: int64 [n], no row twice.
            counts: int64 [n], or one number for all.

        Raises:
            CapacityError: the device tier has no room; no row was given any, though shared tails may have
                become private.
        """
        if self._shared_tail[rows].any():
            self._own_tails(rows[self._shared_tail[rows]])
        size = self.layout.block_size
        wanted = self.lengths[rows] + counts - self.table.counts[rows] * size
        growing = (wanted > 0).nonzero()[0]
        if not len(growing):
            return
        wanted = -(-wanted[growing] // size)
        total = int(wanted.sum())
        words = self.arena.addresses(self._allocate(total))
        if total == len(growing):
            self.table.append(rows[growing], words)
            return
        first = 0
        for row, count in zip(rows[growing].tolist(), wanted.tolist(), strict=True):
            self.table.set(row, int(self.table.counts[row]), words[first : first + count])
            first += count

    def advance(self, row: int, tokens: npt.NDArray[np.int32]) -> None:
        """The KV of more tokens of one row is written: a chunk of its prompt.

        Args:
            tokens: int32 [n], the tokens from the row's length on.
        """
        size = self.layout.block_size
        before = int(self.lengths[row])
        after = before + len(tokens)
        self.lengths[row] = after
        first, stop = before // size, after // size
        if stop > first:
            pending = np.concatenate([self._tails[row, : before % size], tokens])
            hashes = self._hashes[row]
            if stop > len(hashes):
                unnamed = pending[(len(hashes) - first) * size : (stop - first) * size]
                known = len(hashes)
                keys = {at - known: keys for at, keys in self._extra_keys[row].items() if at >= known}
                hashes += hash_blocks(unnamed, size, hashes[-1] if hashes else self._roots[row], keys)
            blocks = np.arange(first, stop, dtype=np.int64)
            self._publish(np.full(len(blocks), row, dtype=np.int64), blocks, hashes[first:stop])
            self._tails[row, : after % size] = pending[(stop - first) * size :]
        else:
            self._tails[row, before % size : after % size] = tokens

    def append(self, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int32]) -> None:
        """The KV of one more token of each row is written.

        Args:
            rows: int64 [n], no row twice; their prompts are through.
            tokens: int32 [n], the tokens whose KV it is (the step's inputs, not what it sampled).
        """
        size = self.layout.block_size
        lengths = self.lengths[rows]
        places = lengths % size
        self._tails[rows, places] = tokens
        self.lengths[rows] = lengths + 1
        full = (places == size - 1).nonzero()[0]
        if len(full):
            rows, columns = rows[full], lengths[full] // size
            self._publish(rows, columns, self._names_of(rows, columns))

    def poll(self) -> None:
        """Between steps: end leases, finish copies, start the next ones.

        Raises:
            Exception: what a copy failed with.
        """
        if self._ended:
            self._release_ended()
        if self._promotions:
            self._finish_promotions()
        if self._write_back is not None:
            self._write_back.poll()

    # Moving between tiers

    def promote(self, row: int, limit: int) -> int:
        """Start copying far blocks of a row to the device tier; its words change when they are there.

        Args:
            limit: device blocks to spend; cached ones are evicted for it.

        Returns:
            how many blocks were started.
        """
        if self.host is None or not self._far[row]:
            return 0
        words = self.table.row(row)
        columns = np.flatnonzero(words & FAR)
        if self._shared_tail[row]:
            columns = columns[columns < self.lengths[row] // self.layout.block_size]
        slots = self.host.slots_at(words[columns])
        columns = columns[~self._promoting[slots]][: max(0, min(limit, self.available_blocks))]
        if not len(columns):
            return 0
        names = [self._hashes[row][column] for column in columns.tolist()]
        slots = self.host.slots_at(words[columns])
        blocks = self._allocate(len(slots))
        try:
            transfer = self._mover.copy(
                self.host.addresses(slots), self.arena.addresses(blocks), self.layout.block_bytes
            )
        except BaseException:
            self.pool.drop(blocks)
            raise
        self._far_refs[slots] += 1
        self._promoting[slots] = True
        self._promotions.append(_Promotion(transfer, blocks, slots, self._far_generations[slots], names))
        self._finish_promotions()
        return len(slots)

    def far_blocks(self, row: int) -> int:
        """How many of a row's blocks lie in host memory."""
        return int(self._far[row])

    def spill(self, row: int, count: int) -> int:
        """Let go of up to `count` of a running row's own device blocks, oldest first: it reads them far.

        Only full blocks that are copied to host memory, and that no other row holds, go.

        Returns:
            how many went.
        """
        if self.host is None or self._write_back is None:
            return 0
        self._write_back.flush(wait=_ROOM_SECONDS)
        full = int(self.lengths[row]) // self.layout.block_size
        words = self.table.row(row)[:full]
        columns = np.flatnonzero((words & FAR) == 0)
        blocks = self.arena.slots_at(words[columns])
        mine = (self.pool.refs[blocks] == 1) & (self.pool.host_generations[blocks] > 0)
        mine[mine] = self.host.readable_in_place(self.pool.host_slots[blocks[mine]])
        columns, blocks = columns[mine][:count], blocks[mine][:count]
        slots, generations = self.pool.host_slots[blocks], self.pool.host_generations[blocks]
        there = self.host.lease(slots, generations)
        columns, blocks, slots, generations = columns[there], blocks[there], slots[there], generations[there]
        self._hold_far(slots, generations)
        self._far[row] += len(slots)
        self.table.put(np.full(len(columns), row), columns, self.host.addresses(slots) | FAR)
        self.pool.drop(blocks)
        self.stats.spilled += len(blocks)
        return len(blocks)

    def evict(self, count: int) -> int:
        """Let go of up to `count` device blocks that nobody holds, coldest first, copied below before.

        Returns:
            how many went.
        """
        victims = self.pool.coldest(count)
        self._save(victims)
        self.pool.evict(victims)
        return len(victims)

    def sharing(self) -> Sharing:
        """How much of what the block tables hold is held by several rows."""
        rows = self.table.rows_in_use
        if not len(rows):
            return Sharing(0, 0)
        words = np.concatenate([self.table.row(row) for row in rows.tolist()])
        return Sharing(len(words), len(np.unique(words)))

    def flush(self) -> None:
        """Wait until every full block has its copy in host memory, as far as there is room."""
        if self._write_back is not None:
            self._write_back.flush(wait=_ROOM_SECONDS)

    # Sessions in the cold tier

    def save_session(self, name: str, sleeping: SleepingSequence, tokens: Tokens) -> bool:
        """Keep what is needed to go on with a session in another process, on any host.

        Args:
            name: the caller's id of the session.
            tokens: the whole conversation, at least ``sleeping.length`` tokens.

        Returns:
            False where there is no cold tier or it did not take the record.
        """
        if self.host is None:
            return False
        record = SessionRecord(sleeping.root, sleeping.length, as_tokens(tokens), sleeping.extra_keys)
        return self.host.put_note(_session_key(sleeping.root, name), record.pack())

    def find_session(self, name: str, *, root: bytes | None = None) -> SessionRecord | None:
        """The record of a session that was saved in this space, or None.

        Args:
            name: the caller's id of the session.
            root: the root of its chain; None for the store's.

        Raises:
            RecordError: there is a record, of another version.
        """
        root = self.root if root is None else root
        data = self.host.get_note(_session_key(root, name)) if self.host is not None else None
        if data is None:
            return None
        record = SessionRecord.unpack(data)
        return record if record.root == root else None

    # The rest

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with every later event of the device tier; returns how to end it."""
        return self.events.subscribe(listener)

    def close(self) -> None:
        """Finish copies under way and give the device memory back. The host store is not closed."""
        with ExitStack() as rest:
            rest.callback(self.arena.close)
            rest.callback(self._mover.close)
            rest.callback(self._let_go)
            self.flush()

    def _let_go(self) -> None:
        """End promotions, rows and leases."""
        for promotion in self._promotions:
            promotion.transfer.wait()
        self._finish_promotions()
        for row in self.table.rows_in_use.tolist():
            self.close_row(row)
        self._release_ended()

    def check_integrity(self) -> None:
        """Prove that tables, references, leases and index agree.

        Raises:
            IntegrityError: naming the first thing that does not agree.
        """
        held = np.zeros(self.pool.capacity, dtype=np.int64)
        far = np.zeros(len(self._far_refs), dtype=np.int64)
        for row in self.table.rows_in_use.tolist():
            words = self.table.row(row)
            near, slots = self._split(words)
            if not self.arena.contains(words[(words & FAR) == 0]).all():
                raise IntegrityError(f"row {row} has a near word outside of the device arena")
            if len(np.unique(near)) != len(near) or len(np.unique(slots)) != len(slots):
                raise IntegrityError(f"row {row} holds a block twice")
            if len(slots) != self._far[row]:
                raise IntegrityError(f"row {row} has {len(slots)} far words, {self._far[row]} are counted")
            if len(words) < self.layout.blocks_for(int(self.lengths[row])):
                raise IntegrityError(f"row {row} is longer than its blocks")
            held[near] += 1
            far[slots] += 1
            full = int(self.lengths[row]) // self.layout.block_size
            for column, word in enumerate(words[:full].tolist()):
                if not word & FAR:
                    block = int(self.arena.slots_at(np.array([word]))[0])
                    name = self.pool.hash_of(block)
                    if name is not None and name != self._hashes[row][column]:
                        raise IntegrityError(f"row {row} block {column} has another hash than its tokens")
        for promotion in self._promotions:
            held[promotion.blocks] += 1
            far[promotion.slots] += 1
        moving = np.zeros(self.pool.capacity, dtype=np.bool_)
        if self._write_back is not None:
            for blocks in self._write_back.in_flight:
                moving[blocks] = True
        if not np.array_equal(moving, self.pool.moving):
            raise IntegrityError("the pool and the write-back disagree on what is being copied")
        self.pool.check_integrity(held)
        if not np.array_equal(far, self._far_refs):
            slot = int(np.flatnonzero(far != self._far_refs)[0])
            raise IntegrityError(
                f"host slot {slot} is held {far[slot]} times, {self._far_refs[slot]} counted"
            )

    # Inside

    def _attach(
        self,
        row: int,
        count: int,
        device: int,
        hashes: Sequence[bytes],
        partial: _Partial | None,
        cold_deadline: float,
    ) -> Opened:
        """Attach blocks `count`... of `hashes`, then the partly filled one; tell what was found.

        `count` blocks are attached already, `device` of them near.
        """
        size = self.layout.block_size
        found = _Found(device, count - device, 0)
        count = self._attach_names(row, count, hashes, cold_deadline, found)
        in_device, in_host, in_cold = (blocks * size for blocks in (found.device, found.host, found.cold))
        length = count * size
        if partial is not None and count == partial.length // size:
            before = found.device, found.host
            if self._attach_names(row, count, (*hashes[:count], partial.name), cold_deadline, found) > count:
                self._shared_tail[row] = True
                filled = partial.length - length
                length = partial.length
                if found.device > before[0]:
                    in_device += filled
                elif found.host > before[1]:
                    in_host += filled
                else:
                    in_cold += filled
        self.lengths[row] = length
        self.stats.device_hits += found.device
        self.stats.host_hits += found.host
        self.stats.cold_hits += found.cold
        return Opened(row, length, in_device, in_host, in_cold)

    def _attach_names(
        self, row: int, count: int, names: Sequence[bytes], cold_deadline: float, found: _Found
    ) -> int:
        """Attach ``names[count:]`` as far as they are found, near ones first; returns the new count.

        The cold tier is asked when nothing more is found above it, until `cold_deadline` is over.
        """
        end = time.monotonic() + cold_deadline
        while count < len(names):
            near = self.pool.match(names, count)
            if len(near):
                self.pool.hold(near)
                self.table.set(row, count, self.arena.addresses(near))
                found.device += len(near)
                count += len(near)
                if count == len(names):
                    break
            far = self._attach_far(row, count, names[count:], 0.0)
            found.host += far
            if not far and cold_deadline > 0 and (left := end - time.monotonic()) > 0:
                # Not further than to what is near: that may be on its way to host memory by this very thread.
                stop = next((at for at in range(count, len(names)) if names[at] in self.pool.index), None)
                far = self._attach_far(row, count, names[count:stop], left)
                found.cold += far
            if not far:
                break
            count += far
        return count

    def _attach_far(self, row: int, column: int, names: Sequence[bytes], cold_deadline: float) -> int:
        """Lease leading blocks in host memory (or bring them there) and write their words."""
        if self.host is None:
            return 0
        lease = self.host.load(names, cold_deadline) if cold_deadline > 0 else self.host.match(names)
        self._hold_far(lease.slots, lease.generations)
        written = 0
        try:
            written = self._write_far(row, column, lease.slots)
        finally:
            self._end_far(lease.slots[written:])
        return written

    def _write_far(self, row: int, column: int, slots: Ids) -> int:
        """Write words of slots that the row holds; returns how many. The rest are left to the caller.

        Blocks that the device cannot read in place yet are copied to it, as far as it has room.
        """
        if self.host is None or not len(slots):
            return 0
        far = self.host.readable_in_place(slots)
        if not far.all():
            unreadable = np.flatnonzero(~far)
            room = self.available_blocks
            if len(unreadable) > room:
                stop = int(unreadable[room])
                slots, far = slots[:stop], far[:stop]
        words = self.host.addresses(slots) | FAR
        moving = slots[~far]
        if len(moving):
            blocks = self._allocate(len(moving))
            try:
                self._copy(self.host.addresses(moving), self.arena.addresses(blocks))
            except BaseException:
                self.pool.drop(blocks)
                raise
            words[~far] = self.arena.addresses(blocks)
            self._end_far(moving)
        self.table.set(row, column, words)
        self._far[row] += int(np.count_nonzero(far))
        return len(slots)

    def _reattach(self, row: int, sleeping: SleepingSequence) -> tuple[int, int]:
        """Attach the leading blocks that still are where they were; returns how many, and how many near."""
        count = len(sleeping.device_blocks)
        if not count:
            return 0, 0
        blocks = sleeping.device_blocks
        near = self.pool.generations[blocks] == sleeping.device_generations
        found = near.copy()
        if self.host is not None:
            far = np.flatnonzero(~near & (sleeping.host_generations > 0))
            leased = self.host.lease(sleeping.host_slots[far], sleeping.host_generations[far])
            found[far] = leased
            stop = count if found.all() else int(found.argmin())
            # Beyond the first gap nothing is attached.
            slots, generations = sleeping.host_slots[far][leased], sleeping.host_generations[far][leased]
            kept = far[leased] < stop
            self._hold_far(slots[kept], generations[kept])
            if not kept.all():
                self.host.release(slots[~kept], generations[~kept])
        stop = count if found.all() else int(found.argmin())
        if not stop:
            return 0, 0
        near = near[:stop]
        self.pool.hold(blocks[:stop][near])
        written = 0
        # Runs of near and far words in turn; there is one run, most of the time.
        edges = (np.flatnonzero(np.diff(near)) + 1).tolist()
        try:
            for first, last in pairwise([0, *edges, stop]):
                if near[first]:
                    self.table.set(row, first, self.arena.addresses(blocks[first:last]))
                    written = last
                else:
                    written += self._write_far(row, first, sleeping.host_slots[first:last])
                if written < last:
                    break
        finally:
            self.pool.drop(blocks[written:stop][near[written:]])
            self._end_far(sleeping.host_slots[written:stop][~near[written:]])
        return written, int(np.count_nonzero(near[:written]))

    def _split(self, words: Words) -> tuple[Ids, Ids]:
        """Device blocks and host slots that words name."""
        far = (words & FAR) != 0
        if self.host is None or not far.any():
            return self._blocks_at(words), np.empty(0, dtype=np.int32)
        return self._blocks_at(words[~far]), self.host.slots_at(words[far])

    def _blocks_at(self, words: Words) -> Ids:
        """Device blocks that near words name: `DeviceArena.slots_at` without its checks, for hot paths."""
        blocks: Ids = ((words - self.arena.base) // self.arena.slot_bytes).astype(np.int32)
        return blocks

    def _allocate(self, count: int) -> Ids:
        """Grant device blocks; what is evicted for them is copied below first, if there is room below.

        Raises:
            CapacityError: fewer are available.
        """
        missing = count - self.pool.free
        if 0 < missing <= self.pool.cached:
            # A few more than are wanted, so that most steps of a full device tier evict nothing.
            ahead = min(_EVICT_AHEAD, self.pool.capacity // 256)
            victims = self.pool.coldest(max(missing, ahead))
            self._save(victims)
            self.pool.evict(victims)
        return self.pool.allocate(count)

    def _save(self, victims: Ids) -> None:
        """See that cached blocks have a copy in host memory, as far as there is room, and count the others.

        A copy that was made once may have been evicted below since: a block that is read in the device tier
        all the time looks cold there.
        """
        pool = self.pool
        if self.host is not None and self._write_back is not None:
            if pool.moving[victims].any():
                self._write_back.finish()
            known = victims[pool.host_generations[victims] > 0]
            slots, generations = pool.host_slots[known], pool.host_generations[known]
            there = self.host.lease(slots, generations)
            self.host.release(slots[there], generations[there])
            pool.host_generations[known[~there]] = 0
            lacking = victims[pool.host_generations[victims] == 0]
            if len(lacking):
                self._write_back.add(lacking)
                self._write_back.flush(wait=_ROOM_SECONDS)
        self.stats.dropped += int(np.count_nonzero(pool.host_generations[victims] == 0))

    def _copy(self, source: Words, target: Words) -> None:
        transfer = self._mover.copy(source, target, self.layout.block_bytes)
        transfer.wait()
        if transfer.error is not None:
            raise transfer.error

    def _own_tails(self, rows: npt.NDArray[np.int64]) -> None:
        """Make the partly filled last block of each row its own, copying where others hold it.

        Raises:
            CapacityError: there is no room for the copies; nothing was changed.
        """
        columns = self.lengths[rows] // self.layout.block_size
        words = self.table.words[rows, columns]
        left: dict[int, int] = {}
        copied = np.ones(len(rows), dtype=np.bool_)
        for at, word in enumerate(words.tolist()):
            if not word & FAR:
                block = int(self.arena.slots_at(words[at : at + 1])[0])
                refs = left.get(block, int(self.pool.refs[block]))
                # The last one to hold it may have it as it is.
                copied[at] = refs > 1 or self.pool.moving[block]
                left[block] = refs - 1
        if copied.any():
            mine = self._allocate(int(copied.sum()))
            theirs = words[copied]
            try:
                self._copy(theirs & ~TAG_MASK, self.arena.addresses(mine))
            except BaseException:
                self.pool.drop(mine)
                raise
            self.table.put(rows[copied], columns[copied], self.arena.addresses(mine))
            # One at a time: several rows may have held the same block.
            for row, at in zip(rows[copied].tolist(), range(len(theirs)), strict=True):
                near, slots = self._split(theirs[at : at + 1])
                self.pool.drop(near)
                self._end_far(slots)
                self._far[row] -= len(slots)
            self.stats.copied_on_write += len(theirs)
        for block in self.arena.slots_at(words[~copied]).tolist():
            self.pool.withdraw(block)
        self._shared_tail[rows] = False

    def _keep_partial(self, row: int, length: int) -> bytes | None:
        """Name the partly filled last block by its tokens, so that it is kept like any other."""
        size = self.layout.block_size
        column, filled = divmod(length, size)
        if not filled:
            return None
        hashes = self._hashes[row]
        last = hashes[column - 1] if column else self._roots[row]
        name = hash_partial(self._tails[row, :filled], last, self._extra_keys[row].get(column, ()))
        word = self.table.words[row, column]
        if word & FAR:
            return name
        block = self.arena.slots_at(np.array([word]))
        if self.pool.hash_of(int(block[0])) is None and name not in self.pool.index:
            self._name(block, [name])
        return name

    def _publish(
        self, rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64], names: list[bytes]
    ) -> None:
        """Blocks (row, column) are full: let them be found by their names, queue their copies."""
        blocks = self._blocks_at(self.table.words[rows, columns])
        holders = self.pool.publish(blocks, names)
        own = holders == blocks
        if not own.all():
            for at in (~own).nonzero()[0].tolist():
                self._adopt(int(rows[at]), int(columns[at]), int(blocks[at]), int(holders[at]))
            blocks, names = blocks[own], [names[at] for at in own.nonzero()[0].tolist()]
        self._queue(blocks, names)

    def _names_of(self, rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]) -> list[bytes]:
        """Prefix hashes of blocks that are full; those beyond a prompt are computed from the rows' tails."""
        names = []
        messages: list[bytes] | None = None
        for at, (row, column) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
            hashes = self._hashes[row]
            if column >= len(hashes):
                if messages is None:
                    messages = pack_blocks(self._tails[rows])
                message = messages[at]
                if self._extra_keys[row]:
                    message += pack_keys(self._extra_keys[row].get(column, ()))
                hashes.append(link(hashes[-1] if hashes else self._roots[row], message))
            names.append(hashes[column])
        return names

    def _adopt(self, row: int, column: int, block: int, twin: int) -> None:
        """The same block was computed elsewhere at the same time: hold that one, free this."""
        twins = np.array([twin], dtype=np.int32)
        self.pool.hold(twins)
        self.table.set(row, column, self.arena.addresses(twins))
        self.pool.drop(np.array([block], dtype=np.int32))
        self.stats.adopted += 1

    def _name(self, blocks: Ids, names: list[bytes]) -> None:
        self.pool.publish(blocks, names)
        self._queue(blocks, names)

    def _queue(self, blocks: Ids, names: list[bytes]) -> None:
        """Blocks were published: count them, tell of them, have them copied to host memory."""
        if not len(blocks):
            return
        self.stats.published += len(blocks)
        self.events.emit(EventKind.STORED, "device", self.space, names)
        if self._write_back is not None:
            self._write_back.add(blocks)

    def _hold_far(self, slots: Ids, generations: npt.NDArray[np.int64]) -> None:
        """A row holds these leased slots; the store keeps one lease a slot, however many rows hold it."""
        before = self._far_refs[slots]
        self._far_refs[slots] = before + 1
        self._far_generations[slots] = generations
        again = before > 0
        if again.any():
            self._ended.append((slots[again], generations[again]))

    def _end_far(self, slots: Ids) -> None:
        """A row no longer holds these slots; the lease ends when the step that may read them is done."""
        if not len(slots):
            return
        after = self._far_refs[slots] - 1
        self._far_refs[slots] = after
        gone = slots[after == 0]
        if len(gone):
            self._ended.append((gone, self._far_generations[gone]))

    def _release_ended(self) -> None:
        ended, self._ended = self._ended, []
        if self.host is not None:
            for slots, generations in ended:
                self.host.release(slots, generations)

    def _finish_promotions(self) -> None:
        """Rewrite the words of far blocks whose copies have arrived, in every row that holds them."""
        for promotion in [promotion for promotion in self._promotions if is_over(promotion.transfer)]:
            self._promotions.remove(promotion)
            self._promoting[promotion.slots] = False
            try:
                promotion.transfer.wait()
                self._install(promotion)
            finally:
                self._end_far(promotion.slots)
                self.pool.drop(promotion.blocks)

    def _install(self, promotion: _Promotion) -> None:
        if self.host is None:
            return
        target = np.full(len(self._far_refs), -1, dtype=np.int32)
        target[promotion.slots] = promotion.blocks
        for row in np.flatnonzero(self._far).tolist():
            words = self.table.row(row)
            columns = np.flatnonzero(words & FAR)
            if self._shared_tail[row]:
                columns = columns[columns < self.lengths[row] // self.layout.block_size]
            slots = self.host.slots_at(words[columns])
            here = target[slots] >= 0
            columns, slots = columns[here], slots[here]
            if len(columns):
                blocks = target[slots]
                self.pool.hold(blocks)
                self.table.put(np.full(len(columns), row), columns, self.arena.addresses(blocks))
                self._far[row] -= len(columns)
                self._end_far(slots)
        blocks = promotion.blocks
        self.pool.host_slots[blocks] = promotion.slots
        self.pool.host_generations[blocks] = promotion.generations
        new = [at for at, name in enumerate(promotion.hashes) if name not in self.pool.index]
        names = [promotion.hashes[at] for at in new]
        self.pool.publish(blocks[new], names)
        self.events.emit(EventKind.STORED, "device", self.space, names)
        self.stats.promoted += len(blocks)

    def _tell_removed(self, hashes: Sequence[bytes]) -> None:
        self.events.emit(EventKind.REMOVED, "device", self.space, hashes)


def _partial_of(sleeping: SleepingSequence) -> _Partial | None:
    return _Partial(sleeping.partial, sleeping.length) if sleeping.partial is not None else None


def _session_key(root: bytes, name: str) -> bytes:
    return b"session:" + root + name.encode()
