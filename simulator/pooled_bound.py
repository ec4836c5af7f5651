"""One engine as large and as fast as several: a bound for every placement of requests on them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from predictor.config import EngineConfig
from predictor.step_time import CURVES, GRIDS, NO_GRID, SHARES, Curve, Grid, StepTime

# Seconds per context token; a pooled engine reads the context of all engines at once.
SLOPES = ("decode_slope", "mixed_slope")
ONCE = ("constant_s", "empty_s")


def pooled_config(config: EngineConfig, num: int) -> EngineConfig:
    """Sum up the sequences, KV blocks and step tokens of all engines; each has one null block."""
    if num == 1:
        return config
    return replace(
        config,
        max_num_seqs=num * config.max_num_seqs,
        max_num_batched_tokens=num * config.max_num_batched_tokens,
        num_gpu_blocks=num * (config.num_gpu_blocks - 1) + 1,
    )


def pooled_step_time(step_time: StepTime, num: int) -> StepTime:
    """Take as long for a step as each of `num` engines takes for an equal share of it."""
    if num == 1:
        return step_time
    changes: dict[str, Any] = {}
    for spec in fields(step_time):
        value = getattr(step_time, spec.name)
        if spec.name in CURVES:
            divisor = num if spec.name in SLOPES else 1
            changes[spec.name] = Curve(x=tuple(num * x for x in value.x), y=tuple(y / divisor for y in value.y))
        elif spec.name in SHARES:
            changes[spec.name] = Curve(x=tuple(num * x for x in value.x), y=value.y)
        elif spec.name in GRIDS:
            changes[spec.name] = value if value == NO_GRID else _pooled_grid(spec.name, value, num)
        elif spec.name == "limits":
            changes[spec.name] = (*(num * limit for limit in value[:3]), value[3])
        elif spec.name not in ONCE:
            changes[spec.name] = value / num
    return replace(step_time, **changes)


def _pooled_grid(name: str, grid: Grid, num: int) -> Grid:
    """Take as long for `num` times as many decodes or tokens; the mean context and the context before chunks stay."""
    y = tuple(num * y for y in grid.y) if name == "mixed_overlap" else grid.y
    return Grid(x=tuple(num * x for x in grid.x), y=y, z=grid.z)
