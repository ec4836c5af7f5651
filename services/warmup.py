"""Compiles or loads the engine model's kernels before a request needs them."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from predictor.batching import BATCHERS, settled
from predictor.blocks import blocks_for
from predictor.config import EngineConfig
from predictor.editable_engine import EditableEngine, ShownRecords
from predictor.engine import Engine
from predictor.engine_from_snapshot import engine_from
from predictor.engine_replica import EngineReplica
from predictor.forecast import Forecaster
from predictor.lengths import Tag, expected_tokens
from predictor.lockstep import LockstepGroup
from predictor.lockstep_forecast import LockstepForecaster, RankPasses
from predictor.profile import constant_profile
from predictor.reported_state import ReportedContents
from predictor.request import RequestFacts
from predictor.snapshot_of_engine import snapshot_of
from services.engine_state import layout
from simulator.replay import loaded_engine


def warm_up(on_step: Callable[[], None] = lambda: None) -> float:
    """Run every kernel once, from the cache where it is there; return the seconds it took.

    `on_step` is called after the kernels of each local scheduler.
    """
    start_s = time.monotonic()
    expected_tokens(Tag(median_tokens=2.0, spread=1.0), 1)  # imports scipy
    request = RequestFacts(request_id="running", prompt_tokens=40, output_tokens=4)
    for name in BATCHERS:
        config = EngineConfig(
            batcher=name, max_num_seqs=2, max_num_batched_tokens=64, num_gpu_blocks=32, max_model_len=64
        )
        engine = loaded_engine(config, constant_profile().step_time, [request])
        engine.advance(1.0)
        candidate = RequestFacts(request_id="candidate", prompt_tokens=20, output_tokens=4)
        for only_deadlines in (False, True):
            Forecaster(engine).forecast([candidate], engine.now_s, only_deadlines=only_deadlines)
        engine_from(snapshot_of(engine, engine.now_s), constant_profile().step_time).next_step()
        engine.abort("running")
        on_step()
    _warm_lockstep(loaded_engine(EngineConfig(), constant_profile().step_time, [request]))
    on_step()
    _warm_replica(request)
    return time.monotonic() - start_s


def _warm_replica(request: RequestFacts) -> None:
    """Run the kernels with which a sidecar follows the state that an engine reports."""
    config = settled(EngineConfig(num_gpu_blocks=32, max_model_len=64, kv_role="kv_both"))
    engine = EditableEngine(config, constant_profile().step_time, 0.0)
    engine.add(request)
    engine.plan_step(0.0)
    replica = EngineReplica(config, constant_profile().step_time, num_slots=1, track_blocks=True)
    num_blocks, num_held = replica.engine.num_blocks, blocks_for(request.prompt_tokens, config.block_size)
    reported = engine.shown(ShownRecords(live=layout.LIVE, facts=layout.REQUEST), {}, 0.0, 1)
    reuse = np.arange(num_blocks) - (num_held - 1)  # 0 for the blocks that are held
    contents = ReportedContents(
        content=np.zeros(num_blocks, np.uint64), reuse=np.maximum(0, reuse), tables=(np.arange(num_held),),
        hashes=(np.empty(0, np.uint64),),
    )  # fmt: skip
    replica.update(reported._replace(num_free_blocks=num_blocks - num_held, contents=contents))
    replica.step_seconds(
        num_tokens=1, num_sampled=1, num_decodes=1, decode_context=9, num_prefills=0, prefill_qq=0.0, prefill_qkv=0.0,
        decode_longest=9,
    )  # fmt: skip


def _warm_lockstep(engine: Engine) -> None:
    """Run the kernels of ranks that step together."""
    passes, forecaster = RankPasses(), LockstepForecaster(engine)
    passes.follow(engine)
    forecaster.beside([passes])
    candidate = RequestFacts(request_id="candidate", prompt_tokens=20, output_tokens=4)
    for delays in (True, False):
        forecaster.forecast([candidate], engine.now_s, delays=delays)
    LockstepGroup([engine]).advance()
