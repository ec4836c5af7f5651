"""Forecasts: what was predicted beside what happened."""

from __future__ import annotations

from scripts.dashboards.dashboard import INSTANCE, MODEL, OF_INSTANCE, OF_MODEL, Dashboard, DashboardRow
from scripts.dashboards.panels import Panel, PanelQuery, heatmap, one, thresholds, timeseries
from scripts.dashboards.queries import mean, quantile, rate, within

ERROR = "block_forecast_error_ratio"
E2E = f'quantity="e2e", {OF_INSTANCE}'


def beside(title: str, predicted: str, measured: str, q: float) -> Panel:
    """Draw a quantile of forecasts beside the same quantile of what was measured."""
    return timeseries(
        f"{title}, P{q * 100:g}",
        [
            PanelQuery(expression=quantile(q, predicted, where=OF_MODEL), legend="predicted", colour="orange"),
            PanelQuery(expression=quantile(q, measured, where=OF_MODEL), legend="measured", colour="blue"),
        ],
        "Forecasts that requests were placed by, when they were placed, and what the gateway measured, when requests "
        "ended: under a changing load the second follows the first.",
        unit="s",
        width=6,
    )


COMPARED = tuple(
    beside(title, f"block_predicted_{name}_seconds", f"block_gateway_{name}_seconds", q)
    for title, name in (("Time to first token", "ttft"), ("Latency", "e2e"))
    for q in (0.5, 0.99)
)
ERRORS = (
    timeseries(
        "Median error by quantity",
        [PanelQuery(expression=quantile(0.5, ERROR, by=("quantity",), where=OF_INSTANCE), legend="{{quantity}}")],
        "Median of |predicted - actual| / actual. That of lengths is the tagger's.",
        unit="percentunit",
        limits=thresholds((0.3, "red"), first="transparent"),
    ),
    timeseries(
        "P90 of the error by quantity",
        [PanelQuery(expression=quantile(0.9, ERROR, by=("quantity",), where=OF_INSTANCE), legend="{{quantity}}")],
        "90th percentile of |predicted - actual| / actual.",
        unit="percentunit",
    ),
    timeseries(
        "Within 10 %",
        [PanelQuery(expression=within(ERROR, "0.1", by=("quantity",), where=OF_INSTANCE), legend="{{quantity}}")],
        "Share of forecasts that are off by 10 % at most.",
        unit="percentunit",
        maximum=1,
    ),
    timeseries(
        "Median error of latency by instance",
        [PanelQuery(expression=quantile(0.5, ERROR, by=("instance",), where=E2E), legend="{{instance}}")],
        "One instance above the others: its profile does not fit its machine.",
        unit="percentunit",
    ),
    timeseries(
        "Bias of latency by instance",
        [PanelQuery(expression=f"block_forecast_bias_ratio{{{E2E}}}", legend="{{instance}}")],
        "(predicted - actual) / actual, smoothed: above 0 forecasts are too long.",
        unit="percentunit",
        minimum=None,
        limits=thresholds((-0.2, "transparent"), (0.2, "red"), first="red"),
    ),
    timeseries(
        "Pace by instance",
        [PanelQuery(expression=f"block_pace_ratio{{{OF_INSTANCE}}}", legend="{{instance}}")],
        "Real over predicted step time, smoothed; forecasts are corrected by it. Far from 1: measure a profile.",
    ),
    heatmap(
        "Error of latency, all requests",
        rate(f"{ERROR}_bucket", by=("le",), where=E2E),
        "How requests spread over the buckets of the error.",
        unit="percentunit",
    ),
    one(
        "Mean error before correction",
        mean("block_scheduler_forecast_error_ratio", where=OF_INSTANCE),
        "|predicted - actual| / actual latency of forecasts as the engine model makes them.",
        legend="mean",
        unit="percentunit",
        width=12,
    ),
)
MAKING = (
    timeseries(
        "Forecasts by result",
        [PanelQuery(expression=rate("block_forecasts_total", by=("result",), where=OF_INSTANCE), legend="{{result}}")],
        "Requests forecast per second: each request is forecast on every candidate.",
        unit="cps",
    ),
    timeseries(
        "Time to make forecasts",
        [
            PanelQuery(expression=quantile(q, "block_predict_seconds", where=OF_INSTANCE), legend=f"P{q * 100:g}")
            for q in (0.5, 0.99)
        ],
        "Time of a sidecar to refresh its view of an engine and to make forecasts.",
        unit="s",
    ),
    timeseries(
        "Source of the state",
        [
            PanelQuery(
                expression=f"sum by (source) (block_state_source{{{OF_INSTANCE}}})",
                legend="{{source}}",
            )
        ],
        "Instances whose engine exports its state, and those that are mirrored from their traffic.",
        stacked=True,
        steps=True,
    ),
)

FORECASTS = Dashboard(
    uid="block-forecasts",
    title="Block / Forecasts",
    description="What was predicted beside what happened.",
    variables=(MODEL, INSTANCE),
    rows=(
        DashboardRow(title="Predicted beside measured", panels=COMPARED),
        DashboardRow(title="Errors", panels=ERRORS),
        DashboardRow(title="Making forecasts", panels=MAKING),
    ),
)
