"""Plots of what was measured: from ``results/*.json`` to SVG files for docs/performance.md.

Every plot shows kvpager's figures beside its peers', the physical ceiling of each as a solid line and the
target as a dashed one. What a file draws stands in its description too, in words: for those who do not see
it, and for the test that holds the files to the results without drawing them.

The same results give the same bytes with the same version of matplotlib.

    python benchmarks/plots.py [--results DIR] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from kvpager.tiers.extras import how_to_install
from kvpager.tiers.layout import KVLayout
from kvpager.tiers.memory import format_bytes

__all__ = ["Panel", "Plot", "Results", "Series", "draw", "plots", "read_results"]

FOLDER: Final = Path(__file__).resolve().parent / "results"
FIGURES: Final = Path(__file__).resolve().parents[1] / "docs" / "figures"
SOURCES: Final = (
    "replay",
    "decode_attention",
    "prefill_attention",
    "engine_pages",
    "copy_blocks",
    "oversubscription",
    "waking",
)
AREA: Final = re.compile(r"\bp[0-9a-f]{10}\b")
"""A name of an area that is clipped to, in a drawn file."""
CTAS: Final = "16 CTAs"
"""What `gather` and `scatter` are drawn with: they take as many where nothing else is asked for."""
STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvpager",
    "font.size": 8.0,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
COLOURS: Final = {
    "kvpager": ("#1f5fa8", "#86b4e0", "#0d2f57"),
    "FlashInfer": ("#e0903a", "#f2c68f"),
    "": ("#5d9e6b", "#a5cfae", "#b8b8b8", "#c9a24b", "#a8443f", "#7d5ba6"),
}
"""By whose a series is: the beginning of its name."""
INCHES: Final = 8.2
LEGEND_COLUMNS: Final = 3
LEGEND: Final[dict[str, Any]] = {
    "loc": "lower left",
    "ncols": LEGEND_COLUMNS,
    "frameon": False,
    "fontsize": 7,
    "columnspacing": 1.2,
    "borderaxespad": 0.1,
    "borderpad": 0.2,
    "labelspacing": 0.3,
}
NUMBER: Final[dict[str, Any]] = {"ha": "right", "va": "center", "fontsize": 6.5}

Row = Mapping[str, Any]
Results = Mapping[str, Any]
"""The results of each of `SOURCES`."""


# ---- what is drawn ----


@dataclass(frozen=True)
class Series:
    """Values of one contender or limit.

    Attributes:
        name: for the legend.
        values: one a case; None: not measured.
        kind: ``ceiling``: what the hardware can do; ``target``: what is wanted.
    """

    name: str
    values: tuple[float | None, ...]
    kind: Literal["measured", "ceiling", "target"] = "measured"


@dataclass(frozen=True)
class Panel:
    """Cases that share an axis.

    Attributes:
        title: what is measured.
        unit: of the values.
        cases: what the values were measured on.
        series: of as many values each.
        decimals: of numbers that are shown.
        start: where bars begin, or the axis of lines.
        form: bars, or lines where cases are steps of one quantity.
    """

    title: str
    unit: str
    cases: tuple[str, ...]
    series: tuple[Series, ...]
    decimals: int = 0
    start: float = 0.0
    form: Literal["bars", "lines"] = "bars"

    def written(self, value: float) -> str:
        """The number as it is shown."""
        return f"{value:,.{self.decimals}f}"


@dataclass(frozen=True)
class Plot:
    """One file.

    Attributes:
        name: of the file, without its ending.
        title: of the plot.
        panels: from the top.
    """

    name: str
    title: str
    panels: tuple[Panel, ...]

    def description(self) -> str:
        """All that is drawn, in words."""
        lines = [self.title]
        for panel in self.panels:
            lines.append(f"{panel.title} ({panel.unit})")
            for number, case in enumerate(panel.cases):
                shown = ((series.name, series.values[number]) for series in panel.series)
                said = (f"{name} {panel.written(value)}" for name, value in shown if value is not None)
                lines.append(f"{case}: {', '.join(said)}")
        return "\n".join(lines)


def read_results(folder: Path = FOLDER) -> Results:
    """What the benchmarks left in a folder.

    Raises:
        SystemExit: a file of `SOURCES` is not there.
    """
    missing = [name for name in SOURCES if not (folder / f"{name}.json").exists()]
    if missing:
        raise SystemExit(f"{folder} has no {', '.join(f'{name}.json' for name in missing)}")
    return {name: json.loads((folder / f"{name}.json").read_text())["results"] for name in SOURCES}


def plots(results: Results) -> tuple[Plot, ...]:
    """All plots, in the order of docs/performance.md."""
    return tuple(make(results) for make in MAKERS)


def _column(rows: Iterable[Row], key: str, scale: float = 1.0) -> tuple[float | None, ...]:
    return tuple(row[key] * scale if key in row else None for row in rows)


def _batch(case: str) -> str:
    """``32/8 D128 B64 x 8192``, as the benchmark says it, without the heads: ``64 x 8k``."""
    if found := re.fullmatch(r"\S+ D\d+ B(\d+) x (\d+)", case):
        return f"{found[1]} x {int(found[2]) // 1024}k"
    if found := re.fullmatch(r"\S+ D\d+ B(\d+), .*, (\d+) to (\d+), mean (\d+)", case):
        return f"{found[1]} of {int(found[2]):,} to {int(found[3]):,}"
    raise SystemExit(f"not a case of decoding attention: {case}")


def _size(count: int) -> str:
    return format_bytes(count).replace(".0 ", " ")


def replay(results: Results) -> Plot:
    """Hit ratios of policies over the size of host memory."""
    panels = []
    for trace, title in (("conversation", "Mooncake's conversation trace"), ("chats", "chats that are made")):
        rows = [row for row in results["replay"] if row["trace"] == trace]
        sizes = tuple(f"{size:,}" for size in dict.fromkeys(row["blocks"] for row in rows))
        for key, what in (("hit_blocks", "blocks found"), ("hit_seconds", "seconds of prefill saved")):
            series = []
            for name, kind in {row["policy"]: row["kind"] for row in rows}.items():
                values = _column((row for row in rows if row["policy"] == name), key, 100.0)
                shown = f"kvpager, {name}" if kind == "policy" else name
                series.append(Series(shown, values, "ceiling" if kind == "bound" else "measured"))
            panels.append(Panel(f"{title}: {what}", "%", sizes, tuple(series), 1, 0.0, "lines"))
    return Plot("replay", "Policies, over blocks of 512 tokens in host memory", tuple(panels))


def hbm(results: Results) -> Plot:
    """Pages in HBM: kvpager, FlashInfer's two modes, what reading alone reaches."""
    figures = results["decode_attention"]["figures"]
    heads = dict.fromkeys(row["case"].partition(" B")[0] for row in figures["hbm"])
    groups = [
        (
            f"{each}, all sequences of one length",
            [row for row in figures["hbm"] if row["case"].startswith(each)],
        )
        for each in heads
    ]
    first, *_ = figures["ragged"]
    lengths = "lengths of a trace" if ", trace," in first["case"] else "log-normal lengths"
    groups.append((f"{first['case'].partition(' B')[0]}, {lengths}", figures["ragged"]))
    panels = []
    for title, rows in groups:
        ceiling = [row["ceiling"] for row in rows]
        series = (
            Series("kvpager", _column(rows, "GB/s")),
            Series("FlashInfer, tensor cores", _column(rows, "flashinfer tc")),
            Series("FlashInfer, CUDA cores", _column(rows, "flashinfer")),
            Series("read ceiling", tuple(ceiling), "ceiling"),
            Series("96% of it", tuple(0.96 * rate for rate in ceiling), "target"),
        )
        cases = tuple(_batch(row["case"]) for row in rows)
        panels.append(Panel(title, "GB/s", cases, series))
    return Plot("decode_hbm", "Decoding attention, pages in HBM", tuple(panels))


