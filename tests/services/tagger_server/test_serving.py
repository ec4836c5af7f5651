"""The tagger over a real channel: tags, learning, refusals, and shutdown."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from io import StringIO
from logging import getLogger
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from length_tagger import DEFAULT_ORDER, chained
from length_tagger.estimate import MAX_TOKENS
from predictor.lengths import Tag
from protos.block.v1 import common_pb2, tagger_pb2, tagger_pb2_grpc
from services import logs
from services.cli import serve_tagger
from services.rpc.server import ServerSettings, serving
from services.tagger_server.service import HEAD_BYTES, MAX_OUTCOMES, TAIL_BYTES, TaggerService, text_from
from tests.services.cli import running as cli
from tests.services.waiting import run

BLOCK = str(Path(sys.executable).with_name("block"))
STOP = common_pb2.FINISH_REASON_STOP
WITHOUT_LEARNING = "client,history,constant"


@asynccontextmanager
async def tagger(
    estimator: str = WITHOUT_LEARNING, **options: Any
) -> AsyncIterator[tuple[Any, Any, CollectorRegistry]]:
    """A tagger, a stub and a channel for it."""
    registry = CollectorRegistry()
    service = TaggerService(chained(estimator.split(",")), registry)
    register = partial(tagger_pb2_grpc.add_LengthTaggerServicer_to_server, service)
    async with (
        serving(ServerSettings(**options), [register], registry) as here,
        grpc.aio.insecure_channel(f"127.0.0.1:{here.port}", options=[("grpc.max_send_message_length", -1)]) as channel,
    ):
        yield tagger_pb2_grpc.LengthTaggerStub(channel), channel, registry


def tag_request(prompt: bytes = b"", **request: Any) -> tagger_pb2.TagRequest:
    """A request for a tag."""
    return tagger_pb2.TagRequest(request=common_pb2.Request(**request), prompt=prompt)


def outcomes(*lengths: int, **outcome: Any) -> tagger_pb2.ObserveRequest:
    """The outcomes of some requests."""
    return tagger_pb2.ObserveRequest(
        outcomes=[
            common_pb2.Outcome(**{"output_tokens": length, "finish_reason": STOP, **outcome}) for length in lengths
        ]
    )


async def refusal(call: Awaitable[Any]) -> str:
    """The error message of a refused call."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value
    return str(caught.value.details())


def test_tags_come_from_the_first_estimator_with_an_estimate() -> None:
    """A fixed length is certain, a hint is likely, history is a guess, and the last one is a constant."""

    async def test() -> None:
        async with tagger() as (stub, _, registry):
            fixed = (await stub.Tag(tag_request(model="m", max_tokens=64, ignore_eos=True))).tag
            assert (fixed.median_tokens, fixed.spread, fixed.confidence, fixed.estimator) == (64, 0, 1, "client")
            hinted = (await stub.Tag(tag_request(model="m", expected_output_tokens=90))).tag
            assert (hinted.median_tokens, hinted.estimator) == (90, "client")
            unknown = (await stub.Tag(tag_request(model="m"))).tag
            assert (unknown.median_tokens, unknown.confidence, unknown.estimator) == (256, 0, "constant")
            assert (await stub.Observe(outcomes(*range(30, 51), model="m"))).num_learned == 21
            seen = (await stub.Tag(tag_request(model="m", max_tokens=1000))).tag
            assert (seen.median_tokens, seen.estimator) == (40, "history")
            assert 0 < seen.spread < 1
            assert registry.get_sample_value("block_tagger_tags_total", {"estimator": "client"}) == 2

    run(test)


def test_without_an_estimate_there_is_no_tag() -> None:
    """The tag is absent, not invented."""

    async def test() -> None:
        async with tagger("client") as (stub, *_):
            assert not (await stub.Tag(tag_request(b"Tell me a story", model="m"))).HasField("tag")

    run(test)


