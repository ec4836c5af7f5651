"""The numbers that policies read, each registered once: what it is, in which unit, who tells it, how old it may be.

What an instance's sidecar tells has the names of `Indicators` in protos/block/v1/common.proto.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from predictor.suggestions import did_you_mean

Column = npt.NDArray[np.float64]


class Columns(Protocol):
    """Indicators by name, a value per instance; and what is the same for all."""

    @property
    def prompt_tokens(self) -> int:
        """The request's."""

    def __getitem__(self, name: str) -> Column:
        """Find one."""


class IndicatorSource(Enum):
    """Who tells an indicator; the value says how old it is."""

    REPORTED = "the sidecar's last message, age_s ago: asked, with a reply, or from its stream"
    PREFIX = "the sidecar's cache where it was asked about this request, else what this scheduler sent there"
    FORECAST = "the sidecar's simulation of this request, asked now"
    REQUEST = "the request itself"
    DERIVED = "others, as old as they are"


@dataclass(frozen=True, slots=True, kw_only=True)
class Indicator:
    """One number about an instance; where nobody knows it, it is `otherwise`, and NaN means not known."""

    name: str
    unit: str
    meaning: str
    source: IndicatorSource
    of: tuple[str, ...] = ()
    formula: Callable[[Columns], Column] | None = None
    otherwise: float = math.nan


def _told(name: str, unit: str, meaning: str, otherwise: float = math.nan) -> Indicator:
    return Indicator(name=name, unit=unit, meaning=meaning, source=IndicatorSource.REPORTED, otherwise=otherwise)


def _foretold(name: str, unit: str, meaning: str) -> Indicator:
    return Indicator(name=name, unit=unit, meaning=meaning, source=IndicatorSource.FORECAST)


def _derived(
    name: str, unit: str, meaning: str, of: tuple[str, ...], formula: Callable[[Columns], Column]
) -> Indicator:
    return Indicator(name=name, unit=unit, meaning=meaning, source=IndicatorSource.DERIVED, of=of, formula=formula)


REPORTED = (
    _told("num_running", "requests", "in the running batch"),
    _told("num_waiting", "requests", "in the engine's queue"),
    _told("num_reserved", "requests", "promised, and not yet shown by the engine", 0.0),
    _told("num_total_blocks", "blocks", "of the KV cache"),
    _told("num_free_blocks", "blocks", "free, or free to be reused"),
    _told("num_reserved_blocks", "blocks", "that the prompts of reserved requests will take", 0.0),
    _told("num_waiting_blocks", "blocks", "that the prompts of waiting requests will take"),
    _told("queued_prefill_tokens", "tokens", "of prompts still to be computed: running, waiting and reserved"),
    _told("context_tokens", "tokens", "held in the KV cache by running requests"),
    _told("remaining_tokens", "tokens", "of answers, expected to be produced yet"),
    _told("requests_per_minute", "requests", "that came within the last sixty seconds"),
    _told("kv_hit_ratio", "ratio", "of prompt tokens found in the prefix cache, lately, by all requests there"),
    _told("pace", "ratio", "real over predicted step time, smoothed"),
    _told("step_s", "s", "the last step"),
    _told("drained_s", "s", "forecast until everything there has ended"),
    _told("num_preemptions_total", "requests", "preempted since the engine started"),
    _told("num_finished_total", "requests", "finished since the engine started"),
)

OTHERS = (
    Indicator(
        name="age_s",
        unit="s",
        meaning="how old what the instance reported is",
        source=IndicatorSource.REPORTED,
        otherwise=math.inf,
    ),
    Indicator(name="prompt_tokens", unit="tokens", meaning="of this request's prompt", source=IndicatorSource.REQUEST),
    Indicator(
        name="tag_tokens", unit="tokens", meaning="this request's predicted length", source=IndicatorSource.REQUEST
    ),
    Indicator(
        name="prefix_hit_tokens",
        unit="tokens",
        meaning="of this request's prompt that the prefix cache holds",
        source=IndicatorSource.PREFIX,
        otherwise=0.0,
    ),
    _foretold("predicted_ttft_s", "s", "until this request's first token"),
    _foretold("predicted_e2e_s", "s", "until this request's last token"),
    _foretold("predicted_tpot_s", "s", "between this request's tokens"),
    _foretold("predicted_queue_s", "s", "until this request is scheduled"),
    _foretold("predicted_preemptions", "times", "this request will be preempted"),
    _foretold("others_preempted", "times", "requests there will be preempted because of this one"),
    _foretold("delay_sum_s", "s", "added to the ends of all requests there, in sum"),
    _foretold("delay_worst_s", "s", "added to the end of the request there that is hit worst"),
)

DERIVED = (
    _derived(
        "num_queued",
        "requests",
        "waiting or reserved",
        ("num_waiting", "num_reserved"),
        lambda of: of["num_waiting"] + of["num_reserved"],
    ),
    _derived(
        "batch_size",
        "requests",
        "running, waiting or reserved (LMetric's BS)",
        ("num_running", "num_queued"),
        lambda of: of["num_running"] + of["num_queued"],
    ),
    _derived(
        "num_used_blocks",
        "blocks",
        "that running requests hold",
        ("num_total_blocks", "num_free_blocks"),
        lambda of: of["num_total_blocks"] - of["num_free_blocks"],
    ),
    _derived(
        "num_needed_blocks",
        "blocks",
        "that the prompts of waiting and reserved requests will take",
        ("num_waiting_blocks", "num_reserved_blocks"),
        lambda of: of["num_waiting_blocks"] + of["num_reserved_blocks"],
    ),
    _derived(
        "prefix_hit_ratio",
        "ratio",
        "of this request's prompt that the prefix cache holds (LMetric's KV hit ratio)",
        ("prefix_hit_tokens", "prompt_tokens"),
        lambda of: of["prefix_hit_tokens"] / of.prompt_tokens,
    ),
    _derived(
        "new_prefill_tokens",
        "tokens",
        "of this request's prompt that would have to be computed; an engine computes the last one in any case",
        ("prefix_hit_tokens", "prompt_tokens"),
        lambda of: np.maximum(of.prompt_tokens - of["prefix_hit_tokens"], 1.0),
    ),
    _derived(
        "p_tokens",
        "tokens",
        "to be computed until this request's prefill is done (LMetric's P-token)",
        ("queued_prefill_tokens", "new_prefill_tokens"),
        lambda of: of["queued_prefill_tokens"] + of["new_prefill_tokens"],
    ),
    _derived(
        "total_tokens",
        "tokens",
        "of context, computed or queued (LMetric's #Tokens)",
        ("context_tokens", "queued_prefill_tokens"),
        lambda of: of["context_tokens"] + of["queued_prefill_tokens"],
    ),
)

INDICATORS = {indicator.name: indicator for indicator in (*REPORTED, *OTHERS, *DERIVED)}
INDEX_OF = {indicator.name: row for row, indicator in enumerate(REPORTED)}  # of what instances tell, in a table of it
OTHERWISE = np.array([indicator.otherwise for indicator in REPORTED])


def require_indicator(name: str) -> Indicator:
    """Look an indicator up; an unknown name is refused with the nearest known one."""
    if name in INDICATORS:
        return INDICATORS[name]
    raise ValueError(f"{name}: is no known indicator{did_you_mean(name, INDICATORS)}")


def roots_of(names: Iterable[str]) -> Iterator[Indicator]:
    """Give the indicators that others are derived from, in the end."""
    for name in names:
        indicator = require_indicator(name)
        if indicator.source is IndicatorSource.DERIVED:
            yield from roots_of(indicator.of)
        else:
            yield indicator
