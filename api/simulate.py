"""``kvpager simulate TRACE``: what caches of other sizes and policies would have found, and what that saves.

TRACE is a file in Mooncake's format (JSON lines with timestamp, input_length and hash_ids) or a log that
kvpager serve --trace wrote; either may be gzipped. Without one, --generate chats makes a trace of chats
that nobody had.

Each policy of the store is driven by the very calls that the store makes. Beside them stand textbook
policies, and Belady's MIN, which knows the future and is the most that any policy can find. A block counts
as found if all blocks before it in its prompt are found too. Seconds are those that prefilling all prompts
would take without a cache, less what it takes with what is found, loaded or computed again, whichever ends
first.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from ..kvstore.calibration import read_calibration
from ..kvstore.chat_traces import ChatTraffic, chat_trace
from ..kvstore.cost import ComputeCost, CostModel, LinkCost
from ..kvstore.policy import MOST_BLOCKS, make_policy, policy_names
from ..kvstore.textbook import TEXTBOOK
from ..kvstore.trace import Trace
from ..kvstore.trace_files import read_trace, write_mooncake
from ..tiers.errors import ConfigError, KVPagerError
from ..tiers.memory import format_bytes, parse_bytes
from ..tiers.settings import expect_choice, expect_integer, expect_number, shown
from .curves import Curve, Panel, draw_panels
from .model_shape import read_shape
from .simulation import MIN, Contender, Kind, Outcome, Plan, gap_closed, simulate
from .size import model_path

__all__ = ["USUAL_COSTS", "Costs", "add_parser"]

_T = TypeVar("_T")

_NONE: Final = "none"
_SHARES: Final = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Of a trace's different blocks: the sizes where none are named."""
_UNITS: Final = {"": 1, "k": 1000, "m": 1_000_000}
_MOST_TOKEN_BYTES: Final = 1 << 40
_MOST_SECONDS: Final = 1.0
"""Of a token: more is a mistake."""


@dataclass(frozen=True)
class Costs:
    """What blocks of whatever size take and cost.

    Args:
        source: where that comes from, in words.
        token_bytes: KV of a token.
        compute: prefilling.
        in_place, copy, cold: loading, as of `CostModel`.
    """

    source: str
    token_bytes: int
    compute: ComputeCost
    in_place: LinkCost
    copy: LinkCost
    cold: LinkCost

    def model(self, block_size: int, block_bytes: int | None) -> CostModel:
        """The cost model of blocks of so many tokens, and of so many bytes unless that follows from these."""
        nbytes = block_bytes or block_size * self.token_bytes
        return CostModel(block_size, nbytes, self.compute, self.in_place, self.copy, self.cold)


USUAL_COSTS: Final = Costs(
    "those of a Llama-3-8B in float16 on one H200 at 40% of its peak, with a disk for its cold tier",
    131072,
    ComputeCost(5e-3, 40e-6, 1.3e-9),
    LinkCost(10e-6, 1 / 51e9),
    LinkCost(10e-6, 1 / 55e9),
    LinkCost(1e-3, 1 / 8.9e9),
)
"""What is reckoned with where nothing is said: 2 x 8e9 operations a token, 4 x 32 layers x 4,096 a pair, at
4e14 a second; links as docs/performance.md has them."""


