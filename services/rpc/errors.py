"""What goes wrong in ways that callers are to tell apart, and the one table that says what they are told."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError

LONGEST_MESSAGE = 500  # characters; messages travel in headers


class BusyError(Exception):
    """As much is under way as may be."""


class UnknownNameError(Exception):
    """A name that stands for nothing here: a model that nobody serves."""


class NotAllowedError(Exception):
    """A call that its caller may not make."""


class MisdirectedError(Exception):
    """A call that was meant for somebody else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What a caller is told, on either kind of wire."""

    grpc_code: grpc.StatusCode
    http_code: int


INTERNAL = Status(grpc_code=grpc.StatusCode.INTERNAL, http_code=500)

# The first row that an exception is an instance of holds; what is in none of them is a fault of ours.
STATUSES: tuple[tuple[type[Exception], Status], ...] = (
    (DecodeError, Status(grpc_code=grpc.StatusCode.INVALID_ARGUMENT, http_code=400)),
    (ValueError, Status(grpc_code=grpc.StatusCode.INVALID_ARGUMENT, http_code=400)),
    (UnknownNameError, Status(grpc_code=grpc.StatusCode.NOT_FOUND, http_code=404)),
    (NotAllowedError, Status(grpc_code=grpc.StatusCode.PERMISSION_DENIED, http_code=403)),
    (MisdirectedError, Status(grpc_code=grpc.StatusCode.FAILED_PRECONDITION, http_code=421)),
    (BusyError, Status(grpc_code=grpc.StatusCode.RESOURCE_EXHAUSTED, http_code=429)),
    (TimeoutError, Status(grpc_code=grpc.StatusCode.DEADLINE_EXCEEDED, http_code=504)),
    (ConnectionError, Status(grpc_code=grpc.StatusCode.UNAVAILABLE, http_code=503)),
)


def status_of(error: Exception) -> Status:
    """Look an exception up."""
    return next((status for kind, status in STATUSES if isinstance(error, kind)), INTERNAL)


def message_of(error: Exception) -> str:
    """Put into one short line what a caller may know; of faults of ours, only that there was one."""
    if status_of(error) is INTERNAL:
        return "internal error; the server's log has more"
    message = " ".join(str(error).split()) or type(error).__name__
    return message[:LONGEST_MESSAGE].encode("utf-8", "backslashreplace").decode()
