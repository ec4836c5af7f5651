"""The engine model on the wall clock: time, state files, clients that disconnect, faults."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.engine_from_snapshot import engine_from
from predictor.request import RequestFacts, Slo
from predictor.snapshot import LiveRequest, Snapshot
from predictor.snapshot_of_engine import snapshot_of
from services.emulator.answers import seeded_draw
from services.emulator.ranks import RankDrivers
from services.emulator.tokens import token_ids
from services.engine_state.identity import client_id, rank_file
from services.engine_state.reader import Reader
from services.engine_state.snapshot import snapshot_from_view
from services.engine_state.view import UnreadableError
from services.engine_state.writer import Writer
from simulator.replay import replay
from tests.services.emulator.running import A30, CONFIG, PATIENCE_S, Emulated, emulated

LONG = {"prompt": "tell me a long story", "max_tokens": 900, "ignore_eos": True, "stream": True}


def as_an_engine_knows_it(item: LiveRequest) -> LiveRequest:
    """The part of a request's state that an engine knows: not its answer's end, future tokens, or attained deadlines."""
    request = item.request
    num_known = (request.prompt_tokens + item.produced_tokens) // CONFIG.block_size
    known = replace(request, output_tokens=None, prefix_hashes=request.prefix_hashes[:num_known])
    return replace(item, request=known, tokens_on_time=None)


def as_a_file_tells_it(snapshot: Snapshot, taken_s: float) -> Snapshot:
    """The same state as a reader of the state file sees it."""
    return replace(
        snapshot,
        taken_s=taken_s,
        running=tuple(as_an_engine_knows_it(item) for item in snapshot.running),
        waiting=tuple(as_an_engine_knows_it(item) for item in snapshot.waiting),
        reserved=(),
    )


def lines(client: httpx.Client, body: dict[str, Any]) -> Any:
    """A stream's context, and its lines."""
    return client.stream("POST", "/v1/completions", json=body)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, num_gpu_blocks=60, async_scheduling=True),
        replace(CONFIG, num_gpu_blocks=60, scheduling_policy="priority"),
        replace(CONFIG, enable_prefix_caching=False, max_num_seqs=4),
        replace(CONFIG, num_gpu_blocks=60, speculative_method="ngram", num_speculative_tokens=3),
        replace(
            CONFIG, num_gpu_blocks=60, speculative_method="eagle", num_speculative_tokens=2, async_scheduling=True
        ),
        EngineConfig(batcher="vllm_v0", max_num_seqs=16, num_gpu_blocks=60, max_model_len=256),
        EngineConfig(batcher="lightllm", max_num_seqs=16, num_gpu_blocks=60, max_model_len=256),
        replace(CONFIG, batcher="weighted_vtc", num_gpu_blocks=60),
        replace(CONFIG, batcher="fair_batching", estimator_momentum=0.9, estimator_factor=1.3, estimator_noise=0.2),
    ],
    ids=[
        "v1", "async, tight", "priority, tight", "no prefix cache", "ngram, tight", "eagle, async, tight", "v0", "lightllm", "clients",
        "correction",
    ],
)  # fmt: skip
def test_the_state_file_shows_the_engines_state(tmp_path: Path, config: EngineConfig) -> None:
    """At any moment, preempted and cached or not, a reader sees the engine's own state."""
    with emulated(tmp_path, config, speed=30.0) as engine, ThreadPoolExecutor(24) as clients:
        engine.set_faults(hang=True)
        prompts = [f"prompt {number % 5} " + "and so on " * (number % 7) for number in range(24)]
        asked = [
            clients.submit(
                engine.complete, prompt=prompt, max_tokens=60 + 5 * number, priority=number % 3,
                vllm_xargs={
                    "block_tag_tokens": 40.5, "block_tag_spread": 0.5, "block_ttft_s": 0.25, "block_weight": 1 + number,
                    "block_class": "best-effort", "block_client_id": f"tenant {number % 3}", "block_session_id": "s",
                },
            )
            for number, prompt in enumerate(prompts)
        ]  # fmt: skip
        engine.until(lambda: engine.client.get("/load").json() == {"server_load": 24})
        engine.set_faults(slow=100.0)  # so that the test's first read is early enough
        engine.until(lambda: engine.driver.gauges().num_running >= min(4, config.max_num_seqs))
        reader = Reader(str(engine.state_file), patience_s=PATIENCE_S)
        for look in range(8):
            engine.set_faults(hang=True)  # time stands still, and with it the engine
            own = snapshot_of(engine.driver.engine, 0.0)
            assert (config.batcher == "weighted_vtc") == bool(own.memory.clients)
            view = reader.read(contents=True)
            told = snapshot_from_view(view)
            assert told.running or look > 0
            tag = told.running[0].request.tag if told.running else None
            expected = as_a_file_tells_it(own, told.taken_s)
            assert tag is None or tag.median_tokens == 40.5  # type: ignore[union-attr]
            for item in told.running:
                assert item.request.slo == Slo(ttft_s=0.25 * 30)
                assert item.request.weight > 0
                assert item.request.client_id.startswith("tenant ")
            untagged = [
                tuple(replace(item, request=replace(item.request, tag=None)) for item in queue)
                for queue in (told.running, told.waiting)
            ]
            assert replace(told, running=untagged[0], waiting=untagged[1]) == expected
            assert engine_from(told, A30.step_time).running() == engine.driver.engine.running()
            engine.set_faults()
            enough = int(view.state["num_steps"]) + 6
            engine.until(lambda enough=enough: engine.is_idle() or int(reader.read().state["num_steps"]) >= enough)  # type: ignore[misc]
        assert len([done.result() for done in asked]) == 24
        engine.until(engine.is_idle)


