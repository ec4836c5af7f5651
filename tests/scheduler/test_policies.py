"""Every policy on cases worked out by hand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

import scheduler.policies
from predictor.forecast_result import ALL_KEPT, FIRST_TOKEN, OTHERS_KEPT, OTHERS_KEPT_AND_START, TO_THE_END
from scheduler.candidates import Candidates, RequestIndicators
from scheduler.indicators import IndicatorSource, require_indicator, roots_of
from scheduler.instance_table import InstanceTable
from scheduler.policies import POLICIES
from scheduler.policy import policy_from
from tests.fleets import LETTERS, fleet, random_fleet

Columns = Mapping[str, Sequence[float | None]]
HUNDRED = RequestIndicators(prompt_tokens=100)
NOT_FROM_PAPERS = ("least_loaded", "pd_least", "pd_dynamo", "adapter_affinity")
TENTH = RequestIndicators(prompt_tokens=100, due_s=1.0, tpot_slo_s=0.1)
SCORES_AS = {"pd_least": "least_loaded", "pd_threshold": "linear"}
STATEFUL = ("round_robin", "random", "power_of_two", "lmetric")


def chosen(text: str, columns: Columns, request: RequestIndicators = TENTH) -> str:
    """Return the instance that a new policy chooses."""
    policy = policy_from(text, seed=1)
    candidates = policy.shortlist(fleet(request=request, **columns))
    return candidates.instance_id(policy.choose(candidates))


def ranked(text: str, columns: Columns) -> str:
    """Return the instances in the order of a new policy, as one word."""
    policy = policy_from(text, seed=1)
    candidates = policy.shortlist(fleet(request=TENTH, **columns))
    order = policy.order(candidates, policy.scores(candidates))
    return "".join(candidates.instance_id(place) for place in order)


NOTHING_QUEUED: Columns = {"queued_prefill_tokens": [0, 0, 0], "num_waiting": [0, 0, 0]}

# Instances of the request's tier, a stricter one, a looser one and an empty one.
TIERS: Columns = {
    "least_tpot_slo_s": [0.1, 0.05, 0.5, math.inf],
    "num_running": [1, 1, 1, 0],
    "num_waiting": [0, 0, 0, 0],
    "queued_prefill_s": [0.0, 0.0, 0.0, 0.0],
    "decode_step_s": [0.04, 0.01, 0.02, 0.0],
}
GIVEN: Columns = {**TIERS, "tier_tpot_s": [0.02, 0.5, 0.1, 0.1], "tier_closed": [0, 0, 0, 0]}  # whatever runs there
PENDING: Columns = {
    **GIVEN,
    "tier_tpot_s": [0.05, math.inf, 0.1, 0.5],
    "tier_closed": [0, 0, 1, 0],
    "num_running": [0] * 4,
}

# By policy: its parameters, what is known of instances a, b and c, and in which order it ranks them.
TABLES: dict[str, list[tuple[str, Columns, str]]] = {
    # The most that is added; of equals the one that ends first.
    "gain": [
        (
            "",
            {"gain_before": [5.0, 5.0, 0.0], "gain_after": [6.0, 8.0, 1.0], "predicted_e2e_s": [2.0, 9.0, 1.0]},
            "bca",
        ),
    ],
    "minimal": [("", {"decode_step_s": [0.03, 0.01, 0.02]}, "bca")],
    # Light ones, the least loaded first; then those with time to spare, the busiest first; then the least loaded.
    "gorouting": [
        (
            "",
            {
                "gain_before": [0.0] * 3,
                "gain_after": [9.0, 9.0, 9.0],
                "queued_prefill_s": [0.1, 0.05, 0.9],
                "predicted_ttft_s": [0.2, 0.2, 0.9],
            },
            "bac",
        ),
        (
            "",
            {
                "gain_before": [0.0] * 3,
                "gain_after": [9.0, 9.0, 9.0],
                "queued_prefill_s": [0.3, 0.4, 0.9],
                "predicted_ttft_s": [0.4, 0.5, 0.95],
            },
            "bac",
        ),
        (
            "",
            {
                "gain_before": [0.0] * 3,
                "gain_after": [9.0, 9.0, 1.0],
                "queued_prefill_s": [0.9, 0.95, 0.01],
                "predicted_ttft_s": [0.95, 0.99, 0.1],
            },
            "abc",
        ),
        (
            "alpha = 0",
            {
                "gain_before": [0.0] * 3,
                "gain_after": [9.0, 9.0, 1.0],
                "queued_prefill_s": [0.9, 0.95, 0.01],
                "predicted_ttft_s": [0.95, 0.99, 0.1],
            },
            "cab",
        ),
    ],
    # The own tier, then an empty instance, then others by distance; in a tier the least loaded one.
    "slo": [
        ("", TIERS, "adbc"),
        ("affinity = 0", TIERS, "dbca"),
        ("", GIVEN, "cdab"),
        ("", PENDING, "abcd"),
        ("", {**TIERS, "least_tpot_slo_s": [0.1] * 4, "num_running": [1] * 4}, "dbca"),
        (
            "lambda = 0",
            {**TIERS, "least_tpot_slo_s": [0.1] * 4, "num_running": [1] * 4, "queued_prefill_s": [0.0, 0.0, 0.0, 9.0]},
            "dbca",
        ),
    ],
    # Where instances have tiers, these count; a closed instance comes after all of its tier.
    # The own tier, the busiest first; then stricter ones, the nearest first; then an empty one; looser ones last.
    "polyserve": [
        ("", TIERS, "abdc"),
        ("promotion = 0", TIERS, "adcb"),
        ("", {**TIERS, "least_tpot_slo_s": [0.1] * 4, "num_running": [1] * 4}, "acbd"),
        ("gradient = 0", {**TIERS, "least_tpot_slo_s": [0.1] * 4, "num_running": [1] * 4}, "dbca"),
        ("", {**TIERS, "least_tpot_slo_s": [0.02, 0.05, 0.5, 0.01], "num_running": [1] * 4}, "badc"),
        ("", GIVEN, "cdab"),
        ("", PENDING, "acbd"),
        ("", {**PENDING, "tier_closed": [1, 1, 0, 1]}, "cabd"),
    ],
    # The lowest forecast first; then those that never end, then those without a forecast.
    "block": [
        ("", {"predicted_e2e_s": [3.0, 2.0, 4.0]}, "bac"),
        ("", {"predicted_e2e_s": [2.0, 2.0, 1.0]}, "cab"),
        ("", {"predicted_e2e_s": [None, math.inf, 9.0]}, "cba"),
    ],
    # The same; its condition of admission does not rank.
    "hold": [("", {"predicted_e2e_s": [3.0, 2.0, 4.0]}, "bac")],
    "block_ttft": [
        ("", {"predicted_ttft_s": [0.3, 0.1, 0.2], "predicted_e2e_s": [1.0, 9.0, 9.0]}, "bca"),
        ("", {"predicted_ttft_s": [0.2, None, 0.2]}, "acb"),
    ],
    "block_mean": [
        ("", {"predicted_e2e_s": [1.0, 2.0, 3.0], "delay_sum_s": [5.0, 3.5, 0.0]}, "cba"),
        ("", {"predicted_e2e_s": [1.0, 9.0], "delay_sum_s": [None, 9.0]}, "ba"),
    ],
    "marginal": [
        ("", {"predicted_e2e_s": [1.0, 1.1, 3.0], "delay_sum_s": [5.0, 1.0, 0.0]}, "bac"),  # 1.25, 1.15, 3
        ("lambda = 0", {"predicted_e2e_s": [1.0, 1.1, 3.0], "delay_sum_s": [5.0, 1.0, 0.0]}, "abc"),
        ("lambda = 1", {"predicted_e2e_s": [1.0, 1.1, 3.0], "delay_sum_s": [5.0, 1.0, 0.0]}, "bca"),  # 6, 2.1, 3
        ("", {"predicted_e2e_s": [1.0, 2.0], "delay_sum_s": [None, 0.0]}, "ba"),
    ],
    "lmetric": [
        # P-token x batch size: (100 + 100) x 4, (0 + 100) x 5, (300 + 20) x 2.
        (
            "",
            {
                "queued_prefill_tokens": [100, 0, 300],
                "prefix_hit_tokens": [0, 0, 80],
                "num_running": [3, 5, 1],
                "num_waiting": [1, 0, 1],
            },
            "bca",
        ),
        # Nobody is busy: the product is zero for all, and the one that has the prefix cached is to be preferred.
        ("", {**NOTHING_QUEUED, "prefix_hit_tokens": [0, 96, 96], "num_running": [0, 0, 0]}, "bca"),
        # Whole hits still cost the last token: 1 x 40 against 100 x 1 and 50 x 1.
        ("", {**NOTHING_QUEUED, "prefix_hit_tokens": [0, 50, 100], "num_running": [1, 1, 40]}, "cba"),
        # A reserved request is one that is there.
        ("", {**NOTHING_QUEUED, "num_running": [2, 2, 2], "num_reserved": [1, 0, 2]}, "bac"),
        # What is cached is not known of a: no guess is made.
        ("", {**NOTHING_QUEUED, "prefix_hit_tokens": [None, 0, 50], "num_running": [1, 9, 9]}, "cba"),
    ],
    "lmetric_hits": [
        # 1 - hit ratio: 1 x 3, 0.2 x 10, 0.5 x 8.
        ("", {**NOTHING_QUEUED, "prefix_hit_tokens": [0, 80, 50], "num_running": [3, 10, 8]}, "bac"),
        # Blind to what is queued, and to load where all is cached.
        (
            "",
            {
                "queued_prefill_tokens": [900, 0, 0],
                "prefix_hit_tokens": [100, 90, 0],
                "num_running": [40, 1, 1],
                "num_waiting": [0, 0, 0],
            },
            "abc",
        ),
    ],
    "lmetric_tokens": [
        # P-token x total tokens: 100 x 1000, 200 x 600, 100 x 2000.
        ("", {"queued_prefill_tokens": [0, 100, 0], "context_tokens": [1000, 500, 2000]}, "abc"),
        # Empty ones are equal in that: the less to be computed there, the better.
        ("", {"queued_prefill_tokens": [0, 0], "context_tokens": [0, 0], "prefix_hit_tokens": [0, 16]}, "ba"),
    ],
    "linear": [
        # λ = 0.7: 0.7 + 0.3 x 2/10, 0.7 x 0.2 + 0.3, 0.7 x 0.5 + 0.3 x 5/10.
        ("", {**NOTHING_QUEUED, "prefix_hit_tokens": [0, 80, 50], "num_running": [2, 10, 5]}, "bca"),
        ("lambda=0", {**NOTHING_QUEUED, "prefix_hit_tokens": [0, 80, 50], "num_running": [2, 9, 5]}, "acb"),
        ("lambda=1", {**NOTHING_QUEUED, "prefix_hit_tokens": [0, 80, 50], "num_running": [2, 9, 5]}, "bca"),
        # All idle: no division by zero, and the hits decide.
        ("", {"prefix_hit_tokens": [0, 80], "num_running": [0, 0], "num_waiting": [0, 0]}, "ba"),
        # The highest is the highest that is known: 0.7 x 0.5 + 0.3, not known, 0.7 + 0.3 x 2/4.
        ("", {**NOTHING_QUEUED, "prefix_hit_tokens": [50, 0, 0], "num_running": [4, None, 2]}, "acb"),
    ],
    "dynamo": [
        # λ = 0.5: P-tokens 100, 400, 200 of 400; totals 1000, 300, 700 of 1000: 0.625, 0.65, 0.6.
        ("", {"queued_prefill_tokens": [0, 300, 100], "context_tokens": [1000, 0, 600]}, "cab"),
        ("lambda = 1", {"queued_prefill_tokens": [0, 300, 100], "context_tokens": [1000, 0, 600]}, "acb"),
        ("lambda = 0", {"queued_prefill_tokens": [0, 300, 100], "context_tokens": [1000, 0, 600]}, "bca"),
        # All empty: no division by zero.
        ("", {"queued_prefill_tokens": [0, 0], "context_tokens": [0, 0], "prefix_hit_tokens": [0, 50]}, "ba"),
        ("", {"queued_prefill_tokens": [0, 0], "context_tokens": [None, 900]}, "ba"),
    ],
    "filter": [
        # Batch sizes 1 to 9 range over 8, which is not more than 8: the best hits; over 9: the least loaded.
        ("", {**NOTHING_QUEUED, "prefix_hit_tokens": [0, 10, 90], "num_running": [1, 5, 9]}, "cba"),
        ("", {**NOTHING_QUEUED, "prefix_hit_tokens": [0, 10, 90], "num_running": [1, 5, 10]}, "abc"),
        ("range=3", {**NOTHING_QUEUED, "prefix_hit_tokens": [0, 10, 90], "num_running": [1, 3, 9]}, "abc"),
        # Without hits anywhere, the smaller batch.
        ("", {**NOTHING_QUEUED, "prefix_hit_tokens": [0, 0, 0], "num_running": [3, 2, 4]}, "bac"),
        # Whose size is not known widens no range, and the best hits do not help it.
        ("", {**NOTHING_QUEUED, "prefix_hit_tokens": [90, 10, 20], "num_running": [None, 2, 4]}, "cba"),
    ],
    "llumnix": [
        # Free after the waiting, for each running request: (500 - 100)/10, (300 - 0)/5, (900 - 0)/30.
        (
            "",
            {"num_free_blocks": [500, 300, 900], "num_waiting_blocks": [100, 0, 0], "num_running": [10, 5, 30]},
            "bac",
        ),
        # An idle instance counts as one that runs one.
        ("", {"num_free_blocks": [1000, 1000], "num_waiting_blocks": [0, 0], "num_running": [1, 0]}, "ab"),
        # More is needed than is free: last, however many run there.
        (
            "",
            {"num_free_blocks": [0, 1, 10], "num_waiting_blocks": [500, 0, 11], "num_running": [48, 48, 1]},
            "bca",
        ),
        # What is reserved is needed as well.
        (
            "",
            {
                "num_free_blocks": [9, 9],
                "num_waiting_blocks": [0, 0],
                "num_reserved_blocks": [8, 0],
                "num_running": [1, 1],
            },
            "ba",
        ),
        # Nothing free is better than less than nothing, and that the worse the less.
        ("", {"num_free_blocks": [-9, 0, -1], "num_waiting_blocks": [0, 0, 0], "num_running": [9, 9, 9]}, "bca"),
        ("", {"num_free_blocks": [-48, 1], "num_waiting_blocks": [0, 0], "num_running": [48, 48]}, "ba"),
    ],
    "llumnix_paper": [
        # As printed: (100 + 20)/1, (900 + 0)/48, (500 + 0)/5: the full one looks best.
        (
            "",
            {
                "num_total_blocks": [1000, 1000, 1000],
                "num_free_blocks": [900, 100, 500],
                "num_waiting_blocks": [20, 0, 0],
                "num_running": [1, 48, 5],
            },
            "bca",
        ),
        # Less than nothing free is more than all used: 110 against 100, over five each.
        (
            "",
            {
                "num_total_blocks": [100, 100],
                "num_free_blocks": [-10, 0],
                "num_waiting_blocks": [0, 0],
                "num_running": [5, 5],
            },
            "ba",
        ),
    ],
    "infaas": [
        ("", {"num_free_blocks": [500, 300, 900], "num_running": [10, 5, 30]}, "bac"),
        # Blind to what waits; idle counts as one that runs one.
        ("", {"num_free_blocks": [500, 500, 600], "num_waiting_blocks": [400, 0, 0], "num_running": [1, 0, 2]}, "abc"),
        # Less than nothing free comes last, however many run there.
        ("", {"num_free_blocks": [-1, 0, 1], "num_running": [48, 1, 48]}, "cba"),
    ],
    "infaas_paper": [
        ("", {"num_total_blocks": [1000, 1000], "num_free_blocks": [900, 100], "num_running": [1, 48]}, "ba"),
        ("", {"num_total_blocks": [100, 100], "num_free_blocks": [-10, 0], "num_running": [5, 5]}, "ba"),
    ],
    "jsq": [
        # 4 x waiting + running: 4 x 1 + 10, 4 x 3 + 1, 4 x 0 + 12.
        ("", {"num_waiting": [1, 3, 0], "num_running": [10, 1, 12]}, "cba"),
        ("waiting_weight = 1", {"num_waiting": [1, 3, 0], "num_running": [10, 1, 12]}, "bac"),
        ("", {"num_waiting": [0, 0], "num_reserved": [1, 0], "num_running": [0, 3]}, "ba"),
        ("", {"num_waiting": [1, 0, 0], "num_running": [0, 4, None]}, "abc"),  # 4 and 4
    ],
    "least_loaded": [
        ("", {"num_running": [3, 2, 4], "num_waiting": [0, 2, 0], "num_reserved": [0, 0, 1]}, "abc"),
        ("", {"num_running": [3, 3, 0], "num_waiting": [0, 0, None]}, "abc"),
    ],
    # Instances of whole requests and decode legs; tests/scheduler/test_disaggregation.py has the rest of these rules.
    "pd_least": [
        ("", {"num_running": [3, 2, 4], "num_waiting": [0, 2, 0], "num_reserved": [0, 0, 1]}, "abc"),
        ("", {"num_running": [3, 1, 2], "num_waiting": [0, 0, 0], "queued_prefill_tokens": [0, 900, 0]}, "bca"),
    ],
    "pd_threshold": [
        # λ = 0.5: hits of 0, 50 and 0 %, batches of 1, 4 and 2 of at most 4: 0.625, 0.75, 0.75.
        ("", {**NOTHING_QUEUED, "prefix_hit_tokens": [0, 50, 0], "num_running": [1, 4, 2]}, "abc"),
        ("lambda = 1", {**NOTHING_QUEUED, "prefix_hit_tokens": [0, 50, 0], "num_running": [1, 4, 2]}, "bac"),
        ("lambda = 0", {**NOTHING_QUEUED, "prefix_hit_tokens": [0, 50, 0], "num_running": [1, 4, 2]}, "acb"),
    ],
    "pd_dynamo": [
        ("", {"queued_prefill_tokens": [0, 300, 100], "context_tokens": [1000, 0, 600]}, "bca"),
        ("", {"queued_prefill_tokens": [0, 0], "context_tokens": [9, 9], "prefix_hit_tokens": [0, 99]}, "ab"),
    ],
    "adapter_affinity": [  # where the adapter is, is in test_adapters.py
        ("", {"predicted_e2e_s": [3, 1, 2]}, "bca"),
        ("", {"predicted_e2e_s": [3, None, 2]}, "cab"),
    ],
    "min_qpm": [
        ("", {"requests_per_minute": [30, 10, 20]}, "bca"),
        ("", {"requests_per_minute": [10, 10, 0], "num_running": [0, 0, 99]}, "cab"),
        ("", {"requests_per_minute": [2, None, 1]}, "bca"),  # this scheduler's own count is known, and it is zero
    ],
    # Without looking.
    "round_robin": [("", {"num_running": [30, 10, 20]}, "abc")],
}
CASES = [
    (f"{name}: {parameters}" if parameters else name, columns, expected)
    for name, table in TABLES.items()
    for parameters, columns, expected in table
]


@pytest.mark.parametrize(("text", "columns", "expected"), CASES)
def test_a_policy_ranks_as_worked_out_by_hand(text: str, columns: Columns, expected: str) -> None:
    """The lowest score first, equals by id, what is not known last."""
    assert ranked(text, columns) == expected
    assert chosen(text, columns) == expected[0]


@pytest.mark.parametrize(("name", "order_of_loose"), [("slo", "ba"), ("polyserve", "ab")])
def test_a_closed_pool_takes_requests_without_a_target_for_the_time_per_token(name: str, order_of_loose: str) -> None:
    """It is closed to the requests of tiers only; `polyserve` prefers stricter tiers to idle instances."""
    policy = policy_from(name, seed=1)

    def admitting(tpot_slo_s: float) -> tuple[str, str]:
        table = InstanceTable("ab")
        reported = {"num_waiting": 0, "queued_prefill_s": 0.0, "decode_step_s": 0.02}
        table.replace("a", {**reported, "num_running": 5, "least_tpot_slo_s": 0.05}, 0.0)
        table.replace("b", {**reported, "num_running": 0}, 0.0)
        table.set_tier("a", 0.05, closed=False)
        table.set_tier("b", math.inf, closed=True)
        request = RequestIndicators(prompt_tokens=100, due_s=1.0, tpot_slo_s=tpot_slo_s)
        candidates = table.candidates(request, 0.0)
        candidates.add(
            {
                "predicted_attained": np.ones(2),
                "others_missed": np.zeros(2),
                "predicted_preemptions": np.zeros(2),
                "others_preempted": np.zeros(2),
                "predicted_queue_s": np.zeros(2),
            }
        )
        order = policy.order(candidates, policy.scores(candidates))
        admits = policy.admits(candidates)
        return ("".join("ab"[place] for place in order), "".join("ab"[place] for place in np.flatnonzero(admits)))

    assert admitting(math.inf) == (order_of_loose, "ab")
    assert admitting(0.05) == ("ab", "a")


def test_every_policy_has_a_case_or_a_test_of_its_own() -> None:
    """No policy joins the table without one."""
    assert set(POLICIES) - set(TABLES) == {"random", "power_of_two"}


@pytest.mark.parametrize("name", [name for name in TABLES if name != "gorouting"])  # random where nothing is gained
def test_equals_go_by_their_ids(name: str) -> None:
    """Whether all is known of three that are alike, or nothing at all."""
    columns: Columns = {root.name: [7.0] * 3 for root in _roots(name) if root.name != "prompt_tokens"}
    assert ranked(name, columns or {"num_running": [7.0] * 3}) == "abc"
    assert ranked(name, {"num_running": [None] * 3}) == "abc"


@pytest.mark.parametrize("name", POLICIES)
def test_one_instance_is_chosen_whatever_is_known_of_it(name: str) -> None:
    """A lone instance wins also where nobody knows anything."""
    assert chosen(name, {"num_running": [None]}) == "a"


@pytest.mark.parametrize(
    "name", [name for name in TABLES if name not in ("min_qpm", "round_robin", "gorouting", "minimal")]
)
def test_what_nobody_knows_never_wins(name: str) -> None:
    """Whatever indicator of an instance is missing, those that are known well come first."""
    needs = [root.name for root in _roots(name) if root.source not in (IndicatorSource.REQUEST, IndicatorSource.LISTED)]
    assumed = (
        "prompt_tokens",
        "prefix_hit_tokens",
        "efficient_step_s",
        "step_overhead_s",
    )  # the last two as on other instances
    reported = {need: [None, 5.0, 5.0] for need in needs if need not in assumed}
    at_risk = [need for need in reported if require_indicator(need).otherwise != 0.0]  # unknown is 0 for others
    assert at_risk
    for missing in at_risk:
        columns = {need: [5.0, 5.0, 5.0] for need in reported} | {missing: reported[missing]}
        assert chosen(name, columns) == "b", missing
        assert ranked(name, columns) == "bca", missing


def _roots(name: str) -> list:
    return list(dict.fromkeys(roots_of(POLICIES[name].needs)))


BEST: dict[str, Columns] = {  # what makes an instance better than one of which all is fives, by policy
    **{name: {"num_running": [0.0, 5.0, 5.0]} for name in ("lmetric", "lmetric_hits", "linear", "jsq", "least_loaded")},
    **{name: {"num_running": [0.0, 5.0, 5.0]} for name in ("pd_least", "pd_threshold")},
    **{name: {"num_free_blocks": [9.0, 5.0, 5.0]} for name in ("llumnix", "infaas", "llumnix_paper", "infaas_paper")},
    **{name: {"context_tokens": [0.0, 5.0, 5.0]} for name in ("lmetric_tokens", "dynamo", "pd_dynamo")},
    "filter": {"num_running": [0.0, 50.0, 50.0]},
    "min_qpm": {"requests_per_minute": [0.0, 5.0, 5.0]},
    "power_of_two": {"num_running": [0.0, 5.0, 5.0]},
    "minimal": {"decode_step_s": [0.0, 5.0, 5.0]},
    "slo": {"decode_step_s": [0.0, 5.0, 5.0]},
    "polyserve": {"decode_step_s": [9.0, 5.0, 5.0]},
    "gorouting": {"queued_prefill_s": [0.0, 5.0, 5.0], "gain_after": [9.0, 9.0, 9.0]},
}


def test_stale_cases_cover_all_that_read_what_instances_tell() -> None:
    """A policy that joins them needs one."""
    assert set(BEST) == {
        name for name in POLICIES if any(root.source is IndicatorSource.REPORTED for root in _roots(name))
    }


@pytest.mark.parametrize("name", BEST)
def test_what_is_stale_counts_unless_a_filter_says_otherwise(name: str) -> None:
    """The best one reported of itself long ago; a filter by age leaves it out, unless all are as old."""
    gains = {"gain_before": [5.0] * 3, "predicted_ttft_s": [5.0] * 3}
    columns = (
        gains
        | {root.name: [5.0] * 3 for root in _roots(name) if root.source is IndicatorSource.REPORTED}
        | dict(BEST[name])
    )

    def first(text: str, ages_s: list[float]) -> str:
        policy, candidates = policy_from(text, seed=1), fleet(request=HUNDRED, **columns)
        candidates.known.reported_s[:] = [-age_s for age_s in ages_s]
        looked = policy.shortlist(candidates)
        return looked.instance_id(policy.choose(looked))

    everybody = ", sample = 3" if name == "power_of_two" else ""
    fresh = f"{name}: filter = 'age_s < 5'{everybody}"
    assert first(fresh, [0.0, 0.0, 0.0]) == "a"
    assert first(fresh, [30.0, 0.0, 0.0]) == "b"
    assert first(fresh, [math.inf, 9.0, 1.0]) == "c"  # nothing was ever heard of a
    assert first(fresh, [30.0, 30.0, 30.0]) == "a"
    assert first(f"{name}: filter = 'age_s >= 0'{everybody}", [30.0, 0.0, 1.0]) == "a"


@pytest.mark.parametrize("name", ["llumnix", "infaas"])
def test_who_is_short_of_blocks_never_comes_before_who_is_not(name: str) -> None:
    """Also where an engine tells of less than no free block, and whatever else it tells."""
    rng, policy = np.random.default_rng(7), policy_from(name)
    for _ in range(2000):
        num = int(rng.integers(2, 17))
        free, waiting = rng.integers(-20, 20, num), rng.integers(0, 20, num)
        running = rng.integers(0, 50, num)
        candidates = fleet(num_free_blocks=free, num_waiting_blocks=waiting, num_running=running)
        short = free - waiting < 0 if name == "llumnix" else free < 0
        rows = policy.order(candidates, policy.scores(candidates))
        assert short[rows].tolist() == sorted(short.tolist())


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in STATEFUL])
def test_the_winner_is_the_first_of_the_ranking(name: str) -> None:
    """The fast way and the full order agree, on states full of ties and holes; an unknown score is never first."""
    rng, policy = np.random.default_rng(5), policy_from(name, seed=1)
    for _ in range(300):
        candidates = random_fleet(rng)
        scores = policy.scores(candidates)
        order = policy.order(candidates, scores)
        assert policy.best(candidates, scores) == order[0]
        assert np.isnan(scores[order[0]]) == np.isnan(scores).all()
        assert sorted(order.tolist()) == list(range(len(candidates)))


@pytest.mark.parametrize("name", POLICIES)
def test_what_a_policy_reads_is_what_it_says_it_reads(name: str) -> None:
    """Its line in the table names every indicator that its file asks for, so that a scheduler knows what to ask."""
    candidates = random_fleet(np.random.default_rng(3))
    candidates.columns = Watched(candidates.columns)
    policy_from(name, seed=1).choose(candidates)
    read = {root.name for root in roots_of(candidates.columns.asked)}
    passing_by = {"prompt_tokens", "age_s"}
    assert read - passing_by == {root.name for root in _roots(name)} - passing_by


class Watched(dict):
    """Remembers what was asked for."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)
        self.asked: list[str] = []

    def get(self, name: str, default: object = None) -> object:
        """Look up, and remember."""
        self.asked.append(name)
        return super().get(name, default)


