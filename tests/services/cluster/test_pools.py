"""Clusters with prefill and decode engines: their names, roles and connectors, and engines that differ."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.cluster import Child, Cluster, ClusterSettings, VllmSettings, running, write_instances
from services.cluster.engines import engines_of
from services.cluster.pools import CONNECTOR_FLAG, pass_blocks_on, planned_engines
from services.cluster.programs import VllmServer
from services.instances.instance import instances_from_file
from tests.services.cli.running import refusal
from tests.services.http_stand_in import StandInHandler, serving
from tests.services.waiting import PATIENCE_S

NIXL_IS_MISSING = """\
(Worker pid=9) ERROR 11-21 12:22:15 [multiproc_executor.py:842] RuntimeError: NIXL is not available
(EngineCore pid=7) ERROR 11-21 12:22:15 [core.py:1510] Exception: WorkerProc initialization failed due to an exception
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_engines_are_named_by_their_roles() -> None:
    """Those without a role of their own can take part in both legs; without pools there is no connector."""
    engines = planned_engines(2, 1, 1)
    assert [(one.name, one.role, one.kv_role) for one in engines] == [
        ("prefill-0", "prefill", "kv_producer"),
        ("prefill-1", "prefill", "kv_producer"),
        ("decode-0", "decode", "kv_consumer"),
        ("engine-0", "both", "kv_both"),
    ]
    assert [(one.name, one.role, one.kv_role) for one in planned_engines(0, 0, 1)] == [("engine-0", "both", "")]
    assert len(ClusterSettings().engines) == 4
    assert len(ClusterSettings(prefill=2, decode=3).engines) == 5
    assert len(ClusterSettings(prefill=2, instances=3).engines) == 5


BAD_FLAGS = (
    (["--prefill", "2"], "decode: must be at least 1 with prefill"),
    (["--prefill", "2", "-n", "0"], "decode: must be at least 1 with prefill"),
    (["--prefill", "-1", "--decode", "1"], "prefill: must be a whole number from 0"),
    (["--decode", "1", "-n", "256"], "instances: 257 with prefill and decode are more than 256"),
    (["--prefill", "1", "--decode", "1", "--provision", "1-2"], "provision: goes without prefill and decode"),
)


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS)
def test_bad_flags(flags: list[str], message: str) -> None:
    """The error is one line, and nothing is started."""
    assert message in refusal("up", *flags)


def test_vllm_gets_a_connector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine has its part and a side channel of its own; an own --kv-transfer-config counts instead."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    files = [tmp_path / "prefill-0.state", tmp_path / "decode-0.state"]

    def programs(vllm: VllmSettings) -> list[Any]:
        settings = ClusterSettings(prefill=1, decode=1, vllm=vllm, host="0.0.0.0", insecure=True)  # noqa: S104
        return [engine._program for engine in engines_of(settings, (), files, None)]

    on_gpus = programs(VllmSettings(model="m", devices=("4", "5"), arguments=("--dtype", "half")))
    ports = {program.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] for program in on_gpus}
    assert len(ports) == 2
    assert {program.environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] for program in on_gpus} == {"127.0.0.1"}
    assert not any("UCX_TLS" in program.environment for program in on_gpus)  # the environment's own counts
    for program, role in zip(on_gpus, ("kv_producer", "kv_consumer"), strict=True):
        assert program.arguments[0] == CONNECTOR_FLAG
        assert json.loads(program.arguments[1]) == {"kv_connector": "NixlConnector", "kv_role": role}
        assert "BLOCK_NIXL_ON_CPU" not in program.environment

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    on_cores = programs(VllmSettings(model="m"))
    assert [json.loads(program.arguments[1])["kv_buffer_device"] for program in on_cores] == ["cpu", "cpu"]
    assert {program.environment["BLOCK_NIXL_ON_CPU"] for program in on_cores} == {"1"}

    for own in (f"{CONNECTOR_FLAG}={{}}", f"{CONNECTOR_FLAG}.kv_connector=NixlConnector"):
        assert [program.arguments for program in programs(VllmSettings(model="m", arguments=(own,)))] == [(own,)] * 2


