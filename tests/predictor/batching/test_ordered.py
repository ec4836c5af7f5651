"""Rules that order all requests, compared with a plain oracle at every step, and in small examples."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from predictor.batching import BATCHERS, settled
from predictor.compiled import interpreted
from predictor.config import EngineConfig
from predictor.correction import Correction, CorrectionRule
from predictor.engine import Engine
from predictor.estimator import normal
from predictor.request import RequestFacts, Slo, tenant_number
from predictor.snapshot_of_engine import snapshot_of
from predictor.step_time import StepTime
from tests.oracle import ordered_rules
from tests.oracle.comparing import expect_oracle, our_steps, scheduled
from tests.strategies import AFFINE, ORDERED, Load, examples, load_of, loads

NEVER = (None, None)


def test_every_rule_has_an_oracle() -> None:
    """No rule is left out below."""
    assert set(ordered_rules.RULES) == set(ORDERED)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("batcher", ORDERED)
def test_every_step_is_the_oracles(batcher: str, is_async: bool) -> None:
    """Scheduled tokens, their order, queues, preemptions and free blocks are equal at every step, for all options."""
    seen: Counter[str] = Counter()

    # the oracle of `deadline_forecast` simulates in every step
    @examples((100 if batcher == "deadline_forecast" else 150) * len(BATCHERS[batcher].kv_layouts))
    @given(loads(batcher, is_async=is_async))
    def check(load: Load) -> None:
        seen.update(expect_oracle(load, ordered_rules.replay_steps))

    check()
    assert min(seen["preemptions"], seen["queueing"]) > 4


@pytest.mark.parametrize("batcher", ["edf", "sjf", "density", "slide_batching"])
def test_repeated_steps_end_where_the_limit_in_time_is_reached(batcher: str) -> None:
    """Decodes take longer with longer contexts: all are in each step until that takes too long, repeated or not."""
    requests, shape = 3 * [(4, 300)], {"max_model_len": 512, "num_gpu_blocks": 256}
    unbounded = list(our_steps(load_of(batcher, *requests, **shape), AFFINE))
    assert len(unbounded) == 300
    longest_s = unbounded[100]["end_s"] - unbounded[100]["start_s"]
    slos = [(longest_s, longest_s), NEVER, NEVER]
    load = load_of(batcher, *requests, slos=slos, batcher_options={"eta": 1.0}, **shape)
    sizes = [len(step["scheduled"]) for step in our_steps(load, AFFINE)]
    assert min(sizes[:100]) == 3 > min(sizes[100:])
    stepped, fast = load.loaded(AFFINE), load.loaded(AFFINE)
    while stepped.next_step():
        pass
    fast.advance()
    ends_s = [[engine.outcome(name).finished_s for name in "abc"] for engine in (stepped, fast)]
    assert ends_s[1] == pytest.approx(ends_s[0])
    assert fast.state.engine[0].num_steps == stepped.state.engine[0].num_steps == len(sizes)


@pytest.mark.parametrize("second", [(0.7, 2.0, 10.0), (0.0, 4.0, 0.07)])
@pytest.mark.parametrize("batcher", ORDERED)
def test_repeated_steps_are_those_planned_one_by_one(batcher: str, second: tuple[float, float, float]) -> None:
    """Two requests with different targets, of which one may be admitted in the step that is repeated."""
    arrival_s, ttft_s, tpot_s = second
    ends_s, num_steps = [], []
    for at_once in (False, True):
        config = EngineConfig(
            batcher=batcher, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128, num_gpu_blocks=64
        )
        engine = Engine(config, StepTime(constant_s=0.01, token_s=0.1))
        for name, when_s, slo in (
            ("r", 0.0, Slo(ttft_s=4.0, tpot_s=0.06)),
            ("a", arrival_s, Slo(ttft_s=ttft_s, tpot_s=tpot_s)),
        ):
            engine.add(RequestFacts(request_id=name, prompt_tokens=4, output_tokens=60, arrival_s=when_s, slo=slo))
        while not at_once and engine.next_step():
            pass
        engine.advance()
        ends_s.append([engine.outcome(name).finished_s for name in "ra"])
        num_steps.append(int(engine.state.engine[0].num_steps))
    assert ends_s[1] == pytest.approx(ends_s[0])
    assert num_steps[1] == num_steps[0]


@pytest.mark.parametrize("batcher", ["edf", "sjf", "density", "deadline_forecast"])
def test_steps_are_bounded_in_time(batcher: str) -> None:
    """A step of more than one token ends within the fraction of the shortest TPOT target of all requests.

    In `deadline_forecast` it may last that target where the fraction is less.
    """
    num_bounded = 0
    exact = {"estimator_factor": 1.0, "estimator_noise": 0.0, "estimator_momentum": 0.0}

    @examples(60)
    @given(loads(batcher, is_async=False, layout="plain"))  # copies can take longer
    def check(load: Load) -> None:
        nonlocal num_bounded
        load = replace(load, engine={**load.engine, **exact})
        eta = load.engine["batcher_options"]["eta"]
        if eta > 0 and batcher == "deadline_forecast":
            eta = max(eta, 1.0)
        targets = {spec["id"]: spec["tpot_slo_s"] or math.inf for spec in load.requests}
        for step in our_steps(load, AFFINE):
            shortest = min(targets[name] for name in (*step["running"], *step["waiting"]))
            if eta > 0 and shortest < math.inf and sum(step["scheduled"].values()) > 1:
                assert step["end_s"] - step["start_s"] <= eta * shortest + 1e-9
                num_bounded += 1

    check()
    assert num_bounded > 100


def first_step(batcher: str, *requests: tuple[int, int], **settings: Any) -> dict[str, int]:
    """Return what the first step schedules, within eight tokens."""
    return scheduled(load_of(batcher, *requests, **{"max_num_batched_tokens": 8, **settings}))[0]


def test_edf_goes_by_the_due_time_of_the_next_token() -> None:
    """Who has no target comes last; a decode that is due later than a new prompt comes after it."""
    assert first_step("edf", (6, 1), (6, 1), (6, 1), slos=[NEVER, (9.0, None), (3.0, None)]) == {"c": 6, "b": 2}
    load = load_of(
        "edf", (2, 3), (9, 1), arrivals=[0, 1], slos=[(1.0, 50.0), (4.0, None)], max_num_batched_tokens=8
    )  # fmt: skip
    assert scheduled(load) == [{"a": 2}, {"b": 8}, {"b": 1, "a": 1}, {"a": 1}]


def test_an_early_first_token_brings_the_others_forward() -> None:
    """With `from_first_token` the decode is due before the prompt, without it after."""
    for value, second in ((1.0, {"a": 1, "b": 3}), (0.0, {"b": 4})):
        load = load_of(
            "edf", (2, 3), (4, 1), arrivals=[0, 1], slos=[(20.0, 1.0), (10.0, None)], max_num_seqs=2,
            max_num_batched_tokens=4, batcher_options={"from_first_token": value},
        )  # fmt: skip
        assert scheduled(load)[1] == second


def test_sjf_goes_by_remaining_prefill() -> None:
    """The shortest prompt is first, and decodes before all prompts."""
    load = load_of("sjf", (6, 1), (2, 3), (4, 1), max_num_batched_tokens=8)
    assert scheduled(load) == [{"b": 2, "c": 4, "a": 2}, {"b": 1, "a": 4}, {"b": 1}]


def test_density_goes_by_weight_per_cost() -> None:
    """Of equal prompts the heavier is first, and of equal weights the shorter."""

    def order(*requests: tuple[int, int], **settings: Any) -> list[str]:
        load = load_of("density", *requests, **settings)
        return list(next(our_steps(load, AFFINE))["scheduled"])

    assert order((6, 1), (6, 1), weights=[1.0, 2.0]) == ["b", "a"]
    assert order((9, 1), (3, 1), weights=[1.0, 1.0]) == ["b", "a"]
    assert order((9, 1), (3, 1), weights=[30.0, 1.0]) == ["a", "b"]


def test_slide_batching_partitions_by_urgency() -> None:
    """Without urgency the earlier deadline is first; with a large gamma density is, also for a later deadline."""

    def order(gamma: float, phi: float = 0.0) -> list[str]:
        load = load_of(
            "slide_batching", (20, 1), (4, 1), (4, 1), slos=[(1.0, 9.0), (2.0, 9.0), NEVER],
            batcher_options={"gamma": gamma, "phi": phi},
        )  # fmt: skip
        return list(next(our_steps(load, AFFINE))["scheduled"])

    assert order(0.0) == order(0.0, 1.0) == ["a", "b", "c"]
    assert order(1000.0) == order(1000.0, 1.0) == ["b", "a", "c"]


def test_slide_batching_without_a_boundary() -> None:
    """Only by deadline the earlier one is first, only by density the shorter one, without the estimator as well."""

    def order(**options: float) -> list[str]:
        load = load_of("slide_batching", (20, 1), (4, 1), slos=[(1.0, 9.0), (2.0, 9.0)], batcher_options=options)
        return list(next(our_steps(load, AFFINE))["scheduled"])

    assert order(order=1, gamma=1000) == order(order=1, gamma=1000, estimator=0) == ["a", "b"]
    assert order(order=2, gamma=0) == order(order=2, gamma=0, estimator=0) == ["b", "a"]


def test_slide_batching_without_the_estimator_fills_its_token_budget() -> None:
    """The step ends at the token budget, not at the first deadline, which the estimator keeps."""

    def first(**options: float) -> dict[str, int]:
        load = load_of(
            "slide_batching", (20, 1), (20, 1), slos=[(0.021, 0.021), NEVER],
            batcher_options={"order": 1, **options},
        )  # fmt: skip
        return dict(next(our_steps(load, AFFINE))["scheduled"])

    assert first(estimator=0, token_budget=24) == {"a": 20, "b": 4}
    assert 1 < sum(first(token_budget=24).values()) < 24


def test_slide_batching_for_prefills_counts_a_constant_for_each_request() -> None:
    """By φ_p each request needs a step of its own, so that a deadline is urgent that is not by φ_a."""

    def order(phi: float) -> list[str]:
        load = load_of(
            "slide_batching", (8, 1), (4, 1), (4, 1), slos=[(0.030, None), (0.031, None), (0.032, None)],
            batcher_options={"phi": phi},
        )  # fmt: skip
        return list(next(our_steps(load, AFFINE))["scheduled"])

    assert order(0) == ["a", "b", "c"]
    assert order(2) == ["b", "c", "a"]


def test_slide_batching_leaves_late_tokens_out_of_its_budget() -> None:
    """A late token shortens the step to η; left out, the step lasts until the next deadline, or `eta_max`."""

    def num_tokens(**options: float) -> int:
        load = load_of(
            "slide_batching", (4, 9), (60, 1), arrivals=[0, 0.001], slos=[(1e-6, 0.001), (1.0, 0.02)],
            max_num_batched_tokens=200, batcher_options={"eta": 0.0, "order": 1, **options},
        )  # fmt: skip
        second = list(our_steps(load, AFFINE))[1]
        return int(sum(second["scheduled"].values()))

    assert num_tokens() == 1
    assert num_tokens(skip_overdue=1) == 63
    assert 1 < num_tokens(skip_overdue=1, eta_max=16) < 63


def test_fair_batching_puts_prefills_between_decodes() -> None:
    """A decode that can wait for two more steps comes after the prompts, one that cannot before them."""

    def second_step(tpot_s: float) -> dict[str, int]:
        load = load_of(
            "fair_batching", (2, 9), (2, 9), (4, 1), arrivals=[0, 0, 0.001],
            slos=[(0.02, tpot_s), (9.0, 0.05), (0.04, 0.05)], max_num_batched_tokens=4, max_num_seqs=4,
        )  # fmt: skip
        return dict(list(our_steps(load, AFFINE))[1]["scheduled"])

    assert second_step(0.05) == {"a": 1, "c": 3}
    assert second_step(9.0) == {"c": 4}


def test_decode_then_edf_keeps_the_first_deadline_of_a_decode() -> None:
    """The chunk beside a decode ends before the decode is due; beside a late decode it has no limit in time."""
    for slo, is_late in (((0.05, 0.04), False), ((1e-6, 1e-6), True)):
        load = load_of(
            "decode_then_edf", (4, 9), (60, 1), arrivals=[0, 0.001], slos=[slo, NEVER],
            max_num_batched_tokens=200, enable_prefix_caching=False,
        )  # fmt: skip
        second = list(our_steps(load, AFFINE))[1]
        assert list(second["scheduled"]) == ["a", "b"]
        assert (second["scheduled"]["b"] == 60) == is_late
        assert (second["end_s"] <= sum(slo)) != is_late


def first_order(*requests: tuple[int, int], **settings: Any) -> list[str]:
    """Return the order of the first step of `deadline_forecast`."""
    load = load_of("deadline_forecast", *requests, enable_prefix_caching=False, **settings)
    return list(next(our_steps(load, AFFINE))["scheduled"])


def test_a_forecast_goes_by_deadline_where_all_can_be_on_time() -> None:
    """Neither weight nor length matters; a request without targets comes last."""
    slos = [NEVER, (9.0, 9.0), (8.0, 9.0)]
    assert first_order((6, 1), (4, 1), (12, 1), slos=slos, weights=[9.0, 9.0, 1.0]) == ["c", "b", "a"]


def test_a_forecast_gives_up_the_least_gain_per_cost() -> None:
    """Where one of two prefills must be late, the heavier is kept, and of equal ones that of the shorter response."""
    seconds = next(our_steps(load_of("sjf", (40, 1)), AFFINE))["end_s"]
    slos = [(1.2 * seconds, 9.0), (1.3 * seconds, 9.0)]
    short = {"slos": slos, "max_num_seqs": 2}
    assert first_order((40, 2), (40, 2), weights=[2.0, 1.0], **short) == ["a", "b"]
    assert first_order((40, 2), (40, 2), weights=[1.0, 2.0], **short) == ["b", "a"]
    assert first_order((40, 2), (40, 20), **short) == ["a", "b"]
    assert first_order((40, 20), (40, 2), **short) == ["b", "a"]


def test_a_forecast_goes_by_gain_per_cost_where_blocks_are_short() -> None:
    """Two prompts do not fit together: the shorter is first, though the other is due before."""
    requests, slos = ((40, 2), (8, 2)), [(8.0, 9.0), (9.0, 9.0)]
    assert first_order(*requests, slos=slos, num_gpu_blocks=20) == ["a", "b"]
    assert first_order(*requests, slos=slos, num_gpu_blocks=12)[0] == "b"


def test_a_request_beyond_the_age_limit_goes_first_for_a_share_of_the_time() -> None:
    """The long prompt is given up for short ones until it is too old; then it is served where it is its turn."""

    def first_place(**options: float) -> int:
        load = load_of(
            "deadline_forecast", (9, 1), *[(8, 1)] * 6, arrivals=[0, 0, 1, 2, 3, 4, 5],
            slos=[(0.5, 9.0), (0.25, 9.0)] + [(4.0, 9.0)] * 5, max_num_batched_tokens=8, batcher_options=options,
        )  # fmt: skip
        return next(place for place, step in enumerate(scheduled(load)) if "a" in step)

    assert first_place(age_limit=0.0) == 6
    assert first_place(age_limit=4.0, age_share=1.0) == 3  # it has waited for more than two seconds
    assert first_place(age_limit=4.0, age_share=0.0) == 6


def test_sarathi_fills_its_token_budget() -> None:
    """Decodes, then prefills by arrival or priority, within the budget."""
    shape = {"arrivals": [0, 1, 1], "priorities": [0, 1, 0], "batcher_options": {"token_budget": 6}}
    requests = ((4, 4), (9, 1), (5, 1))
    by_arrival = scheduled(load_of("sarathi_fcfs", *requests, **shape))
    assert by_arrival == [{"a": 4}, {"a": 1, "b": 5}, {"a": 1, "b": 4, "c": 1}, {"a": 1, "c": 4}]
    by_priority = scheduled(load_of("sarathi_priority", *requests, **shape))
    assert by_priority == [{"a": 4}, {"a": 1, "c": 5}, {"a": 1, "b": 5}, {"a": 1, "b": 4}]


def test_vtc_serves_the_client_that_was_served_least() -> None:
    """Prompts of two clients take turns by tokens; a weight of two counts half."""

    def admitted(*requests: tuple[int, int], **settings: Any) -> list[str]:
        load = load_of("weighted_vtc", *requests, max_num_seqs=1, **settings)
        order: list[str] = []
        for step in scheduled(load):
            order += [name for name in step if name not in order]
        return order

    four = ((6, 1), (6, 1), (6, 1), (6, 1))
    assert admitted(*four, clients=["x", "x", "y", "y"]) == ["a", "c", "b", "d"]
    assert admitted((6, 1), (6, 1), (2, 1), (2, 1), clients=["x", "x", "y", "y"]) == ["a", "c", "d", "b"]
    assert admitted(*four, (6, 1), weights=[1.0, 1.0, 2.0, 2.0, 2.0]) == ["a", "c", "d", "b", "e"]


def test_vtc_lifts_a_client_that_comes_back() -> None:
    """A client that was idle while another was served is served in turns with it, not for as long."""
    load = load_of(
        "weighted_vtc", (4, 8), (4, 1), (4, 1), (4, 1), (4, 1), (4, 1), max_num_seqs=1,
        clients=["x", "x", "x", "y", "y", "y"], arrivals=[0, 0, 0, 6, 6, 6],
    )  # fmt: skip
    order = [next(iter(step)) for step in scheduled(load)][8:]
    assert order == ["d", "b", "e", "c", "f"]


def test_vtc_counts_at_most_so_many_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more clients the least served ones without requests are forgotten; all requests are served."""
    limited = replace(BATCHERS["weighted_vtc"], max_clients=2)
    monkeypatch.setitem(BATCHERS, "weighted_vtc", limited)
    load = load_of("weighted_vtc", *[(4, 3)] * 6, clients=list("uvwxyz"), arrivals=[0, 0, 0, 9, 20, 20], max_num_seqs=2)
    engine = load.loaded()
    engine.advance()
    assert engine.state.engine[0].num_clients == 2
    assert all(engine.outcome(name).finished_s is not None for name in "abcdef")


