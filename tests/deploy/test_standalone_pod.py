"""The pod of mode standalone as the chart describes it: its Envoy and its picker run, and find an engine's pod."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from scripts.envoy import ENVOY
from tests.deploy.helm_chart import CHART, LABELS, command_line, containers, helm, merged, need_helm, of_kind
from tests.ports import free_port
from tests.services.gateway.stubs import engines, streams
from tests.services.kubernetes.api_server import PODS, Cluster, api_server, pod
from tests.services.stub_sidecars import sidecars
from tests.services.waiting import LIMIT_S, run, until

BLOCK = str(Path(sys.executable).with_name("block"))
PATIENT = ("--sidecar-deadline-ms=60000", "--schedule-s=25")  # the configuration's message_timeout is 80 s


@pytest.mark.envoy
@pytest.mark.parametrize("configuration", ["override_host", "original_dst"])
@pytest.mark.parametrize("tls", [True, False])
def test_the_pod_serves(configuration: str, tls: bool, tmp_path: Path) -> None:
    """A request through Envoy reaches the pod that is ready; without any, the answer says so."""
    need_helm()
    if not ENVOY.exists():
        pytest.skip("Envoy is not installed: make envoy")

    async def test() -> None:
        kube = Cluster()
        async with AsyncExitStack() as stack:
            (engine,) = await stack.enter_async_context(engines(streams))
            (stub,) = await stack.enter_async_context(sidecars("chat-0"))
            url = stack.enter_context(api_server(kube))
            target = engine.port
            port, values = free_port(), standalone(target, configuration, tls)
            values["router"]["proxy"]["port"] = port
            items = rendered(values)
            (file, process) = commands(items, tmp_path, url)
            for command in (process, [str(ENVOY), "-c", str(file), "--use-dynamic-base-id", "--log-level", "warning"]):
                log = stack.enter_context((tmp_path / f"{Path(command[0]).name}.log").open("w"))
                running = await asyncio.create_subprocess_exec(
                    *command, env={**os.environ, "POD_NAME": "picker-0"}, stdout=log, stderr=log
                )
                stack.push_async_callback(ended, running)
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=LIMIT_S))

            async def status_is(expected: int) -> bool:
                body = {"model": "m", "prompt": "Say hello", "stream": True}
                try:
                    reply = await client.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
                except httpx.TransportError:
                    return False  # Envoy is starting
                return reply.status_code == expected and (expected != 200 or b"Hello" in reply.content)

            note = {"block-serving/sidecar": str(stub.port)}
            kube.put(PODS, pod("chat-0", "127.0.0.1", annotations=note, ports=(target,), ready=False))
            if configuration == "original_dst":  # the other one goes on without the picker, which is not ready
                await until(lambda: status_is(503), LIMIT_S / 2)
                assert engine.calls == []
            kube.put(PODS, pod("chat-0", "127.0.0.1", annotations=note, ports=(target,)))

            async def is_placed() -> bool:
                return await status_is(200) and bool(stub.reserved_ids)

            await until(is_placed, LIMIT_S / 2)

    run(test)


async def ended(process: asyncio.subprocess.Process) -> None:
    """End a process; it has to be running."""
    assert process.returncode is None
    process.kill()
    await process.wait()


def standalone(target: int, configuration: str, tls: bool) -> dict[str, Any]:
    """Return values with ports that are free here."""
    ports = {"extProcPort": free_port(), "grpcHealthPort": free_port(), "metricsPort": free_port()}
    router = {
        "modelServers": {"targetPorts": [{"number": target}]}, "epp": {**ports, "secureServing": tls},
        "proxy": {"configuration": configuration},
    }  # fmt: skip
    return merged(LABELS, {"mode": "standalone", "tagger": {"enabled": False}, "router": router})


def rendered(values: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Render the chart."""
    done = helm("template", "chat", str(CHART), "--namespace", "llm", values=values)
    assert done.returncode == 0, done.stderr
    return tuple(item for item in yaml.safe_load_all(done.stdout) if item)


def commands(items: tuple[dict[str, Any], ...], folder: Path, url: str) -> tuple[Path, list[str]]:
    """Write Envoy's configuration, whose Service is this machine, and return the picker's command line."""
    text = of_kind(items, "ConfigMap")["chat-block-envoy"]["data"]["envoy.yaml"]
    text = text.replace("chat-block-engines.llm.svc.cluster.local", "127.0.0.1").replace("19000", str(free_port()))
    file = folder / "envoy.yaml"
    file.write_text(text)
    (picker,) = (one for one in containers(items) if one["name"] == "picker")
    return file, [BLOCK, *command_line(picker), f"--kubernetes-api={url}", *PATIENT]
