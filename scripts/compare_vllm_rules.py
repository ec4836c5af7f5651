"""Two batching rules in real vLLM engines that serve the same mixed load, one after the other.

Both engines are vLLM's CPU build with a small model of random weights; they differ only in `--scheduler-cls`. Short
urgent requests come among long ones with loose targets, faster than the engine serves them. Targets are multiples of
what an idle engine takes, measured first.

- `same_text`: of the requests, those whose text is equal with both rules. `same_choices`: those whose texts are equal
  until two tokens are about equally likely (`TIE_NATS`); must be all. Sums in a batch of other requests may be rounded
  differently, on some processors enough for another token of such two. `control_same_choices`: those for which this
  holds although the first token of the prompt was changed; must be few, or equal texts would say nothing.
- `attained.{rule}.{kind}`: requests whose TTFT and mean time per token are within their targets;
- `forecast_error.{rule}`: median relative error of the end-to-end time that a sidecar's model forecasts when a request
  is sent, with the rule that the engine's state file names.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
import numpy as np

from predictor.lengths import DEFAULT_RESIDUAL
from predictor.profile import Profile, profile_to_json
from predictor.request import RequestFacts, Slo
from scripts.report import report
from services.engine_state.reader import Reader
from services.engine_state.snapshot import config_of
from services.engine_state.view import UnreadableError
from services.predictor_server.engine_source import DownError
from services.predictor_server.exported import ExportedEngine
from services.profiling.measure_command import MeasureOptions, measured_profile
from tests.conformance.vllm_side import interpreter
from tests.deploy.engines import MODEL, PROFILE, START_S, Engine, random_weights, tiny_model
from tests.deploy.installing import PLUGIN, pip_install

FCFS = "fcfs"
URGENT, PATIENT = "urgent", "patient"
KINDS = {URGENT: (24, 24), PATIENT: (480, 48)}  # tokens of prompt and response
TTFT_TIMES = {URGENT: 4.0, PATIENT: 40.0}  # targets, as multiples of the whole response of an idle engine
TPOT_TIMES = {URGENT: 8.0, PATIENT: 16.0}  # and of its mean time per token
WEIGHTS = {URGENT: 2.0, PATIENT: 1.0}
LOAD = 3.0  # requests come this much faster than one after the other would be served
WARM_UP = 8
TIE_NATS = 0.2  # of two tokens whose order rounding may change, the difference of their log probabilities at most


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedRequest:
    """A request of the load."""

    name: str
    kind: str
    due_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    slo: Slo | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """A token that was chosen, and the log probabilities of it and of the next one in rank."""

    token: str
    log_probabilities: Mapping[str, float]

    @property
    def is_tie(self) -> bool:
        """Whether rounding may decide which of the two is chosen."""
        first, *others = sorted(self.log_probabilities.values(), reverse=True)
        return bool(others) and first - others[0] <= TIE_NATS


@dataclass(slots=True, kw_only=True)
class MixedResult:
    """The result of a request."""

    request: MixedRequest
    choices: Sequence[Choice]
    ttft_s: float
    e2e_s: float
    predicted_e2e_s: float | None

    @property
    def tokens(self) -> list[str]:
        """The chosen tokens."""
        return [choice.token for choice in self.choices]

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first."""
        return (self.e2e_s - self.ttft_s) / max(1, self.request.max_tokens - 1)

    @property
    def attained(self) -> bool:
        """Whether it met its targets."""
        slo = self.request.slo or Slo()
        return self.ttft_s <= (slo.ttft_s or np.inf) and self.tpot_s <= (slo.tpot_s or np.inf)


