"""SVG charts without a library: line charts with intervals, and dot charts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLORS = ("#0b6e99", "#d1495b", "#edae49", "#3a7d44", "#7b5ea7", "#8d6a4b", "#4d4d4d", "#00a6a6", "#c77dff", "#9c9c00")
WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 62, 150, 34, 44
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
        color = COLORS[place % len(COLORS)]
        points = [(_x(x_axis, x), _y(y_axis, y)) for x, y, _ in curve]
        parts.append(
            f'<polyline fill="none" stroke="{color}" stroke-width="1.8" points="'
            + " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            + '"/>'
        )
        if marks:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{color}"/>' for x, y in points]
        parts += [_whisker(_x(x_axis, x), _y(y_axis, max(y - half, y_axis.low)), _y(y_axis, min(y + half, y_axis.high)),
                           color) for x, y, half in curve if math.isfinite(half) and half > 0]  # fmt: skip
        parts.append(_legend(place, name, color))
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
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" stroke="#e4e4e4"/>'
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
            parts.append(f'<circle cx="{_along(axis, marks[name]):.1f}" cy="{y:.1f}" r="5" fill="none" stroke="#000" '
                         'stroke-width="1.5"/>')  # fmt: skip
    return _svg(parts, height)


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
        f'stroke="#999"/><text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">'
        f"{escape(x_label)}</text>"
    )


def _y_ticks(axis: _Axis) -> list[str]:
    return [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{_y(axis, v):.1f}" y2="{_y(axis, v):.1f}" stroke="#e4e4e4"/>'
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


def _legend(place: int, name: str, color: str) -> str:
    y = TOP + 8 + 18 * place
    return (
        f'<rect x="{WIDTH - RIGHT + 10}" y="{y - 5}" width="12" height="6" fill="{color}"/>'
        f'<text x="{WIDTH - RIGHT + 27}" y="{y + 3}">{escape(name)}</text>'
    )


def _svg(parts: Sequence[str], height: int = HEIGHT) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="11">{"".join(parts)}</svg>'
    )