def test_what_vtc_counts_is_forgotten_with_the_engine_only() -> None:
    """A snapshot has the counters of clients that waited, and of those that were served more; a new engine has none."""
    load = load_of("weighted_vtc", (4, 8), (4, 1), clients=["x", "y"], max_num_seqs=1)
    engine = load.loaded()
    for _ in range(4):
        engine.next_step()
    clients = snapshot_of(engine, engine.now_s).memory.clients
    assert {client.tenant: client.tokens for client in clients} == {tenant_number("x"): 10.0, tenant_number("y"): 0.0}
    assert load.loaded().state.engine[0].num_clients == 0


def believed(load: Load, num_steps: int) -> list[float]:
    """List what a rule believes, over the profile, in its first steps."""
    engine = load.loaded(AFFINE)
    values = []
    for _ in range(num_steps):
        engine.next_step()
        values.append(float(engine.state.engine[0].belief))
    return values


def test_a_rule_believes_the_pace_of_its_engine() -> None:
    """By default the estimate is the truth; a factor is a lasting error."""
    for factor in (1.0, 0.7):
        load = load_of("edf", (4, 9), estimator_factor=factor)
        engine = load.loaded(AFFINE)
        engine.set_pace(1.5)
        engine.next_step()
        assert engine.state.engine[0].belief == 1.5 * factor


