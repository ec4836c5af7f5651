"""What is read of requests, what is changed in them, and how they are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from protos.block.v1 import common_pb2
from protos.envoy.v3 import external_processor_pb2 as wire
from services.placement.driver import PlacementDriver
from tests.services.endpoint_picker.running import (
    ENDPOINT,
    Picking,
    Proxy,
    chosen,
    completion,
    head,
    picking,
    set_headers,
)
from tests.services.gateway.stubs import completes
from tests.services.objective_tables import chat_table
from tests.services.waiting import run


async def ask(here: Picking, headers: dict[str, str] | None = None, body: bytes | None = None, **options: Any) -> Proxy:
    """Show a request, and read the whole answer."""
    one = Proxy(call=here.stub.Process(), **options)
    await one.send_headers(headers or head())
    await one.send_body(completion() if body is None else body)
    while True:
        message = await one.read()
        if message.HasField("immediate_response"):
            return one
        if message.request_body.response.body_mutation.streamed_response.end_of_stream:
            return one


def body_of(one: Proxy) -> dict[str, Any]:
    """Return the body that the engine gets."""
    pieces = [message.request_body.response.body_mutation.streamed_response.body for message in one.received[1:]]
    return dict(json.loads(b"".join(pieces)))


def refusal(one: Proxy) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Return status, headers and error of the reply in place of the engine's."""
    (message,) = one.received
    reply = message.immediate_response
    return reply.status.code, set_headers(reply.headers), json.loads(reply.body)["error"]


def reserved(here: Picking) -> common_pb2.Request:
    """Return the one request that is reserved."""
    (request,) = (one.request for sidecar in here.sidecars for one in sidecar.held.values())
    return request


# What is read.


@pytest.mark.parametrize("prefix", ["x-slo", "x-llm-d-slo"])
@pytest.mark.parametrize("fairness", ["x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"])
def test_targets_and_tenants_come_from_headers(prefix: str, fairness: str) -> None:
    """By their old and new names; the engine gets them in the body, and not as headers."""

    async def test() -> None:
        async with picking(completes) as here:
            headers = {**head(), f"{prefix}-ttft-ms": "300", f"{prefix}-tpot-ms": "50", fairness: "acme"}
            one = await ask(here, headers)
            request = reserved(here)
            assert (request.slo.ttft_s, request.slo.tpot_s, request.client_id) == (0.3, 0.05, "acme")
            told = body_of(one)["vllm_xargs"]
            assert 0 < told.pop("block_ttft_s") <= 0.3  # what is left of it
            assert told == {"block_tpot_s": 0.05, "block_client_id": "acme"}
            removed = one.received[0].request_headers.response.header_mutation.remove_headers
            assert set(removed) == set(headers) - set(head())

    run(test)


@pytest.mark.parametrize("name", ["x-gateway-inference-objective", "x-llm-d-inference-objective", "x-block-objective"])
def test_objectives_come_from_headers(tmp_path: Path, name: str) -> None:
    """The name of an objective stands for class, targets and priority; one that is not known is ignored.

    Its priority is for the decision, and for engines only where that is set.
    """

    async def test() -> None:
        file = tmp_path / "objectives.toml"
        file.write_text(chat_table("serve"), encoding="utf-8")
        async with picking(completes, objectives=str(file), pass_objective_priority=True) as here:
            assert body_of(await ask(here, {**head(), name: "chat"}))["priority"] == 2
        async with picking(completes, objectives=str(file)) as here:
            one = await ask(here, {**head(), name: "chat"})
            request = reserved(here)
            assert (request.slo.ttft_s, request.priority) == (0.5, 2)
            assert "priority" not in body_of(one)
            await one.finish()
            one = await ask(here, {**head(), name: "chat", "x-block-priority": "3"})
            assert body_of(one)["priority"] == 3
            await one.finish()
            one = await ask(here, {**head(), name: "unheard-of"})
            assert chosen(one.received[0]) == here.endpoints
            assert here.metric("block_picker_ignored_objectives_total") == 1

    run(test)


