"""The policies, one per file, in one table; some of prefill and decode instances score as another policy does.

A policy scores the candidates of a request: the lowest score wins, and of equal scores the first instance id. Its
parameters and its state between requests live in the closure that `make` returns. A seeded generator is an argument.
"""

from __future__ import annotations

from predictor.suggestions import unknown_choice
from scheduler.policies import (
    adapter_affinity,
    block,
    block_mean,
    block_ttft,
    deadlines,
    dynamo,
    filter,  # noqa: A004 - the policy's name
    gain,
    gorouting,
    hold,
    infaas,
    infaas_paper,
    jsq,
    least_loaded,
    linear,
    llumnix,
    llumnix_paper,
    lmetric,
    lmetric_hits,
    lmetric_tokens,
    marginal,
    min_qpm,
    minimal,
    pd_dynamo,
    polyserve,
    power_of_two,
    random,
    round_robin,
    slo,
)
from scheduler.policies.entry import Parameter, PolicyEntry, plain

__all__ = ["POLICIES", "entry_named"]

# Tiers are for decodes: a prefill leg goes where no other request misses a deadline and, of these, where it ends first.
# The queued prefill does not show that: it lacks what the running step computes.
EARLIEST_PREFILL = 'expr: score = "100 * others_missed + predicted_e2e_s", tie_break = "batch_size"'