def host(results: Results) -> Plot:
    """All pages in host memory: read in place, or copied first."""
    rows = results["decode_attention"]["figures"]["host"]
    ceiling = [row["GB/s"] / row["of ceiling"] for row in rows]
    series = (
        Series("kvpager", _column(rows, "GB/s")),
        Series("copy 2 MiB pieces, one call, then attend", _column(rows, "copy 2 MiB, one call")),
        Series("copy pages, one call, then attend", _column(rows, "copy pages, one call")),
        Series("copy page by page, then attend", _column(rows, "copy pages")),
        Series("ceiling of kernel reads", tuple(ceiling), "ceiling"),
        Series("99% of it", tuple(0.99 * rate for rate in ceiling), "target"),
    )
    cases = tuple(f"{row['case'].partition(' B')[0]}, {_batch(row['case'])}" for row in rows)
    panel = Panel("From host memory over PCIe", "GB/s", cases, series, decimals=1)
    return Plot("decode_host", "Decoding attention, all pages in host memory", (panel,))


def mixed(results: Results) -> Plot:
    """A share of the pages in host memory: time over the longer of the two links' times."""
    rows = results["decode_attention"]["figures"]["mixed"]
    shares = tuple(dict.fromkeys(row["case"].split()[0] for row in rows))
    ways = {
        how: {row["case"].split()[0]: row for row in rows if row["case"].endswith(how)}
        for how in ("spread", "concentrated")
    }
    wanted = tuple(1.10 if ways["spread"][share]["balanced"] else 1.05 for share in shares)
    series = (
        *(
            Series(f"kvpager, {how}", tuple(found[share]["of max"] for share in shares))
            for how, found in ways.items()
        ),
        Series("max(PCIe, HBM)", (1.0,) * len(shares), "ceiling"),
        Series("target", wanted, "target"),
    )
    panel = Panel(
        "64 x 8k, by the share in host memory",
        "time over max(PCIe, HBM)",
        tuple(f"{float(share.rstrip('%')):g}%" for share in shares),
        series,
        decimals=3,
        start=1.0,
    )
    return Plot("decode_mixed", "Decoding attention, some pages in host memory", (panel,))


