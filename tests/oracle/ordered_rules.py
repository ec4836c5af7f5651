"""The rules that order all requests, in plain Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

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
    """ProServe's Algorithm 1."""
    shortest = engine.shortest_tpot_s
    t_min = min((engine.due_s(one) - engine.start_s for one in engine.requests), default=INFINITY)
    t_budget = INFINITY if shortest == INFINITY else max(t_min, engine.option("eta") * shortest)
    factor = engine.option("gamma") * (1.0 if t_budget == INFINITY else INFINITY)
    if engine.constant_s < t_budget < INFINITY:
        factor = engine.option("gamma") * (t_budget / (t_budget - engine.constant_s))
    by_deadline = engine.ordered(lambda one: (engine.due_s(one),))
    urgent = set()
    for request in engine.requests:
        counted = engine.requests
        if engine.option("phi") > 0:
            counted = by_deadline[: by_deadline.index(request) + 1]
        if engine.due_s(request) - engine.start_s < factor * sum(engine.cost_s(one) for one in counted):
            urgent.add(request.id)
    order = engine.ordered(
        lambda one: (0, cost_per_weight(engine, one)) if one.id in urgent else (1, engine.due_s(one))
    )
    return Plan(order, most_tokens(engine), t_budget, t_budget)


def decode_then_edf(engine: Engine) -> Plan:
    """All decodes, then prefills by deadline until the first deadline of a decode that is not late."""
    live = [
        engine.due_s(one) - engine.start_s for one in engine.requests if one.decodes and engine.due_s(one) >= engine.start_s
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
    weight = request.weight * (engine.option("first_token_weight") if request.produced == 0 else 1.0)
    return engine.cost_s(request) / weight


RULES: dict[str, Rule] = {
    "edf": edf,
    "sjf": sjf,
    "density": density,
    "slide_batching": slide_batching,
    "decode_then_edf": decode_then_edf,
    "sarathi_fcfs": sarathi_fcfs,
    "sarathi_priority": sarathi_priority,
}


def replay_steps(
    settings: EngineSettings, requests: Iterable[Mapping[str, Any]], seconds: Seconds = one_second
) -> Iterator[Step]:
    """Run an engine with the rule of its settings, and yield each step right after its planning."""
    return replay(RULES[settings["batcher"]], settings, requests, seconds, STEP_TIMES[seconds])