def test_a_trace_takes_as_long_as_the_simulator_says(tmp_path: Path) -> None:
    """The same requests at the same times: on the engine's clock to the microsecond, on the client's never earlier."""
    speed = 4.0
    lengths = [(30 + 37 * number % 200, 20 + 11 * number % 60) for number in range(14)]
    with emulated(tmp_path, speed=speed) as engine, ThreadPoolExecutor(14) as clients:
        engine.complete(max_tokens=2)
        reader = Reader(str(engine.state_file), patience_s=PATIENCE_S)
        reader.new_outcomes()

        def measured(number: int) -> tuple[float, float]:
            prompt_tokens, output_tokens = lengths[number]
            body = {"prompt": [number] * prompt_tokens, "max_tokens": output_tokens, "ignore_eos": True, "stream": True}
            with httpx.Client(base_url=engine.client.base_url, timeout=PATIENCE_S) as client:
                start_s = time.monotonic()
                headers = {"x-request-id": str(number)}
                with client.stream("POST", "/v1/completions", json=body, headers=headers) as stream:
                    chunks = stream.iter_raw()
                    next(chunks)
                    first_s = time.monotonic()
                    for _ in chunks:
                        pass
                return (first_s - start_s) * speed, (time.monotonic() - start_s) * speed

        clocked = list(clients.map(measured, range(14)))
        engine.until(engine.is_idle)
        outcomes = {int(client_id(row["request_id"].decode())): row for row in reader.new_outcomes()}
    trace = [
        RequestFacts(
            request_id=f"{number:02}", prompt_tokens=lengths[number][0], output_tokens=lengths[number][1],
            arrival_s=float(outcomes[number]["arrival_s"]),
        )
        for number in range(14)
    ]  # fmt: skip
    for number, simulated in enumerate(replay(CONFIG, A30.step_time, trace)):
        assert simulated.first_token_s == pytest.approx(float(outcomes[number]["first_token_s"]), abs=1e-6)
        assert simulated.finished_s == pytest.approx(float(outcomes[number]["finished_s"]), abs=1e-6)
        ttft_s, e2e_s = clocked[number]
        assert simulated.ttft_s is not None
        assert simulated.e2e_s is not None
        late_s = speed * PATIENCE_S  # how late a busy machine is depends on the machine
        assert simulated.ttft_s <= ttft_s + 1e-3 <= simulated.ttft_s + late_s
        assert simulated.e2e_s <= e2e_s + 1e-3 <= simulated.e2e_s + late_s


