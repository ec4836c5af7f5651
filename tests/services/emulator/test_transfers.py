"""Two emulated engines serve one request: one computes its prompt, the other fetches the KV blocks and decodes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from predictor.engine import Engine
from predictor.request import DECODE, PREFILL, SERVE, RequestFacts
from services.emulator.transfer_params import leg_and_blocks
from services.engine_state import layout
from services.engine_state.reader import Reader
from services.http.kv_transfer import REMOTE_DECODE
from tests.services.emulator.running import A30, CONFIG, PATIENCE_S, Emulated, emulated, events, process
from tests.services.waiting import wait_until

PRODUCER = replace(CONFIG, kv_role="kv_producer", kv_bytes_per_token=131_072)
CONSUMER = replace(PRODUCER, kv_role="kv_consumer")
RECOMPUTING = replace(CONSUMER, kv_load_failure_policy="recompute")
ENDLESS_S = 1e9  # of a transfer, on the engine's clock
BODY = {"prompt": "tell me a long story about the sea " * 10, "max_tokens": 12, "seed": 3}
FAILED = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}


@contextmanager
def pair(folder: Path, prefills: Any = PRODUCER, decodes: Any = CONSUMER, **settings: Any) -> Iterator[Any]:
    """Run an engine that prefills and one that decodes."""
    with ExitStack() as stack:
        for name in ("p", "d"):
            (folder / name).mkdir()
        p = stack.enter_context(emulated(folder / "p", prefills, drain_s=0.0, **settings))
        yield p, stack.enter_context(emulated(folder / "d", decodes, drain_s=0.0, **settings))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Emulated, Emulated]]:
    """Two engines; each test leaves them idle."""
    with pair(tmp_path_factory.mktemp("pair")) as both:
        yield both


def prefilled(engine: Emulated, **fields: Any) -> dict[str, Any]:
    """Have an engine compute a prompt, and return what it says about the blocks."""
    reply = engine.complete(ignore_eos=False, **{**BODY, "max_tokens": 1, **fields}, kv_transfer_params=REMOTE_DECODE)
    params: dict[str, Any] = reply["kv_transfer_params"]
    return params


def decoded(engine: Emulated, params: dict[str, Any], **fields: Any) -> httpx.Response:
    """Have an engine fetch these blocks, and decode."""
    return engine.client.post("/v1/completions", json={**BODY, **fields, "kv_transfer_params": params})


def text_of(reply: httpx.Response) -> str:
    """Return the text of a completion."""
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def num_held(engine: Emulated) -> float:
    """Return how many finished prefills an engine holds the blocks of."""
    return engine.metric("block_emulator_held_prefills")


def free(engine: Emulated, params: dict[str, Any]) -> None:
    """Free the blocks of a finished prefill that no engine fetches, as its lease lasts for half a minute."""
    engine.driver.connector.leases.side("").release(params["remote_request_id"])
    engine.until(lambda: num_held(engine) == 0)


def fetching(engine: Emulated, stage: str) -> float:
    """Return how many waiting requests are at a stage of their fetch."""
    return engine.metric(f'vllm:num_requests_kv_fetch_by_stage{{stage="{stage}"}}')


@pytest.mark.parametrize("stream", [False, True])
def test_both_legs_give_the_text_of_the_whole_request(engines: tuple[Emulated, Emulated], *, stream: bool) -> None:
    """The prefill's blocks are held until they are fetched; its prefix hits are those of the usage."""
    p, d = engines
    prompt = f"stream {stream} " + BODY["prompt"]
    whole = text_of(p.client.post("/v1/completions", json={**BODY, "prompt": prompt}))
    params = prefilled(p, prompt=prompt)
    num_tokens = params["remote_num_tokens"]
    assert len(params["remote_block_ids"][0]) == -(-num_tokens // CONFIG.block_size)
    assert set(params) == {
        "do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id",
        "remote_host", "remote_port", "tp_size", "dcp_size", "pp_size", "remote_num_tokens",
        "remote_blocks_expiry_time", "transfer_mode", "remote_prefill_cached_tokens",
    }  # fmt: skip
    hits = params["remote_prefill_cached_tokens"]
    assert hits == (num_tokens - 1) // CONFIG.block_size * CONFIG.block_size  # of the whole request before
    assert num_held(p) == 1
    assert not p.is_idle()
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    reply = decoded(d, params, prompt=prompt, **options)
    if stream:
        *tokens, last = events(reply.text)
        assert "".join(token["choices"][0]["text"] for token in tokens) == whole
    else:
        assert text_of(reply) == whole
        last = reply.json()
        assert last["kv_transfer_params"] is None
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == hits
    p.until(lambda: num_held(p) == 0)
    assert p.is_idle()
    d.until(d.is_idle)


def test_a_chat_has_both_legs(engines: tuple[Emulated, Emulated]) -> None:
    """Chats carry the same parameters."""
    p, d = engines
    body = {"messages": [{"role": "user", "content": "where is the sea " * 9}], "max_completion_tokens": 7}
    path = "/v1/chat/completions"
    whole = p.client.post(path, json=body).json()["choices"][0]["message"]["content"]
    first = p.client.post(path, json={**body, "max_completion_tokens": 1, "kv_transfer_params": REMOTE_DECODE}).json()
    params = first["kv_transfer_params"]
    reply = d.client.post(path, json={**body, "kv_transfer_params": params}).json()
    assert reply["choices"][0]["message"]["content"] == whole
    p.until(lambda: num_held(p) == 0)


def test_the_times_are_those_of_the_engine_model(tmp_path: Path) -> None:
    """A decode leg waits for its transfer, and for one step; what it transferred is counted."""
    slow = replace(CONSUMER, kv_transfer_base_s=0.5)
    with pair(tmp_path, decodes=slow) as (p, d):
        params = prefilled(p)
        assert text_of(decoded(d, params))
        num_tokens = params["remote_num_tokens"]
        reader = Reader(str(d.state_file), patience_s=PATIENCE_S)
        (outcome,) = reader.new_outcomes()
        model = Engine(slow, A30.step_time)
        model.add(RequestFacts(request_id="r", prompt_tokens=num_tokens, output_tokens=12, leg=DECODE))
        model.advance()
        expected = model.outcome("r")
        assert outcome["first_token_s"] - outcome["arrival_s"] == pytest.approx(expected.ttft_s)
        assert outcome["finished_s"] - outcome["arrival_s"] == pytest.approx(expected.e2e_s)
        num_blocks = -(-num_tokens // slow.block_size)
        assert expected.ttft_s > slow.transfer_s(num_tokens, num_blocks) > 0.5
        assert d.metric("vllm:nixl_bytes_transferred_sum") == num_tokens * slow.kv_bytes_per_token
        assert d.metric("vllm:nixl_num_descriptors_sum") == num_blocks
        assert d.metric("vllm:nixl_xfer_time_seconds_count") == 1
        assert d.metric("vllm:external_prefix_cache_hits_total") == num_tokens
        assert reader.read().state["num_fetched"] == 1


def test_a_fetch_that_ends_before_it_is_seen_is_counted(tmp_path: Path) -> None:
    """An engine that is late, or very fast, may have all of a transfer behind it when it looks again."""
    slow = replace(CONSUMER, kv_transfer_base_s=0.5)
    with pair(tmp_path, decodes=slow, speed=1e6) as (p, d):
        params = prefilled(p)
        assert text_of(decoded(d, params))
        num_tokens = params["remote_num_tokens"]
        assert d.metric("vllm:nixl_bytes_transferred_sum") == num_tokens * slow.kv_bytes_per_token
        assert d.metric("vllm:nixl_xfer_time_seconds_count") == 1
        assert d.metric("vllm:nixl_xfer_time_seconds_sum") > 0


def test_a_lease_ends(tmp_path: Path) -> None:
    """Blocks that nobody fetches are freed, and who comes later fails."""
    with pair(tmp_path, replace(PRODUCER, kv_lease_s=0.05)) as (p, d):
        params = prefilled(p)
        p.until(lambda: num_held(p) == 0)
        assert p.is_idle()
        assert p.metric("vllm:nixl_num_kv_expired_reqs_total") == 1
        reply = decoded(d, params)
        assert (reply.status_code, reply.json()["error"]) == (500, FAILED)
        assert d.metric("vllm:nixl_num_failed_transfers_total") == 1
        d.until(d.is_idle)


def test_heartbeats_extend_a_lease(tmp_path: Path) -> None:
    """They begin when the request arrives, also where its fetch cannot begin yet."""
    with pair(tmp_path, decodes=replace(CONSUMER, kv_lease_s=0.06)) as (p, d), ThreadPoolExecutor() as clients:
        params = prefilled(p)
        slot = p.driver.engine.slots[params["remote_request_id"]]
        ends_s = p.driver.engine.state.requests[slot].transfer_s
        p.driver.connector.extension_s = 1000.0
        d.set_faults(hang=True)
        reply = clients.submit(decoded, d, params)
        p.until(lambda: p.driver.engine.state.requests[slot].transfer_s > ends_s)
        assert fetching(d, "waiting_to_start") + d.metric("vllm:num_requests_waiting") > 0
        d.set_faults()
        assert text_of(reply.result())
        assert p.metric("vllm:nixl_num_kv_expired_reqs_total") == 0


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_engine_id": "another"},
        {"remote_request_id": "unknown"},
        {"remote_port": 9},  # nothing listens there
        {"remote_host": "no such host"},
    ],
)
def test_blocks_that_are_not_there(
    tmp_path: Path, engines: tuple[Emulated, Emulated], wrong: dict[str, Any], policy: str
) -> None:
    """The request fails, before the first event of a stream too, or its prompt is computed."""
    p, d = engines
    held = prefilled(p, prompt=f"{wrong} {policy}")
    params = {**held, **wrong}
    body = {"prompt": f"{wrong} {policy}"}
    with ExitStack() as stack:
        if policy == "recompute":
            d = stack.enter_context(emulated(tmp_path, RECOMPUTING))
            assert text_of(decoded(d, params, **body)) == text_of(decoded(p, {}, **body))
        else:
            reply = decoded(d, params, **body)
            assert (reply.status_code, reply.json()["error"]) == (500, FAILED)
            streamed = decoded(d, params, **body, stream=True)
            assert (streamed.status_code, events(streamed.text)) == (200, [{"error": FAILED}])
        d.until(d.is_idle)
    free(p, held)


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (replace(CONSUMER, block_size=32), {}),
        (replace(CONSUMER, kv_bytes_per_token=1), {}),
        (CONSUMER, {"model": "other"}),
    ],
)
def test_engines_that_do_not_fit_together(
    tmp_path: Path, engines: tuple[Emulated, Emulated], config: Any, settings: dict[str, Any]
) -> None:
    """Blocks are not fetched from an engine with another model, or other blocks."""
    p, _ = engines
    params = prefilled(p)
    with emulated(tmp_path, config, **settings) as other:
        assert decoded(other, params).json()["error"] == FAILED
        other.until(other.is_idle)
    free(p, params)


