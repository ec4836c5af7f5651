"""Overview: are users served, are targets met, does anything fail."""

from __future__ import annotations

from scripts.dashboards.dashboard import MODEL, OF_MODEL, TPOT_SLO, TTFT_SLO, Dashboard, DashboardRow
from scripts.dashboards.panels import PanelQuery, heatmap, latency, one, stat, thresholds, timeseries
from scripts.dashboards.queries import aggregate, or_zero, quantile, rate, ratio, within

ATTAINED = thresholds((0.9, "yellow"), (0.99, "green"), first="red")
ANY_IS_BAD = thresholds((1, "red"))
ERRORS = ratio(
    or_zero(rate("block_gateway_requests_total", where='status=~"5.."')), rate("block_gateway_requests_total")
)
SERVED = (
    stat("Requests", rate("block_gateway_requests_total"), "Replies per second, with any status.", unit="reqps"),
    stat(
        "Errors",
        ERRORS,
        "Share of replies with a status of 500 or more.",
        unit="percentunit",
        limits=thresholds((0.001, "yellow"), (0.01, "red")),
    ),
    stat(
        "TTFT, P95",
        quantile(0.95, "block_gateway_ttft_seconds", where=OF_MODEL),
        "From a request's arrival to the first event of its stream.",
        unit="s",
    ),
    stat(
        "TPOT, P95",
        quantile(0.95, "block_gateway_tpot_seconds", where=OF_MODEL),
        "Mean time between the tokens of a streamed answer.",
        unit="s",
    ),
    stat(
        "Latency, P95",
        quantile(0.95, "block_gateway_e2e_seconds", where=OF_MODEL),
        "From a request's arrival to the end of its answer.",
        unit="s",
    ),
    stat(
        "TTFT within target",
        within("block_gateway_ttft_seconds", "$ttft_slo", where=OF_MODEL),
        "Share of streams whose first event comes within the target chosen above.",
        unit="percentunit",
        limits=ATTAINED,
    ),
    stat(
        "TPOT within target",
        within("block_gateway_tpot_seconds", "$tpot_slo", where=OF_MODEL),
        "Share of streams whose mean time between tokens is within the target chosen above.",
        unit="percentunit",
        limits=ATTAINED,
    ),
    stat(
        "Under way",
        aggregate("sum", "block_gateway_requests_under_way"),
        "Requests in gateways now.",
    ),
    stat("Instances", aggregate("max", "block_instances"), "Instances in the list of a scheduler."),
    stat(
        "Engines down",
        aggregate("count", "block_engine_up == 0") + " or vector(0)",
        "Engines that their sidecar reports down.",
        limits=ANY_IS_BAD,
    ),
    stat(
        "Unreachable",
        'count(up{job=~"block-.*|vllm"} == 0) or vector(0)',
        "Targets that Prometheus cannot scrape.",
        limits=ANY_IS_BAD,
    ),
    stat(
        "Decision, P99",
        quantile(0.99, "block_decision_seconds"),
        "From receiving a request to its decision, without the time that it is held.",
        unit="s",
        limits=thresholds((0.05, "yellow"), (0.5, "red")),
    ),
    stat(
        "Forecast error, P50",
        quantile(0.5, "block_forecast_error_ratio", where='quantity="e2e"'),
        "Median of |predicted - actual| / actual latency of requests.",
        unit="percentunit",
        limits=thresholds((0.2, "yellow"), (0.3, "red")),
    ),
    stat(
        "Held",
        aggregate("sum", "block_held_requests"),
        "Requests that wait at schedulers.",
    ),
    stat("Refused early", or_zero(rate("block_scheduler_shed_total")), "Requests shed per second.", unit="reqps"),
    stat(
        "Retries",
        or_zero(rate("block_gateway_retries_total")),
        "Requests sent to another engine, per second.",
        unit="reqps",
    ),
)
TRAFFIC = (
    timeseries(
        "Replies by status",
        [PanelQuery(expression=rate("block_gateway_requests_total", by=("status",)), legend="{{status}}")],
        "Replies per second. 499 means that the client disconnected, 429 that a request was refused early.",
        unit="reqps",
        stacked=True,
    ),
    timeseries(
        "Tokens",
        [
            PanelQuery(expression=rate("block_gateway_prompt_tokens_total", where=OF_MODEL), legend="prompt"),
            PanelQuery(expression=rate("block_gateway_output_tokens_total", where=OF_MODEL), legend="output"),
        ],
        "Tokens per second of prompts that completed, and of answers.",
        unit="cps",
    ),
    timeseries(
        "Answers by end",
        [
            PanelQuery(
                expression=rate("block_gateway_finished_total", by=("reason",), where=OF_MODEL), legend="{{reason}}"
            )
        ],
        "How answers end: at a stop token, at their maximum length, cancelled by the client, or failed.",
        unit="reqps",
        stacked=True,
    ),
    timeseries(
        "Answers by model",
        [
            PanelQuery(
                expression=rate("block_gateway_finished_total", by=("model",), where=OF_MODEL), legend="{{model}}"
            )
        ],
        "Answers per second.",
        unit="reqps",
        stacked=True,
    ),
    one(
        "Requests under way",
        aggregate("sum", "block_gateway_requests_under_way"),
        "Requests in gateways.",
    ),
    timeseries(
        "Streams that end early",
        [
            PanelQuery(expression=rate("block_gateway_clients_left_total"), legend="client left"),
            PanelQuery(expression=rate("block_gateway_streams_broken_total"), legend="broken"),
        ],
        "Clients that disconnect, and streams that end in an error because their engine fails.",
        unit="reqps",
    ),
)
LATENCY = (
    latency("Time to first token", "block_gateway_ttft_seconds", "From arrival to the first event.", where=OF_MODEL),
    latency("Time per output token", "block_gateway_tpot_seconds", "Mean of each answer.", where=OF_MODEL),
    latency(
        "Time between tokens",
        "block_gateway_inter_token_seconds",
        "Of single tokens, as they reach the gateway: pauses show here.",
        where=OF_MODEL,
    ),
    latency("Latency", "block_gateway_e2e_seconds", "From arrival to the end of the answer.", where=OF_MODEL),
    heatmap(
        "Time to first token, all requests",
        rate("block_gateway_ttft_seconds_bucket", by=("le",), where=OF_MODEL),
        "How requests spread over the buckets.",
        width=8,
    ),
    heatmap(
        "Latency, all requests",
        rate("block_gateway_e2e_seconds_bucket", by=("le",), where=OF_MODEL),
        "How requests spread over the buckets.",
        width=8,
    ),
)
FAULTS = (
    timeseries(
        "Retries by reason",
        [PanelQuery(expression=rate("block_gateway_retries_total", by=("why",)), legend="{{why}}")],
        "Requests sent to another engine: the status or the error of the one before.",
        unit="reqps",
        width=6,
    ),
    timeseries(
        "Placed without a scheduler",
        [PanelQuery(expression=rate("block_gateway_last_resort_total", by=("how",)), legend="{{how}}")],
        "Requests that the gateway places by an earlier decision, or by turns, as no scheduler replies.",
        unit="reqps",
        width=6,
    ),
    timeseries(
        "Failed calls of schedulers",
        [
            PanelQuery(
                expression=rate("block_gateway_scheduler_failures_total", by=("scheduler", "code")),
                legend="{{scheduler}} {{code}}",
            )
        ],
        "By scheduler and gRPC status.",
        unit="reqps",
        width=6,
    ),
    timeseries(
        "Reports of ended requests",
        [PanelQuery(expression=rate("block_gateway_releases_total", by=("result",)), legend="{{result}}")],
        "A lost one leaves a reservation until it expires.",
        unit="reqps",
        width=6,
    ),
)
PROCESSES = (
    timeseries(
        "Processor time",
        [PanelQuery(expression="rate(process_cpu_seconds_total[$__rate_interval])", legend="{{job}} {{instance}}")],
        "Cores in use by each of Block's processes. A process uses one core at most.",
        width=12,
    ),
    timeseries(
        "Memory",
        [PanelQuery(expression="process_resident_memory_bytes", legend="{{job}} {{instance}}")],
        "Resident memory of each process.",
        unit="bytes",
        width=12,
    ),
)

OVERVIEW = Dashboard(
    uid="block-overview",
    title="Block / Overview",
    description="Are users served, are targets met, does anything fail.",
    variables=(MODEL, TTFT_SLO, TPOT_SLO),
    rows=(
        DashboardRow(title="Now", panels=SERVED),
        DashboardRow(title="Traffic", panels=TRAFFIC),
        DashboardRow(title="Latency at the gateway", panels=LATENCY),
        DashboardRow(title="Faults", panels=FAULTS),
        DashboardRow(title="Processes", panels=PROCESSES, closed=True),
    ),
)
