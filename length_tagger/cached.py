"""`cached`: the lengths of earlier responses to the same prompt (Block §6.3)."""

from __future__ import annotations

import math
from collections import OrderedDict, deque

from length_tagger.estimate import Estimate, LengthOutcome, Query, chance_within_factor_two
from length_tagger.keys import exact_key_of

NAME = "cached"
MAX_LENGTHS = 16  # of one prompt; the latest are kept
SAMPLING_SPREAD = 0.25  # of responses of one model to one prompt, about, in CASTILLO
PRIOR = 4  # responses that SAMPLING_SPREAD counts as


class CachedTagger:
    """Keeps the response lengths of each prompt, for the most recently used prompts."""

    def __init__(self, *, max_prompts: int) -> None:
        """Start empty."""
        self._max_prompts = max_prompts
        self._lengths: OrderedDict[int, deque[int]] = OrderedDict()

    def estimate(self, query: Query) -> Estimate | None:
        """Return the median of the known lengths; the more there are, the more their own spread counts."""
        name = exact_key_of(query.keys)
        lengths = None if name is None else self._lengths.get(name)
        if not lengths:
            return None
        logs = sorted(math.log(length) for length in lengths)
        num = len(logs)
        median = (logs[(num - 1) // 2] + logs[num // 2]) / 2
        around = sum((one - median) ** 2 for one in logs)
        variance = (PRIOR * SAMPLING_SPREAD**2 + around) / (PRIOR + num) * (1 + 1 / num)
        spread = min(math.sqrt(variance), 5.0)
        return Estimate(
            median_tokens=math.exp(median),
            spread=spread,
            confidence=chance_within_factor_two(spread),
            estimator=NAME,
        )

    def observe(self, outcome: LengthOutcome) -> None:
        """Record a length, unless the response was cut."""
        name = exact_key_of(outcome.keys)
        if name is None or outcome.cut:
            return
        self._lengths.setdefault(name, deque(maxlen=MAX_LENGTHS)).append(outcome.output_tokens)
        self._lengths.move_to_end(name)
        while len(self._lengths) > self._max_prompts:
            self._lengths.popitem(last=False)

    def __len__(self) -> int:
        """The number of prompts."""
        return len(self._lengths)
