"""What the bookkeeping benchmarks ask of a KV store: one reproducible workload for both sides.

Requests arrive in batches that run together. Each brings a prompt, part of which it shares with the
other requests of its group, decodes a number of tokens, and leaves. The members of a group are spread over
the whole run, so a prefix is matched both while its blocks are in use and after they were freed.

Nothing but numpy is imported here: kvpager's benchmark and its peers, each in an environment of its own,
build the same requests from the same few numbers, which travel as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["DECODE_256", "DECODE_1024", "PHASES", "STANDARD", "Workload", "summary"]

PHASES: Final = ("hash", "match", "allocate", "append", "decode", "free")
"""What is timed apart, in the order of a request's life: `hash` names the prompt's full blocks; `match` finds
the longest resident prefix; `allocate` takes blocks for the whole prompt and indexes its full ones; `append`
adds a sampled token and names the block that it fills; `decode` takes room for one more token; `free` ends
the request. `hash` and `append` together are what a run "with hashing" costs more."""


@dataclass(frozen=True)
class Workload:
    """The numbers that a run is made from.

    Args:
        num_blocks: blocks in the pool.
        requests: requests in all.
        prompt_tokens: tokens of each prompt.
        shared_tokens: tokens at its beginning that all requests of a group have in common.
        group_size: requests in a group.
        decode_steps: tokens that each request decodes.
        batch: requests that run together; the next batch begins when all of this one have left.
        block_size: tokens per block.
        seed: of the token ids and of the order of arrival.
        vocabulary: token ids are below this.

    Raises:
        ValueError: a number is out of range, or the pool cannot hold one batch.
    """

    num_blocks: int = 65_536
    requests: int = 400
    prompt_tokens: int = 4_096
    shared_tokens: int = 2_048
    group_size: int = 8
    decode_steps: int = 64
    batch: int = 64
    block_size: int = 16
    seed: int = 0
    vocabulary: int = 128_256

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("shared_tokens", "decode_steps", "seed") else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{field.name}: must be an integer of at least {least}, got {value!r}")
        if self.shared_tokens >= self.prompt_tokens:
            raise ValueError(
                f"shared_tokens: must be below prompt_tokens ({self.prompt_tokens}), got {self.shared_tokens}"
            )
        needed = self.batch * self.blocks_per_request
        if self.num_blocks <= needed:
            raise ValueError(f"num_blocks: a batch takes up to {needed}, the pool has {self.num_blocks}")

    @classmethod
    def from_json(cls, text: str) -> Workload:
        """Read what `to_json` wrote; numbers left out have their defaults."""
        numbers = json.loads(text)
        unknown = set(numbers) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))}: no such number in a workload")
        return cls(**numbers)

    def to_json(self) -> str:
        """All numbers as one line of JSON."""
        return json.dumps(asdict(self))

    @property
    def blocks_per_request(self) -> int:
        """Blocks that a request holds when it has decoded its last token."""
        return -(-(self.prompt_tokens + self.decode_steps) // self.block_size)

    @property
    def operations(self) -> dict[str, int]:
        """Calls in each phase of a run: one a request, or one a request and decode step."""
        decoded = self.requests * self.decode_steps
        return {phase: decoded if phase in ("append", "decode") else self.requests for phase in PHASES}

    @cached_property
    def groups(self) -> npt.NDArray[np.int64]:
        """The group of each request, in order of arrival (int64 [requests])."""
        return np.random.default_rng([self.seed, 0]).permutation(self.requests) // self.group_size

    def prompt(self, request: int) -> npt.NDArray[np.int32]:
        """Token ids of the prompt of the ``request``-th to arrive (int32 [prompt_tokens])."""
        shared = self._tokens(1, int(self.groups[request]), self.shared_tokens)
        own = self._tokens(2, request, self.prompt_tokens - self.shared_tokens)
        return np.concatenate([shared, own])

    def decoded(self, request: int) -> npt.NDArray[np.int32]:
        """Token ids that it decodes (int32 [decode_steps])."""
        return self._tokens(3, request, self.decode_steps)

    def batches(self) -> Iterator[range]:
        """Requests that run together, batch after batch."""
        for first in range(0, self.requests, self.batch):
            yield range(first, min(first + self.batch, self.requests))

    @property
    def shared_blocks_matched(self) -> int:
        """Blocks that the matches of a whole run find if nothing that is shared was evicted meanwhile."""
        repeats = self.requests - len(np.unique(self.groups))
        return repeats * (self.shared_tokens // self.block_size)

    def _tokens(self, kind: int, which: int, count: int) -> npt.NDArray[np.int32]:
        rng = np.random.default_rng([self.seed, kind, which])
        return rng.integers(0, self.vocabulary, count, dtype=np.int32)


STANDARD: Final = Workload()
"""Chats over shared documents: half of each prompt is common to eight requests."""

DECODE_256: Final = Workload(num_blocks=70_000, requests=256, batch=256, shared_tokens=0, group_size=1)
"""256 running sequences over 1M resident tokens, for the time of one decode step."""

DECODE_1024: Final = Workload(num_blocks=280_000, requests=1_024, batch=1_024, shared_tokens=0, group_size=1)
"""1,024 running sequences over 4M resident tokens, for the same."""


def summary(
    workload: Workload, seconds: Mapping[str, float], decode_steps: Sequence[float]
) -> dict[str, Any]:
    """The result of a run, for both sides alike: seconds and operations a second, by phase and in all.

    Args:
        workload: what was run.
        seconds: spent in each of `PHASES`.
        decode_steps: seconds of each `decode` of one step of a full batch.
    """
    operations = workload.operations
    bookkeeping = [phase for phase in PHASES if phase not in ("hash", "append")]

    def total(phases: Iterable[str]) -> dict[str, float]:
        spent = sum(seconds[phase] for phase in phases)
        # Hashing adds seconds to the same work: the operations counted are those of the bookkeeping.
        return {"seconds": spent, "per_second": sum(operations[phase] for phase in bookkeeping) / spent}

    return {
        "phases": {
            phase: {
                "seconds": seconds[phase],
                "operations": operations[phase],
                "per_second": operations[phase] / seconds[phase] if seconds[phase] else None,
            }
            for phase in PHASES
        },
        "without_hashing": total(bookkeeping),
        "with_hashing": total(PHASES),
        "decode_step_seconds": {
            "sequences": workload.batch,
            "resident_tokens": workload.batch * workload.prompt_tokens,
            "median": float(np.median(decode_steps)),
            "p99": float(np.percentile(decode_steps, 99)),
            "max": float(max(decode_steps)),
        }
        if decode_steps
        else None,
    }