# Those that remember or draw.


def test_round_robin_takes_turns_also_as_instances_come_and_go() -> None:
    """Whoever has waited longest is next; a newcomer is first; one that was away is not forgotten."""
    table, policy = InstanceTable("abc"), policy_from("round_robin")

    def turn(ids: str) -> str:
        table.follow(ids)
        candidates = table.candidates()
        return candidates.instance_id(policy.choose(candidates))

    assert "".join(turn("abc") for _ in range(4)) == "abca"
    assert turn("abcd") == "d"
    assert turn("bcd") == "b"
    many = "".join(LETTERS)
    assert [turn(many) for _ in range(len(many))][:3] == ["a", "e", "f"]  # back again, and never seen before


def test_round_robin_takes_turns_among_some() -> None:
    """Whoever may not be chosen misses no turn."""
    table, policy = InstanceTable("abc"), policy_from("round_robin")
    turns = []
    for rows in ([0, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2]):
        candidates = table.candidates(rows=np.array(rows))
        turns.append(candidates.instance_id(policy.choose(candidates)))
    assert turns == ["a", "b", "c", "a"]


def test_random_is_seeded_and_even() -> None:
    """The same seed chooses the same; all get their share."""
    candidates = InstanceTable("abcd").candidates()

    def draws(seed: int) -> list[int]:
        policy = policy_from("random", seed)
        return [policy.choose(candidates) for _ in range(400)]

    assert draws(3) == draws(3) != draws(4)
    assert all(60 < draws(3).count(place) < 140 for place in range(4))


