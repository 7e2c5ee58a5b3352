"""What taking a prompt's blocks costs and spares, as an engine's gate reckons it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...kvstore.cost import CostModel, LinkCost, Tier

__all__ = ["reckoning"]

_NOBODY = "no engine has said how long its model takes to compute a prompt"
_TOO_FEW = "the engine has computed too few prompts to know how long its model takes"


def reckoning(
    told: dict[str, Any],
    cold_rate: float | None,
    *,
    block_bytes: int,
    block_size: int,
    host: int,
    cold: int,
    tokens: int,
) -> dict[str, Any]:
    """What there is to say of a prompt in one space, by the fields of `LookupSpace`.

    Args:
        told: the costs of the space, as its engine reported them; empty: none did.
        cold_rate: bytes a second that the cold tier gave so far; None: it gave none.
        block_bytes: bytes of a block.
        block_size: tokens of a block.
        host: leading blocks of the prompt in host memory.
        cold: those after them in the cold tier.
        tokens: of the prompt.
    """
    costs = CostModel.of_map(told) if told else None
    link = None if cold_rate is None else LinkCost(0.0, 1 / cold_rate)
    if costs is not None and costs.cold is not None:
        link = costs.cold
    load = 0.0 if not cold else None if link is None else link.seconds(cold * block_bytes)
    known: dict[str, Any] = {
        "load_seconds": load,
        "host_load_seconds": None if costs is None else costs.load_seconds(Tier.HOST, host),
        "taken_blocks": host + cold,
        "saved_tokens": (host + cold) * block_size,
        "recompute_seconds": None,
        "recompute_reason": _NOBODY if costs is None else _TOO_FEW,
        "saved_seconds": None,
    }
    if costs is None or costs.compute is None or not tokens:
        return known
    split = replace(costs, cold=link).split([(Tier.HOST, host), (Tier.COLD, cold)], tokens)
    end = min((host + cold) * block_size, tokens)
    return {
        **known,
        "taken_blocks": split.load_blocks,
        "saved_tokens": split.load_blocks * block_size,
        "recompute_seconds": costs.compute_seconds(0, end),
        "recompute_reason": None,
        "saved_seconds": split.seconds_saved,
    }
