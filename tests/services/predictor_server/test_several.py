"""One process with the sidecars of several engines: one message reaches all of them, and each replies for itself."""

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
from tests.services.predictor_server.running_sidecars import NEVER_S, READY, NodeClient, node_of, request, run

STARTING = common_pb2.INSTANCE_STATE_STARTING


@contextmanager
def engines(folder: Path, *names: str) -> Iterator[dict[str, Path]]:
    """Write the state files of busy engines; the one of `late` does not exist yet."""
    with ExitStack() as stack:
        for name in names:
            stack.callback(busy(writer_at(folder / name)).close)
        yield {name: folder / name for name in (*names, "late")}


async def predict(node: NodeClient, *names: str, **fields: Any) -> predictor_pb2.PredictResponse:
    """Call Predict of several instances for one request."""
    message = predictor_pb2.PredictRequest(requests=[request()], instance_ids=names, **fields)
    response: predictor_pb2.PredictResponse = await node.stub.Predict(message)
    return response


@pytest.mark.parametrize("thread_from_s", [0.0, 1.0])
def test_each_instance_replies_as_to_a_message_of_its_own(tmp_path: Path, thread_from_s: float) -> None:
    """The answers are in the order of the names, once each, whether they are made concurrently or in turn."""

    async def test(files: dict[str, Path]) -> None:
        async with node_of(files, stall_s=NEVER_S, thread_from_s=thread_from_s) as node:
            reservation = predictor_pb2.ReserveRequest(request=request("p", 100, 50), ttl_s=60.0, instance_id="b")
            await node.stub.Reserve(reservation)
            answers = (await predict(node, "b", "late", "a", "b")).answers
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


def test_unknown_instances_are_left_out_of_the_answers(tmp_path: Path) -> None:
    """A wrong name in a list does not affect the others; a message for a single unknown instance is refused."""

    async def test(files: dict[str, Path]) -> None:
        async with node_of(files, stall_s=NEVER_S) as node:
            assert [answer.instance_id for answer in (await predict(node, "a", "c", "d")).answers] == ["a"]
            assert not (await predict(node, "c", "d")).answers
            refusals = [
                ({"instance_id": "c"}, grpc.StatusCode.FAILED_PRECONDITION, "'c' is not here, but 'a', 'late'"),
                ({}, grpc.StatusCode.INVALID_ARGUMENT, "instance_id: is missing; here are 'a', 'late'"),
                (
                    {"instance_id": "a", "instance_ids": ["a"]},
                    grpc.StatusCode.INVALID_ARGUMENT,
                    "instance_ids: cannot be set with instance_id",
                ),
            ]
            for fields, code, message in refusals:
                with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
                    await node.stub.Predict(predictor_pb2.PredictRequest(**fields))
                assert caught.value.code() is code

    with engines(tmp_path, "a") as files:
        run(test(files))


def test_engines_that_one_process_cannot_serve_are_refused() -> None:
    """Two of one name, a mirrored one among others, none at all."""
    exported = SidecarSettings(instance_id="a", state_file="/dev/shm/a")  # noqa: S108
    mirrored = SidecarSettings(instance_id="b", mirror=MirrorSettings(engine_url="http://127.0.0.1:8000"))
    require_distinct([exported])
    require_distinct([mirrored])
    for refused, message in (
        ([], "at least one"), ([exported, exported], "'a' is a duplicate"), ([exported, mirrored], "of its own"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            require_distinct(refused)
