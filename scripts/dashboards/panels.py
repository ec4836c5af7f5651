"""Builders of Grafana panels, as the classic dashboard model describes them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.dashboards.queries import mean, quantile

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
METRIC = re.compile(r"\b(?:block_|vllm:|process_)\w+|\bup\b(?=[{\s)=])")

# quantiles are shades of one colour, everywhere
COLOURS = {"P50": "light-blue", "P90": "blue", "P95": "blue", "P99": "dark-blue", "mean": "purple"}
TOOLTIP = {"mode": "multi", "sort": "desc"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelQuery:
    """An expression, the name of its series, and the colour of one that always means the same."""

    expression: str
    legend: str = ""
    colour: str = ""
    instant: bool = False
    heatmap: bool = False

    def target(self, number: int) -> dict[str, Any]:
        """Write it as a target."""
        shown = "table" if self.instant else "heatmap" if self.heatmap else "time_series"
        return {
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": self.expression,
            "format": shown,
            "instant": self.instant,
            "legendFormat": self.legend or "__auto",
            "range": not self.instant,
            "refId": chr(ord("A") + number),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A panel without its place; `width` is in columns of 24."""

    kind: str
    title: str
    description: str
    queries: tuple[PanelQuery, ...]
    width: int
    height: int
    defaults: Mapping[str, Any]
    overrides: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    transformations: tuple[Mapping[str, Any], ...] = ()

    def json(self, number: int, x: int, y: int) -> dict[str, Any]:
        """Write it at a place."""
        found = {
            "datasource": DATASOURCE,
            "description": f"{self.description} {metrics_note(self.queries)}",
            "fieldConfig": {"defaults": dict(self.defaults), "overrides": [dict(one) for one in self.overrides]},
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "id": number,
            "options": dict(self.options),
            "targets": [query.target(index) for index, query in enumerate(self.queries)],
            "title": self.title,
            "type": self.kind,
        }
        if self.transformations:
            found["transformations"] = [dict(one) for one in self.transformations]
        return found


def metrics_note(queries: Sequence[PanelQuery]) -> str:
    """Name the metrics behind a panel."""
    names = dict.fromkeys(name for query in queries for name in METRIC.findall(query.expression))
    return f"{'Metrics' if len(names) > 1 else 'Metric'}: {', '.join(f'`{name}`' for name in names)}."


def thresholds(*steps: tuple[float, str], first: str = "green") -> dict[str, Any]:
    """Colour values from these bounds on."""
    return {
        "mode": "absolute",
        "steps": [{"color": first, "value": None}, *({"color": colour, "value": value} for value, colour in steps)],
    }


NEUTRAL = thresholds(first="text")


def stat(
    title: str,
    expression: str,
    description: str,
    *,
    unit: str = "short",
    limits: Mapping[str, Any] = NEUTRAL,
    decimals: int | None = None,
    width: int = 3,
) -> Panel:
    """Show one number; without traffic there is none."""
    defaults: dict[str, Any] = {
        "mappings": [{"options": {"match": "null+nan", "result": {"text": "No traffic"}}, "type": "special"}],
        "noValue": "No traffic",
        "thresholds": limits,
        "unit": unit,
    }
    if decimals is not None:
        defaults["decimals"] = decimals
    return Panel(
        kind="stat",
        title=title,
        description=description,
        queries=(PanelQuery(expression=expression),),
        width=width,
        height=4,
        defaults=defaults,
        options={
            "colorMode": "value",
            "graphMode": "area",
            "justifyMode": "auto",
            "orientation": "auto",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "textMode": "value",
        },
    )


def timeseries(
    title: str,
    queries: Sequence[PanelQuery],
    description: str,
    *,
    unit: str = "short",
    width: int = 8,
    stacked: bool = False,
    minimum: float | None = 0,
    maximum: float | None = None,
    limits: Mapping[str, Any] | None = None,
    steps: bool = False,
) -> Panel:
    """Draw series over time; a limit is drawn as a line."""
    custom: dict[str, Any] = {
        "drawStyle": "line",
        "fillOpacity": 30 if stacked else 0,
        "lineInterpolation": "stepAfter" if steps else "linear",
        "lineWidth": 1,
        "pointSize": 4,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"group": "A", "mode": "normal" if stacked else "none"},
    }
    if limits is not None:
        custom["thresholdsStyle"] = {"mode": "line"}
    defaults: dict[str, Any] = {
        "color": {"mode": "palette-classic"},
        "custom": custom,
        "thresholds": NEUTRAL if limits is None else limits,
        "unit": unit,
    }
    if minimum is not None:
        defaults["min"] = minimum
    if maximum is not None:
        defaults["max"] = maximum
    return Panel(
        kind="timeseries",
        title=title,
        description=description,
        queries=tuple(queries),
        width=width,
        height=8,
        defaults=defaults,
        overrides=tuple(colour_of(query) for query in queries if query.colour),
        options={
            "legend": {"calcs": ["lastNotNull"], "displayMode": "table", "placement": "bottom", "showLegend": True},
            "tooltip": TOOLTIP,
        },
    )


