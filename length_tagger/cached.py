"""`cached`: an exact prompt seen before, and how long its answers were (Block §6.3)."""

from __future__ import annotations

import math
from collections import OrderedDict, deque

from length_tagger.estimate import Estimate, LengthOutcome, Query, chance_within_factor_two
from length_tagger.keys import exact_key_of

NAME = "cached"
MOST_LENGTHS = 16  # of one prompt: the latest
SAMPLING_SPREAD = 0.25  # of several answers of one model to one prompt, about, in CASTILLO
PRIOR = 4  # answers that this is worth


class CachedTagger:
    """Remembers the lengths of the answers to each prompt; of the prompts, those asked latest."""

    def __init__(self, *, most_prompts: int) -> None:
        """Start knowing nothing."""
        self._most_prompts = most_prompts
        self._lengths: OrderedDict[int, deque[int]] = OrderedDict()

    def estimate(self, query: Query) -> Estimate | None:
        """Give the middle of the lengths seen; their spread counts for more the more there are."""
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
        """Remember a length, unless it is only where an answer was cut."""
        name = exact_key_of(outcome.keys)
        if name is None or outcome.cut:
            return
        self._lengths.setdefault(name, deque(maxlen=MOST_LENGTHS)).append(outcome.output_tokens)
        self._lengths.move_to_end(name)
        while len(self._lengths) > self._most_prompts:
            self._lengths.popitem(last=False)

    def __len__(self) -> int:
        """How many prompts are remembered."""
        return len(self._lengths)
