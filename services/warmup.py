"""Compiles or loads the engine model's kernels before a request needs them."""

from __future__ import annotations

import time
from collections.abc import Callable

from predictor.batching import BATCHERS
from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.engine_replica import EngineReplica
from predictor.forecast import Forecaster
from predictor.lengths import Tag, expected_tokens
from predictor.lockstep import LockstepGroup
from predictor.lockstep_forecast import LockstepForecaster, RankPasses
from predictor.profile import constant_profile
from predictor.request import RequestFacts
from predictor.snapshot_conversion import engine_from, snapshot_of
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
        Forecaster(engine).forecast([candidate], engine.now_s)
        engine_from(snapshot_of(engine, engine.now_s), constant_profile().step_time).next_step()
        engine.abort("running")
        on_step()
    _warm_lockstep(loaded_engine(EngineConfig(), constant_profile().step_time, [request]))
    on_step()
    replica = EngineReplica(config, constant_profile().step_time, num_slots=1, track_blocks=False)
    replica.step_seconds(
        num_tokens=1, num_sampled=1, num_decodes=1, decode_context=9, num_prefills=0, prefill_qq=0.0, prefill_qkv=0.0,
        decode_longest=9,
    )  # fmt: skip
    return time.monotonic() - start_s


def _warm_lockstep(engine: Engine) -> None:
    """Run the kernels of ranks that step together."""
    passes, forecaster = RankPasses(), LockstepForecaster(engine)
    passes.follow(engine)
    forecaster.beside([passes])
    candidate = RequestFacts(request_id="candidate", prompt_tokens=20, output_tokens=4)
    for delays in (True, False):
        forecaster.forecast([candidate], engine.now_s, delays=delays)
    LockstepGroup([engine]).advance()
