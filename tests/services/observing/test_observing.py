"""Windows of emulated engines: by the state file, by a proxy, by a load of its own, and from a recording."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from services.cli.accuracy import profile_of
from services.http.origin import origin_of
from services.observing.observing import observe_proxy, observe_state_file, reported_settings
from services.observing.state_file import StateFileObservation
from services.observing.window_writing import write_window
from services.predictor_server.settings import MirrorSettings
from simulator.accuracy.accuracy import accuracy_of
from simulator.accuracy.window import ObservedWindow
from simulator.accuracy.window_file import read_window
from tests.services.cli.running import answer, block, refusal
from tests.services.emulator.running import A30, MODEL, Emulated
from tests.services.observing.traffic_of_engines import CONFIG, SPEED, engine_at, plan_of, send_all, sending, sending_on
from tests.services.waiting import PATIENCE_S, wait_until

SIZES = ("max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks", "max_model_len", "block_size")
FLAGS = ("--max-num-seqs", "16", "--max-num-batched-tokens", "512")


def wait_for_traffic(engine: Emulated) -> None:
    """Wait until the engine runs requests."""
    wait_until(lambda: engine.driver.gauges().num_running)


def observed_under_load(folder: Path, factor: float, num: int = 80) -> ObservedWindow:
    """Observe an engine from the middle of its traffic to the end."""
    with engine_at(folder, factor) as (engine, url), sending(url, plan_of(num)) as load:
        wait_for_traffic(engine)
        observation = StateFileObservation(str(engine.state_file))
        try:
            while load.is_alive():
                load.join(0.01)
                observation.poll()
            observation.poll()
            return observation.window(profile=A30)
        finally:
            observation.close()


def test_the_state_file_shows_everything_that_the_replay_needs(tmp_path: Path) -> None:
    """From the middle of the traffic on: with the true profile the replay is what happened."""
    window = observed_under_load(tmp_path, 1.0)
    assert window.state is not None
    assert window.state.running
    assert all(getattr(window.header.engine, name) == getattr(CONFIG, name) for name in SIZES)
    assert (window.header.clock_rate, window.header.model) == (SPEED, MODEL)
    found = accuracy_of(window, A30)
    assert len(found.measured) > 40
    for one in found.errors:
        assert one.median < 0.01, one
    assert found.steps[0].bias == pytest.approx(0.0, abs=1e-6)
    assert found.holds(0.05) is True
    assert found.recalibration is not None
    assert found.recalibration.changes == ()


def test_a_profile_that_is_wrong_by_a_factor_is_found_and_repaired(tmp_path: Path) -> None:
    """By the commands: the errors, the recalibrated profile, the page, and the exit status."""
    window = observed_under_load(tmp_path, 1.3)
    path = tmp_path / "w.jsonl"
    write_window(window, path)
    assert read_window(str(path)).requests == window.requests
    better, page = tmp_path / "better.json", tmp_path / "report.html"
    report = answer("accuracy", str(path), "-o", str(better), "--html", str(page))
    assert report["holds"] is False
    assert report["steps"]["all"]["bias"] == pytest.approx(1 / 1.3 - 1, abs=1e-3)
    assert report["recalibration"]["constants"]["factor"]["change"] == pytest.approx(0.3, abs=1e-3)
    assert "<svg" in page.read_text()
    assert block("accuracy", str(path), "--check").returncode == 1
    again = answer("accuracy", str(path), "--profile", str(better), "--check")
    assert again["holds"] is True
    assert all(one["median"] < 0.01 for one in again["errors"].values())


def test_one_command_observes_and_compares(tmp_path: Path) -> None:
    """`block observe` writes a window of an engine; `block accuracy --state-file` needs none."""
    with engine_at(tmp_path, 1.0) as (engine, url), sending_on(url):
        wait_for_traffic(engine)
        file = str(tmp_path / "w.jsonl")
        about = answer("observe", "--state-file", str(engine.state_file), "--duration", "0.5s", "-o", file)
        assert about["num_steps"] > 0
        assert read_window(file).header.profile == A30.name
        report = answer("accuracy", "--state-file", str(engine.state_file), "--duration", "0.5s", "--no-recalibrate")
        assert report["profile"] == A30.name
        assert report["recalibration"] is None


def test_a_proxy_observes_any_endpoint(tmp_path: Path) -> None:
    """Requests, their prompts as the engine counts them, and its settings as far as it reports them."""
    plan = plan_of(40)

    async def test(url: str) -> ObservedWindow:
        ports: list[int] = []
        observing = asyncio.create_task(
            observe_proxy(
                MirrorSettings(engine_url=url), 2 * PATIENCE_S, {"max_num_seqs": 16, "max_num_batched_tokens": 512},
                profile=A30, serving=ports.append, progress=lambda _: None, clock_rate=SPEED,
            )
        )  # fmt: skip
        while not ports:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(send_all, f"http://127.0.0.1:{ports[0]}", plan)
        observing.cancel()
        return await observing

    with engine_at(tmp_path, 1.0) as (_, url):
        window = asyncio.run(test(url))
    assert window.num_complete == len(plan)
    assert sorted(one.facts.prompt_tokens for one in window.requests) == sorted(one.prompt_tokens for one in plan)
    assert sorted(one.facts.output_tokens for one in window.requests) == sorted(one.output_tokens for one in plan)
    assert (window.header.engine.num_gpu_blocks, window.header.engine.max_model_len) == (257, 1024)
    assert profile_of(window, None) is A30
    # a busy machine delivers some responses at once, which then have no time per token
    assert accuracy_of(window, A30, recalibrates=False).error_of["tpot"].num > 10


def test_the_load_of_bench_is_a_window(tmp_path: Path) -> None:
    """Of the one engine that it loads."""
    with engine_at(tmp_path, 1.0) as (_, url):
        done = block(
            "bench", url, "-n", "30", "--warm-up", "5", "--rate", "4", "--time-scale", str(SPEED),
            "--prompt-tokens", "uniform:20:200", "--output-tokens", "uniform:5:60", "--window", str(tmp_path / "w.jsonl"),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    report = answer("accuracy", str(tmp_path / "w.jsonl"), "--profile", A30.name, *FLAGS)
    assert (report["num_requests"], report["num_compared"]) == (30, 25)
    assert report["aggregates"]["requests_per_s"]["measured"] > 0


def test_a_recording_is_converted_for_one_instance(tmp_path: Path) -> None:
    """Times are those of the decisions and outcomes, on one clock."""
    record = tmp_path / "decisions.jsonl"
    lines = []
    for number, instance in enumerate(("one", "one", "two")):
        request = {"request_id": f"r{number}", "prompt_tokens": 50 + number, "max_tokens": 20, "model": MODEL}
        decision = {
            "request_id": f"r{number}", "instance": {"instance_id": instance}, "decided_unix_s": 1000.0 + number
        }  # fmt: skip
        lines.append({"event": "decision", "request": request, "decision": decision})
        outcome = {
            "request_id": f"r{number}", "instance_id": instance, "prompt_tokens": 50 + number, "output_tokens": 10,
            "finish_reason": "FINISH_REASON_STOP", "ttft_s": 0.3, "e2e_s": 1.3, "finished_unix_s": 1001.25 + number,
        }  # fmt: skip
        lines.append({"event": "outcome", "outcome": outcome})
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = tmp_path / "w.jsonl"
    words = ("observe", "--record", str(record), "--profile", A30.name, "-o", str(file))
    assert "instance: name one of one, two" in refusal(*words)
    assert "instance: must be one of one, two, not 'three'" in refusal(*words, "--instance", "three")
    assert answer(*words, "--instance", "one")["num_complete"] == 2
    window = read_window(str(file))
    first, second = window.requests
    assert (first.facts.arrival_s, first.first_token_s, first.last_token_s) == pytest.approx((0.0, 0.25, 1.25))
    assert (second.facts.arrival_s, second.last_token_s) == pytest.approx((1.0, 2.25))
    assert (window.header.clock, window.header.instance, window.header.model) == ("client", "one", MODEL)


def test_an_interrupted_observation_is_kept(tmp_path: Path) -> None:
    """Ctrl-C ends the window early."""

    def progress(share: float) -> None:
        if share > 0:
            raise KeyboardInterrupt

    with engine_at(tmp_path, 1.0) as (engine, _):
        window = observe_state_file(str(engine.state_file), PATIENCE_S, progress=progress)
    assert window.requests == ()


def test_an_endpoint_that_reports_nothing_has_no_settings() -> None:
    """One that does not answer at all is no error: the flags and the profile say the rest."""
    assert asyncio.run(reported_settings(origin_of("http://127.0.0.1:9"))) == ({}, "")


def test_bad_input_is_named(tmp_path: Path) -> None:
    """In one line."""
    missing = str(tmp_path / "none.state")
    assert "name one source" in refusal("observe")
    assert "name one source" in refusal("observe", "--state-file", missing, "--record", "x")
    assert "state_file: " in refusal("observe", "--state-file", missing)
    assert "duration: " in refusal("observe", "--state-file", missing, "--duration", "soon")
    assert "output: " in refusal("observe", "--state-file", missing, "-o", str(tmp_path / "no" / "w"))
    assert "profile: is missing" in refusal("observe", "--record", "x")
    assert "window: name a file" in refusal("accuracy")
    assert "output: " in refusal("accuracy", "w", "-o", "p.json", "--no-recalibrate")
    (tmp_path / "w").write_text('{"kind": "window", "engine": {}, "begin_s": 0, "end_s": 1}')
    assert "profile: is missing; the window names none" in refusal("accuracy", str(tmp_path / "w"))