def test_a_client_that_leaves_the_prefill(tmp_path: Path) -> None:
    """Nothing is held for a prefill that did not end."""
    with pair(tmp_path) as (p, _):
        p.set_faults(hang=True)
        p.request_and_disconnect(kv_transfer_params=REMOTE_DECODE)
        p.until(lambda: p.driver.num_jobs == 0)
        p.set_faults()
        p.until(p.is_idle)
        assert num_held(p) == 0


def test_a_client_that_leaves_before_the_fetch(tmp_path: Path) -> None:
    """The other engine frees its blocks at once."""
    with pair(tmp_path) as (p, d):
        params = prefilled(p)
        d.set_faults(hang=True)
        d.request_and_disconnect(**BODY, kv_transfer_params=params)
        p.until(lambda: num_held(p) == 0)
        assert p.metric("vllm:nixl_num_kv_expired_reqs_total") == 0
        d.set_faults()
        d.until(d.is_idle)


def test_a_client_that_leaves_during_the_fetch(tmp_path: Path) -> None:
    """Both engines keep their blocks until the transfer ends, here because the first engine ends."""
    with emulated(tmp_path, replace(CONSUMER, kv_transfer_base_s=ENDLESS_S)) as d:
        (tmp_path / "p").mkdir()
        with emulated(tmp_path / "p", PRODUCER, drain_s=0.0) as p:
            params = prefilled(p)
            d.request_and_disconnect(**BODY, kv_transfer_params=params)
            d.until(lambda: d.driver.num_jobs == 0)
            assert (num_held(p), d.metric("vllm:num_requests_waiting")) == (1, 0)
            view = Reader(str(d.state_file), patience_s=PATIENCE_S).read()
            assert (len(view.held), len(view.waiting)) == (1, 0)
            assert not d.is_idle()
        d.until(d.is_idle)


