"""Weighted virtual token counters ("Fairness in Serving LLMs"): who has been served least, by weight, goes first.

A client is a tenant with one weight of its requests. Running requests go on, decodes first; then waiting ones are
admitted one by one, each time the first in the queue of the client with the lowest counter. A counter grows by the
tokens that a step computes, over the weight. A client that starts to wait is lifted to the lowest counter of those that
wait already, or, where none does, to that of the last ones that did: none saves up service while idle.
"""

from __future__ import annotations

import numpy as np

from predictor import queues, steps
from predictor.batching import ordered, ordered_requests
from predictor.compiled import kernel, small_kernel
from predictor.state import NONE, RUNNING, WAITING, State

DECODE_COST, TOKEN_BUDGET = range(2)  # the options
(LIFT,) = range(1)  # the numbers in memory: the counter of those that start to wait, at least
MAX_CLIENTS = 1024  # that have requests, or have been served more than those that wait
DECODES, STARTED, NEW = -1, 0, 1  # those of admitted requests become their tokens


@kernel
def schedule(state: State) -> bool:
    """Fill the step by counters, and count what it serves."""
    engine = state.engine[0]
    count = ordered_requests.list_requests(state, False)
    update_clients(state)
    for place in range(count):
        slot = state.turns[place]
        rank, request = state.ranks[slot], state.requests[slot]
        if request.status == RUNNING:
            rank.group = DECODES if ordered_requests.is_decode(state, slot) else STARTED
            rank.key = request.arrival_s
            continue
        rank.group = NEW
        index = client_of(state, slot)
        rank.key = engine.memory[LIFT]
        if index != NONE:
            client = state.clients[index]
            rank.key = client.tokens + client.queued / client.weight
            client.queued += steps.tokens_of(state, slot)
    ordered.fill_tokens(state, count, engine.options[TOKEN_BUDGET])
    if not engine.plans_only:
        count_tokens(state)
    return False


@kernel
def client_of(state: State, slot: int) -> int:
    """Return the index of a request's client; NONE where it is not counted."""
    facts = state.facts[slot]
    for index in range(state.engine[0].num_clients):
        client = state.clients[index]
        if client.tenant == facts.tenant and client.weight == facts.weight:
            return index
    return NONE


@small_kernel
def slot_at(state: State, place: int) -> int:
    """Return one of the requests, the running ones before the waiting ones."""
    num_running = state.engine[0].num_running
    return state.running[place] if place < num_running else queues.waiting_at(state, place - num_running)


@kernel
def update_clients(state: State) -> None:
    """Enter clients that are new, lift those that start to wait, and drop those whose counter would be lifted."""
    engine = state.engine[0]
    count_requests(state)
    engine.memory[LIFT] = max(engine.memory[LIFT], lowest_counter(state))
    for index in range(engine.num_clients - 1, -1, -1):
        client = state.clients[index]
        if client.num_running + client.num_waiting == 0 and client.tokens <= engine.memory[LIFT]:
            remove(state, index)
    for place in range(engine.num_running + engine.num_waiting):
        if client_of(state, slot_at(state, place)) == NONE:
            enter(state, slot_at(state, place))
    count_requests(state)
    for index in range(engine.num_clients):
        client = state.clients[index]
        if client.num_waiting > 0 and not client.waits:
            client.tokens = max(client.tokens, engine.memory[LIFT])
        client.waits = client.num_waiting > 0
        client.queued = 0.0


@kernel
def count_requests(state: State) -> None:
    """Count the requests of each client."""
    for index in range(state.engine[0].num_clients):
        client = state.clients[index]
        client.num_running = client.num_waiting = 0
    engine = state.engine[0]
    for place in range(engine.num_running + engine.num_waiting):
        slot = slot_at(state, place)
        index = client_of(state, slot)
        if index != NONE:
            client = state.clients[index]
            if state.requests[slot].status == WAITING:
                client.num_waiting += 1
            else:
                client.num_running += 1


@kernel
def lowest_counter(state: State) -> float:
    """Return the lowest counter of those that still wait; where none does, the highest of those that did."""
    lowest, highest = np.inf, -np.inf
    for index in range(state.engine[0].num_clients):
        client = state.clients[index]
        if client.waits and client.num_waiting > 0:
            lowest = min(lowest, client.tokens)
        elif client.waits:
            highest = max(highest, client.tokens)
    return lowest if lowest < np.inf else highest


@kernel
def enter(state: State, slot: int) -> None:
    """Enter the client of a request; without room, in place of the least served one without requests, if any."""
    engine, facts = state.engine[0], state.facts[slot]
    if engine.num_clients == len(state.clients):
        least, lowest = NONE, np.inf
        for index in range(engine.num_clients):
            client = state.clients[index]
            if client.num_running + client.num_waiting == 0 and client.tokens < lowest:
                least, lowest = index, client.tokens
        if least == NONE:
            return
        remove(state, least)
    client = state.clients[engine.num_clients]
    client.tenant, client.weight = facts.tenant, facts.weight
    client.tokens = engine.memory[LIFT]
    client.waits = 0
    client.num_running, client.num_waiting = 1, 0  # it has a request
    engine.num_clients += 1


@kernel
def remove(state: State, index: int) -> None:
    """Remove a client; the last one takes its place."""
    engine = state.engine[0]
    engine.num_clients -= 1
    state.clients[index] = state.clients[engine.num_clients]


@kernel
def count_tokens(state: State) -> None:
    """Add the tokens of the planned step to the counters of their clients."""
    index = steps.current(state)
    for position in range(state.steps[index].num_scheduled):
        entry = state.batch[index, position]
        served = client_of(state, entry.slot)
        if served != NONE:
            cost = state.engine[0].options[DECODE_COST] if state.ranks[entry.slot].group == DECODES else 1.0
            client = state.clients[served]
            client.tokens += cost * entry.tokens / client.weight
