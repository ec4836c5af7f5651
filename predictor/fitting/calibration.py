"""Calibrates constants of a step time with a window of observed requests and steps, and says what it cannot tell.

A replay of all requests is compared with what was observed: times of single requests, and when the engine had produced
each tenth of all tokens, which its throughput decides even where every request waits. Around a solution the replay is
nearly linear in the constants, so that their changes come from a few replays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from predictor.fitting.constants import UNITS, Calibrated
from predictor.fitting.regression import Steps, predict
from predictor.step_time import StepTime
from predictor.suggestions import require_choice

Array = NDArray[np.float64]

# The time to the first token varies most, because of queueing, so it has the lowest weight.
WEIGHTS = {"tpot": 1.0, "e2e": 1.0, "ttft": 0.25, "progress": 1.0, "steps": 1.0, "step": 2.0}
NUM_PROGRESS = 10
NUM_BLOCKS = 8  # of time, which are left out in turn
HELD_OUT_EVERY = 3  # of the blocks that are never fitted
MIN_REQUESTS = 12
ROUNDS = 10
CORNER = 1.0  # of a constant or of its unit: how far the last search looks around
POLISH = 30  # replays of it for each constant
SHORTEST = 0.1  # share of a step; shorter ones are not tried
CLOSE = 0.01  # units between two rounds: there the search ends
HUBER = 3.0  # times the median error, beyond which errors count linearly
CLOSE_ERROR = 0.02  # a median error that is no reason to leave out any more
GAIN = 0.02  # by which another constant must reduce the error of blocks that are left out
NEARLY = 0.05  # of the best gain: the first constant that comes so near is taken
ALIKE = 0.95  # the share of a constant's effect that others can have in its place: more, and it cannot be found
T_90 = 1.9  # of Student's distribution with as many degrees of freedom as there are blocks
TINY = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLatencies:
    """The seconds from each request's arrival to its first and last token, and the number of its tokens.

    `arrival_s` is needed where throughput is compared, `num_steps` is the number of steps the engine made, if known.
    """

    first_token_s: Array
    last_token_s: Array
    output_tokens: Array
    arrival_s: Array | None = None
    num_steps: int | None = None

    def where(self, chosen: NDArray[np.bool_]) -> MeasuredLatencies:
        """Keep some requests."""
        return MeasuredLatencies(
            first_token_s=self.first_token_s[chosen],
            last_token_s=self.last_token_s[chosen],
            output_tokens=self.output_tokens[chosen],
            arrival_s=None if self.arrival_s is None else self.arrival_s[chosen],
            num_steps=self.num_steps,
        )

    def metrics(self) -> dict[str, Array]:
        """Return TTFT, e2e and TPOT of every request."""
        gaps = np.maximum(1.0, self.output_tokens - 1)
        tpot = (self.last_token_s - self.first_token_s) / gaps
        return {"ttft": self.first_token_s, "e2e": self.last_token_s, "tpot": tpot}

    def tokens_by(self, times_s: Array) -> Array:
        """Return how many tokens the requests have by each time, as if each came evenly after the first."""
        assert self.arrival_s is not None
        first, last = self.arrival_s + self.first_token_s, self.arrival_s + self.last_token_s
        share = (times_s[:, None] - first) / np.maximum(TINY, last - first)
        of_each = np.clip(share, 0.0, 1.0) * (self.output_tokens - 1) + (times_s[:, None] >= first)
        return np.asarray(of_each.sum(axis=1))

    def progress_s(self, tokens: Array) -> Array:
        """Return when the requests have so many tokens."""
        assert self.arrival_s is not None
        times = np.unique(np.concatenate([self.arrival_s + self.first_token_s, self.arrival_s + self.last_token_s]))
        return np.interp(tokens, self.tokens_by(times), times)


Replay = Callable[[StepTime], MeasuredLatencies]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantEstimate:
    """What the window says about a constant: its change with the bounds of a 90 % interval, or why there is none."""

    name: str
    change: float = 0.0
    low: float = 0.0
    high: float = 0.0
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedConstants:
    """A calibrated step time, its constants, and mean relative errors on requests of the window that were held out.

    Where the new constants do not reduce that error, the old ones are kept.
    """

    result: Calibrated
    constants: tuple[ConstantEstimate, ...]
    error_before: float
    error_after: float
    is_kept: bool

    def describe(self) -> str:
        """The constants as text."""
        texts = []
        for one in self.constants:
            if one.why_not:
                texts.append(f"{one.name}: {one.why_not}")
            else:
                texts.append(f"{one.name} {one.change:+.3g} ({one.low:+.3g} to {one.high:+.3g})")
        return "; ".join(texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """What was observed, divided into blocks of time; residuals are logarithms of predicted over observed."""

    replay: Replay
    measured: MeasuredLatencies
    compared: NDArray[np.bool_]
    steps: Steps | None
    blocks: Array  # of each compared request
    groups: dict[str, Array] = field(default_factory=dict)

    def residuals(self, of: Calibrated) -> dict[str, Array]:
        """Return the residuals of each group."""
        replayed = self.replay(of.step_time)
        mine, truth = (one.where(self.compared) for one in (replayed, self.measured))
        found = {}
        shift = {"ttft": of.request_s, "e2e": of.request_s, "tpot": 0.0}
        for name, values in mine.metrics().items():
            known = truth.metrics()[name]
            usable = (known > 0) & (truth.output_tokens > 1 if name == "tpot" else True)
            found[name] = np.where(
                usable, np.log(np.maximum(values + shift[name], TINY) / np.maximum(known, TINY)), 0.0
            )
        if replayed.arrival_s is not None and self.measured.arrival_s is not None:
            # all requests: those that are not compared produce tokens, too
            ends = self.measured.arrival_s + self.measured.last_token_s
            until_s = ends[self.compared].max()
            times = self.measured.arrival_s.min() + (until_s - self.measured.arrival_s.min()) * (
                np.arange(1, NUM_PROGRESS + 1) / NUM_PROGRESS
            )
            start_s = self.measured.arrival_s.min()
            tokens = self.measured.tokens_by(times)
            at = replayed.progress_s(tokens) + of.request_s - start_s
            found["progress"] = np.log(np.maximum(at, TINY) / np.maximum(times - start_s, TINY))
        if replayed.num_steps and self.measured.num_steps:
            found["steps"] = np.log(np.array([replayed.num_steps / self.measured.num_steps]))
        if self.steps is not None:
            found["step"] = np.log(np.maximum(predict(of.step_time, self.steps), TINY) / self.steps.seconds)
        return found

    def block_of(self, name: str, count: int) -> Array:
        """Return the block of each residual of a group."""
        if name in ("tpot", "e2e", "ttft"):
            return self.blocks
        return np.minimum(NUM_BLOCKS - 1, np.arange(count) * NUM_BLOCKS // max(1, count)).astype(float)


def calibrate(
    start: Calibrated,
    replay: Replay,
    measured: MeasuredLatencies,
    *,
    compared: NDArray[np.bool_] | None = None,
    steps: Steps | None = None,
    constants: Sequence[str] = tuple(UNITS),
) -> CalibratedConstants:
    """Fit those constants that the window determines, so that replayed requests have their observed times.

    `replay` serves all requests, of which only those `compared` are fitted; `steps` are observed steps, if there are.
    """
    for name in constants:
        require_choice("constants", name, UNITS)
    chosen = np.ones(len(measured.output_tokens), np.bool_) if compared is None else compared
    if chosen.sum() < MIN_REQUESTS:
        raise ValueError(f"requests: {int(chosen.sum())} are too few to calibrate, {MIN_REQUESTS} are needed")
    window = _Window(
        replay=replay,
        measured=measured,
        compared=chosen,
        steps=steps,
        blocks=np.floor(np.arange(chosen.sum()) * NUM_BLOCKS / chosen.sum()),
    )
    by, system = _search(start, window, constants)
    before, after = (_held_out_error(window.residuals(one), window) for one in (start, start.changed(by)))
    if after >= before:
        why = "is kept, as no change reduces the error of held-out requests"
        estimates = tuple(ConstantEstimate(name=name, why_not=why) for name in constants)
        return CalibratedConstants(
            result=start, constants=estimates, error_before=before, error_after=before, is_kept=True
        )
    reasons = {name: _why_not(system, name, list(by)) for name in constants if name not in by}
    # the same constants again, from all requests
    by = _polished(start, window, by)
    system = _linear(start, window, by, list(by), holds_out=False)
    halves = dict(zip(by, _half_widths(system, list(by)), strict=True))
    return CalibratedConstants(
        result=start.changed(by),
        constants=tuple(
            ConstantEstimate(name=name, why_not=reasons[name])
            if name in reasons
            else ConstantEstimate(
                name=name,
                change=by[name],
                low=by[name] - float(halves[name]) * UNITS[name],
                high=by[name] + float(halves[name]) * UNITS[name],
            )
            for name in constants
        ),
        error_before=before,
        error_after=after,
        is_kept=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _System:
    """The linear problem around a solution: what to explain, the effect of each constant, weights, and blocks."""

    target: Array
    effects: dict[str, Array]
    weights: Array
    blocks: Array
    fitted: NDArray[np.bool_]

    def solve(self, names: Sequence[str], rows: NDArray[np.bool_], least: Mapping[str, float]) -> Array:
        """Return the changes, in units, that explain the chosen rows best."""
        from scipy.optimize import lsq_linear  # takes a while to import

        root = np.sqrt(self.weights[rows])
        matrix = np.column_stack([self.effects[name][rows] for name in names]) * root[:, None]
        lowest = [min(-TINY, least[name]) for name in names]
        return np.asarray(lsq_linear(matrix, self.target[rows] * root, bounds=(lowest, np.inf)).x)

    def left(self, names: Sequence[str], change: Array, rows: NDArray[np.bool_]) -> float:
        """Return the weighted mean absolute error that is left."""
        explained = sum((self.effects[name][rows] * by for name, by in zip(names, change, strict=True)), np.zeros(1))
        return float(np.average(np.abs(self.target[rows] - explained), weights=self.weights[rows]))


def _polished(start: Calibrated, window: _Window, by: Mapping[str, float]) -> dict[str, float]:
    """Improve changes by replays of all requests; absolute errors, so that outliers have little weight."""
    from scipy.optimize import minimize  # takes a while to import

    names = list(by)

    def changes(units: Array) -> dict[str, float]:
        return {name: float(unit) * UNITS[name] for name, unit in zip(names, units, strict=True)}

    def distance(units: Array) -> float:
        found = window.residuals(start.changed(changes(units)))
        return sum(WEIGHTS[name] * float(np.mean(np.abs(values))) for name, values in found.items())

    first = np.array([by[name] / UNITS[name] for name in names])
    simplex = np.vstack([first, first + np.eye(len(names)) * np.maximum(CORNER, CORNER * np.abs(first))])
    options = {"xatol": CLOSE, "fatol": 1e-5, "maxfev": POLISH * len(names), "initial_simplex": simplex}
    return changes(minimize(distance, first, method="Nelder-Mead", options=options).x)


def _search(start: Calibrated, window: _Window, candidates: Sequence[str]) -> tuple[dict[str, float], _System]:
    """Return the changes of constants that can be found, and the last linear problem, without held-out blocks."""
    by: dict[str, float] = {}
    floors = {name: start.least(name) / UNITS[name] for name in candidates}
    system = _linear(start, window, by, candidates, holds_out=True)
    for _ in range(ROUNDS):
        names = _identified(system, candidates, floors)
        change = system.solve(names, system.fitted, floors) if names else np.zeros(0)
        found = {name: float(value) * UNITS[name] for name, value in zip(names, change, strict=True)}
        kept = {name: by.get(name, 0.0) for name in names}
        error, step = _fitted_error(start, window, by, system), 1.0
        while step > SHORTEST and _fitted_error(start, window, _between(kept, found, step), system) > error:
            step /= 2  # a replay is linear near a solution only
        if by and step <= SHORTEST:
            break
        moved = max(abs(found.get(name, 0.0) - by.get(name, 0.0)) / UNITS[name] for name in candidates)
        by = _between(kept, found, step)
        system = _linear(start, window, by, candidates, holds_out=True)
        if moved < CLOSE:
            break
    return by, system


def _between(by: Mapping[str, float], found: Mapping[str, float], step: float) -> dict[str, float]:
    """Return changes that are a share of the way from some to others."""
    if step == 1.0:
        return dict(found)
    return {name: (1 - step) * by.get(name, 0.0) + step * found.get(name, 0.0) for name in {**by, **found}}


def _fitted_error(start: Calibrated, window: _Window, by: Mapping[str, float], system: _System) -> float:
    flat = np.concatenate(list(window.residuals(start.changed(by)).values()))
    return float(np.average(flat[system.fitted] ** 2, weights=system.weights[system.fitted]))


def _linear(
    start: Calibrated, window: _Window, by: Mapping[str, float], candidates: Sequence[str], *, holds_out: bool
) -> _System:
    """Replay with each constant changed by a unit."""
    base = window.residuals(start.changed(by))
    shifted = {
        name: window.residuals(start.changed({**by, name: by.get(name, 0.0) + UNITS[name]})) for name in candidates
    }
    weights = []
    for name, values in base.items():
        centred = np.abs(values - np.median(values))
        limit = HUBER * max(CLOSE_ERROR, float(np.median(centred)))
        weights.append(WEIGHTS[name] / len(values) * np.minimum(1.0, limit / np.maximum(centred, TINY)))
    blocks = np.concatenate([window.block_of(name, len(values)) for name, values in base.items()])
    flat = np.concatenate(list(base.values()))
    effects = {name: np.concatenate(list(one.values())) - flat for name, one in shifted.items()}
    found = sum((effects[name] * change / UNITS[name] for name, change in by.items()), np.zeros(1))
    return _System(
        target=found - flat,  # what all changes have to explain, those that have been found too
        effects=effects,
        weights=np.concatenate(weights),
        blocks=blocks,
        fitted=~_is_held_out(blocks) if holds_out else np.ones(len(blocks), np.bool_),
    )


def _is_held_out(blocks: Array) -> NDArray[np.bool_]:
    return np.asarray(blocks % HELD_OUT_EVERY == HELD_OUT_EVERY - 1)


def _identified(system: _System, candidates: Sequence[str], least: Mapping[str, float]) -> list[str]:
    """Choose constants one after the other, while each reduces the error of blocks that are left out."""
    names: list[str] = []
    error = _left_out_error(system, names, least)
    while len(names) < len(candidates):
        errors = {
            name: _left_out_error(system, [*names, name], least)
            for name in candidates
            if name not in names and _alike(system, name, names) < ALIKE
        }
        if not errors:
            break
        best = min(errors.values())
        if best > (1 - GAIN) * error:
            break
        near = best + NEARLY * (error - best)
        found = [
            name
            for name in candidates
            if errors.get(name, np.inf) <= near and _is_identified(system, [*names, name], least)
        ]
        if not found:
            break
        names.append(found[0])
        error = errors[found[0]]
    return names


def _is_identified(system: _System, names: Sequence[str], least: Mapping[str, float]) -> bool:
    """Return whether the interval of the last constant leaves out 0."""
    change = system.solve(names, system.fitted, least)[-1]
    return bool(abs(change) > _half_widths(system, names)[-1])


def _half_widths(system: _System, names: Sequence[str]) -> Array:
    """Return half of each 90 % interval in units, from leaving out each block in turn."""
    anywhere = dict.fromkeys(names, -np.inf)
    blocks = np.unique(system.blocks[system.fitted])
    each = np.array([system.solve(names, system.fitted & (system.blocks != block), anywhere) for block in blocks])
    count = len(blocks)
    return np.asarray(T_90 * np.sqrt((count - 1) / count * ((each - each.mean(axis=0)) ** 2).sum(axis=0)))


def _left_out_error(system: _System, names: Sequence[str], least: Mapping[str, float]) -> float:
    """Return the mean error of blocks that are left out of the fit in turn."""
    errors = []
    for block in np.unique(system.blocks[system.fitted]):
        of_block = system.fitted & (system.blocks == block)
        change = system.solve(names, system.fitted & ~of_block, least) if names else np.zeros(0)
        errors.append(system.left(names, change, of_block))
    return float(np.mean(errors))


def _alike(system: _System, name: str, others: Sequence[str]) -> float:
    """Return the share of a constant's effect that others can have in its place; 1 where it has none."""
    root = np.sqrt(system.weights[system.fitted])
    mine = system.effects[name][system.fitted] * root
    size = float(mine @ mine)
    if size < TINY**2:
        return 1.0
    if not others:
        return 0.0
    matrix = np.column_stack([system.effects[other][system.fitted] * root for other in others])
    rest = mine - matrix @ np.linalg.lstsq(matrix, mine, rcond=None)[0]
    return 1.0 - float(rest @ rest) / size


def _why_not(system: _System, name: str, names: Sequence[str]) -> str:
    """Say why a constant cannot be found."""
    if _alike(system, name, ()) == 1.0:
        return "has no effect on this window"
    if _alike(system, name, names) >= ALIKE:
        return f"cannot be separated from {' and '.join(names)} here"
    return "explains nothing more"


def _held_out_error(residuals: Mapping[str, Array], window: _Window) -> float:
    """Return the mean relative error of requests (and steps) in held-out blocks, weighted as in the fit."""
    errors, weights = [], []
    for name, values in residuals.items():
        unseen = _is_held_out(window.block_of(name, len(values)))
        if name != "progress" and np.any(unseen):
            errors.append(float(np.mean(np.abs(values[unseen]))))
            weights.append(WEIGHTS[name])
    return float(np.average(errors, weights=weights))
