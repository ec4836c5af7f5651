"""The engine's loop: schedule, launch, retire; step by step, or from event to event.

Between two events (an admission, a finished prefill, a finish, a shortage of blocks, an arrival) a decode batch
repeats itself. The step time is affine in the context, so the durations of `k` repetitions are an arithmetic series.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from predictor import adapters, blocks, estimator, queues, remote_kv, steps
from predictor.batching import fill
from predictor.compiled import inner_kernel, kernel, small_kernel
from predictor.state import AT_SETBACK, FINISHED, NEVER, PLAIN_LAYOUT, State
from predictor.step_time import (
    ALONE,
    CONSTANT,
    DECODE_REGION,
    DECODE_WAIT,
    KNOTS,
    NUM_KNOTS,
    SAMPLED,
    Costs,
    context_seconds,
    count_measured,
    decode_slope,
    step_seconds,
    steps_in_line,
)

TAIL_OF_QUEUE = -2  # watched: stop before a step that could admit a request behind all that wait now


def loop_with(schedule: Callable[[State], bool]) -> Callable[[State, float, int, int], None]:
    """Return the loop that plans its steps with a local scheduler."""

    def drive(state: State, until_s: float, last_step: int, watched: int) -> None:
        while reach_plan(state, until_s, last_step, watched):
            state.engine[0].steady_limit_s = np.inf
            state.engine[0].steady = schedule(state)
            send(state)

    return drive


_drive = inner_kernel(loop_with(fill))


@kernel
def drive(state: State, until_s: float, last_step: int, watched: int) -> None:
    """Run the engine until no event is left before `until_s`, `last_step` is launched, or the watched request ends."""
    _drive(state, until_s, last_step, watched)


@kernel
def reach_plan(state: State, until_s: float, last_step: int, watched: int) -> bool:
    """Run the engine until a step must be planned; return False where the run ends before.

    Mirrors vLLM 0.32 `EngineCore.step` (pipeline depth 1) and `step_with_batch_queue` (depth 2): a step is planned
    whenever the pipeline has room and a request is unfinished; else the engine waits for the oldest step.
    """
    engine = state.engine[0]
    while engine.num_steps < last_step:
        remote_kv.absorb_transfers(state)
        queues.absorb_arrivals(state)
        if is_over(state, watched):
            return False
        has_room = engine.num_in_flight < engine.pipeline_depth - engine.awaits_step
        if watched == TAIL_OF_QUEUE and has_room and not has_tail_ahead(state):
            return False  # a request at the tail would be in the step that is planned here
        unfinished = engine.num_running + engine.num_waiting
        if unfinished > 0 and not engine.stuck and has_room:
            repeats = engine.steady and engine.num_in_flight == engine.pipeline_depth - 1
            if engine.now_s > until_s or (repeats and is_kept_for_good(state)):
                return False
            if repeats:
                num_repeats = min(count_repeats(state, until_s), last_step - engine.num_steps)
                if num_repeats > 0:
                    repeat(state, num_repeats)
                    continue
            steps.begin(state)
            return True
        if engine.num_in_flight > 0:
            if state.steps[engine.oldest].end_s > until_s:
                return False
            steps.retire(state)
        else:
            next_s = next_event_s(state, until_s)
            if next_s == np.inf or next_s > until_s:
                return False
            engine.now_s = max(engine.now_s, next_s)
    return False


@small_kernel
def is_over(state: State, watched: int) -> bool:
    """Return whether the watched request has ended, or there was a setback in a run that ends at the first."""
    if state.engine[0].stops == AT_SETBACK and state.engine[0].num_setbacks > 0:
        return True
    return bool(watched >= 0 and state.requests[watched].status == FINISHED)


@small_kernel
def is_kept_for_good(state: State) -> bool:
    """Note whether certainly no setback follows the steady steps that are to come, in a run that ends there."""
    if state.engine[0].stops != NEVER and keeps_all(state):
        state.engine[0].is_kept = 1
    return bool(state.engine[0].is_kept)


@small_kernel
def next_event_s(state: State, until_s: float) -> float:
    """Return when an idle engine has something to do; infinity where that concerns no request, and no time is asked."""
    engine = state.engine[0]
    if until_s == np.inf and engine.num_waiting + engine.num_pending == 0:
        return np.inf  # at most, blocks of finished prefills are held
    return queues.next_event_s(state)


@small_kernel
def has_tail_ahead(state: State) -> bool:
    """Return whether more requests wait than the next step can admit, so that it cannot reach the tail of the queue.

    A local scheduler that orders the queue can admit from its tail, and plans by all that wait.
    """
    engine = state.engine[0]
    num_seats = engine.max_num_seqs - engine.num_running
    if engine.orders_queue or engine.num_waiting <= num_seats:
        return False
    return not (engine.fetches or engine.max_loras > 0) or num_waiting_for_seats(state) > num_seats


@kernel
def num_waiting_for_seats(state: State) -> int:
    """Return how many waiting requests certainly run once the scheduler reaches them.

    The others fetch their KV blocks first, or may be passed over because of their adapters.
    """
    count, has_adapters = 0, state.engine[0].max_loras > 0
    for position in range(state.engine[0].num_waiting):
        slot = queues.waiting_at(state, position)
        may_be_passed = has_adapters and state.facts[slot].adapter != adapters.NO_ADAPTER
        count += remote_kv.takes_seat(state, slot) and not may_be_passed
    return count


@kernel
def send(state: State) -> None:
    """Launch the planned step, unless it is empty and only an arrival, or the end of a step, can change that."""
    engine = state.engine[0]
    if nothing_will_change(state):
        engine.stuck = 1
    elif engine.is_sglang and engine.num_in_flight > 0 and state.steps[steps.current(state)].num_scheduled == 0:
        engine.awaits_step = 1
    else:
        steps.launch(state)


@small_kernel
def nothing_will_change(state: State) -> bool:
    """Return whether the planned step is empty and no step in flight will free a slot or a block."""
    engine = state.engine[0]
    step = state.steps[steps.current(state)]
    if step.num_scheduled > 0 or step.num_preempted > 0:
        return False
    return engine.num_in_flight == 0 or state.steps[engine.oldest].num_scheduled == 0


@kernel
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


@kernel
def _within_limit(state: State) -> int:
    """Return a number of repetitions that all take at most `steady_limit_s` by estimate; rounding costs one at most."""
    context, longest = _contexts(state)
    first_s, growth_s = _decode_s(state, context, longest)
    estimated = estimator.belief(state.engine[0]) / decode_pace(state)
    spare_s = state.engine[0].steady_limit_s * (1 - 1e-9) - first_s * estimated
    if spare_s < 0:
        return 0
    return 1 + int(min(spare_s / (growth_s * estimated), 1e9)) if growth_s > 0 else 1 << 40


@kernel
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


@kernel
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


@kernel
def keeps_all(state: State) -> bool:
    """Return whether the steady decode steps certainly go on to the end without a preemption or a missed deadline.

    That is so if the KV blocks of all complete responses fit, and if a step as long as any to come is within each TPOT
    target. Requests that have missed a deadline count no more.
    """
    engine = state.engine[0]
    if engine.num_waiting + engine.num_pending + engine.num_transfers > 0 or engine.kv_layout != PLAIN_LAYOUT:
        return False
    if engine.steady_limit_s < np.inf:
        return False
    longest_rest = 0
    for position in range(engine.num_running):
        request = state.requests[state.running[position]]
        if request.output_tokens == 0:
            return False
        longest_rest = max(longest_rest, request.final_tokens - request.output_tokens)
    if _blocks_needed_at_end(state) > engine.num_free_blocks - engine.decode_reserve:
        return False
    start_s = engine.now_s
    if engine.num_in_flight > 0:
        start_s = max(start_s, state.steps[engine.oldest].end_s)
    step_s = _longest_step_s(state, longest_rest)
    longest_rest = 0  # of requests that such a step could make late
    for position in range(engine.num_running):
        slot = state.running[position]
        if not _keeps_with(state, slot, start_s, step_s):
            request = state.requests[slot]
            longest_rest = max(longest_rest, request.final_tokens - request.output_tokens)
    if longest_rest == 0:
        return True
    until_end_s = _longest_step_s(state, longest_rest)
    for position in range(engine.num_running):
        slot = state.running[position]
        if not _keeps_with(state, slot, start_s, step_s) and not _keeps_with(state, slot, start_s, until_end_s):
            return False
    return True


@small_kernel
def _keeps_with(state: State, slot: int, start_s: float, step_s: float) -> bool:
    """Return whether a request gets all tokens by their deadlines, if the next steps take at most `step_s` each."""
    request, tpot_s = state.requests[slot], state.facts[slot].tpot_slo_s
    if request.tokens_on_time < 0 or request.tokens_on_time < request.output_tokens or np.isnan(tpot_s):
        return True  # it has no deadline to miss
    return step_s <= tpot_s and start_s + step_s <= steps.due_s(state, slot, request.output_tokens + 1)


@kernel
def _blocks_needed_at_end(state: State) -> int:
    """Return the number of blocks that the running requests take until their responses end."""
    engine = state.engine[0]
    needed = 0
    for position in range(engine.num_running):
        request = state.requests[state.running[position]]
        tokens = request.computed_tokens + request.final_tokens - request.output_tokens
        needed += max(0, blocks.blocks_for(tokens, engine.block_size) - request.num_blocks)
    return needed


@kernel
def _longest_step_s(state: State, num_steps: int) -> float:
    """Return how long any of the next steps takes at most, which decode the running requests or some of them."""
    n = state.engine[0].num_running
    context = longest = 0
    for position in range(n):
        request = state.requests[state.running[position]]
        tokens = request.computed_tokens + min(num_steps, request.final_tokens - request.output_tokens)
        context += tokens
        longest = max(longest, tokens)
    by_tokens = sampled = attention = 0.0
    for num in range(1, n + 1):  # fewer sequences may take longer
        by_tokens = max(by_tokens, state.costs.by_tokens[num])
        sampled = max(sampled, state.costs.by_count[num, SAMPLED])
        attention = max(attention, _longest_attention_s(state.costs, num, min(context / num, longest), longest))
    return decode_pace(state) * (state.costs.coefficients[CONSTANT] + by_tokens + sampled + attention)


@small_kernel
def _longest_attention_s(costs: Costs, num_decodes: int, mean: float, longest: float) -> float:
    """Return how long attention takes at most where contexts have a mean and a maximum up to these."""
    share = costs.by_count[num_decodes, DECODE_WAIT]
    seconds = _most_between_knots_s(costs, num_decodes, mean)
    if share > 0:
        seconds += share * (_most_between_knots_s(costs, num_decodes, longest) - seconds)
    return seconds


@small_kernel
def _most_between_knots_s(costs: Costs, num_decodes: int, most: float) -> float:
    """Return the longest attention of decodes of equal contexts up to a length: at the end, or at a knot before."""
    seconds = context_seconds(costs, num_decodes, num_decodes * most, 0.0, ALONE, DECODE_WAIT)
    for knot in range(int(costs.coefficients[NUM_KNOTS])):
        context = costs.coefficients[KNOTS + knot]
        if context < most:
            at_knot_s = context_seconds(costs, num_decodes, num_decodes * context, 0.0, ALONE, DECODE_WAIT)
            seconds = max(seconds, at_knot_s)
    return seconds


@kernel
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


@kernel
def _decode_s(state: State, context: int, longest: int) -> tuple[float, float]:
    """Return the seconds of a decode step of all running requests, and how many more each next one takes."""
    n, pace = state.engine[0].num_running, decode_pace(state)
    first_s = step_seconds(state.costs, n, n, n, context + n, 0, 0.0, 0.0, longest + 1)
    return pace * first_s, pace * decode_slope(state.costs, n, context + n, longest + 1) * n


@small_kernel
def _series_s(first_s: float, growth_s: float, num_steps: int) -> float:
    """Return the seconds of steps of which the first takes `first_s`, and each other one `growth_s` more."""
    return num_steps * (first_s + growth_s * (num_steps - 1) * 0.5)


@kernel
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


@kernel
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


@kernel
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
    if is_on_time and is_first_late:
        engine.least_slack_s = min(engine.least_slack_s, -first_late_s)
    elif is_on_time and not is_last_late:
        engine.least_slack_s = min(engine.least_slack_s, -max(first_late_s, last_late_s))
    engine.num_setbacks += is_on_time and (is_first_late or is_last_late)
    if not is_first_late and not is_last_late:
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
            late_s = _late_s(highest + 1, slack_s, tpot_s, first_s, growth_s, num_ahead)
            engine.least_slack_s = min(engine.least_slack_s, -late_s)
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


@kernel
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