def test_power_of_two_takes_the_less_loaded_of_two_that_are_drawn() -> None:
    """The busiest never wins, the idlest whenever it is drawn: half the time among four; seeded."""
    columns: Columns = {"num_running": [7, 1, 5, 3], "num_waiting": [0, 0, 0, 0]}

    def draws(text: str, seed: int) -> Counter[str]:
        policy = policy_from(text, seed)
        candidates = fleet(**columns)
        drawn = (policy.shortlist(candidates) for _ in range(600))
        return Counter(some.instance_id(policy.choose(some)) for some in drawn)

    counts = draws("power_of_two", 1)
    assert counts == draws("power_of_two", 1) != draws("power_of_two", 2)
    assert "a" not in counts
    assert 250 < counts["b"] < 350  # 1/2
    assert 150 < counts["d"] < 250  # 1/3
    assert 60 < counts["c"] < 150  # 1/6
    assert draws("power_of_two: sample = 4", 1) == {"b": 600}
    assert draws("least_loaded: sample = 2", 1) == counts


def test_min_qpm_really_counts_minutes() -> None:
    """What was sent a minute ago or earlier is gone, and what is sent now counts at once."""
    table, policy = InstanceTable("ab"), policy_from("min_qpm")

    def turn(now_s: float) -> str:
        candidates = table.candidates(now_s=now_s)
        name = candidates.instance_id(policy.choose(candidates))
        table.sent(name, now_s)
        return name

    assert [turn(now_s) for now_s in (0.0, 1.0, 2.0)] == ["a", "b", "a"]
    assert turn(60.5) == "a"  # b's of second 1 and a's of second 2 are left
    assert turn(61.5) == "b"  # a has two
    candidates = table.candidates(now_s=61.9)
    assert candidates["requests_per_minute"].tolist() == [2.0, 1.0]
    assert table.candidates(now_s=200.0)["requests_per_minute"].tolist() == [0.0, 0.0]


