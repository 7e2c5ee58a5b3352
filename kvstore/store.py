"""TieredStore: the block tables of one engine over device memory, host memory and the cold tier.

A *row* is a running sequence's line in the block table. Its blocks are near (device tier, held by
reference count) or far (host memory, held by a lease and read in place). Rows are plain ints and state
lies in arrays over rows, so that a decode step costs a few array operations whatever the batch.

One thread drives a store. `poll` is called between steps, when the last step's work on the device is
done: leases that ended are given back then, copies that are done take effect, and words are rewritten.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ..tiers.address import FAR
from ..tiers.errors import ClosedError, ConfigError, IntegrityError, RequestError
from ..tiers.layout import KVLayout
from ..tiers.mover import Mover
from ..tiers.settings import (
    expect_byte_strings,
    expect_bytes,
    expect_integer,
    expect_methods,
    expect_seconds,
    expect_text,
    expect_type,
    shown,
)
from .attach import Attacher, Found
from .calls import CostCalls, HostCalls, LoadCalls
from .chains import RowChains
from .cost import Run, Tier
from .cost_estimates import CostEstimates
from .device import DeviceTier
from .events import Listener
from .far import FarBlocks
from .handles import Generations
from .hashing import HASH_BYTES, ExtraKeys, Tokens, as_tokens, space_id
from .lineage import ChainPlace, Lineage
from .policy import DEFAULT_POLICY, Ids, Retention
from .promotion import Install, Promotions
from .prompt import NamedPrompt, PartialBlock, name_prompt
from .session import Places, SessionRecord, SleepingSequence, session_key
from .stats import StoreStats
from .store_settings import RETENTION_TTL
from .tables import MOST_ROWS, BlockTable, Words
from .tails import SharedTails

__all__ = ["Install", "LoadPays", "NamedPrompt", "Opened", "Sharing", "TieredStore", "Waste"]

_log = logging.getLogger(__name__)

_MOST_UNPLACED: Final = 64
"""Sleepers whose copies are looked for: they are made within moments, or there is no room for them."""

LoadPays: TypeAlias = Callable[[Sequence[Run], Sequence[bytes]], int]
"""Says how many blocks it pays to load, 0: none. It is given what is there of a prompt, of which the last run
may be in the cold tier, and the names of that run's blocks."""


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


@dataclass(frozen=True)
class Waste:
    """Places for tokens in the device tier that are allocated, and how many hold some, in use or cached."""

    places: int
    tokens: int

    @property
    def share(self) -> float:
        """Of what is allocated, that holds nothing."""
        return 1 - self.tokens / self.places if self.places else 0.0


