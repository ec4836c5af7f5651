"""What is sent, and when: lengths and arrival times, drawn or from a trace. Pure but for the generator handed in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from predictor.request import Request, Slo

MOST_REQUESTS = 1_000_000
MOST_TOKENS = 1_000_000
ARRIVALS = ("poisson", "gamma", "uniform", "trace")

Generator = np.random.Generator
Draw = Callable[[Generator, int], Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When requests come: `rate` a second on average, or as the trace says, `speed` times as fast.

    `cv` is the coefficient of variation of gamma's gaps: 1 is Poisson, above is burstier.
    """

    kind: str
    rate: float = 1.0
    cv: float = 2.0
    speed: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what cannot be followed."""
        if self.kind not in ARRIVALS:
            raise ValueError(f"arrivals: {self.kind!r} is none of {', '.join(ARRIVALS)}")
        for name in ("rate", "cv", "speed"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: must be a number above 0, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One request to be: when it is due, counted from the start, and its lengths; times are the endpoint's."""

    request_id: str
    due_s: float
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    slo: Slo | None = None
    prefix: tuple[int | str, ...] = ()  # what its prompt begins with, by name: equal names are equal tokens
    block_tokens: int = 1  # of each


def synthetic(num: int, prompt_tokens: str, output_tokens: str, generator: Generator) -> list[Request]:
    """Draw lengths; arrivals are still to be given."""
    if not 1 <= num <= MOST_REQUESTS:
        raise ValueError(f"num_requests: must lie between 1 and {MOST_REQUESTS}, not {num}")
    prompts = whole(lengths_of(prompt_tokens, "prompt_tokens")(generator, num))
    outputs = whole(lengths_of(output_tokens, "output_tokens")(generator, num))
    return [
        Request(request_id=str(number), prompt_tokens=prompt, output_tokens=output)
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


def by_arrival(requests: Sequence[Request], most: int | None) -> list[Request]:
    """Take the first requests of a trace."""
    return sorted(requests, key=lambda request: request.arrival_s)[:most]


def planned(
    requests: Sequence[Request], timing: Timing, generator: Generator, *, block_tokens: int = 1
) -> list[Planned]:
    """Say when each is due, the first at once; what names their prefixes stands for so many tokens each."""
    if timing.kind == "trace":
        first_s = min(request.arrival_s for request in requests)
        due_s = [(request.arrival_s - first_s) / timing.speed for request in requests]
    else:
        due_s = arrival_times(len(requests), timing, generator)
    return [
        Planned(
            request_id=request.request_id,
            due_s=due,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens or 1,
            priority=request.priority,
            slo=request.slo,
            prefix=request.prefix_hashes,
            block_tokens=block_tokens,
        )
        for request, due in zip(requests, due_s, strict=True)
    ]


def arrival_times(num: int, timing: Timing, generator: Generator) -> list[float]:
    """Draw times from 0 on."""
    gap_s = 1 / timing.rate
    if timing.kind == "uniform":
        gaps = np.full(num, gap_s)
    elif timing.kind == "poisson":
        gaps = generator.exponential(gap_s, num)
    else:
        shape = timing.cv**-2
        gaps = generator.gamma(shape, gap_s / shape, num)
    return [float(time) for time in np.cumsum(gaps) - gaps[0]]


def lengths_of(text: str, field: str) -> Draw:
    """Read a number of tokens or a distribution: 128, uniform:16:512, lognormal:MEDIAN:SPREAD, exponential:MEAN."""
    name, *words = text.split(":")
    try:
        numbers = [float(word) for word in (words or [name])]
    except ValueError:
        raise ValueError(f"{field}: {text!r} is no number of tokens and no known distribution") from None
    if not all(math.isfinite(number) and 0 <= number <= MOST_TOKENS for number in numbers):
        raise ValueError(f"{field}: numbers must lie between 0 and {MOST_TOKENS}, in {text!r}")
    match name, numbers:
        case "uniform", [low, high] if low <= high:
            return lambda generator, num: generator.uniform(low, high + 1, num).tolist()
        case "lognormal", [median, spread] if median >= 1:
            return lambda generator, num: (median * np.exp(spread * generator.standard_normal(num))).tolist()
        case "exponential", [mean] if mean >= 1:
            return lambda generator, num: generator.exponential(mean, num).tolist()
        case _, [number] if not words and number >= 1:
            return lambda _, num: [number] * num
    raise ValueError(f"{field}: {text!r} is none of 128, uniform:16:512, lognormal:MEDIAN:SPREAD, exponential:MEAN")


def whole(values: Iterable[float]) -> list[int]:
    """Make token counts of numbers: whole, at least one."""
    return [min(MOST_TOKENS, max(1, int(value))) for value in values]
