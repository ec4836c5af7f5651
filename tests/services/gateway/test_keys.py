"""What keys allow at a gateway, over real sockets: who is refused and how, and that no key is written anywhere."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest

from protos.block.v1 import common_pb2
from services.gateway.usage import duration
from services.security.access_settings import AccessSettings
from tests.services.gateway.stubs import COMPLETION, STREAM, Call, Scene, completes, scene, streams
from tests.services.gateway.test_failing import error_of
from tests.services.live_page.reading import paged
from tests.services.security.key_files import key, tenant, write_keys
from tests.services.waiting import run, until

CHAT = {"messages": [{"role": "user", "content": "hi"}], "model": "tiny"}


def bearer(text: str) -> dict[str, str]:
    """Write the header of a key."""
    return {"authorization": f"Bearer {text}"}


async def refused(here: Scene, reason: str) -> float:
    """Read how many calls were refused for a reason."""
    return await here.metric(f'block_access_refused_total{{reason="{reason}"}}')


def code_of(response: httpx.Response) -> tuple[int, Any]:
    """Return status and code of an error."""
    return response.status_code, error_of(response)["code"]


def test_roles_and_expiry() -> None:
    """Expired and unknown keys are 401, parts are 403, operators may send requests, too."""

    async def test() -> None:
        keys = (
            key("new", "a"),
            key("old", "b", expires="2020-01-01"),
            key("p", role="part"),
            key("o", role="operator"),
        )
        async with scene(completes, keys=keys) as here:
            assert (await here.post(headers=bearer("new"))).status_code == 200
            assert (await here.post(headers={"x-api-key": "new"})).status_code == 200
            basic = {"authorization": "Basic bmV3Om5ldw==", "x-api-key": "new"}
            assert (await here.post(headers=basic)).status_code == 200
            assert (await here.post(headers=bearer("o"))).status_code == 200
            assert code_of(await here.post(headers=bearer("old"))) == (401, "expired_api_key")
            assert code_of(await here.post(headers={"x-api-key": "none"})) == (401, "invalid_api_key")
            assert code_of(await here.post()) == (401, "invalid_api_key")
            assert code_of(await here.post(headers=bearer("p"))) == (403, "permission_denied")
            assert code_of(await here.client.get("/v1/models", headers=bearer("old"))) == (401, "expired_api_key")
            for path in ("/health", "/ready", "/metrics", "/ui"):
                assert (await here.client.get(path)).status_code == 200
            assert [await refused(here, one) for one in ("expired_key", "invalid_key", "no_permission")] == [2, 2, 1]
            assert len(here.scheduler.asked) == 4

    run(test)


def test_models_of_a_key() -> None:
    """Another model is refused as if it did not exist; the list has only those that the key may use."""

    async def test() -> None:
        keys = (key("all"), key("tiny", models=["tiny"]), key("other", models=["large", "huge"]))
        async with scene(completes, completes, keys=keys, models=("tiny", "large")) as here:
            assert code_of(await here.post(headers=bearer("other"))) == (404, "model_not_found")
            assert (await here.post(headers=bearer("tiny"))).status_code == 200
            unnamed = await here.post(headers=bearer("other"), model=None)
            assert (unnamed.status_code, error_of(unnamed)["param"]) == (400, "model")
            assert "huge, large only" in error_of(unnamed)["message"]
            for name, listed in (("all", ["tiny", "large"]), ("tiny", ["tiny"]), ("other", ["large"])):
                models = (await here.client.get("/v1/models", headers=bearer(name))).json()["data"]
                assert [model["id"] for model in models] == listed
            assert await refused(here, "model") == 2

    run(test)


def test_rates_are_told_and_kept() -> None:
    """The headers count down; a request beyond is 429 with the time to wait; what was not used is given back."""

    async def test() -> None:
        keys = (key("r", requests_per_minute=2), key("t", tokens_per_minute=100), key("free"))
        async with scene(completes, keys=keys) as here:
            left = []
            for _ in range(2):
                response = await here.post(headers=bearer("r"))
                assert response.headers["x-ratelimit-limit-requests"] == "2"
                assert "x-ratelimit-limit-tokens" not in response.headers
                left.append(response.headers["x-ratelimit-remaining-requests"])
            assert left == ["1", "0"]
            response = await here.post(headers=bearer("r"))
            assert code_of(response) == (429, "requests_per_minute_exceeded")
            assert error_of(response)["type"] == "rate_limit_error"
            assert 1 <= int(response.headers["retry-after"]) <= 30
            assert response.headers["x-ratelimit-remaining-requests"] == "0"
            assert response.headers["x-ratelimit-reset-requests"].endswith("s")
            assert "x-ratelimit-limit-requests" not in (await here.post(headers=bearer("free"))).headers

            for _ in range(3):  # each may need up to 92 tokens, and uses 10
                response = await here.post(headers=bearer("t"), max_tokens=60)
                assert response.status_code == 200
            assert 60 <= int(response.headers["x-ratelimit-remaining-tokens"]) + 60 + 10 < 100
            response = await here.post(headers=bearer("t"), max_tokens=90)
            assert code_of(response) == (429, "tokens_per_minute_exceeded")
            assert int(response.headers["retry-after"]) >= 1
            response = await here.post(headers=bearer("t"), max_tokens=1000)
            assert code_of(response) == (429, "tokens_per_minute_exceeded")
            assert "retry-after" not in response.headers
            assert response.headers["x-should-retry"] == "false"
            assert await refused(here, "tokens_per_minute") == 2

    run(test)


def test_tenants_share_what_is_under_way() -> None:
    """Requests and tokens under way count for all keys of a tenant until they end, also where clients leave."""
    go = asyncio.Event()

    async def waits(call: Call) -> None:
        call.stream()
        await call.chunk(STREAM[0])
        await go.wait()
        for piece in STREAM[1:]:
            await call.chunk(piece)
        call.end()

    async def test() -> None:
        keys = (
            key("a", tenant="team"), key("b", tenant="team"), tenant("team", max_requests=2, max_tokens_in_flight=400),
            key("c"),
        )  # fmt: skip
        async with scene(waits, keys=keys) as here:
            body = {"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 150}
            here.scheduler.changes = common_pb2.Decision(tag=common_pb2.Tag(median_tokens=5000, estimator="constant"))

            async def start(name: str) -> tuple[httpx.Response, Any]:
                request = here.client.build_request("POST", "/v1/completions", json=body, headers=bearer(name))
                response = await here.client.send(request, stream=True)
                pieces = response.aiter_raw()
                await anext(pieces)
                return response, pieces

            one, pieces_of_one = await start("a")
            response = await here.post(headers=bearer("b"), max_tokens=300)
            assert code_of(response) == (429, "max_tokens_in_flight_exceeded")
            assert response.headers["retry-after"] == "1"
            two, pieces_of_two = await start("b")
            assert code_of(await here.post(headers=bearer("a"), max_tokens=1)) == (429, "max_requests_exceeded")
            three, pieces_of_three = await start("c")  # another tenant
            await one.aclose()  # the client leaves
            await until(lambda: here.scheduler.released.qsize() == 1)
            four, pieces_of_four = await start("a")
            go.set()
            for pieces in (pieces_of_two, pieces_of_three, pieces_of_four):
                assert [piece async for piece in pieces]
            assert {one.status_code, two.status_code, three.status_code, four.status_code} == {200}
            del pieces_of_one
            await until(lambda: here.scheduler.released.qsize() == 4)
            assert (await here.post(headers=bearer("b"), max_tokens=300)).status_code == 200
            assert await refused(here, "max_requests") == await refused(here, "max_tokens_in_flight") == 1

    run(test)


def test_a_prediction_makes_room() -> None:
    """Until its length is predicted a request counts with its maximum, then with the prediction."""
    go = asyncio.Event()

    async def waits(call: Call) -> None:
        await go.wait()
        call.whole(COMPLETION)

    async def test() -> None:
        async with scene(waits, keys=(key("a", max_tokens_in_flight=1000),)) as here:  # the stub predicts 3 tokens
            first = asyncio.create_task(here.post(headers=bearer("a"), max_tokens=900))
            await until(lambda: len(here.engines[0].calls) == 1)
            second = asyncio.create_task(here.post(headers=bearer("a"), max_tokens=900))
            await until(lambda: len(here.engines[0].calls) == 2)
            here.scheduler.changes = common_pb2.Decision(tag=common_pb2.Tag(median_tokens=5000, estimator="constant"))
            third = asyncio.create_task(here.post(headers=bearer("a"), max_tokens=900))
            await until(lambda: len(here.engines[0].calls) == 3)  # is predicted to need all of them
            assert code_of(await here.post(headers=bearer("a"), max_tokens=200))[0] == 429
            go.set()
            assert [one.status_code for one in await asyncio.gather(first, second, third)] == [200] * 3
            assert (await here.post(headers=bearer("a"), max_tokens=900)).status_code == 200

    run(test)


def test_keys_change_without_a_restart(tmp_path: Any) -> None:
    """A stream goes on while its key is removed; a broken file keeps the keys, and readiness and a metric show it."""
    path = tmp_path / "keys.toml"
    write_keys(path, key("one"))
    go = asyncio.Event()

    async def waits(call: Call) -> None:
        call.stream()
        await call.chunk(STREAM[0])
        await go.wait()
        for piece in STREAM[1:]:
            await call.chunk(piece)
        call.end()

    async def test() -> None:
        access = AccessSettings(api_key_file=str(path))
        async with scene(waits, server={"access": access}) as here:
            body = {"model": "tiny", "prompt": "x", "stream": True}
            async with here.client.stream("POST", "/v1/completions", json=body, headers=bearer("one")) as response:
                pieces = response.aiter_raw()
                received = await anext(pieces)
                write_keys(path, key("two"))

                async def knows() -> bool:
                    return (await here.client.get("/v1/models", headers=bearer("two"))).status_code == 200

                await until(knows)
                assert code_of(await here.client.get("/v1/models", headers=bearer("one"))) == (401, "invalid_api_key")
                path.write_text("two sk-secret")

                async def shows() -> bool:
                    return await here.metric("block_api_key_file_valid") == 0

                await until(shows)
                ready = await here.client.get("/ready")
                assert (ready.status_code, ready.json()["status"]) == (200, "ready")
                assert str(path) in ready.json()["problems"][0]
                assert "secret" not in ready.text
                assert await knows()
                go.set()
                async for piece in pieces:
                    received += piece
                assert received == b"".join(STREAM)

    run(test)


def test_no_key_is_written_anywhere(caplog: pytest.LogCaptureFixture) -> None:
    """Not in logs at the lowest level, metrics, explanations, what schedulers and engines get, nor in replies."""
    caplog.set_level(logging.DEBUG)
    secrets = ["sk-client-1234567", "sk-operator-1234567", "sk-wrong-1234567"]

    async def test() -> None:
        keys = (key(secrets[0], "alice"), key(secrets[1], "boss", role="operator"))
        async with scene(completes, streams, keys=keys) as here:
            texts = []
            for secret in secrets:
                for headers in (bearer(secret), {"x-api-key": secret}):
                    paths = ("/v1/models", "/ui/decision?request_id=x", "/nowhere", "/metrics", "/ready")
                    texts += [(await here.client.get(path, headers=headers)).text for path in paths]
                    explained = {**headers, "x-block-explain": "1"}
                    response = await here.post(headers=explained, stream=True)
                    texts += [response.text, str(response.headers)]
                    texts.append((await here.post(headers=headers, max_tokens=-1)).text)
                    texts.append((await here.client.post("/v1/chat/completions", json=CHAT, headers=headers)).text)
            texts += [str(asked) for asked in here.scheduler.asked]
            texts += [str(call.headers) + call.body.decode() for engine in here.engines for call in engine.calls]
            assert here.engines[0].calls
            for secret in secrets:
                assert not any(secret in text for text in texts)

    run(test)
    assert any(record.name == "block.audit" for record in caplog.records)
    written = "\n".join(f"{record.getMessage()} {record.__dict__}" for record in caplog.records)
    for secret in secrets:
        assert secret not in written


def test_operators_at_the_gateway(caplog: pytest.LogCaptureFixture) -> None:
    """The live page's data are for operators; each look and each refusal is a line of the audit log."""

    async def test() -> None:
        async with paged(keys=(key("c", "carl"), key("o", "olga", role="operator"))) as here:
            caplog.clear()
            for headers, status in ((bearer("c"), 403), (bearer("x"), 401), (bearer("o"), 404)):
                response = await here.client.get("/ui/decision?request_id=one", headers=headers)
                assert response.status_code == status
        async with paged() as here:  # without keys: callers on this machine, and no pages of other sites
            for headers, status in (
                ({}, 404),
                ({"origin": str(here.client.base_url)}, 404),
                ({"origin": "https://evil.example"}, 403),
                ({"sec-fetch-site": "cross-site"}, 403),
                ({"host": "evil.example"}, 403),
            ):
                response = await here.client.get("/ui/decision?request_id=one", headers=headers)
                assert response.status_code == status, headers

    run(test)
    lines = [record.fields for record in caplog.records if record.name == "block.audit"]  # type: ignore[attr-defined]
    assert [(one["actor"], one["role"], one["result"]) for one in lines[:4]] == [
        ("carl", "client", "refused"), ("-", "anyone", "refused"), ("olga", "operator", "ok"), ("-", "operator", "ok"),
    ]  # fmt: skip
    assert all(one["object"] == "/ui/decision?request_id=one" for one in lines)
    assert all(one["peer"].startswith("127.0.0.1:") for one in lines)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.0201, "21ms"), (1, "1s"), (7.66, "7.66s"), (60, "1m0s"), (366.5, "6m6.5s")]
)
def test_durations(seconds: float, text: str) -> None:
    """They are written as OpenAI does."""
    assert duration(seconds) == text
