"""Disaggregation: requests with a prefill leg and a decode leg, in the order in which a request passes them."""

from __future__ import annotations

from scripts.dashboards.dashboard import INSTANCE, OF_INSTANCE, Dashboard, DashboardRow
from scripts.dashboards.panels import PanelQuery, latency, one, timeseries
from scripts.dashboards.queries import or_zero, rate, ratio

BY = ("instance",)
DECISION = (
    timeseries(
        "One leg or two",
        [
            PanelQuery(
                expression=rate("block_scheduler_disaggregations_total", by=("reason",)),
                legend="{{reason}}",
            )
        ],
        "Why a request has two legs, or is served as a whole.",
        unit="reqps",
        stacked=True,
    ),
    timeseries(
        "Placed by leg",
        [PanelQuery(expression=rate("block_placements_total", by=("leg",)), legend="{{leg}}")],
        "`serve` is a whole request.",
        unit="reqps",
        stacked=True,
    ),
    one(
        "Share with two legs",
        ratio(
            or_zero(rate("block_placements_total", where='leg="prefill"')),
            rate("block_placements_total", where='leg=~"prefill|serve"'),
        ),
        "Requests with a prefill leg among all.",
        legend="two legs",
        unit="percentunit",
        maximum=1,
    ),
)
PREFILL = (
    timeseries(
        "Prefill legs by result",
        [PanelQuery(expression=rate("block_gateway_prefill_legs_total", by=("result",)), legend="{{result}}")],
        "`held`: KV blocks wait for the decode leg. `no_blocks` and `invalid`: check the KV connector of both sides.",
        unit="reqps",
        stacked=True,
    ),
    latency("Prefill leg", "block_gateway_prefill_seconds", "From sending a prefill leg to its reply."),
    timeseries(
        "Held prefills",
        [PanelQuery(expression=f"block_emulator_held_prefills{{{OF_INSTANCE}}}", legend="{{instance}}")],
        "Finished prefills whose KV blocks are held for another engine. Emulated engines only.",
    ),
)
HAND_OVER = (
    latency(
        "Hand-over at the gateway",
        "block_gateway_hand_over_seconds",
        "From the reply to a prefill leg to the request to the decode instance; it rises when the gateway is busy.",
    ),
    latency("Transfer of KV blocks", "vllm:nixl_xfer_time_seconds", "As decode engines measure it.", where=OF_INSTANCE),
    timeseries(
        "Transferred",
        [
            PanelQuery(
                expression=rate("vllm:nixl_bytes_transferred_sum", by=BY, where=OF_INSTANCE),
                legend="{{instance}}",
            )
        ],
        "KV cache fetched per second.",
        unit="Bps",
    ),
    timeseries(
        "Waiting for KV blocks",
        [
            PanelQuery(
                expression=f"sum by (stage) (vllm:num_requests_kv_fetch_by_stage{{{OF_INSTANCE}}})",
                legend="{{stage}}",
            )
        ],
        "Requests at decode engines, by the stage of their transfer.",
        stacked=True,
    ),
    timeseries(
        "Failed transfers",
        [
            PanelQuery(
                expression=rate("vllm:nixl_num_failed_transfers_total", by=BY, where=OF_INSTANCE),
                legend="{{instance}} failed",
            ),
            PanelQuery(
                expression=rate("vllm:nixl_num_kv_expired_reqs_total", by=BY, where=OF_INSTANCE),
                legend="{{instance}} expired",
            ),
        ],
        "Transfers that failed, and prefills whose KV blocks no decode engine fetched in time, per second.",
        unit="cps",
    ),
    one(
        "Legs sent again",
        rate("block_gateway_retries_total", by=("why",), where='why=~"prefill.*|fetch"'),
        "Requests placed again because their prefill leg failed, or because KV blocks could not be fetched.",
        legend="{{why}}",
        unit="reqps",
    ),
)
DECODE = (
    timeseries(
        "Running",
        [
            PanelQuery(
                expression=f"sum by (instance) (vllm:num_requests_running{{{OF_INSTANCE}}})", legend="{{instance}}"
            )
        ],
        "Requests in the batch of each engine: compare prefill with decode.",
        width=12,
    ),
    timeseries(
        "Waiting",
        [
            PanelQuery(
                expression=f"sum by (instance) (vllm:num_requests_waiting{{{OF_INSTANCE}}})", legend="{{instance}}"
            )
        ],
        "Requests in the queue of each engine: a queue at prefill instances needs more of them.",
        width=12,
    ),
)

DISAGGREGATION = Dashboard(
    uid="block-disaggregation",
    title="Block / Prefill and decode",
    description="Requests with a prefill leg and a decode leg, in the order in which a request passes them.",
    variables=(INSTANCE,),
    rows=(
        DashboardRow(title="Decision", panels=DECISION),
        DashboardRow(title="Prefill", panels=PREFILL),
        DashboardRow(title="Hand-over", panels=HAND_OVER),
        DashboardRow(title="Engines", panels=DECODE),
    ),
)
