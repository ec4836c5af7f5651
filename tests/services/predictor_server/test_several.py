"""One process beside several engines: one question asks all of them, and each still answers for itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.block.v1 import common_pb2, predictor_pb2
from services.predictor_server.settings import MirrorSettings, SidecarSettings, require_distinct
from tests.services.engine_state.files import busy, writer_at
from tests.services.predictor_server.asking import READY, AskedNode, node_of, request, run

ENDLESS_S = 1e9  # a test's engine does nothing for as long as it likes
STARTING = common_pb2.INSTANCE_STATE_STARTING


@contextmanager
def engines(folder: Path, *names: str) -> Iterator[dict[str, Path]]:
    """Busy ones that show themselves, and one that has not begun to."""
    with ExitStack() as stack:
        for name in names:
            stack.callback(busy(writer_at(folder / name)).close)
        yield {name: folder / name for name in (*names, "late")}


async def asked(node: AskedNode, *names: str, **fields: Any) -> predictor_pb2.PredictResponse:
    """Ask several about one request."""
    question = predictor_pb2.PredictRequest(requests=[request()], instance_ids=names, **fields)
    response: predictor_pb2.PredictResponse = await node.stub.Predict(question)
    return response


@pytest.mark.parametrize("thread_from_s", [0.0, 1.0])
def test_each_answers_as_if_it_were_asked_alone(tmp_path: Path, thread_from_s: float) -> None:
    """The answers come in the order of the names, once each, whether they are made side by side or in turn."""

    async def test(files: dict[str, Path]) -> None:
        async with node_of(files, stall_s=ENDLESS_S, thread_from_s=thread_from_s) as node:
            promise = predictor_pb2.ReserveRequest(request=request("p", 100, 50), ttl_s=60.0, instance_id="b")
            await node.stub.Reserve(promise)
            answers = (await asked(node, "b", "late", "a", "b")).answers
            assert [answer.instance_id for answer in answers] == ["b", "late", "a"]
            for answer in answers:
                alone = await node.stub.Predict(
                    predictor_pb2.PredictRequest(requests=[request()], instance_id=answer.instance_id)
                )
                assert (answer.state, answer.version, answer.epoch) == (alone.state, alone.version, alone.epoch)
                assert [one.forecast.e2e_s for one in answer.predictions] == pytest.approx(
                    [one.forecast.e2e_s for one in alone.predictions], rel=0.01
                )
            b, late, a = answers
            assert (a.state, b.state, late.state) == (READY, READY, STARTING)
            assert (a.indicators.num_reserved, b.indicators.num_reserved) == (0, 1)
            assert a.predictions[0].forecast.e2e_s < b.predictions[0].forecast.e2e_s

    with engines(tmp_path, "a", "b") as files:
        run(test(files))


def test_who_is_not_here_is_left_out_of_the_answers(tmp_path: Path) -> None:
    """The others are not to suffer for a list that is wrong in one place; who is meant alone is told so."""

    async def test(files: dict[str, Path]) -> None:
        async with node_of(files, stall_s=ENDLESS_S) as node:
            assert [answer.instance_id for answer in (await asked(node, "a", "c", "d")).answers] == ["a"]
            assert not (await asked(node, "c", "d")).answers
            refusals = [
                ({"instance_id": "c"}, grpc.StatusCode.FAILED_PRECONDITION, "'c' is not here, but 'a', 'late'"),
                ({}, grpc.StatusCode.INVALID_ARGUMENT, "instance_id: is missing; here are 'a', 'late'"),
                (
                    {"instance_id": "a", "instance_ids": ["a"]},
                    grpc.StatusCode.INVALID_ARGUMENT,
                    "instance_ids: goes without instance_id",
                ),
            ]
            for whom, code, named in refusals:
                with pytest.raises(grpc.aio.AioRpcError, match=named) as caught:
                    await node.stub.Predict(predictor_pb2.PredictRequest(**whom))
                assert caught.value.code() is code

    with engines(tmp_path, "a") as files:
        run(test(files))


def test_what_no_process_could_stand_beside_is_refused() -> None:
    """Two of one name, a mirrored one among others, none at all."""
    read = SidecarSettings(instance_id="a", state_file="/dev/shm/a")  # noqa: S108
    mirrored = SidecarSettings(instance_id="b", mirror=MirrorSettings(engine_url="http://127.0.0.1:8000"))
    require_distinct([read])
    require_distinct([mirrored])
    for wrong, named in (([], "at least one"), ([read, read], "'a' is there twice"), ([read, mirrored], "of its own")):
        with pytest.raises(ValueError, match=named):
            require_distinct(wrong)
