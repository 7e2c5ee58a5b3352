"""Eviction policies: touches and admissions a second in batches of 64, as more and more blocks are resident.

Chains of 64 blocks fill a tier. A *touch* is all that a policy is told of a block that a lookup found: it is
found, in use, and idle again. An *admission* is all it is told of a new one: it was missed, another goes for
it, it is admitted, and idle once it is written. Policies and sizes take turns, so that what else the machine
does hits all of them alike; told is the median of the rounds.

    python benchmarks/policy.py [--policies NAME,NAME] [--blocks N,N] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from kvpager.benchmarks.report import write_report
from kvpager.kvstore.policy import BlockFacts, EvictionPolicy, make_policy, policy_names

BATCH: Final = 64
BLOCKS: Final = 10_000, 100_000, 1_000_000
CALLS: Final = 300
"""Batches of a round."""


class Tier:
    """A policy over a tier that is full of chains of `BATCH` blocks.

    Args:
        name: of the policy.
        blocks: how many there are.
    """

    def __init__(self, name: str, blocks: int) -> None:
        self._rng = np.random.default_rng(0)
        self._policy: EvictionPolicy = make_policy(name, blocks)
        self._chains: dict[int, npt.NDArray[np.int32]] = {}
        """The ids of each chain that is whole, by number."""
        self._chain_of = np.zeros(blocks, dtype=np.int64)
        """Of each id."""
        self._came = 0
        for first in range(0, blocks // BATCH * BATCH, BATCH):
            ids = np.arange(first, first + BATCH, dtype=np.int32)
            self._come(ids, self._new_chain())
            self._note(ids)

    def _new_chain(self) -> BlockFacts:
        names = self._rng.integers(1, 1 << 63, BATCH, dtype=np.uint64)
        parents = np.concatenate([np.zeros(1, np.uint64), names[:-1]])
        return BlockFacts(names, parents, np.arange(1, BATCH + 1, dtype=np.int32))

    def _come(self, ids: npt.NDArray[np.int32], facts: BlockFacts) -> None:
        if self._policy.learns:
            self._policy.admit(ids, facts)
        self._policy.insert(ids[::-1])

    def _note(self, ids: npt.NDArray[np.int32]) -> None:
        """A chain is in these now; those that had blocks there are not whole any more."""
        for chain in set(self._chain_of[ids].tolist()):
            self._chains.pop(chain, None)
        self._came += 1
        self._chain_of[ids] = self._came
        self._chains[self._came] = ids

    def touches(self, calls: int) -> float:
        """Touches a second, of chains drawn at random."""
        chains = list(self._chains.values())
        chosen = [chains[at] for at in self._rng.integers(0, len(chains), calls).tolist()]
        policy, learns = self._policy, self._policy.learns
        began = time.process_time()
        for ids in chosen:
            if learns:
                policy.found(ids)
            policy.remove(ids)
            policy.insert(ids[::-1])
        return calls * BATCH / (time.process_time() - began)

    def admissions(self, calls: int) -> float:
        """Admissions a second, of chains that were never there."""
        new = [self._new_chain() for _ in range(calls)]
        policy, learns = self._policy, self._policy.learns
        came = []
        began = time.process_time()
        for facts in new:
            if learns:
                policy.missed(facts)
                policy.wanted(facts, 0)
            ids = policy.evict(BATCH)
            if learns:
                policy.admit(ids, facts)
            policy.insert(ids[::-1])
            came.append(ids)
        taken = time.process_time() - began
        for ids in came:
            self._note(ids)
        return calls * BATCH / taken

    def check(self) -> None:
        """Prove that what was measured kept its books."""
        self._policy.check_integrity()


def main() -> None:
    parser = argparse.ArgumentParser(description="What an eviction policy takes, by blocks resident")
    parser.add_argument("--policies", default=",".join(policy_names()), help="(default: all)")
    parser.add_argument("--blocks", default=",".join(map(str, BLOCKS)), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of every measurement (default: 7)")
    parser.add_argument("--json", type=Path, help="write machine, versions and results to this file")
    options = parser.parse_args()
    sizes = [int(blocks) for blocks in options.blocks.split(",")]
    tiers = {(name, size): Tier(name, size) for name in options.policies.split(",") for size in sizes}
    rates: dict[tuple[str, int], dict[str, list[float]]] = {
        one: {"touches": [], "admissions": []} for one in tiers
    }
    for _ in range(options.rounds):
        for one, tier in tiers.items():
            rates[one]["touches"].append(tier.touches(CALLS))
            rates[one]["admissions"].append(tier.admissions(CALLS))
    rows: list[dict[str, Any]] = []
    for (name, size), found in rates.items():
        tiers[name, size].check()
        touches, admissions = (statistics.median(found[kind]) for kind in ("touches", "admissions"))
        row: dict[str, Any] = {"policy": name, "blocks": size}
        least = next((one for one in rows if one["policy"] == name), None)
        for kind, rate in (("touches", touches), ("admissions", admissions)):
            row[f"{kind}_per_s"] = rate
            row[f"{kind}_of_fewest"] = 1.0 if least is None else rate / least[f"{kind}_per_s"]
        rows.append(row)
        print(
            f"{name:>8} {size:>9} blocks: {touches / 1e6:5.2f}M touches/s ({row['touches_of_fewest']:.2f}x), "
            f"{admissions / 1e6:5.2f}M admissions/s ({row['admissions_of_fewest']:.2f}x of the fewest blocks)"
        )
    write_report(options.json, {"batch": BATCH, "policies": rows})


if __name__ == "__main__":
    main()
