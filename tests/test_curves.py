"""Curves as SVG: what is drawn, and where."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from kvpager.api.curves import Curve, Panel, draw_panels

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*panels: Panel, sizes: tuple[int, ...] = (1000, 10_000)) -> ElementTree.Element:
    return ElementTree.fromstring(draw_panels("chats & <more>", "blocks", sizes, panels))


def points(svg: ElementTree.Element) -> list[list[tuple[float, float]]]:
    lines = svg.findall(f"{SVG}polyline")
    return [
        [(float(pair.split(",")[0]), float(pair.split(",")[1])) for pair in line.get("points", "").split()]
        for line in lines
    ]


def test_larger_shares_are_higher_and_larger_sizes_further_right() -> None:
    low, high = points(drawn(Panel("found", (Curve("a", (0.1, 0.2)), Curve("b", (0.2, 0.4))))))
    assert low[0][0] == high[0][0] < low[1][0] == high[1][0]
    assert low[0][1] > low[1][1] == high[0][1] > high[1][1]


def test_sizes_are_on_a_logarithmic_axis() -> None:
    [line] = points(drawn(Panel("found", (Curve("a", (0.1, 0.1, 0.1)),)), sizes=(10, 100, 1000)))
    assert line[1][0] - line[0][0] == pytest.approx(line[2][0] - line[1][0], abs=0.2)


def test_all_that_is_drawn_is_told_in_words() -> None:
    svg = drawn(Panel("found", (Curve("a", (0.104, None)), Curve("b", (0.2, 0.4)))))
    assert svg.findtext(f"{SVG}title") == "chats & <more>"
    told = svg.findtext(f"{SVG}desc")
    assert told == "chats & <more>\nfound\n1,000: a 10.4%, b 20.0%\n10,000: b 40.0%"
    texts = {text.text for text in svg.findall(f"{SVG}text")}
    assert texts >= {"chats & <more>", "found", "a", "b", "1k", "10k", "blocks", "0%", "40%"}


def test_what_is_not_known_is_not_drawn() -> None:
    svg = drawn(Panel("found", (Curve("a", (None, 0.1)), Curve("b", (None, None)))))
    assert [len(line) for line in points(svg)] == [1, 0]
    assert len(svg.findall(f"{SVG}circle")) == 1


def test_a_limit_is_dashed_and_what_matters_is_strong() -> None:
    svg = drawn(Panel("found", (Curve("a", (0.1, 0.2), emphasis=True), Curve("b", (0.2, 0.4), dashed=True))))
    strong, dashed = svg.findall(f"{SVG}polyline")
    assert float(strong.get("stroke-width", "0")) > float(dashed.get("stroke-width", "0"))
    assert strong.get("stroke-dasharray") is None
    assert dashed.get("stroke-dasharray") is not None
    assert strong.get("stroke") != dashed.get("stroke")


def test_one_size_and_nothing_found_are_drawn_as_well() -> None:
    assert points(drawn(Panel("found", (Curve("a", (0.0,)),)), sizes=(500,)))