def colour_of(query: PanelQuery) -> dict[str, Any]:
    """Give a series a fixed colour."""
    return {
        "matcher": {"id": "byName", "options": query.legend},
        "properties": [{"id": "color", "value": {"fixedColor": query.colour, "mode": "fixed"}}],
    }


def one(title: str, expression: str, description: str, *, legend: str = "", **settings: Any) -> Panel:
    """Draw one expression over time."""
    return timeseries(title, [PanelQuery(expression=expression, legend=legend or title)], description, **settings)


def distribution(
    histogram: str, *, where: str = "", quantiles: Sequence[float] = (0.5, 0.95, 0.99)
) -> list[PanelQuery]:
    """Take the quantiles and the mean of a histogram."""
    names = [f"P{round(q * 100)}" for q in quantiles]
    queries = [
        PanelQuery(expression=quantile(q, histogram, where=where), legend=name, colour=COLOURS[name])
        for q, name in zip(quantiles, names, strict=True)
    ]
    return [*queries, PanelQuery(expression=mean(histogram, where=where), legend="mean", colour=COLOURS["mean"])]


def latency(title: str, histogram: str, description: str, *, where: str = "", width: int = 8) -> Panel:
    """Draw P50, P95, P99 and the mean of a histogram of seconds."""
    return timeseries(title, distribution(histogram, where=where), description, unit="s", width=width)


def heatmap(title: str, expression: str, description: str, *, unit: str = "s", width: int = 12) -> Panel:
    """Draw a histogram's buckets over time; the expression keeps the label `le`."""
    return Panel(
        kind="heatmap",
        title=title,
        description=description,
        queries=(PanelQuery(expression=expression, legend="{{le}}", heatmap=True),),
        width=width,
        height=8,
        defaults={"custom": {"scaleDistribution": {"type": "linear"}}},
        options={
            "calculate": False,
            "cellGap": 1,
            "color": {"mode": "scheme", "scheme": "Blues", "steps": 64},
            "legend": {"show": True},
            "rowsFrame": {"layout": "auto"},
            "tooltip": {"mode": "single", "showColorScale": False, "yHistogram": False},
            "yAxis": {"axisPlacement": "left", "reverse": False, "unit": unit},
        },
    )


def states(
    title: str, query: PanelQuery, description: str, values: Mapping[int, tuple[str, str]], width: int = 12
) -> Panel:
    """Draw what state each series is in over time; `values` have a text and a colour each."""
    mapped = {str(value): {"color": colour, "text": text} for value, (text, colour) in values.items()}
    return Panel(
        kind="state-timeline",
        title=title,
        description=description,
        queries=(query,),
        width=width,
        height=8,
        defaults={
            "color": {"mode": "thresholds"},
            "custom": {"fillOpacity": 70, "lineWidth": 0},
            "mappings": [{"options": mapped, "type": "value"}],
            "thresholds": NEUTRAL,
        },
        options={
            "alignValue": "left",
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False},
            "mergeValues": True,
            "rowHeight": 0.9,
            "showValue": "auto",
            "tooltip": {"mode": "single"},
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table: an instant query with one series per row."""

    title: str
    expression: str
    unit: str = "short"
    limits: Mapping[str, Any] | None = None


def table(
    title: str, key: str, columns: Sequence[Column], description: str, *, link: Mapping[str, Any] | None = None
) -> Panel:
    """Join instant queries by a label; a link opens another dashboard for the row."""
    names = [f"Value #{chr(ord('A') + number)}" for number in range(len(columns))]
    overrides: list[Mapping[str, Any]] = []
    for column in columns:
        properties: list[Mapping[str, Any]] = [{"id": "unit", "value": column.unit}]
        if column.limits is not None:
            properties.append({"id": "thresholds", "value": column.limits})
            properties.append({"id": "custom.cellOptions", "value": {"type": "color-text"}})
        overrides.append({"matcher": {"id": "byName", "options": column.title}, "properties": properties})
    if link is not None:
        overrides.append(
            {"matcher": {"id": "byName", "options": key}, "properties": [{"id": "links", "value": [dict(link)]}]}
        )
    order = {key: 0} | {name: number for number, name in enumerate(names, 1)}
    rename = dict(zip(names, (column.title for column in columns), strict=True))
    return Panel(
        kind="table",
        title=title,
        description=description,
        queries=tuple(PanelQuery(expression=column.expression, instant=True) for column in columns),
        width=24,
        height=9,
        defaults={"custom": {"align": "auto", "filterable": True}, "noValue": "-", "thresholds": NEUTRAL},
        overrides=tuple(overrides),
        options={"cellHeight": "sm", "footer": {"show": False}, "showHeader": True},
        transformations=(
            {"id": "merge", "options": {}},
            {
                "id": "organize",
                "options": {"excludeByName": {"Time": True}, "indexByName": order, "renameByName": rename},
            },
        ),
    )
