"""Windows as JSON lines.

The first line is the header; then follow, in any order, the engine's state when the window began (at most one), and
requests and steps. Each line is an object whose `kind` says what it is:

    {"kind": "window", "version": 1, "engine": {...}, "begin_s": 12.5, "end_s": 72.5, "profile": "NAME", ...}
    {"kind": "state", "snapshot": {...}}
    {"kind": "request", "request_id": "a", "arrival_s": 13.1, "prompt_tokens": 100, "output_tokens": 20, ...}
    {"kind": "step", "number": 7, "start_s": 13.2, "seconds": 0.021, "num_tokens": 17, ...}

Errors name the line and the field.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

import numpy as np

from predictor.profile import Profile, profile_from_dict, profile_to_dict
from predictor.request import RequestFacts
from predictor.suggestions import require_known
from simulator.accuracy.window import (
    STEP_COLUMNS,
    TIMES,
    ObservedRequest,
    ObservedWindow,
    WindowHeader,
    steps_from,
)
from simulator.codec import checked, plain, read_text, request_from, snapshot_from
from simulator.progress import followed

WINDOW, STATE, REQUEST, STEP = "window", "state", "request", "step"
KINDS = (WINDOW, STATE, REQUEST, STEP)
OWN_FIELDS = ("ended", "cached_tokens", *TIMES)
LARGEST = 1e15  # of a number in a step: whole numbers up to it are exact
COUNTS = ("number", "num_tokens", "num_sampled", "num_decodes", "num_prefills")
DEFAULTS = {spec.name: spec.default for spec in fields(RequestFacts) if spec.default is not MISSING}


def is_window(path: str) -> bool:
    """Tell whether a file is a window, by its first line."""
    try:
        first = json.loads(next(iter(read_text(path).splitlines()), ""))
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and first.get("kind") == WINDOW


def window_lines(window: ObservedWindow) -> Iterator[str]:
    """Write a window, line by line."""
    header = asdict(window.header)
    if window.profile is not None:
        header["profile"] = profile_to_dict(window.profile)
    yield _line(WINDOW, header)
    if window.state is not None:
        yield _line(STATE, {"snapshot": plain(window.state)})
    for request in followed(window.requests, "writing requests", len(window.requests)):
        yield _line(REQUEST, _request_fields(request))
    steps = window.steps
    columns = [steps.number, steps.start_s, *(getattr(steps.columns, name) for name in STEP_COLUMNS[2:])]
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for row in followed(rows, "writing steps", len(steps)):
        numbers = {name: int(value) if name in COUNTS else value for name, value in zip(STEP_COLUMNS, row, strict=True)}
        yield _line(STEP, numbers)


def _line(kind: str, values: Mapping[str, Any]) -> str:
    return json.dumps({"kind": kind, **values}, separators=(",", ":"), allow_nan=False)


def _request_fields(request: ObservedRequest) -> dict[str, Any]:
    facts = {
        name: value
        for name, value in ((spec.name, getattr(request.facts, spec.name)) for spec in fields(RequestFacts))
        if name not in DEFAULTS or value != DEFAULTS[name] or name in ("arrival_s", "output_tokens")
    }
    return plain({**facts, **{name: getattr(request, name) for name in OWN_FIELDS}})  # type: ignore[no-any-return]


def read_window(path: str) -> ObservedWindow:
    """Read a window from a file; `-` is standard input."""
    lines = read_text(path).splitlines()
    return window_from_lines(path, followed(lines, "reading the window", len(lines)))


def window_from_lines(path: str, lines: Iterable[str]) -> ObservedWindow:
    """Read a window; errors begin with the path and the number of the line."""
    reader = _WindowReader()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            reader.take(_object(line))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    try:
        return reader.window()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _object(line: str) -> dict[str, Any]:
    try:
        data = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError("must be an object with a kind")
    return data


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


class _WindowReader:
    """Takes the lines of a window one by one."""

    def __init__(self) -> None:
        self._header: WindowHeader | None = None
        self._profile: Profile | None = None
        self._state: Any = None
        self._requests: dict[str, ObservedRequest] = {}
        self._steps: dict[str, list[float]] = {name: [] for name in STEP_COLUMNS}

    def take(self, line: dict[str, Any]) -> None:
        kind = line.pop("kind", None)
        if kind not in KINDS:
            raise ValueError(f"kind: must be one of {', '.join(KINDS)}, not {kind!r}")
        if (self._header is None) != (kind == WINDOW):
            wrong = "must be the first line, and only that" if kind == WINDOW else "comes before the header"
            raise ValueError(f"kind: a {kind!r} {wrong}")
        if self._header is None:
            self._take_header(line)
        elif kind == STATE:
            self._take_state(line)
        elif kind == REQUEST:
            self._take_request(line, self._header)
        else:
            self._take_step(line)

    def window(self) -> ObservedWindow:
        if self._header is None:
            raise ValueError("is empty; the first line of a window is its header")
        numbers = self._steps["number"]
        if len(set(numbers)) < len(numbers):
            repeated = Counter(numbers).most_common(1)[0][0]
            raise ValueError(f"steps.number: {repeated:.0f} is a duplicate")
        return ObservedWindow(
            header=self._header,
            requests=tuple(self._requests.values()),
            steps=steps_from({name: np.array(values, np.float64) for name, values in self._steps.items()}),
            state=self._state,
            profile=self._profile,
        )

    def _take_header(self, line: dict[str, Any]) -> None:
        if isinstance(line.get("profile"), dict):
            self._profile = _within("profile", profile_from_dict, line["profile"])
            line["profile"] = self._profile.name
        self._header = checked(WindowHeader, line)

    def _take_state(self, line: dict[str, Any]) -> None:
        if self._state is not None:
            raise ValueError("kind: a second 'state'; a window has one at most")
        require_known(line, ("snapshot",), "field")
        if "snapshot" not in line:
            raise ValueError("snapshot: is missing")
        self._state = _within("snapshot", snapshot_from, line["snapshot"])

    def _take_request(self, line: dict[str, Any], header: WindowHeader) -> None:
        own = {name: line.pop(name) for name in OWN_FIELDS if name in line}
        for name in ("request_id", "arrival_s"):
            if name not in line:
                raise ValueError(f"{name}: is missing")
        facts = request_from(line, block_size=header.engine.block_size, default_id="")
        if facts.request_id in self._requests:
            raise ValueError(f"request_id: {facts.request_id!r} is a duplicate")
        self._requests[facts.request_id] = ObservedRequest(facts=facts, **own)

    def _take_step(self, line: dict[str, Any]) -> None:
        require_known(line, STEP_COLUMNS, "field")
        numbers = {name: _number(name, line) for name in STEP_COLUMNS}
        _require_possible(numbers)
        for name, value in numbers.items():
            self._steps[name].append(value)


def _within(field: str, read: Any, data: Any) -> Any:
    """Read a part of a line; its errors begin with the part's name."""
    try:
        return read(data)
    except ValueError as error:
        raise ValueError(f"{field}.{error}") from None


def _number(name: str, line: Mapping[str, Any]) -> float:
    if name not in line:
        raise ValueError(f"{name}: is missing")
    value = line[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST:
        raise ValueError(f"{name}: must be a number from 0 on, at most {LARGEST:g}, not {str(value)[:40]}")
    if name in COUNTS and value != int(value):
        raise ValueError(f"{name}: must be a whole number, not {value!r}")
    return float(value)


def _require_possible(step: Mapping[str, float]) -> None:
    """Refuse impossible steps."""
    if step["seconds"] == 0:
        raise ValueError("seconds: must be above 0")
    if step["num_tokens"] < step["num_decodes"] + step["num_prefills"]:
        raise ValueError("num_tokens: are fewer than num_decodes and num_prefills together")
    if step["num_decodes"] == 0 and step["decode_context"] > 0:
        raise ValueError("decode_context: is above 0, but num_decodes is 0")
    if step["decode_longest"] > step["decode_context"]:
        raise ValueError("decode_longest: is more than decode_context, the sum")
    if step["num_prefills"] == 0 and step["prefill_qq"] + step["prefill_qkv"] > 0:
        raise ValueError("num_prefills: is 0, but prefill_qq and prefill_qkv are not")
