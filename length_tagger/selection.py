"""Selection of the most accurate of several estimators, by outcomes; the bias of fixed estimators is corrected."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from length_tagger.estimate import MAX_TOKENS, Estimate, LengthOutcome, Query, Tagger
from length_tagger.keys import exact_key_of

MAX_PENDING = 16_384  # requests without an outcome yet
MAX_MODELS = 256
MIN_RATE = 1 / 128  # of the moving averages
PRIOR = 8  # outcomes before an estimator can be preferred
MAX_ERROR = 1.0  # an outcome counts as a factor of e at most
MAX_BIAS = 3.0
MAX_ERROR_RATIO = 0.9  # an estimator is preferred to an earlier one if its error is at most this share
DRIFT = math.log(1.5)


@dataclass(slots=True, kw_only=True)
class Accuracy:
    """The recent accuracy of one estimator for one model: its bias, and the mean error without the bias."""

    bias: float = 0.0
    error: float = 0.0
    num: int = 0

    @property
    def drifted(self) -> bool:
        """Whether the model's responses differ from those that the estimator was trained on."""
        return abs(self.bias) > DRIFT

    def learn(self, error: float) -> None:
        """Record an error: the logarithm of real over estimated length."""
        rate = max(MIN_RATE, 1 / (self.num + PRIOR))
        deviation = error - self.bias
        self.error += max(MIN_RATE, 1 / (self.num + 1)) * (min(abs(deviation), 2 * MAX_ERROR) - self.error)
        self.bias += rate * min(MAX_ERROR, max(-MAX_ERROR, deviation))
        self.bias = min(MAX_BIAS, max(-MAX_BIAS, self.bias))
        self.num += 1


class Selector:
    """Returns the estimate of the estimator that was most accurate for the model lately; until then, of the first.

    The bias of the `fixed` estimators, which do not learn from outcomes, is corrected for each model.
    """

    def __init__(self, taggers: Mapping[str, Tagger], fixed: Sequence[str]) -> None:
        """Start without outcomes."""
        self._taggers = dict(taggers)
        self._fixed = frozenset(fixed)
        self._accuracies: OrderedDict[str, dict[str, Accuracy]] = OrderedDict()
        self._pending: OrderedDict[int, dict[str, float]] = OrderedDict()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the estimators."""
        return tuple(self._taggers)

    def estimate(self, query: Query) -> Estimate | None:
        """Query all estimators; keep their estimates until the outcome is known."""
        estimates = {
            name: estimate for name, tagger in self._taggers.items() if (estimate := tagger.estimate(query)) is not None
        }
        if not estimates:
            return None
        name = exact_key_of(query.keys)
        if name is not None:
            self._pending[name] = {each: math.log(estimate.median_tokens) for each, estimate in estimates.items()}
            self._pending.move_to_end(name)
            if len(self._pending) > MAX_PENDING:
                self._pending.popitem(last=False)
        accuracies = self._accuracies.get(query.model, {})
        chosen = self._most_accurate(list(estimates), accuracies)
        return self._corrected(estimates[chosen], accuracies.get(chosen), chosen)

    def _most_accurate(self, names: list[str], accuracies: Mapping[str, Accuracy]) -> str:
        best = names[0]
        for name in names[1:]:
            mine, other = accuracies.get(name), accuracies.get(best)
            if mine is None or other is None or min(mine.num, other.num) < PRIOR:
                continue
            if mine.error < MAX_ERROR_RATIO * other.error:
                best = name
        return best

    def _corrected(self, estimate: Estimate, accuracy: Accuracy | None, name: str) -> Estimate:
        if accuracy is None or name not in self._fixed:
            return estimate
        median_tokens = min(float(MAX_TOKENS), max(1.0, estimate.median_tokens * math.exp(accuracy.bias)))
        return replace(estimate, median_tokens=median_tokens)

    def observe(self, outcome: LengthOutcome) -> None:
        """Update the accuracy of each estimator; a cut response gives no error for estimates beyond the cut."""
        name = exact_key_of(outcome.keys)
        estimates = None if name is None else self._pending.get(name)
        if estimates is not None:
            accuracies = self._accuracies.setdefault(outcome.model, {})
            self._accuracies.move_to_end(outcome.model)
            if len(self._accuracies) > MAX_MODELS:
                self._accuracies.popitem(last=False)
            log = math.log(outcome.output_tokens)
            for each, estimated in estimates.items():
                accuracy = accuracies.setdefault(each, Accuracy())
                corrected = estimated + (accuracy.bias if each in self._fixed else 0.0)
                if not (outcome.cut and corrected >= log):
                    accuracy.learn(log - estimated)
        for tagger in self._taggers.values():
            tagger.observe(outcome)

    def replaced(self, name: str, tagger: Tagger) -> Selector:
        """Return a selector with another estimator of that name, which has no outcomes yet."""
        new = Selector({**self._taggers, name: tagger}, tuple(self._fixed))
        for model, accuracies in self._accuracies.items():
            new._accuracies[model] = {each: accuracy for each, accuracy in accuracies.items() if each != name}
        return new

    def records(self) -> Iterator[tuple[str, str, Accuracy]]:
        """Yield estimator, model and accuracy."""
        for model, accuracies in self._accuracies.items():
            for name, accuracy in accuracies.items():
                yield name, model, accuracy
