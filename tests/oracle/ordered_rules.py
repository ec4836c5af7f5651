"""The rules that order all requests, in plain Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.oracle import bros
from tests.oracle.engine import EngineSettings, Seconds, Step, one_second
from tests.oracle.ordered import INFINITY, Engine, Plan, Request, Rule, replay
from tests.strategies import AFFINE, ONE_SECOND, affine_seconds

STEP_TIMES = {one_second: ONE_SECOND, affine_seconds: AFFINE}


def edf(engine: Engine) -> Plan:
    """Earliest due time first."""
    limit_s = share_of_tpot(engine)
    return Plan(engine.ordered(lambda one: (engine.due_s(one),)), most_tokens(engine), limit_s, limit_s)


def sjf(engine: Engine) -> Plan:
    """Decodes, then the shortest remaining prefill."""
    limit_s = share_of_tpot(engine)
    order = engine.ordered(lambda one: (0 if one.decodes else one.left,))
    return Plan(order, most_tokens(engine), limit_s, limit_s)


def density(engine: Engine) -> Plan:
    """Least cost per weight first."""
    limit_s = share_of_tpot(engine)
    order = engine.ordered(lambda one: (cost_per_weight(engine, one),))
    return Plan(order, most_tokens(engine), limit_s, limit_s)


def slide_batching(engine: Engine) -> Plan:
    """ProServe's Algorithm 1, and its ablations."""
    shortest = engine.shortest_tpot_s
    remaining = {one.id: engine.due_s(one) - engine.start_s for one in engine.requests}
    costs = {one.id: engine.cost_s(one) for one in engine.requests}
    t_min = min(
        (time for time in remaining.values() if time >= 0 or engine.option("skip_overdue") == 0), default=INFINITY
    )
    if engine.option("eta_max"):
        t_min = min(t_min, engine.option("eta_max") * shortest)
    t_budget = INFINITY if shortest == INFINITY else max(t_min, engine.option("eta") * shortest)
    factor = 1.0 if t_budget == INFINITY else 1e18
    if engine.constant_s < t_budget < INFINITY:
        factor = t_budget / (t_budget - engine.constant_s)
    extra_s = 0.0
    if engine.option("phi") == 2:
        factor, extra_s = 1.0, len(engine.requests) * engine.constant_s
    if engine.option("estimator") == 0:
        costs = {one.id: float(one.left) for one in engine.requests}
        factor = 0.0 if shortest == INFINITY else shortest / token_budget(engine)
        t_budget, extra_s = INFINITY, 0.0
    factor *= engine.option("gamma")
    by_deadline = engine.ordered(lambda one: (engine.due_s(one),))
    urgent = set()
    for request in engine.requests:
        counted = engine.requests
        if engine.option("phi") == 1:
            counted = by_deadline[: by_deadline.index(request) + 1]
        is_near = remaining[request.id] < factor * sum((costs[one.id] for one in counted), start=extra_s)
        if {0: is_near, 1: False, 2: True}[int(engine.option("order"))]:
            urgent.add(request.id)
    order = engine.ordered(
        lambda one: (0, costs[one.id] / next_weight(engine, one)) if one.id in urgent else (1, engine.due_s(one))
    )
    return Plan(order, token_budget(engine), t_budget, t_budget)


def fair_batching(engine: Engine) -> Plan:
    """Decodes that cannot wait for two more steps, prefills, and other decodes, each by due time."""
    step_s = engine.shortest_tpot_s
    slack_s = {one.id: engine.due_s(one) - engine.start_s for one in engine.requests if one.decodes}
    nearly_due = {name for name, slack in slack_s.items() if slack < (2 - 1e-6) * step_s}
    limits = [slack - (0.0 if name in nearly_due else step_s) for name, slack in slack_s.items() if slack < INFINITY]
    limit_s = max(min(limits), engine.option("eta") * step_s) if limits else INFINITY

    def group(one: Request) -> int:
        if not one.decodes:
            return 1
        return 0 if one.id in nearly_due else 2

    return Plan(engine.ordered(lambda one: (group(one), engine.due_s(one))), most_tokens(engine), limit_s, limit_s)


