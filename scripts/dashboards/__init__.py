"""Grafana dashboards, described in Python; `scripts/generate_dashboards.py` writes them as JSON."""

from scripts.dashboards.dashboard import Dashboard
from scripts.dashboards.disaggregation import DISAGGREGATION
from scripts.dashboards.fleet import FLEET
from scripts.dashboards.forecasts import FORECASTS
from scripts.dashboards.lengths import LENGTHS
from scripts.dashboards.overview import OVERVIEW
from scripts.dashboards.picker import PICKER
from scripts.dashboards.router import ROUTER
from scripts.dashboards.slos import SLOS

__all__ = ["DASHBOARDS", "Dashboard"]

DASHBOARDS = (OVERVIEW, ROUTER, FORECASTS, FLEET, LENGTHS, DISAGGREGATION, SLOS, PICKER)
