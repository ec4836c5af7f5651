"""The evaluation of estimators: on held-out samples, and on recorded outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from length_tagger import chained
from length_tagger.cached import CachedTagger
from length_tagger.estimate import BatchTagger, Estimate, LengthOutcome, Query, Tagger
from length_tagger.keys import prompt_keys
from length_tagger.samples import Sample
from length_tagger.scores import Numbers, sampling_ceiling, scores
from length_tagger.settings import TaggerSettings

UNITS = {"mae": "tokens", "pinball": "tokens"}
BATCH = 64
ALL, CHAT = "all", "chat"

Progress = Callable[[list[Any], str], Iterable[Any]]  # wraps the batches of the named estimator


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """Real lengths beside predicted medians and spreads, and the kinds of their prompts."""

    lengths: Numbers
    medians: Numbers
    spreads: Numbers
    kinds: list[str]


def predictions_on(
    tests: Sequence[Sample], others: Sequence[Sample], taggers: Mapping[str, BatchTagger], progress: Progress
) -> dict[str, Predictions]:
    """Predict the test samples by every estimator, by name; `history` observes the other samples in their order.

    `median` is one prediction for all, and `ceiling` is an upper bound for predictions from the prompt.
    """
    predictions = {"median": _one_for_all(tests, others)}
    for name, tagger in taggers.items():
        predictions[name] = _in_batches(tagger, tests, progress, name)
    predictions["history"] = _history(tests, others)
    predictions["cached"] = _cached(tests)
    repeated = [sample for sample in tests if len(sample.output_tokens) > 1]
    lengths, medians, spreads = sampling_ceiling([sample.output_tokens for sample in repeated])
    predictions["ceiling"] = Predictions(lengths=lengths, medians=medians, spreads=spreads, kinds=_kinds(repeated))
    return predictions


def score_rows(name: str, predictions: Predictions) -> Iterator[dict[str, Any]]:
    """Yield the scores of an estimator, for all prompts and for chat."""
    groups = {ALL: np.ones(len(predictions.lengths), bool)}
    groups[CHAT] = np.array([kind == CHAT for kind in predictions.kinds])
    for group, chosen in groups.items():
        if not chosen.any():
            continue
        found = scores(predictions.lengths[chosen], predictions.medians[chosen], predictions.spreads[chosen])
        for metric, value in found.items():
            yield {
                "name": f"{name}.{group}.{metric}",
                "value": value,
                "unit": UNITS.get(metric, "ratio"),
                "n": int(chosen.sum()),
            }


def outcome_rows(outcomes: Sequence[tuple[int, Estimate]]) -> list[dict[str, Any]]:
    """Score each estimator on recorded outcomes: real lengths with the estimates that were used."""
    rows: list[dict[str, Any]] = []
    for name in sorted({estimate.estimator for _, estimate in outcomes}):
        own = [(length, estimate) for length, estimate in outcomes if estimate.estimator == name]
        predictions = Predictions(
            lengths=np.array([length for length, _ in own], float),
            medians=np.array([estimate.median_tokens for _, estimate in own]),
            spreads=np.array([estimate.spread for _, estimate in own]),
            kinds=[""] * len(own),
        )
        rows.extend(score_rows(name, predictions))
    return rows


def _one_for_all(tests: Sequence[Sample], others: Sequence[Sample]) -> Predictions:
    """Predict the median of all other responses, with the spread that has 90 % of them below the 90th percentile."""
    known = np.concatenate([np.log(sample.output_tokens) for sample in others])
    median = float(np.median(known))
    spread = max(0.0, float(np.quantile(known, 0.9)) - median) / 1.2816
    return _paired(tests, [(float(np.exp(median)), spread)] * len(tests))


def _in_batches(tagger: BatchTagger, tests: Sequence[Sample], progress: Progress, name: str) -> Predictions:
    predicted: list[tuple[float, float]] = []
    for start in progress(list(range(0, len(tests), BATCH)), name):
        some = tests[start : start + BATCH]
        estimates = tagger.estimate_many([Query(prompt=one.prompt, model=one.model) for one in some])
        predicted.extend(_numbers_of(one) for one in estimates)
    return _paired(tests, predicted)


def _history(tests: Sequence[Sample], others: Sequence[Sample]) -> Predictions:
    """Let `history` observe the first response to each other prompt, and predict the tests."""
    tagger = chained(["history"], TaggerSettings(history_enough=1))
    for sample in others:
        tagger.observe(_first_outcome(sample))
    return _paired(tests, [_predicted(tagger, sample) for sample in tests])


def _cached(tests: Sequence[Sample]) -> Predictions:
    """Let `cached` observe the first response to each prompt, and predict the other responses."""
    repeated = [sample for sample in tests if len(sample.output_tokens) > 1]
    tagger = CachedTagger(max_prompts=len(repeated) + 1)
    for sample in repeated:
        tagger.observe(_first_outcome(sample))
    predicted = [_predicted(tagger, sample) for sample in repeated]
    return _paired([replace(sample, output_tokens=sample.output_tokens[1:]) for sample in repeated], predicted)


def _first_outcome(sample: Sample) -> LengthOutcome:
    keys = prompt_keys(sample.model, sample.prompt)
    return LengthOutcome(output_tokens=sample.output_tokens[0], model=sample.model, keys=keys)


def _predicted(tagger: Tagger, sample: Sample) -> tuple[float, float]:
    keys = prompt_keys(sample.model, sample.prompt)
    return _numbers_of(tagger.estimate(Query(prompt=sample.prompt, model=sample.model, keys=keys)))


def _numbers_of(estimate: Estimate | None) -> tuple[float, float]:
    return (1.0, 0.0) if estimate is None else (estimate.median_tokens, estimate.spread)


def _paired(samples: Sequence[Sample], predicted: Sequence[tuple[float, float]]) -> Predictions:
    """Pair each response of the samples with the prediction for its sample."""
    times = [len(sample.output_tokens) for sample in samples]
    pairs = np.repeat(np.array(predicted, float).reshape(-1, 2), times, axis=0)
    return Predictions(
        lengths=np.array([tokens for sample in samples for tokens in sample.output_tokens], float),
        medians=pairs[:, 0],
        spreads=pairs[:, 1],
        kinds=_kinds(samples),
    )


def _kinds(samples: Sequence[Sample]) -> list[str]:
    return [sample.kind for sample in samples for _ in sample.output_tokens]
