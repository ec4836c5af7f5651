"""Load plans: the lengths and arrival times of requests to send, drawn or from a trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from predictor.request import REAL_TIME, RequestFacts, Slo
from predictor.suggestions import require_choice
from simulator.mix import MixEntry

MAX_REQUESTS = 1_000_000
MAX_TOKENS = 1_000_000
ROUNDING = 1e-6  # tokens
LENGTH_FORMS = (
    "128, uniform:16:512, lognormal:MEDIAN:SPREAD, exponential:MEAN or quantiles:SHARE:TOKENS, any number of pairs"
)
ARRIVALS = ("poisson", "gamma", "uniform", "trace")

Generator = np.random.Generator
Draw = Callable[[Generator, int], Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When requests arrive: `rate` per second on average, or as in the trace, `speed` times as fast.

    `cv` is the coefficient of variation of gamma gaps: 1 is Poisson, more is burstier.
    """

    kind: str
    rate: float = 1.0
    cv: float = 2.0
    speed: float = 1.0

    def __post_init__(self) -> None:
        """Reject values out of range, naming the field."""
        require_choice("arrivals", self.kind, ARRIVALS)
        for name in ("rate", "cv", "speed"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: must be a number above 0, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One request to send: when it is due, from the start in the endpoint's time, and its lengths."""

    request_id: str
    due_s: float
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    slo: Slo | None = None
    request_class: str = REAL_TIME
    weight: float = 1.0
    mix_entry: str = ""  # name of its entry in a mix
    when_late: str = ""  # empty where it does not say
    tenant: str = ""
    prefix: tuple[int | str, ...] = ()  # the blocks that its prompt begins with; equal names are equal tokens
    block_tokens: int = 1  # tokens per block
    entry: MixEntry | None = None
    stated: RequestFacts | None = None  # what it says itself, where an objective gives other facts


def slo_of(request: Planned, slo: Slo) -> Slo:
    """Return a request's SLO targets: its own, or else those of the run."""
    return Slo(ttft_s=target_of("ttft_s", request, slo), tpot_s=target_of("tpot_s", request, slo))


def target_of(name: str, request: Planned | RequestFacts, slo: Slo) -> float | None:
    """Return a request's SLO target by name, or else that of the run."""
    own: float | None = getattr(request.slo, name, None)
    return getattr(slo, name) if own is None else own


def synthetic(num: int, prompt_tokens: str, output_tokens: str, generator: Generator) -> list[RequestFacts]:
    """Draw requests with lengths only; `planned` adds arrival times."""
    if not 1 <= num <= MAX_REQUESTS:
        raise ValueError(f"num_requests: must lie between 1 and {MAX_REQUESTS}, not {num}")
    prompts = whole(lengths_of(prompt_tokens, "prompt_tokens")(generator, num))
    outputs = whole(lengths_of(output_tokens, "output_tokens")(generator, num))
    return [
        RequestFacts(request_id=str(number), prompt_tokens=prompt, output_tokens=output)
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


def by_arrival(requests: Sequence[RequestFacts], limit: int | None) -> list[RequestFacts]:
    """Return the first `limit` requests of a trace, in the order of arrival."""
    return sorted(requests, key=lambda request: request.arrival_s)[:limit]


def planned(
    requests: Sequence[RequestFacts],
    timing: Timing,
    generator: Generator,
    *,
    block_tokens: int = 1,
    mix_entries: Sequence[MixEntry] | None = None,
) -> list[Planned]:
    """Plan when each request is sent, the first at 0; each prefix hash stands for `block_tokens` tokens."""
    if timing.kind == "trace":
        first_s = min(request.arrival_s for request in requests)
        due_s = [(request.arrival_s - first_s) / timing.speed for request in requests]
    else:
        due_s = arrival_times(len(requests), timing, generator)
    entries: Sequence[MixEntry | None] = mix_entries or [None] * len(requests)
    return [
        Planned(
            request_id=request.request_id,
            due_s=due,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens or 1,
            priority=request.priority,
            slo=request.slo,
            request_class=request.request_class,
            weight=request.weight,
            mix_entry="" if entry is None else entry.name,
            when_late="" if entry is None else entry.when_late or "",
            tenant=request.client_id,
            prefix=request.prefix_hashes,
            block_tokens=block_tokens,
            entry=entry,
        )
        for request, due, entry in zip(requests, due_s, entries, strict=True)
    ]


def arrival_times(num: int, timing: Timing, generator: Generator) -> list[float]:
    """Draw arrival times; the first is 0."""
    gap_s = 1 / timing.rate
    if timing.kind == "uniform":
        gaps = np.full(num, gap_s)
    elif timing.kind == "poisson":
        gaps = generator.exponential(gap_s, num)
    else:
        shape = timing.cv**-2
        gaps = generator.gamma(shape, gap_s / shape, num)
    return [float(time) for time in np.cumsum(gaps) - gaps[0]]


def lengths_of(text: str, field: str, *, continuous: bool = False) -> Draw:
    """Parse a number of tokens or a distribution; `LENGTH_FORMS` names them.

    Draws are cut to whole numbers later, unless they are `continuous`. Of quantiles, 0.5:28 says that half of the draws
    are at most 28; between two of them the logarithm grows evenly, and no draw is above the last one.
    """
    name, *words = text.split(":")
    try:
        numbers = [float(word) for word in (words or [name])]
    except ValueError:
        raise ValueError(f"{field}: {text!r} is neither a number of tokens nor a known distribution") from None
    if not all(math.isfinite(number) and 0 <= number <= MAX_TOKENS for number in numbers):
        raise ValueError(f"{field}: numbers must lie between 0 and {MAX_TOKENS}, in {text!r}")
    match name, numbers:
        case "uniform", [low, high] if low <= high:
            return lambda generator, num: generator.uniform(low, high + (not continuous), num).tolist()
        case "lognormal", [median, spread] if median >= 1:
            return lambda generator, num: (median * np.exp(spread * generator.standard_normal(num))).tolist()
        case "exponential", [mean] if mean >= 1:
            return lambda generator, num: generator.exponential(mean, num).tolist()
        case "quantiles", [*pairs] if _are_quantiles(pairs[::2], pairs[1::2]):
            return lambda generator, num: _by_quantiles(pairs[::2], pairs[1::2], generator.random(num), continuous)
        case _, [number] if not words and number >= 1:
            return lambda _, num: [number] * num
    raise ValueError(f"{field}: must be one of {LENGTH_FORMS}, not {text!r}")


def _by_quantiles(
    shares: Sequence[float], tokens: Sequence[float], places: npt.NDArray[np.float64], continuous: bool
) -> list[float]:
    """Return the lengths at places between 0 and 1; those that become whole numbers are rounded up."""
    values = np.exp(np.interp(places, [0.0, *shares], np.log([1.0, *tokens])))
    found: list[float] = (values if continuous else np.ceil(values - ROUNDING)).tolist()
    return found


def _are_quantiles(shares: Sequence[float], tokens: Sequence[float]) -> bool:
    """Return whether shares between 0 and 1 grow, and the numbers of tokens with them."""
    if len(shares) != len(tokens) or not shares:
        return False
    grows = all(one < other for one, other in pairwise(shares)) and all(one <= other for one, other in pairwise(tokens))
    return grows and shares[0] > 0 and shares[-1] <= 1 and tokens[0] >= 1


def whole(values: Iterable[float]) -> list[int]:
    """Convert numbers to token counts of at least one."""
    return [min(MAX_TOKENS, max(1, int(value))) for value in values]
