"""LoRA adapters: how many may be in one step, and which ones are in memory.

Mirrors vLLM 0.32 `Scheduler.schedule` (`max_loras`) and, in the worker, `LRUCacheWorkerLoRAManager`: adapters are in
host memory (`max_cpu_loras`), the most recently used of them in GPU slots (`max_loras`). vLLM touches those of one
step in an arbitrary order; here it is that of the step.
"""

from __future__ import annotations

from predictor.compiled import kernel, small_kernel
from predictor.request import NO_ADAPTER
from predictor.state import State


@kernel
def note_scheduled(state: State) -> None:
    """Note the adapters of the requests in the step that is being planned, before it admits waiting ones."""
    engine = state.engine[0]
    engine.num_step_adapters = 0
    index = (engine.oldest + engine.num_in_flight) % 2
    for position in range(state.steps[index].num_scheduled):
        note(state, state.batch[index, position].slot)


@small_kernel
def note(state: State, slot: int) -> None:
    """Note the adapter of a request that is in the step."""
    engine, number = state.engine[0], state.facts[slot].adapter
    if number != NO_ADAPTER and not is_in_step(state, number) and engine.num_step_adapters < engine.max_loras:
        state.step_adapters[engine.num_step_adapters] = number
        engine.num_step_adapters += 1


@small_kernel
def is_in_step(state: State, number: int) -> bool:
    """Return whether an adapter is among those of the step."""
    for index in range(state.engine[0].num_step_adapters):  # noqa: SIM110 - numba has no generators
        if state.step_adapters[index] == number:
            return True
    return False


@small_kernel
def must_wait(state: State, slot: int) -> bool:
    """Return whether a waiting request is passed over, because its adapter would be one too many in the step."""
    engine, number = state.engine[0], state.facts[slot].adapter
    if number == NO_ADAPTER or engine.num_step_adapters < engine.max_loras:
        return False
    return not is_in_step(state, number)


@kernel
def load_for_step(state: State) -> float:
    """Bring the adapters of the step that starts into GPU slots; return the seconds that this takes."""
    engine = state.engine[0]
    index = (engine.oldest + engine.num_in_flight) % 2
    seconds = 0.0
    for position in range(state.steps[index].num_scheduled):
        seconds += use(state, state.facts[state.batch[index, position].slot].adapter)
    return seconds


@kernel
def use_running(state: State) -> None:
    """Note that the adapters of all running requests are used again."""
    for position in range(state.engine[0].num_running):
        use(state, state.facts[state.running[position]].adapter)


@small_kernel
def use(state: State, number: int) -> float:
    """Make an adapter the most recently used one; return the seconds that its loading takes."""
    last = state.engine[0].num_adapters - 1
    if number == NO_ADAPTER:
        return 0.0
    if last >= 0 and state.adapters[last].number == number and state.adapters[last].is_active:
        return 0.0
    return bring(state, number)


@kernel
def bring(state: State, number: int) -> float:
    """Move an adapter to the end of the list, into host memory and a GPU slot; return the seconds that this takes.

    The least recently used ones make room.
    """
    engine, seconds = state.engine[0], 0.0
    place, is_active = position_of(state, number), 0
    if place < 0:
        seconds += engine.lora_load_s
        engine.num_adapter_loads += 1
        if engine.num_adapters == engine.max_cpu_loras:
            place = 0
        else:
            place = engine.num_adapters
            engine.num_adapters += 1
    else:
        is_active = state.adapters[place].is_active
    for moved in range(place, engine.num_adapters - 1):
        state.adapters[moved].number = state.adapters[moved + 1].number
        state.adapters[moved].is_active = state.adapters[moved + 1].is_active
    newest = state.adapters[engine.num_adapters - 1]
    newest.number, newest.is_active = number, is_active
    if not is_active:
        seconds += engine.lora_activate_s
        engine.num_adapter_activations += 1
        free_gpu_slot(state)
        newest.is_active = 1
    return seconds


@small_kernel
def position_of(state: State, number: int) -> int:
    """Return the position of an adapter in host memory, the least recently used first; -1 where it is not there."""
    for position in range(state.engine[0].num_adapters):
        if state.adapters[position].number == number:
            return position
    return -1


@kernel
def free_gpu_slot(state: State) -> None:
    """Take the least recently used adapter from its GPU slot, if all slots are in use."""
    engine = state.engine[0]
    num_active = 0
    for position in range(engine.num_adapters):
        num_active += state.adapters[position].is_active
    if num_active < engine.max_loras:
        return
    for position in range(engine.num_adapters):
        if state.adapters[position].is_active:
            state.adapters[position].is_active = 0
            return