def shared(results: Results) -> Plot:
    """Many sequences behind one prefix."""
    figures = results["decode_attention"]["figures"]
    rows = {row["case"].partition(":")[0]: row for row in figures["shared"]}
    counts = re.search(r"(\d+) x \((\d+) \+ (\d+)\)$", rows["host, shared"]["case"])
    if counts is None:
        raise SystemExit(f"a shared case names no sizes: {rows['host, shared']['case']}")
    seqs, prefix, tail = map(int, counts.groups())
    token = KVLayout(1, 8, 128).token_bytes  # the heads of all cases that name none
    # Reads of as many bytes were not timed for this figure: the fastest of the same run.
    pcie = max(max(row["linear"], row["slices"]) for row in figures["host"])
    near = max(row["ceiling"] for row in figures["hbm"])
    once = token * (prefix + seqs * tail) / near / 1e3
    apart = rows["HBM, unshared"]["us"]
    crossing = token * prefix / pcie / 1e3
    names = f"{seqs} that share it", "1 alone"
    on_host = Panel(
        f"A prefix of {prefix:,} tokens in host memory",
        "us",
        names,
        (
            Series("kvpager", (rows["host, shared"]["us"], rows["host, one"]["us"])),
            Series("each byte read once", (crossing, crossing), "ceiling"),
            Series("target", (1.1 * rows["host, one"]["us"], None), "target"),
        ),
    )
    flashinfer = rows["HBM, shared"]
    in_hbm = Panel(
        "The same in HBM",
        "us",
        (f"{seqs} that share it", f"{seqs} with a copy each"),
        (
            Series("kvpager", (rows["HBM, shared"]["us"], apart)),
            Series("FlashInfer, tensor cores", (flashinfer.get("flashinfer tc us"), None)),
            Series("FlashInfer, CUDA cores", (flashinfer.get("flashinfer us"), None)),
            Series("each byte read once", (once, token * seqs * (prefix + tail) / near / 1e3), "ceiling"),
            Series("target", (apart / 5, None), "target"),
        ),
    )
    return Plot("decode_shared", "Decoding attention, a shared prefix", (on_host, in_hbm))