def test_a_missing_nixl_is_one_line_with_the_remedy() -> None:
    """The line says what to install and where."""
    program = VllmServer(command="vllm", model="m", host="::", arguments=(), environment={})
    assert program.error_in(NIXL_IS_MISSING.splitlines()) == (
        "RuntimeError: NIXL is not available; install it in vLLM's environment: pip install nixl"
    )


def answering(version: str, model: str = "m", files: str = "/m") -> AbstractContextManager[str]:
    """Run an engine that only says what it is; the context value is its URL."""
    replies = {"/version": {"version": version}, "/v1/models": {"data": [{"id": model, "root": files}]}}

    class Handler(StandInHandler):
        def do_GET(self) -> None:
            self.answer(json.dumps(replies[self.path]).encode())

    return serving(Handler)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"version": "0.32.0"}, ""),
        ({"version": "0.31.1"}, "p has version 0.32.0 and model m (/m), d has version 0.31.1 and model m (/m): "),
        ({"version": "0.32.0", "files": "/n"}, "p has version 0.32.0 and model m (/m), d has version 0.32.0 and "),
    ],
)
def test_engines_that_differ_serve_whole_requests(
    other: dict[str, str], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says which differ in what, and what is served meanwhile."""
    with caplog.at_level(logging.WARNING), answering("0.32.0") as first, answering(**other) as second:
        assert asyncio.run(pass_blocks_on({"p": first, "d": second})) == (not reason)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (1 if reason else 0)
    assert all(
        line.startswith(reason) and line.endswith("; every engine serves whole requests meanwhile") for line in lines
    )


@pytest.mark.parametrize("legs_apart", [True, False])
def test_the_list_of_instances_has_roles_only_where_they_work(tmp_path: Path, legs_apart: bool) -> None:
    """Otherwise every instance has both, so that requests are served whole."""
    settings = ClusterSettings(prefill=1, decode=1)
    children = {
        name: Child(name, port=number) for number, name in enumerate(("prefill-0", "decode-0", "predictor-0"), 1)
    }
    cluster = Cluster(settings=settings, folder=tmp_path, children=children, legs_apart=legs_apart)
    write_instances(cluster)
    roles = [one.role for one in instances_from_file(str(cluster.instances_file))]
    assert roles == (["prefill", "decode"] if legs_apart else ["both", "both"])


def test_an_engine_that_does_not_say_what_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """It counts as different."""
    with caplog.at_level(logging.WARNING):
        assert asyncio.run(pass_blocks_on({"p": "http://127.0.0.1:1", "d": "http://127.0.0.1:1"})) is False
    assert len(caplog.records) == 1


@pytest.mark.slow
@pytest.mark.xdist_group("cluster")
def test_emulated_pools_serve(tmp_path: Path) -> None:
    """The list of instances has their roles, and a request is answered."""
    tables = tmp_path / "cluster.toml"
    tables.write_text("[engine]\nspeed = 8.0\nserved-model-name = 'tiny'\n[gateway]\nschedule-s = 60.0\n")
    settings = ClusterSettings(prefill=1, decode=2, port=0, tables_file=str(tables))

    async def test() -> None:
        async with running(settings) as cluster, httpx.AsyncClient(timeout=2 * PATIENCE_S) as client:
            listed = {one.instance_id: one.role for one in instances_from_file(str(cluster.instances_file))}
            assert listed == {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
            assert kv_roles(cluster) == ["kv_producer", "kv_consumer", "kv_consumer"]
            answer = await client.post(
                f"{cluster.gateway_urls['block']}/v1/completions",
                json={"model": "tiny", "prompt": "one two three four " * 40, "max_tokens": 5, "ignore_eos": True},
            )
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 5

    asyncio.run(test())


def kv_roles(cluster: Cluster) -> list[str]:
    """Return the parts that the engines' processes were started with."""
    roles = []
    for engine in cluster.settings.engines:
        words = Path(f"/proc/{cluster.children[engine.name].pid}/cmdline").read_text().split("\0")
        roles.append(words[words.index("--kv-role") + 1])
    return roles
