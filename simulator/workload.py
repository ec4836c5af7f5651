"""What comes to a simulated cluster: when, how long it is, and how long it is thought to be; all of it in arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from predictor.request import Request

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

LONGEST = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLengths:
    """Requests' lengths, and the contents of their prompts' blocks where these are known.

    `contents` of a request are numbers from `first_content[i]` to `first_content[i + 1]`; each stands for all tokens up
    to the end of a block of `block_tokens`.
    """

    prompt_tokens: Counts
    output_tokens: Counts
    first_content: Counts = field(default_factory=lambda: np.zeros(0, np.int64))
    contents: Counts = field(default_factory=lambda: np.zeros(0, np.int64))
    block_tokens: int = 16

    def __len__(self) -> int:
        """How many requests these are."""
        return len(self.prompt_tokens)

    @property
    def num_contents(self) -> int:
        """How many different contents there are."""
        return int(self.contents.max(initial=-1)) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests in the order of their arrival. Where a tag's median is NaN, the true length is known."""

    lengths: RequestLengths
    arrival_s: Floats
    tag_median: Floats
    tag_spread: Floats

    def __len__(self) -> int:
        """How many requests there are."""
        return len(self.arrival_s)


def lengths_of(requests: Sequence[Request], block_tokens: int = 16) -> RequestLengths:
    """Take lengths and prefixes from requests."""
    if not requests:
        raise ValueError("requests: there is none")
    numbers: dict[int | str, int] = {}
    contents: list[int] = []
    first = [0]
    for place, request in enumerate(requests):
        if request.output_tokens is None:
            raise ValueError(f"requests[{place}].output_tokens: is missing")
        contents += [numbers.setdefault(name, len(numbers)) for name in request.prefix_hashes]
        first.append(len(contents))
    return RequestLengths(
        prompt_tokens=np.array([request.prompt_tokens for request in requests], np.int64),
        output_tokens=np.array([request.output_tokens for request in requests], np.int64),
        first_content=np.array(first, np.int64),
        contents=np.array(contents, np.int64),
        block_tokens=block_tokens,
    )


def drawn(lengths: RequestLengths, num: int, generator: np.random.Generator) -> RequestLengths:
    """Draw so many requests, each as likely as any other; prefixes are left out, as they would repeat whole prompts."""
    chosen = generator.integers(0, len(lengths), num)
    return RequestLengths(prompt_tokens=lengths.prompt_tokens[chosen], output_tokens=lengths.output_tokens[chosen])


def fitting(lengths: RequestLengths, most_tokens: int) -> RequestLengths:
    """Leave those whose prompt and answer go together into a model's context."""
    fit = lengths.prompt_tokens + lengths.output_tokens <= most_tokens
    if not fit.any():
        raise ValueError(f"lengths: not one request fits {most_tokens} tokens")
    return RequestLengths(prompt_tokens=lengths.prompt_tokens[fit], output_tokens=lengths.output_tokens[fit])


def clipped(lengths: RequestLengths, most_tokens: int) -> RequestLengths:
    """Cut prompts so that, with their answers, they go into a model's context, as Block's traces were."""
    output = np.minimum(lengths.output_tokens, most_tokens - 1)
    return RequestLengths(prompt_tokens=np.minimum(lengths.prompt_tokens, most_tokens - output), output_tokens=output)


