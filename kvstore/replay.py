"""Traces replayed: which blocks of each request a tier would have had, under a policy and with so much room.

A `ReplayedTier` makes the calls of a policy that a live tier makes, in the same order (`kvstore.policy`):
the very objects that rank the live store's blocks rank these. It has no bytes and no names, only the
numbers that a trace has for its blocks, so a request costs a few array operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ..tiers.arena import SlotAllocator
from ..tiers.errors import IntegrityError
from ..tiers.settings import expect_integer
from .cost import CostModel, Run, Tier
from .policy import MOST_BLOCKS, BlockFacts, Ids, make_policy
from .textbook import TextbookCache
from .trace import BlockNumbers, Trace

__all__ = ["Hits", "Progress", "ReplayedTier", "Score", "TierChoice", "replay", "replay_textbook", "score"]

Progress: TypeAlias = Callable[[int], None]
"""Told from time to time how many events are done."""
_TOLD_EVERY: Final = 256


@dataclass(frozen=True)
class TierChoice:
    """A tier that there might be.

    Args:
        policy: name of its policy.
        blocks: how many blocks it holds.
        weights: of the policy; None: its own.

    Raises:
        ConfigError: `blocks` is out of range.
    """

    policy: str
    blocks: int
    weights: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        expect_integer("blocks", self.blocks, 1, MOST_BLOCKS)


@dataclass(frozen=True, eq=False)
class Hits:
    """How many blocks of each event were there, those alone before which all were.

    Attributes:
        host: int32 [n], in host memory.
        cold: int32 [n], in the cold tier, after those.
    """

    host: npt.NDArray[np.int32]
    cold: npt.NDArray[np.int32]

    @property
    def blocks(self) -> npt.NDArray[np.int32]:
        """In either, int32 [n]."""
        return self.host + self.cold


@dataclass(frozen=True)
class Score:
    """What hits come to, as shares of what was asked for.

    Attributes:
        blocks: of the blocks.
        tokens: of the tokens.
        seconds: of the seconds that prefilling all prompts takes without a cache, the share that is saved;
            None: the model's compute is not known.
        seconds_saved: those seconds; None likewise.
        cold_blocks: of the blocks, the share that was found in the cold tier alone.
    """

    blocks: float
    tokens: float
    seconds: float | None
    seconds_saved: float | None
    cold_blocks: float


class ReplayedTier:
    """One tier, without bytes. Blocks are known by their numbers in the trace.

    Args:
        trace: what is replayed.
        choice: policy and size.
        seed: of what the policy draws.
        cost: what losing a block costs; None: all alike.
        below: where a block has its next copy down, uint8 [n] of `Tier` for blocks int32 [n].

    Attributes:
        policy: the policy itself.
        now: the trace's time, in seconds: the policy's clock.
    """

    def __init__(
        self,
        trace: Trace,
        choice: TierChoice,
        *,
        seed: int = 0,
        cost: CostModel | None = None,
        below: Callable[[BlockNumbers], npt.NDArray[np.uint8]] | None = None,
    ) -> None:
        self.now = 0.0
        self._trace = trace
        self._cost = cost
        self._below = below
        self._there = np.zeros(trace.distinct, dtype=np.bool_)
        self._slot_of = np.zeros(trace.distinct, dtype=np.int32)
        self._block_in = np.zeros(choice.blocks, dtype=np.int32)
        self._free = SlotAllocator(choice.blocks)
        self.policy = make_policy(
            choice.policy,
            choice.blocks,
            clock=lambda: self.now,
            losses=None if cost is None else self._losses,
            seed=seed,
            weights=choice.weights,
        )

    def has(self, blocks: BlockNumbers) -> npt.NDArray[np.bool_]:
        """bool [n], whether each block is there."""
        return self._there[blocks]

    def leading(self, chain: BlockNumbers) -> int:
        """How many leading blocks of a chain are there."""
        there = self._there[chain]
        return len(there) if there.all() else int(there.argmin())

    def look_up(self, chain: BlockNumbers) -> int:
        """Look a chain up and lease what is found of it: so many leading blocks, until `release`."""
        found = self.leading(chain)
        policy = self.policy
        slots = self._slot_of[chain[:found]]
        if policy.learns:
            policy.found(slots)
            if found < len(chain):
                policy.missed(self.facts(chain[found:]))
        if found:
            policy.remove(slots)
        return found

    def lease(self, blocks: BlockNumbers) -> None:
        """Blocks that are there are in use, without having been looked up."""
        if len(blocks):
            self.policy.remove(self._slot_of[blocks])

    def release(self, blocks: BlockNumbers) -> None:
        """Blocks in the order of their chain are not in use any more."""
        if len(blocks):
            self.policy.insert(self._slot_of[blocks][::-1])

    def put(self, blocks: BlockNumbers, *, asked_for: bool = False) -> tuple[BlockNumbers, BlockNumbers]:
        """Blocks come; those that are there stay as they are.

        Args:
            blocks: in the order of their chain.
            asked_for: somebody waits for them: whether they are worth a place is no question.

        Returns:
            the blocks that were taken, and those that went for them.
        """
        policy = self.policy
        there = self._there[blocks]
        new, present = blocks[~there], np.empty(0, np.int32)
        if len(new) < len(blocks):
            # Making room must not evict them; the live store has them in the order of their slots.
            present = np.sort(self._slot_of[blocks[there]])
            policy.remove(present)
        if policy.learns and not asked_for and len(new) > self._free.free_count:
            new = new[policy.wanted(self.facts(new), self._free.free_count)]
        gone = self._make_room(len(new))
        slots = self._free.allocate(min(len(new), self._free.free_count))
        slots.sort()
        if len(present):
            policy.insert(present[::-1])
        new = new[: len(slots)]
        if len(new):
            self._there[new] = True
            self._slot_of[new] = slots
            self._block_in[slots] = new
            if policy.learns:
                policy.admit(slots, self.facts(new))
            policy.insert(slots[::-1])
        return new, gone

    def facts(self, blocks: BlockNumbers) -> BlockFacts:
        """What a policy is told of blocks."""
        trace = self._trace
        return BlockFacts(trace.names[blocks], trace.parents[blocks], trace.depths[blocks])

    def check_integrity(self) -> None:
        """Prove that slots and blocks agree, and the policy with itself.

        Raises:
            IntegrityError: they do not.
        """
        self.policy.check_integrity()
        blocks = np.flatnonzero(self._there)
        slots = self._slot_of[blocks]
        held = len(self._block_in) - self._free.free_count
        if len(np.unique(slots)) != len(slots) or len(slots) != held:
            raise IntegrityError(f"{len(slots)} blocks are there, {held} slots are held")
        if not np.array_equal(self._block_in[slots], blocks) or len(self.policy) > len(slots):
            raise IntegrityError("slots and blocks do not agree")

    def _make_room(self, count: int) -> BlockNumbers:
        """Have blocks go until so many slots are free, or none may go; returns those that went."""
        missing = count - self._free.free_count
        if missing <= 0:
            return np.empty(0, np.int32)
        slots = self.policy.evict(missing)
        gone: BlockNumbers = self._block_in[slots]
        self._there[gone] = False
        self._free.free(slots)
        return gone

    def _losses(self, slots: Ids) -> npt.NDArray[np.float64]:
        if self._cost is None:
            return np.ones(len(slots))
        blocks = self._block_in[slots]
        below = np.full(len(blocks), Tier.NONE, np.uint8) if self._below is None else self._below(blocks)
        return self._cost.losses(self._trace.depths[blocks], below)


def replay(
    trace: Trace,
    host: TierChoice,
    cold: TierChoice | None = None,
    *,
    cost: CostModel | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Hits:
    """Replay a trace through host memory, and a cold tier below it if there is one.

    What leaves host memory goes to the cold tier, unless that has it. What a request finds there comes up
    to host memory before the request is looked up, and stays below as well.

    Args:
        trace: the trace.
        host, cold: the tiers.
        cost: what losing blocks costs, for policies that weigh it; None: all alike.
        seed: of what policies draw.
        progress: told how far it is.
    """
    lower = None if cold is None else ReplayedTier(trace, cold, seed=seed, cost=cost)
    upper = ReplayedTier(
        trace, host, seed=seed, cost=cost, below=None if lower is None else partial(_below, lower)
    )
    found = np.zeros(len(trace), dtype=np.int32)
    loaded = np.zeros(len(trace), dtype=np.int32)
    starts = trace.starts.tolist()
    calls = zip(trace.times.tolist(), trace.asked.tolist(), trace.filled.tolist(), strict=True)
    for event, (time, asked, filled) in enumerate(calls):
        upper.now = time
        chain = trace.blocks[starts[event] : starts[event + 1]]
        held = 0
        if asked:
            if lower is not None:
                lower.now = time
                loaded[event] = _load(upper, lower, chain[:asked])
            held = upper.look_up(chain[:asked])
            found[event] = held - loaded[event]
        if filled > held:
            _, gone = upper.put(chain[held:filled])
            if lower is not None and len(gone):
                _put_below(lower, gone)
        upper.release(chain[:held])
        if progress is not None and event % _TOLD_EVERY == 0:
            progress(event)
    return Hits(found, loaded)


def _below(lower: ReplayedTier, blocks: BlockNumbers) -> npt.NDArray[np.uint8]:
    return np.where(lower.has(blocks), np.uint8(Tier.COLD), np.uint8(Tier.NONE))


def _load(upper: ReplayedTier, lower: ReplayedTier, chain: BlockNumbers) -> int:
    """Bring up what the lower tier has of a chain after what the upper one has; how many blocks came."""
    resident = upper.leading(chain)
    rest = chain[resident:]
    if not len(rest):
        return 0
    there = lower.look_up(rest)
    came = 0
    if there:
        upper.lease(chain[:resident])
        _, gone = upper.put(rest[:there], asked_for=True)
        upper.release(chain[:resident])
        if len(gone):
            _put_below(lower, gone)
        came = min(there, upper.leading(chain) - resident)
    lower.release(rest[:there])
    return came


def _put_below(lower: ReplayedTier, blocks: BlockNumbers) -> None:
    """Blocks leave the tier above. Leaves went first, so of a chain they come in reverse."""
    lower.put(blocks[~lower.has(blocks)][::-1])


def replay_textbook(trace: Trace, cache: TextbookCache, *, progress: Progress | None = None) -> Hits:
    """Replay a trace through a cache that ranks single blocks."""
    found = np.zeros(len(trace), dtype=np.int32)
    blocks, starts = trace.blocks.tolist(), trace.starts.tolist()
    for event, (asked, filled) in enumerate(zip(trace.asked.tolist(), trace.filled.tolist(), strict=True)):
        chain = blocks[starts[event] : starts[event + 1]]
        if asked:
            hits = 0
            while hits < asked and chain[hits] in cache:
                hits += 1
            found[event] = hits
            used = chain[: max(hits, filled)]
        else:
            # That it is put once more is no use of a block.
            used = [block for block in chain[:filled] if block not in cache]
        cache.use(event, used)
        if progress is not None and event % _TOLD_EVERY == 0:
            progress(event)
    return Hits(found, np.zeros(len(trace), dtype=np.int32))


def score(trace: Trace, hits: Hits, cost: CostModel | None = None) -> Score:
    """What hits come to.

    Args:
        trace: what was replayed.
        hits: what was found.
        cost: what loading and computing take; each request takes what ends first (`CostModel.split`).
    """
    asked, tokens = max(1, trace.references), max(1, trace.prompt_tokens)
    saved, whole = _seconds(trace, hits, cost)
    return Score(
        blocks=int(hits.blocks.sum()) / asked,
        tokens=int(trace.hit_tokens(hits.blocks).sum()) / tokens,
        seconds=None if saved is None or not whole else saved / whole,
        seconds_saved=saved,
        cold_blocks=int(hits.cold.sum()) / asked,
    )


def _seconds(trace: Trace, hits: Hits, cost: CostModel | None) -> tuple[float | None, float]:
    """Seconds that hits save, and that all prompts take without a cache."""
    if cost is None or cost.compute is None:
        return None, 0.0
    saved = whole = 0.0
    rows = zip(
        trace.tokens.tolist(), trace.asked.tolist(), hits.host.tolist(), hits.cold.tolist(), strict=True
    )
    for tokens, asked, host, cold in rows:
        if not asked or not tokens:
            continue
        if not host + cold:
            whole += cost.compute.seconds(0, tokens)
            continue
        # A last block that is partly full is computed: it is no more than a block.
        full = tokens // trace.block_size
        host = min(host, full)
        runs: list[Run] = [(Tier.HOST, host), (Tier.COLD, min(cold, full - host))]
        split = cost.split(runs, tokens)
        saved += split.seconds_saved or 0.0
        whole += split.seconds_no_cache or 0.0
    return saved, whole
