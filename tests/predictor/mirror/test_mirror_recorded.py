"""The mirror against a recording of a real vLLM's traffic and metrics, on a virtual clock."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from predictor.mirror.events import MetricsScraped, RequestArrived, RequestEnded, TokensReceived
from predictor.mirror.mirror import EngineMirror
from predictor.mirror.models import MirrorOptions
from predictor.mirror.scraped_metrics import ScrapedMetrics
from predictor.profile import profile_from_dict
from predictor.request import RequestFacts
from predictor.reserved_requests import ReportedLengths
from tests.predictor.mirror.tracked_engine import RECORDS

# Of vLLM 0.32's CPU build, one of two engines that shared two cores with other load, under ShareGPT-like load: the
# streams and metrics that the proxy saw, in milliseconds, and about once a second the state that the plug-in exported:
# the ratio of real to predicted duration of the last steps, the queues, each request's tokens, and the forecast that
# the plug-in's sidecar made for the candidate below. The engine slowed down to a third and recovered.
RECORDED = Path(__file__).parents[2] / "golden" / "mirrored_vllm.jsonl.gz"
CANDIDATE = RequestFacts(request_id="candidate", prompt_tokens=60, output_tokens=100)
START_S = 1000.0


@dataclass(slots=True, kw_only=True)
class Comparison:
    """The mirror's errors against the exported state, each time."""

    pace: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    num_requests: list[int] = field(default_factory=list)
    num_unknown: int = 0


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    """Replay the recording."""
    lines = recorded_lines()
    head = next(lines)
    options = MirrorOptions(
        profile=profile_from_dict(head["profile"]), records=RECORDS, engine=head["engine"],
        residual="conditional_median", speed=1.0, forget_s=30.0, max_requests=1024,
    )  # fmt: skip
    mirror = EngineMirror(options, ReportedLengths(), START_S)
    result = Comparison()
    for at_ms, kind, *values in lines:
        at_s = START_S + at_ms / 1000
        if kind == "arrived":
            number, prompt_tokens, max_tokens, known_tokens = values
            event = RequestArrived(
                name=str(number), request_id=str(number), prompt_tokens=prompt_tokens, max_tokens=max_tokens,
                known_tokens=known_tokens, streamed=True,
            )  # fmt: skip
            mirror.record(event, at_s)
        elif kind == "produced":
            mirror.record(TokensReceived(name=str(values[0]), num_tokens=values[1]), at_s)
        elif kind == "ended":
            mirror.record(RequestEnded(name=str(values[0]), num_tokens=values[1], completed=True), at_s)
        elif kind == "read":
            running, waiting, kv_usage, generation_tokens, prompt_tokens = values
            metrics = ScrapedMetrics(
                running=running, waiting=waiting, kv_usage=kv_usage, generation_tokens=generation_tokens,
                prompt_tokens=prompt_tokens,
            )  # fmt: skip
            mirror.record(MetricsScraped(metrics=metrics), at_s)
            mirror.view(at_s)  # as a sidecar does at every interval
        else:
            compare(mirror, values, at_s, result)
    return result


def recorded_lines() -> Iterator[Any]:
    """Read the recording line by line."""
    with gzip.open(RECORDED, "rt") as file:
        yield from map(json.loads, file)


def compare(mirror: EngineMirror, exported: list[Any], at_s: float, result: Comparison) -> None:
    """Record the mirror's errors."""
    pace, num_running, num_waiting, tokens, e2e_s = exported
    view = mirror.view(at_s)
    head, models = view.engine.state.engine[0], mirror._models
    assert models is not None
    (forecast,) = view.forecaster.forecast([CANDIDATE], view.now_s, delays=False)
    result.pace.append(view.counters["pace"] / pace - 1)
    result.e2e.append(forecast.e2e_s / e2e_s - 1)
    num_requests = int(head.num_running + head.num_waiting + head.num_pending)
    result.num_requests.append(abs(num_requests - num_running - num_waiting))
    result.num_unknown = max(result.num_unknown, mirror.num_unknown)
    for name, count in tokens.items():
        if name in models.tracker and count > 0:
            result.tokens.append(count - models.tracker.engine.output_tokens(name))


def ninth_tenth(errors: list[float]) -> float:
    """Return the 90th percentile of the absolute errors."""
    return sorted(map(abs, errors))[int(0.9 * len(errors))]


def test_it_is_nearly_as_good_as_the_exported_state(comparison: Comparison) -> None:
    """Pace, progress, queues and forecasts are close to the plug-in's, also while the pace changes."""
    assert len(comparison.pace) > 50
    assert median(map(abs, comparison.pace)) < 0.06
    assert ninth_tenth(comparison.pace) < 0.2
    assert abs(median(comparison.pace)) < 0.03
    assert median(map(abs, comparison.e2e)) < 0.06
    assert ninth_tenth(comparison.e2e) < 0.2
    assert median(map(abs, comparison.tokens)) == 0
    assert ninth_tenth(comparison.tokens) <= 1
    assert median(comparison.num_requests) == 0


def test_no_known_request_is_counted_as_unknown(comparison: Comparison) -> None:
    """Requests that wait for a long time stay known, so their tokens are not those of unknown requests."""
    assert comparison.num_unknown == 0
