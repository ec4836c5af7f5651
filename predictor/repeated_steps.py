"""Decode steps that repeat themselves until the next event, computed at once.

Between two events (an admission, a finished prefill, a finish, a shortage of blocks, an arrival) a decode batch
repeats itself. The step time is affine in the context, so the durations of `k` repetitions are an arithmetic series.
"""

from __future__ import annotations

import numpy as np

from predictor import adapters, blocks, estimator, queues, steps
from predictor.compiled import kernel, small_kernel
from predictor.state import State
from predictor.step_time import DECODE_REGION
from predictor.tabulated_costs import count_measured, decode_slope, step_seconds, steps_in_line


@small_kernel
def count_repeats(state: State, until_s: float) -> int:
    """Return how often the steady decode step can be repeated before its batch changes.

    Requests may end in the last repetition, unless the engine plans another step before it knows of that.
    """
    engine = state.engine[0]
    max_repeats = 1 << 40
    for position in range(engine.num_running):
        request = state.requests[state.running[position]]
        max_repeats = min(max_repeats, request.final_tokens - request.output_tokens)
    max_repeats -= engine.pipeline_depth - 1
    if engine.steady_limit_s < np.inf:
        max_repeats = min(max_repeats, _within_limit(state))
    if max_repeats <= 0:
        return 0
    context, longest = _contexts(state)
    n = engine.num_running
    max_repeats = min(max_repeats, steps_in_line(state.costs, n, context + n, longest + 1))
    max_repeats = _within_blocks(state, max_repeats)
    event_s = queues.next_event_s(state)
    if max_repeats <= 0 or _fits_in_time(state, max_repeats, until_s, event_s):
        return max_repeats
    fits, too_many = 0, max_repeats
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if _fits_in_time(state, middle, until_s, event_s):
            fits = middle
        else:
            too_many = middle
    return fits


@small_kernel
def _within_limit(state: State) -> int:
    """Return a number of repetitions that all take at most `steady_limit_s` by estimate; rounding costs one at most."""
    context, longest = _contexts(state)
    first_s, growth_s = _decode_s(state, context, longest)
    estimated = estimator.belief(state.engine[0]) / decode_pace(state)
    spare_s = state.engine[0].steady_limit_s * (1 - 1e-9) - first_s * estimated
    if spare_s < 0:
        return 0
    return 1 + int(min(spare_s / (growth_s * estimated), 1e9)) if growth_s > 0 else 1 << 40