def decode_then_edf(engine: Engine) -> Plan:
    """All decodes, prefills in time and late ones, by deadline, until the first one of a decode that is not late."""
    live = [
        engine.due_s(one) - engine.start_s
        for one in engine.requests
        if one.decodes and engine.due_s(one) >= engine.start_s
    ]

    def group(one: Request) -> int:
        return 0 if one.decodes else 1 + (engine.due_s(one) < engine.start_s)

    order = engine.ordered(lambda one: (group(one), engine.due_s(one)))
    return Plan(order, most_tokens(engine), INFINITY, min(live, default=INFINITY))


def sarathi_fcfs(engine: Engine) -> Plan:
    """Decodes, then prefills in order of arrival."""
    return Plan(engine.ordered(lambda one: (not one.decodes, one.arrival_s)), token_budget(engine))


def sarathi_priority(engine: Engine) -> Plan:
    """Decodes, then prefills by priority."""
    order = engine.ordered(lambda one: (not one.decodes, 0 if one.decodes else one.priority, one.arrival_s))
    return Plan(order, token_budget(engine))


def weighted_vtc(engine: Engine) -> Plan:
    """Running requests, then again and again the next one of the client whose counter is the lowest."""
    counters = engine.counters
    queues: dict[tuple[str, float], list[Request]] = {}
    for request in engine.waiting:
        queues.setdefault((request.client_id, request.weight), []).append(request)
    before = [counters[client] for client in engine.clients_waiting if client in queues]
    left = [counters[client] for client in engine.clients_waiting if client not in queues]
    if before or left:
        engine.lift = max(engine.lift, min(before) if before else max(left))
    for client in queues:
        if client not in engine.clients_waiting:
            counters[client] = max(counters.get(client, 0.0), engine.lift)
    engine.clients_waiting = set(queues)

    keys = {}
    for client, requests in queues.items():
        num_tokens = 0
        for request in requests:
            if request not in engine.requests:
                continue
            keys[request.id] = counters[client] + num_tokens / client[1]
            num_tokens += request.num_tokens
    order = engine.ordered(lambda one: (0 if one.decodes else 1, one.arrival_s) if one.running else (2, keys[one.id]))

    decoding = {one.id for one in order if one.decodes}

    def count(scheduled: dict[str, int]) -> None:
        """Charge the step to the counters."""
        for name, num_tokens in scheduled.items():
            request = engine.unfinished[name]
            assert isinstance(request, Request)
            cost = engine.option("decode_cost") if name in decoding else 1.0
            counters[request.client_id, request.weight] += cost * num_tokens / request.weight

    return Plan(order, token_budget(engine), after=count)


def most_tokens(engine: Engine) -> int:
    """Return the engine's own limit."""
    return int(engine.settings["max_num_batched_tokens"])


def token_budget(engine: Engine) -> int:
    """Return the rule's limit of tokens."""
    budget = int(engine.option("token_budget"))
    return min(budget, most_tokens(engine)) if budget else most_tokens(engine)


def share_of_tpot(engine: Engine) -> float:
    """Return the limit of a step's time."""
    eta = engine.option("eta")
    return eta * engine.shortest_tpot_s if eta > 0 else INFINITY


def cost_per_weight(engine: Engine, request: Request) -> float:
    """Return the inverse of a request's density."""
    return engine.cost_s(request) / next_weight(engine, request)


def next_weight(engine: Engine, request: Request) -> float:
    """Return what a request's next token is worth."""
    return request.weight * (engine.option("first_token_weight") if request.produced == 0 else 1.0)


