"""Charts as SVG, drawn without a library: lines with intervals over a number, and bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLORS = ("#0b6e99", "#d1495b", "#edae49", "#3a7d44", "#7b5ea7", "#8d6a4b", "#4d4d4d", "#00a6a6", "#c77dff", "#9c9c00")
WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 62, 150, 34, 44

Curve = Sequence[tuple[float, float, float]]


def line_chart(title: str, x_label: str, curves: Mapping[str, Curve], *, log: bool = False, marks: bool = True) -> str:
    """Draw curves of (x, y, half an interval), with a mark at every point or without."""
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


def bar_chart(title: str, values: Mapping[str, tuple[float, float]], marks: Mapping[str, float] | None = None) -> str:
    """Draw bars with intervals, and where there is one, a mark for what others found."""
    if not values:
        return ""
    marks = marks or {}
    highest = max([value + half for value, half in values.values()] + list(marks.values()))
    lowest = min([value - half for value, half in values.values()] + list(marks.values()))
    axis = _Axis(max(0.0, lowest - (highest - lowest)), highest * 1.02, log=False)
    step = (WIDTH - LEFT - RIGHT) / len(values)
    parts = [_frame(title, ""), *_y_ticks(axis)]
    for place, (name, (value, half)) in enumerate(values.items()):
        left, top = LEFT + step * (place + 0.15), _y(axis, value)
        color = COLORS[place % len(COLORS)]
        parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{step * 0.7:.1f}" height="{HEIGHT - BOTTOM - top:.1f}" '
            f'fill="{color}" fill-opacity="0.8"/>'
        )
        if half > 0:
            parts.append(_whisker(left + step * 0.35, _y(axis, max(axis.low, value - half)), _y(axis, value + half),
                                  "#222"))  # fmt: skip
        if name in marks:
            y = _y(axis, marks[name])
            parts.append(f'<line x1="{left:.1f}" x2="{left + step * 0.7:.1f}" y1="{y:.1f}" y2="{y:.1f}" '
                         'stroke="#000" stroke-width="2" stroke-dasharray="4 2"/>')  # fmt: skip
        parts.append(_legend(place, f"{name} {value:.4g}", color))
    return _svg(parts)


class _Axis:
    """A range of numbers, on a plain or logarithmic scale."""

    def __init__(self, low: float, high: float, *, log: bool) -> None:
        """Widen a range of nothing."""
        if high <= low:
            high = low + 1.0 if low == 0 else low * 1.1 + 1e-12
        self.low, self.high, self.log = low, high, log

    def share(self, value: float) -> float:
        """Tell how far along a value is."""
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Choose round numbers."""
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
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{color}" stroke-width="1.2"/>'


def _legend(place: int, name: str, color: str) -> str:
    y = TOP + 8 + 18 * place
    return (
        f'<rect x="{WIDTH - RIGHT + 10}" y="{y - 5}" width="12" height="6" fill="{color}"/>'
        f'<text x="{WIDTH - RIGHT + 27}" y="{y + 3}">{escape(name)}</text>'
    )


def _svg(parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="11">{"".join(parts)}</svg>'
    )