def test_outcomes_are_learned_by_the_keys_of_their_tags() -> None:
    """Answers of a template are learned by the tag's keys, not by the client."""

    async def test() -> None:
        async with tagger() as (stub, *_):
            template = b"You are a terse assistant. " * 20
            tag = (await stub.Tag(tag_request(template + b"Why?", model="m"))).tag
            assert len(tag.keys) == 2  # the template, and the whole
            await stub.Observe(outcomes(*[900] * 40, model="m"))
            await stub.Observe(outcomes(*[12] * 8, model="m", tag=tag))
            assert (await stub.Tag(tag_request(template + b"How?", model="m"))).tag.median_tokens == 12
            assert (await stub.Tag(tag_request(b"How?", model="m"))).tag.median_tokens == 900

    run(test)


def test_only_lengths_that_the_model_chose_are_learned() -> None:
    """Cancelled and failed answers, and those whose length the client fixed, are not learned."""

    async def test() -> None:
        async with tagger() as (stub, *_):
            fixed = common_pb2.Tag(median_tokens=5, estimator="client")
            hinted = common_pb2.Tag(median_tokens=5, spread=0.3, estimator="client")
            for taught, outcome in (
                (0, {"finish_reason": common_pb2.FINISH_REASON_CANCELLED}),
                (0, {"finish_reason": common_pb2.FINISH_REASON_FAILED}),
                (0, {"finish_reason": common_pb2.FINISH_REASON_UNSPECIFIED}),
                (0, {"output_tokens": 0}),
                (0, {"tag": fixed}),
                (1, {"tag": hinted}),
                (1, {"finish_reason": common_pb2.FINISH_REASON_LENGTH}),
            ):
                request = outcomes(5, **{"model": "m", **outcome})
                assert (await stub.Observe(request)).num_learned == taught, outcome

    run(test)


def test_bad_values_are_refused_by_name() -> None:
    """Each refusal names the field as on the wire, and the service continues."""

    async def test() -> None:
        async with tagger() as (stub, *_):
            cases: list[tuple[str, dict[str, Any]]] = [
                ("max_tokens", {"max_tokens": 0}),
                ("max_tokens", {"max_tokens": 2**32 - 1}),
                ("min_tokens", {"min_tokens": 6, "max_tokens": 5}),
                ("prompt_tokens", {"prompt_tokens": 2**31}),
                ("expected_output_tokens", {"expected_output_tokens": 0}),
            ]
            for field, request in cases:
                assert (await refusal(stub.Tag(tag_request(**request)))).startswith(f"request.{field}: ")
            too_long = outcomes(7, 2**31, model="m")
            assert (await refusal(stub.Observe(too_long))).startswith("outcomes[1].output_tokens: ")
            many_keys = outcomes(7, tag=common_pb2.Tag(keys=range(9)))
            assert (await refusal(stub.Observe(many_keys))).startswith("outcomes[0].tag.keys: ")
            many = outcomes(*[7] * (MAX_OUTCOMES + 1))
            assert (await refusal(stub.Observe(many))).startswith("outcomes: ")
            assert (await stub.Tag(tag_request(model="m"))).tag.estimator == "constant"  # nothing was half learned

    run(test)


def test_any_prompt_gets_a_finite_tag() -> None:
    """Empty, enormous, repetitive, in any script, or not text at all."""

    async def test() -> None:
        async with tagger() as (stub, *_):
            surrogates = "\ud800\udfff".encode("utf-8", "surrogatepass")
            for prompt in (
                b"", b"\0", b"\xff\xfe" * 1000, surrogates * 300, "これは何ですか。".encode() * 99, b"a" * 15 * 2**20,
            ):  # fmt: skip
                tag = (await stub.Tag(tag_request(prompt, model="m"))).tag
                Tag(median_tokens=tag.median_tokens, spread=tag.spread)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Tag(tag_request(b"a" * 17 * 2**20))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (await stub.Tag(tag_request())).HasField("tag")

    run(test)


