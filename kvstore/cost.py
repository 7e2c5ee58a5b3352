"""The cost model: seconds to bring blocks up from each tier, and seconds to compute them again.

What losing a block costs, and how much of a prompt is worth loading, follow from it. Its figures are
measured, on the machine and with the model that they are of (`kvstore.calibration`,
`kvstore.cost_estimates`); nothing in it is guessed. Where the model's compute is not known, nothing is
gated, and all losses are alike.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ..tiers.errors import ConfigError
from ..tiers.settings import expect_integer, expect_number, expect_type, shown

__all__ = ["ComputeCost", "CostModel", "LinkCost", "Run", "Split", "Tier"]

_MOST_TOKENS: Final = 1 << 40


class Tier(enum.IntEnum):
    """Where a block has a copy, from the slowest to the fastest."""

    NONE = 0
    """Nowhere: it is computed again."""
    COLD = 1
    HOST = 2
    DEVICE = 3


Run: TypeAlias = tuple[Tier, int]
"""Blocks that follow each other in a chain and lie in one tier: which, and how many."""


@dataclass(frozen=True)
class LinkCost:
    """What moving bytes from one tier to the next costs.

    Args:
        seconds_per_call: of a move, however small.
        seconds_per_byte: of each byte of it.

    Raises:
        ConfigError: a value is negative or not finite.
    """

    seconds_per_call: float
    seconds_per_byte: float

    def __post_init__(self) -> None:
        for name in ("seconds_per_call", "seconds_per_byte"):
            object.__setattr__(self, name, expect_number(name, getattr(self, name), 0.0))

    def seconds(self, nbytes: int, calls: int = 1) -> float:
        """Seconds that `nbytes` bytes take in so many moves; nothing where there are none."""
        return calls * self.seconds_per_call + nbytes * self.seconds_per_byte if nbytes else 0.0


@dataclass(frozen=True)
class ComputeCost:
    """What prefilling tokens costs: a linear term for the weights, a quadratic one for attention.

    Args:
        seconds_per_step: of a step, whatever it computes.
        seconds_per_token: of each token.
        seconds_per_token_pair: of each pair of a token and one that it attends to.
        step_tokens: tokens that one step computes at most; None: any number.

    Raises:
        ConfigError: a value is negative or not finite, or `step_tokens` is no number of tokens.
    """

    seconds_per_step: float
    seconds_per_token: float
    seconds_per_token_pair: float
    step_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("seconds_per_step", "seconds_per_token", "seconds_per_token_pair"):
            object.__setattr__(self, name, expect_number(name, getattr(self, name), 0.0))
        if self.step_tokens is not None:
            expect_integer("step_tokens", self.step_tokens, 1)

    def seconds(self, start: int, end: int) -> float:
        """Seconds to compute tokens ``[start, end)`` of a sequence; nothing where there are none."""
        count = end - start
        if count <= 0:
            return 0.0
        steps = 1 if self.step_tokens is None else -(-count // self.step_tokens)
        return steps * self.seconds_per_step + self._marginal(start, end)

    def block_seconds(self, depths: npt.NDArray[np.int32], block_size: int) -> npt.NDArray[np.float64]:
        """Seconds that each block adds to a prefill which computes it too: its tokens and their pairs.

        Args:
            depths: int32 [n], 1-based index of each block in its chain; 0 (not known) counts as 1.
            block_size: tokens of a block.

        Returns:
            float64 [n].
        """
        ends = np.maximum(depths, 1).astype(np.float64) * block_size
        # (end^2 - start^2) / 2, without the loss of squaring first.
        pairs = block_size * (ends - block_size / 2)
        return block_size * self.seconds_per_token + pairs * self.seconds_per_token_pair

    def _marginal(self, start: int, end: int) -> float:
        pairs = (end - start) * (end + start) / 2
        return (end - start) * self.seconds_per_token + pairs * self.seconds_per_token_pair


@dataclass(frozen=True)
class Split:
    """How much of what is there of a prompt is taken, so that its prefill ends first.

    Attributes:
        load_blocks: leading blocks that are taken from where they lie.
        compute_from: the first token that is computed.
        seconds_load: that bringing up these blocks takes; those of the device tier take none.
        seconds_compute: that computing the rest takes; None: the model's compute is not known.
        seconds_no_cache: that computing the whole prompt would take; None likewise.
    """

    load_blocks: int
    compute_from: int
    seconds_load: float
    seconds_compute: float | None
    seconds_no_cache: float | None

    @property
    def seconds_saved(self) -> float | None:
        """Seconds sooner than without any cache, never negative; None: the compute is not known."""
        if self.seconds_compute is None or self.seconds_no_cache is None:
            return None
        return max(0.0, self.seconds_no_cache - self.seconds_load - self.seconds_compute)


@dataclass(frozen=True)
class CostModel:
    """What one model's blocks cost on one machine.

    Args:
        block_size: tokens of a block.
        block_bytes: bytes of a block.
        compute: prefilling with the model; None: not known, so nothing is gated and losses are alike.
        in_place: a step reading blocks of host memory where they lie.
        copy: the copy engine bringing blocks from host memory to the device.
        cold: bringing blocks from the cold tier to host memory; None: there is none, or it is not known.

    Raises:
        ConfigError: a value is of a wrong type or out of range.
    """

    block_size: int
    block_bytes: int
    compute: ComputeCost | None
    in_place: LinkCost
    copy: LinkCost
    cold: LinkCost | None = None

    def __post_init__(self) -> None:
        expect_integer("block_size", self.block_size, 1)
        expect_integer("block_bytes", self.block_bytes, 1)
        for name in ("in_place", "copy"):
            expect_type(name, getattr(self, name), LinkCost, "a LinkCost")
        if self.cold is not None:
            expect_type("cold", self.cold, LinkCost, "a LinkCost or None")
        if self.compute is not None:
            expect_type("compute", self.compute, ComputeCost, "a ComputeCost or None")

    def as_map(self) -> dict[str, Any]:
        """The model as it travels: the fields of each part in their order, None where it is not known."""
        parts = {name: getattr(self, name) for name in _PARTS}
        costs = {name: None if part is None else astuple(part) for name, part in parts.items()}
        return {"block_size": self.block_size, "block_bytes": self.block_bytes, **costs}

    @classmethod
    def of_map(cls, values: Mapping[str, Any]) -> CostModel:
        """The model that `as_map` made this of; what it does not know is passed over.

        Raises:
            ConfigError: it is none.
        """
        try:
            parts: dict[str, Any] = {
                name: None if values.get(name) is None else kind(*values[name])
                for name, kind in _PARTS.items()
            }
            return cls(values["block_size"], values["block_bytes"], **parts)
        except (LookupError, TypeError, AttributeError) as error:
            raise ConfigError("costs", f"must be a cost model, got {shown(values)}") from error

    def load_seconds(self, tier: Tier, blocks: int) -> float | None:
        """Seconds until a step can have read blocks of a tier, brought up in one go.

        From host memory by whichever is faster, in place or by copy; from the cold tier through host memory.

        Returns:
            None where that is not known: there is no copy, or the cold tier was not measured.
        """
        nbytes = blocks * self.block_bytes
        match tier:
            case Tier.DEVICE:
                return 0.0
            case Tier.HOST:
                return self._host_seconds(nbytes)
            case Tier.COLD if self.cold is not None:
                return self.cold.seconds(nbytes) + self._host_seconds(nbytes)
        return None

    def compute_seconds(self, start_token: int, end_token: int) -> float | None:
        """Seconds to compute tokens ``[start_token, end_token)``; None where the compute is not known."""
        return None if self.compute is None else self.compute.seconds(start_token, end_token)

    def losses(self, depths: npt.NDArray[np.int32], below: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
        """Seconds that losing each block's copy in one tier costs whoever wants the block next.

        It is brought up from the next copy down, or computed again at its depth, whichever is sooner: what
        it adds to a load or a prefill that it is part of, without the cost of beginning one.

        Args:
            depths: int32 [n], 1-based index of each block in its chain; 0: not known.
            below: uint8 [n] of `Tier`, where each has its next copy.

        Returns:
            float64 [n]; all 1 where the compute is not known.
        """
        if len(depths) != len(below):
            raise ConfigError("below", f"must be one for each of {len(depths)} depths, got {len(below)}")
        if self.compute is None:
            return np.ones(len(depths), dtype=np.float64)
        losses = self.compute.block_seconds(depths, self.block_size)
        host = min(self.in_place.seconds_per_byte, self.copy.seconds_per_byte) * self.block_bytes
        in_host = below == Tier.HOST
        losses[in_host] = np.minimum(losses[in_host], host)
        if self.cold is not None:
            in_cold = below == Tier.COLD
            up = self.cold.seconds_per_byte * self.block_bytes + host
            losses[in_cold] = np.minimum(losses[in_cold], up)
        losses[below == Tier.DEVICE] = 0.0
        return losses

    def split(self, runs: Sequence[Run], tokens: int) -> Split:
        """The leading blocks to take of those that are there, so that the prompt's prefill ends first.

        A later token costs more to compute than an earlier one, and no block more to load than the one before
        it, so within a run it pays to take all or nothing: only the ends of runs are compared. Of equals the
        one that takes more wins. At least the last token is computed: its logits are wanted.

        Args:
            runs: what is there of the prompt from its first block on, in the order of its chain; the last
                block may be partly filled.
            tokens: of the prompt.

        Raises:
            ConfigError: `runs` are no runs, or hold more blocks than the prompt.
        """
        tokens = expect_integer("tokens", tokens, 1, _MOST_TOKENS)
        whole = self.compute_seconds(0, tokens)
        best = Split(0, 0, 0.0, whole, whole)
        counts = dict.fromkeys((Tier.COLD, Tier.HOST, Tier.DEVICE), 0)
        for tier, count in runs:
            if tier not in counts:
                raise ConfigError("runs", f"must lie in a tier, got {shown(tier)}")
            counts[tier] += expect_integer("runs", count, 0)
            blocks = sum(counts.values())
            if (blocks - 1) * self.block_size >= tokens:
                raise ConfigError("runs", f"must not hold more blocks than {tokens} tokens, got {blocks}")
            taken = min(blocks * self.block_size, tokens - 1)
            # What was not measured is taken: so it gets measured.
            load = sum(self.load_seconds(one, number) or 0.0 for one, number in counts.items())
            rest = self.compute_seconds(taken, tokens)
            if rest is None or best.seconds_compute is None:
                best = Split(blocks, taken, load, None, None)
            elif load + rest <= best.seconds_load + best.seconds_compute:
                best = Split(blocks, taken, load, rest, whole)
        return best

    def _host_seconds(self, nbytes: int) -> float:
        return min(self.in_place.seconds(nbytes), self.copy.seconds(nbytes))


_PARTS: Final[Mapping[str, type[LinkCost] | type[ComputeCost]]] = {
    "compute": ComputeCost,
    "in_place": LinkCost,
    "copy": LinkCost,
    "cold": LinkCost,
}
