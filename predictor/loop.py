"""The engine's loop: schedule, launch, retire; step by step, or from event to event.

Between two events (an admission, a finished prefill, a finish, a shortage of blocks, an arrival) a decode batch
repeats itself, and with a step time that is affine in the context its `k` repetitions are an arithmetic series.
"""

from __future__ import annotations

from collections.abc import Callable

from predictor import blocks, queues, steps
from predictor.batching import fill
from predictor.compiled import inner_kernel, kernel, small_kernel
from predictor.state import FINISHED, State
from predictor.step_time import decode_slope, step_seconds

TAIL_OF_QUEUE = -2  # watched: stop before a step that could look past the last waiting request


def loop_with(schedule: Callable[[State], bool]) -> Callable[[State, float, int, int], None]:
    """Make the loop around a local scheduler."""

    def drive(state: State, until_s: float, last_step: int, watched: int) -> None:
        while reach_plan(state, until_s, last_step, watched):
            state.engine[0].steady = schedule(state)
            send(state)

    return drive


_drive = inner_kernel(loop_with(fill))


@kernel
def drive(state: State, until_s: float, last_step: int, watched: int) -> None:
    """Run the engine until nothing can happen by `until_s`, `last_step` was launched, or a watched request ended."""
    _drive(state, until_s, last_step, watched)


@kernel
def reach_plan(state: State, until_s: float, last_step: int, watched: int) -> bool:
    """Go on to the moment at which a step must be planned; False when the run ends before.

    Mirrors vLLM 0.32 `EngineCore.step` (pipeline depth 1) and `step_with_batch_queue` (depth 2): a step is planned
    whenever the pipeline has room and any request is unfinished, else the oldest step is awaited.
    """
    engine = state.engine[0]
    while engine.num_steps < last_step:
        queues.absorb_arrivals(state)
        if watched >= 0 and state.requests[watched].status == FINISHED:
            return False
        has_room = engine.num_in_flight < engine.pipeline_depth
        if watched == TAIL_OF_QUEUE and has_room and not has_tail_ahead(state):
            return False  # a request at the tail would be in the step that is planned here
        unfinished = engine.num_running + engine.num_waiting
        if unfinished > 0 and not engine.stuck and has_room:
            if engine.now_s > until_s:
                return False
            if engine.steady and engine.num_in_flight == engine.pipeline_depth - 1:
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
            if engine.num_pending == 0 or queues.next_arrival_s(state) > until_s:
                return False
            engine.now_s = queues.next_arrival_s(state)
    return False


@small_kernel
def has_tail_ahead(state: State) -> bool:
    """Tell whether more wait than could be admitted in the next step, so that it will not look past the last one."""
    engine = state.engine[0]
    return bool(engine.num_waiting > engine.max_num_seqs - engine.num_running)


@kernel
def send(state: State) -> None:
    """Launch the step just planned, unless it is empty and nothing but an arrival can change that."""
    if nothing_will_change(state):
        state.engine[0].stuck = 1
    else:
        steps.launch(state)


@small_kernel
def nothing_will_change(state: State) -> bool:
    """Tell whether the step just made is empty and no step under way will free anything: only an arrival can help."""
    engine = state.engine[0]
    step = state.steps[steps.current(state)]
    if step.num_scheduled > 0 or step.num_preempted > 0:
        return False
    return engine.num_in_flight == 0 or state.steps[engine.oldest].num_scheduled == 0


@kernel
def count_repeats(state: State, until_s: float) -> int:
    """How often the steady decode step can be repeated before anything about it changes.

    The last repetition may bring requests to their end, unless a step behind it is planned before that is known.
    """
    engine = state.engine[0]
    most = 1 << 40
    for place in range(engine.num_running):
        request = state.requests[state.running[place]]
        most = min(most, request.final_tokens - request.output_tokens)
    most -= engine.pipeline_depth - 1
    if most <= 0:
        return 0
    most = _within_blocks(state, most)
    arrival_s = queues.next_arrival_s(state)
    if most <= 0 or _fits_in_time(state, most, until_s, arrival_s):
        return most
    fits, too_many = 0, most
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if _fits_in_time(state, middle, until_s, arrival_s):
            fits = middle
        else:
            too_many = middle
    return fits


