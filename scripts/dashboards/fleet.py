"""Fleet: each instance and its engine, and the provisioner that sizes the pool."""

from __future__ import annotations

from scripts.dashboards.dashboard import INSTANCE, OF_INSTANCE, OF_POOL, POOL, Dashboard, DashboardRow
from scripts.dashboards.panels import Column, Panel, PanelQuery, one, states, table, thresholds, timeseries
from scripts.dashboards.queries import aggregate, quantile, rate, ratio

BY = ("instance",)
KV_LIMITS = thresholds((0.9, "yellow"), (0.98, "red"))


def engine(metric: str) -> str:
    """Take a gauge of vLLM's, by instance; several engine ranks of one target are added."""
    return aggregate("sum", f"vllm:{metric}{{{OF_INSTANCE}}}", BY)


def drawn(title: str, expression: str, description: str, unit: str = "short", **settings: object) -> Panel:
    """Draw a line for each instance."""
    queries = [PanelQuery(expression=expression, legend="{{instance}}")]
    return timeseries(title, queries, description, unit=unit, **settings)  # type: ignore[arg-type]


NOW = (
    table(
        "Instances",
        "instance",
        (
            Column(title="up", expression=f"min by (instance) (block_engine_up{{{OF_INSTANCE}}})"),
            Column(
                title="requests/s", expression=rate("block_placements_total", by=BY, where=OF_INSTANCE), unit="reqps"
            ),
            Column(title="reserved", expression=f"sum by (instance) (block_reservations{{{OF_INSTANCE}}})"),
            Column(title="running", expression=engine("num_requests_running")),
            Column(title="waiting", expression=engine("num_requests_waiting"), limits=thresholds((1, "yellow"))),
            Column(
                title="KV cache",
                expression=f"max by (instance) (vllm:kv_cache_usage_perc{{{OF_INSTANCE}}})",
                unit="percentunit",
                limits=KV_LIMITS,
            ),
            Column(title="pace", expression=f"avg by (instance) (block_pace_ratio{{{OF_INSTANCE}}})"),
            Column(
                title="forecast error",
                expression=quantile(0.5, "block_forecast_error_ratio", by=BY, where=f'quantity="e2e", {OF_INSTANCE}'),
                unit="percentunit",
                limits=thresholds((0.2, "yellow"), (0.3, "red")),
            ),
        ),
        "One row for each instance; its name opens its forecasts. vLLM's columns need scrape targets whose label "
        "`instance` is the instance's id.",
        link={
            "title": "Forecasts of ${__value.raw}",
            "url": "/d/block-forecasts?${datasource:queryparam}&var-instance=${__value.raw}&${__url_time_range}",
        },
    ),
    states(
        "Engines up",
        PanelQuery(expression=f"block_engine_up{{{OF_INSTANCE}}}", legend="{{instance}}"),
        "Whether an engine runs, as its sidecar sees it.",
        {0: ("down", "red"), 1: ("up", "green")},
    ),
    drawn(
        "Requests by instance",
        rate("block_placements_total", by=BY, where=OF_INSTANCE),
        "Requests and legs placed per second.",
        "reqps",
        width=12,
        stacked=True,
    ),
)
ENGINES = (
    drawn("Running", engine("num_requests_running"), "Requests in the batch of each engine."),
    drawn("Waiting", engine("num_requests_waiting"), "Requests in the queue of each engine."),
    drawn(
        "KV cache",
        f"max by (instance) (vllm:kv_cache_usage_perc{{{OF_INSTANCE}}})",
        "Share of the KV blocks in use.",
        "percentunit",
        maximum=1,
        limits=thresholds((0.9, "yellow"), (0.98, "red"), first="transparent"),
    ),
    drawn(
        "Preemptions",
        rate("vllm:num_preemptions_total", by=BY, where=OF_INSTANCE),
        "Requests that lost their KV blocks to others, per second.",
    ),
    drawn(
        "Prefix cache hits",
        ratio(
            rate("vllm:prefix_cache_hits_total", by=BY, where=OF_INSTANCE),
            rate("vllm:prefix_cache_queries_total", by=BY, where=OF_INSTANCE),
        ),
        "Share of prompt tokens whose KV blocks were cached.",
        "percentunit",
        maximum=1,
    ),
    drawn(
        "Output tokens",
        rate("vllm:generation_tokens_total", by=BY, where=OF_INSTANCE),
        "Tokens generated per second.",
        "cps",
    ),
    drawn(
        "Tokens per step",
        ratio(
            rate("vllm:iteration_tokens_total_sum", by=BY, where=OF_INSTANCE),
            rate("vllm:iteration_tokens_total_count", by=BY, where=OF_INSTANCE),
        ),
        "Mean number of tokens in an engine's step, of prompts and answers.",
    ),
    drawn(
        "Time in the queue, P95",
        quantile(0.95, "vllm:request_queue_time_seconds", by=BY, where=OF_INSTANCE),
        "Of requests in the engine's own queue.",
        "s",
    ),
    drawn(
        "Time between tokens, P95",
        quantile(0.95, "vllm:inter_token_latency_seconds", by=BY, where=OF_INSTANCE),
        "As the engine measures it.",
        "s",
    ),
)
PROVISIONING = (
    timeseries(
        "Size of the pool",
        [
            PanelQuery(expression=f"max by (pool) (block_desired_instances{{{OF_POOL}}})", legend="{{pool}} desired"),
            PanelQuery(
                expression=f"max by (pool) (block_provisioner_max_instances{{{OF_POOL}}})",
                legend="{{pool}} maximum",
            ),
            PanelQuery(
                expression=f"max by (pool, state) (block_provisioner_instances{{{OF_POOL}}})",
                legend="{{pool}} {{state}}",
            ),
        ],
        "Instances that are starting, ready and draining, beside how many the rule wants and how many it may start.",
        steps=True,
    ),
    timeseries(
        "P99 of forecasts",
        [PanelQuery(expression=f"max by (pool) (block_forecast_p99_e2e_seconds{{{OF_POOL}}})", legend="{{pool}}")],
        "99th percentile of recent forecasts of latency, which rules compare with their threshold.",
        unit="s",
    ),
    timeseries(
        "Arrivals",
        [PanelQuery(expression=f"max by (pool) (block_arrivals_per_second{{{OF_POOL}}})", legend="{{pool}}")],
        "Requests per second, as schedulers report them.",
        unit="reqps",
    ),
    timeseries(
        "Cold start",
        [PanelQuery(expression=f"max by (pool) (block_cold_start_seconds{{{OF_POOL}}})", legend="{{pool}}")],
        "Measured time from starting an instance until it is ready.",
        unit="s",
    ),
    timeseries(
        "Actions",
        [
            PanelQuery(
                expression=rate("block_provisioner_actions_total", by=("kind", "state")), legend="{{kind}} {{state}}"
            )
        ],
        "What the provisioner does, by kind and state.",
        unit="cps",
    ),
    timeseries(
        "Leaders, and instances given up",
        [
            PanelQuery(expression=aggregate("sum", "block_provisioner_leads"), legend="leaders"),
            PanelQuery(
                expression="sum(increase(block_instances_given_up_total[$__rate_interval]))",
                legend="given up",
            ),
        ],
        "One provisioner leads. An instance that never becomes ready is given up.",
        steps=True,
    ),
    timeseries(
        "Instances by tier",
        [
            PanelQuery(
                expression=f"sum by (tier) (block_provisioner_tier_instances{{{OF_POOL}}})",
                legend="{{tier}}",
            )
        ],
        "Instances that serve each TPOT bound; without a tier, those of the best-effort pool.",
        stacked=True,
        steps=True,
        width=12,
    ),
    timeseries(
        "Waiting by tier",
        [PanelQuery(expression=f"sum by (tier) (block_provisioner_tier_waiting{{{OF_POOL}}})", legend="{{tier}}")],
        "Requests that wait at schedulers for an instance of a tier.",
        width=12,
    ),
)
ENDED = one(
    "Requests by end",
    rate("vllm:request_success_total", by=("finished_reason",), where=OF_INSTANCE),
    "Requests that engines ended per second, by reason.",
    legend="{{finished_reason}}",
    unit="reqps",
    stacked=True,
)
QUEUED = timeseries(
    "Where time goes, mean",
    [
        PanelQuery(
            expression=ratio(
                rate(f"vllm:request_{phase}_time_seconds_sum", where=OF_INSTANCE),
                rate(f"vllm:request_{phase}_time_seconds_count", where=OF_INSTANCE),
            ),
            legend=phase,
        )
        for phase in ("queue", "prefill", "decode")
    ],
    "Mean time of a request in the engine's queue, until its first token, and after it.",
    unit="s",
    stacked=True,
)

FLEET = Dashboard(
    uid="block-fleet",
    title="Block / Fleet",
    description="Each instance and its engine, and the provisioner that sizes the pool.",
    variables=(INSTANCE, POOL),
    rows=(
        DashboardRow(title="Instances", panels=NOW),
        DashboardRow(title="Engines", panels=(*ENGINES, ENDED, QUEUED)),
        DashboardRow(title="Provisioning", panels=PROVISIONING),
    ),
)
