"""The traffic of a scenario: requests that are drawn or read from a trace, their arrival times and their tags."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from predictor.config import require_count
from predictor.gain import ServiceLevels, service_levels_of
from predictor.suggestions import did_you_mean, require_choice
from simulator import workload as work
from simulator.conversations import Turns, conversations
from simulator.field_checks import require_flag, require_number, require_share, require_string
from simulator.load_plan import lengths_of as distribution
from simulator.load_plan import whole
from simulator.reference_data import data_folder
from simulator.traces import Trace, trace_from
from simulator.workload import RequestLengths, TagModel, Workload

TRACE, POISSON, GAMMA, UNIFORM = "trace", "poisson", "gamma", "uniform"
ARRIVALS = (TRACE, POISSON, GAMMA, UNIFORM)
MAX_ROW_BYTES = 1 << 20
NUM_DRAWN = 10_000  # requests, if nothing else is given
EXPERIMENTS = Path(__file__).parent / "experiments"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Which requests arrive and when. Without a `trace` (a path, or a file in BLOCK_DATA), lengths are drawn.

    Requests of a trace are drawn at random, or taken in order if `in_order` or if the arrival times are the trace's.
    `grid_s` spreads arrival times that were recorded on a grid over its cells. From `hot_from_s` to `hot_until_s`, a
    share of the requests have a prompt that begins with the same `hot_tokens`: a hotspot of the prefix cache.

    With `turns`, a number or a distribution, drawn requests form conversations of so many, `pause_s` from one to the
    next, and `prompt_tokens` are what each adds to the text so far; `arrivals` are those of the first requests. Equal
    blocks of `block_tokens` are known.
    """

    trace: str = ""
    prompt_tokens: str = "lognormal:36:1.5"
    output_tokens: str = "lognormal:280:0.8"
    most_tokens: int = 0  # of prompt and response together; longer requests are left out; 0 for no limit
    arrivals: str = POISSON
    cv: float = 2.0
    schedule: tuple[tuple[float, float], ...] = ()
    grid_s: float = 0.0
    in_order: bool = False
    from_s: float = 0.0
    turns: str = ""
    pause_s: str = "lognormal:20:0.5"
    block_tokens: int = 16
    hot_share: float = 0.0
    hot_tokens: int = 8192
    hot_from_s: float = 0.0
    hot_until_s: float = math.inf
    num_requests: int = 0  # 0 for the whole trace, or 10,000 drawn requests

    def __post_init__(self) -> None:
        """Reject values out of range, naming the field."""
        require_string("traffic.trace", self.trace)
        require_choice("traffic.arrivals", self.arrivals, ARRIVALS)
        require_flag("traffic.in_order", self.in_order)
        if self.arrivals == TRACE and not self.trace:
            raise ValueError("traffic.trace: is missing, but arrivals are to be the trace's")
        require_number("traffic.cv", self.cv, above=0)
        require_share("traffic.hot_share", self.hot_share)
        for name in ("grid_s", "from_s", "hot_from_s", "hot_until_s"):
            require_number(f"traffic.{name}", getattr(self, name), infinite=name == "hot_until_s")
        for name in ("prompt_tokens", "output_tokens", "turns", "pause_s"):
            if not isinstance(value := getattr(self, name), str):
                raise ValueError(f'traffic.{name}: must be text, such as "4" or "uniform:1:6", not {value!r}')
            if value or name != "turns":
                distribution(value, f"traffic.{name}", continuous=name == "pause_s")
        if self.turns and self.trace:
            raise ValueError("traffic.turns: is for drawn requests; those of a trace name their sessions themselves")
        _require_schedule(self.schedule)
        require_count("traffic.block_tokens", self.block_tokens)
        for name in ("num_requests", "most_tokens", "hot_tokens"):
            require_count(f"traffic.{name}", getattr(self, name), at_least=0)