def test_a_wrong_estimate_is_corrected_step_by_step() -> None:
    """With a momentum the factor goes to its inverse, as the online correction of step times does."""
    load = load_of("edf", (4, 40), estimator_factor=0.8, estimator_momentum=0.9)
    rule = CorrectionRule(momentum=0.9, window=1)
    expected, correction = [], Correction(rule=rule)
    for _ in range(30):
        expected.append(0.8 * correction.factor)
        correction = correction.observe(predicted_s=0.8, real_s=1.0)
    assert believed(load, 30) == pytest.approx(expected, rel=1e-12)
    assert expected[-1] == pytest.approx(1.0, abs=0.02)


def test_noise_differs_by_step_and_seed() -> None:
    """Estimates are log-normal around the truth, and the same for the same seed."""
    ours = believed(load_of("edf", (4, 40), estimator_noise=0.2), 30)
    assert ours == believed(load_of("edf", (4, 40), estimator_noise=0.2), 30)
    others = believed(load_of("edf", (4, 40), estimator_noise=0.2, estimator_seed=1), 30)
    assert not set(ours) & set(others)
    assert len(set(ours)) == 30
    deviates = np.array([interpreted(normal)(number, seed) for seed in range(3) for number in range(1000)])
    assert abs(deviates.mean()) < 0.1
    assert abs(deviates.std() - 1) < 0.1
    assert abs(np.corrcoef(deviates[1:], deviates[:-1])[0, 1]) < 0.1


