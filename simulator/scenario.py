"""A cluster and its traffic, as a file describes them: values that travel to other processes and are built there."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from predictor.batching import settled
from predictor.config import FIELD_NAMES, EngineConfig, require_count
from predictor.profile import Profile, load_profile, profile_from_json
from predictor.suggestions import did_you_mean
from simulator import workload as work
from simulator.conditions import CONDITION_NAMES, Conditions, Outage
from simulator.fleet import Unit
from simulator.load_plan import lengths_of as distribution
from simulator.load_plan import whole
from simulator.metrics import SloTarget
from simulator.pooled_bound import pooled_config, pooled_step_time
from simulator.reference_data import data_folder
from simulator.traces import Trace, trace_from
from simulator.workload import RequestLengths, TagModel, Workload

T = TypeVar("T")

TRACE, POISSON, GAMMA, UNIFORM = "trace", "poisson", "gamma", "uniform"
ARRIVALS = (TRACE, POISSON, GAMMA, UNIFORM)
LONGEST_ROW = 1 << 20
EXPERIMENTS = Path(__file__).parent / "experiments"
SUGGESTED = ("num_gpu_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instances:
    """So many equal instances; `foreseen` is the profile that their predictors have, where it is another.

    With `pooled` each is one engine as large and as fast as so many: nothing that could be had is lost by placing.
    """

    profile: str = "llama-3.1-8b-h100"
    count: int = 1
    engine: tuple[tuple[str, Any], ...] = ()
    pace: float = 1.0
    foreseen: str = ""
    foreseen_pace: float = 1.0
    pooled: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        require_count("instances.count", self.count)
        require_count("instances.pooled", self.pooled)
        for name in ("pace", "foreseen_pace"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"instances.{name}: must be a number above 0, not {getattr(self, name)}")
        for name, _ in self.engine:
            _known(name, FIELD_NAMES, "instances.engine")

    def unit(self) -> Unit:
        """Make one of them."""
        profile = _profile(self.profile)
        suggested = {name: value for name in SUGGESTED if (value := getattr(profile.engine, name)) is not None}
        config = settled(EngineConfig(**{**suggested, **dict(self.engine)}))
        foreseen = pooled_step_time(_profile(self.foreseen).step_time, self.pooled) if self.foreseen else None
        return Unit(
            config=pooled_config(config, self.pooled),
            step_time=pooled_step_time(profile.step_time, self.pooled),
            foreseen=foreseen,
            pace=self.pace,
            foreseen_pace=self.foreseen_pace,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What comes. A `trace` is a file, beside the data (BLOCK_DATA) or anywhere; else lengths are drawn.

    Requests of a trace are drawn at random, or taken in their order where arrivals are the trace's, or `in_order`.
    `grid_s` spreads recorded times over the cells of the grid that they lie on. From `hot_from_s` to `hot_until_s` a
    share of the requests begin with the same `hot_tokens`: a hotspot of the prefix cache.
    """

    trace: str = ""
    prompt_tokens: str = "lognormal:36:1.5"
    output_tokens: str = "lognormal:280:0.8"
    most_tokens: int = 0  # of a prompt and its answer together; longer requests are left out
    arrivals: str = POISSON
    cv: float = 2.0
    schedule: tuple[tuple[float, float], ...] = ()
    grid_s: float = 0.0
    in_order: bool = False
    from_s: float = 0.0
    hot_share: float = 0.0
    hot_tokens: int = 8192
    hot_from_s: float = 0.0
    hot_until_s: float = math.inf
    num_requests: int = 0  # 0 for all there are, or 10,000 that are drawn

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if self.arrivals not in ARRIVALS:
            raise ValueError(f"traffic.arrivals: {self.arrivals!r} is none of {', '.join(ARRIVALS)}")
        if self.arrivals == TRACE and not self.trace:
            raise ValueError("traffic.trace: is missing, and arrivals are to be its")
        if not 0 < self.cv < math.inf:
            raise ValueError(f"traffic.cv: must be a number above 0, not {self.cv}")
        if not 0 <= self.hot_share <= 1:
            raise ValueError(f"traffic.hot_share: must lie between 0 and 1, not {self.hot_share}")
        for name in ("num_requests", "most_tokens", "hot_tokens"):
            require_count(f"traffic.{name}", getattr(self, name), at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """How long answers are thought to be."""

    kind: str = "exact"
    sigma: float = 0.4
    spread: float | None = None
    tokens: float = 300.0
    file: str = ""  # of a tagger's errors: columns output_tokens, median_tokens, spread

    def __post_init__(self) -> None:
        """Refuse unknown kinds."""
        _known(self.kind, tuple(work.TAGS), "tags.kind")

    def model(self) -> TagModel:
        """Make what gives tags."""
        if self.kind == "exact":
            return work.exact
        if self.kind == "noisy":
            return work.noisy(self.sigma, self.spread)
        if self.kind == "constant":
            return work.constant(self.tokens, self.spread or 0.0)
        if self.kind == "typical":
            return work.typical
        return (work.ranked if self.kind == "ranked" else work.fitted)(*_errors(self.file))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A cluster, its traffic, what is known of it, and when it is good enough."""

    instances: tuple[Instances, ...] = (Instances(),)
    traffic: Traffic = field(default_factory=Traffic)
    tags: Tags = field(default_factory=Tags)
    conditions: Conditions = field(default_factory=Conditions)
    slo: SloTarget = field(default_factory=SloTarget)

    def units(self) -> list[Unit]:
        """Make all instances."""
        return [unit for kind in self.instances for unit in [kind.unit()] * kind.count]

    def workload(self, rate: float | None, seed: int) -> Workload:
        """Draw the traffic: the same seed gives the same requests in the same pattern at any rate.

        Without a rate, a trace comes as it was recorded.
        """
        return _workload(self.traffic, self.tags, self.longest(), rate, seed)

    def longest(self) -> int:
        """The most tokens that a request may have to be served anywhere."""
        return max(kind.unit().config.max_model_len for kind in self.instances)

    def changed(self, **changes: Any) -> Scenario:
        """Be another one in some respects, as a nested table says."""
        return scenario_from(_merged(as_table(self), changes))


@functools.lru_cache(maxsize=32)
def _profile(name: str) -> Profile:
    """Load a shipped profile, or one from a JSON file."""
    if not name.endswith(".json"):
        return load_profile(name)
    try:
        return profile_from_json(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{name}: cannot be read: {error.strerror}") from None


@functools.lru_cache(maxsize=8)
def _lengths(path: str, most_tokens: int) -> tuple[RequestLengths, np.ndarray, Trace]:
    require_text(found(path))
    trace = trace_from(str(found(path)))
    if not trace.requests:
        raise ValueError(f"{path}: is empty: there is no request in it")
    lengths = work.lengths_of(trace.requests, trace.block_tokens)
    arrival_s = np.array([request.arrival_s for request in trace.requests])
    if trace.has_arrivals:
        require_order(path, trace, arrival_s)
    fit = lengths.prompt_tokens + lengths.output_tokens <= most_tokens
    if not fit.any():
        raise ValueError(f"{path}: not one request fits {most_tokens} tokens")
    if not fit.all():
        lengths = picked(lengths, np.flatnonzero(fit))
    return lengths, arrival_s[fit], replace(trace, requests=[])


def _workload(traffic: Traffic, tags: Tags, longest: int, rate: float | None, seed: int) -> Workload:
    times, sizes, errors = (np.random.default_rng([seed, part]) for part in (11, 12, 13))
    most = min(traffic.most_tokens or longest, longest)
    if not traffic.trace:
        num = traffic.num_requests or 10_000
        prompts = whole(distribution(traffic.prompt_tokens, "traffic.prompt_tokens")(sizes, num))
        answers = whole(distribution(traffic.output_tokens, "traffic.output_tokens")(sizes, num))
        lengths = RequestLengths(prompt_tokens=np.array(prompts), output_tokens=np.array(answers))
        lengths = work.clipped(lengths, most)
        arrival_s = _drawn_times(traffic, num, rate, times)
    else:
        known, recorded_s, trace = _lengths(traffic.trace, most)
        if traffic.arrivals == TRACE:
            if not trace.has_arrivals:
                raise ValueError(f"{traffic.trace}: has no times at which requests came")
            lengths, arrival_s = _as_recorded(traffic, known, recorded_s, rate, times)
        else:
            num = traffic.num_requests or (len(known) if traffic.in_order else 10_000)
            in_turn = np.arange(num) % len(known)
            lengths = picked(known, in_turn) if traffic.in_order else work.drawn(known, num, sizes)
            arrival_s = _drawn_times(traffic, num, rate, times)
    if traffic.hot_share > 0:
        within = (arrival_s >= traffic.hot_from_s) & (arrival_s < traffic.hot_until_s)
        hot = within & (np.random.default_rng([seed, 14]).random(len(arrival_s)) < traffic.hot_share)
        lengths = work.with_hotspot(lengths, hot, traffic.hot_tokens)
    return work.tagged(work.workload(lengths, arrival_s), tags.model(), errors)


def _as_recorded(
    traffic: Traffic, known: RequestLengths, recorded_s: np.ndarray, rate: float | None, times: np.random.Generator
) -> tuple[RequestLengths, np.ndarray]:
    rows = np.flatnonzero(recorded_s - recorded_s[0] >= traffic.from_s)[: traffic.num_requests or None]
    if len(rows) == 0:
        raise ValueError(f"traffic.from_s: the trace ends before {traffic.from_s:g} s")
    arrival_s = recorded_s[rows] - recorded_s[rows[0]]
    if traffic.grid_s > 0:
        arrival_s = work.spread_out(arrival_s, traffic.grid_s, times)
    if rate is not None:
        arrival_s = work.scaled_up(arrival_s, rate)
    return picked(known, rows), arrival_s


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
        raise ValueError("rate: is missing, and there is neither a schedule nor a trace to tell it")
    return work.at_rate(gaps, rate)


def picked(lengths: RequestLengths, rows: np.ndarray) -> RequestLengths:
    """Take some requests, in this order, with what their prompts hold."""
    if lengths.num_contents == 0:
        return RequestLengths(prompt_tokens=lengths.prompt_tokens[rows], output_tokens=lengths.output_tokens[rows])
    counts = np.diff(lengths.first_content)[rows]
    first = np.concatenate(([0], np.cumsum(counts)))
    places = np.repeat(lengths.first_content[:-1][rows] - first[:-1], counts) + np.arange(first[-1])
    return replace(
        lengths,
        prompt_tokens=lengths.prompt_tokens[rows],
        output_tokens=lengths.output_tokens[rows],
        first_content=first,
        contents=lengths.contents[places],
    )


def require_order(path: str, trace: Trace, arrival_s: np.ndarray) -> None:
    """Refuse a trace whose times run backwards, by row and column."""
    (bad,) = np.nonzero(np.diff(arrival_s) < 0)
    if len(bad):
        place = int(bad[0])
        row = trace.rows[place + 1] if trace.rows else place + 2
        raise ValueError(
            f"{path}: row {row}: {trace.arrival_column or 'arrival_s'}: {arrival_s[place + 1]:.3f} s is before "
            f"{arrival_s[place]:.3f} s of the row before: rows must be in the order of arrival"
        )


def require_text(path: Path) -> None:
    """Refuse what cannot be a trace by its beginning, however much of it there is."""
    try:
        with path.open("rb") as file:
            start = file.read(LONGEST_ROW)
            more = bool(file.read(1))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    line = start.partition(b"\n")[0]
    if b"\0" in line:
        raise ValueError(f"{path}: row 1: is not text")
    if more and b"\n" not in start and not start.lstrip().startswith(b"["):
        raise ValueError(f"{path}: row 1: is longer than {LONGEST_ROW >> 20} MiB")


def found(path: str) -> Path:
    """Find a file where it is named, or else beside the experiments that come with the product, or the data."""
    for near in (Path(path), EXPERIMENTS / path):
        if near.is_file():
            return near
    try:
        return data_folder() / path
    except ValueError as error:
        raise ValueError(f"{path}: is not there; {error}") from None


def _errors(path: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if not path:
        raise ValueError("tags.file: is missing: a tagger's errors, with columns output_tokens, median_tokens, spread")
    try:
        rows = np.genfromtxt(found(path), delimiter=",", names=True)
        columns = tuple(np.atleast_1d(rows[name]) for name in ("output_tokens", "median_tokens", "spread"))
    except (OSError, ValueError) as error:
        raise ValueError(f"tags.file: {path}: {error}") from None
    return columns[0], columns[1], columns[2]


# From tables, strictly.


def scenario_from(table: Mapping[str, Any]) -> Scenario:
    """Read a scenario; what is unknown is refused by its name."""
    _known_all(table, ("instances", "traffic", "tags", "conditions", "slo"), "scenario")
    kinds = table.get("instances", [{}])
    kinds = [kinds] if isinstance(kinds, Mapping) else kinds
    conditions = dict(table.get("conditions", {}))
    _known_all(conditions, CONDITION_NAMES, "conditions")
    if "outages" in conditions:
        conditions["outages"] = tuple(_made(Outage, outage, "conditions.outages") for outage in conditions["outages"])
    traffic = dict(table.get("traffic", {}))
    if "schedule" in traffic:
        traffic["schedule"] = tuple((float(start_s), float(rate)) for start_s, rate in traffic["schedule"])
    return Scenario(
        instances=tuple(_instances(kind) for kind in kinds),
        traffic=_made(Traffic, traffic, "traffic"),
        tags=_made(Tags, table.get("tags", {}), "tags"),
        conditions=_made(Conditions, conditions, "conditions"),
        slo=_made(SloTarget, table.get("slo", {}), "slo"),
    )


def _instances(table: Mapping[str, Any]) -> Instances:
    engine = table.get("engine", {})
    pairs = engine.items() if isinstance(engine, Mapping) else engine
    return _made(Instances, {**table, "engine": tuple(sorted(pairs))}, "instances")


def as_table(scenario: Scenario) -> dict[str, Any]:
    """Write a scenario as the table that it could be read from."""
    plain: dict[str, Any] = {}
    for part in fields(scenario):
        value = getattr(scenario, part.name)
        plain[part.name] = [_plain(kind) for kind in value] if part.name == "instances" else _plain(value)
    return plain


def _plain(value: Any) -> dict[str, Any]:
    plain = {spec.name: getattr(value, spec.name) for spec in fields(value)}
    if "engine" in plain:
        plain["engine"] = dict(plain["engine"])
    if "outages" in plain:
        plain["outages"] = [_plain(outage) for outage in plain["outages"]]
    return {name: kept for name, kept in plain.items() if kept is not None}


def _merged(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Lay changes over a table; those of `instances` go for every kind of them."""
    merged = dict(table)
    for name, change in changes.items():
        old = merged.get(name)
        if isinstance(change, Mapping) and isinstance(old, Mapping):
            merged[name] = _merged(old, change)
        elif isinstance(change, Mapping) and isinstance(old, Sequence) and name == "instances":
            merged[name] = [_merged(kind, change) for kind in old]
        else:
            merged[name] = change
    return merged


def _made(kind: type[T], table: Mapping[str, Any], where: str) -> T:
    if not isinstance(table, Mapping):
        raise ValueError(f"{where}: must be a table, not {table!r:.40}")
    _known_all(table, tuple(spec.name for spec in fields(kind)), where)  # type: ignore[arg-type]
    try:
        return kind(**table)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None


def _known_all(table: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    for name in table:
        _known(name, names, where)


def _known(name: str, names: Sequence[str], where: str) -> None:
    if name not in names:
        hint = did_you_mean(name, names, otherwise=f"; there are {', '.join(names)}")
        raise ValueError(f"{where}: {name!r} is unknown{hint}")