def install(results: Results) -> Plot:
    """Installing pages in HBM as they are read, and the step after it."""
    figures = results["decode_attention"]["figures"]
    rows = {row["case"].partition(", ")[2]: row for row in figures["install"]}
    batch = figures["install"][0]["case"].partition(",")[0]
    far, near = (
        next(row for row in figures[name] if row["case"] == f"32/8 D128 {batch}") for name in ("host", "hbm")
    )
    pcie, once = far["us"] * far["of ceiling"], near["us"] * near["of ceiling"]
    alone, after = rows["read alone"]["us"], rows["the step after"]
    in_place = after["us"] / after["times"]
    first = Panel(
        f"The step that reads {_batch(far['case'])} in host memory",
        "us",
        ("reading alone", "installing too"),
        (
            Series("kvpager", (alone, rows["installing"]["us"])),
            Series("each byte read once", (pcie, pcie), "ceiling"),
            Series("target", (None, 1.03 * alone), "target"),
        ),
    )
    second = Panel(
        "The step after it",
        "us",
        ("on what was installed", "on what lay in HBM before"),
        (
            Series("kvpager", (after["us"], in_place)),
            Series("each byte read once", (once, once), "ceiling"),
            Series("target", (1.03 * in_place, None), "target"),
        ),
        decimals=1,
    )
    return Plot("decode_install", "Decoding attention, installing as it reads", (first, second))


def prefill(results: Results) -> Plot:
    """A chunk on a prefix in host memory against what moves the prefix and does nothing else."""
    rows = results["prefill_attention"]["rows"]
    wanted = results["prefill_attention"]["target"]
    limit = next(row["ms"] / row["of limit"] for row in rows if "of limit" in row)
    is_mover = [row["case"].startswith("mover: ") for row in rows]
    fastest = min(row["ms"] for row, mover in zip(rows, is_mover, strict=True) if mover)
    names = {
        "host, installed": "prefix in host memory, installed",
        "host, no room": "prefix in host memory, staged",
        "HBM": "prefix in HBM",
    }
    cases = tuple(names.get(row["case"], row["case"].removeprefix("mover: ")) for row in rows)
    times = [row["ms"] for row in rows]
    series = (
        Series("kvpager", tuple(None if mover else ms for ms, mover in zip(times, is_mover, strict=True))),
        Series(
            "movers alone", tuple(ms if mover else None for ms, mover in zip(times, is_mover, strict=True))
        ),
        Series("the fastest mover", (fastest,) * len(rows), "ceiling"),
        Series("target", tuple(wanted * limit if "of limit" in row else None for row in rows), "target"),
    )
    panel = Panel("All layers of a chunk", "ms", cases, series, decimals=1)
    return Plot("prefill", "Prefill attention on a prefix in host memory", (panel,))


def engine_pages(results: Results) -> Plot:
    """Layer-first tensors to host blocks and back, and a matrix product beside it."""
    rows = [row for row in results["engine_pages"] if "engine" in row]
    beside = [row for row in results["engine_pages"] if "beside" in row]
    panels = []
    for direction, title in (
        ("load", "Host blocks to engine tensors"),
        ("store", "Engine tensors to host blocks"),
    ):
        these = [row for row in rows if row["direction"] == direction]
        rates = [row["gb_per_s"] for row in these]
        cases = tuple(
            f"{row['engine']}, {row['format'].partition(':')[0]}, {_size(row['fragment_bytes'])}"
            for row in these
        )
        series = (
            Series("kvpager", _column(rates, CTAS)),
            Series("copy engine, one call", _column(rates, "dma batched")),
            Series("one copy of all bytes", _column(rates, "one piece"), "ceiling"),
            Series("target", (50.0,) * len(these), "target"),
        )
        panels.append(
            Panel(f"{title}: engine's layout, block format, fragments", "GB/s", cases, series, decimals=1)
        )
    alone = next(row["products_ms"] for row in beside if row["beside"] == "nothing")
    copying = [row for row in beside if row["beside"] != "nothing"]
    by_dma = [row["beside"].endswith("dma") for row in copying]
    times = [row["products_ms"] for row in copying]
    of_products = (
        Series("kvpager", tuple(None if dma else ms for ms, dma in zip(times, by_dma, strict=True))),
        Series(
            "copy engine, one call", tuple(ms if dma else None for ms, dma in zip(times, by_dma, strict=True))
        ),
        Series("products alone", (alone,) * len(copying), "ceiling"),
    )
    names = tuple(row["beside"].replace("dma", "copy engine, its calls included") for row in copying)
    panels.append(Panel("Matrix products beside the copies", "ms", names, of_products, decimals=1))
    return Plot("engine_pages", "Pages of other engines", tuple(panels))


