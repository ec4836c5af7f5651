"""The least instance-seconds of requests with deadlines, on whatever instances and in whatever order they are served.

Give decodes, prompt tokens and context tokens that are read a price each, and the patience of requests a price that is
paid back, such that no step earns more than its time: a step of n decodes that takes T seconds uses n · T of patience.
A request then costs at least the sum of its prices and its prefill attention, with whatever others it shares its steps.
Prices of decodes and patience differ by how much patience requests have for a decode. A linear program finds the prices
with the largest sum; constraints are added as they are violated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from simulator.request_needs import RequestNeeds
from simulator.step_shapes import StepShapes

Floats = npt.NDArray[np.float64]

MAX_GROUPS = 24  # of requests with about the same patience for a decode
TOLERANCE = 1e-6  # by which a step may earn more than its time; prices are lowered by what is left
MAX_ROUNDS = 200
SCALES = np.array([1e4, 1e7])  # of the prices of prompt tokens and context
DECODE_SCALE, PATIENCE_SCALE = 1e3, 1e2
MAX_PRICE = 1e6  # scaled; any prices at which no step earns too much give a bound


def least_costs_s(shapes: StepShapes, needs: RequestNeeds) -> Floats:
    """Return what each request costs at least; infinite for one that no instance could serve in time."""
    possible = needs.is_possible
    costs = np.full(len(possible), np.inf)
    if not possible.any():
        return costs
    needs = needs.chosen(possible)
    per_decode_s = needs.per_decode_s
    prices = _Prices(shapes, needs, _groups(per_decode_s, needs.decodes))
    prices.find()
    is_limited = np.isfinite(per_decode_s)
    patience_s = np.where(is_limited, per_decode_s, 0.0)
    best = np.full(len(needs), -np.inf)
    for decode_price, patience_price in prices.offers():
        worth = np.where(is_limited | (patience_price == 0), decode_price - patience_price * patience_s, -np.inf)
        best = np.maximum(best, worth)
    decoding_s = np.where(needs.decodes > 0, needs.decodes * best, 0.0)
    reading_s = np.stack([needs.prompt_tokens, needs.context_tokens], axis=1) @ prices.shared
    costs[possible] = needs.attention_s + reading_s + decoding_s
    return costs


def _groups(per_decode_s: Floats, decodes: Floats) -> list[npt.NDArray[np.intp]]:
    """Group requests by their patience for a decode: those without limit, and others with as many decodes each."""
    groups = [np.flatnonzero(np.isinf(per_decode_s))]
    limited = np.flatnonzero(np.isfinite(per_decode_s))
    limited = np.array(sorted(limited.tolist(), key=per_decode_s.__getitem__), np.intp)
    values = np.unique(per_decode_s[limited])
    if len(values) <= MAX_GROUPS:
        groups += [limited[per_decode_s[limited] == value] for value in values]
    else:
        done = np.cumsum(decodes[limited]) / decodes[limited].sum()
        groups += np.split(limited, np.searchsorted(done, np.arange(1, MAX_GROUPS) / MAX_GROUPS))
    return [group for group in groups if len(group)]


class _Prices:
    """Prices at which no step earns more than its time, with the largest sum over all requests."""

    def __init__(self, shapes: StepShapes, needs: RequestNeeds, groups: Sequence[npt.NDArray[np.intp]]) -> None:
        """Sum up the needs of each group."""
        self._shapes = shapes
        self._amounts = np.array([needs.prompt_tokens.sum(), needs.context_tokens.sum()])
        self._decodes = np.array([needs.decodes[group].sum() for group in groups])
        self._patience_s = np.array([needs.patience_s[group].sum() for group in groups])
        self._limited = np.isfinite(self._patience_s)
        self._values = np.zeros(len(SCALES) + 2 * len(groups))
        self._slack = 1.0

    @property
    def shared(self) -> Floats:
        """The prices of a prompt token and a token of context."""
        prices: Floats = self._slack * self._values[: len(SCALES)] / SCALES
        return prices

    def offers(self) -> list[tuple[float, float]]:
        """Return prices of a decode and a second of patience; any request may pay any pair of them."""
        patience_prices = {0.0, *(self._slack * self._values[len(SCALES) + 1 :: 2] / PATIENCE_SCALE).tolist()}
        some = self._shapes.chosen(self._shapes.decodes > 0)
        earned = some.prompt_tokens * self.shared[0] + some.context_tokens * self.shared[1]
        return [
            (float((((1 + price * some.decodes) * some.seconds - earned) / some.decodes).min()), price)
            for price in patience_prices
        ]

    def find(self) -> None:
        """Solve with some steps, add those that earn too much at these prices, and again until none does."""
        shapes, num = self._shapes, len(self._decodes)
        rows = [self._rows(group, self._first_steps()) for group in range(num)]
        sums = np.zeros(len(self._values))
        sums[: len(SCALES)] = self._amounts / SCALES
        sums[len(SCALES) :: 2] = self._decodes / DECODE_SCALE
        sums[len(SCALES) + 1 :: 2] = np.where(self._limited, -self._patience_s, 0.0) / PATIENCE_SCALE
        total = max(1.0, float(np.abs(sums).max()))
        bounds = [(0.0, MAX_PRICE)] * len(SCALES) + [
            bound for limited in self._limited for bound in ((0.0, MAX_PRICE), (0.0, MAX_PRICE if limited else 0.0))
        ]
        for _ in range(MAX_ROUNDS):
            matrix = np.concatenate(rows)
            found = linprog(-sums / total, A_ub=matrix, b_ub=np.ones(len(matrix)), bounds=bounds, method="highs")
            assert found.success, found.message
            self._values = found.x
            excess = self._excess()
            worst = float(excess.max())
            if worst <= TOLERANCE:
                break
            for group in range(num):
                at = np.argpartition(excess[group], -3)[-3:]
                at = at[excess[group][at] > TOLERANCE]
                if len(at):
                    rows.append(self._rows(group, np.isin(np.arange(len(shapes)), at)))
        self._slack = 1 / (1 + max(0.0, worst))

    def _excess(self) -> Floats:
        """Return by what share of its time each step earns too much, if it decodes requests of a group."""
        steps, values = self._shapes, self._values
        shared = values[: len(SCALES)] / SCALES
        earned = (steps.prompt_tokens * shared[0] + steps.context_tokens * shared[1]) / steps.seconds
        decodes = np.outer(values[len(SCALES) :: 2] / DECODE_SCALE, steps.decodes / steps.seconds)
        waited = np.outer(values[len(SCALES) + 1 :: 2] / PATIENCE_SCALE, steps.decodes)
        excess: Floats = earned[None, :] + decodes - waited - 1
        return excess

    def _first_steps(self) -> npt.NDArray[np.bool_]:
        """Choose some steps with which to begin: those whose number of decodes is a power of two, and the largest."""
        counts = self._shapes.decodes.astype(np.int64)
        chosen: npt.NDArray[np.bool_] = ((counts & (counts - 1)) == 0) | (counts == counts.max())
        return chosen

    def _rows(self, group: int, chosen: npt.NDArray[np.bool_]) -> Floats:
        """Return constraints: what a step earns of each price, in relation to its time."""
        steps = self._shapes.chosen(chosen)
        rows = np.zeros((len(steps), len(self._values)))
        rows[:, 0] = steps.prompt_tokens / steps.seconds / SCALES[0]
        rows[:, 1] = steps.context_tokens / steps.seconds / SCALES[1]
        rows[:, len(SCALES) + 2 * group] = steps.decodes / steps.seconds / DECODE_SCALE
        rows[:, len(SCALES) + 2 * group + 1] = -steps.decodes / PATIENCE_SCALE
        return rows
