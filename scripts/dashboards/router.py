"""Router: how decisions are made, what they are based on, and where requests go."""

from __future__ import annotations

from scripts.dashboards.dashboard import INSTANCE, OF_INSTANCE, Dashboard, DashboardRow
from scripts.dashboards.panels import PanelQuery, latency, one, timeseries
from scripts.dashboards.queries import aggregate, quantile, rate, ratio

PLACED = rate("block_placements_total", by=("instance",), where=OF_INSTANCE)
DECISIONS = (
    timeseries(
        "Decision time by policy",
        [
            PanelQuery(
                expression=quantile(q, "block_decision_seconds", by=("policy",)), legend=f"{{{{policy}}}} P{q * 100:g}"
            )
            for q in (0.5, 0.99)
        ],
        "From receiving a request to its decision, without the time that it is held.",
        unit="s",
    ),
    latency(
        "Decision time at the gateway", "block_gateway_decision_seconds", "Until a request's destination is known."
    ),
    latency("Fan-out", "block_fan_out_seconds", "From requesting forecasts to the last reply of a sidecar."),
    timeseries(
        "Decisions by basis",
        [PanelQuery(expression=rate("block_decisions_total", by=("basis",)), legend="{{basis}}")],
        "What instances were ranked by; `last_resort` and missing forecasts mean that sidecars do not reply.",
        unit="reqps",
        stacked=True,
    ),
    timeseries(
        "Decisions by policy",
        [PanelQuery(expression=rate("block_decisions_total", by=("policy",)), legend="{{policy}}")],
        "Decisions per second.",
        unit="reqps",
        stacked=True,
    ),
    latency(
        "Age of the state",
        "block_state_age_seconds",
        "Age of what was known of the chosen instance when the decision was made.",
    ),
)
PLACEMENT = (
    timeseries(
        "Requests by instance",
        [PanelQuery(expression=PLACED, legend="{{instance}}")],
        "Requests and legs placed per second.",
        unit="reqps",
        width=12,
        stacked=True,
    ),
    one(
        "Spread",
        f"max({PLACED}) / (avg({PLACED}) > 0)",
        "Requests of the instance with the most, over the mean of all: 1 is even.",
        legend="max / mean",
        width=6,
    ),
    timeseries(
        "Reservations",
        [PanelQuery(expression=rate("block_reservations_total", by=("result",)), legend="{{result}}")],
        "A conflict means that another scheduler was faster: the request is ranked again.",
        unit="reqps",
        width=6,
    ),
    timeseries(
        "Reservations that ended",
        [
            PanelQuery(
                expression=rate("block_reservations_ended_total", by=("how",), where=OF_INSTANCE), legend="{{how}}"
            )
        ],
        "Reservations that reached their engine, were released, or expired unused.",
        unit="reqps",
        width=12,
    ),
    timeseries(
        "Reserved now",
        [PanelQuery(expression=f"block_reservations{{{OF_INSTANCE}}}", legend="{{instance}}")],
        "Requests that are counted at an instance before its engine shows them.",
        width=12,
    ),
)
WAITING = (
    one("Held now", aggregate("sum", "block_held_requests"), "Requests that wait at schedulers.", width=6),
    latency("Time held", "block_held_seconds", "Of requests that were held.", width=6),
    timeseries(
        "Holds by end",
        [PanelQuery(expression=rate("block_holds_total", by=("end",)), legend="{{end}}")],
        "`not_admitted` means that no instance had room in time.",
        unit="reqps",
        width=6,
    ),
    timeseries(
        "Refused early, and without an instance",
        [
            PanelQuery(expression=rate("block_scheduler_shed_total", by=("reason",)), legend="{{reason}}"),
            PanelQuery(expression=rate("block_undecided_total"), legend="no instance"),
        ],
        "Requests that schedulers refuse, by reason.",
        unit="reqps",
        width=6,
    ),
)
SIDECARS = (
    timeseries(
        "Failed calls of sidecars",
        [
            PanelQuery(
                expression=rate("block_sidecar_failures_total", by=("instance", "kind"), where=OF_INSTANCE),
                legend="{{instance}} {{kind}}",
            )
        ],
        "By instance and kind; `late` is beyond the deadline.",
        unit="reqps",
    ),
    one("Open circuits", aggregate("max", "block_sidecar_circuits_open"), "Sidecars that are not asked for now."),
    timeseries(
        "Forecast time by instance, P99",
        [
            PanelQuery(
                expression=quantile(0.99, "block_predict_seconds", by=("instance",), where=OF_INSTANCE),
                legend="{{instance}}",
            )
        ],
        "Time of a sidecar to refresh its view of the engine and to make forecasts.",
        unit="s",
    ),
)
GRPC = (
    timeseries(
        "Calls by method and status",
        [PanelQuery(expression=rate("block_grpc_requests_total", by=("method", "code")), legend="{{method}} {{code}}")],
        "Calls ended per second, at all gRPC servers.",
        unit="reqps",
        width=12,
    ),
    timeseries(
        "Time by method, P99",
        [
            PanelQuery(
                expression=quantile(0.99, "block_grpc_request_seconds", by=("method",)),
                legend="{{method}}",
            )
        ],
        "Duration of calls at the server.",
        unit="s",
        width=12,
    ),
)
CERTIFICATES = (
    timeseries(
        "Time until certificates expire",
        [
            PanelQuery(
                expression="min by (job, use) (block_tls_certificate_not_after_timestamp_seconds) - time()",
                legend="{{job}} {{use}}",
            )
        ],
        "Of the process's own certificates and of its CAs; alerts fire at 14 and at 2 days.",
        unit="s",
        width=12,
    ),
    timeseries(
        "Failed TLS handshakes",
        [
            PanelQuery(
                expression=rate("block_tls_handshake_failures_total", by=("side", "reason")),
                legend="{{side}} {{reason}}",
            )
        ],
        "By the side of the reporting process; scanners cause `plain_text` and `old_protocol`.",
        unit="reqps",
        width=12,
    ),
)
SHARE_DEGRADED = one(
    "Decisions without forecasts",
    ratio(
        rate("block_decisions_total", where='basis!="forecast"'),
        rate("block_decisions_total"),
    ),
    "Share of decisions that are based on anything else. 1 is normal for policies that read indicators only.",
    legend="share",
    unit="percentunit",
    maximum=1,
)

ROUTER = Dashboard(
    uid="block-router",
    title="Block / Router",
    description="How decisions are made, what they are based on, and where requests go.",
    variables=(INSTANCE,),
    rows=(
        DashboardRow(title="Decisions", panels=(*DECISIONS, SHARE_DEGRADED)),
        DashboardRow(title="Placement", panels=PLACEMENT),
        DashboardRow(title="Waiting at schedulers", panels=WAITING),
        DashboardRow(title="Sidecars", panels=SIDECARS),
        DashboardRow(title="gRPC", panels=GRPC, closed=True),
        DashboardRow(title="TLS", panels=CERTIFICATES, closed=True),
    ),
)
