"""Which block goes first: the interface of eviction policies, and how one is chosen by name.

A policy ranks the blocks of one tier (one space of host memory, or one device tier) by their ids. What is
leased, referenced or being moved is not ranked. A tier tells its policy, of each request, in this order:

1. `found`: the leading blocks of a chain that a lookup found; `missed`: those after them that it did not.
   Then `remove` of what was found, which is in use.
2. `wanted`: which of the rest are worth a place; `evict`, to make room; `admit` of those that came.
3. `insert`: of these once they are written, and of what is not in use any more. A chain is told from its end.

A policy that is not in this package is found by its entry point: a distribution that has one of the group
``kvpager.policies`` adds a policy of the entry point's name. It leads to a `PolicyMaker`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, NotRequired, Protocol, TypeAlias, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from ..tiers.errors import ConfigError
from ..tiers.settings import (
    expect_choice,
    expect_flag,
    expect_integer,
    expect_number,
    expect_seconds,
    expect_type,
    shown,
)
from .lineage import ChainPlace, ShortHashes, shortened

__all__ = [
    "DEFAULT_POLICY",
    "MOST_BLOCKS",
    "POLICY_GROUP",
    "BlockFacts",
    "EvictionPolicy",
    "Ids",
    "Losses",
    "PolicyMaker",
    "PolicyOptions",
    "Retention",
    "Weight",
    "check_weights",
    "expect_retention",
    "known_weights",
    "make_policy",
    "policy_names",
    "weights_of",
]

MOST_BLOCKS: Final = (1 << 31) - 1
POLICY_GROUP: Final = "kvpager.policies"
"""The group of entry points that add policies."""
MOST_PRIORITY: Final = 100
DEFAULT_POLICY: Final = "cost"
"""Of a tier for which nobody names another."""

Ids: TypeAlias = npt.NDArray[np.int32]
"""int32 [n] of block or slot ids, no id twice."""
Losses: TypeAlias = Callable[[Ids], npt.NDArray[np.float64]]
"""Seconds that losing each of these blocks costs, float64 [n]."""


@dataclass(frozen=True, eq=False)
class BlockFacts:
    """What is known of n blocks; in the order of their chain where they follow each other.

    Args:
        names: uint64 [n], the first 8 bytes of their prefix hashes.
        parents: uint64 [n], the same of the block before each; 0: it is the first one, or not known.
        depths: int32 [n], 1-based index of each in its chain; 0: not known.
    """

    names: ShortHashes
    parents: ShortHashes
    depths: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def of_chain(cls, hashes: Sequence[bytes], start: ChainPlace | None) -> BlockFacts:
        """Those of blocks that follow each other.

        Args:
            hashes: theirs, 16 bytes each.
            start: where in its chain the first one is; None: that is not known, or they do not follow.
        """
        names = shortened(hashes)
        if start is None:
            return cls(names, np.zeros_like(names), np.zeros(len(names), dtype=np.int32))
        parents = np.concatenate([shortened([start.before]), names[:-1]])[: len(names)]
        return cls(names, parents, np.arange(start.depth, start.depth + len(names), dtype=np.int32))


@dataclass(frozen=True)
class Retention:
    """Advice on how long blocks are worth keeping. None of it keeps a block for ever, as a pin does.

    Args:
        priority: from -100 to 100; above 0: worth more than others that are used alike, below: less.
        ttl: seconds that this holds; None: as long as the tier's setting says.
        will_return: seconds after which they are expected to be used again; None: nothing is known.
        about_to_finish: whoever uses them is nearly done, and computing them again would delay that.

    Raises:
        ConfigError: a value is of a wrong type or out of range.
    """

    priority: int = 0
    ttl: float | None = None
    will_return: float | None = None
    about_to_finish: bool = False

    def __post_init__(self) -> None:
        expect_integer("priority", self.priority, -MOST_PRIORITY, MOST_PRIORITY)
        expect_flag("about_to_finish", self.about_to_finish)
        if self.ttl is not None:
            object.__setattr__(self, "ttl", expect_seconds("ttl", self.ttl, above=True))
        if self.will_return is not None:
            object.__setattr__(self, "will_return", expect_seconds("will_return", self.will_return))


def expect_retention(retention: object) -> Retention | None:
    """The advice, if it is some or None.

    Raises:
        ConfigError: it is neither.
    """
    return (
        None if retention is None else expect_type("retention", retention, Retention, "a Retention or None")
    )


class EvictionPolicy(Protocol):
    """Ranks evictable blocks. Every call takes a batch; the cost per id does not grow with the tier.

    An id stands for the block that was admitted under it last. Calls come from one thread at a time.
    """

    @property
    def learns(self) -> bool:
        """Whether it is to be told of what it may learn from. Where it is not, `admit`, `found`, `missed`,
        `retain` and `wanted` are not called, and hot paths are spared them."""
        ...

    def __len__(self) -> int:
        """How many blocks are ranked: they may be evicted."""
        ...

    def admit(self, ids: Ids, facts: BlockFacts) -> None:
        """These ids hold new blocks from now on, which are not ranked before `insert`."""
        ...

    def found(self, ids: Ids) -> None:
        """One lookup found these, the leading blocks of a chain in order: a use of each. Or none."""
        ...

    def missed(self, facts: BlockFacts) -> None:
        """That lookup asked for these, too, which follow what it found, and they were not there."""
        ...

    def insert(self, ids: Ids) -> None:
        """These became evictable, just used; where they tie, earlier ones are to be evicted sooner."""
        ...

    def remove(self, ids: Ids) -> None:
        """These are in use again. Ids that are not ranked are passed over."""
        ...

    def forget(self, ids: Ids, *, chosen: bool = False) -> None:
        """Their blocks are gone from this tier: purged, aborted, or with their extent.

        They are not ranked any more, if they were.

        Args:
            ids: theirs.
            chosen: they went since the tier chose them among the coldest, which it looked at last; `evict`
                where it does not want them all.
        """
        ...

    def wanted(self, facts: BlockFacts, room: int) -> npt.NDArray[np.bool_]:
        """Admission, bool [n]: which of these new blocks are worth a place.

        Where one is not, those that follow it in its chain are not, either: they would not be found.

        Args:
            facts: of the blocks.
            room: how many slots are free; ranked blocks must go for the others.
        """
        ...

    def retain(self, ids: Ids, retention: Retention) -> None:
        """Advice on these blocks, ranked or not."""
        ...

    def demote(self, ids: Ids) -> int:
        """Those of these that are ranked are evicted next, the first one first; returns how many."""
        ...

    def coldest(self, count: int) -> Ids:
        """Up to `count` blocks that would be evicted next, the first one first. Changes nothing."""
        ...

    def evict(self, count: int) -> Ids:
        """Take up to `count` blocks out and forget them, the first to go first."""
        ...

    def resize(self, capacity: int) -> None:
        """Ids up to `capacity` - 1 may come."""
        ...

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the bookkeeping does not agree with itself."""
        ...


