"""Requests that are sent to all engines after a decision: how often the best one was chosen, and what others cost."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from protos.block.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from scripts.cpu_engines import MODEL, WITHIN_S
from scripts.report import row
from services.http.origin import origin_of
from services.load.request_format import RequestFormat, body_of
from services.load.running import LoadLimits, LoadSender
from simulator.load_plan import Planned
from simulator.load_report import RequestResult

CLEAR = 0.05  # by which two latencies differ clearly


@dataclass(frozen=True, slots=True, kw_only=True)
class Both:
    """A request that was sent to all engines: the chosen instance, and the latency on each."""

    chosen: str
    e2e_s: dict[str, float]


async def broadcast(
    sampled: Sequence[Planned], scheduler: str, urls: dict[str, str], form: RequestFormat, limits: LoadLimits
) -> list[Both]:
    """Request a decision for each request when it is due, and send the request to all engines."""
    start_s = time.monotonic()
    senders = {name: LoadSender(origin_of(url), form, limits) for name, url in urls.items()}

    async def one(planned: Planned, stub: Any) -> Both | None:
        await asyncio.sleep(max(0.0, start_s + planned.due_s - time.monotonic()))
        request = common_pb2.Request(
            request_id=f"sample-{planned.request_id}", model=MODEL, prompt_tokens=planned.prompt_tokens,
            max_tokens=planned.output_tokens, ignore_eos=True,
        )  # fmt: skip
        response = await stub.Schedule(scheduler_pb2.ScheduleRequest(request=request, dry_run=True), timeout=WITHIN_S)
        body = json.loads(body_of(planned, form)) | {"vllm_xargs": {"block_tag_tokens": planned.output_tokens}}
        encoded, now_s = json.dumps(body).encode(), time.monotonic()
        results = {name: RequestResult(plan=planned) for name in urls}
        await asyncio.gather(*(senders[name].send(planned, encoded, now_s, result) for name, result in results.items()))
        ends = {name: result.e2e_s for name, result in results.items() if result.failure is None and result.e2e_s}
        return Both(chosen=response.decision.instance.instance_id, e2e_s=ends) if len(ends) == len(urls) else None

    try:
        async with grpc.aio.insecure_channel(scheduler) as channel:
            stub = scheduler_pb2_grpc.SchedulerStub(channel)
            ended = await asyncio.gather(*(one(planned, stub) for planned in sampled))
    finally:
        for sender in senders.values():
            sender.close()
    return [both for both in ended if both is not None]


def choices(both: Sequence[Both]) -> list[dict[str, Any]]:
    """Return how often the better engine was chosen, and what the other choices cost."""
    chosen_s = np.array([one.e2e_s[one.chosen] for one in both])
    best_s = np.array([min(one.e2e_s.values()) for one in both])
    worst_s = np.array([max(one.e2e_s.values()) for one in both])
    wrong, clear = chosen_s > best_s, worst_s > (1 + CLEAR) * best_s
    rows = [
        row("best_instance_share", float(np.mean(~wrong)), "ratio", len(both)),
        row("regret.mean", float(np.mean(chosen_s / best_s - 1)), "ratio", len(both)),
        row("regret_s.mean", float(np.mean(chosen_s - best_s)), "s", len(both)),
        row("possible_regret.mean", float(np.mean(worst_s / best_s - 1)), "ratio", len(both)),
    ]
    if wrong.any():
        rows.append(
            row("regret_when_wrong.median", float(np.median((chosen_s / best_s - 1)[wrong])), "ratio", int(wrong.sum()))
        )
    if clear.any():
        rows.append(row("clear_best_share", float(np.mean(~wrong[clear])), "ratio", int(clear.sum())))
    return rows