def test_what_a_sidecar_counted_passes_with_its_minute() -> None:
    """An instance of which nothing is heard is not shunned for ever for what it once got."""
    table, policy = InstanceTable("ab"), policy_from("min_qpm")
    table.replace("a", {"requests_per_minute": 60.0}, now_s=0.0)
    table.replace("b", {"requests_per_minute": 20.0}, now_s=30.0, age_s=0.0)
    assert policy.choose(table.candidates(now_s=30.0)) == 1  # 30 against 20
    assert table.candidates(now_s=30.0)["requests_per_minute"].tolist() == [30.0, 20.0]
    assert policy.choose(table.candidates(now_s=60.0)) == 0  # 0 against 10


def test_a_policy_is_a_file_of_its_own_under_sixty_lines() -> None:
    """Its docstring says where it comes from; two share the file of another policy."""
    folder = Path(scheduler.policies.__file__).parent
    for name in POLICIES:
        text = (folder / f"{SCORES_AS.get(name, name)}.py").read_text(encoding="utf-8")
        assert len(text.splitlines()) < 60, name
        assert "§" in text or name in NOT_FROM_PAPERS, name
        assert "Score = " in text, name


@pytest.mark.parametrize(
    ("target_s", "admitted"),
    # strict, loose, of the pool and idle, pending for loose, of the closed pool
    [(0.02, "ac"), (0.1, "abcd"), (0.07, "ac"), (0.5, "abc")],
)
def test_polyserve_admits_by_the_tiers_of_instances(target_s: float, admitted: str) -> None:
    """Stricter tiers take looser requests; a pending instance those of its tier, a closed pool none with a target."""
    columns: Columns = {
        "tier_tpot_s": [0.02, 0.1, math.inf, 0.1, math.inf],
        "tier_closed": [0, 0, 0, 1, 1],
        "least_tpot_slo_s": [0.1, 0.1, math.inf, 0.1, math.inf],
        "num_running": [1, 0, 0, 2, 0],
        "num_waiting": [0] * 5,
        "predicted_attained": [1.0] * 5,
        "others_missed": [0] * 5,
        "predicted_preemptions": [0] * 5,
        "others_preempted": [0] * 5,
        "decode_step_s": [0.01] * 5,
        "queued_prefill_s": [0.0] * 5,
    }
    candidates = fleet(request=RequestIndicators(prompt_tokens=100, due_s=1.0, tpot_slo_s=target_s), **columns)
    admits = policy_from("polyserve").admits(candidates, background=False)
    assert "".join(np.array(list("abcde"))[admits]) == admitted


