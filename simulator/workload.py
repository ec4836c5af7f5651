"""The workload of a simulated cluster as arrays: lengths, arrival times and tags."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from predictor.gain import ServiceLevels
from predictor.request import RequestFacts

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

LONGEST = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLengths:
    """The lengths of requests, and the contents of their prompts' blocks if these are known.

    The contents of request `i` are `contents[first_content[i]:first_content[i + 1]]`; each number identifies the prompt
    up to the end of one block of `block_tokens`.
    """

    prompt_tokens: Counts
    output_tokens: Counts
    first_content: Counts = field(default_factory=lambda: np.zeros(0, np.int64))
    contents: Counts = field(default_factory=lambda: np.zeros(0, np.int64))
    block_tokens: int = 16

    def __len__(self) -> int:
        """The number of requests."""
        return len(self.prompt_tokens)

    @property
    def num_contents(self) -> int:
        """The number of different contents."""
        return int(self.contents.max(initial=-1)) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests in the order of arrival; if a tag's median is NaN, the true length is known."""

    lengths: RequestLengths
    arrival_s: Floats
    tag_median: Floats
    tag_spread: Floats
    service: ServiceLevels | None = None  # None: no targets, and everything else as by default
    session: Counts | None = None  # the number of each request's session, -1 without one; None: no request has one
    adapter: Counts | None = None  # the number of each request's LoRA adapter, 0 without one; None: no request has one

    def __len__(self) -> int:
        """The number of requests."""
        return len(self.arrival_s)


def lengths_of(requests: Sequence[RequestFacts], block_tokens: int = 16) -> RequestLengths:
    """Collect the lengths and prefixes of requests."""
    if not requests:
        raise ValueError("requests: must not be empty")
    numbers: dict[int | str, int] = {}
    contents: list[int] = []
    first = [0]
    for index, request in enumerate(requests):
        if request.output_tokens is None:
            raise ValueError(f"requests[{index}].output_tokens: is missing")
        contents += [numbers.setdefault(name, len(numbers)) for name in request.prefix_hashes]
        first.append(len(contents))
    return RequestLengths(
        prompt_tokens=np.array([request.prompt_tokens for request in requests], np.int64),
        output_tokens=np.array([request.output_tokens for request in requests], np.int64),
        first_content=np.array(first, np.int64),
        contents=np.array(contents, np.int64),
        block_tokens=block_tokens,
    )


def sessions_of(requests: Sequence[RequestFacts]) -> Counts | None:
    """Number the sessions of requests from 0 on; -1 for a request without a session, None where none has one."""
    numbers: dict[str, int] = {"": -1}
    found = [numbers.setdefault(request.session_id, len(numbers) - 1) for request in requests]
    return np.array(found, np.int64) if len(numbers) > 1 else None


def drawn(lengths: RequestLengths, num: int, generator: np.random.Generator) -> RequestLengths:
    """Draw `num` requests uniformly."""
    return without_prefixes(lengths, generator.integers(0, len(lengths), num))


def without_prefixes(lengths: RequestLengths, rows: npt.NDArray[Any]) -> RequestLengths:
    """Select requests without their prefixes, as drawing a request twice would repeat its whole prompt."""
    return RequestLengths(prompt_tokens=lengths.prompt_tokens[rows], output_tokens=lengths.output_tokens[rows])


def fitting(lengths: RequestLengths, max_tokens: int) -> RequestLengths:
    """Select the requests whose prompt and response fit a context of `max_tokens`."""
    fit = lengths.prompt_tokens + lengths.output_tokens <= max_tokens
    if not fit.any():
        raise ValueError(f"lengths: not one request fits {max_tokens} tokens")
    return without_prefixes(lengths, fit)


def cut_to_context(lengths: RequestLengths, max_tokens: int) -> RequestLengths:
    """Cut prompts so that prompt and response fit a context of `max_tokens`, as Block's traces were cut."""
    output = np.minimum(lengths.output_tokens, max_tokens - 1)
    return RequestLengths(prompt_tokens=np.minimum(lengths.prompt_tokens, max_tokens - output), output_tokens=output)


