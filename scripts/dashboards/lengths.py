"""Lengths: where predicted response lengths come from, and how right they are."""

from __future__ import annotations

from scripts.dashboards.dashboard import Dashboard, DashboardRow
from scripts.dashboards.panels import PanelQuery, heatmap, one, stat, states, thresholds, timeseries
from scripts.dashboards.queries import or_zero, quantile, rate, ratio

LENGTH_ERROR = 'quantity="output_tokens"'
NOW = (
    stat(
        "Length error, P50",
        quantile(0.5, "block_forecast_error_ratio", where=LENGTH_ERROR),
        "Median of |predicted - actual| / actual output tokens.",
        unit="percentunit",
        width=6,
    ),
    stat(
        "Tags",
        rate("block_tagger_tags_total"),
        "Requests whose length the tagger predicts, per second.",
        unit="reqps",
        width=6,
    ),
    stat(
        "Estimators that drifted",
        "count(block_tagger_drift == 1) or vector(0)",
        "Their recent lengths are off by more than a factor of 1.5 on average: train them again.",
        limits=thresholds((1, "red")),
        width=6,
    ),
    stat(
        "Tagger failures",
        or_zero(rate("block_tagger_failures_total")),
        "Calls of the tagger that failed or were late, per second.",
        unit="reqps",
        limits=thresholds((0.1, "yellow"), (1, "red")),
        width=6,
    ),
)
SOURCES = (
    timeseries(
        "Lengths by source",
        [PanelQuery(expression=rate("block_scheduler_tags_total", by=("source",)), legend="{{source}}")],
        "Where the scheduler has a request's length from: the client, the tagger, or a constant.",
        unit="reqps",
        stacked=True,
        width=12,
    ),
    timeseries(
        "Tags by estimator",
        [PanelQuery(expression=rate("block_tagger_tags_total", by=("estimator",)), legend="{{estimator}}")],
        "The first estimator of the chain that knows a length gives it.",
        unit="reqps",
        stacked=True,
        width=12,
    ),
)
ACCURACY = (
    timeseries(
        "Bias",
        [PanelQuery(expression="block_tagger_bias", legend="{{estimator}} {{model}}")],
        "Recent logarithm of real over estimated length; estimates are corrected by it. 0.4 is a factor of 1.5.",
        minimum=None,
        limits=thresholds((-0.405, "transparent"), (0.405, "red"), first="red"),
    ),
    timeseries(
        "Error",
        [PanelQuery(expression="block_tagger_error", legend="{{estimator}} {{model}}")],
        "Recent mean absolute error of the logarithm of the length, corrected.",
    ),
    states(
        "Drift",
        PanelQuery(expression="block_tagger_drift", legend="{{estimator}} {{model}}"),
        "Where the bias exceeds a factor of 1.5.",
        {0: ("fits", "green"), 1: ("drifted", "red")},
        width=8,
    ),
    one(
        "Error of lengths, median",
        quantile(0.5, "block_forecast_error_ratio", by=("instance",), where=LENGTH_ERROR),
        "Median of |predicted - actual| / actual output tokens.",
        legend="{{instance}}",
        unit="percentunit",
        width=12,
    ),
    heatmap(
        "Lengths of answers",
        "sum by (le) (rate(vllm:request_generation_tokens_bucket[$__rate_interval]))",
        "How many tokens answers have, as engines count them.",
        unit="short",
    ),
)
LEARNING = (
    timeseries(
        "Outcomes",
        [PanelQuery(expression=rate("block_tagger_outcomes_total", by=("learned",)), legend="learned: {{learned}}")],
        "Outcomes that the tagger received, and whether an estimator learned from them.",
        unit="reqps",
    ),
    timeseries(
        "Outcomes that schedulers report",
        [PanelQuery(expression=rate("block_scheduler_outcomes_total", by=("result",)), legend="{{result}}")],
        "A tagger that does not reply gets them later, up to a limit.",
        unit="reqps",
    ),
    timeseries(
        "Encoder",
        [
            PanelQuery(
                expression=ratio(rate("block_tagger_encoder_batch_sum"), rate("block_tagger_encoder_batch_count")),
                legend="prompts in a batch",
            ),
            PanelQuery(expression=rate("block_tagger_encoder_missed_total", by=("why",)), legend="missed: {{why}}"),
        ],
        "The estimator that reads prompts by a model: its mean batch, and requests without its estimate per second.",
    ),
    timeseries(
        "Checkpoints loaded",
        [
            PanelQuery(
                expression="sum by (taken) (increase(block_tagger_reloads_total[$__rate_interval]))",
                legend="taken: {{taken}}",
            )
        ],
        "Changed files of trained estimators; a bad one is not taken.",
    ),
    timeseries(
        "Failed calls of the tagger",
        [PanelQuery(expression=rate("block_tagger_failures_total", by=("kind",)), legend="{{kind}}")],
        "Lengths then come from a constant.",
        unit="reqps",
    ),
)

LENGTHS = Dashboard(
    uid="block-lengths",
    title="Block / Lengths",
    description="Where predicted response lengths come from, and how right they are.",
    rows=(
        DashboardRow(title="Now", panels=NOW),
        DashboardRow(title="Sources", panels=SOURCES),
        DashboardRow(title="Accuracy", panels=ACCURACY),
        DashboardRow(title="Learning", panels=LEARNING),
    ),
)
