"""The formulas of indicators about tiers: how strict an instance is for a request, and what work it is there."""

from __future__ import annotations

import math

import numpy as np

from scheduler.columns import Column, Columns

STRICTEST_S, LOOSEST_S = 1e-3, 10.0  # TPOT targets beyond these are all the same
SAME_TIER = 1.05  # targets within this ratio are of the same tier


def _bounded(targets_s: Column) -> Column:
    """Return targets within these bounds; `numpy.clip` takes several times as long."""
    return np.minimum(np.maximum(targets_s, STRICTEST_S), LOOSEST_S)


def _bounded_target_s(of: Columns) -> float:
    """Return the request's own target within these bounds."""
    return min(max(of.tpot_slo_s, STRICTEST_S), LOOSEST_S)


def tier_ratio(of: Columns) -> Column:
    """Return the bound of each instance over the request's target; instances have no tier in most clusters."""
    target_s, num = _bounded_target_s(of), of["batch_size"]
    ratio = np.where(num > 0, _bounded(of["least_tpot_slo_s"]) / target_s, num + np.inf)  # NaN where it is unknown
    bound_s, closed = of["tier_tpot_s"], of["tier_closed"]
    has_tier = bound_s < math.inf
    if has_tier.any():
        ratio = np.where(has_tier, _bounded(bound_s) / target_s, ratio)
    if closed.any():
        ratio = np.where(~has_tier & (closed > 0), np.inf, ratio)
    return ratio


def tiers_matter(of: Columns) -> Column:
    """Compare the mean of efficient steps with the shortest target; single instances have too few requests for one."""
    efficient_s = of["efficient_step_s"]
    known_s = efficient_s[efficient_s < math.inf]
    matter = True
    if len(known_s) and not (of["tier_tpot_s"] < math.inf).any():
        shortest_s = min(of.tpot_slo_s, float(np.fmin.reduce(of["least_tpot_slo_s"], initial=math.inf)))
        matter = float(np.add.reduce(known_s)) / len(known_s) > shortest_s
    return np.full(len(efficient_s), float(matter))


def tier_cost_s(of: Columns) -> Column:
    """Compare the request's cost in steps as short as the tier's with that in steps as long as its own target.

    A step with an overhead of c and a length of L costs its requests L / (L - c) times what the best step does.
    """
    ratio, overhead_s = of["tier_ratio"], of["step_overhead_s"]
    stricter, known_s = ratio < 1.0 / SAME_TIER, overhead_s[overhead_s < math.inf]
    if not stricter.any():
        return np.zeros(len(ratio))
    if not len(known_s):
        return np.where(stricter, math.inf, 0.0)
    mean_s = float(np.add.reduce(known_s)) / len(known_s)
    target_s = _bounded_target_s(of)
    bound_s = np.minimum(ratio, 1.0) * target_s
    extra = 1.0 / (1.0 - np.minimum(0.9, mean_s / bound_s)) - 1.0 / (1.0 - min(0.9, mean_s / target_s))
    return np.where(stricter, of["work_s"] * extra, 0.0)


def work_s(of: Columns) -> Column:
    """Add prefill and decodes up; a decode costs what it does on the instance where most requests share a step."""
    token_s, num = of["prefill_token_s"], of["batch_size"]
    busy = num >= 1.0
    decode_s = float(np.fmin.reduce(of["decode_step_s"][busy] / num[busy])) if busy.any() else 0.0
    return np.where(token_s > 0, of["new_prefill_tokens"] * token_s + of["tag_tokens"] * decode_s, np.nan)


def tier_fits(of: Columns) -> Column:
    """Return 1 where the tier is that of the request, a stricter one or none, and open to it."""
    ratio, closed = of["tier_ratio"], of["tier_closed"]
    fits = (ratio <= SAME_TIER) | (ratio == np.inf)
    if closed.any():
        fits &= (closed < 1) | ((ratio <= SAME_TIER) & (ratio >= 1.0 / SAME_TIER))
    return np.where(np.isnan(ratio), np.nan, fits)
