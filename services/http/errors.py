"""What a client is told when its request is not served, in OpenAI's shape."""

from __future__ import annotations

import json
import re
from http import HTTPStatus

from services.rpc.errors import message_of, status_of

RETRY_AFTER_S = 1

# By status: OpenAI's type, and the code where no better one is known.
KINDS = {
    400: ("invalid_request_error", None),
    401: ("invalid_request_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "request_timeout"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    500: ("server_error", "internal_error"),
    502: ("server_error", "engine_failed"),
    503: ("server_error", "unavailable"),
    504: ("server_error", "engine_timeout"),
}
PASSING = (429, 503)  # worth trying again soon

_FIELD = re.compile(r"^([a-z][\w.\[\]-]*): ")


class ApiError(Exception):
    """A request that gets an error for an answer, with the status to tell."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        """Say what is wrong; a message that begins with a field's name and a colon names its parameter by itself."""
        super().__init__(message)
        self.status = status
        self.message = message
        kind, usual_code = KINDS.get(status, KINDS[500])
        self.kind = kind
        self.code = code or usual_code
        field = _FIELD.match(message)
        self.param = param or (field[1] if field else None)

    @classmethod
    def of(cls, error: Exception) -> ApiError:
        """Put any failure into words, by the table of all statuses."""
        return error if isinstance(error, ApiError) else cls(status_of(error).http_code, message_of(error))

    def body(self) -> bytes:
        """Write the error object."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    def event(self) -> bytes:
        """Write the error as an event of a stream that has begun already."""
        return b"data: " + self.body() + b"\n\n"

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Give the headers that go with it."""
        headers = [(b"content-type", b"application/json")]
        if self.status in PASSING:
            headers.append((b"retry-after", b"%d" % RETRY_AFTER_S))
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers
