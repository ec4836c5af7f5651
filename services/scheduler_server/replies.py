"""What sidecars say, and what their errors mean: nothing is believed that makes no sense."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf.message import DecodeError

from predictor.forecast_result import Forecast
from protos.block.v1 import common_pb2, predictor_pb2
from scheduler.candidate_ranking import CandidateStatus
from services.rpc.messages import forecast_from

STATES = {
    common_pb2.INSTANCE_STATE_STARTING: (CandidateStatus.DRAINING, "is starting"),
    common_pb2.INSTANCE_STATE_DRAINING: (CandidateStatus.DRAINING, "is draining"),
    common_pb2.INSTANCE_STATE_DOWN: (CandidateStatus.STOPPED, "its engine is down"),
}

# What an error status says of who sent it; what is not here is a failure of its own.
CODES = {
    grpc.StatusCode.DEADLINE_EXCEEDED: CandidateStatus.LATE,
    grpc.StatusCode.FAILED_PRECONDITION: CandidateStatus.INVALID,  # somebody else answers there
    grpc.StatusCode.INVALID_ARGUMENT: CandidateStatus.REFUSED,  # the request's fault
}

FAILURES = (grpc.aio.AioRpcError, ConnectionError, TimeoutError, ValueError)  # of asking and of reading


class SidecarError(Exception):
    """No promise, and why."""

    def __init__(self, fate: CandidateStatus, note: str) -> None:
        """Say what it means for the instance."""
        super().__init__(note)
        self.fate = fate
        self.note = note


def responses_in(raw: bytes, names: Sequence[str]) -> dict[str, predictor_pb2.PredictResponse]:
    """Read the answer to a question that was for these instances."""
    try:
        response = predictor_pb2.PredictResponse.FromString(raw)
    except DecodeError:
        raise ValueError("its answer is garbage") from None
    answers = response.answers if len(names) > 1 else [response]
    return {answer.instance_id: answer for answer in answers}


def promise_in(raw: bytes) -> predictor_pb2.ReserveResponse:
    """Read the answer to who asked for a promise."""
    try:
        return predictor_pb2.ReserveResponse.FromString(raw)
    except DecodeError:
        raise ValueError("its answer is garbage") from None


def prediction_in(response: predictor_pb2.PredictResponse, request_id: str) -> tuple[Forecast | None, str]:
    """Find the forecast for the one request that was asked about, or why it is refused."""
    if len(response.predictions) != 1:
        raise ValueError(f"predictions: there are {len(response.predictions)} for one request")
    return forecast_in(response.predictions[0], request_id)


def forecast_in(prediction: predictor_pb2.Prediction, request_id: str) -> tuple[Forecast | None, str]:
    """Read a prediction: the forecast, or why the request is refused."""
    if prediction.request_id != request_id:
        raise ValueError(f"prediction.request_id: {prediction.request_id!r} was not asked about")
    if prediction.HasField("refusal"):
        return None, f"{prediction.refusal.field}: {prediction.refusal.reason}"
    if not prediction.HasField("forecast"):
        raise ValueError("prediction.forecast: is missing")
    return forecast_from(prediction.forecast), ""


def require_sensible(
    response: predictor_pb2.ReserveResponse, request: predictor_pb2.ReserveRequest, instance_id: str
) -> None:
    """Refuse an answer that does not go with what was asked."""
    if response.instance_id != instance_id:
        raise ValueError(f"instance_id: {response.instance_id!r} answers there")
    if response.result == predictor_pb2.RESERVE_RESULT_UNSPECIFIED:
        raise ValueError("result: is missing")
    if response.result == predictor_pb2.RESERVE_RESULT_CONFLICT and not request.HasField("if_version"):
        raise ValueError("result: a conflict, where there was no condition")
    if not 0 <= response.expires_in_s < 1e9:
        raise ValueError(f"expires_in_s: must be a time from 0 on, not {response.expires_in_s}")


def fate_of(error: BaseException) -> CandidateStatus:
    """Tell what an error means for who sent it."""
    if isinstance(error, grpc.aio.AioRpcError):
        return CODES.get(error.code(), CandidateStatus.DOWN)
    if isinstance(error, TimeoutError):
        return CandidateStatus.LATE
    return CandidateStatus.INVALID if isinstance(error, ValueError) else CandidateStatus.DOWN


def note_of(error: BaseException) -> str:
    """Put an error into few words."""
    if isinstance(error, grpc.aio.AioRpcError):
        details = " ".join((error.details() or "").split()).removeprefix("requests[0].")[:200]
        return details if error.code() is grpc.StatusCode.INVALID_ARGUMENT else f"{error.code().name}: {details}"
    return str(error)[:200] or type(error).__name__
