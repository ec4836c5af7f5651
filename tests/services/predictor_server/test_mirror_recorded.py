"""The mirror beside what a real vLLM sent: a recording, replayed on a clock of its own."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from predictor.mirror.engine_totals import EngineTotals
from predictor.mirror.in_flight_request import Arrival
from predictor.profile import profile_from_dict
from predictor.request import Request
from services.predictor_server import mirror
from services.predictor_server.mirror import MirroredEngine
from services.predictor_server.settings import MirrorSettings
from tests.services.predictor_server.mirrored import forecast_by

# Of vLLM 0.32's CPU build, one of two engines that shared two cores with much else, under ShareGPT-like load: what
# the proxy saw of streams and totals, in milliseconds, and beside it about once a second what the engine itself
# showed by the plug-in: how many times the profile's seconds its last steps took, its queues, each request's tokens,
# and what the plug-in's sidecar then foretold of the candidate below. It slowed down to a third and was well again.
RECORDED = Path(__file__).parents[2] / "golden" / "mirrored_vllm.jsonl.gz"
CANDIDATE = Request(request_id="candidate", prompt_tokens=60, output_tokens=100)
BEGAN_S = 1000.0


@dataclass(slots=True, kw_only=True)
class Compared:
    """How far the mirror was from what the engine showed, each time."""

    pace: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    there: list[int] = field(default_factory=list)
    num_unknown: int = 0


@pytest.fixture(scope="module")
def compared() -> Iterator[Compared]:
    """Replay the recording."""
    with pytest.MonkeyPatch.context() as patching:
        yield replayed(patching)


def replayed(patching: pytest.MonkeyPatch) -> Compared:
    """Tell a mirror what was recorded, when it was, and compare."""
    clock = SimpleNamespace(now_s=BEGAN_S)
    patching.setattr(mirror, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    lines = recorded()
    head = next(lines)
    settings = MirrorSettings(engine_url="http://127.0.0.1:1", engine=head["engine"])
    source = MirroredEngine(settings, profile_from_dict(head["profile"]), "conditional_median", 30.0)
    names: dict[int, str] = {}
    result = Compared()
    for at_ms, kind, *told in lines:
        clock.now_s = BEGAN_S + at_ms / 1000
        if kind == "arrived":
            number, prompt_tokens, max_tokens, known_tokens = told
            names[number] = source.arrived(
                Arrival(
                    request_id=str(number), prompt_tokens=prompt_tokens, max_tokens=max_tokens,
                    known_tokens=known_tokens, streamed=True,
                )
            )  # fmt: skip
        elif kind == "produced":
            source.produced(names[told[0]], told[1])
        elif kind == "ended":
            source.ended(names[told[0]], told[1], completed=True)
        elif kind == "read":
            running, waiting, kv_usage, generation_tokens, prompt_tokens = told
            source.read(
                EngineTotals(
                    running=running, waiting=waiting, kv_usage=kv_usage, generation_tokens=generation_tokens,
                    prompt_tokens=prompt_tokens,
                )
            )  # fmt: skip
            source.look()  # as a sidecar does, whether anybody asks or not
        else:
            compare(source, told, names, result)
    return result


def recorded() -> Iterator[Any]:
    """Read the recording line by line."""
    with gzip.open(RECORDED, "rt") as file:
        yield from map(json.loads, file)


def compare(source: MirroredEngine, told: list[Any], names: dict[int, str], result: Compared) -> None:
    """Set what the mirror thinks beside what the engine showed."""
    pace, num_running, num_waiting, tokens, e2e_s = told
    picture = source.look()
    head, life = picture.engine.state.engine[0], source._life
    assert life is not None
    rows = life.tracker.engine.state.requests
    result.pace.append(picture.counters["pace"] / pace - 1)
    result.e2e.append(forecast_by(source, CANDIDATE).e2e_s / e2e_s - 1)
    result.there.append(abs(int(head.num_running + head.num_waiting + head.num_pending) - num_running - num_waiting))
    result.num_unknown = max(result.num_unknown, source.num_unknown)
    for number, count in tokens.items():
        known = life.tracker.requests.get(names[int(number)])
        if known is not None and count > 0:
            result.tokens.append(count - int(rows[known.slot].output_tokens))


def ninth_tenth(errors: list[float]) -> float:
    """The 90th percentile of their sizes."""
    return sorted(map(abs, errors))[int(0.9 * len(errors))]


def test_it_is_nearly_as_good_as_what_the_engine_shows(compared: Compared) -> None:
    """Pace, progress, queues and forecasts are what the plug-in would say, also while the pace changes."""
    assert len(compared.pace) > 50
    assert median(map(abs, compared.pace)) < 0.06
    assert ninth_tenth(compared.pace) < 0.2
    assert abs(median(compared.pace)) < 0.03
    assert median(map(abs, compared.e2e)) < 0.06
    assert ninth_tenth(compared.e2e) < 0.2
    assert median(map(abs, compared.tokens)) == 0
    assert ninth_tenth(compared.tokens) <= 1
    assert median(compared.there) == 0


def test_nobody_is_taken_for_a_stranger(compared: Compared) -> None:
    """Requests that wait long are not given up, so their tokens are never anybody else's."""
    assert compared.num_unknown == 0