def with_hotspot(lengths: RequestLengths, hot: npt.NDArray[np.bool_], hot_tokens: int) -> RequestLengths:
    """Let some requests have prompts of so many tokens that are the same for all of them, and a block of their own."""
    size = lengths.block_tokens
    shared = list(range(lengths.num_contents, lengths.num_contents + hot_tokens // size))
    if not shared:
        raise ValueError(f"hot_tokens: {hot_tokens} fill not one block of {size}")
    first, known = lengths.first_content, lengths.contents.tolist()
    rows: list[list[int]] = [
        shared if is_hot else known[first[place] : first[place + 1]] if len(first) else []
        for place, is_hot in enumerate(hot.tolist())
    ]
    return replace(
        lengths,
        prompt_tokens=np.where(hot, len(shared) * size + size // 2, lengths.prompt_tokens),
        first_content=np.cumsum([0, *map(len, rows)]),
        contents=np.array([name for row in rows for name in row], np.int64),
    )


# When requests come: unit gaps are drawn, of mean 1, so that the same seed gives the same pattern at any rate.


def poisson_gaps(num: int, generator: np.random.Generator) -> Floats:
    """Draw gaps of a Poisson process."""
    return generator.exponential(1.0, num)


def gamma_gaps(cv: float) -> Callable[[int, np.random.Generator], Floats]:
    """Make gaps whose coefficient of variation is `cv`: 1 is Poisson, above is burstier."""
    if not (math.isfinite(cv) and cv > 0):
        raise ValueError(f"cv: must be a number above 0, not {cv}")
    shape = cv**-2
    return lambda num, generator: generator.gamma(shape, 1.0 / shape, num)


def uniform_gaps(num: int, _: np.random.Generator) -> Floats:
    """Give equal gaps."""
    return np.ones(num)


def at_rate(gaps: Floats, rate: float) -> Floats:
    """Let requests come at a mean rate; the first after its gap."""
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"rate: must be a number above 0, not {rate}")
    return np.cumsum(gaps) / rate


def by_schedule(gaps: Floats, schedule: Sequence[tuple[float, float]]) -> Floats:
    """Let requests come at rates that change: (from when in s, requests/s) each, the last one for ever.

    A unit gap is a unit of the rate's integral, so a Poisson process stays one.
    """
    starts = np.array([start for start, _ in schedule])
    rates = np.array([rate for _, rate in schedule])
    if len(starts) == 0 or starts[0] != 0 or (np.diff(starts) <= 0).any():
        raise ValueError("schedule: times must begin at 0 and increase")
    if not (np.isfinite(rates).all() and (rates >= 0).all() and rates[-1] > 0):
        raise ValueError("schedule: rates must be numbers from 0 on, the last one above 0")
    passed = np.concatenate(([0.0], np.cumsum(np.diff(starts) * rates[:-1])))
    amount = np.cumsum(gaps)
    part = np.searchsorted(passed, amount, side="left") - 1
    arrival_s: Floats = starts[part] + (amount - passed[part]) / rates[part]
    return arrival_s


def scaled_up(arrival_s: Floats, rate: float) -> Floats:
    """Compress a trace in time so that it comes at a mean rate, its pattern kept (LMetric §6: up-scaling)."""
    first_s, last_s = float(arrival_s[0]), float(arrival_s[-1])
    if last_s <= first_s:
        raise ValueError("arrival_s: all requests come at once: there is no rate to change")
    return (arrival_s - first_s) * ((len(arrival_s) - 1) / rate / (last_s - first_s))


def spread_out(arrival_s: Floats, grid_s: float, generator: np.random.Generator) -> Floats:
    """Spread arrivals that were recorded on a grid evenly at random over its cells, in their order."""
    return np.sort(arrival_s + generator.uniform(0.0, grid_s, len(arrival_s)))


def require_ordered(arrival_s: Floats, what: str = "arrival_s") -> None:
    """Refuse times that run backwards, by row and column."""
    (bad,) = np.nonzero(np.diff(arrival_s) < 0)
    if len(bad):
        place = int(bad[0]) + 1
        raise ValueError(
            f"row {place + 1}: {what}: {arrival_s[place]:g} s comes after {arrival_s[place - 1]:g} s: rows must be in "
            "the order of their arrival"
        )


# How long answers are thought to be.


def workload(lengths: RequestLengths, arrival_s: Floats) -> Workload:
    """Put lengths and times together; true lengths are known."""
    require_ordered(arrival_s)
    unknown = np.full(len(arrival_s), np.nan)
    return Workload(lengths=lengths, arrival_s=arrival_s, tag_median=unknown, tag_spread=np.zeros(len(arrival_s)))


TagModel = Callable[[Counts, np.random.Generator], tuple[Floats, Floats]]


def exact(output_tokens: Counts, _: np.random.Generator) -> tuple[Floats, Floats]:
    """Know true lengths."""
    return np.full(len(output_tokens), np.nan), np.zeros(len(output_tokens))


def noisy(sigma: float, spread: float | None = None) -> TagModel:
    """Be off by a log-normal factor; tags say that they are uncertain by `sigma`, or by `spread` where it is given."""
    for name, value in (("sigma", sigma), ("spread", spread)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}: must be a number from 0 on, not {value}")

    def tags(output_tokens: Counts, generator: np.random.Generator) -> tuple[Floats, Floats]:
        off = np.exp(sigma * generator.standard_normal(len(output_tokens)))
        return np.maximum(1.0, output_tokens * off), np.full(len(off), sigma if spread is None else spread)

    return tags


def constant(tokens: float, spread: float = 0.0) -> TagModel:
    """Think the same of every answer: its lengths are not known."""
    if not (math.isfinite(tokens) and tokens > 0):
        raise ValueError(f"tokens: must be a number above 0, not {tokens}")
    return lambda output_tokens, _: (np.full(len(output_tokens), tokens), np.full(len(output_tokens), spread))


def typical(output_tokens: Counts, _: np.random.Generator) -> tuple[Floats, Floats]:
    """Know the lengths' distribution only: the log-normal that fits all of them, the same tag for each."""
    logarithms = np.log(output_tokens)
    return (
        np.full(len(output_tokens), float(np.exp(np.median(logarithms)))),
        np.full(len(output_tokens), float(logarithms.std())),
    )


def fitted(true_tokens: Floats, tag_medians: Floats, tag_spreads: Floats) -> TagModel:
    """Be off as a tagger was: draw its error from those it made on answers of about the same length."""
    if len(true_tokens) < 10:
        raise ValueError(f"errors: {len(true_tokens)} are too few to draw from")
    order = np.argsort(true_tokens, kind="stable")
    known = true_tokens[order]
    errors = np.log(tag_medians[order]) - np.log(known)
    spreads = tag_spreads[order]
    window = max(5, len(known) // 50)

    def tags(output_tokens: Counts, generator: np.random.Generator) -> tuple[Floats, Floats]:
        near = np.searchsorted(known, output_tokens) + generator.integers(-window, window + 1, len(output_tokens))
        near = np.clip(near, 0, len(known) - 1)
        return np.maximum(1.0, output_tokens * np.exp(errors[near])), spreads[near]

    return tags


def ranked(true_tokens: Floats, tag_medians: Floats, tag_spreads: Floats) -> TagModel:
    """Be as good as a tagger was, on other lengths: whatever share of its answers was shorter, that share of these is.

    An answer stands for one of those that the tagger was tried on with about the same rank. The tag says here what the
    tagger's said there: a length that as large a share of all answers stays below, and a spread as wide for these.
    """
    if len(true_tokens) < 10:
        raise ValueError(f"errors: {len(true_tokens)} are too few to draw from")
    order = np.argsort(true_tokens, kind="stable")
    known, spreads = true_tokens[order], tag_spreads[order]
    below = np.interp(np.log(tag_medians[order]), np.log(known), np.linspace(0.0, 1.0, len(known)))
    width = max(1e-9, float(np.log(known).std()))
    window = max(5, len(known) // 50)

    def tags(output_tokens: Counts, generator: np.random.Generator) -> tuple[Floats, Floats]:
        logs = np.log(output_tokens)
        ranks = np.argsort(np.lexsort((generator.random(len(logs)), logs))) / max(1, len(logs) - 1)
        near = np.rint(ranks * (len(known) - 1)).astype(np.int64)
        near = np.clip(near + generator.integers(-window, window + 1, len(near)), 0, len(known) - 1)
        medians = np.exp(np.quantile(logs, below[near]))
        return np.maximum(1.0, medians), spreads[near] * (float(logs.std()) / width)

    return tags


def tagged(work: Workload, model: TagModel, generator: np.random.Generator) -> Workload:
    """Give every request a tag."""
    median, spread = model(work.lengths.output_tokens, generator)
    return replace(work, tag_median=median, tag_spread=spread)


TAGS: Mapping[str, str] = {
    "exact": "true lengths are known",
    "noisy": "off by a log-normal factor of sigma",
    "constant": "the same number for each",
    "typical": "the distribution of all lengths for each",
    "fitted": "off as a tagger was",
    "ranked": "as good as a tagger was, on other lengths",
}