@dataclass(frozen=True)
class Weight:
    """A number of a policy that can be set.

    Args:
        usual: its value where nothing is said.
        least, most: its bounds.
        above: it is greater than `least`.
    """

    usual: float
    least: float
    most: float
    above: bool = False


class PolicyOptions(TypedDict):
    """What a policy is made with, beside the number of ids.

    clock: seconds since whatever time: what ages are reckoned by. A simulator gives that of its trace.
    losses: what losing blocks costs; none: all alike.
    seed: of whatever it draws.
    weights: of each name of its `known_weights` the value.
    """

    clock: NotRequired[Callable[[], float]]
    losses: NotRequired[Losses | None]
    seed: NotRequired[int]
    weights: NotRequired[Mapping[str, float]]


class PolicyMaker(Protocol):
    """Makes policies of one kind: their class, as a rule."""

    @property
    def known_weights(self) -> Mapping[str, Weight]:
        """What of it can be set, by name. With any values within their bounds it ranks."""
        ...

    def __call__(self, capacity: int, /, **options: Unpack[PolicyOptions]) -> EvictionPolicy:
        """A policy that ranks nothing yet, of ids below `capacity`."""
        ...


_BUILT_IN: Final = {
    name: EntryPoint(name, f"{__package__}.{where}", POLICY_GROUP)
    for name, where in (
        ("cost", "cost_policy:CostPolicy"),
        ("lru", "lru_policy:LRUPolicy"),
        ("s3fifo", "s3fifo_policy:S3FIFOPolicy"),
    )
}


