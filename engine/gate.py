"""The load-or-recompute gate: what is worth bringing up from the cold tier before a prompt is computed.

What lies in device or host memory is attended where it is. What lies beyond it, as far as anyone knows in the
cold tier, is loaded only where that ends sooner than computing it (`CostModel.split`). A load that is begun
and falls behind is given up when computing would end first, so that a hit never makes a request slower than
no cache would. A tier that nobody has measured is tried by runs of blocks that get longer (`TrialLoad`).
Where the cost model does not know what computing takes, everything is loaded.

How much longer a late load takes is not known. It is taken for a multiple of how late it is, so that a tier
that stalls costs a small share of what computing takes, and one that is a little late is still waited for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ..kvstore.calls import LoadCalls
from ..kvstore.cost import CostModel, LinkCost, Run
from ..kvstore.prompt import NamedPrompt
from ..kvstore.session import SleepingSequence
from ..kvstore.store import LoadPays, Opened, TieredStore

__all__ = ["GatedLoad", "LoadGate", "TrialLoad"]

_log = logging.getLogger(__name__)

_LATE_AT: Final = 2.0
"""Times what a load should take, after which it is late."""
_GRACE_SECONDS: Final = 0.005
"""More than that, for threads to be woken."""
_LATENESS: Final = 40.0
"""How many times as late a late load is taken to get."""
_RISKED: Final = 0.015
"""Of what computing takes: what a load may lose that goes over a link nobody has measured."""
_PROBE_SECONDS: Final = 1.0
"""Between two small loads that nobody waits for, so that a tier that got faster is known for it."""
_PROBE_BLOCKS: Final = 8


@dataclass(frozen=True)
class _AtStake:
    """What a load may bring up of a prompt.

    Attributes:
        first: blocks of the prompt that are there already.
        blocks: those after them that it may bring up.
        tokens: of the prompt.
        model: the cost model as of when it began.
    """

    first: int
    blocks: int
    tokens: int
    model: CostModel

    @property
    def unknown(self) -> bool:
        """Whether it is known what computing takes, and nobody knows what loading does."""
        return self.model.cold is None and self.model.compute is not None

    @property
    def first_run(self) -> int:
        """Blocks of the first run over a link that nobody has measured."""
        return max(1, int(_RISKED * self.blocks))

    @property
    def computing(self) -> float:
        """Seconds that computing takes if nothing is loaded."""
        return self._from(0)

    def gain(self, loaded: int) -> float:
        """Seconds of computing that those which are not among the first `loaded` of them would spare."""
        return self._from(loaded) - self._from(self.blocks)

    def gained(self, loaded: int) -> float:
        """Seconds of computing that the first `loaded` of them spare."""
        return self._from(0) - self._from(loaded)

    def _from(self, loaded: int) -> float:
        """Seconds that computing the prompt takes after so many of them."""
        start = min((self.first + loaded) * self.model.block_size, self.tokens)
        return self.model.compute_seconds(start, self.tokens) or 0.0


class GatedLoad:
    """A load that is waited for no longer than it pays. The calls are those of `LoadCalls`.

    Args:
        gate: where what it took is told.
        load: what it stands in front of.
        stake: what it may bring up.
        before: seconds that other loads are to take first.
    """

    def __init__(self, gate: LoadGate, load: LoadCalls, stake: _AtStake, before: float) -> None:
        self._gate = gate
        self._load = load
        self._stake = stake
        self._began = time.monotonic()
        self._before = before
        self._given_up = False
        self._measured = False

    @property
    def loaded(self) -> int:
        """Blocks that have arrived so far."""
        return self._load.loaded

    @property
    def seconds(self) -> float:
        """How long bringing them up took."""
        return self._load.seconds

    def ends_in(self, now: float) -> float:
        """Seconds in which it should end, by the cost model."""
        return max(0.0, self._began + self._before + self._expected() - now)

    def done(self) -> bool:
        """Whether everything that is to be had has arrived, or it no longer pays to wait for it."""
        if self._given_up:
            return True
        if self._load.done():
            self.measure()
            return True
        now = time.monotonic()
        left = self._left(now)
        if self._stake.model.compute is not None and left > self._stake.gain(self._load.loaded):
            self._give_up(now - self._began - self._before + left)
        return self._given_up

    def wait(self, seconds: float) -> bool:
        """Wait until it is done, `seconds` at most; returns whether it is."""
        if not self._given_up:
            self._load.wait(seconds)
        return self.done()

    def stop(self) -> None:
        """Bring nothing more up than what is on its way."""
        self._load.stop()

    def release(self) -> None:
        """Let go of what has arrived."""
        _is_over(self.measure)
        self._load.stop()
        self._load.release()

    def measure(self) -> bool:
        """Tell, once it is done, what it took; returns whether it is."""
        if not self._measured and self._load.done():
            self._measured = True
            self._gate.measured(self._load.loaded, self._load.seconds)
        return self._measured

    def _give_up(self, seconds: float) -> None:
        self._given_up = True
        self._gate.gave_up(self._stake.blocks - self._load.loaded)
        # So long, by all that is known now; what it took in the end is told as well, if that gets known.
        self._gate.measured(self._stake.blocks, seconds)
        self._load.stop()

    def _expected(self) -> float:
        """Seconds that it should take, once it is its turn."""
        model = self._stake.model
        return 0.0 if model.cold is None else model.cold.seconds(self._stake.blocks * model.block_bytes)

    def _left(self, now: float) -> float:
        """Seconds that it seems to take from now on, by the cost model and by how it went so far."""
        loaded, taken = self._load.loaded, now - self._began
        left = self.ends_in(now)
        if loaded:
            left = max(left, (self._stake.blocks - loaded) * taken / loaded)
        late = taken - self._before - _LATE_AT * self._expected() - _GRACE_SECONDS
        return max(left, _LATENESS * late)


class TrialLoad:
    """A load over a link that nobody has measured: it never loses more than a small share of computing.

    It brings up runs of blocks, one after the other. The first is so short that it takes no more than what
    may be lost if loading takes as long as computing; each one that is sooner there than its blocks are
    computed adds to what may be lost by the next one, which is as long as that allows at the rate so far. It
    ends when that is used up, or when computing the rest ends sooner at this rate; what is on its way by then
    still tells what it took. The calls are those of `LoadCalls`.

    Args:
        gate: where what the runs took is told.
        load: the first run, of `_AtStake.first_run` blocks.
        start: starts the next run, of so many blocks at most.
        stake: what it may bring up.
    """

    def __init__(
        self,
        gate: LoadGate,
        load: LoadCalls,
        start: Callable[[int], LoadCalls | None],
        stake: _AtStake,
    ) -> None:
        self._gate = gate
        self._start = start
        self._stake = stake
        self._loads = [load]
        self._asked = stake.first_run
        self._loaded = 0
        """Blocks that runs have brought which are over."""
        self._seconds = 0.0
        self._told = 0
        """Runs of which it was told what they took."""
        self._over = False
        self._risked = _RISKED * stake.computing
        self._began = time.monotonic()

    @property
    def loaded(self) -> int:
        """Blocks that have arrived so far."""
        return sum(load.loaded for load in self._loads)

    @property
    def seconds(self) -> float:
        """How long bringing them up took, by the runs that are over."""
        return self._seconds

    def ends_in(self, now: float) -> float:
        """Seconds in which it should end, as far as that is known."""
        if self._over:
            return 0.0
        return self._rest() if self._loaded else max(0.0, self._slack(now))

    def done(self) -> bool:
        """Whether everything that is to be had has arrived, or it no longer pays to wait for it."""
        if self._over:
            return True
        now = time.monotonic()
        if not self._loads[-1].done():
            if self._slack(now) <= 0:
                self._end()
            return self._over
        self.measure()
        if self._asked >= self._stake.blocks or 0 < self._loaded < self._asked:
            self._over = True  # no more is to be had
        elif (count := self._next(now)) > 0:
            self._run(count)
        else:
            self._end()
        return self._over

    def wait(self, seconds: float) -> bool:
        """Wait until it is done, `seconds` at most; returns whether it is."""
        until = time.monotonic() + seconds
        while not self.done() and (now := time.monotonic()) < until:
            self._loads[-1].wait(max(0.0, min(until - now, self._slack(now))))
        return self._over

    def stop(self) -> None:
        """Bring nothing more up than what is on its way."""
        self._over = True
        self._loads[-1].stop()

    def release(self) -> None:
        """Let go of what has arrived."""
        _is_over(self.measure)
        self.stop()
        for load in self._loads:
            load.release()

    def measure(self) -> bool:
        """Tell what runs took that are done; returns whether all are."""
        while self._told < len(self._loads) and self._loads[self._told].done():
            load = self._loads[self._told]
            self._told += 1
            self._loaded += load.loaded
            self._seconds += load.seconds
            self._gate.measured(load.loaded, load.seconds)
        return self._over and self._told == len(self._loads)

    def _run(self, count: int) -> None:
        load = self._start(count)
        if load is None:
            self._over = True
            return
        self._asked += count
        self._loads.append(load)

    def _end(self) -> None:
        self._gate.gave_up(self._stake.blocks - self.loaded)
        self.stop()

    def _slack(self, now: float) -> float:
        """Seconds for which it may go on without losing more than it may, should nothing more come."""
        return self._risked + self._stake.gained(self.loaded) - (now - self._began)

    def _rest(self) -> float:
        """Seconds that the blocks which have not come take at the rate so far."""
        return (self._stake.blocks - self._loaded) * self._rate()

    def _rate(self) -> float:
        return (time.monotonic() - self._began) / self._loaded

    def _next(self, now: float) -> int:
        """Blocks of the next run; 0: it does not pay."""
        if not self._loaded:
            # There was nothing, or a sidecar has these in host memory: then all of the rest is tried.
            return self._stake.blocks - self._asked
        if self._rest() > self._stake.gain(self._loaded):
            return 0
        allowed = int(self._slack(now) / max(self._rate(), 1e-9))
        return min(allowed, self._stake.blocks - self._loaded)


class LoadGate:
    """Starts the loads of one engine that pay, and learns from what they take.

    Args:
        store: where the blocks are, with the cost model.
        closed: whether to keep back what does not pay; False: everything is loaded, and waited for.
    """

    def __init__(self, store: TieredStore, *, closed: bool = True) -> None:
        self._store = store
        self._closed = closed
        self._under_way: list[GatedLoad | TrialLoad] = []
        """Loads that have not told what they took, those included that were let go of."""
        self._probes: list[LoadCalls] = []
        self._probe_at = 0.0

    def start(self, prompt: NamedPrompt) -> LoadCalls | None:
        """Start bringing up what the cold tier has of a prompt; None where there is nothing to wait for."""
        return self._start(len(prompt.tokens), lambda pays: self._store.start_load(prompt, pays=pays))

    def start_sleeping(self, sleeping: SleepingSequence) -> LoadCalls | None:
        """The same for a sequence that is to be woken."""
        tokens = sleeping.length + 1
        return self._start(tokens, lambda pays: self._store.start_load_sleeping(sleeping, pays=pays))

    def opened(self, tokens: int, opened: Opened) -> None:
        """A prompt was given a row: count what was found of it."""
        stats, costs = self._store.stats, self._store.costs.model
        stats.saved_tokens += opened.length
        whole, rest = (costs.compute_seconds(start, tokens) for start in (0, opened.length))
        if whole is not None and rest is not None:
            stats.saved_milliseconds += round(1e3 * (whole - rest))

    def settle(self) -> None:
        """Between steps: learn from loads that nobody waits for."""
        for probe in [one for one in self._probes if _is_over(one.done)]:
            self._probes.remove(probe)
            self.measured(probe.loaded, probe.seconds)
        self._under_way = [load for load in self._under_way if not _is_over(load.measure)]

    # What loads tell

    def gave_up(self, blocks: int) -> None:
        """A load is no longer waited for, though so many blocks of it have not come."""
        self._store.stats.given_up_tokens += blocks * self._store.layout.block_size

    def measured(self, blocks: int, seconds: float) -> None:
        """A load brought up so many blocks in so many seconds; 0: that is not known."""
        if blocks and seconds > 0:
            self._store.costs.cold.moved(blocks * self._store.layout.block_bytes, seconds)

    # Inside

    def _start(self, tokens: int, start: Callable[[LoadPays], LoadCalls | None]) -> LoadCalls | None:
        now = time.monotonic()
        before = sum(load.ends_in(now) for load in self._under_way)
        model = self._store.costs.model
        if not self._closed:
            model = replace(model, compute=None)
        known: list[_AtStake] = []

        def pays(runs: Sequence[Run], beyond: Sequence[bytes]) -> int:
            first = sum(count for _, count in runs) - len(beyond)
            known.append(stake := _AtStake(first, len(beyond), tokens, model))
            if not self._pays(model, before, runs, tokens):
                self._refuse(beyond)
                return 0
            return len(beyond) if not stake.unknown else stake.first_run

        load = start(pays)
        if load is None or not known:
            return load  # everything is there
        stake = known[0]
        gated = (
            TrialLoad(self, load, lambda count: start(lambda *_: count), stake)
            if stake.unknown
            else GatedLoad(self, load, stake, before)
        )
        self._under_way.append(gated)
        return gated

    def _pays(self, model: CostModel, before: float, runs: Sequence[Run], tokens: int) -> bool:
        """Whether the last of the runs, which would be loaded, ends sooner that way."""
        if model.cold is not None:
            # It waits its turn.
            cold = LinkCost(model.cold.seconds_per_call + before, model.cold.seconds_per_byte)
            model = replace(model, cold=cold)
        return model.split(runs, tokens).load_blocks == sum(count for _, count in runs)

    def _refuse(self, beyond: Sequence[bytes]) -> None:
        self._store.stats.gated_tokens += len(beyond) * self._store.layout.block_size
        now = time.monotonic()
        if self._store.host is not None and now >= self._probe_at:
            self._probe_at = now + _PROBE_SECONDS
            probe = self._store.host.start_load(list(beyond[:_PROBE_BLOCKS]), start=None)
            probe.release()  # it goes on, and tells what it took
            self._probes.append(probe)


def _is_over(done: Callable[[], bool]) -> bool:
    """Whether a load is over that nobody need be waiting for: one that failed is."""
    try:
        return done()
    except Exception:  # noqa: BLE001  whoever does wait for it is told
        _log.exception("blocks could not be brought up from the cold tier")
        return True
