"""Schedulers and gateways that find their instances in Kubernetes, as processes."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.block.v1 import scheduler_pb2
from protos.envoy.v3 import external_processor_pb2_grpc
from services.endpoint_picker.server import serving
from services.endpoint_picker.settings import PickerSettings
from services.instances.settings import InstanceSourceSettings
from services.kubernetes.settings import KubernetesSettings
from services.placement.settings import SchedulerSettings
from services.rpc.settings import ServerSettings
from tests.services.cli.running import refusal
from tests.services.endpoint_picker.running import Proxy, chosen, completion, head
from tests.services.gateway.test_process import gateway
from tests.services.kubernetes.api_server import OBJECTIVES, PODS, POOLS, Cluster, api_server, pod, pool
from tests.services.scheduler_server.test_command import served
from tests.services.stub_engines import StubEngine, engines
from tests.services.stub_sidecars import StubSidecar, sidecars
from tests.services.waiting import PATIENCE_S, PATIENT_SERVERS, run, until

FROM = ("--instances-from", "kubernetes", "--pool-namespace", "llm", "--pool-name", "chat")


def pod_of(stub: StubSidecar, engine: StubEngine | None = None, *, ready: bool = True) -> dict[str, Any]:
    """The pod of a stub sidecar, and of an engine where the port matters."""
    port = int(engine.url.rpartition(":")[2]) if engine is not None else 8000
    note = {"block-serving/sidecar": str(stub.port)}
    return pod(stub.name, "127.0.0.1", ready=ready, annotations=note, ports=(port,))


def test_a_scheduler_is_ready_while_it_has_ready_pods() -> None:
    """Its health says so; a pod that stops being ready gets no request from then on."""

    async def test() -> None:
        kube = Cluster()
        with api_server(kube) as url:
            async with sidecars("a", "b") as (a, b), served([], *FROM, "--kubernetes-api", url) as running:
                health: Any = health_pb2_grpc.HealthStub(running.channel)

                async def status_is(expected: str) -> bool:
                    """Whether the service reports a status; the process itself always lives."""
                    process = await health.Check(health_pb2.HealthCheckRequest())
                    assert process.status == health_pb2.HealthCheckResponse.SERVING
                    reply = await health.Check(health_pb2.HealthCheckRequest(service="block.v1.Scheduler"))
                    return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status) == expected

                async def instances_are(*names: str) -> bool:
                    reply = await running.client.stub.ListInstances(scheduler_pb2.ListInstancesRequest())
                    return [one.instance_id for one in reply.instances] == list(names)

                assert await status_is("NOT_SERVING")
                kube.put(PODS, pod_of(a, ready=False))
                kube.put(PODS, pod_of(b))
                kube.put(POOLS, pool())
                await until(lambda: status_is("SERVING"))
                assert await instances_are("b")
                assert await running.client.choose() == "b"
                kube.put(PODS, pod_of(a))
                await until(lambda: instances_are("a", "b"))
                kube.put(PODS, pod_of(b, ready=False))
                await until(lambda: instances_are("a"))
                assert {await running.client.choose() for _ in range(5)} == {"a"}
                kube.delete(PODS, "a")
                await until(lambda: status_is("NOT_SERVING"))
                with pytest.raises(grpc.aio.AioRpcError, match="no instance is known"):
                    await running.client.choose()
                kube.delete(POOLS, "chat")
                assert "stopped" in await running.end()

    run(test)


def test_a_gateway_serves_a_pool_and_its_objectives() -> None:
    """It is not ready without pods; an InferenceObjective is asked for by the header of the Gateway API extension."""

    async def test() -> None:
        kube = Cluster()
        objective = {"metadata": {"name": "gold"}, "spec": {"poolRef": {"name": "chat"}, "priority": 7}}
        kube.put(OBJECTIVES, objective)
        with api_server(kube) as url:
            flags = ("--decide", "in-process", "--pass-objective-priority", *FROM, "--kubernetes-api", url)
            async with (
                engines(1) as (engine,), sidecars("a") as (stub,),
                gateway(*flags, **PATIENT_SERVERS) as (_, port), httpx.AsyncClient(timeout=60) as client,
            ):  # fmt: skip
                base = f"http://127.0.0.1:{port}"
                assert (await client.get(f"{base}/ready")).status_code == 503
                kube.put(POOLS, pool(ports=(int(engine.url.rpartition(":")[2]),)))
                kube.put(PODS, pod_of(stub, engine))

                async def is_ready() -> bool:
                    return (await client.get(f"{base}/ready")).status_code == 200

                await until(is_ready)
                asking = {"model": "m", "prompt": "Say hello", "stream": True}
                for name, expected in (("gold", 200), ("golden", 400)):
                    headers = {"x-gateway-inference-objective": name}
                    reply = await client.post(f"{base}/v1/completions", json=asking, headers=headers)
                    assert reply.status_code == expected, reply.text
                assert "golden" in reply.text
                assert engine.bodies[-1]["priority"] == -7

    run(test)


def test_a_picker_serves_a_pool() -> None:
    """It is ready while there is a ready pod, names pods by address and port, and knows the pool's objectives."""

    async def test() -> None:
        kube = Cluster()
        kube.put(OBJECTIVES, {"metadata": {"name": "gold"}, "spec": {"poolRef": {"name": "chat"}, "priority": 7}})
        with api_server(kube) as url:
            settings = KubernetesSettings(pool_name="chat", pool_namespace="llm", kubernetes_api=url)
            source = InstanceSourceSettings(instances_from="kubernetes", kubernetes=settings).source()
            async with (
                sidecars("a") as (stub,),
                serving(
                    PickerSettings(secure_serving=False, schedule_s=PATIENCE_S), ServerSettings(drain_s=0.0),
                    SchedulerSettings(scheduler_id="own", sidecar_deadline_s=PATIENCE_S), source,
                ) as running,
                grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel,
            ):  # fmt: skip
                health: Any = health_pb2_grpc.HealthStub(channel)

                async def status_is(expected: str) -> bool:
                    reply = await health.Check(health_pb2.HealthCheckRequest(service="readiness"))
                    return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status) == expected

                assert await status_is("NOT_SERVING")
                kube.put(POOLS, pool())
                kube.put(PODS, pod_of(stub))
                await until(lambda: status_is("SERVING"))
                await until(lambda: "gold" in source.objectives())
                proxy = Proxy(call=external_processor_pb2_grpc.ExternalProcessorStub(channel).Process())
                await proxy.send_headers(head(x_gateway_inference_objective="gold"))
                await proxy.send_body(completion())
                assert chosen(await proxy.read()) == ["127.0.0.1:8000"]
                (reservation,) = stub.held.values()
                assert reservation.request.priority == -7
                proxy.call.cancel()
                kube.put(PODS, pod_of(stub, ready=False))
                await until(lambda: status_is("NOT_SERVING"))

    run(test)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--instances-from", "kubernetes"], "pool_name: give one of --pool-name and --endpoint-selector"),
        (["--pool-name", "chat"], "instances: give one of"),
        (["--instances-dns", "n:1:2", "--pool-name", "chat"], "instances_from: must be kubernetes"),
        (["--instances-from", "kubernetes", "--endpoint-selector", "app=x"], "endpoint_target_ports: goes with"),
        (
            ["--instances-from", "kubernetes", "--endpoint-selector", "app", "--endpoint-target-ports", "1"],
            "endpoint_selector: 'app' must be LABEL=VALUE",
        ),
        (
            ["--instances-from", "kubernetes", "--endpoint-selector", "a=b", "--endpoint-target-ports", "x"],
            "endpoint_target_ports: 'x' is no port",
        ),
        ([*FROM, "--kubernetes-api", "ftp://x"], "kubernetes_api: 'ftp://x': must be a URL"),
        (
            [*FROM, "--kubernetes-api", "http://x", "--kubernetes-token-file", "/no/file"],
            "kubernetes_token_file: /no/file",
        ),
        (FROM, "kubernetes_api: is missing"),
    ],
)
def test_settings_that_follow_nothing_are_refused(flags: list[str], named: str) -> None:
    """One line names the flag."""
    assert named in refusal("serve", "scheduler", *flags, KUBERNETES_SERVICE_HOST="")
