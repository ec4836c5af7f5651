"""Forecast errors of a mirror beside an engine that exports no state: SGLang, an engine of unknown kind, or vLLM.

The engine is emulated and speaks its kind's HTTP API; the mirror is its proxy and knows no more than that. Each request
is forecast as it is sent, with its length known, and compared with what its client then sees.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from statistics import median, quantiles
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from predictor.generic_estimate import generic_profile
from predictor.mirror.engine_kinds import GENERIC
from predictor.profile import load_profile
from predictor.request import RequestFacts
from scripts.processes import Running, block_serving
from scripts.report import report
from services.predictor_server.engine_source import DownError
from services.predictor_server.mirror import RunningMirror, mirroring
from services.predictor_server.settings import MirrorSettings, SidecarSettings
from services.warmup import warm_up

PROFILE = "llama-2-7b-a30"
ENGINE = ("-p", PROFILE, "--state-file", "none", "--max-model-len", "4096", "--max-num-seqs", "48")
LEARN_SHARE = 0.25  # of the requests, the first ones, which are not counted


async def measure(engine: Running, kind: str, num: int, rate: float) -> list[dict[str, Any]]:
    """Send open-loop load by the mirror's proxy; return each request's forecast and outcome."""
    profile = generic_profile() if kind == GENERIC else load_profile(PROFILE)
    settings = MirrorSettings(engine_url=engine.url, engine_kind=kind if kind == GENERIC else "auto")
    sidecar = SidecarSettings(instance_id="engine", mirror=settings, engine_url=engine.url)
    async with mirroring(sidecar, profile, CollectorRegistry()) as mirror:
        while not _is_ready(mirror):  # noqa: ASYNC110 - readiness has no event
            await asyncio.sleep(0.1)
        draw = random.Random(1)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{mirror.port}", timeout=300) as client:
            tasks = []
            for number in range(num):
                await asyncio.sleep(draw.expovariate(rate))
                words, tokens = (
                    min(2500, int(draw.lognormvariate(5, 1)) + 5),
                    min(800, int(draw.lognormvariate(4.5, 1)) + 2),
                )
                tasks.append(asyncio.create_task(_one(client, mirror, number, words, tokens)))
            return list(await asyncio.gather(*tasks))


def _is_ready(mirror: RunningMirror) -> bool:
    try:
        mirror.source.refresh()
    except DownError:  # the engine's settings are not known yet
        return False
    return True


async def _one(
    client: httpx.AsyncClient, mirror: RunningMirror, number: int, words: int, tokens: int
) -> dict[str, Any]:
    """Forecast a request, send it, and follow its stream."""
    view = mirror.source.refresh()
    facts = RequestFacts(request_id=f"f{number}", prompt_tokens=words, output_tokens=tokens, arrival_s=view.now_s)
    (forecast,) = view.forecaster.forecast([facts], view.now_s, delays=False)
    body = {"prompt": [number % 999 + 1] * words, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    start_s, first_s = time.monotonic(), 0.0
    async with client.stream(
        "POST", "/v1/completions", json=body, headers={"x-block-output-tokens": str(tokens)}
    ) as reply:
        async for _ in reply.aiter_raw():
            first_s = first_s or time.monotonic()
    end_s = time.monotonic()
    return {
        "number": number, "ttft_s": first_s - start_s, "e2e_s": end_s - start_s, "predicted_ttft_s": forecast.ttft_s,
        "predicted_e2e_s": forecast.e2e_s, "approximations": view.approximations,
    }  # fmt: skip


def errors_of(rows: list[dict[str, Any]], name: str) -> list[float]:
    """Return the relative errors of one forecast time, without those of the first requests."""
    counted = [row for row in rows if row["number"] >= LEARN_SHARE * len(rows)]
    return [abs(row[f"predicted_{name}"] / row[name] - 1) for row in counted]


def main() -> None:
    """Measure each kind that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--kind", action="append", choices=("vllm", "sglang", "generic"), help="repeatable; default: all"
    )
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--rate", type=float, default=3.0, help="requests per second")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    warm_up()
    results: list[dict[str, object]] = []
    for kind in arguments.kind or ("sglang", "generic", "vllm"):
        surface = "sglang" if kind == "sglang" else "vllm"
        with block_serving("engine", *ENGINE, "--engine-kind", surface) as engine:
            rows = asyncio.run(measure(engine, kind, arguments.requests, arguments.rate))
        for name in ("ttft_s", "e2e_s"):
            errors = errors_of(rows, name)
            for what, value in (("p50", median(errors)), ("p90", quantiles(errors, n=10)[-1])):
                results.append(
                    {"name": f"{kind} {name[:-2]} error {what}", "value": value, "unit": "share", "n": len(errors)}
                )
        if not arguments.json:
            print(f"{kind}: {'; '.join(rows[-1]['approximations'])}")
    report("accuracy_engine_kinds", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