def test_an_underestimate_fills_longer_steps() -> None:
    """Who believes that steps take half their time plans steps of twice the limit."""

    def longest_s(factor: float) -> float:
        load = load_of(
            "edf", (60, 1), slos=[(1.0, 0.02)], batcher_options={"eta": 1.0}, estimator_factor=factor,
        )  # fmt: skip
        return max(step["end_s"] - step["start_s"] for step in our_steps(load, AFFINE))

    assert longest_s(1.0) <= 0.02 < longest_s(0.5) <= 0.04


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"batcher": "vllm_v1", "estimator_factor": 2.0}, "estimator_factor: vllm_v1 does not estimate step times"),
        ({"estimator_noise": 0.1}, "estimator_noise: vllm_v1 does not estimate step times"),
        ({"batcher": "edf", "estimator_factor": 0.0}, "estimator_factor: must be above 0, not 0.0"),
        ({"batcher": "edf", "estimator_factor": math.nan}, "estimator_factor: must be a number, not nan"),
        ({"batcher": "edf", "estimator_noise": -1.0}, "estimator_noise: must be at least 0 and at most 10, not -1.0"),
        ({"batcher": "edf", "estimator_momentum": 1}, "estimator_momentum: must be at least 0 and below 1, not 1"),
        ({"batcher": "edf", "estimator_seed": 0.5}, "estimator_seed: must be a whole number, not 0.5"),
    ],
)
def test_wrong_estimators_are_refused(config: dict[str, Any], error: str) -> None:
    """One line names the setting."""
    with pytest.raises(ValueError, match=f"^{error}$"):
        settled(EngineConfig(**config))


