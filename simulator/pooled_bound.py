"""One engine as large and as fast as many: what could be had if placing requests were no matter."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from predictor.config import EngineConfig
from predictor.step_time import CURVES, Curve, StepTime

# Seconds per context token, of which a pooled engine reads as many at once as there are engines.
SLOPES = ("decode_slope", "mixed_slope")
ONCE = ("constant_s", "empty_s")


def pooled_config(config: EngineConfig, num: int) -> EngineConfig:
    """Have the seats, the blocks and the tokens a step of all; one block is nobody's in each engine."""
    if num == 1:
        return config
    return replace(
        config,
        max_num_seqs=num * config.max_num_seqs,
        max_num_batched_tokens=num * config.max_num_batched_tokens,
        num_gpu_blocks=num * (config.num_gpu_blocks - 1) + 1,
    )


def pooled_step_time(step_time: StepTime, num: int) -> StepTime:
    """Take as long for `num` times as much as one engine takes for its share of it, if all have the same share."""
    if num == 1:
        return step_time
    changes: dict[str, Any] = {}
    for spec in fields(step_time):
        value = getattr(step_time, spec.name)
        if spec.name in CURVES:
            down = num if spec.name in SLOPES else 1
            changes[spec.name] = Curve(x=tuple(num * x for x in value.x), y=tuple(y / down for y in value.y))
        elif spec.name not in ONCE:
            changes[spec.name] = value / num
    return replace(step_time, **changes)