def test_steps_are_recorded_as_they_were(tmp_path: Path) -> None:
    """Records of steps have numbers without gaps, and the times of the profile."""
    with emulated(tmp_path, noise=0.2, seed=3) as engine:
        reader = Reader(str(engine.state_file), patience_s=PATIENCE_S)
        engine.complete(prompt=[5] * 100, max_tokens=50)
        engine.until(engine.is_idle)
        steps = reader.new_steps()
    assert steps["number"].tolist() == list(range(50))
    assert (steps["num_tokens"][0], steps["prefill_qq"][0], steps["decode_context"][1]) == (100, 100.0**2, 101)
    simulated = Engine(CONFIG, A30.step_time)
    simulated.add(RequestFacts(request_id="r", prompt_tokens=100, output_tokens=50))
    planned = []
    while (step := simulated.next_step()) is not None:
        planned.append(step.end_s - step.start_s)
    ratios = steps["seconds"] / planned
    assert 0.9 < ratios.mean() < 1.1
    assert 0.1 < ratios.std() < 0.3
    assert steps["start_s"][1:] == pytest.approx(steps["start_s"][:-1] + steps["seconds"][:-1])


def test_a_client_that_disconnects_frees_its_blocks(engine: Emulated) -> None:
    """A closed stream, and an answer in one piece whose client has disconnected, are aborted."""
    aborted = engine.metric('vllm:request_success_total{finished_reason="abort"}')
    engine.set_faults(slow=1000)
    with lines(engine.client, LONG) as stream:
        chunks = stream.iter_lines()
        next(chunks)
        assert not engine.is_idle()
    engine.until(lambda: engine.driver.num_jobs == 0)
    engine.request_and_disconnect(max_tokens=900)
    engine.set_faults()
    engine.until(lambda: engine.metric('vllm:request_success_total{finished_reason="abort"}') == aborted + 2)
    assert engine.is_idle()
    assert engine.client.get("/load").json() == {"server_load": 0}


def test_a_client_that_does_not_read_delays_no_other(engine: Emulated) -> None:
    """Its tokens wait, as few events as fit into sockets, while the engine serves the others."""
    host, port = engine.client.base_url.host, engine.client.base_url.port
    body = json.dumps(LONG).encode()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((host, port))
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        slow.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        engine.complete(max_tokens=5)
        engine.until(engine.is_idle)
        data = b""
        slow.settimeout(PATIENCE_S)
        while chunk := slow.recv(65536):
            data += chunk
    assert data.count(b'data: {"id"') == 900
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_more_requests_than_slots(tmp_path: Path) -> None:
    """A hundred requests outgrow the file; the reader follows, and no request is lost."""
    with emulated(tmp_path) as engine, ThreadPoolExecutor(100) as clients:
        reader = Reader(str(engine.state_file), patience_s=PATIENCE_S)
        reader.read()
        engine.set_faults(hang=True)
        asked = [clients.submit(engine.complete, prompt=f"number {number}", max_tokens=9) for number in range(100)]
        engine.until(lambda: engine.client.get("/load").json() == {"server_load": 100})
        engine.set_faults()
        for done in asked:
            assert done.result()["usage"]["completion_tokens"] == 9
        engine.until(engine.is_idle)
        view = reader.read()
        assert view.generation > 1
        assert len({row["request_id"] for row in reader.new_outcomes()}) == 100


def test_a_full_queue_is_refused(tmp_path: Path) -> None:
    """Beyond the limit of unfinished requests there is vLLM's 503."""
    with emulated(tmp_path, max_num_queued_reqs=1) as engine:
        engine.set_faults(hang=True)
        with lines(engine.client, LONG) as stream:
            refused = engine.client.post("/v1/completions", json=LONG)
            assert (refused.status_code, refused.json()["error"]["type"]) == (503, "Service Unavailable")
            assert stream.status_code == 200
        assert engine.metric('vllm:admission_rejections_total{reason="max_num_queued_reqs"}') == 1


def test_bodies_that_are_too_large(tmp_path: Path) -> None:
    """A body over the limit is refused, with a length in its head or without."""
    with emulated(tmp_path, max_body_bytes=1000) as engine:
        content = json.dumps({"prompt": "x" * 2000}).encode()
        headers = {"content-type": "application/json"}
        for sent in (content, iter([content[:900], content[900:]])):
            answer = engine.client.post("/v1/completions", content=sent, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, 413)
        assert engine.complete(max_tokens=1)["usage"]["completion_tokens"] == 1


