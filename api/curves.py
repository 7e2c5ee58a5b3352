"""Curves over sizes, as an SVG file that needs nothing but a reader of SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

__all__ = ["Curve", "Panel", "draw_panels"]

_COLOURS: Final = (
    *("#1f5fa8", "#e0903a", "#5d9e6b", "#a8443f", "#7d5ba6", "#2f9ea3"),
    *("#8a6d3b", "#b8629b", "#6b6b6b", "#9bb82c", "#4b3fae", "#d8b400"),
)
_WIDTH: Final = 360
_HEIGHT: Final = 240
_LEFT: Final = 44
_TOP: Final = 44
_GAP: Final = 64
_ROW: Final = 16
_LEGEND_COLUMN: Final = 130
_STEPS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.25)
_MOST_TICKS: Final = 6


@dataclass(frozen=True)
class Curve:
    """One line.

    Args:
        name: for the legend.
        values: shares from 0 to 1, one for each size; None: not known.
        emphasis: whether it is drawn strongly: what the plot is about.
        dashed: whether it is a limit rather than a contender.
    """

    name: str
    values: tuple[float | None, ...]
    emphasis: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """Curves that share axes.

    Args:
        title: what the values are.
        curves: of as many values each as there are sizes; one name has one colour in all panels.
    """

    title: str
    curves: tuple[Curve, ...]


def draw_panels(title: str, axis: str, sizes: Sequence[int], panels: Sequence[Panel]) -> str:
    """The file's text. All that is drawn stands in its description as well, in words.

    Args:
        title: of the plot.
        axis: what the sizes are.
        sizes: ascending, drawn on a logarithmic axis.
        panels: side by side.
    """
    names = list(dict.fromkeys(curve.name for panel in panels for curve in panel.curves))
    colours = {name: _COLOURS[at % len(_COLOURS)] for at, name in enumerate(names)}
    width = _LEFT + len(panels) * (_WIDTH + _GAP)
    columns = max(1, (width - _LEFT) // _LEGEND_COLUMN)
    legend_top = _TOP + _HEIGHT + 48
    height = legend_top + math.ceil(len(names) / columns) * _ROW + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11" role="img">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(_words(title, sizes, panels))}</desc>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="18" font-size="13">{escape(title)}</text>',
    ]
    for number, panel in enumerate(panels):
        parts += _drawn(panel, _LEFT + number * (_WIDTH + _GAP), axis, sizes, colours)
    styles = {curve.name: curve for panel in panels for curve in panel.curves}
    for at, name in enumerate(names):
        x, y = _LEFT + at % columns * _LEGEND_COLUMN, legend_top + at // columns * _ROW
        parts.append(
            f'<line x1="{x}" y1="{y - 4}" x2="{x + 20}" y2="{y - 4}" {_stroke(styles[name], colours)}/>'
            f'<text x="{x + 26}" y="{y}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _drawn(panel: Panel, left: int, axis: str, sizes: Sequence[int], colours: dict[str, str]) -> list[str]:
    most = max((value for curve in panel.curves for value in curve.values if value is not None), default=0.0)
    step = next((step for step in _STEPS if most / step <= _MOST_TICKS), _STEPS[-1])
    top = max(step, math.ceil(most / step) * step)
    low, high = math.log(sizes[0]), math.log(sizes[-1])

    def x(size: int) -> float:
        return left + (0.5 if high == low else (math.log(size) - low) / (high - low)) * _WIDTH

    def y(value: float) -> float:
        return _TOP + _HEIGHT - value / top * _HEIGHT

    parts = [f'<text x="{left}" y="{_TOP - 8}">{escape(panel.title)}</text>']
    for tick in range(round(top / step) + 1):
        at = y(tick * step)
        parts.append(
            f'<line x1="{left}" y1="{at:.1f}" x2="{left + _WIDTH}" y2="{at:.1f}" stroke="#e4e4e4"/>'
            f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{tick * step:.0%}</text>'
        )
    bottom = _TOP + _HEIGHT
    parts += [
        f'<text x="{x(size):.1f}" y="{bottom + 14}" text-anchor="middle">{_short(size)}</text>'
        for size in sizes
    ]
    parts.append(
        f'<text x="{left + _WIDTH / 2}" y="{bottom + 28}" text-anchor="middle">{escape(axis)}</text>'
    )
    for curve in panel.curves:
        points = [
            (x(size), y(value)) for size, value in zip(sizes, curve.values, strict=True) if value is not None
        ]
        stroke = _stroke(curve, colours)
        line = " ".join(f"{at_x:.1f},{at_y:.1f}" for at_x, at_y in points)
        parts.append(f'<polyline points="{line}" {stroke}/>')
        parts += [
            f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="2.5" fill="{colours[curve.name]}"/>'
            for at_x, at_y in points
        ]
    return parts


def _stroke(curve: Curve, colours: dict[str, str]) -> str:
    dashes = ' stroke-dasharray="5 3"' if curve.dashed else ""
    return (
        f'fill="none" stroke="{colours[curve.name]}" stroke-width="{2.5 if curve.emphasis else 1.2}"{dashes}'
    )


def _short(size: int) -> str:
    """A size on an axis: 3k, 1.5M."""
    for unit, letter in ((1_000_000, "M"), (1000, "k")):
        if size >= unit:
            return f"{size / unit:g}{letter}" if size % (unit // 100) == 0 else f"{size / unit:.3g}{letter}"
    return str(size)


def _words(title: str, sizes: Sequence[int], panels: Sequence[Panel]) -> str:
    lines = [title]
    for panel in panels:
        lines.append(panel.title)
        for at, size in enumerate(sizes):
            said = (
                f"{one.name} {value:.1%}" for one in panel.curves if (value := one.values[at]) is not None
            )
            lines.append(f"{size:,}: {', '.join(said)}")
    return "\n".join(lines)