class TieredStore:
    """Block tables, sharing, copy-on-write, promotion, sleep and wake for one engine on one device.

    Calls raise `ClosedError` once it is closed, `ConfigError` for arguments of a wrong type or out of range,
    and `RequestError` for a row that is not in use. The arrays that come with every step (`blocks_wanted`,
    `reserve`, `append`) are not checked.

    Args:
        layout: how a block lies in memory.
        device_blocks: blocks of the device tier.
        root: root of the chain of sequences that name no other (`ChainIdentity.root`).
        host: host memory and cold tier below (a `HostStore`, or what `kvpager.connect` returns), or None for
            a device tier alone.
        device: ``cuda:N``, or ``cpu``, where host memory stands in for VRAM.
        max_sequences: rows of the block table.
        policy: name of the device tier's eviction policy.
        policy_weights: of the policy's weights those that are to be other than its own.
        shard: the layers and heads of this rank, see `space_id`.
        mover: copies blocks; None makes one for the device.
        costs: what loading and computing blocks takes, refined while the store is used; None: not known yet.

    Raises:
        ConfigError: a value is of a wrong type or out of range.
        ClosedError: `host` is closed.
        MemoryUnavailableError: the device does not have that many blocks.
    """

    def __init__(
        self,
        layout: KVLayout,
        device_blocks: int,
        *,
        root: bytes,
        host: HostCalls | None = None,
        device: str = "cpu",
        max_sequences: int = 256,
        policy: str = DEFAULT_POLICY,
        policy_weights: Mapping[str, float] | None = None,
        shard: str = "",
        mover: Mover | None = None,
        costs: CostEstimates | None = None,
    ) -> None:
        device_blocks = expect_integer("device_blocks", device_blocks, 1, 2**31 - 1)
        max_sequences = expect_integer("max_sequences", max_sequences, 1, MOST_ROWS)
        if host is not None:
            expect_methods(
                "host",
                host,
                ("space", "subscribe", "subscribe_lost", "flush", "close"),
                "a HostStore, a connection to a sidecar (kvpager.connect), or None",
            )
            if not host.in_place:
                raise ConfigError(
                    "host",
                    "attention reads host memory where it lies, and a sidecar that is reached over TCP "
                    "passes none: connect to one of this machine (unix:///path)",
                )
            if device != "cpu" and host.device is None:
                raise ConfigError("host", f"its memory is not mapped for {device}")
        if mover is not None:
            expect_methods("mover", mover, ("copy", "close"), "a mover of blocks or None")
        self.layout = layout
        self.root = expect_bytes("root", root, HASH_BYTES)
        self.device = expect_text("device", device)
        self.host = host.space(layout, shard=shard).for_steps() if host is not None else None
        # Where host memory has tenants, its space is one of them.
        self.space = space_id(layout, shard) if self.host is None else self.host.id
        self._lost: deque[tuple[Ids, Generations]] = deque()
        """Leases that ended though nobody released them, as another thread tells."""
        self._unplaced: deque[Places] = deque(maxlen=_MOST_UNPLACED)
        """Of sequences that fell asleep: not all of their copies in host memory were made by then."""
        self._written_back = 0
        self._closed = False
        self.stats = StoreStats()
        self.costs = CostEstimates(layout.block_size, layout.block_bytes) if costs is None else costs
        """The cost model, refined by what is measured. Of the thread that drives the store."""
        self.table = BlockTable(max_sequences, track_changes=device != "cpu")
        self.lengths = np.zeros(max_sequences, dtype=np.int64)
        """int64 [max_sequences]: tokens of each row whose KV is there. Read only."""
        self._device = DeviceTier(
            layout,
            device_blocks,
            device,
            space=self.space,
            host=self.host,
            policy=policy,
            policy_weights=policy_weights,
            mover=mover,
            stats=self.stats,
            costs=self.costs,
        )
        self.arena = self._device.arena
        self.pool = self._device.pool
        self.events = self._device.events
        self._chains = RowChains(max_sequences, layout.block_size)
        self._far: FarBlocks | None = None
        self._promotions: Promotions | None = None
        if self.host is not None:
            self._far = FarBlocks(self.host, max_sequences)
            self._promotions = Promotions(self._device, self._far, self.table, self.costs.copy)
        self._attacher = Attacher(self.table, self._device, self._far)
        self._tails = SharedTails(self.table, self._device, self._attacher, self.stats)
        self._end_listening = host.subscribe_lost(self._hear_lost) if host is not None else None

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
            ConfigError: an argument is of a wrong type or out of range.
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
        root = self.root if root is None else root
        return name_prompt(tokens, self.layout.block_size, root, extra_keys, partial_at)

    def open_named(self, prompt: NamedPrompt, *, cold_deadline: float = 0.0) -> Opened:
        """`open` for a prompt that was named before."""
        self._check_open()
        expect_type("prompt", prompt, NamedPrompt, "a prompt from name_prompt")
        cold_deadline = expect_seconds("cold_deadline", cold_deadline)
        row = self.table.take_row()
        self._chains.start(row, prompt.root, prompt.hashes, prompt.extra_keys)
        try:
            usable = prompt.hashes[: prompt.usable]
            opened = self._attach(row, Found(), usable, prompt.partial, cold_deadline)
        except BaseException:
            self._close_row(row)
            raise
        filled = opened.length % self.layout.block_size
        if filled:
            self._chains.set_tail(row, prompt.tokens[opened.length - filled : opened.length])
        return opened

    def resident_blocks(self, prompt: NamedPrompt) -> int:
        """How many leading blocks of a prompt `open_named` would find in the device tier."""
        self._check_open()
        expect_type("prompt", prompt, NamedPrompt, "a prompt from name_prompt")
        return len(self.pool.match(prompt.hashes[: prompt.usable]))

    def start_load(self, prompt: NamedPrompt, *, pays: LoadPays | None = None) -> LoadCalls | None:
        """Start bringing a prompt's blocks up from the cold tier to host memory, ahead of `open_named`.

        Args:
            pays: is asked how far to; None: load whatever is there.

        Returns:
            the load to wait for; None where everything is near, there is nothing below, or it does not pay.
        """
        expect_type("prompt", prompt, NamedPrompt, "a prompt from name_prompt")
        return self._start_load(prompt.hashes[: prompt.usable], prompt.partial, pays)

    def start_load_sleeping(
        self, sleeping: SleepingSequence, *, pays: LoadPays | None = None
    ) -> LoadCalls | None:
        """Start bringing a sleeping sequence's blocks up from the cold tier, ahead of `wake`."""
        expect_type("sleeping", sleeping, SleepingSequence, "a sequence from sleep")
        return self._start_load(sleeping.hashes, sleeping.partial_block, pays)

    def _start_load(
        self, hashes: Sequence[bytes], partial: PartialBlock | None, pays: LoadPays | None
    ) -> LoadCalls | None:
        self._check_open()
        if self.host is None:
            return None
        names = list(hashes)
        column = len(names) if partial is None else partial.length // self.layout.block_size
        if partial is not None:
            names.insert(column, partial.name)
        near = len(self.pool.match(names))
        if near == len(names):
            return None
        if pays is not None:
            # Where a sidecar does not say, all of it counts as what may lie in cold.
            resident = self.host.count_resident(names[near:]) or 0
            beyond = names[near + resident :]
            runs = (Tier.DEVICE, near), (Tier.HOST, resident), (Tier.COLD, len(beyond))
            if beyond:
                if not (count := pays(runs, beyond)):
                    return None
                names = names[: near + resident + count]
        # What comes after a partly filled block in this list does not in its chain.
        start = ChainPlace.at(names, near) if column >= len(hashes) else None
        return self.host.start_load(names[near:], start=start)

    def retain(self, hashes: Sequence[bytes], retention: Retention) -> int:
        """Advice on how long blocks are worth keeping, in the device tier and in host memory.

        What only the cold tier has is brought up to host memory when nothing else is to be
        (`HostSpace.hint`). It is no use of them.

        Args:
            hashes: theirs, from the first block of their chain on.
            retention: the advice.

        Returns:
            how many blocks this is tried for.
        """
        self._check_open()
        hashes = expect_byte_strings("hashes", hashes, HASH_BYTES)
        retention = expect_type("retention", retention, Retention, "a Retention")
        near = [self.pool.index[name] for name in dict.fromkeys(hashes) if name in self.pool.index]
        ttl = RETENTION_TTL if retention.ttl is None else retention.ttl
        self.pool.retain(np.array(near, dtype=np.int32), replace(retention, ttl=ttl))
        if self.host is None:
            return len(near)
        return max(len(near), self.host.hint(hashes, wanted=True, retention=retention))

    def fork(self, row: int) -> int:
        """A second sequence with the same KV: all blocks are shared, the last one copied when written.

        Raises:
            CapacityError: every row is in use.
        """
        self._check_row(row)
        other = self.table.take_row()
        length = int(self.lengths[row])
        self._attacher.share(row, other, self.layout.blocks_for(length))
        self.lengths[other] = length
        self._chains.fork(row, other)
        if length % self.layout.block_size:
            self._tails.shared[[row, other]] = True
        return other

    def close_row(self, row: int, *, retention: Retention | None = None) -> None:
        """The sequence is over. Its full blocks stay cached; its row and the rest are free.

        Args:
            retention: advice on how long these are worth keeping, or None.
        """
        self._check_row(row)
        full = int(self.lengths[row]) // self.layout.block_size
        names = [] if retention is None else list(self._chains.hashes(row)[:full])
        self._close_row(row)
        if retention is not None:
            self.retain(names, retention)

    def _close_row(self, row: int) -> None:
        self._attacher.let_go(row, self.table.row(row))
        self._tails.shared[row] = False
        self.lengths[row] = 0
        self._chains.end(row)
        self.table.give_row(row)

    def sleep(self, row: int, *, keep_tail: bool = True) -> SleepingSequence:
        """Free the row and all VRAM it needs; its KV is copied to host memory and stays findable there.

        The partly filled last block is kept under the hash of its tokens. Copies go on in the background;
        the blocks leave the device tier when room is wanted.

        Args:
            keep_tail: False computes the partly filled block again, for a row of `take_lost_rows`.
        """
        self._check_row(row)
        length = int(self.lengths[row])
        full = length // self.layout.block_size
        chains = self._chains
        sleeping = SleepingSequence(
            root=chains.root(row),
            hashes=tuple(chains.hashes(row)[:full]),
            length=length,
            tail=chains.tail(row, length),
            extra_keys=chains.extra_keys(row),
            partial=(partial := self._keep_partial(row, length) if keep_tail else None),
            places=self._attacher.places(self.table.row(row)[: full + (partial is not None)]),
        )
        self._close_row(row)
        self._unplaced.append(sleeping.places)
        self._device.start_write_back()
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
        self._check_open()
        expect_type("sleeping", sleeping, SleepingSequence, "a sequence from sleep")
        cold_deadline = expect_seconds("cold_deadline", cold_deadline)
        row = self.table.take_row()
        self._chains.start(row, sleeping.root, sleeping.hashes, sleeping.extra_keys)
        self._chains.set_tail(row, sleeping.tail)
        try:
            names = sleeping.hashes
            if sleeping.partial is not None:
                names = (*names, sleeping.partial)
            found = self._attacher.find_again(row, sleeping.places, names)
            opened = self._attach(row, found, sleeping.hashes, sleeping.partial_block, cold_deadline)
        except BaseException:
            self._close_row(row)
            raise
        self.stats.woken += 1
        return opened

    def prefetch(self, sleeping: SleepingSequence) -> int:
        """Start copying a sleeping sequence's blocks from host memory to device blocks that are free.

        They are found there when it wakes, unless others want the room before.

        Returns:
            how many blocks were started.
        """
        self._check_open()
        expect_type("sleeping", sleeping, SleepingSequence, "a sequence from sleep")
        free = self.pool.free
        if self._promotions is None or not free or not self.table.free_rows:
            return 0
        row = self.table.take_row()
        try:
            self._chains.start(row, sleeping.root, sleeping.hashes, sleeping.extra_keys)
            found = self._attacher.find_again(row, sleeping.places, sleeping.hashes)
            self._attacher.find(row, sleeping.hashes, 0.0, found)
            self.lengths[row] = found.blocks * self.layout.block_size
            return self.promote(row, free)
        finally:
            self._close_row(row)

    def cached_blocks(self, sleeping: SleepingSequence) -> int:
        """How many of `available_blocks` waking a sequence would hold again."""
        self._check_open()
        expect_type("sleeping", sleeping, SleepingSequence, "a sequence from sleep")
        blocks = sleeping.places.device_blocks
        there = self.pool.generations[blocks] == sleeping.places.device_generations
        return int(np.count_nonzero(there & (self.pool.refs[blocks] == 0)))

    def missing_blocks(self, sleeping: SleepingSequence) -> int:
        """How many of a sleeping sequence's full blocks are not where they were in the device tier."""
        self._check_open()
        expect_type("sleeping", sleeping, SleepingSequence, "a sequence from sleep")
        full = len(sleeping.hashes)
        blocks = sleeping.places.device_blocks[:full]
        there = self.pool.generations[blocks] == sleeping.places.device_generations[:full]
        return full - int(np.count_nonzero(there))

    # Steps

    @property
    def available_blocks(self) -> int:
        """Blocks of the device tier that `reserve` can give."""
        return self.pool.available

    def blocks_wanted(self, rows: npt.NDArray[np.int64], counts: npt.NDArray[np.int64] | int) -> int:
        """Device blocks that `reserve` would take; an upper bound where tails are shared."""
        wanted = -(-(self.lengths[rows] + counts) // self.layout.block_size) - self.table.counts[rows]
        return int(wanted.clip(0).sum()) + int(np.count_nonzero(self._tails.shared[rows]))

    def reserve(self, rows: npt.NDArray[np.int64], counts: npt.NDArray[np.int64] | int) -> None:
        """See that each row has private blocks for `counts` more tokens.

        Args:
            rows: int64 [n], no row twice.
            counts: int64 [n], or one number for all.

        Raises:
            CapacityError: the device tier has no room; no row was given any, though shared tails may have
                become private.
        """
        self._check_open()
        size = self.layout.block_size
        shared = self._tails.shared[rows]
        if shared.any():
            writing = rows[shared]
            self._tails.own(writing, self.lengths[writing] // size)
        wanted = self.lengths[rows] + counts - self.table.counts[rows] * size
        growing = (wanted > 0).nonzero()[0]
        if not len(growing):
            return
        wanted = -(-wanted[growing] // size)
        total = int(wanted.sum())
        words = self.arena.addresses(self._device.allocate(total))
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
        self._check_row(row)
        tokens = as_tokens(tokens)
        before = int(self.lengths[row])
        self.lengths[row] = before + len(tokens)
        names = self._chains.extend(row, before, tokens)
        if names:
            first = before // self.layout.block_size
            columns = np.arange(first, first + len(names), dtype=np.int64)
            lineage = Lineage.of_chain(names, ChainPlace.at(self._chains.hashes(row), first))
            self._publish(np.full(len(names), row, dtype=np.int64), columns, names, lineage)

    def append(self, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int32]) -> None:
        """The KV of one more token of each row is written.

        Args:
            rows: int64 [n], no row twice; their prompts are through.
            tokens: int32 [n], the tokens whose KV it is (the step's inputs, not what it sampled).
        """
        self._check_open()
        size = self.layout.block_size
        lengths = self.lengths[rows]
        places = lengths % size
        self._chains.append(rows, places, tokens)
        self.lengths[rows] = lengths + 1
        full = (places == size - 1).nonzero()[0]
        if len(full):
            rows, columns = rows[full], lengths[full] // size
            self._publish(rows, columns, *self._chains.names(rows, columns))

    def poll(self) -> None:
        """Between steps: end leases, finish copies, start the next ones.

        Raises:
            Exception: what a copy failed with.
        """
        self._check_open()
        if self._far is not None:
            self._far.release_ended()
        if self._promotions:
            # What a step was to install is only there when the step came to its end.
            self._promotions.abandon_install()
            self._promotions.finish()
        self._device.poll()
        if self._unplaced and self.stats.written_back != self._written_back:
            self._written_back = self.stats.written_back
            for places in list(self._unplaced):
                if self._attacher.place_copies(places):
                    self._unplaced.remove(places)

    def take_lost_rows(self) -> list[int]:
        """Rows that read in host memory what is no longer leased, as a sidecar told since.

        Their far blocks may be others' by now. They are to be closed, or put to sleep with
        ``keep_tail=False``, before anything else is opened or woken: what is still there is found again, and
        the rest is computed.
        """
        self._check_open()
        if self._far is None:
            return []
        rows: set[int] = set()
        while self._lost:
            lost = self._far.among(*self._lost.popleft())
            for row in self._far.rows if len(lost) else ():
                words = self.table.row(row)
                if np.isin(self._far.slots_at(words[(words & FAR) != 0]), lost).any():
                    rows.add(row)
        if rows:
            _log.warning("%d sequences lost blocks that they read in host memory", len(rows))
        return sorted(rows)

    def _hear_lost(self, space: bytes, slots: Ids, generations: Generations) -> None:
        """In another thread."""
        if space == self.space and len(slots):
            self._lost.append((slots, generations))

    # Moving between tiers

    def promote(self, row: int, limit: int) -> int:
        """Start copying far blocks of a row to the device tier; its words change when they are there.

        Args:
            limit: device blocks to spend; cached ones are evicted for it.

        Returns:
            how many blocks were started.
        """
        self._check_row(row)
        if not isinstance(limit, int) or limit > 0:  # less than none is none
            limit = expect_integer("limit", limit, 0)
        if self._far is None or self._promotions is None or not self._far.counts[row]:
            return 0
        words, columns = self._promotable(self._far, self._promotions, row)
        stop = max(0, min(limit, self.available_blocks, len(words)))
        if stop:
            cells = np.full(stop, row, dtype=np.int64), columns[:stop]
            self._promotions.start(words[:stop], *self._chains.named(*cells))
        return stop

    def start_install(
        self, rows: npt.NDArray[np.int64], limit: int, readers: npt.NDArray[np.int64]
    ) -> Install | None:
        """Have the next step copy far blocks of rows to the device tier as its attention reads them.

        Until `finish_install` their words are tagged *install*. Where the step fails, the next `poll` undoes
        it, and so does the next call of this.

        Args:
            rows: int64 [n], rows of that step; the first ones come first.
            limit: device blocks to spend; cached ones are evicted for it.
            readers: int64, all rows of that step.

        Returns:
            what the step's kernels need to know; None where there is nothing to install.
        """
        self._check_open()
        if self._far is None or self._promotions is None:
            return None
        self._promotions.abandon_install()
        limit = min(limit, self.available_blocks)
        if limit <= 0:
            return None
        found = [
            (row, *self._promotable(self._far, self._promotions, row))
            for row in rows[self._far.counts[rows] > 0].tolist()
        ]
        if not found:
            return None
        words, columns, of_rows = (
            np.concatenate(parts)
            for parts in zip(
                *((words, columns, np.full(len(words), row)) for row, words, columns in found), strict=True
            )
        )
        # What several rows read comes up once, where the first of them has it.
        firsts = np.sort(np.unique(words, return_index=True)[1]) if len(found) > 1 else np.arange(len(words))
        chosen = firsts[:limit]
        if not len(chosen):
            return None
        names, lineage = self._chains.named(of_rows[chosen], columns[chosen])
        readers = readers[self._far.counts[readers] > 0]
        return self._promotions.start_install(words[chosen], names, lineage, readers)

    def finish_install(self) -> None:
        """The step that `start_install` was for is done: what it copied is read in the device tier now."""
        self._check_open()
        if self._promotions is not None:
            self._promotions.finish_install()

    def _promotable(
        self, far: FarBlocks, promotions: Promotions, row: int
    ) -> tuple[Words, npt.NDArray[np.int64]]:
        """The words and columns of a row's far blocks that are full or its own, and not moving."""
        words = self.table.row(row)
        columns = np.flatnonzero(words & FAR)
        if self._tails.shared[row]:
            columns = columns[columns < self.lengths[row] // self.layout.block_size]
        columns = columns[~promotions.are_moving(far.slots_at(words[columns]))]
        return words[columns], columns

    def far_blocks(self, row: int) -> int:
        """How many of a row's blocks lie in host memory."""
        self._check_row(row)
        return int(self._far.counts[row]) if self._far is not None else 0

    def far_to_read(self, row: int) -> int:
        """How many of a row's blocks its next step reads in host memory.

        All that lie there but a partly filled last one that others may find: it is copied before it is
        written.
        """
        count = self.far_blocks(row)
        if count and self._tails.shared[row]:
            last = self.table.words[row, int(self.lengths[row]) // self.layout.block_size]
            count -= bool(last & FAR)
        return count

    def brings(self, row: int) -> bool:
        """Whether blocks of a row are being copied up to the device tier."""
        self._check_row(row)
        if self._far is None or self._promotions is None or not self._far.counts[row]:
            return False
        words = self.table.row(row)
        slots = self._far.slots_at(words[(words & FAR) != 0])
        return bool(self._promotions.are_moving(slots).any())

    def wait_for_promotion(self, seconds: float) -> None:
        """Wait, `seconds` at most, for blocks that are being copied up; `poll` then has them take effect."""
        self._check_open()
        if self._promotions is not None:
            self._promotions.wait(expect_seconds("seconds", seconds))

    def near_blocks(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Device blocks that each row holds, also those that others hold too, int64 [n]."""
        near = self.table.counts[rows].astype(np.int64)
        if self._far is not None:
            near -= self._far.counts[rows]
        return near

    def private_blocks(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Device blocks that each row alone holds, int64 [n]: what is free when it sleeps. For a few rows."""
        counts = np.empty(len(rows), dtype=np.int64)
        for at, row in enumerate(rows.tolist()):
            words = self.table.row(row)
            if self._far is not None and self._far.counts[row]:
                words = words[(words & FAR) == 0]
            counts[at] = np.count_nonzero(self.pool.refs[self._device.blocks_at(words)] == 1)
        return counts

    def read_in_place(self, rows: npt.NDArray[np.int64]) -> int:
        """How many blocks of host memory a step of these rows reads where they lie; a shared one counts once.

        Tails that the step writes are no longer there.
        """
        if self._far is None:
            return 0
        reading = rows[self._far.counts[rows] > 0]
        if not len(reading):
            return 0
        words = np.concatenate([self.table.row(row) for row in reading.tolist()])
        words = words[(words & FAR) != 0]
        return len(words) if len(reading) == 1 else len(np.unique(words))

    def spill(self, row: int, count: int) -> int:
        """Let go of up to `count` of a running row's own device blocks, oldest first: it reads them far.

        Only full blocks that are copied to host memory, and that no other row holds, go.

        Returns:
            how many went.
        """
        self._check_row(row)
        count = expect_integer("count", count, 0)
        if self._far is None or self.host is None:
            return 0
        device, pool = self._device, self.pool
        device.flush()
        columns, blocks = self._own_near(row)
        # Host memory may have let go of copies since; as many as are wanted are made anew.
        device.verify_copies(blocks)
        copied = pool.host_generations[blocks] > 0
        device.save(blocks[~copied][: max(0, count - int(np.count_nonzero(copied)))])
        ready = pool.host_generations[blocks] > 0
        ready[ready] = self.host.readable_in_place(pool.host_slots[blocks[ready]])
        columns, blocks = columns[ready][:count], blocks[ready][:count]
        slots, generations = pool.host_slots[blocks], pool.host_generations[blocks]
        there = self.host.lease(slots, generations)
        columns, blocks, slots, generations = columns[there], blocks[there], slots[there], generations[there]
        self._far.hold(row, slots, generations)
        self.table.put(np.full(len(columns), row), columns, self._far.words(slots))
        pool.drop(blocks)
        self.stats.spilled += len(blocks)
        return len(blocks)

    def may_spill(self, row: int) -> bool:
        """Whether `spill`, which found nothing to do, may find something later though this engine rests.

        Not where the row has no block that could go, or host memory has no room and will have none.
        """
        self._check_row(row)
        if self._far is None or self.host is None or not len(self._own_near(row)[0]):
            return False
        return self.host.room_may_come(self._far.held)

    def evict(self, count: int) -> int:
        """Let go of up to `count` device blocks that nobody holds, coldest first, copied below before.

        Returns:
            how many went.
        """
        self._check_open()
        return self._device.evict(expect_integer("count", count, 0))

    def waste(self) -> Waste:
        """How much of the device tier is allocated and holds nothing: last blocks' ends, copies under way."""
        self._check_open()
        size = self.layout.block_size
        held = np.zeros(self.pool.capacity, dtype=np.int64)
        named = self.pool.named(np.arange(self.pool.capacity, dtype=np.int32))
        held[named] = size - self.pool.lacking[named]
        for row in self.table.rows_in_use.tolist():
            words = self.table.row(row)
            near = np.flatnonzero((words & FAR) == 0)
            blocks = self._device.blocks_at(words[near])
            held[blocks] = np.maximum(held[blocks], (self.lengths[row] - near * size).clip(0, size))
        return Waste((self.pool.capacity - self.pool.free) * size, int(held.sum()))

    def sharing(self) -> Sharing:
        """How much of what the block tables hold is held by several rows."""
        self._check_open()
        rows = self.table.rows_in_use
        if not len(rows):
            return Sharing(0, 0)
        words = np.concatenate([self.table.row(row) for row in rows.tolist()])
        return Sharing(len(words), len(np.unique(words)))

    def flush(self) -> None:
        """Wait until every full block has its copy in host memory, as far as there is room."""
        self._check_open()
        self._device.flush()

    # Sessions in the cold tier

    def save_session(self, name: str, sleeping: SleepingSequence, tokens: Tokens) -> bool:
        """Keep what is needed to go on with a session in another process, on any host.

        Args:
            name: the caller's id of the session.
            tokens: the whole conversation, at least ``sleeping.length`` tokens.

        Returns:
            False where there is no cold tier or it did not take the record.
        """
        self._check_open()
        expect_text("name", name)
        expect_type("sleeping", sleeping, SleepingSequence, "a sequence from sleep")
        tokens = as_tokens(tokens)
        if len(tokens) < sleeping.length:
            raise ConfigError("tokens", f"must be all {sleeping.length} of the sequence, got {len(tokens)}")
        if self.host is None:
            return False
        record = SessionRecord(sleeping.root, sleeping.length, tokens, sleeping.extra_keys)
        return self.host.put_note(session_key(sleeping.root, name), record.pack())

    def find_session(self, name: str, *, root: bytes | None = None) -> SessionRecord | None:
        """The record of a session that was saved in this space, or None.

        Args:
            name: the caller's id of the session.
            root: the root of its chain; None for the store's.

        Raises:
            RecordError: there is a record, of another version.
        """
        self._check_open()
        expect_text("name", name)
        root = self.root if root is None else expect_bytes("root", root, HASH_BYTES)
        data = self.host.get_note(session_key(root, name)) if self.host is not None else None
        if data is None:
            return None
        record = SessionRecord.unpack(data)
        return record if record.root == root else None

    def tell_costs(self) -> None:
        """Tell host memory of this process what loading and computing blocks takes, for its policies.

        A sidecar is told by reports.
        """
        self._check_open()
        host: object = self.host
        if isinstance(host, CostCalls):
            host.tell_costs(self.costs.model)

    # The rest

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with every later event of the device tier; returns how to end it."""
        self._check_open()
        return self.events.subscribe(listener)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Finish copies under way and give the device memory back. The host store is not closed. Idempotent.

        Where the host store was closed before, nothing is copied to it: rows and leases ended with it.
        """
        if self._closed:
            return
        self._closed = True
        with ExitStack() as rest:
            rest.callback(self._device.close)
            if self._end_listening is not None:
                rest.callback(self._end_listening)
            if self.host is None or not self.host.closed:
                rest.callback(self._let_go)
                self._device.flush()

    def _let_go(self) -> None:
        """End promotions, rows and leases."""
        with ExitStack() as rest:
            if self._far is not None:
                rest.callback(self._far.release_ended)
            for row in self.table.rows_in_use.tolist():
                rest.callback(self._close_row, row)
            if self._promotions is not None:
                self._promotions.finish_all()

    def check_integrity(self) -> None:
        """Prove that tables, references, leases and index agree.

        Raises:
            IntegrityError: naming the first thing that does not agree.
        """
        self._check_open()
        held = np.zeros(self.pool.capacity, dtype=np.int64)
        far = np.zeros(self.host.capacity if self.host is not None else 0, dtype=np.int64)
        for row in self.table.rows_in_use.tolist():
            words = self.table.row(row)
            near, slots = self._attacher.split(words)
            if not self.arena.contains(words[(words & FAR) == 0]).all():
                raise IntegrityError(f"row {row} has a near word outside of the device arena")
            if len(np.unique(near)) != len(near) or len(np.unique(slots)) != len(slots):
                raise IntegrityError(f"row {row} holds a block twice")
            if len(slots) != self.far_blocks(row):
                raise IntegrityError(f"row {row} has {len(slots)} far words, {self.far_blocks(row)} counted")
            if len(words) < self.layout.blocks_for(int(self.lengths[row])):
                raise IntegrityError(f"row {row} is longer than its blocks")
            held[near] += 1
            far[slots] += 1
            full = words[: int(self.lengths[row]) // self.layout.block_size]
            for column, word in enumerate(full.tolist()):
                if not word & FAR:
                    name = self.pool.hash_of(int(self.arena.slots_at(np.array([word]))[0]))
                    if name is not None and name != self._chains.hashes(row)[column]:
                        raise IntegrityError(f"row {row} block {column} has another hash than its tokens")
        if self._promotions is not None:
            self._promotions.count_held(held, far)
        self._device.check_integrity(held)
        if self._far is not None:
            self._far.check_integrity(far)

    # Inside

    def _own_near(self, row: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """The columns of a row's full near blocks that no other row holds, and these blocks."""
        full = int(self.lengths[row]) // self.layout.block_size
        words = self.table.row(row)[:full]
        columns = np.flatnonzero((words & FAR) == 0)
        blocks = self._device.blocks_at(words[columns])
        mine = self.pool.refs[blocks] == 1
        return columns[mine], blocks[mine]

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the tiered store is closed")

    def _check_row(self, row: int) -> None:
        """Raise `RequestError` unless this is the row of a sequence."""
        self._check_open()
        if not self.table.in_use(row):
            raise RequestError(f"row {shown(row)} of the block table is not in use")

    def _attach(
        self,
        row: int,
        found: Found,
        hashes: Sequence[bytes],
        partial: PartialBlock | None,
        cold_deadline: float,
    ) -> Opened:
        """Attach what is found of `hashes`, then the partly filled block; tell what was found.

        The blocks of `found` are attached already.
        """
        size = self.layout.block_size
        if found.blocks > len(hashes):  # the partly filled one, too, where it was
            far = bool(self.table.words[row, len(hashes)] & FAR)
            full = Found(found.device - (not far), found.host - far, found.cold)
        else:
            self._attacher.find(row, hashes, cold_deadline, found)
            full = replace(found)
            if partial is not None and full.blocks == partial.length // size:
                names = (*hashes[: full.blocks], partial.name)
                self._attacher.find(row, names, cold_deadline, found)
        length = full.blocks * size
        in_device, in_host, in_cold = full.device * size, full.host * size, full.cold * size
        if partial is not None and found.blocks > full.blocks:
            self._tails.shared[row] = True
            filled = partial.length - length
            length = partial.length
            in_device += filled * (found.device - full.device)
            in_host += filled * (found.host - full.host)
            in_cold += filled * (found.cold - full.cold)
        self.lengths[row] = length
        self.stats.device_hits += found.device
        self.stats.host_hits += found.host
        self.stats.cold_hits += found.cold
        return Opened(row, length, in_device, in_host, in_cold)

    def _keep_partial(self, row: int, length: int) -> bytes | None:
        """Name the partly filled last block by its tokens, so that it is kept like any other."""
        name = self._chains.partial_name(row, length)
        if name is None:
            return None
        word = self.table.words[row, length // self.layout.block_size]
        if not word & FAR:
            block = self._device.blocks_at(np.array([word]))
            if self.pool.hash_of(int(block[0])) is None and name not in self.pool.index:
                column = length // self.layout.block_size
                place = ChainPlace.at(self._chains.hashes(row), column)
                self._device.publish(block, [name], Lineage.of_chain([name], place))
                self.pool.lacking[block] = -length % self.layout.block_size
        return name

    def _publish(
        self,
        rows: npt.NDArray[np.int64],
        columns: npt.NDArray[np.int64],
        names: Sequence[bytes],
        lineage: Lineage,
    ) -> None:
        """Blocks (row, column) are full. What was computed twice at the same time is kept once."""
        blocks = self._device.blocks_at(self.table.words[rows, columns])
        holders = self._device.publish(blocks, names, lineage)
        if holders is blocks:
            return
        for at in (holders != blocks).nonzero()[0].tolist():
            # Hold the other block, free this one.
            twin = holders[at : at + 1]
            self.pool.hold(twin)
            self.table.set(int(rows[at]), int(columns[at]), self.arena.addresses(twin))
            self.pool.drop(blocks[at : at + 1])
            self.stats.adopted += 1
