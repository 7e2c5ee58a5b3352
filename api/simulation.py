"""What `kvpager simulate` computes: a trace replayed under each policy at each size, in several processes."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from ..kvstore.cost import CostModel
from ..kvstore.replay import Score, TierChoice, replay, replay_textbook, score
from ..kvstore.textbook import TEXTBOOK, BeladyMIN
from ..kvstore.trace import Trace
from .processes import Interruptions

__all__ = ["MIN", "Contender", "Kind", "Outcome", "Plan", "gap_closed", "simulate"]

MIN: Final = "MIN"
"""What Belady's is called."""
_TOLD_EVERY_SECONDS: Final = 0.25


class Kind(StrEnum):
    """What a row of the answer is about."""

    BOUND = "bound"
    TEXTBOOK = "textbook"
    POLICY = "policy"


@dataclass(frozen=True)
class Contender:
    """What ranks blocks.

    Args:
        name: of a policy of the store, of one of `TEXTBOOK`, or `MIN`.
        kind: which of these it is.
    """

    name: str
    kind: Kind


@dataclass(frozen=True, eq=False)
class Plan:
    """What is to be simulated.

    Args:
        trace: what is replayed.
        contenders: what ranks blocks, each alone.
        sizes: blocks that host memory holds, each size by itself.
        cold_blocks: that the cold tier holds; None: there is none. What is no policy of the store has the
            room of both tiers in one.
        cold_policy: the cold tier's policy.
        cost: what loading and computing take.
        seed: of what policies draw.
    """

    trace: Trace
    contenders: tuple[Contender, ...]
    sizes: tuple[int, ...]
    cold_blocks: int | None
    cold_policy: str
    cost: CostModel
    seed: int

    @property
    def cases(self) -> list[tuple[Contender, int]]:
        """What is replayed."""
        return [(contender, size) for size in self.sizes for contender in self.contenders]


@dataclass(frozen=True)
class Outcome:
    """What became of one contender at one size.

    Args:
        contender: what ranked blocks.
        blocks: that host memory held.
        score: what its hits came to.
        took: seconds that the replay took.
    """

    contender: Contender
    blocks: int
    score: Score
    took: float


def simulate(plan: Plan, jobs: int, tell: Callable[[float], None] | None = None) -> list[Outcome]:
    """Replay everything, in the order of `Plan.cases`.

    Args:
        plan: what.
        jobs: processes at a time, this one where it is 1.
        tell: told from time to time which share is done, from this process.

    Raises:
        KVPagerError: a process ended without a word.
    """
    cases = plan.cases
    shares = _shares(plan, max(1, min(jobs, len(cases))))
    events = len(plan.trace) * len(cases)
    if len(shares) == 1:
        here = [0.0]
        with _Watching(here, events, tell):
            found = [_replay_share(plan, shares[0], 0, here)]
    else:
        progress = multiprocessing.get_context("spawn").RawArray("d", len(shares))
        with Interruptions() as interruptions, _Watching(progress, events, tell):
            calls = [(plan, share, number) for number, share in enumerate(shares)]
            found = interruptions.run_all_apart(_replay_share, calls, progress)
    outcomes = {
        at: outcome
        for share, done in zip(shares, found, strict=True)
        for at, outcome in zip(share, done, strict=True)
    }
    return [outcomes[at] for at in range(len(cases))]


def gap_closed(outcomes: Sequence[Outcome], one: Outcome) -> float | None:
    """Which share of the way from the best textbook policy to MIN a policy goes, in blocks found.

    Args:
        outcomes: of all contenders.
        one: the policy's; others of its size are compared with it.

    Returns:
        below 0 where it finds less than the best; None where it is no policy of the store, there is no way to
        go, or MIN or textbook policies are missing.
    """
    here = [other for other in outcomes if other.blocks == one.blocks]
    best = max((other.score.blocks for other in here if other.contender.kind is Kind.TEXTBOOK), default=None)
    most = next((other.score.blocks for other in here if other.contender.kind is Kind.BOUND), None)
    if one.contender.kind is not Kind.POLICY or best is None or most is None or most <= best:
        return None
    return (one.score.blocks - best) / (most - best)


def _outcome(plan: Plan, contender: Contender, size: int, progress: Callable[[int], None] | None) -> Outcome:
    began = time.perf_counter()
    room = size + (plan.cold_blocks or 0)
    match contender.kind:
        case Kind.POLICY:
            cold = None if plan.cold_blocks is None else TierChoice(plan.cold_policy, plan.cold_blocks)
            hits = replay(
                plan.trace,
                TierChoice(contender.name, size),
                cold,
                cost=plan.cost,
                seed=plan.seed,
                progress=progress,
            )
        case Kind.TEXTBOOK:
            hits = replay_textbook(plan.trace, TEXTBOOK[contender.name](room), progress=progress)
        case Kind.BOUND:
            hits = replay_textbook(plan.trace, BeladyMIN(plan.trace, room), progress=progress)
    # Of a room that is two tiers' in one nobody can say how fast it is.
    known = plan.cold_blocks is None or contender.kind is Kind.POLICY
    found = score(plan.trace, hits, plan.cost if known else None)
    return Outcome(contender, size, found, time.perf_counter() - began)


# ---- in several processes ----


def _shares(plan: Plan, jobs: int) -> list[list[int]]:
    """Which cases each process replays: policies of the store, which take longest, are dealt out first."""
    cases = plan.cases
    order = sorted(range(len(cases)), key=lambda at: (cases[at][0].kind is not Kind.POLICY, -cases[at][1]))
    return [order[first::jobs] for first in range(jobs)]


def _replay_share(plan: Plan, share: Sequence[int], number: int, progress: Any) -> list[Outcome]:
    """Replay some cases. In a process of its own.

    Args:
        number: which of `progress` this process counts in.
        progress: how many events each process has done, float64 [processes], shared.
    """
    cases = plan.cases
    events = len(plan.trace)

    def count(before: int) -> Callable[[int], None]:
        def told(done: int) -> None:
            progress[number] = before + done

        return told

    return [_outcome(plan, *cases[at], count(nth * events)) for nth, at in enumerate(share)]


class _Watching:
    """A thread that tells how far other processes are, while the `with` block waits for them."""

    def __init__(self, progress: Any, events: int, tell: Callable[[float], None] | None) -> None:
        self._progress = progress
        self._events = max(1, events)
        self._tell = tell
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        if self._tell is not None:
            self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._tell is not None:
            self._thread.join()

    def _watch(self) -> None:
        while self._tell is not None and not self._over.wait(_TOLD_EVERY_SECONDS):
            self._tell(sum(self._progress) / self._events)
