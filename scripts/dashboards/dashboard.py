"""A dashboard: its variables, its rows, and the place of each panel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scripts.dashboards.panels import DATASOURCE, Panel

SCHEMA = 39  # Grafana 10.4 and newer read it
COLUMNS = 24
TAG = "block"


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardRow:
    """Panels under a heading, from left to right; a closed one is opened by a click."""

    title: str
    panels: tuple[Panel, ...]
    closed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """A dashboard as this project describes it."""

    uid: str
    title: str
    description: str
    variables: tuple[dict[str, Any], ...] = ()
    rows: tuple[DashboardRow, ...]

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"{self.uid}.json"

    def json(self) -> dict[str, Any]:
        """Write it as Grafana's classic model."""
        return {
            "annotations": {"list": [BUILT_IN]},
            "description": self.description,
            "editable": True,
            "graphTooltip": 1,
            "id": None,
            "links": [LINKS],
            "panels": placed(self.rows),
            "refresh": "30s",
            "schemaVersion": SCHEMA,
            "tags": [TAG],
            "templating": {"list": [DATASOURCE_VARIABLE, *self.variables, FILTERS]},
            "time": {"from": "now-1h", "to": "now"},
            "timezone": "browser",
            "title": self.title,
            "uid": self.uid,
        }


def placed(rows: Sequence[DashboardRow]) -> list[dict[str, Any]]:
    """Give every row and panel an id and a place."""
    found: list[dict[str, Any]] = []
    number = y = 0
    for row in rows:
        number += 1
        heading = {
            "collapsed": row.closed,
            "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": y},
            "id": number,
            "panels": [],
            "title": row.title,
            "type": "row",
        }
        found.append(heading)
        inside = []
        y, x, height = y + 1, 0, 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            number += 1
            inside.append(panel.json(number, x, y))
            x, height = x + panel.width, max(height, panel.height)
        y += height
        if row.closed:
            heading["panels"] = inside
        else:
            found += inside
    return found


BUILT_IN = {
    "builtIn": 1,
    "datasource": {"type": "grafana", "uid": "-- Grafana --"},
    "enable": True,
    "hide": True,
    "iconColor": "rgba(0, 211, 255, 1)",
    "name": "Annotations & Alerts",
    "type": "dashboard",
}
LINKS = {
    "asDropdown": False,
    "icon": "external link",
    "includeVars": True,
    "keepTime": True,
    "tags": [TAG],
    "targetBlank": False,
    "title": "",
    "tooltip": "",
    "type": "dashboards",
    "url": "",
}
DATASOURCE_VARIABLE = {
    "current": {},
    "hide": 0,
    "includeAll": False,
    "label": "Data source",
    "multi": False,
    "name": "datasource",
    "options": [],
    "query": "prometheus",
    "refresh": 1,
    "regex": "",
    "type": "datasource",
}
FILTERS = {"datasource": DATASOURCE, "filters": [], "hide": 0, "label": "Filters", "name": "filters", "type": "adhoc"}


def query_variable(name: str, label: str, query: str) -> dict[str, Any]:
    """Let the reader choose among the values of a label."""
    return {
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "datasource": DATASOURCE,
        "definition": query,
        "hide": 0,
        "includeAll": True,
        "label": label,
        "multi": True,
        "name": name,
        "options": [],
        "query": {"qryType": 1, "query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "refresh": 2,
        "sort": 1,
        "type": "query",
    }


def choice_variable(name: str, label: str, values: Sequence[str], chosen: str) -> dict[str, Any]:
    """Let the reader choose among fixed values."""
    return {
        "current": {"selected": True, "text": chosen, "value": chosen},
        "hide": 0,
        "includeAll": False,
        "label": label,
        "multi": False,
        "name": name,
        "options": [{"selected": value == chosen, "text": value, "value": value} for value in values],
        "query": ",".join(values),
        "type": "custom",
    }


# the same in all dashboards, so that links between them keep what is chosen
MODEL = query_variable("model", "Model", "label_values(block_gateway_e2e_seconds_count, model)")
INSTANCE = query_variable("instance", "Instance", "label_values(block_engine_up, instance)")
POOL = query_variable("pool", "Pool", "label_values(block_desired_instances, pool)")
OBJECTIVE = choice_variable("objective", "Objective", ("0.9", "0.95", "0.99", "0.995", "0.999"), "0.99")
# bounds of buckets of the gateway's histograms
TTFT_SLO = choice_variable("ttft_slo", "TTFT target (s)", ("0.1", "0.2", "0.5", "1.0", "2.0", "5.0", "10.0"), "1.0")
TPOT_SLO = choice_variable(
    "tpot_slo", "TPOT target (s)", ("0.02", "0.025", "0.03", "0.04", "0.05", "0.075", "0.1", "0.2", "0.5"), "0.05"
)

OF_MODEL, OF_INSTANCE, OF_POOL = 'model=~"$model"', 'instance=~"$instance"', 'pool=~"$pool"'
