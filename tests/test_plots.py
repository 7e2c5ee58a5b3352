"""What docs/figures draws and docs/performance.md says is what benchmarks/results holds."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from kvpager.benchmarks.plots import Plot, draw, main, plots, read_results

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures"
PAGE = (ROOT / "docs" / "performance.md").read_text()
PLOTS = plots(read_results())
SVG = "{http://www.w3.org/2000/svg}"
DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"

every_plot = pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.name)


def description(path: Path) -> str | None:
    """What a drawn file says that it draws."""
    return ElementTree.parse(path).getroot().findtext(f".//{DESCRIPTION}")


def texts(path: Path) -> list[str]:
    """All that can be read in a drawn file."""
    return ["".join(text.itertext()) for text in ElementTree.parse(path).getroot().iter(f"{SVG}text")]


def section(plot: Plot) -> str:
    """The part of the page that embeds a plot, from its heading to the next."""
    parts = re.split(r"^#+ ", PAGE, flags=re.MULTILINE)
    (found,) = (part for part in parts if f"(figures/{plot.name}.svg)" in part)
    return found


@every_plot
def test_what_is_committed_is_drawn_from_the_results(plot: Plot) -> None:
    path = FIGURES / f"{plot.name}.svg"
    assert description(path) == plot.description()
    shown = texts(path)
    for panel in plot.panels:
        assert {panel.title, *panel.cases} <= set(shown)
        if panel.form == "bars":
            values = (
                value for series in panel.series if series.kind == "measured" for value in series.values
            )
            assert {panel.written(value) for value in values if value is not None} <= set(shown)


@every_plot
def test_the_page_says_what_kvpager_reached_in_numbers_of_the_results(plot: Plot) -> None:
    said = set(re.findall(r"\d[\d,]*(?:\.\d+)?", section(plot).replace("**", "")))
    for panel in plot.panels:
        for series in panel.series:
            if series.name.startswith("kvpager") and series.kind == "measured":
                values = {panel.written(value) for value in series.values if value is not None}
                assert values <= said, f"{panel.title}: {series.name}"


def test_no_other_figures_are_committed_or_shown() -> None:
    names = {f"{plot.name}.svg" for plot in PLOTS}
    assert {path.name for path in FIGURES.iterdir()} == names
    assert set(re.findall(r"\(figures/(.*?)\)", PAGE)) == names


@every_plot
def test_series_have_a_value_for_each_case_and_nothing_beats_a_time_that_is_a_ceiling(plot: Plot) -> None:
    for panel in plot.panels:
        assert all(len(series.values) == len(panel.cases) for series in panel.series)
        assert any(series.kind == "ceiling" for series in panel.series)


def test_results_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"has no decode_attention\.json, .*copy_blocks\.json"):
        read_results(tmp_path)


def test_who_lacks_matplotlib_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"plots need matplotlib: pip install '\.\[bench\]'"):
        main(["--out", str(tmp_path)])


@every_plot
def test_drawing_again_gives_the_same_bytes_and_what_is_committed(plot: Plot, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install '.[bench]')")
    first, again = (draw(plot, folder) for folder in (tmp_path, _made(tmp_path / "again")))
    assert first.read_bytes() == again.read_bytes()
    # Bytes differ from version to version of matplotlib; what is to be read does not.
    committed = FIGURES / first.name
    assert description(first) == description(committed)
    assert texts(first) == texts(committed)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