def deadline_forecast(engine: Engine) -> Plan:
    """Decodes, then the prefills that can all be on time, then those given up."""
    now_s, tpot_s = engine.start_s, engine.shortest_tpot_s
    decodes = [one for one in engine.requests if one.decodes]
    prefills = [one for one in engine.requests if not one.decodes]
    least_s = share_of_tpot(engine)
    long_s = max(least_s, min(tpot_s, 5 * engine.constant_s))
    slack_s = {one.id: engine.due_s(one) - now_s for one in decodes}
    can_wait = long_s > least_s and len(engine.pool.free) * 10 > engine.settings["num_gpu_blocks"] - 1
    ahead = {one.id for one in decodes if can_wait and 3 * tpot_s <= slack_s[one.id] < INFINITY}
    needed = [one for one in decodes if one.id not in ahead]
    busy_s = engine.constant_s
    for one in needed:
        busy_s += engine.cost_s(one)
    first_s = min((slack_s[one.id] for one in needed if slack_s[one.id] >= 0), default=INFINITY)
    limit_s = max(least_s, min(first_s, long_s))
    rate, step_s = 1.0, busy_s
    if least_s < INFINITY:
        step_s = max(least_s, min(long_s, 0.75 * tpot_s))
        rate = max(0.05, 1 - busy_s / step_s)
    takes_s = {one.id: engine.cost_s(one) / rate for one in prefills}
    late_s = {one.id: now_s + takes_s[one.id] - engine.due_s(one) for one in prefills}

    def cost_per_gain(one: Request) -> float:
        tokens = float(tokens_to_come(engine, one))
        context = one.prompt_tokens + one.produced + tokens / 2
        num_tokens = (engine.settings["num_gpu_blocks"] - 1) * engine.block_size
        held_s = tokens * step_s * context / num_tokens
        gain = tokens
        if late_s[one.id] > 0:
            gain -= late_s[one.id] / one.tpot_slo_s if one.tpot_slo_s else 0
        elif one.produced == 0:
            gain += engine.option("first_token_weight")
        cost_s = engine.cost_s(one) + tokens * engine.decode_cost_s(context) + held_s
        return cost_s / (one.weight * max(gain, 1e-3))

    keys = {one.id: cost_per_gain(one) for one in prefills}
    kept = kept_on_time(engine, [one for one in prefills if late_s[one.id] <= 0], takes_s, keys)
    joining = [one for one in kept if not one.running]
    num_blocks = sum(engine.blocks_for(one.num_tokens) for one in joining)
    has_seats = len(engine.running) + len(joining) <= engine.settings["max_num_seqs"]
    if has_seats and num_blocks <= len(engine.pool.free):
        keys.update({one.id: engine.due_s(one) for one in kept})
    groups = {one.id: 1 if one in kept else 3 for one in prefills}
    aged = [one for one in prefills if is_aged(engine, one)]
    if aged and engine.option("age_limit") > 0:
        oldest = min(aged, key=lambda one: (one.arrival_s, one.id))
        groups[oldest.id], keys[oldest.id] = 1, -INFINITY
    for one in decodes:
        groups[one.id], keys[one.id] = 2 if one.id in ahead else 0, engine.due_s(one)
    order = engine.ordered(lambda one: (groups[one.id], keys[one.id]))
    return Plan(order, most_tokens(engine), max(least_s, tpot_s), limit_s)


def kept_on_time(
    engine: Engine, prefills: list[Request], takes_s: dict[str, float], keys: dict[str, float]
) -> list[Request]:
    """Return the prefills that can be on time one after the other, without those with the highest keys."""
    kept: list[Request] = []
    end_s = engine.start_s
    for one in sorted(prefills, key=lambda one: (engine.due_s(one), one.arrival_s, one.id)):
        kept.append(one)
        end_s += takes_s[one.id]
        while end_s > engine.due_s(one) and one in kept:
            worst = max(reversed(kept), key=lambda other: keys[other.id])
            kept.remove(worst)
            end_s -= takes_s[worst.id]
    return kept


def tokens_to_come(engine: Engine, request: Request) -> int:
    """Return the known rest of a response."""
    length = min(request.output_tokens, request.max_tokens, engine.settings["max_model_len"] - request.prompt_tokens)
    return max(length - request.produced, length // 8 + 1)


def is_aged(engine: Engine, request: Request) -> bool:
    """Whether a request without a first token is beyond the age limit, in the part of the time that is for those."""
    if request.produced > 0 or request.ttft_slo_s is None:
        return False
    is_its_turn = engine.start_s % request.ttft_slo_s < engine.option("age_share") * request.ttft_slo_s
    return is_its_turn and engine.start_s - request.arrival_s > engine.option("age_limit") * request.ttft_slo_s


RULES: dict[str, Rule] = {
    "edf": edf,
    "sjf": sjf,
    "density": density,
    "slide_batching": slide_batching,
    "fair_batching": fair_batching,
    "deadline_forecast": deadline_forecast,
    "decode_then_edf": decode_then_edf,
    "sarathi_fcfs": sarathi_fcfs,
    "sarathi_priority": sarathi_priority,
    "weighted_vtc": weighted_vtc,
    "bros": bros.bros,
    "bros_round_robin": bros.round_robin,
}


def replay_steps(
    settings: EngineSettings, requests: Iterable[Mapping[str, Any]], seconds: Seconds = one_second
) -> Iterator[Step]:
    """Run an engine with the rule of its settings, and yield each step right after its planning."""
    return replay(RULES[settings["batcher"]], settings, requests, seconds, STEP_TIMES[seconds])
