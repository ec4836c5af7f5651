"""What has to hold after a chaos run: nothing is lost, nothing is left, and every decision has its outcome."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import httpx
from prometheus_client.parser import text_string_to_metric_families

from scripts.chaos.clients import LEFT, NOT_CONTINUED, RequestEnd
from scripts.chaos.cluster import ChaosCluster
from scripts.chaos.faults import FaultWindow
from scripts.chaos.plan import kind_of
from scripts.chaos.requests import COMPLETE, GENERATE
from services.cluster.child import Child
from services.decision_recordings import COMPLETED, outcomes_in

REST_S = 60.0  # for everything to come to rest after the load
CHECK_S = 0.5
SETTLE_S = 5.0  # after a fault, in which recordings may lack a line
AT_REST: Mapping[str, Sequence[str]] = {
    "predictor": ("block_reservations",),
    "engine": ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    "scheduler": ("block_held_requests",),
    "gateway": ("block_gateway_requests_under_way", "block_gateway_releases_waiting"),
}
WITHOUT_DECISION = ("next_best", "last_resort_round_robin")  # policies of gateways, while no scheduler decides
REPORTED: Mapping[str, Mapping[str, str]] = {  # metrics, each with a label
    "gateway": {
        "block_gateway_migrations_total": "result",
        "block_gateway_retries_total": "why",
        "block_gateway_last_resort_total": "how",
        "block_gateway_scheduler_failures_total": "code",
        "block_gateway_releases_total": "result",
    },
    "scheduler": {
        "block_decisions_total": "basis",
        "block_sidecar_failures_total": "kind",
        "block_generate_attempts_total": "result",
        "block_recorded_lines_total": "result",
    },
    "predictor": {"block_reservations_ended_total": "how"},
}
COMPLETIONS = ("/v1/completions", "/v1/chat/completions")

# Faults after which the recording of a scheduler, or a report to it, may lack a line; and a restart of the gateway.
LOSES_LINES = {
    "kill": ("scheduler",),
    "stop": ("scheduler",),
    "crawl": ("scheduler",),
    "full_disk": ("disk",),
}

Samples = list[tuple[str, Mapping[str, str], float]]  # name, labels, value


async def left_at_rest(cluster: ChaosCluster, client: httpx.AsyncClient) -> dict[str, float]:
    """Wait until nothing runs, waits or is reserved; return what is left after a while."""
    until_s = time.monotonic() + REST_S
    while True:
        left = {}
        for kind, names in AT_REST.items():
            for child in cluster.of_kind(kind):
                samples = await samples_of(client, child)
                for name in names:
                    value = -1.0 if samples is None else total(samples, name)  # -1: it is being restarted
                    if value:
                        left[f"{child.name} {name}"] = value
        if not left or time.monotonic() > until_s:
            return left
        await asyncio.sleep(CHECK_S)


async def samples_of(client: httpx.AsyncClient, child: Child) -> Samples | None:
    """Return the metrics of a process; None where it does not reply."""
    with suppress(httpx.HTTPError):
        reply = await client.get(f"http://127.0.0.1:{child.metrics_port or child.port}/metrics")
        families = text_string_to_metric_families(reply.text)
        return [(one.name, one.labels, one.value) for family in families for one in family.samples]
    return None


def total(samples: Samples, name: str, **labels: str) -> float:
    """Sum a metric over the series with these labels."""
    wanted = labels.items()
    return sum(value for one, own, value in samples if one == name and wanted <= own.items())


async def count_problems(cluster: ChaosCluster, client: httpx.AsyncClient, ends: Sequence[RequestEnd]) -> list[str]:
    """Compare counters that must agree: decisions and placements, requests and replies."""
    problems = []
    for child in cluster.of_kind("scheduler"):
        samples = await samples_of(client, child)
        if samples is None:
            problems.append(f"{child.name}: no metrics")
            continue
        decided, timed = total(samples, "block_decisions_total"), total(samples, "block_decision_seconds_count")
        placed = total(samples, "block_placements_total", leg="serve")
        if not decided == timed == placed:
            problems.append(f"{child.name}: {decided:g} decisions, {timed:g} timed, {placed:g} placements")
        called = total(samples, "block_grpc_requests_total", method="/block.v1.Scheduler/Schedule", code="OK")
        if called > decided:
            problems.append(f"{child.name}: {called:g} replies with a decision, {decided:g} decisions")
    for child in cluster.of_kind("gateway"):
        if child.num_restarts:
            continue  # its counters started again
        sent = sum(end.sent_to == child.name and end.kind != GENERATE for end in ends)
        samples = await samples_of(client, child) or []
        replied = sum(total(samples, "block_gateway_requests_total", path=path) for path in COMPLETIONS)
        if sent != replied:
            problems.append(f"{child.name}: {sent} requests, {replied:g} replies")
    return problems


async def reported_counts(cluster: ChaosCluster, client: httpx.AsyncClient) -> Counter[str]:
    """Return what the processes that are left count about failures, by the labels of each metric."""
    counts: Counter[str] = Counter()
    for kind, names in REPORTED.items():
        for child in cluster.of_kind(kind):
            for name, labels, value in await samples_of(client, child) or []:
                if label := names.get(name):
                    counts[f"{name}.{labels[label]}"] += round(value)
    return +counts


def with_reasons(ends: Iterable[RequestEnd], windows: Sequence[FaultWindow]) -> Counter[str]:
    """Count requests by their end; a stream of a scheduler that was killed meanwhile could not continue."""
    counts: Counter[str] = Counter()
    for end in ends:
        name = end.end
        if end.kind == GENERATE and name not in (COMPLETE, LEFT):
            cause = cause_of(windows, end, {"kill": (end.sent_to,), "stop": (end.sent_to,)}, settle_s=0.0)
            if cause:
                name = f"{NOT_CONTINUED}scheduler {cause.partition(' ')[0]}"
        counts[name] += 1
    return counts


def end_problems(counts: Mapping[str, int], samples: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the ends that no request may have, with examples."""
    return [
        f"{num} requests: {end}" + "".join(f"\n    {sample}" for sample in samples.get(end, ()))
        for end, num in sorted(counts.items())
        if end not in (COMPLETE, LEFT) and not end.startswith(NOT_CONTINUED)
    ]


