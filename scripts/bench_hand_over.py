"""How long the gateway takes from the reply to a prefill leg to the request to the decode instance.

Two stand-in engines, one for each leg, are processes of their own, as is the gateway; the stand-in scheduler, in this
process, gives every request both legs and collects the outcomes, which contain the times. The reply to a prefill leg
names 1,024 KV blocks. Prompts have 2 KB, 64 KB and 1 MB; engines answer at once. Everything is on loopback.

- `hand_over_ms.{prompt}.{concurrency}.{quantile}`: from the last byte of the reply to the last byte of the request.
- `legs_cpu_ms.{prompt}.{concurrency}`: processor time of the gateway per request with both legs.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from contextlib import ExitStack

import grpc
import uvloop

from protos.block.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from scripts.bench_requests import PLACE, request_body, text_of
from scripts.load_client import LoadSample, load_through, quantile
from scripts.processes import Running, block_serving, stand_in
from scripts.report import report
from scripts.stub_scheduler import InTurn
from services.http.client import HttpClient

PROMPTS = {"2kb": 2048, "64kb": 65_536, "1mb": 1_048_576}
CONCURRENCIES = (1, 16)
WARM_UP = 100


def main() -> None:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--requests", type=int, default=500, help="of each case")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        engines = [stack.enter_context(stand_in("engine")) for _ in range(2)]
        results = uvloop.run(measured(engines, arguments.requests))
    report("hand_over", results, as_json=arguments.json)


class Paired(InTurn):
    """Gives every request both legs, and keeps the outcomes of the decode legs."""

    def __init__(self, engines: list[Running]) -> None:
        """Prefill on the first engine, and decode on the second one."""
        super().__init__([engines[1].url])
        self.prefill = common_pb2.Instance(instance_id="prefill", engine_url=engines[0].url, role="prefill")
        self.outcomes: list[common_pb2.Outcome] = []

    async def Schedule(  # noqa: N802 - the wire's name
        self,
        request: scheduler_pb2.ScheduleRequest,
        context: grpc.aio.ServicerContext[scheduler_pb2.ScheduleRequest, scheduler_pb2.ScheduleResponse],
    ) -> scheduler_pb2.ScheduleResponse:
        """Decide."""
        response = await super().Schedule(request, context)
        response.decision.prefill.CopyFrom(
            common_pb2.PlacedLeg(leg=common_pb2.LEG_PREFILL, instance=self.prefill, reserved_for_s=10.0)
        )
        return response

    async def Release(  # noqa: N802 - the wire's name
        self,
        request: common_pb2.ReleaseRequest,
        context: grpc.aio.ServicerContext[common_pb2.ReleaseRequest, common_pb2.ReleaseResponse],  # noqa: ARG002
    ) -> common_pb2.ReleaseResponse:
        """Keep the outcome of a decode leg."""
        if request.instance_id != self.prefill.instance_id:
            self.outcomes.append(request.outcome)
        return common_pb2.ReleaseResponse(released=True)


async def measured(engines: list[Running], num: int) -> list[dict[str, object]]:
    """Run all cases one after the other."""
    server, paired = grpc.aio.server(), Paired(engines)
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(paired, server)
    port = server.add_insecure_port(f"{PLACE}:0")
    await server.start()
    client = HttpClient()
    results: list[dict[str, object]] = []
    with block_serving("gateway", "--scheduler", f"{PLACE}:{port}") as gateway:
        await load_through(client, [gateway], WARM_UP * [request_body(text_of(random.Random(0), 2048))], 4)
        for prompt, num_bytes in PROMPTS.items():
            body = request_body(text_of(random.Random(0), num_bytes))
            for at_a_time in CONCURRENCIES:
                paired.outcomes.clear()
                sample = await load_through(client, [gateway], num * [body], at_a_time)
                results += results_of(f"{prompt}.c{at_a_time}", paired.outcomes, sample)
    client.close()
    await server.stop(None)
    return results


def results_of(case: str, outcomes: list[common_pb2.Outcome], sample: LoadSample) -> Iterator[dict[str, object]]:
    """Summarise one case."""
    hand_over_ms = [1000 * outcome.hand_over_s for outcome in outcomes if outcome.HasField("hand_over_s")]
    if len(hand_over_ms) < len(sample.e2e_ms):
        raise RuntimeError(f"{len(hand_over_ms)} of {len(sample.e2e_ms)} requests had both legs")
    for name, fraction in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        value = quantile(hand_over_ms, fraction)
        yield {"name": f"hand_over_ms.{case}.{name}", "value": value, "unit": "ms", "n": len(hand_over_ms)}
    yield {"name": f"legs_cpu_ms.{case}", "value": sample.cpu_ms(), "unit": "ms", "n": len(sample.e2e_ms)}


if __name__ == "__main__":
    main()
