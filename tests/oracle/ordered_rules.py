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
    """All decodes, then prefills by deadline until the first deadline of a decode that is not late."""
    live = [
        engine.due_s(one) - engine.start_s
        for one in engine.requests
        if one.decodes and engine.due_s(one) >= engine.start_s
    ]
    order = engine.ordered(lambda one: (not one.decodes, engine.due_s(one)))
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


RULES: dict[str, Rule] = {
    "edf": edf,
    "sjf": sjf,
    "density": density,
    "slide_batching": slide_batching,
    "fair_batching": fair_batching,
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
