"""`block demo`: a small comparison of policies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from services.cluster.demo import MAX_TOKENS, DemoSettings, plan_of
from tests.services.cli.running import refusal
from tests.services.waiting import PATIENCE_S, PATIENT_SERVERS

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]  # one at a time: each starts a dozen processes

BLOCK = str(Path(sys.executable).with_name("block"))
TINY = ("-n", "2", "--rate", "4", "--seconds", "3", "--speed", "20", "--policy", "block", "--policy", "round_robin")


def test_a_tiny_demo() -> None:
    """Every request completes by each policy, on both instances, with the planned length and a forecast."""
    done = subprocess.run(
        [BLOCK, "demo", "--json", *TINY], capture_output=True, text=True, check=False, timeout=4 * PATIENCE_S,
        env={**os.environ, **PATIENT_SERVERS},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["settings"]["policies"] == ["block", "round_robin"]
    planned = plan_of(DemoSettings(instances=2, rate=4, seconds=3, speed=20))
    assert len(planned) == 12
    for total in answer["policies"].values():
        assert (total["num_ok"], total["num_failed"]) == (12, 0)
        assert total["forecast_error"]["e2e_s"]["median"] >= 0
        assert sum(total["instances"].values()) == 12
        assert 0 < total["ttft_s"]["p50"] <= total["e2e_s"]["p50"]
    assert sorted(answer["policies"]["round_robin"]["instances"].values()) == [6, 6]


def test_a_demo_that_stays() -> None:
    """After the table the live page is still served, and traffic goes on; Ctrl-C ends it as a success."""
    flags = ("--stay", "-n", "2", "--rate", "4", "--seconds", "3", "--speed", "20", "--policy", "block")
    with subprocess.Popen(
        [BLOCK, "demo", *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **PATIENT_SERVERS},
    ) as process:  # fmt: skip
        assert process.stderr is not None
        assert process.stdout is not None
        lines = iter(process.stderr.readline, "")
        url = next(line for line in lines if line.startswith("live page of block: ")).split()[-1]
        assert any("stays up" in line for line in lines)
        assert "Block" in httpx.get(url, timeout=PATIENCE_S).text
        process.send_signal(signal.SIGINT)
        assert "block" in process.stdout.read()
        assert process.wait(PATIENCE_S) == 0


def test_the_traffic_is_the_same_for_the_same_seed() -> None:
    """Policies are compared by the same requests, whose lengths are limited."""
    assert plan_of(DemoSettings(seed=3)) == plan_of(DemoSettings(seed=3)) != plan_of(DemoSettings(seed=4))
    assert max(one.output_tokens for one in plan_of(DemoSettings())) <= MAX_TOKENS


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rate", "0"), "rate: must be above 0"),
        (("--seconds", "nan"), "seconds: must be above 0"),
        (("--speed", "1000"), "speed: must be above 0 and at most 100"),
        (("-n", "0"), "instances: must be a whole number"),
        (("--policy", "blok"), "did you mean block?"),
        (("--profile", "nobody"), "nobody"),
    ],
)
def test_bad_flags(flags: tuple[str, ...], message: str) -> None:
    """The error is one line that names the flag, and nothing is started."""
    assert message in refusal("demo", *flags)
