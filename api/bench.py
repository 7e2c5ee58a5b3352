"""``kvpager bench``: measures this machine, and what kvpager reaches of it. It takes less than a minute.

Everything is done in memory, processes and folders of its own, which are gone when it is over; a sidecar that
runs is left alone, and takes its share of the machine. Figures are medians of what was done in turns. Shares
are of the figure above them, which is what the machine gives to a plain copy or message. The last run is kept
in kvpager/bench.json in $XDG_STATE_HOME or ~/.local/state, where kvpager size finds it.
"""

from __future__ import annotations

import argparse
import inspect
import os
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from .. import __version__
from ..kvstore.calibration import CALIBRATION_VARIABLE, calibration_path, expect_writable, read_calibration
from ..tiers.errors import ConfigError, KVPagerError
from ..tiers.settings import expect_seconds, public_url
from .bench_cold import measure_cold
from .bench_gpu import measure_gpu, why_no_gpu
from .bench_memory import measure_memory
from .bench_sidecar import measure_sidecar
from .calibrate import calibrated, calibrated_model, calibration_lines
from .measurements import Measurement, Measurements, Unit, keep, measurements_path
from .option_words import in_options

__all__ = ["add_parser", "measurement_line"]

_SECONDS: Final = 3.0
_MOST_SECONDS: Final = 10.0
_MODEL_TIMES: Final = 5
"""A model is given so many times as long as a link."""
_COLD: Final = {"cold.url": "--cold", "cold.path": "--cold"}
_SETTINGS: Final = {**_COLD, "model": "--model", "device": "--device"}


def add_parser(commands: Any) -> None:
    """Add the command to argparse's subcommands."""
    parser = commands.add_parser(
        "bench",
        help="measure this machine, and what kvpager reaches of it",
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cold",
        metavar="URL",
        action="append",
        default=[],
        help="a cold tier, too: redis://..., unix://..., disk:///folder; may be given several times",
    )
    parser.add_argument(
        "--seconds",
        metavar="SECONDS",
        type=float,
        default=_SECONDS,
        help="for each part, of memory, GPU, sidecar and cold tier (default: %(default)s)",
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure instead what links and a model cost, for engines to begin with, and keep it",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="with --calibrate: how long prefilling takes with this model, as of LLM: a folder, a GGUF file, "
        "smollm2, or a name on the Hub",
    )
    parser.add_argument(
        "--device", metavar="DEVICE", default="auto", help="with --model: cpu, cuda:N (default: %(default)s)"
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help=f"with --calibrate: where it is kept (default: ${CALIBRATION_VARIABLE}, or "
        "kvpager/calibration.json in $XDG_CACHE_HOME or ~/.cache)",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run=_run, settings=lambda options: _SETTINGS)


def _run(options: argparse.Namespace) -> int:
    seconds = expect_seconds("--seconds", options.seconds, _MOST_SECONDS, above=True)
    if options.calibrate:
        return _calibrate(options, seconds)
    for option in ("model", "calibration"):
        if getattr(options, option) is not None:
            raise ConfigError(f"--{option}", "is for --calibrate")
    path = measurements_path(os.environ)
    # Where lines are for a program, people still see that something is being done.
    out = sys.stderr if options.json else sys.stdout
    parts: list[tuple[str, Callable[[float], list[Measurement]]]] = [("memory", measure_memory)]
    missing = {}
    reason = why_no_gpu()
    if reason is None:
        parts.append(("GPU", measure_gpu))
    else:
        missing["GPU"] = reason
    parts.append(("sidecar", measure_sidecar))
    parts += [(f"cold tier {public_url(url)}", partial(measure_cold, url)) for url in options.cold]
    found: list[Measurement] = []
    failed = 0
    for number, (name, measure) in enumerate(parts, 1):
        _show(f"measuring {name} ({number} of {len(parts)})")
        try:
            new = measure(seconds)
        except KVPagerError as error:
            failed += 1
            missing[name] = in_options(str(error), _COLD)
            print(f"{name}: not measured: {missing[name]}", file=out, flush=True)
            continue
        found += new
        measurements = _of(found, missing)
        for one in new:
            print(measurement_line(measurements, one), file=out, flush=True)
    if reason is not None:
        print(f"GPU: not measured: {reason}", file=out)
    measurements = _of(found, missing)
    if options.json:
        print(measurements.as_json())
    keep(measurements, path)
    if not options.json:
        print(f"kept in {path}")
    return 1 if failed else 0


def _calibrate(options: argparse.Namespace, seconds: float) -> int:
    """Measure costs and keep them, with what was kept of other models and tiers before."""
    path = calibration_path(os.environ, options.calibration)
    expect_writable(path)
    reason = why_no_gpu()
    _show("measuring links")
    found = calibrated(options.cold, seconds, gpu=reason is None)
    try:
        found = found.with_earlier(read_calibration(path))
    except ConfigError as error:
        print(f"{error.problem}; it is replaced", file=sys.stderr)
    found.write(path)
    failure: KVPagerError | None = None
    if options.model is not None:
        words = f"measuring prefills with {options.model}"
        _show(words)
        try:
            model = calibrated_model(
                options.model,
                options.device,
                _MODEL_TIMES * seconds,
                lambda share: _show(f"{words}, {share:.0%}"),
            )
        except KVPagerError as error:
            # The links are known all the same, and kept.
            failure = error
        else:
            found = model.with_earlier(found)
            found.write(path)
    _show("")
    if options.json:
        print(found.as_json())
    else:
        for line in calibration_lines(found):
            print(line)
        if reason is not None:
            print(f"GPU: not measured: {reason}")
        print(f"kept in {path}")
    if failure is not None:
        raise failure
    return 0


def _show(words: str) -> None:
    """What is being done, to people."""
    if sys.stderr.isatty():
        print(f"{words}\x1b[K", end="\r", file=sys.stderr, flush=True)


def _of(found: list[Measurement], missing: dict[str, str]) -> Measurements:
    return Measurements(platform.node(), time.time(), __version__, tuple(found), dict(missing))


def measurement_line(measurements: Measurements, one: Measurement) -> str:
    """One figure for people, and the share of its ceiling that it comes to."""
    value = (
        f"{one.value / 1e9:8.2f} GB/s" if one.unit is Unit.BYTES_PER_SECOND else f"{one.value * 1e6:8.1f} us"
    )
    reached = measurements.reached(one)
    share = "" if reached is None else f"{reached:7.0%}"
    indent = "" if one.ceiling is None else "  "
    return f"{indent + one.words:<58} {value:<14}{share}".rstrip()
