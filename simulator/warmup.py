"""Compiles the cluster simulator's kernels by running them once, so that they are cached."""

from __future__ import annotations

import numpy as np

from predictor.config import EngineConfig
from predictor.profile import constant_profile
from simulator.assembly import simulate
from simulator.conditions import Conditions
from simulator.fleet import InstanceSpec
from simulator.workload import RequestLengths, workload


def warm_simulator() -> None:
    """Simulate two requests by policies that together use every kernel."""
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=64, num_gpu_blocks=32, max_model_len=64)
    specs = [InstanceSpec(config=config, step_time=constant_profile().step_time)] * 2
    work = workload(
        RequestLengths(prompt_tokens=np.array([9, 9]), output_tokens=np.array([2, 2])), np.array([0.0, 0.5])
    )
    for policy in ("marginal", "lmetric", "expr: drained_s"):
        simulate(specs, work, policy, Conditions())
