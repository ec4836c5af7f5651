"""Errors as HTTP replies, in OpenAI's shape."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence

from scheduler.instances import OverloadedError
from services.http.json_body import JsonError
from services.rpc.errors import message_of, metadata_of, retry_after_s, status_of

RETRY_AFTER_S = 1

# By status: OpenAI's type, and the code where the error names none.
KINDS = {
    400: ("invalid_request_error", None),
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("invalid_request_error", "permission_denied"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "request_timeout"),
    413: ("invalid_request_error", "request_too_large"),
    414: ("invalid_request_error", "uri_too_long"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    431: ("invalid_request_error", "headers_too_large"),
    500: ("server_error", "internal_error"),
    502: ("server_error", "engine_failed"),
    503: ("server_error", "unavailable"),
    504: ("server_error", "engine_timeout"),
}

_FIELD = re.compile(r"^([a-z][\w.\[\]-]*): ")


class HttpError(Exception):
    """A refused request: the status of its reply, and the parts of its body."""

    def __init__(  # noqa: PLR0913 - the parts of an error
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        code: str | None = None,
        param: str | None = None,
        allowed: Sequence[str] = (),
    ) -> None:
        """Note what the client receives; `allowed` are the methods that a path takes."""
        super().__init__(message)
        self.status = status
        self.message = message
        usual_kind, usual_code, usual_param = self.usual(status, message)
        self.kind, self.code, self.param = kind or usual_kind, code or usual_code, param or usual_param
        self._allowed = allowed

    @staticmethod
    def usual(status: int, message: str) -> tuple[str | None, str | int | None, str | None]:
        """Return the type, the code and the parameter of an error that names none itself."""
        raise NotImplementedError

    def body(self) -> bytes:
        """Write the error object."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, separators=(",", ":")).encode()

    def event(self) -> bytes:
        """Write the error as the last event of a stream that has started."""
        return b"data: " + self.body() + b"\n\n"

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the reply."""
        headers = [(b"content-type", b"application/json")]
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        elif self.status == 405:
            headers.append((b"allow", ", ".join(self._allowed).encode()))
        return headers


class ApiError(HttpError):
    """An error in OpenAI's shape; a message that starts with a field's name and a colon names its parameter."""

    @staticmethod
    def usual(status: int, message: str) -> tuple[str | None, str | int | None, str | None]:
        """Return OpenAI's type and code of a status."""
        kind, code = KINDS.get(status, KINDS[500])
        field = _FIELD.match(message)
        return kind, code, field[1] if field else None

    @classmethod
    def of(cls, error: Exception) -> ApiError:
        """Turn any exception into an error, by the table of all statuses."""
        if isinstance(error, OverloadedError):
            return ShedError(error)
        if isinstance(error, JsonError):
            return cls(400, message_of(error), code=error.code, param=error.param)
        return error if isinstance(error, ApiError) else cls(status_of(error).http_code, message_of(error))

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the reply; 429 and 503 are worth a retry soon."""
        headers = super().headers()
        if self.status in (429, 503):
            headers.append((b"retry-after", b"%d" % self.seconds_to_wait()))
        return headers

    def seconds_to_wait(self) -> int:
        """Return the whole seconds after which the client may try again."""
        return RETRY_AFTER_S


class ShedError(ApiError):
    """The error of a request that is shed: its headers say why, and when a new attempt may succeed."""

    def __init__(self, error: OverloadedError) -> None:
        """Take the scheduler's error."""
        super().__init__(status_of(error).http_code, message_of(error))
        self._error = error

    def seconds_to_wait(self) -> int:
        """Round the scheduler's time up."""
        return max(RETRY_AFTER_S, math.ceil(retry_after_s(self._error) or 0.0))

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the reply."""
        return [*super().headers(), *((name.encode(), value.encode()) for name, value in metadata_of(self._error))]
