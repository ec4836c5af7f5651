"""Invalid snapshots, written by hand and random; run as a program, so that a crash can be detected.

`python -m tests.hostile` serves every case of `INVALID`, then random ones of the loads that it reads as JSON from its
input, and prints the error of each, empty if it was served.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from predictor.config import EngineConfig
from predictor.engine_from_snapshot import engine_from
from predictor.forecast import Forecaster
from predictor.request import RequestFacts
from predictor.snapshot import VERSION, KvCache, LiveRequest, Snapshot, StepUnderWay
from predictor.snapshot_of_engine import snapshot_of
from tests.inspecting import expect_blocks_conserved
from tests.strategies import AFFINE, Load

SMALL = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, block_size=4, num_gpu_blocks=11, max_model_len=32)
RUNNING = LiveRequest(
    request=RequestFacts(request_id="a", prompt_tokens=9, output_tokens=6, prefix_hashes=("x", "y")),
    produced_tokens=2, computed_tokens=10, num_blocks=3, full_blocks=2, block_ids=(0, 1, 2),
)  # fmt: skip
WAITING = LiveRequest(request=RequestFacts(request_id="b", prompt_tokens=5, output_tokens=3))
CACHE = KvCache(free_block_ids=(3, 4, 5, 6, 7, 8, 9), contents={0: "x", 1: "y"})
VALID = Snapshot(
    version=VERSION, taken_s=3.0, config=SMALL, num_free_blocks=7, running=(RUNNING,), waiting=(WAITING,),
    kv_cache=CACHE,
)  # fmt: skip


def running_with(**changes: Any) -> Snapshot:
    """Return a snapshot with changes to its running request."""
    return replace(VALID, running=(replace(RUNNING, **changes),))


def cache_with(**changes: Any) -> Snapshot:
    """Return a snapshot with changes to its KV blocks."""
    return replace(VALID, kv_cache=replace(CACHE, **changes))


def stepping(*steps: StepUnderWay, **changes: Any) -> Snapshot:
    """Return a snapshot with these steps in flight."""
    return replace(running_with(**changes), steps=steps)


def step(tokens: int = 1, name: str = "a", *, start_s: float = 2.9, sampled: tuple[str, ...] = ("a",)) -> StepUnderWay:
    """Return a step of one request."""
    return StepUnderWay(start_s=start_s, scheduled={name: tokens}, sampled=sampled)


INVALID: dict[str, Callable[[], Snapshot]] = {
    "a newer version": lambda: replace(VALID, version=VERSION + 1),
    "an older version": lambda: replace(VALID, version=0),
    "taken at no time": lambda: replace(VALID, taken_s=math.nan),
    "taken before time began": lambda: replace(VALID, taken_s=-1.0),
    "fewer than no free blocks": lambda: replace(VALID, num_free_blocks=-1),
    "more free blocks than there are": lambda: replace(VALID, num_free_blocks=12),
    "another number of free blocks than listed": lambda: replace(VALID, num_free_blocks=6),
    "a truth for a number": lambda: replace(VALID, num_free_blocks=True),
    "a request twice": lambda: replace(VALID, waiting=(WAITING, WAITING)),
    "running and reserved": lambda: replace(VALID, reserved=(RUNNING.request,)),
    "more running than seats": lambda: replace(
        VALID, config=replace(SMALL, max_num_seqs=1), running=(RUNNING, WAITING)
    ),
    "all produced": lambda: running_with(produced_tokens=23, computed_tokens=10),
    "less than nothing produced": lambda: running_with(produced_tokens=-1),
    "more computed than there is": lambda: running_with(computed_tokens=12),
    "more computed than its blocks hold": lambda: running_with(num_blocks=2, block_ids=(0, 1)),
    "placeholders of no step": lambda: running_with(placeholders=400),
    "in flight in no step": lambda: running_with(in_flight_tokens=3),
    "stale in no step": lambda: replace(VALID, waiting=(replace(WAITING, stale_tokens=3),)),
    "more blocks than it can need": lambda: running_with(num_blocks=10, block_ids=tuple(range(10))),
    "blocks not listed": lambda: running_with(block_ids=(0, 1)),
    "a block twice": lambda: running_with(block_ids=(0, 1, 1)),
    "a block out of range": lambda: running_with(block_ids=(0, 1, 10)),
    "a negative block": lambda: running_with(block_ids=(0, 1, -1)),
    "a block both held and free": lambda: running_with(block_ids=(0, 1, 3)),
    "more full than listed": lambda: running_with(full_blocks=4),
    "more full than computed": lambda: running_with(full_blocks=3),
    "full without content": lambda: cache_with(contents={0: "x"}),
    "not full with content": lambda: running_with(full_blocks=1),
    "filling with content": lambda: cache_with(contents={0: "x", 1: "y", 2: "z"}),
    "filling with a content of its own": lambda: cache_with(own_contents={2: ("a", 2)}),
    "filling and shared": lambda: replace(
        VALID, running=(RUNNING, replace(RUNNING, request=replace(RUNNING.request, request_id="c")))
    ),
    "content of a block out of range": lambda: cache_with(contents={0: "x", 1: "y", 10: "z"}),
    "content of a negative block": lambda: cache_with(contents={0: "x", 1: "y", -1: "z"}),
    "own content at a negative position": lambda: cache_with(own_contents={3: ("a", -5)}),
    "own content far out": lambda: cache_with(own_contents={3: ("b", 1 << 64)}),
    "free twice": lambda: cache_with(free_block_ids=(3, 4, 5, 6, 7, 8, 8)),
    "too few free": lambda: cache_with(free_block_ids=(3, 4, 5)),
    "free out of range": lambda: cache_with(free_block_ids=(3, 4, 5, 6, 7, 8, 10)),
    "contents without caching": lambda: replace(VALID, config=replace(SMALL, enable_prefix_caching=False)),
    "a step with an unknown request": lambda: stepping(step(name="unknown", sampled=())),
    "an unknown request sampled": lambda: stepping(step(sampled=("unknown",)), in_flight_tokens=1),
    "sampled but not scheduled": lambda: stepping(step(sampled=("a", "b")), in_flight_tokens=1),
    "a step at no time": lambda: stepping(step(start_s=math.inf), in_flight_tokens=1),
    "no tokens in a step": lambda: stepping(step(0), in_flight_tokens=1),
    "a step beyond all limits": lambda: stepping(step(2**31 - 1), in_flight_tokens=2**31 - 1),
    "scheduled but not in flight": lambda: stepping(step()),
    "two steps of an engine that makes one": lambda: stepping(step(), step(), in_flight_tokens=2),
    "three steps": lambda: stepping(step(), step(), step(), in_flight_tokens=3),
    "a reserved request that is too long": lambda: replace(
        VALID, reserved=(RequestFacts(request_id="c", prompt_tokens=40),)
    ),
}


def served(snapshot: Snapshot) -> None:
    """Create a snapshot's engine, forecast a request on it, add it, drop another, and serve all requests."""
    engine = engine_from(snapshot, AFFINE)
    expect_blocks_conserved(engine)
    candidate = RequestFacts(request_id="candidate", prompt_tokens=1, output_tokens=2, prefix_hashes=("x", "z"))
    Forecaster(engine).forecast([candidate], snapshot.taken_s)
    engine.add(candidate)
    engine.next_step()
    expect_blocks_conserved(engine)
    engine.abort(min(engine.slots))
    expect_blocks_conserved(engine)
    engine.advance()
    expect_blocks_conserved(engine)
    head, rows = engine.state.engine[0], engine.state.requests
    assert head.stuck or (head.num_running, head.num_waiting, head.num_pending, head.num_in_flight) == (0, 0, 0, 0)
    for slot in engine.slots.values():
        counts = [rows[slot][name] for name in ("computed_tokens", "in_flight_tokens", "stale_tokens", "placeholders")]
        assert min(counts) >= 0
        assert head.stuck or counts[1:] == [0, 0, 0] or rows[slot].output_tokens >= rows[slot].final_tokens