@kernel
def _within_blocks(state: State, most: int) -> int:
    """Limit repetitions to those for which blocks are free."""
    engine = state.engine[0]
    free = engine.num_free_blocks - engine.decode_reserve
    n = engine.num_running
    if n * (most // engine.block_size + 1) <= free or _blocks_needed(state, most) <= free:
        return most
    fits, too_many = 0, most
    # Rounded to whole blocks or not, what n requests hold differs by less than n: that is where to look first.
    room = engine.block_size * free
    for place in range(n):
        request = state.requests[state.running[place]]
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
    """How many blocks the running requests take in so many steps."""
    engine = state.engine[0]
    per_token = 1.0 / engine.block_size  # half a token from every whole block, rounding cannot matter
    needed = 0
    for place in range(engine.num_running):
        request = state.requests[state.running[place]]
        held = int((request.computed_tokens + num_repeats + engine.block_size - 0.5) * per_token)
        needed += max(held - request.num_blocks, 0)
    return needed


@kernel
def _contexts(state: State) -> tuple[int, int]:
    """How much context the running requests have in sum, and the longest one."""
    context, longest = 0, 0
    for place in range(state.engine[0].num_running):
        computed = state.requests[state.running[place]].computed_tokens
        context += computed
        longest = max(longest, computed)
    return context, longest


@kernel
def _series_s(state: State, context: int, longest: int, num_repeats: int) -> float:
    """Seconds for so many decode steps in a row of all that run, each one token beyond the contexts before it."""
    n = state.engine[0].num_running
    first_s = step_seconds(state.costs, n, n, n, context + n, 0, 0.0, 0.0, longest + 1)
    growth_s = decode_slope(state.costs, n) * n
    return state.engine[0].pace * num_repeats * (first_s + growth_s * (num_repeats - 1) * 0.5)


@kernel
def _fits_in_time(state: State, num_repeats: int, until_s: float, arrival_s: float) -> bool:
    """Tell whether the last repetition is planned before the next arrival and retired by `until_s`."""
    engine = state.engine[0]
    if until_s == float("inf") and arrival_s == float("inf"):
        return True
    context, longest = _contexts(state)
    if engine.pipeline_depth == 1:
        planned_s = engine.now_s + _series_s(state, context, longest, num_repeats - 1)
        retired_s = engine.now_s + _series_s(state, context, longest, num_repeats)
    else:
        under_way_ends_s = state.steps[engine.oldest].end_s
        planned_s = engine.now_s
        if num_repeats > 1:
            planned_s = under_way_ends_s + _series_s(state, context, longest, num_repeats - 2)
        retired_s = under_way_ends_s + _series_s(state, context, longest, num_repeats - 1)
    return planned_s < arrival_s and retired_s <= until_s


@kernel
def repeat(state: State, num_repeats: int) -> None:
    """Do so many identical decode steps at once: plan, launch and retire each, as the loop would."""
    engine = state.engine[0]
    context, longest = _contexts(state)
    if engine.pipeline_depth == 1:
        engine.now_s += _series_s(state, context, longest, num_repeats)
    else:  # what was under way is retired, and the last repetition is under way instead
        step = state.steps[engine.oldest]
        engine.now_s = step.end_s + _series_s(state, context, longest, num_repeats - 1)
        step.start_s = engine.now_s
        step.decode_context = context + engine.num_running * num_repeats
        step.decode_longest = longest + num_repeats
        step.end_s = engine.now_s + _series_s(
            state, step.decode_context - engine.num_running, step.decode_longest - 1, 1
        )
    if engine.prefix_caching:
        _allocate_in_order(state, num_repeats)
    num_finished = 0
    for place in range(engine.num_running):
        slot = state.running[place]
        request = state.requests[slot]
        request.computed_tokens += num_repeats
        request.output_tokens += num_repeats
        blocks.allocate(state, slot, request.computed_tokens)
        blocks.register_full(state, slot, request.computed_tokens - request.placeholders)
        num_finished += request.output_tokens >= request.final_tokens
    if num_finished > 0:
        _finish_repeated(state)
    engine.num_steps += num_repeats
    engine.decodes_since_look += num_repeats


@kernel
def _finish_repeated(state: State) -> None:
    for place in range(state.engine[0].num_running):
        slot = state.running[place]
        if state.requests[slot].output_tokens >= state.requests[slot].final_tokens:
            queues.finish(state, slot)
    queues.drop_finished(state, False)


@kernel
def _allocate_in_order(state: State, num_repeats: int) -> None:
    """Hand out the blocks of the coming steps in the order in which the steps would take them.

    A request needs its next block after as many steps as its last one has room for, and then every `block_size`.
    """
    engine = state.engine[0]
    size = engine.block_size
    starts = state.turn_starts[: size + 1]
    starts[:] = 0
    for place in range(engine.num_running):
        starts[_room(state, place) + 1] += 1
    for step in range(size):
        starts[step + 1] += starts[step]
    in_turn = state.turns
    for place in range(engine.num_running):
        room = _room(state, place)
        in_turn[starts[room]] = place
        starts[room] += 1
    for cycle in range(0, num_repeats, size):
        for turn in range(engine.num_running):
            place = in_turn[turn]
            ahead = cycle + _room(state, place) + 1
            if ahead <= num_repeats:
                slot = state.running[place]
                blocks.allocate(state, slot, state.requests[slot].computed_tokens + ahead)


@small_kernel
def _room(state: State, place: int) -> int:
    size = state.engine[0].block_size
    return -state.requests[state.running[place]].computed_tokens % size