@small_kernel
def _within_blocks(state: State, max_repeats: int) -> int:
    """Return the number of repetitions, at most `max_repeats`, for which blocks are free."""
    engine = state.engine[0]
    free = engine.num_free_blocks - engine.decode_reserve
    n = engine.num_running
    if n * (max_repeats // engine.block_size + 1) <= free or _blocks_needed(state, max_repeats) <= free:
        return max_repeats
    fits, too_many = 0, max_repeats
    # The blocks of n requests are fewer than n more than their tokens need, so the answer is near these two guesses.
    room = engine.block_size * free
    for position in range(n):
        request = state.requests[state.running[position]]
        room += request.num_blocks * engine.block_size - request.computed_tokens
    for guess in (room // n - engine.block_size, room // n + 1):
        if fits < guess < too_many:
            if _blocks_needed(state, guess) <= free:
                fits = guess
            else:
                too_many = guess
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if _blocks_needed(state, middle) <= free:
            fits = middle
        else:
            too_many = middle
    return fits


@small_kernel
def _blocks_needed(state: State, num_repeats: int) -> int:
    """Return the number of blocks that the running requests take in `num_repeats` steps."""
    engine = state.engine[0]
    per_token = 1.0 / engine.block_size  # products stay half a token away from whole numbers: rounding has no effect
    needed = 0
    for position in range(engine.num_running):
        request = state.requests[state.running[position]]
        held = int((request.computed_tokens + num_repeats + engine.block_size - 0.5) * per_token)
        needed += max(held - request.num_blocks, 0)
    return needed


@small_kernel
def _contexts(state: State) -> tuple[int, int]:
    """Return the total context of the running requests, and the longest one."""
    context, longest = 0, 0
    for position in range(state.engine[0].num_running):
        computed = state.requests[state.running[position]].computed_tokens
        context += computed
        longest = max(longest, computed)
    return context, longest


@small_kernel
def decode_pace(state: State) -> float:
    """Return the real over the predicted time of steps of decodes alone."""
    return state.engine[0].pace * state.engine[0].region_pace[DECODE_REGION]


@small_kernel
def _decode_s(state: State, context: int, longest: int) -> tuple[float, float]:
    """Return the seconds of a decode step of all running requests, and how many more each next one takes."""
    n, pace = state.engine[0].num_running, decode_pace(state)
    first_s = step_seconds(state.costs, n, n, n, context + n, 0, 0.0, 0.0, longest + 1)
    return pace * first_s, pace * decode_slope(state.costs, n, context + n, longest + 1) * n


@small_kernel
def _series_s(first_s: float, growth_s: float, num_steps: int) -> float:
    """Return the seconds of steps of which the first takes `first_s`, and each other one `growth_s` more."""
    return num_steps * (first_s + growth_s * (num_steps - 1) * 0.5)


@small_kernel
def _fits_in_time(state: State, num_repeats: int, until_s: float, event_s: float) -> bool:
    """Return whether the last repetition is planned before the next event and retired by `until_s`."""
    engine = state.engine[0]
    if until_s == float("inf") and event_s == float("inf"):
        return True
    context, longest = _contexts(state)
    first_s, growth_s = _decode_s(state, context, longest)
    if engine.pipeline_depth == 1:
        planned_s = engine.now_s + _series_s(first_s, growth_s, num_repeats - 1)
        retired_s = engine.now_s + _series_s(first_s, growth_s, num_repeats)
    else:
        in_flight_ends_s = state.steps[engine.oldest].end_s
        planned_s = engine.now_s
        if num_repeats > 1:
            planned_s = in_flight_ends_s + _series_s(first_s, growth_s, num_repeats - 2)
        retired_s = in_flight_ends_s + _series_s(first_s, growth_s, num_repeats - 1)
    return planned_s < event_s and retired_s <= until_s


@small_kernel
def repeat(state: State, num_repeats: int) -> None:
    """Plan, launch and retire `num_repeats` identical decode steps at once."""
    engine = state.engine[0]
    context, longest = _contexts(state)
    first_s, growth_s = _decode_s(state, context, longest)
    num_measured = count_measured(state.costs, engine.num_running, context, longest, num_repeats)
    if num_measured < num_repeats:
        measured_s = _series_s(first_s, growth_s, num_measured)
        engine.unmeasured_s += _series_s(first_s, growth_s, num_repeats) - measured_s
    from_s, num_ahead = engine.now_s, 0  # steps of the series start here; tokens of steps in flight come before it
    if engine.pipeline_depth == 1:
        engine.now_s += _series_s(first_s, growth_s, num_repeats)
    else:  # the step in flight is retired, and the last repetition is in flight instead
        step = state.steps[engine.oldest]
        from_s, num_ahead = step.end_s, 1
        engine.now_s = from_s + _series_s(first_s, growth_s, num_repeats - 1)
        step.start_s = engine.now_s
        step.decode_context = context + engine.num_running * num_repeats
        step.decode_longest = longest + num_repeats
        last_s, _ = _decode_s(state, step.decode_context - engine.num_running, step.decode_longest - 1)
        step.end_s = engine.now_s + last_s
    if engine.prefix_caching:
        _allocate_in_order(state, num_repeats)
    if engine.max_loras > 0:
        adapters.use_running(state)
    num_finished = 0
    for position in range(engine.num_running):
        slot = state.running[position]
        request = state.requests[slot]
        if request.tokens_on_time >= 0:
            request.tokens_on_time += _count_on_time(state, slot, from_s, first_s, growth_s, num_ahead, num_repeats)
        request.computed_tokens += num_repeats
        request.output_tokens += num_repeats
        blocks.allocate(state, slot, request.computed_tokens)
        if not engine.is_sglang:
            blocks.register_full(state, slot, request.computed_tokens - request.placeholders)
        num_finished += request.output_tokens >= request.final_tokens
    if num_finished > 0:
        _finish_repeated(state)
    engine.num_steps += num_repeats
    engine.decodes_since_look += num_repeats


@small_kernel
def _count_on_time(
    state: State, slot: int, from_s: float, first_s: float, growth_s: float, num_ahead: int, num_repeats: int
) -> int:
    """Return how many of a request's next `num_repeats` tokens come by their deadlines.

    Steps become longer and deadlines are evenly spaced, so lateness is convex, and the tokens on time are consecutive.
    """
    tpot_s = state.facts[slot].tpot_slo_s
    if np.isnan(tpot_s):
        return 0
    slack_s = steps.due_s(state, slot, state.requests[slot].output_tokens + 1) - from_s
    first_late_s = _late_s(1, slack_s, tpot_s, first_s, growth_s, num_ahead)
    last_late_s = _late_s(num_repeats, slack_s, tpot_s, first_s, growth_s, num_ahead)
    is_first_late, is_last_late = first_late_s > 0, last_late_s > 0
    engine, request = state.engine[0], state.requests[slot]
    is_on_time = request.tokens_on_time == request.output_tokens  # so far; tokens after a late one do not count
    engine.num_setbacks += is_on_time and (is_first_late or is_last_late)
    if not is_first_late and not is_last_late:
        if is_on_time:
            engine.least_slack_s = min(engine.least_slack_s, -max(first_late_s, last_late_s))
        return num_repeats
    on_time = num_repeats if is_first_late else 1
    if is_first_late and is_last_late:
        if growth_s <= 0 or first_s >= tpot_s:
            return 0
        # the least late: from there on, steps are longer than the target
        on_time = num_ahead + int(min(np.ceil((tpot_s - first_s) / growth_s), num_repeats - num_ahead))
        if _late_s(on_time, slack_s, tpot_s, first_s, growth_s, num_ahead) > 0:
            return 0
    lowest, highest = 1, num_repeats
    if is_first_late:
        lowest = _edge(1, on_time, slack_s, tpot_s, first_s, growth_s, num_ahead)
    if is_last_late:
        highest = _edge(num_repeats, on_time, slack_s, tpot_s, first_s, growth_s, num_ahead)
        if is_on_time and not is_first_late:
            late_s = _late_s(highest, slack_s, tpot_s, first_s, growth_s, num_ahead)
            engine.least_slack_s = min(engine.least_slack_s, -max(first_late_s, late_s))
    return highest - lowest + 1


@kernel
def _edge(
    late: int, on_time: int, slack_s: float, tpot_s: float, first_s: float, growth_s: float, num_ahead: int
) -> int:
    """Return the last token on time on the way from one that is on time to one that is late."""
    while abs(late - on_time) > 1:
        middle = (late + on_time) // 2
        if _late_s(middle, slack_s, tpot_s, first_s, growth_s, num_ahead) > 0:
            late = middle
        else:
            on_time = middle
    return on_time


@small_kernel
def _late_s(number: int, slack_s: float, tpot_s: float, first_s: float, growth_s: float, num_ahead: int) -> float:
    """Return by how much a request's next token with this number, from 1 on, comes after its deadline."""
    return _series_s(first_s, growth_s, number - num_ahead) - (number - 1) * tpot_s - slack_s


@small_kernel
def _finish_repeated(state: State) -> None:
    for position in range(state.engine[0].num_running):
        slot = state.running[position]
        if state.requests[slot].output_tokens >= state.requests[slot].final_tokens:
            queues.complete(state, slot)
    queues.drop_finished(state, False)
    queues.forget_when_idle(state)


@kernel
def _allocate_in_order(state: State, num_repeats: int) -> None:
    """Allocate the blocks of the repeated steps in the order in which the steps would take them.

    A request needs its next block when its last one is full, and then every `block_size` steps.
    """
    engine = state.engine[0]
    size = engine.block_size
    starts = state.turn_starts[: size + 1]
    starts[:] = 0
    for position in range(engine.num_running):
        starts[_room(state, position) + 1] += 1
    for step in range(size):
        starts[step + 1] += starts[step]
    in_turn = state.turns
    for position in range(engine.num_running):
        room = _room(state, position)
        in_turn[starts[room]] = position
        starts[room] += 1
    for cycle in range(0, num_repeats, size):
        for turn in range(engine.num_running):
            position = in_turn[turn]
            ahead = cycle + _room(state, position) + 1
            if ahead <= num_repeats:
                slot = state.running[position]
                blocks.allocate(state, slot, state.requests[slot].computed_tokens + ahead)


@small_kernel
def _room(state: State, position: int) -> int:
    """Return the tokens that fit into the last block of a running request."""
    size = state.engine[0].block_size
    return -state.requests[state.running[position]].computed_tokens % size