def policy_names() -> list[str]:
    """The names of all policies, in their order."""
    return sorted({*_BUILT_IN, *entry_points(group=POLICY_GROUP).names})


def make_policy(
    name: str,
    capacity: int,
    *,
    clock: Callable[[], float] = time.monotonic,
    losses: Losses | None = None,
    seed: int = 0,
    weights: Mapping[str, float] | None = None,
) -> EvictionPolicy:
    """The policy called `name`, for ids below `capacity`.

    Args:
        name: one of `policy_names`.
        capacity: ids are below it.
        clock, losses, seed: as of `PolicyOptions`.
        weights: those of its weights that are to be other than its own; None: none.

    Raises:
        ConfigError: there is no such policy, it cannot be imported, is none, or has no such weight, or a
            weight is out of its bounds.
    """
    maker = _maker(name)
    values = weights_of(name, maker.known_weights, weights)
    return maker(capacity, clock=clock, losses=losses, seed=seed, weights=values)


def known_weights(name: str) -> Mapping[str, Weight]:
    """The weights of the policy called `name`.

    Raises:
        ConfigError: there is no such policy, it cannot be imported, or is none.
    """
    return _maker(name).known_weights


def check_weights(name: str, weights: object) -> dict[str, float]:
    """These weights of the policy called `name`, as numbers; None: none.

    Raises:
        ConfigError: there is no such policy, or it has no such weight, or one is out of its bounds.
    """
    given: Any = {} if weights is None else weights
    values = weights_of(name, known_weights(name), given)
    return {one: values[one] for one in given}


def weights_of(name: str, known: Mapping[str, Weight], given: object) -> dict[str, float]:
    """A policy's weights: of those that are given their values, of the others what is usual.

    Args:
        name: of the policy.
        known: its weights.
        given: a mapping of names to numbers; None: none.

    Raises:
        ConfigError: `given` is none, names what is no weight of the policy, or one is out of its bounds.
    """
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise ConfigError("policy_weights", f"must be a mapping of names to numbers, got {shown(given)}")
    for one in given:
        if one not in known:
            there = f"these are: {', '.join(known)}" if known else "it has none"
            raise ConfigError("policy_weights", f"{name!r} has no weight {shown(one)}; {there}")
    return {
        one: expect_number(
            f"policy_weights.{one}",
            given.get(one, weight.usual),
            weight.least,
            weight.most,
            above=weight.above,
        )
        for one, weight in known.items()
    }


def _maker(name: str) -> PolicyMaker:
    found = _BUILT_IN.get(name) if isinstance(name, str) else None
    if found is None:
        expect_choice("policy", name, policy_names())
        found = next(iter(entry_points(group=POLICY_GROUP, name=name)))
    try:
        maker: PolicyMaker = found.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError("policy", f"{name!r} leads to {found.value}: {error}") from error
    known = getattr(maker, "known_weights", None)
    if not (
        callable(maker)
        and isinstance(known, Mapping)
        and all(isinstance(one, Weight) for one in known.values())
    ):
        raise ConfigError(
            "policy",
            f"{name!r} leads to {found.value}, which makes no policies: it must be a class whose "
            "`known_weights` map names to a Weight each",
        )
    return maker
