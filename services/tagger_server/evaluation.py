"""Judging estimators: on held-out prompts, and on outcomes that a tagger has recorded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from length_tagger import chained
from length_tagger.cached import CachedTagger
from length_tagger.estimate import Estimate, LengthOutcome, Query, Tagger
from length_tagger.keys import prompt_keys
from length_tagger.linear import SHIPPED, LinearTagger, load
from length_tagger.samples import Sample, part_of
from length_tagger.scores import Numbers, sampling_ceiling, scores
from length_tagger.settings import TaggerSettings
from services.tagger_server.batches import SMALL, Batched, encoder_from

UNITS = {"mae": "tokens", "pinball": "tokens"}
BATCH = 64
MOST_ERRORS = 1000  # of each kind: simulations need no more
ALL, CHAT = "all", "chat"

Bar = Callable[[list[Any], str], Iterable[Any]]
Told = tuple[Numbers, Numbers, Numbers, list[str]]  # lengths, medians, spreads, kinds


def batched_from(linear_model: str | None, encoder: str | None) -> Batched:
    """Load the estimator that is asked for: an encoder, or else `linear`."""
    if encoder is None:
        return LinearTagger(load(linear_model or SHIPPED))
    return encoder_from(encoder)


def reads_encoders() -> bool:
    """Tell whether what the package's own encoder needs is installed."""
    return find_spec("tokenizers") is not None and any(find_spec(one) is not None for one in ("onnxruntime", "torch"))


def evaluated(  # noqa: PLR0913 - the command's options
    samples: Sequence[Sample],
    *,
    linear_model: str | None = None,
    encoder: str | None = None,
    seed: int | None = None,
    held_out: bool = True,
    errors: str = "",
    progress: Bar = lambda items, _: items,
) -> list[dict[str, Any]]:
    """Score every estimator on the test part of the samples, or on all of them."""
    linear = LinearTagger(load(linear_model or SHIPPED))
    learned: dict[str, Batched] = {"linear": linear}
    if encoder is not None or reads_encoders():
        learned["roberta"] = batched_from(None, encoder or SMALL)
    if seed is None:
        seed = int(linear.model.card.get("seed", 0))
    tests = [sample for sample in samples if not held_out or part_of(sample.prompt, seed) == "test"]
    others = [sample for sample in samples if part_of(sample.prompt, seed) != "test"] or tests
    if not tests:
        raise ValueError("no prompt is held out: take --part all, or more data")
    told: dict[str, Told] = {"median": _one_for_all(tests, others)}
    for name, estimator in learned.items():
        told[name] = _asked(estimator, tests, progress, name)
    told["history"] = _history(tests, others, seed)
    told["cached"] = _cached(tests)
    repeated = [sample for sample in tests if len(sample.output_tokens) > 1]
    told["ceiling"] = (
        *sampling_ceiling([sample.output_tokens for sample in repeated]),
        [sample.kind for sample in repeated for _ in sample.output_tokens],
    )
    if errors:
        write_errors(told, Path(errors), seed)
    return [row for name, one in told.items() for row in _rows(name, one)]


def write_errors(told: Mapping[str, Told], folder: Path, seed: int) -> None:
    """Write what each estimator said beside what became true, a file for each kind of prompts, a row for each answer.

    Simulations draw tags from them: `tags = { kind = "ranked", file = ... }`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, (lengths, medians, spreads, kinds) in told.items():
            for kind in dict.fromkeys(kinds):
                places = [place for place, one in enumerate(kinds) if one == kind]
                Random(seed).shuffle(places)  # noqa: S311 - a sample, not a secret
                rows = (f"{lengths[one]:.0f},{medians[one]:.4g},{spreads[one]:.3g}\n" for one in places[:MOST_ERRORS])
                file = folder / f"{name}-{kind or ALL}.csv"
                file.write_text("output_tokens,median_tokens,spread\n" + "".join(rows), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"errors: {folder} cannot be written: {error.strerror}") from None


def _rows(name: str, told: Told) -> Iterable[dict[str, Any]]:
    lengths, medians, spreads, kinds = told
    groups = {ALL: np.ones(len(lengths), bool)}
    groups |= {kind: np.array([one == kind for one in kinds]) for kind in (CHAT,)}
    for group, chosen in groups.items():
        if not chosen.any():
            continue
        for measure, value in scores(lengths[chosen], medians[chosen], spreads[chosen]).items():
            yield {
                "name": f"{name}.{group}.{measure}",
                "value": value,
                "unit": UNITS.get(measure, "ratio"),
                "n": int(chosen.sum()),
            }


def _one_for_all(tests: Sequence[Sample], others: Sequence[Sample]) -> Told:
    """Say the median of all other answers, with the spread that puts nine of ten of them below the 90th percentile."""
    known = np.concatenate([np.log(sample.output_tokens) for sample in others])
    median = float(np.median(known))
    spread = max(0.0, float(np.quantile(known, 0.9)) - median) / 1.2816
    return _laid_out(tests, [(float(np.exp(median)), spread)] * len(tests))


def _asked(estimator: Batched, tests: Sequence[Sample], progress: Bar, name: str) -> Told:
    said: list[tuple[float, float]] = []
    for start in progress(list(range(0, len(tests), BATCH)), name):
        some = tests[start : start + BATCH]
        estimates = estimator.estimate_many([Query(prompt=one.prompt, model=one.model) for one in some])
        said.extend((1.0, 0.0) if one is None else (one.median_tokens, one.spread) for one in estimates)
    return _laid_out(tests, said)


def _history(tests: Sequence[Sample], others: Sequence[Sample], seed: int) -> Told:
    """Tell `history` of the other prompts' answers, in any order, and ask."""
    tagger = chained(["history"], TaggerSettings(history_enough=1))
    shuffled = list(others)
    Random(seed).shuffle(shuffled)  # noqa: S311 - an order, not a secret
    for sample in shuffled:
        keys = prompt_keys(sample.model, sample.prompt)
        tagger.observe(LengthOutcome(output_tokens=sample.output_tokens[0], model=sample.model, keys=keys))
    return _laid_out(tests, [_said(tagger, sample) for sample in tests])