def test_unknown_objectives_are_refused_where_that_is_set(tmp_path: Path) -> None:
    """The reply is that of a gateway; known ones are served."""
    file = tmp_path / "objectives.toml"
    file.write_text(chat_table("serve"), encoding="utf-8")
    named = {**head(), "x-gateway-inference-objective": "chatt"}

    async def test() -> None:
        settings = {"refuse_unknown_objectives": True}
        async with picking(completes, settings=settings, objectives=str(file)) as here:
            status, headers, error = refusal(await ask(here, named))
            assert (status, "x-llm-d-request-dropped-reason" in headers) == (400, False)
            wanted = "x-gateway-inference-objective: 'chatt' is no known objective; did you mean chat?"
            assert error["message"] == wanted
            assert here.metric("block_picker_ignored_objectives_total") == 0
            await ask(here, {**named, "x-gateway-inference-objective": "chat"})
            assert reserved(here).priority == 2
        async with picking(completes, settings=settings) as here:
            assert "has no table" in refusal(await ask(here, named))[2]["message"]

    run(test)


def test_what_a_client_sends_by_the_picker_s_names_goes_no_further() -> None:
    """The endpoints are overwritten; other control headers are removed."""

    async def test() -> None:
        async with picking(completes) as here:
            own = {
                ENDPOINT: "10.0.0.1:1", f"{ENDPOINT}-served": "10.0.0.1:1", "x-prefiller-host-port": "10.0.0.1:1",
                "x-data-parallel-host-port": "10.0.0.1:1", "test-epp-endpoint-selection": "10.0.0.1",
            }  # fmt: skip
            one = await ask(here, {**head(), **own})
            assert chosen(one.received[0]) == here.endpoints
            removed = one.received[0].request_headers.response.header_mutation.remove_headers
            assert set(removed) == set(own) - {ENDPOINT}

    run(test)