def pairing(
    cluster: ChaosCluster, ends: Sequence[RequestEnd], windows: Sequence[FaultWindow]
) -> tuple[Counter[str], list[str]]:
    """Find the outcome of every complete answer in the recordings; count those without one by reason."""
    counts: Counter[str] = Counter()
    problems: list[str] = []
    completed: set[str] = set()
    for child in cluster.of_kind("scheduler"):
        try:
            for outcome in outcomes_in(str(cluster.recording(child.name))):
                if outcome.finish_reason in COMPLETED:
                    completed.add(_first_id(outcome.request_id))
        except ValueError as error:
            problems.append(f"a recording cannot be read: {error}")
    for end in ends:
        if end.end != COMPLETE:
            continue
        if end.request_id in completed:
            counts["outcome recorded"] += 1
        elif end.policy in WITHOUT_DECISION:
            counts["placed without a decision"] += 1
        elif cause := cause_of(windows, end, {**LOSES_LINES, "restart": (end.sent_to,)}, settle_s=SETTLE_S):
            counts[f"not recorded: {cause}"] += 1
        else:
            counts["missing"] += 1
    if counts["missing"]:
        problems.append(f"{counts['missing']} complete answers: no outcome in any recording")
    return counts, problems


def cause_of(
    windows: Sequence[FaultWindow], end: RequestEnd, faults: Mapping[str, Sequence[str]], *, settle_s: float
) -> str:
    """Return the first fault of these kinds and parts that happened during a request, or shortly before or after it."""
    for kind, parts in faults.items():
        for window in windows:
            is_one = window.kind == kind and (window.part in parts or kind_of(window.part) in parts)
            if is_one and window.start_s - settle_s <= end.end_s and end.start_s <= window.end_s + settle_s:
                return f"{kind} {kind_of(window.part)}"
    return ""


def _first_id(request_id: str) -> str:
    """Return the client's id of a request that continues an answer under an id of its own."""
    return request_id.partition("-c")[0]