def _require_schedule(schedule: object) -> None:
    """Reject what is no list of pairs of a time and a rate."""
    if not isinstance(schedule, tuple):
        raise ValueError(f"traffic.schedule: must be a list of pairs of a time and a rate, not {schedule!r:.40}")
    for place, pair in enumerate(schedule):
        where = f"traffic.schedule[{place}]"
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(f"{where}: must be a pair of a time and a rate, not {pair!r:.40}")
        for number in pair:
            require_number(where, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """How response lengths are predicted."""

    kind: str = "exact"
    sigma: float = 0.4
    spread: float | None = None
    tokens: float = 300.0
    file: str = ""  # a tagger's errors: columns output_tokens, median_tokens, spread

    def __post_init__(self) -> None:
        """Reject values out of range, naming the field."""
        for name in ("kind", "file"):
            require_string(f"tags.{name}", getattr(self, name))
        require_name(self.kind, tuple(work.TAGS), "tags.kind")
        require_number("tags.sigma", self.sigma)
        require_number("tags.tokens", self.tokens, above=0)
        if self.spread is not None:
            require_number("tags.spread", self.spread)

    def model(self) -> TagModel:
        """Return the function that gives tags."""
        if self.kind == "exact":
            return work.exact
        if self.kind == "noisy":
            return work.noisy(self.sigma, self.spread)
        if self.kind == "constant":
            return work.constant(self.tokens, self.spread or 0.0)
        if self.kind == "typical":
            return work.typical
        return (work.ranked if self.kind == "ranked" else work.fitted)(*_tagger_errors(self.file))


@functools.lru_cache(maxsize=8)
def _read_trace(
    path: str, max_tokens: int
) -> tuple[RequestLengths, ServiceLevels | None, np.ndarray, np.ndarray | None, Trace]:
    require_text(found(path))
    trace = trace_from(str(found(path)))
    if not trace.requests:
        raise ValueError(f"{path}: is empty: it has no requests")
    lengths = work.lengths_of(trace.requests, trace.block_tokens)
    arrival_s = np.array([request.arrival_s for request in trace.requests])
    if trace.has_arrivals:
        require_order(path, trace, arrival_s)
    fit = lengths.prompt_tokens + lengths.output_tokens <= max_tokens
    if not fit.any():
        raise ValueError(f"{path}: no request fits into {max_tokens} tokens")
    if not fit.all():
        lengths = picked(lengths, np.flatnonzero(fit))
    levels = service_levels_of(trace.requests)
    sessions = work.sessions_of(trace.requests)
    return (
        lengths,
        None if levels is None else levels.chosen(fit),
        arrival_s[fit],
        None if sessions is None else sessions[fit],
        replace(trace, requests=[]),
    )


def draw_workload(traffic: Traffic, tags: Tags, max_tokens: int, rate: float | None, seed: int) -> Workload:
    """Draw lengths, arrival times and tags; requests longer than `max_tokens` are cut, or left out of a trace."""
    service = session = None
    times, sizes, errors = (np.random.default_rng([seed, part]) for part in (11, 12, 13))
    max_tokens = min(traffic.most_tokens or max_tokens, max_tokens)
    if traffic.turns:
        lengths, session, arrival_s = _drawn_conversations(traffic, max_tokens, rate, sizes, times)
    elif not traffic.trace:
        num = traffic.num_requests or NUM_DRAWN
        prompts = whole(distribution(traffic.prompt_tokens, "traffic.prompt_tokens")(sizes, num))
        answers = whole(distribution(traffic.output_tokens, "traffic.output_tokens")(sizes, num))
        lengths = RequestLengths(prompt_tokens=np.array(prompts), output_tokens=np.array(answers))
        lengths = work.cut_to_context(lengths, max_tokens)
        arrival_s = _drawn_times(traffic, num, rate, times)
    else:
        known, levels, recorded_s, sessions, trace = _read_trace(traffic.trace, max_tokens)
        if traffic.arrivals == TRACE:
            if not trace.has_arrivals:
                raise ValueError(f"{traffic.trace}: has no arrival times")
            rows, arrival_s = _as_recorded(traffic, recorded_s, rate, times)
            lengths = picked(known, rows)
        else:
            num = traffic.num_requests or (len(known) if traffic.in_order else NUM_DRAWN)
            rows = np.arange(num) % len(known) if traffic.in_order else sizes.integers(0, len(known), num)
            lengths = picked(known, rows) if traffic.in_order else work.without_prefixes(known, rows)
            arrival_s = _drawn_times(traffic, num, rate, times)
        service = None if levels is None else levels.chosen(rows)
        session = None if sessions is None else sessions[rows]
    if traffic.hot_share > 0:
        within = (arrival_s >= traffic.hot_from_s) & (arrival_s < traffic.hot_until_s)
        hot = within & (np.random.default_rng([seed, 14]).random(len(arrival_s)) < traffic.hot_share)
        lengths = work.with_hotspot(lengths, hot, traffic.hot_tokens)
    drawn = replace(work.workload(lengths, arrival_s), service=service, session=session)
    return work.tagged(drawn, tags.model(), errors)


def _drawn_conversations(
    traffic: Traffic, max_tokens: int, rate: float | None, sizes: np.random.Generator, times: np.random.Generator
) -> tuple[RequestLengths, np.ndarray, np.ndarray]:
    """Draw conversations whose first requests arrive as drawn requests do, at `rate` requests/s in all."""
    num = traffic.num_requests or NUM_DRAWN
    turns = Turns(
        count=traffic.turns,
        pause_s=traffic.pause_s,
        prompt_tokens=traffic.prompt_tokens,
        output_tokens=traffic.output_tokens,
        block_tokens=traffic.block_tokens,
    )
    lengths, session, after_s = conversations(turns, num, max_tokens, sizes)
    num_sessions = int(session[-1]) + 1
    start_s = _drawn_times(traffic, num_sessions, None if rate is None else rate * num_sessions / num, times)
    arrival_s = start_s[session] + after_s
    order = work.arrival_order(arrival_s)
    return picked(lengths, order), session[order], arrival_s[order]


def _as_recorded(
    traffic: Traffic, recorded_s: np.ndarray, rate: float | None, times: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    rows = np.flatnonzero(recorded_s - recorded_s[0] >= traffic.from_s)[: traffic.num_requests or None]
    if len(rows) == 0:
        raise ValueError(f"traffic.from_s: the trace ends before {traffic.from_s:g} s")
    arrival_s = recorded_s[rows] - recorded_s[rows[0]]
    if traffic.grid_s > 0:
        arrival_s = work.spread_out(arrival_s, traffic.grid_s, times)
    if rate is not None:
        arrival_s = work.scaled_up(arrival_s, rate)
    return rows, arrival_s


def _drawn_times(traffic: Traffic, num: int, rate: float | None, times: np.random.Generator) -> np.ndarray:
    if traffic.arrivals == POISSON:
        gaps = work.poisson_gaps(num, times)
    elif traffic.arrivals == GAMMA:
        gaps = work.gamma_gaps(traffic.cv)(num, times)
    else:
        gaps = work.uniform_gaps(num, times)
    if traffic.schedule:
        scale = 1.0 if rate is None else rate
        return work.by_schedule(gaps, [(start_s, scale * value) for start_s, value in traffic.schedule])
    if rate is None:
        raise ValueError("rate: is missing; give a rate, a schedule, or a trace with arrival times")
    return work.at_rate(gaps, rate)


def require_name(name: str, names: Sequence[str], where: str) -> None:
    """Reject an unknown name, with the nearest known one."""
    if name not in names:
        hint = did_you_mean(name, names, otherwise=f"; there are {', '.join(names)}")
        raise ValueError(f"{where}: {name!r} is unknown{hint}")


def picked(lengths: RequestLengths, rows: np.ndarray) -> RequestLengths:
    """Select requests by row, in this order, with the contents of their prompts."""
    if lengths.num_contents == 0:
        return RequestLengths(prompt_tokens=lengths.prompt_tokens[rows], output_tokens=lengths.output_tokens[rows])
    counts = np.diff(lengths.first_content)[rows]
    first = np.concatenate(([0], np.cumsum(counts)))
    indices = np.repeat(lengths.first_content[:-1][rows] - first[:-1], counts) + np.arange(first[-1])
    return replace(
        lengths,
        prompt_tokens=lengths.prompt_tokens[rows],
        output_tokens=lengths.output_tokens[rows],
        first_content=first,
        contents=lengths.contents[indices],
    )


def require_order(path: str, trace: Trace, arrival_s: np.ndarray) -> None:
    """Reject a trace with decreasing times, naming the row and the column."""
    (bad,) = np.nonzero(np.diff(arrival_s) < 0)
    if len(bad):
        index = int(bad[0])
        row = trace.rows[index + 1] if trace.rows else index + 2
        raise ValueError(
            f"{path}: row {row}: {trace.arrival_column or 'arrival_s'}: {arrival_s[index + 1]:.3f} s is before "
            f"{arrival_s[index]:.3f} s in the previous row: rows must be in the order of arrival"
        )


def require_text(path: Path) -> None:
    """Reject a file that cannot be a trace by reading only its beginning."""
    try:
        with path.open("rb") as file:
            start = file.read(MAX_ROW_BYTES)
            more = bool(file.read(1))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    line = start.partition(b"\n")[0]
    if b"\0" in line:
        raise ValueError(f"{path}: row 1: is not text")
    if more and b"\n" not in start and not start.lstrip().startswith(b"["):
        raise ValueError(f"{path}: row 1: is longer than {MAX_ROW_BYTES >> 20} MiB")


def found(path: str) -> Path:
    """Find a file by its path, or in the folder of the shipped experiments, or in BLOCK_DATA."""
    for near in (Path(path), EXPERIMENTS / path):
        if near.is_file():
            return near
    try:
        return data_folder() / path
    except ValueError as error:
        raise ValueError(f"{path}: does not exist; {error}") from None


def _tagger_errors(path: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if not path:
        raise ValueError(
            "tags.file: is missing; name a file of a tagger's errors with columns output_tokens, median_tokens, spread"
        )
    try:
        rows = np.genfromtxt(found(path), delimiter=",", names=True)
        columns = tuple(np.atleast_1d(rows[name]) for name in ("output_tokens", "median_tokens", "spread"))
    except (OSError, ValueError) as error:
        raise ValueError(f"tags.file: {path}: {error}") from None
    return columns[0], columns[1], columns[2]
