"""Replies of sidecars: parsed, validated, and mapped to what a decision makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import grpc
from google.protobuf.message import DecodeError

from predictor.forecast_result import Forecast
from protos.block.v1 import common_pb2, predictor_pb2
from scheduler.candidate import CandidateStatus
from scheduler.instances import NOT_READY
from scheduler.intentions import Answer
from services.rpc.messages import forecast_from

STATE_NAMES = {
    common_pb2.INSTANCE_STATE_STARTING: "starting",
    common_pb2.INSTANCE_STATE_DRAINING: "draining",
    common_pb2.INSTANCE_STATE_DOWN: "down",
}

# The status of a candidate whose sidecar returned an error status; any other one is a failure of the connection.
CODES = {
    grpc.StatusCode.DEADLINE_EXCEEDED: CandidateStatus.LATE,
    grpc.StatusCode.FAILED_PRECONDITION: CandidateStatus.INVALID,  # another instance answers there
    grpc.StatusCode.INVALID_ARGUMENT: CandidateStatus.REFUSED,  # the request is at fault
}

FAILURES = (grpc.aio.AioRpcError, ConnectionError, TimeoutError, ValueError)  # of a call, and of reading its reply


def state_name(state: int) -> str:
    """Return the name by which the decision core knows an instance's state."""
    return STATE_NAMES.get(state, "ready")  # type: ignore[call-overload,no-any-return]


def predict_responses(raw: bytes, names: Sequence[str]) -> Mapping[str, predictor_pb2.PredictResponse]:
    """Parse the reply to a forecast call for these instances."""
    try:
        response = predictor_pb2.PredictResponse.FromString(raw)
    except DecodeError:
        raise ValueError("its reply is no PredictResponse") from None
    answers = response.answers if len(names) > 1 else [response]
    return {answer.instance_id: answer for answer in answers}


def reserve_response(raw: bytes) -> predictor_pb2.ReserveResponse:
    """Parse the reply to a reservation."""
    try:
        return predictor_pb2.ReserveResponse.FromString(raw)
    except DecodeError:
        raise ValueError("its reply is no ReserveResponse") from None


def release_response(raw: bytes) -> common_pb2.ReleaseResponse:
    """Parse the reply to a release."""
    try:
        return common_pb2.ReleaseResponse.FromString(raw)
    except DecodeError:
        raise ValueError("its reply is no ReleaseResponse") from None


def watch_response(raw: bytes) -> predictor_pb2.WatchResponse:
    """Parse what an instance reports by itself."""
    try:
        return predictor_pb2.WatchResponse.FromString(raw)
    except DecodeError:
        raise ValueError("its report is no WatchResponse") from None


def answer_of(response: predictor_pb2.PredictResponse, request_id: str, answered_s: float) -> Answer:
    """Read one instance's reply about one request."""
    version, epoch = response.version, response.epoch
    not_ready = NOT_READY.get(state_name(response.state))
    if not_ready is not None and not response.predictions:  # without an engine there is no forecast
        return Answer(not_ready[0], None, version, epoch, not_ready[1], answered_s)
    if len(response.predictions) != 1:
        raise ValueError(f"predictions: there are {len(response.predictions)} for one request")
    forecast, refusal = forecast_in(response.predictions[0], request_id)
    if refusal:
        return Answer(CandidateStatus.REFUSED, None, version, epoch, refusal, answered_s)
    if not_ready is not None:
        return Answer(not_ready[0], forecast, version, epoch, not_ready[1], answered_s)
    return Answer(CandidateStatus.FORECAST, forecast, version, epoch, "", answered_s)


def conflict_of(response: predictor_pb2.ReserveResponse, request_id: str) -> Answer:
    """Read the forecast that a conflict comes with."""
    try:
        forecast, refusal = forecast_in(response.prediction, request_id)
    except ValueError as error:
        return Answer(CandidateStatus.INVALID, note=str(error))
    if refusal:
        return Answer(CandidateStatus.REFUSED, None, response.version, response.epoch, refusal)
    return Answer(CandidateStatus.FORECAST, forecast, response.version, response.epoch)


def refusal_of(response: predictor_pb2.ReserveResponse) -> tuple[CandidateStatus, str]:
    """Read why a reservation was refused: by the state of the engine, or because of the request."""
    refusal = response.prediction.refusal
    state = state_name(response.state)
    if state in NOT_READY:
        return NOT_READY[state][0], refusal.reason
    return CandidateStatus.REFUSED, f"{refusal.field}: {refusal.reason}"


def forecast_in(prediction: predictor_pb2.Prediction, request_id: str) -> tuple[Forecast | None, str]:
    """Return the forecast, or why the instance refuses the request."""
    if prediction.request_id != request_id:
        raise ValueError(f"prediction.request_id: {prediction.request_id!r} is not the request asked about")
    if prediction.HasField("refusal"):
        return None, f"{prediction.refusal.field}: {prediction.refusal.reason}"
    if not prediction.HasField("forecast"):
        raise ValueError("prediction.forecast: is missing")
    return forecast_from(prediction.forecast), ""


def require_consistent(
    response: predictor_pb2.ReserveResponse, request: predictor_pb2.ReserveRequest, instance_id: str
) -> None:
    """Refuse a reply that does not fit the reservation that it answers."""
    if response.instance_id != instance_id:
        raise ValueError(f"instance_id: {response.instance_id!r} answers there")
    if response.result == predictor_pb2.RESERVE_RESULT_UNSPECIFIED:
        raise ValueError("result: is missing")
    if response.result == predictor_pb2.RESERVE_RESULT_CONFLICT and not request.HasField("if_version"):
        raise ValueError("result: is a conflict, but the reservation had no condition")
    if not 0 <= response.expires_in_s < 1e9:
        raise ValueError(f"expires_in_s: must be a time from 0 on, not {response.expires_in_s}")


def status_of(error: BaseException) -> CandidateStatus:
    """Return the status of a candidate whose sidecar failed with an error."""
    if isinstance(error, grpc.aio.AioRpcError):
        return CODES.get(error.code(), CandidateStatus.DOWN)
    if isinstance(error, TimeoutError):
        return CandidateStatus.LATE
    return CandidateStatus.INVALID if isinstance(error, ValueError) else CandidateStatus.DOWN


def note_of(error: BaseException) -> str:
    """Describe an error in a few words."""
    if isinstance(error, grpc.aio.AioRpcError):
        details = " ".join((error.details() or "").split()).removeprefix("requests[0].")[:200]
        return details if error.code() is grpc.StatusCode.INVALID_ARGUMENT else f"{error.code().name}: {details}"
    return str(error)[:200] or type(error).__name__
