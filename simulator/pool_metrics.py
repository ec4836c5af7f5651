"""Metrics of the pools of a cluster whose instances have roles: use, blocks, links, and the two legs of requests."""

from __future__ import annotations

from typing import Any

import numpy as np

from scheduler.instances import ROLES
from simulator.fleet import has_roles
from simulator.result import RunResult


def pool_summary(result: RunResult) -> dict[str, Any]:
    """Summarise each pool by its role, and the legs; nothing where no instance has a role.

    The shares of the time are those of the samples: `busy_share` with running requests, `used_blocks_share` and
    `held_blocks_share` of the KV blocks, `link_busy_share` with a fetch under way.
    """
    if not has_roles(result.specs):
        return {}
    roles = np.array([spec.role for spec in result.specs])
    pools = {role: _pool(result, np.flatnonzero(roles == role)) for role in ROLES if (roles == role).any()}
    return {"pools": pools, "legs": _legs(result)}


def _pool(result: RunResult, rows: np.ndarray) -> dict[str, Any]:
    pool: dict[str, Any] = {"num_instances": len(rows)}
    if not result.samples:
        return pool
    blocks = np.array([result.specs[row].config.num_gpu_blocks - 1 for row in rows])

    def over_time(name: str) -> np.ndarray:
        return np.stack([getattr(sample, name)[rows] for sample in result.samples])

    return {
        **pool,
        "busy_share": float((over_time("num_running") > 0).mean()),
        "used_blocks_share": float((1 - over_time("free_blocks") / blocks).mean()),
        "held_blocks_share": float((over_time("held_blocks") / blocks).mean()),
        "link_busy_share": float((over_time("num_fetching") > 0).mean()),
        "num_waiting": float(over_time("num_waiting").mean()),
    }


def _legs(result: RunResult) -> dict[str, float | None]:
    """Return the share of the requests with two legs, and the means of what these took."""
    has_two = (result.decisions.prefill_instance >= 0) & (result.legs.fetched_s >= 0)
    taken = {
        "prefill_s": result.legs.prefilled_s - result.work.arrival_s,
        "held_s": result.legs.fetched_s - result.legs.prefilled_s,
        "first_step_s": result.outcomes.first_token_s - result.legs.fetched_s,
    }
    share = float((result.decisions.prefill_instance >= 0).mean())
    means = {name: float(values[has_two].mean()) if has_two.any() else None for name, values in taken.items()}
    return {"disaggregated": share, **means}
