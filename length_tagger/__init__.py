"""How long answers will be: estimators, one per file, in one table."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from length_tagger.chain import Chain
from length_tagger.client import ClientTagger
from length_tagger.constant import ConstantTagger
from length_tagger.estimate import Tagger
from length_tagger.history import HistoryTagger
from length_tagger.settings import TaggerSettings

TAGGERS: dict[str, Callable[[TaggerSettings], Tagger]] = {
    "client": lambda settings: ClientTagger(hint_spread=settings.hint_spread),
    "history": lambda settings: HistoryTagger(
        window=settings.history_window, enough=settings.history_enough, most_windows=settings.history_windows
    ),
    "constant": lambda settings: ConstantTagger(
        median_tokens=settings.constant_tokens, spread=settings.constant_spread
    ),
}

DEFAULT_ORDER = ("client", "history", "constant")


def chained(names: Iterable[str], settings: TaggerSettings | None = None) -> Chain:
    """Make the named estimators, to be asked in this order."""
    order = list(names)
    if not order:
        raise ValueError(f"estimator: name at least one of {', '.join(TAGGERS)}")
    for place, name in enumerate(order):
        if name not in TAGGERS:
            near = difflib.get_close_matches(name, TAGGERS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"estimator: {name!r} is none of {', '.join(TAGGERS)}{hint}")
        if name in order[:place]:
            raise ValueError(f"estimator: {name!r} is there twice")
    return Chain([TAGGERS[name](settings or TaggerSettings()) for name in order])