def with_hotspot(lengths: RequestLengths, hot: npt.NDArray[np.bool_], hot_tokens: int) -> RequestLengths:
    """Replace the prompts of the requests in `hot` by one shared prompt of `hot_tokens`, plus a block of their own."""
    size = lengths.block_tokens
    shared = list(range(lengths.num_contents, lengths.num_contents + hot_tokens // size))
    if not shared:
        raise ValueError(f"hot_tokens: {hot_tokens} are less than one block of {size}")
    first, known = lengths.first_content, lengths.contents.tolist()
    rows: list[list[int]] = [
        shared if is_hot else known[first[index] : first[index + 1]] if len(first) else []
        for index, is_hot in enumerate(hot.tolist())
    ]
    return replace(
        lengths,
        prompt_tokens=np.where(hot, len(shared) * size + size // 2, lengths.prompt_tokens),
        first_content=np.cumsum([0, *map(len, rows)]),
        contents=np.array([name for row in rows for name in row], np.int64),
    )


# Arrival times: gaps are drawn with mean 1, so that the same seed gives the same pattern at any rate.


def poisson_gaps(num: int, generator: np.random.Generator) -> Floats:
    """Draw the gaps of a Poisson process."""
    return generator.exponential(1.0, num)


def gamma_gaps(cv: float) -> Callable[[int, np.random.Generator], Floats]:
    """Return a function that draws gaps with coefficient of variation `cv`: 1 is Poisson, more is burstier."""
    if not (math.isfinite(cv) and cv > 0):
        raise ValueError(f"cv: must be a number above 0, not {cv}")
    shape = cv**-2
    return lambda num, generator: generator.gamma(shape, 1.0 / shape, num)


def uniform_gaps(num: int, _: np.random.Generator) -> Floats:
    """Return equal gaps."""
    return np.ones(num)


def at_rate(gaps: Floats, rate: float) -> Floats:
    """Scale gaps to a mean rate; the first request arrives after its gap."""
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"rate: must be a number above 0, not {rate}")
    return np.cumsum(gaps) / rate


def by_schedule(gaps: Floats, schedule: Sequence[tuple[float, float]]) -> Floats:
    """Scale gaps to a rate that changes over time: pairs of (start in s, requests/s), the last without end.

    A gap of 1 is a spec of the rate's integral, so a Poisson process stays one.
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
    """Scale a trace in time to a mean rate, keeping its pattern (LMetric §6: up-scaling)."""
    first_s, last_s = float(arrival_s[0]), float(arrival_s[-1])
    if last_s <= first_s:
        raise ValueError("arrival_s: all requests arrive at the same time, so there is no rate to scale")
    return (arrival_s - first_s) * ((len(arrival_s) - 1) / rate / (last_s - first_s))


def spread_out(arrival_s: Floats, grid_s: float, generator: np.random.Generator) -> Floats:
    """Spread arrival times that were recorded on a grid uniformly over its cells, keeping their order."""
    return np.sort(arrival_s + generator.uniform(0.0, grid_s, len(arrival_s)))


def arrival_order(arrival_s: Floats) -> npt.NDArray[np.intp]:
    """Return the rows of requests in the order of arrival."""
    return np.argsort(arrival_s, kind="stable")


def require_ordered(arrival_s: Floats, what: str = "arrival_s") -> None:
    """Reject decreasing times, naming the row and the column."""
    (bad,) = np.nonzero(np.diff(arrival_s) < 0)
    if len(bad):
        index = int(bad[0]) + 1
        raise ValueError(
            f"row {index + 1}: {what}: {arrival_s[index]:g} s follows {arrival_s[index - 1]:g} s: rows must be in the "
            "order of arrival"
        )


# Tags.


def workload(lengths: RequestLengths, arrival_s: Floats) -> Workload:
    """Combine lengths and arrival times; true lengths are known."""
    require_ordered(arrival_s)
    unknown = np.full(len(arrival_s), np.nan)
    return Workload(lengths=lengths, arrival_s=arrival_s, tag_median=unknown, tag_spread=np.zeros(len(arrival_s)))


TagModel = Callable[[Counts, np.random.Generator], tuple[Floats, Floats]]


def exact(output_tokens: Counts, _: np.random.Generator) -> tuple[Floats, Floats]:
    """Give the true lengths."""
    return np.full(len(output_tokens), np.nan), np.zeros(len(output_tokens))


def noisy(sigma: float, spread: float | None = None) -> TagModel:
    """Give lengths with a log-normal error of `sigma`; the tags' spread is `sigma`, or `spread` if given."""
    for name, value in (("sigma", sigma), ("spread", spread)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}: must be a number from 0 on, not {value}")

    def tags(output_tokens: Counts, generator: np.random.Generator) -> tuple[Floats, Floats]:
        off = np.exp(sigma * generator.standard_normal(len(output_tokens)))
        return np.maximum(1.0, output_tokens * off), np.full(len(off), sigma if spread is None else spread)

    return tags


def constant(tokens: float, spread: float = 0.0) -> TagModel:
    """Give every response the same tag."""
    if not (math.isfinite(tokens) and tokens > 0):
        raise ValueError(f"tokens: must be a number above 0, not {tokens}")
    return lambda output_tokens, _: (np.full(len(output_tokens), tokens), np.full(len(output_tokens), spread))


def typical(output_tokens: Counts, _: np.random.Generator) -> tuple[Floats, Floats]:
    """Give every response the same tag: the log-normal distribution that fits all lengths."""
    logarithms = np.log(output_tokens)
    return (
        np.full(len(output_tokens), float(np.exp(np.median(logarithms)))),
        np.full(len(output_tokens), float(logarithms.std())),
    )


def fitted(true_tokens: Floats, tag_medians: Floats, tag_spreads: Floats) -> TagModel:
    """Give lengths with a tagger's errors, drawn from those it made on responses of about the same length."""
    if len(true_tokens) < 10:
        raise ValueError(f"errors: {len(true_tokens)} are too few to draw from; at least 10 are needed")
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
    """Give tags as accurate, by rank, as a tagger's were on responses with another distribution of lengths.

    Each response is matched with one of about the same rank among those that the tagger was evaluated on. Its tag's
    median has the same rank as the tagger's median had there; its spread is scaled to the spread of these lengths.
    """
    if len(true_tokens) < 10:
        raise ValueError(f"errors: {len(true_tokens)} are too few to draw from; at least 10 are needed")
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
    """Add a tag to every request."""
    median, spread = model(work.lengths.output_tokens, generator)
    return replace(work, tag_median=median, tag_spread=spread)


TAGS: Mapping[str, str] = {
    "exact": "the true length",
    "noisy": "the true length with a log-normal error of sigma",
    "constant": "the same length for all",
    "typical": "the distribution of all lengths for all",
    "fitted": "the true length with a tagger's errors",
    "ranked": "as accurate by rank as a tagger was on other lengths",
}