def _cached(tests: Sequence[Sample]) -> Told:
    """Tell `cached` the first answer to each prompt, and ask for the others."""
    repeated = [sample for sample in tests if len(sample.output_tokens) > 1]
    tagger = CachedTagger(most_prompts=len(repeated) + 1)
    for sample in repeated:
        keys = prompt_keys(sample.model, sample.prompt)
        tagger.observe(LengthOutcome(output_tokens=sample.output_tokens[0], model=sample.model, keys=keys))
    said = [_said(tagger, sample) for sample in repeated]
    return _laid_out([replace(sample, output_tokens=sample.output_tokens[1:]) for sample in repeated], said)


def _said(tagger: Tagger, sample: Sample) -> tuple[float, float]:
    keys = prompt_keys(sample.model, sample.prompt)
    estimate = tagger.estimate(Query(prompt=sample.prompt, model=sample.model, keys=keys))
    return (1.0, 0.0) if estimate is None else (estimate.median_tokens, estimate.spread)


def _laid_out(samples: Sequence[Sample], said: Sequence[tuple[float, float]]) -> Told:
    """Put each answer beside what was said of it."""
    times = [len(sample.output_tokens) for sample in samples]
    lengths = np.array([tokens for sample in samples for tokens in sample.output_tokens], float)
    pairs = np.repeat(np.array(said, float).reshape(-1, 2), times, axis=0)
    kinds = [sample.kind for sample in samples for _ in sample.output_tokens]
    return lengths, pairs[:, 0], pairs[:, 1], kinds


def outcomes_from(path: str) -> list[dict[str, Any]] | None:
    """Read recorded outcomes; None where the file holds samples instead, which have prompts."""
    if not path.endswith(".jsonl"):
        return None
    outcomes: list[dict[str, Any]] = []
    try:
        with Path(path).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict) or "tag" not in row:
                    if outcomes:
                        raise ValueError(f"{path}:{number}: tag: is missing")
                    return None
                outcomes.append(_outcome(row, f"{path}:{number}"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        if outcomes:
            raise ValueError(f"{path}:{len(outcomes) + 1}: is not JSON") from None
        return None
    return outcomes or None


def _outcome(row: dict[str, Any], where: str) -> dict[str, Any]:
    """Check what is needed of a recorded outcome."""
    try:
        LengthOutcome(output_tokens=row["output_tokens"])
        tag = row["tag"]
        made = Estimate(
            median_tokens=float(tag["median_tokens"]), spread=float(tag["spread"]), confidence=0.0,
            estimator=str(tag["estimator"]),
        )  # fmt: skip
    except (KeyError, TypeError) as error:
        raise ValueError(f"{where}: is no recorded outcome: {error}") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return {"output_tokens": row["output_tokens"], "tag": made}


def evaluated_outcomes(outcomes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Score each estimator on the requests that it tagged."""
    rows: list[dict[str, Any]] = []
    for name in sorted({one["tag"].estimator for one in outcomes}):
        mine = [one for one in outcomes if one["tag"].estimator == name]
        lengths = np.array([one["output_tokens"] for one in mine], float)
        medians = np.array([one["tag"].median_tokens for one in mine])
        spreads = np.array([one["tag"].spread for one in mine])
        rows.extend(_rows(name, (lengths, medians, spreads, [""] * len(mine))))
    return rows
