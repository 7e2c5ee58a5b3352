"""Costs measured while serving: what links and prefills took, as exponentially weighted sums.

Each estimate keeps the normal equations of a least squares fit and nothing of single measurements, so adding
one costs a few operations on arrays of two or three numbers, and no lock: each has one writer, or one that
holds a lock for other reasons. Measurements are weighed by what they took, so that the fit is by relative
error and small moves count like large ones; coefficients are never negative.

One measurement that is far off is passed over: a page fault, a compilation, another process. A second one in
a row on the same side is no accident. Then what was measured before is taken to have become as much slower or
faster, so that a tier which stalls, or recovers, is known for it after two moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ..tiers.settings import expect_integer
from .cost import ComputeCost, CostModel, LinkCost

__all__ = ["ComputeEstimate", "CostEstimates", "LinkEstimate", "fitted_compute"]

_Numbers: TypeAlias = npt.NDArray[np.float64]

_KEPT: Final = 0.97
"""What each measurement leaves of the weight of those before it: some thirty count."""
_FAR_OFF: Final = 4.0
"""Times as long, or as short, as it should have taken."""
_LEAST_SECONDS: Final = 1e-7
_EVERY: Final = 16
"""Measurements after which the coefficients are solved for again, though nobody asks."""
_RIDGE: Final = 1e-9
"""Of the diagonal, so that measurements of one size alone are solved, too."""
_PRIOR: Final = 4.0
"""Measurements that a calibrated cost counts as, at each of a few sizes."""
_LINK_SIZES: Final = (64 << 10, 1 << 20, 16 << 20)
_CHUNKS: Final = ((0, 64), (0, 512), (4096, 4608))
_LEAST_ADDED: Final = 4
"""Measurements before a fit that began from nothing can tell what is far off, or what a prefill takes."""
_FEW: Final = 8
"""Measurements that may wait before what prefilling takes is solved for again."""
_LEAST_CHUNK: Final = 16
"""Tokens of a step that tell something of prefilling."""


class _Fit:
    """Non-negative coefficients of a sum that best explains the seconds measured so far.

    Args:
        count: coefficients.
        prior: coefficients to begin with, or None, and
        points: float64 [n, count], where they count as measured.
    """

    def __init__(self, count: int, prior: _Numbers | None = None, points: _Numbers | None = None) -> None:
        self._gram = np.zeros((count, count))
        self._moment = np.zeros(count)
        self._known: _Numbers | None = None
        self._since = 0
        """Measurements that are not in what is known."""
        self._side = 0
        self.added = 0
        self._settled = prior is not None
        if prior is not None and points is not None:
            for point in points:
                self._take(point, max(float(point @ prior), _LEAST_SECONDS), _PRIOR)

    def add(self, point: _Numbers, seconds: float) -> None:
        """One measurement: what was done, float64 [count], and how long it took."""
        seconds = max(float(seconds), _LEAST_SECONDS)
        side, times = 0, 1.0
        if self._settled or self.added >= _LEAST_ADDED:
            times = seconds / max(float(point @ self._recent), _LEAST_SECONDS)
            side = int(times > _FAR_OFF) - int(times < 1 / _FAR_OFF)
        if side and side != self._side:
            self._side = side
            return
        self._side = side
        if side:
            # As if all before had taken so many times as long: weights are by seconds, squared.
            self._gram /= times * times
            self._moment /= times
            self._known = None
        self._gram *= _KEPT
        self._moment *= _KEPT
        self._take(point, seconds, 1.0)
        self.added += 1

    @property
    def values(self) -> _Numbers:
        """The coefficients, float64 [count]."""
        if self._known is None or self._since:
            self._known, self._since = _non_negative(self._gram, self._moment), 0
        return self._known

    @property
    def _recent(self) -> _Numbers:
        """The coefficients as of a few measurements ago, which is enough to see what is far off."""
        return self.values if self._known is None or self._since >= _EVERY else self._known

    def _take(self, point: _Numbers, seconds: float, weight: float) -> None:
        scaled = point / seconds
        self._gram += weight * np.outer(scaled, scaled)
        self._moment += weight * scaled
        self._since += 1


def _non_negative(gram: _Numbers, moment: _Numbers) -> _Numbers:
    """The non-negative x that minimises ``x gram x - 2 moment x``, by trying every set of positive ones.

    In plain Python: of two or three numbers that takes a tenth of the time of array operations.
    """
    count = len(moment)
    matrix, right = gram.tolist(), moment.tolist()
    scale = [max(matrix[at][at], 1e-300) ** 0.5 for at in range(count)]
    rows = [
        [matrix[at][to] / (scale[at] * scale[to]) + (_RIDGE if at == to else 0.0) for to in range(count)]
        for at in range(count)
    ]
    right = [right[at] / scale[at] for at in range(count)]
    best, least = [0.0] * count, 0.0
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            found = _solved([[rows[at][to] for to in chosen] for at in chosen], [right[at] for at in chosen])
            value = -sum(right[at] * one for at, one in zip(chosen, found, strict=True))
            if min(found) >= 0 and value < least:
                best, least = [0.0] * count, value
                for at, one in zip(chosen, found, strict=True):
                    best[at] = one
    return np.array([one / by for one, by in zip(best, scale, strict=True)])


def _solved(rows: list[list[float]], right: list[float]) -> list[float]:
    """The solution of a positive definite system, by elimination. Both are used up."""
    count = len(right)
    for at in range(count):
        for below in range(at + 1, count):
            share = rows[below][at] / rows[at][at]
            for to in range(at, count):
                rows[below][to] -= share * rows[at][to]
            right[below] -= share * right[at]
    found = [0.0] * count
    for at in reversed(range(count)):
        rest = sum(rows[at][to] * found[to] for to in range(at + 1, count))
        found[at] = (right[at] - rest) / rows[at][at]
    return found


class LinkEstimate:
    """What a link costs, from moves over it.

    Args:
        prior: its calibrated cost, or None.
    """

    def __init__(self, prior: LinkCost | None = None) -> None:
        points = values = None
        if prior is not None:
            points = np.array([(1.0, size) for size in _LINK_SIZES])
            values = np.array((prior.seconds_per_call, prior.seconds_per_byte))
        self._fit = _Fit(2, values, points)
        self._cost = prior
        self._fresh = True

    def moved(self, nbytes: int, seconds: float, calls: int = 1) -> None:
        """So many bytes went over it in so many moves, one after the other."""
        if nbytes > 0:
            self._fit.add(np.array((float(calls), float(nbytes))), seconds)
            self._fresh = False

    @property
    def cost(self) -> LinkCost | None:
        """What it costs; None where nothing is known."""
        if not self._fresh and self._fit.added:
            per_call, per_byte = self._fit.values.tolist()
            self._cost = LinkCost(per_call, per_byte)
            self._fresh = True
        return self._cost


class ComputeEstimate:
    """What prefilling costs, from steps that did little else.

    Args:
        prior: the calibrated cost, or None.
        step_tokens: tokens that a step of the engine computes at most.
    """

    def __init__(self, prior: ComputeCost | None = None, step_tokens: int | None = None) -> None:
        points = values = None
        if prior is not None:
            points = np.array([(1.0, end - start, (end**2 - start**2) / 2) for start, end in _CHUNKS])
            values = np.array((prior.seconds_per_step, prior.seconds_per_token, prior.seconds_per_token_pair))
        self._fit = _Fit(3, values, points)
        self._step_tokens = step_tokens
        self._cost = None if prior is None else self._of(*self._fit.values.tolist())
        self._solve_at = 1 if prior is not None else _LEAST_ADDED
        """Measurements after which it is solved for: each step adds one, and policies ask often."""

    def computed(self, tokens: int, pairs: float, seconds: float) -> None:
        """One step computed so many tokens, which attended to so many, each to those before it."""
        if tokens >= _LEAST_CHUNK:
            self._fit.add(np.array((1.0, float(tokens), pairs)), seconds)

    @property
    def cost(self) -> ComputeCost | None:
        """What it costs, as of a few measurements ago; None where too little is known."""
        if self._fit.added >= self._solve_at:
            self._cost = self._of(*self._fit.values.tolist())
            self._solve_at = self._fit.added + _FEW
        return self._cost

    def _of(self, per_step: float, per_token: float, per_pair: float) -> ComputeCost:
        return ComputeCost(per_step, per_token, per_pair, self._step_tokens)


def fitted_compute(
    measured: Sequence[tuple[int, float, float]], step_tokens: int | None
) -> tuple[ComputeCost, ComputeCost]:
    """What best explains measured steps, all of which count alike, and the standard error of each figure.

    Args:
        measured: of each step the tokens that it computed, the pairs of these with those that they attended
            to, and the seconds that it took.
        step_tokens: tokens that a step of the engine computes at most.
    """
    steps = np.array([(1.0, tokens, pairs) for tokens, pairs, _ in measured])
    # By relative error, as estimates are.
    steps /= np.array([[max(seconds, _LEAST_SECONDS)] for _, _, seconds in measured])
    gram = steps.T @ steps
    values = _non_negative(gram, steps.sum(axis=0))
    variance = float(((1 - steps @ values) ** 2).sum()) / max(len(steps) - len(values), 1)
    scale = np.sqrt(np.diag(gram))
    inverse = np.linalg.inv(gram / np.outer(scale, scale) + _RIDGE * np.eye(len(values)))
    errors = np.sqrt(variance * np.diag(inverse)) / scale
    return _compute_of(values, step_tokens), _compute_of(errors, step_tokens)


def _compute_of(figures: npt.NDArray[np.float64], step_tokens: int | None) -> ComputeCost:
    per_step, per_token, per_pair = figures.tolist()
    return ComputeCost(per_step, per_token, per_pair, step_tokens)


class CostEstimates:
    """The cost model of one engine, refined by what it measures. Used from the thread that drives it.

    Args:
        block_size: tokens of a block.
        block_bytes: bytes of a block.
        calibrated: what was measured of this machine and model before, or None.
        step_tokens: tokens that a step computes at most.

    Attributes:
        in_place: steps that read host memory where it lies.
        copy: the copy engine, from host memory to the device.
        compute: prefill steps.
        cold: loads from the cold tier to host memory.
    """

    def __init__(
        self,
        block_size: int,
        block_bytes: int,
        calibrated: CostModel | None = None,
        *,
        step_tokens: int | None = None,
    ) -> None:
        self._block_size = expect_integer("block_size", block_size, 1)
        self._block_bytes = expect_integer("block_bytes", block_bytes, 1)
        self.in_place = LinkEstimate(None if calibrated is None else calibrated.in_place)
        self.copy = LinkEstimate(None if calibrated is None else calibrated.copy)
        self.compute = ComputeEstimate(None if calibrated is None else calibrated.compute, step_tokens)
        self.cold = LinkEstimate(None if calibrated is None else calibrated.cold)

    @property
    def model(self) -> CostModel:
        """The model as it is known now. A link that was not measured costs nothing: so it gets used."""
        in_place, copy = self.in_place.cost, self.copy.cost
        return CostModel(
            self._block_size,
            self._block_bytes,
            self.compute.cost,
            in_place or copy or _FREE,
            copy or in_place or _FREE,
            self.cold.cost,
        )


_FREE: Final = LinkCost(0.0, 0.0)
