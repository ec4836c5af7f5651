"""The state file of an emulated engine: a replica that is set to it goes on like the engine itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor import queues
from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.engine_replica import EngineReplica
from predictor.request import DECODE, PREFILL, SERVE, RequestFacts
from predictor.snapshot_of_engine import snapshot_of
from predictor.state import FETCHING, NO_TRANSFER, NONE
from services.emulator.clock import EngineClock
from services.emulator.exporter import EngineStateExporter
from services.engine_state.reader import Reader
from services.engine_state.snapshot import reported_state, snapshot_from_view
from services.engine_state.view import View
from tests.strategies import AFFINE, Load, examples, loads

CLOSE = 1e-9
NUM_STEPS = 12  # that are compared
FILES = count()
REMEMBERING = ("weighted_vtc", "bros", "bros_round_robin", "fair_batching", "slide_batching")
ERRING = {"estimator_momentum": 0.9, "estimator_noise": 0.2, "estimator_factor": 1.3, "enable_prefix_caching": False}


def viewed(path: Path, engine: Engine) -> View:
    """Export an engine's state, and read it as of the engine's own time."""
    exporter = EngineStateExporter(str(path), engine, EngineClock(1.0), contents=None, about={})
    for serial, (name, slot) in enumerate(engine.slots.items(), 1):
        request = engine.request_in(slot)
        _, max_tokens = engine.lengths(request)
        asked: Any = SimpleNamespace(max_tokens=max_tokens, min_tokens=0, facts={})
        arrived_s = engine.request_in(slot).arrival_s
        job: Any = SimpleNamespace(slot=slot, serial=serial, engine_id=name, request=asked, arrived_s=arrived_s)
        exporter.arrived(job, ())
    exporter.publish()
    reader = Reader(str(path))
    view = replace(reader.read(), now_s=engine.now_s)
    reader.close()
    exporter.close()
    return view


def replica_at(view: View, engine: Engine) -> EngineReplica:
    """Return a replica of what a file shows, to which the lengths of all answers are known."""
    num_slots = len(view.live)
    known = np.zeros(num_slots, np.int64)
    for slot in engine.slots.values():
        known[slot] = engine.request_in(slot).output_tokens or 0
    replica = EngineReplica(engine.config, AFFINE, num_slots=num_slots, track_blocks=False)
    replica.update(
        reported_state(
            view, known_tokens=known, tag_median=np.full(num_slots, np.nan), tag_spread=np.zeros(num_slots),
            remembers=engine.batcher.estimates,
        )
    )  # fmt: skip
    return replica


def next_steps(engine: Engine) -> Iterator[dict[str, Any]]:
    """Plan steps; requests are named by their slots, which an engine and its replica share."""
    state = engine.state
    head = state.engine[0]
    for _ in range(NUM_STEPS):
        head.steady, num_planned = 0, int(head.num_steps)
        engine.drive(state, math.inf, num_planned + 1, NONE)
        if head.num_steps == num_planned:
            return
        index = (head.oldest + head.num_in_flight - 1) % 2
        step = state.steps[index]
        yield {
            "number": num_planned,
            "start_s": pytest.approx(float(step.start_s), rel=CLOSE, abs=CLOSE),
            "end_s": pytest.approx(float(step.end_s), rel=CLOSE, abs=CLOSE),
            "scheduled": [(int(entry.slot), int(entry.tokens)) for entry in state.batch[index, : step.num_scheduled]],
            "running": state.running[: head.num_running].tolist(),
            "waiting": [queues.waiting_at(state, place) for place in range(head.num_waiting)],
            "preempted": state.preempted[: step.num_preempted].tolist(),
            "correction": pytest.approx(float(head.correction), rel=CLOSE),
            "memory": head.memory.tolist(),
            "clients": [(int(one.tenant), float(one.tokens)) for one in state.clients[: head.num_clients]],
        }


@pytest.mark.parametrize("num_steps", range(1, 15, 2))
def test_a_replica_goes_on_with_transfers(tmp_path: Path, num_steps: int) -> None:
    """Prefills whose blocks are held, fetches under way and fetched requests are continued after any step."""
    config = EngineConfig(
        max_num_seqs=4, max_num_batched_tokens=64, num_gpu_blocks=25, max_model_len=128, kv_role="kv_both",
        kv_lease_s=3.0, kv_transfer_base_s=2.5, kv_transfer_shared=False, enable_prefix_caching=False,
    )  # fmt: skip
    engine = Engine(config, AFFINE)
    legs = (PREFILL, DECODE, PREFILL, DECODE, SERVE, DECODE, PREFILL, DECODE)
    for number, leg in enumerate(legs):
        engine.add(
            RequestFacts(
                request_id=f"r{number}", prompt_tokens=30 + 9 * number, output_tokens=1 if leg == PREFILL else 12,
                max_tokens=1 if leg == PREFILL else 12, leg=leg,
            )
        )  # fmt: skip
    exporter = EngineStateExporter(str(tmp_path / "state"), engine, EngineClock(1.0), contents=None, about={})
    for serial, (name, slot) in enumerate(engine.slots.items(), 1):
        asked: Any = SimpleNamespace(max_tokens=engine.lengths(engine.request_in(slot))[1], min_tokens=0, facts={})
        arrived_s = engine.request_in(slot).arrival_s
        job: Any = SimpleNamespace(slot=slot, serial=serial, engine_id=name, request=asked, arrived_s=arrived_s)
        exporter.arrived(job, ())
    stages: set[int] = set()
    for _ in range(num_steps):
        assert engine.next_step() is not None
        exporter.publish()
        stages |= set(engine.state.requests["stage"].tolist())
    assert stages > {NO_TRANSFER, FETCHING}
    reader = Reader(str(tmp_path / "state"))
    view = replace(reader.read(), now_s=engine.now_s)
    replica = replica_at(view, engine)
    compared = 0
    for ours, theirs in zip(next_steps(engine), next_steps(replica.engine), strict=True):
        for told in (ours, theirs):
            del told["number"]
        assert theirs == ours
        compared += 1
    assert compared > 3
    reader.close()
    exporter.close()


@pytest.mark.parametrize("rule", REMEMBERING)
def test_a_replica_goes_on_like_the_engine(tmp_path: Path, rule: str) -> None:
    """At any moment, the next steps of a replica that is set to the file are the engine's own."""

    @examples(40)
    @given(loads(rule, layout="plain", ending=True, max_requests=12, tick_s=0.004), st.floats(0.0, 1.0), st.booleans())
    def check(load: Load, moment: float, errs: bool) -> None:
        load = Load(engine=load.engine | (ERRING if errs else {"enable_prefix_caching": False}), requests=load.requests)
        whole = load.loaded(AFFINE)
        whole.advance()
        until_s = moment * whole.now_s
        engine = load.loaded(AFFINE)
        engine.advance(until_s)
        later = {request.request_id for request in snapshot_of(engine, 0.0).reserved}
        load = Load(engine=load.engine, requests=[one for one in load.requests if one["id"] not in later])
        engine = load.loaded(AFFINE)
        engine.advance(until_s)
        view = viewed(tmp_path / str(next(FILES)), engine)
        assert snapshot_from_view(view).memory == snapshot_of(engine, 0.0).memory
        replica = replica_at(view, engine)
        assert list(next_steps(replica.engine)) == list(next_steps(engine))

    check()