def copy_blocks(results: Results) -> Plot:
    """Copies of scattered blocks by the kernel and by the copy engine, over the size of a block."""
    rows = results["copy_blocks"]
    near = max(row["ceiling"] for row in results["decode_attention"]["figures"]["hbm"])
    ways = {
        "to_device": ("Host memory to HBM", "bus"),
        "to_host": ("HBM to host memory", "bus"),
        "within": ("Within HBM, read and written bytes", "blocks"),
    }
    panels = []
    for way, (title, form) in ways.items():
        these = [row for row in rows if row["way"] == way]
        rates = [row["gb_per_s"] for row in these]
        series = [
            Series("kvpager, kernel", _column(rates, form)),
            Series("copy engine, one call", _column(rates, "dma batched")),
            Series("kvpager, kernel over addresses in host memory", _column(rates, "listed")),
        ]
        one_piece = _column(rates, "one piece")
        if way == "within":
            # One copy is no ceiling here: the driver's is slower than the kernel.
            series.append(Series("the driver's copy of all bytes at once", one_piece))
            series.append(Series("read ceiling", (near,) * len(these), "ceiling"))
        else:
            series.append(Series("one copy of all bytes", one_piece, "ceiling"))
        sizes = tuple(_size(row["block_bytes"]) for row in these)
        decimals, start = (0, 0.0) if way == "within" else (1, 45.0)
        panels.append(Panel(title, "GB/s", sizes, tuple(series), decimals, start, "lines"))
    return Plot("copy_blocks", "Copies of scattered blocks, by their size", tuple(panels))


SWAPS: Final = {"attend": "kvpager", "copy": "copied in before", "recompute": "computed again"}
"""What the ways to make room in VRAM are called."""


def oversubscription(results: Results) -> Plot:
    """More sessions than VRAM holds, by what becomes of those that have no room."""
    cases = results["oversubscription"]["cases"]
    by = {(case["mode"], case["share"]): case for case in cases}
    shares = tuple(dict.fromkeys(case["share"] for case in cases))
    columns = {mode: [by[mode, share] for share in shares] for mode in SWAPS}
    rates = {mode: [case["tokens_per_s"] for case in rows] for mode, rows in columns.items()}
    wanted = tuple(max(b, 3 * a) for a, b in zip(rates["recompute"], rates["copy"], strict=True))
    of_rates = (
        *(Series(SWAPS[mode], tuple(found)) for mode, found in rates.items()),
        Series("as copied in before, and 3x of computed again", wanted, "target"),
    )
    labels = tuple(f"{share:.0%}" for share in shares)
    panels = [Panel("Tokens of answers, by the share of VRAM that is active", "tokens/s", labels, of_rates)]
    # What is computed again takes many times as long: the page has its numbers.
    for key, what in (("first_token_s", "The first token"), ("between_tokens_s", "Between two tokens")):
        times = {mode: [case[key]["p99"] * 1e3 for case in columns[mode]] for mode in ("attend", "copy")}
        series = (
            *(Series(SWAPS[mode], tuple(found)) for mode, found in times.items()),
            Series("no worse than copied in before", tuple(times["copy"]), "target"),
        )
        panels.append(Panel(f"{what}, 99th percentile", "ms", labels, series, decimals=1))
    shape = cases[0]["shape"]
    return Plot("oversubscription", f"{shape}: more sessions than VRAM holds", tuple(panels))