def test_a_slow_engine(tmp_path: Path) -> None:
    """Steps take longer by the factor, from the next one on."""
    with emulated(tmp_path) as engine:
        reader = Reader(str(engine.state_file), patience_s=PATIENCE_S)
        for faults in ({}, {"slow": 3.0}, {}):
            engine.set_faults(**faults)
            engine.complete(prompt="the same", max_tokens=12)
        engine.until(engine.is_idle)
        seconds = reader.new_steps()["seconds"].reshape(3, 12)[:, 2:]
    assert seconds[1] == pytest.approx(3 * seconds[0])
    assert seconds[2] == pytest.approx(seconds[0])


def test_a_hung_engine_continues_where_it_was(tmp_path: Path) -> None:
    """While it hangs it sends no token though it is healthy; afterwards all arrive, without a burst."""
    with emulated(tmp_path, speed=1.0) as engine:
        reader = Reader(str(engine.state_file), patience_s=PATIENCE_S)
        body = {**LONG, "max_tokens": 8}
        with lines(engine.client, body) as stream:
            chunks = stream.iter_lines()
            next(chunks)
            engine.set_faults(hang=True)
            before = reader.read().sequence
            assert engine.client.get("/health").status_code == 200
            engine.request_and_disconnect(max_tokens=8)
            assert reader.read().sequence == before
            engine.set_faults()
            rest = [line for line in chunks if line]
        engine.until(engine.is_idle)
        outcomes = {row["reason"]: row for row in reader.new_outcomes()}
        steps = reader.new_steps()
    assert (len(rest), rest[-1]) == (8, "data: [DONE]")
    assert set(outcomes) == {1, 2}
    assert outcomes[1]["finished_s"] - outcomes[1]["arrival_s"] < 2 * steps["seconds"].sum()


def test_an_engine_that_refuses(engine: Emulated) -> None:
    """New requests get a 503, and so does /health; requests under way continue."""
    engine.set_faults(slow=1000)
    with lines(engine.client, {**LONG, "max_tokens": 20}) as stream:
        chunks = stream.iter_lines()
        next(chunks)
        engine.set_faults(refuse=True)
        refused = engine.client.post("/v1/completions", json=LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, 503)
        assert engine.client.get("/health").status_code == 503
        assert [line for line in chunks if line][-1] == "data: [DONE]"
    engine.set_faults()
    assert engine.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"slow": 0}, "slow: must lie above 0"),
        ({"slow": "x"}, "slow: must be a number"),
        ({"hang": 1}, "hang: must be true or false"),
        ({"hnag": True}, "hnag: is no known fault; did you mean hang?"),
        ([], "fault: must be an object"),
    ],
)
def test_bad_faults_are_refused(engine: Emulated, body: Any, message: str) -> None:
    """A bad fault changes nothing, and the error names it."""
    answer = engine.client.post("/admin/fault", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert engine.client.get("/admin/fault").json() == {"slow": 1.0, "hang": False, "refuse": False, "crash": False}


@pytest.mark.parametrize("client", [("10.0.0.9", 1), ("2001:db8::1", 1), ("elsewhere", 1), None])
def test_faults_are_set_from_the_own_machine_only(engine: Emulated, client: Any) -> None:
    """Other clients get a 403."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"crash": true}'}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"x-forwarded-for", b"127.0.0.1")]
    scope = {"type": "http", "path": "/admin/fault", "method": "POST", "headers": headers, "client": client}
    asyncio.run(engine.app(scope, receive, send))
    assert sent[0]["status"] == 403


def test_an_engine_that_fails(tmp_path: Path) -> None:
    """An internal error ends streams with an error event, and other requests with a 500."""
    with emulated(tmp_path) as engine:
        engine.set_faults(slow=1000)
        with lines(engine.client, LONG) as stream:
            chunks = stream.iter_lines()
            next(chunks)

            def broken(*_: object) -> None:
                raise ArithmeticError

            engine.driver.engine.drive = broken
            rest = [line for line in chunks if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == 500
        assert engine.client.post("/v1/completions", json=LONG).status_code == 500
        assert engine.client.get("/health").status_code == 503


def test_an_engine_outlives_its_state_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be written is closed; requests are still served."""
    with emulated(tmp_path) as engine:
        engine.complete(max_tokens=3)

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Writer, "publish", full)
        assert engine.complete(max_tokens=3)["usage"]["completion_tokens"] == 3
        monkeypatch.undo()
        with pytest.raises(UnreadableError):
            Reader(str(engine.state_file)).read()
        assert engine.complete(max_tokens=3)["usage"]["completion_tokens"] == 3