def test_of_a_long_prompt_head_and_tail_are_read() -> None:
    """The middle of a long prompt is not read, and characters that are cut in half do no harm."""
    limit = HEAD_BYTES + TAIL_BYTES
    assert text_from(b"a" * limit) == "a" * limit
    assert text_from(b"h" * HEAD_BYTES + b"m" * 1000 + b"t" * TAIL_BYTES) == "h" * HEAD_BYTES + "t" * TAIL_BYTES
    assert text_from("é".encode() * limit).count("\ufffd") <= 2
    assert text_from(b"x" + "é".encode() * limit).count("\ufffd") <= 2


@settings(max_examples=40, deadline=None, derandomize=True)
@given(messages=st.lists(st.tuples(st.sampled_from(["Tag", "Observe"]), st.binary(max_size=60)), max_size=20))
def test_any_bytes_are_survived(messages: list[tuple[str, bytes]]) -> None:
    """Each call gets a response or an error, and the next one is served."""

    async def test() -> None:
        async with tagger() as (stub, channel, _):
            for method, raw in messages:
                try:
                    await channel.unary_unary(f"/block.v1.LengthTagger/{method}")(raw)
                except grpc.aio.AioRpcError as error:
                    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
            assert 0 < (await stub.Tag(tag_request())).tag.median_tokens <= MAX_TOKENS

    run(test)


def test_fields_and_enum_values_from_the_future_are_ignored() -> None:
    """A newer client is served as far as its request is understood."""

    async def test() -> None:
        async with tagger() as (stub, channel, _):
            newer = tag_request(model="m", max_tokens=9, ignore_eos=True).SerializeToString() + b"\xf8\x3e\x01"
            raw = await channel.unary_unary("/block.v1.LengthTagger/Tag")(newer)
            assert tagger_pb2.TagResponse.FromString(raw).tag.median_tokens == 9
            request = outcomes(5, model="m", finish_reason=cast("Any", 14))
            assert (await stub.Observe(request)).num_learned == 0

    run(test)


