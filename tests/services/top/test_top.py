"""`block top` on running servers: a gateway that decides in its process, and stub sidecars."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from tests.ports import free_port
from tests.services.cli.running import answer, block, refusal
from tests.services.gateway.stubs import LOCAL, completes
from tests.services.gateway.test_in_process import InProcess, gateway
from tests.services.waiting import run


def flags_of(here: InProcess) -> tuple[str, ...]:
    """The addresses of a gateway."""
    return (
        "--scheduler",
        f"{LOCAL}:{here.scheduler_port}",
        "--metrics",
        str(here.client.base_url),
        "--interval-s",
        "0.2",
    )


def test_one_reading_of_a_cluster() -> None:
    """Instances with what their sidecars report, and rates that fit the requests."""

    async def test() -> None:
        async with gateway(completes, completes) as here:
            here.sidecars[1].load.update(num_running=7, num_waiting=2)

            async def requests() -> None:
                while True:
                    assert (await here.post()).status_code == 200

            busy = asyncio.create_task(requests())
            try:
                found: dict[str, Any] = await asyncio.to_thread(answer, "top", "--once", *flags_of(here))
                shown = await asyncio.to_thread(block, "top", "--once", *flags_of(here))
            finally:
                busy.cancel()
        assert found["policy"] == "block"
        assert found["problems"] == []
        one, other = found["instances"]
        assert (one["instance"], one["state"], other["instance"]) == ("a", "ready", "b")
        assert (other["running"], other["waiting"]) == (7, 2)
        assert found["decisions_per_s"] > 0
        assert found["requests_per_s"] > 0
        assert found["errors_per_s"] == 0
        assert (one["requests_per_s"] or 0) + (other["requests_per_s"] or 0) > 0
        assert shown.returncode == 0
        assert "\x1b" not in shown.stdout
        assert "2 of 2 instances ready" in shown.stdout

    run(test)


def test_readings_follow_each_other_as_json_lines() -> None:
    """Each is an object on a line of its own."""

    async def test() -> None:
        async with gateway(completes) as here:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "services.cli", "top", "--json", *flags_of(here), stdout=asyncio.subprocess.PIPE
            )
            assert process.stdout is not None
            try:
                lines = [json.loads(await process.stdout.readline()) for _ in range(3)]
            finally:
                process.kill()
                await process.wait()
            assert [len(line["instances"]) for line in lines] == [1, 1, 1]

    run(test)


def test_an_instance_that_is_away_and_metrics_that_are_none() -> None:
    """The others are shown, and what is missing is named."""

    async def test() -> None:
        async with gateway(completes, completes) as here:
            await here.sidecars[0].stop()
            away = f"http://{LOCAL}:{free_port()}"
            found = await asyncio.to_thread(
                answer, "top", "--once", "--scheduler", f"{LOCAL}:{here.scheduler_port}", "--metrics", away
            )
        assert [one["state"] for one in found["instances"]] == ["unknown", "ready"]
        assert found["decisions_per_s"] is None
        (problem,) = found["problems"]
        assert problem.startswith(f"metrics of {away}: ")

    run(test)


def test_no_cluster() -> None:
    """One line says what was asked for."""
    address = f"{LOCAL}:{free_port()}"
    assert f"scheduler {address}: UNAVAILABLE" in refusal("top", "--once", "--scheduler", address)
    assert "metrics: " in refusal("top", "--metrics", "nowhere")
    assert "scheduler" in refusal("top", "--scheduler", "nowhere")