def main() -> None:
    """Run, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rule", default="slide_batching")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds to measure a profile; 0: a guess")
    arguments = parser.parse_args()
    if not interpreter().exists():
        parser.error(f"no vLLM at {interpreter()}: make vllm, or set BLOCK_VLLM_PYTHON")
    with tempfile.TemporaryDirectory() as folder:
        results = compared(Path(folder), arguments.rule, arguments.requests, arguments.seed, arguments.budget)
    report("compare_vllm_rules", results, as_json=arguments.json, load=os.getloadavg()[0])


def compared(folder: Path, rule: str, num_requests: int, seed: int, budget_s: float) -> list[dict[str, Any]]:
    """Serve the load with both rules, and return the results."""
    model = random_weights(tiny_model(folder / "model"), seed)
    site = folder / "site-packages"
    pip_install(PLUGIN, site)
    requests, answers, controls, profile = draw(num_requests, seed), {}, {}, PROFILE
    for name in (FCFS, rule):
        with serving(folder, model, site, name, profile) as engine:
            if name == FCFS:
                if budget_s > 0:
                    profile = asyncio.run(measured(engine, budget_s, seed))
                requests = asyncio.run(timed(engine, requests, profile))
            answers[name] = asyncio.run(serve(engine, requests, profile))
            control = [with_other_start(request) for request in requests[:WARM_UP]]
            controls[name] = asyncio.run(serve(engine, control, profile))
    return [*texts(answers[FCFS], answers[rule], controls[rule]), *outcomes(answers)]


def texts(
    one: Mapping[str, MixedResult], other: Mapping[str, MixedResult], control: Mapping[str, MixedResult]
) -> list[dict[str, Any]]:
    """Compare the texts of the same requests."""
    pairs = [(answer, other[name]) for name, answer in one.items()]
    control_pairs = [(answer, one[name]) for name, answer in control.items()]
    shares = {
        "same_text": [first.tokens == second.tokens for first, second in pairs],
        "same_choices": [choose_alike(first.choices, second.choices) for first, second in pairs],
        "control_same_choices": [choose_alike(first.choices, second.choices) for first, second in control_pairs],
    }
    return [
        {"name": name, "value": statistics.mean(same), "unit": "fraction", "n": len(same)}
        for name, same in shares.items()
    ]


def choose_alike(one: Sequence[Choice], other: Sequence[Choice]) -> bool:
    """Return whether two texts are equal, or equal until both engines find two tokens about equally likely."""
    for first, second in zip(one, other, strict=False):
        if first.token != second.token:
            same_two = first.log_probabilities.keys() == second.log_probabilities.keys()
            return same_two and first.is_tie and second.is_tie
    return len(one) == len(other)


def outcomes(answers: Mapping[str, Mapping[str, MixedResult]]) -> Iterator[dict[str, Any]]:
    """Return attainment by kind, and the error of forecasts."""
    for rule, by_name in answers.items():
        for kind in KINDS:
            attained = [answer.attained for answer in by_name.values() if answer.request.kind == kind]
            yield {
                "name": f"attained.{rule}.{kind}",
                "value": statistics.mean(attained),
                "unit": "fraction",
                "n": len(attained),
            }
        errors = [
            abs(answer.predicted_e2e_s / answer.e2e_s - 1)
            for answer in by_name.values()
            if answer.predicted_e2e_s is not None
        ]
        if errors:
            yield {
                "name": f"forecast_error.{rule}",
                "value": statistics.median(errors),
                "unit": "fraction",
                "n": len(errors),
            }


def draw(num_requests: int, seed: int) -> list[MixedRequest]:
    """Draw the load, with times in units of the mean time between requests."""
    generator = random.Random(seed)
    requests, due = [], 0.0
    for number in range(num_requests):
        kind = PATIENT if number % 3 == 0 else URGENT
        prompt, response = KINDS[kind]
        ids = tuple(generator.randrange(100, 1900) for _ in range(prompt + generator.randrange(prompt // 4)))
        requests.append(MixedRequest(name=f"{kind}{number}", kind=kind, due_s=due, prompt=ids, max_tokens=response))
        due += generator.expovariate(1.0)
    return requests


async def measured(engine: Engine, budget_s: float, seed: int) -> Profile:
    """Measure the engine's profile, as `block profile measure` does."""
    options = MeasureOptions(
        engine_url=engine.url, state_file=str(engine.state), budget_s=budget_s, name="measured", gpu="CPU", seed=seed
    )
    return (await measured_profile(options, lambda _: None))[0]


async def timed(engine: Engine, requests: Sequence[MixedRequest], profile: Profile) -> list[MixedRequest]:
    """Set times and targets by what an idle engine takes."""
    alone: dict[str, list[MixedResult]] = {kind: [] for kind in KINDS}
    for number in range(WARM_UP):
        for kind in KINDS:
            one = next(request for request in requests if request.kind == kind)
            request = replace(with_other_start(one), name=f"alone{kind}{number}", due_s=0.0)
            alone[kind] += (await serve(engine, [request], profile)).values()
    e2e_s = {kind: statistics.median(one.e2e_s for one in ones) for kind, ones in alone.items()}
    between_s = statistics.mean(e2e_s[request.kind] for request in requests) / LOAD
    return [
        replace(
            request,
            due_s=request.due_s * between_s,
            slo=Slo(
                ttft_s=TTFT_TIMES[request.kind] * e2e_s[request.kind],
                tpot_s=TPOT_TIMES[request.kind] * e2e_s[request.kind] / request.max_tokens,
            ),
        )
        for request in requests
    ]