def complaint(make: Callable[[], Snapshot]) -> str:
    """Serve a snapshot; return its error."""
    try:
        served(make())
    except ValueError as error:
        return str(error) or "a ValueError that says nothing"
    return ""


NUMBERS = (0, 1, 2, 3, 7, 10, 100, 2**31 - 1, 2**31, 2**63, -1, -7, -(2**31), True, 1.5, math.nan, math.inf, -math.inf)


def mutate(value: Any, rng: random.Random) -> Any:
    """Change something at random within a value."""
    if is_dataclass(value) and not isinstance(value, type):
        name = rng.choice([field.name for field in fields(value)])
        return replace(value, **{name: mutate(getattr(value, name), rng)})
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        changed = dict(value)
        item = mutate(changed.pop(key), rng)
        key = rng.choice((key, key, mutate(key, rng)))
        return changed if rng.random() < 0.2 else {**changed, key: item}
    if isinstance(value, tuple) and value:
        place = rng.randrange(len(value))
        before, after = value[:place], value[place + 1 :]
        other = rng.choice(((), (value[place],) * 2, (mutate(value[place], rng),), (mutate(value[place], rng),)))
        return (*before, *other, *after)
    if isinstance(value, bool):
        return rng.choice((not value, value, 2))
    if isinstance(value, int | float):
        return rng.choice((value + 1, value - 1, value + 1, value - 1, *rng.sample(NUMBERS, 4)))
    if isinstance(value, str):
        return rng.choice(("", "x", "a", value + value, value))
    return value


def snapshots(load: Load, rng: random.Random) -> Iterable[Callable[[], Snapshot]]:
    """Take a snapshot during a load's run, and change it in many ways."""
    whole = load.loaded(AFFINE)
    whole.advance()
    engine = load.loaded(AFFINE)
    now_s = rng.random() * whole.now_s
    engine.advance(now_s)
    valid = snapshot_of(engine, now_s)
    yield lambda: valid

    def changed_snapshot() -> Snapshot:
        snapshot = valid
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            snapshot = mutate(snapshot, rng)
        return snapshot

    for _ in range(40):
        yield changed_snapshot


def main(lines: Iterable[str]) -> None:
    """Print the name and the error of each case."""
    for name, make in INVALID.items():
        print(json.dumps(name), flush=True)  # noqa: T201 - output of a program
        print(json.dumps(complaint(make)), flush=True)  # noqa: T201
    for seed, line in enumerate(lines):
        for place, make in enumerate(snapshots(Load(**json.loads(line)), random.Random(seed))):
            print(json.dumps(f"load {seed}, case {place}"), flush=True)  # noqa: T201
            print(json.dumps(complaint(make)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.stdin)
