"""Why a request is not placed, as the reply that its client gets."""

from __future__ import annotations

import grpc

from scheduler.instances import OverloadedError
from services.http.errors import ApiError, ShedError
from services.rpc.errors import message_of, status_of

# Statuses that blame the request: another scheduler would reply the same.
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.NOT_FOUND: 404,
}
# Statuses of a healthy scheduler that cannot place the request now; another one may.
UNWILLING = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.FAILED_PRECONDITION: 503,
}


def refusal(code: grpc.StatusCode, details: str) -> ApiError:
    """Convert a status that blames the request to the reply that the client gets."""
    message = (details or "the request was refused").removeprefix("request.")
    if code is grpc.StatusCode.NOT_FOUND:
        return ApiError(404, message, code="model_not_found", param="model")
    return ApiError(REFUSALS[code], message)


def refusal_of(error: Exception, within_s: float) -> ApiError:
    """Convert the error of a decision in this process, which may take `within_s`."""
    if isinstance(error, OverloadedError):
        return ShedError(error)
    code = status_of(error).grpc_code
    if code in REFUSALS:
        return refusal(code, message_of(error))
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return ApiError(503, f"no decision within {within_s:g} s")
    return ApiError(UNWILLING.get(code, 503), message_of(error))
