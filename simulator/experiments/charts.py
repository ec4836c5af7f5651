"""SVG charts without a library: lines with intervals, dots, points beside a diagonal, lanes over time.

Text and grid have the colour of the page's text, so that charts are readable on light and dark pages. Series differ
in dashes or shapes as well as in colour.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLORS = ("#0b6e99", "#d1495b", "#edae49", "#3a7d44", "#8f6fc0", "#a07c5b", "#7f7f7f", "#00a6a6", "#c77dff", "#9c9c00")
WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 62, 150, 34, 44
DASHES = ("", "6 3", "2 2", "8 3 2 3", "1 3", "10 4")
SHAPES = ("circle", "square", "diamond", "triangle")
MAX_POINTS = 1500  # of a series; of more, evenly spaced ones are drawn
LANE = 26  # height of a lane
GRID = 'stroke="currentColor" stroke-opacity="0.15"'
FRAME = 'stroke="currentColor" stroke-opacity="0.5"'
NAMES, NUMBERS, ROW = 170, 64, 22  # of a dot chart: widths of the names and the numbers, height of a row

Curve = Sequence[tuple[float, float, float]]


def line_chart(title: str, x_label: str, curves: Mapping[str, Curve], *, log: bool = False, marks: bool = True) -> str:
    """Draw curves of (x, y, half an interval), optionally with a mark at every point."""
    shown = {name: [point for point in curve if math.isfinite(point[1])] for name, curve in curves.items()}
    xs = [x for curve in shown.values() for x, _, _ in curve]
    ys = [y for curve in shown.values() for _, y, _ in curve]
    if not xs:
        return ""
    log = log and min(ys) > 0
    x_axis, y_axis = _Axis(min(xs), max(xs), log=False), _Axis(*_range(ys, log=log), log=log)
    parts = [_frame(title, x_label), *_y_ticks(y_axis), *_x_ticks(x_axis)]
    for place, (name, curve) in enumerate(shown.items()):
        color = _color(place)
        points = [(_x(x_axis, x), _y(y_axis, y)) for x, y, _ in curve]
        parts.append(
            f'<polyline fill="none" stroke="{color}" stroke-width="1.8" {_dash(place)} points="'
            + " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            + '"/>'
        )
        if marks:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{color}"/>' for x, y in points]
        parts += [_whisker(_x(x_axis, x), _y(y_axis, max(y - half, y_axis.low)), _y(y_axis, min(y + half, y_axis.high)),
                           color) for x, y, half in curve if math.isfinite(half) and half > 0]  # fmt: skip
        parts.append(_legend(place, name))
    return _svg(parts)


def dot_chart(title: str, values: Mapping[str, tuple[float, float]], marks: Mapping[str, float] | None = None) -> str:
    """Draw one number with its interval per row; `marks` are reference values, drawn as circles."""
    if not values:
        return ""
    marks = {name: mark for name, mark in (marks or {}).items() if name in values}
    ends = [end for value, half in values.values() for end in (value - half, value + half)] + list(marks.values())
    margin = 0.06 * (max(ends) - min(ends)) or 0.5
    axis = _Axis(min(ends) - margin, max(ends) + margin, log=False)
    height = TOP + ROW * len(values) + BOTTOM
    bottom = height - BOTTOM
    parts = [f'<text x="8" y="20" font-size="14" font-weight="bold">{escape(title)}</text>']
    for value in axis.ticks():
        x = _along(axis, value)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" {GRID}/>'
                     f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>')  # fmt: skip
    for place, (name, (value, half)) in enumerate(values.items()):
        y, x, color = TOP + ROW * (place + 0.5), _along(axis, value), COLORS[0]
        parts.append(f'<text x="{NAMES - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(name)}</text>')
        if half > 0:
            low, high = _along(axis, value - half), _along(axis, value + half)
            parts.append(f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{color}" '
                         'stroke-width="1.6"/>')  # fmt: skip
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>')
        parts.append(f'<text x="{WIDTH - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
        if name in marks:
            x = _along(axis, marks[name])
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="none" stroke="currentColor" stroke-width="1.5"/>'
            )
    return _svg(parts, height)


def scatter_chart(title: str, x_label: str, y_label: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Draw points of (x, y) on equal logarithmic axes, beside the diagonal on which both are equal."""
    shown = {
        name: [(x, y) for x, y in points if 0 < x < math.inf and 0 < y < math.inf] for name, points in series.items()
    }
    values = [value for points in shown.values() for point in points for value in point]
    if not values:
        return ""
    axis = _Axis(min(values) * 0.9, max(values) * 1.1, log=True)
    parts = [_frame(title, x_label), *_y_ticks(axis), *_x_ticks(axis)]
    parts.append(
        f'<text transform="translate(14 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
        f'<line x1="{LEFT}" y1="{HEIGHT - BOTTOM}" x2="{WIDTH - RIGHT}" y2="{TOP}" {FRAME} stroke-dasharray="4 4"/>'
    )
    for place, (name, points) in enumerate(shown.items()):
        every = -(-len(points) // MAX_POINTS) or 1
        parts += [_mark(place, _x(axis, x), _y(axis, y), 2.6) for x, y in points[::every]]
        parts.append(_legend(place, name, _mark(place, WIDTH - RIGHT + 21, TOP + 7 + 18 * place, 4.0)))
    return _svg(parts)


def lane_chart(title: str, x_label: str, lanes: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> str:
    """Draw a lane for each name with its series over a common axis: steps of (x, y), each lasting until the next.

    The first series of a lane is filled, the others are lines; all lanes have one scale, which is written beside them.
    """
    points = [point for lane in lanes.values() for steps in lane.values() for point in steps]
    if not points:
        return ""
    x_axis = _Axis(min(x for x, _ in points), max(x for x, _ in points), log=False)
    top = max(1.0, *(y for _, y in points))
    names = list(dict.fromkeys(name for lane in lanes.values() for name in lane))
    height = TOP + LANE * len(lanes) + BOTTOM
    bottom = height - BOTTOM
    parts = [f'<text x="8" y="20" font-size="14" font-weight="bold">{escape(title)}</text>']
    for value in x_axis.ticks():
        x = _x(x_axis, value)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" {GRID}/>'
                     f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>')  # fmt: skip
    for row, (lane_name, lane) in enumerate(lanes.items()):
        base = TOP + LANE * (row + 1) - 2
        parts.append(f'<text x="{LEFT - 6}" y="{base - 6}" text-anchor="end">{escape(lane_name)}</text>'
                     f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}" {GRID}/>')  # fmt: skip
        for name, steps in lane.items():
            place = names.index(name)
            path = _steps([(_x(x_axis, x), base - y / top * (LANE - 6)) for x, y in steps], WIDTH - RIGHT)
            fill = f'fill="{_color(place)}" fill-opacity="0.35"' if place == 0 else 'fill="none"'
            start = f"M{_x(x_axis, steps[0][0]):.1f},{base:.1f}" if steps and place == 0 else ""
            end = f"V{base:.1f}Z" if place == 0 else ""
            first = path if start == "" else "L" + path[1:]
            parts.append(f'<path d="{start}{first}{end}" {fill} stroke="{_color(place)}" {_dash(place)}/>')
    parts += [_legend(place, name) for place, name in enumerate(names)]
    parts.append(f'<text x="{WIDTH - RIGHT + 10}" y="{TOP + 8 + 18 * len(names)}">lane height: {top:g}</text>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{height - 8}" text-anchor="middle">{escape(x_label)}</text>'
    )
    return _svg(parts, height)


def _steps(points: Sequence[tuple[float, float]], end_x: float) -> str:
    """Return a path that keeps each value until the next one."""
    if not points:
        return ""
    (x, y), *rest = points
    return f"M{x:.1f},{y:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in rest) + f"H{end_x:.1f}"


def _mark(place: int, x: float, y: float, size: float) -> str:
    """Return a small shape, another one for each series."""
    shape, color = SHAPES[place % len(SHAPES)], _color(place)
    paint = f'fill="{color}" fill-opacity="0.6"'
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" {paint}/>'
    corners = {
        "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
        "diamond": ((0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)),
        "triangle": ((0, -1.3), (1.2, 0.9), (-1.2, 0.9)),
    }[shape]
    points = " ".join(f"{x + size * a:.1f},{y + size * b:.1f}" for a, b in corners)
    return f'<polygon points="{points}" {paint}/>'


def _along(axis: _Axis, value: float) -> float:
    return NAMES + axis.share(value) * (WIDTH - NAMES - NUMBERS)


class _Axis:
    """A range of numbers, on a plain or logarithmic scale."""

    def __init__(self, low: float, high: float, *, log: bool) -> None:
        """Set the range; an empty range is widened."""
        if high <= low:
            high = low + 1.0 if low == 0 else low * 1.1 + 1e-12
        self.low, self.high, self.log = low, high, log

    def share(self, value: float) -> float:
        """Return the position of a value on the axis, from 0 to 1."""
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return round numbers for the axis."""
        if self.log:
            exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            many = [m * 10.0**e for e in exponents for m in (1, 2, 5)]
            return [value for value in many if self.low <= value <= self.high * 1.0001]
        raw = (self.high - self.low) / 5
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(m * size for m in (1, 2, 5, 10) if m * size >= raw)
        first = math.ceil(self.low / step)
        return [step * k for k in range(first, int(self.high / step + 1e-9) + 1)]


def _range(values: Sequence[float], *, log: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low * 0.9, high * 1.1) if log else (min(0.0, low), high * 1.05)


def _x(axis: _Axis, value: float) -> float:
    return LEFT + axis.share(value) * (WIDTH - LEFT - RIGHT)


def _y(axis: _Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.share(value) * (HEIGHT - TOP - BOTTOM)


def _frame(title: str, x_label: str) -> str:
    return (
        f'<text x="{LEFT}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>'
        f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - TOP - BOTTOM}" fill="none" '
        f'{FRAME}/><text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">'
        f"{escape(x_label)}</text>"
    )


def _y_ticks(axis: _Axis) -> list[str]:
    return [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{_y(axis, v):.1f}" y2="{_y(axis, v):.1f}" {GRID}/>'
        f'<text x="{LEFT - 6}" y="{_y(axis, v) + 4:.1f}" text-anchor="end">{v:g}</text>'
        for v in axis.ticks()
    ]


def _x_ticks(axis: _Axis) -> list[str]:
    return [
        f'<text x="{_x(axis, v):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{v:g}</text>'
        for v in axis.ticks()
    ]


def _whisker(x: float, low: float, high: float, color: str) -> str:
    ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"'
    return f'<line {ends} stroke="{color}" stroke-width="1.2" stroke-opacity="0.5"/>'


def _dash(place: int) -> str:
    dash = DASHES[place % len(DASHES)]
    return f'stroke-dasharray="{dash}"' if dash else ""


def _legend(place: int, name: str, mark: str = "") -> str:
    y = TOP + 8 + 18 * place
    x = WIDTH - RIGHT + 10
    stroke = f'stroke="{_color(place)}" stroke-width="2.4" {_dash(place)}'
    line = f'<line x1="{x}" x2="{x + 22}" y1="{y - 1}" y2="{y - 1}" {stroke}/>'
    return f'{mark or line}<text x="{x + 28}" y="{y + 3}">{escape(name)}</text>'


def _color(place: int) -> str:
    return COLORS[place % len(COLORS)]


def _svg(parts: Sequence[str], height: int = HEIGHT) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'fill="currentColor" font-family="sans-serif" font-size="11">{"".join(parts)}</svg>'
    )
