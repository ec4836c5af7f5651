"""The optimum equals values worked out by hand, and neither a schedule nor a policy undercuts the bound."""

from __future__ import annotations

import functools
import math
from itertools import combinations_with_replacement, product
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linprog

from predictor.gain import ServiceLevels, default_levels
from predictor.step_time import Curve, StepTime
from predictor.tabulated_costs import Costs, step_seconds, tabulate
from simulator.assembly import simulate
from simulator.fleet import InstanceSpec
from simulator.mix import mix_from, mixed_workload
from simulator.request_needs import needs_of
from simulator.slo_bound import APART, KINDS, MEMORY, MIXED, TIERS, slo_bound
from simulator.slo_prices import least_costs_s
from simulator.workload import RequestLengths, Workload, workload
from tests.simulator.small_clusters import A30, config, families, lengths, poisson, specs

PER_TOKEN = StepTime(constant_s=1.0, empty_s=1.0, token_s=0.1)
MIX = [
    {"name": "strict", "share": 1, "ttft_slo_s": 0.3, "tpot_slo_s": 0.04},
    {"name": "loose", "share": 2, "ttft_slo_s": 0.6, "tpot_slo_s": 0.1},
    {"name": "first", "share": 1, "ttft_slo_s": 0.6},
]


def asking(shapes: list[tuple[int, int]], ttft_slo_s: float | list[float], tpot_slo_s: float | list[float]) -> Workload:
    """Requests with prompts, responses and targets that all arrive at the beginning."""
    prompts, outputs = np.array(shapes).T
    num = len(shapes)
    levels = default_levels(num)
    service = ServiceLevels(
        ttft_slo_s=np.broadcast_to(np.asarray(ttft_slo_s, float), num).copy(),
        tpot_slo_s=np.broadcast_to(np.asarray(tpot_slo_s, float), num).copy(),
        weight=levels.weight,
        priority=levels.priority,
        request_class=levels.request_class,
    )
    made = workload(RequestLengths(prompt_tokens=prompts, output_tokens=outputs), np.zeros(num))
    return Workload(lengths=made.lengths, arrival_s=made.arrival_s, tag_median=made.tag_median,
                    tag_spread=made.tag_spread, service=service)  # fmt: skip


def test_the_tpot_limits_the_batch() -> None:
    """A step of n decodes and n/100 prompt tokens takes 1 + 0.101 n seconds: 4 of them in 1.5 s, or 8 without limit.

    The first token comes after 1.1 s at the earliest, which is all that its target allows.
    """
    bound = slo_bound(specs(2, PER_TOKEN), asking([(1, 101)] * 5, 1.1, 1.5))
    assert bound.optimum_s[TIERS] == bound.optimum_s[MIXED] == pytest.approx(100 * 1.404 / 4)
    assert bound.worth_of_tiers == 0
    assert bound.optimum_s[MEMORY] == pytest.approx(100 * 1.808 / 8)
    assert bound.optimum(TIERS) == pytest.approx(2 / 35.1)
    assert bound.tier_s == {"1.5": pytest.approx(35.1)}


def test_steps_are_apart() -> None:
    """Five decodes fit into 1.5 s where prompts are elsewhere, in steps of 128 tokens."""
    bound = slo_bound(specs(1, PER_TOKEN), asking([(1, 101)] * 5, 1.1, 1.5))
    assert bound.optimum_s[APART] == pytest.approx(100 * 1.5 / 5 + 13.8 / 128)


def test_loose_requests_pay_for_strict_ones_where_they_are_mixed() -> None:
    """Apart, the loose tier has steps of 8."""
    bound = slo_bound(specs(1, PER_TOKEN), asking([(1, 101)] * 4, 1.1, [1.5, 1.5, 1.5, 2.0]))
    assert bound.tier_s == {"1.5": pytest.approx(35.1), "2": pytest.approx(22.6)}
    assert bound.optimum_s[TIERS] == pytest.approx((3 * 35.1 + 22.6) / 4)
    assert bound.optimum_s[MIXED] == pytest.approx(35.1)
    assert bound.worth_of_tiers == pytest.approx(35.1 / ((3 * 35.1 + 22.6) / 4) - 1)


def test_memory_limits_the_batch() -> None:
    """Requests of 400 tokens on average fit four at a time into 1,920 tokens, beside a prompt of 300."""
    work = asking([(300, 201)] * 3, 1e3, 1e3)
    bound = slo_bound(specs(1, StepTime(constant_s=1.0, empty_s=1.0)), work)
    assert bound.optimum_s[MEMORY] == pytest.approx(200 / 4)


def test_impossible_requests_cost_without_end() -> None:
    """A TPOT below the time of a step cannot be attained; only a share without such requests has a bound."""
    bound = slo_bound(specs(1, PER_TOKEN), asking([(1, 101)] * 4, 1.1, [0.5, 1.5, 1.5, 1.5]))
    assert bound.num_impossible == 1
    assert bound.rate() == bound.rate(0.76) == 0.0
    assert bound.rate(0.75) > 0
    assert bound.optimum(TIERS) > 0
    assert bound.as_table([1.0])["bound_qps"] == {"1": 0.0}


def test_there_is_no_optimum_of_nothing() -> None:
    """Where an idle instance misses the deadlines of all requests, the table has no optimum, and no infinite rate."""
    bound = slo_bound(specs(1, PER_TOKEN), asking([(1, 11)] * 3, 1e-6, 1.5))
    assert not bound.is_possible
    table = bound.as_table([0.9])
    assert table["optimum_qps"] == table["optimum_instance_s"] == dict.fromkeys(KINDS)
    assert (table["worth_of_tiers"], table["bound_qps"]) == (None, {"0.9": 0.0})
    assert slo_bound(specs(1, PER_TOKEN), asking([(1, 11), (9, 11)], [30.0, 1e-6], 1.5)).is_possible


@pytest.mark.parametrize("seed", range(4))
def test_prices_equal_those_of_the_whole_program(seed: int) -> None:
    """Adding constraints as they are violated finds the sum that all constraints give."""
    draw = np.random.default_rng(seed)
    step_time = StepTime(
        constant_s=0.01,
        empty_s=0.01,
        by_tokens=Curve(x=(1.0, 5.0, 12.0), y=(0.01, 0.012, 0.03)),
        decode_slope=Curve(x=(1.0, 4.0), y=(2e-5, 1e-5)),
        mixed_slope=Curve(x=(1.0,), y=(4e-5,)),
        prefill_s=0.001,
    )
    (spec,) = specs(1, step_time, max_num_seqs=4, max_num_batched_tokens=12, num_gpu_blocks=11)
    shapes = [(int(draw.integers(1, 60)), int(draw.integers(1, 60))) for _ in range(5)]
    needs, steps = needs_of(spec, asking(shapes, 5.0, draw.uniform(0.03, 0.06, 5).tolist()))
    # for each request, the number of times that each step is taken for it
    num, each = len(needs), len(steps)
    is_limited = (needs.decodes > 0)[:, None] * np.eye(num)
    rows = [
        np.kron(np.eye(num), -steps.decodes),
        np.tile(-steps.prompt_tokens, num)[None, :],
        np.tile(-steps.context_tokens, num)[None, :],
        np.kron(is_limited, steps.decodes * steps.seconds),
    ]
    limits = [-needs.decodes, [-needs.prompt_tokens.sum()], [-needs.context_tokens.sum()],
              np.where(needs.decodes > 0, needs.patience_s, 0.0)]  # fmt: skip
    found = linprog(np.tile(steps.seconds, num), A_ub=np.concatenate(rows), b_ub=np.concatenate(limits))
    assert found.success
    assert found.x.shape == (num * each,)
    assert least_costs_s(steps, needs).sum() == pytest.approx(found.fun + needs.attention_s.sum(), rel=1e-4)


Progress = tuple[tuple[int, int], ...]  # prompt tokens and response tokens that each request has


def least_time_s(
    costs: Costs, shapes: list[tuple[int, int]], due_s: list[list[float]], num_seqs: int, chunk: int
) -> float:
    """Return the time of the fastest schedule of one engine that keeps all deadlines, by trying all; infinite: none."""
    whole = tuple(shapes)

    @functools.cache
    def rest_s(at: Progress, now_s: float) -> float:
        if at == whole:
            return 0.0
        options = []
        for (prompt, output), (prompts, outputs) in zip(at, shapes, strict=True):
            more = range(prompts - prompt + 1) if prompt < prompts else range((output < outputs) + 1)
            options.append(list(more))
        best = math.inf
        for step in product(*options):
            used = [tokens for tokens in step if tokens]
            if not used or sum(used) > chunk or len(used) > num_seqs:
                continue
            decodes = [at[i] for i in range(len(at)) if step[i] and at[i][0] == shapes[i][0]]
            chunks = [(step[i], at[i][0]) for i in range(len(at)) if step[i] and at[i][0] < shapes[i][0]]
            after = []
            for i, tokens in enumerate(step):
                prompt, output = at[i]
                if prompt == shapes[i][0]:
                    after.append((prompt, output + tokens))
                else:
                    ends = prompt + tokens == shapes[i][0]
                    after.append((prompt + tokens, int(ends)))
            sampled = sum(after[i][1] > at[i][1] for i in range(len(at)))
            seconds = step_seconds(
                costs, sum(used), sampled, len(decodes), float(sum(p + o for p, o in decodes)), len(chunks),
                float(sum(q * q for q, _ in chunks)), float(sum(q * kv for q, kv in chunks)),
            )  # fmt: skip
            end_s = round(now_s + seconds, 9)
            if any(after[i][1] > at[i][1] and end_s > due_s[i][at[i][1]] for i in range(len(at))):
                continue
            best = min(best, seconds + rest_s(tuple(after), end_s))
        return best

    return rest_s(tuple((0, 0) for _ in shapes), 0.0)


@pytest.mark.parametrize("seed", range(3))
def test_no_schedule_undercuts_the_bound(seed: int) -> None:
    """Of all schedules of three small requests, also those that pause requests, none is faster."""
    draw = np.random.default_rng(seed)
    step_time = StepTime(constant_s=0.1, empty_s=0.1, token_s=0.03, prefill_qq_s=1e-3, prefill_qkv_s=2e-3,
                         decode_slope=Curve(x=(1.0,), y=(2e-3,)), mixed_slope=Curve(x=(1.0,), y=(3e-3,)))  # fmt: skip
    (spec,) = specs(1, step_time, max_num_seqs=2, max_num_batched_tokens=4)
    costs = tabulate(step_time, 4, 2)
    num_kept = 0
    for targets in combinations_with_replacement((0.2, 0.35, 0.6), 2):
        shapes = [(int(draw.integers(1, 4)), int(draw.integers(1, 4))) for _ in range(3)]
        tpot_slo_s = [targets[0], targets[1], 0.5]
        ttft_slo_s = draw.uniform(0.3, 1.2, 3).tolist()
        work = asking(shapes, ttft_slo_s, tpot_slo_s)
        due_s = [[ttft + i * tpot for i in range(shape[1])] for shape, ttft, tpot in
                 zip(shapes, ttft_slo_s, tpot_slo_s, strict=True)]  # fmt: skip
        least_s = least_time_s(costs, shapes, due_s, 2, 4)
        num_kept += least_s < math.inf
        bound_s = slo_bound([spec], work).instance_s() * len(shapes)
        assert bound_s <= least_s + 1e-6
        if least_s < math.inf:
            assert bound_s > 0.2 * least_s
    assert num_kept >= 1


@pytest.mark.parametrize("policy", ["jsq", "block", "slo"])
@pytest.mark.parametrize("rate", [8.0, 40.0])
def test_no_policy_undercuts_the_bound(policy: str, rate: float) -> None:
    """What has attained its deadlines took at least its costs of the time that the instances had."""
    made = specs(2)
    work = mixed_workload(poisson(150, rate), mix_from(MIX), 0)
    result = simulate(made, work, policy)
    bound = slo_bound(made, work)
    levels = work.service
    assert levels is not None
    num_due = np.where(np.isnan(levels.tpot_slo_s), 1, result.outcomes.produced_tokens)
    kept = (result.outcomes.finished_s >= 0) & (result.outcomes.tokens_on_time >= num_due)
    available_s = len(made) * (result.end_s - float(work.arrival_s[0]))
    assert kept.any()
    assert float(bound.costs_s[kept].sum()) <= available_s
    assert not np.isinf(bound.costs_s[kept]).any()
    span_s = float(work.arrival_s[-1] - work.arrival_s[0])
    assert rate <= 1.2 * bound.rate(float(kept.mean())) * (result.end_s / span_s)


def test_a_share_leaves_out_the_most_expensive() -> None:
    """By requests, those that cost most may miss; by work, those that cost most for each token."""
    made = specs(2)
    bound = slo_bound(made, mixed_workload(poisson(100, 10.0), mix_from(MIX), 0))
    costs = np.sort(bound.costs_s)
    assert bound.instance_s(0.9) == pytest.approx(costs[:90].sum() / 100)
    assert bound.instance_s() == pytest.approx(costs.sum() / 100)
    assert bound.rate(0.9) > bound.rate(0.9, by_work=True) > bound.rate(0.99, by_work=True) > bound.rate()
    assert bound.rate() == pytest.approx(2 / bound.instance_s())
    for share in (0.0, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"^attained: "):
            bound.rate(share)


def test_short_runs_are_told_apart() -> None:
    """The bound is for runs in which arrivals last at least five times as long as responses may take."""
    bound = slo_bound(specs(1, PER_TOKEN), asking([(1, 101)] * 50, 1.1, 1.5))
    assert bound.allowed_s == pytest.approx(151.1)
    assert not bound.is_for_longer_runs(50 / 760)
    assert bound.is_for_longer_runs(50 / 750)
    assert not bound.is_for_longer_runs(0.0)


def test_deadlines_only_cost() -> None:
    """Looser targets never cost more, and the bound is at most what engines with the same mix all the time reach."""
    work = poisson(80, 10.0)
    rates = []
    for tpot_slo_s in (0.03, 0.06, 0.2):
        mix = mix_from([{"name": "all", "share": 1, "ttft_slo_s": 0.5, "tpot_slo_s": tpot_slo_s}])
        bound = slo_bound(specs(2), mixed_workload(work, mix, 0))
        assert all(bound.optimum(kind) <= 1.0001 * bound.rate() for kind in KINDS if kind != MEMORY)
        rates.append((bound.rate(), bound.optimum(TIERS), bound.optimum(APART)))
    assert rates == sorted(rates)


def test_shared_prefixes_are_computed_once() -> None:
    """With prefix caching, prompts that begin alike need less, and memory limits no step."""
    work, _ = families(60, 10.0)
    mixed = mixed_workload(work, mix_from(MIX), 0)
    cached = slo_bound(specs(2, enable_prefix_caching=True), mixed)
    assert cached.rate() > slo_bound(specs(2), mixed).rate()


def test_undefined_bounds_are_refused() -> None:
    """The instances have to be equal but for their roles, and some requests need deadlines."""
    work = mixed_workload(poisson(10, 5.0), mix_from(MIX), 0)
    changes: dict[str, Any] = {"kv_bytes_per_token": 1024}
    pair = [
        InstanceSpec(config=config(kv_role="kv_producer", **changes), step_time=A30, role="prefill"),
        InstanceSpec(config=config(kv_role="kv_consumer", **changes), step_time=A30, role="decode"),
    ]
    assert slo_bound(pair, work).rate() == slo_bound(specs(2), work).rate()
    with pytest.raises(ValueError, match="equal instances"):
        slo_bound([*specs(1), *specs(1, PER_TOKEN)], work)
    with pytest.raises(ValueError, match=r"^mix: no request has a ttft_slo_s"):
        slo_bound(specs(1), workload(lengths(5), np.zeros(5)))