def test_late_requests_go_where_no_deadline_is_left_and_else_to_the_busiest_of_the_loosest() -> None:
    """So that deadlines are missed on one instance and not on several; where there are no tiers, to the busiest."""
    columns: Columns = {
        "num_running": [1, 1, 1, 1],
        "num_waiting": [0, 0, 0, 0],
        "least_tpot_slo_s": [0.1, 0.1, 0.05, math.inf],
        "decode_step_s": [0.01, 0.02, 0.03, 0.04],
        "queued_prefill_s": [0.0, 0.0, 0.0, 0.0],
    }

    def order(late: int, text: str = "slo") -> str:
        candidates = fleet(request=RequestIndicators(prompt_tokens=100, late=late), **columns)
        policy = policy_from(text)
        return "".join(np.array(list("abcd"))[policy.order(candidates, policy.scores(candidates))])

    assert order(late=1) == "dbac"
    assert order(late=0) == "dabc"
    assert order(late=1, text="slo: affinity = 0") == "dcba"
    assert order(late=0, text="slo: affinity = 0") == "abcd"


def test_slo_fills_the_instances_of_listed_tiers() -> None:
    """So that others become empty, and leave; an empty one of the pool comes after those of a stricter tier."""
    columns: Columns = {
        "num_running": [1, 1, 0, 1],
        "num_waiting": [0, 0, 0, 0],
        "least_tpot_slo_s": [0.1, 0.1, math.inf, 0.05],
        "decode_step_s": [0.01, 0.02, 0.0, 0.03],
        "queued_prefill_s": [0.0, 0.0, 0.0, 0.0],
    }

    def order(text: str = "slo", **more: list[float]) -> str:
        request = RequestIndicators(prompt_tokens=100, due_s=9.0, tpot_slo_s=0.1)
        candidates, policy = fleet(request=request, **columns, **more), policy_from(text)
        return "".join(np.array(list("abcd"))[policy.order(candidates, policy.scores(candidates))])

    listed = {"tier_tpot_s": [0.1, 0.1, math.inf, 0.05]}
    assert order() == "abcd"
    assert order(**listed) == "badc"
    assert (
        order(**listed, efficient_step_s=[0.04, 0.04, math.inf, 0.04]) == "badc"
    )  # tiers matter where they are listed
    assert order("slo: affinity = 0", **listed) == "cabd"


def two_loaded(**columns: list[float]) -> Candidates:
    """Return two instances that keep all deadlines of a strict request, but for what is given."""
    ready: Columns = {
        "num_running": [1, 1],
        "num_waiting": [0, 0],
        "predicted_attained": [1.0, 1.0],
        "others_missed": [0, 0],
        "predicted_preemptions": [0, 0],
        "others_preempted": [0, 0],
        "predicted_queue_s": [0.0, 0.0],
        "decode_step_s": [0.01, 0.01],
        "queued_prefill_s": [0.0, 0.0],
    }
    request = RequestIndicators(prompt_tokens=100, due_s=1.0, tpot_slo_s=0.02)
    return fleet(request=request, **{**ready, **columns})


def test_slo_without_affinity_admits_on_looser_instances_as_well() -> None:
    """There are no tiers then: the request need not wait for the strict instance, which is full."""
    candidates = two_loaded(least_tpot_slo_s=[0.02, 0.1], predicted_attained=[0.0, 1.0])
    tiers, none = policy_from("slo"), policy_from("slo: affinity = 0")
    assert tiers.admits(candidates).tolist() == [False, False]
    assert len(tiers.eligible(candidates)) == 1
    assert none.admits(candidates).tolist() == [False, True]
    assert len(none.eligible(candidates)) == 2


@pytest.mark.parametrize(
    ("more", "admitted"),
    [
        ({"efficient_step_s": [0.015, 0.018]}, [False, True]),  # shorter than any target
        ({"efficient_step_s": [0.015, 0.026]}, [False, False]),  # longer on average
        ({"efficient_step_s": [0.015, math.inf]}, [False, True]),  # not known there
        ({"efficient_step_s": [math.nan, math.nan]}, [False, False]),
        ({"efficient_step_s": [0.015, 0.018], "tier_tpot_s": [0.02, 0.1]}, [False, False]),  # tiers that are listed
        ({"efficient_step_s": [0.015, 0.018], "tier_closed": [0, 1]}, [False, False]),
    ],
)
def test_slo_has_no_tiers_where_the_strictest_target_costs_no_more(more: Columns, admitted: list[bool]) -> None:
    """The request need not wait for the strict instance, which is full; requests go to the least loaded one."""
    candidates = two_loaded(
        **{"least_tpot_slo_s": [0.02, 0.1], "predicted_attained": [0.0, 1.0], "decode_step_s": [0.02, 0.01], **more}
    )
    policy = policy_from("slo")
    assert policy.admits(candidates).tolist() == admitted
    assert len(policy.eligible(candidates)) == 1 + admitted[1]
    assert bool(np.diff(policy.scores(candidates))[0] < 0) == admitted[1]


def test_tiers_matter_by_the_strictest_request_anywhere() -> None:
    """Also where the request that is placed is not strict itself."""
    strict = two_loaded(least_tpot_slo_s=[0.01, 0.1], efficient_step_s=[0.015, 0.015])
    assert strict["tiers_matter"].tolist() == [1.0, 1.0]
    loose = two_loaded(least_tpot_slo_s=[0.05, 0.1], efficient_step_s=[0.015, 0.015])
    assert loose["tiers_matter"].tolist() == [0.0, 0.0]


PREFIX = RequestIndicators(prompt_tokens=10_000, tag_tokens=100, due_s=9.0, tpot_slo_s=0.1)


def prefix_columns(
    hit_tokens: Sequence[float], tiers: Sequence[float] = (0.1, 0.02), **more: Sequence[float]
) -> Columns:
    """Return two instances with a request each, whose steps have an overhead of 2.9 ms, and what they have cached."""
    return {
        "num_running": [1, 1],
        "num_waiting": [0, 0],
        "decode_step_s": [0.01, 0.01],
        "queued_prefill_s": [0.0, 0.0],
        "least_tpot_slo_s": tiers,
        "efficient_step_s": [0.103, 0.097],
        "step_overhead_s": [0.003, 0.0028],
        "prefill_token_s": [1e-4, 1e-4],
        "prefix_hit_tokens": hit_tokens,
        **more,
    }


@pytest.mark.parametrize(
    ("text", "columns", "expected"),
    [
        ("slo", prefix_columns([0, 2500]), "b"),  # saves 0.25 s, and costs 0.25 s; see the next test
        ("slo", prefix_columns([0, 2400]), "a"),
        ("slo", prefix_columns([300, 2600]), "a"),  # the own tier has 0.03 s of it
        ("slo", prefix_columns([0, 2500], step_overhead_s=[0.006, 0.006]), "a"),  # twice the overhead
        ("slo", prefix_columns([0, 9999], step_overhead_s=[math.inf, math.inf]), "a"),  # overhead unknown
        # a looser tier would become stricter for all there
        ("slo", prefix_columns([0, 9999], tiers=(0.1, 0.5), efficient_step_s=[0.2, 0.2]), "a"),
        ("slo: hits = 0", prefix_columns([0, 9999]), "a"),
        ("slo", prefix_columns([0, 9999], prefill_token_s=[0.0, 0.0]), "a"),  # sidecars that do not report it
        ("slo", prefix_columns([0, 100], tiers=(0.1, 0.1), queued_prefill_s=[0.0, 0.029]), "b"),  # less than 3 x 0.01 s
        ("slo", prefix_columns([0, 100], tiers=(0.1, 0.1), queued_prefill_s=[0.0, 0.031]), "a"),
        ("slo: hits = 0", prefix_columns([0, 100], tiers=(0.1, 0.1), queued_prefill_s=[0.0, 0.001]), "a"),
        ("slo: affinity = 0", prefix_columns([0, 100]), "b"),
    ],
)
def test_slo_weighs_a_cached_prefix_against_load_and_a_stricter_tier(
    text: str, columns: Columns, expected: str
) -> None:
    """It goes to the stricter instance where the prefix saves more than the shorter steps cost."""
    assert chosen(text, columns, PREFIX) == expected


ALIKE = {name: [one] * 3 for name, one in (("num_running", 1), ("decode_step_s", 0.01), ("prefill_token_s", 1e-4))}
ALIKE |= {
    "num_waiting": [0] * 3,
    "efficient_step_s": [0.1] * 3,
    "step_overhead_s": [0.0029] * 3,
    "queued_prefill_s": [0.0] * 3,
}


def test_what_a_stricter_tier_costs() -> None:
    """A step of L with an overhead of c costs L / (L - c) times as much as the best step."""
    candidates = fleet(request=PREFIX, **prefix_columns([0, 2500, 0], tiers=(0.1, 0.02, 0.5), **ALIKE))
    overhead_s = 0.0029
    own_s = 7500 * 1e-4 + 100 * 0.01
    extra = 0.02 / (0.02 - overhead_s) - 0.1 / (0.1 - overhead_s)
    assert candidates["tier_cost_s"] == pytest.approx([0.0, own_s * extra, 0.0])
    assert candidates["cached_prefill_s"] == pytest.approx([0.0, 0.25, 0.0])
    assert own_s * extra == pytest.approx(0.2445, abs=1e-3)


@pytest.mark.parametrize(("text", "admitted"), [("slo", [False, True]), ("slo: hits = 0", [False, False])])
def test_slo_lets_requests_wait_in_an_engine_that_has_their_prefix(text: str, admitted: list[bool]) -> None:
    """By three times what it saves: no other engine would do as well, as long as all deadlines are kept."""
    columns = {"predicted_queue_s": [0.31, 0.31], "prefix_hit_tokens": [0, 100], "prefill_token_s": [1e-4, 1e-4]}
    assert policy_from(text).admits(two_loaded(**columns)).tolist() == admitted


def test_slo_without_affinity_leaves_closed_instances_alone() -> None:
    """The provisioner has closed the second one: it is pending for another tier."""
    candidates = two_loaded(
        least_tpot_slo_s=[0.02, 0.1], predicted_attained=[0.0, 1.0], tier_tpot_s=[0.02, 0.1], tier_closed=[0, 1]
    )
    policy = policy_from("slo: affinity = 0")
    assert policy.admits(candidates).tolist() == [False, False]
    assert policy.eligible(candidates).instance_id(0) == "a"


@pytest.mark.parametrize("name", ["slo", "polyserve"])
def test_an_instance_that_does_not_say_how_strict_it_is_admits_requests(name: str) -> None:
    """Otherwise a request would wait for as long as it may, however idle the instance is."""
    candidates = two_loaded(least_tpot_slo_s=[math.nan, 0.1])  # the second one is looser than the request
    policy = policy_from(name)
    assert policy.admits(candidates, background=False)[0]
    assert policy.admits(candidates, background=True).all()  # an idle instance has no slack to say
    assert policy.eligible(candidates).instance_id(0) == "a"


@pytest.mark.parametrize(
    ("text", "until"),
    [
        ("block", (TO_THE_END, TO_THE_END)),
        ("block: session_affinity = 0.1", (TO_THE_END, TO_THE_END)),
        ("block_ttft", (FIRST_TOKEN, FIRST_TOKEN)),
        ("gorouting", (TO_THE_END, TO_THE_END)),
        ("polyserve", (ALL_KEPT, OTHERS_KEPT)),
        ("slo", (ALL_KEPT, OTHERS_KEPT_AND_START)),
        ("slo: length_quantiles = 3", (TO_THE_END, TO_THE_END)),
    ],
)
def test_forecasts_are_simulated_as_far_as_a_policy_reads_them(text: str, until: tuple[int, int]) -> None:
    """For a request that can be in time, and for a background one."""
    policy = policy_from(text, seed=1)
    assert (policy.until(background=False), policy.until(background=True)) == until
