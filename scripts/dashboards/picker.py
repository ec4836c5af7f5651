"""Picker: whether the endpoint picker answers its proxies, how fast, and where it sends requests."""

from __future__ import annotations

from scripts.dashboards.dashboard import INSTANCE, OF_INSTANCE, Dashboard, DashboardRow
from scripts.dashboards.panels import PanelQuery, latency, one, stat, thresholds, timeseries
from scripts.dashboards.queries import aggregate, or_zero, quantile, rate, ratio

OF_PICKER = 'job="block-picker"'
PICKS, REFUSED = "block_picker_picks_total", "block_picker_refused_total"
DECISION = "block_picker_decision_seconds"
STREAM_ERRORS = or_zero(rate("block_picker_stream_errors_total"))
SERVER_ERRORS = or_zero(rate(REFUSED, where='status=~"5.."'))
FAILED = f"({SERVER_ERRORS} + {STREAM_ERRORS})"
ASKED = f"({or_zero(rate(PICKS))} + {or_zero(rate(REFUSED))} + {STREAM_ERRORS})"

NOW = (
    stat("Requests", rate(PICKS), "Requests per second for which endpoints were chosen.", unit="reqps", width=4),
    stat(
        "Failed",
        ratio(FAILED, ASKED),
        "Share of requests that got no endpoint because no instance, no decision or the picker itself failed.",
        unit="percentunit",
        limits=thresholds((0.001, "yellow"), (0.05, "red")),
        width=4,
    ),
    stat(
        "Refused",
        ratio(or_zero(rate(REFUSED, where='status="429"')), ASKED),
        "Share of requests that were refused early, with `Retry-After`.",
        unit="percentunit",
        width=4,
    ),
    stat(
        "Decision time, P99",
        quantile(0.99, DECISION),
        "From the whole request to its endpoints, the time that it is held included.",
        unit="s",
        limits=thresholds((0.1, "yellow"), (0.5, "red")),
        width=4,
    ),
    stat(
        "Streams",
        aggregate("sum", "block_picker_requests_under_way"),
        "Requests that proxies have a stream open for, until their responses end.",
        width=4,
    ),
    stat("Instances", aggregate("max", f"block_instances{{{OF_PICKER}}}"), "Instances that pickers know.", width=4),
)
REQUESTS = (
    timeseries(
        "Requests by result",
        [
            PanelQuery(expression=rate(PICKS, by=("how",)), legend="{{how}}"),
            PanelQuery(expression=rate(REFUSED), legend="refused"),
        ],
        "`placed` by body and headers, `by_headers` alone, `any` endpoint where the request is no completion.",
        unit="reqps",
        stacked=True,
    ),
    timeseries(
        "Refused",
        [PanelQuery(expression=rate(REFUSED, by=("status", "reason")), legend="{{status}} {{reason}}")],
        "Requests that the picker answers itself. 503: no instance, or no decision in time; 429: refused early.",
        unit="reqps",
        stacked=True,
    ),
    timeseries(
        "Responses by status",
        [PanelQuery(expression=rate("block_picker_responses_total", by=("status",)), legend="{{status}}")],
        "Responses of engines, or of the proxy without them, as the picker sees them pass.",
        unit="reqps",
        stacked=True,
    ),
)
TIMES = (
    latency("Decision time", DECISION, "From the whole request to its endpoints, the time that it is held included."),
    latency(
        "Time to first token", "block_picker_ttft_seconds", "From a request's arrival to the first part of its stream."
    ),
    latency("Latency", "block_picker_e2e_seconds", "From a request's arrival to the end of its response."),
)
PLACEMENT = (
    timeseries(
        "Picks by instance",
        [
            PanelQuery(
                expression=rate("block_placements_total", by=("instance",), where=f"{OF_PICKER}, {OF_INSTANCE}"),
                legend="{{instance}}",
            )
        ],
        "Completions and legs of completions that pickers send to each instance.",
        unit="reqps",
        width=12,
        stacked=True,
    ),
    timeseries(
        "Served elsewhere",
        [
            PanelQuery(expression=rate("block_picker_served_elsewhere_total", by=("endpoint",)), legend="{{endpoint}}"),
        ],
        "Requests that another endpoint than the first one served: the proxy could not reach it (`retried`), or used "
        "an endpoint that no instance has (`unknown`).",
        unit="reqps",
        width=6,
    ),
    one(
        "Held now",
        aggregate("sum", f"block_held_requests{{{OF_PICKER}}}", ("instance",)),
        "Requests that wait in the admission queue of a picker.",
        legend="{{instance}}",
        width=6,
    ),
)
PROCESSES = (
    one(
        "Streams under way",
        aggregate("sum", "block_picker_requests_under_way", ("instance",)),
        "By picker: requests that proxies have a stream open for. `--max-concurrency` limits them.",
        legend="{{instance}}",
        width=6,
    ),
    timeseries(
        "Stream errors and clients that left",
        [
            PanelQuery(expression=rate("block_picker_stream_errors_total", by=("why",)), legend="{{why}}"),
            PanelQuery(expression=rate("block_picker_clients_left_total"), legend="client left"),
            PanelQuery(expression=rate("block_picker_ignored_objectives_total"), legend="objective unknown"),
        ],
        "`protocol`: the messages of a proxy are invalid; `internal`: a defect of the picker.",
        unit="reqps",
        width=6,
    ),
    one(
        "Processor time",
        rate("process_cpu_seconds_total", by=("instance",), where=OF_PICKER),
        "Cores by picker; one picker uses one core at most.",
        legend="{{instance}}",
        width=6,
    ),
    one(
        "Memory",
        aggregate("sum", f"process_resident_memory_bytes{{{OF_PICKER}}}", ("instance",)),
        "Resident memory by picker.",
        legend="{{instance}}",
        unit="bytes",
        width=6,
    ),
)

PICKER = Dashboard(
    uid="block-picker",
    title="Block / Picker",
    description="Whether the endpoint picker answers its proxies, how fast, and where it sends requests.",
    variables=(INSTANCE,),
    rows=(
        DashboardRow(title="Now", panels=NOW),
        DashboardRow(title="Requests", panels=REQUESTS),
        DashboardRow(title="Times", panels=TIMES),
        DashboardRow(title="Placement", panels=PLACEMENT),
        DashboardRow(title="Pickers", panels=PROCESSES),
    ),
)