def test_a_refused_request_frees_its_blocks(tmp_path: Path) -> None:
    """An engine that refuses the second leg notifies the first engine, whose lease would last much longer."""
    with pair(tmp_path, replace(PRODUCER, kv_lease_s=1000.0)) as (p, d):
        for wrong in ({"max_tokens": 0}, {"stop": [""]}, {"model": "other"}):
            params = prefilled(p)
            assert num_held(p) == 1
            assert decoded(d, params, **wrong).status_code in (400, 404)
            p.until(lambda: num_held(p) == 0)


def test_a_full_queue_frees_the_blocks_of_those_refused(tmp_path: Path) -> None:
    """The limit of unfinished requests holds for decode legs."""
    with pair(tmp_path, max_num_queued_reqs=1) as (p, d), ThreadPoolExecutor() as clients:
        d.set_faults(hang=True)
        first = clients.submit(decoded, d, {}, prompt="first")
        d.until(lambda: d.driver.num_jobs == 1)
        assert decoded(d, prefilled(p)).status_code == 503
        p.until(lambda: num_held(p) == 0)
        d.set_faults()
        assert text_of(first.result())


def test_the_state_file_has_both_sides(tmp_path: Path) -> None:
    """A finished prefill is among the held ones until its lease ends; a decode leg shows the stage of its fetch."""
    slow = replace(CONSUMER, kv_transfer_base_s=ENDLESS_S)
    with pair(tmp_path, decodes=slow) as (p, d), ThreadPoolExecutor() as clients:
        params = prefilled(p)
        here = Reader(str(p.state_file), patience_s=PATIENCE_S)
        view = here.read(contents=True)
        (slot,) = view.held.tolist()
        live, facts = view.live[slot], view.requests[slot]
        assert (facts["leg"], live["stage"], live["output_tokens"]) == (1, layout.BLOCKS_HELD, 1)
        assert facts["request_id"].decode() == params["remote_request_id"]
        assert live["held_until_s"] > view.now_s
        assert view.contents is not None
        assert [block + 1 for block in view.contents.tables[0]] == params["remote_block_ids"][0]
        assert len(here.new_outcomes()) == 1
        reply = clients.submit(decoded, d, params)
        d.until(lambda: fetching(d, "in_progress") == 1)
        assert d.metric('vllm:num_requests_waiting_by_reason{reason="deferred"}') == 1
        there = Reader(str(d.state_file), patience_s=PATIENCE_S)
        view = there.read()
        (slot,) = view.waiting.tolist()
        live = view.live[slot]
        assert (view.requests[slot]["leg"], live["stage"]) == (2, layout.FETCHING)
        assert live["fetch_started_s"] > 0 > live["fetch_ended_s"]
        assert live["num_blocks"] == len(params["remote_block_ids"][0])
        p.driver.connector.leases.side("").release(params["remote_request_id"])
        assert reply.result().status_code == 500
        d.until(lambda: len(there.read().slots) == 0)
        p.until(lambda: len(here.read().slots) == 0)


def test_engines_without_a_connector_serve_whole_requests(tmp_path: Path) -> None:
    """Parameters mean nothing to them, as in vLLM."""
    with emulated(tmp_path) as engine:
        reply = engine.client.post("/v1/completions", json={**BODY, "kv_transfer_params": REMOTE_DECODE})
        assert reply.json()["usage"]["completion_tokens"] == BODY["max_tokens"]
        assert reply.json()["kv_transfer_params"] is None
        engine.until(engine.is_idle)


def test_an_engine_that_only_decodes_takes_no_prefill(engines: tuple[Emulated, Emulated]) -> None:
    """The refusal says what is missing."""
    _, d = engines
    reply = d.client.post("/v1/completions", json={**BODY, "kv_transfer_params": REMOTE_DECODE})
    assert reply.status_code == 400
    assert "leg: prefill needs an engine with kv_role kv_producer or kv_both" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"remote_port": "9"}, "remote_port: must be a port"),
        ({"remote_port": 0}, "remote_port: must be a port"),
        ({"remote_host": None}, "remote_host: must be a string"),
        ({"remote_host": "a\0b"}, "remote_host: must be a host's name"),
        ({"remote_host": "ü" * 80}, "remote_host: must be a host's name"),
        ({"remote_block_ids": [1]}, "remote_block_ids: must be a list of lists"),
    ],
)
def test_malformed_parameters_are_refused(
    engines: tuple[Emulated, Emulated], change: dict[str, Any], message: str
) -> None:
    """The error names the field."""
    p, d = engines
    params = prefilled(p)
    reply = decoded(d, {**params, **change})
    assert reply.status_code == 400
    assert f"kv_transfer_params.{message}" in reply.json()["error"]["message"]
    assert text_of(decoded(d, params))
    p.until(lambda: num_held(p) == 0)


@pytest.mark.parametrize("ids", [[], ["a", "b"], "a", [1]])
def test_a_watch_is_for_one_request(engines: tuple[Emulated, Emulated], ids: Any) -> None:
    """The refusal says what is expected."""
    connector = engines[0].driver.connector
    body = {
        "engine_id": connector.leases.engine_id, "request_ids": ids,
        "compatibility_hash": connector.side_channel._held.compatibility,
    }  # fmt: skip
    reply = httpx.post(f"http://{connector.host}:{connector.port}/kv/watch", json=body, timeout=PATIENCE_S)
    assert (reply.status_code, "must be one id in a list" in reply.text) == (400, True)


def test_which_leg_is_asked_for() -> None:
    """A prefill that held nothing leaves the whole request to the second engine."""
    assert leg_and_blocks(None) == leg_and_blocks({}) == (SERVE, None)
    assert leg_and_blocks(REMOTE_DECODE) == (PREFILL, None)
    assert leg_and_blocks({"do_remote_prefill": True, "remote_block_ids": None}) == (SERVE, None)
    assert leg_and_blocks({"do_remote_prefill": True, "remote_block_ids": []}) == (SERVE, None)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_prefilling_engine_that_is_killed(policy: str) -> None:
    """Its death during a transfer is noticed; a later request finds no engine there."""
    common = ("-p", "llama-2-7b-a30", "--max-model-len", "512", "--num-gpu-blocks", "64", "--state-file", "none")
    slow = ("--kv-transfer-base-s", "1e9", "--kv-load-failure-policy", policy)
    with (
        process(*common, "--kv-role", "kv_producer") as p,
        process(*common, "--kv-role", "kv_consumer", *slow) as d,
        ThreadPoolExecutor() as clients,
    ):
        url = "/v1/completions"

        def sent(to: str, body: dict[str, Any]) -> httpx.Response:
            return httpx.post(to + url, json=body, timeout=PATIENCE_S)

        def value(name: str) -> float:
            found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", httpx.get(f"{d.url}/metrics").text, re.MULTILINE)
            assert found is not None
            return float(found[1])

        body = {"prompt": "by the sea " * 20, "max_tokens": 3}
        whole = sent(p.url, body).json()["choices"][0]["text"]
        first = sent(p.url, {**body, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}).json()
        second = {**body, "kv_transfer_params": first["kv_transfer_params"]}
        under_way = clients.submit(sent, d.url, second)
        fetches = 'vllm:num_requests_kv_fetch_by_stage{[^}]*stage="in_progress"'
        wait_until(lambda: re.search(rf"^{fetches}[^}}]*}} 1\.0$", httpx.get(f"{d.url}/metrics").text, re.MULTILINE))
        p.process.kill()
        for reply in (under_way.result(), sent(d.url, second)):
            if policy == "fail":
                assert (reply.status_code, json.loads(reply.text)["error"]) == (500, FAILED)
            else:
                assert text_of(reply) == whole
        wait_until(lambda: value("vllm:kv_cache_usage_perc") == 0)