def test_a_decision_may_take_as_long_as_its_policy_holds_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no time is set; one that is set has precedence."""
    place = AsyncMock(side_effect=ConnectionError("no instance"))
    monkeypatch.setattr(PlacementDriver, "place", place)

    async def test() -> None:
        for policy, given_s, max_wait_s in (("block", None, 0.85), ("slo", None, 74.85), ("slo", 12.0, 11.85)):
            settings = {"schedule_s": given_s}
            async with picking(completes, settings=settings, policy=policy, sidecar_deadline_s=0.05) as here:
                assert refusal(await ask(here))[0] == 503
                assert place.await_args.kwargs["max_wait_s"] == pytest.approx(max_wait_s)

    run(test)


def test_every_request_gets_an_id_of_its_own() -> None:
    """That of the proxy, unless another request has it, or there is none."""

    async def test() -> None:
        async with picking(completes) as here:
            first = await ask(here, head(x_request_id="mine"))
            second = await ask(here, head(x_request_id="mine"))
            third = await ask(here)
            ids = [
                set_headers(one.received[0].request_headers.response.header_mutation).get("x-request-id")
                for one in (first, second, third)
            ]
            assert ids[0] is None
            assert ids[1].startswith("mine-")
            assert here.sidecars[0].reserved_ids == ["mine", ids[1], ids[2]]

    run(test)


@pytest.mark.parametrize("name", ["x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite"])
def test_a_model_is_rewritten_and_written_back(name: str) -> None:
    """The engine gets the other name; the client gets its own, however the response is cut."""

    async def test() -> None:
        async with picking(completes) as here:
            one = await ask(here, {**head(), name: "tiny"}, completion(model="mine"))
            assert body_of(one)["model"] == "tiny"
            assert reserved(here).model == "tiny"
            await one.respond(kind="text/event-stream")
            answer = (await one.read()).response_headers.response.header_mutation
            assert "content-length" in answer.remove_headers
            pieces = [b'data: {"model": "ti', b'ny", "choices": []}\n\nda', b"ta: [DONE]\n\n"]
            for number, piece in enumerate(pieces):
                await one.respond_body(piece, end=number == len(pieces) - 1)
            told = b""
            while True:
                streamed = (await one.read()).response_body.response.body_mutation.streamed_response
                told += streamed.body
                if streamed.end_of_stream:
                    break
            assert told == b'data: {"model": "mine", "choices": []}\n\ndata: [DONE]\n\n'

    run(test)


# The subset of endpoints.


@pytest.mark.parametrize("form", ["list", "text", "address"])
def test_only_endpoints_of_the_subset_are_chosen(form: str) -> None:
    """However a proxy writes it; an address stands for all its ports."""

    async def test() -> None:
        async with picking(completes, completes, completes) as here:
            here.sidecars[0].e2e_s = 1.0
            allowed = here.endpoints[1:]
            subset = {"list": allowed, "text": ", ".join(allowed), "address": ["10.0.0.1", "127.0.0.1"]}[form]
            one = await ask(here, subset=subset)
            assert set(chosen(one.received[0])) == set(here.endpoints if form == "address" else allowed)
            text = b'{"model": "tiny", "input": "sea"}'
            got = await ask(here, head("/v1/embeddings"), text, subset=subset)
            assert set(chosen(got.received[0])) <= set(here.endpoints if form == "address" else allowed)

    run(test)


@pytest.mark.parametrize("subset", [[], "", ["10.0.0.1:80"]])
def test_a_subset_without_a_known_endpoint_is_refused(subset: Any) -> None:
    """With 503, as the protocol has it."""

    async def test() -> None:
        async with picking(completes) as here:
            status, headers, error = refusal(await ask(here, subset=subset))
            assert status == 503
            assert headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
            assert headers["content-type"] == "application/json"
            assert int(headers["retry-after"]) >= 1
            assert error["type"] == "server_error"

    run(test)


# Refusals.


def test_without_an_instance_every_request_is_refused() -> None:
    """With 503, also one that is no completion."""

    async def test() -> None:
        async with picking() as here:
            for headers in (head(), head("/v1/embeddings")):
                status, told, _ = refusal(await ask(here, headers))
                assert (status, told["x-llm-d-request-dropped-reason"]) == (503, "rejected-no-endpoints")
            reason = {"status": "503", "reason": "rejected-no-endpoints"}
            assert here.metric("block_picker_refused_total", **reason) == 2

    run(test)


def test_a_request_whose_targets_cannot_be_kept_is_shed() -> None:
    """With 429, the reason, and a time after which to retry."""

    async def test() -> None:
        async with picking(completes, policy="slo") as here:

            def late(response: Any) -> None:
                for one in response.predictions:
                    one.forecast.attained = 0.0

            here.sidecars[0].twist = late
            headers = head(x_slo_ttft_ms="1", x_slo_tpot_ms="1", x_block_when_late="shed")
            status, told, error = refusal(await ask(here, headers))
            assert status == 429
            assert told["x-llm-d-request-dropped-reason"] == "rejected-saturated"
            assert told["x-block-shed-reason"] == "late"
            assert int(told["retry-after"]) >= 1
            assert error["code"] == "rate_limit_exceeded"

    run(test)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "not JSON"),
        (b'{"model": "tiny"}', 400, "prompt"),
        (b'{"model": "huge", "prompt": "x"}', 404, "huge"),
        (b'{"model": "tiny", "prompt": "x", "kv_transfer_params": {"do_remote_decode": true}}', 400, "kv_transfer"),
        (b'{"model": "tiny", "prompt": "x", "priority": "high"}', 400, "priority"),
    ],
)
def test_bad_requests_are_refused_in_the_form_of_openai(body: bytes, status: int, words: str) -> None:
    """As the gateway does."""

    async def test() -> None:
        async with picking(completes) as here:
            told, headers, error = refusal(await ask(here, body=body))
            assert told == status
            assert words in error["message"]
            assert error["type"] == "invalid_request_error"
            assert "x-llm-d-request-dropped-reason" not in headers
            assert not here.sidecars[0].held

    run(test)


def test_a_body_that_is_too_large_is_refused_before_it_is_whole() -> None:
    """With 413."""

    async def test() -> None:
        async with picking(completes, settings={"max_body_bytes": 1000}) as here:
            one = Proxy(call=here.stub.Process())
            await one.send_headers(head())
            await one.send_body(1001 * b"x", end=False)
            await one.read()
            assert refusal(one)[0] == 413

    run(test)


def test_requests_beyond_the_limit_are_refused() -> None:
    """With 429, while others are under way."""

    async def test() -> None:
        async with picking(completes, settings={"max_streams": 1}) as here:
            first = await ask(here)
            second = Proxy(call=here.stub.Process())
            await second.send_headers(head())
            await second.read()
            status, headers, _ = refusal(second)
            assert (status, headers["x-llm-d-request-dropped-reason"]) == (429, "rejected-saturated")
            await first.finish()
            assert chosen((await ask(here)).received[0]) == here.endpoints

    run(test)


# The test mode.


def test_the_test_mode_takes_the_endpoints_of_a_header() -> None:
    """It has priority over everything; endpoints that are not known are left out, and without any the picker chooses."""

    async def test() -> None:
        settings = {"conformance_pool": "apps/pool"}
        async with picking(completes, completes, settings=settings) as here:
            here.sidecars[0].e2e_s = 1.0
            second = here.endpoints[1]
            one = await ask(here, head("/anything", test_epp_endpoint_selection=f"10.0.0.1, {second}"))
            assert chosen(one.received[0]) == [second]
            one = await ask(here, head(test_epp_endpoint_selection="127.0.0.1"))
            assert set(chosen(one.received[0])) == set(here.endpoints)
            one = await ask(here, head(test_epp_endpoint_selection="10.0.0.1:80"))
            assert chosen(one.received[0])[0] == here.endpoints[0]
            assert here.metric("block_picker_picks_total", how="test") == 2

    run(test)


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        (None, "fail: missing envoy lb metadata"),
        ({}, "fail: missing destination endpoint served metadata"),
        ({f"{ENDPOINT}-served": "10.0.0.1:80"}, "10.0.0.1:80"),
    ],
)
def test_the_test_mode_tells_who_served(metadata: dict[str, str] | None, told: str) -> None:
    """In headers of the response, with what is missing."""

    async def test() -> None:
        async with picking(completes, settings={"conformance_pool": "apps/pool"}) as here:
            one = await ask(here)
            message = wire.ProcessingRequest(response_headers=wire.HttpHeaders())
            if metadata is not None:
                message.metadata_context.filter_metadata["envoy.lb"].update(metadata)
            await one.call.write(message)
            headers = set_headers((await one.read()).response_headers.response.header_mutation)
            assert headers["x-conformance-test-served-endpoint"] == told
            assert headers["x-conformance-test-selected-endpoint"] == here.endpoints[0]
            assert headers["x-conformance-test-epp-pool"] == "apps/pool"

    run(test)


def test_without_the_test_mode_nobody_chooses_by_a_header() -> None:
    """A client cannot choose its endpoint."""

    async def test() -> None:
        async with picking(completes, completes) as here:
            here.sidecars[0].e2e_s = 1.0
            one = await ask(here, head(test_epp_endpoint_selection=here.endpoints[1]))
            assert chosen(one.received[0])[0] == here.endpoints[0]

    run(test)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/%63ompletions", "/v1/chat/completions"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_no_request_names_kv_blocks_of_others(path: str, encoding: str) -> None:
    """Whatever its path and its form, where engines read it."""

    async def test() -> None:
        body = (
            completion(messages=[], input="x", kv_transfer_params={"remote_block_ids": [1]}).decode().encode(encoding)
        )
        async with picking(completes) as here:
            status, _, _ = refusal(await ask(here, head(path), body=body))
            assert status == 400

    run(test)


def test_an_escaped_path_is_that_of_a_completion() -> None:
    """Engines serve it as one, so it is placed as one."""

    async def test() -> None:
        async with picking(completes) as here:
            chosen((await ask(here, head("/v1/%63ompletions?x=1"))).received[0])
            assert here.metric("block_picker_picks_total", how="placed") == 1

    run(test)


def test_the_rank_that_was_chosen_is_in_a_header() -> None:
    """The only endpoint serves all ranks; whatever rank the client names is overwritten."""

    async def test() -> None:
        async with picking(completes, completes, completes, ranks=True) as here:
            one = await ask(here, {**head(), "x-data-parallel-rank": "7"})
            assert chosen(one.received[0]) == here.endpoints[:1]
            headers = set_headers(one.received[0].request_headers.response.header_mutation)
            served = [sidecar.rank for sidecar in here.sidecars if sidecar.held]
            assert [headers["x-data-parallel-rank"]] == [str(rank) for rank in served]

    run(test)


def test_with_the_engine_s_own_balancing_no_rank_is_named() -> None:
    """The request is reserved at a rank nevertheless."""

    async def test() -> None:
        async with picking(completes, completes, ranks=True, data_parallel_balancing="engine") as here:
            one = await ask(here)
            headers = set_headers(one.received[0].request_headers.response.header_mutation)
            assert "x-data-parallel-rank" not in headers
            assert reserved(here)

    run(test)
