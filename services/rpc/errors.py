"""Exceptions that callers distinguish, and the one table of their statuses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError

from scheduler.instances import OverloadedError
from services.security.errors import NotAllowedError, UnauthenticatedError

MAX_MESSAGE = 500  # characters; messages travel in headers
MAX_RETRY_AFTER_S = 3600.0  # the longest advice to a refused request

# Of a request that is shed: trailing metadata of a call, and headers of a reply.
SHED_REASON, RETRY_AFTER_MS = "x-block-shed-reason", "x-block-retry-after-ms"


class BusyError(Exception):
    """A limit of concurrent work is reached."""


class UnknownNameError(Exception):
    """A name that is not known here, as of a model that no instance serves."""


class MisdirectedError(Exception):
    """A call that is addressed to another server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The statuses of an error, in gRPC and HTTP."""

    grpc_code: grpc.StatusCode
    http_code: int


INTERNAL = Status(grpc_code=grpc.StatusCode.INTERNAL, http_code=500)

# The first row of which an exception is an instance applies; any other exception is an internal error.
STATUSES: tuple[tuple[type[Exception], Status], ...] = (
    (DecodeError, Status(grpc_code=grpc.StatusCode.INVALID_ARGUMENT, http_code=400)),
    (ValueError, Status(grpc_code=grpc.StatusCode.INVALID_ARGUMENT, http_code=400)),
    (UnknownNameError, Status(grpc_code=grpc.StatusCode.NOT_FOUND, http_code=404)),
    (UnauthenticatedError, Status(grpc_code=grpc.StatusCode.UNAUTHENTICATED, http_code=401)),
    (NotAllowedError, Status(grpc_code=grpc.StatusCode.PERMISSION_DENIED, http_code=403)),
    (MisdirectedError, Status(grpc_code=grpc.StatusCode.FAILED_PRECONDITION, http_code=421)),
    (BusyError, Status(grpc_code=grpc.StatusCode.RESOURCE_EXHAUSTED, http_code=429)),
    (OverloadedError, Status(grpc_code=grpc.StatusCode.RESOURCE_EXHAUSTED, http_code=429)),
    (TimeoutError, Status(grpc_code=grpc.StatusCode.DEADLINE_EXCEEDED, http_code=504)),
    (ConnectionError, Status(grpc_code=grpc.StatusCode.UNAVAILABLE, http_code=503)),
)


def status_of(error: Exception) -> Status:
    """Look up the statuses of an exception."""
    return next((status for kind, status in STATUSES if isinstance(error, kind)), INTERNAL)


def message_of(error: Exception) -> str:
    """Return one short line for the caller; of internal errors it contains no details."""
    if status_of(error) is INTERNAL:
        return "internal error; the server's log has more"
    message = " ".join(str(error).split()) or type(error).__name__
    return message[:MAX_MESSAGE].encode("utf-8", "backslashreplace").decode()


def metadata_of(error: Exception) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata of a call that ends with an error: why a request is shed, and when to retry."""
    if not isinstance(error, OverloadedError):
        return ()
    reason = (SHED_REASON, error.reason)
    seconds = retry_after_s(error)
    return (reason,) if seconds is None else (reason, (RETRY_AFTER_MS, f"{1000 * seconds:.1f}"))


def retry_after_s(error: OverloadedError) -> float | None:
    """Return the time after which a request may be sent again, within bounds; None where it is unknown."""
    seconds = error.retry_after_s
    return min(seconds, MAX_RETRY_AFTER_S) if seconds is not None and 0 <= seconds < math.inf else None


def overloaded_from(message: str, metadata: Mapping[str, str]) -> OverloadedError | None:
    """Read the error of a call whose trailing metadata say that a request is shed; None where they do not."""
    reason = metadata.get(SHED_REASON, "")
    if not reason:
        return None
    try:
        seconds = float(metadata[RETRY_AFTER_MS]) / 1000
    except (KeyError, ValueError):
        seconds = None
    return OverloadedError(reason, message or "the request is shed", retry_after_s=seconds)
