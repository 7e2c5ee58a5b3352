"""What docs/figures/ draws and docs/performance.md says is what benchmarks/results/ holds."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from kvpager.benchmarks.plots import Panel, Plot, draw, main, plots, read_results

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures"
PAGE = (ROOT / "docs" / "performance.md").read_text()
RESULTS = read_results()
PLOTS = plots(RESULTS)
SVG = "{http://www.w3.org/2000/svg}"
DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"

every_plot = pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.name)


def description(path: Path) -> str | None:
    """What a drawn file says that it draws."""
    return ElementTree.parse(path).getroot().findtext(f".//{DESCRIPTION}")


def texts(path: Path) -> set[str]:
    """All that can be read in a drawn file."""
    return {"".join(text.itertext()) for text in ElementTree.parse(path).getroot().iter(f"{SVG}text")}


def section(plot: Plot) -> str:
    """The part of the page that embeds a plot, from its heading to the next."""
    parts = re.split(r"^#+ ", PAGE, flags=re.MULTILINE)
    (found,) = (part for part in parts if f"(figures/{plot.name}.svg)" in part)
    return found


def measured(panel: Panel) -> set[str]:
    """The values that were measured, as they are shown."""
    values = [series.values for series in panel.series if series.kind == "measured"]
    return {panel.written(value) for value in itertools.chain(*values) if value is not None}


def expect_drawn(plot: Plot, path: Path) -> None:
    """Check that a file shows a plot's titles, cases and numbers, and says so."""
    assert description(path) == plot.description()
    shown = texts(path)
    for panel in plot.panels:
        assert {panel.title, *panel.cases} <= shown
        if panel.form == "bars":
            assert measured(panel) <= shown


@every_plot
def test_what_is_committed_is_drawn_from_the_results(plot: Plot) -> None:
    expect_drawn(plot, FIGURES / f"{plot.name}.svg")


@every_plot
def test_the_page_says_beside_each_figure_all_numbers_that_it_draws(plot: Plot) -> None:
    said = set(re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", section(plot)))
    for panel in plot.panels:
        assert measured(panel) <= said, panel.title


def test_the_page_says_of_each_batch_in_hbm_whether_its_target_is_met() -> None:
    figures = RESULTS["decode_attention"]["figures"]
    for row in figures["hbm"] + figures["ragged"]:
        rate, ceiling = f"| {row['GB/s']:,.0f} |", f"| {row['ceiling']:,.0f} |"
        (line,) = (line for line in PAGE.splitlines() if rate in line and ceiling in line)
        assert f"| {row['of peer']:.3f}x |" in line
        assert line.endswith("| met |" if row["target"] else "| not met |")


def test_no_other_figures_are_committed_or_shown() -> None:
    names = {f"{plot.name}.svg" for plot in PLOTS}
    assert {path.name for path in FIGURES.glob("*.svg")} == names
    assert set(re.findall(r"\(figures/(.*?)\)", PAGE)) == names


@every_plot
def test_every_panel_has_a_ceiling_or_target_and_all_series_a_value_or_none_for_each_case(
    plot: Plot,
) -> None:
    for panel in plot.panels:
        assert any(series.kind in ("ceiling", "target") for series in panel.series)
        assert {len(series.values) for series in panel.series} == {len(panel.cases)}


def test_results_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"has no replay\.json, decode_attention\.json, .*copy_blocks\.json"):
        read_results(tmp_path)


def test_who_lacks_matplotlib_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"plots need matplotlib: pip install '\.\[bench\]'"):
        main(["--out", str(tmp_path)])


@every_plot
def test_drawing_shows_all_and_gives_the_same_bytes_again(plot: Plot, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install '.[bench]')")
    again = tmp_path / "again"
    again.mkdir()
    drawn = draw(plot, tmp_path)
    assert draw(plot, again).read_bytes() == drawn.read_bytes()
    expect_drawn(plot, drawn)