def waking(results: Results) -> Plot:
    """A session wakes, a sequence is larger than VRAM, a document is shared."""
    found = results["waking"]
    rows = {(row["mode"], row["tokens"], row["awake"]): row for row in found["wake"]["rows"]}
    lengths = tuple(dict.fromkeys(tokens for _, tokens, _ in rows))
    first = {
        mode: [rows[mode, tokens, 0]["first_token_s"]["p50"] * 1e3 for tokens in lengths] for mode in SWAPS
    }
    wanted = tuple(
        min(a / 5, b * (1.0 if tokens <= 2048 else 1.08))
        for tokens, a, b in zip(lengths, first["recompute"], first["copy"], strict=True)
    )
    of_first = (
        *(Series(SWAPS[mode], tuple(times)) for mode, times in first.items()),
        Series("target", wanted, "target"),
    )
    awake = next(count for _, _, count in rows if count)
    beside = {mode: rows[mode, lengths[-1], awake] for mode in SWAPS}
    quiet = {mode: row["between_tokens_undisturbed_s"]["p99"] * 1e3 for mode, row in beside.items()}
    prompted = {mode: row["between_tokens_prompted_s"]["p99"] * 1e3 for mode, row in beside.items()}
    woken = {mode: row["between_tokens_s"]["p99"] * 1e3 for mode, row in beside.items()}
    of_others = (
        *(Series(SWAPS[mode], (quiet[mode], prompted[mode], woken[mode])) for mode in SWAPS),
        Series("target", (None, None, min(1.15 * quiet["attend"], woken["copy"])), "target"),
    )
    larger = found["larger"]
    ceiling = larger["ceiling_gb_per_s"]
    of_larger = (
        Series("kvpager", (larger["gb_per_s"],)),
        Series("reads by a kernel, nothing else", (ceiling,), "ceiling"),
        Series("target", (0.95 * ceiling,), "target"),
    )
    ours, theirs = found["shared"]["rows"]
    of_shared = (
        Series("kvpager", (ours["tokens_per_s"], None)),
        Series(SWAPS["copy"], (None, theirs["tokens_per_s"])),
        Series("target", (5 * theirs["tokens_per_s"], None), "target"),
    )
    sizes = tuple(f"{tokens:,} tokens" for tokens in lengths)
    panels = (
        Panel("The first token of a session that wakes, median", "ms", sizes, of_first, decimals=1),
        Panel(
            f"Between two tokens of {awake} others, 99th percentile",
            "ms",
            (
                "undisturbed",
                "the same prompts, nobody wakes",
                f"while {lengths[-1]:,} tokens wake",
            ),
            of_others,
            decimals=1,
        ),
        Panel(
            f"A sequence of {larger['tokens']:,} tokens on VRAM for {larger['vram_tokens']:,}",
            "GB/s",
            ("read in host memory while it decodes",),
            of_larger,
            decimals=1,
        ),
        Panel(
            f"{found['shared']['sessions']} sessions on a document of {found['shared']['document']:,} tokens",
            "tokens/s",
            ("one copy", "a copy each"),
            of_shared,
        ),
    )
    return Plot("waking", "Waking, and what reading in place is good for", panels)


MAKERS: Final[tuple[Callable[[Results], Plot], ...]] = (
    replay,
    copy_blocks,
    hbm,
    host,
    mixed,
    shared,
    install,
    prefill,
    engine_pages,
    oversubscription,
    waking,
)


# ---- how ----


