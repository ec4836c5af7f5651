"""The bench beside other routers: its results, the routers that it skips, and a short run without peers."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from scripts import bench_peers, peers
from scripts.bench_peers import ROWS, Way, World, results_of, sent, table_of, way_through
from scripts.bench_requests import FIRST_MS, NUM_EVENTS, request_body
from scripts.load_client import LoadSample, load
from scripts.processes import Running, stand_in, started
from scripts.stub_engine import small_answer, tokens_of
from services.http.client import HttpClient
from tests.services.waiting import PATIENT_SERVERS, run, wait_until

SCRIPT = Path(bench_peers.__file__)
TIMER_MS = 1  # uvloop counts whole milliseconds from the start of a turn of the loop: timers may be that early


def sample(ttft_ms: float, *, num: int = 10, wall_s: float = 1.0, cpu_s: float = 0.0) -> LoadSample:
    """Some requests that took the same time."""
    return LoadSample(ttft_ms=num * [ttft_ms], e2e_ms=num * [2 * ttft_ms], wall_s=wall_s, cpu_s=cpu_s)


def values_of(results: Sequence[dict[str, object]]) -> dict[str, object]:
    """Return the numbers by name."""
    return {str(result["name"]): result["value"] for result in results}


def test_numbers_are_medians_over_rounds_of_what_each_round_gave() -> None:
    """Added times are those of one round; processor time is per request."""
    direct = Way(name="direct", at_once=[sample(1, wall_s=0.1)] * 3, paced=[sample(40), sample(50), sample(41)])
    routed = Way(
        name="scheduler-lmetric",
        at_once=[sample(1, cpu_s=0.02, wall_s=0.5), sample(1, cpu_s=0.04), sample(1, cpu_s=0.9, wall_s=9)],
        paced=[sample(43, cpu_s=0.01), sample(55, cpu_s=0.02), sample(42, cpu_s=0.03)],
    )  # adds 3, 5 and 1 ms
    results = list(results_of(direct, [routed]))
    values = values_of(results)
    assert values["added_ttft_ms.scheduler-lmetric.p50"] == pytest.approx(3)
    assert values["added_ttft_ms.scheduler-lmetric.p99"] == pytest.approx(3)
    assert values["cpu_ms_per_request.scheduler-lmetric"] == pytest.approx(4)
    assert values["cpu_ms_per_request.scheduler-lmetric.paced"] == pytest.approx(2)
    assert values["requests_per_s.scheduler-lmetric"] == pytest.approx(10)
    assert values["requests_per_s.direct"] == pytest.approx(100)
    assert values["ttft_ms.direct.p50"] == pytest.approx(41)
    assert {result["n"] for result in results} == {30}


def test_the_table_has_a_row_for_each_router() -> None:
    """Every row has all cells."""
    ways = [Way(name=name, at_once=[sample(1, cpu_s=0.02)], paced=[sample(43)]) for name in ROWS]
    direct = Way(name="direct", at_once=[sample(1)], paced=[sample(40)])
    lines = list(table_of(list(results_of(direct, ways)), list(ROWS)))
    assert len(lines) == 3 + len(ROWS)
    assert len({line.count("|") for line in lines}) == 1
    assert lines[3] == "| gateway + scheduler, lmetric | 2.00 | 0.00 | 3.00 | 3.00 | 10 |"


def world(**arguments: object) -> World:
    """Return the engines and options of a run, with the command line's defaults."""
    options = {"install": False, "production_stack": "", "engines_per_sidecar": 16, **arguments}
    return World(engines=["http://127.0.0.1:1"] * bench_peers.NUM_ENGINES, arguments=argparse.Namespace(**options))


def test_a_gateway_that_cannot_decide_is_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway's help has no such flag."""
    monkeypatch.setattr(bench_peers, "gateway_help", lambda: "  --scheduler TEXT  host:port of a scheduler")
    with ExitStack() as stack:
        way = way_through("in-process-block", world(), stack)
    assert way.failure == "block serve gateway does not know --decide"
    assert not way.router


def test_a_gateway_that_can_decide_gets_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the policy and all instances."""
    commands: list[tuple[str, ...]] = []

    @contextmanager
    def serving(*command: str) -> Iterator[str]:
        commands.append(command)
        yield "a gateway"

    monkeypatch.setattr(bench_peers, "gateway_help", lambda: "  --decide [scheduler|in-process]  Where.")
    monkeypatch.setattr(bench_peers, "block_serving", serving)
    with ExitStack() as stack:
        way = way_through("in-process-lmetric", world(), stack)
        assert (way.failure, way.router) == ("", ["a gateway"])
    (command,) = commands
    assert command[:5] == ("gateway", "--decide", "in-process", "--policy", "lmetric")
    assert [flag.split("=", 2)[:2] for flag in command[5:]] == [["--instance", f"i{place}"] for place in range(4)]


def test_a_peer_that_cannot_be_installed_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The reason names the remedy."""
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    with ExitStack() as stack:
        way = way_through("production-stack-roundrobin", world(), stack)
    assert "not on PyPI" in way.failure


