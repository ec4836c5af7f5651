"""The numbers that policies read, each defined once: its meaning, unit and source, and how old it may be.

Indicators that sidecars report have the names of `Indicators` in protos/block/v1/common.proto.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np

from predictor.suggestions import did_you_mean
from scheduler.columns import Column, Columns
from scheduler.tier_formulas import tier_cost_s, tier_fits, tier_ratio, tiers_matter, work_s


class IndicatorSource(Enum):
    """Where an indicator comes from, and how old it is."""

    REPORTED = "the sidecar's last report, age_s ago: in a reply, or from its stream"
    PREFIX = "the engine's prefix cache, if a forecast was made; else the prompts that this scheduler sent there"
    ADAPTERS = "the adapters that the sidecar reported last"
    SESSION = "this scheduler's memory of where the session's last request went"
    FORECAST = "the sidecar's forecast of this request, made for this decision"
    REQUEST = "the request itself"
    LISTED = "the list of instances"
    DERIVED = "other indicators, and as old as these"


@dataclass(frozen=True, slots=True, kw_only=True)
class Indicator:
    """One number about an instance; `otherwise` is its value where it is unknown, NaN if none can be assumed."""

    name: str
    unit: str
    meaning: str
    source: IndicatorSource
    of: tuple[str, ...] = ()
    formula: Callable[[Columns], Column] | None = None
    otherwise: float = math.nan


def _reported(name: str, unit: str, meaning: str, otherwise: float = math.nan) -> Indicator:
    return Indicator(name=name, unit=unit, meaning=meaning, source=IndicatorSource.REPORTED, otherwise=otherwise)


def _flag(name: str, meaning: str, source: IndicatorSource) -> Indicator:
    """Describe what holds for an instance, or does not."""
    return Indicator(name=name, unit="0 or 1", meaning=meaning, source=source, otherwise=0.0)


def _forecast(name: str, unit: str, meaning: str) -> Indicator:
    return Indicator(name=name, unit=unit, meaning=meaning, source=IndicatorSource.FORECAST)


def _derived(
    name: str, unit: str, meaning: str, of: tuple[str, ...], formula: Callable[[Columns], Column]
) -> Indicator:
    return Indicator(name=name, unit=unit, meaning=meaning, source=IndicatorSource.DERIVED, of=of, formula=formula)


REPORTED = (
    _reported("num_running", "requests", "in the running batch"),
    _reported("num_waiting", "requests", "in the engine's queue"),
    _reported("num_reserved", "requests", "reserved, and not yet shown by the engine", 0.0),
    _reported("num_total_blocks", "blocks", "of the KV cache"),
    _reported("num_free_blocks", "blocks", "free, or cached and free for reuse"),
    _reported("num_reserved_blocks", "blocks", "that the prompts of reserved requests will take", 0.0),
    _reported("num_waiting_blocks", "blocks", "that the prompts of waiting requests will take"),
    _reported("queued_prefill_tokens", "tokens", "of prompts still to be computed: running, waiting and reserved"),
    _reported("context_tokens", "tokens", "held in the KV cache by running requests"),
    _reported("remaining_tokens", "tokens", "of responses, predicted to be generated yet"),
    _reported("requests_per_minute", "requests", "that arrived within the last sixty seconds"),
    _reported("kv_hit_ratio", "ratio", "of prompt tokens found in the prefix cache, by recent requests there"),
    _reported("pace", "ratio", "actual over predicted step time, smoothed"),
    _reported("step_s", "s", "duration of the last step"),
    _reported("drained_s", "s", "predicted until all requests there have ended"),
    _reported("num_preemptions_total", "requests", "preempted since the engine started"),
    _reported("num_finished_total", "requests", "finished since the engine started"),
    _reported("num_fetching", "requests", "waiting while their KV blocks are fetched from another engine", 0.0),
    _reported("num_adapters", "adapters", "LoRA, in GPU memory", 0.0),
    _reported("max_loras", "adapters", "LoRA, in GPU memory at most; 0 where the engine serves none", 0.0),
    _reported("num_held_blocks", "blocks", "of finished prefill legs, held until they are fetched", 0.0),
    _reported("num_offloaded_blocks", "blocks", "on off-loading tiers of the KV cache, known from KV events", 0.0),
    _reported(
        "decode_step_s", "s", "predicted duration of a step that decodes all requests there, reserved ones too", 0.0
    ),
    _reported("queued_prefill_s", "s", "predicted to compute `queued_prefill_tokens`, beside such steps", 0.0),
    _reported(
        "least_tpot_slo_s",
        "s",
        "shortest TPOT target of the requests there that have missed no deadline; infinite without one",
    ),
    _reported(
        "efficient_step_s",
        "s",
        "step time from which on requests like those there cost at most 3 %, or 45 % over the square root of the "
        "number of requests in it (of requests that differ, of equal ones that vary as much), more than with any "
        "longer steps; infinite where none has a TPOT target, or fewer than 16 requests are there",
        math.inf,
    ),
    _reported(
        "step_overhead_s",
        "s",
        "that a step of `efficient_step_s` takes longer than its requests would in the best step, as few share "
        "weights and constants; infinite where `efficient_step_s` is",
        math.inf,
    ),
    _reported("prefill_token_s", "s", "predicted to compute a prompt token of a full chunk", 0.0),
)

OTHERS = (
    Indicator(
        name="age_s",
        unit="s",
        meaning="age of the instance's last report",
        source=IndicatorSource.REPORTED,
        otherwise=math.inf,
    ),
    Indicator(name="prompt_tokens", unit="tokens", meaning="of this request's prompt", source=IndicatorSource.REQUEST),
    Indicator(
        name="tag_tokens", unit="tokens", meaning="this request's predicted length", source=IndicatorSource.REQUEST
    ),
    Indicator(
        name="ttft_left_s",
        unit="s",
        meaning="until this request's first token is due; infinite without a target",
        source=IndicatorSource.REQUEST,
    ),
    Indicator(
        name="tpot_slo_s",
        unit="s",
        meaning="this request's target for the time per token; infinite without one",
        source=IndicatorSource.REQUEST,
    ),
    Indicator(
        name="late",
        unit="0 or 1",
        meaning="1 where this request dropped its deadlines: they cannot be kept, or it takes long under overload",
        source=IndicatorSource.REQUEST,
    ),
    Indicator(
        name="prefix_hit_tokens",
        unit="tokens",
        meaning="of this request's prompt that the prefix cache holds",
        source=IndicatorSource.PREFIX,
        otherwise=0.0,
    ),
    _flag(
        "adapter_active",
        "1 where this request's LoRA adapter is in GPU memory, or a request there has it; 1 without an adapter",
        IndicatorSource.ADAPTERS,
    ),
    _flag(
        "adapter_loaded",
        "1 where this request's LoRA adapter is in GPU or host memory; 1 without an adapter",
        IndicatorSource.ADAPTERS,
    ),
    Indicator(
        name="tier_tpot_s",
        unit="s",
        meaning="bound of the tier that the list of instances gives; infinite without one",
        source=IndicatorSource.LISTED,
        otherwise=math.inf,
    ),
    _flag(
        "tier_closed",
        "1 where it takes new requests of this tier only; 0 without a tier for a request without a TPOT target",
        IndicatorSource.LISTED,
    ),
    _flag("session_here", "whether the last request of this request's session went there", IndicatorSource.SESSION),
    _forecast("predicted_ttft_s", "s", "until this request's first token"),
    _forecast("predicted_e2e_s", "s", "until this request's last token"),
    _forecast("predicted_tpot_s", "s", "between this request's tokens"),
    _forecast("predicted_queue_s", "s", "until this request is scheduled"),
    _forecast("predicted_preemptions", "times", "this request will be preempted"),
    _forecast("others_preempted", "times", "requests there will be preempted because of this one"),
    _forecast("delay_sum_s", "s", "added to the latencies of all requests there, in sum"),
    _forecast("delay_worst_s", "s", "added to the latency of the request there that is delayed most"),
    _forecast("predicted_attained", "ratio", "that all tokens of this request come by their deadlines; 1 without any"),
    _forecast("others_missed", "requests", "there that miss a deadline because of this one, and would miss none else"),
    _forecast("gain_before", "gain", "weights of tokens that come by their deadlines there, in sum, without this one"),
    _forecast("gain_after", "gain", "the same with this request"),
    _forecast(
        "least_slack_s", "s", "to its deadline, at least, of a token that comes in time; of requests not late yet"
    ),
    _forecast(
        "offloaded_hit_tokens", "tokens", "of this request's prompt on off-loading tiers, behind the prefix hits"
    ),
    _forecast("predicted_unmeasured", "ratio", "of the forecast's time in batches outside of the profile's range"),
)

DERIVED = (
    _derived(
        "gain_added",
        "gain",
        "by this request: its own, less what others lose",
        ("gain_before", "gain_after"),
        lambda of: of["gain_after"] - of["gain_before"],
    ),
    _derived(
        "num_queued",
        "requests",
        "waiting or reserved",
        ("num_waiting", "num_reserved"),
        lambda of: of["num_waiting"] + of["num_reserved"],
    ),
    _derived(
        "batch_size",
        "requests",
        "running, waiting or reserved (LMetric's BS)",
        ("num_running", "num_queued"),
        lambda of: of["num_running"] + of["num_queued"],
    ),
    _derived(
        "tier_ratio",
        "ratio",
        "the instance's `tier_tpot_s`, or else its `least_tpot_slo_s`, over this request's TPOT target; infinite where "
        "it has neither a tier nor a request, or is closed without a tier",
        ("least_tpot_slo_s", "tpot_slo_s", "batch_size", "tier_tpot_s", "tier_closed"),
        tier_ratio,
    ),
    _derived(
        "tier_fits",
        "0 or 1",
        "1 where the instance's tier is that of this request or a stricter one, or where it has none yet; where it is "
        "closed, only that of this request fits",
        ("tier_ratio", "tier_closed"),
        tier_fits,
    ),
    _derived(
        "tiers_matter",
        "0 or 1",
        "1 where the mean of `efficient_step_s` is longer than the shortest TPOT target, of this request or those on "
        "any instance, so that strict targets cost more; also where that is not known, or the list has tiers",
        ("efficient_step_s", "least_tpot_slo_s", "tpot_slo_s", "tier_tpot_s"),
        tiers_matter,
    ),
    _derived(
        "num_used_blocks",
        "blocks",
        "that running requests hold",
        ("num_total_blocks", "num_free_blocks"),
        lambda of: of["num_total_blocks"] - of["num_free_blocks"],
    ),
    _derived(
        "num_needed_blocks",
        "blocks",
        "that the prompts of waiting and reserved requests will take",
        ("num_waiting_blocks", "num_reserved_blocks"),
        lambda of: of["num_waiting_blocks"] + of["num_reserved_blocks"],
    ),
    _derived(
        "prefix_hit_ratio",
        "ratio",
        "of this request's prompt that the prefix cache holds (LMetric's KV hit ratio)",
        ("prefix_hit_tokens", "prompt_tokens"),
        lambda of: of["prefix_hit_tokens"] / of.prompt_tokens,
    ),
    _derived(
        "new_prefill_tokens",
        "tokens",
        "of this request's prompt to be computed; an engine always computes at least the last one",
        ("prefix_hit_tokens", "prompt_tokens"),
        lambda of: np.maximum(of.prompt_tokens - of["prefix_hit_tokens"], 1.0),
    ),
    _derived(
        "cached_prefill_s",
        "s",
        "of prefill that `prefix_hit_tokens` save; 0 for a decode leg",
        ("prefix_hit_tokens", "prefill_token_s"),
        lambda of: of["prefix_hit_tokens"] * of["prefill_token_s"],
    ),
    _derived(
        "work_s",
        "s",
        "that this request takes of the instance: its prefill, and its part of the steps that decode it, on the one "
        "where most share a step",
        ("new_prefill_tokens", "prefill_token_s", "tag_tokens", "decode_step_s", "batch_size"),
        work_s,
    ),
    _derived(
        "tier_cost_s",
        "s",
        "that serving this request costs more in steps as short as a stricter tier's than in steps of its own TPOT "
        "target, by the mean of `step_overhead_s`; 0 where the tier is not stricter, infinite where that is unknown",
        ("tier_ratio", "tpot_slo_s", "step_overhead_s", "work_s"),
        tier_cost_s,
    ),
    _derived(
        "p_tokens",
        "tokens",
        "to be computed until this request's prefill ends (LMetric's P-token)",
        ("queued_prefill_tokens", "new_prefill_tokens"),
        lambda of: of["queued_prefill_tokens"] + of["new_prefill_tokens"],
    ),
    _derived(
        "total_tokens",
        "tokens",
        "of context, computed or queued (LMetric's #Tokens)",
        ("context_tokens", "queued_prefill_tokens"),
        lambda of: of["context_tokens"] + of["queued_prefill_tokens"],
    ),
)

INDICATORS = {indicator.name: indicator for indicator in (*REPORTED, *OTHERS, *DERIVED)}
INDEX_OF = {indicator.name: row for row, indicator in enumerate(REPORTED)}  # rows of the table of reported values
OTHERWISE = np.array([indicator.otherwise for indicator in REPORTED])


def require_indicator(name: str) -> Indicator:
    """Return an indicator by name; ValueError with the most similar known name if there is none."""
    if name in INDICATORS:
        return INDICATORS[name]
    raise ValueError(f"{name}: is no known indicator{did_you_mean(name, INDICATORS)}")


def roots_of(names: Iterable[str]) -> Iterator[Indicator]:
    """Yield the underived indicators that these depend on."""
    for name in names:
        indicator = require_indicator(name)
        if indicator.source is IndicatorSource.DERIVED:
            yield from roots_of(indicator.of)
        else:
            yield indicator
