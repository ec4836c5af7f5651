"""SLOs: what requests with targets attain, by class, client and tier; and who waits or is refused."""

from __future__ import annotations

from scripts.dashboards.dashboard import OBJECTIVE, Dashboard, DashboardRow
from scripts.dashboards.panels import Panel, PanelQuery, one, stat, thresholds, timeseries
from scripts.dashboards.queries import aggregate, or_zero, rate, ratio

TARGETS, ATTAINED = "block_gateway_targets_total", "block_gateway_targets_attained_total"
OF_SLO = 'target="slo"'
LIMITS = thresholds((0.9, "yellow"), (0.99, "green"), first="red")


def attained(*by: str, where: str = OF_SLO) -> str:
    """Take the share of requests that attained a target."""
    return ratio(rate(ATTAINED, by=by, where=where), rate(TARGETS, by=by, where=where))


def shares(title: str, expression: str, legend: str, description: str) -> Panel:
    """Draw shares between 0 and 1."""
    queries = [PanelQuery(expression=expression, legend=legend)]
    return timeseries(title, queries, description, unit="percentunit", maximum=1)


def burn(window: str) -> str:
    """Divide the share of requests that missed their targets by the share that may."""
    requests, kept = (f"sum(increase(block_gateway_slo_{name}_total[{window}]))" for name in ("requests", "attained"))
    return f"(1 - {kept} / ({requests} > 0)) / (1 - $objective)"


NOW = (
    stat(
        "Attained",
        ratio(rate("block_gateway_slo_attained_total"), rate("block_gateway_slo_requests_total")),
        "Share of requests with targets that attained all of them.",
        unit="percentunit",
        limits=LIMITS,
        width=6,
    ),
    stat(
        "Gain",
        ratio(rate("block_gateway_gain_total"), rate("block_gateway_possible_gain_total")),
        "Tokens that came by their deadlines, by the weights of their requests, over all that were due.",
        unit="percentunit",
        limits=LIMITS,
        width=6,
    ),
    stat(
        "Held",
        aggregate("sum", "block_held_requests"),
        "Requests that wait at schedulers.",
        width=6,
    ),
    stat("Refused early", or_zero(rate("block_scheduler_shed_total")), "Per second.", unit="reqps", width=6),
)
BURN = (
    timeseries(
        "Burn rate",
        [PanelQuery(expression=burn(window), legend=window) for window in ("5m", "30m", "1h", "6h")],
        "How fast the error budget of the objective chosen above is spent: at 1 exactly as fast as it may be.",
        limits=thresholds((1, "yellow"), (14.4, "red"), first="transparent"),
        width=12,
    ),
    timeseries(
        "Requests with targets",
        [
            PanelQuery(expression=rate("block_gateway_slo_requests_total"), legend="with targets"),
            PanelQuery(expression=rate("block_gateway_slo_attained_total"), legend="attained"),
        ],
        "Streams with targets that ended, per second.",
        unit="reqps",
        width=12,
    ),
)
WHO = (
    shares("Attained by target", attained("target", where=""), "{{target}}", "`slo` is TTFT and TPOT together."),
    shares("Attained by class", attained("class"), "{{class}}", "Real-time and best-effort requests."),
    shares("Attained by priority", attained("priority"), "{{priority}}", "A lower priority runs first."),
    shares(
        "Attained by client",
        ratio(
            rate("block_gateway_slo_attained_total", by=("client",)),
            rate("block_gateway_slo_requests_total", by=("client",)),
        ),
        "{{client}}",
        "By API key or `x-llm-d-inference-fairness-id`; the most frequent ones have a name of their own.",
    ),
    shares(
        "Attained by TPOT target",
        ratio(
            rate("block_gateway_slo_attained_total", by=("tpot_slo",)),
            rate("block_gateway_slo_requests_total", by=("tpot_slo",)),
        ),
        "{{tpot_slo}} s",
        "Tiers serve one bound each.",
    ),
    shares(
        "Tokens on time",
        ratio(
            rate("block_gateway_tokens_on_time_total", by=("class",)),
            rate("block_gateway_tokens_due_total", by=("class",)),
        ),
        "{{class}}",
        "Tokens that came by their deadlines.",
    ),
)
ADMISSION = (
    one("Held now", aggregate("sum", "block_held_requests"), "Requests that wait at schedulers."),
    one(
        "Refused early",
        rate("block_scheduler_shed_total", by=("reason", "class")),
        "By reason and class. `late`: no instance can keep the targets; `queue_full` and `timeout`: of the queue.",
        legend="{{reason}} {{class}}",
        unit="reqps",
        stacked=True,
    ),
    one(
        "Served late",
        rate("block_scheduler_served_late_total", by=("reason",)),
        "Placed after they dropped their deadlines. `late`: no instance can keep these; `deferred`: they take long "
        "under overload, so that others are in time.",
        legend="{{reason}}",
        unit="reqps",
        stacked=True,
    ),
    one(
        "Demoted",
        rate("block_scheduler_demoted_total"),
        "Requests that go on as best effort, because no instance keeps their deadlines.",
        unit="reqps",
    ),
)

SLOS = Dashboard(
    uid="block-slos",
    title="Block / SLOs",
    description="What requests with targets attain, by class, client and tier; and who waits or is refused.",
    variables=(OBJECTIVE,),
    rows=(
        DashboardRow(title="Now", panels=NOW),
        DashboardRow(title="Error budget", panels=BURN),
        DashboardRow(title="Attainment by group", panels=WHO),
        DashboardRow(title="Admission", panels=ADMISSION),
    ),
)