def test_health_and_reflection() -> None:
    """The standard services report the state and the methods."""

    async def test() -> None:
        async with tagger() as (_, channel, _registry):
            health: Any = health_pb2_grpc.HealthStub(channel)
            for service in ("", "block.v1.LengthTagger"):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
                await health.Check(health_pb2.HealthCheckRequest(service="block.v1.Nobody"))
            reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = reflection_pb2.ServerReflectionRequest
            questions = [asked(list_services=""), asked(file_containing_symbol="block.v1.LengthTagger")]
            answers = [answer async for answer in reflection.ServerReflectionInfo(iter(questions))]
            names = {service.name for service in answers[0].list_services_response.service}
            assert {"block.v1.LengthTagger", "grpc.health.v1.Health"} <= names
            assert answers[1].file_descriptor_response.file_descriptor_proto

    run(test)


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A tagger in a process of its own, and its log line with the port."""
    command = [BLOCK, "serve", "tagger", "--port", "0", "--log-format", "json", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stderr is not None
            yield running, json.loads(running.stderr.readline())
        finally:
            running.kill()


def test_a_terminated_process_finishes_its_calls() -> None:
    """After SIGTERM in full traffic each call is completed or refused, and the process exits with status 0."""

    async def traffic(port: int, running: subprocess.Popen[str]) -> int:
        num_answered = 0
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = tagger_pb2_grpc.LengthTaggerStub(channel)

            async def caller() -> None:
                nonlocal num_answered
                while True:
                    try:
                        await stub.Tag(tag_request(b"x" * 1000, model="m"))
                    except grpc.aio.AioRpcError as error:
                        assert error.code() is grpc.StatusCode.UNAVAILABLE, error
                        return
                    num_answered += 1
                    if num_answered == 200:
                        running.send_signal(signal.SIGTERM)

            async with asyncio.timeout(60):
                await asyncio.gather(*(caller() for _ in range(16)))
        return num_answered

    with process() as (running, line):
        assert line["event"] == "serving"
        assert line["host"] == "127.0.0.1"
        assert asyncio.run(traffic(line["port"], running)) >= 200
        assert running.wait(timeout=60) == 0
        assert running.stderr is not None
        events = [json.loads(text)["event"] for text in running.stderr]
        assert events == ["draining", "stopped"]


def test_settings_from_flags_environment_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag has precedence over the environment, that over the file, and that over the default."""
    config = tmp_path / "block.toml"
    config.write_text(
        "[tagger]\nestimator = ['client', 'constant']\nconstant-tokens = 10\nconstant_spread = 0.5\nhint_spread = 0.2\n"
    )
    monkeypatch.setenv("BLOCK_CONSTANT_SPREAD", "0.25")
    monkeypatch.setenv("BLOCK_HINT_SPREAD", "0.3")
    monkeypatch.setenv("BLOCK_TAGGER_HINT_SPREAD", "0.4")

    async def ask(port: int) -> tuple[common_pb2.Tag, common_pb2.Tag]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = tagger_pb2_grpc.LengthTaggerStub(channel)
            return (await stub.Tag(tag_request())).tag, (await stub.Tag(tag_request(expected_output_tokens=3))).tag

    with process("--config", str(config), "--constant-tokens", "20") as (_, line):
        constant, hinted = asyncio.run(ask(line["port"]))
    assert (constant.median_tokens, constant.spread, hinted.spread) == (20, 0.25, 0.4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--estimator", "clint"],
            "estimator: must be one of client, cached, linear, roberta, history, constant, not 'clint'; did you mean client?",
        ),
        (["--estimator", ","], "estimator: name at least one"),
        (["--constant-tokens", "nan"], "constant_tokens: must be above 0"),
        (["--history-window", "0"], "history_window: must be at least 1"),
        (["--port", "99999"], "port: must lie between 0 and 65535"),
        (["--prot", "1"], "No such option"),
        (["--config", "/nowhere.toml"], "/nowhere.toml: cannot be read"),
    ],
)
def test_bad_settings_end_it_with_one_line(arguments: list[str], message: str) -> None:
    """An impossible value is named in one line, with status 2."""
    assert message in cli.refusal("serve", "tagger", *arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tagger]\nporrt = 1\n", "tagger.porrt: is no known setting; did you mean port?"),
        ("[tagger]\nport = {}\n", "tagger.port: must be"),
        ("tagger = 1\n", "tagger: must be a table"),
        ("[tagger\n", "is not TOML"),
    ],
)
def test_bad_files_end_it_with_one_line(text: str, message: str, tmp_path: Path) -> None:
    """A bad file is refused, naming file and key."""
    config = tmp_path / "block.toml"
    config.write_text(text)
    said = cli.refusal("serve", "tagger", "-c", str(config))
    assert str(config) in said
    assert message in said


def test_a_port_in_use_ends_it_with_one_line() -> None:
    """The second of two taggers on one port exits with status 2."""
    with process() as (_, line):
        said = cli.refusal("serve", "tagger", "--port", str(line["port"]))
    assert said == f"block: port: {line['port']} on 127.0.0.1 is in use\n"


@pytest.mark.parametrize("form", logs.FORMATS)
def test_log_lines_are_one_line_each(form: str) -> None:
    """An event takes one line for any fields, and JSON lines can be parsed."""
    out = StringIO()
    root = getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        logs.configure("debug", form, out)
        logs.log_event(getLogger("test"), 20, "tagged", model='a "b"\nc=d', empty="", seconds=0.1234567891, none=None)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    assert out.getvalue().count("\n") == 1
    if form == "json":
        line = json.loads(out.getvalue())
        assert (line["level"], line["event"], line["model"]) == ("info", "tagged", 'a "b"\nc=d')
    else:
        expected = 'INFO test: tagged model="a \\"b\\"\\nc=d" empty="" seconds=0.123457 none=None\n'
        assert out.getvalue().endswith(expected)


def test_the_default_order_is_the_servers() -> None:
    """The command's default is the package's."""
    given = next(one for one in serve_tagger.tagger.params if one.name == "estimator").default
    assert given == ",".join(DEFAULT_ORDER)
