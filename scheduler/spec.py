"""A policy as users write it: a name, and after a colon its parameters as in a TOML inline table.

    lmetric
    linear: lambda = 0.3
    block: k = 8, shortlist = "llumnix", filter = "num_waiting < 50"
    jsq: hold = "batch_size < 48", hold_s = 5
    expr: p_tokens * batch_size
    expr: score = "p_tokens * batch_size", filter = "age_s < 1"
    block: session_affinity = 0.5, length_quantiles = 3
    jsq: prefill = "lmetric", disaggregate = "new_prefill_tokens > 500", order = "prefill-first"

A TOML table with a `name` is equivalent.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from predictor.request import require_quantiles
from predictor.suggestions import did_you_mean, require_choice
from scheduler.policies import entry_named
from scheduler.policies.entry import Parameter, PolicyEntry

EXPRESSION = "expr"
ALL = "all"
MAX_CHARACTERS = 4000
MAX_COUNT = 1_000_000  # of k and sample
HOLD_S = 10.0
LEG_OPTIONS = ("prefill", "disaggregate", "order")  # of requests that may have two legs
OPTIONS = (
    "filter",
    "tie_break",
    "sample",
    "k",
    "shortlist",
    "hold",
    "hold_s",
    "session_affinity",
    "length_quantiles",
    *LEG_OPTIONS,
)  # of every policy; fmt: skip
BY_FORECAST, ALWAYS, NEVER = "forecast", "always", "never"  # values of `disaggregate`, besides conditions
ORDERS = PAIR, DECODE_FIRST, PREFILL_FIRST = "pair", "decode-first", "prefill-first"
HOLD_PARAMETER = Parameter(default=HOLD_S, meaning="maximum time for which a request is held, in seconds")
AFFINITY_PARAMETER = Parameter(default=0.0, meaning="maximum cost of keeping a session on its instance, in seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """The name and parameters of a policy; `k` is the number of forecasts that are made, None for all.

    `session_affinity` is how much longer a request may take on the instance of its session, None to ignore sessions.
    `length_quantiles` is the number of lengths with which each forecast is made.

    `prefill` is the policy of prefill legs, `disaggregate` says which requests have two legs, and `order` which leg is
    placed first; None where the policy has its own default.
    """

    text: str
    name: str
    score: str = ""  # of an expression
    parameters: Mapping[str, float] = field(default_factory=dict)
    filter: str = ""
    tie_break: str | None = None
    sample: int | None = None
    k: int | None = None
    shortlist: str | None = None
    hold: str | None = None
    hold_s: float = HOLD_S
    session_affinity: float | None = None
    length_quantiles: int = 1
    prefill: str | None = None
    disaggregate: str | None = None
    order: str | None = None


def spec_from(given: str | Mapping[str, Any]) -> PolicySpec:
    """Read a policy; ValueError, naming the parameter, if one is unknown or invalid."""
    text = given if isinstance(given, str) else _as_text(given)
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"policy: is longer than {MAX_CHARACTERS} characters")
    if not text.isascii():  # it goes into headers and labels
        raise ValueError(f"policy: {text!r:.80} is not in plain ASCII")
    name, colon, body = text.partition(":")
    name = name.strip()
    settings = _settings(name, body.strip()) if colon else {}
    parameters = {"score": None} if name == EXPRESSION else entry_named(name).parameters
    for key in settings:
        if key not in parameters and key not in OPTIONS:
            known = [*parameters, *OPTIONS]
            hint = did_you_mean(key, known, otherwise=f"; there are {', '.join(known)}")
            raise ValueError(f"policy: {name}: {key} is no known parameter{hint}")
    try:
        return PolicySpec(
            text=" ".join(text.split()),
            name=name,
            score=_score(settings) if name == EXPRESSION else "",
            parameters={} if name == EXPRESSION else _parameters(entry_named(name), settings),
            filter=_text("filter", settings.get("filter", "")),
            tie_break=_text("tie_break", settings["tie_break"]) if "tie_break" in settings else None,
            sample=_count("sample", settings["sample"], minimum=1) if "sample" in settings else None,
            k=None if settings.get("k", ALL) == ALL else _count("k", settings["k"], minimum=0),
            shortlist=_text("shortlist", settings["shortlist"]) if "shortlist" in settings else None,
            hold=_text("hold", settings["hold"]) if "hold" in settings else None,
            hold_s=_within("hold_s", HOLD_PARAMETER, settings.get("hold_s", HOLD_S)),
            session_affinity=_within("session_affinity", AFFINITY_PARAMETER, settings["session_affinity"])
            if "session_affinity" in settings
            else None,
            length_quantiles=require_quantiles(settings.get("length_quantiles", 1)),
            prefill=_text("prefill", settings["prefill"]) if "prefill" in settings else None,
            disaggregate=_text("disaggregate", settings["disaggregate"]) if "disaggregate" in settings else None,
            order=_order(settings["order"]) if "order" in settings else None,
        )
    except ValueError as error:
        raise ValueError(f"policy: {name}: {error}") from None


def _settings(name: str, body: str) -> dict[str, Any]:
    """Read the text after the colon: TOML settings, or a bare formula, which assigns nothing."""
    try:
        settings: dict[str, Any] = tomllib.loads("settings = {" + body + "}")["settings"]
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        if name == EXPRESSION:
            return {"score": body}
        raise ValueError(f"policy: {name}: {body!r:.80} is no list of settings like lambda = 0.3: {error}") from None
    return settings


def _as_text(table: Mapping[str, Any]) -> str:
    """Return a TOML table as text."""
    if not isinstance(table.get("name"), str):
        raise ValueError("policy.name: is missing")
    settings = [f"{key} = {_as_toml(key, value)}" for key, value in table.items() if key != "name"]
    return f"{table['name']}: {', '.join(settings)}" if settings else str(table["name"])


def _as_toml(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str) and value.isprintable():
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    raise ValueError(f"policy.{key}: must be a text, a number, true or false")


def _score(settings: Mapping[str, Any]) -> str:
    if not settings.get("score"):
        raise ValueError("score: is missing, a formula like p_tokens * batch_size")
    return _text("score", settings["score"])


def _parameters(entry: PolicyEntry, settings: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: _within(name, parameter, settings.get(name, parameter.default))
        for name, parameter in entry.parameters.items()
    }


def _within(name: str, parameter: Parameter, value: Any) -> float:
    if not isinstance(value, int | float) or not parameter.low <= value <= parameter.high or math.isinf(value):
        upper = f" to {parameter.high:g}" if parameter.high < math.inf else " on"
        raise ValueError(f"{name}: must be a number from {parameter.low:g}{upper}, not {value!r:.40}")
    return float(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}: must be a text, not {value!r:.40}")
    return value


def _order(value: Any) -> str:
    require_choice("order", value, ORDERS)
    return str(value)


def _count(name: str, value: Any, *, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= MAX_COUNT:
        also = ' or "all"' if name == "k" else ""
        raise ValueError(f"{name}: must be a whole number from {minimum} on{also}, not {value!r:.40}")
    return value