def with_other_start(request: MixedRequest) -> MixedRequest:
    """Return the request with another first token."""
    return replace(request, prompt=(request.prompt[0] ^ 1, *request.prompt[1:]))


@contextmanager
def serving(folder: Path, model: Path, site: Path, rule: str, profile: Profile) -> Iterator[Engine]:
    """Run an engine with a rule."""
    options = ["--load-format", "auto"]
    if rule != FCFS:
        file = folder / "profile.json"
        file.write_text(profile_to_json(profile))
        options += ["--scheduler-cls", f"block_vllm_export.schedulers.{rule}"]
        options += ["--additional-config", json.dumps({"block_rule": {"profile": str(file)}})]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(site)  # this checkout's plug-in, whichever one is installed
    try:
        engine = Engine(model, folder / f"{rule}.state", folder / f"{rule}.log", *options)
        engine.start()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    try:
        engine.until(engine.is_healthy, START_S)
        require_rule(engine, rule)
        yield engine
    finally:
        engine.kill()


def require_rule(engine: Engine, rule: str) -> None:
    """Require that the engine runs the rule, by its state file."""
    reader = Reader(str(engine.state))
    try:
        found = config_of(reader.read()).batcher
    finally:
        reader.close()
    if found != ("vllm_v1" if rule == FCFS else rule):
        raise SystemExit(f"the engine runs {found}, not {rule}")


async def serve(engine: Engine, requests: Sequence[MixedRequest], profile: Profile) -> dict[str, MixedResult]:
    """Send requests when they are due, each with a forecast; return the answers by name."""
    source = ExportedEngine(str(engine.state), profile, DEFAULT_RESIDUAL, 60.0)
    limits = httpx.Limits(max_connections=None)
    try:
        async with httpx.AsyncClient(timeout=START_S, limits=limits) as client:
            start_s = time.monotonic()

            async def one(request: MixedRequest) -> MixedResult:
                await asyncio.sleep(max(0.0, start_s + request.due_s - time.monotonic()))
                return await send(client, engine, request, forecast(source, request))

            answers = await asyncio.gather(*map(one, requests))
    finally:
        source.close()
    return {answer.request.name: answer for answer in answers}


def forecast(source: ExportedEngine, request: MixedRequest) -> float | None:
    """Forecast a request's end-to-end time, and reserve it."""
    facts = RequestFacts(
        request_id=request.name, prompt_tokens=len(request.prompt), output_tokens=request.max_tokens,
        max_tokens=request.max_tokens, slo=request.slo, weight=WEIGHTS[request.kind],
    )  # fmt: skip
    with suppress(DownError, UnreadableError):
        view = source.refresh()
        (found,) = view.forecaster.forecast([facts], view.now_s, delays=False)
        source.reserve(facts)
        return found.e2e_s / view.clock_rate
    return None


async def send(
    client: httpx.AsyncClient, engine: Engine, request: MixedRequest, predicted_e2e_s: float | None
) -> MixedResult:
    """Send one request, and read its stream."""
    slo = request.slo or Slo()
    xargs = {"block_tag_tokens": request.max_tokens, "block_weight": WEIGHTS[request.kind]}
    xargs |= {name: value for name, value in (("block_ttft_s", slo.ttft_s), ("block_tpot_s", slo.tpot_s)) if value}
    body = {
        "model": MODEL, "prompt": list(request.prompt), "max_tokens": request.max_tokens, "ignore_eos": True,
        "temperature": 0, "stream": True, "vllm_xargs": xargs, "logprobs": 2, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    sent_s, first_s = time.monotonic(), None
    choices: list[Choice] = []
    headers = {"x-request-id": request.name}
    async with client.stream("POST", f"{engine.url}/v1/completions", json=body, headers=headers) as stream:
        if stream.status_code != 200:
            raise SystemExit(f"{request.name}: {stream.status_code}: {(await stream.aread())[:200]!r}")
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                first_s = first_s or time.monotonic()
                found = json.loads(line[6:])["choices"][0].get("logprobs") or {"tokens": [], "top_logprobs": []}
                choices += map(Choice, found["tokens"], found["top_logprobs"])
    end_s = time.monotonic()
    return MixedResult(
        request=request, choices=choices, ttft_s=(first_s or end_s) - sent_s, e2e_s=end_s - sent_s,
        predicted_e2e_s=predicted_e2e_s,
    )  # fmt: skip


if __name__ == "__main__":
    main()