POLICIES = {
    "block": PolicyEntry(
        make=plain(block.lowest_e2e),
        formula="predicted_e2e_s",
        source="Block §4.2, §5",
        needs=("predicted_e2e_s",),
    ),
    "hold": PolicyEntry(
        make=plain(hold.lowest_e2e),
        formula=f"predicted_e2e_s, held while no instance has {hold.ADMITS}",
        source="ours, after Block §4.2",
        needs=("predicted_e2e_s",),
        hold=hold.ADMITS,
    ),
    "block_ttft": PolicyEntry(
        make=plain(block_ttft.lowest_ttft),
        formula="predicted_ttft_s",
        source="llm-d's simulation-based rule: LMetric §4.6, figure 14",
        needs=("predicted_ttft_s",),
    ),
    "block_mean": PolicyEntry(
        make=plain(block_mean.lowest_mean),
        formula="predicted_e2e_s + delay_sum_s",
        source="Block §4.2, for the mean latency of all requests",
        needs=("predicted_e2e_s", "delay_sum_s"),
    ),
    "marginal": PolicyEntry(
        make=marginal.make,
        formula="predicted_e2e_s + lambda * delay_sum_s",
        source="ours, after Block §4.2",
        needs=("predicted_e2e_s", "delay_sum_s"),
        parameters={"lambda": Parameter(default=0.05, meaning="weight of the others' delays")},
    ),
    "lmetric": PolicyEntry(
        make=lmetric.make,
        formula="p_tokens * batch_size, without hotspots of the request's prefix",
        source="LMetric §5, figure 17b, §5.2",
        needs=("p_tokens", "batch_size", "prefix_hit_ratio"),
        parameters={
            "detector": Parameter(default=1, high=1, meaning="1 to exclude hotspots, 0 not to"),
            "window_s": Parameter(default=60.0, low=1.0, high=3600.0, meaning="window of the detector in seconds"),
            "least_hit_ratio": Parameter(default=0.5, high=1.0, meaning="minimum hit ratio of requests that count"),
        },
        tie_break="p_tokens",
    ),
    "lmetric_hits": PolicyEntry(
        make=plain(lmetric_hits.product),
        formula="(1 - prefix_hit_ratio) * batch_size",
        source="LMetric §5.1, figure 18, an ablation",
        needs=("prefix_hit_ratio", "batch_size"),
    ),
    "lmetric_tokens": PolicyEntry(
        make=plain(lmetric_tokens.product),
        formula="p_tokens * total_tokens",
        source="LMetric §5.1, figure 19, an ablation",
        needs=("p_tokens", "total_tokens"),
        tie_break="p_tokens",
    ),
    "linear": PolicyEntry(
        make=linear.make,
        formula="lambda * (1 - prefix_hit_ratio) + (1 - lambda) * batch_size / highest(batch_size)",
        source="Bailian: LMetric §4.2, figure 6b, §4.4",
        needs=("prefix_hit_ratio", "batch_size"),
        parameters={"lambda": Parameter(default=0.7, high=1.0, meaning="weight of cache hits")},
    ),
    "dynamo": PolicyEntry(
        make=dynamo.make,
        formula="lambda * p_tokens / highest(p_tokens) + (1 - lambda) * total_tokens / highest(total_tokens)",
        source="Dynamo: LMetric §6, baselines",
        needs=("p_tokens", "total_tokens"),
        parameters={"lambda": Parameter(default=0.5, high=1.0, meaning="weight of prefill")},
    ),
    "filter": PolicyEntry(
        make=filter.make,
        formula="batch_size if highest(batch_size) - lowest(batch_size) > range else 1 - prefix_hit_ratio",
        source="AIBrix: LMetric §4.5, figure 13",
        needs=("batch_size", "prefix_hit_ratio"),
        parameters={"range": Parameter(default=8, meaning="range of batch sizes above which only balance counts")},
        tie_break="batch_size",
    ),
    "llumnix": PolicyEntry(
        make=plain(llumnix.freest),
        formula="-(num_free_blocks - num_needed_blocks) / max(num_running, 1)",
        source="Llumnix- as Block's published code runs it: Block §5",
        needs=("num_free_blocks", "num_needed_blocks", "num_running"),
    ),
    "llumnix_paper": PolicyEntry(
        make=plain(llumnix_paper.lightest),
        formula="(num_used_blocks + num_needed_blocks) / max(num_running, 1)",
        source="Llumnix- as printed: Block §5",
        needs=("num_used_blocks", "num_needed_blocks", "num_running"),
    ),
    "infaas": PolicyEntry(
        make=plain(infaas.freest),
        formula="-num_free_blocks / max(num_running, 1)",
        source="INFaaS++, llumnix without waiting requests: Block §5",
        needs=("num_free_blocks", "num_running"),
    ),
    "infaas_paper": PolicyEntry(
        make=plain(infaas_paper.lightest),
        formula="num_used_blocks / max(num_running, 1)",
        source="INFaaS++ as printed: Block §5",
        needs=("num_used_blocks", "num_running"),
    ),
    "jsq": PolicyEntry(
        make=jsq.make,
        formula="waiting_weight * num_queued + num_running",
        source="vLLM: LMetric §4.2, figure 6a",
        needs=("num_queued", "num_running"),
        parameters={"waiting_weight": Parameter(default=4.0, meaning="weight of waiting requests; running ones: 1")},
    ),
    "least_loaded": PolicyEntry(
        make=plain(least_loaded.fewest), formula="batch_size", source="Dynamo, SGLang and others", needs=("batch_size",)
    ),
    "power_of_two": PolicyEntry(
        make=plain(power_of_two.fewer),
        formula="batch_size, of two random candidates",
        source="Richa et al. 2000; SGLang, vLLM's router",
        needs=("batch_size",),
        sample=2,
    ),
    "min_qpm": PolicyEntry(
        make=plain(min_qpm.fewest),
        formula="requests_per_minute",
        source="LiteLLM: Block §5",
        needs=("requests_per_minute",),
    ),
    "pd_least": PolicyEntry(
        make=plain(least_loaded.fewest),
        formula="batch_size; prefill: queued_prefill_tokens",
        source="the usual rule for pools of prefill and decode instances",
        needs=("batch_size",),
        prefill='expr: score = "queued_prefill_tokens", tie_break = "batch_size"',
    ),
    "pd_threshold": PolicyEntry(
        make=linear.make,
        formula="lambda * (1 - prefix_hit_ratio) + (1 - lambda) * batch_size / highest(batch_size)",
        source="llm-d's router: prefix-based-pd-decider",
        needs=("prefix_hit_ratio", "batch_size"),
        parameters={
            "lambda": Parameter(default=0.5, high=1.0, meaning="weight of cache hits"),
            "non_cached_tokens": Parameter(
                default=16, meaning="uncached prompt tokens from which on there are two legs"
            ),
        },
        disaggregate="new_prefill_tokens >= {non_cached_tokens}",
    ),
    "pd_dynamo": PolicyEntry(
        make=plain(pd_dynamo.lightest),
        formula="total_tokens; prefill: dynamo",
        source="Dynamo's conditional disaggregation",
        needs=("total_tokens",),
        parameters={
            "isl": Parameter(default=2048, meaning="uncached prompt tokens from which on there are two legs"),
            "ratio": Parameter(default=0.7, high=1.0, meaning="uncached share of the prompt from which on there are"),
        },
        prefill="dynamo",
        disaggregate="new_prefill_tokens >= {isl} or 1 - prefix_hit_ratio >= {ratio}",
    ),
    "slo": PolicyEntry(
        make=slo.make,
        formula="affinity * tier distance + load - hits * cached_prefill_s, load = decode_step_s + lambda * "
        "queued_prefill_s, the negative load where the list of instances has tiers, held "
        f"until {deadlines.KEEPS}, the tier fits and the queue is short",
        source="ours",
        needs=(
            "tier_ratio",
            "tier_closed",
            "tier_cost_s",
            "tiers_matter",
            "decode_step_s",
            "queued_prefill_s",
            "cached_prefill_s",
        ),
        parameters={
            "affinity": Parameter(default=1000.0, meaning="weight of the tier distance; 0: no tiers"),
            "lambda": Parameter(default=1.0, meaning="weight of queued prefill"),
            "hits": Parameter(default=3.0, meaning="weight of the prefill that a cached prefix saves"),
            "backlog": Parameter(
                default=deadlines.BACKLOG_S,
                meaning="seconds that a request may wait in an engine, rather than here",
            ),
            "slack": Parameter(
                default=deadlines.SLACK_S,
                meaning="seconds before their deadlines that best effort leaves to all others",
            ),
            "late_slack": Parameter(default=deadlines.LATE_SLACK_S, meaning="the same of late requests"),
            "long": Parameter(
                default=2.0,
                meaning="times the mean work: longer requests drop their deadlines under overload; 0: none does",
            ),
        },
        hold=f"{deadlines.ADMITS} and {deadlines.WITH_SHORT_QUEUE}",
        no_other_misses=(
            f"{deadlines.NO_OTHER_MISSES} and {deadlines.BACKGROUND_WITH_SHORT_QUEUE} and {deadlines.LEAVES_SLACK}"
        ),
        eligible=deadlines.ELIGIBLE,
        least_slack=("slack", "late_slack"),
        prefill=EARLIEST_PREFILL,
    ),
    "polyserve": PolicyEntry(
        make=polyserve.make,
        formula=f"tier (own, stricter, empty), then -(decode_step_s + queued_prefill_s), held until {polyserve.ADMITS}",
        source="PolyServe §4",
        needs=("tier_ratio", "tier_closed", "decode_step_s", "queued_prefill_s"),
        parameters={
            "gradient": Parameter(default=1, high=1, meaning="1: the busiest instance first, 0: the least loaded"),
            "promotion": Parameter(default=1, high=1, meaning="1: to stricter tiers where the own one is full, 0: not"),
        },
        hold=polyserve.ADMITS,
        no_other_misses=deadlines.NO_OTHER_MISSES,
        eligible=deadlines.FITS_TIER,
        prefill=EARLIEST_PREFILL,
    ),
    "gorouting": PolicyEntry(
        make=gorouting.make,
        formula="most gain_added, then queued_prefill_s: least of light instances, most of others with time to spare",
        source="ProServe §4.3, algorithm 2",
        needs=("gain_added", "ttft_left_s", "queued_prefill_s", "predicted_ttft_s"),
        parameters={
            "alpha": Parameter(default=0.9, high=1.0, meaning="share of the most added gain that suffices"),
            "mu": Parameter(default=0.2, high=1.0, meaning="share of the TTFT target below which an instance is light"),
            "lambda": Parameter(default=0.8, meaning="share of the TTFT target above which an instance is loaded"),
        },
    ),
    "gain": PolicyEntry(
        make=plain(gain.most_added),
        formula="-gain_added",
        source="ours, after ProServe §2",
        needs=("gain_added", "predicted_e2e_s"),
        tie_break="predicted_e2e_s",
    ),
    "adapter_affinity": PolicyEntry(
        make=adapter_affinity.make,
        formula="predicted_e2e_s, of instances with the adapter active first while within slack of the best",
        source="ours",
        needs=("predicted_e2e_s", "adapter_active"),
        parameters={
            "slack": Parameter(
                default=0.1,
                meaning="share of the best predicted e2e by which an instance with the adapter may be slower",
            )
        },
    ),
    "minimal": PolicyEntry(
        make=plain(minimal.shortest_step), formula="decode_step_s", source="PolyServe §5.1", needs=("decode_step_s",)
    ),
    "round_robin": PolicyEntry(make=round_robin.make, formula="each in turn", source="Block §5"),
    "random": PolicyEntry(make=random.make, formula="uniform", source="Block §5"),
}


def entry_named(name: str) -> PolicyEntry:
    """Return a policy by name; ValueError with the most similar known name if there is none."""
    if name in POLICIES:
        return POLICIES[name]
    raise unknown_choice("policy", name, POLICIES)