def test_answers_depend_on_the_prompt_alone(tmp_path: Path, engine: Emulated) -> None:
    """Two engines of one seed give the same answers; those of another seed do not."""
    bodies = [{"prompt": f"how long is {number}", "max_tokens": 900} for number in range(12)]
    lengths = {}
    (tmp_path / "other").mkdir()
    with emulated(tmp_path) as same, emulated(tmp_path / "other", output_seed=1) as other:
        for name, one in (("shared", engine), ("same", same), ("other", other)):
            answers = [one.client.post("/v1/completions", json=body).json() for body in reversed(bodies)]
            lengths[name] = [answer["usage"]["completion_tokens"] for answer in answers]
    assert lengths["shared"] == lengths["same"] != lengths["other"]
    assert len(set(lengths["same"])) > 6
    assert seeded_draw(token_ids("a"), 1) != seeded_draw(token_ids("a"), 2) != seeded_draw(token_ids("b"), 2)


@pytest.mark.parametrize("ranks", [{}, {"data_parallel_size": 2, "data_parallel_lockstep": True}], ids=["one", "ranks"])
def test_a_request_that_arrives_after_a_long_stop_is_served(tmp_path: Path, ranks: dict[str, Any]) -> None:
    """The clock is set back to the end of the step under way; the request arrives then, for metrics and state file."""
    config = replace(CONFIG, async_scheduling=False)
    with emulated(tmp_path, config, speed=20.0, **ranks) as engine, ThreadPoolExecutor() as clients:
        reader = Reader(
            rank_file(str(engine.state_file), 0) if ranks else str(engine.state_file), patience_s=PATIENCE_S
        )
        driver = engine.app.driver.drivers[0] if isinstance(engine.app.driver, RankDrivers) else engine.driver
        headers = {"x-data-parallel-rank": "0"}

        def ask(prompt: str) -> httpx.Response:
            body = {"prompt": prompt, "max_tokens": 1}
            return engine.client.post("/v1/completions", json=body, headers=headers, timeout=PATIENCE_S)

        engine.set_faults(slow=2000)
        ask("before")  # the pace of a step is drawn in advance
        first = clients.submit(ask, "first")
        engine.until(lambda: driver.gauges().num_running == 1)
        engine.set_faults()
        driver.clock.origin_s -= 1000.0  # of wall clock, for which the process was stopped
        with engine.client.stream("POST", "/v1/completions", json=LONG, headers=headers) as second:
            chunks = second.iter_lines()
            next(chunks)
            view = reader.read()
            assert view.requests[view.slots]["arrival_s"].max() <= driver.clock.now_s() < 1000 * driver.clock.speed
            assert first.result().status_code == second.status_code == 200
            assert list(chunks)[-2] == "data: [DONE]"
        engine.until(lambda: driver.num_jobs == 0)
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
            assert engine.metric(f"vllm:{name}_seconds_count") == 3
            assert 0 <= engine.metric(f"vllm:{name}_seconds_sum") < 1000
        outcomes = reader.new_outcomes()
        assert len(outcomes) == 3
        times = [outcomes[name] for name in ("arrival_s", "scheduled_s", "first_token_s", "finished_s")]
        assert np.all(np.diff(times, axis=0) >= 0)


def test_a_refused_request_leaves_others_alone(tmp_path: Path) -> None:
    """The engine's arrays grow for the contents of a prompt before the engine refuses it."""
    with emulated(tmp_path, replace(CONFIG, num_gpu_blocks=20), speed=20.0) as engine:
        with lines(engine.client, LONG | {"prompt": "short", "max_tokens": 200}) as response:
            stream = response.iter_lines()
            next(stream)
            refused = engine.client.post("/v1/completions", json={"prompt": [5] * 900, "max_tokens": 100})
            assert refused.status_code == 400
            assert "need 63 KV blocks" in refused.json()["error"]["message"]
            num_tokens = sum(line.startswith("data: {") for line in stream)
        assert num_tokens >= 199
        engine.until(engine.is_idle)
        assert engine.complete(max_tokens=2)["usage"]["completion_tokens"] == 2