def add_parser(commands: Any) -> None:
    """Add the command to argparse's subcommands."""
    parser = commands.add_parser(
        "simulate",
        help="what caches of other sizes and policies would have found of a trace",
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", metavar="TRACE", nargs="?", help="a trace in a file")
    parser.add_argument(
        "--block-size",
        metavar="N",
        type=int,
        help="tokens of a block of TRACE in Mooncake's format (default: 512)",
    )
    parser.add_argument(
        "--space", metavar="N", type=int, help="the space to take, of a log of several (default: all)"
    )
    made = parser.add_argument_group("a trace that is made")
    made.add_argument("--generate", choices=["chats"], help="make one, in place of TRACE")
    made.add_argument("--sessions", metavar="N", type=int, help="chats in it (default: 2000)")
    made.add_argument("--write", metavar="FILE", help="write it in Mooncake's format, and simulate nothing")
    what = parser.add_argument_group("what is simulated")
    what.add_argument(
        "--policy", metavar="NAMES", help=f"policies of the store (default: {','.join(policy_names())})"
    )
    what.add_argument(
        "--beside",
        metavar="NAMES",
        help=f"what they are compared with, or {_NONE} (default: {','.join((MIN, *TEXTBOOK))})",
    )
    sizes = what.add_mutually_exclusive_group()
    sizes.add_argument(
        "--blocks",
        metavar="SIZES",
        help="blocks that host memory holds, as 1k,3k,10k (default: 1%% to 100%% of the trace's)",
    )
    sizes.add_argument("--host-bytes", metavar="SIZES", help="the same in bytes, as 16G,64G")
    cold = what.add_mutually_exclusive_group()
    cold.add_argument("--cold-blocks", metavar="SIZE", help="blocks of a cold tier (default: there is none)")
    cold.add_argument("--cold-bytes", metavar="SIZE", help="the same in bytes")
    what.add_argument(
        "--cold-policy", metavar="NAME", default="lru", help="the cold tier's (default: %(default)s)"
    )
    what.add_argument("--seed", metavar="N", type=int, default=0, help="of whatever is drawn (default: 0)")
    costs = parser.add_argument_group("what blocks take, and cost")
    model = costs.add_mutually_exclusive_group()
    model.add_argument("--model", metavar="MODEL", help="whose KV it is, as of kvpager size")
    model.add_argument("--token-bytes", metavar="N", type=int, help="KV bytes of a token (default: 131072)")
    costs.add_argument(
        "--calibration",
        metavar="FILE",
        help="what kvpager bench --calibrate measured on this machine: of MODEL, or of the only one in it",
    )
    costs.add_argument("--device", metavar="NAME", help="that FILE has, if it has several")
    costs.add_argument(
        "--seconds-per-token", metavar="S", type=float, help="prefilling a token (default: 40e-6)"
    )
    costs.add_argument(
        "--seconds-per-token-pair",
        metavar="S",
        type=float,
        help="and attending to one token before it (default: 1.3e-9)",
    )
    parser.add_argument("--jobs", metavar="N", type=int, help="processes at a time (default: one a core)")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw the hit ratios over the sizes")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=_run, settings=lambda options: _SETTINGS)


_SETTINGS: Final = {
    "trace": "TRACE",
    "calibration": "--calibration",
    "model": "--model",
    "block_size": "--block-size",
    "space": "--space",
    "sessions": "--sessions",
    "seed": "--seed",
}


def _run(options: argparse.Namespace) -> int:
    if options.plot is not None and not options.plot.endswith(".svg"):
        raise ConfigError(
            "--plot", f"is drawn as SVG: its name must end with .svg, got {shown(options.plot)}"
        )
    trace, name = _trace_of(options)
    if options.write is not None:
        write_mooncake(trace, options.write)
        print(f"{options.write}: {_described(trace)}")
        return 0
    costs, source = _costs_of(options, trace)
    plan = _plan_of(options, trace, costs)
    jobs = len(os.sched_getaffinity(0)) if options.jobs is None else expect_integer("--jobs", options.jobs, 1)
    outcomes = simulate(plan, jobs, _show_progress if sys.stderr.isatty() else None)
    if sys.stderr.isatty():
        print("\x1b[K", end="", file=sys.stderr, flush=True)
    if options.plot is not None:
        _draw(options.plot, name, plan, outcomes)
    if options.json:
        print(json.dumps(_as_json(name, plan, source, outcomes), indent=2))
    else:
        _print(name, plan, source, outcomes)
        if options.plot is not None:
            print(f"\ndrawn in {options.plot}")
    return 0


# ---- what is asked for ----


def _trace_of(options: argparse.Namespace) -> tuple[Trace, str]:
    """The trace, and what it is called."""
    if options.trace is None and options.generate is None:
        raise ConfigError("TRACE", "give a file, or --generate chats")
    if options.trace is not None and options.generate is not None:
        raise ConfigError("--generate", "makes a trace in place of TRACE, which is given too")
    if options.generate is None:
        for flag, given in (("--sessions", options.sessions), ("--write", options.write)):
            if given is not None:
                raise ConfigError(flag, "is for a trace that is made, and TRACE names a file")
        trace = read_trace(options.trace, block_size=options.block_size, space=options.space)
        return trace, Path(options.trace).name
    if options.space is not None:
        raise ConfigError("--space", "is of a log that kvpager serve --trace wrote, and TRACE names none")
    asked = {"sessions": options.sessions, "block_size": options.block_size}
    traffic = ChatTraffic(**{name: value for name, value in asked.items() if value is not None})
    return chat_trace(traffic, options.seed), f"{traffic.sessions:,} chats, seed {options.seed}"


def _costs_of(options: argparse.Namespace, trace: Trace) -> tuple[CostModel, str]:
    """What blocks take and cost, and where that comes from."""
    costs = USUAL_COSTS
    if options.calibration is not None:
        costs = _calibrated(options.calibration, options.device, options.model)
    elif options.device is not None:
        raise ConfigError("--device", "is one of a calibration, and --calibration names none")
    block_bytes = trace.block_bytes
    if options.model is not None:
        shape = read_shape(model_path(options.model), dtype=None, block_size=16)
        costs = replace(costs, token_bytes=shape.token_bytes, source=f"{costs.source}; KV of {shape.name}")
        block_bytes = None
    elif options.token_bytes is not None:
        given = expect_integer("--token-bytes", options.token_bytes, 1, _MOST_TOKEN_BYTES)
        costs, block_bytes = replace(costs, token_bytes=given), None
    seconds = {
        "seconds_per_token": options.seconds_per_token,
        "seconds_per_token_pair": options.seconds_per_token_pair,
    }
    said = {name: value for name, value in seconds.items() if value is not None}
    for name, value in said.items():
        expect_number(f"--{name.replace('_', '-')}", value, 0.0, _MOST_SECONDS)
    if said:
        words = f"as given, otherwise {costs.source}"
        costs = replace(costs, compute=replace(costs.compute, **said), source=words)
    return costs.model(trace.block_size, block_bytes), costs.source


def _calibrated(path: str, device: str | None, model: str | None) -> Costs:
    """What was measured on this machine, of a device and a model that are named, or the only ones."""
    found = read_calibration(Path(path))
    if found is None:
        raise ConfigError("--calibration", f"{path} has nothing that was measured on this machine")
    calibrated = {one: costs for one, costs in found.devices.items() if costs.models}
    device, links = _only("--device", device, calibrated)
    name, measured = _only("--model", model, {one.name: one for one in links.models.values()})
    cold = min(found.cold.items(), key=lambda one: one[1].seconds_per_byte, default=("", USUAL_COSTS.cold))
    return Costs(
        f"measured here, of {name} on {device}" + (f" and a cold tier on {cold[0]}" if cold[0] else ""),
        USUAL_COSTS.token_bytes,
        measured.compute,
        links.in_place or links.copy or USUAL_COSTS.in_place,
        links.copy or links.in_place or USUAL_COSTS.copy,
        cold[1],
    )


def _only(flag: str, name: str | None, known: Mapping[str, _T]) -> tuple[str, _T]:
    """What is named of these; the only one where nothing is."""
    if name is None and len(known) == 1:
        return next(iter(known.items()))
    if name is None or name not in known:
        raise ConfigError(flag, f"must be one that the calibration has: {', '.join(known) or 'it has none'}")
    return name, known[name]


def _plan_of(options: argparse.Namespace, trace: Trace, costs: CostModel) -> Plan:
    policies = _names("--policy", options.policy, policy_names())
    for name in policies:
        # Here, since what processes that replay fail at is told with a traceback.
        make_policy(name, 0)
    beside = [] if options.beside == _NONE else _names("--beside", options.beside, [MIN, *TEXTBOOK])
    if not trace.references:
        raise ConfigError("TRACE", "looks up no blocks")
    block_bytes = costs.block_bytes
    if options.blocks is not None:
        sizes = [_blocks("--blocks", one) for one in _listed(options.blocks)]
    elif options.host_bytes is not None:
        sizes = [_blocks_of_bytes("--host-bytes", one, block_bytes) for one in _listed(options.host_bytes)]
    else:
        sizes = [_rounded(share * trace.distinct) for share in _SHARES]
    if not sizes:
        raise ConfigError("--blocks", "names no size")
    cold = None
    if options.cold_blocks is not None:
        cold = _blocks("--cold-blocks", options.cold_blocks)
    elif options.cold_bytes is not None:
        cold = _blocks_of_bytes("--cold-bytes", options.cold_bytes, block_bytes)
    kinds = {MIN: Kind.BOUND, **dict.fromkeys(TEXTBOOK, Kind.TEXTBOOK)}
    contenders = [Contender(name, kinds[name]) for name in beside]
    contenders += [Contender(name, Kind.POLICY) for name in policies]
    return Plan(
        trace,
        tuple(contenders),
        tuple(sorted(set(sizes))),
        cold,
        expect_choice("--cold-policy", options.cold_policy, policy_names()),
        costs,
        expect_integer("--seed", options.seed, 0),
    )


def _listed(given: str) -> list[str]:
    return [part for part in re.split(r"[,\s]+", given) if part]


def _names(flag: str, given: str | None, known: Sequence[str]) -> list[str]:
    if given is None:
        return list(known)
    names = [expect_choice(flag, one, known) for one in dict.fromkeys(_listed(given))]
    if not names:
        raise ConfigError(flag, f"names none of {', '.join(known)}")
    return names


def _blocks(flag: str, given: str) -> int:
    """A number of blocks: 30k, 1.5M, 500."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([km]?)", given, flags=re.IGNORECASE)
    if found is None:
        raise ConfigError(flag, f"must be a number of blocks such as 500, 30k or 1.5M, got {shown(given)}")
    return expect_integer(flag, round(float(found[1]) * _UNITS[found[2].lower()]), 1, MOST_BLOCKS)


def _blocks_of_bytes(flag: str, given: str, block_bytes: int) -> int:
    blocks = parse_bytes(flag, given) // block_bytes
    if not blocks:
        raise ConfigError(flag, f"{given} holds no block of {format_bytes(block_bytes)}")
    return expect_integer(flag, blocks, 1, MOST_BLOCKS)


def _rounded(number: float) -> int:
    """To two digits, so that it reads well."""
    return max(1, int(float(f"{number:.1e}")))


# ---- what is answered ----


def _described(trace: Trace) -> str:
    minutes = trace.seconds / 60
    time = _counted(round(minutes), "minute") if minutes >= 2 else _counted(round(trace.seconds), "second")
    return (
        f"{_counted(int(np.count_nonzero(trace.asked)), 'request')} in {time}, "
        f"{_counted(trace.references, 'block')} of {_counted(trace.block_size, 'token')}, "
        f"{_counted(trace.distinct, 'different one')}"
    )


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _show_progress(share: float) -> None:
    print(f"replaying, {share:.0%}\x1b[K", end="\r", file=sys.stderr, flush=True)


def _print(name: str, plan: Plan, source: str, outcomes: Sequence[Outcome]) -> None:
    model, compute = plan.cost, plan.cost.compute
    print(f"{name}: {_described(plan.trace)}")
    print(f"A block: {format_bytes(model.block_bytes)}. Costs: {source}")
    if compute is not None:
        print(
            f"(a prefill: {compute.seconds_per_step:g} s + {compute.seconds_per_token:g} s a token + "
            f"{compute.seconds_per_token_pair:g} s a pair of tokens; {_links(model, plan.cold_blocks)})"
        )
    for size in plan.sizes:
        cold = ""
        if plan.cold_blocks is not None:
            cold = (
                f", cold tier: {plan.cold_blocks:,} blocks "
                f"({format_bytes(plan.cold_blocks * model.block_bytes)}), {plan.cold_policy}"
            )
        print(f"\nhost memory: {size:,} blocks ({format_bytes(size * model.block_bytes)}){cold}")
        of_cold = "  of them cold" if cold else ""
        print(f"{'':<10}{'blocks':>8}{'tokens':>8}{'seconds':>9}{'saved':>11}{of_cold}   gap")
        for one in outcomes:
            if one.blocks == size:
                print(_row(one, outcomes, with_cold=bool(cold)))
    if any(one.contender.kind is Kind.POLICY for one in outcomes):
        print("\ngap: the share of the way from the best textbook policy to MIN, in blocks.")
    if plan.cold_blocks is not None:
        print("MIN and textbook policies have the room of both tiers in one.")


def _links(model: CostModel, cold_blocks: int | None) -> str:
    words = f"host memory {1e-9 / model.copy.seconds_per_byte:.1f} GB/s"
    if cold_blocks is None or model.cold is None:
        return words
    return f"{words}, the cold tier {1e-9 / model.cold.seconds_per_byte:.1f} GB/s"


def _row(one: Outcome, outcomes: Sequence[Outcome], *, with_cold: bool) -> str:
    score = one.score
    seconds = "" if score.seconds is None else f"{score.seconds:.1%}"
    saved = "" if score.seconds_saved is None else f"{score.seconds_saved:,.0f} s"
    cold = ""
    if with_cold:
        cold = f"{score.cold_blocks:>14.1%}" if one.contender.kind is Kind.POLICY else " " * 14
    closed = gap_closed(outcomes, one)
    gap = "" if closed is None else f"{closed:>6.0%}"
    line = (
        f"{one.contender.name:<10}{score.blocks:>8.1%}{score.tokens:>8.1%}{seconds:>9}{saved:>11}{cold}{gap}"
    )
    return line.rstrip()


def _as_json(name: str, plan: Plan, source: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    trace = plan.trace
    return {
        "trace": {
            "name": name,
            "requests": int(np.count_nonzero(trace.asked)),
            "seconds": trace.seconds,
            "block_size": trace.block_size,
            "references": trace.references,
            "distinct": trace.distinct,
            "prompt_tokens": trace.prompt_tokens,
        },
        "cost": {"source": source, **asdict(plan.cost)},
        "cold_blocks": plan.cold_blocks,
        "cold_policy": None if plan.cold_blocks is None else plan.cold_policy,
        "seed": plan.seed,
        "results": [
            {
                "name": one.contender.name,
                "kind": one.contender.kind,
                "blocks": one.blocks,
                "host_bytes": one.blocks * plan.cost.block_bytes,
                "hit_blocks": one.score.blocks,
                "hit_tokens": one.score.tokens,
                "hit_seconds": one.score.seconds,
                "seconds_saved": one.score.seconds_saved,
                "hit_cold_blocks": one.score.cold_blocks,
                "gap_closed": gap_closed(outcomes, one),
                "took_seconds": one.took,
            }
            for one in outcomes
        ],
    }


def _draw(path: str, name: str, plan: Plan, outcomes: Sequence[Outcome]) -> None:
    by_case = {(one.contender, one.blocks): one.score for one in outcomes}

    def panel(title: str, field: str) -> Panel:
        curves = (
            Curve(
                contender.name,
                tuple(getattr(by_case[contender, size], field) for size in plan.sizes),
                emphasis=contender.kind is Kind.POLICY,
                dashed=contender.kind is Kind.BOUND,
            )
            for contender in plan.contenders
        )
        return Panel(title, tuple(curves))

    panels = [panel("Blocks found", "blocks"), panel("Seconds of prefill saved", "seconds")]
    axis = "blocks in host memory"
    if plan.cold_blocks is not None:
        axis += f", {plan.cold_blocks:,} below"
    try:
        Path(path).write_text(draw_panels(name, axis, plan.sizes, panels))
    except OSError as error:
        raise KVPagerError(f"{path} cannot be written: {error.strerror}") from error
