"""Latency profiles: the step time of a model on a GPU, its error, its valid range, and its source."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from typing import Any, TypeVar

from predictor.config import require_count
from predictor.step_time import (
    CURVES,
    GRIDS,
    NO_GRID,
    NUMBERS,
    SHARES,
    ZERO,
    Curve,
    Grid,
    StepTime,
    require_seconds,
)
from predictor.suggestions import did_you_mean

VERSION = 2
FIRST_VERSION = 1  # without grids and shares
FITTED = "fitted"
ROOFLINE = "roofline"
CONSTANT = "constant"
KINDS = (FITTED, ROOFLINE, CONSTANT)

CONSTANT_NAME = "constant"
SUFFIX = ".json"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRange:
    """The batches that the profile's data covers; beyond them it extrapolates.

    `max_context_tokens` is the context of all sequences of a batch, `max_sequence_context` that of one, if limited.
    """

    max_tokens: int
    max_sequences: int
    max_context_tokens: int
    max_sequence_context: int | None = None

    def __post_init__(self) -> None:
        """Refuse values that are no counts."""
        for spec in fields(self):
            if getattr(self, spec.name) is not None or spec.name != "max_sequence_context":
                require_count(spec.name, getattr(self, spec.name))

    @property
    def limits(self) -> tuple[float, float, float, float]:
        """All limits in the order of the fields."""
        return self.max_tokens, self.max_sequences, self.max_context_tokens, self.max_sequence_context or math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutError:
    """Relative errors of step time on rows held out of the fit: their mean, median, 90th percentile, and number."""

    mape: float
    p50: float
    p90: float
    n: int

    def __post_init__(self) -> None:
        """Refuse values that are no relative errors."""
        for name in ("mape", "p50", "p90"):
            require_seconds(name, getattr(self, name))
        require_count("n", self.n)


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateError:
    """Relative errors of an estimate, found on published benchmarks whose GPU or model family the fit had not seen.

    `gpu` and `family` say whether the fit has seen this profile's: known or unknown. Errors are of a benchmark's mean
    TTFT, TPOT and e2e: median and 90th percentile over `n` benchmarks.
    """

    gpu: str
    family: str
    ttft_p50: float
    ttft_p90: float
    tpot_p50: float
    tpot_p90: float
    e2e_p50: float
    e2e_p90: float
    n: int

    def __post_init__(self) -> None:
        """Refuse values that are no relative errors."""
        for name in ("gpu", "family"):
            if getattr(self, name) not in ("known", "unknown"):
                raise ValueError(f"{name}: must be known or unknown, not {getattr(self, name)!r}")
        for name in ("ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90", "e2e_p50", "e2e_p90"):
            require_seconds(name, getattr(self, name))
        require_count("n", self.n)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuggestedEngine:
    """Engine settings that go with the profile, under vLLM's names; None where the profile suggests nothing."""

    num_gpu_blocks: int | None = None
    block_size: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None

    def __post_init__(self) -> None:
        """Refuse values that are no counts."""
        for spec in fields(self):
            if getattr(self, spec.name) is not None:
                require_count(spec.name, getattr(self, spec.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Transit:
    """Measured seconds from the client to the engine's loop, and from the loop back to the client."""

    inward_s: float = 0.0
    outward_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse values that are no spans of time."""
        for spec in fields(self):
            require_seconds(spec.name, getattr(self, spec.name))


NO_TRANSIT = Transit()


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransferTime:
    """How long KV blocks take from one engine to another, under the names of EngineConfig; None where not known."""

    kv_bytes_per_token: int | None = None  # of one rank, which has a link of its own
    kv_transfer_base_s: float | None = None
    kv_transfer_bytes_per_s: float | None = None
    kv_transfer_block_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse values that no transfer can have."""
        if self.kv_bytes_per_token is not None:
            require_count("kv_bytes_per_token", self.kv_bytes_per_token)
        for name in ("kv_transfer_base_s", "kv_transfer_block_s"):
            if getattr(self, name) is not None:
                require_seconds(name, getattr(self, name))
        rate = self.kv_transfer_bytes_per_s
        if rate is not None and not (type(rate) in (int, float) and math.isfinite(rate) and rate > 0):
            raise ValueError(f"kv_transfer_bytes_per_s: must be a number above 0, not {rate!r}")


UNKNOWN_TRANSFER = KvTransferTime()


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The latency profile of one model on one kind of GPU."""

    version: int = VERSION
    name: str
    model: str
    gpu: str
    tensor_parallel: int
    dtype: str
    kind: str
    step_time: StepTime
    valid: ValidRange
    error: HeldOutError | None
    source: str
    engine: SuggestedEngine = field(default_factory=SuggestedEngine)
    transit: Transit = NO_TRANSIT
    transfer: KvTransferTime = UNKNOWN_TRANSFER
    estimate: EstimateError | None = None  # of roofline profiles

    @property
    def suggested_settings(self) -> dict[str, Any]:
        """The engine's settings that go with the profile, by their names in EngineConfig."""
        return {**_known(self.engine), **self.transfer_settings}

    @property
    def transfer_settings(self) -> dict[str, Any]:
        """Those of them that are about transfers of KV blocks."""
        return _known(self.transfer)

    def __post_init__(self) -> None:
        """Refuse another format version, and empty descriptions; the step time knows the valid range."""
        if self.version != VERSION or isinstance(self.version, bool):
            raise ValueError(f"version: this release writes version {VERSION}, not {self.version!r}")
        for name in ("name", "model", "gpu", "dtype", "kind", "source"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValueError(f"{name}: must be a non-empty string, not {value!r}")
        require_count("tensor_parallel", self.tensor_parallel)
        if self.kind not in KINDS:
            raise ValueError(f"kind: must be one of {', '.join(KINDS)}, not {self.kind!r}")
        object.__setattr__(self, "step_time", replace(self.step_time, limits=self.valid.limits))


def constant_profile() -> Profile:
    """Return the profile in which every step, also an empty one, takes exactly one second."""
    return Profile(
        name=CONSTANT_NAME,
        model="any",
        gpu="any",
        tensor_parallel=1,
        dtype="any",
        kind=CONSTANT,
        step_time=StepTime(constant_s=1.0, empty_s=1.0),
        valid=ValidRange(max_tokens=2**31 - 1, max_sequences=2**31 - 1, max_context_tokens=2**31 - 1),
        error=None,
        source="by definition: every step takes one second, so that steps can be compared with another engine's",
    )


def profile_names() -> tuple[str, ...]:
    """Return the names of all profiles that can be loaded."""
    folder = resources.files(__package__) / "profiles"
    shipped = [entry.name.removesuffix(SUFFIX) for entry in folder.iterdir() if entry.name.endswith(SUFFIX)]
    return tuple(sorted([CONSTANT_NAME, *shipped]))


def load_profile(name: str) -> Profile:
    """Load a profile by name."""
    if name == CONSTANT_NAME:
        return constant_profile()
    names = profile_names()
    if name not in names:
        hint = did_you_mean(name, names, f"; there are {', '.join(names)}")
        raise ValueError(f"profile: there is none named {name!r}{hint}")
    text = (resources.files(__package__) / "profiles" / (name + SUFFIX)).read_text(encoding="utf-8")
    return profile_from_json(text)


def profile_from_json(text: str) -> Profile:
    """Read a profile from JSON; refuse incomplete and invalid ones."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"profile: not JSON: {error}") from None
    return profile_from_dict(data)


def profile_to_json(profile: Profile) -> str:
    """Write a profile as JSON: a field per line, the knots of a curve on one line."""
    text = json.dumps(profile_to_dict(profile), indent=1, ensure_ascii=False, allow_nan=False)
    return re.sub(r"\[\n[-+0-9.eE,\s]*\]", lambda found: " ".join(found[0].split()), text) + "\n"


def profile_to_dict(profile: Profile) -> dict[str, Any]:
    """Return a profile as plain dictionaries, lists, strings and numbers."""
    return {
        "version": profile.version,
        "name": profile.name,
        "model": profile.model,
        "gpu": profile.gpu,
        "tensor_parallel": profile.tensor_parallel,
        "dtype": profile.dtype,
        "kind": profile.kind,
        "source": profile.source,
        "valid": _known(profile.valid),
        "error": None if profile.error is None else _plain(profile.error),
        "engine": _plain(profile.engine),
        **({} if profile.transit == NO_TRANSIT else {"transit": _plain(profile.transit)}),
        **({} if profile.transfer == UNKNOWN_TRANSFER else {"transfer": _known(profile.transfer)}),
        **({} if profile.estimate is None else {"estimate": _plain(profile.estimate)}),
        "step_time": step_time_to_dict(profile.step_time),
    }


def profile_from_dict(data: object) -> Profile:
    """Build a profile from plain data; errors name unknown fields, missing fields and invalid values."""
    if isinstance(data, Mapping):  # a profile has these only where they were measured
        data = {"transit": _plain(NO_TRANSIT), "transfer": {}, "estimate": None, **data}
    given = _require_fields("", data, [spec.name for spec in fields(Profile)], required_first="version")
    error, estimate = given["error"], given["estimate"]
    parts = {
        "step_time": step_time_from_dict(given["step_time"]),
        "valid": _build("valid", ValidRange, _with_nulls(ValidRange, given["valid"], "max_sequence_context")),
        "error": None if error is None else _build("error", HeldOutError, error),
        "engine": _build("engine", SuggestedEngine, given["engine"]),
        "transit": _build("transit", Transit, given["transit"]),
        "transfer": _build("transfer", KvTransferTime, _with_nulls(KvTransferTime, given["transfer"])),
        "estimate": None if estimate is None else _build("estimate", EstimateError, estimate),
    }
    return Profile(**{**given, **parts, "version": VERSION})


def step_time_to_dict(step_time: StepTime) -> dict[str, Any]:
    """Return a step time as plain data; shares and grids only where it has them."""
    numbers: dict[str, Any] = {name: getattr(step_time, name) for name in NUMBERS}
    curves = {name: getattr(step_time, name) for name in (*CURVES, *SHARES)}
    plain = {name: _plain(curve) for name, curve in curves.items() if name in CURVES or curve != ZERO}
    grids = {name: getattr(step_time, name) for name in GRIDS}
    return numbers | plain | {name: _plain(grid) for name, grid in grids.items() if grid != NO_GRID}


def step_time_from_dict(data: object) -> StepTime:
    """Build a step time from plain data; errors name the field, such as `step_time.decode_slope.x`."""
    if isinstance(data, Mapping):
        data = {**{name: _plain(ZERO) for name in SHARES}, **{name: _plain(NO_GRID) for name in GRIDS}, **data}
    given = dict(_require_fields("step_time", data, [*NUMBERS, *CURVES, *SHARES, *GRIDS]))
    for name in (*CURVES, *SHARES):
        given[name] = _under(path := f"step_time.{name}", Curve, _lists(path, given[name], ["x", "y"]))
    for name in GRIDS:
        path = f"step_time.{name}"
        lists = _lists(path, given[name], ["x", "y", "z"])
        rows = {str(number): row for number, row in enumerate(lists["z"])}
        lists["z"] = tuple(_lists(f"{path}.z", rows, list(rows)).values())
        given[name] = _under(path, Grid, lists)
    return _under("step_time", StepTime, given)


def _lists(path: str, data: object, names: list[str]) -> dict[str, Any]:
    given = _require_fields(path, data, names)
    for name in names:
        if not isinstance(given[name], list | tuple):
            raise ValueError(f"{path}.{name}: must be a list of numbers, not {type(given[name]).__name__}")
    return {name: tuple(given[name]) for name in names}


def _plain(value: object) -> dict[str, Any]:
    return {spec.name: getattr(value, spec.name) for spec in fields(value)}  # type: ignore[arg-type]


def _known(value: object) -> dict[str, Any]:
    return {name: given for name, given in _plain(value).items() if given is not None}


def _with_nulls(kind: type, data: object, *names: str) -> object:
    """Add the named fields, by default all, where they are left out, as None."""
    left_out = dict.fromkeys(names or [spec.name for spec in fields(kind)])
    return {**left_out, **data} if isinstance(data, Mapping) else data


def _build(path: str, kind: Callable[..., T], data: object) -> T:
    names = [spec.name for spec in fields(kind)]  # type: ignore[arg-type]
    return _under(path, kind, _require_fields(path, data, names))


def _under(path: str, kind: Callable[..., T], given: Mapping[str, Any]) -> T:
    """Build a value; its errors name its fields with their path from the profile's root."""
    try:
        return kind(**given)
    except ValueError as error:
        raise ValueError(f"{path}.{error}") from None


def _require_fields(path: str, data: object, names: list[str], required_first: str | None = None) -> Mapping[str, Any]:
    """Refuse all but a mapping with exactly these fields; another version, which explains other errors, comes first."""
    prefix = f"{path}." if path else ""
    if not isinstance(data, Mapping):
        raise ValueError(f"{path or 'profile'}: must be an object, not {type(data).__name__}")
    if required_first is not None:
        version = data.get(required_first, VERSION)
        if isinstance(version, bool) or version not in (FIRST_VERSION, VERSION):
            raise ValueError(
                f"{required_first}: this release reads versions {FIRST_VERSION} and {VERSION}, not {version!r}"
            )
    unknown = sorted(str(name) for name in data if name not in names)
    if unknown:
        raise ValueError(f"{prefix}{unknown[0]}: unknown field")
    for name in names:
        if name not in data:
            raise ValueError(f"{prefix}{name}: missing")
    return data
