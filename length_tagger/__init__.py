"""Predicts response lengths: estimators, one per file, in one table."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from length_tagger.cached import CachedTagger
from length_tagger.chain import Chain, selector_of
from length_tagger.client import ClientTagger
from length_tagger.constant import ConstantTagger
from length_tagger.estimate import Tagger
from length_tagger.history import HistoryTagger
from length_tagger.precomputed import PrecomputedTagger
from length_tagger.settings import TaggerSettings

TAGGERS: dict[str, Callable[[TaggerSettings], Tagger]] = {
    "client": lambda settings: ClientTagger(hint_spread=settings.hint_spread),
    "cached": lambda settings: CachedTagger(max_prompts=settings.cached_prompts),
    "linear": lambda settings: _linear(settings.linear_model),
    "roberta": lambda _: PrecomputedTagger(name="roberta"),
    "history": lambda settings: HistoryTagger(
        window=settings.history_window, enough=settings.history_enough, max_windows=settings.history_windows
    ),
    "constant": lambda settings: ConstantTagger(
        median_tokens=settings.constant_tokens, spread=settings.constant_spread
    ),
}

FIXED = ("linear", "roberta")  # they do not learn from outcomes, so their bias is corrected

DEFAULT_ORDER = ("client", "cached", "linear|history", "constant")


class UnknownEstimatorError(ValueError):
    """No estimator has this `name`."""

    def __init__(self, name: str) -> None:
        """Name the known ones."""
        super().__init__(f"estimator: must be one of {', '.join(TAGGERS)}, not {name!r}")
        self.name = name


def chained(names: Iterable[str], settings: TaggerSettings | None = None) -> Chain:
    """Create a chain of the named estimators; of those joined by `|`, the most accurate one lately is used."""
    order = list(names)
    if not order:
        raise ValueError(f"estimator: name at least one of {', '.join(TAGGERS)}")
    seen: set[str] = set()
    for name in (name for entry in order for name in entry.split("|")):
        if name not in TAGGERS:
            raise UnknownEstimatorError(name)
        if name in seen:
            raise ValueError(f"estimator: {name!r} is a duplicate")
        seen.add(name)
    settings = settings or TaggerSettings()
    made = {name: TAGGERS[name](settings) for name in sorted(seen)}
    return Chain(
        [(entry, selector_of(entry, {name: made[name] for name in entry.split("|")}, FIXED)) for entry in order]
    )


def _linear(path: str) -> Tagger:
    from length_tagger.linear import SHIPPED, LinearTagger, load  # importing scipy is slow

    return LinearTagger(load(path or SHIPPED))