def test_a_peer_that_ends_at_once_is_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The last line of its log is reported."""
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    program = tmp_path / "vllm-router" / "bin" / "vllm-router"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho no such flag >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(peers, "installed_version", lambda _: peers.RUST_ROUTER_VERSION)
    with ExitStack() as stack:
        way = way_through("vllm-router-cache_aware", world(), stack)
    assert way.failure == "ended with status 3: no such flag"


def test_a_router_that_fails_under_load_gets_no_more_requests() -> None:
    """The error and the exit status are reported."""

    async def test() -> None:
        with started([sys.executable, "-c", "raise SystemExit(5)"]) as process:
            process.wait()
            way = Way(name="vllm-router-random", router=[Running(process=process, port=1)])
            client = HttpClient()
            assert await sent(client, world(), way, [request_body("a")], 1) == []
            assert way.failure.endswith("it ended with status 5")
            assert await sent(client, world(), way, [request_body("a")], 1) == []
            client.close()

    run(test)


def test_processor_time_is_that_of_children_too() -> None:
    """A router may have workers."""
    burn = "import time\nwhile time.process_time() < 0.6: pass\n"
    parent = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {burn + 'time.sleep(600)'!r}])\n"
    with started(
        [sys.executable, "-c", parent + "print(flush=True); time.sleep(600)"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        running = Running(process=process, port=0)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        wait_until(lambda: running.cpu_s() >= 0.3)
        for child in children:
            os.kill(int(child), 9)


def test_the_stand_in_engine_answers_as_vllm_does() -> None:
    """Health, tokens, and 404 for what is off by default."""
    assert small_answer(b"/health", b"").startswith(b"HTTP/1.1 200")
    assert small_answer(b"/v1/completions/render", b"{}").startswith(b"HTTP/1.1 404")
    head, _, body = small_answer(b"/tokenize", json.dumps({"prompt": "abcdabcde"}).encode()).partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head
    assert json.loads(body)["count"] == 3
    assert tokens_of(b"abcdefgh")[:1] == tokens_of(b"abcdxyz")[:1]
    assert tokens_of(b"") == []


def test_the_client_takes_whole_streams_from_the_stand_in() -> None:
    """At once and at a pace."""

    async def test() -> None:
        with stand_in("engine") as engine:
            client = HttpClient()
            bodies = [request_body("a prompt"), request_body("a prompt", FIRST_MS, 5)]
            seen = await load(client, [engine.url], bodies, 2)
            client.close()
        assert len(seen.ttft_ms) == len(seen.e2e_ms) == 2
        assert max(seen.ttft_ms) >= FIRST_MS - TIMER_MS
        assert max(seen.e2e_ms) >= FIRST_MS - TIMER_MS + (5 - TIMER_MS) * (NUM_EVENTS - 1)

    run(test)


def test_an_answer_that_is_no_stream_is_an_error() -> None:
    """Nothing is measured of a router that refuses."""

    async def test() -> None:
        with stand_in("engine") as engine:
            client = HttpClient()
            with pytest.raises(RuntimeError, match="status 404"):
                await load(client, [f"{engine.url}/nowhere"], [request_body("a prompt")], 1)
            client.close()

    run(test)


@pytest.mark.xdist_group("cluster")  # as many processes
def test_a_short_run() -> None:
    """The gateway before a scheduler, beside engines asked directly."""
    few = ["--rounds", "1", "--requests", "40", "--paced-requests", "8", "--row", "scheduler-lmetric"]
    done = subprocess.run(
        [sys.executable, SCRIPT, "--json", *few],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **PATIENT_SERVERS, "PYTHONPATH": str(SCRIPT.parents[1])},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["bench"], report["skipped"], report["versions"]) == ("peers", {}, {})
    values = values_of(report["results"])
    assert set(values) == {
        "ttft_ms.direct.p50",
        "ttft_ms.direct.p99",
        "requests_per_s.direct",
        "cpu_ms_per_request.scheduler-lmetric",
        "cpu_ms_per_request.scheduler-lmetric.paced",
        "added_ttft_ms.scheduler-lmetric.p50",
        "added_ttft_ms.scheduler-lmetric.p99",
        "requests_per_s.scheduler-lmetric",
    }
    assert values["ttft_ms.direct.p50"] >= FIRST_MS - TIMER_MS
    assert values["requests_per_s.scheduler-lmetric"] > 0