def draw(plot: Plot, folder: Path) -> Path:
    """Draw a plot as ``NAME.svg`` in a folder, and return its path.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    path = folder / f"{plot.name}.svg"
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        heights = [_inches(panel) for panel in plot.panels]
        figure = Figure(figsize=(INCHES, sum(heights) + 0.7), layout="constrained")
        figure.suptitle(plot.title, fontsize=10)
        grid = figure.subplots(len(plot.panels), 1, squeeze=False, height_ratios=heights)
        colours = _colours(plot)
        known: set[str] = set()
        for panel, axes in zip(plot.panels, grid[:, 0], strict=True):
            handles = (_bars if panel.form == "bars" else _lines)(axes, panel, colours)
            # A name is explained once, above the first panel that has it.
            new = {name: handle for name, handle in handles.items() if name not in known}
            known |= set(new)
            axes.set_title(panel.title, pad=4 + 12 * -(-len(new) // LEGEND_COLUMNS))
            if new:
                box = axes.legend(new.values(), new.keys(), bbox_to_anchor=(0, 1), **LEGEND)
                box.set_in_layout(False)  # the title's room is its room
        about = {"Title": plot.title, "Description": plot.description(), "Creator": None, "Date": None}
        figure.savefig(path, format="svg", metadata=about)
    # Areas are named by a hash of where they lie, whose last digits the solver does not always find alike.
    names: dict[str, str] = {}
    text = AREA.sub(lambda found: names.setdefault(found[0], f"area{len(names) + 1}"), path.read_text())
    # The writer leaves blanks at the ends of lines.
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")
    return path


def _colours(plot: Plot) -> dict[str, str]:
    """A colour for each name of what was measured."""
    left = {whose: list(colours) for whose, colours in COLOURS.items()}
    names = dict.fromkeys(
        series.name for panel in plot.panels for series in panel.series if series.kind == "measured"
    )
    return {name: left[next(whose for whose in left if name.startswith(whose))].pop(0) for name in names}


def _inches(panel: Panel) -> float:
    if panel.form == "lines":
        return 1.9
    bars = sum(len(_shown(panel, number)) + 0.6 for number in range(len(panel.cases)))
    return 0.55 + 0.15 * bars


def _shown(panel: Panel, number: int) -> list[tuple[Series, float]]:
    """What was measured of a case."""
    values = ((series, series.values[number]) for series in panel.series if series.kind == "measured")
    return [(series, value) for series, value in values if value is not None]


def _bars(axes: Any, panel: Panel, colours: Mapping[str, str]) -> dict[str, Any]:
    """Bars, the cases below each other, and limits as lines across a case; the legend's handles."""
    handles: dict[str, Any] = {}
    middles = []
    top = 0.0
    for number in range(len(panel.cases)):
        shown = _shown(panel, number)
        for place, (series, value) in enumerate(shown):
            y = top + place + 0.5
            bar = axes.barh(y, value - panel.start, 0.86, left=panel.start, color=colours[series.name])
            handles.setdefault(series.name, bar)
            # In a column of their own, where no line crosses them.
            axes.text(1.0, y, panel.written(value), transform=axes.get_yaxis_transform(), **NUMBER)
        for series in panel.series:
            limit = series.values[number]
            if series.kind != "measured" and limit is not None:
                line = axes.vlines(limit, top - 0.15, top + len(shown) + 0.15, **_limit(series), zorder=5)
                handles.setdefault(series.name, line)
        middles.append(top + len(shown) / 2)
        top += len(shown) + 0.6
    axes.set_yticks(middles, panel.cases)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(top - 0.3, -0.3)
    axes.set_xlabel(panel.unit)
    known = [value for series in panel.series for value in series.values if value is not None]
    axes.set_xlim(panel.start, panel.start + (max(known) - panel.start) * 1.12)
    return handles


def _lines(axes: Any, panel: Panel, colours: Mapping[str, str]) -> dict[str, Any]:
    """A line for each series over the cases; the legend's handles."""
    handles = {}
    for series in panel.series:
        points = [(at, value) for at, value in enumerate(series.values) if value is not None]
        x, y = zip(*points, strict=True)
        if series.kind == "measured":
            (handles[series.name],) = axes.plot(x, y, marker="o", markersize=3, color=colours[series.name])
        else:
            (handles[series.name],) = axes.plot(x, y, **_limit(series))
    axes.set_xticks(range(len(panel.cases)), panel.cases)
    axes.set_ylabel(panel.unit)
    axes.set_ylim(bottom=panel.start)
    axes.grid(axis="y", linewidth=0.3)
    return handles


def _limit(series: Series) -> dict[str, Any]:
    return {
        "color": "black" if series.kind == "ceiling" else "#c03030",
        "linestyle": "-" if series.kind == "ceiling" else "--",
        "linewidth": 1.1,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw all plots."""
    parser = argparse.ArgumentParser(description="Plots of what was measured.")
    parser.add_argument("--results", type=Path, default=FOLDER, metavar="DIR", help="where results lie")
    parser.add_argument("--out", type=Path, default=FIGURES, metavar="DIR", help="where SVG files go")
    chosen = parser.parse_args(arguments)
    drawn = plots(read_results(chosen.results))
    chosen.out.mkdir(parents=True, exist_ok=True)
    for plot in drawn:
        try:
            print(draw(plot, chosen.out))
        except ModuleNotFoundError as error:
            raise SystemExit(f"plots need {error.name}: {how_to_install('bench')}") from error


if __name__ == "__main__":
    main()