def test_the_last_in_the_order_is_preempted() -> None:
    """Not the last admitted one, where its deadline is earlier."""
    load = load_of(
        "edf", (4, 9), (4, 9), arrivals=[0, 1], slos=[(900.0, 1.0), (5.0, 1.0)], num_gpu_blocks=5,
        enable_prefix_caching=False,
    )  # fmt: skip
    assert next(step["preempted"] for step in our_steps(load) if step["preempted"]) == ["a"]


def test_a_request_left_out_keeps_its_blocks() -> None:
    """A prefill that gets no time in a step goes on from where it was."""
    load = load_of(
        "edf", (16, 1), (8, 1), arrivals=[0, 1], slos=[(50.0, None), (3.0, None)], max_num_batched_tokens=8,
        enable_prefix_caching=False,
    )  # fmt: skip
    assert scheduled(load) == [{"a": 8}, {"b": 8}, {"a": 8}]


@pytest.mark.parametrize(
    ("batcher", "options", "error"),
    [
        ("edf", {"etta": 1.0}, "batcher_options.etta: is no known option of edf; did you mean eta?"),
        ("vllm_v1", {"eta": 1.0}, "batcher_options.eta: is no known option of vllm_v1"),
        ("edf", {"eta": -1.0}, "batcher_options.eta: must be at least 0, not -1"),
        ("edf", {"eta": math.nan}, "batcher_options.eta: must be a number, not nan"),
        ("edf", {"eta": "1"}, "batcher_options.eta: must be a number, not '1'"),
        ("slide_batching", {"phi": 3}, "batcher_options.phi: must be at most 2, not 3"),
        ("density", {"first_token_weight": 0}, "batcher_options.first_token_weight: must be at least 1e-06, not 0"),
    ],
)
def test_wrong_options_are_refused(batcher: str, options: dict[str, Any], error: str) -> None:
    """One line names the option, and the closest name of an unknown one."""
    with pytest.raises(ValueError, match=f"^{error.replace('?', '.')}$"):
        settled(EngineConfig(batcher=batcher, batcher_options=options))


def test_options_have_defaults() -> None:
    """A settled configuration has all options of its rule."""
    for name, batcher in BATCHERS.items():
        options = settled(EngineConfig(batcher=name, max_model_len=512)).batcher_options
        assert options == {option.name: option.default for option in batcher.options}


def test_async_scheduling_counts_tokens_in_flight() -> None:
    """The token that is planned while the one before it is computed is due one TPOT later."""
    load = load_of(
        "edf", (2, 4), (9, 1), slos=[(1.0, 3.5), (7.0, None)], max_num_batched_tokens=8, max_num_seqs=2,
        arrivals=[0, 0.5], async_scheduling=True,
    )  # fmt: skip
    assert scheduled(load) == [{"a": 2}, {"a": 1}, {"b": 8}, {"b": 1, "a": 1}, {"a": 1}, {}]
